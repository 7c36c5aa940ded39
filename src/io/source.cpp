#include "io/source.hpp"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace skerry {

namespace {

// strerror is not safe with threads everywhere, and its text follows the locale.
const char *reason(int code) {
    switch (code) {
    case ENOENT:
        return "there is no such file";
    case ENOTDIR:
        return "a part of its path is no directory";
    case EACCES:
    case EPERM:
        return "permission was denied";
    case EISDIR:
        return "it is a directory";
    case ENAMETOOLONG:
        return "its name is too long";
    case EMFILE:
    case ENFILE:
        return "too many files are open";
    case EIO:
        return "the device failed";
    default:
        return "the system refused";
    }
}

Status io_failure(skerry_error *error, const char *what, int code) {
    return fail(error, SKERRY_ERROR_IO, SKERRY_SUBJECT_ARGUMENT, 1, code, 0, "%s the file: %s (errno %d)", what, reason(code), code);
}

} // namespace

ByteSource::~ByteSource() {
    if (file_ >= 0) ::close(file_);
}

Status ByteSource::open(const char *path, skerry_error *error) {
    // Without O_NONBLOCK the opening of a pipe would wait for a writer.
    do
        file_ = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    while (file_ < 0 && errno == EINTR);
    if (file_ < 0) return io_failure(error, "opening", errno);
    struct stat about;
    if (::fstat(file_, &about) != 0) return io_failure(error, "asking about", errno);
    if (!S_ISREG(about.st_mode)) {
        return fail(error, SKERRY_ERROR_IO, SKERRY_SUBJECT_ARGUMENT, 1, 0, 0, "opening the file: it is not a regular file");
    }
    size_ = static_cast<uint64_t>(about.st_size);
    return SKERRY_OK;
}

Status ByteSource::read(uint64_t offset, void *out, size_t bytes, skerry_error *error) const {
    if (file_ < 0) {
        if (bytes != 0) std::memcpy(out, data_ + offset, bytes);
        return SKERRY_OK;
    }
    uint8_t *to = static_cast<uint8_t *>(out);
    while (bytes != 0) {
        const ssize_t got = ::pread(file_, to, bytes, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return io_failure(error, "reading", errno);
        if (got == 0) {
            return fail(error, SKERRY_ERROR_IO, SKERRY_SUBJECT_ARGUMENT, 1, 0, 0, "reading the file: it became shorter meanwhile");
        }
        to += got;
        offset += static_cast<uint64_t>(got);
        bytes -= static_cast<size_t>(got);
    }
    return SKERRY_OK;
}

} // namespace skerry
