//! The gradient of attention against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set,
//! thread count and budget, with NaN in all that nobody sees.

use crate::page::{SPECIAL, Stored, all_rounded, bits, budgets, cases, exp, exp_or_nothing, strew, values, widened};
use crate::{cpus, dots_ran};
use proptest::prelude::*;
use samebits_ops::*;

/// The inputs of a call.
struct Given<I> {
    q: Vec<I>,
    k: Vec<I>,
    v: Vec<I>,
    out: Vec<I>,
    lse: Vec<f32>,
    dout: Vec<I>,
    q_pos: Vec<i32>,
    kv_len: Vec<i32>,
    mask: Option<Vec<i32>>,
}

/// The keys that row t of sequence b sees.
fn visible(shape: &Attention, q_pos: i32, kv_len: i32) -> Vec<usize> {
    let p = i64::from(q_pos);
    let sees = |j: &usize| {
        let j = *j as i64;
        j < i64::from(kv_len)
            && (!shape.causal || j <= p)
            && shape.window.is_none_or(|window| j > p.saturating_sub(window as i64))
            && shape.chunk.is_none_or(|chunk| j / chunk as i64 >= p.div_euclid(chunk as i64))
    };
    (0..shape.keys).filter(sees).collect()
}

fn tf32(shape: &Attention, values: Vec<f32>, wide: bool) -> Vec<f32> {
    let cut = |v: f32| if v.is_finite() { f32::from_bits((v.to_bits() + 0x1000) & !0x1FFF) } else { v };
    if wide && shape.tf32 == Tf32::Enabled { values.into_iter().map(cut).collect() } else { values }
}

/// dq, dk and dv before the last rounding.
fn page<I: Stored>(shape: &Attention, given: &Given<I>) -> [Vec<f32>; 3] {
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim: d, value_dim: e, .. } = *shape;
    let operand = |x: &[I]| tf32(shape, widened(x), I::NAME == "fp32");
    let [q, k, v, dout] = [&given.q, &given.k, &given.v, &given.dout].map(|x| operand(x));
    let out = widened(&given.out);
    let hi = shape.scale as f32;
    let lo = (shape.scale - f64::from(hi)) as f32;
    let chain = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |sum, (a, b)| a.mul_add(*b, sum));
    let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    let step = |sums: &mut [f32], w: f32, row: &[f32]| {
        sums.iter_mut().zip(row).for_each(|(sum, v)| *sum = w.mul_add(*v, *sum));
    };
    let mut dq = vec![0f32; batch * queries * q_heads * d];
    let (mut dk, mut dv) = (vec![0f32; batch * keys * kv_heads * d], vec![0f32; batch * keys * kv_heads * e]);
    for (b, head) in (0..batch).flat_map(|b| (0..q_heads).map(move |head| (b, head))) {
        let kv_head = head / (q_heads / kv_heads);
        let key = |j: usize| (b * keys + j) * kv_heads + kv_head;
        let (mut chains_k, mut chains_v) = (vec![0f32; keys * d], vec![0f32; keys * e]);
        for t in 0..queries {
            let token = b * queries + t;
            let row = token * q_heads + head;
            let (query, gradient) = (&q[row * d..][..d], &dout[row * e..][..e]);
            let delta = chain(gradient, &out[row * e..][..e]);
            let mut block = (0, vec![0f32; d]);
            for j in visible(shape, given.q_pos[token], given.kv_len[b]) {
                let s = chain(query, &k[key(j) * d..][..d]);
                if s == f32::NEG_INFINITY && shape.softcap.is_none() {
                    continue;
                }
                let (difference, slope) = match shape.softcap {
                    Some(cap) => {
                        let x = s * (shape.scale / cap) as f32;
                        let e = exp(-2.0 * x.abs());
                        let t = ((1.0 - e) / (1.0 + e)).copysign(x);
                        (cap as f32 * t - given.lse[row], (-t).mul_add(t, 1.0))
                    }
                    None => (s.mul_add(lo, s.mul_add(hi, -given.lse[row])), 1.0),
                };
                let p = exp_or_nothing(difference);
                let mut g = p * (chain(gradient, &v[key(j) * e..][..e]) - delta);
                if shape.softcap.is_some() {
                    g *= slope;
                }
                if j / 256 != block.0 {
                    add(&mut dq[row * d..][..d], &block.1);
                    block = (j / 256, vec![0f32; d]);
                }
                step(&mut block.1, g, &k[key(j) * d..][..d]);
                if given.mask.as_ref().is_none_or(|mask| mask[token] != 0) {
                    step(&mut chains_k[j * d..][..d], g, query);
                    step(&mut chains_v[j * e..][..e], p, gradient);
                }
            }
            add(&mut dq[row * d..][..d], &block.1);
        }
        for j in 0..keys {
            add(&mut dk[key(j) * d..][..d], &chains_k[j * d..][..d]);
            add(&mut dv[key(j) * e..][..e], &chains_v[j * e..][..e]);
        }
    }
    [&mut dq, &mut dk].into_iter().for_each(|sums| sums.iter_mut().for_each(|sum| *sum *= hi));
    [dq, dk, dv]
}

/// Inputs of a call: queries are the last of their keys or anywhere, lse is that of the scores, some rows are padding,
/// and what nobody sees is NaN.
fn given<I: Stored>(shape: &Attention, spread: u32, seed: u64, special: &[f32]) -> Given<I> {
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim: d, value_dim: e, .. } = *shape;
    let rows = batch * queries;
    let draw = |i: u64, below: usize| (seed.rotate_left(7 * i as u32 + 3) % below.max(1) as u64) as usize;
    let kv_len: Vec<i32> = (0..batch).map(|b| if draw(b as u64, 7) == 0 { keys / 2 } else { keys } as i32).collect();
    let position = |i: usize| {
        let end = kv_len[i / queries] as usize;
        let place = if draw(1, 5) == 0 { draw(i as u64, keys + 9) } else { end.saturating_sub(queries) + i % queries };
        place as i32
    };
    let q_pos: Vec<i32> = (0..rows).map(position).collect();
    let all = || 0..rows;
    let mask: Option<Vec<i32>> = match draw(2, 3) {
        0 => None,
        1 => Some(all().map(|i| i32::from(i % queries >= 2)).collect()),
        _ => Some(all().map(|i| draw(i as u64, 3) as i32).collect()),
    };
    let mut q: Vec<I> = values(seed, rows * q_heads * d, spread);
    let mut k: Vec<I> = values(seed + 1, batch * keys * kv_heads * d, spread);
    let mut v: Vec<I> = values(seed + 2, batch * keys * kv_heads * e, spread);
    let mut out: Vec<I> = values(seed + 3, rows * q_heads * e, 2);
    let mut dout: Vec<I> = values(seed + 4, rows * q_heads * e, spread);
    for (i, values) in [&mut q, &mut k, &mut v, &mut dout].into_iter().enumerate() {
        let some: Vec<f32> = special.iter().copied().skip(i % 2).step_by(2).collect();
        if !values.is_empty() && draw(i as u64, 2) == 0 {
            strew(values, seed + i as u64, &some);
        }
    }
    let (wide_q, wide_k) = (widened(&q), widened(&k));
    let mut lse = Vec::new();
    for row in 0..rows * q_heads {
        let (token, head) = (row / q_heads, row % q_heads);
        let b = token / queries;
        let score = |j: usize| {
            let key = ((b * keys + j) * kv_heads + head / (q_heads / kv_heads)) * d;
            let s: f64 = (0..d).map(|i| f64::from(wide_q[row * d + i]) * f64::from(wide_k[key + i])).sum();
            shape.softcap.map_or(s * shape.scale, |cap| cap * (s * shape.scale / cap).tanh())
        };
        let scores: Vec<f64> = visible(shape, q_pos[token], kv_len[b]).into_iter().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lse.push((top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln()) as f32);
    }
    let nan = I::narrow(f32::NAN);
    for (b, &seen) in kv_len.iter().enumerate() {
        for key in (b * keys + seen as usize) * kv_heads..(b + 1) * keys * kv_heads {
            k[key * d..][..d].fill(nan);
            v[key * e..][..e].fill(nan);
        }
    }
    for token in (0..rows).filter(|&token| mask.as_ref().is_some_and(|mask| mask[token] == 0)) {
        let heads = token * q_heads..(token + 1) * q_heads;
        // Half of them: dq is there for those that are not.
        if draw(token as u64, 2) == 0 {
            q[heads.start * d..heads.end * d].fill(nan);
            dout[heads.start * e..heads.end * e].fill(nan);
            out[heads.start * e..heads.end * e].fill(nan);
            lse[heads].fill(f32::NAN);
        }
    }
    Given { q, k, v, out, lse, dout, q_pos, kv_len, mask }
}

fn run<I: Stored, O: Stored>(cpu: &Cpu, shape: &Attention, given: &Given<I>) -> Result<[Vec<u32>; 3], Error> {
    let rows = QueryRows { q_pos: &given.q_pos, kv_len: &given.kv_len, mask: given.mask.as_deref() };
    let qkv = Qkv { q: &given.q[..], k: &given.k, v: &given.v };
    let outputs = AttentionOutputs { out: &given.out[..], lse: &given.lse[..], dout: &given.dout };
    let [mut dq, mut dk, mut dv] = [&given.q, &given.k, &given.v].map(|x| vec![O::narrow(7.0); x.len()]);
    let gradients = QkvGradients { dq: &mut dq[..], dk: &mut dk, dv: &mut dv };
    attention_backward(cpu, shape, &rows, qkv, outputs, gradients)?;
    Ok([dq, dk, dv].map(|y| bits(&y)))
}

fn check<I: Stored, O: Stored>(shape: &Attention, spread: u32, seed: u64, special: &[f32]) {
    let given = given::<I>(shape, spread, seed, special);
    let expected = page(shape, &given).map(|sums| all_rounded::<O>(&sums));
    for cpu in cpus() {
        let held = |cpu: &Cpu| {
            let found = run::<I, O>(cpu, shape, &given)?;
            for ((name, found), expected) in ["dq", "dk", "dv"].iter().zip(&found).zip(&expected) {
                let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
                let differ = first.map(|i| (i, f32::from_bits(found[i]), f32::from_bits(expected[i])));
                assert_eq!(differ, None, "{name}: {cpu:?} {shape:?} seed {seed} {:?}", cpu.ledger().plans());
            }
            Ok(())
        };
        held(&cpu).unwrap();
        for tight in budgets(&cpu, seed, held) {
            held(&tight).unwrap();
            assert!(tight.ledger().plans().iter().all(|plan| plan.bytes <= tight.budget()));
        }
    }
}

fn shape([batch, queries, keys]: [usize; 3], heads: [usize; 2], [d, e]: [usize; 2], seed: u64) -> Attention {
    let draw = |i: u32, below: u64| seed.rotate_left(11 * i + 5) % below;
    Attention {
        value_dim: e,
        scale: [0.25, 1.0 / 3.0, 0.0][draw(0, 11) as usize / 5],
        causal: draw(1, 3) > 0,
        window: [None, Some(3), Some(300)][draw(2, 3) as usize],
        chunk: [None, Some(5), Some(260)][draw(5, 3) as usize],
        softcap: [None, None, Some(2.5)][draw(3, 3) as usize],
        tf32: if draw(4, 3) == 0 { Tf32::Enabled } else { Tf32::Disabled },
        ..Attention::causal([batch, queries, keys], [heads[0] * heads[1], heads[1]], d)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_gradient_of_attention_is_the_page(
        (batch, queries) in prop_oneof![(1usize..3, 1usize..20), (Just(1), 90usize..130)],
        keys in prop_oneof![1usize..50, 250usize..270, 500usize..530],
        heads in prop::sample::select(vec![[1usize, 1], [2, 1], [1, 2], [3, 2]]),
        d in prop_oneof![1usize..40, Just(64)],
        e in prop_oneof![1usize..40, Just(64)],
        special: bool,
        seed: u64,
    ) {
        let (shape, seed) = (shape([batch, queries, keys], heads, [d, e], seed), seed >> 3);
        let special = if special { &SPECIAL[..] } else { &[] };
        match seed % 3 {
            0 => check::<bf16, f32>(&shape, 2, seed, special),
            1 => check::<f32, bf16>(&shape, 2, seed, special),
            _ => check::<f16, f32>(&shape, 2, seed, special),
        }
    }
}

/// Products that underflow and overflow, rows and keys around the borders of tiles and blocks, and extents of 0.
#[test]
fn gradients_of_attention_at_the_ends_of_tiles_are_the_page() {
    for (i, (queries, keys)) in [(95, 255), (97, 257), (24, 33)].into_iter().enumerate() {
        check::<bf16, f32>(&shape([2, queries, keys], [2, 1], [16, 32], i as u64), 30, i as u64, &[]);
        check::<f32, f32>(
            &shape([1, queries, keys], [1, 2], [20, 3], !(i as u64)),
            20,
            i as u64,
            &[f32::NEG_INFINITY, 3e38],
        );
    }
    for [queries, keys, d, e] in [[0, 5, 4, 4], [5, 0, 4, 4], [5, 6, 0, 4], [5, 6, 4, 0], [5, 6, 0, 0]] {
        let shape = Attention { value_dim: e, scale: 0.5, ..Attention::causal([2, queries, keys], [2, 1], d) };
        check::<f32, f32>(&shape, 2, 1, &[]);
        check::<bf16, f32>(&shape, 2, 1, &[]);
    }
}

/// An operand that `VDPBF16PS` would flush leaves scores and products with dout to multiply-adds.
#[test]
fn what_would_be_flushed_is_left_to_multiply_adds() {
    let shape = Attention { value_dim: 3, ..Attention::causal([1, 3, 5], [2, 1], 5) };
    for small in 0..5 {
        let mut given = given::<bf16>(&shape, 2, 1, &[]);
        let operands = [&mut given.q, &mut given.k, &mut given.v, &mut given.dout];
        operands.into_iter().skip(small).take(1).for_each(|operand| operand[0] = bf16::from_bits(1));
        let expected = page(&shape, &given).map(|sums| all_rounded::<f32>(&sums));
        for cpu in cpus() {
            assert_eq!(run::<bf16, f32>(&cpu, &shape, &given).unwrap(), expected, "{cpu:?} {small}");
            assert_eq!(dots_ran(&cpu), small == 4 && cpu.isa().dots_pay(), "{cpu:?} {small}");
        }
    }
}
