#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "step/memory.hpp"
#include "step/zoom.hpp"

namespace skerry {

namespace {

// Tiles in full precision that hold positions [begin, end): visit(first position, capacity, first of its slot, sinks).
template <class Visit>
void for_each_tile(const PolicyConfig &p, int64_t begin, int64_t end, Visit &&visit) {
    int64_t position = begin;
    while (position < end) {
        const bool sink = position < p.sinks;
        const int64_t start = sink ? 0 : p.sinks + (position - p.sinks) / p.window * p.window;
        const int32_t size = sink ? p.sinks : p.window;
        const int32_t capacity = std::min(size, r_tile_tokens);
        const int64_t index = (position - start) / capacity;
        const int64_t first = start + index * capacity;
        visit(first, capacity, index == 0, sink);
        position = std::min<int64_t>(first + capacity, start + size);
    }
}

Status wrong(skerry_error *error, uint32_t subject, int32_t index, int64_t found, int64_t allowed, const char *what) {
    return fail(error, SKERRY_ERROR_ARGUMENT, subject, index, found, allowed, "%s: %lld, allowed %lld", what, static_cast<long long>(found),
                static_cast<long long>(allowed));
}

bool collects_prompt(const skerry_step *step, const Sequence *seq) {
    const PolicyConfig &p = step->cache->policy();
    if (seq->is_memory()) return false;
    return p.prefill == SKERRY_PREFILL_WHOLE && (seq->prompt_length < 0 || seq->prefilling || (step->flags & SKERRY_STEP_PREFILL) != 0);
}

// What one sequence's part of a step needs from the pool, per class.
void count_slots(const skerry_cache *cache, const Sequence *seq, int32_t count, Buffer<uint64_t> *needed, uint32_t *tiles) {
    const PolicyConfig &p = cache->policy();
    uint64_t sinks = 0;
    uint64_t windows = 0;
    *tiles = 0;
    if (seq->is_memory()) return;
    for_each_tile(p, seq->length, seq->length + count, [&](int64_t first, int32_t, bool starts_slot, bool sink) {
        if (first < seq->length) return;
        ++*tiles;
        if (starts_slot) ++(sink ? sinks : windows);
    });
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const uint64_t lanes = static_cast<uint64_t>(layer.kv_heads);
        const LayerClasses &c = cache->classes[i];
        if (c.sink >= 0) (*needed)[static_cast<size_t>(c.sink)] += sinks * lanes;
        (*needed)[static_cast<size_t>(c.open)] += windows * lanes;
        if (cache->plan.bounded || !p.routes()) continue;
        // Without a budget the pool grows: every window that is in full precision may become a record at this step's events.
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const uint64_t open = seq->lane(layer.lane + h).open_windows + windows;
            if (c.record >= 0) (*needed)[static_cast<size_t>(c.record)] += open;
            if (c.wide >= 0) (*needed)[static_cast<size_t>(c.wide)] += open;
        }
    }
}

uint64_t lane_open_limit(const skerry_cache *cache, const LaneQuota &q) {
    return static_cast<uint64_t>(q.open_slots() + (cache->policy().has_wide() ? 0 : q.full_windows));
}

uint64_t scratch_for(const skerry_cache *cache, const Buffer<StepSequence> &seqs, const Buffer<uint32_t> &more) {
    uint64_t bytes = 0;
    for (const LayerGeometry &layer : cache->layers) {
        int64_t entries = 1;
        int32_t epochs = 0;
        for (size_t s = 0; s < seqs.size(); ++s) {
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                const Lane &lane = seqs[s].seq->lane(layer.lane + h);
                entries = std::max<int64_t>(entries, lane.reserved + more[s]);
                epochs = std::max(epochs, static_cast<int32_t>(lane.epoch_capacity));
            }
        }
        bytes = std::max(bytes, layer_scratch_bytes(cache->context->device(), cache->policy(), layer, entries, epochs));
    }
    return bytes;
}

} // namespace

void name_layer(skerry_step *step, int32_t layer) {
    uint8_t &state = step->layers[static_cast<size_t>(layer)];
    if ((state & layer_named) != 0) return;
    state |= layer_named;
    if (step->cache->callbacks.before_layer != nullptr) step->cache->callbacks.before_layer(step->cache->callbacks.user, layer);
}

int64_t event_after(const skerry_step *step, const Sequence *seq, int64_t position) {
    const PolicyConfig &p = step->cache->policy();
    if (!p.routes() || collects_prompt(step, seq)) return INT64_MAX;
    if (p.paper()) return position + p.window - (position - seq->prompt_length) % p.window;
    return next_event_after(p, position);
}

Status step_begin(skerry_cache *cache, const skerry_step_desc &desc, skerry_step **out, skerry_error *error) {
    skerry_step *step = &cache->step;
    if (step->open) return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 1, 0, "a step is open on this cache");
    if (desc.seqs == nullptr || desc.token_counts == nullptr || desc.seq_count < 1 || desc.seq_count > cache->plan.info.max_sequences) {
        return wrong(error, SKERRY_SUBJECT_SEQUENCE, -1, desc.seq_count, cache->plan.info.max_sequences,
                     "desc.seq_count (or desc.seqs or desc.token_counts is NULL)");
    }
    const PolicyConfig &p = cache->policy();
    step->flags = desc.flags;
    bool shares = false;
    for (size_t i = 0; i < cache->layers.size(); ++i)
        shares = shares || cache->layers[i].source != static_cast<int32_t>(i);

    step->seqs.clear();
    int64_t rows = 0;
    for (int32_t i = 0; i < desc.seq_count; ++i) {
        Sequence *seq = nullptr;
        if (const Status status = sequence_find(cache, desc.seqs[i], &seq, error, i); status < 0) return status;
        for (const StepSequence &other : step->seqs) {
            if (other.seq == seq) return wrong(error, SKERRY_SUBJECT_SEQUENCE, i, i, 0, "desc.seqs names a sequence twice, second place");
        }
        const int32_t count = desc.token_counts[i];
        const bool prompt = collects_prompt(step, seq);
        const int32_t most =
            prompt ? std::max(cache->plan.info.max_step_tokens, cache->plan.info.staging_tokens) : cache->plan.info.max_step_tokens;
        if (count < 1 || count > most) return wrong(error, SKERRY_SUBJECT_TOKENS, i, count, most, "desc.token_counts[]");
        if (desc.positions != nullptr && desc.positions[i] != seq->length) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_POSITION, i, desc.positions[i], seq->length,
                        "desc.positions[%d] is %lld, but the sequence holds %lld tokens", i, static_cast<long long>(desc.positions[i]),
                        static_cast<long long>(seq->length));
        }
        if (seq->length + count > limits::max_position) {
            return wrong(error, SKERRY_SUBJECT_POSITION, i, seq->length + count, limits::max_position, "length of the sequence");
        }
        const int64_t event = event_after(step, seq, seq->length);
        if (p.spans && event < seq->length + count) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, i, count, event - seq->length,
                        "with spans by surprisal a step behind the prompt may not cross a routing event: at most %lld tokens now",
                        static_cast<long long>(event - seq->length));
        }
        if (shares && event < seq->length + count) {
            // A layer that reads another one's cache would see it after the moves of positions that it has not attended from yet.
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, i, count, event - seq->length,
                        "with shared layers a step may not cross a routing event: at most %lld tokens now",
                        static_cast<long long>(event - seq->length));
        }
        step->seqs.push_back(StepSequence{seq, seq->length, count, static_cast<int32_t>(rows)});
        rows += count;
    }
    step->rows = static_cast<int32_t>(rows);

    Buffer<uint64_t> &needed = step->needed;
    Buffer<uint32_t> &more = step->more;
    std::fill(needed.begin(), needed.end(), uint64_t{0});
    for (size_t s = 0; s < step->seqs.size(); ++s) {
        const StepSequence &part = step->seqs[s];
        count_slots(cache, part.seq, part.count, &needed, &more[s]);
        if (!cache->plan.bounded || part.seq->is_memory()) continue;
        uint32_t windows = 0;
        for_each_tile(p, part.base, part.base + part.count,
                      [&](int64_t first, int32_t, bool starts, bool sink) { windows += first >= part.base && starts && !sink ? 1 : 0; });
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            const uint64_t limit = lane_open_limit(cache, cache->quotas[i]);
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                const Lane &lane = part.seq->lane(layer.lane + h);
                if (lane.open_windows + windows > limit || lane.reserved + more[s] > lane.capacity) {
                    return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, static_cast<int32_t>(s),
                                static_cast<int64_t>(lane.open_windows + windows), static_cast<int64_t>(limit),
                                "layer %zu: this step needs %u windows in full precision, the budget and staging_tokens hold %llu", i,
                                lane.open_windows + windows, static_cast<unsigned long long>(limit));
                }
            }
        }
    }
    std::fill(step->wanted.begin(), step->wanted.end(), uint64_t{0});
    for (size_t k = 0; k < needed.size(); ++k) {
        const int32_t slot_class = static_cast<int32_t>(k);
        const uint64_t available = cache->pool.available(slot_class);
        if (needed[k] <= available) continue;
        if (cache->plan.bounded) {
            return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1,
                        static_cast<int64_t>(needed[k] * cache->pool.slot_bytes(slot_class)),
                        static_cast<int64_t>(available * cache->pool.slot_bytes(slot_class)),
                        "this step needs %llu more slots of %u bytes, %llu are free", static_cast<unsigned long long>(needed[k]),
                        cache->pool.slot_bytes(slot_class), static_cast<unsigned long long>(available));
        }
        step->wanted[k] = needed[k] - available + cache->pool.slots(slot_class) / 4;
    }
    if (cache->callbacks.transitions != nullptr) {
        size_t most = 0;
        for (const StepSequence &part : step->seqs) {
            for (const Lane &lane : part.seq->tables.lanes) {
                most += (lane.capacity + 1) * static_cast<size_t>(2 + part.count / std::max(p.period, 1));
            }
        }
        step->transitions.reserve(std::min<size_t>(most, size_t{1} << 22));
    }
    if (!cache->plan.bounded) {
        Vector<TablesAndSequence> tables(CountedAllocator<TablesAndSequence>(cache->allocator, Owner::step));
        tables.reserve(step->seqs.size());
        for (size_t s = 0; s < step->seqs.size(); ++s) {
            NewTables larger(cache->allocator);
            if (sequence_reserve(cache, step->seqs[s].seq, more[s], &larger))
                tables.push_back(TablesAndSequence{step->seqs[s].seq, std::move(larger)});
        }
        Buffer<uint8_t> scratch(cache->allocator, Owner::scratch, 64);
        const uint64_t bytes = scratch_for(cache, step->seqs, more);
        if (bytes > cache->scratch.size()) scratch.resize(bytes + bytes / 4);
        cache->pool.grow(step->wanted.span());
        if (!scratch.empty()) cache->scratch.swap(scratch);
        for (TablesAndSequence &entry : tables)
            adopt_tables(cache, entry.seq, std::move(entry.tables));
    }
    for (const StepSequence &part : step->seqs)
        memory_reserve(part);
    step->transitions.clear();

    // Nothing below can fail.
    for (const StepSequence &part : step->seqs) {
        Sequence *seq = part.seq;
        std::memcpy(seq->undo.lanes.data(), seq->tables.lanes.data(), seq->tables.lanes.size() * sizeof(Lane));
        std::memcpy(seq->undo_layers.data(), seq->layers.data(), seq->layers.size() * sizeof(LayerState));
        std::memset(seq->saved.data(), 0, seq->saved.size());
        zoom_begin(seq);
        memory_begin(part);
        seq->in_step = true;
        seq->step_surprisal = seq->surprisal;
        if (seq->is_memory()) continue;
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            const LayerClasses &c = cache->classes[i];
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                Lane &lane = seq->lane(layer.lane + h);
                skerry_tile *tiles = seq->tiles(lane);
                for_each_tile(p, part.base, part.base + part.count, [&](int64_t first, int32_t capacity, bool starts, bool sink) {
                    if (first < part.base) return;
                    skerry_tile tile{};
                    tile.first = static_cast<int32_t>(first);
                    tile.capacity = static_cast<uint8_t>(capacity);
                    tile.key_format = tile.value_format = static_cast<uint8_t>(p.store_dtype);
                    tile.tier = SKERRY_TIER_FULL;
                    if (starts) {
                        tile.place = cache->pool.take(sink ? c.sink : c.open);
                        if (!sink) ++lane.open_windows;
                    } else {
                        tile.place = tiles[lane.reserved - 1].place + tile_units(p, layer, tile);
                    }
                    const size_t entry = lane.offset + lane.reserved;
                    tiles[lane.reserved++] = tile;
                    if (p.routes()) {
                        const size_t words = static_cast<size_t>(p.score_words());
                        std::memset(seq->tables.words.data() + entry * words, 0, words * sizeof(int64_t));
                        seq->pending[entry] = 0;
                    }
                    if (p.quantises()) seq->tables.dormant[entry] = no_place;
                    if (p.keeps_exact()) seq->tables.exact[entry] = no_place;
                });
            }
        }
    }
    std::memset(step->layers.data(), 0, step->layers.size());
    std::memset(step->observed.data(), 0, step->observed.size());
    step->counters = skerry_counters{};
    step->open = true;
    ++cache->counters.steps_begun;
    *out = step;
    return SKERRY_OK;
}

Status step_append(skerry_step *step, int32_t index, const skerry_tensor &keys, const skerry_tensor &values, skerry_error *error) {
    skerry_cache *cache = step->cache;
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    const PolicyConfig &p = cache->policy();
    Lock lock(cache->step_mutex);
    uint8_t &state = step->layers[static_cast<size_t>(index)];
    if (layer.source != index) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, index, index, layer.source,
                    "layer %d stores nothing: it reads layer %d", index, layer.source);
    }
    if ((state & layer_appended) != 0) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, index, 2, 1, "layer %d was appended already in this step", index);
    }
    const int64_t key_shape[3] = {step->rows, layer.kv_heads, layer.key_dim};
    const int64_t value_shape[3] = {step->rows, layer.kv_heads, layer.value_dim};
    if (const Status status = check_tensor(keys, 3, key_shape, false, 2, "keys", error); status < 0) return status;
    if (const Status status = check_tensor(values, 3, value_shape, false, 3, "values", error); status < 0) return status;
    const TensorRows key_rows = tensor_rows(keys);
    const TensorRows value_rows = tensor_rows(values);
    int64_t bad_values = 0;
    for (int32_t r = 0; r < step->rows; ++r) {
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const int64_t bad_keys = count_unstorable(key_rows, r, h, layer.key_dim, p.store_dtype);
            const int64_t bad_here = count_unstorable(value_rows, r, h, layer.value_dim, p.store_dtype);
            if (bad_keys + bad_here == 0) continue;
            if (cache->desc.nonfinite == SKERRY_NONFINITE_REFUSE) {
                return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, r, bad_keys + bad_here, 0,
                            "layer %d, token %d, KV head %d: %s are not finite, or too large for the store dtype", index, r, h,
                            bad_keys > 0 ? "keys" : "values");
            }
            bad_values += bad_keys + bad_here;
        }
    }
    name_layer(step, index);

    constexpr int32_t batch = r_tile_tokens;
    // Rows pass through the step's scratch only where they are not plain f32 already.
    float *key_scratch = reinterpret_cast<float *>(cache->scratch.data());
    float *value_scratch = key_scratch + batch * layer.key_dim;
    const auto direct = [&](const TensorRows &rows) {
        return rows.tensor->dtype == SKERRY_DTYPE_F32 && (rows.element_stride == 1) && bad_values == 0 &&
               reinterpret_cast<uintptr_t>(rows.base()) % alignof(float) == 0;
    };
    const bool direct_keys = direct(key_rows);
    const bool direct_values = direct(value_rows);
    const auto clean = [&](float *row, int32_t dim) {
        if (bad_values != 0) zero_unstorable(row, dim, p.store_dtype);
    };
    for (const StepSequence &part : step->seqs) {
        if (part.seq->is_memory()) continue; // sekv.md 5: keys and values of generated tokens are dropped
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            Lane &lane = part.seq->lane(layer.lane + h);
            skerry_tile *tiles = part.seq->tiles(lane);
            uint32_t t = lane.tiles;
            if (t > 0) --t; // the last visible tile may have room
            int64_t position = part.base;
            const int64_t end = part.base + part.count;
            while (position < end) {
                while (position >= tiles[t].first + tiles[t].capacity || (t + 1 < lane.reserved && position >= tiles[t + 1].first)) {
                    ++t;
                }
                skerry_tile &tile = tiles[t];
                const int64_t limit = t + 1 < lane.reserved ? tiles[t + 1].first : tile.first + tile.capacity;
                const int32_t count = static_cast<int32_t>(std::min({end, limit, position + batch}) - position);
                const int64_t row = part.row + (position - part.base);
                uint8_t *key_part = cache->pool.data(tile.place);
                uint8_t *value_part = key_part + value_offset(tile.key_format, layer.key_dim, tile.capacity);
                const int32_t at = static_cast<int32_t>(position - tile.first);
                const float *key_data = key_scratch;
                const float *value_data = value_scratch;
                int64_t key_stride = layer.key_dim;
                int64_t value_stride = layer.value_dim;
                if (direct_keys) {
                    key_data = reinterpret_cast<const float *>(key_rows.base()) + row * key_rows.row_stride + h * key_rows.head_stride;
                    key_stride = key_rows.row_stride;
                } else {
                    for (int32_t k = 0; k < count; ++k) {
                        read_row(key_rows, row + k, h, layer.key_dim, key_scratch + k * layer.key_dim);
                        clean(key_scratch + k * layer.key_dim, layer.key_dim);
                    }
                }
                if (direct_values) {
                    value_data =
                        reinterpret_cast<const float *>(value_rows.base()) + row * value_rows.row_stride + h * value_rows.head_stride;
                    value_stride = value_rows.row_stride;
                } else {
                    for (int32_t k = 0; k < count; ++k) {
                        read_row(value_rows, row + k, h, layer.value_dim, value_scratch + k * layer.value_dim);
                        clean(value_scratch + k * layer.value_dim, layer.value_dim);
                    }
                }
                cache->kernels().append(tile.key_format, SKERRY_SIDE_KEY, layer.key_dim, tile.capacity, at, count, key_data, key_stride,
                                        key_part);
                cache->kernels().append(tile.value_format, SKERRY_SIDE_VALUE, layer.value_dim, tile.capacity, at, count, value_data,
                                        value_stride, value_part);
                tile.count = static_cast<uint8_t>(at + count);
                position += count;
            }
            lane.tiles = lane.reserved;
        }
    }
    step->counters.nonfinite_values += static_cast<uint64_t>(bad_values);
    state |= layer_appended;
    return SKERRY_OK;
}

namespace {

// In PREFILL_SPLIT mode and for sliding windows of caches without routing: windows that no later query can see are let go.
void drop_unseen(skerry_cache *cache, Sequence *seq, int32_t index, int64_t length) {
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    const PolicyConfig &p = cache->policy();
    if (layer.sliding_window == 0 || p.routes()) return;
    for (int32_t h = 0; h < layer.kv_heads; ++h) {
        Lane &lane = seq->lane(layer.lane + h);
        skerry_tile *tiles = seq->tiles(lane);
        uint32_t begin = 0;
        while (begin < lane.tiles && tiles[begin].first < p.sinks)
            ++begin;
        uint32_t end = begin;
        while (end < lane.tiles) {
            const WindowSpan span = window_at(p, tiles, end, lane.tiles);
            const int64_t last = p.sinks + static_cast<int64_t>(span.window + 1) * p.window - 1;
            if (last > length - layer.sliding_window) break;
            cache->pool.release(tiles[end].place);
            --lane.open_windows;
            ++cache->step.counters.evictions;
            end = span.end;
        }
        seq->layers[static_cast<size_t>(index)].let_go = std::max(seq->layers[static_cast<size_t>(index)].let_go, length);
        if (end == begin) continue;
        std::memmove(tiles + begin, tiles + end, (lane.tiles - end) * sizeof(skerry_tile));
        lane.tiles -= end - begin;
        lane.reserved = lane.tiles;
    }
}

void finish_sequence(skerry_step *step, const StepSequence &part) {
    skerry_cache *cache = step->cache;
    const PolicyConfig &p = cache->policy();
    Sequence *seq = part.seq;
    const int64_t end = part.base + part.count;
    const bool collecting = collects_prompt(step, seq);
    const bool prompt_ends = collecting && (step->flags & SKERRY_STEP_PREFILL) == 0;
    if (p.spans && (prompt_ends || event_after(step, seq, part.base) == end)) spans_advance(cache, seq, end, prompt_ends);
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const int32_t layer = static_cast<int32_t>(i);
        if (cache->layers[i].source != layer) continue;
        if (p.routes()) {
            LayerState &state = seq->layers[i];
            if (prompt_ends) {
                run_event(cache, seq, layer, end);
                state.routed = end;
            } else {
                for (int64_t at = event_after(step, seq, std::max(part.base, state.routed)); at <= end; at = event_after(step, seq, at)) {
                    run_event(cache, seq, layer, at);
                    state.routed = at;
                }
            }
            for (int32_t h = 0; h < cache->layers[i].kv_heads; ++h) {
                Lane &lane = seq->lane(cache->layers[i].lane + h);
                lane_fold(cache, seq, lane);
                lane_enter_period(cache, seq, lane, period_of_query(p, end));
            }
        } else {
            drop_unseen(cache, seq, layer, end);
        }
        if ((seq->saved[i] & saved_tiles) != 0) {
            for (int32_t h = 0; h < cache->layers[i].kv_heads; ++h) {
                Lane &kept = seq->undo.lanes[static_cast<size_t>(cache->layers[i].lane + h)];
                kept.reserved = kept.tiles;
                lane_release(cache, seq->undo, kept);
            }
        }
    }
    if (seq->paper) memory_commit(cache, seq);
    seq->length = end;
    seq->surprisal = seq->step_surprisal;
    if (collecting) {
        seq->prefilling = !prompt_ends;
        if (prompt_ends) seq->prompt_length = end;
    }
    seq->in_step = false;
}

} // namespace

void add_counters(skerry_counters *to, const skerry_counters &from) {
    to->tokens_appended += from.tokens_appended;
    to->events += from.events;
    to->demotions += from.demotions;
    to->demotions_written += from.demotions_written;
    to->demotions_ledger += from.demotions_ledger;
    to->promotions += from.promotions;
    to->promotions_exact += from.promotions_exact;
    to->promotions_recovered += from.promotions_recovered;
    to->evictions += from.evictions;
    to->record_bytes_written += from.record_bytes_written;
    to->attended_bytes += from.attended_bytes;
    to->nonfinite_values += from.nonfinite_values;
    to->details_written += from.details_written;
    to->detail_bytes_written += from.detail_bytes_written;
    to->details_refused += from.details_refused;
    to->zooms += from.zooms;
    to->zooms_present += from.zooms_present;
    to->zooms_fetched += from.zooms_fetched;
    to->zooms_late += from.zooms_late;
    to->prefetches += from.prefetches;
    to->fetched_bytes += from.fetched_bytes;
}

Status step_surprisal(skerry_step *step, int32_t seq_index, const float *nats, skerry_error *error) {
    const StepSequence &part = step->seqs[static_cast<size_t>(seq_index)];
    Sequence *seq = part.seq;
    if (seq->step_surprisal.count != seq->surprisal.count) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_SEQUENCE, seq_index, 2, 1, "surprisal was handed over already in this step");
    }
    if (seq->paper) memory_surprisal(part, nats);
    if (seq->zoom && step->cache->policy().spans) spans_add(seq, part.base, nats, part.count);
    for (int32_t i = 0; i < part.count; ++i)
        seq->step_surprisal.add(static_cast<double>(nats[i]));
    return SKERRY_OK;
}

Status step_commit(skerry_step *step, skerry_error *error) {
    skerry_cache *cache = step->cache;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        if (cache->layers[i].source != static_cast<int32_t>(i)) continue;
        if ((step->layers[i] & layer_appended) == 0) {
            return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_LAYER, static_cast<int32_t>(i), 0, 1,
                        "layer %zu was not appended in this step", i);
        }
        if ((step->layers[i] & layer_broken) != 0) {
            return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_PARALLEL_FOR, static_cast<int32_t>(i), 0, 0,
                        "a parallel loop failed in layer %zu: the step can only be aborted", i);
        }
    }
    for (size_t s = 0; cache->policy().spans && s < step->seqs.size(); ++s) {
        const StepSequence &part = step->seqs[s];
        if (spans_known(cache, part.seq, part.base + part.count)) continue;
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_SEQUENCE, static_cast<int32_t>(s), part.base, 0,
                    "spans are cut by surprisal: skerry_step_surprisal comes before the commit");
    }
    if (const Status status = memory_build(step, error); status < 0) return status;
    for (const StepSequence &part : step->seqs) {
        finish_sequence(step, part);
        step->counters.tokens_appended += static_cast<uint64_t>(part.count);
    }
    step->open = false;
    add_counters(&cache->counters, step->counters);
    ++cache->counters.steps_committed;
    const skerry_callbacks_desc &calls = cache->callbacks;
    if (calls.transitions != nullptr && !step->transitions.empty()) {
        // Lanes of one event run in parallel: put their moves into one order.
        std::sort(step->transitions.begin(), step->transitions.end(), [](const skerry_transition &a, const skerry_transition &b) {
            if (a.seq.bits != b.seq.bits) return a.seq.bits < b.seq.bits;
            if (a.position != b.position) return a.position < b.position;
            if (a.layer != b.layer) return a.layer < b.layer;
            if (a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
            return a.window < b.window;
        });
        calls.transitions(calls.user, step->transitions.data(), static_cast<int32_t>(step->transitions.size()));
    }
    if (calls.committed != nullptr) {
        for (const StepSequence &part : step->seqs)
            calls.committed(calls.user, skerry_seq{part.seq->id}, part.seq->length);
    }
    return SKERRY_OK;
}

void step_abort(skerry_step *step) {
    skerry_cache *cache = step->cache;
    const PolicyConfig &p = cache->policy();
    for (const StepSequence &part : step->seqs) {
        Sequence *seq = part.seq;
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            const bool saved = (seq->saved[i] & saved_tiles) != 0;
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                const size_t index = static_cast<size_t>(layer.lane + h);
                Lane &lane = seq->tables.lanes[index];
                const Lane &kept = seq->undo.lanes[index];
                if (p.routes()) {
                    std::memset(seq->pending.data() + lane.offset, 0, std::max(lane.reserved, kept.tiles) * sizeof(int64_t));
                }
                if (saved) {
                    lane_release(cache, seq->tables, lane);
                    const size_t words = static_cast<size_t>(p.score_words());
                    const uint32_t at = lane.offset;
                    std::memcpy(seq->tables.tiles.data() + at, seq->undo.tiles.data() + at, kept.tiles * sizeof(skerry_tile));
                    std::memcpy(seq->tables.words.data() + at * words, seq->undo.words.data() + at * words,
                                kept.tiles * words * sizeof(int64_t));
                    if (p.uses_epochs()) {
                        std::memcpy(seq->tables.epochs.data() + lane.epoch_offset, seq->undo.epochs.data() + lane.epoch_offset,
                                    kept.epochs * epoch_table_bytes(layer));
                    }
                    if (p.quantises())
                        std::memcpy(seq->tables.dormant.data() + at, seq->undo.dormant.data() + at, kept.tiles * sizeof(uint32_t));
                    if (p.keeps_exact())
                        std::memcpy(seq->tables.exact.data() + at, seq->undo.exact.data() + at, kept.tiles * sizeof(uint32_t));
                } else {
                    skerry_tile *tiles = seq->tiles(lane);
                    for (uint32_t t = kept.tiles; t < lane.reserved;) {
                        const WindowSpan span = window_at(p, tiles, t, lane.reserved);
                        // A window that began before the step keeps its slot.
                        const bool began_before =
                            t > 0 && !is_alone(tiles[t - 1]) && window_of_position(p, tiles[t - 1].first) == span.window;
                        if (!began_before) cache->pool.release(tiles[t].place);
                        t = span.end;
                    }
                    if (kept.tiles > 0) {
                        skerry_tile &last = tiles[kept.tiles - 1];
                        last.count = static_cast<uint8_t>(std::min<int64_t>(last.count, part.base - last.first));
                    }
                }
                lane = kept;
                lane.reserved = lane.tiles;
            }
            if ((seq->saved[i] & saved_queries) != 0) {
                const Lane &first = seq->tables.lanes[static_cast<size_t>(layer.lane)];
                std::memcpy(seq->tables.query_squares.data() + first.query_offset, seq->undo.query_squares.data() + first.query_offset,
                            static_cast<size_t>(layer.kv_heads) * static_cast<size_t>(layer.key_dim) * sizeof(float));
            }
        }
        std::memcpy(seq->layers.data(), seq->undo_layers.data(), seq->layers.size() * sizeof(LayerState));
        zoom_abort(cache, seq);
        seq->in_step = false;
    }
    step->open = false;
    step->transitions.clear();
    ++cache->counters.steps_aborted;
}

} // namespace skerry
