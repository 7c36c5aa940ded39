#include "step/memory.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/half.hpp"
#include "base/hash.hpp"
#include "codec/error_code.hpp"
#include "policy/sekv_paper.hpp"

namespace skerry {

namespace {

size_t element_bytes(const PolicyConfig &p) { return static_cast<size_t>(format_bits(p.store_dtype)) / 8; }

// Byte offsets of one KV head's rows within its part of PromptMemory::device.
struct LaneRows {
    size_t values = 0; // keys of exact tokens lie at 0
    size_t mean_keys = 0;
    size_t mean_values = 0;
    size_t spread = 0;
    size_t bytes = 0;
};

LaneRows lane_rows(const PolicyConfig &p, const PromptMemory &memory, const LayerGeometry &layer) {
    const size_t exact = static_cast<size_t>(memory.exact), compressed = static_cast<size_t>(memory.compressed);
    const size_t key_dim = static_cast<size_t>(layer.key_dim), value_dim = static_cast<size_t>(layer.value_dim);
    LaneRows rows;
    rows.values = round_up(exact * key_dim * element_bytes(p), 16);
    rows.mean_keys = rows.values + round_up(exact * value_dim * element_bytes(p), 16);
    rows.mean_values = rows.mean_keys + compressed * key_dim * sizeof(float);
    rows.spread = rows.mean_values + compressed * value_dim * sizeof(float);
    rows.bytes = round_up(rows.spread + ((p.sekv_flags & SKERRY_SEKV_SECOND_ORDER) != 0 ? compressed * key_dim * sizeof(float) : 0), 16);
    return rows;
}

// Of one span and KV head, in numbers: factors of the keys and of the values, then the gates of either.
struct SpanFactors {
    int32_t key_rank;
    int32_t value_rank;
    size_t key_sigma, key_right, value_left, value_sigma, value_right, key_gates, value_gates, count;
};

SpanFactors span_factors(const PolicyConfig &p, const LayerGeometry &layer, int32_t tokens) {
    SpanFactors f{};
    f.key_rank = paper_rank(tokens, layer.key_dim, p.router->rank_max);
    f.value_rank = paper_rank(tokens, layer.value_dim, p.router->rank_max);
    const size_t n = static_cast<size_t>(tokens), k = static_cast<size_t>(f.key_rank), v = static_cast<size_t>(f.value_rank);
    f.key_sigma = n * k;
    f.key_right = f.key_sigma + k;
    f.value_left = f.key_right + static_cast<size_t>(layer.key_dim) * k;
    f.value_sigma = f.value_left + n * v;
    f.value_right = f.value_sigma + v;
    f.key_gates = f.value_right + static_cast<size_t>(layer.value_dim) * v;
    f.value_gates = f.key_gates + k;
    f.count = f.value_gates + v;
    return f;
}

PaperGates gate_network(const RouterWeights &router) {
    const RouterGates &g = router.gates;
    return {router.rank_max, router.key_dim, g.weight[0], g.bias[0], g.weight[1], g.bias[1], g.weight[2], g.bias[2]};
}

float load(skerry_dtype dtype, const uint8_t *from, size_t index) {
    if (dtype == SKERRY_DTYPE_F32) {
        float value;
        std::memcpy(&value, from + index * sizeof value, sizeof value);
        return value;
    }
    uint16_t half;
    std::memcpy(&half, from + index * sizeof half, sizeof half);
    return dtype == SKERRY_DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

// The number came from this dtype, so that nothing is rounded.
void store(skerry_dtype dtype, float value, uint8_t *to, size_t index) {
    if (dtype == SKERRY_DTYPE_F32) {
        std::memcpy(to + index * sizeof value, &value, sizeof value);
        return;
    }
    const uint16_t half = dtype == SKERRY_DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
    std::memcpy(to + index * sizeof half, &half, sizeof half);
}

// KV heads whose work has scratch of its own.
int32_t heads_at_once(const skerry_cache *cache, const LayerGeometry &layer) {
    return std::min(layer.kv_heads, cache->context->task_slots());
}

// Not a byte more than is asked for.
template <class T>
void set_size(Buffer<T> &buffer, size_t count) {
    buffer.reserve(count);
    buffer.resize(count);
}

template <class Visit>
void for_each_span(const PromptMemory &memory, Visit &&visit) {
    int32_t compressed = 0;
    for (const PaperSpan &span : memory.spans) {
        if (!span.full_resolution) visit(span, compressed++);
    }
}

void release_memory(skerry_cache *cache, PromptMemory *memory) {
    if (memory == nullptr || --memory->references != 0) return;
    destroy_object(cache->allocator, Owner::tables, memory);
}

// ---- scratch ----

struct Carver {
    uint8_t *base;
    size_t at = 0;
    template <class T>
    T *take(size_t count) {
        T *place = reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(base) + at); // base is NULL where only sizes are wanted
        at += round_up(count * sizeof(T), 64);
        return place;
    }
};

// Of one KV head: what its query heads choose.
struct Choice {
    float *queries;    // [group][key_dim]
    float *projected;  // [summary_dim]
    float *logits;     // [compressed]
    float *alphas;     // [group][compressed]
    int32_t *order;    // [compressed]
    uint8_t *selected; // [group][compressed]
    SekvFault *fault;

    Choice(Carver &carver, const PromptMemory &memory, const LayerGeometry &layer, int32_t summary_dim) {
        const size_t group = static_cast<size_t>(layer.group), compressed = static_cast<size_t>(memory.compressed);
        queries = carver.take<float>(group * static_cast<size_t>(layer.key_dim));
        projected = carver.take<float>(static_cast<size_t>(summary_dim));
        logits = carver.take<float>(compressed);
        alphas = carver.take<float>(group * compressed);
        order = carver.take<int32_t>(compressed);
        selected = carver.take<uint8_t>(group * compressed);
        fault = carver.take<SekvFault>(1);
    }
};

// Of one KV head while it attends.
struct Rows {
    float *keys; // of exact tokens
    float *values;
    float *factors; // as PromptMemory::host has them
    PaperMemorySpan *spans;
    double *attend;
    float *out; // [group][value_dim]
    float *lse; // [group]

    Rows(Carver &carver, const PolicyConfig &p, const PromptMemory &memory, const LayerGeometry &layer) {
        const size_t exact = static_cast<size_t>(memory.exact), group = static_cast<size_t>(layer.group);
        const size_t value_dim = static_cast<size_t>(layer.value_dim);
        size_t numbers = 0;
        for_each_span(memory, [&](const PaperSpan &span, int32_t c) {
            if (c < memory.detailed) numbers += span_factors(p, layer, span.tokens()).count;
        });
        keys = carver.take<float>(exact * static_cast<size_t>(layer.key_dim));
        values = carver.take<float>(exact * value_dim);
        factors = carver.take<float>(numbers);
        spans = carver.take<PaperMemorySpan>(memory.spans.size());
        // What paper_attend_scratch asks for.
        attend = carver.take<double>(static_cast<size_t>(memory.tokens) + static_cast<size_t>(memory.compressed) +
                                     static_cast<size_t>(p.router->rank_max) + value_dim);
        out = carver.take<float>(group * value_dim);
        lse = carver.take<float>(group);
    }
};

size_t choice_bytes(const PolicyConfig &p, const PromptMemory &memory, const LayerGeometry &layer) {
    Carver carver{nullptr};
    static_cast<void>(Choice(carver, memory, layer, p.router->summary_dim));
    return carver.at;
}

size_t rows_bytes(const PolicyConfig &p, const PromptMemory &memory, const LayerGeometry &layer) {
    Carver carver{nullptr};
    static_cast<void>(Rows(carver, p, memory, layer));
    return carver.at;
}

size_t attend_bytes(const skerry_cache *cache, const PromptMemory &memory) {
    size_t most = 0;
    for (const LayerGeometry &layer : cache->layers) {
        const PolicyConfig &p = cache->policy();
        most = std::max(most, static_cast<size_t>(layer.kv_heads) * choice_bytes(p, memory, layer) +
                                  static_cast<size_t>(heads_at_once(cache, layer)) * rows_bytes(p, memory, layer));
    }
    return most;
}

// ---- building ----

// Scratch of building one KV head.
struct BuildRows {
    float *keys; // [tokens][key_dim]
    float *values;
    float *weights; // [longest span]
    float *gates;   // [rank_max]
    double *factor;
    void *code;

    BuildRows(Carver &carver, const skerry_cache *cache, const LayerGeometry &layer, int32_t tokens, int32_t longest) {
        const size_t n = static_cast<size_t>(tokens);
        keys = carver.take<float>(n * static_cast<size_t>(layer.key_dim));
        values = carver.take<float>(n * static_cast<size_t>(layer.value_dim));
        weights = carver.take<float>(static_cast<size_t>(longest));
        gates = carver.take<float>(static_cast<size_t>(cache->policy().router->rank_max));
        factor = carver.take<double>(
            static_cast<size_t>(std::max(paper_factor_scratch(longest, layer.key_dim), paper_factor_scratch(longest, layer.value_dim))));
        code = carver.take<uint8_t>(std::max(cache->kernels().code_scratch_bytes(layer.key_dim, r_tile_tokens),
                                             cache->kernels().code_scratch_bytes(layer.value_dim, r_tile_tokens)));
    }
};

struct Builder {
    skerry_cache *cache;
    const Sequence *seq;
    const float *nats;
    PromptMemory *memory;

    // Returns the relative error of the rank, ||X - U S V^T|| / ||X||: what the singular values that are kept leave of the rows' squares.
    double side(const float *rows, int32_t dim, const PaperSpan &span, float *left, float *sigma, float *right, double *scratch) const {
        const float *from = rows + span.begin * static_cast<int64_t>(dim);
        const int32_t rank_max = cache->policy().router->rank_max;
        paper_factorise(from, dim, span.tokens(), dim, rank_max, left, sigma, right, scratch);
        if (paper_rank(span.tokens(), dim, rank_max) == std::min(span.tokens(), dim)) return 0;
        double squares = 0;
        for (int64_t k = 0; k < span.tokens() * static_cast<int64_t>(dim); ++k)
            squares += static_cast<double>(from[k]) * static_cast<double>(from[k]);
        double left_over = squares;
        for (int32_t k = 0; k < rank_max; ++k)
            left_over -= static_cast<double>(sigma[k]) * static_cast<double>(sigma[k]);
        return left_over > 0 ? std::sqrt(left_over / squares) : 0;
    }

    void lane(const LayerGeometry &layer, int32_t head, const BuildRows &scratch) const {
        const PolicyConfig &p = cache->policy();
        const int32_t index = layer.lane + head;
        const Lane &lane = seq->lane(index);
        const skerry_tile *tiles = seq->tiles(lane);
        for (uint32_t t = 0; t < lane.tiles; ++t) {
            decode_tile(cache, seq, layer.source, lane, tiles[t], scratch.keys + tiles[t].first * static_cast<int64_t>(layer.key_dim),
                        scratch.values + tiles[t].first * static_cast<int64_t>(layer.value_dim), {nullptr, nullptr, scratch.code});
        }
        const LaneRows at = lane_rows(p, *memory, layer);
        uint8_t *device = memory->device.data() + memory->device_at[static_cast<size_t>(index)];
        size_t row = 0;
        const auto keep = [&](int32_t position) {
            const auto put = [&](const float *from, int32_t dim, uint8_t *to) {
                const size_t width = static_cast<size_t>(dim);
                for (size_t c = 0; c < width; ++c)
                    store(p.store_dtype, from[static_cast<size_t>(position) * width + c], to, row * width + c);
            };
            put(scratch.keys, layer.key_dim, device);
            put(scratch.values, layer.value_dim, device + at.values);
            ++row;
        };
        for (const int32_t position : memory->anchors)
            keep(position);
        for (const PaperSpan &span : memory->spans) {
            for (int32_t position = span.begin; span.full_resolution && position < span.end; ++position)
                keep(position);
        }
        float *mean_keys = reinterpret_cast<float *>(device + at.mean_keys);
        float *mean_values = reinterpret_cast<float *>(device + at.mean_values);
        float *spreads = reinterpret_cast<float *>(device + at.spread);
        float *host = memory->host.data() + memory->host_at[static_cast<size_t>(index)];
        const PaperGates network = gate_network(*p.router);
        for_each_span(*memory, [&](const PaperSpan &span, int32_t c) {
            const float *keys = scratch.keys + span.begin * static_cast<int64_t>(layer.key_dim);
            const float *values = scratch.values + span.begin * static_cast<int64_t>(layer.value_dim);
            float *mean_key = mean_keys + c * static_cast<int64_t>(layer.key_dim);
            paper_weights(nats + span.begin, span.tokens(), scratch.weights);
            paper_summary(scratch.weights, keys, layer.key_dim, span.tokens(), layer.key_dim, mean_key);
            paper_summary(scratch.weights, values, layer.value_dim, span.tokens(), layer.value_dim,
                          mean_values + c * static_cast<int64_t>(layer.value_dim));
            if ((p.sekv_flags & SKERRY_SEKV_SECOND_ORDER) != 0) {
                paper_spread(scratch.weights, keys, layer.key_dim, span.tokens(), layer.key_dim, mean_key,
                             spreads + c * static_cast<int64_t>(layer.key_dim));
            }
            if (c >= memory->detailed) return;
            const SpanFactors f = span_factors(p, layer, span.tokens());
            const double key_error = side(scratch.keys, layer.key_dim, span, host, host + f.key_sigma, host + f.key_right, scratch.factor);
            const double value_error = side(scratch.values, layer.value_dim, span, host + f.value_left, host + f.value_sigma,
                                            host + f.value_right, scratch.factor);
            memory->errors[static_cast<size_t>(index) * static_cast<size_t>(memory->compressed) + static_cast<size_t>(c)] =
                error_code(std::max(key_error, value_error));
            paper_gates(network, host + f.key_sigma, f.key_rank, mean_key, scratch.gates);
            std::copy_n(scratch.gates, f.key_rank, host + f.key_gates);
            // REF weights the values by the keys' gates, too.
            if ((p.sekv_flags & SKERRY_SEKV_VALUE_GATES) != 0)
                paper_gates(network, host + f.value_sigma, f.value_rank, mean_key, scratch.gates);
            std::copy_n(scratch.gates, f.value_rank, host + f.value_gates);
            host += f.count;
        });
    }

    void routes(const LayerGeometry &layer, int32_t index, int32_t query_head) const {
        const RouterWeights &router = *cache->policy().router;
        const LayerGeometry &source = cache->layers[static_cast<size_t>(layer.source)];
        const uint8_t *device = memory->device.data() + memory->device_at[static_cast<size_t>(layer.lane + query_head / layer.group)];
        const float *mean_keys = reinterpret_cast<const float *>(device + lane_rows(cache->policy(), *memory, source).mean_keys);
        float *out = reinterpret_cast<float *>(memory->device.data() + memory->routes_at[static_cast<size_t>(index)]) +
                     static_cast<ptrdiff_t>(query_head) * memory->compressed * router.summary_dim;
        for (int32_t c = 0; c < memory->compressed; ++c) {
            paper_route_key(router.key_matrix(index, query_head), router.summary_dim, layer.key_dim,
                            mean_keys + c * static_cast<int64_t>(layer.key_dim), out + c * static_cast<int64_t>(router.summary_dim));
        }
    }
};

// Anchors and spans, and where everything will lie.
Status lay_out(skerry_cache *cache, const PaperState &state, int32_t tokens, int32_t index, PromptMemory *memory, skerry_error *error) {
    const PolicyConfig &p = cache->policy();
    {
        Buffer<int32_t> anchors(cache->allocator, Owner::staging);
        Buffer<PaperSpan> spans(cache->allocator, Owner::staging);
        set_size(anchors, static_cast<size_t>(tokens));
        set_size(spans, static_cast<size_t>(tokens + 1) / 2);
        const PaperSegmentation found =
            paper_segment(state.nats.data(), static_cast<int64_t>(state.nats.size()), tokens, static_cast<double>(p.anchor_threshold),
                          p.full_resolution_below, anchors.data(), spans.data());
        if (found.fault != SekvFault::none) {
            return fail(error, SKERRY_ERROR_INTERNAL, SKERRY_SUBJECT_SEQUENCE, index, static_cast<int64_t>(found.fault), 0,
                        "surprisal that was checked is not fit for spans");
        }
        set_size(memory->anchors, static_cast<size_t>(found.anchors));
        set_size(memory->spans, static_cast<size_t>(found.spans));
        std::copy_n(anchors.data(), memory->anchors.size(), memory->anchors.data());
        std::copy_n(spans.data(), memory->spans.size(), memory->spans.data());
    }
    memory->tokens = tokens;
    memory->exact = static_cast<int32_t>(memory->anchors.size());
    for (const PaperSpan &span : memory->spans) {
        memory->exact += span.full_resolution ? span.tokens() : 0;
        memory->compressed += span.full_resolution ? 0 : 1;
    }
    const int64_t entries = int64_t{memory->exact} + memory->compressed;
    if (entries > p.budget_entries) {
        return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, index, entries, p.budget_entries,
                    "sekv.budget_entries is %lld: anchors, short spans and one summary per span are %lld already",
                    static_cast<long long>(p.budget_entries), static_cast<long long>(entries));
    }
    set_size(memory->lengths, static_cast<size_t>(memory->compressed));
    for_each_span(*memory, [&](const PaperSpan &span, int32_t c) { memory->lengths[static_cast<size_t>(c)] = span.tokens(); });
    set_size(memory->device_at, static_cast<size_t>(cache->lanes));
    set_size(memory->host_at, static_cast<size_t>(cache->lanes));
    set_size(memory->errors, static_cast<size_t>(cache->lanes) * static_cast<size_t>(memory->compressed));
    set_size(memory->routes_at, cache->layers.size());
    uint64_t device = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source == static_cast<int32_t>(i)) {
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                memory->device_at[static_cast<size_t>(layer.lane + h)] = device;
                device += lane_rows(p, *memory, layer).bytes;
                memory->exact_bytes +=
                    static_cast<uint64_t>(memory->exact) * static_cast<uint64_t>(layer.key_dim + layer.value_dim) * element_bytes(p);
            }
        }
        memory->routes_at[i] = device;
        device += static_cast<uint64_t>(layer.query_heads) * static_cast<uint64_t>(memory->compressed) *
                  static_cast<uint64_t>(p.router->summary_dim) * sizeof(float);
    }
    // Spans get their factors in order of position while the host has room, each in all layers or in none.
    uint64_t room = cache->plan.host_limit;
    for_each_span(*memory, [&](const PaperSpan &span, int32_t c) {
        uint64_t bytes = 0;
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source == static_cast<int32_t>(i))
                bytes += static_cast<uint64_t>(layer.kv_heads) * span_factors(p, layer, span.tokens()).count * sizeof(float);
        }
        if (c > memory->detailed || bytes > room) return;
        room -= bytes;
        memory->detailed = c + 1;
    });
    uint64_t numbers = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        uint64_t each = 0;
        for_each_span(*memory, [&](const PaperSpan &span, int32_t c) {
            if (c < memory->detailed) each += span_factors(p, layer, span.tokens()).count;
        });
        for (int32_t h = 0; h < layer.kv_heads; ++h, numbers += each)
            memory->host_at[static_cast<size_t>(layer.lane + h)] = numbers;
    }
    set_size(memory->device, device);
    const uint64_t bytes = memory_sequence_bytes(cache, cache->plan, *memory);
    if (bytes > cache->plan.sequence_bytes) {
        return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, index, static_cast<int64_t>(bytes),
                    static_cast<int64_t>(cache->plan.sequence_bytes),
                    "the prompt's anchors, short spans and summaries take %llu bytes, the budget of a sequence is %llu: fidelity paper has "
                    "no way to hold less",
                    static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(cache->plan.sequence_bytes));
    }
    set_size(memory->host, numbers);
    return SKERRY_OK;
}

Status build(skerry_step *step, const StepSequence &part, int32_t index, skerry_error *error) {
    skerry_cache *cache = step->cache;
    PaperState &state = *part.seq->paper;
    const int32_t tokens = static_cast<int32_t>(part.base + part.count);
    Owned<PromptMemory> made = make_owned<PromptMemory>(cache->allocator, Owner::tables, cache->allocator);
    PromptMemory *memory = made.get();
    if (const Status status = lay_out(cache, state, tokens, index, memory, error); status < 0) return status;
    set_size(state.zoomed, static_cast<size_t>(cache->lanes) * static_cast<size_t>(memory->compressed));
    set_size(state.zooming, state.zoomed.size());
    std::fill(state.zoomed.begin(), state.zoomed.end(), uint8_t{0}); // an aborted step may have got here
    if (const size_t bytes = attend_bytes(cache, *memory); bytes > cache->memory_scratch.size()) {
        Buffer<uint8_t> scratch(cache->allocator, Owner::scratch, 64);
        set_size(scratch, bytes);
        cache->memory_scratch.swap(scratch);
    }
    int32_t longest = 0;
    for_each_span(*memory, [&](const PaperSpan &span, int32_t) { longest = std::max(longest, span.tokens()); });
    const Builder builder{cache, part.seq, state.nats.data(), memory};
    Buffer<uint8_t> scratch(cache->allocator, Owner::staging, 64);
    const auto failed = [&](Status status, size_t layer) {
        return fail(error, status, SKERRY_SUBJECT_PARALLEL_FOR, static_cast<int32_t>(layer), 0, 0,
                    "layer %zu: the host's parallel_for failed or left work out", layer);
    };
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source == static_cast<int32_t>(i)) {
            Carver size{nullptr};
            static_cast<void>(BuildRows(size, cache, layer, tokens, longest));
            const int32_t batch = heads_at_once(cache, layer);
            if (size.at * static_cast<size_t>(batch) > scratch.size()) set_size(scratch, size.at * static_cast<size_t>(batch));
            for (int32_t first = 0; first < layer.kv_heads; first += batch) {
                const auto lane = [&](int32_t k) {
                    Carver carver{scratch.data() + size.at * static_cast<size_t>(k)};
                    builder.lane(layer, first + k, BuildRows(carver, cache, layer, tokens, longest));
                };
                const Status status = cache->context->workers.run(std::min(batch, layer.kv_heads - first), lane);
                if (status < 0) return failed(status, i);
            }
        }
        const auto routes = [&](int32_t head) { builder.routes(layer, static_cast<int32_t>(i), head); };
        if (const Status status = cache->context->workers.run(layer.query_heads, routes); status < 0) return failed(status, i);
    }
    state.made = made.detach();
    return SKERRY_OK;
}

void drop_made(skerry_step *step) {
    for (const StepSequence &part : step->seqs)
        release_memory(step->cache, std::exchange(part.seq->paper->made, nullptr));
}

} // namespace

void memory_reserve(const StepSequence &part) {
    if (!part.seq->paper || part.seq->is_memory()) return;
    part.seq->paper->nats.reserve(static_cast<size_t>(part.base + part.count));
}

void memory_begin(const StepSequence &part) {
    if (!part.seq->paper) return;
    PaperState &state = *part.seq->paper;
    if (part.seq->is_memory()) {
        if (!state.zoomed.empty()) std::memcpy(state.zooming.data(), state.zoomed.data(), state.zoomed.size());
    } else {
        state.nats.resize(static_cast<size_t>(part.base));
    }
}

void memory_surprisal(const StepSequence &part, const float *nats) {
    PaperState &state = *part.seq->paper;
    if (part.seq->is_memory()) return;
    state.nats.resize(static_cast<size_t>(part.base + part.count));
    std::copy_n(nats, part.count, state.nats.data() + part.base);
    state.nats[0] = 0;
}

Status memory_build(skerry_step *step, skerry_error *error) {
    if (!step->cache->policy().sekv_paper()) return SKERRY_OK;
    for (size_t s = 0; s < step->seqs.size(); ++s) {
        const StepSequence &part = step->seqs[s];
        if (part.seq->is_memory() || static_cast<int64_t>(part.seq->paper->nats.size()) == part.base + part.count) continue;
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_SEQUENCE, static_cast<int32_t>(s), part.base, 0,
                    "spans are cut by surprisal: skerry_step_surprisal comes before the commit");
    }
    if ((step->flags & SKERRY_STEP_PREFILL) != 0) return SKERRY_OK;
    try {
        for (size_t s = 0; s < step->seqs.size(); ++s) {
            if (step->seqs[s].seq->is_memory()) continue;
            if (const Status status = build(step, step->seqs[s], static_cast<int32_t>(s), error); status < 0) {
                drop_made(step);
                return status;
            }
        }
    } catch (...) {
        drop_made(step);
        throw;
    }
    return SKERRY_OK;
}

void memory_commit(skerry_cache *cache, Sequence *seq) {
    PaperState &state = *seq->paper;
    if (seq->is_memory()) {
        if (!state.zoomed.empty()) std::memcpy(state.zoomed.data(), state.zooming.data(), state.zoomed.size());
        return;
    }
    if (state.made == nullptr) return;
    state.memory = std::exchange(state.made, nullptr);
    for (Lane &lane : seq->tables.lanes)
        lane_release(cache, seq->tables, lane);
    Buffer<float> none(cache->allocator, Owner::staging);
    state.nats.swap(none);
    const PromptMemory &memory = *state.memory;
    skerry_counters &counters = cache->step.counters;
    const uint64_t lanes = static_cast<uint64_t>(cache->lanes);
    counters.details_written += lanes * static_cast<uint64_t>(memory.detailed);
    counters.details_refused += lanes * static_cast<uint64_t>(memory.compressed - memory.detailed);
    counters.detail_bytes_written += memory.host.size() * sizeof(float);
}

void memory_clear(skerry_cache *cache, Sequence *seq) {
    if (!seq->paper) return;
    PaperState &state = *seq->paper;
    release_memory(cache, std::exchange(state.memory, nullptr));
    Buffer<float> nats(cache->allocator, Owner::staging);
    Buffer<uint8_t> zoomed(cache->allocator, Owner::tables);
    Buffer<uint8_t> zooming(cache->allocator, Owner::staging);
    state.nats.swap(nats);
    state.zoomed.swap(zoomed);
    state.zooming.swap(zooming);
}

void memory_fork(skerry_cache *cache, const Sequence *parent, Sequence *child) {
    if (!parent->paper) return;
    const PaperState &from = *parent->paper;
    PaperState &to = *child->paper;
    Buffer<float> nats(cache->allocator, Owner::staging);
    Buffer<uint8_t> zoomed(cache->allocator, Owner::tables);
    Buffer<uint8_t> zooming(cache->allocator, Owner::staging);
    set_size(nats, from.nats.size());
    set_size(zoomed, from.zoomed.size());
    set_size(zooming, from.zoomed.size());
    std::copy_n(from.nats.data(), nats.size(), nats.data());
    std::copy_n(from.zoomed.data(), zoomed.size(), zoomed.data());
    to.nats.swap(nats);
    to.zoomed.swap(zoomed);
    to.zooming.swap(zooming);
    to.memory = from.memory;
    if (to.memory != nullptr) ++to.memory->references;
}

// ---- attention ----

namespace {

struct Attention {
    const MemoryCall &call;
    const StepSequence &part;
    const PromptMemory &memory;
    int64_t row; // of the step's tensors

    skerry_cache *cache() const { return call.step->cache; }
    const PolicyConfig &policy() const { return cache()->policy(); }
    // The one that stores; its own heads are what is attended to.
    const LayerGeometry &source() const { return cache()->layers[static_cast<size_t>(call.layer->source)]; }

    bool wanted(const Choice &choice, int32_t c) const {
        for (int32_t g = 0; g < call.layer->group; ++g) {
            if (choice.selected[static_cast<ptrdiff_t>(g) * memory.compressed + c] != 0) return true;
        }
        return false;
    }

    void choose(int32_t head, const Choice &choice) const {
        const LayerGeometry &layer = *call.layer;
        const RouterWeights &router = *policy().router;
        const int32_t compressed = memory.compressed, rank = router.summary_dim;
        const float *routes = reinterpret_cast<const float *>(memory.device.data() + memory.routes_at[static_cast<size_t>(call.index)]);
        const float *taus = router.tau + static_cast<ptrdiff_t>(call.index) * router.query_heads + head * layer.group;
        const int32_t *lengths = memory.lengths.data();
        const int64_t persistent = int64_t{memory.exact} + compressed;
        const int64_t budget = policy().budget_entries;
        *choice.fault = SekvFault::none;
        for (int32_t g = 0; g < layer.group; ++g) {
            const int32_t query_head = head * layer.group + g;
            float *query = choice.queries + g * layer.key_dim;
            read_row(call.queries, row, query_head, layer.key_dim, query);
            if (call.zeroes) zero_unstorable(query, layer.key_dim, SKERRY_DTYPE_F32);
            float *alphas = choice.alphas + static_cast<ptrdiff_t>(g) * compressed;
            paper_project(router.query_matrix(call.index, query_head), rank, layer.key_dim, query, choice.projected);
            paper_route(choice.projected, routes + static_cast<ptrdiff_t>(query_head) * compressed * rank, lengths, compressed, rank,
                        choice.logits, alphas);
            std::fill(alphas + memory.detailed, alphas + compressed, -std::numeric_limits<float>::infinity());
            if ((policy().sekv_flags & SKERRY_SEKV_GROUP_CHOICE) != 0) continue;
            const SekvFault fault = paper_select(alphas, lengths, compressed, taus[g], persistent, budget, choice.order,
                                                 choice.selected + static_cast<ptrdiff_t>(g) * compressed);
            if (fault != SekvFault::none) *choice.fault = fault;
        }
        if ((policy().sekv_flags & SKERRY_SEKV_GROUP_CHOICE) != 0) {
            paper_select_group(choice.alphas, lengths, layer.group, compressed, taus, persistent, budget, choice.order, choice.selected);
        } else if (*choice.fault == SekvFault::none) {
            *choice.fault = paper_check_group(choice.selected, layer.group, lengths, compressed, persistent, budget);
        }
    }

    void attend(int32_t head, const Choice &choice, const Rows &rows) const {
        const PolicyConfig &p = policy();
        const LayerGeometry &layer = source();
        const size_t lane = static_cast<size_t>(layer.lane + head);
        const LaneRows at = lane_rows(p, memory, layer);
        const uint8_t *device = memory.device.data() + memory.device_at[lane];
        for (size_t k = 0; k < static_cast<size_t>(memory.exact) * static_cast<size_t>(layer.key_dim); ++k)
            rows.keys[k] = load(p.store_dtype, device, k);
        for (size_t k = 0; k < static_cast<size_t>(memory.exact) * static_cast<size_t>(layer.value_dim); ++k)
            rows.values[k] = load(p.store_dtype, device + at.values, k);
        const float *mean_keys = reinterpret_cast<const float *>(device + at.mean_keys);
        const float *mean_values = reinterpret_cast<const float *>(device + at.mean_values);
        const float *spreads = reinterpret_cast<const float *>(device + at.spread);
        const float *from = memory.host.data() + memory.host_at[lane];
        float *to = rows.factors;
        int64_t exact = static_cast<int64_t>(memory.anchors.size());
        int32_t c = 0;
        for (size_t s = 0; s < memory.spans.size(); ++s) {
            const PaperSpan &span = memory.spans[s];
            PaperMemorySpan &out = rows.spans[s];
            out = PaperMemorySpan{};
            out.tokens = span.tokens();
            out.full_resolution = span.full_resolution;
            if (span.full_resolution) {
                out.keys = rows.keys + exact * layer.key_dim;
                out.values = rows.values + exact * layer.value_dim;
                exact += span.tokens();
                continue;
            }
            out.keys = mean_keys + c * static_cast<int64_t>(layer.key_dim);
            out.values = mean_values + c * static_cast<int64_t>(layer.value_dim);
            if ((p.sekv_flags & SKERRY_SEKV_SECOND_ORDER) != 0) out.spread = spreads + c * static_cast<int64_t>(layer.key_dim);
            if (c < memory.detailed) {
                const SpanFactors f = span_factors(p, layer, span.tokens());
                if (wanted(choice, c)) {
                    cache()->context->transfers.copy(Pieces(from, f.count * sizeof(float)), to);
                    out.key_factors = {span.tokens(), layer.key_dim, f.key_rank, to, to + f.key_sigma, to + f.key_right};
                    out.value_factors = {span.tokens(),     layer.value_dim,    f.value_rank,
                                         to + f.value_left, to + f.value_sigma, to + f.value_right};
                    out.key_gates = to + f.key_gates;
                    out.value_gates = to + f.value_gates;
                    to += f.count;
                }
                from += f.count;
            }
            ++c;
        }
        PaperMemory view;
        view.key_dim = layer.key_dim;
        view.value_dim = layer.value_dim;
        view.scale = call.layer->scale;
        view.anchors = static_cast<int64_t>(memory.anchors.size());
        view.anchor_keys = rows.keys;
        view.anchor_values = rows.values;
        view.spans = static_cast<int32_t>(memory.spans.size());
        view.span = rows.spans;
        const PaperOff off = (p.sekv_flags & SKERRY_SEKV_ABSENT_ROWS) != 0 ? PaperOff::absent : PaperOff::leak;
        paper_attend(&view, 1, layer.group, choice.queries, choice.selected, off, rows.out, rows.lse, rows.attend);
    }

    // What a head's choice came to.
    void count(int32_t head, const Choice &choice) const {
        const LayerGeometry &layer = source();
        skerry_counters &counters = call.step->counters;
        uint8_t *zooming = nullptr;
        if (call.remember) zooming = part.seq->paper->zooming.data() + static_cast<ptrdiff_t>(layer.lane + head) * memory.compressed;
        counters.attended_bytes += lane_rows(policy(), memory, layer).bytes;
        for_each_span(memory, [&](const PaperSpan &span, int32_t c) {
            const bool expanded = wanted(choice, c);
            if (zooming != nullptr) zooming[c] = expanded ? 1 : 0;
            if (!expanded) return;
            const uint64_t bytes = span_factors(policy(), layer, span.tokens()).count * sizeof(float);
            ++counters.zooms;
            ++counters.zooms_fetched;
            counters.fetched_bytes += bytes;
            counters.attended_bytes += bytes;
        });
    }
};

} // namespace

Status memory_attend(const MemoryCall &call, const StepSequence &part, skerry_error *error) {
    skerry_cache *cache = call.step->cache;
    const LayerGeometry &layer = *call.layer;
    const PromptMemory &memory = *part.seq->paper->memory;
    const size_t choice_size = choice_bytes(cache->policy(), memory, layer);
    const size_t rows_size = rows_bytes(cache->policy(), memory, layer);
    const int32_t batch = heads_at_once(cache, layer);
    uint8_t *rows_base = cache->memory_scratch.data() + choice_size * static_cast<size_t>(layer.kv_heads);
    const auto choice_of = [&](int32_t head) {
        Carver carver{cache->memory_scratch.data() + choice_size * static_cast<size_t>(head)};
        return Choice(carver, memory, layer, cache->policy().router->summary_dim);
    };
    const auto rows_of = [&](int32_t place) {
        Carver carver{rows_base + rows_size * static_cast<size_t>(place)};
        return Rows(carver, cache->policy(), memory, layer);
    };
    const auto failed = [&](Status status) {
        return fail(error, status, SKERRY_SUBJECT_PARALLEL_FOR, call.index, 0, 0,
                    "layer %d: the host's parallel_for failed or left work out", call.index);
    };
    for (int32_t r = 0; r < part.count; ++r) {
        const Attention attention{call, part, memory, int64_t{part.row} + r};
        const auto choose = [&](int32_t head) { attention.choose(head, choice_of(head)); };
        if (const Status status = cache->context->workers.run(layer.kv_heads, choose); status < 0) return failed(status);
        for (int32_t head = 0; head < layer.kv_heads; ++head) {
            if (*choice_of(head).fault == SekvFault::none) continue;
            return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, head, 0, cache->policy().budget_entries,
                        "layer %d, KV head %d: each query head keeps to sekv.budget_entries = %lld, what they expand together does not "
                        "(SKERRY_SEKV_GROUP_CHOICE chooses as one)",
                        call.index, head, static_cast<long long>(cache->policy().budget_entries));
        }
        for (int32_t first = 0; first < layer.kv_heads; first += batch) {
            const int32_t count = std::min(batch, layer.kv_heads - first);
            const auto attend = [&](int32_t k) { attention.attend(first + k, choice_of(first + k), rows_of(k)); };
            if (const Status status = cache->context->workers.run(count, attend); status < 0) return failed(status);
            for (int32_t k = 0; k < count; ++k) {
                const Rows rows = rows_of(k);
                for (int32_t g = 0; g < layer.group; ++g) {
                    const int64_t head = int64_t{first + k} * layer.group + g;
                    write_row(call.out, attention.row, head, layer.value_dim, rows.out + g * layer.value_dim);
                    if (call.has_lse) write_row(call.lse, attention.row, head, 1, rows.lse + g);
                }
                attention.count(first + k, choice_of(first + k));
            }
        }
    }
    return SKERRY_OK;
}

// ---- reports ----

uint64_t memory_table_bytes(const skerry_cache *cache, const PromptMemory &memory) {
    return sizeof(PromptMemory) + (memory.anchors.size() + memory.lengths.size()) * sizeof(int32_t) +
           memory.spans.size() * sizeof(PaperSpan) + (2 * static_cast<uint64_t>(cache->lanes) + cache->layers.size()) * sizeof(uint64_t) +
           memory.errors.size();
}

uint64_t memory_sequence_bytes(const skerry_cache *cache, const CachePlan &plan, const PromptMemory &memory) {
    const uint64_t zoomed = static_cast<uint64_t>(cache->lanes) * static_cast<uint64_t>(memory.compressed);
    return memory.device.size() + memory_table_bytes(cache, memory) + zoomed +
           plan.info.table_bytes / static_cast<uint64_t>(plan.info.max_sequences);
}

namespace {

// Bytes on the device that stand for one compressed span of one KV head, its projections for the layer's own query heads included.
uint64_t summary_bytes(const PolicyConfig &p, const LayerGeometry &layer) {
    const uint64_t keys = (p.sekv_flags & SKERRY_SEKV_SECOND_ORDER) != 0 ? 2 : 1;
    return sizeof(float) * (keys * static_cast<uint64_t>(layer.key_dim) + static_cast<uint64_t>(layer.value_dim) +
                            static_cast<uint64_t>(layer.group) * static_cast<uint64_t>(p.router->summary_dim));
}

} // namespace

void memory_list(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, int32_t head, skerry_range *ranges,
                 int32_t capacity, int32_t *needed) {
    const PolicyConfig &p = cache->policy();
    const PaperState &state = *seq->paper;
    const uint8_t *zoomed = state.zoomed.data() + static_cast<ptrdiff_t>(layer.lane + head) * state.memory->compressed;
    int32_t count = 0;
    memory_ranges(seq, [&](int64_t begin, int64_t end, skerry_tier tier, int32_t compressed) {
        if (count++ >= capacity) return;
        skerry_range &range = ranges[count - 1];
        range = skerry_range{};
        range.begin = begin;
        range.end = end;
        range.tier = tier;
        if (tier == SKERRY_TIER_EVICTED) return;
        if (state.memory->references > 1) range.flags |= SKERRY_RANGE_SHARED;
        if (tier == SKERRY_TIER_FULL) {
            range.key_format = range.value_format = p.store_dtype;
            range.bytes = static_cast<uint64_t>(end - begin) * static_cast<uint64_t>(layer.key_dim + layer.value_dim) * element_bytes(p);
            return;
        }
        range.key_format = range.value_format = SKERRY_FORMAT_L32;
        range.bytes = summary_bytes(p, layer);
        const uint8_t error = state.memory->errors[static_cast<size_t>(layer.lane + head) * static_cast<size_t>(state.memory->compressed) +
                                                   static_cast<size_t>(compressed)];
        range.flags |= error_units(error) << SKERRY_DETAIL_ERROR_SHIFT;
        if (compressed < state.memory->detailed) range.flags |= SKERRY_RANGE_DETAIL;
        if (zoomed[compressed] != 0) range.flags |= SKERRY_RANGE_ZOOMED;
    });
    *needed = count;
}

void memory_info(const skerry_cache *cache, const Sequence *seq, skerry_seq_info *info) {
    const PromptMemory &memory = *seq->paper->memory;
    const PolicyConfig &p = cache->policy();
    memory_ranges(seq, [&](int64_t begin, int64_t end, skerry_tier tier, int32_t) {
        int64_t &tokens = tier == SKERRY_TIER_FULL      ? info->full_tokens
                          : tier == SKERRY_TIER_SUMMARY ? info->host_tokens
                                                        : info->evicted_tokens;
        tokens += (end - begin) * cache->lanes;
    });
    info->used_bytes = memory.device.size();
    info->host_bytes = memory.host.size() * sizeof(float);
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const uint64_t full_tokens = static_cast<uint64_t>(memory.exact) - memory.anchors.size();
        info->charged_bytes += paper_device_bytes(static_cast<uint64_t>(layer.kv_heads), static_cast<uint64_t>(layer.key_dim),
                                                  static_cast<uint64_t>(layer.value_dim), element_bytes(p), memory.anchors.size(),
                                                  full_tokens, memory.spans.size());
    }
}

void memory_hash(const Sequence *seq, uint64_t *hash) {
    if (!seq->paper) return;
    const PaperState &state = *seq->paper;
    const auto add = [&](const void *data, size_t bytes) { *hash = hash_bytes(*hash, data, bytes); };
    if (state.memory == nullptr) {
        add(state.nats.data(), static_cast<size_t>(seq->length) * sizeof(float)); // an aborted step may have left more
        return;
    }
    const PromptMemory &memory = *state.memory;
    add(memory.anchors.data(), memory.anchors.size() * sizeof(int32_t));
    for (const PaperSpan &span : memory.spans) {
        add(&span.begin, sizeof span.begin);
        add(&span.end, sizeof span.end);
    }
    add(memory.device.data(), memory.device.size());
    add(memory.host.data(), memory.host.size() * sizeof(float));
}

bool memory_consistent(const skerry_cache *cache, const PromptMemory &memory) {
    int32_t position = 0, exact = static_cast<int32_t>(memory.anchors.size()), compressed = 0;
    for (const PaperSpan &span : memory.spans) {
        if (span.begin < position || span.end <= span.begin) return false;
        position = span.end;
        exact += span.full_resolution ? span.tokens() : 0;
        compressed += span.full_resolution ? 0 : 1;
    }
    return memory.references > 0 && position <= memory.tokens && exact == memory.exact && compressed == memory.compressed &&
           memory.detailed <= compressed && memory.device_at.size() == static_cast<size_t>(cache->lanes);
}

} // namespace skerry
