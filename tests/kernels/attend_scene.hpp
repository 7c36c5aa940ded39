// SPDX-License-Identifier: MIT
#pragma once

// Random work lists and what attention over them is in float64, for the tests and the benchmark of attend.

#include "base/half.hpp"
#include "codec/epoch.hpp"
#include "codec/layout.hpp"
#include "cpu/kernels.hpp"
#include "cpu/ref/ref.hpp"

#include <skerry/backend.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace scene {

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ * 0x2545f4914f6cdd1du;
    }
    int32_t below(int32_t n) { return static_cast<int32_t>((next() >> 33) % static_cast<uint64_t>(n)); }
    float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
    float normal() {
        const float u = std::max(uniform(), 0x1p-24f);
        return std::sqrt(-2.0f * std::log(u)) * std::cos(6.28318531f * uniform());
    }
    template <typename T>
    T pick(const std::vector<T> &from) {
        return from[static_cast<size_t>(below(static_cast<int32_t>(from.size())))];
    }

private:
    uint64_t state_;
};

struct AlignedFree {
    void operator()(void *memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<uint8_t, AlignedFree>;

inline Bytes aligned_bytes(size_t size, uint8_t fill) {
    const size_t rounded = skerry::round_up(std::max<size_t>(size, 64), 64);
    Bytes bytes(static_cast<uint8_t *>(std::aligned_alloc(64, rounded)));
    std::memset(bytes.get(), fill, rounded);
    return bytes;
}

struct Spec {
    int32_t key_dim = 64, value_dim = 64, group = 2, rows = 1;
    float scale = 0, softcap = 0; // scale 0: 1 / sqrt(key_dim)
    int32_t sliding_window = 0;
    uint32_t tiers = 0;
    float query_size = 2.0f, key_size = 1.0f;
    bool has_rotary = false;
    skerry_dtype grid = SKERRY_DTYPE_F16;
    int32_t value_group = 0;
    int32_t rotary_pairing = SKERRY_ROTARY_HALF;
};

struct TileSpec {
    skerry_format key_format, value_format;
    int32_t capacity, count, gap;
    uint8_t tier;
    int32_t key_rank = 0, value_rank = 0; // L formats: at most
};

// Rows of one tile in f32 as attention uses them.
struct Decoded {
    std::vector<float> keys, values;
};

struct Result {
    std::vector<float> out, max, sum, tile_max, tile_sum;
};

class Scene {
public:
    Scene(const Spec &spec, uint64_t seed) : random(seed), spec_(spec) {
        params.key_dim = spec.key_dim;
        params.value_dim = spec.value_dim;
        params.group = spec.group;
        params.sliding_window = spec.sliding_window;
        params.scale = spec.scale > 0 ? spec.scale : 1.0f / std::sqrt(static_cast<float>(spec.key_dim));
        params.softcap = spec.softcap;
        params.tiers = spec.tiers;
        params.value_group = spec.value_group;
        params.grid_dtype = spec.grid;
        params.attention_factor = 1.0f;
        if (spec.has_rotary) {
            params.rotary_dims = spec.key_dim / 2 * 2;
            params.rotary_pairing = spec.rotary_pairing;
            params.attention_factor = 1.1f;
            for (int32_t i = 0; i < params.rotary_dims / 2; ++i) {
                frequencies_.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(params.rotary_dims)));
            }
            params.inverse_frequencies = frequencies_.data();
        }
        params.pool.chunk_shift = 12;
        set_rows(spec.rows);
    }

    Random random;
    skerry_attend_params params = {};
    std::vector<skerry_tile> tiles;
    std::vector<skerry_epoch> epochs;
    std::vector<float> queries;
    std::vector<int32_t> positions;
    std::vector<Decoded> decoded;
    int32_t end_position = 0;

    // Channels' spread of keys is 1 / balance times key_size, so that balanced keys are white.
    uint16_t add_epoch(float octaves, float mean_size) {
        const size_t dim = static_cast<size_t>(spec_.key_dim);
        std::vector<float> mean(dim), balance(dim);
        for (size_t i = 0; i < dim; ++i) {
            mean[i] = mean_size * random.normal();
            balance[i] = std::exp2(std::round(16.0f * octaves * (random.uniform() - 0.5f)) / 16.0f);
        }
        epochs.push_back({mean.data(), balance.data(), 1.0f, 1.0f}); // moving a vector leaves its numbers where they are
        numbers_.push_back(std::move(mean));
        numbers_.push_back(std::move(balance));
        return static_cast<uint16_t>(epochs.size() - 1);
    }

    // Keys are then drawn with `key_sizes` about the mean.
    uint16_t add_epoch(const skerry::EpochStatistics &statistics) {
        const size_t dim = static_cast<size_t>(spec_.key_dim);
        std::vector<uint8_t> stored(skerry::epoch_bytes(spec_.key_dim));
        skerry::epoch_freeze(statistics, spec_.key_dim, stored.data());
        std::vector<float> mean(dim), balance(dim);
        epochs.push_back(skerry::epoch_decode(stored.data(), spec_.key_dim, mean.data(), balance.data()));
        numbers_.push_back(std::move(mean));
        numbers_.push_back(std::move(balance));
        return static_cast<uint16_t>(epochs.size() - 1);
    }
    std::vector<double> key_sizes;

    void set_rows(int32_t rows) {
        positions.resize(static_cast<size_t>(rows));
        queries.resize(static_cast<size_t>(rows) * static_cast<size_t>(spec_.group * spec_.key_dim));
        for (float &q : queries)
            q = spec_.query_size * random.normal();
        place_rows(rows);
    }

    // The last rows of the list, as in a step that appended them.
    void place_rows(int32_t rows) {
        for (int32_t r = 0; r < rows; ++r)
            positions[static_cast<size_t>(r)] = std::max(end_position - rows + r, 0);
    }

    void add_tile(const TileSpec &tile_spec) {
        using namespace skerry;
        const int32_t kd = spec_.key_dim, vd = spec_.value_dim, capacity = tile_spec.capacity, count = tile_spec.count;
        skerry_tile tile = {};
        tile.first = end_position + tile_spec.gap;
        tile.count = static_cast<uint8_t>(count);
        tile.capacity = static_cast<uint8_t>(capacity);
        tile.key_format = static_cast<uint8_t>(tile_spec.key_format);
        tile.value_format = static_cast<uint8_t>(tile_spec.value_format);
        tile.tier = tile_spec.tier;
        tile.epoch = epochs.empty() ? uint16_t(0) : static_cast<uint16_t>(epochs.size() - 1);
        end_position = tile.first + count;
        std::vector<float> keys(static_cast<size_t>(count * kd)), values(static_cast<size_t>(count * vd));
        for (size_t i = 0; i < keys.size(); ++i) {
            const size_t c = i % static_cast<size_t>(kd);
            const float draw = spec_.key_size * random.normal();
            keys[i] = draw;
            if (epochs.empty()) continue;
            const float spread = key_sizes.empty() ? 1.0f / epochs[tile.epoch].balance[c] : static_cast<float>(key_sizes[c]);
            keys[i] = draw * spread + epochs[tile.epoch].mean[c];
        }
        for (float &v : values)
            v = random.normal() + 0.25f;
        const LowRankParts low(tile_spec, keys, values, kd, vd);
        const bool has_l = is_l_format(tile.key_format) || is_l_format(tile.value_format);
        if (has_l) tile.epoch = tile_ranks(low.rank[0], low.rank[1]);
        const size_t bytes =
            record_bytes(tile.key_format, tile.value_format, kd, vd, capacity, spec_.value_group, low.rank[0], low.rank[1]);
        uint8_t *const record = take(bytes, tile.place);
        uint8_t *const value_part = record + value_offset(tile.key_format, kd, capacity, low.rank[0]);
        put(tile, SKERRY_SIDE_KEY, keys, low, record);
        put(tile, SKERRY_SIDE_VALUE, values, low, value_part);
        decoded.push_back({get(tile, SKERRY_SIDE_KEY, record), get(tile, SKERRY_SIDE_VALUE, value_part)});
        tiles.push_back(tile);
    }

    // Parts of L formats of one tile, whose ranks are known only when they are made.
    struct LowRankParts {
        std::vector<uint8_t> part[2];
        int32_t rank[2] = {0, 0};

        LowRankParts(const TileSpec &spec, const std::vector<float> &keys, const std::vector<float> &values, int32_t key_dim,
                     int32_t value_dim) {
            for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
                const bool is_key = side == SKERRY_SIDE_KEY;
                const skerry_format format = is_key ? spec.key_format : spec.value_format;
                if (!skerry::is_l_format(format)) continue;
                const int32_t dim = is_key ? key_dim : value_dim, most = is_key ? spec.key_rank : spec.value_rank;
                skerry_factor_params params = {};
                params.dim = dim;
                params.count = spec.capacity;
                params.max_rank = most;
                params.format = format;
                params.side = side;
                // Tokens that are missing later were there when the record was made.
                std::vector<float> rows = is_key ? keys : values;
                rows.resize(static_cast<size_t>(spec.capacity) * static_cast<size_t>(dim), 0.5f);
                part[side].resize(skerry::part_bytes(format, side, dim, spec.capacity, 0, std::min({most, dim, spec.capacity})));
                const Bytes scratch = aligned_bytes(skerry::ref::factorise_scratch_bytes(dim, spec.capacity), 0x7f);
                skerry_factor_result result = {};
                skerry::ref::factorise(&params, rows.data(), part[side].data(), &result, scratch.get());
                rank[side] = result.rank;
                part[side].resize(skerry::part_bytes(format, side, dim, spec.capacity, 0, result.rank));
            }
        }
    };

    Result run(const skerry_kernels &kernels, bool exact, int32_t begin = 0, int32_t end = -1, bool masses = true) {
        skerry_attend_params p = params;
        p.exact = exact ? 1 : 0;
        p.pool.chunks = chunk_pointers_.data();
        const int32_t rows = static_cast<int32_t>(positions.size());
        skerry_attend_task task = {};
        task.tiles = tiles.data();
        task.epochs = epochs.data();
        task.queries = queries.data();
        task.row_positions = positions.data();
        task.tile_begin = begin;
        task.tile_end = end < 0 ? static_cast<int32_t>(tiles.size()) : end;
        task.rows = rows;
        const size_t heads = static_cast<size_t>(rows * p.group), n = static_cast<size_t>(task.tile_end - begin);
        Result result;
        result.out = guarded(heads * static_cast<size_t>(p.value_dim));
        result.max = guarded(heads);
        result.sum = guarded(heads);
        result.tile_max = guarded(n * heads);
        result.tile_sum = guarded(n * heads);
        task.out = result.out.data() + guard;
        task.max = result.max.data() + guard;
        task.sum = result.sum.data() + guard;
        task.tile_max = masses ? result.tile_max.data() + guard : nullptr;
        task.tile_sum = masses ? result.tile_sum.data() + guard : nullptr;
        const size_t scratch_bytes = kernels.attend_scratch_bytes(&p, rows, static_cast<int32_t>(n));
        const Bytes scratch = aligned_bytes(skerry::round_up(scratch_bytes, 64) + 64, 0x7f); // 0x7f7f7f7f is a huge float
        task.scratch = scratch.get();
        kernels.attend(&p, &task);
        guards_hold = true;
        for (size_t i = scratch_bytes; i < skerry::round_up(scratch_bytes, 64) + 64; ++i)
            guards_hold &= scratch.get()[i] == 0x7f;
        trim(result.out);
        trim(result.max);
        trim(result.sum);
        trim(result.tile_max);
        trim(result.tile_sum);
        return result;
    }

    // Normalised output and log-sum-exp per row and head; a head that sees nothing has output 0 and -inf.
    // `sizes`: the same output with every value taken positive, what a sum that cancels is measured against.
    void oracle(std::vector<double> &out, std::vector<double> &lse, std::vector<double> *tile_lse = nullptr, int32_t begin = 0,
                int32_t end = -1, std::vector<double> *sizes = nullptr) const {
        const size_t rows = positions.size(), group = static_cast<size_t>(params.group), heads = rows * group;
        const size_t kd = static_cast<size_t>(params.key_dim), vd = static_cast<size_t>(params.value_dim);
        const size_t last = end < 0 ? tiles.size() : static_cast<size_t>(end);
        const double none = -std::numeric_limits<double>::infinity();
        out.assign(heads * vd, 0);
        lse.assign(heads, none);
        if (sizes != nullptr) sizes->assign(heads, 0);
        if (tile_lse != nullptr) tile_lse->assign((last - static_cast<size_t>(begin)) * heads, none);
        for (size_t h = 0; h < heads; ++h) {
            std::vector<double> logits;
            std::vector<const float *> values;
            double largest = none;
            for (size_t i = static_cast<size_t>(begin); i < last; ++i) {
                const skerry_tile &tile = tiles[i];
                if (params.tiers != 0 && (params.tiers >> tile.tier & 1u) == 0) continue;
                double tile_max = none, tile_sum = 0;
                const size_t start = logits.size();
                for (int32_t t = 0; t < tile.count; ++t) {
                    const int64_t position = tile.first + t, row = positions[h / group];
                    if (position > row || (params.sliding_window > 0 && position <= row - params.sliding_window)) continue;
                    double dot = 0;
                    for (size_t c = 0; c < kd; ++c) {
                        dot += double(queries[h * kd + c]) * double(decoded[i].keys[static_cast<size_t>(t) * kd + c]);
                    }
                    double logit = dot * double(params.scale);
                    if (params.softcap > 0) logit = double(params.softcap) * std::tanh(logit / double(params.softcap));
                    logits.push_back(logit);
                    values.push_back(decoded[i].values.data() + static_cast<size_t>(t) * vd);
                    largest = std::max(largest, logit);
                    tile_max = std::max(tile_max, logit);
                }
                for (size_t k = start; k < logits.size(); ++k)
                    tile_sum += std::exp(logits[k] - tile_max);
                if (tile_lse != nullptr && tile_sum > 0) {
                    (*tile_lse)[(i - static_cast<size_t>(begin)) * heads + h] = tile_max + std::log(tile_sum);
                }
            }
            double sum = 0;
            for (size_t k = 0; k < logits.size(); ++k) {
                const double weight = std::exp(logits[k] - largest);
                sum += weight;
                for (size_t c = 0; c < vd; ++c)
                    out[h * vd + c] += weight * double(values[k][c]);
            }
            if (logits.empty()) continue;
            lse[h] = largest + std::log(sum);
            for (size_t c = 0; c < vd; ++c) {
                out[h * vd + c] /= sum;
                double size = 0;
                for (size_t k = 0; k < logits.size() && sizes != nullptr; ++k)
                    size += std::exp(logits[k] - lse[h]) * std::abs(double(values[k][c]));
                if (sizes != nullptr) (*sizes)[h] += size * size;
            }
        }
    }

    uint8_t *record(size_t tile) {
        const uint32_t place = tiles[tile].place, shift = params.pool.chunk_shift;
        return chunk_pointers_[place >> shift] + size_t(place & ((1u << shift) - 1u)) * 64;
    }

    const std::vector<uint8_t *> &chunk_list() const { return chunk_pointers_; }

    // Any of the records of these formats.
    void copy_record(int32_t key_format, int32_t value_format, Random &choice, uint8_t *to, size_t bytes) const {
        for (size_t at = static_cast<size_t>(choice.below(static_cast<int32_t>(tiles.size())));; at = (at + 1) % tiles.size()) {
            const skerry_tile &tile = tiles[at];
            if (tile.key_format != key_format || tile.value_format != value_format) continue;
            const uint32_t shift = params.pool.chunk_shift;
            std::memcpy(to, chunk_pointers_[tile.place >> shift] + size_t(tile.place & ((1u << shift) - 1u)) * 64, bytes);
            return;
        }
    }

    bool guards_hold = true;
    static constexpr size_t guard = 64;

private:
    static constexpr float guard_value = -12345.0f;

    std::vector<float> guarded(size_t n) const { return std::vector<float>(n + 2 * guard, guard_value); }

    void trim(std::vector<float> &row) {
        for (size_t i = 0; i < guard; ++i)
            guards_hold &= row[i] == guard_value && row[row.size() - 1 - i] == guard_value;
        row.erase(row.end() - static_cast<ptrdiff_t>(guard), row.end());
        row.erase(row.begin(), row.begin() + static_cast<ptrdiff_t>(guard));
    }

    // Chunks are full of NaN; a record that would straddle one starts the next, and unused units lie between records.
    uint8_t *take(size_t bytes, uint32_t &place) {
        const uint32_t units = static_cast<uint32_t>(bytes / 64), size = 1u << params.pool.chunk_shift;
        if (chunks_.empty() || used_ + units > size) {
            chunks_.push_back(aligned_bytes(size_t(size) * 64, 0xff));
            chunk_pointers_.push_back(chunks_.back().get());
            used_ = 0;
        }
        place = static_cast<uint32_t>(chunks_.size() - 1) << params.pool.chunk_shift | used_;
        uint8_t *const record = chunks_.back().get() + size_t(used_) * 64;
        used_ += units + static_cast<uint32_t>(random.below(3));
        return record;
    }

    skerry_code_params code_params(const skerry_tile &tile, skerry_side side) const {
        skerry_code_params code = {};
        code.side = side;
        code.format = side == SKERRY_SIDE_KEY ? tile.key_format : tile.value_format;
        code.dim = side == SKERRY_SIDE_KEY ? spec_.key_dim : spec_.value_dim;
        code.epoch = skerry::is_r_format(code.format) ? &epochs[tile.epoch] : nullptr;
        code.attention_factor = params.attention_factor;
        code.rotary_dims = params.rotary_dims;
        code.rotary_pairing = params.rotary_pairing;
        code.position = tile.first;
        code.capacity = tile.capacity;
        code.count = tile.count;
        code.value_group = spec_.value_group;
        code.grid_dtype = spec_.grid;
        code.rank = side == SKERRY_SIDE_KEY ? skerry::tile_key_rank(tile.epoch) : skerry::tile_value_rank(tile.epoch);
        if (skerry::is_c_format(code.format) && side == SKERRY_SIDE_KEY) code.inverse_frequencies = params.inverse_frequencies;
        return code;
    }

    void put(const skerry_tile &tile, skerry_side side, const std::vector<float> &rows, const LowRankParts &low, uint8_t *part) {
        const skerry_code_params code = code_params(tile, side);
        if (skerry::is_l_format(code.format)) {
            std::copy(low.part[side].begin(), low.part[side].end(), part);
            return;
        }
        if (skerry::is_full_format(code.format)) {
            skerry::ref::append(code.format, side, code.dim, code.capacity, 0, code.count, rows.data(), code.dim, part);
            return;
        }
        const Bytes scratch = aligned_bytes(skerry::ref::code_scratch_bytes(code.dim, code.capacity), 0);
        skerry::ref::encode(&code, rows.data(), part, scratch.get());
    }

    std::vector<float> get(const skerry_tile &tile, skerry_side side, const uint8_t *part) const {
        const skerry_code_params code = code_params(tile, side);
        std::vector<float> rows(static_cast<size_t>(code.count) * static_cast<size_t>(code.dim));
        const Bytes scratch = aligned_bytes(skerry::ref::code_scratch_bytes(code.dim, code.capacity), 0);
        skerry::ref::decode(&code, part, rows.data(), scratch.get());
        return rows;
    }

    Spec spec_;
    std::vector<float> frequencies_;
    std::vector<std::vector<float>> numbers_;
    std::vector<Bytes> chunks_;
    std::vector<uint8_t *> chunk_pointers_;
    uint32_t used_ = 0;
};

// Largest over heads of |out / sum - oracle| / |oracle|, and of the error of the log-sum-exp. Of an output that cancels to less than
// a tenth of its terms, a tenth of them stands below the line.
struct Errors {
    double out = 0, lse = 0, mass = 0;
    bool empties_agree = true;
};

inline Errors compare(const Scene &scene, const Result &result, int32_t begin = 0, int32_t end = -1) {
    std::vector<double> out, lse, tile_lse, sizes;
    scene.oracle(out, lse, &tile_lse, begin, end, &sizes);
    const size_t vd = static_cast<size_t>(scene.params.value_dim), heads = lse.size();
    Errors errors;
    for (size_t h = 0; h < heads; ++h) {
        const bool is_empty = std::isinf(lse[h]);
        if (is_empty || std::isinf(result.max[h])) {
            errors.empties_agree &= is_empty && result.max[h] == -std::numeric_limits<float>::infinity() && result.sum[h] == 0;
            for (size_t c = 0; c < vd; ++c)
                errors.empties_agree &= result.out[h * vd + c] == 0;
            continue;
        }
        double error = 0, size = 0;
        for (size_t c = 0; c < vd; ++c) {
            const double x = double(result.out[h * vd + c]) / double(result.sum[h]), y = out[h * vd + c];
            error += (x - y) * (x - y);
            size += y * y;
        }
        const double own = double(result.max[h]) + std::log(double(result.sum[h]));
        // A negated comparison lets no NaN through.
        const double relative = std::sqrt(error / std::max(size, 0.01 * sizes[h])), lse_error = std::abs(own - lse[h]);
        if (!(relative <= errors.out)) errors.out = relative;
        if (!(lse_error <= errors.lse)) errors.lse = lse_error;
        double mass = 0;
        for (size_t i = 0; i < result.tile_max.size() / heads; ++i) {
            const size_t at = i * heads + h;
            if (std::isinf(tile_lse[at])) {
                errors.empties_agree &= result.tile_max[at] == -std::numeric_limits<float>::infinity() && result.tile_sum[at] == 0;
                continue;
            }
            mass += double(result.tile_sum[at]) * std::exp(double(result.tile_max[at]) - own);
        }
        if (!(std::abs(mass - 1) <= errors.mass)) errors.mass = std::abs(mass - 1);
    }
    return errors;
}

struct Level {
    std::string name;
    uint32_t features;
};

inline const std::vector<Level> &levels() {
    static const std::vector<Level> all = {
        {"reference", 0},
        {"avx2", SKERRY_CPU_AVX2},
        {"avx512", SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512},
        {"avx512-vnni", SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512 | SKERRY_CPU_AVX512_VNNI},
    };
    return all;
}

inline bool runs(const Level &level) { return (level.features & skerry::cpu_detect()) == level.features; }

} // namespace scene
