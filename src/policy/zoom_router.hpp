// SPDX-License-Identifier: MIT
#pragma once

// Which segments of one KV head a step brings to the device, from the scores of the kernel `route` (recall.md 7). A pure function: the
// same input gives the same choice, ties go to the lower id, and nothing is allocated.

#include <cstddef>
#include <cstdint>

namespace skerry {

enum class ZoomPlace : uint8_t {
    barred = 0,   // cannot be fetched, but takes its share of the mass
    absent = 1,   // a fetch brings all of it
    resident = 2, // on the device in low bits: a fetch brings the difference
};

inline constexpr uint32_t zoom_one = 1000000;

struct ZoomRoute {
    const float *scores = nullptr; // [group][score_stride]: a segment's estimated sum of exp(logit) over exp(log_unit); 0: none
    int64_t score_stride = 0;
    const float *log_unit = nullptr;   // [group]
    const float *device_lse = nullptr; // [group]: log-sum-exp of what the device holds exactly; -inf: nothing
    const ZoomPlace *places = nullptr; // [segments]
    const int32_t *previous = nullptr; // chosen at the previous position (decisions.md 17), ascending
    int32_t previous_count = 0;
    int32_t segments = 0;
    int32_t group = 1;
    int32_t slots = 0;                      // how many to choose
    uint32_t hysteresis_ppm = 2 * zoom_one; // factor on the gain of what was chosen at the previous position
    uint32_t resident_ppm = zoom_one;       // factor on the gain of `resident`
};

struct ZoomChoice {
    int32_t chosen = 0;
    float mass = 0; // estimated share of attention that the chosen segments take, mean over the query heads
};

// Multiples of 8 bytes; the scratch is 8-byte aligned.
size_t zoom_scratch_bytes(int32_t segments);

// With Z_h = exp(device_lse_h - log_unit_h) + the sum over all segments of score_hs, a segment's gain is the sum over heads of
// score_hs / Z_h times its factors; the `slots` largest gains are chosen. `chosen` [slots] gets their ids, ascending; fewer where there are
// fewer candidates. What exp(device_lse_h) is 2^125 units or more, the segments have no share in. O(segments) as a rule.
ZoomChoice route_zoom(const ZoomRoute &route, int32_t *chosen, void *scratch);

} // namespace skerry
