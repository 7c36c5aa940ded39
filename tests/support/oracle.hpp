#pragma once
// Attention in double precision over tokens that were gathered or that the test itself knows, as the meaning of
// skerry_step_attend.

#include "support.hpp"

namespace support {

struct Gathered {
    int32_t tokens = 0;
    std::vector<float> keys;   // [tokens][key_dim]
    std::vector<float> values; // [tokens][value_dim]
    std::vector<int64_t> positions;
    std::vector<float> bias;
    std::vector<int32_t> windows;
};

inline Gathered gather(skerry_step *step, const Layer &shape, int seq_index, int layer, int head, uint32_t tiers = 0) {
    Gathered got;
    skerry_error error = make<skerry_error>();
    skerry_gather_desc desc = make<skerry_gather_desc>();
    desc.seq_index = seq_index;
    desc.layer = layer;
    desc.kv_head = head;
    desc.tiers = tiers;
    int32_t tokens = -1;
    REQUIRE_MESSAGE(skerry_step_gather(step, &desc, &tokens, &error) == SKERRY_OK, error.message);
    REQUIRE(tokens >= 0);
    const size_t count = static_cast<size_t>(tokens);
    got.tokens = tokens;
    got.keys.resize(count * static_cast<size_t>(shape.key_dim));
    got.values.resize(count * static_cast<size_t>(shape.value_dim));
    got.positions.resize(count);
    got.bias.resize(count);
    got.windows.resize(count);
    if (tokens == 0) return got;
    const skerry_tensor keys = tensor(got.keys.data(), SKERRY_DTYPE_F32, {tokens, shape.key_dim});
    const skerry_tensor values = tensor(got.values.data(), SKERRY_DTYPE_F32, {tokens, shape.value_dim});
    desc.keys = &keys;
    desc.values = &values;
    desc.positions = got.positions.data();
    desc.bias = got.bias.data();
    desc.windows = got.windows.data();
    int32_t again = -1;
    REQUIRE_MESSAGE(skerry_step_gather(step, &desc, &again, &error) == SKERRY_OK, error.message);
    REQUIRE(again == tokens);
    return got;
}

// What a cache without compression holds: every token, rounded to the store dtype.
inline Gathered remember(const History &history, const Layer &shape, int layer, int head, int64_t length, skerry_dtype input,
                         skerry_dtype store) {
    Gathered got;
    got.tokens = static_cast<int32_t>(length);
    std::vector<float> row(static_cast<size_t>(std::max(shape.key_dim, shape.value_dim)));
    for (int64_t p = 0; p < length; ++p) {
        fill_row(row.data(), history.at(p), Kind::key, layer, head, p, shape.key_dim);
        for (int c = 0; c < shape.key_dim; ++c) {
            got.keys.push_back(round_as(round_as(row[static_cast<size_t>(c)], input), store));
        }
        fill_row(row.data(), history.at(p), Kind::value, layer, head, p, shape.value_dim);
        for (int c = 0; c < shape.value_dim; ++c) {
            got.values.push_back(round_as(round_as(row[static_cast<size_t>(c)], input), store));
        }
        got.positions.push_back(p);
        got.bias.push_back(0);
        got.windows.push_back(-1);
    }
    return got;
}

struct Attended {
    std::vector<double> out; // [value_dim]
    double lse = -INFINITY;
    std::vector<double> masses; // [tokens]
};

// One query head at one position. `sink` is the logit that takes mass and has value 0; -infinity: none.
inline Attended attend(const Gathered &seen, const Layer &shape, const float *query, int64_t position, double sink = -INFINITY) {
    Attended result;
    const size_t tokens = static_cast<size_t>(seen.tokens);
    result.out.assign(static_cast<size_t>(shape.value_dim), 0);
    result.masses.assign(tokens, 0);
    std::vector<double> logits(tokens, -INFINITY);
    double largest = sink;
    for (size_t i = 0; i < tokens; ++i) {
        const int64_t p = seen.positions[i];
        if (p > position || (shape.window > 0 && p <= position - shape.window)) continue;
        double dot = 0;
        for (int c = 0; c < shape.key_dim; ++c) {
            dot += static_cast<double>(query[c]) *
                   static_cast<double>(seen.keys[i * static_cast<size_t>(shape.key_dim) + static_cast<size_t>(c)]);
        }
        dot *= shape.logit_scale();
        if (shape.softcap != 0) dot = double(shape.softcap) * std::tanh(dot / double(shape.softcap));
        logits[i] = dot + static_cast<double>(seen.bias[i]);
        largest = std::max(largest, logits[i]);
    }
    if (largest == -INFINITY) return result;
    double sum = std::exp(sink - largest);
    for (size_t i = 0; i < tokens; ++i)
        sum += std::exp(logits[i] - largest);
    for (size_t i = 0; i < tokens; ++i) {
        result.masses[i] = std::exp(logits[i] - largest) / sum;
        for (int c = 0; c < shape.value_dim; ++c) {
            result.out[static_cast<size_t>(c)] +=
                result.masses[i] * static_cast<double>(seen.values[i * static_cast<size_t>(shape.value_dim) + static_cast<size_t>(c)]);
        }
    }
    result.lse = largest + std::log(sum);
    return result;
}

// Largest distance over the row, relative to its largest number.
inline double row_error(const float *got, const std::vector<double> &wanted) {
    double distance = 0, largest = 1e-3;
    for (size_t i = 0; i < wanted.size(); ++i) {
        const double error = std::fabs(static_cast<double>(got[i]) - wanted[i]);
        distance = std::max(distance, std::isfinite(error) ? error : 1e30);
        largest = std::max(largest, std::fabs(wanted[i]));
    }
    return distance / largest;
}

struct Errors {
    double out = 0;
    double lse = 0;
};

// Compares the runner's outputs of one layer with attention over `seen[kv_head]` for a part whose rows start at `row`.
inline Errors compare(const Runner &runner, int layer, const std::vector<Gathered> &seen, int64_t row, const Part &part,
                      const float *sink_logits = nullptr) {
    const Layer &shape = runner.layers()[static_cast<size_t>(layer)];
    Errors worst;
    for (int64_t t = 0; t < part.count; ++t) {
        for (int head = 0; head < shape.query_heads; ++head) {
            const size_t place = static_cast<size_t>((row + t) * shape.query_heads + head);
            const float *query = runner.queries(layer).data() + place * static_cast<size_t>(shape.key_dim);
            const Attended wanted = attend(seen[static_cast<size_t>(head / shape.group())], shape, query, part.begin + t,
                                           sink_logits != nullptr ? static_cast<double>(sink_logits[head]) : -INFINITY);
            const float *out = runner.outs[static_cast<size_t>(layer)].data() + place * static_cast<size_t>(shape.value_dim);
            worst.out = std::max(worst.out, row_error(out, wanted.out));
            const double lse = static_cast<double>(runner.lses[static_cast<size_t>(layer)][place]);
            worst.lse = std::max(worst.lse, lse == wanted.lse ? 0 : std::fabs(lse - wanted.lse));
        }
    }
    return worst;
}

// Gathers every KV head of a layer.
inline std::vector<Gathered> gather_all(skerry_step *step, const Layer &shape, int seq_index, int layer) {
    std::vector<Gathered> all;
    for (int head = 0; head < shape.kv_heads; ++head)
        all.push_back(gather(step, shape, seq_index, layer, head));
    return all;
}

} // namespace support
