//! The gradient of the weight of a product against the plainest loop of docs/NUMERICS.md: the same bits on every instruction
//! set, with every budget, in one call or in several, whatever padding holds.

use crate::page::{Stored, bits, budgets, cases, values, widened};
use crate::{cpus, dots_ran};
use proptest::prelude::*;
use samebits_ops::*;

/// `dw[n,k]` after some tokens, from `start`.
fn page<I: Stored>([n, k]: [usize; 2], mask: Option<&[i32]>, x: &[I], dy: &[I], start: &[f32]) -> Vec<u32> {
    let (x, dy, mut dw) = (widened(x), widened(dy), start.to_vec());
    for t in (0..x.len() / k).filter(|&t| mask.is_none_or(|mask| mask[t] != 0)) {
        for (i, dw) in dw.iter_mut().enumerate() {
            *dw = f32::narrow(dy[t * n + i / k].mul_add(x[t * k + i % k], *dw));
        }
    }
    bits(&dw)
}

/// A call by name, which goes on from its carry, or from +0, and not from what dw holds.
fn by_name<I: Stored>(
    cpu: &Cpu,
    [tokens, n, k]: [usize; 3],
    mask: Option<&[i32]>,
    [x, dy]: [&[I]; 2],
    start: Option<&[f32]>,
    expected: &[u32],
) {
    let mut inputs =
        vec![("x", TensorRef::new(x, &[tokens, k]).unwrap()), ("dy", TensorRef::new(dy, &[tokens, n]).unwrap())];
    inputs.extend(start.map(|start| ("carry", TensorRef::new(start, &[n, k]).unwrap())));
    inputs.extend(mask.map(|mask| ("mask", TensorRef::new(mask, &[tokens]).unwrap())));
    let mut dw = vec![7e7; n * k];
    let output = TensorMut::new(&mut dw, &[n, k]).unwrap();
    cpu.call("gemm_dw", Attributes::new(), &inputs, vec![("dw", output)]).unwrap();
    assert_eq!(bits(&dw), expected, "{cpu:?} by name");
}

/// `flags`: 1 for a mask, 2 for a start that is not 0, 4 for special values in one row of dw, 8 for a start that
/// `VDPBF16PS` would flush, 16 for a start of -0.
fn check<I: Stored>([tokens, n, k]: [usize; 3], spread: u32, seed: u64, flags: u32) {
    let (mut x, mut dy): (Vec<I>, Vec<I>) = (values(seed, tokens * k, spread), values(seed + 1, tokens * n, spread));
    let mask: Vec<i32> = values::<f32>(seed + 3, tokens, 1).iter().map(|v| i32::from(*v > -0.3) * 7).collect();
    if flags & 4 == 4 {
        dy[(tokens - 1) * n] = I::narrow([f32::NAN, f32::INFINITY, -0.0][seed as usize % 3]);
    }
    if flags & 1 == 1 {
        for t in (0..tokens).filter(|&t| mask[t] == 0) {
            x[t * k..][..k].fill(I::narrow(f32::NAN));
            dy[t * n..][..n].fill(I::narrow(f32::NAN));
        }
    }
    let mut start: Vec<f32> = match flags & 2 {
        2 => values(seed + 2, n * k, spread),
        _ => vec![if flags & 16 == 16 { -0.0 } else { 0.0 }; n * k],
    };
    if flags & 8 == 8 {
        start[seed as usize % (n * k)] = f32::from_bits(0x8000_0005);
    }
    let mask = (flags & 1 == 1).then_some(&mask[..]);
    let expected = page([n, k], mask, &x, &dy, &start);
    for cpu in cpus() {
        let run = |cpu: &Cpu, cuts: &[usize]| {
            let (mut dw, mut from) = (start.clone(), 0);
            for &to in cuts.iter().chain([&tokens]) {
                let (shape, mask) = (GemmDw::new(to - from, n, k), mask.map(|mask| &mask[from..to]));
                gemm_dw(cpu, &shape, mask, &x[from * k..to * k], &dy[from * n..to * n], &mut dw)?;
                from = to;
            }
            let what = format!("{} {cpu:?} {tokens}x{n}x{k} spread {spread} {flags} {cuts:?}", I::NAME);
            assert_eq!(bits(&dw), expected, "{what} {:?}", cpu.ledger().plans());
            Ok(())
        };
        run(&cpu, &[]).unwrap();
        run(&cpu, &[tokens / 3, tokens / 3 + 1]).unwrap();
        by_name(&cpu, [tokens, n, k], mask, [&x, &dy], Some(&start), &expected);
        for tight in budgets(&cpu, seed, |cpu| run(cpu, &[])) {
            run(&tight, &[]).unwrap();
            assert!(tight.ledger().plans().iter().all(|plan| plan.bytes <= tight.budget()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_gradient_of_a_weight_is_the_page(
        tokens in prop_oneof![4 => 1usize..40, 1 => 250usize..262],
        n in 1usize..40,
        k in 1usize..70,
        spread in prop::sample::select(vec![2u32, 30, 70]),
        seed: u64,
        flags in 0u32..32,
    ) {
        let seed = seed >> 2;
        check::<bf16>([tokens, n, k], spread, seed, flags);
        check::<f32>([tokens, n, k], spread, seed, flags);
        check::<f16>([tokens, n, k], spread.min(10), seed, flags);
    }
}

/// Several tiles to a task, several blocks of tokens, and panels that are laid out four at a time.
#[test]
fn gradients_of_many_rows_and_tokens_are_the_page() {
    check::<bf16>([600, 107, 170], 5, 1, 3);
    check::<bf16>([517, 200, 33], 30, 2, 2);
    check::<f32>([301, 98, 130], 30, 3, 7);
    // An odd token behind the first block of pairs.
    check::<bf16>([2051, 5, 7], 5, 4, 3);
}

/// What `VDPBF16PS` would flush is left to multiply-adds: a subnormal operand, products below 2^-126 at their last bit, and a
/// sum to go on from of which a normal product leaves something subnormal. One token, so that nothing hides it.
#[test]
fn what_would_be_flushed_is_left_to_multiply_adds() {
    let small = |exponent: i32| bf16::from_f32(2f32.powi(exponent));
    let above = f32::from_bits(2f32.powi(-104).to_bits() + 1);
    for (x, dy, start) in [
        (bf16::from_bits(1), bf16::from_f32(2f32.powi(100)), 0.0),
        (small(-60), -small(-60), 2f32.powi(-120) + 2f32.powi(-127)),
        (small(-52), -small(-52), above),
    ] {
        let expected = page([1, 1], None, &[x], &[dy], &[start]);
        for cpu in cpus() {
            let mut dw = [start];
            gemm_dw(&cpu, &GemmDw::new(1, 1, 1), None, &[x], &[dy], &mut dw).unwrap();
            assert_eq!(bits(&dw), expected, "{cpu:?} {x} {dy} {start}");
            assert!(!dots_ran(&cpu), "{cpu:?} {x} {dy} {start}");
        }
    }
    for cpu in cpus() {
        let one = [bf16::ONE];
        gemm_dw(&cpu, &GemmDw::new(1, 1, 1), None, &one, &one, &mut [1.0]).unwrap();
        assert_eq!(dots_ran(&cpu), cpu.isa().dots_pay(), "{cpu:?}");
    }
}

/// TF32 rounds x and dy, and not what the chain goes on from.
#[test]
fn tf32_is_for_both_operands() {
    let (tokens, n, k) = (20, 13, 35);
    let (x, dy): (Vec<f32>, Vec<f32>) = (values(1, tokens * k, 5), values(2, tokens * n, 5));
    let start: Vec<f32> = values(3, n * k, 5);
    let rounded = |x: &[f32]| x.iter().map(|v| f32::from_bits((v.to_bits() + 0x1000) & !0x1FFF)).collect::<Vec<_>>();
    let expected = page([n, k], None, &rounded(&x), &rounded(&dy), &start);
    for cpu in cpus() {
        let (shape, mut dw) = (GemmDw { tf32: Tf32::Enabled, ..GemmDw::new(tokens, n, k) }, start.clone());
        gemm_dw(&cpu, &shape, None, &x, &dy, &mut dw).unwrap();
        assert_eq!(bits(&dw), expected, "{cpu:?}");
    }
}

/// What is refused is refused before anything is written; without a token nothing is.
#[test]
fn refusals_write_nothing() {
    let cpu = Cpu::best();
    let (x, mut dw) = (vec![1f32; 6], vec![-0f32; 4]);
    let shape = GemmDw::new(3, 2, 2);
    let refused = |result: Result<(), Error>| result.unwrap_err().to_string();
    for (found, part) in [
        (refused(gemm_dw(&cpu, &shape, None, &x[..5], &x, &mut dw)), "`x` has 5 elements"),
        (refused(gemm_dw(&cpu, &shape, None, &x, &x[..4], &mut dw)), "`dy` has 4 elements"),
        (refused(gemm_dw(&cpu, &shape, Some(&[1]), &x, &x, &mut dw)), "`mask` has 1 elements; its shape [T] needs 3"),
        (refused(gemm_dw(&cpu, &shape, None, &x, &x, &mut dw[..3])), "`dw` has 3 elements; its shape [N,K] needs 4"),
    ] {
        assert!(found.contains(part), "{found}");
    }
    let small = Cpu::new(Isa::Scalar, 1, 64).unwrap();
    let Err(Error::Budget { smallest, .. }) = gemm_dw(&small, &shape, None, &x, &x, &mut dw) else { panic!("it fits") };
    assert!(smallest <= 2048, "{smallest}");
    let inputs = ["x", "dy"].map(|name| (name, TensorRef::new(&x, &[3, 2]).unwrap()));
    let by_name =
        small.call("gemm_dw", Attributes::new(), &inputs, vec![("dw", TensorMut::new(&mut dw, &[2, 2]).unwrap())]);
    assert!(matches!(by_name, Err(Error::Budget { .. })));
    gemm_dw(&cpu, &shape, Some(&[0; 3]), &[f32::NAN; 6], &[f32::NAN; 6], &mut dw).unwrap();
    assert_eq!(bits(&dw), bits(&[-0f32; 4]));
}

/// Tokens that count, some of them, and none.
#[test]
fn without_a_carry_sums_begin_with_zero() {
    let [tokens, n, k] = [6, 9, 40];
    let (x, dy): (Vec<bf16>, Vec<bf16>) = (values(1, tokens * k, 1), values(2, tokens * n, 1));
    for step in [1, 2, 7] {
        let mask: Vec<i32> = (1..=tokens as i32).map(|t| i32::from(t % step == 0)).collect();
        let expected = page([n, k], Some(&mask), &x, &dy, &vec![0.0; n * k]);
        cpus().iter().for_each(|cpu| by_name(cpu, [tokens, n, k], Some(&mask), [&x, &dy], None, &expected));
    }
}
