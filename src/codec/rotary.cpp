#include "codec/rotary.hpp"

#include <cmath>

namespace skerry {

namespace {

template <typename Pair>
void for_pairs(const RotaryGeometry &geometry, float *row, Pair pair) {
    const size_t half = geometry.dims / 2;
    const bool split = geometry.pairing == RotaryPairing::half_split;
    for (size_t i = 0; i < half; ++i) {
        pair(i, split ? row[i] : row[2 * i], split ? row[i + half] : row[2 * i + 1]);
    }
}

} // namespace

bool rotary_supports(const RotaryGeometry &geometry, uint32_t d) {
    return geometry.dims != 0 && geometry.dims % 2 == 0 && geometry.dims <= d &&
           geometry.inverse_frequencies != nullptr && std::isfinite(geometry.attention_factor) &&
           geometry.attention_factor > 0;
}

// Cosine and sine are taken in f64 and rounded once, so C libraries that differ in the last bit agree here.
void rotary_table(const RotaryGeometry &geometry, uint64_t position, float *table) {
    const size_t half = geometry.dims / 2;
    for (size_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position) * geometry.inverse_frequencies[i];
        table[i] = static_cast<float>(std::cos(double(angle))) * geometry.attention_factor;
        table[half + i] = static_cast<float>(std::sin(double(angle))) * geometry.attention_factor;
    }
}

void rotary_rotate(const RotaryGeometry &geometry, const float *table, float *row) {
    const float *const sines = table + geometry.dims / 2;
    for_pairs(geometry, row, [&](size_t i, float &x, float &y) {
        const float a = x, b = y;
        x = a * table[i] - b * sines[i];
        y = b * table[i] + a * sines[i];
    });
}

void rotary_unrotate(const RotaryGeometry &geometry, const float *table, float *row) {
    const float *const sines = table + geometry.dims / 2;
    const float square = geometry.attention_factor * geometry.attention_factor;
    for_pairs(geometry, row, [&](size_t i, float &x, float &y) {
        const float a = x, b = y;
        x = (a * table[i] + b * sines[i]) / square;
        y = (b * table[i] - a * sines[i]) / square;
    });
}

} // namespace skerry
