// SPDX-License-Identifier: MIT
#include "codec/lowrank.hpp"

#include "base/half.hpp"
#include "codec/layout.hpp"

#include <cstring>

namespace skerry {

float l_load(skerry_format format, const uint8_t *row, size_t index) {
    switch (format) {
    case SKERRY_FORMAT_L32: {
        float value = 0;
        std::memcpy(&value, row + 4 * index, 4);
        return value;
    }
    case SKERRY_FORMAT_L16: {
        uint16_t half = 0;
        std::memcpy(&half, row + 2 * index, 2);
        return f16_to_f32(half);
    }
    case SKERRY_FORMAT_L8: {
        int8_t code = 0;
        std::memcpy(&code, row + index, 1);
        return static_cast<float>(code);
    }
    default:
        return static_cast<float>((row[index / 2] >> (4 * (index % 2))) & 15) - l4_centre;
    }
}

LowRankPart::LowRankPart(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t rank, const uint8_t *part)
    : format_(format), is_key_(side == SKERRY_SIDE_KEY), basis_row_(l_row_bytes(format, is_key_ ? rank : dim)),
      token_row_(l_row_bytes(format, is_key_ ? capacity : rank)), basis_(part), tokens_(part + l_token_offset(format, side, dim, rank)),
      scales_(part + l_scale_offset(format, side, dim, capacity, rank)) {}

float LowRankPart::basis(int32_t component, int32_t channel) const {
    const size_t j = static_cast<size_t>(component), c = static_cast<size_t>(channel);
    return is_key_ ? l_load(format_, basis_ + c * basis_row_, j) : l_load(format_, basis_ + j * basis_row_, c);
}

float LowRankPart::token(int32_t component, int32_t token) const {
    const size_t j = static_cast<size_t>(component), t = static_cast<size_t>(token);
    return is_key_ ? l_load(format_, tokens_ + j * token_row_, t) : l_load(format_, tokens_ + t * token_row_, j);
}

float LowRankPart::scale(int32_t component) const {
    float value = 0;
    std::memcpy(&value, scales_ + 4 * static_cast<size_t>(component), 4);
    return value;
}

} // namespace skerry
