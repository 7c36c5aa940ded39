// SPDX-License-Identifier: MIT
#include "cpu/factorise.hpp"
#include "cpu/x86/avx2_vec.hpp"
#include "cpu/x86/fold16.hpp"

namespace skerry {

namespace {

// Accumulators of a product: 2 x 2 vectors of two registers.
constexpr int product_rows = 2, product_vectors = 2;

inline Vec v_fold16(const float *x) { return {fold8(x), fold8(x + 128)}; }

} // namespace

} // namespace skerry

#include "cpu/factorise_body.hpp"

namespace skerry {

void skerry_cpu_avx2_factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result,
                               void *scratch) {
    factorise_matrix(*params, rows, static_cast<uint8_t *>(part), result, scratch);
}

} // namespace skerry
