// Windows: memory of each rank of an expert-parallel group that all of them can write to, over NVLink.
//
// A push stores tokens or sums into the windows of others, and ends on each rank when the pushes of all have arrived
// there: what runs after it reads its own window. Every rank makes every push, in the same order. Pushes of tokens and
// of sums take turns, and a rank reads what one has brought before it ends the next. So nothing is acknowledged: a rank
// begins a push of tokens when the push of sums before it has ended, to which all ranks have contributed after reading
// the tokens before; and the other way round.
#pragma once
#include "device/common.cuh"
#include "device/system.cuh"

// What a rank's count of blocks grows by with each push. No grid has as many blocks.
constexpr u32 kPush = 1 << 16;

struct Window {  // at the start of each rank's window; written by the host, but for what kernels count
    u8* windows[MAX_RANKS];
    // Where the parts of each window begin, in bytes; N ranks have `rows` tokens each in a step, rows by rank and
    // token:
    i64 tokens;    // e4m3 or bfloat16 [N * rows, H]
    i64 scales;    // float32 [N * rows, H / 128], with e4m3
    i64 ids;       // int32 [N * rows, topk], -1 for none
    i64 weights;   // float32 [N * rows, topk]
    i64 sums;      // bfloat16 [N * rows, H], each rank's share of the results of this rank's tokens; or
                   // [rows, topk, H], where GEMM 2 pushes the rows of their experts
    i64 patience;  // clock cycles that a push waits for another rank
    int* lost;     // in memory of the host: 1 + the rank that it has waited for in vain
    int rank, ranks;
    int few_blocks;   // up to these, each block counts itself on all ranks
    u32 pushes;       // kPush for each that has ended on this rank
    int blocks_done;  // of the push that runs, if it has many
    // kPush for each push of a rank; that rank adds to it. Each has a cache line of its own, so that blocks of one rank
    // do not queue behind those of another.
    static constexpr int kLine = 32;
    alignas(4 * kLine) u32 arrived[MAX_RANKS][kLine];

    template <class T>
    DEVICE T* in_window(int of, i64 part) const {
        return reinterpret_cast<T*>(windows[of] + part);
    }
    // The ranks one after the other, beginning with the next one, so that not all store to the same at once.
    DEVICE int peer(int i) const { return rank + 1 + i < ranks ? rank + 1 + i : rank + 1 + i - ranks; }
};

// Records the rank that this one has waited for, and ends all work on the GPU with an error.
DEVICE void give_up(const Window& window, int lost) {
    *const_cast<volatile int*>(window.lost) = 1 + lost;
    fence_system();
    __trap();
}

// Ends a push, by all threads of all blocks. Each block counts itself on every rank, the last one with what is missing
// to kPush: so no rank needs to know the grids of others, which may differ from push to push. Many blocks would queue
// there: they count here, and the last to do so counts for all of them.
//
// The last block waits until the pushes of all ranks have arrived here. All others have started before it and end
// without waiting, so they need no room that it takes.
DEVICE void finish_push(Window* window) {
    bool last = blockIdx.x == gridDim.x - 1;
    u32 counted = last ? kPush - (gridDim.x - 1) : 1;
    const int rank = threadIdx.x;
    const bool many = int(gridDim.x) > window->few_blocks;
    u32* count = nullptr;
    u32 push = 0;
    i64 patience = 0;
    if (rank < window->ranks) {  // loaded here, as loads behind a fence or an acquire begin late
        count = window->in_window<Window>(rank, 0)->arrived[window->rank];
        push = window->pushes + kPush;
        patience = window->patience;
    }
    __syncthreads();
    if (many) {
        __shared__ int before[1];
        if (threadIdx.x == 0) before[0] = count_in_system(&window->blocks_done);
        __syncthreads();
        last = before[0] == int(gridDim.x) - 1;
        if (!last) return;
        counted = kPush;
    }
    if (!count) return;
    add_release_system(count, counted);
    if (!last) return;
    const i64 begin = clock64();
    while (int(load_acquire_system(window->arrived[rank]) - push) < 0)
        if (clock64() - begin > patience) give_up(*window, rank);
    if (rank != 0) return;
    window->pushes = push;
    window->blocks_done = 0;
}
