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

class Order {
public:
    Order(const WindowRoute &route, std::span<const WindowCandidate> candidates, bool for_full)
        : route_(route), candidates_(candidates), for_full_(for_full),
          favours_(route.margin_num > route.margin_den) {}

    bool operator()(uint32_t a, uint32_t b) const {
        const WindowCandidate &x = candidates_[a], &y = candidates_[b];
        const bool x_barred = barred(x), y_barred = barred(y);
        if (x_barred != y_barred) return y_barred;
        const bool x_resident = favours_ && resident(x), y_resident = favours_ && resident(y);
        const int64_t x_rank = x_resident ? raised(x.rank, route_.margin_num, route_.margin_den) : x.rank;
        const int64_t y_rank = y_resident ? raised(y.rank, route_.margin_num, route_.margin_den) : y.rank;
        if (x_rank != y_rank) return x_rank > y_rank;
        if (x_resident != y_resident) return x_resident;
        return x.id < y.id;
    }

    bool barred(const WindowCandidate &c) const {
        return for_full_ && !route_.promotion && c.tier == WindowTier::quantised;
    }

private:
    bool resident(const WindowCandidate &c) const {
        return c.tier == WindowTier::full || (!for_full_ && c.tier == WindowTier::quantised);
    }

    const WindowRoute &route_;
    std::span<const WindowCandidate> candidates_;
    bool for_full_;
    bool favours_;
};

// order[0, winners) go to full. Undoes exchanges, those of least gain first, until at most `cap` windows
// cross the border of the full tier; returns the number of winners that remain.
size_t hold_to_cap(std::span<const WindowCandidate> candidates, std::span<uint32_t> order, size_t winners,
                   uint64_t cap, uint64_t *given_up) {
    const auto tier = [&](size_t i) { return candidates[order[i]].tier; };
    uint64_t crossing = 0;
    for (size_t i = 0; i < order.size(); ++i) {
        crossing += tier(i) == (i < winners ? WindowTier::quantised : WindowTier::full);
    }
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
                          std::span<WindowTier> targets, std::span<uint32_t> scratch) {
    WindowMoves moves;
    size_t eligible = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
        if (route.protect_unscored && candidates[i].unscored) {
            const bool quantised = candidates[i].tier == WindowTier::quantised;
            targets[i] = quantised ? WindowTier::quantised : WindowTier::full;
            moves.protected_windows += 1;
        } else {
            scratch[eligible++] = static_cast<uint32_t>(i);
        }
    }
    const std::span<uint32_t> order = scratch.first(eligible);

    // std::sort neither allocates nor needs stability here: the order is total because ids differ.
    const Order by_full(route, candidates, true);
    std::sort(order.begin(), order.end(), by_full);
    size_t full = 0;
    while (full < eligible && full < route.full_slots && !by_full.barred(candidates[order[full]]))
        ++full;

    if (route.cap_den != 0) {
        const uint64_t share = uint64_t(candidates.size()) * route.cap_num / route.cap_den;
        full = hold_to_cap(candidates, order, full, std::max<uint64_t>(share, 2), &moves.given_up);
    }

    const auto rest = order.subspan(full);
    std::sort(rest.begin(), rest.end(), Order(route, candidates, false));
    const size_t quantised =
        rest.size() < route.quantised_slots ? rest.size() : static_cast<size_t>(route.quantised_slots);

    for (size_t i = 0; i < eligible; ++i) {
        const WindowTier from = candidates[order[i]].tier;
        WindowTier to = WindowTier::evicted;
        if (i < full) {
            to = WindowTier::full;
            moves.promoted += from == WindowTier::quantised;
        } else if (i < full + quantised) {
            to = WindowTier::quantised;
            moves.demoted += from == WindowTier::full;
        }
        targets[order[i]] = to;
    }
    moves.full = full;
    moves.quantised = quantised;
    moves.evicted = eligible - full - quantised;
    return moves;
}

} // namespace skerry
