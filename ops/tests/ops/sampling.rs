//! Penalties, truncation and the draw against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set and
//! number of threads.

use crate::cpus;
use crate::page::{Stored, bits, cases, exp, logprob_backward_page, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// What is random of a row: numbers around `around`.
fn numbers(seed: u64, rows: usize, around: &[f32]) -> Vec<f32> {
    (0..rows).map(|row| around[(seed.rotate_left(row as u32 * 11) % around.len() as u64) as usize]).collect()
}

/// Puts special values among some, where there are any.
fn strew<I: Stored>(values: &mut [I], seed: u64, special: &[f32]) {
    if !values.is_empty() {
        crate::page::strew(values, seed, special);
    }
}

fn penalize_page(v: usize, logits: &[f32], by: &Penalties, bias: Option<&[f32]>) -> Vec<f32> {
    let element = |(i, z): (usize, &f32)| {
        let (row, token) = (i / v, (i % v) as i32);
        let mut z = bias.map_or(*z, |bias| z + bias[i]);
        let places = (by.begin[row]..by.end[row]).filter(|at| by.tokens[*at as usize] == token);
        let places: Vec<i32> = places.collect();
        if !places.is_empty() {
            z = if z < 0.0 { z * by.repetition[row] } else { z / by.repetition[row] };
        }
        let count = places.iter().filter(|at| **at >= by.prompt_end[row]).count();
        if count > 0 {
            let frequent = by.frequency[row] * count as f32;
            z = z - frequent - by.presence[row];
        }
        if z.is_nan() { f32::NAN } else { z }
    };
    logits.iter().enumerate().map(element).collect()
}

fn check_penalize<I: Stored>(rows: usize, v: usize, s: usize, biased: bool, seed: u64) {
    let mut logits: Vec<I> = values(seed, rows * v, 4);
    strew(&mut logits, seed, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let mut bias: Vec<f32> = values(seed + 1, rows * v, 4);
    strew(&mut bias, seed + 2, &[f32::NEG_INFINITY]);
    let random = |salt: u32, n: usize, below: usize| -> Vec<i32> {
        (0..n as u32).map(|i| (seed.rotate_left(salt + i * 13) % below as u64) as i32).collect()
    };
    let s = if v == 0 { 0 } else { s };
    let (tokens, few) = (random(3, s, v.max(1)), random(5, s, v.clamp(1, 3)));
    let tokens: Vec<i32> =
        tokens.iter().zip(&few).enumerate().map(|(i, (a, b))| if i % 2 == 0 { *a } else { *b }).collect();
    let [begin, prompt_end, end] = [7, 9, 11].map(|salt| random(salt, rows, s + 1));
    let repetition = numbers(seed + 3, rows, &[1.0, 1.3, 0.5]);
    let frequency = numbers(seed + 4, rows, &[0.0, 0.3, -1.1]);
    let presence = numbers(seed + 5, rows, &[0.0, 0.7, -0.2]);
    let by = Penalties {
        tokens: &tokens,
        begin: &begin,
        prompt_end: &prompt_end,
        end: &end,
        repetition: &repetition[..],
        frequency: &frequency,
        presence: &presence,
    };
    let bias = biased.then_some(&bias[..]);
    let expected = bits(&penalize_page(v.max(1), &widened(&logits), &by, bias));
    for cpu in cpus() {
        let mut y = vec![7.0; rows * v];
        penalize(&cpu, v, &logits, by, bias, &mut y).unwrap();
        assert_eq!(bits(&y), expected, "{} {cpu:?} {by:?}", I::NAME);
    }
}

/// The weights of a row, or `None` where it has none.
fn weights_page(z: &[f32]) -> Option<Vec<u64>> {
    let top = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let valid = top.is_finite() && !z.iter().any(|z| z.is_nan());
    valid.then(|| z.iter().map(|z| (f64::from(exp(z - top)) * 1_099_511_627_776.0).floor() as u64).collect())
}

fn truncate_page(x: &[f32], scale: f32, k: i32, p: f32, m: f32) -> (Vec<f32>, i32) {
    let z: Vec<f32> = x.iter().map(|x| x * scale).collect();
    let Some(w) = weights_page(&z) else {
        let nothing = z.iter().all(|z| *z == f32::NEG_INFINITY);
        return (vec![if nothing { f32::NEG_INFINITY } else { f32::NAN }; z.len()], 0);
    };
    let mut order: Vec<usize> = (0..z.len()).filter(|i| z[*i] > f32::NEG_INFINITY).collect();
    order.sort_by(|a, b| z[*b].partial_cmp(&z[*a]).unwrap());
    if k > 0 {
        order.truncate(k as usize);
    }
    if p < 1.0 {
        let total: u64 = order.iter().map(|i| w[*i]).sum();
        let b = (f64::from(p.max(0.0)) * 2f64.powi(53)).floor() as u128;
        let border = ((b * u128::from(total)) >> 53) as u64;
        let mut sum = 0;
        let stays = |i: &usize| {
            let stays = sum == 0 || sum < border;
            sum += w[*i];
            stays
        };
        let many = order.iter().copied().take_while(stays).count();
        order.truncate(many);
    }
    let top = z[order[0]];
    order.retain(|i| {
        let e = exp(z[*i] - top);
        !(m > 0.0 && e < m && e < 1.0)
    });
    let mut y = vec![f32::NEG_INFINITY; z.len()];
    order.iter().for_each(|i| y[*i] = z[*i]);
    (y, order.len() as i32)
}

fn check_truncate<I: Stored>(rows: usize, v: usize, distinct: u64, spread: u32, seed: u64) {
    let some: Vec<I> = values(seed, distinct as usize, spread);
    let mut x: Vec<I> = (0..rows * v).map(|i| some[(seed.rotate_left(i as u32 * 5) % distinct) as usize]).collect();
    strew(&mut x, seed, &[f32::NEG_INFINITY, 0.0, -0.0]);
    if seed.is_multiple_of(5) {
        strew(&mut x, seed + 1, &[f32::NAN, f32::INFINITY]);
    }
    let (scale, top_p) =
        (numbers(seed, rows, &[1.0, 0.3, 1.7]), numbers(seed + 1, rows, &[1.0, 0.9, 0.5, 0.0, f32::NAN, 1e-30]));
    let min_p = numbers(seed + 2, rows, &[0.0, 0.1, 1.0, 7.0, f32::NAN]);
    let top_k = numbers(seed + 3, rows, &[0.0, 1.0, 3.0, 50.0, 1e9]).into_iter().map(|k| k as i32).collect::<Vec<_>>();
    let (mut expected, mut expected_kept) = (Vec::new(), Vec::new());
    for (row, x) in widened(&x).chunks(v.max(1)).enumerate() {
        let (y, kept) = truncate_page(x, scale[row], top_k[row], top_p[row], min_p[row]);
        expected.extend(y);
        expected_kept.push(kept);
    }
    expected_kept.resize(rows, 0);
    let by = Truncation { scale: &scale[..], top_k: &top_k, top_p: &top_p, min_p: &min_p };
    for cpu in cpus() {
        let (mut y, mut kept) = (vec![7.0; rows * v], vec![7; rows]);
        truncate(&cpu, v, &x, by, &mut y, &mut kept).unwrap();
        assert_eq!((bits(&y), &kept), (bits(&expected), &expected_kept), "{} {cpu:?} {by:?} {x:?}", I::NAME);
    }
}

fn draw_page(z: &[f32], h: u64) -> i32 {
    let Some(w) = weights_page(z) else { return -1 };
    let border = ((u128::from(h >> 11) * u128::from(w.iter().sum::<u64>())) >> 53) as u64;
    (0..w.len()).find(|i| w[..=*i].iter().sum::<u64>() > border).unwrap() as i32
}

fn check_draw<I: Stored>(rows: usize, v: usize, spread: u32, seed: u64) {
    let mut x: Vec<I> = values(seed, rows * v, spread);
    strew(&mut x, seed, &[f32::NEG_INFINITY]);
    if seed.is_multiple_of(7) {
        strew(&mut x, seed + 1, &[f32::NAN, f32::INFINITY]);
    }
    let random = (0..rows as u32).map(|row| match seed.rotate_left(row) % 9 {
        0 => 0,
        1 => u64::MAX,
        _ => seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(row * 9),
    });
    let random: Vec<u64> = random.collect();
    let halves: Vec<i32> = random.iter().flat_map(|h| random_halves(*h)).collect();
    let mut expected: Vec<i32> = widened(&x).chunks(v.max(1)).zip(&random).map(|(z, h)| draw_page(z, *h)).collect();
    expected.resize(rows, -1);
    for cpu in cpus() {
        let mut token = vec![7; rows];
        draw(&cpu, v, &x, &halves, &mut token).unwrap();
        assert_eq!(token, expected, "{} {cpu:?} {x:?}", I::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn penalties_are_the_page(
        rows in 0usize..5,
        v in prop_oneof![4 => 0usize..20, 1 => 60usize..70],
        s in prop_oneof![4 => 0usize..20, 1 => 60usize..70],
        seed: u64,
        biased: bool,
    ) {
        check_penalize::<bf16>(rows, v, s, biased, seed >> 4);
        check_penalize::<f16>(rows, v, s, biased, seed >> 4);
        check_penalize::<f32>(rows, v, s, biased, seed >> 4);
    }

    #[test]
    fn truncations_are_the_page(
        rows in 0usize..6,
        v in prop_oneof![4 => 0usize..20, 1 => 60usize..70, 1 => 250usize..260],
        distinct in prop::sample::select(vec![1u64, 2, 5, 1000]),
        spread in prop::sample::select(vec![1u32, 3, 60]),
        seed: u64,
    ) {
        check_truncate::<bf16>(rows, v, distinct, spread, seed >> 4);
        check_truncate::<f16>(rows, v, distinct, spread.min(10), seed >> 4);
        check_truncate::<f32>(rows, v, distinct, spread, seed >> 4);
    }

    #[test]
    fn draws_are_the_page(
        rows in 0usize..5,
        v in prop_oneof![4 => 0usize..20, 1 => 60usize..70, 1 => 250usize..260],
        spread in prop::sample::select(vec![1u32, 3, 60]),
        seed: u64,
    ) {
        check_draw::<bf16>(rows, v, spread, seed >> 4);
        check_draw::<f16>(rows, v, spread.min(10), seed >> 4);
        check_draw::<f32>(rows, v, spread, seed >> 4);
    }
}

/// What may not be sampled has no part in log-probabilities, nor a gradient.
#[test]
fn dropped_tokens_have_no_log_probability_and_no_gradient() {
    let x: Vec<f32> = values(9, 300, 3);
    let by = Truncation { scale: &[0.8f32][..], top_k: &[20], top_p: &[0.9], min_p: &[0.01] };
    for cpu in cpus() {
        let (mut y, mut kept) = (vec![0.0; 300], [0]);
        truncate(&cpu, 300, &x, by, &mut y, &mut kept).unwrap();
        assert!((2..20).contains(&kept[0]), "{kept:?}");
        let target = y.iter().position(|z| z.is_finite()).unwrap() as i32;
        let (mut logp, mut lse, mut dx) = ([0.0], [0.0], vec![7f32; 300]);
        logprob(&cpu, &Logprob::new(1, 300), &y, &[target], &mut logp, &mut lse).unwrap();
        let alone: Vec<f32> = y.iter().copied().filter(|z| z.is_finite()).collect();
        let exact = alone.iter().map(|z| f64::from(*z).exp()).sum::<f64>().ln();
        assert!((f64::from(logp[0]) - (f64::from(y[target as usize]) - exact)).abs() < 1e-6);
        let gradients = LogprobGradients { dlogprob: &[1.5], dlse: None };
        logprob_backward(&cpu, &Logprob::new(1, 300), &y, &[target], &lse, gradients, &mut dx).unwrap();
        assert_eq!(bits(&dx), bits(&logprob_backward_page(&y, target, lse[0], [1.5, 0.0], 1.0)));
        assert!(y.iter().zip(&dx).all(|(y, dx)| (*y == f32::NEG_INFINITY) == (*dx == 0.0)));
        // One that is dropped is not among what can be sampled.
        let dropped = y.iter().position(|z| *z == f32::NEG_INFINITY).unwrap() as i32;
        logprob(&cpu, &Logprob::new(1, 300), &y, &[dropped], &mut logp, &mut lse).unwrap();
        assert_eq!(logp, [f32::NEG_INFINITY]);
    }
}

#[test]
fn refusals() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let one = &[1.0f32][..];
    let by = Truncation { scale: one, top_k: &[-1], top_p: one, min_p: one };
    let found = truncate(&cpu, 2, &[1f32; 2], by, &mut [0.0; 2], &mut [0]).unwrap_err().to_string();
    assert!(found.contains("top_k[0] is -1"), "{found}");
    let found = draw(&cpu, (1 << 22) + 1, &vec![0f32; (1 << 22) + 1], &[0; 2], &mut [0]).unwrap_err().to_string();
    assert!(found.contains("V is 4194305"), "{found}");
    let penalties = |tokens: &[i32], end: i32| {
        let by = Penalties {
            tokens,
            begin: &[0],
            prompt_end: &[0],
            end: &[end],
            repetition: one,
            frequency: one,
            presence: one,
        };
        penalize(&cpu, 2, &[1f32; 2], by, None, &mut [0.0; 2]).unwrap_err().to_string()
    };
    for (found, expected) in [
        (penalties(&[0, 2], 1), "tokens[1] is 2; the vocabulary has 2"),
        (penalties(&[0, -1], 1), "tokens[1] is -1"),
        (penalties(&[0, 1], 3), "end[0] is 3; use 0 to 2"),
        (penalties(&[0, 1], -1), "end[0] is -1; use 0 to 2"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
}
