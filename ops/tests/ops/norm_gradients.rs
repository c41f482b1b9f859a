//! The gradients of norms against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, lanes, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// Before the last rounding, of rows x, dy and dsum that are widened, as w is.
fn rms_norm_page(shape: &RmsNorm, [x, w, dy]: [&[f32]; 3], dsum: Option<&[f32]>) -> Vec<f32> {
    let (n, mut dx) = (shape.n, Vec::new());
    for (row, (x, dy)) in x.chunks(n).zip(dy.chunks(n)).enumerate() {
        let squares = lanes(x.iter().copied().enumerate(), |lane, x| x.mul_add(x, lane));
        let r = 1.0 / (squares / n as f32 + shape.eps).sqrt();
        let g: Vec<f32> = dy.iter().zip(w).map(|(dy, w)| dy * if shape.weight_offset { w + 1.0 } else { *w }).collect();
        let c = sum_of_products(&g, x) / n as f32;
        for i in 0..n {
            let found = r * (-((c * r) * r)).mul_add(x[i], g[i]);
            dx.push(dsum.map_or(found, |dsum| found + dsum[row * n + i]));
        }
    }
    dx
}

fn layer_norm_page(shape: &LayerNorm, [x, dy]: [&[f32]; 2], w: Option<&[f32]>) -> Vec<f32> {
    let (n, mut dx) = (shape.n, Vec::new());
    for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
        let mean = lanes(x.iter().copied().enumerate(), |lane, x| lane + x) / n as f32;
        let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
        let variance = lanes(d.iter().copied().enumerate(), |lane, d| d.mul_add(d, lane)) / n as f32;
        let r = 1.0 / (variance + shape.eps).sqrt();
        let h: Vec<f32> = d.iter().map(|d| d * r).collect();
        let g: Vec<f32> = (0..n).map(|i| w.map_or(dy[i], |w| dy[i] * w[i])).collect();
        let a = lanes(g.iter().copied().enumerate(), |lane, g| lane + g) / n as f32;
        let b = sum_of_products(&g, &h) / n as f32;
        dx.extend((0..n).map(|i| r * (-b).mul_add(h[i], g[i] - a)));
    }
    dx
}

fn sum_of_products(a: &[f32], b: &[f32]) -> f32 {
    lanes(a.iter().zip(b).enumerate(), |lane, (a, b)| a.mul_add(*b, lane))
}

/// `[x, w, dy, dsum]` of a call.
type Inputs<'a, I> = [&'a [I]; 4];

fn check_inputs<I: Stored, O: Stored>(rows: usize, n: usize, [x, w, dy, dsum]: Inputs<I>, eps: f32, flags: u32) {
    let rounding = if flags & 1 == 1 { Rounding::Hf } else { Rounding::Once };
    let shape = RmsNorm { rows, n, eps, rounding, weight_offset: flags & 2 == 2 };
    let layer = LayerNorm { rows, n, eps };
    let [wide_x, wide_w, wide_dy, wide_dsum] = [x, w, dy, dsum].map(widened);
    let inputs = [&wide_x[..], &wide_w, &wide_dy];
    let of_rms = all_rounded::<O>(&rms_norm_page(&shape, inputs, None));
    let of_sum = all_rounded::<O>(&rms_norm_page(&shape, inputs, Some(&wide_dsum)));
    let of_layer = all_rounded::<O>(&layer_norm_page(&layer, [&wide_x, &wide_dy], Some(&wide_w)));
    let of_plain = all_rounded::<O>(&layer_norm_page(&layer, [&wide_x, &wide_dy], None));
    let nan = || vec![O::narrow(f32::NAN); rows * n];
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {rows}x{n} {flags:b}", I::NAME, O::NAME);
        let mut dx = nan();
        rms_norm_backward(&cpu, &shape, x, w, dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), of_rms, "rms_norm_backward {what}");
        let mut dx = nan();
        add_rms_norm_backward(&cpu, &shape, x, w, dy, None, &mut dx).unwrap();
        assert_eq!(bits(&dx), of_rms, "add_rms_norm_backward without dsum {what}");
        let mut dx = nan();
        add_rms_norm_backward(&cpu, &shape, x, w, dy, Some(dsum), &mut dx).unwrap();
        assert_eq!(bits(&dx), of_sum, "add_rms_norm_backward {what}");
        let mut dx = nan();
        layer_norm_backward(&cpu, &layer, x, Some(w), dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), of_layer, "layer_norm_backward {what}");
        let mut dx = nan();
        layer_norm_backward(&cpu, &layer, x, None, dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), of_plain, "layer_norm_backward without w {what}");
    }
}

fn check<I: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64, flags: u32) {
    let mut x: Vec<I> = values(seed, rows * n, spread);
    let mut dy: Vec<I> = values(seed + 1, rows * n, spread);
    let (w, dsum): (Vec<I>, Vec<I>) = (values(seed + 2, n, 2), values(seed + 3, rows * n, 2));
    // In one row each, so that the others show numbers.
    x[seed as usize % n] = I::narrow([1.0, f32::NAN, f32::INFINITY, -0.0][flags as usize % 4]);
    dy[rows * n - 1 - seed as usize % n] = I::narrow([-0.0, 1.0, f32::NEG_INFINITY, f32::NAN][flags as usize / 4 % 4]);
    let eps = [0.0, 1e-6, 0.5][flags as usize % 3];
    check_inputs::<I, O>(rows, n, [&x, &w, &dy, &dsum], eps, flags);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_of_norms_are_the_page(
        rows in 1usize..5,
        n in prop_oneof![4 => 1usize..1400, 1 => 1usize..40, 1 => 4080usize..4120],
        spread in prop::sample::select(vec![1u32, 5, 30, 75]),
        seed: u64,
        flags in 0u32..16,
    ) {
        let seed = seed >> 3;
        check::<bf16, bf16>(rows, n, spread, seed, flags);
        check::<f32, bf16>(rows, n, spread, seed, flags);
        check::<f32, f32>(rows, n, spread, seed, flags);
        check::<f16, f16>(rows, n, spread.min(7), seed, flags);
        check::<bf16, f32>(rows, n, spread, seed, flags);
    }
}

/// Heads of three tokens, turned back by the op that turns them back alone.
fn check_heads<I: Stored, O: Stored>(heads: usize, dim: usize, spread: u32, seed: u64, flags: u32) {
    let tokens = 3;
    let (x, mut dy): (Vec<I>, Vec<I>) =
        (values(seed, tokens * heads * dim, spread), values(seed + 1, tokens * heads * dim, spread));
    let w: Vec<I> = values(seed + 2, dim, 2);
    dy[seed as usize % dim] = I::narrow([1.0, f32::NAN, f32::INFINITY, -0.0][flags as usize % 4]);
    let pairing = if flags & 4 == 4 { Pairing::Half } else { Pairing::Interleaved };
    let (eps, weight_offset) = ([0.0, 1e-6, 0.5][flags as usize % 3], flags & 8 == 8);
    let shape = NormRope { tokens, heads, dim, eps, rounding: Rounding::Once, weight_offset, pairing };
    let norm = RmsNorm { rows: tokens * heads, n: dim, eps, rounding: Rounding::Once, weight_offset };
    for cpu in cpus() {
        let back = RopeTable::new(&cpu, &inv_freq(10_000.0, dim).unwrap(), &[0, 5, 70_000]).reversed();
        let mut turned = vec![0f32; dy.len()];
        rope_backward(&cpu, &Rope { tokens, heads, dim, pairing }, &back, &dy, &mut turned).unwrap();
        let expected = all_rounded::<O>(&rms_norm_page(&norm, [&widened(&x), &widened(&w), &turned], None));
        let mut dx = vec![O::narrow(f32::NAN); x.len()];
        norm_rope_backward(&cpu, &shape, &back, &x, &w, &dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), expected, "{} to {} {cpu:?} {heads}x{dim} {flags:b}", I::NAME, O::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_of_normalised_heads_are_the_page(
        heads in 1usize..4,
        half in prop_oneof![4 => 1usize..200, 1 => 2045usize..2055],
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
        flags in 0u32..16,
    ) {
        let seed = seed >> 3;
        check_heads::<bf16, bf16>(heads, 2 * half, spread, seed, flags);
        check_heads::<f32, f32>(heads, 2 * half, spread, seed, flags);
        check_heads::<f32, bf16>(heads, 2 * half, spread, seed, flags);
        check_heads::<f16, bf16>(heads, 2 * half, spread.min(5), seed, flags);
    }
}

/// Rows that are read in several parts, and of more than one part of the last.
#[test]
fn gradients_of_long_rows_are_the_page() {
    for (n, flags) in [(4096, 0), (8192, 2), (9001, 4)] {
        check::<bf16, bf16>(3, n, 3, n as u64, flags);
        check::<f32, f32>(2, n, 3, n as u64, flags);
    }
}

/// Products that underflow to -0 in every lane make a sum of -0, which shows where g is -0. What pads the last vector is
/// not seen in it.
#[test]
fn sums_of_negative_zeros_keep_their_sign() {
    for n in [256, 300, 511, 512] {
        let (x, w, dsum) = (vec![1e-30f32; n], vec![1f32; n], vec![-0f32; n]);
        let dy: Vec<f32> = (0..n).map(|i| if i < 256 { -1e-30 } else { -0.0 }).collect();
        assert!(sum_of_products(&dy, &x).is_sign_negative());
        check_inputs::<f32, f32>(1, n, [&x, &w, &dy, &dsum], 1.0, 0);
    }
}
