// skerry.hpp in C++11 without exceptions: failures come back as statuses.

#include <skerry/skerry.hpp>
#include <stdio.h>

#if SKERRY_HPP_EXCEPTIONS
#error "build this file without exceptions"
#endif

namespace {

int failures = 0;

void expect(bool fine, const char *what) {
    if (fine) return;
    ++failures;
    fprintf(stderr, "failed: %s\n", what);
}

} // namespace

int main() {
    skerry::Context context;
    expect(context.create() == SKERRY_OK && context, "a context with all defaults");
    skerry_layer_desc layer = skerry::make<skerry_layer_desc>();
    layer.kv_heads = 1;
    layer.key_dim = 4;
    const skerry_layer_desc *layers[1] = {&layer};
    skerry_cache_desc desc = skerry::make<skerry_cache_desc>();
    desc.layers = layers;
    skerry::Cache cache;
    expect(cache.create(context, desc) == SKERRY_ERROR_ARGUMENT && !cache, "no layers are refused");
    desc.layer_count = 1;
    expect(cache.create(context, desc) == SKERRY_OK && cache, "a cache of one layer");
    skerry::Sequence seq;
    expect(seq.create(cache) == SKERRY_OK && seq, "a sequence");
    expect(seq.truncate(3) == SKERRY_ERROR_ARGUMENT, "an empty sequence is not cut");
    skerry::Sequence other;
    expect(other.create(cache) == SKERRY_ERROR_TIER_FULL && !other, "one sequence is the default");
    const skerry_seq id = seq.id();
    const int32_t count = 2;
    skerry_step_desc step_desc = skerry::make<skerry_step_desc>();
    step_desc.seqs = &id;
    step_desc.token_counts = &count;
    step_desc.seq_count = 1;
    skerry::Step step;
    expect(step.begin(cache, step_desc) == SKERRY_OK && step, "a step");
    expect(step.commit() == SKERRY_ERROR_STATE && step, "a commit without its layer");
    const float numbers[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const skerry_tensor rows = skerry::tensor(numbers, SKERRY_DTYPE_F32, 2, 1, 4);
    expect(step.append(0, rows, rows) == SKERRY_OK, "an append");
    int32_t tokens = 0;
    expect(step.gather(skerry::make<skerry_gather_desc>(), tokens) == SKERRY_OK && tokens == 2, "a count");
    expect(step.commit() == SKERRY_OK && !step, "the commit");
    expect(seq.can_truncate(1) == SKERRY_OK, "a remark");
    return failures == 0 ? 0 : 1;
}
