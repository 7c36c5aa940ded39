// SPDX-License-Identifier: MIT
#include "codec/lowrank.hpp"
#include "codec/layout.hpp"
#include "cpu/ref/ref.hpp"

namespace skerry::ref {

// Sums run over components in ascending order, without fused multiply-add: the error that factorise measured is that of these rows.
void decode_lowrank(const skerry_code_params *params, const void *part, float *rows) {
    const LowRankPart in(params->format, params->side, params->dim, params->capacity, params->rank, static_cast<const uint8_t *>(part));
    float factors[l_tile_tokens];
    for (int32_t t = 0; t < params->count; ++t) {
        for (int32_t k = 0; k < params->rank; ++k)
            factors[k] = in.token(k, t) * in.scale(k);
        float *const row = rows + static_cast<size_t>(t) * static_cast<size_t>(params->dim);
        for (int32_t c = 0; c < params->dim; ++c) {
            float sum = 0;
            for (int32_t k = 0; k < params->rank; ++k)
                sum += factors[k] * in.basis(k, c);
            row[c] = sum;
        }
    }
}

} // namespace skerry::ref
