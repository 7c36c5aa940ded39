#include "base/alloc.hpp"

#include <cstdlib>

#if defined(_WIN32)
#include <malloc.h>
#endif

namespace skerry {
namespace {

void *system_alloc(void *, size_t size, size_t alignment) {
#if defined(_WIN32)
    return _aligned_malloc(size, alignment);
#else
    if (alignment <= Allocator::default_alignment) return std::malloc(size);
    void *memory = nullptr;
    return posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
#endif
}

void system_release(void *, void *memory, size_t, size_t) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

} // namespace

Allocator::Allocator(const skerry_allocator &hooks) noexcept : hooks_(hooks) {
    if (hooks_.alloc == nullptr) hooks_ = {nullptr, system_alloc, system_release};
}

Allocator::Allocator(Allocator &parent) noexcept : parent_(&parent) {}

void Allocator::Counter::add(uint64_t bytes) noexcept {
    const uint64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    uint64_t seen = peak.load(std::memory_order_relaxed);
    while (seen < now && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {}
}

void *Allocator::try_allocate(Owner owner, size_t size, size_t alignment) noexcept {
    if (size == 0) return nullptr;
    void *memory = nullptr;
    if (parent_ != nullptr) {
        memory = parent_->try_allocate(owner, size, alignment);
    } else {
        memory = hooks_.alloc(hooks_.user, size, alignment);
        // A host that ignores the alignment would make vector loads fault far from here.
        if (reinterpret_cast<uintptr_t>(memory) % alignment != 0) {
            hooks_.release(hooks_.user, memory, size, alignment);
            memory = nullptr;
        }
    }
    if (memory == nullptr) return nullptr;
    at(owner).add(size);
    total_.add(size);
    allocations_.fetch_add(1, std::memory_order_relaxed);
    live_count_.fetch_add(1, std::memory_order_relaxed);
    return memory;
}

void *Allocator::allocate(Owner owner, size_t size, size_t alignment) {
    void *memory = try_allocate(owner, size, alignment);
    if (memory == nullptr && size != 0) throw std::bad_alloc();
    return memory;
}

void Allocator::release(Owner owner, void *memory, size_t size, size_t alignment) noexcept {
    if (memory == nullptr) return;
    at(owner).sub(size);
    total_.sub(size);
    live_count_.fetch_sub(1, std::memory_order_relaxed);
    if (parent_ != nullptr) parent_->release(owner, memory, size, alignment);
    else hooks_.release(hooks_.user, memory, size, alignment);
}

void Allocator::reset_peaks() noexcept {
    for (Counter &counter : owners_) counter.peak.store(counter.live.load(std::memory_order_relaxed));
    total_.peak.store(total_.live.load(std::memory_order_relaxed));
}

} // namespace skerry
