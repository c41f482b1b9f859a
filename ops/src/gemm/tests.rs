//! Products against plain chains on every plan: nothing that decides how one is cut moves a bit.

use super::gemm::{gemm, gemm_packed, prepare};
use super::gemm_dw::{GemmDw, gemm_dw};
use super::gemm_dx::{GemmDx, gemm_dx, gemm_dx_packed};
use super::packed::PackedWeight;
use crate::call::Arguments;
use crate::gemm::shape::Gemm;
use crate::{Backend, Counter, Cpu, DType, Element, Error, Isa, TensorMut, TensorRef, Tf32};
use half::{bf16, f16};
use samebits_schema::{Attributes, Given, find, validate};

/// A number of either sign: as many exponents as a dictionary has, so that every sum rounds.
pub(crate) fn number(seed: usize) -> bf16 {
    let bits = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let bits = (bits ^ bits >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40;
    bf16::from_bits((bits & 0x87FF) as u16 | 0x3800)
}

fn numbers<T: Element>(seed: usize, len: usize) -> Vec<T> {
    (seed..seed + len).map(|seed| T::narrow(number(seed).to_f32())).collect()
}

/// The sum between these bounds, as docs/NUMERICS.md has it.
pub(crate) fn plain(bounds: &[usize], x: impl Fn(usize) -> f32, w: impl Fn(usize) -> f32) -> f32 {
    let chain = |two: &[usize]| (two[0]..two[1]).fold(0f32, |sum, k| x(k).mul_add(w(k), sum));
    let mut sums: Vec<f32> = bounds.windows(2).map(chain).collect();
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|two| two[0] + two[1]).collect();
    }
    sums[0]
}

/// `x[m,k] * w[n,k]^T`.
pub(crate) fn product<T: Element>(size: [usize; 3], x: &[T], w: &[T]) -> Vec<f32> {
    let [m, n, k] = size;
    let length = 16 * k.div_ceil(128);
    let bounds: Vec<usize> = (0..=8).map(|i| (i * length).min(k)).collect();
    let element = |i: usize| plain(&bounds, |at| x[i / n * k + at].widen(), |at| w[i % n * k + at].widen());
    (0..m * n).map(element).collect()
}

pub(crate) fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.widen().to_bits()).collect()
}

/// Runs on every plan that there is, from the preferred one to the smallest: each time with one byte less than the last took.
pub(crate) fn on_every_plan(isa: Isa, threads: usize, mut run: impl FnMut(&Cpu) -> Result<(), Error>) {
    let mut budget = usize::MAX;
    loop {
        let cpu = Cpu::new(isa, threads, budget).unwrap();
        match run(&cpu) {
            Ok(()) => budget = cpu.ledger().plans()[0].bytes - 1,
            Err(Error::Budget { smallest, .. }) => return assert_eq!(smallest, budget + 1),
            Err(error) => panic!("{error}"),
        }
    }
}

/// One weight by instruction sets of every form, and none.
fn check<I: Element, O: Element>(isas: &[Isa], size: [usize; 3], x: &[I], w: &[I], bias: Option<&[I]>) {
    let [m, n, k] = size;
    let mut sums = product(size, x, w);
    if let Some(bias) = bias {
        sums.iter_mut().enumerate().for_each(|(i, sum)| *sum += bias[i % n].widen());
    }
    let expected: Vec<O> = sums.into_iter().map(O::narrow).collect();
    let expected = bits(&expected);
    let pack = |isa: &Isa| PackedWeight::pack(&Cpu::new(*isa, 2, usize::MAX).unwrap(), n, k, w).unwrap();
    let plain = pack(&Isa::Scalar);
    let coded = isas.iter().find(|isa| isa.has_dot()).map(pack);
    let is_coded = coded.as_ref().is_some_and(|coded| coded.bytes() != plain.bytes());
    assert_eq!(is_coded, coded.is_some() && I::IS_BF16 && k > 0, "{size:?}");
    // A call before leaves NaN in the workspace, also where an odd k ends.
    let even = k.next_multiple_of(2);
    let nan = |rows: usize| vec![I::narrow(f32::NAN); rows * even];
    let (x_nan, w_nan) = (nan(m), nan(n));
    let packed_nan = PackedWeight::pack(&Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap(), n, even, &w_nan).unwrap();
    let mut y = vec![O::default(); m * n];
    for &isa in isas {
        for (packed, threads) in
            [(None, 1), (Some(&plain), 1), (coded.as_ref(), 1), (None, 3), (Some(&plain), 3), (coded.as_ref(), 3)]
        {
            on_every_plan(isa, threads, |cpu| {
                match packed {
                    _ if k == even => {}
                    None => gemm(cpu, &Gemm::new(m, n, even), &x_nan, &w_nan, None, &mut y)?,
                    Some(_) => gemm_packed(cpu, &Gemm::new(m, n, even), &x_nan, &packed_nan, None, &mut y)?,
                }
                y.fill(O::narrow(7e7));
                match packed {
                    None => gemm(cpu, &Gemm::new(m, n, k), x, w, bias, &mut y)?,
                    Some(packed) => gemm_packed(cpu, &Gemm::new(m, n, k), x, packed, bias, &mut y)?,
                }
                let of = packed.map(|packed| packed.bytes());
                assert_eq!(bits(&y), expected, "{isa} {size:?} {of:?} {:?}", cpu.ledger().plans());
                Ok(())
            });
        }
    }
}

const SIZES: [[usize; 3]; 14] = [
    [1, 800, 20],
    [1, 33, 0],
    [2, 70, 1],
    [5, 63, 33],
    [12, 64, 260],
    [13, 56, 67],
    [24, 60, 129],
    [25, 33, 100],
    [40, 33, 515],
    [60, 96, 17],
    [100, 56, 40],
    [36, 33, 1100],
    [1, 3, 8321],
    [131, 63, 9],
];

pub(crate) fn every_plan_makes_plain_chains() {
    let isas: Vec<Isa> = Isa::of_machine().collect();
    for [m, n, k] in SIZES {
        let (x, w, bias) = (numbers::<bf16>(0, m * k), numbers::<bf16>(m * k, n * k), numbers::<bf16>(7, n));
        check::<_, f32>(&isas, [m, n, k], &x, &w, (k % 2 == 0).then_some(&bias));
        if m * n * k < 200_000 {
            let [x, w, bias] = [&x, &w, &bias].map(|values| values.iter().map(|v| v.to_f32()).collect::<Vec<f32>>());
            check::<_, bf16>(&isas, [m, n, k], &x, &w, (k % 2 == 1).then_some(&bias));
            let [x, w, bias] = [x, w, bias].map(|values| values.into_iter().map(f16::from_f32).collect::<Vec<f16>>());
            check::<_, f32>(&isas, [m, n, k], &x, &w, Some(&bias));
        }
    }
}

/// The matrix whose rows are the columns of rows of `columns`.
fn transposed<T: Copy>(rows: &[T], columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| rows.iter().skip(column).step_by(columns).copied()).collect()
}

/// [`check`] of the gradient, where outputs are the columns of the weight `w[terms, outputs]`.
fn check_gradient<I: Element, O: Element>(isas: &[Isa], [m, outputs, terms]: [usize; 3], dy: &[I], w: &[I]) {
    let sums = product([m, outputs, terms], dy, &transposed(w, outputs));
    let expected = bits(&sums.into_iter().map(O::narrow).collect::<Vec<_>>());
    let pack =
        |isa: &Isa| PackedWeight::pack_for_dx(&Cpu::new(*isa, 2, usize::MAX).unwrap(), terms, outputs, w).unwrap();
    let packed = [Some(Isa::Scalar), isas.iter().copied().find(|isa| isa.has_dot())].map(|isa| isa.as_ref().map(pack));
    // A call before leaves NaN in the workspace.
    let [dy_nan, w_nan] = [m * terms, terms * outputs].map(|len| vec![I::narrow(f32::NAN); len]);
    let (shape, mut dx) = (GemmDx::new(m, terms, outputs), vec![O::default(); m * outputs]);
    let ways = [None, packed[0].as_ref(), packed[1].as_ref()].into_iter().flat_map(|way| [(way, 1), (way, 3)]);
    for (isa, (packed, threads)) in isas.iter().flat_map(|isa| ways.clone().map(move |way| (*isa, way))) {
        on_every_plan(isa, threads, |cpu| {
            if packed.is_none() {
                gemm_dx(cpu, &shape, &dy_nan, &w_nan, &mut dx)?;
            }
            dx.fill(O::narrow(7e7));
            match packed {
                None => gemm_dx(cpu, &shape, dy, w, &mut dx)?,
                Some(packed) => gemm_dx_packed(cpu, &shape, dy, packed, &mut dx)?,
            }
            let of = packed.map(|packed| packed.bytes());
            assert_eq!(bits(&dx), expected, "{isa} {shape:?} {of:?} {:?}", cpu.ledger().plans());
            Ok(())
        });
    }
}

pub(crate) fn every_plan_of_the_gradient_makes_plain_chains() {
    let isas: Vec<Isa> = Isa::of_machine().collect();
    for [m, outputs, terms] in
        [[1, 33, 0], [2, 70, 1], [5, 63, 33], [13, 56, 67], [25, 33, 100], [40, 33, 515], [131, 63, 9]]
    {
        let (dy, w) = (numbers::<bf16>(0, m * terms), numbers::<bf16>(m * terms, terms * outputs));
        check_gradient::<_, f32>(&isas, [m, outputs, terms], &dy, &w);
        let [dy, w] = [&dy, &w].map(|values| values.iter().map(|v| v.to_f32()).collect::<Vec<f32>>());
        check_gradient::<_, bf16>(&isas, [m, outputs, terms], &dy, &w);
        let [dy, w] = [dy, w].map(|values| values.into_iter().map(f16::from_f32).collect::<Vec<f16>>());
        check_gradient::<_, f32>(&isas, [m, outputs, terms], &dy, &w);
    }
}

/// Chains over the tokens that count, from what dw holds.
fn check_weight_gradient<I: Element>([tokens, n, k]: [usize; 3], padded: bool, tf32: Tf32) {
    let (mut x, mut dy) = (numbers::<I>(0, tokens * k), numbers::<I>(tokens * k, tokens * n));
    if tf32 == Tf32::Enabled {
        // More digits than are read.
        x.iter_mut().chain(&mut dy).for_each(|v| *v = I::narrow(v.widen() * 1.0007));
    }
    let mask: Vec<i32> = (0..tokens).map(|t| (t % 3) as i32).collect();
    for t in (0..tokens).filter(|t| padded && t % 3 == 0) {
        x[t * k..][..k].fill(I::narrow(f32::NAN));
        dy[t * n..][..n].fill(I::narrow(f32::NAN));
    }
    let mask = padded.then_some(&mask[..]);
    let start = numbers::<f32>(7, n * k);
    let mut expected = start.clone();
    for t in (0..tokens).filter(|&t| mask.is_none_or(|mask| mask[t] != 0)) {
        for (i, sum) in expected.iter_mut().enumerate() {
            let [x, dy] = [x[t * k + i % k], dy[t * n + i / k]].map(|v| match tf32 {
                Tf32::Enabled => f32::from_bits((v.widen().to_bits() + 0x1000) & !0x1FFF),
                Tf32::Disabled => v.widen(),
            });
            *sum = dy.mul_add(x, *sum);
        }
    }
    let expected = bits(&expected);
    // A call before leaves NaN in the workspace.
    let [x_nan, dy_nan] = [tokens * k, tokens * n].map(|len| vec![I::narrow(f32::NAN); len]);
    let (shape, mut dw) = (GemmDw { tf32, ..GemmDw::new(tokens, n, k) }, vec![0f32; n * k]);
    for (isa, threads) in Isa::of_machine().flat_map(|isa| [(isa, 1), (isa, 3)]) {
        on_every_plan(isa, threads, |cpu| {
            gemm_dw(cpu, &shape, mask, &x_nan, &dy_nan, &mut dw)?;
            dw.copy_from_slice(&start);
            gemm_dw(cpu, &shape, mask, &x, &dy, &mut dw)?;
            assert_eq!(bits(&dw), expected, "{isa} {shape:?} {:?}", cpu.ledger().plans());
            Ok(())
        });
    }
}

/// Several tiles to a task, several blocks of tokens, and more panels than are laid out at a time.
pub(crate) fn every_plan_of_the_gradient_of_a_weight_makes_plain_chains() {
    check_weight_gradient::<bf16>([530, 13, 40], false, Tf32::Disabled);
    check_weight_gradient::<bf16>([17, 107, 33], true, Tf32::Disabled);
    check_weight_gradient::<f32>([9, 5, 2100], true, Tf32::Disabled);
    check_weight_gradient::<f32>([15, 30, 70], false, Tf32::Enabled);
    check_weight_gradient::<f32>([1, 5, 40], false, Tf32::Enabled);
    check_weight_gradient::<f16>([1, 1, 1], false, Tf32::Disabled);
    // Without a token a call by name has what it goes on from.
    let (x, carry, mut dw) = ([f32::NAN; 6], [1f32, -0.0, 3.0, 4.0], [7f32; 4]);
    let [x, dy] = ["x", "dy"].map(|name| (name, TensorRef::new(&x, &[3, 2]).unwrap()));
    let (mask, carry_of) = (TensorRef::new(&[0i32; 3], &[3]).unwrap(), TensorRef::new(&carry, &[2, 2]).unwrap());
    let output = TensorMut::new(&mut dw, &[2, 2]).unwrap();
    let inputs = [x, dy, ("mask", mask), ("carry", carry_of)];
    Cpu::best().call("gemm_dw", Attributes::new(), &inputs, vec![("dw", output)]).unwrap();
    assert_eq!(bits(&dw), bits(&carry));
}

/// Where `VDPBF16PS` is the slower one, coded panels are unpacked for multiply-adds: an emulated instruction set takes the way
/// that this machine does not.
pub(crate) fn the_other_way_makes_plain_chains() {
    let others = || Isa::all().filter(|isa| isa.available() && isa.emulates().is_some() && isa.has_dot());
    for [m, n, k] in [[24, 40, 100], [100, 56, 20], [25, 63, 33]] {
        let (x, w) = (numbers::<bf16>(0, m * k), numbers::<bf16>(m * k, n * k));
        check::<_, f32>(&others().collect::<Vec<_>>(), [m, n, k], &x, &w, None);
    }
}

/// The fourth and the last row of x, and some weights of the last row of w, are so small that `VDPBF16PS` would flush their
/// products. The weights are too few to keep the others from being coded.
fn small(size: [usize; 3]) -> [Vec<bf16>; 2] {
    let [m, n, k] = size;
    let [mut x, mut w] = [numbers::<bf16>(0, m * k), numbers::<bf16>(m * k, n * k)];
    let shrink = |row: &mut [bf16]| row.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * 2f32.powi(-60)));
    shrink(&mut x[3 * k..][..k]);
    shrink(&mut x[(m - 1) * k..]);
    shrink(&mut w[(n - 1) * k..][..3]);
    [x, w]
}

pub(crate) fn small_operands_are_not_flushed() {
    for size in [[24, 40, 300], [30, 70, 64], [25, 33, 1100]] {
        let [x, w] = small(size);
        check::<_, f32>(&Isa::of_machine().collect::<Vec<_>>(), size, &x, &w, None);
        check_gradient::<_, f32>(&Isa::of_machine().collect::<Vec<_>>(), size, &x, &transposed(&w, size[2]));
    }
}

/// Products below the smallest number in all eight segments make sums of -0. What fills the last pair of an odd k up leaves them.
pub(crate) fn an_odd_end_leaves_minus_zero() {
    let tiny = bf16::from_f32(2f32.powi(-100));
    for [m, n] in [[1, 33], [3, 5], [24, 40]] {
        let (size, x, w) = ([m, n, 127], vec![-tiny; m * 127], vec![tiny; n * 127]);
        assert!(product(size, &x, &w).iter().all(|sum| sum.to_bits() == 0x8000_0000));
        check::<_, f32>(&Isa::of_machine().collect::<Vec<_>>(), size, &x, &w, None);
    }
}

/// Panels of ordinary columns say so: their products are left to `VDPBF16PS`.
pub(crate) fn the_gradient_of_ordinary_operands_takes_no_slow_path() {
    let [m, outputs, terms] = [24, 40, 300];
    let (dy, w) = (numbers::<bf16>(0, m * terms), numbers::<bf16>(m * terms, terms * outputs));
    // Emulated ones too: so many rows are left to multiply-adds where those are faster.
    for isa in Isa::all().filter(|isa| isa.available()) {
        let (cpu, mut dx) = (Cpu::new(isa, 1, usize::MAX).unwrap(), vec![0f32; m * outputs]);
        cpu.ledger().forbid(Counter::SlowPaths);
        let packed = PackedWeight::pack_for_dx(&cpu, terms, outputs, &w).unwrap();
        let shape = GemmDx::new(m, terms, outputs);
        gemm_dx(&cpu, &shape, &dy, &w, &mut dx).unwrap();
        gemm_dx_packed(&cpu, &shape, &dy, &packed, &mut dx).unwrap();
    }
}

pub(crate) fn slow_paths_are_counted_and_refused() {
    let [m, n, k] = [30, 70, 64];
    let [x, w] = small([m, n, k]);
    let ordinary = numbers::<bf16>(0, m * k);
    // 30 rows are tiles of `VDPBF16PS` also where many rows are left to multiply-adds.
    for isa in Isa::all().filter(|isa| isa.available()) {
        let packed = [Isa::Scalar, isa]
            .map(|isa| Some(PackedWeight::pack(&Cpu::new(isa, 1, usize::MAX).unwrap(), n, k, &w).unwrap()));
        for w_packed in packed.iter().chain([&None]) {
            let run = |cpu: &Cpu, x: &[bf16], y: &mut [f32]| match w_packed {
                None => gemm(cpu, &Gemm::new(m, n, k), x, &w, None, y),
                Some(packed) => gemm_packed(cpu, &Gemm::new(m, n, k), x, packed, None, y),
            };
            let mut y = vec![0f32; m * n];
            let new = |budget: usize| Cpu::new(isa, 2, budget).unwrap();
            // Of three tiles the first and the last, with the last panel.
            let slow = if isa.has_dot() { 2 } else { 0 };
            let (cpu, strict) = (new(usize::MAX), new(usize::MAX));
            run(&cpu, &x, &mut y).unwrap();
            assert_eq!(cpu.ledger().count(Counter::SlowPaths), slow as u64, "{isa}");
            let kernels = [isa.name(), isa.without_dot().name()];
            assert_eq!(cpu.ledger().kernels(), if slow > 0 { &kernels[..] } else { &kernels[1..] });
            strict.ledger().forbid(Counter::SlowPaths);
            y.fill(7e7);
            match run(&strict, &x, &mut y) {
                Ok(()) => assert_eq!(slow, 0, "{isa}"),
                Err(Error::Forbidden { amount, .. }) => assert!(amount == slow && y.iter().all(|y| *y == 7e7), "{isa}"),
                Err(error) => panic!("{error}"),
            }
            // Ordinary operands, and pieces of f32.
            let cpu = new(usize::MAX);
            cpu.ledger().forbid(Counter::SlowPaths);
            run(&cpu, &ordinary, &mut y).unwrap();
            assert_eq!(cpu.ledger().kernels(), [isa.name()]);
            let Err(Error::Budget { smallest, .. }) = run(&new(0), &x, &mut y) else { panic!("it needs a workspace") };
            let cpu = new(smallest);
            cpu.ledger().forbid(Counter::SlowPaths);
            run(&cpu, &x, &mut y).unwrap();
            assert_eq!(cpu.ledger().kernels(), [isa.without_dot().name()]);
        }
    }
}

/// One tile or two of a row: with ordinary weights, ones that `VDPBF16PS` would flush, or both.
pub(crate) fn the_kernels_that_ran_are_named() {
    let (x, k) = ([bf16::from_f32(2f32.powi(-60)); 4], 4);
    for isa in Isa::of_machine() {
        let [dot, plain] = [isa.name(), isa.without_dot().name()];
        for (n, small, ran) in [(1, 0, &[dot][..]), (1, 1, &[plain]), (40, 8, &[dot, plain])] {
            let w: Vec<bf16> = (0..n * k).map(|i| if i / k < n - small { bf16::ONE } else { x[0] }).collect();
            let (cpu, mut y) = (Cpu::new(isa, 1, usize::MAX).unwrap(), vec![0f32; n]);
            gemm(&cpu, &Gemm::new(1, n, k), &x, &w, None, &mut y).unwrap();
            let ran = if isa.has_dot() { ran } else { &[plain] };
            assert_eq!(cpu.ledger().kernels(), ran, "{isa} {n} {small}");
        }
    }
}

pub(crate) fn a_packed_weight_holds_every_bit() {
    for isa in Isa::of_machine() {
        let [n, k] = [56, 67];
        let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
        let w = numbers::<bf16>(0, n * k);
        let floats: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
        let narrow: Vec<f16> = floats.iter().map(|w| f16::from_f32(*w)).collect();
        let packed = [
            PackedWeight::pack(&cpu, n, k, &w).unwrap(),
            PackedWeight::pack(&cpu, n, k, &floats).unwrap(),
            PackedWeight::pack(&cpu, n, k, &narrow).unwrap(),
            PackedWeight::pack_for_dx(&cpu, n, k, &w).unwrap(),
            PackedWeight::pack_for_dx(&cpu, n, k, &floats).unwrap(),
        ];
        // fp16 alone is converted.
        assert_eq!(cpu.ledger().count(Counter::Conversions), 1);
        assert!(packed.iter().all(|packed| (packed.n(), packed.k()) == (n, k)));
        let widened: Vec<f32> = narrow.iter().map(|w| w.to_f32()).collect();
        for (packed, expected) in packed.iter().zip([&floats, &floats, &widened, &floats, &floats]) {
            for row in 0..n {
                let mut found = vec![0f32; k];
                packed.unpack_row(row, |k, value| found[k] = value);
                assert_eq!(found, expected[row * k..][..k], "{isa} row {row}");
            }
        }
        // Two panels of whole pairs, and a line for each.
        assert_eq!(packed[1].bytes(), 2 * 4 * (32 * 68 + 16));
        assert_eq!(packed[0].bytes() == 2 * 4 * (32 * 34 + 16), !isa.reads_coded());
    }
}

/// A panel that is not full stands where a full one of weights that `VDPBF16PS` would flush stood before.
pub(crate) fn what_stands_beside_the_last_outputs_is_no_weight() {
    let (m, n, tiny) = (13, 40, bf16::from_bits(3));
    for isa in Isa::of_machine() {
        let (cpu, mut dx) = (Cpu::new(isa, 1, usize::MAX).unwrap(), vec![0f32; m * 64]);
        gemm_dx(&cpu, &GemmDx::new(m, n, 64), &numbers::<bf16>(0, m * n), &vec![tiny; n * 64], &mut dx).unwrap();
        cpu.ledger().forbid(Counter::SlowPaths);
        let (dy, w) = (numbers::<bf16>(0, m * n), numbers::<bf16>(7, n * 33));
        gemm_dx(&cpu, &GemmDx::new(m, n, 33), &dy, &w, &mut dx[..m * 33]).unwrap();
    }
}

/// A square weight fits both ways; the one that it was not packed for is refused.
pub(crate) fn a_weight_packed_for_another_op_is_refused() {
    let (cpu, x, mut y) = (Cpu::best(), [1f32; 4], [0f32; 4]);
    let [of_gemm, of_dx] = [PackedWeight::pack, PackedWeight::pack_for_dx].map(|pack| pack(&cpu, 2, 2, &x).unwrap());
    let refused = gemm_packed(&cpu, &Gemm::new(2, 2, 2), &x, &of_dx, None, &mut y).unwrap_err().to_string();
    assert!(refused.contains("`w` is packed for another op; use PackedWeight::pack"), "{refused}");
    let refused = gemm_dx_packed(&cpu, &GemmDx::new(2, 2, 2), &x, &of_gemm, &mut y).unwrap_err().to_string();
    assert!(refused.contains("`w` is packed for another op; use PackedWeight::pack_for_dx"), "{refused}");
    assert_eq!(y, [0.0; 4]);
}

/// A part that is no subtree is refused by the names of the op's own fields.
pub(crate) fn parts_are_refused_by_name() {
    let (cpu, x, mut y) = (Cpu::best(), [1f32; 16], [0f32; 1]);
    for (n_offset, n_total, why) in [
        (16, 24, "rows of w 16+16 exceed n_total 24"),
        (
            8,
            64,
            "rows of w 8..24 of 64 are not a subtree of the eight segments of 16; use 1, 2, 4 or 8 equal ranks with n_total",
        ),
    ] {
        let shape = GemmDx { n_offset, n_total, ..GemmDx::new(1, 16, 1) };
        let refused = gemm_dx(&cpu, &shape, &x, &x, &mut y).unwrap_err().to_string();
        assert!(refused.contains(why) && refused.contains("gemm_dx"), "{refused}");
    }
    assert_eq!(y, [0.0]);
}

/// TF32 reads the matrix as it is, and what is packed is not packed again.
pub(crate) fn a_weight_is_packed_where_that_is_of_use() {
    let (cpu, w) = (Cpu::best(), [1f32, 2.0, 3.0, 4.0]);
    let packed = PackedWeight::pack(&cpu, 2, 2, &w).unwrap();
    for (tf32, w, of_use) in [
        ("disabled", TensorRef::of(&w, &[2, 2]), true),
        ("enabled", TensorRef::of(&w, &[2, 2]), false),
        ("disabled", TensorRef::packed(&packed), false),
    ] {
        let given = ["x", "w"].map(|name| Given { name, dtype: DType::Fp32, shape: &[2, 2] });
        let attributes = Attributes::new().with("tf32", tf32);
        let call = validate(find("gemm").expect("an op"), &given, attributes, DType::Fp32).unwrap();
        let inputs = [("x", TensorRef::of(&[1f32; 4], &[2, 2])), ("w", w)];
        let args = Arguments { call: &call, inputs: &inputs, outputs: Vec::new() };
        assert_eq!(prepare(&cpu, &args).unwrap().is_some(), of_use);
    }
}
