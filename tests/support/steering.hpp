#pragma once
// Steps of a host that attends itself and says freely what it saw, so that a test decides which windows move.

#include "oracle.hpp"

namespace support {

// Mass that the row at position `row` gave to the token at `position`.
using Mass = std::function<float(int layer, int head, int64_t row, int64_t position)>;

inline StepOptions steering(const Runner &runner, const Stream &stream, int32_t count, Mass mass) {
    StepOptions options;
    options.attend = false;
    const std::vector<Layer> layers = runner.layers();
    const int64_t begin = stream.length;
    options.after_attend = [layers, begin, count, mass](skerry_step *step, int layer) {
        const Layer &shape = layers[static_cast<size_t>(layer)];
        if (shape.shared_with >= 0) return;
        for (int head = 0; head < shape.kv_heads; ++head) {
            const Gathered seen = gather(step, shape, 0, layer, head);
            std::vector<float> masses;
            for (int32_t t = 0; t < count; ++t) {
                for (int64_t position : seen.positions) {
                    masses.push_back(position > begin + t ? 0.0f : mass(layer, head, begin + t, position));
                }
            }
            skerry_observe_desc desc = make<skerry_observe_desc>();
            desc.masses = masses.data();
            desc.layer = layer;
            desc.kv_head = head;
            desc.token_count = seen.tokens;
            skerry_error error = make<skerry_error>();
            REQUIRE_MESSAGE(skerry_step_observe(step, &desc, &error) == SKERRY_OK, error.message);
        }
    };
    return options;
}

inline void steer(Runner &runner, Stream &stream, int32_t count, const Mass &mass) {
    grow(runner, stream, count, steering(runner, stream, count, mass));
}

// The range that holds a position.
inline skerry_range range_at(skerry_cache *cache, skerry_seq seq, int layer, int head, int64_t position) {
    for (const skerry_range &range : ranges_of(cache, seq, layer, head)) {
        if (range.begin <= position && position < range.end) return range;
    }
    FAIL("no range holds position ", position);
    return {};
}

} // namespace support
