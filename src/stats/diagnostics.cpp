#include "stats/diagnostics.hpp"

#include <algorithm>

namespace skerry {

double fmm_event(const MassTrace &trace, const FmmEvent &event, size_t horizon) {
    double missed = 0, all = 0;
    for (size_t t = event.step + 1; t <= event.step + horizon; ++t) {
        const double *const row = trace.mass.data() + t * trace.windows;
        for (size_t j = 0; j < event.existing; ++j) {
            all += row[j];
            if (event.accessible[j] == 0) missed += row[j];
        }
    }
    return all > 0 ? missed / all : 0;
}

FmmMean fmm_mean(const MassTrace &trace, std::span<const FmmEvent> events, size_t horizon) {
    FmmMean result;
    double sum = 0;
    for (const FmmEvent &event : events) {
        if (event.step + horizon >= trace.steps) {
            result.censored += 1;
            continue;
        }
        sum += fmm_event(trace, event, horizon);
        result.counted += 1;
    }
    if (result.counted != 0) result.mean = sum / double(result.counted);
    return result;
}

double fmm_online_event(FmmOnline *state, int64_t staying, int64_t dropped, int64_t since_last_event) {
    const double readable = double(staying) + double(dropped);
    const double earlier = std::max(readable - double(since_last_event), 0.0);
    const double gone = state->dropped_over_readable * earlier + double(dropped);
    // With no mass seen there is nothing to compare with: the last estimate stands.
    if (readable > 0) state->dropped_over_readable = gone / std::max(double(staying), 1.0);
    return state->dropped_over_readable / (1 + state->dropped_over_readable);
}

double selection_churn(std::span<const uint32_t> a, std::span<const uint32_t> b) {
    size_t both = 0, i = 0, j = 0;
    while (i < a.size() && j < b.size()) {
        if (a[i] == b[j]) {
            both += 1;
            i += 1;
            j += 1;
        } else if (a[i] < b[j]) {
            i += 1;
        } else {
            j += 1;
        }
    }
    const size_t either = a.size() + b.size() - both;
    return either == 0 ? 0 : double(either - both) / double(either);
}

void lir_add(const LirConfig &config, std::span<const int8_t> events, LirCount *count) {
    const auto candidate = std::find_if(events.begin(), events.end(), [](int8_t e) { return e >= 0; });
    if (std::find(candidate, events.end(), int8_t(-1)) != events.end()) {
        count->left_windows += 1;
        return;
    }
    const size_t total = events.size();
    for (size_t start = size_t(candidate - events.begin()); start < total;) {
        if (events[start] != 0) {
            start += 1;
            continue;
        }
        size_t end = start;
        while (end < total && events[end] == 0)
            end += 1;
        const size_t run = end - start, latest = config.latent - 1 + config.horizon;
        const bool observed = config.unlimited || start + latest < total;
        if (run >= config.latent && observed) {
            count->eligible += 1;
            if (end < total && (config.unlimited || run <= latest)) {
                count->rescued += 1;
                count->time_sum += run - config.latent + 1;
            }
        }
        start = end;
    }
}

} // namespace skerry
