// SPDX-License-Identifier: MIT
#include "base/half.hpp"
#include "cpu/ref/ref.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

// The vector of the body in plain C++: loops that a compiler turns into whatever the machine has.
struct Vec {
    float lane[16];
};

constexpr int product_rows = 2, product_vectors = 2;

template <typename Operation>
inline Vec each(Operation operation) {
    Vec result;
    for (int i = 0; i < 16; ++i)
        result.lane[i] = operation(i);
    return result;
}

inline Vec v_set1(float x) {
    return each([&](int) { return x; });
}
inline Vec v_zero() { return v_set1(0.0f); }
inline Vec v_load(const float *at) {
    Vec x;
    std::memcpy(x.lane, at, sizeof(x.lane));
    return x;
}
inline void v_store(float *at, const Vec &x) { std::memcpy(at, x.lane, sizeof(x.lane)); }
inline Vec v_add(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec v_sub(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec v_mul(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec v_div(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec v_max(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec v_min(const Vec &a, const Vec &b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec v_abs(const Vec &a) {
    return each([&](int i) { return std::abs(a.lane[i]); });
}
inline Vec v_sqrt(const Vec &a) {
    return each([&](int i) { return std::sqrt(a.lane[i]); });
}
// To nearest, ties to even, of magnitudes below 2^22.
inline Vec v_round(const Vec &a) {
    return each([&](int i) { return (a.lane[i] + 0x1.8p23f) - 0x1.8p23f; });
}
inline Vec v_below(const Vec &x, const Vec &y, const Vec &a, const Vec &b) {
    return each([&](int i) { return x.lane[i] < y.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline float v_first_of(const Vec &x) { return x.lane[0]; }
inline float v_largest(const Vec &x) { return *std::max_element(x.lane, x.lane + 16); }
inline void v_store_f16(uint16_t *at, const Vec &x) {
    for (int i = 0; i < 16; ++i)
        at[i] = f32_to_f16(x.lane[i]);
}
inline Vec v_load_f16(const uint16_t *at) {
    return each([&](int i) { return f16_to_f32(at[i]); });
}
// Sums of the lanes of sixteen vectors, in the order of x86/fold16.hpp.
inline Vec v_fold16(const float *x) {
    return each([&](int i) {
        const float *const v = x + 16 * i;
        float half[8], quad[2];
        for (int k = 0; k < 8; ++k)
            half[k] = v[k] + v[k + 8];
        for (int k = 0; k < 2; ++k)
            quad[k] = (half[4 * k] + half[4 * k + 2]) + (half[4 * k + 1] + half[4 * k + 3]);
        return quad[0] + quad[1];
    });
}

} // namespace

} // namespace skerry

#include "cpu/factorise_body.hpp"

namespace skerry::ref {

size_t factorise_scratch_bytes(int32_t dim, int32_t count) {
    FactorWork w;
    return factor_carve(w, dim, count, nullptr);
}

void factorise(const skerry_factor_params *params, const float *rows, void *part, skerry_factor_result *result, void *scratch) {
    factorise_matrix(*params, rows, static_cast<uint8_t *>(part), result, scratch);
}

} // namespace skerry::ref
