// SPDX-License-Identifier: MIT
#pragma once

// What route_body.hpp asks for, in registers of 512 bits. SKERRY_ROUTE_VNNI: with dot products of four bytes.

#include "cpu/x86/avx512_vec.hpp"

namespace skerry {

namespace {

typedef __m512i Lines;

constexpr int lines_at_once = 4;
constexpr int heads_at_once = 4;

Lines no_lines() { return _mm512_setzero_si512(); }
Lines add_lines(Lines a, Lines b) { return _mm512_add_epi32(a, b); }

Lines load_lines(const uint8_t *at, int lines) {
    if (lines >= lines_at_once) return _mm512_loadu_si512(at);
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (4 * lines)) - 1u), at);
}

Lines lowest_field(Lines codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(3)); }
Lines next_field(Lines codes) { return _mm512_srli_epi32(codes, 2); }

Lines load_query(const int8_t *at) { return _mm512_loadu_si512(at); }

#if defined(SKERRY_ROUTE_VNNI)
constexpr int steps_before_widening = 1 << 20;
// The intrinsic makes g++ 12 copy every accumulator once per step.
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
Lines widen(Lines sum) { return sum; }
#else
// A pair of products reaches 2 * 3 * 127, so a step of four fields 3,048 of the 32,767 of a 16-bit sum.
constexpr int steps_before_widening = 8;
void add_dots(Lines &sum, Lines unsigned_bytes, Lines signed_bytes) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(unsigned_bytes, signed_bytes));
}
Lines widen(Lines sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
#endif

void store_dots(const Lines (&x)[lines_at_once], float *dots) {
    const Lines ab = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88), _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
    const Lines cd = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x88), _mm512_shuffle_i32x4(x[2], x[3], 0xdd));
    const Lines all = _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
    _mm512_storeu_ps(dots, _mm512_cvtepi32_ps(all));
}

// Lane 4 i + k of an unpacked vector is segment 4 k + i.
void transpose(const float *rows, Vec (&out)[4]) {
    const Vec a = v_load(rows), b = v_load(rows + 16), c = v_load(rows + 32), d = v_load(rows + 48);
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    out[0] = _mm512_permutexvar_ps(order, _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low)));
    out[1] = _mm512_permutexvar_ps(order, _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low)));
    out[2] = _mm512_permutexvar_ps(order, _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)));
    out[3] = _mm512_permutexvar_ps(order, _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high)));
}

Vec load_bytes(const uint8_t *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))));
}

Vec exp_of(Vec x) { return v_exp(x); }

// x = m 2^n, m in [0.75, 1.5); log m = 2 artanh((m - 1) / (m + 1)), whose series leaves 4e-9 beyond the last term.
Vec log_of(Vec x) {
    const Vec m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    const Vec n = _mm512_getexp_ps(_mm512_div_ps(x, m));
    const Vec s = v_div(v_sub(m, v_set1(1.0f)), v_add(m, v_set1(1.0f))), square = v_mul(s, s);
    Vec p = v_set1(2.0f / 9.0f);
    p = v_fma(p, square, v_set1(2.0f / 7.0f));
    p = v_fma(p, square, v_set1(2.0f / 5.0f));
    p = v_fma(p, square, v_set1(2.0f / 3.0f));
    p = v_fma(p, square, v_set1(2.0f));
    return v_fma(n, v_set1(0x1.62e430p-1f), v_mul(p, s));
}

} // namespace

} // namespace skerry
