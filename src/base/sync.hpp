#pragma once
// The standard's mutex can throw std::system_error, whose categories are objects with static constructors;
// these cannot fail once made.

#include <pthread.h>

namespace skerry {

class Mutex {
public:
    Mutex() noexcept = default;
    ~Mutex() { pthread_mutex_destroy(&mutex_); }
    Mutex(const Mutex &) = delete;
    Mutex &operator=(const Mutex &) = delete;
    void lock() noexcept { pthread_mutex_lock(&mutex_); }
    bool try_lock() noexcept { return pthread_mutex_trylock(&mutex_) == 0; }
    void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

private:
    friend class Condition;
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

// Holds a mutex for its scope.
class Lock {
public:
    explicit Lock(Mutex &mutex) noexcept : mutex_(mutex) { mutex_.lock(); }
    ~Lock() { mutex_.unlock(); }
    Lock(const Lock &) = delete;
    Lock &operator=(const Lock &) = delete;

private:
    Mutex &mutex_;
};

class Condition {
public:
    Condition() noexcept = default;
    ~Condition() { pthread_cond_destroy(&condition_); }
    Condition(const Condition &) = delete;
    Condition &operator=(const Condition &) = delete;
    // With `mutex` locked, which it is again when `done()` holds and this returns.
    template <class Done>
    void wait(Mutex &mutex, Done &&done) noexcept {
        while (!done()) pthread_cond_wait(&condition_, &mutex.mutex_);
    }
    void wake_one() noexcept { pthread_cond_signal(&condition_); }
    void wake_all() noexcept { pthread_cond_broadcast(&condition_); }

private:
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

} // namespace skerry
