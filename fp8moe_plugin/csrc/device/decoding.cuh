// PTX of the kernels that decode weights in clusters.
#pragma once
#include "device/ptx.cuh"

DEVICE void store_shared(u32 address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
DEVICE void store_async(u32 to, int4 v, u32 barrier) {
    const float4 bits = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    store_async(to, bits, barrier);
}

// Keeps a value in a register: the compiler would compute it anew at every use.
DEVICE u32 in_registers(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Whether the phase has completed; never suspends the thread, as barrier_try_wait may.
DEVICE bool barrier_test_wait(u32 barrier, u32 parity) {
    u32 completed;
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(completed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return completed;
}
// Called by all lanes of a warp. For `if (lane_of_warp() == 0)` the compiler would read the thread's index in each
// step.
DEVICE void barrier_arrive_by_one_lane(u32 barrier) {
    asm volatile(
        "{ .reg .pred p; elect.sync _|p, 0xffffffff;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier)
        : "memory");
}
// Arrives at a barrier among `threads` threads of the block, for which others wait.
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
