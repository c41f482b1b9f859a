//! Sums over tokens against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set, and in one call or
//! in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, lanes, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// Rows of x times their r, for hf rounded.
fn rms_normed(shape: &RmsNorm, x: &[f32]) -> Vec<f32> {
    let row = |x: &[f32]| {
        let squares = lanes(x.iter().copied().enumerate(), |lane, x| x.mul_add(x, lane));
        let r = 1.0 / (squares / shape.n as f32 + shape.eps).sqrt();
        let hf = |h: f32| if shape.rounding == Rounding::Hf { bf16::narrow(h).widen() } else { h };
        x.iter().map(|x| hf(x * r)).collect::<Vec<f32>>()
    };
    x.chunks(shape.n).flat_map(row).collect()
}

fn layer_normed(shape: &LayerNorm, x: &[f32]) -> Vec<f32> {
    let row = |x: &[f32]| {
        let mean = lanes(x.iter().copied().enumerate(), |lane, x| lane + x) / shape.n as f32;
        let square = |lane: f32, d: f32| d.mul_add(d, lane);
        let variance = lanes(x.iter().map(|x| x - mean).enumerate(), square) / shape.n as f32;
        let r = 1.0 / (variance + shape.eps).sqrt();
        x.iter().map(|x| (x - mean) * r).collect::<Vec<f32>>()
    };
    x.chunks(shape.n).flat_map(row).collect()
}

/// `sums[64,n]` after the rows `0..rows` of tokens with `heads` rows each, as far as `mask` counts them.
fn page(
    sums: &[f32],
    n: usize,
    heads: usize,
    tokens: Tokens,
    rows: usize,
    step: impl Fn(usize, f32) -> f32,
) -> Vec<u32> {
    let (mut sums, mut count) = (sums.to_vec(), tokens.offset * heads);
    for row in (0..rows).filter(|row| tokens.mask.is_none_or(|mask| mask[row / heads] != 0)) {
        for i in 0..n {
            let sum = &mut sums[count % 64 * n + i];
            *sum = f32::narrow(step(row * n + i, *sum));
        }
        count += 1;
    }
    bits(&sums)
}

/// What `sum` makes of `start` in one call, and in calls that end at each of `cuts` and bring the rows from one to the next.
fn whole_and_cut(
    start: &[f32],
    tokens: Tokens,
    cuts: &[usize],
    sum: impl Fn(Tokens, std::ops::Range<usize>, &mut [f32]),
) -> [Vec<u32>; 2] {
    let rows = cuts[cuts.len() - 1];
    let (mut whole, mut cut) = (start.to_vec(), start.to_vec());
    sum(tokens, 0..rows, &mut whole);
    let (mut from, mut offset) = (0, tokens.offset);
    for &to in cuts {
        let mask = tokens.mask.map(|mask| &mask[from..to]);
        sum(Tokens { mask, offset }, from..to, &mut cut);
        offset += mask.map_or(to - from, |mask| mask.iter().filter(|token| **token != 0).count());
        from = to;
    }
    [bits(&whole), bits(&cut)]
}

fn check<I: Stored>(tokens: usize, heads: usize, n: usize, spread: u32, seed: u64, flags: u32) {
    let rows = tokens * heads;
    let mut x: Vec<I> = values(seed, rows * n, spread);
    let mut dy: Vec<I> = values(seed + 1, rows * n, spread);
    // In one row each, so that the others show numbers.
    x[seed as usize % n] = I::narrow([1.0, f32::NAN, f32::INFINITY, -0.0][flags as usize % 4]);
    dy[rows * n - 1 - seed as usize % n] = I::narrow([-0.0, 1.0, f32::NEG_INFINITY, f32::NAN][flags as usize / 4 % 4]);
    let mask: Vec<i32> = values::<f32>(seed + 3, tokens, 1).iter().map(|v| i32::from(*v > -0.3) * 7).collect();
    let offset = (seed % 1000) as usize;
    let counted = Tokens { mask: (flags & 1 == 1).then_some(&mask), offset };
    let start: Vec<f32> = if flags & 2 == 2 { values(seed + 2, 64 * n, spread) } else { vec![0.0; 64 * n] };
    let rounding = if flags & 4 == 4 { Rounding::Hf } else { Rounding::Once };
    let eps = [0.0, 1e-6, 0.5][flags as usize % 3];
    let norm = RmsNorm { rows, n, eps, rounding, weight_offset: false };
    let layer = LayerNorm { rows, n, eps };
    let (wide_x, wide_dy) = (widened(&x), widened(&dy));
    let h = rms_normed(&norm, &wide_x);
    let of_layer = layer_normed(&layer, &wide_x);
    let of_tokens = page(&start, n, 1, counted, tokens, |i, sum| sum + wide_x[i]);
    let of_rms = page(&start, n, 1, counted, tokens, |i, sum| wide_dy[i].mul_add(h[i], sum));
    let of_layer = page(&start, n, 1, counted, tokens, |i, sum| wide_dy[i].mul_add(of_layer[i], sum));
    let cuts = [tokens / 3, tokens / 3 + 1, tokens];
    let pairing = if flags & 8 == 8 { Pairing::Half } else { Pairing::Interleaved };
    for cpu in cpus() {
        let what = format!("{} {cpu:?} {tokens}x{heads}x{n} from {offset} {flags:b}", I::NAME);
        let of = |range: std::ops::Range<usize>| range.start * n..range.end * n;
        let found = whole_and_cut(&start, counted, &cuts, |tokens, rows, sum| {
            token_sum(&cpu, n, tokens, &x[of(rows)], sum).unwrap();
        });
        assert_eq!(found, [&of_tokens[..]; 2], "token_sum {what}");
        let found = whole_and_cut(&start, counted, &cuts, |tokens, rows, dw| {
            let shape = RmsNorm { rows: rows.len(), ..norm };
            rms_norm_dw(&cpu, &shape, tokens, &x[of(rows.clone())], &dy[of(rows)], dw).unwrap();
        });
        assert_eq!(found, [&of_rms[..]; 2], "rms_norm_dw {what}");
        let found = whole_and_cut(&start, counted, &cuts, |tokens, rows, dw| {
            let shape = LayerNorm { rows: rows.len(), ..layer };
            layer_norm_dw(&cpu, &shape, tokens, &x[of(rows.clone())], &dy[of(rows)], dw).unwrap();
        });
        assert_eq!(found, [&of_layer[..]; 2], "layer_norm_dw {what}");
        if n.is_multiple_of(2) {
            let positions: Vec<i32> = (0..tokens).map(|t| (t * t * 31 % 70_001) as i32).collect();
            let back = |rows: std::ops::Range<usize>| {
                RopeTable::new(&cpu, &inv_freq(10_000.0, n).unwrap(), &positions[rows]).reversed()
            };
            let mut turned = vec![0f32; dy.len()];
            let shape = Rope { tokens, heads, dim: n, pairing };
            rope_backward(&cpu, &shape, &back(0..tokens), &dy, &mut turned).unwrap();
            let of_heads = page(&start, n, heads, counted, rows, |i, sum| turned[i].mul_add(h[i], sum));
            let found = whole_and_cut(&start, counted, &cuts, |counted, range, dw| {
                let tokens = range.len();
                let shape = NormRope { tokens, heads, dim: n, eps, rounding, weight_offset: flags & 16 == 16, pairing };
                let part = range.start * heads * n..range.end * heads * n;
                let (x, dy) = (&x[part.clone()], &dy[part]);
                norm_rope_dw(&cpu, &shape, &back(range), counted, x, dy, dw).unwrap();
            });
            assert_eq!(found, [&of_heads[..]; 2], "norm_rope_dw {what}");
        }
        check_embedding(&cpu, n, &dy[..tokens * n], &start, counted.mask, seed);
    }
}

fn check_embedding<I: Stored>(cpu: &Cpu, dim: usize, dy: &[I], start: &[f32], mask: Option<&[i32]>, seed: u64) {
    let (count, wide) = (dy.len() / dim, widened(dy));
    let tokens: Vec<i32> = (0..count).map(|t| ((seed >> 9) as usize % 97 * (t + 1) % 64) as i32).collect();
    let mut expected = start.to_vec();
    for t in (0..count).filter(|&t| mask.is_none_or(|mask| mask[t] != 0)) {
        for i in 0..dim {
            let sum = &mut expected[tokens[t] as usize * dim + i];
            *sum = f32::narrow(*sum + wide[t * dim + i]);
        }
    }
    let mut dw = start.to_vec();
    let cut = count / 2;
    for rows in [0..cut, cut..count] {
        let part = rows.start * dim..rows.end * dim;
        embedding_dw(cpu, dim, &dy[part], &tokens[rows.clone()], mask.map(|mask| &mask[rows]), &mut dw).unwrap();
    }
    assert_eq!(bits(&dw), bits(&expected), "embedding_dw {} {cpu:?} {count}x{dim}", I::NAME);
}

fn check_fold<I: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64) {
    let x: Vec<I> = values(seed, rows * n, spread);
    let mut page = widened(&x);
    let mut half = rows / 2;
    while half > 0 {
        for i in 0..half * n {
            page[i] += page[half * n + i];
        }
        half /= 2;
    }
    let expected = all_rounded::<O>(&page[..n]);
    for cpu in cpus() {
        let mut y = vec![O::narrow(f32::NAN); n];
        fold(&cpu, &x, &mut y).unwrap();
        assert_eq!(bits(&y), expected, "{} to {} {cpu:?} {rows}x{n}", I::NAME, O::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sums_over_tokens_are_the_page(
        tokens in prop_oneof![4 => 1usize..9, 2 => 60usize..70, 1 => 120usize..150],
        heads in 1usize..4,
        n in prop_oneof![4 => 1usize..300, 1 => 1usize..40],
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
        flags in 0u32..32,
    ) {
        let seed = seed >> 3;
        check::<bf16>(tokens, heads, n, spread, seed, flags);
        check::<f32>(tokens, heads, n, spread, seed, flags);
        check::<f16>(tokens, heads, n, spread.min(5), seed, flags);
    }

    #[test]
    fn folds_are_the_page(
        level in 0u32..9,
        n in 1usize..200,
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
    ) {
        check_fold::<f32, f32>(1 << level, n, spread, seed >> 3);
        check_fold::<f32, bf16>(1 << level, n, spread, seed >> 3);
        check_fold::<bf16, f16>(1 << level, n, spread, seed >> 3);
    }
}

/// Rows that are read in several parts.
#[test]
fn sums_of_long_rows_are_the_page() {
    check::<bf16>(4, 1, 9001, 3, 5, 0);
    check::<f32>(3, 2, 8450, 3, 6, 7);
}

/// Padding adds nothing, not even +0; a sum that begins with -0 keeps it.
#[test]
fn padding_is_not_seen() {
    for cpu in cpus() {
        let (nan, negative) = (vec![f32::NAN; 70 * 5], vec![-0f32; 64 * 5]);
        let (mut dw, none) = (negative.clone(), vec![0; 70]);
        let tokens = Tokens { mask: Some(&none), offset: 3 };
        token_sum(&cpu, 5, tokens, &nan, &mut dw).unwrap();
        let shape = RmsNorm { rows: 70, n: 5, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
        rms_norm_dw(&cpu, &shape, tokens, &nan, &nan, &mut dw).unwrap();
        layer_norm_dw(&cpu, &LayerNorm { rows: 70, n: 5, eps: 0.0 }, tokens, &nan, &nan, &mut dw).unwrap();
        embedding_dw(&cpu, 5, &nan, &vec![1; 70], Some(&none), &mut dw).unwrap();
        assert_eq!(bits(&dw), bits(&negative));
    }
}

/// Each tensor that does not fit is named, before anything is written.
#[test]
fn refusals_name_the_tensor() {
    let cpu = Cpu::best();
    let refused = |result: Result<(), Error>| result.unwrap_err().to_string();
    let (x, mut dw) = (vec![1f32; 6], vec![0f32; 128]);
    let shape = RmsNorm { rows: 3, n: 2, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
    let layer = LayerNorm { rows: 3, n: 2, eps: 0.0 };
    let all = Tokens::default();
    let short = Tokens { mask: Some(&[1, 1]), offset: 0 };
    for (found, part) in [
        (refused(token_sum(&cpu, 2, all, &x[..5], &mut dw)), "`x` has 5 elements"),
        (refused(token_sum(&cpu, 2, all, &x, &mut dw[..64])), "`sum` has 64 elements; its shape [64,N] needs 128"),
        (refused(token_sum(&cpu, 2, short, &x, &mut dw)), "`mask` has 2 elements; its shape [R] needs 3"),
        (refused(rms_norm_dw(&cpu, &shape, all, &x[..4], &x, &mut dw)), "`x` has 4 elements"),
        (refused(rms_norm_dw(&cpu, &shape, all, &x, &x[..4], &mut dw)), "`dy` has 4 elements"),
        (refused(rms_norm_dw(&cpu, &shape, all, &x, &x, &mut dw[..2])), "`dw` has 2 elements"),
        (refused(layer_norm_dw(&cpu, &layer, all, &x[..4], &x, &mut dw)), "`x` has 4 elements"),
        (refused(layer_norm_dw(&cpu, &layer, all, &x, &x[..4], &mut dw)), "`dy` has 4 elements"),
        (refused(embedding_dw(&cpu, 2, &x, &[0, 1], None, &mut dw)), "`dy` has 6 elements"),
        (refused(embedding_dw(&cpu, 2, &x, &[0, 64, 1], None, &mut dw)), "tokens[1] is 64; the table has 64 rows"),
        (refused(embedding_dw(&cpu, 2, &x, &[0, 1, -1], None, &mut dw)), "tokens[2] is -1"),
        (refused(embedding_dw(&cpu, 2, &x, &[0; 3], Some(&[1]), &mut dw)), "`mask` has 1 elements"),
        (refused(embedding_dw(&cpu, 2, &x, &[0; 3], None, &mut dw[..127])), "`dw` has 127 elements"),
        (refused(fold(&cpu, &x, &mut dw[..2])), "C = 3 must be a power of two"),
        (refused(fold(&cpu, &x, &mut dw[..4])), "`x` has 6 elements"),
    ] {
        assert!(found.contains(part), "{found}");
    }
    assert!(dw.iter().all(|v| *v == 0.0));
}
