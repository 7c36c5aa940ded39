#pragma once

// Windows that are read back from the host (SKERRY_POLICY_SEKV); see zoom.cpp.

#include "policy/zoom_router.hpp"
#include "step/cache.hpp"

namespace skerry {

// Tables for a new sequence. Throws std::bad_alloc.
void zoom_make(skerry_cache *cache, Sequence *seq);
void zoom_begin(Sequence *seq);
void zoom_abort(skerry_cache *cache, Sequence *seq);
// The sequence is empty again.
void zoom_clear(skerry_cache *cache, Sequence *seq);
// Windows that do not end at `length` or before lose their detail.
void zoom_truncate(skerry_cache *cache, Sequence *seq, int64_t length);
// `child` shares the parent's detail and has no slot in use. Cannot fail.
void zoom_fork(skerry_cache *cache, const Sequence *parent, Sequence *child);

// Windows that have a router key, or would have one but for a full host tier; 0: the layer does not zoom.
int64_t zoom_window_count(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer);

// Exact tokens of one window or span; the keys are scratch once its router key is made.
struct DetailRows {
    float *keys; // [count][key_dim], as attention uses them
    const float *values;
    int32_t count;
    int64_t begin; // position of the first
};

struct DetailScratch {
    CodeScratch code;
    uint8_t *record; // of the lane's largest detail
    size_t record_bytes;
    float *decoded; // [count][larger dim]
    void *factor;
    float *router_key; // router_key_scratch_bytes
};

// Puts the next window's or span's detail on the host and makes its router key. `epoch` is of the lane's table.
// The caller has seen that the table has room. A full host: the entry has no place.
void zoom_detail(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane, uint32_t epoch, const DetailRows &rows,
                 const DetailScratch &scratch, skerry_counters *counters);
void zoom_key(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane, uint32_t window, const DetailRows &rows,
              const DetailScratch &scratch);

// Writes one detail to the arena, in the format that the policy says or that its bound on the error allows (detail.cpp).
// It becomes entry `window` of the lane's `entries`, and takes at most `room` bytes: a lane's part of the arena is its own, so that what is
// refused depends on no other lane.
HostEntry detail_write(skerry_cache *cache, const LayerGeometry &layer, const DetailRows &rows, const uint8_t *stored_epoch, uint32_t epoch,
                       const HostEntry *entries, uint32_t window, uint64_t room, const DetailScratch &scratch, skerry_counters *counters);
int32_t detail_capacity(const PolicyConfig &p, const HostEntry &entry);                              // tokens of one of its tiles
size_t detail_tile_bytes(const PolicyConfig &p, const LayerGeometry &layer, const HostEntry &entry); // of one of its tiles
size_t detail_bytes(const PolicyConfig &p, const LayerGeometry &layer, const HostEntry &entry);      // on the host
// What a slot is put together from; `entry` lies in its lane's table, since it may name an earlier one.
Pieces detail_pieces(const skerry_cache *cache, const LayerGeometry &layer, const HostEntry *entry);

// What entry `index` of every lane stands for: positions [begin, end), of which `rows` are its tokens; the rest are anchors.
struct ZoomUnit {
    int64_t begin;
    int64_t end;
    int32_t rows;
};
ZoomUnit zoom_unit(const skerry_cache *cache, const Sequence *seq, int32_t index);
// The entry that a position belongs to; negative or beyond the table: none.
int32_t zoom_unit_at(const skerry_cache *cache, const Sequence *seq, int64_t position);
// Position of a tile's row.
int64_t zoom_position(const skerry_cache *cache, const Sequence *seq, const skerry_tile &tile, int32_t row);

// Spans by surprisal (spans.cpp). The step's surprisal, in position order.
void spans_add(Sequence *seq, int64_t position, const float *nats, int32_t count);
// Whether the surprisal of every token below `length` was handed over.
bool spans_known(const skerry_cache *cache, const Sequence *seq, int64_t length);
// Cuts what has left the recent region, as of `length` tokens, into spans; `ends`: a prompt ends there, and its last span with it.
void spans_advance(skerry_cache *cache, Sequence *seq, int64_t length, bool ends);
// Moves a layer's closed spans to the host. Cannot fail.
void spans_event(skerry_cache *cache, Sequence *seq, int32_t layer, int64_t length);

// One query position of one layer.
struct ZoomCall {
    skerry_cache *cache;
    Sequence *seq;
    const LayerGeometry *layer;
    const skerry_attend_params *params;
    const skerry_epoch *epochs;
    const float *queries; // [group][key_dim]
    float *out;           // scratch of one attend task
    float *max;
    float *sum;
    void *task_scratch;
    int32_t position;
    uint64_t serial; // of the look
    bool remember;   // the choice is the position's own; false: a repeated look
};

// Chooses what the query reads from the host, fetches it, and writes the list to attend to at offsets.tiles and .origins (each entry's
// place in the lane's own list; -1: none). Returns its length.
uint32_t zoom_row(const ZoomCall &call, int32_t head, const LaneScratch &offsets, uint8_t *base, skerry_counters *counters);

// Brings back what the lane chose last, where another layer has taken its slots.
void zoom_ensure(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, int32_t lane);
// Queues copies of what a layer chose last, which its next query will mostly want again.
void zoom_prefetch(skerry_cache *cache, Sequence *seq, const LayerGeometry &layer, skerry_counters *counters);

// The lane's list with the chosen windows, as far as they have arrived, in place of what the device holds of them.
uint32_t zoom_list(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, const Lane &lane, const LaneZoom &zoom,
                   const int32_t *chosen, int32_t count, skerry_tile *tiles, int32_t *origins);

void zoom_fingerprint(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, int32_t head, uint64_t *hash);

} // namespace skerry
