/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_DEVICE_H
#define SKERRY_DEVICE_H

#include <skerry/hooks.h>
#include <skerry/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One library instance: hooks, workers, devices. Threads: any for retain and release, else as each call says. */
typedef struct skerry_context skerry_context;

/* Instruction sets of the CPU backend, for skerry_context_desc.cpu_disable and skerry_device_info.cpu_features. */
enum {
    SKERRY_CPU_AVX2        = 1u << 0, /* AVX2, FMA, F16C */
    SKERRY_CPU_AVX512      = 1u << 1, /* AVX-512 F, BW, VL, DQ */
    SKERRY_CPU_AVX512_VNNI = 1u << 2
};

/* desc */
typedef struct skerry_context_desc {
    uint32_t               struct_size;
    uint32_t               flags;         /* none defined; must be 0 */
    skerry_allocator       allocator;     /* all zero: malloc and free */
    skerry_log_fn          log_fn;        /* NULL: silent */
    void                  *log_user;
    skerry_parallel_for_fn parallel_for;  /* NULL: own workers */
    void                  *parallel_user;
    skerry_log_level       log_level;
    uint32_t               worker_count;  /* own threads beside the caller's; 0: the library starts none. At most 255 */
    uint32_t               cpu_disable;   /* SKERRY_CPU_*: instruction sets not to use; all bits: the reference in plain C++ */
    uint32_t               transfer_threads; /* own threads that copy between the host tier and the device; 0: the caller copies */
    skerry_transfer_fn     transfer;      /* NULL: the library's own copy */
    void                  *transfer_user;
} skerry_context_desc;

/* info. What one device is and can do. */
typedef struct skerry_device_info {
    uint32_t           struct_size;
    skerry_device_type type;
    int32_t            index;
    uint32_t           cpu_features;      /* SKERRY_CPU_* in use */
    uint32_t           worker_count;      /* threads a parallel loop may use, the caller's included; 0: the host's parallel_for */
    uint32_t           reserved;
    char               name[64];          /* backend and level, for instance "cpu avx512-vnni" */
} skerry_device_info;

/* Creates a context. `desc` NULL: all defaults.
 * Errors:  ARGUMENT, STRUCT_SIZE, NEWER_FIELD, OUT_OF_MEMORY
 * Threads: any
 * Since:   0.1 */
SKERRY_API skerry_status skerry_context_create(const skerry_context_desc *desc, skerry_context **out, skerry_error *error);

/* Threads: any */
SKERRY_API_VOID skerry_context *skerry_context_retain(skerry_context *context);

/* Threads: any. NULL is allowed. Caches keep their context alive. */
SKERRY_API_VOID void skerry_context_release(skerry_context *context);

/* Describes a device; index 0 is the CPU, which is always there.
 * Errors:  ARGUMENT, STRUCT_SIZE
 * Threads: any */
SKERRY_API skerry_status skerry_context_get_device(skerry_context *context, int32_t index, skerry_device_info *info,
                                                   skerry_error *error);

/* plain. Live host bytes of a context by owner; the sum of everything it holds from the allocator at this moment. */
typedef struct skerry_context_bytes {
    uint64_t context_bytes; /* the context itself, workers */
    uint64_t cache_bytes;   /* all caches together, as skerry_memory_info reports each */
    uint64_t object_count;  /* live allocations */
} skerry_context_bytes;

/* Threads: any */
SKERRY_API skerry_status skerry_context_get_bytes(skerry_context *context, skerry_context_bytes *bytes, skerry_error *error);

#ifdef __cplusplus
}
#endif

#endif
