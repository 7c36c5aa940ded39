// SPDX-License-Identifier: MIT
#include "cpu/ref/ref.hpp"
#include "cpu/x86/x86.hpp"

#include <cstring>

#include "cpu/x86/avx2_half.hpp"
#include "cpu/x86/avx2_transpose.hpp"

namespace {

constexpr int width = 8;
using Floats = __m256;
using Ints = __m256i;
using Mask = __m256;

inline Floats load(const float *at) { return _mm256_loadu_ps(at); }
inline void store(float *at, Floats a) { _mm256_storeu_ps(at, a); }
inline Floats load_some(const float *at, int32_t count) {
    if (count == width) return load(at);
    const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(at, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
}
inline Floats broadcast(float a) { return _mm256_set1_ps(a); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats root(Floats a) { return _mm256_sqrt_ps(a); }
inline Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats greatest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Floats flip(Floats a, Floats signs) { return _mm256_xor_ps(a, signs); }
inline Floats truncate(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Mask is_at_least(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Mask is_above(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Floats choose(Mask mask, Floats a, Floats b) { return _mm256_blendv_ps(b, a, mask); }
inline Floats keep(Mask mask, Floats a) { return _mm256_and_ps(mask, a); }
inline Floats add_where(Floats a, Mask mask, Floats b) { return _mm256_add_ps(a, _mm256_and_ps(mask, b)); }

inline Floats hash_signs(int32_t channel) {
    const Ints lane = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    Ints hash = _mm256_mullo_epi32(_mm256_add_epi32(lane, _mm256_set1_epi32(channel)), _mm256_set1_epi32(int(0x9e3779b1u)));
    hash = _mm256_xor_si256(hash, _mm256_srli_epi32(hash, 15));
    hash = _mm256_mullo_epi32(hash, _mm256_set1_epi32(int(0x85ebca77u)));
    return _mm256_castsi256_ps(_mm256_and_si256(hash, _mm256_set1_epi32(int(0x80000000u))));
}

inline Ints exponent_of(Floats positive, int lowest) {
    const Ints biased = _mm256_srli_epi32(_mm256_castps_si256(positive), 23);
    return _mm256_max_epi32(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)), _mm256_set1_epi32(lowest));
}
inline Ints negate(Ints a) { return _mm256_sub_epi32(_mm256_setzero_si256(), a); }
inline Floats power_of_two(Ints exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}

inline Ints to_codes(Floats level, Floats value, int32_t half, Mask is_live) {
    const Ints mirrored = _mm256_xor_si256(_mm256_cvttps_epi32(level), _mm256_srai_epi32(_mm256_castps_si256(value), 31));
    return _mm256_and_si256(_mm256_add_epi32(mirrored, _mm256_set1_epi32(half)), _mm256_castps_si256(is_live));
}
inline void store_codes(uint8_t *at, Ints codes) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(at), _mm_packus_epi16(words, words));
}
inline void store_scales(uint8_t *at, Floats scales) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm256_cvtps_ph(scales, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

using Halves = __m128i;

inline Halves narrow(bool is_bf16, Floats a) {
    return is_bf16 ? to_bf16(a) : _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats widen(bool is_bf16, Halves a) {
    return is_bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)) : _mm256_cvtph_ps(a);
}
inline void store_halves(uint8_t *at, Halves a) { _mm_storeu_si128(reinterpret_cast<__m128i *>(at), a); }
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Mask is_below(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline bool is_any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }
inline Floats nearest(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Ints to_whole(Floats a) { return _mm256_cvttps_epi32(a); }
inline Ints no_bits() { return _mm256_setzero_si256(); }
inline Ints put_bits(Ints word, Ints code, int shift) { return _mm256_or_si256(word, _mm256_sll_epi32(code, _mm_cvtsi32_si128(shift))); }
inline void store_words(uint32_t *at, Ints words) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), words); }
inline float lowest_lane(Floats a) {
    __m128 b = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_min_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_min_ss(b, _mm_movehdup_ps(b)));
}
inline float highest_lane(Floats a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

// Codes of consecutive channels, next to each other.
inline void store_run(uint8_t *at, Ints codes, int32_t bits) {
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    const __m128i pairs = _mm_madd_epi16(shorts, _mm_set1_epi32(bits == 4 ? 0x00100001 : 0x00040001));
    const __m128i narrowed = _mm_packus_epi32(pairs, pairs);
    if (bits == 4) {
        const int32_t word = _mm_cvtsi128_si32(_mm_packus_epi16(narrowed, narrowed));
        std::memcpy(at, &word, 4);
        return;
    }
    const __m128i fours = _mm_madd_epi16(narrowed, _mm_set1_epi32(0x00100001));
    const int32_t word =
        _mm_cvtsi128_si32(_mm_shuffle_epi8(fours, _mm_setr_epi8(0, 4, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
    std::memcpy(at, &word, 2);
}

} // namespace

#include "cpu/x86/channel_encode_body.hpp"
#include "cpu/x86/encode_body.hpp"

void skerry::skerry_cpu_avx2_encode(const skerry_code_params *params, const float *rows, void *part, void *scratch) {
    if (shape_is_r(params->format)) {
        encode_r(*params, rows, static_cast<uint8_t *>(part), scratch);
    } else if (shape_is_full(params->format)) {
        std::memset(part, 0, shape_full_bytes(params->format, params->dim, params->capacity));
        skerry_cpu_avx2_append(params->format, params->side, params->dim, params->capacity, 0, params->count, rows, params->dim, part);
    } else if (!encode_c(*params, ref::channel_rows(params, rows, static_cast<float *>(scratch)), static_cast<uint8_t *>(part))) {
        ref::encode(params, rows, part, scratch);
    }
}
