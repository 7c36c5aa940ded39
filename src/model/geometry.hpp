#pragma once

// One layer's geometry as the rest of the library sees it: checked, defaults filled in.

#include <skerry/cache.h>

#include <cstdint>

#include "base/status.hpp"

namespace skerry {

struct LayerGeometry {
    const float *inverse_frequencies = nullptr; // the caller's until the cache has copied them
    int32_t kv_heads = 0;
    int32_t query_heads = 0;
    int32_t group = 0;
    int32_t key_dim = 0;
    int32_t value_dim = 0;
    int32_t sliding_window = 0; // 0: none
    int32_t source = 0;         // the layer whose cache this one reads: itself unless shared
    int32_t lane = 0;           // first lane of the source's KV heads within a sequence
    int32_t rotary_dims = 0;
    int32_t rotary_pairing = 0;
    float attention_factor = 1;
    float scale = 0;
    float softcap = 0;

    bool same_storage(const LayerGeometry &other) const {
        return kv_heads == other.kv_heads && key_dim == other.key_dim && value_dim == other.value_dim;
    }
};

// Reads and checks layer `index` of a description whose own struct was read already. `lane` is not filled in.
Status read_layer(const skerry_cache_desc &desc, int32_t index, LayerGeometry *out, skerry_error *error);

// Copies a caller's sized struct into a zeroed one of ours: below the first version's size, above what any version may have, and
// with anything set that this build does not know, are refused.
Status read_struct(const void *from, uint32_t first_size, void *to, uint32_t known_size, int32_t argument, const char *what,
                   skerry_error *error);

// For info structs: how many bytes may be written.
Status check_out_struct(const void *out, uint32_t first_size, uint32_t known_size, int32_t argument, const char *what, uint32_t *writable,
                        skerry_error *error);

} // namespace skerry
