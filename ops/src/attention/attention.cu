// Attention: attention.rs. q[T,Hq,D], k and v in rows of Hkv * D and Hkv * E -> out[T,Hq,E], lse[T,Hq].
//
// A slot is a tile of ROWS query rows (query by query, and within one the heads of the group) that share a sequence and
// a key head. Three kernels: the scores of all keys and their largest by blocks of 256 keys; the weights of each block
// and its sums over the values; the blocks added in ascending order. The reference point n is known before any weight
// is made, so nothing is rescaled. Where slots are many, the second kernel goes through the blocks itself and the third
// is not needed.
#include "denominator.cuh"

// What all three kernels are told; the same struct is in device.rs.
struct Call {
    // Slots of earlier launches.
    long long slots_before;
    // 0 means none.
    long long window;
    // Tiles of a sequence and key head; a padded batch has as many rows of q to each sequence.
    int tiles, q_heads, kv_heads, head_dim, value_dim;
    int causal, chunk, capped, paged, page_size, page_columns;
    // Blocks of 256 keys, and whether each goes to a block of threads of its own.
    int blocks, split, sinks;
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
    if (call.chunk > 0) begin = max(begin, p - static_cast<int>(p) % call.chunk);
    to = static_cast<int>(end);
    from = static_cast<int>(min(begin, end));
}

// The row of k and v where a key stands.
DEVICE long long key_row(const Call &call, const Slot &slot, int key, GLOBAL(const int) starts) {
    if (!call.paged) return static_cast<long long>(starts[slot.sequence]) + key;
    int page = starts[static_cast<long long>(slot.sequence) * call.page_columns + key / call.page_size];
    return static_cast<long long>(page) * call.page_size + key % call.page_size;
}

// The larger of two largest scores; NaN, which stands for a row that is not valid, wins.
DEVICE float larger_or_invalid(float a, float b) { return a != a || b != b ? NOT_A_NUMBER : fmaxf(a, b); }

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
            most = larger_or_invalid(most, other);
        }
        slot_largest[thread * call.blocks] = most;
    }
}

// The sink of a row; one that is no term where there is none.
DEVICE Split sink_of(const Call &call, GLOBAL(const float) sinks, const Slot &slot, int row) {
    if (!call.sinks) return Split{1.0f, -INFINITE};
    float sink = sinks[slot.kv_head * slot.group + (slot.first + row) % slot.group];
    return exp_split(sink, LOG2E_HI, LOG2E_LO);
}

// The reference point of a row by the largest of its scores and its sink: 0 none, 1 a number, 2 not valid.
DEVICE int reference_of(const Call &call, float most, const Split &sink, float &n) {
    n = rintf(__fmul_rn(most, call.c_hi));
    bool no_key = most == -INFINITE;
    if (most != most || (!no_key && !(fabsf(n) < INFINITE)) || sink.i != sink.i) return 2;
    n = no_key ? sink.i : fmaxf(n, sink.i);
    if (n == -INFINITE) return 0;
    return n < INFINITE ? 1 : 2;
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

// The largest score of a row over all blocks, by the threads of a warp.
DEVICE float largest_of_row(const Call &call, GLOBAL(const float) largest, int height, int row) {
    GLOBAL(const float) blocks = largest + (static_cast<long long>(blockIdx.y) * height + row) * call.blocks;
    float most = -INFINITE;
    for (int block = threadIdx.x % 32; block < call.blocks; block += 32) most = larger_or_invalid(most, blocks[block]);
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) most = larger_or_invalid(most, __shfl_xor_sync(WHOLE_WARP, most, h));
    return most;
}

// Warps of a block of attention_values, and keys whose values are in hand at a time.
#define WARPS 4
#define TOGETHER 8

// Four columns of a value, from `column` on; those behind the last are +0. Where `whole`, rows are whole groups of
// four.
DEVICE void value_at(GLOBAL(const In) v, long long place, int column, int e, bool whole, float *out) {
    if (whole) {
        if (sizeof(In) == 2) {
            uint2 raw = load8_raw(v + place + column);
            float all[8];
            unpack(make_uint4(raw.x, raw.y, 0, 0), In(), all);
#pragma unroll
            for (int c = 0; c < 4; c++) out[c] = all[c];
        } else {
            unpack(load16(v + place + column), In(), out);
#pragma unroll
            for (int c = 0; c < 4; c++) out[c] = operand(out[c]);
        }
    } else {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            out[c] = 0.0f;
            if (column + c < e) out[c] = operand(static_cast<In>(v[place + column + c]));
        }
    }
}

// A task is four rows of a slot, 128 columns of the values, and one block of keys or all of them; a warp takes a task,
// a lane four columns.
template <int ROWS>
DEVICE void attention_values(const Call &call, GLOBAL(const In) v, GLOBAL(const int) q_start, GLOBAL(const int) q_pos,
                             GLOBAL(const int) starts, GLOBAL(const int) kv_len, GLOBAL(const float) scores,
                             GLOBAL(const float) largest, GLOBAL(float) partial, GLOBAL(float) partial_l,
                             GLOBAL(const float) sinks, GLOBAL(Out) out, GLOBAL(float) lse) {
    SHARED(float, all_weights, WARPS * KEYS * 4);
    SHARED(int, all_places, WARPS * KEYS);
    Slot slot = slot_of(call, q_start, ROWS);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = call.value_dim;
    int task = static_cast<int>(blockIdx.x) * WARPS + warp, parts = max(1, (e + 127) / 128);
    int first_row = task % (ROWS / 4) * 4, part = task / (ROWS / 4) % parts, own_block = task / (ROWS / 4) / parts;
    if (first_row >= slot.rows || own_block >= (call.split ? call.blocks : 1)) return;
    SHARED_POINTER(float) weights = all_weights + warp * KEYS * 4;
    SHARED_POINTER(int) places = all_places + warp * KEYS;

    int froms[4], tos[4], states[4], from = 0, to = 0;
    float n[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        range_of(call, slot, first_row + r, q_pos, kv_len, froms[r], tos[r]);
        if (tos[r] > froms[r]) {
            from = to > from ? min(from, froms[r]) : froms[r];
            to = max(to, tos[r]);
        }
        states[r] = 0;
        n[r] = 0.0f;
        if (first_row + r < slot.rows) {
            Split sink = sink_of(call, sinks, slot, first_row + r);
            states[r] = reference_of(call, largest_of_row(call, largest, ROWS, first_row + r), sink, n[r]);
        }
    }
    int block_from = call.split ? own_block : from / KEYS;
    int block_to = call.split ? own_block + 1 : (to + KEYS - 1) / KEYS;
    int column = part * 128 + lane * 4;
    bool whole = e % 4 == 0 && aligned16(v);
    // Lanes behind the last column go along with the first.
    int from_column = whole && column >= e ? 0 : column;
    long long stride = static_cast<long long>(call.kv_heads) * e, head = static_cast<long long>(slot.kv_head) * e;
    GLOBAL(const float) slot_scores = scores + static_cast<long long>(blockIdx.y) * ROWS * call.blocks * KEYS;

    float totals[4][4], all_l[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        all_l[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) totals[r][c] = 0.0f;
    }
    for (int block = block_from; block < block_to; block++) {
        int first = block * KEYS, begin = max(from, first), end = min(to, first + KEYS);
        bool hidden = false;
        // The lanes are done with the weights of the block before.
        __syncwarp();
        for (int key = first + lane; key < end; key += 32) {
            if (key < begin) continue;
            places[key - first] = static_cast<int>(key_row(call, slot, key, starts));
            float w[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                // Less than 0 where the key does not count. Sums of rows that have no valid weights are never used.
                w[r] = 0.0f;
                if (states[r] == 1) {
                    w[r] = -1.0f;
                    if (froms[r] <= key && key < tos[r]) {
                        float s = slot_scores[static_cast<long long>(first_row + r) * call.blocks * KEYS + key];
                        Split split = exp_split(s, call.c_hi, call.c_lo);
                        if (s != -INFINITE) w[r] = weight(split.m, split.i, n[r]);
                    }
                }
                hidden |= w[r] < 0.0f;
            }
            store16(weights + (key - first) * 4, make_uint4(__float_as_uint(w[0]), __float_as_uint(w[1]),
                                                            __float_as_uint(w[2]), __float_as_uint(w[3])));
        }
        // Where every key counts for every row nobody has to look. A vote orders no memory: other lanes' weights and places are there
        // behind the barrier.
        hidden = __any_sync(WHOLE_WARP, hidden);
        __syncwarp();

        float sums[4][4], l[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            l[r] = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; c++) sums[r][c] = 0.0f;
        }
        auto add = [&](int key, const float *value, bool look) {
            float w[4];
            unpack(load16(weights + (key - first) * 4), fp32(), w);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                bool counts = !look || w[r] >= 0.0f;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float sum = __fmaf_rn(w[r], value[c], sums[r][c]);
                    sums[r][c] = counts ? sum : sums[r][c];
                }
                float sum = __fadd_rn(l[r], w[r]);
                l[r] = counts ? sum : l[r];
            }
        };
        int at = begin;
        for (; at + TOGETHER <= end; at += TOGETHER) {
            float values[TOGETHER][4];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) value_at(v, places[at + i - first] * stride + head, from_column, e, whole, values[i]);
            if (hidden) {
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) add(at + i, values[i], true);
            } else {
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) add(at + i, values[i], false);
            }
        }
        for (; at < end; at++) {
            float value[4];
            value_at(v, places[at - first] * stride + head, from_column, e, whole, value);
            add(at, value, true);
        }
        if (call.split) {
            long long entry = static_cast<long long>(blockIdx.y) * call.blocks + block;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                long long row = entry * ROWS + first_row + r;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (column + c < e) partial[row * e + column + c] = sums[r][c];
                }
                if (lane == 0 && part == 0) partial_l[row] = l[r];
            }
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                all_l[r] = __fadd_rn(all_l[r], l[r]);
#pragma unroll
                for (int c = 0; c < 4; c++) totals[r][c] = __fadd_rn(totals[r][c], sums[r][c]);
            }
        }
    }
    if (call.split) return;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (first_row + r >= slot.rows) continue;
        long long at = output_of(call, slot, first_row + r);
        Split sink = sink_of(call, sinks, slot, first_row + r);
        all_l[r] = __fadd_rn(all_l[r], weight(sink.m, sink.i, n[r]));
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (column + c < e) out[at * e + column + c] = finish_value(states[r], totals[r][c], all_l[r]);
        }
        if (lane == 0 && part == 0) finish_row(call, at, states[r], n[r], all_l[r], lse);
    }
}

// Adds the blocks of each row in ascending order; a warp takes a row.
template <int ROWS>
DEVICE void attention_join(const Call &call, GLOBAL(const int) q_start, GLOBAL(const float) largest,
                           GLOBAL(const float) partial, GLOBAL(const float) partial_l, GLOBAL(const float) sinks,
                           GLOBAL(Out) out, GLOBAL(float) lse) {
    Slot slot = slot_of(call, q_start, ROWS);
    int lane = threadIdx.x % 32, e = call.value_dim;
    long long first = static_cast<long long>(blockIdx.y) * call.blocks;
    for (int row = threadIdx.x / 32; row < slot.rows; row += WARPS) {
        float n, l = 0.0f;
        Split sink = sink_of(call, sinks, slot, row);
        int state = reference_of(call, largest_of_row(call, largest, ROWS, row), sink, n);
#pragma unroll 8
        for (int block = 0; block < call.blocks; block++) l = __fadd_rn(l, partial_l[(first + block) * ROWS + row]);
        l = __fadd_rn(l, weight(sink.m, sink.i, n));
        long long at = output_of(call, slot, row);
        for (int column = lane; column < e; column += 32) {
            float total = 0.0f;
#pragma unroll 8
            for (int block = 0; block < call.blocks; block++) {
                total = __fadd_rn(total, partial[((first + block) * ROWS + row) * e + column]);
            }
            out[at * e + column] = finish_value(state, total, l);
        }
        if (lane == 0) finish_row(call, at, state, n, l, lse);
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
    KERNEL(128, many)                                                                                                  \
    attention_values##rows(Call call, GLOBAL(const In) v, GLOBAL(const int) q_start, GLOBAL(const int) q_pos,          \
                           GLOBAL(const int) starts, GLOBAL(const int) kv_len, GLOBAL(const float) scores,             \
                           GLOBAL(const float) largest, GLOBAL(float) partial, GLOBAL(float) partial_l,                \
                           GLOBAL(const float) sinks, GLOBAL(Out) out, GLOBAL(float) lse) {                            \
        attention_values<rows>(call, v, q_start, q_pos, starts, kv_len, scores, largest, partial, partial_l, sinks,    \
                               out, lse);                                                                              \
    }                                                                                                                  \
    KERNEL(128, 8)                                                                                                     \
    attention_join##rows(Call call, GLOBAL(const int) q_start, GLOBAL(const float) largest,                            \
                         GLOBAL(const float) partial, GLOBAL(const float) partial_l, GLOBAL(const float) sinks,        \
                         GLOBAL(Out) out, GLOBAL(float) lse) {                                                         \
        attention_join<rows>(call, q_start, largest, partial, partial_l, sinks, out, lse);                             \
    }

HEIGHT(4, 3, 4)
HEIGHT(8, 2, 4)
HEIGHT(16, 2, 4)
