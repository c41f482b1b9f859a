// Tokens that may be sampled: x[R,V], scale[R], top_k[R], top_p[R], min_p[R] -> y[R,V], kept[R]: truncate.rs. A block takes
// a row. The rank of the last token that is kept is found bit by bit; equals are taken by each thread of its own stretch.
#include "weights.cuh"

// The rank of -inf, which is never kept.
#define NOTHING 0x007FFFFFu

// What stands at a rank.
DEVICE float value_at(unsigned rank) { return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank); }

// The last rank that is kept, the sum of what is above it, and how many of its equals are kept.
struct Last {
    unsigned rank;
    Weight above, equals;
};

// The sum of `weight` over the elements of this rank and above.
template <class Z, class W>
DEVICE Weight sum_from(const Z &z_at, const W &weight, int n, unsigned rank, SHARED_POINTER(unsigned) room) {
    Weight sum = 0;
    for (int i = threadIdx.x; i < n; i += 256) {
        float z = z_at(i);
        if (rank_of(z) >= rank) sum += weight(z);
    }
    return sum_of_block(sum, room);
}

// The first element, from the largest on, at which the sum of `weight` reaches `bound`; the sum of all reaches it.
template <class Z, class W>
DEVICE Last reach(const Z &z_at, const W &weight, int n, Weight bound, SHARED_POINTER(unsigned) room) {
    Last last{0, 0, 0};
    for (int bit = 31; bit >= 0; bit--) {
        unsigned candidate = last.rank | 1u << bit;
        if (sum_from(z_at, weight, n, candidate, room) >= bound) last.rank = candidate;
    }
    last.above = sum_from(z_at, weight, n, last.rank + 1, room);
    Weight each = weight(value_at(last.rank));
    last.equals = (bound - last.above + each - 1) / each;
    return last;
}

KERNEL(256, 4) truncate(
    GLOBAL(const In) x, GLOBAL(const float) scales, GLOBAL(const int) top_k, GLOBAL(const float) top_p,
    GLOBAL(const float) min_p, GLOBAL(float) y, GLOBAL(int) kept, int vocab, float one
) {
    SHARED(float, floats, 8);
    SHARED(unsigned, room, 16);
    SHARED(unsigned, counts, 256);
    int thread = threadIdx.x;
    long long row = blockIdx.x;
    x = x + row * vocab;
    y = y + row * vocab;
    float scale = scales[row];
    auto z_at = [&](int i) { return __fmul_rn(widen(static_cast<In>(x[i])), scale); };
    float top = largest_of_row(z_at, vocab, floats);
    if (!(top > -INFINITE)) {
        for (int i = thread; i < vocab; i += 256) y[i] = narrow<float>(top);
        if (thread == 0) kept[row] = 0;
        return;
    }
    auto one_each = [](float) { return static_cast<Weight>(1); };
    auto weight = [&](float z) { return weight_of(z, top, one); };
    Last last{NOTHING + 1, 0, ~static_cast<Weight>(0)};
    Weight most = static_cast<Weight>(static_cast<int>(top_k[row]));
    if (most > 0 && sum_from(z_at, one_each, vocab, NOTHING + 1, room) > most) last = reach(z_at, one_each, vocab, most, room);
    float p = top_p[row];
    if (p < 1.0f) {
        // What top_k leaves: all above its last rank, and some of that rank.
        Weight above = sum_from(z_at, weight, vocab, last.rank + 1, room), each = weight(value_at(last.rank));
        bool whole = last.equals == ~static_cast<Weight>(0);
        Weight total = whole ? sum_from(z_at, weight, vocab, last.rank, room) : above + last.equals * each;
        Weight bits = static_cast<Weight>(__dmul_rn(static_cast<double>(fmaxf(p, 0.0f)), 9007199254740992.0));
        Weight bound = share_of(bits, total);
        if (bound == 0) bound = 1;
        if (above >= bound || whole) {
            last = reach(z_at, weight, vocab, bound, room);
        } else {
            last.equals = (bound - above + each - 1) / each;
        }
    }
    float least = min_p[row];
    if (least > 1.0f) least = 1.0f;
    int first = static_cast<int>(static_cast<long long>(vocab) * thread / 256);
    int end = static_cast<int>(static_cast<long long>(vocab) * (thread + 1) / 256);
    unsigned equal = 0;
    for (int i = first; i < end; i++) equal += rank_of(z_at(i)) == last.rank ? 1u : 0u;
    counts[thread] = equal;
    __syncthreads();
    Weight before = 0;
    for (int other = 0; other < thread; other++) before += static_cast<unsigned>(counts[other]);
    Weight stay = 0;
    for (int i = first; i < end; i++) {
        float z = z_at(i);
        unsigned rank = rank_of(z);
        bool keep = rank > last.rank || (rank == last.rank && before < last.equals);
        if (rank == last.rank) before++;
        if (keep && exponential(__fsub_rn(z, top)) < least) keep = false;
        stay += keep ? 1u : 0u;
        y[i] = keep ? z : -INFINITE;
    }
    stay = sum_of_block(stay, room);
    if (thread == 0) kept[row] = static_cast<int>(stay);
}
