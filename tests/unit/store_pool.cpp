// Slots, chunks and references of the pool, against a plain list.

#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <vector>

#include "store/pool.hpp"

using namespace skerry;

namespace {

void grow_one(Pool &pool, int32_t slot_class, uint64_t slots) {
    std::vector<uint64_t> counts(static_cast<size_t>(pool.class_count()), 0);
    counts[static_cast<size_t>(slot_class)] = slots;
    pool.grow(counts);
}

struct Failing {
    int left = 0;
    int live = 0;
};
void *failing_alloc(void *user, size_t size, size_t alignment) {
    Failing *state = static_cast<Failing *>(user);
    if (state->left-- <= 0) return nullptr;
    ++state->live;
    return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void failing_release(void *user, void *memory, size_t, size_t) {
    --static_cast<Failing *>(user)->live;
    std::free(memory);
}

} // namespace

TEST_CASE("pool: random takes, retains and releases agree with a map of counts") {
    Allocator allocator;
    Pool pool(allocator, Owner::pool);
    const int32_t small = pool.add_class(704);
    const int32_t large = pool.add_class(4096);
    grow_one(pool, small, 9000); // more than one chunk
    grow_one(pool, large, 500);
    std::map<uint32_t, int> held;
    uint64_t state = 1;
    for (int turn = 0; turn < 200000; ++turn) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t draw = static_cast<uint32_t>(state >> 33);
        if (draw % 3 != 0 || held.empty()) {
            const int32_t slot_class = draw % 2 == 0 ? small : large;
            const uint32_t place = pool.take(slot_class);
            if (place == no_place) {
                CHECK(pool.available(slot_class) == 0);
                continue;
            }
            REQUIRE(held.emplace(place, 1).second); // never handed out twice
            CHECK(pool.class_of(place) == slot_class);
            std::memset(pool.data(place), static_cast<int>(place & 0xff), pool.slot_bytes(slot_class));
        } else {
            auto it = held.lower_bound(draw % (1u << 20));
            if (it == held.end()) it = held.begin();
            const uint32_t place = it->first;
            if (draw % 5 == 0 && it->second < 1000) {
                pool.retain(place);
                ++it->second;
            } else {
                CHECK(pool.data(place)[0] == (place & 0xff)); // nobody else wrote here
                CHECK(pool.release(place) == (it->second == 1));
                if (--it->second == 0) held.erase(it);
            }
        }
    }
    CHECK(pool.consistent());
    uint64_t used = 0;
    for (const auto &[place, count] : held) {
        CHECK(pool.references(place) == static_cast<uint32_t>(count));
        used += pool.slot_bytes(pool.class_of(place));
    }
    CHECK(pool.used_bytes() == used);
}

TEST_CASE("pool: places and indices are inverse, and shrinking keeps the slots below") {
    Allocator allocator;
    Pool pool(allocator, Owner::pool);
    const int32_t a = pool.add_class(1024);
    const int32_t b = pool.add_class(192);
    grow_one(pool, a, 5000);
    grow_one(pool, b, 100);
    grow_one(pool, a, 3000);
    for (uint64_t i : {uint64_t{0}, uint64_t{4095}, uint64_t{4096}, uint64_t{4999}, uint64_t{5000}, uint64_t{7999}}) {
        const uint32_t place = pool.place_of(a, i);
        REQUIRE(place != no_place);
        CHECK(pool.index_of(place) == i);
        CHECK(pool.class_of(place) == a);
    }
    CHECK(pool.place_of(a, 8000) == no_place);
    std::vector<uint32_t> places;
    for (int i = 0; i < 4500; ++i) {
        places.push_back(pool.take(a));
        std::memset(pool.data(places.back()), i & 0xff, 1024);
    }
    const uint64_t before = allocator.live_bytes();
    REQUIRE(pool.shrink(a, 4500));
    CHECK(pool.slots(a) == 4500);
    CHECK(allocator.live_bytes() < before - 3400 * 1024);
    for (int i = 0; i < 4500; ++i) CHECK(pool.data(places[static_cast<size_t>(i)])[1023] == (i & 0xff));
    CHECK(pool.take(a) == no_place);
    CHECK(pool.consistent());
}

TEST_CASE("pool: growth that fails has changed nothing") {
    for (int allowed = 0; allowed < 12; ++allowed) {
        Failing state;
        state.left = 1000;
        {
            Allocator allocator({&state, failing_alloc, failing_release});
            Pool pool(allocator, Owner::pool);
            const int32_t a = pool.add_class(2048);
            const int32_t b = pool.add_class(64);
            grow_one(pool, a, 10);
            const uint64_t bytes = allocator.live_bytes();
            state.left = allowed;
            bool grown = true;
            try {
                pool.grow(std::vector<uint64_t>{5000, 1000});
            } catch (const std::bad_alloc &) {
                grown = false;
            }
            state.left = 1000;
            CHECK(grown == (allowed >= 10)); // two lists, then four chunks with their references
            CHECK(pool.slots(a) == (grown ? 5010u : 10u));
            CHECK(pool.slots(b) == (grown ? 1000u : 0u));
            if (!grown) CHECK(allocator.live_bytes() == bytes);
            CHECK(pool.consistent());
        }
        CHECK(state.live == 0);
    }
}
