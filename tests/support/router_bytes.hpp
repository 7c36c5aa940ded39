#pragma once
// Router files made by hand: safetensors bytes from a list of tensors, and the tensors of a router of a given size.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace support {

struct FileTensor {
    std::string name;
    std::string dtype; // "F32", or "F16" or "BF16" with values given as bits
    std::vector<int64_t> shape;
    std::vector<float> values; // F32
    std::vector<uint16_t> halves;

    uint64_t elements() const {
        uint64_t count = 1;
        for (int64_t dim : shape)
            count *= static_cast<uint64_t>(dim);
        return count;
    }
};

inline std::string shape_text(const std::vector<int64_t> &shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i)
        text += (i != 0 ? "," : "") + std::to_string(shape[i]);
    return text + "]";
}

inline std::string quoted(const std::string &text) {
    std::string out = "\"";
    for (char c : text)
        out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
}

inline std::vector<uint8_t> with_length(const std::string &header, const std::vector<uint8_t> &data = {}) {
    std::vector<uint8_t> file;
    for (int i = 0; i < 8; ++i)
        file.push_back(static_cast<uint8_t>(static_cast<uint64_t>(header.size()) >> 8 * i));
    file.insert(file.end(), header.begin(), header.end());
    file.insert(file.end(), data.begin(), data.end());
    return file;
}

// `metadata`: the value of __metadata__["skerry.router"]; empty: no __metadata__ at all.
inline std::vector<uint8_t> safetensors(const std::vector<FileTensor> &tensors, const std::string &metadata = "") {
    std::string header = "{";
    std::vector<uint8_t> data;
    if (!metadata.empty()) header += "\"__metadata__\":{\"skerry.router\":" + quoted(metadata) + "}";
    for (const FileTensor &tensor : tensors) {
        const size_t begin = data.size();
        if (tensor.dtype == "F32") {
            data.resize(begin + tensor.values.size() * 4);
            if (!tensor.values.empty()) std::memcpy(data.data() + begin, tensor.values.data(), tensor.values.size() * 4);
        } else {
            data.resize(begin + tensor.halves.size() * 2);
            if (!tensor.halves.empty()) std::memcpy(data.data() + begin, tensor.halves.data(), tensor.halves.size() * 2);
        }
        header += (header.size() > 1 ? "," : "") + quoted(tensor.name) + ":{\"dtype\":" + quoted(tensor.dtype) +
                  ",\"shape\":" + shape_text(tensor.shape) + ",\"data_offsets\":[" + std::to_string(begin) + "," +
                  std::to_string(data.size()) + "]}";
    }
    return with_length(header + "}", data);
}

struct RouterSize {
    int64_t layers = 2, query_heads = 4, kv_heads = 2, key_dim = 8, summary_dim = 4, rank_max = 6;
};

// Members of the settings, as text, in order; set() replaces or adds.
struct RouterSettings {
    std::vector<std::pair<std::string, std::string>> members;

    RouterSettings &set(const std::string &key, const std::string &value) {
        for (auto &member : members) {
            if (member.first == key) {
                member.second = value;
                return *this;
            }
        }
        members.emplace_back(key, value);
        return *this;
    }
    RouterSettings &drop(const std::string &key) {
        for (size_t i = members.size(); i-- > 0;) {
            if (members[i].first == key) members.erase(members.begin() + static_cast<std::ptrdiff_t>(i));
        }
        return *this;
    }
    std::string text() const {
        std::string out = "{";
        for (const auto &[key, value] : members)
            out += (out.size() > 1 ? ", " : "") + quoted(key) + ": " + value;
        return out + "}";
    }
};

inline RouterSettings router_settings(const RouterSize &size, const std::string &form) {
    RouterSettings settings;
    settings.set("version", "1").set("form", quoted(form)).set("model", "\"tiny\"");
    settings.set("num_layers", std::to_string(size.layers)).set("num_q_heads", std::to_string(size.query_heads));
    settings.set("num_kv_heads", std::to_string(size.kv_heads)).set("head_dim", std::to_string(size.key_dim));
    settings.set("summary_dim", std::to_string(size.summary_dim)).set("rank_max", std::to_string(size.rank_max));
    return settings;
}

// Numbers that tell tensors and places apart, and that f16 holds exactly.
inline FileTensor file_tensor(const std::string &name, std::vector<int64_t> shape) {
    FileTensor tensor{name, "F32", std::move(shape), {}, {}};
    const uint64_t count = tensor.elements();
    tensor.values.reserve(count);
    uint64_t start = 0;
    for (char c : name)
        start = start * 31 + static_cast<unsigned char>(c);
    for (uint64_t i = 0; i < count; ++i)
        tensor.values.push_back(static_cast<float>(1 + (start + 7 * i) % 1000) / 1024.0f);
    return tensor;
}

// The eight tensors of a published router (sekv.md 6.6).
inline std::vector<FileTensor> paper_tensors(const RouterSize &s) {
    return {file_tensor("W", {s.layers, s.query_heads, s.summary_dim, s.key_dim}),
            file_tensor("tau", {s.layers, s.query_heads}),
            file_tensor("g_phi.mlp.0.weight", {64, s.rank_max + s.key_dim}),
            file_tensor("g_phi.mlp.0.bias", {64}),
            file_tensor("g_phi.mlp.2.weight", {64, 64}),
            file_tensor("g_phi.mlp.2.bias", {64}),
            file_tensor("g_phi.mlp.4.weight", {s.rank_max, 64}),
            file_tensor("g_phi.mlp.4.bias", {s.rank_max})};
}

inline std::vector<FileTensor> production_tensors(const RouterSize &s) {
    return {file_tensor("W", {s.layers, s.query_heads, s.summary_dim, s.key_dim}),
            file_tensor("W_key", {s.layers, s.kv_heads, s.summary_dim, s.key_dim}), file_tensor("bias", {s.layers, s.query_heads}),
            file_tensor("temperature", {s.layers, s.query_heads})};
}

} // namespace support
