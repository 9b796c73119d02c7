// What a kernel's source finds instead of CUDA: built-in variables, types and functions.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>
#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __restrict__

#define threadIdx (emu::current->thread_index)
#define blockIdx (emu::current->block_index)
#define gridDim (emu::current->grid)

struct int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- arithmetic ----

template <class To, class From>
inline To emu_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}
inline float __uint_as_float(unsigned bits) { return emu_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return emu_bits<unsigned>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }  // compiled without contraction
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255) * (b >> shift & 255);
    return sum;
}

// ---- memory ----

template <class T>
inline T __ldg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcs(const T* from) {
    return *from;
}
inline void __threadfence() { emu::step(); }
inline long long clock64() { return (long long)emu::steps_so_far(); }
[[noreturn]] inline void __trap() { emu::trap(); }
inline void __nanosleep(unsigned) { emu::poll(); }
inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const emu::u8*>(p) - emu::current->shared; }
template <class T>
inline T atomicAdd(T* to, std::type_identity_t<T> value) {
    emu::step();
    T before = *to;
    *to = before + value;
    emu::step();
    return before;
}

inline unsigned atomicOr(unsigned* to, unsigned bits) {
    emu::step();
    unsigned before = *to;
    *to = before | bits;
    emu::step();
    return before;
}

// ---- threads that meet ----

inline void __syncthreads() { emu::sync_threads(); }
inline void __syncwarp() { emu::collect(emu::kSyncWarp, ~0u, 0); }
template <class T>
inline T emu_shuffle(unsigned mask, T value, int from) {
    static_assert(sizeof(T) == 4);
    return emu_bits<T>(unsigned(emu::collect(emu::kShuffle, mask, emu_bits<unsigned>(value))[from]));
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return emu_shuffle(mask, value, emu::current->lane / width * width + from % width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return emu_shuffle(mask, value, emu::current->lane ^ lanes);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int lanes) {
    int lane = emu::current->lane;
    return emu_shuffle(mask, value, lane >= lanes ? lane - lanes : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    const emu::u64* votes = emu::collect(emu::kBallot, mask, vote);
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= unsigned((mask >> lane & 1) && votes[lane]) << lane;
    return lanes;
}
inline int __reduce_add_sync(unsigned mask, int value) {
    const emu::u64* values = emu::collect(emu::kReduceAdd, mask, unsigned(value));
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += mask >> lane & 1 ? unsigned(values[lane]) : 0;
    return int(sum);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const emu::u64* values = emu::collect(emu::kReduceMax, mask, value);
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) value = std::max(value, unsigned(values[lane]));
    return value;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    const emu::u64* values = emu::collect(emu::kReduceMin, mask, value);
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) value = std::min(value, unsigned(values[lane]));
    return value;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    const emu::u64* values = emu::collect(emu::kReduceOr, mask, value);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= mask >> lane & 1 ? unsigned(values[lane]) : 0;
    return bits;
}
inline unsigned __match_any_sync(unsigned mask, int value) {
    const emu::u64* values = emu::collect(emu::kMatch, mask, unsigned(value));
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; ++lane)
        lanes |= unsigned((mask >> lane & 1) && values[lane] == unsigned(value)) << lane;
    return lanes;
}

// ---- the way into a kernel ----

template <class... P, size_t... I>
inline void emu_call(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(args[I])...);
}
template <class... P>
inline void emu_call(void (*kernel)(P...), void** args) {
    emu_call(kernel, args, std::index_sequence_for<P...>{});
}
template <class... P>
inline int emu_argument_sizes(void (*)(P...), int* sizes) {
    ((*sizes++ = int(sizeof(P))), ...);
    return sizeof...(P);
}
