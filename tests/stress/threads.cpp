// What the headers allow at once is done at once: different caches of one context, and different layers of one step.
// Run under the thread sanitizer as well. Holds G5, G18, G19, P039, P117.

#include "support.hpp"

#include <atomic>
#include <thread>

using namespace support;

namespace {

Setup setup_of(skerry_context *context, skerry_policy_kind kind, int layers) {
    Setup setup = small_setup(kind, layers_of(layers, 2, 4, 16, 16));
    setup.cache.max_sequences = 2;
    setup.cache.max_step_tokens = 32;
    setup.budget.length_tokens = 300;
    const uint64_t minimum = minimum_bytes(context, setup);
    if (kind != SKERRY_POLICY_FULL) setup.budget.bytes = minimum + full_cache_bytes(context, setup) / 4;
    if (kind == SKERRY_POLICY_SEKV) setup.sekv.keep_windows = 4;
    return setup;
}

constexpr skerry_policy_kind kinds[] = {SKERRY_POLICY_FULL, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT,
                                        SKERRY_POLICY_SEKV};

// As many threads for copies as there are workers.
Context context_with(uint32_t workers) {
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.worker_count = desc.transfer_threads = workers;
    return make_context(&desc);
}

// No doctest checks here: it runs on many threads. 0: something failed.
uint64_t work(skerry_context *context, Setup setup, uint64_t seed, int tokens) {
    skerry_cache *cache = nullptr;
    if (skerry_cache_create(context, setup.desc(), &cache, nullptr) != SKERRY_OK) return 0;
    const Cache owner(cache);
    Runner runner(cache, setup.layers);
    Stream stream;
    stream.history = History(seed);
    if (skerry_seq_create(cache, &stream.seq, nullptr) != SKERRY_OK) return 0;
    uint64_t hash = 1;
    for (int i = 0; i < tokens; ++i) {
        const int32_t count = i < 3 ? 20 : 1;
        if (runner.step({stream.next(count)}) != SKERRY_OK) return 0;
        stream.length += count;
        for (float x : runner.outs[0]) {
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            hash = mix(hash ^ bits);
        }
        if (i % 16 == 5) {
            skerry_seq child{};
            if (skerry_seq_fork(cache, stream.seq, -1, &child, nullptr) != SKERRY_OK) return 0;
            if (skerry_seq_drop(cache, child, nullptr) != SKERRY_OK) return 0;
        }
    }
    uint64_t fingerprint = 0;
    if (skerry_seq_fingerprint(cache, stream.seq, &fingerprint, nullptr) != SKERRY_OK) return 0;
    return mix(hash ^ fingerprint) | 1;
}

} // namespace

TEST_CASE("threads: caches of one context at once, with and without workers") {
    for (uint32_t workers : {0u, 2u}) {
        const Context context = context_with(workers);
        std::vector<Setup> setups;
        std::vector<uint64_t> wanted;
        for (uint64_t i = 0; i < 7; ++i) {
            setups.push_back(setup_of(context.get(), kinds[i % 5], 2));
            wanted.push_back(work(context.get(), setups.back(), i, 40));
            REQUIRE(wanted.back() != 0);
        }
        std::vector<uint64_t> got(setups.size());
        std::vector<std::thread> threads;
        std::atomic<bool> stop{false};
        // A watcher that asks what any thread may ask.
        std::thread watcher([&] {
            while (!stop) {
                skerry_context *again = skerry_context_retain(context.get());
                skerry_context_bytes bytes{};
                (void)!skerry_context_get_bytes(again, &bytes, nullptr);
                skerry_plan_info info = make<skerry_plan_info>();
                Setup setup = setups[0];
                (void)!skerry_cache_plan(again, setup.desc(), &info, nullptr);
                skerry_context_release(again);
                std::this_thread::yield();
            }
        });
        for (size_t i = 0; i < setups.size(); ++i) {
            threads.emplace_back([&, i] { got[i] = work(context.get(), setups[i], i, 40); });
        }
        for (std::thread &thread : threads)
            thread.join();
        stop = true;
        watcher.join();
        CHECK(got == wanted);
        skerry_context_bytes bytes{};
        REQUIRE(skerry_context_get_bytes(context.get(), &bytes, nullptr) == SKERRY_OK);
        CHECK(bytes.cache_bytes == 0);
    }
}

TEST_CASE("threads: layers of one step at once") {
    constexpr int layers = 4;
    for (uint32_t workers : {0u, 2u}) {
        for (skerry_policy_kind kind : kinds) {
            CAPTURE(workers);
            CAPTURE(kind);
            const Context context = context_with(workers);
            Setup setup = setup_of(context.get(), kind, layers);
            const Cache cache = make_cache(context.get(), setup), calm = make_cache(context.get(), setup);
            Runner expected(calm.get(), setup.layers);
            Stream stream{make_seq(cache.get()), History(3), 0}, twin{make_seq(calm.get()), History(3), 0};
            for (int round = 0; round < 30; ++round) {
                const int32_t count = round < 3 ? 30 : 1;
                skerry_step_desc desc = make<skerry_step_desc>();
                desc.seqs = &stream.seq;
                desc.token_counts = &count;
                desc.seq_count = 1;
                skerry_step *step = nullptr;
                REQUIRE(skerry_step_begin(cache.get(), &desc, &step, nullptr) == SKERRY_OK);
                std::vector<std::vector<float>> outs(layers);
                std::atomic<int> failures{0};
                std::vector<std::thread> threads;
                for (int layer = 0; layer < layers; ++layer) {
                    threads.emplace_back([&, layer] {
                        const Layer &shape = setup.layers[0];
                        std::vector<float> keys, values, queries;
                        const auto rows = [&](std::vector<float> &to, Kind kind_of, int heads, int dim) {
                            to.resize(static_cast<size_t>(count * heads * dim));
                            for (int t = 0; t < count; ++t) {
                                for (int head = 0; head < heads; ++head) {
                                    const int64_t p = stream.length + t;
                                    fill_row(to.data() + (t * heads + head) * dim, stream.history.at(p), kind_of, layer, head, p, dim);
                                }
                            }
                        };
                        rows(keys, Kind::key, shape.kv_heads, shape.key_dim);
                        rows(values, Kind::value, shape.kv_heads, shape.value_dim);
                        rows(queries, Kind::query, shape.query_heads, shape.key_dim);
                        std::vector<float> &out = outs[static_cast<size_t>(layer)];
                        out.resize(static_cast<size_t>(count * shape.query_heads * shape.value_dim));
                        const skerry_tensor key = tensor(keys.data(), SKERRY_DTYPE_F32, {count, shape.kv_heads, shape.key_dim});
                        const skerry_tensor value = tensor(values.data(), SKERRY_DTYPE_F32, {count, shape.kv_heads, shape.value_dim});
                        const skerry_tensor query = tensor(queries.data(), SKERRY_DTYPE_F32, {count, shape.query_heads, shape.key_dim});
                        const skerry_tensor result = tensor(out.data(), SKERRY_DTYPE_F32, {count, shape.query_heads, shape.value_dim});
                        skerry_attend_desc attend = make<skerry_attend_desc>();
                        attend.queries = &query;
                        attend.out = &result;
                        attend.layer = layer;
                        failures += skerry_step_append(step, layer, &key, &value, nullptr, nullptr) != SKERRY_OK;
                        int32_t tokens = 0;
                        skerry_gather_desc gather = make<skerry_gather_desc>();
                        gather.layer = layer;
                        failures += skerry_step_gather(step, &gather, &tokens, nullptr) != SKERRY_OK;
                        failures += skerry_step_attend(step, &attend, nullptr) != SKERRY_OK;
                    });
                }
                for (std::thread &thread : threads)
                    thread.join();
                REQUIRE(failures == 0);
                REQUIRE(skerry_step_commit(step, nullptr) == SKERRY_OK);
                stream.length += count;
                grow(expected, twin, count);
                CHECK(outs == expected.outs);
                CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(calm.get(), twin.seq));
            }
            check_cache(cache.get());
        }
    }
}

TEST_CASE("soak: contexts, caches and sequences by the hundred leave nothing (G18, P117, P118)") {
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.allocator = host.hooks();
    Rng rng(2);
    uint64_t after_first = 0;
    for (int round = 0; round < 40; ++round) {
        desc.worker_count = static_cast<uint32_t>(rng.below(3));
        desc.transfer_threads = desc.worker_count;
        const Context context = make_context(&desc);
        for (int inner = 0; inner < 4; ++inner) {
            Setup setup = setup_of(context.get(), kinds[rng.below(5)], 1);
            if (setup.policy.kind != SKERRY_POLICY_SEKV && rng.one_in(3)) setup.budget.bytes = 0;
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            std::vector<Stream> streams;
            uint64_t used = 0;
            for (int turn = 0; turn < 12; ++turn) {
                if (streams.size() < 2) {
                    streams.push_back({make_seq(cache.get()), History(rng.next()), 0});
                    grow(runner, streams.back(), static_cast<int32_t>(rng.between(1, 32)));
                } else {
                    REQUIRE(skerry_seq_drop(cache.get(), streams[static_cast<size_t>(rng.below(2))].seq, nullptr) == SKERRY_OK);
                    // One of the two is gone; drop the other as well, whichever it is.
                    for (const Stream &stream : streams)
                        (void)!skerry_seq_drop(cache.get(), stream.seq, nullptr);
                    streams.clear();
                    const skerry_memory_info memory = memory_of(cache.get());
                    CHECK(memory.used_full_bytes + memory.used_quantised_bytes + memory.used_dormant_bytes + memory.used_host_bytes +
                              memory.used_zoom_bytes ==
                          0);
                    if (used == 0) used = memory.allocated_bytes;
                    if (setup.budget.bytes != 0) CHECK(memory.allocated_bytes == used);
                }
            }
        }
        skerry_context_bytes bytes{};
        REQUIRE(skerry_context_get_bytes(context.get(), &bytes, nullptr) == SKERRY_OK);
        CHECK(bytes.cache_bytes == 0);
        CHECK(bytes.context_bytes == host.live_bytes());
        if (desc.worker_count == 0) {
            if (after_first == 0) after_first = host.live_bytes();
            CHECK(host.live_bytes() == after_first);
        }
    }
    CHECK(host.live_count() == 0);
    CHECK(host.mismatches() == 0);
}
