// The largest elements of a row: x[R,N], count[R]? -> index[R,K]: topk.rs. A block takes a row. The rank of the last element that is
// taken is found bit by bit; then each thread takes those of its own stretch of the row.
#include "rank.cuh"

// The sum of all threads' numbers; `room` holds 8 and is free when this returns.
DEVICE unsigned sum_of_block(unsigned v, SHARED_POINTER(unsigned) room) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) v += __shfl_xor_sync(WHOLE_WARP, v, h);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
#pragma unroll
    for (int warp = 0; warp < 8; warp++) v += room[warp];
    __syncthreads();
    return v;
}

KERNEL(256, 4) topk(GLOBAL(const In) x, GLOBAL(const int) counts, int has_counts, GLOBAL(int) index, int n, long long k) {
    SHARED(unsigned, room, 8);
    SHARED(unsigned, aboves, 256);
    SHARED(unsigned, equals, 256);
    int thread = threadIdx.x, count = n;
    if (has_counts) count = counts[blockIdx.x];
    x = x + static_cast<long long>(blockIdx.x) * n;
    index = index + blockIdx.x * k;
    auto rank_at = [&](int i) { return rank_of(widen(static_cast<In>(x[i]))); };
    // The largest rank that k elements have or exceed; 0, which is below all, where there are not so many.
    unsigned least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        unsigned candidate = least | 1u << bit, reach = 0;
        for (int i = thread; i < count; i += 256) reach += rank_at(i) >= candidate ? 1u : 0u;
        if (sum_of_block(reach, room) >= k) least = candidate;
    }
    int first = static_cast<int>(static_cast<long long>(count) * thread / 256);
    int last = static_cast<int>(static_cast<long long>(count) * (thread + 1) / 256);
    unsigned above = 0, equal = 0;
    for (int i = first; i < last; i++) {
        unsigned rank = rank_at(i);
        above += rank > least ? 1u : 0u;
        equal += rank == least ? 1u : 0u;
    }
    aboves[thread] = above;
    equals[thread] = equal;
    // As many equals are taken as there is room for behind what is above them.
    long long left = k - sum_of_block(above, room);
    long long place = 0, before = 0;
    for (int other = 0; other < thread; other++) {
        place += aboves[other];
        before += equals[other];
    }
    place += min(before, left);
    for (int i = first; i < last; i++) {
        unsigned rank = rank_at(i);
        if (rank < least || (rank == least && before >= left)) continue;
        if (rank == least) before++;
        index[place++] = i;
    }
    for (long long i = min(static_cast<long long>(count), k) + thread; i < k; i += 256) index[i] = -1;
}
