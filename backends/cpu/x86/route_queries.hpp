// SPDX-License-Identifier: MIT
#pragma once

// Queries as the integer dot products of route read them. They are made by code for the baseline instruction set, so that all levels
// get the same integers, and so the same dot products.
//
// A query is rounded to whole numbers under one step. CENTROIDS: R(q / balance) as signed bytes. A byte shifts a logit by 0.6 % of the
// spread of logits (docs/determinism.md), a fiftieth of what the two bits of the centroids do: of the best 6 % of 2,048 segments of normal
// keys 0.8 % change places with others, and 2e-5 of their mass is lost. A second byte would double the time.
// PROJECTED: 16-bit numbers.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

// Query heads whose sums the registers of one pass over the codes hold.
inline constexpr int32_t route_heads = 4;

struct RouteQueries {
    // CENTROIDS: for every route_heads heads, the last ones perhaps fewer, [quads][heads][4]: what multiplies the four bytes of a word
    // under one bit field; quads of line l are 4 l to 4 l + 3, head_bytes per head, zeros beyond dim.
    const int8_t *bytes;
    ptrdiff_t head_bytes;
    const int16_t *words;  // PROJECTED: [group][4 lines][fields][2], for the two fields of a 32-bit lane; fields: 2 of int8, 4 of int4
    const float *step;     // [group]: of a sum of products, times scale, in logits to base 2 where there is no softcap
    const int32_t *centre; // [group]: CENTROIDS: what the centre of the levels adds to twice a sum of products
    const float *mean;     // [group]: CENTROIDS: q . mean times scale
};

RouteQueries skerry_cpu_route_queries(const skerry_route_params *params, const skerry_route_task *task);

} // namespace skerry
