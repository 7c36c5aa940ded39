// Times of append, encode and decode at every level of this machine: 64 tokens of one KV head, keys and
// values, rows and parts in cache. Best of many runs, in microseconds.
//
//     code_bench [DIM]

#include "codec/layout.hpp"
#include "cpu/kernels.hpp"

#include <skerry/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace skerry;

namespace {

constexpr int32_t tokens = 64, capacity = 16, tiles = tokens / capacity;

struct Times {
    double encode[2] = {1e9, 1e9};
    double decode[2] = {1e9, 1e9};
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Times measure(const skerry_kernels *kernels, skerry_format format, int32_t dim, int repeats) {
    const size_t d = static_cast<size_t>(dim), tile = static_cast<size_t>(capacity) * d;
    std::vector<float> rows(tokens * d), decoded(tokens * d), mean(d, 0.25f), balance(d, 1.5f);
    uint32_t state = 1;
    for (float &number : rows) {
        state = state * 1664525u + 1013904223u;
        number = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-30f;
    }
    const skerry_epoch epoch{mean.data(), balance.data(), 1.0f, 1.0f};
    skerry_code_params params{};
    params.epoch = &epoch;
    params.dim = dim;
    params.capacity = params.count = capacity;
    params.format = format;
    params.attention_factor = 1.0f;
    params.grid_dtype = SKERRY_DTYPE_F16;
    const size_t bytes = round_up(part_bytes(format, SKERRY_SIDE_KEY, dim, capacity), place_bytes) +
                         round_up(part_bytes(format, SKERRY_SIDE_VALUE, dim, capacity), place_bytes);
    std::vector<uint8_t> parts(bytes * tiles), scratch(kernels->code_scratch_bytes(dim, capacity));
    Times best;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        for (size_t side = 0; side < 2; ++side) {
            params.side = static_cast<skerry_side>(side);
            const double start = seconds();
            for (size_t i = 0; i < tiles; ++i) {
                kernels->encode(&params, rows.data() + i * tile, parts.data() + i * bytes, scratch.data());
            }
            const double middle = seconds();
            for (size_t i = 0; i < tiles; ++i) {
                kernels->decode(&params, parts.data() + i * bytes, decoded.data() + i * tile, scratch.data());
            }
            const double end = seconds();
            best.encode[side] = std::min(best.encode[side], 1e6 * (middle - start));
            best.decode[side] = std::min(best.decode[side], 1e6 * (end - middle));
        }
    }
    return best;
}

// One token's keys and values into tiles of 16, the tile a different one each time.
double measure_append(const skerry_kernels *kernels, skerry_format format, int32_t dim) {
    const size_t d = static_cast<size_t>(dim), part = round_up(4 * d * capacity, place_bytes);
    std::vector<float> row(d, 1.25f);
    std::vector<uint8_t> parts(part * 16);
    double best = 1e9;
    for (int repeat = 0; repeat < 200; ++repeat) {
        const double start = seconds();
        for (int32_t i = 0; i < 64; ++i) {
            uint8_t *const key = parts.data() + part * static_cast<size_t>(i % 8), *const value = key + part * 8;
            kernels->append(format, SKERRY_SIDE_KEY, dim, capacity, i % capacity, 1, row.data(), dim, key);
            kernels->append(format, SKERRY_SIDE_VALUE, dim, capacity, i % capacity, 1, row.data(), dim, value);
        }
        best = std::min(best, 1e6 * (seconds() - start) / 64);
    }
    return best;
}

} // namespace

int main(int count, char **arguments) {
    const int32_t dim = count > 1 ? std::atoi(arguments[1]) : 128;
    if (dim < 1 || dim > 4096) return 2;
    const struct {
        skerry_format format;
        const char *name;
    } formats[] = {{SKERRY_FORMAT_F16, "f16"}, {SKERRY_FORMAT_BF16, "bf16"}, {SKERRY_FORMAT_R2, "r2"}, {SKERRY_FORMAT_R3, "r3"},
                   {SKERRY_FORMAT_R4, "r4"},   {SKERRY_FORMAT_R8, "r8"},     {SKERRY_FORMAT_C2, "c2"}, {SKERRY_FORMAT_C4, "c4"}};
    std::printf("%d tokens, d = %d, microseconds\n%-16s %-5s %9s %9s %9s %9s %9s %9s %9s\n", int(tokens), int(dim), "level", "format",
                "encode K", "encode V", "both", "decode K", "decode V", "both", "append 1");
    const skerry_kernels *last = nullptr;
    for (const uint32_t mask : {0u, uint32_t(SKERRY_CPU_AVX2), uint32_t(SKERRY_CPU_AVX2 | SKERRY_CPU_AVX512)}) {
        const skerry_kernels *const kernels = cpu_kernels(mask & cpu_detect());
        if (kernels == last) continue;
        last = kernels;
        for (const auto &entry : formats) {
            if (kernels->supports(entry.format, SKERRY_SIDE_KEY, dim) == 0) continue;
            const Times times = measure(kernels, entry.format, dim, mask == 0 ? 20 : 300);
            std::printf("%-16s %-5s %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f", kernels->name, entry.name, times.encode[0], times.encode[1],
                        times.encode[0] + times.encode[1], times.decode[0], times.decode[1], times.decode[0] + times.decode[1]);
            if (is_full_format(entry.format)) std::printf(" %9.3f", measure_append(kernels, entry.format, dim));
            std::printf("\n");
        }
    }
    return 0;
}
