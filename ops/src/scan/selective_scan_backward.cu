// Gradient of the scan of Mamba: selective_scan_backward.rs.
#include "parts.cuh"
#include "reduce.cuh"
#include "selective.cuh"

// A block takes a block of channels of a sequence: its part of db and dc and all that they make by themselves. Its slot of the
// workspace has g and da_log, the states that are kept, those of a stretch, and m, all by rows of CHANNELS channels; an element of
// them is one thread's throughout.
KERNEL(256, 2)
selective_scan_backward_blocks(
    GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
    GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state, int has_state,
    GLOBAL(const int) len, int has_len, long long length, int channels, int state_dim, GLOBAL(const In) dy,
    GLOBAL(const float) dnext, int has_dnext, GLOBAL(Out) dx, GLOBAL(Out) ddt, GLOBAL(float) da_log, GLOBAL(float) dd,
    GLOBAL(float) dstate, REREAD(float) parts, REREAD(float) slots, long long first, long long slot, long long stretch
) {
    SHARED(float, es, CHANNELS);
    SHARED(float, us, CHANNELS);
    SHARED(float, dys, CHANNELS);
    Selective scan{x, dt, a_log, b, c, d, has_d, dt_bias, has_bias, state, has_state, len, has_len, length, channels, state_dim};
    int blocks = (channels + CHANNELS - 1) / CHANNELS;
    long long unit = first + blockIdx.x, batch = unit / blocks;
    int begin = static_cast<int>(unit % blocks) * CHANNELS, count = min(CHANNELS, channels - begin);
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    long long end = scan.end(batch), size = static_cast<long long>(CHANNELS) * state_dim;
    REREAD(float) gs = slots + blockIdx.x * slot;
    REREAD(float) of_a = gs + size;
    REREAD(float) kept = gs + 4 * size + 2ll * state_dim;
    REREAD(float) run = kept + (length + stretch - 1) / stretch * size;
    REREAD(float) m = run + (stretch + 1) * size;
    REREAD(float) part_b = parts + blockIdx.x * 2 * length * state_dim;
    REREAD(float) part_c = part_b + length * state_dim;
    // The channel of this thread's elements; threads have none where the last block has none.
    int own = thread % CHANNELS, channel = begin + own;
    bool lives = own < count;

    // The steps of a position, for all threads.
    auto steps_at = [&](long long t) {
        __syncthreads();
        if (thread < count) {
            long long place = scan.place(batch, t, channel);
            float e = softplus(scan.before_softplus(place, channel));
            es[thread] = e;
            us[thread] = __fmul_rn(e, widen(static_cast<In>(x[place])));
            dys[thread] = widen(static_cast<In>(dy[place]));
        }
        __syncthreads();
    };
    // The states behind position t from those before it.
    auto advance = [&](long long t, REREAD(float) before, REREAD(float) after) {
        steps_at(t);
        long long from = scan.shared(batch, t);
        for (long long i = thread; i < size && lives; i += blockDim.x) {
            int n = static_cast<int>(i / CHANNELS);
            float entered = __fmul_rn(us[own], widen(static_cast<In>(b[from + n])));
            after[i] = __fmaf_rn(exponential(__fmul_rn(es[own], scan.rate(channel, n))), before[i], entered);
        }
    };

    for (long long i = thread; i < size && lives; i += blockDim.x) {
        long long at = scan.of_state(batch, channel) + i / CHANNELS;
        float behind = 0.0f;
        if (has_dnext) behind = dnext[at];
        run[i] = scan.begun(at);
        m[i] = behind;
        of_a[i] = 0.0f;
    }
    for (long long t = 0; t < end; t++) {
        if (t % stretch == 0) {
            for (long long i = thread; i < size && lives; i += blockDim.x) kept[t / stretch * size + i] = run[i];
        }
        advance(t, run, run);
    }
    float of_d = 0.0f;
    for (long long from_stretch = (end + stretch - 1) / stretch - 1; from_stretch >= 0; from_stretch--) {
        long long start = from_stretch * stretch, last = min(start + stretch, end);
        for (long long i = thread; i < size && lives; i += blockDim.x) run[i] = kept[from_stretch * size + i];
        for (long long t = start; t < last; t++) advance(t, run + (t - start) * size, run + (t - start + 1) * size);
        for (long long t = last - 1; t >= start; t--) {
            steps_at(t);
            REREAD(float) before = run + (t - start) * size;
            REREAD(float) after = before + size;
            long long from = scan.shared(batch, t);
            for (long long i = thread; i < size && lives; i += blockDim.x) {
                int n = static_cast<int>(i / CHANNELS);
                float exponent = __fmul_rn(es[own], scan.rate(channel, n));
                float g = __fmaf_rn(dys[own], widen(static_cast<In>(c[from + n])), m[i]);
                float left = __fmul_rn(exponential(exponent), g);
                gs[i] = g;
                m[i] = left;
                of_a[i] = __fmaf_rn(exponent, __fmul_rn(left, before[i]), of_a[i]);
            }
            __syncthreads();
            // A thread takes the chains of a channel.
            if (thread < count) {
                long long place = scan.place(batch, t, channel);
                float q = 0.0f, exponents = 0.0f, value = widen(static_cast<In>(x[place]));
                for (int n = 0; n < state_dim; n++) {
                    long long i = static_cast<long long>(n) * CHANNELS + thread;
                    q = __fmaf_rn(gs[i], widen(static_cast<In>(b[from + n])), q);
                    exponents = __fmaf_rn(scan.rate(channel, n), __fmul_rn(m[i], before[i]), exponents);
                }
                float slope = sigmoid_of_number(scan.before_softplus(place, channel));
                ddt[place] = narrow<Out>(__fmul_rn(__fmaf_rn(q, value, exponents), slope));
                float entered = __fmul_rn(es[thread], q);
                if (has_d) entered = __fmaf_rn(widen(static_cast<In>(d[channel])), dys[thread], entered);
                dx[place] = narrow<Out>(entered);
                of_d = __fmaf_rn(dys[thread], value, of_d);
            }
            // A warp takes the lanes of an element of db and of dc, eight channels a thread.
            for (int n = warp; n < state_dim; n += 8) {
                Eight of_b = no_lanes(), of_c = no_lanes();
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    int at = lane * 8 + j;
                    if (at >= count) continue;
                    long long i = static_cast<long long>(n) * CHANNELS + at;
                    of_b.v[j] = __fmaf_rn(gs[i], us[at], 0.0f);
                    of_c.v[j] = __fmaf_rn(after[i], dys[at], 0.0f);
                }
                float sum_b = fold_lanes(of_b), sum_c = fold_lanes(of_c);
                if (lane == 0) {
                    part_b[t * state_dim + n] = sum_b;
                    part_c[t * state_dim + n] = sum_c;
                }
            }
            // The states that were read may be those of another stretch from here on.
            __syncthreads();
        }
    }
    for (long long i = thread; i < size && lives; i += blockDim.x) {
        long long at = scan.of_state(batch, channel) + i / CHANNELS;
        da_log[at] = narrow<fp32>(of_a[i]);
        dstate[at] = narrow<fp32>(m[i]);
    }
    if (thread < count) dd[batch * channels + channel] = narrow<fp32>(of_d);
    for (long long t = end; t < length && thread < count; t++) {
        long long place = scan.place(batch, t, channel);
        dx[place] = narrow<Out>(0.0f);
        ddt[place] = narrow<Out>(0.0f);
    }
}

KERNEL(256, 4)
selective_scan_backward_add(
    GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
    GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state, int has_state,
    GLOBAL(const int) len, int has_len, long long length, int channels, int state_dim, REREAD(float) totals,
    GLOBAL(const float) parts, GLOBAL(Out) db, GLOBAL(Out) dc, long long first, long long count, long long all
) {
    int blocks = (channels + CHANNELS - 1) / CHANNELS;
    add_parts(Totals{totals, parts, len, has_len, length, blocks, 1, state_dim}, db, dc, first, count, all);
}
