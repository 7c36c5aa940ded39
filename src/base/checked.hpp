#pragma once
// Sizes that come from a caller's numbers. Each function returns false and leaves `out` alone when the exact
// result does not fit; there is no saturating or wrapping variant, so that no allocation can be smaller than
// what was meant.

#include <concepts>
#include <cstdint>
#include <utility>

namespace skerry {

template <std::integral T>
[[nodiscard]] constexpr bool checked_add(T a, T b, T *out) noexcept {
    T result{};
    if (__builtin_add_overflow(a, b, &result)) return false;
    *out = result;
    return true;
}

template <std::integral T>
[[nodiscard]] constexpr bool checked_mul(T a, T b, T *out) noexcept {
    T result{};
    if (__builtin_mul_overflow(a, b, &result)) return false;
    *out = result;
    return true;
}

constexpr bool is_power_of_two(uint64_t value) noexcept { return value != 0 && (value & (value - 1)) == 0; }

// `alignment` is a power of two.
template <std::unsigned_integral T>
[[nodiscard]] constexpr bool checked_align_up(T value, T alignment, T *out) noexcept {
    T padded{};
    if (!checked_add(value, static_cast<T>(alignment - 1), &padded)) return false;
    *out = static_cast<T>(padded & ~static_cast<T>(alignment - 1));
    return true;
}

// For sizes already known to be far from the end of the type.
template <std::unsigned_integral T>
constexpr T align_up(T value, T alignment) noexcept {
    return static_cast<T>((value + alignment - 1) & ~static_cast<T>(alignment - 1));
}

// Value-preserving conversion between integer types.
template <std::integral To, std::integral From>
[[nodiscard]] constexpr bool checked_cast(From value, To *out) noexcept {
    if (!std::in_range<To>(value)) return false;
    *out = static_cast<To>(value);
    return true;
}

// A size built in several steps, asked once at the end.
class CheckedSize {
public:
    constexpr explicit CheckedSize(uint64_t value = 0) noexcept : value_(value) {}
    constexpr CheckedSize &add(uint64_t other) noexcept {
        ok_ = ok_ && checked_add(value_, other, &value_);
        return *this;
    }
    constexpr CheckedSize &add_product(uint64_t a, uint64_t b) noexcept {
        uint64_t product = 0;
        ok_ = ok_ && checked_mul(a, b, &product) && checked_add(value_, product, &value_);
        return *this;
    }
    constexpr CheckedSize &mul(uint64_t other) noexcept {
        ok_ = ok_ && checked_mul(value_, other, &value_);
        return *this;
    }
    constexpr CheckedSize &align(uint64_t alignment) noexcept {
        ok_ = ok_ && checked_align_up(value_, alignment, &value_);
        return *this;
    }
    [[nodiscard]] constexpr bool get(uint64_t *out) const noexcept {
        if (ok_) *out = value_;
        return ok_;
    }

private:
    uint64_t value_;
    bool ok_ = true;
};

} // namespace skerry
