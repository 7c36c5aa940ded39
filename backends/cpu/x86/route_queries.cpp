// SPDX-License-Identifier: MIT
#include "cpu/x86/route_queries.hpp"

#include "codec/rotation.hpp"
#include "codec/router_key.hpp"
#include "cpu/route.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace skerry {

namespace {

constexpr float byte_top = 127.0f, word_top = 32767.0f;
constexpr int32_t line_channels = 16, quad = 4;
// Largest step and mean: times the largest sum of products and the largest scale of a vector they stay finite, whatever the query.
constexpr float step_limit = 1e24f, mean_limit = 1e37f;

struct Layout {
    size_t bytes, words, step, centre, mean, row, whole, end, head_bytes;
};

Layout layout_of(const skerry_route_params &params) {
    const size_t group = static_cast<size_t>(params.group), dim = static_cast<size_t>(params.dim);
    const bool has_centroids = params.form == SKERRY_ROUTE_CENTROIDS;
    Layout layout = {};
    const auto take = [&](size_t bytes) {
        const size_t at = layout.end;
        layout.end += round_up(bytes, place_bytes);
        return at;
    };
    layout.head_bytes = round_up(dim, line_channels);
    layout.bytes = take(has_centroids ? group * layout.head_bytes : 0);
    layout.words = take(has_centroids ? 0 : group * router_rank_limit * sizeof(int16_t));
    layout.step = take(group * sizeof(float));
    layout.centre = take(group * sizeof(int32_t));
    layout.mean = take(group * sizeof(float));
    layout.row = take(layout.head_bytes * sizeof(float));
    layout.whole = take(layout.head_bytes * sizeof(int32_t));
    return layout;
}

// The nearest whole number, ties to even, of |x| < 2^22. Conversions of the C library do not become vectors.
int32_t nearest(float x) {
    constexpr float to_whole = 0x1.8p23f;
    return std::bit_cast<int32_t>(x + to_whole) - std::bit_cast<int32_t>(to_whole);
}

constexpr int32_t lanes = 8; // partial sums that do not wait for each other

// Whole numbers of `row`; returns their step.
float round_row(const float *row, int32_t dim, float top, int32_t *whole) {
    float largest[lanes] = {};
    int32_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
        for (int32_t l = 0; l < lanes; ++l) {
            const float size = std::fabs(row[i + l]);
            largest[l] = size > largest[l] ? size : largest[l];
        }
    }
    for (int32_t l = 0; i < dim; ++i, ++l)
        largest[l] = std::max(largest[l], std::fabs(row[i]));
    const float magnitude = *std::max_element(largest, largest + lanes);
    const bool is_zero = !(magnitude > 0x1p-100f); // below, the inverse of the step would not be finite
    const float inverse = is_zero ? 0.0f : top / magnitude;
    for (i = 0; i < dim; ++i)
        whole[i] = nearest(row[i] * inverse);
    // Rotated, finite numbers may be none any more: whatever they become, sums of them fit.
    constexpr int32_t limit = static_cast<int32_t>(word_top);
    for (i = 0; i < dim; ++i)
        whole[i] = std::clamp(whole[i], -limit, limit);
    return is_zero ? 0.0f : magnitude / top;
}

float dot_of(const float *a, const float *b, int32_t dim) {
    float part[lanes] = {};
    int32_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
        for (int32_t l = 0; l < lanes; ++l)
            part[l] += a[i + l] * b[i + l];
    }
    for (int32_t l = 0; i < dim; ++i, ++l)
        part[l] += a[i] * b[i];
    float sum = 0;
    for (const float x : part)
        sum += x;
    return sum;
}

} // namespace

size_t skerry_cpu_route_scratch(const skerry_route_params *params) { return layout_of(*params).end; }

RouteQueries skerry_cpu_route_queries(const skerry_route_params *params, const skerry_route_task *task) {
    const Layout layout = layout_of(*params);
    uint8_t *const base = static_cast<uint8_t *>(task->scratch);
    int8_t *const bytes = reinterpret_cast<int8_t *>(base + layout.bytes);
    int16_t *const words = reinterpret_cast<int16_t *>(base + layout.words);
    float *const step = reinterpret_cast<float *>(base + layout.step);
    int32_t *const centre = reinterpret_cast<int32_t *>(base + layout.centre);
    float *const mean = reinterpret_cast<float *>(base + layout.mean);
    float *const row = reinterpret_cast<float *>(base + layout.row);
    int32_t *const whole = reinterpret_cast<int32_t *>(base + layout.whole);
    const int32_t dim = params->dim, padded = static_cast<int32_t>(layout.head_bytes);
    const float scale = params->softcap > 0 ? params->scale : params->scale * 0x1.715476p+0f; // log2 e
    for (int32_t h = 0; h < params->group; ++h) {
        const float *const query = task->queries + static_cast<ptrdiff_t>(h) * dim;
        centre[h] = 0;
        mean[h] = 0.0f;
        std::fill(whole + dim, whole + padded, 0);
        if (params->form == SKERRY_ROUTE_CENTROIDS) {
            mean[h] = std::clamp(dot_of(query, task->balance->mean, dim) * params->scale, -mean_limit, mean_limit);
            for (int32_t i = 0; i < dim; ++i)
                row[i] = query[i] / task->balance->balance[i];
            rotate(row, dim);
            step[h] = round_row(row, dim, byte_top, whole);
            int32_t sum = 0;
            for (int32_t i = 0; i < dim; ++i)
                sum += whole[i];
            centre[h] = -3 * sum; // codes of two bits less 1.5 are levels
            const int32_t first = h / route_heads * route_heads, heads = std::min(route_heads, params->group - first);
            int8_t *const to = bytes + static_cast<ptrdiff_t>(first) * padded + quad * (h - first);
            for (int32_t i = 0; i < padded; ++i)
                to[i / quad * quad * heads + i % quad] = static_cast<int8_t>(whole[i]);
            step[h] *= 0.5f * scale * task->balance->key_exponent_scale;
        } else {
            step[h] = round_row(query, dim, word_top, whole) * scale;
            // Field j of bytes b and b + 2 of a word of line l: of int8 b = j, of int4 the halves of byte j / 2.
            const int32_t fields = dim > router_byte_rank ? 4 : 2;
            for (int32_t i = 0; i < router_rank_limit; ++i) {
                const int32_t line = i / (2 * fields), field = i / 2 % fields, second = i % 2 * 2;
                const int32_t in_line = fields == 2 ? field + second : field / 2 + second + field % 2 * 4;
                const int32_t component = 2 * fields * line + in_line;
                words[h * router_rank_limit + i] = static_cast<int16_t>(component < dim ? whole[component] : 0);
            }
        }
        step[h] = std::min(step[h], step_limit);
    }
    return {bytes, static_cast<ptrdiff_t>(layout.head_bytes), words, step, centre, mean};
}

} // namespace skerry
