#include "base/workers.hpp"

#include <algorithm>
#include <chrono>
#include <doctest/doctest.h>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace skerry;

namespace {

// Every index of a run is counted on its own, so that a task done twice and one left out cannot cancel.
bool each_once(Workers &workers, int32_t count) {
    std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[static_cast<size_t>(count)]());
    const Status status = workers.run(count, [&](int32_t i) { done[static_cast<size_t>(i)].fetch_add(1); });
    return status == SKERRY_OK &&
           std::all_of(done.get(), done.get() + count, [](const std::atomic<int> &n) { return n == 1; });
}

int32_t loop_in_order(void *, skerry_task_fn fn, void *task, int32_t count) {
    for (int32_t i = 0; i < count; ++i) fn(task, i);
    return 0;
}

int32_t loop_on_three_threads(void *, skerry_task_fn fn, void *task, int32_t count) {
    std::vector<std::thread> threads;
    for (int32_t t = 0; t < 3; ++t) {
        threads.emplace_back([=] {
            for (int32_t i = t; i < count; i += 3) fn(task, i);
        });
    }
    for (std::thread &thread : threads) thread.join();
    return 0;
}

int32_t loop_that_leaves_out_one(void *, skerry_task_fn fn, void *task, int32_t count) {
    for (int32_t i = 1; i < count; ++i) fn(task, i);
    return 0;
}

int32_t loop_that_repeats(void *, skerry_task_fn fn, void *task, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
        fn(task, i);
        fn(task, i);
    }
    return 0;
}

int32_t loop_that_gives_up(void *, skerry_task_fn fn, void *task, int32_t) {
    fn(task, 0);
    return 7;
}

int32_t loop_that_throws(void *, skerry_task_fn fn, void *task, int32_t) {
    fn(task, 0);
    throw std::runtime_error("host");
}

// Returns while its thread is inside a task, and calls again after the run is over.
struct HastyLoop {
    std::thread thread;
    std::atomic<bool> inside{false};
    std::atomic<bool> call_again{false};
    static int32_t run(void *user, skerry_task_fn fn, void *task, int32_t count) {
        auto *self = static_cast<HastyLoop *>(user);
        self->thread = std::thread([=] {
            for (int32_t i = 0; i < count; ++i) fn(task, i);
            while (!self->call_again) std::this_thread::yield();
            fn(task, 0);
        });
        while (!self->inside) std::this_thread::yield();
        return 0;
    }
};

} // namespace

TEST_CASE("workers: every task runs exactly once, with any number of threads") {
    Allocator allocator;
    for (const uint32_t threads : {0u, 1u, 2u, 5u}) {
        Workers workers(allocator, nullptr, nullptr, threads);
        CHECK(workers.concurrency() == threads + 1);
        CHECK(workers.run(0, [](int32_t) { FAIL("no task was asked for"); }) == SKERRY_OK);
        for (const int32_t count : {1, 2, 3, 17, 1000}) CHECK(each_once(workers, count));
        int wrong = 0;
        for (int round = 0; round < 500; ++round) wrong += !each_once(workers, 1 + round % 9);
        CHECK(wrong == 0);
    }
    CHECK(allocator.live_bytes() == 0);
}

TEST_CASE("workers: own threads really take part") {
    Allocator allocator;
    Workers workers(allocator, nullptr, nullptr, 1);
    // Two tasks that wait for each other can only end on two threads.
    std::atomic<int> arrived{0};
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    CHECK(workers.run(2, [&](int32_t) {
        arrived.fetch_add(1);
        while (arrived < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    }) == SKERRY_OK);
    CHECK(arrived == 2);
    CHECK(std::chrono::steady_clock::now() < limit);
}

TEST_CASE("workers: a run allocates nothing") {
    Allocator allocator;
    Workers workers(allocator, nullptr, nullptr, 2);
    const uint64_t before = allocator.allocation_count();
    CHECK(each_once(workers, 100));
    CHECK(allocator.allocation_count() == before);
}

TEST_CASE("workers: several callers at once") {
    Allocator allocator;
    for (const skerry_parallel_for_fn host : {skerry_parallel_for_fn{nullptr}, loop_on_three_threads}) {
        Workers workers(allocator, host, nullptr, 2);
        std::atomic<int> wrong{0};
        std::vector<std::thread> callers;
        for (int c = 0; c < 10; ++c) {
            callers.emplace_back([&] {
                for (int round = 0; round < 30; ++round) wrong += !each_once(workers, 20);
            });
        }
        for (std::thread &caller : callers) caller.join();
        CHECK(wrong == 0);
    }
}

TEST_CASE("workers: the host's loop is used, in whatever way it spreads the work") {
    Allocator allocator;
    Workers in_order(allocator, loop_in_order, nullptr, 4);
    CHECK(in_order.concurrency() == 0);
    CHECK(each_once(in_order, 50));
    Workers spread(allocator, loop_on_three_threads, nullptr, 0);
    CHECK(each_once(spread, 50));
    Workers repeating(allocator, loop_that_repeats, nullptr, 0);
    CHECK(each_once(repeating, 50));
}

TEST_CASE("workers: a host's loop that does not do its work is found out") {
    Allocator allocator;
    for (const auto host : {loop_that_leaves_out_one, loop_that_gives_up, loop_that_throws}) {
        Workers workers(allocator, host, nullptr, 0);
        std::atomic<int> done{0};
        CHECK(workers.run(8, [&](int32_t) { done.fetch_add(1); }) == SKERRY_ERROR_INTERNAL);
        CHECK(done < 8);
    }
}

TEST_CASE("workers: a loop that returns early is waited for, and its late call finds nothing to do") {
    Allocator allocator;
    HastyLoop hasty;
    std::atomic<int> done{0};
    {
        Workers workers(allocator, HastyLoop::run, &hasty, 0);
        (void)workers.run(4, [&](int32_t) {
            hasty.inside = true;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            done.fetch_add(1);
        });
        const int when_returned = done;
        hasty.call_again = true;
        hasty.thread.join();
        CHECK(done == when_returned);
        CHECK(done >= 1);
    }
}

TEST_CASE("workers: a task that runs out of memory fails the run, not the process") {
    Allocator allocator;
    for (const uint32_t threads : {0u, 2u}) {
        Workers workers(allocator, nullptr, nullptr, threads);
        std::atomic<int> others{0};
        CHECK(workers.run(10, [&](int32_t i) {
            if (i == 3) throw std::bad_alloc();
            others.fetch_add(1);
        }) == SKERRY_ERROR_OUT_OF_MEMORY);
        CHECK(others == 9);
        CHECK(each_once(workers, 10));
    }
}
