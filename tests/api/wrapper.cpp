// skerry.hpp: objects release what they hold, in any order of destruction.

#include "router_bytes.hpp"
#include "support.hpp"

#include <skerry/skerry.hpp>

static_assert(!std::is_copy_constructible_v<skerry::Context> && std::is_nothrow_move_constructible_v<skerry::Context>);
static_assert(!std::is_copy_constructible_v<skerry::Router> && std::is_nothrow_move_assignable_v<skerry::Router>);
static_assert(!std::is_copy_assignable_v<skerry::Cache> && std::is_nothrow_move_assignable_v<skerry::Cache>);
static_assert(!std::is_copy_constructible_v<skerry::Sequence> && std::is_nothrow_move_constructible_v<skerry::Sequence>);
static_assert(!std::is_copy_constructible_v<skerry::Step> && std::is_nothrow_move_constructible_v<skerry::Step>);

namespace {

struct World {
    support::Allocator host;
    support::Setup setup = support::small_setup(SKERRY_POLICY_QEVICT, support::layers_of(1, 1, 2, 8, 8));
    skerry::Context context;
    skerry::Cache cache;

    World() {
        setup.cache.max_sequences = 4;
        skerry_context_desc desc = skerry::make<skerry_context_desc>();
        desc.allocator = host.hooks();
        context.create(&desc);
        cache.create(context, *setup.desc());
    }
};

void append(skerry::Step &step, const skerry::Cache &cache, const skerry::Sequence &seq, int32_t count) {
    const skerry_seq id = seq.id();
    skerry_step_desc desc = skerry::make<skerry_step_desc>();
    desc.seqs = &id;
    desc.token_counts = &count;
    desc.seq_count = 1;
    step.begin(cache, desc);
    const std::vector<float> numbers(static_cast<size_t>(count) * 8, 0.5f);
    const skerry_tensor rows = skerry::tensor(numbers.data(), SKERRY_DTYPE_F32, count, 1, 8);
    step.append(0, rows, rows);
}

int64_t length_of(const skerry::Sequence &seq) {
    skerry_seq_info info;
    seq.info(info);
    return info.length_tokens;
}

} // namespace

TEST_CASE("skerry.hpp: handles are released whatever the order") {
    support::Allocator *host = nullptr;
    auto world = std::make_unique<World>();
    host = &world->host;
    {
        skerry::Sequence seq, child;
        skerry::Step step;
        seq.create(world->cache);
        append(step, world->cache, seq, 5);
        step.commit();
        CHECK(!step);
        CHECK(length_of(seq) == 5);
        seq.fork(child);
        append(step, world->cache, child, 3);
        step.commit();
        CHECK(length_of(child) == 8);
        CHECK(length_of(seq) == 5);
        CHECK(child.can_truncate(6) == SKERRY_OK);
        child.truncate(6);
        CHECK(length_of(child) == 6);
        child.fork(child, 2); // onto itself: the old sequence goes
        CHECK(length_of(child) == 2);

        skerry::Sequence moved(std::move(child));
        CHECK(!child);
        CHECK(moved);
        seq = std::move(moved);
        CHECK(length_of(seq) == 2);
        append(step, world->cache, seq, 4);
        skerry::Step other(std::move(step));
        CHECK(!step);
        other.abort();
        CHECK(length_of(seq) == 2);

        // The step and the sequence outlive the names of their cache and context.
        append(step, world->cache, seq, 1);
        const skerry::Cache kept = world->cache.share();
        CHECK(kept.get() == world->cache.get());
        world->cache = skerry::Cache();
        world->context = skerry::Context();
        step.commit();
        CHECK(length_of(seq) == 3);
        skerry_memory_info memory;
        kept.memory(memory);
        CHECK(memory.used_bytes > 0);
        skerry_plan_info plan;
        kept.plan(plan);
        CHECK(plan.kind == SKERRY_POLICY_QEVICT);
        skerry_counters counters;
        kept.counters(counters);
        CHECK(counters.steps_committed == 3);
        append(step, kept, seq, 1); // left open: the destructor aborts it, then the sequence is dropped
        CHECK(host->live_count() > 0);
    }
    CHECK(host->live_count() == 0);
    CHECK(host->mismatches() == 0);
}

TEST_CASE("skerry.hpp: a router is shared by reference, with caches too") {
    support::Allocator host;
    {
        skerry_context_desc context_desc = skerry::make<skerry_context_desc>();
        context_desc.allocator = host.hooks();
        skerry::Context context;
        context.create(&context_desc);
        const support::RouterSize size;
        const std::vector<uint8_t> file =
            support::safetensors(support::production_tensors(size), support::router_settings(size, "production").text());
        skerry_router_desc desc = skerry::make<skerry_router_desc>();
        desc.data = file.data();
        desc.bytes = file.size();
        skerry::Router router;
        CHECK(!router);
        CHECK(!router.share());
        router.open(context, desc);
        skerry_router_info info;
        router.info(info);
        CHECK(info.layers == 2);
        skerry::Router second = router.share(), third(std::move(router));
        CHECK(!router);
        CHECK(second.get() == third.get());
        third = skerry::Router();
        second.info(info);
        CHECK(std::string(info.model) == "tiny");
        support::Setup setup = support::small_setup(SKERRY_POLICY_SEKV, support::layers_of(2, 2, 4, 8, 8));
        setup.sekv.router = second.get();
        setup.budget.bytes = 1 << 20;
        setup.budget.length_tokens = 100;
        skerry::Cache cache;
        cache.create(context, *setup.desc());
        second = skerry::Router();
        skerry_plan_info plan;
        cache.plan(plan);
        CHECK(plan.router_trained == 1);
        CHECK_THROWS_AS(second.open(context, "/there/is/no/such/router"), skerry::Error);
        CHECK(!second);
    }
    CHECK(host.live_count() == 0);
    CHECK(host.mismatches() == 0);
}

TEST_CASE("skerry.hpp: failures are thrown with their details, remarks are returned") {
    World world;
    skerry::Sequence seq;
    seq.create(world.cache);
    bool thrown = false;
    try {
        seq.truncate(9);
    } catch (const skerry::Error &error) {
        thrown = true;
        CHECK(error.status() == SKERRY_ERROR_ARGUMENT);
        CHECK(error.details().subject == SKERRY_SUBJECT_POSITION);
        CHECK(error.details().found == 9);
        CHECK(std::string(error.what()) == error.details().message);
    }
    CHECK(thrown);
    skerry::Step step;
    append(step, world.cache, seq, 40);
    step.commit();
    CHECK(seq.can_truncate(1) == SKERRY_MISS); // old windows are held in 8 bits, no longer exactly
    CHECK(seq.can_truncate(39) == SKERRY_OK);
    skerry_budget_desc budget = skerry::make<skerry_budget_desc>();
    budget.bytes = 1;
    CHECK_THROWS_AS(world.cache.set_budget(budget), skerry::Error);
    skerry::Cache none;
    CHECK_THROWS_AS(none.create(skerry::Context(), *world.setup.desc()), skerry::Error);
    CHECK(!none);
    // A commit that failed leaves the step open.
    skerry_step_desc desc = skerry::make<skerry_step_desc>();
    const skerry_seq id = seq.id();
    const int32_t one = 1;
    desc.seqs = &id;
    desc.token_counts = &one;
    desc.seq_count = 1;
    step.begin(world.cache, desc);
    CHECK_THROWS_AS(step.commit(), skerry::Error);
    CHECK(step);
}
