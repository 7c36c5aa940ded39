#pragma once

// Attention mass of a segment, in whole numbers. A mass is an int64 in units of 2^-40; sums and maxima of
// whole numbers do not depend on how a step was cut into chunks or spread over workers. docs/design/scores.md
// has the bounds.
//
// Rules of use, for every score rule:
// - one query adds at most one mass per segment: the mean over the query heads that share the selection
// (mean_over_heads);
// - the words of a segment start as zeros, and a copy of them is its whole state (abort and fork copy words);
// - queries of period k are added with `period` = k; begin_period(k) runs once per segment before the first
// of them,
//   after the routing event of period k - 1. Ranking is read at events, before begin_period.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace skerry {

enum class ScoreRule : uint8_t {
    cumulative,     // every query so far (the published rule)
    age_normalised, // cumulative over the number of queries that could see the segment
    decayed,        // time constant 128 tokens, applied once a period
    last_queries,   // sum over the last `window` queries
    worst_case,     // largest mass from one of the last `window` queries
};

struct ScoreConfig {
    ScoreRule rule = ScoreRule::cumulative;
    uint32_t period = 16; // P: tokens between two events
    uint32_t window = 32; // n of the two windowed rules, a multiple of the period
};

constexpr int mass_bits = 40;
constexpr int64_t mass_one = int64_t(1) << mass_bits;
constexpr int64_t mass_max = INT64_MAX;
constexpr int age_rank_bits = 60;
constexpr uint32_t decay_time_constant = 128;

// Half of a unit and more rounds up; a NaN or a negative mass is 0, and 2^20 is the largest single mass.
constexpr int64_t to_mass(double mass) {
    if (!(mass > 0)) return 0;
    const double scaled = (mass < 0x1p20 ? mass : 0x1p20) * 0x1p40;
    const int64_t whole = static_cast<int64_t>(scaled);
    return whole + (scaled - static_cast<double>(whole) >= 0.5 ? 1 : 0);
}

constexpr double from_mass(int64_t mass) { return static_cast<double>(mass) * 0x1p-40; }

// Held at the top: for values >= 0 this sum is still associative.
constexpr int64_t add_mass(int64_t a, int64_t b) { return a > mass_max - b ? mass_max : a + b; }

// Mean over query heads of masses summed as whole numbers, to the nearest unit.
constexpr int64_t mean_over_heads(int64_t sum, uint32_t heads) {
    return sum / heads + (sum % heads >= int64_t(heads) - sum % heads ? 1 : 0);
}

constexpr bool score_config_valid(const ScoreConfig &config) {
    const bool windowed = config.rule == ScoreRule::last_queries || config.rule == ScoreRule::worst_case;
    return config.period != 0 && (!windowed || (config.window != 0 && config.window % config.period == 0));
}

// int64 words of state per segment: 1 word (8 bytes), or one per period of the window (16 bytes at n 32, P
// 16).
constexpr uint32_t score_words(const ScoreConfig &config) {
    const bool windowed = config.rule == ScoreRule::last_queries || config.rule == ScoreRule::worst_case;
    return windowed ? config.window / config.period : 1;
}

// floor(value * factor / 2^32) for value >= 0, without a 128-bit type.
constexpr int64_t scale_32(int64_t value, uint32_t factor) {
    const uint64_t bits = static_cast<uint64_t>(value);
    return static_cast<int64_t>((bits >> 32) * factor + (((bits & 0xffffffffu) * factor) >> 32));
}

// exp(-period / 128) in units of 2^-32, from one constant by whole-number products: the same on every
// machine.
constexpr uint32_t decay_factor(uint32_t period) {
    constexpr uint64_t one_token = 0xfe01feab; // round(exp(-1/128) * 2^32)
    uint64_t factor = uint64_t(1) << 32;
    for (uint32_t token = 0; token < period && factor != 0; ++token) {
        factor = (factor * one_token + (uint64_t(1) << 31)) >> 32;
    }
    return static_cast<uint32_t>(factor);
}

// What the inner loops need, resolved once per cache.
struct ScorePlan {
    ScoreRule rule = ScoreRule::cumulative;
    uint32_t words = 1;
    uint32_t decay = 0;
};

constexpr ScorePlan make_score_plan(const ScoreConfig &config) {
    return {config.rule, score_words(config),
            config.rule == ScoreRule::decayed ? decay_factor(config.period) : 0};
}

// The mass one query, or the combined mass of several queries of the same period, gives to one segment.
constexpr void score_add(const ScorePlan &plan, int64_t *words, uint64_t period, int64_t mass) {
    int64_t &word = words[plan.words == 1 ? 0 : period % plan.words];
    word = plan.rule == ScoreRule::worst_case ? std::max(word, mass) : add_mass(word, mass);
}

// How partial masses of the same segment and period merge before score_add: a sum, or the maximum of single
// queries.
constexpr int64_t score_combine(const ScorePlan &plan, int64_t a, int64_t b) {
    return plan.rule == ScoreRule::worst_case ? std::max(a, b) : add_mass(a, b);
}

constexpr void score_begin_period(const ScorePlan &plan, int64_t *words, uint64_t period) {
    switch (plan.rule) {
    case ScoreRule::cumulative:
    case ScoreRule::age_normalised:
        break;
    case ScoreRule::decayed:
        words[0] = scale_32(words[0], plan.decay);
        break;
    case ScoreRule::last_queries:
    case ScoreRule::worst_case:
        words[period % plan.words] = 0;
        break;
    }
}

// Queries that could see some token of a segment that starts at `first`, when positions below `next` were all
// scored.
constexpr uint64_t queries_able_to_see(uint64_t first, uint64_t next) {
    return next > first ? next - first : 0;
}

// Larger is better; comparable between segments of one selection and one rule only. `queries` counts the
// scored queries that could see the segment (used by age_normalised alone, whose unit is 2^-60 per query).
constexpr int64_t score_rank(const ScorePlan &plan, const int64_t *words, uint64_t queries) {
    switch (plan.rule) {
    case ScoreRule::cumulative:
    case ScoreRule::decayed:
        return words[0];
    case ScoreRule::age_normalised: {
        if (queries == 0) return 0;
        const uint64_t mass = static_cast<uint64_t>(words[0]);
        const uint64_t whole = mass / queries;
        if (whole >> (63 - (age_rank_bits - mass_bits)) != 0) return mass_max;
        // The remainder is below `queries`, which fits 44 bits by far: the shift loses nothing.
        const uint64_t part = ((mass % queries) << (age_rank_bits - mass_bits)) / queries;
        return static_cast<int64_t>((whole << (age_rank_bits - mass_bits)) + part);
    }
    case ScoreRule::last_queries:
    case ScoreRule::worst_case: {
        int64_t value = 0;
        for (uint32_t i = 0; i < plan.words; ++i)
            value = score_combine(plan, value, words[i]);
        return value;
    }
    }
    return 0;
}

} // namespace skerry
