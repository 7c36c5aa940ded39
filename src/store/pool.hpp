#pragma once

// Where records and full-precision windows lie: slots of a few sizes, carved from chunks that are allocated and touched before a
// step and never inside one. A slot is shared by reference count; its bytes never move while anyone may look.

#include <skerry/backend.h>

#include <cstdint>
#include <span>

#include "base/alloc.hpp"

namespace skerry {

inline constexpr uint32_t no_place = UINT32_MAX;

class Pool {
public:
    static constexpr uint32_t chunk_shift = 16; // 2^16 units of 64 bytes: 4 MiB
    static constexpr size_t chunk_bytes = size_t{64} << chunk_shift;

    Pool(Allocator &allocator, Owner owner);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // A slot size, a multiple of 64 bytes and at most a chunk. Equal sizes may be added twice and stay apart.
    int32_t add_class(uint32_t slot_bytes);

    // Adds slots[c] slots to every class c; throws std::bad_alloc and has then added nothing.
    void grow(std::span<const uint64_t> slots);

    // Takes away free slots until the class has `slots`, and gives their chunks back. Every used slot must lie below the new end:
    // see relocation_of. Returns false, with nothing changed, when memory for a shorter last chunk cannot be had.
    bool shrink(int32_t slot_class, uint64_t slots);
    // The place to which the n-th slot of a class (in order of growth) belongs.
    uint32_t place_of(int32_t slot_class, uint64_t index) const;
    uint64_t index_of(uint32_t place) const;

    // no_place when the class is full.
    uint32_t take(int32_t slot_class) noexcept;
    // A given free slot.
    void take_at(uint32_t place) noexcept;
    void retain(uint32_t place) noexcept;
    // True when that was the last reference.
    bool release(uint32_t place) noexcept;
    uint32_t references(uint32_t place) const noexcept;

    uint8_t *data(uint32_t place) const noexcept {
        return chunk_data_[place >> chunk_shift] + size_t{place & ((1u << chunk_shift) - 1)} * 64;
    }
    skerry_pool_view view() const noexcept { return {chunk_data_.data(), chunk_shift, 0}; }

    int32_t class_count() const noexcept { return static_cast<int32_t>(classes_.size()); }
    int32_t class_of(uint32_t place) const noexcept { return chunks_[place >> chunk_shift].slot_class; }
    uint32_t slot_bytes(int32_t slot_class) const noexcept { return classes_[static_cast<size_t>(slot_class)].slot_bytes; }
    uint64_t slots(int32_t slot_class) const noexcept { return classes_[static_cast<size_t>(slot_class)].slots; }
    uint64_t used(int32_t slot_class) const noexcept { return classes_[static_cast<size_t>(slot_class)].used; }
    uint64_t available(int32_t slot_class) const noexcept { return slots(slot_class) - used(slot_class); }
    uint64_t used_bytes() const noexcept;
    // Counts per class agree with the maps; for invariant checks.
    bool consistent() const noexcept;

private:
    struct Chunk {
        int32_t slot_class;
        uint32_t slots;
        uint32_t used;
        uint32_t next_free; // no free slot lies below
        uint16_t *references;
        size_t bytes;
    };
    struct Class {
        uint32_t slot_bytes;
        int32_t first_free_chunk; // no chunk of the class below has room
        uint64_t slots;
        uint64_t used;
    };
    static size_t side_bytes(uint32_t slots) noexcept { return size_t{slots} * sizeof(uint16_t); }
    void free_chunk(size_t index) noexcept;

    Allocator *allocator_;
    Owner owner_;
    Buffer<Class> classes_;
    Buffer<Chunk> chunks_;
    Buffer<uint8_t *> chunk_data_;
};

} // namespace skerry
