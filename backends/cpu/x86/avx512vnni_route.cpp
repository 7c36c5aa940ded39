// SPDX-License-Identifier: MIT
#include "cpu/route.hpp"

#define SKERRY_ROUTE_VNNI
#include "cpu/x86/route_wide.hpp"

#include "cpu/x86/route_body.hpp"

namespace skerry {

void skerry_cpu_avx512vnni_route(const skerry_route_params *params, const skerry_route_task *task) { route_segments(params, task); }

} // namespace skerry
