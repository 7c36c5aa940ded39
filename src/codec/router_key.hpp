// SPDX-License-Identifier: MIT
#pragma once

// Router keys of a segment of up to router_segment_tokens tokens of one KV head: what a step scores before it fetches the segment
// (docs/format.md, "Router keys"; scoring is the kernel `route`). Beside them one byte per vector counts its tokens; 0: no such vector.
//
// SKERRY_ROUTE_CENTROIDS: router_centroids means of keys as a key part of SKERRY_FORMAT_R2 with that capacity, coded by the encode
// kernel under one balance per (sequence, layer, KV head), so that the epochs of the keys may die (decisions.md 16).
//
// SKERRY_ROUTE_PROJECTED, 1 to router_centroids vectors of rank d' <= router_rank_limit, one block per set of vectors:
//   codes   d' <= router_byte_rank: int8 words [ceil(d' / 4)][vectors]: byte b of word [line][vector] is component 4 line + b
//           above: int4 words [ceil(d' / 8)][vectors], two's complement: byte b of word [line][vector] has component 8 line + b in its low
//           half and 8 line + 4 + b in its high one; 0 beyond d'
//   scales  f16 [vectors]: a component is code * scale
// padded with zeros to whole words. Both forms lie in 32-bit words whose lanes are vectors, at multiples of 4 bytes.

#include "codec/layout.hpp"

#include <cstddef>
#include <cstdint>

namespace skerry {

inline constexpr int32_t router_centroids = 4;
inline constexpr int32_t router_segment_tokens = 128;
inline constexpr int32_t router_rank_limit = 32;
// Higher ranks in half the bits: products of deep layers need 24 to 32 components, and not that many bits of each (docs/training.md).
inline constexpr int32_t router_byte_rank = 16;

// Largest code; the lowest one of a number of that many bits stands unused, so that codes are symmetric.
constexpr int32_t projected_top(int32_t rank) { return rank > router_byte_rank ? 7 : 127; }

constexpr size_t projected_scale_offset(int32_t rank, int32_t vectors) {
    const int32_t word_components = rank > router_byte_rank ? 8 : 4;
    return static_cast<size_t>((rank + word_components - 1) / word_components) * 4 * static_cast<size_t>(vectors);
}

constexpr size_t projected_block_bytes(int32_t rank, int32_t vectors) {
    return round_up(projected_scale_offset(rank, vectors) + 2 * static_cast<size_t>(vectors), 4);
}

// Keys of one segment, without its counts: `vectors` bytes more.
constexpr size_t router_key_bytes(const skerry_route_params &params) {
    if (params.form == SKERRY_ROUTE_CENTROIDS) return part_bytes(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, params.dim, router_centroids);
    return projected_block_bytes(params.dim, params.vectors) * static_cast<size_t>(params.sets);
}

// k-means of keys, or of projected ones, [tokens][dim], 1 <= tokens <= router_segment_tokens: farthest-point start from the token that is
// farthest from the mean, at most six steps of Lloyd's algorithm (recall.md 7), ties to the lower index. Writes centroids [clusters][dim],
// 1 <= clusters <= router_centroids, and the tokens of each, the present ones first and the rest zeros; returns how many are present: fewer
// than `clusters` when there are fewer distinct keys, or when a cluster lost its tokens. Depends on nothing but the keys: sums run in a
// fixed order.
int32_t make_centroids(const float *keys, int32_t tokens, int32_t dim, float *centroids, uint8_t *counts,
                       int32_t clusters = router_centroids);

// One block from vectors [vectors][rank], finite.
void encode_projected(const float *rows, int32_t rank, int32_t vectors, uint8_t *block);

// out [rank] = weights [rank][dim] times x [dim].
void project(const float *weights, const float *x, int32_t rank, int32_t dim, float *out);

static_assert(part_bytes(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, 64, router_centroids) == 72);
static_assert(projected_block_bytes(16, 4) == 72);
static_assert(projected_block_bytes(16, 1) == 20);
static_assert(projected_block_bytes(32, 4) == projected_block_bytes(16, 4));

} // namespace skerry
