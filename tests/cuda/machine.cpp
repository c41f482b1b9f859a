// What machine.cuh declares: threads that take turns, what is known of memory, and the side of the host. Compiled once;
// every kernel is linked with it.
#include "machine.cuh"
#include <cstdio>
#include <mutex>
#include <sys/mman.h>

namespace emulator {

__thread World *attached = nullptr;

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

static void to_scheduler() {
#if defined(__x86_64__)
    emulator_switch(&world().now->sp, world().scheduler_sp);
#else
    swapcontext(&world().now->context, &world().scheduler);
#endif
}

static void fiber_main() {
    world().body(world().body_argument);
    world().now->state = ENDED;
    to_scheduler();
    abort();
}

static void prepare(Fiber &fiber) {
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

static void resume(Fiber &fiber) {
    world().now = &fiber;
#if defined(__x86_64__)
    emulator_switch(&world().scheduler_sp, fiber.sp);
#else
    swapcontext(&world().scheduler, &fiber.context);
#endif
}

void fail(const std::string &what) {
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

static Stamp stamp() { return Stamp{world().serial, world().epoch, world().now->warp_epoch, world().now->thread}; }

// Whether the present access comes after the one of `then`, as far as anybody can know.
static bool ordered(const Stamp &then) {
    if (then.thread < 0 || then.block < world().first_serial) return true;
    if (then.block != world().serial) return false;
    if (then.thread == world().now->thread || then.epoch != world().epoch) return true;
    return then.thread / 32 == world().now->thread / 32 && then.warp_epoch != world().now->warp_epoch;
}

static std::string where(const Region &region, long at, long bytes) {
    char text[160];
    snprintf(text, sizeof text, "%s memory of %ld bytes, bytes %ld to %ld", region.kind, region.bytes, at, at + bytes);
    return text;
}

void touch(Region *region, long at, long bytes, bool writes, bool fills) {
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

// Waits for others; the scheduler lets them go together.
uint32_t meet(State state, const char *operation, uint32_t value, int argument) {
    Fiber &fiber = *world().now;
    fiber.state = state;
    fiber.operation = operation;
    fiber.value = value;
    fiber.argument = argument;
    to_scheduler();
    return fiber.result;
}

static void give_results(Fiber *warp) {
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
        // Votes and shuffles exchange their own value; what lanes wrote to memory only a barrier orders.
        if (operation == "warp barrier") warp[lane].warp_epoch++;
    }
}

static void run_block() {
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

Region *shared_region(const char *name, int line, long bytes) {
    auto key = std::make_pair(name, line);
    auto found = world().shared.find(key);
    if (found == world().shared.end()) {
        long room = (bytes + 15) / 16 * 16;
        Region region{"shared", static_cast<char *>(malloc(room)), bytes, {}};
        memset(region.data, 0xA5, room);
        region.shadow.resize(room / GRAIN);
        world().shared_bytes += room;
        found = world().shared.emplace(key, region).first;
        if (world().shared_bytes > 48 << 10) fail("has more than 48 KiB of static shared memory");
    }
    return &found->second;
}

Region *find_argument(uint64_t address, long &at) {
    if (address == 0) return nullptr;
    auto after = world().memory.upper_bound(address);
    if (after == world().memory.begin()) {
        world().error = world().kernel + ": an argument is no address";
        return nullptr;
    }
    --after;
    at = static_cast<long>(address - after->first);
    return &after->second;
}

const char *run(const unsigned *grid, unsigned threads, unsigned shared, bool backwards, void (*body)(void *), void *argument) {
    world().body = body;
    world().body_argument = argument;
    world().backwards = backwards;
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

void keep_copy(Region *region, long at, const void *bytes) {
    Copy copy{region, at, {}};
    memcpy(copy.bytes, bytes, sizeof copy.bytes);
    world().now->open_group.push_back(copy);
}

void close_group() {
    Fiber &fiber = *world().now;
    fiber.groups.push_back(std::move(fiber.open_group));
    fiber.open_group.clear();
}

void wait_for_groups(size_t left) {
    auto &groups = world().now->groups;
    while (groups.size() > left) {
        for (auto &copy : groups.front()) {
            touch(copy.region, copy.at, 16, true, true);
            memcpy(copy.region->data + copy.at, copy.bytes, 16);
        }
        groups.erase(groups.begin());
    }
}

}  // namespace emulator

// The host's side. A world is the memory of one device, for one thread of the host at a time.
namespace emulator {
static Region *find(World *here, uint64_t address, uint64_t count, uint64_t &at) {
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
