// SPDX-License-Identifier: MIT
#pragma once

// Products of small matrices over 16-lane vectors; included after the header that defines Vec, and static throughout. The including file
// defines product_rows x product_vectors, the accumulators that its registers hold: they change no bit of a result.

#include <cstddef>

namespace skerry {

namespace {

constexpr int factor_lanes = 16;

template <int rows, int vectors>
void add_rows_block(const float *left, ptrdiff_t left_row, ptrdiff_t left_step, int steps, const float *right, ptrdiff_t right_stride,
                    float *out, ptrdiff_t out_stride) {
    Vec acc[static_cast<size_t>(rows)][static_cast<size_t>(vectors)];
    for (int i = 0; i < rows; ++i) {
        for (int v = 0; v < vectors; ++v)
            acc[i][v] = v_zero();
    }
    for (int k = 0; k < steps; ++k) {
        Vec x[static_cast<size_t>(vectors)];
        for (int v = 0; v < vectors; ++v)
            x[v] = v_load(right + right_stride * k + factor_lanes * v);
        for (int i = 0; i < rows; ++i) {
            const Vec f = v_set1(left[left_row * i + left_step * k]);
            for (int v = 0; v < vectors; ++v)
                acc[i][v] = v_add(acc[i][v], v_mul(f, x[v]));
        }
    }
    for (int i = 0; i < rows; ++i) {
        for (int v = 0; v < vectors; ++v)
            v_store(out + out_stride * i + factor_lanes * v, acc[i][v]);
    }
}

// out [rows][width] = left [rows][steps] right [steps][width], in the order of the steps; width in lanes, element (i, k) of left at
// i * left_row + k * left_step.
void add_rows(int rows, int steps, int width, const float *left, ptrdiff_t left_row, ptrdiff_t left_step, const float *right,
              ptrdiff_t right_stride, float *out, ptrdiff_t out_stride) {
    constexpr int step_rows = product_rows, step = product_vectors;
    int i = 0;
    for (; i + step_rows <= rows; i += step_rows) {
        const float *const from = left + left_row * i;
        float *const to = out + out_stride * i;
        int c = 0;
        for (; c + step * factor_lanes <= width; c += step * factor_lanes)
            add_rows_block<step_rows, step>(from, left_row, left_step, steps, right + c, right_stride, to + c, out_stride);
        for (; c < width; c += factor_lanes)
            add_rows_block<step_rows, 1>(from, left_row, left_step, steps, right + c, right_stride, to + c, out_stride);
    }
    for (; i < rows; ++i) {
        for (int c = 0; c < width; c += factor_lanes)
            add_rows_block<1, 1>(left + left_row * i, left_row, left_step, steps, right + c, right_stride, out + out_stride * i + c,
                                 out_stride);
    }
}

} // namespace

} // namespace skerry
