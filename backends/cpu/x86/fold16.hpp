// SPDX-License-Identifier: MIT
#pragma once

// Sums of the lanes of sixteen vectors in the order that factorise_body.hpp lays down: lane i + lane i + 8, then lanes 0 + 2 and 1 + 3 of
// each half, their sum, and the halves.

#include <immintrin.h>

namespace skerry {

// Of eight vectors of sixteen lanes, one after the other in memory.
static inline __m256 fold8(const float *x) {
    __m256 half[8], quad[2];
    for (int i = 0; i < 8; ++i)
        half[i] = _mm256_add_ps(_mm256_loadu_ps(x + 16 * i), _mm256_loadu_ps(x + 16 * i + 8));
    for (int i = 0; i < 2; ++i) {
        const __m256 *const y = half + 4 * i;
        const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(y[0], y[1]), _mm256_unpackhi_ps(y[0], y[1])));
        const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(y[2], y[3]), _mm256_unpackhi_ps(y[2], y[3])));
        quad[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

} // namespace skerry
