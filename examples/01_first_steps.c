/* First steps: one sequence of a model with four layers, held to a quarter of the bytes that its full cache would take.
 *
 * A real runtime has keys, values and queries from its model. Here they are noise, which is enough to see what
 * belongs to whom and what every call costs in bytes. */
#include <stdio.h>

#include <skerry/skerry.h>

enum { LAYERS = 4, KV_HEADS = 2, QUERY_HEADS = 8, DIM = 64, PROMPT = 1024, CHUNK = 128 };

static float keys[CHUNK * KV_HEADS * DIM], values[CHUNK * KV_HEADS * DIM];
static float queries[CHUNK * QUERY_HEADS * DIM], out[CHUNK * QUERY_HEADS * DIM];

/* A call that may fail writes one sentence about it. */
static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)

static void fill(float *numbers, int count) {
    static uint32_t state = 1;
    int i;
    for (i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}

/* [tokens, heads, DIM], one after the other. Any other strides do as well: see 02_decode_loop.c. */
static skerry_tensor dense(float *data, int64_t tokens, int64_t heads) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 3, {0}, {0}, SKERRY_DEVICE_CPU, 0};
    tensor.shape[0] = tokens;
    tensor.shape[1] = heads;
    tensor.shape[2] = DIM;
    tensor.stride[0] = heads * DIM;
    tensor.stride[1] = DIM;
    tensor.stride[2] = 1;
    return tensor;
}

int main(void) {
    /* Every desc starts as zeroes, and zero in a field means the default. */
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[LAYERS];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_memory_info memory = SKERRY_DESC(skerry_memory_info);
    skerry_seq_info info = SKERRY_DESC(skerry_seq_info);
    skerry_context *context = NULL;
    skerry_cache *cache = NULL;
    skerry_seq seq;
    int i, j;

    /* The loaded library may be another build than the headers. */
    if (!SKERRY_VERSION_CHECK()) return 1;
    printf("%s\n", skerry_build_text());

    layer.kv_heads = KV_HEADS;
    layer.query_heads = QUERY_HEADS;
    layer.key_dim = DIM;
    for (i = 0; i < LAYERS; ++i) layers[i] = &layer;
    policy.kind = SKERRY_POLICY_QEVICT;
    budget.share_ppm = 250000;
    budget.length_tokens = PROMPT;
    desc.layers = layers;
    desc.layer_count = LAYERS;
    desc.policy = &policy;
    desc.budget = &budget;

    TRY(skerry_context_create(NULL, &context, &error));
    TRY(skerry_cache_create(context, &desc, &cache, &error));
    TRY(skerry_seq_create(cache, &seq, &error));

    for (i = 0; i < PROMPT / CHUNK; ++i) {
        const int32_t tokens = CHUNK;
        skerry_step_desc step_desc = SKERRY_DESC(skerry_step_desc);
        skerry_step *step = NULL;
        step_desc.seqs = &seq;
        step_desc.token_counts = &tokens;
        step_desc.seq_count = 1;
        /* Reserves all that the step can need. From here on only wrong arguments fail, and no memory is allocated. */
        TRY(skerry_step_begin(cache, &step_desc, &step, &error));
        for (j = 0; j < LAYERS; ++j) {
            const skerry_tensor k = dense(keys, CHUNK, KV_HEADS), v = dense(values, CHUNK, KV_HEADS);
            const skerry_tensor q = dense(queries, CHUNK, QUERY_HEADS), o = dense(out, CHUNK, QUERY_HEADS);
            skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
            fill(keys, CHUNK * KV_HEADS * DIM);
            fill(values, CHUNK * KV_HEADS * DIM);
            fill(queries, CHUNK * QUERY_HEADS * DIM);
            TRY(skerry_step_append(step, j, &k, &v, NULL, &error));
            attend.layer = j;
            attend.queries = &q;
            attend.out = &o;
            TRY(skerry_step_attend(step, &attend, &error));
        }
        /* Until here nothing has happened to the sequence; skerry_step_abort would undo the step. */
        TRY(skerry_step_commit(step, &error));
    }

    TRY(skerry_seq_get_info(cache, seq, &info, &error));
    TRY(skerry_cache_get_memory(cache, &memory, &error));
    printf("%ld tokens; of those of all layers and heads: %ld in full, %ld in low bits, %ld evicted\n", (long)info.length_tokens,
           (long)info.full_tokens, (long)info.quantised_tokens, (long)info.evicted_tokens);
    printf("full cache %lu bytes, budget %lu, pool and tables %lu; staging %lu on top\n", (unsigned long)memory.full_cache_bytes,
           (unsigned long)memory.budget_bytes, (unsigned long)(memory.pool_bytes + memory.table_bytes),
           (unsigned long)memory.staging_bytes);

    skerry_cache_release(cache);
    skerry_context_release(context);
    return memory.pool_bytes + memory.table_bytes <= memory.budget_bytes && info.length_tokens == PROMPT ? 0 : 1;
}
