// Cuts the rows of slabs into tiles, given the number of rows of each. One thread block.
//
// In:   counts     int32 [groups]; group g starts at row g * max_m, and its count is clamped to [0, max_m]
// Out:  table, num_tiles, done_counters  see tile_table.cuh; one counter per tile
#include "device/common.cuh"
#include "pipeline/tile_table.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    tiles_of_counts(const int* counts, int4* __restrict__ table, int* __restrict__ num_tiles,
                    int* __restrict__ done_counters, int groups, int max_m, int block_m) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int tiles = 0;
    for (int tailed = block_m == kManyRowsTile; tailed >= 0; --tailed) {
        for (int window = 0; window < groups; window += THREADS) {
            const int group = window + threadIdx.x;
            const int rows = group < groups ? max(0, min(counts[group], max_m)) : 0;
            const bool now = (RowTiles(rows, block_m).over > 0) == tailed;
            const int begin = rows > 0 ? group * max_m : 0;
            tiles = append_tiles<THREADS>(table, tiles, group, begin, begin + (now ? rows : 0), block_m);
        }
    }
    for (int i = threadIdx.x; i <= tiles; i += THREADS) done_counters[i] = 0;
    if (threadIdx.x == 0) write_num_tiles(num_tiles, tiles);
}
