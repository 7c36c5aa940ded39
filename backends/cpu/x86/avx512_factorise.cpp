// SPDX-License-Identifier: MIT
#include "cpu/factorise.hpp"
#include "cpu/x86/avx512_vec.hpp"
#include "cpu/x86/fold16.hpp"

namespace skerry {

namespace {

constexpr int product_rows = 4, product_vectors = 4;

inline Vec v_fold16(const float *x) { return _mm512_insertf32x8(_mm512_castps256_ps512(fold8(x)), fold8(x + 128), 1); }

} // namespace

} // namespace skerry

#include "cpu/factorise_body.hpp"

namespace skerry {

void skerry_cpu_avx512_factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result,
                                 void *scratch) {
    factorise_matrix(*params, rows, static_cast<uint8_t *>(part), result, scratch);
}

} // namespace skerry
