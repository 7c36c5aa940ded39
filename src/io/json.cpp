#include "io/json.hpp"

#include <algorithm>

namespace skerry {

struct Json::Reader {
    Buffer<JsonNode> &nodes;
    Buffer<uint32_t> &order;
    const char *begin;
    char *at;
    char *end;
    const char *problem = nullptr;
    const char *problem_at = nullptr;

    bool fail(const char *what) { return fail_at(what, at); }
    bool fail_at(const char *what, const char *where) {
        if (problem == nullptr) {
            problem = what;
            problem_at = where;
        }
        return false;
    }
    void skip_space() {
        while (at != end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
            ++at;
    }
    bool take(char wanted) {
        if (at == end || *at != wanted) return false;
        ++at;
        return true;
    }
    bool take_word(std::string_view word) {
        if (static_cast<size_t>(end - at) < word.size() || std::string_view(at, word.size()) != word) return false;
        at += word.size();
        return true;
    }
    bool take_digits() {
        const char *from = at;
        while (at != end && *at >= '0' && *at <= '9')
            ++at;
        return at != from;
    }

    bool hex4(uint32_t *out) {
        if (end - at < 4) return fail("an escape is cut off");
        uint32_t value = 0;
        for (int i = 0; i < 4; ++i, ++at) {
            const char c = *at;
            uint32_t digit = 0;
            if (c >= '0' && c <= '9') {
                digit = static_cast<uint32_t>(c - '0');
            } else if (c >= 'a' && c <= 'f') {
                digit = static_cast<uint32_t>(c - 'a') + 10;
            } else if (c >= 'A' && c <= 'F') {
                digit = static_cast<uint32_t>(c - 'A') + 10;
            } else {
                return fail("an escape has a character that is no hexadecimal digit");
            }
            value = value * 16 + digit;
        }
        *out = value;
        return true;
    }

    static char *put(char *to, uint32_t code) {
        const auto byte = [&](uint32_t value) { *to++ = static_cast<char>(static_cast<unsigned char>(value)); };
        const auto continuation = [&](uint32_t shift) { byte(0x80u | ((code >> shift) & 0x3fu)); };
        if (code < 0x80) {
            byte(code);
        } else if (code < 0x800) {
            byte(0xc0u | (code >> 6));
            continuation(0);
        } else if (code < 0x10000) {
            byte(0xe0u | (code >> 12));
            continuation(6);
            continuation(0);
        } else {
            byte(0xf0u | (code >> 18));
            continuation(12);
            continuation(6);
            continuation(0);
        }
        return to;
    }

    // After the backslash. Never longer than the escape, so writing in place never passes what is still to be read.
    bool escape(char **to) {
        if (at == end) return fail("an escape is cut off");
        static constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        const char letter = *at++;
        if (letter != 'u') {
            const size_t place = letters.find(letter);
            if (place == std::string_view::npos) return fail_at("an escape is none of JSON's", at - 1);
            *(*to)++ = meanings[place];
            return true;
        }
        uint32_t code = 0;
        if (!hex4(&code)) return false;
        if (code >= 0xdc00 && code < 0xe000) return fail("half of a surrogate pair");
        if (code >= 0xd800 && code < 0xdc00) {
            uint32_t low = 0;
            if (!take_word("\\u")) return fail("half of a surrogate pair");
            if (!hex4(&low)) return false;
            if (low < 0xdc00 || low >= 0xe000) return fail("half of a surrogate pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        *to = put(*to, code);
        return true;
    }

    // Well-formed sequences of the Unicode standard, table 3-7: no overlong ones, no surrogates, nothing above U+10FFFF.
    bool multibyte(char **to) {
        const auto byte = [&](ptrdiff_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(at[i])); };
        const uint32_t lead = byte(0);
        ptrdiff_t more = 0;
        uint32_t low = 0x80, high = 0xbf;
        if (lead >= 0xc2 && lead <= 0xdf) {
            more = 1;
        } else if (lead >= 0xe0 && lead <= 0xef) {
            more = 2;
            if (lead == 0xe0) low = 0xa0;
            if (lead == 0xed) high = 0x9f;
        } else if (lead >= 0xf0 && lead <= 0xf4) {
            more = 3;
            if (lead == 0xf0) low = 0x90;
            if (lead == 0xf4) high = 0x8f;
        } else {
            return fail("a string is not UTF-8");
        }
        if (end - at <= more) return fail("a string is not UTF-8");
        for (ptrdiff_t i = 1; i <= more; ++i) {
            if (byte(i) < low || byte(i) > high) return fail("a string is not UTF-8");
            low = 0x80;
            high = 0xbf;
        }
        for (ptrdiff_t i = 0; i <= more; ++i)
            *(*to)++ = *at++;
        return true;
    }

    // After the opening quote.
    bool string(std::string_view *out) {
        char *const from = at;
        char *to = at;
        for (;;) {
            if (at == end) return fail("a string has no end");
            const unsigned char c = static_cast<unsigned char>(*at);
            if (c == '"') {
                *out = {from, static_cast<size_t>(to - from)};
                ++at;
                return true;
            }
            if (c < 0x20) return fail("a control character in a string");
            if (c == '\\') {
                ++at;
                if (!escape(&to)) return false;
            } else if (c < 0x80) {
                *to++ = *at++;
            } else if (!multibyte(&to)) {
                return false;
            }
        }
    }

    bool number(JsonNode *out) {
        const bool negative = take('-');
        const char *digits = at;
        if (!take('0') && !take_digits()) return fail("not a value");
        const char *after = at;
        out->type = JsonType::integer;
        if (take('.')) {
            out->type = JsonType::number;
            if (!take_digits()) return fail("a number has no digit after its point");
        }
        if (at != end && (*at == 'e' || *at == 'E')) {
            ++at;
            out->type = JsonType::number;
            if (!take('-')) static_cast<void>(take('+'));
            if (!take_digits()) return fail("a number has no digit in its exponent");
        }
        int64_t value = 0;
        for (const char *c = digits; out->type == JsonType::integer && c != after; ++c) {
            const int64_t digit = *c - '0';
            if (!checked_mul(value, int64_t{10}, &value) || !checked_add(value, negative ? -digit : digit, &value)) {
                out->type = JsonType::number;
            }
        }
        if (out->type == JsonType::integer) out->integer = value;
        return true;
    }

    bool names_are_unique(uint32_t object) {
        order.clear();
        for (uint32_t i = nodes[object].first; i != 0; i = nodes[i].next)
            order.push_back(i);
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return nodes[a].name < nodes[b].name; });
        for (size_t i = 1; i < order.size(); ++i) {
            if (nodes[order[i]].name == nodes[order[i - 1]].name) return fail("an object has two members of one name");
        }
        return true;
    }

    bool members(uint32_t parent, bool is_object, int depth) {
        const char close = is_object ? '}' : ']';
        uint32_t previous = 0;
        skip_space();
        if (take(close)) return true;
        for (;;) {
            std::string_view name;
            if (is_object) {
                skip_space();
                if (!take('"')) return fail("a member has no name");
                if (!string(&name)) return false;
                skip_space();
                if (!take(':')) return fail("no colon after a name");
            }
            const uint32_t child = static_cast<uint32_t>(nodes.size());
            if (!value(depth + 1)) return false;
            nodes[child].name = name;
            if (previous == 0)
                nodes[parent].first = child;
            else
                nodes[previous].next = child;
            previous = child;
            ++nodes[parent].count;
            skip_space();
            if (take(close)) return !is_object || names_are_unique(parent);
            if (!take(',')) return fail("no comma between two values");
        }
    }

    bool value(int depth) {
        skip_space();
        if (at == end) return fail("the text ends early");
        if (depth > max_depth) return fail("nested too deeply");
        const uint32_t index = static_cast<uint32_t>(nodes.size());
        nodes.push_back(JsonNode{});
        JsonNode node;
        if (*at == '{' || *at == '[') {
            const bool is_object = *at++ == '{';
            nodes[index].type = is_object ? JsonType::object : JsonType::array;
            return members(index, is_object, depth);
        }
        if (take('"')) {
            node.type = JsonType::string;
            if (!string(&node.text)) return false;
        } else if (take_word("true")) {
            node.type = JsonType::boolean;
            node.integer = 1;
        } else if (take_word("false")) {
            node.type = JsonType::boolean;
        } else if (!take_word("null") && !number(&node)) {
            return false;
        }
        nodes[index] = node;
        return true;
    }
};

const char *Json::parse(char *text, size_t size, size_t *offset) {
    nodes_.clear();
    *offset = 0;
    if (size > max_bytes) return "the text is too long";
    Reader reader{nodes_, order_, text, text, text + size};
    if (reader.value(0)) {
        reader.skip_space();
        if (reader.at == reader.end) return nullptr;
        reader.fail("more text after the value");
    }
    *offset = static_cast<size_t>(reader.problem_at - reader.begin);
    return reader.problem;
}

const JsonNode *Json::find(const JsonNode &object, std::string_view name) const noexcept {
    for (const JsonNode *member = first(object); member != nullptr; member = next(*member)) {
        if (member->name == name) return member;
    }
    return nullptr;
}

} // namespace skerry
