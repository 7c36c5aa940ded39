#pragma once

// SeKV as published (arXiv 2606.31145): what a sequence keeps under SKERRY_FIDELITY_PAPER. A prompt is collected like under policy `full`;
// when it ends, its tiles give way to a memory that never changes again, and tokens behind it are not kept.

#include <cstdint>

#include "base/alloc.hpp"
#include "model/plan.hpp"
#include "model/spans.hpp"

namespace skerry {

// Shared by forks. A lane's rows on the device lie one behind another: exact tokens, anchors first, then summaries of compressed spans.
struct PromptMemory {
    explicit PromptMemory(Allocator &allocator)
        : anchors(allocator, Owner::tables), spans(allocator, Owner::tables), lengths(allocator, Owner::tables),
          device_at(allocator, Owner::tables), routes_at(allocator, Owner::tables), host_at(allocator, Owner::tables),
          errors(allocator, Owner::tables), device(allocator, Owner::pool, 64), host(allocator, Owner::host, 64) {}

    uint32_t references = 1;
    int32_t tokens = 0;         // of the prompt
    int32_t exact = 0;          // anchors, and tokens of spans at full resolution
    int32_t compressed = 0;     // spans
    int32_t detailed = 0;       // the first so many of them have factors on the host
    uint64_t exact_bytes = 0;   // of `device`
    Buffer<int32_t> anchors;    // positions, ascending
    Buffer<PaperSpan> spans;    // ascending
    Buffer<int32_t> lengths;    // [compressed] tokens
    Buffer<uint64_t> device_at; // [lane] bytes
    Buffer<uint64_t> routes_at; // [layer] bytes into `device`: projected summaries [query head][compressed][summary_dim], f32
    Buffer<uint64_t> host_at;   // [lane] numbers
    Buffer<uint8_t> errors;     // [lane][compressed] of cutting the rank (codec/error_code.hpp), keys or values; 0: no factors
    Buffer<uint8_t> device;
    Buffer<float> host; // factors and gates, span by span (step/memory.cpp)
};

struct PaperState {
    explicit PaperState(Allocator &allocator)
        : nats(allocator, Owner::staging), zoomed(allocator, Owner::tables), zooming(allocator, Owner::staging) {}

    PromptMemory *memory = nullptr; // set when the prompt has ended
    PromptMemory *made = nullptr;   // by the commit that is under way
    Buffer<float> nats;             // surprisal of the prompt's tokens so far
    Buffer<uint8_t> zoomed;         // [lane][compressed] expanded by a query head for the last committed token
    Buffer<uint8_t> zooming;        // the same in the open step
};
static_assert(sizeof(PaperState) == paper_state_bytes || sizeof(void *) != 8);

} // namespace skerry
