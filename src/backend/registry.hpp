#pragma once

// Backends that are linked in. The CPU is always there; its kernels live in backends/cpu.

#include <skerry/backend.h>

#include <cstdint>

namespace skerry {

uint32_t cpu_detect();
const skerry_kernels *cpu_kernels(uint32_t features);

} // namespace skerry
