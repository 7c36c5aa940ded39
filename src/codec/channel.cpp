#include "codec/channel.hpp"

#include "base/half.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace skerry {

namespace {

constexpr float f16_largest = 65504.0f;
constexpr float bf16_largest = 0x1.fep127f;

uint16_t narrow(float x, GridType type) { return type == GridType::f16 ? f32_to_f16(x) : f32_to_bf16(x); }
float widen(uint16_t x, GridType type) { return type == GridType::f16 ? f16_to_f32(x) : bf16_to_f32(x); }
float largest(GridType type) { return type == GridType::f16 ? f16_largest : bf16_largest; }

// The difference of neighbouring values of the grid type at |x|.
float spacing(float x, GridType type) {
    const int digits = type == GridType::f16 ? 11 : 8, smallest = type == GridType::f16 ? -24 : -133;
    int exponent = smallest + digits;
    if (x != 0) std::frexp(x, &exponent);
    return std::ldexp(1.0f, std::max(exponent - digits, smallest));
}

// x is within 0 .. top, so that clamping first changes nothing. The host's rounding mode has no say here.
uint32_t nearest_even(float x) {
    const uint32_t whole = static_cast<uint32_t>(x);
    const float part = x - static_cast<float>(whole);
    return whole + (part > 0.5f || (part == 0.5f && (whole & 1u) != 0) ? 1u : 0u);
}

size_t group_of(const ChannelShape &shape) { return shape.value_group == 0 ? shape.d : shape.value_group; }

void store(uint8_t *at, size_t index, uint16_t x) { std::memcpy(at + 2 * index, &x, 2); }

uint16_t load(const uint8_t *at, size_t index) {
    uint16_t x = 0;
    std::memcpy(&x, at + 2 * index, 2);
    return x;
}

} // namespace

bool channel_supports(const ChannelShape &shape) {
    if (shape.bits != 2 && shape.bits != 4) return false;
    const size_t per_byte = 8 / shape.bits, group = group_of(shape);
    return shape.d != 0 && shape.tokens != 0 && shape.d % per_byte == 0 && shape.tokens % per_byte == 0 &&
           group % per_byte == 0 && shape.d % group == 0;
}

ChannelLayout channel_layout(const ChannelShape &shape) {
    const size_t d = shape.d, tokens = shape.tokens;
    const size_t codes = d * tokens * shape.bits / 8, value_grids = tokens * (d / group_of(shape));
    ChannelLayout layout;
    layout.key_scales = layout.key_codes + codes;
    layout.key_zeros = layout.key_scales + 2 * d;
    layout.value_codes = layout.key_zeros + 2 * d;
    layout.value_scales = layout.value_codes + codes;
    layout.value_zeros = layout.value_scales + 2 * value_grids;
    layout.bytes = layout.value_zeros + 2 * value_grids;
    return layout;
}

ChannelGrid channel_encode_group(const float *x, size_t stride, size_t count, uint32_t bits, GridType type,
                                 uint8_t *codes) {
    const float limit = largest(type), top = static_cast<float>((1u << bits) - 1);
    float low = 0, high = 0;
    bool any = false;
    for (size_t i = 0; i < count; ++i) {
        const float value = x[i * stride];
        if (std::isnan(value)) continue;
        const float held = std::clamp(value, -limit, limit);
        low = any ? std::min(low, held) : held;
        high = any ? std::max(high, held) : held;
        any = true;
    }
    ChannelGrid grid;
    grid.zero = narrow(low, type);
    float step = (high - low) / top;
    if (std::isinf(step)) step = high / top - low / top; // the range alone passes the largest f32
    grid.scale = narrow(step, type);
    std::memset(codes, 0, count * bits / 8);
    // A range that the grid type rounds to nothing is a constant, as one that is nothing.
    if (high == low || widen(grid.scale, type) == 0) {
        grid.scale = narrow(1.0f, type);
        return grid;
    }
    const float scale = widen(grid.scale, type), zero = widen(grid.zero, type);
    const size_t per_byte = 8 / bits;
    for (size_t i = 0; i < count; ++i) {
        const float value = std::clamp(x[i * stride], -limit, limit);
        float offset = value - zero;
        float ratio = offset / scale;
        if (std::isinf(offset)) ratio = value / scale - zero / scale;
        const uint32_t code = ratio > 0 ? nearest_even(std::min(ratio, top)) : 0; // also for NaN
        codes[i / per_byte] = static_cast<uint8_t>(codes[i / per_byte] | (code << (bits * (i % per_byte))));
    }
    return grid;
}

// The product of a code and a 16-bit scale is exact in f32, so a fused multiply-add gives the same number.
// Held at the largest value of the type: the top code may lie above what was encoded by the rounding of scale
// and zero.
void channel_decode_group(const uint8_t *codes, size_t count, uint32_t bits, GridType type, ChannelGrid grid,
                          float *x, size_t stride) {
    const double scale = widen(grid.scale, type), zero = widen(grid.zero, type), limit = largest(type);
    const size_t per_byte = 8 / bits;
    const uint32_t mask = (1u << bits) - 1;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t code = (uint32_t(codes[i / per_byte]) >> (bits * (i % per_byte))) & mask;
        x[i * stride] = static_cast<float>(std::clamp(code * scale + zero, -limit, limit));
    }
}

float channel_error_bound(GridType type, ChannelGrid grid, uint32_t bits) {
    const float scale = widen(grid.scale, type), zero = widen(grid.zero, type);
    const float top = static_cast<float>((1u << bits) - 1);
    const float edge = std::abs(zero) + top * scale;
    const float grid_rounding = 0.5f * (spacing(zero, type) + top * spacing(scale, type));
    return 0.5f * scale + grid_rounding + edge * 0x1p-22f;
}

void channel_encode(const ChannelShape &shape, const float *keys, size_t key_stride, const float *values,
                    size_t value_stride, std::span<uint8_t> record) {
    const ChannelLayout layout = channel_layout(shape);
    uint8_t *const out = record.data();
    const size_t key_row = size_t(shape.tokens) * shape.bits / 8;
    for (size_t c = 0; c < shape.d; ++c) {
        const ChannelGrid grid = channel_encode_group(keys + c, key_stride, shape.tokens, shape.bits,
                                                      shape.grid, out + layout.key_codes + c * key_row);
        store(out + layout.key_scales, c, grid.scale);
        store(out + layout.key_zeros, c, grid.zero);
    }
    const size_t group = group_of(shape), groups = shape.d / group, group_bytes = group * shape.bits / 8;
    for (size_t i = 0; i < shape.tokens * groups; ++i) {
        const float *const row = values + (i / groups) * value_stride + (i % groups) * group;
        const ChannelGrid grid = channel_encode_group(row, 1, group, shape.bits, shape.grid,
                                                      out + layout.value_codes + i * group_bytes);
        store(out + layout.value_scales, i, grid.scale);
        store(out + layout.value_zeros, i, grid.zero);
    }
}

void channel_decode_keys(const ChannelShape &shape, std::span<const uint8_t> record, float *keys,
                         size_t stride) {
    const ChannelLayout layout = channel_layout(shape);
    const uint8_t *const in = record.data();
    const size_t key_row = size_t(shape.tokens) * shape.bits / 8;
    for (size_t c = 0; c < shape.d; ++c) {
        const ChannelGrid grid{load(in + layout.key_scales, c), load(in + layout.key_zeros, c)};
        channel_decode_group(in + layout.key_codes + c * key_row, shape.tokens, shape.bits, shape.grid, grid,
                             keys + c, stride);
    }
}

void channel_decode_values(const ChannelShape &shape, std::span<const uint8_t> record, float *values,
                           size_t stride) {
    const ChannelLayout layout = channel_layout(shape);
    const uint8_t *const in = record.data();
    const size_t group = group_of(shape), groups = shape.d / group, group_bytes = group * shape.bits / 8;
    for (size_t i = 0; i < shape.tokens * groups; ++i) {
        const ChannelGrid grid{load(in + layout.value_scales, i), load(in + layout.value_zeros, i)};
        channel_decode_group(in + layout.value_codes + i * group_bytes, group, shape.bits, shape.grid, grid,
                             values + (i / groups) * stride + (i % groups) * group, 1);
    }
}

} // namespace skerry
