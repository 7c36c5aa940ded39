#include "io/router_file.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "codec/router_key.hpp"
#include "io/safetensors.hpp"
#include "limits.hpp"

namespace skerry {

namespace {

constexpr std::string_view metadata_key = "skerry.router";

template <class... Arguments>
Status format_error(skerry_error *error, int64_t found, int64_t allowed, const char *format, Arguments... arguments) {
    return fail(error, SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_ARGUMENT, 1, found, allowed, format, arguments...);
}

// The members of the settings, taken out one by one; what is left at the end is unknown.
class Settings {
public:
    Settings(Allocator &allocator, skerry_error *error) noexcept : json_(allocator), error_(error) {}

    Status parse(std::span<char> text) {
        size_t offset = 0;
        const char *problem = json_.parse(text.data(), text.size(), &offset);
        if (problem == nullptr && json_.root().type != JsonType::object) problem = "it is no object";
        if (problem == nullptr) return SKERRY_OK;
        return fail(error_, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_ARGUMENT, 1, static_cast<int64_t>(offset), 0,
                    "skerry.router is not right JSON at its byte %llu: %s", static_cast<unsigned long long>(offset), problem);
    }

    bool has(const char *key) const noexcept { return json_.find(json_.root(), key) != nullptr; }

    // Leaves `out` alone, with SKERRY_OK, where an optional member is missing.
    template <class Integer>
    Status integer(const char *key, int64_t low, int64_t high, bool required, Integer *out) {
        const JsonNode *node = nullptr;
        if (const Status status = take(key, required, &node); node == nullptr) return status;
        if (node->type != JsonType::integer || node->integer < low || node->integer > high) {
            return format_error(error_, node->integer, high, "skerry.router: '%s' is no integer from %lld to %lld", key,
                                static_cast<long long>(low), static_cast<long long>(high));
        }
        *out = static_cast<Integer>(node->integer);
        return SKERRY_OK;
    }
    Status boolean(const char *key, bool *out) {
        const JsonNode *node = nullptr;
        if (const Status status = take(key, false, &node); node == nullptr) return status;
        if (node->type != JsonType::boolean) return format_error(error_, 0, 0, "skerry.router: '%s' is neither true nor false", key);
        *out = node->integer != 0;
        return SKERRY_OK;
    }
    Status string(const char *key, bool required, std::string_view *out) {
        const JsonNode *node = nullptr;
        if (const Status status = take(key, required, &node); node == nullptr) return status;
        if (node->type != JsonType::string) return format_error(error_, 0, 0, "skerry.router: '%s' is no string", key);
        *out = node->text;
        return SKERRY_OK;
    }
    // One of `words`, as its place from 1 on.
    Status word(const char *key, bool required, std::span<const std::string_view> words, int32_t *out) {
        std::string_view text;
        const bool present = has(key);
        if (const Status status = string(key, required, &text); status < 0 || !present) return status;
        const size_t place = static_cast<size_t>(std::find(words.begin(), words.end(), text) - words.begin());
        if (place == words.size()) {
            const ShownName name = shown(text);
            return format_error(error_, 0, 0, "skerry.router: '%s' is '%.*s', which this library does not know", key, name.size, name.text);
        }
        *out = static_cast<int32_t>(place) + 1;
        return SKERRY_OK;
    }
    Status finish() {
        for (const JsonNode *node = json_.first(json_.root()); node != nullptr; node = json_.next(*node)) {
            if (std::find(taken_, taken_ + count_, node->name) != taken_ + count_) continue;
            const ShownName name = shown(node->name);
            return format_error(error_, 0, 0, "skerry.router: '%.*s' is a setting that this library does not know", name.size, name.text);
        }
        return SKERRY_OK;
    }

private:
    Status take(const char *key, bool required, const JsonNode **node) {
        taken_[count_++] = key;
        *node = json_.find(json_.root(), key);
        if (*node != nullptr || !required) return SKERRY_OK;
        return format_error(error_, 0, 0, "skerry.router: '%s' is missing", key);
    }

    Json json_;
    skerry_error *error_;
    std::string_view taken_[16];
    size_t count_ = 0;
};

Status conflict(skerry_error *error, const char *key, const char *why) {
    return format_error(error, 0, 0, "skerry.router: '%s' does not go with %s", key, why);
}

Status read_settings(std::span<char> text, Allocator &allocator, bool has_key_matrices, RouterWeights *out, skerry_error *error) {
    static constexpr std::string_view forms[] = {"paper", "production"}, poolings[] = {"mean", "centroids"};
    static_assert(SKERRY_ROUTER_FORM_PAPER == 1 && SKERRY_ROUTER_FORM_PRODUCTION == 2);
    static_assert(SKERRY_ROUTER_POOLING_MEAN == 1 && SKERRY_ROUTER_POOLING_CENTROIDS == 2);
    Settings settings(allocator, error);
    Status status = settings.parse(text);
    int32_t version = 0;
    const auto integer = [&](const char *key, int64_t low, int64_t high, bool required, auto *to) {
        if (status >= 0) status = settings.integer(key, low, high, required, to);
    };
    // First: another version may mean anything by the other members.
    integer("version", router_file_version, router_file_version, true, &version);
    if (status >= 0) status = settings.word("form", true, forms, &out->form);
    if (status < 0) return status;

    const bool paper = out->form == SKERRY_ROUTER_FORM_PAPER;
    out->pooling = SKERRY_ROUTER_POOLING_MEAN;
    out->normalise = paper;
    out->shared_keys = has_key_matrices && !paper;
    status = settings.word("pooling", false, poolings, &out->pooling);
    const bool mean = out->pooling == SKERRY_ROUTER_POOLING_MEAN;
    out->centroids = mean ? 1 : router_centroids;
    std::string_view model;
    integer("num_layers", 1, limits::max_layers, true, &out->layers);
    integer("num_q_heads", 1, limits::max_heads, true, &out->query_heads);
    integer("num_kv_heads", 1, limits::max_heads, true, &out->kv_heads);
    integer("head_dim", 1, limits::max_head_dim, true, &out->key_dim);
    // decisions.md 16: in production projected keys are cached in few bits, for kernels of a limited width.
    integer("summary_dim", 1, paper ? limits::max_head_dim : router_rank_limit, true, &out->summary_dim);
    integer("rank_max", paper ? 1 : 0, limits::max_head_dim, paper, &out->rank_max);
    integer("centroids", 1, router_centroids, false, &out->centroids);
    integer("step", 0, INT64_MAX, false, &out->step);
    if (status >= 0) status = settings.boolean("normalise", &out->normalise);
    if (status >= 0) status = settings.boolean("shared_keys", &out->shared_keys);
    if (status >= 0) status = settings.string("model", true, &model);
    if (status >= 0) status = settings.finish();
    if (status < 0) return status;

    if (model.size() >= sizeof out->model || model.find('\0') != std::string_view::npos) {
        return format_error(error, static_cast<int64_t>(model.size()), sizeof out->model - 1,
                            "skerry.router: 'model' is longer than %u bytes, or has a zero byte",
                            static_cast<unsigned>(sizeof out->model - 1));
    }
    std::memcpy(out->model, model.data(), model.size());
    if (out->query_heads % out->kv_heads != 0) {
        return format_error(error, out->query_heads, out->kv_heads, "skerry.router: 'num_q_heads' %d is no multiple of 'num_kv_heads' %d",
                            out->query_heads, out->kv_heads);
    }
    if (mean && out->centroids != 1) return conflict(error, "centroids", "the pooling 'mean'");
    if (!paper && has_key_matrices && !out->shared_keys) return conflict(error, "shared_keys", "W_key, which KV heads share");
    if (!paper) return SKERRY_OK;
    // sekv.md 2.1 and 3.1 know one rule.
    if (!mean) return conflict(error, "pooling", "the form 'paper'");
    if (!out->normalise) return conflict(error, "normalise", "the form 'paper'");
    if (out->shared_keys) return conflict(error, "shared_keys", "the form 'paper'");
    return SKERRY_OK;
}

enum class Need : uint8_t { required, optional, ignored };

// One tensor of a router: what it must be, and where its numbers go.
struct Wanted {
    const char *name;
    const float **to;
    Need need;
    uint32_t rank;
    int32_t shape[4];
    const TensorEntry *entry = nullptr;

    uint64_t elements() const {
        uint64_t count = 1;
        for (uint32_t i = 0; i < rank; ++i)
            count *= static_cast<uint64_t>(shape[i]);
        return count;
    }
};

Status check_tensor(const Wanted &wanted, skerry_error *error) {
    const TensorEntry &entry = *wanted.entry;
    if (entry.type == TensorType::other) {
        const ShownName type = shown(entry.type_name);
        return fail(error, SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_DTYPE, 1, 0, 0, "tensor '%s' is %.*s; a router has F32, F16 or BF16",
                    wanted.name, type.size, type.text);
    }
    if (entry.rank != wanted.rank) {
        return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, -1, entry.rank, wanted.rank,
                    "tensor '%s' has %u dimensions; this router's has %u", wanted.name, entry.rank, wanted.rank);
    }
    for (uint32_t i = 0; i < wanted.rank; ++i) {
        if (entry.shape[i] == static_cast<uint64_t>(wanted.shape[i])) continue;
        return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, static_cast<int32_t>(i), static_cast<int64_t>(entry.shape[i]),
                    wanted.shape[i], "dimension %u of tensor '%s' is %llu; this router's is %d", i, wanted.name,
                    static_cast<unsigned long long>(entry.shape[i]), wanted.shape[i]);
    }
    return SKERRY_OK;
}

Status check_temperature(const RouterWeights &router, skerry_error *error) {
    const size_t count = static_cast<size_t>(router.layers) * static_cast<size_t>(router.query_heads);
    for (size_t i = 0; router.temperature != nullptr && i < count; ++i) {
        if (router.temperature[i] > 0) continue;
        return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_VALUES, -1, static_cast<int64_t>(i), 0,
                    "tensor 'temperature' is not above 0 at element %llu", static_cast<unsigned long long>(i));
    }
    return SKERRY_OK;
}

// Without matrices of their own, keys can only be shared where W says the same for every query head of a KV head.
Status check_shared(const RouterWeights &router, skerry_error *error) {
    if (!router.shared_keys || router.w_key != nullptr) return SKERRY_OK;
    const size_t numbers = static_cast<size_t>(router.summary_dim) * static_cast<size_t>(router.key_dim);
    for (int32_t layer = 0; layer < router.layers; ++layer) {
        for (int32_t head = 0; head < router.query_heads; ++head) {
            const float *own = router.query_matrix(layer, head), *shared = router.key_matrix(layer, head);
            if (std::equal(own, own + numbers, shared)) continue;
            return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_HEADS, layer, head, 0,
                        "tensor 'W' differs between query heads of a KV head (layer %d, head %d) in spite of shared_keys", layer, head);
        }
    }
    return SKERRY_OK;
}

} // namespace

Status router_read(const ByteSource &source, Allocator &allocator, RouterWeights *out, skerry_error *error) {
    SafetensorsFile file(allocator, source);
    if (const Status status = file.open(error); status < 0) return status;
    const std::span<char> text = file.metadata(metadata_key);
    if (text.data() == nullptr) {
        return format_error(error, 0, 0, "the file has no 'skerry.router' in its __metadata__: it is not a router of this library");
    }
    RouterWeights &r = *out;
    if (const Status status = read_settings(text, allocator, file.find("W_key") != nullptr, out, error); status < 0) return status;

    const bool paper = r.form == SKERRY_ROUTER_FORM_PAPER;
    // The gate network is there as a whole or not at all.
    static constexpr const char *gate_names[] = {"g_phi.mlp.0.weight", "g_phi.mlp.0.bias",   "g_phi.mlp.2.weight",
                                                 "g_phi.mlp.2.bias",   "g_phi.mlp.4.weight", "g_phi.mlp.4.bias"};
    const bool gates =
        paper || std::any_of(std::begin(gate_names), std::end(gate_names), [&](const char *name) { return file.find(name) != nullptr; });
    if (gates && r.rank_max == 0) return conflict(error, "rank_max", "g_phi, which needs it");
    if (!gates) r.rank_max = 0;
    constexpr int32_t hidden = router_gate_hidden;
    const Need thresholds = paper ? Need::required : Need::optional, extra = paper ? Need::ignored : Need::optional;
    const Need network = gates ? Need::required : Need::ignored;
    // sekv.md 6.6 for the names and shapes of the published ones.
    Wanted wanted[] = {
        {"W", &r.w, Need::required, 4, {r.layers, r.query_heads, r.summary_dim, r.key_dim}},
        {"W_key", &r.w_key, extra, 4, {r.layers, r.kv_heads, r.summary_dim, r.key_dim}},
        {"tau", &r.tau, thresholds, 2, {r.layers, r.query_heads}},
        {"bias", &r.bias, extra, 2, {r.layers, r.query_heads}},
        {"temperature", &r.temperature, extra, 2, {r.layers, r.query_heads}},
        {gate_names[0], &r.gates.weight[0], network, 2, {hidden, r.rank_max + r.key_dim}},
        {gate_names[1], &r.gates.bias[0], network, 1, {hidden}},
        {gate_names[2], &r.gates.weight[1], network, 2, {hidden, hidden}},
        {gate_names[3], &r.gates.bias[1], network, 1, {hidden}},
        {gate_names[4], &r.gates.weight[2], network, 2, {r.rank_max, hidden}},
        {gate_names[5], &r.gates.bias[2], network, 1, {r.rank_max}},
    };
    uint64_t total = 0;
    for (Wanted &tensor : wanted) {
        if (tensor.need != Need::ignored) tensor.entry = file.find(tensor.name);
        if (tensor.entry == nullptr) {
            if (tensor.need != Need::required) continue;
            return fail(error, SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, -1, 0, 1, "tensor '%s' is missing", tensor.name);
        }
        if (const Status status = check_tensor(tensor, error); status < 0) return status;
        total += tensor.elements(); // each at most half of the file's bytes
    }
    size_t numbers = 0;
    if (!checked_cast(total, &numbers)) throw std::bad_alloc();
    r.values.resize_uninitialised(numbers);
    float *to = r.values.data();
    for (const Wanted &tensor : wanted) {
        if (tensor.entry == nullptr) continue;
        if (const Status status = file.read(*tensor.entry, to, error); status < 0) return status;
        *tensor.to = to;
        to += tensor.elements();
    }
    if (const Status status = check_temperature(r, error); status < 0) return status;
    return check_shared(r, error);
}

} // namespace skerry
