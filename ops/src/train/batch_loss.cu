// The loss of a logical batch: per_sequence[B] -> loss[1]: batch_loss.rs. One block; a thread takes groups that stand side
// by side, whose sums it joins, and then threads join theirs.
#include "reduce.cuh"

KERNEL(256, 1)
batch_loss(GLOBAL(const float) per_sequence, GLOBAL(float) loss, long long count, int groups, float denominator) {
    SHARED(float, sums, 256);
    int threads = min(groups, 256), each = groups / threads;
    if (threadIdx.x < threads) {
        // Sums that wait for their other half, in the place of its level.
        float waiting[16], sum = 0.0f;
        for (int i = 0; i < each; i++) {
            long long group = static_cast<long long>(threadIdx.x) * each + i;
            sum = 0.0f;
            for (long long at = group * count / groups; at < (group + 1) * count / groups; at++) {
                sum = __fadd_rn(sum, per_sequence[at]);
            }
            int level = 0;
            for (int left = i; left & 1; left >>= 1) sum = __fadd_rn(waiting[level++], sum);
            waiting[level] = sum;
        }
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
    for (int by = 1; by < threads; by *= 2) {
        float sum = 0.0f;
        bool joins = threadIdx.x % (2 * by) == 0 && threadIdx.x < threads;
        if (joins) sum = __fadd_rn(sums[threadIdx.x], sums[threadIdx.x + by]);
        __syncthreads();
        if (joins) sums[threadIdx.x] = sum;
        __syncthreads();
    }
    if (threadIdx.x == 0) loss[0] = narrow<fp32>(__fdiv_rn(sums[0], denominator));
}
