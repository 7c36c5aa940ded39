// SPDX-License-Identifier: MIT
// The hand-checkable numbers of SeKV (arXiv 2606.31145) as the released code computes them, T2 to T20. T1 is in surprisal.cpp, what
// production does differently in segmentation.cpp.

#include <doctest/doctest.h>

#include "policy/sekv_paper.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace skerry;

namespace {

using Floats = std::vector<float>;

doctest::Approx near(double x, double tolerance = 1e-5) { return doctest::Approx(x).epsilon(tolerance).scale(std::abs(x) < 0.1 ? 0.1 : 0); }

void check_near(const Floats &found, const std::vector<double> &wanted, double tolerance = 1e-5) {
    REQUIRE(found.size() == wanted.size());
    for (size_t i = 0; i < found.size(); ++i)
        CHECK(found[i] == near(wanted[i], tolerance));
}

Floats vec(size_t n, float x) { return Floats(n, x); }

Floats with(Floats head, size_t n, float x) {
    head.insert(head.end(), n, x);
    return head;
}

struct Segmented {
    PaperSegmentation result;
    std::vector<int32_t> anchors;
    std::vector<PaperSpan> spans;
};

Segmented segment(const Floats &nats, int32_t l_min = 4, double alpha = 1) {
    const int64_t n = static_cast<int64_t>(nats.size());
    Segmented s;
    s.anchors.resize(nats.size());
    s.spans.resize((nats.size() + 1) / 2);
    s.result = paper_segment(nats.data(), n, n, alpha, l_min, s.anchors.data(), s.spans.data());
    CHECK(s.result.fault == SekvFault::none);
    s.anchors.resize(static_cast<size_t>(s.result.anchors));
    s.spans.resize(static_cast<size_t>(s.result.spans));
    return s;
}

void check_spans(const Segmented &s, const std::vector<PaperSpan> &wanted) {
    REQUIRE(s.spans.size() == wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
        CHECK(s.spans[i].begin == wanted[i].begin);
        CHECK(s.spans[i].end == wanted[i].end);
        CHECK(s.spans[i].full_resolution == wanted[i].full_resolution);
    }
}

Floats random_rows(std::mt19937 &rng, int32_t n, int32_t d) {
    std::normal_distribution<float> normal;
    Floats rows(static_cast<size_t>(n) * static_cast<size_t>(d));
    for (float &x : rows)
        x = normal(rng);
    return rows;
}

struct Factors {
    Floats left, sigma, right;
    PaperFactors view;
};

Factors factorise(const float *rows, int32_t n, int32_t d, int32_t rank_max) {
    Factors f;
    const size_t rank = static_cast<size_t>(paper_rank(n, d, rank_max));
    f.left.resize(static_cast<size_t>(n) * rank);
    f.sigma.resize(rank);
    f.right.resize(static_cast<size_t>(d) * rank);
    std::vector<double> scratch(static_cast<size_t>(paper_factor_scratch(n, d)));
    paper_factorise(rows, d, n, d, rank_max, f.left.data(), f.sigma.data(), f.right.data(), scratch.data());
    f.view = {n, d, static_cast<int32_t>(rank), f.left.data(), f.sigma.data(), f.right.data()};
    return f;
}

Floats reconstruct(const PaperFactors &factors, const float *gates) {
    Floats rows(static_cast<size_t>(factors.tokens) * static_cast<size_t>(factors.dim), -7.0f);
    paper_reconstruct(factors, gates, rows.data(), factors.dim);
    return rows;
}

double relative_error(const Floats &found, const Floats &wanted) {
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
        error += std::pow(static_cast<double>(found[i]) - static_cast<double>(wanted[i]), 2);
        size += std::pow(static_cast<double>(wanted[i]), 2);
    }
    return std::sqrt(error / size);
}

// The network with zero weights and all biases of the last layer at `bias`.
struct Network {
    Floats w0, b0, w1, b1, w2, b2;
    PaperGates view;

    Network(int32_t rank_max, int32_t dim, float bias)
        : w0(static_cast<size_t>(64 * (rank_max + dim))), b0(64), w1(64 * 64), b1(64), w2(static_cast<size_t>(64 * rank_max)),
          b2(static_cast<size_t>(rank_max), bias), view{rank_max, dim, w0.data(), b0.data(), w1.data(), b1.data(), w2.data(), b2.data()} {}
    Network(const Network &) = delete;

    Floats gates(const Floats &sigma, const Floats &mean_key) const {
        Floats out(static_cast<size_t>(view.rank_max), -1.0f);
        paper_gates(view, sigma.data(), static_cast<int32_t>(sigma.size()), mean_key.data(), out.data());
        return out;
    }
};

// Everything of one KV head that a memory points to, for spans of K and V [n][d].
struct Store {
    int32_t dim;
    Floats anchor_keys, anchor_values;
    std::vector<std::vector<Floats>> held;
    std::vector<Factors> factors;
    std::vector<PaperMemorySpan> spans;
    PaperMemory memory;

    Store(const Floats &nats, const Floats &k, const Floats &v, int32_t d, int32_t rank_max, const float *gates) : dim(d) {
        const Segmented s = segment(nats);
        for (const int32_t a : s.anchors) {
            append(&anchor_keys, k, a, 1);
            append(&anchor_values, v, a, 1);
        }
        factors.reserve(2 * s.spans.size());
        for (const PaperSpan &span : s.spans) {
            const int32_t n = span.tokens();
            Floats keys, values, weights(static_cast<size_t>(n)), mean_key(static_cast<size_t>(d)), mean_value(mean_key);
            append(&keys, k, span.begin, n);
            append(&values, v, span.begin, n);
            paper_weights(nats.data() + span.begin, n, weights.data());
            paper_summary(weights.data(), keys.data(), d, n, d, mean_key.data());
            paper_summary(weights.data(), values.data(), d, n, d, mean_value.data());
            PaperMemorySpan entry;
            entry.tokens = n;
            entry.full_resolution = span.full_resolution;
            if (!span.full_resolution) {
                factors.push_back(factorise(keys.data(), n, d, rank_max));
                entry.key_factors = factors.back().view;
                factors.push_back(factorise(values.data(), n, d, rank_max));
                entry.value_factors = factors.back().view;
                entry.key_gates = entry.value_gates = gates;
                keys = mean_key;
                values = mean_value;
            }
            held.push_back({keys, values});
            entry.keys = held.back()[0].data();
            entry.values = held.back()[1].data();
            spans.push_back(entry);
        }
        // Vectors moved as the outer one grew keep their elements, so the pointers above stay valid.
        memory = {d,
                  d,
                  static_cast<float>(1 / std::sqrt(static_cast<double>(d))),
                  static_cast<int64_t>(s.anchors.size()),
                  anchor_keys.data(),
                  anchor_values.data(),
                  static_cast<int32_t>(spans.size()),
                  spans.data()};
    }
    Store(const Store &) = delete;

    void append(Floats *to, const Floats &from, int32_t first, int32_t count) const {
        const float *begin = from.data() + first * dim;
        to->insert(to->end(), begin, begin + count * dim);
    }
};

struct Attended {
    Floats out, lse;
    std::vector<double> weights;
};

Attended attend(const std::vector<PaperMemory> &memories, int32_t group, const Floats &queries, const std::vector<uint8_t> &zoom,
                PaperOff off) {
    const size_t heads = memories.size() * static_cast<size_t>(group);
    int64_t scratch = 0;
    for (const PaperMemory &memory : memories)
        scratch = std::max(scratch, paper_attend_scratch(memory));
    Attended a;
    a.out.assign(heads * static_cast<size_t>(memories[0].value_dim), -7.0f);
    a.lse.assign(heads, -7.0f);
    a.weights.assign(static_cast<size_t>(scratch), -7.0);
    paper_attend(memories.data(), static_cast<int32_t>(memories.size()), group, queries.data(), zoom.data(), off, a.out.data(),
                 a.lse.data(), a.weights.data());
    return a;
}

// Softmax attention of one query over dense rows.
Floats full_attention(const float *q, const Floats &k, const Floats &v, int32_t d) {
    const size_t n = k.size() / static_cast<size_t>(d);
    std::vector<double> weight(n);
    double total = 0;
    for (size_t t = 0; t < n; ++t) {
        double score = 0;
        for (size_t j = 0; j < static_cast<size_t>(d); ++j)
            score += static_cast<double>(q[j]) * static_cast<double>(k[t * static_cast<size_t>(d) + j]);
        total += weight[t] = std::exp(score / std::sqrt(static_cast<double>(d)));
    }
    Floats out(static_cast<size_t>(d));
    for (size_t j = 0; j < out.size(); ++j) {
        double sum = 0;
        for (size_t t = 0; t < n; ++t)
            sum += weight[t] / total * static_cast<double>(v[t * static_cast<size_t>(d) + j]);
        out[j] = static_cast<float>(sum);
    }
    return out;
}

// The layer of T19.
struct Golden {
    static constexpr int32_t n = 16, d = 4, summary = 2, heads = 2;
    Floats nats, k, v, q, w;

    Golden() {
        for (int t = 0; t < n; ++t) {
            nats.push_back(t == 0 ? 0.0f : t == 3 ? 4.0f : t == 9 ? 5.0f : 0.25f * static_cast<float>(1 + t % 3));
            for (int j = 0; j < d; ++j) {
                k.push_back(static_cast<float>(std::sin(0.3 * (t + 1) * (j + 1))));
                v.push_back(static_cast<float>(std::cos(0.2 * (t + 1) + 0.5 * j)));
            }
        }
        for (int h = 0; h < heads; ++h) {
            for (int j = 0; j < d; ++j)
                q.push_back(static_cast<float>(2 * std::sin(0.7 * (h + 1) + 0.9 * j)));
            for (int p = 0; p < summary; ++p)
                for (int j = 0; j < d; ++j)
                    w.push_back(static_cast<float>(std::cos(0.4 * (h + 1) * (p + 1) + 0.6 * j)));
        }
    }

    // [head][compressed span]
    void route(const Store &store, Floats *logits, Floats *alphas) const {
        std::vector<const PaperMemorySpan *> compressed;
        std::vector<int32_t> tokens;
        for (const PaperMemorySpan &span : store.spans)
            if (!span.full_resolution) {
                compressed.push_back(&span);
                tokens.push_back(span.tokens);
            }
        const size_t c = compressed.size();
        logits->assign(heads * c, 0);
        alphas->assign(heads * c, 0);
        for (size_t h = 0; h < heads; ++h) {
            const float *projection = w.data() + h * summary * d;
            Floats query(summary), keys(c * summary);
            paper_project(projection, summary, d, q.data() + h * d, query.data());
            for (size_t i = 0; i < c; ++i)
                paper_route_key(projection, summary, d, compressed[i]->keys, keys.data() + i * summary);
            paper_route(query.data(), keys.data(), tokens.data(), static_cast<int32_t>(c), summary, logits->data() + h * c,
                        alphas->data() + h * c);
        }
    }

    std::vector<uint8_t> choose(const Store &store, float tau0, float tau1) const {
        Floats logits, alphas;
        route(store, &logits, &alphas);
        const std::vector<int32_t> tokens = {5, 6};
        std::vector<int32_t> order(2);
        std::vector<uint8_t> zoom(4);
        CHECK(paper_select(alphas.data(), tokens.data(), 2, tau0, 7, paper_no_budget, order.data(), zoom.data()) == SekvFault::none);
        CHECK(paper_select(alphas.data() + 2, tokens.data(), 2, tau1, 7, paper_no_budget, order.data(), zoom.data() + 2) ==
              SekvFault::none);
        return zoom;
    }
};

struct Choice {
    SekvFault fault;
    std::vector<uint8_t> selected;
};

Choice choose(const Floats &alphas, const std::vector<int32_t> &tokens, float tau, int64_t persistent, int64_t budget) {
    Choice c;
    std::vector<int32_t> order(tokens.size());
    c.selected.assign(tokens.size(), 9);
    c.fault = paper_select(alphas.data(), tokens.data(), static_cast<int32_t>(tokens.size()), tau, persistent, budget, order.data(),
                           c.selected.data());
    return c;
}

using Bits = std::vector<uint8_t>;

} // namespace

TEST_CASE("T2: one anchor between a short and a long gap") {
    const Segmented s = segment({0, 1, 1, 5, 1, 1, 1, 1});
    CHECK(s.result.mean == 1.375);
    CHECK(s.result.deviation == near(1.408678, 1e-6));
    CHECK(s.result.threshold == near(2.783678, 1e-6));
    CHECK(s.anchors == std::vector<int32_t>{3});
    check_spans(s, {{0, 3, true}, {4, 8, false}});
}

TEST_CASE("T3: adjacent anchors give no empty span") {
    const Segmented s = segment(with({0, 9, 9}, 7, 0));
    // Statistics are rounded to f32, the threshold is not.
    CHECK(s.result.mean == 1.8f);
    CHECK(s.result.deviation == 3.6f);
    CHECK(s.result.threshold == static_cast<double>(1.8f) + static_cast<double>(3.6f));
    CHECK(s.anchors == std::vector<int32_t>{1, 2});
    check_spans(s, {{0, 1, true}, {3, 10, false}});
}

TEST_CASE("T4: an anchor at the end gives no trailing span") {
    const Segmented s = segment(with(vec(9, 0), 1, 10));
    CHECK(s.result.mean == 1);
    CHECK(s.result.deviation == 3);
    CHECK(s.result.threshold == 4);
    CHECK(s.anchors == std::vector<int32_t>{9});
    check_spans(s, {{0, 9, false}});
}

TEST_CASE("T5: a surprisal equal to the threshold is no anchor") {
    const Segmented s = segment({0, 2});
    CHECK(s.result.threshold == 2);
    CHECK(s.anchors.empty());
    check_spans(s, {{0, 2, true}});
    // The comparison is one of f32: a threshold a little below 2 in f64 rounds to 2.
    CHECK(segment({0, 2}, 4, 1 - 1e-9).anchors.empty());
    CHECK(segment({0, 2}, 4, 0.999).anchors == std::vector<int32_t>{1});
}

TEST_CASE("T6: without anchors token 0 is lost") {
    const Segmented s = segment({0, 1, 1, 1, 1});
    CHECK(s.result.threshold == near(1.2));
    CHECK(s.anchors.empty());
    check_spans(s, {{1, 5, false}});
    check_spans(segment({0, 2, 2, 2}), {{1, 4, true}});
    check_spans(segment(vec(6, 0)), {{1, 6, false}});
}

TEST_CASE("T7: no tokens, and one") {
    const Segmented none = segment({});
    CHECK(none.result.threshold == 0);
    CHECK(none.spans.empty());
    CHECK(none.anchors.empty());
    check_spans(segment({0}), {{0, 1, true}});
    check_spans(segment({0}, 1), {{0, 1, false}});
    const Segmented one = segment({0}, 0);
    check_spans(one, {{0, 1, false}});
    CHECK(paper_rank(one.spans[0].tokens(), 128, 32) == 1);
    check_spans(segment({0, 0, 0}), {{0, 3, true}});
    check_spans(segment({0, 0, 0}, 0), {{1, 3, false}});
}

TEST_CASE("T8: every position is an anchor or in one span, but for T6") {
    std::mt19937 rng(1);
    std::exponential_distribution<float> exponential;
    for (int round = 0; round < 200; ++round) {
        Floats nats(1 + rng() % 300);
        for (float &h : nats)
            h = rng() % 4 == 0 ? 0.0f : exponential(rng) * (rng() % 9 == 0 ? 5.0f : 1.0f);
        nats[0] = 0;
        const int32_t l_min = static_cast<int32_t>(rng() % 7);
        const Segmented s = segment(nats, l_min);
        std::vector<int> owners(nats.size(), 0);
        for (const int32_t a : s.anchors) {
            ++owners[static_cast<size_t>(a)];
            CHECK(nats[static_cast<size_t>(a)] > static_cast<float>(s.result.threshold));
        }
        int32_t previous = -1;
        for (const PaperSpan &span : s.spans) {
            REQUIRE(span.begin > previous);
            previous = span.end - 1;
            CHECK(span.full_resolution == (span.tokens() < l_min));
            for (int32_t p = span.begin; p < span.end; ++p)
                ++owners[static_cast<size_t>(p)];
        }
        const bool lost = s.anchors.empty() && nats.size() > 1 && static_cast<int32_t>(nats.size()) >= l_min;
        CHECK(owners[0] == (lost ? 0 : 1));
        CHECK(std::all_of(owners.begin() + 1, owners.end(), [](int n) { return n == 1; }));
    }
}

TEST_CASE("surprisal of the wrong length, negative or NaN, and parameters out of range, are faults and write nothing") {
    const Floats good = {0, 1, 1, 9, 1};
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    const auto run = [](const Floats &nats, int64_t tokens, double alpha, int32_t l_min) {
        std::vector<int32_t> anchors(8, -7);
        std::vector<PaperSpan> spans(8, PaperSpan{-7, -7, false});
        const PaperSegmentation r =
            paper_segment(nats.data(), static_cast<int64_t>(nats.size()), tokens, alpha, l_min, anchors.data(), spans.data());
        CHECK((r.fault == SekvFault::none) == (anchors[0] != -7));
        CHECK((r.fault == SekvFault::none) == (spans[0].begin != -7));
        return r;
    };
    CHECK(run(good, 5, 1, 4).fault == SekvFault::none);
    CHECK(run(good, 4, 1, 4).fault == SekvFault::surprisal_count);
    CHECK(run(good, 6, 1, 4).fault == SekvFault::surprisal_count);
    CHECK(run(good, 5, 1, -1).fault == SekvFault::minimum_negative);
    CHECK(run(good, 5, static_cast<double>(nan), 4).fault == SekvFault::alpha_not_finite);
    for (const float bad : {-0.5f, nan, infinity}) {
        Floats nats = good;
        nats[3] = bad;
        const PaperSegmentation r = run(nats, 5, 1, 4);
        CHECK(r.fault == SekvFault::surprisal_invalid);
        CHECK(r.fault_index == 3);
    }
}

TEST_CASE("T9: weights and summaries") {
    Floats weights(3);
    const Floats nats = {2, 1, 1}, zeros = {0, 0, 0}, keys = {1, 0, 0, 1, 1, 1};
    paper_weights(nats.data(), 3, weights.data());
    CHECK(weights == Floats{0.5f, 0.25f, 0.25f});
    Floats mean(2);
    paper_summary(weights.data(), keys.data(), 2, 3, 2, mean.data());
    CHECK(mean == Floats{0.75f, 0.5f});
    paper_weights(zeros.data(), 3, weights.data());
    check_near(weights, {1.0 / 3, 1.0 / 3, 1.0 / 3}, 1e-7);
    // Strided rows of more channels than one block holds.
    std::mt19937 rng(2);
    const Floats rows = random_rows(rng, 3, 200);
    Floats wide(150);
    paper_weights(nats.data(), 3, weights.data());
    paper_summary(weights.data(), rows.data() + 10, 200, 3, 150, wide.data());
    for (size_t j = 0; j < 150; ++j)
        CHECK(wide[j] == near(0.5 * static_cast<double>(rows[10 + j]) + 0.25 * static_cast<double>(rows[210 + j] + rows[410 + j])));
}

TEST_CASE("T10: rank of the factors, and what gates do to the reconstruction") {
    CHECK(paper_rank(4, 128, 32) == 4);
    CHECK(paper_rank(40, 128, 32) == 32);
    CHECK(paper_rank(40, 16, 32) == 16);
    std::mt19937 rng(10);
    for (const auto &[n, d] : {std::pair<int32_t, int32_t>{4, 128}, {16, 16}, {40, 12}, {31, 64}}) {
        const Floats rows = random_rows(rng, n, d);
        const Factors f = factorise(rows.data(), n, d, 64);
        REQUIRE(f.view.rank == std::min(n, d));
        CHECK(std::is_sorted(f.sigma.rbegin(), f.sigma.rend()));
        const Floats ones(f.sigma.size(), 1.0f), zeros(f.sigma.size(), 0.0f), halves(f.sigma.size(), 0.5f);
        CHECK(relative_error(reconstruct(f.view, ones.data()), rows) < 1e-5);
        CHECK(reconstruct(f.view, nullptr) == reconstruct(f.view, ones.data()));
        CHECK(reconstruct(f.view, zeros.data()) == Floats(rows.size(), 0.0f));
        Floats half = rows;
        for (float &x : half)
            x *= 0.5f;
        CHECK(relative_error(reconstruct(f.view, halves.data()), half) < 1e-5);
        // Truncated: the error is what the dropped singular values say.
        const Factors low = factorise(rows.data(), n, d, 3);
        REQUIRE(low.view.rank == 3);
        double dropped = 0, all = 0;
        for (size_t i = 0; i < f.sigma.size(); ++i) {
            const double square = static_cast<double>(f.sigma[i]) * static_cast<double>(f.sigma[i]);
            all += square;
            dropped += i < 3 ? 0 : square;
        }
        CHECK(relative_error(reconstruct(low.view, nullptr), rows) == near(std::sqrt(dropped / all), 1e-4));
    }
}

TEST_CASE("T10: all-zero and rank-deficient spans give no NaN") {
    const Floats zeros(8 * 16, 0.0f);
    const Factors f = factorise(zeros.data(), 8, 16, 32);
    CHECK(f.sigma == Floats(8, 0.0f));
    CHECK(reconstruct(f.view, nullptr) == zeros);
    Floats rank_one(8 * 16);
    for (size_t t = 0; t < 8; ++t)
        for (size_t j = 0; j < 16; ++j)
            rank_one[t * 16 + j] = static_cast<float>(t + 1) * (static_cast<float>(j) - 4.5f);
    const Factors g = factorise(rank_one.data(), 8, 16, 32);
    CHECK(g.sigma[0] > 0);
    CHECK(g.sigma[1] <= 1e-6f * g.sigma[0]);
    CHECK(relative_error(reconstruct(g.view, nullptr), rank_one) < 1e-5);
    // Gates of such spans are numbers, too.
    const Network network(32, 16, 0);
    CHECK(network.gates(f.sigma, Floats(16, 0.0f))[0] == 0.5f);
}

TEST_CASE("T11: the gate network with constant output") {
    const Floats sigma = {8, 7, 6, 5, 4, 3, 2, 1}, key = {1, -2, 3, 4};
    const Floats half = Network(32, 4, 0).gates(sigma, key);
    CHECK(std::all_of(half.begin(), half.begin() + 8, [](float m) { return m == 0.5f; }));
    CHECK(std::all_of(half.begin() + 8, half.end(), [](float m) { return m == 0; }));
    CHECK(paper_effective_rank(half.data(), 8) == 4);
    const Floats three_quarters = Network(32, 4, std::log(3.0f)).gates(sigma, key);
    for (size_t i = 0; i < 8; ++i)
        CHECK(three_quarters[i] == near(0.75, 1e-6));
    CHECK(three_quarters[8] == 0);
    CHECK(paper_effective_rank(three_quarters.data(), 8) == near(6.0, 1e-6));
}

TEST_CASE("T11: the gate network's inputs, layers and activations, by one path through them") {
    Network network(4, 3, 0);
    const Floats sigma = {5, 2}, key = {3, 0, 4};
    // Hidden 7 of the first layer sees the second sigma, a sigma beyond the rank and the third channel of the key.
    const size_t inputs = 7;
    network.w0[7 * inputs + 1] = 2;
    network.w0[7 * inputs + 3] = 100;
    network.w0[7 * inputs + 4 + 2] = -3;
    network.b0[7] = 0.25f;
    network.w1[63 * 64 + 7] = 1.5f;
    network.b1[63] = -0.5f;
    network.w2[1 * 64 + 63] = 4;
    network.b2[1] = 0.125f;
    const auto gelu = [](double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); };
    const double first = gelu(2 * (2.0 / 5) - 3 * (4.0 / 5) + 0.25);
    const double gate = 1 / (1 + std::exp(-(4 * gelu(1.5 * first - 0.5) + 0.125)));
    check_near(network.gates(sigma, key), {0.5, gate, 0, 0}, 1e-6);
}

TEST_CASE("T12: bytes") {
    const uint64_t g = 8, d = 128;
    CHECK(2 * paper_factor_bytes(g, 16, d, 16) == 148480);
    CHECK(paper_raw_bytes(g, d, d, 2, 16) == 65536);
    CHECK(2 * paper_factor_bytes(g, 129, d, 32) == 528384);
    CHECK(paper_raw_bytes(g, d, d, 2, 129) == 528384);
    CHECK(32 * paper_raw_bytes(g, d, d, 2, 1) == 131072);
    CHECK(paper_device_bytes(g, d, d, 2, 0, 0, 1) == 8192);
    CHECK(paper_device_bytes(g, d, d, 2, 3, 2, 4) == 5 * 4096 + 4 * 8192);
}

TEST_CASE("T13: routing scores") {
    const std::vector<int32_t> tokens = {4, 8, 9, 16, 32};
    const Floats query = {0, 0}, keys(10, 0.5f);
    Floats logits(5), alphas(5);
    paper_route(query.data(), keys.data(), tokens.data(), 5, 2, logits.data(), alphas.data());
    check_near(alphas, {0.8, 8.0 / 9, 0.9, 0.941176, 0.969697}, 2e-6);

    const Floats identity = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, q = {3, 4, 0, 0};
    const auto route = [&](float key_scale, float query_scale) {
        Floats mean_key = {0, 2 * key_scale, 0, 0}, scaled = q, key(4), projected(4), result(2);
        for (float &x : scaled)
            x *= query_scale;
        paper_route_key(identity.data(), 4, 4, mean_key.data(), key.data());
        paper_project(identity.data(), 4, 4, scaled.data(), projected.data());
        paper_route(projected.data(), key.data(), tokens.data(), 1, 4, result.data(), result.data() + 1);
        return result;
    };
    const Floats found = route(1, 1);
    CHECK(static_cast<double>(found[0]) - std::log(4.0) == near(2, 1e-6));
    CHECK(found[0] == near(3.386294, 1e-6));
    CHECK(found[1] == near(0.967273, 2e-6));
    CHECK(route(1000, 1)[1] == near(0.967273, 2e-6));
    CHECK(route(0.001f, 1)[1] == near(0.967273, 2e-6));
    CHECK(static_cast<double>(route(1, 2)[0]) - std::log(4.0) == near(4, 1e-6));
    CHECK(route(0, 1)[1] == near(0.8, 1e-6)); // a zero key has no direction
    // Far scores do not overflow.
    CHECK(route(1, 1e5f)[1] == 1);
    CHECK(route(1, -1e5f)[1] == 0);
}

TEST_CASE("T14: budgeted selection of one head") {
    const Floats alphas = {0.9f, 0.8f, 0.7f};
    const std::vector<int32_t> tokens = {5, 4, 10};
    const int64_t persistent = 3 + 2 + 3; // anchors, full-resolution tokens, compressed spans
    CHECK(choose(alphas, tokens, 0.5f, persistent, 100).selected == Bits{1, 1, 1});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 24).selected == Bits{1, 1, 1});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 16).selected == Bits{1, 1, 0});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 12).selected == Bits{1, 0, 0});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 11).selected == Bits{0, 1, 0});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 8).selected == Bits{0, 0, 0});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 8).fault == SekvFault::none);
    CHECK(choose(alphas, tokens, 0.85f, persistent, paper_no_budget).selected == Bits{1, 0, 0});
    CHECK(choose(alphas, tokens, 0.95f, persistent, 100).selected == Bits{0, 0, 0});
    const Choice over = choose(alphas, tokens, 0.5f, persistent, 7);
    CHECK(over.fault == SekvFault::persistent_over_budget);
    CHECK(over.selected == Bits{0, 0, 0});
    CHECK(choose(alphas, tokens, 0.5f, persistent, 0).fault == SekvFault::budget_not_positive);
    CHECK(choose(alphas, tokens, 0.5f, persistent, -3).fault == SekvFault::budget_not_positive);
    // Not in order of index; a span of one token costs nothing more; equal alphas go to the earlier span.
    CHECK(choose({0.7f, 0.6f, 0.9f}, {5, 1, 6}, 0.5f, 3, 8).selected == Bits{0, 1, 1});
    CHECK(choose({0.7f, 0.7f, 0.7f}, {5, 5, 5}, 0.5f, 3, 11).selected == Bits{1, 1, 0});
}

TEST_CASE("T14: the union of a group") {
    const std::vector<int32_t> tokens = {5, 6};
    // Each head alone keeps within 7 entries, the union has 11.
    CHECK(choose({0.9f, 0.1f}, tokens, 0.5f, 2, 7).selected == Bits{1, 0});
    CHECK(choose({0.2f, 0.8f}, tokens, 0.5f, 2, 7).selected == Bits{0, 1});
    const Bits both = {1, 0, 0, 1}, same = {1, 0, 1, 0};
    CHECK(paper_check_group(both.data(), 2, tokens.data(), 2, 2, 7) == SekvFault::group_over_budget);
    CHECK(paper_check_group(both.data(), 2, tokens.data(), 2, 2, 11) == SekvFault::none);
    CHECK(paper_check_group(same.data(), 2, tokens.data(), 2, 2, 6) == SekvFault::none);

    const auto plan = [&](const Floats &alphas, int64_t budget, Floats tau = {0.5f, 0.5f}) {
        std::vector<int32_t> order(2);
        Bits selected(4, 9);
        const bool fits = paper_select_group(alphas.data(), tokens.data(), 2, 2, tau.data(), 2, budget, order.data(), selected.data());
        CHECK(fits == (budget >= 2));
        if (fits) CHECK(paper_check_group(selected.data(), 2, tokens.data(), 2, 2, budget) == SekvFault::none);
        return selected;
    };
    const Floats alphas = {0.9f, 0.1f, 0.2f, 0.8f};
    CHECK(plan(alphas, 7) == Bits{1, 0, 0, 0});
    CHECK(plan(alphas, 11) == both);
    CHECK(plan(alphas, paper_no_budget) == both);
    CHECK(plan(alphas, 2) == Bits{0, 0, 0, 0});
    CHECK(plan(alphas, 1) == Bits{0, 0, 0, 0});
    CHECK(plan({0.1f, 0.6f, 0.2f, 0.8f}, 7) == Bits{0, 1, 0, 1});
    // Two heads that want a span outweigh one that wants another more.
    CHECK(plan({0.9f, 0.6f, 0.2f, 0.6f}, 7) == Bits{0, 1, 0, 1});
    CHECK(plan({0.9f, 0.6f, 0.2f, 0.6f}, 7, {0.5f, 0.7f}) == Bits{1, 0, 0, 0});
}

TEST_CASE("T14: production plans stay within any budget and waste no room") {
    std::mt19937 rng(14);
    std::uniform_real_distribution<float> uniform(0, 1);
    for (int round = 0; round < 300; ++round) {
        const size_t spans = 1 + rng() % 12, heads = 1 + rng() % 4;
        std::vector<int32_t> tokens(spans), order(spans);
        for (int32_t &n : tokens)
            n = 1 + static_cast<int32_t>(rng() % 20);
        Floats alphas(heads * spans), tau(heads);
        for (float &a : alphas)
            a = uniform(rng);
        for (float &t : tau)
            t = uniform(rng);
        const int64_t persistent = static_cast<int64_t>(spans + rng() % 9), budget = persistent + static_cast<int64_t>(rng() % 80);
        Bits selected(alphas.size(), 9);
        const int32_t c = static_cast<int32_t>(spans), h = static_cast<int32_t>(heads);
        REQUIRE(paper_select_group(alphas.data(), tokens.data(), h, c, tau.data(), persistent, budget, order.data(), selected.data()));
        CHECK(paper_check_group(selected.data(), h, tokens.data(), c, persistent, budget) == SekvFault::none);
        int64_t entries = persistent, smallest = INT64_MAX;
        for (size_t s = 0; s < spans; ++s) {
            bool wanted = false, taken = false;
            for (size_t i = 0; i < heads; ++i) {
                const bool wants = alphas[i * spans + s] > tau[i];
                CHECK((selected[i * spans + s] == 0 || wants));
                wanted = wanted || wants;
                taken = taken || selected[i * spans + s] != 0;
            }
            entries += taken ? tokens[s] - 1 : 0;
            if (wanted && !taken) smallest = std::min<int64_t>(smallest, tokens[s] - 1);
            for (size_t i = 0; taken && i < heads; ++i)
                CHECK((selected[i * spans + s] != 0) == (alphas[i * spans + s] > tau[i]));
        }
        if (smallest != INT64_MAX) CHECK(entries + smallest > budget);
    }
}

TEST_CASE("T15: alpha equal to tau does not expand") {
    CHECK(choose({0.15f, 0.05f}, {4, 4}, 0.05f, 2, paper_no_budget).selected == Bits{1, 0});
    CHECK(choose({0.5f, std::numeric_limits<float>::quiet_NaN()}, {4, 4}, 0.5f, 2, 100).selected == Bits{0, 0});
}

TEST_CASE("T16: exclusion and leak") {
    const float anchor_key = 0, anchor_value = 1, zero = 0, two = 2, four = 4;
    const Floats keys = {0, 0, 0, 0}, values = {3, 5};
    const Factors coded_keys = factorise(keys.data(), 2, 1, 32), coded_values = factorise(values.data(), 2, 1, 32);
    // The unexpanded span's factors are not fetched.
    const PaperMemorySpan spans[] = {{4, false, &zero, &two, {}, {}, nullptr, nullptr},
                                     {2, false, &zero, &four, coded_keys.view, coded_values.view, nullptr, nullptr}};
    const PaperMemory memory{1, 1, 1, 1, &anchor_key, &anchor_value, 2, spans};
    const Attended exact = attend({memory}, 1, {1}, {0, 1}, PaperOff::absent);
    CHECK(exact.out[0] == near(17.0 / 7, 1e-7));
    CHECK(exact.lse[0] == near(std::log(7.0), 1e-7));
    const Attended leak = attend({memory}, 1, {1}, {0, 1}, PaperOff::leak);
    CHECK(std::abs(static_cast<double>(leak.out[0]) - 2.4285719) < 2e-7);
    CHECK(std::abs(static_cast<double>(leak.out[0]) - 17.0 / 7) > 2e-7);
    CHECK(leak.weights[2] / leak.weights[0] == near(2e-6, 1e-6)); // the hidden summary row stands for two tokens
    CHECK(exact.weights[2] == 0);
}

TEST_CASE("T17: identical keys, and the mass that a summary row understates") {
    const float key[] = {0.3f, -1.2f}, mean_value[] = {2.5f, 0.25f};
    Floats keys, values = {1, 0, 2, 1, 3, -1, 4, 1};
    for (int t = 0; t < 4; ++t)
        keys.insert(keys.end(), key, key + 2);
    const Floats query = {1.7f, -0.4f};
    const PaperMemorySpan coarse{4, false, key, mean_value, {}, {}, nullptr, nullptr};
    PaperMemory memory{2, 2, static_cast<float>(1 / std::sqrt(2.0)), 0, nullptr, nullptr, 1, &coarse};
    const Floats full = full_attention(query.data(), keys, values, 2);
    check_near(attend({memory}, 1, query, {0}, PaperOff::leak).out, {static_cast<double>(full[0]), static_cast<double>(full[1])}, 1e-6);

    const Floats needle = {8, 0, 0, 0}, uniform = {0.25f, 0.25f, 0.25f, 0.25f}, dummy = {1, 1, 1, 1};
    float mean = 0;
    paper_summary(uniform.data(), needle.data(), 1, 4, 1, &mean);
    const PaperMemorySpan hidden{4, false, &mean, dummy.data(), {}, {}, nullptr, nullptr};
    const PaperMemorySpan open{4, true, needle.data(), dummy.data(), {}, {}, nullptr, nullptr};
    memory = {1, 1, 1, 0, nullptr, nullptr, 1, &hidden};
    CHECK(attend({memory}, 1, {1}, {0}, PaperOff::absent).lse[0] == near(3.3863, 1e-4));
    memory.span = &open;
    CHECK(attend({memory}, 1, {1}, {}, PaperOff::absent).lse[0] == near(8.0010, 1e-5));
}

TEST_CASE("T18: empty memory, one anchor, and far logits") {
    PaperMemory memory{2, 3, 1, 0, nullptr, nullptr, 0, nullptr};
    for (const PaperOff off : {PaperOff::leak, PaperOff::absent}) {
        const Attended empty = attend({memory}, 2, {1, 2, 3, 4}, {}, off);
        CHECK(empty.out == Floats(6, 0.0f));
        CHECK(empty.lse == Floats(2, -std::numeric_limits<float>::infinity()));
    }
    const Floats key = {50, 50}, value = {0.1f, -7, 3e5f};
    memory.anchors = 1;
    memory.anchor_keys = key.data();
    memory.anchor_values = value.data();
    CHECK(attend({memory}, 1, {100, 100}, {}, PaperOff::leak).out == value);
    CHECK(attend({memory}, 1, {-100, -100}, {}, PaperOff::leak).out == value);
    const Floats keys = {100, 0, -100, 0}, values = {1, 2, 3, 4, 5, 6};
    memory.anchors = 2;
    memory.anchor_keys = keys.data();
    memory.anchor_values = values.data();
    CHECK(attend({memory}, 1, {100, 0}, {}, PaperOff::leak).out == Floats{1, 2, 3});
    CHECK(attend({memory}, 1, {-100, 0}, {}, PaperOff::leak).out == Floats{4, 5, 6});
}

TEST_CASE("T19: the golden layer, segmentation, summaries and routing") {
    const Golden golden;
    const Segmented s = segment(golden.nats);
    CHECK(s.result.mean == 1);
    CHECK(s.result.threshold == near(2.352082, 1e-6));
    CHECK(s.anchors == std::vector<int32_t>{3, 9});
    check_spans(s, {{0, 3, true}, {4, 9, false}, {10, 16, false}});

    const Store store(golden.nats, golden.k, golden.v, Golden::d, 8, nullptr);
    const auto row = [](const float *x) { return Floats(x, x + Golden::d); };
    const auto close = [&](const float *found, const std::vector<double> &wanted) {
        for (size_t j = 0; j < 4; ++j)
            CHECK(std::abs(static_cast<double>(found[j]) - wanted[j]) < 1e-6);
    };
    close(store.spans[1].keys, {.764801, -.566138, .021860, -.055881});
    close(store.spans[1].values, {.145240, -.325170, -.715967, -.931470});
    close(store.spans[2].keys, {-.666894, .564488, -.097967, .042008});
    close(store.spans[2].values, {-.841566, -.946049, -.818906, -.491266});
    close(store.spans[1].key_factors.sigma, {2.280202, 2.169840, 1.238745, .069590});
    close(store.spans[1].value_factors.sigma, {2.770787, .844317, 0, 0});
    close(store.spans[2].key_factors.sigma, {2.288890, 2.274270, 1.316929, .080358});
    close(store.spans[2].value_factors.sigma, {3.860223, .853112, 0, 0});
    CHECK(row(store.anchor_keys.data()) == row(golden.k.data() + 3 * 4));

    Floats logits, alphas;
    golden.route(store, &logits, &alphas);
    close(logits.data(), {3.428860, -.029227, 3.685927, -.288514});
    close(alphas.data(), {.968594, .492694, .975539, .428368});
}

TEST_CASE("T19: the golden layer, attention") {
    const Golden golden;
    const auto run = [&](float tau0, float tau1, int32_t rank_max, const float *gates) {
        const Store store(golden.nats, golden.k, golden.v, Golden::d, rank_max, gates);
        return attend({store.memory}, 2, golden.q, golden.choose(store, tau0, tau1), PaperOff::leak);
    };
    const auto close = [](const Floats &found, size_t head, const std::vector<double> &wanted, double tolerance) {
        for (size_t j = 0; j < 4; ++j)
            CHECK(std::abs(static_cast<double>(found[head * 4 + j]) - wanted[j]) < tolerance);
    };
    const std::vector<double> full0 = {.316925, .014341, -.291754, -.526418}, full1 = {.348414, -.014377, -.373649, -.641437};
    const std::vector<double> coarse0 = {.334674, .023262, -.293846, -.539010}, coarse1 = {.347189, -.017667, -.378197, -.646132};
    close(full_attention(golden.q.data(), golden.k, golden.v, 4), 0, full0, 1e-6);
    close(full_attention(golden.q.data() + 4, golden.k, golden.v, 4), 0, full1, 1e-6);

    Attended a = run(1, 1, 8, nullptr);
    close(a.out, 0, coarse0, 1e-6);
    close(a.out, 1, coarse1, 1e-6);
    {
        const Store store(golden.nats, golden.k, golden.v, Golden::d, 8, nullptr);
        a = attend({store.memory}, 1, Floats(golden.q.begin(), golden.q.begin() + 4), {0, 0}, PaperOff::leak);
        const double wanted[] = {.116341, .039908, .087935, .180693, .208120, .156772, .210231};
        for (size_t i = 0; i < 7; ++i)
            CHECK(std::abs(a.weights[i] - wanted[i]) < 1e-6);
        // Without zoomed rows nothing leaks.
        CHECK(attend({store.memory}, 1, Floats(golden.q.begin(), golden.q.begin() + 4), {0, 0}, PaperOff::absent).out == a.out);
    }
    const Floats ones(8, 1.0f), halves(8, 0.5f);
    a = run(0, 0, 8, ones.data());
    close(a.out, 0, full0, 2e-6);
    close(a.out, 1, full1, 2e-6);
    a = run(.4f, .45f, 8, ones.data());
    close(a.out, 0, full0, 2e-6);
    close(a.out, 1, {.368953, .001092, -.367036, -.645301}, 2e-6);
    a = run(.45f, .98f, 8, ones.data());
    close(a.out, 0, full0, 2e-6);
    close(a.out, 1, coarse1, 2e-6);
    // The fine rows of head 1 exist there: 2 anchors, 3 tokens, and two times a summary and its tokens.
    CHECK(a.weights[6] > 1e-8);
    CHECK(a.weights[6] < 1e-4);
    a = run(0, 0, 8, halves.data());
    close(a.out, 0, {.414440, .152053, -.147562, -.411049}, 2e-6);
    close(a.out, 1, {.388835, .088863, -.232866, -.497582}, 2e-6);
    a = run(0, 0, 2, ones.data());
    close(a.out, 0, {.307127, .011159, -.287541, -.515841}, 2e-6);
    close(a.out, 1, {.332598, -.017990, -.364174, -.621196}, 2e-6);
}

TEST_CASE("T20: heads read the KV head of their group") {
    std::mt19937 rng(20);
    const int32_t d = 8, n = 40;
    Floats nats(n);
    for (size_t t = 0; t < nats.size(); ++t)
        nats[t] = t == 0 ? 0.0f : t % 11 == 5 ? 6.0f : static_cast<float>(rng() % 8) * 0.25f;
    const Store first(nats, random_rows(rng, n, d), random_rows(rng, n, d), d, 4, nullptr);
    const Store second(nats, random_rows(rng, n, d), random_rows(rng, n, d), d, 4, nullptr);
    size_t compressed = 0;
    for (const PaperMemorySpan &span : first.spans)
        compressed += span.full_resolution ? 0 : 1;
    REQUIRE(compressed > 2);
    const Floats queries = random_rows(rng, 4, d);
    Bits zoom(4 * compressed);
    for (uint8_t &z : zoom)
        z = static_cast<uint8_t>(rng() % 2);
    const auto half = [](const auto &x, size_t which) {
        const size_t n_half = x.size() / 2;
        return std::vector(x.begin() + static_cast<long>(which * n_half), x.begin() + static_cast<long>((which + 1) * n_half));
    };
    const auto swapped = [&](const auto &x) {
        auto y = half(x, 1);
        const auto z = half(x, 0);
        y.insert(y.end(), z.begin(), z.end());
        return y;
    };
    for (const PaperOff off : {PaperOff::leak, PaperOff::absent}) {
        const Attended a = attend({first.memory, second.memory}, 2, queries, zoom, off);
        const Attended b = attend({second.memory, first.memory}, 2, swapped(queries), swapped(zoom), off);
        CHECK(a.out == swapped(b.out));
        CHECK(a.lse == swapped(b.lse));
        CHECK(half(a.out, 0) == attend({first.memory}, 2, half(queries, 0), half(zoom, 0), off).out);
        CHECK(half(a.out, 1) == attend({second.memory}, 2, half(queries, 1), half(zoom, 1), off).out);
        CHECK(half(a.out, 0) != attend({second.memory}, 2, half(queries, 0), half(zoom, 0), off).out);
    }
}

TEST_CASE("attention in factor space equals attention to the reconstructed rows") {
    std::mt19937 rng(30);
    const int32_t d = 16, n = 64;
    Floats nats(n);
    for (size_t t = 0; t < nats.size(); ++t)
        nats[t] = t == 0 ? 0.0f : t % 13 == 7 || t == 9 ? 7.0f : static_cast<float>(rng() % 8) * 0.2f;
    const Floats gates = {0.9f, 0.2f, 1.0f, 0.6f, 0.0f};
    const Store store(nats, random_rows(rng, n, d), random_rows(rng, n, d), d, 5, gates.data());
    const Floats queries = random_rows(rng, 2, d);
    size_t compressed = 0;
    for (const PaperMemorySpan &span : store.spans)
        compressed += span.full_resolution ? 0 : 1;
    REQUIRE(compressed >= 4);
    Bits zoom(2 * compressed);
    for (size_t c = 0; c < compressed; ++c) {
        zoom[c] = c % 2 == 0;
        zoom[compressed + c] = c % 4 == 3;
    }
    for (size_t h = 0; h < 2; ++h) {
        // Dense rows of what head h attends to; a summary row of |S| tokens is |S| equal rows.
        Floats k = store.anchor_keys, v = store.anchor_values;
        size_t c = 0;
        for (const PaperMemorySpan &span : store.spans) {
            const size_t rows = static_cast<size_t>(span.tokens) * static_cast<size_t>(d);
            if (span.full_resolution) {
                k.insert(k.end(), span.keys, span.keys + rows);
                v.insert(v.end(), span.values, span.values + rows);
                continue;
            }
            if (zoom[h * compressed + c++] != 0) {
                const Floats fine_k = reconstruct(span.key_factors, gates.data()), fine_v = reconstruct(span.value_factors, gates.data());
                k.insert(k.end(), fine_k.begin(), fine_k.end());
                v.insert(v.end(), fine_v.begin(), fine_v.end());
            } else {
                for (int32_t t = 0; t < span.tokens; ++t) {
                    k.insert(k.end(), span.keys, span.keys + d);
                    v.insert(v.end(), span.values, span.values + d);
                }
            }
        }
        const Floats wanted = full_attention(queries.data() + h * d, k, v, d);
        const Attended a = attend({store.memory}, 2, queries, zoom, PaperOff::absent);
        for (size_t j = 0; j < d; ++j)
            CHECK(a.out[h * d + j] == near(static_cast<double>(wanted[j]), 2e-5));
        // And its own gates for values change the result: the switch is the caller's pointer.
        std::vector<PaperMemorySpan> spans = store.spans;
        const Floats own(5, 1.0f);
        for (PaperMemorySpan &span : spans)
            span.value_gates = own.data();
        PaperMemory memory = store.memory;
        memory.span = spans.data();
        const Attended b = attend({memory}, 2, queries, zoom, PaperOff::absent);
        CHECK(a.lse == b.lse);
        CHECK(a.out != b.out);
    }
}
