//! The scores of an indexer and the choice among them against the plainest loops of docs/NUMERICS.md: the same bits on every
//! instruction set, number of threads and budget.

use crate::cpus;
use crate::page::{Stored, bits, budgets, cases, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

fn score_page<I: Stored>(shape: &IndexScore, q: &[I], k: &[I], weight: &[f32]) -> Vec<f32> {
    let IndexScore { tokens, heads, dim, keys, scale } = *shape;
    let (q, k) = (widened(q), widened(k));
    let element = |t: usize, s: usize| {
        let mut score = 0f32;
        for h in 0..heads {
            let mut x = 0f32;
            for d in 0..dim {
                x = q[(t * heads + h) * dim + d].mul_add(k[s * dim + d], x);
            }
            x *= scale as f32;
            score = weight[t * heads + h].mul_add(if x <= 0.0 { 0.0 } else { x }, score);
        }
        if score.is_nan() { f32::NAN } else { score }
    };
    (0..tokens).flat_map(|t| (0..keys).map(move |s| (t, s))).map(|(t, s)| element(t, s)).collect()
}

fn check_scores<I: Stored>(shape: IndexScore, spread: u32, seed: u64) {
    let IndexScore { tokens, heads, dim, keys, .. } = shape;
    let (mut q, mut k) = (values::<I>(seed, tokens * heads * dim, spread), values(seed + 1, keys * dim, spread));
    let mut weight: Vec<f32> = values(seed + 2, tokens * heads, spread);
    let special = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][seed as usize % 5];
    for x in [&mut q, &mut k] {
        if let Some(x) = x.get_mut(seed as usize % 97) {
            *x = I::narrow(special);
        }
    }
    if let Some(w) = weight.get_mut(seed as usize % 13) {
        *w = special;
    }
    let expected = bits(&score_page(&shape, &q, &k, &weight));
    for cpu in cpus() {
        let mut score = vec![f32::NAN; tokens * keys];
        let mut run = |cpu: &Cpu| index_score(cpu, &shape, &q, &k, &weight, &mut score);
        let tight = budgets(&cpu, seed, &mut run);
        for cpu in [cpu].into_iter().chain(tight) {
            let mut score = vec![f32::NAN; tokens * keys];
            index_score(&cpu, &shape, &q, &k, &weight, &mut score).unwrap();
            assert_eq!(bits(&score), expected, "{} {cpu:?} {shape:?}", I::NAME);
        }
    }
}

/// By comparisons of pairs: an element is taken if fewer than K are before it.
fn topk_page(shape: &TopK, x: &[f32], count: Option<&[i32]>) -> Vec<i32> {
    let TopK { rows, n, k } = *shape;
    let mut index = Vec::new();
    for row in 0..rows {
        let x = &x[row * n..][..count.map_or(n, |count| count[row] as usize)];
        let before = |other: usize, i: usize| match (x[other].is_nan(), x[i].is_nan()) {
            (false, false) => x[other] > x[i] || x[other] == x[i] && other < i,
            (true, true) => other < i,
            (nan, _) => nan,
        };
        let taken = |i: &usize| (0..x.len()).filter(|&other| before(other, *i)).count() < k;
        index.extend((0..x.len()).filter(taken).map(|i| i as i32));
        index.resize((row + 1) * k, -1);
    }
    index
}

fn check_topk<I: Stored>(shape: TopK, distinct: u64, seed: u64, counted: bool) {
    let TopK { rows, n, k } = shape;
    // Few numbers over and over, so that many are equal.
    let some: Vec<I> = values(seed, distinct as usize, 3);
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, -f32::NAN];
    let x = values::<f32>(seed + 1, rows * n, 2).into_iter().enumerate().map(|(i, v)| match v.to_bits() >> 5 & 31 {
        0 => I::narrow(special[(seed as usize + i) % special.len()]),
        _ => some[(v.to_bits() >> 10) as usize % some.len()],
    });
    let x: Vec<I> = x.collect();
    let count: Vec<i32> = (0..rows).map(|row| (seed.rotate_left(row as u32 * 7) % (n as u64 + 1)) as i32).collect();
    let count = counted.then_some(&count[..]);
    let expected = topk_page(&shape, &widened(&x), count);
    for cpu in cpus() {
        let mut index = vec![7; rows * k];
        topk(&cpu, &shape, &x, count, &mut index).unwrap();
        assert_eq!(index, expected, "{} {cpu:?} {shape:?} {x:?}", I::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scores_are_the_page(
        tokens in 0usize..5,
        heads in prop_oneof![4 => 0usize..10, 1 => 15usize..18],
        dim in prop_oneof![4 => 0usize..20, 1 => 126usize..131],
        keys in prop_oneof![2 => 0usize..5, 2 => 30usize..35, 2 => 62usize..67, 1 => 126usize..131, 1 => 250usize..270],
        scale in prop::sample::select(vec![1.0, 0.125, -0.7, 0.0, 1e-30]),
        spread in prop::sample::select(vec![1u32, 5, 20]),
        seed: u64,
    ) {
        let shape = IndexScore { tokens, heads, dim, keys, scale };
        check_scores::<bf16>(shape, spread, seed >> 2);
        check_scores::<f16>(shape, spread.min(5), seed >> 2);
        check_scores::<f32>(shape, spread, seed >> 2);
    }

    #[test]
    fn choices_are_the_page(
        rows in 0usize..5,
        n in prop_oneof![4 => 0usize..20, 1 => 60usize..70, 1 => 250usize..260],
        k in prop_oneof![4 => 1usize..12, 1 => 50usize..70, 1 => 255usize..258],
        distinct in prop::sample::select(vec![1u64, 2, 5, 1000]),
        seed: u64,
        counted: bool,
    ) {
        check_topk::<bf16>(TopK { rows, n, k }, distinct, seed >> 2, counted);
        check_topk::<f16>(TopK { rows, n, k }, distinct, seed >> 2, counted);
        check_topk::<f32>(TopK { rows, n, k }, distinct, seed >> 2, counted);
    }
}

/// What a key is worth does not depend on how many others there are, nor on the other tokens.
#[test]
fn scores_of_some_keys_and_tokens_are_those_of_all() {
    let whole = IndexScore { tokens: 7, heads: 9, dim: 33, keys: 200, scale: 0.3 };
    let (q, k) = (values::<bf16>(1, 7 * 9 * 33, 2), values::<bf16>(2, 200 * 33, 2));
    let weight: Vec<f32> = values(3, 7 * 9, 2);
    for cpu in cpus() {
        let mut all = vec![0f32; 7 * 200];
        index_score(&cpu, &whole, &q, &k, &weight, &mut all).unwrap();
        for (tokens, keys) in [(0..1, 0..200), (2..7, 0..1), (0..7, 31..97), (6..7, 128..200)] {
            let part = IndexScore { tokens: tokens.len(), keys: keys.len(), ..whole };
            let mut some = vec![0f32; tokens.len() * keys.len()];
            let of_heads = tokens.start * 9..tokens.end * 9;
            let (q, k) = (&q[of_heads.start * 33..of_heads.end * 33], &k[keys.start * 33..keys.end * 33]);
            index_score(&cpu, &part, q, k, &weight[of_heads], &mut some).unwrap();
            let expected: Vec<f32> = tokens.flat_map(|t| all[t * 200..][keys.clone()].to_vec()).collect();
            assert_eq!(bits(&some), bits(&expected), "{cpu:?} {part:?}");
        }
    }
}

#[test]
fn refusals() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let shape = IndexScore { tokens: 1, heads: 1, dim: 2, keys: 1, scale: 1e39 };
    let found = index_score(&cpu, &shape, &[1f32; 2], &[1.0; 2], &[1.0], &mut [0.0]).unwrap_err().to_string();
    assert!(found.contains("scale is"), "{found}");
    let found = index_score(&cpu, &shape, &[1f32; 2], &[1.0; 3], &[1.0], &mut [0.0]).unwrap_err().to_string();
    assert!(found.contains("`k` has 3 elements"), "{found}");
    let refused = |k: usize, count: &[i32], index: &mut [i32]| {
        topk(&cpu, &TopK { rows: 2, n: 3, k }, &[1f32; 6], Some(count), index).unwrap_err().to_string()
    };
    for (found, expected) in [
        (refused(1, &[4, 3], &mut [0; 2]), "count[0] is 4; use 0 to 3"),
        (refused(1, &[0, -1], &mut [0; 2]), "count[1] is -1; use 0 to 3"),
        (refused(1, &[0], &mut [0; 2]), "`count` has 1 elements"),
        (refused(0, &[0, 0], &mut []), "take at least 1"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
}
