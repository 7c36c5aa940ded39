// SPDX-License-Identifier: MIT
#include "cpu/ref/ref.hpp"
#include "cpu/x86/avx2_transpose.hpp"
#include "cpu/x86/x86.hpp"

#include <cstring>

namespace {

constexpr int width = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats load(const float *at) { return _mm256_loadu_ps(at); }
inline void store(float *at, Floats a) { _mm256_storeu_ps(at, a); }
inline Floats broadcast(float a) { return _mm256_set1_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats flip(Floats a, Floats signs) { return _mm256_xor_ps(a, signs); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints join_codes(Ints low, Ints high) { return _mm256_or_si256(low, _mm256_slli_epi32(high, 2)); }

inline float load_half(const uint8_t *at) {
    uint16_t half = 0;
    std::memcpy(&half, at, 2);
    return _cvtsh_ss(half);
}

inline uint32_t load_word(const uint8_t *at) {
    uint32_t word = 0;
    std::memcpy(&word, at, 4);
    return word;
}

inline Floats hash_signs(int32_t channel) {
    const Ints lane = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    Ints hash = _mm256_mullo_epi32(_mm256_add_epi32(lane, _mm256_set1_epi32(channel)), _mm256_set1_epi32(int(0x9e3779b1u)));
    hash = _mm256_xor_si256(hash, _mm256_srli_epi32(hash, 15));
    hash = _mm256_mullo_epi32(hash, _mm256_set1_epi32(int(0x85ebca77u)));
    return _mm256_castsi256_ps(_mm256_and_si256(hash, _mm256_set1_epi32(int(0x80000000u))));
}

// Distances 1, 2 and 4 within one vector.
inline Floats in_lane_stages(Floats a) {
    const Floats odd = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    const Floats upper_pair = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f);
    const Floats upper_half = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    a = _mm256_add_ps(_mm256_permute_ps(a, 0xb1), _mm256_xor_ps(a, odd));
    a = _mm256_add_ps(_mm256_permute_ps(a, 0x4e), _mm256_xor_ps(a, upper_pair));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, a, 1), _mm256_xor_ps(a, upper_half));
}

inline Ints load_index(const int32_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
inline Ints load_words(const uint8_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
inline Ints gather_words(const uint8_t *words, Ints index, int32_t) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int *>(words), index, 4);
}
inline Ints take_codes(Ints words, int32_t shift, int32_t mask) {
    return _mm256_and_si256(_mm256_srl_epi32(words, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(mask));
}
inline Ints take_codes(Ints words, Ints shift, int32_t more, int32_t mask) {
    return _mm256_and_si256(_mm256_srlv_epi32(words, _mm256_add_epi32(shift, _mm256_set1_epi32(more))), _mm256_set1_epi32(mask));
}

// Channels c to c + 7 of a key: channel 4 j + b of a word lies at bit 8 b + Bits j.
template <int Bits>
inline Ints key_codes(const uint8_t *plane, int32_t capacity, int32_t token, int32_t c) {
    const size_t stride = 4 * static_cast<size_t>(capacity);
    const uint8_t *const word = plane + static_cast<size_t>(c / (32 / Bits)) * stride + 4 * static_cast<size_t>(token);
    if constexpr (Bits == 8) {
        return _mm256_cvtepu8_epi32(_mm_setr_epi32(int(load_word(word)), int(load_word(word + stride)), 0, 0));
    } else {
        const Ints shift = _mm256_setr_epi32(0, 8, 16, 24, Bits, 8 + Bits, 16 + Bits, 24 + Bits);
        const uint32_t rest = load_word(word) >> (c % (32 / Bits) / 4 * Bits);
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(rest)), shift), _mm256_set1_epi32((1 << Bits) - 1));
    }
}

inline Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats greatest(Floats a, Floats b) { return _mm256_max_ps(a, b); }

inline Floats load_halves(bool is_bf16, const uint8_t *at) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return is_bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)) : _mm256_cvtph_ps(halves);
}

// Codes of consecutive channels that lie next to each other.
inline Ints load_run(const uint8_t *at, int32_t bits) {
    const Ints field = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    if (bits == 2) {
        uint16_t half = 0;
        std::memcpy(&half, at, 2);
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(half), _mm256_slli_epi32(field, 1)), _mm256_set1_epi32(3));
    }
    const Ints words = _mm256_set1_epi32(int(load_word(at)));
    return _mm256_and_si256(_mm256_srlv_epi32(words, _mm256_slli_epi32(field, 2)), _mm256_set1_epi32(15));
}

inline float load_grid(bool is_bf16, const uint8_t *at) {
    if (!is_bf16) return load_half(at);
    uint16_t half = 0;
    std::memcpy(&half, at, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
}

} // namespace

#include "cpu/x86/channel_decode_body.hpp"
#include "cpu/x86/decode_body.hpp"

namespace {

// Eight or fewer numbers; what lies behind them is not read.
inline Floats load_full(skerry_format format, const uint8_t *part, size_t index, int32_t count) {
    if (format == SKERRY_FORMAT_F32) {
        float numbers[8] = {};
        if (count == 8) return _mm256_loadu_ps(reinterpret_cast<const float *>(part + 4 * index));
        std::memcpy(numbers, part + 4 * index, 4 * static_cast<size_t>(count));
        return _mm256_loadu_ps(numbers);
    }
    uint16_t halves[8] = {};
    std::memcpy(halves, part + 2 * index, 2 * static_cast<size_t>(count));
    const __m128i loaded =
        _mm_loadu_si128(reinterpret_cast<const __m128i *>(count == 8 ? part + 2 * index : reinterpret_cast<const uint8_t *>(halves)));
    if (format == SKERRY_FORMAT_F16) return _mm256_cvtph_ps(loaded);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(loaded), 16));
}

inline void store_some(float *at, Floats a, int32_t count) {
    if (count == 8) {
        store(at, a);
        return;
    }
    float numbers[8];
    _mm256_storeu_ps(numbers, a);
    std::memcpy(at, numbers, 4 * static_cast<size_t>(count));
}

void decode_full_values(const skerry_code_params &params, const uint8_t *part, float *rows) {
    const int64_t total = int64_t(params.count) * params.dim;
    for (int64_t i = 0; i < total; i += 8) {
        const int32_t count = total - i < 8 ? static_cast<int32_t>(total - i) : 8;
        store_some(rows + i, load_full(params.format, part, static_cast<size_t>(i), count), count);
    }
}

void decode_full_keys(const skerry_code_params &params, const uint8_t *part, float *rows) {
    const int32_t dim = params.dim, capacity = params.capacity;
    for (int32_t t = 0; t < params.count; t += 8) {
        const int32_t tokens = params.count - t < 8 ? params.count - t : 8;
        for (int32_t c = 0; c < dim; c += 8) {
            const int32_t channels = dim - c < 8 ? dim - c : 8;
            Floats z[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const size_t index = static_cast<size_t>(c + i) * static_cast<size_t>(capacity) + static_cast<size_t>(t);
                z[i] = i < channels ? load_full(params.format, part, index, tokens) : _mm256_setzero_ps();
            }
            transpose(z);
            for (int i = 0; i < tokens; ++i) {
                store_some(rows + static_cast<size_t>(t + i) * static_cast<size_t>(dim) + c, z[i], channels);
            }
        }
    }
}

} // namespace

void skerry::skerry_cpu_avx2_decode(const skerry_code_params *params, const void *part, float *rows, void *scratch) {
    const uint8_t *const in = static_cast<const uint8_t *>(part);
    if (shape_is_full(params->format)) {
        if (params->side == SKERRY_SIDE_KEY) {
            decode_full_keys(*params, in, rows);
        } else {
            decode_full_values(*params, in, rows);
        }
    } else if (shape_is_l(params->format) && params->dim % 16 == 0) {
        skerry_cpu_avx2_decode_lowrank(params, part, rows, scratch);
    } else if (shape_is_l(params->format)) {
        ref::decode(params, part, rows, scratch);
    } else if (shape_is_r(params->format) && params->dim % 16 == 0) {
        decode_r(*params, in, rows, scratch);
    } else if (!shape_is_r(params->format) && decode_c(*params, in, rows)) {
        ref::rotate_channel_rows(params, rows, static_cast<float *>(scratch));
    } else {
        ref::decode(params, part, rows, scratch);
    }
}
