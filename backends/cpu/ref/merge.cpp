// SPDX-License-Identifier: MIT
#include "cpu/ref/ref.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace skerry::ref {

void merge(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride, const float *max,
           const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (int32_t head = 0; head < heads; ++head) {
        float *const row = merged + static_cast<ptrdiff_t>(head) * value_dim;
        std::fill_n(row, value_dim, 0.0f);
        // A sink takes weight and adds no value.
        const float sink = sink_logits != nullptr ? sink_logits[head % group] : none;
        float largest = sink;
        for (int32_t part = 0; part < parts; ++part)
            largest = std::max(largest, max[part * head_stride + head]);
        lse[head] = none;
        if (largest == none) continue;
        float total = sink != none ? std::exp(sink - largest) : 0.0f;
        for (int32_t part = 0; part < parts; ++part) {
            const float part_max = max[part * head_stride + head];
            if (part_max == none) continue; // what such a part left in `out` is not looked at
            const float weight = std::exp(part_max - largest);
            const float *const part_row = out + part * out_stride + static_cast<ptrdiff_t>(head) * value_dim;
            total += weight * sum[part * head_stride + head];
            for (int32_t i = 0; i < value_dim; ++i)
                row[i] += weight * part_row[i];
        }
        lse[head] = largest + std::log(total);
        const float inverse = 1.0f / total;
        for (int32_t i = 0; i < value_dim; ++i)
            row[i] *= inverse;
    }
}

} // namespace skerry::ref
