#pragma once

// The per-channel record of QEvict and KIVI: asymmetric min/max grids in 16 bits, two or four bits per code.
// Keys have one grid per channel over the tokens of the record, values one per token and group of channels.
//
// Record of one KV head, no padding, little-endian:
//   key codes    [d][tokens]   packed along tokens
//   key scales   [d]           16 bit
//   key zeros    [d]           16 bit
//   value codes  [tokens][d]   packed along channels
//   value scales [tokens][d / value_group]
//   value zeros  [tokens][d / value_group]
// Codes fill a byte from its low end. The scale and zero that are stored are the ones that encode.

#include <cstddef>
#include <cstdint>
#include <span>

namespace skerry {

// Follows the model's type: an f16 grid cannot hold what lies above 65,504.
enum class GridType : uint8_t { f16, bf16 };

struct ChannelShape {
    uint32_t d = 128;
    uint32_t tokens = 8;
    uint32_t value_group = 0; // channels per value grid; 0: all d
    uint32_t bits = 2;
    GridType grid = GridType::f16;
};

struct ChannelGrid {
    uint16_t scale = 0;
    uint16_t zero = 0;
};

// Bits are 2 or 4, and rows fill whole bytes: d, tokens and the value group are multiples of 8 / bits, the
// group divides d.
bool channel_supports(const ChannelShape &shape);

struct ChannelLayout {
    size_t key_codes = 0;
    size_t key_scales = 0;
    size_t key_zeros = 0;
    size_t value_codes = 0;
    size_t value_scales = 0;
    size_t value_zeros = 0;
    size_t bytes = 0;
};

ChannelLayout channel_layout(const ChannelShape &shape);

// One group of `count` numbers, `stride` floats apart: chooses the grid and writes packed codes, count * bits
// / 8 bytes. Any input gives finite output: NaN takes no part in the range and gets code 0, and magnitudes
// are held at the grid type's largest.
ChannelGrid channel_encode_group(const float *x, size_t stride, size_t count, uint32_t bits, GridType type,
                                 uint8_t *codes);
void channel_decode_group(const uint8_t *codes, size_t count, uint32_t bits, GridType type, ChannelGrid grid,
                          float *x, size_t stride);

// Largest |x - decoded| of a group whose grid is known: half a step and what rounding zero and scale can add
// at the ends.
float channel_error_bound(GridType type, ChannelGrid grid, uint32_t bits);

// Rows are tokens, `stride` floats apart. Keys are expected before the rotary embedding.
void channel_encode(const ChannelShape &shape, const float *keys, size_t key_stride, const float *values,
                    size_t value_stride, std::span<uint8_t> record);
void channel_decode_keys(const ChannelShape &shape, std::span<const uint8_t> record, float *keys,
                         size_t stride);
void channel_decode_values(const ChannelShape &shape, std::span<const uint8_t> record, float *values,
                           size_t stride);

} // namespace skerry
