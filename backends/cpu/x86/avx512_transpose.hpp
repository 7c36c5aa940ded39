// SPDX-License-Identifier: MIT
#pragma once

#include <immintrin.h>

namespace {

inline void transpose(__m512 *z) {
    __m512 a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_ps(z[2 * i], z[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(z[2 * i], z[2 * i + 1]);
    }
    const auto low = [](__m512 x, __m512 y) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y))); };
    const auto high = [](__m512 x, __m512 y) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y))); };
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = low(a[i], a[i + 2]);
        b[i + 1] = high(a[i], a[i + 2]);
        b[i + 2] = low(a[i + 1], a[i + 3]);
        b[i + 3] = high(a[i + 1], a[i + 3]);
    }
    // b[4 g + k] holds, in quarter q, column 4 q + k of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512 even01 = _mm512_shuffle_f32x4(b[k], b[4 + k], 0x88), odd01 = _mm512_shuffle_f32x4(b[k], b[4 + k], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0x88), odd23 = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0xdd);
        z[k] = _mm512_shuffle_f32x4(even01, even23, 0x88);
        z[4 + k] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        z[8 + k] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        z[12 + k] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
}

} // namespace
