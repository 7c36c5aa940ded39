// SPDX-License-Identifier: MIT
#pragma once

#include <skerry/backend.h>

#include <cstdint>

namespace skerry {

// Instruction sets that this build has kernels for and this machine and its operating system run:
// SKERRY_CPU_* bits.
uint32_t cpu_detect();

// The table for a set of features, which must lie within cpu_detect(): the plain C++ version first, then what
// each instruction set does better. 0: the reference alone. A set that needs another one counts only with it.
// Tables live as long as the library.
const skerry_kernels *cpu_kernels(uint32_t features);

} // namespace skerry
