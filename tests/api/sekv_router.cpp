// Trained routers in a cache (SKERRY_POLICY_SEKV): their choices against the formula of docs/router-files.md in float64, what is refused,
// whose memory a router is, and that plans count its keys.
// Holds G3, G11, G17, G18.

#include "router_bytes.hpp"
#include "support.hpp"

#include <set>

using namespace support;

namespace {

struct ReleaseRouter {
    void operator()(skerry_router *router) const { skerry_router_release(router); }
};
using Router = std::unique_ptr<skerry_router, ReleaseRouter>;

Router open_router(skerry_context *context, const std::vector<uint8_t> &bytes) {
    skerry_router_desc desc = make<skerry_router_desc>();
    desc.data = bytes.data();
    desc.bytes = bytes.size();
    skerry_router *router = nullptr;
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_router_open(context, &desc, &router, &error);
    REQUIRE_MESSAGE(status == SKERRY_OK, std::string(error.message));
    return Router(router);
}

// What a router file says, by value.
struct Trained {
    RouterSize size;
    std::string pooling = "\"centroids\"";
    int centroids = 2;
    bool key_matrices = true, shared = true, normalise = false, extras = true;
    FileTensor w, w_key, bias, temperature;

    int group() const { return static_cast<int>(size.query_heads / size.kv_heads); }
    bool means() const { return pooling == "\"mean\""; }
    int vectors() const { return means() ? 1 : centroids; }

    std::vector<uint8_t> file() const {
        std::vector<FileTensor> tensors = {w};
        if (key_matrices) tensors.push_back(w_key);
        if (extras) tensors.insert(tensors.end(), {bias, temperature});
        RouterSettings settings = router_settings(size, "production");
        settings.set("pooling", pooling).set("normalise", normalise ? "true" : "false").set("shared_keys", shared ? "true" : "false");
        if (!means()) settings.set("centroids", std::to_string(centroids));
        return safetensors(tensors, settings.text());
    }

    double query_weight(int layer, int head, int64_t row, int64_t channel) const {
        return double(w.values[static_cast<size_t>(((layer * size.query_heads + head) * size.summary_dim + row) * size.key_dim + channel)]);
    }
    // Of the keys that query head `head` is scored against; `layer` stores them.
    double key_weight(int layer, int head, int64_t row, int64_t channel) const {
        if (key_matrices) {
            const int64_t place = (layer * size.kv_heads + head / group()) * size.summary_dim + row;
            return double(w_key.values[static_cast<size_t>(place * size.key_dim + channel)]);
        }
        return query_weight(layer, shared ? head / group() * group() : head, row, channel);
    }
    double bias_of(int layer, int head) const {
        return extras ? double(bias.values[static_cast<size_t>(layer * size.query_heads + head)]) : 0.0;
    }
    double temperature_of(int layer, int head) const {
        return extras ? double(temperature.values[static_cast<size_t>(layer * size.query_heads + head)]) : 1.0;
    }
};

FileTensor zeros(const char *name, std::vector<int64_t> shape) {
    FileTensor tensor{name, "F32", std::move(shape), {}, {}};
    tensor.values.resize(tensor.elements());
    return tensor;
}

// Row r of a head's matrices is channel r, further on by `shift` per query head where each has keys of its own.
Trained trained(const RouterSize &size, int shift = 0) {
    Trained t;
    t.size = size;
    t.w = zeros("W", {size.layers, size.query_heads, size.summary_dim, size.key_dim});
    t.w_key = zeros("W_key", {size.layers, size.kv_heads, size.summary_dim, size.key_dim});
    t.bias = zeros("bias", {size.layers, size.query_heads});
    t.temperature = zeros("temperature", {size.layers, size.query_heads});
    const auto identity = [&](FileTensor &tensor, int64_t heads, int64_t by) {
        for (int64_t m = 0; m < size.layers * heads; ++m) {
            for (int64_t r = 0; r < size.summary_dim; ++r)
                tensor.values[static_cast<size_t>((m * size.summary_dim + r) * size.key_dim + (r + m % heads * by) % size.key_dim)] = 1;
        }
    };
    identity(t.w, size.query_heads, shift);
    identity(t.w_key, size.kv_heads, 0);
    for (size_t i = 0; i < t.bias.values.size(); ++i) {
        t.bias.values[i] = 0.25f * static_cast<float>(i % 3);
        t.temperature.values[i] = 0.5f + 0.5f * static_cast<float>(i % 4);
    }
    return t;
}

// One layer, or one that stores and one that shares its cache, with numbers that the case writes itself.
struct Hand {
    skerry_cache *cache;
    std::vector<Layer> layers;
    skerry_seq seq{};
    int64_t length = 0;
    std::vector<float> all_keys; // [length][kv_heads][key_dim]
    std::vector<float> queries;  // of the last step, [tokens][query_heads][key_dim], the same for every layer

    Hand(skerry_cache *of, std::vector<Layer> shapes) : cache(of), layers(std::move(shapes)), seq(make_seq(of)) {}

    // Keys of a window come in two clumps that take turns; what they are depends on the window and the head alone.
    void keys_of(int64_t position, int sinks, int window, float *row) const {
        const int64_t w = position < sinks ? -1 : (position - sinks) / window;
        for (int head = 0; head < layers[0].kv_heads; ++head, row += layers[0].key_dim) {
            const uint64_t clump = mix(static_cast<uint64_t>(w * 8 + head * 2 + position % 2) + 77);
            for (int c = 0; c < layers[0].key_dim; ++c) {
                const uint64_t bits = mix(clump + static_cast<uint64_t>(c)), noise = mix(bits + static_cast<uint64_t>(position) * 131);
                row[c] = static_cast<float>(bits % 4096) / 1024.0f - 2.0f + static_cast<float>(noise % 1024) / 65536.0f;
            }
        }
    }

    void step(int32_t tokens, int sinks, int window) {
        const Layer &shape = layers[0];
        const size_t width = static_cast<size_t>(shape.kv_heads * shape.key_dim), count = static_cast<size_t>(tokens);
        all_keys.resize(all_keys.size() + count * width);
        for (int64_t t = 0; t < tokens; ++t)
            keys_of(length + t, sinks, window, all_keys.data() + (length + t) * static_cast<int64_t>(width));
        std::vector<float> values(count * static_cast<size_t>(shape.kv_heads * shape.value_dim), 0.5f);
        std::vector<float> out(count * static_cast<size_t>(shape.query_heads * shape.value_dim));
        queries.resize(count * static_cast<size_t>(shape.query_heads * shape.key_dim));
        for (size_t i = 0; i < queries.size(); ++i)
            queries[i] = static_cast<float>(mix(static_cast<uint64_t>(length) * 100003u + i) % 4096) / 512.0f - 4.0f;
        skerry_error error = make<skerry_error>();
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = &seq;
        desc.token_counts = &tokens;
        desc.seq_count = 1;
        skerry_step *open = nullptr;
        REQUIRE_MESSAGE(skerry_step_begin(cache, &desc, &open, &error) == SKERRY_OK, error.message);
        const skerry_tensor k =
            tensor(all_keys.data() + length * static_cast<int64_t>(width), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.key_dim});
        const skerry_tensor v = tensor(values.data(), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.value_dim});
        const skerry_tensor q = tensor(queries.data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.key_dim});
        const skerry_tensor o = tensor(out.data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.value_dim});
        for (int32_t layer = 0; layer < static_cast<int32_t>(layers.size()); ++layer) {
            if (layers[static_cast<size_t>(layer)].shared_with < 0)
                REQUIRE_MESSAGE(skerry_step_append(open, layer, &k, &v, nullptr, &error) == SKERRY_OK, error.message);
            skerry_attend_desc attend = make<skerry_attend_desc>();
            attend.flags = SKERRY_ATTEND_EXACT;
            attend.queries = &q;
            attend.out = &o;
            attend.layer = layer;
            REQUIRE_MESSAGE(skerry_step_attend(open, &attend, &error) == SKERRY_OK, error.message);
            // Ranges tell what the layer that stores has read, or the last one that was asked to zoom.
            if (tokens == 1 && layers[static_cast<size_t>(layer)].shared_with >= 0)
                REQUIRE_MESSAGE(skerry_step_zoom(open, layer, &q, nullptr, &error) == SKERRY_OK, error.message);
        }
        REQUIRE_MESSAGE(skerry_step_commit(open, &error) == SKERRY_OK, error.message);
        length += tokens;
    }

    // Windows below the answer have detail and a router key.
    int64_t windows(int head, int sinks, int window) const {
        int64_t end = sinks;
        for (const skerry_range &range : ranges_of(cache, seq, 0, head)) {
            if ((range.flags & SKERRY_RANGE_DETAIL) != 0) end = std::max(end, range.end);
        }
        return (end - sinks) / window;
    }
    std::set<int64_t> zoomed(int head, int sinks, int window) const {
        std::set<int64_t> chosen;
        for (const skerry_range &range : ranges_of(cache, seq, 0, head)) {
            for (int64_t p = range.begin; p < range.end && (range.flags & SKERRY_RANGE_ZOOMED) != 0; p += window)
                chosen.insert((p - sinks) / window);
        }
        return chosen;
    }
    const float *key(int64_t position, int head) const {
        return all_keys.data() + (position * layers[0].kv_heads + head) * layers[0].key_dim;
    }
};

// Vectors as the key's codes keep them: f16 of largest / 7 or / 127, and whole numbers of it.
void quantise(std::vector<double> &z) {
    const double top = z.size() > 16 ? 7 : 127;
    double largest = 0;
    for (double x : z)
        largest = std::max(largest, std::fabs(x));
    const double scale = round_to(largest / top, 11, -14, 65504.0);
    for (double &x : z)
        x = scale > 0 ? scale * std::max(-top, std::min(top, std::nearbyint(x / scale))) : 0;
}

// Scores of all windows for one query head: bias + log of the sum over vectors of n exp(temperature (W q).z / sqrt(d')).
std::vector<double> scores(const Trained &t, const Hand &hand, int layer, int query_head, int64_t windows, int sinks, int window) {
    const int head = query_head / t.group();
    const int64_t rank = t.size.summary_dim, dim = t.size.key_dim;
    const float *query = hand.queries.data() + query_head * dim;
    std::vector<double> projected(static_cast<size_t>(rank));
    for (int64_t r = 0; r < rank; ++r) {
        for (int64_t c = 0; c < dim; ++c)
            projected[static_cast<size_t>(r)] += t.query_weight(layer, query_head, r, c) * double(query[c]);
    }
    std::vector<double> out;
    for (int64_t w = 0; w < windows; ++w) {
        double sum = 0;
        for (int64_t v = 0; v < t.vectors(); ++v) {
            std::vector<double> z(static_cast<size_t>(rank));
            int tokens = 0;
            for (int64_t p = sinks + w * window; p < sinks + (w + 1) * window; ++p) {
                if (!t.means() && p % 2 != v) continue;
                ++tokens;
                for (int64_t r = 0; r < rank; ++r) {
                    for (int64_t c = 0; c < dim; ++c)
                        z[static_cast<size_t>(r)] += t.key_weight(0, query_head, r, c) * double(hand.key(p, head)[c]);
                }
            }
            double length = 0;
            for (double &x : z) {
                x /= tokens;
                length += x * x;
            }
            for (double &x : z)
                x /= t.normalise ? std::sqrt(length) : 1.0;
            quantise(z);
            double dot = 0;
            for (size_t r = 0; r < z.size(); ++r)
                dot += projected[r] * z[r];
            sum += tokens * std::exp(t.temperature_of(layer, query_head) * dot / std::sqrt(double(rank)));
        }
        out.push_back(t.bias_of(layer, query_head) + std::log(sum));
    }
    return out;
}

double log_sum(const std::vector<double> &x) {
    const double largest = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (double one : x)
        sum += std::exp(one - largest);
    return largest + std::log(sum);
}

constexpr int sinks = 2, window = 4;

Setup sekv_setup(skerry_context *context, std::vector<Layer> layers, skerry_router *router, double share, int64_t length) {
    Setup setup = small_setup(SKERRY_POLICY_SEKV, std::move(layers));
    setup.cache.max_step_tokens = 64;
    setup.sekv.router = router;
    setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS; // else a roomy device has no need to zoom
    setup.budget.length_tokens = length;
    const uint64_t minimum = minimum_bytes(context, setup);
    setup.budget.bytes = minimum + static_cast<uint64_t>(share * double(full_cache_bytes(context, setup)));
    return setup;
}

std::vector<Layer> layers_for(const Trained &t) {
    return layers_of(static_cast<int>(t.size.layers), static_cast<int>(t.size.kv_heads), static_cast<int>(t.size.query_heads),
                     static_cast<int>(t.size.key_dim), 16);
}

// Attends for 24 positions and compares what each has read from the host.
void compare_choices(const Trained &t, uint32_t cpu_disable) {
    const Context context = make_context(0, cpu_disable);
    Router router = open_router(context.get(), t.file());
    std::vector<Layer> layers = layers_for(t);
    if (layers.size() > 1) layers[1].shared_with = 0;
    Setup setup = sekv_setup(context.get(), layers, router.get(), 3.0, 300);
    setup.sekv.detail_format = SKERRY_FORMAT_F32;
    setup.sekv.fetch_ppm = 200000;
    setup.sekv.hysteresis_ppm = 1000000;
    const skerry_plan_info plan = plan_of(context.get(), setup);
    const Cache cache = make_cache(context.get(), setup);
    router.reset();
    Hand hand(cache.get(), layers);
    // With shared layers a step may not cross a routing event.
    while (hand.length < 128)
        hand.step(layers.size() > 1 ? 2 : 64, sinks, window);
    const int layer = static_cast<int>(layers.size()) - 1; // chooses last
    int compared = 0, close = 0;
    for (int step = 0; step < 24; ++step) {
        std::vector<int64_t> windows;
        for (int head = 0; head < layers[0].kv_heads; ++head)
            windows.push_back(hand.windows(head, sinks, window));
        hand.step(1, sinks, window);
        for (int head = 0; head < layers[0].kv_heads; ++head) {
            const int64_t n = windows[static_cast<size_t>(head)];
            REQUIRE(n > 20);
            std::vector<double> gain(static_cast<size_t>(n));
            for (int g = 0; g < t.group(); ++g) {
                const int query_head = head * t.group() + g;
                std::vector<double> e = scores(t, hand, layer, query_head, n, sinks, window), all = e;
                // Tokens that the device has exact are part of what the windows compete with.
                for (int64_t p = 0; p < hand.length; ++p) {
                    if (p >= sinks && p < sinks + n * window) continue;
                    double dot = 0;
                    for (int c = 0; c < layers[0].key_dim; ++c)
                        dot += double(hand.queries[static_cast<size_t>(query_head * layers[0].key_dim + c)]) * double(hand.key(p, head)[c]);
                    all.push_back(dot * layers[0].logit_scale());
                }
                const double total = log_sum(all);
                for (size_t w = 0; w < gain.size(); ++w)
                    gain[w] += std::exp(e[w] - total);
            }
            std::vector<int64_t> order(gain.size());
            for (size_t w = 0; w < order.size(); ++w)
                order[w] = static_cast<int64_t>(w);
            std::sort(order.begin(), order.end(),
                      [&](int64_t a, int64_t b) { return gain[static_cast<size_t>(a)] > gain[static_cast<size_t>(b)]; });
            const size_t most = std::min(static_cast<size_t>(plan.fetch_windows), static_cast<size_t>((n + 4) / 5));
            const double last = gain[static_cast<size_t>(order[most - 1])], next = gain[static_cast<size_t>(order[most])];
            if (last < next * 1.001) {
                ++close;
                continue;
            }
            ++compared;
            CHECK(hand.zoomed(head, sinks, window) == std::set<int64_t>(order.begin(), order.begin() + static_cast<int64_t>(most)));
        }
    }
    CHECK(compared > 10 * close);
    check_cache(cache.get());
}

} // namespace

TEST_CASE("trained router: what a query reads is what the formula says, in every form of router") {
    struct Case {
        const char *name;
        int64_t rank;
        bool key_matrices, shared, normalise, extras, mean;
    };
    const Case cases[] = {
        {"int8, key matrices", 4, true, true, false, true, false},        {"int8, 16 components", 16, true, true, false, false, false},
        {"int4, key matrices", 18, true, true, false, true, false},       {"int4, 32 components", 32, true, true, true, false, false},
        {"own keys per query head", 8, false, false, false, true, false}, {"own keys, int4", 24, false, false, true, true, false},
        {"shared without matrices", 8, false, true, false, true, false},  {"mean", 8, true, true, false, true, true},
        {"mean, own keys, length 1", 20, false, false, true, true, true},
    };
    for (const Case &one : cases) {
        for (const uint32_t disabled : {0u, ~0u}) {
            CAPTURE(one.name);
            CAPTURE(disabled);
            RouterSize size;
            size.layers = 1;
            size.key_dim = 32;
            size.summary_dim = one.rank;
            Trained t = trained(size, one.key_matrices || one.shared ? 0 : 3);
            t.key_matrices = one.key_matrices;
            t.shared = one.shared;
            t.normalise = one.normalise;
            t.extras = one.extras;
            if (one.mean) t.pooling = "\"mean\"";
            compare_choices(t, disabled);
        }
    }
}

TEST_CASE("trained router: a layer that shares a cache asks with its own matrices for keys of the layer that stores") {
    RouterSize size;
    size.key_dim = 32;
    size.summary_dim = 8;
    Trained t = trained(size);
    // The layer that shares looks at other channels, in other proportions; its own W_key is never used.
    for (size_t i = t.w.values.size() / 2; i < t.w.values.size(); ++i)
        t.w.values[i] = static_cast<float>(mix(i) % 64) / 64.0f - 0.5f;
    for (size_t i = t.w_key.values.size() / 2; i < t.w_key.values.size(); ++i)
        t.w_key.values[i] = 1;
    compare_choices(t, 0);
}

TEST_CASE("trained router: plan, creation and report are one arithmetic, and no step allocates (G17, G18)") {
    struct Case {
        int64_t rank;
        int centroids;
        bool own_keys;
        uint64_t window_bytes; // docs/format.md, "Router keys", with counts
    };
    for (const Case one :
         {Case{16, 4, false, 76}, Case{32, 4, false, 76}, Case{32, 3, false, 59}, Case{5, 1, false, 13}, Case{32, 4, true, 148}}) {
        CAPTURE(one.rank);
        CAPTURE(one.centroids);
        Allocator host;
        {
            skerry_context_desc desc = make<skerry_context_desc>();
            desc.allocator = host.hooks();
            const Context context = make_context(&desc);
            RouterSize size;
            size.key_dim = 32;
            size.summary_dim = one.rank;
            Trained t = trained(size, 5);
            t.centroids = one.centroids;
            if (one.own_keys) t.key_matrices = t.shared = false;
            Router router = open_router(context.get(), t.file());
            Setup setup = sekv_setup(context.get(), layers_for(t), router.get(), 0.4, 400);
            setup.cache.max_sequences = 2;
            setup.budget.bytes *= 2;
            const skerry_plan_info plan = plan_of(context.get(), setup);
            CHECK(plan.router_trained == 1);
            CHECK(plan.router_vectors == one.centroids);
            REQUIRE(plan.host_windows > 0);
            // Two layers of the same geometry, two KV heads, two sequences.
            CHECK(plan.router_bytes == 8 * static_cast<uint64_t>(plan.host_windows) * one.window_bytes);
            const Cache cache = make_cache(context.get(), setup);
            router.reset();
            const skerry_memory_info made = memory_of(cache.get());
            CHECK(made.pool_bytes == plan.pool_bytes);
            CHECK(made.table_bytes == plan.table_bytes);
            CHECK(made.staging_bytes == plan.staging_bytes);
            CHECK(made.pool_bytes + made.table_bytes <= plan.budget_bytes);
            Runner runner(cache.get(), setup.layers);
            Stream a{make_seq(cache.get()), History(1), 0}, b{make_seq(cache.get()), History(2), 0};
            const uint64_t requests = host.requests();
            for (int round = 0; round < 4; ++round) {
                grow(runner, a, 50);
                grow(runner, b, 37);
            }
            decode(runner, a, 20);
            CHECK(host.requests() == requests);
            CHECK(counters_of(cache.get()).zooms > 0);
            CHECK(memory_of(cache.get()).allocated_bytes == made.allocated_bytes);
            check_cache(cache.get());
        }
        CHECK(host.live_count() == 0);
        CHECK(host.mismatches() == 0);
    }
}

TEST_CASE("trained router: without one the plan says so") {
    const Context context = make_context();
    Setup setup = sekv_setup(context.get(), layers_of(1, 2, 4, 32, 16), nullptr, 1.0, 300);
    const skerry_plan_info plan = plan_of(context.get(), setup);
    CHECK(plan.router_trained == 0);
    CHECK(plan.router_vectors == 4);
    setup = small_setup(SKERRY_POLICY_QEVICT, setup.layers);
    CHECK(plan_of(context.get(), setup).router_vectors == 0);
}

TEST_CASE("trained router: a cache of another geometry is refused by name when it is planned and when it is made (G11)") {
    const Context context = make_context();
    RouterSize size;
    size.key_dim = 32;
    Trained t = trained(size);
    const Router router = open_router(context.get(), t.file());
    struct Case {
        std::vector<Layer> layers;
        uint32_t subject;
        const char *said;
    };
    const Case cases[] = {
        {layers_of(3, 2, 4, 32, 16), SKERRY_SUBJECT_LAYER, "2 layers, the cache has 3"},
        {layers_of(2, 2, 8, 32, 16), SKERRY_SUBJECT_HEADS, "query heads is 4, the cache's layer 0 has 8"},
        {layers_of(2, 4, 4, 32, 16), SKERRY_SUBJECT_HEADS, "KV heads is 2, the cache's layer 0 has 4"},
        {layers_of(2, 2, 4, 64, 16), SKERRY_SUBJECT_KEY_DIM, "key dimension is 32, the cache's layer 0 has 64"},
    };
    for (const Case &one : cases) {
        Setup setup = small_setup(SKERRY_POLICY_SEKV, one.layers);
        setup.budget.length_tokens = 300;
        setup.budget.bytes = 1 << 20;
        setup.sekv.router = router.get();
        skerry_plan_info info = make<skerry_plan_info>();
        const skerry_error planned =
            refused([&](skerry_error *error) { return skerry_cache_plan(context.get(), setup.desc(), &info, error); }, SKERRY_ERROR_FORMAT,
                    {one.subject});
        CHECK(std::string(planned.message).find(one.said) != std::string::npos);
        skerry_cache *out = nullptr;
        const skerry_error created =
            refused([&](skerry_error *error) { return skerry_cache_create(context.get(), setup.desc(), &out, error); }, SKERRY_ERROR_FORMAT,
                    {one.subject});
        CHECK(std::string(created.message).find(one.said) != std::string::npos);
        CHECK(out == nullptr);
    }
}

TEST_CASE("trained router: one of the published form is refused by that name") {
    const Context context = make_context();
    RouterSize size;
    size.key_dim = 32;
    const Router router = open_router(context.get(), safetensors(paper_tensors(size), router_settings(size, "paper").text()));
    Setup setup = small_setup(SKERRY_POLICY_SEKV, layers_of(2, 2, 4, 32, 16));
    setup.budget.length_tokens = 300;
    setup.budget.bytes = 1 << 20;
    setup.sekv.router = router.get();
    skerry_plan_info info = make<skerry_plan_info>();
    const skerry_error error = refused([&](skerry_error *to) { return skerry_cache_plan(context.get(), setup.desc(), &info, to); },
                                       SKERRY_ERROR_UNSUPPORTED, {SKERRY_SUBJECT_POLICY});
    CHECK(std::string(error.message).find("'paper'") != std::string::npos);
    CHECK(std::string(error.message).find("tiny") != std::string::npos);
}

TEST_CASE("trained router: a cache outlives the description and the router it was made from, and the router's context") {
    const Context context = make_context();
    Cache cache;
    skerry_budget_desc budget = make<skerry_budget_desc>();
    std::vector<Layer> layers;
    {
        const Context other = make_context();
        RouterSize size;
        size.key_dim = 32;
        Trained t = trained(size);
        layers = layers_for(t);
        const Router router = open_router(other.get(), t.file());
        auto setup = std::make_unique<Setup>(sekv_setup(context.get(), layers, router.get(), 0.4, 300));
        cache = make_cache(context.get(), *setup);
        budget = setup->budget;
        std::memset(static_cast<void *>(&setup->sekv), 0xa5, sizeof setup->sekv);
    }
    Runner runner(cache.get(), layers);
    Stream stream{make_seq(cache.get()), History(5), 0};
    grow(runner, stream, 60);
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_cache_set_budget(cache.get(), &budget, &error) == SKERRY_OK, error.message);
    skerry_plan_info plan = make<skerry_plan_info>();
    REQUIRE(skerry_cache_get_plan(cache.get(), &plan, nullptr) == SKERRY_OK);
    CHECK(plan.router_trained == 1);
    grow(runner, stream, 60);
    decode(runner, stream, 5);
    CHECK(counters_of(cache.get()).zooms > 0);
}

TEST_CASE("trained router: bytes do not depend on how a prompt is cut, on workers or on the run (G3)") {
    for (const bool own_keys : {false, true}) {
        CAPTURE(own_keys);
        RouterSize size;
        size.key_dim = 32;
        size.summary_dim = 20;
        Trained t = trained(size, 3);
        t.centroids = 3;
        if (own_keys) t.key_matrices = t.shared = false;
        const auto run = [&](uint32_t workers, int32_t chunk, bool is_trained) {
            const Context context = make_context(workers);
            const Router router = open_router(context.get(), t.file());
            Setup setup = sekv_setup(context.get(), layers_for(t), is_trained ? router.get() : nullptr, 0.4, 300);
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            Stream stream{make_seq(cache.get()), History(9), 0};
            while (stream.length < 150)
                grow(runner, stream, static_cast<int32_t>(std::min<int64_t>(chunk, 150 - stream.length)));
            decode(runner, stream, 9);
            return fingerprint_of(cache.get(), stream.seq);
        };
        const uint64_t first = run(0, 64, true);
        CHECK(run(0, 64, true) == first);
        CHECK(run(0, 7, true) == first);
        CHECK(run(3, 23, true) == first);
        CHECK(run(0, 64, false) != first);
    }
}

TEST_CASE("trained router: forks, truncation and aborted steps keep the keys that they should") {
    const Context context = make_context();
    RouterSize size;
    size.key_dim = 32;
    size.summary_dim = 24;
    Trained t = trained(size);
    t.centroids = 3;
    const Router router = open_router(context.get(), t.file());
    Setup setup = sekv_setup(context.get(), layers_for(t), router.get(), 1.0, 300);
    setup.cache.max_sequences = 3;
    setup.budget.bytes *= 3;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(4), 0};
    grow(runner, stream, 61);
    grow(runner, stream, 60);
    const uint64_t before = fingerprint_of(cache.get(), stream.seq);
    StepOptions undone;
    undone.commit = false;
    grow(runner, stream, 30, undone);
    skerry_step_abort(runner.open);
    runner.open = nullptr;
    CHECK(fingerprint_of(cache.get(), stream.seq) == before);
    skerry_seq child{};
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_seq_fork(cache.get(), stream.seq, stream.length, &child, &error) == SKERRY_OK, error.message);
    CHECK(fingerprint_of(cache.get(), child) == before);
    Stream copy{child, stream.history, stream.length};
    decode(runner, stream, 20);
    decode(runner, copy, 20);
    CHECK(fingerprint_of(cache.get(), child) == fingerprint_of(cache.get(), stream.seq));
    REQUIRE_MESSAGE(skerry_seq_truncate(cache.get(), child, 0, &error) == SKERRY_OK, error.message);
    copy.length = 0;
    grow(runner, copy, 61);
    grow(runner, copy, 60);
    CHECK(fingerprint_of(cache.get(), child) == before);
    check_cache(cache.get());
}
