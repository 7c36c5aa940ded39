// Runs the interpreter without a fuzzer: the files that are named, or a fixed set of generated inputs. `seeds from count`
// runs another part of the same endless set.

#include "calls.hpp"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

std::vector<uint8_t> generated(uint64_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    const auto next = [&] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    };
    for (int i = 0; i < 8; ++i)
        next();
    std::vector<uint8_t> bytes(200 + next() % 12000);
    for (uint8_t &byte : bytes)
        byte = static_cast<uint8_t>(next() >> 32);
    return bytes;
}

volatile unsigned long long current = 0;

void name_seed(int) { std::fprintf(stderr, "in generated input %llu\n", current); }

bool run_file(const char *name) {
    std::FILE *file = std::fopen(name, "rb");
    if (file == nullptr) return false;
    std::vector<uint8_t> bytes;
    uint8_t block[4096];
    for (size_t got = 0; (got = std::fread(block, 1, sizeof block, file)) > 0;)
        bytes.insert(bytes.end(), block, block + got);
    std::fclose(file);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    return true;
}

} // namespace

int main(int argc, char **argv) {
    char *end = nullptr;
    const unsigned long long from = argc == 3 ? std::strtoull(argv[1], &end, 10) : 0;
    if (argc == 3 && *end == 0) {
        const unsigned long long count = std::strtoull(argv[2], nullptr, 10);
        std::signal(SIGABRT, name_seed);

        for (unsigned long long seed = from; seed < from + count; ++seed) {
            current = seed;
            const std::vector<uint8_t> bytes = generated(seed);
            LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
        }
        const FuzzTally &t = fuzz_tally;
        std::printf("%llu inputs, %llu caches, %llu calls, %llu succeeded, %llu commits, %llu without memory, %llu windows read\n",
                    t.inputs, t.caches, t.calls, t.succeeded, t.commits, t.starved, t.zooms);
        const bool read = t.zooms > 0 || t.inputs < 1000; // a short run may miss it
        return t.caches * 4 >= t.inputs && t.succeeded * 3 >= t.calls && t.commits > 0 && t.starved > 0 && read ? 0 : 1;
    }
    for (int i = 1; i < argc; ++i) {
        if (!run_file(argv[i])) {
            std::fprintf(stderr, "cannot read %s\n", argv[i]);
            return 2;
        }
    }
    return 0;
}
