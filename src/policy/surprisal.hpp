// SPDX-License-Identifier: MIT
#pragma once

// Surprisal from logits: -ln p(token | what came before), in nats.

#include <skerry/tensor.h>

#include <cstdint>

namespace skerry {

enum class SurprisalFault : uint8_t {
    none,
    logit_not_finite,   // NaN or +inf at (row, column); -inf is a probability of 0
    token_out_of_range, // tokens[row]; column repeats the token
    no_finite_surprisal // the token's probability is 0, or its surprisal leaves the range of f32
};

struct SurprisalResult {
    SurprisalFault fault = SurprisalFault::none;
    int64_t row = -1;
    int64_t column = -1;
};

// nats[i] = -ln softmax(logits row i)[tokens[i]] for `rows` rows of `vocab` >= 1 logits, `stride` elements
// apart; tokens[i] is the token that row i predicts, so of a prompt row t - 1 goes with token t. Token 0 of a
// sequence has no row: sekv.md 1.1 gives it 0. `dtype` is f32, f16 or bf16. Reads each row once, in blocks; no
// copy of the logits is made. Within 5e-7 + 1e-7 * nats of the exact value; results are finite and not
// negative. Stops at the first fault: earlier rows are written, that row and later ones are not. Callable
// from any thread on disjoint outputs.
SurprisalResult surprisal_rows(skerry_dtype dtype, const void *logits, int64_t rows, int64_t vocab, int64_t stride, const int32_t *tokens,
                               float *nats);

// Index of the first value that is negative, NaN or infinite; -1 when there is none.
int64_t surprisal_first_invalid(const float *nats, int64_t count);

} // namespace skerry
