#pragma once

// How much a routing policy missed: the formulas of QEvict's metric suite on recorded traces, and an estimate
// of the missed mass while serving. Sums run in index order, so a trace gives the same number everywhere.

#include <cstddef>
#include <cstdint>
#include <span>

namespace skerry {

// ---- future missed mass ----

// Rows are decode steps, columns windows: mass of full attention, head mean, sinks left out.
struct MassTrace {
    std::span<const double> mass; // steps * windows
    size_t steps = 0;
    size_t windows = 0;
};

struct FmmEvent {
    size_t step = 0;     // the horizon starts at the step after it
    size_t existing = 0; // windows [0, existing) existed
    std::span<const uint8_t>
        accessible; // `existing` flags, after the event; which tiers count is the caller's choice
};

// Share of the mass of existing windows that the horizon's steps give to windows that are not accessible; 0
// when there is no mass. The horizon must lie inside the trace.
double fmm_event(const MassTrace &trace, const FmmEvent &event, size_t horizon);

struct FmmMean {
    double mean = 0;
    size_t counted = 0;
    size_t censored = 0; // events without a whole horizon
};

FmmMean fmm_mean(const MassTrace &trace, std::span<const FmmEvent> events, size_t horizon);

// The estimate while serving sees only what is still readable. It carries one number, the mass of everything
// dropped so far over the mass of what it was last compared with, on the assumption that a dropped window
// would have kept its weight against the windows that stayed. Exact if weights are constant.
struct FmmOnline {
    double dropped_over_readable = 0;
};

// One event: recent mass of the windows that stay readable, of those dropped now, and how much of both
// belongs to windows that did not exist at the event before. Returns the estimated share missed by later
// queries.
double fmm_online_event(FmmOnline *state, int64_t staying, int64_t dropped, int64_t since_last_event);

// ---- churn ----

// 1 - |a and b| / |a or b| for two ascending id lists; 0 when both are empty. State whether the recent region
// is among them.
double selection_churn(std::span<const uint32_t> a, std::span<const uint32_t> b);

// ---- latent importance reactivation ----

struct LirConfig {
    size_t latent = 4;      // m: shortest run of unselected events that is an episode
    size_t horizon = 8;     // h
    bool unlimited = false; // no horizon, hence nothing censored
};

struct LirCount {
    size_t eligible = 0;
    size_t rescued = 0;
    size_t time_sum = 0;     // over rescued episodes, in events
    size_t left_windows = 0; // windows that stopped being candidates: left out

    double ratio() const { return eligible == 0 ? 0 : double(rescued) / double(eligible); }
    double mean_time() const { return rescued == 0 ? 0 : double(time_sum) / double(rescued); }
};

// One window over all events: -1 no candidate, 0 candidate and not selected, 1 selected. Adds to `count`.
void lir_add(const LirConfig &config, std::span<const int8_t> events, LirCount *count);

} // namespace skerry
