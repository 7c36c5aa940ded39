// SPDX-License-Identifier: MIT
#pragma once

// Attention over tiles for 16-lane vectors; included after the header that defines Vec. Static throughout, for the reason given there.
//
// A task is cut into blocks of at most block_items pieces of 16 tokens. Per block: logits of all pieces, grouped by format and
// epoch; their maximum, once; weights; values. A row's numbers come from operations on its own lanes and accumulators in list
// order, so neither the other rows nor tokens that it does not see change a bit of them.
//
// Full, C and L formats add up to `plain`, R formats to `rotated`, which is rotated back once per task. Queries and weights meet the
// factors of an L record in the space of its components: logits = token factor (basis q), and the sum of its values = basis (token factor
// w).

#include "codec/layout.hpp"
#include "codec/rotation.hpp"
#include "cpu/x86/lowrank_codes.hpp"

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

constexpr int block_items = 64;
constexpr int lanes = 16;
constexpr int row_logits = block_items * lanes; // logits of one query vector
constexpr int chunk_heads = 64;                 // query vectors handled together, unless one row has more
constexpr float lowest = -0x1.fffffep+127f;
constexpr int sign_table_size = 512;

struct SignTable {
    float sign[sign_table_size];
};

constexpr SignTable make_sign_table() {
    SignTable table{};
    for (int i = 0; i < sign_table_size; ++i)
        table.sign[i] = rotation_flips(i) ? -1.0f : 1.0f;
    return table;
}

constexpr SignTable sign_table = make_sign_table();

// How numbers of a part lie when a dot product reads them.
enum Element { element_f32, element_f16, element_bf16 };

struct Item {
    const uint8_t *key;
    const uint8_t *value;
    int32_t tile;  // index in the task
    int32_t first; // position of the first of its tokens
    int16_t next;
    int16_t sub; // which 16 tokens of a C or L record
    uint8_t count;
    uint8_t begin, end; // tokens that every row sees, when is_uniform
    bool is_uniform;
};

struct Bucket {
    uint64_t key;
    skerry_format key_format;
    skerry_format value_format;
    int32_t epoch;
    int32_t capacity;
    int16_t head, tail;
    int16_t begin, end; // in `order`
    // Bytes from the start of a record, and of the scales of R formats from the start of their part.
    ptrdiff_t values, key_scales, value_scales;
    ptrdiff_t piece_values;       // full formats: bytes of the values of 16 tokens
    int32_t key_rank, value_rank; // L formats
};

struct Work {
    const skerry_attend_params *params;
    const skerry_attend_task *task;
    int key_dim, value_dim, key_pad, value_pad;
    int group, row0, rows, heads; // of this chunk of rows
    const float *queries;
    const int32_t *positions;

    float *logits;   // [heads][block_items][lanes], later weights
    float *tile_max; // [heads][block_items]
    float *tile_sum;
    float *shrink; // [heads][block_items]: exp(tile_max - max)
    float *plain;  // [heads][value_pad]
    float *rotated;
    float *max; // [heads]
    float *sum;
    float *centre;        // [heads]: what integer codes put too much into every rotated channel
    float *query_mean;    // [heads]: q . mean * scale
    float *query_largest; // [heads]: magnitude in `prepared`
    float *prepared;      // [heads][key_pad]: R(q / balance)
    float *fold;          // [key_pad]
    float *keys;          // [2][key_pad][lanes], tiles that are unpacked first
    float *values;        // [lanes][value_pad]
    float *scales;        // [block_items][lanes]: of values of R formats
#ifdef SKERRY_INTEGER
    int8_t *query_bytes;   // [heads][2][key_pad]: high and low bytes
    float *query_scale;    // [heads]
    float *query_centre;   // [heads]
    uint8_t *weight_bytes; // [2][heads][block_items][lanes], the low bytes last
    float *weight_step;    // [heads][block_items]
#endif

    int items, buckets;
    bool rotated_used;
    Item item[block_items];
    Bucket bucket[block_items];
    int16_t order[block_items];
};

size_t pad_to(int n, int step) { return static_cast<size_t>((n + step - 1) / step) * static_cast<size_t>(step); }

struct Carver {
    uint8_t *base;
    size_t used;
    template <typename T>
    T *take(size_t count) {
        T *const at = base == nullptr ? nullptr : reinterpret_cast<T *>(base + used);
        used += round_up(count * sizeof(T), place_bytes);
        return at;
    }
};

int heads_at_once(int group, int rows) {
    const int fit = chunk_heads / group > 0 ? chunk_heads / group : 1;
    return group * (rows < fit ? rows : fit);
}

// Sizes the scratch (memory null) or hands it out.
size_t carve(Work &w, void *memory, int heads) {
    Carver carver{static_cast<uint8_t *>(memory), 0};
    const size_t n = static_cast<size_t>(heads);
    w.key_pad = static_cast<int>(pad_to(w.key_dim, 64));
    // A vector may be stored at any channel below value_dim.
    w.value_pad = static_cast<int>(pad_to(w.value_dim, 64)) + lanes;
    w.logits = carver.take<float>(n * row_logits);
    w.tile_max = carver.take<float>(n * block_items);
    w.tile_sum = carver.take<float>(n * block_items);
    w.shrink = carver.take<float>(n * block_items);
    w.plain = carver.take<float>(n * static_cast<size_t>(w.value_pad));
    w.rotated = carver.take<float>(n * static_cast<size_t>(w.value_pad));
    w.max = carver.take<float>(n);
    w.sum = carver.take<float>(n);
    w.centre = carver.take<float>(n);
    w.query_mean = carver.take<float>(n);
    w.query_largest = carver.take<float>(n);
    w.prepared = carver.take<float>(n * static_cast<size_t>(w.key_pad));
    w.fold = carver.take<float>(static_cast<size_t>(w.key_pad));
    w.keys = carver.take<float>(2 * lanes * static_cast<size_t>(w.key_pad));
    w.values = carver.take<float>(lanes * static_cast<size_t>(w.value_pad));
    w.scales = carver.take<float>(row_logits);
#ifdef SKERRY_INTEGER
    w.query_bytes = carver.take<int8_t>(2 * n * static_cast<size_t>(w.key_pad));
    w.query_scale = carver.take<float>(n);
    w.query_centre = carver.take<float>(n);
    w.weight_bytes = carver.take<uint8_t>(2 * n * row_logits);
    w.weight_step = carver.take<float>(n * block_items);
#endif
    return carver.used;
}

size_t engine_scratch(const skerry_attend_params *params, int32_t rows) {
    Work w;
    w.key_dim = params->key_dim;
    w.value_dim = params->value_dim;
    return carve(w, nullptr, heads_at_once(params->group, rows));
}

const uint8_t *record_of(const skerry_pool_view &pool, uint32_t place) {
    return pool.chunks[place >> pool.chunk_shift] + static_cast<size_t>(place & ((1u << pool.chunk_shift) - 1u)) * place_bytes;
}

int32_t clamp_int(int64_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : static_cast<int32_t>(x); }

// Tokens [begin, end) of `count` from position `first` on that a row at `position` sees.
void visible(int32_t position, int32_t window, int32_t first, int32_t count, int &begin, int &end) {
    const int64_t upto = int64_t(position) - first + 1;
    end = clamp_int(upto, 0, count);
    begin = window > 0 ? clamp_int(upto - window, 0, end) : 0;
}

// ---------------------------------------------------------------------------------------------------------------- planning

// Flattened, lest a copy of a shared inline function is left here for the linker to find.
[[gnu::flatten]] Bucket &bucket_of(Work &w, const skerry_tile &tile) {
    const bool has_l = is_l_format(tile.key_format) || is_l_format(tile.value_format);
    const bool has_epoch = has_l || is_r_format(tile.key_format) || is_r_format(tile.value_format);
    const uint64_t key =
        uint64_t(has_epoch ? tile.epoch : 0) << 32 | uint64_t(tile.key_format) << 16 | uint64_t(tile.value_format) << 8 | tile.capacity;
    for (int b = w.buckets - 1; b >= 0; --b) {
        if (w.bucket[b].key == key) return w.bucket[b];
    }
    Bucket &fresh = w.bucket[w.buckets++];
    fresh.key = key;
    fresh.key_format = tile.key_format;
    fresh.value_format = tile.value_format;
    fresh.epoch = tile.epoch;
    fresh.capacity = tile.capacity;
    fresh.head = fresh.tail = -1;
    fresh.key_rank = has_l ? tile_key_rank(tile.epoch) : 0;
    fresh.value_rank = has_l ? tile_value_rank(tile.epoch) : 0;
    fresh.values = static_cast<ptrdiff_t>(value_offset(tile.key_format, w.key_dim, tile.capacity, fresh.key_rank));
    fresh.key_scales = fresh.value_scales = fresh.piece_values = 0;
    if (is_full_format(tile.value_format)) {
        fresh.piece_values = static_cast<ptrdiff_t>(lanes * w.value_dim) * format_bits(tile.value_format) / 8;
    }
    if (is_r_format(tile.key_format)) {
        fresh.key_scales = static_cast<ptrdiff_t>(r_scale_offset(tile.key_format, SKERRY_SIDE_KEY, w.key_dim, tile.capacity));
    }
    if (is_r_format(tile.value_format)) {
        fresh.value_scales = static_cast<ptrdiff_t>(r_scale_offset(tile.value_format, SKERRY_SIDE_VALUE, w.value_dim, tile.capacity));
    }
    return fresh;
}

void add_item(Work &w, const skerry_tile &tile, const uint8_t *record, int32_t index, int sub) {
    const int32_t first = tile.first + lanes * sub, window = w.params->sliding_window;
    const int count = tile.count - lanes * sub < lanes ? tile.count - lanes * sub : lanes;
    // Positions ascend: what the first and the last row see alike, all see.
    int begin = 0, end = count;
    bool is_uniform = true;
    if (window > 0 || int64_t(first) + count - 1 > w.positions[0]) {
        int high_begin, high_end;
        visible(w.positions[0], window, first, count, begin, end);
        visible(w.positions[w.rows - 1], window, first, count, high_begin, high_end);
        is_uniform = begin == high_begin && end == high_end;
        if (is_uniform && begin >= end) return;
    }
    Bucket &bucket = bucket_of(w, tile);
    const int16_t at = static_cast<int16_t>(w.items++);
    Item &item = w.item[at];
    item.key = record;
    item.value = record + bucket.values + bucket.piece_values * sub;
    item.tile = index;
    item.first = first;
    item.next = -1;
    item.sub = static_cast<int16_t>(sub);
    item.count = static_cast<uint8_t>(count);
    item.begin = static_cast<uint8_t>(begin);
    item.end = static_cast<uint8_t>(end);
    item.is_uniform = is_uniform;
    if (bucket.tail < 0) {
        bucket.head = at;
    } else {
        w.item[bucket.tail].next = at;
    }
    bucket.tail = at;
}

int pieces(const skerry_tile &tile) { return (tile.count + lanes - 1) / lanes; }

// Takes tiles from `index` on while their pieces fit, seen or not: where a block ends depends on the list alone.
int32_t plan_block(Work &w, int32_t index) {
    const skerry_attend_task &task = *w.task;
    w.items = w.buckets = 0;
    int taken = 0;
    for (; index < task.tile_end; ++index) {
        const skerry_tile &tile = task.tiles[index];
        taken += pieces(tile);
        if (taken > block_items) break;
        const uint32_t tiers = w.params->tiers;
        if (tiers != 0 && (tiers >> tile.tier & 1u) == 0) continue;
        const uint8_t *const record = record_of(w.params->pool, tile.place);
        for (int sub = 0; sub < pieces(tile); ++sub)
            add_item(w, tile, record, index - task.tile_begin, sub);
    }
    // In order of their keys, not of appearance, which tokens that a row does not see could change.
    int16_t sorted[block_items];
    for (int b = 0; b < w.buckets; ++b) {
        int at = b;
        for (; at > 0 && w.bucket[sorted[at - 1]].key > w.bucket[b].key; --at)
            sorted[at] = sorted[at - 1];
        sorted[at] = static_cast<int16_t>(b);
    }
    Bucket moved[block_items];
    int n = 0;
    for (int b = 0; b < w.buckets; ++b) {
        moved[b] = w.bucket[sorted[b]];
        moved[b].begin = static_cast<int16_t>(n);
        for (int16_t i = moved[b].head; i >= 0; i = w.item[i].next)
            w.order[n++] = i;
        moved[b].end = static_cast<int16_t>(n);
    }
    std::memcpy(w.bucket, moved, sizeof(Bucket) * static_cast<size_t>(w.buckets));
    return index;
}

// ---------------------------------------------------------------------------------------------------------------- rotation

template <int vectors>
void hadamard_registers(float *row) {
    Vec x[vectors];
    for (int i = 0; i < vectors; ++i)
        x[i] = v_butterfly(v_load(row + lanes * i), lanes);
    for (int distance = 1; distance < vectors; distance *= 2) {
        for (int i = 0; i < vectors; ++i) {
            if ((i & distance) != 0) continue;
            const Vec a = x[i], b = x[i + distance];
            x[i] = v_add(a, b);
            x[i + distance] = v_sub(a, b);
        }
    }
    for (int i = 0; i < vectors; ++i)
        v_store(row + lanes * i, x[i]);
}

// Butterflies of hadamard_blocks() over a row that is padded to whole vectors.
void hadamard(float *row, int dim) {
    const int n = hadamard_size(dim);
    if (n == 1) return;
    if (n <= lanes) {
        for (int i = 0; i < dim; i += lanes)
            v_store(row + i, v_butterfly(v_load(row + i), n));
        return;
    }
    const int step = n < 8 * lanes ? n : 8 * lanes;
    for (int i = 0; i < dim; i += step) {
        if (step == 8 * lanes) hadamard_registers<8>(row + i);
        if (step == 4 * lanes) hadamard_registers<4>(row + i);
        if (step == 2 * lanes) hadamard_registers<2>(row + i);
    }
    for (int distance = 8 * lanes; distance < n; distance *= 2) {
        for (int base = 0; base < dim; base += 2 * distance) {
            for (int i = base; i < base + distance; i += lanes) {
                const Vec a = v_load(row + i), b = v_load(row + i + distance);
                v_store(row + i, v_add(a, b));
                v_store(row + i + distance, v_sub(a, b));
            }
        }
    }
}

// signs * norm of the rotation, lanes of a padded row.
Vec signed_norm(int channel, float norm, int n) {
    if (n == 1) return v_set1(1.0f);
    if (channel + lanes <= sign_table_size) return v_mul(v_load(sign_table.sign + channel), v_set1(norm));
    float sign[lanes];
    for (int i = 0; i < lanes; ++i)
        sign[i] = rotation_flips(channel + i) ? -norm : norm;
    return v_load(sign);
}

// A row that one transform of `vectors` registers covers.
template <int vectors>
void prepare_row(Work &w, const float *query, const float *mean, int h) {
    float *const prepared = w.prepared + static_cast<ptrdiff_t>(h) * w.key_pad;
    Vec x[vectors], dot = v_zero(), largest = v_zero();
    for (int i = 0; i < vectors; ++i) {
        const Vec q = v_load(query + lanes * i);
        dot = v_fma(q, v_load(mean + lanes * i), dot);
        x[i] = v_butterfly(v_mul(q, v_load(w.fold + lanes * i)), lanes);
    }
    for (int distance = 1; distance < vectors; distance *= 2) {
        for (int i = 0; i < vectors; ++i) {
            if ((i & distance) != 0) continue;
            const Vec a = x[i], b = x[i + distance];
            x[i] = v_add(a, b);
            x[i + distance] = v_sub(a, b);
        }
    }
    for (int i = 0; i < vectors; ++i) {
        largest = v_max(largest, v_abs(x[i]));
        v_store(prepared + lanes * i, x[i]);
    }
    w.query_mean[h] = v_sum(dot) * w.params->scale;
    w.query_largest[h] = v_largest(largest);
}

void prepare_row_of(Work &w, const float *query, const float *mean, int h) {
    const int dim = w.key_dim;
    float *const prepared = w.prepared + static_cast<ptrdiff_t>(h) * w.key_pad;
    Vec dot = v_zero(), largest = v_zero();
    for (int i = 0; i < dim; i += lanes) {
        const int rest = dim - i < lanes ? dim - i : lanes;
        const Vec q = v_load_n(query + i, rest);
        dot = v_fma(q, v_load_n(mean + i, rest), dot);
        v_store(prepared + i, v_mul(q, v_load(w.fold + i)));
    }
    hadamard(prepared, dim);
    for (int i = 0; i < dim; i += lanes)
        largest = v_max(largest, v_abs(v_load(prepared + i)));
    w.query_mean[h] = v_sum(dot) * w.params->scale;
    w.query_largest[h] = v_largest(largest);
}

void prepare_queries(Work &w, const skerry_epoch &epoch) {
    const int dim = w.key_dim, n = hadamard_size(dim);
    const float norm = rotation_norm(dim);
    for (int i = 0; i < dim; i += lanes) {
        const int rest = dim - i < lanes ? dim - i : lanes;
        const Vec balance = v_keep(v_load_n(epoch.balance + i, rest), 0, rest, v_set1(1.0f));
        v_store(w.fold + i, v_div(signed_norm(i, norm, n), balance));
    }
    for (int h = 0; h < w.heads; ++h) {
        const float *const query = w.queries + static_cast<ptrdiff_t>(h) * dim;
        if (dim == n && n == 8 * lanes) {
            prepare_row<8>(w, query, epoch.mean, h);
        } else if (dim == n && n == 4 * lanes) {
            prepare_row<4>(w, query, epoch.mean, h);
        } else {
            prepare_row_of(w, query, epoch.mean, h);
        }
    }
}

// --------------------------------------------------------------------------------------------------------------- unpacking

Element element_of(skerry_format format) {
    return format == SKERRY_FORMAT_F16 ? element_f16 : format == SKERRY_FORMAT_BF16 ? element_bf16 : element_f32;
}

template <Element element>
Vec load_element(const uint8_t *at) {
    if constexpr (element == element_f16) return v_load_f16(at);
    if constexpr (element == element_bf16) return v_load_bf16(at);
    return v_load(reinterpret_cast<const float *>(at));
}

Vec load_element_n(Element element, const uint8_t *at, int n) {
    if (element == element_f16) return v_load_f16_n(at, n);
    if (element == element_bf16) return v_load_bf16_n(at, n);
    return v_load_n(reinterpret_cast<const float *>(at), n);
}

ptrdiff_t element_bytes(Element element) { return element == element_f32 ? 4 : 2; }

// rows x columns of a full part, its rows `stride` elements apart, to f32 rows of `pad`.
void unpack_full(Element element, const uint8_t *part, int rows, int columns, int stride, float *to, int pad) {
    const ptrdiff_t size = element_bytes(element);
    for (int r = 0; r < rows; ++r) {
        const uint8_t *const row = part + size * (static_cast<ptrdiff_t>(r) * stride);
        for (int c = 0; c < columns; c += lanes) {
            const int n = columns - c < lanes ? columns - c : lanes;
            v_store(to + static_cast<ptrdiff_t>(r) * pad + c, load_element_n(element, row + size * c, n));
        }
    }
}

// One plane of an R part: code * weight + start, or on top of what is there.
void unpack_r_key_plane(const uint8_t *plane, int bits, int dim, int capacity, float weight, float start, bool is_first, float *keys) {
    const int n = 8 / bits, lines = (dim + 4 * n - 1) / (4 * n);
    const IVec mask = i_set1((1u << bits) - 1u);
    const Vec factor = v_set1(weight), offset = v_set1(start);
    for (int line = 0; line < lines; ++line) {
        const IVec words = i_load_n(plane + 4 * static_cast<ptrdiff_t>(line) * capacity, capacity);
        for (int j = 0; j < n; ++j) {
            for (int b = 0; b < 4; ++b) {
                float *const to = keys + static_cast<ptrdiff_t>(4 * n * line + 4 * j + b) * lanes;
                const Vec code = i_field(words, 8 * b + bits * j, mask);
                v_store(to, v_fma(code, factor, is_first ? offset : v_load(to)));
            }
        }
    }
}

void unpack_r_value_plane(const uint8_t *plane, int bits, int dim, int capacity, float weight, float start, bool is_first, float *values,
                          int pad) {
    const int n = 8 / bits, quads = (capacity + 3) / 4;
    const IVec mask = i_set1((1u << bits) - 1u);
    const Vec factor = v_set1(weight), offset = v_set1(start);
    for (int channel = 0; channel < dim; channel += 16 * n) {
        const int channels = dim - channel < 16 * n ? dim - channel : 16 * n, words = (channels + n - 1) / n;
        for (int quad = 0; quad < quads; ++quad) {
            const IVec word = i_load_n(plane, words);
            plane += 4 * words;
            // Fields ascend, so that what a short vector writes too far is written over; where it is added, it is 0.
            for (int b = 0; b < 4; ++b) {
                for (int j = 0; j < n && words * j < channels; ++j) {
                    float *const to = values + static_cast<ptrdiff_t>(4 * quad + b) * pad + channel + words * j;
                    const Vec code = i_field(word, 8 * b + bits * j, mask);
                    v_store(to, v_fma(code, factor, is_first ? offset : v_load(to)));
                }
            }
        }
    }
}

float centre_of(skerry_format format) { return 0.5f * static_cast<float>((1 << format_bits(format)) - 1); }

// Levels in rotated space, without scales: keys [key_dim][lanes], values [lanes][pad].
void unpack_r_keys(skerry_format format, const uint8_t *part, int dim, int capacity, float *keys) {
    const int bits = format == SKERRY_FORMAT_R3 ? 2 : format_bits(format);
    unpack_r_key_plane(part, bits, dim, capacity, 1.0f, -centre_of(format), true, keys);
    if (format != SKERRY_FORMAT_R3) return;
    unpack_r_key_plane(part + r_plane_bytes(2, SKERRY_SIDE_KEY, dim, capacity), 1, dim, capacity, 4.0f, 0.0f, false, keys);
}

void unpack_r_values(skerry_format format, const uint8_t *part, int dim, int capacity, float *values, int pad) {
    const int bits = format == SKERRY_FORMAT_R3 ? 2 : format_bits(format);
    unpack_r_value_plane(part, bits, dim, capacity, 1.0f, -centre_of(format), true, values, pad);
    if (format != SKERRY_FORMAT_R3) return;
    unpack_r_value_plane(part + r_plane_bytes(2, SKERRY_SIDE_VALUE, dim, capacity), 1, dim, capacity, 4.0f, 0.0f, false, values, pad);
}

// Tokens that are not there weigh nothing, whatever their scale says.
Vec load_scales(const uint8_t *scales, int count) { return count == lanes ? v_load_f16(scales) : v_load_f16_n(scales, count); }

// Sixteen codes of `bits` bits (2 or 4), the first in the low bits of `bytes`. Reads eight bytes where `end` allows it: the grids
// that follow the codes of a part are nearly always long enough.
Vec code_lanes(const uint8_t *bytes, int bits, const uint8_t *end) {
    uint32_t word[2] = {0, 0};
    if (end - bytes >= 8) {
        std::memcpy(word, bytes, 8);
    } else {
        std::memcpy(word, bytes, static_cast<size_t>(end - bytes));
    }
    const IVec mask = i_set1((1u << bits) - 1u), lane = i_lanes(0);
    if (bits == 2) return i_to_f32(i_and(i_right_by(i_set1(word[0]), i_left<1>(lane)), mask));
    // Shifts by 32 and more give 0, those of the other half included.
    const Vec low = i_to_f32(i_and(i_right_by(i_set1(word[0]), i_left<2>(lane)), mask));
    return v_add(low, i_to_f32(i_and(i_right_by(i_set1(word[1]), i_left<2>(i_lanes(-8))), mask)));
}

Vec load_grid(const uint8_t *at, int n, bool is_bf16) { return is_bf16 ? v_load_bf16_n(at, n) : v_load_f16_n(at, n); }

Vec held(Vec x, bool is_bf16) {
    const Vec limit = v_set1(is_bf16 ? 0x1.fep127f : 65504.0f);
    return v_max(v_min(x, limit), v_sub(v_zero(), limit));
}

void sine_cosine(Vec angle, Vec &sine, Vec &cosine) {
    Vec r;
    IVec n;
    v_reduce_angle(angle, &r, &n);
    const Vec square = v_mul(r, r);
    Vec s = v_set1(0x1.71de3ap-19f); // Taylor series: |r| <= pi/4 leaves 2e-9 beyond the last terms
    s = v_fma(s, square, v_set1(-0x1.a01a02p-13f));
    s = v_fma(s, square, v_set1(0x1.111112p-7f));
    s = v_fma(s, square, v_set1(-0x1.555556p-3f));
    s = v_fma(v_mul(s, square), r, r);
    Vec c = v_set1(-0x1.27e4fcp-22f);
    c = v_fma(c, square, v_set1(0x1.a01a02p-16f));
    c = v_fma(c, square, v_set1(-0x1.6c16c2p-10f));
    c = v_fma(c, square, v_set1(0x1.555556p-5f));
    c = v_fma(c, square, v_set1(-0.5f));
    c = v_fma(c, square, v_set1(1.0f));
    const Vec swapped_s = v_choose(n, 1, c, s), swapped_c = v_choose(n, 1, s, c);
    sine = v_flip_if(swapped_s, n, 2);
    cosine = v_flip_if(swapped_c, i_add(n, i_set1(1)), 2);
}

void rotate_keys(const skerry_attend_params &params, int32_t position, float *keys) {
    const int half = params.rotary_dims / 2;
    const bool is_split = params.rotary_pairing != SKERRY_ROTARY_INTERLEAVED;
    const Vec positions = i_to_f32(i_lanes(position)), factor = v_set1(params.attention_factor);
    for (int i = 0; i < half; ++i) {
        float *const a = keys + lanes * (is_split ? i : 2 * i), *const b = keys + lanes * (is_split ? i + half : 2 * i + 1);
        Vec sine, cosine;
        sine_cosine(v_mul(positions, v_set1(params.inverse_frequencies[i])), sine, cosine);
        sine = v_mul(sine, factor);
        cosine = v_mul(cosine, factor);
        const Vec x = v_load(a), y = v_load(b);
        v_store(a, v_fnma(y, sine, v_mul(x, cosine)));
        v_store(b, v_fma(x, sine, v_mul(y, cosine)));
    }
}

void unpack_c_keys(const Work &w, skerry_format format, int capacity, const Item &item, float *keys) {
    const int dim = w.key_dim, bits = format_bits(format);
    const bool is_bf16 = w.params->grid_dtype == SKERRY_DTYPE_BF16;
    const size_t row = (static_cast<size_t>(capacity) * static_cast<size_t>(bits) + 7) / 8;
    const uint8_t *const scales = item.key + c_code_bytes(format, SKERRY_SIDE_KEY, dim, capacity), *const zeros = scales + 2 * dim;
    const uint8_t *const codes = item.key + 2 * static_cast<ptrdiff_t>(bits) * item.sub, *const end = zeros + 2 * dim;
    for (int first = 0; first < dim; first += lanes) {
        const int n = dim - first < lanes ? dim - first : lanes;
        float scale[lanes], zero[lanes];
        v_store(scale, load_grid(scales + 2 * first, n, is_bf16));
        v_store(zero, load_grid(zeros + 2 * first, n, is_bf16));
        for (int i = 0; i < n; ++i) {
            const Vec code = code_lanes(codes + static_cast<size_t>(first + i) * row, bits, end);
            v_store(keys + static_cast<ptrdiff_t>(first + i) * lanes, held(v_fma(code, v_set1(scale[i]), v_set1(zero[i])), is_bf16));
        }
    }
    if (w.params->inverse_frequencies != nullptr) rotate_keys(*w.params, item.first, keys);
}

void unpack_c_values(const Work &w, skerry_format format, int capacity, const Item &item, float *values) {
    const int dim = w.value_dim, bits = format_bits(format), groups = c_value_groups(dim, w.params->value_group);
    const int group = groups == 1 ? dim : w.params->value_group;
    const bool is_bf16 = w.params->grid_dtype == SKERRY_DTYPE_BF16;
    const size_t row = (static_cast<size_t>(dim) * static_cast<size_t>(bits) + 7) / 8;
    const ptrdiff_t grids = static_cast<ptrdiff_t>(groups) * capacity;
    const uint8_t *const scales = item.value + c_code_bytes(format, SKERRY_SIDE_VALUE, dim, capacity);
    const uint8_t *const zeros = scales + 2 * grids, *const end = zeros + 2 * grids;
    const ptrdiff_t first = static_cast<ptrdiff_t>(lanes) * item.sub;
    for (int t = 0; t < item.count; ++t) {
        const uint8_t *const codes = item.value + static_cast<size_t>(first + t) * row;
        float *const to = values + static_cast<ptrdiff_t>(t) * w.value_pad;
        for (int c = 0; c < dim; c += lanes)
            v_store(to + c, code_lanes(codes + c * bits / 8, bits, end));
    }
    // All grids of these tokens, 16 at a time; a group need not begin with a vector.
    const ptrdiff_t last = (first + item.count) * groups;
    for (ptrdiff_t at = first * groups; at < last; at += lanes) {
        const int n = last - at < lanes ? static_cast<int>(last - at) : lanes;
        float scale[lanes], zero[lanes];
        v_store(scale, load_grid(scales + 2 * at, n, is_bf16));
        v_store(zero, load_grid(zeros + 2 * at, n, is_bf16));
        for (int i = 0; i < n; ++i) {
            const int token = static_cast<int>((at + i) / groups - first), g = static_cast<int>((at + i) % groups);
            float *const to = values + static_cast<ptrdiff_t>(token) * w.value_pad;
            const int stop = (g + 1) * group < dim ? (g + 1) * group : dim;
            for (int c = g * group; c < stop; c += lanes) {
                const int m = stop - c < lanes ? stop - c : lanes;
                v_store_n(to + c, held(v_fma(v_load(to + c), v_set1(scale[i]), v_set1(zero[i])), is_bf16), m);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ logits

Vec capped(Vec x, float cap) {
    const Vec y = v_mul(x, v_set1(1.0f / cap)), magnitude = v_abs(y);
    // tanh by the exponential loses digits near 0, where the series is short.
    const Vec e = v_exp(v_mul(magnitude, v_set1(-2.0f)));
    const Vec large = v_div(v_sub(v_set1(1.0f), e), v_add(v_set1(1.0f), e));
    const Vec square = v_mul(y, y);
    Vec p = v_set1(62.0f / 2835.0f);
    p = v_fma(p, square, v_set1(-17.0f / 315.0f));
    p = v_fma(p, square, v_set1(2.0f / 15.0f));
    p = v_fma(p, square, v_set1(-1.0f / 3.0f));
    const Vec small = v_fma(v_mul(p, square), magnitude, magnitude);
    const Vec t = v_mul(v_below(magnitude, v_set1(0.25f), small, large), v_set1(cap));
    return v_below(y, v_zero(), v_sub(v_zero(), t), t);
}

// raw * factor + mean, capped and masked, to its place.
inline void finish_logits(const Work &w, const Item &item, int at, int head, Vec raw, Vec factor, float mean) {
    Vec x = v_fma(raw, factor, v_set1(mean));
    if (w.params->softcap > 0) x = capped(x, w.params->softcap);
    int begin = item.begin, end = item.end;
    if (!item.is_uniform) visible(w.positions[head / w.group], w.params->sliding_window, item.first, item.count, begin, end);
    if (begin != 0 || end != lanes) x = v_keep(x, begin, end, v_set1(-__builtin_inff()));
    v_store(w.logits + static_cast<ptrdiff_t>(head) * row_logits + lanes * at, x);
}

inline void fetch_line(const uint8_t *at) { _mm_prefetch(reinterpret_cast<const char *>(at), _MM_HINT_T0); }

// The same parts of the pieces that come next.
struct Ahead {
    const uint8_t *part[4];
};

template <Element element, int tiles, int heads>
void key_dots(const uint8_t *const *keys, int dim, const float *queries, int stride, const Ahead &ahead, Vec (&dots)[tiles][heads]) {
    constexpr ptrdiff_t line = element == element_f32 ? 64 : 32;
    Vec acc[tiles][heads];
    for (int t = 0; t < tiles; ++t) {
        for (int h = 0; h < heads; ++h)
            acc[t][h] = v_zero();
    }
    for (int c = 0; c < dim; ++c) {
        Vec key[tiles];
        for (int t = 0; t < tiles; ++t) {
            key[t] = load_element<element>(keys[t] + line * c);
            if (element == element_f32 || (c & 1) == 0) fetch_line(ahead.part[t] + line * c);
        }
        for (int h = 0; h < heads; ++h) {
            const Vec q = v_set1(queries[static_cast<ptrdiff_t>(h) * stride + c]);
            for (int t = 0; t < tiles; ++t)
                acc[t][h] = v_fma(key[t], q, acc[t][h]);
        }
    }
    for (int t = 0; t < tiles; ++t) {
        for (int h = 0; h < heads; ++h)
            dots[t][h] = acc[t][h];
    }
}

template <Element element, int tiles, int heads>
void key_chunk(const Work &w, const uint8_t *const *keys, const float *queries, int stride, const Vec *factor, const float *mean, int at,
               int head, const Ahead &ahead) {
    Vec dots[tiles][heads];
    key_dots<element, tiles, heads>(keys, w.key_dim, queries + static_cast<ptrdiff_t>(head) * stride, stride, ahead, dots);
    for (int t = 0; t < tiles; ++t) {
        const Item &item = w.item[w.order[at + t]];
        for (int h = 0; h < heads; ++h) {
            finish_logits(w, item, at + t, head + h, dots[t][h], factor[t], mean == nullptr ? 0.0f : mean[head + h]);
        }
    }
}

template <Element element, int tiles>
void key_tiles(const Work &w, const uint8_t *const *keys, const float *queries, int stride, const Vec *factor, const float *mean, int at,
               Ahead ahead) {
    for (int head = 0; head < w.heads; head += 4) {
        switch (w.heads - head) {
        default:
            key_chunk<element, tiles, 4>(w, keys, queries, stride, factor, mean, at, head, ahead);
            break;
        case 3:
            key_chunk<element, tiles, 3>(w, keys, queries, stride, factor, mean, at, head, ahead);
            break;
        case 2:
            key_chunk<element, tiles, 2>(w, keys, queries, stride, factor, mean, at, head, ahead);
            break;
        case 1:
            key_chunk<element, tiles, 1>(w, keys, queries, stride, factor, mean, at, head, ahead);
            break;
        }
        for (int t = 0; t < tiles; ++t)
            ahead.part[t] = keys[t];
    }
}

template <int tiles>
void key_tiles_of(Element element, const Work &w, const uint8_t *const *keys, const float *queries, int stride, const Vec *factor,
                  const float *mean, int at, const Ahead &ahead) {
    switch (element) {
    case element_f16:
        key_tiles<element_f16, tiles>(w, keys, queries, stride, factor, mean, at, ahead);
        break;
    case element_bf16:
        key_tiles<element_bf16, tiles>(w, keys, queries, stride, factor, mean, at, ahead);
        break;
    default:
        key_tiles<element_f32, tiles>(w, keys, queries, stride, factor, mean, at, ahead);
        break;
    }
}

// Parts of the pieces `distance` further on in the order in which the passes read: all keys, then all values.
const uint8_t *key_ahead(const Work &w, int at, int distance) {
    const int to = at + distance;
    if (to < w.items) return w.item[w.order[to]].key;
    return to - w.items < w.items ? w.item[w.order[to - w.items]].value : w.item[w.order[at]].key;
}

const uint8_t *value_ahead(const Work &w, int at, int distance) {
    return w.item[w.order[at + distance < w.items ? at + distance : at]].value;
}

void float_keys(Work &w, const Bucket &bucket) {
    const skerry_format format = bucket.key_format;
    const bool is_r = is_r_format(format);
    const float *queries = w.queries;
    int stride = w.key_dim;
    float key_scale = w.params->scale;
    if (is_r) {
        const skerry_epoch &epoch = w.task->epochs[bucket.epoch];
        prepare_queries(w, epoch);
        queries = w.prepared;
        stride = w.key_pad;
        key_scale *= epoch.key_exponent_scale;
    }
    const bool in_place = is_full_format(format) && bucket.capacity == lanes;
    const Element element = in_place ? element_of(format) : element_f32;
    for (int at = bucket.begin; at < bucket.end; at += 2) {
        const int tiles = bucket.end - at < 2 ? 1 : 2;
        const uint8_t *keys[2];
        Vec factor[2];
        Ahead ahead;
        for (int t = 0; t < tiles; ++t) {
            const Item &item = w.item[w.order[at + t]];
            float *const unpacked = w.keys + static_cast<ptrdiff_t>(t) * lanes * w.key_pad;
            keys[t] = in_place ? item.key : reinterpret_cast<const uint8_t *>(unpacked);
            ahead.part[t] = in_place ? key_ahead(w, at + t, 2) : keys[t];
            factor[t] = v_set1(key_scale);
            if (is_r) {
                unpack_r_keys(format, item.key, w.key_dim, bucket.capacity, unpacked);
                factor[t] = v_mul(factor[t], load_scales(item.key + bucket.key_scales, item.count));
            } else if (is_c_format(format)) {
                unpack_c_keys(w, format, bucket.capacity, item, unpacked);
            } else if (!in_place) {
                const Element stored = element_of(format);
                unpack_full(stored, item.key + element_bytes(stored) * lanes * item.sub, w.key_dim, item.count, bucket.capacity, unpacked,
                            lanes);
            }
        }
        const float *const mean = is_r ? w.query_mean : nullptr;
        if (tiles == 2) {
            key_tiles_of<2>(element, w, keys, queries, stride, factor, mean, at, ahead);
        } else {
            key_tiles_of<1>(element, w, keys, queries, stride, factor, mean, at, ahead);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- weights

void rescale(float *row, int n, float by) {
    for (int i = 0; i < n; i += lanes)
        v_store(row + i, v_mul(v_load(row + i), v_set1(by)));
}

float exp_one(float x) { return v_first_of(v_exp(v_set1(x))); }

// Maxima, sums and exponentials of all pieces for one query vector.
void soften(Work &w, int head) {
    float *const logits = w.logits + static_cast<ptrdiff_t>(head) * row_logits;
    float *const tile_max = w.tile_max + head * block_items, *const tile_sum = w.tile_sum + head * block_items;
    float *const shrink = w.shrink + head * block_items;
    const Vec none = v_set1(-__builtin_inff());
    const int whole = (w.items + lanes - 1) / lanes * lanes;
    for (int at = w.items; at < whole; ++at)
        v_store(logits + lanes * at, none);
    Vec largest = none;
    for (int at = 0; at < whole; at += lanes) {
        float *const x = logits + lanes * at;
        const Vec max = v_reduce16_max(x);
        float held_max[lanes];
        v_store(tile_max + at, max);
        v_store(held_max, v_max(max, v_set1(lowest)));
        largest = v_max(largest, max);
        for (int i = 0; i < lanes; ++i)
            v_store(x + lanes * i, v_exp(v_sub(v_load(x + lanes * i), v_set1(held_max[i]))));
        v_store(tile_sum + at, v_reduce16_add(x));
    }
    const float block_max = v_largest(largest);
    if (block_max > w.max[head]) {
        const float by = exp_one(w.max[head] - block_max);
        w.max[head] = block_max;
        w.sum[head] *= by;
        w.centre[head] *= by;
        // Nothing is there yet in the first block.
        if (by > 0) {
            rescale(w.plain + static_cast<ptrdiff_t>(head) * w.value_pad, w.value_dim, by);
            rescale(w.rotated + static_cast<ptrdiff_t>(head) * w.value_pad, w.value_dim, by);
        }
    }
    const float max = w.max[head] > lowest ? w.max[head] : lowest;
    float sum = w.sum[head], share[block_items];
    for (int at = 0; at < whole; at += lanes) {
        const Vec by = v_exp(v_sub(v_load(tile_max + at), v_set1(max)));
        v_store(shrink + at, by);
        v_store(share + at, v_mul(by, v_load(tile_sum + at)));
    }
    // One after the other: pieces that the row does not see add an exact 0 wherever they lie.
    for (int at = 0; at < w.items; ++at)
        sum += share[at];
    w.sum[head] = sum;
}

void report_tiles(const Work &w) {
    const skerry_attend_task &task = *w.task;
    const ptrdiff_t heads = static_cast<ptrdiff_t>(task.rows) * w.group, skip = static_cast<ptrdiff_t>(w.row0) * w.group;
    for (int at = 0; at < w.items; ++at) {
        const Item &item = w.item[w.order[at]];
        float *const max = task.tile_max + item.tile * heads + skip, *const sum = task.tile_sum + item.tile * heads + skip;
        for (int h = 0; h < w.heads; ++h) {
            const float piece_max = w.tile_max[h * block_items + at], piece_sum = w.tile_sum[h * block_items + at];
            if (item.sub == 0) {
                max[h] = piece_max;
                sum[h] = piece_sum;
            } else if (piece_max > max[h]) {
                sum[h] = sum[h] * exp_one(max[h] - piece_max) + piece_sum;
                max[h] = piece_max;
            } else if (piece_sum > 0) {
                sum[h] += piece_sum * exp_one(piece_max - max[h]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ values

template <Element element, int heads, int vectors>
void value_chunk_of(const uint8_t *values, ptrdiff_t row_bytes, int begin, int end, const float *weights, float *out, int pad,
                    const uint8_t *ahead) {
    constexpr ptrdiff_t size = element == element_f32 ? 4 : 2;
    Vec acc[heads][vectors];
    for (int h = 0; h < heads; ++h) {
        for (int v = 0; v < vectors; ++v)
            acc[h][v] = v_load(out + static_cast<ptrdiff_t>(h) * pad + lanes * v);
    }
    for (int t = begin; t < end; ++t) {
        const uint8_t *const row = values + row_bytes * t;
        Vec value[vectors];
        for (int v = 0; v < vectors; ++v) {
            value[v] = load_element<element>(row + size * lanes * v);
            if (element == element_f32 || (v & 1) == 0) fetch_line(ahead + row_bytes * t + size * lanes * v);
        }
        for (int h = 0; h < heads; ++h) {
            const Vec weight = v_set1(weights[h * row_logits + t]);
            for (int v = 0; v < vectors; ++v)
                acc[h][v] = v_fma(value[v], weight, acc[h][v]);
        }
    }
    for (int h = 0; h < heads; ++h) {
        for (int v = 0; v < vectors; ++v)
            v_store(out + static_cast<ptrdiff_t>(h) * pad + lanes * v, acc[h][v]);
    }
}

template <Element element, int heads>
void value_heads(const Work &w, const uint8_t *values, ptrdiff_t row_bytes, int begin, int end, const float *weights, float *out,
                 const uint8_t *ahead) {
    constexpr ptrdiff_t size = element == element_f32 ? 4 : 2;
    int channel = 0;
    for (; channel + value_chunk * lanes <= w.value_dim; channel += value_chunk * lanes) {
        value_chunk_of<element, heads, value_chunk>(values + size * channel, row_bytes, begin, end, weights, out + channel, w.value_pad,
                                                    ahead + size * channel);
    }
    for (; channel < w.value_dim; channel += lanes) {
        value_chunk_of<element, heads, 1>(values + size * channel, row_bytes, begin, end, weights, out + channel, w.value_pad,
                                          ahead + size * channel);
    }
}

template <Element element>
void value_tile(const Work &w, const Item &item, int at, const uint8_t *values, ptrdiff_t row_bytes, float *out, const uint8_t *ahead) {
    for (int head = 0; head < w.heads;) {
        int begin = item.begin, end = item.end, heads = w.heads - head < 4 ? w.heads - head : 4;
        if (!item.is_uniform) {
            // Rows apart: a weight of 0 does not hide a value that is not finite.
            const int rest = w.group - head % w.group;
            heads = heads < rest ? heads : rest;
            visible(w.positions[head / w.group], w.params->sliding_window, item.first, item.count, begin, end);
        }
        const float *const weights = w.logits + static_cast<ptrdiff_t>(head) * row_logits + lanes * at;
        float *const to = out + static_cast<ptrdiff_t>(head) * w.value_pad;
        switch (begin < end ? heads : 0) {
        case 4:
            value_heads<element, 4>(w, values, row_bytes, begin, end, weights, to, ahead);
            break;
        case 3:
            value_heads<element, 3>(w, values, row_bytes, begin, end, weights, to, ahead);
            break;
        case 2:
            value_heads<element, 2>(w, values, row_bytes, begin, end, weights, to, ahead);
            break;
        case 1:
            value_heads<element, 1>(w, values, row_bytes, begin, end, weights, to, ahead);
            break;
        default:
            break;
        }
        head += heads;
        ahead = values;
    }
}

void float_values(Work &w, const Bucket &bucket) {
    const skerry_format format = bucket.value_format;
    const bool is_r = is_r_format(format);
    const bool in_place = is_full_format(format) && w.value_dim % lanes == 0;
    const float exponent_scale = is_r ? w.task->epochs[bucket.epoch].value_exponent_scale : 1.0f;
    float *const out = is_r ? w.rotated : w.plain;
    if (is_r) w.rotated_used = true;
    for (int at = bucket.begin; at < bucket.end; ++at) {
        const Item &item = w.item[w.order[at]];
        Vec scale = v_set1(exponent_scale);
        if (is_r) {
            scale = v_mul(scale, load_scales(item.value + bucket.value_scales, item.count));
        }
        for (int h = 0; h < w.heads; ++h) {
            float *const weights = w.logits + static_cast<ptrdiff_t>(h) * row_logits + lanes * at;
            const Vec weight = v_mul(v_load(weights), v_set1(w.shrink[h * block_items + at]));
            v_store(weights, v_mul(weight, scale));
        }
        if (in_place) {
            const ptrdiff_t row_bytes = element_bytes(element_of(format)) * w.value_dim;
            const uint8_t *const ahead = value_ahead(w, at, 1);
            switch (element_of(format)) {
            case element_f16:
                value_tile<element_f16>(w, item, at, item.value, row_bytes, out, ahead);
                break;
            case element_bf16:
                value_tile<element_bf16>(w, item, at, item.value, row_bytes, out, ahead);
                break;
            default:
                value_tile<element_f32>(w, item, at, item.value, row_bytes, out, ahead);
                break;
            }
            continue;
        }
        if (is_r) {
            unpack_r_values(format, item.value, w.value_dim, bucket.capacity, w.values, w.value_pad);
        } else if (is_c_format(format)) {
            unpack_c_values(w, format, bucket.capacity, item, w.values);
        } else {
            unpack_full(element_of(format), item.value, item.count, w.value_dim, w.value_dim, w.values, w.value_pad);
        }
        const uint8_t *const values = reinterpret_cast<const uint8_t *>(w.values);
        value_tile<element_f32>(w, item, at, values, 4 * static_cast<ptrdiff_t>(w.value_pad), out, values);
    }
}

// --------------------------------------------------------------------------------------------------------------- low rank

// Offsets within an L part, and what a row of it takes.
struct LowRank {
    ptrdiff_t basis_row, tokens, token_row, scales, end;
    int rank;
    bool is_roomy; // vectors read over the end of any row stay within the part
};

template <skerry_format format>
[[gnu::flatten]] LowRank lowrank_of(const Bucket &bucket, skerry_side side, int dim) {
    const bool is_key = side == SKERRY_SIDE_KEY;
    LowRank part;
    part.rank = is_key ? bucket.key_rank : bucket.value_rank;
    part.basis_row = lowrank_row<format>(is_key ? part.rank : dim);
    part.tokens = static_cast<ptrdiff_t>(l_token_offset(format, side, dim, part.rank));
    part.token_row = lowrank_row<format>(is_key ? bucket.capacity : part.rank);
    part.scales = static_cast<ptrdiff_t>(l_scale_offset(format, side, dim, bucket.capacity, part.rank));
    part.end = part.scales + 4 * part.rank;
    const int basis_rows = is_key ? dim : part.rank, basis_length = is_key ? part.rank : dim;
    const int token_rows = is_key ? part.rank : bucket.capacity, token_length = is_key ? bucket.capacity : part.rank;
    const auto last_read = [](ptrdiff_t row, int rows, int length) {
        return row * (rows - 1) + lowrank_row<format>((length + lanes - 1) / lanes * lanes);
    };
    part.is_roomy = part.rank > 0 && last_read(part.basis_row, basis_rows, basis_length) <= part.end &&
                    part.tokens + last_read(part.token_row, token_rows, token_length) <= part.end;
    return part;
}

// One past the pieces of the tile of `at`.
int tile_end_of(const Work &w, const Bucket &bucket, int at) {
    const int32_t tile = w.item[w.order[at]].tile;
    while (at < bucket.end && w.item[w.order[at]].tile == tile)
        ++at;
    return at;
}

void fetch_part(const uint8_t *part, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i += 64)
        fetch_line(part + i);
}

Vec lowrank_scales(const uint8_t *part, const LowRank &shape, int component) {
    const int rest = shape.rank - component < lanes ? shape.rank - component : lanes;
    return v_load_n(reinterpret_cast<const float *>(part + shape.scales) + component, rest);
}

// prepared[h] = scales * basis q of `heads` query vectors, whole vectors of components.
template <skerry_format format, int heads, bool is_checked>
void lowrank_queries(const Work &w, const uint8_t *part, const LowRank &shape, int head) {
    const uint8_t *const end = part + shape.end;
    const float *const queries = w.queries + static_cast<ptrdiff_t>(head) * w.key_dim;
    for (int k = 0; k < shape.rank; k += lanes) {
        Vec acc[heads];
        for (int h = 0; h < heads; ++h)
            acc[h] = v_zero();
        for (int c = 0; c < w.key_dim; ++c) {
            const Vec basis = lowrank_codes<format, is_checked>(part + shape.basis_row * c, k, end);
            for (int h = 0; h < heads; ++h)
                acc[h] = v_fma(basis, v_set1(queries[static_cast<ptrdiff_t>(h) * w.key_dim + c]), acc[h]);
        }
        const Vec scale = v_mul(lowrank_scales(part, shape, k), v_set1(w.params->scale));
        for (int h = 0; h < heads; ++h)
            v_store(w.prepared + static_cast<ptrdiff_t>(head + h) * w.key_pad + k, v_mul(acc[h], scale));
    }
}

template <skerry_format format, int heads, bool is_checked, int tiles>
void lowrank_dots(const Work &w, const uint8_t *part, const LowRank &shape, int at, int head) {
    const uint8_t *const end = part + shape.end, *const tokens = part + shape.tokens;
    Vec acc[tiles][heads];
    for (int t = 0; t < tiles; ++t) {
        for (int h = 0; h < heads; ++h)
            acc[t][h] = v_zero();
    }
    for (int k = 0; k < shape.rank; ++k) {
        Vec factor[tiles];
        for (int t = 0; t < tiles; ++t)
            factor[t] = lowrank_codes<format, is_checked>(tokens + shape.token_row * k, lanes * w.item[w.order[at + t]].sub, end);
        for (int h = 0; h < heads; ++h) {
            const Vec q = v_set1(w.prepared[static_cast<ptrdiff_t>(head + h) * w.key_pad + k]);
            for (int t = 0; t < tiles; ++t)
                acc[t][h] = v_fma(factor[t], q, acc[t][h]);
        }
    }
    for (int t = 0; t < tiles; ++t) {
        for (int h = 0; h < heads; ++h)
            finish_logits(w, w.item[w.order[at + t]], at + t, head + h, acc[t][h], v_set1(1.0f), 0.0f);
    }
}

template <skerry_format format, int heads, bool is_checked>
void lowrank_key_tile(const Work &w, const uint8_t *part, const LowRank &shape, int begin, int end, int head) {
    lowrank_queries<format, heads, is_checked>(w, part, shape, head);
    int at = begin;
    if constexpr (value_chunk > 1) { // registers for two pieces
        for (; at + 1 < end; at += 2)
            lowrank_dots<format, heads, is_checked, 2>(w, part, shape, at, head);
    }
    for (; at < end; ++at)
        lowrank_dots<format, heads, is_checked, 1>(w, part, shape, at, head);
}

template <skerry_format format>
void lowrank_keys(const Work &w, const Bucket &bucket) {
    const LowRank shape = lowrank_of<format>(bucket, SKERRY_SIDE_KEY, w.key_dim);
    for (int at = bucket.begin; at < bucket.end;) {
        const int end = tile_end_of(w, bucket, at);
        const uint8_t *const part = w.item[w.order[at]].key;
        if (end < bucket.end) fetch_part(w.item[w.order[end]].key, shape.end);
        for (int head = 0; head < w.heads;) {
            const int heads = !shape.is_roomy ? 1 : w.heads - head < 4 ? w.heads - head : 4;
            switch (heads) {
            case 4:
                lowrank_key_tile<format, 4, false>(w, part, shape, at, end, head);
                break;
            case 3:
                lowrank_key_tile<format, 3, false>(w, part, shape, at, end, head);
                break;
            case 2:
                lowrank_key_tile<format, 2, false>(w, part, shape, at, end, head);
                break;
            default:
                // Whether reads are checked shows in no bit, nor how many heads go together.
                lowrank_key_tile<format, 1, true>(w, part, shape, at, end, head);
                break;
            }
            head += heads;
        }
        at = end;
    }
}

void lowrank_keys_of(const Work &w, const Bucket &bucket) {
    switch (bucket.key_format) {
    case SKERRY_FORMAT_L32:
        lowrank_keys<SKERRY_FORMAT_L32>(w, bucket);
        break;
    case SKERRY_FORMAT_L16:
        lowrank_keys<SKERRY_FORMAT_L16>(w, bucket);
        break;
    case SKERRY_FORMAT_L8:
        lowrank_keys<SKERRY_FORMAT_L8>(w, bucket);
        break;
    default:
        lowrank_keys<SKERRY_FORMAT_L4>(w, bucket);
        break;
    }
}

// Factors are finite, so a token that a row does not see, whose weight is 0, adds an exact 0 to it.
template <skerry_format format, int heads, bool is_checked>
void lowrank_value_tile(const Work &w, const uint8_t *part, const LowRank &shape, int begin, int end, int head) {
    constexpr ptrdiff_t stride = l_tile_tokens;
    const uint8_t *const part_end = part + shape.end, *const tokens = part + shape.tokens;
    const float *const weights = w.logits + static_cast<ptrdiff_t>(head) * row_logits;
    float components[heads * l_tile_tokens];
    for (int k = 0; k < shape.rank; k += lanes) {
        Vec acc[heads];
        for (int h = 0; h < heads; ++h)
            acc[h] = v_zero();
        for (int at = begin; at < end; ++at) {
            const Item &item = w.item[w.order[at]];
            const uint8_t *const rows = tokens + shape.token_row * (lanes * item.sub);
            for (int t = 0; t < item.count; ++t) {
                const Vec factor = lowrank_codes<format, is_checked>(rows + shape.token_row * t, k, part_end);
                for (int h = 0; h < heads; ++h)
                    acc[h] = v_fma(factor, v_set1(weights[static_cast<ptrdiff_t>(h) * row_logits + lanes * at + t]), acc[h]);
            }
        }
        const Vec scale = lowrank_scales(part, shape, k);
        for (int h = 0; h < heads; ++h)
            v_store(components + stride * h + k, v_mul(acc[h], scale));
    }
    float *const out = w.plain + static_cast<ptrdiff_t>(head) * w.value_pad;
    for (int c = 0; c < w.value_dim; c += lanes) {
        Vec acc[heads];
        for (int h = 0; h < heads; ++h)
            acc[h] = v_load(out + static_cast<ptrdiff_t>(h) * w.value_pad + c);
        for (int k = 0; k < shape.rank; ++k) {
            const Vec basis = lowrank_codes<format, is_checked>(part + shape.basis_row * k, c, part_end);
            for (int h = 0; h < heads; ++h)
                acc[h] = v_fma(basis, v_set1(components[stride * h + k]), acc[h]);
        }
        for (int h = 0; h < heads; ++h)
            v_store(out + static_cast<ptrdiff_t>(h) * w.value_pad + c, acc[h]);
    }
}

template <skerry_format format>
void lowrank_values(const Work &w, const Bucket &bucket) {
    const LowRank shape = lowrank_of<format>(bucket, SKERRY_SIDE_VALUE, w.value_dim);
    for (int h = 0; h < w.heads; ++h) {
        for (int at = bucket.begin; at < bucket.end; ++at) {
            float *const weights = w.logits + static_cast<ptrdiff_t>(h) * row_logits + lanes * at;
            v_store(weights, v_mul(v_load(weights), v_set1(w.shrink[h * block_items + at])));
        }
    }
    for (int at = bucket.begin; at < bucket.end;) {
        const int end = tile_end_of(w, bucket, at);
        const uint8_t *const part = w.item[w.order[at]].value;
        if (end < bucket.end) fetch_part(w.item[w.order[end]].value, shape.end);
        for (int head = 0; head < w.heads;) {
            const int heads = !shape.is_roomy ? 1 : w.heads - head < 4 ? w.heads - head : 4;
            switch (heads) {
            case 4:
                lowrank_value_tile<format, 4, false>(w, part, shape, at, end, head);
                break;
            case 3:
                lowrank_value_tile<format, 3, false>(w, part, shape, at, end, head);
                break;
            case 2:
                lowrank_value_tile<format, 2, false>(w, part, shape, at, end, head);
                break;
            default:
                // Whether reads are checked shows in no bit, nor how many heads go together.
                lowrank_value_tile<format, 1, true>(w, part, shape, at, end, head);
                break;
            }
            head += heads;
        }
        at = end;
    }
}

void lowrank_values_of(const Work &w, const Bucket &bucket) {
    switch (bucket.value_format) {
    case SKERRY_FORMAT_L32:
        lowrank_values<SKERRY_FORMAT_L32>(w, bucket);
        break;
    case SKERRY_FORMAT_L16:
        lowrank_values<SKERRY_FORMAT_L16>(w, bucket);
        break;
    case SKERRY_FORMAT_L8:
        lowrank_values<SKERRY_FORMAT_L8>(w, bucket);
        break;
    default:
        lowrank_values<SKERRY_FORMAT_L4>(w, bucket);
        break;
    }
}

#ifdef SKERRY_INTEGER
bool integer_keys_fit(const Work &w, const Bucket &bucket);
bool integer_values_fit(const Work &w, const Bucket &bucket);
void integer_keys(Work &w, const Bucket &bucket);
void integer_values(Work &w, const Bucket &bucket);
#endif

// ------------------------------------------------------------------------------------------------------------------- tasks

void attend_block(Work &w) {
    for (int b = 0; b < w.buckets; ++b) {
        if (is_l_format(w.bucket[b].key_format)) {
            lowrank_keys_of(w, w.bucket[b]);
            continue;
        }
#ifdef SKERRY_INTEGER
        if (integer_keys_fit(w, w.bucket[b])) {
            integer_keys(w, w.bucket[b]);
            continue;
        }
#endif
        float_keys(w, w.bucket[b]);
    }
    for (int h = 0; h < w.heads; ++h)
        soften(w, h);
    if (w.task->tile_max != nullptr) report_tiles(w);
    for (int b = 0; b < w.buckets; ++b) {
        if (is_l_format(w.bucket[b].value_format)) {
            lowrank_values_of(w, w.bucket[b]);
            continue;
        }
#ifdef SKERRY_INTEGER
        if (integer_values_fit(w, w.bucket[b])) {
            integer_values(w, w.bucket[b]);
            continue;
        }
#endif
        float_values(w, w.bucket[b]);
    }
}

void store_results(Work &w) {
    const int dim = w.value_dim, n = hadamard_size(dim);
    const float norm = rotation_norm(dim);
    for (int h = 0; h < w.heads; ++h) {
        const ptrdiff_t head = static_cast<ptrdiff_t>(w.row0) * w.group + h;
        const float *const plain = w.plain + static_cast<ptrdiff_t>(h) * w.value_pad;
        float *const rotated = w.rotated + static_cast<ptrdiff_t>(h) * w.value_pad;
        float *const out = w.task->out + head * dim;
        if (w.rotated_used) {
            const Vec centre = v_set1(w.centre[h]);
            for (int i = 0; i < dim; i += lanes)
                v_store(rotated + i, v_sub(v_load(rotated + i), centre));
            hadamard(rotated, dim);
        }
        for (int i = 0; i < dim; i += lanes) {
            Vec x = v_load(plain + i);
            if (w.rotated_used) x = v_fma(v_load(rotated + i), signed_norm(i, norm, n), x);
            v_store_n(out + i, x, dim - i < lanes ? dim - i : lanes);
        }
        w.task->max[head] = w.max[h];
        w.task->sum[head] = w.sum[h];
    }
}

void attend_rows(Work &w) {
    const size_t floats = static_cast<size_t>(w.heads) * static_cast<size_t>(w.value_pad);
    std::memset(w.plain, 0, floats * sizeof(float));
    std::memset(w.rotated, 0, floats * sizeof(float));
    for (int h = 0; h < w.heads; ++h) {
        w.max[h] = -__builtin_inff();
        w.sum[h] = w.centre[h] = 0;
    }
    w.rotated_used = false;
    for (int32_t index = w.task->tile_begin; index < w.task->tile_end;) {
        index = plan_block(w, index);
        if (w.items > 0) attend_block(w);
    }
    store_results(w);
}

void engine_attend(const skerry_attend_params *params, const skerry_attend_task *task) {
    Work w;
    w.params = params;
    w.task = task;
    w.key_dim = params->key_dim;
    w.value_dim = params->value_dim;
    w.group = params->group;
    const int at_once = heads_at_once(params->group, task->rows) / params->group;
    carve(w, task->scratch, at_once * params->group);
    if (task->tile_max != nullptr) {
        // Tiles that no row sees never become pieces.
        const ptrdiff_t n = static_cast<ptrdiff_t>(task->tile_end - task->tile_begin) * task->rows * params->group;
        for (ptrdiff_t i = 0; i < n; ++i)
            task->tile_max[i] = -__builtin_inff();
        std::memset(task->tile_sum, 0, static_cast<size_t>(n) * sizeof(float));
    }
    for (w.row0 = 0; w.row0 < task->rows; w.row0 += at_once) {
        w.rows = task->rows - w.row0 < at_once ? task->rows - w.row0 : at_once;
        w.heads = w.rows * w.group;
        w.queries = task->queries + static_cast<ptrdiff_t>(w.row0) * w.group * w.key_dim;
        w.positions = task->row_positions + w.row0;
        attend_rows(w);
    }
}

} // namespace

} // namespace skerry
