// A ring of stages in shared memory, filled by producers and consumed by math warps. A stage is a K block: 128 along K.
#pragma once
#include "device/ptx.cuh"

template <int kStages>
struct Ring {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
    template <int kSteps>  // at most kStages
    DEVICE void advance_by() {
        stage += kSteps;
        if (stage >= kStages) {
            stage -= kStages;
            phase ^= 1;
        }
    }
    DEVICE void go_back(int steps) {  // at most kStages
        stage -= steps;
        if (stage < 0) {
            stage += kStages;
            phase ^= 1;
        }
    }
};

// Called by each math warp after it has consumed a stage. What it read of it with loads should have arrived, by loads
// before the wait for the tensor cores or by a proxy fence: the arrival does not wait for them, and producers may
// overwrite what they read.
template <class SharedMemory>
DEVICE void release(SharedMemory shared, int stage) {
    __syncwarp();
    if (lane_of_warp() == 0) barrier_arrive(shared.empty(stage));
}

// Called by all threads of the block. A phase of `full` takes `full_arrivals` of the producers, one of `empty` an
// arrival of each math warp.
template <class SharedMemory>
DEVICE void init_barriers(SharedMemory shared, int stages, int full_arrivals, int math_warps) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(shared.full(s), full_arrivals);
            barrier_init(shared.empty(s), math_warps);
        }
        barrier_init_fence();
    }
    __syncthreads();
}
