// What a kernel asks of the machine beside arithmetic: memory, copies, and instructions that C++ has no name for.
// tests/cuda/machine.cuh says the same things in terms of an emulator; no other file is different there.
#pragma once

// A pointer argument. No two arguments of a kernel overlap.
#define GLOBAL(T) T *__restrict__
// One through which the kernel reads what it wrote.
#define REREAD(T) T *
// A pointer into the shared memory of a block.
#define SHARED_POINTER(T) T *
// An array in the shared memory of a block.
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]
// The part of the shared memory whose size the launch gives.
#define SHARED_REST(T, name) extern __shared__ __align__(16) T name[]
#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks) void

// The same place, to hold elements of another type.
template <class T, class U> DEVICE T *as_elements(U *at) { return reinterpret_cast<T *>(at); }

// 16 bytes, from an address that is a multiple of 16.
template <class T> DEVICE uint4 load16(const T *from) { return *reinterpret_cast<const uint4 *>(from); }
// 16 bytes that nobody reads again.
template <class T> DEVICE uint4 load16_once(const T *from) { return __ldcs(reinterpret_cast<const uint4 *>(from)); }
template <class T> DEVICE void store16(T *to, uint4 value) { *reinterpret_cast<uint4 *>(to) = value; }
// 8 bytes, from an address that is a multiple of 8.
template <class T> DEVICE uint2 load8_raw(const T *from) { return *reinterpret_cast<const uint2 *>(from); }
template <class T> DEVICE bool aligned16(const T *at) { return (reinterpret_cast<unsigned long long>(at) & 15) == 0; }

// Begins to copy 16 bytes to shared memory; the bytes are there after async_wait, for others after a barrier as well.
template <class T> DEVICE void async_copy16(T *to, const T *from) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// Ends a group of copies.
DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Left` of this thread's groups are under way.
template <int Left> DEVICE void async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory"); }

DEVICE float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
// To nearest even, with gradual underflow.
DEVICE unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// The larger and the smaller of two pairs of bf16; a NaN wins.
DEVICE unsigned max_pair(unsigned a, unsigned b) {
    unsigned c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
DEVICE unsigned min_pair(unsigned a, unsigned b) {
    unsigned c;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
