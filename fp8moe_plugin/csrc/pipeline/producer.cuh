// The producers' side of a ring: how they wait for a stage, fill it, and end.
//
// A wait by parity cannot distinguish a phase of a barrier from the second one after it. A thread that tests the
// barrier only after the next phase has completed, too, waits for a further phase, which may never complete. Lanes of a
// warp may leave a wait at different times: PTX guarantees convergence only where an instruction requires it. The next
// phase must therefore complete only after every thread that waits for this one has seen it complete.
// docs/architecture.md#inside-a-gemm-kernel lists the waiting threads of each barrier and why none falls behind.
#pragma once
#include "pipeline/ring.cuh"
#include "pipeline/tile.cuh"

// Called by all lanes of a warp before some of them do what the next phase needs: fill the stage, or send.
DEVICE void wait_by_warp(u32 barrier, u32 parity) {
    barrier_wait(barrier, parity);
    __syncwarp();
}

// For each i from `begin` to `end` waits for the next stage, and calls fill(i, stage, full); `full` is its barrier.
// kWait: barrier_wait for a single thread, or for warps in which every thread arrives at `full`; wait_by_warp for a
// warp in which only some lanes fill the stage. kUnroll: for short loops.
template <void (*kWait)(u32 barrier, u32 parity), int kUnroll = 1, class SharedMemory, int kStages, class Fill>
DEVICE void fill_stages(SharedMemory shared, Ring<kStages>& ring, int begin, int end, Fill fill) {
#pragma unroll kUnroll
    for (int i = begin; i < end; ++i, ring.advance()) {
        const u32 full = shared.full(ring.stage);
        kWait(shared.empty(ring.stage), ring.phase ^ 1);
        fill(i, ring.stage, full);
    }
}

// Called before they exit by threads that have called copy_async_arrive: PTX does not guarantee arrivals of exited
// threads.
DEVICE void finish_copies() { copy_async_wait(); }

// Fills the last stage, without a tile, which ends the loops of the math warpgroups. Called by a warp, whose first lane
// fills stages (kFillers 1) or all of whose lanes do, or by a warpgroup. Arrivals as in other stages: one per filling
// thread, one for the bytes.
template <int kFillers, class SharedMemory, int kStages>
DEVICE void end_tiles(SharedMemory shared, const Ring<kStages>& ring) {
    const int thread = threadIdx.x % (kFillers == 1 ? kWarp : kFillers);
    wait_by_warp(shared.empty(ring.stage), ring.phase ^ 1);
    if (thread >= kFillers) return;
    if (thread == 0) {
        publish_tile(shared.tile(ring.stage), Tile{});
        barrier_arrive(shared.full(ring.stage));
    }
    copy_async_arrive(shared.full(ring.stage));
    finish_copies();
}

// A producer warp of several that take turns with the stages: each fills every kWarps-th.
template <int kWarps, int kStages>
struct Turns {
    static_assert(kWarps <= kStages, "each has a stage to start with");
    Ring<kStages> ring;  // its next stage
    int step;            // of the tile, which that stage will hold

    DEVICE explicit Turns(int warp) : ring{warp}, step(warp) {}

    // Fills the warp's stages of a tile, as fill_stages does. prepare(i) is called for each of the tile's steps.
    template <void (*kWait)(u32 barrier, u32 parity), class SharedMemory, class Fill, class Prepare>
    DEVICE void fill_stages(SharedMemory shared, int steps, Fill fill, Prepare prepare) {
        int prepared = 0;
        auto prepare_until = [&](int end) {
            for (; prepared < end; ++prepared) prepare(prepared);
        };
#pragma unroll 1
        for (; step < steps; step += kWarps, ring.template advance_by<kWarps>()) {
            const u32 full = shared.full(ring.stage);
            kWait(shared.empty(ring.stage), ring.phase ^ 1);
            fill(step, ring.stage, full);
            prepare_until(min(step + kWarps, steps));
        }
        prepare_until(steps);
        step -= steps;
    }
    // After the last tile.
    template <int kFillers, class SharedMemory>
    DEVICE void end_tiles(SharedMemory shared) const {
        if (step == 0)
            ::end_tiles<kFillers>(shared, ring);
        else
            finish_copies();
    }
};

// The first of the producer warps owns the queue; it passes its tile to the others through 16 bytes of shared memory.
template <int kWarps = 4, class Queue>
DEVICE Tile share_tile(u32 address, int barrier, const Queue& queue, bool first_warp) {
    constexpr int kProducers = kWarps * kWarp;
    named_barrier(barrier, kProducers);  // all have read the previous tile
    if (first_warp) {
        const Tile tile = queue.tile();
        if (threadIdx.x % 32 == 0) publish_tile(address, tile);
    }
    named_barrier(barrier, kProducers);
    return published_tile(address);
}
