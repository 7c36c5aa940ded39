#pragma once

// Every numeric limit of the interface, named.

#include <cstdint>

namespace skerry::limits {

inline constexpr int32_t max_layers = 4096;
inline constexpr int32_t max_heads = 65536;
// A row of this many f32 channels times the longest window still fits one pool chunk.
inline constexpr int32_t max_head_dim = 2048;
inline constexpr int32_t max_sequences = 65535;
// Positions are int32 inside work lists; the last 2^20 are kept free so that position + step never overflows.
inline constexpr int64_t max_position = INT32_MAX - (1 << 20);
inline constexpr int32_t max_step_tokens = 1 << 20;
inline constexpr int32_t max_window = 128;
inline constexpr int32_t max_sinks = 1024;
inline constexpr int32_t max_period = 4096;
inline constexpr int32_t max_score_periods = 8;
inline constexpr uint32_t max_workers = 255;
inline constexpr uint32_t max_transfer_threads = 16;
inline constexpr int32_t max_keep_windows = 1 << 16;
inline constexpr int64_t anchor_run = 16; // anchors in a row that wait for the span behind them
inline constexpr int64_t spare_spans = 64; // spans that the end of a prompt cuts short
inline constexpr int64_t max_zoom_slots = 65000; // their numbers are 16 bits
inline constexpr uint32_t max_struct_size = 4096;
// decisions.md 2: tokens of one epoch, and the fewest keys that its balance is taken from.
inline constexpr int32_t epoch_tokens = 256;
inline constexpr int32_t epoch_keys = 128;
// decisions.md 6: tiles of one split of a row's attention; fixed, so that sums do not depend on workers.
inline constexpr int32_t split_tiles = 64;
// Rows of one attend task: a period of the default policy.
inline constexpr int32_t task_rows = 16;

} // namespace skerry::limits
