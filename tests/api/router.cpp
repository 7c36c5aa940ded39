// Router files through the C interface: what opens, what is refused and by which name, and whose memory it is.

#include "router_bytes.hpp"
#include "support.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <sys/stat.h>
#include <unistd.h>

using namespace support;

namespace {

struct ReleaseRouter {
    void operator()(skerry_router *router) const { skerry_router_release(router); }
};
using Router = std::unique_ptr<skerry_router, ReleaseRouter>;
using Bytes = std::vector<uint8_t>;

skerry_status open_bytes(skerry_context *context, const Bytes &bytes, skerry_router **out, skerry_error *error) {
    skerry_router_desc desc = make<skerry_router_desc>();
    desc.data = bytes.data();
    desc.bytes = bytes.size();
    return skerry_router_open(context, &desc, out, error);
}

skerry_status open_path(skerry_context *context, const std::string &path, skerry_router **out, skerry_error *error) {
    skerry_router_desc desc = make<skerry_router_desc>();
    desc.path = path.c_str();
    return skerry_router_open(context, &desc, out, error);
}

Router opened(skerry_context *context, const Bytes &bytes) {
    skerry_router *router = nullptr;
    skerry_error error = make<skerry_error>();
    const skerry_status status = open_bytes(context, bytes, &router, &error);
    REQUIRE_MESSAGE(status == SKERRY_OK, std::string(error.message));
    return Router(router);
}

skerry_router_info info_of(skerry_router *router) {
    skerry_router_info info = make<skerry_router_info>();
    REQUIRE(skerry_router_get_info(router, &info, nullptr) == SKERRY_OK);
    return info;
}

uint64_t context_bytes(skerry_context *context) {
    skerry_context_bytes bytes{};
    REQUIRE(skerry_context_get_bytes(context, &bytes, nullptr) == SKERRY_OK);
    return bytes.context_bytes;
}

// Refused with a message that holds `part`; nothing is left behind.
skerry_error refuse(skerry_context *context, const Call &call, skerry_status status, uint32_t subject, const std::string &part) {
    const uint64_t before = context_bytes(context);
    const skerry_error error = refused(call, status, {subject});
    INFO("said: ", std::string(error.message));
    CHECK(std::string(error.message).find(part) != std::string::npos);
    CHECK(context_bytes(context) == before);
    return error;
}

skerry_error refuse_bytes(skerry_context *context, const Bytes &bytes, skerry_status status, uint32_t subject, const std::string &part) {
    skerry_router *out = nullptr;
    return refuse(
        context,
        [&](skerry_error *error) {
            out = reinterpret_cast<skerry_router *>(&out);
            const skerry_status got = open_bytes(context, bytes, &out, error);
            CHECK(out == nullptr);
            return got;
        },
        status, subject, part);
}

Bytes paper_file(const RouterSize &size = {}) { return safetensors(paper_tensors(size), router_settings(size, "paper").text()); }
Bytes production_file(const RouterSize &size = {}) {
    return safetensors(production_tensors(size), router_settings(size, "production").text());
}

// A directory of its own that goes with its files.
class Folder {
public:
    Folder() {
        char name[] = "/tmp/skerry-router-XXXXXX";
        REQUIRE(mkdtemp(name) != nullptr);
        path_ = name;
    }
    ~Folder() {
        for (const std::string &file : files_)
            std::remove(file.c_str());
        rmdir(path_.c_str());
    }
    std::string name(const std::string &file) {
        files_.push_back(path_ + "/" + file);
        return files_.back();
    }
    std::string write(const std::string &file, const Bytes &bytes) {
        const std::string path = name(file);
        std::FILE *out = std::fopen(path.c_str(), "wb");
        REQUIRE(out != nullptr);
        if (!bytes.empty()) CHECK(std::fwrite(bytes.data(), 1, bytes.size(), out) == bytes.size());
        CHECK(std::fclose(out) == 0);
        return path;
    }
    const std::string &path() const { return path_; }

private:
    std::string path_;
    std::vector<std::string> files_;
};

} // namespace

TEST_CASE("T24: parameter counts of the published routers (sekv.md 6.5)") {
    struct Case {
        const char *model;
        RouterSize size;
        uint64_t parameters;
        double base; // millions, from which the share in sekv.md follows
        double share_percent;
    };
    // d 128, d' 32, 32 ranks.
    const Case cases[] = {{"llama-3.2-3b", {28, 24, 8, 128, 32, 32}, 2769728, 3212.75, 0.0862},
                          {"llama-3.1-8b", {32, 32, 8, 128, 32, 32}, 4211872, 8030.26, 0.0524},
                          {"qwen2.5-14b", {48, 40, 8, 128, 32, 32}, 7882784, 14770.03, 0.0534}};
    const Context context = make_context();
    for (const Case &one : cases) {
        CAPTURE(std::string(one.model));
        std::vector<FileTensor> tensors = paper_tensors(one.size);
        for (FileTensor &tensor : tensors) {
            tensor.dtype = "F16";
            tensor.halves.assign(tensor.elements(), 0x2c00);
        }
        const Bytes bytes =
            safetensors(tensors, router_settings(one.size, "paper").set("model", quoted(one.model)).set("step", "3000").text());
        const Router router = opened(context.get(), bytes);
        const skerry_router_info info = info_of(router.get());
        CHECK(info.parameters == one.parameters);
        CHECK(info.weight_bytes == 4 * one.parameters);
        CHECK(std::fabs(static_cast<double>(one.parameters) / one.base / 1e4 - one.share_percent) < 6e-5); // four places
        CHECK(std::string(info.model) == one.model);
        CHECK(info.training_step == 3000);
        CHECK(info.form == SKERRY_ROUTER_FORM_PAPER);
        CHECK(info.flags == (SKERRY_ROUTER_THRESHOLDS | SKERRY_ROUTER_GATES | SKERRY_ROUTER_NORMALISED));
    }
}

TEST_CASE("T24: a paper file that lacks a tensor, or has one of another shape, is refused by its name") {
    const Context context = make_context();
    const RouterSize size;
    const std::vector<FileTensor> whole = paper_tensors(size);
    const std::string settings = router_settings(size, "paper").text();
    REQUIRE(opened(context.get(), safetensors(whole, settings)) != nullptr);
    for (size_t i = 0; i < whole.size(); ++i) {
        CAPTURE(whole[i].name);
        std::vector<FileTensor> tensors = whole;
        tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
        refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR,
                     "'" + whole[i].name + "' is missing");
        for (size_t dim = 0; dim < whole[i].shape.size(); ++dim) {
            for (int64_t change : {-1, 1}) {
                std::vector<int64_t> shape = whole[i].shape;
                shape[dim] += change;
                tensors = whole;
                tensors[i] = file_tensor(whole[i].name, shape);
                const skerry_error error = refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_CORRUPT,
                                                        SKERRY_SUBJECT_TENSOR, "tensor '" + whole[i].name + "'");
                CHECK(error.index == static_cast<int32_t>(dim));
                CHECK(error.found == shape[dim]);
                CHECK(error.allowed == whole[i].shape[dim]);
            }
        }
        // The same numbers under one dimension more, and under one dimension.
        tensors = whole;
        tensors[i].shape.push_back(1);
        CHECK(
            refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, whole[i].name).index ==
            -1);
        if (whole[i].shape.size() > 1) {
            tensors[i].shape = {static_cast<int64_t>(whole[i].elements())};
            refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, whole[i].name);
        }
        tensors = whole;
        tensors[i].name += "x";
        refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, "'" + whole[i].name + "'");
        // A number type of the right size that this library does not read.
        tensors = whole;
        std::string text(reinterpret_cast<const char *>(whole[i].values.data()), whole[i].values.size() * 4);
        tensors[i].dtype = "I32";
        tensors[i].halves.resize(whole[i].values.size() * 2);
        std::memcpy(tensors[i].halves.data(), text.data(), text.size());
        refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_DTYPE,
                     "'" + whole[i].name + "' is I32");
        // And a number that is none.
        tensors = whole;
        const size_t place = tensors[i].values.size() - 1;
        tensors[i].values[place] = NAN;
        const skerry_error error = refuse_bytes(context.get(), safetensors(tensors, settings), SKERRY_ERROR_NONFINITE,
                                                SKERRY_SUBJECT_VALUES, "'" + whole[i].name + "'");
        CHECK(error.found == static_cast<int64_t>(place));
    }
}

TEST_CASE("router: a production file may lack thresholds and gates, but not half of the gates") {
    const Context context = make_context();
    const RouterSize size;
    const std::string settings = router_settings(size, "production").text();
    skerry_router_info info = info_of(opened(context.get(), safetensors({production_tensors(size)[0]}, settings)).get());
    CHECK(info.flags == 0);
    CHECK(info.form == SKERRY_ROUTER_FORM_PRODUCTION);
    CHECK(info.pooling == SKERRY_ROUTER_POOLING_MEAN);
    CHECK(info.centroids == 1);
    CHECK(info.rank_max == 0);
    CHECK(info.parameters == 2 * 4 * 4 * 8);
    CHECK(info.layers == 2);
    CHECK(info.query_heads == 4);
    CHECK(info.kv_heads == 2);
    CHECK(info.key_dim == 8);
    CHECK(info.summary_dim == 4);

    info = info_of(opened(context.get(), production_file()).get());
    CHECK(info.flags == (SKERRY_ROUTER_BIAS | SKERRY_ROUTER_TEMPERATURE | SKERRY_ROUTER_KEY_MATRICES | SKERRY_ROUTER_SHARED_KEYS));

    std::vector<FileTensor> tensors = paper_tensors(size);
    CHECK(info_of(opened(context.get(), safetensors(tensors, settings)).get()).flags == (SKERRY_ROUTER_THRESHOLDS | SKERRY_ROUTER_GATES));
    CHECK(info_of(opened(context.get(), safetensors(tensors, settings)).get()).rank_max == 6);
    for (size_t i = 2; i < 8; ++i) {
        std::vector<FileTensor> fewer = tensors;
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
        refuse_bytes(context.get(), safetensors(fewer, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR,
                     "'" + tensors[i].name + "' is missing");
    }
    refuse_bytes(context.get(), safetensors(tensors, router_settings(size, "production").drop("rank_max").text()), SKERRY_ERROR_FORMAT,
                 SKERRY_SUBJECT_ARGUMENT, "'rank_max'");

    for (const FileTensor &part : production_tensors(size)) {
        std::vector<FileTensor> wrong = production_tensors(size);
        for (FileTensor &tensor : wrong) {
            if (tensor.name != part.name) continue;
            std::vector<int64_t> shape = tensor.shape;
            shape[1] *= 2;
            tensor = file_tensor(tensor.name, shape);
        }
        refuse_bytes(context.get(), safetensors(wrong, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_TENSOR, "'" + part.name + "'");
    }
    for (float bad : {0.0f, -1.0f}) {
        std::vector<FileTensor> wrong = production_tensors(size);
        wrong[3].values[5] = bad;
        CHECK(
            refuse_bytes(context.get(), safetensors(wrong, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_VALUES, "'temperature'").found ==
            5);
    }
}

TEST_CASE("router: shared keys without matrices of their own need equal matrices in a group") {
    const Context context = make_context();
    const RouterSize size;
    FileTensor w = file_tensor("W", {2, 4, 4, 8});
    for (size_t i = 0; i < w.values.size(); ++i)
        w.values[i] = w.values[i / 64 * 64 + i % 32];
    const std::string settings = router_settings(size, "production").set("shared_keys", "true").text();
    CHECK(info_of(opened(context.get(), safetensors({w}, settings)).get()).flags == SKERRY_ROUTER_SHARED_KEYS);
    w.values[32 * 7] += 1;
    const skerry_error error =
        refuse_bytes(context.get(), safetensors({w}, settings), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_HEADS, "layer 1, head 3");
    CHECK(error.index == 1);
    CHECK(error.found == 3);
}

TEST_CASE("router: tensors and metadata that other programs add are left alone") {
    const Context context = make_context();
    std::vector<FileTensor> tensors = production_tensors({});
    tensors.insert(tensors.begin(), {"optimizer.state", "I64", {3}, {}, std::vector<uint16_t>(12, 0xffff)});
    tensors.push_back({"not.finite", "F32", {2}, {NAN, INFINITY}, {}});
    const skerry_router_info with = info_of(opened(context.get(), safetensors(tensors, router_settings({}, "production").text())).get());
    const skerry_router_info without = info_of(opened(context.get(), production_file()).get());
    CHECK(same_bytes(&with, &without, sizeof with));

    // Sharing and scaling came with production: the published form has no use for their tensors, of whatever shape.
    tensors = paper_tensors({});
    tensors.push_back(file_tensor("W_key", {3}));
    tensors.push_back(file_tensor("temperature", {1}));
    const skerry_router_info more = info_of(opened(context.get(), safetensors(tensors, router_settings({}, "paper").text())).get());
    const skerry_router_info paper = info_of(opened(context.get(), paper_file()).get());
    CHECK(same_bytes(&more, &paper, sizeof more));
}

TEST_CASE("router: settings are refused by name") {
    const Context context = make_context();
    struct Case {
        const char *form;
        const char *key;
        const char *value; // NULL: the key is missing
        const char *said;
    };
    const Case cases[] = {
        {"paper", "version", nullptr, "'version' is missing"},
        {"paper", "version", "2", "'version' is no integer from 1 to 1"},
        {"paper", "version", "\"1\"", "'version'"},
        {"paper", "form", nullptr, "'form' is missing"},
        {"paper", "form", "\"Paper\"", "'form' is 'Paper'"},
        {"paper", "form", "1", "'form' is no string"},
        {"paper", "model", nullptr, "'model' is missing"},
        {"paper", "model", "7", "'model' is no string"},
        {"paper", "model", "\"a\\u0000b\"", "'model'"},
        {"paper", "num_layers", nullptr, "'num_layers' is missing"},
        {"paper", "num_layers", "0", "'num_layers'"},
        {"paper", "num_layers", "4097", "'num_layers'"},
        {"paper", "num_layers", "2.0", "'num_layers'"},
        {"paper", "num_layers", "true", "'num_layers'"},
        {"paper", "num_layers", "18446744073709551618", "'num_layers'"},
        {"paper", "num_q_heads", nullptr, "'num_q_heads' is missing"},
        {"paper", "num_q_heads", "3", "'num_q_heads' 3 is no multiple"},
        {"paper", "num_q_heads", "65537", "'num_q_heads'"},
        {"paper", "num_kv_heads", nullptr, "'num_kv_heads' is missing"},
        {"paper", "num_kv_heads", "-2", "'num_kv_heads'"},
        {"paper", "head_dim", nullptr, "'head_dim' is missing"},
        {"paper", "head_dim", "2049", "'head_dim'"},
        {"paper", "summary_dim", nullptr, "'summary_dim' is missing"},
        {"paper", "summary_dim", "0", "'summary_dim'"},
        {"production", "summary_dim", "33", "'summary_dim' is no integer from 1 to 32"},
        {"paper", "rank_max", nullptr, "'rank_max' is missing"},
        {"paper", "rank_max", "0", "'rank_max'"},
        {"paper", "pooling", "\"centroids\"", "'pooling' does not go with the form 'paper'"},
        {"paper", "pooling", "\"max\"", "'pooling' is 'max'"},
        {"paper", "normalise", "false", "'normalise' does not go with the form 'paper'"},
        {"paper", "normalise", "0", "'normalise' is neither"},
        {"paper", "shared_keys", "true", "'shared_keys' does not go with the form 'paper'"},
        {"production", "shared_keys", "false", "'shared_keys' does not go with W_key"},
        {"production", "shared_keys", "null", "'shared_keys' is neither"},
        {"production", "centroids", "2", "'centroids' does not go with the pooling 'mean'"},
        {"production", "centroids", "5", "'centroids'"},
        {"production", "centroids", "0", "'centroids'"},
        {"production", "step", "-1", "'step'"},
        {"production", "normalize", "true", "'normalize' is a setting that this library does not know"},
        {"production", "Version", "1", "'Version' is a setting"},
        {"production", "", "1", "'' is a setting"},
    };
    for (const Case &one : cases) {
        CAPTURE(std::string(one.form));
        CAPTURE(std::string(one.said));
        RouterSettings settings = router_settings({}, one.form);
        if (one.value != nullptr)
            settings.set(one.key, one.value);
        else
            settings.drop(one.key);
        const std::vector<FileTensor> tensors = std::string(one.form) == "paper" ? paper_tensors({}) : production_tensors({});
        refuse_bytes(context.get(), safetensors(tensors, settings.text()), SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_ARGUMENT, one.said);
    }
    // The longest name, and one byte more.
    const std::string name(127, 'm');
    const auto named = [&](const std::string &model) {
        return safetensors(production_tensors({}), router_settings({}, "production").set("model", quoted(model)).text());
    };
    CHECK(std::string(info_of(opened(context.get(), named(name)).get()).model) == name);
    refuse_bytes(context.get(), named(name + "m"), SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_ARGUMENT, "'model'");
    CHECK(std::string(info_of(opened(context.get(), named("\u20ac")).get()).model) == "\u20ac");

    refuse_bytes(context.get(), safetensors(production_tensors({})), SKERRY_ERROR_FORMAT, SKERRY_SUBJECT_ARGUMENT, "__metadata__");
    refuse_bytes(context.get(), safetensors(production_tensors({}), "{\"version\":1"), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_ARGUMENT,
                 "not right JSON");
    refuse_bytes(context.get(), safetensors(production_tensors({}), "[]"), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_ARGUMENT, "no object");
    std::string twice = router_settings({}, "production").text();
    twice.insert(1, "\"model\": \"a\", ");
    refuse_bytes(context.get(), safetensors(production_tensors({}), twice), SKERRY_ERROR_CORRUPT, SKERRY_SUBJECT_ARGUMENT, "one name");
}

TEST_CASE("router: bad descriptions are refused") {
    const Context context = make_context();
    const Bytes bytes = production_file();
    skerry_router *out = nullptr;
    skerry_router_desc desc = make<skerry_router_desc>();
    const auto refuse_desc = [&](const skerry_router_desc *given, skerry_status status, uint32_t subject, const std::string &part) {
        refuse(
            context.get(),
            [&](skerry_error *error) {
                out = reinterpret_cast<skerry_router *>(&out);
                const skerry_status got = skerry_router_open(context.get(), given, &out, error);
                CHECK(out == nullptr);
                return got;
            },
            status, subject, part);
    };
    refuse_desc(nullptr, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, "desc is NULL");
    refuse_desc(&desc, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, "exactly one");
    desc.data = bytes.data();
    desc.bytes = bytes.size();
    desc.path = "x";
    refuse_desc(&desc, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, "exactly one");
    desc.data = nullptr;
    refuse_desc(&desc, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, "desc.bytes");
    desc.bytes = 0;
    desc.path = "";
    refuse_desc(&desc, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_ARGUMENT, "empty");
    desc = make<skerry_router_desc>();
    desc.data = bytes.data();
    desc.bytes = bytes.size();
    desc.flags = 4;
    refuse_desc(&desc, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_FLAGS, "desc.flags");
    desc.flags = 0;
    for (uint32_t size : {0u, uint32_t(sizeof desc) - 4, 5000u}) {
        desc.struct_size = size;
        refuse_desc(&desc, SKERRY_ERROR_STRUCT_SIZE, SKERRY_SUBJECT_STRUCT, "desc.struct_size");
    }
    struct {
        skerry_router_desc known;
        uint64_t tail;
    } longer = {desc, 1};
    longer.known.struct_size = sizeof longer;
    refuse_desc(&longer.known, SKERRY_ERROR_NEWER_FIELD, SKERRY_SUBJECT_STRUCT, "desc");
    longer.tail = 0;
    CHECK(skerry_router_open(context.get(), &longer.known, &out, nullptr) == SKERRY_OK);
    const Router router(out);
    CHECK(router != nullptr);
    desc.struct_size = sizeof desc;
    CHECK(skerry_router_open(context.get(), &desc, nullptr, nullptr) == SKERRY_ERROR_ARGUMENT);
    CHECK(skerry_router_open(nullptr, &desc, &out, nullptr) == SKERRY_ERROR_ARGUMENT);
    CHECK(out == nullptr);

    skerry_router_info info = make<skerry_router_info>();
    CHECK(skerry_router_get_info(nullptr, &info, nullptr) == SKERRY_ERROR_ARGUMENT);
    CHECK(skerry_router_get_info(router.get(), nullptr, nullptr) == SKERRY_ERROR_ARGUMENT);
    info.struct_size = 8;
    CHECK(skerry_router_get_info(router.get(), &info, nullptr) == SKERRY_ERROR_STRUCT_SIZE);
    CHECK(skerry_router_retain(nullptr) == nullptr);
    skerry_router_release(nullptr);
}

TEST_CASE("router: a file opens as its bytes do, and what is no file is refused") {
    const Context context = make_context();
    Folder folder;
    const Bytes bytes = paper_file();
    const std::string path = folder.write("r\u00f6uter.safetensors", bytes);
    skerry_router *out = nullptr;
    REQUIRE(open_path(context.get(), path, &out, nullptr) == SKERRY_OK);
    const Router from_path(out);
    const Router from_bytes = opened(context.get(), bytes);
    const skerry_router_info a = info_of(from_path.get()), b = info_of(from_bytes.get());
    CHECK(same_bytes(&a, &b, sizeof a));

    const auto refuse_path = [&](const std::string &given, skerry_status status, const std::string &part) {
        return refuse(
            context.get(), [&](skerry_error *error) { return open_path(context.get(), given, &out, error); }, status,
            SKERRY_SUBJECT_ARGUMENT, part);
    };
    CHECK(refuse_path(folder.path() + "/absent", SKERRY_ERROR_IO, "no such file").found == ENOENT);
    CHECK(refuse_path(path + "/below", SKERRY_ERROR_IO, "no directory").found == ENOTDIR);
    CHECK(refuse_path(folder.path(), SKERRY_ERROR_IO, "not a regular file").found == 0);
    CHECK(refuse_path("/dev/zero", SKERRY_ERROR_IO, "not a regular file").found == 0);
    // Nobody writes to this pipe: a plain open would wait for ever.
    const std::string pipe = folder.name("pipe");
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    refuse_path(pipe, SKERRY_ERROR_IO, "not a regular file");
    refuse_path(folder.write("empty", {}), SKERRY_ERROR_CORRUPT, "0 bytes");
    Bytes cut = bytes;
    cut.pop_back();
    refuse_path(folder.write("cut", cut), SKERRY_ERROR_CORRUPT, "cut off");
    CHECK(out == nullptr);
}

TEST_CASE("router: neither the bytes nor the file are needed afterwards") {
    const Context context = make_context();
    Folder folder;
    Bytes bytes = production_file();
    const Router router = opened(context.get(), bytes);
    const std::string path = folder.write("file", bytes);
    skerry_router *out = nullptr;
    REQUIRE(open_path(context.get(), path, &out, nullptr) == SKERRY_OK);
    const Router from_path(out);
    std::fill(bytes.begin(), bytes.end(), uint8_t{0xff});
    folder.write("file", {});
    CHECK(std::string(info_of(router.get()).model) == "tiny");
    CHECK(std::string(info_of(from_path.get()).model) == "tiny");
}

TEST_CASE("router: bytes at any alignment give the same router") {
    const Context context = make_context();
    const Bytes bytes = paper_file();
    const skerry_router_info wanted = info_of(opened(context.get(), bytes).get());
    for (size_t shift = 1; shift < 8; ++shift) {
        Bytes moved(shift);
        moved.insert(moved.end(), bytes.begin(), bytes.end());
        skerry_router_desc desc = make<skerry_router_desc>();
        desc.data = moved.data() + shift;
        desc.bytes = bytes.size();
        skerry_router *out = nullptr;
        REQUIRE(skerry_router_open(context.get(), &desc, &out, nullptr) == SKERRY_OK);
        const Router router(out);
        const skerry_router_info info = info_of(router.get());
        CHECK(same_bytes(&info, &wanted, sizeof info));
    }
}

TEST_CASE("router: references keep it and its context, and the last one gives every byte back") {
    Allocator host;
    skerry_context_desc desc = make<skerry_context_desc>();
    desc.allocator = host.hooks();
    Context context = make_context(&desc);
    const uint64_t before = context_bytes(context.get());
    const uint64_t live = host.live_bytes();
    skerry_router *router = opened(context.get(), paper_file()).release();
    const skerry_router_info info = info_of(router);
    // The weights, the object, and nothing of the header.
    CHECK(context_bytes(context.get()) >= before + info.weight_bytes);
    CHECK(context_bytes(context.get()) <= before + info.weight_bytes + 1024);
    CHECK(host.live_bytes() - live == context_bytes(context.get()) - before);
    CHECK(skerry_router_retain(router) == router);
    skerry_router_release(router);
    CHECK(info_of(router).parameters == info.parameters);
    context.reset();
    CHECK(std::string(info_of(router).model) == "tiny");
    skerry_router_release(router);
    CHECK(host.live_count() == 0);
    CHECK(host.mismatches() == 0);
}

TEST_CASE("router: without memory nothing happens") {
    Folder folder;
    const Bytes bytes = paper_file();
    const std::string path = folder.write("file", bytes);
    for (bool from_path : {false, true}) {
        Allocator host;
        skerry_context_desc desc = make<skerry_context_desc>();
        desc.allocator = host.hooks();
        const Context context = make_context(&desc);
        const size_t live = host.live_count();
        skerry_router *out = nullptr;
        skerry_status status = SKERRY_ERROR_OUT_OF_MEMORY;
        int64_t failures = 0;
        for (; status != SKERRY_OK && failures < 1000; ++failures) {
            skerry_error error = make<skerry_error>();
            host.fail_after(failures);
            status = from_path ? open_path(context.get(), path, &out, &error) : open_bytes(context.get(), bytes, &out, &error);
            host.fail_never();
            if (status == SKERRY_OK) break;
            CHECK(status == SKERRY_ERROR_OUT_OF_MEMORY);
            CHECK(error.subject == SKERRY_SUBJECT_HOST_MEMORY);
            CHECK(out == nullptr);
            CHECK(host.live_count() == live);
        }
        CHECK(status == SKERRY_OK);
        CHECK(failures > 4); // the object, the header's text, its tree, the entries, the weights
        skerry_router_release(out);
        CHECK(host.live_count() == live);
    }
}

TEST_CASE("router: many threads open, read, retain and release") {
    const Context context = make_context();
    const Bytes bytes = production_file();
    const uint64_t before = context_bytes(context.get());
    Router shared = opened(context.get(), bytes);
    const skerry_router_info wanted = info_of(shared.get());
    std::vector<int> good(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < good.size(); ++t) {
        threads.emplace_back([&, t] {
            for (int round = 0; round < 200; ++round) {
                skerry_router *own = nullptr;
                skerry_router *held = skerry_router_retain(shared.get());
                skerry_router_info info = make<skerry_router_info>();
                const bool opens = open_bytes(context.get(), bytes, &own, nullptr) == SKERRY_OK;
                const bool reads = skerry_router_get_info(round % 2 == 0 ? held : own, &info, nullptr) == SKERRY_OK;
                good[t] += opens && reads && same_bytes(&info, &wanted, sizeof info);
                skerry_router_release(own);
                skerry_router_release(held);
            }
        });
    }
    for (std::thread &thread : threads)
        thread.join();
    CHECK(good == std::vector<int>(4, 200));
    shared.reset();
    CHECK(context_bytes(context.get()) == before);
}
