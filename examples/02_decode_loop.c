/* The decode loop of a runtime that leaves attention to the library: a prompt in chunks, then one token at a time.
 *
 * Checks two things at the end: without compression the result is plain attention; with it, the stored bytes do not
 * depend on how the prompt was cut into chunks. */
#include <math.h>
#include <stdio.h>

#include <skerry/skerry.h>

enum { LAYERS = 2, KV_HEADS = 2, QUERY_HEADS = 6, DIM = 32, PROMPT = 300, GENERATED = 60, MOST = 128 };
enum { KEY, VALUE, QUERY };

static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)

/* Stands for the model: numbers that depend on their place alone, so that two runs see the same ones. */
static float number(int kind, int layer, int head, int64_t position, int channel) {
    uint32_t x = (uint32_t)(position * 4096 + head * 64 + channel) * 2654435761u + (uint32_t)(kind * 16 + layer) * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    x *= 3266489917u;
    return (float)((x ^ x >> 16) >> 8) / 8388608.0f - 1.0f;
}

/* This runtime keeps heads outermost: [heads][MOST][DIM]. The library takes [tokens, heads, DIM] with any strides, so
 * nothing has to be moved. */
static float keys[KV_HEADS][MOST][DIM], values[KV_HEADS][MOST][DIM];
static float queries[QUERY_HEADS][MOST][DIM], out[QUERY_HEADS][MOST][DIM];

static skerry_tensor heads_outermost(void *data, int32_t tokens, int32_t heads) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 3, {0}, {0}, SKERRY_DEVICE_CPU, 0};
    tensor.shape[0] = tokens;
    tensor.shape[1] = heads;
    tensor.shape[2] = DIM;
    tensor.stride[0] = DIM;
    tensor.stride[1] = (int64_t)MOST * DIM;
    tensor.stride[2] = 1;
    return tensor;
}

static void project(int layer, int64_t position, int32_t tokens) {
    int h, t, c;
    for (t = 0; t < tokens; ++t) {
        for (c = 0; c < DIM; ++c) {
            for (h = 0; h < KV_HEADS; ++h) {
                keys[h][t][c] = number(KEY, layer, h, position + t, c);
                values[h][t][c] = number(VALUE, layer, h, position + t, c);
            }
            for (h = 0; h < QUERY_HEADS; ++h) queries[h][t][c] = number(QUERY, layer, h, position + t, c);
        }
    }
}

/* One pass of the model over `tokens` new tokens. */
static int forward(skerry_cache *cache, skerry_seq seq, int64_t position, int32_t tokens) {
    skerry_step_desc desc = SKERRY_DESC(skerry_step_desc);
    skerry_step *step = NULL;
    int layer;
    desc.seqs = &seq;
    desc.token_counts = &tokens;
    desc.positions = &position; /* checked: a runtime that lost count is told so before anything happens */
    desc.seq_count = 1;
    TRY(skerry_step_begin(cache, &desc, &step, &error));
    for (layer = 0; layer < LAYERS; ++layer) {
        const skerry_tensor k = heads_outermost(keys, tokens, KV_HEADS), v = heads_outermost(values, tokens, KV_HEADS);
        const skerry_tensor q = heads_outermost(queries, tokens, QUERY_HEADS), o = heads_outermost(out, tokens, QUERY_HEADS);
        skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
        project(layer, position, tokens);
        attend.layer = layer;
        attend.queries = &q;
        attend.out = &o;
        if (skerry_step_append(step, layer, &k, &v, NULL, &error) < 0 || skerry_step_attend(step, &attend, &error) < 0) {
            fprintf(stderr, "layer %d: %s\n", layer, error.message);
            skerry_step_abort(step); /* the sequence is as it was before */
            return 1;
        }
    }
    TRY(skerry_step_commit(step, &error));
    return 0;
}

/* Reads the prompt in chunks of at most `chunk` tokens and generates. `out` holds the last token's result afterwards. */
static int run(skerry_context *context, skerry_policy_kind kind, int32_t chunk, uint64_t *fingerprint) {
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[LAYERS];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_cache *cache = NULL;
    skerry_seq seq;
    int64_t position = 0;
    int i;

    layer.kv_heads = KV_HEADS;
    layer.query_heads = QUERY_HEADS; /* three query heads read one KV head */
    layer.key_dim = DIM;
    for (i = 0; i < LAYERS; ++i) layers[i] = &layer;
    policy.kind = kind;
    budget.share_ppm = 300000;
    budget.length_tokens = PROMPT + GENERATED;
    desc.layers = layers;
    desc.layer_count = LAYERS;
    desc.policy = &policy;
    if (kind != SKERRY_POLICY_FULL) desc.budget = &budget;
    desc.store_dtype = SKERRY_DTYPE_F32; /* so that the comparison below is one of arithmetic, not of rounding */
    desc.max_step_tokens = MOST;

    TRY(skerry_cache_create(context, &desc, &cache, &error));
    TRY(skerry_seq_create(cache, &seq, &error));
    while (position < PROMPT) {
        const int32_t tokens = PROMPT - position < chunk ? (int32_t)(PROMPT - position) : chunk;
        if (forward(cache, seq, position, tokens) != 0) return 1;
        position += tokens;
    }
    for (; position < PROMPT + GENERATED; ++position) {
        if (forward(cache, seq, position, 1) != 0) return 1;
    }
    TRY(skerry_seq_fingerprint(cache, seq, fingerprint, &error));
    skerry_cache_release(cache);
    return 0;
}

/* Largest difference between `out` and attention written out, for the last token in the last layer. */
static double worst_error(void) {
    const int layer = LAYERS - 1;
    const int64_t last = PROMPT + GENERATED - 1;
    double worst = 0;
    int h, c;
    for (h = 0; h < QUERY_HEADS; ++h) {
        const int kv = h / (QUERY_HEADS / KV_HEADS);
        double sum = 0, result[DIM] = {0};
        int64_t p;
        for (p = 0; p <= last; ++p) {
            double logit = 0, weight;
            for (c = 0; c < DIM; ++c) logit += (double)number(QUERY, layer, h, last, c) * (double)number(KEY, layer, kv, p, c);
            weight = exp(logit / sqrt(DIM));
            sum += weight;
            for (c = 0; c < DIM; ++c) result[c] += weight * (double)number(VALUE, layer, kv, p, c);
        }
        for (c = 0; c < DIM; ++c) worst = fmax(worst, fabs(result[c] / sum - (double)out[h][0][c]));
    }
    return worst;
}

int main(void) {
    skerry_context *context = NULL;
    uint64_t full, one, other;
    double difference;

    TRY(skerry_context_create(NULL, &context, &error));
    if (run(context, SKERRY_POLICY_FULL, MOST, &full) != 0) return 1;
    difference = worst_error();
    printf("full cache against plain attention: %.1e\n", difference);

    if (run(context, SKERRY_POLICY_QEVICT, MOST, &one) != 0) return 1;
    if (run(context, SKERRY_POLICY_QEVICT, 37, &other) != 0) return 1;
    printf("30 %% of the bytes, chunks of %d and of 37 tokens: %s\n", MOST, one == other ? "the same bytes" : "DIFFERENT");
    skerry_context_release(context);
    return difference < 1e-5 && one == other ? 0 : 1;
}
