// SPDX-License-Identifier: MIT
#pragma once

// Attend and merge per instruction set, for the table in kernels.cpp. The plain version is in ref/ref.hpp. All versions of one
// instruction set share one scratch size.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

void skerry_cpu_avx2_attend(const skerry_attend_params *params, const skerry_attend_task *task);
size_t skerry_cpu_avx2_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t tiles);
void skerry_cpu_avx2_merge(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride,
                           const float *max, const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse);

void skerry_cpu_avx512_attend(const skerry_attend_params *params, const skerry_attend_task *task);
size_t skerry_cpu_avx512_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t tiles);
void skerry_cpu_avx512_merge(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride,
                             const float *max, const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse);

// Integer dot products for R formats unless `exact` is set; everything else as avx512. Its scratch is its own.
void skerry_cpu_avx512vnni_attend(const skerry_attend_params *params, const skerry_attend_task *task);
size_t skerry_cpu_avx512vnni_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t tiles);

} // namespace skerry
