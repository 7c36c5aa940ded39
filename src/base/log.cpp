#include "base/log.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "base/status.hpp"

namespace skerry {

void Log::write(skerry_log_level level, const char *part, const char *format, ...) const noexcept {
    if (!enabled(level)) return;
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    const int written = std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (written < 0) return;
    const size_t length = std::min(static_cast<size_t>(written), sizeof line - 1);
    const size_t kept = utf8_prefix(line, length, 511);
    make_one_line(line, kept);
    line[kept] = '\0';
    function_(user_, level, part, line);
}

} // namespace skerry
