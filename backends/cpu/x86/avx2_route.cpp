// SPDX-License-Identifier: MIT
#include "cpu/route.hpp"

#include "cpu/x86/avx2_vec.hpp"

namespace skerry {

namespace {

// What route_body.hpp asks for, in registers of 256 bits.

typedef __m256i Lines;

constexpr int register_segments = 2;

Lines no_lines() { return _mm256_setzero_si256(); }
Lines all_lines(int32_t x) { return _mm256_set1_epi32(x); }
Lines add_lines(Lines a, Lines b) { return _mm256_add_epi32(a, b); }

Lines load_lines(const uint8_t *const *key, ptrdiff_t at) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(key[0] + at));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128(reinterpret_cast<const __m128i *>(key[4] + at)), 1);
}

Lines lowest_field(Lines codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(3)); }
Lines next_field(Lines codes) { return _mm256_srli_epi32(codes, 2); }

Lines load_query(const void *at) {
    int32_t four;
    std::memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

// A pair of products reaches 2 * 3 * 127, so a line of four fields 3,048 of the 32,767 of a 16-bit sum.
constexpr int lines_before_widening = 10;
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    // From intrinsics g++ 12 makes all products before it adds any, and spills the sums.
    Lines product;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(unsigned_bytes), "x"(signed_bytes));
}
Lines twice(Lines sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(2)); }

Lines load_sums(const int32_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
void store_sums(int32_t *at, Lines x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), x); }

Lines up_words(Lines x, int bits) { return _mm256_slli_epi16(x, bits); }
Lines down_words(Lines x, int bits) { return _mm256_srai_epi16(x, bits); }
Lines word_dots(Lines x, Lines y) { return _mm256_madd_epi16(x, y); }

typedef __m256 Row;

constexpr int row_segments = 8;

Row load_row(const float *at) { return _mm256_loadu_ps(at); }
void store_row(float *at, Row x) { _mm256_storeu_ps(at, x); }
Row all_row(float x) { return _mm256_set1_ps(x); }
Row max_rows(Row x, Row y) { return _mm256_max_ps(x, y); }
Row min_rows(Row x, Row y) { return _mm256_min_ps(x, y); }
Row fma_rows(Row x, Row y, Row z) { return _mm256_fmadd_ps(x, y, z); }
bool any_above(Row x, Row y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ)) != 0; }
Row rows_from(float least, Row x) { return _mm256_and_ps(x, _mm256_cmp_ps(x, all_row(least), _CMP_GE_OQ)); }

// Eight segments from `row` on, of which a register holds k and 4 + k.
void transpose_sums(const int32_t *sums, int row, Row (&out)[4]) {
    Lines pair[4];
    for (int k = 0; k < 4; ++k)
        pair[k] = load_sums(sums + 4 * row + 8 * k);
    const Lines ab_low = _mm256_unpacklo_epi32(pair[0], pair[1]), ab_high = _mm256_unpackhi_epi32(pair[0], pair[1]);
    const Lines cd_low = _mm256_unpacklo_epi32(pair[2], pair[3]), cd_high = _mm256_unpackhi_epi32(pair[2], pair[3]);
    out[0] = _mm256_cvtepi32_ps(_mm256_unpacklo_epi64(ab_low, cd_low));
    out[1] = _mm256_cvtepi32_ps(_mm256_unpackhi_epi64(ab_low, cd_low));
    out[2] = _mm256_cvtepi32_ps(_mm256_unpacklo_epi64(ab_high, cd_high));
    out[3] = _mm256_cvtepi32_ps(_mm256_unpackhi_epi64(ab_high, cd_high));
}

__m256 eight_counts(const uint8_t *at, int c) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words, 8 * c), _mm256_set1_epi32(0xff)));
}
Vec load_counts(const uint8_t *at, int c) { return {eight_counts(at, c), eight_counts(at + 32, c)}; }

Vec from_halves(__m128i low, __m128i high) { return {_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)}; }

// Held at 2^-125. The polynomial has the least largest error that one of degree 4 with p(0) = 1 has, 2.9e-6 of the value.
void exp2_rows(Row (&x)[4], float level) {
    const Row to_whole = all_row(0x1.8p23f - level), least = all_row(level - 125.0f);
    Row shifted[4], p[4];
    for (int i = 0; i < 4; ++i)
        x[i] = max_rows(x[i], least);
    for (int i = 0; i < 4; ++i)
        shifted[i] = x[i] + to_whole;
    for (int i = 0; i < 4; ++i)
        x[i] = x[i] - (shifted[i] - to_whole);
    for (int i = 0; i < 4; ++i)
        p[i] = fma_rows(all_row(0x1.3a02ccp-7f), x[i], all_row(0x1.c9fc46p-5f));
    for (int i = 0; i < 4; ++i)
        p[i] = fma_rows(p[i], x[i], all_row(0x1.ec0378p-3f));
    for (int i = 0; i < 4; ++i)
        p[i] = fma_rows(p[i], x[i], all_row(0x1.62e12cp-1f));
    for (int i = 0; i < 4; ++i)
        p[i] = fma_rows(p[i], x[i], all_row(1.0f));
    for (int i = 0; i < 4; ++i) {
        const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted[i]), 23); // the low bits of `shifted` are the power
        x[i] = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p[i]), power));
    }
}

} // namespace

} // namespace skerry

#include "cpu/x86/route_body.hpp"

namespace skerry {

void skerry_cpu_avx2_route(const skerry_route_params *params, const skerry_route_task *task) { route_segments(params, task); }

} // namespace skerry
