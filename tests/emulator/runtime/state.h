// The state of a run: kernels, CTAs, warps, fibers, and operations that complete later.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>
#include "emulator.h"

namespace emu {
struct Cta;
struct Cluster;
struct Warp;

enum class Wait {  // report.cpp names them
    kNothing,
    kMbarrier,
    kNamedBarrier,
    kCollective,
    kWgmma,
    kBulkStores,
    kCopies,
    kPreviousKernel,
    kCluster,
    kEnded
};

struct CopyBatch {  // the cp.async of a thread up to an arrival that they cause
    int copies = 0;
    bool closed = false;
    u32 barrier = 0;
};

struct PeerStore {  // in the memory of another device, where it arrives at any time before a fence has returned
    u8* to;
    std::vector<u8> bytes;
    bool done = false;
    void complete();
};
using PeerStores = std::vector<std::shared_ptr<PeerStore>>;

struct StoreGroup {
    int reads = 0, writes = 0;  // still to come
    PeerStores peer_stores;     // those of its bulk copies: no fence covers them before the thread has waited
};

struct Fiber : Thread {
    int index;
    Cta* cta;
    Warp* warp;
    u8* stack;
    void* stack_pointer;
    Wait wait = Wait::kNothing;
    u32 waits_for = 0;
    bool polled = false;
    std::shared_ptr<StoreGroup> open_group = std::make_shared<StoreGroup>();
    std::vector<std::shared_ptr<StoreGroup>> groups;
    std::deque<std::shared_ptr<CopyBatch>> batches;
    int copies = 0;
    int cluster_phase = -1;  // of the barrier at which it has arrived and not waited
    PeerStores peer_stores;  // since its last fence
};

struct Rendezvous {
    u32 mask, arrived, turn;
    Collective kind;
    u64 values[2][32];
};
struct WgmmaResult {
    float* registers[32];  // of each lane
    int count;
    u32 last;  // number of the last wgmma that adds to it
    float values[32][128] = {};
};
using WarpRows = std::array<u8, 16 * 32>;  // bytes of A, row by row
struct Multiplication {
    u64 a, b;
    std::shared_ptr<WarpRows> registers;  // A, where it is not in shared memory
    bool accumulate;
    int n;
    std::shared_ptr<WgmmaResult> result;
};
struct Warp {
    Cta* cta;
    int index;
    Fiber* fibers[32];
    std::deque<Rendezvous> meetings;
    std::deque<Multiplication> multiplications;
    std::vector<std::shared_ptr<WgmmaResult>> results;  // since the first fence after a wait
    u32 issued = 0, committed = 0, committed_before = 0, completed = 0;
    bool fenced = false, running = false;
    u32 lagging = 0;           // lanes that run only when nothing else can
    std::vector<Fiber*> held;  // of those, the ones that could run
};
inline bool lags(const Fiber& fiber) { return fiber.warp->lagging >> fiber.lane & 1; }

struct Kernel {
    void (*entry)(void**);
    void** args;
    uint3 grid;
    int threads;
    u32 shared_bytes;
    bool early;
    int cluster;  // CTAs
    int device, index;
    int previous;  // the kernel before it on its device; -1: none
    int ctas, placed, ended, let_next;
    PeerStores peer_stores{};  // of CTAs that have ended
    bool done = false;         // some time after all of them have
};

struct Cluster {
    std::vector<Cta*> ctas;
    int arrived = 0, phase = 0;
};

struct Cta {
    Kernel* kernel;
    std::shared_ptr<Cluster> cluster;
    int index, multiprocessor, alive;
    std::vector<u8> memory;
    u8* shared;
    std::deque<Fiber> fibers;
    std::deque<Warp> warps;
    std::vector<Fiber*> ready;
    bool slow = false, let_next = false, ended = false;
    u32 slow_warps = 0;
    int copies = 0;  // that still read or write its shared memory
    struct NamedBarrier {
        int arrived, expected;
    } named[16] = {};
    std::vector<std::vector<Multiplication>> issued;  // by each warpgroup: its four warps issue the same
    std::map<const void*, u32> static_variables;
    u32 static_end = kStaticShared;
    std::vector<u8> unfenced;                      // of each granule: who has stored to it and not fenced since
    std::vector<std::vector<u32>> unfenced_lists;  // of each writer
    PeerStores peer_stores;                        // of threads that have met since: a fence of any covers them
};

struct Multiprocessor {
    int threads = 2048, shared = 0;
};
struct Operation {
    std::function<bool()> complete;  // a part of it; true: it was the last
    u64 due;
};

struct Random {
    u64 state = 1;
    u32 next();
    u32 below(u32 n) { return u32(u64(next()) * n >> 32); }
    bool chance(double p) { return next() < p * 4294967296.0; }
};

struct Run {
    Random random;
    std::deque<Kernel> kernels;
    std::vector<std::vector<Multiprocessor>> devices;
    std::vector<bool> slow_devices;
    std::vector<Cta*> live;
    std::vector<std::unique_ptr<Cta>> ctas;  // kept to the end: stores refer to their fibers
    std::vector<Operation> operations, late;
    std::vector<Warp*> held;          // whose `held` is not empty
    std::map<const u8*, u64> memory;  // that copies may touch
    double operation_chance, late_chance, step_chance;
    bool starve, separate;
    int ready = 0;  // fibers of live CTAs
    u64 steps = 0, polls = 0, polls_since_release = 0;
    std::string error;
};
extern Run run;

inline Fiber* self() { return static_cast<Fiber*>(current); }

// ---- scheduler.cpp ----
struct Failure {};
void start_fiber(Fiber& fiber);
void end_fiber(Fiber& fiber);
void free_stack(Fiber& fiber);
void block(Wait why, u32 what = 0);
void wake(Fiber& fiber, Wait why, u32 what = 0);
void wake_all(Cta& cta, Wait why, u32 what = 0);
void give_way();  // here a lane that lags is held
void later(std::function<bool()> complete, double late_share = 1);
constexpr u64 kLast = ~0ull;  // a step after all others
void hold_back(std::function<bool()> complete, u64 due = kLast);
void schedule();

// ---- launches.cpp ----
void place_ctas();
void end_cta(Cta& cta);

// ---- shared_memory.cpp ----
constexpr u32 kCopies = 0;  // a writer, as warpgroups from 1 on are
u8* shared_of(Cta& cta, u32 address, u32 bytes);
void mark_unfenced(Cta& cta, u32 address, u32 bytes, u32 writer);
void check_fenced(Cta& cta, u32 address, const char* reader);
void check_memory(const void* address, u64 bytes, const char* what);

// ---- barriers.cpp ----
struct Mbarrier {
    int expected, pending, bytes, phase;
};
bool decode_mbarrier(u64 word, Mbarrier& barrier);
Mbarrier read_mbarrier(Cta& cta, u32 address);
void update_mbarrier(Cta& cta, u32 address, int arrivals, int bytes);

// ---- peers.cpp ----
std::shared_ptr<PeerStore> peer_store(void* to, const void* values, u32 bytes);
void move_all(PeerStores& from, PeerStores& to);
void publish_peer_stores(Cta& cta);  // its threads have met
void leave_peer_stores(Cta& cta);    // it has ended, which orders nothing before its kernel has, too
void complete_peer_stores(Kernel& kernel);

std::string report();
}  // namespace emu
