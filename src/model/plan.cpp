#include "model/plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "codec/router_key.hpp"
#include "limits.hpp"
#include "model/qevict_paper.hpp"

namespace skerry {

namespace {

constexpr uint64_t unlimited = UINT64_MAX;
constexpr int32_t many_windows = 1 << 24;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

uint64_t add(uint64_t a, uint64_t b) { return a > unlimited - b ? unlimited : a + b; }
uint64_t mul(uint64_t a, uint64_t b) { return a != 0 && b > unlimited / a ? unlimited : a * b; }

Status bad(skerry_error *error, uint32_t subject, int64_t found, int64_t allowed, const char *text) {
    return fail(error, SKERRY_ERROR_ARGUMENT, subject, -1, found, allowed, "%s is %lld, allowed %lld", text, static_cast<long long>(found),
                static_cast<long long>(allowed));
}

int32_t tokens_or(int32_t value, int32_t otherwise) { return value == 0 ? otherwise : value == SKERRY_NONE_TOKENS ? 0 : value; }

// Largest number of windows that are in full precision at once because they are sinks' followers in the recent region: those
// that are there when an event runs, before it moves any.
int32_t protected_windows(const PolicyConfig &policy) {
    if (!policy.routes()) return 0;
    const int64_t w = policy.window;
    if (policy.paper()) return static_cast<int32_t>(policy.recent / w + 2);
    // A span's tokens stay until it closes; what is left of a window that a span has taken from is rewritten beside it.
    if (policy.spans) return static_cast<int32_t>(ceil_div(policy.recent + policy.span_max + limits::anchor_run + policy.period, w) + 2);
    int64_t most = 0;
    for (int64_t k = 0; k <= 2 * w + policy.recent; ++k) {
        const int64_t now = k * policy.period;                                                // tokens behind the sinks when an event runs
        const int64_t before = std::max<int64_t>(0, now - policy.period - policy.recent) / w; // evictable at the event before
        most = std::max(most, ceil_div(now, w) - before);
    }
    return static_cast<int32_t>(most);
}

uint32_t slot_bytes(int32_t key_format, int32_t value_format, const LayerGeometry &layer, int32_t window, int32_t group) {
    const int32_t capacity = std::max(tile_capacity(key_format, window), tile_capacity(value_format, window));
    const int64_t tiles = ceil_div(window, capacity);
    return static_cast<uint32_t>(static_cast<uint64_t>(tiles) *
                                 record_bytes(key_format, value_format, layer.key_dim, layer.value_dim, capacity, group));
}

struct Costs {
    uint64_t sink = 0, open = 0, wide = 0, record = 0;
};

Costs costs(const PolicyConfig &policy, const LaneQuota &quota) {
    const uint64_t entry = entry_table_bytes(policy);
    const auto slot = [](uint32_t bytes) { return bytes == 0 ? 0 : bytes + slot_overhead_bytes; };
    Costs out;
    out.sink = slot(quota.sink_slot_bytes) + static_cast<uint64_t>(quota.sink_tiles) * entry;
    out.open = slot(quota.open_slot_bytes) + static_cast<uint64_t>(quota.open_tiles) * entry;
    out.wide = slot(quota.wide_slot_bytes) + static_cast<uint64_t>(quota.open_tiles) * entry;
    out.record = slot(quota.record_slot_bytes) + static_cast<uint64_t>(quota.record_tiles) * entry;
    return out;
}

// Slots and tiles of a lane; no numbers of windows yet but the protected ones.
LaneQuota lane_shape(const PolicyConfig &policy, const LayerGeometry &layer) {
    LaneQuota q;
    const skerry_format store = policy.store_dtype;
    if (policy.sinks > 0) {
        const int32_t capacity = std::min(policy.sinks, r_tile_tokens);
        q.sink_tiles = static_cast<int32_t>(ceil_div(policy.sinks, capacity));
        q.sink_slot_bytes = static_cast<uint32_t>(static_cast<uint64_t>(q.sink_tiles) *
                                                  record_bytes(store, store, layer.key_dim, layer.value_dim, capacity));
    }
    q.open_slot_bytes = slot_bytes(store, store, layer, policy.window, 0);
    q.open_tiles = static_cast<int32_t>(ceil_div(policy.window, tile_capacity(store, policy.window)));
    if (policy.has_wide()) {
        q.wide_slot_bytes = slot_bytes(policy.full_format, policy.full_format, layer, policy.window, 0);
    }
    if (policy.quantises()) {
        q.record_slot_bytes = slot_bytes(policy.key_format, policy.value_format, layer, policy.window, policy.value_group);
        q.record_tiles = is_c_format(policy.key_format) ? 1 : q.open_tiles;
    }
    q.protected_windows = protected_windows(policy);
    return q;
}

int32_t epoch_count(const CachePlan &plan, const LayerGeometry &layer, int64_t history_windows) {
    if (!plan.policy.uses_epochs()) return 0;
    // Without a budget or a length: enough for 16 K tokens; beyond that the last epoch is stretched.
    int64_t tokens = plan.bounded ? history_windows * plan.policy.window * 2 : 64 * limits::epoch_tokens;
    if (plan.length_tokens > 0) tokens = std::min<int64_t>(plan.length_tokens, limits::max_position);
    if (layer.sliding_window > 0) tokens = std::min<int64_t>(tokens, int64_t{layer.sliding_window} + 2 * limits::epoch_tokens);
    return static_cast<int32_t>(std::min<int64_t>(ceil_div(std::max<int64_t>(tokens, 1), limits::epoch_tokens) + 1, 65535));
}

// Exact tokens within spans get what is left.
void set_anchors(const CachePlan &plan, const LayerGeometry &layer, uint64_t bytes, LaneQuota *q) {
    const PolicyConfig &p = plan.policy;
    q->anchor_slot_bytes = static_cast<uint32_t>(record_bytes(p.store_dtype, p.store_dtype, layer.key_dim, layer.value_dim, 1));
    const uint64_t each = q->anchor_slot_bytes + slot_overhead_bytes + entry_table_bytes(p);
    q->anchors = static_cast<int32_t>(std::min<uint64_t>(bytes / each, static_cast<uint64_t>(plan.length_tokens)));
}

void set_staging(const CachePlan &plan, int32_t step_tokens, int32_t prompt_tokens, LaneQuota *q) {
    const PolicyConfig &p = plan.policy;
    const int64_t tokens = p.prefill == SKERRY_PREFILL_WHOLE ? std::max(step_tokens, prompt_tokens) : step_tokens;
    if (!p.routes() && !p.sekv_paper()) {
        q->staging_windows = plan.bounded ? 0 : 1;
        return;
    }
    q->staging_windows = static_cast<int32_t>(ceil_div(tokens, p.window) + 1);
}

// Slots that hold what a step replaced until it is committed. An event takes in `newcomers` windows, each of which may push one window from
// the full tier to records and one record out, and exchanges at most `exchanged` more.
void set_undo_slots(const CachePlan &plan, int32_t step_tokens, LaneQuota *q) {
    const PolicyConfig &p = plan.policy;
    if (!p.routes()) return;
    const int64_t newcomers = ceil_div(p.period, p.window) + 1;
    const int64_t history = int64_t{q->full_windows} + q->quantised_windows;
    // Without promotion only newcomers push others out.
    const int64_t exchanged = !p.promotes() ? 0
                              : p.paper()   ? q->full_windows
                                            : std::max<int64_t>(2, ceil_div(history * p.max_moves_ppm, 1000000));
    const int64_t events = ceil_div(step_tokens, p.period);
    const int64_t replaced = events * (2 * newcomers + exchanged);
    const int64_t slack = 2 * newcomers + 2; // within one event, records are made before the windows they come from are let go
    if (p.quantises()) q->staging_records = static_cast<int32_t>(std::min<int64_t>(replaced, std::max(q->record_slots, 0)) + slack);
    if (p.has_wide()) q->staging_wide = static_cast<int32_t>(std::min<int64_t>(replaced, q->full_windows) + slack);
    if (!p.has_wide() && p.has_full_history()) q->staging_windows += static_cast<int32_t>(std::min<int64_t>(replaced, q->full_windows));
}

// Bytes that the host is planned to hold per detail: under a bound on the error most windows are content with r4.
uint64_t host_detail_bytes(const PolicyConfig &p, const LayerGeometry &layer) {
    return p.detail_error > 0 ? slot_bytes(SKERRY_FORMAT_R4, SKERRY_FORMAT_R4, layer, p.detail_tokens(), 0) : detail_slot_bytes(p, layer);
}

// Spans of a sequence.
int64_t span_capacity(const CachePlan &plan) { return plan.length_tokens / plan.policy.span_min + limits::spare_spans; }

// Bytes of detail that `windows` of them can take: rows of spans are tokens of the sequence, and each span fills its last tile at worst to
// one row. Low-rank records of short spans are not that much smaller.
uint64_t host_need(const CachePlan &plan, const LayerGeometry &layer, int64_t windows) {
    const PolicyConfig &p = plan.policy;
    // A limit that is given decides by itself how much a bound on the error may take.
    const bool limited = p.spans && plan.host_limit != unlimited;
    const uint64_t each = limited ? detail_slot_bytes(p, layer) : host_detail_bytes(p, layer);
    const uint64_t most = mul(static_cast<uint64_t>(windows), each);
    if (!p.spans || (p.detail_error == 0 && is_l_format(p.detail_format))) return most;
    const uint64_t tile = each / static_cast<uint64_t>(ceil_div(p.span_max, r_tile_tokens));
    return std::min(most, mul(static_cast<uint64_t>(ceil_div(plan.length_tokens, r_tile_tokens) + windows), tile));
}
// With reference counts, entries and the list of what is free.
uint64_t with_host_tables(uint64_t detail, int64_t windows) {
    return add(add(detail, detail / place_bytes * host_unit_overhead_bytes),
               mul(static_cast<uint64_t>(windows), host_entry_bytes + host_extent_bytes));
}

// What reading from the host costs the device: keys for every window first, then slots to fetch into; `bytes` becomes what is left of it.
void set_zoom(const CachePlan &plan, const LayerGeometry &layer, int64_t most, uint64_t *bytes, LaneQuota *q) {
    const PolicyConfig &p = plan.policy;
    if (!p.zooms(layer)) return;
    LaneQuota zoom = *q;
    zoom.detail_slot_bytes = detail_slot_bytes(p, layer);
    int64_t windows = p.spans ? span_capacity(plan) : most;
    if (plan.host_limit != unlimited && !p.spans)
        windows = std::min<int64_t>(
            windows, static_cast<int64_t>(std::min<uint64_t>(plan.host_limit / std::max<uint64_t>(plan.host_weight, 1), many_windows)));
    const uint64_t balance = router_balance_bytes(p, layer);
    const uint64_t key = router_key_table_bytes(p, layer);
    if (*bytes <= balance) return;
    windows = std::min<int64_t>(windows, static_cast<int64_t>((*bytes - balance) / key));
    const uint64_t left = *bytes - balance - static_cast<uint64_t>(windows) * key;
    const uint64_t chosen = 2 * sizeof(int32_t);
    const int64_t fetch = std::min({p.windows_read(windows), static_cast<int64_t>(std::min<uint64_t>(left / chosen, many_windows)),
                                    limits::max_zoom_slots / (2 * static_cast<int64_t>(layer.kv_heads))});
    if (windows < 1 || fetch < 1) return;
    const uint64_t slot = uint64_t{plan.staged_slot_bytes} + slot_overhead_bytes + zoom_slot_state_bytes;
    const int64_t fits = static_cast<int64_t>(std::min<uint64_t>((left - static_cast<uint64_t>(fetch) * chosen) / slot, many_windows));
    zoom.host_windows = static_cast<int32_t>(windows);
    zoom.fetch_windows = static_cast<int32_t>(fetch);
    zoom.zoom_slots = static_cast<int32_t>(std::min<int64_t>({p.keep_windows, fits, fetch}));
    *bytes -= static_cast<uint64_t>(zoom.zoom_slots) * (uint64_t{plan.staged_slot_bytes} + slot_overhead_bytes) +
              zoom_table_bytes(p, layer, zoom);
    *q = zoom;
}

uint64_t floor_bytes(const CachePlan &plan, const LayerGeometry &layer) {
    const PolicyConfig &p = plan.policy;
    const LaneQuota q = lane_shape(p, layer);
    const Costs c = costs(p, q);
    const int64_t windows = p.routes() ? q.protected_windows : p.sekv_paper() ? 0 : 1;
    return c.sink + static_cast<uint64_t>(windows) * c.open + lane_table_bytes(p, layer, epoch_count(plan, layer, 1));
}

uint64_t token_bytes(const PolicyConfig &policy, const LayerGeometry &layer) {
    return static_cast<uint64_t>(layer.key_dim + layer.value_dim) * static_cast<uint64_t>(format_bits(policy.store_dtype)) / 8;
}

// A lane's part of the history bytes goes by what it would hold in a full cache.
uint64_t lane_weight(const CachePlan &plan, const LayerGeometry &layer) {
    uint64_t weight = token_bytes(plan.policy, layer);
    if (plan.length_tokens > 0) {
        int64_t tokens = plan.length_tokens;
        if (layer.sliding_window > 0) tokens = std::min<int64_t>(tokens, layer.sliding_window);
        weight = mul(weight, static_cast<uint64_t>(tokens));
    }
    return weight;
}

// Windows that policy full holds for a sequence of `tokens`: a sliding window needs no more than it sees, and what a step adds.
int64_t full_policy_windows(const CachePlan &plan, const LayerGeometry &layer, int64_t tokens) {
    const PolicyConfig &p = plan.policy;
    if (layer.sliding_window > 0) {
        tokens = std::min<int64_t>(tokens, int64_t{layer.sliding_window} + plan.info.max_step_tokens + p.sinks + 2 * p.window);
    }
    return std::max<int64_t>(ceil_div(tokens - p.sinks, p.window), 1);
}

// A lane's part of a limit on one tier of a sequence.
uint64_t lane_share(const CachePlan &plan, const LayerGeometry &layer, uint64_t limit) {
    return limit == unlimited ? unlimited : scale_floor(limit, lane_weight(plan, layer), std::max<uint64_t>(plan.history_weight, 1));
}

} // namespace

uint64_t router_key_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer) {
    const skerry_route_params params = route_params(policy, layer);
    return router_key_bytes(params) + static_cast<uint64_t>(params.vectors);
}

uint64_t router_balance_bytes(const PolicyConfig &policy, const LayerGeometry &layer) {
    return policy.router != nullptr ? 0 : epoch_table_bytes(layer);
}

uint64_t zoom_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer, const LaneQuota &quota) {
    if (quota.host_windows == 0) return 0;
    return static_cast<uint64_t>(quota.host_windows) * router_key_table_bytes(policy, layer) + router_balance_bytes(policy, layer) +
           static_cast<uint64_t>(quota.zoom_slots) * zoom_slot_state_bytes +
           static_cast<uint64_t>(quota.fetch_windows) * 2 * sizeof(int32_t);
}

uint32_t detail_slot_bytes(const PolicyConfig &p, const LayerGeometry &layer) {
    const int32_t tokens = p.detail_tokens();
    if (p.detail_error > 0) return slot_bytes(p.store_dtype, p.store_dtype, layer, tokens, 0);
    if (!is_l_format(p.detail_format)) return slot_bytes(p.detail_format, p.detail_format, layer, tokens, 0);
    const int32_t key_rank = std::min({p.detail_rank, tokens, layer.key_dim});
    const int32_t value_rank = std::min({p.detail_rank, tokens, layer.value_dim});
    return static_cast<uint32_t>(
        record_bytes(p.detail_format, p.detail_format, layer.key_dim, layer.value_dim, tokens, 0, key_rank, value_rank));
}

int32_t coding_tokens(const PolicyConfig &policy) {
    return std::max({policy.window, r_tile_tokens, policy.zooms() ? policy.detail_tokens() : 0});
}

uint64_t factor_scratch_bytes(const skerry_kernels *kernels, const PolicyConfig &policy, const LayerGeometry &layer) {
    if (policy.detail_error == 0 && !is_l_format(policy.detail_format)) return 0;
    const int32_t tokens = policy.detail_tokens();
    return std::max(kernels->factorise_scratch_bytes(layer.key_dim, tokens), kernels->factorise_scratch_bytes(layer.value_dim, tokens));
}

uint64_t host_record_bytes(const CachePlan &plan, const LayerGeometry &layer, const LaneQuota &quota) {
    const uint64_t need = host_need(plan, layer, quota.host_windows);
    if (!plan.policy.spans || plan.host_limit == unlimited) return need; // a limit on windows of one size is a limit on their number
    const int64_t spans = span_capacity(plan);
    const uint64_t share = scale_floor(plan.host_limit, with_host_tables(host_need(plan, layer, spans), spans), plan.host_weight);
    const uint64_t tables = with_host_tables(0, quota.host_windows);
    const uint64_t room = (share - std::min(share, tables)) / (place_bytes + host_unit_overhead_bytes) * place_bytes;
    return std::min(need, room);
}

int64_t open_surprisals(const CachePlan &plan) {
    const PolicyConfig &p = plan.policy;
    return p.sinks + p.recent + p.span_max + p.period + std::max(plan.info.max_step_tokens, plan.info.staging_tokens);
}

int32_t PolicyConfig::score_words() const { return score == SKERRY_SCORE_LAST || score == SKERRY_SCORE_WORST ? score_queries / period : 1; }

uint64_t entry_table_bytes(const PolicyConfig &policy) {
    uint64_t bytes = sizeof(skerry_tile);
    if (policy.routes()) bytes += 8 * static_cast<uint64_t>(policy.score_words());
    if (policy.quantises()) bytes += 4; // place of a dormant record
    if (policy.keeps_exact()) bytes += 4;
    return bytes;
}

uint32_t epoch_table_bytes(const LayerGeometry &layer) {
    return static_cast<uint32_t>(round_up(3 * static_cast<size_t>(layer.key_dim) + 16, 8));
}

uint64_t lane_table_bytes(const PolicyConfig &policy, const LayerGeometry &layer, int32_t epochs) {
    uint64_t bytes = lane_state_bytes;
    if (policy.uses_epochs()) {
        bytes += static_cast<uint64_t>(epochs) * epoch_table_bytes(layer) + 4 * static_cast<uint64_t>(layer.key_dim);
    }
    if (policy.zooms()) bytes += lane_zoom_bytes;
    return bytes;
}

ZoomShape zoom_shape(const skerry_kernels *kernels, const PolicyConfig &policy, const LayerGeometry &layer, const LaneQuota &quota) {
    ZoomShape zoom;
    zoom.windows = quota.host_windows;
    zoom.fetch = quota.fetch_windows;
    // Low-rank detail is one tile; anything else, which a bound on the error may choose, tiles of 16 tokens.
    zoom.tiles = int64_t{quota.fetch_windows} * ceil_div(policy.detail_tokens(), r_tile_tokens);
    if (zoom.windows > 0) {
        const skerry_route_params params = route_params(policy, layer);
        const uint64_t key_dim = static_cast<uint64_t>(layer.key_dim), rank = static_cast<uint64_t>(params.dim);
        zoom.query_bytes = 4 * (policy.router == nullptr ? 2 * key_dim : static_cast<uint64_t>(layer.group) * (rank + 1));
        zoom.route_bytes = kernels->route_scratch_bytes(&params);
    }
    return zoom;
}

LaneScratch lane_scratch(const LayerGeometry &layer, int32_t rows, int64_t tiles, int32_t epochs, const ZoomShape &zoom) {
    tiles += zoom.tiles;
    const uint64_t splits = static_cast<uint64_t>(lane_splits(tiles));
    const uint64_t heads = static_cast<uint64_t>(rows) * static_cast<uint64_t>(layer.group);
    const uint64_t key_dim = static_cast<uint64_t>(layer.key_dim);
    const uint64_t value_dim = static_cast<uint64_t>(layer.value_dim);
    LaneScratch s;
    const auto take = [&](uint64_t bytes) {
        const uint64_t at = s.bytes;
        s.bytes += round_up(bytes, 64);
        return at;
    };
    s.out = take(splits * heads * value_dim * 4);
    s.max = take(splits * heads * 4);
    s.sum = take(splits * heads * 4);
    s.tile_max = take(static_cast<uint64_t>(tiles) * heads * 4);
    s.tile_sum = take(static_cast<uint64_t>(tiles) * heads * 4);
    s.queries = take(heads * key_dim * 4);
    s.merged = take(heads * value_dim * 4);
    s.lse = take(heads * 4);
    s.epochs = take(static_cast<uint64_t>(epochs) * sizeof(skerry_epoch));
    s.epoch_floats = take(static_cast<uint64_t>(epochs) * 2 * key_dim * 4);
    if (zoom.windows > 0) {
        s.route = take((static_cast<uint64_t>(zoom.windows) + 1) * static_cast<uint64_t>(layer.group) * 4);
        s.weights = take(static_cast<uint64_t>(zoom.windows));
        s.selection = take(static_cast<uint64_t>(zoom.windows) * selection_window_bytes + selection_fixed_bytes);
        s.chosen = take(static_cast<uint64_t>(2 * zoom.fetch) * 4);
        s.tiles = take(static_cast<uint64_t>(tiles) * sizeof(skerry_tile));
        s.origins = take(static_cast<uint64_t>(tiles) * 4);
        s.router = take(zoom.query_bytes);
        s.route_scratch = take(zoom.route_bytes);
    }
    return s;
}

skerry_route_params route_params(const PolicyConfig &policy, const LayerGeometry &layer) {
    skerry_route_params params{};
    params.group = layer.group;
    if (policy.router != nullptr) {
        // docs/router-files.md: a scale of its own, and no cap.
        params.form = SKERRY_ROUTE_PROJECTED;
        params.dim = policy.router->summary_dim;
        params.vectors = policy.router->centroids;
        params.sets = policy.router->sets();
        params.scale = 1.0f / std::sqrt(static_cast<float>(params.dim));
        return params;
    }
    params.form = SKERRY_ROUTE_CENTROIDS;
    params.dim = layer.key_dim;
    params.vectors = router_centroids;
    params.sets = 1;
    params.scale = layer.scale;
    params.softcap = layer.softcap;
    return params;
}

uint64_t router_key_scratch_bytes(const PolicyConfig &policy, const LayerGeometry &layer) {
    if (!policy.zooms(layer)) return 0;
    const uint64_t key_dim = static_cast<uint64_t>(layer.key_dim);
    if (policy.router == nullptr) return 4 * router_centroids * key_dim;
    // Tokens and centroids, projected for all sets side by side, and one set's centroids; or one mean key.
    const skerry_route_params params = route_params(policy, layer);
    const uint64_t row = static_cast<uint64_t>(params.sets) * static_cast<uint64_t>(params.dim);
    const uint64_t rows = static_cast<uint64_t>(policy.detail_tokens() + 2 * router_centroids);
    return 4 * (rows * row + key_dim);
}

skerry_attend_params attend_params(const PolicyConfig &policy, const LayerGeometry &layer) {
    skerry_attend_params params{};
    params.inverse_frequencies = policy.paper() ? layer.inverse_frequencies : nullptr;
    params.key_dim = layer.key_dim;
    params.value_dim = layer.value_dim;
    params.group = layer.group;
    params.sliding_window = layer.sliding_window;
    params.scale = layer.scale;
    params.softcap = layer.softcap;
    params.rotary_dims = layer.rotary_dims;
    params.rotary_pairing = layer.rotary_pairing;
    params.attention_factor = layer.attention_factor;
    params.value_group = policy.value_group;
    params.grid_dtype = policy.store_dtype == SKERRY_DTYPE_F16 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_BF16;
    params.tiers = SKERRY_TIERS_FULL | SKERRY_TIERS_QUANTISED | SKERRY_TIERS_HOST;
    return params;
}

uint64_t task_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int32_t rows) {
    const skerry_attend_params params = attend_params(policy, layer);
    const size_t bytes = device.kernels->attend_scratch_bytes(&params, rows, limits::split_tiles);
    return round_up(bytes, 64) * static_cast<uint64_t>(device.task_slots);
}

uint64_t event_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries) {
    const uint64_t count = static_cast<uint64_t>(entries);
    const int32_t capacity = coding_tokens(policy);
    const size_t code = std::max(device.kernels->code_scratch_bytes(layer.key_dim, capacity),
                                 device.kernels->code_scratch_bytes(layer.value_dim, capacity));
    const uint64_t rows = static_cast<uint64_t>(capacity) * static_cast<uint64_t>(layer.key_dim + layer.value_dim) * 4;
    const uint64_t detail =
        !policy.zooms(layer)
            ? 0
            : round_up(detail_slot_bytes(policy, layer), 64) +
                  round_up(static_cast<uint64_t>(capacity) * static_cast<uint64_t>(std::max(layer.key_dim, layer.value_dim)) * 4, 64) +
                  round_up(factor_scratch_bytes(device.kernels, policy, layer), 64);
    // Candidate, target, order; then the new list.
    return round_up(count * event_candidate_bytes, 64) + round_up(count * (entry_table_bytes(policy) + 8), 64) + round_up(rows, 64) +
           round_up(code, 64) + detail + round_up(static_cast<uint64_t>(layer.key_dim) * 40, 64) +
           round_up(router_key_scratch_bytes(policy, layer), 64) + 256;
}

uint64_t layer_scratch_bytes(const PlanDevice &device, const PolicyConfig &policy, const LayerGeometry &layer, int64_t entries,
                             int32_t epochs, const ZoomShape &zoom) {
    const uint64_t wide = static_cast<uint64_t>(layer.kv_heads) * lane_scratch(layer, 1, entries, epochs, zoom).bytes;
    const uint64_t deep = lane_scratch(layer, limits::task_rows, entries, epochs).bytes;
    const uint64_t attend = std::max(wide, deep) + task_scratch_bytes(device, policy, layer, limits::task_rows);
    const uint64_t coding = event_scratch_bytes(device, policy, layer, 0); // append and gather
    const uint64_t event =
        policy.routes() ? static_cast<uint64_t>(layer.kv_heads) * event_scratch_bytes(device, policy, layer, entries) : coding;
    // Views and observations of a row that has zoomed in list it behind everything else.
    const uint64_t listed = zoom.windows > 0 ? round_up(static_cast<uint64_t>(entries + zoom.tiles) * (sizeof(skerry_tile) + 4) + 64, 64) +
                                                   static_cast<uint64_t>(layer.kv_heads) * zoomed_lane_bytes
                                             : 0;
    return std::max(attend, event) + listed;
}

LaneQuota CachePlan::quota(const LayerGeometry &layer) const {
    LaneQuota q = lane_shape(policy, layer);
    const Costs c = costs(policy, q);
    set_staging(*this, info.max_step_tokens, info.staging_tokens, &q);

    int64_t most = many_windows; // history windows that can exist at all
    if (length_tokens > 0) {
        most = std::max<int64_t>(0, ceil_div(length_tokens - policy.sinks - policy.recent, policy.window) + 1);
    }
    if (layer.sliding_window > 0) most = std::min<int64_t>(most, ceil_div(layer.sliding_window, policy.window) + 1);

    int64_t full = 0;
    int64_t quantised = 0;
    if (!bounded) {
        // No limit on the whole, but perhaps on a tier.
        const auto within = [&](uint64_t limit, uint64_t cost) {
            return limit == unlimited ? int64_t{many_windows}
                                      : static_cast<int64_t>(std::min<uint64_t>(limit / std::max<uint64_t>(cost, 1), many_windows));
        };
        if (policy.has_full_history()) full = within(lane_share(*this, layer, full_limit), policy.has_wide() ? c.wide : c.open);
        if (policy.quantises()) quantised = within(lane_share(*this, layer, quantised_limit), c.record);
    } else if (policy.paper()) {
        PaperBudget budget;
        const PaperShape shape{static_cast<uint32_t>(layer.kv_heads), static_cast<uint32_t>(layer.key_dim),
                               static_cast<uint32_t>(policy.window), static_cast<uint32_t>(policy.sinks),
                               static_cast<uint32_t>(policy.recent)};
        if (paper_budget(shape, Ratio{beta_ppm, 1000000}, static_cast<uint64_t>(length_tokens), Ratio{policy.quantised_share_ppm, 1000000},
                         &budget) == PaperFault::none) {
            full = static_cast<int64_t>(std::min<uint64_t>(budget.full_slots, many_windows));
            quantised = static_cast<int64_t>(std::min<uint64_t>(budget.quantised_slots, many_windows));
        }
    } else {
        uint64_t bytes = scale_floor(history_bytes, lane_weight(*this, layer), std::max<uint64_t>(history_weight, 1));
        uint64_t full_cost = policy.has_wide() ? c.wide : c.open;
        uint64_t record_cost = c.record;
        if (policy.uses_epochs() && length_tokens == 0) {
            // Epoch tables grow with the windows kept: two for each window's share (epoch_count).
            const uint64_t share =
                2 * static_cast<uint64_t>(ceil_div(static_cast<int64_t>(epoch_table_bytes(layer)) * policy.window, limits::epoch_tokens));
            full_cost += share;
            record_cost += share;
            bytes -= std::min(bytes, static_cast<uint64_t>(epoch_table_bytes(layer)) * 2);
        }
        const uint64_t full_most = lane_share(*this, layer, full_limit);
        const uint64_t quantised_most = lane_share(*this, layer, quantised_limit);
        const auto fit = [&](uint64_t limit, uint64_t cost) {
            return static_cast<int64_t>(std::min<uint64_t>(limit / std::max<uint64_t>(cost, 1), static_cast<uint64_t>(most)));
        };
        set_zoom(*this, layer, most, &bytes, &q);
        switch (policy.kind) {
        case SKERRY_POLICY_FULL:
            full = full_policy_windows(*this, layer, full_tokens);
            break;
        case SKERRY_POLICY_EVICT:
            full = fit(std::min(bytes, full_most), c.open);
            break;
        case SKERRY_POLICY_QUANTISE:
            quantised = fit(std::min(bytes, quantised_most), record_cost);
            break;
        case SKERRY_POLICY_SEKV:
            if (policy.sekv_paper()) break;
            if (policy.spans) set_anchors(*this, layer, bytes, &q);
            if (!policy.residents) break;
            [[fallthrough]];
        case SKERRY_POLICY_QEVICT: {
            const uint64_t share = scale_floor(bytes, policy.quantised_share_ppm, 1000000);
            quantised = fit(std::min(share, quantised_most), record_cost);
            const uint64_t left = bytes - static_cast<uint64_t>(quantised) * record_cost;
            full = fit(std::min(left, full_most), full_cost);
            if (length_tokens > 0 && most * static_cast<int64_t>(record_cost) <= static_cast<int64_t>(bytes) && full_cost > record_cost) {
                // Everything can stay readable: what is left over raises windows to the full tier.
                const uint64_t spare = bytes - static_cast<uint64_t>(most) * record_cost;
                full = fit(std::min(spare, full_most), full_cost - record_cost);
                quantised = most - full;
                if (static_cast<uint64_t>(quantised) * record_cost > quantised_most) quantised = fit(quantised_most, record_cost);
            } else {
                full = std::min(full, most - quantised);
                const uint64_t rest = bytes - static_cast<uint64_t>(quantised) * record_cost - static_cast<uint64_t>(full) * full_cost;
                const uint64_t room =
                    quantised_most == unlimited
                        ? rest
                        : std::min(rest, quantised_most - std::min(quantised_most, static_cast<uint64_t>(quantised) * record_cost));
                quantised = std::min<int64_t>(quantised + static_cast<int64_t>(room / std::max<uint64_t>(record_cost, 1)), most - full);
            }
            break;
        }
        default:
            break;
        }
    }
    q.full_windows = static_cast<int32_t>(full);
    q.quantised_windows = static_cast<int32_t>(quantised);
    q.record_slots = policy.quantises() ? static_cast<int32_t>(policy.paper() ? full + quantised : quantised) : 0;
    if (!bounded) q.record_slots = 0;
    q.epochs = epoch_count(*this, layer, bounded ? std::max<int64_t>(full + quantised, 1) : 1);
    if (bounded) {
        const int64_t history = full * q.open_tiles + quantised * std::max(q.record_tiles, 1);
        q.table_entries =
            static_cast<int32_t>(q.sink_tiles + static_cast<int64_t>(q.protected_windows) * q.open_tiles + history + q.anchors);
    }
    q.staging_entries = q.staging_windows * q.open_tiles;
    if (bounded) set_undo_slots(*this, info.max_step_tokens, &q);
    return q;
}

namespace {

// What the paper does not have stays at 0: nothing is silently ignored.
Status read_sekv_paper(const skerry_policy_desc &policy, const skerry_sekv_desc &sekv, PolicyConfig *p, skerry_error *error) {
    constexpr uint32_t known = SKERRY_SEKV_ABSENT_ROWS | SKERRY_SEKV_VALUE_GATES | SKERRY_SEKV_GROUP_CHOICE | SKERRY_SEKV_SECOND_ORDER;
    if ((sekv.flags & ~known) != 0 || sekv.reserved != 0)
        return bad(error, SKERRY_SUBJECT_FLAGS, sekv.flags, known, "sekv.flags with fidelity paper (or sekv.reserved)");
    struct Unused {
        int64_t value;
        const char *name;
    };
    const Unused unused[] = {{policy.window_tokens, "policy.window_tokens"},
                             {policy.sink_tokens, "policy.sink_tokens"},
                             {policy.recent_tokens, "policy.recent_tokens"},
                             {policy.period_tokens, "policy.period_tokens"},
                             {policy.score, "policy.score"},
                             {policy.score_queries, "policy.score_queries"},
                             {policy.selection, "policy.selection"},
                             {policy.full_format, "policy.full_format"},
                             {policy.key_format, "policy.key_format"},
                             {policy.value_format, "policy.value_format"},
                             {policy.value_group, "policy.value_group"},
                             {policy.quantised_share_ppm, "policy.quantised_share_ppm"},
                             {policy.hysteresis_ppm, "policy.hysteresis_ppm"},
                             {policy.max_moves_ppm, "policy.max_moves_ppm"},
                             {policy.flags, "policy.flags"},
                             {sekv.detail_format, "sekv.detail_format"},
                             {sekv.fetch_ppm, "sekv.fetch_ppm"},
                             {sekv.refine_ppm, "sekv.refine_ppm"},
                             {sekv.hysteresis_ppm, "sekv.hysteresis_ppm"},
                             {sekv.keep_windows, "sekv.keep_windows"},
                             {sekv.miss, "sekv.miss"},
                             {sekv.span_max_tokens, "sekv.span_max_tokens"},
                             {sekv.detail_rank, "sekv.detail_rank, which the router's file names,"},
                             {sekv.detail_error != 0 ? 1 : 0, "sekv.detail_error"}};
    for (const Unused &field : unused) {
        if (field.value == 0) continue;
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_POLICY, -1, field.value, 0,
                    "%s is %lld, SEKV with fidelity paper has none", field.name, static_cast<long long>(field.value));
    }
    if (sekv.segmentation != SKERRY_SEGMENTS_DEFAULT && sekv.segmentation != SKERRY_SEGMENTS_SURPRISAL)
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.segmentation, SKERRY_SEGMENTS_SURPRISAL, "sekv.segmentation with fidelity paper");
    if (p->router == nullptr) return bad(error, SKERRY_SUBJECT_POLICY, 0, 1, "sekv.router, which fidelity paper cannot do without,");
    if (sekv.span_min_tokens < SKERRY_NONE_TOKENS)
        return bad(error, SKERRY_SUBJECT_WINDOW, sekv.span_min_tokens, limits::max_position, "sekv.span_min_tokens");
    p->full_resolution_below = tokens_or(sekv.span_min_tokens, 4);
    p->anchor_threshold = sekv.anchor_threshold == 0 ? 1.0f : sekv.anchor_threshold;
    if (!(p->anchor_threshold > -100 && p->anchor_threshold < 100))
        return bad(error, SKERRY_SUBJECT_POLICY, 0, 100, "sekv.anchor_threshold is no number between -100 and 100: it");
    if (sekv.budget_entries < 0) return bad(error, SKERRY_SUBJECT_BUDGET, sekv.budget_entries, limits::max_position, "sekv.budget_entries");
    p->budget_entries = sekv.budget_entries == 0 ? INT64_MAX : sekv.budget_entries;
    p->sekv_flags = sekv.flags;
    p->prefill = SKERRY_PREFILL_WHOLE;
    // Nothing is protected: the prompt is cut from its first token on.
    p->sinks = p->recent = 0;
    return SKERRY_OK;
}

Status read_sekv(const skerry_policy_desc &policy, skerry_dtype store, PolicyConfig *p, skerry_error *error) {
    if (policy.sekv != nullptr && policy.kind != SKERRY_POLICY_SEKV) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.kind, SKERRY_POLICY_SEKV, "policy.sekv is given, but policy.kind");
    }
    if (policy.kind != SKERRY_POLICY_SEKV) return SKERRY_OK;
    skerry_sekv_desc sekv{};
    if (policy.sekv != nullptr) {
        const Status status = read_struct(policy.sekv, sizeof(skerry_sekv_desc), &sekv, sizeof sekv, 1, "policy.sekv", error);
        if (status < 0) return status;
    }
    if (sekv.router != nullptr) {
        const RouterWeights &router = sekv.router->weights;
        const bool paper = p->sekv_paper();
        if ((router.form == SKERRY_ROUTER_FORM_PAPER) != paper) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_POLICY, -1, router.form,
                        paper ? SKERRY_ROUTER_FORM_PAPER : SKERRY_ROUTER_FORM_PRODUCTION,
                        "sekv.router (%s) has the form '%s', policy.fidelity is %s", router.model,
                        router.form == SKERRY_ROUTER_FORM_PAPER ? "paper" : "production", paper ? "paper" : "production");
        }
        p->router = &router;
    }
    if (p->sekv_paper()) return read_sekv_paper(policy, sekv, p, error);
    if (sekv.budget_entries != 0 || sekv.reserved != 0)
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.budget_entries, 0, "sekv.budget_entries, which belongs to fidelity paper,");
    constexpr uint32_t known = SKERRY_SEKV_NO_RESIDENTS | SKERRY_SEKV_SHARED_BASES;
    if ((sekv.flags & ~known) != 0) return bad(error, SKERRY_SUBJECT_FLAGS, sekv.flags, known, "sekv.flags");
    if (!is_r_format(p->key_format))
        return bad(error, SKERRY_SUBJECT_FORMAT, p->key_format, SKERRY_FORMAT_R3, "policy.key_format with SEKV");
    if (p->keeps_exact()) return bad(error, SKERRY_SUBJECT_FLAGS, p->flags, 0, "SKERRY_POLICY_KEEP_EXACT with SEKV: policy.flags");
    if (sekv.segmentation < SKERRY_SEGMENTS_DEFAULT || sekv.segmentation > SKERRY_SEGMENTS_SURPRISAL)
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.segmentation, SKERRY_SEGMENTS_SURPRISAL, "sekv.segmentation");
    p->spans = sekv.segmentation == SKERRY_SEGMENTS_SURPRISAL;
    if (!p->spans && (sekv.span_min_tokens != 0 || sekv.span_max_tokens != 0 || sekv.anchor_threshold != 0))
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.span_min_tokens, 0, "sekv.span_min_tokens (or another option of SEGMENTS_SURPRISAL)");
    if (p->spans) {
        p->prefill = SKERRY_PREFILL_WHOLE;
        p->span_min = sekv.span_min_tokens == 0 ? 64 : sekv.span_min_tokens;
        p->span_max = sekv.span_max_tokens == 0 ? std::max(128, p->span_min) : sekv.span_max_tokens;
        p->anchor_threshold = sekv.anchor_threshold == 0 ? 1.0f : sekv.anchor_threshold;
        if (p->span_max < 1 || p->span_max > limits::max_window)
            return bad(error, SKERRY_SUBJECT_WINDOW, sekv.span_max_tokens, limits::max_window, "sekv.span_max_tokens");
        if (p->span_min < 4 || p->span_min > p->span_max)
            return bad(error, SKERRY_SUBJECT_WINDOW, sekv.span_min_tokens, p->span_max, "sekv.span_min_tokens, at least 4,");
        if (!(p->anchor_threshold > -100 && p->anchor_threshold < 100))
            return bad(error, SKERRY_SUBJECT_POLICY, 0, 100, "sekv.anchor_threshold is no number between -100 and 100: it");
        if (p->window > r_tile_tokens)
            return bad(error, SKERRY_SUBJECT_WINDOW, p->window, r_tile_tokens, "policy.window_tokens with spans by surprisal");
    }
    p->residents = (sekv.flags & SKERRY_SEKV_NO_RESIDENTS) == 0 && !p->spans;
    p->detail_format = sekv.detail_format == SKERRY_FORMAT_DEFAULT ? static_cast<skerry_format>(SKERRY_FORMAT_R4) : sekv.detail_format;
    if (!is_r_format(p->detail_format) && !is_l_format(p->detail_format) && p->detail_format != store) {
        return bad(error, SKERRY_SUBJECT_FORMAT, sekv.detail_format, SKERRY_FORMAT_R4, "sekv.detail_format");
    }
    p->detail_rank = sekv.detail_rank == 0 ? 16 : sekv.detail_rank;
    if (p->detail_rank < 1 || p->detail_rank > l_tile_tokens)
        return bad(error, SKERRY_SUBJECT_FORMAT, sekv.detail_rank, l_tile_tokens, "sekv.detail_rank");
    p->detail_error = sekv.detail_error;
    if (!(p->detail_error >= 0 && p->detail_error < 1))
        return bad(error, SKERRY_SUBJECT_FORMAT, 0, 1, "sekv.detail_error is no number from 0 to below 1: it");
    p->shared_bases = (sekv.flags & SKERRY_SEKV_SHARED_BASES) != 0;
    if (p->shared_bases && p->detail_error == 0)
        return bad(error, SKERRY_SUBJECT_FLAGS, sekv.flags, 0, "SKERRY_SEKV_SHARED_BASES without sekv.detail_error: sekv.flags");
    const auto ppm = [&](uint32_t given, uint32_t otherwise, uint32_t most, uint32_t least, const char *name, uint32_t *value) -> Status {
        *value = given == 0 ? otherwise : given;
        return *value >= least && *value <= most ? Status{SKERRY_OK} : bad(error, SKERRY_SUBJECT_POLICY, given, most, name);
    };
    if (const Status status = ppm(sekv.fetch_ppm, 120000, 1000000, 1, "sekv.fetch_ppm", &p->fetch_ppm); status < 0) return status;
    if (const Status status = ppm(sekv.refine_ppm, 250000, 1000000, 1, "sekv.refine_ppm", &p->refine_ppm); status < 0) return status;
    if (const Status status =
            ppm(sekv.hysteresis_ppm, 1500000, 1000000000, 1000000, "sekv.hysteresis_ppm, at least 1000000,", &p->zoom_hysteresis_ppm);
        status < 0)
        return status;
    p->keep_windows = sekv.keep_windows;
    if (sekv.keep_windows < 0 || sekv.keep_windows > limits::max_keep_windows) {
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.keep_windows, limits::max_keep_windows, "sekv.keep_windows");
    }
    p->miss = sekv.miss;
    if (p->miss != SKERRY_ZOOM_WAIT && p->miss != SKERRY_ZOOM_SKIP)
        return bad(error, SKERRY_SUBJECT_POLICY, sekv.miss, SKERRY_ZOOM_SKIP, "sekv.miss");
    return SKERRY_OK;
}

Status read_policy(const skerry_cache_desc &desc, skerry_dtype store, PolicyConfig *out, skerry_error *error) {
    skerry_policy_desc policy{};
    if (desc.policy != nullptr) {
        const Status status = read_struct(desc.policy, offsetof(skerry_policy_desc, sekv), &policy, sizeof policy, 1, "desc.policy", error);
        if (status < 0) return status;
    }
    constexpr uint32_t known = SKERRY_POLICY_KEEP_EXACT | SKERRY_POLICY_ONE_WAY | SKERRY_POLICY_EVICT_FIRST;
    if ((policy.flags & ~known) != 0 || policy.reserved != 0) {
        return bad(error, SKERRY_SUBJECT_FLAGS, policy.flags, known, "policy.flags (or its reserved field)");
    }
    if (policy.kind < SKERRY_POLICY_FULL || policy.kind > SKERRY_POLICY_SEKV) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.kind, SKERRY_POLICY_SEKV, "policy.kind");
    }
    if (policy.fidelity != SKERRY_FIDELITY_PRODUCTION && policy.fidelity != SKERRY_FIDELITY_PAPER) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.fidelity, SKERRY_FIDELITY_PAPER, "policy.fidelity");
    }
    if (policy.prefill != SKERRY_PREFILL_SPLIT && policy.prefill != SKERRY_PREFILL_WHOLE) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.prefill, SKERRY_PREFILL_WHOLE, "policy.prefill");
    }
    if (policy.fidelity == SKERRY_FIDELITY_PAPER && policy.kind != SKERRY_POLICY_QEVICT && policy.kind != SKERRY_POLICY_SEKV) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.kind, SKERRY_POLICY_SEKV, "policy.kind with fidelity paper");
    }
    const bool paper = policy.fidelity == SKERRY_FIDELITY_PAPER && policy.kind == SKERRY_POLICY_QEVICT;
    PolicyConfig p;
    p.kind = policy.kind;
    p.fidelity = policy.fidelity;
    p.prefill = paper ? SKERRY_PREFILL_WHOLE : policy.prefill;
    p.flags = policy.flags;
    p.store_dtype = store;
    p.window = policy.window_tokens == 0 ? (paper ? 8 : 16) : policy.window_tokens;
    if (p.window < 1 || p.window > limits::max_window) {
        return bad(error, SKERRY_SUBJECT_WINDOW, policy.window_tokens, limits::max_window, "policy.window_tokens");
    }
    p.sinks = tokens_or(policy.sink_tokens, paper ? 5 : 4);
    if (p.sinks < 0 || p.sinks > limits::max_sinks) {
        return bad(error, SKERRY_SUBJECT_SINKS, policy.sink_tokens, limits::max_sinks, "policy.sink_tokens");
    }
    p.recent = tokens_or(policy.recent_tokens, 32);
    if (p.recent < 0 || p.recent > limits::max_step_tokens || (paper && (p.recent % p.window != 0 || p.recent == 0))) {
        return bad(error, SKERRY_SUBJECT_RECENT, policy.recent_tokens, paper ? p.window : limits::max_step_tokens,
                   paper ? "policy.recent_tokens, in fidelity paper a multiple of the window," : "policy.recent_tokens");
    }
    p.period = policy.period_tokens == 0 ? (paper ? p.window : 16) : policy.period_tokens;
    if (p.period < 1 || p.period > limits::max_period || (paper && p.period != p.window)) {
        return bad(error, SKERRY_SUBJECT_PERIOD, policy.period_tokens, paper ? p.window : limits::max_period, "policy.period_tokens");
    }
    p.score = policy.score;
    if (p.score < SKERRY_SCORE_DEFAULT || p.score > SKERRY_SCORE_WORST) {
        return bad(error, SKERRY_SUBJECT_SCORE, policy.score, SKERRY_SCORE_WORST, "policy.score");
    }
    if (p.score == SKERRY_SCORE_DEFAULT) {
        p.score = paper ? SKERRY_SCORE_CUMULATIVE : p.kind == SKERRY_POLICY_EVICT ? SKERRY_SCORE_AGE : SKERRY_SCORE_LAST;
    }
    p.score_queries = policy.score_queries == 0 ? std::max(32 / p.period, 1) * p.period : policy.score_queries;
    if ((p.score == SKERRY_SCORE_LAST || p.score == SKERRY_SCORE_WORST) &&
        (p.score_queries < 1 || p.score_queries % p.period != 0 || p.score_queries / p.period > limits::max_score_periods)) {
        return bad(error, SKERRY_SUBJECT_SCORE, policy.score_queries, static_cast<int64_t>(p.period) * limits::max_score_periods,
                   "policy.score_queries, which must be a multiple of the period,");
    }
    p.selection = policy.selection;
    if (p.selection < SKERRY_SELECTION_DEFAULT || p.selection > SKERRY_SELECTION_PER_LAYER) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.selection, SKERRY_SELECTION_PER_LAYER, "policy.selection");
    }
    if (p.selection == SKERRY_SELECTION_DEFAULT) p.selection = paper ? SKERRY_SELECTION_PER_LAYER : SKERRY_SELECTION_PER_HEAD;
    const skerry_format low_key = paper ? SKERRY_FORMAT_C2 : SKERRY_FORMAT_R3;
    const skerry_format low_value = paper ? SKERRY_FORMAT_C2 : SKERRY_FORMAT_R2;
    p.key_format = policy.key_format == SKERRY_FORMAT_DEFAULT ? low_key : policy.key_format;
    p.value_format = policy.value_format == SKERRY_FORMAT_DEFAULT ? low_value : policy.value_format;
    for (const skerry_format format : {p.key_format, p.value_format}) {
        if (!is_r_format(format) && !is_c_format(format)) {
            return bad(error, SKERRY_SUBJECT_FORMAT, format, SKERRY_FORMAT_C4, "policy.key_format or value_format");
        }
    }
    if (is_c_format(p.key_format) != is_c_format(p.value_format)) {
        return bad(error, SKERRY_SUBJECT_FORMAT, p.value_format, p.key_format, "policy.value_format, of another family than key_format,");
    }
    if (paper && !is_c_format(p.key_format)) {
        return bad(error, SKERRY_SUBJECT_FORMAT, p.key_format, SKERRY_FORMAT_C2, "policy.key_format with fidelity paper");
    }
    // The per-channel formats carry no balance, which r8 would need.
    const bool wide = (p.kind == SKERRY_POLICY_QEVICT || p.zooms()) && !paper && is_r_format(p.key_format);
    p.full_format =
        policy.full_format == SKERRY_FORMAT_DEFAULT ? (wide ? static_cast<skerry_format>(SKERRY_FORMAT_R8) : store) : policy.full_format;
    if (p.full_format != store && (p.full_format != SKERRY_FORMAT_R8 || !wide)) {
        return bad(error, SKERRY_SUBJECT_FORMAT, p.full_format, wide ? static_cast<skerry_format>(SKERRY_FORMAT_R8) : store,
                   wide ? "policy.full_format, the store dtype or R8," : "policy.full_format, here the store dtype,");
    }
    p.value_group = policy.value_group;
    if (p.value_group < 0 || p.value_group > limits::max_head_dim) {
        return bad(error, SKERRY_SUBJECT_FORMAT, policy.value_group, limits::max_head_dim, "policy.value_group");
    }
    if (policy.quantised_share_ppm > 1000000) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.quantised_share_ppm, 1000000, "policy.quantised_share_ppm");
    }
    p.quantised_share_ppm = policy.quantised_share_ppm == 0 ? (paper ? 700000 : 1000000) : policy.quantised_share_ppm;
    p.hysteresis_ppm = policy.hysteresis_ppm == 0 ? 1200000 : policy.hysteresis_ppm;
    if (p.hysteresis_ppm < 1000000) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.hysteresis_ppm, 1000000, "policy.hysteresis_ppm, at least 1000000,");
    }
    p.max_moves_ppm = policy.max_moves_ppm == 0 ? 125000 : policy.max_moves_ppm;
    if (p.max_moves_ppm > 1000000) {
        return bad(error, SKERRY_SUBJECT_POLICY, policy.max_moves_ppm, 1000000, "policy.max_moves_ppm");
    }
    if (const Status status = read_sekv(policy, store, &p, error); status < 0) return status;
    *out = p;
    return SKERRY_OK;
}

Status check_layer_policy(const PolicyConfig &p, const LayerGeometry &layer, int32_t index, const PlanDevice &device, skerry_error *error) {
    if (p.paper()) {
        if (layer.inverse_frequencies == nullptr) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ROTARY, index, 0, 0,
                        "layer %d has no rotary embedding, which qevict with fidelity paper needs", index);
        }
        if (layer.key_dim != layer.value_dim) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_VALUE_DIM, index, layer.value_dim, layer.key_dim,
                        "layer %d: fidelity paper needs key_dim = value_dim", index);
        }
    }
    if (p.sekv_paper() && (layer.sliding_window > 0 || layer.softcap != 0)) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_LAYER, index, layer.sliding_window, 0,
                    "layer %d has a %s, which SEKV with fidelity paper does not know", index,
                    layer.sliding_window > 0 ? "sliding window" : "softcap");
    }
    if (p.sekv_paper() && layer.key_dim != layer.value_dim) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_VALUE_DIM, index, layer.value_dim, layer.key_dim,
                    "layer %d: fidelity paper weights values by gates of the keys and needs key_dim = value_dim", index);
    }
    if (p.zooms() && !p.residents && layer.sliding_window > 0) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_LAYER, index, layer.sliding_window, 0,
                    "layer %d sees a sliding window, of which nothing would be left: spans by surprisal and SKERRY_SEKV_NO_RESIDENTS are "
                    "for layers that "
                    "see everything",
                    index);
    }
    if (p.zooms(layer)) {
        const bool key = device.kernels->supports(p.detail_format, SKERRY_SIDE_KEY, layer.key_dim) != 0;
        const bool value = device.kernels->supports(p.detail_format, SKERRY_SIDE_VALUE, layer.value_dim) != 0;
        const skerry_route_params route = route_params(p, layer);
        const bool router = device.kernels->route_supports(&route) != 0;
        if (!key || !value || !router) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_KEY_DIM, index, key && value ? SKERRY_FORMAT_R2 : p.detail_format,
                        0, "layer %d: format %d, which %s, is not offered at key_dim %d and value_dim %d", index,
                        key && value ? SKERRY_FORMAT_R2 : p.detail_format, key && value ? "router keys need" : "sekv.detail_format names",
                        layer.key_dim, layer.value_dim);
        }
    }
    if (!p.quantises()) return SKERRY_OK;
    if (is_c_format(p.key_format)) {
        const int32_t per_byte = 8 / format_bits(p.key_format);
        const int32_t per_byte_v = 8 / format_bits(p.value_format);
        if (p.window % per_byte != 0) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_WINDOW, index, p.window, per_byte,
                        "a window of %d tokens is not a multiple of %d, which the per-channel format packs", p.window, per_byte);
        }
        if (layer.value_dim % per_byte_v != 0 ||
            (p.value_group > 0 && (p.value_group % per_byte_v != 0 || layer.value_dim % p.value_group != 0)) ||
            (p.paper() && layer.key_dim % 4 != 0)) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_VALUE_DIM, index, layer.value_dim, per_byte_v,
                        "layer %d: value_dim %d does not suit the per-channel format's packing or value_group", index, layer.value_dim);
        }
    }
    struct Wanted {
        skerry_format format;
        skerry_side side;
        int32_t dim;
    };
    const Wanted wanted[] = {{p.key_format, SKERRY_SIDE_KEY, layer.key_dim},
                             {p.value_format, SKERRY_SIDE_VALUE, layer.value_dim},
                             {p.has_wide() ? p.full_format : p.key_format, SKERRY_SIDE_KEY, layer.key_dim},
                             {p.has_wide() ? p.full_format : p.value_format, SKERRY_SIDE_VALUE, layer.value_dim}};
    for (const Wanted &want : wanted) {
        if (device.kernels->supports(want.format, want.side, want.dim) == 0) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, want.side == SKERRY_SIDE_KEY ? SKERRY_SUBJECT_KEY_DIM : SKERRY_SUBJECT_VALUE_DIM,
                        index, want.dim, 0, "layer %d: format %d is not offered at dimension %d; r8 and full precision are", index,
                        want.format, want.dim);
        }
    }
    const LaneQuota shape = lane_shape(p, layer);
    const uint32_t low = p.has_wide() ? std::max(shape.wide_slot_bytes, shape.record_slot_bytes) : shape.record_slot_bytes;
    if (low >= shape.open_slot_bytes) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_FORMAT, index, low, shape.open_slot_bytes,
                    "layer %d: a window in this format takes %u bytes, in full precision %u", index, low, shape.open_slot_bytes);
    }
    return SKERRY_OK;
}

struct Totals {
    uint64_t pool = 0;
    uint64_t table = 0;
    uint64_t staging = 0;
    uint64_t scratch = 0;
    uint64_t charged = 0;
    int64_t readable = INT64_MAX;
    int32_t full = INT32_MAX;
    int32_t quantised = INT32_MAX;
    uint64_t overrun = 0;
    uint64_t host = 0;
    uint64_t router = 0;
    uint64_t zoom = 0;
    int32_t host_windows = INT32_MAX;
    int32_t fetch_windows = INT32_MAX;
    int32_t spans = 0;
    int32_t heads = 0; // most KV heads of a layer that zooms, and most windows that one of them reads
    int32_t looked = 0;
};

// Sums of one sequence over its lanes, given the plan's quotas.
Status add_layers(const skerry_cache_desc &desc, const CachePlan &plan, const PlanDevice &device, Totals *totals, skerry_error *error) {
    const PolicyConfig &p = plan.policy;
    Totals t;
    t.table = sequence_state_bytes + (p.zooms() ? zoom_state_bytes : 0) + (p.sekv_paper() ? paper_state_bytes : 0);
    for (int32_t i = 0; i < desc.layer_count; ++i) {
        LayerGeometry layer;
        if (const Status status = read_layer(desc, i, &layer, error); status < 0) return status;
        const LaneQuota q = plan.quota(layer);
        const uint64_t lanes = static_cast<uint64_t>(layer.kv_heads);
        const int64_t tiles = q.entries();
        t.scratch = std::max(t.scratch, layer_scratch_bytes(device, p, layer, tiles, q.epochs, zoom_shape(device.kernels, p, layer, q)));
        t.table = add(t.table, layer_state_bytes);
        t.staging = add(t.staging, layer_state_bytes + 1);
        if (layer.source != i) continue;
        const auto slots = [&](int64_t count, uint32_t bytes) {
            return mul(static_cast<uint64_t>(count), bytes == 0 ? 0 : bytes + slot_overhead_bytes);
        };
        const int64_t full_in_open = p.has_wide() ? 0 : q.full_windows;
        const int64_t open = q.protected_windows + full_in_open;
        const uint64_t pool = add(add(slots(1, q.sink_slot_bytes), slots(open, q.open_slot_bytes)),
                                  add(slots(q.full_windows, q.wide_slot_bytes), slots(q.record_slots, q.record_slot_bytes)));
        const uint64_t zoom = slots(q.zoom_slots, plan.staged_slot_bytes);
        t.pool = add(t.pool, mul(lanes, add(add(pool, zoom), slots(q.anchors, q.anchor_slot_bytes))));
        if (p.zooms(layer)) {
            t.zoom = add(t.zoom, mul(lanes, zoom));
            const uint64_t keys = static_cast<uint64_t>(q.host_windows) * router_key_table_bytes(p, layer);
            t.router = add(t.router, q.host_windows == 0 ? 0 : mul(lanes, keys + router_balance_bytes(p, layer)));
            t.host = add(t.host, mul(lanes, with_host_tables(host_record_bytes(plan, layer, q), q.host_windows)));
            t.spans = p.spans ? std::max(t.spans, q.host_windows) : 0;
            t.host_windows = std::min(t.host_windows, q.host_windows);
            t.fetch_windows = std::min(t.fetch_windows, q.fetch_windows);
            if (q.host_windows > 0) {
                t.heads = std::max(t.heads, layer.kv_heads);
                t.looked = std::max(t.looked, q.fetch_windows);
            }
        }
        const uint64_t entry = entry_table_bytes(p);
        t.table = add(t.table, mul(lanes, static_cast<uint64_t>(q.table_entries) * entry + lane_table_bytes(p, layer, q.epochs) +
                                              zoom_table_bytes(p, layer, q)));
        const uint64_t undo = lane_state_bytes +
                              (p.routes() ? static_cast<uint64_t>(q.entries()) * (entry + 8) +
                                                (p.uses_epochs() ? 4 * static_cast<uint64_t>(layer.key_dim) +
                                                                       static_cast<uint64_t>(q.epochs) * epoch_table_bytes(layer)
                                                                 : 0)
                                          : 0) +
                              (p.zooms() ? lane_zoom_bytes + static_cast<uint64_t>(q.fetch_windows) * 2 * sizeof(int32_t) : 0);
        const uint64_t staging =
            add(add(slots(q.staging_windows, q.open_slot_bytes), slots(q.staging_records, q.record_slot_bytes)),
                add(slots(q.staging_wide, q.wide_slot_bytes), static_cast<uint64_t>(q.staging_entries) * entry + undo));
        t.staging = add(t.staging, mul(lanes, staging));
        const int64_t readable = p.kind == SKERRY_POLICY_FULL
                                     ? plan.full_tokens
                                     : p.sinks + p.recent + static_cast<int64_t>(q.full_windows + q.quantised_windows) * p.window;
        t.readable = std::min(t.readable, readable);
        t.full = std::min(t.full, q.full_windows);
        t.quantised = std::min(t.quantised, q.quantised_windows);
        if (p.paper()) {
            PaperBudget budget;
            const PaperShape shape{static_cast<uint32_t>(layer.kv_heads), static_cast<uint32_t>(layer.key_dim),
                                   static_cast<uint32_t>(p.window), static_cast<uint32_t>(p.sinks), static_cast<uint32_t>(p.recent)};
            if (paper_budget(shape, Ratio{plan.beta_ppm, 1000000}, static_cast<uint64_t>(plan.length_tokens),
                             Ratio{p.quantised_share_ppm, 1000000}, &budget) == PaperFault::none) {
                t.charged = add(t.charged, paper_charged_bytes(shape, budget, budget.full_slots, budget.quantised_slots, 0));
                t.overrun = std::max(t.overrun, budget.excess_tokens);
            }
        }
    }
    t.table = add(t.table, static_cast<uint64_t>(t.spans) * span_bytes);
    if (p.spans) t.staging = add(t.staging, static_cast<uint64_t>(open_surprisals(plan)) * sizeof(float));
    *totals = t;
    return SKERRY_OK;
}

} // namespace

Status replan(const skerry_cache_desc &desc, const skerry_budget_desc &given, const PlanDevice &device, CachePlan *out,
              skerry_error *error) {
    CachePlan plan;
    std::memset(&plan.info, 0, sizeof plan.info);
    if (desc.layers == nullptr || desc.layer_count < 1 || desc.layer_count > limits::max_layers) {
        return bad(error, SKERRY_SUBJECT_LAYER, desc.layer_count, limits::max_layers, "desc.layer_count (or desc.layers is NULL)");
    }
    const skerry_dtype store = desc.store_dtype == 0 ? static_cast<skerry_dtype>(SKERRY_DTYPE_F16) : desc.store_dtype;
    if (store < SKERRY_DTYPE_F32 || store > SKERRY_DTYPE_BF16)
        return bad(error, SKERRY_SUBJECT_DTYPE, store, SKERRY_DTYPE_BF16, "desc.store_dtype");
    if (const Status status = read_policy(desc, store, &plan.policy, error); status < 0) return status;
    PolicyConfig &p = plan.policy;
    if (p.router != nullptr) {
        if (const Status status = router_check_layers(*p.router, desc.layer_count, error); status < 0) return status;
    }

    skerry_plan_info &info = plan.info;
    info.max_sequences = desc.max_sequences == 0 ? 1 : desc.max_sequences;
    if (info.max_sequences < 1 || info.max_sequences > limits::max_sequences) {
        return bad(error, SKERRY_SUBJECT_SEQUENCE, desc.max_sequences, limits::max_sequences, "desc.max_sequences");
    }
    info.max_step_tokens = desc.max_step_tokens == 0 ? 256 : desc.max_step_tokens;
    if (info.max_step_tokens < 1 || info.max_step_tokens > limits::max_step_tokens) {
        return bad(error, SKERRY_SUBJECT_TOKENS, desc.max_step_tokens, limits::max_step_tokens, "desc.max_step_tokens");
    }
    info.staging_tokens = desc.staging_tokens == 0 ? info.max_step_tokens : desc.staging_tokens;
    if (info.staging_tokens < 1 || info.staging_tokens > limits::max_position) {
        return bad(error, SKERRY_SUBJECT_TOKENS, desc.staging_tokens, limits::max_position, "desc.staging_tokens");
    }
    if (given.length_tokens < 0 || given.length_tokens > limits::max_position) {
        return bad(error, SKERRY_SUBJECT_TOKENS, given.length_tokens, limits::max_position, "budget.length_tokens");
    }
    if (given.share_ppm > 0 && given.length_tokens == 0) {
        return bad(error, SKERRY_SUBJECT_BUDGET, 0, 1, "budget.length_tokens, which share_ppm needs,");
    }
    if (given.share_ppm > 0 && given.bytes > 0) {
        return bad(error, SKERRY_SUBJECT_BUDGET, given.share_ppm, 0, "budget.share_ppm beside budget.bytes");
    }
    if (p.paper() && given.length_tokens == 0) {
        return bad(error, SKERRY_SUBJECT_BUDGET, 0, 1, "budget.length_tokens, which fidelity paper needs (prompt + generation cap),");
    }
    plan.length_tokens = given.length_tokens;
    if (given.full_bytes != 0) plan.full_limit = given.full_bytes / static_cast<uint64_t>(info.max_sequences);
    if (given.quantised_bytes != 0) plan.quantised_limit = given.quantised_bytes / static_cast<uint64_t>(info.max_sequences);
    plan.exact_bytes = p.keeps_exact() ? given.exact_bytes : 0;
    if (p.zooms() && (given.length_tokens == 0 || (given.bytes == 0 && given.share_ppm == 0))) {
        return bad(error, SKERRY_SUBJECT_BUDGET, given.length_tokens, 1,
                   "budget.length_tokens, which SEKV needs beside bytes or share_ppm,");
    }
    if (given.host_bytes != 0) {
        if (p.kind != SKERRY_POLICY_SEKV)
            return bad(error, SKERRY_SUBJECT_BUDGET, static_cast<int64_t>(given.host_bytes), 0, "budget.host_bytes without SEKV");
        plan.host_limit = given.host_bytes / static_cast<uint64_t>(info.max_sequences);
    }

    const bool limited = given.bytes > 0 || given.share_ppm > 0;
    // What a prompt will take is in its text: it is collected in what staging declares, and checked against the limit when it ends.
    plan.bounded = limited || p.paper() || p.sekv_paper();
    uint64_t exact_round = 0; // one window of every lane
    // One walk: checks, full bytes, floors.
    uint64_t floor = sequence_state_bytes + (p.zooms() ? zoom_state_bytes : 0) + (p.sekv_paper() ? paper_state_bytes : 0) +
                     (p.spans ? static_cast<uint64_t>(span_capacity(plan)) * span_bytes : 0);
    uint64_t full_per_sequence = 0;
    uint64_t lanes_total = 0;
    for (int32_t i = 0; i < desc.layer_count; ++i) {
        LayerGeometry layer;
        if (desc.layers[i] == nullptr) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_LAYER, i, 0, 0, "desc.layers[%d] is NULL", i);
        }
        if (const Status status = read_layer(desc, i, &layer, error); status < 0) return status;
        if (p.router != nullptr) {
            if (const Status status = router_check_layer(*p.router, i, layer, error); status < 0) return status;
        }
        floor = add(floor, layer_state_bytes);
        if (layer.source != i) continue;
        if (const Status status = check_layer_policy(p, layer, i, device, error); status < 0) return status;
        const uint64_t lanes = static_cast<uint64_t>(layer.kv_heads);
        const LaneQuota shape = lane_shape(p, layer);
        if (shape.open_slot_bytes > (1u << 22) || shape.sink_slot_bytes > (1u << 22)) {
            return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_WINDOW, i, shape.open_slot_bytes, 1 << 22,
                        "layer %d: one window takes %u bytes, more than a pool chunk", i, shape.open_slot_bytes);
        }
        floor = add(floor, mul(lanes, floor_bytes(plan, layer)));
        exact_round = add(exact_round, mul(lanes, shape.open_slot_bytes + slot_overhead_bytes));
        if (p.zooms(layer)) {
            const int64_t spans = span_capacity(plan);
            plan.host_weight = add(plan.host_weight, mul(lanes, p.spans ? with_host_tables(host_need(plan, layer, spans), spans)
                                                                        : with_host_tables(host_need(plan, layer, 1), 1)));
            plan.staged_slot_bytes = std::max(plan.staged_slot_bytes, detail_slot_bytes(p, layer));
        }
        plan.history_weight = add(plan.history_weight, mul(lanes, lane_weight(plan, layer)));
        int64_t tokens = plan.length_tokens;
        if (layer.sliding_window > 0) tokens = std::min<int64_t>(tokens, layer.sliding_window);
        full_per_sequence = add(full_per_sequence, mul(mul(lanes, token_bytes(p, layer)), static_cast<uint64_t>(tokens)));
        lanes_total += lanes;
    }
    if (plan.history_weight == unlimited || full_per_sequence == unlimited || lanes_total > (1u << 24)) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_LAYER, -1, desc.layer_count, 0,
                    "the geometry is too large to count its bytes");
    }
    plan.exact_windows = static_cast<int64_t>(plan.exact_bytes / (exact_round * static_cast<uint64_t>(info.max_sequences)));
    plan.exact_bytes = static_cast<uint64_t>(plan.exact_windows) * exact_round * static_cast<uint64_t>(info.max_sequences);
    info.exact_bytes = plan.exact_bytes;
    const uint64_t sequences = static_cast<uint64_t>(info.max_sequences);
    info.full_cache_bytes = mul(full_per_sequence, sequences);

    plan.sequence_bytes = unlimited;
    info.budget_bytes = unlimited;
    Status over = SKERRY_OK;
    if (limited && !p.paper()) {
        const uint64_t total = given.bytes > 0 ? given.bytes : scale_floor(info.full_cache_bytes, given.share_ppm, 1000000);
        plan.sequence_bytes = total / sequences;
        info.budget_bytes = total;
        info.minimum_bytes = mul(floor, sequences);
        if (plan.sequence_bytes < floor) {
            over = fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1, static_cast<int64_t>(total),
                        static_cast<int64_t>(info.minimum_bytes), "the budget is %llu bytes; sinks, recent tokens and tables need %llu",
                        static_cast<unsigned long long>(total), static_cast<unsigned long long>(info.minimum_bytes));
        } else {
            plan.history_bytes = plan.sequence_bytes - floor;
        }
    }
    if (over == SKERRY_OK && plan.bounded && p.kind == SKERRY_POLICY_FULL) {
        // The longest sequence that every layer can hold.
        const auto bytes_for = [&](int64_t tokens, uint64_t *bytes) -> Status {
            *bytes = 0;
            for (int32_t i = 0; i < desc.layer_count; ++i) {
                LayerGeometry layer;
                if (const Status status = read_layer(desc, i, &layer, error); status < 0) return status;
                if (layer.source != i) continue;
                const uint64_t windows = static_cast<uint64_t>(full_policy_windows(plan, layer, tokens) - 1); // the floor has one
                *bytes = add(*bytes, mul(static_cast<uint64_t>(layer.kv_heads), mul(windows, costs(p, lane_shape(p, layer)).open)));
            }
            return SKERRY_OK;
        };
        int64_t low = 1;
        int64_t high = limits::max_position;
        while (low < high) {
            const int64_t middle = low + (high - low + 1) / 2;
            uint64_t bytes = 0;
            if (const Status status = bytes_for(middle, &bytes); status < 0) return status;
            if (bytes <= plan.history_bytes)
                low = middle;
            else
                high = middle - 1;
        }
        plan.full_tokens = low;
    }
    Totals totals;
    if (p.paper()) {
        const auto planned = [&](uint32_t beta, uint64_t *bytes) -> Status {
            plan.beta_ppm = beta;
            if (const Status status = add_layers(desc, plan, device, &totals, error); status < 0) return status;
            *bytes = mul(add(totals.pool, totals.table), sequences);
            return SKERRY_OK;
        };
        uint64_t bytes = 0;
        if (given.bytes > 0) {
            if (const Status status = planned(0, &info.minimum_bytes); status < 0) return status;
            // The largest published budget whose true bytes stay within the limit.
            uint32_t low = 0;
            uint32_t high = 4000000;
            while (low < high) {
                const uint32_t middle = low + (high - low + 1) / 2;
                if (const Status status = planned(middle, &bytes); status < 0) return status;
                if (bytes <= given.bytes)
                    low = middle;
                else
                    high = middle - 1;
            }
            if (const Status status = planned(low, &bytes); status < 0) return status;
            info.budget_bytes = given.bytes;
            if (bytes > given.bytes) {
                over = fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1, static_cast<int64_t>(given.bytes),
                            static_cast<int64_t>(info.minimum_bytes), "the budget is %llu bytes; sinks, local tokens and tables need %llu",
                            static_cast<unsigned long long>(given.bytes), static_cast<unsigned long long>(info.minimum_bytes));
            }
        } else {
            if (const Status status = planned(0, &info.minimum_bytes); status < 0) return status;
            if (const Status status = planned(given.share_ppm == 0 ? 1000000 : given.share_ppm, &bytes); status < 0) return status;
            info.budget_bytes = bytes;
        }
        plan.sequence_bytes = info.budget_bytes / sequences;
        info.budget_overrun_tokens = static_cast<uint32_t>(std::min<uint64_t>(totals.overrun, UINT32_MAX));
    }
    if (over == SKERRY_OK) {
        if (const Status status = add_layers(desc, plan, device, &totals, error); status < 0) return status;
        info.pool_bytes = plan.bounded ? mul(totals.pool, sequences) : 0;
        info.table_bytes = plan.bounded ? mul(totals.table, sequences) : 0;
        info.planned_bytes = add(info.pool_bytes, info.table_bytes);
        info.staging_bytes = add(mul(totals.staging, sequences), totals.scratch);
        info.charged_bytes = mul(totals.charged, sequences);
        info.readable_tokens = totals.readable;
        info.full_windows = totals.full;
        info.quantised_windows = totals.quantised;
        if (p.zooms() && totals.host_windows != INT32_MAX) {
            info.host_bytes = totals.host == 0 ? 0 : add(mul(totals.host, sequences), host_extent_bytes);
            info.router_bytes = mul(totals.router, sequences);
            info.zoom_bytes = mul(totals.zoom, sequences);
            plan.staged_slots = 2 * int64_t{totals.heads} * totals.looked;
            info.zoom_staging_bytes = mul(static_cast<uint64_t>(plan.staged_slots),
                                          uint64_t{plan.staged_slot_bytes} + slot_overhead_bytes + zoom_slot_state_bytes);
            info.staging_bytes = add(info.staging_bytes, info.zoom_staging_bytes);
            info.host_windows = totals.host_windows;
            info.fetch_windows = totals.fetch_windows;
        }
    }
    if (p.sekv_paper()) {
        info.detail_format = SKERRY_FORMAT_L32;
        info.router_trained = 1;
        info.router_vectors = 1;
    }
    if (p.zooms()) {
        info.detail_format = p.detail_format;
        info.fetch_ppm = p.fetch_ppm;
        info.refine_ppm = p.refine_ppm;
        info.zoom_hysteresis_ppm = p.zoom_hysteresis_ppm;
        info.router_trained = p.router != nullptr ? 1 : 0;
        info.router_vectors = p.router != nullptr ? p.router->centroids : router_centroids;
    }
    info.flags = p.flags;
    info.kind = p.kind;
    info.fidelity = p.fidelity;
    info.prefill = p.prefill;
    info.window_tokens = p.window;
    info.sink_tokens = p.sinks;
    info.recent_tokens = p.recent;
    info.period_tokens = p.period;
    info.score = p.score;
    info.score_queries = p.score_queries;
    info.selection = p.selection;
    info.full_format = p.full_format;
    info.key_format = p.quantises() ? p.key_format : static_cast<skerry_format>(SKERRY_FORMAT_DEFAULT);
    info.value_format = p.quantises() ? p.value_format : static_cast<skerry_format>(SKERRY_FORMAT_DEFAULT);
    info.value_group = p.value_group;
    info.quantised_share_ppm = p.quantised_share_ppm;
    info.hysteresis_ppm = p.paper() ? 1000000 : p.hysteresis_ppm;
    info.max_moves_ppm = p.paper() ? 1000000 : p.max_moves_ppm;
    info.exact_attend = (desc.flags & SKERRY_CACHE_EXACT_ATTEND) != 0 ? 1 : 0;
    info.store_dtype = p.store_dtype;
    info.struct_size = sizeof info;
    *out = plan;
    return over;
}

Status make_plan(const skerry_cache_desc &desc, const PlanDevice &device, CachePlan *plan, skerry_error *error) {
    skerry_budget_desc budget{};
    if (desc.budget != nullptr) {
        const Status status =
            read_struct(desc.budget, offsetof(skerry_budget_desc, host_bytes), &budget, sizeof budget, 1, "desc.budget", error);
        if (status < 0) return status;
        if (budget.flags != 0 || budget.reserved != 0) return bad(error, SKERRY_SUBJECT_FLAGS, budget.flags, 0, "budget.flags");
    }
    return replan(desc, budget, device, plan, error);
}

} // namespace skerry
