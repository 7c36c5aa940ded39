#pragma once

// Budget and window arithmetic of QEvict as published (arXiv 2608.05326v1), and the few sums of the public
// code of 2026-05 (G1) that are needed to compare with its logs. Integers only: a budget of 20 % never lands
// one byte low.

#include <cstdint>
#include <span>

namespace skerry {

// A share such as beta or q, exact. den is never 0.
struct Ratio {
    uint64_t num = 0;
    uint64_t den = 1;
};

// The decimal nearest to x with at most nine places, reduced: 0.2 is 1/5. Negative values and NaN give 0/1,
// values above 1e9 are held at 1e9.
Ratio ratio_from_decimal(double x);

// floor(a * num / den) with a 128-bit product; UINT64_MAX when the quotient does not fit.
uint64_t scale_floor(uint64_t a, uint64_t num, uint64_t den);

enum class PaperFault : uint8_t {
    none,
    empty_shape,           // a zero among window, heads or head dimension
    window_not_multiple_4, // codes are packed four tokens to a byte
    head_dim_not_multiple_4,
    local_not_windows, // the published rule counts the local zone in whole windows
    share_above_one,
    zero_denominator,
    too_large, // a product above 64 bits
};

struct PaperShape {
    uint32_t kv_heads = 8;
    uint32_t head_dim = 128;
    uint32_t window = 8;
    uint32_t sinks = 5;
    uint32_t local = 32;
};

// Bytes and slots of one layer. The slots hold `used` of `history` bytes; both floors leave the rest.
struct PaperBudget {
    uint64_t token_bytes = 0;
    uint64_t total = 0;
    uint64_t tokens = 0;
    uint64_t rest = 0;
    uint64_t history = 0;
    uint64_t full_window_bytes = 0;
    uint64_t quantised_window_bytes = 0;
    uint64_t full_slots = 0;
    uint64_t quantised_slots = 0;
    uint64_t used = 0;
    uint64_t unspent = 0;
    uint64_t readable_tokens = 0;
    uint64_t excess_tokens = 0; // sinks + local beyond the budget: kept, and reported
};

uint64_t paper_full_window_bytes(const PaperShape &shape);
uint64_t paper_quantised_window_bytes(const PaperShape &shape);

// `length` is prompt + generation cap. `out` is written only when the answer is none.
PaperFault paper_budget(const PaperShape &shape, Ratio beta, uint64_t length, Ratio quantised_share,
                        PaperBudget *out);

// Gives the bytes that both floors left to one more slot of the wider kind that fits, then to the other,
// until none fits. Not part of the published method.
void paper_spend_remainder(PaperBudget *budget);

// Bytes a layer really holds: sinks, local zone and `growth` tokens beyond it, both tiers, and the dormant
// codes of promoted windows. `paper_charged_bytes` leaves out the dormant ones, as the method does.
uint64_t paper_physical_bytes(const PaperShape &shape, const PaperBudget &budget, uint64_t full,
                              uint64_t quantised, uint64_t dormant, uint64_t growth);
uint64_t paper_charged_bytes(const PaperShape &shape, const PaperBudget &budget, uint64_t full,
                             uint64_t quantised, uint64_t growth);

// The largest beta, in millionths, whose worst physical bytes (every full window with dormant codes, w - 1
// growth tokens) stay within `limit`; 0/1 when not even sinks and local zone fit.
Ratio paper_beta_for_physical(const PaperShape &shape, uint64_t length, Ratio quantised_share,
                              uint64_t limit);

// A local zone given as a share of the budget's tokens: whole windows, rounded up, at least one.
uint64_t paper_local_from_share(uint64_t budget_tokens, Ratio share, uint32_t window);

// ---- windows ----
// The grid is anchored at the end of the sinks and never moves: a token belongs to one window for ever.

struct WindowGrid {
    uint64_t sinks = 5;
    uint64_t window = 8;
};

enum class LocalRule : uint8_t {
    whole_windows, // published: the last local/window windows of the grid, the partial one included
    at_least,      // never fewer than `local` tokens; any local
};

constexpr uint64_t no_window = UINT64_MAX;

constexpr uint64_t window_count(const WindowGrid &grid, uint64_t tokens) {
    return tokens <= grid.sinks ? 0 : (tokens - grid.sinks + grid.window - 1) / grid.window;
}

constexpr uint64_t window_first(const WindowGrid &grid, uint64_t id) { return grid.sinks + id * grid.window; }

constexpr uint64_t window_of(const WindowGrid &grid, uint64_t position) {
    return position < grid.sinks ? no_window : (position - grid.sinks) / grid.window;
}

// Windows [0, evictable) may be routed at an event with `tokens` tokens; what follows is the local zone.
constexpr uint64_t evictable_windows(const WindowGrid &grid, uint64_t tokens, uint64_t local,
                                     LocalRule rule) {
    if (rule == LocalRule::at_least) {
        const uint64_t held = grid.sinks + local;
        return tokens <= held ? 0 : (tokens - held) / grid.window;
    }
    const uint64_t all = window_count(grid, tokens);
    const uint64_t kept = local / grid.window;
    return all <= kept ? 0 : all - kept;
}

// First token of the local zone; equals `tokens` when there are only sinks.
constexpr uint64_t local_first(const WindowGrid &grid, uint64_t tokens, uint64_t local, LocalRule rule) {
    const uint64_t first = window_first(grid, evictable_windows(grid, tokens, local, rule));
    return first < tokens ? first : tokens;
}

enum class TokenSet : uint8_t { sink, full, quantised, evicted, local, absent };

// The one set a token is in. `tier_of_window[j]` is full, quantised or evicted for each window below the
// local zone of the last event (`routed` windows; what came later is local).
TokenSet token_set(const WindowGrid &grid, uint64_t tokens, std::span<const TokenSet> tier_of_window,
                   uint64_t position);

// ---- events ----

// Decode steps count from 0 after the prompt. The published default starts at step 0; the RULER runs at
// step 8.
constexpr bool paper_event_due(uint64_t step, uint64_t window, uint64_t first) {
    return step >= first && (step - first) % window == 0;
}

constexpr uint64_t paper_event_count(uint64_t steps, uint64_t window, uint64_t first) {
    return steps <= first ? 0 : (steps - first + window - 1) / window;
}

// ---- G1 ----

struct G1Config {
    uint64_t budget_percent = 20;
    uint64_t local_percent = 50;
    uint64_t quantised_percent = 10;
    uint64_t code_ratio = 4; // 4 for INT4, 2 for INT8: grids are not counted there
    uint64_t sinks = 4;
    uint64_t window = 8;
    uint64_t generation_cap = 512;
};

struct G1Plan {
    uint64_t total = 0;
    uint64_t local = 0;
    uint64_t full_windows = 0;
    uint64_t quantised_windows = 0;
    uint64_t complete_windows = 0;
    uint64_t scored_end = 0;
    uint64_t physical_length = 0; // of the main cache after the compaction at the end of the prompt
};

G1Plan g1_plan(const G1Config &config, uint64_t prompt);

} // namespace skerry
