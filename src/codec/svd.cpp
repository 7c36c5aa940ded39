// SPDX-License-Identifier: MIT
#include "codec/svd.hpp"

#include <cmath>

namespace skerry {

namespace {

// Rows are orthogonal when the cosine of each pair is below this; the last sweep leaves less, since convergence is quadratic.
constexpr double orthogonal = 1e-15;
// Jacobi needs six to ten sweeps at these sizes; a bound keeps rounding from turning two equal values for ever.
constexpr int sweeps_at_most = 40;

double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i)
        sum += a[i] * b[i];
    return sum;
}

void rotate(double *a, double *b, int n, double c, double s) {
    for (int i = 0; i < n; ++i) {
        const double x = a[i], y = b[i];
        a[i] = c * x - s * y;
        b[i] = s * x + c * y;
    }
}

} // namespace

void svd_jacobi(const double *a, int n, int d, double *u, double *sigma, double *v, double *scratch) {
    const int k = n < d ? n : d, q = n < d ? d : n;
    const bool is_wide = n <= d;
    double *const rows = scratch;                                  // [k][q]: the shorter side's vectors, turned until they are orthogonal
    double *const turns = scratch + static_cast<ptrdiff_t>(k) * q; // [k][k]: the product of all rotations
    for (int i = 0; i < k; ++i) {
        for (int j = 0; j < q; ++j)
            rows[i * q + j] = is_wide ? a[i * d + j] : a[j * d + i];
        for (int j = 0; j < k; ++j)
            turns[i * k + j] = i == j ? 1.0 : 0.0;
    }

    bool is_turning = true;
    for (int sweep = 0; sweep < sweeps_at_most && is_turning; ++sweep) {
        is_turning = false;
        for (int i = 0; i + 1 < k; ++i) {
            for (int j = i + 1; j < k; ++j) {
                double *const x = rows + i * q, *const y = rows + j * q;
                const double alpha = dot(x, x, q), beta = dot(y, y, q), gamma = dot(x, y, q);
                if (gamma == 0 || std::abs(gamma) <= orthogonal * std::sqrt(alpha) * std::sqrt(beta)) continue;
                is_turning = true;
                const double zeta = (beta - alpha) / (2 * gamma);
                const double t = (zeta < 0 ? -1.0 : 1.0) / (std::abs(zeta) + std::hypot(1.0, zeta));
                const double c = 1 / std::sqrt(1 + t * t), s = c * t;
                rotate(x, y, q, c, s);
                rotate(turns + i * k, turns + j * k, k, c, s);
            }
        }
    }

    for (int i = 0; i < k; ++i)
        sigma[i] = std::sqrt(dot(rows + i * q, rows + i * q, q));
    // Descending, equal values in the order of their rows.
    for (int i = 0; i < k; ++i) {
        int largest = i;
        for (int j = i + 1; j < k; ++j) {
            if (sigma[j] > sigma[largest]) largest = j;
        }
        const double value = sigma[largest];
        for (int j = largest; j > i; --j)
            sigma[j] = sigma[j - 1];
        sigma[i] = value;
        for (int j = largest; j > i; --j) {
            rotate(rows + (j - 1) * q, rows + j * q, q, 0, 1);
            rotate(turns + (j - 1) * k, turns + j * k, k, 0, 1);
        }
    }

    double *const shorter = is_wide ? u : v, *const longer = is_wide ? v : u;
    for (int i = 0; i < k; ++i) {
        for (int j = 0; j < k; ++j)
            shorter[j * k + i] = turns[i * k + j];
        for (int j = 0; j < q; ++j)
            longer[j * k + i] = sigma[i] > 0 ? rows[i * q + j] / sigma[i] : 0.0;
    }
}

} // namespace skerry
