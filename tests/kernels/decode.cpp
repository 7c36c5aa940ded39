#include "code_case.hpp"

using namespace code_case;

namespace {

template <class T>
void same_as_reference(const Setting &setting, const uint8_t *part) {
    const Guarded expected = decode(cpu_kernels(0), setting, part);
    for (const skerry_kernels *kernels : levels()) {
        const std::string what = describe(kernels, setting);
        CAPTURE(what);
        REQUIRE(decode(kernels, setting, part) == expected);
    }
}

} // namespace

TEST_CASE_TEMPLATE("decode: every level gives the rows of the reference", T, SKERRY_TEST_R_PARTS, SKERRY_TEST_FULL_PARTS) {
    for (const int32_t dim : dims) {
        if (cpu_kernels(0)->supports(T::format, T::side, dim) == 0) continue;
        const std::vector<float> rows = normals(static_cast<uint64_t>(dim) + 900, 16 * static_cast<size_t>(dim));
        for (int32_t capacity = 1; capacity <= 16; ++capacity) {
            for (const int32_t count : {1, (capacity + 1) / 2, capacity}) {
                const Setting setting(T::format, T::side, dim, capacity, count);
                const Guarded part = encode(cpu_kernels(0), setting, rows.data());
                same_as_reference<T>(setting, part.data());
            }
        }
    }
}

TEST_CASE_TEMPLATE("decode: every level gives the rows of the reference, C formats", T, SKERRY_TEST_C_PARTS) {
    for (const int32_t dim : {1, 10, 64, 100}) {
        const std::vector<float> rows = normals(static_cast<uint64_t>(dim) + 900, 128 * static_cast<size_t>(dim));
        for (const int32_t capacity : {1, 3, 8, 17, 64, 128}) {
            const Setting setting(T::format, T::side, dim, capacity, capacity);
            const Guarded part = encode(cpu_kernels(0), setting, rows.data());
            same_as_reference<T>(setting, part.data());
        }
    }
}

TEST_CASE_TEMPLATE("decode: any bytes decode alike on every level", T, SKERRY_TEST_R_PARTS) {
    Numbers numbers(31);
    for (const int32_t dim : {2, 16, 64, 80, 96, 128, 192, 256}) {
        for (const int32_t capacity : {1, 7, 16}) {
            const Setting setting(T::format, T::side, dim, capacity, capacity);
            std::vector<uint8_t> part(setting.bytes());
            for (uint8_t &byte : part)
                byte = static_cast<uint8_t>(numbers.bits());
            const size_t scales = r_scale_offset(T::format, T::side, dim, capacity);
            for (size_t t = 0; t < static_cast<size_t>(capacity); ++t)
                part[scales + 2 * t + 1] &= 0x3f; // finite, positive
            same_as_reference<T>(setting, part.data());
        }
    }
}

TEST_CASE_TEMPLATE("decode: reads nothing behind the part", T, SKERRY_TEST_R_PARTS, SKERRY_TEST_FULL_PARTS) {
    // A part at the very end of an allocation; the sanitizer build is what sees a read too far.
    for (const int32_t dim : {1, 10, 16, 80, 96, 128}) {
        if (cpu_kernels(0)->supports(T::format, T::side, dim) == 0) continue;
        for (const int32_t capacity : {1, 3, 16}) {
            const Setting setting(T::format, T::side, dim, capacity, capacity);
            const std::vector<float> rows = normals(8, setting.elements());
            const Guarded made = encode(cpu_kernels(0), setting, rows.data());
            const std::vector<uint8_t> part(made.data(), made.data() + made.size());
            same_as_reference<T>(setting, part.data());
        }
    }
}

TEST_CASE_TEMPLATE("decode: full formats return what was stored", T, SKERRY_TEST_FULL_PARTS) {
    const Setting setting(T::format, T::side, 80, 16, 16);
    const std::vector<float> rows = normals(13, setting.elements());
    const Guarded part = encode(cpu_kernels(0), setting, rows.data());
    Guarded decoded = decode(cpu_kernels(0), setting, part.data());
    const double bound = T::format == SKERRY_FORMAT_F32 ? 0.0 : T::format == SKERRY_FORMAT_F16 ? 0x1p-11 : 0x1p-8;
    for (size_t i = 0; i < rows.size(); ++i)
        REQUIRE(std::abs(rows[i] - decoded.floats()[i]) <= bound * std::abs(rows[i]));
}
