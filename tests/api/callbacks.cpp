// What a host is told while the library works, and when.
// Holds G7, P050, P060, P140, P141.

#include "steering.hpp"

#include <set>

using namespace support;

namespace {

struct Told {
    std::vector<int32_t> layers;
    std::vector<skerry_transition> moves;
    std::vector<std::pair<uint64_t, int64_t>> committed;
    int wanted = 0;
    bool in_step = false;
    int outside = 0; // calls while no call of ours was under way
    std::function<int32_t(skerry_seq, int32_t, int32_t, const int32_t *, int32_t, float *)> scores;

    void install(skerry_callbacks_desc &to) {
        to.user = this;
        to.before_layer = [](void *user, int32_t layer) { static_cast<Told *>(user)->layers.push_back(layer); };
        to.scores_wanted = [](void *user, skerry_seq seq, int32_t layer, int32_t head, const int32_t *windows, int32_t count,
                              float *masses) -> int32_t {
            Told *self = static_cast<Told *>(user);
            ++self->wanted;
            return self->scores ? self->scores(seq, layer, head, windows, count, masses) : 0;
        };
        to.transitions = [](void *user, const skerry_transition *moves, int32_t count) {
            Told *self = static_cast<Told *>(user);
            self->moves.insert(self->moves.end(), moves, moves + count);
        };
        to.committed = [](void *user, skerry_seq seq, int64_t length) {
            static_cast<Told *>(user)->committed.push_back({seq.bits, length});
        };
    }
};

Setup limited(skerry_context *context, skerry_policy_kind kind, Told &told) {
    Setup setup = small_setup(kind, layers_of(3, 2, 4, 32, 16));
    setup.cache.max_sequences = 2;
    setup.cache.max_step_tokens = 64;
    setup.budget.length_tokens = 200;
    const uint64_t minimum = minimum_bytes(context, setup);
    setup.budget.bytes = minimum + full_cache_bytes(context, setup) / 4;
    told.install(setup.callbacks);
    return setup;
}

} // namespace

TEST_CASE("callbacks: transitions are the moves, in order, once, after the commit (G7, P140)") {
    const Context context = make_context();
    for (skerry_policy_kind kind :
         {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT, SKERRY_POLICY_SEKV}) {
        CAPTURE(kind);
        Told told;
        Setup setup = limited(context.get(), kind, told);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream streams[2] = {{make_seq(cache.get()), History(1), 0}, {make_seq(cache.get()), History(2), 0}};
        // (sequence, layer, head, window) -> tier, as told.
        std::map<std::tuple<uint64_t, int, int, int>, skerry_tier> tier;
        uint64_t moves = 0, demotions = 0, promotions = 0, evictions = 0;
        Rng rng(4);
        for (int round = 0; round < 80; ++round) {
            const int32_t counts[2] = {static_cast<int32_t>(round < 3 ? rng.between(1, 60) : 1), 1};
            // An aborted step tells nothing but which layers it named.
            StepOptions open;
            open.commit = false;
            told = Told{};
            REQUIRE(runner.step({streams[0].next(3)}, open) == SKERRY_OK);
            CHECK(told.moves.empty());
            CHECK(told.committed.empty());
            skerry_step_abort(runner.open);
            CHECK(told.moves.empty());
            CHECK(told.committed.empty());

            told = Told{};
            REQUIRE(runner.step({streams[0].next(counts[0]), streams[1].next(counts[1])}, open) == SKERRY_OK);
            CHECK(told.moves.empty()); // not before the commit
            CHECK(told.layers == std::vector<int32_t>{0, 1, 2});
            REQUIRE(skerry_step_commit(runner.open, nullptr) == SKERRY_OK);
            for (int i = 0; i < 2; ++i)
                streams[i].length += counts[i];
            REQUIRE(told.committed.size() == 2);
            for (size_t i = 0; i < 2; ++i) {
                CHECK(told.committed[i].first == streams[i].seq.bits);
                CHECK(told.committed[i].second == streams[i].length);
            }
            std::map<std::tuple<uint64_t, int, int>, int64_t> last;
            for (const skerry_transition &move : told.moves) {
                ++moves;
                CHECK(move.from != move.to);
                CHECK(std::isfinite(move.score));
                const auto lane = std::tuple{move.seq.bits, int(move.layer), int(move.kv_head)};
                CHECK(move.position >= last[lane]);
                last[lane] = move.position;
                const auto key = std::tuple{move.seq.bits, int(move.layer), int(move.kv_head), int(move.window)};
                const auto known = tier.find(key);
                CHECK(move.from == (known == tier.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second));
                tier[key] = move.to;
                if (move.to == SKERRY_TIER_EVICTED) {
                    ++evictions;
                    CHECK(move.key_format == 0);
                    CHECK(move.value_format == 0);
                    CHECK(move.written_bytes == 0);
                } else {
                    CHECK(move.key_format != 0);
                    CHECK(move.value_format != 0);
                    demotions += move.to == SKERRY_TIER_QUANTISED;
                    promotions += move.to == SKERRY_TIER_FULL;
                }
            }
            // What was told is what is.
            for (const Stream &stream : streams) {
                for (int layer = 0; layer < 3; ++layer) {
                    for (int head = 0; head < 2; ++head) {
                        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, layer, head)) {
                            for (int64_t p = range.begin; p < range.end; p += 4) {
                                if (p < 2) continue;
                                const auto known = tier.find(std::tuple{stream.seq.bits, layer, head, int((p - 2) / 4)});
                                CHECK(range.tier == (known == tier.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second));
                            }
                        }
                    }
                }
            }
        }
        const skerry_counters counters = counters_of(cache.get());
        CHECK(counters.demotions == demotions);
        CHECK(counters.promotions == promotions);
        CHECK(counters.evictions == evictions);
        CHECK(moves > 0);
        CHECK(told.wanted == 0); // attend always scored
    }
}

TEST_CASE("callbacks: scores are asked for when nothing was attended or observed, and decide") {
    const Context context = make_context();
    for (bool answer : {false, true}) {
        CAPTURE(answer);
        Told told;
        Setup setup = limited(context.get(), SKERRY_POLICY_EVICT, told);
        setup.policy.score = SKERRY_SCORE_CUMULATIVE;
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(1), 0};
        if (answer) {
            told.scores = [](skerry_seq, int32_t, int32_t, const int32_t *windows, int32_t count, float *masses) -> int32_t {
                for (int32_t i = 0; i < count; ++i)
                    masses[i] = windows[i] % 3 == 0 ? 0.9f : 0.01f;
                return 1;
            };
        }
        StepOptions silent;
        silent.attend = false;
        while (stream.length < 150) {
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            grow(runner, stream, static_cast<int32_t>(std::min<int64_t>(event - stream.length, 150 - stream.length)), silent);
        }
        CHECK(told.wanted > 0);
        std::vector<int64_t> kept;
        for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, 0)) {
            if (range.tier == SKERRY_TIER_EVICTED) continue;
            for (int64_t p = range.begin; p < range.end; ++p) {
                if (p >= 2 && (p - 2) % 4 == 0) kept.push_back((p - 2) / 4);
            }
        }
        const int64_t newest = (stream.length - 1 - 2) / 4;
        size_t favoured = 0, late = 0, old = 0;
        for (int64_t window : kept) {
            if (window > newest - 4) continue;
            ++old;
            favoured += window % 3 == 0;
            late += window > newest - static_cast<int64_t>(kept.size()) - 2;
        }
        REQUIRE(old > 1);
        if (answer) {
            CHECK(favoured + 1 >= old); // all but a newcomer
        } else {
            CHECK(late == old); // newest first
        }
        check_cache(cache.get());
    }
}

TEST_CASE("callbacks: a host that names nothing runs the same") {
    const Context context = make_context();
    Told told;
    Setup setup = limited(context.get(), SKERRY_POLICY_QEVICT, told);
    Setup silent = setup;
    silent.callbacks = make<skerry_callbacks_desc>();
    const Cache a = make_cache(context.get(), setup), b = make_cache(context.get(), silent);
    Runner x(a.get(), setup.layers), y(b.get(), setup.layers);
    Stream s{make_seq(a.get()), History(1), 0}, t{make_seq(b.get()), History(1), 0};
    grow(x, s, 60);
    grow(y, t, 60);
    for (int i = 0; i < 30; ++i) {
        grow(x, s, 1);
        grow(y, t, 1);
        CHECK(x.outs == y.outs);
    }
    CHECK(fingerprint_of(a.get(), s.seq) == fingerprint_of(b.get(), t.seq));
}
