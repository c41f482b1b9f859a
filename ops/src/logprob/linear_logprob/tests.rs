//! One pass over a product against the product and `logprob` in a row, on every plan.

use super::{LinearLogprob, linear_logprob, linear_logprob_packed};
use crate::gemm::tests::{bits, number, on_every_plan, product};
use crate::{Counter, Cpu, Element, Error, Isa, Logprob, PackedWeight, logprob};
use half::bf16;

/// Hidden states, a weight, and a target for each row, some of them none.
struct Case<T> {
    shape: LinearLogprob,
    x: Vec<T>,
    w: Vec<T>,
    target: Vec<i32>,
}

impl<T: Element> Case<T> {
    /// Row r is `scale(r)` times as large as ordinary ones.
    fn new([rows, vocab, k]: [usize; 3], temperature: f64, scale: impl Fn(usize) -> f32) -> Case<T> {
        // The last of every k brings the sum near 1: its logarithm is small and shows every bit.
        let (last, whole) = (k - 1, -(vocab as f32).ln());
        let value = |i: usize| if i % k == last { whole } else { number(i).to_f32() };
        let x = (0..rows * k).map(|i| T::narrow(value(i) * scale(i / k))).collect();
        // The first weights ascend, so that logits may, or the other way round.
        let weight = |v: usize, i: usize| match i {
            0 => (v + 1) as f32 / vocab as f32,
            i if i == last => 1.0,
            i => number(rows * k + v * k + i).to_f32(),
        };
        let w = (0..vocab * k).map(|i| T::narrow(weight(i / k, i % k))).collect();
        let target = (0..rows).map(|r| (r * 37 % (vocab + 1)) as i32 - 1).collect();
        let mut shape = LinearLogprob::new(rows, vocab, k);
        if temperature != 1.0 {
            shape.temperature = temperature;
        }
        Case { shape, x, w, target }
    }

    /// Rows of NaN, of infinities of either sign, and of some that are far below the others.
    fn special(mut self) -> Case<T> {
        let k = self.shape.k;
        for (row, x) in self.x.chunks_mut(k).enumerate() {
            match row % 7 {
                1 => x[1] = T::narrow(f32::NAN),
                2 | 3 => {
                    x.fill(T::narrow(0.0));
                    x[0] = T::narrow(if row % 7 == 2 { f32::INFINITY } else { f32::NEG_INFINITY });
                }
                4 => x[0] = T::narrow(-3e38),
                6 => x[k - 1] = T::narrow(2e4 * row as f32),
                5 => x[1] = T::narrow(f32::INFINITY),
                _ => {}
            }
        }
        self
    }

    fn run(&self, cpu: &Cpu, packed: Option<&PackedWeight>, out: &mut [Vec<f32>; 2]) -> Result<(), Error> {
        let Case { shape, x, w, target } = self;
        let [logprob, lse] = out;
        match packed {
            None => linear_logprob(cpu, shape, x, w, target, logprob, lse),
            Some(packed) => linear_logprob_packed(cpu, shape, x, packed, target, logprob, lse),
        }
    }

    /// As it is, and packed by the scalar instruction set and by one that packs in fewer bits.
    fn packed(&self) -> Vec<Option<PackedWeight>> {
        let LinearLogprob { vocab, k, .. } = self.shape;
        let of = |isa| PackedWeight::pack(&Cpu::new(isa, 1, usize::MAX).unwrap(), vocab, k, &self.w).unwrap();
        [None, Some(Isa::Scalar)]
            .into_iter()
            .chain([Isa::of_machine().find(|isa| isa.has_dot())])
            .map(|isa| isa.map(of))
            .collect()
    }

    fn expected(&self) -> [Vec<u32>; 2] {
        let LinearLogprob { rows, vocab, k, temperature } = self.shape;
        let logits = product([rows, vocab, k], &self.x, &self.w);
        let mut out = [vec![0f32; rows], vec![0f32; rows]];
        let shape = Logprob { temperature, ..Logprob::new(rows, vocab) };
        let [logprobs, lse] = &mut out;
        logprob(&Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap(), &shape, &logits, &self.target, logprobs, lse).unwrap();
        out.map(|values| bits(&values))
    }

    fn check(&self) {
        let expected = self.expected();
        let mut out = [vec![0f32; self.shape.rows], vec![0f32; self.shape.rows]];
        for packed in self.packed() {
            for isa in Isa::of_machine() {
                for threads in [1, 3] {
                    on_every_plan(isa, threads, |cpu| {
                        out.iter_mut().for_each(|out| out.fill(7e7));
                        self.run(cpu, packed.as_ref(), &mut out)?;
                        let plan = &cpu.ledger().plans()[0];
                        assert_eq!(out.each_ref().map(|out| bits(out)), expected, "{isa} {:?} {plan}", self.shape);
                        Ok(())
                    });
                }
            }
        }
    }
}

/// The tiles of the last but one pass over a panel together where multiply-adds make them, and the last of them is not full; the
/// last size has more rows than are in hand at a time.
const SIZES: [[usize; 3]; 8] =
    [[1, 1, 3], [3, 33, 5], [20, 33, 5], [25, 300, 20], [7, 2049, 4], [1, 3, 8321], [58, 300, 70], [545, 33, 3]];

pub(crate) fn every_plan_is_gemm_and_logprob() {
    for size in SIZES {
        Case::<bf16>::new(size, 1.0, |_| 1.0).check();
        Case::<f32>::new(size, 0.7, |row| (1 << (row % 8)) as f32).check();
    }
}

pub(crate) fn rows_of_any_range_are_gemm_and_logprob() {
    for size in SIZES {
        Case::<bf16>::new(size, 0.7, |row| (1 << (row % 9)) as f32).check();
        Case::<bf16>::new(size, 1.0, |row| (1 << (row % 9)) as f32).special().check();
    }
}

/// Behind a logit whose exponent is infinite, one that is so itself.
pub(crate) fn infinite_logits_and_exponents_are_told_apart() {
    let mut w = vec![1.6f32; 40];
    w[39] = 2.0;
    let case = |x: [f32; 3]| Case {
        shape: LinearLogprob::new(3, 40, 1),
        x: x.to_vec(),
        w: w.clone(),
        target: vec![3, 39, -1],
    };
    case([2e38, 1.6e38, 2e38]).check();
    case([-2e38, -1.6e38, 1e30]).check();
}

/// Runs a case strictly and not: as many slow paths are counted as are refused.
fn check_slow_paths(case: &Case<bf16>, amount: impl Fn(Isa) -> usize) {
    let expected = case.expected();
    for (isa, packed) in Isa::of_machine().flat_map(|isa| case.packed().into_iter().map(move |packed| (isa, packed))) {
        let amount = amount(isa);
        let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
        let mut out = [vec![0f32; case.shape.rows], vec![0f32; case.shape.rows]];
        case.run(&cpu, packed.as_ref(), &mut out).unwrap();
        assert_eq!(out.each_ref().map(|out| bits(out)), expected, "{isa}");
        assert_eq!(cpu.ledger().count(Counter::SlowPaths), amount as u64, "{isa}");
        let strict = Cpu::new(isa, 2, usize::MAX).unwrap();
        strict.ledger().forbid(Counter::SlowPaths);
        out.iter_mut().for_each(|out| out.fill(7e7));
        match case.run(&strict, packed.as_ref(), &mut out) {
            Ok(()) => assert!(amount == 0 && out.each_ref().map(|out| bits(out)) == expected, "{isa}"),
            Err(Error::Forbidden { amount: found, .. }) => {
                assert!(found == amount && out.iter().flatten().all(|value| *value == 7e7), "{isa} {found}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn tiles_that_would_be_flushed_are_counted_and_refused() {
    let size = [36, 256, 20];
    check_slow_paths(&Case::new(size, 1.0, |_| 1.0), |_| 0);
    // Each of three tiles has such a row, and meets eight panels.
    let small = Case::new(size, 1.0, |row| if row % 10 == 7 { 2f32.powi(-120) } else { 1.0 });
    check_slow_paths(&small, |isa| if isa.dots_pay() { 24 } else { 0 });
}

/// Rows of 8 segments of 32 logits; exponents are 0, -20, 100, 288 and what is between.
pub(crate) fn rows_that_are_summed_twice_are_counted_and_refused() {
    let low = |v: usize| if v.is_multiple_of(2) { 0.0 } else { -14.0 };
    let logits: [(&dyn Fn(usize) -> f32, usize); 7] = [
        // Some fall below the cut of the row that were above it before, with others of their segment that do not.
        (&|v| 200.0 * (v + 1) as f32 / 256.0, 1),
        (&|v| -300.0 - 200.0 * (v + 1) as f32 / 256.0, 1),
        // A segment is on the cut, and one logit in two below it; the same within a segment.
        (&|v| if v < 32 { low(v) } else { 69.5 }, 1),
        (&|v| if v % 32 < 16 { low(v) } else { 69.5 }, 1),
        // On the cut is above it.
        (&|v| if v.is_multiple_of(2) { 0.0 } else { 69.5 }, 0),
        // All of a segment is below the cut, or all that came before.
        (&|v| if v < 128 { 0.0 } else { 200.0 }, 0),
        (&|v| if v % 32 < 16 { 0.0 } else { 200.0 }, 0),
    ];
    for (logit, amount) in logits {
        let w = (0..2 * 256).map(|i| bf16::from_f32(if i % 2 == 0 { logit(i / 2) } else { 0.0 })).collect();
        let x = vec![bf16::ONE, bf16::ZERO];
        check_slow_paths(&Case { shape: LinearLogprob::new(1, 256, 2), x, w, target: vec![3] }, |_| amount);
    }
}

/// A segment that begins within a panel, and weighs so much more than the others that its sum shows every bit.
pub(crate) fn lanes_are_those_of_the_segment() {
    let (rows, vocab) = (64, 8 * 272);
    let shape = LinearLogprob::new(rows, vocab, 2);
    let x = (0..2 * rows).map(|i| if i % 2 == 0 { 1.0 + (i / 2) as f32 / 64.0 } else { 1.0f32 }).collect();
    let level = |v: usize| if v / 272 == 1 { -(272f32.ln()) } else { -50.0 };
    let w = (0..2 * vocab).map(|i| if i % 2 == 0 { number(i).to_f32() } else { level(i / 2) }).collect();
    let case = Case { shape, x, w, target: vec![-1; rows] };
    let expected = case.expected();
    for isa in Isa::of_machine() {
        let mut out = [vec![0f32; rows], vec![0f32; rows]];
        case.run(&Cpu::new(isa, 1, usize::MAX).unwrap(), None, &mut out).unwrap();
        assert_eq!(out.each_ref().map(|out| bits(out)), expected, "{isa}");
    }
}
