// SPDX-License-Identifier: MIT
#include "policy/segmentation.hpp"

#include <cmath>

namespace skerry {

namespace {

TokenSegment consume(const SegmentRule &rule, SegmentState *state, bool anchor) {
    TokenSegment result;
    result.anchor = anchor;
    if (anchor && state->open_rows() >= rule.span_min) result.closed = segment_cut(state, &result.span);
    // Nothing is open behind a close, so the token ends here and cannot close a second span.
    if (state->next < rule.sinks || (anchor && !state->open())) {
        state->begin = ++state->next;
        return result;
    }
    if (anchor) state->anchors.set(state->open_positions());
    ++state->next;
    if (state->open_positions() == rule.span_max) result.closed = segment_cut(state, &result.span);
    return result;
}

} // namespace

bool segment_rule_valid(const SegmentRule &rule) {
    return std::isfinite(rule.alpha) && rule.sinks >= 0 && rule.warmup >= 0 && rule.span_min >= 1 && rule.span_min <= rule.span_max &&
           rule.span_max <= limits::max_window;
}

TokenSegment segment_token(const SegmentRule &rule, SegmentState *state, float nats) {
    SurprisalMoments &moments = state->moments;
    moments.add(nats);
    const bool anchor = state->next >= rule.sinks && moments.count > rule.warmup &&
                        static_cast<double>(nats) > moments.mean + rule.alpha * std::sqrt(moments.variance());
    return consume(rule, state, anchor);
}

TokenSegment segment_token_unscored(const SegmentRule &rule, SegmentState *state) { return consume(rule, state, false); }

bool segment_cut(SegmentState *state, TokenSpan *span) {
    if (!state->open()) return false;
    *span = {state->begin, state->next, state->anchors};
    while (span->anchors.test(static_cast<int32_t>(span->end - span->begin) - 1)) {
        --span->end;
        span->anchors.clear(static_cast<int32_t>(span->end - span->begin));
    }
    state->begin = state->next;
    state->anchors = {};
    return true;
}

} // namespace skerry
