// Choice of experts: logits[T,E], bias[E]?, experts[T,K]? -> index[T,K], weight[T,K]: route.rs. A warp takes a token. Scores are the
// softmax, which another kernel has made, the sigmoid of the logits, or these. Groups and experts are taken one after the
// other: the largest that is left, the lowest index among equals.
#include "math.cuh"
#include "rank.cuh"

// What the kernel is told; the same struct is in route.rs.
struct Choice {
    int experts, chosen, groups, top_groups;
    // What scores are: softmaxes, sigmoids or logits.
    int scoring;
    // Whether logits decide the choice, whether there is a bias, whether a group is worth its two largest choices, and
    // whether weights are divided by their sum. Whether experts are named.
    int by_logits, has_bias, has_experts, top_two, normalise;
    float scale;
};

DEVICE float score_of(const Choice &choice, GLOBAL(const In) logits, GLOBAL(const float) softmax, long long at) {
    if (choice.scoring == 0) return softmax[at];
    float logit = widen(static_cast<In>(logits[at]));
    return choice.scoring == 1 ? sigmoid(logit) : logit;
}

// The place of the largest of `count` ranks, which becomes 0: taken. All threads return it.
DEVICE int take_largest(SHARED_POINTER(unsigned) ranks, int count) {
    unsigned best = 0, place = 0xFFFFFFFFu;
    for (int i = threadIdx.x; i < count; i += 32) {
        unsigned rank = ranks[i];
        take_better(best, place, rank, static_cast<unsigned>(i));
    }
    best_of_warp(best, place);
    // All lanes have read their ranks: shuffles order no memory.
    __syncwarp();
    if (threadIdx.x == 0) ranks[place] = 0u;
    __syncwarp();
    return static_cast<int>(place);
}

// The weights of a token from the scores of its experts, to whose sum `more` is added where there is any.
template <class Score>
DEVICE void weigh(Score score, int chosen, int normalise, float more, float scale, GLOBAL(float) weight) {
    float sum = 0.0f;
    if (normalise) {
        for (int rank = 0; rank < chosen; rank++) sum = __fadd_rn(sum, score(rank));
        if (more > 0.0f) sum = __fadd_rn(sum, more);
    }
    for (int rank = 0; rank < chosen; rank++) {
        float w = score(rank);
        if (normalise) w = __fdiv_rn(w, sum);
        weight[rank] = narrow<fp32>(__fmul_rn(w, scale));
    }
}

KERNEL(32, 16) route(Choice choice, GLOBAL(const In) logits, GLOBAL(const float) softmax, GLOBAL(const In) bias,
                     GLOBAL(const int) named, GLOBAL(int) index, GLOBAL(float) weight) {
    SHARED_REST(unsigned, room);
    int lane = threadIdx.x, size = choice.experts / choice.groups;
    long long first = static_cast<long long>(blockIdx.x) * choice.experts;
    // Ranks of the experts and of the groups, and the weights of the chosen ones; 0 stands for what is out.
    SHARED_POINTER(unsigned) ranks = room;
    SHARED_POINTER(unsigned) group_ranks = room + choice.experts;
    SHARED_POINTER(float) weights = as_elements<float>(group_ranks + choice.groups);
    auto value_of = [&](int expert) {
        float value = choice.by_logits ? widen(static_cast<In>(logits[first + expert]))
                                       : score_of(choice, logits, softmax, first + expert);
        if (choice.has_bias) value = __fadd_rn(value, widen(static_cast<In>(bias[expert])));
        return value;
    };
    for (int e = lane; e < choice.experts; e += 32) ranks[e] = rank_of(value_of(e));
    __syncwarp();
    if (choice.has_experts) named = named + static_cast<long long>(blockIdx.x) * choice.chosen;
    if (choice.has_experts && named[0] >= 0) {
        for (int e = lane; e < choice.experts; e += 32) {
            bool out = true;
            for (int i = 0; i < choice.chosen; i++) out = out && named[i] != e;
            if (out) ranks[e] = 0u;
        }
        __syncwarp();
    } else if (choice.top_groups < choice.groups) {
        for (int g = lane; g < choice.groups; g += 32) {
            unsigned best = 0, place = 0xFFFFFFFFu, next = 0, next_place = 0xFFFFFFFFu;
            for (int i = 0; i < size; i++) {
                unsigned rank = ranks[g * size + i];
                if (rank > best) {
                    next = best;
                    next_place = place;
                    best = rank;
                    place = g * size + i;
                } else {
                    take_better(next, next_place, rank, static_cast<unsigned>(g * size + i));
                }
            }
            float worth = value_of(static_cast<int>(place));
            if (choice.top_two) worth = __fadd_rn(worth, value_of(static_cast<int>(next_place)));
            group_ranks[g] = rank_of(worth);
        }
        __syncwarp();
        for (int i = 0; i < choice.top_groups; i++) take_largest(group_ranks, choice.groups);
        for (int e = lane; e < choice.experts; e += 32) {
            unsigned left = group_ranks[e / size];
            if (left != 0u) ranks[e] = 0u;
        }
        __syncwarp();
    }
    for (int rank = 0; rank < choice.chosen; rank++) {
        int expert = take_largest(ranks, choice.experts);
        if (lane == 0) {
            index[static_cast<long long>(blockIdx.x) * choice.chosen + rank] = expert;
            weights[rank] = score_of(choice, logits, softmax, first + expert);
        }
    }
    if (lane != 0) return;
    auto score = [&](int rank) { return static_cast<float>(weights[rank]); };
    float more = choice.scoring == 1 ? ROUTE_SUM : 0.0f;
    weigh(score, choice.chosen, choice.normalise, more, choice.scale,
          weight + static_cast<long long>(blockIdx.x) * choice.chosen);
}

// SparseMixer: of a choice the logits that count for its weight, -infinity for the others. A warp takes a choice.
KERNEL(32, 16) route_near(GLOBAL(const In) logits, GLOBAL(const int) index, GLOBAL(float) near, int experts, int chosen,
                          float limit) {
    long long choice = blockIdx.x;
    int rank = static_cast<int>(choice % chosen);
    logits = logits + choice / chosen * experts;
    float top = widen(static_cast<In>(logits[index[choice]]));
    for (int expert = threadIdx.x; expert < experts; expert += 32) {
        float x = widen(static_cast<In>(logits[expert])), size = fabsf(x) < top ? top : fabsf(x);
        bool out = __fdiv_rn(__fsub_rn(top, x), size) > limit;
        for (int before = 1; before <= rank; before++) out = out || index[choice - before] == expert;
        near[choice * experts + expert] = out ? -INFINITE : x;
    }
}

// The weights of tokens from the softmaxes of their choices, a thread each.
KERNEL(32, 16) route_weights(GLOBAL(const float) shares, GLOBAL(const int) index, GLOBAL(float) weight, long long tokens,
                             int experts, int chosen, int normalise, float scale) {
    long long token = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    auto score = [&](int rank) {
        long long choice = token * chosen + rank;
        return static_cast<float>(shares[choice * experts + index[choice]]);
    };
    weigh(score, chosen, normalise, 0.0f, scale, weight + token * chosen);
}
