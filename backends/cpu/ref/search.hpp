// SPDX-License-Identifier: MIT
#pragma once

// Numbers that every encoder of the R formats shares. Constants only: code would be compiled for one
// instruction set and run on another.

#include <skerry/cache.h>

namespace skerry::ref {

// Rows are held at this magnitude before they are coded, which leaves room for sums of 2^16 of them.
inline constexpr float row_limit = 0x1p110f;

// The exponent taken out of a row before its squares are summed is at least this, so that its inverse is a
// normal number.
inline constexpr int row_exponent_least = -100;

inline constexpr float f16_largest = 65504.0f;

inline constexpr int step_candidates = 5;

// Inverse steps in units of 1 / rms: 1 / (share * optimum), where the optimum is the step of uniform levels
// with the least squared error on a Gaussian of rms 1. r8 takes no part.
struct StepSearch {
    float inverse[step_candidates];
};

constexpr StepSearch step_search(double optimum) {
    constexpr double shares[step_candidates] = {0.8, 0.9, 1.0, 1.1, 1.2};
    StepSearch search{};
    for (int i = 0; i < step_candidates; ++i)
        search.inverse[i] = static_cast<float>(1.0 / (shares[i] * optimum));
    return search;
}

inline constexpr StepSearch step_search_r2 = step_search(0.9957);
inline constexpr StepSearch step_search_r3 = step_search(0.5860);
inline constexpr StepSearch step_search_r4 = step_search(0.3352);

} // namespace skerry::ref
