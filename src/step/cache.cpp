#include "step/memory.hpp"
#include "step/zoom.hpp"

#include <algorithm>
#include <cstring>

skerry_cache::skerry_cache(skerry_context *owner)
    : context(owner), allocator(owner->caches), layer_descs(allocator, skerry::Owner::context),
      layer_pointers(allocator, skerry::Owner::context), rotary_descs(allocator, skerry::Owner::context),
      frequencies(allocator, skerry::Owner::context), layers(allocator, skerry::Owner::context), quotas(allocator, skerry::Owner::context),
      classes(allocator, skerry::Owner::context), pool(allocator, skerry::Owner::pool), exact_pool(allocator, skerry::Owner::exact),
      host(allocator, skerry::Owner::host), zoom_slots(allocator, skerry::Owner::tables), sequences(allocator, skerry::Owner::context),
      spare(allocator, skerry::Owner::context), scratch(allocator, skerry::Owner::scratch, 64),
      memory_scratch(allocator, skerry::Owner::scratch, 64), step(allocator) {}

namespace skerry {

namespace {

// Keeps what a later set_budget needs of the caller's description.
void keep_description(skerry_cache *cache, const skerry_cache_desc &desc) {
    const size_t count = static_cast<size_t>(desc.layer_count);
    cache->layer_descs.resize(count);
    cache->layer_pointers.resize(count);
    cache->rotary_descs.resize(count);
    cache->layers.resize(count);
    cache->quotas.resize(count);
    cache->classes.resize(count);
    size_t floats = 0;
    for (size_t i = 0; i < count; ++i) {
        if (desc.layers[i]->rotary != nullptr) floats += static_cast<size_t>(desc.layers[i]->rotary->dims / 2);
    }
    cache->frequencies.resize(floats);
    floats = 0;
    for (size_t i = 0; i < count; ++i) {
        skerry_layer_desc &layer = cache->layer_descs[i];
        std::memcpy(&layer, desc.layers[i], std::min<size_t>(desc.layers[i]->struct_size, sizeof layer));
        layer.struct_size = sizeof layer;
        if (layer.rotary != nullptr) {
            skerry_rotary_desc &rotary = cache->rotary_descs[i];
            std::memcpy(&rotary, layer.rotary, std::min<size_t>(layer.rotary->struct_size, sizeof rotary));
            rotary.struct_size = sizeof rotary;
            const size_t half = static_cast<size_t>(rotary.dims / 2);
            std::memcpy(cache->frequencies.data() + floats, rotary.inverse_frequencies, half * sizeof(float));
            rotary.inverse_frequencies = cache->frequencies.data() + floats;
            floats += half;
            layer.rotary = &rotary;
        }
        cache->layer_pointers[i] = &layer;
    }
    cache->desc = desc;
    cache->desc.layers = cache->layer_pointers.data();
    cache->desc.budget = nullptr;
    cache->desc.callbacks = nullptr;
    if (desc.policy != nullptr) {
        std::memcpy(&cache->policy_desc, desc.policy, std::min<size_t>(desc.policy->struct_size, sizeof cache->policy_desc));
        cache->policy_desc.struct_size = sizeof cache->policy_desc;
        cache->desc.policy = &cache->policy_desc;
        if (cache->policy_desc.sekv != nullptr) {
            skerry_sekv_desc &sekv = cache->sekv_desc;
            std::memcpy(&sekv, cache->policy_desc.sekv, std::min<size_t>(cache->policy_desc.sekv->struct_size, sizeof sekv));
            sekv.struct_size = sizeof sekv;
            cache->policy_desc.sekv = &sekv;
            if (sekv.router != nullptr) sekv.router->references.fetch_add(1, std::memory_order_relaxed);
        }
    }
}

int32_t class_for(Pool &pool, uint32_t bytes, Buffer<uint32_t> &known, int32_t role) {
    if (bytes == 0) return -1;
    for (size_t i = 0; i < known.size(); i += 2) {
        if (known[i] == bytes && known[i + 1] == static_cast<uint32_t>(role)) return static_cast<int32_t>(i / 2);
    }
    known.push_back(bytes);
    known.push_back(static_cast<uint32_t>(role));
    return pool.add_class(bytes);
}

// Slots of every class for all sequences, under a plan.
struct SlotCounts {
    uint64_t sink = 0, open = 0, wide = 0, record = 0, anchor = 0, staging_bytes = 0;
};

SlotCounts lane_slots(const CachePlan &plan, const LaneQuota &q) {
    SlotCounts out;
    out.sink = q.sink_slot_bytes != 0 ? 1 : 0;
    out.open = static_cast<uint64_t>(q.open_slots() + (plan.policy.has_wide() ? 0 : q.full_windows));
    out.wide = q.wide_slot_bytes != 0 ? static_cast<uint64_t>(q.full_windows + q.staging_wide) : 0;
    out.record = q.record_slot_bytes != 0 ? static_cast<uint64_t>(q.record_slots + q.staging_records) : 0;
    out.anchor = static_cast<uint64_t>(q.anchors);
    out.staging_bytes =
        static_cast<uint64_t>(q.staging_windows) * (q.open_slot_bytes + slot_overhead_bytes) +
        static_cast<uint64_t>(q.staging_records) * (q.record_slot_bytes != 0 ? q.record_slot_bytes + slot_overhead_bytes : 0) +
        static_cast<uint64_t>(q.staging_wide) * (q.wide_slot_bytes != 0 ? q.wide_slot_bytes + slot_overhead_bytes : 0);
    return out;
}

} // namespace

void wanted_slots(const skerry_cache *cache, const CachePlan &plan, Buffer<uint64_t> *slots, uint64_t *staging, uint64_t *staging_tables) {
    slots->resize(0);
    slots->resize(static_cast<size_t>(cache->pool.class_count()));
    *staging = *staging_tables = 0;
    uint64_t kept = 0;
    const uint64_t sequences = static_cast<uint64_t>(plan.info.max_sequences);
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerGeometry &layer = cache->layers[i];
        if (layer.source != static_cast<int32_t>(i)) continue;
        const LaneQuota q = plan.quota(layer);
        const SlotCounts counts = lane_slots(plan, q);
        const uint64_t lanes = sequences * static_cast<uint64_t>(layer.kv_heads);
        const LayerClasses &c = cache->classes[i];
        const auto want = [&](int32_t slot_class, uint64_t count) {
            if (slot_class >= 0) (*slots)[static_cast<size_t>(slot_class)] += count * lanes;
        };
        want(c.sink, counts.sink);
        want(c.open, counts.open);
        want(c.wide, counts.wide);
        want(c.record, counts.record);
        kept += static_cast<uint64_t>(q.zoom_slots) * lanes;
        want(c.anchor, counts.anchor);
        *staging += counts.staging_bytes * lanes;
        *staging_tables += static_cast<uint64_t>(q.staging_entries) * entry_table_bytes(plan.policy) * lanes;
    }
    if (cache->zoom_class < 0) return;
    (*slots)[static_cast<size_t>(cache->zoom_class)] += kept + static_cast<uint64_t>(plan.staged_slots);
    *staging += static_cast<uint64_t>(plan.staged_slots) * (plan.staged_slot_bytes + slot_overhead_bytes);
    *staging_tables += static_cast<uint64_t>(plan.staged_slots) * zoom_slot_state_bytes;
}

void use_plan(skerry_cache *cache, const CachePlan &plan) {
    cache->plan = plan;
    for (size_t i = 0; i < cache->layers.size(); ++i)
        cache->quotas[i] = plan.quota(cache->layers[i]);
}

uint64_t plan_scratch_bytes(const skerry_cache *cache, const CachePlan &plan) {
    uint64_t bytes = 0;
    for (const LayerGeometry &layer : cache->layers) {
        const LaneQuota q = plan.quota(layer);
        bytes = std::max(bytes, layer_scratch_bytes(cache->context->device(), plan.policy, layer, q.entries(), q.epochs,
                                                    zoom_shape(&cache->kernels(), plan.policy, layer, q)));
    }
    return bytes;
}

Status cache_create(skerry_context *context, const skerry_cache_desc &desc, skerry_cache **out, skerry_error *error) {
    CachePlan plan;
    if (const Status status = make_plan(desc, context->device(), &plan, error); status < 0) return status;
    skerry_cache *cache = create_object<skerry_cache>(context->caches, Owner::context, context);
    context->references.fetch_add(1, std::memory_order_relaxed);
    try {
        keep_description(cache, desc);
        if (desc.callbacks != nullptr) cache->callbacks = *desc.callbacks;
        int32_t lanes = 0;
        for (int32_t i = 0; i < desc.layer_count; ++i) {
            LayerGeometry &layer = cache->layers[static_cast<size_t>(i)];
            if (const Status status = read_layer(cache->desc, i, &layer, error); status < 0) {
                cache_destroy(cache);
                return status;
            }
            if (layer.source == i) {
                layer.lane = lanes;
                lanes += layer.kv_heads;
            } else {
                layer.lane = cache->layers[static_cast<size_t>(layer.source)].lane;
            }
        }
        cache->lanes = lanes;
        use_plan(cache, plan);
        ScoreConfig config;
        const PolicyConfig &p = plan.policy;
        config.rule = p.score == SKERRY_SCORE_CUMULATIVE ? ScoreRule::cumulative
                      : p.score == SKERRY_SCORE_AGE      ? ScoreRule::age_normalised
                      : p.score == SKERRY_SCORE_DECAYED  ? ScoreRule::decayed
                      : p.score == SKERRY_SCORE_LAST     ? ScoreRule::last_queries
                                                         : ScoreRule::worst_case;
        config.period = static_cast<uint32_t>(p.period);
        config.window = static_cast<uint32_t>(p.score_queries);
        cache->scores = make_score_plan(config);

        {
            Buffer<uint32_t> known(cache->allocator, Owner::context);
            Buffer<uint32_t> known_exact(cache->allocator, Owner::context);
            for (size_t i = 0; i < cache->layers.size(); ++i) {
                if (cache->layers[i].source != static_cast<int32_t>(i)) {
                    cache->classes[i] = cache->classes[static_cast<size_t>(cache->layers[i].source)];
                    continue;
                }
                const LaneQuota &q = cache->quotas[i];
                LayerClasses &c = cache->classes[i];
                c = LayerClasses{};
                c.sink = class_for(cache->pool, q.sink_slot_bytes, known, 0);
                c.open = class_for(cache->pool, q.open_slot_bytes, known, 1);
                c.wide = class_for(cache->pool, q.wide_slot_bytes, known, 2);
                c.record = class_for(cache->pool, q.record_slot_bytes, known, 3);
                c.anchor = class_for(cache->pool, q.anchor_slot_bytes, known, 5);
                if (p.keeps_exact()) c.exact = class_for(cache->exact_pool, q.open_slot_bytes, known_exact, 0);
            }
        }
        if (plan.staged_slots > 0) cache->zoom_class = cache->pool.add_class(plan.staged_slot_bytes);
        if (plan.bounded) {
            Buffer<uint64_t> slots(cache->allocator, Owner::context);
            wanted_slots(cache, plan, &slots, &cache->staging_slot_bytes, &cache->staging_table_bytes);
            cache->pool.grow(slots.span());
        }
        if (plan.bounded) cache->scratch.resize(plan_scratch_bytes(cache, plan));
        if (cache->zoom_class >= 0) {
            for (size_t i = 0; i < cache->layers.size(); ++i) {
                if (cache->quotas[i].host_windows > 0) cache->zoom_heads = std::max(cache->zoom_heads, cache->layers[i].kv_heads);
            }
            cache->zoom_slots.resize(cache->pool.slots(cache->zoom_class));
            for (ZoomSlot &slot : cache->zoom_slots)
                slot = ZoomSlot{nullptr, 0, cache->pool.take(cache->zoom_class), -1, -1, 0};
        }
        if (p.keeps_exact() && plan.exact_bytes > 0) {
            const uint64_t windows = static_cast<uint64_t>(plan.exact_windows) * static_cast<uint64_t>(plan.info.max_sequences);
            Buffer<uint64_t> slots(cache->allocator, Owner::context);
            slots.resize(static_cast<size_t>(cache->exact_pool.class_count()));
            for (size_t i = 0; i < cache->layers.size(); ++i) {
                if (cache->layers[i].source != static_cast<int32_t>(i)) continue;
                slots[static_cast<size_t>(cache->classes[i].exact)] += windows * static_cast<uint64_t>(cache->layers[i].kv_heads);
            }
            cache->exact_pool.grow(slots.span());
        }
        if (p.zooms()) {
            uint64_t bytes = 0, records = 0;
            for (size_t i = 0; i < cache->layers.size(); ++i) {
                if (cache->layers[i].source != static_cast<int32_t>(i)) continue;
                const LaneQuota &q = cache->quotas[i];
                const uint64_t held = static_cast<uint64_t>(cache->layers[i].kv_heads) * static_cast<uint64_t>(plan.info.max_sequences);
                bytes += held * host_record_bytes(plan, cache->layers[i], q);
                records += held * static_cast<uint64_t>(q.host_windows);
            }
            cache->host.reserve(bytes / Arena::unit_bytes, records);
        }
        cache->sequences.reserve(static_cast<size_t>(plan.info.max_sequences));
        if (plan.bounded) {
            cache->spare.reserve(static_cast<size_t>(plan.info.max_sequences));
            for (int32_t i = 0; i < plan.info.max_sequences; ++i)
                cache->spare.push_back(sequence_make(cache));
        }
        cache->step.wanted.resize(static_cast<size_t>(cache->pool.class_count()));
        cache->step.needed.resize(static_cast<size_t>(cache->pool.class_count()));
        cache->step.more.resize(static_cast<size_t>(plan.info.max_sequences));
        cache->step.cache = cache;
        cache->step.seqs.reserve(static_cast<size_t>(plan.info.max_sequences));
        cache->step.layers.resize(cache->layers.size());
        cache->step.observed.resize(static_cast<size_t>(plan.info.max_sequences) * static_cast<size_t>(lanes));
    } catch (...) {
        cache_destroy(cache);
        throw;
    }
    context->log.write(SKERRY_LOG_INFO, "cache", "%d layers, %d KV heads, planned %llu bytes, staging %llu", desc.layer_count, cache->lanes,
                       static_cast<unsigned long long>(plan.info.planned_bytes), static_cast<unsigned long long>(plan.info.staging_bytes));
    *out = cache;
    return SKERRY_OK;
}

void cache_destroy(skerry_cache *cache) {
    if (cache->step.open) step_abort(&cache->step);
    skerry_context *context = cache->context;
    cache->sequences.for_each([&](uint64_t, Sequence *seq) {
        zoom_clear(cache, seq);
        memory_clear(cache, seq);
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                lane_release(cache, seq->tables, seq->lane(layer.lane + h));
            }
        }
        destroy_object(cache->allocator, Owner::tables, seq);
    });
    for (Sequence *seq : cache->spare)
        destroy_object(cache->allocator, Owner::tables, seq);
    skerry_router *router = cache->sekv_desc.router;
    destroy_object(context->caches, Owner::context, cache);
    router_release(router);
    context_release(context);
}

skerry_context *context_create(const skerry_context_desc &desc) {
    Allocator first(desc.allocator);
    void *memory = first.allocate(Owner::context, sizeof(skerry_context), 64);
    skerry_context *context = nullptr;
    try {
        context = new (memory) skerry_context(desc.allocator, desc);
    } catch (...) {
        first.release(Owner::context, memory, sizeof(skerry_context), 64);
        throw;
    }
    context->hooks = desc.allocator;
    context->host_threads = desc.parallel_for != nullptr;
    context->features = cpu_detect() & ~desc.cpu_disable;
    context->kernels = cpu_kernels(context->features);
    return context;
}

void router_release(skerry_router *router) {
    if (router == nullptr || router->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    skerry_context *context = router->context;
    destroy_object(context->allocator, Owner::context, router);
    context_release(context);
}

void context_release(skerry_context *context) {
    if (context->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    Allocator last(context->hooks);
    context->~skerry_context();
    last.release(Owner::context, context, sizeof(skerry_context), 64);
}

void cache_memory(skerry_cache *cache, skerry_memory_info *info) {
    const Allocator &a = cache->allocator;
    info->budget_bytes = cache->plan.info.budget_bytes;
    const uint64_t staging_slots = cache->staging_slot_bytes;
    const uint64_t pool = a.live_bytes(Owner::pool);
    info->pool_bytes = pool - std::min(pool, staging_slots);
    const uint64_t tables = a.live_bytes(Owner::tables);
    const uint64_t staging_tables = std::min(tables, cache->staging_table_bytes);
    info->table_bytes = tables - staging_tables;
    info->staging_bytes = a.live_bytes(Owner::staging) + a.live_bytes(Owner::scratch) + std::min(pool, staging_slots) + staging_tables;
    info->exact_bytes = a.live_bytes(Owner::exact);
    info->fixed_bytes = a.live_bytes(Owner::context) + a.live_bytes(Owner::step) + sizeof(skerry_cache);
    info->allocated_bytes = a.live_bytes() + sizeof(skerry_cache);
    info->peak_bytes = a.peak_bytes() + sizeof(skerry_cache);
    info->used_full_bytes = 0;
    info->used_quantised_bytes = 0;
    info->used_dormant_bytes = 0;
    info->used_zoom_bytes = 0;
    info->used_summary_bytes = 0;
    for (const ZoomSlot &slot : cache->zoom_slots)
        info->used_zoom_bytes += slot.seq != nullptr ? cache->plan.staged_slot_bytes : 0;
    for (size_t i = 0; i < cache->layers.size(); ++i) {
        const LayerClasses &c = cache->classes[i];
        // A class may serve several layers: counted once, at the first.
        const auto first = [&](int32_t slot_class, int32_t LayerClasses::*member) {
            if (slot_class < 0) return false;
            for (size_t j = 0; j < i; ++j) {
                if (cache->classes[j].*member == slot_class) return false;
            }
            return true;
        };
        const auto used = [&](int32_t slot_class) { return cache->pool.used(slot_class) * cache->pool.slot_bytes(slot_class); };
        if (first(c.sink, &LayerClasses::sink)) info->used_full_bytes += used(c.sink);
        if (first(c.open, &LayerClasses::open)) info->used_full_bytes += used(c.open);
        if (first(c.wide, &LayerClasses::wide)) info->used_full_bytes += used(c.wide);
        if (first(c.record, &LayerClasses::record)) info->used_quantised_bytes += used(c.record);
        if (first(c.anchor, &LayerClasses::anchor)) info->used_full_bytes += used(c.anchor);
    }
    uint64_t full_cache = 0;
    uint64_t used_tables = 0;
    uint64_t used_host = cache->host.used_bytes();
    const PolicyConfig &p = cache->policy();
    cache->sequences.for_each([&](uint64_t, Sequence *seq) {
        for (size_t i = 0; i < cache->layers.size(); ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            int64_t tokens = seq->length;
            if (layer.sliding_window > 0) tokens = std::min<int64_t>(tokens, layer.sliding_window);
            full_cache += static_cast<uint64_t>(tokens) * static_cast<uint64_t>(layer.kv_heads) *
                          static_cast<uint64_t>(layer.key_dim + layer.value_dim) * static_cast<uint64_t>(format_bits(p.store_dtype)) / 8;
            for (int32_t h = 0; h < layer.kv_heads; ++h) {
                const Lane &lane = seq->lane(layer.lane + h);
                used_tables += lane.tiles * entry_table_bytes(p) + lane_table_bytes(p, layer, static_cast<int32_t>(lane.epochs));
                if (seq->zoom) {
                    LaneQuota q = cache->quotas[i];
                    q.host_windows = static_cast<int32_t>(seq->zoom->lane(layer.lane + h).windows);
                    used_tables += zoom_table_bytes(p, layer, q);
                }
                if (seq->tables.dormant.empty()) continue;
                for (uint32_t t = 0; t < lane.tiles; ++t) {
                    const uint32_t dormant = seq->tables.dormant[lane.offset + t];
                    if (dormant != no_place) info->used_dormant_bytes += cache->pool.slot_bytes(cache->pool.class_of(dormant));
                }
            }
        }
        used_tables += sequence_state_bytes + (p.zooms() ? zoom_state_bytes : 0);
        if (!seq->paper) return;
        used_tables += paper_state_bytes + seq->paper->zoomed.size();
        if (!seq->is_memory()) return;
        // Forks share a memory: it counts where it is met first.
        const PromptMemory &memory = *seq->paper->memory;
        bool first = true;
        cache->sequences.for_each([&](uint64_t id, Sequence *other) {
            if (other->is_memory() && other->paper->memory == &memory && id < seq->id) first = false;
        });
        if (!first) return;
        info->used_full_bytes += memory.exact_bytes;
        info->used_summary_bytes += memory.device.size() - memory.exact_bytes;
        used_tables += memory_table_bytes(cache, memory);
        used_host += memory.host.size() * sizeof(float);
    });
    info->used_quantised_bytes -= std::min(info->used_quantised_bytes, info->used_dormant_bytes);
    info->used_bytes = info->used_full_bytes + info->used_quantised_bytes + info->used_dormant_bytes + info->used_zoom_bytes +
                       info->used_summary_bytes + used_tables;
    info->host_bytes = a.live_bytes(Owner::host);
    info->used_host_bytes = used_host;
    info->used_exact_bytes = cache->exact_pool.used_bytes();
    info->full_cache_bytes = full_cache;
}

Status cache_check(skerry_cache *cache, skerry_error *error) {
    const auto broken = [&](int32_t index, int64_t found, int64_t allowed, const char *what) {
        return fail(error, SKERRY_ERROR_INTERNAL, SKERRY_SUBJECT_NONE, index, found, allowed, "broken invariant: %s (%lld, expected %lld)",
                    what, static_cast<long long>(found), static_cast<long long>(allowed));
    };
    if (!cache->pool.consistent() || !cache->exact_pool.consistent() || !cache->host.consistent())
        return broken(-1, 0, 0, "the pool's counts and maps");
    const PolicyConfig &p = cache->policy();
    uint64_t references = 0;
    Status status = SKERRY_OK;
    cache->sequences.for_each([&](uint64_t, Sequence *seq) {
        if (status != SKERRY_OK) return;
        if (seq->is_memory() && !memory_consistent(cache, *seq->paper->memory))
            status = broken(-1, static_cast<int64_t>(seq->id), 0, "a prompt's memory");
        for (size_t i = 0; i < cache->layers.size() && status == SKERRY_OK; ++i) {
            const LayerGeometry &layer = cache->layers[i];
            if (layer.source != static_cast<int32_t>(i)) continue;
            for (int32_t h = 0; h < layer.kv_heads && status == SKERRY_OK; ++h) {
                const Lane &lane = seq->lane(layer.lane + h);
                const skerry_tile *tiles = seq->tiles(lane);
                if (lane.tiles > lane.capacity || lane.reserved > lane.capacity) {
                    status = broken(static_cast<int32_t>(i), lane.tiles, lane.capacity, "tiles within the list's capacity");
                    break;
                }
                int64_t position = -1;
                uint32_t open = 0;
                for (uint32_t t = 0; t < lane.tiles;) {
                    const WindowSpan span = window_at(p, tiles, t, lane.tiles);
                    for (uint32_t k = span.begin; k < span.end; ++k) {
                        if (tiles[k].first < position)
                            status = broken(static_cast<int32_t>(i), tiles[k].first, position, "tiles in position order");
                        position = tiles[k].first + tiles[k].count;
                        if (tiles[k].count == 0 || tiles[k].count > tiles[k].capacity) {
                            status = broken(static_cast<int32_t>(i), tiles[k].count, tiles[k].capacity, "tokens of a tile");
                        }
                        if (is_r_format(tiles[k].key_format) && tiles[k].epoch >= lane.epochs) {
                            status = broken(static_cast<int32_t>(i), tiles[k].epoch, lane.epochs, "a record names a live epoch");
                        }
                        if (cache->pool.references(tiles[k].place) == 0)
                            status = broken(static_cast<int32_t>(i), tiles[k].first, 0, "a tile's slot is in use");
                    }
                    ++references;
                    if (span.window >= 0 && is_full_format(tiles[t].key_format) && !is_alone(tiles[t])) ++open;
                    if (!seq->tables.dormant.empty() && seq->tables.dormant[lane.offset + t] != no_place) {
                        ++references;
                        if (cache->pool.references(seq->tables.dormant[lane.offset + t]) == 0) {
                            status = broken(static_cast<int32_t>(i), tiles[t].first, 0, "a dormant record's slot is in use");
                        }
                    }
                    t = span.end;
                }
                if (status == SKERRY_OK && seq->zoom) {
                    const ZoomTables &tables = *seq->zoom;
                    const LaneZoom &zoom = tables.lane(layer.lane + h);
                    if (zoom.windows > zoom.capacity)
                        status = broken(static_cast<int32_t>(i), zoom.windows, zoom.capacity, "windows with detail within their table");
                    uint64_t units = 0;
                    for (uint32_t w = 0; w < zoom.windows; ++w) {
                        const HostEntry &entry = tables.entries(zoom)[w];
                        if (entry.place != no_place) units += detail_bytes(p, layer, entry) / place_bytes;
                        if (entry.place != no_place && cache->host.references(entry.place) == 0)
                            status = broken(static_cast<int32_t>(i), w, 0, "a window's detail is in use");
                        if (entry.place != no_place && is_r_format(entry.key_format) && entry.epoch >= lane.epochs)
                            status = broken(static_cast<int32_t>(i), entry.epoch, lane.epochs, "detail names a live epoch");
                        for (const skerry_side side : {SKERRY_SIDE_KEY, SKERRY_SIDE_VALUE}) {
                            if (entry.place == no_place || entry.basis[side] == 0) continue;
                            const HostEntry *owner = entry.basis[side] <= w ? &entry - entry.basis[side] : nullptr;
                            const auto rank = [&](const HostEntry &e) {
                                return side == SKERRY_SIDE_KEY ? tile_key_rank(e.epoch) : tile_value_rank(e.epoch);
                            };
                            if (owner == nullptr || owner->place == no_place || owner->key_format != entry.key_format ||
                                owner->basis[side] != 0 || rank(*owner) != rank(entry))
                                status = broken(static_cast<int32_t>(i), w, entry.basis[side], "the entry that a shared basis belongs to");
                        }
                        if (entry.slot == no_slot) continue;
                        const bool named = entry.slot < cache->zoom_slots.size() && cache->zoom_slots[entry.slot].seq == seq &&
                                           cache->zoom_slots[entry.slot].lane == layer.lane + h &&
                                           cache->zoom_slots[entry.slot].window == static_cast<int32_t>(w);
                        if (!named) status = broken(static_cast<int32_t>(i), entry.slot, w, "a fetched window's slot holds it");
                    }
                    if (units != zoom.host_units)
                        status = broken(static_cast<int32_t>(i), zoom.host_units, static_cast<int64_t>(units), "a lane's part of the host");
                }
                if (status == SKERRY_OK && position > seq->length && !cache->step.open) {
                    status = broken(static_cast<int32_t>(i), position, seq->length, "the list ends at the sequence's length or before");
                }
                if (status == SKERRY_OK && open != lane.open_windows && !cache->step.open) {
                    status = broken(static_cast<int32_t>(i), lane.open_windows, open, "count of full-precision windows");
                }
            }
        }
    });
    if (status != SKERRY_OK) return status;
    for (size_t k = 0; k < cache->zoom_slots.size(); ++k) {
        const ZoomSlot &slot = cache->zoom_slots[k];
        ++references;
        if (slot.seq == nullptr) continue;
        const LaneZoom &zoom = slot.seq->zoom->lane(slot.lane);
        if (slot.window >= static_cast<int32_t>(zoom.windows) || slot.seq->zoom->entries(zoom)[slot.window].slot != k)
            return broken(slot.lane, slot.window, static_cast<int64_t>(k), "a slot's window names it");
    }
    if (!cache->step.open) {
        uint64_t counted = 0;
        for (int32_t k = 0; k < cache->pool.class_count(); ++k) {
            for (uint64_t i = 0; i < cache->pool.slots(k); ++i) {
                counted += cache->pool.references(cache->pool.place_of(k, i));
                if (cache->pool.slots(k) > 4096) break; // place_of walks chunks: large pools are covered by consistent()
            }
            if (cache->pool.slots(k) > 4096) return SKERRY_OK;
        }
        if (counted != references)
            return broken(-1, static_cast<int64_t>(counted), static_cast<int64_t>(references), "references to slots");
    }
    return SKERRY_OK;
}

} // namespace skerry
