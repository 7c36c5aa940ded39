#pragma once

// Copies from the host tier to slots on the device ahead of need, on threads of their own. A copy that is wanted now is made by whoever
// wants it.

#include <pthread.h>

#include <cstddef>
#include <cstdint>

#include <skerry/hooks.h>

#include "base/alloc.hpp"
#include "base/sync.hpp"

namespace skerry {

// What one copy puts together: pieces, in order, without gaps at where they go. Detail is two sides, each of a basis and the rest.
struct Pieces {
    static constexpr uint32_t most = 4;
    struct Piece {
        const void *from;
        size_t bytes;
    };

    Pieces() = default;
    Pieces(const void *from, size_t bytes) { add(from, bytes); }
    void add(const void *from, size_t bytes) { piece[count++] = Piece{from, bytes}; }
    size_t bytes() const {
        size_t sum = 0;
        for (uint32_t i = 0; i < count; ++i)
            sum += piece[i].bytes;
        return sum;
    }

    Piece piece[most] = {};
    uint32_t count = 0;
};

class Transfers {
public:
    static constexpr uint32_t queue_length = 1024;

    // `function` NULL: memcpy. Throws std::bad_alloc when the threads cannot be had.
    Transfers(Allocator &allocator, skerry_transfer_fn function, void *user, uint32_t thread_count);
    ~Transfers();
    Transfers(const Transfers &) = delete;
    Transfers &operator=(const Transfers &) = delete;

    bool has_threads() const noexcept { return !threads_.empty(); }

    // Copies on the calling thread, one call of the function per piece.
    void copy(const Pieces &from, void *to) const noexcept;

    // Queues a copy. *state is 0 when all pieces are there, and must stay where it is until then. False, with nothing done: the queue is
    // full, or there are no threads.
    bool submit(const Pieces &from, void *to, uint32_t *state) noexcept;

    static bool arrived(const uint32_t *state) noexcept;
    // Returns when the bytes are there; a copy that no thread has begun is made here.
    void wait(uint32_t *state) noexcept;
    // Takes a copy back from the queue, or waits for it when it has begun. True: the bytes are not there.
    bool cancel(uint32_t *state) noexcept;
    // Takes a copy back from the queue and never waits. False: it is being made.
    bool give_up(uint32_t *state) noexcept;

private:
    struct Job {
        Pieces from;
        void *to;
        uint32_t *state; // nullptr: taken back
    };
    // States of a copy: 0 there, 1 being made, 2 + i queued as job i.
    static constexpr uint32_t running = 1;
    static constexpr uint32_t queued = 2;

    bool take_back(uint32_t *state, Job *job) noexcept;
    static void *thread_main(void *self);
    void serve() noexcept;
    void stop_threads() noexcept;

    skerry_transfer_fn copy_;
    void *user_;
    Buffer<pthread_t> threads_;
    Buffer<Job> jobs_;
    Mutex mutex_;
    Condition work_;
    Condition done_;
    uint64_t head_ = 0; // guarded by mutex_, like all below
    uint64_t tail_ = 0;
    bool stopping_ = false;
};

} // namespace skerry
