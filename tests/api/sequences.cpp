// Forks, truncation, aborted steps and dropped sequences.
// Holds G9, G10, G11, G21, P044, P045, P046, P048, P049, P065, P066, P068, P070, P099, P116, P144, P146.

#include "oracle.hpp"

using namespace support;

namespace {

void limit(skerry_context *context, Setup &setup, double share, int64_t length) {
    if (setup.policy.kind == SKERRY_POLICY_FULL || setup.policy.kind == SKERRY_POLICY_STREAMING) return;
    setup.budget.length_tokens = length;
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = std::max(full_cache_bytes(context, setup), minimum);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full - minimum));
}

Setup limited(skerry_context *context, skerry_policy_kind kind, int sequences, double share = 0.3) {
    Setup setup = small_setup(kind, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_sequences = sequences;
    limit(context, setup, share, 240);
    return setup;
}

constexpr skerry_policy_kind all_kinds[] = {SKERRY_POLICY_FULL,     SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT,
                                            SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT,    SKERRY_POLICY_SEKV};

// Decodes both and says whether every output has the same bits.
bool same_future(Runner &a, Stream &x, Runner &b, Stream &y, int tokens) {
    bool same = true;
    for (int i = 0; i < tokens; ++i) {
        grow(a, x, 1);
        grow(b, y, 1);
        same = same && a.outs == b.outs && a.lses == b.lses;
    }
    return same;
}

} // namespace

TEST_CASE("abort: no trace, whatever the step had done (G11, P099)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = limited(context.get(), kind, 2);
        setup.cache.max_step_tokens = 64;
        const Cache disturbed = make_cache(context.get(), setup), calm = make_cache(context.get(), setup);
        Runner a(disturbed.get(), setup.layers), b(calm.get(), setup.layers);
        Stream x{make_seq(disturbed.get()), History(5), 0}, y{make_seq(calm.get()), History(5), 0};
        Rng rng(6);
        for (int round = 0; round < 40; ++round) {
            // Steps that cross many events, and stop at every stage.
            for (int stage = 0; stage < 4; ++stage) {
                State before = state_of(disturbed.get(), {x.seq});
                History other(900 + static_cast<uint64_t>(round));
                const Part part{x.seq, &other, x.length, static_cast<int32_t>(rng.between(1, 60))};
                StepOptions options;
                options.commit = false;
                options.attend = stage >= 2;
                if (stage == 0) {
                    skerry_step_desc desc = make<skerry_step_desc>();
                    desc.seqs = &part.seq;
                    desc.token_counts = &part.count;
                    desc.seq_count = 1;
                    REQUIRE(skerry_step_begin(disturbed.get(), &desc, &a.open, nullptr) == SKERRY_OK);
                } else {
                    REQUIRE_MESSAGE(a.step({part}, options) == SKERRY_OK, a.error.message);
                }
                skerry_step_abort(a.open);
                State after = state_of(disturbed.get(), {x.seq});
                CHECK(after.counters.steps_begun == before.counters.steps_begun + 1);
                CHECK(after.counters.steps_aborted == before.counters.steps_aborted + 1);
                after.counters.steps_begun = before.counters.steps_begun;
                after.counters.steps_aborted = before.counters.steps_aborted;
                after.memory.peak_bytes = before.memory.peak_bytes;
                // Fetched windows stay where they are until others need the place.
                before.memory.used_bytes -= before.memory.used_zoom_bytes;
                after.memory.used_bytes -= after.memory.used_zoom_bytes;
                after.memory.used_zoom_bytes = before.memory.used_zoom_bytes;
                if (setup.budget.bytes == 0) {
                    // Without a limit, what the step reserved stays for the next one.
                    CHECK(after.memory.used_bytes == before.memory.used_bytes);
                    after.memory = before.memory;
                }
                check_same(before, after);
            }
            check_cache(disturbed.get());
            const int32_t count = round < 5 ? 13 : 1;
            grow(a, x, count);
            grow(b, y, count);
            CHECK(a.outs == b.outs);
            CHECK(fingerprint_of(disturbed.get(), x.seq) == fingerprint_of(calm.get(), y.seq));
        }
    }
}

TEST_CASE("fork: parent and child go their own ways, and each as if it were alone (P044, P045, P046, G4)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        for (int64_t at : {int64_t(0), int64_t(1), int64_t(37), int64_t(-1)}) {
            CAPTURE(kind);
            CAPTURE(at);
            Setup setup = limited(context.get(), kind, 3);
            const Cache cache = make_cache(context.get(), setup), alone = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers), lone(alone.get(), setup.layers);
            Stream parent{make_seq(cache.get()), History(5), 0};
            grow(runner, parent, 90);
            decode(runner, parent, 20);
            const skerry_seq_info info = info_of(cache.get(), parent.seq);
            int64_t length = at < 0 ? parent.length : at;
            if (at > 0 && at < info.lowest_truncate) length = info.lowest_truncate;
            skerry_seq id{};
            skerry_error error = make<skerry_error>();
            REQUIRE_MESSAGE(skerry_seq_fork(cache.get(), parent.seq, at < 0 ? -1 : length, &id, &error) == SKERRY_OK, error.message);
            check_cache(cache.get());
            Stream child{id, parent.history, length};
            child.history.turn(length, 600);
            CHECK(info_of(cache.get(), child.seq).length_tokens == length);
            if (length == parent.length) CHECK(fingerprint_of(cache.get(), child.seq) == fingerprint_of(cache.get(), parent.seq));

            // A lone sequence that does what the parent did, and one that was truncated instead of forked.
            Stream twin{make_seq(alone.get()), History(5), 0}, cut{make_seq(alone.get()), History(5), 0};
            for (Stream *one : {&twin, &cut}) {
                grow(lone, *one, 90);
                decode(lone, *one, 20);
            }
            REQUIRE_MESSAGE(skerry_seq_truncate(alone.get(), cut.seq, length, &error) == SKERRY_OK, error.message);
            cut.length = length;
            cut.history.turn(length, 600);
            bool parent_same = true, child_same = true;
            for (int i = 0; i < 60; ++i) {
                grow(runner, parent, 1);
                grow(lone, twin, 1);
                parent_same = parent_same && runner.outs == lone.outs;
                grow(runner, child, 1);
                grow(lone, cut, 1);
                child_same = child_same && runner.outs == lone.outs;
                check_cache(cache.get());
            }
            CHECK(parent_same);
            CHECK(child_same);
            CHECK(fingerprint_of(cache.get(), parent.seq) == fingerprint_of(alone.get(), twin.seq));
            CHECK(fingerprint_of(cache.get(), child.seq) == fingerprint_of(alone.get(), cut.seq));
        }
    }
}

TEST_CASE("fork: bytes are shared until a side changes them, and freed in either order of dropping (P048, P120)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        for (int order = 0; order < 2; ++order) {
            CAPTURE(kind);
            CAPTURE(order);
            Setup setup = limited(context.get(), kind, 6);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            const uint64_t empty = memory_of(cache.get()).used_bytes;
            Stream parent{make_seq(cache.get()), History(5), 0};
            const uint64_t with_one = memory_of(cache.get()).used_bytes;
            // Whole windows behind the sinks: a window that is still open would be copied by the fork.
            skerry_plan_info plan = make<skerry_plan_info>();
            REQUIRE(skerry_cache_get_plan(cache.get(), &plan, nullptr) == SKERRY_OK);
            grow(runner, parent, plan.sink_tokens + 96 / plan.window_tokens * plan.window_tokens);
            const skerry_memory_info one = memory_of(cache.get());
            const uint64_t one_bytes = one.used_full_bytes + one.used_quantised_bytes + one.used_dormant_bytes;
            std::vector<Stream> children;
            for (uint64_t i = 0; i < 4; ++i) {
                skerry_seq id{};
                REQUIRE(skerry_seq_fork(cache.get(), parent.seq, -1, &id, nullptr) == SKERRY_OK);
                children.push_back({id, parent.history, parent.length});
                children.back().history.turn(parent.length, 700 + i);
            }
            const skerry_memory_info shared = memory_of(cache.get());
            const uint64_t shared_bytes = shared.used_full_bytes + shared.used_quantised_bytes + shared.used_dormant_bytes;
            CHECK(shared_bytes == one_bytes); // shared slots once
            CHECK(info_of(cache.get(), children[0].seq).used_bytes == info_of(cache.get(), parent.seq).used_bytes);
            bool flagged = true;
            for (const skerry_range &range : ranges_of(cache.get(), children[0].seq, 0, 0)) {
                if (range.tier != SKERRY_TIER_EVICTED) flagged = flagged && (range.flags & SKERRY_RANGE_SHARED) != 0;
            }
            CHECK(flagged);
            for (Stream &child : children)
                decode(runner, child, 30);
            decode(runner, parent, 30);
            check_cache(cache.get());
            if (order == 0) {
                REQUIRE(skerry_seq_drop(cache.get(), parent.seq, nullptr) == SKERRY_OK);
                check_cache(cache.get());
            }
            for (Stream &child : children) {
                REQUIRE(skerry_seq_drop(cache.get(), child.seq, nullptr) == SKERRY_OK);
                check_cache(cache.get());
            }
            if (order == 1) {
                for (const skerry_range &range : ranges_of(cache.get(), parent.seq, 0, 0))
                    CHECK((range.flags & SKERRY_RANGE_SHARED) == 0);
                decode(runner, parent, 10);
                REQUIRE(skerry_seq_drop(cache.get(), parent.seq, nullptr) == SKERRY_OK);
            }
            const skerry_memory_info end = memory_of(cache.get());
            CHECK(end.used_full_bytes + end.used_quantised_bytes + end.used_dormant_bytes + end.used_exact_bytes == 0);
            CHECK(end.used_bytes <= std::max(empty, with_one));
        }
    }
}

TEST_CASE("truncate: legal down to the lowest position that is named, refused below it, always legal to 0 (P065, P070)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = limited(context.get(), kind, 2);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(5), 0};
        grow(runner, stream, 70);
        Rng rng(8);
        for (int round = 0; round < 25; ++round) {
            grow(runner, stream, static_cast<int32_t>(rng.between(1, 6)));
            const int64_t lowest = info_of(cache.get(), stream.seq).lowest_truncate;
            CHECK(lowest >= 0);
            CHECK(lowest <= stream.length);
            // Everything from there on is in full precision and exact, in every head.
            for (int layer = 0; layer < 2; ++layer) {
                for (int head = 0; head < 2; ++head) {
                    for (const skerry_range &range : ranges_of(cache.get(), stream.seq, layer, head)) {
                        if (range.end <= lowest) continue;
                        const bool exact = (range.tier == SKERRY_TIER_FULL && (range.flags & SKERRY_RANGE_RECOVERED) == 0) ||
                                           (range.flags & SKERRY_RANGE_EXACT) != 0;
                        CHECK(exact);
                    }
                }
            }
            const Guard guard{cache.get(), {stream.seq}};
            for (int64_t target : {int64_t(1), lowest - 1}) {
                if (target < 1 || target >= lowest) continue;
                CHECK(skerry_seq_can_truncate(cache.get(), stream.seq, target, 0, nullptr) == SKERRY_MISS);
                const skerry_error error =
                    guard.refused([&](skerry_error *e) { return skerry_seq_truncate(cache.get(), stream.seq, target, e); },
                                  SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_POSITION});
                CHECK(error.found == target);
                CHECK(error.allowed == lowest);
            }
            for (int64_t target = lowest; target <= stream.length; ++target) {
                CHECK(skerry_seq_can_truncate(cache.get(), stream.seq, target, 0, nullptr) == SKERRY_OK);
            }
            CHECK(skerry_seq_can_truncate(cache.get(), stream.seq, 0, 0, nullptr) == SKERRY_OK);
            const int64_t target = rng.between(std::max<int64_t>(lowest, 1), stream.length);
            skerry_error error = make<skerry_error>();
            REQUIRE_MESSAGE(skerry_seq_truncate(cache.get(), stream.seq, target, &error) == SKERRY_OK, error.message);
            stream.length = target;
            stream.history.turn(target, 1000 + static_cast<uint64_t>(round));
            CHECK(info_of(cache.get(), stream.seq).length_tokens == target);
            check_cache(cache.get());
        }
        REQUIRE(skerry_seq_truncate(cache.get(), stream.seq, 0, nullptr) == SKERRY_OK);
        CHECK(info_of(cache.get(), stream.seq).length_tokens == 0);
        CHECK(info_of(cache.get(), stream.seq).used_bytes == 0);
        const skerry_seq fresh = make_seq(cache.get());
        CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(cache.get(), fresh)); // P049, P070
        check_cache(cache.get());
    }
}

TEST_CASE("truncate: without compression the rest is as if the tail had never been (G9, P116)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(2, 2, 4, 32, 16));
    const Cache cache = make_cache(context.get(), setup), fresh = make_cache(context.get(), setup);
    Runner a(cache.get(), setup.layers), b(fresh.get(), setup.layers);
    for (int64_t length : {1, 5, 16, 17, 31, 64, 79}) {
        Stream x{make_seq(cache.get()), History(5), 0}, y{make_seq(fresh.get()), History(5), 0};
        grow(a, x, 80);
        REQUIRE(skerry_seq_truncate(cache.get(), x.seq, length, nullptr) == SKERRY_OK);
        x.length = length;
        x.history.turn(length, 55);
        grow(b, y, static_cast<int32_t>(length));
        y.history.turn(length, 55);
        CHECK(same_future(a, x, b, y, 30));
        REQUIRE(skerry_seq_drop(cache.get(), x.seq, nullptr) == SKERRY_OK);
        REQUIRE(skerry_seq_drop(fresh.get(), y.seq, nullptr) == SKERRY_OK);
    }
}

TEST_CASE("truncate: a sliding layer goes back only as far as its window is whole") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(2, 1, 2, 16, 16));
    setup.layers[1].window = 20;
    const Cache cache = make_cache(context.get(), setup), fresh = make_cache(context.get(), setup);
    Runner a(cache.get(), setup.layers), b(fresh.get(), setup.layers);
    for (int64_t back : {1, 3, 8, 15, 40}) {
        CAPTURE(back);
        Stream x{make_seq(cache.get()), History(5), 0}, y{make_seq(fresh.get()), History(5), 0};
        grow(a, x, 100);
        const int64_t target = 100 - back;
        const int64_t lowest = info_of(cache.get(), x.seq).lowest_truncate;
        const skerry_status status = skerry_seq_truncate(cache.get(), x.seq, target, nullptr);
        CHECK((status == SKERRY_OK) == (target >= lowest));
        if (status == SKERRY_OK) {
            x.length = target;
            grow(b, y, static_cast<int32_t>(target));
            // The window of the next query lies partly before the cut: it must be there.
            CHECK(same_future(a, x, b, y, 25));
        }
        REQUIRE(skerry_seq_drop(cache.get(), x.seq, nullptr) == SKERRY_OK);
        REQUIRE(skerry_seq_drop(fresh.get(), y.seq, nullptr) == SKERRY_OK);
    }
}

TEST_CASE("can_truncate: what it says about the future comes true (P068, P146)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = limited(context.get(), kind, 1);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(5), 0};
        grow(runner, stream, 50);
        int yes = 0, no = 0;
        for (int round = 0; round < 60; ++round) {
            const int64_t length = stream.length - round % 3;
            const int32_t ahead = 1 + round % 12;
            skerry_error error = make<skerry_error>();
            const skerry_status said = skerry_seq_can_truncate(cache.get(), stream.seq, length, ahead, &error);
            REQUIRE_MESSAGE(said >= 0, error.message);
            decode(runner, stream, ahead);
            const skerry_status now = skerry_seq_can_truncate(cache.get(), stream.seq, length, 0, nullptr);
            // A promise must hold; a refusal may be careful.
            if (said == SKERRY_OK) CHECK(now == SKERRY_OK);
            said == SKERRY_OK ? ++yes : ++no;
        }
        CHECK(yes > 0);
        if (kind != SKERRY_POLICY_FULL) CHECK(no > 0);
        CHECK(skerry_seq_can_truncate(cache.get(), stream.seq, 0, 1000000, nullptr) == SKERRY_OK);
    }
}

TEST_CASE("drop: freed places are never read again, and a reused one starts clean (G21, P011, P131)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : all_kinds) {
        CAPTURE(kind);
        Setup setup = limited(context.get(), kind, 2);
        const Cache used = make_cache(context.get(), setup), fresh = make_cache(context.get(), setup);
        Runner a(used.get(), setup.layers), b(fresh.get(), setup.layers);
        for (uint64_t i = 0; i < 5; ++i) {
            Stream old{make_seq(used.get()), History(100 + i), 0};
            grow(a, old, 64);
            decode(a, old, 40);
            REQUIRE(skerry_seq_drop(used.get(), old.seq, nullptr) == SKERRY_OK);
        }
        Stream x{make_seq(used.get()), History(5), 0}, y{make_seq(fresh.get()), History(5), 0};
        grow(a, x, 64);
        grow(b, y, 64);
        CHECK(a.outs == b.outs);
        CHECK(same_future(a, x, b, y, 60));
        CHECK(fingerprint_of(used.get(), x.seq) == fingerprint_of(fresh.get(), y.seq));
        CHECK(info_of(used.get(), x.seq).used_bytes == info_of(fresh.get(), y.seq).used_bytes);
    }
}

TEST_CASE("release: a cache with an open step and live sequences goes away whole") {
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.allocator = host.hooks();
    {
        Context context = make_context(&desc);
        Setup setup = limited(context.get(), SKERRY_POLICY_QEVICT, 2);
        Cache cache = make_cache(context.get(), setup);
        context.reset(); // the cache keeps its context
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(5), 0};
        grow(runner, stream, 40);
        StepOptions open;
        open.commit = false;
        grow(runner, stream, 4, open);
        CHECK(skerry_cache_retain(cache.get()) == cache.get());
        skerry_cache_release(cache.get());
        check_cache(cache.get());
    }
    CHECK(host.live_count() == 0);
    CHECK(host.mismatches() == 0);
}

TEST_CASE("truncate: what a sliding window has let go stays gone after a truncation (P065, P068)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(1, 1, 2, 16, 8));
    setup.layers[0].window = 24;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(2), 0};
    grow(runner, stream, 150);
    const int64_t lowest = info_of(cache.get(), stream.seq).lowest_truncate;
    CHECK(lowest > 100);
    CHECK(lowest < 150);
    REQUIRE(skerry_seq_truncate(cache.get(), stream.seq, lowest, nullptr) == SKERRY_OK);
    CHECK(info_of(cache.get(), stream.seq).lowest_truncate == lowest);
    CHECK(skerry_seq_truncate(cache.get(), stream.seq, lowest - 1, nullptr) == SKERRY_ERROR_ARGUMENT);
    // Everything that the next query sees is there: its window's first token is.
    int64_t first = lowest;
    for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0)) {
        if (range.tier == SKERRY_TIER_EVICTED) first = range.end;
    }
    CHECK(first <= lowest - 24 + 1);
}

TEST_CASE("truncate: a sliding window that has let nothing go changes nothing (P065)") {
    const Context context = make_context();
    int64_t lowest[2] = {};
    for (int wide = 0; wide < 2; ++wide) {
        Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 2, 16, 8));
        if (wide == 1) setup.layers[0].window = 1 << 20;
        setup.budget.length_tokens = 800;
        setup.budget.bytes = minimum_bytes(context.get(), setup) + 20000;
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(2), 0};
        for (int i = 0; i < 7; ++i) grow(runner, stream, 100);
        lowest[wide] = info_of(cache.get(), stream.seq).lowest_truncate;
    }
    CHECK(lowest[0] == lowest[1]);
    CHECK(lowest[0] < 700);
}
