#pragma once

// A trained router: weights in f32 that were checked as a whole when they were read (io/router_file.hpp). docs/router-files.md is the
// format.

#include <skerry/router.h>

#include <atomic>

#include "base/alloc.hpp"
#include "model/geometry.hpp"

namespace skerry {

// sekv.md 2.3: width of the gate network's hidden layers, fixed by the published checkpoints.
inline constexpr int32_t router_gate_hidden = 64;

// Weights are rows of outputs, row-major.
struct RouterGates {
    const float *weight[3] = {}; // [64, rank_max + key_dim], [64, 64], [rank_max, 64]
    const float *bias[3] = {};   // [64], [64], [rank_max]
};

// Not changed once it was read, so any number of threads may use it.
struct RouterWeights {
    explicit RouterWeights(Allocator &allocator) noexcept : values(allocator, Owner::context, 64) {}

    char model[sizeof(skerry_router_info::model)] = {};
    skerry_router_form form = 0;
    skerry_router_pooling pooling = 0;
    int32_t layers = 0;
    int32_t query_heads = 0;
    int32_t kv_heads = 0;
    int32_t key_dim = 0;
    int32_t summary_dim = 0;
    int32_t rank_max = 0;
    int32_t centroids = 0;
    bool normalise = false;   // projected keys have length 1
    bool shared_keys = false; // key_matrix is the same for the query heads of a KV head
    int64_t step = 0;

    Buffer<float> values;               // all tensors, one after another; the pointers below lie in it, or are NULL
    const float *w = nullptr;           // [layers, query_heads, summary_dim, key_dim]
    const float *w_key = nullptr;       // [layers, kv_heads, summary_dim, key_dim]
    const float *tau = nullptr;         // [layers, query_heads]
    const float *bias = nullptr;        // [layers, query_heads]
    const float *temperature = nullptr; // [layers, query_heads], above 0
    RouterGates gates;

    bool has_gates() const noexcept { return gates.weight[0] != nullptr; }
    uint32_t flags() const noexcept;
    // Sets of projected keys per KV head: one that the group shares, or one per query head.
    int32_t sets() const noexcept { return shared_keys ? 1 : query_heads / kv_heads; }
    // [summary_dim][key_dim]
    const float *query_matrix(int32_t layer, int32_t query_head) const noexcept { return matrix(w, query_heads, layer, query_head); }
    // What projects the keys that `query_head` is scored against.
    const float *key_matrix(int32_t layer, int32_t query_head) const noexcept {
        const int32_t group = query_heads / kv_heads;
        if (w_key != nullptr) return matrix(w_key, kv_heads, layer, query_head / group);
        return matrix(w, query_heads, layer, shared_keys ? query_head / group * group : query_head);
    }
    float tau_of(int32_t layer, int32_t query_head) const noexcept { return per_head(tau, layer, query_head, 0); }
    float bias_of(int32_t layer, int32_t query_head) const noexcept { return per_head(bias, layer, query_head, 0); }
    float temperature_of(int32_t layer, int32_t query_head) const noexcept { return per_head(temperature, layer, query_head, 1); }

private:
    const float *matrix(const float *from, int32_t heads, int32_t layer, int32_t head) const noexcept {
        const size_t size = static_cast<size_t>(summary_dim) * static_cast<size_t>(key_dim);
        return from + (static_cast<size_t>(layer) * static_cast<size_t>(heads) + static_cast<size_t>(head)) * size;
    }
    float per_head(const float *from, int32_t layer, int32_t head, float absent) const noexcept {
        if (from == nullptr) return absent;
        return from[static_cast<size_t>(layer) * static_cast<size_t>(query_heads) + static_cast<size_t>(head)];
    }
};

// Was this router made for a model of so many layers, and for this one of them? SKERRY_ERROR_FORMAT names the first number that differs.
Status router_check_layers(const RouterWeights &router, int32_t layers, skerry_error *error);
Status router_check_layer(const RouterWeights &router, int32_t index, const LayerGeometry &layer, skerry_error *error);

} // namespace skerry

// The object behind the handle: weights that many caches may share.
struct skerry_router {
    skerry_router(skerry_context *owner, skerry::Allocator &allocator) noexcept : context(owner), weights(allocator) {}

    std::atomic<uint32_t> references{1};
    skerry_context *context;
    skerry::RouterWeights weights;
};
