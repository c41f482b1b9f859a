// Stands for libcuda and libnvrtc beside test_cuda.py, where there is no GPU: the kernels' own text runs in the emulator
// of tests/cuda. There are two devices, each with a memory of its own. A stream is a queue that is worked off when somebody
// waits for it, so what is read, freed or asked for too early is seen every time; where a GPU would go wrong in silence, the
// wait fails and cuda_said() says why.
#include <deque>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include "machine.cuh"

VISIBLE emulator::World *emulator_new();
VISIBLE uint64_t emulator_allocate(emulator::World *here, uint64_t bytes);
VISIBLE void emulator_free(emulator::World *here, uint64_t address);
VISIBLE int emulator_write(emulator::World *here, uint64_t address, const void *bytes, uint64_t count);
VISIBLE int emulator_read(emulator::World *here, uint64_t address, void *bytes, uint64_t count);
VISIBLE int emulator_copy(emulator::World *here, uint64_t from, uint64_t to, uint64_t count);

typedef const char *(*Start)(emulator::World *, const unsigned *, unsigned, unsigned, const void *const *, int, int);

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, FOREIGN = 400, CAPTURING = 900, LAUNCH_FAILED = 719, DEVICES = 2 };

struct Stream {
    int device;
    bool capturing = false;
    std::deque<std::function<void()>> queue;
};
struct Device {
    emulator::World *world = emulator_new();
    Stream standard;
    std::set<uint64_t> live;
    int retained = 0;
};
struct Module {
    int device;
    void *library;
};
struct Function {
    int device, count;
    Start start;
    const int *sizes;
};

static std::recursive_mutex guard;
static Device *devices = new Device[DEVICES];
static thread_local Device *current;
static std::string said;
static int launched, waited;
#define LOCKED std::lock_guard<std::recursive_mutex> locked(guard)
#define NEEDS_CONTEXT LOCKED; if (!current || !current->retained) return INVALID_CONTEXT
static int here() { return static_cast<int>(current - devices); }

static Stream *stream_of(Stream *handle) {
    return reinterpret_cast<uintptr_t>(handle) <= 1 ? &current->standard : handle;
}
static void wrong(const std::string &what) {
    if (said.empty()) said = what;
}
// Puts work behind what is in a stream of the current context.
static int later(Stream *handle, std::function<void()> work) {
    Stream *stream = stream_of(handle);
    if (stream != &current->standard && stream->device != here()) return FOREIGN;
    if (!stream->capturing) stream->queue.push_back(std::move(work));
    return 0;
}
static int work_off(Stream *stream) {
    if (stream->capturing) return CAPTURING;
    while (!stream->queue.empty()) {
        auto work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work();
    }
    return said.empty() ? 0 : LAUNCH_FAILED;
}

// For the tests: what went wrong since they last asked, kernels that ran, waits, allocations that live, and what stands in
// the queue of a stream.
VISIBLE const char *cuda_said() {
    static std::string last;
    LOCKED;
    last.swap(said);
    said.clear();
    return last.c_str();
}
VISIBLE int cuda_launched() { return launched; }
VISIBLE int cuda_waited() { return waited; }
VISIBLE int cuda_live(int device) { return static_cast<int>(devices[device].live.size()); }
VISIBLE int cuda_queued(Stream *stream) { return static_cast<int>(stream_of(stream)->queue.size()); }

VISIBLE int cuInit(unsigned) { return 0; }
VISIBLE int cuDeviceGetCount(int *count) { return *count = DEVICES, 0; }
VISIBLE int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < DEVICES ? 0 : INVALID_VALUE; }
VISIBLE int cuDeviceGetName(char *name, int len, int) { return snprintf(name, len, "emulator"), 0; }
VISIBLE int cuDeviceGetAttribute(int *value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
VISIBLE int cuDevicePrimaryCtxRetain(Device **context, int device) {
    LOCKED;
    *context = &devices[device];
    devices[device].standard.device = device;
    return devices[device].retained++, 0;
}
VISIBLE int cuDevicePrimaryCtxRelease_v2(int device) { LOCKED; return devices[device].retained--, 0; }
VISIBLE int cuCtxSetCurrent(Device *context) { return current = context, 0; }
VISIBLE int cuCtxGetCurrent(Device **context) { return *context = current, 0; }

VISIBLE int cuStreamCreate(Stream **stream, unsigned) { NEEDS_CONTEXT; return *stream = new Stream{here(), false, {}}, 0; }
VISIBLE int cuStreamSynchronize(Stream *stream) { NEEDS_CONTEXT; return waited++, work_off(stream_of(stream)); }
VISIBLE int cuStreamIsCapturing(Stream *stream, int *status) { NEEDS_CONTEXT; return *status = stream_of(stream)->capturing, 0; }
VISIBLE int cuStreamBeginCapture_v2(Stream *stream, int) { NEEDS_CONTEXT; return stream->capturing = true, 0; }
VISIBLE int cuStreamEndCapture(Stream *stream, void **graph) { NEEDS_CONTEXT; return *graph = nullptr, stream->capturing = false, 0; }

static int allocate(uint64_t *address, uint64_t bytes) {
    *address = emulator_allocate(current->world, bytes);
    current->live.insert(*address);
    return 0;
}
static void give_back(Device *device, uint64_t address) {
    if (!device->live.erase(address)) return wrong("memory is given back that is not there");
    emulator_free(device->world, address);
}
VISIBLE int cuMemAlloc_v2(uint64_t *address, uint64_t bytes) { NEEDS_CONTEXT; return allocate(address, bytes); }
VISIBLE int cuMemFree_v2(uint64_t address) { NEEDS_CONTEXT; return give_back(current, address), 0; }
VISIBLE int cuMemAllocAsync(uint64_t *address, uint64_t bytes, Stream *) { NEEDS_CONTEXT; return allocate(address, bytes); }
VISIBLE int cuMemFreeAsync(uint64_t address, Stream *stream) {
    NEEDS_CONTEXT;
    return later(stream, [device = current, address] { give_back(device, address); });
}
VISIBLE int cuMemHostAlloc(void **start, size_t bytes, unsigned) { return *start = malloc(bytes), 0; }
VISIBLE int cuMemFreeHost(void *start) { return free(start), 0; }
VISIBLE int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    return later(stream, [device = current, to, from, bytes] {
        if (emulator_write(device->world, to, from, bytes)) wrong("a copy goes to memory that is not there");
    });
}
VISIBLE int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    return later(stream, [device = current, to, from, bytes] {
        int bad = emulator_read(device->world, from, to, bytes);
        if (bad) wrong(bad == 1 ? "a copy comes from memory that is not there" : "the host reads what nobody has written");
    });
}
VISIBLE int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    return later(stream, [device = current, to, from, bytes] {
        if (emulator_copy(device->world, from, to, bytes)) wrong("a copy between places that are not there");
    });
}
VISIBLE int cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *of) {
    NEEDS_CONTEXT;
    return later(stream, [function, of] { function(of); });
}

VISIBLE int cuModuleLoadData(Module **module, const void *image) {
    NEEDS_CONTEXT;
    void *library = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!library) return INVALID_VALUE;
    return *module = new Module{here(), library}, 0;
}
VISIBLE int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    NEEDS_CONTEXT;
    auto start = reinterpret_cast<Start>(dlsym(module->library, (std::string("emulated_") + name).c_str()));
    auto sizes = reinterpret_cast<int (*)(const int **)>(dlsym(module->library, (std::string("sizes_") + name).c_str()));
    if (!start || !sizes) return INVALID_VALUE;
    const int *each;
    int count = sizes(&each);
    return *function = new Function{module->device, count, start, each}, 0;
}
VISIBLE int cuModuleUnload(Module *module) { LOCKED; return delete module, 0; }
VISIBLE int cuFuncSetAttribute(Function *, int, int) { return 0; }
VISIBLE int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                           unsigned shared, Stream *stream, void **arguments, void **) {
    NEEDS_CONTEXT;
    if (function->device != here()) return FOREIGN;
    auto copy = std::make_shared<std::vector<std::vector<uint64_t>>>();
    for (int i = 0; i < function->count; i++) {
        copy->emplace_back((function->sizes[i] + 7) / 8);
        memcpy(copy->back().data(), arguments[i], function->sizes[i]);
    }
    return later(stream, [=, device = current] {
        std::vector<const void *> pointers;
        for (auto &argument : *copy) pointers.push_back(argument.data());
        unsigned grid[] = {x, y, z};
        launched++;
        const char *error = function->start(device->world, grid, threads, shared, pointers.data(), function->count, 0);
        if (error) wrong(error);
    });
}

// The compiler: a program is the folder of a library, and its machine code the name of that.
struct Program {
    std::string name, source, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

static std::string run(const std::string &command) {
    FILE *pipe = popen((command + " 2>&1").c_str(), "r");
    std::string text;
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
    return pclose(pipe) == 0 ? text : "ERROR\n" + text;
}
static void write(const std::string &path, const std::string &text) { std::ofstream(path) << text; }

VISIBLE int nvrtcVersion(int *major, int *minor) { return *major = 0, *minor = 0, 0; }
VISIBLE int nvrtcCreateProgram(Program **program, const char *source, const char *name, int count, const char **texts, const char **names) {
    *program = new Program{name, source, "", "", {}};
    for (int i = 0; i < count; i++) {
        if (std::string(names[i]) != "machine.cuh") (*program)->headers.emplace_back(names[i], texts[i]);
    }
    return 0;
}
VISIBLE int nvrtcCompileProgram(Program *program, int count, const char **options) {
    const char *home = getenv("SAMEBITS_TEST_CUDA");  // what test_cuda.py has made
    std::string definitions, all = program->source;
    for (int i = 0; i < count; i++) if (!strncmp(options[i], "-D", 2)) definitions += std::string(" ") + options[i];
    for (auto &header : program->headers) all += header.first + header.second;
    std::ostringstream place;
    place << home << "/" << program->name << "-" << std::hex << std::hash<std::string>()(all + definitions);
    std::string folder = place.str(), unit = folder + "/unit.so";
    program->code = unit;
    if (access(unit.c_str(), R_OK) == 0) return 0;
    mkdir(folder.c_str(), 0777);
    write(folder + "/" + program->name, program->source);
    for (auto &header : program->headers) write(folder + "/" + header.first, header.second);
    // Names of kernels that macros make are known behind the preprocessor.
    std::string text = run(std::string("c++ -E -P -w -x c++ -I ") + home + "/names" + definitions + " " + folder + "/" + program->name);
    std::string exports;
    std::regex kernel("SAMEBITS_KERNEL\\s+(\\w+)\\s*\\(");
    for (std::sregex_iterator found(text.begin(), text.end(), kernel), end; found != end; ++found) {
        exports += "EXPORT(" + (*found)[1].str() + ")\nSIZES(" + (*found)[1].str() + ")\n";
    }
    write(folder + "/unit.cpp", "#include \"" + program->name + "\"\n" + exports);
    std::ifstream given(std::string(home) + "/options");
    std::string flags((std::istreambuf_iterator<char>(given)), std::istreambuf_iterator<char>());
    program->log = run("cd " + folder + " && c++ " + flags + definitions + " -include " + home + "/machine.hpp -I " + home +
                       " -shared unit.cpp " + home + "/machine.o -o unit.part && mv unit.part unit.so");
    return access(unit.c_str(), R_OK) == 0 ? 0 : 6;
}
VISIBLE int nvrtcGetCUBINSize(Program *program, size_t *bytes) { return *bytes = program->code.size() + 1, 0; }
VISIBLE int nvrtcGetCUBIN(Program *program, char *code) { return strcpy(code, program->code.c_str()), 0; }
VISIBLE int nvrtcGetPTXSize(Program *, size_t *bytes) { return *bytes = 1, 0; }
VISIBLE int nvrtcGetPTX(Program *, char *text) { return *text = 0, 0; }
VISIBLE int nvrtcGetProgramLogSize(Program *program, size_t *bytes) { return *bytes = program->log.size() + 1, 0; }
VISIBLE int nvrtcGetProgramLog(Program *program, char *log) { return strcpy(log, program->log.c_str()), 0; }
VISIBLE int nvrtcDestroyProgram(Program **program) { return delete *program, 0; }
