// A token drawn from each row: x[R,V], bits[R,2] -> token[R]: draw.rs. A block takes a row, each thread a stretch of it.
#include "weights.cuh"

KERNEL(256, 4) draw(GLOBAL(const In) x, GLOBAL(const int) bits, GLOBAL(int) token, int vocab, float one) {
    SHARED(float, room, 8);
    SHARED(Weight, sums, 256);
    int thread = threadIdx.x;
    long long row = blockIdx.x;
    x = x + row * vocab;
    auto z_at = [&](int i) { return widen(static_cast<In>(x[i])); };
    float top = largest_of_row(z_at, vocab, room);
    if (!(top > -INFINITE)) {
        if (thread == 0) token[row] = -1;
        return;
    }
    int first = static_cast<int>(static_cast<long long>(vocab) * thread / 256);
    int last = static_cast<int>(static_cast<long long>(vocab) * (thread + 1) / 256);
    Weight own = 0;
    for (int i = first; i < last; i++) own += weight_of(z_at(i), top, one);
    sums[thread] = own;
    __syncthreads();
    Weight before = 0, total = 0;
    for (int other = 0; other < 256; other++) {
        Weight sum = sums[other];
        if (other < thread) before += sum;
        total += sum;
    }
    unsigned low = static_cast<unsigned>(static_cast<int>(bits[2 * row]));
    unsigned high = static_cast<unsigned>(static_cast<int>(bits[2 * row + 1]));
    Weight bound = share_of((static_cast<Weight>(high) << 32 | low) >> 11, total);
    if (bound < before || bound >= before + own) return;
    for (int i = first; i < last; i++) {
        before += weight_of(z_at(i), top, one);
        if (before > bound) {
            token[row] = i;
            return;
        }
    }
}
