// The rows of tokens that a chain of a sum over tokens adds: token/chains.rs.
#pragma once
#include "reduce.cuh"

struct Tokens {
    GLOBAL(const int) mask;
    int has_mask;
    long long rows;
    // Rows of a token.
    int heads;
    // The chain of the first row that is counted.
    int start;
};

// Calls `add(row)` for the rows of chain `chain`, ascending. The threads of a warp do so together.
template <class Add> DEVICE void each_row(const Tokens &tokens, int chain, const Add &add) {
    if (!tokens.has_mask) {
        for (long long row = (chain - tokens.start + CHAINS) % CHAINS; row < tokens.rows; row += CHAINS) add(row);
        return;
    }
    int count = tokens.start;
    for (long long from = 0; from < tokens.rows; from += 32) {
        long long row = from + threadIdx.x % 32;
        bool token = false;
        if (row < tokens.rows) token = tokens.mask[row / tokens.heads] != 0;
        unsigned counted = __ballot_sync(WHOLE_WARP, token);
        // Of 32 rows at most one is this chain's.
        int place = (chain - count + CHAINS) % CHAINS, found = __popc(counted);
        count = (count + found) % CHAINS;
        if (place >= found) continue;
        for (int i = 0; i < place; i++) counted &= counted - 1;
        add(from + __ffs(counted) - 1);
    }
}

// Eight sums from `at` on as they stand in `carry`, or +0 where there is none.
DEVICE Eight carried(GLOBAL(const float) carry, int has_carry, long long at, long long count) {
    if (has_carry && count > 0) return load_up_to8<float>(carry + at, count, aligned16(carry + at), 0.0f);
    return no_lanes();
}
