// SPDX-License-Identifier: MIT
#include "attend_scene.hpp"

#include <doctest/doctest.h>

namespace {

using namespace scene;
constexpr float none = -std::numeric_limits<float>::infinity();

} // namespace

TEST_CASE("merge: log-sum-exp of random parts, with and without sinks") {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const skerry_kernels &kernels = *skerry::cpu_kernels(level.features);
        for (uint64_t seed = 1; seed < 60; ++seed) {
            CAPTURE(seed);
            Random random(seed);
            const int32_t parts = 1 + random.below(9), rows = 1 + random.below(3), group = 1 + random.below(4), heads = rows * group;
            const int32_t dim = random.pick<int32_t>({1, 3, 10, 16, 64, 80, 128});
            const int64_t out_stride = int64_t(heads) * dim + random.below(7), head_stride = heads + random.below(5);
            const bool has_sinks = random.below(2) == 0;
            std::vector<float> out(static_cast<size_t>(parts * out_stride)), max(static_cast<size_t>(parts * head_stride), none);
            std::vector<float> sum(max.size()), sinks(static_cast<size_t>(group));
            for (float &x : out)
                x = random.normal();
            for (float &x : sinks)
                x = 5.0f * random.normal();
            for (size_t i = 0; i < max.size(); ++i) {
                if (random.below(3) == 0) continue;
                max[i] = 20.0f * random.normal();
                sum[i] = 1.0f + 10.0f * random.uniform();
            }
            // What an empty part left in its output must not be looked at.
            for (int32_t p = 0; p < parts; ++p) {
                for (int32_t h = 0; h < heads; ++h) {
                    if (max[static_cast<size_t>(p * head_stride + h)] != none) continue;
                    for (int32_t c = 0; c < dim; ++c)
                        out[static_cast<size_t>(p * out_stride + h * dim + c)] = std::nanf("");
                }
            }
            std::vector<float> merged(static_cast<size_t>(heads * dim) + 32, 777.0f), lse(static_cast<size_t>(heads) + 32, 777.0f);
            kernels.merge(parts, heads, group, dim, out.data(), out_stride, max.data(), sum.data(), head_stride,
                          has_sinks ? sinks.data() : nullptr, merged.data() + 16, lse.data() + 16);
            bool guards_hold = true;
            for (size_t i = 0; i < 16; ++i) {
                guards_hold &=
                    merged[i] == 777.0f && merged[merged.size() - 1 - i] == 777.0f && lse[i] == 777.0f && lse[lse.size() - 1 - i] == 777.0f;
            }
            CHECK(guards_hold);
            for (int32_t h = 0; h < heads; ++h) {
                double largest = has_sinks ? double(sinks[static_cast<size_t>(h % group)]) : double(none);
                for (int32_t p = 0; p < parts; ++p)
                    largest = std::max(largest, double(max[static_cast<size_t>(p * head_stride + h)]));
                const float own = lse[static_cast<size_t>(16 + h)];
                double total = has_sinks ? std::exp(double(sinks[static_cast<size_t>(h % group)]) - largest) : 0;
                std::vector<double> expected(static_cast<size_t>(dim));
                for (int32_t p = 0; p < parts; ++p) {
                    const size_t at = static_cast<size_t>(p * head_stride + h);
                    if (max[at] == none) continue;
                    const double weight = std::exp(double(max[at]) - largest);
                    total += weight * double(sum[at]);
                    for (int32_t c = 0; c < dim; ++c) {
                        expected[static_cast<size_t>(c)] += weight * double(out[static_cast<size_t>(p * out_stride + h * dim + c)]);
                    }
                }
                double error = 0, size = 0;
                for (int32_t c = 0; c < dim; ++c) {
                    const double y = total > 0 ? expected[static_cast<size_t>(c)] / total : 0;
                    const double x = double(merged[static_cast<size_t>(16 + h * dim + c)]);
                    error += (x - y) * (x - y);
                    size += y * y;
                }
                if (total > 0) {
                    CHECK(std::abs(double(own) - (largest + std::log(total))) <= 1e-5);
                    CHECK(std::sqrt(error) <= 1e-6 + 1e-5 * std::sqrt(size));
                } else {
                    CHECK(own == none);
                    CHECK(error == 0);
                }
            }
        }
    }
}

TEST_CASE("merge: nothing seen gives zeros and minus infinity") {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        std::vector<float> out(2 * 4 * 16, std::nanf("")), max(2 * 4, none), sum(2 * 4, 0.0f), merged(4 * 16, 1.0f), lse(4, 1.0f);
        skerry::cpu_kernels(level.features)
            ->merge(2, 4, 4, 16, out.data(), 64, max.data(), sum.data(), 4, nullptr, merged.data(), lse.data());
        for (const float x : merged)
            CHECK(x == 0.0f);
        for (const float x : lse)
            CHECK(x == none);
    }
}
