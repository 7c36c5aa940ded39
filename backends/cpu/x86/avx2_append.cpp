// SPDX-License-Identifier: MIT
#include "cpu/x86/avx2_half.hpp"
#include "cpu/x86/avx2_transpose.hpp"
#include "cpu/x86/x86.hpp"

#include <cstring>

namespace {

inline __m256 load_some(const float *at, int32_t count) {
    if (count >= 8) return _mm256_loadu_ps(at);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(at, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
}

inline __m128i to_halves(skerry_format format, __m256 a) {
    return format == SKERRY_FORMAT_F16 ? _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : to_bf16(a);
}

inline void store_full(skerry_format format, uint8_t *part, size_t index, int32_t count, __m256 a) {
    if (format == SKERRY_FORMAT_F32) {
        float numbers[8];
        if (count >= 8) {
            _mm256_storeu_ps(reinterpret_cast<float *>(part + 4 * index), a);
            return;
        }
        _mm256_storeu_ps(numbers, a);
        std::memcpy(part + 4 * index, numbers, 4 * static_cast<size_t>(count));
        return;
    }
    const __m128i halves = to_halves(format, a);
    if (count >= 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(part + 2 * index), halves);
        return;
    }
    uint16_t numbers[8];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(numbers), halves);
    std::memcpy(part + 2 * index, numbers, 2 * static_cast<size_t>(count));
}

// One token's keys, `capacity` elements apart.
void append_key(skerry_format format, int32_t dim, size_t capacity, size_t token, const float *row, uint8_t *part) {
    if (format == SKERRY_FORMAT_F32) {
        for (int32_t c = 0; c < dim; ++c)
            std::memcpy(part + 4 * (static_cast<size_t>(c) * capacity + token), row + c, 4);
        return;
    }
    for (int32_t c = 0; c < dim; c += 8) {
        const int32_t channels = dim - c < 8 ? dim - c : 8;
        uint16_t halves[8];
        _mm_storeu_si128(reinterpret_cast<__m128i *>(halves), to_halves(format, load_some(row + c, channels)));
        uint8_t *const at = part + 2 * (static_cast<size_t>(c) * capacity + token);
        for (int32_t i = 0; i < channels; ++i)
            std::memcpy(at + 2 * static_cast<size_t>(i) * capacity, &halves[i], 2);
    }
}

void append_keys(skerry_format format, int32_t dim, size_t capacity, size_t token, int32_t tokens, const float *rows, int64_t row_stride,
                 uint8_t *part) {
    for (int32_t c = 0; c < dim; c += 8) {
        const int32_t channels = dim - c < 8 ? dim - c : 8;
        __m256 z[8];
#pragma GCC unroll 8
        for (int t = 0; t < 8; ++t)
            z[t] = t < tokens ? load_some(rows + t * row_stride + c, channels) : _mm256_setzero_ps();
        transpose(z);
        for (int i = 0; i < channels; ++i) {
            store_full(format, part, static_cast<size_t>(c + i) * capacity + token, tokens, z[i]);
        }
    }
}

} // namespace

void skerry::skerry_cpu_avx2_append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count,
                                    const float *rows, int64_t row_stride, void *part) {
    uint8_t *const out = static_cast<uint8_t *>(part);
    constexpr int32_t fewest_for_blocks = 4;
    if (side == SKERRY_SIDE_VALUE) {
        for (int32_t t = 0; t < count; ++t) {
            for (int32_t c = 0; c < dim; c += 8) {
                store_full(format, out, static_cast<size_t>(first + t) * static_cast<size_t>(dim) + static_cast<size_t>(c), dim - c,
                           load_some(rows + t * row_stride + c, dim - c));
            }
        }
        return;
    }
    for (int32_t t = 0; t < count;) {
        const int32_t tokens = count - t < 8 ? count - t : 8;
        const float *const source = rows + t * row_stride;
        const size_t token = static_cast<size_t>(first + t);
        if (tokens >= fewest_for_blocks) {
            append_keys(format, dim, static_cast<size_t>(capacity), token, tokens, source, row_stride, out);
            t += tokens;
        } else {
            append_key(format, dim, static_cast<size_t>(capacity), token, source, out);
            t += 1;
        }
    }
}
