// Every legal geometry works against double precision over what the test itself handed in.
// Holds G4, G6, P003, P058, P016, P018, P019, P022, P023, P024, P025, P026, P035, P037, P040, P057, P059, P063, P064, P142.

#include "oracle.hpp"

using namespace support;

namespace {

double tolerance_of(skerry_dtype out) { return out == SKERRY_DTYPE_F32 ? 1e-4 : out == SKERRY_DTYPE_F16 ? 1.5e-3 : 8e-3; }

struct Case {
    std::vector<Layer> layers;
    skerry_dtype store = SKERRY_DTYPE_F32;
    skerry_dtype input = SKERRY_DTYPE_F32;
    skerry_dtype out = SKERRY_DTYPE_F32;
    std::vector<int32_t> steps = {21, 1, 1, 5, 16, 1, 17, 1};
    const float *sink_logits = nullptr;
    int32_t max_step_tokens = 0;
};

// Runs the steps on a cache without compression and compares each row of each layer.
void run_case(skerry_context *context, const Case &c) {
    Setup setup = small_setup(SKERRY_POLICY_FULL, c.layers);
    setup.cache.store_dtype = c.store;
    setup.cache.max_step_tokens = c.max_step_tokens;
    const Cache cache = make_cache(context, setup);
    Runner runner(cache.get(), c.layers);
    Stream stream{make_seq(cache.get()), History(11), 0};
    StepOptions options;
    options.dtype = c.input;
    options.out_dtype = c.out;
    options.sink_logits = c.sink_logits;
    for (int32_t count : c.steps) {
        const Part part = stream.next(count);
        grow(runner, stream, count, options);
        for (int layer = 0; layer < static_cast<int>(c.layers.size()); ++layer) {
            const Layer &shape = c.layers[static_cast<size_t>(layer)];
            std::vector<Gathered> seen;
            for (int head = 0; head < shape.kv_heads; ++head) {
                const int source = shape.shared_with >= 0 ? shape.shared_with : layer;
                seen.push_back(remember(stream.history, shape, source, head, stream.length, c.input, c.store));
            }
            const Errors errors = compare(runner, layer, seen, 0, part, c.sink_logits);
            CAPTURE(layer);
            CAPTURE(count);
            CHECK(errors.out <= tolerance_of(c.out));
            CHECK(errors.lse <= 1e-4);
        }
    }
    CHECK(info_of(cache.get(), stream.seq).length_tokens == stream.length);
    check_cache(cache.get());
}

} // namespace

TEST_CASE("geometry: head dimensions, d_k beside d_v, heads per group, store and input types") {
    const Context context = make_context();
    const int dims[] = {1, 8, 64, 80, 96, 128, 256};
    const int heads[][2] = {{2, 2}, {2, 6}, {1, 4}};
    const skerry_dtype types[] = {SKERRY_DTYPE_F32, SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16};
    int turn = 0;
    for (int key_dim : dims) {
        for (int value_dim : dims) {
            for (const auto &head : heads) {
                // Each pair of dimensions meets every kind of heads; types take turns, so that each dimension meets all.
                Case c;
                c.layers = layers_of(1, head[0], head[1], key_dim, value_dim);
                c.store = types[turn % 3];
                c.input = types[turn / 3 % 3];
                c.out = types[turn / 9 % 3];
                ++turn;
                CAPTURE(key_dim);
                CAPTURE(value_dim);
                CAPTURE(head[1]);
                CAPTURE(c.store);
                CAPTURE(c.input);
                c.steps = {19, 1, 14};
                run_case(context.get(), c);
            }
        }
    }
}

TEST_CASE("geometry: every store type with every input type") {
    const Context context = make_context();
    for (int store = SKERRY_DTYPE_F32; store <= SKERRY_DTYPE_BF16; ++store) {
        for (int input = SKERRY_DTYPE_F32; input <= SKERRY_DTYPE_BF16; ++input) {
            CAPTURE(store);
            CAPTURE(input);
            Case c;
            c.layers = layers_of(2, 2, 4, 48, 40);
            c.store = store;
            c.input = input;
            run_case(context.get(), c);
        }
    }
}

TEST_CASE("geometry: layers of different shapes in one cache (P035)") {
    const Context context = make_context();
    Case c;
    for (const auto &[key, value, kv, query, window] :
         {std::tuple{64, 64, 2, 4, 0}, {128, 32, 1, 4, 24}, {8, 96, 4, 4, 0}, {80, 1, 2, 2, 7}}) {
        Layer layer;
        layer.key_dim = key;
        layer.value_dim = value;
        layer.kv_heads = kv;
        layer.query_heads = query;
        layer.window = window;
        c.layers.push_back(layer);
    }
    run_case(context.get(), c);
}

TEST_CASE("geometry: sliding windows at their edges (P059, P063, P064, P072)") {
    const Context context = make_context();
    for (int window : {1, 2, 15, 16, 17, 40}) {
        for (int tokens : {window - 1, window, window + 1, 2 * window, 3 * window + 5}) {
            if (tokens < 1) continue;
            for (bool at_once : {true, false}) {
                CAPTURE(window);
                CAPTURE(tokens);
                CAPTURE(at_once);
                Case c;
                c.layers = layers_of(2, 1, 2, 16, 8);
                c.layers[1].window = window;
                c.steps = at_once ? std::vector<int32_t>{tokens} : std::vector<int32_t>(static_cast<size_t>(tokens), 1);
                c.steps.push_back(1);
                c.steps.push_back(3);
                run_case(context.get(), c);
            }
        }
    }
}

TEST_CASE("geometry: a sliding layer holds no more than its window and one step (P073, P145)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(1, 1, 1, 16, 16));
    setup.layers[0].window = 32;
    setup.cache.max_step_tokens = 64;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(1), 0};
    uint64_t bound = 0;
    for (int i = 0; i < 60; ++i) {
        grow(runner, stream, i % 2 == 0 ? 64 : 1);
        const skerry_memory_info memory = memory_of(cache.get());
        if (i == 6) bound = memory.used_bytes;
        if (i > 6) CHECK(memory.used_bytes <= bound + 64 * 2 * 16 * 4);
    }
    CHECK(bound > 0);
}

TEST_CASE("geometry: a window longer than any sequence is no window (P058)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : {SKERRY_POLICY_FULL, SKERRY_POLICY_QEVICT}) {
        for (int window : {INT32_MAX, INT32_MAX - 600, 1 << 20}) {
            CAPTURE(kind);
            CAPTURE(window);
            Setup none = small_setup(kind, layers_of(1, 1, 2, 16, 8));
            none.policy.quantised_share_ppm = 1000000;
            none.cache.max_step_tokens = 700;
            none.budget.length_tokens = 800;
            if (kind == SKERRY_POLICY_QEVICT) none.budget.share_ppm = 250000;
            Setup wide = none;
            wide.layers[0].window = window;
            const skerry_plan_info a = plan_of(context.get(), none), b = plan_of(context.get(), wide);
            CHECK(same_bytes(&a, &b, sizeof(a)));
            const Cache first = make_cache(context.get(), none), second = make_cache(context.get(), wide);
            Runner x(first.get(), none.layers), y(second.get(), wide.layers);
            Stream s{make_seq(first.get()), History(2), 0}, t{make_seq(second.get()), History(2), 0};
            grow(x, s, 700);
            grow(y, t, 700);
            CHECK(x.outs == y.outs);
            CHECK(fingerprint_of(first.get(), s.seq) == fingerprint_of(second.get(), t.seq));
        }
    }
}

TEST_CASE("geometry: shared layers read what the lower one stores (P142)") {
    const Context context = make_context();
    Case c;
    c.layers = layers_of(4, 2, 4, 16, 24);
    c.layers[1].shared_with = 0;
    c.layers[3].shared_with = 2;
    c.layers[3].query_heads = 8;
    c.layers[3].scale = 0.3f;
    run_case(context.get(), c);
}

TEST_CASE("geometry: scale, softcap and sink logits") {
    const Context context = make_context();
    const float sinks[4] = {1.0f, -2.0f, 0.0f, 30.0f};
    Case c;
    c.layers = layers_of(3, 2, 4, 32, 16);
    c.layers[0].scale = 0.5f;
    c.layers[1].softcap = 2.5f;
    c.layers[2].softcap = 1.0f;
    c.layers[2].scale = -1.0f;
    c.sink_logits = sinks;
    run_case(context.get(), c);
}

TEST_CASE("geometry: long sequences and long steps (P003, P018)") {
    const Context context = make_context();
    Case c;
    c.layers = layers_of(1, 1, 2, 8, 8);
    c.store = SKERRY_DTYPE_F16;
    c.max_step_tokens = 700;
    c.steps = {700, 700, 1, 699, 1};
    run_case(context.get(), c);
}

TEST_CASE("geometry: more than 65,536 tokens in f16 (P003)") {
    const Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_FULL, layers_of(1, 1, 1, 8, 8));
    setup.cache.store_dtype = SKERRY_DTYPE_F16;
    setup.cache.max_step_tokens = 8192;
    const Cache cache = make_cache(context.get(), setup);
    Runner runner(cache.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(11), 0};
    StepOptions silent;
    silent.attend = false;
    for (int i = 0; i < 9; ++i)
        grow(runner, stream, 8000, silent);
    const Part part = stream.next(2);
    grow(runner, stream, 2);
    const Gathered seen = remember(stream.history, setup.layers[0], 0, 0, stream.length, SKERRY_DTYPE_F32, SKERRY_DTYPE_F16);
    const Errors errors = compare(runner, 0, {seen}, 0, part);
    CHECK(errors.out <= 1e-4);
    CHECK(errors.lse <= 1e-4);
    check_cache(cache.get());
}
