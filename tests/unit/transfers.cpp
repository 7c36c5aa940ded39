#include "base/transfers.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

using namespace skerry;

namespace {

// Copies that wait until they are let through, and a record of which bytes went where, by whom.
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    int passes = 0; // copies that may go on; -1: all
    int waiting = 0;
    std::vector<const void *> order;
    std::vector<std::thread::id> threads;
    bool gave_up = false;

    static void copy(void *user, void *to, const void *from, size_t bytes) {
        auto *self = static_cast<Gate *>(user);
        {
            std::unique_lock<std::mutex> lock(self->mutex);
            ++self->waiting;
            self->changed.notify_all();
            // Who waits for a copy that is never let through fails, and does not hang.
            if (!self->changed.wait_for(lock, std::chrono::seconds(20), [&] { return self->passes != 0; })) self->gave_up = true;
            if (self->passes > 0) --self->passes;
            --self->waiting;
            self->order.push_back(from);
            self->threads.push_back(std::this_thread::get_id());
        }
        std::memcpy(to, from, bytes);
    }
    void let(int count) {
        const std::lock_guard<std::mutex> lock(mutex);
        passes = count;
        changed.notify_all();
    }
    // Until `count` copies have begun and wait.
    bool begun(int count) {
        std::unique_lock<std::mutex> lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(20), [&] { return waiting == count; });
    }
    size_t done() {
        const std::lock_guard<std::mutex> lock(mutex);
        return order.size();
    }
};

struct Block {
    uint8_t from[96];
    uint8_t to[96];
    uint32_t state = 0;
    explicit Block(int number = 0) {
        for (size_t i = 0; i < sizeof from; ++i)
            from[i] = static_cast<uint8_t>(static_cast<size_t>(number) * 31 + i);
        std::memset(to, 0xee, sizeof to);
    }
    bool copied() const { return std::memcmp(from, to, sizeof from) == 0; }
    bool untouched() const {
        for (const uint8_t byte : to) {
            if (byte != 0xee) return false;
        }
        return true;
    }
};

std::vector<std::unique_ptr<Block>> blocks(int count) {
    std::vector<std::unique_ptr<Block>> all;
    for (int i = 0; i < count; ++i)
        all.push_back(std::make_unique<Block>(i));
    return all;
}

bool submit(Transfers &transfers, Block &block) { return transfers.submit({block.from, sizeof block.from}, block.to, &block.state); }

void settle(const uint32_t *state) {
    for (int i = 0; i < 20000 && !Transfers::arrived(state); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

} // namespace

TEST_CASE("transfers: without threads nothing is queued, and the caller copies") {
    Allocator allocator;
    Transfers transfers(allocator, nullptr, nullptr, 0);
    CHECK(!transfers.has_threads());
    Block block(3);
    CHECK(!submit(transfers, block));
    CHECK(Transfers::arrived(&block.state));
    CHECK(block.untouched());
    transfers.wait(&block.state); // nothing to wait for
    CHECK(!transfers.cancel(&block.state));
    CHECK(transfers.give_up(&block.state));
    transfers.copy({block.from, sizeof block.from}, block.to);
    CHECK(block.copied());
}

TEST_CASE("transfers: the host's function makes every copy, with its own pointers and sizes") {
    struct Seen {
        void *to = nullptr;
        const void *from = nullptr;
        size_t bytes = 0;
        static void copy(void *user, void *to, const void *from, size_t bytes) {
            *static_cast<Seen *>(user) = {to, from, bytes};
            std::memcpy(to, from, bytes);
        }
    };
    Allocator allocator;
    for (uint32_t threads : {0u, 1u}) {
        Seen seen;
        Transfers transfers(allocator, &Seen::copy, &seen, threads);
        Block direct(1);
        transfers.copy({direct.from, 40}, direct.to);
        CHECK(seen.to == direct.to);
        CHECK(seen.from == direct.from);
        CHECK(seen.bytes == 40);
        CHECK(std::memcmp(direct.from, direct.to, 40) == 0);
        CHECK(direct.to[40] == 0xee);
        Block queued(2);
        CHECK(submit(transfers, queued) == (threads > 0));
        transfers.wait(&queued.state);
        CHECK(queued.copied() == (threads > 0));
        if (threads > 0) CHECK(seen.from == queued.from);
    }
}

TEST_CASE("transfers: a copy of pieces is there when its last piece is, whoever makes it") {
    uint8_t parts[4][24];
    for (int p = 0; p < 4; ++p) {
        for (int i = 0; i < 24; ++i)
            parts[p][i] = static_cast<uint8_t>(40 * p + i);
    }
    const size_t sizes[] = {24, 4, 20, 8};
    Pieces pieces;
    std::vector<uint8_t> expected;
    for (size_t p = 0; p < 4; ++p) {
        pieces.add(parts[p], sizes[p]);
        expected.insert(expected.end(), parts[p], parts[p] + sizes[p]);
    }
    CHECK(pieces.bytes() == expected.size());
    Allocator allocator;
    // By a thread; by whoever waits, while the thread is at another copy; directly.
    for (int way = 0; way < 3; ++way) {
        CAPTURE(way);
        Gate gate;
        Transfers transfers(allocator, &Gate::copy, &gate, 1);
        std::vector<uint8_t> to(expected.size() + 8, 0xee);
        uint32_t state = 0;
        Block other(1);
        if (way == 2) {
            gate.let(4);
            transfers.copy(pieces, to.data());
        } else {
            if (way == 1) {
                REQUIRE(submit(transfers, other));
                REQUIRE(gate.begun(1));
            }
            REQUIRE(transfers.submit(pieces, to.data(), &state));
            if (way == 0) {
                REQUIRE(gate.begun(1));
                for (size_t done = 1; done <= 3; ++done) {
                    gate.let(1);
                    while (gate.done() < done)
                        std::this_thread::yield();
                    REQUIRE(gate.begun(1));
                    CHECK(!Transfers::arrived(&state));
                }
            }
            gate.let(-1);
            transfers.wait(&state);
            CHECK(Transfers::arrived(&state));
        }
        CHECK(std::equal(expected.begin(), expected.end(), to.begin()));
        CHECK(std::vector<uint8_t>(to.end() - 8, to.end()) == std::vector<uint8_t>(8, 0xee));
        // In order; in the second way the first copy of all goes elsewhere.
        if (way == 1) transfers.wait(&other.state);
        std::vector<const void *> made = gate.order;
        if (way == 1) made.erase(std::remove(made.begin(), made.end(), static_cast<const void *>(other.from)), made.end());
        CHECK(made == std::vector<const void *>{parts[0], parts[1], parts[2], parts[3]});
        CHECK(!gate.gave_up);
    }
    // Taken back whole.
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    Block first(1);
    REQUIRE(submit(transfers, first));
    REQUIRE(gate.begun(1));
    std::vector<uint8_t> to(expected.size(), 0xee);
    uint32_t state = 0;
    REQUIRE(transfers.submit(pieces, to.data(), &state));
    CHECK(transfers.cancel(&state));
    gate.let(-1);
    transfers.wait(&first.state);
    CHECK(to == std::vector<uint8_t>(expected.size(), 0xee));
}

TEST_CASE("transfers: copies are made in the order they were queued, and a state says when") {
    Allocator allocator;
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    auto all = blocks(6);
    for (auto &block : all) {
        REQUIRE(submit(transfers, *block));
        CHECK(!Transfers::arrived(&block->state));
    }
    REQUIRE(gate.begun(1));
    for (auto &block : all)
        CHECK(block->untouched());
    gate.let(2);
    settle(&all[1]->state);
    CHECK(all[0]->copied());
    CHECK(all[1]->copied());
    REQUIRE(gate.begun(1));
    CHECK(!Transfers::arrived(&all[2]->state));
    CHECK(all[2]->untouched());
    gate.let(-1);
    for (auto &block : all) {
        settle(&block->state);
        CHECK(block->copied());
    }
    REQUIRE(gate.order.size() == 6);
    for (size_t i = 0; i < 6; ++i) {
        CHECK(gate.order[i] == all[i]->from);
        CHECK(gate.threads[i] != std::this_thread::get_id());
    }
    CHECK(!gate.gave_up);
}

TEST_CASE("transfers: what is wanted now and has not begun is copied by whoever wants it, once") {
    Allocator allocator;
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    auto all = blocks(4);
    for (auto &block : all)
        REQUIRE(submit(transfers, *block));
    REQUIRE(gate.begun(1)); // the first is under way, the others are not
    std::thread helper([&] {
        REQUIRE(gate.begun(2)); // ours, beside the thread's
        gate.let(-1);
    });
    transfers.wait(&all[2]->state);
    CHECK(Transfers::arrived(&all[2]->state));
    CHECK(all[2]->copied());
    helper.join();
    for (auto &block : all)
        transfers.wait(&block->state);
    for (auto &block : all)
        CHECK(block->copied());
    int by_us = 0, of_it = 0;
    for (size_t i = 0; i < gate.order.size(); ++i) {
        by_us += gate.threads[i] == std::this_thread::get_id() && gate.order[i] == all[2]->from;
        of_it += gate.order[i] == all[2]->from;
    }
    CHECK(by_us == 1);
    CHECK(of_it == 1); // the thread passes over what was taken from it
    CHECK(gate.order.size() == 4);
}

TEST_CASE("transfers: a wait for a copy that has begun ends when its bytes are there") {
    Allocator allocator;
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    Block block(5);
    REQUIRE(submit(transfers, block));
    REQUIRE(gate.begun(1));
    std::atomic<bool> ended{false};
    std::thread waiter([&] {
        transfers.wait(&block.state);
        ended = block.copied();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!ended);
    gate.let(-1);
    waiter.join();
    CHECK(ended);
}

TEST_CASE("transfers: a copy that is taken back is never made; one that has begun is waited for, or left") {
    Allocator allocator;
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    auto all = blocks(5);
    for (auto &block : all)
        REQUIRE(submit(transfers, *block));
    REQUIRE(gate.begun(1));
    CHECK(transfers.cancel(&all[1]->state)); // true: the bytes are not there
    CHECK(Transfers::arrived(&all[1]->state));
    CHECK(transfers.give_up(&all[3]->state));
    CHECK(Transfers::arrived(&all[3]->state));
    CHECK(!transfers.give_up(&all[0]->state)); // being made: returns at once
    CHECK(!Transfers::arrived(&all[0]->state));
    // The places can be used for another copy at once.
    REQUIRE(submit(transfers, *all[3]));
    CHECK(!Transfers::arrived(&all[3]->state));
    std::atomic<bool> ended{false};
    std::thread waiter([&] {
        CHECK(!transfers.cancel(&all[0]->state)); // false: they are there
        ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!ended);
    gate.let(-1);
    waiter.join();
    CHECK(all[0]->copied());
    for (auto &block : all)
        settle(&block->state);
    CHECK(all[1]->untouched());
    CHECK(all[2]->copied());
    CHECK(all[3]->copied());
    CHECK(all[4]->copied());
    CHECK(gate.order.size() == 4);
    CHECK(gate.order.back() == all[3]->from); // queued anew, so last
    CHECK(transfers.give_up(&all[0]->state));
    CHECK(!transfers.cancel(&all[0]->state));
}

TEST_CASE("transfers: a full queue refuses with nothing done, and takes more when it has room") {
    Allocator allocator;
    Gate gate;
    Transfers transfers(allocator, &Gate::copy, &gate, 1);
    const int most = static_cast<int>(Transfers::queue_length);
    auto all = blocks(most + 3);
    REQUIRE(submit(transfers, *all[0]));
    REQUIRE(gate.begun(1)); // out of the queue
    int taken = 1;
    while (taken < most + 2 && submit(transfers, *all[static_cast<size_t>(taken)]))
        ++taken;
    CHECK(taken == most + 1);
    Block &extra = *all[static_cast<size_t>(most + 1)];
    CHECK(Transfers::arrived(&extra.state));
    CHECK(extra.untouched());
    CHECK(!submit(transfers, extra));
    // Taking copies back leaves their places in the queue until a thread comes by.
    for (int i = 1; i < 10; ++i)
        CHECK(transfers.cancel(&all[static_cast<size_t>(i)]->state));
    gate.let(-1);
    for (int i = 0; i <= most; ++i)
        settle(&all[static_cast<size_t>(i)]->state);
    REQUIRE(submit(transfers, extra));
    transfers.wait(&extra.state);
    CHECK(extra.copied());
    CHECK(gate.done() == static_cast<size_t>(most + 1 - 9 + 1));
}

TEST_CASE("transfers: threads that go away leave what they have not begun, and finish what they have") {
    Allocator allocator;
    Gate gate;
    auto all = blocks(20);
    std::thread later;
    {
        Transfers transfers(allocator, &Gate::copy, &gate, 2);
        for (auto &block : all)
            REQUIRE(submit(transfers, *block));
        REQUIRE(gate.begun(2));
        gate.let(2);
        for (int i = 0; i < 20000 && gate.done() < 2; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        REQUIRE(gate.begun(2));
        later = std::thread([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            gate.let(-1);
        });
    }
    later.join();
    size_t copied = 0;
    for (auto &block : all) {
        CHECK((block->copied() || block->untouched()));
        copied += block->copied();
    }
    CHECK(copied == gate.done());
    CHECK(copied == 4);
    CHECK(allocator.live_count() == 0);
}

TEST_CASE("transfers: many threads submit, wait, cancel and give up at once; every copy is there or was never made") {
    for (uint32_t threads : {1u, 4u}) {
        Allocator allocator;
        struct Count {
            std::atomic<int> copies{0};
            static void copy(void *user, void *to, const void *from, size_t bytes) {
                static_cast<Count *>(user)->copies.fetch_add(1);
                std::memcpy(to, from, bytes);
            }
        } count;
        Transfers transfers(allocator, &Count::copy, &count, threads);
        std::atomic<int> wrong{0}, direct{0}, taken_back{0}, queued{0};
        std::vector<std::thread> users;
        for (int user = 0; user < 4; ++user) {
            users.emplace_back([&, user] {
                std::vector<std::unique_ptr<Block>> mine;
                for (int turn = 0; turn < 1500; ++turn) {
                    mine.push_back(std::make_unique<Block>(user * 7919 + turn));
                    Block &block = *mine.back();
                    if (!submit(transfers, block)) {
                        transfers.copy({block.from, sizeof block.from}, block.to);
                        direct.fetch_add(1);
                    } else {
                        queued.fetch_add(1);
                    }
                    // Now and then one of the older ones is looked after.
                    Block &old = *mine[static_cast<size_t>((turn * 31 + user) % (turn + 1))];
                    const int what = (turn + user) % 5;
                    if (what == 0) {
                        transfers.wait(&old.state);
                    } else if (what == 1) {
                        if (transfers.cancel(&old.state)) {
                            if (!old.untouched()) wrong.fetch_add(1);
                            std::memcpy(old.to, old.from, sizeof old.from);
                            taken_back.fetch_add(1);
                        } else if (!old.copied()) {
                            wrong.fetch_add(1);
                        }
                    } else if (what == 2 && Transfers::arrived(&old.state) && !old.copied()) {
                        wrong.fetch_add(1);
                    }
                }
                for (auto &block : mine) {
                    transfers.wait(&block->state);
                    if (!block->copied()) wrong.fetch_add(1);
                }
            });
        }
        for (std::thread &user : users)
            user.join();
        CHECK(wrong == 0);
        CHECK(direct + queued == 4 * 1500);
        CHECK(count.copies == 4 * 1500 - taken_back);
    }
}

TEST_CASE("transfers: no memory for threads is bad_alloc, and leaves nothing") {
    struct Host {
        int left = 0, live = 0;
        static void *alloc(void *user, size_t size, size_t alignment) {
            auto *self = static_cast<Host *>(user);
            if (self->left == 0) return nullptr;
            --self->left;
            ++self->live;
            return ::operator new(size, std::align_val_t(alignment));
        }
        static void release(void *user, void *memory, size_t, size_t alignment) {
            --static_cast<Host *>(user)->live;
            ::operator delete(memory, std::align_val_t(alignment));
        }
    };
    int failures = 0;
    for (int allowed = 0; allowed < 10; ++allowed) {
        Host host;
        host.left = allowed;
        Allocator allocator({&host, &Host::alloc, &Host::release});
        try {
            Transfers transfers(allocator, nullptr, nullptr, 2);
            CHECK(host.live > 0);
            break;
        } catch (const std::bad_alloc &) {
            ++failures;
        }
        CHECK(host.live == 0);
    }
    CHECK(failures > 0);
    CHECK(failures < 10);
}
