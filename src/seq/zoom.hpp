#pragma once

// What a sequence needs to read windows back from the host: per zooming lane a router key for every window that has detail, and where the
// detail lies. Window j is entry j of its lane. Entries are only ever appended: an
// aborted step cuts them off again.

#include <cstdint>

#include "base/alloc.hpp"
#include "model/plan.hpp"
#include "model/spans.hpp"

namespace skerry {

inline constexpr uint16_t no_slot = UINT16_MAX;

// On the host. A window that found the host tier full has no place and no router key.
struct HostEntry {
    uint32_t place = 0; // in the arena of details, or no_place
    uint16_t epoch = 0; // as skerry_tile.epoch has it: balance parameters, or ranks
    uint16_t slot = 0;  // of the cache, that it lies in or is on its way to; or no_slot
    uint8_t key_format = 0;
    uint8_t value_format = 0;
    uint8_t rows = 0; // tokens
    uint8_t error = 0; // codec/error_code.hpp: the larger of the keys' and the values'
    // By side. L formats: how many entries before this one lies the one on whose basis it is stored; 0: it has its own. The one named has
    // its own, and outlives this one: entries are cut off from the end.
    uint16_t basis[2] = {0, 0};
};
static_assert(sizeof(HostEntry) == host_entry_bytes);

struct LaneZoom {
    uint64_t key_offset = 0;     // bytes into keys
    uint64_t window_offset = 0;  // entries into host, and counts of as many
    uint64_t balance_offset = 0; // bytes
    uint64_t select_offset = 0;  // two lists of select_capacity
    int64_t position = -1;       // of the query that `current` was chosen for
    uint32_t windows = 0;        // entries
    uint32_t capacity = 0;
    uint32_t current = 0; // windows chosen at `position`, and at the query before it
    uint32_t previous = 0;
    uint32_t select_capacity = 0;
    uint32_t host_units = 0; // of the arena that its entries name
    uint32_t kept = 0;       // first of the cache's slots that are the lane's own
    uint16_t frozen = 0;     // the router keys' balance is set
    uint16_t borrowed = 0;   // `current` is the choice of a layer that shares the cache, `previous` the source's own
};
static_assert(sizeof(LaneZoom) == lane_zoom_bytes);

struct ZoomTables {
    explicit ZoomTables(Allocator &allocator)
        : lanes(allocator, Owner::tables), undo_lanes(allocator, Owner::staging), keys(allocator, Owner::tables, 64),
          counts(allocator, Owner::tables), balance(allocator, Owner::tables), selected(allocator, Owner::tables),
          undo_selected(allocator, Owner::staging), host(allocator, Owner::host), spans(allocator, Owner::tables),
          nats(allocator, Owner::staging) {}

    Buffer<LaneZoom> lanes; // [lane]
    Buffer<LaneZoom> undo_lanes;
    Buffer<uint8_t> keys;    // [window] in the form of route_params (codec/router_key.hpp)
    Buffer<uint8_t> counts;  // [window][vectors of that form]
    Buffer<uint8_t> balance; // [zooming lane] as codec/epoch.hpp stores it; none with a trained router
    Buffer<int32_t> selected;
    Buffer<int32_t> undo_selected;
    Buffer<HostEntry> host;

    // Spans by surprisal: entry j of every lane is span j. Surprisal waits until its token leaves the recent region, so that a sequence can
    // be cut anywhere behind that.
    Buffer<TokenSpan> spans; // [capacity]
    Buffer<float> nats;      // [nats_count] of the tokens from segments.next on
    SegmentState segments;
    int64_t decided = 0; // every position below is in a span, an anchor with a slot, or lost
    uint32_t span_count = 0;
    uint32_t nats_count = 0;
    uint32_t undo_nats_count = 0;
    uint32_t anchors = 0; // slots of anchors that each lane uses

    LaneZoom &lane(int32_t index) { return lanes[static_cast<size_t>(index)]; }
    const LaneZoom &lane(int32_t index) const { return lanes[static_cast<size_t>(index)]; }
    HostEntry *entries(const LaneZoom &zoom) { return host.data() + zoom.window_offset; }
    const HostEntry *entries(const LaneZoom &zoom) const { return host.data() + zoom.window_offset; }
    int32_t *current(const LaneZoom &zoom) { return selected.data() + zoom.select_offset; }
    const int32_t *current(const LaneZoom &zoom) const { return selected.data() + zoom.select_offset; }
    int32_t *previous(const LaneZoom &zoom) { return selected.data() + zoom.select_offset + zoom.select_capacity; }
};
static_assert(sizeof(ZoomTables) == zoom_state_bytes || sizeof(void *) != 8);
static_assert(sizeof(TokenSpan) == span_bytes);

} // namespace skerry
