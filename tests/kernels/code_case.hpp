#pragma once
// What the tests of append, encode and decode share: levels of the CPU backend, numbers, guarded buffers and
// parameters.

#include "codec/layout.hpp"
#include "cpu/kernels.hpp"

#include <skerry/device.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <vector>

namespace code_case {

using namespace skerry;

inline constexpr int32_t dims[] = {1, 2, 3, 8, 10, 16, 17, 40, 64, 80, 96, 100, 128, 192, 256};

// Tables of this machine above the reference, lowest first.
inline std::vector<const skerry_kernels *> levels() {
    std::vector<const skerry_kernels *> found;
    const uint32_t here = cpu_detect();
    for (const uint32_t mask : {uint32_t(SKERRY_CPU_AVX2), uint32_t(SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512), ~0u}) {
        const skerry_kernels *table = cpu_kernels(mask & here);
        bool is_new = table != cpu_kernels(0);
        for (const skerry_kernels *other : found)
            is_new = is_new && other != table;
        if (is_new) found.push_back(table);
    }
    return found;
}

// Integer arithmetic only, so that every machine gets the same numbers.
class Numbers {
public:
    explicit Numbers(uint64_t seed) : state_(seed * 2 + 1) {}
    uint32_t bits() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        uint64_t mixed = state_ ^ (state_ >> 33);
        mixed *= 0xff51afd7ed558ccdu;
        return static_cast<uint32_t>(mixed >> 32);
    }
    // Uniform in [-1, 1).
    float uniform() { return static_cast<float>(static_cast<int32_t>(bits()) >> 8) * 0x1p-23f; }
    // Twelve uniforms: near to normal, variance 1, exact in f32 up to the last division.
    float normal() {
        int64_t sum = 0;
        for (int i = 0; i < 12; ++i)
            sum += static_cast<int32_t>(bits()) >> 8;
        return static_cast<float>(sum >> 4) * (0x1p-19f / 2.0f);
    }

private:
    uint64_t state_;
};

inline std::vector<float> normals(uint64_t seed, size_t count, float size = 1.0f) {
    Numbers numbers(seed);
    std::vector<float> made(count);
    for (float &number : made)
        number = numbers.normal() * size;
    return made;
}

// Bytes with known ones around them.
class Guarded {
public:
    explicit Guarded(size_t bytes, uint8_t fill = 0xa5) : bytes_(bytes), memory_(bytes + 2 * guard, fill), fill_(fill) {}
    uint8_t *data() { return memory_.data() + guard; }
    const uint8_t *data() const { return memory_.data() + guard; }
    size_t size() const { return bytes_; }
    float *floats() { return reinterpret_cast<float *>(data()); }
    bool intact() const {
        for (size_t i = 0; i < guard; ++i) {
            if (memory_[i] != fill_ || memory_[guard + bytes_ + i] != fill_) return false;
        }
        return true;
    }
    bool operator==(const Guarded &other) const { return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0; }

private:
    static constexpr size_t guard = 64;
    size_t bytes_;
    std::vector<uint8_t> memory_;
    uint8_t fill_;
};

// Parameters with the epoch they point at.
struct Setting {
    std::vector<float> mean, balance;
    skerry_epoch epoch{};
    skerry_code_params params{};

    Setting(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t count) {
        Numbers numbers(static_cast<uint64_t>(dim));
        for (int32_t c = 0; c < dim; ++c) {
            mean.push_back(0.5f * numbers.normal());
            balance.push_back(std::exp2(static_cast<float>(static_cast<int32_t>(numbers.bits() % 65) - 32) / 16.0f));
        }
        epoch = {mean.data(), balance.data(), 0.25f, 8.0f};
        params.epoch = &epoch;
        params.attention_factor = 1.0f;
        params.dim = dim;
        params.capacity = capacity;
        params.count = count;
        params.grid_dtype = SKERRY_DTYPE_F16;
        params.format = format;
        params.side = side;
    }
    Setting(const Setting &) = delete;
    Setting &operator=(const Setting &) = delete;

    size_t bytes() const { return part_bytes(params.format, params.side, params.dim, params.capacity, params.value_group); }
    size_t row_bytes() const { return sizeof(float) * static_cast<size_t>(params.count) * static_cast<size_t>(params.dim); }
    size_t elements() const { return static_cast<size_t>(params.count) * static_cast<size_t>(params.dim); }
};

// Encodes into a part between guards, with scratch of exactly the size that is asked for. Fails when anything
// else was written.
inline Guarded encode(const skerry_kernels *kernels, const Setting &setting, const float *rows, uint8_t fill = 0xa5) {
    Guarded part(setting.bytes(), fill), scratch(kernels->code_scratch_bytes(setting.params.dim, setting.params.capacity), 0x77);
    kernels->encode(&setting.params, rows, part.data(), scratch.data());
    CHECK(part.intact());
    CHECK(scratch.intact());
    return part;
}

inline Guarded decode(const skerry_kernels *kernels, const Setting &setting, const uint8_t *part) {
    Guarded rows(setting.row_bytes(), 0x5a), scratch(kernels->code_scratch_bytes(setting.params.dim, setting.params.capacity), 0x77);
    kernels->decode(&setting.params, part, rows.floats(), scratch.data());
    CHECK(rows.intact());
    CHECK(scratch.intact());
    return rows;
}

inline double relative_error(const float *x, const float *decoded, size_t count) {
    double error = 0, size = 0;
    for (size_t i = 0; i < count; ++i) {
        error += (double(x[i]) - decoded[i]) * (double(x[i]) - decoded[i]);
        size += double(x[i]) * x[i];
    }
    return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

inline std::string describe(const skerry_kernels *kernels, const Setting &setting) {
    const skerry_code_params &params = setting.params;
    return std::string(kernels->name) + " format " + std::to_string(params.format) + " side " + std::to_string(params.side) + " dim " +
           std::to_string(params.dim) + " capacity " + std::to_string(params.capacity) + " count " + std::to_string(params.count);
}

// A format and a side as a type, so that each pair is a case of its own.
template <int32_t Format, int32_t Side>
struct Of {
    static constexpr skerry_format format = Format;
    static constexpr skerry_side side = Side;
};
using R2Keys = Of<SKERRY_FORMAT_R2, SKERRY_SIDE_KEY>;
using R3Keys = Of<SKERRY_FORMAT_R3, SKERRY_SIDE_KEY>;
using R4Keys = Of<SKERRY_FORMAT_R4, SKERRY_SIDE_KEY>;
using R8Keys = Of<SKERRY_FORMAT_R8, SKERRY_SIDE_KEY>;
using R2Values = Of<SKERRY_FORMAT_R2, SKERRY_SIDE_VALUE>;
using R3Values = Of<SKERRY_FORMAT_R3, SKERRY_SIDE_VALUE>;
using R4Values = Of<SKERRY_FORMAT_R4, SKERRY_SIDE_VALUE>;
using R8Values = Of<SKERRY_FORMAT_R8, SKERRY_SIDE_VALUE>;
using C2Keys = Of<SKERRY_FORMAT_C2, SKERRY_SIDE_KEY>;
using C4Keys = Of<SKERRY_FORMAT_C4, SKERRY_SIDE_KEY>;
using C2Values = Of<SKERRY_FORMAT_C2, SKERRY_SIDE_VALUE>;
using C4Values = Of<SKERRY_FORMAT_C4, SKERRY_SIDE_VALUE>;
using F32Keys = Of<SKERRY_FORMAT_F32, SKERRY_SIDE_KEY>;
using F16Keys = Of<SKERRY_FORMAT_F16, SKERRY_SIDE_KEY>;
using Bf16Keys = Of<SKERRY_FORMAT_BF16, SKERRY_SIDE_KEY>;
using F32Values = Of<SKERRY_FORMAT_F32, SKERRY_SIDE_VALUE>;
using F16Values = Of<SKERRY_FORMAT_F16, SKERRY_SIDE_VALUE>;
using Bf16Values = Of<SKERRY_FORMAT_BF16, SKERRY_SIDE_VALUE>;

#define SKERRY_TEST_R_PARTS                                                                                                                \
    code_case::R2Keys, code_case::R2Values, code_case::R3Keys, code_case::R3Values, code_case::R4Keys, code_case::R4Values,                \
        code_case::R8Keys, code_case::R8Values
#define SKERRY_TEST_C_PARTS code_case::C2Keys, code_case::C2Values, code_case::C4Keys, code_case::C4Values
#define SKERRY_TEST_FULL_PARTS                                                                                                             \
    code_case::F32Keys, code_case::F32Values, code_case::F16Keys, code_case::F16Values, code_case::Bf16Keys, code_case::Bf16Values

} // namespace code_case
