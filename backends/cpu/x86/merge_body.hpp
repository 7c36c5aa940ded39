// SPDX-License-Identifier: MIT
#pragma once

// Merge of partial results for 16-lane vectors; included after the header that defines Vec.

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

float exp_one(float x) { return v_first_of(v_exp(v_set1(x))); }

void merge_parts(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride, const float *max,
                 const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse) {
    constexpr int lanes = 16;
    const float none = -__builtin_inff();
    for (int32_t head = 0; head < heads; ++head) {
        float *const row = merged + static_cast<ptrdiff_t>(head) * value_dim;
        const float sink = sink_logits != nullptr ? sink_logits[head % group] : none;
        float largest = sink;
        for (int32_t part = 0; part < parts; ++part) {
            const float part_max = max[part * head_stride + head];
            largest = part_max > largest ? part_max : largest;
        }
        lse[head] = none;
        std::memset(row, 0, sizeof(float) * static_cast<size_t>(value_dim));
        if (largest == none) continue;
        float total = sink != none ? exp_one(sink - largest) : 0.0f;
        for (int32_t part = 0; part < parts; ++part) {
            const float part_max = max[part * head_stride + head];
            if (part_max == none) continue;
            const Vec weight = v_exp(v_set1(part_max - largest));
            const float *const part_row = out + part * out_stride + static_cast<ptrdiff_t>(head) * value_dim;
            total += v_first_of(weight) * sum[part * head_stride + head];
            for (int32_t i = 0; i < value_dim; i += lanes) {
                const int n = value_dim - i < lanes ? value_dim - i : lanes;
                v_store_n(row + i, v_fma(v_load_n(part_row + i, n), weight, v_load_n(row + i, n)), n);
            }
        }
        lse[head] = largest + __builtin_logf(total);
        const Vec inverse = v_set1(1.0f / total);
        for (int32_t i = 0; i < value_dim; i += lanes) {
            const int n = value_dim - i < lanes ? value_dim - i : lanes;
            v_store_n(row + i, v_mul(v_load_n(row + i, n), inverse), n);
        }
    }
}

} // namespace

} // namespace skerry
