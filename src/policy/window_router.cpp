#include "policy/window_router.hpp"

#include <algorithm>

namespace skerry {

namespace {

// floor(rank * num / den), held at the top. A margin raises what is positive; other ranks stay as they are.
int64_t raised(int64_t rank, uint32_t num, uint32_t den) {
    if (rank <= 0 || num == den) return rank;
    const uint64_t value = static_cast<uint64_t>(rank);
    const uint64_t whole = value / den, part = (value % den) * num / den;
    const uint64_t top = static_cast<uint64_t>(INT64_MAX);
    if (whole > (top - part) / num) return INT64_MAX;
    return static_cast<int64_t>(whole * num + part);
}

constexpr uint32_t no_resident = uint32_t(1) << 31;

bool before(const WindowSlot &a, const WindowSlot &b) {
    return a.key != b.key ? a.key > b.key : a.tie < b.tie;
}

// Fills key and tie. Candidates ascend by id, so the index stands for it.
void value(const WindowRoute &route, std::span<const WindowCandidate> candidates, std::span<WindowSlot> slots,
           bool for_full) {
    const bool favours = route.margin_num > route.margin_den;
    for (WindowSlot &slot : slots) {
        const WindowCandidate &c = candidates[slot.index];
        const bool resident =
            favours && (c.tier == WindowTier::full || (!for_full && c.tier == WindowTier::quantised));
        slot.key = resident ? raised(c.rank, route.margin_num, route.margin_den) : c.rank;
        slot.tie = slot.index | (resident ? 0 : no_resident);
    }
}

// The best `count` come first, in no order.
void select(std::span<WindowSlot> slots, size_t count) {
    if (count != 0 && count < slots.size()) {
        std::nth_element(slots.begin(), slots.begin() + std::ptrdiff_t(count), slots.end(), before);
    }
}

size_t at_most(size_t count, uint64_t slots) { return count < slots ? count : static_cast<size_t>(slots); }

// order[0, winners) go to full, the others lost. Undoes exchanges, those of least gain first, until at most
// `cap` windows cross the border of the full tier; returns the number of winners that remain.
size_t hold_to_cap(std::span<const WindowCandidate> candidates, std::span<WindowSlot> order, size_t winners,
                   uint64_t cap, uint64_t *given_up) {
    const auto tier = [&](size_t i) { return candidates[order[i].index].tier; };
    uint64_t crossing = 0;
    for (size_t i = 0; i < order.size(); ++i) {
        crossing += tier(i) == (i < winners ? WindowTier::quantised : WindowTier::full);
    }
    if (crossing <= cap) return winners;
    std::sort(order.begin(), order.end(), before);
    // Losers are sorted, so the first one found is the best of its tier. The places only move forward.
    size_t best_full = winners, best_fresh = winners;
    const auto next = [&](size_t from, WindowTier wanted) {
        while (from < order.size() && tier(from) != wanted)
            ++from;
        return from;
    };
    for (const WindowTier entered : {WindowTier::quantised, WindowTier::fresh}) {
        for (size_t i = winners; i-- > 0 && crossing > cap;) {
            if (tier(i) != entered) continue;
            best_full = next(best_full, WindowTier::full);
            if (best_full < order.size()) {
                std::swap(order[i], order[best_full]);
                crossing -= entered == WindowTier::quantised ? 2 : 1;
            } else if (entered == WindowTier::quantised) {
                // Nothing was displaced: the slot goes to the best fresh window, which moves no bytes, or
                // stays empty.
                best_fresh = next(best_fresh, WindowTier::fresh);
                if (best_fresh < order.size()) {
                    std::swap(order[i], order[best_fresh]);
                } else {
                    std::swap(order[i], order[--winners]);
                }
                crossing -= 1;
            } else {
                break;
            }
            *given_up += 1;
        }
    }
    return winners;
}

} // namespace

WindowMoves route_windows(const WindowRoute &route, std::span<const WindowCandidate> candidates,
                          std::span<WindowTier> targets, std::span<WindowSlot> scratch) {
    WindowMoves moves;
    // Rivals for the full tier grow from the front, those barred from it from the back.
    size_t rivals = 0, back = candidates.size();
    for (size_t i = 0; i < candidates.size(); ++i) {
        const bool is_quantised = candidates[i].tier == WindowTier::quantised;
        if (route.protect_unscored && candidates[i].unscored) {
            targets[i] = is_quantised ? WindowTier::quantised : WindowTier::full;
            moves.protected_windows += 1;
        } else {
            const size_t place = is_quantised && !route.promotion ? --back : rivals++;
            scratch[place].index = static_cast<uint32_t>(i);
        }
    }
    size_t eligible = rivals;
    for (; back < candidates.size(); ++back)
        scratch[eligible++].index = scratch[back].index;

    value(route, candidates, scratch.first(rivals), true);
    size_t full = at_most(rivals, route.full_slots);
    select(scratch.first(rivals), full);
    if (route.cap_den != 0) {
        const uint64_t share = uint64_t(candidates.size()) * route.cap_num / route.cap_den;
        full = hold_to_cap(candidates, scratch.first(rivals), full, std::max<uint64_t>(share, 2),
                           &moves.given_up);
    }

    const std::span<WindowSlot> rest = scratch.subspan(full, eligible - full);
    value(route, candidates, rest, false);
    const size_t quantised = at_most(rest.size(), route.quantised_slots);
    select(rest, quantised);

    for (size_t i = 0; i < eligible; ++i) {
        const uint32_t index = scratch[i].index;
        const WindowTier from = candidates[index].tier;
        WindowTier to = WindowTier::evicted;
        if (i < full) {
            to = WindowTier::full;
            moves.promoted += from == WindowTier::quantised;
        } else if (i < full + quantised) {
            to = WindowTier::quantised;
            moves.demoted += from == WindowTier::full;
        }
        targets[index] = to;
    }
    moves.full = full;
    moves.quantised = quantised;
    moves.evicted = eligible - full - quantised;
    return moves;
}

} // namespace skerry
