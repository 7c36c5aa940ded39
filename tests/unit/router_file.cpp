// Trained routers as the rest of the library sees them: which matrix serves which head, and which caches they fit.

#include "io/router_file.hpp"
#include "base/half.hpp"

#include <doctest/doctest.h>

#include <algorithm>

#include "../support/router_bytes.hpp"

using namespace skerry;
using support::FileTensor;
using support::RouterSettings;
using support::RouterSize;

namespace {

struct Router {
    Allocator allocator;
    RouterWeights weights;
    skerry_error error{};
    Status status;

    Router(const std::vector<FileTensor> &tensors, const RouterSettings &settings) : weights(allocator) {
        const std::vector<uint8_t> bytes = support::safetensors(tensors, settings.text());
        const ByteSource source(bytes.data(), bytes.size());
        error.struct_size = sizeof error;
        status = router_read(source, allocator, &weights, &error);
        INFO(std::string(error.message));
        REQUIRE(status == SKERRY_OK);
    }
};

// Place of a matrix within the tensor that it is part of.
ptrdiff_t place(const float *matrix, const float *tensor, const RouterWeights &router) {
    const ptrdiff_t size = router.summary_dim * router.key_dim;
    CHECK((matrix - tensor) % size == 0);
    return (matrix - tensor) / size;
}

bool equal(const float *found, const std::vector<float> &wanted) { return std::equal(wanted.begin(), wanted.end(), found); }

Status check_geometry(const RouterWeights &router, const std::vector<LayerGeometry> &layers, skerry_error *error) {
    Status status = router_check_layers(router, static_cast<int32_t>(layers.size()), error);
    for (size_t i = 0; i < layers.size() && status >= 0; ++i)
        status = router_check_layer(router, static_cast<int32_t>(i), layers[i], error);
    return status;
}

std::vector<LayerGeometry> layers_of(const RouterSize &size) {
    LayerGeometry layer;
    layer.query_heads = static_cast<int32_t>(size.query_heads);
    layer.kv_heads = static_cast<int32_t>(size.kv_heads);
    layer.key_dim = static_cast<int32_t>(size.key_dim);
    return std::vector<LayerGeometry>(static_cast<size_t>(size.layers), layer);
}

} // namespace

TEST_CASE("T24: every tensor of a published router is where its name says, as it was stored") {
    const RouterSize size;
    const std::vector<FileTensor> tensors = support::paper_tensors(size);
    const Router router(tensors, support::router_settings(size, "paper"));
    const RouterWeights &w = router.weights;
    const float *pointers[] = {
        w.w, w.tau, w.gates.weight[0], w.gates.bias[0], w.gates.weight[1], w.gates.bias[1], w.gates.weight[2], w.gates.bias[2]};
    for (size_t i = 0; i < 8; ++i) {
        CAPTURE(tensors[i].name);
        REQUIRE(pointers[i] != nullptr);
        CHECK(equal(pointers[i], tensors[i].values));
    }
    CHECK(w.has_gates());
    CHECK(w.normalise);
    CHECK_FALSE(w.shared_keys);
    for (int32_t layer = 0; layer < 2; ++layer) {
        for (int32_t head = 0; head < 4; ++head) {
            // One matrix projects the query and the keys of a query head (sekv.md 3.1).
            CHECK(place(w.query_matrix(layer, head), w.w, w) == 4 * layer + head);
            CHECK(w.key_matrix(layer, head) == w.query_matrix(layer, head));
            CHECK(w.tau_of(layer, head) == tensors[1].values[static_cast<size_t>(4 * layer + head)]);
            CHECK(w.bias_of(layer, head) == 0);
            CHECK(w.temperature_of(layer, head) == 1);
        }
    }
}

TEST_CASE("router file: key matrices per KV head, in any order of tensors and of any type") {
    RouterSize size;
    std::vector<FileTensor> tensors = support::production_tensors(size);
    const std::vector<FileTensor> exact = tensors;
    // Multiples of 2^-10 below 1 are exact in f16.
    for (FileTensor &tensor : tensors) {
        tensor.dtype = "F16";
        for (float value : tensor.values)
            tensor.halves.push_back(f32_to_f16(value));
    }
    std::reverse(tensors.begin(), tensors.end());
    const Router router(tensors, support::router_settings(size, "production").set("centroids", "3").set("pooling", "\"centroids\""));
    const RouterWeights &w = router.weights;
    CHECK(equal(w.w, exact[0].values));
    CHECK(equal(w.w_key, exact[1].values));
    CHECK(w.shared_keys);
    CHECK(w.centroids == 3);
    CHECK(w.rank_max == 0);
    CHECK_FALSE(w.has_gates());
    CHECK(w.tau == nullptr);
    for (int32_t layer = 0; layer < 2; ++layer) {
        for (int32_t head = 0; head < 4; ++head) {
            CHECK(place(w.query_matrix(layer, head), w.w, w) == 4 * layer + head);
            CHECK(place(w.key_matrix(layer, head), w.w_key, w) == 2 * layer + head / 2);
            const size_t i = static_cast<size_t>(4 * layer + head);
            CHECK(w.bias_of(layer, head) == exact[2].values[i]);
            CHECK(w.temperature_of(layer, head) == exact[3].values[i]);
        }
    }
}

TEST_CASE("router file: shared keys without matrices of their own use the group's first") {
    const RouterSize size;
    FileTensor w = support::file_tensor("W", {size.layers, size.query_heads, size.summary_dim, size.key_dim});
    for (size_t i = 0; i < w.values.size(); ++i)
        w.values[i] = static_cast<float>(i / 64) + static_cast<float>(i % 32) / 64; // 32 numbers per matrix, two heads per group
    const Router router({w}, support::router_settings(size, "production").set("shared_keys", "true"));
    for (int32_t head = 0; head < 4; ++head) {
        CHECK(place(router.weights.key_matrix(1, head), router.weights.w, router.weights) == 4 + head / 2 * 2);
    }
}

TEST_CASE("router file: a cache of another geometry is refused by the first number that differs") {
    const RouterSize size;
    const Router router(support::paper_tensors(size), support::router_settings(size, "paper"));
    std::vector<LayerGeometry> layers = layers_of(size);
    CHECK(check_geometry(router.weights, layers, nullptr) == SKERRY_OK);
    struct Case {
        int layer;
        int32_t LayerGeometry::*field;
        int32_t value;
        uint32_t subject;
        const char *said;
    };
    const Case cases[] = {{1, &LayerGeometry::query_heads, 8, SKERRY_SUBJECT_HEADS, "query heads is 4, the cache's layer 1 has 8"},
                          {0, &LayerGeometry::kv_heads, 4, SKERRY_SUBJECT_HEADS, "KV heads is 2, the cache's layer 0 has 4"},
                          {1, &LayerGeometry::key_dim, 16, SKERRY_SUBJECT_KEY_DIM, "key dimension is 8, the cache's layer 1 has 16"}};
    for (const Case &one : cases) {
        layers = layers_of(size);
        layers[static_cast<size_t>(one.layer)].*one.field = one.value;
        skerry_error error{};
        error.struct_size = sizeof error;
        CHECK(check_geometry(router.weights, layers, &error) == SKERRY_ERROR_FORMAT);
        CHECK(error.subject == one.subject);
        CHECK(error.index == one.layer);
        CHECK(error.allowed == one.value);
        CHECK_MESSAGE(std::strstr(error.message, one.said) != nullptr, std::string(error.message));
        CHECK(std::strstr(error.message, "tiny") != nullptr);
    }
    layers = layers_of(size);
    layers.push_back(layers[0]);
    skerry_error error{};
    error.struct_size = sizeof error;
    CHECK(check_geometry(router.weights, layers, &error) == SKERRY_ERROR_FORMAT);
    CHECK(error.subject == SKERRY_SUBJECT_LAYER);
    CHECK(error.found == 2);
    CHECK(error.allowed == 3);
    CHECK(check_geometry(router.weights, {}, nullptr) == SKERRY_ERROR_FORMAT);
}
