#include "model/qevict_paper.hpp"

#include <algorithm>
#include <numeric>

namespace skerry {

namespace {

constexpr uint64_t decimal_places = 1000000000;

struct Wide {
    uint64_t high;
    uint64_t low;
};

Wide multiply(uint64_t a, uint64_t b) {
    const uint64_t mask = 0xffffffffu;
    const uint64_t a0 = a & mask, a1 = a >> 32, b0 = b & mask, b1 = b >> 32;
    const uint64_t low = a0 * b0;
    const uint64_t mid = a1 * b0 + (low >> 32);
    const uint64_t mid2 = a0 * b1 + (mid & mask);
    return {a1 * b1 + (mid >> 32) + (mid2 >> 32), (mid2 << 32) | (low & mask)};
}

bool times(uint64_t *value, uint64_t factor) {
    const Wide product = multiply(*value, factor);
    *value = product.low;
    return product.high == 0;
}

uint64_t held_tokens(const PaperShape &shape) { return uint64_t(shape.sinks) + shape.local; }

} // namespace

Ratio ratio_from_decimal(double x) {
    if (!(x > 0)) {
        return {0, 1};
    }
    const double scaled = std::min(x, 1e9) * double(decimal_places);
    uint64_t num = static_cast<uint64_t>(scaled);
    num += scaled - double(num) >= 0.5 ? 1 : 0;
    const uint64_t common = std::gcd(num, decimal_places);
    return {num / common, decimal_places / common};
}

// Shift and subtract, 64 rounds: no compiler's 128-bit type is needed, and nothing here is on a hot path.
uint64_t scale_floor(uint64_t a, uint64_t num, uint64_t den) {
    const Wide product = multiply(a, num);
    if (product.high == 0) {
        return product.low / den;
    }
    if (product.high >= den) {
        return UINT64_MAX;
    }
    uint64_t rest = product.high, quotient = 0;
    for (int bit = 63; bit >= 0; --bit) {
        const bool carry = (rest >> 63) != 0;
        rest = (rest << 1) | ((product.low >> bit) & 1);
        if (carry || rest >= den) {
            rest -= den;
            quotient |= uint64_t(1) << bit;
        }
    }
    return quotient;
}

uint64_t paper_full_window_bytes(const PaperShape &shape) {
    return 4 * uint64_t(shape.kv_heads) * shape.head_dim * shape.window;
}

uint64_t paper_quantised_window_bytes(const PaperShape &shape) {
    const uint64_t heads = shape.kv_heads;
    return heads * shape.head_dim * shape.window / 2 + 4 * heads * shape.head_dim + 4 * heads * shape.window;
}

PaperFault paper_budget(const PaperShape &shape, Ratio beta, uint64_t length, Ratio quantised_share,
                        PaperBudget *out) {
    if (shape.kv_heads == 0 || shape.head_dim == 0 || shape.window == 0) {
        return PaperFault::empty_shape;
    }
    if (shape.window % 4 != 0) {
        return PaperFault::window_not_multiple_4;
    }
    if (shape.head_dim % 4 != 0) {
        return PaperFault::head_dim_not_multiple_4;
    }
    if (shape.local % shape.window != 0) {
        return PaperFault::local_not_windows;
    }
    if (beta.den == 0 || quantised_share.den == 0) {
        return PaperFault::zero_denominator;
    }
    if (quantised_share.num > quantised_share.den) {
        return PaperFault::share_above_one;
    }
    PaperBudget plan;
    plan.token_bytes = 4;
    if (!times(&plan.token_bytes, uint64_t(shape.kv_heads) * shape.head_dim)) {
        return PaperFault::too_large;
    }
    uint64_t window_bytes = plan.token_bytes, whole = plan.token_bytes;
    if (!times(&window_bytes, shape.window) || !times(&whole, length)) {
        return PaperFault::too_large;
    }
    plan.total = scale_floor(whole, beta.num, beta.den);
    uint64_t full_den = quantised_share.den, quantised_den = quantised_share.den;
    plan.full_window_bytes = window_bytes;
    plan.quantised_window_bytes = paper_quantised_window_bytes(shape);
    if (plan.total == UINT64_MAX || !times(&full_den, plan.full_window_bytes) ||
        !times(&quantised_den, plan.quantised_window_bytes)) {
        return PaperFault::too_large;
    }
    const uint64_t held = held_tokens(shape);
    plan.tokens = plan.total / plan.token_bytes;
    plan.rest = plan.tokens > held ? plan.tokens - held : 0;
    plan.excess_tokens = plan.tokens < held ? held - plan.tokens : 0;
    plan.history = plan.rest * plan.token_bytes;
    plan.full_slots = scale_floor(plan.history, quantised_share.den - quantised_share.num, full_den);
    plan.quantised_slots = scale_floor(plan.history, quantised_share.num, quantised_den);
    plan.used = plan.full_slots * plan.full_window_bytes + plan.quantised_slots * plan.quantised_window_bytes;
    plan.unspent = plan.history - plan.used;
    plan.readable_tokens = held + (plan.full_slots + plan.quantised_slots) * shape.window;
    *out = plan;
    return PaperFault::none;
}

void paper_spend_remainder(PaperBudget *budget) {
    const uint64_t window = budget->full_window_bytes / budget->token_bytes;
    const auto take = [&](uint64_t bytes, uint64_t *slots) {
        const uint64_t more = budget->unspent / bytes;
        *slots += more;
        budget->used += more * bytes;
        budget->unspent -= more * bytes;
        budget->readable_tokens += more * window;
    };
    take(budget->full_window_bytes, &budget->full_slots);
    take(budget->quantised_window_bytes, &budget->quantised_slots);
}

uint64_t paper_charged_bytes(const PaperShape &shape, const PaperBudget &budget, uint64_t full,
                             uint64_t quantised, uint64_t growth) {
    return (held_tokens(shape) + growth) * budget.token_bytes + full * budget.full_window_bytes +
           quantised * budget.quantised_window_bytes;
}

uint64_t paper_physical_bytes(const PaperShape &shape, const PaperBudget &budget, uint64_t full,
                              uint64_t quantised, uint64_t dormant, uint64_t growth) {
    return paper_charged_bytes(shape, budget, full, quantised, growth) +
           dormant * budget.quantised_window_bytes;
}

// Both slot counts grow with beta, so the worst bytes do too and a bisection finds the last beta that fits.
Ratio paper_beta_for_physical(const PaperShape &shape, uint64_t length, Ratio quantised_share,
                              uint64_t limit) {
    constexpr uint64_t millionths = 1000000;
    const auto fits = [&](uint64_t beta) {
        PaperBudget plan;
        return paper_budget(shape, {beta, millionths}, length, quantised_share, &plan) == PaperFault::none &&
               paper_physical_bytes(shape, plan, plan.full_slots, plan.quantised_slots,
                                    plan.quantised_slots == 0 ? 0 : plan.full_slots,
                                    shape.window - 1) <= limit;
    };
    if (!fits(0)) {
        return {0, 1};
    }
    uint64_t low = 0, high = 2 * millionths;
    while (low < high) {
        const uint64_t middle = low + (high - low + 1) / 2;
        fits(middle) ? low = middle : high = middle - 1;
    }
    const uint64_t common = std::gcd(low, millionths);
    return {low / common, millionths / common};
}

uint64_t paper_local_from_share(uint64_t budget_tokens, Ratio share, uint32_t window) {
    const uint64_t whole = scale_floor(budget_tokens, share.num, share.den);
    const Wide exact = multiply(budget_tokens, share.num), floored = multiply(whole, share.den);
    const bool fraction = exact.low != floored.low || exact.high != floored.high;
    const uint64_t windows = (whole + (fraction ? 1 : 0) + window - 1) / window;
    return std::max<uint64_t>(windows, 1) * window;
}

TokenSet token_set(const WindowGrid &grid, uint64_t tokens, std::span<const TokenSet> tier_of_window,
                   uint64_t position) {
    if (position >= tokens) {
        return TokenSet::absent;
    }
    if (position < grid.sinks) {
        return TokenSet::sink;
    }
    const uint64_t id = window_of(grid, position);
    return id < tier_of_window.size() ? tier_of_window[id] : TokenSet::local;
}

G1Plan g1_plan(const G1Config &config, uint64_t prompt) {
    const auto over = [](uint64_t a, uint64_t b) { return a > b ? a - b : 0; };
    const auto ceiling = [](uint64_t a, uint64_t b) { return (a + b - 1) / b; };
    G1Plan plan;
    plan.total = (prompt + config.generation_cap) * config.budget_percent / 100;
    const uint64_t rest = over(plan.total, config.sinks);
    plan.local = std::min(plan.total * config.local_percent / 100, rest);
    const uint64_t history = rest - plan.local;
    const uint64_t full = history * (100 - config.quantised_percent) / 100;
    plan.full_windows = ceiling(full, config.window);
    plan.quantised_windows = ceiling((history - full) * config.code_ratio, config.window);
    const uint64_t scored = over(std::max(config.sinks, over(prompt, plan.local)), config.sinks);
    plan.complete_windows = scored / config.window;
    plan.scored_end = config.sinks + plan.complete_windows * config.window;
    plan.physical_length = config.sinks + std::min(plan.full_windows, plan.complete_windows) * config.window +
                           over(prompt, plan.scored_end);
    return plan;
}

} // namespace skerry
