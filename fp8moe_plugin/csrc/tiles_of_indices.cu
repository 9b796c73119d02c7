// Cuts each run of equal expert ids into tiles: the first thread block. The others zero the rows that get no tile.
//
// In:   ids        int32 [rows], the expert of each row; a run with an id outside [0, num_groups) gets no tile
// Out:  table, num_tiles  see tile_table.cuh
//       d          bfloat16 [rows, 8 * chunks], the result of the GEMM
// Scratch: run_begins int32 [rows], the first row of each run
#include "device/common.cuh"
#include "pipeline/tile_table.cuh"

constexpr int kWarps = THREADS / kWarp;

// One warp per row.
DEVICE void zero_rows(const int* ids, uint4* d, int rows, int num_groups, int chunks) {
    const int warps = (gridDim.x - 1) * kWarps;
    for (int row = (blockIdx.x - 1) * kWarps + threadIdx.x / kWarp; row < rows; row += warps) {
        if (ids[row] >= 0 && ids[row] < num_groups) continue;
        for (int i = lane_of_warp(); i < chunks; i += kWarp) d[i64(row) * chunks + i] = make_uint4(0, 0, 0, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tiles_of_indices(const int* __restrict__ ids, int* run_begins, int4* __restrict__ table,
                     int* __restrict__ num_tiles, uint4* __restrict__ d, int rows, int num_groups, int block_m,
                     int chunks) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (blockIdx.x > 0) return zero_rows(ids, d, rows, num_groups, chunks);
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp();
    const int rows_per_warp = ceil_div(ceil_div(rows, kWarps), kWarp) * kWarp;
    const int begin = min(warp * rows_per_warp, rows);
    const int end = min(begin + rows_per_warp, rows);
    const auto begins_run = [&](int row) { return row == 0 || ids[row] != ids[row - 1]; };

    // Count the runs that begin in the warp's part of the rows.
    int begun = 0;
#pragma unroll 4
    for (int row = begin + lane; row < end; row += kWarp) begun += begins_run(row);
    int before[1], all[1];
    exclusive_scan({begun}, kWarps, before, all);
    const int runs = all[0];

    // List them.
    int run = __shfl_sync(kAllLanes, before[0], 0);
#pragma unroll 4
    for (int base = begin; base < end; base += kWarp) {
        const int row = base + lane;
        const bool begins = row < end && begins_run(row);
        const u32 lanes = __ballot_sync(kAllLanes, begins);
        if (begins) run_begins[run + __popc(lanes & ((1u << lane) - 1))] = row;
        run += __popc(lanes);
    }
    __syncthreads();

    // Cut them, one thread per run.
    int tiles = 0;
    for (int window = 0; window < runs; window += THREADS) {
        const int mine = window + threadIdx.x;
        int expert = 0, row_begin = 0, row_end = 0;
        if (mine < runs) {
            row_begin = run_begins[mine];
            expert = ids[row_begin];
            const bool here = expert >= 0 && expert < num_groups;
            row_end = !here ? row_begin : mine + 1 < runs ? run_begins[mine + 1] : rows;
        }
        tiles = append_tiles<THREADS>(table, tiles, expert, row_begin, row_end, block_m);
    }
    if (threadIdx.x == 0) write_num_tiles(num_tiles, tiles);
}
