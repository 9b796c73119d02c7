// Split K: blocks share a tile, each with a part of K. Each stores its sums to global memory; the last one to arrive
// adds them up in the order of the splits, so that the result does not depend on which block that is.
#pragma once
#include "device/ptx.cuh"

constexpr int kMaxSplits = MAX_SPLITS;

// True in the last of `splits` blocks to call this for a counter, zero at first; what the others wrote before is then
// visible past L1. By `threads` threads, the first at a multiple of that, which meet at a barrier; `flag` is 4 bytes of
// shared memory for them alone.
DEVICE bool comes_last(u32 flag, int* arrived, int splits, int barrier, int threads) {
    __threadfence();
    named_barrier(barrier, threads);
    if (threadIdx.x % threads == 0) store_shared(flag, u32(atomicAdd(arrived, 1) == splits - 1));
    named_barrier(barrier, threads);
    bool last = load_shared(flag);
    if (last) __threadfence();
    return last;
}
