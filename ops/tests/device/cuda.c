// Stands for libcuda and libnvrtc in tests of the driver. A stream is a queue that is worked off when it is waited for, so
// that whatever is read or freed too early is. Device memory is the host's; kernels compute nothing.
#include <stdlib.h>
#include <string.h>

// What is live, and how often memory or code was taken from under something that was queued.
int memory, host, modules, streams, events, graphs, execs, contexts, torn, queued;

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

int cuStreamCreate(void **stream, unsigned flags) { return *stream = &streams, streams++, 0; }
int cuStreamDestroy_v2(void *stream) { return torn += queued > 0, streams--, 0; }
int cuStreamSynchronize(void *stream) {
    if (capturing) return 900;
    for (int i = 0; i < queued; i++) memcpy(queue[i].to, queue[i].from, queue[i].bytes);
    return queued = 0, 0;
}

int cuMemAlloc_v2(void **address, size_t bytes) { return *address = aligned_alloc(256, (bytes + 255) / 256 * 256), memory++, 0; }
int cuMemFree_v2(void *address) { return torn += queued > 0, free(address), memory--, 0; }
int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) { return *start = malloc(bytes), host++, 0; }
int cuMemFreeHost(void *start) { return torn += queued > 0, free(start), host--, 0; }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) { return later(to, from, bytes); }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) { return later(to, from, bytes); }
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) { return later(to, from, bytes); }

int cuStreamBeginCapture_v2(void *stream, int mode) { return capturing ? 900 : (capturing = 1, 0); }
int cuStreamEndCapture(void *stream, void **graph) { return *graph = &graphs, graphs++, capturing = 0, 0; }
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { return *exec = &execs, execs++, 0; }
int cuGraphInstantiate(void **exec, void *graph, unsigned long long flags) { return *exec = &execs, execs++, 0; }
int cuGraphLaunch(void *exec, void *stream) { return later(0, 0, 0); }
int cuGraphExecDestroy(void *exec) { return torn += queued > 0, execs--, 0; }
int cuGraphDestroy(void *graph) { return graphs--, 0; }

int cuModuleLoadData(void **module, const void *image) { return *module = &modules, modules++, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = &modules, 0; }
int cuModuleUnload(void *module) { return torn += queued > 0, modules--, 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    return capturing ? 0 : later(0, 0, 0);
}

int cuEventCreate(void **event, unsigned flags) { return *event = &events, events++, 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventElapsedTime(float *ms, void *start, void *end) { return *ms = 1, 0; }
int cuEventElapsedTime_v2(float *ms, void *start, void *end) { return *ms = 1, 0; }
int cuEventDestroy_v2(void *event) { return events--, 0; }

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
