// SPDX-License-Identifier: MIT
#include "cpu/route.hpp"

#include "cpu/x86/avx2_vec.hpp"

namespace skerry {

namespace {

// What route_body.hpp asks for, in registers of 256 bits.

typedef __m256i Lines;

constexpr int lines_at_once = 2;
constexpr int heads_at_once = 4;

Lines no_lines() { return _mm256_setzero_si256(); }
Lines add_lines(Lines a, Lines b) { return _mm256_add_epi32(a, b); }

Lines load_lines(const uint8_t *at, int lines) {
    if (lines >= lines_at_once) return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

Lines lowest_field(Lines codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(3)); }
Lines next_field(Lines codes) { return _mm256_srli_epi32(codes, 2); }

Lines load_query(const int8_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }

// A pair of products reaches 2 * 3 * 127, so a step of four fields 3,048 of the 32,767 of a 16-bit sum.
constexpr int steps_before_widening = 8;
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    // From intrinsics g++ 12 makes all products before it adds any, and spills the sums.
    Lines product;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(unsigned_bytes), "x"(signed_bytes));
}
Lines widen(Lines sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

void store_dots(const Lines (&x)[lines_at_once], float *dots) {
    const Lines all = _mm256_add_epi32(_mm256_permute2x128_si256(x[0], x[1], 0x20), _mm256_permute2x128_si256(x[0], x[1], 0x31));
    _mm256_storeu_ps(dots, _mm256_cvtepi32_ps(all));
}

// Eight segments: lane 4 i + k of an unpacked vector is segment 2 k + i.
void transpose_half(const float *rows, __m256 *out) {
    const __m256 a = _mm256_loadu_ps(rows), b = _mm256_loadu_ps(rows + 8), c = _mm256_loadu_ps(rows + 16), d = _mm256_loadu_ps(rows + 24);
    const __m256d ab_low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d cd_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    out[0] = _mm256_permutevar8x32_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_low, cd_low)), order);
    out[1] = _mm256_permutevar8x32_ps(_mm256_castpd_ps(_mm256_unpackhi_pd(ab_low, cd_low)), order);
    out[2] = _mm256_permutevar8x32_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high)), order);
    out[3] = _mm256_permutevar8x32_ps(_mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high)), order);
}

void transpose(const float *rows, Vec (&out)[4]) {
    __m256 low[4], high[4];
    transpose_half(rows, low);
    transpose_half(rows + 32, high);
    for (int i = 0; i < 4; ++i)
        out[i] = {low[i], high[i]};
}

__m256 load_eight_bytes(const uint8_t *at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at))));
}
Vec load_bytes(const uint8_t *at) { return {load_eight_bytes(at), load_eight_bytes(at + 8)}; }

// x = m 2^n, m in [0.75, 1.5); log m = 2 artanh((m - 1) / (m + 1)), whose series leaves 4e-9 beyond the last term.
__m256 log_half(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), above = _mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f400000));
    const __m256i exponent = _mm256_srai_epi32(above, 23);
    const __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(exponent, 23)));
    const __m256 one = _mm256_set1_ps(1.0f), s = _mm256_div_ps(_mm256_sub_ps(m, one), _mm256_add_ps(m, one)), square = _mm256_mul_ps(s, s);
    __m256 p = _mm256_set1_ps(2.0f / 9.0f);
    p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.0f / 7.0f));
    p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.0f / 5.0f));
    p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.0f / 3.0f));
    p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.0f));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(exponent), _mm256_set1_ps(0x1.62e430p-1f), _mm256_mul_ps(p, s));
}

// exp for x <= 0, held at -87: what weighs 1e-38 of the largest counts for nothing. One constant for ln 2 leaves 2e-8 per power of two.
__m256 exp_half(__m256 x) {
    const __m256 held = _mm256_max_ps(x, _mm256_set1_ps(-87.0f)), to_whole = _mm256_set1_ps(0x1.8p23f);
    const __m256 shifted = _mm256_fmadd_ps(held, _mm256_set1_ps(0x1.715476p+0f), to_whole);
    const __m256 r = _mm256_fnmadd_ps(_mm256_sub_ps(shifted, to_whole), _mm256_set1_ps(0x1.62e430p-1f), held);
    __m256 p = _mm256_set1_ps(1.0f / 120.0f); // Taylor series: |r| <= ln 2 / 2 leaves 3e-6
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23); // the low bits of `shifted` are the power
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
}
Vec exp_of(Vec x) { return {exp_half(x.a), exp_half(x.b)}; }
Vec log_of(Vec x) { return {log_half(x.a), log_half(x.b)}; }

} // namespace

} // namespace skerry

#include "cpu/x86/route_body.hpp"

namespace skerry {

void skerry_cpu_avx2_route(const skerry_route_params *params, const skerry_route_task *task) { route_segments(params, task); }

} // namespace skerry
