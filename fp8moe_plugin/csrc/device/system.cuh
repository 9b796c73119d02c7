// Memory of other GPUs: stores to it, and what orders them, in the scope of the system.
#pragma once
#include "device/common.cuh"

DEVICE void store_to_peer(u32* to, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE void store_to_peer(uint2* to, uint2 v) {
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store_to_peer(uint4* to, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// Copies `bytes` of shared memory, as one of the thread's TMA stores; they and both addresses are multiples of 16.
DEVICE void bulk_store_to_peer(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Adds 1 to a counter and returns what it was. What this thread and those that it has met did before comes before what
// a thread does that counts later.
DEVICE int count_in_system(int* counter) {
    int before;
    asm volatile("atom.acq_rel.sys.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
// What this thread and those that it has met did before comes before what a thread does that has loaded the sum.
DEVICE void add_release_system(u32* to, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE u32 load_acquire_system(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
