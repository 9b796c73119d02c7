// Cuts the rows of groups into tiles, given where each group ends; it begins where the one before ends, rounded up.
// One thread block.
//
// In:   ends       int32 [groups], not descending; clamped to [0, rows]
// Out:  table, num_tiles, done_counters  see tile_table.cuh; one counter per tile
#include "device/common.cuh"
#include "pipeline/tile_table.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    tiles_of_ends(const int* ends, int4* __restrict__ table, int* __restrict__ num_tiles,
                  int* __restrict__ done_counters, int groups, int rows, int alignment, int block_m) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int tiles = 0;
    for (int tailed = block_m == kManyRowsTile; tailed >= 0; --tailed) {
        for (int window = 0; window < groups; window += THREADS) {
            const int group = window + threadIdx.x;
            const int before = group > 0 && group < groups ? max(0, min(ends[group - 1], rows)) : 0;
            const int begin = ceil_div(before, alignment) * alignment;
            const int end = group < groups ? max(begin, min(ends[group], rows)) : begin;
            const bool now = (RowTiles(end - begin, block_m).over > 0) == tailed;
            tiles = append_tiles<THREADS>(table, tiles, group, begin, now ? end : begin, block_m);
        }
    }
    for (int i = threadIdx.x; i <= tiles; i += THREADS) done_counters[i] = 0;
    if (threadIdx.x == 0) write_num_tiles(num_tiles, tiles);
}
