// A gate and an up within limits: clamped_silu_mul.rs.
#pragma once
#include "elementwise.cuh"

struct Clamp {
    float alpha, limit;
    // A NaN stays.
    DEVICE float gate(float gate) const { return gate > limit ? limit : gate; }
    DEVICE float up(float up) const { return up > limit ? limit : up < -limit ? -limit : up; }
};
