#include <algorithm>
#include <cstring>

#include "base/hash.hpp"
#include "codec/epoch.hpp"
#include "codec/error_code.hpp"
#include "step/memory.hpp"
#include "step/zoom.hpp"

namespace skerry {

namespace {

// Entries that a lane of a new sequence starts with.
uint32_t first_capacity(const skerry_cache *cache, const LaneQuota &q) {
    return static_cast<uint32_t>(cache->plan.bounded ? q.entries() : std::max(q.sink_tiles + 4 * q.open_tiles, 16));
}

void size_tables(skerry_cache *cache, LaneTables &t, size_t entries, size_t query_floats, uint64_t epoch_bytes) {
    const PolicyConfig &p = cache->policy();
    t.tiles.reserve(entries);
    t.tiles.resize_uninitialised(entries);
    if (p.routes()) {
        const size_t words = entries * static_cast<size_t>(p.score_words());
        t.words.reserve(words);
        t.words.resize(words);
    }
    if (p.quantises()) {
        t.dormant.reserve(entries);
        t.dormant.resize_uninitialised(entries);
        std::memset(t.dormant.data(), 0xff, entries * sizeof(uint32_t));
    }
    if (p.keeps_exact()) {
        t.exact.reserve(entries);
        t.exact.resize_uninitialised(entries);
        std::memset(t.exact.data(), 0xff, entries * sizeof(uint32_t));
    }
    if (p.uses_epochs()) {
        t.query_squares.reserve(query_floats);
        t.query_squares.resize(query_floats);
        t.epochs.reserve(epoch_bytes);
        t.epochs.resize(epoch_bytes);
    }
}

} // namespace

Sequence *sequence_make(skerry_cache *cache) {
    Owned<Sequence> seq = make_owned<Sequence>(cache->allocator, Owner::tables, cache->allocator);
    const PolicyConfig &p = cache->policy();
    seq->tables.lanes.reserve(static_cast<size_t>(cache->lanes));
    seq->tables.lanes.resize(static_cast<size_t>(cache->lanes));
    seq->layers.reserve(cache->layers.size());
    seq->layers.resize(cache->layers.size());
    size_t entries = 0;
    size_t floats = 0;
    uint64_t epoch_bytes = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const LaneQuota &q = cache->quotas[i];
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            Lane &lane = seq->lane(layer.lane + h);
            lane.offset = static_cast<uint32_t>(entries);
            lane.capacity = first_capacity(cache, q);
            lane.epoch_capacity = static_cast<uint32_t>(q.epochs);
            lane.epoch_offset = epoch_bytes;
            lane.query_offset = floats;
            entries += lane.capacity;
            epoch_bytes += static_cast<uint64_t>(q.epochs) * epoch_table_bytes(layer);
            floats += static_cast<size_t>(layer.key_dim);
        }
    }
    size_tables(cache, seq->tables, entries, floats, epoch_bytes);
    // The undo copy holds what a step may change before it is committed.
    seq->undo.lanes.reserve(static_cast<size_t>(cache->lanes));
    seq->undo.lanes.resize(static_cast<size_t>(cache->lanes));
    seq->undo_layers.reserve(cache->layers.size());
    seq->undo_layers.resize(cache->layers.size());
    seq->saved.reserve(cache->layers.size());
    seq->saved.resize(cache->layers.size());
    if (p.routes()) {
        size_tables(cache, seq->undo, entries, floats, epoch_bytes);
        seq->pending.reserve(entries);
        seq->pending.resize(entries);
    }
    if (p.zooms()) zoom_make(cache, seq.get());
    if (p.sekv_paper()) seq->paper = make_owned<PaperState>(cache->allocator, Owner::tables, cache->allocator);
    return seq.detach();
}

namespace {

// New arrays for lanes of the given capacities; offsets and capacities are those of `made.tables.lanes`.
NewTables make_tables(skerry_cache *cache, const Sequence *seq, const Buffer<uint32_t> &capacities, const Buffer<uint32_t> &epochs) {
    NewTables made(cache->allocator);
    const PolicyConfig &p = cache->policy();
    made.tables.lanes.reserve(static_cast<size_t>(cache->lanes));
    made.tables.lanes.resize(static_cast<size_t>(cache->lanes));
    size_t entries = 0;
    uint64_t epoch_bytes = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const size_t index = static_cast<size_t>(layer.lane + h);
            Lane &lane = made.tables.lanes[index];
            lane.offset = static_cast<uint32_t>(entries);
            lane.capacity = capacities[index];
            lane.epoch_capacity = epochs[index];
            lane.epoch_offset = epoch_bytes;
            lane.query_offset = seq->tables.lanes[index].query_offset;
            entries += lane.capacity;
            epoch_bytes += lane.epoch_capacity * static_cast<uint64_t>(epoch_table_bytes(layer));
        }
    }
    size_tables(cache, made.tables, entries, seq->tables.query_squares.size(), epoch_bytes);
    if (p.routes()) {
        size_tables(cache, made.undo, entries, seq->tables.query_squares.size(), epoch_bytes);
        made.pending.reserve(entries);
        made.pending.resize(entries);
    }
    return made;
}

} // namespace

NewTables prepare_tables(skerry_cache *cache, const Sequence *seq, const CachePlan &plan) {
    Buffer<uint32_t> capacities(cache->allocator, Owner::step);
    Buffer<uint32_t> epochs(cache->allocator, Owner::step);
    capacities.resize(static_cast<size_t>(cache->lanes));
    epochs.resize(static_cast<size_t>(cache->lanes));
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const LaneQuota q = plan.quota(layer);
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const size_t index = static_cast<size_t>(layer.lane + h);
            const Lane &lane = seq->tables.lanes[index];
            capacities[index] = plan.bounded ? static_cast<uint32_t>(q.entries())
                                             : std::max(lane.capacity, static_cast<uint32_t>(q.sink_tiles + 4 * q.open_tiles));
            epochs[index] = static_cast<uint32_t>(q.epochs);
        }
    }
    return make_tables(cache, seq, capacities, epochs);
}

namespace {

void fill_tables(const skerry_cache *cache, const LaneTables &old, LaneTables &fresh) {
    const PolicyConfig &p = cache->policy();
    const size_t words = p.routes() ? static_cast<size_t>(p.score_words()) : 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const size_t index = static_cast<size_t>(layer.lane + h);
            const Lane &from = old.lanes[index];
            Lane &to = fresh.lanes[index];
            const size_t count = from.reserved;
            std::memcpy(fresh.tiles.data() + to.offset, old.tiles.data() + from.offset, count * sizeof(skerry_tile));
            if (words != 0) {
                std::memcpy(fresh.words.data() + to.offset * words, old.words.data() + from.offset * words,
                            count * words * sizeof(int64_t));
            }
            if (p.quantises()) std::memcpy(fresh.dormant.data() + to.offset, old.dormant.data() + from.offset, count * sizeof(uint32_t));
            if (p.keeps_exact()) std::memcpy(fresh.exact.data() + to.offset, old.exact.data() + from.offset, count * sizeof(uint32_t));
            if (p.uses_epochs()) {
                std::memcpy(fresh.epochs.data() + to.epoch_offset, old.epochs.data() + from.epoch_offset,
                            from.epochs * static_cast<size_t>(epoch_table_bytes(layer)));
            }
            to.tiles = from.tiles;
            to.reserved = from.reserved;
            to.epochs = from.epochs;
            to.open_windows = from.open_windows;
            to.period = from.period;
        }
    }
    if (p.uses_epochs()) std::memcpy(fresh.query_squares.data(), old.query_squares.data(), old.query_squares.size() * sizeof(float));
}

void swap_tables(skerry_cache *cache, Sequence *seq, NewTables &made) {
    LaneTables &old = seq->tables;
    LaneTables &fresh = made.tables;
    old.lanes.swap(fresh.lanes);
    old.tiles.swap(fresh.tiles);
    old.words.swap(fresh.words);
    old.dormant.swap(fresh.dormant);
    old.exact.swap(fresh.exact);
    old.epochs.swap(fresh.epochs);
    old.query_squares.swap(fresh.query_squares);
    if (!cache->policy().routes()) return;
    seq->undo.tiles.swap(made.undo.tiles);
    seq->undo.words.swap(made.undo.words);
    seq->undo.dormant.swap(made.undo.dormant);
    seq->undo.exact.swap(made.undo.exact);
    seq->undo.epochs.swap(made.undo.epochs);
    seq->undo.query_squares.swap(made.undo.query_squares);
    seq->pending.swap(made.pending);
}

} // namespace

void adopt_tables(skerry_cache *cache, Sequence *seq, NewTables &&made) {
    fill_tables(cache, seq->tables, made.tables);
    swap_tables(cache, seq, made);
}

bool sequence_reserve(skerry_cache *cache, const Sequence *seq, uint32_t more, NewTables *out) {
    if (cache->plan.bounded) return false;
    bool enough = true;
    for (const Lane &lane : seq->tables.lanes)
        enough = enough && lane.reserved + more <= lane.capacity;
    if (enough) return false;
    Buffer<uint32_t> capacities(cache->allocator, Owner::step);
    Buffer<uint32_t> epochs(cache->allocator, Owner::step);
    for (const Lane &lane : seq->tables.lanes) {
        const uint32_t needed = lane.reserved + more;
        capacities.push_back(needed <= lane.capacity ? lane.capacity : needed + needed / 2);
        epochs.push_back(lane.epoch_capacity);
    }
    *out = make_tables(cache, seq, capacities, epochs);
    return true;
}

Status sequence_find(skerry_cache *cache, skerry_seq id, Sequence **out, skerry_error *error, int32_t index) {
    Sequence **found = cache->sequences.find(id.bits);
    if (found == nullptr) {
        return fail(error, SKERRY_ERROR_STALE_ID, SKERRY_SUBJECT_SEQUENCE, index, static_cast<int64_t>(id.bits), 0,
                    "no sequence of this cache has the id %llu", static_cast<unsigned long long>(id.bits));
    }
    *out = *found;
    return SKERRY_OK;
}

namespace {

Status check_room(skerry_cache *cache, skerry_error *error) {
    if (cache->step.open) {
        return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 1, 0, "a step is open on this cache");
    }
    const int64_t live = static_cast<int64_t>(cache->sequences.size());
    if (live >= cache->plan.info.max_sequences) {
        return fail(error, SKERRY_ERROR_TIER_FULL, SKERRY_SUBJECT_SEQUENCE, -1, live + 1, cache->plan.info.max_sequences,
                    "the cache holds %d sequences, its max_sequences", cache->plan.info.max_sequences);
    }
    return SKERRY_OK;
}

} // namespace

namespace {

// An empty sequence that is not in the handle table yet: a spare one under a budget. The caller has checked that there is room; if it gives
// up, a spare one goes back by close_sequence.
Owned<Sequence> open_sequence(skerry_cache *cache) {
    Sequence *seq = cache->plan.bounded && !cache->spare.empty() ? cache->spare.pop_back() : sequence_make(cache);
    return Owned<Sequence>(cache->allocator, Owner::tables, seq);
}

// Empties a sequence whose slots were released.
void clear_sequence(Sequence *seq) {
    for (Lane &lane : seq->tables.lanes) {
        lane.tiles = lane.reserved = lane.epochs = lane.open_windows = lane.period = 0;
    }
    for (LayerState &state : seq->layers)
        state = LayerState{};
    for (float &value : seq->tables.query_squares)
        value = 0;
    seq->length = 0;
    seq->prompt_length = -1;
    seq->prefilling = false;
    seq->in_step = false;
    seq->surprisal = SurprisalMoments{};
}

void close_sequence(skerry_cache *cache, Owned<Sequence> seq) {
    if (!cache->plan.bounded || cache->spare.size() + cache->sequences.size() >= static_cast<size_t>(cache->plan.info.max_sequences))
        return;
    clear_sequence(seq.get());
    cache->spare.push_back(seq.detach());
}

} // namespace

Status sequence_create(skerry_cache *cache, skerry_seq *out, skerry_error *error) {
    if (const Status status = check_room(cache, error); status < 0) return status;
    Owned<Sequence> made = open_sequence(cache);
    made->id = cache->sequences.insert(made.get());
    out->bits = made->id;
    static_cast<void>(made.detach());
    return SKERRY_OK;
}

void lane_release(skerry_cache *cache, LaneTables &tables, Lane &lane) {
    const PolicyConfig &p = cache->policy();
    const skerry_tile *tiles = tables.tiles.data() + lane.offset;
    for (uint32_t t = 0; t < lane.reserved;) {
        const WindowSpan span = window_at(p, tiles, t, lane.reserved);
        cache->pool.release(tiles[t].place);
        if (!tables.dormant.empty()) {
            uint32_t &dormant = tables.dormant[lane.offset + t];
            if (dormant != no_place) cache->pool.release(dormant);
            dormant = no_place;
        }
        if (!tables.exact.empty()) {
            uint32_t &exact = tables.exact[lane.offset + t];
            if (exact != no_place) cache->exact_pool.release(exact);
            exact = no_place;
        }
        t = span.end;
    }
    lane.tiles = lane.reserved = 0;
    lane.open_windows = 0;
}

void sequence_destroy(skerry_cache *cache, Sequence *seq) {
    zoom_clear(cache, seq);
    memory_clear(cache, seq);
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            lane_release(cache, seq->tables, seq->lane(layer.lane + h));
        }
    }
    cache->sequences.erase(seq->id);
    close_sequence(cache, Owned<Sequence>(cache->allocator, Owner::tables, seq));
}

namespace {

// First position that a sliding window has not let go of, `length` tokens being seen; 0: none is gone.
int64_t kept_from(const PolicyConfig &p, const LayerGeometry &layer, int64_t length) {
    const int64_t windows = (length - layer.sliding_window + 1 - p.sinks) / p.window;
    return layer.sliding_window == 0 || windows <= 0 ? 0 : p.sinks + windows * p.window;
}

// Smallest legal length once every lane's complete run starts at `from` or later, with `length` tokens, when sliding windows will have let
// go as of `seen` tokens (-1: as they have by now).
int64_t lowest_length(const skerry_cache *cache, const Sequence *seq, int64_t from, int64_t length, int64_t seen) {
    const PolicyConfig &p = cache->policy();
    if (seq->is_memory()) return seq->paper->memory->tokens; // of what came behind nothing is held
    // What was cut into anchors and spans, the open span included, stays cut.
    int64_t lowest = p.spans && seq->zoom->segments.next > p.sinks ? seq->zoom->segments.next : 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const int64_t kept = kept_from(p, layer, std::max(seen, seq->layers[i].let_go));
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const Lane &lane = seq->lane(layer.lane + h);
            const skerry_tile *tiles = seq->tiles(lane);
            int64_t first = seq->length; // of the complete run that ends the sequence
            for (uint32_t t = lane.tiles; t > 0; --t) {
                const skerry_tile &tile = tiles[t - 1];
                if (tile.first + tile.count != first || !is_full_format(tile.key_format) || (tile.flags & tile_recovered) != 0) break;
                first = tile.first;
            }
            // Where nothing is routed only a sliding window makes gaps.
            lowest = std::max(lowest, p.routes() || layer.sliding_window == 0 ? std::max(first, from) : int64_t{0});
            // What the next query sees must not have been let go.
            if (kept > 0) lowest = std::max(lowest, std::min<int64_t>(kept + layer.sliding_window - 1, length));
        }
    }
    return lowest;
}

} // namespace

int64_t sequence_lowest_truncate(const skerry_cache *cache, const Sequence *seq) { return lowest_length(cache, seq, 0, seq->length, -1); }

bool sequence_can_truncate(const skerry_cache *cache, const Sequence *seq, int64_t length, int64_t ahead) {
    if (length == 0) return true;
    if (ahead == 0) return length >= sequence_lowest_truncate(cache, seq);
    const PolicyConfig &p = cache->policy();
    const int64_t end = seq->length + ahead;
    if (seq->paper) return length >= (seq->is_memory() ? seq->paper->memory->tokens : end);
    const int64_t next = sequence_next_event(cache, seq);
    const bool prompt_may_end = p.prefill == SKERRY_PREFILL_WHOLE && p.routes() && (seq->prefilling || seq->prompt_length < 0);
    const bool moves = (next >= 0 && next <= end) || prompt_may_end;
    // An event may move whatever has left the recent region by then.
    const int64_t routed = p.paper() ? std::max<int64_t>(0, (end + 1 - p.sinks + p.window - 1) / p.window - p.recent / p.window)
                                     : std::max<int64_t>(0, (end - p.sinks - p.recent) / p.window);
    int64_t from = moves && routed > 0 ? p.sinks + routed * p.window : 0;
    if (p.spans && moves) from = std::max(from, end - p.recent); // spans end anywhere
    return length >= lowest_length(cache, seq, from, end, moves || !p.routes() ? end : -1);
}

namespace {

// Cuts a lane to `length` tokens. The window that is cut must not be shared any more.
void cut_lane(skerry_cache *cache, Sequence *seq, Lane &lane, int64_t length) {
    const PolicyConfig &p = cache->policy();
    skerry_tile *tiles = seq->tiles(lane);
    while (lane.tiles > 0) {
        const uint32_t last = lane.tiles - 1;
        if (tiles[last].first + tiles[last].count <= length) break;
        if (tiles[last].first < length) {
            tiles[last].count = static_cast<uint8_t>(length - tiles[last].first);
            break;
        }
        const int32_t window = window_of_position(p, tiles[last].first);
        const bool alone = is_alone(tiles[last]);
        const bool only = last == 0 || alone || is_alone(tiles[last - 1]) || window_of_position(p, tiles[last - 1].first) != window;
        if (only) {
            cache->pool.release(tiles[last].place);
            if (window >= 0 && !alone) --lane.open_windows;
            if (!seq->tables.dormant.empty() && seq->tables.dormant[lane.offset + last] != no_place) {
                cache->pool.release(seq->tables.dormant[lane.offset + last]);
                seq->tables.dormant[lane.offset + last] = no_place;
            }
            if (!seq->tables.exact.empty() && seq->tables.exact[lane.offset + last] != no_place) {
                cache->exact_pool.release(seq->tables.exact[lane.offset + last]);
                seq->tables.exact[lane.offset + last] = no_place;
            }
        }
        if (!seq->pending.empty()) seq->pending[lane.offset + last] = 0;
        if (p.routes()) {
            const size_t words = static_cast<size_t>(p.score_words());
            std::memset(seq->tables.words.data() + (lane.offset + last) * words, 0, words * sizeof(int64_t));
        }
        --lane.tiles;
    }
    lane.reserved = lane.tiles;
}

// First tile of the window (or sinks) that `length` cuts in two, or UINT32_MAX.
uint32_t cut_window(const PolicyConfig &p, const Sequence *seq, const Lane &lane, int64_t length) {
    const skerry_tile *tiles = seq->tiles(lane);
    for (uint32_t t = 0; t < lane.tiles;) {
        const WindowSpan span = window_at(p, tiles, t, lane.tiles);
        if (tiles[span.end - 1].first + tiles[span.end - 1].count >= length) {
            if (is_alone(tiles[t])) return UINT32_MAX; // a token is never cut
            const int64_t end = span.window < 0 ? p.sinks : p.sinks + static_cast<int64_t>(span.window + 1) * p.window;
            return tiles[t].first < length && length < end ? t : UINT32_MAX;
        }
        t = span.end;
    }
    return UINT32_MAX;
}

// Gives a lane its own copy of the slot that starts at tile `t`. False: no free slot.
bool own_slot(skerry_cache *cache, Sequence *seq, Lane &lane, uint32_t t) {
    const PolicyConfig &p = cache->policy();
    skerry_tile *tiles = seq->tiles(lane);
    const uint32_t old = tiles[t].place;
    const int32_t slot_class = cache->pool.class_of(old);
    const uint32_t place = cache->pool.take(slot_class);
    if (place == no_place) return false;
    std::memcpy(cache->pool.data(place), cache->pool.data(old), cache->pool.slot_bytes(slot_class));
    const WindowSpan span = window_at(p, tiles, t, std::max(lane.tiles, lane.reserved));
    for (uint32_t k = span.begin; k < span.end; ++k)
        tiles[k].place = place + (tiles[k].place - old);
    cache->pool.release(old);
    return true;
}

// Makes every lane's cut window the sequence's own; grows an unlimited pool. False: the pool is full.
bool own_cut_windows(skerry_cache *cache, Sequence *seq, int64_t length) {
    const PolicyConfig &p = cache->policy();
    if (!cache->plan.bounded) {
        Buffer<uint64_t> needed(cache->allocator, Owner::step);
        needed.resize(static_cast<size_t>(cache->pool.class_count()));
        for (Lane &lane : seq->tables.lanes) {
            const uint32_t t = cut_window(p, seq, lane, length);
            if (t != UINT32_MAX) ++needed[static_cast<size_t>(cache->pool.class_of(seq->tiles(lane)[t].place))];
        }
        for (size_t k = 0; k < needed.size(); ++k) {
            const int32_t slot_class = static_cast<int32_t>(k);
            needed[k] -= std::min(needed[k], cache->pool.available(slot_class));
        }
        cache->pool.grow(needed.span());
    }
    for (Lane &lane : seq->tables.lanes) {
        const uint32_t t = cut_window(p, seq, lane, length);
        if (t != UINT32_MAX && cache->pool.references(seq->tiles(lane)[t].place) > 1 && !own_slot(cache, seq, lane, t)) return false;
    }
    return true;
}

void set_length(skerry_cache *cache, Sequence *seq, int64_t length) {
    if (length == 0) {
        zoom_clear(cache, seq);
        memory_clear(cache, seq);
        clear_sequence(seq);
        return;
    }
    const PolicyConfig &p = cache->policy();
    const int64_t held = p.sinks + p.recent;
    seq->length = length;
    zoom_truncate(cache, seq, length);
    if (seq->prompt_length > length) seq->prompt_length = -1;
    for (LayerState &state : seq->layers) {
        state.routed = std::min(state.routed, length);
        state.routed_windows = std::min<int64_t>(state.routed_windows, length <= held ? 0 : (length - held) / p.window + 1);
    }
}

Status check_length(skerry_cache *cache, const Sequence *seq, int64_t length, skerry_error *error) {
    const int64_t lowest = sequence_lowest_truncate(cache, seq);
    if (length < 0 || length > seq->length || (length < lowest && length != 0)) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_POSITION, -1, length, lowest,
                    "length %lld: legal are 0 and %lld to %lld, where every token is still there exactly", static_cast<long long>(length),
                    static_cast<long long>(lowest), static_cast<long long>(seq->length));
    }
    return SKERRY_OK;
}

} // namespace

Status sequence_truncate(skerry_cache *cache, Sequence *seq, int64_t length, skerry_error *error) {
    if (cache->step.open) return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 1, 0, "a step is open on this cache");
    if (const Status status = check_length(cache, seq, length, error); status < 0) return status;
    if (!own_cut_windows(cache, seq, length)) {
        return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1, length, 0,
                    "no free slot for this sequence's own copy of the window that is cut");
    }
    for (Lane &lane : seq->tables.lanes)
        cut_lane(cache, seq, lane, length);
    set_length(cache, seq, length);
    return SKERRY_OK;
}

Status sequence_fork(skerry_cache *cache, Sequence *parent, int64_t length, skerry_seq *out, skerry_error *error) {
    if (const Status status = check_room(cache, error); status < 0) return status;
    if (length == -1) length = parent->length;
    if (const Status status = check_length(cache, parent, length, error); status < 0) return status;
    const PolicyConfig &p = cache->policy();
    Owned<Sequence> made = open_sequence(cache);
    Sequence *child = made.get();
    bool fits = true;
    for (size_t i = 0; i < parent->tables.lanes.size(); ++i) {
        const Lane &from = parent->tables.lanes[i];
        const Lane &to = child->tables.lanes[i];
        fits = fits && from.tiles <= to.capacity && from.epochs <= to.epoch_capacity;
    }
    if (fits) {
        fill_tables(cache, parent->tables, child->tables);
    } else {
        Buffer<uint32_t> capacities(cache->allocator, Owner::step);
        Buffer<uint32_t> epochs(cache->allocator, Owner::step);
        for (size_t i = 0; i < parent->tables.lanes.size(); ++i) {
            capacities.push_back(std::max(parent->tables.lanes[i].capacity, child->tables.lanes[i].capacity));
            epochs.push_back(std::max(parent->tables.lanes[i].epoch_capacity, child->tables.lanes[i].epoch_capacity));
        }
        NewTables larger = make_tables(cache, parent, capacities, epochs);
        fill_tables(cache, parent->tables, larger.tables);
        swap_tables(cache, child, larger);
    }
    for (Lane &to : child->tables.lanes) {
        const skerry_tile *tiles = child->tiles(to);
        for (uint32_t t = 0; t < to.tiles;) {
            const WindowSpan span = window_at(p, tiles, t, to.tiles);
            cache->pool.retain(tiles[t].place);
            if (p.quantises() && child->tables.dormant[to.offset + t] != no_place) cache->pool.retain(child->tables.dormant[to.offset + t]);
            if (p.keeps_exact() && child->tables.exact[to.offset + t] != no_place)
                cache->exact_pool.retain(child->tables.exact[to.offset + t]);
            t = span.end;
        }
    }
    zoom_fork(cache, parent, child);
    std::memcpy(child->layers.data(), parent->layers.data(), parent->layers.size() * sizeof(LayerState));
    child->length = parent->length;
    child->prompt_length = parent->prompt_length;
    child->prefilling = parent->prefilling;
    child->surprisal = parent->surprisal;
    try {
        memory_fork(cache, parent, child);
        fits = own_cut_windows(cache, child, length);
        if (fits) child->id = cache->sequences.insert(child);
    } catch (...) {
        zoom_clear(cache, child);
        memory_clear(cache, child);
        for (Lane &lane : child->tables.lanes)
            lane_release(cache, child->tables, lane);
        close_sequence(cache, std::move(made));
        throw;
    }
    if (!fits) {
        zoom_clear(cache, child);
        memory_clear(cache, child);
        for (Lane &lane : child->tables.lanes)
            lane_release(cache, child->tables, lane);
        close_sequence(cache, std::move(made));
        return fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1, length, 0, "no free slot for the fork's own open window");
    }
    for (Lane &lane : child->tables.lanes)
        cut_lane(cache, child, lane, length);
    set_length(cache, child, length);
    out->bits = child->id;
    static_cast<void>(made.detach());
    return SKERRY_OK;
}

int64_t sequence_next_event(const skerry_cache *cache, const Sequence *seq) {
    const PolicyConfig &p = cache->policy();
    if (!p.routes()) return -1;
    if (p.prefill == SKERRY_PREFILL_WHOLE && (seq->prefilling || seq->prompt_length < 0)) return -1;
    if (p.paper()) return seq->length + (p.window - (seq->length - seq->prompt_length) % p.window);
    return next_event_after(p, seq->length);
}

uint64_t window_bytes(const skerry_cache *cache, const LaneTables &tables, const Lane &lane, const WindowSpan &span) {
    const skerry_tile &tile = tables.tiles[lane.offset + span.begin];
    uint64_t bytes = cache->pool.slot_bytes(cache->pool.class_of(tile.place));
    if (!tables.dormant.empty() && tables.dormant[lane.offset + span.begin] != no_place) {
        bytes += cache->pool.slot_bytes(cache->pool.class_of(tables.dormant[lane.offset + span.begin]));
    }
    return bytes;
}

namespace {

// A window's detail on the host, or nullptr.
const HostEntry *detail_of(const Sequence *seq, int32_t lane, int64_t window) {
    if (!seq->zoom || window < 0) return nullptr;
    const LaneZoom &zoom = seq->zoom->lane(lane);
    if (window >= zoom.windows) return nullptr;
    const HostEntry &entry = seq->zoom->entries(zoom)[window];
    return entry.place != no_place ? &entry : nullptr;
}

// Visits the sinks, windows, windows that are on the host alone, and runs of evicted positions of a lane: visit(begin, end, span or
// nullptr, detail or nullptr).
template <class Visit>
void for_each_range(const skerry_cache *cache, const Sequence *seq, int32_t lane_index, Visit &&visit) {
    const PolicyConfig &p = cache->policy();
    const Lane &lane = seq->lane(lane_index);
    const skerry_tile *tiles = seq->tiles(lane);
    const WindowSpan *const none = nullptr;
    const auto absent = [&](int64_t from, int64_t to) {
        while (from < to) {
            int32_t unit = seq->zoom ? zoom_unit_at(cache, seq, from) : -1;
            const HostEntry *detail = detail_of(seq, lane_index, unit);
            int64_t end = to;
            if (detail != nullptr) {
                end = zoom_unit(cache, seq, unit).end;
            } else if (seq->zoom) {
                // What found the host full, and anchors that found no slot: one run of evicted positions.
                end = from;
                do {
                    end = unit >= 0 && !p.spans ? zoom_unit(cache, seq, unit).end : end + 1;
                    unit = zoom_unit_at(cache, seq, end);
                } while (end < to && detail_of(seq, lane_index, unit) == nullptr);
            }
            end = std::min(end, to);
            visit(from, end, none, detail);
            from = end;
        }
    };
    int64_t position = 0;
    for (uint32_t t = 0; t < lane.tiles;) {
        const WindowSpan span = window_at(p, tiles, t, lane.tiles);
        absent(position, tiles[t].first);
        position = tiles[span.end - 1].first + tiles[span.end - 1].count;
        visit(static_cast<int64_t>(tiles[t].first), position, &span, p.spans ? nullptr : detail_of(seq, lane_index, span.window));
        t = span.end;
    }
    absent(position, seq->length);
}

double rank_to_mass(const skerry_cache *cache, int64_t rank) {
    return cache->scores.rule == ScoreRule::age_normalised ? static_cast<double>(rank) * 0x1p-60 : from_mass(rank);
}

// What a window is ranked by: one head's value, or the mean over a layer whose heads share one selection.
int64_t selection_rank(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, const LayerState &state,
                       const Lane &lane, uint32_t entry) {
    if (cache->policy().selection == SKERRY_SELECTION_PER_HEAD) return window_rank(cache, seq, state, lane, entry, seq->length);
    int64_t sum = 0;
    for (int32_t h = 0; h < layer.kv_heads; ++h)
        sum = add_mass(sum, window_rank(cache, seq, state, seq->lane(layer.lane + h), entry, seq->length));
    return mean_over_heads(sum, static_cast<uint32_t>(layer.kv_heads));
}

} // namespace

void sequence_ranges(skerry_cache *cache, const Sequence *seq, int32_t layer, int32_t head, skerry_range *ranges, int32_t capacity,
                     int32_t *needed) {
    const LayerGeometry &geometry = cache->layers[static_cast<size_t>(layer)];
    if (seq->is_memory()) {
        memory_list(cache, seq, geometry, head, ranges, capacity, needed);
        return;
    }
    const Lane &lane = seq->lane(geometry.lane + head);
    const LayerState &state = seq->layers[static_cast<size_t>(geometry.source)];
    const LaneZoom *zoom = seq->zoom ? &seq->zoom->lane(geometry.lane + head) : nullptr;
    int32_t count = 0;
    for_each_range(cache, seq, geometry.lane + head, [&](int64_t begin, int64_t end, const WindowSpan *span, const HostEntry *detail) {
        if (count < capacity) {
            skerry_range &range = ranges[count];
            range = skerry_range{};
            range.begin = begin;
            range.end = end;
            range.tier = SKERRY_TIER_EVICTED;
            if (detail != nullptr) {
                range.tier = SKERRY_TIER_HOST;
                range.key_format = detail->key_format;
                range.value_format = detail->value_format;
                range.flags |= SKERRY_RANGE_DETAIL | error_units(detail->error) << SKERRY_DETAIL_ERROR_SHIFT;
                if (cache->host.references(detail->place) > 1) range.flags |= SKERRY_RANGE_SHARED;
                const int32_t *chosen = seq->zoom->current(*zoom);
                if (std::binary_search(chosen, chosen + zoom->current, zoom_unit_at(cache, seq, begin))) range.flags |= SKERRY_RANGE_ZOOMED;
            }
            if (span != nullptr) {
                const skerry_tile &tile = seq->tiles(lane)[span->begin];
                range.tier = tile.tier;
                range.key_format = tile.key_format;
                range.value_format = tile.value_format;
                if ((tile.flags & tile_recovered) != 0) range.flags |= SKERRY_RANGE_RECOVERED;
                if (cache->pool.references(tile.place) > 1) range.flags |= SKERRY_RANGE_SHARED;
                if (!seq->tables.dormant.empty() && seq->tables.dormant[lane.offset + span->begin] != no_place) {
                    range.flags |= SKERRY_RANGE_LEDGERED;
                }
                if (!seq->tables.exact.empty() && seq->tables.exact[lane.offset + span->begin] != no_place) {
                    range.flags |= SKERRY_RANGE_EXACT;
                }
                range.bytes = window_bytes(cache, seq->tables, lane, *span);
                if (span->window >= 0 && cache->policy().routes()) {
                    range.score = rank_to_mass(cache, selection_rank(cache, seq, geometry, state, lane, span->begin));
                }
            }
        }
        ++count;
    });
    *needed = count;
}

void sequence_info(skerry_cache *cache, const Sequence *seq, skerry_seq_info *info) {
    const PolicyConfig &p = cache->policy();
    info->surprisal_tokens = seq->surprisal.count;
    info->surprisal_mean = seq->surprisal.mean;
    info->surprisal_variance = seq->surprisal.variance();
    info->flags = seq->prefilling ? static_cast<uint32_t>(SKERRY_SEQ_PREFILLING) : 0u;
    info->length_tokens = seq->length;
    info->prefill_tokens = seq->prompt_length;
    info->next_event_position = sequence_next_event(cache, seq);
    info->lowest_truncate = sequence_lowest_truncate(cache, seq);
    info->full_tokens = info->quantised_tokens = info->evicted_tokens = info->host_tokens = 0;
    info->host_bytes = 0;
    info->used_bytes = info->charged_bytes = info->exact_bytes = 0;
    if (seq->is_memory()) {
        memory_info(cache, seq, info);
        return;
    }
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const Lane &lane = seq->lane(layer.lane + h);
            for (uint32_t w = 0; seq->zoom && w < seq->zoom->lane(layer.lane + h).windows; ++w) {
                const HostEntry &entry = seq->zoom->entries(seq->zoom->lane(layer.lane + h))[w];
                if (entry.place != no_place) info->host_bytes += detail_bytes(p, layer, entry);
            }
            for_each_range(cache, seq, layer.lane + h, [&](int64_t begin, int64_t end, const WindowSpan *span, const HostEntry *detail) {
                if (span == nullptr) {
                    (detail != nullptr ? info->host_tokens : info->evicted_tokens) += end - begin;
                    return;
                }
                const skerry_tile &tile = seq->tiles(lane)[span->begin];
                (tile.tier == SKERRY_TIER_FULL ? info->full_tokens : info->quantised_tokens) += end - begin;
                info->used_bytes += window_bytes(cache, seq->tables, lane, *span);
                if (!seq->tables.exact.empty() && seq->tables.exact[lane.offset + span->begin] != no_place) {
                    info->exact_bytes += cache->quotas[i].open_slot_bytes;
                }
                if (p.paper()) {
                    const int32_t tokens = static_cast<int32_t>(end - begin);
                    info->charged_bytes +=
                        tile.tier == SKERRY_TIER_FULL
                            ? part_bytes(tile.key_format, SKERRY_SIDE_KEY, layer.key_dim, tokens) +
                                  part_bytes(tile.value_format, SKERRY_SIDE_VALUE, layer.value_dim, tokens)
                            : part_bytes(tile.key_format, SKERRY_SIDE_KEY, layer.key_dim, tile.capacity, p.value_group) +
                                  part_bytes(tile.value_format, SKERRY_SIDE_VALUE, layer.value_dim, tile.capacity, p.value_group);
                }
            });
        }
    }
}

uint64_t sequence_fingerprint(skerry_cache *cache, const Sequence *seq) {
    uint64_t hash = hash_seed;
    const auto add = [&](const void *data, size_t bytes) { hash = hash_bytes(hash, data, bytes); };
    const auto add_number = [&](int64_t value) { add(&value, sizeof value); };
    const PolicyConfig &p = cache->policy();
    add_number(seq->length);
    add_number(seq->prompt_length);
    add_number(seq->prefilling ? 1 : 0);
    memory_hash(seq, &hash);
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        for (int32_t h = 0; h < layer.kv_heads; ++h) {
            const Lane &lane = seq->lane(layer.lane + h);
            const skerry_tile *tiles = seq->tiles(lane);
            for (uint32_t t = 0; t < lane.tiles; ++t) {
                const skerry_tile &tile = tiles[t];
                add_number(tile.first);
                add_number(tile.count | tile.key_format << 8 | tile.value_format << 16 | (tile.flags & tile_recovered) << 24);
                add_number(tile.tier);
                const uint8_t *bytes = cache->pool.data(tile.place);
                if (!is_full_format(tile.key_format)) {
                    add(bytes, tile_units(p, layer, tile) * place_bytes);
                } else {
                    // Only tokens that are there: the rest of an open tile holds whatever was there before.
                    const size_t size = static_cast<size_t>(format_bits(tile.key_format)) / 8;
                    for (int32_t c = 0; c < layer.key_dim; ++c) {
                        add(bytes + static_cast<size_t>(c) * tile.capacity * size, tile.count * size);
                    }
                    add(bytes + value_offset(tile.key_format, layer.key_dim, tile.capacity),
                        static_cast<size_t>(tile.count) * static_cast<size_t>(layer.value_dim) * size);
                }
                if (p.quantises()) {
                    const uint32_t dormant = seq->tables.dormant[lane.offset + t];
                    add_number(dormant != no_place ? 1 : 0);
                    if (dormant != no_place) add(cache->pool.data(dormant), cache->pool.slot_bytes(cache->pool.class_of(dormant)));
                }
                if (p.keeps_exact()) add_number(seq->tables.exact[lane.offset + t] != no_place ? 1 : 0);
            }
            if (p.routes()) {
                const size_t words = static_cast<size_t>(p.score_words());
                add(seq->tables.words.data() + lane.offset * words, lane.tiles * words * sizeof(int64_t));
            }
            if (p.uses_epochs()) {
                add(seq->tables.epochs.data() + lane.epoch_offset, lane.epochs * epoch_table_bytes(layer));
                add(seq->tables.query_squares.data() + lane.query_offset, static_cast<size_t>(layer.key_dim) * sizeof(float));
            }
            if (seq->zoom) zoom_fingerprint(cache, seq, layer, h, &hash);
        }
        add_number(static_cast<int64_t>(seq->layers[i].scored));
    }
    return hash;
}

void sequence_diagnostics(skerry_cache *cache, const Sequence *seq, int32_t layer, skerry_diagnostics *out) {
    double churn = 0, missed = 0, all = 0, quantised = 0;
    uint64_t events = 0, eligible = 0, rescued = 0;
    int32_t counted = 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &geometry = cache->layers[i];
        if (geometry.source != static_cast<int32_t>(i) ||
            (layer >= 0 && cache->layers[static_cast<size_t>(layer)].source != static_cast<int32_t>(i)))
            continue;
        const LayerState &state = seq->layers[i];
        ++counted;
        events = std::max(events, state.events);
        // The first event has no predecessor to differ from.
        churn += state.events > 1 ? state.churn / static_cast<double>(state.events - 1) : 0;
        missed += state.missed;
        all += static_cast<double>(state.mass_all);
        quantised += static_cast<double>(state.mass_quantised);
        eligible += state.lir_eligible;
        rescued += state.lir_rescued;
    }
    out->events = static_cast<uint32_t>(events);
    out->churn = counted > 0 ? churn / counted : 0;
    out->missed_mass = counted > 0 ? missed / counted : 0;
    out->lir_eligible = eligible;
    out->lir_rescued = rescued;
    out->lir = eligible > 0 ? static_cast<double>(rescued) / static_cast<double>(eligible) : 0;
    out->quantised_mass = all > 0 ? quantised / all : 0;
}

} // namespace skerry
