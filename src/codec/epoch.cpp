// SPDX-License-Identifier: MIT
#include "codec/epoch.hpp"

#include "base/half.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace skerry {

namespace {

constexpr int32_t exponent_least = -100; // 2^100 is the inverse of the smallest scale, still far from infinity
constexpr int32_t exponent_most = 124;   // the largest f32 over 2^124 is just below 16
constexpr double floor_share = 1e-8;

// 2^(i / 16), rounded to f32.
constexpr std::array<float, 16> sixteenth_powers = {
    0x1.000000p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fe0p+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
    0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f, 0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f,
};

float power_of_two(int32_t exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// Positive numbers to work with whatever came in: floored at a share of their mean, 1 where there is no mean
// to speak of.
struct Floored {
    const double *values;
    double least = 0;
    bool usable = false;

    Floored(const double *numbers, int32_t count) : values(numbers) {
        double mean = 0;
        for (int32_t i = 0; numbers != nullptr && i < count; ++i)
            mean += numbers[i] / count;
        usable = std::isfinite(mean) && mean > 0;
        least = floor_share * mean;
    }
    double log2(int32_t i) const { return usable ? std::log2(std::max({values[i], least, 1e-300})) : 0.0; }
};

} // namespace

int32_t epoch_exponent(float largest) {
    if (!(largest > 0)) return 0;
    if (std::isinf(largest)) return exponent_most;
    return std::clamp(std::ilogb(largest) - 3, exponent_least, exponent_most);
}

void epoch_freeze(const EpochStatistics &statistics, int32_t key_dim, uint8_t *stored) {
    const int32_t key_exponent = epoch_exponent(statistics.largest_key);
    const int32_t value_exponent = epoch_exponent(statistics.largest_value);
    stored[0] = static_cast<uint8_t>(key_exponent);
    stored[1] = static_cast<uint8_t>(value_exponent);
    stored[2] = stored[3] = 0;

    const double inverse = 1.0 / double(power_of_two(key_exponent));
    for (int32_t i = 0; i < key_dim; ++i) {
        const double scaled = std::clamp(statistics.mean[i] * inverse, -65504.0, 65504.0);
        const uint16_t half = f32_to_f16(static_cast<float>(scaled));
        std::memcpy(stored + epoch_header_bytes + 2 * static_cast<size_t>(i), &half, 2);
    }

    const Floored variance(statistics.variance, key_dim), query(statistics.query_square, key_dim);
    const auto log_balance = [&](int32_t i) { return 0.25 * (query.log2(i) - variance.log2(i)); };
    double mean_log = 0;
    for (int32_t i = 0; i < key_dim; ++i)
        mean_log += log_balance(i) / key_dim;
    uint8_t *const balance = stored + epoch_header_bytes + 2 * static_cast<size_t>(key_dim);
    for (int32_t i = 0; i < key_dim; ++i) {
        const double steps = std::clamp(16.0 * (log_balance(i) - mean_log), -double(epoch_balance_limit), double(epoch_balance_limit));
        balance[i] = static_cast<uint8_t>(static_cast<int8_t>(std::lround(steps)));
    }
}

skerry_epoch epoch_decode(const uint8_t *stored, int32_t key_dim, float *mean, float *balance) {
    skerry_epoch epoch{};
    epoch.key_exponent_scale = power_of_two(static_cast<int8_t>(stored[0]));
    epoch.value_exponent_scale = power_of_two(static_cast<int8_t>(stored[1]));
    const uint8_t *const sixteenths = stored + epoch_header_bytes + 2 * static_cast<size_t>(key_dim);
    for (int32_t i = 0; i < key_dim; ++i) {
        uint16_t half = 0;
        std::memcpy(&half, stored + epoch_header_bytes + 2 * static_cast<size_t>(i), 2);
        mean[i] = f16_to_f32(half) * epoch.key_exponent_scale;
        const int32_t steps = static_cast<int8_t>(sixteenths[i]);
        balance[i] = sixteenth_powers[static_cast<size_t>(steps & 15)] * power_of_two(steps >> 4);
    }
    epoch.mean = mean;
    epoch.balance = balance;
    return epoch;
}

bool epoch_valid(const uint8_t *stored, int32_t key_dim) {
    for (int32_t side = 0; side < 2; ++side) {
        const int32_t exponent = static_cast<int8_t>(stored[side]);
        if (exponent < exponent_least || exponent > exponent_most) return false;
    }
    if (stored[2] != 0 || stored[3] != 0) return false;
    const uint8_t *const balance = stored + epoch_header_bytes + 2 * static_cast<size_t>(key_dim);
    for (int32_t i = 0; i < key_dim; ++i) {
        uint16_t half = 0;
        std::memcpy(&half, stored + epoch_header_bytes + 2 * static_cast<size_t>(i), 2);
        if ((half & 0x7c00u) == 0x7c00u) return false;
        if (std::abs(int32_t(static_cast<int8_t>(balance[i]))) > epoch_balance_limit) return false;
    }
    return true;
}

} // namespace skerry
