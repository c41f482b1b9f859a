//! The ops of expert models and the small elementwise ones against the plainest loops of `docs/NUMERICS.md`.

use crate::{bits, cpus};
use proptest::prelude::*;
use samebits_ops::{
    Activation, ChosenBy, Clamp, Combine, Cpu, Element, GroupWorth, PackedWeight, Route, Scoring, SigmoidMul, Xielu,
    activate, activate_backward, bf16, clamped_silu_mul, clamped_silu_mul_backward, combine, combine_backward,
    embedding, embedding_packed, f16, gelu_mul, gelu_mul_backward, route, route_backward, scale, sigmoid_mul,
    sigmoid_mul_backward, silu_mul, silu_mul_backward, softcap, softcap_backward, softmax,
};

fn values<T: Element>(seed: u64, len: usize, spread: f32) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| T::narrow(next() * spread)).collect()
}

/// `1 / (1 + e^-x)` by an op that is held to the page elsewhere: silu_mul of x and 1/x has too many roundings, so the
/// steps are written out.
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

fn exp(x: f32) -> f32 {
    let [rest, f, i] = exp_parts(x);
    let m = rest.mul_add(f, 1.0);
    let i = i.clamp(-252.0, 252.0);
    let h = (i / 2.0).floor();
    (m * h.exp2()) * (i - h).exp2()
}

/// `e^x - 1` of x that is not above 0.
fn expm1(x: f32) -> f32 {
    let [rest, f, i] = exp_parts(x);
    if i == 0.0 { rest * f } else { exp(x) - 1.0 }
}

/// The polynomial of 2^f before its last step, f, and the integer beside it.
fn exp_parts(x: f32) -> [f32; 3] {
    let (hi, lo) = (f32::from_bits(0x3FB8_AA3B), f32::from_bits(0x32A5_7060));
    let t = x * hi;
    let i = t.round_ties_even();
    let f = if t.abs() >= 4_194_304.0 { 0.0 } else { x.mul_add(lo, x.mul_add(hi, -i)) };
    let coefficients = [0x3920_b5b7u32, 0x3aaf_841a, 0x3c1d_96f0, 0x3d63_57be, 0x3e75_fdee, 0x3f31_7218];
    [coefficients.into_iter().map(f32::from_bits).fold(0.0f32, |m, c| m.mul_add(f, c)), f, i]
}

fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// The share of a normal distribution below x, and `e^(-x^2/2)`.
fn normal(x: f32) -> [f32; 2] {
    let t = 1.0 / f32::from_bits(0x3e87_ae14).mul_add(x.abs(), 1.0);
    let coefficients = [
        0x3cfa_dfc0u32,
        0xbe12_bd2d,
        0x3e5d_21a8,
        0xbdea_0e03,
        0x3e0b_d4ba,
        0x3d79_6d91,
        0x3dd2_0858,
        0x3dd7_961d,
        0x3dd8_8e6b,
    ];
    let m = coefficients.into_iter().map(f32::from_bits).fold(0.0f32, |m, c| m.mul_add(t, c));
    let e = exp((x * x) * -0.5);
    let r = e * (m * t);
    [if x >= 0.0 { 1.0 - r } else { r }, e]
}

fn check_elementwise<I: Element, O: Element>(len: usize, spread: f32, seed: u64) {
    let (a, b): (Vec<I>, Vec<I>) = (values(seed, len, spread), values(seed ^ 5, len, 2.0));
    let dy: Vec<I> = values(seed ^ 7, len, 3.0);
    let c = f32::from_bits(0x3FCC_422A);
    let gate = |g: f32| sigmoid(c * f32::from_bits(0x3D37_2713).mul_add((g * g) * g, g));
    let gelu = |g: f32, u: f32| (g * gate(g)) * u;
    let silu_slope = |g: f32| sigmoid(g) * g.mul_add(1.0 - sigmoid(g), 1.0);
    let gelu_slope = |g: f32| {
        let (s, inner) = (gate(g), c * f32::from_bits(0x3E09_5D4F).mul_add(g * g, 1.0));
        let v = s * (1.0 - s);
        s + if v == 0.0 { 0.0 } else { v * (g * inner) }
    };
    let backward = |slope: &dyn Fn(f32) -> f32, s: &dyn Fn(f32) -> f32| {
        let wide = |i: usize| [a[i], b[i], dy[i]].map(|v| v.widen());
        let made = (0..len).map(wide).map(|[g, u, dy]| (O::narrow((dy * u) * slope(g)), O::narrow(dy * (g * s(g)))));
        let (dgate, dup): (Vec<O>, Vec<O>) = made.unzip();
        [bits(&dgate), bits(&dup)]
    };
    let [of_silu, of_gelu] = [backward(&silu_slope, &sigmoid), backward(&gelu_slope, &gate)];
    let expected = |f: &dyn Fn(f32, f32) -> f32| -> Vec<u32> {
        bits(&a.iter().zip(&b).map(|(a, b)| O::narrow(f(a.widen(), b.widen()))).collect::<Vec<O>>())
    };
    let (cap, factor) = (7.3, 11.31);
    for cpu in cpus() {
        let mut y = vec![O::default(); len];
        gelu_mul(&cpu, &a, &b, &mut y).unwrap();
        assert_eq!(bits(&y), expected(&gelu), "{cpu:?} gelu_mul");
        silu_mul(&cpu, &a, &b, &mut y).unwrap();
        assert_eq!(bits(&y), expected(&|g, u| (g * sigmoid(g)) * u), "{cpu:?} silu_mul");
        for clamp in [Clamp { alpha: 1.702, limit: 7.0 }, Clamp { alpha: 1.0, limit: 0.5 }] {
            let Clamp { alpha, limit } = clamp;
            let cut = |gate: f32, up: f32| {
                let low = if up < -limit { -limit } else { up };
                (if gate > limit { limit } else { gate }, if up > limit { limit } else { low })
            };
            clamped_silu_mul(&cpu, clamp, &a, &b, &mut y).unwrap();
            let made = |gate: f32, up: f32| {
                let (g, u) = cut(gate, up);
                (g * sigmoid(alpha * g)) * (u + 1.0)
            };
            assert_eq!(bits(&y), expected(&made), "{cpu:?} clamped_silu_mul {clamp:?}");
            let gradients = (0..len).map(|i| {
                let [gate, up, dy] = [a[i], b[i], dy[i]].map(|v| v.widen());
                let (g, u) = cut(gate, up);
                let s = sigmoid(alpha * g);
                let v = s * (1.0 - s);
                let t = if v == 0.0 { 0.0 } else { v * (alpha * g) };
                let of_gate = if gate > limit { 0.0 } else { (dy * (u + 1.0)) * (s + t) };
                let of_up = if up > limit || up < -limit { 0.0 } else { dy * (g * s) };
                (O::narrow(of_gate), O::narrow(of_up))
            });
            let (of_gates, of_ups): (Vec<O>, Vec<O>) = gradients.unzip();
            let (mut dgate, mut dup) = (vec![O::default(); len], vec![O::default(); len]);
            clamped_silu_mul_backward(&cpu, clamp, [&a, &b, &dy], [&mut dgate, &mut dup]).unwrap();
            assert_eq!([bits(&dgate), bits(&dup)], [bits(&of_gates), bits(&of_ups)], "{cpu:?} {clamp:?}");
        }
        softcap(&cpu, cap, &a, &mut y).unwrap();
        assert_eq!(bits(&y), expected(&|x, _| cap as f32 * tanh(x * (1.0 / cap) as f32)), "{cpu:?} softcap");
        softcap_backward(&cpu, cap, &a, &b, &mut y).unwrap();
        let slope = |x: f32| {
            let t = tanh(x * (1.0 / cap) as f32);
            (-t).mul_add(t, 1.0)
        };
        assert_eq!(bits(&y), expected(&|x, dy| dy * slope(x)), "{cpu:?} softcap_backward");
        let above = |x: f32| if x <= 0.0 { 0.0 } else { x };
        let density = |x: f32| match normal(x)[1] {
            0.0 => 0.0,
            e => x * (e * f32::from_bits(0x3ECC_422A)),
        };
        type Of<'a> = &'a dyn Fn(f32) -> f32;
        let kinds: [(Activation, Of, Of); 4] = [
            (Activation::Gelu, &|x| x * normal(x)[0], &|x| normal(x)[0] + density(x)),
            (Activation::GeluTanh, &|x| x * gate(x), &gelu_slope),
            (Activation::Relu2, &|x| above(x) * above(x), &|x| above(x) + above(x)),
            (
                Activation::Xielu(Xielu { alpha_p: 0.7, alpha_n: 1.3, beta: 0.5 }),
                &|x| match x <= 0.0 {
                    true => 1.3f32.mul_add(expm1(x) - x, 0.5 * x),
                    false => (0.7 * x).mul_add(x, 0.5 * x),
                },
                &|x| match x <= 0.0 {
                    true => 1.3f32.mul_add(expm1(x), 0.5),
                    false => 1.4f32.mul_add(x, 0.5),
                },
            ),
        ];
        for (kind, act, slope) in kinds {
            activate(&cpu, kind, &a, &mut y).unwrap();
            assert_eq!(bits(&y), expected(&|x, _| act(x)), "{cpu:?} activate {kind:?}");
            activate_backward(&cpu, kind, &a, &b, &mut y).unwrap();
            assert_eq!(bits(&y), expected(&|x, dy| dy * slope(x)), "{cpu:?} activate_backward {kind:?}");
        }
        let mut dup = y.clone();
        silu_mul_backward(&cpu, [&a, &b, &dy], [&mut y, &mut dup]).unwrap();
        assert_eq!([bits(&y), bits(&dup)], of_silu, "{cpu:?} silu_mul_backward");
        gelu_mul_backward(&cpu, [&a, &b, &dy], [&mut y, &mut dup]).unwrap();
        assert_eq!([bits(&y), bits(&dup)], of_gelu, "{cpu:?} gelu_mul_backward");
        scale(&cpu, factor, &a, &mut y).unwrap();
        assert_eq!(bits(&y), expected(&|x, _| x * factor as f32), "{cpu:?} scale");
    }
}

/// Rows whose gates have `each` elements.
fn check_gated_rows<I: Element, O: Element>([rows, gates, each]: [usize; 3], spread: f32, seed: u64) {
    let (shape, len) = (SigmoidMul { rows, gates, n: gates * each }, rows * gates * each);
    let mut gate: Vec<I> = values(seed, rows * gates, spread);
    if let Some(last) = gate.last_mut() {
        *last = I::narrow([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][seed as usize % 4]);
    }
    let (x, dy): (Vec<I>, Vec<I>) = (values(seed ^ 5, len, 2.0), values(seed ^ 7, len, 3.0));
    let s = |i: usize| sigmoid(gate[i].widen());
    let of_x = |i: usize| O::narrow(s(i / each) * x[i].widen());
    let of_dy = |i: usize| O::narrow(s(i / each) * dy[i].widen());
    let of_gate = |i: usize| {
        let mut lanes = [0f32; 256];
        for j in 0..each {
            lanes[j % 256] = dy[i * each + j].widen().mul_add(x[i * each + j].widen(), lanes[j % 256]);
        }
        let mut half = 128;
        while half > 0 {
            (0..half).for_each(|l| lanes[l] += lanes[l + half]);
            half /= 2;
        }
        O::narrow(lanes[0] * (s(i) * (1.0 - s(i))))
    };
    let expected: [Vec<O>; 2] = [(0..len).map(of_x).collect(), (0..len).map(of_dy).collect()];
    let of_gates: Vec<O> = (0..rows * gates).map(of_gate).collect();
    for cpu in cpus() {
        let (mut y, mut dgate) = (vec![O::default(); len], vec![O::default(); rows * gates]);
        sigmoid_mul(&cpu, &shape, &gate, &x, &mut y).unwrap();
        assert_eq!(bits(&y), bits(&expected[0]), "{cpu:?} {shape:?} sigmoid_mul");
        sigmoid_mul_backward(&cpu, &shape, [&gate, &x, &dy], [&mut dgate, &mut y]).unwrap();
        assert_eq!(bits(&y), bits(&expected[1]), "{cpu:?} {shape:?} sigmoid_mul_backward: dx");
        assert_eq!(bits(&dgate), bits(&of_gates), "{cpu:?} {shape:?} sigmoid_mul_backward: dgate");
    }
}

/// The place of the largest value among those that are left.
fn largest(values: &[f32], left: &[bool]) -> usize {
    let mut best = None;
    for (i, &v) in values.iter().enumerate().filter(|(i, _)| left[*i]) {
        if best.is_none_or(|b: usize| v > values[b]) {
            best = Some(i);
        }
    }
    best.unwrap()
}

/// Of each rank of a token the softmax of what counts for its weight.
fn near_shares(logits: &[f32], index: &[i32], jitter: f64) -> Vec<Vec<f32>> {
    let of_rank = |rank: usize| {
        let top = logits[index[rank] as usize];
        let near = |(i, &x): (usize, &f32)| {
            let far = (top - x) / x.abs().max(top) > (2.0 * jitter) as f32;
            if far || index[..rank].contains(&(i as i32)) { f32::NEG_INFINITY } else { x }
        };
        let near: Vec<f32> = logits.iter().enumerate().map(near).collect();
        let mut shares = vec![0f32; near.len()];
        softmax(&Cpu::best(), 1, near.len(), &near, &mut shares).unwrap();
        shares
    };
    (0..index.len()).map(of_rank).collect()
}

/// The gradient of one token's logits by sparsemixer.
fn sparse_gradient(shape: &Route, jitter: f64, logits: &[f32], index: &[i32], dweight: &[f32]) -> Vec<f32> {
    let shares = near_shares(logits, index, jitter);
    let s: Vec<f32> = shares.iter().zip(index).map(|(shares, &expert)| shares[expert as usize]).collect();
    let mut a: Vec<f32> = dweight.iter().map(|d| d * shape.scale as f32).collect();
    if shape.normalise {
        let sum = s.iter().fold(0f32, |sum, s| sum + s);
        let common = a.iter().zip(&s).fold(0f32, |common, (a, s)| a.mul_add(s / sum, common));
        a = a.into_iter().map(|a| (a - common) / sum).collect();
    }
    let element = |expert: usize| {
        let of_rank = |rank: usize| {
            let own = if index[rank] as usize == expert { a[rank] } else { 0.0 };
            shares[rank][expert] * (own - a[rank].mul_add(s[rank], 0.0))
        };
        (1..index.len()).fold(of_rank(0), |sum, rank| sum + of_rank(rank))
    };
    (0..logits.len()).map(element).collect()
}

/// route_backward of these scores.
fn route_gradient(shape: &Route, scores: &[f32], index: &[i32], dweight: &[f32]) -> Vec<f32> {
    let mut dlogits = Vec::new();
    for (token, scores) in scores.chunks(shape.experts).enumerate() {
        let index = &index[token * shape.chosen..][..shape.chosen];
        let s: Vec<f32> = index.iter().map(|&expert| scores[expert as usize]).collect();
        let mut a: Vec<f32> =
            dweight[token * shape.chosen..][..s.len()].iter().map(|d| d * shape.scale as f32).collect();
        if shape.normalise {
            let mut sum = 0f32;
            for s in &s {
                sum += s;
            }
            if shape.scoring == Scoring::Sigmoid {
                sum += 1e-20;
            }
            let mut common = 0f32;
            for (a, s) in a.iter().zip(&s) {
                common = a.mul_add(s / sum, common);
            }
            a = a.into_iter().map(|a| (a - common) / sum).collect();
        }
        let mut whole = 0f32;
        for (a, s) in a.iter().zip(&s) {
            whole = a.mul_add(*s, whole);
        }
        dlogits.extend((0..shape.experts).map(|expert| {
            let (rank, s) = (index.iter().position(|&chosen| chosen as usize == expert), scores[expert]);
            match (shape.scoring, rank.map(|rank| a[rank])) {
                (Scoring::Softmax, a) => s * (a.unwrap_or(0.0) - whole),
                (Scoring::Sigmoid, Some(a)) => a * (s * (1.0 - s)),
                (Scoring::Sigmoid, None) => 0.0,
                (Scoring::SparseMixer { .. }, _) => unreachable!("it has a softmax for each rank"),
            }
        }));
    }
    dlogits
}

/// A token out of three names no experts, the others those of any groups.
fn named(shape: &Route, seed: u64) -> Vec<i32> {
    let of_token = |token: usize| {
        let mut all: Vec<i32> = (0..shape.experts as i32).collect();
        all.sort_by_key(|&expert| {
            (seed >> 5).wrapping_mul(2 * (expert as u64 + 31 * token as u64) + 1).rotate_left(23)
        });
        all.truncate(shape.chosen);
        if token % 3 == 1 { vec![-1; shape.chosen] } else { all }
    };
    (0..shape.tokens).flat_map(of_token).collect()
}

fn check_route(shape: &Route, seed: u64, biased: bool, named: Option<&[i32]>) {
    let Route { tokens, experts, chosen, .. } = *shape;
    // Sigmoids of large logits are all 1.
    let spread = if shape.chosen_by == ChosenBy::Logits { 60.0 } else { 4.0 };
    let mut logits: Vec<f32> = values(seed, tokens * experts, spread);
    // Ties: a few values only.
    logits.iter_mut().step_by(2).for_each(|v| *v = v.round());
    let bias: Option<Vec<f32>> = biased.then(|| values(seed ^ 9, experts, 0.5));
    let mut scores = vec![0f32; logits.len()];
    match shape.scoring {
        Scoring::Softmax => softmax(&Cpu::best(), tokens, experts, &logits, &mut scores).unwrap(),
        Scoring::Sigmoid => scores.iter_mut().zip(&logits).for_each(|(s, v)| *s = sigmoid(*v)),
        Scoring::SparseMixer { .. } => scores.copy_from_slice(&logits),
    }
    let (mut index, mut weight) = (Vec::new(), Vec::new());
    for (token, (scores, logits)) in scores.chunks(experts).zip(logits.chunks(experts)).enumerate() {
        let decides = if shape.chosen_by == ChosenBy::Logits { logits } else { scores };
        let choice: Vec<f32> = (0..experts).map(|e| bias.as_ref().map_or(decides[e], |b| decides[e] + b[e])).collect();
        let size = experts / shape.groups;
        let mut left = vec![shape.groups == shape.top_groups; experts];
        if shape.top_groups < shape.groups {
            let worth: Vec<f32> = choice
                .chunks(size)
                .map(|group| {
                    let mut open = vec![true; size];
                    let first = largest(group, &open);
                    open[first] = false;
                    match shape.group_worth {
                        GroupWorth::Max => group[first],
                        GroupWorth::TopTwo => group[first] + group[largest(group, &open)],
                    }
                })
                .collect();
            let mut open = vec![true; shape.groups];
            for _ in 0..shape.top_groups {
                let group = largest(&worth, &open);
                open[group] = false;
                left[group * size..(group + 1) * size].fill(true);
            }
        }
        if let Some(named) = named.map(|named| &named[token * chosen..][..chosen]).filter(|named| named[0] >= 0) {
            left = (0..experts as i32).map(|expert| named.contains(&expert)).collect();
        }
        let mut row: Vec<usize> = Vec::new();
        for _ in 0..chosen {
            let expert = largest(&choice, &left);
            left[expert] = false;
            row.push(expert);
        }
        index.extend(row.iter().map(|&expert| expert as i32));
        let mut of_row: Vec<f32> = row.iter().map(|&expert| scores[expert]).collect();
        if let Scoring::SparseMixer { jitter } = shape.scoring {
            let shares = near_shares(logits, &index[index.len() - chosen..], jitter);
            of_row = shares.iter().zip(&row).map(|(shares, &expert)| shares[expert]).collect();
        }
        let mut sum = 0f32;
        for score in &of_row {
            sum += score;
        }
        if shape.scoring == Scoring::Sigmoid {
            sum += 1e-20;
        }
        for score in of_row {
            let share = if shape.normalise { score / sum } else { score };
            // Where all that are named have a score of 0, it is NaN.
            weight.push(f32::narrow(share * shape.scale as f32));
        }
    }
    let dweight: Vec<f32> = values(seed ^ 3, weight.len(), 2.0);
    let dlogits: Vec<f32> = match shape.scoring {
        Scoring::SparseMixer { jitter } => {
            let tokens = index.chunks(chosen).zip(dweight.chunks(chosen)).zip(logits.chunks(experts));
            let of_token = |((index, dweight), logits): ((&[i32], &[f32]), &[f32])| {
                sparse_gradient(shape, jitter, logits, index, dweight)
            };
            tokens.flat_map(of_token).collect()
        }
        _ => route_gradient(shape, &scores, &index, &dweight),
    };
    let dlogits: Vec<f32> = dlogits.into_iter().map(f32::narrow).collect();
    for cpu in cpus() {
        let (mut i, mut w) = (vec![0; index.len()], vec![0f32; weight.len()]);
        route(&cpu, shape, &logits, bias.as_deref(), named, &mut i, &mut w).unwrap();
        assert_eq!((i, bits(&w)), (index.clone(), bits(&weight)), "{cpu:?} {shape:?}");
        // What was chosen is chosen again, in whatever order it is named.
        let backwards: Vec<i32> = index.chunks(chosen).flat_map(|row| row.iter().rev()).copied().collect();
        let (mut i, mut w) = (vec![0; index.len()], vec![0f32; weight.len()]);
        route(&cpu, shape, &logits, bias.as_deref(), Some(&backwards), &mut i, &mut w).unwrap();
        assert_eq!((i, bits(&w)), (index.clone(), bits(&weight)), "{cpu:?} {shape:?}");
        let mut found = vec![f32::NAN; logits.len()];
        route_backward(&cpu, shape, &logits, &index, &dweight, &mut found).unwrap();
        assert_eq!(bits(&found), bits(&dlogits), "{cpu:?} {shape:?}");
    }
}

/// `lanes(a * b)` of chains.
fn dot<A: Element, B: Element>(a: &[A], b: &[B]) -> f32 {
    let mut lanes = [0f32; 256];
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        lanes[i % 256] = a.widen().mul_add(b.widen(), lanes[i % 256]);
    }
    for h in [128, 64, 32, 16, 8, 4, 2, 1] {
        (0..h).for_each(|l| lanes[l] += lanes[l + h]);
    }
    lanes[0]
}

/// As many rows as are named and `more`; in every fourth call one of them has no place in f32.
fn check_combine_backward<I: Element, O: Element>([tokens, chosen, n, more]: [usize; 4], seed: u64) {
    let rows = tokens * chosen + more;
    let (mut x, dy): (Vec<I>, Vec<I>) = (values(seed, rows * n, 3.0), values(seed ^ 1, tokens * n, 3.0));
    if let Some(x) = x.last_mut().filter(|_| seed.is_multiple_of(4)) {
        *x = I::narrow(f32::NAN);
    }
    let weight: Vec<f32> = values(seed ^ 2, tokens * chosen, 1.0);
    let mut row: Vec<i32> = (0..rows as i32).collect();
    row.sort_by_key(|&row| (seed >> 8).wrapping_mul(2 * row as u64 + 1).rotate_left(17));
    row.truncate(tokens * chosen);
    let mut dx = vec![O::narrow(0.0); rows * n];
    let mut dweight = Vec::new();
    for (i, &row) in row.iter().enumerate() {
        let (dy, from) = (&dy[i / chosen * n..][..n], row as usize * n);
        for (dx, dy) in dx[from..][..n].iter_mut().zip(dy) {
            *dx = O::narrow(weight[i] * dy.widen());
        }
        dweight.push(f32::narrow(dot(dy, &x[from..][..n])));
    }
    for cpu in cpus() {
        let (mut found, mut found_weight) = (vec![O::narrow(f32::NAN); dx.len()], vec![f32::NAN; dweight.len()]);
        let shape = Combine { tokens, chosen, rows, n };
        combine_backward(&cpu, &shape, [&x, &dy], &row, &weight, &mut found, &mut found_weight).unwrap();
        assert_eq!(bits(&found_weight), bits(&dweight), "{cpu:?} {shape:?}");
        assert_eq!(bits(&found), bits(&dx), "{cpu:?} {shape:?}");
    }
}

/// Products that underflow to -0 in every lane; where a lane has none, it is +0.
#[test]
fn a_gradient_of_a_weight_may_be_minus_zero() {
    for (n, expected) in [(255, 0.0f32), (256, -0.0), (300, -0.0)] {
        for cpu in cpus() {
            let (shape, mut dx, mut dweight) = (Combine { tokens: 1, chosen: 1, rows: 1, n }, vec![0f32; n], [7f32]);
            let inputs = [&vec![-1e-30f32; n][..], &vec![1e-30; n]];
            combine_backward(&cpu, &shape, inputs, &[0], &[1.0], &mut dx, &mut dweight).unwrap();
            assert_eq!(dweight[0].to_bits(), expected.to_bits(), "{cpu:?} {n}");
        }
    }
}

/// An output of 32 MiB is written past the caches, in parts of a row.
#[test]
fn a_large_gradient_of_combine_has_the_bits_of_rows() {
    let (tokens, chosen, n) = (1100, 3, 5085);
    let rows = tokens * chosen + 1;
    let (x, dy): (Vec<bf16>, Vec<bf16>) = (values(1, rows * n, 3.0), values(2, tokens * n, 3.0));
    let weight: Vec<f32> = values(3, tokens * chosen, 1.0);
    let row: Vec<i32> = (0..tokens * chosen).map(|i| (i * 7919 % rows) as i32).collect();
    for cpu in cpus() {
        let (mut dx, mut dweight) = (vec![bf16::NAN; rows * n + 1], vec![f32::NAN; row.len()]);
        let shape = Combine { tokens, chosen, rows, n };
        combine_backward(&cpu, &shape, [&x, &dy], &row, &weight, &mut dx[1..], &mut dweight).unwrap();
        let mut named = vec![false; rows];
        for (i, row) in row.iter().map(|&row| row as usize).enumerate() {
            let (dy, dx) = (&dy[i / chosen * n..][..n], &dx[1 + row * n..][..n]);
            assert!(dx.iter().zip(dy).all(|(dx, dy)| *dx == bf16::narrow(weight[i] * dy.widen())), "{cpu:?} {i}");
            named[row] = true;
        }
        for other in (0..rows).filter(|&row| !named[row]) {
            assert!(dx[1 + other * n..][..n].iter().all(|dx| dx.to_bits() == 0), "{cpu:?} {other}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn small_ops_are_the_page(len in 0usize..300, spread in prop::sample::select(vec![0.01f32, 2.0, 90.0, 1e30]), seed: u64) {
        check_elementwise::<f32, f32>(len, spread, seed);
        check_elementwise::<bf16, bf16>(len, spread, seed);
        check_elementwise::<f16, f32>(len, spread.min(1000.0), seed);
    }

    #[test]
    fn gated_rows_are_the_page(
        rows in 0usize..4, gates in 1usize..80, each in prop::sample::select(vec![0usize, 1, 1, 2, 3, 16, 33, 257, 520]),
        spread in prop::sample::select(vec![0.01f32, 2.0, 90.0, 1e30]), seed: u64,
    ) {
        let shape = [rows, if each > 16 { gates % 4 + 1 } else { gates }, each];
        check_gated_rows::<f32, f32>(shape, spread, seed);
        check_gated_rows::<f32, bf16>(shape, spread, seed);
        check_gated_rows::<bf16, bf16>(shape, spread, seed);
        check_gated_rows::<f16, f32>(shape, spread.min(1000.0), seed);
    }

    #[test]
    fn route_is_the_page(
        tokens in 1usize..6, size in 2usize..7, groups in 1usize..5, top in 1usize..5, chosen in 1usize..5, seed: u64,
        flags in 0u32..32, jitter in prop::sample::select(vec![None, Some(0.0), Some(0.01), Some(0.3), Some(2.0)]),
    ) {
        let top_groups = top.min(groups);
        let shape = Route {
            tokens,
            experts: size * groups,
            chosen: chosen.min(top_groups * size),
            scoring: match jitter {
                Some(jitter) => Scoring::SparseMixer { jitter },
                None if flags & 1 == 0 => Scoring::Softmax,
                None => Scoring::Sigmoid,
            },
            chosen_by: if flags & 16 == 0 { ChosenBy::Scores } else { ChosenBy::Logits },
            groups,
            top_groups,
            group_worth: if flags & 2 == 0 { GroupWorth::Max } else { GroupWorth::TopTwo },
            normalise: flags & 4 == 0,
            scale: 2.5,
        };
        check_route(&shape, seed, flags & 8 == 0, None);
        check_route(&shape, seed, flags & 8 == 0, Some(&named(&shape, seed)));
    }

    #[test]
    fn combine_is_the_page(tokens in 1usize..5, chosen in 1usize..5, n in 1usize..200, rows in 1usize..9, seed: u64, shared: bool) {
        let x: Vec<bf16> = values(seed, rows * n, 3.0);
        let weight: Vec<f32> = values(seed ^ 1, tokens * chosen, 1.0);
        let row: Vec<i32> = (0..tokens * chosen).map(|i| ((seed as usize).wrapping_add(i * 7) % rows) as i32).collect();
        let added: Option<Vec<bf16>> = shared.then(|| values(seed ^ 2, tokens * n, 3.0));
        let element = |t: usize, i: usize| {
            let mut acc = 0f32;
            for r in t * chosen..(t + 1) * chosen {
                acc = weight[r].mul_add(x[row[r] as usize * n + i].widen(), acc);
            }
            added.as_ref().map_or(acc, |added| acc + added[t * n + i].widen())
        };
        let expected: Vec<f32> = (0..tokens * n).map(|i| element(i / n, i % n)).collect();
        for cpu in cpus() {
            let mut y = vec![0f32; tokens * n];
            combine(&cpu, &Combine { tokens, chosen, rows, n }, &x, &row, &weight, added.as_deref(), &mut y).unwrap();
            prop_assert_eq!(bits(&y), bits(&expected), "{:?}", cpu);
        }
    }

    #[test]
    fn combine_backward_is_the_page(
        tokens in 1usize..5, chosen in 0usize..5, more in 0usize..4,
        n in prop_oneof![1usize..200, 250usize..260, 1000usize..1100],
        seed: u64,
    ) {
        check_combine_backward::<bf16, bf16>([tokens, chosen, n, more], seed);
        check_combine_backward::<f32, f32>([tokens, chosen, n, more], seed);
        check_combine_backward::<f32, bf16>([tokens, chosen, n, more], seed);
        check_combine_backward::<f16, f32>([tokens, chosen, n, more], seed);
    }

    #[test]
    fn a_packed_table_is_the_table(vocab in 1usize..80, dim in 1usize..90, seed: u64) {
        fn check<T: Element>(vocab: usize, dim: usize, seed: u64) {
            let w: Vec<T> = values(seed, vocab * dim, 3.0);
            let tokens: Vec<i32> = (0..7).map(|i| ((seed >> 3) as usize).wrapping_add(i * 31) as i32).map(|t| t.rem_euclid(vocab as i32)).collect();
            let (mut expected, mut y) = (vec![0f32; 7 * dim], vec![0f32; 7 * dim]);
            embedding(&Cpu::best(), dim, &w, &tokens, &mut expected).unwrap();
            let packed = PackedWeight::pack(&Cpu::best(), vocab, dim, &w).unwrap();
            embedding_packed(&Cpu::best(), &packed, &tokens, &mut y).unwrap();
            assert_eq!(bits(&y), bits(&expected));
            assert!(embedding_packed(&Cpu::best(), &packed, &[vocab as i32], &mut y[..dim]).is_err());
        }
        check::<bf16>(vocab, dim, seed);
        check::<f16>(vocab, dim, seed);
        check::<f32>(vocab, dim, seed);
    }
}

#[test]
fn wrong_shapes_and_values_are_refused() {
    let cpu = Cpu::best();
    let shape = Route {
        tokens: 1,
        experts: 6,
        chosen: 2,
        scoring: Scoring::Softmax,
        chosen_by: ChosenBy::Scores,
        groups: 3,
        top_groups: 1,
        group_worth: GroupWorth::Max,
        normalise: true,
        scale: 1.0,
    };
    let run = |shape: Route| {
        let (mut index, mut weight) = (vec![0; shape.chosen], vec![0.0; shape.chosen]);
        route(&cpu, &shape, &[0f32; 6], None, None, &mut index, &mut weight).map(|()| index)
    };
    // All equal: the lowest expert of the lowest group first.
    assert_eq!(run(shape).unwrap(), [0, 1]);
    for (wrong, expected) in [
        (Route { chosen: 0, ..shape }, "choose at least 1"),
        (Route { chosen: 3, ..shape }, "do not hold 3 experts"),
        (Route { groups: 4, ..shape }, "do not make 4 groups"),
        (Route { top_groups: 4, ..shape }, "4 of 3 groups"),
        (Route { scale: f64::NAN, ..shape }, "scale is NaN"),
        (Route { scoring: Scoring::SparseMixer { jitter: -0.1 }, ..shape }, "jitter is -0.2"),
        (Route { scoring: Scoring::SparseMixer { jitter: 1e39 }, ..shape }, "jitter is inf"),
    ] {
        let line = run(wrong).unwrap_err().to_string();
        assert!(line.contains(expected), "{line}");
    }
    for (named, expected) in [
        (&[0, 6][..], "experts element 1 is 6 of 6 experts"),
        (&[-1, 2], "experts element 0 is -1 of 6 experts"),
        (&[4, 4], "experts element 1 is 4, which its token has twice"),
        (&[4], "experts"),
    ] {
        let (mut index, mut weight) = ([7; 2], [7f32; 2]);
        let line = route(&cpu, &shape, &[0f32; 6], None, Some(named), &mut index, &mut weight).unwrap_err().to_string();
        assert!(line.contains(expected), "{line}");
        assert_eq!((index, weight), ([7; 2], [7.0; 2]));
    }
    let backward = |index: &[i32]| {
        let mut dlogits = [7f32; 6];
        let line = route_backward(&cpu, &shape, &[0f32; 6], index, &[1.0; 2], &mut dlogits).unwrap_err().to_string();
        assert_eq!(dlogits, [7.0; 6]);
        line
    };
    assert!(backward(&[6, 0]).contains("index element 0 is 6 of 6 experts"));
    assert!(backward(&[0, -1]).contains("index element 1 is -1"));
    assert!(backward(&[3, 3]).contains("index element 1 is 3, which its token has twice"));
    let mut y = [0f32; 2];
    assert!(softcap(&cpu, 0.0, &[1f32; 2], &mut y).unwrap_err().to_string().contains("must be positive"));
    assert!(scale(&cpu, f64::INFINITY, &[1f32; 2], &mut y).unwrap_err().to_string().contains("must be finite"));
    let shape = Combine { tokens: 1, chosen: 1, rows: 1, n: 2 };
    let line = combine(&cpu, &shape, &[1f32; 2], &[1], &[1.0], None, &mut y).unwrap_err().to_string();
    assert!(line.contains("row element 0 is 1; x has 1 rows"), "{line}");
    let shape = Combine { tokens: 1, chosen: 2, rows: 2, n: 1 };
    for (row, expected) in
        [([0, 2], "row element 1 is 2; x has 2 rows"), ([1, 1], "row element 1 is 1, which is named twice")]
    {
        let (mut dx, mut dweight) = ([7f32; 2], [7f32; 2]);
        let line = combine_backward(&cpu, &shape, [&[1f32; 2], &[1.0][..]], &row, &[1.0; 2], &mut dx, &mut dweight);
        let line = line.unwrap_err().to_string();
        assert!(line.contains(expected), "{line}");
        assert_eq!((dx, dweight), ([7.0; 2], [7.0; 2]));
    }
}

/// A sum of products that underflow to -0 is -0 where every lane has one; a lane without elements is +0.
#[test]
fn sums_of_a_gate_are_minus_zero_where_every_lane_is() {
    for cpu in cpus() {
        for (gates, each, zero) in [(1, 300, 0x8000_0000u32), (1, 255, 0), (5, 1, 0)] {
            let shape = SigmoidMul { rows: 1, gates, n: gates * each };
            let (gate, x, dy) = (vec![0f32; gates], vec![-1e-30f32; shape.n], vec![1e-30f32; shape.n]);
            let (mut dgate, mut dx) = (vec![9f32; gates], vec![9f32; shape.n]);
            sigmoid_mul_backward(&cpu, &shape, [&gate, &x, &dy], [&mut dgate, &mut dx]).unwrap();
            assert_eq!(bits(&dgate), vec![zero; gates], "{cpu:?} {shape:?}");
        }
    }
}
