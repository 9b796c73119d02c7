// Shared memory: bounds, static variables, and the fence between ordinary stores and what TMA and wgmma read.
#include "state.h"

namespace emu {
constexpr u32 kGranule = 16;

u8* shared_of(Cta& cta, u32 address, u32 bytes) {
    u32 dynamic_end = kDynamicShared + cta.kernel->shared_bytes, end = address + bytes;
    bool dynamic = address >= kDynamicShared && end <= dynamic_end;
    if (!dynamic && !(address >= kStaticShared && end <= cta.static_end))
        fail("shared memory at %u, %u bytes: outside of [%u, %u)", address, bytes, kDynamicShared, dynamic_end);
    return cta.shared + address;
}
u8* shared_at(u32 address, u32 bytes) {
    step();
    if (address % bytes) fail("shared memory at %u, %u bytes: not aligned", address, bytes);
    return shared_of(*self()->cta, address, bytes);
}

u8* static_shared(const void* variable, u32 bytes) {
    Cta& cta = *self()->cta;
    auto [entry, added] = cta.static_variables.try_emplace(variable, cta.static_end);
    if (added) cta.static_end += (bytes + 127) / 128 * 128;
    if (cta.static_end > kSharedEnd) fail("too many static variables in shared memory");
    return cta.shared + entry->second;
}

void mark_unfenced(Cta& cta, u32 address, u32 bytes, u32 writer) {
    for (u32 granule = address / kGranule; granule <= (address + bytes - 1) / kGranule; ++granule) {
        if (cta.unfenced[granule]) continue;
        cta.unfenced[granule] = u8(writer + 1);
        cta.unfenced_lists[writer].push_back(granule);
    }
}
static u32 warpgroup() { return 1 + self()->index / 128; }

void wrote_shared(u32 address, u32 bytes) { mark_unfenced(*self()->cta, address, bytes, warpgroup()); }

void fence_proxy_async() {  // counts for the stores of the thread's warpgroup, and for all that cp.async has written
    step();
    Cta& cta = *self()->cta;
    for (u32 writer : {kCopies, warpgroup()}) {
        for (u32 granule : cta.unfenced_lists[writer])
            if (cta.unfenced[granule] == writer + 1) cta.unfenced[granule] = 0;
        cta.unfenced_lists[writer].clear();
    }
}
void check_fenced(Cta& cta, u32 address, const char* reader) {
    u8 writer = cta.unfenced[address / kGranule];
    if (writer)
        fail("%s reads shared memory at %u, written by %s without fence.proxy.async", reader, address,
             writer == kCopies + 1 ? "cp.async" : "ordinary stores");
}

void check_memory(const void* address, u64 bytes, const char* what) {
    auto begin = static_cast<const u8*>(address);
    auto region = run.memory.upper_bound(begin);
    if (region == run.memory.begin() || begin + bytes > (--region)->first + region->second)
        fail("%s of %llu bytes at %p: outside of the operands' memory", what, bytes, address);
}
}  // namespace emu
