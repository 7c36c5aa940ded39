// Random calls on tiny caches, against a model small enough to be seen to be right: which numbers a sequence holds at
// which position, and which tier each window was said to be in. After every call the cache checks itself, every token is
// in exactly one range, bytes add up, and the floor is in full precision.
// Holds G3, G8, G9, G11, G17, P053, P064, P071, P075, P103, P120, P131, P140.

#include "support.hpp"

#include <set>
#include <stdexcept>
#include <tuple>

using namespace support;

#ifndef SKERRY_PROPERTY_OPERATIONS
#error "the build says how many operations to run"
#endif

namespace {

struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Sequence {
    skerry_seq id{};
    History history;
    int64_t length = 0;
    bool prefilling = false;
    int64_t moved = 0; // what lies below may have left the recent region before the sequence was cut
    // Tier of windows that moved, per lane; the others are full.
    std::vector<std::map<int32_t, skerry_tier>> tiers;
};

struct World {
    Rng rng;
    Setup setup;
    Context context;
    Cache cache;
    skerry_plan_info plan = make<skerry_plan_info>();
    std::vector<Sequence> seqs;
    std::vector<skerry_transition> moves;
    std::map<std::tuple<int, int, int, bool, int>, uint64_t> slot_bytes;
    skerry_error error = make<skerry_error>();
    uint64_t operations = 0, refused_steps = 0, forks = 0, truncations = 0, budgets = 0, looks = 0;
    std::vector<float> buffer[3];

    World(skerry_policy_kind kind, bool paper, uint64_t seed) : rng(seed), context(context_for(kind, seed)) {
        for (;;) {
            draw(kind, paper);
            skerry_cache *made = nullptr;
            const skerry_status status = skerry_cache_create(context.get(), setup.desc(), &made, &error);
            if (status == SKERRY_OK) {
                cache.reset(made);
                break;
            }
            // A format that a head of this size does not have, and nothing else.
            expect(status == SKERRY_ERROR_UNSUPPORTED || (paper && status == SKERRY_ERROR_ARGUMENT), "create: ", error.message);
        }
        expect(skerry_cache_get_plan(cache.get(), &plan, &error) == SKERRY_OK, "get_plan");
    }

    // Copies are made by the caller, or by threads of the library.
    static Context context_for(skerry_policy_kind kind, uint64_t seed) {
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.transfer_threads = kind == SKERRY_POLICY_SEKV ? static_cast<uint32_t>(seed / 1000 % 3) : 0;
        return make_context(&desc);
    }

    void expect(bool fine, const char *what, const char *detail = "") const {
        if (!fine) throw Broken(std::string(what) + detail + " [operation " + std::to_string(operations) + "]");
    }

    int32_t pick(int64_t low, int64_t high) { return static_cast<int32_t>(rng.between(low, high)); }

    void draw(skerry_policy_kind kind, bool paper) {
        setup = Setup{};
        const int layers = pick(1, 2);
        for (int i = 0; i < layers; ++i) {
            Layer layer;
            layer.kv_heads = pick(1, 2);
            layer.query_heads = layer.kv_heads * pick(1, 2);
            layer.key_dim = paper ? 4 * pick(1, 2) : 2 * pick(1, 4);
            layer.value_dim = paper ? 4 * pick(1, 2) : pick(1, 4) * 2;
            if (paper) layer.rotary_dims = layer.key_dim;
            if (!paper && rng.one_in(6)) layer.window = pick(1, 30);
            setup.layers.push_back(layer);
        }
        if (layers == 2 && rng.one_in(5)) {
            setup.layers[1] = setup.layers[0];
            setup.layers[1].shared_with = 0;
        }
        skerry_policy_desc &p = setup.policy;
        p.kind = kind;
        setup.cache.store_dtype = paper ? pick(2, 3) : pick(1, 3);
        setup.cache.max_sequences = pick(1, 4);
        setup.cache.max_step_tokens = pick(1, 24);
        setup.cache.staging_tokens = 64;
        if (paper) {
            p.fidelity = SKERRY_FIDELITY_PAPER;
            p.window_tokens = 4 * pick(1, 3);
            p.recent_tokens = p.window_tokens * pick(1, 2);
            p.sink_tokens = rng.one_in(4) ? SKERRY_NONE_TOKENS : pick(1, 5);
            p.quantised_share_ppm = static_cast<uint32_t>(rng.between(1, 1000000));
            if (rng.one_in(3)) p.flags |= SKERRY_POLICY_EVICT_FIRST;
        } else if (kind != SKERRY_POLICY_FULL) {
            p.window_tokens = pick(1, 16);
            p.period_tokens = pick(1, 16);
            p.recent_tokens = rng.one_in(5) ? SKERRY_NONE_TOKENS : pick(1, 12);
            p.sink_tokens = rng.one_in(5) ? SKERRY_NONE_TOKENS : pick(1, 5);
            p.score = pick(SKERRY_SCORE_DEFAULT, SKERRY_SCORE_WORST);
            p.score_queries = p.period_tokens * pick(1, 4);
            p.selection = pick(SKERRY_SELECTION_DEFAULT, SKERRY_SELECTION_PER_LAYER);
            p.prefill = rng.one_in(3) ? SKERRY_PREFILL_WHOLE : SKERRY_PREFILL_SPLIT;
            p.hysteresis_ppm = rng.one_in(2) ? 1000000 : 1500000;
            p.max_moves_ppm = rng.one_in(2) ? 1000000 : 0;
            if (kind != SKERRY_POLICY_SEKV && rng.one_in(2)) {
                p.key_format = pick(SKERRY_FORMAT_C2, SKERRY_FORMAT_C4);
                p.value_format = pick(SKERRY_FORMAT_C2, SKERRY_FORMAT_C4);
            } else {
                p.key_format = pick(SKERRY_FORMAT_R2, SKERRY_FORMAT_R8);
                p.value_format = pick(SKERRY_FORMAT_R2, SKERRY_FORMAT_R8);
            }
            if (rng.one_in(2)) p.full_format = setup.cache.store_dtype; // same numbers as the formats
        }
        if (kind >= SKERRY_POLICY_QUANTISE && kind != SKERRY_POLICY_SEKV && rng.one_in(4)) p.flags |= SKERRY_POLICY_KEEP_EXACT;
        if (kind == SKERRY_POLICY_QEVICT && rng.one_in(6)) p.flags |= SKERRY_POLICY_ONE_WAY;
        setup.budget.length_tokens = 120;
        if ((p.flags & SKERRY_POLICY_KEEP_EXACT) != 0) setup.budget.exact_bytes = static_cast<uint64_t>(rng.below(6000));
        if (kind == SKERRY_POLICY_SEKV) {
            if (rng.one_in(3)) setup.sekv.flags = SKERRY_SEKV_NO_RESIDENTS;
            setup.sekv.detail_format = rng.one_in(4) ? int32_t(setup.cache.store_dtype) : pick(SKERRY_FORMAT_R2, SKERRY_FORMAT_R8);
            setup.sekv.fetch_ppm = static_cast<uint32_t>(rng.between(1, 1000000));
            setup.sekv.refine_ppm = static_cast<uint32_t>(rng.between(1, 1000000));
            setup.sekv.keep_windows = pick(0, 6);
            setup.sekv.miss = pick(SKERRY_ZOOM_WAIT, SKERRY_ZOOM_SKIP);
            if (rng.one_in(3)) {
                setup.sekv.detail_error = static_cast<float>(rng.between(1, 95)) / 100.0f;
                if (rng.one_in(2)) setup.sekv.flags |= SKERRY_SEKV_SHARED_BASES;
            }
            if (rng.one_in(3)) setup.budget.host_bytes = static_cast<uint64_t>(rng.between(1, 6000));
        }
        if (paper || kind == SKERRY_POLICY_SEKV || !rng.one_in(4)) {
            skerry_plan_info info = make<skerry_plan_info>();
            setup.budget.bytes = 1;
            (void)!skerry_cache_plan(context.get(), setup.desc(), &info, &error);
            setup.budget.bytes = info.minimum_bytes + static_cast<uint64_t>(rng.below(rng.one_in(3) ? 100 : 12000));
        }
        setup.callbacks.user = this;
        setup.callbacks.transitions = [](void *user, const skerry_transition *moved, int32_t count) {
            auto *self = static_cast<World *>(user);
            self->moves.insert(self->moves.end(), moved, moved + count);
        };
    }

    int lanes() const {
        int count = 0;
        for (const Layer &layer : setup.layers)
            count += layer.kv_heads;
        return count;
    }
    int lane(int layer, int head) const {
        int before = 0;
        for (int i = 0; i < layer; ++i)
            before += setup.layers[static_cast<size_t>(i)].kv_heads;
        return before + head;
    }

    // ---- invariants ----

    void check_self() {
        const skerry_status status = skerry_cache_check(cache.get(), &error);
        expect(status == SKERRY_OK, "check: ", error.message);
    }

    skerry_memory_info memory() {
        skerry_memory_info m = make<skerry_memory_info>();
        expect(skerry_cache_get_memory(cache.get(), &m, &error) == SKERRY_OK, "get_memory");
        expect(m.allocated_bytes == m.pool_bytes + m.table_bytes + m.staging_bytes + m.exact_bytes + m.host_bytes + m.fixed_bytes,
               "allocated bytes are not the sum of their parts");
        expect(m.used_full_bytes + m.used_quantised_bytes + m.used_dormant_bytes + m.used_zoom_bytes <= m.used_bytes, "used bytes");
        expect(m.used_host_bytes <= m.host_bytes && m.host_bytes == plan.host_bytes, "host bytes");
        expect(setup.budget.host_bytes == 0 || m.host_bytes <= setup.budget.host_bytes, "the limit of host bytes");
        expect(m.used_exact_bytes <= m.exact_bytes, "exact bytes");
        if (m.budget_bytes != UINT64_MAX) {
            expect(m.pool_bytes + m.table_bytes <= m.budget_bytes, "the budget is exceeded");
            expect(m.allocated_bytes <= m.budget_bytes + m.staging_bytes + m.exact_bytes + m.host_bytes + m.fixed_bytes, "peak");
        }
        return m;
    }

    // Returns the bytes that the sequence refers to.
    uint64_t check_sequence(Sequence &seq, bool resync = false) {
        skerry_seq_info info = make<skerry_seq_info>();
        expect(skerry_seq_get_info(cache.get(), seq.id, &info, &error) == SKERRY_OK, "get_info");
        expect(info.length_tokens == seq.length, "length");
        expect(info.lowest_truncate >= 0 && info.lowest_truncate <= seq.length, "lowest_truncate");
        expect(info.next_event_position < 0 || info.next_event_position > seq.length || plan.prefill == SKERRY_PREFILL_WHOLE,
               "the next event is behind");
        const int64_t sinks = plan.sink_tokens;
        const int64_t window = plan.window_tokens;
        // The local zone as published is whole windows, the one of the token to come included.
        const int64_t recent = plan.kind == SKERRY_POLICY_FULL          ? seq.length
                               : plan.fidelity == SKERRY_FIDELITY_PAPER ? plan.recent_tokens - window
                                                                        : plan.recent_tokens;
        uint64_t bytes = 0;
        int64_t tokens[4] = {0, 0, 0, 0}, complete_from = 0;
        uint64_t details = 0;
        skerry_range ranges[256];
        for (int layer = 0; layer < static_cast<int>(setup.layers.size()); ++layer) {
            const Layer &shape = setup.layers[static_cast<size_t>(layer)];
            if (shape.shared_with >= 0) continue;
            for (int head = 0; head < shape.kv_heads; ++head) {
                int32_t count = 0;
                expect(skerry_seq_list_ranges(cache.get(), seq.id, layer, head, ranges, 256, &count, &error) == SKERRY_OK, "list_ranges");
                std::map<int32_t, skerry_tier> &told = seq.tiers[static_cast<size_t>(lane(layer, head))];
                int64_t end = 0;
                skerry_tier before = 0;
                for (int32_t i = 0; i < count; ++i) {
                    const skerry_range &range = ranges[i];
                    expect(range.begin == end && range.end > range.begin, "ranges leave a gap");
                    end = range.end;
                    const bool evicted = range.tier == SKERRY_TIER_EVICTED;
                    const bool full = range.tier == SKERRY_TIER_FULL;
                    const bool host = range.tier == SKERRY_TIER_HOST;
                    expect(evicted || full || range.tier == SKERRY_TIER_QUANTISED || host, "tier");
                    expect(!host || plan.kind == SKERRY_POLICY_SEKV, "tier");
                    const bool detail = (range.flags & SKERRY_RANGE_DETAIL) != 0;
                    expect(!host || detail, "a window on the host has detail there");
                    expect(!evicted || !detail, "an evicted window has detail");
                    expect(detail || (range.flags & SKERRY_RANGE_ZOOMED) == 0, "a window without detail was read");
                    details += detail;
                    expect(!(evicted && before == SKERRY_TIER_EVICTED), "runs of evicted windows are one range");
                    before = range.tier;
                    bytes += range.bytes;
                    tokens[full ? 0 : evicted ? 2 : host ? 3 : 1] += range.end - range.begin;
                    expect((evicted || host) == (range.bytes == 0), "bytes of a range");
                    expect(std::isfinite(range.score) && range.score >= 0, "score");
                    // What a query can no longer see may be gone from a sliding layer.
                    const int64_t visible = shape.window > 0 ? seq.length - shape.window + 1 : 0;
                    if (!full && range.end > visible) {
                        expect(range.end <= std::max({seq.length - recent, visible, seq.moved}),
                               "the recent region is not in full precision");
                        expect(range.begin >= sinks || range.begin < visible, "sinks are not in full precision");
                    }
                    const bool exact = full && (range.flags & SKERRY_RANGE_RECOVERED) == 0 && range.key_format <= SKERRY_FORMAT_BF16;
                    if (!exact) complete_from = std::max(complete_from, range.end);
                    if (range.begin < sinks) {
                        if (!evicted) expect(range.end <= sinks || range.end == seq.length, "sinks are a range of their own");
                        continue;
                    }
                    expect((range.begin - sinks) % window == 0, "a window is cut");
                    expect((range.end - sinks) % window == 0 || range.end == seq.length, "a window is cut");
                    if (!evicted) {
                        expect(range.end - range.begin <= window, "a range holds one window");
                        const auto key = std::tuple{lane(layer, head), int(range.key_format), int(range.value_format),
                                                    (range.flags & SKERRY_RANGE_LEDGERED) != 0, int(range.tier)};
                        const auto [place, fresh] = slot_bytes.insert({key, range.bytes});
                        expect(fresh || place->second == range.bytes, "windows of one kind differ in bytes");
                    }
                    for (int64_t p = range.begin; p < range.end; p += window) {
                        const int32_t index = static_cast<int32_t>((p - sinks) / window);
                        const auto known = told.find(index);
                        const skerry_tier was = known == told.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second;
                        if (resync) {
                            expect(was != SKERRY_TIER_EVICTED || evicted, "an evicted window came back");
                            expect(was != SKERRY_TIER_HOST || host, "a window of the host came back");
                            if (full) {
                                told.erase(index);
                            } else {
                                told[index] = range.tier;
                            }
                        } else if (!(evicted && p + window <= visible)) {
                            expect(was == range.tier, "a window is in another tier than was said");
                        }
                    }
                }
                expect(end == seq.length, "ranges do not reach the end");
            }
        }
        expect(info.full_tokens == tokens[0] && info.quantised_tokens == tokens[1] && info.evicted_tokens == tokens[2] &&
                   info.host_tokens == tokens[3],
               "tokens by tier");
        expect((info.host_bytes > 0) == (details > 0), "bytes of a sequence's detail");
        expect(info.used_bytes == bytes, "bytes of a sequence");
        bool sliding = false;
        for (const Layer &layer : setup.layers)
            sliding = sliding || layer.window > 0;
        if (!sliding) expect(info.lowest_truncate == complete_from, "lowest_truncate");
        return bytes;
    }

    void check_all(bool resync = false) {
        check_self();
        uint64_t sum = 0, most = 0;
        for (Sequence &seq : seqs) {
            const uint64_t bytes = check_sequence(seq, resync);
            sum += bytes;
            most = std::max(most, bytes);
        }
        const skerry_memory_info m = memory();
        const uint64_t used = m.used_full_bytes + m.used_quantised_bytes + m.used_dormant_bytes;
        expect(used <= sum && used >= most, "slots in use");
        skerry_counters c = make<skerry_counters>();
        expect(skerry_cache_get_counters(cache.get(), &c, &error) == SKERRY_OK, "get_counters");
        expect(c.demotions == c.demotions_written + c.demotions_ledger, "demotions");
        expect(c.promotions == c.promotions_exact + c.promotions_recovered, "promotions");
        expect(c.zooms == c.zooms_present + c.zooms_fetched + c.zooms_late, "zooms");
        expect(plan.kind == SKERRY_POLICY_SEKV || c.zooms + c.details_written + c.details_refused == 0, "another policy's counters");
    }

    uint64_t fingerprint(const Sequence &seq) {
        uint64_t value = 0;
        expect(skerry_seq_fingerprint(cache.get(), seq.id, &value, &error) == SKERRY_OK, "fingerprint");
        return value;
    }

    // ---- operations ----

    void fill(std::vector<float> &to, const std::vector<std::pair<Sequence *, int32_t>> &parts, Kind kind, int layer, int heads, int dim) {
        to.clear();
        for (const auto &[seq, count] : parts) {
            for (int64_t p = seq->length; p < seq->length + count; ++p) {
                const uint64_t number = seq->history.at(p);
                for (int head = 0; head < heads; ++head) {
                    to.resize(to.size() + static_cast<size_t>(dim));
                    fill_row(to.data() + to.size() - dim, number, kind, layer, head, p, dim);
                }
            }
        }
    }

    void compare_gathered(skerry_step *step, int seq_index, const Sequence &seq, int32_t count, int layer, int head) {
        const Layer &shape = setup.layers[static_cast<size_t>(layer)];
        const size_t room = static_cast<size_t>(seq.length + count);
        std::vector<float> keys(room * static_cast<size_t>(shape.key_dim)), values(room * static_cast<size_t>(shape.value_dim));
        std::vector<int64_t> positions(room);
        std::vector<int32_t> windows(room);
        const skerry_tensor key_tensor = tensor(keys.data(), SKERRY_DTYPE_F32, {static_cast<int64_t>(room), shape.key_dim});
        const skerry_tensor value_tensor = tensor(values.data(), SKERRY_DTYPE_F32, {static_cast<int64_t>(room), shape.value_dim});
        skerry_gather_desc desc = make<skerry_gather_desc>();
        desc.keys = &key_tensor;
        desc.values = &value_tensor;
        desc.positions = positions.data();
        desc.windows = windows.data();
        desc.seq_index = seq_index;
        desc.layer = layer;
        desc.kv_head = head;
        desc.tiers = rng.one_in(3) ? uint32_t(SKERRY_TIERS_FULL) : 0;
        int32_t tokens = 0;
        const skerry_status status = skerry_step_gather(step, &desc, &tokens, &error);
        expect(status == SKERRY_OK, "gather: ", error.message);
        std::vector<float> row(8);
        const bool raw = plan.kind <= SKERRY_POLICY_EVICT && plan.full_format == SKERRY_FORMAT_DEFAULT + plan.store_dtype;
        for (size_t i = 0; i < static_cast<size_t>(tokens); ++i) {
            expect(i == 0 || positions[i] > positions[i - 1], "gathered positions do not ascend");
            expect(positions[i] >= 0 && positions[i] < seq.length + count, "gathered position");
            // The step's own tokens, the sinks, and everything of a policy without low bits are exact.
            const bool exact = raw || positions[i] >= seq.length || windows[i] < 0;
            const auto side = [&](Kind kind, const std::vector<float> &got, int dim) {
                fill_row(row.data(), seq.history.at(positions[i]), kind, layer, head, positions[i], dim);
                for (int c = 0; c < dim; ++c) {
                    const float have = got[i * static_cast<size_t>(dim) + static_cast<size_t>(c)];
                    const float want = round_as(row[static_cast<size_t>(c)], plan.store_dtype);
                    expect(std::isfinite(have), "a gathered number is not finite");
                    if (exact) expect(have == want, "a gathered number is not what was handed in");
                    if (!exact) expect(std::fabs(have - want) < 12, "a gathered number is far from what was handed in");
                }
            };
            side(Kind::key, keys, shape.key_dim);
            side(Kind::value, values, shape.value_dim);
        }
        if (plan.kind == SKERRY_POLICY_FULL && shape.window == 0) expect(tokens == seq.length + count, "gathered tokens");
    }

    // What a host that attends itself asks for before it looks.
    void zoom(skerry_step *step, const std::vector<std::pair<Sequence *, int32_t>> &parts, int layer) {
        const Layer &shape = setup.layers[static_cast<size_t>(layer)];
        fill(buffer[0], parts, Kind::query, layer, shape.query_heads, shape.key_dim);
        const skerry_tensor queries =
            tensor(buffer[0].data(), SKERRY_DTYPE_F32, {static_cast<int64_t>(parts.size()), shape.query_heads, shape.key_dim});
        ++operations;
        ++looks;
        expect(skerry_step_zoom(step, layer, &queries, nullptr, &error) == SKERRY_OK, "zoom: ", error.message);
        check_self();
    }

    void run_step() {
        std::vector<std::pair<Sequence *, int32_t>> parts;
        bool shared = false;
        for (const Layer &layer : setup.layers)
            shared = shared || layer.shared_with >= 0;
        for (Sequence &seq : seqs) {
            if (seqs.size() > 1 && rng.one_in(2)) continue;
            if (seq.length > 110) continue;
            int64_t count = rng.one_in(3) ? pick(1, setup.cache.max_step_tokens) : 1;
            if (shared) {
                // A step over a layer that others read may not cross an event.
                skerry_seq_info info = make<skerry_seq_info>();
                expect(skerry_seq_get_info(cache.get(), seq.id, &info, &error) == SKERRY_OK, "get_info");
                if (info.next_event_position > seq.length) count = std::min(count, info.next_event_position - seq.length);
            }
            parts.push_back({&seq, static_cast<int32_t>(count)});
        }
        if (parts.empty()) return;
        std::vector<skerry_seq> ids;
        std::vector<int32_t> counts;
        std::vector<int64_t> positions;
        std::vector<uint64_t> before;
        int64_t tokens = 0;
        for (const auto &[seq, count] : parts) {
            ids.push_back(seq->id);
            counts.push_back(count);
            positions.push_back(seq->length);
            before.push_back(fingerprint(*seq));
            tokens += count;
        }
        // A host that attends itself, or looks, has to end its step where windows move.
        bool crosses = false;
        for (const auto &[seq, count] : parts) {
            skerry_seq_info info = make<skerry_seq_info>();
            expect(skerry_seq_get_info(cache.get(), seq->id, &info, &error) == SKERRY_OK, "get_info");
            const bool inside = info.next_event_position > seq->length && info.next_event_position < seq->length + count;
            crosses = crosses || inside;
        }
        skerry_step_desc desc = make<skerry_step_desc>();
        desc.flags = rng.one_in(4) ? uint32_t(SKERRY_STEP_PREFILL) : 0u;
        desc.seqs = ids.data();
        desc.token_counts = counts.data();
        desc.positions = rng.one_in(2) ? positions.data() : nullptr;
        desc.seq_count = static_cast<int32_t>(ids.size());
        // Fetched windows may stay on the device after a step that was given up.
        const auto used_bytes = [&] {
            const skerry_memory_info m = memory();
            return m.used_bytes - m.used_zoom_bytes;
        };
        const uint64_t used = used_bytes();
        skerry_step *step = nullptr;
        ++operations;
        const skerry_status begun = skerry_step_begin(cache.get(), &desc, &step, &error);
        const auto unchanged = [&](const char *what) {
            for (size_t i = 0; i < parts.size(); ++i) {
                expect(fingerprint(*parts[i].first) == before[i], "a sequence changed after ", what);
            }
            expect(used_bytes() == used, "used bytes changed after ", what);
        };
        if (begun < 0) {
            ++refused_steps;
            const bool limits = plan.kind == SKERRY_POLICY_FULL || plan.prefill == SKERRY_PREFILL_WHOLE;
            expect(begun == SKERRY_ERROR_OVER_BUDGET && limits, "begin: ", error.message);
            unchanged("a step that was refused");
            return;
        }
        const bool abort = rng.one_in(5);
        const int stop = abort ? pick(0, static_cast<int32_t>(setup.layers.size())) : -1;
        const int way = crosses ? 3 : static_cast<int>(rng.below(6)); // 0: nothing, 1 and 2: observe, else attend
        const bool single = plan.kind == SKERRY_POLICY_SEKV && tokens == static_cast<int64_t>(parts.size());
        moves.clear();
        for (int layer = 0; layer < static_cast<int>(setup.layers.size()) && layer != stop; ++layer) {
            const Layer &shape = setup.layers[static_cast<size_t>(layer)];
            if (shape.shared_with < 0) {
                fill(buffer[0], parts, Kind::key, layer, shape.kv_heads, shape.key_dim);
                fill(buffer[1], parts, Kind::value, layer, shape.kv_heads, shape.value_dim);
                const skerry_tensor keys = tensor(buffer[0].data(), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.key_dim});
                const skerry_tensor values = tensor(buffer[1].data(), SKERRY_DTYPE_F32, {tokens, shape.kv_heads, shape.value_dim});
                ++operations;
                expect(skerry_step_append(step, layer, &keys, &values, nullptr, &error) == SKERRY_OK, "append: ", error.message);
                if (rng.one_in(8)) {
                    ++operations;
                    expect(skerry_step_append(step, layer, &keys, &values, nullptr, &error) == SKERRY_ERROR_STATE, "appended twice");
                }
                check_self();
                if (single && rng.one_in(2)) zoom(step, parts, layer);
                if (!crosses && rng.one_in(6)) {
                    const int part = static_cast<int>(rng.below(static_cast<int64_t>(parts.size())));
                    const auto &[seq, count] = parts[static_cast<size_t>(part)];
                    ++operations;
                    compare_gathered(step, part, *seq, count, layer, pick(0, shape.kv_heads - 1));
                }
            }
            if (way >= 3) {
                fill(buffer[0], parts, Kind::query, layer, shape.query_heads, shape.key_dim);
                buffer[1].assign(static_cast<size_t>(tokens * shape.query_heads * shape.value_dim), NAN);
                const skerry_tensor queries = tensor(buffer[0].data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.key_dim});
                const skerry_tensor out = tensor(buffer[1].data(), SKERRY_DTYPE_F32, {tokens, shape.query_heads, shape.value_dim});
                skerry_attend_desc attend = make<skerry_attend_desc>();
                attend.queries = &queries;
                attend.out = &out;
                attend.layer = layer;
                ++operations;
                expect(skerry_step_attend(step, &attend, &error) == SKERRY_OK, "attend: ", error.message);
                for (float x : buffer[1])
                    expect(std::isfinite(x), "an output is not finite");
            } else if (way >= 1 && shape.shared_with < 0) {
                for (size_t part = 0; part < parts.size(); ++part) {
                    for (int head = 0; head < shape.kv_heads; ++head) {
                        skerry_gather_desc gather = make<skerry_gather_desc>();
                        gather.seq_index = static_cast<int32_t>(part);
                        gather.layer = layer;
                        gather.kv_head = head;
                        int32_t columns = 0;
                        expect(skerry_step_gather(step, &gather, &columns, &error) == SKERRY_OK, "gather");
                        buffer[2].resize(static_cast<size_t>(columns) * static_cast<size_t>(parts[part].second));
                        // Now and then a stretch of tokens gets nearly everything, so that windows rise and fall.
                        const int64_t lucky = rng.one_in(2) ? rng.below(columns) : -1;
                        for (size_t k = 0; k < buffer[2].size(); ++k) {
                            const int64_t column = static_cast<int64_t>(k) % columns;
                            const bool favoured = lucky >= 0 && column >= lucky && column < lucky + 4;
                            buffer[2][k] = favoured ? 0.2f : static_cast<float>(rng.below(1000)) / 4000.0f / static_cast<float>(columns);
                        }
                        skerry_observe_desc observe = make<skerry_observe_desc>();
                        observe.masses = buffer[2].data();
                        observe.token_count = columns;
                        observe.seq_index = static_cast<int32_t>(part);
                        observe.layer = layer;
                        observe.kv_head = head;
                        ++operations;
                        expect(skerry_step_observe(step, &observe, &error) == SKERRY_OK, "observe: ", error.message);
                    }
                }
            }
            check_self();
            if (rng.one_in(4)) memory();
        }
        ++operations;
        if (abort) {
            skerry_step_abort(step);
            expect(moves.empty(), "an aborted step told of moves");
            check_self();
            unchanged("an aborted step");
            return;
        }
        expect(skerry_step_commit(step, &error) == SKERRY_OK, "commit: ", error.message);
        for (const auto &[seq, count] : parts) {
            seq->length += count;
            seq->prefilling = (desc.flags & SKERRY_STEP_PREFILL) != 0;
        }
        for (const skerry_transition &move : moves) {
            Sequence *seq = nullptr;
            for (Sequence &one : seqs) {
                if (one.id.bits == move.seq.bits) seq = &one;
            }
            expect(seq != nullptr, "a move of an unknown sequence");
            std::map<int32_t, skerry_tier> &told = seq->tiers[static_cast<size_t>(lane(move.layer, move.kv_head))];
            const auto known = told.find(move.window);
            expect(move.from == (known == told.end() ? skerry_tier(SKERRY_TIER_FULL) : known->second), "a move from another tier");
            expect(move.from != SKERRY_TIER_EVICTED, "a move from nowhere");
            expect(move.from != SKERRY_TIER_HOST, "a move from the host");
            if (move.to == SKERRY_TIER_FULL) {
                told.erase(move.window);
            } else {
                told[move.window] = move.to;
            }
        }
        check_self();
        for (const auto &[seq, count] : parts)
            check_sequence(*seq);
        memory();
    }

    void forget_tail(Sequence &seq, int64_t before) {
        if (seq.length < before) seq.moved = std::min(seq.length, std::max(seq.moved, before));
        const int64_t sinks = plan.sink_tokens;
        for (auto &told : seq.tiers) {
            while (!told.empty() && sinks + int64_t(told.rbegin()->first) * plan.window_tokens >= seq.length)
                told.erase(std::prev(told.end()));
        }
    }

    void one() {
        const int64_t what = rng.below(100);
        if (seqs.empty() || (what < 6 && seqs.size() < static_cast<size_t>(plan.max_sequences))) {
            Sequence made;
            ++operations;
            expect(skerry_seq_create(cache.get(), &made.id, &error) == SKERRY_OK, "create: ", error.message);
            made.history = History(rng.next());
            made.tiers.resize(static_cast<size_t>(lanes()));
            seqs.push_back(made);
            check_all();
            return;
        }
        const size_t which = static_cast<size_t>(rng.below(static_cast<int64_t>(seqs.size())));
        Sequence &seq = seqs[which];
        if (what < 10) {
            ++operations;
            expect(skerry_seq_drop(cache.get(), seq.id, &error) == SKERRY_OK, "drop");
            expect(skerry_seq_drop(cache.get(), seq.id, &error) == SKERRY_ERROR_STALE_ID, "dropped twice");
            seqs.erase(seqs.begin() + static_cast<ptrdiff_t>(which));
            check_all();
        } else if (what < 16) {
            skerry_seq_info info = make<skerry_seq_info>();
            expect(skerry_seq_get_info(cache.get(), seq.id, &info, &error) == SKERRY_OK, "get_info");
            const int64_t length = rng.one_in(3) ? -1 : rng.between(0, seq.length);
            const int64_t target = length < 0 ? seq.length : length;
            const bool legal = target == 0 || target >= info.lowest_truncate;
            const bool room = seqs.size() < static_cast<size_t>(plan.max_sequences);
            Sequence child = seq;
            child.id = {};
            ++operations;
            const uint64_t before = fingerprint(seq);
            const skerry_status status = skerry_seq_fork(cache.get(), seq.id, length, &child.id, &error);
            expect(fingerprint(seq) == before, "a fork changed its parent");
            if (status == SKERRY_OK) {
                ++forks;
                expect(legal && room, "a fork that should be refused");
                const int64_t was = child.length;
                child.length = target;
                child.history.turn(target, rng.next());
                if (target == 0) child.prefilling = false;
                forget_tail(child, was);
                seqs.push_back(child);
            } else {
                expect((!legal && status == SKERRY_ERROR_ARGUMENT) || (!room && status == SKERRY_ERROR_TIER_FULL), "fork: ", error.message);
            }
            check_all();
        } else if (what < 24) {
            skerry_seq_info info = make<skerry_seq_info>();
            expect(skerry_seq_get_info(cache.get(), seq.id, &info, &error) == SKERRY_OK, "get_info");
            const int64_t target = rng.one_in(8) ? 0 : rng.between(std::max<int64_t>(0, info.lowest_truncate - 3), seq.length);
            const bool legal = target == 0 || target >= info.lowest_truncate;
            const skerry_status can = skerry_seq_can_truncate(cache.get(), seq.id, target, 0, &error);
            expect(can == (legal ? SKERRY_OK : SKERRY_MISS), "can_truncate");
            const uint64_t before = fingerprint(seq);
            ++operations;
            const skerry_status status = skerry_seq_truncate(cache.get(), seq.id, target, &error);
            expect(legal == (status == SKERRY_OK), "truncate: ", error.message);
            if (status == SKERRY_OK) {
                ++truncations;
                const int64_t was = seq.length;
                seq.length = target;
                seq.history.turn(target, rng.next());
                if (target == 0) seq.prefilling = false;
                forget_tail(seq, was);
            } else {
                expect(fingerprint(seq) == before, "a refused truncation changed the sequence");
            }
            check_all();
        } else if (what < 27 && setup.budget.bytes != 0) {
            skerry_budget_desc budget = setup.budget;
            budget.bytes = plan.minimum_bytes + static_cast<uint64_t>(rng.between(-20, 9000));
            const skerry_memory_info m = memory();
            ++operations;
            const skerry_status status = skerry_cache_set_budget(cache.get(), &budget, &error);
            if (status == SKERRY_OK) {
                ++budgets;
                expect(budget.bytes >= plan.minimum_bytes, "a budget below the minimum was taken");
                slot_bytes.clear();
                check_all(true);
                expect(memory().budget_bytes == budget.bytes, "budget");
            } else {
                bool collecting = false;
                for (const Sequence &one : seqs)
                    collecting = collecting || one.prefilling;
                const bool over =
                    status == SKERRY_ERROR_OVER_BUDGET && (budget.bytes < plan.minimum_bytes || plan.kind == SKERRY_POLICY_FULL);
                // The tables of what can be read from the host are made once.
                const bool other_host = plan.kind == SKERRY_POLICY_SEKV && status == SKERRY_ERROR_ARGUMENT;
                expect(over || other_host || (status == SKERRY_ERROR_STATE && collecting), "set_budget: ", error.message);
                expect(memory().allocated_bytes == m.allocated_bytes, "a refused budget changed bytes");
                check_all();
            }
        } else {
            run_step();
        }
    }
};

void run(skerry_policy_kind kind, bool paper, uint64_t parts) {
    const uint64_t total = SKERRY_PROPERTY_OPERATIONS / parts;
    uint64_t done = 0, refused_steps = 0, forks = 0, truncations = 0, budgets = 0, looks = 0;
    skerry_counters sum{};
    for (uint64_t seed = 1; done < total; ++seed) {
        const uint64_t full_seed = seed * 1000 + static_cast<uint64_t>(kind) * 2 + (paper ? 1 : 0);
        uint64_t here = 0;
        try {
            World world(kind, paper, full_seed);
            while (world.operations < 3000)
                world.one();
            world.check_all();
            while (!world.seqs.empty()) {
                world.expect(skerry_seq_drop(world.cache.get(), world.seqs.back().id, nullptr) == SKERRY_OK, "drop");
                world.seqs.pop_back();
            }
            const skerry_memory_info end = world.memory();
            world.expect(end.used_full_bytes + end.used_quantised_bytes + end.used_dormant_bytes + end.used_exact_bytes +
                                 end.used_host_bytes + end.used_zoom_bytes ==
                             0,
                         "bytes are left behind");
            here = world.operations;
            refused_steps += world.refused_steps;
            forks += world.forks;
            truncations += world.truncations;
            budgets += world.budgets;
            const skerry_counters c = counters_of(world.cache.get());
            sum.demotions_written += c.demotions_written;
            sum.demotions_ledger += c.demotions_ledger;
            sum.promotions_exact += c.promotions_exact;
            sum.promotions_recovered += c.promotions_recovered;
            sum.evictions += c.evictions;
            sum.details_written += c.details_written;
            sum.details_refused += c.details_refused;
            sum.zooms += c.zooms;
            sum.zooms_present += c.zooms_present;
            sum.zooms_fetched += c.zooms_fetched;
            looks += world.looks;
            sum.steps_committed += c.steps_committed;
            sum.steps_aborted += c.steps_aborted;
        } catch (const Broken &broken) {
            FAIL("kind ", kind, std::string(paper ? " as published, " : ", "), "seed ", full_seed, ": ", std::string(broken.what()));
        }
        done += here;
    }
    MESSAGE(done, " operations: ", sum.steps_committed, " steps, ", sum.steps_aborted, " aborted, ", refused_steps, " refused, ", forks,
            " forks, ", truncations, " truncations, ", budgets, " budgets; ", sum.demotions_written, " windows quantised, ",
            sum.demotions_ledger, " again, ", sum.promotions_exact, " promoted exactly, ", sum.promotions_recovered, " recovered, ",
            sum.evictions, " evicted");
    CHECK(done >= total);
    // What never happened was not tested; a short run under a sanitizer may miss some.
    if (total < 200000) return;
    CHECK(sum.steps_aborted > 0);
    CHECK(forks > 0);
    CHECK(truncations > 0);
    if (kind == SKERRY_POLICY_SEKV) {
        CHECK(sum.details_written > 0);
        CHECK(sum.details_refused > 0);
        CHECK(sum.zooms_present > 0);
        CHECK(sum.zooms_fetched > 0);
        CHECK(looks > 0);
        CHECK(sum.evictions > 0);
    } else if (kind >= SKERRY_POLICY_STREAMING) {
        CHECK(budgets > 0);
        CHECK(sum.evictions > 0);
    }
    if (kind >= SKERRY_POLICY_QUANTISE) CHECK(sum.demotions_written > 0);
    if (kind == SKERRY_POLICY_QEVICT) {
        CHECK(sum.demotions_ledger > 0);
        CHECK(sum.promotions_exact > 0);
        CHECK(sum.promotions_recovered > 0);
    }
}

} // namespace

TEST_CASE("random calls: no compression") { run(SKERRY_POLICY_FULL, false, 12); }
TEST_CASE("random calls: sinks and recent only") { run(SKERRY_POLICY_STREAMING, false, 12); }
TEST_CASE("random calls: eviction") { run(SKERRY_POLICY_EVICT, false, 6); }
TEST_CASE("random calls: everything in low bits") { run(SKERRY_POLICY_QUANTISE, false, 6); }
TEST_CASE("random calls: three tiers") { run(SKERRY_POLICY_QEVICT, false, 3); }
TEST_CASE("random calls: detail on the host") { run(SKERRY_POLICY_SEKV, false, 6); }
TEST_CASE("random calls: three tiers as published") { run(SKERRY_POLICY_QEVICT, true, 6); }
