// SPDX-License-Identifier: MIT
#include "codec/layout.hpp"
#include "cpu/ref/ref.hpp"

namespace skerry::ref {

int32_t supports(skerry_format format, skerry_side side, int32_t dim) {
    if (dim < 1 || (side != SKERRY_SIDE_KEY && side != SKERRY_SIDE_VALUE)) return 0;
    if (is_full_format(format) || is_c_format(format) || is_l_format(format) || format == SKERRY_FORMAT_R8) return 1;
    // Without a rotation an outlier channel would take all levels of r2 to r4.
    return is_r_format(format) && hadamard_size(dim) >= 2 ? 1 : 0;
}

// Rows of a record in f32, at least the 16 that vector versions work on; beside them a byte for each of their
// codes, or a row each for rotary tables and codes.
size_t code_scratch_bytes(int32_t dim, int32_t capacity) {
    constexpr size_t padding_channels = 32;
    const size_t channels = static_cast<size_t>(dim);
    const size_t tokens = static_cast<size_t>(capacity < r_tile_tokens ? r_tile_tokens : capacity);
    return round_up(sizeof(float) * channels * tokens + r_tile_tokens * (channels + padding_channels), place_bytes) + place_bytes;
}

} // namespace skerry::ref
