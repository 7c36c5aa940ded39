// SPDX-License-Identifier: MIT
#pragma once

// Routing scores for 16-lane vectors; included after the header that defines Vec and after what one instruction set does its own way:
//   register_segments: 2 or 4, segments of a register of codes. Register r holds one line of 16 bytes (one word per centroid) of each of
//   the segments first_of(r), 4 further, and so on: so transpositions leave segments in order without crossing lanes
//   Lines load_lines(const uint8_t *const *key, ptrdiff_t at): of key[0], key[4] ...; lowest_field(Lines), next_field(Lines): two bits of
//   every byte, and the rest
//   Lines load_query(const void *): four bytes, for every word; no_lines(), all_lines(int32_t), add_lines(Lines, Lines) in 32 bits
//   add_dots(Lines &, codes, query), Lines twice(Lines): sums of products, twice these in 32 bits after at most lines_before_widening lines
//   load_sums(const int32_t *), store_sums(int32_t *, Lines)
//   up_words(Lines, int bits), down_words(Lines, int bits): shifts of 16-bit numbers, the second with their sign; word_dots(Lines, Lines):
//   products of such, added in pairs
//   Row: one register of f32, row_segments of them; load_row, store_row, all_row(float), max_rows, min_rows, fma_rows. Four vectors of 16
//   segments as registers, with the constants of an exponential, are more than there are of 256 bits
//   transpose_sums(const int32_t *, int row, Row (&)[4]): sums of a block to its row of each vector
//   exp2_rows(Row (&x)[4], float level): 2^(x - level) of x <= level + 32, step by step for all four; the level is a multiple of
//   level_step within level_limit, and a number has the same bits but for the exponent under any of them. any_above(Row, Row): whether a
//   lane is; rows_from(float, Row): 0 in place of what is less
//   Vec load_counts(const uint8_t *, int c): byte c of 16 words; from_halves(__m128i, __m128i) of f16
// Static throughout, for the reason given there.
//
// Segments go in blocks of 16, lanes are segments. A head's scores are relative to two to the power of its level, which follows its largest
// logit in steps so large that it rarely moves after the first row. Where it does, what was written is multiplied by a power of two: where
// a list was cut changes the unit of scores, and no other bit of those above 2^-50 of the largest.

#include "codec/router_key.hpp"
#include "cpu/x86/route_queries.hpp"

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

constexpr int block_segments = 16, slots = 4; // room for router_centroids vectors
constexpr int block_slots = block_segments * slots;
constexpr float log2_e = 0x1.715476p+0f, ln_2 = 0x1.62e430p-1f;

struct Block {
    alignas(64) float tokens[slots][block_segments];
    alignas(64) float absent[slots][block_segments]; // -inf where there is no vector, else 0
    alignas(64) float scales[slots][block_segments];
    const uint8_t *key[block_segments]; // those that are not there repeat the last one
    const uint8_t *ahead;               // keys of the block after the next, for prefetches: all at once would hold up loads
    int count;
};

struct RouteWork {
    const skerry_route_params *params;
    const skerry_route_task *task;
    RouteQueries queries;
};

void fill_block(Block &block, const RouteWork &w, int32_t first, size_t key_bytes) {
    const int vectors = w.params->vectors;
    block.count = w.task->segments - first < block_segments ? w.task->segments - first : block_segments;
    for (int i = 0; i < block_segments; ++i) {
        const int32_t s = first + (i < block.count ? i : block.count - 1);
        block.key[i] = w.task->keys + static_cast<size_t>(s) * key_bytes;
    }
    const bool is_last = w.task->segments - first < 3 * block_segments;
    block.ahead = block.key[0] + (is_last ? 0 : 2 * block_segments * key_bytes);
    const uint8_t *counts = w.task->counts + static_cast<ptrdiff_t>(first) * vectors;
    uint8_t padded[block_slots] = {};
    if (vectors != slots || block.count != block_segments) {
        for (int i = 0; i < block.count; ++i)
            std::memcpy(padded + slots * i, counts + vectors * i, static_cast<size_t>(vectors));
        counts = padded;
    }
    for (int c = 0; c < slots; ++c) {
        const Vec tokens = load_counts(counts, c);
        v_store(block.tokens[c], tokens);
        v_store(block.absent[c], v_below(tokens, v_set1(0.5f), v_set1(-__builtin_inff()), v_zero()));
    }
}

// Scales of the vectors, `offset` bytes into each key.
void load_vector_scales(Block &block, ptrdiff_t offset, int vectors) {
    __m128i of_four[slots][4]; // [vector][four segments], in the low half
    for (int q = 0; q < 4; ++q) {
        __m128i of_one[4];
        for (int i = 0; i < 4; ++i) {
            const uint8_t *const at = block.key[4 * q + i] + offset;
            if (vectors == slots) {
                of_one[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at));
            } else {
                uint64_t halves = 0;
                std::memcpy(&halves, at, 2 * static_cast<size_t>(vectors));
                of_one[i] = _mm_cvtsi64_si128(static_cast<int64_t>(halves));
            }
        }
        const __m128i low = _mm_unpacklo_epi16(of_one[0], of_one[1]), high = _mm_unpacklo_epi16(of_one[2], of_one[3]);
        const __m128i first = _mm_unpacklo_epi32(low, high), second = _mm_unpackhi_epi32(low, high);
        of_four[0][q] = first;
        of_four[1][q] = _mm_unpackhi_epi64(first, first);
        of_four[2][q] = second;
        of_four[3][q] = _mm_unpackhi_epi64(second, second);
    }
    for (int c = 0; c < slots; ++c) {
        const __m128i *const four = of_four[c];
        v_store(block.scales[c], from_halves(_mm_unpacklo_epi64(four[0], four[1]), _mm_unpacklo_epi64(four[2], four[3])));
    }
}

// What tanh by the exponential loses near 0 is 2^-24 of the cap: nothing to a score.
Vec softcapped(Vec x, float cap) {
    const Vec y = v_mul(x, v_set1(1.0f / cap));
    const Vec e = v_exp(v_mul(v_abs(y), v_set1(-2.0f)));
    const Vec t = v_mul(v_div(v_sub(v_set1(1.0f), e), v_add(v_set1(1.0f), e)), v_set1(cap));
    return v_below(y, v_zero(), v_sub(v_zero(), t), t);
}

// Logits to base 2 are at most level_reach above the level, and the largest is above that much below it. Beyond level_limit they are held:
// f32 has no more than eighths there.
constexpr float level_step = 64.0f, level_reach = 32.0f, level_limit = 0x1p21f;
constexpr float least_score = 0x1p-100f; // above what terms come to that exp2_rows holds; nobody need multiply subnormal numbers

// The level with `largest` among the logits. Brings what the head has so far, `scored` scores and the first `count` of `block`, to it.
[[gnu::cold, gnu::noinline]] float raise_level(const RouteWork &w, int32_t head, int32_t scored, const float (&largest)[row_segments],
                                               float *block, int count) {
    float *const level = w.task->log_unit + head, most = largest[0];
    for (const float x : largest)
        most = x > most ? x : most;
    most = most < level_limit ? most : level_limit;
    const float raised = level_step * __builtin_ceilf((most - level_reach) / level_step), by = raised - *level;
    // Two steps leave 2^-54 of the largest at most: 10 of the 64 are the logarithm of 1,020 tokens.
    const float factor = by == 0 ? 1.0f : by == level_step ? 0x1p-64f : 0.0f;
    const auto multiply = [factor](float *scores, int32_t n) {
        for (int32_t i = 0; i < n; ++i)
            scores[i] = scores[i] * factor < least_score ? 0.0f : scores[i] * factor;
    };
    multiply(w.task->scores + head * w.task->score_stride, scored);
    multiply(block, count);
    *level = raised;
    return raised;
}

// One query head's scores of a block, from sums of products. Logits are finite (route_queries.cpp) and to base 2.
template <bool has_cap>
void add_up(const RouteWork &w, const Block &of_all, int32_t first, int32_t head, const int32_t *sums) {
    // Hides that the block is the same for all heads: g++ 12 would copy all of it to where it keeps what does not change.
    const Block *hidden = &of_all;
    __asm__("" : "+r"(hidden));
    const Block &block = *hidden;
    alignas(64) float capped[slots][block_segments], scores[block_segments];
    float level = w.task->log_unit[head];
    const Row step = all_row(w.queries.step[head]);
    if constexpr (has_cap) {
        for (int at = 0; at < block_segments; at += row_segments) {
            Row logit[slots];
            transpose_sums(sums, at, logit);
            for (int c = 0; c < slots; ++c)
                store_row(capped[c] + at, fma_rows(logit[c] * step, load_row(block.scales[c] + at), all_row(w.queries.mean[head])));
        }
        for (int c = 0; c < slots; ++c)
            v_store(capped[c], v_mul(softcapped(v_load(capped[c]), w.params->softcap), v_set1(log2_e)));
    }
    for (int at = 0; at < block_segments; at += row_segments) {
        Row logit[slots];
        if constexpr (!has_cap) transpose_sums(sums, at, logit);
        for (int c = 0; c < slots; ++c) {
            const Row absent = load_row(block.absent[c] + at);
            if constexpr (has_cap) {
                logit[c] = load_row(capped[c] + at) + absent;
            } else {
                // The unit gets the mean, as all logits have it.
                logit[c] = fma_rows(logit[c] * step, load_row(block.scales[c] + at), absent);
            }
        }
        const Row largest = max_rows(max_rows(logit[0], logit[1]), max_rows(logit[2], logit[3]));
        if (__builtin_expect(any_above(largest, all_row(level + level_reach)), 0)) {
            alignas(64) float row[row_segments];
            store_row(row, largest);
            level = raise_level(w, head, first, row, scores, at);
            for (int c = 0; c < slots; ++c)
                logit[c] = min_rows(logit[c], all_row(level + level_reach));
        }
        exp2_rows(logit, level);
        const auto tokens = [&](int c) { return load_row(block.tokens[c] + at); };
        const Row sum = fma_rows(tokens(0), logit[0], tokens(1) * logit[1]) + fma_rows(tokens(2), logit[2], tokens(3) * logit[3]);
        store_row(scores + at, rows_from(least_score, sum));
    }
    v_store_n(w.task->scores + head * w.task->score_stride + first, v_load(scores), block.count);
}

// ----------------------------------------------------------------------------------------------------------- centroids

constexpr int block_registers = block_segments / register_segments, registers_at_once = 2;

constexpr int first_of(int r) { return r % 4 + 8 * (r / 4); }

// Takes the lowest field out of the codes.
template <int heads>
void add_field(Lines (&sum)[registers_at_once][heads], Lines (&codes)[registers_at_once], const int8_t *query) {
    Lines bits[registers_at_once];
    for (int r = 0; r < registers_at_once; ++r) {
        bits[r] = lowest_field(codes[r]);
        codes[r] = next_field(codes[r]);
    }
    for (int h = 0; h < heads; ++h) {
        const Lines q = load_query(query + 4 * h);
        for (int r = 0; r < registers_at_once; ++r)
            add_dots(sum[r][h], bits[r], q);
    }
}

// Registers r and r + 1, for some heads. `sums`: [heads][block_slots].
template <int heads>
void centroid_dots(const RouteWork &w, const Block &block, int r, int32_t head, int32_t *sums) {
    const uint8_t *const *const key = block.key + first_of(r);
    static_assert(first_of(1) == first_of(0) + 1);
    const int lines = (w.params->dim + 15) / 16;
    const int8_t *query = w.queries.bytes + head * w.queries.head_bytes;
    constexpr int quarters = registers_at_once * register_segments / 4; // of a block
    const size_t quarter_bytes = 4 * router_key_bytes(*w.params);
    const uint8_t *const ahead = block.ahead + static_cast<size_t>(r / registers_at_once * quarters) * quarter_bytes;
    for (int begin = 0; begin < lines; begin += lines_before_widening) {
        const int end = lines - begin < lines_before_widening ? lines : begin + lines_before_widening;
        Lines sum[registers_at_once][heads];
        for (int i = 0; i < registers_at_once; ++i) {
            for (int h = 0; h < heads; ++h)
                sum[i][h] = no_lines();
        }
        for (int line = begin; line < end; ++line, query += 16 * heads) {
            Lines codes[registers_at_once];
            for (int i = 0; i < registers_at_once; ++i)
                codes[i] = load_lines(key + i, 16 * line);
            for (int i = 0; i < quarters; ++i)
                __builtin_prefetch(ahead + static_cast<size_t>(i) * quarter_bytes + 64 * line);
            for (int j = 0; j < 4; ++j)
                add_field<heads>(sum, codes, query + 4 * heads * j);
        }
        for (int h = 0; h < heads; ++h) {
            for (int i = 0; i < registers_at_once; ++i) {
                int32_t *const at = sums + h * block_slots + slots * register_segments * (r + i);
                store_sums(at, add_lines(begin == 0 ? all_lines(w.queries.centre[head + h]) : load_sums(at), twice(sum[i][h])));
            }
        }
    }
}

template <int heads, bool has_cap>
void centroid_block(const RouteWork &w, const Block &block, int32_t first, int32_t head) {
    alignas(64) int32_t sums[heads * block_slots];
    for (int r = 0; r < block_registers; r += registers_at_once)
        centroid_dots<heads>(w, block, r, head, sums);
    for (int h = 0; h < heads; ++h)
        add_up<has_cap>(w, block, first, head + h, sums + h * block_slots);
}

template <bool has_cap>
void route_centroids(const RouteWork &w) {
    const size_t key_bytes = router_key_bytes(*w.params);
    const ptrdiff_t offset = static_cast<ptrdiff_t>(r_scale_offset(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, w.params->dim, slots));
    for (int32_t first = 0; first < w.task->segments; first += block_segments) {
        Block block;
        fill_block(block, w, first, key_bytes);
        load_vector_scales(block, offset, slots);
        for (int32_t head = 0; head < w.params->group; head += route_heads) {
            const int rest = w.params->group - head;
            static_assert(route_heads == 4);
            if (rest >= 4) {
                centroid_block<4, has_cap>(w, block, first, head);
            } else if (rest == 1) {
                centroid_block<1, has_cap>(w, block, first, head);
            } else if (rest == 2) {
                centroid_block<2, has_cap>(w, block, first, head);
            } else {
                centroid_block<3, has_cap>(w, block, first, head);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- projections

// Components lie in bytes or in halves of bytes, each a `fields`th of a word of 16 bits: shifted to its top and down again a field is a
// number of 16 bits, and a product of two words adds up what one 32-bit lane has of a vector.
template <int fields>
Lines projected_field(Lines codes, int field) {
    return fields == 2 ? down_words(field == 0 ? up_words(codes, 8) : codes, 8) : down_words(up_words(codes, 12 - 4 * field), 12);
}

constexpr ptrdiff_t projected_lines = 4;

// Register r for some heads. `keys`: of 16 segments, whole lines. `sums`: [heads][block_slots].
template <int fields, int heads>
void projected_dots(const RouteWork &w, const uint8_t *const *keys, int r, int32_t head, int32_t *sums) {
    const int16_t *const queries = w.queries.words + head * router_rank_limit;
    Lines sum[heads];
    for (int h = 0; h < heads; ++h)
        sum[h] = no_lines();
    for (ptrdiff_t line = 0; line < projected_lines; ++line) {
        const Lines codes = load_lines(keys + first_of(r), 16 * line);
        Lines field[fields];
        for (int j = 0; j < fields; ++j)
            field[j] = projected_field<fields>(codes, j);
        for (int h = 0; h < heads; ++h) {
            for (int j = 0; j < fields; ++j)
                sum[h] = add_lines(sum[h], word_dots(field[j], load_query(queries + h * router_rank_limit + 2 * (fields * line + j))));
        }
    }
    for (int h = 0; h < heads; ++h)
        store_sums(sums + h * block_slots + slots * register_segments * r, sum[h]);
}

template <int fields, int heads, bool has_cap>
void projected_block(const RouteWork &w, const Block &block, const uint8_t *const *keys, int32_t first, int32_t head) {
    alignas(64) int32_t sums[heads * block_slots];
    for (int r = 0; r < block_registers; ++r) {
        constexpr int prefetches = 24 / block_registers; // keys of at most 72 bytes fill 19 lines of a block, and those of one set
        for (int i = 0; i < prefetches; ++i)
            __builtin_prefetch(block.ahead + 64 * (prefetches * r + i));
        projected_dots<fields, heads>(w, keys, r, head, sums);
    }
    for (int h = 0; h < heads; ++h)
        add_up<has_cap>(w, block, first, head + h, sums + h * block_slots);
}

// Where the lines of a set lie, each of four words and four of them: copies where there are fewer.
struct WholeLines {
    const uint8_t *key[block_segments];
    uint8_t copy[block_segments][16 * projected_lines];
};

void find_lines(const RouteWork &w, const Block &block, ptrdiff_t offset, int fields, WholeLines &lines) {
    const int components = 2 * fields, stored = (w.params->dim + components - 1) / components, vectors = w.params->vectors;
    const bool is_whole = vectors == slots && stored == projected_lines;
    for (int s = 0; s < block_segments; ++s) {
        const uint8_t *const key = block.key[s] + offset;
        lines.key[s] = is_whole ? key : lines.copy[s];
        if (is_whole) continue;
        std::memset(lines.copy[s], 0, sizeof lines.copy[s]);
        for (int l = 0; l < stored; ++l)
            std::memcpy(lines.copy[s] + 16 * l, key + 4 * vectors * l, static_cast<size_t>(4 * vectors));
    }
}

template <int fields, bool has_cap>
void route_projected(const RouteWork &w) {
    const skerry_route_params &params = *w.params;
    const size_t key_bytes = router_key_bytes(params), set_bytes = key_bytes / static_cast<size_t>(params.sets);
    const ptrdiff_t scale_offset = static_cast<ptrdiff_t>(projected_scale_offset(params.dim, params.vectors));
    const int32_t heads_of_set = params.group / params.sets;
    for (int32_t first = 0; first < w.task->segments; first += block_segments) {
        Block block;
        fill_block(block, w, first, key_bytes);
        for (int32_t set = 0; set < params.sets; ++set) {
            const ptrdiff_t set_offset = static_cast<ptrdiff_t>(set_bytes) * set;
            load_vector_scales(block, set_offset + scale_offset, params.vectors);
            WholeLines lines;
            find_lines(w, block, set_offset, fields, lines);
            for (int32_t h = 0; h < heads_of_set; h += route_heads) {
                const int32_t rest = heads_of_set - h, head = set * heads_of_set + h;
                if (rest >= 4) {
                    projected_block<fields, 4, has_cap>(w, block, lines.key, first, head);
                } else if (rest == 1) {
                    projected_block<fields, 1, has_cap>(w, block, lines.key, first, head);
                } else if (rest == 2) {
                    projected_block<fields, 2, has_cap>(w, block, lines.key, first, head);
                } else {
                    projected_block<fields, 3, has_cap>(w, block, lines.key, first, head);
                }
            }
        }
    }
}

template <bool has_cap>
void route_form(const RouteWork &w) {
    if (w.params->form == SKERRY_ROUTE_CENTROIDS) {
        route_centroids<has_cap>(w);
    } else if (w.params->dim <= router_byte_rank) {
        route_projected<2, has_cap>(w);
    } else {
        route_projected<4, has_cap>(w);
    }
}

// Flattened, lest a copy of a shared inline function is left here for the linker to find.
[[gnu::flatten]] void route_segments(const skerry_route_params *params, const skerry_route_task *task) {
    const RouteWork w = {params, task, skerry_cpu_route_queries(params, task)};
    for (int32_t h = 0; h < params->group; ++h)
        task->log_unit[h] = -level_limit;
    if (params->softcap > 0) {
        route_form<true>(w);
    } else {
        route_form<false>(w);
    }
    for (int32_t h = 0; h < params->group; ++h) {
        const float bias = task->bias != nullptr ? task->bias[h] : 0.0f;
        task->log_unit[h] = task->log_unit[h] * ln_2 + (params->softcap > 0 ? bias : w.queries.mean[h] + bias);
    }
}

} // namespace

} // namespace skerry
