// SPDX-License-Identifier: MIT
#pragma once

// Where the codes and scales of R formats lie (codec/layout.hpp), one code at a time.

#include "base/half.hpp"
#include "codec/layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace skerry::ref {

struct CodePlace {
    size_t byte;
    uint32_t shift;
};

// `bits` is the width of the plane.
inline CodePlace code_place(int32_t bits, skerry_side side, int32_t dim, int32_t capacity, int32_t token, int32_t channel) {
    const int32_t n = 8 / bits;
    if (side == SKERRY_SIDE_KEY) {
        const int32_t line = channel / (4 * n), within = channel % (4 * n);
        return {4 * (static_cast<size_t>(line) * static_cast<size_t>(capacity) + static_cast<size_t>(token)) +
                    static_cast<size_t>(within % 4),
                static_cast<uint32_t>(bits * (within / 4))};
    }
    const int32_t block = channel / (16 * n), within = channel % (16 * n);
    const int32_t channels = dim - 16 * n * block < 16 * n ? dim - 16 * n * block : 16 * n;
    const int32_t lanes = (channels + n - 1) / n, quads = (capacity + 3) / 4;
    const size_t word =
        static_cast<size_t>(16 * quads) * static_cast<size_t>(block) + static_cast<size_t>(lanes * (token / 4) + within % lanes);
    return {4 * word + static_cast<size_t>(token % 4), static_cast<uint32_t>(bits * (within / lanes))};
}

inline uint32_t load_code(const uint8_t *part, skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t token,
                          int32_t channel) {
    const int32_t bits = format == SKERRY_FORMAT_R3 ? 2 : format_bits(format);
    const CodePlace low = code_place(bits, side, dim, capacity, token, channel);
    uint32_t code = (uint32_t(part[low.byte]) >> low.shift) & ((1u << bits) - 1u);
    if (format == SKERRY_FORMAT_R3) {
        const CodePlace high = code_place(1, side, dim, capacity, token, channel);
        code |= ((uint32_t(part[r_plane_bytes(2, side, dim, capacity) + high.byte]) >> high.shift) & 1u) << 2;
    }
    return code;
}

// The bits of the code must be 0 before.
inline void store_code(uint8_t *part, skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t token, int32_t channel,
                       uint32_t code) {
    const int32_t bits = format == SKERRY_FORMAT_R3 ? 2 : format_bits(format);
    const CodePlace low = code_place(bits, side, dim, capacity, token, channel);
    part[low.byte] = static_cast<uint8_t>(part[low.byte] | ((code & ((1u << bits) - 1u)) << low.shift));
    if (format == SKERRY_FORMAT_R3) {
        const CodePlace high = code_place(1, side, dim, capacity, token, channel);
        uint8_t &byte = part[r_plane_bytes(2, side, dim, capacity) + high.byte];
        byte = static_cast<uint8_t>(byte | ((code >> 2) << high.shift));
    }
}

inline uint16_t load_half(const uint8_t *at, size_t index) {
    uint16_t half = 0;
    std::memcpy(&half, at + 2 * index, 2);
    return half;
}

inline void store_half(uint8_t *at, size_t index, uint16_t half) { std::memcpy(at + 2 * index, &half, 2); }

} // namespace skerry::ref
