#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "codec/epoch.hpp"
#include "step/memory.hpp"
#include "step/zoom.hpp"

namespace skerry {

namespace {

// exp for x <= 0, the same on every machine and in a form that compilers vectorise; relative error below 3e-6. Masses only.
inline float exp_mass(float x) {
    x = x > -87.0f ? x : -87.0f; // also for NaN
    x = x < 0.0f ? x : 0.0f;
    const float scaled = x * 1.44269504f;
    int32_t whole = static_cast<int32_t>(scaled); // towards zero, and never above 0: one lower is the floor, give or take the exact ones
    whole -= static_cast<float>(whole) > scaled ? 1 : 0;
    const float f = (scaled - static_cast<float>(whole)) * 0.693147181f;
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return p * std::bit_cast<float>((whole + 127) << 23);
}

// Scratch of the tasks that run at once. More tasks than places can only come from a host with many threads: they wait.
class TaskScratch {
public:
    TaskScratch(uint8_t *base, size_t bytes, int32_t places)
        : base_(base), bytes_(bytes), free_(places >= 64 ? ~uint64_t{0} : (uint64_t{1} << places) - 1) {}
    int32_t take() {
        for (;;) {
            uint64_t seen = free_.load(std::memory_order_relaxed);
            while (seen != 0) {
                const int32_t place = __builtin_ctzll(seen);
                if (free_.compare_exchange_weak(seen, seen & ~(uint64_t{1} << place), std::memory_order_acquire)) return place;
            }
        }
    }
    void give(int32_t place) { free_.fetch_or(uint64_t{1} << place, std::memory_order_release); }
    uint8_t *at(int32_t place) const { return base_ + bytes_ * static_cast<size_t>(place); }

private:
    uint8_t *base_;
    size_t bytes_;
    std::atomic<uint64_t> free_;
};

struct AttendCall {
    skerry_step *step;
    skerry_cache *cache;
    const LayerGeometry *layer;
    int32_t index;
    skerry_attend_params params;
    TensorRows queries;
    TensorRows out;
    TensorRows lse;
    bool has_lse;
    const float *sink_logits;
    bool scores;
    int64_t bad_queries = 0;
    bool remember = false;  // what a row reads from the host is its position's own choice
    bool zoom_only = false; // the host attends
};

// What reading from the host came to in one lane.
struct ZoomedLane {
    skerry_counters counters;
    uint32_t tiles;
};
static_assert(sizeof(ZoomedLane) <= zoomed_lane_bytes);

// Bytes of the parts that attention to these tiers reads. Neighbours mostly share a format.
uint64_t lane_bytes_read(const PolicyConfig &p, const LayerGeometry &layer, const skerry_tile *tiles, uint32_t count, uint32_t tiers) {
    uint64_t sum = 0;
    uint64_t format = 0;
    uint64_t bytes = 0;
    for (uint32_t t = 0; t < count; ++t) {
        const skerry_tile &tile = tiles[t];
        if (((tiers >> tile.tier) & 1u) == 0) continue;
        const uint64_t key = uint64_t{tile.key_format} | uint64_t{tile.value_format} << 8 | uint64_t{tile.capacity} << 16 |
                             (is_l_format(tile.key_format) ? uint64_t{tile.epoch} << 24 : 0);
        if (key != format) {
            format = key;
            bytes = part_bytes(tile.key_format, SKERRY_SIDE_KEY, layer.key_dim, tile.capacity, p.value_group, tile_key_rank(tile.epoch)) +
                    part_bytes(tile.value_format, SKERRY_SIDE_VALUE, layer.value_dim, tile.capacity, p.value_group,
                               tile_value_rank(tile.epoch));
        }
        sum += bytes;
    }
    return sum;
}

void decode_epochs(const Sequence *seq, const Lane &lane, const LayerGeometry &layer, skerry_epoch *epochs, float *floats) {
    const uint32_t bytes = epoch_table_bytes(layer);
    for (uint32_t e = 0; e < lane.epochs; ++e) {
        const uint8_t *stored = seq->tables.epochs.data() + lane.epoch_offset + e * bytes + sizeof(EpochHead);
        epochs[e] = epoch_decode(stored, layer.key_dim, floats, floats + layer.key_dim);
        floats += 2 * layer.key_dim;
    }
}

// tile_sum[tile][head] becomes the probability mass of the tile: relative to the head's log-sum-exp instead of to tile_max.
void normalise_masses(float *tile_sum, const float *tile_max, const float *lse, size_t heads, size_t tiles) {
    // The log-sum-exps, repeated so that the inner loop is long enough for vectors.
    constexpr size_t width = 64;
    float repeated[width];
    const size_t tiles_each = heads <= width ? width / heads : 0;
    if (tiles_each == 0) {
        for (size_t t = 0; t < tiles; ++t) {
            for (size_t h = 0; h < heads; ++h)
                tile_sum[t * heads + h] *= exp_mass(tile_max[t * heads + h] - lse[h]);
        }
        return;
    }
    const size_t block = tiles_each * heads;
    for (size_t i = 0; i < block; ++i)
        repeated[i] = lse[i % heads];
    for (size_t begin = 0; begin < tiles * heads; begin += block) {
        const size_t count = std::min(block, tiles * heads - begin);
        float *sum = tile_sum + begin;
        const float *max = tile_max + begin;
        for (size_t i = 0; i < count; ++i)
            sum[i] *= exp_mass(max[i] - repeated[i]);
    }
}

// What rows attend to in one lane: its own list, or one with windows from the host.
struct RowList {
    const skerry_tile *tiles = nullptr;
    const int32_t *origins = nullptr; // place of each entry in the lane's own list, -1: none; nullptr: it is that list
    uint32_t count = 0;

    int32_t origin(uint32_t t) const { return origins == nullptr ? static_cast<int32_t>(t) : origins[t]; }
};

RowList own_list(const Sequence *seq, const Lane &lane) { return {seq->tiles(lane), nullptr, lane.tiles}; }

// The list of the step's last row where that has zoomed in, in the last bytes of the scratch.
RowList zoomed_list(skerry_cache *cache, const StepSequence &part, const LayerGeometry &layer, int32_t head) {
    const Sequence *seq = part.seq;
    const Lane &lane = seq->lane(layer.lane + head);
    if (!cache->policy().zooms(layer)) return own_list(seq, lane);
    const LaneZoom &zoom = seq->zoom->lane(layer.lane + head);
    if (zoom.position != part.base + part.count - 1) return own_list(seq, lane);
    zoom_ensure(cache, part.seq, layer, layer.lane + head);
    const ZoomShape shape = zoom_shape(&cache->kernels(), cache->policy(), layer, cache->quotas[static_cast<size_t>(layer.source)]);
    const size_t most = lane.tiles + static_cast<size_t>(shape.tiles);
    uint8_t *at = cache->scratch.data() + (cache->scratch.size() - most * (sizeof(skerry_tile) + sizeof(int32_t))) / 16 * 16;
    skerry_tile *tiles = reinterpret_cast<skerry_tile *>(at);
    int32_t *origins = reinterpret_cast<int32_t *>(tiles + most);
    const uint32_t count =
        zoom_list(cache, seq, layer, lane, zoom, seq->zoom->current(zoom), static_cast<int32_t>(zoom.current), tiles, origins);
    return {tiles, origins, count};
}

// Masses of the rows on each window of one lane, into pending; rows in position order. Also the mass on quantised windows.
void add_masses(const AttendCall &call, Sequence *seq, const Lane &lane, const RowList &list, int32_t rows, const float *lse,
                const float *tile_max, float *tile_sum, int64_t *quantised) {
    const PolicyConfig &p = call.cache->policy();
    const size_t group = static_cast<size_t>(call.layer->group);
    const size_t heads = static_cast<size_t>(rows) * group;
    normalise_masses(tile_sum, tile_max, lse, heads, list.count);
    const skerry_tile *tiles = list.tiles;
    int64_t *pending = seq->pending.data() + lane.offset;
    const float share = 1.0f / static_cast<float>(group);
    int64_t on_records = 0;
    for (uint32_t t = 0; t < list.count;) {
        const WindowSpan span = window_at(p, tiles, t, list.count);
        t = span.end;
        const int32_t origin = list.origin(span.begin);
        if (origin < 0) continue; // a window that the device holds nothing of has no score
        int64_t sum = pending[origin];
        for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
            float mass = 0;
            for (uint32_t k = span.begin; k < span.end; ++k) {
                const float *here = tile_sum + k * heads + r * group;
                for (size_t g = 0; g < group; ++g)
                    mass += here[g];
            }
            if (!(mass > 0)) continue;
            const int64_t fixed = to_mass(static_cast<double>(mass * share));
            sum = score_combine(call.cache->scores, sum, fixed);
            if (tiles[span.begin].tier == SKERRY_TIER_QUANTISED) on_records = add_mass(on_records, fixed);
        }
        pending[origin] = sum;
    }
    *quantised = on_records;
}

// Tiles of one split. Boundaries are fixed counts of the list (decisions.md 6). A sliding window without routing drops tiles at the front
// whenever a step ends, so there they are counted as if nothing had been dropped: split 0 holds the sinks.
void split_range(const PolicyConfig &p, const skerry_tile *tiles, int32_t count, int32_t split, int32_t *begin, int32_t *end) {
    int32_t sinks = 0;
    int32_t dropped = 0;
    if (!p.routes()) {
        while (sinks < count && tiles[sinks].first < p.sinks)
            ++sinks;
        if (sinks < count)
            dropped = (tiles[sinks].first - p.sinks) / p.window * static_cast<int32_t>((p.window + r_tile_tokens - 1) / r_tile_tokens);
    }
    if (dropped == 0) {
        *begin = std::min(split * limits::split_tiles, count);
        *end = std::min(*begin + limits::split_tiles, count);
        return;
    }
    const int32_t first = (sinks + dropped) / limits::split_tiles; // split of the first tile behind the sinks
    const auto boundary = [&](int32_t global) { return std::clamp(global * limits::split_tiles - dropped, sinks, count); };
    if (split == 0) {
        *begin = 0;
        *end = first == 0 ? boundary(1) : sinks;
    } else {
        *begin = boundary(first == 0 ? split : first + split - 1);
        *end = boundary(first == 0 ? split + 1 : first + split);
    }
}

// Whether this call reads from the host: rows then come one by one, since each chooses for itself.
bool zooms_now(const AttendCall &call, const Sequence *seq) {
    // Also where only low-bit records are asked for: those of windows that are read from the host make way.
    return (call.params.tiers & (SKERRY_TIERS_HOST | SKERRY_TIERS_QUANTISED)) != 0 && zoom_window_count(call.cache, seq, *call.layer) > 0;
}

// What is attended after a row: a layer of a sequence.
struct NextLook {
    Sequence *seq;
    const LayerGeometry *layer;
};

// Rows [row, row + rows) of one sequence over all KV heads, in batches of heads that fit the scratch.
Status attend_rows(const AttendCall &call, const StepSequence &part, int32_t row, int32_t rows, const NextLook *next) {
    skerry_cache *cache = call.cache;
    const LayerGeometry &layer = *call.layer;
    Sequence *seq = part.seq;
    const PolicyConfig &p = cache->policy();
    const int32_t group = layer.group;
    const int32_t heads = rows * group;
    int32_t row_positions[limits::task_rows];
    for (int32_t r = 0; r < rows; ++r)
        row_positions[r] = static_cast<int32_t>(part.base + row + r);

    uint32_t most_tiles = 1;
    uint32_t most_epochs = 0;
    for (int32_t h = 0; h < layer.kv_heads; ++h) {
        const Lane &lane = seq->lane(layer.lane + h);
        most_tiles = std::max(most_tiles, lane.tiles);
        most_epochs = std::max(most_epochs, lane.epochs);
    }
    const bool zooms = zooms_now(call, seq);
    const uint64_t serial = zooms ? ++cache->zoom_serial : 0;
    const ZoomShape shape = zooms ? zoom_shape(&cache->kernels(), p, layer, cache->quotas[static_cast<size_t>(layer.source)]) : ZoomShape{};
    const LaneScratch offsets = lane_scratch(layer, rows, most_tiles, static_cast<int32_t>(most_epochs), shape);
    const PlanDevice device = cache->context->device();
    const size_t per_task = round_up(cache->kernels().attend_scratch_bytes(&call.params, rows, limits::split_tiles), 64);
    const size_t for_tasks = per_task * static_cast<size_t>(device.task_slots);
    const int32_t batch = static_cast<int32_t>(std::min<uint64_t>(
        (cache->scratch.size() - for_tasks) / (offsets.bytes + (zooms ? sizeof(ZoomedLane) : 0)), static_cast<uint64_t>(layer.kv_heads)));
    uint8_t *lane_base = cache->scratch.data() + for_tasks;
    TaskScratch places(cache->scratch.data(), per_task, device.task_slots);
    const int32_t splits = static_cast<int32_t>(lane_splits(most_tiles + shape.tiles));
    const auto list_of = [&](uint8_t *base, const Lane &lane, uint32_t zoomed) -> RowList {
        if (!zooms) return own_list(seq, lane);
        return {reinterpret_cast<const skerry_tile *>(base + offsets.tiles), reinterpret_cast<const int32_t *>(base + offsets.origins),
                zoomed};
    };
    const int64_t query_row = part.row + row;

    for (int32_t first = 0; first < layer.kv_heads; first += batch) {
        const int32_t count = std::min(batch, layer.kv_heads - first);
        std::atomic<uint64_t> bytes_read{0};
        ZoomedLane *zoomed = reinterpret_cast<ZoomedLane *>(lane_base + offsets.bytes * static_cast<size_t>(batch));
        const auto prepare = [&](int32_t i) {
            uint8_t *base = lane_base + offsets.bytes * static_cast<size_t>(i);
            const int32_t h = first + i;
            float *queries = reinterpret_cast<float *>(base + offsets.queries);
            for (int32_t r = 0; r < rows; ++r) {
                for (int32_t g = 0; g < group; ++g) {
                    float *row_queries = queries + (r * group + g) * layer.key_dim;
                    read_row(call.queries, query_row + r, static_cast<int64_t>(h) * group + g, layer.key_dim, row_queries);
                    if (call.bad_queries != 0) zero_unstorable(row_queries, layer.key_dim, SKERRY_DTYPE_F32);
                }
            }
            const Lane &lane = seq->lane(layer.lane + h);
            decode_epochs(seq, lane, layer, reinterpret_cast<skerry_epoch *>(base + offsets.epochs),
                          reinterpret_cast<float *>(base + offsets.epoch_floats));
            if (zooms) {
                const int32_t place = places.take();
                const ZoomCall zoom{cache,
                                    seq,
                                    &layer,
                                    &call.params,
                                    reinterpret_cast<const skerry_epoch *>(base + offsets.epochs),
                                    queries,
                                    reinterpret_cast<float *>(base + offsets.out),
                                    reinterpret_cast<float *>(base + offsets.max),
                                    reinterpret_cast<float *>(base + offsets.sum),
                                    places.at(place),
                                    row_positions[0],
                                    serial,
                                    call.remember};
                zoomed[i] = ZoomedLane{};
                zoomed[i].tiles = zoom_row(zoom, h, offsets, base, &zoomed[i].counters);
                places.give(place);
            }
            const RowList list = list_of(base, lane, zooms ? zoomed[i].tiles : 0);
            bytes_read.fetch_add(lane_bytes_read(p, layer, list.tiles, list.count, call.params.tiers), std::memory_order_relaxed);
        };
        if (const Status status = cache->context->workers.run(count, prepare); status < 0) return status;
        for (int32_t i = 0; zooms && i < count; ++i)
            add_counters(&call.step->counters, zoomed[i].counters);
        if (call.zoom_only) continue;
        // The next to be attended reads much of what it read before: it comes while this one is attended.
        if (zooms && next != nullptr && first + count == layer.kv_heads)
            zoom_prefetch(cache, next->seq, *next->layer, &call.step->counters);
        const auto run = [&](int32_t task_index) {
            const int32_t i = task_index / splits;
            const int32_t split = task_index % splits;
            uint8_t *base = lane_base + offsets.bytes * static_cast<size_t>(i);
            const Lane &lane = seq->lane(layer.lane + first + i);
            const RowList list = list_of(base, lane, zooms ? zoomed[i].tiles : 0);
            skerry_attend_task task{};
            task.tiles = list.tiles;
            task.epochs = reinterpret_cast<const skerry_epoch *>(base + offsets.epochs);
            task.queries = reinterpret_cast<const float *>(base + offsets.queries);
            task.row_positions = row_positions;
            split_range(p, list.tiles, static_cast<int32_t>(list.count), split, &task.tile_begin, &task.tile_end);
            task.rows = rows;
            const size_t split_heads = static_cast<size_t>(split) * static_cast<size_t>(heads);
            task.out = reinterpret_cast<float *>(base + offsets.out) + split_heads * static_cast<size_t>(layer.value_dim);
            task.max = reinterpret_cast<float *>(base + offsets.max) + split_heads;
            task.sum = reinterpret_cast<float *>(base + offsets.sum) + split_heads;
            if (call.scores) {
                const size_t at = static_cast<size_t>(task.tile_begin) * static_cast<size_t>(heads);
                task.tile_max = reinterpret_cast<float *>(base + offsets.tile_max) + at;
                task.tile_sum = reinterpret_cast<float *>(base + offsets.tile_sum) + at;
            }
            const int32_t place = places.take();
            task.scratch = places.at(place);
            cache->kernels().attend(&call.params, &task);
            places.give(place);
        };
        if (const Status status = cache->context->workers.run(count * splits, run); status < 0) return status;
        const auto finish = [&](int32_t i) {
            uint8_t *base = lane_base + offsets.bytes * static_cast<size_t>(i);
            const int32_t h = first + i;
            float *merged = reinterpret_cast<float *>(base + offsets.merged);
            float *lse = reinterpret_cast<float *>(base + offsets.lse);
            cache->kernels().merge(splits, heads, group, layer.value_dim, reinterpret_cast<const float *>(base + offsets.out),
                                   static_cast<int64_t>(heads) * layer.value_dim, reinterpret_cast<const float *>(base + offsets.max),
                                   reinterpret_cast<const float *>(base + offsets.sum), heads,
                                   call.sink_logits != nullptr ? call.sink_logits + static_cast<ptrdiff_t>(h) * group : nullptr, merged,
                                   lse);
        };
        if (const Status status = cache->context->workers.run(count, finish); status < 0) return status;
        // From here on nothing fails: results reach the caller and the scores.
        const bool states = call.scores;
        const auto score = [&](int32_t i) {
            uint8_t *base = lane_base + offsets.bytes * static_cast<size_t>(i);
            const Lane &lane = seq->lane(layer.lane + first + i);
            int64_t quantised = 0;
            add_masses(call, seq, lane, list_of(base, lane, zooms ? zoomed[i].tiles : 0), rows,
                       reinterpret_cast<const float *>(base + offsets.lse), reinterpret_cast<const float *>(base + offsets.tile_max),
                       reinterpret_cast<float *>(base + offsets.tile_sum), &quantised);
            std::memcpy(base + offsets.max, &quantised, sizeof quantised);
        };
        if (states && cache->context->workers.run(count, score) < 0) return SKERRY_ERROR_INTERNAL;
        LayerState &state = seq->layers[static_cast<size_t>(layer.source)];
        call.step->counters.attended_bytes += bytes_read.load(std::memory_order_relaxed);
        for (int32_t i = 0; i < count; ++i) {
            uint8_t *base = lane_base + offsets.bytes * static_cast<size_t>(i);
            const int32_t h = first + i;
            const float *merged = reinterpret_cast<const float *>(base + offsets.merged);
            const float *lse = reinterpret_cast<const float *>(base + offsets.lse);
            for (int32_t r = 0; r < rows; ++r) {
                for (int32_t g = 0; g < group; ++g) {
                    const int64_t head = static_cast<int64_t>(h) * group + g;
                    write_row(call.out, query_row + r, head, layer.value_dim, merged + (r * group + g) * layer.value_dim);
                    if (call.has_lse) write_row(call.lse, query_row + r, head, 1, lse + r * group + g);
                }
            }
            if (!states) continue;
            const Lane &lane = seq->lane(layer.lane + h);
            int64_t quantised = 0;
            std::memcpy(&quantised, base + offsets.max, sizeof quantised);
            state.mass_quantised += static_cast<uint64_t>(quantised);
            state.mass_all += static_cast<uint64_t>(rows) << mass_bits;
            // A layer that shares the cache comes in no order that positions tell.
            if (p.uses_epochs() && layer.source == call.index) {
                const float *queries = reinterpret_cast<const float *>(base + offsets.queries);
                float *squares = seq->tables.query_squares.data() + lane.query_offset;
                for (int32_t r = 0; r < rows; ++r) {
                    add_query_squares(squares, queries + r * group * layer.key_dim, group, layer.key_dim,
                                      state.scored + static_cast<uint64_t>(r));
                }
            }
        }
    }
    return SKERRY_OK;
}

// Keeps what abort needs of the query statistics.
void save_queries(skerry_cache *cache, Sequence *seq, int32_t layer) {
    uint8_t &saved = seq->saved[static_cast<size_t>(layer)];
    if (!cache->policy().uses_epochs() || (saved & saved_queries) != 0) return;
    saved |= saved_queries;
    const LayerGeometry &geometry = cache->layers[static_cast<size_t>(layer)];
    const Lane &first = seq->lane(geometry.lane);
    std::memcpy(seq->undo.query_squares.data() + first.query_offset, seq->tables.query_squares.data() + first.query_offset,
                static_cast<size_t>(geometry.kv_heads) * static_cast<size_t>(geometry.key_dim) * sizeof(float));
}

// Opens the period of a query at `position` in every lane of a layer, with the undo copy made first.
void open_period(skerry_cache *cache, Sequence *seq, int32_t layer, int64_t base, int64_t position) {
    const LayerGeometry &geometry = cache->layers[static_cast<size_t>(layer)];
    const uint64_t period = period_of_query(cache->policy(), position);
    for (int32_t h = 0; h < geometry.kv_heads; ++h) {
        Lane &lane = seq->lane(geometry.lane + h);
        if (lane.period >= period) continue;
        lane_save(cache, seq, layer, base);
        lane_enter_period(cache, seq, lane, period);
    }
}

Status host_stops(const skerry_step *step, int32_t layer, skerry_error *error) {
    for (size_t s = 0; s < step->seqs.size(); ++s) {
        const StepSequence &part = step->seqs[s];
        const int64_t event = event_after(step, part.seq, part.base);
        if (event < part.base + part.count) {
            return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_POSITION, static_cast<int32_t>(s), part.base + part.count, event,
                        "layer %d: windows move at position %lld, inside this step; end the step there, use attend over all tiers, or "
                        "SKERRY_PREFILL_WHOLE",
                        layer, static_cast<long long>(event));
        }
    }
    return SKERRY_OK;
}

Status check_layer(skerry_step *step, int32_t layer, skerry_error *error) {
    const LayerGeometry &geometry = step->cache->layers[static_cast<size_t>(layer)];
    if ((step->layers[static_cast<size_t>(geometry.source)] & layer_appended) == 0) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, layer, 0, 1, "layer %d was not appended in this step",
                    geometry.source);
    }
    if ((step->layers[static_cast<size_t>(geometry.source)] & layer_broken) != 0) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_PARALLEL_FOR, layer, 0, 0,
                    "a parallel loop failed in layer %d: the step can only be aborted", layer);
    }
    name_layer(step, layer);
    return SKERRY_OK;
}

// What a host would attend to by itself.
Status check_tiles(const skerry_step *step, int32_t seq_index, skerry_error *error) {
    if (!step->seqs[static_cast<size_t>(seq_index)].seq->is_memory()) return SKERRY_OK;
    return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_SEQUENCE, seq_index, SKERRY_FIDELITY_PAPER, SKERRY_FIDELITY_PRODUCTION,
                "fidelity paper chooses and weights rows per query head: behind its prompt only skerry_step_attend reads the sequence");
}

} // namespace

Status step_attend(skerry_step *step, const skerry_attend_desc &desc, skerry_error *error) {
    skerry_cache *cache = step->cache;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(desc.layer)];
    const PolicyConfig &p = cache->policy();
    Lock lock(cache->step_mutex);
    if (const Status status = check_layer(step, desc.layer, error); status < 0) return status;
    uint8_t &state = step->layers[static_cast<size_t>(desc.layer)];
    const uint32_t every_tier = SKERRY_TIERS_FULL | SKERRY_TIERS_QUANTISED | SKERRY_TIERS_HOST;
    const uint32_t tiers = desc.tiers == 0 ? every_tier : desc.tiers;
    const bool whole = tiers == every_tier;
    const bool scores = whole && (desc.flags & SKERRY_ATTEND_NO_SCORE) == 0;
    if (scores && (state & layer_scored) != 0) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, desc.layer, 2, 1,
                    "layer %d was attended over all tiers already; repeat with SKERRY_ATTEND_NO_SCORE", desc.layer);
    }
    const int64_t query_shape[3] = {step->rows, layer.query_heads, layer.key_dim};
    const int64_t out_shape[3] = {step->rows, layer.query_heads, layer.value_dim};
    if (const Status status = check_tensor(*desc.queries, 3, query_shape, false, 1, "queries", error); status < 0) return status;
    if (const Status status = check_output(*desc.out, 3, out_shape, false, 2, "out", error); status < 0) return status;
    if (desc.lse != nullptr) {
        if (const Status status = check_output(*desc.lse, 2, query_shape, false, 3, "lse", error); status < 0) return status;
        if (desc.lse->dtype != SKERRY_DTYPE_F32) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_DTYPE, 3, desc.lse->dtype, SKERRY_DTYPE_F32, "lse.dtype is not f32");
        }
    }
    if (desc.sink_logits != nullptr) {
        for (int32_t h = 0; h < layer.query_heads; ++h) {
            if (std::isnan(desc.sink_logits[h]) || desc.sink_logits[h] == INFINITY) {
                return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, h, 0, 0, "sink_logits[%d] is not a number below infinity",
                            h);
            }
        }
    }
    AttendCall call{step,
                    cache,
                    &layer,
                    desc.layer,
                    attend_params(p, layer),
                    tensor_rows(*desc.queries),
                    tensor_rows(*desc.out),
                    {},
                    desc.lse != nullptr,
                    desc.sink_logits,
                    scores && p.routes(),
                    0,
                    scores && layer.source == desc.layer};
    if (desc.lse != nullptr) {
        call.lse =
            TensorRows{desc.lse, desc.lse->shape[0] == 1 ? 0 : desc.lse->stride[0], desc.lse->shape[1] == 1 ? 0 : desc.lse->stride[1], 0};
    }
    for (int32_t r = 0; r < step->rows; ++r) {
        for (int32_t h = 0; h < layer.query_heads; ++h) {
            const int64_t bad = count_unstorable(call.queries, r, h, layer.key_dim, SKERRY_DTYPE_F32);
            call.bad_queries += bad;
            if (bad != 0 && cache->desc.nonfinite == SKERRY_NONFINITE_REFUSE) {
                return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, r, 1, 0,
                            "layer %d, token %d, head %d: queries are not finite", desc.layer, r, h);
            }
        }
    }
    call.params.pool = cache->pool.view();
    call.params.tiers = tiers;
    call.params.exact = (desc.flags & SKERRY_ATTEND_EXACT) != 0 || cache->plan.info.exact_attend != 0 ? 1 : 0;

    step->counters.nonfinite_values += static_cast<uint64_t>(call.bad_queries);
    bool moved = false;
    const int32_t source = layer.source;
    for (const StepSequence &part : step->seqs) {
        if (!part.seq->is_memory() || (whole && desc.sink_logits == nullptr)) continue;
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_SEQUENCE, static_cast<int32_t>(&part - step->seqs.begin()), tiers,
                    every_tier, "fidelity paper has one softmax over everything, without %s",
                    whole ? "sink_logits" : "a part of the tiers");
    }
    for (const StepSequence &part : step->seqs) {
        Sequence *seq = part.seq;
        const int64_t end = part.base + part.count;
        if (seq->is_memory()) {
            const MemoryCall memory{step,         &layer, desc.layer, call.queries, call.out, call.lse, call.has_lse, call.bad_queries != 0,
                                    call.remember};
            if (const Status status = memory_attend(memory, part, error); status < 0) return status;
            continue;
        }
        if (scores && p.routes()) save_queries(cache, seq, source);
        int64_t position = part.base;
        while (position < end) {
            int64_t stop = std::min<int64_t>(end, position + limits::task_rows);
            const int64_t event = source == desc.layer && scores ? event_after(step, seq, position) : INT64_MAX;
            if (p.routes()) stop = std::min(stop, next_event_after(p, position)); // periods, also where nothing moves
            if (zooms_now(call, seq)) stop = position + 1;
            stop = std::min(stop, event);
            if (scores && p.routes()) open_period(cache, seq, source, part.base, position);
            const int32_t rows = static_cast<int32_t>(stop - position);
            // Of the last row, that is the next sequence, or the next layer that stores.
            NextLook next{part.seq, nullptr};
            const size_t place = static_cast<size_t>(&part - step->seqs.begin());
            if (cache->policy().zooms() && stop == end && scores) {
                if (place + 1 < step->seqs.size()) {
                    next = NextLook{step->seqs[place + 1].seq, &layer};
                } else {
                    size_t after = static_cast<size_t>(desc.layer) + 1;
                    while (after < cache->layers.size() && cache->layers[after].source != static_cast<int32_t>(after))
                        ++after;
                    // Behind the last layer comes the first one, in the next step.
                    next = NextLook{step->seqs[0].seq, &cache->layers[after < cache->layers.size() ? after : 0]};
                }
            }
            const Status status =
                attend_rows(call, part, static_cast<int32_t>(position - part.base), rows, next.layer != nullptr ? &next : nullptr);
            if (status < 0) {
                if (moved || position > part.base || &part != step->seqs.begin()) step->layers[static_cast<size_t>(source)] |= layer_broken;
                return fail(error, status, SKERRY_SUBJECT_PARALLEL_FOR, desc.layer, 0, 0,
                            "layer %d: the host's parallel_for failed or left work out", desc.layer);
            }
            if (scores && p.routes()) {
                LayerState &numbers = seq->layers[static_cast<size_t>(source)];
                if (numbers.scored == 0) numbers.scored_from = position;
                if (source == desc.layer) numbers.scored += static_cast<uint64_t>(rows);
            }
            if (stop == event && stop < end) {
                lane_save(cache, seq, source, part.base);
                run_event(cache, seq, source, stop);
                seq->layers[static_cast<size_t>(source)].routed = stop;
                moved = true;
            }
            position = stop;
        }
    }
    if (scores) state |= layer_scored;
    return SKERRY_OK;
}

Status step_zoom(skerry_step *step, int32_t index, const skerry_tensor &queries, skerry_error *error) {
    skerry_cache *cache = step->cache;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    Lock lock(cache->step_mutex);
    if (const Status status = check_layer(step, index, error); status < 0) return status;
    const int64_t query_shape[3] = {step->rows, layer.query_heads, layer.key_dim};
    if (const Status status = check_tensor(queries, 3, query_shape, false, 2, "queries", error); status < 0) return status;
    AttendCall call{step,  cache, &layer, index, attend_params(cache->policy(), layer), tensor_rows(queries), {}, {}, false, nullptr,
                    false, 0,     true,   true};
    for (int32_t r = 0; r < step->rows; ++r) {
        for (int32_t h = 0; h < layer.query_heads; ++h) {
            if (count_unstorable(call.queries, r, h, layer.key_dim, SKERRY_DTYPE_F32) == 0) continue;
            return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, r, 1, 0,
                        "layer %d, token %d, head %d: queries are not finite", index, r, h);
        }
    }
    for (size_t s = 0; s < step->seqs.size(); ++s) {
        const StepSequence &part = step->seqs[s];
        if (part.count == 1 || !zooms_now(call, part.seq)) continue;
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_TOKENS, static_cast<int32_t>(s), part.count, 1,
                    "each query chooses for itself: a step that zooms in for a host's own attention has one token per sequence, not %d",
                    part.count);
    }
    call.params.pool = cache->pool.view();
    call.params.exact = cache->plan.info.exact_attend != 0 ? 1 : 0;
    for (const StepSequence &part : step->seqs) {
        if (!zooms_now(call, part.seq)) continue;
        if (const Status status = attend_rows(call, part, 0, 1, nullptr); status < 0) {
            return fail(error, status, SKERRY_SUBJECT_PARALLEL_FOR, index, 0, 0,
                        "layer %d: the host's parallel_for failed or left work out", index);
        }
    }
    return SKERRY_OK;
}

Status step_observe(skerry_step *step, const skerry_observe_desc &desc, skerry_error *error) {
    skerry_cache *cache = step->cache;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(desc.layer)];
    const PolicyConfig &p = cache->policy();
    Lock lock(cache->step_mutex);
    if (const Status status = check_layer(step, desc.layer, error); status < 0) return status;
    if (const Status status = host_stops(step, desc.layer, error); status < 0) return status;
    if (const Status status = check_tiles(step, desc.seq_index, error); status < 0) return status;
    const StepSequence &part = step->seqs[static_cast<size_t>(desc.seq_index)];
    Sequence *seq = part.seq;
    uint8_t &seen = step->observed[static_cast<size_t>(desc.seq_index) * static_cast<size_t>(cache->lanes) +
                                   static_cast<size_t>(layer.lane + desc.kv_head)];
    if ((step->layers[static_cast<size_t>(desc.layer)] & layer_scored) != 0 || (seen != 0 && layer.source == desc.layer)) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, desc.layer, 2, 1,
                    "layer %d, KV head %d was scored already in this step", desc.layer, desc.kv_head);
    }
    const int64_t query_shape[3] = {part.count, layer.group, layer.key_dim};
    if (desc.queries != nullptr) {
        if (const Status status = check_tensor(*desc.queries, 3, query_shape, false, 1, "queries", error); status < 0) return status;
        const TensorRows rows = tensor_rows(*desc.queries);
        for (int32_t r = 0; r < part.count; ++r) {
            for (int32_t g = 0; g < layer.group; ++g) {
                if (count_unstorable(rows, r, g, layer.key_dim, SKERRY_DTYPE_F32) != 0) {
                    return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, r, 1, 0, "queries of token %d are not finite", r);
                }
            }
        }
    }
    if (desc.merged_lse != nullptr && desc.queries == nullptr) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 1, 0, 1, "merged_lse needs queries");
    }
    if (desc.merged_lse != nullptr && desc.masses != nullptr) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 1, 2, 1, "masses and merged_lse exclude each other");
    }
    const RowList list = zoomed_list(cache, part, layer, desc.kv_head);
    const skerry_tile *tiles = list.tiles;
    int64_t tokens = 0;
    for (uint32_t t = 0; t < list.count; ++t)
        tokens += tiles[t].count;
    if (desc.masses != nullptr) {
        if (desc.token_count != tokens) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, desc.kv_head, desc.token_count, tokens,
                        "token_count is %d, but %lld tokens are readable", desc.token_count, static_cast<long long>(tokens));
        }
        for (int64_t k = 0; k < tokens * part.count; ++k) {
            const float mass = desc.masses[k];
            if (std::isfinite(mass) && mass >= 0 && mass <= 1.0001f) continue;
            return fail(error, std::isfinite(mass) ? SKERRY_ERROR_ARGUMENT : SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES,
                        static_cast<int32_t>(k / std::max<int64_t>(tokens, 1)), k % std::max<int64_t>(tokens, 1), 0,
                        "row %lld, token %lld: a mass is no number in [0, 1]", static_cast<long long>(k / std::max<int64_t>(tokens, 1)),
                        static_cast<long long>(k % std::max<int64_t>(tokens, 1)));
        }
    }
    if (desc.merged_lse != nullptr) {
        for (int64_t k = 0; k < static_cast<int64_t>(part.count) * layer.group; ++k) {
            if (std::isnan(desc.merged_lse[k]) || desc.merged_lse[k] == INFINITY) {
                return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, static_cast<int32_t>(k / layer.group), 0, 0,
                            "merged_lse is not a number");
            }
        }
    }
    if (!p.routes()) {
        seen = 1;
        return SKERRY_OK;
    }
    const int32_t source = layer.source;
    LayerState &state = seq->layers[static_cast<size_t>(source)];
    save_queries(cache, seq, source);
    Lane &own = seq->lane(layer.lane + desc.kv_head);
    const uint64_t before = seq->undo_layers[static_cast<size_t>(source)].scored;
    int64_t position = part.base;
    while (position < part.base + part.count) {
        const int64_t stop = std::min({part.base + part.count, position + limits::task_rows, next_event_after(p, position)});
        if (own.period < period_of_query(p, position)) {
            lane_save(cache, seq, source, part.base);
            lane_enter_period(cache, seq, own, period_of_query(p, position));
        }
        const int32_t rows = static_cast<int32_t>(stop - position);
        const int32_t row = static_cast<int32_t>(position - part.base);
        int64_t *pending = seq->pending.data() + own.offset;
        int64_t quantised = 0;
        float *queries = reinterpret_cast<float *>(cache->scratch.data());
        if (desc.queries != nullptr) {
            const TensorRows from = tensor_rows(*desc.queries);
            for (int32_t r = 0; r < rows; ++r) {
                for (int32_t g = 0; g < layer.group; ++g)
                    read_row(from, row + r, g, layer.key_dim, queries + (r * layer.group + g) * layer.key_dim);
            }
        }
        if (desc.masses != nullptr) {
            for (uint32_t t = 0, column = 0; t < list.count;) {
                const WindowSpan span = window_at(p, tiles, t, list.count);
                const int32_t origin = list.origin(span.begin);
                uint32_t width = 0;
                for (uint32_t k = span.begin; k < span.end; ++k)
                    width += tiles[k].count;
                for (int32_t r = 0; r < rows; ++r) {
                    const float *masses = desc.masses + (row + r) * tokens + column;
                    float mass = 0;
                    for (uint32_t k = 0; k < width; ++k)
                        mass += masses[k];
                    const int64_t fixed = to_mass(static_cast<double>(mass));
                    if (origin >= 0) pending[origin] = score_combine(cache->scores, pending[origin], fixed);
                    if (tiles[t].tier == SKERRY_TIER_QUANTISED) quantised = add_mass(quantised, fixed);
                }
                column += width;
                t = span.end;
            }
        } else if (desc.merged_lse != nullptr) {
            // A second pass over this head with the log-sum-exp known (decisions.md 9).
            AttendCall call{step, cache, &layer, desc.layer, attend_params(p, layer), {}, {}, {}, false, nullptr, true, 0, false};
            call.params.pool = cache->pool.view();
            call.params.exact = static_cast<uint32_t>(cache->plan.info.exact_attend);
            const LaneScratch offsets = lane_scratch(layer, rows, list.count, static_cast<int32_t>(own.epochs));
            const size_t per_task = round_up(cache->kernels().attend_scratch_bytes(&call.params, rows, limits::split_tiles), 64);
            uint8_t *base = cache->scratch.data() + per_task;
            float *copied = reinterpret_cast<float *>(base + offsets.queries);
            std::memmove(copied, queries, static_cast<size_t>(rows * layer.group * layer.key_dim) * sizeof(float));
            queries = copied;
            skerry_epoch *epochs = reinterpret_cast<skerry_epoch *>(base + offsets.epochs);
            decode_epochs(seq, own, layer, epochs, reinterpret_cast<float *>(base + offsets.epoch_floats));
            int32_t row_positions[limits::task_rows];
            for (int32_t r = 0; r < rows; ++r)
                row_positions[r] = static_cast<int32_t>(position + r);
            for (uint32_t begin = 0; begin < list.count; begin += limits::split_tiles) {
                skerry_attend_task task{};
                task.tiles = tiles;
                task.epochs = epochs;
                task.queries = queries;
                task.row_positions = row_positions;
                task.tile_begin = static_cast<int32_t>(begin);
                task.tile_end = static_cast<int32_t>(std::min(begin + static_cast<uint32_t>(limits::split_tiles), list.count));
                task.rows = rows;
                task.out = reinterpret_cast<float *>(base + offsets.out);
                task.max = reinterpret_cast<float *>(base + offsets.max);
                task.sum = reinterpret_cast<float *>(base + offsets.sum);
                const size_t at = static_cast<size_t>(begin) * static_cast<size_t>(rows * layer.group);
                task.tile_max = reinterpret_cast<float *>(base + offsets.tile_max) + at;
                task.tile_sum = reinterpret_cast<float *>(base + offsets.tile_sum) + at;
                task.scratch = cache->scratch.data();
                cache->kernels().attend(&call.params, &task);
            }
            add_masses(call, seq, own, list, rows, desc.merged_lse + static_cast<ptrdiff_t>(row) * layer.group,
                       reinterpret_cast<const float *>(base + offsets.tile_max), reinterpret_cast<float *>(base + offsets.tile_sum),
                       &quantised);
        }
        if (desc.queries != nullptr && p.uses_epochs() && layer.source == desc.layer) {
            float *squares = seq->tables.query_squares.data() + own.query_offset;
            for (int32_t r = 0; r < rows; ++r) {
                add_query_squares(squares, queries + r * layer.group * layer.key_dim, layer.group, layer.key_dim,
                                  before + static_cast<uint64_t>(row + r));
            }
        }
        if (desc.masses != nullptr || desc.merged_lse != nullptr) {
            state.mass_quantised += static_cast<uint64_t>(quantised);
            state.mass_all += static_cast<uint64_t>(rows) << mass_bits;
            if (before == 0) state.scored_from = part.base;
            state.scored = before + static_cast<uint64_t>(part.count);
        }
        position = stop;
    }
    seen = 1;
    return SKERRY_OK;
}

skerry_code_params code_params(const PolicyConfig &policy, const LayerGeometry &layer, const skerry_tile &tile, skerry_side side) {
    skerry_code_params params{};
    params.inverse_frequencies = policy.paper() && side == SKERRY_SIDE_KEY ? layer.inverse_frequencies : nullptr;
    params.attention_factor = layer.attention_factor;
    params.rotary_dims = layer.rotary_dims;
    params.rotary_pairing = layer.rotary_pairing;
    params.position = tile.first;
    params.dim = side == SKERRY_SIDE_KEY ? layer.key_dim : layer.value_dim;
    params.capacity = tile.capacity;
    params.count = tile.count;
    params.value_group = policy.value_group;
    params.grid_dtype = policy.store_dtype == SKERRY_DTYPE_F16 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_BF16;
    params.format = side == SKERRY_SIDE_KEY ? tile.key_format : tile.value_format;
    params.side = side;
    if (is_l_format(params.format)) params.rank = side == SKERRY_SIDE_KEY ? tile_key_rank(tile.epoch) : tile_value_rank(tile.epoch);
    return params;
}

void decode_tile(const skerry_cache *cache, const Sequence *seq, int32_t index, const Lane &lane, const skerry_tile &tile, float *keys,
                 float *values, const CodeScratch &scratch) {
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    skerry_epoch epoch{};
    const bool balanced = is_r_format(tile.key_format) || is_r_format(tile.value_format);
    if (balanced) {
        const uint8_t *stored = seq->tables.epochs.data() + lane.epoch_offset + tile.epoch * epoch_table_bytes(layer) + sizeof(EpochHead);
        epoch = epoch_decode(stored, layer.key_dim, scratch.mean, scratch.balance);
    }
    const uint8_t *part = cache->pool.data(tile.place);
    if (keys != nullptr) {
        skerry_code_params params = code_params(cache->policy(), layer, tile, SKERRY_SIDE_KEY);
        params.epoch = balanced ? &epoch : nullptr;
        cache->kernels().decode(&params, part, keys, scratch.code);
    }
    if (values != nullptr) {
        skerry_code_params params = code_params(cache->policy(), layer, tile, SKERRY_SIDE_VALUE);
        params.epoch = balanced ? &epoch : nullptr;
        cache->kernels().decode(&params, part + tile_value_offset(layer, tile), values, scratch.code);
    }
}

namespace {
// Index of the window or span that a part belongs to; -1: sinks, and with spans by surprisal everything that is in none.
int32_t part_window(const skerry_cache *cache, const Sequence *seq, const skerry_tile &tile) {
    const PolicyConfig &p = cache->policy();
    if (p.spans) return tile.tier == SKERRY_TIER_HOST ? zoom_unit_at(cache, seq, tile.first) : -1;
    return window_of_position(p, tile.first);
}

bool in_tiers(const skerry_tile &tile, uint32_t tiers) { return tiers == 0 || ((tiers >> tile.tier) & 1u) != 0; }
} // namespace

Status step_view(skerry_step *step, int32_t seq_index, int32_t index, int32_t head, uint32_t tiers, skerry_part *parts, int32_t capacity,
                 int32_t *needed, skerry_error *error) {
    skerry_cache *cache = step->cache;
    Lock lock(cache->step_mutex);
    if (const Status status = check_layer(step, index, error); status < 0) return status;
    if (const Status status = check_tiles(step, seq_index, error); status < 0) return status;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    const RowList list = zoomed_list(cache, step->seqs[static_cast<size_t>(seq_index)], layer, head);
    int32_t count = 0;
    for (uint32_t t = 0; t < list.count; ++t) {
        const skerry_tile &tile = list.tiles[t];
        if (!in_tiers(tile, tiers)) continue;
        if (count < capacity) {
            const uint8_t *bytes = cache->pool.data(tile.place);
            skerry_part &part = parts[count];
            part.keys = bytes;
            part.values = bytes + tile_value_offset(layer, tile);
            part.position = tile.first;
            part.tokens = tile.count;
            part.capacity = tile.capacity;
            part.tier = tile.tier;
            part.key_format = tile.key_format;
            part.value_format = tile.value_format;
            part.window = part_window(cache, step->seqs[static_cast<size_t>(seq_index)].seq, tile);
        }
        ++count;
    }
    *needed = count;
    return count > capacity ? SKERRY_INCOMPLETE : SKERRY_OK;
}

Status step_gather(skerry_step *step, const skerry_gather_desc &desc, int32_t *tokens, skerry_error *error) {
    skerry_cache *cache = step->cache;
    Lock lock(cache->step_mutex);
    if (const Status status = check_layer(step, desc.layer, error); status < 0) return status;
    if (const Status status = check_tiles(step, desc.seq_index, error); status < 0) return status;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(desc.layer)];
    Sequence *seq = step->seqs[static_cast<size_t>(desc.seq_index)].seq;
    const Lane &lane = seq->lane(layer.lane + desc.kv_head);
    const RowList list = zoomed_list(cache, step->seqs[static_cast<size_t>(desc.seq_index)], layer, desc.kv_head);
    int32_t total = 0;
    for (uint32_t t = 0; t < list.count; ++t) {
        if (in_tiers(list.tiles[t], desc.tiers)) total += list.tiles[t].count;
    }
    const bool outputs =
        desc.keys != nullptr || desc.values != nullptr || desc.positions != nullptr || desc.bias != nullptr || desc.windows != nullptr;
    const int64_t key_shape[2] = {0, layer.key_dim};
    const int64_t value_shape[2] = {0, layer.value_dim};
    if (desc.keys != nullptr) {
        if (const Status status = check_output(*desc.keys, 2, key_shape, true, 1, "keys", error); status < 0) return status;
    }
    if (desc.values != nullptr) {
        if (const Status status = check_output(*desc.values, 2, value_shape, true, 2, "values", error); status < 0) return status;
    }
    *tokens = total;
    if (!outputs) return SKERRY_OK;
    if ((desc.keys != nullptr && desc.keys->shape[0] < total) || (desc.values != nullptr && desc.values->shape[0] < total))
        return SKERRY_INCOMPLETE;
    // Scratch: rows of one tile, balance parameters, code.
    const int32_t most = coding_tokens(cache->policy());
    float *floats = reinterpret_cast<float *>(cache->scratch.data());
    float *keys = floats;
    float *values = keys + most * layer.key_dim;
    CodeScratch scratch{values + most * layer.value_dim, nullptr, nullptr};
    scratch.balance = scratch.mean + layer.key_dim;
    scratch.code = cache->scratch.data() +
                   round_up(static_cast<size_t>(reinterpret_cast<uint8_t *>(scratch.balance + layer.key_dim) - cache->scratch.data()), 64);
    int32_t row = 0;
    for (uint32_t t = 0; t < list.count; ++t) {
        const skerry_tile &tile = list.tiles[t];
        if (!in_tiers(tile, desc.tiers)) continue;
        decode_tile(cache, seq, layer.source, lane, tile, desc.keys != nullptr ? keys : nullptr, desc.values != nullptr ? values : nullptr,
                    scratch);
        for (int32_t k = 0; k < tile.count; ++k, ++row) {
            if (desc.keys != nullptr) write_row(tensor_rows(*desc.keys), row, 0, layer.key_dim, keys + k * layer.key_dim);
            if (desc.values != nullptr) write_row(tensor_rows(*desc.values), row, 0, layer.value_dim, values + k * layer.value_dim);
            if (desc.positions != nullptr) desc.positions[row] = zoom_position(cache, seq, tile, k);
            if (desc.bias != nullptr) desc.bias[row] = 0;
            if (desc.windows != nullptr) desc.windows[row] = part_window(cache, seq, tile);
        }
    }
    return SKERRY_OK;
}

} // namespace skerry
