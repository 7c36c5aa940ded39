/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_ROUTER_H
#define SKERRY_ROUTER_H

/* A trained router: what decides, from the query of a step, which host segments are brought back. Read from a safetensors file
 * (docs/router-files.md), checked once, and immutable from then on. */

#include <skerry/device.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Threads: any, for every call and with the same object. */
typedef struct skerry_router skerry_router;

typedef int32_t skerry_router_form;
enum {
    SKERRY_ROUTER_FORM_PAPER      = 1, /* SeKV as published: projections, thresholds and rank gates are all there */
    SKERRY_ROUTER_FORM_PRODUCTION = 2  /* summary_dim is at most 32; thresholds and gates may be absent */
};

/* What of a segment's keys is projected. */
typedef int32_t skerry_router_pooling;
enum {
    SKERRY_ROUTER_POOLING_MEAN      = 1, /* one mean key */
    SKERRY_ROUTER_POOLING_CENTROIDS = 2  /* up to four centroids */
};

enum {
    SKERRY_ROUTER_THRESHOLDS   = 1u << 0, /* `tau`: a threshold per layer and query head */
    SKERRY_ROUTER_GATES        = 1u << 1, /* `g_phi`: the network that weighs the ranks of a segment's factors */
    SKERRY_ROUTER_BIAS         = 1u << 2,
    SKERRY_ROUTER_TEMPERATURE  = 1u << 3,
    SKERRY_ROUTER_KEY_MATRICES = 1u << 4, /* `W_key`: keys have projections of their own, per KV head */
    SKERRY_ROUTER_NORMALISED   = 1u << 5, /* projected keys are scaled to length 1 */
    SKERRY_ROUTER_SHARED_KEYS  = 1u << 6  /* the query heads of a KV head share its projected keys */
};

/* desc. Exactly one of `data` and `path`. */
typedef struct skerry_router_desc {
    uint32_t    struct_size;
    uint32_t    flags; /* none defined; must be 0 */
    const void *data;  /* [bytes], the whole file in memory, any alignment; NULL: read `path` */
    uint64_t    bytes;
    const char *path;  /* UTF-8, a regular file; NULL: `data` */
} skerry_router_desc;

/* info. What a router was made for and holds. */
typedef struct skerry_router_info {
    uint32_t              struct_size;
    uint32_t              flags;         /* SKERRY_ROUTER_* */
    uint64_t              parameters;    /* trained numbers */
    uint64_t              weight_bytes;  /* host memory that they take here, in f32 */
    int64_t               training_step; /* 0: unknown */
    int32_t               layers;
    int32_t               query_heads;   /* per layer */
    int32_t               kv_heads;
    int32_t               key_dim;
    int32_t               summary_dim;   /* of a projected key or query */
    int32_t               rank_max;      /* ranks that the gates weigh; 0 without gates */
    skerry_router_form    form;
    skerry_router_pooling pooling;
    int32_t               centroids;     /* projected keys per segment and KV head, 1 to 4 */
    uint32_t              reserved;
    char                  model[128];    /* the model it was trained for; UTF-8, zero-terminated */
} skerry_router_info;

/* Reads a router. The bytes are copied: neither `data` nor the file is needed afterwards. The router keeps its context alive, takes
 * its memory from the context's allocator, and is counted in skerry_context_bytes.context_bytes. Blocks while it reads a file; one that
 * is to change is replaced by renaming, not written over.
 * Errors:  ARGUMENT, STRUCT_SIZE, NEWER_FIELD
 *          IO         the file cannot be opened or read (error->found: the system's errno; 0: not a regular file, or it became shorter)
 *          FORMAT     no router file, one of another version, or a setting or number type that this build does not know; names it
 *          CORRUPT    cut off, not JSON (error->found: the byte of the file), tensors that overlap, leave gaps or lie outside the file, a
 *                     tensor that is missing or has another shape (error->index: the dimension); names the tensor
 *          NONFINITE  a NaN or infinity; names the tensor, error->found: the element's index in row-major order
 *          OUT_OF_MEMORY
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_router_open(skerry_context *context, const skerry_router_desc *desc, skerry_router **out,
                                            skerry_error *error);

/* Errors:  ARGUMENT, STRUCT_SIZE
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_router_get_info(skerry_router *router, skerry_router_info *info, skerry_error *error);

/* Threads: any */
SKERRY_API_VOID skerry_router *skerry_router_retain(skerry_router *router);

/* Threads: any. NULL is allowed. */
SKERRY_API_VOID void skerry_router_release(skerry_router *router);

#ifdef __cplusplus
}
#endif

#endif
