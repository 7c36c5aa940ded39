#pragma once

// Reads safetensors: 8 bytes with the length of a JSON header, the header, and the numbers of all tensors behind it. Everything the
// header says is checked before it is used.

#include <span>
#include <string_view>

#include "io/json.hpp"
#include "io/source.hpp"

namespace skerry {

enum class TensorType : uint8_t { f32, f16, bf16, other };

struct TensorEntry {
    static constexpr int max_rank = 8;
    std::string_view name;
    std::string_view type_name;
    uint64_t begin = 0; // bytes of the file
    uint64_t end = 0;
    uint64_t shape[max_rank] = {}; // the first ones of a tensor with more
    uint32_t rank = 0;
    TensorType type = TensorType::other; // what read() takes, or another
};

// Part of a name that came from a file, for messages: use with "%.*s".
struct ShownName {
    int size;
    const char *text;
};
ShownName shown(std::string_view name) noexcept;

class SafetensorsFile {
public:
    // The published reader takes 100 MB; files with so many tensors are not for this library. Bounds what a bad length can cost.
    static constexpr uint64_t max_header_bytes = uint64_t{1} << 20;

    // `source` outlives the object.
    SafetensorsFile(Allocator &allocator, const ByteSource &source) noexcept
        : source_(source), text_(allocator, Owner::context), header_(allocator), entries_(allocator, Owner::context) {}

    // Once. Throws std::bad_alloc.
    Status open(skerry_error *error);

    const TensorEntry *find(std::string_view name) const noexcept;
    // A string of `__metadata__`, which the caller may decode further in place; no data when there is none.
    std::span<char> metadata(std::string_view key) noexcept;
    // All numbers of a tensor of a type other than `other`, refused when one is not finite. `out` has room for all of them.
    Status read(const TensorEntry &entry, float *out, skerry_error *error) const;

private:
    Status add(const JsonNode &node, uint64_t data_begin, skerry_error *error);
    Status check_layout(uint64_t data_begin, skerry_error *error);

    const ByteSource &source_;
    Buffer<char> text_;
    Json header_;
    Buffer<TensorEntry> entries_; // by place in the file
    const JsonNode *metadata_ = nullptr;
};

} // namespace skerry
