// SPDX-License-Identifier: MIT
#include "attend_scene.hpp"

#include "codec/epoch.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

using namespace scene;

const std::vector<skerry_format> full_formats = {SKERRY_FORMAT_F32, SKERRY_FORMAT_F16, SKERRY_FORMAT_BF16};
const std::vector<skerry_format> r_formats = {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3, SKERRY_FORMAT_R4, SKERRY_FORMAT_R8};
const std::vector<skerry_format> c_formats = {SKERRY_FORMAT_C2, SKERRY_FORMAT_C4};
const std::vector<skerry_format> l_formats = {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, SKERRY_FORMAT_L4};
const std::vector<int32_t> dims = {1, 3, 8, 10, 16, 64, 80, 96, 128, 256};

std::vector<skerry_format> all_formats() {
    std::vector<skerry_format> all = full_formats;
    all.insert(all.end(), r_formats.begin(), r_formats.end());
    all.insert(all.end(), c_formats.begin(), c_formats.end());
    all.insert(all.end(), l_formats.begin(), l_formats.end());
    return all;
}

bool offered(skerry_format format, int32_t key_dim, int32_t value_dim) {
    return skerry::ref::supports(format, SKERRY_SIDE_KEY, key_dim) != 0 && skerry::ref::supports(format, SKERRY_SIDE_VALUE, value_dim) != 0;
}

TileSpec random_tile(Random &random, skerry_format key_format, skerry_format value_format) {
    TileSpec tile = {};
    tile.key_format = key_format;
    tile.value_format = value_format;
    const bool has_l = skerry::is_l_format(key_format) || skerry::is_l_format(value_format);
    tile.capacity = skerry::is_c_format(key_format) || has_l ? random.pick<int32_t>({8, 16, 20, 64, 128})
                                                             : random.pick<int32_t>({16, 16, 16, 8, 4, 5, 1});
    tile.key_rank = has_l ? random.pick<int32_t>({1, 3, 8, 16, 16, 17, 40}) : 0;
    tile.value_rank = has_l ? random.pick<int32_t>({1, 3, 8, 16, 16, 17, 40}) : 0;
    if (skerry::is_full_format(key_format) && skerry::is_full_format(value_format) && random.below(6) == 0) tile.capacity = 40;
    tile.count = random.below(4) == 0 ? 1 + random.below(tile.capacity) : tile.capacity;
    tile.gap = random.below(8) == 0 ? random.below(40) : 0;
    tile.tier = skerry::is_full_format(key_format) ? uint8_t(SKERRY_TIER_FULL) : uint8_t(SKERRY_TIER_QUANTISED);
    return tile;
}

void fill(Scene &scene, const std::vector<std::pair<skerry_format, skerry_format>> &formats, int32_t tiles, bool with_epochs) {
    for (int32_t i = 0; i < tiles; ++i) {
        if (with_epochs && (scene.epochs.empty() || scene.random.below(6) == 0)) scene.add_epoch(4.0f, 0.5f);
        const auto &pair = formats[static_cast<size_t>(scene.random.below(static_cast<int32_t>(formats.size())))];
        scene.add_tile(random_tile(scene.random, pair.first, pair.second));
    }
    scene.place_rows(static_cast<int32_t>(scene.positions.size()));
}

void check_all_levels(Scene &scene, bool has_r, const std::string &what) {
    CAPTURE(what);
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const skerry_kernels &kernels = *skerry::cpu_kernels(level.features);
        for (const bool exact : {true, false}) {
            CAPTURE(exact);
            const Result result = scene.run(kernels, exact);
            const Errors errors = compare(scene, result);
            CHECK(scene.guards_hold);
            CHECK(errors.empties_agree);
            CHECK(errors.out <= (exact || !has_r ? 1e-5 : 1e-2));
            CHECK(errors.lse <= (exact || !has_r ? 2e-5 : 1e-2));
            CHECK(errors.mass <= 1e-5);
        }
    }
}

template <typename T>
bool same_bits(const std::vector<T> &a, size_t a_at, const std::vector<T> &b, size_t b_at, size_t n) {
    return std::memcmp(a.data() + a_at, b.data() + b_at, n * sizeof(T)) == 0;
}

} // namespace

TEST_CASE("attend: every format and dimension agrees with float64 at every instruction set") {
    uint64_t seed = 1;
    for (const skerry_format format : all_formats()) {
        for (const int32_t key_dim : dims) {
            for (int other = 0; other < 2; ++other) {
                Random random(++seed);
                Spec spec;
                spec.key_dim = key_dim;
                spec.value_dim = other == 0 ? key_dim : random.pick(dims);
                if (!offered(format, spec.key_dim, spec.value_dim)) continue;
                spec.group = random.pick<int32_t>({1, 2, 3, 4, 8});
                spec.rows = random.pick<int32_t>({1, 1, 2, 5, 16});
                spec.softcap = random.below(4) == 0 ? 20.0f : 0.0f;
                spec.sliding_window = random.below(4) == 0 ? 1 + random.below(120) : 0;
                spec.grid = random.below(2) == 0 ? SKERRY_DTYPE_F16 : SKERRY_DTYPE_BF16;
                spec.has_rotary = skerry::is_c_format(format) && random.below(2) == 0;
                spec.rotary_pairing = random.below(2) == 0 ? SKERRY_ROTARY_HALF : SKERRY_ROTARY_INTERLEAVED;
                spec.value_group = random.pick<int32_t>({0, 0, 16, 12, 5});
                Scene scene(spec, seed);
                const bool has_r = skerry::is_r_format(format);
                fill(scene, {{format, format}}, 1 + random.below(14), has_r);
                check_all_levels(scene, has_r,
                                 "format " + std::to_string(format) + " dims " + std::to_string(spec.key_dim) + " " +
                                     std::to_string(spec.value_dim) + " group " + std::to_string(spec.group) + " rows " +
                                     std::to_string(spec.rows) + " seed " + std::to_string(seed));
            }
        }
    }
}

TEST_CASE("attend: mixed formats, groups, rows, capacities, windows, caps and tiers") {
    for (uint64_t seed = 1000; seed < 1080; ++seed) {
        Random random(seed);
        Spec spec;
        spec.key_dim = random.pick<int32_t>({64, 64, 80, 96, 128, 128, 256});
        spec.value_dim = random.below(2) == 0 ? spec.key_dim : random.pick<int32_t>({64, 80, 96, 128, 256});
        spec.group = random.pick<int32_t>({1, 2, 3, 4, 8});
        spec.rows = random.pick<int32_t>({1, 2, 5, 16});
        spec.softcap = random.below(3) == 0 ? 30.0f : 0.0f;
        spec.sliding_window = random.below(3) == 0 ? 1 + random.below(300) : 0;
        spec.tiers = random.pick<uint32_t>({0, 0, SKERRY_TIERS_FULL, SKERRY_TIERS_QUANTISED, SKERRY_TIERS_FULL | SKERRY_TIERS_QUANTISED});
        Scene scene(spec, seed);
        std::vector<std::pair<skerry_format, skerry_format>> formats;
        for (int i = 0; i < 4; ++i) {
            const skerry_format key = random.below(2) == 0 ? random.pick(full_formats) : random.pick(r_formats);
            const bool mixed_sides = random.below(3) == 0;
            if (random.below(3) == 0) {
                // The other side may be full, but of no epoch.
                const skerry_format low = random.pick(l_formats), other = random.pick(random.below(2) == 0 ? full_formats : l_formats);
                formats.push_back(random.below(2) == 0 ? std::make_pair(low, other) : std::make_pair(other, low));
                continue;
            }
            formats.push_back({key, mixed_sides ? random.pick(random.below(2) == 0 ? full_formats : r_formats) : key});
        }
        // Over 64 tiles a task is worked on in blocks that rescale what the ones before them left.
        fill(scene, formats, random.below(4) == 0 ? 70 + random.below(90) : 1 + random.below(40), true);
        check_all_levels(scene, true, "seed " + std::to_string(seed));
    }
}

TEST_CASE("attend: a row's bits depend on nothing but the tokens it sees") {
    for (uint64_t seed = 2000; seed < 2024; ++seed) {
        Random random(seed);
        Spec spec;
        spec.key_dim = random.pick<int32_t>({64, 80, 128});
        spec.value_dim = random.pick<int32_t>({64, 80, 128});
        spec.group = random.pick<int32_t>({1, 2, 3, 4, 8});
        spec.rows = random.pick<int32_t>({2, 5, 16, 40});
        spec.sliding_window = random.below(2) == 0 ? 64 : 0;
        Scene scene(spec, seed);
        const std::vector<std::pair<skerry_format, skerry_format>> formats = {
            {SKERRY_FORMAT_F16, SKERRY_FORMAT_F16}, {SKERRY_FORMAT_R2, SKERRY_FORMAT_R2}, {SKERRY_FORMAT_R3, SKERRY_FORMAT_R2},
            {SKERRY_FORMAT_R4, SKERRY_FORMAT_R4},   {SKERRY_FORMAT_R8, SKERRY_FORMAT_R8}, {SKERRY_FORMAT_BF16, SKERRY_FORMAT_BF16},
            {SKERRY_FORMAT_L16, SKERRY_FORMAT_L16}, {SKERRY_FORMAT_L8, SKERRY_FORMAT_L4}, {SKERRY_FORMAT_L32, SKERRY_FORMAT_F16}};
        fill(scene, formats, 20, true);
        for (int i = 0; i < 4; ++i) {
            TileSpec tile = random_tile(scene.random, SKERRY_FORMAT_F16, SKERRY_FORMAT_F16);
            tile.gap = 0;
            scene.add_tile(tile);
        }
        scene.place_rows(spec.rows);
        const Scene &whole = scene;
        for (const Level &level : levels()) {
            if (!runs(level)) continue;
            const skerry_kernels &kernels = *skerry::cpu_kernels(level.features);
            for (const bool exact : {true, false}) {
                CAPTURE(level.name);
                CAPTURE(seed);
                CAPTURE(exact);
                const Result together = scene.run(kernels, exact);
                const size_t per_row = static_cast<size_t>(spec.group), vd = static_cast<size_t>(spec.value_dim);
                const size_t kd = per_row * static_cast<size_t>(spec.key_dim);
                const auto tiles = whole.tiles;
                const auto positions = whole.positions;
                const auto queries = whole.queries;
                bool out_agrees = true, max_agrees = true, sum_agrees = true, tiles_agree = true;
                for (size_t r = 0; r < positions.size(); ++r) {
                    // The list as it was when this row's token had just been appended.
                    scene.tiles.clear();
                    for (skerry_tile tile : tiles) {
                        if (tile.first > positions[r]) break;
                        if (skerry::is_full_format(tile.key_format) && skerry::is_full_format(tile.value_format)) {
                            tile.count = static_cast<uint8_t>(std::min<int32_t>(tile.count, positions[r] - tile.first + 1));
                        }
                        scene.tiles.push_back(tile);
                    }
                    scene.positions = {positions[r]};
                    scene.queries.assign(queries.begin() + static_cast<ptrdiff_t>(r * kd),
                                         queries.begin() + static_cast<ptrdiff_t>((r + 1) * kd));
                    const Result alone = scene.run(kernels, exact);
                    out_agrees &= same_bits(together.out, r * per_row * vd, alone.out, 0, per_row * vd);
                    max_agrees &= same_bits(together.max, r * per_row, alone.max, 0, per_row);
                    sum_agrees &= same_bits(together.sum, r * per_row, alone.sum, 0, per_row);
                    const size_t heads = positions.size() * per_row;
                    for (size_t i = 0; i < scene.tiles.size(); ++i) {
                        tiles_agree &= same_bits(together.tile_max, i * heads + r * per_row, alone.tile_max, i * per_row, per_row);
                        tiles_agree &= same_bits(together.tile_sum, i * heads + r * per_row, alone.tile_sum, i * per_row, per_row);
                    }
                }
                scene.tiles = tiles;
                scene.positions = positions;
                scene.queries = queries;
                CHECK(out_agrees);
                CHECK(max_agrees);
                CHECK(sum_agrees);
                CHECK(tiles_agree);
            }
        }
    }
}

TEST_CASE("attend: numbers that are not finite stay with the rows that see them") {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        for (const int32_t dim : {3, 64, 80}) {
            CAPTURE(dim);
            Spec spec;
            spec.key_dim = spec.value_dim = dim;
            spec.rows = 4;
            spec.group = 3;
            // The places of missing tokens are NaN from the start.
            Scene scene(spec, 7);
            scene.add_tile({SKERRY_FORMAT_F32, SKERRY_FORMAT_F32, 16, 15, 0, SKERRY_TIER_FULL});
            scene.place_rows(4);
            float *const keys = reinterpret_cast<float *>(scene.record(0));
            float *const values = keys + skerry::value_offset(SKERRY_FORMAT_F32, dim, 16) / sizeof(float);
            // The newest token, which only the last row sees.
            keys[14] = std::nanf("");
            for (int32_t c = 0; c < dim; ++c)
                values[14 * dim + c] = std::numeric_limits<float>::infinity();
            const Result result = scene.run(*skerry::cpu_kernels(level.features), true);
            const size_t per_row = 3 * static_cast<size_t>(dim);
            size_t finite = 0;
            for (size_t i = 0; i < 3 * per_row; ++i)
                finite += std::isfinite(result.out[i]) ? 1 : 0;
            CHECK(finite == 3 * per_row);
        }
    }
}

TEST_CASE("attend: a fast path runs where there is one") {
    Spec spec;
    spec.key_dim = spec.value_dim = 128;
    spec.group = 4;
    for (const Level &level : levels()) {
        if (level.features == 0) continue;
        if (!runs(level)) {
            MESSAGE("not on this machine: " << level.name);
            continue;
        }
        CAPTURE(level.name);
        const bool is_own = skerry::cpu_kernels(level.features)->attend != skerry::cpu_kernels(0)->attend;
        CHECK(is_own);
        CHECK(std::string(skerry::cpu_kernels(level.features)->name) == "cpu " + level.name);
    }
    for (const Level &level : levels()) {
        const bool has_integers = level.features == SKERRY_CPU_AVX2 || (level.features & SKERRY_CPU_AVX512_VNNI) != 0;
        if (!has_integers || !runs(level)) continue;
        CAPTURE(level.name);
        for (const skerry_format format : r_formats) {
            if (format == SKERRY_FORMAT_R8 && level.features == SKERRY_CPU_AVX2) continue; // in f32 there
            CAPTURE(format);
            Scene scene(spec, 11);
            scene.add_epoch(2.0f, 0.5f);
            for (int i = 0; i < 9; ++i)
                scene.add_tile({format, format, 16, 16, 0, SKERRY_TIER_QUANTISED});
            scene.place_rows(1);
            const skerry_kernels &kernels = *skerry::cpu_kernels(level.features);
            const Result exact = scene.run(kernels, true), fast = scene.run(kernels, false);
            // Integers leave another error than f32 does.
            CHECK_FALSE(same_bits(exact.max, 0, fast.max, 0, exact.max.size()));
            CHECK_FALSE(same_bits(exact.out, 0, fast.out, 0, exact.out.size()));
        }
    }
}

TEST_CASE("attend: huge logits and keys at the end of f16 stay finite") {
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        Spec spec;
        spec.rows = 2;
        spec.group = 4;
        spec.scale = 1.0f;
        spec.query_size = 40.0f;
        spec.key_size = 30.0f; // logits of +- 1e4
        Scene scene(spec, 21);
        scene.add_epoch(1.0f, 1.0f);
        for (const skerry_format format : {SKERRY_FORMAT_F16, SKERRY_FORMAT_R2, SKERRY_FORMAT_R4, SKERRY_FORMAT_F32, SKERRY_FORMAT_R8}) {
            for (int i = 0; i < 3; ++i)
                scene.add_tile({format, format, 16, 16, 0, SKERRY_TIER_FULL});
        }
        scene.place_rows(2);
        const Errors errors = compare(scene, scene.run(*skerry::cpu_kernels(level.features), true));
        CHECK(errors.lse <= 0.05); // f32 logits of 1e4 have steps of 1e-3
        for (const bool exact : {true, false}) {
            const Result result = scene.run(*skerry::cpu_kernels(level.features), exact);
            bool is_finite = true;
            for (const float x : result.out)
                is_finite &= std::isfinite(x);
            for (const float x : result.sum)
                is_finite &= std::isfinite(x) && x >= 1.0f;
            CHECK(is_finite);
        }

        Spec huge = spec;
        huge.query_size = 1.0f;
        huge.key_size = 15000.0f; // the largest of some thousand draws lies near 65504
        Scene at_end(huge, 22);
        for (int i = 0; i < 4; ++i)
            at_end.add_tile({SKERRY_FORMAT_F16, SKERRY_FORMAT_F16, 16, 16, 0, SKERRY_TIER_FULL});
        at_end.place_rows(2);
        const Result result = at_end.run(*skerry::cpu_kernels(level.features), false);
        bool is_finite = true;
        for (const float x : result.out)
            is_finite &= std::isfinite(x);
        for (const float x : result.max)
            is_finite &= std::isfinite(x);
        CHECK(is_finite);
    }
}

TEST_CASE("attend: low-rank sides of zeros have no bytes and weigh as zeros") {
    for (const skerry_format format : l_formats) {
        Spec spec;
        spec.rows = 3;
        spec.key_size = 0;
        Scene scene(spec, 25);
        scene.add_tile({format, format, 40, 40, 0, SKERRY_TIER_HOST, 8, 8});
        scene.add_tile({format, format, 20, 20, 0, SKERRY_TIER_HOST, 8, 8});
        scene.add_tile({SKERRY_FORMAT_F16, SKERRY_FORMAT_F16, 16, 9, 0, SKERRY_TIER_FULL});
        CHECK(skerry::tile_key_rank(scene.tiles[0].epoch) == 0);
        CHECK(skerry::tile_value_rank(scene.tiles[0].epoch) == 8);
        scene.tiles[1].epoch = skerry::tile_ranks(0, 0);
        std::fill(scene.decoded[1].values.begin(), scene.decoded[1].values.end(), 0.0f);
        scene.place_rows(3);
        check_all_levels(scene, false, "format " + std::to_string(format));
    }
}

TEST_CASE("attend: parts merge to the whole") {
    Spec spec;
    spec.key_dim = spec.value_dim = 128;
    spec.group = 4;
    spec.rows = 5;
    Scene scene(spec, 31);
    fill(scene, {{SKERRY_FORMAT_F16, SKERRY_FORMAT_F16}, {SKERRY_FORMAT_R3, SKERRY_FORMAT_R2}}, 50, true);
    const int32_t n = static_cast<int32_t>(scene.tiles.size()), heads = spec.rows * spec.group;
    std::vector<double> out, lse;
    scene.oracle(out, lse);
    for (const Level &level : levels()) {
        if (!runs(level)) continue;
        CAPTURE(level.name);
        const skerry_kernels &kernels = *skerry::cpu_kernels(level.features);
        std::vector<float> parts_out, parts_max, parts_sum;
        int32_t parts = 0;
        for (int32_t begin = 0; begin < n; begin += 9, ++parts) {
            const Result part = scene.run(kernels, true, begin, std::min(begin + 9, n));
            parts_out.insert(parts_out.end(), part.out.begin(), part.out.end());
            parts_max.insert(parts_max.end(), part.max.begin(), part.max.end());
            parts_sum.insert(parts_sum.end(), part.sum.begin(), part.sum.end());
        }
        std::vector<float> merged(out.size()), merged_lse(lse.size());
        kernels.merge(parts, heads, spec.group, spec.value_dim, parts_out.data(), heads * spec.value_dim, parts_max.data(),
                      parts_sum.data(), heads, nullptr, merged.data(), merged_lse.data());
        double error = 0, size = 0, lse_error = 0;
        for (size_t i = 0; i < out.size(); ++i) {
            error += (double(merged[i]) - out[i]) * (double(merged[i]) - out[i]);
            size += out[i] * out[i];
        }
        for (size_t i = 0; i < lse.size(); ++i)
            lse_error = std::max(lse_error, std::abs(double(merged_lse[i]) - lse[i]));
        CHECK(std::sqrt(error / size) <= 1e-5);
        CHECK(lse_error <= 2e-5);
    }
}

TEST_CASE("attend: balanced keys whose variances span 10^4 have logits as good as white ones") {
    // Standard deviations of keys over two decades, those of queries the inverse: the product is white, as is what is coded.
    for (const skerry_format format : {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3}) {
        double error[2] = {0, 0};
        for (int spread = 0; spread < 2; ++spread) {
            Spec spec;
            spec.key_dim = 128;
            spec.value_dim = 64;
            spec.group = 4;
            std::vector<double> size(128), mean(128), variance(128), query_square(128);
            Random random(40);
            for (size_t i = 0; i < 128; ++i) {
                size[i] = spread == 0 ? 1.0 : std::pow(10.0, 2.0 * (double(i) / 127 - 0.5));
                mean[i] = size[i] * double(random.normal());
                variance[i] = size[i] * size[i];
                query_square[i] = 1 / variance[i];
            }
            skerry::EpochStatistics statistics;
            statistics.mean = mean.data();
            statistics.variance = variance.data();
            statistics.query_square = query_square.data();
            statistics.largest_key = 100.0f;
            statistics.largest_value = 4.0f;
            Scene scene(spec, 41), plain(spec, 41);
            for (Scene *each : {&scene, &plain}) {
                each->add_epoch(statistics);
                each->key_sizes.assign(size.begin(), size.end());
                for (size_t i = 0; i < each->queries.size(); ++i)
                    each->queries[i] /= static_cast<float>(size[i % 128]);
            }
            // The same draws, stored exactly, say what the logits should be.
            for (int i = 0; i < 64; ++i) {
                scene.add_tile({format, SKERRY_FORMAT_R8, 16, 16, 0, SKERRY_TIER_QUANTISED});
                plain.add_tile({SKERRY_FORMAT_F32, SKERRY_FORMAT_F32, 16, 16, 0, SKERRY_TIER_QUANTISED});
            }
            double difference = 0, total = 0;
            for (size_t i = 0; i < scene.tiles.size(); ++i) {
                for (size_t t = 0; t < 16; ++t) {
                    for (size_t h = 0; h < 4; ++h) {
                        double coded = 0, exact = 0, shift = 0;
                        for (size_t c = 0; c < 128; ++c) {
                            const double q = double(scene.queries[h * 128 + c]);
                            coded += q * double(scene.decoded[i].keys[t * 128 + c]);
                            exact += q * double(plain.decoded[i].keys[t * 128 + c]);
                            shift += q * mean[c];
                        }
                        difference += (coded - exact) * (coded - exact);
                        total += (exact - shift) * (exact - shift); // the mean is the same for all tokens
                    }
                }
            }
            error[spread] = std::sqrt(difference / total);
            scene.place_rows(1);
            for (const Level &level : levels()) {
                if (!runs(level)) continue;
                CAPTURE(level.name);
                CHECK(compare(scene, scene.run(*skerry::cpu_kernels(level.features), false)).out <= 1e-2);
            }
        }
        CAPTURE(format);
        CAPTURE(error[0]);
        CAPTURE(error[1]);
        CHECK(error[0] > 0.1); // the codec loses something: the comparison is not between zeros
        CHECK(error[1] <= 1.5 * error[0]);
    }
}
