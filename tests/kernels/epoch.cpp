#include "codec/epoch.hpp"
#include "base/half.hpp"
#include "code_case.hpp"
#include "codec/rotation.hpp"

#include <algorithm>

using namespace code_case;

namespace {

struct Frozen {
    std::vector<uint8_t> stored;
    std::vector<float> mean, balance;
    skerry_epoch epoch{};

    Frozen(const EpochStatistics &statistics, int32_t dim)
        : stored(epoch_bytes(dim) + 8, 0xee), mean(static_cast<size_t>(dim)), balance(static_cast<size_t>(dim)) {
        epoch_freeze(statistics, dim, stored.data());
        epoch = epoch_decode(stored.data(), dim, mean.data(), balance.data());
        for (size_t i = epoch_bytes(dim); i < stored.size(); ++i)
            REQUIRE(stored[i] == 0xee);
        REQUIRE(epoch_valid(stored.data(), dim));
    }
};

} // namespace

TEST_CASE("epoch: balance is the fourth root of query energy over key variance, geometric mean 1") {
    const std::vector<double> mean(4, 0.0), variance = {1, 16, 0.0625, 1}, query = {16, 1, 1, 1};
    const Frozen frozen({mean.data(), variance.data(), query.data(), 1.0f, 1.0f}, 4);
    // Unnormalised: 2, 1/2, 2, 1; their geometric mean is 2^(1/4).
    const double expected[] = {std::exp2(0.75), std::exp2(-1.25), std::exp2(0.75), std::exp2(-0.25)};
    double log_sum = 0;
    for (size_t i = 0; i < 4; ++i) {
        CHECK(frozen.balance[i] == doctest::Approx(expected[i]).epsilon(0.025));
        log_sum += std::log2(double(frozen.balance[i]));
    }
    CHECK(std::abs(log_sum) < 4.0 / 32);
}

TEST_CASE("epoch: without queries the balance is variance to the power -1/4") {
    const std::vector<double> mean(3, 0.0), variance = {1, 256, 1.0 / 256};
    const Frozen frozen({mean.data(), variance.data(), nullptr, 1.0f, 1.0f}, 3);
    CHECK(frozen.balance[0] == 1.0f);
    CHECK(frozen.balance[1] == 0.25f);
    CHECK(frozen.balance[2] == 4.0f);
}

TEST_CASE("epoch: extreme statistics stay within the stored range") {
    const std::vector<double> mean(4, 0.0);
    for (const std::vector<double> &variance : {std::vector<double>{0, 0, 0, 0}, std::vector<double>{1e60, 1, 1e-60, 0},
                                                std::vector<double>{0, 0, 0, 5}, std::vector<double>{1e-70, 1e-70, 1e-70, 1e-70}}) {
        const Frozen frozen({mean.data(), variance.data(), nullptr, 1e30f, 1e30f}, 4);
        for (const float balance : frozen.balance) {
            CHECK(balance >= 0x1p-8f);
            CHECK(balance <= 0x1p8f);
        }
    }
    const std::vector<double> zero(4, 0.0);
    const Frozen frozen({mean.data(), zero.data(), zero.data(), 0.0f, 0.0f}, 4);
    for (const float balance : frozen.balance)
        CHECK(balance == 1.0f);
}

TEST_CASE("epoch: variance and query energy are floored at 1e-8 of their mean") {
    const std::vector<double> mean(2, 0.0), variance = {1, 0}, floored = {1, 0.5e-8};
    const Frozen a({mean.data(), variance.data(), nullptr, 1.0f, 1.0f}, 2), b({mean.data(), floored.data(), nullptr, 1.0f, 1.0f}, 2);
    CHECK(a.balance == b.balance);
}

TEST_CASE("epoch: exponents put the largest magnitude into [8, 16)") {
    for (const float largest : {1e-28f, 1e-6f, 0.9f, 1.0f, 15.99f, 16.0f, 65504.0f, 1e30f, 3.4e38f}) {
        const float scaled = std::ldexp(largest, -epoch_exponent(largest));
        CHECK(scaled >= 8.0f);
        CHECK(scaled < 16.0f);
    }
    CHECK(epoch_exponent(0.0f) == 0);
    CHECK(epoch_exponent(0x1p-149f) == -100);
    CHECK(epoch_exponent(INFINITY) == 124);
}

TEST_CASE("epoch: means survive in f16 with the exponent of the keys") {
    for (const float size : {1e-20f, 1.0f, 1e4f, 1e30f}) {
        std::vector<double> mean, variance(64, 1.0);
        for (const float number : normals(6, 64, size))
            mean.push_back(number);
        const Frozen frozen({mean.data(), variance.data(), nullptr, 4.5f * size, 1.0f}, 64);
        for (size_t i = 0; i < 64; ++i) {
            CHECK(std::abs(frozen.mean[i] - mean[i]) <= 0x1p-11 * std::abs(mean[i]) + 1e-6 * size);
        }
    }
}

TEST_CASE("epoch: bytes are 3 per channel and a header") {
    CHECK(epoch_bytes(64) == 196);
    CHECK(epoch_bytes(128) == 388);
}

TEST_CASE("epoch: damaged bytes are refused") {
    const std::vector<double> mean(8, 0.25), variance(8, 1.0);
    Frozen frozen({mean.data(), variance.data(), nullptr, 1.0f, 1.0f}, 8);
    const auto refused = [&](size_t at, uint8_t byte) {
        std::vector<uint8_t> damaged = frozen.stored;
        damaged[at] = byte;
        return !epoch_valid(damaged.data(), 8);
    };
    CHECK(refused(0, 127));
    CHECK(refused(1, 0x80));
    CHECK(refused(2, 1));
    CHECK(refused(3, 1));
    CHECK(refused(5, 0x7c));
    CHECK(refused(4 + 16, 127));
    CHECK(refused(4 + 16 + 7, 0x80));
}

TEST_CASE("epoch: a key at the largest magnitude codes with a finite scale") {
    for (const float largest : {1e-20f, 1.0f, 65504.0f, 1e30f}) {
        std::vector<double> mean(64, 0.0), variance(64, 1.0);
        variance[3] = 1e-8; // the largest balance there is
        const Frozen frozen({mean.data(), variance.data(), nullptr, largest, largest}, 64);
        Setting setting(SKERRY_FORMAT_R4, SKERRY_SIDE_KEY, 64, 1, 1);
        setting.epoch = frozen.epoch;
        const std::vector<float> row(64, largest);
        const Guarded part = encode(cpu_kernels(0), setting, row.data());
        uint16_t scale = 0;
        std::memcpy(&scale, part.data() + r_scale_offset(SKERRY_FORMAT_R4, SKERRY_SIDE_KEY, 64, 1), 2);
        CHECK(f16_to_f32(scale) < 65504.0f);
        CHECK(f16_to_f32(scale) > 0.0f);
    }
}

TEST_CASE("rotation: orthonormal, and its transpose undoes it") {
    for (const int32_t dim : dims) {
        const std::vector<float> x = normals(static_cast<uint64_t>(dim), static_cast<size_t>(dim));
        std::vector<float> y = x;
        rotate(y.data(), dim);
        double before = 0, after = 0;
        for (size_t i = 0; i < x.size(); ++i) {
            before += double(x[i]) * x[i];
            after += double(y[i]) * y[i];
        }
        CHECK(after == doctest::Approx(before).epsilon(1e-5));
        unrotate(y.data(), dim);
        for (size_t i = 0; i < x.size(); ++i)
            CHECK(std::abs(x[i] - y[i]) < 1e-5f);
    }
}

TEST_CASE("rotation: one channel spreads evenly over its block, by the Hadamard matrix") {
    for (int32_t channel = 0; channel < 64; ++channel) {
        std::vector<float> x(64, 0.0f);
        x[static_cast<size_t>(channel)] = 8.0f;
        rotate(x.data(), 64);
        for (int32_t i = 0; i < 64; ++i) {
            const bool is_negative = (__builtin_popcount(static_cast<unsigned>(i & channel)) & 1) != 0;
            CHECK(x[static_cast<size_t>(i)] == (is_negative != rotation_flips(channel) ? -1.0f : 1.0f));
        }
    }
}

TEST_CASE("rotation: the sign pattern is fixed") {
    // First 64 channels, channel 0 in the lowest bit.
    uint64_t pattern = 0;
    for (int32_t i = 0; i < 64; ++i)
        pattern |= uint64_t(rotation_flips(i) ? 1 : 0) << i;
    CHECK(pattern == 0x00276c8d7f4dd192u);
    int32_t flipped = 0;
    for (int32_t i = 0; i < 256; ++i)
        flipped += rotation_flips(i) ? 1 : 0;
    CHECK(flipped == 113);
}
