#include "base/alloc.hpp"

#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <new>
#include <numeric>
#include <string>

using namespace skerry;

namespace {

// Knows every allocation by address, and fails on demand.
struct Host {
    struct Live {
        size_t size;
        size_t alignment;
    };
    std::map<void *, Live> live;
    int mismatches = 0;
    int fail_after = -1;
    size_t skew = 0;

    skerry_allocator hooks() { return {this, alloc, release}; }
    static void *alloc(void *user, size_t size, size_t alignment) {
        auto *self = static_cast<Host *>(user);
        if (self->fail_after == 0) return nullptr;
        if (self->fail_after > 0) --self->fail_after;
        char *memory = static_cast<char *>(::operator new(size + self->skew, std::align_val_t(alignment)));
        self->live[memory + self->skew] = {size, alignment};
        return memory + self->skew;
    }
    static void release(void *user, void *memory, size_t size, size_t alignment) {
        auto *self = static_cast<Host *>(user);
        const auto found = self->live.find(memory);
        if (found == self->live.end() || found->second.size != size || found->second.alignment != alignment) {
            ++self->mismatches;
            return;
        }
        self->live.erase(found);
        ::operator delete(static_cast<char *>(memory) - self->skew, std::align_val_t(alignment));
    }
};

} // namespace

TEST_CASE("alloc: bytes and peaks are counted per owner") {
    Host host;
    Allocator allocator(host.hooks());
    void *a = allocator.allocate(Owner::pool, 1000, 64);
    void *b = allocator.allocate(Owner::scratch, 24);
    CHECK(allocator.live_bytes(Owner::pool) == 1000);
    CHECK(allocator.live_bytes(Owner::scratch) == 24);
    CHECK(allocator.live_bytes() == 1024);
    allocator.release(Owner::pool, a, 1000, 64);
    CHECK(allocator.live_bytes(Owner::pool) == 0);
    CHECK(allocator.peak_bytes(Owner::pool) == 1000);
    CHECK(allocator.peak_bytes() == 1024);
    CHECK(allocator.allocation_count() == 2);
    allocator.reset_peaks();
    CHECK(allocator.peak_bytes() == 24);
    CHECK(allocator.peak_bytes(Owner::pool) == 0);
    allocator.release(Owner::scratch, b, 24);
    CHECK(allocator.allocate(Owner::pool, 0) == nullptr);
    allocator.release(Owner::pool, nullptr, 0);
    CHECK(host.live.empty());
    CHECK(host.mismatches == 0);
}

TEST_CASE("alloc: a child counts its own share and the parent everything") {
    Host host;
    Allocator context(host.hooks());
    Allocator first(context);
    Allocator second(context);
    void *a = first.allocate(Owner::tables, 100);
    void *b = second.allocate(Owner::tables, 10);
    CHECK(first.live_bytes() == 100);
    CHECK(second.live_bytes() == 10);
    CHECK(context.live_bytes(Owner::tables) == 110);
    first.release(Owner::tables, a, 100);
    second.release(Owner::tables, b, 10);
    CHECK(context.live_bytes() == 0);
    CHECK(host.mismatches == 0);
}

TEST_CASE("alloc: without hooks memory comes from the C library, aligned as asked") {
    Allocator allocator;
    for (const size_t alignment : {size_t{16}, size_t{64}, size_t{4096}}) {
        auto *memory = static_cast<unsigned char *>(allocator.allocate(Owner::pool, 100, alignment));
        CHECK(reinterpret_cast<uintptr_t>(memory) % alignment == 0);
        std::memset(memory, 1, 100);
        allocator.release(Owner::pool, memory, 100, alignment);
    }
    CHECK(allocator.live_bytes() == 0);
    // Half of the address space: no machine has it, and the count must not keep it.
    CHECK(allocator.try_allocate(Owner::pool, std::numeric_limits<size_t>::max() / 2) == nullptr);
    CHECK(allocator.live_bytes() == 0);
}

TEST_CASE("alloc: a failing or careless host is an exhausted machine, and nothing is counted") {
    Host host;
    Allocator allocator(host.hooks());
    host.fail_after = 0;
    CHECK(allocator.try_allocate(Owner::pool, 8) == nullptr);
    CHECK_THROWS_AS((void)allocator.allocate(Owner::pool, 8), std::bad_alloc);
    host.fail_after = -1;
    host.skew = 8;
    CHECK(allocator.try_allocate(Owner::pool, 8, 64) == nullptr);
    CHECK(host.live.empty());
    CHECK(host.mismatches == 0);
    CHECK(allocator.live_bytes() == 0);
    CHECK(allocator.allocation_count() == 0);
}

TEST_CASE("buffer: grows, edits and moves like an array, every byte counted") {
    Host host;
    Allocator allocator(host.hooks());
    {
        Buffer<int> buffer(allocator, Owner::tables);
        for (int i = 0; i < 100; ++i) buffer.push_back(i);
        CHECK(std::accumulate(buffer.begin(), buffer.end(), 0) == 4950);
        CHECK(allocator.live_bytes(Owner::tables) == buffer.allocated_bytes());
        buffer.erase(10, 80);
        CHECK(buffer.size() == 20);
        CHECK(buffer[9] == 9);
        CHECK(buffer[10] == 90);
        buffer.insert(10, 77);
        CHECK(buffer[10] == 77);
        CHECK(buffer[11] == 90);
        const int more[] = {1, 2, 3};
        buffer.append(more);
        CHECK(buffer.back() == 3);
        CHECK(buffer.pop_back() == 3);
        buffer.shrink_to_fit();
        CHECK(buffer.capacity() == buffer.size());
        CHECK(buffer[10] == 77);

        const uint64_t before = allocator.live_bytes();
        Buffer<int> moved(std::move(buffer));
        CHECK(buffer.empty());
        CHECK(moved.size() == 23);
        CHECK(allocator.live_bytes() == before);
        Buffer<int> other(allocator, Owner::pool);
        other.push_back(5);
        other = std::move(moved);
        CHECK(other.size() == 23);
        CHECK(allocator.live_bytes(Owner::pool) == 0);

        other.resize(30);
        CHECK(other[29] == 0);
        other.resize(3);
        other.resize(30);
        CHECK(other[3] == 0);
        other.reset();
        CHECK(allocator.live_bytes() == 0);
        other.push_back(1);
        CHECK(other[0] == 1);
    }
    CHECK(allocator.live_bytes() == 0);
    CHECK(host.live.empty());
    CHECK(host.mismatches == 0);
}

TEST_CASE("buffer: a failed growth leaves it as it was") {
    Host host;
    Allocator allocator(host.hooks());
    Buffer<uint64_t> buffer(allocator, Owner::pool, 64);
    buffer.reserve(4);
    CHECK(reinterpret_cast<uintptr_t>(buffer.data()) % 64 == 0);
    CHECK(buffer.capacity() == 4);
    for (uint64_t i = 0; i < 4; ++i) buffer.push_back(i);
    host.fail_after = 0;
    CHECK_THROWS_AS(buffer.push_back(4), std::bad_alloc);
    CHECK_THROWS_AS(buffer.resize(100), std::bad_alloc);
    host.fail_after = -1;
    CHECK_THROWS_AS(buffer.reserve(std::numeric_limits<size_t>::max() / 4), std::bad_alloc);
    CHECK(buffer.size() == 4);
    CHECK(buffer[3] == 3);
    CHECK(allocator.live_bytes() == 32);
    Buffer<int> homeless;
    CHECK_THROWS_AS(homeless.push_back(1), std::bad_alloc);
}

TEST_CASE("alloc: containers and objects give back what they took") {
    Host host;
    Allocator allocator(host.hooks());
    {
        Vector<std::string> names{CountedAllocator<std::string>(allocator, Owner::context)};
        for (int i = 0; i < 20; ++i) names.push_back("name");
        CHECK(allocator.live_bytes(Owner::context) == names.capacity() * sizeof(std::string));
        struct alignas(64) Wide {
            explicit Wide(int v) : value(v) {}
            int value;
        };
        Owned<Wide> wide = make_owned<Wide>(allocator, Owner::step, 9);
        CHECK(wide->value == 9);
        CHECK(allocator.live_bytes(Owner::step) == sizeof(Wide));
        Owned<Wide> taken = std::move(wide);
        CHECK(!wide);
        CHECK(taken->value == 9);
        struct Throws {
            Throws() { throw std::bad_alloc(); }
        };
        CHECK_THROWS_AS((void)create_object<Throws>(allocator, Owner::step), std::bad_alloc);
        CHECK(allocator.live_bytes(Owner::step) == sizeof(Wide));
    }
    CHECK(allocator.live_bytes() == 0);
    CHECK(host.live.empty());
    CHECK(host.mismatches == 0);
}
