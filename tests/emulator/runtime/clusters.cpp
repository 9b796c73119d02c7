// Clusters: CTAs that meet at a barrier and write to one another's shared memory.
#include "state.h"

namespace emu {
constexpr int kRankShift = 24;
static_assert(kSharedEnd < 1u << kRankShift);

u32 in_cluster(u32 address, u32 rank) {
    const auto& ctas = self()->cta->cluster->ctas;
    if (rank >= ctas.size()) fail("no CTA %u in a cluster of %zu", rank, ctas.size());
    return address | (rank + 1) << kRankShift;
}
static Cta& cta_of(u32& address) {
    u32 rank = (address >> kRankShift) - 1;
    if (rank >= self()->cta->cluster->ctas.size()) fail("%08x is no address in a cluster", address);
    address &= (1u << kRankShift) - 1;
    Cta& cta = *self()->cta->cluster->ctas[rank];
    if (cta.ended) fail("CTA %d has ended, whose shared memory is accessed", cta.index);
    return cta;
}

// Launched without clusters, as a GPU does it: nothing, and then __syncthreads.
void cluster_arrive() {
    step();
    Fiber& fiber = *self();
    Cluster& cluster = *fiber.cta->cluster;
    if (cluster.ctas.size() == 1) return;
    if (fiber.cluster_phase >= 0) fail("a thread arrives twice at the barrier of its cluster");
    fiber.cluster_phase = cluster.phase;
    if (++cluster.arrived < int(cluster.ctas.size()) * fiber.cta->kernel->threads) return;
    cluster.arrived = 0;
    ++cluster.phase;
    for (Cta* cta : cluster.ctas) wake_all(*cta, Wait::kCluster);
}
void cluster_wait() {
    step();
    Fiber& fiber = *self();
    if (fiber.cta->cluster->ctas.size() == 1) return sync_threads();
    if (fiber.cluster_phase < 0) fail("a thread waits for its cluster where it has not arrived");
    while (fiber.cta->cluster->phase == fiber.cluster_phase) block(Wait::kCluster);
    fiber.cluster_phase = -1;
}

// Some time after the instruction, as on a GPU.
void mbarrier_arrive_in_cluster(u32 barrier) {
    step();
    Cta& cta = cta_of(barrier);
    read_mbarrier(cta, barrier);
    ++cta.copies;
    later([=, &cta] {
        --cta.copies;
        update_mbarrier(cta, barrier, 1, 0);
        return true;
    });
}

void store_async(u32 to, const void* values, u32 bytes, u32 barrier) {
    step();
    Cta& cta = cta_of(to);
    if (&cta != &cta_of(barrier)) fail("st.async: its barrier is in another CTA");
    if (to % bytes) fail("st.async of %u bytes to %u: not aligned", bytes, to);
    shared_of(cta, to, bytes);
    read_mbarrier(cta, barrier);
    ++cta.copies;
    std::vector<u8> copy(static_cast<const u8*>(values), static_cast<const u8*>(values) + bytes);
    later([=, &cta] {
        memcpy(cta.shared + to, copy.data(), bytes);
        --cta.copies;
        update_mbarrier(cta, barrier, 0, -int(bytes));
        return true;
    });
}
}  // namespace emu
