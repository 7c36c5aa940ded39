// Bad arguments and wrong order inside a step: each call is refused by name, changes nothing, and the step goes on.
// Holds G1, G7, G11, G20, P029, P030, P032, P071, P072, P099, P141.

#include "oracle.hpp"

#include <limits>
#include <stdexcept>

using namespace support;

namespace {

using E = skerry_error *;

// One open step of two sequences (3 and 2 tokens) on two layers, the second of them shared by a third.
struct Fixture {
    Context context = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(3, 2, 4, 8, 4));
    Cache owner;
    skerry_cache *cache = nullptr;
    std::unique_ptr<Runner> runner;
    Stream first, second;
    skerry_step *step = nullptr;
    std::vector<float> keys, values, queries, out, lse;
    skerry_tensor key_tensor{}, value_tensor{}, query_tensor{}, out_tensor{}, lse_tensor{};

    explicit Fixture(skerry_nonfinite nonfinite = SKERRY_NONFINITE_REFUSE, skerry_dtype store = SKERRY_DTYPE_F32) {
        setup.layers[2].shared_with = 1;
        setup.cache.max_sequences = 4;
        setup.cache.max_step_tokens = 40;
        setup.cache.nonfinite = nonfinite;
        setup.cache.store_dtype = store;
        // Heads as small as these are no smaller in low bits than in 16.
        if (store != SKERRY_DTYPE_F32) setup.policy.kind = SKERRY_POLICY_EVICT;
        owner = make_cache(context.get(), setup);
        cache = owner.get();
        runner = std::make_unique<Runner>(cache, setup.layers);
        first = {make_seq(cache), History(1), 0};
        second = {make_seq(cache), History(2), 0};
        // Ends at events: a step over a layer that others read may not cross one.
        for (int32_t count : {6, 4, 4, 4, 4})
            grow(*runner, first, count);
        grow(*runner, second, 6);
        keys.resize(5 * 2 * 8);
        values.resize(5 * 2 * 4);
        queries.resize(5 * 4 * 8);
        out.assign(5 * 4 * 4, 7.0f);
        lse.assign(5 * 4, 7.0f);
        for (size_t i = 0; i < keys.size(); ++i)
            keys[i] = static_cast<float>(i % 7) - 3;
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<float>(i % 5) - 2;
        for (size_t i = 0; i < queries.size(); ++i)
            queries[i] = static_cast<float>(i % 3) - 1;
        key_tensor = tensor(keys.data(), SKERRY_DTYPE_F32, {5, 2, 8});
        value_tensor = tensor(values.data(), SKERRY_DTYPE_F32, {5, 2, 4});
        query_tensor = tensor(queries.data(), SKERRY_DTYPE_F32, {5, 4, 8});
        out_tensor = tensor(out.data(), SKERRY_DTYPE_F32, {5, 4, 4});
        lse_tensor = tensor(lse.data(), SKERRY_DTYPE_F32, {5, 4});
    }

    Guard guard() const { return {cache, {first.seq, second.seq}}; }
    void begin() {
        const skerry_seq seqs[2] = {first.seq, second.seq};
        const int32_t counts[2] = {3, 2};
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = seqs;
        desc.token_counts = counts;
        desc.seq_count = 2;
        skerry_error error = make<skerry_error>();
        REQUIRE_MESSAGE(skerry_step_begin(cache, &desc, &step, &error) == SKERRY_OK, error.message);
    }
    void append(int layer) {
        skerry_error error = make<skerry_error>();
        REQUIRE_MESSAGE(skerry_step_append(step, layer, &key_tensor, &value_tensor, nullptr, &error) == SKERRY_OK, error.message);
    }
    skerry_attend_desc attend_desc(int layer) const {
        skerry_attend_desc desc = make<skerry_attend_desc>();
        desc.queries = &query_tensor;
        desc.out = &out_tensor;
        desc.lse = &lse_tensor;
        desc.layer = layer;
        return desc;
    }
    void attend(int layer) {
        const skerry_attend_desc desc = attend_desc(layer);
        skerry_error error = make<skerry_error>();
        REQUIRE_MESSAGE(skerry_step_attend(step, &desc, &error) == SKERRY_OK, error.message);
    }
    void commit() {
        skerry_error error = make<skerry_error>();
        REQUIRE_MESSAGE(skerry_step_commit(step, &error) == SKERRY_OK, error.message);
        step = nullptr;
    }
};

} // namespace

TEST_CASE("step_begin: bad descriptions are refused") {
    Fixture f;
    skerry_step *out = nullptr;
    const skerry_seq seqs[3] = {f.first.seq, f.second.seq, f.first.seq};
    const int32_t counts[3] = {3, 2, 1};
    skerry_step_desc good = make<skerry_step_desc>();
    good.seqs = seqs;
    good.token_counts = counts;
    good.seq_count = 2;
    const Guard guard = f.guard();
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
        skerry_step_desc desc = good;
        change(desc);
        out = reinterpret_cast<skerry_step *>(&out);
        const skerry_error error = guard.refused([&](E e) { return skerry_step_begin(f.cache, &desc, &out, e); }, status, subjects);
        CHECK(out == nullptr);
        return error;
    };
    using D = skerry_step_desc;
    one([](D &d) { d.struct_size = 8; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.struct_size = 4100; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.flags = 1u << 31; }, {SKERRY_SUBJECT_FLAGS});
    one([](D &d) { d.reserved = 1; }, {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.seq_count = 0; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.seq_count = -3; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.seq_count = INT32_MAX; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.seqs = nullptr; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.token_counts = nullptr; }, {SKERRY_SUBJECT_SEQUENCE, SKERRY_SUBJECT_TOKENS});
    const int32_t none[2] = {3, 0}, negative[2] = {-1, 2}, many[2] = {3, 41}, most[2] = {INT32_MAX, INT32_MAX};
    CHECK(one([&](D &d) { d.token_counts = none; }, {SKERRY_SUBJECT_TOKENS}).index == 1);
    CHECK(one([&](D &d) { d.token_counts = negative; }, {SKERRY_SUBJECT_TOKENS}).index == 0);
    const skerry_error oversize = one([&](D &d) { d.token_counts = many; }, {SKERRY_SUBJECT_TOKENS}); // P072
    CHECK(oversize.index == 1);
    CHECK(oversize.found == 41);
    CHECK(oversize.allowed == 40);
    one([&](D &d) { d.token_counts = most; }, {SKERRY_SUBJECT_TOKENS});
    CHECK(one([&](D &d) { d.seq_count = 3; }, {SKERRY_SUBJECT_SEQUENCE}).index == 2); // twice in one step
    // P141: a position that does not continue the sequence.
    const int64_t ahead[2] = {22, 7}, behind[2] = {21, 6}, good_positions[2] = {22, 6};
    const skerry_error gap = one([&](D &d) { d.positions = ahead; }, {SKERRY_SUBJECT_POSITION});
    CHECK(gap.index == 1);
    CHECK(gap.found == 7);
    CHECK(gap.allowed == 6);
    CHECK(one([&](D &d) { d.positions = behind; }, {SKERRY_SUBJECT_POSITION}).index == 0);
    const skerry_seq stale[2] = {f.first.seq, {f.second.seq.bits + 1}};
    CHECK(one([&](D &d) { d.seqs = stale; }, {SKERRY_SUBJECT_SEQUENCE}, SKERRY_ERROR_STALE_ID).index == 1);
    guard.refused([&](E e) { return skerry_step_begin(f.cache, nullptr, &out, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused([&](E e) { return skerry_step_begin(nullptr, &good, &out, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused([&](E e) { return skerry_step_begin(f.cache, &good, nullptr, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});

    good.positions = good_positions;
    REQUIRE(skerry_step_begin(f.cache, &good, &out, nullptr) == SKERRY_OK);
    skerry_step_abort(out);
    skerry_step_abort(nullptr);
}

TEST_CASE("open step: what would pull the ground away is refused") {
    Fixture f;
    f.begin();
    const Guard guard = f.guard();
    skerry_seq out{};
    skerry_step *second = nullptr;
    const int32_t one = 1;
    skerry_step_desc desc = make<skerry_step_desc>();
    desc.seqs = &f.second.seq;
    desc.token_counts = &one;
    desc.seq_count = 1;
    const std::initializer_list<uint32_t> step = {SKERRY_SUBJECT_STEP};
    const auto refuse = [&] {
        guard.refused([&](E e) { return skerry_step_begin(f.cache, &desc, &second, e); }, SKERRY_ERROR_STATE, step);
        guard.refused([&](E e) { return skerry_seq_create(f.cache, &out, e); }, SKERRY_ERROR_STATE, step);
        guard.refused([&](E e) { return skerry_seq_fork(f.cache, f.first.seq, -1, &out, e); }, SKERRY_ERROR_STATE, step);
        guard.refused([&](E e) { return skerry_seq_drop(f.cache, f.first.seq, e); }, SKERRY_ERROR_STATE,
                      {SKERRY_SUBJECT_STEP, SKERRY_SUBJECT_SEQUENCE});
        guard.refused([&](E e) { return skerry_seq_truncate(f.cache, f.first.seq, 0, e); }, SKERRY_ERROR_STATE,
                      {SKERRY_SUBJECT_STEP, SKERRY_SUBJECT_SEQUENCE});
        skerry_budget_desc budget = make<skerry_budget_desc>();
        guard.refused([&](E e) { return skerry_cache_set_budget(f.cache, &budget, e); }, SKERRY_ERROR_STATE, step);
    };
    refuse();
    f.append(0);
    f.attend(0);
    refuse();
    f.append(1);
    f.commit();
}

TEST_CASE("append: bad tensors and layers are refused, then the right ones are taken") {
    Fixture f;
    f.begin();
    const Guard guard = f.guard();
    const auto one = [&](int layer, const skerry_tensor *keys, const skerry_tensor *values, std::initializer_list<uint32_t> subjects,
                         skerry_status status = SKERRY_ERROR_ARGUMENT) {
        return guard.refused([&](E e) { return skerry_step_append(f.step, layer, keys, values, nullptr, e); }, status, subjects);
    };
    const std::initializer_list<uint32_t> tensors = {SKERRY_SUBJECT_TENSOR};
    const skerry_tensor *keys = &f.key_tensor, *values = &f.value_tensor;
    for (int layer : {-1, 3, INT32_MAX})
        one(layer, keys, values, {SKERRY_SUBJECT_LAYER});
    one(2, keys, values, {SKERRY_SUBJECT_LAYER}, SKERRY_ERROR_STATE); // reads layer 1
    one(0, nullptr, values, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_TENSOR});
    one(0, keys, nullptr, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_TENSOR});
    guard.refused([&](E e) { return skerry_step_append(nullptr, 0, keys, values, nullptr, e); }, SKERRY_ERROR_ARGUMENT,
                  {SKERRY_SUBJECT_ARGUMENT});
    for (const skerry_tensor *good : {keys, values}) {
        const auto with = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
            skerry_tensor bad = *good;
            change(bad);
            return one(0, good == keys ? &bad : keys, good == keys ? values : &bad, subjects, status);
        };
        with([](skerry_tensor &t) { t.data = nullptr; }, {SKERRY_SUBJECT_TENSOR, SKERRY_SUBJECT_ARGUMENT});
        with([](skerry_tensor &t) { t.dtype = SKERRY_DTYPE_NONE; }, {SKERRY_SUBJECT_DTYPE});
        with([](skerry_tensor &t) { t.dtype = 77; }, {SKERRY_SUBJECT_DTYPE});
        for (int rank : {-1, 0, 1, 2, 4, 5, INT32_MAX})
            with([&](skerry_tensor &t) { t.rank = rank; }, tensors);
        for (int i = 0; i < 3; ++i) {
            CHECK(with([&](skerry_tensor &t) { ++t.shape[i]; }, tensors).index == i);
            CHECK(with([&](skerry_tensor &t) { --t.shape[i]; }, tensors).index == i);
            CHECK(with([&](skerry_tensor &t) { t.shape[i] = -5; }, tensors).index == i);
        }
        with([](skerry_tensor &t) { t.device_type = SKERRY_DEVICE_CUDA; }, {SKERRY_SUBJECT_BACKEND, SKERRY_SUBJECT_TENSOR},
             SKERRY_ERROR_UNSUPPORTED);
    }
    f.append(0);
    one(0, keys, values, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP}, SKERRY_ERROR_STATE); // twice
    f.append(1);
    f.commit();
    CHECK(info_of(f.cache, f.first.seq).length_tokens == 25); // P071
    CHECK(info_of(f.cache, f.second.seq).length_tokens == 8);
}

TEST_CASE("append and attend: any strides, byte offsets and sizes of one (P029, P030, P031, P032)") {
    Fixture f;
    f.begin();
    f.append(0);
    f.attend(0);
    const std::vector<float> plain_out = f.out, plain_lse = f.lse;
    skerry_step_abort(f.step);
    const uint64_t before = fingerprint_of(f.cache, f.first.seq);

    // Heads outermost, channels backwards, every second number foreign, an odd start.
    const auto spread = [](const std::vector<float> &from, int tokens, int heads, int dim, std::vector<float> &to) {
        to.assign(from.size() * 2 + 8, NAN);
        skerry_tensor t = tensor(to.data(), SKERRY_DTYPE_F32, {tokens, heads, dim});
        t.stride[0] = 2 * dim;
        t.stride[1] = static_cast<int64_t>(2) * dim * tokens;
        t.stride[2] = -2;
        t.byte_offset = sizeof(float) * static_cast<size_t>(3 + 2 * (dim - 1));
        for (int i = 0; i < tokens; ++i) {
            for (int h = 0; h < heads; ++h) {
                for (int c = 0; c < dim; ++c) {
                    to[static_cast<size_t>(3 + 2 * (dim - 1) + i * t.stride[0] + h * t.stride[1] - 2 * c)] =
                        from[static_cast<size_t>((i * heads + h) * dim + c)];
                }
            }
        }
        return t;
    };
    std::vector<float> key_bytes, value_bytes, query_bytes, out_bytes;
    const skerry_tensor keys = spread(f.keys, 5, 2, 8, key_bytes);
    const skerry_tensor values = spread(f.values, 5, 2, 4, value_bytes);
    const skerry_tensor queries = spread(f.queries, 5, 4, 8, query_bytes);
    const skerry_tensor out = spread(plain_out, 5, 4, 4, out_bytes);
    std::fill(out_bytes.begin(), out_bytes.end(), -77.0f);
    f.begin();
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_step_append(f.step, 0, &keys, &values, nullptr, &error) == SKERRY_OK, error.message);
    skerry_attend_desc desc = f.attend_desc(0);
    desc.queries = &queries;
    desc.out = &out;
    REQUIRE_MESSAGE(skerry_step_attend(f.step, &desc, &error) == SKERRY_OK, error.message);
    size_t foreign = 0, wrong = 0;
    for (int i = 0; i < 5; ++i) {
        for (int h = 0; h < 4; ++h) {
            for (int c = 0; c < 4; ++c) {
                wrong += out_bytes[static_cast<size_t>(3 + 6 + i * out.stride[0] + h * out.stride[1] - 2 * c)] !=
                         plain_out[static_cast<size_t>((i * 4 + h) * 4 + c)];
            }
        }
    }
    for (float x : out_bytes)
        foreign += x == -77.0f;
    CHECK(wrong == 0);
    CHECK(foreign == out_bytes.size() - plain_out.size()); // nothing beside the tensor was written
    CHECK(f.lse == plain_lse);
    skerry_step_abort(f.step);
    CHECK(fingerprint_of(f.cache, f.first.seq) == before);

    // One row for all tokens (stride 0), and nonsense in the stride of a dimension of size 1.
    Setup single = small_setup(SKERRY_POLICY_FULL, layers_of(1, 1, 1, 8, 4));
    const Cache cache = make_cache(f.context.get(), single);
    const skerry_seq seq = make_seq(cache.get());
    const int32_t count = 4;
    skerry_step_desc step_desc = make<skerry_step_desc>();
    step_desc.seqs = &seq;
    step_desc.token_counts = &count;
    step_desc.seq_count = 1;
    skerry_step *step = nullptr;
    REQUIRE(skerry_step_begin(cache.get(), &step_desc, &step, nullptr) == SKERRY_OK);
    skerry_tensor row = tensor(f.keys.data(), SKERRY_DTYPE_F32, {4, 1, 8});
    row.stride[0] = 0;
    row.stride[1] = INT64_MAX / 2;
    skerry_tensor value_row = tensor(f.values.data(), SKERRY_DTYPE_F32, {4, 1, 4});
    value_row.stride[0] = 0;
    value_row.stride[1] = INT64_MIN;
    REQUIRE_MESSAGE(skerry_step_append(step, 0, &row, &value_row, nullptr, &error) == SKERRY_OK, error.message);
    const Gathered got = gather(step, single.layers[0], 0, 0, 0);
    REQUIRE(got.tokens == 4);
    for (size_t i = 0; i < 32; ++i)
        CHECK(got.keys[i] == f.keys[i % 8]);
    for (size_t i = 0; i < 16; ++i)
        CHECK(got.values[i] == f.values[i % 4]);
    REQUIRE(skerry_step_commit(step, nullptr) == SKERRY_OK);
}

TEST_CASE("nonfinite numbers: refused whole, by token (G1, P001, P017)") {
    for (skerry_dtype store : {SKERRY_DTYPE_F32, SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16}) {
        Fixture f(SKERRY_NONFINITE_REFUSE, store);
        f.begin();
        const Guard guard = f.guard();
        const std::initializer_list<uint32_t> numbers = {SKERRY_SUBJECT_VALUES};
        for (float bad : {NAN, INFINITY, -INFINITY}) {
            for (size_t token : {size_t(0), size_t(4)}) {
                float *places[2] = {&f.keys[token * 16 + 15], &f.values[token * 8 + 3]};
                for (float *place : places) {
                    const float kept = *place;
                    *place = bad;
                    const skerry_error error =
                        guard.refused([&](E e) { return skerry_step_append(f.step, 1, &f.key_tensor, &f.value_tensor, nullptr, e); },
                                      SKERRY_ERROR_NONFINITE, numbers);
                    CHECK(error.index == static_cast<int32_t>(token));
                    *place = kept;
                }
            }
        }
        f.append(1);
        const skerry_attend_desc desc = f.attend_desc(1);
        for (float bad : {NAN, INFINITY, -INFINITY}) {
            f.queries[3 * 32 + 9] = bad;
            const skerry_error error =
                guard.refused([&](E e) { return skerry_step_attend(f.step, &desc, e); }, SKERRY_ERROR_NONFINITE, numbers);
            CHECK(error.index == 3);
            f.queries[3 * 32 + 9] = 1;
        }
        for (float x : f.out)
            CHECK(x == 7.0f); // outputs untouched
        f.attend(1);
        f.append(0);
        f.commit();
        CHECK(counters_of(f.cache).nonfinite_values == 0);
    }
}

TEST_CASE("nonfinite numbers: stored as 0 and counted when that was asked for (G1)") {
    Fixture f(SKERRY_NONFINITE_ZERO);
    Fixture clean(SKERRY_NONFINITE_ZERO);
    f.keys[5] = NAN;
    f.keys[6] = -INFINITY;
    f.values[11] = INFINITY;
    clean.keys[5] = clean.keys[6] = clean.values[11] = 0;
    for (Fixture *one : {&f, &clean}) {
        one->begin();
        one->append(0);
        one->attend(0);
        one->append(1);
        one->commit();
    }
    CHECK(f.out == clean.out);
    CHECK(f.lse == clean.lse);
    CHECK(fingerprint_of(f.cache, f.first.seq) == fingerprint_of(clean.cache, clean.first.seq));
    CHECK(counters_of(clean.cache).nonfinite_values == 0);
    CHECK(counters_of(f.cache).nonfinite_values == 6); // three in each of two layers
}

TEST_CASE("nonfinite numbers: a query's is refused only when the policy is to refuse (base.h)") {
    Fixture f(SKERRY_NONFINITE_ZERO);
    Fixture clean(SKERRY_NONFINITE_ZERO);
    f.queries[40] = NAN;
    clean.queries[40] = 0;
    for (Fixture *one : {&f, &clean}) {
        one->begin();
        one->append(0);
        one->attend(0);
        one->append(1);
        one->commit();
    }
    CHECK(f.out == clean.out);
    CHECK(counters_of(f.cache).nonfinite_values == 1);
}

TEST_CASE("large numbers: what the store dtype cannot hold never becomes an infinity (G1, G2, P001, P002)") {
    for (skerry_dtype store : {SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16, SKERRY_DTYPE_F32}) {
        for (skerry_nonfinite rule : {SKERRY_NONFINITE_REFUSE, SKERRY_NONFINITE_ZERO}) {
            CAPTURE(store);
            CAPTURE(rule);
            Fixture f(rule, store);
            f.begin();
            f.keys[3] = 3e38f;
            f.values[3] = 1e30f;
            skerry_error error = make<skerry_error>();
            const skerry_status status = skerry_step_append(f.step, 0, &f.key_tensor, &f.value_tensor, nullptr, &error);
            const bool known = status == SKERRY_OK || status == SKERRY_ERROR_NONFINITE;
            CHECK(known);
            if (status == SKERRY_OK) {
                const Gathered got = gather(f.step, f.setup.layers[0], 0, 0, 0);
                for (float x : got.keys)
                    REQUIRE(std::isfinite(x));
                for (float x : got.values)
                    REQUIRE(std::isfinite(x));
            }
            skerry_step_abort(f.step);
            check_cache(f.cache);
        }
    }
    // P002: near the largest f16 the logits do not overflow.
    Fixture f(SKERRY_NONFINITE_REFUSE, SKERRY_DTYPE_F16);
    for (float &x : f.keys)
        x = x < 0 ? -60000.0f : 60000.0f;
    for (float &x : f.queries)
        x = 60000.0f;
    f.begin();
    f.append(0);
    f.attend(0);
    for (float x : f.out)
        CHECK(std::isfinite(x));
    for (float x : f.lse)
        CHECK(std::isfinite(x));
    skerry_step_abort(f.step);
}

TEST_CASE("attend: bad arguments are refused") {
    Fixture f;
    f.begin();
    const Guard guard = f.guard();
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
        skerry_attend_desc desc = f.attend_desc(0);
        change(desc);
        return guard.refused([&](E e) { return skerry_step_attend(f.step, &desc, e); }, status, subjects);
    };
    using D = skerry_attend_desc;
    one([](D &) {}, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP}, SKERRY_ERROR_STATE); // not appended
    f.append(0);
    one([](D &d) { d.layer = 2; }, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP}, SKERRY_ERROR_STATE); // its source is not
    for (int layer : {-1, 3, INT32_MIN})
        one([&](D &d) { d.layer = layer; }, {SKERRY_SUBJECT_LAYER});
    one([](D &d) { d.struct_size = 16; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.flags = 1u << 9; }, {SKERRY_SUBJECT_FLAGS});
    one([](D &d) { d.tiers = 1u; }, {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.tiers = SKERRY_TIERS_FULL | 1u << 30; }, {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_ARGUMENT});
    one([](D &d) { d.queries = nullptr; }, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_TENSOR});
    one([](D &d) { d.out = nullptr; }, {SKERRY_SUBJECT_ARGUMENT, SKERRY_SUBJECT_TENSOR});
    const std::initializer_list<uint32_t> tensors = {SKERRY_SUBJECT_TENSOR};
    const auto tensor_one = [&](const skerry_tensor &good, const skerry_tensor *D::*slot, auto change,
                                std::initializer_list<uint32_t> subjects) {
        skerry_tensor bad = good;
        change(bad);
        return one([&](D &d) { d.*slot = &bad; }, subjects);
    };
    using T = skerry_tensor;
    for (int i = 0; i < 3; ++i) {
        CHECK(tensor_one(
                  f.query_tensor, &D::queries, [&](T &t) { ++t.shape[i]; }, tensors)
                  .index == i);
        CHECK(tensor_one(
                  f.out_tensor, &D::out, [&](T &t) { --t.shape[i]; }, tensors)
                  .index == i);
    }
    tensor_one(
        f.lse_tensor, &D::lse, [](T &t) { t.shape[1] = 5; }, tensors);
    tensor_one(
        f.lse_tensor, &D::lse, [](T &t) { t.rank = 3; }, tensors);
    tensor_one(f.lse_tensor, &D::lse, [](T &t) { t.dtype = SKERRY_DTYPE_F16; }, {SKERRY_SUBJECT_DTYPE});
    tensor_one(f.query_tensor, &D::queries, [](T &t) { t.dtype = 0; }, {SKERRY_SUBJECT_DTYPE});
    tensor_one(f.out_tensor, &D::out, [](T &t) { t.dtype = 4; }, {SKERRY_SUBJECT_DTYPE});
    tensor_one(f.out_tensor, &D::out, [](T &t) { t.data = nullptr; }, {SKERRY_SUBJECT_TENSOR, SKERRY_SUBJECT_ARGUMENT});
    const float sinks[4] = {0, NAN, 0, 0};
    one([&](D &d) { d.sink_logits = sinks; }, {SKERRY_SUBJECT_VALUES}, SKERRY_ERROR_NONFINITE);
    const D good = f.attend_desc(0);
    guard.refused([&](E e) { return skerry_step_attend(nullptr, &good, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused([&](E e) { return skerry_step_attend(f.step, nullptr, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    for (float x : f.out)
        CHECK(x == 7.0f);
    for (float x : f.lse)
        CHECK(x == 7.0f);
    f.attend(0);
    f.append(1);
    f.attend(2);
    f.attend(1);
    f.commit();
}

TEST_CASE("attend: rows of an output may not lie on each other (tensor.h: zero strides are for inputs)") {
    Fixture f;
    f.begin();
    f.append(0);
    for (int i = 0; i < 3; ++i) {
        skerry_tensor flat = f.out_tensor;
        flat.stride[i] = 0;
        skerry_attend_desc desc = f.attend_desc(0);
        desc.flags = SKERRY_ATTEND_NO_SCORE;
        desc.out = &flat;
        f.guard().refused([&](E e) { return skerry_step_attend(f.step, &desc, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_TENSOR});
    }
    skerry_step_abort(f.step);
}

TEST_CASE("view and gather: bad arguments are refused, small arrays are told the size") {
    Fixture f;
    f.begin();
    const Guard guard = f.guard();
    int32_t needed = -1;
    std::vector<skerry_part> parts(64);
    const auto view = [&](int seq, int layer, int head, uint32_t tiers, skerry_part *to, int capacity, int32_t *count) {
        return [=, &f](E e) { return skerry_step_view(f.step, seq, layer, head, tiers, to, capacity, count, e); };
    };
    guard.refused(view(0, 0, 0, 0, parts.data(), 64, &needed), SKERRY_ERROR_STATE, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP});
    f.append(0);
    for (int seq : {-1, 2})
        guard.refused(view(seq, 0, 0, 0, parts.data(), 64, &needed), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_SEQUENCE});
    for (int layer : {-1, 3})
        guard.refused(view(0, layer, 0, 0, parts.data(), 64, &needed), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_LAYER});
    for (int head : {-1, 2})
        guard.refused(view(0, 0, head, 0, parts.data(), 64, &needed), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_HEADS});
    guard.refused(view(0, 0, 0, 1u << 7, parts.data(), 64, &needed), SKERRY_ERROR_ARGUMENT,
                  {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_ARGUMENT});
    guard.refused(view(0, 0, 0, 0, parts.data(), -1, &needed), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused(view(0, 0, 0, 0, nullptr, 64, &needed), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused(view(0, 0, 0, 0, parts.data(), 64, nullptr), SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    CHECK(skerry_step_view(f.step, 0, 0, 0, 0, nullptr, 0, &needed, nullptr) == SKERRY_INCOMPLETE);
    const int32_t all = needed;
    CHECK(all > 1);
    CHECK(skerry_step_view(f.step, 0, 0, 0, 0, parts.data(), all - 1, &needed, nullptr) == SKERRY_INCOMPLETE);
    CHECK(needed == all);
    CHECK(skerry_step_view(f.step, 0, 0, 0, 0, parts.data(), all, &needed, nullptr) == SKERRY_OK);

    int32_t tokens = -1;
    std::vector<float> keys(25 * 8, 5.0f);
    std::vector<int64_t> positions(25, 99);
    const skerry_tensor key_tensor = tensor(keys.data(), SKERRY_DTYPE_F32, {25, 8});
    using D = skerry_gather_desc;
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
        D desc = make<D>();
        desc.keys = &key_tensor;
        desc.positions = positions.data();
        change(desc);
        guard.refused([&](E e) { return skerry_step_gather(f.step, &desc, &tokens, e); }, status, subjects);
    };
    one([](D &d) { d.struct_size = 16; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.flags = 1; }, {SKERRY_SUBJECT_FLAGS});
    one([](D &d) { d.seq_index = 2; }, {SKERRY_SUBJECT_SEQUENCE});
    one([](D &d) { d.seq_index = -1; }, {SKERRY_SUBJECT_SEQUENCE});
    one([](D &d) { d.layer = 5; }, {SKERRY_SUBJECT_LAYER});
    one([](D &d) { d.layer = 1; }, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP}, SKERRY_ERROR_STATE);
    one([](D &d) { d.kv_head = 2; }, {SKERRY_SUBJECT_HEADS});
    one([](D &d) { d.tiers = 1; }, {SKERRY_SUBJECT_FLAGS, SKERRY_SUBJECT_ARGUMENT});
    skerry_tensor narrow = tensor(keys.data(), SKERRY_DTYPE_F32, {25, 7});
    one([&](D &d) { d.keys = &narrow; }, {SKERRY_SUBJECT_TENSOR});
    skerry_tensor unknown = key_tensor;
    unknown.dtype = 12;
    one([&](D &d) { d.keys = &unknown; }, {SKERRY_SUBJECT_DTYPE});
    D desc = make<D>();
    guard.refused([&](E e) { return skerry_step_gather(f.step, &desc, nullptr, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused([&](E e) { return skerry_step_gather(f.step, nullptr, &tokens, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    guard.refused([&](E e) { return skerry_step_gather(nullptr, &desc, &tokens, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    for (float x : keys)
        CHECK(x == 5.0f);
    // Too small for 25 tokens: the number alone is written.
    const skerry_tensor small = tensor(keys.data(), SKERRY_DTYPE_F32, {24, 8});
    desc.keys = &small;
    desc.positions = positions.data();
    CHECK(skerry_step_gather(f.step, &desc, &tokens, nullptr) == SKERRY_INCOMPLETE);
    CHECK(tokens == 25);
    for (float x : keys)
        CHECK(x == 5.0f);
    for (int64_t p : positions)
        CHECK(p == 99);
    // Numbers come in the type that was asked for.
    std::vector<uint16_t> half(25 * 8);
    const skerry_tensor half_tensor = tensor(half.data(), SKERRY_DTYPE_F16, {25, 8});
    desc.keys = &key_tensor;
    REQUIRE(skerry_step_gather(f.step, &desc, &tokens, nullptr) == SKERRY_OK);
    desc.keys = &half_tensor;
    REQUIRE(skerry_step_gather(f.step, &desc, &tokens, nullptr) == SKERRY_OK);
    for (size_t i = 0; i < half.size(); ++i)
        CHECK(half[i] == half_bits(keys[i], SKERRY_DTYPE_F16));
    f.append(1);
    f.commit();
}

TEST_CASE("observe and surprisal: bad arguments are refused") {
    Fixture f;
    f.begin();
    const Guard guard = f.guard();
    int32_t tokens = 0;
    using D = skerry_observe_desc;
    std::vector<float> masses(3 * 25, 1.0f / 25);
    const auto one = [&](auto change, std::initializer_list<uint32_t> subjects, skerry_status status = SKERRY_ERROR_ARGUMENT) {
        D desc = make<D>();
        desc.masses = masses.data();
        desc.token_count = 25;
        change(desc);
        guard.refused([&](E e) { return skerry_step_observe(f.step, &desc, e); }, status, subjects);
    };
    one([](D &) {}, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP}, SKERRY_ERROR_STATE); // not appended
    f.append(0);
    skerry_gather_desc gather_desc = make<skerry_gather_desc>();
    REQUIRE(skerry_step_gather(f.step, &gather_desc, &tokens, nullptr) == SKERRY_OK);
    REQUIRE(tokens == 25);
    one([](D &d) { d.struct_size = 0; }, {SKERRY_SUBJECT_STRUCT}, SKERRY_ERROR_STRUCT_SIZE);
    one([](D &d) { d.flags = 4; }, {SKERRY_SUBJECT_FLAGS});
    one([](D &d) { d.seq_index = 2; }, {SKERRY_SUBJECT_SEQUENCE});
    one([](D &d) { d.layer = -1; }, {SKERRY_SUBJECT_LAYER});
    one([](D &d) { d.kv_head = 9; }, {SKERRY_SUBJECT_HEADS});
    one([](D &d) { d.token_count = 24; }, {SKERRY_SUBJECT_TOKENS});
    one([](D &d) { d.token_count = 26; }, {SKERRY_SUBJECT_TOKENS});
    for (float bad : {NAN, INFINITY}) {
        masses[30] = bad;
        one([](D &) {}, {SKERRY_SUBJECT_VALUES, SKERRY_SUBJECT_SCORE}, SKERRY_ERROR_NONFINITE);
    }
    for (float bad : {-0.25f, 1.5f}) {
        masses[30] = bad;
        one([](D &) {}, {SKERRY_SUBJECT_VALUES, SKERRY_SUBJECT_SCORE});
    }
    masses[30] = 0;
    guard.refused([&](E e) { return skerry_step_observe(f.step, nullptr, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    D desc = make<D>();
    desc.masses = masses.data();
    desc.token_count = 25;
    skerry_error error = make<skerry_error>();
    CHECK_MESSAGE(skerry_step_observe(f.step, &desc, &error) == SKERRY_OK, error.message);
    one([](D &) {}, {SKERRY_SUBJECT_LAYER, SKERRY_SUBJECT_STEP, SKERRY_SUBJECT_SCORE, SKERRY_SUBJECT_HEADS},
        SKERRY_ERROR_STATE); // scored already

    const float nats[3] = {0.5f, 0.0f, 9.0f};
    const auto surprise = [&](int seq, const float *n, int count, std::initializer_list<uint32_t> subjects,
                              skerry_status status = SKERRY_ERROR_ARGUMENT) {
        guard.refused([&](E e) { return skerry_step_surprisal(f.step, seq, n, count, e); }, status, subjects);
    };
    surprise(0, nats, 2, {SKERRY_SUBJECT_TOKENS});
    surprise(1, nats, 3, {SKERRY_SUBJECT_TOKENS});
    surprise(2, nats, 3, {SKERRY_SUBJECT_SEQUENCE});
    surprise(0, nullptr, 3, {SKERRY_SUBJECT_ARGUMENT});
    for (float bad : {NAN, INFINITY, -1.0f}) {
        const float wrong[3] = {0, bad, 0};
        surprise(0, wrong, 3, {SKERRY_SUBJECT_VALUES}, SKERRY_ERROR_NONFINITE);
    }
    CHECK(skerry_step_surprisal(f.step, 0, nats, 3, nullptr) == SKERRY_OK);
    f.append(1);
    f.commit();
}

TEST_CASE("commit: a missing layer is named, and the step goes on") {
    Fixture f;
    f.begin();
    f.append(1);
    const Guard guard = f.guard();
    const skerry_error error =
        guard.refused([&](E e) { return skerry_step_commit(f.step, e); }, SKERRY_ERROR_STATE, {SKERRY_SUBJECT_LAYER});
    CHECK(error.index == 0);
    refused([&](E e) { return skerry_step_commit(nullptr, e); }, SKERRY_ERROR_ARGUMENT, {SKERRY_SUBJECT_ARGUMENT});
    CHECK(info_of(f.cache, f.first.seq).length_tokens == 22);
    f.append(0);
    f.commit();
    CHECK(info_of(f.cache, f.first.seq).length_tokens == 25);
    check_cache(f.cache);
}

namespace {

struct Loops {
    enum class Fault { none, error, skip, first_only, twice, thrown } fault = Fault::none;
    int calls = 0;

    static int32_t run(void *user, skerry_task_fn task_fn, void *task, int32_t count) {
        auto *self = static_cast<Loops *>(user);
        ++self->calls;
        for (int32_t i = count - 1; i >= 0; --i) {
            if (self->fault == Fault::thrown && i == count / 2) throw std::runtime_error("the host's own");
            if (self->fault == Fault::skip && i == count / 2) continue;
            if (self->fault == Fault::first_only && i != 0) continue;
            task_fn(task, i);
            if (self->fault == Fault::twice) task_fn(task, i);
        }
        return self->fault == Fault::error ? 5 : 0;
    }
};

} // namespace

TEST_CASE("parallel_for: a host that fails, throws, skips or repeats work spoils nothing (hooks.h, G11)") {
    Loops loops;
    skerry_context_desc context_desc = make<skerry_context_desc>();
    context_desc.parallel_for = Loops::run;
    context_desc.parallel_user = &loops;
    const Context hosted = make_context(&context_desc);
    const Context alone = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(2, 4, 8, 32, 32));
    setup.budget.bytes = 3 * minimum_bytes(alone.get(), setup);
    const Cache cache = make_cache(hosted.get(), setup);
    const Cache reference = make_cache(alone.get(), setup);
    Runner runner(cache.get(), setup.layers), expected(reference.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(3), 0}, twin{make_seq(reference.get()), History(3), 0};
    grow(runner, stream, 200);
    grow(expected, twin, 200);
    CHECK(loops.calls > 0);
    const int before_faults = loops.calls;
    int refusals = 0;
    for (int round = 0; round < 12; ++round) {
        for (Loops::Fault fault : {Loops::Fault::error, Loops::Fault::skip, Loops::Fault::first_only, Loops::Fault::twice,
                                   Loops::Fault::thrown}) {
            CAPTURE(round);
            CAPTURE(static_cast<int>(fault));
            loops.fault = fault;
            const uint64_t before = fingerprint_of(cache.get(), stream.seq);
            StepOptions look;
            look.commit = false;
            const skerry_status status = runner.step({stream.next(5)}, look);
            loops.fault = Loops::Fault::none;
            if (status < 0) {
                ++refusals;
                CHECK(status == SKERRY_ERROR_INTERNAL);
                CHECK(runner.error.subject == SKERRY_SUBJECT_PARALLEL_FOR);
                CHECK(runner.error.message[0] != 0);
            } else {
                skerry_step_abort(runner.open);
            }
            CHECK(fingerprint_of(cache.get(), stream.seq) == before);
            check_cache(cache.get());
        }
        grow(runner, stream, 5);
        grow(expected, twin, 5);
        CHECK(runner.outs == expected.outs);
        CHECK(runner.lses == expected.lses);
        CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(reference.get(), twin.seq));
    }
    CHECK(loops.calls > before_faults);
    CHECK(refusals >= 12 * 3); // an error, a skipped piece and an exception are always noticed
}

TEST_CASE("parallel_for: a call that failed may be made again within the same step") {
    Loops loops;
    skerry_context_desc context_desc = make<skerry_context_desc>();
    context_desc.parallel_for = Loops::run;
    context_desc.parallel_user = &loops;
    const Context hosted = make_context(&context_desc);
    const Context alone = make_context();
    Setup setup = small_setup(SKERRY_POLICY_QEVICT, layers_of(1, 4, 8, 32, 32));
    setup.budget.bytes = 3 * minimum_bytes(alone.get(), setup);
    const Cache cache = make_cache(hosted.get(), setup);
    const Cache reference = make_cache(alone.get(), setup);
    Runner runner(cache.get(), setup.layers), expected(reference.get(), setup.layers);
    Stream stream{make_seq(cache.get()), History(3), 0}, twin{make_seq(reference.get()), History(3), 0};
    grow(runner, stream, 150);
    grow(expected, twin, 150);
    // A step across several periods, so that windows move inside attend.
    StepOptions open;
    open.attend = false;
    open.commit = false;
    grow(runner, stream, 30, open);
    std::vector<float> out(30 * 8 * 32, 7.0f);
    const skerry_tensor queries = tensor(runner.queries(0).data(), SKERRY_DTYPE_F32, {30, 8, 32});
    const skerry_tensor out_tensor = tensor(out.data(), SKERRY_DTYPE_F32, {30, 8, 32});
    skerry_attend_desc desc = make<skerry_attend_desc>();
    desc.queries = &queries;
    desc.out = &out_tensor;
    loops.fault = Loops::Fault::error;
    refused([&](E e) { return skerry_step_attend(runner.open, &desc, e); }, SKERRY_ERROR_INTERNAL, {SKERRY_SUBJECT_PARALLEL_FOR});
    for (float x : out)
        REQUIRE(x == 7.0f);
    loops.fault = Loops::Fault::none;
    skerry_error detail = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_step_attend(runner.open, &desc, &detail) == SKERRY_OK, detail.message);
    REQUIRE_MESSAGE(skerry_step_commit(runner.open, &detail) == SKERRY_OK, detail.message);
    grow(expected, twin, 30);
    CHECK(out == expected.outs[0]);
    CHECK(fingerprint_of(cache.get(), stream.seq) == fingerprint_of(reference.get(), twin.seq));
}
