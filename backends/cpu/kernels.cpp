// SPDX-License-Identifier: MIT
#include "cpu/kernels.hpp"

#include "cpu/attend.hpp"
#include "cpu/factorise.hpp"
#include "cpu/ref/ref.hpp"
#include "cpu/route.hpp"
#include "cpu/x86/x86.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// The build defines SKERRY_HAVE_<SET> for each instruction set that it compiles.

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
    table.attend = ref::attend;
    table.attend_scratch_bytes = ref::attend_scratch_bytes;
    table.merge = ref::merge;
    table.factorise = ref::factorise;
    table.factorise_scratch_bytes = ref::factorise_scratch_bytes;
    table.route_supports = ref::route_supports;
    table.route = ref::route;
    table.route_scratch_bytes = ref::route_scratch_bytes;
    return table;
}

constexpr skerry_kernels avx2_table() {
    skerry_kernels table = reference_table();
#if defined(SKERRY_HAVE_AVX2)
    table.name = "cpu avx2";
    table.append = skerry_cpu_avx2_append;
    table.encode = skerry_cpu_avx2_encode;
    table.decode = skerry_cpu_avx2_decode;
    table.attend = skerry_cpu_avx2_attend;
    table.attend_scratch_bytes = skerry_cpu_avx2_attend_scratch;
    table.merge = skerry_cpu_avx2_merge;
    table.factorise = skerry_cpu_avx2_factorise;
    table.route = skerry_cpu_avx2_route;
    table.route_scratch_bytes = skerry_cpu_route_scratch;
#endif
    return table;
}

constexpr skerry_kernels avx512_table() {
    skerry_kernels table = avx2_table();
#if defined(SKERRY_HAVE_AVX512)
    table.name = "cpu avx512";
    table.append = skerry_cpu_avx512_append;
    table.encode = skerry_cpu_avx512_encode;
    table.decode = skerry_cpu_avx512_decode;
    table.attend = skerry_cpu_avx512_attend;
    table.attend_scratch_bytes = skerry_cpu_avx512_attend_scratch;
    table.merge = skerry_cpu_avx512_merge;
    table.factorise = skerry_cpu_avx512_factorise;
    table.route = skerry_cpu_avx512_route;
#endif
    return table;
}

constexpr skerry_kernels avx512vnni_table() {
    skerry_kernels table = avx512_table();
#if defined(SKERRY_HAVE_AVX512VNNI)
    table.name = "cpu avx512-vnni";
    table.attend = skerry_cpu_avx512vnni_attend;
    table.attend_scratch_bytes = skerry_cpu_avx512vnni_attend_scratch;
    table.route = skerry_cpu_avx512vnni_route;
#endif
    return table;
}

constexpr skerry_kernels tables[] = {reference_table(), avx2_table(), avx512_table(), avx512vnni_table()};

// Bit of each table after the reference, in order; a table stands only on all before it.
constexpr uint32_t table_features[] = {SKERRY_CPU_AVX2, SKERRY_CPU_AVX512, SKERRY_CPU_AVX512_VNNI};

constexpr uint32_t built_features = 0u
#if defined(SKERRY_HAVE_AVX2)
                                    | SKERRY_CPU_AVX2
#endif
#if defined(SKERRY_HAVE_AVX512)
                                    | SKERRY_CPU_AVX512
#endif
#if defined(SKERRY_HAVE_AVX512VNNI)
                                    | SKERRY_CPU_AVX512_VNNI
#endif
    ;

#if defined(__x86_64__)

// Which register files the operating system saves (XCR0).
uint32_t saved_registers() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

uint32_t machine_features() {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return 0;
    constexpr uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    constexpr uint32_t wanted = fma | osxsave | avx | f16c;
    if ((c & wanted) != wanted) return 0;
    constexpr uint32_t ymm_state = 0x06, zmm_state = 0xe6;
    const uint32_t saved = saved_registers();
    if ((saved & ymm_state) != ymm_state) return 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return 0;
    constexpr uint32_t avx2 = 1u << 5;
    constexpr uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; // F, DQ, BW, VL
    constexpr uint32_t vnni = 1u << 11;
    if ((b & avx2) == 0) return 0;
    uint32_t features = SKERRY_CPU_AVX2;
    if ((saved & zmm_state) != zmm_state || (b & avx512) != avx512) return features;
    features |= SKERRY_CPU_AVX512;
    if ((c & vnni) != 0) features |= SKERRY_CPU_AVX512_VNNI;
    return features;
}

#else

uint32_t machine_features() { return 0; }

#endif

} // namespace

uint32_t cpu_detect() { return machine_features() & built_features; }

const skerry_kernels *cpu_kernels(uint32_t features) {
    const uint32_t usable = features & built_features;
    size_t level = 0;
    while (level < 3 && (usable & table_features[level]) != 0)
        ++level;
    return &tables[level];
}

} // namespace skerry
