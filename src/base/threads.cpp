#include "base/threads.hpp"

#include <signal.h>

namespace skerry {

namespace {

constexpr size_t thread_stack_bytes = size_t{1} << 20;

class BlockedSignals {
public:
    BlockedSignals() noexcept {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockedSignals(const BlockedSignals &) = delete;
    BlockedSignals &operator=(const BlockedSignals &) = delete;

private:
    sigset_t before_;
};

} // namespace

bool start_threads(Buffer<pthread_t> &threads, uint32_t count, void *(*thread_main)(void *), void *argument) {
    threads.reserve(count);
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) throw std::bad_alloc();
    pthread_attr_setstacksize(&attributes, thread_stack_bytes);
    const BlockedSignals blocked;
    bool started = true;
    while (started && threads.size() < count) {
        pthread_t thread;
        started = pthread_create(&thread, &attributes, thread_main, argument) == 0;
        if (started) threads.push_back(thread);
    }
    pthread_attr_destroy(&attributes);
    return started;
}

} // namespace skerry
