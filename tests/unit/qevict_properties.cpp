// QEvict's parts against brute force on random input, and their limits.

#include <doctest/doctest.h>

#include "base/half.hpp"
#include "codec/channel.hpp"
#include "codec/rotary.hpp"
#include "model/qevict_paper.hpp"
#include "policy/scores.hpp"
#include "policy/window_router.hpp"
#include "stats/diagnostics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace skerry;

namespace {

using Random = std::mt19937_64;

uint64_t below(Random &random, uint64_t n) { return random() % n; }

struct Routed {
    std::vector<WindowTier> targets;
    WindowMoves moves;
};

Routed run(const WindowRoute &route, const std::vector<WindowCandidate> &candidates, int64_t fill = 0) {
    Routed r;
    r.targets.assign(candidates.size(), WindowTier::fresh);
    std::vector<WindowSlot> scratch(candidates.size(), WindowSlot{fill, uint32_t(fill), uint32_t(fill)});
    r.moves = route_windows(route, candidates, r.targets, scratch);
    return r;
}

std::vector<WindowCandidate> random_candidates(Random &random, size_t most, int64_t ranks) {
    std::vector<WindowCandidate> candidates(below(random, most + 1));
    uint32_t id = 0;
    for (WindowCandidate &c : candidates) {
        id += 1 + uint32_t(below(random, 3));
        c = {int64_t(below(random, uint64_t(ranks))), id, WindowTier(below(random, 3)),
             below(random, 5) == 0};
    }
    return candidates;
}

// The published rule, by a stable sort.
std::vector<WindowTier> oracle(const WindowRoute &route, const std::vector<WindowCandidate> &candidates) {
    std::vector<size_t> order(candidates.size());
    for (size_t i = 0; i < order.size(); ++i)
        order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return candidates[a].rank > candidates[b].rank; });
    std::vector<WindowTier> targets(candidates.size(), WindowTier::evicted);
    uint64_t full = 0, quantised = 0;
    for (const size_t i : order) {
        const bool barred = !route.promotion && candidates[i].tier == WindowTier::quantised;
        if (full < route.full_slots && !barred) {
            targets[i] = WindowTier::full;
            full += 1;
        }
    }
    for (const size_t i : order) {
        if (targets[i] == WindowTier::evicted && quantised < route.quantised_slots) {
            targets[i] = WindowTier::quantised;
            quantised += 1;
        }
    }
    return targets;
}

} // namespace

TEST_CASE("QEvict routing equals a stable sort") {
    Random random(1);
    for (int round = 0; round < 4000; ++round) {
        const auto candidates = random_candidates(random, 40, round % 2 == 0 ? 6 : 1000000);
        WindowRoute route;
        route.full_slots = below(random, 20);
        route.quantised_slots = below(random, 20);
        route.promotion = round % 3 != 0;
        const Routed r = run(route, candidates);
        CHECK(r.targets == oracle(route, candidates));
        CHECK(run(route, candidates, -1).targets == r.targets);
        CHECK(r.moves.full + r.moves.quantised + r.moves.evicted == candidates.size());
    }
}

TEST_CASE("QEvict routing at the top of the rank's range, and with no slots") {
    WindowRoute route;
    std::vector<WindowCandidate> candidates{{mass_max, 0, WindowTier::full, false},
                                            {mass_max, 1, WindowTier::full, false},
                                            {mass_max - 1, 2, WindowTier::quantised, false},
                                            {0, 3, WindowTier::fresh, false}};
    CHECK(run(route, candidates).moves.evicted == 4);
    CHECK(run(route, {}).moves.full == 0);
    route.full_slots = UINT64_MAX;
    route.quantised_slots = UINT64_MAX;
    CHECK(run(route, candidates).moves.full == 4);
    route.full_slots = 2;
    route.margin_num = 6;
    route.margin_den = 5;
    CHECK(run(route, candidates).targets == std::vector<WindowTier>{WindowTier::full, WindowTier::full,
                                                                    WindowTier::quantised,
                                                                    WindowTier::quantised});
}

TEST_CASE("QEvict routing: the margin favours residents") {
    WindowRoute route;
    route.full_slots = 1;
    route.quantised_slots = 1;
    route.margin_num = 6;
    route.margin_den = 5;
    const auto after = [&](int64_t resident, int64_t challenger) {
        return run(route,
                   {{challenger, 0, WindowTier::quantised, false}, {resident, 1, WindowTier::full, false}})
            .targets[0];
    };
    CHECK(after(100, 119) == WindowTier::quantised);
    CHECK(after(100, 120) == WindowTier::quantised); // a tie stays
    CHECK(after(100, 121) == WindowTier::full);
    CHECK(after(0, 0) == WindowTier::quantised);
    // The same margin guards the border to eviction, whichever readable tier the resident is in.
    route.full_slots = 0;
    CHECK(
        run(route, {{119, 0, WindowTier::fresh, false}, {100, 1, WindowTier::quantised, false}}).targets[1] ==
        WindowTier::quantised);
    CHECK(
        run(route, {{121, 0, WindowTier::fresh, false}, {100, 1, WindowTier::quantised, false}}).targets[1] ==
        WindowTier::evicted);
}

TEST_CASE("QEvict routing: slots, protection and the cap hold together") {
    Random random(2);
    size_t capped = 0;
    for (int round = 0; round < 4000; ++round) {
        const auto candidates = random_candidates(random, 60, 1000);
        WindowRoute route;
        route.full_slots = below(random, 30);
        route.quantised_slots = below(random, 30);
        route.promotion = round % 5 != 0;
        route.margin_num = 6;
        route.margin_den = 5;
        route.protect_unscored = true;
        const Routed free = run(route, candidates);
        route.cap_num = 1;
        route.cap_den = 8;
        const Routed r = run(route, candidates);
        CHECK(run(route, candidates, -1).targets == r.targets);

        uint64_t full = 0, quantised = 0, crossing = 0, residents = 0, free_crossing = 0;
        for (size_t i = 0; i < candidates.size(); ++i) {
            const WindowCandidate &c = candidates[i];
            CHECK(r.targets[i] != WindowTier::fresh);
            if (c.unscored) {
                CHECK(r.targets[i] ==
                      (c.tier == WindowTier::quantised ? WindowTier::quantised : WindowTier::full));
                continue;
            }
            full += r.targets[i] == WindowTier::full;
            quantised += r.targets[i] == WindowTier::quantised;
            residents += c.tier == WindowTier::full;
            const auto crosses = [&](const Routed &x) {
                return (c.tier == WindowTier::full && x.targets[i] != WindowTier::full) ||
                       (c.tier == WindowTier::quantised && x.targets[i] == WindowTier::full);
            };
            crossing += crosses(r);
            free_crossing += crosses(free);
        }
        CHECK(full == r.moves.full);
        CHECK(full <= route.full_slots);
        CHECK(quantised <= route.quantised_slots);
        const uint64_t forced = residents > route.full_slots ? residents - route.full_slots : 0;
        const uint64_t cap = std::max<uint64_t>(candidates.size() / 8, 2);
        CHECK(crossing <= std::max(cap, forced));
        CHECK(crossing <= free_crossing);
        if (free_crossing <= cap) CHECK(r.targets == free.targets);
        CHECK((r.moves.given_up != 0) == (crossing < free_crossing));
        capped += r.moves.given_up != 0;

        for (size_t a = 0; a < candidates.size(); ++a) {
            for (size_t b = 0; b < candidates.size(); ++b) {
                const WindowCandidate &up = candidates[a], &down = candidates[b];
                const bool exchanged = !up.unscored && !down.unscored && up.tier == WindowTier::quantised &&
                                       r.targets[a] == WindowTier::full && down.tier == WindowTier::full &&
                                       r.targets[b] != WindowTier::full;
                if (exchanged) CHECK(up.rank >= down.rank * 6 / 5);
                // Nothing dropped is better than a resident or equal that was kept, beyond the margin.
                const bool kept_worse = !up.unscored && !down.unscored &&
                                        r.targets[a] == WindowTier::evicted &&
                                        r.targets[b] == WindowTier::quantised;
                if (kept_worse) CHECK(up.rank <= down.rank * 6 / 5);
            }
        }
    }
    CHECK(capped > 100);
}

TEST_CASE("QEvict routing: the cap keeps the exchange that gains most") {
    WindowRoute route;
    route.full_slots = 3;
    route.quantised_slots = 3;
    route.cap_num = 1;
    route.cap_den = 8;
    const std::vector<WindowCandidate> candidates{
        {10, 0, WindowTier::full, false},       {20, 1, WindowTier::full, false},
        {30, 2, WindowTier::full, false},       {100, 3, WindowTier::quantised, false},
        {200, 4, WindowTier::quantised, false}, {300, 5, WindowTier::quantised, false}};
    const Routed r = run(route, candidates);
    CHECK(r.moves.given_up == 2);
    CHECK(r.targets == std::vector<WindowTier>{WindowTier::quantised, WindowTier::full, WindowTier::full,
                                               WindowTier::quantised, WindowTier::quantised,
                                               WindowTier::full});
}

TEST_CASE("QEvict routing: a promotion given up leaves its slot to a fresh window") {
    WindowRoute route;
    route.full_slots = 3;
    route.quantised_slots = 8;
    route.cap_num = 1;
    route.cap_den = 8;
    std::vector<WindowCandidate> candidates{{50, 0, WindowTier::quantised, false},
                                            {60, 1, WindowTier::quantised, false},
                                            {70, 2, WindowTier::quantised, false},
                                            {10, 3, WindowTier::fresh, false},
                                            {20, 4, WindowTier::fresh, false}};
    Routed r = run(route, candidates);
    CHECK(r.targets == std::vector<WindowTier>{WindowTier::quantised, WindowTier::full, WindowTier::full,
                                               WindowTier::quantised, WindowTier::full});
    candidates.resize(3);
    r = run(route, candidates);
    CHECK(r.targets == std::vector<WindowTier>{WindowTier::quantised, WindowTier::full, WindowTier::full});
    CHECK(r.moves.full == 2);
}

TEST_CASE("QEvict windows: every token in exactly one set") {
    Random random(3);
    for (int round = 0; round < 2000; ++round) {
        const WindowGrid grid{below(random, 20), 1 + below(random, 40)};
        const LocalRule rule = round % 2 == 0 ? LocalRule::whole_windows : LocalRule::at_least;
        const uint64_t local =
            rule == LocalRule::at_least ? below(random, 100) : grid.window * (1 + below(random, 5));
        const uint64_t tokens = below(random, 600);
        const uint64_t evictable = evictable_windows(grid, tokens, local, rule);
        const uint64_t first = local_first(grid, tokens, local, rule);
        REQUIRE(window_count(grid, tokens) >= evictable);
        if (evictable != 0) {
            CHECK(window_first(grid, evictable) == first);
            const uint64_t zone = tokens - first;
            if (rule == LocalRule::at_least) {
                CHECK(zone >= local);
                CHECK(zone < local + grid.window);
            } else {
                CHECK(zone > local - grid.window);
                CHECK(zone <= local);
            }
        } else {
            CHECK(first == std::min(grid.sinks, tokens));
        }
        std::vector<TokenSet> tiers(evictable);
        for (TokenSet &tier : tiers)
            tier = TokenSet(1 + below(random, 3));
        for (uint64_t p = 0; p < tokens + 3; ++p) {
            const bool sink = p < grid.sinks && p < tokens,
                       zone = p >= first && p >= grid.sinks && p < tokens;
            int sets = sink + zone;
            TokenSet expected = sink ? TokenSet::sink : zone ? TokenSet::local : TokenSet::absent;
            for (uint64_t j = 0; j < evictable; ++j) {
                if (p >= window_first(grid, j) && p < window_first(grid, j + 1)) {
                    sets += 1;
                    expected = tiers[j];
                    CHECK(window_of(grid, p) == j);
                }
            }
            CHECK(sets == (p < tokens ? 1 : 0));
            CHECK(token_set(grid, tokens, tiers, p) == expected);
        }
    }
}

TEST_CASE("QEvict budget: exact quotients") {
    __extension__ using Wide = unsigned __int128;
    Random random(4);
    for (int round = 0; round < 20000; ++round) {
        const uint64_t a = random() >> below(random, 64), b = random() >> below(random, 64);
        const uint64_t c = std::max<uint64_t>(random() >> below(random, 64), 1);
        const Wide exact = Wide(a) * b / c;
        CHECK(scale_floor(a, b, c) == (exact > UINT64_MAX ? UINT64_MAX : uint64_t(exact)));
    }
    for (uint64_t millionths = 0; millionths <= 1000000; millionths += 997) {
        const Ratio r = ratio_from_decimal(double(millionths) / 1e6);
        CHECK(r.num * 1000000 == millionths * r.den);
    }
    CHECK(ratio_from_decimal(-1).num == 0);
    CHECK(ratio_from_decimal(std::numeric_limits<double>::quiet_NaN()).num == 0);
    CHECK(ratio_from_decimal(1e300).num == 1000000000);
    for (uint64_t length = 37; length < 3000; ++length) {
        PaperBudget plan;
        REQUIRE(paper_budget({}, ratio_from_decimal(.2), length, ratio_from_decimal(.7), &plan) ==
                PaperFault::none);
        CHECK(plan.total == length * 4096 / 5);
        CHECK(plan.used + plan.unspent == plan.history);
        CHECK(10 * (plan.full_slots + 1) * 32768 > 3 * plan.history);
        CHECK(10 * (plan.quantised_slots + 1) * 8448 > 7 * plan.history);
        paper_spend_remainder(&plan);
        CHECK(plan.used <= plan.history);
        CHECK(plan.unspent < 8448);
    }
}

TEST_CASE("QEvict budget: the whole cache, and refusals by name") {
    PaperBudget plan;
    REQUIRE(paper_budget({}, {1, 1}, 4096 + 5, {0, 1}, &plan) == PaperFault::none);
    CHECK(37 + plan.full_slots * 8 == 4101);
    CHECK(plan.unspent == 0);

    PaperShape shape;
    PaperBudget untouched;
    untouched.total = 77;
    const auto fault = [&](const PaperShape &s, Ratio beta, uint64_t length, Ratio q) {
        const PaperFault f = paper_budget(s, beta, length, q, &untouched);
        CHECK(untouched.total == 77);
        return f;
    };
    shape.window = 6;
    CHECK(fault(shape, {1, 5}, 100, {7, 10}) == PaperFault::window_not_multiple_4);
    shape = {};
    shape.head_dim = 66;
    CHECK(fault(shape, {1, 5}, 100, {7, 10}) == PaperFault::head_dim_not_multiple_4);
    shape = {};
    shape.local = 33;
    CHECK(fault(shape, {1, 5}, 100, {7, 10}) == PaperFault::local_not_windows);
    shape = {};
    shape.kv_heads = 0;
    CHECK(fault(shape, {1, 5}, 100, {7, 10}) == PaperFault::empty_shape);
    CHECK(fault({}, {1, 0}, 100, {7, 10}) == PaperFault::zero_denominator);
    CHECK(fault({}, {1, 5}, 100, {11, 10}) == PaperFault::share_above_one);
    CHECK(fault({}, {1, 5}, UINT64_MAX / 2, {7, 10}) == PaperFault::too_large);
    CHECK(fault({}, {UINT64_MAX, 1}, 100000, {7, 10}) == PaperFault::too_large);

    CHECK(paper_local_from_share(870, {1, 10}, 8) == 88);
    CHECK(paper_local_from_share(880, {1, 10}, 8) == 88);
    CHECK(paper_local_from_share(881, {1, 10}, 8) == 96);
    CHECK(paper_local_from_share(3, {1, 10}, 8) == 8);
}

TEST_CASE("QEvict budget: the beta that fits physical bytes is the last one") {
    const auto worst = [](Ratio beta, uint64_t length) {
        PaperBudget plan;
        REQUIRE(paper_budget({}, beta, length, {7, 10}, &plan) == PaperFault::none);
        return paper_physical_bytes({}, plan, plan.full_slots, plan.quantised_slots, plan.full_slots, 7);
    };
    for (const uint64_t length : {1024u, 2048u, 4352u}) {
        const uint64_t limit = length * 4096 / 5;
        const Ratio beta = paper_beta_for_physical({}, length, {7, 10}, limit);
        const uint64_t millionths = beta.num * 1000000 / beta.den;
        CHECK(millionths > 100000);
        CHECK(worst(beta, length) <= limit);
        CHECK(worst({millionths + 1, 1000000}, length) > limit);
    }
    CHECK(paper_beta_for_physical({}, 4096, {7, 10}, 1000).num == 0);
}

TEST_CASE("QEvict scores: conversion") {
    CHECK(to_mass(1) == mass_one);
    CHECK(to_mass(0x1p-41) == 1);
    CHECK(to_mass(0x1p-42) == 0);
    CHECK(to_mass(-1) == 0);
    CHECK(to_mass(std::numeric_limits<double>::quiet_NaN()) == 0);
    CHECK(to_mass(std::numeric_limits<double>::infinity()) == mass_one << 20);
    CHECK(add_mass(mass_max - 1, 2) == mass_max);
    CHECK(mean_over_heads(9, 3) == 3);
    CHECK(mean_over_heads(10, 4) == 3);
    CHECK(mean_over_heads(9, 4) == 2);
    CHECK(decay_factor(16) == doctest::Approx(std::exp(-0.125) * 0x1p32).epsilon(1e-8));
    CHECK(decay_factor(128) == doctest::Approx(std::exp(-1.0) * 0x1p32).epsilon(1e-7));
    // A row of soft-max masses loses at most half a unit per segment.
    Random random(5);
    for (int round = 0; round < 100; ++round) {
        std::vector<double> row(1 + below(random, 2000));
        double sum = 0;
        for (double &m : row)
            sum += m = double(below(random, 1u << 30));
        int64_t whole = 0;
        for (const double m : row)
            whole += to_mass(sum > 0 ? m / sum : 0);
        if (sum > 0) CHECK(std::abs(from_mass(whole) - 1) < double(row.size()) * 0x1p-40);
    }
}

TEST_CASE("QEvict scores: every rule against its definition, and independent of chunks") {
    Random random(6);
    const ScoreRule rules[] = {ScoreRule::cumulative, ScoreRule::age_normalised, ScoreRule::decayed,
                               ScoreRule::last_queries, ScoreRule::worst_case};
    for (const ScoreRule rule : rules) {
        for (int round = 0; round < 60; ++round) {
            ScoreConfig config;
            config.rule = rule;
            config.period = 1 + uint32_t(below(random, 20));
            config.window = config.period * (1 + uint32_t(below(random, 4)));
            REQUIRE(score_config_valid(config));
            const ScorePlan plan = make_score_plan(config);
            const size_t periods = 1 + below(random, 12);
            std::vector<double> masses(periods * config.period);
            for (double &m : masses)
                m = double(below(random, 1000000)) / 1e6;

            std::vector<int64_t> serial(plan.words, 0), split(plan.words, 0);
            for (size_t k = 0; k < periods; ++k) {
                score_begin_period(plan, serial.data(), k);
                score_begin_period(plan, split.data(), k);
                std::vector<int64_t> parts(1 + below(random, 5), 0);
                std::vector<size_t> order(config.period);
                for (size_t i = 0; i < order.size(); ++i)
                    order[i] = k * config.period + i;
                for (const size_t t : order)
                    score_add(plan, serial.data(), k, to_mass(masses[t]));
                std::shuffle(order.begin(), order.end(), random);
                for (const size_t t : order) {
                    int64_t &part = parts[below(random, parts.size())];
                    part = score_combine(plan, part, to_mass(masses[t]));
                }
                for (const int64_t part : parts)
                    score_add(plan, split.data(), k, part);
            }
            CHECK(serial == split);

            const size_t n = masses.size(), from = n > config.window ? n - config.window : 0;
            double expected = 0, unit = 0x1p-40;
            for (size_t t = 0; t < n; ++t) {
                const double age = double((n - 1 - t) / config.period * config.period);
                switch (rule) {
                case ScoreRule::cumulative:
                    expected += masses[t];
                    break;
                case ScoreRule::age_normalised:
                    expected += masses[t] / double(n);
                    break;
                case ScoreRule::decayed:
                    expected += masses[t] * std::exp(-age / 128);
                    break;
                case ScoreRule::last_queries:
                    expected += t >= from ? masses[t] : 0;
                    break;
                case ScoreRule::worst_case:
                    expected = std::max(expected, t >= from ? masses[t] : 0);
                    break;
                }
            }
            if (rule == ScoreRule::age_normalised) unit = 0x1p-60;
            CHECK(double(score_rank(plan, serial.data(), n)) * unit ==
                  doctest::Approx(expected).epsilon(1e-7));
        }
    }
}

TEST_CASE("QEvict scores: state and limits") {
    CHECK(score_words({ScoreRule::cumulative, 16, 32}) == 1);
    CHECK(score_words({ScoreRule::age_normalised, 16, 32}) == 1);
    CHECK(score_words({ScoreRule::decayed, 16, 32}) == 1);
    CHECK(score_words({ScoreRule::last_queries, 16, 32}) == 2);
    CHECK(score_words({ScoreRule::worst_case, 16, 32}) == 2);
    CHECK(!score_config_valid({ScoreRule::last_queries, 16, 40}));
    CHECK(!score_config_valid({ScoreRule::cumulative, 0, 32}));
    CHECK(queries_able_to_see(10, 10) == 0);
    CHECK(queries_able_to_see(10, 25) == 15);

    const ScorePlan age = make_score_plan({ScoreRule::age_normalised, 16, 32});
    const int64_t words[1] = {mass_one};
    CHECK(score_rank(age, words, 0) == 0);
    CHECK(score_rank(age, words, 1) == int64_t(1) << 60);
    CHECK(score_rank(age, words, 3) == (int64_t(1) << 60) / 3);
    const int64_t top[1] = {mass_max};
    CHECK(score_rank(age, top, 1) == mass_max);
    // Two hundred thousand queries at one part in a million are still told from those at one more in 10^9.
    const int64_t close[2] = {to_mass(.2), to_mass(.2 * (1 + 1e-9))};
    CHECK(score_rank(age, close, 200000) < score_rank(age, close + 1, 200000));
}

TEST_CASE("QEvict codec: random groups within the bound, packing exact") {
    Random random(7);
    for (int round = 0; round < 4000; ++round) {
        const uint32_t bits = round % 2 == 0 ? 2 : 4;
        const GridType type = round % 4 < 2 ? GridType::f16 : GridType::bf16;
        const size_t count = (1 + below(random, 32)) * (8 / bits), stride = 1 + below(random, 3);
        std::vector<float> x(count * stride, 12345), out(count * stride, 54321);
        const float spread = std::ldexp(1.0f, int(below(random, 24)) - 14);
        const float centre = below(random, 3) == 0 ? 3 * spread : 0;
        std::normal_distribution<float> normal(centre, spread);
        for (size_t i = 0; i < count; ++i)
            x[i * stride] = f16_to_f32(f32_to_f16(normal(random)));
        std::vector<uint8_t> codes(count * bits / 8 + 1, 0xa5);
        const ChannelGrid grid = channel_encode_group(x.data(), stride, count, bits, type, codes.data());
        CHECK(codes.back() == 0xa5);
        channel_decode_group(codes.data(), count, bits, type, grid, out.data(), stride);
        const float bound = channel_error_bound(type, grid, bits);
        float worst = 0;
        for (size_t i = 0; i < count * stride; ++i) {
            if (i % stride != 0) {
                CHECK(out[i] == 54321);
            } else {
                worst = std::max(worst, std::abs(x[i] - out[i]));
            }
        }
        CHECK(worst <= bound);
    }
    // Numbers that lie on a grid come back as they were, for every code at every place of a byte.
    for (const uint32_t bits : {2u, 4u}) {
        const size_t top = (1u << bits) - 1, count = 64;
        std::vector<float> x(count), out(count);
        std::vector<uint8_t> codes(count * bits / 8);
        for (int round = 0; round < 200; ++round) {
            for (float &value : x)
                value = -1.5f + .25f * float(below(random, top + 1));
            x[below(random, 32)] = -1.5f;
            x[32 + below(random, 32)] = -1.5f + .25f * float(top);
            const ChannelGrid grid =
                channel_encode_group(x.data(), 1, count, bits, GridType::f16, codes.data());
            channel_decode_group(codes.data(), count, bits, GridType::f16, grid, out.data(), 1);
            CHECK(x == out);
            std::vector<uint8_t> again(codes.size());
            channel_encode_group(out.data(), 1, count, bits, GridType::f16, again.data());
            CHECK(again == codes);
        }
    }
}

TEST_CASE("QEvict codec: whatever comes in, finite numbers come out") {
    Random random(8);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const float big = std::numeric_limits<float>::max(), tiny = std::numeric_limits<float>::denorm_min();
    const float edges[] = {0,   -0.0f, 1,   -1,   65504, -65504, 65520,  70000, big,   -big,
                           inf, -inf,  nan, tiny, -tiny, 6e-8f,  1e-38f, 3e38f, -3e38f};
    for (int round = 0; round < 20000; ++round) {
        const GridType type = round % 2 == 0 ? GridType::f16 : GridType::bf16;
        const uint32_t bits = round % 4 < 2 ? 2 : 4;
        float x[8], out[8];
        for (float &value : x)
            value = edges[below(random, std::size(edges))];
        uint8_t codes[4];
        const ChannelGrid grid = channel_encode_group(x, 1, 8, bits, type, codes);
        channel_decode_group(codes, 8, bits, type, grid, out, 1);
        for (size_t i = 0; i < 8; ++i) {
            CHECK(std::isfinite(out[i]));
            const uint16_t half = type == GridType::f16 ? f32_to_f16(out[i]) : f32_to_bf16(out[i]);
            CHECK(std::isfinite(type == GridType::f16 ? f16_to_f32(half) : bf16_to_f32(half)));
        }
    }
    // The whole range of f32 on four levels: the step is two thirds of the largest number.
    const float wide[] = {-3e38f, 3e38f, -1e38f, 1e38f};
    float out[4];
    uint8_t codes[1];
    const ChannelGrid grid = channel_encode_group(wide, 1, 4, 2, GridType::bf16, codes);
    channel_decode_group(codes, 4, 2, GridType::bf16, grid, out, 1);
    for (size_t i = 0; i < 4; ++i)
        CHECK(out[i] == doctest::Approx(wide[i]).epsilon(.02));
}

TEST_CASE("QEvict codec: records of the published method and of KIVI") {
    Random random(9);
    std::normal_distribution<float> normal;
    struct Case {
        ChannelShape shape;
        size_t bytes;
    };
    ChannelShape paper;
    ChannelShape kivi{64, 32, 32, 2, GridType::f16};
    ChannelShape kivi4{64, 32, 32, 4, GridType::bf16};
    const Case cases[] = {{paper, 1056},
                          {kivi, 2 * 64 * 32 / 4 + 4 * 64 + 4 * 32 * 2},
                          {kivi4, 2 * 64 * 32 / 2 + 4 * 64 + 4 * 32 * 2}};
    for (const Case &c : cases) {
        REQUIRE(channel_supports(c.shape));
        const ChannelLayout layout = channel_layout(c.shape);
        CHECK(layout.bytes == c.bytes);
        const size_t d = c.shape.d, stride = d + 3, rows = c.shape.tokens;
        const size_t group = c.shape.value_group == 0 ? d : c.shape.value_group;
        std::vector<float> keys(rows * stride), values(rows * stride), k(rows * stride), v(rows * stride);
        for (float &x : keys)
            x = normal(random);
        for (float &x : values)
            x = normal(random);
        std::vector<uint8_t> record(layout.bytes + 8, 0x5a);
        channel_encode(c.shape, keys.data(), stride, values.data(), stride, record);
        for (size_t i = layout.bytes; i < record.size(); ++i)
            CHECK(record[i] == 0x5a);
        channel_decode_keys(c.shape, record, k.data(), stride);
        channel_decode_values(c.shape, record, v.data(), stride);
        // Against the definition, one group at a time.
        for (size_t ch = 0; ch < d; ++ch) {
            std::vector<float> x(rows), out(rows);
            std::vector<uint8_t> codes(rows * c.shape.bits / 8);
            for (size_t t = 0; t < rows; ++t)
                x[t] = keys[t * stride + ch];
            const ChannelGrid g =
                channel_encode_group(x.data(), 1, rows, c.shape.bits, c.shape.grid, codes.data());
            channel_decode_group(codes.data(), rows, c.shape.bits, c.shape.grid, g, out.data(), 1);
            for (size_t t = 0; t < rows; ++t)
                CHECK(k[t * stride + ch] == out[t]);
        }
        for (size_t t = 0; t < rows; ++t) {
            for (size_t begin = 0; begin < d; begin += group) {
                std::vector<float> out(group);
                std::vector<uint8_t> codes(group * c.shape.bits / 8);
                const ChannelGrid g = channel_encode_group(values.data() + t * stride + begin, 1, group,
                                                           c.shape.bits, c.shape.grid, codes.data());
                channel_decode_group(codes.data(), group, c.shape.bits, c.shape.grid, g, out.data(), 1);
                for (size_t i = 0; i < group; ++i)
                    CHECK(v[t * stride + begin + i] == out[i]);
            }
        }
    }
    CHECK(!channel_supports({128, 6, 0, 2, GridType::f16}));
    CHECK(!channel_supports({66, 8, 0, 2, GridType::f16}));
    CHECK(!channel_supports({128, 8, 48, 2, GridType::f16}));
    CHECK(!channel_supports({128, 8, 0, 3, GridType::f16}));
    CHECK(!channel_supports({0, 8, 0, 2, GridType::f16}));
}

TEST_CASE("QEvict rotary: pairings, partial rotation, definition") {
    Random random(10);
    std::normal_distribution<float> normal;
    constexpr uint32_t d = 20, dims = 12;
    float frequencies[dims / 2], table[dims], split[d], woven[d], source[d];
    for (size_t i = 0; i < dims / 2; ++i)
        frequencies[i] = float(std::pow(10000.0, -2.0 * double(i) / dims));
    const float factor = 1.25f;
    const RotaryGeometry halves{dims, RotaryPairing::half_split, factor, frequencies};
    const RotaryGeometry pairs{dims, RotaryPairing::interleaved, factor, frequencies};
    for (uint64_t position : {0u, 1u, 77u, 4000u}) {
        for (float &x : source)
            x = normal(random);
        std::copy(std::begin(source), std::end(source), split);
        for (size_t i = 0; i < dims / 2; ++i) {
            woven[2 * i] = source[i];
            woven[2 * i + 1] = source[i + dims / 2];
        }
        for (size_t i = dims; i < d; ++i)
            woven[i] = source[i];
        rotary_table(halves, position, table);
        rotary_rotate(halves, table, split);
        rotary_rotate(pairs, table, woven);
        for (size_t i = 0; i < dims / 2; ++i) {
            const double angle = double(position) * frequencies[i], c = std::cos(angle), s = std::sin(angle);
            const double x = source[i], y = source[i + dims / 2];
            CHECK(std::abs(split[i] - factor * (x * c - y * s)) < 2e-3);
            CHECK(std::abs(split[i + dims / 2] - factor * (x * s + y * c)) < 2e-3);
            CHECK(woven[2 * i] == split[i]);
            CHECK(woven[2 * i + 1] == split[i + dims / 2]);
        }
        for (size_t i = dims; i < d; ++i) {
            CHECK(split[i] == source[i]);
            CHECK(woven[i] == source[i]);
        }
        rotary_unrotate(halves, table, split);
        for (size_t i = 0; i < d; ++i)
            CHECK(std::abs(split[i] - source[i]) < 1e-5);
    }
    CHECK(!rotary_supports({11, RotaryPairing::half_split, 1, frequencies}, d));
    CHECK(!rotary_supports({24, RotaryPairing::half_split, 1, frequencies}, d));
    CHECK(!rotary_supports({12, RotaryPairing::half_split, 0, frequencies}, d));
    CHECK(!rotary_supports({12, RotaryPairing::half_split, 1, nullptr}, d));
}

TEST_CASE("QEvict diagnostics: the online estimate is exact for constant weights") {
    Random random(11);
    for (int round = 0; round < 200; ++round) {
        std::vector<double> weight;
        std::vector<bool> readable;
        FmmOnline online;
        size_t before = 0;
        for (int event = 0; event < 20; ++event) {
            for (size_t fresh = 1 + below(random, 4); fresh > 0; --fresh) {
                weight.push_back(double(1 + below(random, 1000)));
                readable.push_back(true);
            }
            double seen = 0, staying = 0, dropped = 0, young = 0, all = 0, missed = 0;
            for (size_t j = 0; j < weight.size(); ++j)
                seen += readable[j] ? weight[j] : 0;
            for (size_t j = 0; j < weight.size(); ++j) {
                all += weight[j];
                if (readable[j]) {
                    young += j >= before ? weight[j] : 0;
                    readable[j] = j + 1 == weight.size() || below(random, 6) != 0;
                    (readable[j] ? staying : dropped) += weight[j];
                }
                missed += readable[j] ? 0 : weight[j];
            }
            before = weight.size();
            const double estimate = fmm_online_event(&online, to_mass(staying / seen),
                                                     to_mass(dropped / seen), to_mass(young / seen));
            CHECK(estimate == doctest::Approx(missed / all).epsilon(1e-6));
        }
    }
    FmmOnline idle;
    CHECK(fmm_online_event(&idle, 0, 0, 0) == 0);
    CHECK(fmm_online_event(&idle, 0, mass_one, mass_one) > .999);
    CHECK(std::isfinite(fmm_online_event(&idle, mass_one, 0, 0)));
}

TEST_CASE("QEvict diagnostics: an episode needs its whole horizon inside the trace") {
    const auto eligible = [](std::vector<int8_t> events) {
        LirCount count;
        lir_add({4, 4, false}, events, &count);
        return count.eligible;
    };
    CHECK(eligible({0, 0, 0, 0, 1, 1, 1}) == 0);
    CHECK(eligible({0, 0, 0, 0, 1, 1, 1, 1}) == 1);
    CHECK(eligible({}) == 0);
    CHECK(eligible({-1, -1}) == 0);
}
