// Gradient of attention: attention_backward.rs. q, k, v, out, lse, dout -> dq, dk, dv.
//
// A block makes p and g of 256 pairs, a thread each, and then adds them up, a thread for each column: the keys of a
// block of 256 for a row of dq, some rows of a query head for a key of dk and dv. What is not visible is left out of
// the sums.
#include "math.cuh"

#define PAIRS KEYS

// What the kernels are told; the same struct is in attention_backward.rs.
struct Call {
    // 0 means none.
    long long window;
    int queries, keys, q_heads, kv_heads, head_dim, value_dim;
    int causal, chunk, capped, masked;
    float cap, cap_factor, hi, lo;
};

// A chain of products of two rows.
DEVICE float chain(GLOBAL(const In) a, GLOBAL(const In) b, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; i++) {
        sum = __fmaf_rn(operand(static_cast<In>(a[i])), operand(static_cast<In>(b[i])), sum);
    }
    return sum;
}

// delta of a row and head, a thread each.
KERNEL(256, 4)
attention_backward_deltas(GLOBAL(const In) out, GLOBAL(const In) dout, GLOBAL(float) delta, long long rows, int count) {
    long long row = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < count; i++) {
        long long at = row * count + i;
        sum = __fmaf_rn(operand(static_cast<In>(dout[at])), widen(static_cast<In>(out[at])), sum);
    }
    delta[row] = sum;
}

// Whether a position sees a key of a sequence of `length`.
DEVICE bool sees(const Call &call, int key, int position, int length) {
    if (key >= length || (call.causal && key > position)) return false;
    if (call.chunk > 0 && key < position - position % call.chunk) return false;
    return call.window == 0 || key > position - call.window;
}

// p and g of a visible pair; whether its score counts.
DEVICE bool pair(const Call &call, GLOBAL(const In) query, GLOBAL(const In) key, GLOBAL(const In) gradient,
                 GLOBAL(const In) value, float lse, float delta, float &p, float &g) {
    float s = chain(query, key, call.head_dim), slope = 0.0f, d;
    if (call.capped) {
        float t = hyperbolic_tangent(__fmul_rn(s, call.cap_factor));
        slope = __fmaf_rn(-t, t, 1.0f);
        d = __fsub_rn(__fmul_rn(call.cap, t), lse);
    } else {
        if (s == -INFINITE) return false;
        d = __fmaf_rn(s, call.lo, __fmaf_rn(s, call.hi, -lse));
    }
    p = exponential_or_nothing(d);
    g = __fmul_rn(p, __fsub_rn(chain(gradient, value, call.value_dim), delta));
    if (call.capped) g = __fmul_rn(g, slope);
    return true;
}

// A row of dq and up to 256 columns of it.
KERNEL(256, 2)
attention_backward_dq(Call call, GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const float) lse,
                      GLOBAL(const In) dout, GLOBAL(const float) delta, GLOBAL(const int) q_pos,
                      GLOBAL(const int) kv_len, GLOBAL(Out) dq) {
    SHARED(float, changes, PAIRS);
    SHARED(int, visible, PAIRS);
    long long row = blockIdx.x, token = row / call.q_heads, batch = token / call.queries;
    int kv_head = static_cast<int>(row % call.q_heads) / (call.q_heads / call.kv_heads);
    int thread = threadIdx.x, column = static_cast<int>(blockIdx.y) * PAIRS + thread;
    int position = q_pos[token], length = kv_len[batch];
    float total = 0.0f;
    for (int first = 0; first < length; first += PAIRS) {
        int key = first + thread, count = min(PAIRS, length - first);
        long long place = (batch * call.keys + key) * call.kv_heads + kv_head;
        float p = 0.0f, g = 0.0f;
        bool seen = sees(call, key, position, length) &&
                    pair(call, q + row * call.head_dim, k + place * call.head_dim, dout + row * call.value_dim,
                         v + place * call.value_dim, lse[row], delta[row], p, g);
        visible[thread] = seen;
        changes[thread] = g;
        __syncthreads();
        if (column < call.head_dim) {
            float sum = 0.0f;
            for (int i = 0; i < count; i++) {
                if (!visible[i]) continue;
                long long at = ((batch * call.keys + first + i) * call.kv_heads + kv_head) * call.head_dim + column;
                sum = __fmaf_rn(changes[i], operand(static_cast<In>(k[at])), sum);
            }
            total = __fadd_rn(total, sum);
        }
        __syncthreads();
    }
    if (column < call.head_dim) dq[row * call.head_dim + column] = narrow<Out>(__fmul_rn(total, call.hi));
}

// A key of a key head, and up to 256 columns of its dk and dv.
KERNEL(256, 2)
attention_backward_dkv(Call call, GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const float) lse,
                       GLOBAL(const In) dout, GLOBAL(const float) delta, GLOBAL(const int) q_pos,
                       GLOBAL(const int) kv_len, GLOBAL(const int) mask, GLOBAL(Out) dk, GLOBAL(Out) dv) {
    SHARED(float, weights, PAIRS);
    SHARED(float, changes, PAIRS);
    SHARED(int, visible, PAIRS);
    long long place = blockIdx.x, batch = place / call.kv_heads / call.keys;
    int kv_head = static_cast<int>(place % call.kv_heads), group = call.q_heads / call.kv_heads;
    int key = static_cast<int>(place / call.kv_heads % call.keys), length = kv_len[batch];
    int thread = threadIdx.x, column = static_cast<int>(blockIdx.y) * PAIRS + thread;
    float total_k = 0.0f, total_v = 0.0f;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float sum_k = 0.0f, sum_v = 0.0f;
        for (int first = 0; first < call.queries; first += PAIRS) {
            int count = min(PAIRS, call.queries - first);
            long long token = batch * call.queries + first + thread, row = token * call.q_heads + head;
            float p = 0.0f, g = 0.0f;
            bool seen = thread < count && (!call.masked || mask[token] != 0) &&
                        sees(call, key, q_pos[token], length) &&
                        pair(call, q + row * call.head_dim, k + place * call.head_dim, dout + row * call.value_dim,
                             v + place * call.value_dim, lse[row], delta[row], p, g);
            visible[thread] = seen;
            weights[thread] = p;
            changes[thread] = g;
            __syncthreads();
            for (int i = 0; i < count; i++) {
                if (!visible[i]) continue;
                long long at = (batch * call.queries + first + i) * call.q_heads + head;
                if (column < call.head_dim) {
                    float x = operand(static_cast<In>(q[at * call.head_dim + column]));
                    sum_k = __fmaf_rn(changes[i], x, sum_k);
                }
                if (column < call.value_dim) {
                    float x = operand(static_cast<In>(dout[at * call.value_dim + column]));
                    sum_v = __fmaf_rn(weights[i], x, sum_v);
                }
            }
            __syncthreads();
        }
        total_k = __fadd_rn(total_k, sum_k);
        total_v = __fadd_rn(total_v, sum_v);
    }
    if (column < call.head_dim) dk[place * call.head_dim + column] = narrow<Out>(__fmul_rn(total_k, call.hi));
    if (column < call.value_dim) dv[place * call.value_dim + column] = narrow<Out>(total_v);
}
