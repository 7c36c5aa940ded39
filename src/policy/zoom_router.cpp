// SPDX-License-Identifier: MIT
#include "policy/zoom_router.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

namespace skerry {

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();
constexpr int32_t block = 16; // a constant number of turns lets the compiler use vectors

// exp for x <= 0, relative error below 1e-6; 0 from -87 down, -inf included. Operations that round alike everywhere, so that a choice
// does not depend on the mathematics library: a polynomial of degree 6 on |r| <= ln 2 / 2. A mask in place of comparisons: behind a
// branch, operations that could trap keep a loop from using vectors.
float fast_exp(float x) {
    constexpr float to_whole = 0x1.8p23f;
    constexpr int32_t least = std::bit_cast<int32_t>(87.0f);
    const int32_t beyond = (std::bit_cast<int32_t>(x) & INT32_MAX) - least, is_within = beyond >> 31;
    const float held = -std::bit_cast<float>(least + (beyond & is_within));
    const float shifted = held * 0x1.715476p+0f + to_whole;
    const float n = shifted - to_whole;
    const float r = (held - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
    float p = 0x1.6a21acp-10f;
    p = p * r + 0x1.123b6ap-7f;
    p = p * r + 0x1.5558fap-5f;
    p = p * r + 0x1.555490p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The low bits of `shifted` are n, at least -126: added to the exponent they multiply by 2^n.
    const uint32_t bits = std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23);
    return std::bit_cast<float>(bits & static_cast<uint32_t>(is_within));
}

float largest_of(const float *x, int32_t n) {
    float lane[block];
    std::fill_n(lane, block, none);
    int32_t i = 0;
    for (; i + block <= n; i += block) {
        for (int32_t l = 0; l < block; ++l)
            lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    }
    for (int32_t l = 0; i < n; ++i, ++l)
        lane[l] = x[i] > lane[l] ? x[i] : lane[l];
    return *std::max_element(lane, lane + block);
}

// weights[s] = exp(scores[s] - largest); returns their sum.
float exponentials(const float *scores, int32_t n, float largest, float *weights) {
    float lane[block] = {};
    int32_t i = 0;
    for (; i + block <= n; i += block) {
        for (int32_t l = 0; l < block; ++l) {
            const float weight = fast_exp(scores[i + l] - largest);
            weights[i + l] = weight;
            lane[l] += weight;
        }
    }
    for (int32_t l = 0; i < n; ++i, ++l) {
        weights[i] = fast_exp(scores[i] - largest);
        lane[l] += weights[i];
    }
    float sum = 0;
    for (const float part : lane)
        sum += part;
    return sum;
}

// gains[s] = sum over heads of exp(score_hs - Z_h).
void add_up_gains(const ZoomRoute &route, float *weights, float *gains) {
    const int32_t n = route.segments;
    std::fill_n(gains, n, 0.0f);
    for (int32_t h = 0; h < route.group; ++h) {
        const float *const scores = route.scores + h * route.score_stride;
        const float largest = largest_of(scores, n), device = route.device_lse[h];
        if (largest == none) continue;
        const float sum = exponentials(scores, n, largest, weights);
        const float top = largest > device ? largest : device;
        const float scale = fast_exp(largest - top), share = scale / (fast_exp(device - top) + scale * sum);
        for (int32_t s = 0; s < n; ++s)
            gains[s] += share * weights[s];
    }
}

// Candidates as numbers that order them: the gain, which is not negative and so orders like its bits, above the complement of the id.
uint64_t rank_of(float gain, int32_t id) {
    return uint64_t(std::bit_cast<uint32_t>(gain)) << 32 | (UINT32_MAX - static_cast<uint32_t>(id));
}
int32_t id_of(uint64_t rank) { return static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(rank)); }

// The exponent and three bits below it.
constexpr int bucket_shift = 32 + 20;
constexpr int32_t buckets = 2048;

int32_t rank_candidates(const ZoomRoute &route, const float *gains, float *worths, uint64_t *ranks) {
    const float resident = static_cast<float>(route.resident_ppm) / static_cast<float>(zoom_one);
    const float hysteresis = static_cast<float>(route.hysteresis_ppm) / static_cast<float>(zoom_one);
    const float factors[] = {0.0f, 1.0f, resident}; // of barred, absent and resident
    for (int32_t s = 0; s < route.segments; ++s)
        worths[s] = gains[s] * factors[static_cast<size_t>(route.places[s])];
    for (int32_t i = 0; i < route.previous_count; ++i) {
        if (route.previous[i] < route.segments) worths[route.previous[i]] *= hysteresis;
    }
    int32_t count = 0;
    for (int32_t s = 0; s < route.segments; ++s) {
        ranks[count] = rank_of(worths[s], s);
        count += route.places[s] != ZoomPlace::barred ? 1 : 0;
    }
    return count;
}

// The largest `wanted` come first, in no order. A histogram leaves few of them to compare.
void select(uint64_t *ranks, int32_t count, int32_t wanted, int32_t *histogram) {
    if (wanted <= 0 || wanted >= count) return;
    std::fill_n(histogram, buckets, 0);
    for (int32_t i = 0; i < count; ++i)
        ++histogram[ranks[i] >> bucket_shift];
    int32_t bucket = buckets - 1;
    for (int32_t seen = histogram[bucket]; seen < wanted; seen += histogram[bucket])
        --bucket;
    const uint64_t least = static_cast<uint64_t>(bucket) << bucket_shift;
    uint64_t *const end = std::partition(ranks, ranks + count, [least](uint64_t rank) { return rank >= least; });
    if (end - ranks > wanted) std::nth_element(ranks, ranks + wanted, end, std::greater<>());
}

struct Scratch {
    uint64_t *ranks;    // [segments]
    int32_t *histogram; // [buckets]
    float *weights;     // [segments]: exponentials of one head, then gains with their factors
    float *gains;       // [segments]
};

Scratch carve(void *memory, int32_t segments) {
    Scratch scratch;
    scratch.ranks = static_cast<uint64_t *>(memory);
    scratch.histogram = reinterpret_cast<int32_t *>(scratch.ranks + segments);
    scratch.weights = reinterpret_cast<float *>(scratch.histogram + buckets);
    scratch.gains = scratch.weights + segments;
    return scratch;
}

} // namespace

size_t zoom_scratch_bytes(int32_t segments) {
    return static_cast<size_t>(segments) * (sizeof(uint64_t) + 2 * sizeof(float)) + buckets * sizeof(int32_t);
}

ZoomChoice route_zoom(const ZoomRoute &route, int32_t *chosen, int32_t *spare, void *memory) {
    const Scratch scratch = carve(memory, route.segments);
    add_up_gains(route, scratch.weights, scratch.gains);
    const int32_t candidates = rank_candidates(route, scratch.gains, scratch.weights, scratch.ranks);
    uint64_t *const ranks = scratch.ranks;

    ZoomChoice choice;
    choice.chosen = std::clamp(route.slots, 0, candidates);
    choice.spare = std::clamp(route.spare, 0, candidates - choice.chosen);
    const int32_t wanted = choice.chosen + choice.spare;
    select(ranks, candidates, wanted, scratch.histogram);
    if (choice.spare > 0 && choice.chosen > 0) std::nth_element(ranks, ranks + choice.chosen, ranks + wanted, std::greater<>());
    std::sort(ranks + choice.chosen, ranks + wanted, std::greater<>());
    for (int32_t i = 0; i < choice.spare; ++i)
        spare[i] = id_of(ranks[choice.chosen + i]);

    for (int32_t i = 0; i < choice.chosen; ++i)
        chosen[i] = id_of(ranks[i]);
    std::sort(chosen, chosen + choice.chosen);
    for (int32_t i = 0; i < choice.chosen; ++i)
        choice.mass += scratch.gains[chosen[i]];
    choice.mass /= static_cast<float>(route.group);
    return choice;
}

} // namespace skerry
