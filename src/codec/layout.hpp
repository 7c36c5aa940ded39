// SPDX-License-Identifier: MIT
#pragma once

// Bytes of one part (the keys, or the values) of a tile or record. The one definition of packing: planning, allocation, kernels and
// reports all use it.
//
// Full formats (f32, f16, bf16)   keys [dim][capacity] (token fastest), values [capacity][dim].
//
// R formats, capacity <= 16. Codes of b bits lie in planes: r2, r4, r8 have one plane of that many bits, r3 a 2-bit
// plane followed by a 1-bit plane. In a plane of p bits one byte holds n = 8 / p codes, one 32-bit word 4 n codes.
//   keys    word [line][token]: byte b, bit field j (bits p j ...) of line L holds channel 4 n L + 4 j + b of the token;
//           ceil(dim / (4 n)) lines of `capacity` words.
//   values  channels in blocks of 16 n; a block of c channels has lanes = ceil(c / n) words per group of four tokens:
//           word [block][token / 4][lane]: byte b, bit field j holds channel 16 n block + lanes j + lane of token 4 (token / 4) + b.
//   then    one f16 scale per token [capacity].
// Missing channels and tokens have code 0.
//
// C formats, capacity <= 128 (qevict.md 5): element i of a run of codes sits in bits b (i mod 8/b) of byte i / (8/b).
//   keys    codes [dim][ceil(capacity b / 8)], consecutive tokens; then scale [dim] and zero [dim] in 16 bits.
//   values  codes [capacity][ceil(dim b / 8)], consecutive channels; then scale and zero [capacity][groups] each.
//
// L formats, capacity <= 128, rank r: the number at (token, channel) is the sum over components of scale * token factor * basis. Both
// factors are arrays of b-bit codes whose rows begin at a byte, in the orders in which attention reads them:
//   keys    basis [dim][r], then token factor [r][capacity].
//   values  basis [r][dim], then token factor [capacity][r].
//   then    one f32 scale per component [r]. Token factor and scales begin at multiples of 4.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

inline constexpr int32_t r_tile_tokens = 16;
inline constexpr int32_t c_tile_tokens = 128;
inline constexpr int32_t l_tile_tokens = 128;
inline constexpr size_t place_bytes = 64;
// Parts start at multiples of this, so that a GPU reads them as 32-bit words and vectors of four.
inline constexpr size_t part_alignment = 16;

constexpr size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

constexpr bool is_full_format(int32_t format) { return format >= SKERRY_FORMAT_F32 && format <= SKERRY_FORMAT_BF16; }
constexpr bool is_r_format(int32_t format) { return format >= SKERRY_FORMAT_R2 && format <= SKERRY_FORMAT_R8; }
constexpr bool is_c_format(int32_t format) { return format == SKERRY_FORMAT_C2 || format == SKERRY_FORMAT_C4; }
constexpr bool is_l_format(int32_t format) { return format >= SKERRY_FORMAT_L32 && format <= SKERRY_FORMAT_L4; }

constexpr int32_t format_bits(int32_t format) {
    switch (format) {
    case SKERRY_FORMAT_F32:
    case SKERRY_FORMAT_L32: return 32;
    case SKERRY_FORMAT_F16:
    case SKERRY_FORMAT_BF16:
    case SKERRY_FORMAT_L16: return 16;
    case SKERRY_FORMAT_R8:
    case SKERRY_FORMAT_L8: return 8;
    case SKERRY_FORMAT_R4:
    case SKERRY_FORMAT_C4:
    case SKERRY_FORMAT_L4: return 4;
    case SKERRY_FORMAT_R3: return 3;
    case SKERRY_FORMAT_R2:
    case SKERRY_FORMAT_C2: return 2;
    default: return 0;
    }
}

// One plane of `bits` bits of an R format, in bytes.
constexpr size_t r_plane_bytes(int32_t bits, skerry_side side, int32_t dim, int32_t capacity) {
    const size_t per_byte = 8 / static_cast<size_t>(bits);
    const size_t channels = static_cast<size_t>(dim);
    const size_t tokens = static_cast<size_t>(capacity);
    if (side == SKERRY_SIDE_KEY) {
        const size_t lines = (channels + 4 * per_byte - 1) / (4 * per_byte);
        return lines * tokens * 4;
    }
    const size_t block = 16 * per_byte;
    const size_t whole = channels / block;
    const size_t rest_lanes = (channels % block + per_byte - 1) / per_byte;
    return (whole * 16 + rest_lanes) * 4 * ((tokens + 3) / 4);
}

// Byte offset of the scales of an R part.
constexpr size_t r_scale_offset(int32_t format, skerry_side side, int32_t dim, int32_t capacity) {
    if (format == SKERRY_FORMAT_R3) return r_plane_bytes(2, side, dim, capacity) + r_plane_bytes(1, side, dim, capacity);
    return r_plane_bytes(format_bits(format), side, dim, capacity);
}

constexpr size_t c_code_bytes(int32_t format, skerry_side side, int32_t dim, int32_t capacity) {
    const size_t bits = static_cast<size_t>(format_bits(format));
    const size_t channels = static_cast<size_t>(dim);
    const size_t tokens = static_cast<size_t>(capacity);
    return side == SKERRY_SIDE_KEY ? channels * ((tokens * bits + 7) / 8) : tokens * ((channels * bits + 7) / 8);
}

constexpr int32_t c_value_groups(int32_t dim, int32_t value_group) {
    return value_group <= 0 ? 1 : (dim + value_group - 1) / value_group;
}

// Ranks of the keys and of the values as skerry_tile.epoch holds them for L formats.
constexpr int32_t tile_key_rank(uint16_t epoch) { return epoch & 0xff; }
constexpr int32_t tile_value_rank(uint16_t epoch) { return epoch >> 8; }
constexpr uint16_t tile_ranks(int32_t key_rank, int32_t value_rank) {
    return static_cast<uint16_t>(static_cast<uint32_t>(key_rank) | static_cast<uint32_t>(value_rank) << 8);
}

// Bytes of one row of `length` codes of an L format.
constexpr size_t l_row_bytes(int32_t format, int32_t length) {
    return (static_cast<size_t>(length) * static_cast<size_t>(format_bits(format)) + 7) / 8;
}

// Byte offsets within an L part, whose basis begins it.
constexpr size_t l_token_offset(int32_t format, skerry_side side, int32_t dim, int32_t rank) {
    const bool is_key = side == SKERRY_SIDE_KEY;
    return round_up(static_cast<size_t>(is_key ? dim : rank) * l_row_bytes(format, is_key ? rank : dim), 4);
}
constexpr size_t l_scale_offset(int32_t format, skerry_side side, int32_t dim, int32_t capacity, int32_t rank) {
    const bool is_key = side == SKERRY_SIDE_KEY;
    return l_token_offset(format, side, dim, rank) +
           round_up(static_cast<size_t>(is_key ? rank : capacity) * l_row_bytes(format, is_key ? capacity : rank), 4);
}

// Bytes of a part without padding: what a published formula counts. `rank` is of L formats.
constexpr size_t part_bytes(int32_t format, skerry_side side, int32_t dim, int32_t capacity, int32_t value_group = 0, int32_t rank = 0) {
    const size_t channels = static_cast<size_t>(dim);
    const size_t tokens = static_cast<size_t>(capacity);
    if (is_l_format(format)) return l_scale_offset(format, side, dim, capacity, rank) + 4 * static_cast<size_t>(rank);
    if (is_full_format(format)) return channels * tokens * static_cast<size_t>(format_bits(format)) / 8;
    if (is_r_format(format)) return r_scale_offset(format, side, dim, capacity) + 2 * tokens;
    const size_t grids = side == SKERRY_SIDE_KEY ? channels : tokens * static_cast<size_t>(c_value_groups(dim, value_group));
    return c_code_bytes(format, side, dim, capacity) + 4 * grids;
}

// Values start here within a tile or record; keys start at 0.
constexpr size_t value_offset(int32_t key_format, int32_t key_dim, int32_t capacity, int32_t key_rank = 0) {
    return round_up(part_bytes(key_format, SKERRY_SIDE_KEY, key_dim, capacity, 0, key_rank), part_alignment);
}

// Bytes of a tile or record, a multiple of place_bytes.
constexpr size_t record_bytes(int32_t key_format, int32_t value_format, int32_t key_dim, int32_t value_dim, int32_t capacity,
                              int32_t value_group = 0, int32_t key_rank = 0, int32_t value_rank = 0) {
    return round_up(value_offset(key_format, key_dim, capacity, key_rank) +
                        part_bytes(value_format, SKERRY_SIDE_VALUE, value_dim, capacity, value_group, value_rank),
                    place_bytes);
}

// Tokens of one tile of a window: windows are cut into tiles of at most 16 tokens, C and L records hold a window whole.
constexpr int32_t tile_capacity(int32_t format, int32_t window_tokens) {
    return is_c_format(format) || is_l_format(format) || window_tokens < r_tile_tokens ? window_tokens : r_tile_tokens;
}

// R formats rotate by a Hadamard transform of this size, repeated over the dimension (the largest power of two that divides it); 1: none.
constexpr int32_t hadamard_size(int32_t dim) { return dim & -dim; }

static_assert(record_bytes(SKERRY_FORMAT_R3, SKERRY_FORMAT_R2, 64, 64, 16) == 704);
static_assert(part_bytes(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, 128, 16) == 16 * (128 * 2 / 8 + 2));
static_assert(part_bytes(SKERRY_FORMAT_R2, SKERRY_SIDE_VALUE, 128, 16) == 16 * (128 * 2 / 8 + 2));
static_assert(8 * (part_bytes(SKERRY_FORMAT_C2, SKERRY_SIDE_KEY, 128, 8) + part_bytes(SKERRY_FORMAT_C2, SKERRY_SIDE_VALUE, 128, 8)) ==
              8448);
// The f32 factors of a span of 16 and of 129 tokens as SeKV counts them (sekv.md T12): 2 sides, 8 heads, r (tokens + 1 + d) numbers.
static_assert(16 * part_bytes(SKERRY_FORMAT_L32, SKERRY_SIDE_KEY, 128, 16, 0, 16) == 148480);
static_assert(16 * part_bytes(SKERRY_FORMAT_L32, SKERRY_SIDE_VALUE, 128, 129, 0, 32) == 528384);

} // namespace skerry
