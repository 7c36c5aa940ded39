#pragma once

// The objects behind the handles, and what may be done to them. Arguments were checked by api/ as far as they do not depend on state.

#include <skerry/skerry.h>

#include <atomic>

#include "backend/registry.hpp"
#include "base/alloc.hpp"
#include "base/handles.hpp"
#include "base/log.hpp"
#include "base/sync.hpp"
#include "base/transfers.hpp"
#include "base/workers.hpp"
#include "model/plan.hpp"
#include "policy/scores.hpp"
#include "seq/sequence.hpp"
#include "store/arena.hpp"
#include "store/pool.hpp"

struct skerry_context {
    skerry_context(const skerry_allocator &host, const skerry_context_desc &desc)
        : allocator(host), caches(allocator), log(desc.log_fn, desc.log_user, desc.log_level),
          workers(allocator, desc.parallel_for, desc.parallel_user, desc.worker_count),
          transfers(allocator, desc.transfer, desc.transfer_user, desc.transfer_threads) {}

    std::atomic<uint32_t> references{1};
    skerry::Allocator allocator;
    skerry::Allocator caches; // everything that caches hold, their own objects included
    skerry::Log log;
    skerry::Workers workers;
    skerry::Transfers transfers;
    skerry_allocator hooks{};
    uint32_t features = 0;
    const skerry_kernels *kernels = nullptr;
    bool host_threads = false;

    int32_t task_slots() const { return host_threads ? 16 : static_cast<int32_t>(workers.concurrency()); }
    skerry::PlanDevice device() const { return {kernels, task_slots()}; }
};

namespace skerry {

// Pool classes of one layer's slots.
struct LayerClasses {
    int32_t sink = -1;
    int32_t open = -1;
    int32_t wide = -1;
    int32_t record = -1;
    int32_t exact = -1; // in the pool of exact copies
    int32_t anchor = -1;
};

// A slot on the device for one fetched window. Slots are the cache's: two layers' worth, so that one is read while the next is filled, and
// those that are kept out of the budget.
struct ZoomSlot {
    Sequence *seq;   // whose window it holds; nullptr: none
    uint64_t serial; // of the look that wanted it last
    uint32_t place;
    int32_t window;
    int32_t lane;
    uint32_t state; // of the copy (base/transfers.hpp)
};
static_assert(sizeof(ZoomSlot) == zoom_slot_state_bytes);

struct StepSequence {
    Sequence *seq = nullptr;
    int64_t base = 0;
    int32_t count = 0;
    int32_t row = 0; // first row of the step's tensors
};

// What a layer has been through in the open step.
enum : uint8_t {
    layer_named = 1,
    layer_appended = 2,
    layer_scored = 4, // attended over all tiers
    layer_broken = 8, // a parallel loop failed after state had moved: the step can only be aborted
};

} // namespace skerry

struct skerry_step {
    explicit skerry_step(skerry::Allocator &allocator)
        : wanted(allocator, skerry::Owner::step), needed(allocator, skerry::Owner::step), more(allocator, skerry::Owner::step),
          seqs(allocator, skerry::Owner::step), layers(allocator, skerry::Owner::step), observed(allocator, skerry::Owner::step),
          transitions(allocator, skerry::Owner::step) {}

    skerry_cache *cache = nullptr;
    bool open = false;
    uint32_t flags = 0;
    int32_t rows = 0;
    skerry::Buffer<uint64_t> wanted;
    skerry::Buffer<uint64_t> needed; // begin: slots per pool class, tiles per sequence
    skerry::Buffer<uint32_t> more;
    skerry::Buffer<skerry::StepSequence> seqs;
    skerry::Buffer<uint8_t> layers;
    skerry::Buffer<uint8_t> observed; // [seq in step][lane]
    skerry::Buffer<skerry_transition> transitions;
    skerry_counters counters{}; // of this step; added at commit
};

struct skerry_cache {
    skerry_cache(skerry_context *owner);

    std::atomic<uint32_t> references{1};
    skerry_context *context;
    skerry::Allocator allocator;

    skerry::CachePlan plan;
    skerry::ScorePlan scores;
    skerry_cache_desc desc{};
    skerry_policy_desc policy_desc{};
    skerry_sekv_desc sekv_desc{}; // with a reference to its router
    skerry_callbacks_desc callbacks{};
    skerry::Buffer<skerry_layer_desc> layer_descs;
    skerry::Buffer<const skerry_layer_desc *> layer_pointers;
    skerry::Buffer<skerry_rotary_desc> rotary_descs;
    skerry::Buffer<float> frequencies;
    skerry::Buffer<skerry::LayerGeometry> layers;
    skerry::Buffer<skerry::LaneQuota> quotas;
    skerry::Buffer<skerry::LayerClasses> classes;
    int32_t lanes = 0;

    skerry::Pool pool;
    skerry::Pool exact_pool;
    skerry::Arena host; // detail
    skerry::Buffer<skerry::ZoomSlot> zoom_slots;
    uint64_t zoom_serial = 0;  // looks so far
    int32_t zoom_class = -1;   // of the pool
    int32_t zoom_heads = 1;    // KV heads that have a share of the staged slots each
    size_t zoom_sequences = 0; // sequences made so far: under a budget each is made once
    skerry::Mutex pool_mutex;  // lanes of one event take and release in parallel
    skerry::HandleTable<skerry::Sequence *> sequences;
    skerry::Buffer<skerry::Sequence *> spare; // under a budget: closed sequences, with their tables
    skerry::Buffer<uint8_t> scratch;
    skerry::Buffer<uint8_t> memory_scratch; // of attention to prompts that have ended, under fidelity paper
    skerry_step step;
    skerry::Mutex step_mutex; // calls on different layers of one step
    skerry_counters counters{};
    uint64_t staging_slot_bytes = 0;  // of the pool's bytes
    uint64_t staging_table_bytes = 0; // of the tables' bytes

    const skerry::PolicyConfig &policy() const { return plan.policy; }
    const skerry_kernels &kernels() const { return *context->kernels; }
    bool splits_inside() const { return plan.policy.routes() && plan.policy.prefill == SKERRY_PREFILL_SPLIT; }
};

namespace skerry {

skerry_context *context_create(const skerry_context_desc &desc);
void context_release(skerry_context *context);
// NULL is allowed.
void router_release(skerry_router *router);

Status cache_create(skerry_context *context, const skerry_cache_desc &desc, skerry_cache **out, skerry_error *error);
void cache_destroy(skerry_cache *cache);
Status cache_set_budget(skerry_cache *cache, const skerry_budget_desc &budget, skerry_error *error);
// Slots per pool class that a plan asks for, and the bytes of slots and table entries that are staging.
void wanted_slots(const skerry_cache *cache, const CachePlan &plan, Buffer<uint64_t> *slots, uint64_t *staging, uint64_t *staging_tables);
uint64_t plan_scratch_bytes(const skerry_cache *cache, const CachePlan &plan);
void use_plan(skerry_cache *cache, const CachePlan &plan);
void add_counters(skerry_counters *to, const skerry_counters &from);

// Tables of another capacity for a sequence in use: prepared first, then filled, which cannot fail.
struct NewTables {
    explicit NewTables(Allocator &allocator)
        : tables(allocator, Owner::tables), undo(allocator, Owner::staging), pending(allocator, Owner::staging) {}
    LaneTables tables;
    LaneTables undo;
    Buffer<int64_t> pending;
};
struct TablesAndSequence {
    Sequence *seq;
    NewTables tables;
};
NewTables prepare_tables(skerry_cache *cache, const Sequence *seq, const CachePlan &plan);
void adopt_tables(skerry_cache *cache, Sequence *seq, NewTables &&made);
// Tables with room for `more` further tiles per lane, where a sequence without a budget has none: true when `out` holds them.
bool sequence_reserve(skerry_cache *cache, const Sequence *seq, uint32_t more, NewTables *out);

Status cache_check(skerry_cache *cache, skerry_error *error);
void cache_memory(skerry_cache *cache, skerry_memory_info *info);

Status sequence_find(skerry_cache *cache, skerry_seq id, Sequence **out, skerry_error *error, int32_t index = -1);
// A closed sequence with tables of the present capacity. Throws std::bad_alloc.
Sequence *sequence_make(skerry_cache *cache);
Status sequence_create(skerry_cache *cache, skerry_seq *out, skerry_error *error);
void sequence_destroy(skerry_cache *cache, Sequence *seq);
Status sequence_fork(skerry_cache *cache, Sequence *parent, int64_t length, skerry_seq *out, skerry_error *error);
Status sequence_truncate(skerry_cache *cache, Sequence *seq, int64_t length, skerry_error *error);
bool sequence_can_truncate(const skerry_cache *cache, const Sequence *seq, int64_t length, int64_t ahead);
int64_t sequence_lowest_truncate(const skerry_cache *cache, const Sequence *seq);
void sequence_info(skerry_cache *cache, const Sequence *seq, skerry_seq_info *info);
void sequence_ranges(skerry_cache *cache, const Sequence *seq, int32_t layer, int32_t head, skerry_range *ranges, int32_t capacity,
                     int32_t *needed);
uint64_t sequence_fingerprint(skerry_cache *cache, const Sequence *seq);
void sequence_diagnostics(skerry_cache *cache, const Sequence *seq, int32_t layer, skerry_diagnostics *out);
int64_t sequence_next_event(const skerry_cache *cache, const Sequence *seq);

// Gives back every slot of a lane, of the tables or of the undo copy.
void lane_release(skerry_cache *cache, LaneTables &tables, Lane &lane);
// The pool bytes of one window (or the sinks) as it is stored now, dormant record included.
uint64_t window_bytes(const skerry_cache *cache, const LaneTables &tables, const Lane &lane, const WindowSpan &span);

// Tells the host that a layer is named for the first time in the step.
void name_layer(skerry_step *step, int32_t layer);
// The first event position after `position`, as seen from a sequence in the open step; INT64_MAX: none.
int64_t event_after(const skerry_step *step, const Sequence *seq, int64_t position);

// Converts rows between the caller's tensor and f32. Element (row, head, c) of a rank-3 tensor, or (row, c) of rank 2.
struct TensorRows {
    const skerry_tensor *tensor;
    int64_t row_stride;
    int64_t head_stride;
    int64_t element_stride;
    const uint8_t *base() const { return static_cast<const uint8_t *>(tensor->data) + tensor->byte_offset; }
};
TensorRows tensor_rows(const skerry_tensor &tensor);
void read_row(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, float *out);
void write_row(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, const float *values);
// Number of values that are not finite, or above what `store` can hold; the first one's place is written.
int64_t count_unstorable(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, skerry_dtype store);
void zero_unstorable(float *row, int32_t dim, skerry_dtype store);
// check_tensor, and for what is written: no zero strides.
Status check_output(const skerry_tensor &tensor, int32_t rank, const int64_t *shape, bool at_least, int32_t argument, const char *what,
                    skerry_error *error);
Status check_tensor(const skerry_tensor &tensor, int32_t rank, const int64_t *shape, bool at_least, int32_t argument, const char *what,
                    skerry_error *error);

Status step_begin(skerry_cache *cache, const skerry_step_desc &desc, skerry_step **out, skerry_error *error);
Status step_append(skerry_step *step, int32_t layer, const skerry_tensor &keys, const skerry_tensor &values, skerry_error *error);
Status step_attend(skerry_step *step, const skerry_attend_desc &desc, skerry_error *error);
Status step_view(skerry_step *step, int32_t seq_index, int32_t layer, int32_t head, uint32_t tiers, skerry_part *parts, int32_t capacity,
                 int32_t *needed, skerry_error *error);
Status step_gather(skerry_step *step, const skerry_gather_desc &desc, int32_t *tokens, skerry_error *error);
Status step_zoom(skerry_step *step, int32_t layer, const skerry_tensor &queries, skerry_error *error);
Status step_observe(skerry_step *step, const skerry_observe_desc &desc, skerry_error *error);
Status step_surprisal(skerry_step *step, int32_t seq_index, const float *nats, skerry_error *error);
Status step_commit(skerry_step *step, skerry_error *error);
void step_abort(skerry_step *step);

// Scores (score.cpp). Masses of queries are pended per tile and folded into the scores at period ends.
void lane_save(skerry_cache *cache, Sequence *seq, int32_t layer, int64_t base);
void lane_fold(skerry_cache *cache, Sequence *seq, Lane &lane);
void lane_enter_period(skerry_cache *cache, Sequence *seq, Lane &lane, uint64_t period);
int64_t window_rank(const skerry_cache *cache, const Sequence *seq, const LayerState &state, const Lane &lane, uint32_t entry,
                    int64_t length);
void add_query_squares(float *state, const float *queries, int32_t group, int32_t key_dim, uint64_t seen);

// Events (event.cpp): moves the windows of one layer as of `length` tokens. Called inside an open step; cannot fail.
void run_event(skerry_cache *cache, Sequence *seq, int32_t layer, int64_t length);

// After a change of quotas: lets go of the oldest records whose balance parameters no longer fit the table.
void limit_epochs(skerry_cache *cache, Sequence *seq, int32_t layer);

// Rows of one window (or the sinks) as f32, keys as attention uses them: [tokens][dim].
struct CodeScratch {
    float *mean;
    float *balance;
    void *code;
};
void decode_tile(const skerry_cache *cache, const Sequence *seq, int32_t layer, const Lane &lane, const skerry_tile &tile, float *keys,
                 float *values, const CodeScratch &scratch);
skerry_code_params code_params(const PolicyConfig &policy, const LayerGeometry &layer, const skerry_tile &tile, skerry_side side);

// Values start here within a tile or record.
inline size_t tile_value_offset(const LayerGeometry &layer, const skerry_tile &tile) {
    return value_offset(tile.key_format, layer.key_dim, tile.capacity, is_l_format(tile.key_format) ? tile_key_rank(tile.epoch) : 0);
}

inline uint32_t tile_units(const PolicyConfig &policy, const LayerGeometry &layer, const skerry_tile &tile) {
    return static_cast<uint32_t>(
        record_bytes(tile.key_format, tile.value_format, layer.key_dim, layer.value_dim, tile.capacity, policy.value_group) / place_bytes);
}

} // namespace skerry
