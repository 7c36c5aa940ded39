// Bytes: what is planned, allocated and reported is one number; budgets hold at every moment; the ledger writes once.
// Holds G3, G8, G11, G17, G18, P051, P053, P055, P056, P061, P103, P111-P115, P120-P126, P139, P140.

#include "steering.hpp"

using namespace support;

namespace {

constexpr skerry_policy_kind all_kinds[] = {SKERRY_POLICY_FULL,     SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT,
                                            SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT,    SKERRY_POLICY_SEKV};

struct Hosted {
    Allocator host;
    Context context;
    Hosted() {
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.allocator = host.hooks();
        context = make_context(&desc);
    }
    uint64_t cache_bytes() const {
        skerry_context_bytes bytes{};
        REQUIRE(skerry_context_get_bytes(context.get(), &bytes, nullptr) == SKERRY_OK);
        CHECK(bytes.context_bytes + bytes.cache_bytes == host.live_bytes());
        CHECK(bytes.object_count == host.live_count());
        return bytes.cache_bytes;
    }
};

Setup bounded(skerry_context *context, skerry_policy_kind kind, double share, int sequences = 1, int64_t length = 200) {
    Setup setup = small_setup(kind, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_sequences = sequences;
    setup.budget.length_tokens = length;
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = std::max(full_cache_bytes(context, setup), 2 * minimum);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full - minimum));
    return setup;
}

void check_sums(const skerry_memory_info &m) {
    CHECK(m.allocated_bytes == m.pool_bytes + m.table_bytes + m.staging_bytes + m.exact_bytes + m.host_bytes + m.fixed_bytes);
    CHECK(m.used_host_bytes <= m.host_bytes);
    CHECK(m.used_zoom_bytes <= m.pool_bytes + m.staging_bytes);
    CHECK(m.peak_bytes >= m.allocated_bytes);
    CHECK(m.used_full_bytes + m.used_quantised_bytes + m.used_dormant_bytes <= m.used_bytes);
    CHECK(m.used_exact_bytes <= m.exact_bytes);
    if (m.budget_bytes != UINT64_MAX) CHECK(m.pool_bytes + m.table_bytes <= m.budget_bytes);
}

void check_pairs(const skerry_counters &c) {
    CHECK(c.demotions == c.demotions_written + c.demotions_ledger);
    CHECK(c.promotions == c.promotions_exact + c.promotions_recovered);
    CHECK(c.zooms == c.zooms_present + c.zooms_fetched + c.zooms_late);
    CHECK(c.steps_begun == c.steps_committed + c.steps_aborted);
}

} // namespace

TEST_CASE("plan, creation and report are one arithmetic (G17, P036, P114, P122, P139)") {
    Hosted hosted;
    for (skerry_policy_kind kind : all_kinds) {
        for (double share : {0.0, 0.2, 0.7, 3.0}) {
            for (int exact : {0, 1}) {
                if ((kind == SKERRY_POLICY_FULL || kind == SKERRY_POLICY_STREAMING || kind == SKERRY_POLICY_SEKV) && exact) continue;
                CAPTURE(kind);
                CAPTURE(share);
                CAPTURE(exact);
                Setup setup = bounded(hosted.context.get(), kind, share, 2);
                if (exact) {
                    setup.policy.flags |= SKERRY_POLICY_KEEP_EXACT;
                    setup.budget.exact_bytes = 30000;
                    setup.budget.bytes += 20000;
                }
                const skerry_plan_info plan = plan_of(hosted.context.get(), setup);
                CHECK(plan.budget_bytes == setup.budget.bytes);
                CHECK(plan.planned_bytes == plan.pool_bytes + plan.table_bytes);
                CHECK(plan.planned_bytes <= plan.budget_bytes);
                CHECK(plan.minimum_bytes <= plan.budget_bytes);
                const Cache cache = make_cache(hosted.context.get(), setup);
                skerry_plan_info read = make<skerry_plan_info>();
                REQUIRE(skerry_cache_get_plan(cache.get(), &read, nullptr) == SKERRY_OK);
                CHECK(same_bytes(&plan, &read, sizeof(plan)));
                const skerry_memory_info memory = memory_of(cache.get());
                check_sums(memory);
                CHECK(memory.budget_bytes == plan.budget_bytes);
                CHECK(memory.pool_bytes == plan.pool_bytes);
                CHECK(memory.table_bytes == plan.table_bytes);
                CHECK(memory.staging_bytes == plan.staging_bytes);
                CHECK(memory.exact_bytes == plan.exact_bytes);
                CHECK(memory.host_bytes == plan.host_bytes);
                CHECK(memory.allocated_bytes == hosted.cache_bytes());
            }
        }
    }
    CHECK(hosted.cache_bytes() == 0);
}

TEST_CASE("with a budget, no step allocates (P111, P112)") {
    Hosted hosted;
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = bounded(hosted.context.get(), kind, 0.3, 3, 300);
        setup.cache.max_step_tokens = 64;
        const Cache cache = make_cache(hosted.context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        std::vector<Stream> streams;
        for (uint64_t i = 0; i < 3; ++i)
            streams.push_back({make_seq(cache.get()), History(i), 0});
        const uint64_t requests = hosted.host.requests();
        const uint64_t bytes = memory_of(cache.get()).allocated_bytes;
        const int limit = kind == SKERRY_POLICY_FULL ? 3 : 8;
        for (int round = 0; round < limit; ++round) {
            for (Stream &stream : streams) {
                const skerry_status status = runner.step({stream.next(round % 2 == 0 ? 50 : 3)});
                if (status == SKERRY_OK) stream.length += round % 2 == 0 ? 50 : 3;
                if (kind != SKERRY_POLICY_FULL) REQUIRE_MESSAGE(status == SKERRY_OK, runner.error.message);
            }
        }
        CHECK(hosted.host.requests() == requests);
        CHECK(memory_of(cache.get()).allocated_bytes == bytes);
        CHECK(hosted.cache_bytes() == bytes);
    }
}

TEST_CASE("full policy under a budget: a step that does not fit is refused whole, and space that returns is used (P075)") {
    const Context context = make_context();
    Setup setup = bounded(context.get(), SKERRY_POLICY_FULL, 0.5, 2, 100);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    int refusals = 0;
    for (int i = 0; i < 40 && refusals == 0; ++i) {
        const State before = state_of(cache.get(), {stream.seq});
        const skerry_status status = runner.step({stream.next(7)});
        if (status == SKERRY_OK) {
            stream.length += 7;
            continue;
        }
        ++refusals;
        CHECK(status == SKERRY_ERROR_OVER_BUDGET);
        CHECK(runner.error.subject == SKERRY_SUBJECT_BUDGET);
        check_same(before, state_of(cache.get(), {stream.seq}));
    }
    CHECK(refusals == 1);
    CHECK(stream.length >= 7);
    REQUIRE(skerry_seq_truncate(cache.get(), stream.seq, 0, nullptr) == SKERRY_OK);
    const int64_t reached = stream.length;
    stream.length = 0;
    while (stream.length < reached)
        grow(runner, stream, 7);
    check_cache(cache.get());
}

TEST_CASE("budget: never passed at any moment of a random run (G8, P053, P055, P145)") {
    Hosted hosted;
    Rng rng(12);
    for (skerry_policy_kind kind :
         {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT, SKERRY_POLICY_SEKV}) {
        for (int turn = 0; turn < 3; ++turn) {
            CAPTURE(kind);
            CAPTURE(turn);
            Setup setup = bounded(hosted.context.get(), kind, turn == 0 ? 0.0 : 0.25, 3, 300);
            setup.cache.max_step_tokens = 48;
            if (turn == 2 && kind == SKERRY_POLICY_SEKV) {
                setup.budget.host_bytes = 20000;
            } else if (turn == 2) {
                setup.policy.flags = SKERRY_POLICY_KEEP_EXACT;
                setup.budget.exact_bytes = 9000;
                setup.budget.bytes += 9000;
            }
            const Cache cache = make_cache(hosted.context.get(), setup);
            const skerry_plan_info plan = plan_of(hosted.context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            std::vector<Stream> streams;
            for (int round = 0; round < 150; ++round) {
                const int64_t what = rng.below(12);
                if (streams.size() < 3 && (streams.empty() || what == 0)) {
                    streams.push_back({make_seq(cache.get()), History(rng.next()), 0});
                } else if (what == 1) {
                    REQUIRE(skerry_seq_drop(cache.get(), streams.back().seq, nullptr) == SKERRY_OK);
                    streams.pop_back();
                } else if (what == 2 && streams.size() < 3) {
                    Stream child = streams[0];
                    skerry_error error = make<skerry_error>();
                    REQUIRE_MESSAGE(skerry_seq_fork(cache.get(), streams[0].seq, -1, &child.seq, &error) == SKERRY_OK, error.message);
                    child.history.turn(child.length, rng.next());
                    streams.push_back(child);
                } else if (!streams.empty()) {
                    grow(runner, streams[static_cast<size_t>(rng.below(static_cast<int64_t>(streams.size())))],
                         static_cast<int32_t>(rng.one_in(5) ? rng.between(1, 48) : rng.between(1, 3)));
                }
                const skerry_memory_info memory = memory_of(cache.get());
                check_sums(memory);
                CHECK(memory.allocated_bytes <=
                      plan.budget_bytes + plan.staging_bytes + plan.exact_bytes + plan.host_bytes + memory.fixed_bytes);
                // A table of the object itself is held twice while it grows.
                CHECK(memory.peak_bytes <=
                      plan.budget_bytes + plan.staging_bytes + plan.exact_bytes + plan.host_bytes + 2 * memory.fixed_bytes);
                CHECK(hosted.cache_bytes() == memory.allocated_bytes);
                check_pairs(counters_of(cache.get()));
            }
            check_cache(cache.get());
        }
    }
}

TEST_CASE("used bytes are the sum of what the ranges hold, shared slots once (G17, P103, P123)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = bounded(context.get(), kind, 0.4, 2);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream a{make_seq(cache.get()), History(1), 0}, b{make_seq(cache.get()), History(2), 0};
        for (int i = 0; i < 25; ++i) {
            grow(runner, a, i < 3 ? 17 : 1);
            grow(runner, b, i < 2 ? 5 : 2);
            uint64_t sum = 0;
            for (const Stream *stream : {&a, &b}) {
                const skerry_seq_info info = info_of(cache.get(), stream->seq);
                uint64_t bytes = 0;
                int64_t tokens[4] = {0, 0, 0, 0};
                for (int layer = 0; layer < 2; ++layer) {
                    for (int head = 0; head < 2; ++head) {
                        for (const skerry_range &range : ranges_of(cache.get(), stream->seq, layer, head)) {
                            bytes += range.bytes;
                            tokens[range.tier == SKERRY_TIER_FULL        ? 0
                                   : range.tier == SKERRY_TIER_QUANTISED ? 1
                                   : range.tier == SKERRY_TIER_HOST      ? 3
                                                                         : 2] += range.end - range.begin;
                        }
                    }
                }
                CHECK(info.used_bytes == bytes);
                CHECK(info.full_tokens == tokens[0]);
                CHECK(info.quantised_tokens == tokens[1]);
                CHECK(info.evicted_tokens == tokens[2]);
                CHECK(info.host_tokens == tokens[3]);
                CHECK(tokens[0] + tokens[1] + tokens[2] + tokens[3] == 4 * stream->length);
                sum += bytes;
            }
            const skerry_memory_info memory = memory_of(cache.get());
            CHECK(memory.used_full_bytes + memory.used_quantised_bytes + memory.used_dormant_bytes == sum);
            CHECK(memory.full_cache_bytes == static_cast<uint64_t>(a.length + b.length) * 2 * 2 * (32 + 16) * 4);
        }
    }
}

TEST_CASE("without a budget, bytes grow with the tokens and are given back with the sequence") {
    Hosted hosted;
    for (skerry_policy_kind kind : all_kinds) {
        if (kind == SKERRY_POLICY_SEKV) continue; // needs one
        CAPTURE(kind);
        Setup setup = small_setup(kind, layers_of(2, 2, 2, 16, 16));
        const Cache cache = make_cache(hosted.context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        CHECK(memory_of(cache.get()).budget_bytes == UINT64_MAX);
        for (int turn = 0; turn < 3; ++turn) {
            Stream stream{make_seq(cache.get()), History(1), 0};
            for (int i = 0; i < 12; ++i) {
                grow(runner, stream, 25);
                check_sums(memory_of(cache.get()));
                CHECK(memory_of(cache.get()).allocated_bytes == hosted.cache_bytes());
            }
            if (kind == SKERRY_POLICY_FULL) CHECK(memory_of(cache.get()).pool_bytes >= 300 * 2 * 2 * 32 * 4);
            REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
            const skerry_memory_info memory = memory_of(cache.get());
            CHECK(memory.used_full_bytes + memory.used_quantised_bytes == 0);
        }
    }
    CHECK(hosted.cache_bytes() == 0);
}

TEST_CASE("budgets by share: parts of the full cache, exactly") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 2, 4, 64, 64));
    setup.budget.length_tokens = 4000;
    setup.cache.max_sequences = 2;
    setup.cache.store_dtype = SKERRY_DTYPE_F16;
    const uint64_t full = 2ull * 4000 * 2 * 2 * 128 * 2;
    for (uint32_t share : {100000u, 200000u, 333333u, 1000000u}) {
        setup.budget.share_ppm = share;
        const skerry_plan_info plan = plan_of(context.get(), setup);
        CHECK(plan.full_cache_bytes == full);
        CHECK(plan.budget_bytes == full * share / 1000000);
        CHECK(plan.planned_bytes <= plan.budget_bytes);
        // The remainder is spent: what is left is less than one more window per head.
        if (share <= 333333u) CHECK(plan.budget_bytes - plan.planned_bytes < plan.budget_bytes / 50);
    }
    setup.budget.share_ppm = 200000;
    setup.budget.length_tokens = 0; // a share of an unknown length
    skerry_plan_info info = make<skerry_plan_info>();
    refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), setup.desc(), &info, e); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_BUDGET});
    // P059: a sliding layer costs its window, not the length (P061).
    setup.budget.length_tokens = 4000;
    setup.layers[1].window = 100;
    CHECK(plan_of(context.get(), setup).full_cache_bytes == 2ull * (4000 + 100) * 2 * 128 * 2);
}

TEST_CASE("set_budget: down gives memory back, up allows more, and sequences live on (G11, P126)") {
    Hosted hosted;
    for (skerry_policy_kind kind : {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT}) {
        CAPTURE(kind);
        Setup setup = bounded(hosted.context.get(), kind, 0.6, 2);
        const uint64_t minimum = minimum_bytes(hosted.context.get(), setup);
        const Cache cache = make_cache(hosted.context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream a{make_seq(cache.get()), History(1), 0}, b{make_seq(cache.get()), History(2), 0};
        grow(runner, a, 120);
        grow(runner, b, 33);
        uint64_t bytes = setup.budget.bytes;
        Rng rng(3);
        for (int round = 0; round < 14; ++round) {
            const skerry_memory_info before = memory_of(cache.get());
            skerry_budget_desc budget = setup.budget;
            budget.bytes = round == 0 ? minimum : minimum + static_cast<uint64_t>(rng.below(static_cast<int64_t>(setup.budget.bytes)));
            skerry_error error = make<skerry_error>();
            REQUIRE_MESSAGE(skerry_cache_set_budget(cache.get(), &budget, &error) == SKERRY_OK, error.message);
            const skerry_memory_info after = memory_of(cache.get());
            check_sums(after);
            CHECK(after.budget_bytes == budget.bytes);
            CHECK(hosted.cache_bytes() == after.allocated_bytes);
            if (budget.bytes < bytes) CHECK(after.pool_bytes + after.table_bytes <= before.pool_bytes + before.table_bytes);
            skerry_plan_info plan = make<skerry_plan_info>();
            REQUIRE(skerry_cache_get_plan(cache.get(), &plan, nullptr) == SKERRY_OK);
            Setup same = setup;
            same.budget = budget;
            const skerry_plan_info wanted = plan_of(hosted.context.get(), same);
            CHECK(same_bytes(&plan, &wanted, sizeof(plan)));
            check_cache(cache.get());
            CHECK(info_of(cache.get(), a.seq).length_tokens == a.length);
            for (const Stream *stream : {&a, &b}) {
                const skerry_range first = range_at(cache.get(), stream->seq, 1, 1, 0);
                const skerry_range last = range_at(cache.get(), stream->seq, 1, 1, stream->length - 1);
                CHECK(first.tier == SKERRY_TIER_FULL);
                CHECK(last.tier == SKERRY_TIER_FULL);
            }
            grow(runner, a, 9);
            decode(runner, b, 5);
            check_cache(cache.get());
            bytes = budget.bytes;
        }
        // No limit at all, and back.
        skerry_budget_desc none = make<skerry_budget_desc>();
        none.length_tokens = setup.budget.length_tokens;
        skerry_error error = make<skerry_error>();
        const skerry_status lifted = skerry_cache_set_budget(cache.get(), &none, &error);
        CHECK_MESSAGE(lifted == SKERRY_OK, error.message);
        if (lifted == SKERRY_OK) {
            CHECK(memory_of(cache.get()).budget_bytes == UINT64_MAX);
            grow(runner, a, 50);
            REQUIRE_MESSAGE(skerry_cache_set_budget(cache.get(), &setup.budget, &error) == SKERRY_OK, error.message);
            check_sums(memory_of(cache.get()));
            check_cache(cache.get());
            decode(runner, a, 10);
        }
    }
}

TEST_CASE("set_budget: no memory for the new pool leaves the old one as it was (G11)") {
    Hosted hosted;
    Setup setup = bounded(hosted.context.get(), SKERRY_POLICY_QEVICT, 0.4, 2);
    const Cache cache = make_cache(hosted.context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream a{make_seq(cache.get()), History(1), 0};
    grow(runner, a, 90);
    skerry_budget_desc more = setup.budget;
    more.bytes *= 3;
    bool done = false;
    for (int64_t n = 0; n < 2000 && !done; ++n) {
        State before = state_of(cache.get(), {a.seq});
        hosted.host.fail_after(n);
        const skerry_status status = skerry_cache_set_budget(cache.get(), &more, nullptr);
        hosted.host.fail_never();
        done = status == SKERRY_OK;
        if (done) break;
        CHECK(status == SKERRY_ERROR_OUT_OF_MEMORY);
        State after = state_of(cache.get(), {a.seq});
        after.memory.peak_bytes = before.memory.peak_bytes;
        check_same(before, after);
        CHECK(hosted.cache_bytes() == after.memory.allocated_bytes);
        check_cache(cache.get());
    }
    CHECK(done);
    decode(runner, a, 10);
    check_cache(cache.get());
}

namespace {

// Windows of 4 and a full tier of two of them: what gets the mass rises, what had it falls.
Setup swing(bool keep_exact) {
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 1, 32, 16));
    setup.policy.score = SKERRY_SCORE_LAST;
    setup.policy.score_queries = 4;
    setup.policy.hysteresis_ppm = 1000000;
    setup.policy.max_moves_ppm = 1000000;
    setup.policy.full_format = SKERRY_FORMAT_F32;
    setup.policy.quantised_share_ppm = 500000;
    setup.budget.bytes = 60000;
    if (keep_exact) {
        setup.policy.flags = SKERRY_POLICY_KEEP_EXACT;
        setup.budget.exact_bytes = 100000;
    }
    return setup;
}

struct Written {
    std::vector<skerry_transition> moves;
};

} // namespace

TEST_CASE("ledger: a window that was quantised before is demoted again without writing, to the same bytes (G3)") {
    const Context context = make_context();
    Setup setup = swing(true); // in production a promotion has to bring precision back
    Written written;
    setup.callbacks.user = &written;
    setup.callbacks.transitions = [](void *user, const skerry_transition *moves, int32_t count) {
        static_cast<Written *>(user)->moves.insert(static_cast<Written *>(user)->moves.end(), moves, moves + count);
    };
    // One or two windows fit the full tier.
    const skerry_plan_info free_plan = plan_of(context.get(), setup);
    setup.budget.full_bytes = 2 * static_cast<uint64_t>(4 * (32 + 16) * 4 + 64);
    const skerry_plan_info plan = plan_of(context.get(), setup);
    CHECK(free_plan.full_windows > plan.full_windows);
    REQUIRE(plan.full_windows >= 1);
    REQUIRE(plan.quantised_windows >= 8);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    // Favours the windows [favourite, favourite + k) by turns.
    const auto favour = [&](int64_t favourite) {
        return [=](int, int, int64_t, int64_t position) {
            const int64_t window = position < 2 ? -1 : (position - 2) / 4;
            if (window == favourite || window == favourite + 1) return 0.12f;
            return position < 2 ? 0.0f : 0.0001f * static_cast<float>(1 + window % 7);
        };
    };
    std::map<int32_t, std::vector<float>> first_bytes;
    uint64_t ledger_moves = 0;
    for (int round = 0; round < 120; ++round) {
        const State before = state_of(cache.get(), {stream.seq});
        written.moves.clear();
        steer(runner, stream, 1, favour(round / 8 % 2 == 0 ? 0 : 4));
        const skerry_counters after = counters_of(cache.get());
        check_pairs(after);
        uint64_t bytes = 0, demotions = 0, promotions = 0;
        for (const skerry_transition &move : written.moves) {
            bytes += move.written_bytes;
            demotions += move.to == SKERRY_TIER_QUANTISED;
            promotions += move.from == SKERRY_TIER_QUANTISED && move.to == SKERRY_TIER_FULL;
        }
        CHECK(after.demotions - before.counters.demotions == demotions);
        CHECK(after.promotions - before.counters.promotions == promotions);
        CHECK(after.record_bytes_written - before.counters.record_bytes_written == bytes);
        ledger_moves += after.demotions_ledger - before.counters.demotions_ledger;
        // What a quantised window reads as is the same in each of its stays.
        StepOptions look;
        look.attend = false;
        look.commit = false;
        REQUIRE(runner.step({stream.next(1)}, look) == SKERRY_OK);
        const Gathered low = gather(runner.open, setup.layers[0], 0, 0, 0, SKERRY_TIERS_QUANTISED);
        skerry_step_abort(runner.open);
        std::map<int32_t, std::vector<float>> now;
        for (size_t i = 0; i < low.positions.size(); ++i) {
            std::vector<float> &to = now[low.windows[i]];
            to.insert(to.end(), low.keys.begin() + static_cast<ptrdiff_t>(i) * 32, low.keys.begin() + static_cast<ptrdiff_t>(i + 1) * 32);
            to.insert(to.end(), low.values.begin() + static_cast<ptrdiff_t>(i) * 16,
                      low.values.begin() + static_cast<ptrdiff_t>(i + 1) * 16);
        }
        for (const auto &[window, numbers] : now) {
            const auto [place, fresh] = first_bytes.insert({window, numbers});
            if (!fresh) CHECK(place->second == numbers);
        }
        check_cache(cache.get());
    }
    const skerry_counters end = counters_of(cache.get());
    CHECK(end.demotions_ledger == ledger_moves);
    CHECK(ledger_moves > 0);
    CHECK(end.promotions_exact > 0);
    // A window is encoded at most once: no more encodings than windows.
    CHECK(end.demotions_written <= static_cast<uint64_t>(stream.length / 4));
}

TEST_CASE("keep_exact: promotion brings the exact numbers back, and says so (G3)") {
    const Context context = make_context();
    for (bool keep : {true, false}) {
        CAPTURE(keep);
        Setup setup = swing(keep);
        setup.budget.full_bytes = 2 * static_cast<uint64_t>(4 * (32 + 16) * 4 + 64);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(1), 0};
        int recovered = 0, exact = 0, copies = 0;
        for (int round = 0; round < 40; ++round) {
            const int64_t favourite = round / 8 % 2 == 0 ? 0 : 4;
            steer(runner, stream, 1, [=](int, int, int64_t, int64_t position) {
                const int64_t window = position < 2 ? -1 : (position - 2) / 4;
                return window == favourite || window == favourite + 1 ? 0.12f : 0.0001f;
            });
            StepOptions look;
            look.attend = false;
            look.commit = false;
            const std::vector<skerry_range> ranges = ranges_of(cache.get(), stream.seq, 0, 0);
            REQUIRE(runner.step({stream.next(1)}, look) == SKERRY_OK);
            const Gathered seen = gather(runner.open, setup.layers[0], 0, 0, 0);
            skerry_step_abort(runner.open);
            const Gathered source = remember(stream.history, setup.layers[0], 0, 0, stream.length + 1, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32);
            for (const skerry_range &range : ranges) {
                copies += (range.flags & SKERRY_RANGE_EXACT) != 0;
                if (range.tier != SKERRY_TIER_FULL) continue;
                size_t wrong = 0;
                for (size_t i = 0; i < seen.positions.size(); ++i) {
                    if (seen.positions[i] < range.begin || seen.positions[i] >= range.end) continue;
                    for (size_t c = 0; c < 32; ++c)
                        wrong += seen.keys[i * 32 + c] != source.keys[static_cast<size_t>(seen.positions[i]) * 32 + c];
                    for (size_t c = 0; c < 16; ++c)
                        wrong += seen.values[i * 16 + c] != source.values[static_cast<size_t>(seen.positions[i]) * 16 + c];
                }
                if ((range.flags & SKERRY_RANGE_RECOVERED) != 0) {
                    ++recovered;
                    CHECK(wrong > 0);
                } else {
                    ++exact;
                    CHECK(wrong == 0);
                }
            }
            const skerry_memory_info memory = memory_of(cache.get());
            CHECK(memory.used_exact_bytes <= setup.budget.exact_bytes);
            CHECK(info_of(cache.get(), stream.seq).exact_bytes == memory.used_exact_bytes);
        }
        const skerry_counters counters = counters_of(cache.get());
        CHECK(exact > 0);
        if (keep) {
            CHECK(recovered == 0);
            CHECK(copies > 0);
            CHECK(counters.promotions_exact > 0);
            CHECK(counters.promotions_recovered == 0);
        } else {
            CHECK(recovered == 0);
            CHECK(copies == 0);
            CHECK(counters.promotions == 0); // without a copy it would bring nothing back
        }
    }
}

TEST_CASE("keep_exact: its limit is its own; beyond it windows are recovered and flagged") {
    const Context context = make_context();
    Setup setup = swing(true);
    setup.budget.full_bytes = 2 * static_cast<uint64_t>(4 * (32 + 16) * 4 + 64);
    setup.budget.exact_bytes = 3 * 4 * (32 + 16) * 4;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    uint64_t most = 0;
    for (int round = 0; round < 60; ++round) {
        steer(runner, stream, 1, [=](int, int, int64_t, int64_t position) { return (position / 4 + round / 8) % 5 == 0 ? 0.1f : 0.0001f; });
        const skerry_memory_info memory = memory_of(cache.get());
        check_sums(memory);
        CHECK(memory.exact_bytes <= setup.budget.exact_bytes);
        most = std::max(most, memory.used_exact_bytes);
        check_cache(cache.get());
    }
    CHECK(most > 0);
    const skerry_counters counters = counters_of(cache.get());
    CHECK(counters.promotions_recovered > 0);
}

TEST_CASE("one way: what was demoted does not rise") {
    const Context context = make_context();
    Setup setup = swing(false);
    setup.policy.flags = SKERRY_POLICY_ONE_WAY;
    setup.budget.full_bytes = 2 * static_cast<uint64_t>(4 * (32 + 16) * 4 + 64);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    for (int round = 0; round < 60; ++round) {
        steer(runner, stream, 1, [=](int, int, int64_t, int64_t position) { return (position / 4 + round / 8) % 5 == 0 ? 0.1f : 0.0001f; });
    }
    CHECK(counters_of(cache.get()).demotions > 0);
    CHECK(counters_of(cache.get()).promotions == 0);
}
