/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_STEP_H
#define SKERRY_STEP_H

/* A step appends tokens to one or more sequences, layer by layer, lets the runtime attend, and is then committed or aborted as a
 * whole. Within a step, layers come in any order, but each layer is appended once before it is attended, viewed or gathered.
 *
 *     begin -> for each layer: append, then attend | view | gather + observe -> commit | abort
 */

#include <skerry/sequence.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct skerry_step skerry_step;

enum {
    SKERRY_STEP_PREFILL = 1u << 0 /* these tokens are part of a prompt that goes on; the first step without it ends the prompt */
};

/* desc */
typedef struct skerry_step_desc {
    uint32_t          struct_size;
    uint32_t          flags;        /* SKERRY_STEP_* */
    const skerry_seq *seqs;         /* [seq_count], each at most once */
    const int32_t    *token_counts; /* [seq_count], at least 1 each; rows of all tensors follow in this order */
    const int64_t    *positions;    /* [seq_count] first position of each, checked against what is stored; NULL: not checked */
    int32_t           seq_count;
    uint32_t          reserved;
} skerry_step_desc;

/* Reserves every byte the step can need, or fails with nothing changed. One step may be open per cache.
 * In PREFILL_SPLIT mode a cache with SKERRY_LAYER_SHARED layers takes steps that end at the next routing event or before
 * (skerry_seq_info.next_event_position): a reading layer would otherwise see its source after moves of later positions.
 * Errors:  STALE_ID, ARGUMENT, STATE, OVER_BUDGET, OUT_OF_MEMORY
 * Threads: one at a time per cache
 * Since:   0.1 */
SKERRY_API skerry_status skerry_step_begin(skerry_cache *cache, const skerry_step_desc *desc, skerry_step **out,
                                           skerry_error *error);

/* Stores keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim], keys as the model's attention uses them
 * (after the rotary embedding). Converted to the store dtype, rounding to nearest even. No allocation.
 * Errors:  ARGUMENT (shape, dtype, layer), STATE (appended already, shared layer), NONFINITE, UNSUPPORTED (device)
 * Threads: one at a time per cache; different layers of one step may be appended and attended in parallel
 * Since:   0.1 */
SKERRY_API skerry_status skerry_step_append(skerry_step *step, int32_t layer, const skerry_tensor *keys,
                                            const skerry_tensor *values, const skerry_stream *stream, skerry_error *error);

enum {
    SKERRY_ATTEND_EXACT    = 1u << 0, /* float32 throughout for this call */
    SKERRY_ATTEND_NO_SCORE = 1u << 1  /* do not add this call's masses to the scores */
};

/* desc. Causal: a row at position p sees positions <= p of its own sequence, within the layer's sliding window. */
typedef struct skerry_attend_desc {
    uint32_t             struct_size;
    uint32_t             flags;       /* SKERRY_ATTEND_* */
    const skerry_tensor *queries;     /* [tokens, query_heads, key_dim] */
    const skerry_tensor *out;         /* [tokens, query_heads, value_dim]; any dtype */
    const skerry_tensor *lse;         /* NULL, or [tokens, query_heads] f32: log of the sum of exp(logits); -inf when nothing was seen */
    const float         *sink_logits; /* NULL, or [query_heads]: a logit per head that takes mass and has value 0 */
    const skerry_stream *stream;      /* NULL on the CPU */
    int32_t              layer;
    uint32_t             tiers;       /* SKERRY_TIERS_*; 0: all. A part of the tiers never scores: hand the merged lse to observe */
} skerry_attend_desc;

/* Attends to the chosen tiers where their bytes lie, in one pass, with float32 accumulation. With all tiers the masses per window
 * go into the scores, and in PREFILL_SPLIT mode the layer's windows move at each period the step crosses. Masses and
 * outputs do not depend on the number of workers, on other sequences, or on how tokens are cut into steps.
 * SEKV with SKERRY_FIDELITY_PAPER, behind its prompt: all tiers, no sink_logits (UNSUPPORTED); OVER_BUDGET when a KV group expands more
 * than sekv.budget_entries.
 * Errors:  ARGUMENT, STATE, NONFINITE, UNSUPPORTED, OVER_BUDGET; SKERRY_ERROR_INTERNAL when the host's parallel_for failed
 * Threads: as skerry_step_append
 * Since:   0.1 */
SKERRY_API skerry_status skerry_step_attend(skerry_step *step, const skerry_attend_desc *desc, skerry_error *error);

/* For a host that attends itself, SEKV: every KV head chooses by `queries` [sequences, query_heads, key_dim] what it reads from the host,
 * and fetches it; skerry_step_view, gather and observe of the layer then have it (tier HOST) in place of what the device holds of it, until
 * this layer, or one that shares its cache, chooses again. One token per sequence in the step. skerry_step_attend chooses by itself.
 * Errors:  ARGUMENT, STATE (more than one token, layer not appended), NONFINITE, UNSUPPORTED
 * Threads: as skerry_step_append
 * Since:   0.1 */
SKERRY_API skerry_status skerry_step_zoom(skerry_step *step, int32_t layer, const skerry_tensor *queries, const skerry_stream *stream,
                                          skerry_error *error);

/* plain. Up to 16 (full and R formats) or 128 (C formats) consecutive tokens of one KV head, where they lie.
 * Full formats: keys are [key_dim][capacity] (token fastest), values [capacity][value_dim]. Others: docs/format.md.
 * Valid until the step ends. */
typedef struct skerry_part {
    const void   *keys;
    const void   *values;
    int64_t       position;     /* of the first token */
    int32_t       tokens;       /* present; from the first on */
    int32_t       capacity;
    skerry_tier   tier;
    skerry_format key_format;
    skerry_format value_format;
    int32_t       window;       /* index of the window, or -1 for sinks */
} skerry_part;

/* Lists the parts of one sequence, layer and KV head in position order, the step's own tokens included.
 * Errors:  ARGUMENT, STATE (layer not appended), UNSUPPORTED (SEKV with SKERRY_FIDELITY_PAPER, behind its prompt). Threads: as
 *          skerry_step_append */
SKERRY_API skerry_status skerry_step_view(skerry_step *step, int32_t seq_index, int32_t layer, int32_t kv_head, uint32_t tiers,
                                          skerry_part *parts, int32_t capacity, int32_t *needed, skerry_error *error);

/* desc. Outputs may be NULL to ask for the count alone. */
typedef struct skerry_gather_desc {
    uint32_t             struct_size;
    uint32_t             flags;     /* none defined; must be 0 */
    const skerry_tensor *keys;      /* [>= tokens, key_dim] any dtype, any strides */
    const skerry_tensor *values;    /* [>= tokens, value_dim] */
    int64_t             *positions; /* [>= tokens] */
    float               *bias;      /* [>= tokens]: to be added to the scaled logit; 0 for tokens */
    int32_t             *windows;   /* [>= tokens]: window index, or -1 for sinks */
    int32_t              seq_index; /* place in the step */
    int32_t              layer;
    int32_t              kv_head;
    uint32_t             tiers;     /* SKERRY_TIERS_*; 0: all */
} skerry_gather_desc;

/* Writes the readable tokens of one sequence, layer and KV head in position order, keys as attention uses them, and their number
 * to `tokens`. SKERRY_INCOMPLETE when an output is too small (nothing is written but the number).
 * Errors:  ARGUMENT, STATE, UNSUPPORTED (as skerry_step_view). Threads: as skerry_step_append */
SKERRY_API skerry_status skerry_step_gather(skerry_step *step, const skerry_gather_desc *desc, int32_t *tokens,
                                            skerry_error *error);

/* desc. What a host that attends itself has seen, for one sequence, layer and KV head. */
typedef struct skerry_observe_desc {
    uint32_t             struct_size;
    uint32_t             flags;        /* none defined; must be 0 */
    const float         *masses;       /* [rows, token_count]: per row of the step, the probability of each gathered token, mean over the
                                          group's query heads, in the order of skerry_step_gather with all tiers; NULL: none */
    const float         *merged_lse;   /* [rows, query_heads / kv_heads]: the log-sum-exp over all tiers, after an attend over some of them;
                                          the library then computes the masses itself from `queries`. NULL: none */
    const skerry_tensor *queries;      /* [rows, query_heads / kv_heads, key_dim] of the head's group; NULL: none. For the keys' balance */
    int32_t              seq_index;
    int32_t              layer;
    int32_t              kv_head;
    int32_t              token_count;  /* columns of masses */
} skerry_observe_desc;

/* Adds masses (and query statistics) to the scores. Masses must be finite and in [0, 1].
 * Errors:  ARGUMENT, STATE (layer not appended, scored already), NONFINITE, UNSUPPORTED (as skerry_step_view). Threads: as
 *          skerry_step_append */
SKERRY_API skerry_status skerry_step_observe(skerry_step *step, const skerry_observe_desc *desc, skerry_error *error);

/* Surprisal of `rows` tokens in nats, -ln softmax(logits row i)[tokens[i]], in one pass over logits [rows, vocabulary] (f32, f16 or bf16,
 * packed rows, any row stride) without a copy of them. Row i is what the model says before tokens[i]: of a prompt, row t - 1 goes with
 * token t, and token 0, which has no row, has surprisal 0. The error is at most 5e-7 + 1e-7 nats per nat. A refusal writes the rows before
 * the culprit only.
 * Errors:  ARGUMENT (shape, strides, token out of range), NONFINITE (NaN or +inf logit; a token of probability 0), UNSUPPORTED (device)
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_surprisal_from_logits(const skerry_tensor *logits, const int32_t *tokens, int32_t rows, float *nats,
                                                      skerry_error *error);

/* Hands over the surprisal of the step's tokens of one sequence in nats, -ln p(token | before), once per step and before it is committed.
 * SEKV cuts spans by it (SKERRY_SEGMENTS_SURPRISAL, and a prompt under SKERRY_FIDELITY_PAPER); any other cache keeps its statistics
 * (skerry_seq_info).
 * Errors:  ARGUMENT (count), NONFINITE (NaN, infinite or negative). Threads: one at a time per cache */
SKERRY_API skerry_status skerry_step_surprisal(skerry_step *step, int32_t seq_index, const float *nats, int32_t count,
                                               skerry_error *error);

/* Makes the step part of its sequences and runs the routing events that are due. (QEVICT with paper fidelity: the
 * published event before decode step t runs when the token before it is committed, with the next token counted in.)
 * The handle is gone afterwards on success; after an error the step is open and as it was.
 * Errors:  STATE (a layer that stores was not appended, surprisal was not handed over). Where a prompt ends under SEKV with paper fidelity
 *          also OVER_BUDGET (its bytes, or entries, pass the limit), OUT_OF_MEMORY, INTERNAL (the host's parallel_for failed)
 * Threads: one at a time per cache
 * Since:   0.1 */
SKERRY_API skerry_status skerry_step_commit(skerry_step *step, skerry_error *error);

/* Undoes the step as if it had never begun. NULL is allowed. Threads: one at a time per cache */
SKERRY_API_VOID void skerry_step_abort(skerry_step *step);

/* plain. One window that changed tier. */
typedef struct skerry_transition {
    skerry_seq    seq;
    int64_t       position;     /* event position */
    int32_t       window;
    int32_t       layer;
    int32_t       kv_head;
    skerry_tier   from;
    skerry_tier   to;
    skerry_format key_format;   /* after the move; 0 when evicted */
    skerry_format value_format;
    uint32_t      written_bytes; /* 0 when an existing record was activated again */
    double        score;
} skerry_transition;

/* desc. All may be NULL. Called on the thread that called the library; none may call back into it. */
typedef struct skerry_callbacks_desc {
    uint32_t struct_size;
    uint32_t flags;             /* none defined; must be 0 */
    void    *user;
    /* A layer is named for the first time in the open step. */
    void (*before_layer)(void *user, int32_t layer);
    /* An event is due and nothing was attended or observed for this layer since the last one. Fill masses[window_count] for the
     * listed windows and return 1, or return 0 for none: the windows are then ranked by what is known, newest first. */
    int32_t (*scores_wanted)(void *user, skerry_seq seq, int32_t layer, int32_t kv_head, const int32_t *windows,
                             int32_t window_count, float *masses);
    /* All moves of a committed step, once, in the order they were made. */
    void (*transitions)(void *user, const skerry_transition *moves, int32_t count);
    /* A step was committed; called once per sequence. */
    void (*committed)(void *user, skerry_seq seq, int64_t length_tokens);
} skerry_callbacks_desc;

#ifdef __cplusplus
}
#endif

#endif
