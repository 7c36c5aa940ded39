// SPDX-License-Identifier: MIT
#include "cpu/x86/avx512_half.hpp"
#include "cpu/x86/avx512_transpose.hpp"
#include "cpu/x86/x86.hpp"

#include <cstring>

namespace {

inline __mmask16 first_lanes(int32_t count) { return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1u); }

inline __m256i to_halves(skerry_format format, __m512 a) {
    return format == SKERRY_FORMAT_F16 ? _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : to_bf16(a);
}

inline void store_full(skerry_format format, uint8_t *part, size_t index, __mmask16 lanes, __m512 a) {
    if (format == SKERRY_FORMAT_F32) {
        _mm512_mask_storeu_ps(part + 4 * index, lanes, a);
    } else {
        _mm256_mask_storeu_epi16(part + 2 * index, lanes, to_halves(format, a));
    }
}

// One token's keys, `capacity` elements apart.
void append_key(skerry_format format, int32_t dim, size_t capacity, size_t token, const float *row, uint8_t *part) {
    if (format == SKERRY_FORMAT_F32) {
        for (int32_t c = 0; c < dim; ++c)
            std::memcpy(part + 4 * (static_cast<size_t>(c) * capacity + token), row + c, 4);
        return;
    }
    for (int32_t c = 0; c < dim; c += 16) {
        const int32_t channels = dim - c < 16 ? dim - c : 16;
        uint16_t halves[16];
        const __m512 numbers = _mm512_maskz_loadu_ps(first_lanes(channels), row + c);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(halves), to_halves(format, numbers));
        uint8_t *const at = part + 2 * (static_cast<size_t>(c) * capacity + token);
        for (int32_t i = 0; i < channels; ++i)
            std::memcpy(at + 2 * static_cast<size_t>(i) * capacity, &halves[i], 2);
    }
}

void append_keys(skerry_format format, int32_t dim, size_t capacity, size_t token, int32_t tokens, const float *rows, int64_t row_stride,
                 uint8_t *part) {
    for (int32_t c = 0; c < dim; c += 16) {
        const int32_t channels = dim - c < 16 ? dim - c : 16;
        __m512 z[16];
#pragma GCC unroll 16
        for (int t = 0; t < 16; ++t) {
            z[t] = t < tokens ? _mm512_maskz_loadu_ps(first_lanes(channels), rows + t * row_stride + c) : _mm512_setzero_ps();
        }
        transpose(z);
        for (int i = 0; i < channels; ++i) {
            store_full(format, part, static_cast<size_t>(c + i) * capacity + token, first_lanes(tokens), z[i]);
        }
    }
}

} // namespace

void skerry::skerry_cpu_avx512_append(skerry_format format, skerry_side side, int32_t dim, int32_t capacity, int32_t first, int32_t count,
                                      const float *rows, int64_t row_stride, void *part) {
    uint8_t *const out = static_cast<uint8_t *>(part);
    constexpr int32_t fewest_for_blocks = 4;
    if (side == SKERRY_SIDE_VALUE) {
        for (int32_t t = 0; t < count; ++t) {
            for (int32_t c = 0; c < dim; c += 16) {
                const __mmask16 lanes = first_lanes(dim - c);
                store_full(format, out, static_cast<size_t>(first + t) * static_cast<size_t>(dim) + static_cast<size_t>(c), lanes,
                           _mm512_maskz_loadu_ps(lanes, rows + t * row_stride + c));
            }
        }
        return;
    }
    for (int32_t t = 0; t < count;) {
        const int32_t tokens = count - t < 16 ? count - t : 16;
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
