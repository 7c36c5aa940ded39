# SPDX-License-Identifier: MIT
# Generated from include/skerry/ by bindings/python/generate.py; edit the headers instead.
"""Declarations and constants of the C interface."""

CDEF = '''
typedef int32_t skerry_status;
typedef struct skerry_error {
    uint32_t struct_size;
    skerry_status status;
    uint32_t subject;
    int32_t index;
    int64_t found;
    int64_t allowed;
    char message[232];
} skerry_error;
const char *skerry_status_name(skerry_status status);
const char *skerry_status_text(skerry_status status);
int32_t skerry_version(void);
const char *skerry_build_text(void);
typedef struct skerry_allocator {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t alignment);
    void(*release)(void *user, void *memory, size_t size, size_t alignment);
} skerry_allocator;
typedef int32_t skerry_log_level;
typedef void(*skerry_log_fn)(void *user, skerry_log_level level, const char *part, const char *line);
typedef void(*skerry_task_fn)(void *task, int32_t index);
typedef int32_t(*skerry_parallel_for_fn)(void *user, skerry_task_fn task_fn, void *task, int32_t count);
typedef void(*skerry_transfer_fn)(void *user, void *to, const void *from, size_t bytes);
typedef int32_t skerry_dtype;
typedef int32_t skerry_device_type;
typedef struct skerry_tensor {
    void *data;
    uint64_t byte_offset;
    skerry_dtype dtype;
    int32_t rank;
    int64_t shape[4];
    int64_t stride[4];
    skerry_device_type device_type;
    int32_t device_index;
} skerry_tensor;
typedef struct skerry_stream {
    void *handle;
    skerry_device_type device_type;
    int32_t device_index;
} skerry_stream;
typedef struct skerry_context skerry_context;
typedef struct skerry_context_desc {
    uint32_t struct_size;
    uint32_t flags;
    skerry_allocator allocator;
    skerry_log_fn log_fn;
    void *log_user;
    skerry_parallel_for_fn parallel_for;
    void *parallel_user;
    skerry_log_level log_level;
    uint32_t worker_count;
    uint32_t cpu_disable;
    uint32_t transfer_threads;
    skerry_transfer_fn transfer;
    void *transfer_user;
} skerry_context_desc;
typedef struct skerry_device_info {
    uint32_t struct_size;
    skerry_device_type type;
    int32_t index;
    uint32_t cpu_features;
    uint32_t worker_count;
    uint32_t reserved;
    char name[64];
} skerry_device_info;
skerry_status skerry_context_create(const skerry_context_desc *desc, skerry_context **out, skerry_error *error);
skerry_context *skerry_context_retain(skerry_context *context);
void skerry_context_release(skerry_context *context);
skerry_status skerry_context_get_device(skerry_context *context, int32_t index, skerry_device_info *info, skerry_error *error);
typedef struct skerry_context_bytes {
    uint64_t context_bytes;
    uint64_t cache_bytes;
    uint64_t object_count;
} skerry_context_bytes;
skerry_status skerry_context_get_bytes(skerry_context *context, skerry_context_bytes *bytes, skerry_error *error);
typedef struct skerry_router skerry_router;
typedef int32_t skerry_router_form;
typedef int32_t skerry_router_pooling;
typedef struct skerry_router_desc {
    uint32_t struct_size;
    uint32_t flags;
    const void *data;
    uint64_t bytes;
    const char *path;
} skerry_router_desc;
typedef struct skerry_router_info {
    uint32_t struct_size;
    uint32_t flags;
    uint64_t parameters;
    uint64_t weight_bytes;
    int64_t training_step;
    int32_t layers;
    int32_t query_heads;
    int32_t kv_heads;
    int32_t key_dim;
    int32_t summary_dim;
    int32_t rank_max;
    skerry_router_form form;
    skerry_router_pooling pooling;
    int32_t centroids;
    uint32_t reserved;
    char model[128];
} skerry_router_info;
skerry_status skerry_router_open(skerry_context *context, const skerry_router_desc *desc, skerry_router **out, skerry_error *error);
skerry_status skerry_router_get_info(skerry_router *router, skerry_router_info *info, skerry_error *error);
skerry_router *skerry_router_retain(skerry_router *router);
void skerry_router_release(skerry_router *router);
typedef struct skerry_cache skerry_cache;
typedef int32_t skerry_format;
typedef int32_t skerry_tier;
typedef int32_t skerry_rotary_pairing;
typedef struct skerry_rotary_desc {
    uint32_t struct_size;
    uint32_t flags;
    const float *inverse_frequencies;
    skerry_rotary_pairing pairing;
    int32_t dims;
    float attention_factor;
    uint32_t reserved;
} skerry_rotary_desc;
typedef struct skerry_layer_desc {
    uint32_t struct_size;
    uint32_t flags;
    const skerry_rotary_desc *rotary;
    int32_t kv_heads;
    int32_t query_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t sliding_window;
    int32_t shared_with;
    float scale;
    float softcap;
} skerry_layer_desc;
typedef int32_t skerry_policy_kind;
typedef int32_t skerry_fidelity;
typedef int32_t skerry_prefill;
typedef int32_t skerry_score;
typedef int32_t skerry_selection;
typedef int32_t skerry_segmentation;
typedef int32_t skerry_zoom_miss;
typedef struct skerry_sekv_desc {
    uint32_t struct_size;
    uint32_t flags;
    skerry_format detail_format;
    uint32_t fetch_ppm;
    uint32_t refine_ppm;
    uint32_t hysteresis_ppm;
    int32_t keep_windows;
    skerry_zoom_miss miss;
    skerry_segmentation segmentation;
    int32_t span_min_tokens;
    int32_t span_max_tokens;
    float anchor_threshold;
    int32_t detail_rank;
    float detail_error;
    skerry_router *router;
    int32_t budget_entries;
    uint32_t reserved;
} skerry_sekv_desc;
typedef struct skerry_policy_desc {
    uint32_t struct_size;
    uint32_t flags;
    skerry_policy_kind kind;
    skerry_fidelity fidelity;
    skerry_prefill prefill;
    int32_t window_tokens;
    int32_t sink_tokens;
    int32_t recent_tokens;
    int32_t period_tokens;
    skerry_score score;
    int32_t score_queries;
    skerry_selection selection;
    skerry_format full_format;
    skerry_format key_format;
    skerry_format value_format;
    int32_t value_group;
    uint32_t quantised_share_ppm;
    uint32_t hysteresis_ppm;
    uint32_t max_moves_ppm;
    uint32_t reserved;
    const skerry_sekv_desc *sekv;
} skerry_policy_desc;
typedef struct skerry_budget_desc {
    uint32_t struct_size;
    uint32_t flags;
    uint64_t bytes;
    uint32_t share_ppm;
    uint32_t reserved;
    int64_t length_tokens;
    uint64_t full_bytes;
    uint64_t quantised_bytes;
    uint64_t exact_bytes;
    uint64_t host_bytes;
} skerry_budget_desc;
typedef int32_t skerry_nonfinite;
struct skerry_callbacks_desc;
typedef struct skerry_cache_desc {
    uint32_t struct_size;
    uint32_t flags;
    const skerry_layer_desc *const *layers;
    const skerry_policy_desc *policy;
    const skerry_budget_desc *budget;
    const struct skerry_callbacks_desc *callbacks;
    int32_t layer_count;
    skerry_dtype store_dtype;
    int32_t max_sequences;
    int32_t max_step_tokens;
    int32_t staging_tokens;
    skerry_nonfinite nonfinite;
    skerry_device_type device_type;
    int32_t device_index;
} skerry_cache_desc;
typedef struct skerry_plan_info {
    uint32_t struct_size;
    uint32_t flags;
    uint64_t budget_bytes;
    uint64_t minimum_bytes;
    uint64_t planned_bytes;
    uint64_t pool_bytes;
    uint64_t table_bytes;
    uint64_t staging_bytes;
    uint64_t exact_bytes;
    uint64_t full_cache_bytes;
    uint64_t charged_bytes;
    int64_t readable_tokens;
    int32_t full_windows;
    int32_t quantised_windows;
    skerry_policy_kind kind;
    skerry_fidelity fidelity;
    skerry_prefill prefill;
    int32_t window_tokens;
    int32_t sink_tokens;
    int32_t recent_tokens;
    int32_t period_tokens;
    skerry_score score;
    int32_t score_queries;
    skerry_selection selection;
    skerry_format full_format;
    skerry_format key_format;
    skerry_format value_format;
    int32_t value_group;
    uint32_t quantised_share_ppm;
    uint32_t hysteresis_ppm;
    uint32_t max_moves_ppm;
    uint32_t cpu_features;
    int32_t exact_attend;
    skerry_dtype store_dtype;
    int32_t max_sequences;
    int32_t max_step_tokens;
    int32_t staging_tokens;
    uint32_t budget_overrun_tokens;
    uint64_t host_bytes;
    uint64_t router_bytes;
    uint64_t zoom_bytes;
    uint64_t zoom_staging_bytes;
    int32_t host_windows;
    int32_t fetch_windows;
    skerry_format detail_format;
    uint32_t refine_ppm;
    uint32_t zoom_hysteresis_ppm;
    uint32_t fetch_ppm;
    int32_t router_trained;
    int32_t router_vectors;
} skerry_plan_info;
skerry_status skerry_cache_plan(skerry_context *context, const skerry_cache_desc *desc, skerry_plan_info *info, skerry_error *error);
skerry_status skerry_cache_create(skerry_context *context, const skerry_cache_desc *desc, skerry_cache **out, skerry_error *error);
skerry_cache *skerry_cache_retain(skerry_cache *cache);
void skerry_cache_release(skerry_cache *cache);
skerry_status skerry_cache_get_plan(skerry_cache *cache, skerry_plan_info *info, skerry_error *error);
skerry_status skerry_cache_set_budget(skerry_cache *cache, const skerry_budget_desc *budget, skerry_error *error);
skerry_status skerry_cache_check(skerry_cache *cache, skerry_error *error);
typedef struct skerry_seq {
    uint64_t bits;
} skerry_seq;
typedef struct skerry_seq_info {
    uint32_t struct_size;
    uint32_t flags;
    int64_t length_tokens;
    int64_t prefill_tokens;
    int64_t next_event_position;
    int64_t lowest_truncate;
    int64_t full_tokens;
    int64_t quantised_tokens;
    int64_t evicted_tokens;
    uint64_t used_bytes;
    uint64_t charged_bytes;
    uint64_t exact_bytes;
    int64_t surprisal_tokens;
    double surprisal_mean;
    double surprisal_variance;
    int64_t host_tokens;
    uint64_t host_bytes;
} skerry_seq_info;
skerry_status skerry_seq_create(skerry_cache *cache, skerry_seq *out, skerry_error *error);
skerry_status skerry_seq_drop(skerry_cache *cache, skerry_seq seq, skerry_error *error);
skerry_status skerry_seq_fork(skerry_cache *cache, skerry_seq parent, int64_t length_tokens, skerry_seq *out, skerry_error *error);
skerry_status skerry_seq_truncate(skerry_cache *cache, skerry_seq seq, int64_t length_tokens, skerry_error *error);
skerry_status skerry_seq_can_truncate(skerry_cache *cache, skerry_seq seq, int64_t length_tokens, int64_t ahead_tokens, skerry_error *error);
skerry_status skerry_seq_get_info(skerry_cache *cache, skerry_seq seq, skerry_seq_info *info, skerry_error *error);
typedef struct skerry_range {
    int64_t begin;
    int64_t end;
    skerry_tier tier;
    skerry_format key_format;
    skerry_format value_format;
    uint32_t flags;
    double score;
    uint64_t bytes;
} skerry_range;
skerry_status skerry_seq_list_ranges(skerry_cache *cache, skerry_seq seq, int32_t layer, int32_t kv_head, skerry_range *ranges, int32_t capacity, int32_t *needed, skerry_error *error);
skerry_status skerry_seq_fingerprint(skerry_cache *cache, skerry_seq seq, uint64_t *out, skerry_error *error);
typedef struct skerry_step skerry_step;
typedef struct skerry_step_desc {
    uint32_t struct_size;
    uint32_t flags;
    const skerry_seq *seqs;
    const int32_t *token_counts;
    const int64_t *positions;
    int32_t seq_count;
    uint32_t reserved;
} skerry_step_desc;
skerry_status skerry_step_begin(skerry_cache *cache, const skerry_step_desc *desc, skerry_step **out, skerry_error *error);
skerry_status skerry_step_append(skerry_step *step, int32_t layer, const skerry_tensor *keys, const skerry_tensor *values, const skerry_stream *stream, skerry_error *error);
typedef struct skerry_attend_desc {
    uint32_t struct_size;
    uint32_t flags;
    const skerry_tensor *queries;
    const skerry_tensor *out;
    const skerry_tensor *lse;
    const float *sink_logits;
    const skerry_stream *stream;
    int32_t layer;
    uint32_t tiers;
} skerry_attend_desc;
skerry_status skerry_step_attend(skerry_step *step, const skerry_attend_desc *desc, skerry_error *error);
skerry_status skerry_step_zoom(skerry_step *step, int32_t layer, const skerry_tensor *queries, const skerry_stream *stream, skerry_error *error);
typedef struct skerry_part {
    const void *keys;
    const void *values;
    int64_t position;
    int32_t tokens;
    int32_t capacity;
    skerry_tier tier;
    skerry_format key_format;
    skerry_format value_format;
    int32_t window;
} skerry_part;
skerry_status skerry_step_view(skerry_step *step, int32_t seq_index, int32_t layer, int32_t kv_head, uint32_t tiers, skerry_part *parts, int32_t capacity, int32_t *needed, skerry_error *error);
typedef struct skerry_gather_desc {
    uint32_t struct_size;
    uint32_t flags;
    const skerry_tensor *keys;
    const skerry_tensor *values;
    int64_t *positions;
    float *bias;
    int32_t *windows;
    int32_t seq_index;
    int32_t layer;
    int32_t kv_head;
    uint32_t tiers;
} skerry_gather_desc;
skerry_status skerry_step_gather(skerry_step *step, const skerry_gather_desc *desc, int32_t *tokens, skerry_error *error);
typedef struct skerry_observe_desc {
    uint32_t struct_size;
    uint32_t flags;
    const float *masses;
    const float *merged_lse;
    const skerry_tensor *queries;
    int32_t seq_index;
    int32_t layer;
    int32_t kv_head;
    int32_t token_count;
} skerry_observe_desc;
skerry_status skerry_step_observe(skerry_step *step, const skerry_observe_desc *desc, skerry_error *error);
skerry_status skerry_surprisal_from_logits(const skerry_tensor *logits, const int32_t *tokens, int32_t rows, float *nats, skerry_error *error);
skerry_status skerry_step_surprisal(skerry_step *step, int32_t seq_index, const float *nats, int32_t count, skerry_error *error);
skerry_status skerry_step_commit(skerry_step *step, skerry_error *error);
void skerry_step_abort(skerry_step *step);
typedef struct skerry_transition {
    skerry_seq seq;
    int64_t position;
    int32_t window;
    int32_t layer;
    int32_t kv_head;
    skerry_tier from;
    skerry_tier to;
    skerry_format key_format;
    skerry_format value_format;
    uint32_t written_bytes;
    double score;
} skerry_transition;
typedef struct skerry_callbacks_desc {
    uint32_t struct_size;
    uint32_t flags;
    void *user;
    void(*before_layer)(void *user, int32_t layer);
    int32_t(*scores_wanted)(void *user, skerry_seq seq, int32_t layer, int32_t kv_head, const int32_t *windows, int32_t window_count, float *masses);
    void(*transitions)(void *user, const skerry_transition *moves, int32_t count);
    void(*committed)(void *user, skerry_seq seq, int64_t length_tokens);
} skerry_callbacks_desc;
typedef struct skerry_memory_info {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t budget_bytes;
    uint64_t allocated_bytes;
    uint64_t pool_bytes;
    uint64_t table_bytes;
    uint64_t staging_bytes;
    uint64_t exact_bytes;
    uint64_t fixed_bytes;
    uint64_t peak_bytes;
    uint64_t used_bytes;
    uint64_t used_full_bytes;
    uint64_t used_quantised_bytes;
    uint64_t used_dormant_bytes;
    uint64_t used_exact_bytes;
    uint64_t full_cache_bytes;
    uint64_t host_bytes;
    uint64_t used_host_bytes;
    uint64_t used_zoom_bytes;
    uint64_t used_summary_bytes;
} skerry_memory_info;
skerry_status skerry_cache_get_memory(skerry_cache *cache, skerry_memory_info *info, skerry_error *error);
typedef struct skerry_counters {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t steps_begun;
    uint64_t steps_committed;
    uint64_t steps_aborted;
    uint64_t tokens_appended;
    uint64_t events;
    uint64_t demotions;
    uint64_t demotions_written;
    uint64_t demotions_ledger;
    uint64_t promotions;
    uint64_t promotions_exact;
    uint64_t promotions_recovered;
    uint64_t evictions;
    uint64_t record_bytes_written;
    uint64_t attended_bytes;
    uint64_t nonfinite_values;
    uint64_t details_written;
    uint64_t detail_bytes_written;
    uint64_t details_refused;
    uint64_t zooms;
    uint64_t zooms_present;
    uint64_t zooms_fetched;
    uint64_t zooms_late;
    uint64_t prefetches;
    uint64_t fetched_bytes;
} skerry_counters;
skerry_status skerry_cache_get_counters(skerry_cache *cache, skerry_counters *counters, skerry_error *error);
typedef struct skerry_diagnostics {
    uint32_t struct_size;
    uint32_t events;
    double churn;
    double missed_mass;
    double lir;
    uint64_t lir_eligible;
    uint64_t lir_rescued;
    double quantised_mass;
} skerry_diagnostics;
skerry_status skerry_seq_get_diagnostics(skerry_cache *cache, skerry_seq seq, int32_t layer, skerry_diagnostics *out, skerry_error *error);
'''

FUNCTIONS = (
    'skerry_status_name',
    'skerry_status_text',
    'skerry_version',
    'skerry_build_text',
    'skerry_context_create',
    'skerry_context_retain',
    'skerry_context_release',
    'skerry_context_get_device',
    'skerry_context_get_bytes',
    'skerry_router_open',
    'skerry_router_get_info',
    'skerry_router_retain',
    'skerry_router_release',
    'skerry_cache_plan',
    'skerry_cache_create',
    'skerry_cache_retain',
    'skerry_cache_release',
    'skerry_cache_get_plan',
    'skerry_cache_set_budget',
    'skerry_cache_check',
    'skerry_seq_create',
    'skerry_seq_drop',
    'skerry_seq_fork',
    'skerry_seq_truncate',
    'skerry_seq_can_truncate',
    'skerry_seq_get_info',
    'skerry_seq_list_ranges',
    'skerry_seq_fingerprint',
    'skerry_step_begin',
    'skerry_step_append',
    'skerry_step_attend',
    'skerry_step_zoom',
    'skerry_step_view',
    'skerry_step_gather',
    'skerry_step_observe',
    'skerry_surprisal_from_logits',
    'skerry_step_surprisal',
    'skerry_step_commit',
    'skerry_step_abort',
    'skerry_cache_get_memory',
    'skerry_cache_get_counters',
    'skerry_seq_get_diagnostics',
)

SKERRY_API_MAJOR = 0
SKERRY_API_MINOR = 1
SKERRY_API_PATCH = 0
SKERRY_API_VERSION = 1000
SKERRY_OK = 0
SKERRY_PENDING = 1
SKERRY_INCOMPLETE = 2
SKERRY_MISS = 3
SKERRY_ERROR_ARGUMENT = -10
SKERRY_ERROR_STRUCT_SIZE = -11
SKERRY_ERROR_NEWER_FIELD = -12
SKERRY_ERROR_STALE_ID = -13
SKERRY_ERROR_STATE = -14
SKERRY_ERROR_NONFINITE = -15
SKERRY_ERROR_OUT_OF_MEMORY = -20
SKERRY_ERROR_OVER_BUDGET = -21
SKERRY_ERROR_TIER_FULL = -22
SKERRY_ERROR_UNSUPPORTED = -30
SKERRY_ERROR_BACKEND = -31
SKERRY_ERROR_DEVICE_LOST = -32
SKERRY_ERROR_IO = -40
SKERRY_ERROR_FORMAT = -41
SKERRY_ERROR_CORRUPT = -42
SKERRY_ERROR_INTERNAL = -90
SKERRY_SUBJECT_NONE = 0
SKERRY_SUBJECT_ARGUMENT = 1
SKERRY_SUBJECT_STRUCT = 2
SKERRY_SUBJECT_FLAGS = 3
SKERRY_SUBJECT_LAYER = 10
SKERRY_SUBJECT_HEADS = 11
SKERRY_SUBJECT_KEY_DIM = 12
SKERRY_SUBJECT_VALUE_DIM = 13
SKERRY_SUBJECT_WINDOW = 14
SKERRY_SUBJECT_SINKS = 15
SKERRY_SUBJECT_RECENT = 16
SKERRY_SUBJECT_PERIOD = 17
SKERRY_SUBJECT_FORMAT = 18
SKERRY_SUBJECT_ROTARY = 19
SKERRY_SUBJECT_BUDGET = 20
SKERRY_SUBJECT_POLICY = 21
SKERRY_SUBJECT_SCORE = 22
SKERRY_SUBJECT_SEQUENCE = 30
SKERRY_SUBJECT_POSITION = 31
SKERRY_SUBJECT_TOKENS = 32
SKERRY_SUBJECT_STEP = 33
SKERRY_SUBJECT_TENSOR = 40
SKERRY_SUBJECT_DTYPE = 41
SKERRY_SUBJECT_VALUES = 42
SKERRY_SUBJECT_HOST_MEMORY = 50
SKERRY_SUBJECT_PARALLEL_FOR = 51
SKERRY_SUBJECT_BACKEND = 60
SKERRY_LOG_NONE = 0
SKERRY_LOG_ERROR = 10
SKERRY_LOG_WARNING = 20
SKERRY_LOG_INFO = 30
SKERRY_LOG_DEBUG = 40
SKERRY_DTYPE_NONE = 0
SKERRY_DTYPE_F32 = 1
SKERRY_DTYPE_F16 = 2
SKERRY_DTYPE_BF16 = 3
SKERRY_DEVICE_CPU = 0
SKERRY_DEVICE_CUDA = 1
SKERRY_DEVICE_VULKAN = 2
SKERRY_CPU_AVX2 = 1
SKERRY_CPU_AVX512 = 2
SKERRY_CPU_AVX512_VNNI = 4
SKERRY_ROUTER_FORM_PAPER = 1
SKERRY_ROUTER_FORM_PRODUCTION = 2
SKERRY_ROUTER_POOLING_MEAN = 1
SKERRY_ROUTER_POOLING_CENTROIDS = 2
SKERRY_ROUTER_THRESHOLDS = 1
SKERRY_ROUTER_GATES = 2
SKERRY_ROUTER_BIAS = 4
SKERRY_ROUTER_TEMPERATURE = 8
SKERRY_ROUTER_KEY_MATRICES = 16
SKERRY_ROUTER_NORMALISED = 32
SKERRY_ROUTER_SHARED_KEYS = 64
SKERRY_NONE_TOKENS = -1
SKERRY_FORMAT_DEFAULT = 0
SKERRY_FORMAT_F32 = 1
SKERRY_FORMAT_F16 = 2
SKERRY_FORMAT_BF16 = 3
SKERRY_FORMAT_R2 = 8
SKERRY_FORMAT_R3 = 9
SKERRY_FORMAT_R4 = 10
SKERRY_FORMAT_R8 = 11
SKERRY_FORMAT_C2 = 16
SKERRY_FORMAT_C4 = 17
SKERRY_FORMAT_L32 = 24
SKERRY_FORMAT_L16 = 25
SKERRY_FORMAT_L8 = 26
SKERRY_FORMAT_L4 = 27
SKERRY_TIER_FULL = 1
SKERRY_TIER_QUANTISED = 2
SKERRY_TIER_SUMMARY = 3
SKERRY_TIER_HOST = 4
SKERRY_TIER_EVICTED = 8
SKERRY_TIERS_FULL = 2
SKERRY_TIERS_QUANTISED = 4
SKERRY_TIERS_HOST = 16
SKERRY_ROTARY_HALF = 0
SKERRY_ROTARY_INTERLEAVED = 1
SKERRY_LAYER_SHARED = 1
SKERRY_POLICY_FULL = 0
SKERRY_POLICY_STREAMING = 1
SKERRY_POLICY_EVICT = 2
SKERRY_POLICY_QUANTISE = 3
SKERRY_POLICY_QEVICT = 4
SKERRY_POLICY_SEKV = 5
SKERRY_FIDELITY_PRODUCTION = 0
SKERRY_FIDELITY_PAPER = 1
SKERRY_PREFILL_SPLIT = 0
SKERRY_PREFILL_WHOLE = 1
SKERRY_SCORE_DEFAULT = 0
SKERRY_SCORE_CUMULATIVE = 1
SKERRY_SCORE_AGE = 2
SKERRY_SCORE_DECAYED = 3
SKERRY_SCORE_LAST = 4
SKERRY_SCORE_WORST = 5
SKERRY_SELECTION_DEFAULT = 0
SKERRY_SELECTION_PER_HEAD = 1
SKERRY_SELECTION_PER_LAYER = 2
SKERRY_POLICY_KEEP_EXACT = 1
SKERRY_POLICY_ONE_WAY = 2
SKERRY_POLICY_EVICT_FIRST = 4
SKERRY_SEGMENTS_DEFAULT = 0
SKERRY_SEGMENTS_FIXED = 1
SKERRY_SEGMENTS_SURPRISAL = 2
SKERRY_ZOOM_WAIT = 0
SKERRY_ZOOM_SKIP = 1
SKERRY_SEKV_NO_RESIDENTS = 1
SKERRY_SEKV_SHARED_BASES = 2
SKERRY_SEKV_ABSENT_ROWS = 256
SKERRY_SEKV_VALUE_GATES = 512
SKERRY_SEKV_GROUP_CHOICE = 1024
SKERRY_SEKV_SECOND_ORDER = 2048
SKERRY_NONFINITE_REFUSE = 0
SKERRY_NONFINITE_ZERO = 1
SKERRY_CACHE_EXACT_ATTEND = 1
SKERRY_SEQ_PREFILLING = 1
SKERRY_RANGE_RECOVERED = 1
SKERRY_RANGE_SHARED = 2
SKERRY_RANGE_LEDGERED = 4
SKERRY_RANGE_EXACT = 8
SKERRY_RANGE_DETAIL = 16
SKERRY_RANGE_ZOOMED = 32
SKERRY_DETAIL_ERROR_SHIFT = 16
SKERRY_STEP_PREFILL = 1
SKERRY_ATTEND_EXACT = 1
SKERRY_ATTEND_NO_SCORE = 2
