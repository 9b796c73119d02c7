// Cuts the rows of each expert into tiles, given how many rows it has. One CTA.
//
// In:   counts     int32 [groups]
// Out:  table      int4 [capacity], see tile_table.cuh; only the first *num_tiles entries are written
//       num_tiles  int32 [5], see tile_table.cuh
//       ready      int32 [1 + capacity], zero up to the last tile
//
// Where tiles have tails, experts with a tail come first; else they are in order.
// MASKED: 1 starts expert g at row g * max_m and clamps its count to [0, max_m]; 0 lets the experts follow one another.
#include "common.cuh"
#include "tile_table.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void tiles_of_counts(const int* counts,
                                                                       int4* __restrict__ table,
                                                                       int* __restrict__ num_tiles,
                                                                       int* __restrict__ ready, int groups,
                                                                       int max_m, int block_m) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const bool tails = block_m == RowTiles::kBlockMOfTails;
    int tiles = 0;
    for (int tailed = tails; tailed >= 0; --tailed) {  // the longer tiles first, so that blocks finish closer together
        [[maybe_unused]] int rows = 0;
        for (int window = 0; window < groups; window += THREADS) {
            const int group = window + threadIdx.x;
            int count = group < groups ? counts[group] : 0;
#if MASKED
            count = max(0, min(count, max_m));
            const int row_begin = group * max_m;
#else
            int window_rows;
            const int row_begin = rows + exclusive_scan<THREADS>(count, window_rows);
            rows += window_rows;
#endif
            const bool now = !tails || (RowTiles(count, block_m).over > 0) == tailed;
            tiles = append_tiles<THREADS>(table, tiles, group, row_begin, row_begin + (now ? count : 0), block_m);
        }
    }
    for (int i = threadIdx.x; i <= tiles; i += THREADS) ready[i] = 0;
    finish_table(num_tiles, tiles);
}
