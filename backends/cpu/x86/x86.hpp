// SPDX-License-Identifier: MIT
#pragma once

// Entry points of the x86 instruction sets. Files that define them hold intrinsics and functions with
// internal linkage only: a shared inline function compiled there could be the copy that the linker keeps for
// machines without the instruction set.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

void skerry_cpu_avx2_append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count,
                            const float *rows, int64_t row_stride, void *part);
void skerry_cpu_avx2_encode(const skerry_code_params *params, const float *rows, void *part, void *scratch);
void skerry_cpu_avx2_decode(const skerry_code_params *params, const void *part, float *rows, void *scratch);
// L formats; dim is a multiple of 16.
void skerry_cpu_avx2_decode_lowrank(const skerry_code_params *params, const void *part, float *rows, void *scratch);

void skerry_cpu_avx512_append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count,
                              const float *rows, int64_t row_stride, void *part);
void skerry_cpu_avx512_encode(const skerry_code_params *params, const float *rows, void *part, void *scratch);
void skerry_cpu_avx512_decode(const skerry_code_params *params, const void *part, float *rows, void *scratch);
// L formats; dim is a multiple of 16.
void skerry_cpu_avx512_decode_lowrank(const skerry_code_params *params, const void *part, float *rows, void *scratch);

} // namespace skerry
