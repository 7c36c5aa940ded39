#pragma once

// What every entry point does: check, call, translate. One guard turns what must not cross the border into a status.

#include <cstring>
#include <new>

#include "limits.hpp"
#include "step/cache.hpp"

namespace skerry {

inline Status null_argument(skerry_error *error, int32_t index, const char *name) {
    return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, index, 0, 0, "%s is NULL", name);
}

inline Status unknown_flags(skerry_error *error, int32_t index, uint32_t found, uint32_t known, const char *name) {
    return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_FLAGS, index, found, known, "%s is 0x%x; known bits are 0x%x", name, found,
                known);
}

template <class Body>
Status guarded(skerry_error *error, Body &&body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail(error, SKERRY_ERROR_OUT_OF_MEMORY, SKERRY_SUBJECT_HOST_MEMORY, -1, 0, 0, "the allocator returned no memory");
    } catch (...) {
        return fail(error, SKERRY_ERROR_INTERNAL, SKERRY_SUBJECT_NONE, -1, 0, 0, "an exception reached the interface");
    }
}

// Copies an info struct out, as far as the caller's reaches; its struct_size stays the caller's.
template <class Info>
void copy_out(const Info &from, Info *to, uint32_t writable) {
    std::memcpy(reinterpret_cast<uint8_t *>(to) + sizeof(uint32_t), reinterpret_cast<const uint8_t *>(&from) + sizeof(uint32_t),
                writable - sizeof(uint32_t));
}

inline Status check_layer_head(const skerry_cache *cache, int32_t layer, int32_t head, skerry_error *error) {
    const int32_t layers = static_cast<int32_t>(cache->layers.size());
    if (layer < 0 || layer >= layers) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_LAYER, layer, layer, layers - 1, "layer %d: the cache has layers 0 to %d",
                    layer, layers - 1);
    }
    const int32_t heads = cache->layers[static_cast<size_t>(layer)].kv_heads;
    if (head < 0 || head >= heads) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_HEADS, layer, head, heads - 1, "KV head %d: layer %d has heads 0 to %d",
                    head, layer, heads - 1);
    }
    return SKERRY_OK;
}

inline Status check_open(const skerry_step *step, skerry_error *error) {
    if (step->open) return SKERRY_OK;
    return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 0, 1, "the step has ended");
}

inline Status check_stream(const skerry_stream *stream, int32_t argument, skerry_error *error) {
    if (stream == nullptr || stream->device_type == SKERRY_DEVICE_CPU) return SKERRY_OK;
    return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_ARGUMENT, argument, stream->device_type, SKERRY_DEVICE_CPU,
                "a stream of device type %d on a CPU cache", stream->device_type);
}

} // namespace skerry
