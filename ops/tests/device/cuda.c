// Stands for libcuda and libnvrtc in tests of the driver. A stream is a queue that is worked off when it is waited for, so
// that whatever is read or freed too early is. A handle that was destroyed, and an address that is in no live allocation, is
// refused and counted. Device memory is the host's; kernels compute nothing.
#include <stdlib.h>
#include <string.h>

// What is live, how often memory or code was taken from under something that was queued, and how often a handle or an address
// was none.
int memory, host, modules, streams, events, graphs, execs, contexts, torn, queued, refused;

enum { INVALID_VALUE = 1, INVALID_HANDLE = 400, NOT_READY = 600 };

// A handle is the place of an object, which is never given to another one.
enum kind { STREAM, EVENT, MODULE, GRAPH, EXEC };
struct object { enum kind kind; int live, recorded; };

static int make(void **handle, enum kind kind, int *count) {
    struct object *object = calloc(1, sizeof *object);
    object->kind = kind, object->live = 1, *handle = object;
    return ++*count, 0;
}
static int holds(void *handle, enum kind kind) {
    struct object *object = handle;
    if (object && object->kind == kind && object->live) return 1;
    return refused++, 0;
}
static int end(void *handle, enum kind kind, int *count) {
    if (!holds(handle, kind)) return INVALID_HANDLE;
    ((struct object *)handle)->live = 0;
    return --*count, 0;
}

// Allocations of the device, the ended ones among them: an address is not given twice either.
enum { ALLOCATIONS = 1 << 16 };
static struct { char *start; size_t bytes; int live; } allocation[ALLOCATIONS];
static int allocations;

static int lies(const void *address, size_t bytes) {
    const char *at = address;
    for (int i = 0; i < allocations; i++) {
        char *start = allocation[i].start;
        if (allocation[i].live && at >= start && at + bytes <= start + allocation[i].bytes) return 1;
    }
    return refused++, 0;
}

enum { MOST = 1 << 16 };
static struct { void *to; const void *from; size_t bytes; } queue[MOST];
static int capturing;

static int later(void *to, const void *from, size_t bytes) {
    if (queued == MOST) abort();
    queue[queued].to = to, queue[queued].from = from, queue[queued].bytes = bytes;
    queued++;
    return 0;
}

int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int len, int device) { return strncpy(name, "test", len), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 9, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &contexts, contexts++, 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return contexts--, 0; }
int cuCtxSetCurrent(void *context) { return !context || (context == &contexts && contexts > 0) ? 0 : 201; }
int cuCtxGetCurrent(void **context) { return *context = 0, 0; }

int cuStreamCreate(void **stream, unsigned flags) { return make(stream, STREAM, &streams); }
int cuStreamDestroy_v2(void *stream) { return torn += queued > 0, end(stream, STREAM, &streams); }
int cuStreamSynchronize(void *stream) {
    if (!holds(stream, STREAM)) return INVALID_HANDLE;
    if (capturing) return 900;
    for (int i = 0; i < queued; i++) memcpy(queue[i].to, queue[i].from, queue[i].bytes);
    return queued = 0, 0;
}

int cuMemAlloc_v2(void **address, size_t bytes) {
    if (allocations == ALLOCATIONS) abort();
    *address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    allocation[allocations].start = *address, allocation[allocations].bytes = bytes, allocation[allocations].live = 1;
    return allocations++, memory++, 0;
}
int cuMemFree_v2(void *address) {
    torn += queued > 0;
    for (int i = 0; i < allocations; i++)
        if (allocation[i].live && allocation[i].start == address) return allocation[i].live = 0, memory--, 0;
    return refused++, INVALID_VALUE;
}
int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) { return *start = malloc(bytes), host++, 0; }
int cuMemFreeHost(void *start) { return torn += queued > 0, free(start), host--, 0; }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    return holds(stream, STREAM) && lies(to, bytes) ? later(to, from, bytes) : INVALID_VALUE;
}
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    return holds(stream, STREAM) && lies(from, bytes) ? later(to, from, bytes) : INVALID_VALUE;
}
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    return holds(stream, STREAM) && lies(to, bytes) && lies(from, bytes) ? later(to, from, bytes) : INVALID_VALUE;
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (!holds(stream, STREAM)) return INVALID_HANDLE;
    return capturing ? 900 : (capturing = 1, 0);
}
int cuStreamEndCapture(void *stream, void **graph) {
    return holds(stream, STREAM) ? capturing = 0, make(graph, GRAPH, &graphs) : INVALID_HANDLE;
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    return holds(graph, GRAPH) ? make(exec, EXEC, &execs) : INVALID_HANDLE;
}
int cuGraphInstantiate(void **exec, void *graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(exec, graph, flags);
}
int cuGraphLaunch(void *exec, void *stream) {
    return holds(exec, EXEC) && holds(stream, STREAM) ? later(0, 0, 0) : INVALID_HANDLE;
}
int cuGraphExecDestroy(void *exec) { return torn += queued > 0, end(exec, EXEC, &execs); }
int cuGraphDestroy(void *graph) { return end(graph, GRAPH, &graphs); }

int cuModuleLoadData(void **module, const void *image) { return make(module, MODULE, &modules); }
// A function lives as long as its module.
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return *function = module, holds(module, MODULE) ? 0 : INVALID_HANDLE;
}
int cuModuleUnload(void *module) { return torn += queued > 0, end(module, MODULE, &modules); }
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return holds(function, MODULE) ? 0 : INVALID_HANDLE;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    if (!holds(function, MODULE) || !holds(stream, STREAM)) return INVALID_HANDLE;
    return capturing ? 0 : later(0, 0, 0);
}

int cuEventCreate(void **event, unsigned flags) { return make(event, EVENT, &events); }
int cuEventRecord(void *event, void *stream) {
    if (!holds(event, EVENT) || !holds(stream, STREAM)) return INVALID_HANDLE;
    return ((struct object *)event)->recorded = 1, 0;
}
int cuEventElapsedTime(float *ms, void *start, void *end) {
    if (!holds(start, EVENT) || !holds(end, EVENT)) return INVALID_HANDLE;
    return *ms = 1, ((struct object *)start)->recorded && ((struct object *)end)->recorded ? 0 : NOT_READY;
}
int cuEventElapsedTime_v2(float *ms, void *start, void *end) { return cuEventElapsedTime(ms, start, end); }
int cuEventDestroy_v2(void *event) { return end(event, EVENT, &events); }

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char **texts,
                       const char **names) {
    return *program = &modules, 0;
}
int nvrtcCompileProgram(void *program, int count, const char **options) { return 0; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return *bytes = 1, 0; }
int nvrtcGetCUBIN(void *program, char *code) { return *code = 0, 0; }
int nvrtcGetPTXSize(void *program, size_t *bytes) { return *bytes = 1, 0; }
int nvrtcGetPTX(void *program, char *text) { return *text = 0, 0; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return *bytes = 1, 0; }
int nvrtcGetProgramLog(void *program, char *text) { return *text = 0, 0; }
int nvrtcDestroyProgram(void **program) { return 0; }
