/* A runtime that keeps its own attention: the library stores and decides, `gather` hands out what is readable, and the
 * runtime reports the probabilities it saw with `observe`, since routing lives on them.
 *
 * The same sequence runs beside it with the library's attention; results and the tier of every window must agree. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <skerry/skerry.h>

enum { KV_HEADS = 2, GROUP = 3, QUERY_HEADS = KV_HEADS * GROUP, DIM = 32, TOKENS = 400, MOST = 64 };

static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)

static float keys[MOST][KV_HEADS][DIM], values[MOST][KV_HEADS][DIM], queries[MOST][QUERY_HEADS][DIM];
static float ours[MOST][QUERY_HEADS][DIM], theirs[MOST][QUERY_HEADS][DIM];

/* What gather fills, and the probabilities of one KV head: [rows][tokens]. */
static float read_keys[TOKENS][DIM], read_values[TOKENS][DIM];
static int64_t read_positions[TOKENS];
static float masses[MOST * TOKENS];

static void fill(float *numbers, int count) {
    static uint32_t state = 7;
    int i;
    for (i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = ((float)(state >> 8) / 8388608.0f - 1.0f) * 1.7f;
    }
}

static skerry_tensor dense(void *data, int64_t a, int64_t b) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 3, {0}, {0}, SKERRY_DEVICE_CPU, 0};
    tensor.shape[0] = a;
    tensor.shape[1] = b;
    tensor.shape[2] = DIM;
    tensor.stride[0] = b * DIM;
    tensor.stride[1] = DIM;
    tensor.stride[2] = 1;
    return tensor;
}

static skerry_tensor matrix(void *data, int64_t rows) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 2, {0}, {0}, SKERRY_DEVICE_CPU, 0};
    tensor.shape[0] = rows;
    tensor.shape[1] = DIM;
    tensor.stride[0] = DIM;
    tensor.stride[1] = 1;
    return tensor;
}

/* Softmax attention of one query over the gathered tokens that it may see; adds its probabilities to `mass`. */
static void attend_row(const float *query, int64_t position, int32_t count, float *result, float *mass) {
    static float weights[TOKENS];
    float most = -INFINITY, sum = 0;
    int32_t i, c;
    for (i = 0; i < count; ++i) {
        float dot = 0;
        weights[i] = -INFINITY;
        if (read_positions[i] > position) continue; /* later tokens of the same step */
        for (c = 0; c < DIM; ++c) dot += query[c] * read_keys[i][c];
        weights[i] = dot / sqrtf(DIM);
        most = fmaxf(most, weights[i]);
    }
    for (i = 0; i < count; ++i) sum += weights[i] = expf(weights[i] - most);
    memset(result, 0, DIM * sizeof(float));
    for (i = 0; i < count; ++i) {
        weights[i] /= sum;
        for (c = 0; c < DIM; ++c) result[c] += weights[i] * read_values[i][c];
        mass[i] += weights[i] / GROUP; /* observe wants the mean over the query heads that share the KV head */
    }
}

static int own_attention(skerry_step *step, int64_t position, int32_t rows) {
    int h, g, r;
    for (h = 0; h < KV_HEADS; ++h) {
        skerry_gather_desc gather = SKERRY_DESC(skerry_gather_desc);
        skerry_observe_desc observe = SKERRY_DESC(skerry_observe_desc);
        const skerry_tensor k = matrix(read_keys, TOKENS), v = matrix(read_values, TOKENS);
        skerry_tensor q = dense(&queries[0][h * GROUP][0], rows, GROUP);
        int32_t count = 0;
        q.stride[0] = QUERY_HEADS * DIM;
        /* Per KV head, because heads keep different tokens. */
        gather.kv_head = h;
        gather.keys = &k;
        gather.values = &v;
        gather.positions = read_positions;
        TRY(skerry_step_gather(step, &gather, &count, &error));
        memset(masses, 0, sizeof(float) * (size_t)(rows * count));
        for (r = 0; r < rows; ++r) {
            for (g = 0; g < GROUP; ++g) {
                attend_row(queries[r][h * GROUP + g], position + r, count, ours[r][h * GROUP + g], masses + r * count);
            }
        }
        observe.kv_head = h;
        observe.masses = masses;
        observe.token_count = count;
        observe.queries = &q; /* optional: lets the codec spend its bits on the channels that queries use */
        TRY(skerry_step_observe(step, &observe, &error));
    }
    return 0;
}

static int open_cache(skerry_context *context, skerry_cache **cache, skerry_seq *seq) {
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[1];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    layer.kv_heads = KV_HEADS;
    layer.query_heads = QUERY_HEADS;
    layer.key_dim = DIM;
    layers[0] = &layer;
    policy.kind = SKERRY_POLICY_QEVICT;
    budget.share_ppm = 350000;
    budget.length_tokens = TOKENS;
    desc.flags = SKERRY_CACHE_EXACT_ATTEND; /* float32 in the library as well: what differs is the order of sums */
    desc.layers = layers;
    desc.layer_count = 1;
    desc.policy = &policy;
    desc.budget = &budget;
    desc.max_step_tokens = MOST;
    TRY(skerry_cache_create(context, &desc, cache, &error));
    TRY(skerry_seq_create(*cache, seq, &error));
    return 0;
}

static int same_tiers(skerry_cache *a, skerry_seq seq_a, skerry_cache *b, skerry_seq seq_b) {
    static skerry_range in_a[64], in_b[64];
    int h, i, moved = 0;
    for (h = 0; h < KV_HEADS; ++h) {
        int32_t count_a = 0, count_b = 0;
        TRY(skerry_seq_list_ranges(a, seq_a, 0, h, in_a, 64, &count_a, &error));
        TRY(skerry_seq_list_ranges(b, seq_b, 0, h, in_b, 64, &count_b, &error));
        if (count_a != count_b) return 1;
        for (i = 0; i < count_a; ++i) {
            if (in_a[i].begin != in_b[i].begin || in_a[i].end != in_b[i].end || in_a[i].tier != in_b[i].tier) return 1;
            moved += in_a[i].tier != SKERRY_TIER_FULL;
        }
    }
    printf("%d ranges in low bits or evicted, the same ones both ways\n", moved);
    return moved == 0; /* nothing moved: the comparison would say nothing */
}

int main(void) {
    skerry_context *context = NULL;
    skerry_cache *with_ours = NULL, *with_theirs = NULL;
    skerry_seq seq_ours, seq_theirs;
    int64_t position = 0;
    double worst = 0;

    TRY(skerry_context_create(NULL, &context, &error));
    if (open_cache(context, &with_ours, &seq_ours) != 0 || open_cache(context, &with_theirs, &seq_theirs) != 0) return 1;
    while (position < TOKENS) {
        skerry_seq_info info = SKERRY_DESC(skerry_seq_info);
        skerry_step_desc step_desc = SKERRY_DESC(skerry_step_desc);
        skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
        skerry_step *step = NULL;
        skerry_tensor k, v, q, o;
        int32_t rows = MOST;
        int i;

        /* Windows move at fixed positions. Inside a step only the library's own attend can follow them, so a step of ours
         * ends at the next such position or before. */
        TRY(skerry_seq_get_info(with_ours, seq_ours, &info, &error));
        if (info.next_event_position > 0 && info.next_event_position - position < rows) {
            rows = (int32_t)(info.next_event_position - position);
        }
        if (TOKENS - position < rows) rows = (int32_t)(TOKENS - position);
        fill(&keys[0][0][0], rows * KV_HEADS * DIM);
        fill(&values[0][0][0], rows * KV_HEADS * DIM);
        fill(&queries[0][0][0], rows * QUERY_HEADS * DIM);
        k = dense(keys, rows, KV_HEADS);
        v = dense(values, rows, KV_HEADS);
        q = dense(queries, rows, QUERY_HEADS);
        o = dense(theirs, rows, QUERY_HEADS);
        step_desc.token_counts = &rows;
        step_desc.seq_count = 1;

        step_desc.seqs = &seq_ours;
        TRY(skerry_step_begin(with_ours, &step_desc, &step, &error));
        TRY(skerry_step_append(step, 0, &k, &v, NULL, &error));
        if (own_attention(step, position, rows) != 0) return 1;
        TRY(skerry_step_commit(step, &error));

        step_desc.seqs = &seq_theirs;
        TRY(skerry_step_begin(with_theirs, &step_desc, &step, &error));
        TRY(skerry_step_append(step, 0, &k, &v, NULL, &error));
        attend.queries = &q;
        attend.out = &o;
        TRY(skerry_step_attend(step, &attend, &error));
        TRY(skerry_step_commit(step, &error));

        for (i = 0; i < rows * QUERY_HEADS * DIM; ++i) {
            worst = fmax(worst, fabs((double)(&ours[0][0][0])[i] - (double)(&theirs[0][0][0])[i]));
        }
        position += rows;
    }
    printf("largest difference between the two attentions: %.1e\n", worst);
    if (same_tiers(with_ours, seq_ours, with_theirs, seq_theirs) != 0) return 1;
    skerry_cache_release(with_ours);
    skerry_cache_release(with_theirs);
    skerry_context_release(context);
    return worst < 1e-5 ? 0 : 1;
}
