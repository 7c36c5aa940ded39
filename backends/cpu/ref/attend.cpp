// SPDX-License-Identifier: MIT
#include "codec/layout.hpp"
#include "cpu/ref/ref.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace skerry::ref {

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

// Tokens of a tile in every format: C and L tiles are the longest.
constexpr size_t longest_tile = static_cast<size_t>(c_tile_tokens);
static_assert(c_tile_tokens == l_tile_tokens);

struct Scratch {
    float *keys;   // [longest_tile][key_dim]
    float *values; // [longest_tile][value_dim]
    float *logits; // [longest_tile]
    void *code;
};

size_t keys_bytes(int32_t dim) { return round_up(longest_tile * static_cast<size_t>(dim) * sizeof(float), place_bytes); }

Scratch carve(const skerry_attend_params &params, void *memory) {
    uint8_t *const at = static_cast<uint8_t *>(memory);
    const size_t values = keys_bytes(params.key_dim), logits = values + keys_bytes(params.value_dim);
    return {reinterpret_cast<float *>(at), reinterpret_cast<float *>(at + values), reinterpret_cast<float *>(at + logits),
            at + logits + longest_tile * sizeof(float)};
}

const uint8_t *record_of(const skerry_pool_view &pool, uint32_t place) {
    return pool.chunks[place >> pool.chunk_shift] + static_cast<size_t>(place & ((1u << pool.chunk_shift) - 1u)) * place_bytes;
}

void decode_tile(const skerry_attend_params &params, const skerry_attend_task &task, const skerry_tile &tile, const Scratch &scratch) {
    const uint8_t *const record = record_of(params.pool, tile.place);
    skerry_code_params code = {};
    code.attention_factor = params.attention_factor;
    code.rotary_dims = params.rotary_dims;
    code.rotary_pairing = params.rotary_pairing;
    code.position = tile.first;
    code.capacity = tile.capacity;
    code.count = tile.count;
    code.value_group = params.value_group;
    code.grid_dtype = params.grid_dtype;

    code.side = SKERRY_SIDE_KEY;
    code.format = tile.key_format;
    code.dim = params.key_dim;
    code.rank = tile_key_rank(tile.epoch);
    code.epoch = is_r_format(code.format) ? &task.epochs[tile.epoch] : nullptr;
    code.inverse_frequencies = is_c_format(code.format) ? params.inverse_frequencies : nullptr;
    decode(&code, record, scratch.keys, scratch.code);

    code.side = SKERRY_SIDE_VALUE;
    code.format = tile.value_format;
    code.dim = params.value_dim;
    code.epoch = is_r_format(code.format) ? &task.epochs[tile.epoch] : nullptr;
    code.rank = tile_value_rank(tile.epoch);
    code.inverse_frequencies = nullptr;
    const size_t values = value_offset(tile.key_format, params.key_dim, tile.capacity, tile_key_rank(tile.epoch));
    decode(&code, record + values, scratch.values, scratch.code);
}

float logit_of(const skerry_attend_params &params, const float *query, const float *key) {
    float dot = 0;
    for (int32_t i = 0; i < params.key_dim; ++i)
        dot += query[i] * key[i];
    const float logit = dot * params.scale;
    return params.softcap > 0 ? params.softcap * std::tanh(logit / params.softcap) : logit;
}

bool tier_is_asked(uint32_t tiers, uint8_t tier) { return tiers == 0 || (tiers >> tier & 1u) != 0; }

} // namespace

size_t attend_scratch_bytes(const skerry_attend_params *params, int32_t, int32_t) {
    return keys_bytes(params->key_dim) + keys_bytes(params->value_dim) + longest_tile * sizeof(float) +
           code_scratch_bytes(std::max(params->key_dim, params->value_dim), c_tile_tokens);
}

void attend(const skerry_attend_params *params, const skerry_attend_task *task) {
    const Scratch scratch = carve(*params, task->scratch);
    const int32_t group = params->group, heads = task->rows * group, value_dim = params->value_dim;
    std::fill_n(task->out, static_cast<size_t>(heads) * static_cast<size_t>(value_dim), 0.0f);
    std::fill_n(task->max, heads, none);
    std::fill_n(task->sum, heads, 0.0f);

    for (int32_t index = task->tile_begin; index < task->tile_end; ++index) {
        const skerry_tile &tile = task->tiles[index];
        const bool asked = tier_is_asked(params->tiers, tile.tier);
        if (asked) decode_tile(*params, *task, tile, scratch);
        for (int32_t head = 0; head < heads; ++head) {
            const int32_t position = task->row_positions[head / group];
            // Positions are compared by their difference: the sum of a position and a window may leave int32.
            int32_t begin = 0, end = 0;
            if (asked) {
                end = std::clamp(position - tile.first + 1, 0, static_cast<int32_t>(tile.count));
                if (params->sliding_window > 0) begin = std::clamp(position - tile.first + 1 - params->sliding_window, 0, end);
            }
            float tile_max = none;
            for (int32_t t = begin; t < end; ++t) {
                const float *const query = task->queries + static_cast<ptrdiff_t>(head) * params->key_dim;
                scratch.logits[t] = logit_of(*params, query, scratch.keys + static_cast<ptrdiff_t>(t) * params->key_dim);
                tile_max = std::max(tile_max, scratch.logits[t]);
            }
            float tile_sum = 0;
            if (begin < end) {
                float *const out = task->out + static_cast<ptrdiff_t>(head) * value_dim;
                float &max = task->max[head], &sum = task->sum[head];
                if (tile_max > max) {
                    const float shrink = std::exp(max - tile_max);
                    for (int32_t i = 0; i < value_dim; ++i)
                        out[i] *= shrink;
                    sum *= shrink;
                    max = tile_max;
                }
                for (int32_t t = begin; t < end; ++t) {
                    const float weight = std::exp(scratch.logits[t] - max);
                    const float *const value = scratch.values + static_cast<ptrdiff_t>(t) * value_dim;
                    for (int32_t i = 0; i < value_dim; ++i)
                        out[i] += weight * value[i];
                    sum += weight;
                    tile_sum += std::exp(scratch.logits[t] - tile_max);
                }
            }
            if (task->tile_max != nullptr) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(index - task->tile_begin) * heads + head;
                task->tile_max[at] = tile_max;
                task->tile_sum[at] = tile_sum;
            }
        }
    }
}

} // namespace skerry::ref
