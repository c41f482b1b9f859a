//! Mutations of norms of groups and of convolutions of images.

use crate::mutation::{Mutant, Mutation, Others};
use crate::plain::values;
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::implementation::Implementation;

/// What stands before an image stands behind it, and the other way round.
fn with_padding_on_the_other_side(mutant: &Mutant, case: &Case) -> Answer {
    mutant.asked(case, |case| {
        for (before, behind) in [("pad_front", "pad_back"), ("pad_top", "pad_bottom"), ("pad_left", "pad_right")] {
            let (first, last) = (case.params.remove(before), case.params.remove(behind));
            case.params.extend(first.map(|pad| (behind.to_string(), pad)));
            case.params.extend(last.map(|pad| (before.to_string(), pad)));
        }
    })
}

/// The channels that a sum runs over from the last to the first, where all are in one group: an axis of the activations `name`
/// and one of w.
fn with_channels_in_reverse(mutant: &Mutant, case: &Case, name: &str, axis_of_w: usize) -> Answer {
    mutant.asked(case, |case| {
        if case.params.contains_key("groups") {
            return;
        }
        for (name, axis) in [(name, 1), ("w", axis_of_w)] {
            let channels: Vec<usize> = (0..case.inputs[name].shape()[axis]).rev().collect();
            let turned = case.inputs[name].select(axis, &channels);
            case.inputs.insert(name.into(), turned);
        }
    })
}

/// Groups of channels whose scale is that of a variance over N - 1.
fn with_unbiased_variance(mutant: &Mutant, case: &Case) -> Answer {
    let mut answer = mutant.honest.run(case);
    let (x, shape) = (values(&case.inputs["x"]), case.inputs["x"].shape().to_vec());
    let number =
        |name: &str, default: f64| case.params.get(name).map_or(default, |v| v.parse().expect("it is checked"));
    let (groups, eps) = (number("groups", 1.0) as usize, number("eps", 1e-5));
    let n = shape[1] / groups * shape[2];
    let Some(y) = answer.outputs.get_mut("y").filter(|_| n > 1 && !case.params.contains_key("silu")) else {
        return answer;
    };
    let given = |name: &str| case.inputs.get(name).map(values);
    let (w, bias) = (given("w"), given("bias"));
    let mut made = Vec::with_capacity(x.len());
    for (group, x) in x.chunks(n).enumerate() {
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        let squares: f64 = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
        let r = 1.0 / (squares / (n - 1) as f64 + eps).sqrt();
        made.extend(x.iter().enumerate().map(|(i, x)| {
            let channel = (group * (shape[1] / groups) + i / shape[2]) % shape[1];
            let h = (f64::from(*x) - mean) * r;
            h * w.as_ref().map_or(1.0, |w| f64::from(w[channel])) + bias.as_ref().map_or(0.0, |b| f64::from(b[channel]))
        }));
    }
    *y = round::tensor(y.dtype(), &shape, &made);
    answer
}

pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "unbiased_variance",
        about: "The variance of a group is the sum of squares over N - 1.",
        op: "group_norm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: with_unbiased_variance,
    },
    Mutation {
        name: "silu_left_out",
        about: "What a norm with silu gives is the norm.",
        op: "group_norm",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.params.remove("silu"))),
    },
    Mutation {
        name: "bias_forgotten_on_the_way_back",
        about: "The slope of silu is that of the norm without its bias.",
        op: "group_norm_backward",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("bias"))),
    },
    Mutation {
        name: "padding_on_the_other_side",
        about: "An axis that is padded on one side is padded on the other.",
        op: "conv",
        caught_by: "accuracy",
        also_red: Others::Are(&["golden"]),
        answer: with_padding_on_the_other_side,
    },
    Mutation {
        name: "channels_of_x_in_reverse",
        about: "The channels of x are added from the last to the first.",
        op: "conv",
        caught_by: "golden",
        also_red: Others::Are(&["arithmetic"]),
        answer: |mutant, case| with_channels_in_reverse(mutant, case, "x", 1),
    },
    Mutation {
        name: "images_two_at_a_time",
        about: "The images of an even number are convolved in pairs, by sums whose channels are in reverse.",
        op: "conv",
        caught_by: "invariance:batch",
        also_red: Others::Are(&["golden", "invariance:padding"]),
        answer: |mutant, case| match case.inputs["x"].shape()[0] % 2 {
            0 => with_channels_in_reverse(mutant, case, "x", 1),
            _ => mutant.honest.run(case),
        },
    },
    Mutation {
        name: "channels_of_y_in_reverse",
        about: "The channels of dy are added from the last to the first.",
        op: "conv_dx",
        caught_by: "golden",
        also_red: Others::Are(&["arithmetic"]),
        answer: |mutant, case| with_channels_in_reverse(mutant, case, "dy", 0),
    },
    Mutation {
        name: "images_of_padding_counted",
        about: "Images that do not count are added as all others.",
        op: "conv_dw",
        caught_by: "invariance:padding",
        also_red: Others::Are(&["accuracy", "golden"]),
        answer: |mutant, case| mutant.asked(case, |case| drop(case.inputs.remove("mask"))),
    },
    Mutation {
        name: "sums_of_images_added",
        about: "Each image is summed from +0, and its sum is added to that of the images before.",
        op: "conv_dw",
        caught_by: "golden",
        also_red: Others::Are(&["accuracy", "arithmetic"]),
        answer: |mutant, case| {
            let images = case.inputs["x"].shape()[0];
            let carry = case.inputs["carry"].clone();
            let mut answer = mutant.honest.run(case);
            let mut sum: Vec<f32> = values(&carry);
            for image in 0..images {
                let of_image = mutant.asked(case, |case| {
                    for name in ["x", "dy", "mask"] {
                        if let Some(tensor) = case.inputs.get_mut(name) {
                            *tensor = tensor.select(0, &[image]);
                        }
                    }
                    case.inputs.insert("carry".into(), Tensor::fp32(carry.shape(), vec![0.0; carry.len()]));
                });
                let Some(dw) = of_image.outputs.get("dw") else { return answer };
                sum.iter_mut().zip(values(dw)).for_each(|(sum, dw)| *sum += dw);
            }
            let sum: Vec<f64> = sum.into_iter().map(f64::from).collect();
            answer.outputs.insert("dw".into(), round::tensor(DType::Fp32, carry.shape(), &sum));
            answer
        },
    },
];
