// SPDX-License-Identifier: MIT
#pragma once

// Rows about L formats: spans of one layer of Llama-3 8B (8 KV heads, 128 channels), one core. Times are those the thread ran, the median
// over rounds, and ratios are taken within a round. Everything lies in the caches: the f16 span would lose more to memory than its
// factors, which are a quarter of its bytes.

#include "attend_scene.hpp"
#include "codec/svd.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <time.h>
#include <vector>

namespace lowrank_rows {

constexpr int32_t heads = 8, query_group = 4, channels = 128, rank = 16;

inline double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline double middle(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// Keys: a large mean, channels of different size, neighbours alike. Values: directions whose strength falls like i^-0.8.
inline std::vector<float> make_matrix(scene::Random &random, int32_t tokens, bool is_key) {
    std::vector<float> rows(static_cast<size_t>(tokens * channels));
    if (is_key) {
        for (int32_t c = 0; c < channels; ++c) {
            const float size = std::exp(1.2f * random.normal()), mean = 3 * size * random.normal();
            float state = random.normal();
            for (int32_t t = 0; t < tokens; ++t) {
                state = 0.8f * state + 0.6f * random.normal();
                rows[static_cast<size_t>(t * channels + c)] = mean + size * state;
            }
        }
        return rows;
    }
    const int32_t directions = std::min(tokens, channels);
    for (int32_t i = 0; i < directions; ++i) {
        const float strength = std::pow(static_cast<float>(i + 1), -0.8f);
        std::vector<float> direction(static_cast<size_t>(channels));
        for (float &x : direction)
            x = random.normal();
        for (int32_t t = 0; t < tokens; ++t) {
            const float part = strength * random.normal();
            for (size_t c = 0; c < direction.size(); ++c)
                rows[static_cast<size_t>(t * channels) + c] += part * direction[c];
        }
    }
    return rows;
}

inline double best_error(const std::vector<float> &rows, int32_t tokens) {
    const int32_t k = std::min(tokens, channels);
    std::vector<double> u(static_cast<size_t>(tokens * k)), sigma(static_cast<size_t>(k)), v(static_cast<size_t>(channels * k));
    std::vector<double> scratch(skerry::svd_scratch_doubles(tokens, channels));
    const std::vector<double> exact(rows.begin(), rows.end());
    skerry::svd_jacobi(exact.data(), tokens, channels, u.data(), sigma.data(), v.data(), scratch.data());
    double rest = 0, all = 0;
    for (int32_t i = 0; i < k; ++i) {
        const double square = sigma[static_cast<size_t>(i)] * sigma[static_cast<size_t>(i)];
        all += square;
        if (i >= rank) rest += square;
    }
    return std::sqrt(rest / all);
}

inline void report_factorise(const skerry_kernels &kernels, int32_t rounds) {
    constexpr int32_t span = 64;
    scene::Random random(3);
    std::vector<std::vector<float>> matrices;
    for (int32_t i = 0; i < 2 * heads; ++i)
        matrices.push_back(make_matrix(random, span, i < heads));
    const scene::Bytes scratch = scene::aligned_bytes(kernels.factorise_scratch_bytes(channels, span), 0);
    std::vector<uint8_t> part(skerry::part_bytes(SKERRY_FORMAT_L16, SKERRY_SIDE_KEY, channels, span, 0, rank));
    skerry_factor_params params = {};
    params.dim = channels;
    params.count = span;
    params.max_rank = rank;
    params.format = SKERRY_FORMAT_L16;
    std::vector<double> seconds;
    double worst = 0;
    for (int32_t round = 0; round <= rounds; ++round) {
        const double start = thread_seconds();
        for (int32_t i = 0; i < 2 * heads; ++i) {
            params.side = i < heads ? SKERRY_SIDE_KEY : SKERRY_SIDE_VALUE;
            skerry_factor_result result = {};
            kernels.factorise(&params, matrices[static_cast<size_t>(i)].data(), part.data(), &result, scratch.get());
            if (round == 0) worst = std::max(worst, double(result.error) / best_error(matrices[static_cast<size_t>(i)], span));
        }
        if (round > 0) seconds.push_back(thread_seconds() - start);
    }
    const double rate = span / middle(seconds);
    std::printf("{\"name\": \"lowrank.factorise\", \"value\": %.6g, \"unit\": \"tokens/s\", \"ratio\": null, \"of\": null, "
                "\"samples\": %d, \"gate\": \">= 35000\", \"ok\": %s}\n",
                rate, rounds, rate >= 35000 ? "true" : "false");
    std::printf("{\"name\": \"lowrank.factorise.error\", \"value\": %.6g, \"unit\": \"of the optimum\", \"ratio\": null, \"of\": null, "
                "\"samples\": null, \"gate\": \"<= 1.01\", \"ok\": %s}\n",
                worst, worst <= 1.01 ? "true" : "false");
}

// One decode step of one KV head over spans of 128 tokens.
class Attention {
public:
    Attention(const skerry_kernels &kernels, skerry_format format) : kernels_(kernels), scene_(spec(), 5) {
        constexpr int32_t spans = 8, span = 128;
        for (int32_t i = 0; i < spans; ++i) {
            if (skerry::is_l_format(format)) {
                scene_.add_tile({format, format, span, span, 0, SKERRY_TIER_HOST, rank, rank});
                continue;
            }
            for (int32_t t = 0; t < span / 16; ++t)
                scene_.add_tile({format, format, 16, 16, 0, SKERRY_TIER_FULL});
        }
        scene_.place_rows(1);
        out_.resize(static_cast<size_t>(query_group * channels));
        max_.resize(query_group);
        sum_.resize(query_group);
        tile_max_.resize(scene_.tiles.size() * query_group);
        tile_sum_.resize(tile_max_.size());
        params_ = scene_.params;
        params_.pool.chunks = scene_.chunk_list().data();
        task_.tiles = scene_.tiles.data();
        task_.queries = scene_.queries.data();
        task_.row_positions = scene_.positions.data();
        task_.tile_end = static_cast<int32_t>(scene_.tiles.size());
        task_.rows = 1;
        task_.out = out_.data();
        task_.max = max_.data();
        task_.sum = sum_.data();
        task_.tile_max = tile_max_.data();
        task_.tile_sum = tile_sum_.data();
        scratch_ = scene::aligned_bytes(kernels.attend_scratch_bytes(&params_, 1, task_.tile_end), 0);
        task_.scratch = scratch_.get();
    }
    Attention(const Attention &) = delete;
    Attention &operator=(const Attention &) = delete;

    // Seconds per span.
    double run() {
        constexpr int32_t repeats = 40, spans = 8;
        const double start = thread_seconds();
        for (int32_t i = 0; i < repeats; ++i)
            kernels_.attend(&params_, &task_);
        return (thread_seconds() - start) / (repeats * spans);
    }

private:
    static scene::Spec spec() {
        scene::Spec made;
        made.key_dim = made.value_dim = channels;
        made.group = query_group;
        return made;
    }

    const skerry_kernels &kernels_;
    scene::Scene scene_;
    skerry_attend_params params_ = {};
    skerry_attend_task task_ = {};
    std::vector<float> out_, max_, sum_, tile_max_, tile_sum_;
    scene::Bytes scratch_;
};

inline void report_attention(const skerry_kernels &kernels, int32_t rounds) {
    Attention full(kernels, SKERRY_FORMAT_F16), halves(kernels, SKERRY_FORMAT_L16), bytes(kernels, SKERRY_FORMAT_L8);
    Attention *const forms[] = {&halves, &bytes};
    const char *const names[] = {"lowrank.attend", "lowrank.attend.l8"};
    std::vector<double> seconds[2], ratios[2];
    for (int32_t round = 0; round <= rounds; ++round) {
        for (int form = 0; form < 2; ++form) {
            const double whole = full.run(), mine = forms[form]->run();
            if (round == 0) continue; // first touch
            seconds[form].push_back(mine);
            ratios[form].push_back(mine / whole);
        }
    }
    for (int form = 0; form < 2; ++form) {
        const double ratio = middle(ratios[form]);
        std::printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"us/span\", \"ratio\": %.6g, \"of\": \"f16 span\", \"samples\": %d, "
                    "\"gate\": \"<= 0.5\", \"ok\": %s}\n",
                    names[form], 1e6 * middle(seconds[form]), ratio, rounds, ratio <= 0.5 ? "true" : "false");
    }
}

inline void report(const skerry_kernels &kernels, int32_t rounds) {
    report_factorise(kernels, rounds);
    report_attention(kernels, rounds);
}

} // namespace lowrank_rows
