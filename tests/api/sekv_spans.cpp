// SEKV with spans by surprisal, low-rank detail and a bound on its error. T25, T27, T28 and T30 are numbers of the method's list of cases.
// Holds G1, G5, G9, G11.

#include "oracle.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <set>
#include <tuple>

using namespace support;

namespace {

// Nats of a position: mostly small, now and then a surprise; 0 for the first token.
float nats_at(int64_t position) {
    if (position == 0) return 0;
    const uint64_t noise = mix(static_cast<uint64_t>(position) * 77u);
    const float small = static_cast<float>(noise % 1024) / 512.0f;
    return noise % 11 == 0 ? 6.0f + small : small;
}

struct SpanRun {
    std::vector<Layer> layers;
    Setup setup;
    Cache cache;
    Runner runner;
    Stream stream;
    decltype(StepOptions::change_row) change_row;

    SpanRun(skerry_context *context, const std::vector<Layer> &shapes, const std::function<void(Setup &)> &change = {})
        : layers(shapes), setup(described(shapes, change)), cache(make_cache(context, setup)),
          runner(cache.get(), layers), stream{make_seq(cache.get()), History(9), 0} {}

    static Setup described(const std::vector<Layer> &shapes, const std::function<void(Setup &)> &change) {
        Setup setup = small_setup(SKERRY_POLICY_SEKV, shapes);
        setup.policy.window_tokens = 16;
        setup.policy.sink_tokens = 4;
        setup.policy.recent_tokens = 16;
        setup.policy.period_tokens = 16;
        setup.policy.score_queries = 16;
        setup.sekv.segmentation = SKERRY_SEGMENTS_SURPRISAL;
        setup.sekv.span_min_tokens = 24;
        setup.sekv.span_max_tokens = 64;
        setup.cache.max_step_tokens = 400;
        setup.cache.staging_tokens = 400;
        setup.budget.length_tokens = 600;
        setup.budget.share_ppm = 700000;
        if (change) change(setup);
        return setup;
    }

    StepOptions options(int64_t begin, int32_t count) {
        StepOptions made;
        made.change_row = change_row;
        const int last = static_cast<int>(layers.size()) - 1;
        made.after_attend = [this, begin, count, last](skerry_step *step, int layer) {
            if (layer != last) return;
            std::vector<float> nats;
            for (int32_t i = 0; i < count; ++i)
                nats.push_back(nats_at(begin + i));
            skerry_error error = make<skerry_error>();
            REQUIRE_MESSAGE(skerry_step_surprisal(step, 0, nats.data(), count, &error) == SKERRY_OK, error.message);
        };
        return made;
    }
    void prompt(int32_t tokens, int32_t chunk) {
        while (stream.length < tokens) {
            const int32_t count = std::min<int32_t>(chunk, static_cast<int32_t>(tokens - stream.length));
            StepOptions made = options(stream.length, count);
            if (stream.length + count < tokens) made.flags = SKERRY_STEP_PREFILL;
            grow(runner, stream, count, made);
        }
    }
    void generate(int32_t tokens, std::vector<float> *outs = nullptr) {
        for (int32_t i = 0; i < tokens; ++i) {
            grow(runner, stream, 1, options(stream.length, 1));
            if (outs != nullptr) outs->insert(outs->end(), runner.outs.back().begin(), runner.outs.back().end());
        }
    }
    skerry_seq_info info() const { return info_of(cache.get(), stream.seq); }
};

std::vector<Layer> two_layers() { return layers_of(2, 2, 4, 32, 16); }

skerry_tensor rows_of(const std::vector<float> &rows, const Layer &shape) {
    return tensor(rows.data(), SKERRY_DTYPE_F32, {1, shape.query_heads, shape.key_dim});
}

// One more token: what a host that attends itself is given of spans is within `bound` of the rows that were appended.
void check_bound(SpanRun &run, float bound) {
    StepOptions options = run.options(run.stream.length, 1);
    options.attend = false;
    const auto surprisal = options.after_attend;
    options.after_attend = [&](skerry_step *step, int layer) {
        const skerry_tensor queries = rows_of(run.runner.queries(layer), run.layers[0]);
        REQUIRE(skerry_step_zoom(step, layer, &queries, nullptr, nullptr) == SKERRY_OK);
        for (int head = 0; head < 2; ++head) {
            const Gathered seen = gather(step, run.layers[0], 0, layer, head, SKERRY_TIERS_HOST);
            Gathered exact =
                remember(run.stream.history, run.layers[0], layer, head, run.stream.length, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32);
            for (int64_t p = 0; p < run.stream.length && run.change_row; ++p) {
                run.change_row(&exact.keys[static_cast<size_t>(p) * 32], Kind::key, layer, head, p, 32);
                run.change_row(&exact.values[static_cast<size_t>(p) * 16], Kind::value, layer, head, p, 16);
            }
            std::map<int32_t, double> reported;
            for (const skerry_range &range : ranges_of(run.cache.get(), run.stream.seq, layer, head)) {
                for (size_t t = 0; t < seen.positions.size() && (range.flags & SKERRY_RANGE_DETAIL) != 0; ++t) {
                    if (seen.positions[t] >= range.begin && seen.positions[t] < range.end)
                        reported[seen.windows[t]] = static_cast<double>(range.flags >> SKERRY_DETAIL_ERROR_SHIFT) / 32768;
                }
            }
            // Per span and side: the bound is on the norm.
            std::map<int32_t, std::array<double, 4>> sums;
            for (size_t t = 0; t < seen.positions.size(); ++t) {
                const size_t at = static_cast<size_t>(seen.positions[t]);
                std::array<double, 4> &sum = sums[seen.windows[t]];
                for (size_t c = 0; c < 32; ++c) {
                    const double x = static_cast<double>(exact.keys[at * 32 + c]);
                    sum[0] += std::pow(static_cast<double>(seen.keys[t * 32 + c]) - x, 2);
                    sum[1] += x * x;
                }
                for (size_t c = 0; c < 16; ++c) {
                    const double x = static_cast<double>(exact.values[at * 16 + c]);
                    sum[2] += std::pow(static_cast<double>(seen.values[t * 16 + c]) - x, 2);
                    sum[3] += x * x;
                }
            }
            CHECK(sums.size() > 3);
            for (const auto &[span, sum] : sums) {
                CHECK(std::sqrt(sum[0] / sum[1]) <= static_cast<double>(bound) * (1 + 1e-6));
                CHECK(std::sqrt(sum[2] / sum[3]) <= static_cast<double>(bound) * (1 + 1e-6));
                // What the ranges say of it is an upper bound, within a twelfth of an octave.
                const double error = std::max(std::sqrt(sum[0] / sum[1]), std::sqrt(sum[2] / sum[3]));
                const bool measured = run.setup.sekv.detail_error > 0;
                CHECK(reported.at(span) >= (measured ? error - 1e-6 : 0.0));
                CHECK(reported.at(span) <= (measured ? error * 1.07 + 1e-4 : 0.0));
            }
        }
        surprisal(step, layer);
    };
    grow(run.runner, run.stream, 1, options);
}

// Rows of rank four but for 1 % of noise, in a subspace of every head's own: one for all positions, or another one every `turn` positions.
void in_subspace(float *row, Kind kind, int layer, int head, int64_t position, int dim, int64_t turn) {
    if (kind == Kind::query) return;
    std::vector<float> mixed(static_cast<size_t>(dim)), direction(static_cast<size_t>(dim));
    for (int k = 0; k < 4; ++k) {
        const uint64_t seed = 100 + static_cast<uint64_t>(k) + 4 * static_cast<uint64_t>(turn > 0 ? position / turn : 0);
        fill_row(direction.data(), seed, Kind::value, 7 * layer + (kind == Kind::key ? 0 : 3), head, 0, dim);
        // Signs of fixed size: each direction carries a quarter of the row.
        for (int c = 0; c < dim; ++c)
            mixed[static_cast<size_t>(c)] += (row[k] > 0 ? 1.0f : -1.0f) * (1.0f + 0.1f * row[k + 4]) * direction[static_cast<size_t>(c)];
    }
    for (int c = 0; c < dim; ++c)
        row[c] = mixed[static_cast<size_t>(c)] + 0.01f * row[c];
}
void in_one_subspace(float *row, Kind kind, int layer, int head, int64_t position, int dim) {
    in_subspace(row, kind, layer, head, position, dim, 0);
}
void in_changing_subspaces(float *row, Kind kind, int layer, int head, int64_t position, int dim) {
    in_subspace(row, kind, layer, head, position, dim, 50);
}
// Values change where keys do not: bases of one side each.
void in_subspaces_of_their_own(float *row, Kind kind, int layer, int head, int64_t position, int dim) {
    in_subspace(row, kind, layer, head, position, dim, kind == Kind::key ? 0 : 200);
}
// Every other 128 positions without any structure.
void in_one_subspace_at_times(float *row, Kind kind, int layer, int head, int64_t position, int dim) {
    if (position / 128 % 2 == 0) in_one_subspace(row, kind, layer, head, position, dim);
}

Setup small_windows() {
    Setup setup = small_setup(SKERRY_POLICY_SEKV, two_layers());
    setup.policy.window_tokens = 16;
    setup.policy.sink_tokens = 4;
    setup.policy.recent_tokens = 16;
    setup.policy.period_tokens = 16;
    setup.policy.score_queries = 16;
    setup.cache.max_step_tokens = 128;
    setup.budget.share_ppm = 400000;
    setup.budget.length_tokens = 512;
    return setup;
}

void with_shared_bases(Setup &s) {
    s.sekv.detail_error = 0.1f;
    s.sekv.fetch_ppm = 1000000;
    s.sekv.flags = SKERRY_SEKV_SHARED_BASES;
}

} // namespace

TEST_CASE("T27: any chunks of the prompt, workers and transfer threads give the same anchors, spans and bytes") {
    uint64_t wanted = 0;
    std::vector<float> wanted_outs;
    std::vector<skerry_range> wanted_ranges;
    for (const auto &[workers, threads, chunk] :
         std::vector<std::tuple<uint32_t, uint32_t, int32_t>>{{0, 0, 300}, {0, 0, 300}, {2, 1, 1}, {1, 4, 37}, {0, 1, 150}}) {
        CAPTURE(chunk);
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.worker_count = workers;
        desc.transfer_threads = threads;
        const Context context = make_context(&desc);
        SpanRun run(context.get(), two_layers());
        run.prompt(300, chunk);
        std::vector<float> outs;
        run.generate(150, &outs);
        check_cache(run.cache.get());
        const uint64_t fingerprint = fingerprint_of(run.cache.get(), run.stream.seq);
        const std::vector<skerry_range> ranges = ranges_of(run.cache.get(), run.stream.seq, 1, 1);
        if (wanted_outs.empty()) {
            wanted = fingerprint;
            wanted_outs = outs;
            wanted_ranges = ranges;
            CHECK(counters_of(run.cache.get()).details_written > 16);
        }
        CHECK(fingerprint == wanted);
        CHECK(outs == wanted_outs);
        REQUIRE(ranges.size() == wanted_ranges.size());
        for (size_t i = 0; i < ranges.size(); ++i) {
            CHECK(ranges[i].begin == wanted_ranges[i].begin);
            CHECK(ranges[i].tier == wanted_ranges[i].tier);
        }
    }
}

TEST_CASE("T25: with raw detail and every span read, 64 generated tokens attend as with a full cache, to all of them") {
    const Context context = make_context();
    SpanRun run(context.get(), two_layers(), [](Setup &s) {
        s.sekv.detail_format = SKERRY_FORMAT_F32;
        s.sekv.fetch_ppm = 1000000;
    });
    SpanRun whole(context.get(), two_layers(), [](Setup &s) {
        s.policy = make<skerry_policy_desc>();
        s.sekv = make<skerry_sekv_desc>();
        s.budget = make<skerry_budget_desc>();
    });
    run.prompt(300, 300);
    whole.prompt(300, 300);
    double worst = 0;
    for (int i = 0; i < 64; ++i) {
        std::vector<float> got, exact;
        run.generate(1, &got);
        whole.generate(1, &exact);
        for (size_t k = 0; k < got.size(); ++k)
            worst = std::max(worst, std::abs(static_cast<double>(got[k]) - static_cast<double>(exact[k])));
    }
    CHECK(worst < 1e-4);
    CHECK(run.info().evicted_tokens == 0);
    // What a host that attends itself is given: every position once.
    StepOptions options = run.options(run.stream.length, 1);
    options.attend = false;
    const auto surprisal = options.after_attend;
    options.after_attend = [&](skerry_step *step, int layer) {
        const skerry_tensor queries = rows_of(run.runner.queries(layer), run.layers[0]);
        REQUIRE(skerry_step_zoom(step, layer, &queries, nullptr, nullptr) == SKERRY_OK);
        for (int head = 0; head < 2; ++head) {
            const Gathered seen = gather(step, run.layers[0], 0, layer, head);
            std::set<int64_t> positions(seen.positions.begin(), seen.positions.end());
            CHECK(positions.size() == seen.positions.size());
            CHECK(static_cast<int64_t>(positions.size()) == run.stream.length + 1);
            const Gathered exact =
                remember(run.stream.history, run.layers[0], layer, head, run.stream.length + 1, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32);
            bool same = true;
            for (size_t t = 0; t < seen.positions.size(); ++t) {
                const size_t at = static_cast<size_t>(seen.positions[t]);
                for (size_t c = 0; c < 32; ++c)
                    same = same && seen.keys[t * 32 + c] == exact.keys[at * 32 + c];
            }
            CHECK(same);
        }
        surprisal(step, layer);
    };
    grow(run.runner, run.stream, 1, options);
}

TEST_CASE("T28: detail keeps the bound it was given and takes no more than raw, whatever it chose") {
    const Context context = make_context();
    for (const float bound : {0.01f, 0.05f, 0.12f, 0.3f, 0.8f}) {
        CAPTURE(bound);
        SpanRun run(context.get(), two_layers(), [&](Setup &s) {
            s.sekv.detail_error = bound;
            s.sekv.fetch_ppm = 1000000;
            s.sekv.detail_rank = 32;
        });
        run.prompt(300, 300);
        const skerry_counters counters = counters_of(run.cache.get());
        CHECK(counters.details_refused == 0);
        std::set<skerry_format> formats;
        int64_t tokens = 0;
        for (const skerry_range &range : ranges_of(run.cache.get(), run.stream.seq, 0, 0)) {
            if (range.tier != SKERRY_TIER_HOST) continue;
            formats.insert(range.key_format);
            tokens += range.end - range.begin;
        }
        REQUIRE(!formats.empty());
        CHECK(counters.detail_bytes_written <= static_cast<uint64_t>(4 * tokens) * (32 + 16) * 4 + counters.details_written * 16 * 48 * 4);
        check_bound(run, bound);
    }
}

TEST_CASE("low-rank detail is attended as it is gathered, in every format") {
    const Context context = make_context();
    for (const skerry_format format : {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, SKERRY_FORMAT_L4}) {
        CAPTURE(format);
        SpanRun run(context.get(), two_layers(), [&](Setup &s) {
            s.sekv.detail_format = format;
            s.sekv.detail_rank = 8;
            s.sekv.fetch_ppm = 500000;
        });
        run.prompt(300, 300);
        for (int i = 0; i < 5; ++i) {
            StepOptions options = run.options(run.stream.length, 1);
            options.attend_flags = SKERRY_ATTEND_EXACT;
            const auto surprisal = options.after_attend;
            std::vector<std::vector<Gathered>> seen(2);
            int64_t from_host = 0;
            options.after_attend = [&](skerry_step *step, int layer) {
                seen[static_cast<size_t>(layer)] = gather_all(step, run.layers[0], 0, layer);
                from_host += gather(step, run.layers[0], 0, layer, 0, SKERRY_TIERS_HOST).tokens;
                surprisal(step, layer);
            };
            const Part part = run.stream.next(1);
            grow(run.runner, run.stream, 1, options);
            CHECK(from_host > 40);
            for (int layer = 0; layer < 2; ++layer)
                CHECK(compare(run.runner, layer, seen[static_cast<size_t>(layer)], 0, part).out <= 2e-4);
        }
    }
}

TEST_CASE("T30: sinks, anchors and the last tokens are exact rows") {
    const Context context = make_context();
    SpanRun run(context.get(), two_layers());
    run.prompt(300, 77);
    run.generate(90);
    int64_t anchors = 0, spikes = 0, open_from = 0;
    const std::vector<skerry_range> ranges = ranges_of(run.cache.get(), run.stream.seq, 0, 1);
    for (const skerry_range &range : ranges) {
        if (range.tier == SKERRY_TIER_HOST) open_from = range.end;
    }
    for (int64_t p = 4 + 64; p < open_from; ++p)
        spikes += nats_at(p) > 5 ? 1 : 0;
    StepOptions options = run.options(run.stream.length, 1);
    const auto surprisal = options.after_attend;
    options.after_attend = [&](skerry_step *step, int layer) {
        const Gathered seen = gather(step, run.layers[0], 0, layer, 1, SKERRY_TIERS_FULL);
        const Gathered exact =
            remember(run.stream.history, run.layers[0], layer, 1, run.stream.length + 1, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32);
        std::set<int64_t> positions(seen.positions.begin(), seen.positions.end());
        for (int64_t p = 0; p < 4; ++p)
            CHECK(positions.count(p) == 1);
        for (int64_t p = run.stream.length - 15; p <= run.stream.length; ++p)
            CHECK(positions.count(p) == 1);
        for (size_t t = 0; t < seen.positions.size(); ++t) {
            const size_t at = static_cast<size_t>(seen.positions[t]);
            CHECK(same_bytes(&seen.keys[t * 32], &exact.keys[at * 32], 32 * sizeof(float)));
            CHECK(same_bytes(&seen.values[t * 16], &exact.values[at * 16], 16 * sizeof(float)));
            if (layer == 0 && seen.positions[t] >= 4 && seen.positions[t] < open_from) ++anchors;
        }
        surprisal(step, layer);
    };
    grow(run.runner, run.stream, 1, options);
    CHECK(spikes > 10);
    CHECK(anchors == spikes);
    CHECK(run.info().evicted_tokens == 0);
}

TEST_CASE("every token is somewhere: nothing is lost when anchors find no slot, or when every token is one") {
    const Context context = make_context();
    for (const float threshold : {1.0f, -50.0f, 50.0f}) {
        for (const uint32_t share : {250000u, 330000u, 600000u}) {
            CAPTURE(threshold);
            CAPTURE(share);
            SpanRun run(context.get(), two_layers(), [&](Setup &s) {
                s.sekv.anchor_threshold = threshold;
                s.budget.share_ppm = share;
                s.budget.length_tokens = 1200;
            });
            run.prompt(400, 400);
            run.generate(100);
            check_cache(run.cache.get());
            const skerry_plan_info plan = plan_of(context.get(), run.setup);
            const skerry_seq_info info = run.info();
            CHECK(info.full_tokens + info.host_tokens + info.evicted_tokens == 4 * run.stream.length);
            // A span of one token for each anchor without a slot can fill the table, which is made for spans of span_min.
            if (threshold > 0 && plan.host_windows > 0) CHECK(info.evicted_tokens == 0);
            const skerry_memory_info memory = memory_of(run.cache.get());
            CHECK(memory.pool_bytes + memory.table_bytes <= memory.budget_bytes);
        }
    }
}

TEST_CASE("zero and rank-deficient spans give numbers") {
    const Context context = make_context();
    for (const skerry_format format : {SKERRY_FORMAT_L8, SKERRY_FORMAT_L32, SKERRY_FORMAT_R4}) {
        Layer shape = two_layers()[0];
        Setup setup = SpanRun::described({shape}, [&](Setup &s) {
            s.sekv.detail_format = format;
            s.sekv.fetch_ppm = 1000000;
        });
        const Cache cache = make_cache(context.get(), setup);
        const skerry_seq seq = make_seq(cache.get());
        for (int32_t count = 320; count > 0; count = count == 320 ? 1 : 0) {
            std::vector<float> keys(static_cast<size_t>(count) * 2 * 32, 0.0f), values(static_cast<size_t>(count) * 2 * 16, 0.0f);
            for (int32_t t = 150; t < count; ++t) { // a second half of rank one
                for (size_t c = 0; c < 64; ++c)
                    keys[static_cast<size_t>(t) * 64 + c] = static_cast<float>(c + 1) * 0.01f;
            }
            std::vector<float> queries(static_cast<size_t>(count) * 4 * 32, 0.5f), out(static_cast<size_t>(count) * 4 * 16),
                nats(static_cast<size_t>(count), 1.0f);
            skerry_error error = make<skerry_error>();
            skerry_step_desc desc = make<skerry_step_desc>();
            desc.seqs = &seq;
            desc.token_counts = &count;
            desc.seq_count = 1;
            skerry_step *step = nullptr;
            REQUIRE_MESSAGE(skerry_step_begin(cache.get(), &desc, &step, &error) == SKERRY_OK, error.message);
            const skerry_tensor k = tensor(keys.data(), SKERRY_DTYPE_F32, {count, 2, 32}),
                                v = tensor(values.data(), SKERRY_DTYPE_F32, {count, 2, 16});
            const skerry_tensor q = tensor(queries.data(), SKERRY_DTYPE_F32, {count, 4, 32}),
                                o = tensor(out.data(), SKERRY_DTYPE_F32, {count, 4, 16});
            REQUIRE(skerry_step_append(step, 0, &k, &v, nullptr, &error) == SKERRY_OK);
            skerry_attend_desc attend_desc = make<skerry_attend_desc>();
            attend_desc.queries = &q;
            attend_desc.out = &o;
            REQUIRE_MESSAGE(skerry_step_attend(step, &attend_desc, &error) == SKERRY_OK, error.message);
            for (const float x : out)
                CHECK(x == 0.0f);
            REQUIRE(skerry_step_surprisal(step, 0, nats.data(), count, &error) == SKERRY_OK);
            REQUIRE_MESSAGE(skerry_step_commit(step, &error) == SKERRY_OK, error.message);
        }
        CHECK(counters_of(cache.get()).zooms > 0);
        check_cache(cache.get());
    }
}

TEST_CASE("steps with spans: surprisal is asked for, events are not crossed, abort and truncation leave no trace") {
    const Context context = make_context();
    const auto two_sequences = [](Setup &s) {
        s.cache.max_sequences = 2;
        s.sekv.fetch_ppm = 1000000;
    };
    SpanRun run(context.get(), two_layers(), two_sequences);
    SpanRun twin(context.get(), two_layers(), two_sequences);
    run.prompt(300, 100);
    twin.prompt(300, 100);
    const Guard guard{run.cache.get(), {run.stream.seq}};
    // Behind the prompt a step ends at the next event or before.
    const int32_t room = static_cast<int32_t>(run.info().next_event_position - run.stream.length);
    const int32_t longer = room + 1;
    skerry_step_desc desc = make<skerry_step_desc>();
    desc.seqs = &run.stream.seq;
    desc.token_counts = &longer;
    desc.seq_count = 1;
    skerry_step *step = nullptr;
    guard.refused([&](skerry_error *e) { return skerry_step_begin(run.cache.get(), &desc, &step, e); }, SKERRY_ERROR_ARGUMENT,
                  {SKERRY_SUBJECT_TOKENS});
    // Without surprisal a commit is refused and the step stays open.
    StepOptions open;
    open.commit = false;
    REQUIRE(run.runner.step({run.stream.next(1)}, open) == SKERRY_OK);
    refused([&](skerry_error *e) { return skerry_step_commit(run.runner.open, e); }, SKERRY_ERROR_STATE, {SKERRY_SUBJECT_SEQUENCE});
    const float bad[] = {-1.0f};
    refused([&](skerry_error *e) { return skerry_step_surprisal(run.runner.open, 0, bad, 1, e); }, SKERRY_ERROR_NONFINITE,
            {SKERRY_SUBJECT_VALUES});
    refused([&](skerry_error *e) { return skerry_step_surprisal(run.runner.open, 0, bad, 2, e); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_TOKENS});
    skerry_step_abort(run.runner.open);
    CHECK(fingerprint_of(run.cache.get(), run.stream.seq) == fingerprint_of(twin.cache.get(), twin.stream.seq));
    run.generate(70);
    twin.generate(70);
    CHECK(fingerprint_of(run.cache.get(), run.stream.seq) == fingerprint_of(twin.cache.get(), twin.stream.seq));
    // A fork goes the same way as its parent; both share detail.
    Stream child = run.stream;
    REQUIRE(skerry_seq_fork(run.cache.get(), run.stream.seq, -1, &child.seq, nullptr) == SKERRY_OK);
    CHECK(fingerprint_of(run.cache.get(), child.seq) == fingerprint_of(run.cache.get(), run.stream.seq));
    std::swap(child, run.stream);
    run.generate(40);
    twin.generate(40);
    CHECK(fingerprint_of(run.cache.get(), run.stream.seq) == fingerprint_of(twin.cache.get(), twin.stream.seq));
    check_cache(run.cache.get());
    // Cut back to the first position that is whole, and on again: what was cut into the open span stays, so that no span ever holds more
    // than the sequence. The answer for tokens to come is on the safe side.
    int64_t ahead = 0;
    while (skerry_seq_can_truncate(run.cache.get(), run.stream.seq, ahead, 24, nullptr) != SKERRY_OK || ahead == 0)
        ++ahead;
    run.generate(24);
    const int64_t lowest = run.info().lowest_truncate;
    CHECK(lowest <= ahead);
    REQUIRE(lowest < run.stream.length);
    CHECK(lowest >= (run.stream.length - 16 - 4) / 16 * 16 + 4 - 16); // what the last event took in
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_seq_truncate(run.cache.get(), run.stream.seq, lowest, &error) == SKERRY_OK, error.message);
    run.stream.length = lowest;
    check_cache(run.cache.get());
    run.generate(60);
    check_cache(run.cache.get());
    check_bound(run, 0.15f); // what r4 is of these rows
    REQUIRE(skerry_seq_truncate(run.cache.get(), run.stream.seq, 0, nullptr) == SKERRY_OK);
    run.stream.length = 0;
    check_cache(run.cache.get());
    run.prompt(300, 100);
    REQUIRE(skerry_seq_drop(run.cache.get(), run.stream.seq, nullptr) == SKERRY_OK);
    REQUIRE(skerry_seq_drop(run.cache.get(), child.seq, nullptr) == SKERRY_OK);
    CHECK(memory_of(run.cache.get()).used_host_bytes == 0);
}

TEST_CASE("shared bases: rows of one subspace are stored on one basis, others on their own") {
    const Context context = make_context();
    for (const auto &change : {in_one_subspace, in_changing_subspaces, in_subspaces_of_their_own, in_one_subspace_at_times}) {
        uint64_t low_rank = 0; // spans
        skerry_callbacks_desc callbacks = make<skerry_callbacks_desc>();
        callbacks.user = &low_rank;
        callbacks.transitions = [](void *user, const skerry_transition *moves, int32_t count) {
            for (int32_t i = 0; i < count; ++i)
                *static_cast<uint64_t *>(user) += moves[i].to == SKERRY_TIER_HOST && moves[i].key_format == SKERRY_FORMAT_L8 ? 1 : 0;
        };
        SpanRun own(context.get(), two_layers(), [](Setup &s) {
            with_shared_bases(s);
            s.sekv.flags = 0;
        });
        SpanRun shared(context.get(), two_layers(), [&](Setup &s) {
            with_shared_bases(s);
            s.callbacks = callbacks;
        });
        for (SpanRun *run : {&own, &shared}) {
            run->change_row = change;
            run->prompt(400, 400);
            run->generate(100);
            check_cache(run->cache.get());
        }
        const skerry_counters a = counters_of(own.cache.get()), b = counters_of(shared.cache.get());
        const uint64_t saved = a.detail_bytes_written - b.detail_bytes_written;
        CHECK(a.details_written == b.details_written);
        CHECK(memory_of(own.cache.get()).used_host_bytes - memory_of(shared.cache.get()).used_host_bytes == saved);
        CHECK(shared.info().host_bytes == memory_of(shared.cache.get()).used_host_bytes);
        CAPTURE(low_rank);
        CAPTURE(saved);
        if (change == in_changing_subspaces) {
            CHECK(low_rank > 16);
            CHECK(saved == 0);
            CHECK(fingerprint_of(own.cache.get(), own.stream.seq) == fingerprint_of(shared.cache.get(), shared.stream.seq));
        } else if (change == in_subspaces_of_their_own) {
            // The keys of all spans but the first, and the values of some, on bases of spans that have no keys' basis of their own.
            CHECK(low_rank > 16);
            CHECK(saved >= (low_rank - 4) * 128 + 16 * 64);
            CHECK(saved < (low_rank - 4) * 192);
        } else {
            // Both bases of all low-rank spans but the first of each lane, and those that hold rows of both kinds: 4 components of 32 and
            // of 16 bytes, in units of 64 bytes.
            const uint64_t own_bases = change == in_one_subspace ? 4 : 12;
            REQUIRE(low_rank > own_bases + 4);
            CHECK(saved >= (low_rank - own_bases) * 128);
            CHECK(saved <= (low_rank - 4) * 256);
            CHECK(fingerprint_of(own.cache.get(), own.stream.seq) != fingerprint_of(shared.cache.get(), shared.stream.seq));
        }
        check_bound(own, 0.1f);
        check_bound(shared, 0.1f);
    }
}

TEST_CASE("shared bases: chunks, workers, transfer threads and whose copies make no difference") {
    struct Seen {
        std::atomic<uint64_t> bytes{0}, calls{0}, bases{0}, odd{0};
        static void copy(void *user, void *to, const void *from, size_t bytes) {
            Seen *self = static_cast<Seen *>(user);
            self->bytes += bytes;
            ++self->calls;
            self->bases += bytes == 4 * 32 ? 1 : 0;
            self->odd += bytes % 4 == 0 && bytes > 0 ? 0 : 1;
            std::memcpy(to, from, bytes);
        }
    };
    uint64_t wanted = 0;
    std::vector<float> wanted_outs;
    for (const auto &[workers, threads, chunk, is_hooked] : std::vector<std::tuple<uint32_t, uint32_t, int32_t, bool>>{
             {0, 0, 300, false}, {0, 0, 300, true}, {2, 1, 1, true}, {1, 4, 37, true}, {0, 1, 150, false}}) {
        CAPTURE(chunk);
        Seen seen;
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.worker_count = workers;
        desc.transfer_threads = threads;
        if (is_hooked) desc.transfer = Seen::copy, desc.transfer_user = &seen;
        const Context context = make_context(&desc);
        std::vector<float> outs;
        {
            SpanRun run(context.get(), two_layers(), [](Setup &s) {
                with_shared_bases(s);
                s.sekv.fetch_ppm = 400000;
            });
            run.change_row = in_one_subspace;
            run.prompt(300, chunk);
            run.generate(150, &outs);
            check_cache(run.cache.get());
            const uint64_t fingerprint = fingerprint_of(run.cache.get(), run.stream.seq);
            if (wanted_outs.empty()) {
                wanted = fingerprint;
                wanted_outs = outs;
            }
            CHECK(fingerprint == wanted);
            CHECK(outs == wanted_outs);
            const skerry_counters counters = counters_of(run.cache.get());
            CHECK(counters.fetched_bytes > 0);
            if (is_hooked && threads == 0) {
                CHECK(seen.bytes == counters.fetched_bytes);
                CHECK(seen.calls > 3 * counters.zooms_fetched); // four pieces, but for the spans that have their own bases
                CHECK(seen.bases > counters.zooms_fetched / 2);
            }
        }
        CHECK(seen.odd == 0);
    }
}

TEST_CASE("shared bases: forks, truncation and drops in any order leave every reader its basis, and in the end nothing") {
    const Context context = make_context();
    std::array<int, 3> order = {0, 1, 2};
    do {
        SpanRun run(context.get(), two_layers(), [](Setup &s) {
            with_shared_bases(s);
            s.cache.max_sequences = 4;
        });
        run.change_row = in_one_subspace;
        run.prompt(300, 300);
        run.generate(60);
        std::array<Stream, 3> streams = {run.stream, run.stream, run.stream};
        REQUIRE(skerry_seq_fork(run.cache.get(), streams[0].seq, -1, &streams[1].seq, nullptr) == SKERRY_OK);
        const int64_t lowest = run.info().lowest_truncate;
        REQUIRE(skerry_seq_fork(run.cache.get(), streams[1].seq, lowest, &streams[2].seq, nullptr) == SKERRY_OK);
        streams[2].length = lowest;
        // The parent loses what the others still read; its table then fills anew.
        REQUIRE(skerry_seq_truncate(run.cache.get(), streams[0].seq, order[0] == 1 ? 0 : lowest, nullptr) == SKERRY_OK);
        streams[0].length = order[0] == 1 ? 0 : lowest;
        run.stream = streams[0];
        if (order[0] == 1) run.prompt(200, 200);
        run.generate(70);
        streams[0] = run.stream;
        check_cache(run.cache.get());
        for (const int gone : order) {
            REQUIRE(skerry_seq_drop(run.cache.get(), streams[static_cast<size_t>(gone)].seq, nullptr) == SKERRY_OK);
            streams[static_cast<size_t>(gone)].length = -1;
            check_cache(run.cache.get());
            // What was given back is written over.
            Stream filler{make_seq(run.cache.get()), History(31), 0};
            std::swap(filler, run.stream);
            run.prompt(300, 300);
            std::swap(filler, run.stream);
            for (Stream &stream : streams) {
                if (stream.length < 0) continue;
                run.stream = stream;
                check_bound(run, 0.1f);
                stream = run.stream;
            }
            check_cache(run.cache.get());
            REQUIRE(skerry_seq_drop(run.cache.get(), filler.seq, nullptr) == SKERRY_OK);
        }
        CHECK(memory_of(run.cache.get()).used_host_bytes == 0);
        check_cache(run.cache.get());
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("shared bases of windows: an aborted step leaves nothing, and a full host tier refuses windows and goes on") {
    const Context context = make_context();
    Setup setup = small_windows();
    setup.sekv.detail_error = 0.05f;
    setup.sekv.flags = SKERRY_SEKV_SHARED_BASES;
    for (const bool is_noise : {false, true}) {
        CAPTURE(is_noise);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), two_layers());
        Stream stream{make_seq(cache.get()), History(9), 0};
        StepOptions options;
        options.change_row = [&](float *row, Kind kind, int layer, int head, int64_t position, int dim) {
            if (!is_noise || position % 64 < 32) in_one_subspace(row, kind, layer, head, position, dim);
        };
        grow(runner, stream, 100, options);
        const State before = state_of(cache.get(), {stream.seq});
        StepOptions open = options;
        open.commit = false;
        REQUIRE(runner.step({stream.next(100)}, open) == SKERRY_OK);
        CHECK(memory_of(cache.get()).used_host_bytes > before.memory.used_host_bytes);
        skerry_step_abort(runner.open);
        CHECK(memory_of(cache.get()).used_host_bytes == before.memory.used_host_bytes);
        CHECK(fingerprint_of(cache.get(), stream.seq) == before.fingerprints[0]);
        check_cache(cache.get());
        while (stream.length < 500)
            grow(runner, stream, 100, options);
        check_cache(cache.get());
        const skerry_counters counters = counters_of(cache.get());
        const uint64_t each = counters.detail_bytes_written / counters.details_written;
        if (is_noise) {
            // Records of r8 need more than the r4 that the host was planned for.
            CHECK(counters.details_refused > 0);
            CHECK(each > 400);
        } else {
            CHECK(counters.details_refused == 0);
            CHECK(each < 16 * 4 * 2 + 2 * 16 + 64); // two token factors, scales, and what padding takes
        }
        CHECK(memory_of(cache.get()).used_host_bytes <= memory_of(cache.get()).host_bytes);
        REQUIRE(skerry_seq_drop(cache.get(), stream.seq, nullptr) == SKERRY_OK);
        CHECK(memory_of(cache.get()).used_host_bytes == 0);
    }
}

TEST_CASE("a full host tier refuses the same windows whoever else is there and whichever thread comes first") {
    Setup setup = small_windows();
    setup.sekv.detail_error = 0.05f; // r8: more than what the host was planned for
    setup.cache.max_sequences = 2;
    uint64_t wanted = 0;
    for (const uint32_t workers : {0u, 3u}) {
        for (const bool has_neighbour : {false, true}) {
            skerry_context_desc desc = make<skerry_context_desc>();
            desc.worker_count = workers;
            const Context context = make_context(&desc);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), two_layers());
            Stream other{make_seq(cache.get()), History(31), 0}, stream{make_seq(cache.get()), History(9), 0};
            for (int i = 0; i < 5; ++i) {
                if (has_neighbour) grow(runner, other, 100);
                grow(runner, stream, 100);
            }
            check_cache(cache.get());
            CHECK(counters_of(cache.get()).details_refused > 0);
            const uint64_t fingerprint = fingerprint_of(cache.get(), stream.seq);
            if (wanted == 0) wanted = fingerprint;
            CHECK(fingerprint == wanted);
        }
    }
}

TEST_CASE("shared bases are refused where no bound says what they may cost") {
    const Context context = make_context();
    for (const skerry_format format : {SKERRY_FORMAT_L8, SKERRY_FORMAT_R4}) {
        Setup setup = SpanRun::described(two_layers(), [&](Setup &s) {
            s.sekv.detail_format = format;
            s.sekv.flags = SKERRY_SEKV_SHARED_BASES;
        });
        skerry_cache *cache = nullptr;
        const skerry_error error = refused([&](skerry_error *e) { return skerry_cache_create(context.get(), setup.desc(), &cache, e); },
                                           SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_FLAGS});
        CHECK(std::string(error.message).find("SKERRY_SEKV_SHARED_BASES") != std::string::npos);
        CHECK(cache == nullptr);
    }
}

TEST_CASE("spans are refused where they cannot be cut") {
    const Context context = make_context();
    std::vector<Layer> sliding = two_layers();
    sliding[1].window = 64;
    Setup setup = SpanRun::described(sliding, {});
    skerry_cache *cache = nullptr;
    refused([&](skerry_error *e) { return skerry_cache_create(context.get(), setup.desc(), &cache, e); }, SKERRY_ERROR_UNSUPPORTED,
            {SKERRY_SUBJECT_LAYER});
    for (const auto &change : std::vector<std::function<void(Setup &)>>{
             [](Setup &s) { s.sekv.span_max_tokens = 129; }, [](Setup &s) { s.sekv.span_min_tokens = 65; },
             [](Setup &s) { s.sekv.span_min_tokens = 3; }, [](Setup &s) { s.policy.window_tokens = 32; }}) {
        Setup odd = SpanRun::described(two_layers(), change);
        refused([&](skerry_error *e) { return skerry_cache_create(context.get(), odd.desc(), &cache, e); }, SKERRY_ERROR_ARGUMENT,
                {SKERRY_SUBJECT_WINDOW});
    }
}

TEST_CASE("surprisal from logits: T1, and what is refused") {
    const float logits[] = {1, 2, 3, 1, 2, 3, 1, 2, 3};
    const int32_t tokens[] = {0, 1, 2};
    float nats[3] = {};
    const skerry_tensor rows = tensor(logits, SKERRY_DTYPE_F32, {3, 3});
    REQUIRE(skerry_surprisal_from_logits(&rows, tokens, 3, nats, nullptr) == SKERRY_OK);
    CHECK(nats[0] == doctest::Approx(2.407606).epsilon(1e-6));
    CHECK(nats[1] == doctest::Approx(1.407606).epsilon(1e-6));
    CHECK(nats[2] == doctest::Approx(0.407606).epsilon(1e-6));
    const int32_t outside[] = {0, 3, 2};
    refused([&](skerry_error *e) { return skerry_surprisal_from_logits(&rows, outside, 3, nats, e); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_TOKENS});
    const float odd[] = {1, NAN, 3};
    const skerry_tensor bad = tensor(odd, SKERRY_DTYPE_F32, {1, 3});
    refused([&](skerry_error *e) { return skerry_surprisal_from_logits(&bad, tokens, 1, nats, e); }, SKERRY_ERROR_NONFINITE,
            {SKERRY_SUBJECT_VALUES});
    skerry_tensor loose = tensor(logits, SKERRY_DTYPE_F32, {3, 3});
    loose.stride[1] = 3;
    refused([&](skerry_error *e) { return skerry_surprisal_from_logits(&loose, tokens, 3, nats, e); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_TENSOR});
    refused([&](skerry_error *e) { return skerry_surprisal_from_logits(&rows, tokens, 2, nats, e); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_TENSOR});
}

TEST_CASE("spans: the host is planned by tokens, and its limit is one of bytes (G17)") {
    const Context context = make_context(0u);
    const std::vector<Layer> shapes = two_layers();
    SpanRun free(context.get(), shapes);
    skerry_plan_info plan = make<skerry_plan_info>();
    REQUIRE(skerry_cache_get_plan(free.cache.get(), &plan, nullptr) == SKERRY_OK);
    // r4, 16 tokens of 32 and of 16 channels: 16 (16 + 2) and 16 (8 + 2) bytes. Every span may leave one tile nearly empty. Reference
    // counts are 2 bytes to 64; an entry and an extent are 24.
    const uint64_t spans = static_cast<uint64_t>(plan.host_windows), tiles = (600 + 15) / 16 + spans;
    CHECK(plan.host_bytes == 4 * (tiles * 448 / 64 * 66 + spans * 24) + 8);
    free.prompt(400, 400);
    const skerry_counters all = counters_of(free.cache.get());
    CHECK(all.details_refused == 0);
    CHECK(memory_of(free.cache.get()).host_bytes == plan.host_bytes);
    // Two thirds of what they took: spans are refused one by one, and as many are known as before.
    const uint64_t limit = memory_of(free.cache.get()).used_host_bytes * 2 / 3;
    SpanRun bound(context.get(), shapes, [&](Setup &setup) { setup.budget.host_bytes = limit; });
    bound.prompt(400, 100);
    const skerry_memory_info memory = memory_of(bound.cache.get());
    CHECK(memory.host_bytes <= limit);
    const skerry_counters some = counters_of(bound.cache.get());
    CHECK(some.details_written + some.details_refused == all.details_written);
    CHECK(some.details_refused > 0);
    CHECK(some.details_written > all.details_written / 3);
    check_cache(bound.cache.get());
}
