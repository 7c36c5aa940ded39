// SPDX-License-Identifier: MIT
#pragma once

// Queries as the integer dot products of route read them. They are made by code for the baseline instruction set, so that all levels
// get the same integers, and so the same dot products.
//
// A query is rounded to whole numbers under one step. CENTROIDS: R(q / balance) as signed bytes, for every chunk of four lines of 16
// channels and every bit field of their bytes one register in which the four bytes of a line repeat for the four centroids. A byte shifts
// a logit by 0.6 % of the spread of logits (docs/determinism.md), a fiftieth of what the two bits of the centroids do: of the best 6 % of
// 2,048 segments of normal keys 0.8 % change places with others, and 2e-5 of their mass is lost. A second byte would double the time.
// PROJECTED: 16-bit numbers, four per line.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

struct RouteQueries {
    const int8_t *bytes;  // CENTROIDS: [group][chunks][4 fields][64]
    const int16_t *words; // PROJECTED: [group][8 lines][4]
    const float *step;    // [group]: of the whole numbers, times scale
    const float *centre;  // [group]: CENTROIDS: what the centre of the levels takes off a dot product of codes, before `step`
    const float *mean;    // [group]: CENTROIDS: q . mean times scale
    int32_t chunks;
};

RouteQueries skerry_cpu_route_queries(const skerry_route_params *params, const skerry_route_task *task);

} // namespace skerry
