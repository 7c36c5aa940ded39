#include <skerry/step.h>

#include <cmath>

#include "api/check.hpp"

using namespace skerry;

namespace {

Status check_place(const skerry_step *step, int32_t seq_index, int32_t layer, int32_t head, skerry_error *error) {
    if (const Status status = check_open(step, error); status < 0) return status;
    const int32_t count = static_cast<int32_t>(step->seqs.size());
    if (seq_index < 0 || seq_index >= count) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_SEQUENCE, seq_index, seq_index, count - 1,
                    "seq_index %d: the step has places 0 to %d", seq_index, count - 1);
    }
    return check_layer_head(step->cache, layer, head, error);
}

Status check_tiers(uint32_t tiers, int32_t argument, skerry_error *error) {
    constexpr uint32_t known = SKERRY_TIERS_FULL | SKERRY_TIERS_QUANTISED;
    return (tiers & ~known) == 0 ? SKERRY_OK : unknown_flags(error, argument, tiers, known, "tiers");
}

} // namespace

skerry_status skerry_step_begin(skerry_cache *cache, const skerry_step_desc *given, skerry_step **out, skerry_error *error) {
    if (out == nullptr) return null_argument(error, 2, "out");
    *out = nullptr;
    if (cache == nullptr) return null_argument(error, 0, "cache");
    return guarded(error, [&]() -> Status {
        skerry_step_desc desc{};
        if (const Status status = read_struct(given, sizeof desc, &desc, sizeof desc, 1, "desc", error); status < 0) return status;
        if ((desc.flags & ~static_cast<uint32_t>(SKERRY_STEP_PREFILL)) != 0 || desc.reserved != 0) {
            return unknown_flags(error, 1, desc.flags, SKERRY_STEP_PREFILL, "desc.flags (or its reserved field)");
        }
        return step_begin(cache, desc, out, error);
    });
}

skerry_status skerry_step_append(skerry_step *step, int32_t layer, const skerry_tensor *keys, const skerry_tensor *values,
                                 const skerry_stream *stream, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (keys == nullptr) return null_argument(error, 2, "keys");
    if (values == nullptr) return null_argument(error, 3, "values");
    if (const Status status = check_place(step, 0, layer, 0, error); status < 0) return status;
    if (const Status status = check_stream(stream, 4, error); status < 0) return status;
    return guarded(error, [&] { return step_append(step, layer, *keys, *values, error); });
}

skerry_status skerry_step_attend(skerry_step *step, const skerry_attend_desc *given, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    skerry_attend_desc desc{};
    if (const Status status = read_struct(given, sizeof desc, &desc, sizeof desc, 1, "desc", error); status < 0) return status;
    constexpr uint32_t known = SKERRY_ATTEND_EXACT | SKERRY_ATTEND_NO_SCORE;
    if ((desc.flags & ~known) != 0) return unknown_flags(error, 1, desc.flags, known, "desc.flags");
    if (const Status status = check_place(step, 0, desc.layer, 0, error); status < 0) return status;
    if (desc.queries == nullptr) return null_argument(error, 1, "desc.queries");
    if (desc.out == nullptr) return null_argument(error, 1, "desc.out");
    if (const Status status = check_tiers(desc.tiers, 1, error); status < 0) return status;
    if (const Status status = check_stream(desc.stream, 1, error); status < 0) return status;
    return guarded(error, [&] { return step_attend(step, desc, error); });
}

skerry_status skerry_step_view(skerry_step *step, int32_t seq_index, int32_t layer, int32_t kv_head, uint32_t tiers, skerry_part *parts,
                               int32_t capacity, int32_t *needed, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (needed == nullptr) return null_argument(error, 7, "needed");
    if (capacity < 0 || (capacity > 0 && parts == nullptr)) return null_argument(error, 5, "parts (or capacity is negative)");
    if (const Status status = check_place(step, seq_index, layer, kv_head, error); status < 0) return status;
    if (const Status status = check_tiers(tiers, 4, error); status < 0) return status;
    return guarded(error, [&] { return step_view(step, seq_index, layer, kv_head, tiers, parts, capacity, needed, error); });
}

skerry_status skerry_step_gather(skerry_step *step, const skerry_gather_desc *given, int32_t *tokens, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (tokens == nullptr) return null_argument(error, 2, "tokens");
    skerry_gather_desc desc{};
    if (const Status status = read_struct(given, sizeof desc, &desc, sizeof desc, 1, "desc", error); status < 0) return status;
    if (desc.flags != 0) return unknown_flags(error, 1, desc.flags, 0, "desc.flags");
    if (const Status status = check_place(step, desc.seq_index, desc.layer, desc.kv_head, error); status < 0) return status;
    if (const Status status = check_tiers(desc.tiers, 1, error); status < 0) return status;
    return guarded(error, [&] { return step_gather(step, desc, tokens, error); });
}

skerry_status skerry_step_observe(skerry_step *step, const skerry_observe_desc *given, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    skerry_observe_desc desc{};
    if (const Status status = read_struct(given, sizeof desc, &desc, sizeof desc, 1, "desc", error); status < 0) return status;
    if (desc.flags != 0) return unknown_flags(error, 1, desc.flags, 0, "desc.flags");
    if (const Status status = check_place(step, desc.seq_index, desc.layer, desc.kv_head, error); status < 0) return status;
    if (desc.masses == nullptr && desc.merged_lse == nullptr && desc.queries == nullptr)
        return null_argument(error, 1, "all of masses, merged_lse and queries");
    return guarded(error, [&] { return step_observe(step, desc, error); });
}

skerry_status skerry_step_surprisal(skerry_step *step, int32_t seq_index, const float *nats, int32_t count, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (const Status status = check_place(step, seq_index, 0, 0, error); status < 0) return status;
    if (nats == nullptr) return null_argument(error, 2, "nats");
    const int32_t expected = step->seqs[static_cast<size_t>(seq_index)].count;
    if (count != expected) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, seq_index, count, expected, "%d surprisals for %d tokens", count,
                    expected);
    }
    for (int32_t i = 0; i < count; ++i) {
        if (std::isfinite(nats[i]) && nats[i] >= 0) continue;
        return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, i, 0, 0,
                    "surprisal of token %d is no finite number of at least 0", i);
    }
    return guarded(error, [&] { return step_surprisal(step, seq_index, nats, error); });
}

skerry_status skerry_step_commit(skerry_step *step, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (const Status status = check_open(step, error); status < 0) return status;
    return guarded(error, [&] { return step_commit(step, error); });
}

void skerry_step_abort(skerry_step *step) {
    if (step != nullptr && step->open) step_abort(step);
}
