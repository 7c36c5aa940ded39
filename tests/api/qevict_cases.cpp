// The hand-checkable cases of QEvict (docs/design/qevict.md section 10) that need a whole cache: fidelity = paper through
// the C interface. The arithmetic ones are in tests/unit/qevict_cases.cpp under the same numbers.

#include "steering.hpp"

#include <set>

using namespace support;

namespace {

Setup paper(int kv_heads, int dim, uint32_t share_ppm, int64_t length, uint32_t quantised_ppm = 0) {
    Setup setup;
    setup.layers = layers_of(1, kv_heads, kv_heads, dim, dim);
    setup.layers[0].rotary_dims = dim;
    setup.policy.kind = SKERRY_POLICY_QEVICT;
    setup.policy.fidelity = SKERRY_FIDELITY_PAPER;
    setup.policy.quantised_share_ppm = quantised_ppm;
    setup.budget.share_ppm = share_ppm;
    setup.budget.length_tokens = length;
    return setup;
}

// Windows of 4 and k_fp = N_q = 2, as cases 18 to 23 want them.
Setup two_and_two(skerry_context *context, int kv_heads, int dim, uint32_t flags = 0) {
    Setup setup = paper(kv_heads, dim, 0, 1000);
    setup.policy.window_tokens = 4;
    setup.policy.sink_tokens = 4;
    setup.policy.recent_tokens = 4;
    setup.policy.flags = flags;
    setup.cache.staging_tokens = 64;
    for (uint32_t share = 10000; share < 60000; share += 500) {
        for (uint32_t quantised = 100000; quantised < 900000; quantised += 20000) {
            setup.budget.share_ppm = share;
            setup.policy.quantised_share_ppm = quantised;
            const skerry_plan_info plan = plan_of(context, setup);
            if (plan.full_windows == 2 && plan.quantised_windows == 2) return setup;
        }
    }
    FAIL("no budget holds two windows in each tier");
    return setup;
}

struct Tiers {
    std::set<int> full, quantised, evicted;
};

// Complete windows of 4 behind 4 sinks, below `count`.
Tiers tiers_of(skerry_cache *cache, skerry_seq seq, int head, int count) {
    Tiers tiers;
    for (int window = 0; window < count; ++window) {
        const skerry_range range = range_at(cache, seq, 0, head, 4 + window * 4);
        (range.tier == SKERRY_TIER_FULL        ? tiers.full
         : range.tier == SKERRY_TIER_QUANTISED ? tiers.quantised
                                               : tiers.evicted)
            .insert(window);
    }
    return tiers;
}

using Scores = std::map<int, double>;

// A run whose cumulative scores at each event are given by the case, divided by 16 so that masses stay below 1. The last
// step before an event and the event's own step give none, so that it does not matter which of them an event counts.
struct Routed {
    Setup setup;
    Cache cache;
    Runner runner;
    Stream stream;

    Routed(skerry_context *context, const Setup &from) : setup(from), cache(make_cache(context, setup)), runner(cache.get(), setup.layers) {
        stream = {make_seq(cache.get()), History(14), 0};
    }

    void give(int32_t count, int64_t first_row, int64_t rows, const Scores &scores) {
        const int64_t last_row = first_row + rows;
        steer(runner, stream, count, [=](int, int, int64_t row, int64_t position) {
            if (row < first_row || row >= last_row || position < 4 || (position - 4) % 4 != 1) return 0.0f;
            const auto found = scores.find(static_cast<int>((position - 4) / 4));
            return found == scores.end() ? 0.0f : static_cast<float>(found->second / 16 / static_cast<double>(rows));
        });
    }
    // Prompt of 30 tokens: at the first decoded token, windows 0 to 5 have left the local zone.
    void first_event(const Scores &scores) {
        give(30, 26, 3, scores);
        give(1, 0, 0, {});
    }
    void next_event(const Scores &added) {
        give(1, stream.length, 1, added);
        give(1, 0, 0, {});
        give(1, 0, 0, {});
        give(1, 0, 0, {}); // the event's own step
    }
    std::map<int, std::vector<float>> low_bytes(int head) {
        StepOptions look;
        look.attend = false;
        look.commit = false;
        REQUIRE_MESSAGE(runner.step({stream.next(1)}, look) == SKERRY_OK, runner.error.message);
        const Gathered low = gather(runner.open, setup.layers[0], 0, 0, head, SKERRY_TIERS_QUANTISED);
        skerry_step_abort(runner.open);
        std::map<int, std::vector<float>> bytes;
        const size_t dim = static_cast<size_t>(setup.layers[0].key_dim);
        for (size_t i = 0; i < low.positions.size(); ++i) {
            std::vector<float> &to = bytes[low.windows[i]];
            for (size_t c = 0; c < dim; ++c)
                to.push_back(low.keys[i * dim + c]);
            for (size_t c = 0; c < dim; ++c)
                to.push_back(low.values[i * dim + c]);
        }
        return bytes;
    }
};

const Scores event_one = {{0, 5}, {1, 1}, {2, 3}, {3, 3}, {4, .5}, {5, 2}};
const Scores to_event_two = {{0, .2}, {2, .1}, {3, .4}, {6, 3.2}};
const Scores to_event_three = {{0, .1}, {2, 2.9}, {3, .1}, {7, .1}};

std::vector<double> unrotate(const float *key, int64_t position, int dim) {
    std::vector<double> plain(static_cast<size_t>(dim));
    for (int c = 0; c < dim / 2; ++c) {
        const double frequency = static_cast<double>(std::pow(10000.0f, -2.0f * float(c) / float(dim)));
        const double angle = static_cast<double>(position) * frequency;
        const double x = static_cast<double>(key[c]), y = static_cast<double>(key[c + dim / 2]);
        plain[static_cast<size_t>(c)] = x * std::cos(angle) + y * std::sin(angle);
        plain[static_cast<size_t>(c + dim / 2)] = y * std::cos(angle) - x * std::sin(angle);
    }
    return plain;
}

} // namespace

TEST_CASE("QEvict case 02 and 03 (library): the plan holds the published slots") {
    const Context context = make_context();
    const auto check = [&](uint32_t share, int64_t length, int local, uint32_t q, int full, int quantised) {
        Setup setup = paper(8, 128, share, length, q);
        setup.policy.recent_tokens = local;
        const skerry_plan_info plan = plan_of(context.get(), setup);
        CAPTURE(length);
        CHECK(plan.full_windows == full);
        CHECK(plan.quantised_windows == quantised);
        CHECK(plan.key_format == SKERRY_FORMAT_C2);
        CHECK(plan.period_tokens == 8);
        return plan;
    };
    const skerry_plan_info plan = check(200000, 4352, 32, 700000, 31, 282);
    CHECK(plan.charged_bytes == 37 * 4096 + 3398144); // sinks and local, and the 3,398,144 of the case
    CHECK(plan.readable_tokens == 2541);
    CHECK(plan.budget_overrun_tokens == 0);
    check(200000, 4352, 32, 500000, 52, 201);
    check(200000, 4352, 32, 1, 104, 0); // q 0: the smallest share, since 0 asks for the default
    check(50000, 4352, 32, 700000, 6, 61);
    check(50000, 8320, 32, 700000, 14, 128);
    check(200000, 32128, 32, 700000, 239, 2168);
    check(100000, 642, 32, 700000, 1, 9);
    check(200000, 1024, 128, 700000, 2, 24);
}

TEST_CASE("QEvict case 04 (library): a budget below sinks and local is exceeded, and says by how much") {
    const Context context = make_context();
    Setup setup = paper(8, 128, 20000, 642, 700000);
    const skerry_plan_info plan = plan_of(context.get(), setup);
    CHECK(plan.full_windows == 0);
    CHECK(plan.quantised_windows == 0);
    CHECK(plan.budget_overrun_tokens == 25);
    setup.layers = layers_of(1, 1, 1, 16, 16);
    setup.layers[0].rotary_dims = 16;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    grow(runner, stream, 200);
    decode(runner, stream, 20);
    const skerry_seq_info info = info_of(cache.get(), stream.seq);
    CHECK(info.quantised_tokens == 0);
    CHECK(info.full_tokens >= 37 - 7);
    CHECK(info.full_tokens <= 37 + 7);
    check_cache(cache.get());
}

TEST_CASE("QEvict case 07 (library): at every length each token is in exactly one set (G1 loses some)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 1, 8, 8));
    setup.policy.window_tokens = 8;
    setup.policy.period_tokens = 8;
    setup.policy.score_queries = 32;
    setup.policy.sink_tokens = 4;
    setup.policy.recent_tokens = 330;
    setup.cache.max_step_tokens = 2794;
    setup.budget.length_tokens = 3306;
    setup.budget.share_ppm = 300000;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    StepOptions silent;
    silent.attend = false;
    while (stream.length < 2794) {
        const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
        grow(runner, stream, static_cast<int32_t>(std::min<int64_t>(event, 2794) - stream.length), silent);
    }
    for (; stream.length <= 2900; grow(runner, stream, 1, silent)) {
        int64_t end = 0;
        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0)) {
            REQUIRE(range.begin == end);
            end = range.end;
            if (range.begin >= stream.length - 330) CHECK(range.tier == SKERRY_TIER_FULL);
        }
        CHECK(end == stream.length);
        // Window 307 is 2460..2467; it is one range or part of an evicted run, never cut.
        const skerry_range window = range_at(cache.get(), stream.seq, 0, 0, 2460);
        CHECK((window.begin - 4) % 8 == 0);
        CHECK(window.end >= 2468);
        if (stream.length == 2802) {
            for (int64_t p = 2472; p <= 2479; ++p)
                CHECK(range_at(cache.get(), stream.seq, 0, 0, p).tier != SKERRY_TIER_EVICTED);
        }
    }
}

TEST_CASE("QEvict case 09 (library): the first event after a prompt of 4,096 tokens") {
    const Context context = make_context();
    Setup setup = paper(1, 128, 200000, 4352);
    setup.cache.max_step_tokens = 4096;
    setup.cache.staging_tokens = 4096;
    CHECK(plan_of(context.get(), setup).full_windows == 31);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    StepOptions silent;
    silent.attend = false;
    silent.flags = SKERRY_STEP_PREFILL;
    for (int i = 0; i < 8; ++i) {
        CHECK(info_of(cache.get(), stream.seq).full_tokens == 512 * i); // whole until then
        if (i == 7) silent.flags = 0;
        grow(runner, stream, 512, silent);
    }
    // Windows move at commits only, so that the event of decode step 0 runs when the prompt ends, its token counted in.
    CHECK(info_of(cache.get(), stream.seq).full_tokens == 5 + 31 * 8 + 27);
    CHECK(info_of(cache.get(), stream.seq).prefill_tokens == 4096);
    grow(runner, stream, 1, silent);
    const skerry_seq_info info = info_of(cache.get(), stream.seq);
    CHECK(info.full_tokens + info.quantised_tokens == 2537);
    CHECK(info.full_tokens == 5 + 31 * 8 + 28);
    CHECK(info.quantised_tokens == 282 * 8);
    CHECK(info.evicted_tokens == 195 * 8);
    CHECK(counters_of(cache.get()).evictions == 195);
    for (int64_t p = 4069; p <= 4096; ++p)
        CHECK(range_at(cache.get(), stream.seq, 0, 0, p).tier == SKERRY_TIER_FULL);
    for (int64_t p = 0; p < 5; ++p)
        CHECK(range_at(cache.get(), stream.seq, 0, 0, p).tier == SKERRY_TIER_FULL);
    CHECK(info.charged_bytes == static_cast<uint64_t>((5 + 31 * 8 + 28) * 512 + 282 * 1056));
}

TEST_CASE("QEvict case 09 (library): whether the event counts its own step's token decides about one window") {
    const Context context = make_context();
    for (bool evict_first : {false, true}) {
        CAPTURE(evict_first);
        Setup setup = two_and_two(context.get(), 1, 16, evict_first ? uint32_t(SKERRY_POLICY_EVICT_FIRST) : 0u);
        Routed run(context.get(), setup);
        run.give(32, 26, 3, event_one); // a prompt of whole windows: 4 + 7 * 4
        run.give(1, 0, 0, {});
        // 33 tokens: 8 windows, the last of one token is local. 32: 7 windows, window 6 is local.
        const Tiers tiers = tiers_of(run.cache.get(), run.stream.seq, 0, 7);
        CHECK((tiers.evicted.count(6) == 1 || tiers.quantised.count(6) == 1) == !evict_first);
    }
}

TEST_CASE("QEvict case 18, 19, 20, 22, 6, 8 (library): three events of the published routing") {
    const Context context = make_context();
    for (int kv_heads : {1, 8}) {
        CAPTURE(kv_heads);
        Routed run(context.get(), two_and_two(context.get(), kv_heads, kv_heads == 8 ? 128 : 16));
        const int head = kv_heads - 1;
        const uint64_t b_q = kv_heads == 8 ? 6272 : 16 * 4 / 2 + 4 * 16 + 4 * 4; // case 1: w 4
        skerry_cache *cache = run.cache.get();
        run.first_event(event_one);
        Tiers tiers = tiers_of(cache, run.stream.seq, head, 6);
        CHECK(tiers.full == std::set<int>{0, 2}); // 2 before 3: the lower id wins a tie
        CHECK(tiers.quantised == std::set<int>{3, 5});
        CHECK(tiers.evicted == std::set<int>{1, 4});
        const auto after_one = run.low_bytes(head);
        skerry_counters counters = counters_of(cache);
        CHECK(counters.demotions_written == 2u * static_cast<uint64_t>(kv_heads));
        const uint64_t written_one = counters.record_bytes_written;

        run.next_event(to_event_two);
        tiers = tiers_of(cache, run.stream.seq, head, 7);
        CHECK(tiers.full == std::set<int>{0, 3});
        CHECK(tiers.quantised == std::set<int>{2, 6});
        CHECK(tiers.evicted == std::set<int>{1, 4, 5});
        CHECK((range_at(cache, run.stream.seq, 0, head, 4 + 3 * 4).flags & SKERRY_RANGE_LEDGERED) != 0);
        CHECK((range_at(cache, run.stream.seq, 0, head, 4 + 3 * 4).flags & SKERRY_RANGE_RECOVERED) != 0);
        CHECK((range_at(cache, run.stream.seq, 0, head, 4 + 0 * 4).flags & SKERRY_RANGE_LEDGERED) == 0);
        const auto after_two = run.low_bytes(head);
        counters = counters_of(cache);
        CHECK(counters.demotions_written == 4u * static_cast<uint64_t>(kv_heads));
        CHECK(counters.promotions == static_cast<uint64_t>(kv_heads));
        // Case 6: one dormant entry per layer, held and not charged.
        const skerry_seq_info with_dormant = info_of(cache, run.stream.seq);
        CHECK(memory_of(cache).used_dormant_bytes >= b_q);
        CHECK(memory_of(cache).used_dormant_bytes < b_q + 64u * static_cast<uint64_t>(kv_heads));
        CHECK(with_dormant.used_bytes >= with_dormant.charged_bytes + b_q);

        run.next_event(to_event_three);
        tiers = tiers_of(cache, run.stream.seq, head, 8);
        CHECK(tiers.full == std::set<int>{0, 2});
        CHECK(tiers.quantised == std::set<int>{3, 6});
        CHECK(tiers.evicted == std::set<int>{1, 4, 5, 7});
        const auto after_three = run.low_bytes(head);
        CHECK(after_three.at(3) == after_one.at(3)); // the second stay reads as the first
        CHECK(after_three.at(6) == after_two.at(6));
        const uint64_t ledger = counters_of(cache).demotions_ledger;
        CHECK(ledger == static_cast<uint64_t>(kv_heads));
        CHECK(counters_of(cache).demotions_written == counters.demotions_written);
        CHECK(counters_of(cache).record_bytes_written == counters.record_bytes_written);
        CHECK(counters.record_bytes_written == 2 * written_one);

        // Case 22: what is gone stays gone, whatever comes later.
        for (int more = 0; more < 6; ++more) {
            run.next_event({{0, 1}, {8 + more, 2}});
            tiers = tiers_of(cache, run.stream.seq, head, 8);
            for (int gone : {1, 4, 5, 7})
                CHECK(tiers.evicted.count(gone) == 1);
        }
        check_cache(cache);
    }
}

TEST_CASE("QEvict case 08 (library): positions stay with a window through its moves, and attention with them") {
    const Context context = make_context();
    Routed run(context.get(), two_and_two(context.get(), 1, 16));
    run.first_event(event_one);
    run.next_event(to_event_two);
    run.next_event(to_event_three);
    run.next_event({{3, 9}}); // 3 is promoted a second time
    const Tiers tiers = tiers_of(run.cache.get(), run.stream.seq, 0, 8);
    CHECK(tiers.full.count(3) == 1);
    std::vector<Gathered> seen;
    StepOptions options;
    options.attend_flags = SKERRY_ATTEND_EXACT;
    options.before_attend = [&](skerry_step *step, int layer) { seen = gather_all(step, run.setup.layers[0], 0, layer); };
    const Part part = run.stream.next(1);
    grow(run.runner, run.stream, 1, options);
    for (size_t i = 1; i < seen[0].positions.size(); ++i)
        CHECK(seen[0].positions[i] > seen[0].positions[i - 1]);
    int members = 0;
    for (size_t i = 0; i < seen[0].positions.size(); ++i) {
        if (seen[0].windows[i] != 3) continue;
        ++members;
        CHECK(seen[0].positions[i] >= 16);
        CHECK(seen[0].positions[i] < 20);
    }
    CHECK(members == 4);
    CHECK(compare(run.runner, 0, seen, 0, part).out < 1e-4);
    // Any physical order gives the same: the oracle's sum, back to front.
    Gathered reversed = seen[0];
    std::reverse(reversed.positions.begin(), reversed.positions.end());
    for (size_t i = 0; i < seen[0].positions.size(); ++i) {
        const size_t from = seen[0].positions.size() - 1 - i;
        std::copy_n(seen[0].keys.begin() + static_cast<ptrdiff_t>(from * 16), 16, reversed.keys.begin() + static_cast<ptrdiff_t>(i * 16));
        std::copy_n(seen[0].values.begin() + static_cast<ptrdiff_t>(from * 16), 16,
                    reversed.values.begin() + static_cast<ptrdiff_t>(i * 16));
    }
    CHECK(compare(run.runner, 0, {reversed}, 0, part).out < 1e-4);
}

TEST_CASE("QEvict case 21 (library): one way, what is quantised may not rise") {
    const Context context = make_context();
    Routed run(context.get(), two_and_two(context.get(), 1, 16, SKERRY_POLICY_ONE_WAY));
    run.first_event(event_one);
    run.next_event(to_event_two); // 3 and 5 are barred: full goes to 0 and 6
    Tiers tiers = tiers_of(run.cache.get(), run.stream.seq, 0, 7);
    CHECK(tiers.full == std::set<int>{0, 6});
    CHECK(tiers.quantised == std::set<int>{2, 3});
    run.next_event(to_event_three); // 2 scores highest and may not rise
    tiers = tiers_of(run.cache.get(), run.stream.seq, 0, 8);
    CHECK(tiers.full == std::set<int>{0, 6});
    CHECK(tiers.quantised == std::set<int>{2, 3});
    CHECK(tiers.evicted.count(7) == 1);
    CHECK(counters_of(run.cache.get()).promotions == 0);
}

TEST_CASE("QEvict case 23 (library): a window that goes from local to quantised holds its source (G1: zeros)") {
    const Context context = make_context();
    constexpr int dim = 16;
    Routed run(context.get(), two_and_two(context.get(), 2, dim));
    run.first_event(event_one);
    run.next_event(to_event_two);
    CHECK(tiers_of(run.cache.get(), run.stream.seq, 1, 7).quantised.count(6) == 1);
    for (int head = 0; head < 2; ++head) {
        StepOptions look;
        look.attend = false;
        look.commit = false;
        REQUIRE(run.runner.step({run.stream.next(1)}, look) == SKERRY_OK);
        const Gathered low = gather(run.runner.open, run.setup.layers[0], 0, 0, head, SKERRY_TIERS_QUANTISED);
        skerry_step_abort(run.runner.open);
        const Gathered source =
            remember(run.stream.history, run.setup.layers[0], 0, head, run.stream.length, SKERRY_DTYPE_F32, SKERRY_DTYPE_F16);
        std::vector<std::vector<double>> plain, restored;
        int members = 0;
        for (size_t i = 0; i < low.positions.size(); ++i) {
            if (low.windows[i] != 6) continue;
            ++members;
            const size_t p = static_cast<size_t>(low.positions[i]);
            CHECK(p >= 28);
            plain.push_back(unrotate(source.keys.data() + p * dim, low.positions[i], dim));
            restored.push_back(unrotate(low.keys.data() + i * dim, low.positions[i], dim));
            double least = 1e30, most = -1e30;
            for (size_t c = 0; c < dim; ++c) {
                least = std::min(least, double(source.values[p * dim + c]));
                most = std::max(most, double(source.values[p * dim + c]));
            }
            for (size_t c = 0; c < dim; ++c) {
                const double error = std::fabs(double(low.values[i * dim + c]) - double(source.values[p * dim + c]));
                CHECK(error <= (most - least) / 6 * 1.01 + 4e-3);
            }
        }
        REQUIRE(members == 4);
        for (size_t c = 0; c < dim; ++c) {
            double least = 1e30, most = -1e30;
            for (const auto &row : plain) {
                least = std::min(least, row[c]);
                most = std::max(most, row[c]);
            }
            for (size_t t = 0; t < 4; ++t)
                CHECK(std::fabs(restored[t][c] - plain[t][c]) <= (most - least) / 6 * 1.01 + 8e-3);
        }
    }
}

TEST_CASE("QEvict case 24 (library): events at decode steps 0, 8 and 16") {
    const Context context = make_context();
    Setup setup = paper(1, 16, 300000, 300);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    StepOptions prompt;
    prompt.flags = SKERRY_STEP_PREFILL;
    grow(runner, stream, 100, prompt);
    CHECK(counters_of(cache.get()).events == 0);
    grow(runner, stream, 23);
    for (int step = 0; step < 20; ++step) {
        // Before the step attends, its event has run: with the commit before it.
        CHECK(counters_of(cache.get()).events == static_cast<uint64_t>(step / 8 + 1));
        decode(runner, stream, 1);
    }
    skerry_diagnostics diagnostics = make<skerry_diagnostics>();
    REQUIRE(skerry_seq_get_diagnostics(cache.get(), stream.seq, -1, &diagnostics, nullptr) == SKERRY_OK);
    CHECK(diagnostics.events == 3);
}

TEST_CASE("QEvict case 25 (library): masses of sinks and windows sum to one per query") {
    const Context context = make_context();
    Setup setup = paper(2, 32, 300000, 300);
    setup.layers[0].query_heads = 4;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    const Layer &shape = setup.layers[0];
    double sinks = 0, dropped = 0;
    int64_t queries = 0;
    for (int32_t count : {60, 37, 1, 1, 1, 1}) {
        std::vector<Gathered> seen;
        StepOptions options;
        options.attend_flags = SKERRY_ATTEND_EXACT;
        options.before_attend = [&](skerry_step *step, int layer) { seen = gather_all(step, shape, 0, layer); };
        if (count == 60) options.flags = SKERRY_STEP_PREFILL;
        double before = 0;
        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0))
            before += range.score;
        const Part part = stream.next(count);
        grow(runner, stream, count, options);
        double step_sinks = 0;
        for (int head = 0; head < shape.query_heads; ++head) {
            for (int32_t t = 0; t < count; ++t) {
                const float *query = runner.queries(0).data() + (t * shape.query_heads + head) * shape.key_dim;
                const Gathered &tokens = seen[static_cast<size_t>(head / 2)];
                const Attended row = attend(tokens, shape, query, part.begin + t);
                for (size_t i = 0; i < row.masses.size(); ++i) {
                    if (tokens.positions[i] < 5) step_sinks += row.masses[i] / shape.query_heads;
                }
            }
        }
        sinks += step_sinks;
        queries += count;
        double after = 0;
        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0))
            after += range.score;
        // A window that is dropped takes its score with it; nothing else may go missing.
        const double missing = static_cast<double>(queries) - sinks - dropped - after;
        if (counters_of(cache.get()).evictions == 0 || dropped > 0) {
            CHECK(std::fabs(missing) < 1e-5 * static_cast<double>(queries) + 1e-5);
        } else {
            CHECK(missing >= -1e-5);
            dropped = missing;
        }
    }
}

TEST_CASE("QEvict case 30 (library): a budget of 100 % with nothing quantised gives the bits of plain attention") {
    const Context context = make_context();
    Setup setup = paper(2, 32, 1000000, 300, 1);
    setup.layers[0].query_heads = 4;
    Setup plain = setup;
    plain.policy = make<skerry_policy_desc>();
    plain.policy.window_tokens = 8; // the same tiles, so that sums have the same order
    plain.policy.sink_tokens = 5;
    plain.budget = make<skerry_budget_desc>();
    const Cache a = make_cache(context.get(), setup), b = make_cache(context.get(), plain);
    Runner x(a.get(), setup.layers), y(b.get(), setup.layers);
    Stream s{make_seq(a.get()), History(1), 0}, t{make_seq(b.get()), History(1), 0};
    bool outs = true, lses = true;
    double distance = 0;
    for (int i = 0; i < 40; ++i) {
        grow(x, s, i == 0 ? 200 : 1);
        grow(y, t, i == 0 ? 200 : 1);
        outs = outs && x.outs == y.outs;
        lses = lses && x.lses == y.lses;
        for (size_t k = 0; k < x.outs[0].size(); ++k)
            distance = std::max(distance, std::fabs(double(x.outs[0][k]) - double(y.outs[0][k])));
    }
    CHECK(outs);
    CHECK(lses);
    CHECK(distance < 1e-5);
    CHECK(info_of(a.get(), s.seq).full_tokens == info_of(b.get(), t.seq).full_tokens);
}
