// SPDX-License-Identifier: MIT

// R formats by products of bytes that add up in 16 bits: codes are moved to the low end of their byte first, so that several products
// fit before they have to be widened. r8 does not fit and goes through f32.

#include "cpu/attend.hpp"
#include "cpu/x86/avx2_vec.hpp"

#define SKERRY_INTEGER
#include "cpu/x86/attend_engine.hpp"
#include "cpu/x86/attend_integer.hpp"

namespace skerry {

namespace {

constexpr int fetch_distance = 4; // pieces

inline __m256i broadcast_word(const void *at) {
    int32_t word;
    std::memcpy(&word, at, 4);
    return _mm256_set1_epi32(word);
}

// Eight words of a line; those from `words` on are 0 and not read.
template <bool is_whole>
__m256i load_half(const uint8_t *line, int half, int words) {
    const uint8_t *const at = line + 32 * half;
    if constexpr (is_whole) return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    if (words <= 8 * half) return _mm256_setzero_si256();
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(words - 8 * half), lane_numbers(0));
    return _mm256_maskload_epi32(reinterpret_cast<const int *>(at), mask);
}

template <int bits, int j>
__m256i field(__m256i line) {
    return _mm256_and_si256(_mm256_srli_epi16(line, bits * j), _mm256_set1_epi8((1 << bits) - 1));
}

// Bit `from` of every byte, at bit 2.
template <int from>
__m256i third_bit(__m256i line) {
    const __m256i moved = from >= 2 ? _mm256_srli_epi16(line, from >= 2 ? from - 2 : 0) : _mm256_slli_epi16(line, from < 2 ? 2 - from : 0);
    return _mm256_and_si256(moved, _mm256_set1_epi8(4));
}

// ---------------------------------------------------------------------------------------------------------------- keys

// Steps of four channels whose products of codes below 2^bits with bytes of a query stay within 15 bits.
constexpr int steps_in_16_bits(int bits) { return 32767 / (2 * ((1 << bits) - 1) * 128); }

template <int heads>
struct KeySums {
    __m256i narrow[2 * heads][2];
    __m256i wide[2 * heads][2];
};

template <int heads>
void widen(KeySums<heads> &sums) {
    for (int v = 0; v < 2 * heads; ++v) {
        for (int half = 0; half < 2; ++half) {
            const __m256i pairs = _mm256_madd_epi16(sums.narrow[v][half], _mm256_set1_epi16(1));
            sums.wide[v][half] = _mm256_add_epi32(sums.wide[v][half], pairs);
            sums.narrow[v][half] = _mm256_setzero_si256();
        }
    }
}

template <int heads>
inline void add_products(KeySums<heads> &sums, __m256i a, __m256i b, const int8_t *query, ptrdiff_t pad) {
    for (int v = 0; v < 2 * heads; ++v) {
        const __m256i q = broadcast_word(query + v * pad);
        sums.narrow[v][0] = _mm256_add_epi16(sums.narrow[v][0], _mm256_maddubs_epi16(a, q));
        sums.narrow[v][1] = _mm256_add_epi16(sums.narrow[v][1], _mm256_maddubs_epi16(b, q));
    }
}

template <int bits, int j, int heads>
inline void add_field(KeySums<heads> &sums, __m256i a, __m256i b, const int8_t *query, ptrdiff_t pad) {
    add_products(sums, field<bits, j>(a), field<bits, j>(b), query + 4 * j, pad);
}

template <int j, bool is_odd, int heads>
inline void add_three_bits(KeySums<heads> &sums, const __m256i (&low)[2], const __m256i (&high)[2], const int8_t *query, ptrdiff_t pad) {
    constexpr int from = is_odd ? 4 + j : j;
    add_products(sums, _mm256_or_si256(field<2, j>(low[0]), third_bit<from>(high[0])),
                 _mm256_or_si256(field<2, j>(low[1]), third_bit<from>(high[1])), query + 4 * j, pad);
}

template <int bits, int heads, bool is_whole>
void integer_tile(const Work &w, const uint8_t *keys, int words, int head, KeySums<heads> &sums) {
    const ptrdiff_t pad = w.key_pad, line_bytes = is_whole ? 64 : 4 * words;
    const int8_t *const query = w.query_bytes + 2 * head * pad;
    constexpr int channels = bits == 3 ? 16 : 32 / bits, steps = channels / 4;
    const int lines = (w.key_dim + channels - 1) / channels;
    for (int v = 0; v < 2 * heads; ++v) {
        for (int half = 0; half < 2; ++half)
            sums.narrow[v][half] = sums.wide[v][half] = _mm256_setzero_si256();
    }
    int room = steps_in_16_bits(bits);
    for (int line = 0; line < lines; ++line) {
        const uint8_t *const at = keys + line_bytes * line;
        const __m256i low[2] = {load_half<is_whole>(at, 0, words), load_half<is_whole>(at, 1, words)};
        const int8_t *const q = query + channels * line;
        if (room < steps) {
            widen(sums);
            room = steps_in_16_bits(bits);
        }
        room -= steps;
        if constexpr (bits == 4) {
            add_field<4, 0>(sums, low[0], low[1], q, pad);
            add_field<4, 1>(sums, low[0], low[1], q, pad);
        } else if constexpr (bits == 2) {
            add_field<2, 0>(sums, low[0], low[1], q, pad);
            add_field<2, 1>(sums, low[0], low[1], q, pad);
            add_field<2, 2>(sums, low[0], low[1], q, pad);
            add_field<2, 3>(sums, low[0], low[1], q, pad);
        } else {
            // Lines of the 1-bit plane hold 32 channels.
            const uint8_t *const plane = keys + line_bytes * (lines + line / 2);
            const __m256i high[2] = {load_half<is_whole>(plane, 0, words), load_half<is_whole>(plane, 1, words)};
            if ((line & 1) == 0) {
                add_three_bits<0, false>(sums, low, high, q, pad);
                add_three_bits<1, false>(sums, low, high, q, pad);
                add_three_bits<2, false>(sums, low, high, q, pad);
                add_three_bits<3, false>(sums, low, high, q, pad);
            } else {
                add_three_bits<0, true>(sums, low, high, q, pad);
                add_three_bits<1, true>(sums, low, high, q, pad);
                add_three_bits<2, true>(sums, low, high, q, pad);
                add_three_bits<3, true>(sums, low, high, q, pad);
            }
        }
    }
    widen(sums);
}

template <int bits, int heads, bool is_whole>
void integer_chunk(const Work &w, const Item &item, int words, Vec factor, int at, int head) {
    KeySums<heads> sums;
    integer_tile<bits, heads, is_whole>(w, item.key, words, head, sums);
    for (int h = 0; h < heads; ++h) {
        const IVec high = {sums.wide[2 * h][0], sums.wide[2 * h][1]}, low = {sums.wide[2 * h + 1][0], sums.wide[2 * h + 1][1]};
        const Vec whole = v_fma(i_to_f32(high), v_set1(256.0f), i_to_f32(low));
        const Vec raw = v_fma(whole, v_set1(w.query_scale[head + h]), v_set1(w.query_centre[head + h]));
        finish_logits(w, item, at, head + h, raw, factor, w.query_mean[head + h]);
    }
}

template <int bits, bool is_whole>
void integer_key_bucket(const Work &w, const Bucket &bucket, float scale) {
    for (int at = bucket.begin; at < bucket.end; ++at) {
        const Item &item = w.item[w.order[at]];
        const uint8_t *const ahead = key_ahead(w, at, fetch_distance);
        for (ptrdiff_t i = 0; i <= bucket.key_scales; i += 64)
            fetch_line(ahead + i);
        fetch_line(item.value + bucket.value_scales);
        const Vec factor = v_mul(load_scales(item.key + bucket.key_scales, item.count), v_set1(scale));
        for (int head = 0; head < w.heads; head += 2) {
            if (w.heads - head >= 2) {
                integer_chunk<bits, 2, is_whole>(w, item, bucket.capacity, factor, at, head);
            } else {
                integer_chunk<bits, 1, is_whole>(w, item, bucket.capacity, factor, at, head);
            }
        }
    }
}

template <bool is_whole>
void integer_key_bucket_of(const Work &w, const Bucket &bucket, float scale) {
    switch (bucket.key_format) {
    case SKERRY_FORMAT_R2:
        integer_key_bucket<2, is_whole>(w, bucket, scale);
        break;
    case SKERRY_FORMAT_R3:
        integer_key_bucket<3, is_whole>(w, bucket, scale);
        break;
    default:
        integer_key_bucket<4, is_whole>(w, bucket, scale);
        break;
    }
}

bool integer_keys_fit(const Work &w, const Bucket &bucket) {
    return w.params->exact == 0 && is_r_format(bucket.key_format) && bucket.key_format != SKERRY_FORMAT_R8;
}

void integer_keys(Work &w, const Bucket &bucket) {
    const skerry_epoch &epoch = w.task->epochs[bucket.epoch];
    prepare_queries(w, epoch);
    split_queries(w, centre_of(bucket.key_format));
    const float scale = w.params->scale * epoch.key_exponent_scale;
    if (bucket.capacity == lanes) {
        integer_key_bucket_of<true>(w, bucket, scale);
    } else {
        integer_key_bucket_of<false>(w, bucket, scale);
    }
}

// -------------------------------------------------------------------------------------------------------------- values

struct ValueBlock {
    const uint8_t *low;  // first line of the block
    const uint8_t *high; // of the 1-bit plane
    int quads;
    bool is_upper; // the second 64 channels of a line of the 1-bit plane
    bool is_tail;  // a 1-bit plane that ends with 64 channels: bit 2 j + half belongs to field j
};

template <int bits, int fields>
void value_codes(const ValueBlock &block, int quad, int half, __m256i (&codes)[fields]) {
    const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.low + 64 * quad + 32 * half));
    if constexpr (bits == 4) {
        codes[0] = field<4, 0>(line);
        codes[1] = field<4, 1>(line);
    } else {
        codes[0] = field<2, 0>(line);
        codes[1] = field<2, 1>(line);
        codes[2] = field<2, 2>(line);
        codes[3] = field<2, 3>(line);
    }
    if constexpr (bits == 3) {
        const uint8_t *const at = block.is_tail ? block.high + 32 * quad : block.high + 64 * quad + 32 * half;
        const __m256i plane = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
        if (block.is_tail) {
            const __m256i bits_of_half = _mm256_srl_epi16(plane, _mm_cvtsi32_si128(half));
            codes[0] = _mm256_or_si256(codes[0], third_bit<0>(bits_of_half));
            codes[1] = _mm256_or_si256(codes[1], third_bit<2>(bits_of_half));
            codes[2] = _mm256_or_si256(codes[2], third_bit<4>(bits_of_half));
            codes[3] = _mm256_or_si256(codes[3], third_bit<6>(bits_of_half));
        } else {
            const __m256i bits_of_block = _mm256_srl_epi16(plane, _mm_cvtsi32_si128(block.is_upper ? 4 : 0));
            codes[0] = _mm256_or_si256(codes[0], third_bit<0>(bits_of_block));
            codes[1] = _mm256_or_si256(codes[1], third_bit<1>(bits_of_block));
            codes[2] = _mm256_or_si256(codes[2], third_bit<2>(bits_of_block));
            codes[3] = _mm256_or_si256(codes[3], third_bit<3>(bits_of_block));
        }
    }
}

template <int bits, int heads, int fields>
void integer_value_half(const Work &w, const ValueBlock &block, int half, int at, int head, float *out) {
    // Four products of codes up to 15 with bytes up to 255 stay within 15 bits.
    static_assert(4 * 2 * 15 * 255 < 32768);
    const uint8_t *const weights = w.weight_bytes + static_cast<ptrdiff_t>(head) * row_logits + lanes * at;
    __m256i sum[heads][fields];
    for (int h = 0; h < heads; ++h) {
        for (int j = 0; j < fields; ++j)
            sum[h][j] = _mm256_setzero_si256();
    }
    for (int quad = 0; quad < block.quads; ++quad) {
        __m256i codes[fields];
        value_codes<bits, fields>(block, quad, half, codes);
        for (int h = 0; h < heads; ++h) {
            const __m256i weight = broadcast_word(weights + h * row_logits + 4 * quad);
            for (int j = 0; j < fields; ++j)
                sum[h][j] = _mm256_add_epi16(sum[h][j], _mm256_maddubs_epi16(weight, codes[j]));
        }
    }
    for (int h = 0; h < heads; ++h) {
        const __m256 step = _mm256_set1_ps(w.weight_step[static_cast<ptrdiff_t>(head + h) * block_items + at]);
        for (int j = 0; j < fields; ++j) {
            float *const to = out + static_cast<ptrdiff_t>(h) * w.value_pad + lanes * j + 8 * half;
            const __m256 x = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[h][j], _mm256_set1_epi16(1)));
            _mm256_storeu_ps(to, _mm256_fmadd_ps(x, step, _mm256_loadu_ps(to)));
        }
    }
}

template <int bits>
void integer_value_bucket(Work &w, const Bucket &bucket) {
    constexpr int fields = bits == 4 ? 2 : 4, channels = lanes * fields, at_once = bits == 4 ? 4 : 2;
    const float exponent_scale = w.task->epochs[bucket.epoch].value_exponent_scale;
    load_value_scales(w, bucket);
    for (int h = 0; h < w.heads; ++h)
        split_weights<false>(w, bucket, h, exponent_scale, centre_of(bucket.value_format));
    const int blocks = w.value_dim / channels, quads = (bucket.capacity + 3) / 4;
    const size_t high = bits == 3 ? r_plane_bytes(2, SKERRY_SIDE_VALUE, w.value_dim, bucket.capacity) : 0;
    for (int at = bucket.begin; at < bucket.end; ++at) {
        const uint8_t *const values = w.item[w.order[at]].value;
        const uint8_t *const ahead = value_ahead(w, at, fetch_distance);
        for (ptrdiff_t i = 0; i < bucket.value_scales; i += 64)
            fetch_line(ahead + i);
        for (int head = 0; head < w.heads;) {
            const int heads = w.heads - head >= at_once ? at_once : 1;
            for (int b = 0; b < blocks; ++b) {
                ValueBlock block;
                block.low = values + 64 * static_cast<ptrdiff_t>(b * quads);
                block.high = values + high + 64 * static_cast<ptrdiff_t>(b / 2 * quads);
                block.quads = quads;
                block.is_upper = (b & 1) != 0;
                block.is_tail = (b | 1) >= blocks;
                float *const out = w.rotated + static_cast<ptrdiff_t>(head) * w.value_pad + channels * b;
                for (int half = 0; half < 2; ++half) {
                    if (heads == at_once) {
                        integer_value_half<bits, at_once, fields>(w, block, half, at, head, out);
                    } else {
                        integer_value_half<bits, 1, fields>(w, block, half, at, head, out);
                    }
                }
            }
            head += heads;
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
    default:
        return false;
    }
}

void integer_values(Work &w, const Bucket &bucket) {
    w.rotated_used = true;
    switch (bucket.value_format) {
    case SKERRY_FORMAT_R2:
        integer_value_bucket<2>(w, bucket);
        break;
    case SKERRY_FORMAT_R3:
        integer_value_bucket<3>(w, bucket);
        break;
    default:
        integer_value_bucket<4>(w, bucket);
        break;
    }
}

} // namespace

void skerry_cpu_avx2_attend(const skerry_attend_params *params, const skerry_attend_task *task) { engine_attend(params, task); }

size_t skerry_cpu_avx2_attend_scratch(const skerry_attend_params *params, int32_t rows, int32_t) { return engine_scratch(params, rows); }

} // namespace skerry
