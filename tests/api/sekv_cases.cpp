// What reading from the host promises (SKERRY_POLICY_SEKV): every token can be attended, bytes are bounded, results depend neither on how a
// prompt is cut nor on the time that copies take, and a query finds what it points at.
// T25, T26, T27, T29 and T30 are numbers of the method's list of cases.
// Holds G1, G3, G5, G8, G9, G11, G17, G18, G21.

#include "oracle.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <set>
#include <thread>

using namespace support;

namespace {

void limit(skerry_context *context, Setup &setup, double share, int64_t length) {
    setup.budget.length_tokens = length;
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = std::max(full_cache_bytes(context, setup), minimum);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full - minimum));
}

Setup sekv_setup(skerry_context *context, std::vector<Layer> layers, double share, int64_t length) {
    Setup setup = small_setup(SKERRY_POLICY_SEKV, std::move(layers));
    setup.cache.max_step_tokens = 64;
    limit(context, setup, share, length);
    return setup;
}

Context with_transfers(uint32_t workers, uint32_t threads, skerry_transfer_fn function = nullptr, void *user = nullptr) {
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.worker_count = workers;
    desc.transfer_threads = threads;
    desc.transfer = function;
    desc.transfer_user = user;
    return make_context(&desc);
}

// Windows that the last query of one lane read from the host.
std::set<int64_t> zoomed(skerry_cache *cache, skerry_seq seq, int layer, int head, int64_t sinks, int64_t window) {
    std::set<int64_t> chosen;
    for (const skerry_range &range : ranges_of(cache, seq, layer, head)) {
        if ((range.flags & SKERRY_RANGE_ZOOMED) != 0) chosen.insert((range.begin - sinks) / window);
    }
    return chosen;
}

void check_zooms(const skerry_counters &c) {
    CHECK(c.zooms == c.zooms_present + c.zooms_fetched + c.zooms_late);
    CHECK(c.demotions == c.demotions_written + c.demotions_ledger);
}

skerry_tensor queries_of(const std::vector<float> &rows, const Layer &shape) {
    return tensor(rows.data(), SKERRY_DTYPE_F32,
                  {static_cast<int64_t>(rows.size()) / (shape.query_heads * shape.key_dim), shape.query_heads, shape.key_dim});
}

// Zooms with the queries that the runner is about to attend with.
void zoom(skerry_step *step, const Runner &runner, int layer) {
    const skerry_tensor queries = queries_of(runner.queries(layer), runner.layers()[static_cast<size_t>(layer)]);
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_step_zoom(step, layer, &queries, nullptr, &error) == SKERRY_OK, error.message);
}

// One layer whose numbers a case writes itself.
struct Hand {
    skerry_cache *cache;
    Layer shape;
    skerry_seq seq{};
    int64_t length = 0;
    std::vector<float> keys, values, queries, out;

    Hand(skerry_cache *of, const Layer &layer) : cache(of), shape(layer), seq(make_seq(of)) {}
    void size(int32_t tokens) {
        const auto room = [&](std::vector<float> &rows, int heads, int dim) { rows.resize(static_cast<size_t>(tokens * heads * dim)); };
        room(keys, shape.kv_heads, shape.key_dim);
        room(values, shape.kv_heads, shape.value_dim);
        room(queries, shape.query_heads, shape.key_dim);
        room(out, shape.query_heads, shape.value_dim);
    }
    float *key(int t, int head) { return keys.data() + (t * shape.kv_heads + head) * shape.key_dim; }
    float *value(int t, int head) { return values.data() + (t * shape.kv_heads + head) * shape.value_dim; }
    float *query(int t, int head) { return queries.data() + (t * shape.query_heads + head) * shape.key_dim; }
    void run(int32_t tokens, uint32_t flags = SKERRY_ATTEND_EXACT) {
        skerry_error error = make<skerry_error>();
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = &seq;
        desc.token_counts = &tokens;
        desc.seq_count = 1;
        skerry_step *step = nullptr;
        REQUIRE_MESSAGE(skerry_step_begin(cache, &desc, &step, &error) == SKERRY_OK, error.message);
        const skerry_tensor k = tensor(keys.data(), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.key_dim});
        const skerry_tensor v = tensor(values.data(), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.value_dim});
        const skerry_tensor q = tensor(queries.data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.key_dim});
        const skerry_tensor o = tensor(out.data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.value_dim});
        REQUIRE_MESSAGE(skerry_step_append(step, 0, &k, &v, nullptr, &error) == SKERRY_OK, error.message);
        skerry_attend_desc attend_desc = make<skerry_attend_desc>();
        attend_desc.flags = flags;
        attend_desc.queries = &q;
        attend_desc.out = &o;
        REQUIRE_MESSAGE(skerry_step_attend(step, &attend_desc, &error) == SKERRY_OK, error.message);
        REQUIRE_MESSAGE(skerry_step_commit(step, &error) == SKERRY_OK, error.message);
        length += tokens;
    }
};

// A copy function that sleeps on threads of the library for a time that depends on the bytes' place.
struct Slow {
    std::atomic<int> copies{0}, elsewhere{0};
    std::thread::id caller = std::this_thread::get_id();
    int microseconds = 300;
    static void copy(void *user, void *to, const void *from, size_t bytes) {
        auto *self = static_cast<Slow *>(user);
        const int turn = self->copies.fetch_add(1);
        if (std::this_thread::get_id() != self->caller) {
            self->elsewhere.fetch_add(1);
            std::this_thread::sleep_for(
                std::chrono::microseconds(mix(static_cast<uint64_t>(turn)) % static_cast<uint64_t>(self->microseconds)));
        }
        std::memcpy(to, from, bytes);
    }
};

// A copy function that waits until it is let go on.
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    int inside = 0;
    std::atomic<int> copies{0}, by_caller{0}, gave_up{0};
    std::thread::id caller = std::this_thread::get_id();
    static void copy(void *user, void *to, const void *from, size_t bytes) {
        auto *self = static_cast<Gate *>(user);
        {
            std::unique_lock<std::mutex> lock(self->mutex);
            if (std::this_thread::get_id() == self->caller && !self->open) self->by_caller.fetch_add(1);
            ++self->inside;
            self->changed.notify_all();
            // A test that waits for this copy fails after that time, and does not hang.
            if (!self->changed.wait_for(lock, std::chrono::seconds(10), [&] { return self->open; })) self->gave_up.fetch_add(1);
        }
        std::memcpy(to, from, bytes);
        self->copies.fetch_add(1);
    }
    void set(bool to) {
        const std::lock_guard<std::mutex> lock(mutex);
        open = to;
        changed.notify_all();
    }
};

} // namespace

TEST_CASE("T25: with everything fetched in the store's own numbers, 64 steps equal a cache without compression") {
    for (skerry_dtype store : {SKERRY_DTYPE_F32, SKERRY_DTYPE_F16}) {
        for (int window : {4, 16, 24}) {
            CAPTURE(store);
            CAPTURE(window);
            const Context context = make_context();
            Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
            setup.cache.store_dtype = store;
            setup.cache.max_step_tokens = 64;
            setup.policy.window_tokens = window;
            setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
            setup.sekv.detail_format = store == SKERRY_DTYPE_F32 ? SKERRY_FORMAT_F32 : SKERRY_FORMAT_F16;
            setup.sekv.fetch_ppm = 1000000;
            limit(context.get(), setup, 3.0, 300);
            Setup plain = small_setup(SKERRY_POLICY_FULL, setup.layers);
            plain.cache.store_dtype = store;
            plain.cache.max_step_tokens = 64;
            const Cache cache = make_cache(context.get(), setup), full = make_cache(context.get(), plain);
            Runner a(cache.get(), setup.layers), b(full.get(), setup.layers);
            Stream x{make_seq(cache.get()), History(3), 0}, y{make_seq(full.get()), History(3), 0};
            double worst = 0, worst_lse = 0;
            int64_t listed = 0, wrong = 0;
            StepOptions look;
            look.before_attend = [&](skerry_step *step, int layer) {
                zoom(step, a, layer);
                for (int head = 0; head < 2; ++head) {
                    const Gathered seen = gather(step, setup.layers[0], 0, layer, head);
                    const Gathered source = remember(x.history, setup.layers[0], layer, head, x.length + 1, SKERRY_DTYPE_F32, store);
                    REQUIRE(seen.positions == source.positions);
                    listed += seen.tokens;
                    for (size_t i = 0; i < seen.keys.size(); ++i)
                        wrong += seen.keys[i] != source.keys[i];
                    for (size_t i = 0; i < seen.values.size(); ++i)
                        wrong += seen.values[i] != source.values[i];
                }
            };
            const auto compare_outs = [&] {
                for (size_t layer = 0; layer < 2; ++layer) {
                    double largest = 1e-3;
                    for (float want : b.outs[layer])
                        largest = std::max(largest, std::fabs(double(want)));
                    for (size_t i = 0; i < a.outs[layer].size(); ++i)
                        worst = std::max(worst, std::fabs(double(a.outs[layer][i]) - double(b.outs[layer][i])) / largest);
                    for (size_t i = 0; i < a.lses[layer].size(); ++i)
                        worst_lse = std::max(worst_lse, std::fabs(double(a.lses[layer][i]) - double(b.lses[layer][i])));
                }
            };
            for (int32_t count : {64, 17, 64, 40, 1, 14}) {
                grow(a, x, count);
                grow(b, y, count);
                compare_outs();
            }
            for (int i = 0; i < 64; ++i) {
                grow(a, x, 1, look);
                grow(b, y, 1);
                compare_outs();
            }
            CHECK(worst <= 1e-4);
            CHECK(worst_lse <= 1e-4);
            CHECK(wrong == 0);
            CHECK(listed == 2 * 2 * (200 * 64 + 64 * 65 / 2));
            check_cache(cache.get());
            check_zooms(counters_of(cache.get()));
            const skerry_seq_info info = info_of(cache.get(), x.seq);
            CHECK(info.host_tokens > 4 * 200);
            CHECK(info.evicted_tokens == 0);
            CHECK(info.quantised_tokens == 0);
        }
    }
}

TEST_CASE("attend is attention in double precision over what gather lists, whatever was read from the host (G1, G3)") {
    const Context context = with_transfers(1, 2);
    for (int turn = 0; turn < 6; ++turn) {
        CAPTURE(turn);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, turn % 2 == 0 ? 4 : 2, 32, 16));
        setup.cache.max_step_tokens = 64;
        if (turn == 1) setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        if (turn == 2) setup.sekv.detail_format = SKERRY_FORMAT_R8;
        if (turn == 3) setup.policy.window_tokens = 7;
        if (turn == 4) {
            setup.policy.window_tokens = 20;
            setup.sekv.fetch_ppm = 400000;
        }
        if (turn == 5) setup.layers[1].window = 40;
        limit(context.get(), setup, 0.2, 320);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(11), 0};
        for (int i = 0; i < 4; ++i)
            grow(runner, stream, 50);
        int64_t from_host = 0;
        for (int i = 0; i < 40; ++i) {
            std::vector<std::vector<Gathered>> seen(2);
            StepOptions options;
            options.attend_flags = i % 2 == 0 ? uint32_t(SKERRY_ATTEND_EXACT) : 0u;
            options.after_attend = [&](skerry_step *step, int layer) {
                const Layer &shape = setup.layers[static_cast<size_t>(layer)];
                seen[static_cast<size_t>(layer)] = gather_all(step, shape, 0, layer);
                for (int head = 0; head < shape.kv_heads; ++head) {
                    // The tiers add up, and the parts are the tokens.
                    int32_t tokens = 0;
                    for (uint32_t tier : {SKERRY_TIERS_FULL, SKERRY_TIERS_QUANTISED, SKERRY_TIERS_HOST})
                        tokens += gather(step, shape, 0, layer, head, tier).tokens;
                    CHECK(tokens == seen[static_cast<size_t>(layer)][static_cast<size_t>(head)].tokens);
                    std::vector<skerry_part> parts(256);
                    int32_t needed = 0;
                    REQUIRE(skerry_step_view(step, 0, layer, head, 0, parts.data(), 256, &needed, nullptr) == SKERRY_OK);
                    int64_t last = -1, held = 0;
                    for (int32_t k = 0; k < needed; ++k) {
                        const skerry_part &part = parts[static_cast<size_t>(k)];
                        CHECK(part.position > last);
                        last = part.position + part.tokens - 1;
                        held += part.tokens;
                        if (part.tier != SKERRY_TIER_HOST) continue;
                        from_host += part.tokens;
                        CHECK(part.key_format == (turn == 2 ? SKERRY_FORMAT_R8 : SKERRY_FORMAT_R4));
                    }
                    CHECK(held == tokens);
                }
            };
            const Part part = stream.next(1);
            grow(runner, stream, 1, options);
            for (int layer = 0; layer < 2; ++layer) {
                CAPTURE(layer);
                const Errors errors = compare(runner, layer, seen[static_cast<size_t>(layer)], 0, part);
                CHECK(errors.out <= (options.attend_flags != 0 ? 2e-4 : 2e-2));
                CHECK(errors.lse <= (options.attend_flags != 0 ? 2e-4 : 2e-2));
            }
            check_cache(cache.get());
            check_zooms(counters_of(cache.get()));
        }
        CHECK(from_host > 40 * 4);
    }
}

TEST_CASE("T30: sinks and the last tokens are exact rows at every length") {
    const Context context = make_context();
    Rng rng(5);
    int64_t from_host = 0;
    for (int turn = 0; turn < 8; ++turn) {
        CAPTURE(turn);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 2, 32, 16));
        setup.cache.max_step_tokens = 64;
        setup.cache.store_dtype = turn % 2 == 0 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_F32;
        setup.policy.window_tokens = static_cast<int32_t>(rng.between(2, 20));
        setup.policy.period_tokens = static_cast<int32_t>(rng.between(1, 20));
        setup.policy.recent_tokens = static_cast<int32_t>(rng.between(1, 30));
        setup.policy.sink_tokens = static_cast<int32_t>(rng.between(1, 7));
        setup.policy.score_queries = setup.policy.period_tokens;
        setup.sekv.fetch_ppm = 500000;
        if (turn % 3 == 1) setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        limit(context.get(), setup, 0.1 * turn, 300);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(8), 0};
        while (stream.length < 280) {
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            const int32_t count = static_cast<int32_t>(std::min<int64_t>(rng.one_in(3) ? rng.between(1, 40) : 1, event - stream.length));
            int64_t exact = 0, wrong = 0;
            StepOptions options;
            options.after_attend = [&](skerry_step *step, int layer) {
                for (int head = 0; head < 2; ++head) {
                    const Gathered seen = gather(step, setup.layers[0], 0, layer, head, SKERRY_TIERS_FULL);
                    const Gathered source = remember(stream.history, setup.layers[0], layer, head, stream.length + count, SKERRY_DTYPE_F32,
                                                     setup.cache.store_dtype);
                    std::map<int64_t, size_t> at;
                    for (size_t i = 0; i < seen.positions.size(); ++i)
                        at[seen.positions[i]] = i;
                    for (int64_t p = 0; p < stream.length + count; ++p) {
                        if (p >= setup.policy.sink_tokens && p < stream.length + count - setup.policy.recent_tokens) continue;
                        const auto found = at.find(p);
                        if (found == at.end()) {
                            ++wrong;
                            continue;
                        }
                        ++exact;
                        for (size_t c = 0; c < 32; ++c)
                            wrong += seen.keys[found->second * 32 + c] != source.keys[static_cast<size_t>(p) * 32 + c];
                        for (size_t c = 0; c < 16; ++c)
                            wrong += seen.values[found->second * 16 + c] != source.values[static_cast<size_t>(p) * 16 + c];
                    }
                }
            };
            grow(runner, stream, count, options);
            CHECK(wrong == 0);
            CHECK(exact >= 2 * std::min<int64_t>(stream.length, setup.policy.recent_tokens));
        }
        from_host += info_of(cache.get(), stream.seq).host_tokens;
    }
    CHECK(from_host > 1000);
}

TEST_CASE("a window that the query points at is read from the host, and no other query reads it") {
    constexpr int windows = 61, dim = 64, needle = 23;
    for (bool residents : {false, true}) {
        CAPTURE(residents);
        const Context context = make_context();
        Layer shape;
        shape.kv_heads = 2;
        shape.query_heads = 4;
        shape.key_dim = shape.value_dim = dim;
        Setup setup;
        setup.layers = {shape};
        setup.policy.kind = SKERRY_POLICY_SEKV;
        setup.cache.max_step_tokens = 256;
        setup.sekv.flags = residents ? 0 : SKERRY_SEKV_NO_RESIDENTS;
        setup.sekv.fetch_ppm = 50000;
        limit(context.get(), setup, residents ? 0.05 : 0.15, 1200);
        const Cache cache = make_cache(context.get(), setup);
        Hand hand(cache.get(), shape);
        const int64_t tokens = 4 + 16 * windows + 48;
        std::vector<float> all_keys, all_values;
        const auto direction = [](int c) { return mix(static_cast<uint64_t>(c) + 99) % 2 == 0 ? 1.0f : -1.0f; };
        const auto rows = [&](int64_t from, int32_t count) {
            hand.size(count);
            for (int t = 0; t < count; ++t) {
                const int64_t p = from + t;
                const bool planted = p >= 4 + 16 * needle && p < 4 + 16 * (needle + 1);
                for (int head = 0; head < 2; ++head) {
                    fill_row(hand.key(t, head), 5, Kind::value, 0, head, p, dim); // no channel stands out
                    fill_row(hand.value(t, head), 6, Kind::value, 0, head, p, dim);
                    for (int c = 0; c < dim; ++c) {
                        hand.key(t, head)[c] = hand.key(t, head)[c] * 0.4f + (planted ? 1.5f * direction(c) : 0.0f);
                        hand.value(t, head)[c] = hand.value(t, head)[c] * 0.2f + (planted ? 1.0f : 0.0f);
                    }
                }
                for (int head = 0; head < 4; ++head)
                    fill_row(hand.query(t, head), 7, Kind::query, 0, head, p, dim);
            }
        };
        while (hand.length < tokens) {
            const int32_t count = static_cast<int32_t>(std::min<int64_t>(200, tokens - hand.length));
            rows(hand.length, count);
            all_keys.insert(all_keys.end(), hand.keys.begin(), hand.keys.end());
            all_values.insert(all_values.end(), hand.values.begin(), hand.values.end());
            hand.run(count);
        }
        // Not what the device holds anyway.
        bool resident = false;
        for (const skerry_range &range : ranges_of(cache.get(), hand.seq, 0, 0))
            resident = resident || (range.begin == 4 + 16 * needle && range.tier == SKERRY_TIER_FULL);
        REQUIRE(!resident);
        int found = 0, falsely = 0;
        for (int probe = 0; probe < 10; ++probe) {
            rows(hand.length, 1);
            // Heads of KV head 0 point at the window or away from it by turns; those of KV head 1 the other way round.
            for (int head = 0; head < 4; ++head) {
                const bool towards = (probe % 2 == 0) == (head < 2);
                for (int c = 0; c < dim; ++c)
                    hand.query(0, head)[c] = hand.query(0, head)[c] * 0.2f + (towards ? 1.5f : -1.5f) * direction(c);
            }
            all_keys.insert(all_keys.end(), hand.keys.begin(), hand.keys.end());
            all_values.insert(all_values.end(), hand.values.begin(), hand.values.end());
            hand.run(1);
            for (int head = 0; head < 2; ++head) {
                const bool towards = (probe % 2 == 0) == (head == 0);
                const std::set<int64_t> chosen = zoomed(cache.get(), hand.seq, 0, head, 4, 16);
                CHECK(chosen.size() <= 4); // 5 % of 64
                CHECK(chosen.size() >= 3);
                (towards ? found : falsely) += static_cast<int>(chosen.count(needle));
                if (!towards) continue;
                // Against attention over everything.
                Gathered source;
                source.tokens = static_cast<int32_t>(hand.length);
                for (int64_t p = 0; p < hand.length; ++p) {
                    const float *key = all_keys.data() + (p * 2 + head) * dim;
                    const float *value = all_values.data() + (p * 2 + head) * dim;
                    source.keys.insert(source.keys.end(), key, key + dim);
                    source.values.insert(source.values.end(), value, value + dim);
                    source.positions.push_back(p);
                    source.bias.push_back(0);
                }
                for (int g = 0; g < 2; ++g) {
                    const Attended wanted = attend(source, shape, hand.query(0, head * 2 + g), hand.length - 1);
                    CHECK(row_error(hand.out.data() + (head * 2 + g) * dim, wanted.out) < 0.08);
                    CHECK(hand.out[static_cast<size_t>((head * 2 + g) * dim)] > 0.8f);
                }
            }
        }
        CHECK(found == 10);
        CHECK(falsely == 0);
    }
}

TEST_CASE("fetch_ppm is how many windows a query reads; more of them bring more") {
    const Context context = make_context();
    double error_before = 1e9;
    for (uint32_t ppm : {10000u, 60000u, 250000u, 1000000u}) {
        CAPTURE(ppm);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 32));
        setup.cache.max_step_tokens = 64;
        setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        setup.sekv.detail_format = SKERRY_FORMAT_R8;
        setup.sekv.fetch_ppm = ppm;
        limit(context.get(), setup, 1.5, 320);
        const Cache cache = make_cache(context.get(), setup);
        skerry_plan_info plan = make<skerry_plan_info>();
        REQUIRE(skerry_cache_get_plan(cache.get(), &plan, nullptr) == SKERRY_OK);
        CHECK(plan.fetch_ppm == ppm);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(4), 0};
        for (int i = 0; i < 5; ++i)
            grow(runner, stream, 50);
        double sum = 0;
        for (int i = 0; i < 32; ++i) {
            // A query sees the windows that had left when its step began.
            int64_t windows = 0;
            for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0))
                windows += (range.flags & SKERRY_RANGE_DETAIL) != 0;
            const Part part = stream.next(1);
            grow(runner, stream, 1);
            const int64_t wanted = (windows * ppm + 999999) / 1000000;
            for (int head = 0; head < 2; ++head) {
                const size_t count = zoomed(cache.get(), stream.seq, 0, head, 2, 4).size();
                CHECK(static_cast<int64_t>(count) == std::min<int64_t>(wanted, plan.fetch_windows));
            }
            std::vector<Gathered> seen;
            for (int head = 0; head < 2; ++head)
                seen.push_back(remember(stream.history, setup.layers[0], 0, head, stream.length, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32));
            sum += compare(runner, 0, seen, 0, part).out;
        }
        CHECK(sum < error_before);
        error_before = sum;
    }
    CHECK(error_before / 32 < 0.03); // all of it, in 8 bits
}

TEST_CASE("hysteresis keeps what was chosen; refine_ppm says what a low-bit record is worth") {
    const Context context = make_context();
    // How often a chosen window is let go at the next position, by factor.
    std::vector<int> dropped;
    for (uint32_t factor : {1000000u, 4000000u, 1000000000u}) {
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 32));
        setup.cache.max_step_tokens = 64;
        setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        setup.sekv.hysteresis_ppm = factor;
        limit(context.get(), setup, 0.4, 320);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(4), 0};
        for (int i = 0; i < 5; ++i)
            grow(runner, stream, 50);
        int count = 0;
        std::set<int64_t> before[2];
        for (int i = 0; i < 40; ++i) {
            grow(runner, stream, 1);
            for (int head = 0; head < 2; ++head) {
                const std::set<int64_t> now = zoomed(cache.get(), stream.seq, 0, head, 2, 4);
                for (int64_t window : before[head])
                    count += now.count(window) == 0;
                before[head] = now;
            }
        }
        dropped.push_back(count);
    }
    CHECK(dropped[0] > 40);
    CHECK(dropped[1] < dropped[0]);
    CHECK(dropped[2] * 10 < dropped[0]);

    std::vector<int> refined;
    for (uint32_t ppm : {1u, 1000000u}) {
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 32));
        setup.cache.max_step_tokens = 64;
        setup.sekv.refine_ppm = ppm;
        limit(context.get(), setup, 0.16, 320);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(4), 0};
        for (int i = 0; i < 5; ++i)
            grow(runner, stream, 50);
        int quantised = 0, absent = 0, low = 0, away = 0;
        for (int i = 0; i < 12; ++i) {
            grow(runner, stream, 1);
            for (int head = 0; head < 2; ++head) {
                for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, head)) {
                    const bool is_low = range.tier == SKERRY_TIER_QUANTISED, is_away = range.tier == SKERRY_TIER_HOST;
                    low += is_low;
                    away += is_away;
                    if ((range.flags & SKERRY_RANGE_ZOOMED) == 0) continue;
                    quantised += is_low;
                    absent += is_away;
                    CHECK((range.flags & SKERRY_RANGE_DETAIL) != 0);
                    CHECK(range.tier != SKERRY_TIER_FULL);
                }
            }
        }
        CHECK(low > 0); // there were windows of both kinds to choose from
        CHECK(away > 2 * 12 * 10);
        CHECK(absent > 0);
        refined.push_back(quantised);
    }
    CHECK(refined[0] == 0);
    CHECK(refined[1] > 0);
}

TEST_CASE("T26: bytes are what was planned and allocated, and stay within budget, staging and host_bytes") {
    Rng rng(31);
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.allocator = host.hooks();
    desc.transfer_threads = 1;
    const Context context = make_context(&desc);
    int zooming = 0, refusing = 0, degraded = 0;
    for (int turn = 0; turn < 40; ++turn) {
        CAPTURE(turn);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(static_cast<int>(rng.between(1, 2)), 2, 4, 32, rng.one_in(2) ? 16 : 32));
        setup.cache.store_dtype = rng.one_in(2) ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_F32;
        setup.cache.max_sequences = static_cast<int32_t>(rng.between(1, 3));
        setup.cache.max_step_tokens = 40;
        setup.policy.window_tokens = static_cast<int32_t>(rng.between(3, 18));
        setup.policy.prefill = rng.one_in(3) ? SKERRY_PREFILL_WHOLE : SKERRY_PREFILL_SPLIT;
        setup.cache.staging_tokens = 150;
        setup.sekv.fetch_ppm = static_cast<uint32_t>(rng.between(1, 500000));
        setup.sekv.keep_windows = static_cast<int32_t>(rng.between(0, 5));
        if (rng.one_in(3)) setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        setup.budget.length_tokens = 250;
        const uint64_t minimum = minimum_bytes(context.get(), setup);
        const uint64_t most = std::max(full_cache_bytes(context.get(), setup), minimum) - minimum;
        setup.budget.bytes = minimum + (turn % 4 == 0 ? static_cast<uint64_t>(rng.below(400)) : rng.next() % (most + 1));
        if (turn % 5 == 2) setup.budget.host_bytes = static_cast<uint64_t>(rng.between(1, 40000));
        const uint64_t before = host.live_bytes();
        const Cache cache = make_cache(context.get(), setup);
        skerry_plan_info plan = make<skerry_plan_info>();
        REQUIRE(skerry_cache_get_plan(cache.get(), &plan, nullptr) == SKERRY_OK);
        const skerry_plan_info asked = plan_of(context.get(), setup);
        CHECK(same_bytes(&plan, &asked, sizeof plan));
        CHECK(plan.planned_bytes <= plan.budget_bytes);
        if (setup.budget.host_bytes != 0) CHECK(plan.host_bytes <= setup.budget.host_bytes);
        CHECK(plan.zoom_bytes <= plan.pool_bytes);
        CHECK(plan.router_bytes <= plan.table_bytes);
        if (plan.host_windows == 0) CHECK(plan.host_bytes == 0);
        const uint64_t requests = host.requests();
        Runner runner(cache.get(), setup.layers);
        std::vector<Stream> streams;
        for (int round = 0; round < 60; ++round) {
            const int64_t what = rng.below(10);
            if (streams.empty() || (what == 0 && streams.size() < static_cast<size_t>(setup.cache.max_sequences))) {
                streams.push_back({make_seq(cache.get()), History(rng.next()), 0});
            } else if (what == 1) {
                REQUIRE(skerry_seq_drop(cache.get(), streams.back().seq, nullptr) == SKERRY_OK);
                streams.pop_back();
                continue;
            } else if (what == 2 && streams.size() < static_cast<size_t>(setup.cache.max_sequences)) {
                Stream child = streams[0];
                skerry_error error = make<skerry_error>();
                REQUIRE_MESSAGE(skerry_seq_fork(cache.get(), streams[0].seq, -1, &child.seq, &error) == SKERRY_OK, error.message);
                child.history.turn(child.length, rng.next());
                streams.push_back(child);
            }
            Stream &stream = streams[static_cast<size_t>(rng.below(static_cast<int64_t>(streams.size())))];
            const int32_t count = static_cast<int32_t>(rng.one_in(3) ? rng.between(1, 40) : rng.between(1, 3));
            if (stream.length + count <= 240) grow(runner, stream, count);
            const skerry_memory_info memory = memory_of(cache.get());
            CHECK(memory.pool_bytes == plan.pool_bytes);
            CHECK(memory.table_bytes == plan.table_bytes);
            CHECK(memory.staging_bytes == plan.staging_bytes);
            CHECK(memory.host_bytes == plan.host_bytes);
            CHECK(memory.used_host_bytes <= memory.host_bytes);
            CHECK(memory.used_zoom_bytes <= plan.zoom_bytes + plan.staging_bytes);
            CHECK(memory.allocated_bytes == memory.pool_bytes + memory.table_bytes + memory.staging_bytes + memory.exact_bytes +
                                                memory.fixed_bytes + memory.host_bytes);
            CHECK(memory.allocated_bytes == host.live_bytes() - before);
            CHECK(memory.peak_bytes <= plan.budget_bytes + plan.staging_bytes + plan.host_bytes + 2 * memory.fixed_bytes);
        }
        CHECK(host.requests() == requests); // no step allocates
        check_cache(cache.get());
        const skerry_counters counters = counters_of(cache.get());
        check_zooms(counters);
        zooming += counters.zooms > 0;
        refusing += counters.details_refused > 0;
        degraded += plan.host_windows == 0 || plan.fetch_windows * 1000000ll < int64_t{plan.host_windows} * setup.sekv.fetch_ppm;
        for (const Stream &stream : streams)
            REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
        const skerry_memory_info end = memory_of(cache.get());
        CHECK(end.used_host_bytes == 0);
        CHECK(end.used_zoom_bytes == 0);
    }
    CHECK(zooming > 10);
    CHECK(refusing > 3);
    CHECK(degraded > 3);
}

TEST_CASE("T26: with a host tier that is full, windows go as they would without one, and are counted") {
    const Context context = make_context();
    Setup setup = sekv_setup(context.get(), layers_of(1, 2, 4, 32, 16), 0.15, 320);
    const skerry_plan_info roomy = plan_of(context.get(), setup);
    REQUIRE(roomy.host_windows > 40);
    setup.budget.host_bytes = roomy.host_bytes / 4;
    const skerry_plan_info plan = plan_of(context.get(), setup);
    CHECK(plan.host_windows >= roomy.host_windows / 4 - 1);
    CHECK(plan.host_windows <= roomy.host_windows / 4);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(4), 0};
    for (int i = 0; i < 6; ++i)
        grow(runner, stream, 50);
    const skerry_counters counters = counters_of(cache.get());
    CHECK(counters.details_written == static_cast<uint64_t>(2 * plan.host_windows));
    CHECK(counters.details_refused > 0);
    CHECK(counters.evictions > 0);
    for (int head = 0; head < 2; ++head) {
        int64_t with_detail = 0, left = 0;
        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, head)) {
            const int64_t window = (range.begin - 2) / 4;
            if ((range.flags & SKERRY_RANGE_DETAIL) != 0) {
                ++with_detail;
                CHECK(window < plan.host_windows);
            } else if (range.begin >= 2) {
                CHECK(window >= plan.host_windows);
            }
            if (range.end <= stream.length - 4 - 4) left += (range.end - range.begin) / 4;
        }
        CHECK(with_detail == plan.host_windows);
        // Every window that left the recent region has detail or was refused.
        CHECK(static_cast<int64_t>(counters.details_refused) / 2 + plan.host_windows >= left);
        CHECK(static_cast<int64_t>(counters.details_refused) / 2 + plan.host_windows <= (stream.length - 2) / 4);
    }
    CHECK(info_of(cache.get(), stream.seq).evicted_tokens > 0);
    check_cache(cache.get());

    // Too little for one window: the ladder alone.
    setup.budget.host_bytes = 1;
    const skerry_plan_info none = plan_of(context.get(), setup);
    CHECK(none.host_windows == 0);
    CHECK(none.host_bytes == 0);
    CHECK(none.zoom_bytes == 0);
    const Cache bare = make_cache(context.get(), setup);
    Runner alone(bare.get(), setup.layers);
    Stream other{make_seq(bare.get()), History(4), 0};
    for (int i = 0; i < 6; ++i)
        grow(alone, other, 50);
    CHECK(counters_of(bare.get()).zooms == 0);
    CHECK(counters_of(bare.get()).details_written == 0);
    CHECK(counters_of(bare.get()).details_refused == counters.details_refused + counters.details_written);
    CHECK(info_of(bare.get(), other.seq).host_tokens == 0);
}

TEST_CASE("T27, T29: cuts of the prompt, workers, transfer threads and slow copies change no bit") {
    struct Way {
        uint32_t workers, threads;
        bool slow;
        int cut;
        int32_t keep; // without residents, what stays on the device decides nothing
    };
    const Way ways[] = {{0, 0, false, 64, 0}, {0, 0, false, 64, 0}, {1, 1, false, 7, 3},  {3, 4, false, 1, 12},
                        {0, 1, true, 64, 5},  {3, 2, true, 13, 12}, {1, 2, false, 64, 0}, {0, 4, true, 31, 40}};
    for (uint32_t flags : {0u, uint32_t(SKERRY_SEKV_NO_RESIDENTS)}) {
        CAPTURE(flags);
        uint64_t wanted = 0;
        std::vector<float> wanted_outs;
        bool first = true;
        for (const Way &way : ways) {
            CAPTURE(way.workers);
            CAPTURE(way.threads);
            CAPTURE(way.cut);
            Slow slow;
            const Context context = with_transfers(way.workers, way.threads, way.slow ? &Slow::copy : nullptr, &slow);
            Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
            setup.cache.max_step_tokens = 64;
            setup.sekv.flags = flags;
            setup.sekv.keep_windows = flags != 0 ? way.keep : 6;
            limit(context.get(), setup, 0.25, 320);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            Stream stream{make_seq(cache.get()), History(14), 0};
            std::vector<float> outs;
            while (stream.length < 256) {
                grow(runner, stream, static_cast<int32_t>(std::min<int64_t>(way.cut, 256 - stream.length)));
                outs.insert(outs.end(), runner.outs[0].begin(), runner.outs[0].end());
            }
            for (int i = 0; i < 40; ++i) {
                grow(runner, stream, 1);
                outs.insert(outs.end(), runner.outs[1].begin(), runner.outs[1].end());
            }
            check_cache(cache.get());
            const skerry_counters counters = counters_of(cache.get());
            check_zooms(counters);
            CHECK(counters.zooms_late == 0);
            CHECK(counters.zooms_fetched > 0);
            const uint64_t slot = counters.detail_bytes_written / counters.details_written;
            CHECK(counters.fetched_bytes == (counters.zooms_fetched + counters.prefetches) * slot);
            if (way.slow) CHECK(slow.copies > 0);
            const uint64_t fingerprint = fingerprint_of(cache.get(), stream.seq);
            if (first) {
                wanted = fingerprint;
                wanted_outs = outs;
                first = false;
            }
            CHECK(fingerprint == wanted);
            CHECK(outs == wanted_outs);
        }
    }
}

TEST_CASE("T29: a step that was given up and one that was repeated leave no trace in what later queries read") {
    const Context context = with_transfers(0, 1);
    Setup setup = sekv_setup(context.get(), layers_of(1, 2, 4, 32, 16), 0.2, 320);
    const Cache disturbed = make_cache(context.get(), setup), calm = make_cache(context.get(), setup);
    Runner a(disturbed.get(), setup.layers), b(calm.get(), setup.layers);
    Stream x{make_seq(disturbed.get()), History(5), 0}, y{make_seq(calm.get()), History(5), 0};
    for (int i = 0; i < 4; ++i) {
        grow(a, x, 50);
        grow(b, y, 50);
    }
    for (int round = 0; round < 30; ++round) {
        // The same position with other queries, several times over: more windows are wanted at it than there are slots.
        for (uint64_t other = 0; other < 4; ++other) {
            History elsewhere(700 + other);
            StepOptions open;
            open.commit = false;
            REQUIRE_MESSAGE(a.step({{x.seq, &elsewhere, x.length, 1}}, open) == SKERRY_OK, a.error.message);
            skerry_step_abort(a.open);
        }
        // A look with other queries that does not count.
        StepOptions looks;
        looks.before_attend = [&](skerry_step *step, int layer) {
            for (uint64_t other = 0; other < 4; ++other) {
                std::vector<float> rows(4 * 32), out(4 * 16);
                for (int head = 0; head < 4; ++head)
                    fill_row(rows.data() + head * 32, 900 + other, Kind::query, layer, head, x.length, 32);
                const skerry_tensor queries = queries_of(rows, setup.layers[0]), result = tensor(out.data(), SKERRY_DTYPE_F32, {1, 4, 16});
                skerry_attend_desc desc = make<skerry_attend_desc>();
                desc.flags = SKERRY_ATTEND_NO_SCORE;
                desc.queries = &queries;
                desc.out = &result;
                desc.layer = layer;
                REQUIRE(skerry_step_attend(step, &desc, nullptr) == SKERRY_OK);
            }
        };
        grow(a, x, 1, round % 2 == 0 ? looks : StepOptions{});
        grow(b, y, 1);
        CHECK(a.outs == b.outs);
        CHECK(fingerprint_of(disturbed.get(), x.seq) == fingerprint_of(calm.get(), y.seq));
        check_cache(disturbed.get());
    }
    CHECK(counters_of(disturbed.get()).zooms_late == 0);
    CHECK(counters_of(calm.get()).zooms_late == 0);
}

TEST_CASE("T29: sequences that go while copies are on their way give their slots back") {
    Rng rng(77);
    for (uint32_t threads : {1u, 3u}) {
        Slow slow;
        slow.microseconds = 3000;
        const Context context = with_transfers(0, threads, &Slow::copy, &slow);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 16));
        setup.cache.max_sequences = 3;
        setup.cache.max_step_tokens = 64;
        setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
        setup.sekv.keep_windows = 20;
        limit(context.get(), setup, 0.8, 300);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        for (int round = 0; round < 8; ++round) {
            CAPTURE(round);
            Stream stream{make_seq(cache.get()), History(static_cast<uint64_t>(round)), 0};
            for (int i = 0; i < 3; ++i)
                grow(runner, stream, 60);
            decode(runner, stream, 2);
            CHECK(memory_of(cache.get()).used_zoom_bytes > 0);
            if (round % 4 == 0) { // drop
                REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
                CHECK(memory_of(cache.get()).used_zoom_bytes == 0);
                CHECK(memory_of(cache.get()).used_host_bytes == 0);
                check_cache(cache.get());
                continue;
            }
            if (round % 4 == 1) { // emptied, and grown anew
                REQUIRE(skerry_seq_truncate(cache.get(), stream.seq, 0, nullptr) == SKERRY_OK);
                check_cache(cache.get());
                CHECK(memory_of(cache.get()).used_host_bytes == 0);
                stream.length = 0;
                for (int i = 0; i < 3; ++i)
                    grow(runner, stream, 60);
                decode(runner, stream, 3);
            }
            if (round % 4 == 2) { // a step across events, given up
                StepOptions open;
                open.commit = false;
                const uint64_t before = fingerprint_of(cache.get(), stream.seq);
                REQUIRE(runner.step({stream.next(40)}, open) == SKERRY_OK);
                skerry_step_abort(runner.open);
                check_cache(cache.get());
                CHECK(fingerprint_of(cache.get(), stream.seq) == before);
            }
            if (round % 4 == 3) { // forks that outlive the parent
                Stream child = stream;
                REQUIRE(skerry_seq_fork(cache.get(), stream.seq, -1, &child.seq, nullptr) == SKERRY_OK);
                check_cache(cache.get());
                decode(runner, child, 1);
                REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
                check_cache(cache.get());
                decode(runner, child, 3);
                stream = child;
            }
            check_cache(cache.get());
            REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
            CHECK(memory_of(cache.get()).used_zoom_bytes == 0);
            CHECK(memory_of(cache.get()).used_host_bytes == 0);
            check_cache(cache.get());
        }
        CHECK(slow.copies > 0);
        // And a cache that goes while copies are on their way.
        Stream stream{make_seq(cache.get()), History(9), 0};
        for (int i = 0; i < 3; ++i)
            grow(runner, stream, 60);
        decode(runner, stream, 2);
    }
}

TEST_CASE("T29: with SKIP a query never waits, what has not arrived is counted, and the step goes on with one list") {
    for (uint32_t flags : {0u, uint32_t(SKERRY_SEKV_NO_RESIDENTS)}) {
        CAPTURE(flags);
        Gate gate;
        const Context context = with_transfers(0, 2, &Gate::copy, &gate);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 16));
        setup.cache.max_step_tokens = 64;
        setup.sekv.flags = flags;
        setup.sekv.miss = SKERRY_ZOOM_SKIP;
        limit(context.get(), setup, 0.25, 320);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(5), 0};
        const auto compare_listed = [&](const StepOptions &given, bool closed) {
            StepOptions options = given;
            std::vector<Gathered> seen;
            int32_t from_host = 0;
            options.attend_flags = SKERRY_ATTEND_EXACT;
            options.after_attend = [&](skerry_step *step, int layer) {
                seen = gather_all(step, setup.layers[0], 0, layer);
                for (int head = 0; head < 2; ++head)
                    from_host += gather(step, setup.layers[0], 0, layer, head, SKERRY_TIERS_HOST).tokens;
            };
            const Part part = stream.next(1);
            grow(runner, stream, 1, options);
            const Errors errors = compare(runner, 0, seen, 0, part);
            CHECK(errors.out <= 2e-4);
            CHECK(errors.lse <= 2e-4);
            if (closed) CHECK(from_host == 0);
            return from_host;
        };
        // Nothing arrives: the queries of a whole prompt, and more copies than the queue holds.
        for (int i = 0; i < 4; ++i)
            grow(runner, stream, 50);
        for (int i = 0; i < 40; ++i)
            compare_listed({}, true);
        const skerry_counters closed = counters_of(cache.get());
        check_zooms(closed);
        CHECK(closed.zooms > 100);
        CHECK(closed.zooms_late == closed.zooms);
        CHECK(gate.by_caller == 0);
        CHECK(gate.gave_up == 0);
        CHECK(gate.copies == 0);
        check_cache(cache.get());

        // What arrives between a choice and a look changes nothing in that step.
        StepOptions own;
        own.attend = false;
        own.after_attend = [&](skerry_step *step, int layer) {
            zoom(step, runner, layer);
            const std::vector<Gathered> before = gather_all(step, setup.layers[0], 0, layer);
            gate.set(true);
            for (int i = 0; i < 20000 && gate.copies < 2; ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (int head = 0; head < 2; ++head) {
                const Gathered after = gather(step, setup.layers[0], 0, layer, head);
                const Gathered &seen = before[static_cast<size_t>(head)];
                CHECK(after.positions == seen.positions);
                CHECK(after.keys == seen.keys);
                const std::vector<float> masses(static_cast<size_t>(after.tokens), 1.0f / static_cast<float>(after.tokens));
                skerry_observe_desc desc = make<skerry_observe_desc>();
                desc.masses = masses.data();
                desc.layer = layer;
                desc.kv_head = head;
                desc.token_count = seen.tokens;
                skerry_error error = make<skerry_error>();
                CHECK_MESSAGE(skerry_step_observe(step, &desc, &error) == SKERRY_OK, error.message);
            }
        };
        grow(runner, stream, 1, own);
        CHECK(gate.copies >= 2);

        // With time to arrive, what is wanted again is there.
        int32_t arrived = 0;
        for (int i = 0; i < 20; ++i) {
            arrived += compare_listed({}, false);
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
        CHECK(arrived > 0);
        const skerry_counters open = counters_of(cache.get());
        check_zooms(open);
        CHECK(open.zooms_present > 0);
        check_cache(cache.get());
        gate.set(true);
    }
}

TEST_CASE("zoom: a host that attends itself stores the same detail and moves the same windows") {
    const Context context = with_transfers(0, 1);
    for (uint32_t flags : {0u, uint32_t(SKERRY_SEKV_NO_RESIDENTS)}) {
        CAPTURE(flags);
        Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
        setup.sekv.flags = flags;
        limit(context.get(), setup, 0.25, 240);
        const Cache library = make_cache(context.get(), setup), own = make_cache(context.get(), setup);
        Runner a(library.get(), setup.layers), b(own.get(), setup.layers);
        Stream x{make_seq(library.get()), History(8), 0}, y{make_seq(own.get()), History(8), 0};
        StepOptions exact;
        exact.attend_flags = SKERRY_ATTEND_EXACT;
        StepOptions options;
        options.attend = false;
        options.after_attend = [&](skerry_step *step, int layer) {
            const Layer &shape = setup.layers[static_cast<size_t>(layer)];
            zoom(step, b, layer);
            for (int head = 0; head < shape.kv_heads; ++head) {
                const Gathered seen = gather(step, shape, 0, layer, head);
                std::vector<float> masses(seen.positions.size());
                for (int g = 0; g < shape.group(); ++g) {
                    const float *query = b.queries(layer).data() + (head * shape.group() + g) * shape.key_dim;
                    const Attended row = attend(seen, shape, query, y.length);
                    for (size_t i = 0; i < row.masses.size(); ++i)
                        masses[i] += static_cast<float>(row.masses[i] / shape.group());
                }
                const skerry_tensor queries = tensor(b.queries(layer).data() + head * shape.group() * shape.key_dim, SKERRY_DTYPE_F32,
                                                     {1, shape.group(), shape.key_dim});
                skerry_observe_desc desc = make<skerry_observe_desc>();
                desc.queries = &queries;
                desc.masses = masses.data();
                desc.token_count = seen.tokens;
                desc.layer = layer;
                desc.kv_head = head;
                skerry_error error = make<skerry_error>();
                REQUIRE_MESSAGE(skerry_step_observe(step, &desc, &error) == SKERRY_OK, error.message);
            }
        };
        int64_t windows = 0, different = 0, choices = 0, other_choices = 0;
        while (x.length < 220) {
            grow(a, x, 1, exact);
            grow(b, y, 1, options);
            for (int layer = 0; layer < 2; ++layer) {
                for (int head = 0; head < 2; ++head) {
                    const std::set<int64_t> p = zoomed(library.get(), x.seq, layer, head, 2, 4),
                                            q = zoomed(own.get(), y.seq, layer, head, 2, 4);
                    choices += static_cast<int64_t>(p.size());
                    for (int64_t window : p)
                        other_choices += q.count(window) == 0;
                    CHECK(p.size() == q.size());
                }
            }
        }
        for (int layer = 0; layer < 2; ++layer) {
            for (int head = 0; head < 2; ++head) {
                const auto by_window = [&](skerry_cache *cache, skerry_seq seq) {
                    std::map<int64_t, skerry_range> all;
                    for (const skerry_range &range : ranges_of(cache, seq, layer, head))
                        all[range.begin] = range;
                    return all;
                };
                const auto p = by_window(library.get(), x.seq), q = by_window(own.get(), y.seq);
                REQUIRE(p.size() == q.size());
                for (const auto &[begin, range] : p) {
                    const skerry_range &there = q.at(begin);
                    ++windows;
                    different += range.tier != there.tier;
                    CHECK((range.flags & SKERRY_RANGE_DETAIL) == (there.flags & SKERRY_RANGE_DETAIL));
                }
            }
        }
        CHECK(choices > 500);
        // Near-equal scores may fall the other way by rounding, and what is resident decides what is worth reading; no more than that.
        CHECK(different * 50 <= windows);
        CHECK(other_choices * 50 <= choices);
        if (flags != 0) CHECK(different + other_choices == 0); // nothing but the queries decides
        if (flags != 0) CHECK(counters_of(library.get()).zooms == counters_of(own.get()).zooms);
        CHECK(counters_of(library.get()).details_written == counters_of(own.get()).details_written);
        if (flags != 0) {
            // Detail is coded from the same tokens and the same statistics of queries: bit for bit the same.
            std::vector<Gathered> seen[2];
            for (int side = 0; side < 2; ++side) {
                Runner &runner = side == 0 ? a : b;
                Stream &stream = side == 0 ? x : y;
                StepOptions look;
                look.attend = look.commit = false;
                look.after_attend = [&](skerry_step *step, int layer) {
                    zoom(step, runner, layer);
                    for (int head = 0; head < 2; ++head)
                        seen[side].push_back(gather(step, setup.layers[0], 0, layer, head, SKERRY_TIERS_HOST));
                };
                grow(runner, stream, 1, look);
                skerry_step_abort(runner.open);
            }
            for (size_t lane = 0; lane < 4; ++lane) {
                CHECK(seen[0][lane].tokens > 0);
                CHECK(seen[0][lane].positions == seen[1][lane].positions);
                CHECK(seen[0][lane].keys == seen[1][lane].keys);
                CHECK(seen[0][lane].values == seen[1][lane].values);
            }
        }
        check_cache(own.get());
    }
}

TEST_CASE("zoom: layers that share a cache choose each for themselves, and cuts change nothing (T27)") {
    const Context context = with_transfers(0, 1);
    std::vector<Layer> layers = layers_of(3, 2, 4, 32, 16);
    layers[1].shared_with = 0;
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers);
    setup.policy.period_tokens = 8;
    setup.policy.score_queries = 16;
    limit(context.get(), setup, 0.3, 260);
    std::vector<float> wanted;
    uint64_t fingerprint = 0;
    for (int32_t most : {1, 3, 8}) {
        CAPTURE(most);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(6), 0};
        std::vector<float> outs;
        while (stream.length < 240) {
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            const int32_t count = static_cast<int32_t>(std::min<int64_t>({most, event - stream.length, 240 - stream.length}));
            grow(runner, stream, count);
            outs.insert(outs.end(), runner.outs[1].begin(), runner.outs[1].end());
        }
        CHECK(counters_of(cache.get()).zooms_late == 0);
        check_zooms(counters_of(cache.get()));
        check_cache(cache.get());
        if (most == 1) {
            wanted = outs;
            fingerprint = fingerprint_of(cache.get(), stream.seq);
        }
        CHECK(outs == wanted);
        CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint);
    }
}

TEST_CASE("zoom: a layer that shares a cache reads what its own queries want (G1)") {
    const Context context = make_context();
    std::vector<Layer> layers = layers_of(2, 2, 4, 32, 16);
    layers[1].shared_with = 0;
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers);
    setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
    setup.sekv.hysteresis_ppm = 1000000;
    limit(context.get(), setup, 0.3, 260);
    // Twin: the second layer's queries as those of a first one.
    Setup single = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 16));
    single.sekv = setup.sekv;
    limit(context.get(), single, 0.3, 260);
    single.budget.bytes = setup.budget.bytes;
    const Cache cache = make_cache(context.get(), setup), other = make_cache(context.get(), single);
    const auto run = [&](skerry_cache *at, int count_of_layers, std::vector<std::vector<float>> &outs) {
        const skerry_seq seq = make_seq(at);
        for (int64_t p = 0; p < 200; ++p) {
            std::vector<float> key(64), value(32), query(128), out(64);
            for (int head = 0; head < 2; ++head) {
                fill_row(key.data() + head * 32, 3, Kind::key, 0, head, p, 32);
                fill_row(value.data() + head * 16, 3, Kind::value, 0, head, p, 16);
            }
            const int32_t one = 1;
            skerry_step_desc desc = make<skerry_step_desc>();
            desc.seqs = &seq;
            desc.token_counts = &one;
            desc.seq_count = 1;
            skerry_step *step = nullptr;
            REQUIRE(skerry_step_begin(at, &desc, &step, nullptr) == SKERRY_OK);
            const skerry_tensor k = tensor(key.data(), SKERRY_DTYPE_F32, {1, 2, 32}),
                                v = tensor(value.data(), SKERRY_DTYPE_F32, {1, 2, 16});
            REQUIRE(skerry_step_append(step, 0, &k, &v, nullptr, nullptr) == SKERRY_OK);
            for (int layer = 0; layer < 2; ++layer) {
                if (layer >= count_of_layers && p < 60) continue; // the twin has one layer: both looks go to it
                for (int head = 0; head < 4; ++head)
                    fill_row(query.data() + head * 32, 3, Kind::query, layer, head, p, 32);
                const skerry_tensor q = tensor(query.data(), SKERRY_DTYPE_F32, {1, 4, 32}),
                                    o = tensor(out.data(), SKERRY_DTYPE_F32, {1, 4, 16});
                skerry_attend_desc attend_desc = make<skerry_attend_desc>();
                attend_desc.flags = SKERRY_ATTEND_EXACT | (layer == 0 ? 0 : SKERRY_ATTEND_NO_SCORE);
                attend_desc.queries = &q;
                attend_desc.out = &o;
                attend_desc.layer = std::min(layer, count_of_layers - 1);
                REQUIRE(skerry_step_attend(step, &attend_desc, nullptr) == SKERRY_OK);
                if (p >= 60) outs.push_back(out);
            }
            REQUIRE(skerry_step_commit(step, nullptr) == SKERRY_OK);
        }
    };
    std::vector<std::vector<float>> shared, alone;
    run(cache.get(), 2, shared);
    run(other.get(), 1, alone);
    CHECK(shared == alone);
    CHECK(counters_of(cache.get()).zooms_late == 0);
    CHECK(counters_of(other.get()).zooms_late == 0);
}

TEST_CASE("forks share detail: its bytes are held once, until the last side goes (G21)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_sequences = 4;
    setup.cache.max_step_tokens = 64;
    limit(context.get(), setup, 0.25, 240);
    const Cache cache = make_cache(context.get(), setup), alone = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers), lone(alone.get(), setup.layers);
    Stream parent{make_seq(cache.get()), History(5), 0}, twin{make_seq(alone.get()), History(5), 0};
    for (int i = 0; i < 3; ++i) {
        grow(runner, parent, 50);
        grow(lone, twin, 50);
    }
    const uint64_t held = memory_of(cache.get()).used_host_bytes;
    REQUIRE(held > 0);
    std::vector<Stream> children;
    for (uint64_t i = 0; i < 3; ++i) {
        Stream child = parent;
        REQUIRE(skerry_seq_fork(cache.get(), parent.seq, -1, &child.seq, nullptr) == SKERRY_OK);
        CHECK(fingerprint_of(cache.get(), child.seq) == fingerprint_of(cache.get(), parent.seq));
        if (i > 0) child.history.turn(child.length, 50 + i);
        children.push_back(child);
        CHECK(memory_of(cache.get()).used_host_bytes == held);
        CHECK(info_of(cache.get(), child.seq).host_bytes == info_of(cache.get(), parent.seq).host_bytes);
    }
    for (const skerry_range &range : ranges_of(cache.get(), children[0].seq, 0, 0)) {
        if ((range.flags & SKERRY_RANGE_DETAIL) != 0) CHECK((range.flags & SKERRY_RANGE_SHARED) != 0);
    }
    for (int i = 0; i < 40; ++i) {
        grow(runner, parent, 1);
        grow(lone, twin, 1);
        CHECK(runner.outs == lone.outs);
        grow(runner, children[0], 1);
        CHECK(runner.outs == lone.outs); // the same tokens
        grow(runner, children[1], 1);
        grow(runner, children[2], 1);
    }
    CHECK(fingerprint_of(cache.get(), parent.seq) == fingerprint_of(alone.get(), twin.seq));
    CHECK(fingerprint_of(cache.get(), children[0].seq) == fingerprint_of(alone.get(), twin.seq));
    check_cache(cache.get());
    const uint64_t slot = info_of(cache.get(), parent.seq).host_bytes;
    CHECK(memory_of(cache.get()).used_host_bytes < 2 * slot);
    REQUIRE(skerry_seq_drop(cache.get(), parent.seq, nullptr) == SKERRY_OK);
    check_cache(cache.get());
    decode(runner, children[1], 3);
    for (const Stream &child : children) {
        REQUIRE(skerry_seq_drop(cache.get(), child.seq, nullptr) == SKERRY_OK);
        check_cache(cache.get());
    }
    CHECK(memory_of(cache.get()).used_host_bytes == 0);
    CHECK(memory_of(cache.get()).used_zoom_bytes == 0);
}

TEST_CASE("bad options are refused by name") {
    const Context context = make_context();
    Setup good = small_setup(SKERRY_POLICY_SEKV, layers_of(1, 2, 4, 32, 16));
    good.budget.length_tokens = 300;
    good.budget.bytes = 400000;
    skerry_plan_info info = make<skerry_plan_info>();
    REQUIRE(skerry_cache_plan(context.get(), good.desc(), &info, nullptr) == SKERRY_OK);
    const auto refuse = [&](const std::function<void(Setup &)> &change, skerry_status status, std::initializer_list<uint32_t> subjects,
                            const char *named = "") {
        Setup setup = good;
        const std::string option = named;
        CAPTURE(option);
        const skerry_cache_desc *desc = setup.desc();
        change(setup);
        skerry_plan_info plan = make<skerry_plan_info>();
        refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), desc, &plan, e); }, status, subjects);
        skerry_cache *cache = nullptr;
        const skerry_error error =
            refused([&](skerry_error *e) { return skerry_cache_create(context.get(), desc, &cache, e); }, status, subjects);
        CHECK(cache == nullptr);
        CAPTURE(error.message);
        CHECK(std::strstr(error.message, named) != nullptr);
    };
    constexpr skerry_status argument = SKERRY_ERROR_ARGUMENT;
    refuse([](Setup &s) { s.sekv.struct_size = 3; }, SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT}, "sekv");
    refuse([](Setup &s) { s.sekv.flags = 2; }, argument, {SKERRY_SUBJECT_FLAGS}, "sekv.flags");
    for (int32_t format :
         std::initializer_list<int32_t>{SKERRY_FORMAT_C2, SKERRY_FORMAT_C4, SKERRY_FORMAT_F16, SKERRY_FORMAT_BF16, 5, -1, 99})
        refuse([&](Setup &s) { s.sekv.detail_format = format; }, argument, {SKERRY_SUBJECT_FORMAT}, "detail_format");
    for (uint32_t ppm : {1000001u, UINT32_MAX}) {
        refuse([&](Setup &s) { s.sekv.fetch_ppm = ppm; }, argument, {SKERRY_SUBJECT_POLICY}, "fetch_ppm");
        refuse([&](Setup &s) { s.sekv.refine_ppm = ppm; }, argument, {SKERRY_SUBJECT_POLICY}, "refine_ppm");
    }
    for (uint32_t ppm : {1u, 999999u, 1000000001u})
        refuse([&](Setup &s) { s.sekv.hysteresis_ppm = ppm; }, argument, {SKERRY_SUBJECT_POLICY}, "hysteresis_ppm");
    for (int32_t count : {-1, INT32_MIN, 65537, INT32_MAX})
        refuse([&](Setup &s) { s.sekv.keep_windows = count; }, argument, {SKERRY_SUBJECT_POLICY}, "keep_windows");
    for (int32_t how : {-1, 3})
        refuse([&](Setup &s) { s.sekv.segmentation = how; }, argument, {SKERRY_SUBJECT_POLICY}, "segmentation");
    refuse([](Setup &s) { s.sekv.span_min_tokens = 64; }, argument, {SKERRY_SUBJECT_POLICY}, "SURPRISAL");
    for (float odd : {NAN, INFINITY, -0.1f, 1.0f})
        refuse([&](Setup &s) { s.sekv.detail_error = odd; }, argument, {SKERRY_SUBJECT_FORMAT}, "detail_error");
    for (int32_t rank : {-1, INT32_MAX}) {
        refuse(
            [&](Setup &s) {
                s.sekv.detail_format = SKERRY_FORMAT_L8;
                s.sekv.detail_rank = rank;
            },
            argument, {SKERRY_SUBJECT_FORMAT}, "detail_rank");
    }
    for (int32_t miss : {-1, 2})
        refuse([&](Setup &s) { s.sekv.miss = miss; }, argument, {SKERRY_SUBJECT_POLICY}, "miss");
    // Options of this policy with another one, and what does not go with it.
    for (skerry_policy_kind kind = SKERRY_POLICY_FULL; kind < SKERRY_POLICY_SEKV; ++kind)
        refuse([&](Setup &s) { s.policy.kind = kind; }, argument, {SKERRY_SUBJECT_POLICY}, "sekv");
    refuse([](Setup &s) { s.policy.key_format = s.policy.value_format = SKERRY_FORMAT_C2; }, argument, {SKERRY_SUBJECT_FORMAT}, "SEKV");
    refuse([](Setup &s) { s.policy.flags = SKERRY_POLICY_KEEP_EXACT; }, argument, {SKERRY_SUBJECT_FLAGS}, "KEEP_EXACT");
    refuse([](Setup &s) { s.policy.fidelity = SKERRY_FIDELITY_PAPER; }, SKERRY_ERROR_UNSUPPORTED, {SKERRY_SUBJECT_POLICY}, "fidelity");
    // A budget that says how long, and bytes of the host without a host tier.
    refuse([](Setup &s) { s.budget.length_tokens = 0; }, argument, {SKERRY_SUBJECT_BUDGET}, "length_tokens");
    refuse([](Setup &s) { s.budget.bytes = 0; }, argument, {SKERRY_SUBJECT_BUDGET}, "length_tokens");
    refuse(
        [](Setup &s) {
            s.policy.kind = SKERRY_POLICY_QEVICT;
            s.policy.sekv = nullptr;
            s.budget.host_bytes = 1000;
        },
        argument, {SKERRY_SUBJECT_BUDGET}, "host_bytes");
    refuse([](Setup &s) { s.budget.bytes = 1; }, SKERRY_ERROR_OVER_BUDGET, {SKERRY_SUBJECT_BUDGET}, "budget");
    // A head that router keys cannot be made of. R8 would do for the rest.
    Setup odd = good;
    odd.layers[0].key_dim = 9;
    odd.policy.key_format = odd.policy.value_format = SKERRY_FORMAT_R8;
    odd.sekv.detail_format = SKERRY_FORMAT_R8;
    refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), odd.desc(), &info, e); }, SKERRY_ERROR_UNSUPPORTED,
            {SKERRY_SUBJECT_KEY_DIM, SKERRY_SUBJECT_FORMAT});
    // Limits themselves are taken.
    for (const auto &change : std::initializer_list<std::function<void(Setup &)>>{
             [](Setup &s) { s.sekv.fetch_ppm = s.sekv.refine_ppm = 1000000; }, [](Setup &s) { s.sekv.fetch_ppm = s.sekv.refine_ppm = 1; },
             [](Setup &s) { s.sekv.hysteresis_ppm = 1000000; }, [](Setup &s) { s.sekv.hysteresis_ppm = 1000000000; },
             [](Setup &s) { s.sekv.keep_windows = 65536; }, [](Setup &s) { s.sekv.miss = SKERRY_ZOOM_SKIP; },
             [](Setup &s) { s.sekv.detail_format = SKERRY_FORMAT_F32; }}) {
        Setup setup = good;
        change(setup);
        skerry_error error = make<skerry_error>();
        CHECK_MESSAGE(skerry_cache_plan(context.get(), setup.desc(), &info, &error) == SKERRY_OK, error.message);
    }
}

TEST_CASE("zoom: bad calls change nothing (G11)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_step_tokens = 64;
    limit(context.get(), setup, 0.25, 240);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(5), 0};
    for (int i = 0; i < 3; ++i)
        grow(runner, stream, 50);
    const uint64_t committed = fingerprint_of(cache.get(), stream.seq);
    const Layer &shape = setup.layers[0];
    for (int32_t count : {1, 2}) {
        StepOptions open;
        open.attend = false;
        open.commit = false;
        open.before_attend = [&](skerry_step *step, int layer) {
            const std::vector<float> &rows = runner.queries(layer);
            const skerry_tensor queries = queries_of(rows, shape);
            const Guard guard{cache.get(), {stream.seq}};
            const auto refuse = [&](int32_t at, const skerry_tensor *with, skerry_status status, std::initializer_list<uint32_t> subjects) {
                guard.refused([&](skerry_error *e) { return skerry_step_zoom(step, at, with, nullptr, e); }, status, subjects);
            };
            refused([&](skerry_error *e) { return skerry_step_zoom(nullptr, layer, &queries, nullptr, e); }, SKERRY_ERROR_ARGUMENT,
                    {SKERRY_SUBJECT_ARGUMENT});
            refuse(layer, nullptr, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
            refuse(-1, &queries, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER});
            refuse(2, &queries, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER});
            if (layer == 0) refuse(1, &queries, SKERRY_ERROR_STATE, {SKERRY_SUBJECT_LAYER}); // not appended yet
            if (count == 2) {
                refuse(layer, &queries, SKERRY_ERROR_STATE, {SKERRY_SUBJECT_TOKENS});
                return;
            }
            skerry_tensor bad = queries;
            bad.shape[1] = 3;
            refuse(layer, &bad, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_TENSOR});
            bad = queries;
            bad.dtype = 9;
            refuse(layer, &bad, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_DTYPE});
            for (float odd : {NAN, INFINITY}) {
                std::vector<float> poisoned = rows;
                poisoned[70] = odd;
                const skerry_tensor wrong = queries_of(poisoned, shape);
                refuse(layer, &wrong, SKERRY_ERROR_NONFINITE, {SKERRY_SUBJECT_VALUES});
                std::vector<float> out(4 * 16);
                const skerry_tensor result = tensor(out.data(), SKERRY_DTYPE_F32, {1, 4, 16});
                skerry_attend_desc desc = make<skerry_attend_desc>();
                desc.queries = &wrong;
                desc.out = &result;
                desc.layer = layer;
                guard.refused([&](skerry_error *e) { return skerry_step_attend(step, &desc, e); }, SKERRY_ERROR_NONFINITE,
                              {SKERRY_SUBJECT_VALUES});
            }
            zoom(step, runner, layer);
        };
        grow(runner, stream, count, open);
        skerry_step_abort(runner.open);
        CHECK(fingerprint_of(cache.get(), stream.seq) == committed);
        check_cache(cache.get());
    }
    // Under another policy, and before anything has left the recent region, there is nothing to choose.
    Setup plain = small_setup(SKERRY_POLICY_FULL, setup.layers);
    const Cache full = make_cache(context.get(), plain);
    Runner other(full.get(), plain.layers);
    Stream whole{make_seq(full.get()), History(5), 0};
    StepOptions looks;
    looks.before_attend = [&](skerry_step *step, int layer) { zoom(step, other, layer); };
    grow(other, whole, 1, looks);
    CHECK(counters_of(full.get()).zooms == 0);
}

TEST_CASE("callbacks tell of windows that stay on the host alone, and the ranges agree") {
    const Context context = make_context();
    std::vector<skerry_transition> moves;
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_step_tokens = 64;
    setup.callbacks.user = &moves;
    setup.callbacks.transitions = [](void *user, const skerry_transition *told, int32_t count) {
        auto *all = static_cast<std::vector<skerry_transition> *>(user);
        all->insert(all->end(), told, told + count);
    };
    limit(context.get(), setup, 0.12, 320);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    std::map<std::tuple<int, int, int>, skerry_tier> tier;
    int to_host = 0;
    for (int round = 0; round < 60; ++round) {
        moves.clear();
        grow(runner, stream, round < 4 ? 50 : 1);
        for (const skerry_transition &move : moves) {
            const auto key = std::tuple{int(move.layer), int(move.kv_head), int(move.window)};
            const auto known = tier.find(key);
            CHECK(move.from == (known == tier.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second));
            CHECK(move.to != SKERRY_TIER_EVICTED); // every window has detail
            tier[key] = move.to;
            if (move.to != SKERRY_TIER_HOST) continue;
            ++to_host;
            CHECK(move.key_format == SKERRY_FORMAT_R4);
            CHECK(move.value_format == SKERRY_FORMAT_R4);
            CHECK(move.written_bytes == 0);
        }
        int64_t host_tokens = 0;
        uint64_t host_bytes = 0;
        for (int layer = 0; layer < 2; ++layer) {
            for (int head = 0; head < 2; ++head) {
                for (const skerry_range &range : ranges_of(cache.get(), stream.seq, layer, head)) {
                    if (range.begin < 2) continue;
                    const int window = static_cast<int>((range.begin - 2) / 4);
                    const auto known = tier.find(std::tuple{layer, head, window});
                    CHECK(range.tier == (known == tier.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second));
                    const bool detail = (range.flags & SKERRY_RANGE_DETAIL) != 0;
                    if (range.tier == SKERRY_TIER_HOST) {
                        CHECK(detail);
                        CHECK(range.bytes == 0);
                        CHECK(range.key_format == SKERRY_FORMAT_R4);
                        CHECK(range.end - range.begin == 4);
                        host_tokens += 4;
                    }
                    // What left the recent region has detail, whatever the device holds.
                    if (known != tier.end()) CHECK(detail);
                    if (detail) host_bytes += 1;
                }
            }
        }
        const skerry_seq_info info = info_of(cache.get(), stream.seq);
        CHECK(info.host_tokens == host_tokens);
        CHECK(info.full_tokens + info.quantised_tokens + info.evicted_tokens + info.host_tokens == 4 * stream.length);
        const skerry_counters counters = counters_of(cache.get());
        CHECK(counters.details_written == host_bytes);
        if (host_bytes > 0) CHECK(info.host_bytes == host_bytes * (counters.detail_bytes_written / counters.details_written));
    }
    CHECK(to_host > 100);
    CHECK(counters_of(cache.get()).evictions == 0);
}

TEST_CASE("truncate: back into what had left, windows keep no detail beyond the cut, and the future is one of its own (G9)") {
    const Context context = with_transfers(0, 1);
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
    setup.cache.max_step_tokens = 64;
    setup.cache.max_sequences = 2;
    setup.policy.recent_tokens = 24;
    limit(context.get(), setup, 0.2, 260);
    const Cache cache = make_cache(context.get(), setup), again = make_cache(context.get(), setup);
    Runner a(cache.get(), setup.layers), b(again.get(), setup.layers);
    Stream x{make_seq(cache.get()), History(5), 0}, y{make_seq(again.get()), History(5), 0};
    Rng rng(3);
    for (int i = 0; i < 3; ++i) {
        grow(a, x, 50);
        grow(b, y, 50);
    }
    int cuts = 0;
    for (int round = 0; round < 40; ++round) {
        const int32_t count = static_cast<int32_t>(rng.between(1, 9));
        if (x.length + count > 250) break;
        grow(a, x, count);
        grow(b, y, count);
        const int64_t lowest = info_of(cache.get(), x.seq).lowest_truncate;
        if (lowest >= x.length) continue;
        const int64_t target = std::max<int64_t>(1, rng.between(lowest, x.length));
        if (round % 3 == 2) {
            // A fork there, in place of the cut.
            skerry_seq child{};
            REQUIRE(skerry_seq_fork(cache.get(), x.seq, target, &child, nullptr) == SKERRY_OK);
            check_cache(cache.get());
            REQUIRE(skerry_seq_drop(cache.get(), x.seq, nullptr) == SKERRY_OK);
            x.seq = child;
        } else {
            REQUIRE(skerry_seq_truncate(cache.get(), x.seq, target, nullptr) == SKERRY_OK);
        }
        REQUIRE(skerry_seq_truncate(again.get(), y.seq, target, nullptr) == SKERRY_OK);
        cuts += target < x.length;
        x.length = y.length = target;
        x.history.turn(target, 40 + static_cast<uint64_t>(round));
        y.history.turn(target, 40 + static_cast<uint64_t>(round));
        check_cache(cache.get());
        CHECK(info_of(cache.get(), x.seq).length_tokens == target);
        for (const skerry_range &range : ranges_of(cache.get(), x.seq, 0, 0)) {
            if ((range.flags & SKERRY_RANGE_DETAIL) != 0) CHECK(range.end - range.begin == 4);
        }
        CHECK(fingerprint_of(cache.get(), x.seq) == fingerprint_of(again.get(), y.seq));
    }
    CHECK(cuts > 10);
    decode(a, x, 3);
    decode(b, y, 3);
    CHECK(a.outs == b.outs);
    CHECK(fingerprint_of(cache.get(), x.seq) == fingerprint_of(again.get(), y.seq));
}
