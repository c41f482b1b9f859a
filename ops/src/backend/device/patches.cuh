// Patches of an image as operands of products: patches.rs.
#pragma once
#include "reduce.cuh"

// How places meet an image, by depth, height and width; the same struct is in window.rs.
struct Lattice {
    int places_d, places_h, places_w, taps_d, taps_h, taps_w, extent_d, extent_h, extent_w;
    int multiply_d, multiply_h, multiply_w, step_d, step_h, step_w, offset_d, offset_h, offset_w;
    int divide_d, divide_h, divide_w;
};

DEVICE int places_of(const Lattice &of) { return of.places_d * of.places_h * of.places_w; }
DEVICE int taps_of(const Lattice &of) { return of.taps_d * of.taps_h * of.taps_w; }

// The place of an axis of the image that a tap meets, or -1.
DEVICE int met(int place, int tap, int extent, int multiply, int step, int offset, int divide) {
    int at = place * multiply + tap * step + offset;
    if (at < 0 || at % divide != 0 || at / divide >= extent) return -1;
    return at / divide;
}

// What a tap meets of the channel at `image`; +0 where that is nothing.
DEVICE float patch(const Lattice &of, GLOBAL(const In) image, int place, int tap) {
    int d = met(place / of.places_w / of.places_h, tap / of.taps_w / of.taps_h, of.extent_d, of.multiply_d, of.step_d,
                of.offset_d, of.divide_d);
    int h = met(place / of.places_w % of.places_h, tap / of.taps_w % of.taps_h, of.extent_h, of.multiply_h, of.step_h,
                of.offset_h, of.divide_h);
    int w = met(place % of.places_w, tap % of.taps_w, of.extent_w, of.multiply_w, of.step_w, of.offset_w, of.divide_w);
    if (d < 0 || h < 0 || w < 0) return 0.0f;
    return widen(static_cast<In>(image[(static_cast<long long>(d) * of.extent_h + h) * of.extent_w + w]));
}

DEVICE long long extent_of(const Lattice &of) { return static_cast<long long>(of.extent_d) * of.extent_h * of.extent_w; }

// The sum over the channels at `images` and their taps, of which `factor(channel, tap)` are the factors: segments of chains.
template <class Factor>
DEVICE float sum_of_patches(const Lattice &of, GLOBAL(const In) images, int channels, int place, Factor factor) {
    int taps = taps_of(of), channel = 0, tap = 0;
    long long terms = static_cast<long long>(channels) * taps, length = segment_length(terms), k = 0;
    float sums[SEGMENTS];
    for (int segment = 0; segment < SEGMENTS; segment++) {
        float sum = 0.0f;
        for (; k < terms && k < (segment + 1) * length; k++) {
            sum = __fmaf_rn(factor(channel, tap), patch(of, images + channel * extent_of(of), place, tap), sum);
            if (++tap == taps) {
                tap = 0;
                channel++;
            }
        }
        sums[segment] = sum;
    }
    return join_segments(sums);
}
