// The readers of stored text and tensors: JSON of file headers, and safetensors files in memory.

#include "io/safetensors.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>

#include "../support/router_bytes.hpp"

using namespace skerry;
using support::FileTensor;

namespace {

struct Parsed {
    std::unique_ptr<char[]> text; // exactly as long as the text, so that a read past its end is seen
    Json json;
    std::string problem;
    size_t offset = 0;

    Parsed(Allocator &allocator, std::string_view given) : text(new char[given.size()]), json(allocator) {
        if (!given.empty()) std::memcpy(text.get(), given.data(), given.size());
        const char *said = json.parse(text.get(), given.size(), &offset);
        problem = said != nullptr ? said : "";
    }
};

std::string text_of(std::string_view json) {
    Allocator allocator;
    const Parsed parsed(allocator, json);
    REQUIRE_MESSAGE(parsed.problem == "", json);
    REQUIRE(parsed.json.root().type == JsonType::string);
    return std::string(parsed.json.root().text);
}

struct Refusal {
    const char *text;
    size_t offset;
    const char *said;
};

struct Opened {
    Allocator allocator;
    std::vector<uint8_t> bytes;
    ByteSource source;
    SafetensorsFile file;
    skerry_error error{};
    Status status;

    explicit Opened(const std::vector<uint8_t> &given) : bytes(given), source(bytes.data(), bytes.size()), file(allocator, source) {
        error.struct_size = sizeof error;
        status = file.open(&error);
    }
    bool says(Status wanted, const char *part) const {
        INFO("said: ", std::string(error.message));
        CHECK(status == wanted);
        CHECK(std::strstr(error.message, part) != nullptr);
        return status == wanted && std::strstr(error.message, part) != nullptr;
    }
};

std::string entry(const char *name, const char *dtype, const char *shape, const char *offsets) {
    return std::string("\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

} // namespace

TEST_CASE("json: values of every kind, with their place in the tree") {
    Allocator allocator;
    const Parsed parsed(allocator, " {\"a\" : [1, -20 ,3.5,1e3, true,false,null,\"s\"],\r\n\t\"\":{}, \"b\":[]} ");
    REQUIRE(parsed.problem == "");
    const Json &json = parsed.json;
    REQUIRE(json.root().type == JsonType::object);
    CHECK(json.root().count == 3);
    const JsonNode *list = json.find(json.root(), "a");
    REQUIRE(list != nullptr);
    REQUIRE(list->type == JsonType::array);
    CHECK(list->count == 8);
    const JsonType types[] = {JsonType::integer, JsonType::integer, JsonType::number, JsonType::number,
                              JsonType::boolean, JsonType::boolean, JsonType::null,   JsonType::string};
    const int64_t integers[] = {1, -20, 0, 0, 1, 0, 0, 0};
    size_t i = 0;
    for (const JsonNode *node = json.first(*list); node != nullptr; node = json.next(*node), ++i) {
        CHECK(node->type == types[i]);
        CHECK(node->integer == integers[i]);
    }
    CHECK(i == 8);
    REQUIRE(json.find(json.root(), "") != nullptr);
    CHECK(json.find(json.root(), "")->type == JsonType::object);
    CHECK(json.first(*json.find(json.root(), "")) == nullptr);
    CHECK(json.find(json.root(), "c") == nullptr);
    CHECK(json.find(*list, "s") == nullptr);
}

TEST_CASE("json: integers to the ends of 64 bits; beyond them a number without a value") {
    Allocator allocator;
    CHECK(Parsed(allocator, "9223372036854775807").json.root().integer == INT64_MAX);
    CHECK(Parsed(allocator, "-9223372036854775808").json.root().integer == INT64_MIN);
    CHECK(Parsed(allocator, "-0").json.root().type == JsonType::integer);
    for (const char *text : {"9223372036854775808", "-9223372036854775809", "18446744073709551616", "1.0", "1e0", "1E+2", "0e-1"}) {
        const Parsed parsed(allocator, text);
        CHECK(parsed.problem == "");
        CHECK(parsed.json.root().type == JsonType::number);
        CHECK(parsed.json.root().integer == 0);
    }
}

TEST_CASE("json: strings are decoded in place") {
    CHECK(text_of("\"\"") == "");
    CHECK(text_of("\"a\\\"\\\\\\/\\b\\f\\n\\r\\tz\"") == "a\"\\/\b\f\n\r\tz");
    CHECK(text_of("\"\\u0041\\u00e9\\u20AC\\ud83d\\ude00\"") == "A\u00e9\u20ac\U0001f600");
    CHECK(text_of("\"\\u0000x\"") == std::string("\0x", 2));
    CHECK(text_of("\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\x7f\"") ==
          "\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\x7f");
}

TEST_CASE("json: what is not JSON is refused where it goes wrong") {
    Allocator allocator;
    const Refusal refusals[] = {
        {"", 0, "ends early"},
        {"  ", 2, "ends early"},
        {"{\"a\":", 5, "ends early"},
        {"[1,", 3, "ends early"},
        {"[1,]", 3, "not a value"},
        {"[1 2]", 3, "no comma"},
        {"[1", 2, "no comma"},
        {"{\"a\" 1}", 5, "no colon"},
        {"{a:1}", 1, "no name"},
        {"{\"a\":1,}", 7, "no name"},
        {"{,}", 1, "no name"},
        {"1 1", 2, "more text"},
        {"{}x", 2, "more text"},
        {"tru", 0, "not a value"},
        {"True", 0, "not a value"},
        {"NaN", 0, "not a value"},
        {"+1", 0, "not a value"},
        {".5", 0, "not a value"},
        {"-", 1, "not a value"},
        {"01", 1, "more text"},
        {"1.", 2, "point"},
        {"1.e3", 2, "point"},
        {"1e", 2, "exponent"},
        {"1e+", 3, "exponent"},
        {"'a'", 0, "not a value"},
        {"/* */1", 0, "not a value"},
        {"\"abc", 4, "no end"},
        {"\"a\n\"", 2, "control"},
        {"\"\\x\"", 2, "none of JSON's"},
        {"\"\\", 2, "cut off"},
        {"\"\\u12\"", 3, "cut off"},
        {"\"\\u12g4\"", 5, "hexadecimal"},
        {"\"\\ud800\"", 7, "surrogate"},
        {"\"\\ud800\\u0041\"", 13, "surrogate"},
        {"\"\\udc00\"", 7, "surrogate"},
        {"\"\x80\"", 1, "UTF-8"},
        {"\"\xc1\xbf\"", 1, "UTF-8"},
        {"\"\xc3\"", 1, "UTF-8"},
        {"\"\xe0\x9f\xbf\"", 1, "UTF-8"},
        {"\"\xed\xa0\x80\"", 1, "UTF-8"},
        {"\"\xf0\x8f\xbf\xbf\"", 1, "UTF-8"},
        {"\"\xf4\x90\x80\x80\"", 1, "UTF-8"},
        {"\"\xf5\x80\x80\x80\"", 1, "UTF-8"},
        {"\"\xe2\x82", 1, "UTF-8"},
        {"{\"a\":1,\"b\":2,\"a\":3}", 19, "one name"},
        {"{\"a\":1,\"\\u0061\":3}", 18, "one name"},
        {"[{\"\":1,\"\":1}]", 12, "one name"},
    };
    for (const Refusal &refusal : refusals) {
        CAPTURE(std::string(refusal.text));
        const Parsed parsed(allocator, refusal.text);
        CHECK_MESSAGE(parsed.problem.find(refusal.said) != std::string::npos, parsed.problem);
        CHECK(parsed.offset == refusal.offset);
    }
}

TEST_CASE("json: depth is bounded, width is not") {
    Allocator allocator;
    const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
    CHECK(Parsed(allocator, nested(Json::max_depth + 1)).problem == "");
    CHECK(Parsed(allocator, nested(Json::max_depth + 2)).problem == "nested too deeply");
    CHECK(Parsed(allocator, std::string(1000000, '[')).problem == "nested too deeply");
    std::string wide = "{";
    for (int i = 0; i < 5000; ++i)
        wide += "\"n" + std::to_string(i * 7919 % 5000) + "\":" + std::to_string(i) + ",";
    CHECK(Parsed(allocator, wide + "\"end\":0}").json.root().count == 5001);
    CHECK(Parsed(allocator, wide + "\"n17\":0}").problem == "an object has two members of one name");
}

TEST_CASE("json: a truncated text is refused at every length, and nothing leaks") {
    Allocator allocator;
    const std::string whole = "{\"a\":[1,2.5e-3,{\"b\":\"\\ud83d\\ude00\xc3\xa9\"}],\"c\":null,\"d\":true}";
    CHECK(Parsed(allocator, whole).problem == "");
    for (size_t length = 0; length < whole.size(); ++length) {
        const Parsed parsed(allocator, std::string_view(whole).substr(0, length));
        CHECK(parsed.problem != "");
        CHECK(parsed.offset <= length);
    }
    CHECK(allocator.live_bytes() == 0);
}

TEST_CASE("safetensors: tensors, shapes, metadata and numbers") {
    std::vector<FileTensor> tensors = {support::file_tensor("a", {2, 3}),
                                       {"b", "F16", {4}, {}, {0x3c00, 0xc000, 0x0001, 0x7bff}},
                                       {"c", "BF16", {2, 1, 1}, {}, {0x3f80, 0xc2f7}},
                                       {"d", "I8", {2}, {}, {0x1234}},
                                       {"e", "F32", {}, {7.5f}, {}},
                                       {"none", "F32", {0, 4}, {}, {}}};
    Opened opened(support::safetensors(tensors, "{}"));
    REQUIRE_MESSAGE(opened.status == SKERRY_OK, std::string(opened.error.message));
    CHECK(opened.file.find("f") == nullptr);
    const TensorEntry *a = opened.file.find("a");
    REQUIRE(a != nullptr);
    CHECK(a->rank == 2);
    CHECK(a->shape[0] == 2);
    CHECK(a->shape[1] == 3);
    const auto numbers = [&](const char *name, size_t count) {
        std::vector<float> out(count);
        CHECK(opened.file.read(*opened.file.find(name), out.data(), &opened.error) == SKERRY_OK);
        return out;
    };
    CHECK(numbers("a", 6) == tensors[0].values);
    CHECK(numbers("b", 4) == std::vector<float>{1, -2, std::ldexp(1.0f, -24), 65504});
    CHECK(numbers("c", 2) == std::vector<float>{1, -123.5f});
    CHECK(opened.file.find("d")->type == TensorType::other);
    CHECK(opened.file.find("d")->type_name == "I8");
    CHECK(opened.file.find("e")->rank == 0);
    CHECK(numbers("e", 1) == std::vector<float>{7.5f});
    CHECK(opened.file.find("none")->begin == opened.file.find("none")->end);
    const std::span<char> text = opened.file.metadata("skerry.router");
    CHECK(std::string(text.data(), text.size()) == "{}");
    CHECK(opened.file.metadata("other").data() == nullptr);
}

TEST_CASE("safetensors: long tensors are read across blocks, of every type") {
    std::vector<float> values(5003);
    std::vector<uint16_t> halves(5003);
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i) * 0.25f;
        halves[i] = static_cast<uint16_t>(i); // below the infinities of both types
    }
    Opened opened(support::safetensors({{"x", "F32", {5003}, values, {}}, {"y", "BF16", {5003}, {}, halves}}));
    REQUIRE(opened.status == SKERRY_OK);
    std::vector<float> out(5003);
    REQUIRE(opened.file.read(*opened.file.find("x"), out.data(), nullptr) == SKERRY_OK);
    CHECK(out == values);
    REQUIRE(opened.file.read(*opened.file.find("y"), out.data(), nullptr) == SKERRY_OK);
    for (size_t i = 0; i < out.size(); ++i) {
        const uint32_t bits = static_cast<uint32_t>(i) << 16;
        REQUIRE(std::memcmp(&out[i], &bits, 4) == 0);
    }
}

TEST_CASE("safetensors: numbers that are not finite are named with their place") {
    for (size_t place : {size_t{0}, size_t{1023}, size_t{1024}, size_t{4999}}) {
        for (float bad : {NAN, INFINITY, -INFINITY}) {
            std::vector<float> values(5000, 1.0f);
            values[place] = bad;
            Opened opened(support::safetensors({{"first", "F32", {1}, {1}, {}}, {"x", "F32", {5000}, values, {}}}));
            REQUIRE(opened.status == SKERRY_OK);
            std::vector<float> out(5000);
            CHECK(opened.file.read(*opened.file.find("x"), out.data(), &opened.error) == SKERRY_ERROR_NONFINITE);
            CHECK(opened.error.found == static_cast<int64_t>(place));
            CHECK(std::strstr(opened.error.message, "'x'") != nullptr);
        }
    }
    for (uint16_t bad : {uint16_t{0x7c00}, uint16_t{0xfc01}}) {
        Opened opened(support::safetensors({{"h", "F16", {2}, {}, {0x3c00, bad}}}));
        float out[2];
        CHECK(opened.file.read(*opened.file.find("h"), out, &opened.error) == SKERRY_ERROR_NONFINITE);
        CHECK(opened.error.found == 1);
    }
    Opened opened(support::safetensors({{"h", "BF16", {1}, {}, {0x7f80}}}));
    float out = 0;
    CHECK(opened.file.read(*opened.file.find("h"), &out, &opened.error) == SKERRY_ERROR_NONFINITE);
}

TEST_CASE("safetensors: files that are cut off or lie about their length") {
    const std::vector<uint8_t> whole = support::safetensors({support::file_tensor("a", {2, 3}), support::file_tensor("b", {5})}, "{}");
    REQUIRE(Opened(whole).status == SKERRY_OK);
    for (size_t length = 0; length < whole.size(); ++length) {
        const Opened opened(std::vector<uint8_t>(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)));
        CHECK(opened.status == SKERRY_ERROR_CORRUPT);
        CHECK(opened.error.message[0] != 0);
    }
    std::vector<uint8_t> longer = whole;
    longer.push_back(0);
    CHECK(Opened(longer).says(SKERRY_ERROR_CORRUPT, "1 bytes after the last tensor"));
    std::vector<uint8_t> huge = whole;
    huge[7] = 0x7f;
    CHECK(Opened(huge).says(SKERRY_ERROR_CORRUPT, "a header of"));
    // The bound on headers holds where the file is long enough, too.
    std::string header = "{}";
    header.resize(SafetensorsFile::max_header_bytes, ' ');
    CHECK(Opened(support::with_length(header)).status == SKERRY_OK);
    header.push_back(' ');
    CHECK(Opened(support::with_length(header)).says(SKERRY_ERROR_CORRUPT, "a header of"));
    CHECK(Opened(support::with_length("")).says(SKERRY_ERROR_CORRUPT, "no object"));
    CHECK(Opened(support::with_length(" {}")).says(SKERRY_ERROR_CORRUPT, "no object"));
    CHECK(Opened(support::with_length("[]")).says(SKERRY_ERROR_CORRUPT, "no object"));
    const Opened bad(support::with_length("{\"a\":}"));
    CHECK(bad.says(SKERRY_ERROR_CORRUPT, "byte 13"));
    CHECK(bad.error.found == 13);
}

TEST_CASE("safetensors: tensors that do not tile the data, or are no tensors") {
    struct Case {
        std::string entries;
        size_t data;
        const char *said;
    };
    const std::string a = entry("a", "F32", "[2]", "[0,8]");
    const Case cases[] = {
        {a + "," + entry("b", "F32", "[2]", "[4,12]"), 12, "'b' overlaps another"},
        {a + "," + entry("b", "F32", "[2]", "[0,8]"), 8, "overlaps another"},
        {a + "," + entry("b", "F32", "[2]", "[12,20]"), 20, "a gap before tensor 'b'"},
        {entry("b", "F32", "[2]", "[4,12]"), 12, "a gap before tensor 'b'"},
        {a, 9, "1 bytes after"},
        {a + "," + entry("b", "F32", "[2]", "[8,16]"), 15, "'b' ends at byte 16"},
        {entry("b", "F32", "[2]", "[8,0]"), 8, "'b' ends at byte 0"},
        {entry("b", "F32", "[2]", "[-1,7]"), 8, "'b' has an offset"},
        {entry("b", "F32", "[2]", "[0,8.0]"), 8, "'b' has an offset"},
        {entry("b", "F32", "[2]", "[0,9223372036854775807]"), 8, "'b' ends at"},
        {entry("b", "F32", "[2]", "[0,18446744073709551608]"), 8, "'b' has an offset"},
        {entry("b", "F32", "[2]", "[0,8,8]"), 8, "'b' needs"},
        {entry("b", "F32", "[2]", "[8]"), 8, "'b' needs"},
        {entry("b", "F32", "[3]", "[0,8]"), 8, "'b' has 8 bytes; its shape takes 12"},
        {entry("b", "F16", "[3]", "[0,8]"), 8, "'b' has 8 bytes; its shape takes 6"},
        {entry("b", "F32", "[-2]", "[0,8]"), 8, "'b' has a dimension"},
        {entry("b", "F32", "[\"2\"]", "[0,8]"), 8, "'b' has a dimension"},
        {entry("b", "F32", "[4294967296,4294967296,4294967296]", "[0,8]"), 8, "'b' has a dimension"},
        {entry("b", "F32", "2", "[0,8]"), 8, "'b' needs"},
        {"\"b\":[]", 0, "'b' in the header is no object"},
        {"\"b\":{\"dtype\":\"F32\",\"shape\":[0]}", 0, "'b' needs"},
        {"\"b\":{\"dtype\":3,\"shape\":[0],\"data_offsets\":[0,0]}", 0, "'b' needs"},
        {"\"b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":1}", 0, "'b' needs"},
        {"\"__metadata__\":{\"a\":1}", 0, "__metadata__"},
        {"\"__metadata__\":\"a\"", 0, "'__metadata__' in the header is no object"},
        {a + "," + a, 8, "two members of one name"},
    };
    for (const Case &one : cases) {
        CAPTURE(one.entries);
        const Opened opened(support::with_length("{" + one.entries + "}", std::vector<uint8_t>(one.data)));
        CHECK(opened.says(SKERRY_ERROR_CORRUPT, one.said));
        CHECK(opened.error.subject == SKERRY_SUBJECT_ARGUMENT);
    }
    // Any order in the header, empty tensors between others, types that only other programs know, many dimensions.
    const std::string good = entry("b", "F32", "[1]", "[8,12]") + "," + entry("z", "F32", "[0]", "[8,8]") + "," +
                             entry("y", "F8_E4M3", "[3]", "[12,15]") + "," + entry("w", "F32", "[1,1,1,1,1,1,1,1,1,1]", "[15,19]") + "," +
                             a;
    CHECK(Opened(support::with_length("{" + good + "}", std::vector<uint8_t>(19))).status == SKERRY_OK);
}

TEST_CASE("safetensors: a name from a file is shown in part and on one line") {
    const std::string name = "a\\n" + std::string(300, 'b');
    const Opened opened(support::with_length("{\"" + name + "\":1}"));
    CHECK(opened.says(SKERRY_ERROR_CORRUPT, "'a b"));
    CHECK(std::strlen(opened.error.message) < 140);
    // 31 characters of two bytes and one of three: the cut falls between characters.
    std::string wide;
    for (int i = 0; i < 31; ++i)
        wide += "\u00e9";
    CHECK(shown(wide + "\u20ac").size == 62);
    CHECK(shown("abc").size == 3);
}
