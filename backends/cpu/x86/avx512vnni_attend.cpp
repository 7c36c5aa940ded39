// SPDX-License-Identifier: MIT

// R formats by dot products of four bytes. Codes stay where they lie in their byte: a mask takes them out, and what their place
// multiplies is undone on the sums.

#include "cpu/attend.hpp"
#include "cpu/x86/avx512_vec.hpp"

#define SKERRY_INTEGER
#include "cpu/x86/attend_engine.hpp"
#include "cpu/x86/attend_integer.hpp"

namespace skerry {

namespace {

constexpr int key_tiles_at_once = 4;
constexpr int fetch_distance = 8; // pieces: some 500 ns of work, a few trips to memory

// The intrinsic makes g++ 12 copy every accumulator once per step.
inline void dot_bytes(IVec &sum, IVec unsigned_bytes, IVec signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

inline IVec broadcast_word(const void *at) {
    int32_t word;
    std::memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}

template <bool is_whole>
IVec load_line(const uint8_t *at, int words) {
    if constexpr (is_whole) return _mm512_loadu_si512(at);
    return i_load_n(at, words);
}

// ---------------------------------------------------------------------------------------------------------------- keys

// Bit 2 of the codes of field j joins their low bits; fields 2 and 3 come out four bits up, the others in their place.
// Even lines of 16 channels own the low half of a byte of the 1-bit plane, odd ones the high half.
template <int j, bool is_odd>
IVec join_key_bits(IVec low, IVec high) {
    constexpr int to = j < 3 ? 2 * j : 4, shift = to + 2 - (is_odd ? 4 + j : j);
    const IVec bits = _mm512_and_si512(j < 3 ? low : _mm512_srli_epi32(low, 2), _mm512_set1_epi8(3 << to));
    const IVec moved = shift >= 0 ? _mm512_slli_epi32(high, shift < 0 ? 0 : shift) : _mm512_srli_epi32(high, shift < 0 ? -shift : 0);
    return _mm512_ternarylogic_epi32(bits, moved, _mm512_set1_epi8(4 << to), 0xf8); // bits | (moved & mask)
}

template <int tiles, int vectors>
void dot_all(IVec (&sum)[tiles][vectors], const IVec (&codes)[tiles], const int8_t *query, ptrdiff_t pad) {
    for (int v = 0; v < vectors; ++v) {
        const IVec q = broadcast_word(query + v * pad);
        for (int t = 0; t < tiles; ++t)
            dot_bytes(sum[t][v], codes[t], q);
    }
}

template <int by, int tiles, int vectors>
void shift_all(IVec (&sum)[tiles][vectors]) {
    for (int t = 0; t < tiles; ++t) {
        for (int v = 0; v < vectors; ++v)
            sum[t][v] = _mm512_srai_epi32(sum[t][v], by);
    }
}

template <int bits, int j, int tiles, int vectors, bool is_whole>
void dot_field(IVec (&sum)[tiles][vectors], const uint8_t *const *keys, int lines, int words, const int8_t *query, ptrdiff_t pad,
               const Ahead *ahead) {
    constexpr int channels = 32 / bits; // of one line
    const ptrdiff_t line_bytes = is_whole ? 64 : 4 * words;
    for (int line = 0; line < lines; ++line) {
        IVec codes[tiles];
        for (int t = 0; t < tiles; ++t) {
            codes[t] = load_line<is_whole>(keys[t] + line_bytes * line, words);
            if (bits < 8) codes[t] = _mm512_and_si512(codes[t], _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << (bits * j))));
            if (ahead != nullptr) fetch_line(ahead->part[t] + line_bytes * line);
        }
        dot_all(sum, codes, query + channels * line + 4 * j, pad);
    }
}

template <int j, int tiles, int vectors, bool is_whole>
void dot_three_bits(IVec (&sum)[tiles][vectors], const uint8_t *const *keys, int lines, int words, const int8_t *query, ptrdiff_t pad,
                    const Ahead *ahead) {
    const ptrdiff_t line_bytes = is_whole ? 64 : 4 * words, plane = line_bytes * lines;
    for (int line = 0; line < lines; line += 2) {
        IVec codes[tiles], high[tiles];
        for (int t = 0; t < tiles; ++t) {
            high[t] = load_line<is_whole>(keys[t] + plane + line_bytes * (line / 2), words);
            codes[t] = join_key_bits<j, false>(load_line<is_whole>(keys[t] + line_bytes * line, words), high[t]);
            if (ahead != nullptr) {
                fetch_line(ahead->part[t] + line_bytes * line);
                fetch_line(ahead->part[t] + plane + line_bytes * (line / 2));
            }
        }
        dot_all(sum, codes, query + 16 * line + 4 * j, pad);
        if (line + 1 >= lines) break;
        for (int t = 0; t < tiles; ++t) {
            codes[t] = join_key_bits<j, true>(load_line<is_whole>(keys[t] + line_bytes * (line + 1), words), high[t]);
            if (ahead != nullptr) fetch_line(ahead->part[t] + line_bytes * (line + 1));
        }
        dot_all(sum, codes, query + 16 * (line + 1) + 4 * j, pad);
    }
}

template <int bits, int tiles, int heads, bool is_whole>
void integer_dots(const Work &w, const uint8_t *const *keys, int words, int head, const Ahead *ahead, IVec (&result)[tiles][2 * heads]) {
    constexpr int vectors = 2 * heads;
    const int8_t *const query = w.query_bytes + 2 * static_cast<ptrdiff_t>(head) * w.key_pad;
    const ptrdiff_t pad = w.key_pad;
    const int channels = bits == 3 ? 16 : 32 / bits, lines = (w.key_dim + channels - 1) / channels;
    IVec sum[tiles][vectors];
    for (int t = 0; t < tiles; ++t) {
        for (int v = 0; v < vectors; ++v)
            sum[t][v] = _mm512_setzero_si512();
    }
    // From the highest field down: every shift divides what is there exactly.
    if constexpr (bits == 2) {
        dot_field<2, 3, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, ahead);
        shift_all<2>(sum);
        dot_field<2, 2, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
        shift_all<2>(sum);
        dot_field<2, 1, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
        shift_all<2>(sum);
        dot_field<2, 0, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
    }
    if constexpr (bits == 3) {
        dot_three_bits<3, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, ahead);
        dot_three_bits<2, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
        shift_all<2>(sum);
        dot_three_bits<1, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
        shift_all<2>(sum);
        dot_three_bits<0, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
    }
    if constexpr (bits == 4) {
        dot_field<4, 1, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, ahead);
        shift_all<4>(sum);
        dot_field<4, 0, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, nullptr);
    }
    if constexpr (bits == 8) dot_field<8, 0, tiles, vectors, is_whole>(sum, keys, lines, words, query, pad, ahead);
    for (int t = 0; t < tiles; ++t) {
        for (int v = 0; v < vectors; ++v)
            result[t][v] = sum[t][v];
    }
}

template <int bits, int tiles, int heads, bool is_whole>
void integer_chunk(const Work &w, const uint8_t *const *keys, int capacity, const Vec *factor, int at, int head, const Ahead *ahead) {
    IVec sums[tiles][2 * heads];
    integer_dots<bits, tiles, heads, is_whole>(w, keys, capacity, head, ahead, sums);
    for (int t = 0; t < tiles; ++t) {
        const Item &item = w.item[w.order[at + t]];
        for (int h = 0; h < heads; ++h) {
            const Vec whole = v_fma(i_to_f32(sums[t][2 * h]), v_set1(256.0f), i_to_f32(sums[t][2 * h + 1]));
            const Vec raw = v_fma(whole, v_set1(w.query_scale[head + h]), v_set1(w.query_centre[head + h]));
            finish_logits(w, item, at + t, head + h, raw, factor[t], w.query_mean[head + h]);
        }
    }
}

template <int bits, int tiles, bool is_whole>
void integer_tiles(const Work &w, const uint8_t *const *keys, int capacity, const Vec *factor, int at, const Ahead &ahead) {
    for (int head = 0; head < w.heads; head += 2) {
        const Ahead *const fetched = head == 0 ? &ahead : nullptr;
        if (w.heads - head >= 2) {
            integer_chunk<bits, tiles, 2, is_whole>(w, keys, capacity, factor, at, head, fetched);
        } else {
            integer_chunk<bits, tiles, 1, is_whole>(w, keys, capacity, factor, at, head, fetched);
        }
    }
}

template <int bits, bool is_whole>
void integer_bucket(const Work &w, const Bucket &bucket, float scale) {
    const int capacity = bucket.capacity;
    for (int at = bucket.begin; at < bucket.end;) {
        const int tiles = bucket.end - at < key_tiles_at_once ? 1 : key_tiles_at_once;
        const uint8_t *keys[key_tiles_at_once];
        Vec factor[key_tiles_at_once];
        Ahead ahead;
        for (int t = 0; t < tiles; ++t) {
            const Item &item = w.item[w.order[at + t]];
            keys[t] = item.key;
            ahead.part[t] = key_ahead(w, at + t, fetch_distance);
            factor[t] = v_mul(load_scales(item.key + bucket.key_scales, item.count), v_set1(scale));
            fetch_line(ahead.part[t] + bucket.key_scales);
            // All of them are read before the first values.
            fetch_line(item.value + bucket.value_scales);
        }
        if (tiles == key_tiles_at_once) {
            integer_tiles<bits, key_tiles_at_once, is_whole>(w, keys, capacity, factor, at, ahead);
        } else {
            integer_tiles<bits, 1, is_whole>(w, keys, capacity, factor, at, ahead);
        }
        at += tiles;
    }
}

template <bool is_whole>
void integer_bucket_of(const Work &w, const Bucket &bucket, float scale) {
    switch (bucket.key_format) {
    case SKERRY_FORMAT_R2:
        integer_bucket<2, is_whole>(w, bucket, scale);
        break;
    case SKERRY_FORMAT_R3:
        integer_bucket<3, is_whole>(w, bucket, scale);
        break;
    case SKERRY_FORMAT_R4:
        integer_bucket<4, is_whole>(w, bucket, scale);
        break;
    default:
        integer_bucket<8, is_whole>(w, bucket, scale);
        break;
    }
}

bool integer_keys_fit(const Work &w, const Bucket &bucket) { return w.params->exact == 0 && is_r_format(bucket.key_format); }

void integer_keys(Work &w, const Bucket &bucket) {
    const skerry_epoch &epoch = w.task->epochs[bucket.epoch];
    prepare_queries(w, epoch);
    split_queries(w, centre_of(bucket.key_format));
    const float scale = w.params->scale * epoch.key_exponent_scale;
    if (bucket.capacity == lanes) {
        integer_bucket_of<true>(w, bucket, scale);
    } else {
        integer_bucket_of<false>(w, bucket, scale);
    }
}

// -------------------------------------------------------------------------------------------------------------- values

// Fields of one line of values as signed bytes: in their place up to bit 6, the highest one moved down by its width.
template <int bits, int fields>
void value_codes(IVec line, IVec (&codes)[fields]) {
    if constexpr (bits == 8) {
        codes[0] = _mm512_xor_si512(line, _mm512_set1_epi8(static_cast<char>(0x80))); // code - 128
    } else if constexpr (bits == 4) {
        codes[0] = _mm512_and_si512(line, _mm512_set1_epi8(0x0f));
        codes[1] = _mm512_and_si512(_mm512_srli_epi32(line, 4), _mm512_set1_epi8(0x0f));
    } else {
        codes[0] = _mm512_and_si512(line, _mm512_set1_epi8(0x03));
        codes[1] = _mm512_and_si512(line, _mm512_set1_epi8(0x0c));
        codes[2] = _mm512_and_si512(line, _mm512_set1_epi8(0x30));
        codes[3] = _mm512_and_si512(_mm512_srli_epi32(line, 2), _mm512_set1_epi8(0x30));
    }
}

template <int j>
void join_value_bit(IVec (&codes)[4], IVec high) {
    constexpr int to = j < 3 ? 2 * j : 4, shift = to + 2 - j;
    codes[j] = _mm512_ternarylogic_epi32(codes[j], _mm512_slli_epi32(high, shift), _mm512_set1_epi8(4 << to), 0xf8);
}

// Bit j of every byte of `high` is bit 2 of field j.
void join_value_bits(IVec (&codes)[4], IVec high) {
    join_value_bit<0>(codes, high);
    join_value_bit<1>(codes, high);
    join_value_bit<2>(codes, high);
    join_value_bit<3>(codes, high);
}

// The 1-bit plane has 128 channels per line. The second 64 of them are its upper four bits; a plane that ends with 64 channels has
// bit k of lane i for channel 8 k + i instead, of which even k belong to lanes below 8 of the 2-bit plane, odd ones to those above.
IVec load_high_bits(const uint8_t *high, int quads, int block, int blocks, int quad) {
    const uint8_t *const line = high + 64 * static_cast<ptrdiff_t>(block / 2) * quads;
    if ((block | 1) < blocks) {
        const IVec bits = _mm512_loadu_si512(line + 64 * quad);
        return (block & 1) == 0 ? bits : _mm512_srli_epi32(bits, 4);
    }
    const IVec both = _mm512_broadcast_i32x8(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(line + 32 * quad)));
    const IVec even = _mm512_mask_srli_epi32(both, 0xff00, both, 1); // bit 2 j of every byte is the one of field j
    const IVec a = _mm512_and_si512(even, _mm512_set1_epi8(0x01)), b = _mm512_and_si512(_mm512_srli_epi32(even, 1), _mm512_set1_epi8(0x02));
    const IVec c = _mm512_and_si512(_mm512_srli_epi32(even, 2), _mm512_set1_epi8(0x04));
    const IVec d = _mm512_and_si512(_mm512_srli_epi32(even, 3), _mm512_set1_epi8(0x08));
    return _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
}

struct ValueRun {
    int begin, end; // in `order`
    int block, blocks, quads;
    ptrdiff_t high;    // offset of the 1-bit plane
    ptrdiff_t fetched; // bytes of the pieces to come that are fetched
};

// One block of channels for some heads, over a few pieces: the output stays in registers.
template <int bits, int heads, bool is_fine, bool is_whole>
void integer_value_run(const Work &w, const ValueRun &run, int head) {
    constexpr int fields = bits == 8 ? 1 : bits == 4 ? 2 : 4, channels = lanes * fields, parts = is_fine ? 2 : 1;
    // What the place of a field in its byte multiplies.
    constexpr float place[4] = {1.0f, fields == 4 ? 4.0f : 1.0f, 16.0f, 16.0f};
    const uint8_t *const bytes = w.weight_bytes + static_cast<ptrdiff_t>(head) * row_logits;
    const float *const steps = w.weight_step + static_cast<ptrdiff_t>(head) * block_items;
    const ptrdiff_t low = static_cast<ptrdiff_t>(w.heads) * row_logits;
    float *const out = w.rotated + static_cast<ptrdiff_t>(head) * w.value_pad + channels * run.block;
    Vec total[heads][fields];
    for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < fields; ++j)
            total[h][j] = v_mul(v_load(out + h * static_cast<ptrdiff_t>(w.value_pad) + lanes * j), v_set1(place[j]));
    }
    for (int at = run.begin; at < run.end; ++at) {
        const uint8_t *const values = w.item[w.order[at]].value;
        if (run.fetched != 0) {
            const uint8_t *const ahead = value_ahead(w, at, fetch_distance);
            for (ptrdiff_t i = 0; i < run.fetched; i += 64)
                fetch_line(ahead + i);
        }
        IVec sum[parts][heads][fields];
        for (int p = 0; p < parts; ++p) {
            for (int h = 0; h < heads; ++h) {
                for (int j = 0; j < fields; ++j)
                    sum[p][h][j] = _mm512_setzero_si512();
            }
        }
        const int quads = is_whole ? lanes / 4 : run.quads;
        const uint8_t *const line = values + 64 * static_cast<ptrdiff_t>(run.block * quads);
        const uint8_t *const weight_at = bytes + lanes * at;
#pragma GCC unroll 4
        for (int quad = 0; quad < quads; ++quad) {
            IVec codes[fields];
            value_codes<bits, fields>(_mm512_loadu_si512(line + 64 * quad), codes);
            if constexpr (bits == 3) join_value_bits(codes, load_high_bits(values + run.high, quads, run.block, run.blocks, quad));
            for (int p = 0; p < parts; ++p) {
                for (int h = 0; h < heads; ++h) {
                    const IVec weight = broadcast_word(weight_at + p * low + h * row_logits + 4 * quad);
                    for (int j = 0; j < fields; ++j)
                        dot_bytes(sum[p][h][j], weight, codes[j]);
                }
            }
        }
        for (int h = 0; h < heads; ++h) {
            const Vec step = v_set1(steps[h * block_items + at]);
            for (int j = 0; j < fields; ++j) {
                Vec x = i_to_f32(sum[0][h][j]);
                if constexpr (is_fine) x = v_fma(x, v_set1(256.0f), i_to_f32(sum[parts - 1][h][j]));
                total[h][j] = v_fma(x, step, total[h][j]);
            }
        }
    }
    for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < fields; ++j) {
            v_store(out + h * static_cast<ptrdiff_t>(w.value_pad) + lanes * j, v_mul(total[h][j], v_set1(1.0f / place[j])));
        }
    }
}

template <int bits, bool is_fine, bool is_whole>
void integer_value_heads(const Work &w, const ValueRun &run, int head) {
    if (w.heads - head >= 2) {
        integer_value_run<bits, 2, is_fine, is_whole>(w, run, head);
    } else {
        integer_value_run<bits, 1, is_fine, is_whole>(w, run, head);
    }
}

template <int bits, bool is_fine>
void integer_value_bucket(Work &w, const Bucket &bucket) {
    constexpr int channels = lanes * (bits == 8 ? 1 : bits == 4 ? 2 : 4);
    constexpr int run_items = 16; // stay in the first-level cache from one block to the next
    const skerry_format format = bucket.value_format;
    const float exponent_scale = w.task->epochs[bucket.epoch].value_exponent_scale;
    // r8 codes lose 128 to become signed, and 0.5 of their level with it.
    const float centre = bits == 8 ? -0.5f : centre_of(format);
    load_value_scales(w, bucket);
    for (int h = 0; h < w.heads; ++h)
        split_weights<is_fine>(w, bucket, h, exponent_scale, centre);
    ValueRun run;
    run.blocks = w.value_dim / channels;
    run.quads = (bucket.capacity + 3) / 4;
    run.high = bits == 3 ? static_cast<ptrdiff_t>(r_plane_bytes(2, SKERRY_SIDE_VALUE, w.value_dim, bucket.capacity)) : 0;
    for (run.begin = bucket.begin; run.begin < bucket.end; run.begin = run.end) {
        run.end = run.begin + run_items < bucket.end ? run.begin + run_items : bucket.end;
        for (int head = 0; head < w.heads; head += 2) {
            for (run.block = 0; run.block < run.blocks; ++run.block) {
                run.fetched = head == 0 && run.block == 0 ? bucket.value_scales : 0;
                if (bucket.capacity == lanes) {
                    integer_value_heads<bits, is_fine, true>(w, run, head);
                } else {
                    integer_value_heads<bits, is_fine, false>(w, run, head);
                }
            }
        }
    }
}

bool integer_values_fit(const Work &w, const Bucket &bucket) {
    if (w.params->exact != 0) return false;
    // Whole blocks only: what is left over lies in lanes of its own width.
    switch (bucket.value_format) {
    case SKERRY_FORMAT_R2:
    case SKERRY_FORMAT_R3:
        return w.value_dim % 64 == 0;
    case SKERRY_FORMAT_R4:
        return w.value_dim % 32 == 0;
    case SKERRY_FORMAT_R8:
        return w.value_dim % 16 == 0;
    default:
        return false;
    }
}

void integer_values(Work &w, const Bucket &bucket) {
    w.rotated_used = true;
    switch (bucket.value_format) {
    case SKERRY_FORMAT_R2:
        integer_value_bucket<2, false>(w, bucket);
        break;
    case SKERRY_FORMAT_R3:
        integer_value_bucket<3, false>(w, bucket);
        break;
    case SKERRY_FORMAT_R4:
        integer_value_bucket<4, false>(w, bucket);
        break;
    default:
        integer_value_bucket<8, true>(w, bucket);
        break;
    }
}

} // namespace

void skerry_cpu_avx512vnni_attend(const skerry_attend_params *params, const skerry_attend_task *task) { engine_attend(params, task); }

size_t skerry_cpu_avx512vnni_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t) {
    return engine_scratch(params, rows);
}

} // namespace skerry
