// Prints records of every format, made from numbers that integer arithmetic gives, with the rows they decode to.
//
//     write_records [FEATURES]
//
// FEATURES: mask of SKERRY_CPU_* the kernels may use, within what the machine has; 0, the reference, when left out.
// The output is committed as records.txt: a change of any byte is a change of the format.

#include "codec/epoch.hpp"
#include "codec/layout.hpp"
#include "cpu/kernels.hpp"

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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
    return 0;
}
