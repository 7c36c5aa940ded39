// SPDX-License-Identifier: MIT

// Measures the attend kernels: JSON lines on stdout, one per figure. Geometry of a Llama-8B layer: 8 KV heads of 4 query heads, 128
// channels; 32,768 tokens in tiles of 16 that lie scattered in memory. Sets of tiles rotate, so that none is in a cache when its turn
// comes. All configurations run once per round, one after the other: ratios are taken within a round, and the median over rounds.
//
//   bench_kernels [--level 0..3] [--tokens N] [--rounds N] [--threads N] [--rows N] [--megabytes N] [--only NAME] [--accuracy] [--route]
//                 [--lowrank]
//
// --route prints rows of tests/bench/rows.txt instead: routing of the same layer in segments of 16, against its step in f16.
// --lowrank likewise: lowrank_rows.hpp.

#include "attend_scene.hpp"
#include "codec/router_key.hpp"
#include "lowrank_rows.hpp"
#include "policy/zoom_router.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#endif

namespace {

using namespace scene;

constexpr int32_t kv_heads = 8, group = 4, dim = 128, split_tiles = 64, epoch_tiles = 16;

struct Options {
    int32_t level = 3, tokens = 32768, rounds = 15, threads = 2, rows = 1;
    int32_t megabytes = 160; // of all sets of one format: five times an L3 of 32 MB
    bool accuracy = false, route = false, lowrank = false;
    std::string only;
};

// A scheduler that puts both threads on one processor for a while makes every figure meaningless.
void pin_to(int32_t processor) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(processor) % std::max(1u, std::thread::hardware_concurrency()), &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
    (void)processor;
#endif
}

// Threads that wait for work by spinning: waking them through the kernel takes longer than some of what is measured.
class Crew {
public:
    explicit Crew(int32_t threads) {
        for (int32_t i = 1; i < threads; ++i) {
            helpers_.emplace_back([this, i] {
                pin_to(i);
                uint32_t seen = 0;
                for (;;) {
                    for (int spins = 0; round_.load(std::memory_order_acquire) == seen; ++spins) {
                        if (spins > 20000) std::this_thread::yield();
                    }
                    ++seen;
                    if (stop_.load()) return;
                    drain();
                    running_.fetch_sub(1, std::memory_order_acq_rel);
                }
            });
        }
    }
    ~Crew() {
        stop_.store(true);
        round_.fetch_add(1, std::memory_order_release);
        for (std::thread &helper : helpers_)
            helper.join();
    }
    Crew(const Crew &) = delete;
    Crew &operator=(const Crew &) = delete;

    double run(int32_t tasks, const std::function<void(int32_t)> &task) {
        const auto start = std::chrono::steady_clock::now();
        task_ = &task;
        tasks_ = tasks;
        next_.store(0);
        running_.store(static_cast<int32_t>(helpers_.size()));
        round_.fetch_add(1, std::memory_order_release);
        drain();
        for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins > 20000) std::this_thread::yield();
        }
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

private:
    void drain() {
        for (;;) {
            const int32_t i = next_.fetch_add(1);
            if (i >= tasks_) return;
            (*task_)(i);
        }
    }

    std::vector<std::thread> helpers_;
    const std::function<void(int32_t)> *task_ = nullptr;
    int32_t tasks_ = 0;
    std::atomic<uint32_t> round_{0};
    std::atomic<int32_t> next_{0}, running_{0};
    std::atomic<bool> stop_{false};
};

struct Arena {
    uint8_t *bytes = nullptr;
    size_t size = 0;
    explicit Arena(size_t n) : size(skerry::round_up(n, size_t(2) << 20)) {
        bytes = static_cast<uint8_t *>(std::aligned_alloc(size_t(2) << 20, size));
        if (bytes == nullptr) {
            std::fprintf(stderr, "bench_kernels: %zu bytes: out of memory\n", size);
            std::exit(1);
        }
#if defined(__linux__)
        madvise(bytes, size, MADV_HUGEPAGE);
#endif
        std::memset(bytes, 1, size);
    }
    ~Arena() { std::free(bytes); }
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
};

struct Mix {
    const char *name;
    skerry_format key_format, value_format;
    int32_t full_percent; // of f16 tiles among them
};

// One layer's tiles, several times over.
class Cache {
public:
    Cache(const Mix &mix, const Options &options, const Scene &codes) : mix_(mix) {
        const int32_t tiles = options.tokens / 16;
        // Which tiles are full is the same in every set and scattered over positions.
        Random random(99);
        std::vector<bool> is_full;
        size_t set_units = 0;
        for (int32_t i = 0; i < kv_heads * tiles; ++i) {
            is_full.push_back(random.below(100) < mix.full_percent);
            set_units += units(is_full.back());
        }
        set_bytes_ = set_units * 64;
        sets_ = static_cast<int32_t>(((size_t(options.megabytes) << 20) + set_bytes_ - 1) / set_bytes_);
        arena_ = std::make_unique<Arena>(set_bytes_ * static_cast<size_t>(sets_));
        chunk_ = arena_->bytes;

        for (int32_t set = 0; set < sets_; ++set) {
            std::vector<int32_t> order(is_full.size());
            for (size_t i = 0; i < order.size(); ++i)
                order[i] = static_cast<int32_t>(i);
            for (size_t i = order.size() - 1; i > 0; --i)
                std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int32_t>(i + 1)))]);
            std::vector<skerry_tile> list(is_full.size());
            uint32_t place = static_cast<uint32_t>(set_units) * static_cast<uint32_t>(set);
            for (const int32_t index : order) {
                const bool full = is_full[static_cast<size_t>(index)];
                skerry_tile &tile = list[static_cast<size_t>(index)];
                const int32_t position = index % tiles;
                tile = {};
                tile.place = place;
                tile.first = 16 * position;
                tile.count = tile.capacity = 16;
                tile.key_format = static_cast<uint8_t>(full ? SKERRY_FORMAT_F16 : mix.key_format);
                tile.value_format = static_cast<uint8_t>(full ? SKERRY_FORMAT_F16 : mix.value_format);
                tile.tier = full ? SKERRY_TIER_FULL : SKERRY_TIER_QUANTISED;
                tile.epoch = static_cast<uint16_t>(position / epoch_tiles);
                const uint32_t n = units(full);
                codes.copy_record(tile.key_format, tile.value_format, random, chunk_ + size_t(place) * 64, size_t(n) * 64);
                place += n;
            }
            lists_.push_back(std::move(list));
        }
    }

    size_t bytes(uint32_t tiers) const {
        size_t total = 0;
        for (const skerry_tile &tile : lists_[0]) {
            if (tiers != 0 && (tiers >> tile.tier & 1u) == 0) continue;
            total += skerry::record_bytes(tile.key_format, tile.value_format, dim, dim, 16);
        }
        return total;
    }
    const std::vector<skerry_tile> &next() { return lists_[static_cast<size_t>(turn_++ % sets_)]; }
    uint8_t *const *chunks() { return &chunk_; }

private:
    uint32_t units(bool full) const {
        const skerry_format key = full ? SKERRY_FORMAT_F16 : mix_.key_format, value = full ? SKERRY_FORMAT_F16 : mix_.value_format;
        return static_cast<uint32_t>(skerry::record_bytes(key, value, dim, dim, 16) / 64);
    }

    Mix mix_;
    size_t set_bytes_ = 0;
    int32_t sets_ = 0, turn_ = 0;
    std::unique_ptr<Arena> arena_;
    uint8_t *chunk_ = nullptr;
    std::vector<std::vector<skerry_tile>> lists_;
};

// One fused pass over a layer: splits of 64 tiles per KV head, then their merge.
class Step {
public:
    Step(const Options &options, const skerry_kernels &kernels, const std::vector<skerry_epoch> &epochs)
        : kernels_(kernels), epochs_(epochs), rows_(options.rows), tiles_(options.tokens / 16),
          splits_((tiles_ + split_tiles - 1) / split_tiles) {
        Random random(5);
        queries_.resize(static_cast<size_t>(kv_heads * heads() * dim));
        for (float &q : queries_)
            q = 2.0f * random.normal();
        for (int32_t r = 0; r < rows_; ++r)
            positions_.push_back(options.tokens - rows_ + r);
        const size_t parts = static_cast<size_t>(kv_heads * splits_ * heads());
        out_.resize(parts * dim);
        max_.resize(parts);
        sum_.resize(parts);
        merged_.resize(static_cast<size_t>(kv_heads * heads() * dim));
        lse_.resize(static_cast<size_t>(kv_heads * heads()));
        tile_max_.resize(static_cast<size_t>(kv_heads * tiles_ * heads()));
        tile_sum_.resize(tile_max_.size());
        params_.key_dim = params_.value_dim = dim;
        params_.group = group;
        params_.scale = 1.0f / std::sqrt(float(dim));
        params_.attention_factor = 1.0f;
        params_.pool.chunk_shift = 31;
        scratch_bytes_ = skerry::round_up(kernels.attend_scratch_bytes(&params_, rows_, split_tiles), 64);
    }

    double run(Crew &crew, Cache &cache, uint32_t tiers, bool exact, bool masses) {
        const std::vector<skerry_tile> &tiles = cache.next();
        skerry_attend_params params = params_;
        params.pool.chunks = cache.chunks();
        params.tiers = tiers;
        params.exact = exact ? 1 : 0;
        const int32_t n = heads();
        double seconds = crew.run(kv_heads * splits_, [&](int32_t i) {
            const int32_t head = i / splits_, split = i % splits_;
            skerry_attend_task task = {};
            task.tiles = tiles.data() + static_cast<ptrdiff_t>(head) * tiles_;
            task.epochs = epochs_.data();
            task.queries = queries_.data() + static_cast<ptrdiff_t>(head) * n * dim;
            task.row_positions = positions_.data();
            task.out = out_.data() + static_cast<ptrdiff_t>(i) * n * dim;
            task.max = max_.data() + static_cast<ptrdiff_t>(i) * n;
            task.sum = sum_.data() + static_cast<ptrdiff_t>(i) * n;
            task.tile_begin = split * split_tiles;
            task.tile_end = std::min(task.tile_begin + split_tiles, tiles_);
            const ptrdiff_t at = (static_cast<ptrdiff_t>(head) * tiles_ + task.tile_begin) * n;
            task.tile_max = masses ? tile_max_.data() + at : nullptr;
            task.tile_sum = masses ? tile_sum_.data() + at : nullptr;
            task.rows = rows_;
            thread_local const Bytes own = aligned_bytes(scratch_bytes_, 0);
            task.scratch = own.get();
            kernels_.attend(&params, &task);
        });
        seconds += crew.run(kv_heads, [&](int32_t head) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(head) * splits_ * n;
            kernels_.merge(splits_, n, group, dim, out_.data() + at * dim, n * dim, max_.data() + at, sum_.data() + at, n, nullptr,
                           merged_.data() + static_cast<ptrdiff_t>(head) * n * dim, lse_.data() + static_cast<ptrdiff_t>(head) * n);
        });
        return seconds;
    }

private:
    int32_t heads() const { return rows_ * group; }

    const skerry_kernels &kernels_;
    const std::vector<skerry_epoch> &epochs_;
    int32_t rows_, tiles_, splits_;
    skerry_attend_params params_ = {};
    std::vector<float> queries_, out_, max_, sum_, merged_, lse_, tile_max_, tile_sum_;
    std::vector<int32_t> positions_;
    size_t scratch_bytes_ = 0;
};

// What a step does before it fetches: scores of all segments of 16, and the choice of 6 % of them, per KV head.
class Routing {
public:
    Routing(const Options &options, const skerry_kernels &kernels, const std::vector<skerry_epoch> &epochs, skerry_route_form form)
        : kernels_(kernels), epochs_(epochs), segments_(options.tokens / 16) {
        Random random(7);
        params_.form = form;
        params_.dim = form == SKERRY_ROUTE_CENTROIDS ? dim : skerry::router_rank_limit;
        params_.group = group;
        params_.vectors = skerry::router_centroids;
        params_.sets = 1;
        params_.scale = 1.0f / std::sqrt(static_cast<float>(params_.dim));
        const size_t heads = static_cast<size_t>(kv_heads * group), n = static_cast<size_t>(segments_);
        key_bytes_ = skerry::router_key_bytes(params_);
        keys_.resize(static_cast<size_t>(kv_heads) * n * key_bytes_);
        counts_.resize(static_cast<size_t>(kv_heads) * n * skerry::router_centroids, 4);
        for (size_t i = 0; i < static_cast<size_t>(kv_heads) * n; ++i)
            make_key(keys_.data() + i * key_bytes_, random);
        queries_.resize(heads * static_cast<size_t>(params_.dim));
        for (float &q : queries_)
            q = 2.0f * random.normal();
        scores_.resize(heads * n);
        units_.resize(heads);
        device_.assign(heads, 8.0f);
        places_.assign(n, skerry::ZoomPlace::absent);
        slots_ = segments_ * 6 / 100;
        chosen_.resize(static_cast<size_t>(kv_heads * segments_));
        for (int32_t s = 0; s < segments_; s += 16)
            previous_.push_back(s);
    }

    double run(Crew &crew) {
        return crew.run(kv_heads, [&](int32_t head) {
            const ptrdiff_t first = static_cast<ptrdiff_t>(head) * segments_;
            skerry_route_task task = {};
            task.balance = params_.form == SKERRY_ROUTE_CENTROIDS ? epochs_.data() : nullptr;
            task.queries = queries_.data() + static_cast<ptrdiff_t>(head) * group * params_.dim;
            task.keys = keys_.data() + static_cast<size_t>(first) * key_bytes_;
            task.counts = counts_.data() + first * skerry::router_centroids;
            task.scores = scores_.data() + first * group;
            task.score_stride = segments_;
            task.log_unit = units_.data() + static_cast<ptrdiff_t>(head) * group;
            task.segments = segments_;
            thread_local const Bytes own = aligned_bytes(scratch_bytes(), 0);
            task.scratch = own.get();
            kernels_.route(&params_, &task);
            skerry::ZoomRoute route;
            route.scores = task.scores;
            route.score_stride = segments_;
            route.log_unit = task.log_unit;
            route.device_lse = device_.data() + static_cast<ptrdiff_t>(head) * group;
            route.places = places_.data();
            route.previous = previous_.data();
            route.previous_count = static_cast<int32_t>(previous_.size());
            route.segments = segments_;
            route.group = group;
            route.slots = slots_;
            skerry::route_zoom(route, chosen_.data() + first, own.get());
        });
    }

    // Threads keep it from the first form to the second, which needs no more.
    size_t scratch_bytes() const { return std::max(kernels_.route_scratch_bytes(&params_), skerry::zoom_scratch_bytes(segments_)); }

private:
    void make_key(uint8_t *key, Random &random) {
        float rows[skerry::router_centroids * dim];
        for (int32_t i = 0; i < params_.vectors * params_.dim; ++i)
            rows[i] = random.normal();
        if (params_.form == SKERRY_ROUTE_PROJECTED) {
            skerry::encode_projected(rows, params_.dim, params_.vectors, key);
            return;
        }
        skerry_code_params code = {};
        code.epoch = epochs_.data();
        code.attention_factor = 1.0f;
        code.dim = dim;
        code.capacity = code.count = skerry::router_centroids;
        code.format = SKERRY_FORMAT_R2;
        code.side = SKERRY_SIDE_KEY;
        thread_local const Bytes own = aligned_bytes(kernels_.code_scratch_bytes(dim, skerry::router_centroids), 0);
        kernels_.encode(&code, rows, key, own.get());
    }

    const skerry_kernels &kernels_;
    const std::vector<skerry_epoch> &epochs_;
    int32_t segments_, slots_ = 0;
    size_t key_bytes_ = 0;
    skerry_route_params params_ = {};
    std::vector<uint8_t> keys_, counts_;
    std::vector<float> queries_, scores_, units_, device_;
    std::vector<skerry::ZoomPlace> places_;
    std::vector<int32_t> previous_, chosen_;
};

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x.empty() ? 0 : x[x.size() / 2];
}

uint64_t sum_words(const uint64_t *words, size_t n) {
    uint64_t sum[16] = {};
    for (size_t i = 0; i + 16 <= n; i += 16) {
        for (size_t j = 0; j < 16; ++j)
            sum[j] += words[i + j];
    }
    uint64_t total = 0;
    for (const uint64_t x : sum)
        total += x;
    return total;
}

double probe(Crew &crew, const Arena &arena, std::atomic<uint64_t> &sink) {
    const size_t piece = size_t(1) << 20;
    const int32_t pieces = static_cast<int32_t>(arena.size / piece);
    return crew.run(pieces, [&](int32_t i) {
        sink += sum_words(reinterpret_cast<const uint64_t *>(arena.bytes + static_cast<size_t>(i) * piece), piece / 8);
    });
}

void report_accuracy() {
    const std::pair<skerry_format, skerry_format> pairs[] = {
        {SKERRY_FORMAT_F32, SKERRY_FORMAT_F32}, {SKERRY_FORMAT_F16, SKERRY_FORMAT_F16}, {SKERRY_FORMAT_BF16, SKERRY_FORMAT_BF16},
        {SKERRY_FORMAT_R2, SKERRY_FORMAT_R2},   {SKERRY_FORMAT_R3, SKERRY_FORMAT_R3},   {SKERRY_FORMAT_R3, SKERRY_FORMAT_R2},
        {SKERRY_FORMAT_R4, SKERRY_FORMAT_R4},   {SKERRY_FORMAT_R8, SKERRY_FORMAT_R8},   {SKERRY_FORMAT_C2, SKERRY_FORMAT_C2},
        {SKERRY_FORMAT_C4, SKERRY_FORMAT_C4}};
    for (const auto &pair : pairs) {
        for (const float spread : {0.5f, 2.0f, 4.0f}) {
            Spec spec;
            spec.key_dim = spec.value_dim = 128;
            spec.group = 4;
            spec.rows = 16;
            spec.query_size = spread; // of logits
            Scene scene(spec, 3);
            for (int i = 0; i < 64; ++i) {
                if (i % epoch_tiles == 0) scene.add_epoch(4.0f, 0.5f);
                scene.add_tile({pair.first, pair.second, 16, 16, 0, SKERRY_TIER_FULL});
            }
            // Queries for the balanced keys: of equal size after R(q / balance).
            for (size_t i = 0; i < scene.queries.size(); ++i)
                scene.queries[i] *= scene.epochs[0].balance[i % 128];
            scene.place_rows(spec.rows);
            for (const Level &level : levels()) {
                if (!runs(level)) continue;
                for (const bool exact : {true, false}) {
                    const Errors errors = compare(scene, scene.run(*skerry::cpu_kernels(level.features), exact));
                    std::printf("{\"figure\": \"accuracy\", \"level\": \"%s\", \"keys\": %d, \"values\": %d, \"logit_size\": %.1f, "
                                "\"exact\": %s, \"out\": %.2e, \"lse\": %.2e, \"mass\": %.2e}\n",
                                level.name.c_str(), pair.first, pair.second, double(spread), exact ? "true" : "false", errors.out,
                                errors.lse, errors.mass);
                }
            }
        }
    }
}

// Centroids of one segment of 16 keys, as it leaves the recent region, in microseconds.
double centroid_time(int32_t rounds) {
    constexpr int32_t segments = 64, tokens = 16;
    Random random(11);
    std::vector<float> keys(static_cast<size_t>(segments * tokens * dim)), centroids(static_cast<size_t>(skerry::router_centroids * dim));
    for (float &x : keys)
        x = random.normal();
    uint8_t counts[skerry::router_centroids];
    std::vector<double> seconds;
    for (int32_t round = 0; round < rounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int32_t s = 0; s < segments; ++s)
            skerry::make_centroids(keys.data() + static_cast<ptrdiff_t>(s) * tokens * dim, tokens, dim, centroids.data(), counts);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return 1e6 * median(seconds) / segments;
}

void report_route(const Options &options, const skerry_kernels &kernels) {
    Spec spec;
    spec.key_dim = spec.value_dim = dim;
    spec.group = group;
    Scene codes(spec, 17);
    for (int32_t i = 0; i * epoch_tiles * 16 < options.tokens; ++i)
        codes.add_epoch(4.0f, 0.5f);
    for (int i = 0; i < 40; ++i)
        codes.add_tile({SKERRY_FORMAT_F16, SKERRY_FORMAT_F16, 16, 16, 0, SKERRY_TIER_FULL});
    Cache cache({"f16", SKERRY_FORMAT_F16, SKERRY_FORMAT_F16, 100}, options, codes);
    Step step(options, kernels, codes.epochs);
    Routing forms[] = {{options, kernels, codes.epochs, SKERRY_ROUTE_CENTROIDS}, {options, kernels, codes.epochs, SKERRY_ROUTE_PROJECTED}};
    const char *const names[] = {"route.centroids", "route.projected"};
    pin_to(0);
    Crew crew(options.threads);
    std::vector<double> routes[2], attends;
    for (int32_t round = 0; round <= options.rounds; ++round) {
        for (int form = 0; form < 2; ++form) {
            // The step streams more than a cache holds: no routing key is near when its turn comes.
            const double attend = step.run(crew, cache, 0, false, true), route = forms[form].run(crew);
            if (round == 0) continue; // first touch
            routes[form].push_back(route);
            attends.push_back(attend);
        }
    }
    // The best rounds: on a machine that others use too they say more than the median.
    const auto best = [](const std::vector<double> &x) { return *std::min_element(x.begin(), x.end()); };
    for (int form = 0; form < 2; ++form) {
        const double seconds = best(routes[form]), ratio = seconds / best(attends);
        std::printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"us\", \"ratio\": %.6g, \"of\": \"a step of f16\", "
                    "\"samples\": null, \"gate\": \"<= 0.05\", \"ok\": %s}\n",
                    names[form], 1e6 * seconds, ratio, ratio <= 0.05 ? "true" : "false");
    }
    std::printf("{\"name\": \"route.centroids.make\", \"value\": %.6g, \"unit\": \"us/segment\", \"ratio\": null, \"of\": null, "
                "\"samples\": null, \"gate\": null, \"ok\": null}\n",
                centroid_time(options.rounds));
}

int32_t number_after(int argc, char **argv, const char *name, int32_t otherwise) {
    for (int i = 1; i + 1 < argc; ++i) {
        if (std::strcmp(argv[i], name) == 0) return static_cast<int32_t>(std::atoi(argv[i + 1]));
    }
    return otherwise;
}

} // namespace

int main(int argc, char **argv) {
    Options options;
    options.level = number_after(argc, argv, "--level", options.level);
    options.tokens = number_after(argc, argv, "--tokens", options.tokens) / 16 * 16;
    options.rounds = number_after(argc, argv, "--rounds", options.rounds);
    options.threads = number_after(argc, argv, "--threads", options.threads);
    options.rows = number_after(argc, argv, "--rows", options.rows);
    options.megabytes = number_after(argc, argv, "--megabytes", options.megabytes);
    for (int i = 1; i < argc; ++i) {
        options.accuracy |= std::strcmp(argv[i], "--accuracy") == 0;
        options.route |= std::strcmp(argv[i], "--route") == 0;
        options.lowrank |= std::strcmp(argv[i], "--lowrank") == 0;
        if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) options.only = argv[i + 1];
    }
    if (options.accuracy) {
        report_accuracy();
        return 0;
    }
    options.level = std::clamp(options.level, 0, 3);
    while (!runs(levels()[static_cast<size_t>(options.level)]))
        --options.level;
    const skerry_kernels &kernels = *skerry::cpu_kernels(levels()[static_cast<size_t>(options.level)].features);
    if (options.lowrank) {
        lowrank_rows::report(kernels, options.rounds);
        return 0;
    }
    if (options.route) {
        report_route(options, kernels);
        return 0;
    }

    const Mix mixes[] = {{"f16", SKERRY_FORMAT_F16, SKERRY_FORMAT_F16, 100}, {"r2", SKERRY_FORMAT_R2, SKERRY_FORMAT_R2, 0},
                         {"r3", SKERRY_FORMAT_R3, SKERRY_FORMAT_R3, 0},      {"r3/r2", SKERRY_FORMAT_R3, SKERRY_FORMAT_R2, 0},
                         {"r4", SKERRY_FORMAT_R4, SKERRY_FORMAT_R4, 0},      {"r8", SKERRY_FORMAT_R8, SKERRY_FORMAT_R8, 0},
                         {"mixed", SKERRY_FORMAT_R2, SKERRY_FORMAT_R2, 10}};
    Spec spec;
    spec.key_dim = spec.value_dim = dim;
    spec.group = group;
    Scene codes(spec, 17);
    for (int32_t i = 0; i * epoch_tiles * 16 < options.tokens; ++i)
        codes.add_epoch(4.0f, 0.5f);
    for (const Mix &mix : mixes) {
        for (int i = 0; i < 40; ++i)
            codes.add_tile({mix.key_format, mix.value_format, 16, 16, 0, SKERRY_TIER_FULL});
    }
    std::vector<std::unique_ptr<Cache>> caches;
    for (const Mix &mix : mixes)
        caches.push_back(std::make_unique<Cache>(mix, options, codes));

    struct Run {
        std::string name;
        Cache *cache;
        uint32_t tiers;
        bool exact, masses;
        std::vector<double> seconds, to_f16;
    };
    std::vector<Run> runs_;
    for (size_t i = 0; i < caches.size(); ++i)
        runs_.push_back({mixes[i].name, caches[i].get(), 0, false, true, {}, {}});
    Cache *const mixed = caches.back().get();
    runs_.push_back({"mixed: f16 tiles alone", mixed, SKERRY_TIERS_FULL, false, true, {}, {}});
    runs_.push_back({"mixed: r2 tiles alone", mixed, SKERRY_TIERS_QUANTISED, false, true, {}, {}});
    runs_.push_back({"f16 without masses", caches[0].get(), 0, false, false, {}, {}});
    runs_.push_back({"r2 without masses", caches[1].get(), 0, false, false, {}, {}});
    runs_.push_back({"r2 exact", caches[1].get(), 0, true, true, {}, {}});

    const Arena arena(size_t(160) << 20);
    std::atomic<uint64_t> sink{0}; // keeps the probe's sums from being left out
    pin_to(0);
    Crew one(1), crew(options.threads);
    Step step(options, kernels, codes.epochs);
    std::vector<double> probe_one, probe_all, mixed_ratio, f16_to_probe;
    for (int32_t round = 0; round <= options.rounds; ++round) {
        const double alone = probe(one, arena, sink), all = probe(crew, arena, sink);
        std::vector<double> seconds;
        for (Run &run : runs_) {
            const bool is_asked = options.only.empty() || options.only == run.name;
            seconds.push_back(is_asked ? step.run(crew, *run.cache, run.tiers, run.exact, run.masses) : 0.0);
        }
        if (round == 0) continue; // first touch
        probe_one.push_back(double(arena.size) / alone);
        probe_all.push_back(double(arena.size) / all);
        for (size_t i = 0; i < runs_.size(); ++i) {
            runs_[i].seconds.push_back(seconds[i]);
            runs_[i].to_f16.push_back(seconds[i] / seconds[0]);
        }
        f16_to_probe.push_back(double(runs_[0].cache->bytes(0)) / seconds[0] / probe_all.back());
        mixed_ratio.push_back(seconds[6] / (seconds[7] + seconds[8]));
    }
    std::printf("{\"figure\": \"machine\", \"level\": \"%s\", \"tokens\": %d, \"rows\": %d, \"threads\": %d, \"rounds\": %d}\n",
                kernels.name, options.tokens, options.rows, options.threads, options.rounds);
    std::printf("{\"figure\": \"read_probe\", \"gbs_1_thread\": %.1f, \"gbs\": %.1f}\n", median(probe_one) / 1e9, median(probe_all) / 1e9);
    for (const Run &run : runs_) {
        if (run.seconds.empty() || run.seconds[0] == 0) continue;
        const double seconds = median(run.seconds), bytes = double(run.cache->bytes(run.tiers));
        std::printf("{\"figure\": \"attend\", \"format\": \"%s\", \"ms\": %.3f, \"best_ms\": %.3f, \"gbs\": %.1f, "
                    "\"times_faster_than_f16\": %.2f}\n",
                    run.name.c_str(), 1e3 * seconds, 1e3 * *std::min_element(run.seconds.begin(), run.seconds.end()), bytes / seconds / 1e9,
                    1.0 / median(run.to_f16));
    }
    if (!options.only.empty()) return 0;
    const auto best = [](const std::vector<double> &x) { return *std::min_element(x.begin(), x.end()); };
    const double best_probe = *std::max_element(probe_all.begin(), probe_all.end());
    std::printf("{\"figure\": \"gates\", \"f16_to_probe\": %.2f, \"r2_times_faster_than_f16\": %.2f, \"mixed_to_sum\": %.2f}\n",
                median(f16_to_probe), 1.0 / median(runs_[1].to_f16), median(mixed_ratio));
    // On a machine that others use too, the best round of each says more than the median.
    std::printf("{\"figure\": \"gates_of_best\", \"f16_to_probe\": %.2f, \"r2_times_faster_than_f16\": %.2f, \"mixed_to_sum\": %.2f}\n",
                double(runs_[0].cache->bytes(0)) / best(runs_[0].seconds) / best_probe, best(runs_[0].seconds) / best(runs_[1].seconds),
                best(runs_[6].seconds) / (best(runs_[7].seconds) + best(runs_[8].seconds)));
    return 0;
}
