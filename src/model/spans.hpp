// SPDX-License-Identifier: MIT
#pragma once

// What a sequence keeps between two tokens for the rule of policy/segmentation.hpp, and what that rule gives.
// Plain numbers: a copy is a fork or the undo of a step, and the fields are what a snapshot holds.

#include "limits.hpp"

#include <bit>
#include <cstdint>

namespace skerry {

// Welford's running mean and sum of squared deviations, in token order, so that neither depends on chunks.
struct SurprisalMoments {
    int64_t count = 0;
    double mean = 0;
    double squares = 0;

    void add(double nats) {
        ++count;
        const double before = nats - mean;
        mean += before / static_cast<double>(count);
        squares += before * (nats - mean);
    }
    double variance() const { return count == 0 ? 0 : squares / static_cast<double>(count); } // of the population
};

// Which of 128 consecutive positions are anchors; bit i of the whole is position begin + i.
struct AnchorMask {
    uint64_t words[2] = {0, 0};

    bool test(int32_t i) const { return ((words[i >> 6] >> (i & 63)) & 1) != 0; }
    void set(int32_t i) { words[i >> 6] |= uint64_t(1) << (i & 63); }
    void clear(int32_t i) { words[i >> 6] &= ~(uint64_t(1) << (i & 63)); }
    int32_t count() const { return std::popcount(words[0]) + std::popcount(words[1]); }
};
static_assert(limits::max_window <= 128);

// Positions [begin, end) without the anchors among them. Its first and its last position are rows.
struct TokenSpan {
    int64_t begin = 0;
    int64_t end = 0;
    AnchorMask anchors;

    int32_t rows() const { return static_cast<int32_t>(end - begin) - anchors.count(); }
};

// The same as published: the tokens between two anchors.
struct PaperSpan {
    int32_t begin = 0;
    int32_t end = 0;
    bool full_resolution = false; // shorter than l_min

    int32_t tokens() const { return end - begin; }
};

struct SegmentState {
    int64_t next = 0;   // position of the next token
    int64_t begin = 0;  // of the open span; equals next while none is open
    AnchorMask anchors; // of the open span
    SurprisalMoments moments;

    bool open() const { return begin < next; }
    int32_t open_positions() const { return static_cast<int32_t>(next - begin); }
    int32_t open_rows() const { return open_positions() - anchors.count(); }
};
static_assert(sizeof(SegmentState) == 56); // no padding: snapshots may take the bytes

} // namespace skerry
