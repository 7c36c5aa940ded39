#include <skerry/device.h>

#include <cstdio>

#include "api/check.hpp"

using namespace skerry;

skerry_status skerry_context_create(const skerry_context_desc *given, skerry_context **out, skerry_error *error) {
    if (out == nullptr) return null_argument(error, 1, "out");
    *out = nullptr;
    return guarded(error, [&]() -> Status {
        skerry_context_desc desc{};
        if (given != nullptr) {
            const Status status = read_struct(given, offsetof(skerry_context_desc, transfer), &desc, sizeof desc, 0, "desc", error);
            if (status < 0) return status;
        }
        if (desc.flags != 0) return unknown_flags(error, 0, desc.flags, 0, "desc.flags");
        if (desc.transfer_threads > limits::max_transfer_threads) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 0, desc.transfer_threads, limits::max_transfer_threads,
                        "desc.transfer_threads is %u, at most %u", desc.transfer_threads, limits::max_transfer_threads);
        }
        if ((desc.allocator.alloc == nullptr) != (desc.allocator.release == nullptr)) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 0, 1, 2, "desc.allocator has only one of alloc and release");
        }
        if (desc.worker_count > limits::max_workers) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 0, desc.worker_count, limits::max_workers,
                        "desc.worker_count is %u, at most %u", desc.worker_count, limits::max_workers);
        }
        *out = context_create(desc);
        return SKERRY_OK;
    });
}

skerry_context *skerry_context_retain(skerry_context *context) {
    if (context != nullptr) context->references.fetch_add(1, std::memory_order_relaxed);
    return context;
}

void skerry_context_release(skerry_context *context) {
    if (context != nullptr) context_release(context);
}

skerry_status skerry_context_get_device(skerry_context *context, int32_t index, skerry_device_info *info, skerry_error *error) {
    if (context == nullptr) return null_argument(error, 0, "context");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, sizeof *info, sizeof *info, 2, "info", &writable, error); status < 0) return status;
    if (index != 0) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 1, index, 0, "device %d: this build has device 0, the CPU",
                    index);
    }
    skerry_device_info filled{};
    filled.type = SKERRY_DEVICE_CPU;
    filled.cpu_features = context->features;
    filled.worker_count = context->workers.concurrency();
    std::snprintf(filled.name, sizeof filled.name, "%s", context->kernels->name);
    copy_out(filled, info, writable);
    return SKERRY_OK;
}

skerry_status skerry_context_get_bytes(skerry_context *context, skerry_context_bytes *bytes, skerry_error *error) {
    if (context == nullptr) return null_argument(error, 0, "context");
    if (bytes == nullptr) return null_argument(error, 1, "bytes");
    const uint64_t live = context->allocator.live_bytes() + sizeof(skerry_context);
    const uint64_t caches = context->caches.live_bytes();
    *bytes = skerry_context_bytes{live - caches, caches, context->allocator.live_count() + 1};
    return SKERRY_OK;
}
