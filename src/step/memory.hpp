#pragma once

// SKERRY_FIDELITY_PAPER of SEKV in a cache: when a prompt ends its tokens become a PromptMemory (seq/paper.hpp), which every later token
// attends to by the rules of policy/sekv_paper.hpp. Everything here does nothing for sequences of other policies.

#include "step/cache.hpp"

namespace skerry {

// Begin of a step: room for its surprisal, which may fail, then the state to go back to.
void memory_reserve(const StepSequence &part);
void memory_begin(const StepSequence &part);
// Of the step's tokens. The first token of all has no surprisal: it counts as 0 (sekv.md 1.1).
void memory_surprisal(const StepSequence &part, const float *nats);

// Before a commit: makes the memory of every prompt that ends, and the scratch that attending to it takes. On an error nothing has changed.
// Errors: STATE (no surprisal), OVER_BUDGET (bytes or entries), OUT_OF_MEMORY by exception, what the host's parallel_for returns.
Status memory_build(skerry_step *step, skerry_error *error);
// The commit itself: the sequence gives its tiles up for the memory that was made.
void memory_commit(skerry_cache *cache, Sequence *seq);

void memory_clear(skerry_cache *cache, Sequence *seq);
// Throws std::bad_alloc; the child is then as it was.
void memory_fork(skerry_cache *cache, const Sequence *parent, Sequence *child);

struct MemoryCall {
    skerry_step *step;
    const LayerGeometry *layer;
    int32_t index; // of the layer
    TensorRows queries;
    TensorRows out;
    TensorRows lse;
    bool has_lse;
    bool zeroes; // numbers of queries that are not finite
    bool remember;
};
// All rows of one sequence. Errors: OVER_BUDGET (a KV group's union, as the released code fails), what parallel_for returns. `out` may have
// been written in part.
Status memory_attend(const MemoryCall &call, const StepSequence &part, skerry_error *error);

// Of the tables of a memory, and of all that a sequence with it takes under a budget.
uint64_t memory_table_bytes(const skerry_cache *cache, const PromptMemory &memory);
uint64_t memory_sequence_bytes(const skerry_cache *cache, const CachePlan &plan, const PromptMemory &memory);

// Ranges of one KV head: visit(begin, end, tier, compressed span or -1).
template <class Visit>
void memory_ranges(const Sequence *seq, Visit &&visit) {
    const PromptMemory &memory = *seq->paper->memory;
    int32_t position = 0;
    size_t anchor = 0;
    int32_t compressed = 0;
    const auto anchors_before = [&](int32_t end) {
        for (; anchor < memory.anchors.size() && memory.anchors[anchor] < end; ++anchor) {
            position = memory.anchors[anchor] + 1;
            visit(int64_t{position} - 1, int64_t{position}, SKERRY_TIER_FULL, -1);
        }
    };
    for (const PaperSpan &span : memory.spans) {
        anchors_before(span.begin);
        if (position < span.begin)
            visit(int64_t{position}, int64_t{span.begin}, SKERRY_TIER_EVICTED, -1); // token 0 of a prompt without anchors
        visit(int64_t{span.begin}, int64_t{span.end}, span.full_resolution ? SKERRY_TIER_FULL : SKERRY_TIER_SUMMARY,
              span.full_resolution ? -1 : compressed);
        compressed += span.full_resolution ? 0 : 1;
        position = span.end;
    }
    anchors_before(INT32_MAX);
    if (position < seq->length) visit(int64_t{position}, seq->length, SKERRY_TIER_EVICTED, -1); // generated
}

void memory_list(const skerry_cache *cache, const Sequence *seq, const LayerGeometry &layer, int32_t head, skerry_range *ranges,
                 int32_t capacity, int32_t *needed);
void memory_info(const skerry_cache *cache, const Sequence *seq, skerry_seq_info *info);
void memory_hash(const Sequence *seq, uint64_t *hash);
bool memory_consistent(const skerry_cache *cache, const PromptMemory &memory);

} // namespace skerry
