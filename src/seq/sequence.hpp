#pragma once

// The tables of one sequence. Per layer and KV head ("lane") a list of tiles in position order: the sinks, then windows; what is not
// in the list has been evicted. Everything else about a window lies beside its first tile. Windows need no table of their own: window j
// holds positions [sinks + j w, sinks + (j + 1) w).

#include <skerry/sequence.h>

#include <cstdint>

#include "base/alloc.hpp"
#include "codec/layout.hpp"
#include "limits.hpp"
#include "model/plan.hpp"
#include "model/spans.hpp"
#include "seq/paper.hpp"
#include "seq/zoom.hpp"
#include "stats/diagnostics.hpp"
#include "store/pool.hpp"

namespace skerry {

// skerry_tile.flags
inline constexpr uint8_t tile_recovered = 1; // full tier, restored from a low-bit record
inline constexpr uint8_t tile_wide = 2;      // full tier in the policy's full_format
inline constexpr uint8_t tile_run_shift = 2; // events in a row outside the full tier, at most tile_run_most
inline constexpr uint8_t tile_run_most = 15;
inline constexpr uint8_t tile_alone = 64; // a slot of its own, whatever window its token is in: an anchor, or a part of a span

struct Lane {
    uint32_t offset = 0;   // first entry in the sequence's arrays
    uint32_t capacity = 0; // entries
    uint32_t tiles = 0;    // visible
    uint32_t reserved = 0; // tiles and those that the open step may still fill
    uint32_t epochs = 0;
    uint32_t epoch_capacity = 0;
    uint32_t open_windows = 0; // slots of the open class that this lane refers to
    uint32_t period = 0;       // of the queries that the scores were last begun for
    uint64_t epoch_offset = 0;
    uint64_t query_offset = 0; // into query_squares
};
static_assert(sizeof(Lane) == lane_state_bytes);

// One epoch in the table: its number, then what codec/epoch.hpp stores.
struct EpochHead {
    int32_t number;
    uint32_t reserved;
};

struct LayerState {
    int64_t routed = 0;         // position of the last event that ran
    int64_t routed_windows = 0; // windows that had left the recent region then
    int64_t let_go = 0;         // tokens seen when a sliding window last let windows go
    int64_t scored_from = 0;    // position of the first scored query; scores are empty while scored == 0
    uint64_t scored = 0;        // queries scored
    uint64_t scored_at_event = 0;
    uint64_t mass_all = 0; // 2^-40 units, per query and lane, saturating
    uint64_t mass_quantised = 0;
    uint64_t events = 0;
    double churn = 0;
    double missed = 0;
    FmmOnline missed_state;
    uint64_t lir_eligible = 0;
    uint64_t lir_rescued = 0;
};
static_assert(sizeof(LayerState) == layer_state_bytes);

// The arrays that a lane's entries lie in; a second set of them is the undo copy.
struct LaneTables {
    Buffer<Lane> lanes;
    Buffer<skerry_tile> tiles;
    Buffer<int64_t> words;       // [entry][score_words]
    Buffer<uint32_t> dormant;    // [entry] place of an inactive record, or no_place
    Buffer<uint32_t> exact;      // [entry] place in the pool of exact copies, or no_place
    Buffer<float> query_squares; // [lane][key_dim]
    Buffer<uint8_t> epochs;

    LaneTables(Allocator &allocator, Owner owner)
        : lanes(allocator, owner), tiles(allocator, owner), words(allocator, owner), dormant(allocator, owner), exact(allocator, owner),
          query_squares(allocator, owner), epochs(allocator, owner) {}
};

// What the undo copy of a layer holds: its tiles and scores (with a reference to every slot), its query statistics.
inline constexpr uint8_t saved_tiles = 1;
inline constexpr uint8_t saved_queries = 2;

struct Sequence {
    explicit Sequence(Allocator &allocator)
        : tables(allocator, Owner::tables), undo(allocator, Owner::staging), layers(allocator, Owner::tables),
          pending(allocator, Owner::staging), saved(allocator, Owner::staging), undo_layers(allocator, Owner::staging) {}

    uint64_t id = 0;
    int64_t length = 0;
    int64_t prompt_length = -1; // set when a prompt has ended
    bool prefilling = false;
    bool in_step = false;
    SurprisalMoments surprisal;      // of all tokens whose surprisal was handed over
    SurprisalMoments step_surprisal; // with the open step's

    LaneTables tables;
    LaneTables undo;
    Buffer<LayerState> layers;
    Buffer<int64_t> pending; // [entry] masses of the open step that no event has folded into the scores
    Buffer<uint8_t> saved;   // [layer] saved_*
    Buffer<LayerState> undo_layers;
    Owned<ZoomTables> zoom;  // SEKV
    Owned<PaperState> paper; // SEKV with fidelity paper

    // Its prompt has ended under fidelity paper: it holds no tiles any more, and takes no tokens.
    bool is_memory() const { return paper && paper->memory != nullptr; }

    Lane &lane(int32_t index) { return tables.lanes[static_cast<size_t>(index)]; }
    const Lane &lane(int32_t index) const { return tables.lanes[static_cast<size_t>(index)]; }
    skerry_tile *tiles(const Lane &lane) { return tables.tiles.data() + lane.offset; }
    const skerry_tile *tiles(const Lane &lane) const { return tables.tiles.data() + lane.offset; }
};

static_assert(sizeof(Sequence) == sequence_state_bytes || sizeof(void *) != 8);

struct WindowSpan {
    int32_t window; // -1: sinks
    uint32_t begin; // tiles
    uint32_t end;
};

// Index of the window that holds a position, or -1 for sinks.
inline int32_t window_of_position(const PolicyConfig &policy, int64_t position) {
    return position < policy.sinks ? -1 : static_cast<int32_t>((position - policy.sinks) / policy.window);
}

inline bool is_alone(const skerry_tile &tile) { return (tile.flags & tile_alone) != 0; }

// The run of tiles, from `begin` on, that belongs to one window (or to the sinks).
inline WindowSpan window_at(const PolicyConfig &policy, const skerry_tile *tiles, uint32_t begin, uint32_t count) {
    WindowSpan span{window_of_position(policy, tiles[begin].first), begin, begin + 1};
    if (is_alone(tiles[begin])) return span;
    while (span.end < count && window_of_position(policy, tiles[span.end].first) == span.window && !is_alone(tiles[span.end]))
        ++span.end;
    return span;
}

// Events of the production schedule: multiples of the period counted from the end of the sinks.
inline int64_t next_event_after(const PolicyConfig &policy, int64_t position) {
    if (position < policy.sinks) return policy.sinks + policy.period;
    return policy.sinks + ((position - policy.sinks) / policy.period + 1) * policy.period;
}
inline bool is_event_position(const PolicyConfig &policy, int64_t position) {
    return position > policy.sinks && (position - policy.sinks) % policy.period == 0;
}
inline uint64_t period_of_query(const PolicyConfig &policy, int64_t position) {
    return position < policy.sinks ? 0 : static_cast<uint64_t>((position - policy.sinks) / policy.period);
}

} // namespace skerry
