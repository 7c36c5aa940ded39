#pragma once

#include "base/alloc.hpp"

namespace skerry {

// Ids for objects of one kind. An id carries its slot's generation, so that one whose object is gone is
// recognised and never mistaken for the slot's next object. Zero is never an id. One user at a time.
template <class T>
class HandleTable {
    static_assert(std::is_trivially_copyable_v<T>, "hold a pointer or an index");

public:
    HandleTable(Allocator &allocator, Owner owner) noexcept : slots_(allocator, owner) {}

    // Throws std::bad_alloc, and has then changed nothing.
    [[nodiscard]] uint64_t insert(T value) {
        if (free_head_ == none) {
            if (slots_.size() == none - 1) throw std::bad_alloc();
            slots_.push_back(Slot{value, 1, none, true});
            ++live_;
            return make_id(static_cast<uint32_t>(slots_.size() - 1), 1);
        }
        const uint32_t index = free_head_;
        Slot &slot = slots_[index];
        free_head_ = slot.next_free;
        slot.value = value;
        slot.is_live = true;
        ++live_;
        return make_id(index, slot.generation);
    }

    // Makes the next `count` inserts free of allocation.
    void reserve(size_t count) { slots_.reserve(slots_.size() + count); }

    // NULL for an id that was never given out or whose object is gone. Valid until the next insert or erase.
    T *find(uint64_t id) noexcept {
        Slot *slot = slot_of(id);
        return slot != nullptr ? &slot->value : nullptr;
    }
    const T *find(uint64_t id) const noexcept { return const_cast<HandleTable *>(this)->find(id); }

    bool erase(uint64_t id) noexcept {
        Slot *slot = slot_of(id);
        if (slot == nullptr) return false;
        slot->is_live = false;
        --live_;
        // A slot whose generations are used up is left out for good: 20 bytes after four billion uses.
        if (slot->generation == last_generation_) return true;
        ++slot->generation;
        slot->next_free = free_head_;
        free_head_ = static_cast<uint32_t>(slot - slots_.data());
        return true;
    }

    size_t size() const noexcept { return live_; }

    // visit(id, value) in slot order.
    template <class Visit>
    void for_each(Visit &&visit) {
        for (size_t i = 0; i < slots_.size(); ++i) {
            Slot &slot = slots_[i];
            if (slot.is_live) visit(make_id(static_cast<uint32_t>(i), slot.generation), slot.value);
        }
    }

    // Tests reach the end of a slot's generations with this.
    void set_last_generation(uint32_t last) noexcept { last_generation_ = last; }

private:
    struct Slot {
        T value;
        uint32_t generation;
        uint32_t next_free;
        bool is_live;
    };
    static constexpr uint32_t none = 0xffffffffu;

    static uint64_t make_id(uint32_t index, uint32_t generation) noexcept {
        return (uint64_t{generation} << 32) | (uint64_t{index} + 1);
    }
    Slot *slot_of(uint64_t id) noexcept {
        const uint64_t place = id & 0xffffffffu;
        if (place == 0 || place > slots_.size()) return nullptr;
        Slot &slot = slots_[static_cast<size_t>(place - 1)];
        return slot.is_live && slot.generation == static_cast<uint32_t>(id >> 32) ? &slot : nullptr;
    }

    Buffer<Slot> slots_;
    uint32_t free_head_ = none;
    uint32_t last_generation_ = 0xffffffffu;
    size_t live_ = 0;
};

} // namespace skerry
