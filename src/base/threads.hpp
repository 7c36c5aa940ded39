#pragma once

#include <pthread.h>

#include <cstdint>

#include "base/alloc.hpp"

namespace skerry {

// Starts threads until `threads` holds `count`; with small stacks and every signal blocked: signals of the host are for the host's threads.
// False: the system gave fewer. Throws std::bad_alloc.
bool start_threads(Buffer<pthread_t> &threads, uint32_t count, void *(*thread_main)(void *), void *argument);

} // namespace skerry
