// SPDX-License-Identifier: MIT
#pragma once

// Sixteen lanes as one AVX-512 register. Everything is static: a copy of an inline function that was compiled for this
// instruction set must never be the one that the linker keeps for all.

#include <immintrin.h>

#include <cstdint>

namespace skerry {

typedef __m512 Vec;
typedef __m512i IVec;

// Registers of accumulators per step: heads x (tiles or vectors of channels).
static constexpr int value_chunk = 4;

static inline Vec v_zero() { return _mm512_setzero_ps(); }
static inline Vec v_set1(float x) { return _mm512_set1_ps(x); }
static inline Vec v_load(const float *at) { return _mm512_loadu_ps(at); }
static inline void v_store(float *at, Vec x) { _mm512_storeu_ps(at, x); }
static inline Vec v_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec v_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec v_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec v_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec v_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec v_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline float v_first_of(Vec x) { return _mm512_cvtss_f32(x); }
static inline Vec v_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec v_fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Vec v_abs(Vec x) { return _mm512_abs_ps(x); }
static inline Vec v_sqrt(Vec x) { return _mm512_sqrt_ps(x); }

static inline __mmask16 v_first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

static inline Vec v_load_f16(const void *at) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(at))); }
static inline Vec v_load_bf16(const void *at) {
    const __m256i x = _mm256_loadu_si256(static_cast<const __m256i *>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// The first n elements; the rest is 0 and not read.
static inline Vec v_load_n(const float *at, int n) { return _mm512_maskz_loadu_ps(v_first(n), at); }
static inline Vec v_load_f16_n(const void *at, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_first(n), at)); }
static inline Vec v_load_bf16_n(const void *at, int n) {
    const __m256i x = _mm256_maskz_loadu_epi16(v_first(n), at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline Vec v_load_i8(const void *at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(at))));
}
// Sixteen numbers of four bits, the first in the low bits.
static inline Vec v_load_u4(const void *at) {
    int32_t word[2];
    __builtin_memcpy(word, at, 8);
    const __m512i words = _mm512_inserti64x4(_mm512_set1_epi32(word[0]), _mm256_set1_epi32(word[1]), 1);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi32(15)));
}
// Rounds to nearest, ties to even.
static inline void v_store_f16(void *at, Vec x) {
    _mm256_storeu_si256(static_cast<__m256i *>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void v_store_n(float *at, Vec x, int n) { _mm512_mask_storeu_ps(at, v_first(n), x); }

// x in lanes [begin, end), `other` elsewhere.
static inline Vec v_keep(Vec x, int begin, int end, Vec other) {
    const uint32_t mask = ((1u << end) - 1u) & ~((1u << begin) - 1u);
    return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), other, x);
}
// a where x < y, else b.
static inline Vec v_below(Vec x, Vec y, Vec a, Vec b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a); }

static inline IVec i_load_n(const void *at, int n) { return _mm512_maskz_loadu_epi32(v_first(n), at); }
static inline IVec i_lanes(int32_t first) {
    return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
static inline IVec i_add(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
static inline IVec i_set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
static inline IVec i_right_by(IVec x, IVec shift) { return _mm512_srlv_epi32(x, shift); }
static inline IVec i_and(IVec a, IVec b) { return _mm512_and_si512(a, b); }
static inline IVec i_sub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
static inline IVec i_zero() { return _mm512_setzero_si512(); }
template <int by>
static inline IVec i_left(IVec x) {
    return _mm512_slli_epi32(x, by);
}
template <int by>
static inline IVec i_right_signed(IVec x) {
    return _mm512_srai_epi32(x, by);
}
// The low bytes of the lanes.
static inline void i_store_bytes(void *at, IVec x) { _mm_storeu_si128(static_cast<__m128i *>(at), _mm512_cvtepi32_epi8(x)); }
static inline int32_t i_sum(IVec x) { return _mm512_reduce_add_epi32(x); }
static inline Vec i_to_f32(IVec x) { return _mm512_cvtepi32_ps(x); }
// Bits [shift, shift + ...) under `mask` as a number.
static inline Vec i_field(IVec x, int shift, IVec mask) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), mask));
}
static inline Vec v_round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline IVec v_to_i32(Vec x) { return _mm512_cvtps_epi32(x); }
// -x where the bit of `flag` is set.
static inline Vec v_flip_if(Vec x, IVec number, uint32_t flag) {
    return _mm512_mask_sub_ps(x, _mm512_test_epi32_mask(number, i_set1(flag)), _mm512_setzero_ps(), x);
}
static inline Vec v_choose(IVec number, uint32_t flag, Vec set, Vec clear) {
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(number, i_set1(flag)), clear, set);
}

// angle = n pi/2 + r for any angle that f32 positions reach; n modulo 2^32.
static inline void v_reduce_angle(Vec angle, Vec *r, IVec *n) {
    __m256 rest_of[2];
    __m256i turns_of[2];
    for (int half = 0; half < 2; ++half) {
        const __m512d x = _mm512_cvtps_pd(half == 0 ? _mm512_castps512_ps256(angle) : _mm512_extractf32x8_ps(angle, 1));
        const __m512d turns =
            _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(0x1.45f306dc9c883p-1)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m512d rest = _mm512_fnmadd_pd(turns, _mm512_set1_pd(0x1.921fb54442d18p+0), x);
        rest = _mm512_fnmadd_pd(turns, _mm512_set1_pd(0x1.1a62633145c07p-54), rest);
        rest_of[half] = _mm512_cvtpd_ps(rest);
        turns_of[half] = _mm512_cvtpd_epi32(turns);
    }
    *r = _mm512_insertf32x8(_mm512_castps256_ps512(rest_of[0]), rest_of[1], 1);
    *n = _mm512_inserti64x4(_mm512_castsi256_si512(turns_of[0]), turns_of[1], 1);
}

static inline float v_sum(Vec x) { return _mm512_reduce_add_ps(x); }
static inline float v_largest(Vec x) { return _mm512_reduce_max_ps(x); }

// exp for x <= 0, -inf included: 2^n times a polynomial of degree 6 on |r| <= ln 2 / 2, relative error below 2e-7.
static inline Vec v_exp(Vec x) {
    const Vec n = v_round(v_mul(x, v_set1(0x1.715476p+0f)));
    // A clamped n leaves r unbounded only where the result is 0 anyway; the polynomial must not see an infinity.
    const Vec held = v_max(n, v_set1(-160.0f));
    Vec r = v_fnma(held, v_set1(0x1.62e400p-1f), v_max(x, v_set1(-120.0f)));
    r = v_fnma(held, v_set1(0x1.7f7d1cp-20f), r);
    Vec p = v_set1(0x1.6a21acp-10f);
    p = v_fma(p, r, v_set1(0x1.123b6ap-7f));
    p = v_fma(p, r, v_set1(0x1.5558fap-5f));
    p = v_fma(p, r, v_set1(0x1.555490p-3f));
    p = v_fma(p, r, v_set1(0x1.fffffcp-2f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return _mm512_scalef_ps(p, n);
}

// Distances 1, 2, 4 and 8 of the butterflies, those below `n`: (a + b, a - b).
static inline Vec v_butterfly(Vec x, int n) {
    const Vec one = v_set1(1.0f), minus = v_set1(-1.0f);
    if (n > 1) x = v_fma(x, _mm512_mask_blend_ps(0xaaaa, one, minus), _mm512_permute_ps(x, 0xb1));
    if (n > 2) x = v_fma(x, _mm512_mask_blend_ps(0xcccc, one, minus), _mm512_permute_ps(x, 0x4e));
    if (n > 4) x = v_fma(x, _mm512_mask_blend_ps(0xf0f0, one, minus), _mm512_shuffle_f32x4(x, x, 0xb1));
    if (n > 8) x = v_fma(x, _mm512_mask_blend_ps(0xff00, one, minus), _mm512_shuffle_f32x4(x, x, 0x4e));
    return x;
}

// Sixteen vectors, one after the other in memory, to one: lane i is the largest of vector i, or its sum.
template <Vec (*op)(Vec, Vec)>
static inline Vec reduce16_by(const float *x) {
    Vec quad[4];
    for (int i = 0; i < 4; ++i) {
        const Vec a = v_load(x + 64 * i), b = v_load(x + 64 * i + 16), c = v_load(x + 64 * i + 32), d = v_load(x + 64 * i + 48);
        const __m512d ab = _mm512_castps_pd(op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(op(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quad[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    const Vec low = op(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    const Vec high = op(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return op(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
static inline Vec v_reduce16_max(const float *x) { return reduce16_by<v_max>(x); }
static inline Vec v_reduce16_add(const float *x) { return reduce16_by<v_add>(x); }

} // namespace skerry
