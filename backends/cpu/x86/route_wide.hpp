// SPDX-License-Identifier: MIT
#pragma once

// What route_body.hpp asks for, in registers of 512 bits. SKERRY_ROUTE_VNNI: with dot products of four bytes.

#include "cpu/x86/avx512_vec.hpp"

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

typedef __m512i Lines;

constexpr int register_segments = 4;

Lines no_lines() { return _mm512_setzero_si512(); }
Lines all_lines(int32_t x) { return _mm512_set1_epi32(x); }
Lines add_lines(Lines a, Lines b) { return _mm512_add_epi32(a, b); }

Lines load_lines(const uint8_t *const *key, ptrdiff_t at) {
    const auto line = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(key[4 * i] + at)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(line(0)), line(1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(line(2)), line(3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

Lines lowest_field(Lines codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(3)); }
Lines next_field(Lines codes) { return _mm512_srli_epi32(codes, 2); }

Lines load_query(const void *at) {
    int32_t four;
    std::memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

#if defined(SKERRY_ROUTE_VNNI)
constexpr int lines_before_widening = 1 << 20;
// The intrinsic makes g++ 12 copy every accumulator once per step.
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
Lines twice(Lines sum) { return _mm512_add_epi32(sum, sum); }
#else
// A pair of products reaches 2 * 3 * 127, so a line of four fields 3,048 of the 32,767 of a 16-bit sum.
constexpr int lines_before_widening = 10;
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(unsigned_bytes, signed_bytes));
}
Lines twice(Lines sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(2)); }
#endif

Lines load_sums(const int32_t *at) { return _mm512_loadu_si512(at); }
void store_sums(int32_t *at, Lines x) { _mm512_storeu_si512(at, x); }

Lines up_words(Lines x, int bits) { return _mm512_slli_epi16(x, static_cast<unsigned>(bits)); }
Lines down_words(Lines x, int bits) { return _mm512_srai_epi16(x, static_cast<unsigned>(bits)); }
Lines word_dots(Lines x, Lines y) { return _mm512_madd_epi16(x, y); }

typedef __m512 Row;

constexpr int row_segments = 16;

Row load_row(const float *at) { return v_load(at); }
void store_row(float *at, Row x) { v_store(at, x); }
Row all_row(float x) { return v_set1(x); }
Row max_rows(Row x, Row y) { return v_max(x, y); }
Row min_rows(Row x, Row y) { return _mm512_min_ps(x, y); }
Row fma_rows(Row x, Row y, Row z) { return v_fma(x, y, z); }
bool any_above(Row x, Row y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
Row rows_from(float least, Row x) { return v_below(x, all_row(least), v_zero(), x); }

// A register holds segments k, 4 + k, 8 + k and 12 + k; one row is the block.
void transpose_sums(const int32_t *sums, int, Row (&out)[4]) {
    Lines four[4];
    for (int k = 0; k < 4; ++k)
        four[k] = load_sums(sums + 16 * k);
    const Lines ab_low = _mm512_unpacklo_epi32(four[0], four[1]), ab_high = _mm512_unpackhi_epi32(four[0], four[1]);
    const Lines cd_low = _mm512_unpacklo_epi32(four[2], four[3]), cd_high = _mm512_unpackhi_epi32(four[2], four[3]);
    out[0] = _mm512_cvtepi32_ps(_mm512_unpacklo_epi64(ab_low, cd_low));
    out[1] = _mm512_cvtepi32_ps(_mm512_unpackhi_epi64(ab_low, cd_low));
    out[2] = _mm512_cvtepi32_ps(_mm512_unpacklo_epi64(ab_high, cd_high));
    out[3] = _mm512_cvtepi32_ps(_mm512_unpackhi_epi64(ab_high, cd_high));
}

Vec load_counts(const uint8_t *at, int c) {
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(at), static_cast<unsigned>(8 * c));
    return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xff)));
}

Vec from_halves(__m128i low, __m128i high) { return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1)); }

// Held at 2^-125. The polynomial has the least largest error that one of degree 4 with p(0) = 1 has, 2.9e-6 of the value.
void exp2_rows(Row (&x)[4], float level) {
    for (int i = 0; i < 4; ++i) {
        const Row held = v_max(x[i], v_set1(level - 125.0f)), n = v_round(held), r = v_sub(held, n);
        Row p = v_set1(0x1.3a02ccp-7f);
        p = v_fma(p, r, v_set1(0x1.c9fc46p-5f));
        p = v_fma(p, r, v_set1(0x1.ec0378p-3f));
        p = v_fma(p, r, v_set1(0x1.62e12cp-1f));
        p = v_fma(p, r, v_set1(1.0f));
        x[i] = _mm512_scalef_ps(p, v_sub(n, v_set1(level)));
    }
}

} // namespace

} // namespace skerry
