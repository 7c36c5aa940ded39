// SPDX-License-Identifier: MIT
#include "policy/zoom_router.hpp"

#include <algorithm>
#include <bit>
#include <functional>

namespace skerry {

namespace {

constexpr int32_t block = 16; // a constant number of turns lets the compiler use vectors

// exp for x <= 0; 0 from -87 down, -inf included. The relative error is below 1e-6 from -10 on and grows to 6e-6 at -87. Operations that
// round alike everywhere, so that a choice does not depend on the mathematics library: 2^r for |r| <= 1/2 by the polynomial of degree 5
// with p(0) = 1 whose largest error is least, 1e-7.
float fast_exp(float x) {
    if (!(x > -87.0f)) return 0.0f;
    constexpr float to_whole = 0x1.8p23f;
    const float y = x * 0x1.715476p+0f;
    const float shifted = y + to_whole;
    const float r = y - (shifted - to_whole);
    float p = 0x1.5bba14p-10f;
    p = p * r + 0x1.3cea88p-7f;
    p = p * r + 0x1.c6b752p-5f;
    p = p * r + 0x1.ebf9bcp-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1.0f;
    // The low bits of `shifted` are the power, at least -126: added to the exponent they multiply by it.
    return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
}

float sum_of(const float *x, int32_t n) {
    float lane[block] = {};
    int32_t i = 0;
    for (; i + block <= n; i += block) {
        for (int32_t l = 0; l < block; ++l)
            lane[l] += x[i + l];
    }
    for (int32_t l = 0; i < n; ++i, ++l)
        lane[l] += x[i];
    float sum = 0;
    for (const float part : lane)
        sum += part;
    return sum;
}

// gains[s] = sum over heads of score_hs / Z_h.
void add_up_gains(const ZoomRoute &route, float *gains) {
    const int32_t n = route.segments;
    std::fill_n(gains, n, 0.0f);
    for (int32_t h = 0; h < route.group; ++h) {
        const float *const scores = route.scores + h * route.score_stride;
        const float sum = sum_of(scores, n), unit = route.log_unit[h], device = route.device_lse[h];
        const float top = unit > device ? unit : device;
        const float scale = fast_exp(unit - top), share = scale / (fast_exp(device - top) + scale * sum);
        if (!(sum > 0 && share > 0)) continue; // what is no number must not become a gain
        for (int32_t s = 0; s < n; ++s)
            gains[s] += share * scores[s];
    }
}

// Worths are compared as the numbers that their bits are: in order, as no worth is negative but that of what cannot be chosen.
constexpr int32_t barred = std::bit_cast<int32_t>(-1.0f);

int32_t select(int32_t mask, int32_t set, int32_t clear) { return (set & mask) | (clear & ~mask); }

// Gains times their factors; returns how many segments can be chosen. With masks: behind a branch, operations that could trap keep a loop
// from using vectors.
int32_t find_worths(const ZoomRoute &route, const float *gains, int32_t *worths) {
    const float hysteresis = static_cast<float>(route.hysteresis_ppm) / static_cast<float>(zoom_one);
    const int32_t resident = std::bit_cast<int32_t>(static_cast<float>(route.resident_ppm) / static_cast<float>(zoom_one));
    constexpr int32_t one = std::bit_cast<int32_t>(1.0f);
    static_assert(static_cast<int>(ZoomPlace::barred) == 0 && static_cast<int>(ZoomPlace::resident) == 2);
    const ZoomPlace *const places = route.places;
    const int32_t n = route.segments;
    int32_t count = 0;
    for (int32_t s = 0; s < n; ++s) {
        const int32_t place = static_cast<int32_t>(places[s]), is_barred = (place - 1) >> 31, is_resident = -(place >> 1);
        const float worth = gains[s] * std::bit_cast<float>(select(is_resident, resident, one));
        worths[s] = select(is_barred, barred, std::bit_cast<int32_t>(worth));
        count += 1 + is_barred;
    }
    for (int32_t i = 0; i < route.previous_count; ++i) {
        const int32_t s = route.previous[i];
        if (s < n && worths[s] >= 0) worths[s] = std::bit_cast<int32_t>(std::bit_cast<float>(worths[s]) * hysteresis);
    }
    return count;
}

// Thirty-two buckets for each factor of two below the largest; the last one has the rest, and what is barred.
constexpr int bucket_shift = 18;
constexpr uint32_t buckets = 1024;

// The last of the `wanted` best segments, of more than that many: the order is by worth, among equals by id. A histogram leaves few to
// compare.
int32_t find_last(const int32_t *worths, int32_t n, int32_t wanted, int32_t *histogram, int32_t *rivals) {
    int32_t largest = 0;
    for (int32_t s = 0; s < n; ++s)
        largest = worths[s] > largest ? worths[s] : largest;
    // From the largest down, as numbers without a sign: what is barred comes last.
    const auto depth_of = [top = static_cast<uint32_t>(largest)](int32_t worth) { return top - static_cast<uint32_t>(worth); };
    std::fill_n(histogram, buckets, 0);
    for (int32_t s = 0; s < n; ++s) {
        const uint32_t bucket = depth_of(worths[s]) >> bucket_shift;
        ++histogram[bucket < buckets ? bucket : buckets - 1];
    }
    uint32_t bucket = 0;
    for (; histogram[bucket] < wanted; ++bucket)
        wanted -= histogram[bucket];
    const uint32_t begin = bucket << bucket_shift, size = bucket + 1 < buckets ? 1u << bucket_shift : UINT32_MAX - begin;
    int32_t count = 0;
    for (int32_t s = 0; s < n; ++s) {
        rivals[count] = s;
        count += depth_of(worths[s]) - begin < size ? 1 : 0;
    }
    std::nth_element(rivals, rivals + wanted - 1, rivals + count,
                     [worths](int32_t a, int32_t b) { return worths[a] != worths[b] ? worths[a] > worths[b] : a < b; });
    return rivals[wanted - 1];
}

struct Scratch {
    float *gains;       // [segments]
    int32_t *worths;    // [segments]
    int32_t *rivals;    // [segments]
    int32_t *histogram; // [buckets]
};

Scratch carve(void *memory, int32_t segments) {
    Scratch scratch;
    scratch.gains = static_cast<float *>(memory);
    scratch.worths = reinterpret_cast<int32_t *>(scratch.gains + segments);
    scratch.rivals = scratch.worths + segments;
    scratch.histogram = scratch.rivals + segments;
    return scratch;
}

} // namespace

size_t zoom_scratch_bytes(int32_t segments) {
    const size_t numbers = 3 * static_cast<size_t>(segments);
    return (numbers + numbers % 2 + buckets) * sizeof(int32_t);
}

ZoomChoice route_zoom(const ZoomRoute &route, int32_t *chosen, void *memory) {
    const Scratch scratch = carve(memory, route.segments);
    const int32_t n = route.segments;
    const int32_t *const worths = scratch.worths;
    add_up_gains(route, scratch.gains);
    const int32_t candidates = find_worths(route, scratch.gains, scratch.worths);
    ZoomChoice choice;
    const int32_t wanted = std::clamp(route.slots, 0, candidates);
    if (wanted == 0) return choice;
    int32_t last = n - 1, least = 0; // all candidates
    if (wanted < candidates) {
        last = find_last(worths, n, wanted, scratch.histogram, scratch.rivals);
        least = worths[last];
    }
    for (int32_t s = 0; s <= last; ++s) {
        chosen[choice.chosen] = s;
        choice.chosen += worths[s] >= least ? 1 : 0;
        if (choice.chosen == wanted) break;
    }
    for (int32_t s = last + 1; choice.chosen < wanted; ++s) {
        chosen[choice.chosen] = s;
        choice.chosen += worths[s] > least ? 1 : 0;
    }
    for (int32_t i = 0; i < choice.chosen; ++i)
        choice.mass += scratch.gains[chosen[i]];
    choice.mass /= static_cast<float>(route.group);
    return choice;
}

} // namespace skerry
