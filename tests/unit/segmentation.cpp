// SPDX-License-Identifier: MIT
// The streaming rule of policy/segmentation.hpp.

#include <doctest/doctest.h>

#include "policy/segmentation.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace skerry;

namespace {

struct Cuts {
    std::vector<int64_t> anchors;
    std::vector<TokenSpan> spans;
    SegmentState state;

    void add(const TokenSegment &token) {
        if (token.anchor) anchors.push_back(state.next - 1);
        if (token.closed) spans.push_back(token.span);
    }
    void run(const SegmentRule &rule, const std::vector<float> &nats) {
        for (const float h : nats)
            add(segment_token(rule, &state, h));
    }
    void flush() {
        TokenSpan span;
        if (segment_cut(&state, &span)) spans.push_back(span);
    }
};

bool same(const TokenSpan &a, const TokenSpan &b) {
    return a.begin == b.begin && a.end == b.end && a.anchors.words[0] == b.anchors.words[0] && a.anchors.words[1] == b.anchors.words[1];
}

bool same(const std::vector<TokenSpan> &a, const std::vector<TokenSpan> &b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i)
        if (!same(a[i], b[i])) return false;
    return true;
}

// Exponential, with bursts, so that runs of anchors and long gaps both occur.
std::vector<float> random_surprisal(std::mt19937 &rng, size_t n) {
    std::exponential_distribution<float> low(1.0f);
    std::uniform_real_distribution<float> chance(0, 1);
    const float burst = chance(rng) * 0.5f;
    std::vector<float> nats(n);
    for (float &h : nats)
        h = low(rng) + (chance(rng) < burst ? 6.0f + 30.0f * chance(rng) : 0.0f);
    return nats;
}

// The rule spelt out with the whole history at hand: two-pass statistics of each prefix.
std::vector<int64_t> anchors_of_prefixes(const SegmentRule &rule, const std::vector<float> &nats) {
    std::vector<int64_t> anchors;
    for (size_t t = 0; t < nats.size(); ++t) {
        const double n = static_cast<double>(t + 1);
        double mean = 0, squares = 0;
        for (size_t i = 0; i <= t; ++i)
            mean += nats[i] / n;
        for (size_t i = 0; i <= t; ++i)
            squares += (nats[i] - mean) * (nats[i] - mean) / n;
        const bool counted = static_cast<int64_t>(t) >= rule.sinks && static_cast<int64_t>(t) >= rule.warmup;
        if (counted && nats[t] > mean + rule.alpha * std::sqrt(squares)) anchors.push_back(static_cast<int64_t>(t));
    }
    return anchors;
}

} // namespace

TEST_CASE("T5: a surprisal equal to the running threshold is no anchor") {
    SegmentRule rule{1, 0, 0, 4, 8};
    Cuts cuts;
    cuts.run(rule, {0, 2}); // mean 1, std 1, threshold exactly 2
    CHECK(cuts.state.moments.mean == 1);
    CHECK(cuts.state.moments.variance() == 1);
    CHECK(cuts.anchors.empty());
    rule.alpha = 0.999;
    Cuts lower;
    lower.run(rule, {0, 2});
    CHECK(lower.anchors == std::vector<int64_t>{1});
}

TEST_CASE("T6: without anchors no token is lost, token 0 included") {
    for (const int32_t sinks : {0, 1, 4}) {
        Cuts cuts;
        cuts.run({1, sinks, 0, 4, 8}, {0, 1, 1, 1, 1});
        cuts.flush();
        CHECK(cuts.anchors.empty()); // the first 1 lies on the threshold, 0.5 + 0.5
        std::vector<bool> held(5, false);
        for (int64_t p = 0; p < sinks; ++p)
            held[static_cast<size_t>(p)] = true;
        for (const TokenSpan &span : cuts.spans)
            for (int64_t p = span.begin; p < span.end; ++p)
                held[static_cast<size_t>(p)] = true;
        CHECK(held == std::vector<bool>(5, true));
    }
}

TEST_CASE("T7: no tokens, and one") {
    Cuts cuts;
    cuts.flush();
    CHECK(cuts.spans.empty());
    CHECK_FALSE(cuts.state.open());
    cuts.run({1, 0, 0, 4, 8}, {0});
    CHECK(cuts.state.open_rows() == 1);
    cuts.flush();
    REQUIRE(cuts.spans.size() == 1);
    CHECK(same(cuts.spans[0], {0, 1, {}}));
    CHECK(cuts.spans[0].rows() == 1);
    cuts.flush();
    CHECK(cuts.spans.size() == 1);
}

TEST_CASE("spans close before anchors, at span_max and at cuts") {
    const SegmentRule rule{0.5, 1, 0, 3, 6}; // every 9 is an anchor
    Cuts cuts;
    //                  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
    cuts.run(rule, {0, 9, 0, 0, 9, 0, 0, 9, 9, 0, 0, 0, 0, 0, 0, 0, 9, 9, 0, 0});
    CHECK(cuts.anchors == std::vector<int64_t>{1, 4, 7, 8, 16, 17});
    REQUIRE(cuts.spans.size() == 2);
    // Two rows are too few at 4; at 7 there are four.
    CHECK(same(cuts.spans[0], {2, 7, {{0b100, 0}}}));
    CHECK(cuts.spans[0].rows() == 4);
    CHECK(same(cuts.spans[1], {9, 15, {}}));
    CHECK(cuts.state.begin == 15);
    CHECK(cuts.state.open_rows() == 3);
    CHECK(cuts.state.anchors.count() == 2);
    cuts.flush();
    CHECK(same(cuts.spans[2], {15, 20, {{0b110, 0}}}));
    // Anchors behind the last row are left outside a cut.
    cuts.run(rule, {0, 9, 9});
    cuts.flush();
    CHECK(same(cuts.spans[3], {20, 21, {}}));
    CHECK(cuts.state.begin == 23);
    CHECK(cuts.state.anchors.count() == 0);
}

TEST_CASE("span_min rows are enough to close before an anchor") {
    Cuts cuts;
    cuts.run({0.5, 1, 0, 3, 6}, {0, 9, 0, 0, 0, 9, 0, 0, 9, 0, 9});
    CHECK(cuts.anchors == std::vector<int64_t>{1, 5, 8, 10});
    REQUIRE(cuts.spans.size() == 2);
    CHECK(same(cuts.spans[0], {2, 5, {}}));
    CHECK(same(cuts.spans[1], {6, 10, {{0b100, 0}}}));
}

TEST_CASE("a span that anchors fill closes at span_max and keeps its rows only") {
    const SegmentRule rule{0.5, 0, 0, 3, 4};
    Cuts cuts;
    // Rising by powers, each value stays above mean + std / 2 of its prefix.
    cuts.run(rule, {0, 1, 4, 16, 64, 256, 0, 1024});
    CHECK(cuts.anchors == std::vector<int64_t>{1, 2, 3, 4, 5, 7});
    REQUIRE(cuts.spans.size() == 1);
    CHECK(same(cuts.spans[0], {0, 1, {}}));
    CHECK(cuts.state.begin == 6);
}

TEST_CASE("the mask of a span reaches its 128th position") {
    SegmentRule rule{1, 0, 0, 127, 128};
    Cuts cuts;
    std::vector<float> nats(128, 0.0f);
    nats[63] = nats[64] = nats[126] = 50;
    cuts.run(rule, nats);
    REQUIRE(cuts.spans.size() == 1);
    CHECK(cuts.spans[0].end == 128);
    CHECK(cuts.spans[0].rows() == 125);
    CHECK(cuts.spans[0].anchors.words[0] == uint64_t(1) << 63);
    CHECK(cuts.spans[0].anchors.words[1] == (uint64_t(1) | uint64_t(1) << 62));
    CHECK(cuts.spans[0].anchors.test(64));
    CHECK_FALSE(cuts.spans[0].anchors.test(65));
}

TEST_CASE("the warm-up has no anchors and still counts") {
    const SegmentRule rule;
    Cuts cuts;
    std::vector<float> nats(200, 1.0f);
    nats[63] = 30; // the 64th token
    nats[64] = 30;
    nats[150] = 30;
    cuts.run(rule, nats);
    CHECK(cuts.anchors == std::vector<int64_t>{64, 150});
    CHECK(cuts.state.moments.count == 200);
    CHECK(cuts.state.moments.mean == doctest::Approx((197.0 + 90.0) / 200).epsilon(1e-12));
}

TEST_CASE("T8: every position is a sink, an anchor or a row of one span, and the limits hold") {
    std::mt19937 rng(11);
    const SegmentRule rules[] = {{1, 4, 64, 64, 128}, {1, 0, 0, 1, 1}, {0, 5, 0, 16, 16}, {-0.5, 6, 3, 8, 20}, {2, 9, 16, 32, 64}};
    for (const SegmentRule &rule : rules) {
        CHECK(segment_rule_valid(rule));
        for (int round = 0; round < 8; ++round) {
            const size_t n = 1 + rng() % 1500;
            Cuts cuts;
            std::vector<bool> cut_after(n, false);
            const std::vector<float> nats = random_surprisal(rng, n);
            for (size_t t = 0; t < n; ++t) {
                cuts.add(segment_token(rule, &cuts.state, nats[t]));
                if (round % 2 == 1 && rng() % 97 == 0) {
                    cut_after[t] = true;
                    cuts.flush();
                }
            }
            cuts.flush();
            cut_after[n - 1] = true;
            std::vector<int> owners(n, 0);
            for (int64_t p = 0; p < std::min<int64_t>(rule.sinks, static_cast<int64_t>(n)); ++p)
                ++owners[static_cast<size_t>(p)];
            std::vector<bool> anchor(n, false);
            for (const int64_t p : cuts.anchors) {
                ++owners[static_cast<size_t>(p)];
                anchor[static_cast<size_t>(p)] = true;
            }
            int64_t previous = rule.sinks;
            for (const TokenSpan &span : cuts.spans) {
                CHECK(span.begin >= previous);
                CHECK(span.end - span.begin <= rule.span_max);
                REQUIRE(span.end > span.begin);
                previous = span.end;
                int32_t rows = 0;
                for (int64_t p = span.begin; p < span.end; ++p) {
                    const bool inner = span.anchors.test(static_cast<int32_t>(p - span.begin));
                    CHECK(inner == anchor[static_cast<size_t>(p)]);
                    if (inner) continue;
                    ++rows;
                    ++owners[static_cast<size_t>(p)];
                }
                CHECK(rows == span.rows());
                CHECK_FALSE(anchor[static_cast<size_t>(span.begin)]);
                CHECK_FALSE(anchor[static_cast<size_t>(span.end - 1)]);
                // Short only by span_max or a cut, behind which nothing but anchors may follow its last row.
                if (rows < rule.span_min) {
                    bool excused = false;
                    for (int64_t p = span.end - 1; p < std::min<int64_t>(static_cast<int64_t>(n), span.begin + rule.span_max); ++p) {
                        if (p >= span.end && !anchor[static_cast<size_t>(p)]) break;
                        excused = excused || cut_after[static_cast<size_t>(p)] || p - span.begin == rule.span_max - 1;
                    }
                    CHECK(excused);
                }
            }
            for (size_t p = 0; p < n; ++p)
                CHECK(owners[p] == 1);
        }
    }
}

TEST_CASE("anchors are those of the statistics of each prefix") {
    std::mt19937 rng(5);
    for (const SegmentRule &rule : {SegmentRule{1, 4, 64, 64, 128}, SegmentRule{0.3, 0, 0, 4, 9}}) {
        const std::vector<float> nats = random_surprisal(rng, 900);
        Cuts cuts;
        cuts.run(rule, nats);
        CHECK(cuts.anchors.size() > 20);
        CHECK(cuts.anchors == anchors_of_prefixes(rule, nats));
    }
}

TEST_CASE("T27: any chunking, and state that went through bytes, gives the same anchors and spans") {
    std::mt19937 rng(3);
    const SegmentRule rule{1, 4, 16, 8, 20};
    const std::vector<float> nats = random_surprisal(rng, 3000);
    Cuts whole;
    whole.run(rule, nats);
    REQUIRE(whole.spans.size() > 50);
    REQUIRE(whole.anchors.size() > 100);
    for (const size_t chunk : {size_t(1), size_t(7), size_t(16), size_t(333)}) {
        Cuts cuts;
        for (size_t first = 0; first < nats.size(); first += chunk) {
            unsigned char bytes[sizeof(SegmentState)];
            std::memcpy(bytes, &cuts.state, sizeof bytes);
            cuts.state = {};
            std::memcpy(&cuts.state, bytes, sizeof bytes);
            for (size_t t = first; t < std::min(first + chunk, nats.size()); ++t)
                cuts.add(segment_token(rule, &cuts.state, nats[t]));
        }
        CHECK(cuts.anchors == whole.anchors);
        CHECK(same(cuts.spans, whole.spans));
        CHECK(std::memcmp(&cuts.state, &whole.state, sizeof(SegmentState)) == 0);
    }
}

TEST_CASE("tokens without surprisal make fixed segments and leave the statistics alone") {
    const SegmentRule rule{1, 4, 64, 16, 16};
    Cuts cuts;
    for (int t = 0; t < 4 + 16 * 5 + 3; ++t)
        cuts.add(segment_token_unscored(rule, &cuts.state));
    CHECK(cuts.anchors.empty());
    REQUIRE(cuts.spans.size() == 5);
    for (int64_t i = 0; i < 5; ++i)
        CHECK(same(cuts.spans[static_cast<size_t>(i)], {4 + 16 * i, 20 + 16 * i, {}}));
    CHECK(cuts.state.moments.count == 0);
    CHECK(cuts.state.open_rows() == 3);
}

TEST_CASE("rules out of range are not valid") {
    CHECK(segment_rule_valid({}));
    CHECK(segment_rule_valid({-1, 0, 0, 1, 1}));
    CHECK_FALSE(segment_rule_valid({1, 0, 0, 0, 1}));
    CHECK_FALSE(segment_rule_valid({1, 0, 0, 5, 4}));
    CHECK_FALSE(segment_rule_valid({1, 0, 0, 64, 129}));
    CHECK_FALSE(segment_rule_valid({1, -1, 0, 64, 128}));
    CHECK_FALSE(segment_rule_valid({1, 0, -1, 64, 128}));
    CHECK_FALSE(segment_rule_valid({std::numeric_limits<double>::quiet_NaN(), 0, 0, 64, 128}));
    CHECK_FALSE(segment_rule_valid({std::numeric_limits<double>::infinity(), 0, 0, 64, 128}));
}
