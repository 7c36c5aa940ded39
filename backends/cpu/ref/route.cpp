// SPDX-License-Identifier: MIT
#include "base/half.hpp"
#include "codec/router_key.hpp"
#include "cpu/ref/codes.hpp"
#include "cpu/ref/ref.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace skerry::ref {

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

// The vectors of one segment, [vectors][dim].
void decode_centroids(const skerry_route_params &params, const skerry_route_task &task, const uint8_t *key, float *rows, void *scratch) {
    skerry_code_params code = {};
    code.epoch = task.balance;
    code.attention_factor = 1.0f;
    code.dim = params.dim;
    code.capacity = code.count = router_centroids;
    code.format = SKERRY_FORMAT_R2;
    code.side = SKERRY_SIDE_KEY;
    decode(&code, key, rows, scratch);
}

int32_t projected_code(const uint8_t *block, int32_t rank, int32_t vectors, int32_t vector, int32_t component) {
    if (rank <= router_byte_rank) return static_cast<int8_t>(block[4 * (component / 4 * vectors + vector) + component % 4]);
    const uint8_t pair = block[4 * (component / 8 * vectors + vector) + component % 4];
    return ((component % 8 < 4 ? pair & 15 : pair >> 4) ^ 8) - 8;
}

void decode_projected(const skerry_route_params &params, const uint8_t *block, float *rows) {
    const int32_t rank = params.dim, vectors = params.vectors;
    const uint8_t *const scales = block + projected_scale_offset(rank, vectors);
    for (int32_t c = 0; c < vectors; ++c) {
        const float scale = f16_to_f32(load_half(scales, static_cast<size_t>(c)));
        for (int32_t i = 0; i < rank; ++i)
            rows[c * rank + i] = static_cast<float>(projected_code(block, rank, vectors, c, i)) * scale;
    }
}

float logit_of(const skerry_route_params &params, const float *query, const float *vector) {
    float dot = 0;
    for (int32_t i = 0; i < params.dim; ++i)
        dot += query[i] * vector[i];
    const float logit = dot * params.scale;
    return params.softcap > 0 ? params.softcap * std::tanh(logit / params.softcap) : logit;
}

// Of a segment's terms.
float log_sum(const skerry_route_params &params, const float *query, const float *rows, const uint8_t *counts) {
    float logits[router_centroids], largest = none, sum = 0;
    for (int32_t c = 0; c < params.vectors; ++c) {
        if (counts[c] == 0) continue;
        logits[c] = logit_of(params, query, rows + static_cast<ptrdiff_t>(c) * params.dim);
        largest = std::max(largest, logits[c]);
    }
    if (largest == none) return none;
    for (int32_t c = 0; c < params.vectors; ++c) {
        if (counts[c] != 0) sum += static_cast<float>(counts[c]) * std::exp(logits[c] - largest);
    }
    return largest + std::log(sum);
}

size_t rows_bytes(int32_t dim) { return round_up(sizeof(float) * router_centroids * static_cast<size_t>(dim), place_bytes); }

} // namespace

int32_t route_supports(const skerry_route_params *params) {
    if (params->dim < 1 || params->group < 1) return 0;
    if (params->form == SKERRY_ROUTE_CENTROIDS) {
        const bool is_shaped = params->vectors == router_centroids && params->sets == 1;
        return is_shaped ? supports(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, params->dim) : 0;
    }
    if (params->form != SKERRY_ROUTE_PROJECTED || params->dim > router_rank_limit) return 0;
    if (params->vectors < 1 || params->vectors > router_centroids) return 0;
    return params->sets == 1 || params->sets == params->group ? 1 : 0;
}

size_t route_scratch_bytes(const skerry_route_params *params) {
    return rows_bytes(params->dim) + code_scratch_bytes(params->dim, router_centroids);
}

void route(const skerry_route_params *params, const skerry_route_task *task) {
    float *const rows = static_cast<float *>(task->scratch);
    void *const code = static_cast<uint8_t *>(task->scratch) + rows_bytes(params->dim);
    const size_t key_bytes = router_key_bytes(*params), set_bytes = key_bytes / static_cast<size_t>(params->sets);
    for (int32_t s = 0; s < task->segments; ++s) {
        const uint8_t *const key = task->keys + static_cast<size_t>(s) * key_bytes;
        const uint8_t *const counts = task->counts + static_cast<ptrdiff_t>(s) * params->vectors;
        if (params->form == SKERRY_ROUTE_CENTROIDS) decode_centroids(*params, *task, key, rows, code);
        for (int32_t h = 0; h < params->group; ++h) {
            if (params->form == SKERRY_ROUTE_PROJECTED && h < params->sets) {
                decode_projected(*params, key + static_cast<size_t>(h) * set_bytes, rows);
            }
            task->scores[h * task->score_stride + s] =
                log_sum(*params, task->queries + static_cast<ptrdiff_t>(h) * params->dim, rows, counts);
        }
    }
    for (int32_t h = 0; h < params->group; ++h) {
        float *const scores = task->scores + h * task->score_stride;
        const float largest = std::accumulate(scores, scores + task->segments, none, [](float a, float b) { return std::max(a, b); });
        const float unit = largest == none ? 0.0f : largest;
        for (int32_t s = 0; s < task->segments; ++s)
            scores[s] = std::exp(scores[s] - unit);
        task->log_unit[h] = unit + (task->bias != nullptr ? task->bias[h] : 0.0f);
    }
}

} // namespace skerry::ref
