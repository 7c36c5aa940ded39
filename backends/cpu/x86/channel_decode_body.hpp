// SPDX-License-Identifier: MIT
#pragma once

// The decoder of C formats over the vector operations of the including file; lanes are channels. Code times scale has at most 15 digits
// and the sum is rounded once, as in codec/channel.cpp.

#include "cpu/x86/code_shape.hpp"

#include <cstring>

namespace {

inline Floats from_grid(Ints code, Floats scale, Floats zero, float largest) {
    const Floats value = add(mul(to_floats(code), scale), zero);
    return greatest(least(value, broadcast(largest)), broadcast(-largest));
}

void decode_keys(const skerry_code_params &params, const uint8_t *part, float *rows, bool is_bf16, float largest) {
    const int32_t bits = params.format == SKERRY_FORMAT_C2 ? 2 : 4, per_word = 32 / bits;
    const size_t dim = static_cast<size_t>(params.dim), row_bytes = (static_cast<size_t>(params.capacity * bits) + 7) / 8;
    const uint8_t *const scales = part + dim * row_bytes, *const zeros = scales + 2 * dim;
    for (size_t c = 0; c < dim; c += width) {
        const Floats scale = load_halves(is_bf16, scales + 2 * c), zero = load_halves(is_bf16, zeros + 2 * c);
        for (int32_t first = 0; first < params.count; first += per_word) {
            const size_t at = static_cast<size_t>(first / per_word) * 4, bytes = row_bytes - at < 4 ? row_bytes - at : 4;
            int32_t words[width] = {};
            const uint8_t *in = part + c * row_bytes + at;
            for (int i = 0; i < width; ++i, in += row_bytes)
                std::memcpy(&words[i], in, bytes);
            const Ints word = load_index(words);
            for (int32_t i = 0; i < per_word && first + i < params.count; ++i) {
                const Ints code = take_codes(word, bits * i, (1 << bits) - 1);
                store(rows + static_cast<size_t>(first + i) * dim + c, from_grid(code, scale, zero, largest));
            }
        }
    }
}

void decode_values(const skerry_code_params &params, const uint8_t *part, float *rows, bool is_bf16, float largest) {
    const int32_t bits = params.format == SKERRY_FORMAT_C2 ? 2 : 4;
    const size_t dim = static_cast<size_t>(params.dim), row_bytes = dim * static_cast<size_t>(bits) / 8;
    const size_t group = params.value_group <= 0 || params.value_group > params.dim ? dim : static_cast<size_t>(params.value_group);
    const size_t groups = dim / group;
    const uint8_t *const scales = part + static_cast<size_t>(params.capacity) * row_bytes;
    const uint8_t *const zeros = scales + 2 * groups * static_cast<size_t>(params.capacity);
    for (size_t t = 0; t < static_cast<size_t>(params.count); ++t) {
        for (size_t g = 0; g < groups; ++g) {
            const size_t at = 2 * (t * groups + g);
            const Floats scale = broadcast(load_grid(is_bf16, scales + at)), zero = broadcast(load_grid(is_bf16, zeros + at));
            for (size_t c = g * group; c < (g + 1) * group; c += width) {
                const Ints code = load_run(part + t * row_bytes + c * static_cast<size_t>(bits) / 8, bits);
                store(rows + t * dim + c, from_grid(code, scale, zero, largest));
            }
        }
    }
}

// The product of a code and such a scale may leave f32, which the reference's f64 does not.
bool is_huge_scale(const uint8_t *scales, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        uint16_t half = 0;
        std::memcpy(&half, scales + 2 * i, 2);
        if ((half & 0x7f80u) >= (127u + 100u) << 7) return true;
    }
    return false;
}

// False where the reference has to do it.
bool decode_c(const skerry_code_params &params, const uint8_t *part, float *rows) {
    const int32_t group = params.value_group <= 0 || params.value_group > params.dim ? params.dim : params.value_group;
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    if (params.dim % width != 0 || (!is_key && (group % width != 0 || params.dim % group != 0))) return false;
    const bool is_bf16 = params.grid_dtype == SKERRY_DTYPE_BF16;
    if (is_bf16) {
        const size_t dim = static_cast<size_t>(params.dim), capacity = static_cast<size_t>(params.capacity);
        const size_t grids = is_key ? dim : capacity * (dim / static_cast<size_t>(group));
        if (is_huge_scale(part + shape_channel_bytes(params) - 4 * grids, grids)) return false;
    }
    const float largest = is_bf16 ? 0x1.fep127f : 65504.0f;
    if (is_key) {
        decode_keys(params, part, rows, is_bf16, largest);
    } else {
        decode_values(params, part, rows, is_bf16, largest);
    }
    return true;
}

} // namespace
