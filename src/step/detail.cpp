// Detail: what the host stores of a window or span, and what of it a query reads.
//
// A low-rank side is a token factor and a basis. With PolicyConfig::shared_bases a side may lie on the basis of an earlier entry of its
// lane: the host then stores the record without that basis, and a fetch puts the record together, so that the device knows nothing of it.
// Entries are cut off from the end of a lane and a fork takes all of them, so the entry that a basis belongs to is there as long as any
// that uses it.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/epoch.hpp"
#include "codec/error_code.hpp"
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

int32_t side_dim(const LayerGeometry &layer, skerry_side side) { return side == SKERRY_SIDE_KEY ? layer.key_dim : layer.value_dim; }
int32_t side_rank(const HostEntry &entry, skerry_side side) {
    return side == SKERRY_SIDE_KEY ? tile_key_rank(entry.epoch) : tile_value_rank(entry.epoch);
}

bool shares(const HostEntry &entry) { return entry.basis[SKERRY_SIDE_KEY] != 0 || entry.basis[SKERRY_SIDE_VALUE] != 0; }

// Of a low-rank entry as the device has it: bytes of a side's basis, where its values begin, and where its last byte ends.
size_t basis_bytes(const LayerGeometry &layer, const HostEntry &entry, skerry_side side) {
    return l_token_offset(entry.key_format, side, side_dim(layer, side), side_rank(entry, side));
}
size_t values_at(const LayerGeometry &layer, const HostEntry &entry) {
    return value_offset(entry.key_format, layer.key_dim, entry.rows, tile_key_rank(entry.epoch));
}
size_t low_rank_end(const LayerGeometry &layer, const HostEntry &entry) {
    return values_at(layer, entry) +
           part_bytes(entry.value_format, SKERRY_SIDE_VALUE, layer.value_dim, entry.rows, 0, tile_value_rank(entry.epoch));
}

// Where the host has the basis of a side of an entry that has its own.
const uint8_t *stored_basis(const skerry_cache *cache, const LayerGeometry &layer, const HostEntry &entry, skerry_side side) {
    const uint8_t *record = cache->host.data(entry.place);
    if (side == SKERRY_SIDE_KEY) return record;
    return record + values_at(layer, entry) - (entry.basis[SKERRY_SIDE_KEY] != 0 ? basis_bytes(layer, entry, SKERRY_SIDE_KEY) : 0);
}

// visit(begin, end) for what the host stores of a low-rank record, in bytes of the device's.
template <class Visit>
void for_each_stored(const LayerGeometry &layer, const HostEntry &entry, Visit &&visit) {
    size_t done = 0;
    for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
        if (entry.basis[side] == 0) continue;
        const size_t begin = side == SKERRY_SIDE_KEY ? 0 : values_at(layer, entry);
        if (begin > done) visit(done, begin);
        done = begin + basis_bytes(layer, entry, side);
    }
    visit(done, low_rank_end(layer, entry));
}

struct Writer {
    skerry_cache *cache;
    const LayerGeometry *layer;
    const DetailRows *rows;
    const DetailScratch *scratch;
    const HostEntry *entries; // of the lane, `window` of them before this one
    uint32_t window;
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

    // One side in low rank to `part`; basis: NULL, or as skerry_factor_params has it.
    skerry_factor_result factor(skerry_format format, skerry_side side, float bound, uint8_t *part, const uint8_t *basis,
                                int32_t basis_rank) const {
        skerry_factor_params params{};
        params.dim = side_dim(*layer, side);
        params.count = rows->count;
        params.max_rank = std::min({cache->policy().detail_rank, rows->count, params.dim});
        while (bound > 0 && params.max_rank > 1 && !has_room(format, side, params.max_rank))
            --params.max_rank;
        params.error_bound = bound;
        params.format = format;
        params.side = side;
        params.basis = basis;
        params.basis_rank = basis_rank;
        skerry_factor_result result{};
        // The rest of the record is zeros whatever was tried before: whole records are compared and hashed.
        std::memset(part, 0, static_cast<size_t>(scratch->record + scratch->record_bytes - part));
        cache->kernels().factorise(&params, side == SKERRY_SIDE_KEY ? rows->keys : rows->values, part, &result, scratch->factor);
        return result;
    }

    size_t side_bytes(skerry_format format, skerry_side side, int32_t rank) const {
        return part_bytes(format, side, side_dim(*layer, side), rows->count, 0, rank);
    }
    // Under a bound the record has the size of raw detail, and what is larger than that is never stored.
    bool has_room(skerry_format format, skerry_side side, int32_t rank) const {
        return side_bytes(format, side, rank) <= side_bytes(cache->policy().store_dtype, side, 0);
    }

    // The entry on whose basis this one's side may lie: that of the lane's last low-rank detail. nullptr: none fits.
    const HostEntry *basis_for(skerry_format format, skerry_side side) const {
        for (uint32_t w = window; w > 0; --w) {
            const HostEntry *entry = &entries[w - 1];
            if (entry->place == no_place || entry->key_format != format) continue;
            const int32_t rank = side_rank(*entry, side);
            entry -= entry->basis[side];
            const bool fits = rank > 0 && rank <= std::min(rows->count, side_dim(*layer, side));
            return fits && &entries[window] - entry <= UINT16_MAX ? entry : nullptr;
        }
        return nullptr;
    }

    // Puts a side that is stored with `own` components on an earlier basis instead, where that keeps the bound and saves a unit of the
    // host, so that the record is smaller whatever its other side is. Returns the components that the part then has.
    int32_t share(skerry_format format, skerry_side side, float bound, int32_t own, uint8_t *part, HostEntry *made, float *error) const {
        const HostEntry *owner = basis_for(format, side);
        if (owner == nullptr) return own;
        const int32_t rank = side_rank(*owner, side);
        const size_t stored = side_bytes(format, side, rank) - basis_bytes(*layer, *owner, side);
        if (stored + place_bytes > side_bytes(format, side, own) || !has_room(format, side, rank)) return own;
        const float here = factor(format, side, bound, part, stored_basis(cache, *layer, *owner, side), rank).error;
        if (here > bound) {
            factor(format, side, bound, part, nullptr, 0);
            return own;
        }
        *error = here;
        made->basis[side] = static_cast<uint16_t>(&entries[window] - owner);
        return rank;
    }

    // Both sides in low rank. False: a bound was asked for, and the rank does not meet it.
    bool factorise(skerry_format format, float bound, HostEntry *made) const {
        *made = entry(format);
        int32_t ranks[2] = {0, 0};
        size_t offset = 0;
        float worst = 0;
        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
            uint8_t *part = scratch->record + offset;
            const skerry_factor_result result = factor(format, side, bound, part, nullptr, 0);
            if (bound > 0 && result.error > bound) return false;
            float error = result.error;
            ranks[side] = cache->policy().shared_bases ? share(format, side, bound, result.rank, part, made, &error) : result.rank;
            worst = std::max(worst, error);
            if (side == SKERRY_SIDE_KEY) offset = value_offset(format, layer->key_dim, rows->count, ranks[side]);
        }
        made->epoch = tile_ranks(ranks[SKERRY_SIDE_KEY], ranks[SKERRY_SIDE_VALUE]);
        made->error = error_code(static_cast<double>(worst));
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
    if (shares(entry)) {
        size_t bytes = 0;
        for_each_stored(layer, entry, [&](size_t begin, size_t end) { bytes += end - begin; });
        return round_up(bytes, place_bytes);
    }
    const int32_t capacity = detail_capacity(p, entry);
    return detail_tile_bytes(p, layer, entry) * static_cast<size_t>((entry.rows + capacity - 1) / capacity);
}

Pieces detail_pieces(const skerry_cache *cache, const LayerGeometry &layer, const HostEntry *entry) {
    const uint8_t *from = cache->host.data(entry->place);
    if (!shares(*entry)) return Pieces(from, detail_bytes(cache->policy(), layer, *entry));
    Pieces pieces;
    size_t done = 0; // of the record as the device has it
    const auto add_stored = [&](size_t end) {
        if (end == done) return;
        pieces.add(from, end - done);
        from += end - done;
        done = end;
    };
    for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
        if (entry->basis[side] == 0) continue;
        add_stored(side == SKERRY_SIDE_KEY ? 0 : values_at(layer, *entry));
        const size_t bytes = basis_bytes(layer, *entry, side);
        pieces.add(stored_basis(cache, layer, entry[-static_cast<int32_t>(entry->basis[side])], side), bytes);
        done += bytes;
    }
    add_stored(low_rank_end(layer, *entry));
    return pieces;
}

HostEntry detail_write(skerry_cache *cache, const LayerGeometry &layer, const DetailRows &rows, const uint8_t *stored_epoch, uint32_t epoch,
                       const HostEntry *entries, uint32_t window, uint64_t room, const DetailScratch &scratch, skerry_counters *counters) {
    const PolicyConfig &p = cache->policy();
    Writer writer{cache, &layer, &rows, &scratch, entries, window, {}, epoch};
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
            const double error = format == p.store_dtype ? 0 : writer.error(best); // the rows come from that dtype
            best.error = error_code(error);
            found = error <= static_cast<double>(p.detail_error);
            if (found) break;
        }
        if (!found) {
            writer.factorise(SKERRY_FORMAT_L8, p.detail_error, &low_rank);
            best = low_rank;
        }
    }
    const size_t bytes = detail_bytes(p, layer, best);
    if (bytes <= room) {
        Lock lock(cache->pool_mutex);
        best.place = cache->host.take(static_cast<uint32_t>(bytes / place_bytes));
    }
    if (best.place == no_place) {
        ++counters->details_refused;
        return best;
    }
    uint8_t *to = cache->host.data(best.place);
    if (shares(best)) {
        uint8_t *end = to + bytes;
        for_each_stored(layer, best, [&](size_t begin, size_t stop) {
            std::memcpy(to, scratch.record + begin, stop - begin);
            to += stop - begin;
        });
        std::memset(to, 0, static_cast<size_t>(end - to));
    } else {
        std::memcpy(to, scratch.record, bytes);
    }
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
