#include "base/half.hpp"

#include <cmath>
#include <doctest/doctest.h>
#include <initializer_list>
#include <limits>

using namespace skerry;

namespace {

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// Decoded from the definition of the format in double, where every step is exact.
double f16_by_definition(uint16_t half) {
    const int exponent = (half >> 10) & 0x1f;
    const int mantissa = half & 0x3ff;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_f16_nan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

} // namespace

TEST_CASE("half: all 65,536 f16 patterns widen to the value of the definition and come back") {
    int wrong_value = 0;
    int wrong_trip = 0;
    for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
        const auto half = static_cast<uint16_t>(pattern);
        const float wide = f16_to_f32(half);
        if (is_f16_nan(half)) {
            wrong_value += !std::isnan(wide);
            wrong_trip += f32_to_f16(wide) != (half | 0x200); // quiet, payload and sign kept
            continue;
        }
        if ((half & 0x7fff) == 0x7c00) {
            wrong_value += !std::isinf(wide) || std::signbit(wide) != (half >> 15 != 0);
        } else {
            wrong_value += bits_of(wide) != bits_of(static_cast<float>(f16_by_definition(half)));
        }
        wrong_trip += f32_to_f16(wide) != half;
    }
    CHECK(wrong_value == 0);
    CHECK(wrong_trip == 0);
}

#if defined(__FLT16_MANT_DIG__)
TEST_CASE("half: agrees with the compiler's _Float16 in both directions") {
    int wrong_wide = 0;
    for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
        const auto half = static_cast<uint16_t>(pattern);
        if (is_f16_nan(half)) continue;
        wrong_wide += bits_of(f16_to_f32(half)) != bits_of(static_cast<float>(std::bit_cast<_Float16>(half)));
    }
    CHECK(wrong_wide == 0);
    // Every exponent with mantissas around each rounding boundary.
    int wrong_half = 0;
    for (uint32_t high = 0; high < 0x20000; ++high) {
        for (const uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu, 0x2001u, 0x7fffu}) {
            const float value = std::bit_cast<float>((high << 15) | low);
            if (std::isnan(value)) continue;
            wrong_half += f32_to_f16(value) != std::bit_cast<uint16_t>(static_cast<_Float16>(value));
        }
    }
    CHECK(wrong_half == 0);
}
#endif

TEST_CASE("half: f32 to f16 at the ties and ends") {
    CHECK(f32_to_f16(65504.0f) == 0x7bff);
    CHECK(f32_to_f16(65519.996f) == 0x7bff);
    CHECK(f32_to_f16(65520.0f) == 0x7c00);
    CHECK(f32_to_f16(-std::numeric_limits<float>::infinity()) == 0xfc00);
    CHECK(f32_to_f16(std::ldexp(1.0f, -24)) == 0x0001);
    CHECK(f32_to_f16(std::ldexp(1.0f, -25)) == 0x0000);
    CHECK(f32_to_f16(std::nextafter(std::ldexp(1.0f, -25), 1.0f)) == 0x0001);
    CHECK(f32_to_f16(1.5f * std::ldexp(1.0f, -24)) == 0x0002);
    CHECK(f32_to_f16(1.0f + std::ldexp(1.0f, -11)) == 0x3c00);
    CHECK(f32_to_f16(1.0f + 3 * std::ldexp(1.0f, -11)) == 0x3c02);
    CHECK(f32_to_f16(std::nextafter(std::ldexp(1.0f, -14), 0.0f)) == 0x0400);
    CHECK(f32_to_f16(-0.0f) == 0x8000);
    CHECK(f32_to_f16(std::bit_cast<float>(0x7f800001u)) == 0x7e00);
}

TEST_CASE("half: bf16 round trip of all patterns and ties to even") {
    int wrong = 0;
    for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
        const auto half = static_cast<uint16_t>(pattern);
        const uint16_t expected = (half & 0x7fff) > 0x7f80 ? half | 0x40 : half;
        wrong += f32_to_bf16(bf16_to_f32(half)) != expected;
    }
    CHECK(wrong == 0);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x3f808000u)) == 0x3f80);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x3f818000u)) == 0x3f82);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x3f808001u)) == 0x3f81);
    CHECK(f32_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x7f800001u)) == 0x7fc0);
    CHECK(f32_to_bf16(std::bit_cast<float>(0x00000001u)) == 0x0000);
}
