#pragma once

// One block of host memory for records of any size, in units of 64 bytes. Records are shared by reference count and never move. Everything
// is allocated and touched by `reserve`; taking and giving back allocate nothing.

#include <cstdint>

#include "base/alloc.hpp"

namespace skerry {

class Arena {
public:
    static constexpr size_t unit_bytes = 64;
    // What one unit costs beside its bytes: a reference count, on the first unit of a record.
    static constexpr size_t unit_overhead_bytes = 2;
    static constexpr uint32_t none = UINT32_MAX;

    Arena(Allocator &allocator, Owner owner)
        : memory_(allocator, owner, unit_bytes), references_(allocator, owner), free_(allocator, owner) {}

    // Makes room for `units` units in at most `records` records. Once, on an empty arena. Throws std::bad_alloc.
    void reserve(uint64_t units, uint64_t records);

    // First place from the front where `units` units are free, or `none`.
    uint32_t take(uint32_t units) noexcept;
    void retain(uint32_t place) noexcept { ++references_[place]; }
    // `units` as it was taken. True: that was the last reference.
    bool release(uint32_t place, uint32_t units) noexcept;
    uint32_t references(uint32_t place) const noexcept { return references_[place]; }

    uint8_t *data(uint32_t place) noexcept { return memory_.data() + size_t{place} * unit_bytes; }
    const uint8_t *data(uint32_t place) const noexcept { return memory_.data() + size_t{place} * unit_bytes; }
    uint64_t used_bytes() const noexcept { return used_ * unit_bytes; }
    uint64_t capacity_bytes() const noexcept { return memory_.size(); }
    // Free extents are in order, apart, and make up what is not used.
    bool consistent() const noexcept;

private:
    struct Extent {
        uint32_t begin;
        uint32_t units;
    };
    Buffer<uint8_t> memory_;
    Buffer<uint16_t> references_; // [unit]
    Buffer<Extent> free_;         // ascending, never adjacent
    uint64_t used_ = 0;
};

} // namespace skerry
