/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_BACKEND_H
#define SKERRY_BACKEND_H

/* For people who write a backend. Own version, own promise: this interface may change in any minor before 1.0.
 *
 * The core validates, a backend trusts. A kernel that is not offered is NULL; supports() is answered before anything is
 * allocated. The plain C++ version in backends/cpu/ref is the meaning of every kernel; others agree with it within the tolerance that
 * docs/determinism.md states per format. Kernels allocate nothing and keep no state.
 *
 * Layout of stored bytes: docs/format.md; the arithmetic is src/codec/layout.hpp.
 */

#include <skerry/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SKERRY_BACKEND_MAJOR 0
#define SKERRY_BACKEND_MINOR 1

/* Records and tiles lie in chunks. A place is a number of 64-byte units: chunk = place >> chunk_shift, and the byte
 * inside it (place & ((1 << chunk_shift) - 1)) * 64. Records never straddle chunks. */
typedef struct skerry_pool_view {
    uint8_t *const *chunks;
    uint32_t        chunk_shift;
    uint32_t        reserved;
} skerry_pool_view;

/* plain. One entry of a work list: up to `capacity` consecutive tokens of one KV head. Lists are in position order. */
typedef struct skerry_tile {
    uint32_t place;        /* in 64-byte units */
    int32_t  first;        /* position of the first token */
    uint8_t  count;        /* tokens present */
    uint8_t  capacity;     /* tokens the layout has room for: the stride of token-fastest arrays */
    uint8_t  key_format;   /* skerry_format */
    uint8_t  value_format;
    uint16_t epoch;        /* R formats: index into the head's balance parameters. L formats: rank of the keys, and 256 times that of the
                              values; a record has no R part then */
    uint8_t  tier;         /* skerry_tier */
    uint8_t  flags;        /* the core's own */
} skerry_tile;

/* plain. Balance parameters of one epoch of one KV head, decoded. Keys are coded as R((k - mean) * balance), queries become
 * R(q / balance). decisions.md 2, 3. */
typedef struct skerry_epoch {
    const float *mean;     /* [key_dim] */
    const float *balance;  /* [key_dim], > 0 */
    float        key_exponent_scale;   /* 2^e: token scales are stored as f16 of scale * 2^-e, so that bf16 and f32 inputs fit */
    float        value_exponent_scale; /* the same for values */
} skerry_epoch;

/* plain. What is the same for all rows of one layer. */
typedef struct skerry_attend_params {
    skerry_pool_view pool;
    const float     *inverse_frequencies; /* C formats with un-rotated keys: [rotary_dims / 2]; NULL: keys are stored rotated */
    int32_t          key_dim;
    int32_t          value_dim;
    int32_t          group;               /* query heads per KV head */
    int32_t          sliding_window;      /* 0: none */
    float            scale;
    float            softcap;             /* 0: none */
    int32_t          rotary_dims;
    int32_t          rotary_pairing;
    float            attention_factor;    /* never 0 */
    int32_t          value_group;         /* C formats: channels per value scale */
    skerry_dtype     grid_dtype;          /* C formats: f16 or bf16 */
    uint32_t         tiers;               /* SKERRY_TIERS_* mask; entries of other tiers are skipped */
    uint32_t         exact;               /* non-zero: float32 throughout */
    uint32_t         reserved;
} skerry_attend_params;

/* plain. Work on one KV head: rows x group query vectors against tiles [tile_begin, tile_end). */
typedef struct skerry_attend_task {
    const skerry_tile  *tiles;
    const skerry_epoch *epochs;
    const float        *queries;       /* [rows][group][key_dim], as the model's attention uses them, not scaled */
    const int32_t      *row_positions; /* [rows], ascending */
    float              *out;           /* [rows][group][value_dim]: sum of exp(logit - max) * v, not normalised */
    float              *max;           /* [rows][group]: largest logit, -inf when nothing was seen */
    float              *sum;           /* [rows][group]: sum of exp(logit - max) */
    float              *tile_max;      /* NULL, or [tile_end - tile_begin][rows][group] */
    float              *tile_sum;      /* relative to tile_max */
    void               *scratch;       /* attend_scratch_bytes, 64-byte aligned */
    int32_t             tile_begin;
    int32_t             tile_end;
    int32_t             rows;
    int32_t             reserved;
} skerry_attend_task;

/* plain. Tokens of one KV head to or from stored form. Keys or values, by `side`. */
typedef int32_t skerry_side;
enum {
    SKERRY_SIDE_KEY   = 0,
    SKERRY_SIDE_VALUE = 1
};

typedef struct skerry_code_params {
    const skerry_epoch *epoch;       /* R formats, both sides (values use value_exponent_scale only); else NULL */
    const float        *inverse_frequencies; /* C formats, keys: un-rotate before coding and rotate after decoding; NULL: not */
    float               attention_factor;
    int32_t             rotary_dims;
    int32_t             rotary_pairing;
    int32_t             position;    /* of the first token */
    int32_t             dim;
    int32_t             capacity;    /* of the layout */
    int32_t             count;       /* tokens to code, from the first on */
    int32_t             value_group;
    skerry_dtype        grid_dtype;
    skerry_format       format;
    skerry_side         side;
    int32_t             rank;        /* L formats, decode: components stored */
} skerry_code_params;

/* plain. One matrix to factorise: the keys or the values of one span of one KV head, uncentred and as attention uses them. */
typedef struct skerry_factor_params {
    int32_t       dim;
    int32_t       count;       /* tokens, 1 to 128: also the capacity of the part that is written */
    int32_t       max_rank;    /* 1 or more; ranks above min(count, dim) count as that */
    float         error_bound; /* largest relative error ||X - decoded|| / ||X|| in the Frobenius norm; 0: none, store max_rank */
    skerry_format format;      /* L format */
    skerry_side   side;
    int32_t       basis_rank;  /* with a basis: its components, 1 to min(count, dim) */
    uint32_t      reserved;
    const void   *basis;       /* NULL, or an L part of the same format, side and dim: its basis is taken as it is and all of its components
                                  are stored, with the token factors that come nearest to X; max_rank and error_bound are not used */
} skerry_factor_params;

/* plain. What was stored. */
typedef struct skerry_factor_result {
    int32_t rank;    /* components stored: 0 for a matrix of zeros, never more than its numerical rank */
    float   error;   /* relative error of what the part decodes to, rounded up; above error_bound where max_rank did not meet it */
} skerry_factor_result;

/* Routing: scores of segments whose detail is not attended, from a few vectors that stand for their keys (src/codec/router_key.hpp,
 * docs/format.md). */
typedef int32_t skerry_route_form;
enum {
    SKERRY_ROUTE_CENTROIDS = 1, /* means of keys in SKERRY_FORMAT_R2 */
    SKERRY_ROUTE_PROJECTED = 2  /* projections in int8 or int4, for trained routers */
};

/* plain. What is the same for all KV heads of one layer. */
typedef struct skerry_route_params {
    skerry_route_form form;
    int32_t           dim;     /* CENTROIDS: key_dim. PROJECTED: rank of the projection, 1 to 32; above 16 in int4 */
    int32_t           group;   /* query heads per KV head */
    int32_t           vectors; /* per segment. CENTROIDS: 4. PROJECTED: 1 to 4 */
    int32_t           sets;    /* PROJECTED: 1 when the group shares its vectors, `group` when each query head has its own; else 1 */
    float             scale;   /* of logits; 1 where the queries carry it */
    float             softcap; /* 0: none */
    uint32_t          reserved;
} skerry_route_params;

/* plain. Segments of one KV head: exp(log_unit[h]) scores[h][s] = exp(bias_h) times the sum over vectors c of n_c exp(logit(query_h .
 * vector_c)), the estimated sum of exp(logit) over the tokens of segment s. The unit is the kernel's choice: log_unit is finite, and a
 * head's largest score lies between 2^-40 and 2^50. A score is 0 for a segment without vectors; one that should be less than 2^-50 of its
 * head's largest may be anything below that, 0 too. No NaN where the input is finite. */
typedef struct skerry_route_task {
    const skerry_epoch *balance;  /* CENTROIDS: of all segments; else NULL */
    const float        *queries;  /* [group][dim]: CENTROIDS as attention uses them, PROJECTED after projection */
    const float        *bias;     /* NULL or [group] */
    const uint8_t      *keys;     /* [segments][router_key_bytes] */
    const uint8_t      *counts;   /* [segments][vectors]: n_c, 0: absent */
    float              *scores;   /* [group][score_stride] */
    float              *log_unit; /* [group] */
    int64_t             score_stride; /* >= segments */
    void               *scratch;  /* route_scratch_bytes, 64-byte aligned */
    int32_t             segments;
    uint32_t            reserved;
} skerry_route_task;

/* The kernels of one device. Every function is callable from any thread on disjoint outputs. */
typedef struct skerry_kernels {
    uint32_t struct_size;
    uint16_t interface_major;
    uint16_t interface_minor;
    const char *name;      /* for instance "cpu avx512-vnni" */

    /* 1 when records of this format and dimension can be coded and attended; asked before any allocation. */
    int32_t (*supports)(skerry_format format, skerry_side side, int32_t dim);

    /* Writes rows [count][dim] (f32, row stride in elements) as tokens [first, first + count) of a full-precision tile part. */
    void (*append)(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count,
                   const float *rows, int64_t row_stride, void *part);

    /* rows [count][dim] f32 -> part (any format but L). scratch: code_scratch_bytes. */
    void (*encode)(const skerry_code_params *params, const float *rows, void *part, void *scratch);

    /* part -> rows [count][dim] f32: keys as attention uses them. */
    void (*decode)(const skerry_code_params *params, const void *part, float *rows, void *scratch);
    size_t (*code_scratch_bytes)(int32_t dim, int32_t capacity);

    void (*attend)(const skerry_attend_params *params, const skerry_attend_task *task);
    size_t (*attend_scratch_bytes)(const skerry_attend_params *params, int32_t rows, int32_t tiles);

    /* Merges `parts` partial results of rows x group heads, in order of their index: out, max and sum of part i lie i * stride
     * further. Writes normalised out [heads][value_dim] and lse [heads]; sink_logits NULL or [group], repeated over rows. */
    void (*merge)(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride,
                  const float *max, const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse);

    /* 1 when routing keys of this shape can be scored; asked before any allocation. */
    int32_t (*route_supports)(const skerry_route_params *params);
    void (*route)(const skerry_route_params *params, const skerry_route_task *task);
    size_t (*route_scratch_bytes)(const skerry_route_params *params);

    /* rows [count][dim] f32, finite -> part of an L format, laid out for the rank that the result names; `part` has room for max_rank.
     * With a bound: the smallest rank found to meet it. With a basis: the part begins with the bytes of that basis. Stores the same bytes
     * on every instruction set. scratch: factorise_scratch_bytes, 64-byte aligned. */
    void (*factorise)(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result, void *scratch);
    size_t (*factorise_scratch_bytes)(int32_t dim, int32_t count);
} skerry_kernels;

#ifdef __cplusplus
}
#endif

#endif
