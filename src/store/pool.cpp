#include "store/pool.hpp"

#include <algorithm>
#include <cstring>

#include "base/pages.hpp"

namespace skerry {

namespace {
size_t chunk_alignment(size_t bytes) { return bytes >= huge_page_bytes ? huge_page_bytes : 64; }
} // namespace

Pool::Pool(Allocator &allocator, Owner owner)
    : allocator_(&allocator), owner_(owner), classes_(allocator, Owner::context), chunks_(allocator, Owner::context),
      chunk_data_(allocator, Owner::context) {}

Pool::~Pool() {
    for (size_t i = 0; i < chunks_.size(); ++i)
        free_chunk(i);
}

void Pool::free_chunk(size_t index) noexcept {
    Chunk &chunk = chunks_[index];
    if (chunk_data_[index] != nullptr) {
        allocator_->release(owner_, chunk_data_[index], chunk.bytes, chunk_alignment(chunk.bytes));
        allocator_->release(owner_, chunk.references, side_bytes(chunk.slots));
        chunk_data_[index] = nullptr;
        chunk.references = nullptr;
    }
}

int32_t Pool::add_class(uint32_t slot_bytes) {
    classes_.push_back(Class{slot_bytes, 0, 0, 0});
    return static_cast<int32_t>(classes_.size() - 1);
}

void Pool::grow(std::span<const uint64_t> slots) {
    const size_t before = chunks_.size();
    size_t after = before;
    for (size_t k = 0; k < slots.size(); ++k) {
        const uint64_t per_chunk = chunk_bytes / classes_[k].slot_bytes;
        after += static_cast<size_t>((slots[k] + per_chunk - 1) / per_chunk);
    }
    if (after == before) return;
    // Everything is made beside what is there, and taken over at once.
    Buffer<Chunk> chunks(*allocator_, Owner::context);
    Buffer<uint8_t *> data(*allocator_, Owner::context);
    chunks.reserve(after);
    data.reserve(after);
    chunks.append(chunks_.span());
    data.append(chunk_data_.span());
    for (size_t k = 0; k < slots.size(); ++k) {
        const uint32_t slot_bytes = classes_[k].slot_bytes;
        for (uint64_t left = slots[k]; left > 0;) {
            const uint32_t here = static_cast<uint32_t>(std::min<uint64_t>(left, chunk_bytes / slot_bytes));
            const size_t bytes = size_t{here} * slot_bytes;
            uint16_t *references = static_cast<uint16_t *>(allocator_->try_allocate(owner_, side_bytes(here)));
            uint8_t *memory = static_cast<uint8_t *>(allocator_->try_allocate(owner_, bytes, chunk_alignment(bytes)));
            if (references == nullptr || memory == nullptr) {
                allocator_->release(owner_, references, side_bytes(here));
                allocator_->release(owner_, memory, bytes, chunk_alignment(bytes));
                for (size_t i = before; i < chunks.size(); ++i) {
                    allocator_->release(owner_, chunks[i].references, side_bytes(chunks[i].slots));
                    allocator_->release(owner_, data[i], chunks[i].bytes, chunk_alignment(chunks[i].bytes));
                }
                throw std::bad_alloc();
            }
            std::memset(references, 0, side_bytes(here));
            // Touched here: a first touch costs microseconds per page, which no step should pay.
            advise_huge_pages(memory, bytes);
            std::memset(memory, 0, bytes);
            chunks.push_back(Chunk{static_cast<int32_t>(k), here, 0, 0, references, bytes});
            data.push_back(memory);
            left -= here;
        }
    }
    chunks_.swap(chunks);
    chunk_data_.swap(data);
    for (size_t k = 0; k < slots.size(); ++k) {
        classes_[k].slots += slots[k];
        if (slots[k] > 0) classes_[k].first_free_chunk = std::min(classes_[k].first_free_chunk, static_cast<int32_t>(before));
    }
}

uint32_t Pool::place_of(int32_t slot_class, uint64_t index) const {
    const uint32_t units = classes_[static_cast<size_t>(slot_class)].slot_bytes / 64;
    for (size_t c = 0; c < chunks_.size(); ++c) {
        if (chunks_[c].slot_class != slot_class || chunk_data_[c] == nullptr) continue;
        if (index < chunks_[c].slots) {
            return static_cast<uint32_t>(c << chunk_shift) + static_cast<uint32_t>(index) * units;
        }
        index -= chunks_[c].slots;
    }
    return no_place;
}

uint64_t Pool::index_of(uint32_t place) const {
    const size_t chunk = place >> chunk_shift;
    const int32_t slot_class = chunks_[chunk].slot_class;
    uint64_t index = (place & ((1u << chunk_shift) - 1)) / (slot_bytes(slot_class) / 64);
    for (size_t c = 0; c < chunk; ++c) {
        if (chunks_[c].slot_class == slot_class && chunk_data_[c] != nullptr) index += chunks_[c].slots;
    }
    return index;
}

bool Pool::shrink(int32_t slot_class, uint64_t slots) {
    Class &kind = classes_[static_cast<size_t>(slot_class)];
    if (slots >= kind.slots) return true;
    uint64_t below = 0;
    for (size_t c = 0; c < chunks_.size(); ++c) {
        Chunk &chunk = chunks_[c];
        if (chunk.slot_class != slot_class || chunk_data_[c] == nullptr) continue;
        const uint64_t keep = below >= slots ? 0 : std::min<uint64_t>(chunk.slots, slots - below);
        below += chunk.slots;
        if (keep == chunk.slots || keep == 0) continue;
        const size_t bytes = static_cast<size_t>(keep) * kind.slot_bytes;
        uint16_t *references = static_cast<uint16_t *>(allocator_->try_allocate(owner_, side_bytes(static_cast<uint32_t>(keep))));
        uint8_t *memory = static_cast<uint8_t *>(allocator_->try_allocate(owner_, bytes, chunk_alignment(bytes)));
        if (references == nullptr || memory == nullptr) {
            if (references != nullptr) allocator_->release(owner_, references, side_bytes(static_cast<uint32_t>(keep)));
            if (memory != nullptr) allocator_->release(owner_, memory, bytes, chunk_alignment(bytes));
            return false;
        }
        std::memcpy(references, chunk.references, side_bytes(static_cast<uint32_t>(keep)));
        std::memcpy(memory, chunk_data_[c], bytes);
        free_chunk(c);
        chunk.references = references;
        chunk.slots = static_cast<uint32_t>(keep);
        chunk.bytes = bytes;
        chunk_data_[c] = memory;
        chunk.next_free = std::min(chunk.next_free, chunk.slots);
        break;
    }
    below = 0;
    for (size_t c = 0; c < chunks_.size(); ++c) {
        Chunk &chunk = chunks_[c];
        if (chunk.slot_class != slot_class || chunk_data_[c] == nullptr) continue;
        if (below >= slots) {
            // The chunk's number stays taken, so that places of others do not change.
            free_chunk(c);
            chunk.slots = 0;
            chunk.bytes = 0;
            continue;
        }
        below += chunk.slots;
    }
    kind.slots = slots;
    return true;
}

uint32_t Pool::take(int32_t slot_class) noexcept {
    Class &kind = classes_[static_cast<size_t>(slot_class)];
    if (kind.used == kind.slots) return no_place;
    for (size_t c = static_cast<size_t>(kind.first_free_chunk); c < chunks_.size(); ++c) {
        Chunk &chunk = chunks_[c];
        if (chunk.slot_class != slot_class || chunk.used == chunk.slots) continue;
        for (uint32_t i = chunk.next_free; i < chunk.slots; ++i) {
            if (chunk.references[i] != 0) continue;
            chunk.references[i] = 1;
            chunk.next_free = i + 1;
            ++chunk.used;
            ++kind.used;
            kind.first_free_chunk = static_cast<int32_t>(c);
            return static_cast<uint32_t>(c << chunk_shift) + i * (kind.slot_bytes / 64);
        }
    }
    return no_place;
}

void Pool::take_at(uint32_t place) noexcept {
    Chunk &chunk = chunks_[place >> chunk_shift];
    Class &kind = classes_[static_cast<size_t>(chunk.slot_class)];
    chunk.references[(place & ((1u << chunk_shift) - 1)) / (kind.slot_bytes / 64)] = 1;
    ++chunk.used;
    ++kind.used;
}

void Pool::retain(uint32_t place) noexcept {
    Chunk &chunk = chunks_[place >> chunk_shift];
    ++chunk.references[(place & ((1u << chunk_shift) - 1)) / (slot_bytes(chunk.slot_class) / 64)];
}

bool Pool::release(uint32_t place) noexcept {
    const uint32_t index = place >> chunk_shift;
    Chunk &chunk = chunks_[index];
    Class &kind = classes_[static_cast<size_t>(chunk.slot_class)];
    const uint32_t slot = (place & ((1u << chunk_shift) - 1)) / (kind.slot_bytes / 64);
    if (--chunk.references[slot] != 0) return false;
    --chunk.used;
    --kind.used;
    chunk.next_free = std::min(chunk.next_free, slot);
    kind.first_free_chunk = std::min(kind.first_free_chunk, static_cast<int32_t>(index));
    return true;
}

uint32_t Pool::references(uint32_t place) const noexcept {
    const Chunk &chunk = chunks_[place >> chunk_shift];
    return chunk.references[(place & ((1u << chunk_shift) - 1)) / (slot_bytes(chunk.slot_class) / 64)];
}

uint64_t Pool::used_bytes() const noexcept {
    uint64_t bytes = 0;
    for (const Class &kind : classes_)
        bytes += kind.used * kind.slot_bytes;
    return bytes;
}

bool Pool::consistent() const noexcept {
    for (size_t k = 0; k < classes_.size(); ++k) {
        uint64_t slots = 0;
        uint64_t used = 0;
        for (size_t c = 0; c < chunks_.size(); ++c) {
            const Chunk &chunk = chunks_[c];
            if (chunk.slot_class != static_cast<int32_t>(k)) continue;
            uint32_t here = 0;
            for (uint32_t i = 0; i < chunk.slots; ++i)
                here += chunk.references[i] != 0 ? 1 : 0;
            if (here != chunk.used) return false;
            slots += chunk.slots;
            used += here;
        }
        if (slots != classes_[k].slots || used != classes_[k].used) return false;
    }
    return true;
}

} // namespace skerry
