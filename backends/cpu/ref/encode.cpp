// SPDX-License-Identifier: MIT
#include "codec/channel.hpp"
#include "codec/rotary.hpp"
#include "codec/rotation.hpp"
#include "cpu/ref/codes.hpp"
#include "cpu/ref/ref.hpp"
#include "cpu/ref/search.hpp"

#include <bit>
#include <cmath>

// Encoders on all instruction sets store the same bytes, so every rounding below is part of the format: no
// fused multiply-add, and sums run over channels in ascending order.

namespace skerry::ref {

namespace {

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// min(value, most), and `most` for a NaN, as the vector units' minimum does it.
float at_most(float value, float most) { return value < most ? value : most; }

// Level of a magnitude, counted outwards from the centre: 0 is the half step next to it.
int32_t outward_level(float magnitude, float inverse_step, float outermost) {
    return static_cast<int32_t>(at_most(magnitude * inverse_step, outermost));
}

// Sums of the levels that a step gives: y times level and level squared. Levels are half a step further out
// than their index, so both follow from sums over indices; those of index squared are exact.
struct StepSums {
    float product;
    float squares;
};

StepSums step_sums(const float *y, int32_t dim, float magnitude_sum, float inverse_step, float outermost) {
    float product = 0, squares = 0;
    for (int32_t c = 0; c < dim; ++c) {
        const float level = static_cast<float>(outward_level(std::abs(y[c]), inverse_step, outermost));
        product += std::abs(y[c]) * level;
        squares += level * (level + 1.0f);
    }
    return {product + 0.5f * magnitude_sum, squares + 0.25f * static_cast<float>(dim)};
}

void encode_row(const skerry_code_params &params, const float *row, int32_t token, uint8_t *part, float *y) {
    const int32_t dim = params.dim;
    const bool is_key = params.side == SKERRY_SIDE_KEY, is_rotated = hadamard_size(dim) > 1;
    for (int32_t c = 0; c < dim; ++c) {
        float value = is_key ? (row[c] - params.epoch->mean[c]) * params.epoch->balance[c] : row[c];
        value = at_most(value, row_limit);
        value = value > -row_limit ? value : -row_limit;
        y[c] = is_rotated && rotation_flips(c) ? -value : value;
    }
    hadamard_blocks(y, dim);
    float peak = 0;
    for (int32_t c = 0; c < dim; ++c)
        peak = std::abs(y[c]) > peak ? std::abs(y[c]) : peak;
    if (peak == 0) return;

    // Powers of two change no digit, and keep the squares of large and small rows in range.
    int exponent = static_cast<int>(std::bit_cast<uint32_t>(peak) >> 23) - 127;
    exponent = exponent > row_exponent_least ? exponent : row_exponent_least;
    const float shrink = power_of_two(-exponent);
    float square_sum = 0, magnitude_sum = 0;
    for (int32_t c = 0; c < dim; ++c) {
        y[c] *= shrink;
        square_sum += y[c] * y[c];
        magnitude_sum += std::abs(y[c]);
    }

    const int32_t bits = format_bits(params.format), half = 1 << (bits - 1);
    const float outermost = static_cast<float>(half - 1);
    float inverse_step = 0, product = 0;
    if (params.format == SKERRY_FORMAT_R8) {
        inverse_step = 128.0f / (peak * shrink);
        product = step_sums(y, dim, magnitude_sum, inverse_step, outermost).product;
    } else {
        const StepSearch &search = params.format == SKERRY_FORMAT_R2   ? step_search_r2
                                   : params.format == SKERRY_FORMAT_R3 ? step_search_r3
                                                                       : step_search_r4;
        const float inverse_rms = 1.0f / std::sqrt(square_sum / static_cast<float>(dim));
        float best_gain = -1;
        for (const float inverse : search.inverse) {
            const StepSums sums = step_sums(y, dim, magnitude_sum, inverse_rms * inverse, outermost);
            // Under the least-squares scale the squared error is square_sum - product^2 / squares.
            const float gain = sums.product * sums.product / sums.squares;
            if (gain > best_gain) {
                best_gain = gain;
                inverse_step = inverse_rms * inverse;
                product = sums.product;
            }
        }
    }

    const float exponent_scale = is_key ? params.epoch->key_exponent_scale : params.epoch->value_exponent_scale;
    const float unit = rotation_norm(dim) * (1.0f / exponent_scale);
    const float scale = square_sum / product * unit * power_of_two(exponent);
    store_half(part + r_scale_offset(params.format, params.side, dim, params.capacity), static_cast<size_t>(token),
               f32_to_f16(at_most(scale, f16_largest)));
    for (int32_t c = 0; c < dim; ++c) {
        const int32_t level = outward_level(std::abs(y[c]), inverse_step, outermost);
        const int32_t code = half + (std::signbit(y[c]) ? ~level : level);
        store_code(part, params.format, params.side, dim, params.capacity, token, c, static_cast<uint32_t>(code));
    }
}

GridType grid_type(const skerry_code_params &params) { return params.grid_dtype == SKERRY_DTYPE_BF16 ? GridType::bf16 : GridType::f16; }

void encode_channel_keys(const skerry_code_params &params, const float *rows, uint8_t *part, float *scratch) {
    const size_t dim = static_cast<size_t>(params.dim), count = static_cast<size_t>(params.count);
    const uint32_t bits = static_cast<uint32_t>(format_bits(params.format));
    const size_t row_bytes = (static_cast<size_t>(params.capacity) * bits + 7) / 8;
    const float *const source = channel_rows(&params, rows, scratch);
    uint8_t *const scales = part + c_code_bytes(params.format, params.side, params.dim, params.capacity);
    for (size_t c = 0; c < dim; ++c) {
        const ChannelGrid grid = channel_encode_group(source + c, dim, count, bits, grid_type(params), part + c * row_bytes);
        store_half(scales, c, grid.scale);
        store_half(scales, dim + c, grid.zero);
    }
}

void encode_channel_values(const skerry_code_params &params, const float *rows, uint8_t *part, float *scratch) {
    const size_t dim = static_cast<size_t>(params.dim), count = static_cast<size_t>(params.count);
    const size_t groups = static_cast<size_t>(c_value_groups(params.dim, params.value_group));
    const size_t group = groups == 1 ? dim : static_cast<size_t>(params.value_group);
    const uint32_t bits = static_cast<uint32_t>(format_bits(params.format)), per_byte = 8 / bits, mask = (1u << bits) - 1u;
    const size_t row_bytes = (dim * bits + 7) / 8;
    uint8_t *const scales = part + c_code_bytes(params.format, params.side, params.dim, params.capacity);
    uint8_t *const zeros = scales + 2 * groups * static_cast<size_t>(params.capacity);
    uint8_t *const codes = reinterpret_cast<uint8_t *>(scratch);
    for (size_t t = 0; t < count; ++t) {
        for (size_t g = 0; g < groups; ++g) {
            const size_t begin = g * group, length = begin + group <= dim ? group : dim - begin;
            std::memset(codes, 0, length);
            const ChannelGrid grid = channel_encode_group(rows + t * dim + begin, 1, length, bits, grid_type(params), codes);
            store_half(scales, t * groups + g, grid.scale);
            store_half(zeros, t * groups + g, grid.zero);
            // Codes run on over groups, which need not begin at a byte.
            for (size_t i = 0; i < length; ++i) {
                const uint32_t code = (uint32_t(codes[i / per_byte]) >> (bits * (i % per_byte))) & mask;
                uint8_t &byte = part[t * row_bytes + (begin + i) / per_byte];
                byte = static_cast<uint8_t>(byte | (code << (bits * ((begin + i) % per_byte))));
            }
        }
    }
}

} // namespace

const float *channel_rows(const skerry_code_params *params, const float *rows, float *scratch) {
    if (params->side != SKERRY_SIDE_KEY || params->inverse_frequencies == nullptr) return rows;
    const size_t dim = static_cast<size_t>(params->dim), count = static_cast<size_t>(params->count);
    const bool is_interleaved = params->rotary_pairing == SKERRY_ROTARY_INTERLEAVED;
    const RotaryGeometry geometry{static_cast<uint32_t>(params->rotary_dims),
                                  is_interleaved ? RotaryPairing::interleaved : RotaryPairing::half_split, params->attention_factor,
                                  params->inverse_frequencies};
    float *const table = scratch + dim * count;
    std::memcpy(scratch, rows, dim * count * sizeof(float));
    for (size_t t = 0; t < count; ++t) {
        rotary_table(geometry, static_cast<uint64_t>(params->position) + t, table);
        rotary_unrotate(geometry, table, scratch + t * dim);
    }
    return scratch;
}

void encode(const skerry_code_params *params, const float *rows, void *part, void *scratch) {
    uint8_t *const out = static_cast<uint8_t *>(part);
    float *const numbers = static_cast<float *>(scratch);
    std::memset(out, 0, part_bytes(params->format, params->side, params->dim, params->capacity, params->value_group));
    if (is_full_format(params->format)) {
        append(params->format, params->side, params->dim, params->capacity, 0, params->count, rows, params->dim, part);
    } else if (is_r_format(params->format)) {
        for (int32_t t = 0; t < params->count; ++t) {
            encode_row(*params, rows + static_cast<size_t>(t) * static_cast<size_t>(params->dim), t, out, numbers);
        }
    } else if (params->side == SKERRY_SIDE_KEY) {
        encode_channel_keys(*params, rows, out, numbers);
    } else {
        encode_channel_values(*params, rows, out, numbers);
    }
}

} // namespace skerry::ref
