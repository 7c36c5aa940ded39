// SPDX-License-Identifier: MIT
#include "cpu/ref/ref.hpp"
#include "cpu/x86/x86.hpp"

#include "cpu/x86/avx512_transpose.hpp"

#include <cstring>

namespace {

constexpr int width = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats load(const float *at) { return _mm512_loadu_ps(at); }
inline void store(float *at, Floats a) { _mm512_storeu_ps(at, a); }
inline Floats broadcast(float a) { return _mm512_set1_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats flip(Floats a, Floats signs) { return _mm512_xor_ps(a, signs); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints join_codes(Ints low, Ints high) { return _mm512_or_si512(low, _mm512_slli_epi32(high, 2)); }

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
    const Ints lane = _mm512_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
    Ints hash = _mm512_mullo_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(channel)), _mm512_set1_epi32(int(0x9e3779b1u)));
    hash = _mm512_xor_si512(hash, _mm512_srli_epi32(hash, 15));
    hash = _mm512_mullo_epi32(hash, _mm512_set1_epi32(int(0x85ebca77u)));
    return _mm512_castsi512_ps(_mm512_and_si512(hash, _mm512_set1_epi32(int(0x80000000u))));
}

inline Floats stage(Floats partner, Floats a, __mmask16 negative) {
    return _mm512_mask_sub_ps(_mm512_add_ps(partner, a), negative, partner, a);
}

// Distances 1, 2, 4 and 8 within one vector.
inline Floats in_lane_stages(Floats a) {
    a = stage(_mm512_permute_ps(a, 0xb1), a, 0xaaaa);
    a = stage(_mm512_permute_ps(a, 0x4e), a, 0xcccc);
    a = stage(_mm512_shuffle_f32x4(a, a, 0xb1), a, 0xf0f0);
    return stage(_mm512_shuffle_f32x4(a, a, 0x4e), a, 0xff00);
}

inline Ints load_index(const int32_t *at) { return _mm512_loadu_si512(at); }
inline Ints load_words(const uint8_t *at) { return _mm512_loadu_si512(at); }
inline Ints gather_words(const uint8_t *words, Ints index, int32_t lanes) {
    return _mm512_permutexvar_epi32(index, _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << lanes) - 1u), words));
}
inline Ints take_codes(Ints words, int32_t shift, int32_t mask) {
    return _mm512_and_si512(_mm512_srl_epi32(words, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(mask));
}
inline Ints take_codes(Ints words, Ints shift, int32_t more, int32_t mask) {
    return _mm512_and_si512(_mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(more))), _mm512_set1_epi32(mask));
}

// Channels c to c + 15 of a key: channel 4 j + b of a word lies at bit 8 b + Bits j.
template <int Bits>
inline Ints key_codes(const uint8_t *plane, int32_t capacity, int32_t token, int32_t c) {
    const size_t stride = 4 * static_cast<size_t>(capacity);
    const uint8_t *const word = plane + static_cast<size_t>(c / (32 / Bits)) * stride + 4 * static_cast<size_t>(token);
    if constexpr (Bits == 8) {
        const __m128i bytes = _mm_setr_epi32(int(load_word(word)), int(load_word(word + stride)), int(load_word(word + 2 * stride)),
                                             int(load_word(word + 3 * stride)));
        return _mm512_cvtepu8_epi32(bytes);
    } else if constexpr (Bits == 4) {
        const Ints shift = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 0, 8, 16, 24, 4, 12, 20, 28);
        const Ints words = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(load_word(word))), 0xff00, int(load_word(word + stride)));
        return _mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi32(15));
    } else if constexpr (Bits == 2) {
        const Ints shift = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
        return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(int(load_word(word))), shift), _mm512_set1_epi32(3));
    } else {
        const Ints shift = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        const uint32_t half = load_word(word) >> (c % 32 / 4);
        return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(int(half)), shift), _mm512_set1_epi32(1));
    }
}

inline Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }

inline Floats load_halves(bool is_bf16, const uint8_t *at) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return is_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)) : _mm512_cvtph_ps(halves);
}

// Codes of consecutive channels that lie next to each other.
inline Ints load_run(const uint8_t *at, int32_t bits) {
    if (bits == 2) {
        const Ints shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        return _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(int(load_word(at))), shift), _mm512_set1_epi32(3));
    }
    const Ints shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const Ints words = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(load_word(at))), 0xff00, int(load_word(at + 4)));
    return _mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi32(15));
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

#include "cpu/x86/avx512_decode_blocks.hpp"
#include "cpu/x86/channel_decode_body.hpp"
#include "cpu/x86/decode_body.hpp"

namespace {

inline Floats widen(skerry_format format, __m256i halves) {
    if (format == SKERRY_FORMAT_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline Floats load_full(skerry_format format, const uint8_t *part, size_t index, __mmask16 lanes) {
    if (format == SKERRY_FORMAT_F32) return _mm512_maskz_loadu_ps(lanes, part + 4 * index);
    return widen(format, _mm256_maskz_loadu_epi16(lanes, part + 2 * index));
}

inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1u); }

void decode_full_values(const skerry_code_params &params, const uint8_t *part, float *rows) {
    const int64_t total = int64_t(params.count) * params.dim;
    for (int64_t i = 0; i < total; i += 16) {
        const __mmask16 lanes = first_lanes(total - i);
        _mm512_mask_storeu_ps(rows + i, lanes, load_full(params.format, part, static_cast<size_t>(i), lanes));
    }
}

void decode_full_keys(const skerry_code_params &params, const uint8_t *part, float *rows) {
    const int32_t dim = params.dim, capacity = params.capacity;
    for (int32_t t = 0; t < params.count; t += 16) {
        const int32_t tokens = params.count - t < 16 ? params.count - t : 16;
        for (int32_t c = 0; c < dim; c += 16) {
            const int32_t channels = dim - c < 16 ? dim - c : 16;
            Floats z[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                const size_t index = static_cast<size_t>(c + i) * static_cast<size_t>(capacity) + static_cast<size_t>(t);
                z[i] = i < channels ? load_full(params.format, part, index, first_lanes(tokens)) : _mm512_setzero_ps();
            }
            transpose(z);
            for (int i = 0; i < tokens; ++i) {
                _mm512_mask_storeu_ps(rows + static_cast<size_t>(t + i) * static_cast<size_t>(dim) + c, first_lanes(channels), z[i]);
            }
        }
    }
}

template <int Format, bool is_key>
void decode_blocks(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch) {
    // The first 64 bytes of alignment are part of what is asked for (code_scratch_bytes).
    uint8_t *const bytes = static_cast<uint8_t *>(scratch);
    uint8_t *const aligned = bytes + (-reinterpret_cast<uintptr_t>(bytes) & 63u);
    constexpr size_t vectors_bytes_per_channel = 16;
    float *const factors = reinterpret_cast<float *>(aligned + vectors_bytes_per_channel * static_cast<size_t>(params.dim));
    prepare_factors<is_key>(params, factors);
    switch (params.dim & -params.dim) {
    case 64:
        decode_block_rows<Format, is_key, 1>(params, part, rows, aligned, factors);
        break;
    case 128:
        decode_block_rows<Format, is_key, 2>(params, part, rows, aligned, factors);
        break;
    default:
        if constexpr (Format != SKERRY_FORMAT_R8) decode_block_rows<Format, is_key, 4>(params, part, rows, aligned, factors);
        break;
    }
}

template <bool is_key>
void decode_blocks_side(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch) {
    switch (params.format) {
    case SKERRY_FORMAT_R2:
        decode_blocks<SKERRY_FORMAT_R2, is_key>(params, part, rows, scratch);
        break;
    case SKERRY_FORMAT_R3:
        decode_blocks<SKERRY_FORMAT_R3, is_key>(params, part, rows, scratch);
        break;
    case SKERRY_FORMAT_R4:
        decode_blocks<SKERRY_FORMAT_R4, is_key>(params, part, rows, scratch);
        break;
    default:
        decode_blocks<SKERRY_FORMAT_R8, is_key>(params, part, rows, scratch);
        break;
    }
}

// Butterflies over more channels, and those of r8 over 256, leave 16 bits.
bool has_blocks(const skerry_code_params &params) {
    const int32_t n = params.dim & -params.dim;
    return n >= 64 && n <= (params.format == SKERRY_FORMAT_R8 ? 128 : 256);
}

} // namespace

void skerry::skerry_cpu_avx512_decode(const skerry_code_params *params, const void *part, float *rows, void *scratch) {
    const uint8_t *const in = static_cast<const uint8_t *>(part);
    if (shape_is_full(params->format)) {
        if (params->side == SKERRY_SIDE_KEY) {
            decode_full_keys(*params, in, rows);
        } else {
            decode_full_values(*params, in, rows);
        }
    } else if (shape_is_l(params->format) && params->dim % 16 == 0) {
        skerry_cpu_avx512_decode_lowrank(params, part, rows, scratch);
    } else if (shape_is_l(params->format)) {
        ref::decode(params, part, rows, scratch);
    } else if (shape_is_r(params->format) && has_blocks(*params)) {
        if (params->side == SKERRY_SIDE_KEY) {
            decode_blocks_side<true>(*params, in, rows, scratch);
        } else {
            decode_blocks_side<false>(*params, in, rows, scratch);
        }
    } else if (shape_is_r(params->format) && params->dim % 16 == 0) {
        decode_r(*params, in, rows, scratch);
    } else if (!shape_is_r(params->format) && decode_c(*params, in, rows)) {
        ref::rotate_channel_rows(params, rows, static_cast<float *>(scratch));
    } else {
        ref::decode(params, part, rows, scratch);
    }
}
