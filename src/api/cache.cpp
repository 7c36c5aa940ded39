#include <skerry/cache.h>

#include "api/check.hpp"

using namespace skerry;

namespace {

Status read_cache_desc(const skerry_cache_desc *given, skerry_cache_desc *desc, skerry_callbacks_desc *callbacks, skerry_error *error) {
    if (const Status status = read_struct(given, sizeof *desc, desc, sizeof *desc, 1, "desc", error); status < 0) return status;
    if ((desc->flags & ~static_cast<uint32_t>(SKERRY_CACHE_EXACT_ATTEND)) != 0) {
        return unknown_flags(error, 1, desc->flags, SKERRY_CACHE_EXACT_ATTEND, "desc.flags");
    }
    if (desc->nonfinite != SKERRY_NONFINITE_REFUSE && desc->nonfinite != SKERRY_NONFINITE_ZERO) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_VALUES, -1, desc->nonfinite, SKERRY_NONFINITE_ZERO, "desc.nonfinite is %d",
                    desc->nonfinite);
    }
    if (desc->device_type != SKERRY_DEVICE_CPU || desc->device_index != 0) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_BACKEND, desc->device_index, desc->device_type, SKERRY_DEVICE_CPU,
                    "device %d:%d: this build stores on the CPU only", desc->device_type, desc->device_index);
    }
    if (desc->callbacks != nullptr) {
        if (const Status status = read_struct(desc->callbacks, sizeof *callbacks, callbacks, sizeof *callbacks, 1, "desc.callbacks", error);
            status < 0) {
            return status;
        }
        if (callbacks->flags != 0) return unknown_flags(error, 1, callbacks->flags, 0, "desc.callbacks.flags");
        desc->callbacks = callbacks;
    }
    return SKERRY_OK;
}

} // namespace

skerry_status skerry_cache_plan(skerry_context *context, const skerry_cache_desc *given, skerry_plan_info *info, skerry_error *error) {
    if (context == nullptr) return null_argument(error, 0, "context");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, offsetof(skerry_plan_info, host_bytes), sizeof *info, 2, "info", &writable, error);
        status < 0)
        return status;
    return guarded(error, [&]() -> Status {
        skerry_cache_desc desc{};
        skerry_callbacks_desc callbacks{};
        if (const Status status = read_cache_desc(given, &desc, &callbacks, error); status < 0) return status;
        CachePlan plan;
        std::memset(&plan.info, 0, sizeof plan.info);
        const Status status = make_plan(desc, context->device(), &plan, error);
        if (status < 0 && status != SKERRY_ERROR_OVER_BUDGET) return status;
        plan.info.cpu_features = context->features;
        copy_out(plan.info, info, writable);
        return status;
    });
}

skerry_status skerry_cache_create(skerry_context *context, const skerry_cache_desc *given, skerry_cache **out, skerry_error *error) {
    if (out == nullptr) return null_argument(error, 2, "out");
    *out = nullptr;
    if (context == nullptr) return null_argument(error, 0, "context");
    return guarded(error, [&]() -> Status {
        skerry_cache_desc desc{};
        skerry_callbacks_desc callbacks{};
        if (const Status status = read_cache_desc(given, &desc, &callbacks, error); status < 0) return status;
        return cache_create(context, desc, out, error);
    });
}

skerry_cache *skerry_cache_retain(skerry_cache *cache) {
    if (cache != nullptr) cache->references.fetch_add(1, std::memory_order_relaxed);
    return cache;
}

void skerry_cache_release(skerry_cache *cache) {
    if (cache != nullptr && cache->references.fetch_sub(1, std::memory_order_acq_rel) == 1) cache_destroy(cache);
}

skerry_status skerry_cache_get_plan(skerry_cache *cache, skerry_plan_info *info, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, offsetof(skerry_plan_info, host_bytes), sizeof *info, 1, "info", &writable, error);
        status < 0)
        return status;
    skerry_plan_info filled = cache->plan.info;
    filled.cpu_features = cache->context->features;
    copy_out(filled, info, writable);
    return SKERRY_OK;
}

skerry_status skerry_cache_set_budget(skerry_cache *cache, const skerry_budget_desc *given, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    return guarded(error, [&]() -> Status {
        skerry_budget_desc budget{};
        if (const Status status = read_struct(given, offsetof(skerry_budget_desc, host_bytes), &budget, sizeof budget, 1, "budget", error);
            status < 0)
            return status;
        if (budget.flags != 0 || budget.reserved != 0)
            return unknown_flags(error, 1, budget.flags, 0, "budget.flags (or its reserved field)");
        return cache_set_budget(cache, budget, error);
    });
}

skerry_status skerry_cache_check(skerry_cache *cache, skerry_error *error) {
    if (cache == nullptr) return null_argument(error, 0, "cache");
    return guarded(error, [&] { return cache_check(cache, error); });
}
