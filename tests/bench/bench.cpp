// SPDX-License-Identifier: MIT

// Measures the library through its public interface: one JSON object per line on stdout, the machine first and then rows with stable
// names. tests/bench/run builds it, calls it and prints its rows as a table.
//
//   bench [--quick | --smoke] [--only PREFIX] [--tokens N] [--rounds N]
//
// Every time is compared with another one of the same round, taken a moment before or after, and the median over rounds is reported.
// Between two measurements the read probe streams 160 MB, so no cache is warm when its turn comes. A sample during which a thread of
// this process waited for a processor is left out. Where fewer than five remain, on a machine that others keep busy, the figure is the
// time that the threads ran over their number, the serial part counted once: what it would have taken undisturbed, but for what two
// threads lose by sharing the memory.

#include <skerry/skerry.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <time.h>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <dirent.h>
#include <sys/mman.h>
#endif

namespace {

// One layer of Llama-3 8B.
constexpr int32_t kv_heads = 8, query_heads = 32, dim = 128;
constexpr int64_t token_bytes_f16 = int64_t{kv_heads} * dim * 2 * 2;
constexpr int32_t threads = 2;
constexpr size_t huge_page = size_t{2} << 20;

struct Options {
    int32_t tokens = 32768, rounds = 64, append_tokens = 512, event_count = 24, random_steps = 10000, error_tokens = 2048;
    int32_t rest_us = 3000;     // before a sample of milliseconds: who has slept may run for as long undisturbed
    double attend_seconds = 60; // after which no further round begins
    size_t probe_bytes = size_t{160} << 20;
    std::string only;
};
Options options;

[[noreturn]] void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "bench: ");
    std::vfprintf(stderr, format, arguments);
    std::fprintf(stderr, "\n");
    va_end(arguments);
    std::exit(1);
}

template <class T>
T make() {
    T made{};
    made.struct_size = static_cast<uint32_t>(sizeof(T));
    return made;
}

skerry_error error = make<skerry_error>();
void check(skerry_status status, const char *what) {
    if (status < 0) die("%s: %s: %s", what, skerry_status_name(status), error.message);
}

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
    uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        uint64_t x = state_;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
    int32_t below(int32_t n) { return static_cast<int32_t>(next() % static_cast<uint64_t>(n)); }
    // Mean 0, variance 1; the sum of three uniform numbers.
    float normal() {
        const uint64_t x = next();
        const auto part = [&](int shift) { return static_cast<float>(x >> shift & 0x1fffff) * (1.0f / 2097152.0f); };
        return 2.0f * (part(0) + part(21) + part(42) - 1.5f);
    }

private:
    uint64_t state_;
};

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> x) {
    if (x.empty()) return NAN;
    std::sort(x.begin(), x.end());
    return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

// ---- samples ----

// What the threads of this process have spent so far running, and waiting for a processor; 0 where the system does not say.
struct Spent {
    uint64_t ran_ns = 0, waited_ns = 0;
};

Spent spent() {
    Spent sum;
#if defined(__linux__)
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == nullptr) return sum;
    while (const dirent *entry = readdir(tasks)) {
        if (entry->d_name[0] == '.') continue;
        const std::string path = std::string("/proc/self/task/") + entry->d_name + "/schedstat";
        std::FILE *file = std::fopen(path.c_str(), "r");
        if (file == nullptr) continue;
        unsigned long long ran = 0, waited = 0;
        if (std::fscanf(file, "%llu %llu", &ran, &waited) == 2) {
            sum.ran_ns += ran;
            sum.waited_ns += waited;
        }
        std::fclose(file);
    }
    closedir(tasks);
#endif
    return sum;
}

struct Sample {
    double seconds = 0;
    double busy = 0;   // time that the threads ran, over their number: what is left to look at on a machine that others use too
    bool clean = true; // nobody else ran where this process wanted to
};

int64_t sample_count = 0, clean_count = 0;

void rest(int32_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// Seconds that the calling thread has run; 0 where the system does not say.
double thread_seconds() {
    timespec now{};
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0) return 0;
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Work that keeps `busy` threads running.
template <class Work>
Sample measure(int32_t busy, Work &&work) {
    // A thread that runs, or waits to run, is accounted for when it stops, which workers do after some 50 microseconds.
    const int32_t settle_us = busy > 1 ? 300 : 0;
    if (settle_us != 0) rest(settle_us);
    const Spent before = spent();
    const double thread_start = thread_seconds(), start = seconds_now();
    work();
    Sample sample;
    sample.seconds = seconds_now() - start;
    const double thread_ran = thread_seconds() - thread_start;
    if (settle_us != 0) rest(settle_us);
    const Spent after = spent();
    const auto waited = static_cast<double>(after.waited_ns - before.waited_ns);
    const auto ran = busy > 1 ? static_cast<double>(after.ran_ns - before.ran_ns) : 1e9 * thread_ran;
    sample.busy = after.ran_ns == 0 ? sample.seconds : ran / 1e9 / busy;
    sample.clean = after.ran_ns == 0 || (waited < 0.02e9 * sample.seconds && (busy == 1 || ran > 0.85e9 * busy * sample.seconds));
    ++sample_count;
    clean_count += sample.clean;
    return sample;
}

// Figures of rounds. The undisturbed ones count, unless they are too few: then the time that the threads ran, in all of them.
class Series {
public:
    void add(double value, double busy, bool clean) {
        if (clean) clean_.push_back(value);
        busy_.push_back(busy);
    }
    void add(const Sample &sample, double scale = 1) { add(scale * sample.seconds, scale * sample.busy, sample.clean); }
    int64_t clean() const { return static_cast<int64_t>(clean_.size()); }
    double value() const { return median(clean_.size() >= 5 ? clean_ : busy_); }

private:
    std::vector<double> clean_, busy_;
};

// ---- rows ----

enum class Gate { none, at_least, at_most };

struct Row {
    const char *name;
    double value;
    const char *unit;
    double ratio = NAN; // value over that of `of`; NAN: none, and the gate is on the value
    const char *of = nullptr;
    Gate gate = Gate::none;
    double bound = 0;
    int64_t samples = -1; // undisturbed rounds behind a figure of time
};

void print_number(double x) {
    if (std::isfinite(x))
        std::printf("%.6g", x);
    else
        std::printf("null");
}

void print_row(const Row &row) {
    std::printf("{\"name\": \"%s\", \"value\": ", row.name);
    print_number(row.value);
    std::printf(", \"unit\": \"%s\", \"ratio\": ", row.unit);
    print_number(row.ratio);
    if (row.of != nullptr)
        std::printf(", \"of\": \"%s\"", row.of);
    else
        std::printf(", \"of\": null");
    if (row.samples >= 0)
        std::printf(", \"samples\": %lld", static_cast<long long>(row.samples));
    else
        std::printf(", \"samples\": null");
    const double gated = row.of != nullptr ? row.ratio : row.value;
    if (row.gate == Gate::none) {
        std::printf(", \"gate\": null, \"ok\": null}\n");
    } else {
        const bool ok = row.gate == Gate::at_least ? gated >= row.bound : gated <= row.bound; // false for NaN
        std::printf(", \"gate\": \"%s %g\", \"ok\": %s}\n", row.gate == Gate::at_least ? ">=" : "<=", row.bound, ok ? "true" : "false");
    }
    std::fflush(stdout);
}

bool wanted(const char *section) { return options.only.empty() || std::strncmp(section, options.only.c_str(), options.only.size()) == 0; }

// ---- read probe ----

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#endif
uint64_t
sum_words(const uint64_t *words, size_t n) {
    uint64_t sum[32] = {};
    for (size_t i = 0; i + 32 <= n; i += 32) {
        for (size_t j = 0; j < 32; ++j)
            sum[j] += words[i + j];
    }
    uint64_t total = 0;
    for (const uint64_t x : sum)
        total += x;
    return total;
}

// Reads more than a last-level cache holds with as many threads as the caches under test use, from huge pages: the most that any code
// could read in the same moment. The helper sleeps in between, as the library's worker does.
class Probe {
public:
    Probe() : bytes_(options.probe_bytes) {
        words_ = static_cast<uint64_t *>(std::aligned_alloc(huge_page, bytes_));
        if (words_ == nullptr) die("%zu bytes for the read probe: out of memory", bytes_);
#if defined(__linux__)
        madvise(words_, bytes_, MADV_HUGEPAGE);
#endif
        std::memset(words_, 1, bytes_);
        for (int32_t i = 1; i < threads; ++i)
            helpers_.emplace_back([this] { serve(); });
    }
    ~Probe() {
        stopping_ = true;
        wake();
        for (std::thread &helper : helpers_)
            helper.join();
        std::free(words_);
    }
    Probe(const Probe &) = delete;
    Probe &operator=(const Probe &) = delete;

    double bytes() const { return static_cast<double>(bytes_); }
    Sample run() {
        return measure(threads, [&] {
            next_ = 0;
            running_ = threads - 1;
            wake();
            drain();
            for (int32_t left = running_; left != 0; left = running_)
                running_.wait(left);
        });
    }

private:
    void wake() {
        ++round_;
        round_.notify_all();
    }
    void serve() {
        for (uint32_t seen = 0;;) {
            round_.wait(seen);
            seen = round_;
            if (stopping_) return;
            drain();
            --running_;
            running_.notify_all();
        }
    }
    void drain() {
        constexpr size_t piece = size_t{1} << 20;
        uint64_t sum = 0;
        for (;;) {
            const size_t i = next_++;
            if (i >= bytes_ / piece) break;
            sum += sum_words(words_ + i * (piece / 8), piece / 8);
        }
        sink_ += sum;
    }

    size_t bytes_;
    uint64_t *words_ = nullptr;
    std::vector<std::thread> helpers_;
    std::atomic<bool> stopping_{false};
    std::atomic<uint32_t> round_{0};
    std::atomic<int32_t> running_{0};
    std::atomic<size_t> next_{0};
    std::atomic<uint64_t> sink_{0};
};

// ---- the library ----

skerry_tensor tensor_of(float *data, int64_t rows, int64_t heads, int64_t channels) {
    skerry_tensor t{};
    t.data = data;
    t.dtype = SKERRY_DTYPE_F32;
    t.rank = 3;
    t.shape[0] = rows;
    t.shape[1] = heads;
    t.shape[2] = channels;
    t.stride[0] = heads * channels;
    t.stride[1] = channels;
    t.stride[2] = 1;
    return t;
}

// Counts what is held.
struct Host {
    std::atomic<int64_t> live{0};
    static void *alloc(void *user, size_t size, size_t alignment) {
        void *memory = nullptr;
        if (posix_memalign(&memory, std::max(alignment, sizeof(void *)), size) != 0) return nullptr;
        static_cast<Host *>(user)->live += static_cast<int64_t>(size);
        return memory;
    }
    static void release(void *user, void *memory, size_t size, size_t) {
        static_cast<Host *>(user)->live -= static_cast<int64_t>(size);
        std::free(memory);
    }
};

// Runs the library's parallel loops on the calling thread and counts the time in them: the rest of a call is serial.
struct Loops {
    double seconds = 0;
    static int32_t run(void *user, skerry_task_fn task_fn, void *task, int32_t count) {
        const double start = thread_seconds();
        for (int32_t i = 0; i < count; ++i)
            task_fn(task, i);
        static_cast<Loops *>(user)->seconds += thread_seconds() - start;
        return 0;
    }
};

struct Context {
    Host host;
    skerry_context *handle = nullptr;
    explicit Context(int32_t workers, bool counts_bytes = false, Loops *loops = nullptr) {
        skerry_context_desc desc = make<skerry_context_desc>();
        if (counts_bytes) desc.allocator = {&host, Host::alloc, Host::release};
        if (loops != nullptr) {
            desc.parallel_for = Loops::run;
            desc.parallel_user = loops;
        }
        desc.worker_count = static_cast<uint32_t>(workers);
        check(skerry_context_create(&desc, &handle, &error), "context");
    }
    ~Context() { skerry_context_release(handle); }
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;
};

struct Geometry {
    int32_t layers = 1, heads = kv_heads, queries = query_heads, channels = dim;
};

// Rows to append: channels with means of their own, every 16th of them large, as the keys of language models have. Rows repeat from
// step to step, since making new ones would take longer than what is measured.
class Numbers {
public:
    explicit Numbers(const Geometry &g, int32_t rows = 4096) : rows_(rows) {
        Random random(11);
        const auto width = static_cast<size_t>(g.heads * g.channels);
        std::vector<float> mean(width), size(width);
        float square = 0; // of a key's row without its mean
        for (size_t c = 0; c < width; ++c) {
            mean[c] = random.normal();
            size[c] = c % 16 == 3 ? 3.0f : 0.7f;
            square += size[c] * size[c] / static_cast<float>(g.heads);
        }
        keys.resize(width * static_cast<size_t>(rows));
        values.resize(keys.size());
        for (size_t i = 0; i < keys.size(); ++i)
            keys[i] = mean[i % width] + size[i % width] * random.normal();
        for (float &x : values)
            x = random.normal();
        queries.resize(static_cast<size_t>(g.queries * g.channels) * 64);
        // Logits with a standard deviation of 2.
        const float reach = 2.0f * std::sqrt(static_cast<float>(g.channels)) / std::sqrt(square);
        for (float &x : queries)
            x = reach * random.normal();
    }
    float *key_rows(int32_t row, int32_t width) { return keys.data() + static_cast<ptrdiff_t>(row) * width; }
    float *value_rows(int32_t row, int32_t width) { return values.data() + static_cast<ptrdiff_t>(row) * width; }
    int32_t rows() const { return rows_; }

    std::vector<float> keys, values, queries;

private:
    int32_t rows_;
};

struct CacheSpec {
    Geometry geometry;
    skerry_policy_desc policy = make<skerry_policy_desc>();
    skerry_budget_desc budget = make<skerry_budget_desc>();
    int32_t max_step_tokens = 256, staging_tokens = 0, max_sequences = 1;
    const skerry_rotary_desc *rotary = nullptr;
    const skerry_callbacks_desc *callbacks = nullptr;
};

class Cache {
public:
    Cache(const Context &context, const CacheSpec &spec, Numbers &numbers)
        : spec_(spec), numbers_(numbers), out_(static_cast<size_t>(spec.geometry.queries * spec.geometry.channels) * 64) {
        skerry_layer_desc layer = make<skerry_layer_desc>();
        layer.kv_heads = spec.geometry.heads;
        layer.query_heads = spec.geometry.queries;
        layer.key_dim = spec.geometry.channels;
        layer.rotary = spec.rotary;
        const std::vector<const skerry_layer_desc *> layers(static_cast<size_t>(spec.geometry.layers), &layer);
        skerry_cache_desc desc = make<skerry_cache_desc>();
        desc.layers = layers.data();
        desc.layer_count = spec.geometry.layers;
        desc.policy = &spec.policy;
        desc.budget = &spec.budget;
        desc.callbacks = spec.callbacks;
        desc.max_step_tokens = spec.max_step_tokens;
        desc.staging_tokens = spec.staging_tokens;
        desc.max_sequences = spec.max_sequences;
        check(skerry_cache_create(context.handle, &desc, &handle, &error), "cache");
        check(skerry_seq_create(handle, &seq, &error), "sequence");
    }
    ~Cache() { skerry_cache_release(handle); }
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;

    void begin(int32_t count, uint32_t flags = 0) {
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.seqs = &seq;
        desc.token_counts = &count;
        desc.seq_count = 1;
        desc.flags = flags;
        check(skerry_step_begin(handle, &desc, &step, &error), "begin");
        count_ = count;
        row_ = random_.below(numbers_.rows() - count - spec_.geometry.layers + 1);
    }
    void append(int32_t layer) {
        const Geometry &g = spec_.geometry;
        const skerry_tensor keys = tensor_of(numbers_.key_rows(row_ + layer, g.heads * g.channels), count_, g.heads, g.channels);
        const skerry_tensor values = tensor_of(numbers_.value_rows(row_ + layer, g.heads * g.channels), count_, g.heads, g.channels);
        check(skerry_step_append(step, layer, &keys, &values, nullptr, &error), "append");
    }
    void attend(int32_t layer, uint32_t tiers, uint32_t flags) {
        const Geometry &g = spec_.geometry;
        const skerry_tensor queries = tensor_of(numbers_.queries.data(), count_, g.queries, g.channels);
        const skerry_tensor out = tensor_of(out_.data(), count_, g.queries, g.channels);
        skerry_attend_desc desc = make<skerry_attend_desc>();
        desc.flags = flags;
        desc.queries = &queries;
        desc.out = &out;
        desc.layer = layer;
        desc.tiers = tiers;
        check(skerry_step_attend(step, &desc, &error), "attend");
    }
    void commit() { check(skerry_step_commit(step, &error), "commit"); }

    // A prompt without attention but for its last 32 tokens, whose masses are the scores: enough for the default rule.
    void read_prompt(int64_t tokens) {
        constexpr int32_t scored = 32;
        int64_t done = 0;
        const uint32_t more = spec_.policy.prefill == SKERRY_PREFILL_WHOLE ? uint32_t{SKERRY_STEP_PREFILL} : 0;
        while (done < tokens) {
            const bool last = tokens - done <= scored;
            const int64_t left = last ? tokens - done : tokens - scored - done;
            const auto count = static_cast<int32_t>(std::min<int64_t>(left, spec_.max_step_tokens));
            begin(count, last ? 0 : more);
            for (int32_t layer = 0; layer < spec_.geometry.layers; ++layer) {
                append(layer);
                if (last) attend(layer, 0, 0);
            }
            commit();
            done += count;
        }
    }
    const float *out() const { return out_.data(); }
    const skerry_seq_info info() const {
        skerry_seq_info got = make<skerry_seq_info>();
        check(skerry_seq_get_info(handle, seq, &got, &error), "info");
        return got;
    }
    skerry_counters counters() const {
        skerry_counters got = make<skerry_counters>();
        check(skerry_cache_get_counters(handle, &got, &error), "counters");
        return got;
    }
    skerry_memory_info memory() const {
        skerry_memory_info got = make<skerry_memory_info>();
        check(skerry_cache_get_memory(handle, &got, &error), "memory");
        return got;
    }

    skerry_cache *handle = nullptr;
    skerry_step *step = nullptr;
    skerry_seq seq{};

private:
    CacheSpec spec_;
    Numbers &numbers_;
    std::vector<float> out_;
    Random random_{3};
    int32_t count_ = 0, row_ = 0;
};

CacheSpec full_spec() {
    CacheSpec spec;
    spec.max_step_tokens = 2048;
    return spec;
}

// Sinks, recent tokens and up to a period of newer ones in f16, everything else in one pair of formats.
CacheSpec quantised_spec(skerry_format keys, skerry_format values) {
    CacheSpec spec;
    spec.policy.kind = SKERRY_POLICY_QUANTISE;
    spec.policy.key_format = keys;
    spec.policy.value_format = values;
    spec.policy.window_tokens = 16;
    spec.budget.length_tokens = 2 * int64_t{options.tokens};
    spec.max_step_tokens = 2048;
    return spec;
}

// 20 % of the bytes of a full cache: every window stays readable in r2, and what is left holds windows in f16.
CacheSpec mixed_spec() {
    CacheSpec spec = quantised_spec(SKERRY_FORMAT_R2, SKERRY_FORMAT_R2);
    spec.policy.kind = SKERRY_POLICY_QEVICT;
    spec.policy.full_format = SKERRY_FORMAT_F16;
    spec.policy.prefill = SKERRY_PREFILL_WHOLE;
    spec.budget.share_ppm = 200000;
    spec.budget.length_tokens = options.tokens + 1024;
    spec.staging_tokens = options.tokens;
    return spec;
}

// ---- attend ----

struct Timing {
    Cache *cache;
    uint32_t tiers, flags;
    double serial; // seconds that no second thread can take over
    Series seconds;
    Sample last;
};

// What stays of the time that threads ran when they share the work, but for the serial part.
double shared_between_threads(double ran, double serial) { return serial + (ran - serial) / threads; }

struct Serial {
    double attend = 0;                    // seconds outside parallel loops
    double event_ran = 0, event_tail = 0; // of a commit with an event: all, and outside parallel loops
};

Serial serial_part(Probe &probe, const CacheSpec &spec, Numbers &numbers) {
    Loops loops;
    const Context context(0, false, &loops);
    Cache cache(context, spec, numbers);
    cache.read_prompt(options.tokens);
    std::vector<double> attend, ran, tail;
    const auto outside = [&](double *all, auto &&work) {
        loops.seconds = 0;
        const double start = thread_seconds();
        work();
        *all = thread_seconds() - start;
        return *all - loops.seconds;
    };
    for (int32_t i = 0; i < 16 * 4; ++i) {
        const bool event = cache.info().next_event_position == cache.info().length_tokens + 1;
        cache.begin(1);
        cache.append(0);
        if (i % 8 == 0) probe.run();
        double all = 0;
        const double alone = outside(&all, [&] { cache.attend(0, 0, 0); });
        if (i % 8 == 0) attend.push_back(alone);
        const double rest = outside(&all, [&] { cache.commit(); });
        if (!event) continue;
        ran.push_back(all);
        tail.push_back(rest);
    }
    return {median(attend), median(ran), median(tail)};
}

void attend_rows(Probe &probe, double *probe_bytes_per_second) {
    const Context context(threads - 1);
    Numbers numbers{Geometry{}};
    const Serial f16_serial = serial_part(probe, full_spec(), numbers);
    const Serial r_serial = serial_part(probe, quantised_spec(SKERRY_FORMAT_R2, SKERRY_FORMAT_R2), numbers);
    const Serial mixed_serial = serial_part(probe, mixed_spec(), numbers);
    const auto built = [&](const CacheSpec &spec) {
        auto cache = std::make_unique<Cache>(context, spec, numbers);
        cache->read_prompt(options.tokens);
        return cache;
    };
    const auto f16 = built(full_spec());
    const auto r2 = built(quantised_spec(SKERRY_FORMAT_R2, SKERRY_FORMAT_R2));
    const auto r3r2 = built(quantised_spec(SKERRY_FORMAT_R3, SKERRY_FORMAT_R2));
    const auto r4 = built(quantised_spec(SKERRY_FORMAT_R4, SKERRY_FORMAT_R4));
    const auto r8 = built(quantised_spec(SKERRY_FORMAT_R8, SKERRY_FORMAT_R8));
    const auto mixed = built(mixed_spec());

    // Without scores where only bytes and formats are compared: the full policy keeps none.
    std::vector<Timing> timings = {
        {f16.get(), 0, SKERRY_ATTEND_NO_SCORE, f16_serial.attend, {}, {}},
        {r2.get(), 0, SKERRY_ATTEND_NO_SCORE, r_serial.attend, {}, {}},
        {r3r2.get(), 0, SKERRY_ATTEND_NO_SCORE, r_serial.attend, {}, {}},
        {r4.get(), 0, SKERRY_ATTEND_NO_SCORE, r_serial.attend, {}, {}},
        {r8.get(), 0, SKERRY_ATTEND_NO_SCORE, r_serial.attend, {}, {}},
        {mixed.get(), 0, 0, mixed_serial.attend, {}, {}},
        {mixed.get(), 0, SKERRY_ATTEND_NO_SCORE, mixed_serial.attend, {}, {}},
        {mixed.get(), SKERRY_TIERS_FULL, SKERRY_ATTEND_NO_SCORE, mixed_serial.attend, {}, {}},
        {mixed.get(), SKERRY_TIERS_QUANTISED, SKERRY_ATTEND_NO_SCORE, mixed_serial.attend, {}, {}},
    };
    enum { is_f16, is_r2, is_r3r2, is_r4, is_r8, is_mixed, is_mixed_unscored, is_full_tier, is_quantised_tier };
    Series probes, f16_to_probe, mixed_to_sum, score_overhead, append_cold;
    std::vector<Series> faster(timings.size());
    std::map<const Cache *, double> bytes; // that one attend over all tiers reads
    const double start = seconds_now();
    for (int32_t round = 0; round < 1000; ++round) {
        const bool enough =
            std::all_of(timings.begin(), timings.end(), [](const Timing &t) { return t.seconds.clean() >= options.rounds; });
        if (round > 2 && (enough || seconds_now() - start > options.attend_seconds)) break;
        Sample beside;
        for (size_t i = 0; i < timings.size(); ++i) {
            Timing &timing = timings[i];
            const bool opens = i == 0 || timings[i - 1].cache != timing.cache;
            const bool closes = i + 1 == timings.size() || timings[i + 1].cache != timing.cache;
            const uint64_t read = timing.cache->counters().attended_bytes;
            if (opens) timing.cache->begin(1);
            rest(options.rest_us);
            const Sample before = probe.run();
            if (opens) {
                const Sample append = measure(1, [&] { timing.cache->append(0); });
                if (i == is_f16 && round > 0) append_cold.add(append);
            }
            rest(options.rest_us);
            timing.last = measure(threads, [&] { timing.cache->attend(0, timing.tiers, timing.flags); });
            timing.last.busy = shared_between_threads(threads * timing.last.busy, timing.serial);
            if (closes) timing.cache->commit();
            if (opens && closes) bytes[timing.cache] = static_cast<double>(timing.cache->counters().attended_bytes - read);
            if (i == is_f16) beside = before;
            if (round > 0) probes.add(before);
        }
        if (round == 0) continue; // first touch
        const Sample &full = timings[is_f16].last;
        for (size_t i = 0; i < timings.size(); ++i) {
            const Sample &now = timings[i].last;
            timings[i].seconds.add(now);
            faster[i].add(full.seconds / now.seconds, full.busy / now.busy, full.clean && now.clean);
        }
        const double share = bytes[f16.get()] / probe.bytes();
        f16_to_probe.add(share * beside.seconds / full.seconds, share * beside.busy / full.busy, full.clean && beside.clean);
        const Sample &whole = timings[is_mixed].last, &unscored = timings[is_mixed_unscored].last;
        const Sample &upper = timings[is_full_tier].last, &lower = timings[is_quantised_tier].last;
        mixed_to_sum.add(whole.seconds / (upper.seconds + lower.seconds), whole.busy / (upper.busy + lower.busy),
                         whole.clean && upper.clean && lower.clean);
        score_overhead.add(whole.seconds / unscored.seconds, whole.busy / unscored.busy, whole.clean && unscored.clean);
    }
    *probe_bytes_per_second = probe.bytes() / probes.value();

    const auto seconds = [&](int which) { return timings[static_cast<size_t>(which)].seconds.value(); };
    const double f16_rate = bytes[f16.get()] / seconds(is_f16);
    print_row({"attend.f16.vs_probe", f16_rate / 1e9, "GB/s", f16_to_probe.value(), "probe", Gate::at_least, 0.5, f16_to_probe.clean()});
    const auto speed = [&](const char *name, int which, Gate gate) {
        print_row({name, 1e6 * seconds(which), "us", faster[static_cast<size_t>(which)].value(), "times faster than attend.f16", gate, 2,
                   faster[static_cast<size_t>(which)].clean()});
    };
    speed("attend.r2.vs_f16", is_r2, Gate::at_least);
    print_row({"attend.r2.serial", 1e6 * r_serial.attend, "us", r_serial.attend / seconds(is_r2), "attend.r2"});
    speed("attend.r3r2", is_r3r2, Gate::none);
    speed("attend.r4", is_r4, Gate::none);
    speed("attend.r8", is_r8, Gate::none);
    print_row({"attend.mixed.vs_sum", 1e6 * seconds(is_mixed), "us", mixed_to_sum.value(), "its tiers alone", Gate::at_most, 1.15,
               mixed_to_sum.clean()});
    speed("attend.mixed.vs_f16", is_mixed, Gate::none);
    const skerry_seq_info info = mixed->info();
    print_row({"mixed.full_tokens", static_cast<double>(info.full_tokens), "tokens",
               static_cast<double>(info.full_tokens) / static_cast<double>(kv_heads * info.length_tokens), "all tokens"});
    print_row({"score.overhead", 1e6 * seconds(is_mixed), "us", score_overhead.value(), "attend.mixed without scores", Gate::none, 0,
               score_overhead.clean()});
    print_row({"append.cold.us", 1e6 * append_cold.value(), "us", NAN, nullptr, Gate::none, 0, append_cold.clean()});

    // Events: decode steps on the mixture, with one step on the full cache beside every event.
    Series with, without, full_step;
    const double events_start = seconds_now();
    for (int32_t events = 0; events < options.event_count;) {
        const int64_t position = mixed->info().length_tokens, due = mixed->info().next_event_position;
        mixed->begin(1);
        mixed->append(0);
        mixed->attend(0, 0, 0);
        if (position + 1 != due) {
            without.add(measure(1, [&] { mixed->commit(); }));
            continue;
        }
        Sample commit = measure(threads, [&] { mixed->commit(); });
        commit.busy = shared_between_threads(mixed_serial.event_ran, mixed_serial.event_tail);
        ++events;
        f16->begin(1);
        f16->append(0);
        Sample full = measure(threads, [&] { f16->attend(0, 0, 0); });
        full.busy = shared_between_threads(threads * full.busy, f16_serial.attend);
        f16->commit();
        if (events == 1) continue; // the state that the rounds above left
        with.add(commit);
        full_step.add(full);
        if (seconds_now() - events_start > options.attend_seconds / 4) break;
    }
    const double cost = with.value() - without.value();
    print_row({"event.vs_step", 1e6 * cost, "us", cost / full_step.value(), "attend.f16", Gate::none, 0, with.clean()});
}

// ---- append ----

void append_rows() {
    const Context context(0);
    CacheSpec spec = full_spec();
    spec.geometry.layers = 32;
    Numbers numbers(spec.geometry, 256);
    spec.max_step_tokens = 64;
    Cache cache(context, spec, numbers);
    Series append, other;
    for (int32_t i = 0; i < options.append_tokens; ++i) {
        const Sample begin = measure(1, [&] { cache.begin(1); });
        const Sample all = measure(1, [&] {
            for (int32_t layer = 0; layer < spec.geometry.layers; ++layer)
                cache.append(layer);
        });
        const Sample commit = measure(1, [&] { cache.commit(); });
        if (i < 16) continue;
        append.add(all, 1.0 / spec.geometry.layers);
        other.add((begin.seconds + commit.seconds) / spec.geometry.layers, (begin.busy + commit.busy) / spec.geometry.layers,
                  begin.clean && commit.clean);
    }
    print_row({"append.us_per_token_layer", 1e6 * append.value(), "us", NAN, nullptr, Gate::at_most, 2, append.clean()});
    print_row({"step.us_per_token_layer", 1e6 * other.value(), "us", NAN, nullptr, Gate::none, 0, other.clean()});
}

// ---- the ledger ----

// The published rules with promotion: masses go to one window of the history after another, so windows rise and fall again.
struct Ledger {
    std::set<std::pair<int32_t, int32_t>> written; // (head, window) that were demoted before
    int64_t again = 0;
    uint64_t again_bytes = 0;
    static void note(void *user, const skerry_transition *moves, int32_t count) {
        Ledger *self = static_cast<Ledger *>(user);
        for (int32_t i = 0; i < count; ++i) {
            if (moves[i].to != SKERRY_TIER_QUANTISED || moves[i].from != SKERRY_TIER_FULL) continue;
            if (self->written.insert({moves[i].kv_head, moves[i].window}).second) continue;
            ++self->again;
            self->again_bytes += moves[i].written_bytes;
        }
    }
};

void ledger_rows() {
    const Context context(0);
    CacheSpec spec;
    spec.geometry = {1, 2, 4, 64};
    std::vector<float> frequencies;
    for (int32_t i = 0; i < 32; ++i)
        frequencies.push_back(std::pow(10000.0f, -static_cast<float>(i) / 32.0f));
    skerry_rotary_desc rotary = make<skerry_rotary_desc>();
    rotary.inverse_frequencies = frequencies.data();
    rotary.dims = 64;
    spec.rotary = &rotary;
    Ledger ledger;
    skerry_callbacks_desc callbacks = make<skerry_callbacks_desc>();
    callbacks.user = &ledger;
    callbacks.transitions = Ledger::note;
    spec.callbacks = &callbacks;
    spec.policy.kind = SKERRY_POLICY_QEVICT;
    spec.policy.fidelity = SKERRY_FIDELITY_PAPER;
    spec.budget.share_ppm = 300000;
    spec.budget.length_tokens = 2048;
    spec.staging_tokens = 512;
    Numbers numbers(spec.geometry, 1024);
    Cache cache(context, spec, numbers);
    cache.read_prompt(512);
    Random random(5);
    std::vector<float> masses;
    std::vector<int32_t> windows(4096);
    const uint64_t prompt_demotions = cache.counters().demotions;
    for (int32_t i = 0; i < 1500; ++i) {
        cache.begin(1);
        cache.append(0);
        for (int32_t head = 0; head < spec.geometry.heads; ++head) {
            skerry_gather_desc gather = make<skerry_gather_desc>();
            gather.kv_head = head;
            gather.windows = windows.data();
            int32_t tokens = 0;
            check(skerry_step_gather(cache.step, &gather, &tokens, &error), "gather");
            masses.assign(static_cast<size_t>(tokens), 0.0f);
            const int32_t favourite = windows[static_cast<size_t>(random.below(tokens))];
            for (int32_t t = 0; t < tokens; ++t) {
                if (windows[static_cast<size_t>(t)] == favourite) masses[static_cast<size_t>(t)] = 0.1f;
            }
            skerry_observe_desc observe = make<skerry_observe_desc>();
            observe.masses = masses.data();
            observe.token_count = tokens;
            observe.kv_head = head;
            check(skerry_step_observe(cache.step, &observe, &error), "observe");
        }
        cache.commit();
    }
    const skerry_counters counters = cache.counters();
    const auto written_again = static_cast<double>(ledger.again_bytes);
    // Without a window that fell twice, nothing was shown.
    const bool seen =
        ledger.again > 0 && counters.demotions_ledger == static_cast<uint64_t>(ledger.again) && counters.demotions > prompt_demotions;
    print_row({"demote.again.bytes", seen ? written_again : NAN, "bytes", NAN, nullptr, Gate::at_most, 0});
    print_row({"demote.again.count", static_cast<double>(ledger.again), "moves"});
}

// ---- budget ----

void budget_rows() {
    const Geometry geometry{2, 2, 4, 32};
    double largest = 0;
    int64_t steps = 0;
    Random random(77);
    const skerry_policy_kind kinds[] = {SKERRY_POLICY_QEVICT, SKERRY_POLICY_QUANTISE, SKERRY_POLICY_EVICT, SKERRY_POLICY_STREAMING,
                                        SKERRY_POLICY_QEVICT};
    for (size_t turn = 0; turn < std::size(kinds); ++turn) {
        Context context(0, true);
        CacheSpec spec;
        spec.geometry = geometry;
        spec.policy.kind = kinds[turn];
        spec.max_sequences = 3;
        spec.max_step_tokens = 48;
        spec.budget.share_ppm = 300000;
        spec.budget.length_tokens = 600;
        if (turn == 4) {
            spec.policy.flags = SKERRY_POLICY_KEEP_EXACT;
            spec.budget.exact_bytes = 40000;
        }
        Numbers numbers(geometry, 128);
        Cache cache(context, spec, numbers);
        std::vector<skerry_seq> seqs = {cache.seq};
        const auto look = [&] {
            const skerry_memory_info memory = cache.memory();
            skerry_context_bytes bytes{};
            check(skerry_context_get_bytes(context.handle, &bytes, &error), "bytes");
            // From the host's side of the allocator, not from the report.
            const double held = static_cast<double>(context.host.live.load()) - static_cast<double>(bytes.context_bytes) -
                                static_cast<double>(memory.staging_bytes + memory.exact_bytes + memory.fixed_bytes);
            largest = std::max(largest, held / static_cast<double>(memory.budget_bytes));
        };
        const int32_t share = options.random_steps / static_cast<int32_t>(std::size(kinds));
        for (int32_t i = 0; i < share;) {
            const int32_t what = random.below(40);
            if (what == 0 && seqs.size() < 3) {
                seqs.push_back({});
                check(skerry_seq_create(cache.handle, &seqs.back(), &error), "sequence");
            } else if (what == 1 && seqs.size() > 1) {
                check(skerry_seq_drop(cache.handle, seqs.back(), &error), "drop");
                seqs.pop_back();
            } else if (what == 2 && seqs.size() < 3) {
                seqs.push_back({});
                check(skerry_seq_fork(cache.handle, seqs[0], -1, &seqs.back(), &error), "fork");
            } else if (what == 3) {
                cache.seq = seqs[static_cast<size_t>(random.below(static_cast<int32_t>(seqs.size())))];
                check(skerry_seq_truncate(cache.handle, cache.seq, cache.info().lowest_truncate, &error), "truncate");
            } else if (what == 4 && random.below(4) == 0) {
                skerry_budget_desc budget = spec.budget;
                budget.share_ppm = static_cast<uint32_t>(250000 + random.below(400000));
                check(skerry_cache_set_budget(cache.handle, &budget, &error), "budget");
            } else {
                cache.seq = seqs[static_cast<size_t>(random.below(static_cast<int32_t>(seqs.size())))];
                const int32_t count = random.below(5) == 0 ? 1 + random.below(48) : 1 + random.below(3);
                cache.begin(count);
                for (int32_t layer = 0; layer < geometry.layers; ++layer) {
                    cache.append(layer);
                    if (random.below(4) != 0) cache.attend(layer, 0, 0);
                    look();
                }
                if (random.below(10) == 0)
                    skerry_step_abort(cache.step);
                else
                    cache.commit();
                ++i;
                ++steps;
            }
            look();
        }
        check(skerry_cache_check(cache.handle, &error), "check");
    }
    print_row({"budget.over", largest, "of the budget", NAN, nullptr, Gate::at_most, 1.0});
    print_row({"budget.steps", static_cast<double>(steps), "steps"});
}

// ---- errors ----

// The largest relative distance of an output row from attention in float64 on the numbers that are stored.
struct RowErrors {
    double exact = 0, fast = 0;
};

RowErrors row_errors(const CacheSpec &spec, Numbers &numbers, Context &context) {
    constexpr int32_t rows = 8;
    const Geometry &g = spec.geometry;
    const int32_t group = g.queries / g.heads;
    Cache cache(context, spec, numbers);
    cache.read_prompt(options.error_tokens);
    cache.begin(rows);
    cache.append(0);
    const auto size = static_cast<size_t>(rows * g.queries * g.channels);
    cache.attend(0, 0, SKERRY_ATTEND_NO_SCORE | SKERRY_ATTEND_EXACT);
    const std::vector<float> exact(cache.out(), cache.out() + size);
    cache.attend(0, 0, SKERRY_ATTEND_NO_SCORE);
    const std::vector<float> fast(cache.out(), cache.out() + size);
    const auto capacity = static_cast<size_t>(options.error_tokens + rows);
    std::vector<float> keys(capacity * static_cast<size_t>(g.channels)), values(keys.size());
    std::vector<int64_t> positions(capacity);
    RowErrors errors;
    for (int32_t head = 0; head < g.heads; ++head) {
        skerry_tensor key_tensor = tensor_of(keys.data(), static_cast<int64_t>(capacity), 1, g.channels);
        key_tensor.rank = 2;
        key_tensor.shape[1] = g.channels;
        key_tensor.stride[1] = 1;
        skerry_tensor value_tensor = key_tensor;
        value_tensor.data = values.data();
        skerry_gather_desc gather = make<skerry_gather_desc>();
        gather.keys = &key_tensor;
        gather.values = &value_tensor;
        gather.positions = positions.data();
        gather.kv_head = head;
        int32_t tokens = 0;
        check(skerry_step_gather(cache.step, &gather, &tokens, &error), "gather");
        for (int32_t r = 0; r < rows; ++r) {
            for (int32_t q = 0; q < group; ++q) {
                const auto at = static_cast<size_t>((r * g.queries + head * group + q) * g.channels);
                const float *query = numbers.queries.data() + at;
                std::vector<double> truth(static_cast<size_t>(g.channels)), logits;
                double top = -INFINITY, sum = 0;
                for (int32_t t = 0; t < tokens; ++t) {
                    double dot = 0;
                    const float *key = keys.data() + static_cast<ptrdiff_t>(t) * g.channels;
                    for (int32_t c = 0; c < g.channels; ++c)
                        dot += double(query[c]) * double(key[c]);
                    const bool sees = positions[static_cast<size_t>(t)] <= options.error_tokens + r;
                    logits.push_back(sees ? dot / std::sqrt(double(g.channels)) : -INFINITY);
                    top = std::max(top, logits.back());
                }
                for (int32_t t = 0; t < tokens; ++t) {
                    const double weight = std::exp(logits[static_cast<size_t>(t)] - top);
                    const float *value = values.data() + static_cast<ptrdiff_t>(t) * g.channels;
                    sum += weight;
                    for (size_t c = 0; c < truth.size(); ++c)
                        truth[c] += weight * double(value[c]);
                }
                double length = 0, off_exact = 0, off_fast = 0;
                for (size_t c = 0; c < truth.size(); ++c) {
                    truth[c] /= sum;
                    length += truth[c] * truth[c];
                    off_exact += (double(exact[at + c]) - truth[c]) * (double(exact[at + c]) - truth[c]);
                    off_fast += (double(fast[at + c]) - truth[c]) * (double(fast[at + c]) - truth[c]);
                }
                errors.exact = std::max(errors.exact, std::sqrt(off_exact / length));
                errors.fast = std::max(errors.fast, std::sqrt(off_fast / length));
            }
        }
    }
    skerry_step_abort(cache.step);
    return errors;
}

void error_rows() {
    Context context(threads - 1);
    const Geometry geometry{1, 2, 8, dim};
    Numbers numbers(geometry);
    CacheSpec full = full_spec();
    full.geometry = geometry;
    const RowErrors raw = row_errors(full, numbers, context);
    print_row({"error.f16.exact", raw.exact, "relative", NAN, nullptr, Gate::at_most, 1e-5});
    print_row({"error.f16.fast", raw.fast, "relative", NAN, nullptr, Gate::at_most, 1e-2});
    const struct {
        skerry_format keys, values;
        const char *exact, *fast;
    } pairs[] = {{SKERRY_FORMAT_R2, SKERRY_FORMAT_R2, "error.r2.exact", "error.r2.fast"},
                 {SKERRY_FORMAT_R3, SKERRY_FORMAT_R3, "error.r3.exact", "error.r3.fast"},
                 {SKERRY_FORMAT_R3, SKERRY_FORMAT_R2, "error.r3r2.exact", "error.r3r2.fast"},
                 {SKERRY_FORMAT_R4, SKERRY_FORMAT_R4, "error.r4.exact", "error.r4.fast"},
                 {SKERRY_FORMAT_R8, SKERRY_FORMAT_R8, "error.r8.exact", "error.r8.fast"},
                 {SKERRY_FORMAT_C2, SKERRY_FORMAT_C2, "error.c2.exact", "error.c2.fast"},
                 {SKERRY_FORMAT_C4, SKERRY_FORMAT_C4, "error.c4.exact", "error.c4.fast"}};
    for (const auto &pair : pairs) {
        CacheSpec spec = quantised_spec(pair.keys, pair.values);
        spec.geometry = geometry;
        const RowErrors errors = row_errors(spec, numbers, context);
        print_row({pair.exact, errors.exact, "relative", NAN, nullptr, Gate::at_most, 1e-5});
        print_row({pair.fast, errors.fast, "relative", NAN, nullptr, Gate::at_most, 1e-2});
    }
}

int32_t number_of(int argc, char **argv, const char *name, int32_t otherwise) {
    for (int i = 1; i + 1 < argc; ++i) {
        if (std::strcmp(argv[i], name) == 0) return static_cast<int32_t>(std::atoi(argv[i + 1]));
    }
    return otherwise;
}

} // namespace

int main(int argc, char **argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--quick") {
            options.rounds = 16;
            options.attend_seconds = 15;
            options.append_tokens = 256;
            options.event_count = 8;
        } else if (argument == "--smoke") {
            options.tokens = 512;
            options.rounds = 2;
            options.attend_seconds = 2;
            options.append_tokens = 32;
            options.event_count = 2;
            options.random_steps = 200;
            options.error_tokens = 256;
            options.probe_bytes = size_t{8} << 20;
        } else if (argument == "--only" && i + 1 < argc) {
            options.only = argv[++i];
        } else if ((argument == "--tokens" || argument == "--rounds") && i + 1 < argc) {
            ++i;
        } else {
            die("unknown option %s", argv[i]);
        }
    }
    options.tokens = number_of(argc, argv, "--tokens", options.tokens);
    options.rounds = number_of(argc, argv, "--rounds", options.rounds);
    if (options.tokens < 128 || options.rounds < 1) die("--tokens is at least 128, --rounds at least 1");

    std::string device, features;
    {
        const Context context(threads - 1);
        skerry_device_info info = make<skerry_device_info>();
        check(skerry_context_get_device(context.handle, 0, &info, &error), "device");
        device = info.name;
    }
    double rate = NAN;
    if (wanted("attend")) {
        Probe probe;
        attend_rows(probe, &rate);
    }
    if (wanted("append")) append_rows();
    if (wanted("demote")) ledger_rows();
    if (wanted("budget")) budget_rows();
    if (wanted("error")) error_rows();
    std::printf("{\"device\": \"%s\", \"build\": \"%s\", \"threads\": %d, \"tokens\": %d, \"probe_read_gbps\": ", device.c_str(),
                skerry_build_text(), threads, options.tokens);
    print_number(rate / 1e9);
    std::printf(", \"undisturbed_samples\": %.3f}\n",
                static_cast<double>(clean_count) / static_cast<double>(std::max<int64_t>(sample_count, 1)));
    return 0;
}
