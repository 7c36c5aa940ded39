// SPDX-License-Identifier: MIT
#include "policy/surprisal.hpp"

#include "base/half.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace skerry {

namespace {

constexpr int64_t block = 256; // logits: a block of f32 and its second pass stay in the first cache level
constexpr int64_t lanes = 16;

// Whole numbers in the order of the floats, NaNs beyond both infinities; its own inverse. The loops below
// compare these, because compilers keep a branch for each comparison of floats that may be NaN.
inline int32_t order_key(float x) {
    const int32_t bits = std::bit_cast<int32_t>(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float value_of_key(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

// e^x for x <= 0, flushed to e^-87 below that (1.7e-38, so that even 2^20 logits add nothing to an f32).
// Without a branch or a call, for the vectoriser. x = n ln 2 + r with |r| <= ln 2 / 2; the first part of ln 2
// has 16 bits, so n times it is exact; the Taylor polynomial to r^7 is off by r^8 / 40320 < 6e-9.
inline float exp_nonpositive(float x) {
    constexpr float round_to_integer = 0x1.8p23f;
    constexpr float ln2_high = 0x1.62e4p-1f;
    constexpr float ln2_low = 0x1.7f7d1cp-20f;
    const float bounded = value_of_key(std::max(order_key(x), order_key(-87.0f)));
    const float n = (bounded * 0x1.715476p+0f + round_to_integer) - round_to_integer;
    const float r = (bounded - n * ln2_high) - n * ln2_low;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const int32_t exponent = static_cast<int32_t>(n) + 127;
    return sum * std::bit_cast<float>(exponent << 23);
}

template <class T, float (*Widen)(T)>
struct Row {
    const T *logits;

    float at(int64_t i) const { return Widen(logits[i]); }

    // False at a NaN or +inf.
    bool log_sum_exp(int64_t vocab, double *out) const {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        alignas(64) float values[block];
        float largest = -infinity;
        double sum = 0;
        for (int64_t first = 0; first < vocab; first += block) {
            const int64_t count = std::min(block, vocab - first);
            for (int64_t i = 0; i < count; ++i)
                values[i] = at(first + i);
            for (int64_t i = count; i < block; ++i)
                values[i] = -infinity;
            int32_t highest = order_key(-infinity), lowest = highest;
            for (const float x : values) {
                const int32_t key = order_key(x);
                highest = std::max(highest, key);
                lowest = std::min(lowest, key);
            }
            if (highest >= order_key(infinity) || lowest < order_key(-infinity)) return false;
            const float block_largest = value_of_key(highest);
            if (block_largest > largest) {
                sum *= std::exp(static_cast<double>(largest) - static_cast<double>(block_largest));
                largest = block_largest;
            }
            if (largest == -infinity) continue;
            for (float &x : values)
                x = exp_nonpositive(x - largest);
            // Sixteen terms per lane in f32, the lanes in f64.
            float partial[lanes] = {};
            for (int64_t i = 0; i < block; i += lanes)
                for (int64_t lane = 0; lane < lanes; ++lane)
                    partial[lane] += values[i + lane];
            for (const float p : partial)
                sum += static_cast<double>(p);
        }
        *out = static_cast<double>(largest) + std::log(sum);
        return true;
    }

    int64_t first_not_finite(int64_t vocab) const {
        int64_t i = 0;
        while (i < vocab && at(i) < std::numeric_limits<float>::infinity())
            ++i;
        return i;
    }
};

template <class T, float (*Widen)(T)>
SurprisalResult run(const T *logits, int64_t rows, int64_t vocab, int64_t stride, const int32_t *tokens, float *nats) {
    for (int64_t i = 0; i < rows; ++i) {
        const Row<T, Widen> row{logits + i * stride};
        if (tokens[i] < 0 || tokens[i] >= vocab) return {SurprisalFault::token_out_of_range, i, tokens[i]};
        double normaliser = 0;
        if (!row.log_sum_exp(vocab, &normaliser)) return {SurprisalFault::logit_not_finite, i, row.first_not_finite(vocab)};
        const float surprisal = static_cast<float>(normaliser - static_cast<double>(row.at(tokens[i])));
        // A row of -inf alone gives a NaN.
        if (!std::isfinite(surprisal)) return {SurprisalFault::no_finite_surprisal, i, tokens[i]};
        nats[i] = surprisal; // the largest term is exactly 1, so the logarithm is not negative
    }
    return {};
}

float unchanged(float x) { return x; }

} // namespace

SurprisalResult surprisal_rows(skerry_dtype dtype, const void *logits, int64_t rows, int64_t vocab, int64_t stride, const int32_t *tokens,
                               float *nats) {
    if (dtype == SKERRY_DTYPE_F16)
        return run<uint16_t, f16_to_f32>(static_cast<const uint16_t *>(logits), rows, vocab, stride, tokens, nats);
    if (dtype == SKERRY_DTYPE_BF16)
        return run<uint16_t, bf16_to_f32>(static_cast<const uint16_t *>(logits), rows, vocab, stride, tokens, nats);
    return run<float, unchanged>(static_cast<const float *>(logits), rows, vocab, stride, tokens, nats);
}

int64_t surprisal_first_invalid(const float *nats, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (!(nats[i] >= 0) || !std::isfinite(nats[i])) return i;
    return -1;
}

} // namespace skerry
