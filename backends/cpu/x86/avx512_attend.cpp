// SPDX-License-Identifier: MIT
#include "cpu/attend.hpp"
#include "cpu/x86/avx512_vec.hpp"

#include "cpu/x86/attend_engine.hpp"

namespace skerry {

void skerry_cpu_avx512_attend(const skerry_attend_params *params, const skerry_attend_task *task) { engine_attend(params, task); }

size_t skerry_cpu_avx512_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t) { return engine_scratch(params, rows); }

} // namespace skerry
