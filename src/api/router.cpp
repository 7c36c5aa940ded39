#include <skerry/router.h>

#include "api/check.hpp"
#include "io/router_file.hpp"

using namespace skerry;

skerry_status skerry_router_open(skerry_context *context, const skerry_router_desc *given, skerry_router **out, skerry_error *error) {
    if (out == nullptr) return null_argument(error, 2, "out");
    *out = nullptr;
    if (context == nullptr) return null_argument(error, 0, "context");
    return guarded(error, [&]() -> Status {
        skerry_router_desc desc{};
        if (const Status status = read_struct(given, sizeof desc, &desc, sizeof desc, 1, "desc", error); status < 0) return status;
        if (desc.flags != 0) return unknown_flags(error, 1, desc.flags, 0, "desc.flags");
        if ((desc.data == nullptr) == (desc.path == nullptr)) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 1, 0, 0, "desc needs exactly one of data and path");
        }
        if (desc.data == nullptr && (desc.bytes != 0 || *desc.path == '\0')) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, 1, static_cast<int64_t>(desc.bytes), 0,
                        desc.bytes != 0 ? "desc.bytes is set without desc.data" : "desc.path is empty");
        }
        Owned<skerry_router> router = make_owned<skerry_router>(context->allocator, Owner::context, context, context->allocator);
        if (desc.data != nullptr) {
            const ByteSource memory(desc.data, desc.bytes);
            if (const Status status = router_read(memory, context->allocator, &router->weights, error); status < 0) return status;
        } else {
            ByteSource file;
            if (const Status status = file.open(desc.path, error); status < 0) return status;
            if (const Status status = router_read(file, context->allocator, &router->weights, error); status < 0) return status;
        }
        context->references.fetch_add(1, std::memory_order_relaxed);
        *out = router.detach();
        return SKERRY_OK;
    });
}

skerry_status skerry_router_get_info(skerry_router *router, skerry_router_info *info, skerry_error *error) {
    if (router == nullptr) return null_argument(error, 0, "router");
    uint32_t writable = 0;
    if (const Status status = check_out_struct(info, sizeof *info, sizeof *info, 1, "info", &writable, error); status < 0) return status;
    const RouterWeights &weights = router->weights;
    skerry_router_info filled{};
    filled.flags = weights.flags();
    filled.parameters = weights.values.size();
    filled.weight_bytes = weights.values.allocated_bytes();
    filled.training_step = weights.step;
    filled.layers = weights.layers;
    filled.query_heads = weights.query_heads;
    filled.kv_heads = weights.kv_heads;
    filled.key_dim = weights.key_dim;
    filled.summary_dim = weights.summary_dim;
    filled.rank_max = weights.rank_max;
    filled.form = weights.form;
    filled.pooling = weights.pooling;
    filled.centroids = weights.centroids;
    std::memcpy(filled.model, weights.model, sizeof filled.model);
    copy_out(filled, info, writable);
    return SKERRY_OK;
}

skerry_router *skerry_router_retain(skerry_router *router) {
    if (router != nullptr) router->references.fetch_add(1, std::memory_order_relaxed);
    return router;
}

void skerry_router_release(skerry_router *router) { router_release(router); }
