// SPDX-License-Identifier: MIT
#include "codec/layout.hpp"
#include "codec/lowrank.hpp"
#include "codec/svd.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

using namespace skerry;

namespace {

struct Svd {
    int n, d, k;
    std::vector<double> u, sigma, v;

    Svd(const std::vector<double> &a, int rows, int columns)
        : n(rows), d(columns), k(std::min(rows, columns)), u(static_cast<size_t>(n * k)), sigma(static_cast<size_t>(k)),
          v(static_cast<size_t>(d * k)) {
        std::vector<double> scratch(svd_scratch_doubles(n, d), std::nan(""));
        svd_jacobi(a.data(), n, d, u.data(), sigma.data(), v.data(), scratch.data());
    }
    double at(int t, int c) const {
        double sum = 0;
        for (int i = 0; i < k; ++i)
            sum += u[static_cast<size_t>(t * k + i)] * sigma[static_cast<size_t>(i)] * v[static_cast<size_t>(c * k + i)];
        return sum;
    }
};

double product_of_columns(const std::vector<double> &m, int rows, int k, int i, int j) {
    double sum = 0;
    for (int t = 0; t < rows; ++t)
        sum += m[static_cast<size_t>(t * k + i)] * m[static_cast<size_t>(t * k + j)];
    return sum;
}

// Two low-discrepancy sequences mixed: no two rows alike.
std::vector<double> matrix(int n, int d) {
    std::vector<double> a;
    for (int t = 0; t < n; ++t) {
        for (int c = 0; c < d; ++c)
            a.push_back(std::sin(1.7 * (t + 1) * (c + 1)) + 0.5 * std::cos(0.3 * t * t + c));
    }
    return a;
}

} // namespace

TEST_CASE("svd: factors are orthonormal and give the matrix back") {
    for (const auto &[n, d] : {std::make_pair(1, 1), std::make_pair(1, 9), std::make_pair(9, 1), std::make_pair(5, 12),
                               std::make_pair(12, 5), std::make_pair(33, 33), std::make_pair(64, 40)}) {
        CAPTURE(n);
        CAPTURE(d);
        const std::vector<double> a = matrix(n, d);
        const Svd svd(a, n, d);
        double size = 0, error = 0;
        for (int t = 0; t < n; ++t) {
            for (int c = 0; c < d; ++c) {
                const double x = a[static_cast<size_t>(t * d + c)];
                size += x * x;
                error += (x - svd.at(t, c)) * (x - svd.at(t, c));
            }
        }
        CHECK(std::sqrt(error / size) <= 1e-13);
        for (int i = 0; i < svd.k; ++i) {
            if (i > 0) CHECK(svd.sigma[static_cast<size_t>(i)] <= svd.sigma[static_cast<size_t>(i - 1)]);
            for (int j = 0; j <= i; ++j) {
                const double wanted = i == j ? 1.0 : 0.0;
                CHECK(std::abs(product_of_columns(svd.u, n, svd.k, i, j) - wanted) <= 1e-12);
                CHECK(std::abs(product_of_columns(svd.v, d, svd.k, i, j) - wanted) <= 1e-12);
            }
        }
    }
}

TEST_CASE("svd: singular values of the golden layer (T19)") {
    const auto rows = [](int first, int last, bool is_key) {
        std::vector<double> a;
        for (int t = first; t <= last; ++t) {
            for (int j = 0; j < 4; ++j)
                a.push_back(is_key ? std::sin(0.3 * (t + 1) * (j + 1)) : std::cos(0.2 * (t + 1) + 0.5 * j));
        }
        return a;
    };
    const auto check = [](const std::vector<double> &a, int n, const std::vector<double> &wanted) {
        const Svd svd(a, n, 4);
        for (size_t i = 0; i < 4; ++i)
            CHECK(std::abs(svd.sigma[i] - wanted[i]) <= 1e-6);
    };
    check(rows(4, 8, true), 5, {2.280202, 2.169840, 1.238745, 0.069590});
    check(rows(4, 8, false), 5, {2.770787, 0.844317, 0, 0});
    check(rows(10, 15, true), 6, {2.288890, 2.274270, 1.316929, 0.080358});
    check(rows(10, 15, false), 6, {3.860223, 0.853112, 0, 0});
}

TEST_CASE("svd: zeros and one direction") {
    const Svd zero(std::vector<double>(12, 0.0), 3, 4);
    for (const double s : zero.sigma)
        CHECK(s == 0);
    for (const double x : zero.v)
        CHECK(x == 0);
    for (int i = 0; i < 3; ++i)
        CHECK(product_of_columns(zero.u, 3, 3, i, i) == 1.0);

    std::vector<double> one;
    for (int i = 0; i < 12; ++i)
        one.push_back((1.0 + i / 4) * (2.0 - i % 4));
    const Svd svd(one, 3, 4);
    CHECK(svd.sigma[0] == doctest::Approx(std::sqrt(14.0 * 6.0)).epsilon(1e-12));
    CHECK(svd.sigma[1] <= 1e-14 * svd.sigma[0]);
    for (int i = 0; i < 12; ++i)
        CHECK(std::abs(svd.at(i / 4, i % 4) - one[static_cast<size_t>(i)]) <= 1e-12);
}

TEST_CASE("T12: bytes of low-rank records") {
    // One layer of 8 heads, keys and values: r (tokens + 1 + d) numbers each.
    const auto layer = [](int32_t format, int32_t tokens, int32_t rank) {
        return 8 *
               (part_bytes(format, SKERRY_SIDE_KEY, 128, tokens, 0, rank) + part_bytes(format, SKERRY_SIDE_VALUE, 128, tokens, 0, rank));
    };
    CHECK(layer(SKERRY_FORMAT_L32, 16, 16) == 148480);
    CHECK(layer(SKERRY_FORMAT_L32, 129, 32) == 528384);
    CHECK(8 * 2 * part_bytes(SKERRY_FORMAT_BF16, SKERRY_SIDE_KEY, 128, 16) == 65536);
    CHECK(8 * 2 * part_bytes(SKERRY_FORMAT_BF16, SKERRY_SIDE_KEY, 128, 129) == 528384);
    // Narrower factors keep their scales in f32.
    CHECK(part_bytes(SKERRY_FORMAT_L16, SKERRY_SIDE_KEY, 128, 64, 0, 16) == 2 * 16 * (64 + 128) + 4 * 16);
    CHECK(part_bytes(SKERRY_FORMAT_L8, SKERRY_SIDE_VALUE, 128, 64, 0, 16) == 16 * (64 + 128) + 4 * 16);
    CHECK(part_bytes(SKERRY_FORMAT_L4, SKERRY_SIDE_VALUE, 128, 64, 0, 16) == 16 * (64 + 128) / 2 + 4 * 16);
    // Rows begin at a byte, sections at four.
    CHECK(part_bytes(SKERRY_FORMAT_L4, SKERRY_SIDE_KEY, 3, 5, 0, 3) == 8 + 12 + 12);
    CHECK(part_bytes(SKERRY_FORMAT_L8, SKERRY_SIDE_VALUE, 3, 5, 0, 3) == 12 + 16 + 12);
    for (const int32_t format : {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, SKERRY_FORMAT_L4})
        CHECK(part_bytes(format, SKERRY_SIDE_KEY, 128, 64, 0, 0) == 0);
    CHECK(record_bytes(SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, 128, 64, 100, 0, 16, 12) ==
          round_up(round_up(2 * 16 * 228 + 64, 16) + 12 * 164 + 48, 64));
    CHECK(value_offset(SKERRY_FORMAT_L4, 3, 5, 3) == 32);
    CHECK(tile_capacity(SKERRY_FORMAT_L16, 100) == 100);
    CHECK(tile_key_rank(tile_ranks(17, 128)) == 17);
    CHECK(tile_value_rank(tile_ranks(17, 128)) == 128);
}

TEST_CASE("lowrank: numbers lie where the layout says") {
    // rank 3, 2 channels, 5 tokens: every code has a place of its own.
    const auto fill = [](skerry_format format, size_t bytes) {
        std::vector<uint8_t> part(bytes);
        for (size_t i = 0; i < bytes; ++i)
            part[i] = format == SKERRY_FORMAT_L4 ? static_cast<uint8_t>(i % 16 | (i * 7 + 3) % 16 << 4) : static_cast<uint8_t>(i);
        return part;
    };
    {
        const std::vector<uint8_t> bytes = fill(SKERRY_FORMAT_L8, part_bytes(SKERRY_FORMAT_L8, SKERRY_SIDE_KEY, 2, 5, 0, 3));
        const LowRankPart part(SKERRY_FORMAT_L8, SKERRY_SIDE_KEY, 2, 5, 3, bytes.data());
        CHECK(part.basis(2, 1) == 5);  // [dim][rank]
        CHECK(part.token(1, 4) == 17); // from byte 8 on: [rank][tokens]
    }
    {
        const std::vector<uint8_t> bytes = fill(SKERRY_FORMAT_L8, part_bytes(SKERRY_FORMAT_L8, SKERRY_SIDE_VALUE, 2, 5, 0, 3));
        const LowRankPart part(SKERRY_FORMAT_L8, SKERRY_SIDE_VALUE, 2, 5, 3, bytes.data());
        CHECK(part.basis(2, 1) == 5);  // [rank][dim]
        CHECK(part.token(1, 4) == 21); // from byte 8 on: [tokens][rank]
    }
    {
        const std::vector<uint8_t> bytes = fill(SKERRY_FORMAT_L4, part_bytes(SKERRY_FORMAT_L4, SKERRY_SIDE_KEY, 2, 5, 0, 3));
        const LowRankPart part(SKERRY_FORMAT_L4, SKERRY_SIDE_KEY, 2, 5, 3, bytes.data());
        CHECK(part.basis(2, 1) == 3 - 8.0f);                 // byte 3, low half
        CHECK(part.basis(1, 0) == 3 - 8.0f);                 // byte 0, high half
        CHECK(part.token(2, 3) == (11 * 7 + 3) % 16 - 8.0f); // rows of 3 bytes from byte 4 on: byte 4 + 6 + 1, high half
    }
    {
        std::vector<uint8_t> bytes(part_bytes(SKERRY_FORMAT_L16, SKERRY_SIDE_VALUE, 2, 5, 0, 3));
        const uint16_t half = 0xc100; // -2.5
        std::memcpy(bytes.data() + 2 * 3, &half, 2);
        const float scale = 0.125f;
        std::memcpy(bytes.data() + bytes.size() - 4, &scale, 4);
        const LowRankPart part(SKERRY_FORMAT_L16, SKERRY_SIDE_VALUE, 2, 5, 3, bytes.data());
        CHECK(part.basis(1, 1) == -2.5f);
        CHECK(part.scale(2) == 0.125f);
    }
}
