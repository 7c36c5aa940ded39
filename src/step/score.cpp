#include <algorithm>
#include <cstring>

#include "step/cache.hpp"

namespace skerry {

void lane_save(skerry_cache *cache, Sequence *seq, int32_t layer, int64_t base) {
    uint8_t &saved = seq->saved[static_cast<size_t>(layer)];
    if ((saved & saved_tiles) != 0) return;
    saved |= saved_tiles;
    const PolicyConfig &p = cache->policy();
    const LayerGeometry &geometry = cache->layers[static_cast<size_t>(layer)];
    const size_t words = static_cast<size_t>(p.score_words());
    for (int32_t h = 0; h < geometry.kv_heads; ++h) {
        const size_t index = static_cast<size_t>(geometry.lane + h);
        Lane &kept = seq->undo.lanes[index];
        const uint32_t at = kept.offset;
        skerry_tile *tiles = seq->undo.tiles.data() + at;
        std::memcpy(tiles, seq->tables.tiles.data() + at, kept.tiles * sizeof(skerry_tile));
        // The step has filled up the last tile already.
        if (kept.tiles > 0) {
            skerry_tile &last = tiles[kept.tiles - 1];
            last.count = static_cast<uint8_t>(std::min<int64_t>(last.count, base - last.first));
        }
        std::memcpy(seq->undo.words.data() + at * words, seq->tables.words.data() + at * words, kept.tiles * words * sizeof(int64_t));
        if (p.quantises()) std::memcpy(seq->undo.dormant.data() + at, seq->tables.dormant.data() + at, kept.tiles * sizeof(uint32_t));
        if (p.keeps_exact()) std::memcpy(seq->undo.exact.data() + at, seq->tables.exact.data() + at, kept.tiles * sizeof(uint32_t));
        if (p.uses_epochs()) {
            std::memcpy(seq->undo.epochs.data() + kept.epoch_offset, seq->tables.epochs.data() + kept.epoch_offset,
                        kept.epochs * epoch_table_bytes(geometry));
        }
        for (uint32_t t = 0; t < kept.tiles;) {
            const WindowSpan span = window_at(p, tiles, t, kept.tiles);
            cache->pool.retain(tiles[t].place);
            if (p.quantises() && seq->undo.dormant[at + t] != no_place) cache->pool.retain(seq->undo.dormant[at + t]);
            if (p.keeps_exact() && seq->undo.exact[at + t] != no_place) cache->exact_pool.retain(seq->undo.exact[at + t]);
            t = span.end;
        }
    }
}

void lane_fold(skerry_cache *cache, Sequence *seq, Lane &lane) {
    const size_t words = static_cast<size_t>(cache->policy().score_words());
    int64_t *pending = seq->pending.data() + lane.offset;
    int64_t *scores = seq->tables.words.data() + lane.offset * words;
    for (uint32_t t = 0; t < lane.tiles; ++t) {
        if (pending[t] == 0) continue;
        score_add(cache->scores, scores + t * words, lane.period, pending[t]);
        pending[t] = 0;
    }
}

void lane_enter_period(skerry_cache *cache, Sequence *seq, Lane &lane, uint64_t period) {
    if (lane.period >= period) return;
    lane_fold(cache, seq, lane);
    const size_t words = static_cast<size_t>(cache->policy().score_words());
    int64_t *scores = seq->tables.words.data() + lane.offset * words;
    // After 1,024 periods without a query every rule has forgotten what it will forget.
    const uint64_t first = period - lane.period > 1024 ? period - 1024 : lane.period + uint64_t{1};
    for (uint64_t k = first; k <= period; ++k) {
        for (uint32_t t = 0; t < lane.tiles; ++t)
            score_begin_period(cache->scores, scores + t * words, k);
    }
    lane.period = static_cast<uint32_t>(period);
}

int64_t window_rank(const skerry_cache *cache, const Sequence *seq, const LayerState &state, const Lane &lane, uint32_t entry,
                    int64_t length) {
    const size_t words = static_cast<size_t>(cache->policy().score_words());
    const skerry_tile &tile = seq->tables.tiles[lane.offset + entry];
    const uint64_t first = static_cast<uint64_t>(std::max<int64_t>(tile.first, state.scored_from));
    const uint64_t queries = std::min(queries_able_to_see(first, static_cast<uint64_t>(length)), state.scored);
    return score_rank(cache->scores, seq->tables.words.data() + (lane.offset + entry) * words, queries);
}

void add_query_squares(float *state, const float *queries, int32_t group, int32_t key_dim, uint64_t seen) {
    // decisions.md 2: decay constant 128 tokens; a plain mean until there are that many.
    constexpr float decayed = 0.0077820617f; // 1 - exp(-1/128)
    const float weight = std::max(decayed, 1.0f / static_cast<float>(std::min<uint64_t>(seen, 1 << 20) + 1));
    for (int32_t c = 0; c < key_dim; ++c) {
        float square = 0;
        for (int32_t g = 0; g < group; ++g)
            square += queries[g * key_dim + c] * queries[g * key_dim + c];
        square /= static_cast<float>(group);
        state[c] += (square - state[c]) * weight;
    }
}

} // namespace skerry
