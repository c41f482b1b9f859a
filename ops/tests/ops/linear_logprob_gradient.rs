//! The gradients of log-probabilities from hidden states against the plainest loops of docs/NUMERICS.md, one op behind the
//! other: the same bits on every instruction set, with every budget, packed or not, in one call or in several.

use crate::cpus;
use crate::page::{
    SPECIAL, Stored, all_rounded, bits, budgets, cases, gemm_page, join, logprob_backward_page, logprob_page, segment,
    strew, values, widened,
};
use proptest::prelude::*;
use samebits_ops::*;

/// A call: extents, x, w, what belongs to each row, and where dw begins.
struct Given<I> {
    shape: LinearLogprob,
    x: Vec<I>,
    w: Vec<I>,
    target: Vec<i32>,
    lse: Vec<f32>,
    dlogprob: Vec<f32>,
    dlse: Option<Vec<f32>>,
    mask: Option<Vec<i32>>,
    start: Vec<f32>,
}

impl<I: Stored> Given<I> {
    fn new([rows, vocab, k]: [usize; 3], spread: u32, seed: u64, special: &[f32]) -> Given<I> {
        let (mut x, mut w): (Vec<I>, Vec<I>) = (values(seed, rows * k, spread), values(seed + 1, vocab * k, spread));
        let temperature = [1.0, 0.7, 1.3][seed as usize % 3];
        let target: Vec<i32> =
            (0..rows).map(|r| (seed.rotate_left(r as u32) % (vocab as u64 + 1)) as i32 - 1).collect();
        let [_, mut lse] = logprob_page(vocab, temperature, &gemm_page(rows, vocab, k, &x, &w, None), &target);
        let (mut dlogprob, mut dlse): (Vec<f32>, Vec<f32>) = (values(seed + 2, rows, 5), values(seed + 3, rows, 5));
        for (i, &v) in special.iter().enumerate() {
            match i {
                0 => strew(&mut x, seed, &[v]),
                1 => strew(&mut dlogprob, seed, &[v]),
                2 => strew(&mut lse, seed, &[v]),
                3 => strew(&mut w, seed, &[v]),
                _ => strew(&mut dlse, seed, &[v]),
            }
        }
        let mask: Vec<i32> = values::<f32>(seed + 4, rows, 1).iter().map(|v| i32::from(*v > -0.3) * 7).collect();
        let shape = LinearLogprob { rows, vocab, k, temperature };
        let (dlse, mask) = (seed.is_multiple_of(2).then_some(dlse), (seed % 5 > 1).then_some(mask));
        Given { shape, x, w, target, lse, dlogprob, dlse, mask, start: values(seed + 5, vocab * k, spread) }
    }

    /// dx before the last rounding, and dw.
    fn page(&self) -> [Vec<f32>; 2] {
        let LinearLogprob { rows, vocab, k, temperature } = self.shape;
        let logits = gemm_page(rows, vocab, k, &self.x, &self.w, None);
        let dz: Vec<f32> = logits
            .chunks(vocab)
            .enumerate()
            .flat_map(|(r, z)| {
                let gradients = [self.dlogprob[r], self.dlse.as_ref().map_or(0.0, |dlse| dlse[r])];
                let row = logprob_backward_page(z, self.target[r], self.lse[r], gradients, temperature);
                widened(&row.into_iter().map(I::narrow).collect::<Vec<_>>())
            })
            .collect();
        let (x, w) = (widened(&self.x), widened(&self.w));
        let dx = (0..rows * k).map(|at| {
            let chain = |acc: f32, j: usize| dz[at / k * vocab + j].mul_add(w[j * k + at % k], acc);
            join(std::array::from_fn(|i| segment(vocab, i).fold(0.0, chain)))
        });
        let tokens = |t: &usize| self.mask.as_ref().is_none_or(|mask| mask[*t] != 0);
        let dw = (0..vocab * k).map(|at| {
            let chain = |acc: f32, t: usize| dz[t * vocab + at / k].mul_add(x[t * k + at % k], acc);
            (0..rows).filter(tokens).fold(self.start[at], chain)
        });
        [dx.collect(), dw.collect()]
    }

    /// Some rows of the call, which go on from what dw holds.
    fn run<O: Stored>(
        &self,
        cpu: &Cpu,
        rows: std::ops::Range<usize>,
        dx: &mut [O],
        dw: &mut [f32],
    ) -> Result<(), Error> {
        let (k, part) = (self.shape.k, rows.clone());
        let dlse = self.dlse.as_ref().map(|dlse| &dlse[part.clone()]);
        let gradients = LogprobGradients { dlogprob: &self.dlogprob[part.clone()], dlse };
        let mask = self.mask.as_ref().map(|mask| &mask[part.clone()]);
        let of_rows = LogprobRows { target: &self.target[part.clone()], lse: &self.lse[part], gradients, mask };
        let shape = LinearLogprob { rows: rows.len(), ..self.shape };
        linear_logprob_backward(cpu, &shape, &self.x[rows.start * k..rows.end * k], &self.w, &of_rows, dx, dw)
    }

    /// By name, from its carry, with a weight packed by this cpu.
    fn by_name<O: Stored>(&self, cpu: &Cpu, dx: &mut [O], dw: &mut [f32]) -> Result<(), Error> {
        let LinearLogprob { rows, vocab, k, temperature } = self.shape;
        let packed = PackedWeight::pack(cpu, vocab, k, &self.w)?;
        let mut inputs = vec![
            ("x", TensorRef::new(&self.x, &[rows, k])?),
            ("w", TensorRef::packed(&packed)),
            ("target", TensorRef::new(&self.target, &[rows])?),
            ("lse", TensorRef::new(&self.lse, &[rows])?),
            ("dlogprob", TensorRef::new(&self.dlogprob, &[rows])?),
            ("carry", TensorRef::new(&self.start, &[vocab, k])?),
        ];
        if let Some(dlse) = &self.dlse {
            inputs.push(("dlse", TensorRef::new(dlse, &[rows])?));
        }
        if let Some(mask) = &self.mask {
            inputs.push(("mask", TensorRef::new(mask, &[rows])?));
        }
        let outputs = vec![("dx", TensorMut::new(dx, &[rows, k])?), ("dw", TensorMut::new(dw, &[vocab, k])?)];
        cpu.call("linear_logprob_backward", Attributes::new().with("temperature", temperature), &inputs, outputs)
    }
}

fn check<I: Stored, O: Stored>(size: [usize; 3], spread: u32, seed: u64, special: &[f32]) {
    let given = Given::<I>::new(size, spread, seed, special);
    let [rows, vocab, k] = size;
    let [dx, dw] = given.page();
    let expected = [all_rounded::<O>(&dx), all_rounded::<f32>(&dw)];
    for cpu in cpus() {
        let (mut dx, mut dw) = (vec![O::narrow(7e7); rows * k], vec![0f32; vocab * k]);
        let what = format!("{cpu:?} {size:?} {} to {}", I::NAME, O::NAME);
        let mut all = budgets(&cpu, seed, |cpu| given.run(cpu, 0..rows, &mut dx, &mut dw));
        all.push(cpu.clone());
        for cpu in all {
            dx.fill(O::narrow(7e7));
            dw.copy_from_slice(&given.start);
            given.run(&cpu, 0..rows, &mut dx, &mut dw).unwrap();
            assert_eq!([bits(&dx), bits(&dw)], expected, "{what} {:?}", cpu.ledger().plans());
            assert!(cpu.ledger().plans().iter().all(|plan| plan.bytes <= cpu.budget()));
        }
        dw.copy_from_slice(&given.start);
        let cut = seed as usize % (rows + 1);
        given.run(&cpu, 0..cut, &mut dx[..cut * k], &mut dw).unwrap();
        given.run(&cpu, cut..rows, &mut dx[cut * k..], &mut dw).unwrap();
        assert_eq!([bits(&dx), bits(&dw)], expected, "{what} cut at {cut}");
        dx.fill(O::narrow(7e7));
        dw.fill(7e7);
        given.by_name(&cpu, &mut dx, &mut dw).unwrap();
        assert_eq!([bits(&dx), bits(&dw)], expected, "{what} by name");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_gradients_of_linear_logprob_are_the_page(
        rows in 1usize..40,
        vocab in prop_oneof![3 => 1usize..300, 1 => 1usize..1500],
        k in 1usize..70,
        spread in prop::sample::select(vec![1u32, 3, 30]),
        seed: u64,
        special in prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), 0..5),
    ) {
        let (seed, size) = (seed >> 3, [rows, vocab, k]);
        check::<bf16, f32>(size, spread, seed, &special);
        check::<f32, bf16>(size, spread, seed, &special);
        check::<bf16, bf16>([rows.min(3), vocab, k], spread, seed, &special);
        check::<f16, f32>([rows.min(5), vocab.min(200), k], spread.min(3), seed, &special);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let shape = LinearLogprob::new(2, 3, 2);
    let (x, w, lse) = ([1f32; 4], [1f32; 6], [0f32; 2]);
    let rows = LogprobRows {
        target: &[0, 2],
        lse: &lse,
        gradients: LogprobGradients { dlogprob: &lse, dlse: None },
        mask: None,
    };
    let (mut dx, mut dw) = ([7f32; 4], [7f32; 6]);
    let short = LogprobGradients { dlogprob: &lse[..1], dlse: None };
    let short_dlse = LogprobGradients { dlse: Some(&lse[..1]), ..rows.gradients };
    let cold = LinearLogprob { temperature: 0.0, ..shape };
    let mut refused = |shape: &LinearLogprob, x: &[f32], w: &[f32], rows: &LogprobRows, why: &str| {
        let found = linear_logprob_backward(&cpu, shape, x, w, rows, &mut dx, &mut dw).unwrap_err().to_string();
        assert!(found.contains(why), "{found}");
    };
    refused(&shape, &x[..3], &w, &rows, "`x` has 3 elements; its shape [M,K] needs 4");
    refused(&shape, &x, &w[..5], &rows, "`w` has 5 elements; its shape [V,K] needs 6");
    refused(&shape, &x, &w, &LogprobRows { target: &[0], ..rows }, "`target` has 1 elements; its shape [M] needs 2");
    refused(&shape, &x, &w, &LogprobRows { target: &[0, 3], ..rows }, "target[1] is 3; the vocabulary has 3");
    refused(&shape, &x, &w, &LogprobRows { lse: &[], ..rows }, "`lse` has 0 elements");
    refused(&shape, &x, &w, &LogprobRows { gradients: short, ..rows }, "`dlogprob` has 1 elements");
    refused(&shape, &x, &w, &LogprobRows { gradients: short_dlse, ..rows }, "`dlse` has 1 elements");
    refused(&shape, &x, &w, &LogprobRows { mask: Some(&[1; 3]), ..rows }, "`mask` has 3 elements");
    refused(&cold, &x, &w, &rows, "temperature is 0");
    let (mut few, mut none) = ([7f32; 3], [7f32; 6]);
    let short_dx = linear_logprob_backward(&cpu, &shape, &x, &w, &rows, &mut few, &mut none).unwrap_err().to_string();
    assert!(short_dx.contains("`dx` has 3 elements"), "{short_dx}");
    let small = Cpu::new(Isa::Scalar, 1, 64).unwrap();
    let error = linear_logprob_backward(&small, &shape, &x, &w, &rows, &mut dx, &mut dw).unwrap_err();
    assert!(matches!(error, Error::Budget { .. }), "{error}");
    assert_eq!((dx, dw, none), ([7.0; 4], [7.0; 6], [7.0; 6]));
    let error = linear_logprob_backward(&cpu, &shape, &x, &w, &rows, &mut dx, &mut few).unwrap_err().to_string();
    assert!(error.contains("`dw` has 3 elements"), "{error}");
}
