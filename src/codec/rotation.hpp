// SPDX-License-Identifier: MIT
#pragma once

// The orthonormal rotation R of the R formats: a fixed pattern of signs, then a Hadamard transform of
// hadamard_size(dim) channels, repeated over the dimension. It spreads an outlier channel over all others, so
// that one scale per token serves. Where hadamard_size(dim) is 1, R is the identity.

#include "codec/layout.hpp"

#include <cstdint>

namespace skerry {

// The top bit of a 32-bit integer hash of the channel index: -1 where it is set. The same for keys, values
// and all dimensions.
constexpr bool rotation_flips(int32_t channel) {
    uint32_t hash = (static_cast<uint32_t>(channel) + 1u) * 0x9e3779b1u;
    hash ^= hash >> 15;
    hash *= 0x85ebca77u;
    return (hash >> 31) != 0;
}

constexpr float rotation_sign(int32_t channel) { return rotation_flips(channel) ? -1.0f : 1.0f; }

// 1 / sqrt(n) for n = hadamard_size(dim), rounded once.
float rotation_norm(int32_t dim);

// Butterflies only, without signs and norm: stages of distance 1, 2, 4, ... n / 2, each (a + b, a - b). The
// order is part of the format: encoders on all instruction sets give the same bytes.
void hadamard_blocks(float *row, int32_t dim);

// x <- R x, and x <- R^T x.
void rotate(float *row, int32_t dim);
void unrotate(float *row, int32_t dim);

} // namespace skerry
