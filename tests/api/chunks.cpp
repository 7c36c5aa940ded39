// Results depend on the tokens alone: not on how a prompt is cut into steps, on neighbours, on workers, or on what
// ran before. Everything here is compared bit by bit.
// Holds G5, G19, P039, P043, P053, P132, P134.

#include "oracle.hpp"

using namespace support;

namespace {

struct Result {
    uint64_t fingerprint = 0;
    std::vector<std::vector<float>> outs, lses; // per layer, all rows
    skerry_seq_info info{};
    skerry_counters counters{};
};

// Runs one sequence cut into `cuts`; with `decode` single tokens after them.
Result run(skerry_context *context, Setup setup, const std::vector<int32_t> &cuts, int decode_tokens, bool prefill_flag = false) {
    const Cache cache = make_cache(context, setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(21), 0};
    Result result;
    result.outs.resize(setup.layers.size());
    result.lses.resize(setup.layers.size());
    const auto keep = [&] {
        for (size_t layer = 0; layer < setup.layers.size(); ++layer) {
            result.outs[layer].insert(result.outs[layer].end(), runner.outs[layer].begin(), runner.outs[layer].end());
            result.lses[layer].insert(result.lses[layer].end(), runner.lses[layer].begin(), runner.lses[layer].end());
        }
    };
    for (size_t i = 0; i < cuts.size(); ++i) {
        StepOptions options;
        if (prefill_flag && i + 1 < cuts.size()) options.flags = SKERRY_STEP_PREFILL;
        grow(runner, stream, cuts[i], options);
        keep();
    }
    for (int i = 0; i < decode_tokens; ++i) {
        grow(runner, stream, 1);
        keep();
    }
    check_cache(cache.get());
    result.fingerprint = fingerprint_of(cache.get(), stream.seq);
    result.info = info_of(cache.get(), stream.seq);
    result.counters = counters_of(cache.get());
    return result;
}

std::vector<int32_t> random_cuts(Rng &rng, int32_t total, int32_t most) {
    std::vector<int32_t> cuts;
    while (total > 0) {
        const int32_t count = static_cast<int32_t>(rng.between(1, std::min(most, total)));
        cuts.push_back(count);
        total -= count;
    }
    return cuts;
}

void check_equal(const Result &a, const Result &b) {
    CHECK(a.fingerprint == b.fingerprint);
    bool outs = true, lses = true;
    for (size_t layer = 0; layer < a.outs.size(); ++layer) {
        outs = outs && a.outs[layer].size() == b.outs[layer].size() &&
               same_bytes(a.outs[layer].data(), b.outs[layer].data(), a.outs[layer].size() * sizeof(float));
        lses = lses && same_bytes(a.lses[layer].data(), b.lses[layer].data(), a.lses[layer].size() * sizeof(float));
    }
    CHECK(outs);
    CHECK(lses);
    CHECK(a.info.length_tokens == b.info.length_tokens);
    CHECK(a.info.full_tokens == b.info.full_tokens);
    CHECK(a.info.quantised_tokens == b.info.quantised_tokens);
    CHECK(a.info.used_bytes == b.info.used_bytes);
    CHECK(a.info.host_tokens == b.info.host_tokens);
    CHECK(a.info.host_bytes == b.info.host_bytes);
    CHECK(a.counters.events == b.counters.events);
    CHECK(a.counters.demotions == b.counters.demotions);
    CHECK(a.counters.promotions == b.counters.promotions);
    CHECK(a.counters.evictions == b.counters.evictions);
    CHECK(a.counters.record_bytes_written == b.counters.record_bytes_written);
    CHECK(a.counters.details_written == b.counters.details_written);
    CHECK(a.counters.detail_bytes_written == b.counters.detail_bytes_written);
    CHECK(a.counters.details_refused == b.counters.details_refused);
    CHECK(a.counters.zooms == b.counters.zooms);
}

std::vector<Layer> mixed_layers() {
    std::vector<Layer> layers = layers_of(2, 2, 4, 32, 16);
    layers[1].window = 96;
    return layers;
}

void limit(skerry_context *context, Setup &setup, double share, int64_t length) {
    if (setup.policy.kind == SKERRY_POLICY_FULL || setup.policy.kind == SKERRY_POLICY_STREAMING) return;
    setup.budget.length_tokens = length;
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = std::max(full_cache_bytes(context, setup), minimum);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full - minimum));
}

} // namespace

TEST_CASE("chunks: 2,048 tokens in one step, in 128 steps of 16, and cut at random") {
    const Context context = make_context();
    Setup setup;
    setup.layers = layers_of(2, 2, 4, 32, 32);
    setup.policy.kind = SKERRY_POLICY_QEVICT; // the production defaults
    setup.cache.max_step_tokens = 2048;
    limit(context.get(), setup, 0.2, 2200);
    Rng rng(1);
    const Result whole = run(context.get(), setup, {2048}, 20);
    check_equal(whole, run(context.get(), setup, std::vector<int32_t>(128, 16), 20));
    check_equal(whole, run(context.get(), setup, random_cuts(rng, 2048, 300), 20));
    CHECK(whole.counters.evictions + whole.counters.demotions > 100);
}

TEST_CASE("chunks: every policy and score, split at each period") {
    const Context context = make_context();
    Rng rng(2);
    for (skerry_policy_kind kind = SKERRY_POLICY_FULL; kind <= SKERRY_POLICY_SEKV; ++kind) {
        for (int score = SKERRY_SCORE_CUMULATIVE; score <= SKERRY_SCORE_WORST; ++score) {
            if (score > SKERRY_SCORE_CUMULATIVE && kind < SKERRY_POLICY_EVICT) continue;
            CAPTURE(kind);
            CAPTURE(score);
            Setup setup = small_setup(kind, mixed_layers());
            setup.cache.max_step_tokens = 300;
            if (kind >= SKERRY_POLICY_EVICT) setup.policy.score = score;
            limit(context.get(), setup, 0.3, 340);
            const Result whole = run(context.get(), setup, {300}, 9);
            check_equal(whole, run(context.get(), setup, std::vector<int32_t>(300, 1), 9));
            check_equal(whole, run(context.get(), setup, random_cuts(rng, 300, 40), 9));
            check_equal(whole, run(context.get(), setup, random_cuts(rng, 300, 170), 9));
        }
    }
}

TEST_CASE("chunks: odd windows, periods, formats and exact copies") {
    const Context context = make_context();
    Rng rng(3);
    for (int turn = 0; turn < 6; ++turn) {
        CAPTURE(turn);
        Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 2, 2, 40, 24));
        setup.cache.max_step_tokens = 200;
        setup.cache.store_dtype = turn % 2 == 0 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_BF16;
        setup.policy.window_tokens = static_cast<int32_t>(rng.between(1, 20));
        setup.policy.period_tokens = static_cast<int32_t>(rng.between(1, 20));
        setup.policy.recent_tokens = static_cast<int32_t>(rng.between(1, 20));
        setup.policy.sink_tokens = static_cast<int32_t>(rng.between(1, 7));
        setup.policy.score_queries = setup.policy.period_tokens * 2;
        if (turn >= 3) {
            setup.policy.flags = SKERRY_POLICY_KEEP_EXACT;
            setup.budget.exact_bytes = 20000;
        }
        if (turn == 5) setup.policy.full_format = SKERRY_FORMAT_R8;
        limit(context.get(), setup, 0.35, 230);
        const Result whole = run(context.get(), setup, {200}, 17);
        check_equal(whole, run(context.get(), setup, std::vector<int32_t>(200, 1), 17));
        check_equal(whole, run(context.get(), setup, random_cuts(rng, 200, 30), 17));
    }
}

TEST_CASE("chunks: a whole prompt is collected and compacted once, however it is cut") {
    const Context context = make_context();
    Rng rng(4);
    for (skerry_policy_kind kind :
         {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT, SKERRY_POLICY_SEKV}) {
        CAPTURE(kind);
        Setup setup = small_setup(kind, layers_of(2, 2, 4, 32, 16));
        setup.policy.prefill = SKERRY_PREFILL_WHOLE;
        setup.cache.max_step_tokens = 300;
        setup.cache.staging_tokens = 300;
        limit(context.get(), setup, 0.3, 340);
        const Result whole = run(context.get(), setup, {300}, 30, true);
        check_equal(whole, run(context.get(), setup, std::vector<int32_t>(300, 1), 30, true));
        check_equal(whole, run(context.get(), setup, random_cuts(rng, 300, 90), 30, true));
        CHECK(whole.info.quantised_tokens + whole.info.evicted_tokens + whole.info.host_tokens > 0);
    }
}

TEST_CASE("chunks: while a whole prompt is read, nothing has moved and attention sees every token (P050)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 2, 16, 16));
    setup.policy.prefill = SKERRY_PREFILL_WHOLE;
    setup.cache.staging_tokens = 200;
    limit(context.get(), setup, 0.3, 260);
    Setup plain = small_setup(SKERRY_POLICY_FULL, setup.layers);
    const Cache cache = make_cache(context.get(), setup), full = make_cache(context.get(), plain);
    Runner runner(cache.get(), setup.layers), expected(full.get(), setup.layers);
    Stream a{make_seq(cache.get()), History(2), 0}, b{make_seq(full.get()), History(2), 0};
    StepOptions prompt;
    prompt.flags = SKERRY_STEP_PREFILL;
    for (int i = 0; i < 8; ++i) {
        grow(runner, a, 20, prompt);
        grow(expected, b, 20);
        const skerry_seq_info info = info_of(cache.get(), a.seq);
        CHECK((info.flags & SKERRY_SEQ_PREFILLING) != 0);
        CHECK(info.prefill_tokens == -1);
        CHECK(info.full_tokens == a.length);
        double distance = 0;
        for (size_t k = 0; k < runner.outs[0].size(); ++k) {
            distance = std::max(distance, std::fabs(double(runner.outs[0][k]) - double(expected.outs[0][k])));
        }
        CHECK(distance < 1e-4);
    }
    grow(runner, a, 3); // the first step without the flag is the prompt's last
    const skerry_seq_info info = info_of(cache.get(), a.seq);
    CHECK((info.flags & SKERRY_SEQ_PREFILLING) == 0);
    CHECK(info.prefill_tokens == 163);
    CHECK(info.quantised_tokens > 0);
    const skerry_memory_info memory = memory_of(cache.get());
    CHECK(memory.pool_bytes + memory.table_bytes <= setup.budget.bytes);

    // A prompt longer than what was declared is refused at its step, and the sequence is as before.
    REQUIRE(skerry_seq_drop(cache.get(), a.seq, nullptr) == SKERRY_OK);
    Stream c{make_seq(cache.get()), History(3), 0};
    for (int i = 0; i < 10; ++i)
        grow(runner, c, 20, prompt);
    int more = 0;
    for (; more < 400; ++more) {
        const State before = state_of(cache.get(), {c.seq});
        const skerry_status status = runner.step({c.next(1)}, prompt);
        if (status == SKERRY_OK) {
            ++c.length;
            continue;
        }
        const bool over = status == SKERRY_ERROR_OVER_BUDGET || status == SKERRY_ERROR_ARGUMENT;
        CHECK(over);
        check_same(before, state_of(cache.get(), {c.seq}));
        break;
    }
    CHECK(more < 400); // free slots of the budget may hold some more than what was declared
}

TEST_CASE("workers: 0, 1 and 3 of them and a host's own give the same bits") {
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 4, 8, 32, 16));
    setup.cache.max_step_tokens = 256;
    const Context alone = make_context(0u);
    limit(alone.get(), setup, 0.3, 400);
    Rng rng(7);
    const std::vector<int32_t> cuts = random_cuts(rng, 400, 100);
    const Result reference = run(alone.get(), setup, cuts, 20);
    for (uint32_t workers : {1u, 3u}) {
        const Context context = make_context(workers);
        check_equal(reference, run(context.get(), setup, cuts, 20));
    }
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.parallel_for = [](void *, skerry_task_fn task_fn, void *task, int32_t count) -> int32_t {
        for (int32_t i = count - 1; i >= 0; --i)
            task_fn(task, i); // backwards
        return 0;
    };
    const Context hosted = make_context(&desc);
    check_equal(reference, run(hosted.get(), setup, cuts, 20));
    check_equal(reference, run(alone.get(), setup, cuts, 20)); // P132: the same again
}

TEST_CASE("neighbours: a sequence in a ragged batch gets the bits that it gets alone") {
    const Context context = make_context();
    for (skerry_policy_kind kind : {SKERRY_POLICY_FULL, SKERRY_POLICY_EVICT, SKERRY_POLICY_QEVICT, SKERRY_POLICY_SEKV}) {
        CAPTURE(kind);
        Setup setup = small_setup(kind, mixed_layers());
        setup.cache.max_sequences = 4;
        setup.cache.max_step_tokens = 64;
        limit(context.get(), setup, 0.3, 200);
        const Cache crowd = make_cache(context.get(), setup), quiet = make_cache(context.get(), setup);
        Runner together(crowd.get(), setup.layers), alone(quiet.get(), setup.layers);
        std::vector<Stream> streams, twins;
        for (uint64_t i = 0; i < 4; ++i) {
            streams.push_back({make_seq(crowd.get()), History(30 + i), 0});
            twins.push_back({make_seq(quiet.get()), History(30 + i), 0});
        }
        Rng rng(3);
        for (int round = 0; round < 60; ++round) {
            std::vector<Part> parts;
            std::vector<size_t> who;
            for (size_t i = 0; i < 4; ++i) {
                if (rng.one_in(4)) continue;
                parts.push_back(streams[i].next(static_cast<int32_t>(round < 8 ? rng.between(1, 64) : 1)));
                who.push_back(i);
            }
            if (parts.empty()) continue;
            if (rng.one_in(2)) {
                std::reverse(parts.begin(), parts.end());
                std::reverse(who.begin(), who.end());
            }
            REQUIRE_MESSAGE(together.step(parts) == SKERRY_OK, together.error.message);
            size_t row = 0;
            for (size_t k = 0; k < parts.size(); ++k) {
                Stream &twin = twins[who[k]];
                const size_t count = static_cast<size_t>(parts[k].count);
                grow(alone, twin, parts[k].count);
                bool equal = true;
                for (size_t layer = 0; layer < setup.layers.size(); ++layer) {
                    const size_t width = static_cast<size_t>(setup.layers[layer].query_heads * setup.layers[layer].value_dim);
                    equal = equal &&
                            same_bytes(together.outs[layer].data() + row * width, alone.outs[layer].data(), count * width * sizeof(float));
                }
                CHECK(equal);
                streams[who[k]].length += parts[k].count;
                row += count;
            }
        }
        for (size_t i = 0; i < 4; ++i) {
            CHECK(fingerprint_of(crowd.get(), streams[i].seq) == fingerprint_of(quiet.get(), twins[i].seq));
        }
        check_cache(crowd.get());
    }
}
