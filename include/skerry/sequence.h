/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_SEQUENCE_H
#define SKERRY_SEQUENCE_H

#include <skerry/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

/* plain. Id of a sequence, valid until it is dropped; a stale id is refused. 0 is never a valid id; fits an int64. */
typedef struct skerry_seq { uint64_t bits; } skerry_seq;

/* info */
typedef struct skerry_seq_info {
    uint32_t struct_size;
    uint32_t flags;                  /* SKERRY_SEQ_* */
    int64_t  length_tokens;          /* committed */
    int64_t  prefill_tokens;         /* length when the prompt ended, or -1 */
    int64_t  next_event_position;    /* a host that attends itself ends its step here or before; -1: none comes */
    int64_t  lowest_truncate;        /* smallest length skerry_seq_truncate accepts now, besides 0 */
    int64_t  full_tokens;            /* summed over layers and KV heads: tokens by tier */
    int64_t  quantised_tokens;
    int64_t  evicted_tokens;
    uint64_t used_bytes;             /* records and full tokens this sequence refers to; shared ones count fully */
    uint64_t charged_bytes;          /* paper fidelity: the method's own sum (active tier only) */
    uint64_t exact_bytes;            /* host copies */
    int64_t  surprisal_tokens;       /* tokens whose surprisal was handed over, their mean and population variance in nats */
    double   surprisal_mean;
    double   surprisal_variance;
    int64_t  host_tokens;            /* SEKV: tokens whose only copy is on the host, zoomed in or not; the device may hold a summary row */
    uint64_t host_bytes;             /* SEKV: detail this sequence refers to; shared detail counts fully */
} skerry_seq_info;

enum {
    SKERRY_SEQ_PREFILLING = 1u << 0 /* a prompt is being collected (SKERRY_PREFILL_WHOLE) */
};

/* Opens an empty sequence. Errors: TIER_FULL (max_sequences reached), OUT_OF_MEMORY, STATE (open step).
 * Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_create(skerry_cache *cache, skerry_seq *out, skerry_error *error);

/* Drops a sequence. Errors: STALE_ID, STATE (it is in the open step). Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_drop(skerry_cache *cache, skerry_seq seq, skerry_error *error);

/* Opens a sequence that continues `parent` from `length_tokens` (-1: all of it). Bytes are shared until one side changes
 * them; a shared record is never altered in place, and a window that is still open is copied.
 * The length must be one that skerry_seq_truncate would accept.
 * Errors:  STALE_ID, ARGUMENT, TIER_FULL, OUT_OF_MEMORY, STATE
 * Threads: one at a time per cache
 * Since:   0.1 */
SKERRY_API skerry_status skerry_seq_fork(skerry_cache *cache, skerry_seq parent, int64_t length_tokens, skerry_seq *out,
                                         skerry_error *error);

/* Shortens a sequence. Legal for 0, and down to lowest_truncate: the first position from which on every token is still there
 * exactly in every layer and head. Statistics of the removed queries stay in the scores. A refusal changes nothing.
 * Errors:  STALE_ID, ARGUMENT (position; allowed = lowest_truncate), STATE
 * Threads: one at a time per cache
 * Since:   0.1 */
SKERRY_API skerry_status skerry_seq_truncate(skerry_cache *cache, skerry_seq seq, int64_t length_tokens, skerry_error *error);

/* Would truncating to `length_tokens` still be legal after `ahead_tokens` more tokens? SKERRY_OK: yes; SKERRY_MISS: no.
 * Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_can_truncate(skerry_cache *cache, skerry_seq seq, int64_t length_tokens,
                                                 int64_t ahead_tokens, skerry_error *error);

/* Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_get_info(skerry_cache *cache, skerry_seq seq, skerry_seq_info *info, skerry_error *error);

enum {
    SKERRY_RANGE_RECOVERED = 1u << 0, /* full tier, but restored from a low-bit record */
    SKERRY_RANGE_SHARED    = 1u << 1, /* bytes shared with a fork */
    SKERRY_RANGE_LEDGERED  = 1u << 2, /* a quantised record is held besides the active bytes */
    SKERRY_RANGE_EXACT     = 1u << 3, /* an exact copy is held in host memory */
    SKERRY_RANGE_DETAIL    = 1u << 4, /* detail is held in host memory (SEKV) */
    SKERRY_RANGE_ZOOMED    = 1u << 5, /* the last query read the detail */
    /* flags >> SKERRY_DETAIL_ERROR_SHIFT: ||X - detail|| / ||X|| of the window's keys or values, whichever is larger, in units of 2^-15 and
     * rounded up. 0: not measured; it is for low rank, and wherever sekv.detail_error is a bound. */
    SKERRY_DETAIL_ERROR_SHIFT = 16
};

/* plain. A run of positions of one KV head in one tier: the sinks, one window, or a run of evicted windows. For a window that is on the
 * host the formats are those of its detail. */
typedef struct skerry_range {
    int64_t       begin;
    int64_t       end;
    skerry_tier   tier;
    skerry_format key_format;
    skerry_format value_format;
    uint32_t      flags;   /* SKERRY_RANGE_*, and above them the error of the detail (SKERRY_DETAIL_ERROR_SHIFT) */
    double        score;   /* ranking value in units of attention mass; 0 for sinks and evicted */
    uint64_t      bytes;   /* device bytes held, dormant records included */
} skerry_range;

/* Lists where the tokens of one layer and KV head are, in position order, without gaps. Writes at most `capacity` ranges
 * and always the number needed; SKERRY_INCOMPLETE when they did not fit.
 * Errors:  STALE_ID, ARGUMENT
 * Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_list_ranges(skerry_cache *cache, skerry_seq seq, int32_t layer, int32_t kv_head,
                                                skerry_range *ranges, int32_t capacity, int32_t *needed, skerry_error *error);

/* Hash of everything stored for a sequence: positions, tiers, bytes, scores; equal state gives equal values on every run of
 * the same build. Threads: one at a time per cache */
SKERRY_API skerry_status skerry_seq_fingerprint(skerry_cache *cache, skerry_seq seq, uint64_t *out, skerry_error *error);

#ifdef __cplusplus
}
#endif

#endif
