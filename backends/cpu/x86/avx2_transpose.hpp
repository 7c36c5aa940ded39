// SPDX-License-Identifier: MIT
#pragma once

#include <immintrin.h>

namespace {

inline void transpose(__m256 *z) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(z[i], z[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(z[i], z[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        z[k] = _mm256_permute2f128_ps(b[k], b[4 + k], 0x20);
        z[4 + k] = _mm256_permute2f128_ps(b[k], b[4 + k], 0x31);
    }
}

} // namespace
