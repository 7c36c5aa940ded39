#include "base/status.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>

namespace skerry {
namespace {

struct Row {
    Status status;
    const char *name;
    const char *text;
};

constexpr Row rows[] = {
    {SKERRY_OK, "SKERRY_OK", "success"},
    {SKERRY_PENDING, "SKERRY_PENDING", "the work is queued on a stream"},
    {SKERRY_INCOMPLETE, "SKERRY_INCOMPLETE", "the array was too small and the needed count was written"},
    {SKERRY_MISS, "SKERRY_MISS", "nothing is stored for that key"},
    {SKERRY_ERROR_ARGUMENT, "SKERRY_ERROR_ARGUMENT", "an argument is outside what the function allows"},
    {SKERRY_ERROR_STRUCT_SIZE, "SKERRY_ERROR_STRUCT_SIZE", "struct_size fits no known version of the struct"},
    {SKERRY_ERROR_NEWER_FIELD, "SKERRY_ERROR_NEWER_FIELD", "a field that this build does not know is set"},
    {SKERRY_ERROR_STALE_ID, "SKERRY_ERROR_STALE_ID", "the object behind the id is gone"},
    {SKERRY_ERROR_STATE, "SKERRY_ERROR_STATE", "the call is legal but not at this moment"},
    {SKERRY_ERROR_NONFINITE, "SKERRY_ERROR_NONFINITE", "the input holds a NaN or an infinity"},
    {SKERRY_ERROR_OUT_OF_MEMORY, "SKERRY_ERROR_OUT_OF_MEMORY", "the machine has no memory left for this"},
    {SKERRY_ERROR_OVER_BUDGET, "SKERRY_ERROR_OVER_BUDGET", "the caller's byte budget does not hold this"},
    {SKERRY_ERROR_TIER_FULL, "SKERRY_ERROR_TIER_FULL", "the tier has reached its own limit"},
    {SKERRY_ERROR_UNSUPPORTED, "SKERRY_ERROR_UNSUPPORTED", "this device or build cannot do that"},
    {SKERRY_ERROR_BACKEND, "SKERRY_ERROR_BACKEND", "the backend is missing, too old or too new"},
    {SKERRY_ERROR_DEVICE_LOST, "SKERRY_ERROR_DEVICE_LOST", "the device was lost"},
    {SKERRY_ERROR_IO, "SKERRY_ERROR_IO", "reading or writing a file failed"},
    {SKERRY_ERROR_FORMAT, "SKERRY_ERROR_FORMAT", "the stored bytes were made under other settings"},
    {SKERRY_ERROR_CORRUPT, "SKERRY_ERROR_CORRUPT", "the stored bytes fail their check"},
    {SKERRY_ERROR_INTERNAL, "SKERRY_ERROR_INTERNAL", "an invariant of the library is broken"},
};

const Row *find_row(Status status) noexcept {
    const Row *end = rows + std::size(rows);
    const Row *row = std::find_if(rows, end, [status](const Row &r) { return r.status == status; });
    return row == end ? nullptr : row;
}

} // namespace

const char *status_name(Status status) noexcept {
    const Row *row = find_row(status);
    return row != nullptr ? row->name : "SKERRY_UNKNOWN";
}

const char *status_text(Status status) noexcept {
    const Row *row = find_row(status);
    if (row != nullptr) return row->text;
    return status < 0 ? "an error that this build does not know" : "a remark that this build does not know";
}

size_t utf8_prefix(const char *text, size_t length, size_t limit) noexcept {
    if (length <= limit) return length;
    size_t end = limit;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;
    return end;
}

void make_one_line(char *text, size_t length) noexcept {
    for (size_t i = 0; i < length; ++i) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (c < 0x20 || c == 0x7f) text[i] = ' ';
    }
}

Status fail(skerry_error *error, Status status, uint32_t subject, int32_t index, int64_t found,
            int64_t allowed, const char *format, ...) noexcept {
    if (error == nullptr) return status;
    skerry_error full{};
    full.struct_size = error->struct_size;
    full.status = status;
    full.subject = subject;
    full.index = index;
    full.found = found;
    full.allowed = allowed;

    // Twice the field, so that a long message is cut at a character and not wherever vsnprintf stopped.
    char line[2 * sizeof full.message];
    va_list arguments;
    va_start(arguments, format);
    const int written = std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    const size_t length = written < 0 ? 0 : std::min(static_cast<size_t>(written), sizeof line - 1);

    const size_t known = std::min<size_t>(error->struct_size, sizeof full);
    constexpr size_t message_at = offsetof(skerry_error, message);
    if (known > message_at) {
        const size_t kept = utf8_prefix(line, length, known - message_at - 1);
        make_one_line(line, kept);
        std::memcpy(full.message, line, kept);
    }
    std::memcpy(error, &full, known);
    return status;
}

} // namespace skerry
