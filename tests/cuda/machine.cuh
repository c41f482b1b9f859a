// An emulator of the machine that the kernels of ops/src/*.cu run on, as one C++ header. The kernels' text is compiled
// as it is, against this file in the place of ops/src/device/machine.cuh.
//
// A block runs on one thread of the host; its threads are fibers. A fiber runs until it meets others: at a block
// barrier, or at an operation of its warp. What a GPU would leave undefined is an error here, with the kernel, block
// and thread:
//   - an access outside of an allocation, or to bytes that nobody has written;
//   - two accesses to the same bytes, one of them a write, by threads that no barrier separates;
//   - a barrier that not every thread reaches, lanes of a warp at different operations;
//   - a copy that is read before it was waited for; a 16-byte access to an address that is no multiple of 16.
// Arithmetic is the host's: compiled without contraction, each operation rounds once, to nearest even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>
#include <sys/mman.h>
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
inline thread_local World *attached = nullptr;
inline World &world() { return *attached; }

const size_t STACK = 256 << 10;

#if defined(__x86_64__)
// Saves what a call keeps on the stack and goes on with another one.
extern "C" void emulator_switch(void **save, void *load);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
#endif

inline void to_scheduler() {
#if defined(__x86_64__)
    emulator_switch(&world().now->sp, world().scheduler_sp);
#else
    swapcontext(&world().now->context, &world().scheduler);
#endif
}

inline void fiber_main() {
    world().body(world().body_argument);
    world().now->state = ENDED;
    to_scheduler();
    abort();
}

inline void prepare(Fiber &fiber) {
    if (!fiber.stack && !world().stacks.empty()) {
        fiber.stack = world().stacks.back();
        world().stacks.pop_back();
    }
    if (!fiber.stack) {
        fiber.stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fiber.stack == MAP_FAILED) abort();
    }
#if defined(__x86_64__)
    uint64_t *top = reinterpret_cast<uint64_t *>(static_cast<char *>(fiber.stack) + STACK - 64);
    // As if fiber_main had been called: the stack is 8 beyond a multiple of 16.
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(&fiber_main);
    for (int i = 0; i < 6; i++) *--top = 0;
    fiber.sp = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#endif
}

inline void resume(Fiber &fiber) {
    world().now = &fiber;
#if defined(__x86_64__)
    emulator_switch(&world().scheduler_sp, fiber.sp);
#else
    swapcontext(&world().scheduler, &fiber.context);
#endif
}

inline void fail(const std::string &what) {
    if (world().error.empty()) {
        char place[128];
        snprintf(place, sizeof place, ": block (%u, %u), thread %d: ", world().block.x, world().block.y,
                 world().now ? world().now->thread : -1);
        world().error = world().kernel + place + what;
    }
    if (!world().now) return;
    // This launch is over: nobody comes back to this fiber.
    world().now->state = ENDED;
    to_scheduler();
}

inline Stamp stamp() { return Stamp{world().serial, world().epoch, world().now->warp_epoch, world().now->thread}; }

// Whether the present access comes after the one of `then`, as far as anybody can know.
inline bool ordered(const Stamp &then) {
    if (then.thread < 0 || then.block < world().first_serial) return true;
    if (then.block != world().serial) return false;
    if (then.thread == world().now->thread || then.epoch != world().epoch) return true;
    return then.thread / 32 == world().now->thread / 32 && then.warp_epoch != world().now->warp_epoch;
}

inline std::string where(const Region &region, long at, long bytes) {
    char text[160];
    snprintf(text, sizeof text, "%s memory of %ld bytes, bytes %ld to %ld", region.kind, region.bytes, at, at + bytes);
    return text;
}

inline void touch(Region *region, long at, long bytes, bool writes, bool fills) {
    if (!region) return fail("a null pointer is used");
    if (at < 0 || at + bytes > region->bytes) {
        return fail(std::string(writes ? "writes" : "reads") + " outside: " + where(*region, at, bytes));
    }
    if (at % (bytes > 16 ? 16 : bytes) != 0) return fail("is not aligned: " + where(*region, at, bytes));
    Stamp now = stamp();
    for (long g = at / GRAIN; g < (at + bytes + GRAIN - 1) / GRAIN; g++) {
        Shadow &shadow = region->shadow[g];
        if (!ordered(shadow.write)) return fail("races with a write: " + where(*region, at, bytes));
        if (writes) {
            bool same_warp = shadow.read.thread / 32 == now.thread / 32;
            bool alone = !shadow.read_by_warp && !shadow.read_by_many;
            bool fresh = shadow.read.thread >= 0 && shadow.read.block >= world().first_serial;
            bool conflict = fresh && shadow.read.block != world().serial;
            if (fresh && shadow.read.block == world().serial && shadow.read.epoch == world().epoch) {
                conflict = shadow.read_by_many || !same_warp ||
                           (shadow.read.warp_epoch == now.warp_epoch && !(alone && shadow.read.thread == now.thread));
            }
            if (conflict) return fail("races with a read: " + where(*region, at, bytes));
            shadow.write = now;
            shadow.written = fills;
            shadow.read.thread = -1;
            shadow.read_by_warp = shadow.read_by_many = false;
        } else {
            if (!shadow.written) return fail("reads what nobody has written: " + where(*region, at, bytes));
            Stamp &read = shadow.read;
            bool same = read.thread >= 0 && read.block == now.block && read.epoch == now.epoch;
            if (!same) {
                shadow.read_by_warp = shadow.read_by_many = false;
            } else if (read.thread / 32 != now.thread / 32) {
                shadow.read_by_many = true;
            } else if (read.warp_epoch == now.warp_epoch) {
                shadow.read_by_warp |= read.thread != now.thread;
            } else {
                shadow.read_by_warp = false;
            }
            read = now;
        }
    }
}

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

// Waits for others; the scheduler lets them go together.
inline uint32_t meet(State state, const char *operation, uint32_t value, int argument) {
    Fiber &fiber = *world().now;
    fiber.state = state;
    fiber.operation = operation;
    fiber.value = value;
    fiber.argument = argument;
    to_scheduler();
    return fiber.result;
}

inline void give_results(Fiber *warp) {
    const std::string operation = warp[0].operation;
    for (int lane = 0; lane < 32; lane++) {
        if (operation != warp[lane].operation) {
            world().now = &warp[lane];
            world().error = world().kernel + ": lanes of a warp are at " + operation + " and at " + warp[lane].operation;
            world().now = nullptr;
            return;
        }
    }
    uint32_t any = 0;
    for (int lane = 0; lane < 32; lane++) any |= static_cast<uint32_t>(warp[lane].value != 0) << lane;
    for (int lane = 0; lane < 32; lane++) {
        int from = lane;
        if (operation == "shuffle down") from = lane + warp[lane].argument < 32 ? lane + warp[lane].argument : lane;
        if (operation == "shuffle xor") from = lane ^ warp[lane].argument;
        if (operation == "shuffle") from = warp[lane].argument & 31;
        warp[lane].result = operation == "ballot" ? any : warp[from].value;
        warp[lane].state = RUNS;
        warp[lane].warp_epoch++;
    }
}

inline void run_block() {
    int threads = static_cast<int>(world().fibers.size()), ended = 0;
    world().serial++;
    world().epoch = 0;
    for (auto &entry : world().shared) free(entry.second.data);
    world().shared.clear();
    world().shared_bytes = 0;
    world().rest.shadow.assign(world().rest.bytes / GRAIN, Shadow());
    if (world().rest.bytes) memset(world().rest.data, 0xA5, world().rest.bytes);
    for (int t = 0; t < threads; t++) {
        Fiber &fiber = world().fibers[t];
        fiber.thread = t;
        fiber.index = Dim{static_cast<unsigned>(t), 0, 0};
        fiber.state = RUNS;
        fiber.warp_epoch = 0;
        fiber.groups.clear();
        fiber.open_group.clear();
        prepare(fiber);
    }
    while (ended < threads && world().error.empty()) {
        bool moved = false;
        for (int i = 0; i < threads && world().error.empty(); i++) {
            int t = world().backwards ? threads - 1 - i : i;
            Fiber &fiber = world().fibers[t];
            if (fiber.state != RUNS) continue;
            resume(fiber);
            world().now = nullptr;
            moved = true;
            if (fiber.state == ENDED) ended++;
        }
        if (!world().error.empty()) break;
        for (int first = 0; first < threads; first += 32) {
            int waiting = 0;
            for (int t = first; t < first + 32; t++) waiting += world().fibers[t].state == WARP_OPERATION;
            if (waiting == 32) {
                give_results(&world().fibers[first]);
                moved = true;
            }
        }
        int at_barrier = 0;
        for (auto &fiber : world().fibers) at_barrier += fiber.state == BLOCK_BARRIER;
        if (at_barrier == threads) {
            uint32_t any = 0;
            for (auto &fiber : world().fibers) any |= fiber.value;
            for (auto &fiber : world().fibers) {
                fiber.result = any;
                fiber.state = RUNS;
            }
            world().epoch++;
            moved = true;
        }
        if (!moved) {
            for (auto &fiber : world().fibers) {
                if (fiber.state == ENDED) continue;
                world().error = world().kernel + ": thread " + std::to_string(fiber.thread) + " waits for ever at " +
                              fiber.operation;
                break;
            }
        }
    }
}

template <class T> Pointer<T> shared_array(const char *name, int line, long count) {
    auto key = std::make_pair(name, line);
    auto found = world().shared.find(key);
    if (found == world().shared.end()) {
        long bytes = (count * static_cast<long>(sizeof(T)) + 15) / 16 * 16;
        Region region{"shared", static_cast<char *>(malloc(bytes)), count * static_cast<long>(sizeof(T)), {}};
        memset(region.data, 0xA5, bytes);
        region.shadow.resize(bytes / GRAIN);
        world().shared_bytes += bytes;
        found = world().shared.emplace(key, region).first;
        if (world().shared_bytes > 48 << 10) fail("has more than 48 KiB of static shared memory");
    }
    return Pointer<T>(&found->second, 0);
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
        if (address == 0) return Pointer<T>();
        auto after = world().memory.upper_bound(address);
        if (after == world().memory.begin()) {
            world().error = world().kernel + ": an argument is no address";
            return Pointer<T>();
        }
        --after;
        return Pointer<T>(&after->second, static_cast<long>(address - after->first));
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
    world().body = &Call::run;
    world().body_argument = &call;
    world().backwards = backwards != 0;
    world().grid = Dim{grid[0], grid[1], grid[2]};
    world().block_size = Dim{threads, 1, 1};
    world().first_serial = world().serial + 1;
    for (size_t t = threads; t < world().fibers.size(); t++) world().stacks.push_back(world().fibers[t].stack);
    world().fibers.resize(threads);
    world().rest.bytes = shared;
    world().rest.data = static_cast<char *>(realloc(world().rest.data, shared + 16));
    if (shared > 227 << 10) world().error = world().kernel + ": asks for more than 227 KiB of shared memory";
    unsigned blocks = grid[0] * grid[1] * grid[2];
    for (unsigned i = 0; i < blocks && world().error.empty(); i++) {
        unsigned b = world().backwards ? blocks - 1 - i : i;
        world().block = Dim{b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block();
    }
    return world().error.empty() ? nullptr : world().error.c_str();
}

}  // namespace emulator

// The host's side. A world is the memory of one device, for one thread of the host at a time.
#define VISIBLE extern "C" __attribute__((visibility("default")))
#ifdef EMULATOR_MEMORY
namespace emulator {
inline Region *find(World *here, uint64_t address, uint64_t count, uint64_t &at) {
    auto after = here->memory.upper_bound(address);
    if (after == here->memory.begin()) return nullptr;
    --after;
    at = address - after->first;
    return at + count <= static_cast<uint64_t>(after->second.bytes) ? &after->second : nullptr;
}
}  // namespace emulator

// Stacks of worlds that are gone.
static std::mutex spare_guard;
static std::vector<void *> spare;
VISIBLE emulator::World *emulator_new() {
    auto *here = new emulator::World();
    std::lock_guard<std::mutex> guard(spare_guard);
    std::swap(here->stacks, spare);
    return here;
}
VISIBLE void emulator_delete(emulator::World *here) {
    for (auto &region : here->memory) free(reinterpret_cast<void *>(region.first));
    for (auto &fiber : here->fibers) if (fiber.stack) here->stacks.push_back(fiber.stack);
    std::lock_guard<std::mutex> guard(spare_guard);
    spare.insert(spare.end(), here->stacks.begin(), here->stacks.end());
    free(here->rest.data);
    delete here;
}
VISIBLE uint64_t emulator_allocate(emulator::World *here, uint64_t bytes) {
    uint64_t room = (bytes + 255) / 256 * 256 + 256;
    char *data = static_cast<char *>(aligned_alloc(256, room));
    if (!data) return 0;
    memset(data, 0xA5, room);
    emulator::Region region{"global", data, static_cast<long>(bytes), {}};
    region.shadow.resize(bytes / emulator::GRAIN + 8);
    uint64_t address = reinterpret_cast<uint64_t>(data);
    here->memory[address] = region;
    return address;
}
VISIBLE void emulator_free(emulator::World *here, uint64_t address) {
    free(reinterpret_cast<void *>(address));
    here->memory.erase(address);
}
// The first bytes of an allocation have a new owner: whoever reads them before they are written makes a mistake, and so
// does whoever goes beyond them.
VISIBLE void emulator_lend(emulator::World *here, uint64_t address, uint64_t bytes) {
    emulator::Region &region = here->memory[address];
    memset(region.data, 0xA5, region.bytes);
    region.bytes = static_cast<long>(bytes);
    region.shadow.assign(region.shadow.size(), emulator::Shadow());
}
// 0: done; 1: no such place; 2: a byte was never written.
VISIBLE int emulator_write(emulator::World *here, uint64_t address, const void *bytes, uint64_t count) {
    uint64_t at;
    emulator::Region *region = emulator::find(here, address, count, at);
    if (!region) return 1;
    memcpy(region->data + at, bytes, count);
    for (uint64_t g = at / emulator::GRAIN; g < (at + count + 1) / emulator::GRAIN; g++) {
        region->shadow[g] = emulator::Shadow();
        region->shadow[g].written = true;
    }
    return 0;
}
VISIBLE int emulator_read(emulator::World *here, uint64_t address, void *bytes, uint64_t count) {
    uint64_t at;
    emulator::Region *region = emulator::find(here, address, count, at);
    if (!region) return 1;
    for (uint64_t g = at / emulator::GRAIN; g < (at + count + 1) / emulator::GRAIN; g++) {
        if (!region->shadow[g].written) return 2;
    }
    memcpy(bytes, region->data + at, count);
    return 0;
}
// As it stands, whether or not somebody has written it. 0: done; 1: no such places.
VISIBLE int emulator_copy(emulator::World *here, uint64_t from, uint64_t to, uint64_t count) {
    uint64_t from_at, to_at;
    emulator::Region *source = emulator::find(here, from, count, from_at), *target = emulator::find(here, to, count, to_at);
    if (!source || !target) return 1;
    memmove(target->data + to_at, source->data + from_at, count);
    for (uint64_t g = 0; g < (count + 1) / emulator::GRAIN; g++) {
        bool written = source->shadow[from_at / emulator::GRAIN + g].written;
        emulator::Shadow &shadow = target->shadow[to_at / emulator::GRAIN + g];
        shadow = emulator::Shadow();
        shadow.written = written;
    }
    return 0;
}
#endif

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
    emulator::Copy copy{to.region, to.at, {}};
    memcpy(copy.bytes, &value, 16);
    emulator::world().now->open_group.push_back(copy);
}
inline void async_commit() {
    emulator::Fiber &fiber = *emulator::world().now;
    fiber.groups.push_back(std::move(fiber.open_group));
    fiber.open_group.clear();
}
template <int Left> void async_wait() {
    auto &groups = emulator::world().now->groups;
    while (groups.size() > static_cast<size_t>(Left)) {
        for (auto &copy : groups.front()) {
            emulator::touch(copy.region, copy.at, 16, true, true);
            memcpy(copy.region->data + copy.at, copy.bytes, 16);
        }
        groups.erase(groups.begin());
    }
}

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
