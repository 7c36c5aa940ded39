// The n-th allocation fails, for every n until the call succeeds: the status says so, nothing leaks, and what was there
// before is as it was and can be used.
// Holds G11, G18, G20, P047, P075, P117.

#include "oracle.hpp"

using namespace support;

namespace {

struct Hosted {
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    Hosted() { desc.allocator = host.hooks(); }
};

Setup setup_of(skerry_context *context, skerry_policy_kind kind, bool limited) {
    Setup setup = small_setup(kind, layers_of(2, 2, 4, 16, 8));
    setup.layers[1].window = 24;
    setup.cache.max_sequences = 3;
    setup.cache.max_step_tokens = 32;
    if (limited) {
        setup.budget.length_tokens = 200;
        setup.budget.bytes = (kind == SKERRY_POLICY_FULL ? 3 : 1) * full_cache_bytes(context, setup);
        if (kind == SKERRY_POLICY_SEKV) {
            setup.budget.bytes = minimum_bytes(context, setup) + setup.budget.bytes / 4; // a larger one holds everything on the device
            setup.sekv.keep_windows = 3;
        } else if (kind >= SKERRY_POLICY_QUANTISE) {
            setup.policy.flags = SKERRY_POLICY_KEEP_EXACT;
            setup.budget.exact_bytes = 10000;
        }
    }
    return setup;
}

constexpr skerry_policy_kind all_kinds[] = {SKERRY_POLICY_FULL, SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE,
                                            SKERRY_POLICY_QEVICT, SKERRY_POLICY_SEKV};

constexpr int64_t most_allocations = 5000;

// Repeats `call` with one more allocation allowed each time, until it succeeds. `failed` runs after each failure.
template <class Try, class Failed>
int64_t until_it_works(Allocator &host, Try &&attempt, Failed &&failed) {
    for (int64_t n = 0; n < most_allocations; ++n) {
        host.fail_after(n);
        const skerry_status status = attempt();
        const bool hit = host.failed();
        host.fail_never();
        if (status >= 0) {
            // A call that met a failing allocation and still succeeded must have done without it.
            return n;
        }
        CHECK(status == SKERRY_ERROR_OUT_OF_MEMORY);
        CHECK(hit);
        failed();
    }
    FAIL("never succeeded");
    return most_allocations;
}

} // namespace

TEST_CASE("out of memory: context_create") {
    for (uint32_t workers : {0u, 2u}) {
        Hosted hosted;
        hosted.desc.worker_count = workers;
        hosted.desc.transfer_threads = workers;
        skerry_context *context = nullptr;
        skerry_error error = make<skerry_error>();
        const int64_t n = until_it_works(
            hosted.host, [&] { return skerry_context_create(&hosted.desc, &context, &error); },
            [&] {
                CHECK(context == nullptr);
                CHECK(error.status == SKERRY_ERROR_OUT_OF_MEMORY);
                CHECK(error.subject == SKERRY_SUBJECT_HOST_MEMORY);
                CHECK(error.message[0] != 0);
                CHECK(hosted.host.live_count() == 0);
            });
        CHECK(n > 0);
        skerry_context_release(context);
        CHECK(hosted.host.live_count() == 0);
        CHECK(hosted.host.mismatches() == 0);
    }
}

TEST_CASE("out of memory: cache_create") {
    for (skerry_policy_kind kind : all_kinds) {
        for (bool limited : {false, true}) {
            if (kind == SKERRY_POLICY_SEKV && !limited) continue; // needs a budget
            CAPTURE(kind);
            CAPTURE(limited);
            Hosted hosted;
            const Context context = make_context(&hosted.desc);
            Setup setup = setup_of(context.get(), kind, limited);
            const size_t live = hosted.host.live_count();
            const uint64_t bytes = hosted.host.live_bytes();
            skerry_cache *cache = nullptr;
            skerry_error error = make<skerry_error>();
            const int64_t n = until_it_works(
                hosted.host, [&] { return skerry_cache_create(context.get(), setup.desc(), &cache, &error); },
                [&] {
                    CHECK(cache == nullptr);
                    CHECK(error.subject == SKERRY_SUBJECT_HOST_MEMORY);
                    CHECK(hosted.host.live_count() == live);
                    CHECK(hosted.host.live_bytes() == bytes);
                });
            CHECK(n > 0);
            skerry_cache_release(cache);
            CHECK(hosted.host.live_count() == live);
            CHECK(hosted.host.live_bytes() == bytes);
            CHECK(hosted.host.mismatches() == 0);
        }
    }
}

TEST_CASE("out of memory: sequences, forks, truncation and steps") {
    for (skerry_policy_kind kind : all_kinds) {
        for (bool limited : {false, true}) {
            if (kind == SKERRY_POLICY_SEKV && !limited) continue; // needs a budget
            CAPTURE(kind);
            CAPTURE(limited);
            Hosted hosted;
            const Context context = make_context(&hosted.desc);
            Setup setup = setup_of(context.get(), kind, limited);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            Stream stream{{}, History(4), 0};
            std::vector<skerry_seq> known;
            // What must not change when a call fails; peaks may.
            State before;
            size_t live = 0;
            const auto remember_state = [&] {
                before = state_of(cache.get(), known);
                live = hosted.host.live_count();
            };
            const auto unchanged = [&] {
                State after = state_of(cache.get(), known);
                after.memory.peak_bytes = before.memory.peak_bytes;
                after.counters.steps_begun = before.counters.steps_begun; // a step that ran into the failure was aborted
                after.counters.steps_aborted = before.counters.steps_aborted;
                if (limited) {
                    CHECK(hosted.host.live_count() == live);
                } else {
                    // Without a limit, a pool that grew before the failure stays as it is, for the next attempt.
                    CHECK(after.memory.used_bytes == before.memory.used_bytes);
                    after.memory = before.memory;
                }
                check_same(before, after);
                skerry_context_bytes bytes{};
                REQUIRE(skerry_context_get_bytes(context.get(), &bytes, nullptr) == SKERRY_OK);
                CHECK(bytes.context_bytes + bytes.cache_bytes == hosted.host.live_bytes());
                check_cache(cache.get());
            };
            remember_state();
            until_it_works(
                hosted.host, [&] { return skerry_seq_create(cache.get(), &stream.seq, nullptr); }, unchanged);
            known.push_back(stream.seq);

            // A whole step; begin is where memory may be missing, nowhere else.
            for (int32_t count : {1, 30, 3, 32, 32, 1, 1, 1, 1, 32, 32}) {
                remember_state();
                int64_t calls = 0;
                until_it_works(
                    hosted.host,
                    [&] {
                        ++calls;
                        skerry_step_desc desc = make<skerry_step_desc>();
                        desc.seqs = &stream.seq;
                        desc.token_counts = &count;
                        desc.seq_count = 1;
                        skerry_step *step = nullptr;
                        const skerry_status status = skerry_step_begin(cache.get(), &desc, &step, nullptr);
                        if (status < 0) {
                            CHECK(step == nullptr);
                            return status;
                        }
                        skerry_step_abort(step);
                        return status;
                    },
                    unchanged);
                if (limited) CHECK(calls == 1);
                // The same whole, with every later allocation failing: reserved is reserved.
                StepOptions open;
                open.commit = false;
                open.attend = false;
                grow(runner, stream, count, open);
                skerry_step_abort(runner.open);
                grow(runner, stream, count);
                CHECK(info_of(cache.get(), stream.seq).length_tokens == stream.length);
                check_cache(cache.get());
            }

            skerry_seq child{};
            remember_state();
            until_it_works(
                hosted.host, [&] { return skerry_seq_fork(cache.get(), stream.seq, -1, &child, nullptr); }, unchanged);
            known.push_back(child);
            CHECK(fingerprint_of(cache.get(), child) == fingerprint_of(cache.get(), stream.seq));

            const int64_t lowest = info_of(cache.get(), child).lowest_truncate;
            if (lowest < stream.length) {
                remember_state();
                until_it_works(
                    hosted.host,
                    [&] { return skerry_seq_truncate(cache.get(), child, std::max<int64_t>(lowest, stream.length - 1), nullptr); },
                    unchanged);
            }
            Stream second{child, stream.history, info_of(cache.get(), child).length_tokens};
            second.history.turn(second.length, 77);
            decode(runner, second, 8);
            decode(runner, stream, 8);
            check_cache(cache.get());

            if (limited) {
                skerry_budget_desc more = setup.budget;
                more.bytes *= 2;
                remember_state();
                until_it_works(
                    hosted.host, [&] { return skerry_cache_set_budget(cache.get(), &more, nullptr); }, unchanged);
                decode(runner, stream, 8);
                remember_state();
                until_it_works(
                    hosted.host, [&] { return skerry_cache_set_budget(cache.get(), &setup.budget, nullptr); }, unchanged);
                decode(runner, second, 8);
                check_cache(cache.get());
            }
        }
    }
}

TEST_CASE("out of memory: append, attend, observe and commit need none (step.h)") {
    for (skerry_policy_kind kind : all_kinds) {
        for (bool limited : {false, true}) {
            if (kind == SKERRY_POLICY_SEKV && !limited) continue; // needs a budget
            CAPTURE(kind);
            CAPTURE(limited);
            Hosted hosted, calm;
            const Context context = make_context(&hosted.desc), reference = make_context(&calm.desc);
            Setup setup = setup_of(context.get(), kind, limited);
            const Cache cache = make_cache(context.get(), setup), other = make_cache(reference.get(), setup);
            Runner runner(cache.get(), setup.layers), expected(other.get(), setup.layers);
            Stream stream{make_seq(cache.get()), History(4), 0}, twin{make_seq(other.get()), History(4), 0};
            for (int round = 0; round < 30; ++round) {
                const int32_t count = round < 4 ? 30 : 1;
                StepOptions starving;
                uint64_t requests = 0;
                // The step has begun when the first layer is attended: from here on nothing may be asked for.
                starving.before_attend = [&](skerry_step *, int layer) {
                    if (layer == 0) {
                        requests = hosted.host.requests();
                        hosted.host.fail_after(0);
                    }
                };
                grow(runner, stream, count, starving);
                CHECK(hosted.host.requests() == requests);
                hosted.host.fail_never();
                grow(expected, twin, count);
                CHECK(runner.outs == expected.outs);
                CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(other.get(), twin.seq));
            }
        }
    }
}

TEST_CASE("out of memory: whole runs with failures strewn in end where a calm run ends") {
    for (skerry_policy_kind kind : all_kinds) {
        if (kind == SKERRY_POLICY_SEKV) continue; // under a budget no step allocates
        CAPTURE(kind);
        Hosted hosted;
        const Context calm = make_context();
        Setup setup = setup_of(calm.get(), kind, false);
        const Cache reference = make_cache(calm.get(), setup);
        Runner expected(reference.get(), setup.layers);
        Stream twin{make_seq(reference.get()), History(4), 0};
        {
            const Context context = make_context(&hosted.desc);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            Stream stream{make_seq(cache.get()), History(4), 0};
            Rng rng(9);
            int failures = 0;
            for (int round = 0; round < 120; ++round) {
                const int32_t count = static_cast<int32_t>(round < 6 ? rng.between(1, 32) : rng.between(1, 4));
                for (;;) {
                    hosted.host.fail_after(rng.below(4));
                    const skerry_status status = runner.step({stream.next(count)});
                    hosted.host.fail_never();
                    if (status == SKERRY_OK) break;
                    ++failures;
                    REQUIRE(status == SKERRY_ERROR_OUT_OF_MEMORY);
                    REQUIRE(failures < 10000);
                    if (failures % 50 == 49) REQUIRE_MESSAGE(runner.step({stream.next(count)}) == SKERRY_OK, runner.error.message);
                    if (failures % 50 == 49) break;
                }
                stream.length += count;
                grow(expected, twin, count);
                CHECK(runner.outs == expected.outs);
            }
            CHECK(failures > 0);
            CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(reference.get(), twin.seq));
        }
        CHECK(hosted.host.live_count() == 0);
        CHECK(hosted.host.mismatches() == 0);
    }
}
