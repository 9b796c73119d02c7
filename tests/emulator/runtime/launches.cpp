// Kernels in the order of their device's stream, early ones beside the one before; their CTAs on multiprocessors; the C
// interface.
#include <algorithm>
#include "state.h"
#include "tensor_map.h"

namespace emu {
constexpr int kReservedShared = 1024;  // of each CTA

static bool may_start(const Kernel& kernel) {
    if (kernel.previous < 0) return true;
    const Kernel& previous = run.kernels[kernel.previous];
    if (!kernel.early) return previous.done;  // those before that one have ended only if it has waited for them
    return previous.placed == previous.ctas && previous.let_next == previous.ctas;
}

void let_next_kernel_start() {  // counts once any thread of the CTA has called it
    step();
    Cta& cta = *self()->cta;
    cta.kernel->let_next += !std::exchange(cta.let_next, true);
}
void wait_for_previous_kernel() {
    step();
    const Kernel& kernel = *self()->cta->kernel;
    while (kernel.early && kernel.previous >= 0 && !run.kernels[kernel.previous].done) block(Wait::kPreviousKernel);
}

// Some lanes of a warp, of each warp of a warpgroup, or of all, lag.
static void separate_lanes(Cta& cta) {
    Random& random = run.random;
    u32 warps = u32(cta.warps.size()), widths[] = {1, 4, 4, 4, warps}, width = widths[random.below(5)];
    u32 first = random.below(warps) / width * width;
    for (u32 warp = first; warp < std::min(first + width, warps); ++warp) {
        u32 lanes[] = {~1u, ~1u, 1, random.next()};
        cta.warps[warp].lagging = lanes[random.below(4)];
    }
}

static void start_threads(Cta& cta, uint3 block_index) {
    const Kernel& kernel = *cta.kernel;
    cta.alive = kernel.threads;
    for (int warp = 0; warp < cta.alive / 32; ++warp) cta.warps.push_back({.cta = &cta, .index = warp});
    if (run.separate) separate_lanes(cta);
    for (int i = 0; i < cta.alive; ++i) {
        Fiber& fiber = cta.fibers.emplace_back();
        static_cast<Thread&>(fiber) = {{u32(i), 0, 0}, block_index, kernel.grid, u32(i % 32), cta.shared};
        fiber.index = i;
        fiber.cta = &cta;
        fiber.warp = &cta.warps[i / 32];
        fiber.warp->fibers[i % 32] = &fiber;
        start_fiber(fiber);
    }
}

static void place(Kernel& kernel, int multiprocessor, const std::shared_ptr<Cluster>& cluster) {
    Cta& cta = *run.ctas.emplace_back(std::make_unique<Cta>());
    u32 index = u32(kernel.placed++), warpgroups = u32(kernel.threads + 127) / 128;
    cta.kernel = &kernel;
    cta.index = int(index);
    cta.multiprocessor = multiprocessor;
    cta.cluster = cluster;
    cluster->ctas.push_back(&cta);
    cta.memory.assign(kSharedEnd + 1024, 0xff);  // NaN
    cta.shared = cta.memory.data() + (1024 - uintptr_t(cta.memory.data()) % 1024);
    cta.issued.resize(warpgroups);
    cta.unfenced.resize(kSharedEnd / 16);
    cta.unfenced_lists.resize(1 + warpgroups);
    start_threads(cta, {index % kernel.grid.x, index / kernel.grid.x, 0});
    run.live.push_back(&cta);
}

static int take_multiprocessor(const Kernel& kernel) {
    std::vector<Multiprocessor>& all = run.devices[kernel.device];
    int count = int(all.size()), first = int(run.random.below(count));
    for (int i = 0; i < count; ++i) {
        Multiprocessor& candidate = all[(first + i) % count];
        int shared = int(kernel.shared_bytes) + kReservedShared;
        if (candidate.shared < shared || candidate.threads < kernel.threads) continue;
        candidate.threads -= kernel.threads;
        candidate.shared -= shared;
        return (first + i) % count;
    }
    return -1;
}

// The CTAs of a cluster start together or not at all.
static bool place_cluster(Kernel& kernel) {
    std::vector<Multiprocessor>&all = run.devices[kernel.device], before = all;
    std::vector<int> taken;
    for (int i = 0; i < kernel.cluster; ++i) {
        taken.push_back(take_multiprocessor(kernel));
        if (taken.back() < 0) return all = before, false;
    }
    auto cluster = std::make_shared<Cluster>();
    for (int multiprocessor : taken) place(kernel, multiprocessor, cluster);
    return true;
}

static void place_ctas_on(int device) {
    for (Kernel& kernel : run.kernels) {
        if (kernel.device != device || kernel.placed == kernel.ctas) continue;
        if (!may_start(kernel)) return;
        while (kernel.placed < kernel.ctas)
            if (!place_cluster(kernel)) return;
    }
}
void place_ctas() {
    for (int device = 0; device < int(run.devices.size()); ++device) place_ctas_on(device);
}

void end_cta(Cta& cta) {
    Kernel& kernel = *cta.kernel;
    if (cta.copies) fail("CTA %d of kernel %d ended before %d of its copies", cta.index, kernel.index, cta.copies);
    for (const Warp& warp : cta.warps)
        if (warp.running || warp.issued != cta.issued[warp.index / 4].size())
            fail("CTA %d of kernel %d ended before its wgmma", cta.index, kernel.index);
    for (const Cta::NamedBarrier& barrier : cta.named)
        if (barrier.arrived) fail("CTA %d of kernel %d ended with threads at a barrier", cta.index, kernel.index);
    for (const Fiber& fiber : cta.fibers)
        if (fiber.cluster_phase >= 0) fail("CTA %d of kernel %d ended without waiting", cta.index, kernel.index);
    leave_peer_stores(cta);
    for (Fiber& fiber : cta.fibers) end_fiber(fiber);
    cta.ended = true;
    Multiprocessor& multiprocessor = run.devices[kernel.device][cta.multiprocessor];
    multiprocessor.threads += kernel.threads;
    multiprocessor.shared += int(kernel.shared_bytes) + kReservedShared;
    kernel.let_next += !cta.let_next;
    ++kernel.ended;
    std::erase(run.live, &cta);
    cta.memory = {};
    if (kernel.ended < kernel.ctas) return;
    const auto finish = [&kernel] {
        complete_peer_stores(kernel);
        kernel.done = true;
        for (Cta* other : run.live) wake_all(*other, Wait::kPreviousKernel);
        return true;
    };
    if (!kernel.peer_stores.empty() && run.random.chance(0.5))
        hold_back(finish, kLast - 1);  // before stores that it does not wait for
    else
        finish();
}

static void draw_schedule(u64 seed) {
    Random& random = run.random;
    random.state = (seed + 1) * 0x9e3779b97f4a7c15;
    for (int i = 0; i < 10; ++i) random.next();
    constexpr double kOperation[] = {0.5, 0.1, 0.02, 0.003}, kLate[] = {0, 0.03, 0.3, 0.6}, kStep[] = {0.02, 0.15};
    run.operation_chance = kOperation[random.below(4)];
    run.late_chance = kLate[random.below(4)];
    run.step_chance = kStep[random.below(2)];
    run.starve = random.chance(0.7);
    run.separate = seed % 2;  // so that tests of two seeds have both
}
}  // namespace emu

using namespace emu;

extern "C" {
void emu_tensor_map(void* out, u8* base, int element_bytes, int dims, const i64* sizes, const i64* strides,
                    const u32* box) {
    TensorMap map{TensorMap::kKind, base, dims, element_bytes, {}, {}, {}};
    std::copy_n(sizes, dims, map.sizes);
    std::copy_n(strides, dims, map.strides);
    std::copy_n(box, dims, map.box);
    memcpy(out, &map, sizeof map);
}

// Forgets what is queued.
void emu_reset() { run = {}; }

// Memory that copies of the next run may touch.
void emu_memory(const u8* begin, u64 bytes) {
    u64& known = run.memory[begin];
    known = std::max(known, bytes);
}

// Queues a kernel for the next run, behind those of its device; args[i] points to its i-th argument until then.
void emu_launch(int device, void (*entry)(void**), int grid_x, int grid_y, int threads, u32 shared_bytes, void** args,
                int early, int cluster) {
    uint3 grid{u32(grid_x), u32(grid_y), 1};
    int index = int(run.kernels.size()), previous = index - 1;
    while (previous >= 0 && run.kernels[previous].device != device) --previous;
    if (grid_x % cluster) fail("a grid of %d CTAs in clusters of %d", grid_x, cluster);
    run.kernels.push_back({entry, args, grid, threads, shared_bytes, early != 0, cluster, device, index, previous,
                           grid_x * grid_y, 0, 0, 0});
}

// Runs what is queued, on as many multiprocessors of each device; an empty string, or what went wrong. Afterwards
// nothing is queued.
const char* emu_run(u64 seed, int multiprocessors, int shared_bytes) {
    static std::string error;
    draw_schedule(seed);
    for (const Kernel& kernel : run.kernels)
        if (kernel.device >= int(run.devices.size())) run.devices.resize(kernel.device + 1);
    for (auto& device : run.devices) device.resize(multiprocessors, {.shared = shared_bytes});
    run.slow_devices.resize(run.devices.size());
    try {
        schedule();
        for (const Kernel& kernel : run.kernels)
            if (!kernel.done) fail("kernel %d cannot start", kernel.index);
    } catch (Failure&) {
        for (Cta* cta : run.live)
            for (Fiber& fiber : cta->fibers) free_stack(fiber);
    }
    current = nullptr;
    error = run.error;
    emu_reset();
    return error.c_str();
}
}
