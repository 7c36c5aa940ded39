/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_STATS_H
#define SKERRY_STATS_H

#include <skerry/step.h>

#ifdef __cplusplus
extern "C" {
#endif

/* info. Bytes held from the allocator at this moment, by owner, and what the tiers use of them. */
typedef struct skerry_memory_info {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t budget_bytes;      /* UINT64_MAX: none */
    uint64_t allocated_bytes;   /* pool + table + staging + exact + host + fixed: everything this cache holds */
    uint64_t pool_bytes;        /* records and full-precision tokens, free slots included; under the budget */
    uint64_t table_bytes;       /* work lists, scores, balance parameters; under the budget */
    uint64_t staging_bytes;     /* slots for tokens of a step in flight, scratch, the undo copy; declared at creation */
    uint64_t exact_bytes;       /* host copies of demoted windows */
    uint64_t fixed_bytes;       /* the cache object itself: geometry, names, handle table */
    uint64_t peak_bytes;        /* largest allocated_bytes so far */
    uint64_t used_bytes;        /* slots in use + tables: what the sequences need now, shared slots once; slots of the staging
                                   area count while tokens lie in them, so this can pass pool_bytes */
    uint64_t used_full_bytes;
    uint64_t used_quantised_bytes;
    uint64_t used_dormant_bytes; /* ledger records that are not active */
    uint64_t used_exact_bytes;
    uint64_t full_cache_bytes;  /* the same committed tokens in a full cache of the store dtype */
    uint64_t host_bytes;        /* SEKV: host memory for detail, its tables included */
    uint64_t used_host_bytes;   /* of these: detail in use */
    uint64_t used_zoom_bytes;   /* slots of fetched windows in use, kept and staged */
    uint64_t used_summary_bytes; /* SEKV with SKERRY_FIDELITY_PAPER: summary rows, and their projections for the router */
} skerry_memory_info;

/* Threads: one at a time per cache */
SKERRY_API skerry_status skerry_cache_get_memory(skerry_cache *cache, skerry_memory_info *info, skerry_error *error);

/* info. Counters since creation; those that belong together add up. Aborted steps count in steps_begun and steps_aborted only. */
typedef struct skerry_counters {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t steps_begun;
    uint64_t steps_committed;
    uint64_t steps_aborted;
    uint64_t tokens_appended;
    uint64_t events;             /* routing events, per sequence and layer */
    uint64_t demotions;          /* full -> quantised; = demotions_written + demotions_ledger */
    uint64_t demotions_written;  /* a record was encoded */
    uint64_t demotions_ledger;   /* an existing record was activated: 0 bytes written */
    uint64_t promotions;         /* quantised -> full; = promotions_exact + promotions_recovered */
    uint64_t promotions_exact;   /* from the exact copy */
    uint64_t promotions_recovered;
    uint64_t evictions;
    uint64_t record_bytes_written;
    uint64_t attended_bytes;     /* records and tiles read by attend */
    uint64_t nonfinite_values;   /* replaced by 0 */
    uint64_t details_written;    /* SEKV: windows whose detail was put on the host */
    uint64_t detail_bytes_written;
    uint64_t details_refused;    /* windows that found the host tier full */
    uint64_t zooms;              /* windows chosen by queries; = zooms_present + zooms_fetched + zooms_late */
    uint64_t zooms_present;      /* lay in a slot already, or were on their way */
    uint64_t zooms_fetched;      /* copied because a query wanted them */
    uint64_t zooms_late;         /* SKERRY_ZOOM_SKIP: had not arrived */
    uint64_t prefetches;         /* windows copied ahead */
    uint64_t fetched_bytes;      /* copied from the host in all, prefetches included */
} skerry_counters;

/* Threads: one at a time per cache */
SKERRY_API skerry_status skerry_cache_get_counters(skerry_cache *cache, skerry_counters *counters, skerry_error *error);

/* info. How well the selection foresees attention (qevict.md section 7), mean over the KV heads of the layers asked for. */
typedef struct skerry_diagnostics {
    uint32_t struct_size;
    uint32_t events;          /* routing events seen */
    double   churn;           /* mean share of readable history windows that changed between consecutive events */
    double   missed_mass;     /* online estimate of the future missed mass: what evicted windows are thought to have kept of the
                                 mass they had when they left, over all mass; see docs/quality.md */
    double   lir;             /* rescued / eligible episodes of windows outside the full tier; m = 4, h = 8 */
    uint64_t lir_eligible;
    uint64_t lir_rescued;
    double   quantised_mass;  /* attention mass on quantised windows over all mass, since creation */
} skerry_diagnostics;

/* `layer` -1: all layers. Errors: STALE_ID, ARGUMENT. Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_get_diagnostics(skerry_cache *cache, skerry_seq seq, int32_t layer,
                                                    skerry_diagnostics *out, skerry_error *error);

#ifdef __cplusplus
}
#endif

#endif
