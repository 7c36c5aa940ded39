// Every policy: attention over the stored bytes equals attention in double precision over what gather hands out, and
// what gather hands out is the source within its format's error.
// Holds G1, G3, G7, P042, P050, P053, P054, P057, P060, P113, P114.

#include "oracle.hpp"

#include <set>

using namespace support;

namespace {

struct Run {
    std::string name;
    Setup setup;
    double share; // of the range between the minimum and a full cache
};

// Relative root mean square error of one format over many numbers; each about 1.3 times what uniform noise gives.
double format_bound(skerry_format format) {
    switch (format) {
    case SKERRY_FORMAT_R2:
        return 0.48;
    case SKERRY_FORMAT_R3:
        return 0.27;
    case SKERRY_FORMAT_R4:
        return 0.15;
    case SKERRY_FORMAT_R8:
        return 0.02;
    case SKERRY_FORMAT_C2:
        return 0.40;
    case SKERRY_FORMAT_C4:
        return 0.09;
    default:
        return 0;
    }
}

bool is_raw(skerry_format format) { return format >= SKERRY_FORMAT_F32 && format <= SKERRY_FORMAT_BF16; }

struct Sums {
    double error = 0, size = 0;
};

Setup paper_setup(std::vector<Layer> layers) {
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, std::move(layers));
    setup.policy = make<skerry_policy_desc>();
    setup.policy.kind = SKERRY_POLICY_QEVICT;
    setup.policy.fidelity = SKERRY_FIDELITY_PAPER;
    setup.cache.store_dtype = SKERRY_DTYPE_F16;
    for (Layer &layer : setup.layers)
        layer.rotary_dims = layer.key_dim;
    return setup;
}

std::vector<Run> runs() {
    std::vector<Run> all;
    const std::vector<Layer> layers = layers_of(2, 2, 4, 32, 16);
    const auto add = [&](const char *name, Setup setup, double share = 0.3) { all.push_back({name, std::move(setup), share}); };
    add("full", small_setup(SKERRY_POLICY_FULL, layers));
    add("streaming", small_setup(SKERRY_POLICY_STREAMING, layers));
    for (int score = SKERRY_SCORE_DEFAULT; score <= SKERRY_SCORE_WORST; ++score) {
        Setup setup = small_setup(SKERRY_POLICY_EVICT, layers);
        setup.policy.score = score;
        add("evict by score", setup, 0.4);
        setup.policy.kind = SKERRY_POLICY_QEVICT;
        add("qevict by score", setup);
    }
    add("quantise", small_setup(SKERRY_POLICY_QUANTISE, layers), 0.4);
    for (int format : {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3, SKERRY_FORMAT_R4, SKERRY_FORMAT_R8, SKERRY_FORMAT_C2, SKERRY_FORMAT_C4}) {
        Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers);
        setup.policy.key_format = format;
        setup.policy.value_format = format;
        add("qevict by format", setup);
        setup.cache.store_dtype = SKERRY_DTYPE_F16;
        setup.policy.window_tokens = 16;
        setup.policy.period_tokens = 16;
        setup.policy.recent_tokens = 16;
        setup.policy.score_queries = 32;
        add("qevict by format, windows of 16", setup);
    }
    Setup r8 = small_setup(SKERRY_POLICY_QEVICT, layers);
    r8.policy.full_format = SKERRY_FORMAT_R8;
    add("qevict with full windows in r8", r8, 0.1);
    Setup wide = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 1, 4, 80, 128));
    add("qevict, d 80 and 128", wide, 0.1);
    Setup per_layer = small_setup(SKERRY_POLICY_QEVICT, layers);
    per_layer.policy.selection = SKERRY_SELECTION_PER_LAYER;
    add("qevict per layer", per_layer);
    Setup one_way = small_setup(SKERRY_POLICY_QEVICT, layers);
    one_way.policy.flags = SKERRY_POLICY_ONE_WAY;
    one_way.policy.max_moves_ppm = 1000000;
    add("qevict one way", one_way);
    Setup odd = small_setup(SKERRY_POLICY_QEVICT, layers);
    odd.policy.window_tokens = 5;
    odd.policy.period_tokens = 7;
    odd.policy.recent_tokens = 3;
    odd.policy.sink_tokens = SKERRY_NONE_TOKENS;
    odd.policy.score_queries = 14;
    add("qevict, odd sizes", odd);
    Setup production = small_setup(SKERRY_POLICY_QEVICT, layers);
    production.policy = make<skerry_policy_desc>();
    production.policy.kind = SKERRY_POLICY_QEVICT;
    production.cache.store_dtype = SKERRY_DTYPE_F16;
    add("qevict, defaults", production);
    add("qevict as published", paper_setup(layers_of(2, 2, 4, 32, 32)), 0.35);
    Setup sliding = small_setup(SKERRY_POLICY_QEVICT, layers);
    sliding.layers[1].window = 40;
    add("qevict with a sliding layer", sliding, 0.15);
    return all;
}

void set_share(skerry_context *context, Setup &setup, double share, int64_t length) {
    if (setup.policy.kind == SKERRY_POLICY_FULL || setup.policy.kind == SKERRY_POLICY_STREAMING) return;
    setup.budget.length_tokens = length;
    skerry_plan_info info = plan_of(context, setup);
    const uint64_t minimum = minimum_bytes(context, setup);
    const uint64_t full = std::max(info.full_cache_bytes, minimum);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * static_cast<double>(full - minimum));
}

} // namespace

TEST_CASE("policies: attend equals gather with attention in double precision; gather is the source") {
    const Context context = make_context();
    for (Run &run : runs()) {
        const std::string name = run.name + ", score " + std::to_string(run.setup.policy.score) + ", format " +
                                 std::to_string(run.setup.policy.key_format) + ", window " + std::to_string(run.setup.policy.window_tokens);
        CAPTURE(name);
        constexpr int64_t length = 280;
        set_share(context.get(), run.setup, run.share, length);
        const Cache cache = make_cache(context.get(), run.setup);
        Runner runner(cache.get(), run.setup.layers);
        Stream stream{make_seq(cache.get()), History(77), 0};
        Rng rng(5);
        std::map<skerry_format, Sums> sums;
        std::set<int> tiers_seen;
        while (stream.length < length) {
            // Steps end at events or before, so that nothing moves inside them (G7, P050).
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            if (event >= 0) CHECK(event > stream.length);
            const int64_t room = event < 0 ? 40 : event - stream.length;
            const int32_t count =
                static_cast<int32_t>(std::min<int64_t>({room, stream.length < 60 ? rng.between(1, 30) : 1, length - stream.length}));
            std::vector<std::vector<std::vector<skerry_range>>> ranges;
            for (size_t layer = 0; layer < run.setup.layers.size(); ++layer) {
                ranges.emplace_back();
                for (int head = 0; head < run.setup.layers[layer].kv_heads; ++head) {
                    ranges.back().push_back(ranges_of(cache.get(), stream.seq, static_cast<int>(layer), head));
                }
            }
            std::vector<std::vector<Gathered>> seen(run.setup.layers.size());
            StepOptions options;
            options.attend_flags = rng.one_in(2) ? uint32_t(SKERRY_ATTEND_EXACT) : 0u;
            options.before_attend = [&](skerry_step *step, int layer) {
                seen[static_cast<size_t>(layer)] = gather_all(step, runner.layers()[static_cast<size_t>(layer)], 0, layer);
            };
            const Part part = stream.next(count);
            grow(runner, stream, count, options);
            for (int layer = 0; layer < static_cast<int>(seen.size()); ++layer) {
                const Layer &shape = run.setup.layers[static_cast<size_t>(layer)];
                const Errors errors = compare(runner, layer, seen[static_cast<size_t>(layer)], 0, part);
                CAPTURE(layer);
                CAPTURE(part.begin);
                CAPTURE(options.attend_flags);
                // The 8-bit path may differ by 1e-2 (decisions 11).
                CHECK(errors.out <= (options.attend_flags != 0 ? 2e-4 : 2e-2));
                CHECK(errors.lse <= (options.attend_flags != 0 ? 2e-4 : 2e-2));
                if (part.begin % 9 != 0 && count == 1) continue; // the rest is the same for many steps
                for (int head = 0; head < shape.kv_heads; ++head) {
                    const Gathered &got = seen[static_cast<size_t>(layer)][static_cast<size_t>(head)];
                    const Gathered source =
                        remember(stream.history, shape, layer, head, stream.length, SKERRY_DTYPE_F32, run.setup.cache.store_dtype);
                    // The tokens are those of the readable ranges and the step's own, in order.
                    std::vector<int64_t> wanted;
                    std::vector<const skerry_range *> range_of;
                    int64_t end = 0;
                    for (const skerry_range &range : ranges[static_cast<size_t>(layer)][static_cast<size_t>(head)]) {
                        CHECK(range.begin == end);
                        CHECK(range.end > range.begin);
                        end = range.end;
                        tiers_seen.insert(range.tier);
                        if (range.tier == SKERRY_TIER_EVICTED) continue;
                        for (int64_t p = range.begin; p < range.end; ++p) {
                            wanted.push_back(p);
                            range_of.push_back(&range);
                        }
                    }
                    CHECK(end == part.begin);
                    for (int64_t p = part.begin; p < part.begin + count; ++p) {
                        wanted.push_back(p);
                        range_of.push_back(nullptr);
                    }
                    if (shape.window == 0) CHECK(got.positions == wanted);
                    if (got.positions != wanted) continue;
                    size_t differing = 0;
                    for (size_t i = 0; i < wanted.size(); ++i) {
                        const size_t p = static_cast<size_t>(wanted[i]);
                        const skerry_range *range = range_of[i];
                        REQUIRE(got.bias[i] == 0.0f);
                        if (range == nullptr) continue;
                        const bool recovered = (range->flags & SKERRY_RANGE_RECOVERED) != 0;
                        const auto side = [&](const std::vector<float> &have, const std::vector<float> &want, int dim,
                                              skerry_format format) {
                            for (int c = 0; c < dim; ++c) {
                                const float a = have[i * static_cast<size_t>(dim) + static_cast<size_t>(c)];
                                const float b = want[p * static_cast<size_t>(dim) + static_cast<size_t>(c)];
                                if (!std::isfinite(a)) ++differing;
                                if (is_raw(format) && !recovered) {
                                    differing += a != b;
                                } else if (!is_raw(format)) {
                                    Sums &sum = sums[format];
                                    sum.error += double(a - b) * double(a - b);
                                    sum.size += double(b) * double(b);
                                }
                            }
                        };
                        side(got.keys, source.keys, shape.key_dim, range->key_format);
                        side(got.values, source.values, shape.value_dim, range->value_format);
                    }
                    CHECK(differing == 0);
                }
            }
            check_cache(cache.get());
        }
        for (const auto &[format, sum] : sums) {
            CAPTURE(format);
            CHECK(std::sqrt(sum.error / sum.size) <= format_bound(format));
        }
        // The runs really reach the tiers they are about.
        const skerry_policy_kind kind = run.setup.policy.kind;
        CHECK(tiers_seen.count(SKERRY_TIER_FULL) == 1);
        CHECK(tiers_seen.count(SKERRY_TIER_QUANTISED) == (kind == SKERRY_POLICY_QUANTISE || kind == SKERRY_POLICY_QEVICT));
        if (kind == SKERRY_POLICY_STREAMING || kind == SKERRY_POLICY_EVICT) CHECK(tiers_seen.count(SKERRY_TIER_EVICTED) == 1);
    }
}

TEST_CASE("policies: a planted token is found through every tier (P042)") {
    // One key points along the query and one value is unlike all others; attention must bring it back wherever it lies.
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QUANTISE, layers_of(1, 1, 1, 32, 32));
    set_share(context.get(), setup, 0.6, 200);
    for (int format : {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3, SKERRY_FORMAT_R4, SKERRY_FORMAT_R8, SKERRY_FORMAT_C2, SKERRY_FORMAT_C4}) {
        setup.policy.key_format = format;
        setup.policy.value_format = format;
        setup.budget.bytes = 0;
        set_share(context.get(), setup, 0.6, 200);
        const Cache cache = make_cache(context.get(), setup);
        const skerry_seq seq = make_seq(cache.get());
        float found = 0;
        for (int64_t p = 0; p < 120; ++p) {
            std::vector<float> key(32), value(32), query(32), out(32);
            fill_row(key.data(), 9, Kind::key, 0, 0, p, 32);
            for (int c = 0; c < 32; ++c) {
                key[static_cast<size_t>(c)] *= 0.3f;
                query[static_cast<size_t>(c)] = c % 2 == 0 ? 2.0f : -2.0f;
                value[static_cast<size_t>(c)] = p == 30 ? 1.0f : 0.0f;
            }
            if (p == 30) key = query;
            const int32_t one = 1;
            skerry_step_desc desc = make<skerry_step_desc>();
            desc.seqs = &seq;
            desc.token_counts = &one;
            desc.seq_count = 1;
            skerry_step *step = nullptr;
            REQUIRE(skerry_step_begin(cache.get(), &desc, &step, nullptr) == SKERRY_OK);
            const skerry_tensor keys = tensor(key.data(), SKERRY_DTYPE_F32, {1, 1, 32});
            const skerry_tensor values = tensor(value.data(), SKERRY_DTYPE_F32, {1, 1, 32});
            const skerry_tensor queries = tensor(query.data(), SKERRY_DTYPE_F32, {1, 1, 32});
            const skerry_tensor outs = tensor(out.data(), SKERRY_DTYPE_F32, {1, 1, 32});
            REQUIRE(skerry_step_append(step, 0, &keys, &values, nullptr, nullptr) == SKERRY_OK);
            skerry_attend_desc attend_desc = make<skerry_attend_desc>();
            attend_desc.queries = &queries;
            attend_desc.out = &outs;
            REQUIRE(skerry_step_attend(step, &attend_desc, nullptr) == SKERRY_OK);
            REQUIRE(skerry_step_commit(step, nullptr) == SKERRY_OK);
            if (p >= 30) CHECK(out[0] > 0.7f);
            found = out[0];
        }
        CAPTURE(format);
        CHECK(found > 0.7f);
        bool low = false;
        for (const skerry_range &range : ranges_of(cache.get(), seq, 0, 0)) {
            low = low || (range.begin <= 30 && 30 < range.end && range.tier == SKERRY_TIER_QUANTISED);
        }
        CHECK(low);
    }
}

TEST_CASE("scores: without a limit a window's score is the mass that all queries gave it") {
    const Context context = make_context();
    for (int selection : {SKERRY_SELECTION_PER_HEAD, SKERRY_SELECTION_PER_LAYER}) {
        Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 2, 4, 16, 8));
        setup.policy.score = SKERRY_SCORE_CUMULATIVE;
        setup.policy.full_format = SKERRY_FORMAT_F32; // else windows that leave the recent region are rounded to R8
        setup.policy.selection = selection;
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(3), 0};
        std::vector<std::vector<std::vector<double>>> mass(2, std::vector<std::vector<double>>(2, std::vector<double>(70)));
        for (int32_t count : {23, 1, 1, 17, 8, 1, 1, 1, 1, 1}) {
            const Part part = stream.next(count);
            grow(runner, stream, count);
            for (int layer = 0; layer < 2; ++layer) {
                const Layer &shape = setup.layers[static_cast<size_t>(layer)];
                for (int head = 0; head < shape.query_heads; ++head) {
                    const Gathered all =
                        remember(stream.history, shape, layer, head / 2, stream.length, SKERRY_DTYPE_F32, SKERRY_DTYPE_F32);
                    for (int t = 0; t < count; ++t) {
                        const float *query = runner.queries(layer).data() + (t * 4 + head) * 16;
                        const Attended row = attend(all, shape, query, part.begin + t);
                        for (size_t i = 0; i < row.masses.size(); ++i) {
                            mass[static_cast<size_t>(layer)][static_cast<size_t>(head / 2)][i] += row.masses[i] / 2;
                        }
                    }
                }
            }
        }
        int compared = 0;
        for (size_t layer = 0; layer < 2; ++layer) {
            for (size_t head = 0; head < 2; ++head) {
                for (const skerry_range &range : ranges_of(cache.get(), stream.seq, int(layer), int(head))) {
                    if (range.begin < 2) {
                        CHECK(range.score == 0);
                        continue;
                    }
                    double wanted = 0, layer_wide = 0;
                    for (int64_t p = range.begin; p < range.end; ++p) {
                        wanted += mass[layer][head][static_cast<size_t>(p)];
                        layer_wide += (mass[layer][0][static_cast<size_t>(p)] + mass[layer][1][static_cast<size_t>(p)]) / 2;
                    }
                    if (selection == SKERRY_SELECTION_PER_LAYER) wanted = layer_wide;
                    CAPTURE(range.begin);
                    CHECK(range.end - range.begin <= 4);
                    CHECK(range.score == doctest::Approx(wanted).epsilon(1e-4));
                    ++compared;
                }
            }
        }
        CHECK(compared > 40);
    }
}

TEST_CASE("tiers: parts of the tiers merged by their log-sum-exp are all of them") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 2, 4, 32, 16));
    set_share(context.get(), setup, 0.3, 200);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(8), 0};
    int nothing_seen = 0;
    for (int i = 0; i < 120; ++i) {
        const int32_t count = i == 0 ? 2 : 1;
        std::vector<float> merged_out, merged_lse;
        StepOptions options;
        options.attend_flags = SKERRY_ATTEND_EXACT;
        options.before_attend = [&](skerry_step *step, int) {
            const skerry_tensor queries = tensor(runner.queries(0).data(), SKERRY_DTYPE_F32, {count, 4, 32});
            std::vector<std::vector<float>> outs, lses;
            for (uint32_t tiers : {uint32_t(SKERRY_TIERS_FULL), uint32_t(SKERRY_TIERS_QUANTISED)}) {
                outs.emplace_back(static_cast<size_t>(count) * 4 * 16);
                lses.emplace_back(static_cast<size_t>(count) * 4);
                const skerry_tensor out = tensor(outs.back().data(), SKERRY_DTYPE_F32, {count, 4, 16});
                const skerry_tensor lse = tensor(lses.back().data(), SKERRY_DTYPE_F32, {count, 4});
                skerry_attend_desc desc = make<skerry_attend_desc>();
                desc.flags = SKERRY_ATTEND_EXACT;
                desc.queries = &queries;
                desc.out = &out;
                desc.lse = &lse;
                desc.tiers = tiers;
                skerry_error error = make<skerry_error>();
                REQUIRE_MESSAGE(skerry_step_attend(step, &desc, &error) == SKERRY_OK, error.message);
            }
            merged_out.assign(outs[0].size(), 0);
            merged_lse.assign(lses[0].size(), 0);
            for (size_t row = 0; row < lses[0].size(); ++row) {
                const double a = static_cast<double>(lses[0][row]), b = static_cast<double>(lses[1][row]);
                if (b == -INFINITY) {
                    ++nothing_seen;
                    for (size_t c = 0; c < 16; ++c)
                        REQUIRE(std::isfinite(outs[1][row * 16 + c]));
                }
                const double top = std::max(a, b), sum = std::exp(a - top) + std::exp(b - top);
                merged_lse[row] = static_cast<float>(top + std::log(sum));
                for (size_t c = 0; c < 16; ++c) {
                    merged_out[row * 16 + c] =
                        static_cast<float>((double(outs[0][row * 16 + c]) * std::exp(a - top) +
                                            (b == -INFINITY ? 0 : double(outs[1][row * 16 + c]) * std::exp(b - top))) /
                                           sum);
                }
            }
        };
        grow(runner, stream, count, options);
        for (size_t k = 0; k < merged_out.size(); ++k)
            CHECK(runner.outs[0][k] == doctest::Approx(merged_out[k]).epsilon(1e-4).scale(1));
        for (size_t k = 0; k < merged_lse.size(); ++k)
            CHECK(runner.lses[0][k] == doctest::Approx(merged_lse[k]).epsilon(1e-4).scale(1));
    }
    CHECK(nothing_seen > 0); // before the first window was quantised
    CHECK(info_of(cache.get(), stream.seq).quantised_tokens > 0);
}

TEST_CASE("observe: a host that attends itself moves the same windows") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 2, 4, 32, 16));
    set_share(context.get(), setup, 0.3, 200);
    enum class Way { attend, masses, merged };
    std::vector<std::vector<std::vector<skerry_range>>> kept;
    for (Way way : {Way::attend, Way::masses, Way::merged}) {
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(8), 0};
        StepOptions options;
        options.attend_flags = SKERRY_ATTEND_EXACT;
        options.attend = way == Way::attend;
        int32_t count = 0;
        if (way != Way::attend) {
            options.after_attend = [&](skerry_step *step, int layer) {
                const Layer &shape = setup.layers[static_cast<size_t>(layer)];
                for (int head = 0; head < shape.kv_heads; ++head) {
                    const Gathered seen = gather(step, shape, 0, layer, head);
                    std::vector<float> masses(static_cast<size_t>(count) * seen.positions.size());
                    std::vector<float> lse, queries;
                    for (int t = 0; t < count; ++t) {
                        for (int g = 0; g < shape.group(); ++g) {
                            const float *query =
                                runner.queries(layer).data() + (t * shape.query_heads + head * shape.group() + g) * shape.key_dim;
                            queries.insert(queries.end(), query, query + shape.key_dim);
                            const Attended row = attend(seen, shape, query, stream.length + t);
                            lse.push_back(static_cast<float>(row.lse));
                            for (size_t i = 0; i < row.masses.size(); ++i) {
                                masses[static_cast<size_t>(t) * row.masses.size() + i] += static_cast<float>(row.masses[i] / shape.group());
                            }
                        }
                    }
                    const skerry_tensor query_tensor = tensor(queries.data(), SKERRY_DTYPE_F32, {count, shape.group(), shape.key_dim});
                    skerry_observe_desc desc = make<skerry_observe_desc>();
                    desc.queries = &query_tensor;
                    desc.layer = layer;
                    desc.kv_head = head;
                    if (way == Way::masses) {
                        desc.masses = masses.data();
                        desc.token_count = seen.tokens;
                    } else {
                        desc.merged_lse = lse.data();
                    }
                    skerry_error error = make<skerry_error>();
                    REQUIRE_MESSAGE(skerry_step_observe(step, &desc, &error) == SKERRY_OK, error.message);
                }
            };
        }
        while (stream.length < 160) {
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            count = static_cast<int32_t>(event < 0 ? 4 : std::min<int64_t>(event - stream.length, 5));
            grow(runner, stream, count, options);
        }
        std::vector<std::vector<skerry_range>> ranges;
        for (int layer = 0; layer < 2; ++layer) {
            for (int head = 0; head < 2; ++head)
                ranges.push_back(ranges_of(cache.get(), stream.seq, layer, head));
        }
        kept.push_back(ranges);
    }
    size_t windows = 0, different = 0;
    for (size_t way = 1; way < kept.size(); ++way) {
        for (size_t lane = 0; lane < kept[0].size(); ++lane) {
            // By token, since runs of evicted windows may be cut elsewhere.
            const auto by_token = [](const std::vector<skerry_range> &ranges) {
                std::vector<const skerry_range *> tokens;
                for (const skerry_range &range : ranges)
                    tokens.insert(tokens.end(), static_cast<size_t>(range.end - range.begin), &range);
                return tokens;
            };
            const auto a = by_token(kept[0][lane]), b = by_token(kept[way][lane]);
            REQUIRE(a.size() == b.size());
            for (size_t i = 0; i < a.size(); i += 2) {
                ++windows;
                different += a[i]->tier != b[i]->tier;
                if (a[i]->tier == b[i]->tier) CHECK(a[i]->score == doctest::Approx(b[i]->score).epsilon(0.02).scale(0.05));
            }
        }
    }
    // Near-equal scores may fall the other way by rounding; no more than that.
    CHECK(different * 50 <= windows);
}

TEST_CASE("view: parts are the gathered tokens, where they lie") {
    const Context context = make_context();
    for (skerry_dtype store : {SKERRY_DTYPE_F32, SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16}) {
        Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 2, 2, 32, 16));
        setup.cache.store_dtype = store;
        set_share(context.get(), setup, 0.4, 150);
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Stream stream{make_seq(cache.get()), History(4), 0};
        size_t raw_parts = 0, low_parts = 0;
        StepOptions options;
        options.before_attend = [&](skerry_step *step, int layer) {
            for (int head = 0; head < 2; ++head) {
                const Gathered seen = gather(step, setup.layers[0], 0, layer, head);
                std::vector<skerry_part> parts(256);
                int32_t needed = 0;
                REQUIRE(skerry_step_view(step, 0, layer, head, 0, parts.data(), 256, &needed, nullptr) == SKERRY_OK);
                parts.resize(static_cast<size_t>(needed));
                size_t i = 0;
                for (const skerry_part &part : parts) {
                    REQUIRE(part.tokens > 0);
                    REQUIRE(part.tokens <= part.capacity);
                    REQUIRE(i + static_cast<size_t>(part.tokens) <= seen.positions.size());
                    const bool raw = is_raw(part.key_format);
                    raw ? ++raw_parts : ++low_parts;
                    if (part.key_format != SKERRY_FORMAT_R8) CHECK((part.tier == SKERRY_TIER_QUANTISED) == !raw);
                    const auto number = [&](const void *from, size_t at, skerry_format format) {
                        if (format == SKERRY_FORMAT_F32) return static_cast<const float *>(from)[at];
                        return half_value(static_cast<const uint16_t *>(from)[at],
                                          format == SKERRY_FORMAT_F16 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_BF16);
                    };
                    size_t wrong = 0;
                    for (int32_t t = 0; t < part.tokens; ++t, ++i) {
                        wrong += seen.positions[i] != part.position + t;
                        wrong += seen.windows[i] != part.window;
                        if (!raw) continue;
                        for (size_t c = 0; c < 32; ++c) {
                            wrong += number(part.keys, c * static_cast<size_t>(part.capacity) + static_cast<size_t>(t), part.key_format) !=
                                     seen.keys[i * 32 + c];
                        }
                        for (size_t c = 0; c < 16; ++c) {
                            wrong += number(part.values, static_cast<size_t>(t) * 16 + c, part.value_format) != seen.values[i * 16 + c];
                        }
                    }
                    CHECK(wrong == 0);
                }
                CHECK(i == seen.positions.size());
                // A mask picks the parts of its tiers.
                int32_t full = 0, low = 0;
                (void)!skerry_step_view(step, 0, layer, head, SKERRY_TIERS_FULL, nullptr, 0, &full, nullptr);
                (void)!skerry_step_view(step, 0, layer, head, SKERRY_TIERS_QUANTISED, nullptr, 0, &low, nullptr);
                CHECK(full + low == needed);
                CHECK(gather(step, setup.layers[0], 0, layer, head, SKERRY_TIERS_FULL).tokens +
                          gather(step, setup.layers[0], 0, layer, head, SKERRY_TIERS_QUANTISED).tokens ==
                      seen.tokens);
            }
        };
        while (stream.length < 130) {
            const int64_t event = info_of(cache.get(), stream.seq).next_event_position;
            grow(runner, stream, static_cast<int32_t>(std::min<int64_t>(event - stream.length, 3)), options);
        }
        CHECK(raw_parts > 0);
        CHECK(low_parts > 0);
    }
}

TEST_CASE("evicted ranges can be asked for, and what is evicted never comes back (P060)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_EVICT, layers_of(1, 2, 2, 16, 16));
    set_share(context.get(), setup, 0.2, 200);
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(4), 0};
    std::set<int64_t> gone[2];
    while (stream.length < 200) {
        grow(runner, stream, 1);
        int64_t evicted = 0;
        for (int head = 0; head < 2; ++head) {
            std::set<int64_t> now;
            for (const skerry_range &range : ranges_of(cache.get(), stream.seq, 0, head)) {
                if (range.tier != SKERRY_TIER_EVICTED) continue;
                CHECK(range.bytes == 0);
                CHECK(range.score == 0);
                CHECK((range.begin - 2) % 4 == 0);
                for (int64_t p = range.begin; p < range.end; ++p)
                    now.insert(p);
            }
            for (int64_t p : gone[head])
                REQUIRE(now.count(p) == 1);
            evicted += static_cast<int64_t>(now.size());
            gone[head] = std::move(now);
        }
        CHECK(info_of(cache.get(), stream.seq).evicted_tokens == evicted);
    }
    CHECK(gone[0].size() > 50);
}

TEST_CASE("prompts shorter than any window or budget change nothing (P054)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT}) {
        Setup setup = small_setup(kind, layers_of(1, 1, 1, 16, 16));
        const Cache cache = make_cache(context.get(), setup);
        Runner runner(cache.get(), setup.layers);
        Setup plain = small_setup(SKERRY_POLICY_FULL, setup.layers);
        const Cache full = make_cache(context.get(), plain);
        Runner expected(full.get(), setup.layers);
        for (int length = 1; length <= 6; ++length) {
            Stream a{make_seq(cache.get()), History(4), 0}, b{make_seq(full.get()), History(4), 0};
            grow(runner, a, length);
            grow(expected, b, length);
            for (size_t k = 0; k < runner.outs[0].size(); ++k) {
                CHECK(runner.outs[0][k] == doctest::Approx(expected.outs[0][k]).epsilon(1e-5).scale(1));
            }
            const skerry_seq_info info = info_of(cache.get(), a.seq);
            CHECK(info.full_tokens == length);
            CHECK(info.quantised_tokens + info.evicted_tokens == 0);
            REQUIRE(skerry_seq_drop(cache.get(), a.seq, nullptr) == SKERRY_OK);
            REQUIRE(skerry_seq_drop(full.get(), b.seq, nullptr) == SKERRY_OK);
        }
    }
}
