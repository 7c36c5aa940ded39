#include "model/geometry.hpp"

#include <cmath>
#include <cstring>

#include "limits.hpp"

namespace skerry {

Status read_struct(const void *from, uint32_t first_size, void *to, uint32_t known_size, int32_t argument, const char *what,
                   skerry_error *error) {
    if (from == nullptr) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, argument, 0, 0, "%s is NULL", what);
    }
    uint32_t size = 0;
    std::memcpy(&size, from, sizeof size);
    if (size < first_size || size > limits::max_struct_size) {
        return fail(error, SKERRY_ERROR_STRUCT_SIZE, SKERRY_SUBJECT_STRUCT, argument, size, first_size,
                    "%s.struct_size is %u; this library knows %u to %u", what, size, first_size, known_size);
    }
    const uint8_t *bytes = static_cast<const uint8_t *>(from);
    for (uint32_t i = known_size; i < size; ++i) {
        if (bytes[i] != 0) {
            return fail(error, SKERRY_ERROR_NEWER_FIELD, SKERRY_SUBJECT_STRUCT, argument, i, known_size,
                        "%s sets a field at byte %u that this library does not know", what, i);
        }
    }
    std::memset(to, 0, known_size);
    std::memcpy(to, from, size < known_size ? size : known_size);
    return SKERRY_OK;
}

Status check_out_struct(const void *out, uint32_t first_size, uint32_t known_size, int32_t argument, const char *what, uint32_t *writable,
                        skerry_error *error) {
    if (out == nullptr) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, argument, 0, 0, "%s is NULL", what);
    }
    uint32_t size = 0;
    std::memcpy(&size, out, sizeof size);
    if (size < first_size || size > limits::max_struct_size) {
        return fail(error, SKERRY_ERROR_STRUCT_SIZE, SKERRY_SUBJECT_STRUCT, argument, size, first_size,
                    "%s.struct_size is %u; set it with SKERRY_DESC", what, size);
    }
    *writable = size < known_size ? size : known_size;
    return SKERRY_OK;
}

namespace {

Status bad(skerry_error *error, uint32_t subject, int32_t layer, int64_t found, int64_t allowed, const char *what) {
    return fail(error, SKERRY_ERROR_ARGUMENT, subject, layer, found, allowed, "layer %d: %s is %lld", layer, what,
                static_cast<long long>(found));
}

Status read_rotary(const skerry_rotary_desc *from, int32_t index, LayerGeometry *out, skerry_error *error) {
    skerry_rotary_desc rotary;
    if (const Status status = read_struct(from, sizeof(skerry_rotary_desc), &rotary, sizeof rotary, index, "rotary", error); status < 0) {
        return status;
    }
    if (rotary.flags != 0 || rotary.reserved != 0) {
        return bad(error, SKERRY_SUBJECT_FLAGS, index, rotary.flags, 0, "rotary.flags");
    }
    if (rotary.dims < 2 || rotary.dims % 2 != 0 || rotary.dims > out->key_dim) {
        return bad(error, SKERRY_SUBJECT_ROTARY, index, rotary.dims, out->key_dim, "rotary.dims");
    }
    if (rotary.pairing != SKERRY_ROTARY_HALF && rotary.pairing != SKERRY_ROTARY_INTERLEAVED) {
        return bad(error, SKERRY_SUBJECT_ROTARY, index, rotary.pairing, SKERRY_ROTARY_INTERLEAVED, "rotary.pairing");
    }
    if (rotary.inverse_frequencies == nullptr) {
        return bad(error, SKERRY_SUBJECT_ROTARY, index, 0, rotary.dims / 2, "rotary.inverse_frequencies");
    }
    for (int32_t i = 0; i < rotary.dims / 2; ++i) {
        if (!std::isfinite(rotary.inverse_frequencies[i])) {
            return bad(error, SKERRY_SUBJECT_ROTARY, index, i, 0, "the index of a rotary frequency that is not finite");
        }
    }
    if (!std::isfinite(rotary.attention_factor) || rotary.attention_factor < 0) {
        return bad(error, SKERRY_SUBJECT_ROTARY, index, -1, 0, "rotary.attention_factor, not a positive number,");
    }
    out->inverse_frequencies = rotary.inverse_frequencies;
    out->rotary_dims = rotary.dims;
    out->rotary_pairing = rotary.pairing;
    out->attention_factor = rotary.attention_factor == 0 ? 1.0f : rotary.attention_factor;
    return SKERRY_OK;
}

} // namespace

Status read_layer(const skerry_cache_desc &desc, int32_t index, LayerGeometry *out, skerry_error *error) {
    skerry_layer_desc layer;
    if (const Status status =
            read_struct(desc.layers[index], sizeof(skerry_layer_desc), &layer, sizeof layer, index, "desc.layers[]", error);
        status < 0) {
        return status;
    }
    if ((layer.flags & ~static_cast<uint32_t>(SKERRY_LAYER_SHARED)) != 0) {
        return bad(error, SKERRY_SUBJECT_FLAGS, index, layer.flags, SKERRY_LAYER_SHARED, "flags");
    }
    *out = LayerGeometry{};
    if (layer.kv_heads < 1 || layer.kv_heads > limits::max_heads) {
        return bad(error, SKERRY_SUBJECT_HEADS, index, layer.kv_heads, limits::max_heads, "kv_heads");
    }
    out->kv_heads = layer.kv_heads;
    out->query_heads = layer.query_heads == 0 ? layer.kv_heads : layer.query_heads;
    if (out->query_heads < 1 || out->query_heads > limits::max_heads || out->query_heads % out->kv_heads != 0) {
        return bad(error, SKERRY_SUBJECT_HEADS, index, layer.query_heads, out->kv_heads,
                   "query_heads, which must be a multiple of kv_heads,");
    }
    out->group = out->query_heads / out->kv_heads;
    if (layer.key_dim < 1 || layer.key_dim > limits::max_head_dim) {
        return bad(error, SKERRY_SUBJECT_KEY_DIM, index, layer.key_dim, limits::max_head_dim, "key_dim");
    }
    out->key_dim = layer.key_dim;
    out->value_dim = layer.value_dim == 0 ? layer.key_dim : layer.value_dim;
    if (out->value_dim < 1 || out->value_dim > limits::max_head_dim) {
        return bad(error, SKERRY_SUBJECT_VALUE_DIM, index, layer.value_dim, limits::max_head_dim, "value_dim");
    }
    if (layer.sliding_window < 0) {
        return bad(error, SKERRY_SUBJECT_WINDOW, index, layer.sliding_window, 0, "sliding_window");
    }
    out->sliding_window = layer.sliding_window;
    if (!std::isfinite(layer.scale) || !std::isfinite(layer.softcap) || layer.softcap < 0) {
        return bad(error, SKERRY_SUBJECT_LAYER, index, -1, 0, "scale or softcap, not a usable number,");
    }
    out->scale = layer.scale == 0 ? static_cast<float>(1 / std::sqrt(static_cast<double>(layer.key_dim))) : layer.scale;
    out->softcap = layer.softcap;
    if (layer.rotary != nullptr) {
        if (const Status status = read_rotary(layer.rotary, index, out, error); status < 0) return status;
    }
    out->source = index;
    if ((layer.flags & SKERRY_LAYER_SHARED) != 0) {
        LayerGeometry source;
        if (layer.shared_with < 0 || layer.shared_with >= index) {
            return bad(error, SKERRY_SUBJECT_LAYER, index, layer.shared_with, index - 1, "shared_with");
        }
        if (const Status status = read_layer(desc, layer.shared_with, &source, error); status < 0) return status;
        if (source.source != layer.shared_with || !source.same_storage(*out)) {
            return bad(error, SKERRY_SUBJECT_LAYER, index, layer.shared_with, -1,
                       "shared_with, which must be an unshared layer of the same heads and dimensions,");
        }
        out->source = layer.shared_with;
    } else if (layer.shared_with != 0) {
        return bad(error, SKERRY_SUBJECT_LAYER, index, layer.shared_with, 0, "shared_with without SKERRY_LAYER_SHARED");
    }
    return SKERRY_OK;
}

} // namespace skerry
