#pragma once

#include <cstddef>
#include <cstdint>

// What the inputs so far have led to: inputs that never get past their first call test nothing.
struct FuzzTally {
    unsigned long long inputs = 0;
    unsigned long long caches = 0;
    unsigned long long calls = 0;
    unsigned long long succeeded = 0;
    unsigned long long commits = 0;
    unsigned long long starved = 0;
    unsigned long long zooms = 0; // windows read from the host
};
extern FuzzTally fuzz_tally;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
