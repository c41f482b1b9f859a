// The clipped policy gradient loss: logprob[B,T], old_logprob[B,T], advantage[B], reference[B,T]?, count[B,T] ->
// per_sequence[B], dlogprob[B,T]: policy_loss.rs. `kl` is 1, 3 or, without a reference, 0.
#include "sequences.cuh"

KERNEL(256, 4)
policy_loss(GLOBAL(const float) logprob, GLOBAL(const float) old_logprob, GLOBAL(const float) advantage,
            GLOBAL(const float) reference, GLOBAL(const int) count, GLOBAL(float) per_sequence, GLOBAL(float) dlogprob,
            long long length, int mean, float denominator, float least, float most, int kl, float beta) {
    long long at = static_cast<long long>(blockIdx.x) * length;
    float worth = advantage[blockIdx.x];
    auto loss = [&](long long token) {
        float a = logprob[at + token];
        float ratio = exponential(__fsub_rn(a, old_logprob[at + token])), clamped = ratio;
        if (clamped < least) clamped = least;
        if (clamped > most) clamped = most;
        float u = __fmul_rn(ratio, worth), v = __fmul_rn(clamped, worth);
        TokenLoss made = v < u ? TokenLoss{-v, 0.0f} : TokenLoss{-u, -u};
        if (kl == 0) return made;
        float r = reference[at + token];
        if (kl == 1) {
            return TokenLoss{__fmaf_rn(beta, __fsub_rn(a, r), made.value), __fadd_rn(made.slope, beta)};
        }
        float d = __fsub_rn(r, a), e = exponential(d);
        float value = __fmaf_rn(beta, __fsub_rn(__fsub_rn(e, d), 1.0f), made.value);
        return TokenLoss{value, __fmaf_rn(beta, __fsub_rn(1.0f, e), made.slope)};
    };
    sequence_loss(loss, count + at, per_sequence, dlogprob + at, length, mean, denominator);
}
