#include "base/handles.hpp"

#include <doctest/doctest.h>
#include <random>
#include <unordered_map>
#include <vector>

using namespace skerry;

TEST_CASE("handles: an id finds its object until it is erased, and nothing after") {
    Allocator allocator;
    HandleTable<int> table(allocator, Owner::tables);
    CHECK(table.find(0) == nullptr);
    CHECK(table.find(1) == nullptr);
    const uint64_t a = table.insert(10);
    const uint64_t b = table.insert(20);
    CHECK(a != 0);
    CHECK(a != b);
    CHECK(*table.find(a) == 10);
    CHECK(*table.find(b) == 20);
    CHECK(table.erase(a));
    CHECK(table.find(a) == nullptr);
    CHECK(!table.erase(a));
    const uint64_t c = table.insert(30);
    CHECK((c & 0xffffffffu) == (a & 0xffffffffu)); // the slot is used again,
    CHECK(c != a);                                 // the id is not
    CHECK(table.find(a) == nullptr);
    CHECK(*table.find(c) == 30);
    CHECK(table.size() == 2);
    CHECK(table.find(c + (uint64_t{1} << 32)) == nullptr);
    CHECK(table.find((c & ~uint64_t{0xffffffff}) | 0xffffffffu) == nullptr);
}

TEST_CASE("handles: a slot at the end of its generations is retired, not reused") {
    Allocator allocator;
    HandleTable<int> table(allocator, Owner::tables);
    table.set_last_generation(3);
    std::vector<uint64_t> seen;
    for (int i = 0; i < 10; ++i) {
        const uint64_t id = table.insert(i);
        for (const uint64_t old : seen) CHECK(old != id);
        seen.push_back(id);
        CHECK(table.erase(id));
        for (const uint64_t old : seen) CHECK(table.find(old) == nullptr);
    }
    CHECK(table.size() == 0);
}

TEST_CASE("handles: agrees with a map over random inserts and erases") {
    Allocator allocator;
    HandleTable<uint32_t> table(allocator, Owner::tables);
    std::unordered_map<uint64_t, uint32_t> model;
    std::vector<uint64_t> all;
    std::mt19937 random(7);
    for (uint32_t i = 0; i < 20000; ++i) {
        if (model.empty() || random() % 5 < 3) {
            const uint64_t id = table.insert(i);
            REQUIRE(model.emplace(id, i).second);
            all.push_back(id);
        } else {
            const uint64_t id = all[random() % all.size()];
            REQUIRE(table.erase(id) == (model.erase(id) == 1));
        }
    }
    int wrong = 0;
    for (const uint64_t id : all) {
        const uint32_t *found = table.find(id);
        const auto expected = model.find(id);
        wrong += expected == model.end() ? found != nullptr : found == nullptr || *found != expected->second;
    }
    CHECK(wrong == 0);
    size_t visited = 0;
    table.for_each([&](uint64_t id, uint32_t value) { visited += model.at(id) == value; });
    CHECK(visited == model.size());
    CHECK(table.size() == model.size());
}
