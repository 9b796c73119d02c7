// Cuts the rows of slabs into tiles, given how many rows of each count. One CTA.
//
// In:   counts     int32 [groups]; group g starts at row g * max_m, and its count is clamped to [0, max_m]
// Out:  table, num_tiles, ready  see write_table in tile_table.cuh
#include "common.cuh"
#include "tile_table.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void tiles_of_counts(const int* counts,
                                                                       int4* __restrict__ table,
                                                                       int* __restrict__ num_tiles,
                                                                       int* __restrict__ ready, int groups,
                                                                       int max_m, int block_m) {
    write_table<THREADS>(table, num_tiles, ready, 1, groups, block_m, [&](int group) {
        return make_int2(group * max_m, group * max_m + max(0, min(counts[group], max_m)));
    });
}
