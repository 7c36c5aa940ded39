// Prints records of every format and router keys of every form, made from numbers that integer arithmetic gives, with the rows they
// decode to.
//
//     write_records [FEATURES]
//
// FEATURES: mask of SKERRY_CPU_* the kernels may use, within what the machine has; 0, the reference, when left out.
// The output is committed as records.txt: a change of any byte is a change of the format.

#include "base/half.hpp"
#include "codec/epoch.hpp"
#include "codec/layout.hpp"
#include "codec/router_key.hpp"
#include "cpu/kernels.hpp"

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

using namespace skerry;

namespace {

class Numbers {
public:
    explicit Numbers(uint64_t seed) : state_(seed * 2 + 1) {}
    uint32_t bits() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        uint64_t mixed = state_ ^ (state_ >> 33);
        mixed *= 0xff51afd7ed558ccdu;
        return static_cast<uint32_t>(mixed >> 32);
    }
    // Near to normal, variance 1.
    float normal() {
        int64_t sum = 0;
        for (int i = 0; i < 12; ++i)
            sum += static_cast<int32_t>(bits()) >> 8;
        return static_cast<float>(sum >> 4) * 0x1p-20f;
    }

private:
    uint64_t state_;
};

struct Record {
    skerry_format format;
    skerry_side side;
    int32_t dim, capacity, count;
    int32_t value_group = 0;
    skerry_dtype grid = SKERRY_DTYPE_F16;
    bool is_rotary = false;
    float size = 1.0f;
};

void print_hex(const char *name, const void *data, size_t bytes) {
    std::printf("%s ", name);
    for (size_t i = 0; i < bytes; ++i)
        std::printf("%02x", static_cast<const uint8_t *>(data)[i]);
    std::printf("\n");
}

void print_record(const skerry_kernels *kernels, const Record &record, int index) {
    const size_t dim = static_cast<size_t>(record.dim), count = static_cast<size_t>(record.count);
    Numbers numbers(static_cast<uint64_t>(index) + 1);

    // Keys have a mean and a size per channel, as models' keys do; one channel is an outlier.
    std::vector<double> mean(dim), variance(dim), query_square(dim);
    for (size_t c = 0; c < dim; ++c) {
        mean[c] = static_cast<double>(0.5f * numbers.normal() * record.size);
        const double deviation = static_cast<double>((c == dim / 3 ? 8.0f : 0.75f) * record.size);
        variance[c] = deviation * deviation;
        query_square[c] = static_cast<double>(1u + numbers.bits() % 8);
    }
    std::vector<float> rows(dim * count), decoded(dim * count);
    float largest = 0;
    for (size_t t = 0; t < count; ++t) {
        for (size_t c = 0; c < dim; ++c) {
            const float deviation = (c == dim / 3 ? 8.0f : 0.75f) * record.size;
            float number = numbers.normal() * deviation;
            if (record.side == SKERRY_SIDE_KEY) number += static_cast<float>(mean[c]);
            if (t == 2) number = record.side == SKERRY_SIDE_KEY ? static_cast<float>(mean[c]) : 0.0f;
            rows[t * dim + c] = number;
            largest = std::fmax(largest, std::fabs(number));
        }
    }
    std::vector<uint8_t> stored(epoch_bytes(record.dim));
    epoch_freeze({mean.data(), variance.data(), index % 2 == 0 ? query_square.data() : nullptr, largest, largest}, record.dim,
                 stored.data());
    std::vector<float> epoch_mean(dim), balance(dim);
    const skerry_epoch epoch = epoch_decode(stored.data(), record.dim, epoch_mean.data(), balance.data());

    std::vector<float> frequencies;
    for (size_t i = 0; i < dim / 4; ++i)
        frequencies.push_back(1.0f / static_cast<float>(1 + 3 * i));

    skerry_code_params params{};
    params.epoch = is_r_format(record.format) ? &epoch : nullptr;
    params.dim = record.dim;
    params.capacity = record.capacity;
    params.count = record.count;
    params.value_group = record.value_group;
    params.grid_dtype = record.grid;
    params.format = record.format;
    params.side = record.side;
    params.attention_factor = 1.0f;
    if (record.is_rotary) {
        params.inverse_frequencies = frequencies.data();
        params.rotary_dims = static_cast<int32_t>(2 * frequencies.size());
        params.rotary_pairing = index % 2;
        params.position = 500 + index;
        params.attention_factor = 1.25f;
    }
    std::vector<uint8_t> part(part_bytes(record.format, record.side, record.dim, record.capacity, record.value_group));
    std::vector<uint8_t> scratch(kernels->code_scratch_bytes(record.dim, record.capacity));
    kernels->encode(&params, rows.data(), part.data(), scratch.data());
    kernels->decode(&params, part.data(), decoded.data(), scratch.data());

    std::printf("record %d\n", index);
    std::printf("shape format=%d side=%d dim=%d capacity=%d count=%d value_group=%d grid=%d\n", int(record.format), int(record.side),
                int(record.dim), int(record.capacity), int(record.count), int(record.value_group), int(record.grid));
    if (is_r_format(record.format)) print_hex("epoch", stored.data(), stored.size());
    if (record.is_rotary) {
        std::printf("rotary pairing=%d dims=%d position=%d attention_factor=1.25\n", int(params.rotary_pairing), int(params.rotary_dims),
                    int(params.position));
        print_hex("inverse_frequencies", frequencies.data(), 4 * frequencies.size());
    }
    print_hex("part", part.data(), part.size());
    print_hex("rows", decoded.data(), 4 * decoded.size());
}

// Rows of decaying size along mixed directions, as far as `rank`, and noise of one part in 64: what low rank is for.
std::vector<float> low_rank_rows(Numbers &numbers, size_t count, size_t dim, size_t rank) {
    std::vector<float> directions(rank * dim), rows(count * dim);
    for (float &number : directions)
        number = numbers.normal();
    for (size_t t = 0; t < count; ++t) {
        for (size_t c = 0; c < dim; ++c)
            rows[t * dim + c] = numbers.normal() * 0x1p-6f;
        for (size_t k = 0; k < rank; ++k) {
            const float along = numbers.normal() / static_cast<float>(1u << k);
            for (size_t c = 0; c < dim; ++c)
                rows[t * dim + c] += along * directions[k * dim + c];
        }
    }
    return rows;
}

struct LowRank {
    skerry_format format;
    skerry_side side;
    int32_t dim, count, rank;
    float bound = 0;
    bool is_shared = false; // on the basis of the record before
};

// `part`: of the record before, and of this one.
void print_low_rank(const skerry_kernels *kernels, const LowRank &record, int index, std::vector<uint8_t> *part) {
    const size_t dim = static_cast<size_t>(record.dim), count = static_cast<size_t>(record.count);
    Numbers numbers(static_cast<uint64_t>(index) + 1);
    const std::vector<float> rows = low_rank_rows(numbers, count, dim, static_cast<size_t>(record.rank) + 1);
    skerry_factor_params params{};
    params.dim = record.dim;
    params.count = record.count;
    params.max_rank = record.rank;
    params.error_bound = record.bound;
    params.format = record.format;
    params.side = record.side;
    const std::vector<uint8_t> before = *part;
    params.basis = record.is_shared ? before.data() : nullptr;
    params.basis_rank = record.is_shared ? record.rank : 0;
    part->assign(part_bytes(record.format, record.side, record.dim, record.count, 0, record.rank), 0);
    std::vector<float> scratch((kernels->factorise_scratch_bytes(record.dim, record.count) + 64) / sizeof(float));
    void *aligned = scratch.data();
    size_t room = scratch.size() * sizeof(float);
    std::align(64, room - 64, aligned, room);
    skerry_factor_result result{};
    kernels->factorise(&params, rows.data(), part->data(), &result, aligned);
    part->resize(part_bytes(record.format, record.side, record.dim, record.count, 0, result.rank));

    skerry_code_params code{};
    code.dim = record.dim;
    code.capacity = code.count = record.count;
    code.format = record.format;
    code.side = record.side;
    code.rank = result.rank;
    std::vector<float> decoded(dim * count);
    std::vector<uint8_t> code_scratch(kernels->code_scratch_bytes(record.dim, record.count));
    kernels->decode(&code, part->data(), decoded.data(), code_scratch.data());

    std::printf("record %d\n", index);
    std::printf("shape format=%d side=%d dim=%d capacity=%d count=%d rank=%d\n", int(record.format), int(record.side), int(record.dim),
                int(record.count), int(record.count), int(result.rank));
    print_hex("error", &result.error, sizeof result.error);
    print_hex("part", part->data(), part->size());
    print_hex("rows", decoded.data(), 4 * decoded.size());
}

// Keys in a few groups, as what attention looks for lies.
std::vector<float> grouped_keys(Numbers &numbers, size_t tokens, size_t dim) {
    std::vector<float> centres(5 * dim), keys(tokens * dim);
    for (float &number : centres)
        number = 2.0f * numbers.normal();
    for (size_t t = 0; t < tokens; ++t) {
        const size_t group = numbers.bits() % 5;
        for (size_t c = 0; c < dim; ++c)
            keys[t * dim + c] = centres[group * dim + c] + 0.5f * numbers.normal();
    }
    return keys;
}

void print_centroids(const skerry_kernels *kernels, int32_t dim, int32_t tokens, int index) {
    const size_t channels = static_cast<size_t>(dim);
    Numbers numbers(static_cast<uint64_t>(index) + 1);
    const std::vector<float> keys = grouped_keys(numbers, static_cast<size_t>(tokens), channels);
    std::vector<double> mean(channels), variance(channels);
    float largest = 0;
    for (size_t c = 0; c < channels; ++c) {
        for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
            const float key = keys[t * channels + c];
            mean[c] += static_cast<double>(key) / tokens;
            largest = std::fmax(largest, std::fabs(key));
        }
        variance[c] = 1.0 + static_cast<double>(c % 4);
    }
    std::vector<uint8_t> stored(epoch_bytes(dim)), counts(router_centroids);
    epoch_freeze({mean.data(), variance.data(), nullptr, largest, largest}, dim, stored.data());
    std::vector<float> epoch_mean(channels), balance(channels), centroids(router_centroids * channels),
        decoded(router_centroids * channels);
    const skerry_epoch epoch = epoch_decode(stored.data(), dim, epoch_mean.data(), balance.data());
    make_centroids(keys.data(), tokens, dim, centroids.data(), counts.data());
    skerry_code_params code{};
    code.epoch = &epoch;
    code.attention_factor = 1.0f;
    code.dim = dim;
    code.capacity = code.count = router_centroids;
    code.format = SKERRY_FORMAT_R2;
    code.side = SKERRY_SIDE_KEY;
    code.grid_dtype = SKERRY_DTYPE_F16;
    std::vector<uint8_t> part(part_bytes(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, dim, router_centroids));
    std::vector<uint8_t> scratch(kernels->code_scratch_bytes(dim, router_centroids));
    kernels->encode(&code, centroids.data(), part.data(), scratch.data());
    kernels->decode(&code, part.data(), decoded.data(), scratch.data());

    std::printf("record %d\n", index);
    std::printf("shape format=%d side=%d dim=%d capacity=%d count=%d tokens=%d\n", int(SKERRY_FORMAT_R2), int(SKERRY_SIDE_KEY), int(dim),
                int(router_centroids), int(router_centroids), int(tokens));
    print_hex("epoch", stored.data(), stored.size());
    print_hex("counts", counts.data(), counts.size());
    print_hex("part", part.data(), part.size());
    print_hex("rows", decoded.data(), 4 * decoded.size());
}

// Keys of 24 channels, projected; then the means of their clusters.
void print_projected(int32_t rank, int32_t vectors, int32_t tokens, int index) {
    constexpr int32_t dim = 24;
    const size_t width = static_cast<size_t>(rank);
    Numbers numbers(static_cast<uint64_t>(index) + 1);
    const std::vector<float> keys = grouped_keys(numbers, static_cast<size_t>(tokens), dim);
    std::vector<float> weights(width * dim), projected(static_cast<size_t>(tokens) * width), means(static_cast<size_t>(vectors) * width);
    for (float &number : weights)
        number = 0.25f * numbers.normal();
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t)
        project(weights.data(), keys.data() + t * dim, rank, dim, projected.data() + t * width);
    std::vector<uint8_t> counts(static_cast<size_t>(vectors)), part(projected_block_bytes(rank, vectors));
    make_centroids(projected.data(), tokens, rank, means.data(), counts.data(), vectors);
    encode_projected(means.data(), rank, vectors, part.data());

    std::vector<float> decoded(means.size());
    for (int32_t v = 0; v < vectors; ++v) {
        uint16_t scale = 0;
        std::memcpy(&scale, part.data() + projected_scale_offset(rank, vectors) + 2 * v, 2);
        for (int32_t i = 0; i < rank; ++i) {
            const bool is_half = rank > router_byte_rank;
            const int32_t per_word = is_half ? 8 : 4, within = i % per_word;
            const uint8_t byte = part[static_cast<size_t>(4 * (i / per_word * vectors + v) + within % 4)];
            const int32_t code = !is_half ? static_cast<int8_t>(byte) : static_cast<int8_t>(within < 4 ? byte << 4 : byte & 0xf0) / 16;
            decoded[static_cast<size_t>(v * rank + i)] = static_cast<float>(code) * f16_to_f32(scale);
        }
    }
    std::printf("record %d\n", index);
    std::printf("projected rank=%d vectors=%d tokens=%d\n", int(rank), int(vectors), int(tokens));
    print_hex("counts", counts.data(), counts.size());
    print_hex("part", part.data(), part.size());
    print_hex("rows", decoded.data(), 4 * decoded.size());
}

} // namespace

int main(int count, char **arguments) {
    const uint32_t wanted = count > 1 ? static_cast<uint32_t>(std::strtoul(arguments[1], nullptr, 0)) : 0;
    if ((wanted & ~cpu_detect()) != 0) {
        std::fprintf(stderr, "this machine or build lacks some of these features\n");
        return 77;
    }
    const skerry_kernels *const kernels = cpu_kernels(wanted);
    std::vector<Record> records;
    for (const skerry_format format : {SKERRY_FORMAT_R2, SKERRY_FORMAT_R3, SKERRY_FORMAT_R4, SKERRY_FORMAT_R8}) {
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
            records.push_back({format, side, 64, 16, 6});
            records.push_back({format, side, 80, 5, 5});
            records.push_back({format, side, 128, 16, 3});
            records.push_back({format, side, 10, 7, 6});
            records.push_back({format, side, 24, 8, 8, 0, SKERRY_DTYPE_F16, false, format == SKERRY_FORMAT_R3 ? 0x1p90f : 0x1p-20f});
        }
    }
    for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE})
        records.push_back({SKERRY_FORMAT_R8, side, 17, 4, 3});
    for (const skerry_format format : {SKERRY_FORMAT_F32, SKERRY_FORMAT_F16, SKERRY_FORMAT_BF16}) {
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE})
            records.push_back({format, side, 12, 5, 4});
    }
    for (const skerry_format format : {SKERRY_FORMAT_C2, SKERRY_FORMAT_C4}) {
        records.push_back({format, SKERRY_SIDE_KEY, 16, 8, 8});
        records.push_back({format, SKERRY_SIDE_KEY, 16, 13, 11, 0, SKERRY_DTYPE_BF16});
        records.push_back({format, SKERRY_SIDE_KEY, 32, 8, 8, 0, SKERRY_DTYPE_F16, true});
        records.push_back({format, SKERRY_SIDE_KEY, 33, 9, 9, 0, SKERRY_DTYPE_F16, true});
        records.push_back({format, SKERRY_SIDE_VALUE, 64, 8, 8});
        records.push_back({format, SKERRY_SIDE_VALUE, 23, 5, 4, 7, SKERRY_DTYPE_BF16});
        records.push_back({format, SKERRY_SIDE_VALUE, 32, 8, 8, 16});
    }
    for (size_t i = 0; i < records.size(); ++i)
        print_record(kernels, records[i], static_cast<int>(i));

    int index = static_cast<int>(records.size());
    std::vector<uint8_t> part;
    for (const skerry_format format : {SKERRY_FORMAT_L32, SKERRY_FORMAT_L16, SKERRY_FORMAT_L8, SKERRY_FORMAT_L4}) {
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
            for (const LowRank &record : {LowRank{format, side, 24, 9, 5}, LowRank{format, side, 17, 20, 3},
                                          LowRank{format, side, 17, 13, 3, 0, true}, LowRank{format, side, 32, 16, 7, 0.25f}})
                print_low_rank(kernels, record, index++, &part);
        }
    }
    for (const auto &[dim, tokens] : {std::pair<int32_t, int32_t>{64, 16}, {80, 16}, {128, 16}, {64, 3}, {64, 128}})
        print_centroids(kernels, dim, tokens, index++);
    for (const auto &[rank, vectors] : {std::pair<int32_t, int32_t>{16, 4}, {32, 4}, {7, 3}, {21, 1}})
        print_projected(rank, vectors, 16, index++);
    return 0;
}
