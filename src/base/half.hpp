#pragma once
// 16-bit floats as bit patterns. Rounding is to nearest, ties to even, like the vector units' conversions, so
// that every implementation of a kernel stores the same bytes.

#include <bit>
#include <cstdint>

namespace skerry {

constexpr float f16_to_f32(uint16_t half) noexcept {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0x1fu) {
        // A signalling NaN comes out quiet, as VCVTPH2PS and FCVT do it.
        const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
        return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
    }
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    if (mantissa == 0) return std::bit_cast<float>(sign);
    // Subnormal: value is mantissa * 2^-24, which every f32 represents as a normal number.
    const uint32_t shift = static_cast<uint32_t>(std::countl_zero(mantissa)) - 21u;
    mantissa = (mantissa << shift) & 0x3ffu;
    return std::bit_cast<float>(sign | ((113u - shift) << 23) | (mantissa << 13));
}

constexpr uint16_t f32_to_f16(float value) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) { // 65,520 is the tie above the largest f16, and goes to infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) { // 2^-14, the smallest normal f16
        half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude > 0x33000000u) { // 2^-25 is the tie between zero and the smallest subnormal
        const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t shift = 126u - (magnitude >> 23);
        const uint32_t below = significand & ((1u << shift) - 1u);
        const uint32_t tie = 1u << (shift - 1u);
        half = significand >> shift;
        if (below > tie || (below == tie && (half & 1u) != 0)) half += 1;
    }
    return static_cast<uint16_t>(sign | half);
}

constexpr float bf16_to_f32(uint16_t half) noexcept {
    return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

constexpr uint16_t f32_to_bf16(float value) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    // Truncating a NaN could leave an infinity, so the quiet bit is set.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

} // namespace skerry
