// An emulator of the machine that the kernels of ops/src/*.cu run on, as one C++ header. The kernels' text is compiled
// as it is, against this file in the place of ops/src/device/machine.cuh.
//
// A block runs on one thread of the host; its threads are fibers. A fiber runs until it meets others: at a block
// barrier, or at an operation of its warp. What a GPU would leave undefined is an error here, with the kernel, block
// and thread:
//   - an access outside of an allocation, or to bytes that nobody has written;
//   - two accesses to the same bytes, one of them a write, by threads that no barrier separates (votes and shuffles are none);
//   - a barrier that not every thread reaches, lanes of a warp at different operations;
//   - a copy that is read before it was waited for; a 16-byte access to an address that is no multiple of 16.
// Arithmetic is the host's: compiled without contraction, each operation rounds once, to nearest even.
#ifndef EMULATOR_MACHINE
#define EMULATOR_MACHINE
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
struct Dim {
    unsigned x, y, z;
};

namespace emulator {

// Who touched some bytes, and when: barriers of the block and of the warp that the thread has passed.
struct Stamp {
    uint32_t block = 0, epoch = 0, warp_epoch = 0;
    int32_t thread = -1;
};
// What is known about two bytes.
struct Shadow {
    Stamp write, read;
    // Other threads of the same warp, or of other warps, have read since the last barrier too.
    bool read_by_warp = false, read_by_many = false;
    bool written = false;
};
const long GRAIN = 2;

struct Region {
    const char *kind;
    char *data;
    long bytes;
    std::vector<Shadow> shadow;
};

enum State { RUNS, BLOCK_BARRIER, WARP_OPERATION, ENDED };

struct Copy {
    Region *region;
    long at;
    char bytes[16];
};

struct Fiber {
    int thread = 0;
    State state = RUNS;
    Dim index{};
    void *stack = nullptr;
    void *sp = nullptr;
    uint32_t warp_epoch = 0;
    // The operation it waits in, and what it brings and takes.
    const char *operation = "";
    uint32_t value = 0, result = 0;
    int argument = 0;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open_group;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
};

// What differs from launch to launch; one launch at a time.
struct World {
    std::string kernel, error;
    std::map<uint64_t, Region> memory;
    Dim grid{}, block_size{}, block{};
    uint32_t serial = 0, first_serial = 1, epoch = 0;
    std::vector<Fiber> fibers;
    // Of fibers that a later launch may need again: the system takes long to give and take them.
    std::vector<void *> stacks;
    Fiber *now = nullptr;
    std::map<std::pair<const char *, int>, Region> shared;
    Region rest{"dynamic shared", nullptr, 0, {}};
    long shared_bytes = 0;
    bool backwards = false;
    void (*body)(void *) = nullptr;
    void *body_argument = nullptr;
    void *scheduler_sp = nullptr;
#if !defined(__x86_64__)
    ucontext_t scheduler;
#endif
};
// The world of the launch that this host thread carries out.
extern __thread World *attached;
inline World &world() { return *attached; }

// Ends the launch with an error.
void fail(const std::string &what);
// Checks an access to `bytes` bytes, and keeps who made it; `fills` is false for bytes that are nobody's yet.
void touch(Region *region, long at, long bytes, bool writes, bool fills);
// Waits for others; the scheduler lets them go together.
uint32_t meet(State state, const char *operation, uint32_t value, int argument);
// The static shared memory of this name and line.
Region *shared_region(const char *name, int line, long bytes);
// The memory at an address that the host gives, and where in it that is; null for the address 0.
Region *find_argument(uint64_t address, long &at);
// Runs a kernel, block by block; returns null, or what was wrong.
const char *run(const unsigned *grid, unsigned threads, unsigned shared, bool backwards, void (*body)(void *), void *argument);
// 16 bytes that nobody may read before they were waited for, and the groups of them.
void keep_copy(Region *region, long at, const void *bytes);
void close_group();
void wait_for_groups(size_t left);

// Access to one element.
template <class T> struct Ref {
    Region *region;
    long at;
    operator T() const {
        touch(region, at, sizeof(T), false, true);
        typename std::remove_const<T>::type value;
        memcpy(&value, region->data + at, sizeof(T));
        return value;
    }
    Ref &operator=(T value) {
        touch(region, at, sizeof(T), true, true);
        memcpy(region->data + at, &value, sizeof(T));
        return *this;
    }
    Ref &operator=(const Ref &other) { return *this = static_cast<T>(other); }
};
template <class T> struct Ref<const T> {
    Region *region;
    long at;
    operator T() const { return Ref<T>{region, at}; }
};

template <class T> struct Pointer {
    Region *region = nullptr;
    long at = 0;
    Pointer() = default;
    Pointer(Region *region, long at) : region(region), at(at) {}
    // A pointer to const of the same place.
    template <class U> Pointer(const Pointer<U> &other) : region(other.region), at(other.at) {
        static_assert(std::is_same<const U, T>::value, "only const is added");
    }
    Ref<T> operator[](long long i) const { return Ref<T>{region, at + static_cast<long>(i * sizeof(T))}; }
    Pointer operator+(long long i) const { return Pointer(region, at + static_cast<long>(i * sizeof(T))); }
};

template <class T> Pointer<T> shared_array(const char *name, int line, long count) {
    return Pointer<T>(shared_region(name, line, count * static_cast<long>(sizeof(T))), 0);
}

// A kernel's argument from the bytes that the host gives.
template <class T> struct Argument {
    static T read(const void *bytes) {
        T value;
        memcpy(&value, bytes, sizeof(T));
        return value;
    }
};
template <class T> struct Argument<Pointer<T>> {
    static Pointer<T> read(const void *bytes) {
        uint64_t address;
        memcpy(&address, bytes, 8);
        long at = 0;
        Region *region = find_argument(address, at);
        return Pointer<T>(region, at);
    }
};

template <class Function> struct Caller;
template <class... A> struct Caller<void (*)(A...)> {
    typedef void (*Function)(A...);
    Function function;
    std::tuple<A...> arguments;
    static void run(void *self) {
        auto *caller = static_cast<Caller *>(self);
        std::apply(caller->function, caller->arguments);
    }
    template <size_t... I>
    static std::tuple<A...> read(const void *const *arguments, std::index_sequence<I...>) {
        return std::tuple<A...>(Argument<A>::read(arguments[I])...);
    }
};

template <class... A>
const char *launch(World *here, const char *name, void (*function)(A...), const unsigned *grid, unsigned threads, unsigned shared,
                   const void *const *arguments, int count, int backwards) {
    attached = here;
    world().kernel = name;
    world().error.clear();
    world().now = nullptr;
    if (count != static_cast<int>(sizeof...(A))) {
        world().error = world().kernel + ": is given " + std::to_string(count) + " arguments and takes " + std::to_string(sizeof...(A));
        return world().error.c_str();
    }
    typedef Caller<void (*)(A...)> Call;
    Call call{function, Call::read(arguments, std::index_sequence_for<A...>())};
    return run(grid, threads, shared, backwards != 0, &Call::run, &call);
}

}  // namespace emulator

#define VISIBLE extern "C" __attribute__((visibility("default")))
#define EXPORT(name)                                                                                                   \
    VISIBLE const char *emulated_##name(emulator::World *here, const unsigned *grid, unsigned threads,                 \
                                        unsigned shared, const void *const *arguments, int count, int backwards) {     \
        return emulator::launch(here, #name, &name, grid, threads, shared, arguments, count, backwards);               \
    }

// What the kernels see.

#define GLOBAL(T) emulator::Pointer<T>
#define REREAD(T) emulator::Pointer<T>
#define SHARED_POINTER(T) emulator::Pointer<T>
#define SHARED(T, name, count) auto name = emulator::shared_array<T>(#name, __LINE__, count)
#define SHARED_REST(T, name) auto name = emulator::Pointer<T>(&emulator::world().rest, 0)
#define DEVICE inline
#define KERNEL(threads, blocks) static void

#define threadIdx (emulator::world().now->index)
#define blockIdx (emulator::world().block)
#define blockDim (emulator::world().block_size)
#define gridDim (emulator::world().grid)

template <class T, class U> emulator::Pointer<T> as_elements(emulator::Pointer<U> at) {
    return emulator::Pointer<T>(at.region, at.at);
}
template <class T> uint4 load16(emulator::Pointer<T> from) {
    emulator::touch(from.region, from.at, 16, false, true);
    uint4 value;
    memcpy(&value, from.region->data + from.at, 16);
    return value;
}
template <class T> uint4 load16_once(emulator::Pointer<T> from) { return load16(from); }
template <class T> void store16(emulator::Pointer<T> to, uint4 value) {
    emulator::touch(to.region, to.at, 16, true, true);
    memcpy(to.region->data + to.at, &value, 16);
}
template <class T> uint2 load8_raw(emulator::Pointer<T> from) {
    emulator::touch(from.region, from.at, 8, false, true);
    uint2 value;
    memcpy(&value, from.region->data + from.at, 8);
    return value;
}
template <class T> bool aligned16(emulator::Pointer<T> at) { return at.at % 16 == 0; }

template <class T, class U> void async_copy16(emulator::Pointer<T> to, emulator::Pointer<U> from) {
    uint4 value = load16(from);
    // The bytes are nobody's until they are waited for.
    emulator::touch(to.region, to.at, 16, true, false);
    emulator::keep_copy(to.region, to.at, &value);
}
inline void async_commit() { emulator::close_group(); }
template <int Left> void async_wait() { emulator::wait_for_groups(Left); }

inline void __syncthreads() { emulator::meet(emulator::BLOCK_BARRIER, "block barrier", 0, 0); }
inline int __syncthreads_or(int value) { return emulator::meet(emulator::BLOCK_BARRIER, "block barrier", value != 0, 0) != 0; }
inline void __syncwarp() { emulator::meet(emulator::WARP_OPERATION, "warp barrier", 0, 0); }
inline uint32_t emulator_bits(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float emulator_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
inline unsigned emulator_shuffle(const char *how, unsigned mask, unsigned v, int argument) {
    if (mask != 0xFFFFFFFFu) emulator::fail("a shuffle without all lanes is not emulated");
    return emulator::meet(emulator::WARP_OPERATION, how, v, argument);
}
inline float __shfl_down_sync(unsigned mask, float v, int by) {
    return emulator_float(emulator_shuffle("shuffle down", mask, emulator_bits(v), by));
}
inline float __shfl_xor_sync(unsigned mask, float v, int by) {
    return emulator_float(emulator_shuffle("shuffle xor", mask, emulator_bits(v), by));
}
inline unsigned __shfl_xor_sync(unsigned mask, unsigned v, int by) { return emulator_shuffle("shuffle xor", mask, v, by); }
inline float __shfl_sync(unsigned mask, float v, int from) {
    return emulator_float(emulator_shuffle("shuffle", mask, emulator_bits(v), from));
}
inline bool __any_sync(unsigned mask, bool v) { return emulator_shuffle("ballot", mask, v, 0) != 0; }
inline unsigned __ballot_sync(unsigned mask, bool v) { return emulator_shuffle("ballot", mask, v, 0); }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline unsigned __brev(unsigned v) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (v >> bit & 1u) << (31 - bit);
    return reversed;
}

inline unsigned __float_as_uint(float v) { return emulator_bits(v); }
inline float __uint_as_float(unsigned bits) { return emulator_float(bits); }
inline long long __double_as_longlong(double v) {
    long long bits;
    memcpy(&bits, &v, 8);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double v;
    memcpy(&v, &bits, 8);
    return v;
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

inline float half_to_float(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) return emulator_float((bits & 0x8000u) << 16 | 0x7F800000u | static_cast<unsigned>(fraction) << 13);
    return static_cast<float>(bits & 0x8000 ? -value : value);
}
inline unsigned short float_to_half(float value) {
    unsigned sign = emulator_bits(value) >> 16 & 0x8000u;
    double size = std::fabs(static_cast<double>(value));
    if (size >= 65520.0) return static_cast<unsigned short>(sign | 0x7C00u);
    if (size < std::ldexp(1.0, -14)) return static_cast<unsigned short>(sign | static_cast<unsigned>(std::nearbyint(std::ldexp(size, 24))));
    int e = std::ilogb(size);
    unsigned fraction = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - e)));
    return static_cast<unsigned short>(sign | ((static_cast<unsigned>(e + 15) << 10) + fraction - 1024));
}
inline unsigned pairwise(unsigned a, unsigned b, bool larger) {
    unsigned result = 0;
    for (int half = 0; half < 2; half++) {
        unsigned x = a >> 16 * half & 0xFFFF, y = b >> 16 * half & 0xFFFF;
        float u = emulator_float(x << 16), v = emulator_float(y << 16);
        unsigned chosen;
        if (u != u || v != v) {
            chosen = 0x7FFF;
        } else {
            chosen = (larger ? u > v : u < v) ? x : y;
        }
        result |= chosen << 16 * half;
    }
    return result;
}
inline unsigned max_pair(unsigned a, unsigned b) { return pairwise(a, b, true); }
inline unsigned min_pair(unsigned a, unsigned b) { return pairwise(a, b, false); }
#endif
