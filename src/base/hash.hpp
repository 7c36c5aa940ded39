#pragma once

#include <cstddef>
#include <cstdint>

namespace skerry {

// FNV-1a, 64 bit: tells states apart, and is no signature.
inline constexpr uint64_t hash_seed = 0xcbf29ce484222325u;
inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const uint8_t *byte = static_cast<const uint8_t *>(data);
    for (size_t i = 0; i < bytes; ++i)
        hash = (hash ^ byte[i]) * 0x100000001b3u;
    return hash;
}

} // namespace skerry
