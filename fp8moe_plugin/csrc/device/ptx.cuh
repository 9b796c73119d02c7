// Instructions of sm_90a as C++ functions, in the order in which a tile meets them. Needs no CUDA header.
#pragma once
#include "device/common.cuh"

// ---- shared memory: always 32-bit addresses, so that no loop forms generic pointers --------------------------------

// Makes a value uniform across lanes for the compiler: values derived from it, above all wgmma descriptors, then stay
// in uniform registers.
DEVICE u32 warp_uniform(u32 value) { return __shfl_sync(kAllLanes, value, 0); }

// The address of the block's dynamic shared memory; opaque, or the compiler recomputes it at every use.
DEVICE u32 dynamic_shared_address() {
    extern __shared__ u8 dynamic_shared[];
    return warp_uniform(static_cast<u32>(__cvta_generic_to_shared(dynamic_shared)));
}
// Keeps a pointer in registers: the compiler would load a kernel parameter from constant memory at every use.
template <class T>
DEVICE T* in_registers(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}
DEVICE float load_shared_float(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
DEVICE float2 load_shared_float2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
DEVICE u32 load_shared(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
DEVICE void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE void store_shared(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
DEVICE void store_shared(u32 address, u8 value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(u32(value)) : "memory");
}
DEVICE void store_shared(u32 address, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}
DEVICE float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
DEVICE uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
DEVICE uint2 load_shared_8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
// Four of the eight bytes of `low` and `high`, by the numbers in the lowest four nibbles of `numbers`.
DEVICE u32 select_bytes(u32 low, u32 high, u32 numbers) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(numbers));
    return bytes;
}

// ---- mbarriers: a phase completes when all its arrivals and its expected bytes have come ---------------------------

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether the phase has completed; may suspend the thread until it has, for a limited time.
DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 completed;
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(completed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return completed;
}

// A barrier among `threads` threads of the block. Barrier 0 is __syncthreads, 1 and 2 belong to math warpgroups.
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEVICE void warpgroup_barrier(int math_warpgroup) { named_barrier(1 + math_warpgroup, 128); }

// ---- copies --------------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {  // as large and as aligned as the driver's CUtensorMap
    u8 opaque[128];
};

// Prefetches the descriptor, so that the first copy does not wait for it.
DEVICE void prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Loads the box at (column, row) of a matrix; its bytes complete on the barrier.
DEVICE void tma_load(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
// The same, called by all lanes of a warp with the same values. For `if (lane == 0) tma_load(..)` the compiler would
// issue the load in a loop over lanes, as it does not know that these values are the same.
DEVICE void tma_load_by_one_lane(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "{ .reg .pred p; elect.sync _|p, 0xffffffff;\n"
        "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2]; "
        "}" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
// tma_load to all blocks of the cluster whose bits are set in `blocks`: to that place in the shared memory of each,
// and onto its barrier there.
DEVICE void tma_load_to_cluster(u32 to, const TensorMap* map, u32 barrier, int column, int row, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
        : "memory");
}
// tma_load of a map of four dimensions, innermost first.
DEVICE void tma_load_4d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// Stores a box; what lies outside the matrix is dropped.
DEVICE void tma_store(const TensorMap* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes ordinary writes to shared memory visible to TMA and wgmma.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders ordinary and TMA accesses to global memory.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Copies `bytes`, which complete on the barrier; they and both addresses are multiples of 16.
DEVICE void bulk_load(u32 to, const void* from, u32 barrier, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

DEVICE void copy_async_4(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_async_16(u32 to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives on the barrier once this thread's copies so far have landed; the barrier's count must include it.
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- clusters: thread blocks that access each other's shared memory ------------------------------------------------

// The address in the shared memory of another block of the cluster that corresponds to `address` in this one.
DEVICE u32 in_block(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// A barrier among all threads of the cluster. It makes only mbarriers visible, those initialized before
// barrier_init_fence: a release would wait for all memory.
// Without clusters the first is a no-op and the second is __syncthreads (SASS).
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE void barrier_arrive_in_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores to another block; the bytes complete on a barrier of that block.
DEVICE void store_async(u32 to, float2 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
}
DEVICE void store_async(u32 to, float4 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}

// ---- counters in global memory -------------------------------------------------------------------------------------

// An elected lane of the warp, always the same one.
DEVICE int leader_lane() {
    int lane;
    asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; }" : "=r"(lane));
    return lane;
}
// Adds 1 to the counter. The elected lane gets its previous value, the others keep `value`. Does not wait for the
// result, a round trip to L2: a conditional atomicAdd would, as the compiler aggregates it over lanes and distributes
// the result at once.
DEVICE int atomic_add_by_one_lane(int* counter, int value) {
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; @p atom.relaxed.gpu.global.add.s32 %0, [%1], 1; }"
                 : "+r"(value)
                 : "l"(counter)
                 : "memory");
    return value;
}
// Adds 1 to the counter. What this thread wrote before, and those that it has met at a barrier, is visible to who loads
// the sum with load_acquire. __threadfence() is also sequentially consistent, and drops the L1 cache.
DEVICE void count_released(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// The same, and returns what it was. What others wrote before they counted is visible to this thread and to those that
// it meets at a barrier.
DEVICE int count_acquired(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
// Makes visible what others wrote before they counted; to TMA after fence_proxy_async_global.
DEVICE int load_acquire(const int* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// ---- warpgroup registers -------------------------------------------------------------------------------------------

template <int kRegisters>
DEVICE void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- results -------------------------------------------------------------------------------------------------------

// Stores four (two, transposed) 8x8 matrices of 16-bit values from a warp's registers; lane i has the address of row i.
DEVICE void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
DEVICE void store_matrix_x2_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}
// Transposes an 8x8 matrix of 16-bit values in a warp's registers.
DEVICE u32 transpose_matrix(u32 two) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(two));
    return transposed;
}
