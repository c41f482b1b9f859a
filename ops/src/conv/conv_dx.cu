// Gradient of the images of a convolution: dy[B,O,OD,OH,OW], w[O,I,KD,KH,KW], offset[C]? -> dx[B,C,D,H,W]: conv_dx.rs. A thread takes
// an element of dx. Of a group there are `channels` channels of x and `outputs` of y.
#include "patches.cuh"

KERNEL(256, 4)
conv_dx(Lattice of, GLOBAL(const In) dy, GLOBAL(const In) w, GLOBAL(const In) offset, int has_offset, GLOBAL(Out) dx,
        long long count, int groups, int channels, int outputs) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int place = static_cast<int>(i % places_of(of)), taps = taps_of(of);
    // Groups are counted through all images.
    long long row = i / places_of(of), group = row / channels;
    GLOBAL(const In) factors = w + (group % groups * outputs * channels + row % channels) * taps;
    float sum = sum_of_patches(of, dy + group * outputs * extent_of(of), outputs, place, [&](int o, int tap) {
        return widen(static_cast<In>(factors[static_cast<long long>(o) * channels * taps + tap]));
    });
    if (has_offset) sum = __fadd_rn(sum, widen(static_cast<In>(offset[row % (static_cast<long long>(groups) * channels)])));
    dx[i] = narrow<Out>(sum);
}
