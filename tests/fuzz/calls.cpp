// Bytes as a program of calls, right and wrong ones mixed, on one small cache. What may never happen: a crash, an invariant
// that skerry_cache_check finds broken, a failed call that changes a sequence, an output that is not finite, bytes above the
// budget, or memory that does not come back. The same bytes make the same calls, with and without failing allocations.
// Holds G1, G8, G11, G18, G20.

#include "calls.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <skerry/skerry.h>
#include <vector>

FuzzTally fuzz_tally;

namespace {

void require(bool fine, const char *what, const char *detail = "") {
    if (fine) return;
    std::fprintf(stderr, "broken: %s %s\n", what, detail);
    std::abort();
}

template <class T>
T make() {
    T made{};
    made.struct_size = static_cast<uint32_t>(sizeof(T));
    return made;
}

class Input {
public:
    Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}
    bool done() const { return at_ >= size_; }
    uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
    uint32_t word() {
        uint32_t value = 0;
        for (int i = 0; i < 4; ++i)
            value = value << 8 | byte();
        return value;
    }
    int32_t below(int32_t n) { return byte() % n; }
    bool one_in(int32_t n) { return below(n) == n - 1; }
    // A number that is mostly in range.
    int32_t number(int32_t low, int32_t high) {
        static const int32_t odd[] = {0,   -1,   -2,    1,     3,         127,       128,           129,
                                      256, 4096, 65535, 65536, INT32_MAX, INT32_MIN, INT32_MAX - 1, 1 << 24};
        if (one_in(oddness)) return odd[below(16)];
        return low + static_cast<int32_t>(byte()) % (high - low + 1);
    }
    float value(bool odd = true) {
        const float x = odd ? any_value() : (static_cast<float>(byte()) - 128.0f) / 40.0f;
        // Squares of what is larger overflow a float: attention over such numbers has no meaning to be checked.
        wild = wild || (std::isfinite(x) && std::fabs(x) > 1e15f);
        return x;
    }
    bool wild = false;
    int32_t oddness = 200; // one in so many numbers is from the list of edges

private:
    float any_value() {
        const uint8_t kind = byte();
        if (kind < 224) return (static_cast<float>(kind) - 112.0f) / 40.0f;
        static const float odd[] = {0.0f, -0.0f, 1e-30f, -1e-8f, 6e4f, -65504.0f, 1e30f, -3e38f};
        if (kind < 252) return odd[kind % 8];
        if (kind == 252) return NAN;
        if (kind == 253) return INFINITY;
        const uint32_t bits = word();
        float any;
        std::memcpy(&any, &bits, 4);
        return any;
    }

    const uint8_t *data_;
    size_t size_;
    size_t at_ = 0;
};

// Counts, and has no more than a phone would give.
struct Host {
    static constexpr size_t most = size_t(48) << 20;
    size_t live = 0, objects = 0;
    int64_t left = -1;

    static void *alloc(void *user, size_t size, size_t alignment) {
        auto *self = static_cast<Host *>(user);
        if (self->left == 0 || size > most || self->live + size > most) return nullptr;
        if (self->left > 0) --self->left;
        void *memory = ::operator new(size, std::align_val_t(alignment), std::nothrow);
        if (memory == nullptr) return nullptr;
        std::memset(memory, 0xa5, size);
        self->live += size;
        ++self->objects;
        return memory;
    }
    static void release(void *user, void *memory, size_t size, size_t alignment) {
        auto *self = static_cast<Host *>(user);
        require(self->live >= size && self->objects > 0, "released more than was allocated");
        self->live -= size;
        --self->objects;
        ::operator delete(memory, std::align_val_t(alignment));
    }
};

struct Program {
    Input in;
    Host host;
    skerry_context *context = nullptr;
    skerry_cache *cache = nullptr;
    skerry_step *step = nullptr;
    skerry_error error = make<skerry_error>();
    std::vector<skerry_layer_desc> layers;
    std::vector<skerry_seq> seqs;
    std::vector<int32_t> step_counts;
    int32_t step_rows = 0;
    uint32_t appended = 0; // layers of the open step
    std::vector<float> a, b, c;

    explicit Program(const uint8_t *data, size_t size) : in(data, size) {}

    void check() {
        if (cache == nullptr) return;
        const skerry_status status = skerry_cache_check(cache, &error);
        require(status == SKERRY_OK, "check:", error.message);
        skerry_memory_info memory = make<skerry_memory_info>();
        require(skerry_cache_get_memory(cache, &memory, nullptr) == SKERRY_OK, "memory");
        require(memory.budget_bytes == UINT64_MAX || memory.pool_bytes + memory.table_bytes <= memory.budget_bytes, "budget");
        require(memory.allocated_bytes <= host.live, "more reported than allocated");
    }

    std::vector<uint64_t> fingerprints() {
        std::vector<uint64_t> all;
        for (skerry_seq seq : seqs) {
            uint64_t value = 0;
            require(skerry_seq_fingerprint(cache, seq, &value, &error) == SKERRY_OK, "fingerprint:", error.message);
            all.push_back(value);
        }
        return all;
    }

    // Runs a call; when it fails, nothing may have changed and the reason is there.
    template <class Call>
    skerry_status call(Call &&what) {
        const bool starve = in.one_in(12);
        const std::vector<uint64_t> before = fingerprints();
        error = make<skerry_error>();
        host.left = starve ? in.below(6) : -1;
        const skerry_status status = what();
        host.left = -1;
        require(skerry_status_name(status)[0] == 'S', "status");
        ++fuzz_tally.calls;
        if (status >= 0) ++fuzz_tally.succeeded;
        if (status == SKERRY_ERROR_OUT_OF_MEMORY) ++fuzz_tally.starved;
        if (status < 0) {
            require(error.status == status && error.message[0] != 0, "a failure without a reason");
            require(status != SKERRY_ERROR_INTERNAL, "internal:", error.message);
            require(fingerprints() == before, "a failed call changed a sequence:", error.message);
        }
        check();
        return status;
    }

    skerry_tensor tensor(std::vector<float> &to, int64_t rows, int64_t heads, int64_t dim, bool fill) {
        to.assign(static_cast<size_t>(rows * heads * dim), 0);
        if (fill) {
            const bool odd = in.one_in(6);
            for (float &x : to)
                x = in.value(odd);
        }
        skerry_tensor t{};
        t.data = to.data();
        t.dtype = SKERRY_DTYPE_F32;
        t.rank = 3;
        t.shape[0] = rows;
        t.shape[1] = heads;
        t.shape[2] = dim;
        t.stride[0] = heads * dim;
        t.stride[1] = dim;
        t.stride[2] = 1;
        // What is refused before any number is read.
        if (in.one_in(20)) t.rank = in.number(0, 5);
        if (in.one_in(20)) t.shape[in.below(3)] += in.number(-2, 2);
        if (in.one_in(20)) t.dtype = in.number(4, 9);
        if (in.one_in(30)) t.device_type = in.number(1, 3);
        return t;
    }

    bool create() {
        skerry_context_desc context_desc = make<skerry_context_desc>();
        context_desc.allocator = {&host, &Host::alloc, &Host::release};
        context_desc.cpu_disable = in.one_in(2) ? UINT32_MAX : 0;
        context_desc.transfer_threads = in.one_in(6) ? 1 : 0;
        if (skerry_context_create(&context_desc, &context, &error) < 0) return false;
        in.oddness = in.one_in(3) ? 60 : 250;
        const int32_t count = 1 + in.below(3);
        static const float frequencies[16] = {1, .5f, .25f, .125f, .1f, .05f, .02f, .01f, 1, 1, 1, 1, 1, 1, 1, 1};
        skerry_rotary_desc rotary = make<skerry_rotary_desc>();
        rotary.inverse_frequencies = frequencies;
        const bool paper = in.one_in(4);
        for (int32_t i = 0; i < count; ++i) {
            skerry_layer_desc layer = make<skerry_layer_desc>();
            layer.kv_heads = in.number(1, 2);
            layer.query_heads = std::abs(int64_t{layer.kv_heads}) <= 64 ? layer.kv_heads * (1 + in.below(2)) : in.number(1, 4);
            layer.key_dim = paper ? 8 : in.one_in(4) ? in.number(1, 16) : 8;
            layer.value_dim = paper ? 8 : in.one_in(4) ? in.number(1, 16) : 16;
            if (in.one_in(4)) layer.sliding_window = in.number(1, 40);
            if (in.one_in(6)) layer.softcap = in.value();
            if (in.one_in(6)) layer.scale = in.value();
            if (i > 0 && in.one_in(4)) {
                layer = layers[0];
                layer.flags = SKERRY_LAYER_SHARED;
                layer.shared_with = in.number(0, 1);
            }
            if (paper) {
                rotary.dims = 8;
                layer.rotary = &rotary;
            }
            layers.push_back(layer);
        }
        std::vector<const skerry_layer_desc *> pointers;
        for (const skerry_layer_desc &layer : layers)
            pointers.push_back(&layer);
        skerry_policy_desc policy = make<skerry_policy_desc>();
        policy.kind = paper ? int32_t(SKERRY_POLICY_QEVICT) : in.number(0, 5);
        policy.fidelity = paper ? 1 : 0;
        policy.prefill = in.below(2);
        policy.flags = in.one_in(3) ? static_cast<uint32_t>(in.below(8)) : 0u;
        if (!in.one_in(3)) {
            policy.window_tokens = paper ? 4 : in.number(1, 32);
            policy.sink_tokens = in.number(-1, 6);
            policy.recent_tokens = paper ? 8 : in.number(-1, 24);
            policy.period_tokens = paper ? 4 : in.number(1, 20);
            policy.score_queries = std::abs(int64_t{policy.period_tokens}) < 100 ? policy.period_tokens * (1 + in.below(3)) : 8;
        }
        policy.score = in.number(0, 5);
        policy.selection = in.number(0, 2);
        static const skerry_format formats[] = {0, 16, 17, 16, 8, 9, 10, 11};
        policy.key_format = formats[paper ? in.below(3) : in.below(8)];
        policy.value_format = in.one_in(12) ? formats[in.below(8)] : policy.key_format;
        policy.full_format = in.one_in(8) ? formats[in.below(8)] : 0;
        policy.value_group = in.one_in(12) ? in.number(1, 8) : 0;
        policy.quantised_share_ppm = in.one_in(3) ? in.word() % 1000002u : 0;
        policy.hysteresis_ppm = in.one_in(3) ? 1000000 : 0;
        policy.max_moves_ppm = in.one_in(3) ? 1000000 : 0;
        skerry_sekv_desc sekv = make<skerry_sekv_desc>();
        const bool reads_host = policy.kind == SKERRY_POLICY_SEKV;
        if (reads_host) {
            policy.sekv = in.one_in(4) ? nullptr : &sekv;
            if (in.one_in(3)) sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
            sekv.detail_format = in.one_in(3) ? formats[in.below(8)] : 0;
            sekv.fetch_ppm = in.one_in(3) ? in.word() % 1000002u : 0;
            sekv.refine_ppm = in.one_in(3) ? in.word() % 1000002u : 0;
            sekv.hysteresis_ppm = in.one_in(3) ? 1000000u + in.word() % 1000002u : 0;
            sekv.keep_windows = in.number(0, 8);
            sekv.miss = in.number(0, 1);
            if (in.one_in(4)) {
                sekv.detail_error = static_cast<float>(in.number(-1, 100)) / 100.0f;
                if (in.one_in(2)) sekv.flags |= SKERRY_SEKV_SHARED_BASES;
            }
            // Mostly a description that is taken: balanced formats and no exact copies.
            if (!in.one_in(8)) {
                policy.flags &= ~uint32_t{SKERRY_POLICY_KEEP_EXACT};
                if (policy.key_format >= SKERRY_FORMAT_C2) policy.key_format = policy.value_format = 0;
            }
            // And windows that leave within the few tokens that an input has.
            if (!in.one_in(8)) {
                policy.window_tokens = in.number(1, 4);
                policy.sink_tokens = SKERRY_NONE_TOKENS;
                policy.recent_tokens = in.number(-1, 2);
                policy.period_tokens = policy.score_queries = in.number(1, 4);
            }
        } else if (in.one_in(30)) {
            policy.sekv = &sekv;
        }
        skerry_budget_desc budget = make<skerry_budget_desc>();
        budget.length_tokens = paper || reads_host || in.one_in(2) ? 300 : 0;
        if (in.one_in(reads_host ? 4 : 40)) budget.host_bytes = in.word() % 20000;
        if (in.one_in(12)) budget.length_tokens = in.one_in(2) ? int64_t{in.number(1, 255)} << in.below(40) : in.number(0, 255);
        if (in.one_in(2)) budget.exact_bytes = in.word() % 50000;
        if (in.one_in(8)) budget.full_bytes = in.word() % 20000;
        if (in.one_in(8)) budget.quantised_bytes = in.word() % 20000;
        skerry_cache_desc desc = make<skerry_cache_desc>();
        desc.layers = pointers.data();
        desc.layer_count = count;
        desc.policy = &policy;
        desc.budget = &budget;
        desc.store_dtype = in.number(0, 3);
        desc.max_sequences = in.number(1, 4);
        desc.max_step_tokens = in.number(1, 40);
        desc.staging_tokens = in.one_in(2) ? 0 : in.number(40, 200);
        desc.nonfinite = in.below(2);
        if (in.one_in(2)) desc.flags = SKERRY_CACHE_EXACT_ATTEND;
        if (reads_host || !in.one_in(3)) {
            skerry_plan_info info = make<skerry_plan_info>();
            budget.bytes = 1;
            if (skerry_cache_plan(context, &desc, &info, &error) == SKERRY_ERROR_OVER_BUDGET) {
                budget.bytes = info.minimum_bytes + in.word() % 30000;
            } else {
                budget.bytes = 0;
            }
        }
        skerry_plan_info info = make<skerry_plan_info>();
        const skerry_status planned = skerry_cache_plan(context, &desc, &info, nullptr);
        const skerry_status status = skerry_cache_create(context, &desc, &cache, &error);
        require(status == SKERRY_ERROR_OUT_OF_MEMORY || planned == status, "plan and create differ");
        require((status >= 0) == (cache != nullptr), "a handle and a failure");
        return status >= 0;
    }

    const skerry_layer_desc &shape(int32_t layer) const { return layers[static_cast<size_t>(layer)]; }
    static int32_t query_heads(const skerry_layer_desc &layer) { return layer.query_heads == 0 ? layer.kv_heads : layer.query_heads; }
    static int32_t value_dim(const skerry_layer_desc &layer) { return layer.value_dim == 0 ? layer.key_dim : layer.value_dim; }

    skerry_seq any_seq() {
        if (seqs.empty() || in.one_in(16)) return {in.word()};
        return seqs[static_cast<size_t>(in.below(static_cast<int32_t>(seqs.size())))];
    }
    bool live(skerry_seq seq) const {
        return std::any_of(seqs.begin(), seqs.end(), [&](skerry_seq s) { return s.bits == seq.bits; });
    }

    void begin() {
        std::vector<skerry_seq> chosen;
        std::vector<int32_t> counts;
        const int32_t parts = 1 + in.below(2);
        for (int32_t i = 0; i < parts; ++i) {
            const skerry_seq seq = any_seq();
            skerry_seq_info info = make<skerry_seq_info>();
            if (live(seq) && skerry_seq_get_info(cache, seq, &info, nullptr) == SKERRY_OK && info.length_tokens > 300) continue;
            chosen.push_back(seq);
            counts.push_back(in.one_in(2) ? 1 : in.number(1, 30));
        }
        if (chosen.empty()) return;
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = chosen.data();
        desc.token_counts = counts.data();
        desc.seq_count = static_cast<int32_t>(chosen.size());
        desc.flags = in.one_in(4) ? 1u : in.one_in(30) ? 2u : 0u;
        const int64_t position = in.byte();
        std::vector<int64_t> positions(chosen.size(), position);
        if (in.one_in(12)) desc.positions = positions.data();
        skerry_step *made = nullptr;
        if (call([&] { return skerry_step_begin(cache, &desc, &made, &error); }) >= 0) {
            step = made;
            appended = 0;
            step_counts = counts;
            step_rows = 0;
            for (int32_t count : counts)
                step_rows += count;
        } else {
            require(made == nullptr, "a step and a failure");
        }
    }

    void in_step() {
        int32_t layer = in.number(0, static_cast<int32_t>(layers.size()) - 1);
        int32_t action = in.below(10);
        // Mostly in a useful order: what is still missing is appended before anything else.
        for (int32_t i = 0; i < static_cast<int32_t>(layers.size()) && !in.one_in(8); ++i) {
            if ((appended >> i & 1) != 0 || shape(i).flags != 0) continue;
            layer = i;
            action = 0;
            break;
        }
        const skerry_layer_desc &g = shape(std::clamp<int32_t>(layer, 0, static_cast<int32_t>(layers.size()) - 1));
        const int32_t heads = query_heads(g);
        switch (action) {
        case 0: {
            skerry_tensor keys = tensor(a, step_rows, g.kv_heads, g.key_dim, true);
            skerry_tensor values = tensor(b, step_rows, g.kv_heads, value_dim(g), true);
            if (call([&] { return skerry_step_append(step, layer, &keys, &values, nullptr, &error); }) >= 0) appended |= 1u << layer;
            break;
        }
        case 1:
        case 2:
        case 3: {
            skerry_tensor queries = tensor(a, step_rows, heads, g.key_dim, true);
            skerry_tensor out = tensor(b, step_rows, heads, value_dim(g), false);
            skerry_attend_desc desc = make<skerry_attend_desc>();
            desc.queries = &queries;
            desc.out = &out;
            desc.layer = layer;
            desc.flags = static_cast<uint32_t>(in.below(4));
            desc.tiers = in.one_in(4) ? static_cast<uint32_t>(in.below(32)) : 0u;
            if (call([&] { return skerry_step_attend(step, &desc, &error); }) >= 0) {
                for (float x : b)
                    require(in.wild || std::isfinite(x), "an output is not finite");
            }
            break;
        }
        case 4: {
            skerry_gather_desc desc = make<skerry_gather_desc>();
            desc.seq_index = in.number(0, 1);
            desc.layer = layer;
            desc.kv_head = in.number(0, 1);
            desc.tiers = in.one_in(4) ? static_cast<uint32_t>(in.below(32)) : 0u;
            int32_t tokens = 0;
            if (call([&] { return skerry_step_gather(step, &desc, &tokens, &error); }) != SKERRY_OK) break;
            skerry_tensor keys = tensor(a, tokens + 1, 1, g.key_dim, false), values = tensor(b, tokens + 1, 1, value_dim(g), false);
            for (skerry_tensor *t : {&keys, &values}) {
                if (t->rank != 3) continue;
                t->rank = 2;
                t->shape[1] = t->shape[2];
                t->stride[1] = 1;
            }
            desc.keys = &keys;
            desc.values = &values;
            if (call([&] { return skerry_step_gather(step, &desc, &tokens, &error); }) == SKERRY_OK) {
                for (float x : a)
                    require(std::isfinite(x), "a stored key is not finite");
                for (float x : b)
                    require(std::isfinite(x), "a stored value is not finite");
            }
            break;
        }
        case 5: {
            skerry_part parts[64];
            int32_t needed = 0;
            const int32_t seq = in.number(0, 1), head = in.number(0, 1), room = in.number(0, 64);
            (void)call([&] { return skerry_step_view(step, seq, layer, head, 0, parts, std::min(room, 64), &needed, &error); });
            break;
        }
        case 6: {
            skerry_gather_desc gather = make<skerry_gather_desc>();
            skerry_observe_desc desc = make<skerry_observe_desc>();
            desc.seq_index = gather.seq_index = in.number(0, 1);
            desc.layer = gather.layer = layer;
            desc.kv_head = gather.kv_head = in.number(0, 1);
            int32_t tokens = 0;
            if (skerry_step_gather(step, &gather, &tokens, nullptr) != SKERRY_OK) break;
            const size_t rows = static_cast<size_t>(step_counts[static_cast<size_t>(desc.seq_index)]);
            a.assign(rows * static_cast<size_t>(tokens), 0);
            for (float &x : a)
                x = static_cast<float>(in.byte()) / 255.0f;
            if (in.one_in(10) && !a.empty()) a[0] = in.value();
            desc.masses = a.data();
            desc.token_count = in.one_in(12) ? in.number(0, 200) : tokens;
            (void)call([&] { return skerry_step_observe(step, &desc, &error); });
            break;
        }
        case 7: {
            const int64_t parts = static_cast<int64_t>(step_counts.size());
            skerry_tensor queries = tensor(a, in.one_in(8) ? step_rows : parts, heads, g.key_dim, true);
            (void)call([&] { return skerry_step_zoom(step, layer, &queries, nullptr, &error); });
            break;
        }
        default: {
            if (in.one_in(3)) {
                skerry_step_abort(step);
                step = nullptr;
                check();
            } else if (call([&] { return skerry_step_commit(step, &error); }) >= 0) {
                ++fuzz_tally.commits;
                step = nullptr;
            }
            break;
        }
        }
    }

    void outside() {
        switch (in.below(10)) {
        case 0:
        case 1: {
            skerry_seq made{};
            if (call([&] { return skerry_seq_create(cache, &made, &error); }) >= 0) seqs.push_back(made);
            break;
        }
        case 2: {
            const skerry_seq seq = any_seq();
            const bool known = live(seq);
            host.left = in.one_in(8) ? 0 : -1; // dropping needs no memory
            const skerry_status status = skerry_seq_drop(cache, seq, &error);
            host.left = -1;
            if (status == SKERRY_ERROR_STATE && step != nullptr) break; // part of the open step
            require((status == SKERRY_OK) == known, "drop:", error.message);
            seqs.erase(std::remove_if(seqs.begin(), seqs.end(), [&](skerry_seq s) { return s.bits == seq.bits; }), seqs.end());
            check();
            break;
        }
        case 3: {
            skerry_seq made{};
            const skerry_seq seq = any_seq();
            const int64_t length = in.one_in(2) ? -1 : in.number(0, 255);
            if (call([&] { return skerry_seq_fork(cache, seq, length, &made, &error); }) >= 0) seqs.push_back(made);
            break;
        }
        case 4: {
            const skerry_seq seq = any_seq();
            const int64_t length = in.number(0, 255);
            const skerry_status can = skerry_seq_can_truncate(cache, seq, length, 0, nullptr);
            const skerry_status did = call([&] { return skerry_seq_truncate(cache, seq, length, &error); });
            const bool elsewhere = did == SKERRY_ERROR_OUT_OF_MEMORY || did == SKERRY_ERROR_STATE;
            require(elsewhere || (can == SKERRY_OK) == (did == SKERRY_OK), "can_truncate was wrong:", error.message);
            break;
        }
        case 5: {
            skerry_budget_desc budget = make<skerry_budget_desc>();
            budget.bytes = in.word() % 60000;
            budget.length_tokens = in.one_in(8) ? in.number(0, 255) : in.one_in(2) ? 300 : 0;
            if (in.one_in(8)) budget.full_bytes = in.word() % 20000;
            budget.exact_bytes = in.one_in(2) ? in.word() % 50000 : 0;
            if (in.one_in(8)) budget.share_ppm = in.word() % 1200000;
            if (in.one_in(20)) budget.host_bytes = in.word() % 20000;
            (void)call([&] { return skerry_cache_set_budget(cache, &budget, &error); });
            break;
        }
        case 6: {
            skerry_range ranges[16];
            int32_t needed = 0;
            const skerry_seq seq = any_seq();
            const int32_t layer = in.number(0, 2), head = in.number(0, 1), room = std::min(in.number(0, 16), 16);
            (void)call([&] { return skerry_seq_list_ranges(cache, seq, layer, head, ranges, room, &needed, &error); });
            break;
        }
        default:
            begin();
            break;
        }
    }

    void run() {
        ++fuzz_tally.inputs;
        if (create()) {
            ++fuzz_tally.caches;
            check();
            for (int calls = 0; calls < 400 && !in.done(); ++calls) {
                step != nullptr && !in.one_in(16) ? in_step() : outside();
            }
            skerry_counters counters = make<skerry_counters>();
            require(skerry_cache_get_counters(cache, &counters, nullptr) == SKERRY_OK, "counters");
            require(counters.zooms == counters.zooms_present + counters.zooms_fetched + counters.zooms_late, "zooms");
            fuzz_tally.zooms += counters.zooms;
        }
        skerry_cache_release(cache);
        skerry_context_release(context);
        require(host.objects == 0 && host.live == 0, "memory did not come back");
    }
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Program(data, size).run();
    return 0;
}
