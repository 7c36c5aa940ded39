#pragma once

// Which tier each window of one selection (a layer, or a layer and KV head) gets at a routing event. A pure
// function: the same candidates give the same targets, ties go to the lower id, and nothing is allocated.

#include <cstdint>
#include <span>

namespace skerry {

enum class WindowTier : uint8_t {
    fresh, // left the recent region since the last event, still full precision; only as a current tier
    full,
    quantised,
    evicted, // only as a target
};

struct WindowCandidate {
    int64_t rank = 0; // score_rank(), larger is better
    uint32_t id = 0;
    WindowTier tier = WindowTier::fresh;
    bool unscored = false; // not yet scored in one whole period
};

struct WindowRoute {
    uint64_t full_slots = 0;
    uint64_t quantised_slots = 0;
    bool promotion = true; // false: windows now quantised may not return to full (the one-way variant)

    // Everything below is off in the published method; the defaults here are off too.

    // A resident's rank counts as rank * margin_num / margin_den when it is compared with one that would take
    // its place. With a margin above one, a tie goes to the resident.
    uint32_t margin_num = 1;
    uint32_t margin_den = 1;

    // At most max(2, candidates * cap_num / cap_den) windows enter or leave the full tier in exchange for
    // others. Promotions are given up first, then displacements by fresh windows, each from the least gain
    // up. Demotions that full_slots itself forces are never refused. den 0: no cap.
    uint32_t cap_num = 0;
    uint32_t cap_den = 0;

    // Unscored candidates keep their tier (fresh ones become full) and take no slot: the floor pays for them.
    bool protect_unscored = false;
};

struct WindowMoves {
    uint64_t full = 0; // protected ones not counted
    uint64_t quantised = 0;
    uint64_t evicted = 0;
    uint64_t protected_windows = 0;
    uint64_t promoted = 0; // quantised -> full
    uint64_t demoted = 0;  // full -> quantised
    uint64_t given_up = 0; // exchanges undone by the cap
};

// Scratch; its contents mean nothing before or after a call.
struct WindowSlot {
    int64_t key = 0;
    uint32_t tie = 0;
    uint32_t index = 0;
};

// `candidates`, fewer than 2^31, ascend by id; `targets` and `scratch` hold as many entries. O(n) as a rule,
// O(n log n) at most.
WindowMoves route_windows(const WindowRoute &route, std::span<const WindowCandidate> candidates,
                          std::span<WindowTier> targets, std::span<WindowSlot> scratch);

} // namespace skerry
