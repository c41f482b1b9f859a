// The end of a sum over tokens: x[C,N] -> y[N]: fold.rs. A thread takes a column. Halves come side by side where the bits of
// a row's number are read from the other end; a sum waits for its other half in the place of its level.
#include "element.cuh"

KERNEL(128, 8) fold(GLOBAL(const In) x, GLOBAL(Out) y, long long n, int levels) {
    long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float waiting[32], sum = 0.0f;
    for (unsigned number = 0; number >> levels == 0; number++) {
        unsigned row = levels == 0 ? 0 : __brev(number) >> (32 - levels);
        sum = widen(static_cast<In>(x[row * n + column]));
        int level = 0;
        for (unsigned left = number; left & 1; left >>= 1) sum = __fadd_rn(waiting[level++], sum);
        if (level < 32) waiting[level] = sum;
    }
    y[column] = narrow<Out>(sum);
}
