// SPDX-License-Identifier: MIT
#pragma once

// The plain C++ version of every kernel: the meaning of the table in <skerry/backend.h>.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry::ref {

int32_t supports(skerry_format format, skerry_side side, int32_t dim);
void append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count, const float *rows,
            int64_t row_stride, void *part);
void encode(const skerry_code_params *params, const float *rows, void *part, void *scratch);
void decode(const skerry_code_params *params, const void *part, float *rows, void *scratch);
size_t code_scratch_bytes(int32_t dim, int32_t capacity);
void attend(const skerry_attend_params *params, const skerry_attend_task *task);
size_t attend_scratch_bytes(const skerry_attend_params *params, int32_t rows, int32_t tiles);
void merge(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride, const float *max,
           const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse);

int32_t route_supports(const skerry_route_params *params);
void route(const skerry_route_params *params, const skerry_route_task *task);
size_t route_scratch_bytes(const skerry_route_params *params);
void decode_lowrank(const skerry_code_params *params, const void *part, float *rows);
void factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result, void *scratch);
size_t factorise_scratch_bytes(int32_t dim, int32_t count);

// Keys of C formats lose their rotary embedding before they are coded, so that a channel is smooth over the tokens of its grid:
// `rows` itself where there is nothing to undo, else a copy in `scratch`. And back, in place.
const float *channel_rows(const skerry_code_params *params, const float *rows, float *scratch);
void rotate_channel_rows(const skerry_code_params *params, float *rows, float *scratch);

} // namespace skerry::ref
