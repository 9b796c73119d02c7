// Fibers, and who runs next: a random thread, or a random operation that completes.
#include <sys/mman.h>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "state.h"

namespace emu {
Thread* current;
Run run;

constexpr u64 kMostSteps = 200'000'000, kMostPolls = 1'000'000;
// Polls until held lanes get a turn. Of several devices one that waits for others polls all the time.
constexpr u64 kMostPollsPerRelease = 30, kMostPollsOfSeveral = 2;
constexpr size_t kStackBytes = 64 * 1024, kStackGuard = 64;
constexpr u8 kGuardByte = 0x5c;

static void* scheduler_stack;
static std::vector<u8*> free_stacks;

template <class T>
static T take(std::vector<T>& from, size_t i) {
    T taken = std::move(from[i]);
    if (i + 1 < from.size()) from[i] = std::move(from.back());
    from.pop_back();
    return taken;
}

u32 Random::next() {  // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return u32(state >> 16);
}

// ---- lanes that lag: held at waits until nothing else can run, so that other lanes of their warp get ahead ----

static void make_ready(Fiber& fiber) {
    fiber.wait = Wait::kNothing;
    fiber.cta->ready.push_back(&fiber);
    ++run.ready;
}
static void hold(Fiber& fiber) {
    fiber.wait = Wait::kNothing;
    Warp& warp = *fiber.warp;
    if (warp.held.empty()) run.held.push_back(&warp);
    warp.held.push_back(&fiber);
}
static void release_a_warp() {
    Warp& warp = *take(run.held, run.random.below(u32(run.held.size())));
    for (Fiber* fiber : warp.held) make_ready(*fiber);
    warp.held.clear();
    run.polls_since_release = 0;
}

// ---- fibers ----

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emu_switch,.-emu_switch
)");

static void to_scheduler() { emu_switch(&self()->stack_pointer, scheduler_stack); }

static void run_kernel() {
    Kernel& kernel = *self()->cta->kernel;
    kernel.entry(kernel.args);
    self()->wait = Wait::kEnded;
    to_scheduler();
    abort();
}

void start_fiber(Fiber& fiber) {
    if (free_stacks.empty())
        free_stacks.push_back(
            static_cast<u8*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
    fiber.stack = free_stacks.back();
    free_stacks.pop_back();
    memset(fiber.stack, kGuardByte, kStackGuard);
    u64* top = reinterpret_cast<u64*>(fiber.stack + kStackBytes - 64);
    *--top = 0;
    *--top = u64(&run_kernel);
    for (int saved_register = 0; saved_register < 6; ++saved_register) *--top = 0;
    fiber.stack_pointer = top;
    lags(fiber) ? hold(fiber) : make_ready(fiber);
}

void end_fiber(Fiber& fiber) {
    for (size_t i = 0; i < kStackGuard; ++i)
        if (fiber.stack[i] != kGuardByte) fail("the stack of a fiber overflowed");
    free_stack(fiber);
}
void free_stack(Fiber& fiber) { free_stacks.push_back(fiber.stack); }

void fail(const char* format, ...) {
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (run.error.empty()) {
        run.error = text;
        if (current) {
            Fiber& f = *self();
            snprintf(text, sizeof text, " (kernel %d, CTA %d, warp %d, lane %u)", f.cta->kernel->index, f.cta->index,
                     f.warp->index, f.lane);
            run.error += text;
        }
        run.error += "\n" + report();
    }
    if (!current) throw Failure{};
    to_scheduler();
    abort();
}

// ---- what fibers wait for ----

static void yield(bool polled) {
    self()->polled = polled;
    make_ready(*self());
    to_scheduler();
}
void step() {
    if (run.random.chance(run.step_chance)) yield(false);
}
void poll() { yield(true); }
void give_way() {
    if (!lags(*self())) return;
    hold(*self());
    to_scheduler();
}

void block(Wait why, u32 what) {
    self()->wait = why;
    self()->waits_for = what;
    to_scheduler();
}
void wake(Fiber& fiber, Wait why, u32 what) {
    if (fiber.wait != why || fiber.waits_for != what) return;
    bool held = lags(fiber) && (why != Wait::kCollective || run.random.chance(0.1));
    held ? hold(fiber) : make_ready(fiber);
}
void wake_all(Cta& cta, Wait why, u32 what) {
    for (Fiber& fiber : cta.fibers) wake(fiber, why, what);
}

// ---- operations: most complete soon, some up to 300,000 steps late, or when nothing else can run ----

void later(std::function<bool()> complete, double late_share) {
    Random& random = run.random;
    bool late = random.chance(run.late_chance * late_share);
    u64 due = late ? run.steps + u64(exp(random.below(1000) * 0.0126)) : 0;
    (late ? run.late : run.operations).push_back({std::move(complete), due});
}

// Completes only when nothing else can run, or all that run poll.
void hold_back(std::function<bool()> complete, u64 due) { run.late.push_back({std::move(complete), due}); }

static void take_due() {
    for (size_t i = 0; i < run.late.size();)
        if (run.late[i].due <= run.steps)
            run.operations.push_back(take(run.late, i));
        else
            ++i;
}
static void take_first_due() {
    size_t first = 0;
    for (size_t i = 1; i < run.late.size(); ++i)
        if (run.late[i].due < run.late[first].due) first = i;
    run.operations.push_back(take(run.late, first));
}

static void complete_an_operation() {
    Operation operation = take(run.operations, run.random.below(u32(run.operations.size())));
    run.polls = 0;
    if (!operation.complete()) later(std::move(operation.complete), 0.05);
}

// ---- threads ----

static void starve_some() {
    for (size_t i = 0; run.devices.size() > 1 && i < run.devices.size(); ++i)
        run.slow_devices[i] = run.random.chance(0.4);
    for (Cta* cta : run.live) {
        cta->slow = run.slow_devices[cta->kernel->device] || run.random.chance(0.4);
        cta->slow_warps = run.random.chance(0.5) ? run.random.next() & run.random.next() : 0;
    }
}

static void run_a_thread() {
    Cta& cta = *run.live[run.random.below(u32(run.live.size()))];
    if (cta.ready.empty() || (cta.slow && !run.random.chance(0.02))) return;
    u32 ready = u32(cta.ready.size()), i = run.random.below(ready);
    for (int tries = 0; tries < 4 && cta.slow_warps >> cta.ready[i]->warp->index & 1; ++tries)
        i = run.random.below(ready);
    Fiber& fiber = *take(cta.ready, i);
    --run.ready;
    fiber.polled = false;
    current = &fiber;
    emu_switch(&scheduler_stack, fiber.stack_pointer);
    current = nullptr;
    if (!run.error.empty()) throw Failure{};
    run.polls = fiber.polled ? run.polls + 1 : 0;
    run.polls_since_release += fiber.polled;
    if (fiber.wait == Wait::kEnded && --cta.alive == 0) end_cta(cta);
}

u64 steps_so_far() { return run.steps; }

// Threads that poll can always run, so held lanes also get a turn after a number of polls.
static bool must_release(bool any_ready, bool late) {
    if (run.held.empty()) return false;
    u64 most = run.devices.size() > 1 ? kMostPollsOfSeveral : kMostPollsPerRelease;
    if (run.polls_since_release > most) return true;
    return !any_ready && run.operations.empty() && !(late && run.random.chance(0.5));
}

static bool idle() { return run.live.empty() && run.operations.empty() && run.late.empty(); }

static void schedule_one() {
    if (++run.steps > kMostSteps * run.devices.size())
        fail("livelock: more than %llu steps of each device", kMostSteps);
    if (run.polls > kMostPolls) fail("livelock: all threads that run poll memory");
    if (run.starve && run.steps % 4096 == 0) starve_some();
    bool any_ready = run.ready > 0;
    if (run.steps % 64 == 0) take_due();
    bool late = !run.late.empty() && run.operations.empty();
    if (late && !any_ready) place_ctas(), any_ready = run.ready > 0;
    if (must_release(any_ready, late))
        release_a_warp(), any_ready = true;
    else if (late && (!any_ready || run.polls > 3000))
        take_first_due();
    if (!any_ready && run.operations.empty()) fail("deadlock: nothing can run");
    if (!run.operations.empty() && (!any_ready || run.random.chance(run.operation_chance)))
        complete_an_operation();
    else if (any_ready)
        run_a_thread();
}

void schedule() {
    while (true) {
        place_ctas();
        if (idle()) return;
        for (int i = 0; i < 64 && !idle(); ++i) schedule_one();
    }
}
}  // namespace emu
