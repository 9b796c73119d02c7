// What all threads wait for, for a run that fails.
#include <cstdio>
#include "state.h"

namespace emu {
static const char* const kNames[] = {"ready",       "mbarrier", "named barrier",   "collective", "wgmma",
                                     "bulk stores", "copies",   "previous kernel", "cluster",    "ended"};

template <class... Values>
static std::string text(const char* format, Values... values) {
    char line[200];
    snprintf(line, sizeof line, format, values...);
    return line;
}

static std::string waits_of(const Warp& warp) {
    std::map<std::string, u32> lanes;
    for (const Fiber* fiber : warp.fibers)
        lanes[text("%s %u", kNames[int(fiber->wait)], fiber->waits_for)] |= 1u << fiber->lane;
    std::string line = text("  warp %2d:", warp.index);
    for (const auto& [wait, mask] : lanes) line += text(" %08x %s;", mask, wait.c_str());
    return line + "\n";
}

static std::string mbarriers_of(const Cta& cta) {
    std::string line = "  mbarriers (address: pending/expected arrivals, bytes, phase):";
    for (u32 at = 0; at + 8 <= cta.kernel->shared_bytes; at += 8) {
        u64 word;
        memcpy(&word, cta.shared + kDynamicShared + at, 8);
        Mbarrier b;
        if (decode_mbarrier(word, b) && b.expected && b.pending <= b.expected && b.expected <= 1024)
            line += text(" %u: %d/%d %d %d;", kDynamicShared + at, b.pending, b.expected, b.bytes, b.phase);
    }
    return line + "\n";
}

std::string report() {
    std::string lines = text("%zu operations are pending\n", run.operations.size() + run.late.size());
    for (const Cta* cta : run.live) {
        lines += text("kernel %d CTA %d: %d threads\n", cta->kernel->index, cta->index, cta->alive);
        for (const Warp& warp : cta->warps) lines += waits_of(warp);
        lines += mbarriers_of(*cta);
    }
    return lines;
}
}  // namespace emu
