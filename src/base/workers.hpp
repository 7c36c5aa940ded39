#pragma once
// Parallel loops on whatever threads the host allows: its own loop, threads of ours, or the calling thread
// alone.

#include <atomic>
#include <memory>
#include <type_traits>

#include <skerry/hooks.h>

#include "base/alloc.hpp"
#include "base/status.hpp"
#include "base/sync.hpp"

namespace skerry {

class Workers {
public:
    // With a `parallel_for` the host's threads do the work and `thread_count` is not used; otherwise that
    // many threads are started here and live as long as the object. Throws std::bad_alloc when they cannot be
    // had.
    Workers(Allocator &allocator, skerry_parallel_for_fn parallel_for, void *user, uint32_t thread_count);
    ~Workers();
    Workers(const Workers &) = delete;
    Workers &operator=(const Workers &) = delete;

    // Calls task(i) once for every i in [0, count), in any order, and returns when no call is running any
    // more. Allocates nothing. Several threads may call it at once; a run that finds the others busy is done
    // by its caller alone. A task does not call it.
    //
    // SKERRY_ERROR_INTERNAL: the host's loop reported failure or left tasks out. SKERRY_ERROR_OUT_OF_MEMORY:
    // a task threw std::bad_alloc. In both cases tasks may be missing, so only results that nobody has seen
    // may be written.
    template <class Task>
    Status run(int32_t count, Task &&task) noexcept {
        using Plain = std::remove_reference_t<Task>;
        return run_erased(
            count, [](void *object, int32_t index) { (*static_cast<Plain *>(object))(index); },
            const_cast<void *>(static_cast<const void *>(std::addressof(task))));
    }

    // Threads that can take part, the caller's included; 0 when only the host knows.
    uint32_t concurrency() const noexcept {
        return parallel_for_ != nullptr ? 0 : static_cast<uint32_t>(threads_.size()) + 1;
    }

private:
    using Call = void (*)(void *object, int32_t index);

    // One loop in progress. Tasks are claimed by counting `unclaimed` down, whatever index a host passes, so
    // that an index passed twice or a call that comes late can neither repeat a task nor reach a loop that
    // has ended. The other fields are read only after a successful claim and written only when no claimed
    // task is left.
    struct Lane {
        std::atomic<int32_t> unclaimed{0};
        std::atomic<int32_t> finished{0};
        std::atomic<int32_t> failed{SKERRY_OK};
        std::atomic<bool> taken{false};
        int32_t count = 0;
        Call call = nullptr;
        void *object = nullptr;
    };
    static constexpr size_t lane_count = 8;

    Status run_erased(int32_t count, Call call, void *object) noexcept;
    static Status run_here(int32_t count, Call call, void *object) noexcept;
    Status run_on_host(Lane &lane, int32_t count) noexcept;
    bool run_on_threads(Lane &lane, int32_t count) noexcept;
    Lane *take_lane() noexcept;
    static Status call_one(Call call, void *object, int32_t index) noexcept;
    static bool do_one(Lane &lane) noexcept;
    static void host_task(void *lane, int32_t index);
    static void *thread_main(void *self);
    void serve() noexcept;
    void stop_threads() noexcept;

    skerry_parallel_for_fn parallel_for_;
    void *user_;
    Buffer<pthread_t> threads_;
    Lane lanes_[lane_count];

    Mutex mutex_;
    Condition work_;
    Condition idle_;
    std::atomic<uint64_t> round_{0}; // written under mutex_, read without it by threads that wait a moment
    Lane *current_ = nullptr;        // guarded by mutex_, like the two below
    uint32_t active_ = 0;
    bool stopping_ = false;
};

} // namespace skerry
