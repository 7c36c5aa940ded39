#include <skerry/step.h>

#include "api/check.hpp"
#include "policy/surprisal.hpp"

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
    constexpr uint32_t known = SKERRY_TIERS_FULL | SKERRY_TIERS_QUANTISED | SKERRY_TIERS_HOST;
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

skerry_status skerry_step_zoom(skerry_step *step, int32_t layer, const skerry_tensor *queries, const skerry_stream *stream,
                               skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (queries == nullptr) return null_argument(error, 2, "queries");
    if (const Status status = check_place(step, 0, layer, 0, error); status < 0) return status;
    if (const Status status = check_stream(stream, 3, error); status < 0) return status;
    return guarded(error, [&] { return step_zoom(step, layer, *queries, error); });
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
    if (const int64_t bad = surprisal_first_invalid(nats, count); bad >= 0) {
        return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, static_cast<int32_t>(bad), 0, 0,
                    "surprisal of token %lld is no finite number of at least 0", static_cast<long long>(bad));
    }
    return guarded(error, [&] { return step_surprisal(step, seq_index, nats, error); });
}

skerry_status skerry_surprisal_from_logits(const skerry_tensor *logits, const int32_t *tokens, int32_t rows, float *nats,
                                           skerry_error *error) {
    if (logits == nullptr) return null_argument(error, 0, "logits");
    if (tokens == nullptr) return null_argument(error, 1, "tokens");
    if (nats == nullptr) return null_argument(error, 3, "nats");
    if (rows < 1) return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, 2, rows, 1, "rows is %d", rows);
    const int64_t shape[2] = {rows, logits->shape[1]};
    if (const Status status = check_tensor(*logits, 2, shape, false, 0, "logits", error); status < 0) return status;
    if (shape[1] < 1 || shape[1] > INT32_MAX || (shape[1] > 1 && logits->stride[1] != 1)) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, 1, logits->stride[1], 1,
                    "a row of logits is not packed: its stride is %lld", static_cast<long long>(logits->stride[1]));
    }
    const int64_t stride = rows == 1 ? 0 : logits->stride[0];
    const uint8_t *data = static_cast<const uint8_t *>(logits->data) + logits->byte_offset;
    const SurprisalResult result = surprisal_rows(logits->dtype, data, rows, shape[1], stride, tokens, nats);
    const int32_t row = static_cast<int32_t>(result.row);
    switch (result.fault) {
    case SurprisalFault::none:
        return SKERRY_OK;
    case SurprisalFault::token_out_of_range:
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TOKENS, row, tokens[row], shape[1] - 1,
                    "tokens[%d] is %d, the vocabulary ends at %lld", row, tokens[row], static_cast<long long>(shape[1] - 1));
    case SurprisalFault::logit_not_finite:
        return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, row, result.column, 0, "logits[%d, %lld] is NaN or +inf", row,
                    static_cast<long long>(result.column));
    case SurprisalFault::no_finite_surprisal:
        break;
    }
    return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, row, tokens[row], 0, "tokens[%d] = %d has probability 0", row,
                tokens[row]);
}

skerry_status skerry_step_commit(skerry_step *step, skerry_error *error) {
    if (step == nullptr) return null_argument(error, 0, "step");
    if (const Status status = check_open(step, error); status < 0) return status;
    return guarded(error, [&] { return step_commit(step, error); });
}

void skerry_step_abort(skerry_step *step) {
    if (step != nullptr && step->open) step_abort(step);
}
