// SPDX-License-Identifier: MIT
#pragma once

// What the integer paths of R formats share; included after attend_engine.hpp. Queries are split into a high and a low byte, which
// leaves logits nearly as good as f32 for any spread; weights are 8 bits with a scale per 16 tokens, which keeps the output within
// 0.0045 of itself in the worst case, or 16 bits.

namespace skerry {

namespace {

void split_queries(Work &w, float centre) {
    for (int h = 0; h < w.heads; ++h) {
        const float *const prepared = w.prepared + static_cast<ptrdiff_t>(h) * w.key_pad;
        const float magnitude = w.query_largest[h];
        const float inverse = magnitude > 0x1p-100f ? 32512.0f / magnitude : 0.0f; // 127 * 256
        w.query_scale[h] = magnitude > 0x1p-100f ? magnitude / 32512.0f : 0.0f;
        int8_t *const high = w.query_bytes + 2 * static_cast<ptrdiff_t>(h) * w.key_pad, *const low = high + w.key_pad;
        IVec total = i_zero();
        for (int i = 0; i < w.key_pad; i += lanes) {
            const Vec x = i < w.key_dim ? v_load(prepared + i) : v_zero();
            const IVec whole = v_to_i32(v_mul(x, v_set1(inverse)));
            const IVec upper = i_right_signed<8>(i_add(whole, i_set1(128)));
            i_store_bytes(high + i, upper);
            i_store_bytes(low + i, i_sub(whole, i_left<8>(upper)));
            total = i_add(total, whole);
        }
        w.query_centre[h] = -centre * w.query_scale[h] * static_cast<float>(i_sum(total));
    }
}

void load_value_scales(Work &w, const Bucket &bucket) {
    for (int at = bucket.begin; at < bucket.end; ++at) {
        const Item &item = w.item[w.order[at]];
        v_store(w.scales + lanes * at, load_scales(item.value + bucket.value_scales, item.count));
    }
}

// Weights of one query vector for the pieces of a bucket: bytes, and what one unit of them is worth.
template <bool is_fine>
void split_weights(Work &w, const Bucket &bucket, int head, float exponent_scale, float centre) {
    constexpr float top = is_fine ? 65535.0f : 255.0f;
    const float *const weights = w.logits + static_cast<ptrdiff_t>(head) * row_logits;
    uint8_t *const bytes = w.weight_bytes + static_cast<ptrdiff_t>(head) * row_logits;
    uint8_t *const low_bytes = bytes + static_cast<ptrdiff_t>(w.heads) * row_logits;
    float *const steps = w.weight_step + static_cast<ptrdiff_t>(head) * block_items;
    const float *const shrink = w.shrink + static_cast<ptrdiff_t>(head) * block_items;
    float excess = w.centre[head];
    float x[lanes * lanes];
    for (int at = bucket.begin; at < bucket.end; at += lanes) {
        const int n = bucket.end - at < lanes ? bucket.end - at : lanes;
        for (int i = 0; i < n; ++i)
            v_store(x + lanes * i, v_mul(v_load(weights + lanes * (at + i)), v_load(w.scales + lanes * (at + i))));
        for (int i = n; i < lanes; ++i)
            v_store(x + lanes * i, v_zero());
        const Vec largest = v_max(v_reduce16_max(x), v_set1(0x1p-100f));
        float inverse[lanes], total[lanes];
        v_store(inverse, v_div(v_set1(top), largest));
        const Vec step = v_mul(v_mul(v_load_n(shrink + at, n), v_set1(exponent_scale)), v_mul(largest, v_set1(1.0f / top)));
        v_store_n(steps + at, step, n);
        for (int i = 0; i < n; ++i) {
            const IVec whole = v_to_i32(v_mul(v_load(x + lanes * i), v_set1(inverse[i])));
            v_store(x + lanes * i, i_to_f32(whole));
            const ptrdiff_t to = lanes * (at + i);
            i_store_bytes(bytes + to, is_fine ? i_right_signed<8>(whole) : whole);
            if (is_fine) i_store_bytes(low_bytes + to, whole);
        }
        v_store(total, v_mul(v_mul(v_reduce16_add(x), step), v_set1(centre)));
        for (int i = 0; i < n; ++i)
            excess += total[i];
    }
    w.centre[head] = excess;
}

} // namespace

} // namespace skerry
