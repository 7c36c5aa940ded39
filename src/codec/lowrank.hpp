// SPDX-License-Identifier: MIT
#pragma once

// One number of an L part (codec/layout.hpp) at a time: what the plain C++ kernels read and write. Codes of l32 and l16 are floating-point
// numbers; of l8 the code c stands for c, of l4, 1 to 15, for c - 8.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

inline constexpr float l4_centre = 8.0f;

// The code at `index` of a row that begins at a byte, as a number without its scale.
float l_load(skerry_format format, const uint8_t *row, size_t index);

// One part, read by component.
class LowRankPart {
public:
    LowRankPart(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t rank, const uint8_t *part);

    float basis(int32_t component, int32_t channel) const;
    float token(int32_t component, int32_t token) const;
    float scale(int32_t component) const;

private:
    skerry_format format_;
    bool is_key_;
    size_t basis_row_, token_row_;
    const uint8_t *basis_, *tokens_, *scales_;
};

} // namespace skerry
