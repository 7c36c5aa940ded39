#include "io/safetensors.hpp"

#include <algorithm>
#include <bit>

#include "base/half.hpp"

namespace skerry {

namespace {

constexpr uint64_t length_bytes = 8;

template <class... Arguments>
Status corrupt(skerry_error *error, uint64_t byte, const char *format, Arguments... arguments) {
    return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_ARGUMENT, 1, static_cast<int64_t>(byte), 0, format, arguments...);
}

uint32_t little_endian(const uint8_t *bytes, int count) {
    uint32_t value = 0;
    for (int i = count; i-- > 0;)
        value = value << 8 | bytes[i];
    return value;
}

uint64_t type_bytes(TensorType type) { return type == TensorType::f32 ? 4 : 2; }

TensorType type_of(std::string_view name) {
    if (name == "F32") return TensorType::f32;
    if (name == "F16") return TensorType::f16;
    return name == "BF16" ? TensorType::bf16 : TensorType::other;
}

float decode(TensorType type, const uint8_t *bytes) {
    if (type == TensorType::f32) return std::bit_cast<float>(little_endian(bytes, 4));
    const uint16_t half = static_cast<uint16_t>(little_endian(bytes, 2));
    return type == TensorType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

bool is_finite(float value) { return (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u; }

} // namespace

ShownName shown(std::string_view name) noexcept { return {static_cast<int>(utf8_prefix(name.data(), name.size(), 64)), name.data()}; }

Status SafetensorsFile::open(skerry_error *error) {
    const uint64_t size = source_.size();
    if (size < length_bytes) return corrupt(error, size, "%u bytes are no safetensors file", static_cast<unsigned>(size));
    uint8_t first[length_bytes];
    if (const Status status = source_.read(0, first, sizeof first, error); status < 0) return status;
    const uint64_t header_bytes = uint64_t{little_endian(first + 4, 4)} << 32 | little_endian(first, 4);
    if (header_bytes > size - length_bytes || header_bytes > max_header_bytes) {
        return corrupt(error, 0, "a header of %llu bytes in a file of %llu (at most %llu); cut off, or no safetensors file",
                       static_cast<unsigned long long>(header_bytes), static_cast<unsigned long long>(size),
                       static_cast<unsigned long long>(max_header_bytes));
    }
    text_.resize_uninitialised(static_cast<size_t>(header_bytes));
    if (const Status status = source_.read(length_bytes, text_.data(), text_.size(), error); status < 0) return status;
    // The format has the header begin with a brace; white space may only follow.
    size_t offset = 0;
    const char *problem = text_.empty() || text_[0] != '{' ? "it is no object" : header_.parse(text_.data(), text_.size(), &offset);
    if (problem != nullptr) {
        return corrupt(error, length_bytes + offset, "the header is not right JSON at byte %llu: %s",
                       static_cast<unsigned long long>(length_bytes + offset), problem);
    }
    entries_.reserve(header_.root().count);
    for (const JsonNode *node = header_.first(header_.root()); node != nullptr; node = header_.next(*node)) {
        if (const Status status = add(*node, length_bytes + header_bytes, error); status < 0) return status;
    }
    return check_layout(length_bytes + header_bytes, error);
}

Status SafetensorsFile::add(const JsonNode &node, uint64_t data_begin, skerry_error *error) {
    const ShownName name = shown(node.name);
    if (node.type != JsonType::object) return corrupt(error, 0, "'%.*s' in the header is no object", name.size, name.text);
    if (node.name == "__metadata__") {
        for (const JsonNode *value = header_.first(node); value != nullptr; value = header_.next(*value)) {
            if (value->type != JsonType::string) return corrupt(error, 0, "__metadata__ holds something other than a string");
        }
        metadata_ = &node;
        return SKERRY_OK;
    }
    const JsonNode *type = header_.find(node, "dtype");
    const JsonNode *shape = header_.find(node, "shape");
    const JsonNode *offsets = header_.find(node, "data_offsets");
    if (node.count != 3 || type == nullptr || type->type != JsonType::string || shape == nullptr || shape->type != JsonType::array ||
        offsets == nullptr || offsets->type != JsonType::array || offsets->count != 2) {
        return corrupt(error, 0, "tensor '%.*s' needs a dtype, a shape, two data_offsets and nothing else", name.size, name.text);
    }
    TensorEntry entry;
    entry.name = node.name;
    entry.type_name = type->text;
    entry.type = type_of(type->text);
    entry.rank = shape->count;
    uint64_t bytes = type_bytes(entry.type), place[2] = {};
    uint32_t i = 0;
    for (const JsonNode *dim = header_.first(*shape); dim != nullptr; dim = header_.next(*dim), ++i) {
        if (dim->type != JsonType::integer || dim->integer < 0 || !checked_mul(bytes, static_cast<uint64_t>(dim->integer), &bytes)) {
            return corrupt(error, 0, "tensor '%.*s' has a dimension that no tensor has", name.size, name.text);
        }
        if (i < TensorEntry::max_rank) entry.shape[i] = static_cast<uint64_t>(dim->integer);
    }
    i = 0;
    for (const JsonNode *offset = header_.first(*offsets); offset != nullptr; offset = header_.next(*offset), ++i) {
        if (offset->type != JsonType::integer || offset->integer < 0) {
            return corrupt(error, 0, "tensor '%.*s' has an offset that is no place", name.size, name.text);
        }
        place[i] = static_cast<uint64_t>(offset->integer);
    }
    if (place[1] < place[0] || place[1] > source_.size() - data_begin) {
        return corrupt(error, 0, "tensor '%.*s' ends at byte %llu of %llu bytes of data; the file is cut off or wrong", name.size,
                       name.text, static_cast<unsigned long long>(place[1]), static_cast<unsigned long long>(source_.size() - data_begin));
    }
    if (entry.type != TensorType::other && place[1] - place[0] != bytes) {
        return corrupt(error, 0, "tensor '%.*s' has %llu bytes; its shape takes %llu", name.size, name.text,
                       static_cast<unsigned long long>(place[1] - place[0]), static_cast<unsigned long long>(bytes));
    }
    entry.begin = data_begin + place[0];
    entry.end = data_begin + place[1];
    entries_.push_back(entry);
    return SKERRY_OK;
}

Status SafetensorsFile::check_layout(uint64_t data_begin, skerry_error *error) {
    std::sort(entries_.begin(), entries_.end(),
              [](const TensorEntry &a, const TensorEntry &b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
    uint64_t place = data_begin;
    for (const TensorEntry &entry : entries_) {
        const ShownName name = shown(entry.name);
        if (entry.begin < place) return corrupt(error, entry.begin, "tensor '%.*s' overlaps another", name.size, name.text);
        if (entry.begin > place) return corrupt(error, place, "a gap before tensor '%.*s'", name.size, name.text);
        place = entry.end;
    }
    if (place == source_.size()) return SKERRY_OK;
    return corrupt(error, place, "%llu bytes after the last tensor", static_cast<unsigned long long>(source_.size() - place));
}

const TensorEntry *SafetensorsFile::find(std::string_view name) const noexcept {
    const TensorEntry *found = std::find_if(entries_.begin(), entries_.end(), [&](const TensorEntry &e) { return e.name == name; });
    return found != entries_.end() ? found : nullptr;
}

std::span<char> SafetensorsFile::metadata(std::string_view key) noexcept {
    const JsonNode *value = metadata_ != nullptr ? header_.find(*metadata_, key) : nullptr;
    if (value == nullptr) return {};
    // Its bytes lie in text_, which is this object's own.
    return {text_.data() + (value->text.data() - text_.data()), value->text.size()};
}

Status SafetensorsFile::read(const TensorEntry &entry, float *out, skerry_error *error) const {
    uint8_t block[4096];
    const uint64_t step = type_bytes(entry.type);
    uint64_t element = 0;
    for (uint64_t at = entry.begin; at != entry.end;) {
        const size_t bytes = static_cast<size_t>(std::min<uint64_t>(entry.end - at, sizeof block));
        if (const Status status = source_.read(at, block, bytes, error); status < 0) return status;
        for (size_t i = 0; i < bytes; i += step, ++element) {
            out[element] = decode(entry.type, block + i);
            if (is_finite(out[element])) continue;
            const ShownName name = shown(entry.name);
            return fail(error, SKERRY_ERROR_NONFINITE, SKERRY_SUBJECT_VALUES, -1, static_cast<int64_t>(element), 0,
                        "tensor '%.*s' holds a NaN or infinity at element %llu", name.size, name.text,
                        static_cast<unsigned long long>(element));
        }
        at += bytes;
    }
    return SKERRY_OK;
}

} // namespace skerry
