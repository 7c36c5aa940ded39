// SPDX-License-Identifier: MIT
#include "cpu/ref/ref.hpp"
#include "cpu/x86/x86.hpp"

#include <cstring>

#include "cpu/x86/avx512_half.hpp"
#include "cpu/x86/avx512_transpose.hpp"

namespace {

constexpr int width = 16;
using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

inline Floats load(const float *at) { return _mm512_loadu_ps(at); }
inline void store(float *at, Floats a) { _mm512_storeu_ps(at, a); }
inline Floats load_some(const float *at, int32_t count) { return _mm512_maskz_loadu_ps(static_cast<Mask>((1u << count) - 1u), at); }
inline Floats broadcast(float a) { return _mm512_set1_ps(a); }
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats root(Floats a) { return _mm512_sqrt_ps(a); }
inline Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline Floats flip(Floats a, Floats signs) { return _mm512_xor_ps(a, signs); }
inline Floats truncate(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Mask is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask is_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats choose(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }
inline Floats keep(Mask mask, Floats a) { return _mm512_maskz_mov_ps(mask, a); }
inline Floats add_where(Floats a, Mask mask, Floats b) { return _mm512_mask_add_ps(a, mask, a, b); }

inline Floats hash_signs(int32_t channel) {
    const Ints lane = _mm512_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
    Ints hash = _mm512_mullo_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(channel)), _mm512_set1_epi32(int(0x9e3779b1u)));
    hash = _mm512_xor_si512(hash, _mm512_srli_epi32(hash, 15));
    hash = _mm512_mullo_epi32(hash, _mm512_set1_epi32(int(0x85ebca77u)));
    return _mm512_castsi512_ps(_mm512_and_si512(hash, _mm512_set1_epi32(int(0x80000000u))));
}

inline Ints exponent_of(Floats positive, int lowest) {
    const Ints biased = _mm512_srli_epi32(_mm512_castps_si512(positive), 23);
    return _mm512_max_epi32(_mm512_sub_epi32(biased, _mm512_set1_epi32(127)), _mm512_set1_epi32(lowest));
}
inline Ints negate(Ints a) { return _mm512_sub_epi32(_mm512_setzero_si512(), a); }
inline Floats power_of_two(Ints exponent) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23));
}

inline Ints to_codes(Floats level, Floats value, int32_t half, Mask is_live) {
    const Ints mirrored = _mm512_xor_si512(_mm512_cvttps_epi32(level), _mm512_srai_epi32(_mm512_castps_si512(value), 31));
    return _mm512_maskz_add_epi32(is_live, mirrored, _mm512_set1_epi32(half));
}
inline void store_codes(uint8_t *at, Ints codes) { _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm512_cvtepi32_epi8(codes)); }
inline void store_scales(uint8_t *at, Floats scales) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtps_ph(scales, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

using Halves = __m256i;

inline Halves narrow(bool is_bf16, Floats a) {
    return is_bf16 ? to_bf16(a) : _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats widen(bool is_bf16, Halves a) {
    return is_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)) : _mm512_cvtph_ps(a);
}
inline void store_halves(uint8_t *at, Halves a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), a); }
inline Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
inline Mask is_below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline bool is_any(Mask mask) { return mask != 0; }
inline Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Ints to_whole(Floats a) { return _mm512_cvttps_epi32(a); }
inline Ints no_bits() { return _mm512_setzero_si512(); }
inline Ints put_bits(Ints word, Ints code, int shift) { return _mm512_or_si512(word, _mm512_sll_epi32(code, _mm_cvtsi32_si128(shift))); }
inline void store_words(uint32_t *at, Ints words) { _mm512_storeu_si512(at, words); }
inline float lowest_lane(Floats a) { return _mm512_reduce_min_ps(a); }
inline float highest_lane(Floats a) { return _mm512_reduce_max_ps(a); }

// Codes of consecutive channels, next to each other.
inline void store_run(uint8_t *at, Ints codes, int32_t bits) {
    const __m128i bytes = _mm512_cvtepi32_epi8(codes);
    if (bits == 4) {
        const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(at), _mm_packus_epi16(pairs, pairs));
        return;
    }
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0401));
    const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x00100001));
    const int32_t word =
        _mm_cvtsi128_si32(_mm_shuffle_epi8(fours, _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
    std::memcpy(at, &word, 4);
}

} // namespace

#include "cpu/x86/channel_encode_body.hpp"
#include "cpu/x86/encode_body.hpp"

void skerry::skerry_cpu_avx512_encode(const skerry_code_params *params, const float *rows, void *part, void *scratch) {
    if (shape_is_r(params->format)) {
        encode_r(*params, rows, static_cast<uint8_t *>(part), scratch);
    } else if (shape_is_full(params->format)) {
        std::memset(part, 0, shape_full_bytes(params->format, params->dim, params->capacity));
        skerry_cpu_avx512_append(params->format, params->side, params->dim, params->capacity, 0, params->count, rows, params->dim, part);
    } else if (!encode_c(*params, ref::channel_rows(params, rows, static_cast<float *>(scratch)), static_cast<uint8_t *>(part))) {
        ref::encode(params, rows, part, scratch);
    }
}
