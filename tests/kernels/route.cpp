// SPDX-License-Identifier: MIT
#include "attend_scene.hpp"
#include "codec/rotation.hpp"
#include "codec/router_key.hpp"

#include <doctest/doctest.h>

#include <numeric>

namespace {

using namespace scene;
using namespace skerry;

constexpr float none = -std::numeric_limits<float>::infinity();

struct Scores {
    std::vector<float> scores, units; // [group][segments], [group]
    int32_t segments;

    float score(int32_t h, int32_t s) const { return scores[static_cast<size_t>(h * segments + s)]; }
    double unit(int32_t h) const { return double(units[static_cast<size_t>(h)]); }
    double log(int32_t h, int32_t s) const { return std::log(double(score(h, s))) + unit(h); }
};

// Segments of one KV head, coded, with the numbers that their bytes stand for.
struct Keys {
    skerry_route_params params = {};
    int32_t segments;
    std::vector<float> mean, balance, queries, bias;
    skerry_epoch epoch = {};
    std::vector<uint8_t> bytes, counts;
    std::vector<double> vectors; // [segments][sets][vectors][dim]

    Keys(skerry_route_form form, int32_t dim, int32_t group, int32_t vectors_, int32_t sets, int32_t segments_, uint64_t seed)
        : segments(segments_) {
        Random random(seed);
        params.form = form;
        params.dim = dim;
        params.group = group;
        params.vectors = vectors_;
        params.sets = sets;
        params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
        for (int32_t i = 0; i < dim; ++i) {
            mean.push_back(0.5f * random.normal());
            balance.push_back(std::exp2(static_cast<float>(random.below(65) - 32) / 16.0f));
        }
        epoch = {mean.data(), balance.data(), 0.25f, 1.0f};
        for (int32_t i = 0; i < group * dim; ++i)
            queries.push_back(2.0f * random.normal());
        for (int32_t h = 0; h < group; ++h)
            bias.push_back(random.normal());
        for (int32_t i = 0; i < segments * params.vectors; ++i)
            counts.push_back(static_cast<uint8_t>(random.below(4) == 0 ? 0 : 1 + random.below(random.below(2) == 0 ? 16 : 255)));
        bytes.resize(static_cast<size_t>(segments) * router_key_bytes(params));
        for (int32_t s = 0; s < segments; ++s)
            encode_segment(s, random);
    }
    Keys(const Keys &) = delete;
    Keys &operator=(const Keys &) = delete;

    uint8_t *key(int32_t s) { return bytes.data() + static_cast<size_t>(s) * router_key_bytes(params); }

    double oracle(int32_t h, int32_t s) const {
        const int32_t set = params.sets == 1 ? 0 : h;
        double logs[router_centroids], most = double(none), sum = 0;
        for (int32_t c = 0; c < params.vectors; ++c) {
            double dot = 0;
            for (int32_t i = 0; i < params.dim; ++i) {
                dot += double(queries[static_cast<size_t>(h * params.dim + i)]) *
                       vectors[static_cast<size_t>(((s * params.sets + set) * params.vectors + c) * params.dim + i)];
            }
            double logit = dot * double(params.scale);
            if (params.softcap > 0) logit = double(params.softcap) * std::tanh(logit / double(params.softcap));
            logs[c] = logit + std::log(double(counts[static_cast<size_t>(s * params.vectors + c)]));
            most = std::max(most, logs[c]);
        }
        if (most == double(none)) return most;
        for (int32_t c = 0; c < params.vectors; ++c)
            sum += std::exp(logs[c] - most);
        return most + std::log(sum);
    }

    // Puts the segments into another order.
    void arrange(const std::vector<int32_t> &order) {
        const auto permute = [&](auto &all) {
            const auto before = all;
            const size_t each = all.size() / order.size();
            for (size_t s = 0; s < order.size(); ++s)
                std::copy_n(before.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(order[s]) * each), each,
                            all.begin() + static_cast<ptrdiff_t>(s * each));
        };
        permute(bytes);
        permute(counts);
        permute(vectors);
    }

    // From arrays that end where they must.
    Scores run(const skerry_kernels &kernels, int32_t begin, int32_t end, bool has_bias) const {
        const size_t key_bytes = router_key_bytes(params), n = static_cast<size_t>(end - begin), v = static_cast<size_t>(params.vectors);
        const std::vector<uint8_t> own_keys(bytes.begin() + begin * static_cast<ptrdiff_t>(key_bytes),
                                            bytes.begin() + end * static_cast<ptrdiff_t>(key_bytes));
        const std::vector<uint8_t> own_counts(counts.begin() + begin * static_cast<ptrdiff_t>(v),
                                              counts.begin() + end * static_cast<ptrdiff_t>(v));
        const size_t stride = n + 3, scratch_bytes = kernels.route_scratch_bytes(&params);
        std::vector<float> scores(stride * static_cast<size_t>(params.group), 7.0f), units(static_cast<size_t>(params.group) + 1, 7.0f);
        const Bytes scratch = aligned_bytes(scratch_bytes + 64, 0x77);
        skerry_route_task task = {};
        task.balance = params.form == SKERRY_ROUTE_CENTROIDS ? &epoch : nullptr;
        task.queries = queries.data();
        task.bias = has_bias ? bias.data() : nullptr;
        task.keys = own_keys.data();
        task.counts = own_counts.data();
        task.scores = scores.data();
        task.score_stride = static_cast<int64_t>(stride);
        task.log_unit = units.data();
        task.scratch = scratch.get();
        task.segments = end - begin;
        kernels.route(&params, &task);
        for (size_t i = scratch_bytes; i < scratch_bytes + 64; ++i)
            REQUIRE(scratch.get()[i] == 0x77);
        REQUIRE(units.back() == 7.0f);
        units.pop_back();
        for (const float unit : units)
            REQUIRE(std::isfinite(unit));
        Scores dense = {{}, units, end - begin};
        for (size_t h = 0; h < static_cast<size_t>(params.group); ++h) {
            for (size_t s = n; s < stride; ++s)
                REQUIRE(scores[h * stride + s] == 7.0f);
            for (size_t s = 0; s < n; ++s)
                dense.scores.push_back(scores[h * stride + s]);
        }
        return dense;
    }

    // What a score may differ by from exact arithmetic on the stored numbers: queries are rounded to steps of 1 / 127 or, projected, 1 /
    // 32,767 of their largest channel, half a step at most in each, after R(q / balance) where keys are coded so; f32 adds its own. A score
    // is no more sensitive than the logits it is made of.
    double tolerance(int32_t h, int32_t s) const {
        const size_t dim = static_cast<size_t>(params.dim), sets = static_cast<size_t>(params.sets),
                     n = static_cast<size_t>(params.vectors);
        const auto coded = [&](auto at, bool is_query) {
            std::vector<float> row(dim);
            for (size_t i = 0; i < dim; ++i) {
                row[i] = static_cast<float>(at[i]);
                if (params.form != SKERRY_ROUTE_CENTROIDS) continue;
                row[i] = is_query ? row[i] / balance[i] : (row[i] - mean[i]) * balance[i];
            }
            if (params.form == SKERRY_ROUTE_CENTROIDS) rotate(row.data(), params.dim);
            return row;
        };
        double largest = 0, sum = 0, sizes = 0;
        for (const float x : coded(queries.data() + static_cast<size_t>(h) * dim, true))
            largest = std::max(largest, std::fabs(double(x)));
        for (size_t c = 0; c < n; ++c) {
            const double *const vector =
                vectors.data() + ((static_cast<size_t>(s) * sets + (sets == 1 ? 0 : static_cast<size_t>(h))) * n + c) * dim;
            double absolute = 0, size = 0;
            for (const float x : coded(vector, false))
                absolute += std::fabs(double(x));
            for (size_t i = 0; i < dim; ++i)
                size += std::fabs(double(queries[static_cast<size_t>(h) * dim + i]) * vector[i]);
            sum = std::max(sum, absolute);
            sizes = std::max(sizes, size);
        }
        return double(params.scale) *
                   (0.5 * largest / (params.form == SKERRY_ROUTE_CENTROIDS ? 127 : 32767) * sum + 4e-7 * std::sqrt(double(dim)) * sizes) +
               4e-6;
    }

private:
    void encode_segment(int32_t s, Random &random) {
        const int32_t dim = params.dim, n = params.vectors;
        std::vector<float> rows(static_cast<size_t>(n * dim));
        if (params.form == SKERRY_ROUTE_CENTROIDS) {
            for (size_t i = 0; i < rows.size(); ++i)
                rows[i] = mean[i % static_cast<size_t>(dim)] + 2.0f * random.normal() / balance[i % static_cast<size_t>(dim)];
            if (s % 7 == 3) std::fill_n(rows.begin() + dim, dim, 0.0f);
            skerry_code_params code = {};
            code.epoch = &epoch;
            code.attention_factor = 1.0f;
            code.dim = dim;
            code.capacity = code.count = n;
            code.format = SKERRY_FORMAT_R2;
            code.side = SKERRY_SIDE_KEY;
            const Bytes scratch = aligned_bytes(ref::code_scratch_bytes(dim, n), 0);
            ref::encode(&code, rows.data(), key(s), scratch.get());
            ref::decode(&code, key(s), rows.data(), scratch.get());
            vectors.insert(vectors.end(), rows.begin(), rows.end());
            return;
        }
        const size_t block_bytes = projected_block_bytes(dim, n);
        for (int32_t set = 0; set < params.sets; ++set) {
            for (float &x : rows)
                x = 3.0f * random.normal();
            if (s % 7 == 3) std::fill_n(rows.begin(), dim, 0.0f);
            uint8_t *const block = key(s) + static_cast<size_t>(set) * block_bytes;
            encode_projected(rows.data(), dim, n, block);
            for (int32_t c = 0; c < n; ++c) {
                uint16_t half;
                std::memcpy(&half, block + projected_scale_offset(dim, n) + 2 * c, 2);
                for (int32_t i = 0; i < dim; ++i) {
                    int32_t number = 0;
                    if (dim <= 16) {
                        number = static_cast<int8_t>(block[4 * (i / 4 * n + c) + i % 4]);
                    } else {
                        const int32_t byte = block[4 * (i / 8 * n + c) + i % 4], half_byte = i / 4 % 2 == 0 ? byte % 16 : byte / 16;
                        number = half_byte < 8 ? half_byte : half_byte - 16;
                    }
                    vectors.push_back(double(number) * double(f16_to_f32(half)));
                }
            }
        }
    }
};

void compare_with_oracle(Keys &keys, bool has_bias) {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const skerry_kernels &kernels = *cpu_kernels(level.features);
        REQUIRE(kernels.route_supports(&keys.params) == 1);
        const Scores scores = keys.run(kernels, 0, keys.segments, has_bias);
        double worst = 0; // of what is allowed
        for (int32_t h = 0; h < keys.params.group; ++h) {
            const double bias = has_bias ? double(keys.bias[static_cast<size_t>(h)]) : 0.0;
            double most = double(none);
            float largest = 0;
            for (int32_t s = 0; s < keys.segments; ++s) {
                most = std::max(most, keys.oracle(h, s) + bias);
                largest = std::max(largest, scores.score(h, s));
            }
            CHECK((largest > 0) == (most > double(none)));
            if (largest > 0) CHECK((largest >= 0x1p-40f && largest <= 0x1p50f));
            for (int32_t s = 0; s < keys.segments; ++s) {
                const double expected = keys.oracle(h, s) + bias;
                // What multiplies x86 scores meets no subnormal numbers.
                if (level.features != 0) CHECK((scores.score(h, s) == 0.0f || scores.score(h, s) >= 0x1p-100f));
                if (expected == double(none)) {
                    CHECK(scores.score(h, s) == 0.0f);
                    continue;
                }
                const double log = scores.log(h, s), depth = most - 50 * std::log(2.0);
                REQUIRE_FALSE(std::isnan(log));
                const double allowed = keys.tolerance(h, s) + 0x1p-23 * std::max(std::fabs(expected), std::fabs(most)); // logs are in f32
                // Where less than 2^-50 of the largest is due, anything below that will do.
                worst = std::max(worst, (expected > depth ? std::fabs(log - expected) : log - depth) / allowed);
            }
        }
        CHECK(worst < 1.0);
    }
}

} // namespace

TEST_CASE("route: centroids at every level against float64, all dimensions and group sizes") {
    uint64_t seed = 1;
    for (const int32_t dim : {2, 10, 16, 34, 64, 80, 96, 112, 128, 192, 256, 640}) {
        for (const int32_t group : {1, 2, 3, 4, 7}) {
            for (const int32_t segments : {1, 15, 16, 37}) {
                CAPTURE(dim);
                CAPTURE(group);
                CAPTURE(segments);
                Keys keys(SKERRY_ROUTE_CENTROIDS, dim, group, router_centroids, 1, segments, ++seed);
                if (seed % 3 == 0) keys.params.softcap = 5.0f;
                compare_with_oracle(keys, seed % 2 == 0);
            }
        }
    }
}

TEST_CASE("route: rounding the queries of centroids shifts logits whose spread is 3 by less than 0.02") {
    Keys keys(SKERRY_ROUTE_CENTROIDS, 128, 4, router_centroids, 1, 512, 77);
    // Of the size that makes q . (vector - mean) scale have that spread: the coded vectors are 2 / balance wide.
    for (size_t i = 0; i < keys.queries.size(); ++i)
        keys.queries[i] *= 0.75f * keys.balance[i % 128];
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const Scores scores = keys.run(*cpu_kernels(level.features), 0, keys.segments, false);
        double error = 0, sum = 0, square = 0;
        int32_t count = 0;
        for (int32_t h = 0; h < keys.params.group; ++h) {
            for (int32_t s = 0; s < keys.segments; ++s) {
                const double expected = keys.oracle(h, s);
                if (expected == double(none)) continue;
                const double apart = scores.log(h, s) - expected;
                error += apart * apart;
                ++count;
            }
        }
        for (int32_t s = 0; s < keys.segments; ++s) {
            double dot = 0;
            for (size_t i = 0; i < 128; ++i)
                dot += double(keys.queries[i]) * keys.vectors[static_cast<size_t>(s) * 512 + i];
            sum += dot * double(keys.params.scale);
            square += dot * dot * double(keys.params.scale) * double(keys.params.scale);
        }
        const double mean = sum / keys.segments, spread = std::sqrt(square / keys.segments - mean * mean);
        CHECK(spread > 2.5);
        CHECK(spread < 3.5);
        CHECK(std::sqrt(error / count) < 0.02);
        CHECK((level.features == 0 || error > 0));
    }
}

TEST_CASE("route: projections at every level against float64, shared by the group or one set per query head") {
    uint64_t seed = 1000;
    for (const int32_t rank : {1, 3, 4, 8, 12, 15, 16, 17, 20, 24, 25, 29, 31, 32}) {
        for (int32_t vectors = 1; vectors <= router_centroids; ++vectors) {
            for (const int32_t group : {1, 4, 5}) {
                for (const int32_t sets : {1, group}) {
                    CAPTURE(rank);
                    CAPTURE(vectors);
                    CAPTURE(group);
                    CAPTURE(sets);
                    Keys keys(SKERRY_ROUTE_PROJECTED, rank, group, vectors, sets, 21 + vectors, ++seed);
                    if (seed % 3 == 0) keys.params.softcap = 5.0f;
                    compare_with_oracle(keys, seed % 2 == 0);
                }
            }
        }
    }
}

TEST_CASE("route: the unit follows the largest logit, wherever it stands") {
    for (const int32_t dim : {-128, 16, 32}) {
        // Logits that lie a few or hundreds of nats apart, and rise, fall or do neither along the list.
        for (const float size : {8.0f, 60.0f}) {
            CAPTURE(dim);
            CAPTURE(size);
            Keys keys(dim < 0 ? SKERRY_ROUTE_CENTROIDS : SKERRY_ROUTE_PROJECTED, std::abs(dim), 2, 4, 1, 150, 31);
            for (float &x : keys.queries)
                x *= size;
            std::vector<int32_t> order(150), back(150);
            std::iota(order.begin(), order.end(), 0);
            std::iota(back.rbegin(), back.rend(), 0);
            std::vector<double> logs;
            for (int32_t s = 0; s < 150; ++s)
                logs.push_back(keys.oracle(0, s));
            const auto log_of = [&](int32_t s) { return logs[static_cast<size_t>(s)]; };
            std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return log_of(a) < log_of(b); });
            CHECK(log_of(order[149]) - log_of(order[75]) > 5 * double(size));
            compare_with_oracle(keys, true);
            keys.arrange(order);
            compare_with_oracle(keys, true);
            keys.arrange(back);
            compare_with_oracle(keys, true);
        }
    }
}

TEST_CASE("route: where a list is cut changes no more of a score than its unit") {
    struct Shape {
        skerry_route_form form;
        int32_t dim;
        float size; // of the queries
    };
    for (const Shape shape : {Shape{SKERRY_ROUTE_CENTROIDS, 128, 0.5f}, Shape{SKERRY_ROUTE_PROJECTED, 16, 0.5f},
                              Shape{SKERRY_ROUTE_PROJECTED, 32, 0.5f}, Shape{SKERRY_ROUTE_PROJECTED, 32, 3.0f}}) {
        Keys keys(shape.form, shape.dim, 4, 4, 1, 70, 5);
        for (float &x : keys.queries)
            x *= shape.size;
        for (const Level &level : levels()) {
            if (!runs(level)) continue;
            CAPTURE(level.name);
            const skerry_kernels &kernels = *cpu_kernels(level.features);
            const Scores whole = keys.run(kernels, 0, 70, true);
            int32_t moved = 0, compared = 0;
            const auto compare = [&](const Scores &part, int32_t begin) {
                for (int32_t h = 0; h < 4; ++h) {
                    const float most = *std::max_element(whole.scores.begin() + 70 * h, whole.scores.begin() + 70 * (h + 1));
                    const double steps = (part.unit(h) - whole.unit(h)) / (64 * std::log(2.0));
                    moved += std::fabs(steps) > 0.5 ? 1 : 0;
                    if (level.features != 0) CHECK(std::fabs(steps - std::round(steps)) < 1e-5);
                    for (int32_t s = 0; s < part.segments; ++s) {
                        const float expected = whole.score(h, begin + s);
                        if (expected < 0x1p-50f * most) continue;
                        ++compared;
                        if (level.features == 0) {
                            CHECK(std::fabs(part.log(h, s) - whole.log(h, begin + s)) < 3e-5);
                        } else {
                            CHECK(std::ldexp(part.score(h, s), 64 * static_cast<int>(std::round(steps))) == expected);
                        }
                    }
                }
            };
            for (const int32_t cut : {1, 16, 19, 69}) {
                compare(keys.run(kernels, 0, cut, true), 0);
                compare(keys.run(kernels, cut, 70, true), cut);
            }
            CHECK(compared > 200);
            if (level.features != 0) CHECK((moved > 0) == (shape.size > 1));
        }
    }
}

TEST_CASE("route: one centroid of n equal keys has their exact mass") {
    Keys keys(SKERRY_ROUTE_CENTROIDS, 64, 2, 4, 1, 1, 9);
    keys.counts = {16, 0, 0, 0};
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        const Scores scores = keys.run(*cpu_kernels(level.features), 0, 1, false);
        for (int32_t h = 0; h < 2; ++h) {
            double dot = 0;
            for (int32_t i = 0; i < 64; ++i)
                dot += double(keys.queries[static_cast<size_t>(64 * h + i)]) * keys.vectors[static_cast<size_t>(i)];
            const double expected = dot * double(keys.params.scale) + std::log(16.0);
            CHECK(std::fabs(scores.log(h, 0) - expected) < keys.tolerance(h, 0));
        }
    }
}

TEST_CASE("route: zero queries, zero keys and segments without vectors give no NaN") {
    for (const int32_t dim : {16, 32, -16}) {
        Keys keys(dim < 0 ? SKERRY_ROUTE_CENTROIDS : SKERRY_ROUTE_PROJECTED, std::abs(dim), 3, 4, 1, 33, 6);
        std::fill(keys.queries.begin(), keys.queries.end(), 0.0f);
        std::fill_n(keys.key(0), router_key_bytes(keys.params), uint8_t(0));
        std::fill_n(keys.counts.begin(), 8, uint8_t(4));
        std::fill_n(keys.counts.begin() + 8, 4, uint8_t(0));
        for (const Level &level : levels()) {
            if (!runs(level)) continue;
            CAPTURE(level.name);
            const Scores scores = keys.run(*cpu_kernels(level.features), 0, 33, false);
            for (const float score : scores.scores)
                CHECK_FALSE(std::isnan(score));
            for (int32_t h = 0; h < 3; ++h) {
                CHECK(scores.log(h, 0) == doctest::Approx(std::log(16.0)));
                CHECK(scores.score(h, 2) == 0.0f);
            }
            // Nothing at all.
            std::fill(keys.counts.begin(), keys.counts.end(), uint8_t(0));
            for (const float score : keys.run(*cpu_kernels(level.features), 0, 33, true).scores)
                CHECK(score == 0.0f);
            std::fill_n(keys.counts.begin(), 8, uint8_t(4));
        }
    }
}

TEST_CASE("route: enormous logits stay numbers") {
    for (const int32_t rank : {16, 32, -128}) {
        for (const float size : {1e5f, 1e6f, 1e8f, 1e10f, 1e20f, 1e37f}) {
            CAPTURE(size);
            Keys keys(rank < 0 ? SKERRY_ROUTE_CENTROIDS : SKERRY_ROUTE_PROJECTED, std::abs(rank), 2, 4, 1, 40, 7);
            for (float &x : keys.queries)
                x *= size;
            for (const Level &level : levels()) {
                if (!runs(level) || level.features == 0) continue;
                CAPTURE(level.name);
                const Scores scores = keys.run(*cpu_kernels(level.features), 0, 40, false);
                for (int32_t h = 0; h < 2; ++h) {
                    float largest = 0;
                    for (int32_t s = 0; s < 40; ++s) {
                        CHECK((scores.score(h, s) == 0.0f || (scores.score(h, s) >= 0x1p-100f && scores.score(h, s) <= 0x1p50f)));
                        largest = std::max(largest, scores.score(h, s));
                    }
                    CHECK(largest >= 0x1p-40f);
                }
            }
        }
    }
}

TEST_CASE("route: a block of int4 as docs/format.md has it, byte by byte") {
    // Components 0 to 17 of one vector: 7, -7, then what is left of a step of 1.
    float row[18] = {7, -7, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 0.4f, 0, -1, 2};
    const std::vector<uint8_t> expected = {0x27, 0xe9, 0x31, 0xdf, 0x64, 0xac, 0x05, 0x0b, 0x0f, 0x02, 0, 0, 0x00, 0x3c, 0, 0};
    REQUIRE(projected_block_bytes(18, 1) == expected.size());
    std::vector<uint8_t> block(expected.size(), 0xee);
    encode_projected(row, 18, 1, block.data());
    CHECK(block == expected);
    skerry_route_params params = {};
    params.form = SKERRY_ROUTE_PROJECTED;
    params.dim = 18;
    params.group = params.vectors = params.sets = 1;
    params.scale = 1.0f;
    const uint8_t count = 1;
    row[14] = 0;
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const skerry_kernels &kernels = *cpu_kernels(level.features);
        const Bytes scratch = aligned_bytes(kernels.route_scratch_bytes(&params), 0);
        for (int32_t i = 0; i < 18; ++i) {
            float query[18] = {}, score = 0, unit = 0;
            query[i] = 1;
            skerry_route_task task = {};
            task.queries = query;
            task.keys = expected.data();
            task.counts = &count;
            task.scores = &score;
            task.log_unit = &unit;
            task.score_stride = task.segments = 1;
            task.scratch = scratch.get();
            kernels.route(&params, &task);
            CHECK(std::log(double(score)) + double(unit) == doctest::Approx(double(row[i])));
        }
    }
}

TEST_CASE("route: no segments, nothing written") {
    Keys keys(SKERRY_ROUTE_CENTROIDS, 64, 2, 4, 1, 1, 8);
    for (const Level &level : levels()) {
        if (runs(level)) CHECK(keys.run(*cpu_kernels(level.features), 1, 1, true).scores.empty());
    }
}

TEST_CASE("route: shapes that cannot be scored are refused") {
    const auto supports = [](skerry_route_form form, int32_t dim, int32_t group, int32_t vectors, int32_t sets) {
        skerry_route_params params = {};
        params.form = form;
        params.dim = dim;
        params.group = group;
        params.vectors = vectors;
        params.sets = sets;
        return cpu_kernels(0)->route_supports(&params);
    };
    CHECK(supports(SKERRY_ROUTE_CENTROIDS, 64, 3, 4, 1) == 1);
    CHECK(supports(SKERRY_ROUTE_CENTROIDS, 65, 3, 4, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_CENTROIDS, 64, 3, 3, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_CENTROIDS, 64, 3, 4, 3) == 0);
    CHECK(supports(SKERRY_ROUTE_CENTROIDS, 0, 3, 4, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 16, 3, 1, 3) == 1);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 32, 3, 4, 1) == 1);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 33, 3, 1, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 16, 3, 5, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 16, 3, 0, 1) == 0);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 16, 3, 4, 2) == 0);
    CHECK(supports(SKERRY_ROUTE_PROJECTED, 16, 0, 4, 1) == 0);
    CHECK(supports(3, 16, 3, 4, 1) == 0);
}

TEST_CASE("route: every level has integer dot products of its own") {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        const skerry_kernels *const table = cpu_kernels(level.features), *const plain = cpu_kernels(0);
        CHECK((table->route != nullptr));
        CHECK((table->route == plain->route) == (table == plain));
    }
}
