#include "base/workers.hpp"

#include <sched.h>

#include <algorithm>

#include "base/threads.hpp"

namespace skerry {
namespace {

// Waking a sleeping thread takes about 50 microseconds, longer than a layer of a small model, and the layers
// of a step follow each other within that time. So waiting begins with this many pauses, some 20 to 50
// microseconds.
constexpr int pauses_before_sleep = 1000;

void pause_briefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Done>
void wait_a_moment(Done &&done) noexcept {
    for (int i = 0; i < pauses_before_sleep && !done(); ++i) pause_briefly();
}

} // namespace

Workers::Workers(Allocator &allocator, skerry_parallel_for_fn parallel_for, void *user, uint32_t thread_count)
    : parallel_for_(parallel_for), user_(user), threads_(allocator, Owner::context) {
    if (parallel_for != nullptr || thread_count == 0) return;
    if (!start_threads(threads_, thread_count, thread_main, this)) {
        stop_threads();
        throw std::bad_alloc();
    }
}

Workers::~Workers() { stop_threads(); }

void Workers::stop_threads() noexcept {
    {
        const Lock lock(mutex_);
        stopping_ = true;
    }
    work_.wake_all();
    for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
    threads_.clear();
}

Status Workers::call_one(Call call, void *object, int32_t index) noexcept {
    try {
        call(object, index);
        return SKERRY_OK;
    } catch (const std::bad_alloc &) {
        return SKERRY_ERROR_OUT_OF_MEMORY;
    } catch (...) {
        return SKERRY_ERROR_INTERNAL;
    }
}

bool Workers::do_one(Lane &lane) noexcept {
    const int32_t left = lane.unclaimed.fetch_sub(1, std::memory_order_acq_rel);
    if (left <= 0) return false;
    const Status status = call_one(lane.call, lane.object, lane.count - left);
    if (status != SKERRY_OK) lane.failed.store(status, std::memory_order_relaxed);
    lane.finished.fetch_add(1, std::memory_order_release);
    return true;
}

void Workers::host_task(void *lane, int32_t) { do_one(*static_cast<Lane *>(lane)); }

void *Workers::thread_main(void *self) {
    static_cast<Workers *>(self)->serve();
    return nullptr;
}

void Workers::serve() noexcept {
    mutex_.lock();
    uint64_t seen = 0;
    for (;;) {
        work_.wait(mutex_, [&] { return stopping_ || (current_ != nullptr && round_ != seen); });
        if (stopping_) break;
        seen = round_.load(std::memory_order_relaxed);
        Lane &lane = *current_;
        ++active_;
        mutex_.unlock();
        while (do_one(lane)) {}
        mutex_.lock();
        if (--active_ == 0) idle_.wake_one();
        mutex_.unlock();
        wait_a_moment([&] { return round_.load(std::memory_order_relaxed) != seen; });
        mutex_.lock();
    }
    mutex_.unlock();
}

Workers::Lane *Workers::take_lane() noexcept {
    for (Lane &lane : lanes_) {
        if (!lane.taken.exchange(true, std::memory_order_acquire)) return &lane;
    }
    return nullptr;
}

Status Workers::run_here(int32_t count, Call call, void *object) noexcept {
    Status result = SKERRY_OK;
    for (int32_t i = 0; i < count; ++i) {
        const Status status = call_one(call, object, i);
        if (status != SKERRY_OK) result = status;
    }
    return result;
}

Status Workers::run_on_host(Lane &lane, int32_t count) noexcept {
    int32_t answer = 0;
    try {
        answer = parallel_for_(user_, host_task, &lane, count);
    } catch (...) {
        answer = -1;
    }
    const int32_t left = std::max(lane.unclaimed.exchange(0, std::memory_order_acq_rel), 0);
    // A loop that returned before its tasks ended still has them using the caller's objects.
    while (lane.finished.load(std::memory_order_acquire) != count - left) sched_yield();
    return answer != 0 || left != 0 ? SKERRY_ERROR_INTERNAL : SKERRY_OK;
}

bool Workers::run_on_threads(Lane &lane, int32_t count) noexcept {
    {
        const Lock lock(mutex_);
        if (current_ != nullptr) return false;
        current_ = &lane;
        round_.fetch_add(1, std::memory_order_relaxed);
    }
    const size_t helpers = std::min(threads_.size(), static_cast<size_t>(count - 1));
    for (size_t i = 0; i < helpers; ++i) work_.wake_one();
    while (do_one(lane)) {}
    wait_a_moment([&] { return lane.finished.load(std::memory_order_relaxed) == count; });
    const Lock lock(mutex_);
    idle_.wait(mutex_, [&] { return active_ == 0; });
    current_ = nullptr;
    return true;
}

Status Workers::run_erased(int32_t count, Call call, void *object) noexcept {
    if (count <= 0) return SKERRY_OK;
    const bool can_share = parallel_for_ != nullptr || !threads_.empty();
    Lane *lane = count > 1 && can_share ? take_lane() : nullptr;
    if (lane == nullptr) return run_here(count, call, object);

    lane->count = count;
    lane->call = call;
    lane->object = object;
    lane->failed.store(SKERRY_OK, std::memory_order_relaxed);
    lane->finished.store(0, std::memory_order_relaxed);
    lane->unclaimed.store(count, std::memory_order_release);
    Status status = SKERRY_OK;
    if (parallel_for_ != nullptr) status = run_on_host(*lane, count);
    else if (!run_on_threads(*lane, count)) while (do_one(*lane)) {}
    const Status task_status = lane->failed.load(std::memory_order_relaxed);
    lane->taken.store(false, std::memory_order_release);
    return status != SKERRY_OK ? status : task_status;
}

} // namespace skerry
