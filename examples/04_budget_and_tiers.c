/* What a budget does: one KV head's history drawn every 128 tokens, each window one letter, while a sequence grows beyond
 * what its bytes can hold; then the budget is halved while the sequence is there.
 *
 *     S sinks   # full precision   8 eight bits   q low bits   . evicted */
#include <stdio.h>

#include <skerry/skerry.h>

enum { KV_HEADS = 2, DIM = 64, CHUNK = 64, TOKENS = 1280 };

static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)

static float keys[CHUNK * KV_HEADS * DIM], values[CHUNK * KV_HEADS * DIM], queries[CHUNK * KV_HEADS * DIM], out[CHUNK * KV_HEADS * DIM];
static long moves_seen;

/* Every move of a committed step. A callback may not call back into the library. */
static void on_moves(void *user, const skerry_transition *moves, int32_t count) {
    (void)moves;
    *(long *)user += count;
}

/* Noise whose keys drift, so that queries prefer some positions to others. */
static void fill(float *numbers, int count, float lean) {
    static uint32_t state = 3;
    int i;
    for (i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = (float)(state >> 8) / 8388608.0f - 1.0f + (i % DIM == 0 ? lean : 0);
    }
}

static skerry_tensor dense(float *data) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 3, {CHUNK, KV_HEADS, DIM, 0}, {KV_HEADS * DIM, DIM, 1, 0}, SKERRY_DEVICE_CPU, 0};
    return tensor;
}

static int forward(skerry_cache *cache, skerry_seq seq, int chunk) {
    const int32_t tokens = CHUNK;
    const skerry_tensor k = dense(keys), v = dense(values), q = dense(queries), o = dense(out);
    skerry_step_desc desc = SKERRY_DESC(skerry_step_desc);
    skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
    skerry_step *step = NULL;
    desc.seqs = &seq;
    desc.token_counts = &tokens;
    desc.seq_count = 1;
    fill(keys, CHUNK * KV_HEADS * DIM, chunk % 5 == 1 ? 6.0f : 0);
    fill(values, CHUNK * KV_HEADS * DIM, 0);
    fill(queries, CHUNK * KV_HEADS * DIM, 4.0f);
    attend.queries = &q;
    attend.out = &o;
    TRY(skerry_step_begin(cache, &desc, &step, &error));
    TRY(skerry_step_append(step, 0, &k, &v, NULL, &error));
    TRY(skerry_step_attend(step, &attend, &error));
    TRY(skerry_step_commit(step, &error));
    return 0;
}

/* One letter per window of 16 tokens. Returns the tokens that can still be read, or -1. */
static long draw(skerry_cache *cache, skerry_seq seq, const char *label) {
    static skerry_range ranges[256];
    int32_t count = 0, i;
    int64_t p, readable = 0, expected = 0;
    if (skerry_seq_list_ranges(cache, seq, 0, 0, ranges, 256, &count, &error) != SKERRY_OK) return -1;
    printf("%-10s ", label);
    for (i = 0; i < count; ++i) {
        const skerry_range *r = &ranges[i];
        const char letter = r->tier == SKERRY_TIER_EVICTED         ? '.'
                            : r->tier == SKERRY_TIER_QUANTISED     ? 'q'
                            : r->begin == 0                        ? 'S'
                            : r->key_format == SKERRY_FORMAT_R8 ? '8'
                                                                   : '#';
        if (r->begin != expected) return -1; /* ranges have no gaps */
        expected = r->end;
        if (letter != '.') readable += r->end - r->begin;
        for (p = r->begin; p < r->end; p += 16) putchar(letter);
    }
    putchar('\n');
    return (long)readable;
}

int main(void) {
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[1];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_callbacks_desc callbacks = SKERRY_DESC(skerry_callbacks_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_plan_info plan = SKERRY_DESC(skerry_plan_info);
    skerry_memory_info memory = SKERRY_DESC(skerry_memory_info);
    skerry_counters counters = SKERRY_DESC(skerry_counters);
    skerry_context *context = NULL;
    skerry_cache *cache = NULL;
    skerry_seq seq;
    char label[32];
    long before, after;
    int i;

    layer.kv_heads = KV_HEADS;
    layer.key_dim = DIM;
    layers[0] = &layer;
    policy.kind = SKERRY_POLICY_QEVICT;
    policy.quantised_share_ppm = 600000; /* of the history's bytes; the rest holds windows at eight bits */
    callbacks.user = &moves_seen;
    callbacks.transitions = on_moves;
    desc.layers = layers;
    desc.layer_count = 1;
    desc.policy = &policy;
    desc.budget = &budget;
    desc.callbacks = &callbacks;
    desc.max_step_tokens = CHUNK;
    TRY(skerry_context_create(NULL, &context, &error));

    /* A budget below sinks, recent tokens and tables is refused, and the refusal names the least that is accepted. */
    budget.bytes = 1000;
    if (skerry_cache_create(context, &desc, &cache, &error) != SKERRY_ERROR_OVER_BUDGET) return 1;
    printf("%s\n", error.message);

    budget.bytes = (uint64_t)error.allowed * 3;
    TRY(skerry_cache_plan(context, &desc, &plan, &error));
    printf("%lu bytes: per KV head %d windows at eight bits and %d in low bits beside sinks and recent tokens\n",
           (unsigned long)budget.bytes, plan.full_windows, plan.quantised_windows);
    TRY(skerry_cache_create(context, &desc, &cache, &error));
    TRY(skerry_seq_create(cache, &seq, &error));
    for (i = 1; i <= TOKENS / CHUNK; ++i) {
        if (forward(cache, seq, i) != 0) return 1;
        TRY(skerry_cache_get_memory(cache, &memory, &error));
        if (memory.pool_bytes + memory.table_bytes > budget.bytes) return 1;
        sprintf(label, "%d", i * CHUNK);
        if (i % 2 == 0 && draw(cache, seq, label) < 0) return 1;
    }
    before = draw(cache, seq, "in full");

    budget.bytes /= 2;
    TRY(skerry_cache_set_budget(cache, &budget, &error));
    after = draw(cache, seq, "halved");
    TRY(skerry_cache_get_memory(cache, &memory, &error));
    TRY(skerry_cache_get_counters(cache, &counters, &error));
    printf("%ld tokens readable, then %ld; pool and tables %lu of %lu bytes\n", before, after,
           (unsigned long)(memory.pool_bytes + memory.table_bytes), (unsigned long)budget.bytes);
    printf("%lu demotions, %lu promotions, %lu evictions; the callback was told of %ld moves\n", (unsigned long)counters.demotions,
           (unsigned long)counters.promotions, (unsigned long)counters.evictions, moves_seen);
    TRY(skerry_cache_check(cache, &error));
    skerry_cache_release(cache);
    skerry_context_release(context);
    if (memory.pool_bytes + memory.table_bytes > budget.bytes) return 1;
    return after > 0 && after < before && before < TOKENS && moves_seen > 0 ? 0 : 1;
}
