// SPDX-License-Identifier: MIT
#pragma once

// The encoder of C formats over the vector operations of the including file; lanes are channels. The bytes are those of
// codec/channel.cpp: what the fast path does not follow exactly, it leaves to the reference.

#include "cpu/x86/code_shape.hpp"

#include <cstring>

namespace {

// Below this, no range and no offset of a grid leaves f32.
constexpr float channel_limit = 0x1p100f;

struct Grid {
    Halves scale;
    Halves zero;
    Floats scale_value;
    Floats zero_value;
    Mask is_spread;
};

struct GridRules {
    bool is_bf16;
    float largest;
    float top;
};

inline Grid make_grid(Floats low, Floats high, const GridRules &rules) {
    Grid grid;
    grid.zero = narrow(rules.is_bf16, low);
    const Halves step = narrow(rules.is_bf16, div(sub(high, low), broadcast(rules.top)));
    grid.is_spread = both(is_above(high, low), is_above(widen(rules.is_bf16, step), zero()));
    grid.scale_value = choose(grid.is_spread, widen(rules.is_bf16, step), broadcast(1.0f));
    grid.scale = narrow(rules.is_bf16, grid.scale_value);
    grid.zero_value = widen(rules.is_bf16, grid.zero);
    return grid;
}

inline Ints grid_codes(Floats held, const Grid &grid, float top) {
    const Floats ratio = div(sub(held, grid.zero_value), grid.scale_value);
    return to_whole(keep(grid.is_spread, nearest(greatest(least(ratio, broadcast(top)), zero()))));
}

inline Floats hold(Floats value, float largest) { return greatest(least(value, broadcast(largest)), broadcast(-largest)); }

bool is_tame(const float *rows, size_t count) {
    Floats largest = zero();
    for (size_t i = 0; i < count; i += width) {
        // The order of operands keeps a NaN.
        largest = choose(is_below(magnitude(load(rows + i)), broadcast(channel_limit)), largest, broadcast(channel_limit));
    }
    return !is_any(is_above(largest, zero()));
}

void encode_keys(const skerry_code_params &params, const GridRules &rules, const float *rows, uint8_t *part) {
    const int32_t bits = params.format == SKERRY_FORMAT_C2 ? 2 : 4, per_word = 32 / bits;
    const size_t dim = static_cast<size_t>(params.dim), row_bytes = (static_cast<size_t>(params.capacity * bits) + 7) / 8;
    uint8_t *const scales = part + dim * row_bytes, *const zeros = scales + 2 * dim;
    for (size_t c = 0; c < dim; c += width) {
        Floats low = hold(load(rows + c), rules.largest), high = low;
        for (int32_t t = 1; t < params.count; ++t) {
            const Floats held = hold(load(rows + static_cast<size_t>(t) * dim + c), rules.largest);
            low = least(held, low);
            high = greatest(held, high);
        }
        const Grid grid = make_grid(low, high, rules);
        store_halves(scales + 2 * c, grid.scale);
        store_halves(zeros + 2 * c, grid.zero);
        for (int32_t first = 0; first < params.count; first += per_word) {
            Ints word = no_bits();
            for (int32_t i = 0; i < per_word && first + i < params.count; ++i) {
                const Floats held = hold(load(rows + static_cast<size_t>(first + i) * dim + c), rules.largest);
                word = put_bits(word, grid_codes(held, grid, rules.top), bits * i);
            }
            uint32_t words[width];
            store_words(words, word);
            const size_t at = static_cast<size_t>(first / per_word) * 4, bytes = row_bytes - at < 4 ? row_bytes - at : 4;
            uint8_t *out = part + c * row_bytes + at;
            for (int i = 0; i < width; ++i, out += row_bytes)
                std::memcpy(out, &words[i], bytes);
        }
    }
}

// False where zeros of both signs may be the least: which one is stored depends on their order.
bool encode_value_group(const GridRules &rules, int32_t bits, const float *x, size_t count, uint8_t *codes, uint8_t *scale,
                        uint8_t *zero_at) {
    Floats low = hold(load(x), rules.largest), high = low;
    for (size_t i = width; i < count; i += width) {
        const Floats held = hold(load(x + i), rules.largest);
        low = least(held, low);
        high = greatest(held, high);
    }
    const float lowest = lowest_lane(low);
    if (lowest == 0) return false;
    const Grid grid = make_grid(broadcast(lowest), broadcast(highest_lane(high)), rules);
    uint8_t halves[2 * width];
    store_halves(halves, grid.scale);
    std::memcpy(scale, halves, 2);
    store_halves(halves, grid.zero);
    std::memcpy(zero_at, halves, 2);
    for (size_t i = 0; i < count; i += width) {
        const Ints code = grid_codes(hold(load(x + i), rules.largest), grid, rules.top);
        store_run(codes + i * static_cast<size_t>(bits) / 8, code, bits);
    }
    return true;
}

bool encode_values(const skerry_code_params &params, const GridRules &rules, const float *rows, uint8_t *part) {
    const int32_t bits = params.format == SKERRY_FORMAT_C2 ? 2 : 4;
    const size_t dim = static_cast<size_t>(params.dim), row_bytes = dim * static_cast<size_t>(bits) / 8;
    const size_t group = params.value_group <= 0 || params.value_group > params.dim ? dim : static_cast<size_t>(params.value_group);
    const size_t groups = dim / group;
    uint8_t *const scales = part + static_cast<size_t>(params.capacity) * row_bytes;
    uint8_t *const zeros = scales + 2 * groups * static_cast<size_t>(params.capacity);
    for (size_t t = 0; t < static_cast<size_t>(params.count); ++t) {
        for (size_t g = 0; g < groups; ++g) {
            const float *const x = rows + t * dim + g * group;
            uint8_t *const codes = part + t * row_bytes + g * group * static_cast<size_t>(bits) / 8;
            const size_t at = 2 * (t * groups + g);
            if (!encode_value_group(rules, bits, x, group, codes, scales + at, zeros + at)) return false;
        }
    }
    return true;
}

// False when nothing was decided: the reference writes the whole part then. Un-rotated keys come in as rows already.
bool encode_c(const skerry_code_params &params, const float *rows, uint8_t *part) {
    const int32_t group = params.value_group <= 0 || params.value_group > params.dim ? params.dim : params.value_group;
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    if (params.count < 1 || params.dim % width != 0 || (!is_key && (group % width != 0 || params.dim % group != 0))) return false;
    const size_t elements = static_cast<size_t>(params.count) * static_cast<size_t>(params.dim);
    if (!is_tame(rows, elements)) return false;
    GridRules rules;
    rules.is_bf16 = params.grid_dtype == SKERRY_DTYPE_BF16;
    rules.largest = rules.is_bf16 ? 0x1.fep127f : 65504.0f;
    rules.top = params.format == SKERRY_FORMAT_C2 ? 3.0f : 15.0f;
    std::memset(part, 0, shape_channel_bytes(params));
    if (!is_key) return encode_values(params, rules, rows, part);
    encode_keys(params, rules, rows, part);
    return true;
}

} // namespace
