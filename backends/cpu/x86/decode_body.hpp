// SPDX-License-Identifier: MIT
#pragma once

// The decoder of R formats, written once over vector operations. Lanes are channels; dimensions are multiples of 16. The butterflies
// are exact (ref/decode.cpp), so their order is free. The including file defines `width`, the types Floats and Ints and the
// operations, all in its unnamed namespace, and includes this file once.

#include "cpu/x86/code_shape.hpp"

namespace skerry {
float rotation_norm(int32_t dim);
}

namespace {

// Where `width` consecutive channels of a value lie within the words of their block: lanes of consecutive
// words, or gathered.
struct ValueGroup {
    int32_t index[width];
    int32_t shift[width];
    int32_t block_word; // first word of the block over 4-token groups
    int32_t lanes;
    int32_t contiguous; // all shifts are equal and the indices run on
    int32_t padding[width - 3];
};

void prepare_groups(ValueGroup *groups, int32_t bits, int32_t dim, int32_t capacity) {
    const int32_t n = 8 / bits, quads = (capacity + 3) / 4;
    for (int32_t c = 0; c < dim; c += width) {
        ValueGroup &group = groups[c / width];
        const int32_t block = c / (16 * n), within = c % (16 * n), rest = dim - 16 * n * block;
        const int32_t channels = rest < 16 * n ? rest : 16 * n;
        group.lanes = (channels + n - 1) / n;
        group.block_word = 16 * quads * block;
        group.contiguous = within % group.lanes + width <= group.lanes;
        for (int32_t i = 0; i < width; ++i) {
            group.index[i] = (within + i) % group.lanes;
            group.shift[i] = bits * ((within + i) / group.lanes);
        }
    }
}

template <int Bits>
inline Ints value_codes(const uint8_t *plane, const ValueGroup &group, int32_t token) {
    const uint8_t *const words = plane + 4 * (static_cast<size_t>(group.block_word) + static_cast<size_t>(group.lanes * (token / 4)));
    const int32_t byte_shift = 8 * (token % 4);
    if (group.contiguous != 0) {
        return take_codes(load_words(words + 4 * static_cast<size_t>(group.index[0])), byte_shift + group.shift[0], (1 << Bits) - 1);
    }
    return take_codes(gather_words(words, load_index(group.index), group.lanes), load_index(group.shift), byte_shift, (1 << Bits) - 1);
}

template <int Bits, bool is_key>
inline Ints side_codes(const skerry_code_params &params, const uint8_t *plane, const ValueGroup *groups, int32_t token, int32_t c) {
    if constexpr (is_key) return key_codes<Bits>(plane, params.capacity, token, c);
    return value_codes<Bits>(plane, groups[c / width], token);
}

template <int Count>
void transform_row(float *row, int32_t dim, int32_t distance) {
    for (int32_t base = 0; base < dim; base += Count * distance) {
        for (int32_t i = base; i < base + distance; i += width) {
            Floats z[Count];
#pragma GCC unroll 8
            for (int k = 0; k < Count; ++k)
                z[k] = load(row + i + k * distance);
#pragma GCC unroll 4
            for (int step = 1; step < Count; step *= 2) {
#pragma GCC unroll 8
                for (int k = 0; k < Count; ++k) {
                    if ((k & step) != 0) continue;
                    const Floats a = z[k], b = z[k + step];
                    z[k] = add(a, b);
                    z[k + step] = sub(a, b);
                }
            }
#pragma GCC unroll 8
            for (int k = 0; k < Count; ++k)
                store(row + i + k * distance, z[k]);
        }
    }
}

// Sign over balance for keys, the sign for values: [dim].
template <bool is_key>
void prepare_factors(const skerry_code_params &params, float *factors) {
    for (int32_t c = 0; c < params.dim; c += width) {
        const Floats one = broadcast(1.0f);
        store(factors + c, flip(is_key ? div(one, load(params.epoch->balance + c)) : one, hash_signs(c)));
    }
}

template <int Format, bool is_key>
void decode_r_rows(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch) {
    constexpr int bits = Format == SKERRY_FORMAT_R2 ? 2 : Format == SKERRY_FORMAT_R3 ? 3 : Format == SKERRY_FORMAT_R4 ? 4 : 8;
    constexpr int low_bits = bits == 3 ? 2 : bits;
    const int32_t dim = params.dim, n = dim & -dim;
    const uint8_t *const high_plane = part + shape_plane_bytes(2, params.side, dim, params.capacity);
    const uint8_t *const scales = part + shape_scale_offset(params.format, params.side, dim, params.capacity);

    float *const factors = static_cast<float *>(scratch);
    ValueGroup *const low_groups = reinterpret_cast<ValueGroup *>(factors + dim), *const high_groups = low_groups + dim / width;
    prepare_factors<is_key>(params, factors);
    if (!is_key) {
        prepare_groups(low_groups, low_bits, dim, params.capacity);
        if constexpr (bits == 3) prepare_groups(high_groups, 1, dim, params.capacity);
    }

    const float exponent_scale = is_key ? params.epoch->key_exponent_scale : params.epoch->value_exponent_scale;
    const float norm = skerry::rotation_norm(dim);
    const Floats centre = broadcast(0.5f * static_cast<float>((1 << bits) - 1));
    for (int32_t t = 0; t < params.count; ++t) {
        float *const row = rows + static_cast<size_t>(t) * static_cast<size_t>(dim);
        for (int32_t c = 0; c < dim; c += width) {
            Ints codes = side_codes<low_bits, is_key>(params, part, low_groups, t, c);
            if constexpr (bits == 3) codes = join_codes(codes, side_codes<1, is_key>(params, high_plane, high_groups, t, c));
            store(row + c, in_lane_stages(sub(to_floats(codes), centre)));
        }
        int32_t distance = width;
        for (; distance * 8 <= n; distance *= 8)
            transform_row<8>(row, dim, distance);
        if (distance * 4 <= n) {
            transform_row<4>(row, dim, distance);
        } else if (distance * 2 <= n) {
            transform_row<2>(row, dim, distance);
        }
        const Floats scale = broadcast(load_half(scales + 2 * static_cast<size_t>(t)) * exponent_scale * norm);
        if (is_key) {
            for (int32_t c = 0; c < dim; c += width) {
                const Floats value = mul(mul(load(row + c), scale), load(factors + c));
                store(row + c, add(value, load(params.epoch->mean + c)));
            }
        } else {
            for (int32_t c = 0; c < dim; c += width)
                store(row + c, mul(mul(load(row + c), scale), load(factors + c)));
        }
    }
}

template <bool is_key>
void decode_r_side(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch) {
    switch (params.format) {
    case SKERRY_FORMAT_R2:
        decode_r_rows<SKERRY_FORMAT_R2, is_key>(params, part, rows, scratch);
        break;
    case SKERRY_FORMAT_R3:
        decode_r_rows<SKERRY_FORMAT_R3, is_key>(params, part, rows, scratch);
        break;
    case SKERRY_FORMAT_R4:
        decode_r_rows<SKERRY_FORMAT_R4, is_key>(params, part, rows, scratch);
        break;
    default:
        decode_r_rows<SKERRY_FORMAT_R8, is_key>(params, part, rows, scratch);
        break;
    }
}

void decode_r(const skerry_code_params &params, const uint8_t *part, float *rows, void *scratch) {
    if (params.side == SKERRY_SIDE_KEY) {
        decode_r_side<true>(params, part, rows, scratch);
    } else {
        decode_r_side<false>(params, part, rows, scratch);
    }
}

} // namespace
