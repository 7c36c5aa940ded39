#include "base/half.hpp"
#include "code_case.hpp"

#include <algorithm>

using namespace code_case;

namespace {

template <class T>
void same_as_reference(int32_t dim, int32_t capacity, int32_t count, const float *rows) {
    const Setting setting(T::format, T::side, dim, capacity, count);
    const skerry_kernels *const reference = cpu_kernels(0);
    if (reference->supports(T::format, T::side, dim) == 0) return;
    const Guarded expected = encode(reference, setting, rows);
    // What was in the part before must not show: padding and missing tokens are written too.
    REQUIRE(encode(reference, setting, rows, 0x00) == expected);
    for (const skerry_kernels *kernels : levels()) {
        const std::string what = describe(kernels, setting);
        CAPTURE(what);
        REQUIRE(encode(kernels, setting, rows) == expected);
    }
}

uint16_t scale_of(const Setting &setting, const Guarded &part, int32_t token) {
    uint16_t half = 0;
    const skerry_code_params &p = setting.params;
    std::memcpy(&half, part.data() + r_scale_offset(p.format, p.side, p.dim, p.capacity) + 2 * static_cast<size_t>(token), 2);
    return half;
}

// Rows that a fast path may get wrong.
std::vector<std::vector<float>> edge_rows(int32_t dim) {
    const size_t d = static_cast<size_t>(dim);
    std::vector<std::vector<float>> rows;
    const auto fill = [&](float value) { rows.emplace_back(d, value); };
    for (const float value : {0.0f, -0.0f, 1.0f, -1.0f, 65504.0f, -65504.0f, 1e30f, -1e30f, 3e38f, 0x1p-126f, 0x1p-149f, -1e-40f, 1e-20f}) {
        fill(value);
    }
    const std::vector<float> noise = normals(3, d);
    for (const float outlier : {1e4f, -1e4f, 1e30f}) {
        rows.push_back(noise);
        rows.back()[d / 2] = outlier;
    }
    for (const float size : {1e-38f, 1e-30f, 1e-10f, 1e20f, 1e29f})
        rows.push_back(normals(4, d, size));
    rows.emplace_back(d, 0.0f);
    rows.back()[d - 1] = 1.0f;
    std::vector<float> alternating(d);
    for (size_t i = 0; i < d; ++i)
        alternating[i] = i % 2 == 0 ? 2.0f : -2.0f;
    rows.push_back(alternating);
    return rows;
}

} // namespace

TEST_CASE_TEMPLATE("encode: every level stores the bytes of the reference", T, SKERRY_TEST_R_PARTS) {
    for (const int32_t dim : dims) {
        const std::vector<float> rows = normals(static_cast<uint64_t>(dim) + 100, 16 * static_cast<size_t>(dim));
        for (int32_t capacity = 1; capacity <= 16; ++capacity) {
            same_as_reference<T>(dim, capacity, capacity, rows.data());
            if (capacity > 1) same_as_reference<T>(dim, capacity, 1 + capacity / 2, rows.data());
        }
        same_as_reference<T>(dim, 16, 1, rows.data());
        same_as_reference<T>(dim, 16, 0, rows.data());
    }
}

TEST_CASE_TEMPLATE("encode: every level stores the bytes of the reference, full and C formats", T, SKERRY_TEST_FULL_PARTS,
                   SKERRY_TEST_C_PARTS) {
    for (const int32_t dim : {1, 2, 3, 10, 17, 64, 80, 128}) {
        const std::vector<float> rows = normals(static_cast<uint64_t>(dim) + 500, 128 * static_cast<size_t>(dim));
        for (const int32_t capacity : {1, 2, 3, 5, 8, 13, 16, 33, 64, 100, 128}) {
            if (!is_c_format(T::format) && capacity > 16) break;
            same_as_reference<T>(dim, capacity, capacity, rows.data());
            if (capacity > 2) same_as_reference<T>(dim, capacity, capacity - 2, rows.data());
        }
    }
}

TEST_CASE_TEMPLATE("encode: edge inputs give the same bytes on every level", T, SKERRY_TEST_R_PARTS) {
    for (const int32_t dim : {2, 10, 17, 64, 80, 128, 256}) {
        std::vector<float> rows;
        int32_t count = 0;
        for (const std::vector<float> &row : edge_rows(dim)) {
            rows.insert(rows.end(), row.begin(), row.end());
            ++count;
        }
        for (int32_t first = 0; first < count; first += 16) {
            const int32_t tokens = std::min(16, count - first);
            same_as_reference<T>(dim, tokens, tokens, rows.data() + static_cast<size_t>(first) * static_cast<size_t>(dim));
        }
    }
}

TEST_CASE_TEMPLATE("encode: edge inputs decode to finite numbers of their size", T, SKERRY_TEST_R_PARTS) {
    const int32_t dim = 64;
    for (const std::vector<float> &row : edge_rows(dim)) {
        float largest = 0;
        for (const float number : row)
            largest = std::max(largest, std::abs(number));
        if (largest > 1.1e30f) continue; // held at the encoder's limit
        Setting setting(T::format, T::side, dim, 1, 1);
        std::fill(setting.mean.begin(), setting.mean.end(), 0.0f);
        std::fill(setting.balance.begin(), setting.balance.end(), 1.0f);
        const int exponent = largest > 0 ? std::max(std::ilogb(largest) - 3, -100) : 0;
        setting.epoch.key_exponent_scale = setting.epoch.value_exponent_scale = std::ldexp(1.0f, exponent);
        const Guarded part = encode(cpu_kernels(0), setting, row.data());
        Guarded rows = decode(cpu_kernels(0), setting, part.data());
        CAPTURE(largest);
        for (int32_t c = 0; c < dim; ++c)
            REQUIRE(std::isfinite(rows.floats()[c]));
        // Two bits on a row that is one outlier keep at least half of its energy; tiny rows may round to
        // nothing.
        if (largest > 1e-30f) CHECK(relative_error(row.data(), rows.floats(), row.size()) < 0.75);
        if (largest == 0) {
            for (int32_t c = 0; c < dim; ++c)
                REQUIRE(rows.floats()[c] == 0);
        }
    }
}

TEST_CASE_TEMPLATE("encode: a zero row and missing tokens store scale 0 and code 0", T, SKERRY_TEST_R_PARTS) {
    for (const int32_t dim : {10, 64, 100}) {
        if (cpu_kernels(0)->supports(T::format, T::side, dim) == 0) continue;
        Setting setting(T::format, T::side, dim, 16, 9);
        std::vector<float> rows(9 * static_cast<size_t>(dim));
        for (int32_t t = 0; t < 9; ++t) {
            for (size_t c = 0; c < static_cast<size_t>(dim); ++c) {
                rows[static_cast<size_t>(t * dim) + c] = T::side == SKERRY_SIDE_KEY ? setting.mean[c] : 0.0f;
            }
        }
        for (const skerry_kernels *kernels : levels()) {
            const Guarded part = encode(kernels, setting, rows.data());
            CHECK(std::all_of(part.data(), part.data() + part.size(), [](uint8_t byte) { return byte == 0; }));
        }
        const Guarded part = encode(cpu_kernels(0), setting, rows.data());
        CHECK(std::all_of(part.data(), part.data() + part.size(), [](uint8_t byte) { return byte == 0; }));
    }
}

TEST_CASE_TEMPLATE("encode: error on normal numbers is that of the published table", T, SKERRY_TEST_R_PARTS) {
    // Relative rms error, kernels that search their step: 0.34 to 0.36, 0.18 to 0.20, 0.09 to 0.105, below
    // 0.01.
    const double low = T::format == SKERRY_FORMAT_R2   ? 0.33
                       : T::format == SKERRY_FORMAT_R3 ? 0.175
                       : T::format == SKERRY_FORMAT_R4 ? 0.085
                                                       : 0.003;
    const double high = T::format == SKERRY_FORMAT_R2   ? 0.37
                        : T::format == SKERRY_FORMAT_R3 ? 0.20
                        : T::format == SKERRY_FORMAT_R4 ? 0.107
                                                        : 0.01;
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
        Setting setting(T::format, T::side, dim, 16, 16);
        std::fill(setting.mean.begin(), setting.mean.end(), 0.0f);
        std::fill(setting.balance.begin(), setting.balance.end(), 1.0f);
        double error = 0;
        for (uint64_t seed = 0; seed < 8; ++seed) {
            const std::vector<float> rows = normals(seed + 40, setting.elements());
            const Guarded part = encode(cpu_kernels(0), setting, rows.data());
            Guarded decoded = decode(cpu_kernels(0), setting, part.data());
            error += relative_error(rows.data(), decoded.floats(), rows.size()) / 8;
        }
        CAPTURE(dim);
        CAPTURE(error);
        CHECK(error > low);
        CHECK(error < high);
    }
}

TEST_CASE_TEMPLATE("encode: the scale keeps the size of a row", T, code_case::R2Values, code_case::R3Values, code_case::R4Values,
                   code_case::R8Values) {
    // <x, decoded> = <x, x> up to the rounding of the stored scale.
    const Setting setting(T::format, T::side, 128, 16, 16);
    const std::vector<float> rows = normals(77, setting.elements());
    const Guarded part = encode(cpu_kernels(0), setting, rows.data());
    Guarded decoded = decode(cpu_kernels(0), setting, part.data());
    for (size_t t = 0; t < 16; ++t) {
        double dot = 0, size = 0;
        for (size_t c = 0; c < 128; ++c) {
            dot += double(rows[t * 128 + c]) * decoded.floats()[t * 128 + c];
            size += double(rows[t * 128 + c]) * rows[t * 128 + c];
        }
        CHECK(dot / size == doctest::Approx(1.0).epsilon(0.001));
    }
}

TEST_CASE_TEMPLATE("encode: an outlier channel costs little after the rotation", T, code_case::R3Keys, code_case::R4Keys,
                   code_case::R3Values, code_case::R4Values) {
    Setting setting(T::format, T::side, 128, 16, 16);
    std::fill(setting.mean.begin(), setting.mean.end(), 0.0f);
    std::fill(setting.balance.begin(), setting.balance.end(), 1.0f);
    setting.epoch.key_exponent_scale = setting.epoch.value_exponent_scale = 1024.0f;
    std::vector<float> rows = normals(5, setting.elements());
    for (size_t t = 0; t < 16; ++t)
        rows[t * 128 + 17] = t % 2 == 0 ? 1e4f : -1e4f;
    const Guarded part = encode(cpu_kernels(0), setting, rows.data());
    Guarded decoded = decode(cpu_kernels(0), setting, part.data());
    CHECK(relative_error(rows.data(), decoded.floats(), rows.size()) < 0.21);
}

TEST_CASE_TEMPLATE("encode: a scale beyond f16 is held at the largest number", T, SKERRY_TEST_R_PARTS) {
    Setting setting(T::format, T::side, 64, 1, 1);
    setting.epoch.key_exponent_scale = setting.epoch.value_exponent_scale = 1.0f;
    const std::vector<float> row(64, 1e30f);
    const Guarded part = encode(cpu_kernels(0), setting, row.data());
    CHECK(f16_to_f32(scale_of(setting, part, 0)) == 65504.0f);
}

TEST_CASE_TEMPLATE("encode: tokens are independent of their neighbours and of their place", T, SKERRY_TEST_R_PARTS) {
    const std::vector<float> rows = normals(9, 16 * 80);
    std::vector<const skerry_kernels *> tables = levels();
    tables.push_back(cpu_kernels(0));
    for (const skerry_kernels *kernels : tables) {
        const Setting all(T::format, T::side, 80, 16, 16), one(T::format, T::side, 80, 1, 1);
        const Guarded together = encode(kernels, all, rows.data());
        Guarded decoded = decode(kernels, all, together.data());
        for (size_t t = 0; t < 16; ++t) {
            const Guarded alone = encode(kernels, one, rows.data() + t * 80);
            CHECK(scale_of(one, alone, 0) == scale_of(all, together, static_cast<int32_t>(t)));
            Guarded row = decode(kernels, one, alone.data());
            CHECK(std::memcmp(row.data(), decoded.floats() + t * 80, 80 * sizeof(float)) == 0);
        }
    }
}

TEST_CASE_TEMPLATE("encode: value groups of C formats may be uneven and start within a byte", T, code_case::C2Values, code_case::C4Values) {
    for (const int32_t dim : {7, 64, 100}) {
        for (const int32_t group : {3, 5, 32, 64, 1000}) {
            Setting setting(T::format, T::side, dim, 6, 6);
            setting.params.value_group = group;
            const std::vector<float> rows = normals(21, setting.elements());
            const Guarded part = encode(cpu_kernels(0), setting, rows.data());
            Guarded decoded = decode(cpu_kernels(0), setting, part.data());
            // No element is further off than half a step of its group's grid, and rounding of the grid.
            for (int32_t t = 0; t < 6; ++t) {
                for (int32_t begin = 0; begin < dim; begin += group) {
                    const int32_t end = std::min(dim, begin + group);
                    const float *const x = rows.data() + t * dim, *const y = decoded.floats() + t * dim;
                    const auto [low, high] = std::minmax_element(x + begin, x + end);
                    const float steps = T::format == SKERRY_FORMAT_C2 ? 3.0f : 15.0f;
                    const float bound = (*high - *low) / steps * 0.51f + 0.01f;
                    for (int32_t c = begin; c < end; ++c)
                        REQUIRE(std::abs(x[c] - y[c]) <= bound);
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("encode: C keys are un-rotated before coding and rotated after decoding", T, code_case::C4Keys) {
    const int32_t dim = 64, tokens = 16;
    for (const skerry_rotary_pairing pairing : {SKERRY_ROTARY_HALF, SKERRY_ROTARY_INTERLEAVED}) {
        std::vector<float> frequencies(16);
        for (size_t i = 0; i < frequencies.size(); ++i)
            frequencies[i] = std::pow(10000.0f, -static_cast<float>(i) / 16.0f);
        Setting setting(T::format, T::side, dim, tokens, tokens);
        setting.params.inverse_frequencies = frequencies.data();
        setting.params.rotary_dims = 32;
        setting.params.rotary_pairing = pairing;
        setting.params.position = 1000;
        setting.params.attention_factor = 1.25f;
        // Constant before the rotary embedding: exact grids, so what is left is the error of the rotation
        // itself.
        const std::vector<float> still = normals(2, dim);
        std::vector<float> rows(setting.elements());
        for (int32_t t = 0; t < tokens; ++t) {
            for (int32_t c = 0; c < dim; ++c)
                rows[static_cast<size_t>(t * dim + c)] = still[static_cast<size_t>(c)];
            for (int32_t i = 0; i < 16; ++i) {
                const double angle = double(static_cast<float>(1000 + t) * frequencies[static_cast<size_t>(i)]);
                const int32_t a = pairing == SKERRY_ROTARY_HALF ? i : 2 * i, b = pairing == SKERRY_ROTARY_HALF ? i + 16 : 2 * i + 1;
                const double x = still[static_cast<size_t>(a)], y = still[static_cast<size_t>(b)];
                rows[static_cast<size_t>(t * dim + a)] = static_cast<float>(1.25 * (x * std::cos(angle) - y * std::sin(angle)));
                rows[static_cast<size_t>(t * dim + b)] = static_cast<float>(1.25 * (y * std::cos(angle) + x * std::sin(angle)));
            }
        }
        const Guarded part = encode(cpu_kernels(0), setting, rows.data());
        Guarded decoded = decode(cpu_kernels(0), setting, part.data());
        CHECK(relative_error(rows.data(), decoded.floats(), rows.size()) < 1e-3);
    }
}

TEST_CASE_TEMPLATE("encode: C formats follow the reference at the edges, and decode alike", T, SKERRY_TEST_C_PARTS) {
    const float edges[] = {0.0f,   -0.0f, 1.0f,     -1.0f,     65504.0f, -65504.0f, 70000.0f, 1e30f, -1e30f, 3e38f,
                           -3e38f, 1e-8f, 0x1p-25f, 0x1p-149f, 1e-40f,   2.5f,      0.5f,     1.5f,  3.5f,   -7.25f};
    const skerry_kernels *const reference = cpu_kernels(0);
    for (const skerry_dtype grid : {SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16}) {
        for (const int32_t group : {0, 16, 32}) {
            for (int32_t mix = 0; mix < 24; ++mix) {
                const int32_t dim = mix % 2 == 0 ? 64 : 96, count = mix % 3 == 0 ? 8 : 13;
                Setting setting(T::format, T::side, dim, mix % 4 == 0 ? count : count + 3, count);
                setting.params.grid_dtype = grid;
                setting.params.value_group = group;
                std::vector<float> rows = normals(static_cast<uint64_t>(mix), setting.elements(), mix < 4 ? 1e-3f : 3.0f);
                Numbers numbers(static_cast<uint64_t>(mix) + 70);
                for (float &number : rows) {
                    const uint32_t dice = numbers.bits() % 64;
                    if (mix >= 16 && dice < std::size(edges)) number = edges[dice];
                    if (mix >= 8 && mix < 12) number = edges[(dice + static_cast<uint32_t>(mix)) % 2];
                    if (mix >= 12 && mix < 16) number = std::nearbyint(number);
                }
                // Whole groups of one number.
                if (mix % 5 == 0) std::fill(rows.begin(), rows.begin() + dim, 4.0f);
                const Guarded expected = encode(reference, setting, rows.data());
                const Guarded decoded = decode(reference, setting, expected.data());
                for (const skerry_kernels *kernels : levels()) {
                    const std::string what = describe(kernels, setting) + " mix " + std::to_string(mix) + " group " + std::to_string(group);
                    CAPTURE(what);
                    REQUIRE(encode(kernels, setting, rows.data()) == expected);
                    REQUIRE(decode(kernels, setting, expected.data()) == decoded);
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("encode: C keys with a rotary embedding are the same on every level", T, code_case::C2Keys, code_case::C4Keys) {
    std::vector<float> frequencies(16);
    for (size_t i = 0; i < frequencies.size(); ++i)
        frequencies[i] = 1.0f / static_cast<float>(1 + i * i);
    for (const skerry_rotary_pairing pairing : {SKERRY_ROTARY_HALF, SKERRY_ROTARY_INTERLEAVED}) {
        for (const int32_t count : {1, 8, 31}) {
            Setting setting(T::format, T::side, 48, 32, count);
            setting.params.inverse_frequencies = frequencies.data();
            setting.params.rotary_dims = 32;
            setting.params.rotary_pairing = pairing;
            setting.params.position = 77;
            const std::vector<float> rows = normals(19, setting.elements());
            const Guarded expected = encode(cpu_kernels(0), setting, rows.data());
            const Guarded decoded = decode(cpu_kernels(0), setting, expected.data());
            for (const skerry_kernels *kernels : levels()) {
                CAPTURE(kernels->name);
                REQUIRE(encode(kernels, setting, rows.data()) == expected);
                REQUIRE(decode(kernels, setting, expected.data()) == decoded);
            }
        }
    }
}
