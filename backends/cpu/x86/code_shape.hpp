// SPDX-License-Identifier: MIT
#pragma once

// The arithmetic of codec/layout.hpp for R formats, as functions with internal linkage (see x86.hpp).

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace {

[[maybe_unused]] bool shape_is_r(skerry_format format) { return format >= SKERRY_FORMAT_R2 && format <= SKERRY_FORMAT_R8; }

[[maybe_unused]] bool shape_is_full(skerry_format format) { return format >= SKERRY_FORMAT_F32 && format <= SKERRY_FORMAT_BF16; }

[[maybe_unused]] bool shape_is_l(skerry_format format) { return format >= SKERRY_FORMAT_L32 && format <= SKERRY_FORMAT_L4; }

[[maybe_unused]] size_t shape_full_bytes(skerry_format format, int32_t dim, int32_t capacity) {
    return (format == SKERRY_FORMAT_F32 ? 4u : 2u) * static_cast<size_t>(dim) * static_cast<size_t>(capacity);
}

[[maybe_unused]] int32_t shape_bits(skerry_format format) {
    return format == SKERRY_FORMAT_R2 ? 2 : format == SKERRY_FORMAT_R3 ? 3 : format == SKERRY_FORMAT_R4 ? 4 : 8;
}

// Bytes of a plane of `bits` bits.
[[maybe_unused]] size_t shape_plane_bytes(int32_t bits, skerry_side side, int32_t dim, int32_t capacity) {
    const int32_t per_byte = 8 / bits;
    if (side == SKERRY_SIDE_KEY) {
        return 4 * static_cast<size_t>((dim + 4 * per_byte - 1) / (4 * per_byte)) * static_cast<size_t>(capacity);
    }
    const int32_t block = 16 * per_byte, rest = dim % block;
    return 4 * static_cast<size_t>(dim / block * 16 + (rest + per_byte - 1) / per_byte) * static_cast<size_t>((capacity + 3) / 4);
}

[[maybe_unused]] size_t shape_scale_offset(skerry_format format, skerry_side side, int32_t dim, int32_t capacity) {
    if (format != SKERRY_FORMAT_R3) return shape_plane_bytes(shape_bits(format), side, dim, capacity);
    return shape_plane_bytes(2, side, dim, capacity) + shape_plane_bytes(1, side, dim, capacity);
}

[[maybe_unused]] size_t shape_channel_bytes(const skerry_code_params &params) {
    const size_t bits = params.format == SKERRY_FORMAT_C2 ? 2 : 4;
    const size_t dim = static_cast<size_t>(params.dim), capacity = static_cast<size_t>(params.capacity);
    if (params.side == SKERRY_SIDE_KEY) return dim * ((capacity * bits + 7) / 8) + 4 * dim;
    const size_t groups = params.value_group <= 0 ? 1 : static_cast<size_t>((params.dim + params.value_group - 1) / params.value_group);
    return capacity * ((dim * bits + 7) / 8) + 4 * capacity * groups;
}

} // namespace
