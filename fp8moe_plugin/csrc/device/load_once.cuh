// Loads of what is read once: L2 gives it up first, so that it displaces neither what is read again nor what would have
// to be written back.
#pragma once
#include "device/ptx.cuh"

DEVICE u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// `tma_load` of a map of three dimensions, innermost first.
DEVICE void tma_load_3d(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}
DEVICE void bulk_load(u32 to, const void* from, u32 barrier, u32 bytes, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
