// SPDX-License-Identifier: MIT
#include "cpu/kernels.hpp"

#include "cpu/ref/ref.hpp"

#if defined(SKERRY_CPU_X86)
#include "cpu/x86/x86.hpp"

#include <cpuid.h>
#endif

namespace skerry {

namespace {

constexpr skerry_kernels reference_table() {
    skerry_kernels table{};
    table.struct_size = sizeof(skerry_kernels);
    table.interface_major = SKERRY_BACKEND_MAJOR;
    table.interface_minor = SKERRY_BACKEND_MINOR;
    table.name = "cpu reference";
    table.supports = ref::supports;
    table.append = ref::append;
    table.encode = ref::encode;
    table.decode = ref::decode;
    table.code_scratch_bytes = ref::code_scratch_bytes;
#if defined(SKERRY_CPU_ATTEND)
    table.attend = ref::attend;
    table.attend_scratch_bytes = ref::attend_scratch_bytes;
    table.merge = ref::merge;
#endif
    return table;
}

constexpr skerry_kernels reference = reference_table();

} // namespace

uint32_t cpu_detect() { return 0; }

const skerry_kernels *cpu_kernels(uint32_t) { return &reference; }

} // namespace skerry
