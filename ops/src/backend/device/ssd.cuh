// What the scan of Mamba-2 and its gradient share: scan/ssd.rs.
#pragma once
#include "reduce.cuh"

// A step in time: how long it is, what is left of the state, and the derivative of the step by dt, as far as no limit took its
// place.
struct Step {
    float e, k, slope;
    bool limited;
};

// The A of a head.
DEVICE float decay_rate(float a_log) { return -exponential(a_log); }

DEVICE Step step_of(float v, float a, float dt_min, float dt_max) {
    Step step{softplus(v), 0.0f, 0.0f, false};
    if (step.e < dt_min) {
        step.e = dt_min;
        step.limited = true;
    } else if (dt_max != 0.0f && step.e > dt_max) {
        step.e = dt_max;
        step.limited = true;
    }
    step.k = exponential(__fmul_rn(step.e, a));
    step.slope = sigmoid_of_number(v);
    return step;
}
