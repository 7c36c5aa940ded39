// SPDX-License-Identifier: MIT
#pragma once

// SeKV as published (arXiv 2606.31145): anchors and spans of a whole prompt, summaries and factors of spans,
// rank gates, routing per query head, and attention at two resolutions. REF marks what the released code does
// where the paper says something else. docs/design/spans.md: what production does instead.
//
// Pure functions of f32 arrays, dense and row-major unless a stride is named; sums run in f64, in a fixed
// order. Nothing is allocated: scratch is the caller's. Inputs are finite unless a fault says otherwise.
// Callable from any thread on disjoint outputs.

#include <cstdint>

#include "model/spans.hpp"

namespace skerry {

enum class SekvFault : uint8_t {
    none,
    surprisal_count,   // not one per token
    surprisal_invalid, // negative, NaN or infinite; the index says where
    alpha_not_finite,
    minimum_negative, // l_min
    budget_not_positive,
    persistent_over_budget, // anchors, full-resolution tokens and spans alone exceed the entries
    group_over_budget       // the union of the heads' choices does
};

// ---- anchors and spans ----

struct PaperSegmentation {
    SekvFault fault = SekvFault::none;
    int64_t fault_index = -1;
    float mean = 0;      // of f32, as the released code's statistics are
    float deviation = 0; // of the population
    double threshold = 0;
    int64_t anchors = 0;
    int64_t spans = 0;
};

// nats [count], one per token, nats[0] = 0. A token is an anchor iff its surprisal, as f32, exceeds
// mean + alpha * deviation of the whole prompt, rounded to f32; spans are the gaps. Without any anchor a
// prompt of at least l_min and two tokens is one span that leaves token 0 out. Writes ascending positions to
// anchors, room for `tokens`, and to spans, room for (tokens + 1) / 2; nothing at a fault.
PaperSegmentation paper_segment(const float *nats, int64_t count, int64_t tokens, double alpha, int32_t l_min, int32_t *anchors,
                                PaperSpan *spans);

// ---- span memory ----

// weights [tokens]: nats over their sum, or 1 / tokens when the sum is 0.
void paper_weights(const float *nats, int32_t tokens, float *weights);

// out [dim] = sum over t of weights[t] * rows[t]; rows lie `stride` elements apart.
void paper_summary(const float *weights, const float *rows, int64_t stride, int32_t tokens, int32_t dim, float *out);

// out [dim] = sum over t of weights[t] * (rows[t] - mean)^2 per channel: the diagonal of the weighted covariance. Not in the paper.
void paper_spread(const float *weights, const float *rows, int64_t stride, int32_t tokens, int32_t dim, const float *mean, float *out);

constexpr int32_t paper_rank(int32_t tokens, int32_t dim, int32_t rank_max) {
    const int32_t shorter = tokens < dim ? tokens : dim;
    return shorter < rank_max ? shorter : rank_max;
}

// One side of one span and KV head: left diag(sigma) right^T, sigma descending.
struct PaperFactors {
    int32_t tokens = 0;
    int32_t dim = 0;
    int32_t rank = 0;
    const float *left = nullptr;  // [tokens][rank]
    const float *sigma = nullptr; // [rank]
    const float *right = nullptr; // [dim][rank]
};

// Doubles that paper_factorise takes as scratch.
int64_t paper_factor_scratch(int32_t tokens, int32_t dim);

// The best approximation of rows [tokens][dim], uncentred, of rank paper_rank(tokens, dim, rank_max), by an
// exact decomposition (the released code's is random beyond 32 tokens). Any rank of rows, zero rows included.
void paper_factorise(const float *rows, int64_t stride, int32_t tokens, int32_t dim, int32_t rank_max, float *left, float *sigma,
                     float *right, double *scratch);

// The shared gate network: rank_max + dim -> 64 -> 64 -> rank_max, weights [outputs][inputs].
inline constexpr int32_t paper_gate_hidden = 64;

struct PaperGates {
    int32_t rank_max = 0;
    int32_t dim = 0; // of keys
    const float *w0 = nullptr;
    const float *b0 = nullptr;
    const float *w1 = nullptr;
    const float *b1 = nullptr;
    const float *w2 = nullptr;
    const float *b2 = nullptr;
};

// gates [rank_max]: in (0, 1) below `rank`, 0 from there on. sigma [rank] of keys for both sides (REF), or of
// the side in question (the paper's equation 11); the summary is the key's in either case.
void paper_gates(const PaperGates &network, const float *sigma, int32_t rank, const float *mean_key, float *gates);

// Sum of the gates.
double paper_effective_rank(const float *gates, int32_t rank);

// rows [tokens][dim], `stride` apart = left diag(gates * sigma) right^T; gates null: 1.
void paper_reconstruct(const PaperFactors &factors, const float *gates, float *rows, int64_t stride);

// Bytes of one layer as the method counts them. Factors are f32, one side.
constexpr uint64_t paper_factor_bytes(uint64_t kv_heads, uint64_t tokens, uint64_t dim, uint64_t rank) {
    return kv_heads * 4 * rank * (tokens + 1 + dim);
}

// Keys and values of `tokens` tokens.
constexpr uint64_t paper_raw_bytes(uint64_t kv_heads, uint64_t key_dim, uint64_t value_dim, uint64_t element_bytes, uint64_t tokens) {
    return kv_heads * (key_dim + value_dim) * element_bytes * tokens;
}

// What stays on the device: exact tokens, and f32 summaries of all spans, full-resolution ones included.
constexpr uint64_t paper_device_bytes(uint64_t kv_heads, uint64_t key_dim, uint64_t value_dim, uint64_t element_bytes, uint64_t anchors,
                                      uint64_t full_resolution_tokens, uint64_t spans) {
    return paper_raw_bytes(kv_heads, key_dim, value_dim, element_bytes, anchors + full_resolution_tokens) +
           paper_raw_bytes(kv_heads, key_dim, value_dim, 4, spans);
}

// ---- routing ----

// out [rows] = w [rows][dim] x.
void paper_project(const float *w, int32_t rows, int32_t dim, const float *x, float *out);

// The key of a span for one query head: paper_project of its mean key, over its length (at least 1e-8).
void paper_route_key(const float *w, int32_t summary_dim, int32_t dim, const float *mean_key, float *out);

// One query head over `spans` compressed spans. query [summary_dim] comes from paper_project, keys
// [spans][summary_dim] from paper_route_key. logits = query . key / sqrt(summary_dim) + ln tokens;
// alphas = sigmoid(logits).
void paper_route(const float *query, const float *keys, const int32_t *tokens, int32_t spans, int32_t summary_dim, float *logits,
                 float *alphas);

inline constexpr int64_t paper_no_budget = INT64_MAX;

// Spans that one query head expands: alpha > tau, as many as `budget` entries allow, by falling alpha (ties:
// the earlier span), going on behind one that does not fit. `persistent` = anchors + full-resolution tokens +
// compressed spans; an expanded span counts max(0, tokens - 1) more. selected [spans] of 0 or 1, order [spans]
// is scratch. A fault leaves selected all 0.
SekvFault paper_select(const float *alphas, const int32_t *tokens, int32_t spans, float tau, int64_t persistent, int64_t budget,
                       int32_t *order, uint8_t *selected);

// The released code's check of a KV group after paper_select: the union over its heads, selected
// [heads][spans], must fit too, although each head fitted.
SekvFault paper_check_group(const uint8_t *selected, int32_t heads, const int32_t *tokens, int32_t spans, int64_t persistent,
                            int64_t budget);

// The same decision for a whole KV group, never over budget: alphas [heads][spans], tau [heads]. Takes spans
// by the falling sum of alpha over the heads that want them (a sum finds more than a maximum: recall.md 2),
// skipping what does not fit. False when `persistent` alone exceeds the budget; then nothing is selected.
bool paper_select_group(const float *alphas, const int32_t *tokens, int32_t heads, int32_t spans, const float *tau, int64_t persistent,
                        int64_t budget, int32_t *order, uint8_t *selected);

// ---- attention ----

// Post-RoPE rows of one KV head.
struct PaperMemorySpan {
    int32_t tokens = 0;
    bool full_resolution = false;
    const float *keys = nullptr;   // [tokens][key_dim], or the summary row of a compressed span
    const float *values = nullptr; // [tokens][value_dim], or the summary row
    // Compressed spans that some head expands.
    PaperFactors key_factors;
    PaperFactors value_factors;
    const float *key_gates = nullptr;   // [rank], null: 1
    const float *value_gates = nullptr; // REF: the key's
    // [key_dim] or null. The summary's logit gains half the variance of the span's logits, q^T C q scale^2 / 2.
    const float *spread = nullptr;
};

struct PaperMemory {
    int32_t key_dim = 0;
    int32_t value_dim = 0;
    float scale = 0; // 1 / sqrt(key_dim)
    int64_t anchors = 0;
    const float *anchor_keys = nullptr;
    const float *anchor_values = nullptr;
    int32_t spans = 0;
    const PaperMemorySpan *span = nullptr; // ascending
};

// What becomes of the resolution that a head did not choose.
enum class PaperOff : uint8_t {
    leak,  // REF: its rows stay, with weight 1e-6
    absent // they do not count
};

// Doubles that paper_attend takes as scratch when every span is expanded.
int64_t paper_attend_scratch(const PaperMemory &memory);

// One query row of a layer: heads = kv_heads * group, head h reads memories[h / group]. queries
// [heads][key_dim], not scaled; zoom [heads][compressed spans] of 0 or 1; out [heads][value_dim]; lse [heads]
// or null: log of the sum of exp(score), -inf without rows. One softmax over anchors, tokens of
// full-resolution spans, summary rows (plus ln tokens), and the tokens of spans that some head of the group
// expanded. No rows: zeros. Spans have at least one token. Afterwards scratch begins with the weights of the
// last head's rows: anchors, then per span its tokens, or its summary row and behind that its expanded tokens.
void paper_attend(const PaperMemory *memories, int32_t kv_heads, int32_t group, const float *queries, const uint8_t *zoom, PaperOff off,
                  float *out, float *lse, double *scratch);

} // namespace skerry
