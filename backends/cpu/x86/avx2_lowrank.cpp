// SPDX-License-Identifier: MIT
#include "cpu/x86/avx2_vec.hpp"
#include "cpu/x86/x86.hpp"

namespace skerry {

namespace {

constexpr int product_rows = 2, product_vectors = 2;

}

} // namespace skerry

#include "cpu/x86/lowrank_body.hpp"

namespace skerry {

void skerry_cpu_avx2_decode_lowrank(const skerry_code_params *params, const void *part, float *rows, void *scratch) {
    decode_lowrank_part(*params, static_cast<const uint8_t *>(part), rows, static_cast<float *>(scratch));
}

} // namespace skerry
