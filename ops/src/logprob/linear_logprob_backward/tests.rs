//! Tiles of the vocabulary against the four ops in a row, on every plan.

use super::*;
use crate::gemm::tests::{bits, number, on_every_plan, product};
use crate::{Attributes, Backend, GemmDx, Isa, Logprob, TensorMut, gemm_dw, gemm_dx, logprob, logprob_backward};
use half::{bf16, f16};

/// Hidden states, a weight, and what is given of each row: targets, some of them none, gradients, and some rows padding.
struct Case<T> {
    shape: LinearLogprob,
    x: Vec<T>,
    w: Vec<T>,
    target: Vec<i32>,
    lse: Vec<f32>,
    dlogprob: Vec<f32>,
    dlse: Option<Vec<f32>>,
    mask: Option<Vec<i32>>,
    carry: Vec<f32>,
}

impl<T: Element> Case<T> {
    /// The larger, the more a logit's share is of its row.
    fn new([rows, vocab, k]: [usize; 3], temperature: f64, size: f32) -> Case<T> {
        let values =
            |from: usize, len: usize| (from..from + len).map(|i| T::narrow(number(i).to_f32() * size)).collect();
        let wide = |from: usize, len: usize| (from..from + len).map(|i| number(i).to_f32()).collect::<Vec<f32>>();
        let (x, w): (Vec<T>, Vec<T>) = (values(0, rows * k), values(rows * k, vocab * k));
        let target: Vec<i32> = (0..rows).map(|r| (r * 37 % (vocab + 1)) as i32 - 1).collect();
        let logits = product([rows, vocab, k], &x, &w);
        let (mut logp, mut lse) = (vec![0f32; rows], vec![0f32; rows]);
        let of_rows = Logprob { temperature, ..Logprob::new(rows, vocab) };
        logprob(&scalar(), &of_rows, &logits, &target, &mut logp, &mut lse).unwrap();
        let shape = LinearLogprob { temperature, ..LinearLogprob::new(rows, vocab, k) };
        let (dlse, mask) = (Some(wide(7, rows)), Some((0..rows as i32).map(|r| r % 3).collect()));
        let (dlogprob, carry) = (wide(3, rows), wide(11, vocab * k));
        let mut case = Case { shape, x, w, target, lse, dlogprob, dlse, mask, carry };
        if rows % 2 == 1 {
            (case.dlse, case.mask) = (None, None);
        }
        case
    }

    /// dx and dw of the ops in a row.
    fn expected<O: Element>(&self) -> [Vec<u32>; 2] {
        let LinearLogprob { rows, vocab, k, temperature } = self.shape;
        let logits = product([rows, vocab, k], &self.x, &self.w);
        let mut dz = vec![T::default(); rows * vocab];
        let of_rows = Logprob { temperature, ..Logprob::new(rows, vocab) };
        let gradients = LogprobGradients { dlogprob: &self.dlogprob, dlse: self.dlse.as_deref() };
        logprob_backward(&scalar(), &of_rows, &logits, &self.target, &self.lse, gradients, &mut dz).unwrap();
        let (mut dx, mut dw) = (vec![O::default(); rows * k], self.carry.clone());
        gemm_dx(&scalar(), &GemmDx::new(rows, vocab, k), &dz, &self.w, &mut dx).unwrap();
        gemm_dw(&scalar(), &GemmDw::new(rows, vocab, k), self.mask.as_deref(), &self.x, &dz, &mut dw).unwrap();
        [bits(&dx), bits(&dw)]
    }

    fn run<O: Element>(
        &self,
        cpu: &Cpu,
        packed: Option<&PackedWeight>,
        dx: &mut [O],
        dw: &mut [f32],
    ) -> Result<(), Error> {
        let LinearLogprob { rows, k, .. } = self.shape;
        if let Some(packed) = packed {
            let carry = Some(&self.carry[..]);
            return self.by_name(cpu, TensorRef::of(&self.x, &[rows, k]), TensorRef::packed(packed), carry, dx, dw);
        }
        dw.copy_from_slice(&self.carry);
        let gradients = LogprobGradients { dlogprob: &self.dlogprob, dlse: self.dlse.as_deref() };
        let given = LogprobRows { target: &self.target, lse: &self.lse, gradients, mask: self.mask.as_deref() };
        linear_logprob_backward(cpu, &self.shape, &self.x, &self.w, &given, dx, dw)
    }

    /// By name, from `carry` or +0; what `dw` holds before is not read.
    fn by_name<O: Element>(
        &self,
        cpu: &Cpu,
        x: TensorRef,
        w: TensorRef,
        carry: Option<&[f32]>,
        dx: &mut [O],
        dw: &mut [f32],
    ) -> Result<(), Error> {
        let LinearLogprob { rows, vocab, k, temperature } = self.shape;
        dw.fill(7e7);
        let per_row = |values| TensorRef::of::<f32>(values, &[rows]);
        let target = TensorRef::of(&self.target, &[rows]);
        let mut inputs = vec![("x", x), ("w", w), ("target", target), ("lse", per_row(&self.lse))];
        inputs.extend(carry.map(|carry| ("carry", TensorRef::of(carry, &[vocab, k]))));
        inputs.push(("dlogprob", per_row(&self.dlogprob)));
        inputs.extend(self.dlse.as_ref().map(|dlse| ("dlse", per_row(dlse))));
        inputs.extend(self.mask.as_ref().map(|mask| ("mask", TensorRef::of(mask, &[rows]))));
        let outputs = vec![("dx", TensorMut::new(dx, &[rows, k])?), ("dw", TensorMut::new(dw, &[vocab, k])?)];
        cpu.call(NAME, Attributes::new().with("temperature", temperature), &inputs, outputs)
    }

    /// None, and packed by the scalar instruction set and by one that packs in fewer bits.
    fn packed(&self) -> Vec<Option<PackedWeight>> {
        let LinearLogprob { vocab, k, .. } = self.shape;
        let cpu = |isa| Cpu::new(isa, 1, usize::MAX).unwrap();
        let by = |isa| PackedWeight::pack(&cpu(isa), vocab, k, &self.w).unwrap();
        let coded = Isa::of_machine().find(|isa| isa.has_dot()).map(by);
        [None, Some(by(Isa::Scalar))].into_iter().chain(coded.map(Some)).collect()
    }

    fn check<O: Element>(&self) {
        let LinearLogprob { rows, vocab, k, .. } = self.shape;
        let expected = self.expected::<O>();
        let (mut dx, mut dw) = (vec![O::default(); rows * k], vec![0f32; vocab * k]);
        for packed in self.packed() {
            for isa in Isa::of_machine() {
                for threads in [1, 3] {
                    on_every_plan(isa, threads, |cpu| {
                        dx.fill(O::narrow(7e7));
                        self.run(cpu, packed.as_ref(), &mut dx, &mut dw)?;
                        let plan = &cpu.ledger().plans()[0];
                        let same = [bits(&dx), bits(&dw)] == expected;
                        assert!(same, "{isa} {:?} {:?} {plan}", self.shape, packed.as_ref().map(|w| w.bytes()));
                        Ok(())
                    });
                }
            }
        }
    }
}

fn scalar() -> Cpu {
    Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap()
}

/// Rows that fill tiles and that do not, vocabularies of fewer than eight segments, segments that begin within a panel, more
/// rows and columns than are in hand at a time.
const SIZES: [[usize; 3]; 8] =
    [[1, 1, 3], [4, 40, 1], [3, 33, 5], [20, 33, 6], [13, 300, 34], [7, 2049, 4], [1, 17, 515], [515, 40, 3]];

pub(crate) fn every_plan_is_the_ops_in_a_row() {
    for size in SIZES {
        Case::<bf16>::new(size, 1.0, 1.0).check::<f32>();
        Case::<bf16>::new(size, 0.7, 4.0).check::<bf16>();
    }
    Case::<f16>::new([14, 70, 9], 1.3, 1.0).check::<f16>();
    Case::<f16>::new([5, 300, 8], 1.0, 1.0).check::<f32>();
    Case::<f32>::new([26, 140, 21], 0.7, 2.0).check::<f32>();
    Case::<f32>::new([3, 40, 33], 1.0, 1.0).check::<bf16>();
}

/// Two rows of a wide vocabulary, whose segments are several tiles of the largest plan.
pub(crate) fn chains_go_on_from_tile_to_tile() {
    let case = Case::<bf16>::new([2, 8 * 1200, 3], 1.0, 1.0);
    let expected = case.expected::<f32>();
    for isa in Isa::of_machine() {
        let (mut dx, mut dw) = (vec![7e7f32; 6], vec![0f32; 8 * 1200 * 3]);
        case.run(&Cpu::new(isa, 2, usize::MAX).unwrap(), None, &mut dx, &mut dw).unwrap();
        assert_eq!([bits(&dx), bits(&dw)], expected, "{isa}");
    }
}

/// NaN, infinities and rows that are no tokens: dw has nothing of what padding holds.
pub(crate) fn special_values_go_where_the_ops_bring_them() {
    let mut case = Case::<bf16>::new([20, 70, 6], 1.0, 1.0);
    for (row, value) in [(0, f32::NAN), (3, f32::INFINITY), (6, f32::NAN), (4, f32::NEG_INFINITY), (7, 3e38)] {
        case.x[row * 6] = bf16::from_f32(value);
    }
    (case.lse[8], case.dlogprob[10], case.carry[5]) = (f32::NEG_INFINITY, f32::INFINITY, -0.0);
    case.w[13] = bf16::NEG_INFINITY;
    case.check::<f32>();
    // Only padding: dw is what it goes on from.
    case.mask = Some(vec![0; 20]);
    case.check::<bf16>();
}

/// Tiles stand among others whose sums would be flushed: what one of dw goes on from is subnormal and meets zeros of x alone, and
/// one of w makes a subnormal sum of dx, to which the others of its segment add zeros.
pub(crate) fn pairs_are_taken_tile_by_tile() {
    let (k, carried, made) = (34, 3, 7);
    let mut case = Case::<bf16>::new([20, 8 * 80, k], 1.0, 1.0);
    case.x.chunks_mut(k).for_each(|row| row[carried] = bf16::ZERO);
    case.w.chunks_mut(k).for_each(|row| row[made] = bf16::ZERO);
    case.check::<f32>();
    case.carry[100 * k + carried] = f32::from_bits(5);
    case.w[180 * k + made] = bf16::from_f32(2f32.powi(-120));
    case.check::<f32>();
}

/// Tiles that leave `VDPBF16PS` are counted, and refused before anything is written.
pub(crate) fn tiles_that_would_be_flushed_are_counted_and_refused() {
    let mut case = Case::<bf16>::new([5, 70, 6], 1.0, 1.0);
    case.x[7] = bf16::from_f32(2f32.powi(-120));
    let expected = case.expected::<f32>();
    for isa in Isa::of_machine() {
        for packed in case.packed() {
            let (mut dx, mut dw) = (vec![7e7f32; 30], vec![0f32; 420]);
            let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
            case.run(&cpu, packed.as_ref(), &mut dx, &mut dw).unwrap();
            assert_eq!([bits(&dx), bits(&dw)], expected, "{isa}");
            // Five segments have columns, one panel each.
            let count = cpu.ledger().count(Counter::SlowPaths);
            assert_eq!(count, if isa.has_dot() { 5 } else { 0 }, "{isa}");
            let strict = Cpu::new(isa, 2, usize::MAX).unwrap();
            strict.ledger().forbid(Counter::SlowPaths);
            dx.fill(7e7);
            match case.run(&strict, packed.as_ref(), &mut dx, &mut dw) {
                Ok(()) => assert_eq!((count, bits(&dx)), (0, expected[0].clone()), "{isa}"),
                Err(Error::Forbidden { amount, .. }) => {
                    assert_eq!(amount as u64, count);
                    let start = if packed.is_some() { vec![7e7; 420] } else { case.carry.clone() };
                    assert!(dx.iter().all(|dx| *dx == 7e7) && bits(&dw) == bits(&start), "{isa}");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// On every plan as many as without a limit on them, and nothing is written.
pub(crate) fn tiles_that_would_be_flushed_are_counted_on_every_plan() {
    let mut case = Case::<bf16>::new([20, 70, 6], 1.0, 1.0);
    case.x[7] = bf16::from_f32(2f32.powi(-120));
    for isa in Isa::of_machine().filter(|isa| isa.has_dot()) {
        on_every_plan(isa, 2, |cpu| {
            let (mut dx, mut dw) = (vec![7e7f32; 120], vec![0f32; 420]);
            cpu.ledger().forbid(Counter::SlowPaths);
            let refused = case.run(cpu, None, &mut dx, &mut dw).expect_err("some would be");
            let Error::Forbidden { amount, .. } = refused else { return Err(refused) };
            assert!(dx.iter().all(|dx| *dx == 7e7) && bits(&dw) == bits(&case.carry), "{isa}");
            let free = Cpu::new(isa, 2, cpu.budget()).unwrap();
            case.run(&free, None, &mut dx, &mut dw)?;
            assert_eq!(amount as u64, free.ledger().count(Counter::SlowPaths), "{isa} {:?}", free.ledger().plans());
            Ok(())
        });
    }
}

/// Views whose rows have others between them.
pub(crate) fn rows_may_stand_apart() {
    for size in [[20, 33, 6], [13, 300, 34]] {
        let case = Case::<bf16>::new(size, 0.7, 1.0);
        let [rows, vocab, k] = size;
        let apart = |values: &[bf16]| -> Vec<bf16> {
            values.chunks(k).flat_map(|row| row.iter().copied().chain([bf16::NAN; 3])).collect()
        };
        let (x, w, expected) = (apart(&case.x), apart(&case.w), case.expected::<f32>());
        let (mut dx, mut dw) = (vec![0f32; rows * k], vec![0f32; vocab * k]);
        for isa in Isa::of_machine() {
            on_every_plan(isa, 2, |cpu| {
                dx.fill(7e7);
                let [x, w] = [(&x, rows), (&w, vocab)].map(|(v, n)| TensorRef::strided(v, &[n, k], &[k + 3, 1]));
                case.by_name(cpu, x?, w?, Some(&case.carry), &mut dx, &mut dw)?;
                assert_eq!([bits(&dx), bits(&dw)], expected, "{isa}");
                Ok(())
            });
        }
    }
}

pub(crate) fn a_weight_may_be_packed_beforehand() {
    let case = Case::<bf16>::new([20, 33, 6], 1.0, 1.0);
    let packed = PackedWeight::pack(&scalar(), 33, 6, &case.w).unwrap();
    let (mut dx, mut dw) = (vec![7e7f32; 120], case.carry.clone());
    let gradients = LogprobGradients { dlogprob: &case.dlogprob, dlse: case.dlse.as_deref() };
    let given = LogprobRows { target: &case.target, lse: &case.lse, gradients, mask: case.mask.as_deref() };
    linear_logprob_backward_packed(&scalar(), &case.shape, &case.x, &packed, &given, &mut dx, &mut dw).unwrap();
    assert_eq!([bits(&dx), bits(&dw)], case.expected::<f32>());
    // A weight of another shape, of another type, or for another op.
    let narrower = PackedWeight::pack(&scalar(), 33, 5, &case.w[..165]).unwrap();
    let wide = PackedWeight::pack(&scalar(), 33, 6, &[1f32; 198]).unwrap();
    let for_dx = PackedWeight::pack_for_dx(&scalar(), 33, 6, &case.w).unwrap();
    let others =
        [(narrower, "w is [33, 5]; it must be [33, 6]"), (wide, "packed from fp32"), (for_dx, "packed for another op")];
    for (packed, why) in others {
        let refused =
            linear_logprob_backward_packed(&scalar(), &case.shape, &case.x, &packed, &given, &mut dx, &mut dw);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

pub(crate) fn nothing_has_a_gradient_too() {
    // By name dw is what it goes on from.
    let (case, mut dw) = (Case::<f32>::new([0, 3, 2], 1.0, 1.0), [0f32; 6]);
    let (x, w) = (TensorRef::of(&case.x, &[0, 2]), TensorRef::of(&case.w, &[3, 2]));
    case.by_name::<f32>(&scalar(), x, w, Some(&case.carry), &mut [], &mut dw).unwrap();
    assert_eq!(bits(&dw), bits(&case.carry));
    case.by_name::<f32>(&scalar(), x, w, None, &mut [], &mut dw).unwrap();
    assert_eq!(bits(&dw), bits(&[0f32; 6]));
    for [rows, vocab, k] in [[0, 3, 2], [3, 0, 2], [3, 2, 0]] {
        let cpu = scalar();
        let (x, w) = (vec![1f32; rows * k], vec![1f32; vocab * k]);
        let (mut dx, mut dw) = (vec![9f32; rows * k], vec![3f32; vocab * k]);
        let (target, lse) = (vec![-1; rows], vec![0f32; rows]);
        let gradients = LogprobGradients { dlogprob: &lse, dlse: None };
        let given = LogprobRows { target: &target, lse: &lse, gradients, mask: None };
        linear_logprob_backward(&cpu, &LinearLogprob::new(rows, vocab, k), &x, &w, &given, &mut dx, &mut dw).unwrap();
        assert!(dx.iter().all(|dx| dx.to_bits() == 0) && dw.iter().all(|dw| *dw == 3.0), "{rows} {vocab} {k}");
    }
}

/// Rows that count, some of them, and none.
pub(crate) fn without_a_carry_sums_begin_with_zero() {
    for step in [1, 2, 7] {
        let [rows, vocab, k] = [6, 70, 5];
        let mut case = Case::<bf16>::new([rows, vocab, k], 1.0, 1.0);
        case.mask = Some((1..=rows as i32).map(|r| i32::from(r % step == 0)).collect());
        case.carry.fill(0.0);
        let expected = case.expected::<bf16>();
        let (x, w) = (TensorRef::of(&case.x, &[rows, k]), TensorRef::of(&case.w, &[vocab, k]));
        for isa in Isa::of_machine() {
            on_every_plan(isa, 2, |cpu| {
                let (mut dx, mut dw) = (vec![bf16::ZERO; rows * k], vec![0f32; vocab * k]);
                case.by_name(cpu, x, w, None, &mut dx, &mut dw)?;
                assert_eq!([bits(&dx), bits(&dw)], expected, "{isa}, one of {step} rows");
                Ok(())
            });
        }
    }
}
