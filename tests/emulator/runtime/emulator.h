// What a kernel's code asks of the runtime. Small: every kernel is compiled with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

struct uint3 {
    unsigned x, y, z;
};

namespace emu {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

// Shared memory of a CTA; an address is an offset from its start. What lies below is nobody's.
constexpr u32 kDynamicShared = 1024, kStaticShared = kDynamicShared + 227 * 1024;
constexpr u32 kSharedEnd = kStaticShared + 48 * 1024;

struct Thread {
    uint3 thread_index, block_index, grid;
    u32 lane;
    u8* shared;
};
extern Thread* current;

[[noreturn]] void fail(const char* format, ...);
void step();  // here the scheduler may let another thread run
void poll();  // here it does: the thread waits for memory to change
u64 steps_so_far();

// ---- warps ----
enum Collective {
    kSyncWarp,
    kShuffle,
    kBallot,
    kMatch,
    kReduceAdd,
    kReduceMax,
    kReduceMin,
    kReduceOr,
    kElect,
    kMma,
    kStoreMatrix,
    kTransposeMatrix,
    kWgmma,
    kWgmmaFence,
    kWgmmaCommit,
    kWgmmaWait
};
const u64* collect(Collective kind, u32 mask, u64 value);  // the values of all lanes, once those of the mask have come
void store_matrix(u32 row_address, const u32* values, int count, bool transposed);
u32 transpose_matrix(u32 two);
void wgmma_issue(float* d, u64 a, u64 b, bool accumulate, int n);
void wgmma_issue_registers(float* d, const u32* a, u64 b, bool accumulate, int n);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int left);  // groups that may still be running

// ---- shared memory ----
u8* shared_at(u32 address, u32 bytes);      // checked
void wrote_shared(u32 address, u32 bytes);  // by an ordinary store: TMA and wgmma need a fence after it
void fence_proxy_async();
u8* static_shared(const void* variable, u32 bytes);  // the same place for all threads of a CTA

template <class T>
struct DynamicShared {
    operator T*() const { return reinterpret_cast<T*>(current->shared + kDynamicShared); }
};

// ---- barriers ----
void mbarrier_init(u32 barrier, u32 count);
void mbarrier_arrive(u32 barrier, u32 expected_bytes);
bool mbarrier_test_wait(u32 barrier, u32 parity);  // whether the phase has completed
bool mbarrier_try_wait(u32 barrier, u32 parity);   // the same, after a while
void named_barrier(int id, int threads);
void named_barrier_arrive(int id, int threads);
void sync_threads();

// ---- clusters: an address in another CTA's shared memory has that CTA's rank in its high bits ----
u32 in_cluster(u32 address, u32 rank);
void cluster_arrive();
void cluster_wait();
void mbarrier_arrive_in_cluster(u32 barrier);
void store_async(u32 to, const void* values, u32 bytes, u32 barrier);

// ---- copies ----
constexpr int kMostDims = 4;
struct Coordinates {
    int dims, at[kMostDims];  // the innermost first
};
void tma_load(u32 to, const void* map, Coordinates begin, u32 barrier);
void tma_load_to_cluster(u32 to, const void* map, Coordinates begin, u32 barrier, u32 ranks);
void tma_store(const void* map, Coordinates begin, u32 from);
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void bulk_store_to_peer(void* to, u32 from, u32 bytes);
void bulk_commit();
void bulk_wait(bool reads_only);
void copy_async(u32 to, const void* from, u32 bytes);
void copy_async_arrive(u32 barrier);
void copy_async_wait();

// ---- memory of other devices ----
void store_to_peer(void* to, const void* values, u32 bytes);
void fence_system();  // the thread's stores to peers, and those of threads that it has met since, have arrived
[[noreturn]] void trap();

// ---- launches ----
void let_next_kernel_start();
void wait_for_previous_kernel();
}  // namespace emu
