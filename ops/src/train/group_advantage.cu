// Advantages of the samples of a prompt: reward[P,S] -> advantage[P,S]: group_advantage.rs. A thread takes a prompt.
#include "element.cuh"

KERNEL(128, 8)
group_advantage(GLOBAL(const float) reward, GLOBAL(float) advantage, long long prompts, long long samples, int divide,
                float eps) {
    long long prompt = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (prompt >= prompts) return;
    reward = reward + prompt * samples;
    advantage = advantage + prompt * samples;
    float sum = 0.0f, squares = 0.0f, count = static_cast<float>(samples);
    for (long long i = 0; i < samples; i++) sum = __fadd_rn(sum, reward[i]);
    float mean = __fdiv_rn(sum, count);
    for (long long i = 0; i < samples; i++) {
        float d = __fsub_rn(reward[i], mean);
        squares = __fmaf_rn(d, d, squares);
    }
    float deviation = __fadd_rn(__fsqrt_rn(__fdiv_rn(squares, count)), eps);
    for (long long i = 0; i < samples; i++) {
        float d = __fsub_rn(reward[i], mean);
        advantage[i] = narrow<fp32>(divide ? __fdiv_rn(d, deviation) : d);
    }
}
