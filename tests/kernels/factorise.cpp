// SPDX-License-Identifier: MIT
#include "code_case.hpp"

#include "codec/lowrank.hpp"
#include "codec/svd.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

namespace {

using namespace code_case;

constexpr skerry_format l_formats[] = {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, SKERRY_FORMAT_L4};
constexpr skerry_side sides[] = {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE};

struct Spectrum {
    std::vector<double> u, sigma, v;
    int32_t k;
};

Spectrum spectrum_of(const std::vector<float> &rows, int32_t n, int32_t d) {
    Spectrum s;
    s.k = std::min(n, d);
    const size_t k = static_cast<size_t>(s.k);
    s.u.resize(static_cast<size_t>(n) * k);
    s.v.resize(static_cast<size_t>(d) * k);
    s.sigma.resize(k);
    std::vector<double> scratch(svd_scratch_doubles(n, d));
    const std::vector<double> exact(rows.begin(), rows.end());
    svd_jacobi(exact.data(), n, d, s.u.data(), s.sigma.data(), s.v.data(), scratch.data());
    return s;
}

// Relative error of the best approximation of a rank.
double best_error(const Spectrum &s, int32_t rank) {
    double rest = 0, all = 0;
    for (int32_t i = 0; i < s.k; ++i) {
        const double square = s.sigma[static_cast<size_t>(i)] * s.sigma[static_cast<size_t>(i)];
        all += square;
        if (i >= rank) rest += square;
    }
    return std::sqrt(rest / all);
}

// Singular values i^-power.
std::vector<float> decaying(uint64_t seed, int32_t n, int32_t d, double power) {
    const Spectrum s = spectrum_of(normals(seed, static_cast<size_t>(n * d)), n, d);
    std::vector<float> rows;
    const size_t k = static_cast<size_t>(s.k);
    for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
        for (size_t c = 0; c < static_cast<size_t>(d); ++c) {
            double sum = 0;
            for (size_t i = 0; i < k; ++i)
                sum += s.u[t * k + i] * s.v[c * k + i] * std::pow(static_cast<double>(i + 1), -power);
            rows.push_back(static_cast<float>(sum));
        }
    }
    return rows;
}

// As keys are: a mean several times as large as what moves about it, channels of very different size, neighbours alike.
std::vector<float> key_like(uint64_t seed, int32_t n, int32_t d) {
    Numbers numbers(seed);
    std::vector<float> rows(static_cast<size_t>(n * d));
    for (int32_t c = 0; c < d; ++c) {
        const float size = std::exp(1.2f * numbers.normal()), mean = 3 * size * numbers.normal();
        float state = numbers.normal();
        for (int32_t t = 0; t < n; ++t) {
            state = 0.8f * state + 0.6f * numbers.normal();
            rows[static_cast<size_t>(t * d + c)] = mean + size * state;
        }
    }
    return rows;
}

struct Made {
    skerry_factor_result result;
    std::vector<uint8_t> part; // of the rank that the result names
    std::vector<float> decoded;
    double error; // of what it decodes to
};

struct Request {
    int32_t n, d, max_rank;
    float bound;
    skerry_format format;
    skerry_side side;
};

std::vector<float> decode_part(const skerry_kernels *kernels, const Request &request, int32_t rank, const uint8_t *part) {
    Setting setting(request.format, request.side, request.d, request.n, request.n);
    setting.params.epoch = nullptr;
    setting.params.rank = rank;
    const Guarded rows = decode(kernels, setting, part);
    std::vector<float> decoded(setting.elements());
    std::memcpy(decoded.data(), rows.data(), rows.size());
    return decoded;
}

Made factorise(const skerry_kernels *kernels, const Request &request, const std::vector<float> &rows, const Made *given = nullptr) {
    const int32_t most = std::min({given != nullptr ? given->result.rank : request.max_rank, request.n, request.d});
    Guarded part(part_bytes(request.format, request.side, request.d, request.n, 0, most));
    const size_t bytes = kernels->factorise_scratch_bytes(request.d, request.n);
    // Whatever the scratch holds, NaN included, shows in no bit.
    Guarded scratch(round_up(bytes, 64) + 64, 0xff);
    uint8_t *const aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
    skerry_factor_params params{};
    params.dim = request.d;
    params.count = request.n;
    params.max_rank = request.max_rank;
    params.error_bound = request.bound;
    params.format = request.format;
    params.side = request.side;
    params.basis = given != nullptr ? given->part.data() : nullptr;
    params.basis_rank = given != nullptr ? given->result.rank : 0;
    Made made{};
    kernels->factorise(&params, rows.data(), part.data(), &made.result, aligned);
    CHECK(part.intact());
    bool is_within = true;
    for (uint8_t *at = aligned + bytes; at < scratch.data() + scratch.size(); ++at)
        is_within = is_within && *at == 0xff;
    CHECK(is_within);
    REQUIRE(made.result.rank >= 0);
    REQUIRE(made.result.rank <= most);
    made.part.assign(part.data(), part.data() + part_bytes(request.format, request.side, request.d, request.n, 0, made.result.rank));
    made.decoded = decode_part(cpu_kernels(0), request, made.result.rank, made.part.data());
    made.error = relative_error(rows.data(), made.decoded.data(), rows.size());
    return made;
}

Made factorise(const Request &request, const std::vector<float> &rows) { return factorise(cpu_kernels(cpu_detect()), request, rows); }

// On the basis of `given`, made from other rows.
Made factorise_on(const Request &request, const std::vector<float> &rows, const Made &given) {
    return factorise(cpu_kernels(cpu_detect()), request, rows, &given);
}

size_t basis_bytes(const Request &request, const Made &made) {
    return l_token_offset(request.format, request.side, request.d, made.result.rank);
}

// Relative error that the rows have at best on a basis as it decodes to, by elimination on the normal equations in f64.
double best_error_on(const Request &request, const std::vector<float> &rows, const Made &given) {
    const LowRankPart part(request.format, request.side, request.d, 1, given.result.rank, given.part.data());
    const size_t r = static_cast<size_t>(given.result.rank), d = static_cast<size_t>(request.d);
    std::vector<double> orthogonal; // Gram-Schmidt, twice
    for (size_t k = 0; k < r; ++k) {
        std::vector<double> row(d);
        for (size_t c = 0; c < d; ++c)
            row[c] = static_cast<double>(part.basis(static_cast<int32_t>(k), static_cast<int32_t>(c)));
        const auto norm = [&] {
            double sum = 0;
            for (const double x : row)
                sum += x * x;
            return std::sqrt(sum);
        };
        const double size = norm();
        for (int pass = 0; pass < 2; ++pass) {
            for (size_t j = 0; j < orthogonal.size() / d; ++j) {
                double along = 0;
                for (size_t c = 0; c < d; ++c)
                    along += row[c] * orthogonal[j * d + c];
                for (size_t c = 0; c < d; ++c)
                    row[c] -= along * orthogonal[j * d + c];
            }
        }
        const double left = norm();
        if (!(left > 1e-9 * size)) continue;
        for (const double x : row)
            orthogonal.push_back(x / left);
    }
    double all = 0, kept = 0;
    for (size_t t = 0; t < rows.size() / d; ++t) {
        for (size_t c = 0; c < d; ++c)
            all += static_cast<double>(rows[t * d + c]) * static_cast<double>(rows[t * d + c]);
        for (size_t j = 0; j < orthogonal.size() / d; ++j) {
            double along = 0;
            for (size_t c = 0; c < d; ++c)
                along += static_cast<double>(rows[t * d + c]) * orthogonal[j * d + c];
            kept += along * along;
        }
    }
    return std::sqrt(std::max(all - kept, 0.0) / all);
}

bool claim_holds(const Made &made) { return made.result.error >= made.error && made.result.error <= 1.001 * made.error + 1e-7; }

} // namespace

TEST_CASE("factorise: every level stores the bytes of the reference") {
    uint64_t seed = 0;
    for (const int32_t d : {1, 3, 16, 64, 80, 100, 128, 256}) {
        for (const int32_t n : {1, 2, 5, 16, 37, 64, 128}) {
            ++seed;
            const std::vector<float> rows = seed % 2 == 0 ? key_like(seed, n, d) : normals(seed, static_cast<size_t>(n * d));
            const skerry_format format = l_formats[seed % 4];
            const float bound = seed % 3 == 0 ? 0.3f : 0.0f;
            const Request request{n, d, static_cast<int32_t>(1 + seed * 7 % 40), bound, format, sides[seed % 5 % 2]};
            const Made expected = factorise(cpu_kernels(0), request, rows);
            CHECK(claim_holds(expected));
            for (const skerry_kernels *kernels : levels()) {
                CAPTURE(kernels->name);
                CAPTURE(d);
                CAPTURE(n);
                const Made made = factorise(kernels, request, rows);
                CHECK(made.result.rank == expected.result.rank);
                CHECK(made.result.error == expected.result.error);
                CHECK(made.part == expected.part);
            }
        }
    }
}

TEST_CASE("factorise: on a given basis every level stores the bytes of the reference, that basis among them") {
    uint64_t seed = 500;
    for (const int32_t d : {1, 3, 16, 64, 80, 100, 128, 256}) {
        for (const int32_t n : {1, 2, 5, 16, 37, 64, 128}) {
            ++seed;
            const skerry_format format = l_formats[seed % 4];
            const Request request{n, d, static_cast<int32_t>(1 + seed * 7 % 40), 0, format, sides[seed % 5 % 2]};
            const Made given = factorise(cpu_kernels(0), request, key_like(seed, n, d));
            const std::vector<float> rows = seed % 2 == 0 ? key_like(seed + 1000, n, d) : normals(seed, static_cast<size_t>(n * d));
            const Made expected = factorise(cpu_kernels(0), request, rows, &given);
            CAPTURE(d);
            CAPTURE(n);
            CAPTURE(format);
            CHECK(expected.result.rank == given.result.rank);
            CHECK(claim_holds(expected));
            const size_t bytes = basis_bytes(request, given);
            REQUIRE(expected.part.size() >= bytes);
            CHECK(std::equal(given.part.begin(), given.part.begin() + static_cast<ptrdiff_t>(bytes), expected.part.begin()));
            for (const skerry_kernels *kernels : levels()) {
                CAPTURE(kernels->name);
                const Made made = factorise(kernels, request, rows, &given);
                CHECK(made.result.rank == expected.result.rank);
                CHECK(made.result.error == expected.result.error);
                CHECK(made.part == expected.part);
            }
        }
    }
}

TEST_CASE("factorise: on a given basis no token factors come nearer") {
    struct Size {
        int32_t n, d, rank;
    };
    // Coding the token factors adds what coding rows of their length adds.
    const double coding[] = {1e-6, 4e-4, 1.1e-2, 0.15};
    for (const Size size : {Size{64, 128, 16}, Size{64, 64, 16}, Size{128, 64, 24}, Size{20, 80, 8}, Size{128, 128, 40}}) {
        for (size_t f = 0; f < 4; ++f) {
            for (const skerry_side side : sides) {
                CAPTURE(size.n);
                CAPTURE(l_formats[f]);
                const Request request{size.n, size.d, size.rank, 0, l_formats[f], side};
                const std::vector<float> rows = key_like(3, size.n, size.d);
                const Made own = factorise(request, rows);
                // On a basis of its own the rows are as near as before, on one of like rows and of unlike ones as near as they can be.
                CHECK(factorise_on(request, rows, own).error <= own.error * 1.002 + 1e-7);
                for (const std::vector<float> &other :
                     {key_like(3, size.n + 9, size.d), normals(7, static_cast<size_t>(size.n * size.d))}) {
                    Request source = request;
                    source.n = static_cast<int32_t>(other.size()) / size.d;
                    if (source.n > 128) source.n = 128;
                    const Made given = factorise(source, {other.begin(), other.begin() + source.n * size.d});
                    const Made made = factorise_on(request, rows, given);
                    const double best = best_error_on(request, rows, given);
                    CHECK(made.error >= best * 0.9999 - 1e-7);
                    CHECK(made.error <= std::sqrt(best * best + coding[f] * coding[f]) * 1.0005 + 1e-6);
                }
            }
        }
    }
}

TEST_CASE("factorise: a given basis need not be orthogonal") {
    const int32_t n = 40, d = 48, rank = 9;
    for (const skerry_side side : sides) {
        const Request request{n, d, rank, 0, SKERRY_FORMAT_L32, side};
        const std::vector<float> rows = normals(31, static_cast<size_t>(n * d));
        Made given = factorise(request, normals(32, static_cast<size_t>(n * d)));
        std::vector<float> basis(static_cast<size_t>(rank * d));
        std::memcpy(basis.data(), given.part.data(), 4 * basis.size());
        // Each component leans on the one before it, and grows.
        const auto at = [&](int32_t k, int32_t c) -> float & {
            return basis[static_cast<size_t>(side == SKERRY_SIDE_KEY ? c * rank + k : k * d + c)];
        };
        for (int32_t k = 1; k < rank; ++k) {
            for (int32_t c = 0; c < d; ++c)
                at(k, c) += 1.5f * at(k - 1, c);
        }
        std::memcpy(given.part.data(), basis.data(), 4 * basis.size());
        const Made made = factorise_on(request, rows, given);
        CHECK(made.error <= best_error_on(request, rows, given) * 1.0002);
        CHECK(claim_holds(made));
    }
}

TEST_CASE("factorise: on a given basis zeros, equal components, a direction it lacks and numbers at the end of the range") {
    const int32_t n = 20, d = 64, rank = 6;
    const size_t elements = static_cast<size_t>(n * d);
    for (const skerry_format format : l_formats) {
        for (const skerry_side side : sides) {
            CAPTURE(format);
            const Request request{n, d, rank, 0, format, side};
            // Rows in the first 32 channels alone.
            std::vector<float> half = normals(21, elements);
            for (size_t i = 0; i < elements; ++i) {
                if (i % 64 >= 32) half[i] = 0;
            }
            const Made given = factorise(request, half);
            const Made zero = factorise_on(request, std::vector<float>(elements, 0.0f), given);
            CHECK(zero.result.rank == 0);
            CHECK(zero.result.error == 0);
            CHECK(zero.part.empty());

            std::vector<float> other = normals(22, elements);
            for (size_t i = 0; i < elements; ++i) {
                if (i % 64 < 32) other[i] = 0;
            }
            const Made apart = factorise_on(request, other, given);
            CHECK(apart.result.rank == rank);
            CHECK(apart.error == doctest::Approx(1.0).epsilon(1e-4));
            CHECK(claim_holds(apart));

            // The second component is the first once more: nothing is lost, nothing grows.
            Made twice = given;
            const size_t row = l_row_bytes(format, side == SKERRY_SIDE_KEY ? rank : d);
            if (side == SKERRY_SIDE_VALUE) {
                std::copy_n(twice.part.begin(), row, twice.part.begin() + static_cast<ptrdiff_t>(row));
            } else {
                for (size_t c = 0; c < static_cast<size_t>(d); ++c) {
                    uint8_t *codes = twice.part.data() + c * row;
                    if (format == SKERRY_FORMAT_L4) {
                        codes[0] = static_cast<uint8_t>((codes[0] & 15) * 17);
                    } else {
                        const size_t each = row / rank;
                        std::memcpy(codes + each, codes, each);
                    }
                }
            }
            const std::vector<float> rows = normals(23, elements);
            const Made made = factorise_on(request, rows, twice);
            CHECK(made.result.rank == rank);
            CHECK(claim_holds(made));
            CHECK(made.error <= best_error_on(request, rows, twice) * 1.01);
            for (const float size : {1e30f, 1e-30f, 1e-38f}) {
                std::vector<float> scaled = half;
                for (float &x : scaled)
                    x *= size;
                const Made far = factorise_on(request, scaled, given);
                bool is_finite = std::isfinite(far.result.error);
                for (const float x : far.decoded)
                    is_finite = is_finite && std::isfinite(x);
                CHECK(is_finite);
                if (size > 1e-35f) CHECK(far.error <= given.error * 1.01);
            }
        }
    }
}

TEST_CASE("factorise: the error is within 1 % of the best of its rank") {
    struct Size {
        int32_t n, d, rank;
    };
    for (const Size size : {Size{64, 128, 16}, Size{64, 64, 16}, Size{128, 128, 16}, Size{128, 64, 8}, Size{32, 128, 8}, Size{100, 80, 24},
                            Size{64, 128, 32}, Size{8, 64, 3}}) {
        for (uint64_t seed = 1; seed <= 3; ++seed) {
            for (const bool is_key_like : {false, true}) {
                const std::vector<float> rows = is_key_like ? key_like(seed, size.n, size.d) : decaying(seed, size.n, size.d, 0.8);
                const double best = best_error(spectrum_of(rows, size.n, size.d), size.rank);
                for (const skerry_format format : {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16}) {
                    const Made made = factorise({size.n, size.d, size.rank, 0, format, SKERRY_SIDE_KEY}, rows);
                    CAPTURE(size.n);
                    CAPTURE(size.d);
                    CHECK(made.result.rank == size.rank);
                    CHECK(made.error <= 1.01 * best);
                    CHECK(made.error >= 0.999999 * best);
                }
            }
        }
    }
}

TEST_CASE("factorise: coding costs what the format says") {
    // Components of equal size: the error is that of the codes alone.
    const int32_t n = 24, d = 128;
    const std::vector<float> rows = normals(3, static_cast<size_t>(n * d));
    const double bounds[] = {1e-5, 4e-4, 1.1e-2, 0.2};
    double previous = 0;
    for (size_t i = 0; i < 4; ++i) {
        const Made made = factorise({n, d, n, 0, l_formats[i], SKERRY_SIDE_VALUE}, rows);
        CHECK(made.error <= bounds[i]);
        CHECK(made.error > 10 * previous); // and each narrower format costs more
        previous = made.error;
    }
}

TEST_CASE("factorise: the error told is true for every span length") {
    for (int32_t n = 1; n <= 128; ++n) {
        const int32_t d = n % 3 == 0 ? 128 : n % 3 == 1 ? 64 : 40;
        const std::vector<float> rows = key_like(static_cast<uint64_t>(n), n, d);
        for (const skerry_format format : l_formats) {
            for (const skerry_side side : sides) {
                const Made made = factorise({n, d, 12, 0, format, side}, rows);
                CAPTURE(n);
                CAPTURE(format);
                CHECK(claim_holds(made));
            }
        }
    }
}

TEST_CASE("factorise: a bound is met by the smallest rank") {
    for (const float bound : {0.5f, 0.2f, 0.1f, 0.05f, 0.02f}) {
        for (const skerry_format format : l_formats) {
            const std::vector<float> rows = decaying(5, 64, 128, 1.5);
            const Made made = factorise({64, 128, 40, bound, format, SKERRY_SIDE_KEY}, rows);
            CAPTURE(bound);
            CAPTURE(format);
            CHECK(claim_holds(made));
            if (format == SKERRY_FORMAT_L4 && bound < 0.2f) {
                // Four bits cannot; the error says so.
                CHECK(made.result.rank == 40);
                CHECK(made.result.error > bound);
                continue;
            }
            CHECK(made.result.error <= bound);
            if (made.result.rank == 1) continue;
            const Made less = factorise({64, 128, made.result.rank - 1, 0, format, SKERRY_SIDE_KEY}, rows);
            CHECK(less.result.error > bound);
        }
    }
}

TEST_CASE("T10: the rank is the smallest of tokens, channels and the limit, and a full rank gives the rows back") {
    struct Size {
        int32_t n, d, most, rank;
    };
    for (const Size size : {Size{4, 128, 32, 4}, Size{40, 128, 32, 32}, Size{1, 128, 32, 1}, Size{16, 128, 32, 16}, Size{64, 8, 32, 8},
                            Size{64, 64, 128, 64}, Size{128, 64, 128, 64}, Size{64, 128, 64, 64}, Size{3, 2, 5, 2}}) {
        for (const skerry_side side : sides) {
            for (const bool is_key_like : {false, true}) {
                const std::vector<float> rows =
                    is_key_like ? key_like(9, size.n, size.d) : normals(9, static_cast<size_t>(size.n * size.d));
                const Made made = factorise({size.n, size.d, size.most, 0, SKERRY_FORMAT_L32, side}, rows);
                CAPTURE(size.n);
                CAPTURE(size.d);
                CHECK(made.result.rank == size.rank);
                if (size.most >= std::min(size.n, size.d)) CHECK(made.error <= 1e-5);
            }
        }
    }
}

TEST_CASE("factorise: a wide spectrum is kept to its end") {
    // Singular values fall by 2^16 in all: their squares leave f32.
    const int32_t n = 48, d = 64;
    const Spectrum s = spectrum_of(normals(17, static_cast<size_t>(n * d)), n, d);
    std::vector<float> rows(static_cast<size_t>(n * d));
    for (size_t t = 0; t < 48; ++t) {
        for (size_t c = 0; c < 64; ++c) {
            double sum = 0;
            for (size_t i = 0; i < 48; ++i)
                sum += s.u[t * 48 + i] * s.v[c * 48 + i] * std::exp2(-16.0 * static_cast<double>(i) / 47);
            rows[t * 64 + c] = static_cast<float>(sum);
        }
    }
    CHECK(factorise({n, d, n, 0, SKERRY_FORMAT_L32, SKERRY_SIDE_KEY}, rows).error <= 1e-5);
    const Made made = factorise({n, d, n, 1e-4f, SKERRY_FORMAT_L32, SKERRY_SIDE_KEY}, rows);
    CHECK(made.result.error <= 1e-4f);
    CHECK(made.result.rank < n);
}

TEST_CASE("factorise: zeros, one direction, equal rows and numbers at the end of the range") {
    const int32_t n = 20, d = 64;
    const size_t elements = static_cast<size_t>(n * d);
    for (const skerry_format format : l_formats) {
        for (const skerry_side side : sides) {
            CAPTURE(format);
            const Request request{n, d, 16, 0, format, side};
            const Made zero = factorise(request, std::vector<float>(elements, 0.0f));
            CHECK(zero.result.rank == 0);
            CHECK(zero.result.error == 0);
            CHECK(zero.part.empty());
            CHECK(zero.decoded == std::vector<float>(elements, 0.0f));

            std::vector<float> one(elements), equal(elements), two(elements);
            const std::vector<float> a = normals(4, elements), b = normals(5, static_cast<size_t>(n));
            for (size_t i = 0; i < elements; ++i) {
                const size_t t = i / static_cast<size_t>(d), c = i % static_cast<size_t>(d);
                one[i] = a[c] * b[t];
                equal[i] = a[c];
                two[i] = t % 2 == 0 ? a[c] : a[c + 64];
            }
            const double coding = format == SKERRY_FORMAT_L32   ? 1e-6
                                  : format == SKERRY_FORMAT_L16 ? 5e-4
                                  : format == SKERRY_FORMAT_L8  ? 0.02
                                                                : 0.2;
            for (const auto &[rows, rank] : {std::make_pair(&one, 1), std::make_pair(&equal, 1), std::make_pair(&two, 2)}) {
                const Made made = factorise(request, *rows);
                CHECK(made.result.rank == rank);
                CHECK(made.error <= coding);
                CHECK(claim_holds(made));
            }
            for (const float size : {1e30f, 1e-30f, 1e-38f}) {
                std::vector<float> rows = a;
                for (float &x : rows)
                    x *= size;
                const Made made = factorise(request, rows);
                bool is_finite = std::isfinite(made.result.error);
                for (const float x : made.decoded)
                    is_finite = is_finite && std::isfinite(x);
                CHECK(is_finite);
                CHECK(made.result.rank == 16);
                if (size > 1e-35f) CHECK(made.result.error < 0.5f);
            }
            std::vector<float> spike(elements, 0.0f);
            spike[77] = -3.0f;
            const Made made = factorise(request, spike);
            CHECK(made.result.rank == 1);
            CHECK(made.error <= coding);
        }
    }
}

TEST_CASE("factorise: parts decode alike on every level, and nothing behind them is read") {
    uint64_t seed = 100;
    for (const skerry_format format : l_formats) {
        for (const skerry_side side : sides) {
            for (const int32_t d : {1, 3, 16, 40, 64, 128, 256}) {
                for (const int32_t n : {1, 7, 16, 50, 128}) {
                    for (const int32_t rank : {1, 5, 16, 33}) {
                        const Request request{n, d, rank, 0, format, side};
                        const Made made = factorise(request, normals(++seed, static_cast<size_t>(n * d)));
                        // The very end of an allocation: the sanitizer build sees a read too far.
                        const std::vector<uint8_t> part(made.part);
                        for (const skerry_kernels *kernels : levels()) {
                            CAPTURE(kernels->name);
                            CAPTURE(n);
                            CAPTURE(d);
                            const std::vector<float> decoded = decode_part(kernels, request, made.result.rank, part.data());
                            CHECK(std::memcmp(decoded.data(), made.decoded.data(), 4 * decoded.size()) == 0);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("factorise: the fast version runs where there is one") {
    for (const skerry_kernels *kernels : levels()) {
        CHECK((kernels->factorise != cpu_kernels(0)->factorise));
        CHECK((kernels->factorise_scratch_bytes == cpu_kernels(0)->factorise_scratch_bytes));
    }
    for (const skerry_format format : l_formats) {
        CHECK(cpu_kernels(0)->supports(format, SKERRY_SIDE_KEY, 1) == 1);
        CHECK(cpu_kernels(0)->supports(format, SKERRY_SIDE_VALUE, 80) == 1);
        CHECK(cpu_kernels(0)->supports(format, SKERRY_SIDE_KEY, 0) == 0);
    }
    CHECK(cpu_kernels(0)->supports(SKERRY_FORMAT_L4 + 1, SKERRY_SIDE_KEY, 64) == 0);
}
