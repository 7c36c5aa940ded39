// SPDX-License-Identifier: MIT
#pragma once

// Anchors and spans of a token stream, decided once per token from what came before it; the whole-prompt rule
// of the paper is in policy/sekv_paper.hpp. docs/design/spans.md has the reasons.
//
// Of the positions behind the sinks each is an anchor, or a row of exactly one span, or belongs to the open
// span. A span closes before an anchor once it has span_min rows; with fewer it goes on behind the anchor,
// which is no row of it. It also closes when it covers span_max positions, and at a cut. So it never covers
// more than span_max positions, and has at least span_min rows unless span_max or a cut ended it.

#include "model/spans.hpp"

#include <cstdint>

namespace skerry {

// decisions.md 18, sekv.md 10.
struct SegmentRule {
    double alpha = 1;
    int32_t sinks = 4;
    int32_t warmup = 64; // tokens with known surprisal, from the first on, that cannot be anchors
    int32_t span_min = 64;
    int32_t span_max = 128;
};

// 1 <= span_min <= span_max <= limits::max_window, sinks and warmup not negative, alpha finite.
bool segment_rule_valid(const SegmentRule &rule);

struct TokenSegment {
    bool anchor = false; // the token is one
    bool closed = false; // `span` closed
    TokenSpan span;
};

// Consumes the token at state->next, whose surprisal is `nats`: finite, not negative. It is an anchor iff
// nats > mean + alpha * std (strict), over all tokens up to and including it.
TokenSegment segment_token(const SegmentRule &rule, SegmentState *state, float nats);

// A token whose surprisal nobody handed over: no anchor, and the statistics stay as they are. With span_min
// equal to span_max a stream of these gives fixed segments.
TokenSegment segment_token_unscored(const SegmentRule &rule, SegmentState *state);

// Closes the open span behind the last consumed token, whatever its length; false when none is open. Anchors
// behind its last row stay outside. Whoever must cut at position p consumes the tokens below p first. Part of
// the result, so the positions of cuts must follow from positions alone (decisions.md 1).
bool segment_cut(SegmentState *state, TokenSpan *span);

} // namespace skerry
