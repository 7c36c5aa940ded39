/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_HPP
#define SKERRY_HPP

/* The handles of skerry.h as C++11 objects that release themselves. Header-only, and thin: descs, infos and tensors stay the
 * C structs, and `get()` hands out the C handle for every call that has no method here.
 *
 * Failure      With exceptions, a negative status is thrown as skerry::Error; without them (-fno-exceptions) the same
 *              functions return it. Positive remarks (SKERRY_INCOMPLETE, SKERRY_MISS) are returned either way.
 * Objects      Move-only; a moved-from or failed object is empty and tests false. Context, Router and Cache hold one reference of
 *              theirs, so their order of destruction is free; a Sequence and a Step keep their cache alive.
 * Threads      As the C calls they stand for.
 */

#include <skerry/skerry.h>

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define SKERRY_HPP_EXCEPTIONS 1
#include <exception>
#else
#define SKERRY_HPP_EXCEPTIONS 0
#endif

namespace skerry {

/* Keeps these inline functions apart from the library's own classes in a program that links both statically. */
inline namespace wrapper_0 {

#if SKERRY_HPP_EXCEPTIONS

/* What a failed call said. */
class Error : public std::exception {
public:
    explicit Error(const skerry_error &details) noexcept : details_(details) {}

    skerry_status status() const noexcept { return details_.status; }
    const skerry_error &details() const noexcept { return details_; }
    const char *what() const noexcept override {
        return details_.message[0] != '\0' ? details_.message : skerry_status_text(details_.status);
    }

private:
    skerry_error details_;
};

#endif

/* A desc or info with its size set and everything else zero. */
template <class T>
T make() noexcept {
    T made = T();
    made.struct_size = static_cast<uint32_t>(sizeof(T));
    return made;
}

/* Throws a failure where exceptions are on; otherwise hands it through. */
inline skerry_status check(skerry_status status, const skerry_error &details) {
#if SKERRY_HPP_EXCEPTIONS
    if (status < 0) {
        skerry_error full = details;
        full.status = status;
        throw Error(full);
    }
#else
    (void)details;
#endif
    return status;
}

class Context {
public:
    Context() noexcept : handle_(nullptr) {}
    ~Context() { skerry_context_release(handle_); }
    Context(Context &&other) noexcept : handle_(other.take()) {}
    Context &operator=(Context &&other) noexcept {
        if (this != &other) {
            skerry_context_release(handle_);
            handle_ = other.take();
        }
        return *this;
    }
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    /* `desc` NULL: all defaults. */
    skerry_status create(const skerry_context_desc *desc = nullptr) {
        skerry_error error = make<skerry_error>();
        skerry_context *made = nullptr;
        const skerry_status status = check(skerry_context_create(desc, &made, &error), error);
        if (status >= 0) *this = adopt(made);
        return status;
    }

    /* Takes over one reference. */
    static Context adopt(skerry_context *handle) noexcept {
        Context context;
        context.handle_ = handle;
        return context;
    }

    skerry_context *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    skerry_context *take() noexcept {
        skerry_context *handle = handle_;
        handle_ = nullptr;
        return handle;
    }

    skerry_context *handle_;
};

/* A trained router, for skerry_sekv_desc.router; caches keep references of their own. */
class Router {
public:
    Router() noexcept : handle_(nullptr) {}
    ~Router() { skerry_router_release(handle_); }
    Router(Router &&other) noexcept : handle_(other.take()) {}
    Router &operator=(Router &&other) noexcept {
        if (this != &other) {
            skerry_router_release(handle_);
            handle_ = other.take();
        }
        return *this;
    }
    Router(const Router &) = delete;
    Router &operator=(const Router &) = delete;

    skerry_status open(const Context &context, const skerry_router_desc &desc) {
        skerry_error error = make<skerry_error>();
        skerry_router *made = nullptr;
        const skerry_status status = check(skerry_router_open(context.get(), &desc, &made, &error), error);
        if (status >= 0) *this = adopt(made);
        return status;
    }
    /* `path`: UTF-8. */
    skerry_status open(const Context &context, const char *path) {
        skerry_router_desc desc = make<skerry_router_desc>();
        desc.path = path;
        return open(context, desc);
    }

    /* Takes over one reference. */
    static Router adopt(skerry_router *handle) noexcept {
        Router router;
        router.handle_ = handle;
        return router;
    }

    /* A second reference to the same router. */
    Router share() const noexcept { return adopt(skerry_router_retain(handle_)); }

    skerry_status info(skerry_router_info &info) const {
        skerry_error error = make<skerry_error>();
        info.struct_size = static_cast<uint32_t>(sizeof(info));
        return check(skerry_router_get_info(handle_, &info, &error), error);
    }

    skerry_router *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    skerry_router *take() noexcept {
        skerry_router *handle = handle_;
        handle_ = nullptr;
        return handle;
    }

    skerry_router *handle_;
};

class Cache {
public:
    Cache() noexcept : handle_(nullptr) {}
    ~Cache() { skerry_cache_release(handle_); }
    Cache(Cache &&other) noexcept : handle_(other.take()) {}
    Cache &operator=(Cache &&other) noexcept {
        if (this != &other) {
            skerry_cache_release(handle_);
            handle_ = other.take();
        }
        return *this;
    }
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;

    skerry_status create(const Context &context, const skerry_cache_desc &desc) {
        skerry_error error = make<skerry_error>();
        skerry_cache *made = nullptr;
        const skerry_status status = check(skerry_cache_create(context.get(), &desc, &made, &error), error);
        if (status >= 0) *this = adopt(made);
        return status;
    }

    /* Takes over one reference. */
    static Cache adopt(skerry_cache *handle) noexcept {
        Cache cache;
        cache.handle_ = handle;
        return cache;
    }

    /* A second reference to the same cache. */
    Cache share() const noexcept { return adopt(handle_ != nullptr ? skerry_cache_retain(handle_) : nullptr); }

    skerry_status set_budget(const skerry_budget_desc &budget) {
        skerry_error error = make<skerry_error>();
        return check(skerry_cache_set_budget(handle_, &budget, &error), error);
    }
    skerry_status plan(skerry_plan_info &info) const {
        skerry_error error = make<skerry_error>();
        info.struct_size = static_cast<uint32_t>(sizeof(info));
        return check(skerry_cache_get_plan(handle_, &info, &error), error);
    }
    skerry_status memory(skerry_memory_info &info) const {
        skerry_error error = make<skerry_error>();
        info.struct_size = static_cast<uint32_t>(sizeof(info));
        return check(skerry_cache_get_memory(handle_, &info, &error), error);
    }
    skerry_status counters(skerry_counters &counters) const {
        skerry_error error = make<skerry_error>();
        counters.struct_size = static_cast<uint32_t>(sizeof(counters));
        return check(skerry_cache_get_counters(handle_, &counters, &error), error);
    }

    skerry_cache *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    skerry_cache *take() noexcept {
        skerry_cache *handle = handle_;
        handle_ = nullptr;
        return handle;
    }

    skerry_cache *handle_;
};

/* Drops its sequence when it goes; it must not be part of an open step then. */
class Sequence {
public:
    Sequence() noexcept : id_() {}
    ~Sequence() { drop(); }
    Sequence(Sequence &&other) noexcept : cache_(static_cast<Cache &&>(other.cache_)), id_(other.release()) {}
    Sequence &operator=(Sequence &&other) noexcept {
        if (this != &other) {
            drop();
            cache_ = static_cast<Cache &&>(other.cache_);
            id_ = other.release();
        }
        return *this;
    }
    Sequence(const Sequence &) = delete;
    Sequence &operator=(const Sequence &) = delete;

    skerry_status create(const Cache &cache) {
        skerry_error error = make<skerry_error>();
        skerry_seq made = skerry_seq();
        const skerry_status status = check(skerry_seq_create(cache.get(), &made, &error), error);
        if (status >= 0) hold(cache, made);
        return status;
    }

    /* Makes `child` a sequence that continues this one from `length_tokens`; -1: all of it. */
    skerry_status fork(Sequence &child, int64_t length_tokens = -1) const {
        skerry_error error = make<skerry_error>();
        skerry_seq made = skerry_seq();
        const skerry_status status =
            check(skerry_seq_fork(cache_.get(), id_, length_tokens, &made, &error), error);
        if (status >= 0) {
            const Cache kept = cache_.share(); /* `child` may be this object */
            child.hold(kept, made);
        }
        return status;
    }
    skerry_status truncate(int64_t length_tokens) {
        skerry_error error = make<skerry_error>();
        return check(skerry_seq_truncate(cache_.get(), id_, length_tokens, &error), error);
    }
    skerry_status can_truncate(int64_t length_tokens, int64_t ahead_tokens = 0) const {
        skerry_error error = make<skerry_error>();
        return check(skerry_seq_can_truncate(cache_.get(), id_, length_tokens, ahead_tokens, &error), error);
    }
    skerry_status info(skerry_seq_info &info) const {
        skerry_error error = make<skerry_error>();
        info.struct_size = static_cast<uint32_t>(sizeof(info));
        return check(skerry_seq_get_info(cache_.get(), id_, &info, &error), error);
    }

    skerry_seq id() const noexcept { return id_; }
    explicit operator bool() const noexcept { return id_.bits != 0; }

    /* Gives the id up without dropping the sequence. */
    skerry_seq release() noexcept {
        const skerry_seq id = id_;
        id_.bits = 0;
        cache_ = Cache();
        return id;
    }

private:
    void hold(const Cache &cache, skerry_seq id) noexcept {
        Cache kept = cache.share();
        drop();
        cache_ = static_cast<Cache &&>(kept);
        id_ = id;
    }
    void drop() noexcept {
        if (id_.bits != 0) {
            const skerry_status dropped = skerry_seq_drop(cache_.get(), id_, nullptr);
            (void)dropped; /* the only failures left are the ones this class's text excludes */
        }
        id_.bits = 0;
    }

    Cache cache_;
    skerry_seq id_;
};

/* Aborts its step when it goes, unless it was committed. */
class Step {
public:
    Step() noexcept : handle_(nullptr) {}
    ~Step() { skerry_step_abort(handle_); }
    Step(Step &&other) noexcept : cache_(static_cast<Cache &&>(other.cache_)), handle_(other.take()) {}
    Step &operator=(Step &&other) noexcept {
        if (this != &other) {
            skerry_step_abort(handle_);
            cache_ = static_cast<Cache &&>(other.cache_);
            handle_ = other.take();
        }
        return *this;
    }
    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;

    /* An open step of this object is aborted first. */
    skerry_status begin(const Cache &cache, const skerry_step_desc &desc) {
        abort();
        skerry_error error = make<skerry_error>();
        const skerry_status status = check(skerry_step_begin(cache.get(), &desc, &handle_, &error), error);
        if (status >= 0) cache_ = cache.share();
        return status;
    }
    skerry_status append(int32_t layer, const skerry_tensor &keys, const skerry_tensor &values,
                         const skerry_stream *stream = nullptr) {
        skerry_error error = make<skerry_error>();
        return check(skerry_step_append(handle_, layer, &keys, &values, stream, &error), error);
    }
    skerry_status attend(const skerry_attend_desc &desc) {
        skerry_error error = make<skerry_error>();
        return check(skerry_step_attend(handle_, &desc, &error), error);
    }
    skerry_status zoom(int32_t layer, const skerry_tensor &queries, const skerry_stream *stream = nullptr) {
        skerry_error error = make<skerry_error>();
        return check(skerry_step_zoom(handle_, layer, &queries, stream, &error), error);
    }
    skerry_status gather(const skerry_gather_desc &desc, int32_t &tokens) {
        skerry_error error = make<skerry_error>();
        return check(skerry_step_gather(handle_, &desc, &tokens, &error), error);
    }
    skerry_status observe(const skerry_observe_desc &desc) {
        skerry_error error = make<skerry_error>();
        return check(skerry_step_observe(handle_, &desc, &error), error);
    }
    /* On failure the step stays open. */
    skerry_status commit() {
        skerry_error error = make<skerry_error>();
        const skerry_status status = skerry_step_commit(handle_, &error);
        if (status >= 0) {
            handle_ = nullptr;
            cache_ = Cache();
        }
        return check(status, error);
    }
    void abort() noexcept {
        skerry_step_abort(take());
        cache_ = Cache();
    }

    skerry_step *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

private:
    skerry_step *take() noexcept {
        skerry_step *handle = handle_;
        handle_ = nullptr;
        return handle;
    }

    Cache cache_;
    skerry_step *handle_;
};

} // namespace wrapper_0

/* A dense row-major tensor over the caller's numbers on the CPU. */
inline skerry_tensor tensor(const void *data, skerry_dtype dtype, int64_t a, int64_t b, int64_t c) noexcept {
    skerry_tensor t = skerry_tensor();
    t.data = const_cast<void *>(data);
    t.dtype = dtype;
    t.rank = 3;
    t.shape[0] = a;
    t.shape[1] = b;
    t.shape[2] = c;
    t.stride[0] = b * c;
    t.stride[1] = c;
    t.stride[2] = 1;
    return t;
}

} // namespace skerry

#endif
