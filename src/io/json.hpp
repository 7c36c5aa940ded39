#pragma once

// A strict reader for the JSON of file headers (RFC 8259): the grammar and nothing beyond it, names unique within an object, valid
// UTF-8 alone, bounded depth. The text comes from files that nobody has checked.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/alloc.hpp"

namespace skerry {

enum class JsonType : uint8_t { null, boolean, integer, number, string, array, object };

struct JsonNode {
    std::string_view name; // of a member of an object
    std::string_view text; // of a string; any code point, U+0000 too
    int64_t integer = 0;   // of an integer; a boolean's is 0 or 1
    uint32_t first = 0;    // child; 0: none
    uint32_t next = 0;     // sibling; 0: none
    uint32_t count = 0;    // children
    JsonType type = JsonType::null;
};

class Json {
public:
    static constexpr int max_depth = 8;
    static constexpr size_t max_bytes = size_t{1} << 30; // node numbers are 32 bits; a node takes one byte of text at least

    explicit Json(Allocator &allocator) noexcept : nodes_(allocator, Owner::context), order_(allocator, Owner::context) {}

    // Decodes strings in place: views into `text` are valid as long as it is, and it is no JSON afterwards. NULL, or what is wrong
    // at byte `offset`. Throws std::bad_alloc.
    [[nodiscard]] const char *parse(char *text, size_t size, size_t *offset);

    const JsonNode &root() const noexcept { return nodes_[0]; }
    const JsonNode *first(const JsonNode &parent) const noexcept { return at(parent.first); }
    const JsonNode *next(const JsonNode &node) const noexcept { return at(node.next); }
    const JsonNode *find(const JsonNode &object, std::string_view name) const noexcept;

private:
    struct Reader;
    const JsonNode *at(uint32_t index) const noexcept { return index != 0 ? &nodes_[index] : nullptr; }

    Buffer<JsonNode> nodes_; // the root is the first
    Buffer<uint32_t> order_; // members of the object that is being closed
};

} // namespace skerry
