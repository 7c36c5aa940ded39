// SPDX-License-Identifier: MIT
#pragma once

// Routing scores for 16-lane vectors; included after the header that defines Vec and after what one instruction set does its own way:
//   lines_at_once: lines of 16 bytes (one word per centroid) of a register of codes; heads_at_once: 1 to 4, for whom registers hold sums
//   Lines load_lines(const uint8_t *, int lines), lowest_field(Lines), next_field(Lines): two bits of every byte, and the rest
//   Lines load_query(const int8_t *), no_lines(), add_lines(Lines, Lines) in 32 bits
//   add_dots(Lines &, codes, query), Lines widen(Lines): sums of products, in 32 bits after at most steps_before_widening registers
//   store_dots(const Lines (&)[lines_at_once], float *): sums over the lines of as many segments, [segment][centroid]
//   transpose(const float *, Vec (&)[4]): [16 segments][4] to four vectors of 16 segments
//   Vec load_bytes(const uint8_t *), exp_of(Vec) of x <= 0, log_of(Vec) of numbers from 1 to 2^20
// Static throughout, for the reason given there.
//
// Segments go in blocks of 16, lanes are segments. No lane looks at another one, so a score does not depend on where a list was cut.

#include "codec/router_key.hpp"
#include "cpu/x86/route_queries.hpp"

#include <cstdint>
#include <cstring>

namespace skerry {

namespace {

constexpr int block_segments = 16, slots = 4; // room for router_centroids vectors
constexpr int block_slots = block_segments * slots;
constexpr float highest = 0x1.fffffep+127f;

struct Block {
    const uint8_t *key[block_segments]; // those that are not there repeat the last one
    int count;
    Vec tokens[slots];
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
    uint8_t tokens[block_slots] = {};
    const uint8_t *const counts = w.task->counts + static_cast<ptrdiff_t>(first) * vectors;
    if (vectors == slots && block.count == block_segments) {
        std::memcpy(tokens, counts, sizeof tokens);
    } else {
        for (int i = 0; i < block.count; ++i)
            std::memcpy(tokens + slots * i, counts + vectors * i, static_cast<size_t>(vectors));
    }
    float lanes[block_slots];
    for (int i = 0; i < slots; ++i)
        v_store(lanes + 16 * i, load_bytes(tokens + 16 * i));
    transpose(lanes, block.tokens);
}

// Scales of the vectors, `offset` bytes into each key.
void load_vector_scales(const Block &block, ptrdiff_t offset, int vectors, Vec (&scales)[slots]) {
    uint16_t halves[block_slots];
    if (vectors == slots) {
        for (int i = 0; i < block_segments; ++i)
            std::memcpy(halves + slots * i, block.key[i] + offset, 2 * slots);
    } else {
        std::memset(halves, 0, sizeof halves);
        for (int i = 0; i < block_segments; ++i)
            std::memcpy(halves + slots * i, block.key[i] + offset, 2 * static_cast<size_t>(vectors));
    }
    float lanes[block_slots];
    for (int i = 0; i < slots; ++i)
        v_store(lanes + 16 * i, v_load_f16(halves + 16 * i));
    transpose(lanes, scales);
}

// What tanh by the exponential loses near 0 is 2^-24 of the cap: nothing to a score.
Vec softcapped(Vec x, float cap) {
    const Vec y = v_mul(x, v_set1(1.0f / cap));
    const Vec e = v_exp(v_mul(v_abs(y), v_set1(-2.0f)));
    const Vec t = v_mul(v_div(v_sub(v_set1(1.0f), e), v_add(v_set1(1.0f), e)), v_set1(cap));
    return v_below(y, v_zero(), v_sub(v_zero(), t), t);
}

// Scores of one query head from sums of products [16 segments][4].
void finish_block(const RouteWork &w, const Block &block, int32_t first, int32_t head, const float *dots, const Vec (&scales)[slots]) {
    const Vec none = v_set1(-__builtin_inff()), step = v_set1(w.queries.step[head]);
    const Vec centre = v_set1(w.queries.centre[head]), mean = v_set1(w.queries.mean[head]);
    Vec logit[slots], largest = none;
    transpose(dots, logit);
    for (int c = 0; c < slots; ++c) {
        logit[c] = v_fma(v_mul(v_sub(logit[c], centre), scales[c]), step, mean);
        if (w.params->softcap > 0) logit[c] = softcapped(logit[c], w.params->softcap);
        // Finite, so that no difference of two is NaN.
        logit[c] = v_max(v_min(logit[c], v_set1(highest)), v_set1(-highest));
        logit[c] = v_below(block.tokens[c], v_set1(0.5f), none, logit[c]);
        largest = v_max(largest, logit[c]);
    }
    const Vec held = v_max(largest, v_set1(-highest));
    Vec sum = v_zero();
    for (int c = 0; c < slots; ++c)
        sum = v_fma(block.tokens[c], exp_of(v_sub(logit[c], held)), sum);
    const Vec score = v_add(largest, log_of(v_max(sum, v_set1(1.0f))));
    const float bias = w.task->bias != nullptr ? w.task->bias[head] : 0.0f;
    v_store_n(w.task->scores + head * w.task->score_stride + first, v_add(score, v_set1(bias)), block.count);
}

// ----------------------------------------------------------------------------------------------------------- centroids

constexpr ptrdiff_t chunk_bytes = 256; // of a query: four fields

// Takes the lowest field out of the codes.
template <int heads>
void add_field(Lines (&sum)[lines_at_once][heads], Lines (&codes)[lines_at_once], const int8_t *query, ptrdiff_t head_bytes) {
    Lines bits[lines_at_once];
    for (int s = 0; s < lines_at_once; ++s) {
        bits[s] = lowest_field(codes[s]);
        codes[s] = next_field(codes[s]);
    }
    for (int h = 0; h < heads; ++h) {
        const Lines q = load_query(query + h * head_bytes);
        for (int s = 0; s < lines_at_once; ++s)
            add_dots(sum[s][h], bits[s], q);
    }
}

// As many segments as a register has lines, for some heads. `dots`: [heads][16 segments][4].
template <int heads>
void centroid_dots(const RouteWork &w, const uint8_t *const *key, int32_t head, float *dots) {
    constexpr int registers_of_chunk = 4 / lines_at_once;
    const int lines = (w.params->dim + 15) / 16, steps = (lines + lines_at_once - 1) / lines_at_once;
    const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(w.queries.chunks) * chunk_bytes;
    const int8_t *const queries = w.queries.bytes + head * head_bytes;
    Lines total[lines_at_once][heads];
    for (int s = 0; s < lines_at_once; ++s) {
        for (int h = 0; h < heads; ++h)
            total[s][h] = no_lines();
    }
    for (int begin = 0; begin < steps; begin += steps_before_widening) {
        const int end = steps - begin < steps_before_widening ? steps : begin + steps_before_widening;
        Lines sum[lines_at_once][heads];
        for (int s = 0; s < lines_at_once; ++s) {
            for (int h = 0; h < heads; ++h)
                sum[s][h] = no_lines();
        }
        for (int step = begin; step < end; ++step) {
            const int line = step * lines_at_once, rest = lines - line;
            const int8_t *const query = queries + step / registers_of_chunk * chunk_bytes + step % registers_of_chunk * 16 * lines_at_once;
            Lines codes[lines_at_once];
            for (int s = 0; s < lines_at_once; ++s)
                codes[s] = load_lines(key[s] + 16 * line, rest);
            for (int j = 0; j < 4; ++j)
                add_field<heads>(sum, codes, query + 64 * j, head_bytes);
        }
        for (int s = 0; s < lines_at_once; ++s) {
            for (int h = 0; h < heads; ++h)
                total[s][h] = add_lines(total[s][h], widen(sum[s][h]));
        }
    }
    for (int h = 0; h < heads; ++h) {
        Lines of_head[lines_at_once];
        for (int s = 0; s < lines_at_once; ++s)
            of_head[s] = total[s][h];
        store_dots(of_head, dots + h * block_slots);
    }
}

template <int heads>
void centroid_block(const RouteWork &w, const Block &block, int32_t first, int32_t head, const Vec (&scales)[slots]) {
    float dots[heads * block_slots];
    for (int s = 0; s < block_segments; s += lines_at_once)
        centroid_dots<heads>(w, block.key + s, head, dots + slots * s);
    for (int h = 0; h < heads; ++h)
        finish_block(w, block, first, head + h, dots + h * block_slots, scales);
}

void route_centroids(const RouteWork &w) {
    const size_t key_bytes = router_key_bytes(*w.params);
    const ptrdiff_t offset = static_cast<ptrdiff_t>(r_scale_offset(SKERRY_FORMAT_R2, SKERRY_SIDE_KEY, w.params->dim, slots));
    for (int32_t first = 0; first < w.task->segments; first += block_segments) {
        Block block;
        fill_block(block, w, first, key_bytes);
        Vec scales[slots];
        load_vector_scales(block, offset, slots, scales);
        for (int32_t head = 0; head < w.params->group; head += heads_at_once) {
            const int rest = w.params->group - head;
            if (rest >= heads_at_once) {
                centroid_block<heads_at_once>(w, block, first, head, scales);
            } else if (rest == 1) {
                centroid_block<1>(w, block, first, head, scales);
            } else if (rest == 2) {
                centroid_block<2>(w, block, first, head, scales);
            } else {
                centroid_block<3>(w, block, first, head, scales);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- projections

// Lines of four components of the vectors, as 16-bit numbers. Ranks are short: registers of 256 bits serve every instruction set.
template <int lines>
struct ProjectedLines {
    __m256i line[lines];
};

// Four lines of bytes, or eight of which two share one line of words.
template <int lines>
ProjectedLines<lines> load_projected(const uint8_t *key, int stored, int vectors) {
    uint8_t words[64] = {};
    const uint8_t *at = key;
    if (vectors != slots || stored != 4) {
        for (int l = 0; l < stored; ++l)
            std::memcpy(words + 16 * l, key + 4 * vectors * l, static_cast<size_t>(4 * vectors));
        at = words;
    }
    ProjectedLines<lines> loaded;
    for (int l = 0; l < 4; ++l) {
        const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at + 16 * l));
        if constexpr (lines == 4) {
            loaded.line[l] = _mm256_cvtepi8_epi16(line);
        } else {
            const __m128i low = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
            const auto extended = [&](__m128i half) {
                return _mm256_cvtepi8_epi16(_mm_sub_epi8(_mm_xor_si128(_mm_and_si128(half, low), sign), sign));
            };
            loaded.line[2 * l] = extended(line);
            loaded.line[2 * l + 1] = extended(_mm_srli_epi16(line, 4));
        }
    }
    return loaded;
}

// Halves of the sums of the four vectors: lane 2 c + i has components 2 i and 2 i + 1 of every line of vector c.
template <int lines>
__m256i projected_halves(const ProjectedLines<lines> &codes, const int16_t *query) {
    __m256i sum = _mm256_setzero_si256();
    for (int l = 0; l < lines; ++l) {
        int64_t four;
        std::memcpy(&four, query + 4 * l, 8);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes.line[l], _mm256_set1_epi64x(four)));
    }
    return sum;
}

template <int lines>
void route_projected(const RouteWork &w) {
    const skerry_route_params &params = *w.params;
    const int vectors = params.vectors, components = lines == 4 ? 4 : 8, stored = (params.dim + components - 1) / components;
    const size_t key_bytes = router_key_bytes(params), set_bytes = key_bytes / static_cast<size_t>(params.sets);
    const ptrdiff_t scale_offset = static_cast<ptrdiff_t>(projected_scale_offset(params.dim, vectors));
    const int32_t heads_of_set = params.group / params.sets;
    for (int32_t first = 0; first < w.task->segments; first += block_segments) {
        Block block;
        fill_block(block, w, first, key_bytes);
        for (int32_t set = 0; set < params.sets; ++set) {
            const ptrdiff_t set_offset = static_cast<ptrdiff_t>(set_bytes) * set;
            ProjectedLines<lines> codes[block_segments];
            for (int s = 0; s < block_segments; ++s)
                codes[s] = load_projected<lines>(block.key[s] + set_offset, stored, vectors);
            Vec scales[slots];
            load_vector_scales(block, set_offset + scale_offset, vectors, scales);
            for (int32_t head = set * heads_of_set; head < (set + 1) * heads_of_set; ++head) {
                const int16_t *const query = w.queries.words + head * router_rank_limit;
                float dots[block_slots];
                for (int s = 0; s < block_segments; s += 2) {
                    // [a0 a1 b0 b1 a2 a3 b2 b3], a and b the two segments.
                    const __m256i pair = _mm256_hadd_epi32(projected_halves(codes[s], query), projected_halves(codes[s + 1], query));
                    _mm256_storeu_ps(dots + slots * s, _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pair, 0xd8)));
                }
                finish_block(w, block, first, head, dots, scales);
            }
        }
    }
}

// Flattened, lest a copy of a shared inline function is left here for the linker to find.
[[gnu::flatten]] void route_segments(const skerry_route_params *params, const skerry_route_task *task) {
    const RouteWork w = {params, task, skerry_cpu_route_queries(params, task)};
    if (params->form == SKERRY_ROUTE_CENTROIDS) {
        route_centroids(w);
    } else if (params->dim <= router_byte_rank) {
        route_projected<4>(w);
    } else {
        route_projected<8>(w);
    }
}

} // namespace

} // namespace skerry
