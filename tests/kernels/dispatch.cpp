#include "code_case.hpp"

#include "cpu/ref/ref.hpp"

using namespace code_case;

TEST_CASE("dispatch: without features the table is the reference") {
    const skerry_kernels *const table = cpu_kernels(0);
    CHECK((table->append == ref::append));
    CHECK((table->encode == ref::encode));
    CHECK((table->decode == ref::decode));
    CHECK((table->supports == ref::supports));
    CHECK((table->struct_size == sizeof(skerry_kernels)));
    CHECK((table->interface_major == SKERRY_BACKEND_MAJOR));
}

TEST_CASE("dispatch: the reference offers every kernel") {
    const skerry_kernels *const table = cpu_kernels(0);
    CHECK((table->attend != nullptr));
    CHECK((table->attend_scratch_bytes != nullptr));
    CHECK((table->merge != nullptr));
    CHECK((table->code_scratch_bytes != nullptr));
}

TEST_CASE("dispatch: no level drops a kernel") {
    for (const skerry_kernels *table : levels()) {
        CHECK((table->append != nullptr));
        CHECK((table->encode != nullptr));
        CHECK((table->decode != nullptr));
        CHECK((table->attend != nullptr));
        CHECK((table->attend_scratch_bytes != nullptr));
        CHECK((table->merge != nullptr));
        CHECK((table->supports != nullptr));
    }
    CHECK(cpu_kernels(~0u)->name != nullptr);
}

TEST_CASE("dispatch: a set without those it stands on does not count") {
    CHECK(cpu_kernels(SKERRY_CPU_AVX512) == cpu_kernels(0));
    CHECK(cpu_kernels(SKERRY_CPU_AVX512_VNNI) == cpu_kernels(0));
    CHECK(cpu_kernels(SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512_VNNI) == cpu_kernels(SKERRY_CPU_AVX2));
}

TEST_CASE("dispatch: bits that are no instruction set change nothing") { CHECK(cpu_kernels(0x80000000u) == cpu_kernels(0)); }

#if defined(SKERRY_TEST_X86)

TEST_CASE("dispatch: what the machine has is detected") {
    // The compiler's run time asks the processor and the operating system on its own.
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    CHECK(((cpu_detect() & SKERRY_CPU_AVX2) != 0) == has_avx2);
    CHECK(((cpu_detect() & SKERRY_CPU_AVX512) != 0) == has_avx512);
}

TEST_CASE("dispatch: on a machine with AVX2 the fast kernels run") {
    __builtin_cpu_init();
    const skerry_kernels *const plain = cpu_kernels(0), *const fast = cpu_kernels(cpu_detect());
    const bool has_avx2 = __builtin_cpu_supports("avx2");
    CHECK((fast->append != plain->append) == has_avx2);
    CHECK((fast->encode != plain->encode) == has_avx2);
    CHECK((fast->decode != plain->decode) == has_avx2);
    CHECK((fast->attend != plain->attend) == has_avx2);
    CHECK((fast->merge != plain->merge) == has_avx2);
}

TEST_CASE("dispatch: AVX-512 overwrites what AVX2 brought") {
    if ((cpu_detect() & SKERRY_CPU_AVX512) != 0) {
        const skerry_kernels *const low = cpu_kernels(SKERRY_CPU_AVX2), *const high = cpu_kernels(SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512);
        CHECK((low->append != high->append));
        CHECK((low->encode != high->encode));
        CHECK((low->decode != high->decode));
    } else {
        CHECK(cpu_kernels(cpu_detect()) == cpu_kernels(cpu_detect() & SKERRY_CPU_AVX2));
    }
}

#endif

TEST_CASE("dispatch: supports follows the rotation") {
    for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
        for (const skerry_format format : {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3, SKERRY_FORMAT_R4}) {
            for (int32_t dim = 1; dim <= 256; ++dim)
                CHECK(ref::supports(format, side, dim) == (dim % 2 == 0 ? 1 : 0));
        }
        for (const skerry_format format :
             {SKERRY_FORMAT_F32, SKERRY_FORMAT_F16, SKERRY_FORMAT_BF16, SKERRY_FORMAT_R8, SKERRY_FORMAT_C2, SKERRY_FORMAT_C4}) {
            for (int32_t dim = 1; dim <= 256; ++dim)
                CHECK(ref::supports(format, side, dim) == 1);
            CHECK(ref::supports(format, side, 0) == 0);
        }
        for (const skerry_format format : {0, 4, 7, 12, 15, 18, -1})
            CHECK(ref::supports(format, side, 64) == 0);
    }
    CHECK(ref::supports(SKERRY_FORMAT_R2, 2, 64) == 0);
}
