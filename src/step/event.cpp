// Routing events: which windows of one layer change tier, and the only code that moves their bytes.

#include <algorithm>
#include <cstring>

#include "codec/epoch.hpp"
#include "model/qevict_paper.hpp"
#include "policy/window_router.hpp"
#include "step/zoom.hpp"

namespace skerry {

namespace {

constexpr int32_t lir_latent = 4;
constexpr int32_t lir_reach = 12; // m + h: a run this long is an episode that was not rescued

// One KV head's part in an event. Everything lies in the cache's scratch.
struct LaneEvent {
    WindowCandidate *candidates = nullptr;
    WindowTier *targets = nullptr;
    WindowSlot *order = nullptr;
    uint32_t epoch = 0;           // of the window being coded
    skerry_tile *moved = nullptr; // [candidate] first tile of the window's new place; count 0: not moved
    uint32_t count = 0;           // candidates

    skerry_tile *tiles = nullptr; // the new list
    int64_t *words = nullptr;
    uint32_t *dormant = nullptr;
    uint32_t *exact = nullptr;
    float *rows = nullptr;
    void *code = nullptr;
    double *statistics = nullptr;
    float *balance = nullptr;
    bool *done = nullptr;
    DetailScratch detail{};

    // What the lane adds to the layer's numbers.
    skerry_counters counters{};
    int64_t staying = 0;
    int64_t dropped = 0;
    int64_t fresh_mass = 0;
    uint64_t before = 0;
    uint64_t lost = 0;
    uint64_t joined = 0;
    uint64_t lir_eligible = 0;
    uint64_t lir_rescued = 0;
};
static_assert(sizeof(WindowCandidate) + sizeof(WindowTier) + sizeof(WindowSlot) + sizeof(skerry_tile) <= event_candidate_bytes);

struct Event {
    skerry_cache *cache;
    Sequence *seq;
    const LayerGeometry *layer;
    const LaneQuota *quota;
    LayerState *state;
    int32_t index;
    int64_t length;
    int64_t evictable; // windows below this have left the recent region
    uint8_t *scratch;
    size_t lane_scratch;
};

// Entries that a lane's list may have when the event has run: anchors make it longer.
uint32_t lane_entries(const PolicyConfig &p, const Lane &lane) { return p.spans ? lane.capacity : lane.tiles; }

LaneEvent lane_event(const Event &event, int32_t head) {
    const PolicyConfig &p = event.cache->policy();
    const LayerGeometry &layer = *event.layer;
    const Lane &lane = event.seq->lane(layer.lane + head);
    const size_t entries = lane_entries(p, lane);
    uint8_t *at = event.scratch + event.lane_scratch * static_cast<size_t>(head);
    const auto take = [&](size_t bytes) {
        uint8_t *here = at;
        at += round_up(bytes, 8);
        return here;
    };
    LaneEvent e;
    e.done = reinterpret_cast<bool *>(take(8));
    e.candidates = reinterpret_cast<WindowCandidate *>(take(entries * sizeof(WindowCandidate)));
    e.words = reinterpret_cast<int64_t *>(take(entries * 8 * static_cast<size_t>(p.score_words())));
    e.statistics = reinterpret_cast<double *>(take(static_cast<size_t>(layer.key_dim) * 24));
    e.tiles = reinterpret_cast<skerry_tile *>(take(entries * sizeof(skerry_tile)));
    e.moved = reinterpret_cast<skerry_tile *>(take(entries * sizeof(skerry_tile)));
    e.order = reinterpret_cast<WindowSlot *>(take(entries * sizeof(WindowSlot)));
    e.dormant = reinterpret_cast<uint32_t *>(take(p.quantises() ? entries * 4 : 0));
    e.exact = reinterpret_cast<uint32_t *>(take(p.keeps_exact() ? entries * 4 : 0));
    e.targets = reinterpret_cast<WindowTier *>(take(entries));
    e.balance = reinterpret_cast<float *>(take(static_cast<size_t>(layer.key_dim) * 8));
    const size_t tokens = static_cast<size_t>(coding_tokens(p));
    e.rows = reinterpret_cast<float *>(take(tokens * static_cast<size_t>(layer.key_dim + layer.value_dim) * 4));
    at = event.scratch + round_up(static_cast<size_t>(at - event.scratch), 64);
    if (p.zooms(layer)) {
        const size_t most = detail_slot_bytes(p, layer);
        e.detail.record = at;
        e.detail.record_bytes = most;
        at += round_up(most, 64);
        e.detail.decoded = reinterpret_cast<float *>(at);
        at += round_up(tokens * static_cast<size_t>(std::max(layer.key_dim, layer.value_dim)) * 4, 64);
        e.detail.factor = at;
        at += round_up(factor_scratch_bytes(&event.cache->kernels(), p, layer), 64);
        e.detail.router_key = reinterpret_cast<float *>(at);
        at += round_up(router_key_scratch_bytes(p, layer), 64);
    }
    e.code = at;
    e.detail.code = CodeScratch{e.balance, e.balance + layer.key_dim, e.code};
    return e;
}

uint8_t tile_run(const skerry_tile &tile) { return static_cast<uint8_t>((tile.flags >> tile_run_shift) & tile_run_most); }
void set_run(skerry_tile *tile, uint8_t run) {
    tile->flags =
        static_cast<uint8_t>((tile->flags & ~(tile_run_most << tile_run_shift)) | std::min<int32_t>(run, tile_run_most) << tile_run_shift);
}

// A sliding window has passed the whole window by.
bool unseen(const Event &event, int32_t window) {
    if (event.layer->sliding_window == 0) return false;
    const PolicyConfig &p = event.cache->policy();
    const int64_t last = p.sinks + static_cast<int64_t>(window + 1) * p.window - 1;
    return last <= event.length - event.layer->sliding_window;
}

void list_candidates(const Event &event, const Lane &lane, LaneEvent *e) {
    const PolicyConfig &p = event.cache->policy();
    const skerry_tile *tiles = event.seq->tiles(lane);
    for (uint32_t t = 0; t < lane.tiles;) {
        const WindowSpan span = window_at(p, tiles, t, lane.tiles);
        t = span.end;
        if (span.window < 0) continue;
        if (span.window >= event.evictable) break;
        WindowCandidate &c = e->candidates[e->count];
        c = WindowCandidate{};
        c.id = static_cast<uint32_t>(span.window);
        // Without any score: newest first.
        c.rank = event.state->scored == 0 ? span.window + int64_t{1}
                                          : window_rank(event.cache, event.seq, *event.state, lane, span.begin, event.length);
        c.tier = tiles[span.begin].tier == SKERRY_TIER_QUANTISED ? WindowTier::quantised
                 : span.window >= event.state->routed_windows    ? WindowTier::fresh
                                                                 : WindowTier::full;
        e->moved[e->count].count = 0;
        ++e->count;
    }
}

// Candidates that no query can see any more take no part; they are evicted below.
void route(const Event &event, LaneEvent *e) {
    const PolicyConfig &p = event.cache->policy();
    uint32_t first = 0;
    while (first < e->count && unseen(event, static_cast<int32_t>(e->candidates[first].id)))
        e->targets[first++] = WindowTier::evicted;
    WindowRoute r;
    r.full_slots = p.has_full_history() ? static_cast<uint64_t>(event.quota->full_windows) : 0;
    r.quantised_slots = p.quantises() ? static_cast<uint64_t>(event.quota->quantised_windows) : 0;
    r.promotion = p.promotes();
    if (!p.paper() && p.kind == SKERRY_POLICY_QEVICT) {
        r.margin_num = p.hysteresis_ppm;
        r.margin_den = 1000000;
        r.cap_num = p.max_moves_ppm;
        r.cap_den = 1000000;
    }
    const size_t count = e->count - first;
    route_windows(r, {e->candidates + first, count}, {e->targets + first, count}, {e->order, count});
}

// Rows of a window in f32, from the best that is stored. True: they are the exact tokens.
bool window_rows(const Event &event, const Lane &lane, const WindowSpan &span, LaneEvent *e, float *keys, float *values) {
    skerry_cache *cache = event.cache;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = *event.layer;
    const skerry_tile *tiles = event.seq->tiles(lane);
    const CodeScratch scratch{e->balance, e->balance + layer.key_dim, e->code};
    const int64_t start = p.sinks + static_cast<int64_t>(span.window) * p.window;
    const uint32_t exact = p.keeps_exact() ? event.seq->tables.exact[lane.offset + span.begin] : no_place;
    if (!is_full_format(tiles[span.begin].key_format) && exact != no_place) {
        skerry_tile tile{};
        tile.capacity = static_cast<uint8_t>(tile_capacity(p.store_dtype, p.window));
        tile.key_format = tile.value_format = static_cast<uint8_t>(p.store_dtype);
        const size_t bytes = record_bytes(p.store_dtype, p.store_dtype, layer.key_dim, layer.value_dim, tile.capacity);
        const uint8_t *part = cache->exact_pool.data(exact);
        for (int32_t done = 0; done < p.window; done += tile.capacity, part += bytes) {
            tile.first = static_cast<int32_t>(start + done);
            tile.count = static_cast<uint8_t>(std::min<int32_t>(tile.capacity, p.window - done));
            const skerry_code_params key = code_params(p, layer, tile, SKERRY_SIDE_KEY);
            const skerry_code_params value = code_params(p, layer, tile, SKERRY_SIDE_VALUE);
            cache->kernels().decode(&key, part, keys + done * layer.key_dim, e->code);
            cache->kernels().decode(&value, part + value_offset(p.store_dtype, layer.key_dim, tile.capacity),
                                    values + done * layer.value_dim, e->code);
        }
        return true;
    }
    for (uint32_t t = span.begin; t < span.end; ++t) {
        const int64_t at = tiles[t].first - start;
        decode_tile(cache, event.seq, event.index, lane, tiles[t], keys + at * layer.key_dim, values + at * layer.value_dim, scratch);
    }
    return is_full_format(tiles[span.begin].key_format) && (tiles[span.begin].flags & tile_recovered) == 0;
}

// Drops epochs that no tile and no detail of the lane names.
void drop_dead_epochs(Sequence *seq, const LayerGeometry &layer, Lane *lane) {
    const LaneZoom *zoom = seq->zoom ? &seq->zoom->lanes[static_cast<size_t>(lane - seq->tables.lanes.data())] : nullptr;
    // Epochs up to the last one that detail names stay as they are: an aborted step restores the table, but not what entries say.
    uint32_t held = 0;
    for (uint32_t w = zoom != nullptr ? zoom->windows : 0; w > 0 && held == 0; --w) {
        const HostEntry &entry = seq->zoom->entries(*zoom)[w - 1];
        if (entry.place != no_place) held = entry.epoch + 1u;
    }
    skerry_tile *tiles = seq->tiles(*lane);
    const uint32_t bytes = epoch_table_bytes(layer);
    uint8_t *table = seq->tables.epochs.data() + lane->epoch_offset;
    uint32_t kept = 0;
    const uint32_t *dormant = seq->tables.dormant.empty() ? nullptr : seq->tables.dormant.data() + lane->offset;
    const auto names = [&](uint32_t t, uint32_t k) {
        return tiles[t].epoch == k && (!is_full_format(tiles[t].key_format) || (dormant != nullptr && dormant[t] != no_place));
    };
    for (uint32_t k = 0; k < lane->epochs; ++k) {
        bool named = k < held;
        for (uint32_t t = 0; t < lane->tiles && !named; ++t)
            named = names(t, k);
        if (!named) continue;
        if (kept != k) {
            std::memcpy(table + kept * bytes, table + k * bytes, bytes);
            for (uint32_t t = 0; t < lane->tiles; ++t) {
                if (names(t, k)) tiles[t].epoch = static_cast<uint16_t>(kept);
            }
        }
        ++kept;
    }
    lane->epochs = kept;
}

// What an epoch, or a lane's router keys, are frozen from: the keys and values from `from` to before `end` that the lane holds, and the
// queries seen so far.
EpochStatistics lane_statistics(const Event &event, const Lane &lane, int64_t from, int64_t end, LaneEvent *e) {
    const PolicyConfig &p = event.cache->policy();
    const LayerGeometry &layer = *event.layer;
    Sequence *seq = event.seq;
    const size_t dim = static_cast<size_t>(layer.key_dim);
    double *mean = e->statistics;
    double *variance = mean + dim;
    double *query_square = variance + dim;
    std::fill(mean, mean + dim, 0.0);
    std::fill(variance, variance + dim, 0.0);
    float largest_key = 0;
    float largest_value = 0;
    int64_t count = 0;
    const skerry_tile *tiles = seq->tiles(lane);
    float *keys = e->rows;
    float *values = keys + static_cast<size_t>(coding_tokens(p)) * dim;
    const CodeScratch scratch{e->balance, e->balance + layer.key_dim, e->code};
    for (uint32_t t = 0; t < lane.tiles; ++t) {
        const skerry_tile &tile = tiles[t];
        if (tile.first + tile.count <= from || tile.first >= end) continue;
        decode_tile(event.cache, seq, event.index, lane, tile, keys, values, scratch);
        for (int32_t k = 0; k < tile.count; ++k) {
            if (tile.first + k < from || tile.first + k >= end) continue;
            ++count;
            for (size_t c = 0; c < dim; ++c) {
                const float key = keys[static_cast<size_t>(k) * dim + c];
                const double delta = static_cast<double>(key) - mean[c];
                mean[c] += delta / static_cast<double>(count);
                variance[c] += delta * (static_cast<double>(key) - mean[c]);
                largest_key = std::max(largest_key, key < 0 ? -key : key);
            }
            for (int32_t c = 0; c < layer.value_dim; ++c) {
                const float value = values[k * layer.value_dim + c];
                largest_value = std::max(largest_value, value < 0 ? -value : value);
            }
        }
    }
    for (size_t c = 0; c < dim; ++c) {
        variance[c] /= static_cast<double>(std::max<int64_t>(count, 1));
        query_square[c] = static_cast<double>(seq->tables.query_squares[lane.query_offset + c]);
    }
    const bool queries = std::any_of(query_square, query_square + dim, [](double square) { return square > 0; });
    return EpochStatistics{mean, variance, queries ? query_square : nullptr, largest_key, largest_value};
}

// Index of the epoch that a window belongs to; frozen now if it is its first window (decisions.md 2).
uint16_t epoch_of(const Event &event, Lane *lane, int32_t window, LaneEvent *e) {
    const PolicyConfig &p = event.cache->policy();
    const LayerGeometry &layer = *event.layer;
    Sequence *seq = event.seq;
    const uint32_t bytes = epoch_table_bytes(layer);
    uint8_t *table = seq->tables.epochs.data() + lane->epoch_offset;
    const int32_t number = static_cast<int32_t>(static_cast<int64_t>(window) * p.window / limits::epoch_tokens);
    const auto head = [&](uint32_t k) {
        EpochHead h;
        std::memcpy(&h, table + k * bytes, sizeof h);
        return h;
    };
    for (uint32_t k = lane->epochs; k > 0; --k) {
        if (head(k - 1).number == number) return static_cast<uint16_t>(k - 1);
    }
    // A full table gives up dead epochs, but not while moves of this event are pending on their numbers: the last one then serves on.
    if (lane->epochs == lane->epoch_capacity) return static_cast<uint16_t>(lane->epochs - 1);

    const int64_t begin = p.sinks + static_cast<int64_t>(number) * limits::epoch_tokens;
    const int64_t end = std::min<int64_t>(event.length, begin + limits::epoch_tokens);
    const int64_t from = std::max<int64_t>(0, std::min<int64_t>(begin, end - limits::epoch_keys));
    const EpochStatistics statistics = lane_statistics(event, *lane, from, end, e);
    const EpochHead made{number, 0};
    uint8_t *place = table + lane->epochs * bytes;
    std::memset(place, 0, bytes);
    std::memcpy(place, &made, sizeof made);
    epoch_freeze(statistics, layer.key_dim, place + sizeof made);
    return static_cast<uint16_t>(lane->epochs++);
}

// The balance that all router keys of a lane share, from all that the lane holds when the first of them is made: where a prompt is
// compacted at its end, from the whole prompt.
void freeze_router_balance(const Event &event, int32_t lane, LaneEvent *e) {
    const PolicyConfig &p = event.cache->policy();
    ZoomTables &tables = *event.seq->zoom;
    LaneZoom &zoom = tables.lane(lane);
    if (zoom.frozen != 0 || p.router != nullptr) return;
    epoch_freeze(lane_statistics(event, event.seq->lane(lane), p.sinks, event.length, e), event.layer->key_dim,
                 tables.balance.data() + zoom.balance_offset);
    zoom.frozen = 1;
}

uint32_t take_slot(skerry_cache *cache, Pool &pool, int32_t slot_class) {
    Lock lock(cache->pool_mutex);
    return pool.take(slot_class);
}
void free_slot(skerry_cache *cache, Pool &pool, uint32_t place) {
    Lock lock(cache->pool_mutex);
    pool.release(place);
}

// Codes a window's rows into a new slot and returns its first tile; place no_place when the pool is full, which quotas rule out.
skerry_tile code_window(const Event &event, Lane *lane, int32_t window, LaneEvent *e, const float *keys, const float *values,
                        int32_t slot_class, skerry_format key_format, skerry_format value_format) {
    skerry_cache *cache = event.cache;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = *event.layer;
    skerry_tile tile{};
    tile.place = take_slot(cache, cache->pool, slot_class);
    if (tile.place == no_place) return tile;
    tile.first = static_cast<int32_t>(p.sinks + static_cast<int64_t>(window) * p.window);
    tile.capacity = static_cast<uint8_t>(std::max(tile_capacity(key_format, p.window), tile_capacity(value_format, p.window)));
    tile.key_format = static_cast<uint8_t>(key_format);
    tile.value_format = static_cast<uint8_t>(value_format);
    skerry_epoch epoch{};
    const bool balanced = is_r_format(key_format) || is_r_format(value_format);
    if (balanced) {
        const uint8_t *stored =
            event.seq->tables.epochs.data() + lane->epoch_offset + e->epoch * epoch_table_bytes(layer) + sizeof(EpochHead);
        tile.epoch = static_cast<uint16_t>(e->epoch);
        epoch = epoch_decode(stored, layer.key_dim, e->balance, e->balance + layer.key_dim);
    }
    skerry_tile part = tile;
    uint8_t *bytes = cache->pool.data(tile.place);
    const size_t each = tile_units(p, layer, tile) * place_bytes;
    for (int32_t done = 0; done < p.window; done += tile.capacity, bytes += each) {
        part.first = tile.first + done;
        part.count = static_cast<uint8_t>(std::min<int32_t>(tile.capacity, p.window - done));
        skerry_code_params key = code_params(p, layer, part, SKERRY_SIDE_KEY);
        skerry_code_params value = code_params(p, layer, part, SKERRY_SIDE_VALUE);
        key.epoch = value.epoch = balanced ? &epoch : nullptr;
        cache->kernels().encode(&key, keys + done * layer.key_dim, bytes, e->code);
        cache->kernels().encode(&value, values + done * layer.value_dim, bytes + value_offset(key_format, layer.key_dim, tile.capacity),
                                e->code);
        if (!is_full_format(key_format)) e->counters.record_bytes_written += each;
    }
    tile.count = static_cast<uint8_t>(std::min<int32_t>(tile.capacity, p.window));
    return tile;
}

// Where a window is that leaves the device.
skerry_tier tier_off_device(const Event &event, int32_t head, int32_t window) {
    const Sequence *seq = event.seq;
    if (!seq->zoom) return SKERRY_TIER_EVICTED;
    const LaneZoom &zoom = seq->zoom->lane(event.layer->lane + head);
    const bool held = window < static_cast<int32_t>(zoom.windows) && seq->zoom->entries(zoom)[window].place != no_place;
    return held ? SKERRY_TIER_HOST : SKERRY_TIER_EVICTED;
}

void note(const Event &event, int32_t head, int32_t window, skerry_tier from, const skerry_tile *to, uint64_t written, int64_t rank) {
    skerry_cache *cache = event.cache;
    if (cache->callbacks.transitions == nullptr) return;
    skerry_transition move{};
    move.seq = skerry_seq{event.seq->id};
    move.position = event.length;
    move.window = window;
    move.layer = event.index;
    move.kv_head = head;
    move.from = from;
    move.to = to != nullptr ? static_cast<skerry_tier>(to->tier) : tier_off_device(event, head, window);
    if (to != nullptr) {
        move.key_format = to->key_format;
        move.value_format = to->value_format;
    } else if (move.to == SKERRY_TIER_HOST) {
        move.key_format = move.value_format = cache->policy().detail_format;
    }
    move.written_bytes = static_cast<uint32_t>(written);
    move.score = cache->scores.rule == ScoreRule::age_normalised ? static_cast<double>(rank) * 0x1p-60 : from_mass(rank);
    Lock lock(cache->pool_mutex);
    if (cache->step.transitions.size() < cache->step.transitions.capacity()) cache->step.transitions.push_back(move);
}

// Carries out the targets for one lane.
void apply(const Event &event, int32_t head, LaneEvent *e) {
    skerry_cache *cache = event.cache;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = *event.layer;
    const LayerClasses &classes = cache->classes[static_cast<size_t>(event.index)];
    Sequence *seq = event.seq;
    Lane &lane = seq->lane(layer.lane + head);
    skerry_tile *tiles = seq->tiles(lane);
    uint32_t *dormant = p.quantises() ? seq->tables.dormant.data() + lane.offset : nullptr;
    uint32_t *exact = p.keeps_exact() ? seq->tables.exact.data() + lane.offset : nullptr;
    float *keys = e->rows;
    float *values = keys + coding_tokens(p) * layer.key_dim;

    // Each lane has its own share of the exact copies, less what an open step may have given up (its undo copy holds on to it).
    int64_t copies = 0;
    const int64_t held = std::min<int64_t>(cache->plan.exact_windows / 2, event.quota->staging_records);
    const int64_t copies_most = cache->plan.exact_windows - held;

    const auto for_each_candidate = [&](auto &&visit) {
        uint32_t c = 0;
        for (uint32_t t = 0; t < lane.tiles && c < e->count;) {
            const WindowSpan span = window_at(p, tiles, t, lane.tiles);
            t = span.end;
            if (span.window < 0) continue;
            visit(span, c);
            ++c;
        }
    };

    // Epochs are frozen while every tile of the list is still there.
    const auto find_epoch = [&](int32_t window) {
        if (p.uses_epochs()) e->epoch = epoch_of(event, &lane, window, e);
    };
    // Windows that leave the recent region get their detail on the host while their tokens are exact.
    if (p.zooms(layer)) {
        for_each_candidate([&](const WindowSpan &span, uint32_t) {
            const LaneZoom &zoom = seq->zoom->lane(layer.lane + head);
            if (zoom.windows == zoom.capacity) {
                if (span.window >= static_cast<int32_t>(zoom.capacity) && event.state->routed_windows <= span.window)
                    ++e->counters.details_refused;
                return;
            }
            if (span.window != static_cast<int32_t>(zoom.windows)) return;
            find_epoch(span.window);
            freeze_router_balance(event, layer.lane + head, e);
            window_rows(event, lane, span, e, keys, values);
            const DetailRows rows{keys, values, p.window, tiles[span.begin].first};
            zoom_detail(cache, seq, layer, layer.lane + head, e->epoch, rows, e->detail, &e->counters);
        });
    }
    for_each_candidate([&](const WindowSpan &span, uint32_t c) {
        const bool open = is_full_format(tiles[span.begin].key_format);
        const bool coded =
            (e->targets[c] == WindowTier::quantised && e->candidates[c].tier != WindowTier::quantised && dormant[span.begin] == no_place) ||
            (e->targets[c] == WindowTier::full && p.has_wide() && (open || e->candidates[c].tier == WindowTier::quantised));
        if (coded) find_epoch(span.window);
    });
    if (exact != nullptr) {
        for (uint32_t t = 0; t < lane.tiles; ++t)
            copies += exact[t] != no_place ? 1 : 0;
    }
    // Drop first (qevict.md 4.1): live records never exceed their slots.
    int64_t records = 0;
    for_each_candidate([&](const WindowSpan &span, uint32_t c) {
        skerry_tile &tile = tiles[span.begin];
        const bool readable_before = e->candidates[c].tier != WindowTier::fresh;
        e->before += readable_before ? 1 : 0;
        if (e->targets[c] != WindowTier::evicted) {
            e->joined += readable_before ? 0 : 1;
            e->staying = add_mass(e->staying, e->candidates[c].rank);
            if (!readable_before) e->fresh_mass = add_mass(e->fresh_mass, e->candidates[c].rank);
            if (dormant != nullptr)
                records += (e->targets[c] == WindowTier::quantised || dormant[span.begin] != no_place ||
                            e->candidates[c].tier == WindowTier::quantised)
                               ? 1
                               : 0;
            return;
        }
        e->dropped = add_mass(e->dropped, e->candidates[c].rank);
        if (!readable_before) e->fresh_mass = add_mass(e->fresh_mass, e->candidates[c].rank);
        e->lost += readable_before ? 1 : 0;
        if (tile_run(tile) < lir_reach) ++e->lir_eligible;
        if (is_full_format(tile.key_format)) --lane.open_windows;
        free_slot(cache, cache->pool, tile.place);
        if (dormant != nullptr && dormant[span.begin] != no_place) free_slot(cache, cache->pool, dormant[span.begin]);
        if (exact != nullptr && exact[span.begin] != no_place) {
            free_slot(cache, cache->exact_pool, exact[span.begin]);
            --copies;
        }
        if (tier_off_device(event, head, span.window) == SKERRY_TIER_EVICTED) ++e->counters.evictions;
        note(event, head, span.window, tile.tier, nullptr, 0, e->candidates[c].rank);
    });
    // Inactive records live while there is room, the oldest goes first (decisions.md 4).
    if (dormant != nullptr && event.quota->record_slots > 0) {
        for_each_candidate([&](const WindowSpan &span, uint32_t c) {
            if (records <= event.quota->record_slots || e->targets[c] != WindowTier::full || dormant[span.begin] == no_place) return;
            free_slot(cache, cache->pool, dormant[span.begin]);
            dormant[span.begin] = no_place;
            --records;
        });
    }
    // Demotions, and the step from the recent region into the full tier's own format.
    for_each_candidate([&](const WindowSpan &span, uint32_t c) {
        skerry_tile &tile = tiles[span.begin];
        const WindowTier target = e->targets[c];
        if (target == WindowTier::evicted || e->candidates[c].tier == WindowTier::quantised) return;
        const bool open = is_full_format(tile.key_format);
        if (target == WindowTier::full) {
            if (!p.has_wide() || !open) return;
            find_epoch(span.window);
            window_rows(event, lane, span, e, keys, values);
            skerry_tile made = code_window(event, &lane, span.window, e, keys, values, classes.wide, p.full_format, p.full_format);
            if (made.place == no_place) return;
            made.tier = SKERRY_TIER_FULL;
            made.flags = static_cast<uint8_t>(tile.flags | tile_wide);
            e->moved[c] = made;
        } else {
            const uint64_t written = e->counters.record_bytes_written;
            skerry_tile made = tile;
            if (exact != nullptr && open && exact[span.begin] == no_place && (tile.flags & tile_recovered) == 0 && copies < copies_most) {
                const uint32_t copy = take_slot(cache, cache->exact_pool, classes.exact);
                if (copy != no_place) {
                    std::memcpy(cache->exact_pool.data(copy), cache->pool.data(tile.place), event.quota->open_slot_bytes);
                    exact[span.begin] = copy;
                    ++copies;
                }
            }
            if (dormant[span.begin] != no_place) {
                made.place = dormant[span.begin];
                made.key_format = static_cast<uint8_t>(p.key_format);
                made.value_format = static_cast<uint8_t>(p.value_format);
                made.capacity =
                    static_cast<uint8_t>(std::max(tile_capacity(p.key_format, p.window), tile_capacity(p.value_format, p.window)));
                made.count = static_cast<uint8_t>(std::min<int32_t>(made.capacity, p.window));
                dormant[span.begin] = no_place;
                ++e->counters.demotions_ledger;
            } else {
                find_epoch(span.window);
                window_rows(event, lane, span, e, keys, values);
                made = code_window(event, &lane, span.window, e, keys, values, classes.record, p.key_format, p.value_format);
                if (made.place == no_place) return;
                ++e->counters.demotions_written;
            }
            made.tier = SKERRY_TIER_QUANTISED;
            made.flags = static_cast<uint8_t>(tile.flags & ~(tile_recovered | tile_wide));
            ++e->counters.demotions;
            e->moved[c] = made;
            note(event, head, span.window, SKERRY_TIER_FULL, &made, e->counters.record_bytes_written - written, e->candidates[c].rank);
        }
        if (open) --lane.open_windows;
        free_slot(cache, cache->pool, tile.place);
    });
    // Promotions.
    for_each_candidate([&](const WindowSpan &span, uint32_t c) {
        skerry_tile &tile = tiles[span.begin];
        if (e->targets[c] != WindowTier::full || e->candidates[c].tier != WindowTier::quantised) return;
        if (p.has_wide()) find_epoch(span.window);
        const bool original = window_rows(event, lane, span, e, keys, values);
        skerry_tile made;
        if (p.has_wide()) {
            made = code_window(event, &lane, span.window, e, keys, values, classes.wide, p.full_format, p.full_format);
        } else {
            made = code_window(event, &lane, span.window, e, keys, values, classes.open, p.store_dtype, p.store_dtype);
        }
        if (made.place == no_place) return;
        if (!p.has_wide()) ++lane.open_windows;
        made.epoch = tile.epoch;
        made.tier = SKERRY_TIER_FULL;
        made.flags = static_cast<uint8_t>((tile.flags & ~(tile_recovered | tile_wide)) | (original ? 0 : tile_recovered) |
                                          (p.has_wide() ? tile_wide : 0));
        e->moved[c] = made;
        ++e->counters.promotions;
        ++(original ? e->counters.promotions_exact : e->counters.promotions_recovered);
        // The record stays in the ledger, if it may.
        if (records <= event.quota->record_slots || event.quota->record_slots == 0) {
            dormant[span.begin] = tile.place;
        } else {
            --records;
            free_slot(cache, cache->pool, tile.place);
        }
        note(event, head, span.window, SKERRY_TIER_QUANTISED, &made, 0, e->candidates[c].rank);
    });

    // The new list.
    const size_t words = static_cast<size_t>(p.score_words());
    const int64_t *old_words = seq->tables.words.data() + lane.offset * words;
    uint32_t n = 0;
    uint32_t c = 0;
    for (uint32_t t = 0; t < lane.tiles;) {
        const WindowSpan span = window_at(p, tiles, t, lane.tiles);
        t = span.end;
        const bool candidate = span.window >= 0 && c < e->count && e->candidates[c].id == static_cast<uint32_t>(span.window);
        const uint32_t index = candidate ? c++ : 0;
        if (candidate && e->targets[index] == WindowTier::evicted) continue;
        const uint32_t first = n;
        if (candidate && e->moved[index].count != 0) {
            skerry_tile tile = e->moved[index];
            const uint32_t units = tile_units(p, layer, tile);
            for (int32_t done = 0; done < p.window; done += tile.capacity) {
                e->tiles[n] = tile;
                e->tiles[n].first = tile.first + done;
                e->tiles[n].count = static_cast<uint8_t>(std::min<int32_t>(tile.capacity, p.window - done));
                e->tiles[n].place = tile.place + units * static_cast<uint32_t>(done / tile.capacity);
                ++n;
            }
        } else {
            for (uint32_t k = span.begin; k < span.end; ++k)
                e->tiles[n++] = tiles[k];
        }
        for (uint32_t k = first; k < n; ++k) {
            const bool leads = k == first;
            std::memset(e->words + k * words, 0, words * sizeof(int64_t));
            if (leads) std::memcpy(e->words + k * words, old_words + span.begin * words, words * sizeof(int64_t));
            if (dormant != nullptr) e->dormant[k] = leads ? dormant[span.begin] : no_place;
            if (exact != nullptr) e->exact[k] = leads ? exact[span.begin] : no_place;
        }
        if (!candidate) continue;
        skerry_tile &lead = e->tiles[first];
        const uint8_t run = tile_run(lead);
        if (lead.tier == SKERRY_TIER_FULL) {
            if (run >= lir_latent && run < lir_reach) {
                ++e->lir_eligible;
                ++e->lir_rescued;
            }
            set_run(&lead, 0);
        } else {
            if (run + 1 == lir_reach) ++e->lir_eligible;
            set_run(&lead, static_cast<uint8_t>(std::min<int32_t>(run + 1, tile_run_most)));
        }
    }
    std::memcpy(tiles, e->tiles, n * sizeof(skerry_tile));
    std::memcpy(seq->tables.words.data() + lane.offset * words, e->words, n * words * sizeof(int64_t));
    if (dormant != nullptr) std::memcpy(dormant, e->dormant, n * sizeof(uint32_t));
    if (exact != nullptr) std::memcpy(exact, e->exact, n * sizeof(uint32_t));
    lane.tiles = n;
    lane.reserved = n;
    if (p.uses_epochs() && lane.epochs == lane.epoch_capacity) drop_dead_epochs(seq, layer, &lane);
}

// Asks the host for masses where a whole period went by without any.
void ask_scores(const Event &event, LaneEvent *e, int32_t head) {
    skerry_cache *cache = event.cache;
    const PolicyConfig &p = cache->policy();
    if (cache->callbacks.scores_wanted == nullptr || e->count == 0) return;
    Lane &lane = event.seq->lane(event.layer->lane + head);
    int32_t *windows = reinterpret_cast<int32_t *>(e->order);
    float *masses = reinterpret_cast<float *>(e->tiles);
    for (uint32_t c = 0; c < e->count; ++c) {
        windows[c] = static_cast<int32_t>(e->candidates[c].id);
        masses[c] = 0;
    }
    const skerry_seq id{event.seq->id};
    if (cache->callbacks.scores_wanted(cache->callbacks.user, id, event.index, head, windows, static_cast<int32_t>(e->count), masses) == 0)
        return;
    const size_t words = static_cast<size_t>(p.score_words());
    const skerry_tile *tiles = event.seq->tiles(lane);
    uint32_t c = 0;
    for (uint32_t t = 0; t < lane.tiles && c < e->count;) {
        const WindowSpan span = window_at(p, tiles, t, lane.tiles);
        t = span.end;
        if (span.window < 0) continue;
        score_add(cache->scores, event.seq->tables.words.data() + (lane.offset + span.begin) * words, lane.period,
                  to_mass(static_cast<double>(masses[c])));
        ++c;
    }
    event.state->scored = std::max<uint64_t>(event.state->scored, 1);
}

} // namespace

void limit_epochs(skerry_cache *cache, Sequence *seq, int32_t index) {
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    const uint32_t most = static_cast<uint32_t>(cache->quotas[static_cast<size_t>(index)].epochs);
    const size_t words = static_cast<size_t>(p.score_words());
    if (!p.uses_epochs()) return;
    for (int32_t h = 0; h < layer.kv_heads; ++h) {
        Lane &lane = seq->lane(layer.lane + h);
        if (lane.epochs <= most) continue;
        drop_dead_epochs(seq, layer, &lane);
        while (lane.epochs > most) {
            // Epochs lie in the order of their positions: everything of the first one goes.
            skerry_tile *tiles = seq->tiles(lane);
            uint32_t n = 0;
            for (uint32_t t = 0; t < lane.tiles;) {
                const WindowSpan span = window_at(p, tiles, t, lane.tiles);
                const size_t at = lane.offset + t;
                uint32_t *dormant = p.quantises() ? &seq->tables.dormant[at] : nullptr;
                const bool record = !is_full_format(tiles[t].key_format);
                const bool names = tiles[t].epoch == 0 && (record || (dormant != nullptr && *dormant != no_place));
                if (names && dormant != nullptr && *dormant != no_place) {
                    cache->pool.release(*dormant);
                    *dormant = no_place;
                }
                if (names && record) {
                    cache->pool.release(tiles[t].place);
                    if (p.keeps_exact() && seq->tables.exact[at] != no_place) cache->exact_pool.release(seq->tables.exact[at]);
                    ++cache->step.counters.evictions;
                } else {
                    for (uint32_t k = span.begin; k < span.end; ++k, ++n) {
                        tiles[n] = tiles[k];
                        std::memmove(seq->tables.words.data() + (lane.offset + n) * words,
                                     seq->tables.words.data() + (lane.offset + k) * words, words * sizeof(int64_t));
                        if (p.quantises()) seq->tables.dormant[lane.offset + n] = seq->tables.dormant[lane.offset + k];
                        if (p.keeps_exact()) seq->tables.exact[lane.offset + n] = seq->tables.exact[lane.offset + k];
                    }
                }
                t = span.end;
            }
            lane.tiles = lane.reserved = n;
            drop_dead_epochs(seq, layer, &lane);
        }
    }
}

namespace {

// Rows of positions [begin, begin + count) without those that `anchors` names, out of the tiles of the recent region.
void span_rows(const Event &event, const Lane &lane, const TokenSpan &span, LaneEvent *e, float *keys, float *values) {
    const LayerGeometry &layer = *event.layer;
    const skerry_tile *tiles = event.seq->tiles(lane);
    int32_t row = 0;
    for (uint32_t t = 0; t < lane.tiles; ++t) {
        const skerry_tile &tile = tiles[t];
        if (is_alone(tile) || tile.first + tile.count <= span.begin || tile.first >= span.end) continue;
        for (const bool is_key : {true, false}) {
            const int32_t dim = is_key ? layer.key_dim : layer.value_dim;
            float *out = is_key ? keys : values;
            float *decoded = e->detail.decoded;
            decode_tile(event.cache, event.seq, event.index, lane, tile, is_key ? decoded : nullptr, is_key ? nullptr : decoded,
                        e->detail.code);
            int32_t at = row;
            for (int32_t k = 0; k < tile.count; ++k) {
                const int64_t offset = tile.first + k - span.begin;
                if (offset < 0 || tile.first + k >= span.end || span.anchors.test(static_cast<int32_t>(offset))) continue;
                std::memcpy(out + at++ * dim, decoded + k * dim, static_cast<size_t>(dim) * sizeof(float));
            }
            if (!is_key) row = at;
        }
    }
}

// Writes tokens [from, from + count) of a tile of the recent region to a slot of another class, from its first token on.
skerry_tile copy_tokens(const Event &event, const Lane &lane, const skerry_tile &tile, int32_t from, int32_t count, int32_t slot_class,
                        int32_t capacity, LaneEvent *e) {
    skerry_cache *cache = event.cache;
    const LayerGeometry &layer = *event.layer;
    skerry_tile made = tile;
    made.place = take_slot(cache, cache->pool, slot_class);
    if (made.place == no_place) return made;
    made.first = tile.first + from;
    made.count = static_cast<uint8_t>(count);
    made.capacity = static_cast<uint8_t>(capacity);
    made.flags = 0;
    uint8_t *key_part = cache->pool.data(made.place);
    uint8_t *value_part = key_part + value_offset(made.key_format, layer.key_dim, capacity);
    float *decoded = e->detail.decoded;
    decode_tile(cache, event.seq, event.index, lane, tile, decoded, nullptr, e->detail.code);
    cache->kernels().append(made.key_format, SKERRY_SIDE_KEY, layer.key_dim, capacity, 0, count, decoded + from * layer.key_dim,
                            layer.key_dim, key_part);
    decode_tile(cache, event.seq, event.index, lane, tile, nullptr, decoded, e->detail.code);
    cache->kernels().append(made.value_format, SKERRY_SIDE_VALUE, layer.value_dim, capacity, 0, count, decoded + from * layer.value_dim,
                            layer.value_dim, value_part);
    return made;
}

// Whether a position that has left the recent region is an anchor: within a span as its mask says, outside of all spans always.
bool is_anchor(const ZoomTables &tables, int64_t position, uint32_t *span) {
    while (*span < tables.span_count && tables.spans[*span].end <= position)
        ++*span;
    if (*span == tables.span_count) return true;
    const TokenSpan &at = tables.spans[*span];
    return position < at.begin || at.anchors.test(static_cast<int32_t>(position - at.begin));
}

// One lane's part: spans to the host, anchors to slots of their own, and what is left of a window that a span has taken from to a new one.
void apply_spans(const Event &event, int32_t head, LaneEvent *e) {
    skerry_cache *cache = event.cache;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &layer = *event.layer;
    const LayerClasses &classes = cache->classes[static_cast<size_t>(event.index)];
    Sequence *seq = event.seq;
    Lane &lane = seq->lane(layer.lane + head);
    ZoomTables &tables = *seq->zoom;
    LaneZoom &zoom = tables.lane(layer.lane + head);
    skerry_tile *tiles = seq->tiles(lane);
    const int64_t boundary = tables.decided;
    uint32_t span = zoom.windows; // spans below lie before every open token
    float *keys = e->rows;
    float *values = keys + coding_tokens(p) * layer.key_dim;

    for (uint32_t s = zoom.windows; s < tables.span_count; ++s) {
        const TokenSpan &here = tables.spans[s];
        if (zoom.windows == zoom.capacity) {
            ++e->counters.details_refused;
            continue;
        }
        e->epoch = epoch_of(event, &lane, static_cast<int32_t>((here.begin - p.sinks) / p.window), e);
        freeze_router_balance(event, layer.lane + head, e);
        span_rows(event, lane, here, e, keys, values);
        const DetailRows rows{keys, values, here.rows(), here.begin};
        zoom_detail(cache, seq, layer, layer.lane + head, e->epoch, rows, e->detail, &e->counters);
        const HostEntry &entry = tables.entries(zoom)[zoom.windows - 1];
        skerry_tile made{};
        made.tier = SKERRY_TIER_HOST;
        made.key_format = entry.key_format;
        made.value_format = entry.value_format;
        const bool held = entry.place != no_place;
        if (!held) ++e->counters.evictions;
        note(event, head, static_cast<int32_t>(s), SKERRY_TIER_FULL, held ? &made : nullptr,
             held ? static_cast<uint64_t>(detail_bytes(p, layer, entry)) : 0, 0);
    }

    int32_t anchors = 0;
    for (uint32_t t = 0; t < lane.tiles; ++t)
        anchors += is_alone(tiles[t]) ? 1 : 0;
    uint32_t n = 0;
    for (uint32_t t = 0; t < lane.tiles; ++t) {
        const skerry_tile tile = tiles[t];
        const bool open = tile.first >= p.sinks && !is_alone(tile);
        if (!open || tile.first >= boundary) {
            e->tiles[n++] = tile;
            continue;
        }
        for (int32_t k = 0; k < tile.count && tile.first + k < boundary; ++k) {
            if (!is_anchor(tables, tile.first + k, &span)) continue;
            if (anchors == event.quota->anchors) continue; // the table of spans is full: what finds no slot is lost
            skerry_tile anchor = copy_tokens(event, lane, tile, k, 1, classes.anchor, 1, e);
            if (anchor.place == no_place) continue;
            ++anchors;
            anchor.flags = tile_alone;
            e->tiles[n++] = anchor;
        }
        --lane.open_windows;
        const int32_t left = static_cast<int32_t>(tile.first + tile.count - boundary);
        if (left > 0) {
            const skerry_tile rest = copy_tokens(event, lane, tile, tile.count - left, left, classes.open, tile.capacity, e);
            if (rest.place != no_place) {
                e->tiles[n++] = rest;
                ++lane.open_windows;
            }
        }
        free_slot(cache, cache->pool, tile.place);
    }
    const size_t words = static_cast<size_t>(p.score_words());
    std::memcpy(tiles, e->tiles, n * sizeof(skerry_tile));
    std::memset(seq->tables.words.data() + lane.offset * words, 0, n * words * sizeof(int64_t)); // nothing is ranked
    lane.tiles = n;
    lane.reserved = n;
}

} // namespace

namespace {

constexpr int32_t group_size = 64; // lanes whose numbers are on the stack at once

// An event of one layer, with the masses of its lanes folded into their scores and the scratch divided.
Event make_event(skerry_cache *cache, Sequence *seq, int32_t index, int64_t length) {
    const LayerGeometry &layer = cache->layers[static_cast<size_t>(index)];
    Event event{cache,
                seq,
                &layer,
                &cache->quotas[static_cast<size_t>(index)],
                &seq->layers[static_cast<size_t>(index)],
                index,
                length,
                0,
                cache->scratch.data(),
                0};
    int64_t entries = 1;
    for (int32_t h = 0; h < layer.kv_heads; ++h) {
        Lane &lane = seq->lane(layer.lane + h);
        lane_fold(cache, seq, lane);
        entries = std::max<int64_t>(entries, lane_entries(cache->policy(), lane));
    }
    event.lane_scratch = event_scratch_bytes(cache->context->device(), cache->policy(), layer, entries);
    return event;
}

// work(i) for every lane of a group. A host's loop that fails must not leave an event half done: the rest is done here.
template <class Work>
void run_lanes(skerry_cache *cache, LaneEvent *lanes, int32_t count, Work &&work) {
    const auto one = [&](int32_t i) {
        work(i);
        *lanes[i].done = true;
    };
    if (cache->context->workers.run(count, one) >= 0) return;
    for (int32_t i = 0; i < count; ++i) {
        if (!*lanes[i].done) one(i);
    }
}

} // namespace

void spans_event(skerry_cache *cache, Sequence *seq, int32_t index, int64_t length) {
    Event event = make_event(cache, seq, index, length);
    const LayerGeometry &layer = *event.layer;
    LaneEvent lanes[group_size];
    for (int32_t first = 0; first < layer.kv_heads; first += group_size) {
        const int32_t count = std::min(group_size, layer.kv_heads - first);
        for (int32_t i = 0; i < count; ++i) {
            lanes[i] = lane_event(event, first + i);
            *lanes[i].done = false;
        }
        run_lanes(cache, lanes, count, [&](int32_t i) { apply_spans(event, first + i, &lanes[i]); });
        for (int32_t i = 0; i < count; ++i)
            add_counters(&cache->step.counters, lanes[i].counters);
    }
    ++cache->step.counters.events;
    ++event.state->events;
    event.state->let_go = std::max(event.state->let_go, length);
    event.state->scored_at_event = event.state->scored;
}

void run_event(skerry_cache *cache, Sequence *seq, int32_t index, int64_t length) {
    const PolicyConfig &p = cache->policy();
    if (p.spans) return spans_event(cache, seq, index, length);
    Event event = make_event(cache, seq, index, length);
    const LayerGeometry &layer = *event.layer;
    const WindowGrid grid{static_cast<uint64_t>(p.sinks), static_cast<uint64_t>(p.window)};
    // The published event runs after the step's own token was appended (qevict.md 3.4).
    const int64_t counted = p.paper() && (p.flags & SKERRY_POLICY_EVICT_FIRST) == 0 ? length + 1 : length;
    event.evictable = static_cast<int64_t>(evictable_windows(grid, static_cast<uint64_t>(counted), static_cast<uint64_t>(p.recent),
                                                             p.paper() ? LocalRule::whole_windows : LocalRule::at_least));
    LayerState &state = *event.state;
    const bool unscored = state.scored == state.scored_at_event;

    LaneEvent lanes[group_size];
    uint64_t before = 0, lost = 0, joined = 0;
    int64_t staying = 0, dropped = 0, fresh = 0;
    WindowTier *shared_targets = nullptr;
    for (int32_t first = 0; first < layer.kv_heads; first += group_size) {
        const int32_t count = std::min(group_size, layer.kv_heads - first);
        for (int32_t i = 0; i < count; ++i) {
            lanes[i] = lane_event(event, first + i);
            *lanes[i].done = false;
            if (unscored && cache->callbacks.scores_wanted != nullptr) {
                list_candidates(event, seq->lane(layer.lane + first + i), &lanes[i]);
                ask_scores(event, &lanes[i], first + i);
                lanes[i].count = 0;
            }
        }
        if (p.selection == SKERRY_SELECTION_PER_LAYER && first == 0) {
            // One set for all heads, ranked by the mean over them.
            list_candidates(event, seq->lane(layer.lane), &lanes[0]);
            for (int32_t h = 1; h < layer.kv_heads; ++h) {
                const Lane &lane = seq->lane(layer.lane + h);
                const skerry_tile *tiles = seq->tiles(lane);
                uint32_t c = 0;
                for (uint32_t t = 0; t < lane.tiles && c < lanes[0].count;) {
                    const WindowSpan span = window_at(p, tiles, t, lane.tiles);
                    t = span.end;
                    if (span.window < 0) continue;
                    WindowCandidate &candidate = lanes[0].candidates[c++];
                    if (state.scored != 0)
                        candidate.rank = add_mass(candidate.rank, window_rank(cache, seq, state, lane, span.begin, length));
                }
            }
            for (uint32_t c = 0; c < lanes[0].count; ++c) {
                lanes[0].candidates[c].rank = mean_over_heads(lanes[0].candidates[c].rank, static_cast<uint32_t>(layer.kv_heads));
            }
            route(event, &lanes[0]);
            shared_targets = lanes[0].targets;
        }
        run_lanes(cache, lanes, count, [&](int32_t i) {
            LaneEvent &e = lanes[i];
            if (p.selection == SKERRY_SELECTION_PER_LAYER) {
                if (first + i > 0) {
                    list_candidates(event, seq->lane(layer.lane + first + i), &e);
                    std::memcpy(e.targets, shared_targets, e.count * sizeof(WindowTier));
                }
            } else {
                list_candidates(event, seq->lane(layer.lane + first + i), &e);
                route(event, &e);
            }
            apply(event, first + i, &e);
        });
        for (int32_t i = 0; i < count; ++i) {
            const LaneEvent &e = lanes[i];
            add_counters(&cache->step.counters, e.counters);
            before += e.before;
            lost += e.lost;
            joined += e.joined;
            staying = add_mass(staying, e.staying);
            dropped = add_mass(dropped, e.dropped);
            fresh = add_mass(fresh, e.fresh_mass);
            state.lir_eligible += e.lir_eligible;
            state.lir_rescued += e.lir_rescued;
        }
    }
    ++cache->step.counters.events;
    ++state.events;
    const double both = static_cast<double>(before + joined);
    if (state.events > 1 && both > 0) state.churn += static_cast<double>(lost + joined) / both;
    const double missed = fmm_online_event(&state.missed_state, staying, dropped, fresh);
    state.missed += (missed - state.missed) / static_cast<double>(state.events);
    state.routed_windows = std::max(state.routed_windows, event.evictable);
    state.let_go = std::max(state.let_go, length);
    state.scored_at_event = state.scored;
}

} // namespace skerry
