#include "base/transfers.hpp"

#include <atomic>
#include <cstring>
#include <new>

#include "base/threads.hpp"

namespace skerry {

Transfers::Transfers(Allocator &allocator, skerry_transfer_fn function, void *user, uint32_t thread_count)
    : copy_(function), user_(user), threads_(allocator, Owner::context), jobs_(allocator, Owner::context) {
    if (thread_count == 0) return;
    jobs_.resize(queue_length);
    if (!start_threads(threads_, thread_count, thread_main, this)) {
        stop_threads();
        throw std::bad_alloc();
    }
}

Transfers::~Transfers() { stop_threads(); }

void Transfers::stop_threads() noexcept {
    {
        const Lock lock(mutex_);
        stopping_ = true;
    }
    work_.wake_all();
    for (const pthread_t thread : threads_)
        pthread_join(thread, nullptr);
    threads_.clear();
}

void Transfers::copy(const Pieces &from, void *to) const noexcept {
    uint8_t *at = static_cast<uint8_t *>(to);
    for (uint32_t i = 0; i < from.count; ++i) {
        const Pieces::Piece &piece = from.piece[i];
        if (copy_ != nullptr) {
            copy_(user_, at, piece.from, piece.bytes);
        } else {
            std::memcpy(at, piece.from, piece.bytes);
        }
        at += piece.bytes;
    }
}

bool Transfers::submit(const Pieces &from, void *to, uint32_t *state) noexcept {
    if (threads_.empty()) return false;
    {
        const Lock lock(mutex_);
        if (tail_ - head_ == queue_length) return false;
        const uint32_t index = static_cast<uint32_t>(tail_++ % queue_length);
        jobs_[index] = Job{from, to, state};
        std::atomic_ref<uint32_t>(*state).store(queued + index, std::memory_order_relaxed);
    }
    work_.wake_one();
    return true;
}

bool Transfers::arrived(const uint32_t *state) noexcept {
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t *>(state)).load(std::memory_order_acquire) == 0;
}

// With the mutex held. False: the copy is being made, or was.
bool Transfers::take_back(uint32_t *state, Job *job) noexcept {
    const uint32_t now = std::atomic_ref<uint32_t>(*state).load(std::memory_order_relaxed);
    if (now < queued) return false;
    Job &place = jobs_[now - queued];
    *job = place;
    place.state = nullptr;
    return true;
}

void Transfers::wait(uint32_t *state) noexcept {
    if (arrived(state)) return;
    std::atomic_ref<uint32_t> shared(*state);
    Job job{};
    {
        const Lock lock(mutex_);
        if (!take_back(state, &job)) {
            done_.wait(mutex_, [&] { return shared.load(std::memory_order_acquire) == 0; });
            return;
        }
        shared.store(running, std::memory_order_relaxed);
    }
    copy(job.from, job.to);
    const Lock lock(mutex_);
    shared.store(0, std::memory_order_release);
    done_.wake_all();
}

bool Transfers::cancel(uint32_t *state) noexcept {
    if (arrived(state)) return false;
    std::atomic_ref<uint32_t> shared(*state);
    Job job{};
    const Lock lock(mutex_);
    if (take_back(state, &job)) {
        shared.store(0, std::memory_order_relaxed);
        return true;
    }
    done_.wait(mutex_, [&] { return shared.load(std::memory_order_acquire) == 0; });
    return false;
}

bool Transfers::give_up(uint32_t *state) noexcept {
    if (arrived(state)) return true;
    std::atomic_ref<uint32_t> shared(*state);
    Job job{};
    const Lock lock(mutex_);
    if (take_back(state, &job)) shared.store(0, std::memory_order_relaxed);
    return shared.load(std::memory_order_acquire) == 0;
}

void *Transfers::thread_main(void *self) {
    static_cast<Transfers *>(self)->serve();
    return nullptr;
}

void Transfers::serve() noexcept {
    mutex_.lock();
    for (;;) {
        work_.wait(mutex_, [&] { return stopping_ || head_ != tail_; });
        if (stopping_) break;
        const Job job = jobs_[static_cast<size_t>(head_++ % queue_length)];
        if (job.state == nullptr) continue;
        std::atomic_ref<uint32_t> shared(*job.state);
        shared.store(running, std::memory_order_relaxed);
        mutex_.unlock();
        copy(job.from, job.to);
        mutex_.lock();
        shared.store(0, std::memory_order_release);
        done_.wake_all();
    }
    mutex_.unlock();
}

} // namespace skerry
