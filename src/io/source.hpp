#pragma once

// Bytes to read from: the caller's memory, or a file that is open while the object lives.

#include <cstdint>

#include "base/status.hpp"

namespace skerry {

class ByteSource {
public:
    ByteSource(const void *data, uint64_t bytes) noexcept : data_(static_cast<const uint8_t *>(data)), size_(bytes) {}
    ByteSource() noexcept = default;
    ByteSource(const ByteSource &) = delete;
    ByteSource &operator=(const ByteSource &) = delete;
    ~ByteSource();

    // A regular file; of another kind, reading might never end. Once per object made without memory.
    Status open(const char *path, skerry_error *error);
    uint64_t size() const noexcept { return size_; }
    // Inside size(). A file may have become shorter since it was opened.
    Status read(uint64_t offset, void *out, size_t bytes, skerry_error *error) const;

private:
    const uint8_t *data_ = nullptr;
    uint64_t size_ = 0;
    int file_ = -1;
};

} // namespace skerry
