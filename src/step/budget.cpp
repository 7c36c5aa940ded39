// Changing the budget of a cache that is in use.

#include <algorithm>
#include <cstring>

#include "step/memory.hpp"

namespace skerry {

namespace {

// Every reference to a slot that a sequence holds, and the pool it lies in: visit(pool, place &first tile's place).
template <class Visit>
void for_each_slot(skerry_cache *cache, Visit &&visit) {
    const PolicyConfig &p = cache->policy();
    cache->sequences.for_each([&](uint64_t, Sequence *seq) {
        for (Lane &lane : seq->tables.lanes) {
            skerry_tile *tiles = seq->tiles(lane);
            for (uint32_t t = 0; t < lane.tiles;) {
                const WindowSpan span = window_at(p, tiles, t, lane.tiles);
                const uint32_t before = tiles[t].place;
                const uint32_t after = visit(before);
                for (uint32_t k = span.begin; k < span.end; ++k)
                    tiles[k].place = after + (tiles[k].place - before);
                if (p.quantises() && seq->tables.dormant[lane.offset + t] != no_place) {
                    seq->tables.dormant[lane.offset + t] = visit(seq->tables.dormant[lane.offset + t]);
                }
                t = span.end;
            }
        }
    });
}

struct Moved {
    uint32_t from;
    uint32_t to;
};

// Moves what lies beyond the first `slots` slots of a class into free ones below, then gives the rest back.
void shrink_class(skerry_cache *cache, int32_t slot_class, uint64_t slots, Buffer<Moved> *moved) {
    Pool &pool = cache->pool;
    moved->clear();
    uint64_t next = 0;
    for_each_slot(cache, [&](uint32_t place) {
        if (pool.class_of(place) != slot_class || pool.index_of(place) < slots) return place;
        for (const Moved &m : *moved) {
            if (m.from != place) continue;
            pool.retain(m.to);
            pool.release(place);
            return m.to;
        }
        uint32_t to = pool.place_of(slot_class, next);
        while (pool.references(to) != 0)
            to = pool.place_of(slot_class, ++next);
        pool.take_at(to);
        std::memcpy(pool.data(to), pool.data(place), pool.slot_bytes(slot_class));
        if (pool.references(place) > 1) moved->push_back(Moved{place, to});
        pool.release(place);
        return to;
    });
    static_cast<void>(pool.shrink(slot_class, slots));
}

} // namespace

Status cache_set_budget(skerry_cache *cache, const skerry_budget_desc &budget, skerry_error *error) {
    if (cache->step.open) return fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_STEP, -1, 1, 0, "a step is open on this cache");
    CachePlan plan;
    if (const Status status = replan(cache->desc, budget, cache->context->device(), &plan, error); status < 0) return status;
    if (plan.exact_bytes != cache->plan.exact_bytes) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_BUDGET, -1, static_cast<int64_t>(plan.exact_bytes),
                    static_cast<int64_t>(cache->plan.exact_bytes), "budget.exact_bytes is fixed when the cache is created");
    }
    for (size_t i = 0; i < cache->layers.size() && plan.policy.zooms(); ++i) {
        const LaneQuota now = cache->quotas[i];
        const LaneQuota then = plan.quota(cache->layers[i]);
        if (then.host_windows == now.host_windows && then.fetch_windows == now.fetch_windows && then.zoom_slots == now.zoom_slots &&
            plan.length_tokens == cache->plan.length_tokens)
            continue;
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_BUDGET, static_cast<int32_t>(i), then.host_windows, now.host_windows,
                    "layer %zu: this budget has room for %d windows with detail and %d fetched ones, the cache was made for %d and %d", i,
                    then.host_windows, then.fetch_windows, now.host_windows, now.fetch_windows);
    }
    Status status = SKERRY_OK;
    cache->sequences.for_each([&](uint64_t, Sequence *seq) {
        if (status < 0) return;
        if (seq->prefilling) {
            status = fail(error, SKERRY_ERROR_STATE, SKERRY_SUBJECT_SEQUENCE, -1, static_cast<int64_t>(seq->id), 0,
                          "a sequence is collecting its prompt");
            return;
        }
        if (seq->is_memory()) {
            const PromptMemory &memory = *seq->paper->memory;
            const uint64_t device = memory_sequence_bytes(cache, plan, memory), host = memory.host.size() * sizeof(float);
            if (device > plan.sequence_bytes || host > plan.host_limit) {
                status = fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, -1, static_cast<int64_t>(device),
                              static_cast<int64_t>(plan.sequence_bytes),
                              "a prompt under fidelity paper never changes: it takes %llu bytes on the device and %llu on the host",
                              static_cast<unsigned long long>(device), static_cast<unsigned long long>(host));
            }
            return;
        }
        if (plan.policy.routes() || !plan.bounded) return;
        for (size_t i = 0; i < cache->layers.size() && status == SKERRY_OK; ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            const LaneQuota q = plan.quota(layer);
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                const Lane &lane = seq->lane(layer.lane + h);
                if (lane.open_windows > static_cast<uint32_t>(q.open_slots() + q.full_windows) ||
                    lane.tiles > static_cast<uint32_t>(q.entries())) {
                    status =
                        fail(error, SKERRY_ERROR_OVER_BUDGET, SKERRY_SUBJECT_BUDGET, static_cast<int32_t>(i), lane.open_windows,
                             q.open_slots() + q.full_windows, "policy full moves nothing: layer %zu holds %u windows, the new budget %d", i,
                             lane.open_windows, q.open_slots() + q.full_windows);
                    break;
                }
            }
        }
    });
    if (status < 0) return status;

    // What may run out of memory comes first.
    Buffer<uint64_t> slots(cache->allocator, Owner::step);
    uint64_t staging = 0;
    uint64_t staging_tables = 0;
    wanted_slots(cache, plan, &slots, &staging, &staging_tables);
    const uint64_t scratch = plan_scratch_bytes(cache, plan);
    Buffer<uint64_t> grown(cache->allocator, Owner::step);
    grown.resize(slots.size());
    Buffer<uint8_t> new_scratch(cache->allocator, Owner::scratch, 64);
    Buffer<Moved> moved(cache->allocator, Owner::step);
    // References to slots that several sequences share, at most one entry for each slot in use.
    uint64_t used = 0;
    for (int32_t k = 0; k < cache->pool.class_count(); ++k)
        used += cache->pool.used(k);
    moved.reserve(static_cast<size_t>(used));
    Vector<TablesAndSequence> tables(CountedAllocator<TablesAndSequence>(cache->allocator, Owner::step));
    tables.reserve(static_cast<size_t>(plan.info.max_sequences));
    if (plan.bounded ? scratch != cache->scratch.size() : scratch > cache->scratch.size()) new_scratch.resize(scratch);
    cache->sequences.for_each([&](uint64_t, Sequence *seq) { tables.push_back(TablesAndSequence{seq, prepare_tables(cache, seq, plan)}); });
    for (Sequence *seq : cache->spare)
        tables.push_back(TablesAndSequence{seq, prepare_tables(cache, seq, plan)});
    // From no budget to one: the spare sequences are made now.
    Vector<Owned<Sequence>> made(CountedAllocator<Owned<Sequence>>(cache->allocator, Owner::step));
    made.reserve(static_cast<size_t>(plan.info.max_sequences));
    cache->spare.reserve(static_cast<size_t>(plan.info.max_sequences));
    while (plan.bounded && tables.size() < static_cast<size_t>(plan.info.max_sequences)) {
        made.emplace_back(cache->allocator, Owner::tables, sequence_make(cache));
        tables.push_back(TablesAndSequence{made.back().get(), prepare_tables(cache, made.back().get(), plan)});
    }
    for (size_t k = 0; plan.bounded && k < slots.size(); ++k) {
        const uint64_t have = cache->pool.slots(static_cast<int32_t>(k));
        grown[k] = slots[k] > have ? slots[k] - have : 0;
    }
    cache->pool.grow(grown.span());
    for (Owned<Sequence> &seq : made)
        cache->spare.push_back(seq.detach());
    if (new_scratch.size() != 0) cache->scratch.swap(new_scratch);
    cache->step.counters = skerry_counters{};
    cache->step.transitions.clear();
    // Quotas of the new plan; sequences move down to them at once.
    use_plan(cache, plan);
    cache->staging_slot_bytes = plan.bounded ? staging : 0;
    cache->staging_table_bytes = plan.bounded ? staging_tables : 0;
    for (TablesAndSequence &entry : tables) {
        Sequence *seq = entry.seq;
        if (plan.policy.routes() && seq->length > 0) {
            for (size_t i = 0; i < cache->layers.size(); ++i) {
                if (cache->layers[i].source != static_cast<int32_t>(i)) continue;
                run_event(cache, seq, static_cast<int32_t>(i), seq->length);
                limit_epochs(cache, seq, static_cast<int32_t>(i));
            }
        }
        adopt_tables(cache, seq, std::move(entry.tables));
    }
    for (size_t k = 0; plan.bounded && k < slots.size(); ++k) {
        if (slots[k] < cache->pool.slots(static_cast<int32_t>(k))) shrink_class(cache, static_cast<int32_t>(k), slots[k], &moved);
    }
    add_counters(&cache->counters, cache->step.counters);
    return SKERRY_OK;
}

} // namespace skerry
