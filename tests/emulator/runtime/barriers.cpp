// Where threads meet: collectives of a warp, mbarriers, named barriers.
#include "state.h"

namespace emu {
// ---- warps ----

static Rendezvous& meeting_of(Warp& warp, u32 mask) {
    for (Rendezvous& meeting : warp.meetings)
        if (meeting.mask == mask) return meeting;
    warp.meetings.push_back({mask, 0, 0, kSyncWarp, {}});
    return warp.meetings.back();
}

const u64* collect(Collective kind, u32 mask, u64 value) {
    step();
    Fiber& fiber = *self();
    if (!(mask >> fiber.lane & 1)) fail("lane %u is not in the mask %08x of its collective", fiber.lane, mask);
    Rendezvous& meeting = meeting_of(*fiber.warp, mask);
    if (meeting.arrived && meeting.kind != kind) fail("lanes of a warp meet at different collectives");
    meeting.kind = kind;
    u64* values = meeting.values[meeting.turn % 2];  // the next collective may begin before all have read these
    values[fiber.lane] = value;
    meeting.arrived |= 1u << fiber.lane;
    if (meeting.arrived != mask) {
        block(Wait::kCollective, mask);
        return values;
    }
    meeting.arrived = 0;
    ++meeting.turn;
    for (Fiber* other : fiber.warp->fibers) wake(*other, Wait::kCollective, mask);
    return values;
}

// ---- mbarriers: 16 bits of arrivals expected, 16 pending, 24 of bytes, 1 of phase, 7 that tell it from others ----

constexpr u64 kIsMbarrier = 0x2d;

bool decode_mbarrier(u64 word, Mbarrier& barrier) {
    barrier = {int(word & 0xffff), int(word >> 16 & 0xffff), int(int64_t(word << 8) >> 40), int(word >> 56 & 1)};
    return word >> 57 == kIsMbarrier;
}
Mbarrier read_mbarrier(Cta& cta, u32 address) {
    u64 word;
    memcpy(&word, shared_of(cta, address, 8), 8);
    Mbarrier barrier;
    if (address % 8 || !decode_mbarrier(word, barrier)) fail("no mbarrier is at %u, but %016llx", address, word);
    return barrier;
}
static void write_mbarrier(Cta& cta, u32 address, const Mbarrier& b) {
    u64 word = u64(b.expected) | u64(b.pending) << 16 | (u64(b.bytes) & 0xffffff) << 32 | u64(b.phase) << 56 |
               kIsMbarrier << 57;
    memcpy(shared_of(cta, address, 8), &word, 8);
}

void update_mbarrier(Cta& cta, u32 address, int arrivals, int bytes) {
    Mbarrier b = read_mbarrier(cta, address);
    if (arrivals > b.pending) fail("mbarrier at %u: more arrivals in a phase than its %d", address, b.expected);
    b.pending -= arrivals;
    b.bytes += bytes;
    constexpr int kMostBytes = (1 << 20) - 1;
    if (b.bytes > kMostBytes || b.bytes < -kMostBytes) fail("mbarrier at %u: %d bytes are pending", address, b.bytes);
    bool ends = b.pending == 0 && b.bytes == 0;
    if (ends) b.pending = b.expected, b.phase ^= 1;
    write_mbarrier(cta, address, b);
    if (ends) wake_all(cta, Wait::kMbarrier, address);
}

void mbarrier_init(u32 barrier, u32 count) {
    step();
    write_mbarrier(*self()->cta, barrier, {int(count), int(count), 0, 0});
}
void mbarrier_arrive(u32 barrier, u32 expected_bytes) {
    step();
    update_mbarrier(*self()->cta, barrier, 1, int(expected_bytes));
}
bool mbarrier_test_wait(u32 barrier, u32 parity) {
    step();
    give_way();
    return read_mbarrier(*self()->cta, barrier).phase != int(parity & 1);
}
bool mbarrier_try_wait(u32 barrier, u32 parity) {
    step();
    give_way();
    auto completed = [&] { return read_mbarrier(*self()->cta, barrier).phase != int(parity & 1); };
    if (completed()) return true;
    if (run.random.chance(0.1)) return false;  // a GPU waits for a limited time
    block(Wait::kMbarrier, barrier);
    if (!completed()) fail("a lane fell a phase behind: two phases of the mbarrier at %u have completed", barrier);
    return true;
}

// ---- named barriers ----

// Returns whether all threads have come.
static bool arrive(int id, int threads) {
    step();
    if (id < 0 || id > 15 || threads % 32) fail("named barrier %d of %d threads", id, threads);
    Cta& cta = *self()->cta;
    Cta::NamedBarrier& barrier = cta.named[id];
    if (barrier.arrived && barrier.expected != threads)
        fail("named barrier %d has %d threads and %d", id, barrier.expected, threads);
    barrier.expected = threads;
    if (++barrier.arrived < threads) return false;
    barrier.arrived = 0;
    if (threads == int(cta.fibers.size())) publish_peer_stores(cta);
    wake_all(cta, Wait::kNamedBarrier, id);
    return true;
}
void named_barrier(int id, int threads) {
    if (!arrive(id, threads)) block(Wait::kNamedBarrier, id);
}
void named_barrier_arrive(int id, int threads) { arrive(id, threads); }
void sync_threads() { named_barrier(0, int(self()->cta->fibers.size())); }
}  // namespace emu
