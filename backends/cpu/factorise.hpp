// SPDX-License-Identifier: MIT
#pragma once

// Factorisation per instruction set, for the table in kernels.cpp; the plain version is in ref/ref.hpp. All share one scratch size and
// store the same bytes.

#include <skerry/backend.h>

namespace skerry {

void skerry_cpu_avx2_factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result,
                               void *scratch);
void skerry_cpu_avx512_factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result,
                                 void *scratch);

} // namespace skerry
