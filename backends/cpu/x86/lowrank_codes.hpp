// SPDX-License-Identifier: MIT
#pragma once

// Codes of L formats as vectors; included after the header that defines Vec, and static throughout.

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

// Sixteen codes of a row from `index`, a multiple of 16, on, as numbers without their scales. Lanes behind the row hold what follows it.
// Checked: nothing at `end`, where the part ends, or behind is read; the other form keeps a loop's accumulators in their registers.
template <skerry_format format, bool is_checked>
inline Vec lowrank_codes(const uint8_t *row, ptrdiff_t index, const uint8_t *end) {
    if constexpr (format == SKERRY_FORMAT_L32) {
        const uint8_t *const at = row + 4 * index;
        const float *const floats = reinterpret_cast<const float *>(at);
        return !is_checked || end - at >= 64 ? v_load(floats) : v_load_n(floats, static_cast<int>((end - at) / 4));
    } else if constexpr (format == SKERRY_FORMAT_L16) {
        const uint8_t *const at = row + 2 * index;
        return !is_checked || end - at >= 32 ? v_load_f16(at) : v_load_f16_n(at, static_cast<int>((end - at) / 2));
    } else if constexpr (format == SKERRY_FORMAT_L8) {
        const uint8_t *const at = row + index;
        if (!is_checked || end - at >= 16) return v_load_i8(at);
        uint8_t bytes[16] = {};
        std::memcpy(bytes, at, static_cast<size_t>(end - at));
        return v_load_i8(bytes);
    } else {
        const uint8_t *const at = row + index / 2;
        const Vec centre = v_set1(8.0f);
        if (!is_checked || end - at >= 8) return v_sub(v_load_u4(at), centre);
        uint8_t bytes[8] = {};
        std::memcpy(bytes, at, static_cast<size_t>(end - at));
        return v_sub(v_load_u4(bytes), centre);
    }
}

// Bytes of a row of `length` codes.
template <skerry_format format>
inline ptrdiff_t lowrank_row(int32_t length) {
    return format == SKERRY_FORMAT_L32   ? 4 * length
           : format == SKERRY_FORMAT_L16 ? 2 * length
           : format == SKERRY_FORMAT_L8  ? length
                                         : (length + 1) / 2;
}

} // namespace

} // namespace skerry
