// Router files with bytes changed or missing: each opens or is refused with a status and a message, and nothing is left behind. The
// address sanitizer sees reads outside the bytes. For a coverage-guided run, compile with -DSKERRY_FUZZER and clang's
// -fsanitize=fuzzer; inputs that it finds are run here when they are named.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <skerry/skerry.h>
#include <vector>

#include "../support/router_bytes.hpp"

namespace {

struct Tally {
    unsigned long long inputs = 0;
    unsigned long long opened = 0;
    unsigned long long format = 0;
    unsigned long long corrupt = 0;
    unsigned long long nonfinite = 0;
};
Tally tally;

skerry_context *context() {
    static skerry_context *made = nullptr;
    if (made == nullptr && skerry_context_create(nullptr, &made, nullptr) != SKERRY_OK) std::abort();
    return made;
}

void require(bool good, const char *what) {
    if (good) return;
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

uint64_t objects() {
    skerry_context_bytes bytes{};
    require(skerry_context_get_bytes(context(), &bytes, nullptr) == SKERRY_OK, "no count of objects");
    return bytes.object_count;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint64_t before = objects();
    // A block of its own, so that the byte after the last is not the library's to read.
    const std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
    if (size != 0) std::memcpy(bytes.get(), data, size);
    skerry_router_desc desc = SKERRY_DESC(skerry_router_desc);
    desc.data = bytes.get();
    desc.bytes = size;
    skerry_error error = SKERRY_DESC(skerry_error);
    skerry_router *router = nullptr;
    const skerry_status status = skerry_router_open(context(), &desc, &router, &error);
    ++tally.inputs;
    if (status == SKERRY_OK) {
        ++tally.opened;
        skerry_router_info info = SKERRY_DESC(skerry_router_info);
        require(skerry_router_get_info(router, &info, nullptr) == SKERRY_OK, "an open router has no info");
        require(info.parameters > 0 && info.weight_bytes == 4 * info.parameters && info.weight_bytes <= 2 * size,
                "more numbers than the file holds");
        require(info.layers > 0 && info.query_heads > 0 && info.kv_heads > 0 && info.query_heads % info.kv_heads == 0 && info.key_dim > 0 &&
                    info.summary_dim > 0 && info.rank_max >= 0 && info.centroids >= 1 && info.centroids <= 4,
                "a geometry that no router has");
        require(std::memchr(info.model, 0, sizeof info.model) != nullptr, "a name without an end");
    } else {
        require(router == nullptr, "a refused file gave a router");
        require(error.status == status && error.message[0] != 0, "a refusal without a message");
        tally.format += status == SKERRY_ERROR_FORMAT;
        tally.corrupt += status == SKERRY_ERROR_CORRUPT;
        tally.nonfinite += status == SKERRY_ERROR_NONFINITE;
        require(status == SKERRY_ERROR_FORMAT || status == SKERRY_ERROR_CORRUPT || status == SKERRY_ERROR_NONFINITE,
                "a status that bad bytes do not give");
    }
    skerry_router_release(router);
    require(objects() == before, "a call left something behind");
    return 0;
}

#if !defined(SKERRY_FUZZER)

namespace {

void run(const std::vector<uint8_t> &bytes) { LLVMFuzzerTestOneInput(bytes.data(), bytes.size()); }

// Every byte changed in several ways; every length; every byte missing or doubled.
void run_changes(const std::vector<uint8_t> &whole, size_t numbers_from) {
    const unsigned long long opened = tally.opened;
    run(whole);
    require(tally.opened == opened + 1, "the seed does not open");
    for (size_t length = 0; length < whole.size(); ++length) {
        const unsigned long long before = tally.opened;
        run({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
        require(tally.opened == before, "a file that was cut off opens");
    }
    for (size_t place = 0; place < whole.size(); ++place) {
        const uint8_t old = whole[place];
        std::vector<uint8_t> values = {static_cast<uint8_t>(old ^ 1u), static_cast<uint8_t>(old ^ 0x80u), 0xff, 0};
        if (place < numbers_from) values.insert(values.end(), {'"', '{', '}', '[', ',', '9', '-', '\\', 'e', ' '});
        for (uint8_t value : values) {
            std::vector<uint8_t> changed = whole;
            changed[place] = value;
            run(changed);
        }
        std::vector<uint8_t> other = whole;
        other.erase(other.begin() + static_cast<std::ptrdiff_t>(place));
        run(other);
        other = whole;
        other.insert(other.begin() + static_cast<std::ptrdiff_t>(place), old);
        run(other);
    }
}

// Every number of a file of F32 alone as an infinity and as NaN.
void run_nonfinite(const std::vector<uint8_t> &whole, size_t numbers_from) {
    for (size_t place = numbers_from; place < whole.size(); place += 4) {
        for (uint32_t bits : {0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu}) {
            std::vector<uint8_t> changed = whole;
            for (size_t i = 0; i < 4; ++i)
                changed[place + i] = static_cast<uint8_t>(bits >> 8 * i);
            const unsigned long long before = tally.nonfinite;
            run(changed);
            require(tally.nonfinite == before + 1, "a number that is not finite was taken");
        }
    }
}

// Two changes at once, from a fixed sequence: one may undo what refuses the other.
void run_pairs(const std::vector<uint8_t> &whole, size_t header, int count) {
    uint64_t state = 88172645463325252u;
    const auto next = [&](uint64_t below) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<size_t>(state % below);
    };
    static const char digits[] = "0123456789\"[]{},:";
    for (int i = 0; i < count; ++i) {
        std::vector<uint8_t> changed = whole;
        for (int j = 0; j < 2; ++j)
            changed[8 + next(header - 8)] = static_cast<uint8_t>(digits[next(sizeof digits - 1)]);
        run(changed);
    }
}

size_t header_end(const std::vector<uint8_t> &file) { return 8 + file[0] + 256u * file[1]; }

bool run_file(const char *name) {
    std::FILE *file = std::fopen(name, "rb");
    if (file == nullptr) return false;
    std::vector<uint8_t> bytes;
    uint8_t block[4096];
    for (size_t got = 0; (got = std::fread(block, 1, sizeof block, file)) > 0;)
        bytes.insert(bytes.end(), block, block + got);
    std::fclose(file);
    run(bytes);
    return true;
}

} // namespace

int main(int argc, char **argv) {
    for (int i = 1; i < argc; ++i) {
        if (!run_file(argv[i])) {
            std::fprintf(stderr, "cannot read %s\n", argv[i]);
            return 2;
        }
    }
    if (argc > 1) return 0;
    const support::RouterSize tiny{1, 2, 1, 2, 1, 1};
    const std::vector<uint8_t> production =
        support::safetensors(support::production_tensors(tiny), support::router_settings(tiny, "production").set("step", "12").text());
    run_changes(production, header_end(production));
    run_pairs(production, header_end(production), 20000);
    run_nonfinite(production, header_end(production));
    // The paper's gate network has 64 by 64 numbers at least: its header is changed like the other's, its numbers by lengths alone.
    const std::vector<uint8_t> paper = support::safetensors(support::paper_tensors(tiny), support::router_settings(tiny, "paper").text());
    const size_t header = header_end(paper);
    run_nonfinite(paper, header);
    for (size_t place = 0; place < header; ++place) {
        for (uint8_t value : {'"', '}', ']', '9', '0'}) {
            std::vector<uint8_t> changed = paper;
            changed[place] = value;
            run(changed);
        }
    }
    for (size_t length = 0; length < paper.size(); length += length < header ? 1 : 97)
        run({paper.begin(), paper.begin() + static_cast<std::ptrdiff_t>(length)});
    std::printf("%llu inputs, %llu opened, %llu format, %llu corrupt, %llu nonfinite\n", tally.inputs, tally.opened, tally.format,
                tally.corrupt, tally.nonfinite);
    // Inputs that all fail at the same check would test nothing.
    return tally.opened > 100 && tally.format > 100 && tally.corrupt > 1000 && tally.nonfinite > 1000 ? 0 : 1;
}

#endif
