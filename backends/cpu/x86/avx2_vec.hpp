// SPDX-License-Identifier: MIT
#pragma once

// Sixteen lanes as two AVX2 registers; the operations of avx512_vec.hpp.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace skerry {

struct Vec {
    __m256 a, b;
};
struct IVec {
    __m256i a, b;
};

static constexpr int value_chunk = 1;

static inline Vec v_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Vec v_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vec v_load(const float *at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
static inline void v_store(float *at, Vec x) {
    _mm256_storeu_ps(at, x.a);
    _mm256_storeu_ps(at + 8, x.b);
}
static inline Vec v_add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline Vec v_sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline Vec v_mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline Vec v_div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline Vec v_max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline Vec v_min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline float v_first_of(Vec x) { return _mm256_cvtss_f32(x.a); }
static inline Vec v_fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline Vec v_fnma(Vec x, Vec y, Vec z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
static inline Vec v_abs(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

static inline Vec v_sqrt(Vec x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

static inline Vec v_load_f16(const void *at) {
    const __m128i *const half = static_cast<const __m128i *>(at);
    return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
static inline Vec v_load_bf16(const void *at) {
    const __m128i *const half = static_cast<const __m128i *>(at);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(half)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1)), 16))};
}

static inline Vec v_load_i8(const void *at) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i *>(at));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
// Sixteen numbers of four bits, the first in the low bits.
static inline Vec v_load_u4(const void *at) {
    int32_t word[2];
    std::memcpy(word, at, 8);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), mask = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word[0]), shift), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word[1]), shift), mask))};
}
// Rounds to nearest, ties to even.
static inline void v_store_f16(void *at, Vec x) {
    __m128i *const half = static_cast<__m128i *>(at);
    _mm_storeu_si128(half, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(half + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m256i lane_numbers(int first) {
    return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// All bits in the first n lanes of 16.
static inline IVec i_first(int n) {
    const __m256i end = _mm256_set1_epi32(n);
    return {_mm256_cmpgt_epi32(end, lane_numbers(0)), _mm256_cmpgt_epi32(end, lane_numbers(8))};
}

static inline Vec v_load_n(const float *at, int n) {
    if (n == 16) return v_load(at);
    const IVec mask = i_first(n);
    return {_mm256_maskload_ps(at, mask.a), n > 8 ? _mm256_maskload_ps(at + 8, mask.b) : _mm256_setzero_ps()};
}
static inline Vec v_load_f16_n(const void *at, int n) {
    if (n == 16) return v_load_f16(at);
    uint16_t half[16] = {};
    std::memcpy(half, at, 2 * static_cast<size_t>(n));
    return v_load_f16(half);
}
static inline Vec v_load_bf16_n(const void *at, int n) {
    if (n == 16) return v_load_bf16(at);
    uint16_t half[16] = {};
    std::memcpy(half, at, 2 * static_cast<size_t>(n));
    return v_load_bf16(half);
}
static inline void v_store_n(float *at, Vec x, int n) {
    if (n == 16) {
        v_store(at, x);
        return;
    }
    const IVec mask = i_first(n);
    _mm256_maskstore_ps(at, mask.a, x.a);
    if (n > 8) _mm256_maskstore_ps(at + 8, mask.b, x.b);
}

// x in lanes [begin, end), `other` elsewhere.
static inline Vec v_keep(Vec x, int begin, int end, Vec other) {
    const IVec upto = i_first(end), before = i_first(begin);
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(_mm256_andnot_si256(before.a, upto.a))),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(_mm256_andnot_si256(before.b, upto.b)))};
}
// p where x < y, else q.
static inline Vec v_below(Vec x, Vec y, Vec p, Vec q) {
    return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

static inline IVec i_load_n(const void *at, int n) {
    const int *const words = static_cast<const int *>(at);
    if (n == 16) {
        return {_mm256_loadu_si256(static_cast<const __m256i *>(at)), _mm256_loadu_si256(static_cast<const __m256i *>(at) + 1)};
    }
    const IVec mask = i_first(n);
    return {_mm256_maskload_epi32(words, mask.a), n > 8 ? _mm256_maskload_epi32(words + 8, mask.b) : _mm256_setzero_si256()};
}
static inline IVec i_lanes(int32_t first) { return {lane_numbers(first), lane_numbers(first + 8)}; }
static inline IVec i_add(IVec x, IVec y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline IVec i_set1(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))}; }
static inline IVec i_right_by(IVec x, IVec shift) { return {_mm256_srlv_epi32(x.a, shift.a), _mm256_srlv_epi32(x.b, shift.b)}; }
static inline IVec i_and(IVec x, IVec y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline IVec i_sub(IVec x, IVec y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline IVec i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
template <int by>
static inline IVec i_left(IVec x) {
    return {_mm256_slli_epi32(x.a, by), _mm256_slli_epi32(x.b, by)};
}
template <int by>
static inline IVec i_right_signed(IVec x) {
    return {_mm256_srai_epi32(x.a, by), _mm256_srai_epi32(x.b, by)};
}
// The low bytes of the lanes.
static inline void i_store_bytes(void *at, IVec x) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i bytes = _mm256_packus_epi16(words, words); // 0-3, 8-11 in the low half, 4-7, 12-15 in the high one
    const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    _mm_storeu_si128(static_cast<__m128i *>(at), _mm256_castsi256_si128(in_order));
}
static inline int32_t i_sum(IVec x) {
    const __m256i all = _mm256_add_epi32(x.a, x.b);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
static inline Vec i_to_f32(IVec x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline Vec i_field(IVec x, int shift, IVec mask) {
    const __m128i by = _mm_cvtsi32_si128(shift);
    return i_to_f32(i_and({_mm256_srl_epi32(x.a, by), _mm256_srl_epi32(x.b, by)}, mask));
}
static inline Vec v_round(Vec x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline IVec v_to_i32(Vec x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
// Sign bits of the lanes whose number has the bit `flag`, moved there.
static inline __m256 flag_sign(__m256i number, uint32_t flag) {
    const __m256i bit = _mm256_set1_epi32(static_cast<int>(flag));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(number, bit), bit));
}
static inline Vec v_flip_if(Vec x, IVec number, uint32_t flag) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, _mm256_and_ps(sign, flag_sign(number.a, flag))),
            _mm256_xor_ps(x.b, _mm256_and_ps(sign, flag_sign(number.b, flag)))};
}
static inline Vec v_choose(IVec number, uint32_t flag, Vec set, Vec clear) {
    return {_mm256_blendv_ps(clear.a, set.a, flag_sign(number.a, flag)), _mm256_blendv_ps(clear.b, set.b, flag_sign(number.b, flag))};
}

// angle = n pi/2 + r for any angle that f32 positions reach; n modulo 2^32.
static inline void v_reduce_angle(Vec angle, Vec *r, IVec *n) {
    const __m128 quarter[4] = {_mm256_castps256_ps128(angle.a), _mm256_extractf128_ps(angle.a, 1), _mm256_castps256_ps128(angle.b),
                               _mm256_extractf128_ps(angle.b, 1)};
    __m128 rest_of[4];
    __m128i turns_of[4];
    for (int i = 0; i < 4; ++i) {
        const __m256d x = _mm256_cvtps_pd(quarter[i]);
        const __m256d turns =
            _mm256_round_pd(_mm256_mul_pd(x, _mm256_set1_pd(0x1.45f306dc9c883p-1)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m256d rest = _mm256_fnmadd_pd(turns, _mm256_set1_pd(0x1.921fb54442d18p+0), x);
        rest = _mm256_fnmadd_pd(turns, _mm256_set1_pd(0x1.1a62633145c07p-54), rest);
        rest_of[i] = _mm256_cvtpd_ps(rest);
        turns_of[i] = _mm256_cvtpd_epi32(turns);
    }
    *r = {_mm256_set_m128(rest_of[1], rest_of[0]), _mm256_set_m128(rest_of[3], rest_of[2])};
    *n = {_mm256_set_m128i(turns_of[1], turns_of[0]), _mm256_set_m128i(turns_of[3], turns_of[2])};
}

static inline float largest_of(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
static inline float v_sum(Vec x) {
    const __m256 all = _mm256_add_ps(x.a, x.b);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
static inline float v_largest(Vec x) { return largest_of(_mm256_max_ps(x.a, x.b)); }

// 2^n for n in [-126, 0].
static inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// exp for x <= 0, -inf included, as in avx512_vec.hpp; results below 2^-126 are 0.
static inline Vec v_exp(Vec x) {
    const Vec bounded = v_max(x, v_set1(-120.0f));
    const Vec n = v_round(v_mul(bounded, v_set1(0x1.715476p+0f)));
    Vec r = v_fnma(n, v_set1(0x1.62e400p-1f), bounded);
    r = v_fnma(n, v_set1(0x1.7f7d1cp-20f), r);
    Vec p = v_set1(0x1.6a21acp-10f);
    p = v_fma(p, r, v_set1(0x1.123b6ap-7f));
    p = v_fma(p, r, v_set1(0x1.5558fap-5f));
    p = v_fma(p, r, v_set1(0x1.555490p-3f));
    p = v_fma(p, r, v_set1(0x1.fffffcp-2f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    const Vec held = v_max(n, v_set1(-126.0f));
    const Vec scaled = v_mul(p, {power_of_two(held.a), power_of_two(held.b)});
    return v_below(n, v_set1(-126.0f), v_zero(), scaled);
}

// Distances 1, 2, 4 and 8 of the butterflies, those below `n`: (a + b, a - b).
static inline __m256 butterfly_half(__m256 x, int n) {
    if (n > 1) x = _mm256_addsub_ps(_mm256_permute_ps(x, 0xb1), _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    if (n > 2) {
        const __m256 sign = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
        x = _mm256_add_ps(_mm256_permute_ps(x, 0x4e), _mm256_xor_ps(x, sign));
    }
    if (n > 4) {
        const __m256 sign = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
        x = _mm256_add_ps(_mm256_permute2f128_ps(x, x, 0x01), _mm256_xor_ps(x, sign));
    }
    return x;
}
static inline Vec v_butterfly(Vec x, int n) {
    const __m256 a = butterfly_half(x.a, n), b = butterfly_half(x.b, n);
    if (n <= 8) return {a, b};
    return {_mm256_add_ps(a, b), _mm256_sub_ps(a, b)};
}

// Eight registers to one: lane i is the result of x[i].
template <__m256 (*op)(__m256, __m256)>
static inline __m256 reduce8(const __m256 *x) {
    __m256 quad[2];
    for (int i = 0; i < 2; ++i) {
        const __m256 *const y = x + 4 * i;
        const __m256 ab = op(_mm256_unpacklo_ps(y[0], y[1]), _mm256_unpackhi_ps(y[0], y[1]));
        const __m256 cd = op(_mm256_unpacklo_ps(y[2], y[3]), _mm256_unpackhi_ps(y[2], y[3]));
        const __m256d a = _mm256_castps_pd(ab), c = _mm256_castps_pd(cd);
        quad[i] = op(_mm256_castpd_ps(_mm256_unpacklo_pd(a, c)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, c)));
    }
    return op(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}
static inline __m256 half_max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
static inline __m256 half_add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }

// Sixteen vectors, one after the other in memory, to one: lane i is the largest of vector i, or its sum.
template <__m256 (*op)(__m256, __m256)>
static inline Vec reduce16_by(const float *x) {
    __m256 half[16];
    for (int i = 0; i < 16; ++i)
        half[i] = op(_mm256_loadu_ps(x + 16 * i), _mm256_loadu_ps(x + 16 * i + 8));
    return {reduce8<op>(half), reduce8<op>(half + 8)};
}
static inline Vec v_reduce16_max(const float *x) { return reduce16_by<half_max>(x); }
static inline Vec v_reduce16_add(const float *x) { return reduce16_by<half_add>(x); }

} // namespace skerry
