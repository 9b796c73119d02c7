// wgmma, stmatrix and movmatrix. A warp multiplies its 16 of 64 rows, in order, some time between issue and the end of
// its wait.
#include <algorithm>
#include <cmath>
#include "state.h"

namespace emu {
constexpr int kStepK = 32, kWarpRows = 16;

static std::vector<float> e4m3_values() {
    std::vector<float> values(256);
    for (int code = 0; code < 256; ++code) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
        if ((code & 127) == 127) value = NAN;
        values[code] = code & 128 ? -value : value;
    }
    return values;
}
static const std::vector<float> e4m3_value = e4m3_values();

// Rows [begin, end) of an operand tile, 32 bytes each.
static void read_rows(Cta& cta, u64 descriptor, int begin, int end, u8* to) {
    u32 start = u32(descriptor & 0x3fff) << 4, eight_rows = u32(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7))
        fail("wgmma descriptor %016llx: not 128-byte swizzled, or with a base offset", descriptor);
    for (int row = begin; row < end; ++row)
        for (u32 chunk = 0; chunk < kStepK; chunk += 16, to += 16) {
            u32 address = start + row / 8 * eight_rows + row % 8 * 128 + chunk;
            address ^= (address >> 7 & 7) << 4;
            memcpy(to, shared_of(cta, address, 16), 16);
            check_fenced(cta, address, "wgmma");
        }
}

// B as floats [32][n], kept for the other warps while its bytes are the same.
static const float* operand_b(Cta& cta, u64 descriptor, int n) {
    struct Converted {
        std::vector<u8> bytes;
        std::vector<float> values;
    };
    static std::vector<Converted> cache(256);
    std::vector<u8> bytes(n * kStepK);
    read_rows(cta, descriptor, 0, n, bytes.data());
    Converted& b = cache[(descriptor >> 1 ^ cta.index * 37 ^ n) % cache.size()];
    if (b.bytes != bytes) {
        b.values.resize(n * kStepK);
        for (int row = 0; row < n; ++row)
            for (int k = 0; k < kStepK; ++k) b.values[k * n + row] = e4m3_value[bytes[row * kStepK + k]];
        b.bytes = std::move(bytes);
    }
    return b.values.data();
}

static void multiply(Warp& warp, const Multiplication& m) {
    u8 a[kWarpRows * kStepK];
    float sum[kWarpRows][256] = {};
    int first_row = warp.index % 4 * kWarpRows;
    if (m.registers)
        std::copy(m.registers->begin(), m.registers->end(), a);
    else
        read_rows(*warp.cta, m.a, first_row, first_row + kWarpRows, a);
    const float* b = operand_b(*warp.cta, m.b, m.n);
    for (int row = 0; row < kWarpRows; ++row)
        for (int k = 0; k < kStepK; ++k) {
            float value = e4m3_value[a[row * kStepK + k]];
            for (int i = 0; i < m.n; ++i) sum[row][i] += value * b[k * m.n + i];
        }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < m.n / 2; ++i)
            m.result->values[lane][i] += sum[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
}

static bool complete_one(Warp& warp) {
    multiply(warp, warp.multiplications.front());
    warp.multiplications.pop_front();
    ++warp.completed;
    for (Fiber* fiber : warp.fibers) wake(*fiber, Wait::kWgmma);
    warp.running = !warp.multiplications.empty();
    return !warp.running;
}

static bool same(const Multiplication& a, const Multiplication& b) {
    return a.a == b.a && a.b == b.b && a.n == b.n && a.accumulate == b.accumulate;
}

static void issue(Warp& warp, const Multiplication& m) {
    if (!warp.fenced) fail("wgmma without wgmma.fence since the last wait");
    auto& issued = warp.cta->issued[warp.index / 4];
    if (warp.issued == issued.size()) issued.push_back({m.a, m.b, nullptr, m.accumulate, m.n, nullptr});
    if (!same(issued[warp.issued], m)) fail("the warps of a warpgroup issue different wgmma");
    m.result->last = ++warp.issued;
    warp.multiplications.push_back(m);
    if (warp.running) return;
    warp.running = true;
    later([&warp] { return complete_one(warp); }, 0.05);
}

static std::shared_ptr<WgmmaResult> result_in(Warp& warp, const u64* registers, bool accumulate) {
    auto in_these = [&](const auto& result) { return u64(result->registers[0]) == registers[0]; };
    if (!accumulate) {
        std::erase_if(warp.results, in_these);  // what an earlier group of a wait for all but the last has left
        warp.results.push_back(std::make_shared<WgmmaResult>());
        for (int lane = 0; lane < 32; ++lane)
            warp.results.back()->registers[lane] = reinterpret_cast<float*>(registers[lane]);
    }
    for (auto& result : warp.results)
        if (in_these(result)) return result;
    fail("wgmma accumulates what an earlier group has left in registers");
}

// A lane has two rows of A, eight apart, and of each four channels and those 16 further on.
static std::shared_ptr<WarpRows> collect_rows(const u32* a) {
    auto rows = std::make_shared<WarpRows>();
    for (int part = 0; part < 2; ++part) {
        const u64* all = collect(kWgmma, ~0u, u64(a[2 * part + 1]) << 32 | a[2 * part]);
        for (int lane = 0; lane < 32; ++lane)
            for (int half = 0; half < 2; ++half) {
                const u32 word = u32(all[lane] >> 32 * half);
                const int row = lane / 4 + 8 * half, k = 16 * part + lane % 4 * 4;
                memcpy(rows->data() + row * kStepK + k, &word, 4);
            }
    }
    return rows;
}

void wgmma_issue_registers(float* d, const u32* a, u64 b, bool accumulate, int n) {
    auto rows = collect_rows(a);
    if (!accumulate) std::fill(d, d + n / 2, NAN);
    const u64* registers = collect(kWgmma, ~0u, u64(d));
    if (current->lane != 0) return;
    Warp& warp = *self()->warp;
    std::shared_ptr<WgmmaResult> result = result_in(warp, registers, accumulate);
    result->count = n / 2;
    issue(warp, {0, b, rows, accumulate, n, result});
}

// Each thread copies its results to its registers when it has waited; until then these are NaN.
void wgmma_issue(float* d, u64 a, u64 b, bool accumulate, int n) {
    if (!accumulate) std::fill(d, d + n / 2, NAN);
    const u64* registers = collect(kWgmma, ~0u, u64(d));
    if (current->lane != 0) return;
    Warp& warp = *self()->warp;
    std::shared_ptr<WgmmaResult> result = result_in(warp, registers, accumulate);
    result->count = n / 2;
    issue(warp, {a, b, nullptr, accumulate, n, result});
}
void wgmma_fence() {
    collect(kWgmmaFence, ~0u, 0);
    if (current->lane != 0) return;
    Warp& warp = *self()->warp;
    if (!std::exchange(warp.fenced, true)) warp.results.clear();  // another one before the wait orders registers of A
}
void wgmma_commit() {
    collect(kWgmmaCommit, ~0u, 0);
    Warp& warp = *self()->warp;
    if (current->lane == 0) warp.committed_before = std::exchange(warp.committed, warp.issued);
}
void wgmma_wait(int left) {
    collect(kWgmmaWait, ~0u, 0);
    Warp& warp = *self()->warp;
    if (warp.committed != warp.issued) fail("wgmma without wgmma.commit_group before the wait");
    if (left > 1) fail("wgmma.wait_group %d: the emulator knows only the last two groups", left);
    const u32 end = left ? warp.committed_before : warp.committed;
    if (current->lane == 0 && !left) warp.fenced = false;
    while (warp.completed < end) block(Wait::kWgmma);
    for (const auto& result : warp.results)
        if (result->last <= end)
            std::copy_n(result->values[current->lane], result->count, result->registers[current->lane]);
}

void store_matrix(u32 row_address, const u32* values, int count, bool transposed) {
    const u64* rows = collect(kStoreMatrix, ~0u, row_address);
    for (int i = 0; i < 2 * count; ++i) {
        int row = current->lane / 4, column = current->lane % 4 * 2 + i % 2;
        if (transposed) std::swap(row, column);
        u32 address = u32(rows[i / 2 * 8 + row]);
        if (address % 16) fail("stmatrix to %u: not aligned", address);
        u16 value = u16(values[i / 2] >> 16 * (i % 2));
        memcpy(shared_of(*self()->cta, address, 16) + column * 2, &value, 2);
        wrote_shared(address, 16);
    }
}

u32 transpose_matrix(u32 two) {
    const u64* rows = collect(kTransposeMatrix, ~0u, two);
    const int row = current->lane / 4, column = current->lane % 4 * 2;
    auto value = [&](int i, int j) { return u32(rows[i * 4 + j / 2]) >> 16 * (j % 2) & 0xFFFF; };
    return value(column, row) | value(column + 1, row) << 16;
}
}  // namespace emu
