// SPDX-License-Identifier: MIT
#pragma once

// Factorisation of one small matrix, written once over 16-lane vectors; included after the header that defines Vec, and static
// throughout. No fused multiply-add and one order of additions: all versions store the same bytes.
//
// X [n][d] is a m x q matrix A or its transpose, m <= q. The leading left singular vectors of A come from its Gram matrix G = A A^T:
//   1. a pivoted Cholesky factor of G picks as many rows of A as there are vectors to find, some spare ones included, and stops at the
//      numerical rank;
//   2. block subspace iteration: two multiplications by G, orthonormalised (Golub and Van Loan, Matrix Computations, 8.2.4);
//   3. Rayleigh-Ritz on B = Q A: one-sided Jacobi on a pivoted Cholesky factor of B B^T (Veselic and Hari 1989: the factor's rows become
//      the eigenvectors, each times the root of its eigenvalue).
// Where nearly all vectors are asked for, 3 works on G itself. Squares leave nothing of singular values below 2^-11 of the largest; if
// those are asked for too, what is left of X is factorised in turn.
//
// On a given basis C, codes as they are stored, the token factors are T = X C^T (C C^T)^-1. Rows of C are near to orthogonal, being coded
// singular vectors, so C C^T needs no pivots.

#include "codec/layout.hpp"
#include "codec/lowrank.hpp"
#include "cpu/product_body.hpp"
#include "cpu/ref/search.hpp"

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

constexpr int factor_tokens = l_tile_tokens;
constexpr int power_steps = 2;
// Vectors beyond those asked for: with two multiplications the error stays within 0.3 % of the optimum on spectra that decay and
// within 1 % on white noise (docs/design/lowrank.md).
constexpr int spare_vectors(int rank) { return rank < 16 ? 8 : rank / 2; }
// Below this Jacobi on all of G is cheaper than the iteration.
constexpr int small_side = 24;
// Rounding of G, relative to its largest diagonal element.
constexpr float gram_noise = 0x1p-22f;
// Norm of a component, relative to the first, below which it holds rounding errors alone.
constexpr float component_noise = 0x1p-21f;
// Cosines of pairs that Jacobi leaves alone, and those after which one sweep was the last: convergence is quadratic.
constexpr float jacobi_square = 0x1p-42f;
constexpr float jacobi_last_square = 0x1p-20f;
// Norm of token factors on a given basis, in units of X's largest number, below which they are zeros.
constexpr float least_component = 0x1p-60f;
constexpr int jacobi_sweeps = 12;
constexpr int deflations = 4;
// The error reported is at least the one in f64.
constexpr float error_margin = 1.0f + 0x1p-12f;

struct FactorWork {
    int n, d, m, q;
    int d_pad, m_pad, q_pad;
    bool is_wide;  // A is X
    float *rows;   // [n][d_pad]: X times a power of two
    float *rest;   // [n][d_pad]: what earlier passes have not factorised
    float *gram;   // [m][m_pad]
    float *chosen; // [m][m_pad]
    float *basis;  // [m][m_pad]: Q
    float *turned; // [m][m_pad]
    float *image;  // [m][q_pad]: B
    float *left;   // [m][m_pad]: left singular vectors, of all passes
    float *right;  // [m][q_pad]: right ones, times the singular values at first
    float *folds;  // [16][lanes]
    float sigma[factor_tokens];
    float scale[factor_tokens];
};

// Flattened, as below: a copy of a shared inline function compiled here could be the one that the linker keeps.
[[gnu::flatten]] size_t factor_pad(int n) { return round_up(static_cast<size_t>(n), factor_lanes); }

size_t factor_carve(FactorWork &w, int dim, int count, void *memory) {
    w.n = count;
    w.d = dim;
    w.is_wide = count <= dim;
    w.m = w.is_wide ? count : dim;
    w.q = w.is_wide ? dim : count;
    const size_t m = static_cast<size_t>(w.m), d_pad = factor_pad(dim), m_pad = factor_pad(w.m), q_pad = factor_pad(w.q);
    w.d_pad = static_cast<int>(d_pad);
    w.m_pad = static_cast<int>(m_pad);
    w.q_pad = static_cast<int>(q_pad);
    size_t used = 0;
    const auto take = [&](size_t floats) {
        float *const at = memory == nullptr ? nullptr : static_cast<float *>(memory) + used;
        used += floats;
        return at;
    };
    w.rows = take(static_cast<size_t>(count) * d_pad);
    w.rest = take(static_cast<size_t>(count) * d_pad);
    w.gram = take(m * m_pad);
    w.chosen = take(m * m_pad);
    w.basis = take(m * m_pad);
    w.turned = take(m * m_pad);
    w.image = take(m * q_pad);
    w.left = take(m * m_pad);
    w.right = take(m * q_pad);
    w.folds = take(factor_lanes * factor_lanes);
    return sizeof(float) * used;
}

// ---------------------------------------------------------------------------------------------------------------- products

// Lane-wise products of 2 rows of a and 8 of b, then their sums: out [2][8].
void dot_block(const float *const *a, const float *const *b, int width, float *folds, float *const *out) {
    // One row of a stays in its register while four of b come straight from memory.
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 8; j += 4) {
            Vec acc[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
            for (int c = 0; c < width; c += factor_lanes) {
                const Vec x = v_load(a[i] + c);
                for (int k = 0; k < 4; ++k)
                    acc[k] = v_add(acc[k], v_mul(x, v_load(b[j + k] + c)));
            }
            for (int k = 0; k < 4; ++k)
                v_store(folds + factor_lanes * (8 * i + j + k), acc[k]);
        }
    }
    float sums[factor_lanes];
    v_store(sums, v_fold16(folds));
    std::memcpy(out[0], sums, 8 * sizeof(float));
    std::memcpy(out[1], sums + 8, 8 * sizeof(float));
}

// out [rows_a][rows_b] = a b^T, rows of `width` lanes; the lanes of out behind rows_b are 0. Symmetric: a is b, and only one half
// is computed.
void dot_rows(const float *a, int rows_a, const float *b, int rows_b, int width, ptrdiff_t a_stride, ptrdiff_t b_stride, float *out,
              ptrdiff_t out_stride, float *folds, bool is_symmetric) {
    for (int i = 0; i < rows_a; i += 2) {
        const int second = i + 1 < rows_a ? i + 1 : i;
        const float *const x[2] = {a + a_stride * i, a + a_stride * second};
        for (int j = is_symmetric ? i / 8 * 8 : 0; j < rows_b; j += 8) {
            const float *y[8];
            for (int k = 0; k < 8; ++k)
                y[k] = b + b_stride * (j + k < rows_b ? j + k : rows_b - 1);
            // Rows have room for whole vectors.
            float *const to[2] = {out + out_stride * i + j, out + out_stride * second + j};
            dot_block(x, y, width, folds, to);
        }
    }
    const int pad = static_cast<int>(factor_pad(rows_b));
    for (int i = 0; i < rows_a; ++i) {
        float *const row = out + out_stride * i;
        if (is_symmetric) {
            for (int j = 0; j < i; ++j)
                row[j] = out[out_stride * j + i];
        }
        for (int j = rows_b; j < pad; ++j)
            row[j] = 0;
    }
}

float square_of(const float *row, int width, float *folds) {
    Vec acc = v_zero();
    for (int c = 0; c < width; c += factor_lanes)
        acc = v_add(acc, v_mul(v_load(row + c), v_load(row + c)));
    v_store(folds, acc);
    float sum = 0;
    for (int i = 0; i < factor_lanes; ++i)
        sum += folds[i];
    return sum;
}

void multiply_row(float *row, int width, float by) {
    for (int c = 0; c < width; c += factor_lanes)
        v_store(row + c, v_mul(v_load(row + c), v_set1(by)));
}

float root(float x) { return v_first_of(v_sqrt(v_set1(x))); }

// ------------------------------------------------------------------------------------------------------- orthogonal vectors

template <int vectors>
void less_rows_block(const float *from, const float *factors, ptrdiff_t factor_step, int count, const float *rows, ptrdiff_t stride,
                     float *to) {
    Vec x[static_cast<size_t>(vectors)];
    for (int v = 0; v < vectors; ++v)
        x[v] = v_load(from + factor_lanes * v);
    for (int j = 0; j < count; ++j) {
        const Vec f = v_set1(factors[factor_step * j]);
        for (int v = 0; v < vectors; ++v)
            x[v] = v_sub(x[v], v_mul(f, v_load(rows + stride * j + factor_lanes * v)));
    }
    for (int v = 0; v < vectors; ++v)
        v_store(to + factor_lanes * v, x[v]);
}

// to = from - the sum of factor * row, in the order of the rows.
void less_rows(const float *from, const float *factors, ptrdiff_t factor_step, int count, const float *rows, ptrdiff_t stride, int width,
               float *to) {
    int c = 0;
    for (; c + 4 * factor_lanes <= width; c += 4 * factor_lanes)
        less_rows_block<4>(from + c, factors, factor_step, count, rows + c, stride, to + c);
    for (; c < width; c += factor_lanes)
        less_rows_block<1>(from + c, factors, factor_step, count, rows + c, stride, to + c);
}

// Rows of a factor of the positive matrix `gram` [size][stride]: gram = sum of row^T row, the largest remaining diagonal element
// first. Returns how many rows carry more than rounding.
int pivoted_cholesky(const float *gram, int size, ptrdiff_t stride, int most, float *out) {
    float diagonal[factor_tokens];
    int pivots[factor_tokens];
    const int width = static_cast<int>(factor_pad(size));
    float noise = 0;
    for (int i = 0; i < width; ++i) {
        diagonal[i] = i < size ? gram[stride * i + i] : 0;
        noise = diagonal[i] > noise ? diagonal[i] : noise;
    }
    noise *= gram_noise;
    int rows = 0;
    for (; rows < most; ++rows) {
        Vec largest = v_load(diagonal);
        for (int c = factor_lanes; c < width; c += factor_lanes)
            largest = v_max(largest, v_load(diagonal + c));
        const float pivot = v_largest(largest);
        if (!(pivot > noise)) break;
        int at = 0;
        while (diagonal[at] != pivot)
            ++at;
        float *const row = out + stride * rows;
        float inverse = root(pivot);
        inverse = 1.0f / inverse;
        less_rows(gram + stride * at, out + at, stride, rows, out, stride, width, row);
        for (int c = 0; c < width; c += factor_lanes) {
            const Vec x = v_mul(v_load(row + c), v_set1(inverse));
            v_store(row + c, x);
            v_store(diagonal + c, v_sub(v_load(diagonal + c), v_mul(x, x)));
        }
        // What earlier pivots took is 0 but for rounding.
        for (int j = 0; j < rows; ++j)
            row[pivots[j]] = 0;
        pivots[rows] = at;
        for (int j = 0; j <= rows; ++j)
            diagonal[pivots[j]] = -1;
    }
    return rows;
}

// y minus its parts along `count` orthonormal rows.
void project_out(const float *rows, int count, ptrdiff_t stride, int width, float *y, float *folds) {
    float parts[factor_tokens];
    for (int j = 0; j < count; j += factor_lanes) {
        for (int k = 0; k < factor_lanes && j + k < count; k += 4) {
            // Sums of rows behind the last are not used.
            const float *row[4];
            for (int i = 0; i < 4; ++i)
                row[i] = rows + stride * (j + k + i < count ? j + k + i : count - 1);
            Vec acc[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
            for (int c = 0; c < width; c += factor_lanes) {
                const Vec x = v_load(y + c);
                for (int i = 0; i < 4; ++i)
                    acc[i] = v_add(acc[i], v_mul(x, v_load(row[i] + c)));
            }
            for (int i = 0; i < 4; ++i)
                v_store(folds + factor_lanes * (k + i), acc[i]);
        }
        v_store(parts + j, v_fold16(folds));
    }
    less_rows(y, parts, 1, count, rows, stride, width, y);
}

// Gram-Schmidt, `passes` times per row: twice is enough (Giraud, Langou, Rozloznik 2005). Drops rows that lie in the span of those
// before them and returns how many are left.
int orthonormalise(float *rows, int count, ptrdiff_t stride, int width, int passes, float *folds) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
        float *const y = rows + stride * kept;
        if (kept != i) std::memcpy(y, rows + stride * i, static_cast<size_t>(width) * sizeof(float));
        const float before = square_of(y, width, folds);
        for (int pass = 0; pass < passes; ++pass)
            project_out(rows, kept, stride, width, y, folds);
        const float after = square_of(y, width, folds);
        // A remainder of f32 rounding has no direction.
        if (!(after > 0x1p-40f * before)) continue;
        multiply_row(y, width, 1.0f / root(after));
        ++kept;
    }
    return kept;
}

// Turns `count` rows of `width` lanes until they are orthogonal; pairs of one round share no row, so that their angles are computed
// side by side. squares [count]: the rows' squared norms.
void orthogonalise(float *rows, int count, ptrdiff_t stride, int width, float *squares, float *folds) {
    int seat[factor_tokens + 1];
    const int seats = (count + 1) / 2 * 2, pairs = seats / 2;
    for (int i = 0; i < seats; ++i)
        seat[i] = i;
    for (int sweep = 0; sweep < jacobi_sweeps; ++sweep) {
        for (int i = 0; i < count; ++i)
            squares[i] = square_of(rows + stride * i, width, folds);
        Vec largest = v_zero();
        for (int round = 0; round + 1 < seats; ++round) {
            for (int first = 0; first < pairs; first += factor_lanes) {
                const int here = pairs - first < factor_lanes ? pairs - first : factor_lanes;
                float a[factor_lanes], b[factor_lanes], cosine[factor_lanes], sine[factor_lanes];
                float *x[factor_lanes], *y[factor_lanes];
                for (int k = 0; k < factor_lanes; ++k) {
                    Vec acc = v_zero();
                    a[k] = b[k] = 1;
                    x[k] = y[k] = nullptr;
                    const int i = k < here ? seat[first + k] : count, j = k < here ? seat[seats - 1 - first - k] : count;
                    if (i < count && j < count) {
                        x[k] = rows + stride * i;
                        y[k] = rows + stride * j;
                        for (int c = 0; c < width; c += factor_lanes)
                            acc = v_add(acc, v_mul(v_load(x[k] + c), v_load(y[k] + c)));
                        a[k] = squares[i];
                        b[k] = squares[j];
                    }
                    v_store(folds + factor_lanes * k, acc);
                }
                const Vec alpha = v_load(a), beta = v_load(b), gamma = v_fold16(folds), one = v_set1(1.0f);
                const Vec product = v_mul(alpha, beta), square = v_mul(gamma, gamma), least = v_mul(product, v_set1(jacobi_square));
                largest = v_max(largest, v_below(least, square, v_div(square, product), v_zero()));
                // Where nothing is to be turned, the quotient may be anything: its lanes are not used.
                const Vec zeta = v_div(v_sub(beta, alpha), v_add(gamma, gamma));
                const Vec size = v_add(v_abs(zeta), v_sqrt(v_add(one, v_mul(zeta, zeta))));
                const Vec magnitude = v_div(one, size);
                const Vec turn = v_below(zeta, v_zero(), v_sub(v_zero(), magnitude), magnitude);
                const Vec tangent = v_below(least, square, turn, v_zero());
                const Vec c = v_div(one, v_sqrt(v_add(one, v_mul(tangent, tangent))));
                v_store(cosine, c);
                v_store(sine, v_mul(c, tangent));
                const Vec moved = v_mul(tangent, v_below(least, square, gamma, v_zero()));
                v_store(a, v_max(v_sub(alpha, moved), v_zero()));
                v_store(b, v_max(v_add(beta, moved), v_zero()));
                for (int k = 0; k < here; ++k) {
                    if (x[k] == nullptr || sine[k] == 0) continue;
                    const Vec vc = v_set1(cosine[k]), vs = v_set1(sine[k]);
                    for (int t = 0; t < width; t += factor_lanes) {
                        const Vec p = v_load(x[k] + t), r = v_load(y[k] + t);
                        v_store(x[k] + t, v_sub(v_mul(vc, p), v_mul(vs, r)));
                        v_store(y[k] + t, v_add(v_mul(vs, p), v_mul(vc, r)));
                    }
                    squares[seat[first + k]] = a[k];
                    squares[seat[seats - 1 - first - k]] = b[k];
                }
            }
            // All but the first move on by one.
            const int last = seat[seats - 1];
            for (int i = seats - 1; i > 1; --i)
                seat[i] = seat[i - 1];
            if (seats > 1) seat[1] = last;
        }
        if (!(v_largest(largest) > jacobi_last_square)) break;
    }
    for (int i = 0; i < count; ++i)
        squares[i] = square_of(rows + stride * i, width, folds);
}

// Unit eigenvectors of `gram` in descending order of their eigenvalues, at most `most` of them: rows of out.
int eigenvectors(FactorWork &w, const float *gram, int size, int most, float *work, float *out) {
    const int width = static_cast<int>(factor_pad(size));
    const int rank = pivoted_cholesky(gram, size, w.m_pad, size, work);
    float squares[factor_tokens];
    orthogonalise(work, rank, w.m_pad, width, squares, w.folds);
    const int found = rank < most ? rank : most;
    for (int k = 0; k < found; ++k) {
        int best = 0;
        for (int i = 1; i < rank; ++i) {
            if (squares[i] > squares[best]) best = i;
        }
        const float inverse = 1.0f / root(squares[best]);
        squares[best] = -1;
        for (int c = 0; c < width; c += factor_lanes)
            v_store(out + static_cast<ptrdiff_t>(w.m_pad) * k + c,
                    v_mul(v_load(work + static_cast<ptrdiff_t>(w.m_pad) * best + c), v_set1(inverse)));
    }
    return found;
}

// ------------------------------------------------------------------------------------------------------------ one factorisation

// vectors [count][m_pad] A -> out [count][q_pad].
void times_matrix(const FactorWork &w, const float *x, const float *vectors, int count, float *out) {
    if (w.is_wide) {
        add_rows(count, w.m, w.q_pad, vectors, w.m_pad, 1, x, w.d_pad, out, w.q_pad);
    } else {
        dot_rows(vectors, count, x, w.q, w.m_pad, w.m_pad, w.d_pad, out, w.q_pad, w.folds, false);
    }
}

// Left singular vectors of x and their images, at most `most`, from index `done` on. Returns how many.
int factor_pass(FactorWork &w, const float *x, int done, int most) {
    const ptrdiff_t m_pad = w.m_pad;
    if (w.is_wide) {
        dot_rows(x, w.m, x, w.m, w.q_pad, w.d_pad, w.d_pad, w.gram, m_pad, w.folds, true);
    } else {
        add_rows(w.m, w.q, w.m_pad, x, 1, w.d_pad, x, w.d_pad, w.gram, m_pad);
    }
    float *const left = w.left + m_pad * done, *const right = w.right + static_cast<ptrdiff_t>(w.q_pad) * done;
    const int wanted = most + spare_vectors(most);
    int found = 0;
    if (w.m <= small_side || 4 * wanted > 3 * w.m) {
        found = eigenvectors(w, w.gram, w.m, most, w.chosen, left);
        times_matrix(w, x, left, found, right);
    } else {
        int p = pivoted_cholesky(w.gram, w.m, m_pad, wanted, w.basis);
        p = orthonormalise(w.basis, p, m_pad, w.m_pad, 1, w.folds);
        for (int step = 0; step < power_steps; ++step) {
            add_rows(p, w.m, w.m_pad, w.basis, m_pad, 1, w.gram, m_pad, w.turned, m_pad);
            float *const swapped = w.basis;
            w.basis = w.turned;
            w.turned = swapped;
            p = orthonormalise(w.basis, p, m_pad, w.m_pad, step + 1 < power_steps ? 1 : 2, w.folds);
        }
        times_matrix(w, x, w.basis, p, w.image);
        dot_rows(w.image, p, w.image, p, w.q_pad, w.q_pad, w.q_pad, w.gram, m_pad, w.folds, true);
        found = eigenvectors(w, w.gram, p, most, w.chosen, w.turned);
        add_rows(found, p, w.m_pad, w.turned, m_pad, 1, w.basis, m_pad, left, m_pad);
        add_rows(found, p, w.q_pad, w.turned, m_pad, 1, w.image, w.q_pad, right, w.q_pad);
    }
    for (int k = 0; k < found; ++k)
        w.sigma[done + k] = root(square_of(right + static_cast<ptrdiff_t>(w.q_pad) * k, w.q_pad, w.folds));
    return found;
}

// rest = from - the components [begin, end).
void subtract_components(FactorWork &w, const float *from, int begin, int end) {
    const float *const tokens = (w.is_wide ? w.left : w.right), *const channels = (w.is_wide ? w.right : w.left);
    const ptrdiff_t token_stride = w.is_wide ? w.m_pad : w.q_pad;
    for (int t = 0; t < w.n; ++t) {
        const ptrdiff_t row = static_cast<ptrdiff_t>(t) * w.d_pad;
        less_rows(from + row, tokens + token_stride * begin + t, token_stride, end - begin,
                  channels + static_cast<ptrdiff_t>(w.d_pad) * begin, w.d_pad, w.d_pad, w.rest + row);
    }
}

// --------------------------------------------------------------------------------------------------------------- storing

// Sums of products of a row with its levels, and of the levels with themselves.
struct LevelSums {
    float product, squares;
};

Vec levels_of(Vec x, float inverse_step, float most) {
    const Vec size = v_min(v_round(v_mul(v_abs(x), v_set1(inverse_step))), v_set1(most));
    return v_below(x, v_zero(), v_sub(v_zero(), size), size);
}

LevelSums level_sums(const float *row, int width, float inverse_step, float most, float *folds) {
    Vec product = v_zero(), squares = v_zero();
    for (int c = 0; c < width; c += factor_lanes) {
        const Vec x = v_load(row + c), level = levels_of(x, inverse_step, most);
        product = v_add(product, v_mul(x, level));
        squares = v_add(squares, v_mul(level, level));
    }
    float sums[factor_lanes];
    for (int i = 0; i < factor_lanes; ++i)
        v_store(folds + factor_lanes * i, i == 0 ? product : i == 1 ? squares : v_zero());
    v_store(sums, v_fold16(folds));
    return {sums[0], sums[1]};
}

// Turns a unit row into the numbers its codes stand for and returns the scale that brings them back: the least-squares one, under which
// the squared error is 1 - product^2 / squares.
float code_row(skerry_format format, float *row, int length, float *folds) {
    const int width = static_cast<int>(factor_pad(length));
    if (format == SKERRY_FORMAT_L32) return 1.0f;
    if (format == SKERRY_FORMAT_L16) {
        uint16_t half[factor_lanes];
        for (int c = 0; c < width; c += factor_lanes) {
            v_store_f16(half, v_load(row + c));
            v_store(row + c, v_load_f16(half));
        }
        return 1.0f;
    }
    Vec largest = v_zero();
    for (int c = 0; c < width; c += factor_lanes)
        largest = v_max(largest, v_abs(v_load(row + c)));
    // Four bits gain by holding back the largest elements; on a row of few large ones they must not.
    constexpr float shares[] = {1.0f, 0.875f, 0.75f, 0.625f, 0.5f};
    const float most = format == SKERRY_FORMAT_L8 ? 127.0f : 7.0f, whole = most / v_largest(largest);
    float inverse = whole;
    LevelSums sums = level_sums(row, width, whole, most, folds);
    for (int i = 1; i < 5 && format == SKERRY_FORMAT_L4; ++i) {
        const LevelSums other = level_sums(row, width, whole / shares[i], most, folds);
        if (other.product * other.product * sums.squares > sums.product * sums.product * other.squares) {
            inverse = whole / shares[i];
            sums = other;
        }
    }
    for (int c = 0; c < width; c += factor_lanes)
        v_store(row + c, levels_of(v_load(row + c), inverse, most));
    return sums.product / sums.squares;
}

// Components [begin, end) become codes and their scales.
void code_components(FactorWork &w, skerry_format format, int begin, int end) {
    for (int k = begin; k < end; ++k) {
        float *const left = w.left + static_cast<ptrdiff_t>(w.m_pad) * k, *const right = w.right + static_cast<ptrdiff_t>(w.q_pad) * k;
        multiply_row(right, w.q_pad, 1.0f / w.sigma[k]);
        const float left_scale = code_row(format, left, w.m, w.folds), right_scale = code_row(format, right, w.q, w.folds);
        w.scale[k] = w.sigma[k] * left_scale * right_scale;
    }
}

// Squared distance of X from what `rank` coded components decode to, in the decoder's arithmetic.
float coded_error(FactorWork &w, int rank) {
    const float *const tokens = w.is_wide ? w.left : w.right, *const channels = w.is_wide ? w.right : w.left;
    const ptrdiff_t token_stride = w.is_wide ? w.m_pad : w.q_pad;
    constexpr int block = product_rows;
    float factors[block * factor_tokens];
    Vec sum = v_zero();
    for (int t = 0; t < w.n; t += block) {
        const int here = w.n - t < block ? w.n - t : block;
        for (int i = 0; i < here; ++i) {
            for (int j = 0; j < rank; ++j)
                factors[factor_tokens * i + j] = tokens[token_stride * j + t + i] * w.scale[j];
        }
        float *const decoded = w.rest;
        add_rows(here, rank, w.d_pad, factors, factor_tokens, 1, channels, w.d_pad, decoded, w.d_pad);
        for (int i = 0; i < here; ++i) {
            for (int c = 0; c < w.d_pad; c += factor_lanes) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(w.d_pad) * i + c;
                const Vec apart = v_sub(v_load(w.rows + static_cast<ptrdiff_t>(w.d_pad) * t + at), v_load(decoded + at));
                sum = v_add(sum, v_mul(apart, apart));
            }
        }
    }
    float lane[factor_lanes], total = 0;
    v_store(lane, sum);
    for (int i = 0; i < factor_lanes; ++i)
        total += lane[i];
    return total;
}

// codes[i] of a row of exact numbers, to elements `stride` apart of an array whose rows may be bit-packed: element (row, i) or (i, row).
struct CodeTarget {
    uint8_t *base;
    size_t row_bytes;
    bool is_along; // codes of one component lie next to each other
};

// Where a basis lies, as CodeTarget has it.
struct CodeSource {
    const uint8_t *base;
    size_t row_bytes;
    bool is_along;
};

// The codes of one component as the numbers that they stand for, and zeros behind them.
void load_component(skerry_format format, const CodeSource &from, int length, int component, float *row) {
    const size_t k = static_cast<size_t>(component);
    const int width = static_cast<int>(factor_pad(length));
    for (int first = 0; first < width; first += factor_lanes) {
        uint16_t half[factor_lanes] = {};
        for (int i = 0; i < factor_lanes; ++i) {
            const size_t at = static_cast<size_t>(first + i);
            row[at] = 0;
            if (first + i >= length) continue;
            const uint8_t *const line = from.base + (from.is_along ? k : at) * from.row_bytes;
            const size_t element = from.is_along ? at : k;
            if (format == SKERRY_FORMAT_L32) {
                std::memcpy(row + at, line + 4 * element, 4);
            } else if (format == SKERRY_FORMAT_L16) {
                std::memcpy(half + i, line + 2 * element, 2);
            } else if (format == SKERRY_FORMAT_L8) {
                row[at] = static_cast<float>(static_cast<int8_t>(line[element]));
            } else {
                row[at] = static_cast<float>(line[element / 2] >> (4 * (element % 2)) & 15) - l4_centre;
            }
        }
        if (format == SKERRY_FORMAT_L16) v_store(row + first, v_load_f16(half));
    }
}

void store_component(skerry_format format, const float *row, int length, int component, const CodeTarget &to) {
    const size_t k = static_cast<size_t>(component);
    for (int first = 0; first < length; first += factor_lanes) {
        const int here = length - first < factor_lanes ? length - first : factor_lanes;
        uint16_t half[factor_lanes];
        if (format == SKERRY_FORMAT_L16) v_store_f16(half, v_load(row + first));
        for (int i = 0; i < here; ++i) {
            const size_t at = static_cast<size_t>(first + i);
            uint8_t *const line = to.base + (to.is_along ? k : at) * to.row_bytes;
            const size_t element = to.is_along ? at : k;
            const float value = row[at];
            if (format == SKERRY_FORMAT_L32) {
                std::memcpy(line + 4 * element, &value, 4);
            } else if (format == SKERRY_FORMAT_L16) {
                std::memcpy(line + 2 * element, half + i, 2);
            } else if (format == SKERRY_FORMAT_L8) {
                line[element] = static_cast<uint8_t>(static_cast<int8_t>(value));
            } else {
                const uint8_t code = static_cast<uint8_t>(value + l4_centre);
                uint8_t &byte = line[element / 2];
                byte = static_cast<uint8_t>(element % 2 == 0 ? code : byte | code << 4);
            }
        }
    }
}

[[gnu::flatten]] void store_part(const FactorWork &w, const skerry_factor_params &params, int rank, float unit, uint8_t *part) {
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    const skerry_format format = params.format;
    std::memset(part, 0, part_bytes(format, params.side, w.d, w.n, 0, rank));
    const CodeTarget basis{part, l_row_bytes(format, is_key ? rank : w.d), !is_key};
    const CodeTarget tokens{part + l_token_offset(format, params.side, w.d, rank), l_row_bytes(format, is_key ? w.n : rank), is_key};
    uint8_t *const scales = part + l_scale_offset(format, params.side, w.d, w.n, rank);
    for (int k = 0; k < rank; ++k) {
        const float *const left = w.left + static_cast<ptrdiff_t>(w.m_pad) * k, *const right =
                                                                                    w.right + static_cast<ptrdiff_t>(w.q_pad) * k;
        store_component(format, w.is_wide ? left : right, w.n, k, tokens);
        store_component(format, w.is_wide ? right : left, w.d, k, basis);
        const float scale = w.scale[k] * unit;
        std::memcpy(scales + 4 * static_cast<size_t>(k), &scale, 4);
    }
}

// --------------------------------------------------------------------------------------------------------------- the kernel

float factor_power_of_two(int exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
}

// X times the power of two that brings its largest magnitude into [1, 2), so that squares stay in range; returns the exponent taken
// out, and false for a matrix of zeros.
bool load_matrix(FactorWork &w, const float *rows, int *exponent) {
    const Vec limit = v_set1(ref::row_limit);
    Vec largest = v_zero();
    for (int t = 0; t < w.n; ++t) {
        float *const to = w.rows + static_cast<ptrdiff_t>(t) * w.d_pad;
        std::memcpy(to, rows + static_cast<ptrdiff_t>(t) * w.d, static_cast<size_t>(w.d) * sizeof(float));
        for (int c = w.d; c < w.d_pad; ++c)
            to[c] = 0;
        for (int c = 0; c < w.d_pad; c += factor_lanes) {
            const Vec x = v_max(v_min(v_load(to + c), limit), v_sub(v_zero(), limit));
            v_store(to + c, x);
            largest = v_max(largest, v_abs(x));
        }
    }
    const float peak = v_largest(largest);
    if (!(peak > 0)) return false;
    uint32_t bits = 0;
    std::memcpy(&bits, &peak, 4);
    const int found = static_cast<int>(bits >> 23) - 127;
    *exponent = found > ref::row_exponent_least ? found : ref::row_exponent_least;
    const float shrink = factor_power_of_two(-*exponent);
    for (int t = 0; t < w.n; ++t)
        multiply_row(w.rows + static_cast<ptrdiff_t>(t) * w.d_pad, w.d_pad, shrink);
    return true;
}

// Squared norm of what `rank` components leave.
float tail_of(const FactorWork &w, float norm, int rank) {
    for (int k = 0; k < rank; ++k)
        norm -= w.sigma[k] * w.sigma[k];
    return norm;
}

// Components that hold nothing but rounding leave; at least one stays.
int drop_noise(FactorWork &w, int found) {
    int kept = 0;
    for (int k = 0; k < found; ++k) {
        if (k > 0 && w.sigma[k] <= component_noise * w.sigma[0]) continue;
        if (kept != k) {
            w.sigma[kept] = w.sigma[k];
            std::memcpy(w.left + static_cast<ptrdiff_t>(w.m_pad) * kept, w.left + static_cast<ptrdiff_t>(w.m_pad) * k,
                        sizeof(float) * static_cast<size_t>(w.m_pad));
            std::memcpy(w.right + static_cast<ptrdiff_t>(w.q_pad) * kept, w.right + static_cast<ptrdiff_t>(w.q_pad) * k,
                        sizeof(float) * static_cast<size_t>(w.q_pad));
        }
        ++kept;
    }
    return kept;
}

// Token factors of X on the basis of `part`, coded.
[[gnu::flatten]] void project_on_basis(FactorWork &w, const skerry_factor_params &params, const uint8_t *part) {
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    const int rank = params.basis_rank;
    float *const channels = w.is_wide ? w.right : w.left, *const tokens = w.is_wide ? w.left : w.right;
    const int token_stride = w.is_wide ? w.m_pad : w.q_pad;
    const CodeSource from{part, l_row_bytes(params.format, is_key ? rank : w.d), !is_key};
    for (int k = 0; k < rank; ++k)
        load_component(params.format, from, w.d, k, channels + static_cast<ptrdiff_t>(w.d_pad) * k);

    // C C^T = U^T U, then U^T Z = C X^T and U T = Z. A row of U that rounding leaves nothing of is a component that others make up for.
    dot_rows(channels, rank, channels, rank, w.d_pad, w.d_pad, w.d_pad, w.gram, w.m_pad, w.folds, true);
    const int width = static_cast<int>(factor_pad(rank));
    float inverse[factor_tokens];
    for (int k = 0; k < rank; ++k) {
        float *const row = w.chosen + static_cast<ptrdiff_t>(w.m_pad) * k;
        const float *const gram = w.gram + static_cast<ptrdiff_t>(w.m_pad) * k;
        less_rows(gram, w.chosen + k, w.m_pad, k, w.chosen, w.m_pad, width, row);
        const float pivot = row[k];
        inverse[k] = pivot > gram_noise * gram[k] ? 1.0f / root(pivot) : 0.0f;
        multiply_row(row, width, inverse[k]);
    }
    dot_rows(channels, rank, w.rows, w.n, w.d_pad, w.d_pad, w.d_pad, tokens, token_stride, w.folds, false);
    for (int k = 0; k < rank; ++k) {
        float *const row = tokens + static_cast<ptrdiff_t>(token_stride) * k;
        less_rows(row, w.chosen + k, w.m_pad, k, tokens, token_stride, token_stride, row);
        multiply_row(row, token_stride, inverse[k]);
    }
    for (int k = rank - 1; k >= 0; --k) {
        float *const row = tokens + static_cast<ptrdiff_t>(token_stride) * k;
        less_rows(row, w.chosen + static_cast<ptrdiff_t>(w.m_pad) * k + k + 1, 1, rank - 1 - k, row + token_stride, token_stride,
                  token_stride, row);
        multiply_row(row, token_stride, inverse[k]);
    }
    for (int k = 0; k < rank; ++k) {
        float *const row = tokens + static_cast<ptrdiff_t>(token_stride) * k;
        const float size = root(square_of(row, token_stride, w.folds));
        w.scale[k] = 0;
        if (size > least_component) {
            multiply_row(row, token_stride, 1.0f / size);
            w.scale[k] = size * code_row(params.format, row, w.n, w.folds);
        } else {
            std::memset(row, 0, static_cast<size_t>(token_stride) * sizeof(float));
        }
    }
}

void factorise_matrix(const skerry_factor_params &params, const float *rows, uint8_t *part, skerry_factor_result *result, void *scratch) {
    FactorWork w;
    factor_carve(w, params.dim, params.count, scratch);
    result->rank = 0;
    result->error = 0;
    int exponent = 0;
    if (!load_matrix(w, rows, &exponent)) return;
    float norm = 0;
    for (int t = 0; t < w.n; ++t)
        norm += square_of(w.rows + static_cast<ptrdiff_t>(t) * w.d_pad, w.d_pad, w.folds);
    if (params.basis != nullptr) {
        project_on_basis(w, params, static_cast<const uint8_t *>(params.basis));
        const float error = coded_error(w, params.basis_rank);
        store_part(w, params, params.basis_rank, factor_power_of_two(exponent), part);
        result->rank = params.basis_rank;
        result->error = root(error / norm) * error_margin;
        return;
    }
    const int most = params.max_rank < w.m ? params.max_rank : w.m;

    const float bound = params.error_bound > 0 ? params.error_bound * params.error_bound * norm : 0;
    int found = factor_pass(w, w.rows, 0, most);
    for (int pass = 1; pass < deflations && found < most && (bound == 0 || tail_of(w, norm, found) > bound); ++pass) {
        // Later passes see less than the first left over, so their rounding is as much smaller.
        subtract_components(w, w.rows, 0, found);
        float left_over = 0;
        for (int t = 0; t < w.n; ++t)
            left_over += square_of(w.rest + static_cast<ptrdiff_t>(t) * w.d_pad, w.d_pad, w.folds);
        if (!(left_over > component_noise * component_noise * norm)) break;
        const int more = factor_pass(w, w.rest, found, most - found);
        if (more == 0) break;
        found += more;
    }
    found = drop_noise(w, found);

    int rank = found;
    if (bound > 0) {
        float tail = norm;
        for (rank = 0; rank < found && tail > bound; ++rank)
            tail -= w.sigma[rank] * w.sigma[rank];
        rank = rank > 0 ? rank : 1;
    }
    code_components(w, params.format, 0, rank);
    float error = coded_error(w, rank);
    while (bound > 0 && rank < found && error * (error_margin * error_margin) > bound) {
        // Coding adds what it adds now, or more: the next rank to try is the smallest that can do.
        float tail = tail_of(w, norm, rank);
        const float coding = error > tail ? error - tail : 0;
        int next = rank;
        do {
            tail -= w.sigma[next] * w.sigma[next];
            ++next;
        } while (next < found && tail + coding > bound);
        code_components(w, params.format, rank, next);
        rank = next;
        error = coded_error(w, rank);
    }
    store_part(w, params, rank, factor_power_of_two(exponent), part);
    result->rank = rank;
    result->error = root(error / norm) * error_margin;
}

} // namespace

} // namespace skerry
