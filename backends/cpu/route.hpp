// SPDX-License-Identifier: MIT
#pragma once

// Routing scores per instruction set, for the table in kernels.cpp. The plain version is in ref/ref.hpp.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

// Queries that are made ready for integer dot products, the same for all instruction sets.
size_t skerry_cpu_route_scratch(const skerry_route_params *params);

void skerry_cpu_avx2_route(const skerry_route_params *params, const skerry_route_task *task);
void skerry_cpu_avx512_route(const skerry_route_params *params, const skerry_route_task *task);
void skerry_cpu_avx512vnni_route(const skerry_route_params *params, const skerry_route_task *task);

} // namespace skerry
