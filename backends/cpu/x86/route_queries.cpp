// SPDX-License-Identifier: MIT
#include "cpu/x86/route_queries.hpp"

#include "codec/rotation.hpp"
#include "codec/router_key.hpp"
#include "cpu/route.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace skerry {

namespace {

constexpr float byte_top = 127.0f, word_top = 32767.0f;
constexpr int32_t line_channels = 16, chunk_lines = 4, fields = 4, register_bytes = 64;
constexpr int32_t chunk_bytes = fields * register_bytes;

struct Layout {
    size_t bytes, words, step, centre, mean, row, whole, end;
    int32_t chunks;
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
    layout.chunks = (params.dim + line_channels * chunk_lines - 1) / (line_channels * chunk_lines);
    layout.bytes = take(has_centroids ? group * static_cast<size_t>(layout.chunks) * chunk_bytes : 0);
    layout.words = take(has_centroids ? 0 : group * router_rank_limit * sizeof(int16_t));
    layout.step = take(group * sizeof(float));
    layout.centre = take(group * sizeof(float));
    layout.mean = take(group * sizeof(float));
    layout.row = take(dim * sizeof(float));
    layout.whole = take(dim * sizeof(int32_t));
    return layout;
}

// Whole numbers of `row`; returns their step.
float round_row(const float *row, int32_t dim, float top, int32_t *whole) {
    float magnitude = 0;
    for (int32_t i = 0; i < dim; ++i)
        magnitude = std::max(magnitude, std::fabs(row[i]));
    const bool is_zero = !(magnitude > 0x1p-100f); // below, the inverse of the step would not be finite
    const float inverse = is_zero ? 0.0f : top / magnitude;
    for (int32_t i = 0; i < dim; ++i)
        whole[i] = static_cast<int32_t>(std::lrint(row[i] * inverse));
    return is_zero ? 0.0f : magnitude / top;
}

void spread(const int32_t *whole, int32_t dim, int32_t chunks, int8_t *bytes) {
    for (int32_t word = 0; word < chunks * chunk_lines * fields; ++word) {
        const int32_t line = word / fields, field = word % fields, channel = line_channels * line + 4 * field;
        int8_t four[4] = {};
        for (int32_t b = 0; b < 4 && channel + b < dim; ++b)
            four[b] = static_cast<int8_t>(whole[channel + b]);
        int8_t *const to = bytes + line / chunk_lines * chunk_bytes + field * register_bytes + line % chunk_lines * 16;
        for (int32_t c = 0; c < router_centroids; ++c)
            std::memcpy(to + 4 * c, four, 4);
    }
}

} // namespace

size_t skerry_cpu_route_scratch(const skerry_route_params *params) { return layout_of(*params).end; }

RouteQueries skerry_cpu_route_queries(const skerry_route_params *params, const skerry_route_task *task) {
    const Layout layout = layout_of(*params);
    uint8_t *const base = static_cast<uint8_t *>(task->scratch);
    int8_t *const bytes = reinterpret_cast<int8_t *>(base + layout.bytes);
    int16_t *const words = reinterpret_cast<int16_t *>(base + layout.words);
    float *const step = reinterpret_cast<float *>(base + layout.step);
    float *const centre = reinterpret_cast<float *>(base + layout.centre);
    float *const mean = reinterpret_cast<float *>(base + layout.mean);
    float *const row = reinterpret_cast<float *>(base + layout.row);
    int32_t *const whole = reinterpret_cast<int32_t *>(base + layout.whole);
    const int32_t dim = params->dim;
    for (int32_t h = 0; h < params->group; ++h) {
        const float *const query = task->queries + static_cast<ptrdiff_t>(h) * dim;
        centre[h] = mean[h] = 0.0f;
        if (params->form == SKERRY_ROUTE_CENTROIDS) {
            float dot = 0;
            for (int32_t i = 0; i < dim; ++i) {
                dot += query[i] * task->balance->mean[i];
                row[i] = query[i] / task->balance->balance[i];
            }
            mean[h] = dot * params->scale;
            rotate(row, dim);
            step[h] = round_row(row, dim, byte_top, whole);
            int32_t sum = 0;
            for (int32_t i = 0; i < dim; ++i)
                sum += whole[i];
            centre[h] = 1.5f * static_cast<float>(sum); // codes of two bits less 1.5 are levels
            spread(whole, dim, layout.chunks, bytes + static_cast<ptrdiff_t>(h) * layout.chunks * chunk_bytes);
            step[h] *= params->scale * task->balance->key_exponent_scale;
        } else {
            step[h] = round_row(query, dim, word_top, whole) * params->scale;
            for (int32_t i = 0; i < router_rank_limit; ++i)
                words[h * router_rank_limit + i] = static_cast<int16_t>(i < dim ? whole[i] : 0);
        }
    }
    return {bytes, words, step, centre, mean, layout.chunks};
}

} // namespace skerry
