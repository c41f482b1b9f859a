// The negative log-likelihood: logprob[B,T], count[B,T] -> per_sequence[B], dlogprob[B,T]: nll.rs.
#include "sequences.cuh"

KERNEL(256, 4)
nll(GLOBAL(const float) logprob, GLOBAL(const int) count, GLOBAL(float) per_sequence, GLOBAL(float) dlogprob,
    long long length, int mean, float denominator) {
    long long at = static_cast<long long>(blockIdx.x) * length;
    GLOBAL(const float) own = logprob + at;
    auto loss = [&](long long token) { return TokenLoss{-static_cast<float>(own[token]), -1.0f}; };
    sequence_loss(loss, count + at, per_sequence, dlogprob + at, length, mean, denominator);
}
