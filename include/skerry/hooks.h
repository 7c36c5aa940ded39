/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_HOOKS_H
#define SKERRY_HOOKS_H

/* What a host may put in place of the library's own allocation, logging and threads. */

#include <skerry/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* plain. Where host memory comes from: both functions or neither. `alignment` is a power of two, at most 4096 or a
 * huge page's size; `alloc` returns NULL when it has none, which becomes SKERRY_ERROR_OUT_OF_MEMORY. `release` gets the size and
 * alignment of the allocation. May be called from any thread that calls the library, never under a lock of the host's.
 * Lives until the context's last object is released. */
typedef struct skerry_allocator {
    void *user;
    void *(*alloc)(void *user, size_t size, size_t alignment);
    void (*release)(void *user, void *memory, size_t size, size_t alignment);
} skerry_allocator;

typedef int32_t skerry_log_level;
enum {
    SKERRY_LOG_NONE    = 0,
    SKERRY_LOG_ERROR   = 10,
    SKERRY_LOG_WARNING = 20,
    SKERRY_LOG_INFO    = 30,
    SKERRY_LOG_DEBUG   = 40
};

/* Receives a finished UTF-8 line without a newline and the part of the library it comes from. Called on the thread that
 * called the library. */
typedef void (*skerry_log_fn)(void *user, skerry_log_level level, const char *part, const char *line);

/* One piece of work of a parallel loop. */
typedef void (*skerry_task_fn)(void *task, int32_t index);

/* Runs task_fn(task, 0 .. count - 1), each exactly once, in any order and on any threads, and returns 0 when all have
 * ended. Anything else, or a piece that was not run, fails the call that wanted the work done, and that call changes nothing.
 * A host written in a language with exceptions has to catch its own before it returns. */
typedef int32_t (*skerry_parallel_for_fn)(void *user, skerry_task_fn task_fn, void *task, int32_t count);

/* Copies `bytes` from host detail to its slot on the device; when it returns, the bytes are there. Detail on a shared basis comes in up to
 * four pieces, a call each, of multiples of 4 bytes. Called on transfer threads, and on the thread that called the library when a copy is
 * waited for. */
typedef void (*skerry_transfer_fn)(void *user, void *to, const void *from, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
