// SPDX-License-Identifier: MIT
#include "cpu/ref/codes.hpp"
#include "cpu/ref/ref.hpp"

namespace skerry::ref {

namespace {

void store_element(skerry_format format, uint8_t *part, size_t index, float value) {
    if (format == SKERRY_FORMAT_F32) {
        std::memcpy(part + 4 * index, &value, 4);
    } else {
        store_half(part, index, format == SKERRY_FORMAT_F16 ? f32_to_f16(value) : f32_to_bf16(value));
    }
}

} // namespace

void append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count, const float *rows,
            int64_t row_stride, void *part) {
    uint8_t *const out = static_cast<uint8_t *>(part);
    for (int32_t t = 0; t < count; ++t) {
        const float *const row = rows + t * row_stride;
        const size_t token = static_cast<size_t>(first + t);
        for (int32_t c = 0; c < dim; ++c) {
            const size_t channel = static_cast<size_t>(c);
            const size_t index =
                side == SKERRY_SIDE_KEY ? channel * static_cast<size_t>(capacity) + token : token * static_cast<size_t>(dim) + channel;
            store_element(format, out, index, row[c]);
        }
    }
}

} // namespace skerry::ref
