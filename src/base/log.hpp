#pragma once

#include <atomic>

#include <skerry/hooks.h>

namespace skerry {

class Log {
public:
    Log(skerry_log_fn function, void *user, skerry_log_level level) noexcept
        : function_(function), user_(user), level_(level) {}

    // Any thread, at any time.
    void set_level(skerry_log_level level) noexcept { level_.store(level, std::memory_order_relaxed); }
    // Ask before computing what only a log line needs.
    bool enabled(skerry_log_level level) const noexcept {
        return function_ != nullptr && level <= level_.load(std::memory_order_relaxed);
    }
    // Hands the host one finished UTF-8 line, cut at 511 bytes. Nothing is formatted below the level.
    [[gnu::format(printf, 4, 5)]] void write(skerry_log_level level, const char *part, const char *format,
                                             ...) const noexcept;

private:
    skerry_log_fn function_;
    void *user_;
    std::atomic<skerry_log_level> level_;
};

} // namespace skerry
