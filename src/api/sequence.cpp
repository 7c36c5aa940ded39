#include <skerry/sequence.h>

#include <algorithm>

#include "api/check.hpp"

using namespace skerry;

skerry_status skerry_seq_create(skerry_cache *cache, skerry_seq *out, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    if (out == nullptr) return null_argument(error, 1, "out");
    return guarded(error, [&] { return sequence_create(cache, out, error); });
}

skerry_status skerry_seq_drop(skerry_cache *cache, skerry_seq id, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    if (seq->in_step) return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 1, 0, "the sequence is in the open step");
    sequence_destroy(cache, seq);
    return SKERRY_OK;
}

skerry_status skerry_seq_fork(skerry_cache *cache, skerry_seq parent, int64_t length, skerry_seq *out, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    if (out == nullptr) return null_argument(error, 3, "out");
    return guarded(error, [&]() -> Status {
        Sequence *seq = nullptr;
        if (const Status status = sequence_find(cache, parent, &seq, error); status < 0) return status;
        return sequence_fork(cache, seq, length, out, error);
    });
}

skerry_status skerry_seq_truncate(skerry_cache *cache, skerry_seq id, int64_t length, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    return guarded(error, [&]() -> Status {
        Sequence *seq = nullptr;
        if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
        return sequence_truncate(cache, seq, length, error);
    });
}

skerry_status skerry_seq_can_truncate(skerry_cache *cache, skerry_seq id, int64_t length, int64_t ahead, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    if (ahead < 0 || length < 0 || length > seq->length + ahead) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_POSITION, -1, length, seq->length + ahead,
                    "length %lld of a sequence of %lld + %lld tokens", static_cast<long long>(length), static_cast<long long>(seq->length),
                    static_cast<long long>(ahead));
    }
    return sequence_can_truncate(cache, seq, length, ahead) ? SKERRY_OK : SKERRY_MISS;
}

skerry_status skerry_seq_get_info(skerry_cache *cache, skerry_seq id, skerry_seq_info *info, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, offsetof(skerry_seq_info, host_tokens), sizeof *info, 2, "info", &writable, error);
        status < 0)
        return status;
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    skerry_seq_info filled{};
    sequence_info(cache, seq, &filled);
    copy_out(filled, info, writable);
    return SKERRY_OK;
}

skerry_status skerry_seq_list_ranges(skerry_cache *cache, skerry_seq id, int32_t layer, int32_t kv_head, skerry_range *ranges,
                                     int32_t capacity, int32_t *needed, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    if (needed == nullptr) return null_argument(error, 6, "needed");
    if (capacity < 0 || (capacity > 0 && ranges == nullptr)) return null_argument(error, 4, "ranges (or capacity is negative)");
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    if (const Status status = check_layer_head(cache, layer, kv_head, error); status < 0) return status;
    sequence_ranges(cache, seq, layer, kv_head, ranges, capacity, needed);
    return *needed > capacity ? SKERRY_INCOMPLETE : SKERRY_OK;
}

skerry_status skerry_seq_fingerprint(skerry_cache *cache, skerry_seq id, uint64_t *out, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    if (out == nullptr) return null_argument(error, 2, "out");
    Sequence *seq = nullptr;
    if (const Status status = sequence_find(cache, id, &seq, error); status < 0) return status;
    *out = sequence_fingerprint(cache, seq);
    return SKERRY_OK;
}
