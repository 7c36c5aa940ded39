#include "base/status.hpp"

#include <cstdio>
#include <cstring>
#include <doctest/doctest.h>
#include <fstream>
#include <limits>
#include <set>
#include <string>

#include "base/checked.hpp"
#include "base/log.hpp"

using namespace skerry;

TEST_CASE("status: every enumerator of the public header has its name and a sentence of its own") {
    std::ifstream header(SKERRY_SOURCE_ROOT "/include/skerry/base.h");
    std::string line;
    std::set<std::string> texts;
    int rows = 0;
    while (std::getline(header, line)) {
        char name[64];
        int value = 0;
        if (std::sscanf(line.c_str(), " SKERRY_%40[A-Z_] = %d", name, &value) != 2) continue;
        if (std::strncmp(name, "SUBJECT_", 8) == 0) break;
        CHECK(std::string("SKERRY_") + name == status_name(value));
        const std::string text = status_text(value);
        CHECK(!text.empty());
        CHECK(text.back() != '.');
        CHECK(texts.insert(text).second);
        ++rows;
    }
    CHECK(rows >= 20);
}

TEST_CASE("status: numbers of other versions have a name too") {
    CHECK(std::string(status_name(-12345)) == "SKERRY_UNKNOWN");
    CHECK(std::string(status_text(-12345)) != status_text(12345));
}

TEST_CASE("status: fail fills every field and returns the status") {
    skerry_error error = SKERRY_DESC(skerry_error);
    const Status status = fail(&error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, 3, 100, 40,
                               "the pool needs %d bytes", 100);
    CHECK(status == SKERRY_ERROR_OVER_BUDGET);
    CHECK(error.status == SKERRY_ERROR_OVER_BUDGET);
    CHECK(error.subject == SKERRY_SUBJECT_BUDGET);
    CHECK(error.index == 3);
    CHECK(error.found == 100);
    CHECK(error.allowed == 40);
    CHECK(std::string(error.message) == "the pool needs 100 bytes");
    CHECK(fail(nullptr, SKERRY_ERROR_IO, 0, -1, 0, 0, "x") == SKERRY_ERROR_IO);
}

TEST_CASE("status: fail writes no byte beyond the caller's struct_size") {
    for (uint32_t size = 0; size <= sizeof(skerry_error); ++size) {
        skerry_error error;
        std::memset(&error, 0xa5, sizeof error);
        error.struct_size = size;
        fail(&error, SKERRY_ERROR_STATE, 1, 2, 3, 4, "%s", std::string(500, 'm').c_str());
        const auto *bytes = reinterpret_cast<const unsigned char *>(&error);
        int touched = 0;
        for (size_t i = std::max<size_t>(size, 4); i < sizeof error; ++i) touched += bytes[i] != 0xa5;
        CHECK(touched == 0);
        CHECK(error.struct_size == size);
        if (size > offsetof(skerry_error, message)) {
            CHECK(std::strlen(error.message) == size - offsetof(skerry_error, message) - 1);
        }
    }
}

TEST_CASE("status: a message stays one line and is cut between characters") {
    skerry_error error = SKERRY_DESC(skerry_error);
    std::string text = "a\nb\tc";
    while (text.size() < 300) text += "\xe2\x82\xac";
    fail(&error, SKERRY_ERROR_IO, 0, -1, 0, 0, "%s", text.c_str());
    const std::string message = error.message;
    CHECK(message.substr(0, 5) == "a b c");
    CHECK(message.size() <= 231);
    CHECK(message.size() > 227);
    CHECK((message.size() - 5) % 3 == 0);
}

namespace {
struct Lines {
    int count = 0;
    std::string last;
    std::string part;
    static void add(void *user, skerry_log_level, const char *part, const char *line) {
        auto *self = static_cast<Lines *>(user);
        ++self->count;
        self->last = line;
        self->part = part;
    }
};
} // namespace

TEST_CASE("log: the level decides, and lines are finished") {
    Lines lines;
    Log log(Lines::add, &lines, SKERRY_LOG_WARNING);
    log.write(SKERRY_LOG_INFO, "store", "not this");
    CHECK(lines.count == 0);
    log.write(SKERRY_LOG_WARNING, "store", "pages: %d\n", 7);
    CHECK(lines.count == 1);
    CHECK(lines.last == "pages: 7 ");
    CHECK(lines.part == "store");
    log.set_level(SKERRY_LOG_DEBUG);
    CHECK(log.enabled(SKERRY_LOG_DEBUG));
    log.write(SKERRY_LOG_DEBUG, "store", "%s", std::string(2000, 'x').c_str());
    CHECK(lines.last.size() == 511);
    const Log silent(nullptr, nullptr, SKERRY_LOG_DEBUG);
    CHECK(!silent.enabled(SKERRY_LOG_ERROR));
    silent.write(SKERRY_LOG_ERROR, "store", "nobody listens");
}

TEST_CASE("checked: what does not fit is refused and leaves the output alone") {
    uint64_t out = 5;
    constexpr uint64_t top = std::numeric_limits<uint64_t>::max();
    CHECK(!checked_add<uint64_t>(top, 1, &out));
    CHECK(!checked_mul<uint64_t>(top / 2, 3, &out));
    CHECK(!checked_align_up<uint64_t>(top - 3, 8, &out));
    CHECK(out == 5);
    CHECK(checked_align_up<uint64_t>(17, 8, &out));
    CHECK(out == 24);
    CHECK(checked_align_up<uint64_t>(16, 8, &out));
    CHECK(out == 16);
    int32_t narrow = 1;
    CHECK(!checked_cast(int64_t{1} << 31, &narrow));
    CHECK(!checked_cast(top, &narrow));
    CHECK(narrow == 1);
    CHECK(checked_cast(int64_t{-5}, &narrow));
    CHECK(narrow == -5);
    int64_t wide = 0;
    CHECK(!checked_add<int64_t>(std::numeric_limits<int64_t>::min(), -1, &wide));

    CHECK(CheckedSize(10).add(6).mul(5).align(32).get(&out));
    CHECK(out == 96);
    CHECK(CheckedSize().add_product(3, 7).get(&out));
    CHECK(out == 21);
    CHECK(!CheckedSize(top).add(1).get(&out));
    // A failed step is not repaired by a later one.
    CHECK(!CheckedSize(top).mul(2).mul(0).get(&out));
    CHECK(out == 21);
    CHECK(is_power_of_two(4096));
    CHECK(!is_power_of_two(0));
    CHECK(!is_power_of_two(48));
}
