// SPDX-License-Identifier: MIT
#include "codec/rotation.hpp"

#include <cmath>

namespace skerry {

float rotation_norm(int32_t dim) { return static_cast<float>(1.0 / std::sqrt(double(hadamard_size(dim)))); }

void hadamard_blocks(float *row, int32_t dim) {
    const int32_t n = hadamard_size(dim);
    for (int32_t distance = 1; distance < n; distance *= 2) {
        // Distances are powers of two that divide the dimension, so pairs never leave a block.
        for (int32_t base = 0; base < dim; base += 2 * distance) {
            for (int32_t i = base; i < base + distance; ++i) {
                const float a = row[i], b = row[i + distance];
                row[i] = a + b;
                row[i + distance] = a - b;
            }
        }
    }
}

void rotate(float *row, int32_t dim) {
    if (hadamard_size(dim) == 1) return;
    const float norm = rotation_norm(dim);
    for (int32_t i = 0; i < dim; ++i)
        row[i] *= rotation_sign(i);
    hadamard_blocks(row, dim);
    for (int32_t i = 0; i < dim; ++i)
        row[i] *= norm;
}

void unrotate(float *row, int32_t dim) {
    if (hadamard_size(dim) == 1) return;
    const float norm = rotation_norm(dim);
    hadamard_blocks(row, dim);
    for (int32_t i = 0; i < dim; ++i)
        row[i] *= rotation_sign(i) * norm;
}

} // namespace skerry
