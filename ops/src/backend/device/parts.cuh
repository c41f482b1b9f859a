// How the parts of db and dc that units of a scan have made are added to the totals of their groups: scan/reverse.rs.
#pragma once
#include "element.cuh"

// Where they stand, and how many units a sequence has.
struct Totals {
    REREAD(float) totals;
    GLOBAL(const float) parts;
    GLOBAL(const int) len;
    int has_len;
    long long length;
    int units, groups, state_dim;
};

// A thread takes an element of db and dc: the units of its group that are among `count` from `first` on, ascending; those before
// are in the totals.
DEVICE void add_parts(const Totals &of, GLOBAL(Out) db, GLOBAL(Out) dc, long long first, long long count, long long all) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= all) return;
    long long n = i % of.state_dim, group = i / of.state_dim % of.groups, t = i / of.state_dim / of.groups % of.length;
    long long batch = i / of.state_dim / of.groups / of.length, of_group = of.units / of.groups;
    long long begin = batch * of.units + group * of_group, end = of.length;
    if (of.has_len) end = of.len[batch];
    long long from = max(begin, first), to = min(begin + of_group, first + count);
    if (from >= to) return;
    float of_b = 0.0f, of_c = 0.0f;
    if (from > begin) {
        of_b = of.totals[i];
        of_c = of.totals[all + i];
    }
    for (long long unit = from; unit < to && t < end; unit++) {
        GLOBAL(const float) part = of.parts + (unit - first) * 2 * of.length * of.state_dim;
        of_b = __fadd_rn(of_b, part[t * of.state_dim + n]);
        of_c = __fadd_rn(of_c, part[(of.length + t) * of.state_dim + n]);
    }
    of.totals[i] = of_b;
    of.totals[all + i] = of_c;
    db[i] = narrow<Out>(of_b);
    dc[i] = narrow<Out>(of_c);
}
