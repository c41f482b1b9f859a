//! Losses and the step against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set and any number
//! of threads.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, exp_split, lanes, values};
use proptest::prelude::*;
use samebits_ops::*;

fn exp(x: f32) -> f32 {
    let (m, i) = exp_split(x, f32::from_bits(0x3FB8_AA3B), f32::from_bits(0x32A5_7060));
    let i = if i.is_nan() { 0.0 } else { i.clamp(-252.0, 252.0) };
    let h = (i / 2.0).floor();
    (m * f32::exp2(h)) * f32::exp2(i - h)
}

/// Sums and gradients of the values and slopes that `token` gives.
fn losses(shape: &LossShape, count: &[i32], token: impl Fn(usize) -> (f32, f32)) -> [Vec<u32>; 2] {
    let (mut sums, mut slopes) = (Vec::new(), vec![0f32; count.len()]);
    for sequence in 0..shape.sequences {
        let tokens = sequence * shape.length..(sequence + 1) * shape.length;
        let counted: Vec<usize> = tokens.filter(|&i| count[i] != 0).collect();
        let n = counted.len() as f32;
        let mean = shape.reduction == Reduction::Mean && n > 0.0;
        let share = |x: f32| if mean { x / n } else { x };
        sums.push(share(lanes(counted.iter().map(|&i| token(i).0).enumerate(), |lane, value| lane + value)));
        for &i in &counted {
            slopes[i] = share(token(i).1) / shape.denominator as f32;
        }
    }
    [all_rounded::<f32>(&sums), all_rounded::<f32>(&slopes)]
}

/// `values` with NaN where nothing counts, and `special` somewhere.
fn tokens(seed: u64, count: &[i32], spread: u32, special: f32) -> Vec<f32> {
    let mut all: Vec<f32> = values(seed, count.len(), spread);
    let at = seed as usize % all.len().max(1);
    if let Some(value) = all.get_mut(at) {
        *value = special;
    }
    all.iter().zip(count).map(|(v, count)| if *count == 0 { f32::NAN } else { *v }).collect()
}

/// A loss on a processor, into its two outputs.
type Run<'a> = dyn Fn(&Cpu, &mut [f32], &mut [f32]) -> Result<(), Error> + 'a;

fn check_losses(sequences: usize, length: usize, spread: u32, seed: u64, flags: usize) {
    let reduction = if flags & 1 == 1 { Reduction::Mean } else { Reduction::Sum };
    let shape = LossShape { sequences, length, reduction, denominator: [1.0, 0.3, 1000.0][flags % 3] };
    let dense = flags & 2 == 2;
    let drawn = values::<f32>(seed + 9, sequences * length, 1);
    let count: Vec<i32> = drawn.iter().map(|v| if dense || *v > -0.3 { -7 } else { 0 }).collect();
    let special = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
    let logprob = tokens(seed, &count, spread, special[flags % 5]);
    let old = tokens(seed + 1, &count, spread, special[flags / 5 % 5]);
    let reference = tokens(seed + 2, &count, spread, special[flags / 25 % 5]);
    let advantage: Vec<f32> = values(seed + 3, sequences, spread);
    let expected = losses(&shape, &count, |i| (-logprob[i], -1.0));
    let same = |what: &str, expected: &[Vec<u32>; 2], run: &Run| {
        for cpu in cpus() {
            let (mut sum, mut slopes) = (vec![9f32; sequences], vec![9f32; count.len()]);
            run(&cpu, &mut sum, &mut slopes).unwrap();
            assert_eq!([bits(&sum), bits(&slopes)], *expected, "{what} {cpu:?} {shape:?} {flags}");
        }
    };
    same("nll", &expected, &|cpu, sum, slopes| nll(cpu, &shape, &logprob, &count, sum, slopes));
    for kl in [Kl::None, Kl::K1, Kl::K3] {
        let loss = PolicyLoss { low: 0.2, high: [0.2, 0.28, 1e30][flags % 3], kl, beta: 0.3 };
        let (least, most) = ((1.0 - loss.low) as f32, (1.0 + loss.high) as f32);
        let beta = loss.beta as f32;
        let expected = losses(&shape, &count, |i| {
            let (a, worth) = (logprob[i], advantage[i / length]);
            let ratio = exp(a - old[i]);
            let mut c = ratio;
            if c < least {
                c = least;
            }
            if c > most {
                c = most;
            }
            let (u, v) = (ratio * worth, c * worth);
            let (value, slope) = if v < u { (-v, 0.0) } else { (-u, -u) };
            let d = reference[i] - a;
            match kl {
                Kl::None => (value, slope),
                Kl::K1 => (beta.mul_add(a - reference[i], value), slope + beta),
                Kl::K3 => (beta.mul_add((exp(d) - d) - 1.0, value), beta.mul_add(1.0 - exp(d), slope)),
            }
        });
        let reference = (kl != Kl::None).then_some(&reference[..]);
        let tokens =
            PolicyTokens { logprob: &logprob, old_logprob: &old, advantage: &advantage, reference, count: &count };
        let what = format!("policy_loss {kl:?}");
        same(&what, &expected, &|cpu, sum, slopes| policy_loss(cpu, &shape, &loss, tokens, sum, slopes));
    }
}

fn check_batch(count: usize, groups: usize, spread: u32, seed: u64) {
    let values: Vec<f32> = values(seed, count, spread);
    let mut sums: Vec<f32> = (0..groups)
        .map(|g| values[g * count / groups..(g + 1) * count / groups].iter().fold(0.0, |sum, v| sum + v))
        .collect();
    while sums.len() > 1 {
        sums = (0..sums.len() / 2).map(|i| sums[2 * i] + sums[2 * i + 1]).collect();
    }
    let expected = all_rounded::<f32>(&[sums[0] / 3.5]);
    assert_eq!(bits(&[batch_loss(&Cpu::best(), groups, 3.5, &values).unwrap()]), expected);
}

fn check_advantages(prompts: usize, samples: usize, spread: u32, seed: u64, special: f32) {
    let mut reward: Vec<f32> = values(seed, prompts * samples, spread);
    reward[seed as usize % (prompts * samples)] = special;
    for divide in [Divide::One, Divide::Deviation(0.0), Divide::Deviation(1e-4)] {
        let of_prompt = |reward: &[f32]| {
            let n = samples as f32;
            let mean = reward.iter().fold(0f32, |sum, r| sum + r) / n;
            let variance = reward.iter().fold(0f32, |sum, r| (r - mean).mul_add(r - mean, sum)) / n;
            let over = |d: f32| match divide {
                Divide::One => d,
                Divide::Deviation(eps) => d / (variance.sqrt() + eps as f32),
            };
            reward.iter().map(|r| over(r - mean)).collect::<Vec<f32>>()
        };
        let expected = all_rounded::<f32>(&reward.chunks(samples).flat_map(of_prompt).collect::<Vec<_>>());
        for cpu in cpus() {
            let mut advantage = vec![9f32; reward.len()];
            group_advantage(&cpu, samples, divide, &reward, &mut advantage).unwrap();
            assert_eq!(bits(&advantage), expected, "{cpu:?} {prompts}x{samples} {divide:?}");
        }
    }
}

fn check_norm(rows: usize, n: usize, spread: u32, seed: u64, special: f32) {
    let mut x: Vec<f32> = values(seed, rows * n, spread);
    x[seed as usize % (rows * n)] = special;
    let square = |lane: f32, x: f32| x.mul_add(x, lane);
    let sums: Vec<f32> = x.chunks(n).map(|row| lanes(row.iter().copied().enumerate(), square)).collect();
    for cpu in cpus() {
        let mut sum = vec![9f32; rows];
        square_sum(&cpu, &x, &mut sum).unwrap();
        assert_eq!(bits(&sum), all_rounded::<f32>(&sums), "{cpu:?} {rows}x{n}");
    }
    let mut total = 0f64;
    for &sum in &sums {
        total += f64::from(sum);
    }
    let norm = total.sqrt() as f32;
    let q = 0.7f32 / (norm + 1e-6);
    let factor = if q > 1.0 { 1.0 } else { q };
    let (found_norm, found_factor) = clip_factor(&Cpu::best(), f64::from(0.7f32), &sums).unwrap();
    assert_eq!(bits(&[found_norm, found_factor]), all_rounded::<f32>(&[norm, factor]));
}

fn check_adamw<O: Stored>(n: usize, spread: u32, seed: u64, special: f32, step: usize, factor: Option<f32>) {
    let shape = AdamW { lr: 0.03, beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, step };
    let [w, m, mut v, mut g] = [0, 1, 2, 3].map(|i| values::<f32>(seed + i, n, spread));
    v.iter_mut().for_each(|v| *v = v.abs());
    g[seed as usize % n] = special;
    // The power by squares, from the lowest digit on.
    let power = |b: f64| {
        let digits = (0..usize::BITS).filter(|digit| step >> digit & 1 == 1);
        digits.fold(1.0, |power, digit| power * (0..digit).fold(b, |b, _| b * b))
    };
    let (rate, unbias) = ((0.03 / (1.0 - power(0.9))) as f32, (1.0 / (1.0 - power(0.95)).sqrt()) as f32);
    let keep = (1.0 - 0.03 * 0.1f64) as f32;
    let steps = (0..n).map(|i| {
        let g = factor.map_or(g[i], |factor| g[i] * factor);
        let m = 0.9f32.mul_add(m[i], (1.0f64 - 0.9) as f32 * g);
        let v = 0.95f32.mul_add(v[i], ((1.0f64 - 0.95) as f32 * g) * g);
        let u = m / v.sqrt().mul_add(unbias, 1e-6);
        [(-rate).mul_add(u, w[i] * keep), m, v]
    });
    let steps: Vec<[f32; 3]> = steps.collect();
    let expected = [0, 1, 2].map(|at| steps.iter().map(|step| step[at]).collect::<Vec<f32>>());
    for cpu in cpus() {
        let (mut state, mut rounded) = ([w.clone(), m.clone(), v.clone()], vec![O::default(); n]);
        let [w, m, v] = &mut state;
        adamw(&cpu, &shape, &g, factor, [w, m, v], &mut rounded).unwrap();
        let what = format!("{cpu:?} {n} step {step} {factor:?}");
        assert_eq!(state.map(|x| bits(&x)), expected.each_ref().map(|x| all_rounded::<f32>(x)), "{what}");
        assert_eq!(bits(&rounded), all_rounded::<O>(&expected[0]), "{} {what}", O::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn losses_are_the_page(
        sequences in 1usize..4,
        length in prop_oneof![1usize..40, 250usize..270, 380usize..400, 760usize..1100],
        spread in 1u32..30,
        seed: u64,
        flags in 0usize..150,
    ) {
        check_losses(sequences, length, spread, seed >> 1, flags);
    }

    #[test]
    fn the_step_is_the_page(
        rows in 1usize..9,
        n in prop_oneof![1usize..40, 250usize..270, 1000usize..5000],
        spread in 1u32..30,
        seed: u64,
        special in prop::sample::select(vec![1.0f32, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]),
        groups in 0u32..11,
    ) {
        let seed = seed >> 1;
        check_batch(rows * n, 1 << groups, spread, seed);
        check_batch(rows, 1 << groups, spread, seed);
        check_advantages(rows, 1 + n % 70, spread, seed, special);
        check_norm(rows, n, spread, seed, special);
        check_adamw::<bf16>(n, spread, seed, special, 1 + seed as usize % 100_000, None);
        check_adamw::<f32>(n, spread, seed, special, 1 + seed as usize % 7, Some(0.37));
        check_adamw::<f16>(n.min(300), 2, seed, special, 3, Some(0.37));
    }
}

/// Outputs that go past the caches, by name, are those in place.
#[test]
fn a_large_step_is_a_small_one() {
    let n = (32 << 20) / 4 + 1031;
    let [w, m, v, g] = [0, 1, 2, 3].map(|i| values::<f32>(i, 4096 + i as usize, 3));
    let long = |x: &[f32]| x.iter().copied().cycle().take(n).map(f32::abs).collect::<Vec<f32>>();
    let [w, m, v, g] = [long(&w), long(&m), long(&v), long(&g)];
    let shape = [n];
    for isa in Isa::of_machine().filter(|isa| *isa != Isa::Scalar) {
        let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
        let (mut state, mut rounded) = ([w.clone(), m.clone(), v.clone()], vec![0f32; n]);
        let [new_w, new_m, new_v] = &mut state;
        adamw(&cpu, &AdamW::default(), &g, None, [new_w, new_m, new_v], &mut rounded).unwrap();
        assert!(rounded == state[0]);
        let mut made = [const { Vec::new() }; 4].map(|_: Vec<f32>| vec![9f32; n]);
        let outputs = ["new_w", "new_m", "new_v", "rounded"].into_iter().zip(&mut made);
        let outputs = outputs.map(|(name, made)| (name, TensorMut::new(made, &shape).unwrap())).collect();
        let inputs = [("w", &w), ("m", &m), ("v", &v), ("g", &g)];
        let inputs = inputs.map(|(name, x)| (name, TensorRef::new(x, &shape).unwrap()));
        cpu.call("adamw", Attributes::new(), &inputs, outputs).unwrap();
        assert!(made[..3] == state && made[3] == rounded, "{isa}");
    }
}

#[test]
fn refusals_say_what_would_be_right() {
    let cpu = Cpu::best();
    let error = |result: Result<(), Error>| result.expect_err("it is wrong").to_string();
    let (mut sum, mut slopes) = ([9f32], [9f32; 2]);
    let shape = LossShape::new(1, 2);
    let wrong = LossShape { denominator: 0.0, ..shape };
    assert!(error(nll(&cpu, &wrong, &[0.0; 2], &[1; 2], &mut sum, &mut slopes)).contains("denominator is 0"));
    assert!(error(nll(&cpu, &shape, &[0.0; 2], &[1], &mut sum, &mut slopes)).contains("`count` has 1 elements"));
    let tokens =
        PolicyTokens { logprob: &[0.0; 2], old_logprob: &[0.0; 2], advantage: &[1.0], reference: None, count: &[1; 2] };
    let mut policy = |loss: PolicyLoss, tokens| error(policy_loss(&cpu, &shape, &loss, tokens, &mut sum, &mut slopes));
    let plain = PolicyLoss::default();
    assert!(policy(PolicyLoss { low: 1.5, ..plain }, tokens).contains("low is 1.5; it must be from 0 to 1"));
    assert!(policy(PolicyLoss { kl: Kl::K3, ..plain }, tokens).contains("distances from a reference"));
    assert!(
        policy(plain, PolicyTokens { reference: Some(&[0.0; 2]), ..tokens }).contains("nothing reads the reference")
    );
    assert!(policy(plain, PolicyTokens { advantage: &[1.0; 2], ..tokens }).contains("`advantage` has 2 elements"));
    assert!(error(batch_loss(&cpu, 3, 1.0, &[1.0]).map(drop)).contains("power of two"));
    assert!(error(clip_factor(&cpu, f64::NAN, &[1.0]).map(drop)).contains("max_norm is NaN"));
    let advantage = group_advantage(&cpu, 2, Divide::Deviation(-1.0), &[1.0; 2], &mut slopes);
    assert!(error(advantage).contains("eps is -1"));
    assert!(error(square_sum(&cpu, &[1.0; 5], &mut slopes)).contains("`x` has 5 elements"));
    let mut state = [[1f32], [2.0], [3.0]];
    let mut step = |shape: AdamW| {
        let [w, m, v] = &mut state;
        error(adamw(&cpu, &shape, &[1.0], None, [w, m, v], &mut [0f32]))
    };
    assert!(step(AdamW { step: 0, ..AdamW::default() }).contains("the first one is 1"));
    assert!(
        step(AdamW { beta2: 1.0, ..AdamW::default() }).contains("beta2 is 1; it must be at least 0 and less than 1")
    );
    assert_eq!((sum, slopes, state), ([9.0], [9.0; 2], [[1.0], [2.0], [3.0]]));
}
