// Bad arguments of contexts, plans, caches and sequences: each is refused by name and leaves nothing behind.
// Holds G6, G11, G20, P020, P021, P036, P047, P136, P139, P147.

#include "support.hpp"

using namespace support;

namespace {

// A struct that a newer header has made longer.
template <class T>
struct Longer {
    T known;
    uint64_t tail[2];
};

template <class T>
Longer<T> longer(T known, uint64_t last) {
    Longer<T> made{known, {0, last}};
    made.known.struct_size = sizeof(made);
    return made;
}

Setup plain() { return small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 2, 4, 8, 8)); }

struct PlanRefusal {
    skerry_context *context;

    // Plan and create answer alike, and neither leaves an object.
    void operator()(const skerry_cache_desc *desc, skerry_status status, std::initializer_list<uint32_t> subjects,
                    int32_t index = -2) const {
        skerry_context_bytes before{}, after{};
        REQUIRE(skerry_context_get_bytes(context, &before, nullptr) == SKERRY_OK);
        skerry_plan_info info = make<skerry_plan_info>();
        const skerry_error planned =
            refused([&](skerry_error *error) { return skerry_cache_plan(context, desc, &info, error); }, status, subjects);
        skerry_cache *cache = reinterpret_cast<skerry_cache *>(&before);
        const skerry_error created =
            refused([&](skerry_error *error) { return skerry_cache_create(context, desc, &cache, error); }, status, subjects);
        CHECK(cache == nullptr);
        CHECK(planned.subject == created.subject);
        CHECK(std::string(planned.message) == created.message);
        if (index != -2) CHECK(planned.index == index);
        REQUIRE(skerry_context_get_bytes(context, &after, nullptr) == SKERRY_OK);
        CHECK(same_bytes(&before, &after, sizeof(before)));
    }
};

} // namespace

TEST_CASE("status: names and texts are there for every number") {
    CHECK(std::string(skerry_status_name(SKERRY_ERROR_STATE)) == "SKERRY_ERROR_STATE");
    CHECK(std::string(skerry_status_name(SKERRY_OK)) == "SKERRY_OK");
    CHECK(std::string(skerry_status_name(-12345)) == "SKERRY_UNKNOWN");
    for (int32_t status = -100; status < 10; ++status) {
        REQUIRE(skerry_status_name(status) != nullptr);
        REQUIRE(skerry_status_text(status) != nullptr);
        CHECK(skerry_status_text(status)[0] != 0);
        CHECK(std::string(skerry_status_text(status)).back() != '.');
    }
    CHECK(SKERRY_VERSION_CHECK());
    CHECK(skerry_version() == SKERRY_API_VERSION);
    CHECK(std::string(skerry_build_text()).find("cpu") != std::string::npos);
}

TEST_CASE("context: bad descriptions are refused") {
    skerry_context *out = nullptr;
    const auto refuse = [&](const skerry_context_desc *desc, skerry_status status, std::initializer_list<uint32_t> subjects) {
        out = reinterpret_cast<skerry_context *>(&out);
        refused([&](skerry_error *error) { return skerry_context_create(desc, &out, error); }, status, subjects);
        CHECK(out == nullptr);
    };
    skerry_context_desc desc = make<skerry_context_desc>();
    refused([&](skerry_error *error) { return skerry_context_create(&desc, nullptr, error); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_ARGUMENT});
    for (uint32_t size : {0u, 4u, uint32_t(offsetof(skerry_context_desc, transfer)) - 8, 4097u, UINT32_MAX}) {
        desc.struct_size = size;
        refuse(&desc, SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT});
    }
    desc = make<skerry_context_desc>();
    const auto newer = longer(desc, 1);
    refuse(&newer.known, SKERRY_ERROR_NEWER_FIELD, {SKERRY_SUBJECT_STRUCT});
    desc.flags = 1u << 30;
    refuse(&desc, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_FLAGS});
    desc = make<skerry_context_desc>();
    desc.transfer_threads = 17;
    refuse(&desc, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    desc = make<skerry_context_desc>();
    desc.worker_count = 256;
    refuse(&desc, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_PARALLEL_FOR});
    desc = make<skerry_context_desc>();
    Allocator host;
    desc.allocator = host.hooks();
    desc.allocator.release = nullptr; // both functions or neither
    refuse(&desc, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_HOST_MEMORY});
    desc.allocator = host.hooks();
    desc.allocator.alloc = nullptr;
    refuse(&desc, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_HOST_MEMORY});
    CHECK(host.requests() == 0);
}

TEST_CASE("context: a longer description with a zero tail and NULL are accepted; everything is given back") {
    const auto long_desc = longer(make<skerry_context_desc>(), 0);
    make_context(&long_desc.known);
    make_context(static_cast<const skerry_context_desc *>(nullptr));
    skerry_context_release(nullptr);
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.allocator = host.hooks();
    Context context = make_context(&desc);
    skerry_context_bytes bytes{};
    REQUIRE(skerry_context_get_bytes(context.get(), &bytes, nullptr) == SKERRY_OK);
    CHECK(bytes.cache_bytes == 0);
    CHECK(bytes.context_bytes == host.live_bytes()); // G17
    CHECK(bytes.object_count == host.live_count());
    CHECK(skerry_context_retain(context.get()) == context.get());
    skerry_context_release(context.get());
    CHECK(host.live_count() > 0);
    context.reset();
    CHECK(host.live_count() == 0); // G18
    CHECK(host.mismatches() == 0);
}

TEST_CASE("context: devices are described, and only those that are there") {
    const Context context = make_context(2u, 0u);
    skerry_device_info info = make<skerry_device_info>();
    REQUIRE(skerry_context_get_device(context.get(), 0, &info, nullptr) == SKERRY_OK);
    CHECK(info.type == SKERRY_DEVICE_CPU);
    CHECK(info.worker_count == 3);
    CHECK(std::string(info.name).substr(0, 3) == "cpu");
    for (int32_t index : {-1, 1, 100}) {
        refused([&](skerry_error *error) { return skerry_context_get_device(context.get(), index, &info, error); }, SKERRY_ERROR_ARGUMENT,
                {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_BACKEND});
    }
    refused([&](skerry_error *error) { return skerry_context_get_device(context.get(), 0, nullptr, error); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_ARGUMENT});
    refused([&](skerry_error *error) { return skerry_context_get_device(nullptr, 0, &info, error); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_ARGUMENT});
    info.struct_size = 4;
    refused([&](skerry_error *error) { return skerry_context_get_device(context.get(), 0, &info, error); }, SKERRY_ERROR_STRUCT_SIZE,
            {SKERRY_SUBJECT_STRUCT});
    skerry_context_bytes bytes{};
    refused([&](skerry_error *error) { return skerry_context_get_bytes(context.get(), nullptr, error); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_ARGUMENT});
    refused([&](skerry_error *error) { return skerry_context_get_bytes(nullptr, &bytes, error); }, SKERRY_ERROR_ARGUMENT,
            {SKERRY_SUBJECT_ARGUMENT});

    // P139: instruction sets that were turned off are reported as off.
    const Context plain_cpp = make_context(0u, UINT32_MAX);
    info = make<skerry_device_info>();
    REQUIRE(skerry_context_get_device(plain_cpp.get(), 0, &info, nullptr) == SKERRY_OK);
    CHECK(info.cpu_features == 0);
    CHECK(info.worker_count == 1);
}

TEST_CASE("info: the library writes no further than struct_size") {
    const Context context = make_context();
    Longer<skerry_device_info> info{make<skerry_device_info>(), {0, 0}};
    std::memset(info.tail, 0x5a, sizeof(info.tail));
    info.known.struct_size = sizeof(info);
    REQUIRE(skerry_context_get_device(context.get(), 0, &info.known, nullptr) == SKERRY_OK);
    CHECK(info.known.struct_size == sizeof(info));
    CHECK(info.tail[0] == 0x5a5a5a5a5a5a5a5au);
    CHECK(info.tail[1] == 0x5a5a5a5a5a5a5a5au);

    // An error of a caller with an older, shorter struct: what lies behind it stays.
    skerry_error error = make<skerry_error>();
    std::memset(error.message, 0x5a, sizeof(error.message));
    error.struct_size = 48;
    const size_t known = 48 - offsetof(skerry_error, message);
    CHECK(skerry_context_create(nullptr, nullptr, &error) == SKERRY_ERROR_ARGUMENT);
    for (size_t i = known; i < sizeof(error.message); ++i)
        REQUIRE(error.message[i] == 0x5a);
}

TEST_CASE("plan and create: geometry is checked by name") {
    const Context context = make_context();
    const PlanRefusal refuse{context.get()};
    const auto with = [](auto change) {
        auto setup = std::make_unique<Setup>(plain());
        change(setup->layers[1]);
        return setup;
    };
    refuse(with([](Layer &l) { l.kv_heads = 0; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_HEADS}, 1);
    refuse(with([](Layer &l) { l.kv_heads = -1; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_HEADS}, 1);
    refuse(with([](Layer &l) { l.query_heads = 3; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_HEADS}, 1);
    refuse(with([](Layer &l) { l.query_heads = -2; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_HEADS}, 1);
    refuse(with([](Layer &l) { l.key_dim = 0; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_KEY_DIM}, 1);
    refuse(with([](Layer &l) { l.key_dim = INT32_MAX; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_KEY_DIM}, 1);
    refuse(with([](Layer &l) { l.value_dim = -8; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_VALUE_DIM}, 1);
    refuse(with([](Layer &l) { l.window = -1; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_WINDOW}, 1);
    refuse(with([](Layer &l) { l.scale = NAN; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER}, 1);
    refuse(with([](Layer &l) { l.softcap = INFINITY; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER}, 1);
    refuse(with([](Layer &l) { l.softcap = -1; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER}, 1);
    refuse(with([](Layer &l) { l.shared_with = 1; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER}, 1);
    refuse(with([](Layer &l) {
               l.shared_with = 0;
               l.key_dim = 16;
           })->desc(),
           SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_KEY_DIM}, 1);
    refuse(with([](Layer &l) { l.rotary_dims = 10; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ROTARY}, 1);
    refuse(with([](Layer &l) { l.rotary_dims = 3; })->desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ROTARY}, 1);

    // A layer that is shared may not be shared with another shared one.
    Setup chain = plain();
    chain.layers.push_back(chain.layers[0]);
    chain.layers[1].shared_with = 0;
    chain.layers[2].shared_with = 1;
    refuse(chain.desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER}, 2);
}

TEST_CASE("plan and create: the description's own fields are checked") {
    const Context context = make_context();
    const PlanRefusal refuse{context.get()};
    Setup base = plain();
    const skerry_cache_desc good = *base.desc();
    const auto with = [&](auto change) {
        skerry_cache_desc desc = good;
        change(desc);
        return desc;
    };
    using D = skerry_cache_desc;
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
        const D desc = with(change);
        refuse(&desc, status, subjects);
    };
    one([](D &d) { d.flags = 1u << 20; }, {SKERRY_SUBJECT_FLAGS});
    one([](D &d) { d.layers = nullptr; }, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.layer_count = 0; }, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.layer_count = -1; }, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.store_dtype = 9; }, {SKERRY_SUBJECT_DTYPE});
    one([](D &d) { d.max_sequences = 65536; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.max_sequences = -1; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.max_step_tokens = -1; }, {SKERRY_SUBJECT_TOKENS, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.staging_tokens = -1; }, {SKERRY_SUBJECT_TOKENS, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.nonfinite = 7; }, {SKERRY_SUBJECT_VALUES, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.device_index = 3; }, {SKERRY_SUBJECT_BACKEND}, SKERRY_ERROR_UNSUPPORTED);
    one([](D &d) { d.device_type = SKERRY_DEVICE_CUDA; }, {SKERRY_SUBJECT_BACKEND}, SKERRY_ERROR_UNSUPPORTED);
    one([](D &d) { d.device_type = 99; }, {SKERRY_SUBJECT_BACKEND}, SKERRY_ERROR_UNSUPPORTED);
    one([](D &d) { d.struct_size = 8; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.struct_size = 5000; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    const auto newer = longer(good, 1);
    refuse(&newer.known, SKERRY_ERROR_NEWER_FIELD, {SKERRY_SUBJECT_STRUCT});
    const auto zero_tail = longer(good, 0);
    skerry_plan_info info = make<skerry_plan_info>();
    CHECK(skerry_cache_plan(context.get(), &zero_tail.known, &info, nullptr) == SKERRY_OK);

    // Structs behind pointers are checked as well.
    Setup setup = plain();
    setup.policy.struct_size = 4;
    refuse(setup.desc(), SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT});
    setup = plain();
    setup.budget.struct_size = 9000;
    refuse(setup.desc(), SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT});
    setup = plain();
    setup.callbacks.struct_size = 1;
    refuse(setup.desc(), SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT});
    setup = plain();
    setup.callbacks.flags = 1;
    refuse(setup.desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_FLAGS});
    setup = plain();
    setup.budget.flags = 1;
    refuse(setup.desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_FLAGS});
    const skerry_layer_desc *nothing[1] = {nullptr};
    one(
        [&](D &d) {
            d.layers = nothing;
            d.layer_count = 1;
        },
        {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_ARGUMENT});

    skerry_cache *cache = nullptr;
    const auto arguments = {SKERRY_SUBJECT_ARGUMENT + 0u};
    refused([&](skerry_error *e) { return skerry_cache_create(nullptr, &good, &cache, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    refused([&](skerry_error *e) { return skerry_cache_create(context.get(), nullptr, &cache, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    refused([&](skerry_error *e) { return skerry_cache_create(context.get(), &good, nullptr, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), &good, nullptr, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    refused([&](skerry_error *e) { return skerry_cache_plan(nullptr, &good, &info, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), nullptr, &info, e); }, SKERRY_ERROR_ARGUMENT, arguments);
    info.struct_size = 16;
    refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), &good, &info, e); }, SKERRY_ERROR_STRUCT_SIZE,
            {SKERRY_SUBJECT_STRUCT});
}

TEST_CASE("plan and create: policies are checked by name") {
    const Context context = make_context();
    const PlanRefusal refuse{context.get()};
    using P = skerry_policy_desc;
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT,
                         bool paper = false) {
        Setup setup = plain();
        if (paper) {
            setup.policy = make<P>();
            setup.policy.kind = SKERRY_POLICY_QEVICT;
            setup.policy.fidelity = SKERRY_FIDELITY_PAPER;
            setup.budget.length_tokens = 100;
            setup.cache.store_dtype = SKERRY_DTYPE_F16;
            for (Layer &layer : setup.layers)
                layer.rotary_dims = 8;
        }
        change(setup.policy);
        refuse(setup.desc(), status, subjects);
    };
    one([](P &p) { p.kind = 17; }, {SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.kind = -1; }, {SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.fidelity = 2; }, {SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.prefill = 2; }, {SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.flags = 1u << 25; }, {SKERRY_SUBJECT_FLAGS});
    one([](P &p) { p.window_tokens = 129; }, {SKERRY_SUBJECT_WINDOW});
    one([](P &p) { p.window_tokens = -4; }, {SKERRY_SUBJECT_WINDOW});
    one([](P &p) { p.sink_tokens = -2; }, {SKERRY_SUBJECT_SINKS});
    one([](P &p) { p.recent_tokens = -2; }, {SKERRY_SUBJECT_RECENT});
    one([](P &p) { p.period_tokens = -1; }, {SKERRY_SUBJECT_PERIOD});
    one([](P &p) { p.score = 99; }, {SKERRY_SUBJECT_SCORE});
    one(
        [](P &p) {
            p.score = SKERRY_SCORE_LAST;
            p.score_queries = 6;
        },
        {SKERRY_SUBJECT_SCORE}); // not a multiple of 4
    one(
        [](P &p) {
            p.score = SKERRY_SCORE_LAST;
            p.score_queries = 36;
        },
        {SKERRY_SUBJECT_SCORE}); // 9 periods
    one([](P &p) { p.selection = 9; }, {SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.key_format = 77; }, {SKERRY_SUBJECT_FORMAT});
    one([](P &p) { p.value_format = 77; }, {SKERRY_SUBJECT_FORMAT});
    one([](P &p) { p.full_format = SKERRY_FORMAT_R2; }, {SKERRY_SUBJECT_FORMAT}); // the store dtype, or R8
    one([](P &p) { p.quantised_share_ppm = 1000001; }, {SKERRY_SUBJECT_BUDGET, SKERRY_SUBJECT_POLICY});
    one([](P &p) { p.reserved = 1; }, {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_POLICY});
    // Paper fidelity is for QEVICT only, and has rules of its own (decisions 13, 20).
    one([](P &p) { p.kind = SKERRY_POLICY_EVICT; }, {SKERRY_SUBJECT_POLICY}, SKERRY_ERROR_ARGUMENT, true);
    one(
        [](P &p) {
            p.window_tokens = 6;
            p.recent_tokens = 12;
        },
        {SKERRY_SUBJECT_WINDOW}, SKERRY_ERROR_UNSUPPORTED, true);
    one([](P &p) { p.recent_tokens = 12; }, {SKERRY_SUBJECT_RECENT}, SKERRY_ERROR_ARGUMENT, true);

    Setup no_rotary = plain();
    no_rotary.budget.length_tokens = 100;
    no_rotary.policy = make<P>();
    no_rotary.policy.kind = SKERRY_POLICY_QEVICT;
    no_rotary.policy.fidelity = SKERRY_FIDELITY_PAPER;
    refuse(no_rotary.desc(), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ROTARY}, 0);
    no_rotary.layers = layers_of(1, 1, 1, 6, 6);
    no_rotary.layers[0].rotary_dims = 6;
    // Packed by four.
    refuse(no_rotary.desc(), SKERRY_ERROR_UNSUPPORTED, {SKERRY_SUBJECT_KEY_DIM, SKERRY_SUBJECT_VALUE_DIM}, 0);
    no_rotary.layers = layers_of(1, 1, 1, 8, 16);
    no_rotary.layers[0].rotary_dims = 8;
    refuse(no_rotary.desc(), SKERRY_ERROR_UNSUPPORTED, {SKERRY_SUBJECT_VALUE_DIM}, 0);
}

TEST_CASE("plan and create: a head without a factor of two has no rotated format, and says so (G6, P019, P020)") {
    const Context context = make_context();
    const PlanRefusal refuse{context.get()};
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 1, 1, 8, 8));
    setup.layers[1].key_dim = 7;
    setup.policy.key_format = SKERRY_FORMAT_R3;
    setup.policy.value_format = SKERRY_FORMAT_R2;
    refuse(setup.desc(), SKERRY_ERROR_UNSUPPORTED, {SKERRY_SUBJECT_FORMAT, SKERRY_SUBJECT_KEY_DIM}, 1);
}

TEST_CASE("plan: what was left open is chosen, and can be read (P007, P021, P139)") {
    const Context context = make_context();
    Setup setup;
    setup.layers = layers_of(1, 2, 4, 64, 64);
    setup.policy.kind = SKERRY_POLICY_QEVICT;
    skerry_plan_info info = plan_of(context.get(), setup);
    CHECK(info.store_dtype == SKERRY_DTYPE_F16);
    CHECK(info.max_sequences == 1);
    CHECK(info.max_step_tokens == 256);
    CHECK(info.staging_tokens == 256);
    CHECK(info.budget_bytes == UINT64_MAX);
    CHECK(info.window_tokens == 16);
    CHECK(info.sink_tokens == 4);
    CHECK(info.recent_tokens == 32);
    CHECK(info.period_tokens == 16);
    CHECK(info.score_queries == 32);
    CHECK(info.key_format == SKERRY_FORMAT_R3); // keys in more bits than values
    CHECK(info.value_format == SKERRY_FORMAT_R2);
    CHECK(info.hysteresis_ppm == 1200000);
    CHECK(info.max_moves_ppm == 125000);
    CHECK(info.exact_attend == 0);
    setup.cache.flags = SKERRY_CACHE_EXACT_ATTEND;
    CHECK(plan_of(context.get(), setup).exact_attend == 1);

    setup.policy.fidelity = SKERRY_FIDELITY_PAPER;
    setup.layers[0].rotary_dims = 64;
    setup.budget.length_tokens = 1000;
    info = plan_of(context.get(), setup);
    CHECK(info.window_tokens == 8);
    CHECK(info.sink_tokens == 5);
    CHECK(info.recent_tokens == 32);
    CHECK(info.period_tokens == 8);
    CHECK(info.score == SKERRY_SCORE_CUMULATIVE);
    CHECK(info.selection == SKERRY_SELECTION_PER_LAYER);
    CHECK(info.key_format == SKERRY_FORMAT_C2);
    CHECK(info.value_format == SKERRY_FORMAT_C2);
    CHECK(info.quantised_share_ppm == 700000);

    Setup none = setup;
    none.policy = make<skerry_policy_desc>();
    none.policy.kind = SKERRY_POLICY_STREAMING;
    none.policy.sink_tokens = SKERRY_NONE_TOKENS;
    CHECK(plan_of(context.get(), none).sink_tokens == 0);
    // What attend really uses follows what was switched off.
    const Context plain_cpp = make_context(0u, UINT32_MAX);
    CHECK(plan_of(plain_cpp.get(), setup).cpu_features == 0);
}

TEST_CASE("budget: below the floor the minimum is named, and accepted to the byte (G8, P051, P055)") {
    const Context context = make_context();
    for (skerry_policy_kind kind : {SKERRY_POLICY_STREAMING, SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT}) {
        for (int prefill : {SKERRY_PREFILL_SPLIT, SKERRY_PREFILL_WHOLE}) {
            CAPTURE(kind);
            CAPTURE(prefill);
            Setup setup = small_setup(kind, layers_of(2, 2, 4, 16, 8));
            setup.policy.prefill = prefill;
            setup.cache.max_sequences = 3;
            setup.cache.max_step_tokens = 8;
            const uint64_t minimum = minimum_bytes(context.get(), setup);
            REQUIRE(minimum > 1);
            setup.budget.bytes = minimum - 1;
            skerry_plan_info info = make<skerry_plan_info>();
            skerry_error error = refused([&](skerry_error *e) { return skerry_cache_plan(context.get(), setup.desc(), &info, e); },
                                         SKERRY_ERROR_OVER_BUDGET, {SKERRY_SUBJECT_BUDGET});
            CHECK(error.allowed == static_cast<int64_t>(minimum));
            CHECK(error.found == static_cast<int64_t>(minimum - 1));
            CHECK(info.minimum_bytes == minimum); // filled all the same
            CHECK(std::string(error.message).find(std::to_string(minimum)) != std::string::npos);
            skerry_cache *none = nullptr;
            refused([&](skerry_error *e) { return skerry_cache_create(context.get(), setup.desc(), &none, e); }, SKERRY_ERROR_OVER_BUDGET,
                    {SKERRY_SUBJECT_BUDGET});
            CHECK(none == nullptr);

            setup.budget.bytes = minimum;
            const Cache cache = make_cache(context.get(), setup);
            Runner runner(cache.get(), setup.layers);
            std::vector<Stream> streams;
            for (uint64_t i = 0; i < 3; ++i)
                streams.push_back({make_seq(cache.get()), History(i + 1), 0});
            // All sequences at the floor at once, and any step up to the declared size.
            for (int round = 0; round < 12; ++round) {
                for (Stream &stream : streams)
                    grow(runner, stream, round % 3 == 0 ? 8 : 1);
                const skerry_memory_info memory = memory_of(cache.get());
                CHECK(memory.pool_bytes + memory.table_bytes <= minimum);
                check_cache(cache.get());
            }
        }
    }
}

TEST_CASE("sequences: bad arguments are refused") {
    const Context context = make_context();
    Setup setup = plain();
    setup.cache.max_sequences = 2;
    const Cache owner = make_cache(context.get(), setup);
    skerry_cache *cache = owner.get();
    Runner runner(cache, setup.layers);
    Stream stream{make_seq(cache), History(1), 0};
    grow(runner, stream, 11);
    const Guard guard{cache, {stream.seq}};
    const std::initializer_list<uint32_t> argument = {SKERRY_SUBJECT_ARGUMENT};
    const std::initializer_list<uint32_t> sequence = {SKERRY_SUBJECT_SEQUENCE};
    skerry_seq out{};
    int32_t needed = 0;
    uint64_t hash = 0;
    skerry_range ranges[4];
    skerry_seq_info info = make<skerry_seq_info>();
    skerry_diagnostics diagnostics = make<skerry_diagnostics>();
    using E = skerry_error *;

    for (uint64_t bits : {uint64_t(0), ~uint64_t(0), stream.seq.bits + 1, uint64_t(1) << 40, stream.seq.bits ^ 2}) {
        const skerry_seq stale{bits};
        guard.refused([&](E e) { return skerry_seq_drop(cache, stale, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_fork(cache, stale, -1, &out, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_truncate(cache, stale, 0, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_can_truncate(cache, stale, 0, 0, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_get_info(cache, stale, &info, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stale, 0, 0, ranges, 4, &needed, e); }, SKERRY_ERROR_STALE_ID,
                      sequence);
        guard.refused([&](E e) { return skerry_seq_fingerprint(cache, stale, &hash, e); }, SKERRY_ERROR_STALE_ID, sequence);
        guard.refused([&](E e) { return skerry_seq_get_diagnostics(cache, stale, -1, &diagnostics, e); }, SKERRY_ERROR_STALE_ID, sequence);
    }
    guard.refused([&](E e) { return skerry_seq_create(cache, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_create(nullptr, &out, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_drop(nullptr, stream.seq, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_fork(cache, stream.seq, -1, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_fork(nullptr, stream.seq, -1, &out, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_truncate(nullptr, stream.seq, 0, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_get_info(cache, stream.seq, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_fingerprint(cache, stream.seq, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stream.seq, 0, 0, ranges, 4, nullptr, e); }, SKERRY_ERROR_ARGUMENT,
                  argument);
    guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stream.seq, 0, 0, nullptr, 4, &needed, e); }, SKERRY_ERROR_ARGUMENT,
                  argument);
    guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stream.seq, 0, 0, ranges, -1, &needed, e); }, SKERRY_ERROR_ARGUMENT,
                  argument);
    for (int layer : {-1, 2, INT32_MAX}) {
        guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stream.seq, layer, 0, ranges, 4, &needed, e); },
                      SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER});
        if (layer != -1) {
            guard.refused([&](E e) { return skerry_seq_get_diagnostics(cache, stream.seq, layer, &diagnostics, e); }, SKERRY_ERROR_ARGUMENT,
                          {SKERRY_SUBJECT_LAYER});
        }
    }
    for (int head : {-1, 2, INT32_MAX}) {
        guard.refused([&](E e) { return skerry_seq_list_ranges(cache, stream.seq, 0, head, ranges, 4, &needed, e); }, SKERRY_ERROR_ARGUMENT,
                      {SKERRY_SUBJECT_HEADS});
    }
    guard.refused([&](E e) { return skerry_seq_get_diagnostics(cache, stream.seq, -2, &diagnostics, e); }, SKERRY_ERROR_ARGUMENT,
                  {SKERRY_SUBJECT_LAYER});
    guard.refused([&](E e) { return skerry_seq_get_diagnostics(cache, stream.seq, 0, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    for (int64_t length : {int64_t(-2), int64_t(12), INT64_MAX, INT64_MIN}) {
        guard.refused([&](E e) { return skerry_seq_fork(cache, stream.seq, length, &out, e); }, SKERRY_ERROR_ARGUMENT,
                      {SKERRY_SUBJECT_POSITION});
        guard.refused([&](E e) { return skerry_seq_truncate(cache, stream.seq, length, e); }, SKERRY_ERROR_ARGUMENT,
                      {SKERRY_SUBJECT_POSITION});
        guard.refused([&](E e) { return skerry_seq_can_truncate(cache, stream.seq, length, 0, e); }, SKERRY_ERROR_ARGUMENT,
                      {SKERRY_SUBJECT_POSITION});
    }
    guard.refused([&](E e) { return skerry_seq_truncate(cache, stream.seq, -1, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_POSITION});
    guard.refused([&](E e) { return skerry_seq_can_truncate(cache, stream.seq, 3, -1, e); }, SKERRY_ERROR_ARGUMENT,
                  {SKERRY_SUBJECT_TOKENS, SKERRY_SUBJECT_POSITION});
    info.struct_size = 12;
    guard.refused([&](E e) { return skerry_seq_get_info(cache, stream.seq, &info, e); }, SKERRY_ERROR_STRUCT_SIZE, {SKERRY_SUBJECT_STRUCT});
    diagnostics.struct_size = 6000;
    guard.refused([&](E e) { return skerry_seq_get_diagnostics(cache, stream.seq, 0, &diagnostics, e); }, SKERRY_ERROR_STRUCT_SIZE,
                  {SKERRY_SUBJECT_STRUCT});

    // The table is full: by name, and no handle comes back.
    const skerry_seq second = make_seq(cache);
    const Guard both{cache, {stream.seq, second}};
    both.refused([&](E e) { return skerry_seq_create(cache, &out, e); }, SKERRY_ERROR_TIER_FULL, sequence);
    both.refused([&](E e) { return skerry_seq_fork(cache, stream.seq, -1, &out, e); }, SKERRY_ERROR_TIER_FULL, sequence);

    // P049, G21: an id whose sequence is gone never means the next sequence in its place.
    REQUIRE(skerry_seq_drop(cache, second, nullptr) == SKERRY_OK);
    const skerry_seq third = make_seq(cache);
    CHECK(third.bits != second.bits);
    guard.refused([&](E e) { return skerry_seq_get_info(cache, second, &(info = make<skerry_seq_info>()), e); }, SKERRY_ERROR_STALE_ID,
                  sequence);
}

TEST_CASE("cache: bad arguments of reports and budgets are refused") {
    const Context context = make_context();
    Setup setup = plain();
    setup.budget.bytes = 3 * minimum_bytes(context.get(), setup);
    const Cache owner = make_cache(context.get(), setup);
    skerry_cache *cache = owner.get();
    Runner runner(cache, setup.layers);
    Stream stream{make_seq(cache), History(1), 0};
    grow(runner, stream, 31);
    const Guard guard{cache, {stream.seq}};
    using E = skerry_error *;
    const std::initializer_list<uint32_t> argument = {SKERRY_SUBJECT_ARGUMENT};
    const std::initializer_list<uint32_t> structs = {SKERRY_SUBJECT_STRUCT};
    guard.refused([&](E e) { return skerry_cache_get_memory(cache, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_cache_get_counters(cache, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_cache_get_plan(cache, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    guard.refused([&](E e) { return skerry_cache_check(nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    skerry_memory_info memory{};
    guard.refused([&](E e) { return skerry_cache_get_memory(cache, &memory, e); }, SKERRY_ERROR_STRUCT_SIZE, structs);
    skerry_counters counters{};
    guard.refused([&](E e) { return skerry_cache_get_counters(cache, &counters, e); }, SKERRY_ERROR_STRUCT_SIZE, structs);
    skerry_plan_info plan{};
    guard.refused([&](E e) { return skerry_cache_get_plan(cache, &plan, e); }, SKERRY_ERROR_STRUCT_SIZE, structs);

    guard.refused([&](E e) { return skerry_cache_set_budget(cache, nullptr, e); }, SKERRY_ERROR_ARGUMENT, argument);
    skerry_budget_desc budget = make<skerry_budget_desc>();
    budget.flags = 2;
    guard.refused([&](E e) { return skerry_cache_set_budget(cache, &budget, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_FLAGS});
    budget = make<skerry_budget_desc>();
    budget.struct_size = 2;
    guard.refused([&](E e) { return skerry_cache_set_budget(cache, &budget, e); }, SKERRY_ERROR_STRUCT_SIZE, structs);
    const auto newer = longer(make<skerry_budget_desc>(), 3);
    guard.refused([&](E e) { return skerry_cache_set_budget(cache, &newer.known, e); }, SKERRY_ERROR_NEWER_FIELD, structs);
    // G11, P126: a budget that cannot hold the floor changes nothing and names the minimum.
    budget = make<skerry_budget_desc>();
    budget.bytes = 1;
    const skerry_error error =
        guard.refused([&](E e) { return skerry_cache_set_budget(cache, &budget, e); }, SKERRY_ERROR_OVER_BUDGET, {SKERRY_SUBJECT_BUDGET});
    budget.bytes = static_cast<uint64_t>(error.allowed) - 1;
    guard.refused([&](E e) { return skerry_cache_set_budget(cache, &budget, e); }, SKERRY_ERROR_OVER_BUDGET, {SKERRY_SUBJECT_BUDGET});
    budget.bytes = static_cast<uint64_t>(error.allowed);
    skerry_error detail = make<skerry_error>();
    CHECK_MESSAGE(skerry_cache_set_budget(cache, &budget, &detail) == SKERRY_OK, detail.message);
    check_cache(cache);
}
