// SPDX-License-Identifier: MIT
#include "policy/sekv_paper.hpp"

#include "codec/svd.hpp"
#include "policy/surprisal.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace skerry {

namespace {

// Constants of the released code (sekv.md 1.4).
constexpr double gate_floor = 1e-6;
constexpr double norm_floor = 1e-8;

double dot(const float *a, const float *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; ++i)
        sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
}

double norm(const float *x, int32_t n) { return std::sqrt(dot(x, x, n)); }

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

double gelu(double x) { return 0.5 * x * (1 + std::erf(x * 0.70710678118654752440)); }

double gated_sigma(const PaperFactors &factors, const float *gates, int32_t i) {
    return static_cast<double>(factors.sigma[i]) * (gates == nullptr ? 1.0 : static_cast<double>(gates[i]));
}

int64_t extra_entries(int32_t tokens) { return std::max(0, tokens - 1); }

bool any_head(const uint8_t *selected, int32_t heads, int32_t spans, int32_t span) {
    for (int32_t h = 0; h < heads; ++h)
        if (selected[static_cast<int64_t>(h) * spans + span] != 0) return true;
    return false;
}

int64_t most_rows(const PaperMemory &memory) {
    int64_t rows = memory.anchors;
    for (int32_t s = 0; s < memory.spans; ++s)
        rows += memory.span[s].tokens + (memory.span[s].full_resolution ? 0 : 1);
    return rows;
}

int64_t most_rank(const PaperMemory &memory) {
    int32_t rank = 0;
    for (int32_t s = 0; s < memory.spans; ++s)
        rank = std::max({rank, memory.span[s].key_factors.rank, memory.span[s].value_factors.rank});
    return rank;
}

} // namespace

PaperSegmentation paper_segment(const float *nats, int64_t count, int64_t tokens, double alpha, int32_t l_min, int32_t *anchors,
                                PaperSpan *spans) {
    PaperSegmentation result;
    const auto fault = [&](SekvFault what, int64_t index) {
        result.fault = what;
        result.fault_index = index;
        return result;
    };
    if (count != tokens) return fault(SekvFault::surprisal_count, count);
    if (!std::isfinite(alpha)) return fault(SekvFault::alpha_not_finite, -1);
    if (l_min < 0) return fault(SekvFault::minimum_negative, -1);
    if (const int64_t bad = surprisal_first_invalid(nats, count); bad >= 0) return fault(SekvFault::surprisal_invalid, bad);
    if (tokens == 0) return result;

    const double n = static_cast<double>(tokens);
    double sum = 0, squares = 0;
    for (int64_t t = 0; t < tokens; ++t)
        sum += static_cast<double>(nats[t]);
    for (int64_t t = 0; t < tokens; ++t)
        squares += (static_cast<double>(nats[t]) - sum / n) * (static_cast<double>(nats[t]) - sum / n);
    result.mean = static_cast<float>(sum / n);
    result.deviation = static_cast<float>(std::sqrt(squares / n));
    result.threshold = static_cast<double>(result.mean) + alpha * static_cast<double>(result.deviation);

    const auto close = [&](int64_t begin, int64_t end) {
        if (begin == end) return;
        spans[result.spans++] = {static_cast<int32_t>(begin), static_cast<int32_t>(end), end - begin < l_min};
    };
    const float threshold = static_cast<float>(result.threshold);
    int64_t begin = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        if (!(nats[t] > threshold)) continue;
        anchors[result.anchors++] = static_cast<int32_t>(t);
        close(begin, t);
        begin = t + 1;
    }
    if (result.anchors == 0 && tokens >= l_min && tokens > 1) begin = 1;
    close(begin, tokens);
    return result;
}

void paper_weights(const float *nats, int32_t tokens, float *weights) {
    double sum = 0;
    for (int32_t t = 0; t < tokens; ++t)
        sum += static_cast<double>(nats[t]);
    for (int32_t t = 0; t < tokens; ++t)
        weights[t] = static_cast<float>(sum > 0 ? static_cast<double>(nats[t]) / sum : 1.0 / tokens);
}

void paper_summary(const float *weights, const float *rows, int64_t stride, int32_t tokens, int32_t dim, float *out) {
    constexpr int32_t block = 64;
    for (int32_t first = 0; first < dim; first += block) {
        const int32_t channels = std::min(block, dim - first);
        double sums[block] = {};
        for (int32_t t = 0; t < tokens; ++t)
            for (int32_t j = 0; j < channels; ++j)
                sums[j] += static_cast<double>(weights[t]) * static_cast<double>(rows[t * stride + first + j]);
        for (int32_t j = 0; j < channels; ++j)
            out[first + j] = static_cast<float>(sums[j]);
    }
}

void paper_spread(const float *weights, const float *rows, int64_t stride, int32_t tokens, int32_t dim, const float *mean, float *out) {
    for (int32_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (int32_t t = 0; t < tokens; ++t) {
            const double apart = static_cast<double>(rows[t * stride + j]) - static_cast<double>(mean[j]);
            sum += static_cast<double>(weights[t]) * apart * apart;
        }
        out[j] = static_cast<float>(sum);
    }
}

int64_t paper_factor_scratch(int32_t tokens, int32_t dim) {
    const int64_t shorter = std::min(tokens, dim);
    return static_cast<int64_t>(tokens) * dim + (static_cast<int64_t>(tokens) + 1 + dim) * shorter +
           static_cast<int64_t>(svd_scratch_doubles(tokens, dim));
}

void paper_factorise(const float *rows, int64_t stride, int32_t tokens, int32_t dim, int32_t rank_max, float *left, float *sigma,
                     float *right, double *scratch) {
    const int32_t shorter = std::min(tokens, dim), rank = paper_rank(tokens, dim, rank_max);
    double *matrix = scratch;
    double *u = matrix + static_cast<int64_t>(tokens) * dim;
    double *s = u + static_cast<int64_t>(tokens) * shorter;
    double *v = s + shorter;
    for (int32_t t = 0; t < tokens; ++t)
        for (int32_t j = 0; j < dim; ++j)
            matrix[static_cast<int64_t>(t) * dim + j] = static_cast<double>(rows[t * stride + j]);
    svd_jacobi(matrix, tokens, dim, u, s, v, v + static_cast<int64_t>(dim) * shorter);
    const auto keep = [&](const double *from, int32_t count, float *to) {
        for (int32_t row = 0; row < count; ++row)
            for (int32_t i = 0; i < rank; ++i)
                to[static_cast<int64_t>(row) * rank + i] = static_cast<float>(from[static_cast<int64_t>(row) * shorter + i]);
    };
    keep(u, tokens, left);
    keep(v, dim, right);
    for (int32_t i = 0; i < rank; ++i)
        sigma[i] = static_cast<float>(s[i]);
}

void paper_gates(const PaperGates &network, const float *sigma, int32_t rank, const float *mean_key, float *gates) {
    constexpr int32_t hidden = paper_gate_hidden;
    const double sigma_scale = rank == 0 ? 0 : 1 / (static_cast<double>(sigma[0]) + norm_floor);
    const double key_scale = 1 / std::max(norm(mean_key, network.dim), norm_floor);
    const int64_t inputs = static_cast<int64_t>(network.rank_max) + network.dim;
    double first[hidden], second[hidden];
    for (int32_t o = 0; o < hidden; ++o) {
        const float *w = network.w0 + o * inputs; // the sigmas come first, zero beyond the rank
        first[o] = gelu(static_cast<double>(network.b0[o]) + sigma_scale * dot(w, sigma, rank) +
                        key_scale * dot(w + network.rank_max, mean_key, network.dim));
    }
    for (int32_t o = 0; o < hidden; ++o) {
        double sum = static_cast<double>(network.b1[o]);
        for (int32_t i = 0; i < hidden; ++i)
            sum += static_cast<double>(network.w1[o * hidden + i]) * first[i];
        second[o] = gelu(sum);
    }
    for (int32_t o = 0; o < network.rank_max; ++o) {
        double sum = static_cast<double>(network.b2[o]);
        for (int32_t i = 0; i < hidden; ++i)
            sum += static_cast<double>(network.w2[o * hidden + i]) * second[i];
        gates[o] = o < rank ? static_cast<float>(sigmoid(sum)) : 0.0f;
    }
}

double paper_effective_rank(const float *gates, int32_t rank) {
    double sum = 0;
    for (int32_t i = 0; i < rank; ++i)
        sum += static_cast<double>(gates[i]);
    return sum;
}

void paper_reconstruct(const PaperFactors &factors, const float *gates, float *rows, int64_t stride) {
    for (int32_t t = 0; t < factors.tokens; ++t) {
        const float *left = factors.left + static_cast<int64_t>(t) * factors.rank;
        for (int32_t j = 0; j < factors.dim; ++j) {
            const float *right = factors.right + static_cast<int64_t>(j) * factors.rank;
            double sum = 0;
            for (int32_t i = 0; i < factors.rank; ++i)
                sum += static_cast<double>(left[i]) * gated_sigma(factors, gates, i) * static_cast<double>(right[i]);
            rows[t * stride + j] = static_cast<float>(sum);
        }
    }
}

void paper_project(const float *w, int32_t rows, int32_t dim, const float *x, float *out) {
    for (int32_t p = 0; p < rows; ++p)
        out[p] = static_cast<float>(dot(w + static_cast<int64_t>(p) * dim, x, dim));
}

void paper_route_key(const float *w, int32_t summary_dim, int32_t dim, const float *mean_key, float *out) {
    paper_project(w, summary_dim, dim, mean_key, out);
    const double scale = 1 / std::max(norm(out, summary_dim), norm_floor);
    for (int32_t p = 0; p < summary_dim; ++p)
        out[p] = static_cast<float>(static_cast<double>(out[p]) * scale);
}

void paper_route(const float *query, const float *keys, const int32_t *tokens, int32_t spans, int32_t summary_dim, float *logits,
                 float *alphas) {
    const double scale = 1 / std::sqrt(static_cast<double>(summary_dim));
    for (int32_t c = 0; c < spans; ++c) {
        const double logit = scale * dot(query, keys + static_cast<int64_t>(c) * summary_dim, summary_dim) + std::log(tokens[c]);
        logits[c] = static_cast<float>(logit);
        alphas[c] = static_cast<float>(sigmoid(logit));
    }
}

SekvFault paper_select(const float *alphas, const int32_t *tokens, int32_t spans, float tau, int64_t persistent, int64_t budget,
                       int32_t *order, uint8_t *selected) {
    std::fill(selected, selected + spans, uint8_t(0));
    if (budget <= 0) return SekvFault::budget_not_positive;
    if (persistent > budget) return SekvFault::persistent_over_budget;
    int32_t candidates = 0;
    for (int32_t c = 0; c < spans; ++c)
        if (alphas[c] > tau) order[candidates++] = c;
    std::sort(order, order + candidates, [&](int32_t a, int32_t b) { return alphas[a] > alphas[b] || (alphas[a] == alphas[b] && a < b); });
    int64_t room = budget - persistent;
    for (int32_t i = 0; i < candidates; ++i) {
        const int64_t extra = extra_entries(tokens[order[i]]);
        if (extra > room) continue;
        room -= extra;
        selected[order[i]] = 1;
    }
    return SekvFault::none;
}

SekvFault paper_check_group(const uint8_t *selected, int32_t heads, const int32_t *tokens, int32_t spans, int64_t persistent,
                            int64_t budget) {
    int64_t entries = persistent;
    for (int32_t c = 0; c < spans; ++c)
        if (any_head(selected, heads, spans, c)) entries += extra_entries(tokens[c]);
    return entries > budget ? SekvFault::group_over_budget : SekvFault::none;
}

bool paper_select_group(const float *alphas, const int32_t *tokens, int32_t heads, int32_t spans, const float *tau, int64_t persistent,
                        int64_t budget, int32_t *order, uint8_t *selected) {
    std::fill(selected, selected + static_cast<int64_t>(heads) * spans, uint8_t(0));
    if (persistent > budget) return false;
    const auto alpha = [&](int32_t h, int32_t c) { return alphas[static_cast<int64_t>(h) * spans + c]; };
    const auto wanted = [&](int32_t c) {
        double sum = 0;
        for (int32_t h = 0; h < heads; ++h)
            if (alpha(h, c) > tau[h]) sum += static_cast<double>(alpha(h, c));
        return sum;
    };
    int32_t candidates = 0;
    for (int32_t c = 0; c < spans; ++c)
        if (wanted(c) > 0) order[candidates++] = c;
    std::sort(order, order + candidates, [&](int32_t a, int32_t b) {
        const double of_a = wanted(a), of_b = wanted(b);
        return of_a > of_b || (of_a == of_b && a < b);
    });
    int64_t room = budget - persistent;
    for (int32_t i = 0; i < candidates; ++i) {
        const int32_t c = order[i];
        const int64_t extra = extra_entries(tokens[c]);
        if (extra > room) continue;
        room -= extra;
        for (int32_t h = 0; h < heads; ++h)
            selected[static_cast<int64_t>(h) * spans + c] = alpha(h, c) > tau[h] ? 1 : 0;
    }
    return true;
}

int64_t paper_attend_scratch(const PaperMemory &memory) { return most_rows(memory) + most_rank(memory) + memory.value_dim; }

namespace {

// One query head. Both passes walk the rows in the same order; a row that is absent has score -inf.
struct Head {
    const PaperMemory &memory;
    const float *query;
    const uint8_t *group_zoom; // [group][compressed]
    int32_t group;
    int32_t compressed;
    const uint8_t *zoom; // [compressed], this head's of group_zoom
    PaperOff off;

    static constexpr double absent = -std::numeric_limits<double>::infinity();

    double scale() const { return static_cast<double>(memory.scale); }
    double score(const float *key) const { return scale() * dot(query, key, memory.key_dim); }
    double log_gate(bool on) const {
        if (on) return 0;
        return off == PaperOff::leak ? std::log(gate_floor) : absent;
    }
    double half_variance(const float *spread) const {
        double sum = 0;
        for (int32_t j = 0; j < memory.key_dim; ++j)
            sum += static_cast<double>(query[j]) * static_cast<double>(query[j]) * static_cast<double>(spread[j]);
        return 0.5 * scale() * scale() * sum;
    }
    bool expanded(int32_t c) const { return any_head(group_zoom, group, compressed, c); }

    int64_t scores(double *rows, double *projected) const {
        int64_t count = 0;
        for (int64_t a = 0; a < memory.anchors; ++a)
            rows[count++] = score(memory.anchor_keys + a * memory.key_dim);
        int32_t c = 0;
        for (int32_t s = 0; s < memory.spans; ++s) {
            const PaperMemorySpan &span = memory.span[s];
            if (span.full_resolution) {
                for (int64_t t = 0; t < span.tokens; ++t)
                    rows[count++] = score(span.keys + t * memory.key_dim);
                continue;
            }
            rows[count] = score(span.keys) + std::log(span.tokens) + log_gate(zoom[c] == 0);
            if (span.spread != nullptr) rows[count] += half_variance(span.spread);
            ++count;
            if (expanded(c)) {
                const PaperFactors &factors = span.key_factors;
                for (int32_t i = 0; i < factors.rank; ++i) {
                    double sum = 0;
                    for (int32_t j = 0; j < factors.dim; ++j)
                        sum +=
                            static_cast<double>(factors.right[static_cast<int64_t>(j) * factors.rank + i]) * static_cast<double>(query[j]);
                    projected[i] = sum * gated_sigma(factors, span.key_gates, i) * scale();
                }
                for (int32_t t = 0; t < factors.tokens; ++t) {
                    double sum = 0;
                    for (int32_t i = 0; i < factors.rank; ++i)
                        sum += static_cast<double>(factors.left[static_cast<int64_t>(t) * factors.rank + i]) * projected[i];
                    rows[count++] = sum + log_gate(zoom[c] != 0);
                }
            }
            ++c;
        }
        return count;
    }

    void add(double weight, const float *value, double *sum) const {
        for (int32_t j = 0; j < memory.value_dim; ++j)
            sum[j] += weight * static_cast<double>(value[j]);
    }

    void values(const double *weights, double *combined, double *sum) const {
        for (int64_t a = 0; a < memory.anchors; ++a)
            add(*weights++, memory.anchor_values + a * memory.value_dim, sum);
        int32_t c = 0;
        for (int32_t s = 0; s < memory.spans; ++s) {
            const PaperMemorySpan &span = memory.span[s];
            if (span.full_resolution) {
                for (int64_t t = 0; t < span.tokens; ++t)
                    add(*weights++, span.values + t * memory.value_dim, sum);
                continue;
            }
            add(*weights++, span.values, sum);
            if (expanded(c)) {
                const PaperFactors &factors = span.value_factors;
                std::fill(combined, combined + factors.rank, 0.0);
                for (int32_t t = 0; t < factors.tokens; ++t, ++weights)
                    for (int32_t i = 0; i < factors.rank; ++i)
                        combined[i] += *weights * static_cast<double>(factors.left[static_cast<int64_t>(t) * factors.rank + i]);
                for (int32_t i = 0; i < factors.rank; ++i)
                    combined[i] *= gated_sigma(factors, span.value_gates, i);
                for (int32_t j = 0; j < factors.dim; ++j)
                    for (int32_t i = 0; i < factors.rank; ++i)
                        sum[j] += static_cast<double>(factors.right[static_cast<int64_t>(j) * factors.rank + i]) * combined[i];
            }
            ++c;
        }
    }
};

} // namespace

void paper_attend(const PaperMemory *memories, int32_t kv_heads, int32_t group, const float *queries, const uint8_t *zoom, PaperOff off,
                  float *out, float *lse, double *scratch) {
    for (int32_t kv = 0; kv < kv_heads; ++kv) {
        const PaperMemory &memory = memories[kv];
        const int32_t compressed = static_cast<int32_t>(
            std::count_if(memory.span, memory.span + memory.spans, [](const PaperMemorySpan &span) { return !span.full_resolution; }));
        double *const weights = scratch;
        double *const ranks = weights + most_rows(memory);
        double *const sum = ranks + most_rank(memory);
        const uint8_t *group_zoom = zoom + static_cast<int64_t>(kv) * group * compressed;
        for (int32_t g = 0; g < group; ++g) {
            const int64_t h = static_cast<int64_t>(kv) * group + g;
            const Head head{
                memory, queries + h * memory.key_dim, group_zoom, group, compressed, group_zoom + static_cast<int64_t>(g) * compressed,
                off};
            const int64_t rows = head.scores(weights, ranks);
            double largest = Head::absent, total = 0;
            for (int64_t i = 0; i < rows; ++i)
                largest = std::max(largest, weights[i]);
            for (int64_t i = 0; i < rows; ++i)
                total += weights[i] = std::exp(weights[i] - largest);
            for (int64_t i = 0; i < rows; ++i)
                weights[i] /= total;
            std::fill(sum, sum + memory.value_dim, 0.0);
            head.values(weights, ranks, sum);
            for (int32_t j = 0; j < memory.value_dim; ++j)
                out[h * memory.value_dim + j] = static_cast<float>(sum[j]);
            if (lse != nullptr) lse[h] = static_cast<float>(largest + std::log(total));
        }
    }
}

} // namespace skerry
