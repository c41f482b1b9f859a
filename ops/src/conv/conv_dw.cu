// Gradients of the weight and the bias of a convolution: x[B,C,D,H,W], dy[B,O,OD,OH,OW], mask[B]?, carry[O,I,KD,KH,KW] ->
// dw[O,I,KD,KH,KW], dbias[B,O]: conv_dw.rs. Of a group there are `outputs` channels of y and `channels` of x.
#include "block.cuh"
#include "patches.cuh"

// A thread takes an element of dw: a chain over all places of the images that count.
KERNEL(256, 4)
conv_dw(Lattice of, GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const int) mask, int has_mask,
        GLOBAL(const float) carry, GLOBAL(float) dw, long long count, int batch, int groups, int outputs, int channels) {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int taps = taps_of(of), places = places_of(of), tap = static_cast<int>(i % taps);
    long long channel = i / taps % channels, o = i / taps / channels, group = o / outputs;
    float sum = carry[i];
    for (int b = 0; b < batch; b++) {
        if (has_mask && mask[b] == 0) continue;
        GLOBAL(const In) image = x + ((static_cast<long long>(b) * groups + group) * channels + channel) * extent_of(of);
        GLOBAL(const In) gradients = dy + (static_cast<long long>(b) * groups * outputs + o) * places;
        for (int place = 0; place < places; place++) {
            sum = __fmaf_rn(widen(static_cast<In>(gradients[place])), patch(of, image, place, tap), sum);
        }
    }
    dw[i] = narrow<fp32>(sum);
}

// A block takes a channel of an image.
KERNEL(256, 4) conv_dw_biases(GLOBAL(const In) dy, GLOBAL(float) dbias, long long places) {
    SHARED(float, room, LANES);
    dy = dy + blockIdx.x * places;
    float lane = 0.0f;
    for (long long i = threadIdx.x; i < places; i += LANES) lane = __fadd_rn(lane, widen(static_cast<In>(dy[i])));
    float sum = fold_block(lane, room);
    if (threadIdx.x == 0) dbias[blockIdx.x] = narrow<fp32>(sum);
}
