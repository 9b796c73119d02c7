// Stores to the memory of other devices. Those of a thread arrive in any order, and some only when a fence, or the end
// of a kernel, waits for them.
#include "state.h"

namespace emu {
void PeerStore::complete() {
    if (!done) memcpy(to, bytes.data(), bytes.size());
    done = true;
}
static void complete_all(PeerStores& stores) {
    for (auto& store : stores) store->complete();
    stores.clear();
}
void move_all(PeerStores& from, PeerStores& to) {
    to.insert(to.end(), from.begin(), from.end());
    from.clear();
}

std::shared_ptr<PeerStore> peer_store(void* to, const void* values, u32 bytes) {
    check_memory(to, bytes, "a store to a peer");
    auto begin = static_cast<const u8*>(values);
    return std::make_shared<PeerStore>(PeerStore{static_cast<u8*>(to), {begin, begin + bytes}});
}
void store_to_peer(void* to, const void* values, u32 bytes) {
    step();
    if (uintptr_t(to) % bytes) fail("a store of %u bytes to a peer at %p: not aligned", bytes, to);
    self()->peer_stores.push_back(peer_store(to, values, bytes));
    later([store = self()->peer_stores.back()] { return store->complete(), true; });
}
void fence_system() {
    step();
    complete_all(self()->peer_stores);
    complete_all(self()->cta->peer_stores);
}
void publish_peer_stores(Cta& cta) {
    for (Fiber& fiber : cta.fibers) move_all(fiber.peer_stores, cta.peer_stores);
}
void leave_peer_stores(Cta& cta) {
    publish_peer_stores(cta);
    move_all(cta.peer_stores, cta.kernel->peer_stores);
}
void complete_peer_stores(Kernel& kernel) { complete_all(kernel.peer_stores); }
void trap() { fail("the kernel has trapped"); }
}  // namespace emu
