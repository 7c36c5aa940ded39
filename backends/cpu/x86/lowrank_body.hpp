// SPDX-License-Identifier: MIT
#pragma once

// The decoder of L formats, written once over 16-lane vectors; dimensions are multiples of 16. Its arithmetic is that of ref/lowrank.cpp,
// bit for bit.

#include "codec/layout.hpp"
#include "cpu/product_body.hpp"
#include "cpu/x86/lowrank_codes.hpp"

namespace skerry {

namespace {

template <skerry_format format>
[[gnu::flatten]] void decode_lowrank_rows(const skerry_code_params &params, const uint8_t *part, float *rows, float *basis) {
    const bool is_key = params.side == SKERRY_SIDE_KEY;
    const int32_t dim = params.dim, rank = params.rank;
    const uint8_t *const tokens = part + l_token_offset(format, params.side, dim, rank);
    const uint8_t *const stored_scales = part + l_scale_offset(format, params.side, dim, params.capacity, rank);
    const uint8_t *const end = stored_scales + 4 * static_cast<size_t>(rank);
    float scales[l_tile_tokens + factor_lanes] = {}, lane[factor_lanes];
    std::memcpy(scales, stored_scales, 4 * static_cast<size_t>(rank));

    // basis [rank][dim]
    const ptrdiff_t basis_row = lowrank_row<format>(is_key ? rank : dim);
    if (is_key) {
        for (int32_t c = 0; c < dim; ++c) {
            for (int32_t k = 0; k < rank; k += factor_lanes) {
                v_store(lane, lowrank_codes<format, true>(part + basis_row * c, k, end));
                for (int32_t i = 0; i < factor_lanes && k + i < rank; ++i)
                    basis[static_cast<ptrdiff_t>(k + i) * dim + c] = lane[i];
            }
        }
    } else {
        for (int32_t k = 0; k < rank; ++k) {
            for (int32_t c = 0; c < dim; c += factor_lanes)
                v_store(basis + static_cast<ptrdiff_t>(k) * dim + c, lowrank_codes<format, true>(part + basis_row * k, c, end));
        }
    }

    // Token factors times scales, 16 tokens at a time.
    constexpr int32_t stride = l_tile_tokens;
    float factors[factor_lanes * stride];
    const ptrdiff_t token_row = lowrank_row<format>(is_key ? params.capacity : rank);
    for (int32_t first = 0; first < params.count; first += factor_lanes) {
        const int32_t here = params.count - first < factor_lanes ? params.count - first : factor_lanes;
        if (is_key) {
            for (int32_t k = 0; k < rank; ++k) {
                v_store(lane, v_mul(lowrank_codes<format, true>(tokens + token_row * k, first, end), v_set1(scales[k])));
                for (int32_t i = 0; i < here; ++i)
                    factors[stride * i + k] = lane[i];
            }
        } else {
            for (int32_t i = 0; i < here; ++i) {
                for (int32_t k = 0; k < rank; k += factor_lanes)
                    v_store(factors + stride * i + k,
                            v_mul(lowrank_codes<format, true>(tokens + token_row * (first + i), k, end), v_load(scales + k)));
            }
        }
        add_rows(here, rank, dim, factors, stride, 1, basis, dim, rows + static_cast<ptrdiff_t>(first) * dim, dim);
    }
}

void decode_lowrank_part(const skerry_code_params &params, const uint8_t *part, float *rows, float *basis) {
    switch (params.format) {
    case SKERRY_FORMAT_L32:
        decode_lowrank_rows<SKERRY_FORMAT_L32>(params, part, rows, basis);
        break;
    case SKERRY_FORMAT_L16:
        decode_lowrank_rows<SKERRY_FORMAT_L16>(params, part, rows, basis);
        break;
    case SKERRY_FORMAT_L8:
        decode_lowrank_rows<SKERRY_FORMAT_L8>(params, part, rows, basis);
        break;
    default:
        decode_lowrank_rows<SKERRY_FORMAT_L4>(params, part, rows, basis);
        break;
    }
}

} // namespace

} // namespace skerry
