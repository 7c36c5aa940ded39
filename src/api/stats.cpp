#include <skerry/stats.h>

#include "api/check.hpp"

using namespace skerry;

skerry_status skerry_cache_get_memory(skerry_cache *cache, skerry_memory_info *info, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, offsetof(skerry_memory_info, host_bytes), sizeof *info, 1, "info", &writable, error);
        status < 0)
        return status;
    skerry_memory_info filled{};
    cache_memory(cache, &filled);
    copy_out(filled, info, writable);
    return SKERRY_OK;
}

skerry_status skerry_cache_get_counters(skerry_cache *cache, skerry_counters *counters, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    uint32_t writable = 0;
    if (const Status status =
            check_out_struct(counters, offsetof(skerry_counters, details_written), sizeof *counters, 1, "counters", &writable, error);
        status < 0)
        return status;
    copy_out(cache->counters, counters, writable);
    return SKERRY_OK;
}

skerry_status skerry_seq_get_diagnostics(skerry_cache *cache, skerry_seq id, int32_t layer, skerry_diagnostics *out, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(out, sizeof *out, sizeof *out, 3, "out", &writable, error); status < 0) return status;
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    if (layer != -1) {
        if (const Status status = check_layer_head(cache, layer, 0, error); status < 0) return status;
    }
    skerry_diagnostics filled{};
    sequence_diagnostics(cache, seq, layer, &filled);
    copy_out(filled, out, writable);
    return SKERRY_OK;
}
