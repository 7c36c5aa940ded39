// SPDX-License-Identifier: MIT
#pragma once

// Balance parameters of one epoch of one KV head: statistics in, stored bytes, and back. Whoever codes with
// an epoch uses the numbers decoded from the stored bytes, never the statistics.
//
// Stored, little-endian, 4 + 3 dim bytes:
//   int8  key_exponent, value_exponent; two bytes 0
//   f16   mean[dim], times 2^key_exponent
//   int8  balance[dim]: 16 log2 of the balance

#include <skerry/backend.h>

#include <cstddef>
#include <cstdint>

namespace skerry {

// f64, because squares of f32 keys leave the range of f32.
struct EpochStatistics {
    const double *mean = nullptr;         // [dim]
    const double *variance = nullptr;     // [dim], of the keys
    const double *query_square = nullptr; // [dim], E[q^2]; null: the host hands no queries over
    float largest_key = 0;                // magnitudes over all channels
    float largest_value = 0;
};

inline constexpr size_t epoch_header_bytes = 4;
inline constexpr int32_t epoch_balance_limit = 126; // in sixteenths: 2^7.875

constexpr size_t epoch_bytes(int32_t key_dim) { return epoch_header_bytes + 3 * static_cast<size_t>(key_dim); }

// The exponent under which the largest magnitude lies in [8, 16): an f16 then has room for 2^12 times that,
// and stays normal down to 2^-18 of it.
int32_t epoch_exponent(float largest);

void epoch_freeze(const EpochStatistics &statistics, int32_t key_dim, uint8_t *stored);

// Fills mean and balance, [key_dim] each, and an epoch that points at them.
skerry_epoch epoch_decode(const uint8_t *stored, int32_t key_dim, float *mean, float *balance);

// False for bytes that epoch_freeze cannot have written: they come from a damaged file.
bool epoch_valid(const uint8_t *stored, int32_t key_dim);

} // namespace skerry
