// What the library says about its own choices, against the same numbers taken from its tables and from double precision.
// Holds P017, P140, P155.

#include "steering.hpp"

#include <set>

using namespace support;

namespace {

skerry_diagnostics diagnostics_of(skerry_cache *cache, skerry_seq seq, int layer) {
    skerry_diagnostics info = make<skerry_diagnostics>();
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_seq_get_diagnostics(cache, seq, layer, &info, &error) == SKERRY_OK, error.message);
    return info;
}

Setup limited(skerry_context *context, skerry_policy_kind kind, double share) {
    Setup setup = small_setup(kind, layers_of(2, 2, 4, 32, 16));
    setup.budget.length_tokens = 300;
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = plan_of(context, setup).full_cache_bytes;
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full));
    return setup;
}

} // namespace

TEST_CASE("diagnostics: an empty sequence and one without events have nothing to say") {
    const Context context = make_context();
    for (skerry_policy_kind kind = SKERRY_POLICY_FULL; kind <= SKERRY_POLICY_QEVICT; ++kind) {
        Setup setup = small_setup(kind, layers_of(2, 2, 4, 32, 16)); // P155: every kind of layer answers
        setup.layers[1].window = 20;
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(1), 0};
        for (int length : {0, 5}) {
            if (length > 0) grow(runner, stream, length);
            for (int layer : {-1, 0, 1}) {
                const skerry_diagnostics info = diagnostics_of(cache.get(), stream.seq, layer);
                CHECK(info.events == 0);
                CHECK(info.churn == 0);
                CHECK(info.missed_mass == 0);
                CHECK(info.lir == 0);
                CHECK(info.quantised_mass == 0);
            }
        }
        grow(runner, stream, 100);
        const skerry_diagnostics info = diagnostics_of(cache.get(), stream.seq, -1);
        CHECK((info.events > 0) == (kind != SKERRY_POLICY_FULL));
        CHECK(info.churn >= 0);
        CHECK(info.churn <= 1);
        CHECK(info.missed_mass >= 0);
        CHECK(info.missed_mass <= 1);
    }
}

TEST_CASE("diagnostics: mass on quantised windows is what attention gave them") {
    const Context context = make_context();
    for (skerry_policy_kind kind : {SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT}) {
        Setup setup = limited(context.get(), kind, 0.2);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(6), 0};
        double low[2] = {0, 0};
        StepOptions options;
        options.attend_flags = SKERRY_ATTEND_EXACT;
        options.after_attend = [&](skerry_step *step, int layer) {
            const Layer &shape = setup.layers[static_cast<size_t>(layer)];
            for (int head = 0; head < shape.query_heads; ++head) {
                const Gathered all = gather(step, shape, 0, layer, head / shape.group());
                const Gathered records = gather(step, shape, 0, layer, head / shape.group(), SKERRY_TIERS_QUANTISED);
                const std::set<int64_t> positions(records.positions.begin(), records.positions.end());
                const float *query = runner.queries(layer).data() + head * shape.key_dim;
                const Attended row = attend(all, shape, query, stream.length);
                for (size_t i = 0; i < row.masses.size(); ++i) {
                    if (positions.count(all.positions[i]) != 0) low[layer] += row.masses[i] / shape.query_heads;
                }
            }
        };
        decode(runner, stream, 150, options);
        CHECK(low[0] > 1);
        for (int layer = 0; layer < 2; ++layer) {
            const double wanted = low[layer] / static_cast<double>(stream.length);
            CHECK(diagnostics_of(cache.get(), stream.seq, layer).quantised_mass == doctest::Approx(wanted).epsilon(1e-3));
        }
        const double both = (low[0] + low[1]) / 2 / static_cast<double>(stream.length);
        CHECK(diagnostics_of(cache.get(), stream.seq, -1).quantised_mass == doctest::Approx(both).epsilon(1e-3));
    }
}

TEST_CASE("diagnostics: churn and returns are those of the windows in the tables") {
    const Context context = make_context();
    Setup setup = limited(context.get(), SKERRY_POLICY_QEVICT, 0.12);
    setup.policy.flags = SKERRY_POLICY_KEEP_EXACT;
    setup.policy.quantised_share_ppm = 500000;
    setup.policy.full_format = SKERRY_FORMAT_F32;
    setup.policy.hysteresis_ppm = 1000000;
    setup.policy.max_moves_ppm = 1000000;
    setup.policy.score_queries = 4;
    setup.budget.exact_bytes = 200000;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(6), 0};
    uint64_t events = 0, eligible = 0, rescued = 0;
    double churn = 0;
    int newest = 0;                                        // windows below had left the recent region at the event before
    std::map<std::pair<int, int>, std::set<int>> readable; // (layer, head)
    std::map<std::tuple<int, int, int>, int> outside;      // events in a row outside the full tier
    while (stream.length < 290) {
        // Favours some old windows for a while, then others.
        const int64_t phase = stream.length / 24;
        steer(runner, stream, 1, [=](int, int head, int64_t, int64_t position) {
            const int64_t window = position < 2 ? -1 : (position - 2) / 4;
            return window >= 0 && (window + head) % 6 == phase % 6 ? 0.03f : 0.0002f;
        });
        if (stream.length <= 2 || (stream.length - 2) % 4 != 0) continue;
        ++events;
        double change = 0;
        const int left = static_cast<int>(std::max<int64_t>(0, stream.length - 2 - 4) / 4); // have left the recent region
        for (int layer = 0; layer < 2; ++layer) {
            double lost = 0, joined = 0, before = 0;
            for (int head = 0; head < 2; ++head) {
                std::set<int> now;
                for (const skerry_range &range : ranges_of(cache.get(), stream.seq, layer, head)) {
                    const int window = static_cast<int>((range.begin - 2) / 4);
                    if (range.begin < 2 || window >= left || range.tier == SKERRY_TIER_EVICTED) continue;
                    now.insert(window);
                    int &run = outside[{layer, head, window}];
                    if (range.tier == SKERRY_TIER_FULL) {
                        // m = 4, h = 8: a return after 4 to 11 events is a rescue.
                        if (run >= 4 && run < 12) {
                            ++eligible;
                            ++rescued;
                        }
                        run = 0;
                    } else if (++run == 12) {
                        ++eligible;
                    }
                }
                std::set<int> &old = readable[{layer, head}];
                before += static_cast<double>(old.size());
                for (int window : old) {
                    if (now.count(window) != 0) continue;
                    ++lost;
                    // Evicted: an episode that nothing can end, unless it was counted already.
                    eligible += outside[{layer, head, window}] < 12;
                }
                // Those that left the recent region and went at once.
                for (int window = newest; window < left; ++window)
                    eligible += now.count(window) == 0;
                for (int window : now)
                    joined += old.count(window) == 0;
                old = now;
            }
            if (events > 1 && before + joined > 0) change += (lost + joined) / (before + joined) / 2;
        }
        newest = left;
        churn += change;
    }
    const skerry_diagnostics info = diagnostics_of(cache.get(), stream.seq, -1);
    CHECK(info.events == events);
    CHECK(info.churn == doctest::Approx(churn / static_cast<double>(events - 1)).epsilon(1e-9));
    CHECK(info.lir_eligible == eligible);
    CHECK(info.lir_rescued == rescued);
    CHECK(rescued > 0);
    CHECK(eligible > rescued);
    CHECK(info.lir == doctest::Approx(static_cast<double>(rescued) / static_cast<double>(eligible)));
}

TEST_CASE("diagnostics: nothing evicted, nothing missed; something evicted, something missed") {
    const Context context = make_context();
    Setup free = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 2, 32, 16));
    Setup tight = limited(context.get(), SKERRY_POLICY_EVICT, 0.05);
    for (Setup *setup : {&free, &tight}) {
        const Cache cache = make_cache(context.get(), *setup);
        Runner runner(cache.get(), setup->layers);
        Stream stream{make_seq(cache.get()), History(6), 0};
        decode(runner, stream, 150);
        const double missed = diagnostics_of(cache.get(), stream.seq, -1).missed_mass;
        CHECK((missed > 0) == (setup == &tight));
        CHECK(missed < 1);
    }
}

TEST_CASE("surprisal: its statistics are kept for committed tokens") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(1, 1, 1, 8, 8));
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(6), 0};
    std::vector<double> told;
    Rng rng(3);
    for (int round = 0; round < 30; ++round) {
        const int32_t count = static_cast<int32_t>(rng.between(1, 9));
        std::vector<float> nats;
        for (int i = 0; i < count; ++i)
            nats.push_back(static_cast<float>(rng.below(4000)) / 300.0f);
        StepOptions open;
        open.commit = false;
        grow(runner, stream, count, open);
        const bool hand_over = !rng.one_in(3), commit = !rng.one_in(3);
        if (hand_over) REQUIRE(skerry_step_surprisal(runner.open, 0, nats.data(), count, nullptr) == SKERRY_OK);
        if (commit) {
            REQUIRE(skerry_step_commit(runner.open, nullptr) == SKERRY_OK);
            stream.length += count;
            if (hand_over) told.insert(told.end(), nats.begin(), nats.end());
        } else {
            skerry_step_abort(runner.open);
        }
        double mean = 0, variance = 0;
        for (double x : told)
            mean += x / static_cast<double>(told.size());
        for (double x : told)
            variance += (x - mean) * (x - mean) / static_cast<double>(told.size());
        const skerry_seq_info info = info_of(cache.get(), stream.seq);
        CHECK(info.surprisal_tokens == static_cast<int64_t>(told.size()));
        CHECK(info.surprisal_mean == doctest::Approx(mean).epsilon(1e-6));
        CHECK(info.surprisal_variance == doctest::Approx(variance).epsilon(1e-6));
    }
    CHECK(told.size() > 20);
}
