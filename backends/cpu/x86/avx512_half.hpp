// SPDX-License-Identifier: MIT
#pragma once

#include <immintrin.h>

namespace {

// Integer arithmetic: the conversion instruction flushes small numbers to zero.
inline __m256i to_bf16(__m512 a) {
    const __m512i bits = _mm512_castps_si512(a), upper = _mm512_srli_epi32(bits, 16);
    const __m512i tie = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, tie), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40)));
}

} // namespace
