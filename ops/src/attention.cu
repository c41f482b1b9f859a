// Attention: attention.rs. q[T,Hq,D], k and v in rows of Hkv * D and Hkv * E -> out[T,Hq,E], lse[T,Hq].
//
// A slot is a tile of ROWS query rows (query by query, and within one the heads of the group) that share a sequence and a key
// head. Three kernels: the scores of all keys and their largest by blocks of 256 keys; the weights of each block and its sums
// over the values; the blocks added in ascending order. The reference point n is known before any weight is made, so nothing
// is rescaled. Where slots are many, the second kernel goes through the blocks itself and the third is not needed.
#include "denominator.cuh"

#define KEYS 256

// What all three kernels are told; the host fills it in device/attention.rs.
struct Call {
    // Slots of earlier launches.
    long long slots_before;
    // 0 means none.
    long long window;
    // Tiles of a sequence and key head; a padded batch has as many rows of q to each sequence.
    int tiles, q_heads, kv_heads, head_dim, value_dim;
    int causal, capped, paged, page_size, page_columns;
    // Blocks of 256 keys, and whether each goes to a block of threads of its own.
    int blocks, split;
    float cap, cap_factor, c_hi, c_lo;
};

// The slot of this block.
struct Slot {
    int sequence, kv_head, first, rows, group, q_first;
};

DEVICE Slot slot_of(const Call &call, GLOBAL(const int) q_start, int height) {
    long long slot = call.slots_before + blockIdx.y;
    int entry = static_cast<int>(slot / call.tiles), first = static_cast<int>(slot % call.tiles) * height;
    Slot s;
    s.sequence = entry / call.kv_heads;
    s.kv_head = entry % call.kv_heads;
    s.group = call.q_heads / call.kv_heads;
    s.q_first = q_start[s.sequence];
    s.first = first;
    s.rows = max(0, min(height, (q_start[s.sequence + 1] - s.q_first) * s.group - first));
    return s;
}

// The index of a row in [T, Hq].
DEVICE long long output_of(const Call &call, const Slot &slot, int row) {
    int at = slot.first + row;
    return static_cast<long long>(slot.q_first + at / slot.group) * call.q_heads + slot.kv_head * slot.group + at % slot.group;
}

// The keys from .. to that a row sees.
DEVICE void range_of(const Call &call, const Slot &slot, int row, GLOBAL(const int) q_pos, GLOBAL(const int) kv_len,
                     int &from, int &to) {
    from = to = 0;
    if (row >= slot.rows) return;
    long long p = q_pos[slot.q_first + (slot.first + row) / slot.group], end = kv_len[slot.sequence];
    if (call.causal) end = min(end, max(p + 1, 0ll));
    long long begin = call.window > 0 ? max(p - call.window + 1, 0ll) : 0;
    to = static_cast<int>(end);
    from = static_cast<int>(min(begin, end));
}

// The row of k and v where a key stands.
DEVICE long long key_row(const Call &call, const Slot &slot, int key, GLOBAL(const int) starts) {
    if (!call.paged) return static_cast<long long>(starts[slot.sequence]) + key;
    int page = starts[static_cast<long long>(slot.sequence) * call.page_columns + key / call.page_size];
    return static_cast<long long>(page) * call.page_size + key % call.page_size;
}

// Bytes of each key that lie in shared memory at a time, in two stages.
#define PART 128

template <int ROWS>
DEVICE void attention_scores(SHARED_POINTER(In) room, const Call &call, GLOBAL(const In) q, GLOBAL(const In) k,
                             GLOBAL(const int) q_start, GLOBAL(const int) q_pos, GLOBAL(const int) starts,
                             GLOBAL(const int) kv_len, GLOBAL(float) scores, GLOBAL(float) largest) {
    const int PACK = Pack<In>::COUNT, CHUNK = PART / sizeof(In), K_ROW = CHUNK + PACK, PIECES = PART / 16;
    SHARED(long long, places, KEYS);
    SHARED(float, query, ROWS * CHUNK);
    SHARED(int, froms, ROWS);
    SHARED(int, tos, ROWS);
    SHARED(float, warp_largest, 8 * ROWS);
    Slot slot = slot_of(call, q_start, ROWS);
    int thread = threadIdx.x, key = static_cast<int>(blockIdx.x) * KEYS + thread, d = call.head_dim;
    if (thread < ROWS) {
        int from, to;
        range_of(call, slot, thread, q_pos, kv_len, from, to);
        froms[thread] = from;
        tos[thread] = to;
    }
    bool stands = key < kv_len[slot.sequence];
    places[thread] = stands ? (key_row(call, slot, key, starts) * call.kv_heads + slot.kv_head) * d : -1;
    __syncthreads();
    int from = froms[0], to = tos[0];
    for (int r = 1; r < slot.rows; r++) {
        from = min(from, froms[r]);
        to = max(to, tos[r]);
    }
    int first = static_cast<int>(blockIdx.x) * KEYS;
    GLOBAL(float) slot_largest = largest + static_cast<long long>(blockIdx.y) * ROWS * call.blocks + blockIdx.x;
    if (slot.rows == 0 || to <= first || from >= first + KEYS) {
        if (thread < ROWS) slot_largest[thread * call.blocks] = -INFINITE;
        return;
    }

    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
    bool aligned = aligned16(k) && d % PACK == 0;
    int parts = (d + CHUNK - 1) / CHUNK;
    auto bring = [&](int part) {
        if (part < parts) {
            int at = part * CHUNK, count = min(CHUNK, d - at);
            SHARED_POINTER(In) stage = room + part % 2 * KEYS * K_ROW;
            for (int i = 0; i < PIECES; i++) {
                int row = (thread + KEYS * i) / PIECES, column = (thread + KEYS * i) % PIECES * PACK;
                long long place = places[row];
                if (place < 0 || column >= count) continue;
                if (aligned) {
                    async_copy16(stage + row * K_ROW + column, k + place + at + column);
                } else {
                    for (int j = 0; j < PACK && column + j < count; j++) {
                        stage[row * K_ROW + column + j] = static_cast<In>(k[place + at + column + j]);
                    }
                }
            }
        }
        async_commit();
    };
    bring(0);
    for (int part = 0; part < parts; part++) {
        int at = part * CHUNK, count = min(CHUNK, d - at);
        bring(part + 1);
        for (int i = thread; i < ROWS * CHUNK; i += KEYS) {
            int row = i / CHUNK, column = i % CHUNK;
            if (row < slot.rows && column < count) {
                query[i] = operand(static_cast<In>(q[output_of(call, slot, row) * d + at + column]));
            } else {
                query[i] = 0.0f;
            }
        }
        async_wait<1>();
        __syncthreads();
        SHARED_POINTER(In) own = room + part % 2 * KEYS * K_ROW + thread * K_ROW;
        if (stands) {
            int column = 0;
            for (; column + PACK <= count; column += PACK) {
                float v[8];
                unpack(load16(own + column), In(), v);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    if (sizeof(In) == 4) v[j] = operand(v[j]);
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float all[8];
#pragma unroll
                    for (int j = 0; j < PACK; j += 4) unpack(load16(query + r * CHUNK + column + j), fp32(), all + j);
#pragma unroll
                    for (int j = 0; j < PACK; j++) sums[r] = __fmaf_rn(all[j], v[j], sums[r]);
                }
            }
            for (; column < count; column++) {
                float v = operand(static_cast<In>(own[column]));
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = __fmaf_rn(query[r * CHUNK + column], v, sums[r]);
            }
        }
        __syncthreads();
    }

    GLOBAL(float) slot_scores = scores + static_cast<long long>(blockIdx.y) * ROWS * call.blocks * KEYS + key;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float s = sums[r];
        if (call.capped) s = __fmul_rn(call.cap, hyperbolic_tangent(__fmul_rn(s, call.cap_factor)));
        bool visible = froms[r] <= key && key < tos[r];
        if (visible) slot_scores[static_cast<long long>(r) * call.blocks * KEYS] = s;
        bool invalid = visible && !(s < INFINITE);
        bool any = __any_sync(WHOLE_WARP, invalid);
        float most = largest_of_warp(visible ? s : -INFINITE);
        if (thread % 32 == 0) warp_largest[thread / 32 * ROWS + r] = any ? NOT_A_NUMBER : most;
    }
    __syncthreads();
    if (thread < ROWS) {
        float most = warp_largest[thread];
        for (int warp = 1; warp < 8; warp++) {
            float other = warp_largest[warp * ROWS + thread];
            most = most != most || other != other ? NOT_A_NUMBER : fmaxf(most, other);
        }
        slot_largest[thread * call.blocks] = most;
    }
}

// The reference point of a row by the largest of its scores: 0 none, 1 a number, 2 not valid.
DEVICE int reference_of(const Call &call, float most, float &n) {
    n = rintf(__fmul_rn(most, call.c_hi));
    if (most != most) return 2;
    if (most == -INFINITE) return 0;
    return fabsf(n) < INFINITE ? 1 : 2;
}

DEVICE void finish_row(const Call &call, long long at, int state, float n, float l, GLOBAL(float) lse) {
    float value = -INFINITE;
    if (state == 1) value = log_sum(n, l);
    if (state == 2) value = NOT_A_NUMBER;
    lse[at] = value;
}

DEVICE Out finish_value(int state, float total, float l) {
    if (state == 0) return narrow<Out>(0.0f);
    return narrow<Out>(state == 2 ? NOT_A_NUMBER : __fdiv_rn(total, l));
}

// The largest score of each row over all blocks, by all threads.
template <int ROWS>
DEVICE void largest_of_rows(const Call &call, GLOBAL(const float) largest, SHARED_POINTER(float) room, SHARED_POINTER(float) most) {
    int thread = threadIdx.x;
    const int EACH = KEYS / ROWS;
    float mine = -INFINITE;
    for (int block = thread % EACH; block < call.blocks; block += EACH) {
        float other = largest[(static_cast<long long>(blockIdx.y) * ROWS + thread / EACH) * call.blocks + block];
        mine = mine != mine || other != other ? NOT_A_NUMBER : fmaxf(mine, other);
    }
    room[thread] = mine;
    __syncthreads();
    if (thread < ROWS) {
        float all = room[thread * EACH];
        for (int i = 1; i < EACH; i++) {
            float other = room[thread * EACH + i];
            all = all != all || other != other ? NOT_A_NUMBER : fmaxf(all, other);
        }
        most[thread] = all;
    }
    __syncthreads();
}

// Keys whose values are in hand at a time.
#define TOGETHER 8

// 64 threads to two columns each, four groups of threads to ROWS / 4 rows each.
template <int ROWS>
DEVICE void attention_values(const Call &call, GLOBAL(const In) v, GLOBAL(const int) q_start, GLOBAL(const int) q_pos,
                             GLOBAL(const int) starts, GLOBAL(const int) kv_len, GLOBAL(const float) scores,
                             GLOBAL(const float) largest, GLOBAL(float) partial, GLOBAL(float) partial_l, GLOBAL(Out) out,
                             GLOBAL(float) lse) {
    const int EACH = ROWS / 4;
    SHARED(long long, places, KEYS);
    SHARED(float, weights, KEYS * ROWS);
    SHARED(float, most, ROWS);
    SHARED(int, froms, ROWS);
    SHARED(int, tos, ROWS);
    Slot slot = slot_of(call, q_start, ROWS);
    if (slot.rows == 0) return;
    int thread = threadIdx.x, group = thread / 64, pair = thread % 64, e = call.value_dim;
    if (thread < ROWS) {
        int from, to;
        range_of(call, slot, thread, q_pos, kv_len, from, to);
        froms[thread] = from;
        tos[thread] = to;
    }
    // `weights` is free until the first block.
    largest_of_rows<ROWS>(call, largest, weights, most);
    int from = 0, to = 0;
    for (int r = 0; r < slot.rows; r++) {
        if (tos[r] > froms[r]) {
            from = to > from ? min(from, froms[r]) : froms[r];
            to = max(to, tos[r]);
        }
    }
    int block_from = call.split ? static_cast<int>(blockIdx.x) : from / KEYS;
    int block_to = call.split ? block_from + 1 : (to + KEYS - 1) / KEYS;
    bool two = e % 2 == 0 && aligned16(v);
    long long entry = static_cast<long long>(blockIdx.y) * call.blocks + blockIdx.x;

    for (int column = 0; column == 0 || column < e; column += 128) {
        int mine = column + 2 * pair;
        float totals[EACH][2], all_l[EACH];
#pragma unroll
        for (int r = 0; r < EACH; r++) totals[r][0] = totals[r][1] = all_l[r] = 0.0f;
        for (int block = block_from; block < block_to; block++) {
            int first = block * KEYS, key = first + thread;
            int begin = max(from, first), end = min(to, first + KEYS);
            __syncthreads();
            if (key >= begin && key < end) {
                places[thread] = (key_row(call, slot, key, starts) * call.kv_heads + slot.kv_head) * e;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    // Less than 0 where the key does not count.
                    float w = -1.0f;
                    if (froms[r] <= key && key < tos[r]) {
                        float s = scores[(static_cast<long long>(blockIdx.y) * ROWS + r) * call.blocks * KEYS + key], n;
                        if (reference_of(call, most[r], n) == 1 && s != -INFINITE) {
                            Split split = exp_split(s, call.c_hi, call.c_lo);
                            w = weight(split.m, split.i, n);
                        }
                    }
                    weights[thread * ROWS + r] = w;
                }
            }
            __syncthreads();
            float sums[EACH][2], l[EACH];
#pragma unroll
            for (int r = 0; r < EACH; r++) sums[r][0] = sums[r][1] = l[r] = 0.0f;
            for (int at = begin; at < end; at += TOGETHER) {
                float values[TOGETHER][2];
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    values[i][0] = values[i][1] = 0.0f;
                    if (at + i < end && mine < e) {
                        long long place = places[at + i - first] + mine;
                        if (sizeof(In) == 2 && two) {
                            unsigned both = load4(v + place);
                            In low, high;
                            split_pair(both, low, high);
                            values[i][0] = widen(low);
                            values[i][1] = widen(high);
                        } else {
                            values[i][0] = operand(static_cast<In>(v[place]));
                            if (mine + 1 < e) values[i][1] = operand(static_cast<In>(v[place + 1]));
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) {
                    if (at + i < end) {
#pragma unroll
                        for (int r = 0; r < EACH; r++) {
                            float w = weights[(at + i - first) * ROWS + group * EACH + r];
                            if (w >= 0.0f) {
                                sums[r][0] = __fmaf_rn(w, values[i][0], sums[r][0]);
                                sums[r][1] = __fmaf_rn(w, values[i][1], sums[r][1]);
                                // One warp of the group adds the weights.
                                if (pair < 32) l[r] = __fadd_rn(l[r], w);
                            }
                        }
                    }
                }
            }
            if (call.split) {
#pragma unroll
                for (int r = 0; r < EACH; r++) {
                    long long row = entry * ROWS + group * EACH + r;
                    if (mine < e) partial[row * e + mine] = sums[r][0];
                    if (mine + 1 < e) partial[row * e + mine + 1] = sums[r][1];
                    if (mine == 0) partial_l[row] = l[r];
                }
            } else {
#pragma unroll
                for (int r = 0; r < EACH; r++) {
                    totals[r][0] = __fadd_rn(totals[r][0], sums[r][0]);
                    totals[r][1] = __fadd_rn(totals[r][1], sums[r][1]);
                    all_l[r] = __fadd_rn(all_l[r], l[r]);
                }
            }
        }
        if (!call.split) {
            // The denominators go to the other warps of their groups.
            __syncthreads();
            if (pair == 0) {
#pragma unroll
                for (int r = 0; r < EACH; r++) weights[group * EACH + r] = all_l[r];
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                int row = group * EACH + r;
                if (row >= slot.rows) continue;
                float n, sum = weights[row];
                int state = reference_of(call, most[row], n);
                long long at = output_of(call, slot, row);
                if (mine < e) out[at * e + mine] = finish_value(state, totals[r][0], sum);
                if (mine + 1 < e) out[at * e + mine + 1] = finish_value(state, totals[r][1], sum);
                if (mine == 0) finish_row(call, at, state, n, sum, lse);
            }
        }
    }
}

// Adds the blocks of each row in ascending order; 64 threads to a row's columns.
template <int ROWS>
DEVICE void attention_join(const Call &call, GLOBAL(const int) q_start, GLOBAL(const float) largest,
                           GLOBAL(const float) partial, GLOBAL(const float) partial_l, GLOBAL(Out) out, GLOBAL(float) lse) {
    SHARED(float, room, KEYS);
    SHARED(float, most, ROWS);
    Slot slot = slot_of(call, q_start, ROWS);
    if (slot.rows == 0) return;
    largest_of_rows<ROWS>(call, largest, room, most);
    int e = call.value_dim;
    long long first = static_cast<long long>(blockIdx.y) * call.blocks;
    for (int row = threadIdx.x / 64; row < slot.rows; row += 4) {
        float n, l = 0.0f;
        int state = reference_of(call, most[row], n);
#pragma unroll 4
        for (int block = 0; block < call.blocks; block++) l = __fadd_rn(l, partial_l[(first + block) * ROWS + row]);
        long long at = output_of(call, slot, row);
        for (int column = threadIdx.x % 64; column < e; column += 64) {
            float total = 0.0f;
#pragma unroll 8
            for (int block = 0; block < call.blocks; block++) {
                total = __fadd_rn(total, partial[((first + block) * ROWS + row) * e + column]);
            }
            out[at * e + column] = finish_value(state, total, l);
        }
        if (threadIdx.x % 64 == 0) finish_row(call, at, state, n, l, lse);
    }
}

#define HEIGHT(rows, few, many)                                                                                        \
    KERNEL(256, few)                                                                                                   \
    attention_scores##rows(Call call, GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const int) q_start,               \
                           GLOBAL(const int) q_pos, GLOBAL(const int) starts, GLOBAL(const int) kv_len,                \
                           GLOBAL(float) scores, GLOBAL(float) largest) {                                              \
        SHARED_REST(In, room);                                                                                         \
        attention_scores<rows>(room, call, q, k, q_start, q_pos, starts, kv_len, scores, largest);                     \
    }                                                                                                                  \
    KERNEL(256, many)                                                                                                  \
    attention_values##rows(Call call, GLOBAL(const In) v, GLOBAL(const int) q_start, GLOBAL(const int) q_pos,          \
                           GLOBAL(const int) starts, GLOBAL(const int) kv_len, GLOBAL(const float) scores,             \
                           GLOBAL(const float) largest, GLOBAL(float) partial, GLOBAL(float) partial_l,                \
                           GLOBAL(Out) out, GLOBAL(float) lse) {                                                       \
        attention_values<rows>(call, v, q_start, q_pos, starts, kv_len, scores, largest, partial, partial_l, out,      \
                               lse);                                                                                   \
    }                                                                                                                  \
    KERNEL(256, 4)                                                                                                     \
    attention_join##rows(Call call, GLOBAL(const int) q_start, GLOBAL(const float) largest,                            \
                         GLOBAL(const float) partial, GLOBAL(const float) partial_l, GLOBAL(Out) out,                  \
                         GLOBAL(float) lse) {                                                                          \
        attention_join<rows>(call, q_start, largest, partial, partial_l, out, lse);                                    \
    }

HEIGHT(4, 3, 4)
HEIGHT(8, 2, 4)
HEIGHT(16, 2, 3)
