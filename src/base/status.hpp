#pragma once

#include <skerry/base.h>

namespace skerry {

using Status = skerry_status;

// Enumerator name and sentence; "SKERRY_UNKNOWN" and a generic sentence for other numbers.
const char *status_name(Status status) noexcept;
const char *status_text(Status status) noexcept;

// Fills the caller's error, as far as its struct_size reaches, and returns `status`. `error` may be NULL.
[[gnu::format(printf, 7, 8)]] Status fail(skerry_error *error, Status status, uint32_t subject, int32_t index,
                                          int64_t found, int64_t allowed, const char *format, ...) noexcept;

// Length of the longest prefix of `text` that is at most `limit` bytes and ends between UTF-8 characters.
size_t utf8_prefix(const char *text, size_t length, size_t limit) noexcept;

// Replaces control characters, so that what a caller's string brought in stays on one line.
void make_one_line(char *text, size_t length) noexcept;

} // namespace skerry
