// Asynchronous copies: TMA with tensor maps, bulk copies, cp.async. Each completes some time after its instruction.
#include "state.h"
#include "tensor_map.h"

namespace emu {
constexpr u32 kChunk = 16;  // bytes that a swizzle keeps together

// The map at an address, of a box that begins there and is or comes to be at `shared`.
static TensorMap map_at(const void* address, const Coordinates& begin, u32 shared) {
    TensorMap map;
    memcpy(&map, address, sizeof map);
    if (map.kind != TensorMap::kKind) fail("no tensor map is at %p", address);
    if (map.dims != begin.dims) fail("TMA of %d dimensions by a map of %d", begin.dims, map.dims);
    if (shared % 128 || begin.at[0] * map.element_bytes % kChunk)
        fail("TMA of column %d, shared memory at %u: not aligned", begin.at[0], shared);
    shared_of(*self()->cta, shared, map.box_bytes());
    return map;
}

// Calls f(global address, shared address) for each chunk of a box; the global address of one outside is null.
template <class F>
static void each_chunk(const TensorMap& map, u32 shared, const Coordinates& begin, F f) {
    for (u32 at = 0; at < map.box_bytes(); at += kChunk) {
        u32 rest = at / map.element_bytes, to = shared + at;
        u8* from = map.base;
        bool inside = true;
        for (int d = 0; d < map.dims; rest /= map.box[d++]) {
            i64 index = begin.at[d] + i64(rest % map.box[d]);
            inside &= index >= 0 && index < map.sizes[d];
            from += index * map.strides[d];
        }
        f(inside ? from : nullptr, to ^ (to >> 7 & 7) << 4);
    }
}

static void clear_mark(Cta& cta, u32 address) { cta.unfenced[address / kChunk] = 0; }

static void load_box(Cta& cta, u32 to, const TensorMap& map, const Coordinates& begin, u32 barrier) {
    read_mbarrier(cta, barrier);
    ++cta.copies;
    later([=, &cta] {
        each_chunk(map, to, begin, [&](const u8* from, u32 address) {
            clear_mark(cta, address);
            if (!from) return (void)memset(cta.shared + address, 0, kChunk);
            check_memory(from, kChunk, "TMA load");
            memcpy(cta.shared + address, from, kChunk);
        });
        --cta.copies;
        update_mbarrier(cta, barrier, 0, -int(map.box_bytes()));
        return true;
    });
}

void tma_load(u32 to, const void* map_address, Coordinates begin, u32 barrier) {
    step();
    load_box(*self()->cta, to, map_at(map_address, begin, to), begin, barrier);
}
// To each CTA at a time of its own, as on a GPU.
void tma_load_to_cluster(u32 to, const void* map_address, Coordinates begin, u32 barrier, u32 ranks) {
    step();
    const auto& ctas = self()->cta->cluster->ctas;
    if (!ranks || ranks >> ctas.size()) fail("TMA to CTAs %x of a cluster of %zu", ranks, ctas.size());
    TensorMap map = map_at(map_address, begin, to);
    for (size_t rank = 0; rank < ctas.size(); ++rank) {
        if (!(ranks >> rank & 1)) continue;
        if (ctas[rank]->ended) fail("CTA %d has ended, to which TMA loads", ctas[rank]->index);
        load_box(*ctas[rank], to, map, begin, barrier);
    }
}

void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    step();
    Cta& cta = *self()->cta;
    if (to % 16 || bytes % 16 || uintptr_t(from) % 16) fail("bulk copy of %u bytes to %u: not aligned", bytes, to);
    shared_of(cta, to, bytes);
    check_memory(from, bytes, "bulk copy");
    read_mbarrier(cta, barrier);
    ++cta.copies;
    later([=, &cta] {
        memcpy(cta.shared + to, from, bytes);
        for (u32 at = 0; at < bytes; at += kChunk) clear_mark(cta, to + at);
        --cta.copies;
        update_mbarrier(cta, barrier, 0, -int(bytes));
        return true;
    });
}

// ---- stores: their chunks are read first, and written later ----

struct Store {
    Fiber& fiber;
    std::shared_ptr<StoreGroup> group;
    std::vector<std::pair<u8*, u32>> chunks;  // where each is written, null for nowhere, and read
    std::vector<u8> values;

    bool complete() {
        bool reads = values.empty();
        reads ? read() : write();
        wake(fiber, Wait::kBulkStores);
        return !reads;
    }
    void read() {
        Cta& cta = *fiber.cta;
        for (auto [to, from] : chunks) {
            check_fenced(cta, from, "a TMA store");
            values.insert(values.end(), cta.shared + from, cta.shared + from + kChunk);
        }
        --cta.copies;
        --group->reads;
    }
    void write() {
        const u8* chunk = values.data();
        for (auto [to, from] : chunks) {
            if (to) check_memory(to, kChunk, "TMA store"), memcpy(to, chunk, kChunk);
            chunk += kChunk;
        }
        --group->writes;
    }
};

void tma_store(const void* map_address, Coordinates begin, u32 from) {
    step();
    Fiber& fiber = *self();
    std::vector<std::pair<u8*, u32>> chunks;
    each_chunk(map_at(map_address, begin, from), from, begin, [&](u8* to, u32 at) { chunks.emplace_back(to, at); });
    ++fiber.cta->copies;
    ++fiber.open_group->reads;
    ++fiber.open_group->writes;
    later([store = Store{fiber, fiber.open_group, std::move(chunks), {}}]() mutable { return store.complete(); });
}
void bulk_store_to_peer(void* to, u32 from, u32 bytes) {
    step();
    Fiber& fiber = *self();
    if (from % 16 || bytes % 16 || uintptr_t(to) % 16) fail("bulk copy of %u bytes from %u: not aligned", bytes, from);
    shared_of(*fiber.cta, from, bytes);
    ++fiber.cta->copies;
    ++fiber.open_group->reads;
    later([=, &fiber, group = fiber.open_group] {
        Cta& cta = *fiber.cta;
        for (u32 at = 0; at < bytes; at += kChunk) check_fenced(cta, from + at, "a bulk copy");
        auto store = group->peer_stores.emplace_back(peer_store(to, cta.shared + from, bytes));
        const auto arrive = [store] { return store->complete(), true; };
        run.random.chance(0.5) ? hold_back(arrive) : later(arrive);
        --cta.copies;
        --group->reads;
        wake(fiber, Wait::kBulkStores);
        return true;
    });
}
void bulk_commit() {
    step();
    self()->groups.push_back(std::exchange(self()->open_group, std::make_shared<StoreGroup>()));
}
void bulk_wait(bool reads_only) {
    step();
    auto& groups = self()->groups;
    for (size_t i = 0; i < groups.size(); ++i) {
        while (groups[i]->reads || (!reads_only && groups[i]->writes)) block(Wait::kBulkStores);
        if (!reads_only) move_all(groups[i]->peer_stores, self()->peer_stores);
    }
    std::erase_if(groups, [](const auto& group) { return group->writes == 0 && group->peer_stores.empty(); });
}

// ---- cp.async ----

static CopyBatch& open_batch(Fiber& fiber) {
    if (fiber.batches.empty() || fiber.batches.back()->closed) fiber.batches.push_back(std::make_shared<CopyBatch>());
    return *fiber.batches.back();
}
static void arrive_for_finished(Fiber& fiber) {
    while (!fiber.batches.empty() && fiber.batches.front()->closed && fiber.batches.front()->copies == 0) {
        later([&cta = *fiber.cta, barrier = fiber.batches.front()->barrier] {
            --cta.copies;
            update_mbarrier(cta, barrier, 1, 0);
            return true;
        });
        fiber.batches.pop_front();
    }
}

void copy_async(u32 to, const void* from, u32 bytes) {
    step();
    Fiber& fiber = *self();
    if (to % bytes || uintptr_t(from) % bytes) fail("cp.async of %u bytes to %u: not aligned", bytes, to);
    shared_of(*fiber.cta, to, bytes);
    check_memory(from, bytes, "cp.async");
    ++open_batch(fiber).copies;
    ++fiber.copies;
    ++fiber.cta->copies;
    later([=, &fiber, batch = fiber.batches.back()] {
        memcpy(fiber.cta->shared + to, from, bytes);
        mark_unfenced(*fiber.cta, to, bytes, kCopies);
        --fiber.cta->copies;
        --batch->copies;
        arrive_for_finished(fiber);
        if (--fiber.copies == 0) wake(fiber, Wait::kCopies);
        return true;
    });
}
void copy_async_arrive(u32 barrier) {
    step();
    Fiber& fiber = *self();
    read_mbarrier(*fiber.cta, barrier);
    CopyBatch& batch = open_batch(fiber);
    batch.closed = true;
    batch.barrier = barrier;
    ++fiber.cta->copies;
    arrive_for_finished(fiber);
}
void copy_async_wait() {
    step();
    while (self()->copies) block(Wait::kCopies);
}
}  // namespace emu
