// SPDX-License-Identifier: MIT
#pragma once

// The encoder of R formats, written once over vector operations. Lanes are tokens, so sums over channels are vertical and keep the
// order of the reference. The including file defines `width`, the types Floats, Ints and Mask and the operations, all in its unnamed
// namespace, and includes this file once.

#include "cpu/ref/search.hpp"
#include "cpu/x86/code_shape.hpp"

#include <cstring>

namespace skerry {
float rotation_norm(int32_t dim);
}

namespace {

constexpr int code_row = 16; // codes of one channel: a byte per token of the record
constexpr int padding_channels = 32;

template <int Count, int Distance>
inline void butterflies(Floats *z) {
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) {
        if ((i & Distance) != 0) continue;
        const Floats a = z[i], b = z[i + Distance];
        z[i] = add(a, b);
        z[i + Distance] = sub(a, b);
    }
}

// Stages of distance 1 to Count / 2 within `Count` vectors, those below `stages_below` only.
template <int Count>
inline void transform(Floats *z, int stages_below) {
    if constexpr (Count > 1) {
        if (stages_below > 1) butterflies<Count, 1>(z);
    }
    if constexpr (Count > 2) {
        if (stages_below > 2) butterflies<Count, 2>(z);
    }
    if constexpr (Count > 4) {
        if (stages_below > 4) butterflies<Count, 4>(z);
    }
    if constexpr (Count > 8) {
        if (stages_below > 8) butterflies<Count, 8>(z);
    }
}

// log2(Count) stages from `distance` on, over y[dim][width].
template <int Count>
void transform_pass(float *y, int32_t dim, int32_t distance) {
    for (int32_t base = 0; base < dim; base += Count * distance) {
        for (int32_t i = base; i < base + distance; ++i) {
            Floats z[Count];
#pragma GCC unroll 16
            for (int k = 0; k < Count; ++k)
                z[k] = load(y + static_cast<size_t>(i + k * distance) * width);
            transform<Count>(z, Count);
#pragma GCC unroll 16
            for (int k = 0; k < Count; ++k)
                store(y + static_cast<size_t>(i + k * distance) * width, z[k]);
        }
    }
}

// rows [tokens][dim] -> y [dim][width], balanced and rotated but for the norm.
void rotate_rows(const skerry_code_params &params, const float *rows, int32_t tokens, float *y) {
    const int32_t dim = params.dim, n = dim & -dim;
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    const Floats limit = broadcast(skerry::ref::row_limit), negative_limit = broadcast(-skerry::ref::row_limit);
    for (int32_t c = 0; c < dim; c += width) {
        const int32_t count = dim - c < width ? dim - c : width;
        const Floats signs = n > 1 ? hash_signs(c) : zero();
        const Floats mean = is_key ? load_some(params.epoch->mean + c, count) : zero();
        const Floats balance = is_key ? load_some(params.epoch->balance + c, count) : zero();
        Floats z[width];
#pragma GCC unroll 16
        for (int t = 0; t < width; ++t) {
            Floats value = zero();
            if (t < tokens) {
                value = load_some(rows + static_cast<size_t>(t) * static_cast<size_t>(dim) + c, count);
                if (is_key) value = mul(sub(value, mean), balance);
                value = greatest(least(value, limit), negative_limit);
                value = flip(value, signs);
            }
            z[t] = value;
        }
        transpose(z);
        transform<width>(z, n);
        for (int i = 0; i < count; ++i)
            store(y + static_cast<size_t>(c + i) * width, z[i]);
    }
    int32_t distance = width;
    for (; distance * 8 <= n; distance *= 8)
        transform_pass<8>(y, dim, distance);
    if (distance * 4 <= n) {
        transform_pass<4>(y, dim, distance);
    } else if (distance * 2 <= n) {
        transform_pass<2>(y, dim, distance);
    }
}

struct RowSums {
    Floats square;
    Floats magnitude;
};

struct BestStep {
    Floats inverse;
    Floats product;
};

template <int Bits>
BestStep search_step(const float *y, int32_t dim, const RowSums &sums, const skerry::ref::StepSearch &search) {
    constexpr int count = skerry::ref::step_candidates;
    const Floats inverse_rms = div(broadcast(1.0f), root(div(sums.square, broadcast(static_cast<float>(dim)))));
    const Floats outermost = broadcast(static_cast<float>((1 << (Bits - 1)) - 1)), one = broadcast(1.0f);
    Floats inverse[count], products[count], squares[count];
#pragma GCC unroll 5
    for (int k = 0; k < count; ++k) {
        inverse[k] = mul(inverse_rms, broadcast(search.inverse[k]));
        products[k] = squares[k] = zero();
    }
    for (int32_t c = 0; c < dim; ++c) {
        const Floats value = magnitude(load(y + static_cast<size_t>(c) * width));
#pragma GCC unroll 5
        for (int k = 0; k < count; ++k) {
            const Floats steps = mul(value, inverse[k]);
            if constexpr (Bits == 2) {
                // Indices are 0 and 1: the products are the value or nothing, index (index + 1) is 2 or
                // nothing.
                const Mask is_outer = is_at_least(steps, one);
                products[k] = add_where(products[k], is_outer, value);
                squares[k] = add_where(squares[k], is_outer, broadcast(2.0f));
            } else {
                const Floats level = truncate(least(steps, outermost));
                products[k] = add(products[k], mul(value, level));
                squares[k] = add(squares[k], mul(level, add(level, one)));
            }
        }
    }
    const Floats half_magnitude = mul(broadcast(0.5f), sums.magnitude);
    const Floats centre_squares = broadcast(0.25f * static_cast<float>(dim));
    Floats best_gain = broadcast(-1.0f);
    BestStep best{zero(), zero()};
    for (int k = 0; k < count; ++k) {
        const Floats product = add(products[k], half_magnitude);
        const Floats gain = div(mul(product, product), add(squares[k], centre_squares));
        const Mask is_better = is_above(gain, best_gain);
        best_gain = choose(is_better, gain, best_gain);
        best.inverse = choose(is_better, inverse[k], best.inverse);
        best.product = choose(is_better, product, best.product);
    }
    return best;
}

BestStep largest_step(const float *y, int32_t dim, const RowSums &sums, Floats peak) {
    const Floats inverse = div(broadcast(128.0f), peak), outermost = broadcast(127.0f);
    Floats product = zero();
    for (int32_t c = 0; c < dim; ++c) {
        const Floats value = magnitude(load(y + static_cast<size_t>(c) * width));
        product = add(product, mul(value, truncate(least(mul(value, inverse), outermost))));
    }
    return {inverse, add(product, mul(broadcast(0.5f), sums.magnitude))};
}

// Codes and scales of `width` tokens whose rows lie in y: codes [dim][code_row].
void code_rows(const skerry_code_params &params, float *y, uint8_t *codes, uint8_t *scales) {
    const int32_t dim = params.dim;
    Floats peak = zero();
    for (int32_t c = 0; c < dim; ++c)
        peak = greatest(magnitude(load(y + static_cast<size_t>(c) * width)), peak);
    const Mask is_live = is_above(peak, zero());

    const Ints exponent = exponent_of(peak, skerry::ref::row_exponent_least);
    const Floats shrink = power_of_two(negate(exponent));
    RowSums sums{zero(), zero()};
    for (int32_t c = 0; c < dim; ++c) {
        const Floats value = mul(load(y + static_cast<size_t>(c) * width), shrink);
        store(y + static_cast<size_t>(c) * width, value);
        sums.square = add(sums.square, mul(value, value));
        sums.magnitude = add(sums.magnitude, magnitude(value));
    }

    BestStep best;
    switch (params.format) {
    case SKERRY_FORMAT_R2:
        best = search_step<2>(y, dim, sums, skerry::ref::step_search_r2);
        break;
    case SKERRY_FORMAT_R3:
        best = search_step<3>(y, dim, sums, skerry::ref::step_search_r3);
        break;
    case SKERRY_FORMAT_R4:
        best = search_step<4>(y, dim, sums, skerry::ref::step_search_r4);
        break;
    default:
        best = largest_step(y, dim, sums, mul(peak, shrink));
        break;
    }

    const bool is_key = params.side == SKERRY_SIDE_KEY;
    const float exponent_scale = is_key ? params.epoch->key_exponent_scale : params.epoch->value_exponent_scale;
    const Floats unit = broadcast(skerry::rotation_norm(dim) * (1.0f / exponent_scale));
    const Floats scale = mul(mul(div(sums.square, best.product), unit), power_of_two(exponent));
    store_scales(scales, keep(is_live, least(scale, broadcast(skerry::ref::f16_largest))));

    const int32_t half = 1 << (shape_bits(params.format) - 1);
    const Floats outermost = broadcast(static_cast<float>(half - 1));
    for (int32_t c = 0; c < dim; ++c) {
        const Floats value = load(y + static_cast<size_t>(c) * width);
        const Floats level = least(mul(magnitude(value), best.inverse), outermost);
        store_codes(codes + static_cast<size_t>(c) * code_row, to_codes(level, value, half, is_live));
    }
}

struct Planes {
    int32_t bits;
    int32_t shift;
};

// One plane of a part from codes [dim and padding][code_row]: bits [shift, shift + bits) of each.
void pack_plane(const skerry_code_params &params, Planes plane, const uint8_t *codes, uint8_t *part) {
    const int32_t dim = params.dim, capacity = params.capacity, n = 8 / plane.bits;
    const __m128i mask = _mm_set1_epi8(static_cast<char>((1 << plane.bits) - 1));
    // Shifts within 16 bits: masked first, no bit of a code reaches its neighbour's byte.
    const auto field = [&](int32_t channel, int32_t j) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + static_cast<size_t>(channel) * code_row));
        const __m128i bits = _mm_and_si128(_mm_srl_epi16(code, _mm_cvtsi32_si128(plane.shift)), mask);
        return _mm_sll_epi16(bits, _mm_cvtsi32_si128(plane.bits * j));
    };
    if (params.side == SKERRY_SIDE_KEY) {
        const size_t line_bytes = 4 * static_cast<size_t>(capacity);
        for (int32_t line = 0; line * 4 * n < dim; ++line) {
            __m128i byte[4];
            for (int32_t b = 0; b < 4; ++b) {
                byte[b] = field(4 * n * line + b, 0);
                for (int32_t j = 1; j < n; ++j)
                    byte[b] = _mm_or_si128(byte[b], field(4 * n * line + 4 * j + b, j));
            }
            const __m128i low01 = _mm_unpacklo_epi8(byte[0], byte[1]), high01 = _mm_unpackhi_epi8(byte[0], byte[1]);
            const __m128i low23 = _mm_unpacklo_epi8(byte[2], byte[3]), high23 = _mm_unpackhi_epi8(byte[2], byte[3]);
            __m128i words[4] = {_mm_unpacklo_epi16(low01, low23), _mm_unpackhi_epi16(low01, low23), _mm_unpacklo_epi16(high01, high23),
                                _mm_unpackhi_epi16(high01, high23)};
            std::memcpy(part + static_cast<size_t>(line) * line_bytes, words, line_bytes);
        }
        return;
    }
    const int32_t quads = (capacity + 3) / 4;
    for (int32_t first = 0; first < dim; first += 16 * n) {
        const int32_t channels = dim - first < 16 * n ? dim - first : 16 * n, lanes = (channels + n - 1) / n;
        uint8_t *const block = part + static_cast<size_t>(first / n) * 4 * static_cast<size_t>(quads);
        for (int32_t lane = 0; lane < lanes; ++lane) {
            __m128i word = field(first + lane, 0);
            for (int32_t j = 1; j < n; ++j)
                word = _mm_or_si128(word, field(first + lanes * j + lane, j));
            uint32_t quad[4];
            std::memcpy(quad, &word, sizeof quad);
            for (int32_t q = 0; q < quads; ++q)
                std::memcpy(block + 4 * static_cast<size_t>(lanes * q + lane), &quad[q], 4);
        }
    }
}

void encode_r(const skerry_code_params &params, const float *rows, uint8_t *part, void *scratch) {
    const size_t dim = static_cast<size_t>(params.dim);
    float *const y = static_cast<float *>(scratch);
    uint8_t *const codes = reinterpret_cast<uint8_t *>(y + dim * width);
    std::memset(codes + dim * code_row, 0, padding_channels * code_row);
    alignas(16) uint8_t scales[2 * code_row];
    for (int32_t first = 0; first < code_row; first += width) {
        const int32_t rest = params.count - first, tokens = rest < 0 ? 0 : rest < width ? rest : width;
        rotate_rows(params, rows + static_cast<size_t>(first) * dim, tokens, y);
        code_rows(params, y, codes + first, scales + 2 * first);
    }
    if (params.format == SKERRY_FORMAT_R3) {
        pack_plane(params, {2, 0}, codes, part);
        pack_plane(params, {1, 2}, codes, part + shape_plane_bytes(2, params.side, params.dim, params.capacity));
    } else {
        pack_plane(params, {shape_bits(params.format), 0}, codes, part);
    }
    std::memcpy(part + shape_scale_offset(params.format, params.side, params.dim, params.capacity), scales,
                2 * static_cast<size_t>(params.capacity));
}

} // namespace
