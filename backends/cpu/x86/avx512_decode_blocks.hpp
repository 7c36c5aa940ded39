// SPDX-License-Identifier: MIT
#pragma once

// Decoding of R formats in blocks of 64 channels, for dimensions that are multiples of 64. Codes are small, so the first butterflies
// run on bytes and the next on 16 bits; all are exact. The centre of the levels is left out: the transform of a constant is n times it
// at the first channel of a block, where it is subtracted at the end.

#include "cpu/x86/code_shape.hpp"

#include <immintrin.h>

#include <cstdint>

namespace skerry {
float rotation_norm(int32_t dim);
}

namespace {

constexpr int block_channels = 64;

// Words of four lines at once: lane q of vector k gets the four words of token 4 q + k.
inline void transpose_lines(const uint8_t *line, size_t stride, __mmask16 tokens, __m512i *out) {
    const __m512i a = _mm512_maskz_loadu_epi32(tokens, line), b = _mm512_maskz_loadu_epi32(tokens, line + stride);
    const __m512i c = _mm512_maskz_loadu_epi32(tokens, line + 2 * stride), d = _mm512_maskz_loadu_epi32(tokens, line + 3 * stride);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
    out[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    out[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
    out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

// The 16 words of four tokens of a value block: quarter b gets byte b of each, the codes of token b.
inline __m512i transpose_quad(__m512i words) {
    const __m512i by_token = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i by_quarter = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(by_quarter, _mm512_shuffle_epi8(words, by_token));
}

// One plane prepared for `block`: vectors per block, and the codes of one token as 64 bytes in the order of channels.
template <int Bits, bool is_key>
struct Plane {
    static constexpr int vectors = is_key ? (Bits == 1 ? 2 : 2 * Bits) : (Bits == 1 ? 4 : 2 * Bits);

    static void prepare(const uint8_t *plane, int32_t dim, int32_t capacity, int32_t block, __m512i *out) {
        const __mmask16 tokens = static_cast<__mmask16>((1u << capacity) - 1u);
        if constexpr (is_key) {
            const size_t stride = 4 * static_cast<size_t>(capacity);
            const uint8_t *const line = plane + static_cast<size_t>(block) * 2 * Bits * stride;
            if constexpr (Bits == 1) {
                const __m512i a = _mm512_maskz_loadu_epi32(tokens, line), b = _mm512_maskz_loadu_epi32(tokens, line + stride);
                out[0] = _mm512_unpacklo_epi32(a, b);
                out[1] = _mm512_unpackhi_epi32(a, b);
            } else {
                for (int i = 0; i < Bits / 2; ++i)
                    transpose_lines(line + static_cast<size_t>(4 * i) * stride, stride, tokens, out + 4 * i);
            }
        } else {
            const int32_t quads = (capacity + 3) / 4;
            if constexpr (Bits == 1) {
                const int32_t whole = block / 2, rest = dim - 128 * whole, lanes = rest >= 128 ? 16 : 8;
                const uint8_t *const words = plane + static_cast<size_t>(64 * quads) * static_cast<size_t>(whole);
                const __mmask16 mask = static_cast<__mmask16>((1u << lanes) - 1u);
                for (int32_t q = 0; q < quads; ++q) {
                    out[q] = transpose_quad(_mm512_maskz_loadu_epi32(mask, words + 4 * static_cast<size_t>(lanes * q)));
                }
            } else {
                // Vector 4 i + q: value block i of the 64 channels, tokens 4 q to 4 q + 3.
                for (int i = 0; i < Bits / 2; ++i) {
                    const uint8_t *const words = plane + static_cast<size_t>(64 * quads) * static_cast<size_t>(block * Bits / 2 + i);
                    for (int32_t q = 0; q < quads; ++q)
                        out[4 * i + q] = transpose_quad(_mm512_loadu_si512(words + 64 * q));
                }
            }
        }
    }

    static __m512i codes(const __m512i *in, int32_t dim, int32_t block, int32_t token) {
        const int32_t quarter = is_key ? token / 4 : token % 4, which = is_key ? token % 4 : token / 4;
        if constexpr (Bits == 8) {
            const __m512i pair = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 8, 9, 0, 1, 8, 9), _mm512_set1_epi64(2 * quarter));
            const __m512i low = _mm512_permutex2var_epi64(in[which], pair, in[4 + which]);
            const __m512i high = _mm512_permutex2var_epi64(in[8 + which], pair, in[12 + which]);
            return _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
        } else if constexpr (Bits == 4) {
            const __m512i base = is_key ? _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 16, 16, 17, 17, 18, 18, 19, 19)
                                        : _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 16, 17, 18, 19, 16, 17, 18, 19);
            const __m512i shift = is_key ? _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4)
                                         : _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
            const __m512i index = _mm512_add_epi32(base, _mm512_set1_epi32(4 * quarter));
            const __m512i words = _mm512_permutex2var_epi32(in[which], index, in[4 + which]);
            return _mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi8(15));
        } else if constexpr (Bits == 2) {
            const __m512i base = is_key ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                                        : _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
            const __m512i shift = is_key ? _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6)
                                         : _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
            const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(base, _mm512_set1_epi32(4 * quarter)), in[which]);
            return _mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi8(3));
        } else if constexpr (is_key) {
            const __m512i base = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            const __m512i shift = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
            const __m512i index = _mm512_add_epi32(base, _mm512_set1_epi32(4 * quarter + 2 * (which % 2)));
            return _mm512_and_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(index, in[which / 2]), shift), _mm512_set1_epi8(1));
        } else if (dim - 128 * (block / 2) >= 128) {
            const __m512i base = _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
            const __m512i fields = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            const __m512i shift = _mm512_add_epi32(fields, _mm512_set1_epi32(4 * (block % 2)));
            const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(base, _mm512_set1_epi32(4 * quarter)), in[which]);
            return _mm512_and_si512(_mm512_srlv_epi32(words, shift), _mm512_set1_epi8(1));
        } else {
            // Half a value block: eight bytes of a token hold all its codes.
            const __m512i words = _mm512_permutexvar_epi64(_mm512_set1_epi64(2 * quarter), in[which]);
            return _mm512_and_si512(_mm512_srlv_epi64(words, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)), _mm512_set1_epi8(1));
        }
    }
};

inline __m512i byte_stage(__m512i partner, __m512i a, __mmask64 upper) {
    return _mm512_mask_sub_epi8(_mm512_add_epi8(partner, a), upper, partner, a);
}

inline __m512i short_stage(__m512i partner, __m512i a, __mmask32 upper) {
    return _mm512_mask_sub_epi16(_mm512_add_epi16(partner, a), upper, partner, a);
}

template <int Format, bool is_key, int Blocks>
void decode_block_rows(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch, const float *factors) {
    constexpr int bits = Format == SKERRY_FORMAT_R2 ? 2 : Format == SKERRY_FORMAT_R3 ? 3 : Format == SKERRY_FORMAT_R4 ? 4 : 8;
    constexpr int low_bits = bits == 3 ? 2 : bits;
    // Butterflies that keep codes below 128; those between blocks come first.
    constexpr int byte_stages = bits == 2 ? 5 : bits == 3 ? 4 : bits == 4 ? 3 : 0;
    constexpr int block_stages = Blocks == 4 ? 2 : Blocks == 2 ? 1 : 0;
    constexpr int own_stages = byte_stages > block_stages ? byte_stages - block_stages : 0;
    using Low = Plane<low_bits, is_key>;
    using High = Plane<1, is_key>;

    const int32_t dim = params.dim, capacity = params.capacity, all_blocks = dim / block_channels;
    const uint8_t *const high_plane = part + shape_plane_bytes(2, params.side, dim, capacity);
    const uint8_t *const scales = part + shape_scale_offset(params.format, params.side, dim, capacity);
    __m512i *const low = static_cast<__m512i *>(scratch), *const high = low + all_blocks * Low::vectors;
    for (int32_t block = 0; block < all_blocks; ++block) {
        Low::prepare(part, dim, capacity, block, low + block * Low::vectors);
        if constexpr (bits == 3) High::prepare(high_plane, dim, capacity, block, high + block * High::vectors);
    }

    const float exponent_scale = is_key ? params.epoch->key_exponent_scale : params.epoch->value_exponent_scale;
    const float norm = skerry::rotation_norm(dim);
    const float centre = 0.5f * static_cast<float>((1 << bits) - 1) * static_cast<float>(Blocks * block_channels);
    const __m512 first_centre = _mm512_maskz_mov_ps(1, _mm512_set1_ps(centre));
    for (int32_t t = 0; t < params.count; ++t) {
        const __m512 scale = _mm512_set1_ps(load_half(scales + 2 * static_cast<size_t>(t)) * exponent_scale * norm);
        for (int32_t first = 0; first < all_blocks; first += Blocks) {
            __m512i z[Blocks];
#pragma GCC unroll 4
            for (int k = 0; k < Blocks; ++k) {
                z[k] = Low::codes(low + (first + k) * Low::vectors, dim, first + k, t);
                if constexpr (bits == 3) {
                    const __m512i top = High::codes(high + (first + k) * High::vectors, dim, first + k, t);
                    z[k] = _mm512_or_si512(z[k], _mm512_slli_epi32(top, 2));
                }
            }
            if constexpr (bits != 8) {
                if constexpr (Blocks == 4) {
                    const __m512i a = z[0], b = z[1];
                    z[0] = _mm512_add_epi8(a, z[2]);
                    z[1] = _mm512_add_epi8(b, z[3]);
                    z[2] = _mm512_sub_epi8(a, z[2]);
                    z[3] = _mm512_sub_epi8(b, z[3]);
                }
                if constexpr (Blocks >= 2) {
#pragma GCC unroll 2
                    for (int k = 0; k < Blocks; k += 2) {
                        const __m512i a = z[k], b = z[k + 1];
                        z[k] = _mm512_add_epi8(a, b);
                        z[k + 1] = _mm512_sub_epi8(a, b);
                    }
                }
            }
            __m512i s[2 * Blocks];
#pragma GCC unroll 4
            for (int k = 0; k < Blocks; ++k) {
                __m512i a = z[k];
                if constexpr (own_stages > 0) a = byte_stage(_mm512_shuffle_epi32(a, _MM_PERM_CDAB), a, 0xf0f0f0f0f0f0f0f0u);
                if constexpr (own_stages > 1) a = byte_stage(_mm512_shuffle_epi32(a, _MM_PERM_BADC), a, 0xff00ff00ff00ff00u);
                if constexpr (own_stages > 2) a = byte_stage(_mm512_shuffle_i64x2(a, a, 0xb1), a, 0xffff0000ffff0000u);
                if constexpr (own_stages > 3) a = byte_stage(_mm512_shuffle_i64x2(a, a, 0x4e), a, 0xffffffff00000000u);
                const __m256i lower = _mm512_castsi512_si256(a), upper = _mm512_extracti64x4_epi64(a, 1);
                s[2 * k] = bits == 8 ? _mm512_cvtepu8_epi16(lower) : _mm512_cvtepi8_epi16(lower);
                s[2 * k + 1] = bits == 8 ? _mm512_cvtepu8_epi16(upper) : _mm512_cvtepi8_epi16(upper);
                if constexpr (own_stages < 4) {
                    const __m512i b = s[2 * k], c = s[2 * k + 1];
                    s[2 * k] = _mm512_add_epi16(b, c);
                    s[2 * k + 1] = _mm512_sub_epi16(b, c);
                }
            }
            if constexpr (bits == 8 && Blocks == 2) {
#pragma GCC unroll 2
                for (int k = 0; k < 2; ++k) {
                    const __m512i a = s[k], b = s[k + 2];
                    s[k] = _mm512_add_epi16(a, b);
                    s[k + 2] = _mm512_sub_epi16(a, b);
                }
            }
            const size_t channel = static_cast<size_t>(first) * block_channels;
            float *const row = rows + static_cast<size_t>(t) * static_cast<size_t>(dim) + channel;
#pragma GCC unroll 8
            for (int k = 0; k < 2 * Blocks; ++k) {
                __m512i a = s[k];
                if constexpr (own_stages < 3) a = short_stage(_mm512_shuffle_i64x2(a, a, 0x4e), a, 0xffff0000u);
                if constexpr (own_stages < 2) a = short_stage(_mm512_shuffle_i64x2(a, a, 0xb1), a, 0xff00ff00u);
                if constexpr (own_stages < 1) a = short_stage(_mm512_shuffle_epi32(a, _MM_PERM_BADC), a, 0xf0f0f0f0u);
                a = short_stage(_mm512_shuffle_epi32(a, _MM_PERM_CDAB), a, 0xccccccccu);
                a = short_stage(_mm512_rol_epi32(a, 16), a, 0xaaaaaaaau);
                const __m256i halves[2] = {_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)};
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const size_t at = static_cast<size_t>(32 * k + 16 * i);
                    __m512 value = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(halves[i]));
                    if (k == 0 && i == 0) value = _mm512_sub_ps(value, first_centre);
                    value = _mm512_mul_ps(_mm512_mul_ps(value, scale), _mm512_loadu_ps(factors + channel + at));
                    if (is_key) value = _mm512_add_ps(value, _mm512_loadu_ps(params.epoch->mean + channel + at));
                    _mm512_storeu_ps(row + at, value);
                }
            }
        }
    }
}

} // namespace
