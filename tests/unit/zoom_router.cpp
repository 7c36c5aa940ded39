// SPDX-License-Identifier: MIT

// Router keys and the choice of segments against plain float64.

#include <doctest/doctest.h>

#include "base/half.hpp"
#include "codec/router_key.hpp"
#include "policy/zoom_router.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

using namespace skerry;

namespace {

using Random = std::mt19937_64;
constexpr float none = -std::numeric_limits<float>::infinity();

int32_t below(Random &random, int32_t n) { return static_cast<int32_t>(random() % static_cast<uint64_t>(n)); }
float uniform(Random &random) { return static_cast<float>(random() >> 40) * 0x1p-24f; }
// Sum of uniforms: near to normal, variance 1.
float normal(Random &random) {
    float sum = 0;
    for (int i = 0; i < 12; ++i)
        sum += uniform(random);
    return sum - 6.0f;
}

std::vector<float> normals(Random &random, int32_t count) {
    std::vector<float> made(static_cast<size_t>(count));
    for (float &x : made)
        x = normal(random);
    return made;
}

double square_distance(const float *a, const float *b, int32_t dim) {
    double sum = 0;
    for (int32_t i = 0; i < dim; ++i)
        sum += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
    return sum;
}

struct Clustering {
    std::vector<float> centroids;
    uint8_t counts[router_centroids];
    int32_t present;

    const float *centroid(int32_t k, int32_t dim) const { return centroids.data() + static_cast<ptrdiff_t>(k) * dim; }
};

Clustering cluster(const std::vector<float> &keys, int32_t tokens, int32_t dim) {
    Clustering made;
    made.centroids.assign(static_cast<size_t>(router_centroids * dim), 9.0f);
    made.present = make_centroids(keys.data(), tokens, dim, made.centroids.data(), made.counts);
    return made;
}

// ---- the choice, in float64 and without cleverness

struct Chosen {
    std::vector<int32_t> ids;
    float mass;
};

struct Problem {
    ZoomRoute route;
    std::vector<float> scores, device;  // logarithms
    std::vector<float> unit, multiples; // what the choice is given of the scores
    float above = 0;                    // how far the units lie above the largest scores
    std::vector<ZoomPlace> places;
    std::vector<int32_t> previous;

    Problem(int32_t group, int32_t segments) : scores(static_cast<size_t>(group * segments)), device(static_cast<size_t>(group), none) {
        places.assign(static_cast<size_t>(segments), ZoomPlace::absent);
        route.group = group;
        route.segments = segments;
        route.score_stride = segments;
    }

    void point() {
        const size_t n = places.size();
        unit.assign(static_cast<size_t>(route.group), 0.0f);
        multiples.resize(scores.size());
        for (size_t h = 0; h < unit.size(); ++h) {
            float largest = none;
            for (size_t s = 0; s < n; ++s)
                largest = std::max(largest, scores[h * n + s]);
            if (largest != none) unit[h] = largest + above;
            for (size_t s = 0; s < n; ++s)
                multiples[h * n + s] = static_cast<float>(std::exp(double(scores[h * n + s]) - double(unit[h])));
        }
        route.scores = multiples.data();
        route.log_unit = unit.data();
        route.device_lse = device.data();
        route.places = places.data();
        route.previous = previous.data();
        route.previous_count = static_cast<int32_t>(previous.size());
    }

    Chosen run() {
        point();
        constexpr int32_t guard = -77;
        std::vector<int32_t> chosen(static_cast<size_t>(std::max(route.slots, 0)) + 1, guard);
        const size_t bytes = zoom_scratch_bytes(route.segments);
        REQUIRE(bytes % 8 == 0);
        std::vector<uint64_t> scratch(bytes / 8 + 1, 0x5555);
        const ZoomChoice choice = route_zoom(route, chosen.data(), scratch.data());
        REQUIRE(scratch.back() == 0x5555);
        REQUIRE(chosen.back() == guard);
        chosen.resize(static_cast<size_t>(choice.chosen));
        return {chosen, choice.mass};
    }

    std::vector<double> gains() const {
        std::vector<double> gain(places.size());
        for (int32_t h = 0; h < route.group; ++h) {
            double total = std::exp(double(device[static_cast<size_t>(h)]));
            for (int32_t s = 0; s < route.segments; ++s)
                total += std::exp(double(scores[static_cast<size_t>(h * route.segments + s)]));
            for (int32_t s = 0; s < route.segments && total > 0; ++s)
                gain[static_cast<size_t>(s)] += std::exp(double(scores[static_cast<size_t>(h * route.segments + s)])) / total;
        }
        return gain;
    }

    double factor(int32_t s) const {
        double factor = 1;
        if (places[static_cast<size_t>(s)] == ZoomPlace::resident) factor *= double(route.resident_ppm) / zoom_one;
        if (std::find(previous.begin(), previous.end(), s) != previous.end()) factor *= double(route.hysteresis_ppm) / zoom_one;
        return factor;
    }
};

} // namespace

TEST_CASE("centroids: counts add up to the tokens, and every centroid is the mean of the tokens nearest to it") {
    Random random(3);
    for (int round = 0; round < 300; ++round) {
        const int32_t tokens = 1 + below(random, router_segment_tokens), dim = 1 + below(random, 70);
        CAPTURE(tokens);
        CAPTURE(dim);
        std::vector<float> keys = normals(random, tokens * dim);
        // Clumps far apart are found whatever the steps: then the assignment has settled and can be checked.
        std::vector<float> centres = normals(random, router_centroids * dim);
        for (int32_t t = 0; t < tokens; ++t) {
            const int32_t clump = below(random, router_centroids);
            for (int32_t i = 0; i < dim; ++i)
                keys[static_cast<size_t>(t * dim + i)] =
                    0.001f * keys[static_cast<size_t>(t * dim + i)] + 100.0f * centres[static_cast<size_t>(clump * dim + i)];
        }
        const Clustering made = cluster(keys, tokens, dim);
        CHECK(std::accumulate(made.counts, made.counts + router_centroids, 0) == tokens);
        std::vector<double> mean(static_cast<size_t>(router_centroids * dim));
        int32_t counts[router_centroids] = {};
        for (int32_t t = 0; t < tokens; ++t) {
            int32_t best = 0;
            for (int32_t k = 1; k < made.present; ++k) {
                if (square_distance(&keys[static_cast<size_t>(t * dim)], made.centroid(k, dim), dim) <
                    square_distance(&keys[static_cast<size_t>(t * dim)], made.centroid(best, dim), dim)) {
                    best = k;
                }
            }
            counts[best] += 1;
            for (int32_t i = 0; i < dim; ++i)
                mean[static_cast<size_t>(best * dim + i)] += double(keys[static_cast<size_t>(t * dim + i)]);
        }
        for (int32_t k = 0; k < router_centroids; ++k) {
            CHECK(made.counts[k] == counts[k]);
            CHECK((made.counts[k] > 0) == (k < made.present));
            for (int32_t i = 0; i < dim; ++i) {
                const double expected = k < made.present ? mean[static_cast<size_t>(k * dim + i)] / counts[k] : 0.0;
                CHECK(double(made.centroid(k, dim)[i]) == doctest::Approx(expected).epsilon(1e-4));
            }
        }
    }
}

TEST_CASE("centroids: on formless keys no worse than their mean, and better than the start") {
    Random random(4);
    double of_mean = 0, of_four = 0;
    for (int round = 0; round < 200; ++round) {
        const int32_t tokens = 8 + below(random, 32), dim = 16;
        const std::vector<float> keys = normals(random, tokens * dim);
        const Clustering made = cluster(keys, tokens, dim);
        CHECK(std::accumulate(made.counts, made.counts + router_centroids, 0) == tokens);
        std::vector<float> mean(dim);
        for (int32_t k = 0; k < router_centroids; ++k) {
            for (int32_t i = 0; i < dim; ++i)
                mean[static_cast<size_t>(i)] += static_cast<float>(made.counts[k]) * made.centroid(k, dim)[i] / static_cast<float>(tokens);
        }
        double left = 0, spread = 0;
        for (int32_t t = 0; t < tokens; ++t) {
            const float *const key = &keys[static_cast<size_t>(t * dim)];
            double least = square_distance(key, made.centroid(0, dim), dim);
            for (int32_t k = 1; k < made.present; ++k)
                least = std::min(least, square_distance(key, made.centroid(k, dim), dim));
            left += least;
            spread += square_distance(key, mean.data(), dim);
        }
        CHECK(left < spread);
        of_mean += spread;
        of_four += left;
    }
    // Four random clusters of formless keys take some 20 % of the variance off at these sizes; k-means takes more.
    CHECK(of_four < 0.75 * of_mean);
}

TEST_CASE("centroids: fewer distinct keys than centroids") {
    const std::vector<float> one = {1, 2, 3};
    const Clustering single = cluster(one, 1, 3);
    CHECK(single.present == 1);
    CHECK(single.counts[0] == 1);
    CHECK(std::equal(one.begin(), one.end(), single.centroids.begin()));

    const std::vector<float> same(static_cast<size_t>(128 * 3), 0.5f);
    const Clustering equal = cluster(same, 128, 3);
    CHECK(equal.present == 1);
    CHECK(equal.counts[0] == 128);
    CHECK(equal.centroids[0] == 0.5f);

    const std::vector<float> zero(16 * 8, 0.0f);
    const Clustering none_left = cluster(zero, 16, 8);
    CHECK(none_left.counts[0] == 16);
    for (const float x : none_left.centroids)
        CHECK(x == 0.0f);

    const std::vector<float> three = {0, 0, 10, 0, 0, 10, 0, 0, 10, 0};
    const Clustering found = cluster(three, 5, 2);
    CHECK(found.present == 3);
    CHECK(int(found.counts[3]) == 0);
}

TEST_CASE("centroids: the start is the token farthest from the mean, ties to the lower index") {
    // Mean 0: tokens 0 and 1 are equally far. Token 0 first, then 1, then 2 before 3.
    const std::vector<float> keys = {-4, 0, 4, 0, 0, 1, 0, -1};
    const Clustering made = cluster(keys, 4, 2);
    REQUIRE(made.present == 4);
    CHECK(std::equal(keys.begin(), keys.end(), made.centroids.begin()));
}

TEST_CASE("centroids: no more than asked for, and one is the mean") {
    Random random(11);
    const std::vector<float> keys = normals(random, 16 * 8);
    for (int32_t clusters = 1; clusters <= router_centroids; ++clusters) {
        std::vector<float> centroids(static_cast<size_t>(clusters * 8 + 1), 9.0f);
        uint8_t counts[router_centroids + 1];
        std::fill_n(counts, router_centroids + 1, uint8_t(77));
        CHECK(make_centroids(keys.data(), 16, 8, centroids.data(), counts, clusters) == clusters);
        CHECK(std::accumulate(counts, counts + clusters, 0) == 16);
        CHECK(int(counts[clusters]) == 77);
        CHECK(centroids.back() == 9.0f);
        if (clusters > 1) continue;
        for (size_t i = 0; i < 8; ++i) {
            double mean = 0;
            for (size_t t = 0; t < 16; ++t)
                mean += double(keys[8 * t + i]) / 16;
            CHECK(double(centroids[i]) == doctest::Approx(mean).epsilon(1e-5));
        }
    }
}

TEST_CASE("projections: codes are within half a step, the largest component is exact to f16") {
    Random random(5);
    for (int round = 0; round < 500; ++round) {
        const int32_t rank = 1 + below(random, router_rank_limit), vectors = 1 + below(random, router_centroids);
        std::vector<float> rows = normals(random, rank * vectors);
        const float size = std::ldexp(1.0f, below(random, 20) - 10);
        for (float &x : rows)
            x *= size;
        if (round % 5 == 0) std::fill_n(rows.begin(), rank, 0.0f);
        const size_t bytes = projected_block_bytes(rank, vectors);
        REQUIRE(bytes % 4 == 0);
        std::vector<uint8_t> block(bytes + 4, 0xee);
        encode_projected(rows.data(), rank, vectors, block.data());
        for (size_t i = bytes; i < block.size(); ++i)
            REQUIRE(block[i] == 0xee);
        for (int32_t c = 0; c < vectors; ++c) {
            uint16_t half;
            std::memcpy(&half, &block[projected_scale_offset(rank, vectors) + 2 * static_cast<size_t>(c)], 2);
            const double scale = double(f16_to_f32(half));
            for (int32_t i = 0; i < rank; ++i) {
                int32_t code = 0;
                if (rank <= 16) {
                    code = static_cast<int8_t>(block[static_cast<size_t>(4 * (i / 4 * vectors + c) + i % 4)]);
                } else {
                    const int32_t byte = block[static_cast<size_t>(4 * (i / 8 * vectors + c) + i % 4)];
                    code = (i % 8 < 4 ? byte % 16 : byte / 16);
                    code -= code < 8 ? 0 : 16;
                    REQUIRE(code >= -7);
                }
                // Where the f16 nearest to the scale is below it, the largest components lie beyond the last code.
                const double held = (rank > 16 ? 7 : 127) * std::max(0x1p-25, scale * 0x1p-11);
                CHECK(std::fabs(double(rows[static_cast<size_t>(c * rank + i)]) - scale * code) <= 1.0001 * std::max(0.5 * scale, held));
            }
            if (round % 5 == 0 && c == 0) CHECK(half == 0);
        }
    }
    // Beyond f16 the scale is held.
    const float large[2] = {1e30f, -1e30f};
    uint8_t block[8] = {};
    encode_projected(large, 2, 1, block);
    CHECK(static_cast<int8_t>(block[0]) == 127);
    CHECK(static_cast<int8_t>(block[1]) == -127);
    CHECK((block[4] == 0xff && block[5] == 0x7b));
}

TEST_CASE("projections: a matrix times a vector") {
    Random random(6);
    for (const int32_t dim : {1, 7, 8, 64, 100, 128}) {
        const std::vector<float> weights = normals(random, 16 * dim), x = normals(random, dim);
        float out[16];
        project(weights.data(), x.data(), 16, dim, out);
        for (int32_t r = 0; r < 16; ++r) {
            double sum = 0;
            for (int32_t i = 0; i < dim; ++i)
                sum += double(weights[static_cast<size_t>(r * dim + i)]) * double(x[static_cast<size_t>(i)]);
            CHECK(std::fabs(double(out[r]) - sum) < 1e-5 * (1 + std::fabs(sum)) * std::sqrt(double(dim)));
        }
    }
}

TEST_CASE("router keys: bytes of decisions.md 16") {
    skerry_route_params params = {};
    params.form = SKERRY_ROUTE_CENTROIDS;
    params.dim = 64;
    params.vectors = 4;
    params.sets = 1;
    CHECK(router_key_bytes(params) + 4 == 76);
    CHECK(double(router_key_bytes(params) + 4) / (16 * 2 * 2 * 64) < 0.02);
    params.dim = 128;
    CHECK(double(router_key_bytes(params) + 4) / (16 * 2 * 2 * 128) < 0.02);
    params.form = SKERRY_ROUTE_PROJECTED;
    params.dim = 16;
    CHECK(router_key_bytes(params) + 4 == 76);
    params.sets = 3;
    CHECK(router_key_bytes(params) == 3 * 72);
    params.dim = 32; // in half the bits
    CHECK(router_key_bytes(params) == 3 * 72);
}

TEST_CASE("zoom: the largest gains, against float64") {
    Random random(7);
    for (int round = 0; round < 800; ++round) {
        const int32_t group = 1 + below(random, 8), segments = 1 + below(random, round % 10 == 0 ? 3000 : 200);
        CAPTURE(round);
        Problem problem(group, segments);
        const float spread = 1.0f + 4.0f * uniform(random), level = 100.0f * (uniform(random) - 0.5f);
        for (float &x : problem.scores)
            x = below(random, 20) == 0 ? none : level + spread * normal(random);
        for (float &x : problem.device)
            x = below(random, 4) == 0 ? none : level + 5.0f * normal(random);
        problem.above = 27.0f - 61.0f * uniform(random);
        for (ZoomPlace &place : problem.places)
            place = static_cast<ZoomPlace>(below(random, 3));
        for (int32_t s = 0; s < segments; ++s) {
            if (below(random, 9) == 0) problem.previous.push_back(s);
        }
        problem.route.slots = below(random, segments + 2);
        problem.route.resident_ppm = static_cast<uint32_t>(below(random, 1000001));
        const Chosen chosen = problem.run();

        const std::vector<double> gains = problem.gains();
        std::vector<int32_t> candidates;
        for (int32_t s = 0; s < segments; ++s) {
            if (problem.places[static_cast<size_t>(s)] != ZoomPlace::barred) candidates.push_back(s);
        }
        const size_t count = std::min(candidates.size(), static_cast<size_t>(problem.route.slots));
        REQUIRE(chosen.ids.size() == count);
        CHECK(std::is_sorted(chosen.ids.begin(), chosen.ids.end()));
        REQUIRE(std::adjacent_find(chosen.ids.begin(), chosen.ids.end()) == chosen.ids.end());
        double mass = 0;
        for (const int32_t s : chosen.ids)
            mass += gains[static_cast<size_t>(s)];
        CHECK(double(chosen.mass) == doctest::Approx(mass / group).epsilon(1e-4));
        // Whoever was left out is not better than who was taken, but for rounding.
        const auto worth = [&](int32_t s) { return gains[static_cast<size_t>(s)] * problem.factor(s); };
        double least = std::numeric_limits<double>::infinity();
        for (const int32_t s : chosen.ids) {
            REQUIRE(problem.places[static_cast<size_t>(s)] != ZoomPlace::barred);
            least = std::min(least, worth(s));
        }
        for (const int32_t s : candidates) {
            if (!std::binary_search(chosen.ids.begin(), chosen.ids.end(), s)) CHECK(worth(s) <= least * (1 + 1e-5) + 1e-30);
        }
    }
}

TEST_CASE("zoom: ties go to the lower id") {
    for (const int32_t segments : {5, 64, 1000}) {
        Problem problem(2, segments);
        std::fill(problem.scores.begin(), problem.scores.end(), 1.5f);
        problem.route.slots = 3;
        const Chosen chosen = problem.run();
        CHECK(chosen.ids == std::vector<int32_t>{0, 1, 2});
        CHECK(chosen.mass == doctest::Approx(3.0 / segments));
    }
    // Nothing has mass: still the lower ids, and no NaN.
    Problem empty(1, 6);
    std::fill(empty.scores.begin(), empty.scores.end(), none);
    empty.route.slots = 2;
    const Chosen chosen = empty.run();
    CHECK(chosen.ids == std::vector<int32_t>{0, 1});
    CHECK(chosen.mass == 0.0f);
    // A head that is no number has no say.
    for (const bool is_device : {false, true}) {
        for (const int32_t slots : {2, 6}) {
            Problem broken(2, 6);
            broken.scores = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2};
            (is_device ? broken.device[0] : broken.scores[3]) = std::nanf("");
            broken.route.slots = slots;
            const Chosen numbers = broken.run();
            CHECK(numbers.ids == (slots == 2 ? std::vector<int32_t>{3, 5} : std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
            CHECK(numbers.mass < 0.501f);
        }
    }
}

TEST_CASE("zoom: of those as good as the last one the lower ids, wherever the last one stands") {
    // Three levels; the lowest lies more than 32 powers of two below the first.
    Random random(12);
    for (int round = 0; round < 50; ++round) {
        Problem problem(1, 700);
        std::vector<int32_t> order[3];
        for (int32_t s = 0; s < 700; ++s) {
            const int32_t level = below(random, 3);
            problem.scores[static_cast<size_t>(s)] = level == 0 ? 5.0f : level == 1 ? 4.9f : -40.0f;
            problem.places[static_cast<size_t>(s)] = below(random, 5) == 0 ? ZoomPlace::barred : ZoomPlace::absent;
            if (problem.places[static_cast<size_t>(s)] != ZoomPlace::barred) order[level].push_back(s);
        }
        std::vector<int32_t> best;
        for (const std::vector<int32_t> &level : order)
            best.insert(best.end(), level.begin(), level.end());
        const size_t first = order[0].size(), second = first + order[1].size();
        for (const size_t slots : {size_t(1), first, first + 7, second + 9, best.size() - 1}) {
            std::vector<int32_t> expected(best.begin(), best.begin() + static_cast<ptrdiff_t>(slots));
            std::sort(expected.begin(), expected.end());
            problem.route.slots = static_cast<int32_t>(slots);
            CHECK(problem.run().ids == expected);
        }
    }
}

TEST_CASE("zoom: what was chosen before stays until another is twice as good") {
    Problem problem(1, 4);
    problem.device = {5.0f};
    problem.previous = {2};
    problem.route.slots = 1;
    problem.scores = {0.0f, 0.68f, 0.0f, 0.0f}; // e^0.68 = 1.97
    CHECK(problem.run().ids == std::vector<int32_t>{2});
    problem.scores = {0.0f, 0.71f, 0.0f, 0.0f}; // 2.03
    CHECK(problem.run().ids == std::vector<int32_t>{1});
    problem.route.hysteresis_ppm = zoom_one;
    problem.scores = {0.0f, 0.01f, 0.0f, 0.0f};
    CHECK(problem.run().ids == std::vector<int32_t>{1});
    // Ids that are gone, or barred by now, count for nothing.
    problem.route.hysteresis_ppm = 2 * zoom_one;
    problem.previous = {2, 9};
    problem.places[2] = ZoomPlace::barred;
    CHECK(problem.run().ids == std::vector<int32_t>{1});
}

TEST_CASE("zoom: a resident segment competes with the part that a fetch adds") {
    Problem problem(1, 3);
    problem.scores = {2.0f, 1.0f, 0.0f};
    problem.places = {ZoomPlace::resident, ZoomPlace::absent, ZoomPlace::absent};
    problem.route.slots = 1;
    problem.route.resident_ppm = 500000; // e / 2 > 1
    CHECK(problem.run().ids == std::vector<int32_t>{0});
    problem.route.resident_ppm = 300000;
    CHECK(problem.run().ids == std::vector<int32_t>{1});
    problem.route.resident_ppm = 0;
    problem.route.slots = 3;
    const Chosen chosen = problem.run();
    CHECK(chosen.ids == std::vector<int32_t>{0, 1, 2});
    CHECK(chosen.mass == doctest::Approx(1.0));
}

TEST_CASE("zoom: what the device holds takes its share of every head") {
    // Head 0 looks at the device alone, head 1 at segment 1: its small scores must win.
    Problem problem(2, 3);
    problem.scores = {30.0f, 0.0f, 0.0f, 0.0f, 3.0f, 0.0f};
    problem.device = {60.0f, none};
    problem.route.slots = 1;
    const Chosen chosen = problem.run();
    CHECK(chosen.ids == std::vector<int32_t>{1});
    CHECK(chosen.mass == doctest::Approx(0.5 * std::exp(3.0) / (std::exp(3.0) + 2)));
}

TEST_CASE("zoom: what the device holds may lie far above or below the segments") {
    Problem problem(1, 4);
    problem.scores = {1.0f, 2.0f, none, 0.0f};
    problem.route.slots = 2;
    for (const float above : {-34.0f, 0.0f, 27.0f}) {
        problem.above = above;
        for (const float device : {none, -1e30f, -200.0f, -80.0f, 30.0f, 54.0f}) {
            CAPTURE(device);
            problem.device = {device};
            const Chosen chosen = problem.run();
            CHECK(chosen.ids == std::vector<int32_t>{0, 1});
            const std::vector<double> gains = problem.gains();
            CHECK(double(chosen.mass) / (gains[0] + gains[1]) == doctest::Approx(1.0));
        }
        // More than f32 can tell: nothing has mass, and ties go to the lower id.
        for (const float device : {130.0f, 1e6f, 1e30f}) {
            problem.device = {device};
            problem.scores[0] = -1.0f;
            const Chosen chosen = problem.run();
            CHECK(chosen.ids == std::vector<int32_t>{0, 1});
            CHECK(chosen.mass == 0.0f);
            problem.scores[0] = 1.0f;
        }
    }
}

TEST_CASE("zoom: barred segments take part in the mass only; no slots, nothing chosen") {
    Problem problem(1, 3);
    problem.scores = {9.0f, 1.0f, 0.0f};
    problem.places = {ZoomPlace::barred, ZoomPlace::absent, ZoomPlace::barred};
    problem.route.slots = 2;
    const Chosen chosen = problem.run();
    CHECK(chosen.ids == std::vector<int32_t>{1});
    CHECK(chosen.mass == doctest::Approx(std::exp(1.0) / (std::exp(9.0) + std::exp(1.0) + 1)));
    problem.route.slots = 0;
    const Chosen none_chosen = problem.run();
    CHECK(none_chosen.ids.empty());
    CHECK(none_chosen.mass == 0.0f);
    Problem nothing(1, 0);
    nothing.route.slots = 4;
    CHECK(nothing.run().ids.empty());
}
