#pragma once

// Rotary position embedding of a row of one head, forwards and back. Angles are position * inverse frequency
// in f32, as the models' own tables are: a key is un-rotated by the angle it was rotated with.

#include <cstddef>
#include <cstdint>

namespace skerry {

enum class RotaryPairing : uint8_t {
    half_split,  // channel i goes with i + dims / 2
    interleaved, // channel 2 i goes with 2 i + 1
};

struct RotaryGeometry {
    uint32_t dims = 0; // even, at most d; channels from dims on pass through
    RotaryPairing pairing = RotaryPairing::half_split;
    float attention_factor = 1.0f;              // multiplies both cosine and sine (YaRN)
    const float *inverse_frequencies = nullptr; // dims / 2
};

bool rotary_supports(const RotaryGeometry &geometry, uint32_t d);

// Cosines, then sines, dims / 2 of each, the attention factor included: `table` holds dims floats. One table
// serves all heads of a token.
void rotary_table(const RotaryGeometry &geometry, uint64_t position, float *table);

void rotary_rotate(const RotaryGeometry &geometry, const float *table, float *row);

// The opposite angle over the square of the attention factor: rotating put the factor in once, the table does
// it again.
void rotary_unrotate(const RotaryGeometry &geometry, const float *table, float *row);

} // namespace skerry
