// SPDX-License-Identifier: MIT
#pragma once

// Exact singular value decomposition of a small matrix in f64, for what needs the true factors: paper fidelity and the tests of
// the fast factorisation. One-sided Jacobi: singular values come out to full relative accuracy of the larger ones, in a fixed
// order of operations.

#include <cstddef>

namespace skerry {

// Elements of the scratch of svd_jacobi.
constexpr size_t svd_scratch_doubles(int n, int d) {
    const size_t shorter = static_cast<size_t>(n < d ? n : d), longer = static_cast<size_t>(n < d ? d : n);
    return shorter * (shorter + longer);
}

// a [n][d] = sum over i < k = min(n, d) of u[:, i] sigma[i] v[:, i]^T. u [n][k], sigma [k] descending, v [d][k], all row-major.
// Columns of a singular value of 0 are orthonormal to the others on the side of the shorter dimension and 0 on the other one.
// Finite input whose squares are finite; scratch: svd_scratch_doubles(n, d) elements.
void svd_jacobi(const double *a, int n, int d, double *u, double *sigma, double *v, double *scratch);

} // namespace skerry
