/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_CACHE_H
#define SKERRY_CACHE_H

/* A cache stores the keys and values of many sequences of one model geometry on one device, under one budget in bytes. */

#include <skerry/router.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct skerry_cache skerry_cache;

/* How numbers are stored. Bits per element at head_dim 64 / 128 in brackets. */
typedef int32_t skerry_format;
enum {
    SKERRY_FORMAT_DEFAULT = 0,
    SKERRY_FORMAT_F32     = 1,
    SKERRY_FORMAT_F16     = 2,
    SKERRY_FORMAT_BF16    = 3,
    SKERRY_FORMAT_R2      = 8,  /* balanced, rotated, 2 bits, one scale per token [2.25, 2.125] */
    SKERRY_FORMAT_R3      = 9,  /* 3 bits [3.25, 3.125] */
    SKERRY_FORMAT_R4      = 10, /* 4 bits [4.25, 4.125] */
    SKERRY_FORMAT_R8      = 11, /* 8 bits [8.25, 8.125] */
    SKERRY_FORMAT_C2      = 16, /* 2 bits, keys per channel over a window, values per token: QEvict as published, KIVI */
    SKERRY_FORMAT_C4      = 17, /* 4 bits, the same grid */
    SKERRY_FORMAT_L32     = 24, /* low rank: keys or values of a span as token factor x basis, attended as such; f32 factors */
    SKERRY_FORMAT_L16     = 25, /* f16 factors */
    SKERRY_FORMAT_L8      = 26, /* 8-bit factors, one scale per rank */
    SKERRY_FORMAT_L4      = 27  /* 4-bit factors, one scale per rank */
};

/* Tiers of a window, from most to least bytes. */
typedef int32_t skerry_tier;
enum {
    SKERRY_TIER_FULL      = 1, /* sinks, recent tokens, and windows routed to full precision */
    SKERRY_TIER_QUANTISED = 2,
    SKERRY_TIER_SUMMARY   = 3, /* SEKV with SKERRY_FIDELITY_PAPER: one row on the device, factors in host memory */
    SKERRY_TIER_HOST      = 4, /* detail in host memory, a router key on the device; attended while it is zoomed in */
    SKERRY_TIER_EVICTED   = 8
};
/* Sets of tiers, for calls that take a mask. 0 means all. */
enum {
    SKERRY_TIERS_FULL      = 1u << 1,
    SKERRY_TIERS_QUANTISED = 1u << 2,
    SKERRY_TIERS_HOST      = 1u << 4 /* what is zoomed in */
};

typedef int32_t skerry_rotary_pairing;
enum {
    SKERRY_ROTARY_HALF        = 0, /* channel i with i + dims/2 ("neox") */
    SKERRY_ROTARY_INTERLEAVED = 1  /* channel 2i with 2i + 1 */
};

/* desc. Rotary position embedding of a layer, needed where keys are stored un-rotated (qevict with fidelity paper). */
typedef struct skerry_rotary_desc {
    uint32_t              struct_size;
    uint32_t              flags;               /* none defined; must be 0 */
    const float          *inverse_frequencies; /* [dims / 2], radians per position */
    skerry_rotary_pairing pairing;
    int32_t               dims;                /* rotated leading channels, even, at most key_dim */
    float                 attention_factor;    /* multiplies cos and sin; 0 means 1 */
    uint32_t              reserved;
} skerry_rotary_desc;

enum {
    SKERRY_LAYER_SHARED = 1u << 0 /* this layer stores nothing and reads the cache of layer `shared_with` */
};

/* desc. Geometry of one layer. */
typedef struct skerry_layer_desc {
    uint32_t                  struct_size;
    uint32_t                  flags;          /* SKERRY_LAYER_* */
    const skerry_rotary_desc *rotary;         /* NULL: none */
    int32_t                   kv_heads;       /* at least 1 */
    int32_t                   query_heads;    /* a multiple of kv_heads; 0 means kv_heads */
    int32_t                   key_dim;        /* at least 1 */
    int32_t                   value_dim;      /* 0 means key_dim */
    int32_t                   sliding_window; /* tokens a query sees, its own included; 0: all */
    int32_t                   shared_with;    /* with SKERRY_LAYER_SHARED: a lower layer of the same geometry that is not shared */
    float                     scale;          /* of q.k; 0 means 1 / sqrt(key_dim) */
    float                     softcap;        /* c tanh(x / c) on scaled logits; 0: none */
} skerry_layer_desc;

typedef int32_t skerry_policy_kind;
enum {
    SKERRY_POLICY_FULL      = 0, /* no compression */
    SKERRY_POLICY_STREAMING = 1, /* sinks and recent tokens only */
    SKERRY_POLICY_EVICT     = 2, /* attention-scored eviction; H2O and SnapKV are settings of it */
    SKERRY_POLICY_QUANTISE  = 3, /* everything but sinks and recent in low bits, lowest score leaves when the budget is full */
    SKERRY_POLICY_QEVICT    = 4, /* full, quantised, evicted; arXiv 2608.05326 */
    /* The ladder of QEVICT on the device, and every window's detail in host memory: each query reads the windows that a router
     * finds for it from there. arXiv 2606.31145; the differences are in docs/sekv.md. Needs a budget with length_tokens
     * (not with SKERRY_FIDELITY_PAPER, which needs a router). */
    SKERRY_POLICY_SEKV      = 5
};

typedef int32_t skerry_fidelity;
enum {
    SKERRY_FIDELITY_PRODUCTION = 0,
    SKERRY_FIDELITY_PAPER      = 1 /* the published rules to their numbers, defects included; QEVICT and SEKV */
};

/* When windows may move while a prompt is read. State moves at positions, never at calls: results do not depend on how a
 * prompt is cut into steps, in either mode. */
typedef int32_t skerry_prefill;
enum {
    /* At every period; a step that crosses one is split inside. Needs the library's attend, or steps that end at periods. */
    SKERRY_PREFILL_SPLIT = 0,
    SKERRY_PREFILL_WHOLE = 1  /* steps with SKERRY_STEP_PREFILL collect in full precision; compacted once when the prompt ends */
};

/* What a window is worth. Mass is attention probability, summed over the window's tokens. */
typedef int32_t skerry_score;
enum {
    SKERRY_SCORE_DEFAULT    = 0,
    SKERRY_SCORE_CUMULATIVE = 1, /* all queries so far (H2O, QEvict) */
    SKERRY_SCORE_AGE        = 2, /* cumulative over the number of queries that could see the window */
    SKERRY_SCORE_DECAYED    = 3, /* time constant 128 tokens */
    SKERRY_SCORE_LAST       = 4, /* the last score_queries queries (SnapKV) */
    SKERRY_SCORE_WORST      = 5  /* the largest mass that one of the last score_queries queries gave (Defensive) */
};

typedef int32_t skerry_selection;
enum {
    SKERRY_SELECTION_DEFAULT   = 0,
    SKERRY_SELECTION_PER_HEAD  = 1, /* per layer and KV head */
    SKERRY_SELECTION_PER_LAYER = 2
};

enum {
    SKERRY_POLICY_KEEP_EXACT = 1u << 0, /* a demoted window's exact tokens stay in host memory while `exact_bytes` has room */
    SKERRY_POLICY_ONE_WAY    = 1u << 1, /* no promotion; in production there is none without KEEP_EXACT: it would bring nothing back */
    SKERRY_POLICY_EVICT_FIRST = 1u << 2 /* paper fidelity: an event counts the tokens before the step's own (qevict.md 3.4) */
};

/* Stands for "none" where 0 means "the default". */
#define SKERRY_NONE_TOKENS (-1)

/* What is moved to the host and back as one. */
typedef int32_t skerry_segmentation;
enum {
    SKERRY_SEGMENTS_DEFAULT   = 0,
    SKERRY_SEGMENTS_FIXED     = 1, /* windows of window_tokens */
    /* Spans between tokens of high surprisal ("anchors", which stay exact on the device); skerry_step_surprisal is then part of every
     * step, a prompt is compacted when it ends (SKERRY_PREFILL_WHOLE), and no later step may cross a routing event. What is not zoomed
     * in is absent. */
    SKERRY_SEGMENTS_SURPRISAL = 2
};

/* What a query does about a window that was chosen and has not arrived. */
typedef int32_t skerry_zoom_miss;
enum {
    SKERRY_ZOOM_WAIT = 0, /* waits: results never depend on the time that copies take */
    SKERRY_ZOOM_SKIP = 1  /* goes on with what the device holds of it, a low-bit record or nothing; counted as late */
};

enum {
    /* The device keeps no low-bit records: what is not zoomed in is absent. */
    SKERRY_SEKV_NO_RESIDENTS = 1u << 0,
    /* Low-rank keys or values may be stored on the basis of the last low-rank detail of their KV head, where that keeps the bound and is
     * the smallest. Needs detail_error. */
    SKERRY_SEKV_SHARED_BASES = 1u << 1,

    /* SKERRY_FIDELITY_PAPER alone: what the released code does, switched off one by one (docs/sekv.md). */
    SKERRY_SEKV_ABSENT_ROWS  = 1u << 8,  /* rows of the resolution that a head did not choose are absent, not of weight 1e-6 */
    SKERRY_SEKV_VALUE_GATES  = 1u << 9,  /* values are weighted by gates of their own singular values, not by those of the keys */
    SKERRY_SEKV_GROUP_CHOICE = 1u << 10, /* under budget_entries a KV group chooses as one and stays within them, in place of heads that
                                            choose alone and fail together */
    SKERRY_SEKV_SECOND_ORDER = 1u << 11  /* summary rows know the spread of their keys per channel: q^T C q / (2 key_dim) is added to the
                                            logit, C the diagonal of the span's weighted covariance */
};

/* desc. Options of SKERRY_POLICY_SEKV. Zero in a field chooses the default. */
typedef struct skerry_sekv_desc {
    uint32_t         struct_size;
    uint32_t         flags;             /* SKERRY_SEKV_* */
    skerry_format    detail_format;     /* of a window on the host: R2, R3, R4, R8, L32, L16, L8, L4 or the store dtype; R4 */
    uint32_t         fetch_ppm;         /* of the history's windows, read from the host per query and KV head; 120000 */
    uint32_t         refine_ppm;        /* worth of reading the detail of a window that the device holds in low bits, against one that it
                                           does not hold; 250000 */
    uint32_t         hysteresis_ppm;    /* a window that was chosen at the position before counts this much more; 1500000 */
    int32_t          keep_windows;      /* fetched windows per KV head that may stay on the device for the next query, out of the budget;
                                           0: none, what a layer reads is fetched anew each time */
    skerry_zoom_miss miss;
    skerry_segmentation segmentation;
    int32_t          span_min_tokens;   /* SURPRISAL: an anchor ends a span that has this many tokens; 64 */
    int32_t          span_max_tokens;   /* SURPRISAL: positions a span covers at most, 128 at most; 128 */
    float            anchor_threshold;  /* SURPRISAL: standard deviations above the running mean; 1 */
    int32_t          detail_rank;       /* L formats: most components per side; 16 */
    /* Largest relative error of detail, ||X - stored|| / ||X|| of the keys and of the values of a window and KV head. 0: no bound, all
     * detail is in detail_format. Else each window takes the smallest of low rank (L8), R2, R3, R4, R8 and the store dtype that keeps
     * it. */
    float            detail_error;
    /* Trained, of the form of the fidelity, and made for these layers (docs/router-files.md); NULL: the router that needs no training,
     * which SKERRY_FIDELITY_PAPER does not have. The cache takes a reference of its own. Router and cache may belong to different
     * contexts. */
    skerry_router   *router;
    /* SKERRY_FIDELITY_PAPER: most keys that one query head may attend to, counted as published: anchors, tokens at full resolution, one per
     * span, and the length of a span that is expanded less one. 0: no limit. */
    int32_t          budget_entries;
    uint32_t         reserved;          /* 0 */
} skerry_sekv_desc;

/* desc. Zero in a field chooses the default of the kind and fidelity; skerry_plan_info tells what was chosen. */
typedef struct skerry_policy_desc {
    uint32_t           struct_size;
    uint32_t           flags;                /* SKERRY_POLICY_* */
    skerry_policy_kind kind;
    skerry_fidelity    fidelity;
    skerry_prefill     prefill;
    int32_t            window_tokens;        /* 1 to 128; production 16, paper 8 */
    int32_t            sink_tokens;          /* production 4, paper 5; SKERRY_NONE_TOKENS: none */
    int32_t            recent_tokens;        /* 32; paper: a multiple of the window */
    int32_t            period_tokens;        /* between routing events; production 16, paper the window */
    skerry_score       score;
    int32_t            score_queries;        /* for LAST and WORST: 32; a multiple of the period, at most 8 periods */
    skerry_selection   selection;
    skerry_format      full_format;          /* of windows routed to the full tier: the store dtype, or R8 */
    skerry_format      key_format;           /* of the quantised tier: production R3, paper C2 */
    skerry_format      value_format;         /* production R2, paper C2 */
    int32_t            value_group;          /* C2, C4: channels that share a value scale; 0: all */
    uint32_t           quantised_share_ppm;  /* of the history's bytes; paper 700000, production 1000000; at most that */
    uint32_t           hysteresis_ppm;       /* production: a resident keeps its tier unless beaten by this factor; 1200000 */
    uint32_t           max_moves_ppm;        /* production: windows of one KV head that may move at an event; 125000 */
    uint32_t           reserved;
    const skerry_sekv_desc *sekv;            /* options of SEKV; NULL: its defaults */
} skerry_policy_desc;

/* desc. All zero: no limit. `bytes` covers records, full-precision tokens and tables of all sequences; staging, which is declared
 * by skerry_cache_desc and reported, comes on top. Every sequence may use the cache's bytes / max_sequences. */
typedef struct skerry_budget_desc {
    uint32_t struct_size;
    uint32_t flags;           /* none defined; must be 0 */
    uint64_t bytes;           /* 0: from share_ppm */
    uint32_t share_ppm;       /* of the bytes of a full cache of length_tokens per sequence, in the store dtype */
    uint32_t reserved;
    int64_t  length_tokens;   /* the length the budget is meant for, generation included; 0: unknown (paper fidelity needs it) */
    uint64_t full_bytes;      /* limit of the full tier's history windows; 0: none */
    uint64_t quantised_bytes; /* limit of the quantised tier; 0: none */
    uint64_t exact_bytes;     /* host memory for exact copies (SKERRY_POLICY_KEEP_EXACT); its own limit, on top of `bytes` */
    uint64_t host_bytes;      /* host memory for SEKV's detail; its own limit, on top of `bytes`; 0: what length_tokens asks for */
} skerry_budget_desc;

typedef int32_t skerry_nonfinite;
enum {
    SKERRY_NONFINITE_REFUSE = 0, /* the call fails and changes nothing */
    SKERRY_NONFINITE_ZERO   = 1  /* the number is stored as 0 and counted (skerry_counters.nonfinite_values) */
};

enum {
    SKERRY_CACHE_EXACT_ATTEND = 1u << 0 /* attend in float32 throughout instead of 8-bit dot products on low-bit records */
};

struct skerry_callbacks_desc; /* step.h */

/* desc */
typedef struct skerry_cache_desc {
    uint32_t                            struct_size;
    uint32_t                            flags;           /* SKERRY_CACHE_* */
    const skerry_layer_desc *const     *layers;          /* [layer_count] */
    const skerry_policy_desc           *policy;          /* NULL: SKERRY_POLICY_FULL */
    const skerry_budget_desc           *budget;          /* NULL: no limit */
    const struct skerry_callbacks_desc *callbacks;       /* NULL: none */
    int32_t                             layer_count;
    skerry_dtype                        store_dtype;     /* of full-precision tokens; 0 means f16 */
    int32_t                             max_sequences;   /* 0 means 1; at most 65535 */
    int32_t                             max_step_tokens; /* of one sequence in one step; 0 means 256 */
    int32_t                             staging_tokens;  /* PREFILL_WHOLE: longest prompt held in full precision; 0 means max_step_tokens */
    skerry_nonfinite                    nonfinite;
    skerry_device_type                  device_type;
    int32_t                             device_index;
} skerry_cache_desc;

/* info. What a cache of this description holds and costs: the same arithmetic plans, allocates and reports. */
typedef struct skerry_plan_info {
    uint32_t         struct_size;
    uint32_t         flags;               /* policy flags in effect */
    uint64_t         budget_bytes;        /* the limit in force; UINT64_MAX: none */
    uint64_t         minimum_bytes;       /* smallest budget.bytes that this description accepts */
    uint64_t         planned_bytes;       /* records + full tokens + tables at full occupancy; at most budget_bytes */
    uint64_t         pool_bytes;          /* of these: records and full-precision tokens */
    uint64_t         table_bytes;         /* of these: work lists, scores, balance parameters */
    uint64_t         staging_bytes;       /* on top: tokens of a step in flight, scratch, the undo copy */
    uint64_t         exact_bytes;         /* on top: host copies */
    uint64_t         full_cache_bytes;    /* length_tokens (0 when unknown) in the store dtype, all sequences */
    uint64_t         charged_bytes;       /* paper fidelity: the published sum (sinks, local, k_fp, N_q, grids), all layers */
    int64_t          readable_tokens;     /* per sequence and KV head at full occupancy; least over layers */
    int32_t          full_windows;        /* k_fp: history windows in the full tier per KV head; least over layers */
    int32_t          quantised_windows;   /* N_q */
    skerry_policy_kind kind;
    skerry_fidelity  fidelity;
    skerry_prefill   prefill;
    int32_t          window_tokens;
    int32_t          sink_tokens;
    int32_t          recent_tokens;
    int32_t          period_tokens;
    skerry_score     score;
    int32_t          score_queries;
    skerry_selection selection;
    skerry_format    full_format;
    skerry_format    key_format;
    skerry_format    value_format;
    int32_t          value_group;
    uint32_t         quantised_share_ppm;
    uint32_t         hysteresis_ppm;
    uint32_t         max_moves_ppm;
    uint32_t         cpu_features;        /* SKERRY_CPU_* that attend really uses for these formats */
    int32_t          exact_attend;        /* 1: float32 path; 0: 8-bit path for low-bit records */
    skerry_dtype     store_dtype;
    int32_t          max_sequences;
    int32_t          max_step_tokens;
    int32_t          staging_tokens;
    uint32_t         budget_overrun_tokens; /* paper fidelity: tokens by which sinks + local exceed the published budget */
    uint64_t         host_bytes;          /* SEKV, on top: host memory for detail, its tables included */
    uint64_t         router_bytes;        /* SEKV, of table_bytes: router keys and their balance */
    uint64_t         zoom_bytes;          /* SEKV, of pool_bytes: slots of fetched windows that are kept */
    uint64_t         zoom_staging_bytes;  /* SEKV, of staging_bytes: slots that one layer reads from and the next is prefetched to */
    int32_t          host_windows;        /* SEKV: windows per KV head that can have detail; least over layers */
    int32_t          fetch_windows;       /* SEKV: windows read per query and KV head at length_tokens; least over layers */
    skerry_format    detail_format;
    uint32_t         refine_ppm;
    uint32_t         zoom_hysteresis_ppm;
    uint32_t         fetch_ppm;
    int32_t          router_trained;      /* SEKV: 1: sekv.router finds windows; 0: the router that needs no training */
    int32_t          router_vectors;      /* SEKV: vectors that stand for the keys of a window, 1 to 4 */
} skerry_plan_info;

/* Answers what skerry_cache_create would do, and allocates nothing. A budget below the floor is reported as
 * SKERRY_ERROR_OVER_BUDGET with error->allowed = the minimum, and `info` is then filled all the same.
 * Errors:  ARGUMENT, STRUCT_SIZE, NEWER_FIELD, OVER_BUDGET, UNSUPPORTED, FORMAT (sekv.router was made for other layers; names the first
 *          number that differs)
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_cache_plan(skerry_context *context, const skerry_cache_desc *desc, skerry_plan_info *info,
                                           skerry_error *error);

/* Creates a cache. Under a budget everything it will hold is allocated and touched here, the tables of max_sequences sequences
 * included: no step allocates, but for the list of moves when there is a transitions callback. Without a budget tables and pool
 * grow in skerry_step_begin.
 * Errors:  those of skerry_cache_plan, OUT_OF_MEMORY
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_cache_create(skerry_context *context, const skerry_cache_desc *desc, skerry_cache **out,
                                             skerry_error *error);

/* Threads: any */
SKERRY_API_VOID skerry_cache *skerry_cache_retain(skerry_cache *cache);

/* Drops all sequences and frees everything. An open step is aborted. NULL is allowed. Threads: any */
SKERRY_API_VOID void skerry_cache_release(skerry_cache *cache);

/* The configuration in effect. Threads: any */
SKERRY_API skerry_status skerry_cache_get_plan(skerry_cache *cache, skerry_plan_info *info, skerry_error *error);

/* Changes the budget at once or not at all. Lowering it moves windows down in every sequence until the rest fits and
 * gives the memory back; no step may be open.
 * Errors:  OVER_BUDGET (names the minimum), STATE, OUT_OF_MEMORY, ARGUMENT
 * Threads: one at a time per cache
 * Since:   0.1 */
SKERRY_API skerry_status skerry_cache_set_budget(skerry_cache *cache, const skerry_budget_desc *budget, skerry_error *error);

/* Walks every table and counter and reports the first broken invariant as SKERRY_ERROR_INTERNAL. For tests and for bug reports.
 * Threads: one at a time per cache */
SKERRY_API skerry_status skerry_cache_check(skerry_cache *cache, skerry_error *error);

#ifdef __cplusplus
}
#endif

#endif
