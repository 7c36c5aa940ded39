/* Resident bytes of a filled cache against the bytes it reports (G17, P111; decisions.md 19): the growth over a baseline that
 * was taken before creation is at most 1.05 times allocated_bytes. Caches hold at least 40 MB: a megabyte of the library's own
 * pages becomes resident in the same time, and would hide what is asked of a small one. Prints the numbers; exits 77 where they
 * cannot be read. */
#include <skerry/skerry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS 6000
#define STEP 200
#define HEADS 8
#define DIM 64
#define MOST_LAYERS 24
#define LEAST_BYTES 40000000u

/* In KB, which getrusage and the files of /proc share; 0: unknown. */
static unsigned long resident_kb(void) {
    char line[256];
    unsigned long kb = 0;
    FILE *file = fopen("/proc/self/status", "r");
    if (file == NULL) return 0;
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "VmRSS: %lu", &kb) == 1) break;
    }
    fclose(file);
    return kb;
}

static int fail(const char *what, const skerry_error *error) {
    fprintf(stderr, "%s: %s\n", what, error->message);
    return 1;
}

static float rows[STEP * HEADS * DIM];
static float out[STEP * HEADS * DIM];

static int run(skerry_policy_kind kind, int layer_count, uint32_t share_ppm, const char *name) {
    skerry_error error = SKERRY_DESC(skerry_error);
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[MOST_LAYERS];
    skerry_policy_desc policy = SKERRY_DESC(skerry_policy_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_memory_info memory = SKERRY_DESC(skerry_memory_info);
    skerry_context *context = NULL;
    skerry_cache *cache = NULL;
    skerry_seq seq;
    skerry_tensor tensor;
    unsigned long before, after;
    uint64_t state = 1;
    int i, j, k, failed;

    layer.kv_heads = HEADS;
    layer.key_dim = DIM;
    for (i = 0; i < layer_count; ++i) layers[i] = &layer;
    policy.kind = kind;
    budget.share_ppm = share_ppm;
    budget.length_tokens = TOKENS;
    desc.layers = layers;
    desc.layer_count = layer_count;
    desc.policy = &policy;
    desc.budget = &budget;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = rows;
    tensor.dtype = SKERRY_DTYPE_F32;
    tensor.rank = 3;
    tensor.shape[0] = STEP;
    tensor.shape[1] = HEADS;
    tensor.shape[2] = DIM;
    tensor.stride[0] = HEADS * DIM;
    tensor.stride[1] = DIM;
    tensor.stride[2] = 1;
    memset(rows, 1, sizeof rows); /* resident before the baseline is taken */
    memset(out, 1, sizeof out);

    before = resident_kb();
    if (before == 0) return 77;
    if (skerry_context_create(NULL, &context, &error) < 0) return fail("context", &error);
    if (skerry_cache_create(context, &desc, &cache, &error) < 0) return fail("cache", &error);
    if (skerry_seq_create(cache, &seq, &error) < 0) return fail("sequence", &error);
    for (i = 0; i < TOKENS / STEP; ++i) {
        const int32_t count = STEP;
        skerry_step_desc step_desc = SKERRY_DESC(skerry_step_desc);
        skerry_step *step = NULL;
        step_desc.seqs = &seq;
        step_desc.token_counts = &count;
        step_desc.seq_count = 1;
        if (skerry_step_begin(cache, &step_desc, &step, &error) < 0) return fail("begin", &error);
        for (k = 0; k < STEP * HEADS * DIM; ++k) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            rows[k] = (float)(state >> 40) / 16777216.0f - 0.5f;
        }
        for (j = 0; j < layer_count; ++j) {
            skerry_attend_desc attend = SKERRY_DESC(skerry_attend_desc);
            skerry_tensor result = tensor;
            if (skerry_step_append(step, j, &tensor, &tensor, NULL, &error) < 0) return fail("append", &error);
            if ((i + j) % 30 != 0) continue; /* scores of one step keep this short */
            result.data = out;
            attend.queries = &tensor;
            attend.out = &result;
            attend.layer = j;
            if (skerry_step_attend(step, &attend, &error) < 0) return fail("attend", &error);
        }
        if (skerry_step_commit(step, &error) < 0) return fail("commit", &error);
    }
    after = resident_kb();
    if (skerry_cache_get_memory(cache, &memory, &error) < 0) return fail("memory", &error);
    failed = (double)(after - before) * 1024.0 > 1.05 * (double)memory.allocated_bytes || memory.allocated_bytes < LEAST_BYTES;
    printf("%s: grew by %lu KB, allocated %lu KB, full cache %lu KB, ratio %.4f%s\n", name, after - before,
           (unsigned long)(memory.allocated_bytes / 1024), (unsigned long)(memory.full_cache_bytes / 1024),
           (double)(after - before) * 1024.0 / (double)memory.allocated_bytes, failed ? " - too much, or too small a cache" : "");
    skerry_cache_release(cache);
    skerry_context_release(context);
    return failed;
}

int main(int argc, char **argv) {
    /* One cache per process: what another left in the allocator would hide growth. */
    if (argc == 2 && strcmp(argv[1], "full") == 0) return run(SKERRY_POLICY_FULL, 4, 1100000, "full");
    if (argc == 2 && strcmp(argv[1], "evict") == 0) return run(SKERRY_POLICY_EVICT, 16, 300000, "evict, 30 %");
    return run(SKERRY_POLICY_QEVICT, MOST_LAYERS, 200000, "qevict, 20 %");
}
