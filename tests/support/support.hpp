#pragma once
// What the tests of the C interface share: numbers that depend on their place alone, caches described by value, steps
// run from such numbers, and checks of refused calls. Uses the public headers only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <skerry/skerry.h>
#include <string>
#include <vector>

namespace support {

template <class T>
T make() {
    T made{};
    made.struct_size = static_cast<uint32_t>(sizeof(T));
    return made;
}

// ---- numbers ----

inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

class Rng {
public:
    explicit Rng(uint64_t seed) : state_(mix(seed)) {}
    uint64_t next() { return mix(state_++); }
    int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
    bool one_in(int64_t n) { return below(n) == 0; }

private:
    uint64_t state_;
};

enum class Kind : uint64_t { key = 1, value = 2, query = 3 };

// Numbers of one row: a mean and a size per channel, some channels far larger than others, and noise per position.
inline void fill_row(float *row, uint64_t seed, Kind kind, int layer, int head, int64_t position, int dim) {
    const uint64_t place = mix(static_cast<uint64_t>(kind) * 1000003u + static_cast<uint64_t>(layer) * 4099u + static_cast<uint64_t>(head));
    uint64_t noise = mix(mix(seed) ^ place ^ (static_cast<uint64_t>(position) << 20));
    for (int c = 0; c < dim; ++c) {
        const uint64_t channel = mix(place + static_cast<uint64_t>(c) * 7919u);
        const float mean = kind == Kind::key ? static_cast<float>(channel % 1024) / 1024.0f - 0.5f : 0.0f;
        const float size = kind == Kind::key && channel % 16 == 3 ? 3.0f : 0.8f;
        noise = noise * 6364136223846793005u + 1442695040888963407u;
        // Uniform with variance 1.
        const float unit = (static_cast<float>(noise >> 40) / 16777216.0f - 0.5f) * 3.4641016f;
        row[c] = mean + size * unit;
    }
}

// Which numbers a sequence holds at a position; forks share what lies below.
class History {
public:
    explicit History(uint64_t seed = 1) { pieces_.push_back({0, seed}); }
    uint64_t at(int64_t position) const {
        size_t i = pieces_.size() - 1;
        while (pieces_[i].from > position)
            --i;
        return pieces_[i].seed;
    }
    // From `length` on, numbers come from `seed`.
    void turn(int64_t length, uint64_t seed) {
        while (pieces_.size() > 1 && pieces_.back().from >= length)
            pieces_.pop_back();
        if (length == 0) {
            pieces_[0].seed = seed;
        } else {
            pieces_.push_back({length, seed});
        }
    }

private:
    struct Piece {
        int64_t from;
        uint64_t seed;
    };
    std::vector<Piece> pieces_;
};

// Nearest value of a format with `bits` of significand and smallest normal exponent `low`; ties to even.
inline double round_to(double x, int bits, int low, double largest) {
    if (x == 0 || !std::isfinite(x)) return x;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int unit = std::max(exponent - 1, low) - (bits - 1);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
    return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}
inline float round_as(float x, skerry_dtype dtype) {
    if (dtype == SKERRY_DTYPE_F16) return static_cast<float>(round_to(x, 11, -14, 65504.0));
    if (dtype == SKERRY_DTYPE_BF16) return static_cast<float>(round_to(x, 8, -126, 3.3895313892515355e38));
    return x;
}
inline uint16_t half_bits(float x, skerry_dtype dtype) {
    if (dtype == SKERRY_DTYPE_BF16) {
        const float rounded = round_as(x, dtype);
        uint32_t bits;
        std::memcpy(&bits, &rounded, 4);
        return static_cast<uint16_t>(bits >> 16);
    }
    const float rounded = round_as(x, SKERRY_DTYPE_F16);
    const uint16_t sign = std::signbit(rounded) ? 0x8000 : 0;
    const float magnitude = std::fabs(rounded);
    if (std::isnan(x)) return static_cast<uint16_t>(sign | 0x7e00);
    if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<int>(magnitude * 0x1p24f));
    int exponent = 0;
    const float fraction = std::frexp(magnitude, &exponent); // [0.5, 1)
    return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | (static_cast<int>(fraction * 2048.0f) - 1024));
}
inline float half_value(uint16_t bits, skerry_dtype dtype) {
    if (dtype == SKERRY_DTYPE_BF16) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    float value = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                  : exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                                   : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

// ---- hosts' hooks ----

// Knows every allocation, checks what is released, and fails at the n-th request when told to.
class Allocator {
public:
    struct Live {
        size_t size;
        size_t alignment;
    };
    ~Allocator() {
        for (auto &[memory, live] : live_)
            ::operator delete(memory, std::align_val_t(live.alignment));
    }
    skerry_allocator hooks() { return {this, &Allocator::alloc, &Allocator::release}; }
    // The request that comes after `requests` others fails, and all after it.
    void fail_after(int64_t requests) {
        const std::lock_guard<std::mutex> lock(mutex_);
        left_ = requests;
        failed_ = false;
    }
    void fail_never() { fail_after(-1); }
    bool failed() const { return failed_; }
    size_t live_count() const { return live_.size(); }
    uint64_t live_bytes() const { return live_bytes_; }
    uint64_t peak_bytes() const { return peak_bytes_; }
    uint64_t requests() const { return requests_; }
    int mismatches() const { return mismatches_; }

private:
    static void *alloc(void *user, size_t size, size_t alignment) {
        auto *self = static_cast<Allocator *>(user);
        const std::lock_guard<std::mutex> lock(self->mutex_);
        ++self->requests_;
        if (self->left_ == 0) {
            self->failed_ = true;
            return nullptr;
        }
        if (self->left_ > 0) --self->left_;
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) ++self->mismatches_;
        void *memory = ::operator new(size, std::align_val_t(alignment), std::nothrow);
        if (memory == nullptr) return nullptr;
        std::memset(memory, 0xa5, size); // nothing may count on zeroed memory
        self->live_[memory] = {size, alignment};
        self->live_bytes_ += size;
        self->peak_bytes_ = std::max(self->peak_bytes_, self->live_bytes_);
        return memory;
    }
    static void release(void *user, void *memory, size_t size, size_t alignment) {
        auto *self = static_cast<Allocator *>(user);
        const std::lock_guard<std::mutex> lock(self->mutex_);
        const auto found = self->live_.find(memory);
        if (found == self->live_.end() || found->second.size != size || found->second.alignment != alignment) {
            ++self->mismatches_;
            return;
        }
        std::memset(memory, 0xdd, size);
        self->live_bytes_ -= size;
        self->live_.erase(found);
        ::operator delete(memory, std::align_val_t(alignment));
    }

    std::mutex mutex_;
    std::map<void *, Live> live_;
    uint64_t live_bytes_ = 0, peak_bytes_ = 0, requests_ = 0;
    int64_t left_ = -1;
    int mismatches_ = 0;
    bool failed_ = false;
};

struct ContextRelease {
    void operator()(skerry_context *context) const { skerry_context_release(context); }
};
struct CacheRelease {
    void operator()(skerry_cache *cache) const { skerry_cache_release(cache); }
};
using Context = std::unique_ptr<skerry_context, ContextRelease>;
using Cache = std::unique_ptr<skerry_cache, CacheRelease>;

inline Context make_context(const skerry_context_desc *desc = nullptr) {
    skerry_context *context = nullptr;
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_context_create(desc, &context, &error);
    REQUIRE_MESSAGE(status == SKERRY_OK, error.message);
    return Context(context);
}
inline Context make_context(uint32_t workers, uint32_t cpu_disable = 0) {
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.worker_count = workers;
    desc.cpu_disable = cpu_disable;
    return make_context(&desc);
}

// ---- caches ----

struct Layer {
    int kv_heads = 1;
    int query_heads = 1;
    int key_dim = 8;
    int value_dim = 8;
    int window = 0;
    int shared_with = -1;
    float scale = 0;
    float softcap = 0;
    int rotary_dims = 0;

    int group() const { return query_heads / kv_heads; }
    double logit_scale() const { return scale != 0 ? static_cast<double>(scale) : 1.0 / std::sqrt(double(key_dim)); }
};

inline std::vector<Layer> layers_of(int count, int kv_heads, int query_heads, int key_dim, int value_dim) {
    Layer layer;
    layer.kv_heads = kv_heads;
    layer.query_heads = query_heads;
    layer.key_dim = key_dim;
    layer.value_dim = value_dim;
    return std::vector<Layer>(static_cast<size_t>(count), layer);
}

// A cache description by value; desc() links it. Copies may be changed freely.
struct Setup {
    std::vector<Layer> layers;
    skerry_policy_desc policy = make<skerry_policy_desc>();
    skerry_sekv_desc sekv = make<skerry_sekv_desc>(); // of kind SEKV alone
    skerry_budget_desc budget = make<skerry_budget_desc>();
    skerry_callbacks_desc callbacks = make<skerry_callbacks_desc>();
    skerry_cache_desc cache = make<skerry_cache_desc>();

    const skerry_cache_desc *desc() {
        layer_descs_.assign(layers.size(), make<skerry_layer_desc>());
        rotary_descs_.assign(layers.size(), make<skerry_rotary_desc>());
        frequencies_.assign(layers.size(), {});
        pointers_.clear();
        for (size_t i = 0; i < layers.size(); ++i) {
            const Layer &from = layers[i];
            skerry_layer_desc &to = layer_descs_[i];
            to.kv_heads = from.kv_heads;
            to.query_heads = from.query_heads;
            to.key_dim = from.key_dim;
            to.value_dim = from.value_dim;
            to.sliding_window = from.window;
            to.scale = from.scale;
            to.softcap = from.softcap;
            if (from.shared_with >= 0) {
                to.flags = SKERRY_LAYER_SHARED;
                to.shared_with = from.shared_with;
            }
            if (from.rotary_dims > 0) {
                for (int c = 0; c < from.rotary_dims / 2; ++c) {
                    frequencies_[i].push_back(std::pow(10000.0f, -2.0f * float(c) / float(from.rotary_dims)));
                }
                rotary_descs_[i].dims = from.rotary_dims;
                rotary_descs_[i].inverse_frequencies = frequencies_[i].data();
                to.rotary = &rotary_descs_[i];
            }
            pointers_.push_back(&to);
        }
        cache.layers = pointers_.data();
        cache.layer_count = static_cast<int32_t>(layers.size());
        policy.sekv = policy.kind == SKERRY_POLICY_SEKV ? &sekv : nullptr;
        cache.policy = &policy;
        cache.budget = &budget;
        cache.callbacks = &callbacks;
        return &cache;
    }

private:
    std::vector<skerry_layer_desc> layer_descs_;
    std::vector<skerry_rotary_desc> rotary_descs_;
    std::vector<std::vector<float>> frequencies_;
    std::vector<const skerry_layer_desc *> pointers_;
};

inline Cache make_cache(skerry_context *context, Setup &setup) {
    skerry_cache *cache = nullptr;
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_cache_create(context, setup.desc(), &cache, &error);
    REQUIRE_MESSAGE(status == SKERRY_OK, error.message);
    return Cache(cache);
}

// The plan; a budget below the floor fills it as well.
inline skerry_plan_info plan_of(skerry_context *context, Setup &setup) {
    skerry_plan_info info = make<skerry_plan_info>();
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_cache_plan(context, setup.desc(), &info, &error);
    const bool planned = status == SKERRY_OK || status == SKERRY_ERROR_OVER_BUDGET;
    REQUIRE_MESSAGE(planned, error.message);
    return info;
}

inline uint64_t minimum_bytes(skerry_context *context, Setup setup) {
    setup.budget.bytes = 1;
    setup.budget.share_ppm = 0;
    return plan_of(context, setup).minimum_bytes;
}

// Of the budget's length; also where a plan without a budget would be refused.
inline uint64_t full_cache_bytes(skerry_context *context, Setup setup) {
    setup.budget.bytes = 1;
    setup.budget.share_ppm = 0;
    return plan_of(context, setup).full_cache_bytes;
}

// Small windows so that a few dozen tokens reach every tier.
inline Setup small_setup(skerry_policy_kind kind, std::vector<Layer> layers) {
    Setup setup;
    setup.layers = std::move(layers);
    setup.policy.kind = kind;
    setup.cache.store_dtype = SKERRY_DTYPE_F32;
    if (kind != SKERRY_POLICY_FULL) {
        setup.policy.window_tokens = 4;
        setup.policy.sink_tokens = 2;
        setup.policy.recent_tokens = 4;
        setup.policy.period_tokens = 4;
        if (kind != SKERRY_POLICY_STREAMING) setup.policy.score_queries = 8;
    }
    return setup;
}

inline skerry_seq make_seq(skerry_cache *cache) {
    skerry_seq seq{};
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_seq_create(cache, &seq, &error);
    REQUIRE_MESSAGE(status == SKERRY_OK, error.message);
    return seq;
}

inline skerry_memory_info memory_of(skerry_cache *cache) {
    skerry_memory_info info = make<skerry_memory_info>();
    REQUIRE(skerry_cache_get_memory(cache, &info, nullptr) == SKERRY_OK);
    return info;
}
inline skerry_counters counters_of(skerry_cache *cache) {
    skerry_counters info = make<skerry_counters>();
    REQUIRE(skerry_cache_get_counters(cache, &info, nullptr) == SKERRY_OK);
    return info;
}
inline skerry_seq_info info_of(skerry_cache *cache, skerry_seq seq) {
    skerry_seq_info info = make<skerry_seq_info>();
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_seq_get_info(cache, seq, &info, &error) == SKERRY_OK, error.message);
    return info;
}
inline uint64_t fingerprint_of(skerry_cache *cache, skerry_seq seq) {
    uint64_t value = 0;
    skerry_error error = make<skerry_error>();
    REQUIRE_MESSAGE(skerry_seq_fingerprint(cache, seq, &value, &error) == SKERRY_OK, error.message);
    return value;
}
inline std::vector<skerry_range> ranges_of(skerry_cache *cache, skerry_seq seq, int layer, int head) {
    int32_t needed = 0;
    skerry_error error = make<skerry_error>();
    std::vector<skerry_range> ranges(8);
    for (;;) {
        const skerry_status status =
            skerry_seq_list_ranges(cache, seq, layer, head, ranges.data(), static_cast<int32_t>(ranges.size()), &needed, &error);
        REQUIRE_MESSAGE(status >= 0, error.message);
        const bool fits = static_cast<size_t>(needed) <= ranges.size();
        REQUIRE(fits == (status == SKERRY_OK));
        ranges.resize(static_cast<size_t>(needed));
        if (fits) return ranges;
    }
}
inline void check_cache(skerry_cache *cache) {
    skerry_error error = make<skerry_error>();
    const skerry_status status = skerry_cache_check(cache, &error);
    CHECK_MESSAGE(status == SKERRY_OK, error.message);
}

// ---- tensors ----

inline skerry_tensor tensor(const void *data, skerry_dtype dtype, std::initializer_list<int64_t> shape) {
    skerry_tensor made{};
    made.data = const_cast<void *>(data);
    made.dtype = dtype;
    made.rank = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), made.shape);
    int64_t stride = 1;
    for (int i = made.rank - 1; i >= 0; --i) {
        made.stride[i] = stride;
        stride *= made.shape[i];
    }
    return made;
}

// Numbers in one of the three types, with the tensor over them.
class Numbers {
public:
    void assign(const std::vector<float> &values, skerry_dtype dtype) {
        dtype_ = dtype;
        if (dtype == SKERRY_DTYPE_F32) {
            wide_ = values;
            return;
        }
        half_.resize(values.size());
        for (size_t i = 0; i < values.size(); ++i)
            half_[i] = half_bits(values[i], dtype);
    }
    void resize(size_t count, skerry_dtype dtype) {
        dtype_ = dtype;
        if (dtype == SKERRY_DTYPE_F32) {
            wide_.assign(count, 0);
        } else {
            half_.assign(count, 0);
        }
    }
    float operator[](size_t i) const { return dtype_ == SKERRY_DTYPE_F32 ? wide_[i] : half_value(half_[i], dtype_); }
    skerry_tensor tensor(std::initializer_list<int64_t> shape) {
        void *data = dtype_ == SKERRY_DTYPE_F32 ? static_cast<void *>(wide_.data()) : half_.data();
        return support::tensor(data, dtype_, shape);
    }

private:
    std::vector<float> wide_;
    std::vector<uint16_t> half_;
    skerry_dtype dtype_ = SKERRY_DTYPE_F32;
};

// ---- steps ----

struct Part {
    skerry_seq seq;
    const History *history;
    int64_t begin;
    int32_t count;
};

struct StepOptions {
    uint32_t flags = 0;
    uint32_t attend_flags = 0;
    skerry_dtype dtype = SKERRY_DTYPE_F32; // of keys, values and queries
    skerry_dtype out_dtype = SKERRY_DTYPE_F32;
    bool attend = true;
    bool commit = true;
    const float *sink_logits = nullptr; // [query_heads] for every layer
    // Row, kind, layer, head, position, dim: makes another row of the one that the history gives.
    std::function<void(float *, Kind, int, int, int64_t, int)> change_row;
    std::function<void(skerry_step *, int)> before_attend; // step, layer
    std::function<void(skerry_step *, int)> after_attend;
};

// Runs steps whose numbers come from histories, and keeps the last outputs per layer.
class Runner {
public:
    Runner(skerry_cache *cache, std::vector<Layer> layers) : error(make<skerry_error>()), cache_(cache), layers_(std::move(layers)) {
        outs.resize(layers_.size());
        lses.resize(layers_.size());
    }

    // Status of the first call that failed (the step is then aborted), or of the commit.
    skerry_status step(const std::vector<Part> &parts, const StepOptions &options = {}) {
        std::vector<skerry_seq> seqs;
        std::vector<int32_t> counts;
        std::vector<int64_t> positions;
        int64_t tokens = 0;
        for (const Part &part : parts) {
            seqs.push_back(part.seq);
            counts.push_back(part.count);
            positions.push_back(part.begin);
            tokens += part.count;
        }
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.flags = options.flags;
        desc.seqs = seqs.data();
        desc.token_counts = counts.data();
        desc.positions = positions.data();
        desc.seq_count = static_cast<int32_t>(seqs.size());
        skerry_step *step = nullptr;
        skerry_status status = skerry_step_begin(cache_, &desc, &step, &error);
        if (status < 0) return status;
        open = step;
        for (int layer = 0; layer < static_cast<int>(layers_.size()) && status >= 0; ++layer) {
            status = run_layer(step, layer, parts, tokens, options);
        }
        if (status < 0) {
            skerry_step_abort(step);
            open = nullptr;
            return status;
        }
        if (!options.commit) return status;
        status = skerry_step_commit(step, &error);
        if (status < 0) skerry_step_abort(step);
        open = nullptr;
        return status;
    }

    // Queries of the last step's layer as the library saw them, [tokens][query_heads][key_dim].
    const std::vector<float> &queries(int layer) const { return seen_queries_.at(static_cast<size_t>(layer)); }
    const std::vector<Layer> &layers() const { return layers_; }
    skerry_cache *cache() const { return cache_; }

    std::vector<std::vector<float>> outs; // per layer, [tokens][query_heads][value_dim]
    std::vector<std::vector<float>> lses; // per layer, [tokens][query_heads]
    skerry_error error;
    skerry_step *open = nullptr; // after a step that was not committed

private:
    static void rows(std::vector<float> &to, const std::vector<Part> &parts, Kind kind, int layer, int heads, int dim, int64_t tokens,
                     const StepOptions &options) {
        to.resize(static_cast<size_t>(tokens * heads * dim));
        float *row = to.data();
        for (const Part &part : parts) {
            for (int64_t p = part.begin; p < part.begin + part.count; ++p) {
                const uint64_t seed = part.history->at(p);
                for (int head = 0; head < heads; ++head, row += dim) {
                    fill_row(row, seed, kind, layer, head, p, dim);
                    if (options.change_row) options.change_row(row, kind, layer, head, p, dim);
                }
            }
        }
    }

    skerry_status run_layer(skerry_step *step, int layer, const std::vector<Part> &parts, int64_t tokens, const StepOptions &options) {
        const Layer &shape = layers_[static_cast<size_t>(layer)];
        if (shape.shared_with < 0) {
            rows(buffer_, parts, Kind::key, layer, shape.kv_heads, shape.key_dim, tokens, options);
            keys_.assign(buffer_, options.dtype);
            rows(buffer_, parts, Kind::value, layer, shape.kv_heads, shape.value_dim, tokens, options);
            values_.assign(buffer_, options.dtype);
            const skerry_tensor keys = keys_.tensor({tokens, shape.kv_heads, shape.key_dim});
            const skerry_tensor values = values_.tensor({tokens, shape.kv_heads, shape.value_dim});
            const skerry_status status = skerry_step_append(step, layer, &keys, &values, nullptr, &error);
            if (status < 0) return status;
        }
        seen_queries_.resize(layers_.size());
        std::vector<float> &seen = seen_queries_[static_cast<size_t>(layer)];
        rows(seen, parts, Kind::query, layer, shape.query_heads, shape.key_dim, tokens, options);
        queries_.assign(seen, options.dtype);
        for (size_t i = 0; i < seen.size(); ++i)
            seen[i] = queries_[i];
        if (options.before_attend) options.before_attend(step, layer);
        if (options.attend) {
            const skerry_tensor queries = queries_.tensor({tokens, shape.query_heads, shape.key_dim});
            out_.resize(static_cast<size_t>(tokens * shape.query_heads * shape.value_dim), options.out_dtype);
            std::vector<float> &lse = lses[static_cast<size_t>(layer)];
            lse.assign(static_cast<size_t>(tokens * shape.query_heads), 0);
            const skerry_tensor out = out_.tensor({tokens, shape.query_heads, shape.value_dim});
            const skerry_tensor lse_tensor = tensor(lse.data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads});
            skerry_attend_desc desc = make<skerry_attend_desc>();
            desc.flags = options.attend_flags;
            desc.queries = &queries;
            desc.out = &out;
            desc.lse = &lse_tensor;
            desc.sink_logits = options.sink_logits;
            desc.layer = layer;
            const skerry_status status = skerry_step_attend(step, &desc, &error);
            if (status < 0) return status;
            std::vector<float> &kept = outs[static_cast<size_t>(layer)];
            kept.resize(static_cast<size_t>(tokens * shape.query_heads * shape.value_dim));
            for (size_t i = 0; i < kept.size(); ++i)
                kept[i] = out_[i];
        }
        if (options.after_attend) options.after_attend(step, layer);
        return SKERRY_OK;
    }

    skerry_cache *cache_;
    std::vector<Layer> layers_;
    std::vector<float> buffer_;
    std::vector<std::vector<float>> seen_queries_;
    Numbers keys_, values_, queries_, out_;
};

// One sequence that grows by whole steps.
struct Stream {
    skerry_seq seq{};
    History history;
    int64_t length = 0;

    Part next(int32_t count) const { return {seq, &history, length, count}; }
};

inline void grow(Runner &runner, Stream &stream, int32_t count, const StepOptions &options = {}) {
    const skerry_status status = runner.step({stream.next(count)}, options);
    REQUIRE_MESSAGE(status >= 0, runner.error.message);
    if (options.commit) stream.length += count;
}
// Single tokens, like decoding.
inline void decode(Runner &runner, Stream &stream, int32_t count, const StepOptions &options = {}) {
    for (int32_t i = 0; i < count; ++i)
        grow(runner, stream, 1, options);
}

// ---- refused calls ----

struct State {
    skerry_memory_info memory{};
    skerry_counters counters{};
    std::vector<uint64_t> fingerprints;
    std::vector<skerry_seq_info> infos;
};

inline State state_of(skerry_cache *cache, const std::vector<skerry_seq> &seqs) {
    State state;
    state.memory = memory_of(cache);
    state.counters = counters_of(cache);
    for (skerry_seq seq : seqs) {
        state.fingerprints.push_back(fingerprint_of(cache, seq));
        state.infos.push_back(info_of(cache, seq));
    }
    return state;
}

inline bool same_bytes(const void *a, const void *b, size_t size) { return std::memcmp(a, b, size) == 0; }

// The structs have no padding, so bytes are fields. Peaks and counts of steps may be left out by the caller.
inline void check_same(const State &before, const State &after) {
    CHECK(before.fingerprints == after.fingerprints);
    CHECK(before.memory.allocated_bytes == after.memory.allocated_bytes);
    CHECK(before.memory.used_bytes == after.memory.used_bytes);
    CHECK(same_bytes(&before.memory, &after.memory, sizeof(before.memory)));
    CHECK(same_bytes(&before.counters, &after.counters, sizeof(before.counters)));
    REQUIRE(before.infos.size() == after.infos.size());
    for (size_t i = 0; i < before.infos.size(); ++i) {
        CHECK(same_bytes(&before.infos[i], &after.infos[i], sizeof(before.infos[i])));
    }
}

using Call = std::function<skerry_status(skerry_error *)>;

// Runs a call that must fail, with and without somewhere to put the reason.
inline skerry_error refused(const Call &call, skerry_status status, std::initializer_list<uint32_t> subjects) {
    skerry_error error = make<skerry_error>();
    std::memset(error.message, 1, sizeof(error.message));
    const skerry_status got = call(&error);
    const std::string name = skerry_status_name(got);
    INFO("status ", name, ", wanted ", std::string(skerry_status_name(status)));
    error.message[sizeof(error.message) - 1] = 0;
    INFO("subject ", error.subject, ", message: ", std::string(error.message));
    CHECK(got == status);
    if (got >= 0) return error;
    CHECK(error.status == got);
    CHECK(error.struct_size == sizeof(skerry_error));
    CHECK(std::find(subjects.begin(), subjects.end(), error.subject) != subjects.end());
    CHECK(error.message[0] > 1);
    CHECK(std::strchr(error.message, '\n') == nullptr);
    CHECK(call(nullptr) == status);
    return error;
}

// The same for a cache whose state must not notice. Numbers: "On failure nothing happened" (base.h), G11.
struct Guard {
    skerry_cache *cache;
    std::vector<skerry_seq> seqs;

    skerry_error refused(const Call &call, skerry_status status, std::initializer_list<uint32_t> subjects) const {
        const State before = state_of(cache, seqs);
        const skerry_error error = support::refused(call, status, subjects);
        check_same(before, state_of(cache, seqs));
        check_cache(cache);
        return error;
    }
};

} // namespace support
