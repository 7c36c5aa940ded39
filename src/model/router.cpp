#include "model/router.hpp"

namespace skerry {

uint32_t RouterWeights::flags() const noexcept {
    uint32_t set = 0;
    if (tau != nullptr) set |= SKERRY_ROUTER_THRESHOLDS;
    if (has_gates()) set |= SKERRY_ROUTER_GATES;
    if (bias != nullptr) set |= SKERRY_ROUTER_BIAS;
    if (temperature != nullptr) set |= SKERRY_ROUTER_TEMPERATURE;
    if (w_key != nullptr) set |= SKERRY_ROUTER_KEY_MATRICES;
    if (normalise) set |= SKERRY_ROUTER_NORMALISED;
    if (shared_keys) set |= SKERRY_ROUTER_SHARED_KEYS;
    return set;
}

Status router_check_layers(const RouterWeights &router, int32_t layers, skerry_error *error) {
    if (router.layers == layers) return SKERRY_OK;
    return fail(error, SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_LAYER, -1, router.layers, layers,
                "the router was made for another model (%s): %d layers, the cache has %d", router.model, router.layers, layers);
}

Status router_check_layer(const RouterWeights &router, int32_t index, const LayerGeometry &layer, skerry_error *error) {
    const auto same = [&](uint32_t subject, const char *what, int32_t made_for, int32_t cache) -> Status {
        if (made_for == cache) return SKERRY_OK;
        return fail(error, SKERRY_ERROR_FORMAT, subject, index, made_for, cache,
                    "the router was made for another model (%s): %s is %d, the cache's layer %d has %d", router.model, what, made_for,
                    index, cache);
    };
    Status status = same(SKERRY_SUBJECT_HEADS, "the number of query heads", router.query_heads, layer.query_heads);
    if (status >= 0) status = same(SKERRY_SUBJECT_HEADS, "the number of KV heads", router.kv_heads, layer.kv_heads);
    if (status >= 0) status = same(SKERRY_SUBJECT_KEY_DIM, "the key dimension", router.key_dim, layer.key_dim);
    return status;
}

} // namespace skerry
