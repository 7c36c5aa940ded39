// SEKV with fidelity paper: the published rules through a cache. T6, T7, T14, T19, T20, T25 and T27 are numbers of the method's list of
// cases; all others against a host of our own that keeps the whole prompt in double precision. Holds G1, G3, G5, G11, G17, G18.

#include "router_bytes.hpp"
#include "support.hpp"

#include <atomic>
#include <set>

using namespace support;

namespace {

struct ReleaseRouter {
    void operator()(skerry_router *router) const { skerry_router_release(router); }
};
using Router = std::unique_ptr<skerry_router, ReleaseRouter>;

// A router whose gates are all `gate` (1, or 0.5), whatever the span.
struct Weights {
    RouterSize size;
    std::vector<float> w;   // [layers][query_heads][summary_dim][key_dim]
    std::vector<float> tau; // [layers][query_heads]
    double gate = 1;

    explicit Weights(const RouterSize &of) : size(of) {
        w.resize(static_cast<size_t>(of.layers * of.query_heads * of.summary_dim * of.key_dim));
        tau.resize(static_cast<size_t>(of.layers * of.query_heads));
    }
    Router open(skerry_context *context, const std::string &form = "paper") const {
        std::vector<FileTensor> tensors = paper_tensors(size);
        tensors[0].values = w;
        tensors[1].values = tau;
        for (size_t i = 2; i < tensors.size(); ++i)
            std::fill(tensors[i].values.begin(), tensors[i].values.end(), 0.0f);
        // sigmoid(40) is 1 in f32.
        std::fill(tensors[7].values.begin(), tensors[7].values.end(), gate == 1 ? 40.0f : 0.0f);
        if (form != "paper") tensors = production_tensors(size);
        RouterSettings settings = router_settings(size, form);
        if (form != "paper") settings.set("pooling", "\"mean\"").set("normalise", "true").set("shared_keys", "true");
        const std::vector<uint8_t> bytes = safetensors(tensors, settings.text());
        skerry_router_desc desc = make<skerry_router_desc>();
        desc.data = bytes.data();
        desc.bytes = bytes.size();
        skerry_router *router = nullptr;
        skerry_error error = make<skerry_error>();
        REQUIRE_MESSAGE(skerry_router_open(context, &desc, &router, &error) == SKERRY_OK, error.message);
        return Router(router);
    }
};

Setup paper_setup(const std::vector<Layer> &layers, skerry_router *router) {
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers);
    setup.policy.kind = SKERRY_POLICY_SEKV;
    setup.policy.fidelity = SKERRY_FIDELITY_PAPER;
    setup.sekv.router = router;
    setup.cache.max_step_tokens = 512;
    setup.cache.staging_tokens = 512;
    return setup;
}

// Rows of a step: [tokens][heads][dim] per layer.
using Rows = std::function<float(int layer, int head, int64_t position, int channel)>;

// A runtime with rows and surprisal of its own.
struct Host {
    skerry_cache *cache;
    std::vector<Layer> layers;
    Rows key, value, query;
    std::function<float(int64_t)> nats;
    bool hands_surprisal = true;
    skerry_error error = make<skerry_error>();
    std::vector<std::vector<float>> outs, lses; // of the last step, per layer

    std::vector<float> numbers(const Rows &of, int layer, int heads, int dim, int64_t begin, int32_t count) const {
        std::vector<float> rows;
        for (int64_t p = begin; p < begin + count; ++p) {
            for (int h = 0; h < heads; ++h) {
                for (int c = 0; c < dim; ++c)
                    rows.push_back(of(layer, h, p, c));
            }
        }
        return rows;
    }

    // Status of the first call that failed; the step is then aborted.
    skerry_status step(skerry_seq seq, int64_t begin, int32_t count, uint32_t flags = 0, bool commit = true,
                       const std::function<void(skerry_step *)> &before_commit = {}) {
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = &seq;
        desc.token_counts = &count;
        desc.seq_count = 1;
        desc.flags = flags;
        skerry_step *open = nullptr;
        skerry_status status = skerry_step_begin(cache, &desc, &open, &error);
        if (status < 0) return status;
        outs.resize(layers.size());
        lses.resize(layers.size());
        for (int i = 0; i < static_cast<int>(layers.size()) && status >= 0; ++i) {
            const Layer &layer = layers[static_cast<size_t>(i)];
            if (layer.shared_with < 0) {
                const std::vector<float> keys = numbers(key, i, layer.kv_heads, layer.key_dim, begin, count);
                const std::vector<float> values = numbers(value, i, layer.kv_heads, layer.value_dim, begin, count);
                const skerry_tensor k = tensor(keys.data(), SKERRY_DTYPE_F32, {count, layer.kv_heads, layer.key_dim});
                const skerry_tensor v = tensor(values.data(), SKERRY_DTYPE_F32, {count, layer.kv_heads, layer.value_dim});
                status = skerry_step_append(open, i, &k, &v, nullptr, &error);
            }
            if (status < 0) break;
            const std::vector<float> queries = numbers(query, i, layer.query_heads, layer.key_dim, begin, count);
            std::vector<float> &out = outs[static_cast<size_t>(i)];
            std::vector<float> &lse = lses[static_cast<size_t>(i)];
            out.assign(static_cast<size_t>(count * layer.query_heads * layer.value_dim), 0);
            lse.assign(static_cast<size_t>(count * layer.query_heads), 0);
            const skerry_tensor q = tensor(queries.data(), SKERRY_DTYPE_F32, {count, layer.query_heads, layer.key_dim});
            const skerry_tensor o = tensor(out.data(), SKERRY_DTYPE_F32, {count, layer.query_heads, layer.value_dim});
            const skerry_tensor l = tensor(lse.data(), SKERRY_DTYPE_F32, {count, layer.query_heads});
            skerry_attend_desc attend = make<skerry_attend_desc>();
            attend.queries = &q;
            attend.out = &o;
            attend.lse = &l;
            attend.layer = i;
            status = skerry_step_attend(open, &attend, &error);
        }
        if (status >= 0 && hands_surprisal) {
            std::vector<float> given;
            for (int64_t p = begin; p < begin + count; ++p)
                given.push_back(nats(p));
            status = skerry_step_surprisal(open, 0, given.data(), count, &error);
        }
        if (status >= 0 && before_commit) before_commit(open);
        if (status >= 0 && commit) status = skerry_step_commit(open, &error);
        if (status < 0 || !commit) skerry_step_abort(open);
        return status;
    }

    void prompt(skerry_seq seq, int32_t tokens, int32_t chunk) {
        for (int32_t at = 0; at < tokens; at += chunk) {
            const int32_t count = std::min(chunk, tokens - at);
            const skerry_status status = step(seq, at, count, at + count < tokens ? SKERRY_STEP_PREFILL : 0);
            REQUIRE_MESSAGE(status == SKERRY_OK, error.message);
        }
    }
    void decode(skerry_seq seq, int64_t at) {
        const skerry_status status = step(seq, at, 1);
        REQUIRE_MESSAGE(status == SKERRY_OK, error.message);
    }
};

float noise(uint64_t seed, int layer, int head, int64_t position, int channel) {
    const uint64_t bits = mix(mix(seed + static_cast<uint64_t>(layer) * 31 + static_cast<uint64_t>(head)) ^
                              (static_cast<uint64_t>(position) << 20) ^ static_cast<uint64_t>(channel));
    return static_cast<float>(bits % 65536) / 16384.0f - 2.0f;
}

Host noisy(skerry_cache *cache, const std::vector<Layer> &layers) {
    Host host{cache, layers, {}, {}, {}, {}};
    host.key = [](int l, int h, int64_t p, int c) { return noise(1, l, h, p, c); };
    host.value = [](int l, int h, int64_t p, int c) { return noise(2, l, h, p, c); };
    host.query = [](int l, int h, int64_t p, int c) { return noise(3, l, h, p, c); };
    host.nats = [](int64_t p) { return p == 0 ? 0.0f : static_cast<float>(mix(static_cast<uint64_t>(p) * 7 + 5) % 8192) / 2048.0f; };
    return host;
}

// ---- the method once more, in double precision and with the whole prompt at hand ----

struct Oracle {
    const Host &host;
    int64_t tokens;
    int32_t l_min = 4;
    bool leak = true, spread = false;
    int32_t without_detail_from = INT32_MAX; // compressed spans from here on are never expanded
    skerry_dtype store = SKERRY_DTYPE_F32;
    std::vector<int64_t> anchors;
    struct Span {
        int64_t begin, end;
        bool full;
    };
    std::vector<Span> spans;

    void segment() {
        std::vector<double> h;
        for (int64_t p = 0; p < tokens; ++p)
            h.push_back(double(p == 0 ? 0.0f : host.nats(p)));
        double mean = 0, square = 0;
        for (double x : h)
            mean += x / double(tokens);
        for (double x : h)
            square += (x - mean) * (x - mean) / double(tokens);
        const double threshold = mean + std::sqrt(square);
        int64_t begin = 0;
        const auto close = [&](int64_t end) {
            if (begin < end) spans.push_back({begin, end, end - begin < l_min});
        };
        for (int64_t p = 0; p < tokens; ++p) {
            if (!(h[static_cast<size_t>(p)] > threshold)) continue;
            anchors.push_back(p);
            close(p);
            begin = p + 1;
        }
        if (anchors.empty() && tokens >= l_min && tokens > 1) begin = 1;
        close(tokens);
    }

    double number(const Rows &rows, int layer, int head, int64_t p, int c) const {
        return double(round_as(rows(layer, head, p, c), store));
    }

    // out [value_dim] and which compressed spans the head expands; `others`: what the group's other heads add to its rows.
    struct Head {
        std::vector<double> out;
        double lse;
        std::set<int> zoomed;
    };
    std::set<int> choose(const Weights &weights, int layer, int head, int64_t position) const {
        const Layer &shape = host.layers[static_cast<size_t>(layer)];
        const int source = shape.shared_with < 0 ? layer : shape.shared_with, d = shape.key_dim, kv = head / shape.group();
        std::set<int> chosen;
        int c = 0;
        for (const Span &span : spans) {
            if (span.full) continue;
            const std::vector<double> mean = mean_of(host.key, source, kv, span, d);
            double product = 0, square = 0;
            for (int64_t r = 0; r < weights.size.summary_dim; ++r) {
                double q = 0, k = 0;
                for (int j = 0; j < d; ++j) {
                    const double weight = double(
                        weights.w[static_cast<size_t>(((layer * weights.size.query_heads + head) * weights.size.summary_dim + r) * d + j)]);
                    q += weight * double(host.query(layer, head, position, j));
                    k += weight * mean[static_cast<size_t>(j)];
                }
                product += q * k;
                square += k * k;
            }
            const double logit = product / std::max(std::sqrt(square), 1e-8) / std::sqrt(double(weights.size.summary_dim)) +
                                 std::log(double(span.end - span.begin));
            const double alpha = 1 / (1 + std::exp(-logit));
            if (alpha > double(weights.tau[static_cast<size_t>(layer * weights.size.query_heads + head)]) && c < without_detail_from)
                chosen.insert(c);
            ++c;
        }
        return chosen;
    }
    std::vector<double> weights_of(const Span &span) const {
        std::vector<double> w;
        double sum = 0;
        for (int64_t p = span.begin; p < span.end; ++p)
            sum += double(p == 0 ? 0.0f : host.nats(p));
        for (int64_t p = span.begin; p < span.end; ++p)
            w.push_back(sum > 0 ? double(p == 0 ? 0.0f : host.nats(p)) / sum : 1 / double(span.end - span.begin));
        return w;
    }
    std::vector<double> mean_of(const Rows &rows, int layer, int head, const Span &span, int dim) const {
        const std::vector<double> w = weights_of(span);
        std::vector<double> mean(static_cast<size_t>(dim));
        for (int64_t p = span.begin; p < span.end; ++p) {
            for (int c = 0; c < dim; ++c)
                mean[static_cast<size_t>(c)] += w[static_cast<size_t>(p - span.begin)] * number(rows, layer, head, p, c);
        }
        return mean;
    }

    // Gates 1 and full rank: expanded spans are their tokens.
    Head attend(const Weights &weights, int layer, int head, int64_t position) const {
        const Layer &shape = host.layers[static_cast<size_t>(layer)];
        const int source = shape.shared_with < 0 ? layer : shape.shared_with, d = shape.key_dim, kv = head / shape.group();
        Head result;
        result.zoomed = choose(weights, layer, head, position);
        std::set<int> group;
        for (int g = 0; g < shape.group(); ++g) {
            const std::set<int> other = choose(weights, layer, kv * shape.group() + g, position);
            group.insert(other.begin(), other.end());
        }
        std::vector<double> scores;
        std::vector<std::vector<double>> values;
        const auto product = [&](const std::vector<double> &key) {
            double sum = 0;
            for (int j = 0; j < d; ++j)
                sum += key[static_cast<size_t>(j)] * double(host.query(layer, head, position, j));
            return sum * shape.logit_scale();
        };
        const auto token = [&](int64_t p, double gate) {
            std::vector<double> k, v;
            for (int c = 0; c < d; ++c)
                k.push_back(number(host.key, source, kv, p, c));
            for (int c = 0; c < shape.value_dim; ++c)
                v.push_back(number(host.value, source, kv, p, c));
            scores.push_back(product(k) + gate);
            values.push_back(v);
        };
        const double off = leak ? std::log(1e-6) : -INFINITY;
        for (int64_t p : anchors)
            token(p, 0);
        int c = 0;
        for (const Span &span : spans) {
            if (span.full) {
                for (int64_t p = span.begin; p < span.end; ++p)
                    token(p, 0);
                continue;
            }
            const bool expanded = result.zoomed.count(c) != 0;
            const std::vector<double> mean = mean_of(host.key, source, kv, span, d);
            double score = product(mean) + std::log(double(span.end - span.begin)) + (expanded ? off : 0);
            if (spread) {
                const std::vector<double> w = weights_of(span);
                for (int j = 0; j < d; ++j) {
                    double variance = 0;
                    for (int64_t p = span.begin; p < span.end; ++p) {
                        const double apart = number(host.key, source, kv, p, j) - mean[static_cast<size_t>(j)];
                        variance += w[static_cast<size_t>(p - span.begin)] * apart * apart;
                    }
                    const double q = double(host.query(layer, head, position, j));
                    score += 0.5 * shape.logit_scale() * shape.logit_scale() * q * q * variance;
                }
            }
            scores.push_back(score);
            values.push_back(mean_of(host.value, source, kv, span, shape.value_dim));
            for (int64_t p = span.begin; p < span.end && group.count(c) != 0; ++p)
                token(p, expanded ? 0 : off);
            ++c;
        }
        double most = -INFINITY, sum = 0;
        for (double s : scores)
            most = std::max(most, s);
        result.out.assign(static_cast<size_t>(shape.value_dim), 0);
        for (size_t i = 0; i < scores.size(); ++i) {
            const double weight = std::exp(scores[i] - most);
            sum += weight;
            for (size_t j = 0; j < result.out.size(); ++j)
                result.out[j] += weight * values[i][j];
        }
        for (double &x : result.out)
            x /= sum;
        result.lse = most + std::log(sum);
        return result;
    }

    // Outputs, log-sum-exps and expanded spans of the last step, a single token.
    void check(const Weights &weights, skerry_seq seq, int64_t position, double tolerance) const {
        for (int i = 0; i < static_cast<int>(host.layers.size()); ++i) {
            const Layer &shape = host.layers[static_cast<size_t>(i)];
            std::vector<std::set<int>> group(static_cast<size_t>(shape.kv_heads));
            for (int h = 0; h < shape.query_heads; ++h) {
                CAPTURE(i);
                CAPTURE(h);
                const Head wanted = attend(weights, i, h, position);
                for (int c = 0; c < shape.value_dim; ++c) {
                    const size_t at = static_cast<size_t>(h * shape.value_dim + c);
                    CHECK(double(host.outs[static_cast<size_t>(i)][at]) ==
                          doctest::Approx(wanted.out[static_cast<size_t>(c)]).epsilon(tolerance));
                }
                CHECK(double(host.lses[static_cast<size_t>(i)][static_cast<size_t>(h)]) == doctest::Approx(wanted.lse).epsilon(tolerance));
                group[static_cast<size_t>(h / shape.group())].insert(wanted.zoomed.begin(), wanted.zoomed.end());
            }
            if (shape.shared_with >= 0) continue;
            for (int head = 0; head < shape.kv_heads; ++head) {
                std::set<int> zoomed;
                int c = 0;
                for (const skerry_range &range : ranges_of(host.cache, seq, i, head)) {
                    if (range.tier != SKERRY_TIER_SUMMARY) continue;
                    if ((range.flags & SKERRY_RANGE_ZOOMED) != 0) zoomed.insert(c);
                    CHECK(((range.flags & SKERRY_RANGE_DETAIL) != 0) == (c < without_detail_from));
                    ++c;
                }
                CHECK(zoomed == group[static_cast<size_t>(head)]);
            }
        }
    }
};

Weights noisy_weights(const RouterSize &size, float tau) {
    Weights weights(size);
    for (size_t i = 0; i < weights.w.size(); ++i)
        weights.w[i] = noise(4, 0, 0, static_cast<int64_t>(i), 0);
    std::fill(weights.tau.begin(), weights.tau.end(), tau);
    return weights;
}

RouterSize one_layer(int64_t query_heads, int64_t kv_heads, int64_t key_dim, int64_t summary_dim, int64_t rank_max) {
    RouterSize size;
    size.layers = 1;
    size.query_heads = query_heads;
    size.kv_heads = kv_heads;
    size.key_dim = key_dim;
    size.summary_dim = summary_dim;
    size.rank_max = rank_max;
    return size;
}
// Routers know one number of heads for all layers.
std::vector<Layer> router_layers() {
    std::vector<Layer> layers = layers_of(3, 2, 4, 8, 8);
    layers[2].shared_with = 0;
    return layers;
}
RouterSize router_size() {
    RouterSize size;
    size.layers = 3;
    size.query_heads = 4;
    size.kv_heads = 2;
    size.key_dim = 8;
    size.summary_dim = 3;
    size.rank_max = 8;
    return size;
}

// ---- T19 ----

float golden_nats(int64_t t) { return t == 0 ? 0 : t == 3 ? 4 : t == 9 ? 5 : 0.25f * static_cast<float>(1 + t % 3); }

struct Golden {
    Context context = make_context(0u);
    std::vector<Layer> layers = layers_of(1, 1, 2, 4, 4);
    Weights weights{one_layer(2, 1, 4, 2, 8)};

    explicit Golden(int64_t rank_max = 8) : weights(one_layer(2, 1, 4, 2, rank_max)) {
        for (int h = 0; h < 2; ++h) {
            for (int p = 0; p < 2; ++p) {
                for (int j = 0; j < 4; ++j)
                    weights.w[static_cast<size_t>((h * 2 + p) * 4 + j)] = static_cast<float>(std::cos(0.4 * (h + 1) * (p + 1) + 0.6 * j));
            }
        }
    }
    Host host(skerry_cache *cache) const {
        Host made{cache, layers, {}, {}, {}, golden_nats};
        made.key = [](int, int, int64_t t, int j) { return static_cast<float>(std::sin(0.3 * double(t + 1) * (j + 1))); };
        made.value = [](int, int, int64_t t, int j) { return static_cast<float>(std::cos(0.2 * double(t + 1) + 0.5 * j)); };
        made.query = [](int, int h, int64_t, int j) { return static_cast<float>(2 * std::sin(0.7 * (h + 1) + 0.9 * j)); };
        return made;
    }
    // Both heads' outputs for a token behind the 16 of the prompt.
    std::vector<float> run(float tau0, float tau1, double gate, uint32_t flags = 0) {
        weights.tau = {tau0, tau1};
        weights.gate = gate;
        const Router router = weights.open(context.get());
        Setup setup = paper_setup(layers, router.get());
        setup.sekv.flags = flags;
        const Cache cache = make_cache(context.get(), setup);
        Host made = host(cache.get());
        const skerry_seq seq = make_seq(cache.get());
        made.prompt(seq, 16, 16);
        made.decode(seq, 16);
        check_cache(cache.get());
        return made.outs[0];
    }
};

void check_row(const std::vector<float> &out, int head, std::initializer_list<double> wanted, double tolerance = 1.5e-6) {
    int c = 0;
    for (double value : wanted) {
        CAPTURE(head);
        CAPTURE(c);
        CHECK(std::fabs(double(out[static_cast<size_t>(head * 4 + c)]) - value) <= tolerance);
        ++c;
    }
}

} // namespace

TEST_CASE("T19: the golden layer through a cache") {
    const auto full0 = {.316925, .014341, -.291754, -.526418};
    const auto full1 = {.348414, -.014377, -.373649, -.641437};
    const auto coarse0 = {.334674, .023262, -.293846, -.539010};
    const auto coarse1 = {.347189, -.017667, -.378197, -.646132};
    Golden golden;
    std::vector<float> out = golden.run(1, 1, 1);
    check_row(out, 0, coarse0);
    check_row(out, 1, coarse1);
    out = golden.run(0, 0, 1);
    check_row(out, 0, full0, 3e-6); // summary rows weigh 1e-6
    check_row(out, 1, full1, 3e-6);
    out = golden.run(0, 0, 1, SKERRY_SEKV_ABSENT_ROWS);
    check_row(out, 0, full0);
    check_row(out, 1, full1);
    out = golden.run(.4f, .45f, 1);
    check_row(out, 0, full0, 3e-6);
    check_row(out, 1, {.368953, .001092, -.367036, -.645301}, 3e-6);
    out = golden.run(.45f, .98f, 1); // head 1's fine rows exist and are off
    check_row(out, 0, full0, 3e-6);
    check_row(out, 1, coarse1, 3e-6);
    out = golden.run(0, 0, .5);
    check_row(out, 0, {.414440, .152053, -.147562, -.411049}, 3e-6);
    check_row(out, 1, {.388835, .088863, -.232866, -.497582}, 3e-6);
    out = Golden(2).run(0, 0, 1);
    check_row(out, 0, {.307127, .011159, -.287541, -.515841}, 3e-6);
    check_row(out, 1, {.332598, -.017990, -.364174, -.621196}, 3e-6);
}

TEST_CASE("T19: what the golden layer's ranges and bytes are") {
    Golden golden;
    golden.weights.tau = {.45f, .98f};
    const Router router = golden.weights.open(golden.context.get());
    Setup setup = paper_setup(golden.layers, router.get());
    const Cache cache = make_cache(golden.context.get(), setup);
    Host host = golden.host(cache.get());
    const skerry_seq seq = make_seq(cache.get());
    host.prompt(seq, 16, 16);
    host.decode(seq, 16);
    struct Wanted {
        int64_t begin, end;
        skerry_tier tier;
        uint32_t flags;
        uint64_t bytes;
    };
    // Device: f32 rows of 4 + 4 numbers; a summary is one such row and 2 query heads' projections of 2 numbers.
    const Wanted wanted[] = {{0, 3, SKERRY_TIER_FULL, 0, 96},
                             {3, 4, SKERRY_TIER_FULL, 0, 32},
                             {4, 9, SKERRY_TIER_SUMMARY, SKERRY_RANGE_DETAIL | SKERRY_RANGE_ZOOMED, 48},
                             {9, 10, SKERRY_TIER_FULL, 0, 32},
                             {10, 16, SKERRY_TIER_SUMMARY, SKERRY_RANGE_DETAIL | SKERRY_RANGE_ZOOMED, 48},
                             {16, 17, SKERRY_TIER_EVICTED, 0, 0}};
    const std::vector<skerry_range> ranges = ranges_of(cache.get(), seq, 0, 0);
    REQUIRE(ranges.size() == std::size(wanted));
    for (size_t i = 0; i < ranges.size(); ++i) {
        CAPTURE(i);
        CHECK(ranges[i].begin == wanted[i].begin);
        CHECK(ranges[i].end == wanted[i].end);
        CHECK(ranges[i].tier == wanted[i].tier);
        CHECK((ranges[i].flags & 0xffff) == wanted[i].flags);
        const uint32_t error = ranges[i].flags >> SKERRY_DETAIL_ERROR_SHIFT, nothing = wanted[i].tier == SKERRY_TIER_SUMMARY ? 1 : 0;
        CHECK(error == nothing); // exact but for rounding
        CHECK(ranges[i].bytes == wanted[i].bytes);
    }
    const skerry_seq_info info = info_of(cache.get(), seq);
    CHECK(info.full_tokens == 5);
    CHECK(info.host_tokens == 11);
    CHECK(info.evicted_tokens == 1);
    CHECK(info.lowest_truncate == 16);
    // As published: exact rows, and f32 summaries of all three spans.
    CHECK(info.charged_bytes == 5 * 32 + 3 * 32);
    CHECK(info.used_bytes == 5 * 32 + 2 * 48);
    // Factors of 5 and 6 tokens at rank 4, keys and values, and their gates.
    CHECK(info.host_bytes == 4 * (2 * 4 * (5 + 1 + 4 + 1) + 2 * 4 * (6 + 1 + 4 + 1)));
    const skerry_memory_info memory = memory_of(cache.get());
    CHECK(memory.pool_bytes == info.used_bytes);
    CHECK(memory.used_full_bytes == 5 * 32);
    CHECK(memory.used_summary_bytes == 2 * 48);
    CHECK(memory.host_bytes == info.host_bytes);
    CHECK(memory.used_host_bytes == info.host_bytes);
    CHECK(memory.used_bytes <= memory.pool_bytes + memory.table_bytes);
    CHECK(memory.used_bytes > memory.pool_bytes);
    CHECK(memory.allocated_bytes ==
          memory.pool_bytes + memory.table_bytes + memory.staging_bytes + memory.exact_bytes + memory.host_bytes + memory.fixed_bytes);
    const skerry_counters counters = counters_of(cache.get());
    CHECK(counters.details_written == 2);
    CHECK(counters.detail_bytes_written == info.host_bytes);
    CHECK(counters.zooms == 2);
    CHECK(counters.zooms_fetched == 2);
    CHECK(counters.fetched_bytes == info.host_bytes);
}

TEST_CASE("T10, T19: the error of a rank that is cut is known per span") {
    Golden golden(2);
    const Router router = golden.weights.open(golden.context.get());
    Setup setup = paper_setup(golden.layers, router.get());
    const Cache cache = make_cache(golden.context.get(), setup);
    Host host = golden.host(cache.get());
    const skerry_seq seq = make_seq(cache.get());
    host.prompt(seq, 16, 16);
    // Singular values of the keys; the values' third and fourth are 0.
    const double sigmas[2][4] = {{2.280202, 2.169840, 1.238745, .069590}, {2.288890, 2.274270, 1.316929, .080358}};
    int span = 0;
    for (const skerry_range &range : ranges_of(cache.get(), seq, 0, 0)) {
        if (range.tier != SKERRY_TIER_SUMMARY) continue;
        double kept = 0, all = 0;
        for (int i = 0; i < 4; ++i) {
            const double square = sigmas[span][i] * sigmas[span][i];
            kept += i < 2 ? square : 0;
            all += square;
        }
        const double error = std::sqrt((all - kept) / all), reported = double(range.flags >> SKERRY_DETAIL_ERROR_SHIFT) / 32768;
        CHECK(reported >= error - 1e-5);
        CHECK(reported <= error * 1.06 + 1e-4);
        ++span;
    }
    CHECK(span == 2);
}

TEST_CASE("paper: random prompts against the rules in double precision") {
    const Context context = make_context(2u);
    const std::vector<Layer> layers = router_layers();
    for (float tau : {0.0f, 0.85f, 0.95f, 1.0f}) {
        for (uint32_t flags :
             {0u, uint32_t{SKERRY_SEKV_ABSENT_ROWS}, uint32_t{SKERRY_SEKV_SECOND_ORDER}, uint32_t{SKERRY_SEKV_VALUE_GATES}}) {
            for (skerry_dtype store : {skerry_dtype{SKERRY_DTYPE_F32}, skerry_dtype{SKERRY_DTYPE_F16}, skerry_dtype{SKERRY_DTYPE_BF16}}) {
                if (store != SKERRY_DTYPE_F32 && flags != 0) continue;
                CAPTURE(tau);
                CAPTURE(flags);
                CAPTURE(store);
                const Weights weights = noisy_weights(router_size(), tau);
                const Router router = weights.open(context.get());
                Setup setup = paper_setup(layers, router.get());
                setup.sekv.flags = flags;
                setup.cache.store_dtype = store;
                const Cache cache = make_cache(context.get(), setup);
                Host host = noisy(cache.get(), layers);
                const skerry_seq seq = make_seq(cache.get());
                host.prompt(seq, 75, 75);
                Oracle oracle{host, 75};
                oracle.leak = (flags & SKERRY_SEKV_ABSENT_ROWS) == 0;
                oracle.spread = (flags & SKERRY_SEKV_SECOND_ORDER) != 0;
                oracle.store = store;
                oracle.segment();
                CHECK(oracle.anchors.size() > 5);
                for (int64_t at = 75; at < 78; ++at) {
                    host.decode(seq, at);
                    oracle.check(weights, seq, at, 2e-5);
                }
                check_cache(cache.get());
            }
        }
    }
}

TEST_CASE("T20: permuting KV heads together with their query heads permutes outputs") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = layers_of(1, 2, 4, 4, 4);
    const auto run = [&](bool swapped) {
        const auto head = [swapped](int h, int heads) { return swapped ? (h + heads / 2) % heads : h; };
        Weights weights = noisy_weights(one_layer(4, 2, 4, 2, 4), 0.9f);
        if (swapped) std::rotate(weights.w.begin(), weights.w.begin() + 16, weights.w.end());
        const Router router = weights.open(context.get());
        Setup setup = paper_setup(layers, router.get());
        const Cache cache = make_cache(context.get(), setup);
        Host host = noisy(cache.get(), layers);
        host.key = [head](int l, int h, int64_t p, int c) { return noise(1, l, head(h, 2), p, c); };
        host.value = [head](int l, int h, int64_t p, int c) { return noise(2, l, head(h, 2), p, c); };
        host.query = [head](int l, int h, int64_t p, int c) { return noise(3, l, head(h, 4), p, c); };
        const skerry_seq seq = make_seq(cache.get());
        host.prompt(seq, 40, 40);
        host.decode(seq, 40);
        return host.outs[0];
    };
    const std::vector<float> plain = run(false), swapped = run(true);
    for (size_t i = 0; i < plain.size(); ++i)
        CHECK(plain[i] == swapped[(i + 8) % 16]);
}

TEST_CASE("T25: generated tokens are dropped, and the set that is attended to stays as it was") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    host.query = [](int l, int h, int64_t, int c) { return noise(3, l, h, 7, c); }; // the same at every position
    const skerry_seq seq = make_seq(cache.get());
    host.prompt(seq, 50, 50);
    host.decode(seq, 50);
    const std::vector<std::vector<float>> first = host.outs;
    const uint64_t bytes = memory_of(cache.get()).used_bytes;
    for (int64_t at = 51; at < 70; ++at) {
        host.decode(seq, at);
        CHECK(host.outs == first);
    }
    CHECK(memory_of(cache.get()).used_bytes == bytes);
    CHECK(info_of(cache.get(), seq).length_tokens == 70);
    CHECK(info_of(cache.get(), seq).evicted_tokens == 20 * 4);
    // Rows of one step are as independent as steps, also when a caller says that a prompt goes on.
    REQUIRE(host.step(seq, 70, 3, SKERRY_STEP_PREFILL) == SKERRY_OK);
    for (size_t i = 0; i < layers.size(); ++i) {
        for (size_t k = 0; k < host.outs[i].size(); ++k)
            CHECK(host.outs[i][k] == first[i][k % first[i].size()]);
    }
    // Back to the prompt's end, and no further.
    REQUIRE(skerry_seq_truncate(cache.get(), seq, 50, nullptr) == SKERRY_OK);
    skerry_error error = make<skerry_error>();
    CHECK(skerry_seq_truncate(cache.get(), seq, 49, &error) == SKERRY_ERROR_ARGUMENT);
    CHECK(error.allowed == 50);
    host.decode(seq, 50);
    CHECK(host.outs == first);
}

TEST_CASE("T27: chunks of the prompt, workers and a host's own copies change nothing") {
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    uint64_t wanted = 0;
    std::vector<std::vector<float>> outs;
    struct Copies {
        std::atomic<uint64_t> bytes{0};
        static void copy(void *user, void *to, const void *from, size_t count) {
            static_cast<Copies *>(user)->bytes += count;
            std::memcpy(to, from, count);
        }
    };
    for (int32_t chunk : {96, 1, 7, 32}) {
        for (uint32_t workers : {0u, 3u}) {
            Copies copies;
            skerry_context_desc desc = make<skerry_context_desc>();
            desc.worker_count = workers;
            desc.transfer = &Copies::copy;
            desc.transfer_user = &copies;
            desc.transfer_threads = workers;
            const Context context = make_context(&desc);
            const Router router = weights.open(context.get());
            Setup setup = paper_setup(layers, router.get());
            const Cache cache = make_cache(context.get(), setup);
            Host host = noisy(cache.get(), layers);
            const skerry_seq seq = make_seq(cache.get());
            host.prompt(seq, 96, chunk);
            const uint64_t here = fingerprint_of(cache.get(), seq);
            if (wanted == 0) wanted = here;
            CHECK(here == wanted);
            host.decode(seq, 96);
            if (outs.empty()) outs = host.outs;
            CHECK(host.outs == outs);
            CHECK(copies.bytes == counters_of(cache.get()).fetched_bytes);
            CHECK(copies.bytes > 0);
        }
    }
}

TEST_CASE("T6, T7: prompts without anchors, and of a token") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = layers_of(1, 1, 1, 4, 4);
    const Weights weights = noisy_weights(one_layer(1, 1, 4, 2, 4), 0.0f);
    const Router router = weights.open(context.get());
    struct Case {
        std::vector<float> nats;
        int32_t l_min;
        std::vector<std::pair<int64_t, skerry_tier>> ends;
    };
    const Case cases[] = {
        {{0, 1, 1, 1, 1}, 0, {{1, SKERRY_TIER_EVICTED}, {5, SKERRY_TIER_SUMMARY}}}, // compat: token 0 is lost
        {{0, 2, 2, 2}, 0, {{1, SKERRY_TIER_EVICTED}, {4, SKERRY_TIER_FULL}}},
        {{9}, 0, {{1, SKERRY_TIER_FULL}}}, // the first token's surprisal counts as 0
        {{0}, SKERRY_NONE_TOKENS, {{1, SKERRY_TIER_SUMMARY}}},
        {{0, 2}, 0, {{2, SKERRY_TIER_FULL}}},
        {{0, 9, 9, 0, 0, 0, 0, 0, 0, 0},
         0,
         {{1, SKERRY_TIER_FULL}, {2, SKERRY_TIER_FULL}, {3, SKERRY_TIER_FULL}, {10, SKERRY_TIER_SUMMARY}}},
    };
    for (const Case &one : cases) {
        Setup setup = paper_setup(layers, router.get());
        setup.sekv.span_min_tokens = one.l_min;
        const Cache cache = make_cache(context.get(), setup);
        Host host = noisy(cache.get(), layers);
        host.nats = [&](int64_t p) { return one.nats[static_cast<size_t>(p)]; };
        const skerry_seq seq = make_seq(cache.get());
        host.prompt(seq, static_cast<int32_t>(one.nats.size()), 64);
        const std::vector<skerry_range> ranges = ranges_of(cache.get(), seq, 0, 0);
        REQUIRE(ranges.size() == one.ends.size());
        for (size_t i = 0; i < ranges.size(); ++i) {
            CHECK(ranges[i].end == one.ends[i].first);
            CHECK(ranges[i].tier == one.ends[i].second);
        }
        host.nats = [](int64_t) { return 1.0f; };
        host.decode(seq, static_cast<int64_t>(one.nats.size()));
        for (float x : host.outs[0])
            CHECK(std::isfinite(x));
    }
}

TEST_CASE("T14: budgets in entries: refused at the prompt's end, refused per group, or kept by the group") {
    const Context context = make_context(2u);
    const std::vector<Layer> layers = layers_of(1, 1, 2, 4, 4);
    // Head 0 looks for keys along +x, head 1 along -x; the prompt has five of the ones, an anchor, six of the others.
    Weights weights(one_layer(2, 1, 4, 1, 4));
    weights.w = {1, 0, 0, 0, 1, 0, 0, 0};
    weights.tau = {.9f, .9f};
    const Router router = weights.open(context.get());
    const auto described = [&](int32_t entries, uint32_t flags) {
        Setup setup = paper_setup(layers, router.get());
        setup.sekv.budget_entries = entries;
        setup.sekv.flags = flags;
        return setup;
    };
    const auto host_of = [&](skerry_cache *cache) {
        Host host = noisy(cache, layers);
        host.key = [](int, int, int64_t p, int c) { return c == 0 ? (p < 5 ? 1.0f : -1.0f) : 0.0f; };
        host.query = [](int, int h, int64_t, int c) { return c == 0 ? (h == 0 ? 10.0f : -10.0f) : 0.0f; };
        host.nats = [](int64_t p) { return p == 5 ? 9.0f : p == 0 ? 0.0f : 1.0f; };
        return host;
    };
    const auto zoomed = [&](skerry_cache *cache, skerry_seq seq) {
        std::vector<int64_t> begins;
        for (const skerry_range &range : ranges_of(cache, seq, 0, 0)) {
            if ((range.flags & SKERRY_RANGE_ZOOMED) != 0) begins.push_back(range.begin);
        }
        return begins;
    };
    // One anchor and two spans: 3 entries; 4 and 5 more when they are expanded.
    for (int32_t entries : {0, 12, 100}) {
        Setup setup = described(entries, 0);
        const Cache cache = make_cache(context.get(), setup);
        Host host = host_of(cache.get());
        const skerry_seq seq = make_seq(cache.get());
        host.prompt(seq, 12, 12);
        host.decode(seq, 12);
        CHECK(zoomed(cache.get(), seq) == std::vector<int64_t>{0, 6});
    }
    {
        Setup setup = described(8, 0);
        const Cache cache = make_cache(context.get(), setup);
        Host host = host_of(cache.get());
        const skerry_seq seq = make_seq(cache.get());
        host.prompt(seq, 12, 12);
        const uint64_t before = fingerprint_of(cache.get(), seq);
        CHECK(host.step(seq, 12, 1) == SKERRY_ERROR_OVER_BUDGET);
        CHECK(std::string(host.error.message).find("budget_entries = 8") != std::string::npos);
        CHECK(fingerprint_of(cache.get(), seq) == before);
        CHECK(info_of(cache.get(), seq).length_tokens == 12);
    }
    for (const auto &[entries, begins] :
         std::vector<std::pair<int32_t, std::vector<int64_t>>>{{12, {0, 6}}, {11, {6}}, {8, {6}}, {7, {0}}, {6, {}}, {3, {}}}) {
        // The longer span is the one whose alpha is larger, by ln 6 - ln 5.
        CAPTURE(entries);
        Setup setup = described(entries, SKERRY_SEKV_GROUP_CHOICE);
        const Cache cache = make_cache(context.get(), setup);
        Host host = host_of(cache.get());
        const skerry_seq seq = make_seq(cache.get());
        host.prompt(seq, 12, 12);
        host.decode(seq, 12);
        CHECK(zoomed(cache.get(), seq) == begins);
    }
    {
        Setup setup = described(2, SKERRY_SEKV_GROUP_CHOICE);
        const Cache cache = make_cache(context.get(), setup);
        Host host = host_of(cache.get());
        const skerry_seq seq = make_seq(cache.get());
        CHECK(host.step(seq, 0, 12) == SKERRY_ERROR_OVER_BUDGET);
        CHECK(host.error.found == 3);
        CHECK(host.error.allowed == 2);
        CHECK(info_of(cache.get(), seq).length_tokens == 0);
        check_cache(cache.get());
    }
}

TEST_CASE("paper: a limit in bytes is checked when the prompt ends, and may be raised") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    uint64_t taken = 0;
    {
        const Cache cache = make_cache(context.get(), setup);
        Host host = noisy(cache.get(), layers);
        host.prompt(make_seq(cache.get()), 120, 50);
        taken = memory_of(cache.get()).pool_bytes + memory_of(cache.get()).table_bytes;
    }
    setup.budget.bytes = taken - 1;
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const skerry_seq seq = make_seq(cache.get());
    REQUIRE(host.step(seq, 0, 60, SKERRY_STEP_PREFILL) == SKERRY_OK);
    const uint64_t before = fingerprint_of(cache.get(), seq);
    CHECK(host.step(seq, 60, 60) == SKERRY_ERROR_OVER_BUDGET);
    CHECK(host.error.found == static_cast<int64_t>(taken));
    CHECK(fingerprint_of(cache.get(), seq) == before);
    check_cache(cache.get());
    // Nothing of the refused prompt stays behind on the device.
    CHECK(memory_of(cache.get()).pool_bytes == 0);
    skerry_budget_desc budget = make<skerry_budget_desc>();
    skerry_error error = make<skerry_error>();
    budget.bytes = taken;
    CHECK(skerry_cache_set_budget(cache.get(), &budget, &error) == SKERRY_ERROR_STATE); // collecting
    REQUIRE(skerry_seq_truncate(cache.get(), seq, 0, nullptr) == SKERRY_OK);
    REQUIRE_MESSAGE(skerry_cache_set_budget(cache.get(), &budget, &error) == SKERRY_OK, error.message);
    host.prompt(seq, 120, 60);
    CHECK(memory_of(cache.get()).pool_bytes + memory_of(cache.get()).table_bytes == taken);
    CHECK(memory_of(cache.get()).used_bytes <= taken);
    budget.bytes = taken - 1;
    CHECK(skerry_cache_set_budget(cache.get(), &budget, &error) == SKERRY_ERROR_OVER_BUDGET);
    host.decode(seq, 120);
    // The cache holds less than it would have in full precision: that is what a budget is for.
    CHECK(memory_of(cache.get()).pool_bytes < memory_of(cache.get()).full_cache_bytes);
}

TEST_CASE("paper: a full host leaves the last spans without factors") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.0f); // everything expands
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    setup.budget.host_bytes = 20000;
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const skerry_seq seq = make_seq(cache.get());
    host.prompt(seq, 120, 120);
    const skerry_memory_info memory = memory_of(cache.get());
    CHECK(memory.host_bytes <= 20000);
    CHECK(memory.host_bytes > 10000);
    const skerry_counters counters = counters_of(cache.get());
    CHECK(counters.details_refused > 0);
    Oracle oracle{host, 120};
    oracle.segment();
    oracle.without_detail_from = static_cast<int32_t>(counters.details_written / 4);
    host.decode(seq, 120);
    oracle.check(weights, seq, 120, 2e-5);
}

TEST_CASE("paper: forks share a memory, and sequences are used again") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    setup.cache.max_sequences = 3;
    setup.cache.staging_tokens = 256;
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const uint64_t empty = memory_of(cache.get()).pool_bytes;
    const skerry_seq seq = make_seq(cache.get());
    // A fork of half a prompt goes on by itself.
    REQUIRE(host.step(seq, 0, 40, SKERRY_STEP_PREFILL) == SKERRY_OK);
    skerry_seq half{};
    REQUIRE(skerry_seq_fork(cache.get(), seq, 30, &half, nullptr) == SKERRY_OK);
    REQUIRE(host.step(seq, 40, 40) == SKERRY_OK);
    REQUIRE(host.step(half, 30, 50) == SKERRY_OK);
    CHECK(fingerprint_of(cache.get(), seq) == fingerprint_of(cache.get(), half));
    skerry_seq child{};
    const skerry_memory_info before = memory_of(cache.get());
    REQUIRE(skerry_seq_fork(cache.get(), seq, -1, &child, nullptr) == SKERRY_OK);
    CHECK(memory_of(cache.get()).pool_bytes == before.pool_bytes);
    CHECK(memory_of(cache.get()).host_bytes == before.host_bytes);
    CHECK(memory_of(cache.get()).used_full_bytes == before.used_full_bytes);
    CHECK((ranges_of(cache.get(), seq, 0, 0)[1].flags & SKERRY_RANGE_SHARED) != 0);
    CHECK((ranges_of(cache.get(), half, 0, 0)[1].flags & SKERRY_RANGE_SHARED) == 0);
    host.decode(seq, 80);
    const std::vector<std::vector<float>> outs = host.outs;
    CHECK(info_of(cache.get(), child).length_tokens == 80);
    REQUIRE(skerry_seq_drop(cache.get(), seq, nullptr) == SKERRY_OK);
    check_cache(cache.get());
    host.decode(child, 80);
    CHECK(host.outs == outs);
    skerry_error error = make<skerry_error>();
    skerry_seq other{};
    CHECK(skerry_seq_fork(cache.get(), child, 20, &other, &error) == SKERRY_ERROR_ARGUMENT);
    REQUIRE(skerry_seq_drop(cache.get(), child, nullptr) == SKERRY_OK);
    REQUIRE(skerry_seq_truncate(cache.get(), half, 0, nullptr) == SKERRY_OK);
    CHECK(memory_of(cache.get()).pool_bytes == empty);
    CHECK(memory_of(cache.get()).host_bytes == 0);
    host.prompt(half, 80, 80);
    host.decode(half, 80);
    CHECK(host.outs == outs);
}

TEST_CASE("paper: an aborted token leaves what was expanded as it was; sequences of one step do not touch each other") {
    const Context context = make_context(2u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.95f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const skerry_seq seq = make_seq(cache.get());
    host.prompt(seq, 90, 90);
    host.decode(seq, 90);
    const auto flags = [&] {
        std::vector<uint32_t> all;
        for (int head = 0; head < 2; ++head) {
            for (const skerry_range &range : ranges_of(cache.get(), seq, 1, head))
                all.push_back(range.flags);
        }
        return all;
    };
    const std::vector<uint32_t> before = flags();
    REQUIRE(host.step(seq, 91, 1, 0, false) == SKERRY_OK);
    CHECK(flags() == before);
    CHECK(info_of(cache.get(), seq).length_tokens == 91);
    host.decode(seq, 91);
    CHECK(flags() != before);
}

TEST_CASE("paper: out of memory at the end of a prompt loses nothing") {
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    uint64_t wanted = 0;
    for (int64_t n = -1; n < 200; ++n) {
        Allocator allocator;
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.allocator = allocator.hooks();
        const Context context = make_context(&desc);
        const Router router = weights.open(context.get());
        Setup setup = paper_setup(layers, router.get());
        setup.cache.max_sequences = 2;
        const Cache cache = make_cache(context.get(), setup);
        Host host = noisy(cache.get(), layers);
        const skerry_seq seq = make_seq(cache.get());
        REQUIRE(host.step(seq, 0, 40, SKERRY_STEP_PREFILL) == SKERRY_OK);
        const uint64_t before = fingerprint_of(cache.get(), seq);
        const skerry_status status = host.step(seq, 40, 40, 0, true, [&](skerry_step *) { allocator.fail_after(n); });
        const bool failed = allocator.failed();
        allocator.fail_never();
        check_cache(cache.get());
        if (n >= 0 && failed) {
            CHECK(status == SKERRY_ERROR_OUT_OF_MEMORY);
            CHECK(fingerprint_of(cache.get(), seq) == before);
            CHECK(memory_of(cache.get()).pool_bytes == 0);
            CHECK(memory_of(cache.get()).host_bytes == 0);
            REQUIRE(host.step(seq, 40, 40) == SKERRY_OK);
        } else {
            REQUIRE(status == SKERRY_OK);
        }
        if (wanted == 0) wanted = fingerprint_of(cache.get(), seq);
        CHECK(fingerprint_of(cache.get(), seq) == wanted);
        // The next token asks for nothing.
        const uint64_t requests = allocator.requests();
        host.decode(seq, 80);
        CHECK(allocator.requests() == requests);
        // A fork asks for a copy of what was expanded, and for tables.
        skerry_status forked = SKERRY_ERROR_OUT_OF_MEMORY;
        for (int64_t k = 0; n < 0 && forked == SKERRY_ERROR_OUT_OF_MEMORY; ++k) {
            const size_t live = allocator.live_count();
            skerry_seq child{};
            allocator.fail_after(k);
            forked = skerry_seq_fork(cache.get(), seq, -1, &child, nullptr);
            allocator.fail_never();
            if (forked < 0) CHECK(allocator.live_count() == live);
            check_cache(cache.get());
        }
        if (n < 0) CHECK(forked == SKERRY_OK);
        CHECK(allocator.mismatches() == 0);
        if (n >= 0 && !failed) return;
    }
    FAIL("a prompt never ended without an allocation that fails");
}

TEST_CASE("paper: what it does not have is refused by name") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    const Router router = weights.open(context.get());
    const auto refused = [&](const std::function<void(Setup &)> &change, skerry_status status, const std::string &name) {
        CAPTURE(name);
        Setup setup = paper_setup(layers, router.get());
        change(setup);
        skerry_cache *cache = nullptr;
        skerry_error error = make<skerry_error>();
        CHECK(skerry_cache_create(context.get(), setup.desc(), &cache, &error) == status);
        CHECK(std::string(error.message).find(name) != std::string::npos);
        skerry_cache_release(cache);
    };
    refused([](Setup &s) { s.sekv.router = nullptr; }, SKERRY_ERROR_ARGUMENT, "sekv.router");
    refused([](Setup &s) { s.policy.window_tokens = 8; }, SKERRY_ERROR_UNSUPPORTED, "policy.window_tokens");
    refused([](Setup &s) { s.policy.sink_tokens = 4; }, SKERRY_ERROR_UNSUPPORTED, "policy.sink_tokens");
    refused([](Setup &s) { s.policy.key_format = SKERRY_FORMAT_R3; }, SKERRY_ERROR_UNSUPPORTED, "policy.key_format");
    refused([](Setup &s) { s.sekv.fetch_ppm = 5; }, SKERRY_ERROR_UNSUPPORTED, "sekv.fetch_ppm");
    refused([](Setup &s) { s.sekv.miss = SKERRY_ZOOM_SKIP; }, SKERRY_ERROR_UNSUPPORTED, "sekv.miss");
    refused([](Setup &s) { s.sekv.detail_error = 0.5f; }, SKERRY_ERROR_UNSUPPORTED, "sekv.detail_error");
    refused([](Setup &s) { s.sekv.detail_rank = 8; }, SKERRY_ERROR_UNSUPPORTED, "sekv.detail_rank");
    refused([](Setup &s) { s.sekv.flags = SKERRY_SEKV_NO_RESIDENTS; }, SKERRY_ERROR_ARGUMENT, "sekv.flags");
    refused([](Setup &s) { s.sekv.segmentation = SKERRY_SEGMENTS_FIXED; }, SKERRY_ERROR_ARGUMENT, "sekv.segmentation");
    refused([](Setup &s) { s.sekv.span_min_tokens = -2; }, SKERRY_ERROR_ARGUMENT, "sekv.span_min_tokens");
    refused([](Setup &s) { s.sekv.anchor_threshold = NAN; }, SKERRY_ERROR_ARGUMENT, "sekv.anchor_threshold");
    refused([](Setup &s) { s.sekv.budget_entries = -1; }, SKERRY_ERROR_ARGUMENT, "sekv.budget_entries");
    refused([](Setup &s) { s.layers[1].window = 16; }, SKERRY_ERROR_UNSUPPORTED, "sliding window");
    refused([](Setup &s) { s.layers[1].softcap = 3; }, SKERRY_ERROR_UNSUPPORTED, "softcap");
    refused([](Setup &s) { s.layers[1].value_dim = 4; }, SKERRY_ERROR_UNSUPPORTED, "key_dim = value_dim");
    refused([](Setup &s) { s.layers.resize(1); }, SKERRY_ERROR_FORMAT, "layers");
    const Router production = Weights(router_size()).open(context.get(), "production");
    refused([&](Setup &s) { s.sekv.router = production.get(); }, SKERRY_ERROR_UNSUPPORTED, "form 'production'");
    refused([](Setup &s) { s.policy.fidelity = SKERRY_FIDELITY_PRODUCTION, s.sekv.router = nullptr, s.sekv.budget_entries = 5; },
            SKERRY_ERROR_ARGUMENT, "sekv.budget_entries");
    refused(
        [](Setup &s) { s.policy.fidelity = SKERRY_FIDELITY_PRODUCTION, s.sekv.router = nullptr, s.sekv.flags = SKERRY_SEKV_ABSENT_ROWS; },
        SKERRY_ERROR_ARGUMENT, "sekv.flags");
    refused([](Setup &s) { s.policy.fidelity = SKERRY_FIDELITY_PRODUCTION; }, SKERRY_ERROR_UNSUPPORTED, "form 'paper'");
    refused([](Setup &s) { s.policy.kind = SKERRY_POLICY_EVICT; }, SKERRY_ERROR_ARGUMENT, "policy.kind");
}

TEST_CASE("paper: calls that a memory cannot answer, and surprisal that is missing or wrong") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.9f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const skerry_seq seq = make_seq(cache.get());
    host.hands_surprisal = false;
    CHECK(host.step(seq, 0, 20, SKERRY_STEP_PREFILL) == SKERRY_ERROR_STATE);
    CHECK(std::string(host.error.message).find("skerry_step_surprisal") != std::string::npos);
    CHECK(info_of(cache.get(), seq).length_tokens == 0);
    host.hands_surprisal = true;
    const std::function<float(int64_t)> nats = host.nats;
    for (float wrong : {NAN, INFINITY, -1.0f}) {
        host.nats = [&](int64_t p) { return p == 3 ? wrong : nats(p); };
        CHECK(host.step(seq, 0, 20) == SKERRY_ERROR_NONFINITE);
    }
    host.nats = nats;
    host.prompt(seq, 60, 20);
    host.hands_surprisal = false; // not needed any more
    host.decode(seq, 60);
    const std::vector<float> queries(32, 1.0f);
    const skerry_status status = host.step(seq, 61, 1, 0, true, [&](skerry_step *step) {
        skerry_error error = make<skerry_error>();
        int32_t needed = 0;
        CHECK(skerry_step_view(step, 0, 0, 0, 0, nullptr, 0, &needed, &error) == SKERRY_ERROR_UNSUPPORTED);
        CHECK(std::string(error.message).find("skerry_step_attend") != std::string::npos);
        skerry_gather_desc gather = make<skerry_gather_desc>();
        CHECK(skerry_step_gather(step, &gather, &needed, &error) == SKERRY_ERROR_UNSUPPORTED);
        skerry_observe_desc observe = make<skerry_observe_desc>();
        const skerry_tensor q = tensor(queries.data(), SKERRY_DTYPE_F32, {1, 2, 8});
        observe.queries = &q;
        CHECK(skerry_step_observe(step, &observe, &error) == SKERRY_ERROR_UNSUPPORTED);
        std::vector<float> out(32);
        const skerry_tensor all = tensor(queries.data(), SKERRY_DTYPE_F32, {1, 4, 8}), to = tensor(out.data(), SKERRY_DTYPE_F32, {1, 4, 8});
        skerry_attend_desc attend = make<skerry_attend_desc>();
        attend.queries = &all;
        attend.out = &to;
        attend.flags = SKERRY_ATTEND_NO_SCORE;
        attend.tiers = SKERRY_TIERS_FULL;
        CHECK(skerry_step_attend(step, &attend, &error) == SKERRY_ERROR_UNSUPPORTED);
        const float sinks[4] = {};
        attend.tiers = 0;
        attend.sink_logits = sinks;
        CHECK(skerry_step_attend(step, &attend, &error) == SKERRY_ERROR_UNSUPPORTED);
        attend.sink_logits = nullptr;
        CHECK(skerry_step_attend(step, &attend, &error) == SKERRY_OK);
    });
    CHECK(status == SKERRY_OK);
}

TEST_CASE("paper: a prompt longer than staging_tokens is refused, and one of silence and zeros is not") {
    const Context context = make_context(0u);
    const std::vector<Layer> layers = router_layers();
    const Weights weights = noisy_weights(router_size(), 0.0f);
    const Router router = weights.open(context.get());
    Setup setup = paper_setup(layers, router.get());
    setup.cache.max_step_tokens = setup.cache.staging_tokens = 64;
    const Cache cache = make_cache(context.get(), setup);
    Host host = noisy(cache.get(), layers);
    const skerry_seq seq = make_seq(cache.get());
    REQUIRE(host.step(seq, 0, 64, SKERRY_STEP_PREFILL) == SKERRY_OK);
    CHECK(host.step(seq, 64, 32, SKERRY_STEP_PREFILL) == SKERRY_ERROR_OVER_BUDGET);
    REQUIRE(skerry_seq_truncate(cache.get(), seq, 0, nullptr) == SKERRY_OK);
    // All surprisals 0, all rows 0: one span of rank 0, uniform weights.
    host.nats = [](int64_t) { return 0.0f; };
    host.key = host.value = [](int, int, int64_t, int) { return 0.0f; };
    host.prompt(seq, 64, 64);
    host.decode(seq, 64);
    for (const std::vector<float> &out : host.outs) {
        for (float x : out)
            CHECK(x == 0.0f);
    }
}
