//! Losses and the step by hand: what no call by name reaches.

use super::adamw::{AdamW, adamw};
use super::nll::nll;
use super::policy_loss::{Kl, PolicyLoss, PolicyTokens, policy_loss};
use super::sequences::LossShape;
use crate::{Cpu, Error, Isa};
use half::bf16;

/// The loss of one token, and its gradient.
fn of_token(loss: PolicyLoss, [logprob, old, advantage]: [f32; 3], reference: Option<f32>) -> (f32, f32) {
    let (mut sum, mut slope) = ([9f32], [9f32]);
    let tokens = PolicyTokens {
        logprob: &[logprob],
        old_logprob: &[old],
        advantage: &[advantage],
        reference: reference.as_ref().map(std::slice::from_ref),
        count: &[1],
    };
    policy_loss(&Cpu::best(), &LossShape::new(1, 1), &loss, tokens, &mut sum, &mut slope).unwrap();
    (sum[0], slope[0])
}

pub(crate) fn losses_without_parameters_are_plain() {
    let plain = PolicyLoss::default();
    assert_eq!(of_token(plain, [0.0, -1.0, 1.0], None), (-1.2, 0.0));
    assert_eq!(of_token(plain, [-1.0, 0.0, -1.0], None), (0.8, 0.0));
    assert_eq!(of_token(PolicyLoss { kl: Kl::K1, ..plain }, [0.0, 0.0, 1.0], Some(-3.0)), (-1.0, -1.0));
    // The difference of the two is the smallest number: 2 and 1.2, rounded to 1, of them.
    let least = f32::from_bits(1);
    assert_eq!(of_token(plain, [0.7, 0.0, least], None), (-least, 0.0));
    let (mut sum, mut slope) = ([9f32], [9f32]);
    nll(&Cpu::best(), &LossShape::new(1, 1), &[-2.0], &[1], &mut sum, &mut slope).unwrap();
    assert_eq!((sum, slope), ([2.0], [-1.0]));
    // Sequences without room for a token.
    let mut sums = [9f32; 2];
    nll(&Cpu::best(), &LossShape::new(2, 0), &[], &[], &mut sums, &mut []).unwrap();
    assert_eq!(sums.map(f32::to_bits), [0; 2]);
}

/// In place, whatever the length and the threads: m, v and w of every element by the formula.
pub(crate) fn a_step_in_place_is_plain() {
    let own = AdamW { lr: 0.03, beta1: 0.7, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, step: 6 };
    for (shape, [lr, beta1, beta2, eps, decay], step) in
        [(AdamW::default(), [1e-3, 0.9, 0.999, 1e-8, 0.01], 1), (own, [0.03, 0.7, 0.95, 1e-6, 0.1], 6)]
    {
        let power = |base: f64| (0..step).fold(1.0, |power, _| power * base);
        let (rate, unbias) = ((lr / (1.0 - power(beta1))) as f32, (1.0 / (1.0 - power(beta2)).sqrt()) as f32);
        let [b1, b2, rest1, rest2] = [beta1, beta2, 1.0 - beta1, 1.0 - beta2].map(|constant| constant as f32);
        for (len, factor) in [(0, None), (1, Some(0.37)), (33, None), (70_001, Some(0.37))] {
            let values = |by: usize| (0..len).map(|i| (i * by % 1013) as f32 / 512.0 - 0.7).collect::<Vec<f32>>();
            let [w, m, v, g] = [7, 11, 13, 17].map(values);
            let (mut v, mut g): (Vec<f32>, _) = (v.into_iter().map(f32::abs).collect(), g);
            // Beside any other number `eps` is nothing.
            [&mut v, &mut g].into_iter().for_each(|x| x.iter_mut().take(1).for_each(|x| *x = 0.0));
            let of = |i: usize| {
                let g = factor.map_or(g[i], |factor| g[i] * factor);
                let m = b1.mul_add(m[i], rest1 * g);
                let v = b2.mul_add(v[i], rest2 * g * g);
                let u = m / v.sqrt().mul_add(unbias, eps as f32);
                [(-rate).mul_add(u, w[i] * (1.0 - lr * decay) as f32), m, v]
            };
            let expected: Vec<[u32; 3]> = (0..len).map(|i| of(i).map(f32::to_bits)).collect();
            for (isa, threads) in Isa::of_machine().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let cpu = Cpu::new(isa, threads, usize::MAX).unwrap();
                let ([mut w, mut m, mut v], mut rounded) = ([w.clone(), m.clone(), v.clone()], vec![bf16::ZERO; len]);
                adamw(&cpu, &shape, &g, factor, [&mut w, &mut m, &mut v], &mut rounded).unwrap();
                let found = (0..len).map(|i| [w[i], m[i], v[i]].map(f32::to_bits));
                assert!(found.eq(expected.iter().copied()), "{isa} {threads} {len} {shape:?}");
                assert!(rounded.iter().zip(&w).all(|(rounded, w)| *rounded == bf16::from_f32(*w)), "{isa} {len}");
            }
        }
    }
}

/// The ends of ranges are in them but for 1, which nothing would be left of.
pub(crate) fn parameters_are_within_their_ranges() {
    let run = |shape: AdamW| -> Result<(), Error> {
        adamw(&Cpu::best(), &shape, &[1.0], None, [&mut [1.0], &mut [0.0], &mut [1.0]], &mut [0f32])
    };
    let fits = AdamW { lr: 1e4, beta1: 0.0, beta2: 0.0, eps: 1e30, weight_decay: 1e4, step: 1 };
    run(fits).unwrap();
    run(AdamW { lr: 0.0, eps: 0.0, weight_decay: 0.0, ..fits }).unwrap();
    for (shape, part) in [
        (AdamW { lr: 1.1e4, ..fits }, "lr is 11000; it must be at least 0 and at most 1e4"),
        (AdamW { lr: -1.0, ..fits }, "lr is -1"),
        (AdamW { beta1: 1.0, ..fits }, "beta1 is 1; it must be at least 0 and less than 1"),
        (AdamW { beta1: 1.5, ..fits }, "beta1 is 1.5"),
        (AdamW { beta2: 1.0, ..fits }, "beta2 is 1; it must be at least 0 and less than 1"),
        (AdamW { beta2: 1.5, ..fits }, "beta2 is 1.5"),
        (AdamW { eps: 2e30, ..fits }, "eps is"),
        (AdamW { weight_decay: -1.0, ..fits }, "weight_decay is -1"),
        (AdamW { weight_decay: 2e4, ..fits }, "weight_decay is 20000"),
    ] {
        let error = run(shape).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
