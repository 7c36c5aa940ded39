/* Attention in two places: the host attends to full-precision tokens where they lie, with a kernel of its own, the library to the
 * low-bit ones; results are merged by their log-sum-exp, which then goes back to the library so that it can score.
 *
 * The host's kernel reads what skerry_step_view lists: no copy is made. Checked against the library's attention over everything. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <skerry/skerry.h>

enum { KV_HEADS = 2, GROUP = 2, QUERY_HEADS = KV_HEADS * GROUP, DIM = 64, TOKENS = 320, MOST_PARTS = 64 };

static skerry_error error = SKERRY_DESC(skerry_error);
#define TRY(call) \
    do { \
        if ((call) < 0) { \
            fprintf(stderr, "%s: %s\n", skerry_status_name(error.status), error.message); \
            return 1; \
        } \
    } while (0)

static float keys[KV_HEADS * DIM], values[KV_HEADS * DIM], queries[QUERY_HEADS * DIM];
static float low[QUERY_HEADS * DIM], low_lse[QUERY_HEADS], whole[QUERY_HEADS * DIM], merged[QUERY_HEADS * DIM], merged_lse[QUERY_HEADS];

static void fill(float *numbers, int count) {
    static uint32_t state = 11;
    int i;
    for (i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = ((float)(state >> 8) / 8388608.0f - 1.0f) * 1.5f;
    }
}

/* One token, `heads` rows of `width` numbers; width 1 is a vector. */
static skerry_tensor row(float *data, int64_t heads, int64_t width) {
    skerry_tensor tensor = {data, 0, SKERRY_DTYPE_F32, 0, {1, 0, 0, 0}, {0}, SKERRY_DEVICE_CPU, 0};
    tensor.rank = width == 1 ? 2 : 3;
    tensor.shape[1] = heads;
    tensor.shape[2] = width;
    tensor.stride[0] = heads * width;
    tensor.stride[1] = width;
    tensor.stride[2] = 1;
    return tensor;
}

/* Sum of exp(logit - most) * value over the parts, and log of the sum of exp(logit). */
static void host_attend(const skerry_part *parts, int32_t count, const float *query, float *result, float *lse) {
    float most = -INFINITY, sum = 0;
    int32_t i, t, c;
    memset(result, 0, DIM * sizeof(float));
    for (i = 0; i < count; ++i) {
        const float *k = (const float *)parts[i].keys; /* [DIM][capacity]: a token's numbers lie apart, tokens side by side */
        const float *v = (const float *)parts[i].values; /* [capacity][DIM] */
        for (t = 0; t < parts[i].tokens; ++t) {
            float logit = 0, weight;
            for (c = 0; c < DIM; ++c) logit += query[c] * k[c * parts[i].capacity + t];
            logit /= sqrtf(DIM);
            if (logit > most) {
                const float shrink = expf(most - logit);
                sum *= shrink;
                for (c = 0; c < DIM; ++c) result[c] *= shrink;
                most = logit;
            }
            weight = expf(logit - most);
            sum += weight;
            for (c = 0; c < DIM; ++c) result[c] += weight * v[t * DIM + c];
        }
    }
    for (c = 0; c < DIM; ++c) result[c] /= sum;
    *lse = most + logf(sum);
}

int main(void) {
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[1];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_seq_info info = SKERRY_DESC(skerry_seq_info);
    skerry_diagnostics diagnostics = SKERRY_DESC(skerry_diagnostics);
    skerry_context *context = NULL;
    skerry_cache *cache = NULL;
    skerry_seq seq;
    double worst = 0;
    int i, h, g, c;

    layer.kv_heads = KV_HEADS;
    layer.query_heads = QUERY_HEADS;
    layer.key_dim = DIM;
    layers[0] = &layer;
    policy.kind = SKERRY_POLICY_QEVICT;
    policy.full_format = SKERRY_FORMAT_F32; /* every part of the full tier is plain float32, as this host's kernel wants it */
    budget.share_ppm = 250000;
    budget.length_tokens = TOKENS;
    desc.flags = SKERRY_CACHE_EXACT_ATTEND;
    desc.layers = layers;
    desc.layer_count = 1;
    desc.policy = &policy;
    desc.budget = &budget;
    desc.store_dtype = SKERRY_DTYPE_F32;
    desc.max_step_tokens = 1;
    TRY(skerry_context_create(NULL, &context, &error));
    TRY(skerry_cache_create(context, &desc, &cache, &error));
    TRY(skerry_seq_create(cache, &seq, &error));

    for (i = 0; i < TOKENS; ++i) {
        const int32_t tokens = 1;
        const skerry_tensor k = row(keys, KV_HEADS, DIM), v = row(values, KV_HEADS, DIM), q = row(queries, QUERY_HEADS, DIM);
        const skerry_tensor low_out = row(low, QUERY_HEADS, DIM), low_sums = row(low_lse, QUERY_HEADS, 1);
        const skerry_tensor whole_out = row(whole, QUERY_HEADS, DIM);
        skerry_step_desc step_desc = SKERRY_DESC(skerry_step_desc);
        skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
        skerry_step *step = NULL;
        fill(keys, KV_HEADS * DIM);
        fill(values, KV_HEADS * DIM);
        fill(queries, QUERY_HEADS * DIM);
        step_desc.seqs = &seq;
        step_desc.token_counts = &tokens;
        step_desc.seq_count = 1;
        TRY(skerry_step_begin(cache, &step_desc, &step, &error));
        TRY(skerry_step_append(step, 0, &k, &v, NULL, &error));

        /* The library's part. It does not score: it does not know yet what the probabilities are. */
        attend.queries = &q;
        attend.out = &low_out;
        attend.lse = &low_sums;
        attend.tiers = SKERRY_TIERS_QUANTISED;
        TRY(skerry_step_attend(step, &attend, &error));

        for (h = 0; h < KV_HEADS; ++h) {
            static skerry_part parts[MOST_PARTS];
            skerry_observe_desc observe = SKERRY_DESC(skerry_observe_desc);
            const skerry_tensor group = row(queries + h * GROUP * DIM, GROUP, DIM);
            int32_t count = 0;
            TRY(skerry_step_view(step, 0, 0, h, SKERRY_TIERS_FULL, parts, MOST_PARTS, &count, &error));
            for (g = h * GROUP; g < (h + 1) * GROUP; ++g) {
                float full[DIM], full_lse, most, share;
                host_attend(parts, count, queries + g * DIM, full, &full_lse);
                /* Before anything is in low bits, low_lse is minus infinity and its share 0. */
                most = fmaxf(full_lse, low_lse[g]);
                merged_lse[g] = most + logf(expf(full_lse - most) + expf(low_lse[g] - most));
                share = expf(low_lse[g] - merged_lse[g]);
                for (c = 0; c < DIM; ++c) merged[g * DIM + c] = (1 - share) * full[c] + share * low[g * DIM + c];
            }
            observe.kv_head = h;
            observe.queries = &group;
            observe.merged_lse = merged_lse + h * GROUP;
            TRY(skerry_step_observe(step, &observe, &error));
        }

        /* For comparison: everything by the library. A second scoring would be refused, so it is asked not to. */
        attend.flags = SKERRY_ATTEND_NO_SCORE;
        attend.out = &whole_out;
        attend.lse = NULL;
        attend.tiers = 0;
        TRY(skerry_step_attend(step, &attend, &error));
        for (c = 0; c < QUERY_HEADS * DIM; ++c) worst = fmax(worst, fabs((double)merged[c] - (double)whole[c]));
        TRY(skerry_step_commit(step, &error));
    }
    TRY(skerry_seq_get_info(cache, seq, &info, &error));
    TRY(skerry_seq_get_diagnostics(cache, seq, -1, &diagnostics, &error));
    printf("%ld tokens in low bits, which got %.0f %% of the attention; largest difference %.1e\n", (long)info.quantised_tokens,
           100 * diagnostics.quantised_mass, worst);
    skerry_cache_release(cache);
    skerry_context_release(context);
    return worst < 1e-5 && info.quantised_tokens > 0 && diagnostics.quantised_mass > 0.1 ? 0 : 1;
}
