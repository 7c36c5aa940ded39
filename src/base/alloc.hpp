#pragma once
// Every byte of host memory that the library holds comes through an Allocator, which counts it under an
// owner.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <skerry/hooks.h>

#include "base/checked.hpp"

namespace skerry {

enum class Owner : uint8_t { context, tables, pool, exact, host, staging, scratch, step, count };

class Allocator {
public:
    // Both functions, or neither for the C library's; the API layer has refused anything else.
    explicit Allocator(const skerry_allocator &hooks = {}) noexcept;
    // Takes memory from `parent`, which must outlive it, and counts it in both: one context, several caches.
    explicit Allocator(Allocator &parent) noexcept;
    Allocator(const Allocator &) = delete;
    Allocator &operator=(const Allocator &) = delete;

    // Throws std::bad_alloc. Zero bytes are a null pointer. `alignment` is a power of two.
    [[nodiscard]] void *allocate(Owner owner, size_t size, size_t alignment = default_alignment);
    [[nodiscard]] void *try_allocate(Owner owner, size_t size, size_t alignment = default_alignment) noexcept;
    // With the owner, size and alignment of the allocation.
    void release(Owner owner, void *memory, size_t size, size_t alignment = default_alignment) noexcept;

    uint64_t live_bytes(Owner owner) const noexcept { return at(owner).live.load(std::memory_order_relaxed); }
    uint64_t peak_bytes(Owner owner) const noexcept { return at(owner).peak.load(std::memory_order_relaxed); }
    uint64_t live_bytes() const noexcept { return total_.live.load(std::memory_order_relaxed); }
    uint64_t peak_bytes() const noexcept { return total_.peak.load(std::memory_order_relaxed); }
    // Successful allocations so far: equal before and after a step that promises to make none.
    // Allocations not yet released.
    uint64_t live_count() const noexcept { return live_count_.load(std::memory_order_relaxed); }
    uint64_t allocation_count() const noexcept { return allocations_.load(std::memory_order_relaxed); }
    // Peaks restart at what is live now; the parent's stay.
    void reset_peaks() noexcept;

    static constexpr size_t default_alignment = alignof(std::max_align_t);

private:
    struct Counter {
        std::atomic<uint64_t> live{0};
        std::atomic<uint64_t> peak{0};
        void add(uint64_t bytes) noexcept;
        void sub(uint64_t bytes) noexcept { live.fetch_sub(bytes, std::memory_order_relaxed); }
    };
    const Counter &at(Owner owner) const noexcept { return owners_[static_cast<size_t>(owner)]; }
    Counter &at(Owner owner) noexcept { return owners_[static_cast<size_t>(owner)]; }

    skerry_allocator hooks_{};
    Allocator *parent_ = nullptr;
    Counter owners_[static_cast<size_t>(Owner::count)];
    Counter total_;
    std::atomic<uint64_t> allocations_{0};
    std::atomic<uint64_t> live_count_{0};
};

// A growing array of plain values. Growth leaves it unchanged when it throws std::bad_alloc.
template <class T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    // Holds nothing and cannot grow until another Buffer is moved into it.
    Buffer() noexcept = default;
    Buffer(Allocator &allocator, Owner owner, size_t alignment = alignof(T)) noexcept
        : allocator_(&allocator), alignment_(std::max(alignment, Allocator::default_alignment)),
          owner_(owner) {}
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    Buffer(Buffer &&other) noexcept { swap(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        Buffer moved(std::move(other));
        swap(moved);
        return *this;
    }
    ~Buffer() { free_memory(); }

    void swap(Buffer &other) noexcept {
        std::swap(allocator_, other.allocator_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
        std::swap(alignment_, other.alignment_);
        std::swap(owner_, other.owner_);
    }

    // Room for exactly `count`, if there is less.
    void reserve(size_t count) {
        if (count > capacity_) relocate(count);
    }
    // New elements are all-zero bytes.
    void resize(size_t count) {
        const size_t old = size_;
        resize_uninitialised(count);
        if (count > old) std::memset(static_cast<void *>(data_ + old), 0, (count - old) * sizeof(T));
    }
    void resize_uninitialised(size_t count) {
        reserve(count);
        size_ = count;
    }
    void clear() noexcept { size_ = 0; }
    // Gives the memory back; stays usable.
    void reset() noexcept {
        free_memory();
        data_ = nullptr;
        size_ = capacity_ = 0;
    }
    void shrink_to_fit() {
        if (size_ == 0) reset();
        else if (size_ < capacity_) relocate(size_);
    }

    void push_back(T value) {
        grow_for(1);
        data_[size_++] = value;
    }
    T pop_back() noexcept { return data_[--size_]; }
    // `values` may lie in this buffer only while its capacity suffices.
    void append(std::span<const T> values) {
        if (values.empty()) return;
        grow_for(values.size());
        std::memcpy(static_cast<void *>(data_ + size_), values.data(), values.size_bytes());
        size_ += values.size();
    }
    void insert(size_t at, T value) {
        grow_for(1);
        std::memmove(static_cast<void *>(data_ + at + 1), data_ + at, (size_ - at) * sizeof(T));
        data_[at] = value;
        ++size_;
    }
    void erase(size_t at, size_t count = 1) noexcept {
        std::memmove(static_cast<void *>(data_ + at), data_ + at + count, (size_ - at - count) * sizeof(T));
        size_ -= count;
    }

    T *data() noexcept { return data_; }
    const T *data() const noexcept { return data_; }
    size_t size() const noexcept { return size_; }
    size_t capacity() const noexcept { return capacity_; }
    bool empty() const noexcept { return size_ == 0; }
    // What the allocator has counted for it.
    uint64_t allocated_bytes() const noexcept { return uint64_t{capacity_} * sizeof(T); }
    T &operator[](size_t i) noexcept { return data_[i]; }
    const T &operator[](size_t i) const noexcept { return data_[i]; }
    T &back() noexcept { return data_[size_ - 1]; }
    const T &back() const noexcept { return data_[size_ - 1]; }
    T *begin() noexcept { return data_; }
    T *end() noexcept { return data_ + size_; }
    const T *begin() const noexcept { return data_; }
    const T *end() const noexcept { return data_ + size_; }
    std::span<T> span() noexcept { return {data_, size_}; }
    std::span<const T> span() const noexcept { return {data_, size_}; }

private:
    void grow_for(size_t more) {
        size_t needed = 0;
        if (!checked_add(size_, more, &needed)) throw std::bad_alloc();
        if (needed > capacity_) relocate(std::max({needed, capacity_ + capacity_ / 2, size_t{8}}));
    }
    void relocate(size_t capacity) {
        size_t bytes = 0;
        if (allocator_ == nullptr || !checked_mul(capacity, sizeof(T), &bytes)) throw std::bad_alloc();
        T *memory = static_cast<T *>(allocator_->allocate(owner_, bytes, alignment_));
        if (size_ != 0) std::memcpy(static_cast<void *>(memory), data_, size_ * sizeof(T));
        free_memory();
        data_ = memory;
        capacity_ = capacity;
    }
    void free_memory() noexcept {
        if (data_ != nullptr) allocator_->release(owner_, data_, capacity_ * sizeof(T), alignment_);
    }

    Allocator *allocator_ = nullptr;
    T *data_ = nullptr;
    size_t size_ = 0;
    size_t capacity_ = 0;
    size_t alignment_ = Allocator::default_alignment;
    Owner owner_ = Owner::context;
};

// For standard containers of types that a Buffer cannot hold.
template <class T>
class CountedAllocator {
public:
    using value_type = T;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    CountedAllocator(Allocator &allocator, Owner owner) noexcept : allocator_(&allocator), owner_(owner) {}
    template <class U>
    CountedAllocator(const CountedAllocator<U> &other) noexcept
        : allocator_(&other.allocator()), owner_(other.owner()) {}

    T *allocate(size_t count) {
        size_t bytes = 0;
        if (!checked_mul(count, sizeof(T), &bytes)) throw std::bad_alloc();
        return static_cast<T *>(allocator_->allocate(owner_, bytes, alignment));
    }
    void deallocate(T *memory, size_t count) noexcept {
        allocator_->release(owner_, memory, count * sizeof(T), alignment);
    }
    Allocator &allocator() const noexcept { return *allocator_; }
    Owner owner() const noexcept { return owner_; }
    template <class U>
    bool operator==(const CountedAllocator<U> &other) const noexcept {
        return allocator_ == &other.allocator() && owner_ == other.owner();
    }

private:
    static constexpr size_t alignment = std::max(alignof(T), Allocator::default_alignment);
    Allocator *allocator_;
    Owner owner_;
};

template <class T>
using Vector = std::vector<T, CountedAllocator<T>>;

template <class T, class... Arguments>
[[nodiscard]] T *create_object(Allocator &allocator, Owner owner, Arguments &&...arguments) {
    constexpr size_t alignment = std::max(alignof(T), Allocator::default_alignment);
    void *memory = allocator.allocate(owner, sizeof(T), alignment);
    try {
        return new (memory) T(std::forward<Arguments>(arguments)...);
    } catch (...) {
        allocator.release(owner, memory, sizeof(T), alignment);
        throw;
    }
}

// `object` may be NULL, and has exactly the type it was created with.
template <class T>
void destroy_object(Allocator &allocator, Owner owner, T *object) noexcept {
    if (object == nullptr) return;
    object->~T();
    allocator.release(owner, object, sizeof(T), std::max(alignof(T), Allocator::default_alignment));
}

// Sole owner of one object made by create_object.
template <class T>
class Owned {
public:
    Owned() noexcept = default;
    Owned(Allocator &allocator, Owner owner, T *object) noexcept
        : allocator_(&allocator), object_(object), owner_(owner) {}
    Owned(Owned &&other) noexcept
        : allocator_(other.allocator_), object_(std::exchange(other.object_, nullptr)),
          owner_(other.owner_) {}
    Owned &operator=(Owned &&other) noexcept {
        if (this != &other) {
            reset();
            allocator_ = other.allocator_;
            owner_ = other.owner_;
            object_ = std::exchange(other.object_, nullptr);
        }
        return *this;
    }
    ~Owned() { reset(); }
    void reset() noexcept {
        if (object_ != nullptr) destroy_object(*allocator_, owner_, std::exchange(object_, nullptr));
    }
    T *detach() noexcept { return std::exchange(object_, nullptr); }
    T *get() const noexcept { return object_; }
    T *operator->() const noexcept { return object_; }
    T &operator*() const noexcept { return *object_; }
    explicit operator bool() const noexcept { return object_ != nullptr; }

private:
    Allocator *allocator_ = nullptr;
    T *object_ = nullptr;
    Owner owner_ = Owner::context;
};

template <class T, class... Arguments>
[[nodiscard]] Owned<T> make_owned(Allocator &allocator, Owner owner, Arguments &&...arguments) {
    return Owned<T>(allocator, owner,
                    create_object<T>(allocator, owner, std::forward<Arguments>(arguments)...));
}

} // namespace skerry
