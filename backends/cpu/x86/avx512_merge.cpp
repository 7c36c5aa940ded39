// SPDX-License-Identifier: MIT
#include "cpu/attend.hpp"
#include "cpu/x86/avx512_vec.hpp"

#include "cpu/x86/merge_body.hpp"

namespace skerry {

void skerry_cpu_avx512_merge(int32_t parts, int32_t heads, int32_t group, int32_t value_dim, const float *out, int64_t out_stride,
                             const float *max, const float *sum, int64_t head_stride, const float *sink_logits, float *merged, float *lse) {
    merge_parts(parts, heads, group, value_dim, out, out_stride, max, sum, head_stride, sink_logits, merged, lse);
}

} // namespace skerry
