// SPDX-License-Identifier: MIT
#include "codec/router_key.hpp"

#include "base/half.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace skerry {

namespace {

constexpr int32_t lloyd_steps = 6;
// Partial sums of a dot product: enough to keep vector units busy, the same on every machine.
constexpr int32_t lanes = 8;

// Adds up a fixed tree of the lanes.
float total(const float (&part)[lanes]) {
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

float distance(const float *a, const float *b, int32_t dim) {
    float part[lanes] = {};
    int32_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
        for (int32_t l = 0; l < lanes; ++l) {
            const float difference = a[i + l] - b[i + l];
            part[l] += difference * difference;
        }
    }
    for (int32_t l = 0; i < dim; ++i, ++l) {
        const float difference = a[i] - b[i];
        part[l] += difference * difference;
    }
    return total(part);
}

float dot(const float *a, const float *b, int32_t dim) {
    float part[lanes] = {};
    int32_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
        for (int32_t l = 0; l < lanes; ++l)
            part[l] += a[i + l] * b[i + l];
    }
    for (int32_t l = 0; i < dim; ++i, ++l)
        part[l] += a[i] * b[i];
    return total(part);
}

void add(float *sum, const float *row, int32_t dim) {
    for (int32_t i = 0; i < dim; ++i)
        sum[i] += row[i];
}

void divide(float *row, int32_t by, int32_t dim) {
    const float inverse = 1.0f / static_cast<float>(by);
    for (int32_t i = 0; i < dim; ++i)
        row[i] *= inverse;
}

struct Clusters {
    const float *keys;
    float *centroids;
    int32_t tokens, dim, most;
    int32_t seeds = 0;
    int32_t counts[router_centroids] = {};
    uint8_t of[router_segment_tokens] = {};

    const float *key(int32_t token) const { return keys + static_cast<ptrdiff_t>(token) * dim; }
    float *centroid(int32_t cluster) const { return centroids + static_cast<ptrdiff_t>(cluster) * dim; }
};

void choose_seeds(Clusters &c) {
    // The mean stands in the first centroid's place until that is known.
    float *const mean = c.centroid(0);
    std::fill_n(mean, c.dim, 0.0f);
    for (int32_t t = 0; t < c.tokens; ++t)
        add(mean, c.key(t), c.dim);
    divide(mean, c.tokens, c.dim);
    float nearest[router_segment_tokens]; // squared distance from the mean, then from the nearest seed
    for (int32_t t = 0; t < c.tokens; ++t)
        nearest[t] = distance(c.key(t), mean, c.dim);
    while (c.seeds < c.most) {
        const int32_t farthest = static_cast<int32_t>(std::max_element(nearest, nearest + c.tokens) - nearest);
        if (c.seeds > 0 && !(nearest[farthest] > 0)) break;
        std::copy_n(c.key(farthest), c.dim, c.centroid(c.seeds));
        for (int32_t t = 0; t < c.tokens; ++t) {
            const float apart = distance(c.key(t), c.centroid(c.seeds), c.dim);
            nearest[t] = c.seeds == 0 ? apart : std::min(nearest[t], apart);
        }
        ++c.seeds;
    }
}

// False when no token changed its cluster: further steps would change nothing either.
bool assign(Clusters &c, bool is_first) {
    bool is_changed = is_first;
    std::fill_n(c.counts, router_centroids, 0);
    for (int32_t t = 0; t < c.tokens; ++t) {
        int32_t best = 0;
        float least = distance(c.key(t), c.centroid(0), c.dim);
        for (int32_t k = 1; k < c.seeds; ++k) {
            const float apart = distance(c.key(t), c.centroid(k), c.dim);
            if (apart < least) {
                least = apart;
                best = k;
            }
        }
        is_changed |= c.of[t] != best;
        c.of[t] = static_cast<uint8_t>(best);
        c.counts[best] += 1;
    }
    return is_changed;
}

// Means of the clusters; those that lost all tokens go, the rest keep their order.
void update(Clusters &c) {
    int32_t to[router_centroids], kept = 0;
    for (int32_t k = 0; k < c.seeds; ++k) {
        to[k] = kept;
        if (c.counts[k] == 0) continue;
        c.counts[kept] = c.counts[k];
        std::fill_n(c.centroid(kept), c.dim, 0.0f);
        ++kept;
    }
    c.seeds = kept;
    for (int32_t t = 0; t < c.tokens; ++t) {
        c.of[t] = static_cast<uint8_t>(to[c.of[t]]);
        add(c.centroid(c.of[t]), c.key(t), c.dim);
    }
    for (int32_t k = 0; k < kept; ++k)
        divide(c.centroid(k), c.counts[k], c.dim);
}

} // namespace

int32_t make_centroids(const float *keys, int32_t tokens, int32_t dim, float *centroids, uint8_t *counts, int32_t clusters) {
    Clusters c = {};
    c.keys = keys;
    c.centroids = centroids;
    c.tokens = tokens;
    c.dim = dim;
    c.most = clusters;
    choose_seeds(c);
    for (int32_t step = 0; step < lloyd_steps; ++step) {
        if (!assign(c, step == 0)) break;
        update(c);
    }
    for (int32_t k = 0; k < clusters; ++k) {
        counts[k] = static_cast<uint8_t>(k < c.seeds ? c.counts[k] : 0);
        if (k >= c.seeds) std::fill_n(c.centroid(k), dim, 0.0f);
    }
    return c.seeds;
}

void encode_projected(const float *rows, int32_t rank, int32_t vectors, uint8_t *block) {
    const float top = static_cast<float>(projected_top(rank));
    std::memset(block, 0, projected_block_bytes(rank, vectors));
    uint8_t *const scales = block + projected_scale_offset(rank, vectors);
    for (int32_t c = 0; c < vectors; ++c) {
        const float *const row = rows + static_cast<ptrdiff_t>(c) * rank;
        float largest = 0;
        for (int32_t i = 0; i < rank; ++i)
            largest = std::max(largest, std::fabs(row[i]));
        const uint16_t half = f32_to_f16(std::min(largest / top, 65504.0f));
        std::memcpy(scales + 2 * c, &half, 2);
        // Codes are chosen under the scale as it is stored; 0 when the row is too small for any.
        const float scale = f16_to_f32(half), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        for (int32_t i = 0; i < rank; ++i) {
            const float code = std::clamp(std::nearbyint(row[i] * inverse), -top, top);
            const uint8_t bits = static_cast<uint8_t>(static_cast<int8_t>(code));
            if (rank > router_byte_rank) {
                uint8_t &pair = block[4 * (i / 8 * vectors + c) + i % 4];
                pair = static_cast<uint8_t>(pair | (i % 8 < 4 ? bits & 15 : bits << 4));
            } else {
                block[4 * (i / 4 * vectors + c) + i % 4] = bits;
            }
        }
    }
}

void project(const float *weights, const float *x, int32_t rank, int32_t dim, float *out) {
    for (int32_t r = 0; r < rank; ++r)
        out[r] = dot(weights + static_cast<ptrdiff_t>(r) * dim, x, dim);
}

} // namespace skerry
