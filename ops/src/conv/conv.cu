// Convolution of images: x[B,C,D,H,W], w[O,I,KD,KH,KW], bias[O]? -> y[B,O,OD,OH,OW]: conv.rs. A thread takes an output. Of a
// group there are `outputs` channels of y and `channels` of x.
#include "patches.cuh"

KERNEL(256, 4)
conv(Lattice of, GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y,
     long long count, int groups, int outputs, int channels) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int place = static_cast<int>(i % places_of(of)), taps = taps_of(of);
    // Groups are counted through all images, as rows of w are within one.
    long long row = i / places_of(of), group = row / outputs, o = row % (static_cast<long long>(groups) * outputs);
    GLOBAL(const In) factors = w + o * channels * taps;
    float sum = sum_of_patches(of, x + group * channels * extent_of(of), channels, place, [&](int channel, int tap) {
        return widen(static_cast<In>(factors[static_cast<long long>(channel) * taps + tap]));
    });
    if (has_bias) sum = __fadd_rn(sum, widen(static_cast<In>(bias[o])));
    y[i] = narrow<Out>(sum);
}
