// Cutting a sequence into spans by surprisal: what leaves the recent region, once per position, whatever the steps were.

#include <algorithm>
#include <cstring>

#include "policy/segmentation.hpp"
#include "step/zoom.hpp"

namespace skerry {

namespace {

SegmentRule span_rule(const PolicyConfig &p) {
    SegmentRule rule;
    rule.alpha = static_cast<double>(p.anchor_threshold);
    rule.sinks = p.sinks;
    rule.span_min = p.span_min;
    rule.span_max = p.span_max;
    return rule;
}

// Slots of anchors that every lane has.
uint32_t anchor_slots(const skerry_cache *cache) {
    int32_t least = INT32_MAX;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        if (cache->layers[i].source == static_cast<int32_t>(i)) least = std::min(least, cache->quotas[i].anchors);
    }
    return static_cast<uint32_t>(least);
}

// A span that finds the table full is not stored: its tokens are lost.
void push_span(ZoomTables &t, const TokenSpan &span) {
    if (t.span_count < t.spans.size()) t.spans[t.span_count++] = span;
    t.decided = span.end;
}

// Anchors from t.decided to `end` that lie in no span take slots as long as there are any.
void settle_anchors(ZoomTables &t, uint32_t slots, int64_t end) {
    const int64_t fit = std::min<int64_t>(end - t.decided, slots - t.anchors);
    t.anchors += static_cast<uint32_t>(fit);
    t.decided += fit;
}

// Takes a closed span into the table. Anchors that find no slot become rows: of this span where they are within its reach, else of spans of
// their own.
void add_span(ZoomTables &t, int32_t span_max, uint32_t slots, TokenSpan span) {
    settle_anchors(t, slots, span.begin);
    while (t.decided < span.begin && span.end - t.decided > span_max)
        push_span(t, TokenSpan{t.decided, t.decided + 1, {}});
    if (t.decided < span.begin) {
        AnchorMask moved;
        const int32_t shift = static_cast<int32_t>(span.begin - t.decided);
        for (int32_t i = 0; i < static_cast<int32_t>(span.end - span.begin); ++i) {
            if (span.anchors.test(i)) moved.set(i + shift);
        }
        span.begin = t.decided;
        span.anchors = moved;
    }
    for (int32_t i = 0; i < static_cast<int32_t>(span.end - span.begin); ++i) {
        if (!span.anchors.test(i)) continue;
        if (t.anchors < slots) {
            ++t.anchors;
        } else {
            span.anchors.clear(i);
        }
    }
    push_span(t, span);
}

} // namespace

void spans_add(Sequence *seq, int64_t position, const float *nats, int32_t count) {
    ZoomTables &t = *seq->zoom;
    for (int32_t i = 0; i < count; ++i, ++position) {
        // Sinks belong to no span. What was handed over already stays as it was.
        if (position == t.segments.next + t.nats_count && t.nats_count < t.nats.size()) t.nats[t.nats_count++] = nats[i];
    }
}

bool spans_known(const skerry_cache *cache, const Sequence *seq, int64_t length) {
    const ZoomTables &t = *seq->zoom;
    return length <= cache->policy().sinks || t.segments.next + t.nats_count >= length;
}

void spans_advance(skerry_cache *cache, Sequence *seq, int64_t length, bool ends) {
    const PolicyConfig &p = cache->policy();
    ZoomTables &t = *seq->zoom;
    const SegmentRule rule = span_rule(p);
    const uint32_t slots = anchor_slots(cache);
    const int64_t limit = length - p.recent;
    uint32_t used = 0;
    while (t.segments.next < limit && used < t.nats_count) {
        const TokenSegment segment = segment_token(rule, &t.segments, t.nats[used++]);
        if (segment.closed) add_span(t, p.span_max, slots, segment.span);
        // A run of anchors does not wait for a span behind it.
        if (!t.segments.open() && t.segments.begin - t.decided >= limits::anchor_run) {
            settle_anchors(t, slots, t.segments.begin);
            while (t.decided < t.segments.begin)
                push_span(t, TokenSpan{t.decided, t.decided + 1, {}});
        }
    }
    std::memmove(t.nats.data(), t.nats.data() + used, (t.nats_count - used) * sizeof(float));
    t.nats_count -= used;
    TokenSpan span;
    if (ends && segment_cut(&t.segments, &span)) add_span(t, p.span_max, slots, span);
}

} // namespace skerry
