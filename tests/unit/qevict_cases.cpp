// The hand-checkable numbers of QEvict (arXiv 2608.05326v1) that need arithmetic only. Cases 8, 25 and 30,
// and what a whole store adds to 6, 9, 20, 22 and 23, are tested through the public API.

#include <doctest/doctest.h>

#include "base/half.hpp"
#include "codec/channel.hpp"
#include "codec/rotary.hpp"
#include "model/qevict_paper.hpp"
#include "policy/scores.hpp"
#include "policy/window_router.hpp"
#include "stats/diagnostics.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

using namespace skerry;

namespace {

PaperBudget budget_of(double beta, uint64_t length, double q = 0.7, PaperShape shape = {}) {
    PaperBudget plan;
    const PaperFault fault =
        paper_budget(shape, ratio_from_decimal(beta), length, ratio_from_decimal(q), &plan);
    REQUIRE(fault == PaperFault::none);
    return plan;
}

struct Group {
    std::vector<uint8_t> bytes;
    std::vector<int> codes;
    std::vector<float> restored;
    float scale = 0;
    float zero = 0;
    float worst = 0;
    ChannelGrid grid;
};

Group encode(const std::vector<float> &x, GridType type = GridType::f16, uint32_t bits = 2) {
    Group g;
    g.bytes.assign(x.size() * bits / 8, 0xff);
    g.restored.assign(x.size(), -1);
    g.grid = channel_encode_group(x.data(), 1, x.size(), bits, type, g.bytes.data());
    channel_decode_group(g.bytes.data(), x.size(), bits, type, g.grid, g.restored.data(), 1);
    const auto widen = [&](uint16_t h) { return type == GridType::f16 ? f16_to_f32(h) : bf16_to_f32(h); };
    g.scale = widen(g.grid.scale);
    g.zero = widen(g.grid.zero);
    for (size_t i = 0; i < x.size(); ++i) {
        const size_t bit = i * bits;
        g.codes.push_back((g.bytes[bit / 8] >> (bit % 8)) & ((1 << bits) - 1));
        g.worst = std::max(g.worst, std::abs(x[i] - g.restored[i]));
    }
    return g;
}

using Codes = std::vector<int>;
using Bytes = std::vector<uint8_t>;
using Ids = std::set<uint32_t>;

// One layer driven by the router: real records in a write-once ledger, sources kept aside for comparison.
class PaperLayer {
public:
    explicit PaperLayer(bool promotion = true) {
        route_.full_slots = 2;
        route_.quantised_slots = 2;
        route_.promotion = promotion;
        shape_.d = 16;
    }

    // The event at `tokens` tokens: fresh windows follow from the grid, so a dropped one cannot come back.
    void event(uint64_t tokens, const std::map<uint32_t, double> &scores) {
        const uint64_t end = evictable_windows(grid_, tokens, grid_.window, LocalRule::whole_windows);
        std::map<uint32_t, WindowTier> current = tiers_;
        for (; routed_ < end; ++routed_) {
            const uint32_t id = static_cast<uint32_t>(routed_);
            current[id] = WindowTier::fresh;
            full_[id] = source(id);
        }
        std::vector<WindowCandidate> candidates;
        for (const auto &[id, tier] : current)
            candidates.push_back({to_mass(scores.at(id)), id, tier, false});
        std::vector<WindowTier> targets(candidates.size());
        std::vector<WindowSlot> scratch(candidates.size());
        moves = route_windows(route_, candidates, targets, scratch);
        tiers_.clear();
        dropped.clear();
        for (size_t i = 0; i < candidates.size(); ++i) {
            if (targets[i] != WindowTier::evicted) continue;
            dropped.insert(candidates[i].id);
            full_.erase(candidates[i].id);
            ledger_.erase(candidates[i].id);
        }
        for (size_t i = 0; i < candidates.size(); ++i) {
            const uint32_t id = candidates[i].id;
            if (targets[i] == WindowTier::evicted) continue;
            tiers_[id] = targets[i];
            if (targets[i] == WindowTier::quantised) {
                if (ledger_.count(id) == 0) ledger_[id] = write(full_.at(id));
                full_.erase(id);
            } else if (full_.count(id) == 0) {
                full_[id] = read(id);
            }
            most_entries = std::max(most_entries, ledger_.size());
        }
    }

    Ids in(WindowTier tier) const {
        Ids ids;
        for (const auto &[id, t] : tiers_) {
            if (t == tier) ids.insert(id);
        }
        return ids;
    }

    Ids entries() const {
        Ids ids;
        for (const auto &entry : ledger_)
            ids.insert(entry.first);
        return ids;
    }

    Bytes record(uint32_t id) const { return ledger_.at(id); }
    std::vector<float> payload(uint32_t id) const { return full_.at(id); }

    std::vector<float> source(uint32_t id) const {
        std::mt19937 random(id + 1);
        std::normal_distribution<float> normal;
        std::vector<float> x(size_t(2) * shape_.tokens * shape_.d);
        for (float &value : x)
            value = f16_to_f32(f32_to_f16(normal(random)));
        return x;
    }

    std::vector<float> read(uint32_t id) const {
        const size_t side = size_t(shape_.tokens) * shape_.d;
        std::vector<float> x(2 * side);
        channel_decode_keys(shape_, ledger_.at(id), x.data(), shape_.d);
        channel_decode_values(shape_, ledger_.at(id), x.data() + side, shape_.d);
        return x;
    }

    const ChannelShape &shape() const { return shape_; }

    WindowMoves moves;
    Ids dropped;
    size_t writes = 0;
    size_t most_entries = 0;

private:
    Bytes write(const std::vector<float> &x) {
        writes += 1;
        const size_t side = size_t(shape_.tokens) * shape_.d;
        Bytes bytes(channel_layout(shape_).bytes);
        channel_encode(shape_, x.data(), shape_.d, x.data() + side, shape_.d, bytes);
        return bytes;
    }

    WindowGrid grid_{5, 8};
    WindowRoute route_;
    ChannelShape shape_;
    uint64_t routed_ = 0;
    std::map<uint32_t, WindowTier> tiers_;
    std::map<uint32_t, std::vector<float>> full_;
    std::map<uint32_t, Bytes> ledger_;
};

const std::map<uint32_t, double> event_1{{0, 5}, {1, 1}, {2, 3}, {3, 3}, {4, .5}, {5, 2}};
const std::map<uint32_t, double> event_2{{0, 5.2}, {2, 3.1}, {3, 3.4}, {5, 2.0}, {6, 3.2}};
const std::map<uint32_t, double> event_3{{0, 5.3}, {2, 6}, {3, 3.5}, {6, 3.2}, {7, .1}};

// Lengths at which windows 0..5, then 6, then 7 have left a local zone of one window.
constexpr uint64_t length_1 = 5 + 7 * 8, length_2 = length_1 + 8, length_3 = length_2 + 8;

PaperLayer after_events(int events, bool promotion = true) {
    PaperLayer layer(promotion);
    layer.event(length_1, event_1);
    if (events > 1) layer.event(length_2, event_2);
    if (events > 2) layer.event(length_3, event_3);
    return layer;
}

std::vector<int8_t> lir_events(const char *text) {
    std::vector<int8_t> events;
    for (; *text != 0; ++text) {
        if (*text != ' ') events.push_back(*text == '-' ? int8_t(-1) : int8_t(*text - '0'));
    }
    return events;
}

LirCount lir(const char *text, size_t m, size_t h, bool unlimited = false) {
    LirCount count;
    lir_add({m, h, unlimited}, lir_events(text), &count);
    return count;
}

} // namespace

TEST_CASE("QEvict case 01: bytes of a window by its length") {
    const std::pair<uint32_t, uint64_t> sizes[] = {
        {4, 6272}, {8, 8448}, {16, 12800}, {32, 21504}, {64, 38912}};
    for (const auto &[window, bytes] : sizes) {
        PaperShape shape;
        shape.window = window;
        CHECK(paper_quantised_window_bytes(shape) == bytes);
        ChannelShape record;
        record.tokens = window;
        CHECK(8 * channel_layout(record).bytes == bytes);
    }
    CHECK(paper_full_window_bytes({}) == 32768);
}

TEST_CASE("QEvict case 02: 20 % of 4,352 tokens") {
    const PaperBudget plan = budget_of(.2, 4352);
    CHECK(plan.tokens == 870);
    CHECK(plan.rest == 833);
    CHECK(plan.history == 3411968);
    CHECK(plan.full_slots == 31);
    CHECK(plan.quantised_slots == 282);
    CHECK(plan.used == 3398144);
    CHECK(plan.unspent == 13824);
    CHECK(plan.readable_tokens == 2541);
    CHECK(plan.excess_tokens == 0);

    const PaperBudget two_tiers = budget_of(.2, 4352, 0);
    CHECK(two_tiers.full_slots == 104);
    CHECK(two_tiers.quantised_slots == 0);
    CHECK(two_tiers.readable_tokens == 869);

    const PaperBudget half = budget_of(.2, 4352, .5);
    CHECK(half.full_slots == 52);
    CHECK(half.quantised_slots == 201);
    CHECK(half.readable_tokens == 2061);

    PaperBudget spent = plan;
    paper_spend_remainder(&spent);
    CHECK(spent.full_slots == 31);
    CHECK(spent.quantised_slots == 283);
    CHECK(spent.unspent == 5376);
    CHECK(spent.used + spent.unspent == spent.history);
}

TEST_CASE("QEvict case 03: slots at other budgets") {
    struct Row {
        double beta;
        uint64_t length;
        uint32_t local;
        uint64_t full, quantised;
    };
    const Row rows[] = {{.05, 4352, 32, 6, 61}, {.05, 8320, 32, 14, 128}, {.2, 32128, 32, 239, 2168},
                        {.1, 642, 32, 1, 9},    {.2, 1024, 128, 2, 24},   {.2, 1280, 32, 8, 74},
                        {.2, 642, 32, 3, 30}};
    for (const Row &row : rows) {
        PaperShape shape;
        shape.local = row.local;
        const PaperBudget plan = budget_of(row.beta, row.length, .7, shape);
        CAPTURE(row.length);
        CHECK(plan.full_slots == row.full);
        CHECK(plan.quantised_slots == row.quantised);
    }
}

TEST_CASE("QEvict case 04: a budget below sinks and local zone") {
    const PaperBudget plan = budget_of(.02, 642);
    CHECK(plan.tokens == 12);
    CHECK(plan.full_slots == 0);
    CHECK(plan.quantised_slots == 0);
    CHECK(plan.readable_tokens == 37);
    CHECK(plan.excess_tokens == 25);
    CHECK(budget_of(0, 0).excess_tokens == 37);
}

TEST_CASE("QEvict case 05: physical lengths of the earlier public code") {
    const std::pair<uint64_t, uint64_t> lengths[] = {
        {2794, 634}, {2129, 513}, {1675, 427}, {2296, 544}, {3789, 821}, {2546, 586}, {3503, 767},
        {2257, 529}, {1664, 416}, {4361, 937}, {2261, 533}, {3367, 743}, {1952, 480}, {2037, 493},
        {1962, 482}, {3473, 769}, {2507, 579}, {3194, 714}, {1456, 376}, {2509, 581}};
    for (const auto &[prompt, physical] : lengths) {
        CAPTURE(prompt);
        CHECK(g1_plan({}, prompt).physical_length == physical);
    }
    const G1Plan plan = g1_plan({}, 2794);
    CHECK(plan.total == 661);
    CHECK(plan.local == 330);
    CHECK(plan.full_windows == 37);
    CHECK(plan.quantised_windows == 17);
    CHECK(plan.complete_windows == 307);
    CHECK(plan.scored_end == 2460);
}

TEST_CASE("QEvict case 06: bytes of dormant records") {
    const PaperShape shape;
    const PaperBudget plan = budget_of(.2, 4352);
    const uint64_t full = plan.full_slots, quantised = plan.quantised_slots;
    const uint64_t charged = paper_charged_bytes(shape, plan, full, quantised, 0);
    CHECK(paper_physical_bytes(shape, plan, full, quantised, full, 0) - charged == 261888);
    CHECK(charged <= plan.total);
    // The slot table bounds it: every full window dormant, every other slot active.
    CHECK(paper_physical_bytes(shape, plan, full, quantised, full, 0) ==
          37 * plan.token_bytes + full * plan.full_window_bytes +
              (full + quantised) * plan.quantised_window_bytes);
    CHECK(paper_charged_bytes(shape, plan, full, quantised, 7) - charged == 28672);
}

TEST_CASE("QEvict case 07: every token in one set, none lost at the first event") {
    const WindowGrid grid{4, 8};
    for (uint64_t tokens = 2794; tokens <= 2900; ++tokens) {
        const uint64_t evictable = evictable_windows(grid, tokens, 330, LocalRule::at_least);
        const uint64_t local = local_first(grid, tokens, 330, LocalRule::at_least);
        CHECK(local == window_first(grid, evictable));
        CHECK(tokens - local >= 330);
        CHECK(tokens - local < 330 + 8);
        std::vector<uint64_t> seen(tokens, 0);
        for (uint64_t p = 0; p < 4; ++p)
            seen[p] += 1;
        for (uint64_t j = 0; j < evictable; ++j) {
            for (uint64_t p = window_first(grid, j); p < window_first(grid, j + 1); ++p)
                seen[p] += 1;
        }
        for (uint64_t p = local; p < tokens; ++p)
            seen[p] += 1;
        CHECK(std::count(seen.begin(), seen.end(), uint64_t(1)) == int64_t(tokens));
    }
    CHECK(window_first(grid, 307) == 2460);
    CHECK(window_of(grid, 2467) == 307);
    CHECK(window_of(grid, 2468) == 308);

    // Everything below the local zone dropped: 2468..2471 are still readable here. The earlier public code
    // keeps whole windows up to (n - s - l) / w and the newest l tokens, and loses what lies between.
    const uint64_t tokens = 2802;
    const std::vector<TokenSet> tiers(evictable_windows(grid, tokens, 330, LocalRule::at_least),
                                      TokenSet::evicted);
    for (uint64_t p = 2468; p <= 2471; ++p)
        CHECK(token_set(grid, tokens, tiers, p) == TokenSet::local);
    CHECK(token_set(grid, tokens, tiers, 2467) == TokenSet::evicted);
    const uint64_t g1_windows_end = 4 + (tokens - 4 - 330) / 8 * 8, g1_local = tokens - 330;
    CHECK(g1_windows_end == 2468);
    CHECK(g1_local == 2472);
}

TEST_CASE("QEvict case 09: sinks and local windows are never candidates") {
    const WindowGrid grid;
    CHECK(window_count(grid, 4097) == 512);
    CHECK(evictable_windows(grid, 4097, 32, LocalRule::whole_windows) == 508);
    CHECK(local_first(grid, 4097, 32, LocalRule::whole_windows) == 4069);
    CHECK(4097 - local_first(grid, 4097, 32, LocalRule::whole_windows) == 28);
    CHECK(4097 - window_first(grid, 511) == 4);
    CHECK(window_count(grid, 4096) == 512);
    CHECK(4096 - local_first(grid, 4096, 32, LocalRule::whole_windows) == 27);

    const PaperBudget plan = budget_of(.2, 4352);
    for (const auto &[tokens, readable] : {std::pair<uint64_t, int64_t>{4097, 2537}, {4096, 2536}}) {
        std::vector<WindowCandidate> candidates(
            evictable_windows(grid, tokens, 32, LocalRule::whole_windows));
        for (size_t j = 0; j < candidates.size(); ++j)
            candidates[j].id = static_cast<uint32_t>(j);
        std::vector<WindowTier> targets(candidates.size());
        std::vector<WindowSlot> scratch(candidates.size());
        WindowRoute route;
        route.full_slots = plan.full_slots;
        route.quantised_slots = plan.quantised_slots;
        const WindowMoves moves = route_windows(route, candidates, targets, scratch);
        CHECK(moves.full == 31);
        CHECK(moves.quantised == 282);
        CHECK(moves.evicted == 195);

        std::vector<TokenSet> tiers;
        for (const WindowTier tier : targets) {
            tiers.push_back(tier == WindowTier::full        ? TokenSet::full
                            : tier == WindowTier::quantised ? TokenSet::quantised
                                                            : TokenSet::evicted);
        }
        std::map<TokenSet, int64_t> count;
        for (uint64_t p = 0; p < tokens; ++p)
            count[token_set(grid, tokens, tiers, p)] += 1;
        CHECK(count[TokenSet::sink] == 5);
        CHECK(count[TokenSet::full] == 248);
        CHECK(count[TokenSet::quantised] == 2256);
        CHECK(count[TokenSet::local] == int64_t(tokens) - 4069);
        CHECK(int64_t(tokens) - count[TokenSet::evicted] == readable);
        // All scores are zero: the lower ids stay.
        CHECK(targets[30] == WindowTier::full);
        CHECK(targets[31] == WindowTier::quantised);
        CHECK(targets[313] == WindowTier::evicted);
    }
}

TEST_CASE("QEvict case 10: exact codes, lowest first in the byte") {
    const Group up = encode({0, 1, 2, 3});
    CHECK(up.scale == 1);
    CHECK(up.zero == 0);
    CHECK(up.codes == Codes{0, 1, 2, 3});
    CHECK(up.bytes == Bytes{0xE4});
    CHECK(up.worst == 0);
    const Group down = encode({3, 2, 1, 0});
    CHECK(down.bytes == Bytes{0x1B});
    CHECK(down.worst == 0);
}

TEST_CASE("QEvict case 11: one and a half rounds to two") {
    const Group g = encode({-1, 0, .5f, 2});
    CHECK(g.scale == 1);
    CHECK(g.zero == -1);
    CHECK(g.codes == Codes{0, 1, 2, 3});
    CHECK(g.restored == std::vector<float>{-1, 0, 1, 2});
    CHECK(g.worst == .5f);
}

TEST_CASE("QEvict case 12: halves round to even") {
    const Group g = encode({0, .5f, 2.5f, 3});
    CHECK(g.codes == Codes{0, 0, 2, 3});
    CHECK(g.bytes == Bytes{0xE0});
}

TEST_CASE("QEvict case 13: a constant group, and a wide one") {
    const Group constant = encode({5, 5, 5, 5});
    CHECK(constant.scale == 1);
    CHECK(constant.codes == Codes{0, 0, 0, 0});
    CHECK(constant.restored == std::vector<float>{5, 5, 5, 5});
    const Group wide = encode({-2, -1.2f, .1f, 4});
    CHECK(wide.scale == 2);
    CHECK(wide.codes == Codes{0, 0, 1, 3});
    CHECK(wide.bytes == Bytes{0xD0});
    CHECK(wide.worst == doctest::Approx(.8));
}

TEST_CASE("QEvict case 14: the grid's own rounding") {
    const Group g = encode({.1f, .2f, .3f, .4f});
    CHECK(g.scale == 0.0999755859375f);
    CHECK(g.zero == 0.0999755859375f);
    CHECK(g.codes == Codes{0, 1, 2, 3});
    CHECK(g.worst == doctest::Approx(9.8e-5).epsilon(.01));
}

TEST_CASE("QEvict case 15: a key channel of eight tokens") {
    const Group g = encode({.3f, -.7f, 1.1f, 0, 2.3f, -1.4f, .9f, .2f});
    CHECK(g.scale == 1.2333984375f);
    CHECK(g.zero == -1.400390625f);
    CHECK(g.codes == Codes{1, 1, 2, 1, 3, 0, 2, 1});
    CHECK(g.bytes == Bytes{0x65, 0x63});
    const float expected[] = {-.167f, -.167f, 1.0664f, -.167f, 2.2998f, -1.4004f, 1.0664f, -.167f};
    for (size_t i = 0; i < 8; ++i)
        CHECK(g.restored[i] == doctest::Approx(expected[i]).epsilon(1e-4));
    CHECK(g.worst == doctest::Approx(.533).epsilon(1e-3));
    CHECK(g.worst <= g.scale / 2);

    // The same channel inside a record: its bytes are row 2 of the key codes, its grid entry 2 of each table.
    ChannelShape shape;
    shape.d = 4;
    std::vector<float> keys(32, 0), values(32, 0);
    const float channel[] = {.3f, -.7f, 1.1f, 0, 2.3f, -1.4f, .9f, .2f};
    for (size_t i = 0; i < 8; ++i)
        keys[4 * i + 2] = channel[i];
    Bytes record(channel_layout(shape).bytes);
    channel_encode(shape, keys.data(), 4, values.data(), 4, record);
    CHECK(record[4] == 0x65);
    CHECK(record[5] == 0x63);
    uint16_t scale = 0, zero = 0;
    std::memcpy(&scale, record.data() + channel_layout(shape).key_scales + 4, 2);
    std::memcpy(&zero, record.data() + channel_layout(shape).key_zeros + 4, 2);
    CHECK(f16_to_f32(scale) == 1.2333984375f);
    CHECK(f16_to_f32(zero) == -1.400390625f);
}

TEST_CASE("QEvict case 16: ranges that 16 bits cannot hold") {
    const Group tiny = encode({0, 1e-8f, .5e-8f, .2e-8f});
    CHECK(tiny.codes == Codes{0, 0, 0, 0});
    for (const float x : tiny.restored)
        CHECK(std::isfinite(x));
    CHECK(tiny.worst <= 1e-8f);

    const Group wide = encode({70000, -3, 1, 2}, GridType::bf16);
    for (const float x : wide.restored)
        CHECK(std::isfinite(x));
    CHECK(wide.worst <= channel_error_bound(GridType::bf16, wide.grid, 2));
    CHECK(std::isfinite(bf16_to_f32(f32_to_bf16(wide.restored[0]))));

    // The widest range of f16: three rounded-up steps pass the largest number, which the decoder holds.
    const Group full = encode({-65504, 65504, 0, 1});
    for (const float x : full.restored)
        CHECK(std::isfinite(f16_to_f32(f32_to_f16(x))));
}

TEST_CASE("QEvict case 17: un-rotating gives the key back") {
    constexpr uint32_t d = 128;
    std::vector<float> frequencies(d / 2), table(d), key(d), row(d);
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    for (const double base : {10000.0, 500000.0}) {
        for (size_t i = 0; i < d / 2; ++i)
            frequencies[i] = float(std::pow(base, -2.0 * double(i) / d));
        for (const float factor : {1.0f, float(0.1 * std::log(32.0) + 1)}) {
            for (const RotaryPairing pairing : {RotaryPairing::half_split, RotaryPairing::interleaved}) {
                const RotaryGeometry geometry{d, pairing, factor, frequencies.data()};
                REQUIRE(rotary_supports(geometry, d));
                double norm = 0, rotated = 0, worst = 0;
                for (float &x : key)
                    x = normal(random);
                row = key;
                rotary_table(geometry, 100000, table.data());
                rotary_rotate(geometry, table.data(), row.data());
                for (size_t i = 0; i < d; ++i) {
                    norm += double(key[i]) * key[i];
                    rotated += double(row[i]) * row[i];
                }
                CHECK(std::sqrt(rotated / norm) == doctest::Approx(factor));
                rotary_unrotate(geometry, table.data(), row.data());
                for (size_t i = 0; i < d; ++i)
                    worst = std::max(worst, std::abs(double(row[i]) - key[i]));
                CHECK(worst < 1e-6 * std::sqrt(norm));
            }
        }
    }
}

TEST_CASE("QEvict case 18: first event") {
    const PaperLayer layer = after_events(1);
    CHECK(layer.in(WindowTier::full) == Ids{0, 2});
    CHECK(layer.in(WindowTier::quantised) == Ids{3, 5});
    CHECK(layer.dropped == Ids{1, 4});
    CHECK(layer.entries() == Ids{3, 5});
}

TEST_CASE("QEvict case 19: a promotion, two first demotions, a drop") {
    const PaperLayer layer = after_events(2);
    CHECK(layer.in(WindowTier::full) == Ids{0, 3});
    CHECK(layer.in(WindowTier::quantised) == Ids{2, 6});
    CHECK(layer.dropped == Ids{5});
    CHECK(layer.entries() == Ids{2, 3, 6});
    CHECK(layer.moves.promoted == 1);
    CHECK(layer.moves.demoted == 1);
    CHECK(layer.writes == 4);
    CHECK(layer.payload(0) == layer.source(0));
    CHECK(layer.payload(3) == layer.read(3)); // the promoted image, not the original
    CHECK(layer.payload(3) != layer.source(3));
}

TEST_CASE("QEvict case 20: the second demotion writes nothing") {
    const Bytes first = after_events(1).record(3);
    const PaperLayer layer = after_events(3);
    CHECK(layer.in(WindowTier::full) == Ids{0, 2});
    CHECK(layer.in(WindowTier::quantised) == Ids{3, 6});
    CHECK(layer.dropped == Ids{7});
    CHECK(layer.entries() == Ids{2, 3, 6});
    CHECK(layer.record(3) == first);
    CHECK(layer.writes == 4);
    CHECK(layer.most_entries <= 4);
}

TEST_CASE("QEvict case 21: one-way variant") {
    PaperLayer layer(false);
    layer.event(length_1, event_1);
    CHECK(layer.in(WindowTier::full) == Ids{0, 2});
    // The state before event 3 is that of the two-way method, as the case is stated.
    std::vector<WindowCandidate> candidates;
    const std::pair<uint32_t, WindowTier> before[] = {{0, WindowTier::full},
                                                      {2, WindowTier::quantised},
                                                      {3, WindowTier::full},
                                                      {6, WindowTier::quantised},
                                                      {7, WindowTier::fresh}};
    for (const auto &[id, tier] : before)
        candidates.push_back({to_mass(event_3.at(id)), id, tier, false});
    std::vector<WindowTier> targets(5);
    std::vector<WindowSlot> scratch(5);
    WindowRoute route;
    route.full_slots = 2;
    route.quantised_slots = 2;
    route.promotion = false;
    const WindowMoves moves = route_windows(route, candidates, targets, scratch);
    CHECK(targets == std::vector<WindowTier>{WindowTier::full, WindowTier::quantised, WindowTier::full,
                                             WindowTier::quantised, WindowTier::evicted});
    CHECK(moves.promoted == 0);
    CHECK(moves.demoted == 0);
}

TEST_CASE("QEvict case 22: what was dropped stays dropped") {
    PaperLayer layer = after_events(3);
    std::map<uint32_t, double> scores = event_3;
    for (uint32_t id = 0; id < 40; ++id)
        scores.try_emplace(id, .01);
    for (const uint32_t id : {1u, 4u, 5u, 7u})
        scores[id] = 1e6;
    for (uint64_t tokens = length_3 + 8; tokens < length_3 + 8 * 20; tokens += 8) {
        layer.event(tokens, scores);
        for (const WindowTier tier : {WindowTier::full, WindowTier::quantised}) {
            for (const uint32_t id : {1u, 4u, 5u, 7u})
                CHECK(layer.in(tier).count(id) == 0);
        }
        CHECK(layer.most_entries <= 4);
    }
}

TEST_CASE("QEvict case 23: a window quantised out of the local zone holds its tokens") {
    const PaperLayer layer = after_events(2);
    const ChannelShape &shape = layer.shape();
    const std::vector<float> source = layer.source(6), restored = layer.read(6);
    const Bytes record = layer.record(6);
    const ChannelLayout layout = channel_layout(shape);
    const auto grid_at = [&](size_t scales, size_t zeros, size_t index) {
        ChannelGrid grid;
        std::memcpy(&grid.scale, record.data() + scales + 2 * index, 2);
        std::memcpy(&grid.zero, record.data() + zeros + 2 * index, 2);
        return grid;
    };
    const size_t side = size_t(shape.tokens) * shape.d;
    double energy = 0;
    for (size_t t = 0; t < shape.tokens; ++t) {
        for (size_t c = 0; c < shape.d; ++c) {
            const size_t i = t * shape.d + c;
            const float key_bound =
                channel_error_bound(shape.grid, grid_at(layout.key_scales, layout.key_zeros, c), 2);
            const float value_bound =
                channel_error_bound(shape.grid, grid_at(layout.value_scales, layout.value_zeros, t), 2);
            CHECK(std::abs(source[i] - restored[i]) <= key_bound);
            CHECK(std::abs(source[side + i] - restored[side + i]) <= value_bound);
            energy += double(restored[i]) * restored[i] + double(restored[side + i]) * restored[side + i];
        }
    }
    CHECK(energy > double(side));
}

TEST_CASE("QEvict case 24: events of a decode") {
    for (const auto &[first, expected] : {std::pair<uint64_t, uint64_t>{0, 3}, {8, 2}}) {
        uint64_t events = 0;
        for (uint64_t step = 0; step < 20; ++step)
            events += paper_event_due(step, 8, first);
        CHECK(events == expected);
        CHECK(paper_event_count(20, 8, first) == expected);
    }
    CHECK(paper_event_count(0, 8, 0) == 0);
    CHECK(paper_event_count(8, 8, 8) == 0);
    CHECK(paper_event_count(9, 8, 8) == 1);
}

TEST_CASE("QEvict case 26: many small masses on a large score") {
    const ScorePlan plan = make_score_plan({});
    int64_t words[1] = {to_mass(4000)};
    float single = 4000;
    for (int i = 0; i < 100000; ++i) {
        score_add(plan, words, 0, to_mass(1e-4));
        single += 1e-4f;
    }
    CHECK(std::abs(from_mass(words[0]) - 4010) < 1e-6);
    CHECK(single == 4000);
}

TEST_CASE("QEvict case 27: future missed mass") {
    const std::vector<double> mass{0, 0, 0, .5, .3, .2, .1, .6, .3};
    const MassTrace trace{mass, 3, 3};
    const std::vector<uint8_t> accessible{1, 0, 1};
    const FmmEvent events[] = {{0, 3, accessible}, {1, 3, accessible}};
    CHECK(fmm_event(trace, events[0], 2) == doctest::Approx(.45));
    const FmmMean mean = fmm_mean(trace, events, 2);
    CHECK(mean.mean == doctest::Approx(.45));
    CHECK(mean.counted == 1);
    CHECK(mean.censored == 1);
}

TEST_CASE("QEvict case 28: churn") {
    CHECK(selection_churn(std::vector<uint32_t>{1, 2, 3}, std::vector<uint32_t>{2, 3, 4}) == .5);
    CHECK(selection_churn({}, {}) == 0);
    CHECK(selection_churn(std::vector<uint32_t>{1, 2}, std::vector<uint32_t>{1, 2}) == 0);
    CHECK(selection_churn(std::vector<uint32_t>{1}, {}) == 1);
}

TEST_CASE("QEvict case 29: latent importance reactivation") {
    const LirCount a = lir("1 0000 1 00 1111", 4, 4);
    CHECK(a.eligible == 1);
    CHECK(a.rescued == 1);
    CHECK(a.time_sum == 1);
    const LirCount b = lir("1 0000 1 00 1111", 2, 2);
    CHECK(b.eligible == 2);
    CHECK(b.rescued == 1);
    const LirCount c = lir("0000000000 11", 4, 4);
    CHECK(c.eligible == 1);
    CHECK(c.rescued == 0);
    const LirCount d = lir("0000000000 11", 4, 4, true);
    CHECK(d.eligible == 1);
    CHECK(d.rescued == 1);
    CHECK(d.time_sum == 7);
    CHECK(lir("111 00000", 4, 4).eligible == 0);
    CHECK(lir("-- 1 00 - 1", 1, 1).left_windows == 1);
    CHECK(lir("-- 1 00 - 1", 1, 1).eligible == 0);
}
