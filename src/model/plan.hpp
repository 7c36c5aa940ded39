#pragma once

// What a cache of a given description holds and costs. Planning, allocation and the report all use this file: pure functions of the
// description, integers only.

#include <skerry/cache.h>

#include <cstdint>

#include "base/status.hpp"
#include "codec/layout.hpp"
#include "limits.hpp"
#include "model/geometry.hpp"
#include "model/router.hpp"

namespace skerry {

// A policy with every default filled in.
struct PolicyConfig {
    skerry_policy_kind kind = SKERRY_POLICY_FULL;
    skerry_fidelity fidelity = SKERRY_FIDELITY_PRODUCTION;
    skerry_prefill prefill = SKERRY_PREFILL_SPLIT;
    int32_t window = 16;
    int32_t sinks = 4;
    int32_t recent = 32;
    int32_t period = 16;
    skerry_score score = SKERRY_SCORE_LAST;
    int32_t score_queries = 32;
    skerry_selection selection = SKERRY_SELECTION_PER_HEAD;
    skerry_format full_format = SKERRY_FORMAT_F16; // of windows routed to the full tier
    skerry_format key_format = SKERRY_FORMAT_R3;
    skerry_format value_format = SKERRY_FORMAT_R2;
    int32_t value_group = 0;
    uint32_t quantised_share_ppm = 1000000;
    uint32_t hysteresis_ppm = 1200000;
    uint32_t max_moves_ppm = 125000;
    uint32_t flags = 0;
    uint32_t sekv_flags = 0;
    skerry_dtype store_dtype = SKERRY_DTYPE_F16;

    // SEKV.
    skerry_format detail_format = SKERRY_FORMAT_R4;
    uint32_t fetch_ppm = 120000;
    uint32_t refine_ppm = 250000;
    uint32_t zoom_hysteresis_ppm = 1500000;
    int32_t keep_windows = 0;
    skerry_zoom_miss miss = SKERRY_ZOOM_WAIT;
    bool residents = true;
    const RouterWeights *router = nullptr; // trained, alive as long as the description; NULL: the one that needs no training
    bool spans = false;                    // by surprisal
    int32_t span_min = 64;
    int32_t span_max = 128;
    float anchor_threshold = 1;
    int32_t detail_rank = 16;
    float detail_error = 0;
    bool shared_bases = false;
    int32_t full_resolution_below = 4;        // sekv_paper: shorter spans stay as they are
    int64_t budget_entries = INT64_MAX;       // sekv_paper: per query head

    // SEKV as published: a prompt is collected like under `full`, and replaced as a whole when it ends (step/paper.hpp).
    bool sekv_paper() const { return kind == SKERRY_POLICY_SEKV && fidelity == SKERRY_FIDELITY_PAPER; }
    bool zooms() const { return kind == SKERRY_POLICY_SEKV && !sekv_paper(); }
    // Windows that one query reads out of so many.
    int64_t windows_read(int64_t windows) const {
        return static_cast<int64_t>((static_cast<uint64_t>(windows) * fetch_ppm + 999999) / 1000000);
    }
    // Most tokens of what is moved to the host as one.
    int32_t detail_tokens() const { return spans ? span_max : window; }
    // A layer that sees a short window of tokens has no far history to bring back.
    bool zooms(const LayerGeometry &layer) const { return zooms() && layer.sliding_window == 0; }
    // The device holds history windows by score: in the full tier and in low bits.
    bool has_ladder() const { return kind == SKERRY_POLICY_QEVICT || (zooms() && residents); }
    bool paper() const { return kind == SKERRY_POLICY_QEVICT && fidelity == SKERRY_FIDELITY_PAPER; }
    // Windows leave the recent region at events; `full` keeps everything.
    bool routes() const { return kind != SKERRY_POLICY_FULL && !sekv_paper(); }
    bool quantises() const { return kind == SKERRY_POLICY_QUANTISE || has_ladder(); }
    bool has_full_history() const { return kind == SKERRY_POLICY_EVICT || has_ladder(); }
    // Windows routed to the full tier lie in another format than recent ones.
    bool has_wide() const { return has_ladder() && full_format != store_dtype; }
    bool keeps_exact() const { return (flags & SKERRY_POLICY_KEEP_EXACT) != 0; }
    bool uses_epochs() const { return (quantises() && (is_r_format(key_format) || is_r_format(value_format))) || has_wide() || zooms(); }
    // In production a promotion has to bring precision back.
    bool promotes() const { return kind == SKERRY_POLICY_QEVICT && (flags & SKERRY_POLICY_ONE_WAY) == 0 && (paper() || keeps_exact()); }
    int32_t score_words() const;
};

// One KV head of one layer within one sequence.
struct LaneQuota {
    // Slots: what one allocation holds. A slot is a whole window, or the sinks.
    uint32_t sink_slot_bytes = 0;
    uint32_t open_slot_bytes = 0;
    uint32_t wide_slot_bytes = 0;   // 0: none
    uint32_t record_slot_bytes = 0; // 0: none
    int32_t sink_tiles = 0;
    int32_t open_tiles = 0; // per window
    int32_t record_tiles = 0;

    int32_t protected_windows = 0; // recent region at its largest, in the store dtype
    int32_t full_windows = 0;      // k: history windows in the full tier
    int32_t quantised_windows = 0; // N
    int32_t record_slots = 0;      // N, and k more where dormant records must live (paper)
    int32_t epochs = 0;

    uint32_t detail_slot_bytes = 0; // SEKV: of a window on the host, and of a slot that it is fetched into; 0: the layer does not zoom
    int32_t anchors = 0;            // exact tokens within spans; slots of one token each
    uint32_t anchor_slot_bytes = 0;
    int32_t host_windows = 0;  // that can have detail and a router key: ids 0 to host_windows - 1
    int32_t fetch_windows = 0; // most that one query reads
    int32_t zoom_slots = 0;    // kept for later queries

    int32_t staging_windows = 0; // tokens of steps in flight, or of a prompt being collected
    int32_t staging_records = 0; // what a step replaced, held until it is committed
    int32_t staging_wide = 0;
    int32_t table_entries = 0;
    int32_t staging_entries = 0;

    int32_t open_slots() const { return protected_windows + staging_windows; }
    int32_t entries() const { return table_entries + staging_entries; }
};

struct CachePlan {
    PolicyConfig policy;
    skerry_plan_info info;       // filled completely but for cpu_features
    uint64_t sequence_bytes = 0; // limit of one sequence; UINT64_MAX: none
    uint64_t history_bytes = 0;  // what one sequence has left for history after the floor, all lanes
    uint64_t history_weight = 0; // sum over lanes of their weights
    uint64_t exact_bytes = 0;
    uint64_t host_limit = UINT64_MAX; // of one sequence
    uint64_t host_weight = 0;         // host bytes of one window of every zooming lane; with spans, of all that a sequence can have
    int64_t exact_windows = 0;        // exact copies of one lane, those included that an open step has given up
    int64_t length_tokens = 0;
    int64_t full_tokens = 0; // policy full: longest sequence that the budget holds
    uint64_t full_limit = UINT64_MAX;
    uint64_t quantised_limit = UINT64_MAX;
    uint32_t beta_ppm = 0; // paper: the budget in force
    bool bounded = false;
    int64_t staged_slots = 0;       // SEKV: of the whole cache: twice what one layer reads
    uint32_t staged_slot_bytes = 0; // of every slot that detail is fetched into: the largest detail of any layer

    LaneQuota quota(const LayerGeometry &layer) const;
};

// What planning asks of a device.
struct PlanDevice {
    const skerry_kernels *kernels = nullptr;
    int32_t task_slots = 1; // attend tasks that may run at once
};

// Bytes that one table entry, one lane and one sequence need; seq/ allocates by the same numbers.
uint64_t entry_table_bytes(const PolicyConfig &policy);
uint64_t lane_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer, int32_t epochs);
uint32_t epoch_table_bytes(const LayerGeometry &layer);
inline constexpr uint64_t lane_state_bytes = 48;
inline constexpr uint64_t layer_state_bytes = 112;
inline constexpr uint64_t sequence_state_bytes = 992;
// SEKV: of one sequence, and of one of its lanes.
inline constexpr uint64_t zoom_state_bytes = 560;
inline constexpr uint64_t paper_state_bytes = 160;
inline constexpr uint64_t lane_zoom_bytes = 72;
// The pool's own bytes per slot: a reference count.
inline constexpr uint64_t slot_overhead_bytes = 2;
// SEKV. On the device: a router key and its counts per window; two selections; what each slot holds. On the host: where the detail lies.
inline constexpr uint64_t zoom_slot_state_bytes = 32;
inline constexpr uint64_t host_entry_bytes = 16;
inline constexpr uint64_t host_unit_overhead_bytes = 2; // per 64 bytes: a reference count
inline constexpr uint64_t host_extent_bytes = 8;        // per record, and once more: the list of what is free
inline constexpr uint64_t span_bytes = 32;
uint64_t router_key_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer);
// Of a lane: what its router keys are coded with. Projected keys carry their own scales.
uint64_t router_balance_bytes(const PolicyConfig &policy, const LayerGeometry &layer);
uint64_t zoom_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer, const LaneQuota &quota);

// Scratch of attention over one KV head: partial results of every split, masses of every tile, rows in and out, balance parameters.
struct LaneScratch {
    uint64_t out = 0; // offsets
    uint64_t max = 0;
    uint64_t sum = 0;
    uint64_t tile_max = 0;
    uint64_t tile_sum = 0;
    uint64_t queries = 0;
    uint64_t merged = 0;
    uint64_t lse = 0;
    uint64_t epochs = 0;
    uint64_t epoch_floats = 0;
    // SEKV, one row: routing scores and their units, what is chosen by them, then the list that the row attends to and each entry's place
    // in the lane's.
    uint64_t route = 0;
    uint64_t weights = 0;
    uint64_t selection = 0;
    uint64_t chosen = 0;
    uint64_t tiles = 0;
    uint64_t origins = 0;
    uint64_t router = 0; // what queries are scored with: balance parameters, or projected queries and biases
    uint64_t route_scratch = 0;
    uint64_t bytes = 0;
};

// What a lane's zoom asks of the scratch.
struct ZoomShape {
    int64_t windows = 0;
    int64_t fetch = 0;
    int64_t tiles = 0;        // of fetched windows in a row's list
    uint64_t query_bytes = 0; // of what the kernel is given beside the keys
    uint64_t route_bytes = 0; // of the kernel
};
// Host bytes of one lane's detail, and tokens whose surprisal may wait for their span to close.
uint64_t host_record_bytes(const CachePlan &plan, const LayerGeometry &layer, const LaneQuota &quota);
int64_t open_surprisals(const CachePlan &plan);
ZoomShape zoom_shape(const skerry_kernels *kernels, const PolicyConfig &policy, const LayerGeometry &layer, const LaneQuota &quota);
// Scratch of the selection: per window, and beside them (policy/zoom_router.hpp; tests compare).
inline constexpr uint64_t selection_window_bytes = 12;
inline constexpr uint64_t selection_fixed_bytes = 8192;
inline constexpr uint64_t zoomed_lane_bytes = 256; // scratch of what a lane's reading came to

// Splits of `tiles` tiles: two more than full ones, for the sinks and for a list that begins inside a split.
constexpr int64_t lane_splits(int64_t tiles) { return (tiles + limits::split_tiles - 1) / limits::split_tiles + 2; }
LaneScratch lane_scratch(const LayerGeometry &layer, int32_t rows, int64_t tiles, int32_t epochs, const ZoomShape &zoom = {});

// Form, rank and number of a layer's router keys: what they take, how they are made and how they are scored follow from this.
skerry_route_params route_params(const PolicyConfig &policy, const LayerGeometry &layer);
// Scratch of making one router key.
uint64_t router_key_scratch_bytes(const PolicyConfig &policy, const LayerGeometry &layer);
skerry_attend_params attend_params(const PolicyConfig &policy, const LayerGeometry &layer);
// Of all tasks that may run at once.
uint64_t task_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int32_t rows);
inline constexpr uint64_t event_candidate_bytes = 56;
// Tokens whose rows an event decodes at once.
int32_t coding_tokens(const PolicyConfig &policy);
// Most bytes that a window's or a span's detail takes.
uint32_t detail_slot_bytes(const PolicyConfig &policy, const LayerGeometry &layer);
uint64_t factor_scratch_bytes(const skerry_kernels *kernels, const PolicyConfig &policy, const LayerGeometry &layer);
// Of one KV head's part in a routing event, and of coding its windows.
uint64_t event_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries);
// What one call on this layer needs at least: every KV head at one row, or one at task_rows; and one event.
uint64_t layer_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries,
                             int32_t epochs, const ZoomShape &zoom = {});

// `desc` was read by read_struct. On OVER_BUDGET the plan is filled as far as the minimum.
Status make_plan(const skerry_cache_desc &desc, const PlanDevice &device, CachePlan *plan, skerry_error *error);
// The same cache under another budget.
Status replan(const skerry_cache_desc &desc, const skerry_budget_desc &budget, const PlanDevice &device, CachePlan *plan,
              skerry_error *error);

} // namespace skerry
