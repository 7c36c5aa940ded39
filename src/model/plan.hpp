#pragma once

// What a cache of a given description holds and costs. Planning, allocation and the report all use this file: pure functions of the
// description, integers only.

#include <skerry/cache.h>

#include <cstdint>

#include "base/status.hpp"
#include "codec/layout.hpp"
#include "limits.hpp"
#include "model/geometry.hpp"

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
    skerry_dtype store_dtype = SKERRY_DTYPE_F16;

    bool paper() const { return fidelity == SKERRY_FIDELITY_PAPER; }
    // Windows leave the recent region at events; `full` keeps everything.
    bool routes() const { return kind != SKERRY_POLICY_FULL; }
    bool quantises() const { return kind == SKERRY_POLICY_QUANTISE || kind == SKERRY_POLICY_QEVICT; }
    bool has_full_history() const { return kind == SKERRY_POLICY_EVICT || kind == SKERRY_POLICY_QEVICT; }
    // Windows routed to the full tier lie in another format than recent ones.
    bool has_wide() const { return kind == SKERRY_POLICY_QEVICT && full_format != store_dtype; }
    bool keeps_exact() const { return (flags & SKERRY_POLICY_KEEP_EXACT) != 0; }
    bool uses_epochs() const { return (quantises() && (is_r_format(key_format) || is_r_format(value_format))) || has_wide(); }
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
    int64_t exact_windows = 0; // exact copies of one lane, those included that an open step has given up
    int64_t length_tokens = 0;
    int64_t full_tokens = 0; // policy full: longest sequence that the budget holds
    uint64_t full_limit = UINT64_MAX;
    uint64_t quantised_limit = UINT64_MAX;
    uint32_t beta_ppm = 0; // paper: the budget in force
    bool bounded = false;

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
inline constexpr uint64_t sequence_state_bytes = 944;
// The pool's own bytes per slot: a reference count.
inline constexpr uint64_t slot_overhead_bytes = 2;

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
    uint64_t bytes = 0;
};
// Splits of `tiles` tiles: two more than full ones, for the sinks and for a list that begins inside a split.
constexpr int64_t lane_splits(int64_t tiles) { return (tiles + limits::split_tiles - 1) / limits::split_tiles + 2; }
LaneScratch lane_scratch(const LayerGeometry &layer, int32_t rows, int64_t tiles, int32_t epochs);

skerry_attend_params attend_params(const PolicyConfig &policy, const LayerGeometry &layer);
// Of all tasks that may run at once.
uint64_t task_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int32_t rows);
inline constexpr uint64_t event_candidate_bytes = 56;
// Of one KV head's part in a routing event, and of coding its windows.
uint64_t event_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries);
// What one call on this layer needs at least: every KV head at one row, or one at task_rows; and one event.
uint64_t layer_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries,
                             int32_t epochs);

// `desc` was read by read_struct. On OVER_BUDGET the plan is filled as far as the minimum.
Status make_plan(const skerry_cache_desc &desc, const PlanDevice &device, CachePlan *plan, skerry_error *error);
// The same cache under another budget.
Status replan(const skerry_cache_desc &desc, const skerry_budget_desc &budget, const PlanDevice &device, CachePlan *plan,
              skerry_error *error);

} // namespace skerry
