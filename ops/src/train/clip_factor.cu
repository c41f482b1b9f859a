// The norm of a gradient and the factor that clips it: sum[P] -> norm[1], factor[1]: clip_factor.rs. One block brings the
// sums, its first thread adds them.
#include "element.cuh"

KERNEL(256, 1)
clip_factor(GLOBAL(const float) sum, GLOBAL(float) norm, GLOBAL(float) factor, long long count, float max_norm) {
    SHARED(float, some, 1024);
    double total = 0.0;
    for (long long from = 0; from < count; from += 1024) {
        int here = static_cast<int>(min(count - from, 1024ll));
        for (int i = threadIdx.x; i < here; i += 256) some[i] = static_cast<float>(sum[from + i]);
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 8
            for (int i = 0; i < here; i++) total = __dadd_rn(total, static_cast<double>(static_cast<float>(some[i])));
        }
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    float root = __double2float_rn(__dsqrt_rn(total));
    // f32(1e-6)
    float quotient = __fdiv_rn(max_norm, __fadd_rn(root, __uint_as_float(0x358637BDu)));
    norm[0] = narrow<fp32>(root);
    factor[0] = narrow<fp32>(quotient > 1.0f ? 1.0f : quotient);
}
