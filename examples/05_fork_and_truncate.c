/* Several answers to one prompt, and drafts that are taken back: forks share bytes until one side changes them, a step that is
 * aborted leaves no trace, and truncation says beforehand how far back it can go. */
#include <stdio.h>

#include <skerry/skerry.h>

enum { LAYERS = 2, KV_HEADS = 2, DIM = 64, PROMPT = 512, MOST = 64 };

static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)
#define EXPECT(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            return 1; \
        } \
    } while (0)

static float numbers[MOST * KV_HEADS * DIM], out[MOST * KV_HEADS * DIM];

static skerry_tensor dense(float *data, int32_t tokens) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 3, {0, KV_HEADS, DIM, 0}, {KV_HEADS * DIM, DIM, 1, 0}, SKERRY_DEVICE_CPU, 0};
    tensor.shape[0] = tokens;
    return tensor;
}

/* The step stays open; the caller commits or aborts. */
static int forward(skerry_cache *cache, const skerry_seq *seqs, int32_t seq_count, const int32_t *counts, uint32_t seed,
                   skerry_step **step) {
    skerry_step_desc desc = SKERRY_DESC(skerry_step_desc);
    int32_t tokens = 0;
    int i, layer;
    for (i = 0; i < seq_count; ++i) tokens += counts[i];
    desc.seqs = seqs;
    desc.token_counts = counts;
    desc.seq_count = seq_count;
    TRY(skerry_step_begin(cache, &desc, step, &error));
    for (layer = 0; layer < LAYERS; ++layer) {
        const skerry_tensor rows = dense(numbers, tokens), o = dense(out, tokens);
        skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
        for (i = 0; i < tokens * KV_HEADS * DIM; ++i) {
            seed = seed * 1664525u + 1013904223u;
            numbers[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
        }
        attend.layer = layer;
        attend.queries = &rows;
        attend.out = &o;
        TRY(skerry_step_append(*step, layer, &rows, &rows, NULL, &error));
        TRY(skerry_step_attend(*step, &attend, &error));
    }
    return 0;
}

static uint64_t fingerprint(skerry_cache *cache, skerry_seq seq) {
    uint64_t value = 0;
    return skerry_seq_fingerprint(cache, seq, &value, NULL) < 0 ? 0 : value;
}

static uint64_t used_bytes(skerry_cache *cache) {
    skerry_memory_info memory = SKERRY_DESC(skerry_memory_info);
    return skerry_cache_get_memory(cache, &memory, NULL) < 0 ? 0 : memory.used_full_bytes + memory.used_quantised_bytes;
}

int main(void) {
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[LAYERS];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_seq_info info = SKERRY_DESC(skerry_seq_info);
    skerry_context *context = NULL;
    skerry_cache *cache = NULL;
    skerry_step *step = NULL;
    skerry_seq prompt, answers[2];
    const int32_t chunk = MOST, each[2] = {1, 1}, draft = 5;
    uint64_t state, used;
    int64_t length;
    int i;

    layer.kv_heads = KV_HEADS;
    layer.key_dim = DIM;
    for (i = 0; i < LAYERS; ++i) layers[i] = &layer;
    policy.kind = SKERRY_POLICY_QEVICT;
    budget.share_ppm = 300000;
    budget.length_tokens = 1024;
    desc.layers = layers;
    desc.layer_count = LAYERS;
    desc.policy = &policy;
    desc.budget = &budget;
    desc.max_sequences = 3; /* the budget is for all three; a full copy of each would fit */
    TRY(skerry_context_create(NULL, &context, &error));
    TRY(skerry_cache_create(context, &desc, &cache, &error));
    TRY(skerry_seq_create(cache, &prompt, &error));
    for (i = 0; i < PROMPT / MOST; ++i) {
        if (forward(cache, &prompt, 1, &chunk, (uint32_t)i + 1, &step) != 0) return 1;
        TRY(skerry_step_commit(step, &error));
    }
    state = fingerprint(cache, prompt);
    used = used_bytes(cache);

    /* Two answers that begin with the prompt. Copied is only the window that the next token goes into, one per layer and head. */
    TRY(skerry_seq_fork(cache, prompt, -1, &answers[0], &error));
    TRY(skerry_seq_fork(cache, prompt, -1, &answers[1], &error));
    printf("one sequence uses %lu bytes, with two forks %lu\n", (unsigned long)used, (unsigned long)used_bytes(cache));
    EXPECT(fingerprint(cache, answers[0]) == state && fingerprint(cache, answers[1]) == state);

    /* Both go on, in one step. */
    for (i = 0; i < 40; ++i) {
        if (forward(cache, answers, 2, each, 1000 + (uint32_t)i, &step) != 0) return 1;
        TRY(skerry_step_commit(step, &error));
    }
    printf("after 40 tokens of their own %lu\n", (unsigned long)used_bytes(cache));
    EXPECT(fingerprint(cache, answers[0]) != fingerprint(cache, answers[1]));
    EXPECT(fingerprint(cache, prompt) == state);

    /* Dropping one leaves the others as they are; its id is refused from then on. */
    TRY(skerry_seq_drop(cache, answers[1], &error));
    EXPECT(skerry_seq_get_info(cache, answers[1], &info, &error) == SKERRY_ERROR_STALE_ID);
    EXPECT(fingerprint(cache, prompt) == state);

    /* A draft that fails as a whole: abort, and the step has never been. */
    state = fingerprint(cache, answers[0]);
    if (forward(cache, answers, 1, &draft, 7, &step) != 0) return 1;
    skerry_step_abort(step);
    EXPECT(fingerprint(cache, answers[0]) == state);

    /* A draft of which two tokens are accepted: commit, then cut the rest off. Whether that will be possible is known before the
     * draft is made; a runtime that hears SKERRY_MISS drafts less. */
    TRY(skerry_seq_get_info(cache, answers[0], &info, &error));
    length = info.length_tokens;
    EXPECT(skerry_seq_can_truncate(cache, answers[0], length + 2, draft, &error) == SKERRY_OK);
    if (forward(cache, answers, 1, &draft, 8, &step) != 0) return 1;
    TRY(skerry_step_commit(step, &error));
    TRY(skerry_seq_truncate(cache, answers[0], length + 2, &error));
    TRY(skerry_seq_get_info(cache, answers[0], &info, &error));
    EXPECT(info.length_tokens == length + 2);

    /* What has been compressed cannot be cut in two: the refusal changes nothing and says what is possible. */
    state = fingerprint(cache, answers[0]);
    EXPECT(skerry_seq_truncate(cache, answers[0], 100, &error) == SKERRY_ERROR_ARGUMENT);
    printf("%s\n", error.message);
    EXPECT(error.allowed == info.lowest_truncate && fingerprint(cache, answers[0]) == state);
    TRY(skerry_seq_truncate(cache, answers[0], 0, &error));

    TRY(skerry_cache_check(cache, &error));
    skerry_cache_release(cache);
    skerry_context_release(context);
    return 0;
}
