// How a producer warp waits for a stage of a ring.
//
// A wait by parity cannot tell a phase of a barrier from the one two later. A thread that looks only after the next
// phase has completed, too, waits for one more, which may never come. Lanes of a warp need not leave a wait together:
// PTX promises convergence only where an instruction asks for it. So the next phase may complete only after every
// thread that waits for this one has seen it complete. docs/architecture.md#inside-a-gemm-kernel lists who
// waits for which barrier, and why none falls behind.
#pragma once
#include "device/ptx.cuh"

// By all lanes of a warp, before some of them do what the next phase waits for: fill the stage, or send.
DEVICE void wait_by_warp(u32 barrier, u32 parity) {
    barrier_wait(barrier, parity);
    __syncwarp();
}
