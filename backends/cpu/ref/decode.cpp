// SPDX-License-Identifier: MIT
#include "codec/channel.hpp"
#include "codec/rotary.hpp"
#include "codec/rotation.hpp"
#include "cpu/ref/codes.hpp"
#include "cpu/ref/ref.hpp"

namespace skerry::ref {

namespace {

float load_element(skerry_format format, const uint8_t *part, size_t index) {
    if (format == SKERRY_FORMAT_F32) {
        float value = 0;
        std::memcpy(&value, part + 4 * index, 4);
        return value;
    }
    const uint16_t half = load_half(part, index);
    return format == SKERRY_FORMAT_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

void decode_full_row(const skerry_code_params &params, const uint8_t *part, size_t token, float *row) {
    const size_t dim = static_cast<size_t>(params.dim), capacity = static_cast<size_t>(params.capacity);
    for (size_t c = 0; c < dim; ++c) {
        row[c] = load_element(params.format, part, params.side == SKERRY_SIDE_KEY ? c * capacity + token : token * dim + c);
    }
}

// Levels are multiples of one half below 2^7 and dimensions lie below 2^16, so the butterflies are exact: the
// order of their sums shows in no bit of the result.
void decode_r_row(const skerry_code_params &params, const uint8_t *part, int32_t token, float *row) {
    const int32_t dim = params.dim;
    const bool is_key = params.side == SKERRY_SIDE_KEY, is_rotated = hadamard_size(dim) > 1;
    const float centre = 0.5f * static_cast<float>((1 << format_bits(params.format)) - 1);
    for (int32_t c = 0; c < dim; ++c) {
        const uint32_t code = load_code(part, params.format, params.side, dim, params.capacity, token, c);
        row[c] = static_cast<float>(code) - centre;
    }
    hadamard_blocks(row, dim);

    const uint8_t *const scales = part + r_scale_offset(params.format, params.side, dim, params.capacity);
    const float exponent_scale = is_key ? params.epoch->key_exponent_scale : params.epoch->value_exponent_scale;
    const float scale = f16_to_f32(load_half(scales, static_cast<size_t>(token))) * exponent_scale * rotation_norm(dim);
    for (int32_t c = 0; c < dim; ++c) {
        const float sign = is_rotated ? rotation_sign(c) : 1.0f;
        const float value = row[c] * scale;
        row[c] = is_key ? value * (sign * (1.0f / params.epoch->balance[c])) + params.epoch->mean[c] : value * sign;
    }
}

GridType grid_type(const skerry_code_params &params) { return params.grid_dtype == SKERRY_DTYPE_BF16 ? GridType::bf16 : GridType::f16; }

void decode_channel_keys(const skerry_code_params &params, const uint8_t *part, float *rows, float *scratch) {
    const size_t dim = static_cast<size_t>(params.dim), count = static_cast<size_t>(params.count);
    const uint32_t bits = static_cast<uint32_t>(format_bits(params.format));
    const size_t row_bytes = (static_cast<size_t>(params.capacity) * bits + 7) / 8;
    const uint8_t *const scales = part + c_code_bytes(params.format, params.side, params.dim, params.capacity);
    for (size_t c = 0; c < dim; ++c) {
        const ChannelGrid grid{load_half(scales, c), load_half(scales, dim + c)};
        channel_decode_group(part + c * row_bytes, count, bits, grid_type(params), grid, rows + c, dim);
    }
    rotate_channel_rows(&params, rows, scratch);
}

void decode_channel_values(const skerry_code_params &params, const uint8_t *part, float *rows, float *scratch) {
    const size_t dim = static_cast<size_t>(params.dim), count = static_cast<size_t>(params.count);
    const size_t groups = static_cast<size_t>(c_value_groups(params.dim, params.value_group));
    const size_t group = groups == 1 ? dim : static_cast<size_t>(params.value_group);
    const uint32_t bits = static_cast<uint32_t>(format_bits(params.format)), per_byte = 8 / bits, mask = (1u << bits) - 1u;
    const size_t row_bytes = (dim * bits + 7) / 8;
    const uint8_t *const scales = part + c_code_bytes(params.format, params.side, params.dim, params.capacity);
    const uint8_t *const zeros = scales + 2 * groups * static_cast<size_t>(params.capacity);
    uint8_t *const codes = reinterpret_cast<uint8_t *>(scratch);
    for (size_t t = 0; t < count; ++t) {
        for (size_t g = 0; g < groups; ++g) {
            const size_t begin = g * group, length = begin + group <= dim ? group : dim - begin;
            std::memset(codes, 0, length);
            for (size_t i = 0; i < length; ++i) {
                const uint8_t byte = part[t * row_bytes + (begin + i) / per_byte];
                const uint32_t code = (uint32_t(byte) >> (bits * ((begin + i) % per_byte))) & mask;
                codes[i / per_byte] = static_cast<uint8_t>(codes[i / per_byte] | (code << (bits * (i % per_byte))));
            }
            const ChannelGrid grid{load_half(scales, t * groups + g), load_half(zeros, t * groups + g)};
            channel_decode_group(codes, length, bits, grid_type(params), grid, rows + t * dim + begin, 1);
        }
    }
}

} // namespace

void rotate_channel_rows(const skerry_code_params *params, float *rows, float *scratch) {
    if (params->side != SKERRY_SIDE_KEY || params->inverse_frequencies == nullptr) return;
    const bool is_interleaved = params->rotary_pairing == SKERRY_ROTARY_INTERLEAVED;
    const RotaryGeometry geometry{static_cast<uint32_t>(params->rotary_dims),
                                  is_interleaved ? RotaryPairing::interleaved : RotaryPairing::half_split, params->attention_factor,
                                  params->inverse_frequencies};
    for (size_t t = 0; t < static_cast<size_t>(params->count); ++t) {
        rotary_table(geometry, static_cast<uint64_t>(params->position) + t, scratch);
        rotary_rotate(geometry, scratch, rows + t * static_cast<size_t>(params->dim));
    }
}

void decode(const skerry_code_params *params, const void *part, float *rows, void *scratch) {
    const uint8_t *const in = static_cast<const uint8_t *>(part);
    float *const numbers = static_cast<float *>(scratch);
    if (is_l_format(params->format)) {
        decode_lowrank(params, part, rows);
        return;
    }
    if (is_c_format(params->format)) {
        if (params->side == SKERRY_SIDE_KEY) {
            decode_channel_keys(*params, in, rows, numbers);
        } else {
            decode_channel_values(*params, in, rows, numbers);
        }
        return;
    }
    for (int32_t t = 0; t < params->count; ++t) {
        float *const row = rows + static_cast<size_t>(t) * static_cast<size_t>(params->dim);
        if (is_full_format(params->format)) {
            decode_full_row(*params, in, static_cast<size_t>(t), row);
        } else {
            decode_r_row(*params, in, t, row);
        }
    }
}

} // namespace skerry::ref
