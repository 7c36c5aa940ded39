// Reading windows back from the host: their detail and router keys, the choice of each query, the slots that fetched windows lie in, and
// the list that a query attends to.

#include "step/zoom.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/hash.hpp"
#include "codec/epoch.hpp"
#include "codec/router_key.hpp"

namespace skerry {

namespace {

size_t key_bytes(const PolicyConfig &p, const LayerGeometry &layer) { return router_key_bytes(route_params(p, layer)); }
size_t key_vectors(const PolicyConfig &p) { return static_cast<size_t>(p.router != nullptr ? p.router->centroids : router_centroids); }

uint8_t *router_keys(ZoomTables &tables, const LaneZoom &zoom) { return tables.keys.data() + zoom.key_offset; }
uint8_t *router_counts(const PolicyConfig &p, ZoomTables &tables, const LaneZoom &zoom, uint32_t window = 0) {
    return tables.counts.data() + (zoom.window_offset + window) * key_vectors(p);
}
const uint8_t *router_balance(const ZoomTables &tables, const LaneZoom &zoom) { return tables.balance.data() + zoom.balance_offset; }

// Empties a slot; a copy on its way is taken back or waited for.
void empty_slot(skerry_cache *cache, ZoomSlot &slot) {
    if (slot.seq == nullptr) return;
    cache->context->transfers.cancel(&slot.state);
    ZoomTables &tables = *slot.seq->zoom;
    tables.entries(tables.lane(slot.lane))[slot.window].slot = no_slot;
    slot.seq = nullptr;
    slot.window = -1;
}

// Units of the arena that an entry's detail takes.
uint32_t detail_units(const skerry_cache *cache, const LayerGeometry &layer, const HostEntry &entry) {
    return static_cast<uint32_t>(detail_bytes(cache->policy(), layer, entry) / place_bytes);
}

// Windows from `first` on lose their detail and their router keys.
void cut_windows(skerry_cache *cache, const LayerGeometry &layer, ZoomTables &tables, LaneZoom &zoom, uint32_t first) {
    HostEntry *entries = tables.entries(zoom);
    // From the end: copies to the slot of an entry may read the record of one before it.
    for (uint32_t w = zoom.windows; w-- > first;) {
        if (entries[w].slot != no_slot) empty_slot(cache, cache->zoom_slots[entries[w].slot]);
        if (entries[w].place == no_place) continue;
        const uint32_t units = detail_units(cache, layer, entries[w]);
        cache->host.release(entries[w].place, units);
        zoom.host_units -= units;
    }
    zoom.windows = std::min(zoom.windows, first);
}

// visit(layer, zoom, index of the lane) for every lane that stores.
template <class Visit>
void for_each_lane(const skerry_cache *cache, ZoomTables &tables, Visit &&visit) {
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h)
            visit(layer, tables.lane(layer.lane + h), static_cast<size_t>(layer.lane + h));
    }
}

} // namespace

namespace {

// Slots that one sequence keeps.
size_t kept_slots(const skerry_cache *cache) {
    size_t slots = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        if (cache->layers[i].source == static_cast<int32_t>(i))
            slots += static_cast<size_t>(cache->quotas[i].zoom_slots) * static_cast<size_t>(cache->layers[i].kv_heads);
    }
    return slots;
}

} // namespace

void zoom_make(skerry_cache *cache, Sequence *seq) {
    const PolicyConfig &p = cache->policy();
    seq->zoom = make_owned<ZoomTables>(cache->allocator, Owner::tables, cache->allocator);
    ZoomTables &t = *seq->zoom;
    const auto size = [](auto &buffer, size_t count) {
        buffer.reserve(count);
        buffer.resize(count);
    };
    size(t.lanes, static_cast<size_t>(cache->lanes));
    size(t.undo_lanes, static_cast<size_t>(cache->lanes));
    // Slots that lanes keep lie behind the staged ones, a sequence's side by side.
    size_t kept = static_cast<size_t>(cache->plan.staged_slots) + cache->zoom_sequences * kept_slots(cache);
    size_t keys = 0, windows = 0, balance = 0, selected = 0, spans = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        const LaneQuota &q = cache->quotas[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            LaneZoom &zoom = t.lane(layer.lane + h);
            zoom = LaneZoom{};
            if (q.host_windows == 0) continue;
            zoom.key_offset = keys;
            zoom.window_offset = windows;
            zoom.balance_offset = balance;
            zoom.select_offset = selected;
            zoom.capacity = static_cast<uint32_t>(q.host_windows);
            zoom.select_capacity = static_cast<uint32_t>(q.fetch_windows);
            zoom.kept = static_cast<uint32_t>(kept);
            kept += static_cast<size_t>(q.zoom_slots);
            keys += zoom.capacity * key_bytes(p, layer);
            windows += zoom.capacity;
            balance += router_balance_bytes(p, layer);
            selected += 2 * size_t{zoom.select_capacity};
            spans = std::max<size_t>(spans, zoom.capacity);
        }
    }
    size(t.keys, keys);
    size(t.counts, windows * key_vectors(p));
    size(t.balance, balance);
    size(t.selected, selected);
    size(t.undo_selected, selected);
    size(t.host, windows);
    if (cache->policy().spans) {
        size(t.spans, spans);
        size(t.nats, static_cast<size_t>(open_surprisals(cache->plan)));
        t.segments.next = t.segments.begin = t.decided = cache->policy().sinks;
    }
    ++cache->zoom_sequences; // nothing fails any more
}

void zoom_begin(Sequence *seq) {
    if (!seq->zoom) return;
    ZoomTables &t = *seq->zoom;
    std::memcpy(t.undo_lanes.data(), t.lanes.data(), t.lanes.size() * sizeof(LaneZoom));
    if (!t.selected.empty()) std::memcpy(t.undo_selected.data(), t.selected.data(), t.selected.size() * sizeof(int32_t));
    t.undo_nats_count = t.nats_count;
}

void zoom_abort(skerry_cache *cache, Sequence *seq) {
    if (!seq->zoom) return;
    ZoomTables &t = *seq->zoom;
    for_each_lane(cache, t, [&](const LayerGeometry &layer, LaneZoom &zoom, size_t lane) {
        if (zoom.windows > t.undo_lanes[lane].windows) cut_windows(cache, layer, t, zoom, t.undo_lanes[lane].windows);
    });
    t.nats_count = t.undo_nats_count;
    std::memcpy(t.lanes.data(), t.undo_lanes.data(), t.lanes.size() * sizeof(LaneZoom));
    if (!t.selected.empty()) std::memcpy(t.selected.data(), t.undo_selected.data(), t.selected.size() * sizeof(int32_t));
}

void zoom_clear(skerry_cache *cache, Sequence *seq) {
    if (!seq->zoom) return;
    ZoomTables &t = *seq->zoom;
    for_each_lane(cache, t, [&](const LayerGeometry &layer, LaneZoom &zoom, size_t) {
        cut_windows(cache, layer, t, zoom, 0);
        zoom.position = -1;
        zoom.current = zoom.previous = zoom.frozen = zoom.borrowed = 0;
    });
    t.segments = SegmentState{};
    t.segments.next = t.segments.begin = t.decided = cache->policy().sinks;
    t.span_count = t.nats_count = t.anchors = 0;
}

void zoom_truncate(skerry_cache *cache, Sequence *seq, int64_t length) {
    if (!seq->zoom) return;
    const PolicyConfig &p = cache->policy();
    ZoomTables &t = *seq->zoom;
    // Spans end where everything is still exact, or before.
    const uint32_t windows = p.spans ? t.span_count : length <= p.sinks ? 0 : static_cast<uint32_t>((length - p.sinks) / p.window);
    for_each_lane(cache, t, [&](const LayerGeometry &layer, LaneZoom &zoom, size_t) {
        if (zoom.windows > windows) cut_windows(cache, layer, t, zoom, windows);
        if (zoom.position < length) return; // a fork at its parent's length goes on as that would
        zoom.position = length - 1;
        zoom.current = zoom.previous = zoom.borrowed = 0;
    });
    if (p.spans) t.nats_count = static_cast<uint32_t>(std::clamp<int64_t>(length - t.segments.next, 0, t.nats_count));
}

void zoom_fork(skerry_cache *cache, const Sequence *parent, Sequence *child) {
    if (!parent->zoom) return;
    const ZoomTables &from = *parent->zoom;
    ZoomTables &to = *child->zoom;
    for (size_t i = 0; i < to.lanes.size(); ++i) {
        const uint32_t kept = to.lanes[i].kept;
        to.lanes[i] = from.lanes[i];
        to.lanes[i].kept = kept;
    }
    const auto copy = [](auto &into, const auto &of) {
        if (!of.empty()) std::memcpy(into.data(), of.data(), of.size() * sizeof(of[0]));
    };
    copy(to.keys, from.keys);
    copy(to.counts, from.counts);
    copy(to.balance, from.balance);
    copy(to.selected, from.selected);
    copy(to.host, from.host);
    copy(to.spans, from.spans);
    copy(to.nats, from.nats);
    to.segments = from.segments;
    to.decided = from.decided;
    to.span_count = from.span_count;
    to.nats_count = from.nats_count;
    to.anchors = from.anchors;
    for (const LaneZoom &zoom : to.lanes) {
        HostEntry *entries = to.entries(zoom);
        for (uint32_t w = 0; w < zoom.windows; ++w) {
            entries[w].slot = no_slot;
            if (entries[w].place != no_place) cache->host.retain(entries[w].place);
        }
    }
}

int64_t zoom_window_count(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer) {
    if (!cache->policy().zooms(layer)) return 0;
    return seq->zoom->lane(layer.lane).windows;
}

uint32_t zoom_list(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, const Lane &lane, const LaneZoom &zoom,
                   const int32_t *chosen, int32_t count, skerry_tile *tiles, int32_t *origins) {
    const PolicyConfig &p = cache->policy();
    const ZoomTables &tables = *seq->zoom;
    const skerry_tile *own = seq->tiles(lane);
    uint32_t n = 0;
    uint32_t t = 0;
    for (int32_t c = 0; c < count; ++c) {
        const HostEntry &entry = tables.entries(zoom)[chosen[c]];
        if (entry.slot == no_slot) continue;
        const ZoomSlot &slot = cache->zoom_slots[entry.slot];
        if (!Transfers::arrived(&slot.state)) continue;
        const ZoomUnit unit = zoom_unit(cache, seq, chosen[c]);
        const int32_t first = static_cast<int32_t>(unit.begin);
        const int32_t capacity = detail_capacity(p, entry);
        const uint32_t units = static_cast<uint32_t>(detail_tile_bytes(p, layer, entry) / place_bytes);
        for (; t < lane.tiles && own[t].first < first; ++t, ++n) {
            tiles[n] = own[t];
            origins[n] = static_cast<int32_t>(t);
        }
        // What the device holds of the window makes way; the mass stays its own.
        const bool resident = !p.spans && t < lane.tiles && own[t].first < unit.end;
        for (int32_t done = 0; done < unit.rows; done += capacity, ++n) {
            skerry_tile tile{};
            tile.place = slot.place + units * static_cast<uint32_t>(done / capacity);
            tile.first = first + done;
            tile.count = static_cast<uint8_t>(std::min(capacity, unit.rows - done));
            tile.capacity = static_cast<uint8_t>(capacity);
            tile.key_format = entry.key_format;
            tile.value_format = entry.value_format;
            tile.epoch = entry.epoch;
            tile.tier = SKERRY_TIER_HOST;
            tile.flags = p.spans ? tile_alone : 0;
            tiles[n] = tile;
            origins[n] = resident ? static_cast<int32_t>(t) : -1;
        }
        while (!p.spans && t < lane.tiles && own[t].first < unit.end)
            ++t;
    }
    for (; t < lane.tiles; ++t, ++n) {
        tiles[n] = own[t];
        origins[n] = static_cast<int32_t>(t);
    }
    return n;
}

namespace {

// Slots for windows that have none, which their entries then name: first those that the lane keeps and does not want now, then staged ones
// that no look since `serial` wants. Every KV head has staged slots of its own, so heads need no lock.
void assign_slots(skerry_cache *cache, Sequence *seq, int32_t lane, int32_t head, const int32_t *windows, int32_t count, uint64_t serial,
                  uint64_t wanted, bool waits, uint32_t kept) {
    const LaneZoom &zoom = seq->zoom->lane(lane);
    HostEntry *entries = seq->zoom->entries(zoom);
    Transfers &transfers = cache->context->transfers;
    int32_t c = 0;
    const auto fill = [&](size_t first, size_t slots) {
        for (size_t k = first; k < first + slots; ++k) {
            while (c < count && entries[windows[c]].slot != no_slot)
                ++c;
            if (c == count) return;
            ZoomSlot &slot = cache->zoom_slots[k];
            if (slot.serial >= serial) continue;
            if (slot.seq != nullptr && !waits && !transfers.give_up(&slot.state)) continue; // a copy into it is being made
            empty_slot(cache, slot);
            slot = ZoomSlot{seq, wanted, slot.place, windows[c], lane, 0};
            entries[windows[c]].slot = static_cast<uint16_t>(k);
        }
    };
    const size_t staged = static_cast<size_t>(cache->plan.staged_slots / cache->zoom_heads);
    fill(zoom.kept, kept);
    fill(static_cast<size_t>(head) * staged, staged);
}

// Brings the chosen windows to the device. `missing` has room for `count` numbers.
void fetch(skerry_cache *cache, const LayerGeometry &layer, Sequence *seq, int32_t head, const int32_t *chosen, int32_t count,
           uint64_t serial, int32_t *missing, skerry_counters *counters) {
    const PolicyConfig &p = cache->policy();
    Transfers &transfers = cache->context->transfers;
    const int32_t lane = layer.lane + head;
    HostEntry *entries = seq->zoom->entries(seq->zoom->lane(lane));
    const bool waits = p.miss == SKERRY_ZOOM_WAIT;
    int32_t misses = 0;
    for (int32_t c = 0; c < count; ++c) {
        const uint16_t slot = entries[chosen[c]].slot;
        if (slot == no_slot) {
            missing[misses++] = chosen[c];
        } else {
            cache->zoom_slots[slot].serial = serial;
        }
    }
    assign_slots(cache, seq, lane, head, missing, misses, serial, serial, waits,
                 static_cast<uint32_t>(cache->quotas[static_cast<size_t>(layer.source)].zoom_slots));
    counters->zooms += static_cast<uint64_t>(count);
    for (int32_t c = 0, m = 0; c < count; ++c) {
        const HostEntry &entry = entries[chosen[c]];
        const bool present = m == misses || missing[m] != chosen[c];
        if (!present) ++m;
        if (entry.slot == no_slot) {
            ++counters->zooms_late;
            continue;
        }
        ZoomSlot &slot = cache->zoom_slots[entry.slot];
        if (present) {
            if (waits) transfers.wait(&slot.state);
            ++(waits || Transfers::arrived(&slot.state) ? counters->zooms_present : counters->zooms_late);
            continue;
        }
        const Pieces from = detail_pieces(cache, layer, &entry);
        uint8_t *to = cache->pool.data(slot.place);
        const bool later = !waits && transfers.has_threads();
        if (later && !transfers.submit(from, to, &slot.state)) {
            empty_slot(cache, slot);
            ++counters->zooms_late;
            continue;
        }
        if (!later) transfers.copy(from, to);
        counters->fetched_bytes += from.bytes();
        ++(later ? counters->zooms_late : counters->zooms_fetched);
    }
}

// Queries as a trained router compares them, [group][rank], then their biases, [group].
void project_queries(const RouterWeights &router, int32_t layer, int32_t first_head, int32_t group, const float *queries, float *out) {
    const int32_t rank = router.summary_dim;
    for (int32_t g = 0; g < group; ++g) {
        float *row = out + g * rank;
        project(router.query_matrix(layer, first_head + g), queries + g * router.key_dim, rank, router.key_dim, row);
        const float temperature = router.temperature_of(layer, first_head + g);
        for (int32_t i = 0; i < rank; ++i)
            row[i] *= temperature;
        out[group * rank + g] = router.bias_of(layer, first_head + g);
    }
}

// Router key of a trained router. All sets share their clusters, as they share the counts: tokens are compared in all projections at once.
void project_key(const RouterWeights &router, const LayerGeometry &layer, int32_t head, const DetailRows &tokens, float *scratch,
                 uint8_t *key, uint8_t *counts) {
    const int32_t rank = router.summary_dim, sets = router.sets(), vectors = router.centroids;
    const ptrdiff_t width = ptrdiff_t{sets} * rank;
    const auto project_token = [&](const float *token, float *row) {
        for (int32_t s = 0; s < sets; ++s)
            project(router.key_matrix(layer.source, head * layer.group + s), token, rank, layer.key_dim, row + s * rank);
    };
    float *pooled = scratch; // [vectors][sets][rank]
    float *rows = scratch + vectors * width;
    if (router.pooling == SKERRY_ROUTER_POOLING_MEAN) {
        std::fill_n(rows, layer.key_dim, 0.0f);
        for (int32_t t = 0; t < tokens.count; ++t) {
            for (int32_t c = 0; c < layer.key_dim; ++c)
                rows[c] += tokens.keys[t * layer.key_dim + c];
        }
        for (int32_t c = 0; c < layer.key_dim; ++c)
            rows[c] /= static_cast<float>(tokens.count);
        project_token(rows, pooled);
        counts[0] = static_cast<uint8_t>(tokens.count);
    } else {
        for (int32_t t = 0; t < tokens.count; ++t)
            project_token(tokens.keys + t * layer.key_dim, rows + t * width);
        make_centroids(rows, tokens.count, static_cast<int32_t>(width), pooled, counts, vectors);
    }
    const size_t set_bytes = projected_block_bytes(rank, vectors);
    for (int32_t s = 0; s < sets; ++s) {
        // One set's vectors side by side; the tokens are not needed any more.
        for (int32_t v = 0; v < vectors; ++v) {
            float *vector = rows + v * rank;
            std::copy_n(pooled + v * width + s * rank, rank, vector);
            if (!router.normalise) continue;
            float square = 0;
            for (int32_t i = 0; i < rank; ++i)
                square += vector[i] * vector[i];
            for (int32_t i = 0; i < rank && square > 0; ++i)
                vector[i] /= std::sqrt(square);
        }
        encode_projected(rows, rank, vectors, key + static_cast<size_t>(s) * set_bytes);
    }
}

// Log-sum-exp per query head over the sinks and the windows that no router key stands for.
void exact_lse(const ZoomCall &call, const Lane &lane, uint32_t open_windows_from, float *lse) {
    skerry_cache *cache = call.cache;
    const PolicyConfig &p = cache->policy();
    const skerry_tile *tiles = call.seq->tiles(lane);
    uint32_t sinks = 0;
    while (sinks < lane.tiles && tiles[sinks].first < p.sinks)
        ++sinks;
    uint32_t open = p.spans ? sinks : lane.tiles; // between spans the device holds nothing but exact tokens
    while (!p.spans && open > sinks && window_of_position(p, tiles[open - 1].first) >= static_cast<int32_t>(open_windows_from))
        --open;
    const int32_t group = call.layer->group;
    for (int32_t g = 0; g < group; ++g)
        lse[g] = -INFINITY;
    skerry_attend_params params = *call.params; // the choice does not depend on the tiers that are asked for
    params.tiers = SKERRY_TIERS_FULL;
    const auto add = [&](uint32_t begin, uint32_t end) {
        for (; begin < end; begin += static_cast<uint32_t>(limits::split_tiles)) {
            skerry_attend_task task{};
            task.tiles = tiles;
            task.epochs = call.epochs;
            task.queries = call.queries;
            task.row_positions = &call.position;
            task.tile_begin = static_cast<int32_t>(begin);
            task.tile_end = static_cast<int32_t>(std::min(end, begin + static_cast<uint32_t>(limits::split_tiles)));
            task.rows = 1;
            task.out = call.out;
            task.max = call.max;
            task.sum = call.sum;
            task.scratch = call.task_scratch;
            cache->kernels().attend(&params, &task);
            for (int32_t g = 0; g < group; ++g) {
                if (!(call.sum[g] > 0)) continue;
                const float here = call.max[g] + std::log(call.sum[g]);
                const float most = std::max(lse[g], here);
                lse[g] = most + std::log(std::exp(lse[g] - most) + std::exp(here - most));
            }
        }
    };
    add(0, sinks);
    add(open, lane.tiles);
}

} // namespace

uint32_t zoom_row(const ZoomCall &call, int32_t head, const LaneScratch &offsets, uint8_t *base, skerry_counters *counters) {
    skerry_cache *cache = call.cache;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = *call.layer;
    const int32_t source = layer.source;
    const LaneQuota &quota = cache->quotas[static_cast<size_t>(source)];
    ZoomTables &tables = *call.seq->zoom;
    const Lane &lane = call.seq->lane(layer.lane + head);
    LaneZoom &zoom = tables.lane(layer.lane + head);
    const int32_t windows = static_cast<int32_t>(zoom.windows);
    float *scores = reinterpret_cast<float *>(base + offsets.route);
    float *log_unit = scores + ptrdiff_t{windows} * layer.group;
    float *lse = reinterpret_cast<float *>(base + offsets.lse);
    exact_lse(call, lane, zoom.windows, lse);

    float *with = reinterpret_cast<float *>(base + offsets.router);
    const skerry_route_params params = route_params(p, layer);
    skerry_route_task task{};
    skerry_epoch balance{};
    if (p.router != nullptr) {
        project_queries(*p.router, static_cast<int32_t>(&layer - cache->layers.data()), head * layer.group, layer.group, call.queries,
                        with);
        task.queries = with;
        task.bias = with + layer.group * params.dim;
    } else {
        balance = epoch_decode(router_balance(tables, zoom), layer.key_dim, with, with + layer.key_dim);
        task.balance = &balance;
        task.queries = call.queries;
    }
    task.keys = router_keys(tables, zoom);
    task.counts = router_counts(p, tables, zoom);
    task.scores = scores;
    task.score_stride = windows;
    task.log_unit = log_unit;
    task.scratch = base + offsets.route_scratch;
    task.segments = windows;
    cache->kernels().route(&params, &task);

    ZoomPlace *places = reinterpret_cast<ZoomPlace *>(base + offsets.weights);
    const HostEntry *entries = tables.entries(zoom);
    for (int32_t w = 0; w < windows; ++w)
        places[w] = entries[w].place != no_place ? ZoomPlace::absent : ZoomPlace::barred;
    const skerry_tile *tiles = call.seq->tiles(lane);
    for (uint32_t t = 0; t < lane.tiles && !p.spans; ++t) {
        const int32_t window = window_of_position(p, tiles[t].first);
        if (window >= windows) break;
        if (window < 0) continue;
        if (tiles[t].tier == SKERRY_TIER_FULL) {
            places[window] = ZoomPlace::barred; // its estimate stays part of the normaliser
        } else if (places[window] == ZoomPlace::absent) {
            places[window] = ZoomPlace::resident;
        }
    }

    int32_t *chosen = reinterpret_cast<int32_t *>(base + offsets.chosen);
    int32_t *missing = chosen + quota.fetch_windows;
    ZoomRoute route;
    route.scores = scores;
    route.score_stride = windows;
    route.log_unit = log_unit;
    route.device_lse = lse;
    route.places = places;
    const bool later = zoom.position < call.position;
    const bool at_current = later && zoom.borrowed == 0;
    route.previous = at_current ? tables.current(zoom) : tables.previous(zoom);
    // Not for a layer that shares the cache: its source is at the step's last position already, whichever that is.
    const bool own = &layer == &cache->layers[static_cast<size_t>(source)];
    route.previous_count = static_cast<int32_t>(!own ? 0 : at_current ? zoom.current : zoom.previous);
    route.segments = windows;
    route.group = layer.group;
    route.slots = std::min(quota.fetch_windows, static_cast<int32_t>(p.windows_read(windows)));
    route.hysteresis_ppm = p.zoom_hysteresis_ppm;
    route.resident_ppm = p.refine_ppm;
    const ZoomChoice choice = route_zoom(route, chosen, base + offsets.selection);
    fetch(cache, layer, call.seq, head, chosen, choice.chosen, call.serial, missing, counters);
    int32_t count = choice.chosen;
    if (p.miss == SKERRY_ZOOM_SKIP) {
        // What is late is no part of this row, however often it is listed.
        count = static_cast<int32_t>(std::remove_if(chosen, chosen + count,
                                                    [&](int32_t window) {
                                                        const uint16_t slot = entries[window].slot;
                                                        return slot == no_slot || !Transfers::arrived(&cache->zoom_slots[slot].state);
                                                    }) -
                                     chosen);
    }
    if (call.remember) {
        const bool moves = own ? later && zoom.borrowed == 0 : zoom.borrowed == 0;
        if (moves) {
            std::memcpy(tables.previous(zoom), tables.current(zoom), zoom.current * sizeof(int32_t));
            zoom.previous = zoom.current;
        }
        zoom.borrowed = own ? 0 : 1;
        zoom.position = call.position;
        std::memcpy(tables.current(zoom), chosen, static_cast<size_t>(count) * sizeof(int32_t));
        zoom.current = static_cast<uint32_t>(count);
    }
    return zoom_list(cache, call.seq, layer, lane, zoom, chosen, count, reinterpret_cast<skerry_tile *>(base + offsets.tiles),
                     reinterpret_cast<int32_t *>(base + offsets.origins));
}

void zoom_ensure(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane) {
    ZoomTables &tables = *seq->zoom;
    const LaneZoom &zoom = tables.lane(lane);
    HostEntry *entries = tables.entries(zoom);
    const int32_t *chosen = tables.current(zoom);
    const uint64_t serial = ++cache->zoom_serial;
    for (uint32_t c = 0; c < zoom.current; ++c) {
        const uint16_t slot = entries[chosen[c]].slot;
        if (slot != no_slot) cache->zoom_slots[slot].serial = serial;
    }
    for (uint32_t c = 0; c < zoom.current; ++c) {
        const HostEntry &entry = entries[chosen[c]];
        if (entry.slot != no_slot) {
            cache->context->transfers.wait(&cache->zoom_slots[entry.slot].state);
            continue;
        }
        assign_slots(cache, seq, lane, lane - layer.lane, &chosen[c], 1, serial, serial, true, 0);
        if (entry.slot == no_slot) continue; // two layers' worth of slots rule it out
        cache->context->transfers.copy(detail_pieces(cache, layer, &entry), cache->pool.data(cache->zoom_slots[entry.slot].place));
    }
}

void zoom_prefetch(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, skerry_counters *counters) {
    Transfers &transfers = cache->context->transfers;
    if (!transfers.has_threads() || !cache->policy().zooms(layer)) return;
    const uint64_t serial = cache->zoom_serial;
    for (int32_t lane = layer.lane; lane < layer.lane + layer.kv_heads; ++lane) {
        ZoomTables &tables = *seq->zoom;
        const LaneZoom &zoom = tables.lane(lane);
        HostEntry *entries = tables.entries(zoom);
        const int32_t *chosen = tables.current(zoom);
        for (uint32_t c = 0; c < zoom.current; ++c) {
            HostEntry &entry = entries[chosen[c]];
            if (entry.slot != no_slot) {
                cache->zoom_slots[entry.slot].serial = serial + 1;
                continue;
            }
            assign_slots(cache, seq, lane, lane - layer.lane, &chosen[c], 1, serial, serial + 1, false, 0);
            if (entry.slot == no_slot) break;
            ZoomSlot &slot = cache->zoom_slots[entry.slot];
            const Pieces from = detail_pieces(cache, layer, &entry);
            if (!transfers.submit(from, cache->pool.data(slot.place), &slot.state)) {
                empty_slot(cache, slot);
                return;
            }
            ++counters->prefetches;
            counters->fetched_bytes += from.bytes();
        }
    }
}

void zoom_detail(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane, uint32_t epoch, const DetailRows &rows,
                 const DetailScratch &scratch, skerry_counters *counters) {
    const PolicyConfig &p = cache->policy();
    ZoomTables &tables = *seq->zoom;
    LaneZoom &zoom = tables.lane(lane);
    const uint32_t window = zoom.windows++;
    HostEntry *entries = tables.entries(zoom);
    HostEntry &entry = entries[window];
    std::memset(router_counts(p, tables, zoom, window), 0, key_vectors(p));
    const uint32_t bytes = epoch_table_bytes(layer);
    const uint8_t *stored = seq->tables.epochs.data() + seq->lane(lane).epoch_offset + size_t{epoch} * bytes + sizeof(EpochHead);
    const uint64_t share = host_record_bytes(cache->plan, layer, cache->quotas[static_cast<size_t>(layer.source)]);
    const uint64_t held = uint64_t{zoom.host_units} * place_bytes;
    entry = detail_write(cache, layer, rows, stored, epoch, entries, window, share > held ? share - held : 0, scratch, counters);
    if (entry.place == no_place) return;
    zoom.host_units += detail_units(cache, layer, entry);
    zoom_key(cache, seq, layer, lane, window, rows, scratch);
}

void zoom_key(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane, uint32_t window, const DetailRows &rows,
              const DetailScratch &scratch) {
    const PolicyConfig &p = cache->policy();
    ZoomTables &tables = *seq->zoom;
    const LaneZoom &zoom = tables.lane(lane);
    uint8_t *counts = router_counts(p, tables, zoom, window);
    uint8_t *key = router_keys(tables, zoom) + window * key_bytes(p, layer);
    if (p.router != nullptr) {
        project_key(*p.router, layer, lane - layer.lane, rows, scratch.router_key, key, counts);
        return;
    }
    float *centroids = scratch.router_key;
    make_centroids(rows.keys, rows.count, layer.key_dim, centroids, counts);
    const skerry_epoch balance = epoch_decode(router_balance(tables, zoom), layer.key_dim, scratch.code.mean, scratch.code.balance);
    skerry_code_params code{};
    code.epoch = &balance;
    code.attention_factor = 1;
    code.dim = layer.key_dim;
    code.capacity = code.count = router_centroids;
    code.format = SKERRY_FORMAT_R2;
    code.side = SKERRY_SIDE_KEY;
    code.grid_dtype = SKERRY_DTYPE_F16;
    cache->kernels().encode(&code, centroids, key, scratch.code.code);
}

void zoom_fingerprint(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, int32_t head, uint64_t *hash) {
    const auto add = [&](const void *data, size_t bytes) { *hash = hash_bytes(*hash, data, bytes); };
    const PolicyConfig &p = cache->policy();
    ZoomTables &tables = *seq->zoom;
    const LaneZoom &zoom = tables.lane(layer.lane + head);
    add(&zoom.windows, sizeof zoom.windows);
    add(router_keys(tables, zoom), zoom.windows * key_bytes(p, layer));
    add(router_counts(p, tables, zoom), zoom.windows * key_vectors(p));
    add(tables.current(zoom), zoom.current * sizeof(int32_t));
    if (zoom.frozen != 0) add(router_balance(tables, zoom), epoch_bytes(layer.key_dim));
    for (uint32_t w = 0; w < zoom.windows; ++w) {
        const HostEntry &entry = tables.entries(zoom)[w];
        add(&entry.epoch, sizeof entry.epoch);
        add(&entry.key_format, sizeof entry.key_format);
        add(&entry.rows, sizeof entry.rows);
        add(entry.basis, sizeof entry.basis);
        if (entry.place != no_place) add(cache->host.data(entry.place), detail_bytes(cache->policy(), layer, entry));
    }
}

} // namespace skerry
