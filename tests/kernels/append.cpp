#include "base/half.hpp"
#include "code_case.hpp"

#include <limits>

using namespace code_case;

namespace {

// One element as the format's definition stores it.
void expect_element(skerry_format format, const uint8_t *part, size_t index, float value, bool &same) {
    if (format == SKERRY_FORMAT_F32) {
        same = same && std::memcmp(part + 4 * index, &value, 4) == 0;
        return;
    }
    const uint16_t half = format == SKERRY_FORMAT_F16 ? f32_to_f16(value) : f32_to_bf16(value);
    same = same && std::memcmp(part + 2 * index, &half, 2) == 0;
}

std::vector<const skerry_kernels *> all_levels() {
    std::vector<const skerry_kernels *> tables = levels();
    tables.insert(tables.begin(), cpu_kernels(0));
    return tables;
}

template <class T>
bool append_is_right(const skerry_kernels *kernels, int32_t dim, int32_t capacity, int32_t first, int32_t count, int64_t stride,
                     const float *rows) {
    const size_t d = static_cast<size_t>(dim), room = static_cast<size_t>(capacity);
    const size_t element = T::format == SKERRY_FORMAT_F32 ? 4 : 2;
    Guarded part(part_bytes(T::format, T::side, dim, capacity), 0x3c);
    kernels->append(T::format, T::side, dim, capacity, first, count, rows, stride, part.data());
    bool same = part.intact();
    for (int32_t t = 0; t < capacity; ++t) {
        const bool is_written = t >= first && t < first + count;
        for (size_t c = 0; c < d; ++c) {
            const size_t token = static_cast<size_t>(t), index = T::side == SKERRY_SIDE_KEY ? c * room + token : token * d + c;
            if (is_written) {
                expect_element(T::format, part.data(), index, rows[(t - first) * stride + static_cast<int64_t>(c)], same);
            } else {
                for (size_t b = 0; b < element; ++b)
                    same = same && part.data()[element * index + b] == 0x3c;
            }
        }
    }
    return same;
}

} // namespace

TEST_CASE_TEMPLATE("append: tokens land where the layout says and nothing else changes", T, SKERRY_TEST_FULL_PARTS) {
    for (const skerry_kernels *kernels : all_levels()) {
        for (const int32_t dim : dims) {
            const int64_t stride = dim + 5;
            const std::vector<float> rows = normals(7, 16 * static_cast<size_t>(stride));
            for (int32_t capacity = 1; capacity <= 16; ++capacity) {
                for (int32_t count = 1; count <= capacity; count += count < 5 ? 1 : 3) {
                    const int32_t first = (capacity - count) / 2;
                    const bool right = append_is_right<T>(kernels, dim, capacity, first, count, stride, rows.data());
                    CAPTURE(kernels->name);
                    CAPTURE(dim);
                    CAPTURE(capacity);
                    CAPTURE(count);
                    REQUIRE(right);
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("append: rounding at the edges of the format follows the definition", T, SKERRY_TEST_FULL_PARTS) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const float edges[] = {0.0f,          -0.0f,
                           1.0f,          65504.0f,
                           65519.99f,     65520.0f,
                           -65520.0f,     1e30f,
                           -3.4e38f,      0x1p-14f,
                           0x1p-24f,      0x1p-25f,
                           0x1.8p-25f,    0x1p-126f,
                           0x1p-140f,     -0x1p-149f,
                           1.0009765625f, 1.00048828125f,
                           1.0014648f,    0x1.ffp0f,
                           0x1.feffp0f,   0x1.01p0f,
                           0x1.03p0f,     infinity,
                           -infinity,     std::numeric_limits<float>::quiet_NaN(),
                           -2049.0f,      2047.5f,
                           3e-8f,         6e-8f,
                           5.9e-8f,       1e-40f};
    for (const skerry_kernels *kernels : all_levels()) {
        for (const int32_t count : {1, 3, 4, 8, 16}) {
            for (const int32_t dim : {1, 7, 16, 32}) {
                std::vector<float> rows(static_cast<size_t>(dim) * 16);
                for (size_t i = 0; i < rows.size(); ++i)
                    rows[i] = edges[(i * 5 + static_cast<size_t>(count)) % std::size(edges)];
                CAPTURE(kernels->name);
                CAPTURE(count);
                CAPTURE(dim);
                REQUIRE(append_is_right<T>(kernels, dim, 16, 0, count, dim, rows.data()));
            }
        }
    }
}

TEST_CASE_TEMPLATE("append: token by token and all at once give the same bytes", T, SKERRY_TEST_FULL_PARTS) {
    const std::vector<float> rows = normals(11, 16 * 96);
    for (const skerry_kernels *kernels : all_levels()) {
        Guarded one(part_bytes(T::format, T::side, 96, 16)), many(part_bytes(T::format, T::side, 96, 16));
        for (int32_t t = 0; t < 16; ++t)
            kernels->append(T::format, T::side, 96, 16, t, 1, rows.data() + t * 96, 96, one.data());
        kernels->append(T::format, T::side, 96, 16, 0, 16, rows.data(), 96, many.data());
        CAPTURE(kernels->name);
        CHECK(one == many);
    }
}
