// SPDX-License-Identifier: MIT
// Surprisal from logits against f64.

#include <doctest/doctest.h>

#include "base/half.hpp"
#include "policy/surprisal.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace skerry;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

double exact(const float *row, int64_t vocab, int32_t token) {
    const double largest = static_cast<double>(*std::max_element(row, row + vocab));
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i)
        sum += std::exp(static_cast<double>(row[i]) - largest);
    return largest + std::log(sum) - static_cast<double>(row[token]);
}

void check_close(float found, double wanted) {
    CHECK(std::abs(static_cast<double>(found) - wanted) <= 5e-7 + 1e-7 * wanted);
    CHECK(found >= 0);
}

SurprisalResult of_row(const std::vector<float> &row, int32_t token, float *nats) {
    const int64_t vocab = static_cast<int64_t>(row.size());
    return surprisal_rows(SKERRY_DTYPE_F32, row.data(), 1, vocab, vocab, &token, nats);
}

} // namespace

TEST_CASE("T1: surprisal of logits (1, 2, 3), and of uniform ones") {
    const float row[] = {1, 2, 3};
    const double wanted[] = {2.407606, 1.407606, 0.407606};
    for (int32_t token = 0; token < 3; ++token) {
        float nats = -1;
        CHECK(surprisal_rows(SKERRY_DTYPE_F32, row, 1, 3, 3, &token, &nats).fault == SurprisalFault::none);
        CHECK(nats == doctest::Approx(wanted[token]).epsilon(1e-6));
    }
    for (const float level : {0.0f, -7.5f, 1e4f}) {
        float nats = -1;
        CHECK(of_row({level, level, level}, 1, &nats).fault == SurprisalFault::none);
        CHECK(nats == doctest::Approx(1.098612).epsilon(1e-6));
    }
}

TEST_CASE("T1: row t - 1 goes with token t, and token 0 has none") {
    // A prompt of three tokens over two symbols: two rows count, the last one is not handed over.
    const float logits[3][2] = {{0, std::log(3.0f)}, {std::log(4.0f), 0}, {50, -50}};
    const int32_t prompt[] = {1, 1, 0};
    float nats[3] = {0, -1, -1};
    CHECK(surprisal_rows(SKERRY_DTYPE_F32, logits, 2, 2, 2, prompt + 1, nats + 1).fault == SurprisalFault::none);
    CHECK(nats[1] == doctest::Approx(std::log(4.0 / 3)).epsilon(1e-6));
    CHECK(nats[2] == doctest::Approx(std::log(5.0 / 4)).epsilon(1e-6));
}

TEST_CASE("every dtype, vocabulary and stride agrees with f64") {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal(0, 4);
    for (const int64_t vocab : {1, 2, 15, 255, 256, 257, 511, 1000, 49152, 128256}) {
        const int64_t rows = vocab > 2000 ? 2 : 5, stride = vocab + static_cast<int64_t>(rng() % 9);
        std::vector<uint16_t> half(static_cast<size_t>(rows * stride));
        std::vector<float> wide(half.size());
        std::vector<int32_t> tokens(static_cast<size_t>(rows));
        std::vector<float> nats(tokens.size());
        for (const skerry_dtype dtype : {SKERRY_DTYPE_F32, SKERRY_DTYPE_F16, SKERRY_DTYPE_BF16}) {
            for (size_t i = 0; i < wide.size(); ++i) {
                wide[i] = normal(rng) + (rng() % 1000 == 0 ? 30.0f : 0.0f);
                half[i] = dtype == SKERRY_DTYPE_F16 ? f32_to_f16(wide[i]) : f32_to_bf16(wide[i]);
                if (dtype == SKERRY_DTYPE_F16) wide[i] = f16_to_f32(half[i]);
                if (dtype == SKERRY_DTYPE_BF16) wide[i] = bf16_to_f32(half[i]);
            }
            for (int32_t &token : tokens)
                token = static_cast<int32_t>(rng() % static_cast<uint64_t>(vocab));
            tokens[0] = static_cast<int32_t>(vocab - 1);
            const void *logits = dtype == SKERRY_DTYPE_F32 ? static_cast<const void *>(wide.data()) : half.data();
            REQUIRE(surprisal_rows(dtype, logits, rows, vocab, stride, tokens.data(), nats.data()).fault == SurprisalFault::none);
            for (int64_t i = 0; i < rows; ++i)
                check_close(nats[static_cast<size_t>(i)], exact(wide.data() + i * stride, vocab, tokens[static_cast<size_t>(i)]));
        }
    }
}

TEST_CASE("a rising maximum, far logits and zero probabilities") {
    std::vector<float> row(1000);
    for (size_t i = 0; i < row.size(); ++i)
        row[i] = static_cast<float>(i) * 0.5f; // each block raises the maximum by 128
    float nats = -1;
    for (const int32_t token : {0, 255, 256, 998, 999}) {
        CHECK(of_row(row, token, &nats).fault == SurprisalFault::none);
        check_close(nats, exact(row.data(), 1000, token));
    }
    std::reverse(row.begin(), row.end());
    CHECK(of_row(row, 0, &nats).fault == SurprisalFault::none);
    check_close(nats, exact(row.data(), 1000, 0));
    // A mask in front: whole blocks of -inf before the first finite logit.
    std::fill(row.begin(), row.begin() + 600, -infinity);
    CHECK(of_row(row, 700, &nats).fault == SurprisalFault::none);
    check_close(nats, exact(row.data(), 1000, 700));
    CHECK(of_row({1e4f, -1e4f}, 1, &nats).fault == SurprisalFault::none);
    CHECK(nats == 20000);
    CHECK(of_row({1e4f, -1e4f}, 0, &nats).fault == SurprisalFault::none);
    CHECK(nats == 0);
    // Certain to within f32.
    CHECK(of_row({20, 0, 0}, 0, &nats).fault == SurprisalFault::none);
    check_close(nats, std::log1p(2 * std::exp(-20.0)));
    // A flat row as long as a vocabulary: rounding of the sums does not build up.
    std::vector<float> flat(151936, 0.1f);
    CHECK(of_row(flat, 5, &nats).fault == SurprisalFault::none);
    check_close(nats, std::log(151936.0));
}

TEST_CASE("what is not finite or out of range is reported by row and column") {
    const int64_t vocab = 700;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(), infinity}) {
        for (const int64_t column : {int64_t(0), int64_t(255), int64_t(256), vocab - 1}) {
            std::vector<float> logits(static_cast<size_t>(3 * vocab), 1.0f);
            logits[static_cast<size_t>(vocab + column)] = bad;
            logits[static_cast<size_t>(2 * vocab)] = bad;
            const int32_t tokens[] = {1, 2, 3};
            float nats[] = {-1, -1, -1};
            const SurprisalResult result = surprisal_rows(SKERRY_DTYPE_F32, logits.data(), 3, vocab, vocab, tokens, nats);
            CHECK(result.fault == SurprisalFault::logit_not_finite);
            CHECK(result.row == 1);
            CHECK(result.column == column);
            CHECK(nats[0] == doctest::Approx(std::log(700.0)));
            CHECK(nats[1] == -1);
            CHECK(nats[2] == -1);
        }
    }
    const std::vector<float> row(10, 0.0f);
    float nats = -1;
    for (const int32_t token : {-1, 10, std::numeric_limits<int32_t>::max()}) {
        const SurprisalResult result = of_row(row, token, &nats);
        CHECK(result.fault == SurprisalFault::token_out_of_range);
        CHECK(result.row == 0);
        CHECK(result.column == token);
    }
    CHECK(of_row({-infinity, 0, 1}, 0, &nats).fault == SurprisalFault::no_finite_surprisal);
    CHECK(of_row({-infinity, -infinity}, 1, &nats).fault == SurprisalFault::no_finite_surprisal);
    CHECK(of_row({3e38f, -3e38f}, 1, &nats).fault == SurprisalFault::no_finite_surprisal);
    CHECK(nats == -1);
}

TEST_CASE("negative, NaN and infinite surprisal is found") {
    const std::vector<float> good = {0, 1.5f, -0.0f, 3e38f};
    CHECK(surprisal_first_invalid(good.data(), 4) == -1);
    CHECK(surprisal_first_invalid(good.data(), 0) == -1);
    for (const float bad : {-1e-30f, std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
        std::vector<float> nats = good;
        nats[2] = bad;
        CHECK(surprisal_first_invalid(nats.data(), 4) == 2);
        CHECK(surprisal_first_invalid(nats.data(), 2) == -1);
    }
}
