// The PTX instructions of the kernels, a function each. translate.py calls the instruction a.b::c as a_b_c, with its
// operands in their order; those of vectors and addresses one by one.
#pragma once
#include <limits>
#include <tuple>
#include "cuda.h"

namespace ptx {
using emu::u16, emu::u32, emu::u64, emu::u8;

// ---- values ----

template <class T>
inline void setp_ne_b32(bool& p, T a, T b) {
    p = a != b;
}
inline void prmt_b32(u32& to, u32 low, u32 high, u32 numbers) {
    const u64 bytes = u64(high) << 32 | low;
    to = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 number = numbers >> 4 * i & 15;
        if (number > 7) emu::fail("prmt copies a sign: %08x", numbers);
        to |= u32(bytes >> 8 * number & 255) << 8 * i;
    }
}
inline void mov_b64(u64& to, u32 low, u32 high) { to = u64(high) << 32 | low; }

inline u16 bf16_of(float value) {
    u32 bits = emu_bits<u32>(value);
    if (std::isnan(value)) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float of_bf16(u32 bits) { return emu_bits<float>(bits << 16); }
inline u32 e4m3_of(float value) {  // to nearest even, saturating
    u32 sign = emu_bits<u32>(value) >> 24 & 0x80, bits = emu_bits<u32>(value) & 0x7fffffff;
    if (std::isnan(value)) return 0x7f;
    if (emu_bits<float>(bits) >= 448.f) return sign | 0x7e;
    if (emu_bits<float>(bits) < 0x1p-6f) return sign | u32(nearbyintf(emu_bits<float>(bits) * 0x1p9f));
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | min(((bits >> 23) - 120) << 3 | (bits >> 20 & 7), 0x7eu);
}
inline void cvt_rn_bf16_f32(u16& to, float value) { to = bf16_of(value); }
inline void cvt_rn_bf16x2_f32(u32& to, float high, float low) { to = u32(bf16_of(high)) << 16 | bf16_of(low); }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& to, float high, float low) { to = u16(e4m3_of(high) << 8 | e4m3_of(low)); }
inline void max_u16x2(u32& to, u32 a, u32 b) { to = max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
inline void mul_rn_bf16x2(u32& to, u32 a, u32 b) {
    cvt_rn_bf16x2_f32(to, of_bf16(a >> 16) * of_bf16(b >> 16), of_bf16(a & 0xffff) * of_bf16(b & 0xffff));
}
inline void min_NaN_f32(float& to, float a, float b) {
    to = std::isnan(a) || std::isnan(b) ? std::numeric_limits<float>::quiet_NaN() : fminf(a, b);
}
inline void min_NaN_xorsign_abs_f32(float& to, float a, float b) {
    const bool negative = std::signbit(a) != std::signbit(b);
    min_NaN_f32(to, fabsf(a), fabsf(b));
    if (negative) to = -to;
}
inline float flushed(float value) {
    return std::isnan(value) || fabsf(value) >= 0x1p-126f ? value : copysignf(0, value);
}
inline void ex2_approx_ftz_f32(float& to, float value) { to = flushed(exp2f(flushed(value))); }
inline void rcp_approx_ftz_f32(float& to, float value) { to = flushed(1.0f / flushed(value)); }

// ---- memory ----

template <class... T>
inline void load_shared(u32 from, T&... to) {
    const u8* p = emu::shared_at(from, sizeof...(T) * 4);
    static_assert(((sizeof(T) == 4) && ...));
    ((memcpy(&to, p, 4), p += 4), ...);
}
template <class... T>
inline void store_shared(u32 to, T... values) {
    u8* p = emu::shared_at(to, (sizeof(T) + ...));
    emu::wrote_shared(to, (sizeof(T) + ...));
    ((memcpy(p, &values, sizeof(T)), p += sizeof(T)), ...);
}
inline void ld_shared_f32(float& to, u32 from) { load_shared(from, to); }
inline void ld_shared_u32(u32& to, u32 from) { load_shared(from, to); }
inline void ld_shared_v4_u32(u32& a, u32& b, u32& c, u32& d, u32 from) { load_shared(from, a, b, c, d); }
inline void ld_shared_v2_u32(u32& a, u32& b, u32 from) { load_shared(from, a, b); }
inline void ld_shared_v2_f32(float& a, float& b, u32 from) { load_shared(from, a, b); }
inline void ld_shared_v4_f32(float& a, float& b, float& c, float& d, u32 from) { load_shared(from, a, b, c, d); }
inline void ld_shared_v4_s32(int& a, int& b, int& c, u32& d, u32 from) { load_shared(from, a, b, c, d); }
inline void st_shared_u8(u32 to, u32 value) { store_shared(to, u8(value)); }
inline void st_shared_u16(u32 to, u16 value) { store_shared(to, value); }
inline void st_shared_u32(u32 to, u32 value) { store_shared(to, value); }
inline void st_shared_v2_u32(u32 to, u32 a, u32 b) { store_shared(to, a, b); }
inline void st_shared_v4_u32(u32 to, u32 a, u32 b, u32 c, u32 d) { store_shared(to, a, b, c, d); }
inline void st_shared_v4_s32(u32 to, int a, int b, int c, int d) { store_shared(to, a, b, c, d); }
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 row, u32 a, u32 b, u32 c, u32 d) {
    const u32 values[] = {a, b, c, d};
    emu::store_matrix(row, values, 4, false);
}
inline void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u32 row, u32 a, u32 b) {
    const u32 values[] = {a, b};
    emu::store_matrix(row, values, 2, true);
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(u32& transposed, u32 two) { transposed = emu::transpose_matrix(two); }
inline void ld_acquire_gpu_global_s32(int& to, const int* from) {
    emu::poll();
    to = *from;
}
inline void ld_acquire_sys_global_u32(u32& to, const u32* from) {
    emu::poll();
    to = *from;
}
inline void atom_acq_rel_sys_global_add_s32(int& before, int* to, int value) {
    emu::fence_system();
    before = atomicAdd(to, value);
}
inline void red_release_sys_global_add_u32(u32* to, u32 value) {
    emu::fence_system();
    atomicAdd(to, value);
}
inline void fence_acq_rel_sys() { emu::fence_system(); }
inline void st_relaxed_sys_global_u32(u32* to, u32 a) { emu::store_to_peer(to, &a, 4); }
inline void st_relaxed_sys_global_v2_u32(void* to, u32 a, u32 b) {
    const u32 values[] = {a, b};
    emu::store_to_peer(to, values, sizeof values);
}
inline void st_relaxed_sys_global_v4_u32(void* to, u32 a, u32 b, u32 c, u32 d) {
    const u32 values[] = {a, b, c, d};
    emu::store_to_peer(to, values, sizeof values);
}
inline void atom_acq_rel_gpu_global_add_s32(int& before, int* to, int value) { before = atomicAdd(to, value); }
inline void red_release_gpu_global_add_s32(int* to, int value) { atomicAdd(to, value); }
inline void atom_relaxed_gpu_global_add_s32(int& before, int* to, int value) { before = atomicAdd(to, value); }
inline void red_relaxed_gpu_global_add_v4_f32(float* to, float a, float b, float c, float d) {
    if (uintptr_t(to) % 16) emu::fail("red.v4 to %p: not aligned", static_cast<void*>(to));
    emu::step();
    to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}
inline void fence_proxy_async_shared_cta() { emu::fence_proxy_async(); }
inline void fence_proxy_async_global() { emu::step(); }
inline void fence_mbarrier_init_release_cluster() { emu::step(); }

// ---- barriers ----

inline void bar_sync(int id, int threads) { emu::named_barrier(id, threads); }
inline void bar_arrive(int id, int threads) { emu::named_barrier_arrive(id, threads); }
inline void mbarrier_init_shared_cta_b64(u32 barrier, u32 count) { emu::mbarrier_init(barrier, count); }
inline void mbarrier_arrive_shared_cta_b64(u32 barrier) { emu::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(u32 barrier, u32 bytes) { emu::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_test_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) {
    done = emu::mbarrier_test_wait(barrier, parity);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) {
    done = emu::mbarrier_try_wait(barrier, parity);
}
inline void selp_u32(u32& d, u32 a, u32 b, bool condition) { d = condition ? a : b; }

// ---- clusters ----

inline void mapa_shared_cluster_u32(u32& there, u32 address, u32 rank) { there = emu::in_cluster(address, rank); }
inline void barrier_cluster_arrive_relaxed() { emu::cluster_arrive(); }
inline void barrier_cluster_wait_acquire() { emu::cluster_wait(); }
inline void mbarrier_arrive_shared_cluster_b64(u32 barrier) { emu::mbarrier_arrive_in_cluster(barrier); }
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_v2_f32(u32 to, float a, float b, u32 barrier) {
    const float values[] = {a, b};
    emu::store_async(to, values, sizeof values, barrier);
}
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_f32(u32 to, float a, float b, float c, float d,
                                                                      u32 barrier) {
    const float values[] = {a, b, c, d};
    emu::store_async(to, values, sizeof values, barrier);
}

// ---- one lane of a warp: the last, so that code fails that takes it for the first ----

inline void elect_sync(bool& elected, u32 mask) {
    emu::collect(emu::kElect, mask, 0);
    elected = (mask >> emu::current->lane) == 1;
}
inline void elect_sync(int& lane, bool& elected, u32 mask) {
    elect_sync(elected, mask);
    lane = 31 - __builtin_clz(mask);
}

// ---- copies ----

inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void* map,
                                                                                     int column, int row, u32 barrier) {
    emu::tma_load(to, map, {2, {column, row}}, barrier);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 to, const void* map, int column, int row, u32 barrier, u32 ranks) {
    emu::tma_load_to_cluster(to, map, {2, {column, row}}, barrier, ranks);
}
inline void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(u32 to,
                                                                                                   const void* map,
                                                                                                   int x, int y, int z,
                                                                                                   u32 barrier, u64) {
    emu::tma_load(to, map, {3, {x, y, z}}, barrier);
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void* map, int x,
                                                                                     int y, int z, int w, u32 barrier) {
    emu::tma_load(to, map, {4, {x, y, z, w}}, barrier);
}
inline void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(const void* map, int column, int row, u32 from) {
    emu::tma_store(map, {2, {column, row}}, from);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void* from, u32 bytes,
                                                                           u32 barrier) {
    emu::bulk_load(to, from, bytes, barrier);
}
inline void cp_async_bulk_global_shared_cta_bulk_group(void* to, u32 from, u32 bytes) {
    emu::bulk_store_to_peer(to, from, bytes);
}
inline void prefetch_tensormap(const void*) { emu::step(); }
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(u32 to, const void* from,
                                                                                         u32 bytes, u32 barrier, u64) {
    emu::bulk_load(to, from, bytes, barrier);
}
inline void createpolicy_fractional_L2_evict_first_b64(u64& policy, int, int) { policy = 0; }
inline void cp_async_bulk_commit_group() { emu::bulk_commit(); }
inline void cp_async_bulk_wait_group_read(int) { emu::bulk_wait(true); }
inline void cp_async_bulk_wait_group(int) { emu::bulk_wait(false); }
inline void cp_async_ca_shared_global(u32 to, const void* from, u32 bytes) { emu::copy_async(to, from, bytes); }
inline void cp_async_cg_shared_global(u32 to, const void* from, u32 bytes) { emu::copy_async(to, from, bytes); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(u32 barrier) { emu::copy_async_arrive(barrier); }
inline void cp_async_wait_all() { emu::copy_async_wait(); }

// ---- wgmma ----

// Registers of the accumulator, descriptors of A and B, whether to accumulate, two signs. Or four registers of A.
template <int kN, class... T>
inline void wgmma(float& d, T... operands) {
    constexpr size_t kOthers = kN / 2 - 1;
    auto all = std::tie(operands...);
    if constexpr (sizeof...(T) == kOthers + 8) {
        const u32 a[] = {std::get<kOthers>(all), std::get<kOthers + 1>(all), std::get<kOthers + 2>(all),
                         std::get<kOthers + 3>(all)};
        return emu::wgmma_issue_registers(&d, a, std::get<kOthers + 4>(all), std::get<kOthers + 5>(all), kN);
    } else {
        static_assert(sizeof...(T) == kOthers + 5);
        emu::wgmma_issue(&d, std::get<kOthers>(all), std::get<kOthers + 1>(all), std::get<kOthers + 2>(all), kN);
    }
}
#define WGMMA(n)                                                                    \
    template <class... T>                                                           \
    inline void wgmma_mma_async_sync_aligned_m64n##n##k32_f32_e4m3_e4m3(T&&... x) { \
        wgmma<n>(x...);                                                             \
    }
WGMMA(8)
WGMMA(16)
WGMMA(24)
WGMMA(32)
WGMMA(40)
WGMMA(48)
WGMMA(64)
WGMMA(96)
WGMMA(112)
WGMMA(128)
WGMMA(144)
WGMMA(160)
WGMMA(176)
WGMMA(192)
WGMMA(256)
#undef WGMMA
inline void wgmma_fence_sync_aligned() { emu::wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned() { emu::wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(int left) { emu::wgmma_wait(left); }

// ---- mma: a warp's lanes hand in their registers, two at a time ----

inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, u32 a0,
                                                                u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0,
                                                                float c1, float c2, float c3) {
    const u64 own[] = {u64(a1) << 32 | a0, u64(a3) << 32 | a2, u64(b1) << 32 | b0};
    u64 all[3][32];
    for (int i = 0; i < 3; ++i) memcpy(all[i], emu::collect(emu::kMma, ~0u, own[i]), sizeof all[i]);
    double sums[] = {c0, c1, c2, c3};
    for (int i = 0; i < 4; ++i) {
        const u32 row = emu::current->lane / 4, column = emu::current->lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int half = k % 2 * 16, lane = k % 8 / 2;  // of four
            const u64 a = all[k / 8][row * 4 + lane] >> (i / 2 * 32 + half);
            const u64 b = all[2][column * 4 + lane] >> (k / 8 * 32 + half);
            sums[i] += double(of_bf16(u32(a) & 0xffff)) * of_bf16(u32(b) & 0xffff);
        }
    }
    d0 = float(sums[0]), d1 = float(sums[1]), d2 = float(sums[2]), d3 = float(sums[3]);
}

// ---- launches ----

inline void griddepcontrol_launch_dependents() { emu::let_next_kernel_start(); }
inline void griddepcontrol_wait() { emu::wait_for_previous_kernel(); }
inline void setmaxnreg_dec_sync_aligned_u32(int) { emu::step(); }
inline void setmaxnreg_inc_sync_aligned_u32(int) { emu::step(); }
}  // namespace ptx
