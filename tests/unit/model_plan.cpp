// Byte arithmetic of a cache: the plan holds its budget for any geometry, and its numbers are those of hand calculation.

#include <doctest/doctest.h>

#include <vector>

#include "backend/registry.hpp"
#include "model/plan.hpp"

using namespace skerry;

namespace {

struct Described {
    std::vector<skerry_layer_desc> layers;
    std::vector<const skerry_layer_desc *> pointers;
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);

    Described(int count, int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
        for (int i = 0; i < count; ++i) {
            skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
            layer.kv_heads = kv_heads;
            layer.query_heads = kv_heads * 3;
            layer.key_dim = key_dim;
            layer.value_dim = value_dim;
            layers.push_back(layer);
        }
    }
    const skerry_cache_desc &get() {
        pointers.clear();
        for (const skerry_layer_desc &layer : layers) pointers.push_back(&layer);
        desc.layers = pointers.data();
        desc.layer_count = static_cast<int32_t>(layers.size());
        desc.policy = &policy;
        desc.budget = &budget;
        return desc;
    }
};

PlanDevice device() { return {cpu_kernels(0), 3}; }

} // namespace

TEST_CASE("plan: a full cache of SmolLM2 is 23,040 bytes a token (kernels.md 3.1)") {
    Described d(30, 3, 64, 64);
    d.budget.length_tokens = 1000;
    d.budget.bytes = 1u << 30;
    CachePlan plan;
    REQUIRE(make_plan(d.get(), device(), &plan, nullptr) == SKERRY_OK);
    CHECK(plan.info.full_cache_bytes == 23040u * 1000u);
}

TEST_CASE("plan: a record of r3 keys and r2 values is 704 bytes at d 64, a full window 4,096 (kernels.md 2.0)") {
    Described d(1, 1, 64, 64);
    d.policy.kind = SKERRY_POLICY_QEVICT;
    d.budget.length_tokens = 4096;
    d.budget.share_ppm = 200000;
    CachePlan plan;
    REQUIRE(make_plan(d.get(), device(), &plan, nullptr) == SKERRY_OK);
    LayerGeometry layer;
    REQUIRE(read_layer(d.get(), 0, &layer, nullptr) == SKERRY_OK);
    const LaneQuota q = plan.quota(layer);
    CHECK(q.record_slot_bytes == 704);
    CHECK(q.open_slot_bytes == 4096);
    CHECK(q.wide_slot_bytes == 16 * 2 * (64 + 2));
    CHECK(q.sink_slot_bytes == 4 * 2 * 64 * 2);
    // At 20 % of the bytes every window of the history is readable (qevict.md 13).
    CHECK((q.full_windows + q.quantised_windows) * 16 + 36 >= 4096);
}

TEST_CASE("plan: planned bytes never pass the budget, and the minimum is exact, for many descriptions") {
    int planned = 0;
    for (int32_t kind = SKERRY_POLICY_FULL; kind <= SKERRY_POLICY_QEVICT; ++kind) {
        for (int32_t heads : {1, 3}) {
            for (int32_t dim : {8, 64, 128}) {
                for (int32_t window : {1, 4, 16, 40}) {
                    for (int64_t length : {int64_t{0}, int64_t{500}, int64_t{40000}}) {
                        for (uint64_t extra : {0ull, 1ull, 9999ull, 300000ull, 50000000ull}) {
                            for (int32_t sliding : {0, 100}) {
                                Described d(2, heads, dim, dim);
                                d.layers[1].sliding_window = sliding;
                                d.policy.kind = kind;
                                d.policy.window_tokens = window;
                                d.policy.flags = extra % 2 == 1 ? static_cast<uint32_t>(SKERRY_POLICY_KEEP_EXACT) : 0u;
                                d.budget.length_tokens = length;
                                d.budget.exact_bytes = 100000;
                                d.budget.bytes = 1;
                                d.desc.max_sequences = 2;
                                CachePlan plan;
                                const Status low = make_plan(d.get(), device(), &plan, nullptr);
                                if (low == SKERRY_ERROR_UNSUPPORTED) continue; // a format that would be larger than full precision
                                REQUIRE(low == SKERRY_ERROR_OVER_BUDGET);
                                d.budget.bytes = plan.info.minimum_bytes + extra;
                                REQUIRE(make_plan(d.get(), device(), &plan, nullptr) == SKERRY_OK);
                                CAPTURE(kind);
                                CAPTURE(dim);
                                CAPTURE(window);
                                CAPTURE(length);
                                CAPTURE(extra);
                                CHECK(plan.info.planned_bytes <= plan.info.budget_bytes);
                                CHECK(plan.info.exact_bytes <= 100000);
                                ++planned;
                            }
                        }
                    }
                }
            }
        }
    }
    CHECK(planned > 1000);
}

TEST_CASE("plan: more bytes never hold fewer windows") {
    for (int32_t kind : {SKERRY_POLICY_EVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_QEVICT}) {
        int64_t before = -1;
        for (uint64_t bytes = 600000; bytes < 6000000; bytes += 54321) {
            Described d(4, 2, 64, 64);
            d.policy.kind = kind;
            d.budget.length_tokens = 4000;
            d.budget.bytes = bytes;
            CachePlan plan;
            if (make_plan(d.get(), device(), &plan, nullptr) != SKERRY_OK) continue;
            const int64_t windows = plan.info.full_windows + plan.info.quantised_windows;
            CHECK(windows >= before);
            before = windows;
        }
        CHECK(before > 0);
    }
}
