// SPDX-License-Identifier: MIT
#pragma once

// The relative error of what is stored, in a byte: 12 steps to a factor of two, rounded up, so that it stays a bound. Code c above 0 stands
// for 2^((c - 255) / 12); 0: not measured.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace skerry {

inline uint8_t error_code(double error) {
    if (!(error > 0)) return 1; // 4e-7, the smallest
    return static_cast<uint8_t>(std::clamp(255 + std::ceil(12 * std::log2(error)), 1.0, 255.0));
}

// In units of 2^-15, rounded up, as skerry_range.flags has it.
inline uint32_t error_units(uint8_t code) {
    return code == 0 ? 0 : static_cast<uint32_t>(std::ceil(std::exp2((code - 255) / 12.0) * 32768));
}

} // namespace skerry
