// Detail: what the host stores of a window or span, and what of it a query reads.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/epoch.hpp"
#include "step/zoom.hpp"

namespace skerry {

static_assert(Arena::unit_bytes == place_bytes && Arena::unit_overhead_bytes == host_unit_overhead_bytes);

namespace {

// ||x - y|| / ||x||; 0 for zeros that came back as zeros.
double relative_error(const float *x, const float *y, size_t count) {
    double error = 0, size = 0;
    for (size_t i = 0; i < count; ++i) {
        const double difference = static_cast<double>(x[i]) - static_cast<double>(y[i]);
        error += difference * difference;
        size += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    if (error == 0) return 0;
    return size > 0 ? std::sqrt(error / size) : INFINITY;
}

struct Writer {
    skerry_cache *cache;
    const LayerGeometry *layer;
    const DetailRows *rows;
    const DetailScratch *scratch;
    skerry_epoch epoch;
    uint32_t epoch_index;

    skerry_tile tile(skerry_format format, int32_t capacity, int32_t done) const {
        skerry_tile tile{};
        tile.capacity = static_cast<uint8_t>(capacity);
        tile.key_format = tile.value_format = static_cast<uint8_t>(format);
        tile.first = static_cast<int32_t>(rows->begin) + done;
        tile.count = static_cast<uint8_t>(std::min(capacity, rows->count - done));
        return tile;
    }

    HostEntry entry(skerry_format format) const {
        HostEntry made{};
        made.place = no_place;
        made.slot = no_slot;
        made.epoch = static_cast<uint16_t>(epoch_index);
        made.key_format = made.value_format = static_cast<uint8_t>(format);
        made.rows = static_cast<uint8_t>(rows->count);
        return made;
    }

    HostEntry encode(skerry_format format) const {
        const PolicyConfig &p = cache->policy();
        const HostEntry made = entry(format);
        const int32_t capacity = detail_capacity(p, made);
        const size_t each = detail_tile_bytes(p, *layer, made);
        uint8_t *to = scratch->record;
        for (int32_t done = 0; done < rows->count; done += capacity, to += each) {
            const skerry_tile part = tile(format, capacity, done);
            skerry_code_params key = code_params(p, *layer, part, SKERRY_SIDE_KEY);
            skerry_code_params value = code_params(p, *layer, part, SKERRY_SIDE_VALUE);
            key.epoch = value.epoch = is_r_format(format) ? &epoch : nullptr;
            std::memset(to, 0, each); // whole records are compared and hashed
            cache->kernels().encode(&key, rows->keys + done * layer->key_dim, to, scratch->code.code);
            cache->kernels().encode(&value, rows->values + done * layer->value_dim, to + value_offset(format, layer->key_dim, capacity),
                                    scratch->code.code);
        }
        return made;
    }

    // Largest relative error of what was encoded last: of the keys or of the values.
    double error(const HostEntry &made) const {
        const PolicyConfig &p = cache->policy();
        const int32_t capacity = detail_capacity(p, made);
        const size_t each = detail_tile_bytes(p, *layer, made);
        double worst = 0;
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
            const bool keys = side == SKERRY_SIDE_KEY;
            const int32_t dim = keys ? layer->key_dim : layer->value_dim;
            const uint8_t *from = scratch->record + (keys ? 0 : value_offset(made.key_format, layer->key_dim, capacity));
            for (int32_t done = 0; done < rows->count; done += capacity, from += each) {
                skerry_code_params params = code_params(p, *layer, tile(made.key_format, capacity, done), side);
                params.epoch = is_r_format(made.key_format) ? &epoch : nullptr;
                cache->kernels().decode(&params, from, scratch->decoded + done * dim, scratch->code.code);
            }
            worst = std::max(worst, relative_error(keys ? rows->keys : rows->values, scratch->decoded,
                                                   static_cast<size_t>(rows->count) * static_cast<size_t>(dim)));
        }
        return worst;
    }

    // Both sides in low rank. False: a bound was asked for, and the rank does not meet it.
    bool factorise(skerry_format format, float bound, HostEntry *made) const {
        const PolicyConfig &p = cache->policy();
        *made = entry(format);
        skerry_factor_result results[2];
        size_t offset = 0;
        std::memset(scratch->record, 0, scratch->record_bytes);
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
            const bool keys = side == SKERRY_SIDE_KEY;
            skerry_factor_params params{};
            params.dim = keys ? layer->key_dim : layer->value_dim;
            params.count = rows->count;
            params.max_rank = p.detail_rank;
            params.error_bound = bound;
            params.format = format;
            params.side = side;
            cache->kernels().factorise(&params, keys ? rows->keys : rows->values, scratch->record + offset, &results[keys ? 0 : 1],
                                       scratch->factor);
            if (bound > 0 && results[keys ? 0 : 1].error > bound) return false;
            if (keys) offset = value_offset(format, layer->key_dim, rows->count, results[0].rank);
        }
        made->epoch = tile_ranks(results[0].rank, results[1].rank);
        return true;
    }
};

} // namespace

int32_t detail_capacity(const PolicyConfig &p, const HostEntry &entry) {
    if (is_l_format(entry.key_format)) return entry.rows;
    return p.spans ? r_tile_tokens : tile_capacity(entry.key_format, p.window);
}

size_t detail_tile_bytes(const PolicyConfig &p, const LayerGeometry &layer, const HostEntry &entry) {
    const bool low_rank = is_l_format(entry.key_format);
    return record_bytes(entry.key_format, entry.value_format, layer.key_dim, layer.value_dim, detail_capacity(p, entry), 0,
                        low_rank ? tile_key_rank(entry.epoch) : 0, low_rank ? tile_value_rank(entry.epoch) : 0);
}

size_t detail_bytes(const PolicyConfig &p, const LayerGeometry &layer, const HostEntry &entry) {
    const int32_t capacity = detail_capacity(p, entry);
    return detail_tile_bytes(p, layer, entry) * static_cast<size_t>((entry.rows + capacity - 1) / capacity);
}

HostEntry detail_write(skerry_cache *cache, const LayerGeometry &layer, const DetailRows &rows, const uint8_t *stored_epoch, uint32_t epoch,
                       const DetailScratch &scratch, skerry_counters *counters) {
    const PolicyConfig &p = cache->policy();
    Writer writer{cache, &layer, &rows, &scratch, {}, epoch};
    writer.epoch = epoch_decode(stored_epoch, layer.key_dim, scratch.code.mean, scratch.code.balance);
    HostEntry best{};
    if (p.detail_error == 0) {
        if (is_l_format(p.detail_format)) {
            writer.factorise(p.detail_format, 0, &best);
        } else {
            best = writer.encode(p.detail_format);
        }
    } else {
        // The store dtype keeps any bound that its own rounding keeps: it is the last resort.
        HostEntry low_rank{};
        const bool factored = writer.factorise(SKERRY_FORMAT_L8, p.detail_error, &low_rank);
        const size_t low_rank_bytes = factored ? detail_bytes(p, layer, low_rank) : SIZE_MAX;
        bool found = false;
        for (const skerry_format format : {skerry_format{SKERRY_FORMAT_R2}, skerry_format{SKERRY_FORMAT_R3},
                                           skerry_format{SKERRY_FORMAT_R4}, skerry_format{SKERRY_FORMAT_R8}, p.store_dtype}) {
            if (detail_bytes(p, layer, writer.entry(format)) >= low_rank_bytes) break;
            if (cache->kernels().supports(format, SKERRY_SIDE_KEY, layer.key_dim) == 0 ||
                cache->kernels().supports(format, SKERRY_SIDE_VALUE, layer.value_dim) == 0)
                continue;
            best = writer.encode(format);
            found = format == p.store_dtype || writer.error(best) <= static_cast<double>(p.detail_error);
            if (found) break;
        }
        if (!found) {
            writer.factorise(SKERRY_FORMAT_L8, p.detail_error, &low_rank);
            best = low_rank;
        }
    }
    const size_t bytes = detail_bytes(p, layer, best);
    {
        Lock lock(cache->pool_mutex);
        best.place = cache->host.take(static_cast<uint32_t>(bytes / place_bytes));
    }
    if (best.place == no_place) {
        ++counters->details_refused;
        return best;
    }
    std::memcpy(cache->host.data(best.place), scratch.record, bytes);
    ++counters->details_written;
    counters->detail_bytes_written += bytes;
    return best;
}

ZoomUnit zoom_unit(const skerry_cache *cache, const Sequence *seq, int32_t index) {
    const PolicyConfig &p = cache->policy();
    if (!p.spans) {
        const int64_t begin = p.sinks + int64_t{index} * p.window;
        return {begin, begin + p.window, p.window};
    }
    const TokenSpan &span = seq->zoom->spans[static_cast<size_t>(index)];
    return {span.begin, span.end, span.rows()};
}

int32_t zoom_unit_at(const skerry_cache *cache, const Sequence *seq, int64_t position) {
    const PolicyConfig &p = cache->policy();
    if (!p.spans) return window_of_position(p, position);
    const TokenSpan *begin = seq->zoom->spans.data();
    const TokenSpan *end = begin + seq->zoom->span_count;
    const TokenSpan *after = std::upper_bound(begin, end, position, [](int64_t at, const TokenSpan &span) { return at < span.begin; });
    if (after == begin || position >= after[-1].end) return -1;
    return static_cast<int32_t>(after - begin) - 1;
}

int64_t zoom_position(const skerry_cache *cache, const Sequence *seq, const skerry_tile &tile, int32_t row) {
    if (!cache->policy().spans || tile.tier != SKERRY_TIER_HOST) return tile.first + row;
    // Tile k of a span says that it begins 16 k behind the span's first position; anchors shift what is really there.
    const int32_t unit = zoom_unit_at(cache, seq, tile.first);
    const TokenSpan &span = seq->zoom->spans[static_cast<size_t>(unit)];
    int64_t left = tile.first + row - span.begin;
    for (int64_t position = span.begin; position < span.end; ++position) {
        if (span.anchors.test(static_cast<int32_t>(position - span.begin))) continue;
        if (left-- == 0) return position;
    }
    return span.end;
}

} // namespace skerry
