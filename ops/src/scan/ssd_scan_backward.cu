// Gradient of the scan of Mamba-2: ssd_scan_backward.rs.
#include "parts.cuh"
#include "ssd.cuh"

// A block takes a head of a sequence: its part of db and dc and all that it makes by itself. Its slot of the workspace has x, dy
// and q of a position (b and c are read where they stand), the states that are kept, those of a stretch, and g.
KERNEL(256, 2)
ssd_scan_backward_heads(
    GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
    GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state, int has_state,
    GLOBAL(const int) len, int has_len, long long length, int heads, int head_dim, int groups, int state_dim, float dt_min,
    float dt_max, GLOBAL(const In) dy, GLOBAL(const float) dnext, int has_dnext, GLOBAL(Out) dx, GLOBAL(Out) ddt,
    GLOBAL(float) da_log, GLOBAL(float) dd, GLOBAL(float) dstate, REREAD(float) parts, REREAD(float) slots,
    long long first, long long slot, long long stretch
) {
    SHARED(float, times, 3);
    SHARED(int, limits, 1);
    long long unit = first + blockIdx.x, batch = unit / heads;
    int head = static_cast<int>(unit % heads), group = head / (heads / groups);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    long long end = length, size = static_cast<long long>(head_dim) * state_dim;
    if (has_len) end = len[batch];
    float a = decay_rate(widen(static_cast<In>(a_log[head])));
    REREAD(float) q = slots + blockIdx.x * slot;
    REREAD(float) kept = q + 3ll * head_dim + 2ll * state_dim;
    REREAD(float) run = kept + (length + stretch - 1) / stretch * size;
    REREAD(float) g = run + (stretch + 1) * size;
    REREAD(float) part_b = parts + blockIdx.x * 2 * length * state_dim;
    REREAD(float) part_c = part_b + length * state_dim;

    // The step in time of a position, for all threads.
    auto step_at = [&](long long t) {
        __syncthreads();
        if (thread == 0) {
            float v = widen(static_cast<In>(dt[(batch * length + t) * heads + head]));
            if (has_bias) v = __fadd_rn(v, widen(static_cast<In>(dt_bias[head])));
            Step step = step_of(v, a, dt_min, dt_max);
            times[0] = step.e;
            times[1] = step.k;
            times[2] = step.slope;
            limits[0] = step.limited;
        }
        __syncthreads();
        return Step{times[0], times[1], times[2], limits[0] != 0};
    };
    // The state behind position t from the one before it; an element is one thread's throughout.
    auto advance = [&](long long t, REREAD(float) before, REREAD(float) after) {
        Step step = step_at(t);
        long long place = ((batch * length + t) * heads + head) * head_dim, from = ((batch * length + t) * groups + group) * state_dim;
        for (long long i = thread; i < size; i += blockDim.x) {
            float u = __fmul_rn(step.e, widen(static_cast<In>(x[place + i / state_dim])));
            after[i] = __fmaf_rn(step.k, before[i], __fmul_rn(u, widen(static_cast<In>(b[from + i % state_dim]))));
        }
    };

    for (long long i = thread; i < size; i += blockDim.x) {
        float before = 0.0f, behind = 0.0f;
        if (has_state) before = state[unit * size + i];
        if (has_dnext) behind = dnext[unit * size + i];
        run[i] = before;
        g[i] = behind;
    }
    for (long long t = 0; t < end; t++) {
        if (t % stretch == 0) {
            for (long long i = thread; i < size; i += blockDim.x) kept[t / stretch * size + i] = run[i];
        }
        advance(t, run, run);
    }
    float k_after = 1.0f;
    for (long long from_stretch = (end + stretch - 1) / stretch - 1; from_stretch >= 0; from_stretch--) {
        long long start = from_stretch * stretch, last = min(start + stretch, end);
        for (long long i = thread; i < size; i += blockDim.x) run[i] = kept[from_stretch * size + i];
        for (long long t = start; t < last; t++) advance(t, run + (t - start) * size, run + (t - start + 1) * size);
        for (long long t = last - 1; t >= start; t--) {
            Step step = step_at(t);
            REREAD(float) before = run + (t - start) * size;
            REREAD(float) after = before + size;
            long long row = (batch * length + t) * heads + head, place = row * head_dim;
            long long from = ((batch * length + t) * groups + group) * state_dim;
            for (long long i = thread; i < size; i += blockDim.x) {
                float gradient = widen(static_cast<In>(dy[place + i / state_dim]));
                g[i] = __fmaf_rn(gradient, widen(static_cast<In>(c[from + i % state_dim])), __fmul_rn(k_after, g[i]));
            }
            k_after = step.k;
            __syncthreads();
            // A chain over p of each element of db and dc.
            for (int n = thread; n < state_dim; n += static_cast<int>(blockDim.x)) {
                float of_b = 0.0f, of_c = 0.0f;
                for (int p = 0; p < head_dim; p++) {
                    float u = __fmul_rn(step.e, widen(static_cast<In>(x[place + p])));
                    of_b = __fmaf_rn(g[static_cast<long long>(p) * state_dim + n], u, of_b);
                    of_c = __fmaf_rn(after[static_cast<long long>(p) * state_dim + n],
                                     widen(static_cast<In>(dy[place + p])), of_c);
                }
                part_b[t * state_dim + n] = of_b;
                part_c[t * state_dim + n] = of_c;
            }
            // A warp takes the lanes of a row.
            for (int p = warp; p < head_dim; p += 8) {
                Eight lanes = no_lanes();
                for (int at = lane * 8; at < state_dim; at += 256) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        if (at + j >= state_dim) continue;
                        float own = g[static_cast<long long>(p) * state_dim + at + j];
                        lanes.v[j] = __fmaf_rn(own, widen(static_cast<In>(b[from + at + j])), lanes.v[j]);
                    }
                }
                float sum = fold_lanes(lanes);
                if (lane == 0) q[p] = sum;
            }
            __syncthreads();
            if (warp == 0) {
                Eight of_state = no_lanes(), of_x = no_lanes(), of_dy = no_lanes();
                for (long long at = lane * 8; at < size; at += 256) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        if (at + j < size) of_state.v[j] = __fmaf_rn(g[at + j], before[at + j], of_state.v[j]);
                    }
                }
                for (int at = lane * 8; at < head_dim; at += 256) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        if (at + j >= head_dim) continue;
                        float value = widen(static_cast<In>(x[place + at + j]));
                        of_x.v[j] = __fmaf_rn(q[at + j], value, of_x.v[j]);
                        of_dy.v[j] = __fmaf_rn(widen(static_cast<In>(dy[place + at + j])), value, of_dy.v[j]);
                    }
                }
                float z = __fmul_rn(step.k, fold_lanes(of_state));
                float w = __fmaf_rn(a, z, fold_lanes(of_x)), of_d = fold_lanes(of_dy);
                if (lane == 0) {
                    ddt[row] = narrow<Out>(step.limited ? 0.0f : __fmul_rn(w, step.slope));
                    da_log[row] = narrow<fp32>(__fmul_rn(__fmul_rn(step.e, a), z));
                    dd[row] = narrow<fp32>(of_d);
                }
            }
            for (int p = thread; p < head_dim; p += static_cast<int>(blockDim.x)) {
                float value = __fmul_rn(step.e, q[p]);
                if (has_d) value = __fmaf_rn(widen(static_cast<In>(d[head])), widen(static_cast<In>(dy[place + p])), value);
                dx[place + p] = narrow<Out>(value);
            }
            __syncthreads();
        }
    }
    for (long long i = thread; i < size; i += blockDim.x) {
        float value = g[i];
        if (end > 0) value = __fmul_rn(k_after, value);
        dstate[unit * size + i] = narrow<fp32>(value);
    }
    for (long long t = end; t < length; t++) {
        long long row = (batch * length + t) * heads + head;
        for (int p = thread; p < head_dim; p += static_cast<int>(blockDim.x)) dx[row * head_dim + p] = narrow<Out>(0.0f);
        if (thread == 0) {
            ddt[row] = narrow<Out>(0.0f);
            da_log[row] = 0.0f;
            dd[row] = 0.0f;
        }
    }
}

KERNEL(256, 4)
ssd_scan_backward_add(
    GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
    GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state, int has_state,
    GLOBAL(const int) len, int has_len, long long length, int heads, int head_dim, int groups, int state_dim, float dt_min,
    float dt_max, REREAD(float) totals, GLOBAL(const float) parts, GLOBAL(Out) db, GLOBAL(Out) dc, long long first,
    long long count, long long all
) {
    add_parts(Totals{totals, parts, len, has_len, length, heads, groups, state_dim}, db, dc, first, count, all);
}
