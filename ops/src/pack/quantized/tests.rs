//! Packed integers against the weights that they stand for, alone and in products on every plan.

use super::*;
use crate::gemm::tests::{bits, number, on_every_plan};
use crate::gemm::tile::{Right, unpack_quantized};
use crate::{Gemm, Isa, PackedWeight, embedding, embedding_packed, gemm, gemm_packed};

/// Matrices of every form: a row, groups and blocks of it, the least of 16 numbers, whether s is there, and what is taken off.
fn forms(n: usize, k: usize) -> Vec<Quantized> {
    let float = |seed: usize| f16::from_f32(number(seed).to_f32() / 64.0).to_f32();
    let floats = |seed: usize, len: usize| (seed..seed + len).map(float).collect::<Vec<f32>>();
    let bytes = |seed: usize, len: usize, from: i32, many: u32| -> Vec<i8> {
        (seed..seed + len)
            .map(|i| (from + ((u32::from(number(i).to_bits()).wrapping_mul(2654435761) >> 20) % many) as i32) as i8)
            .collect()
    };
    let mut all = Vec::new();
    for (at, (group, block)) in [(16, 1), (16, 16), (32, 1), (32, 8), (64, 1), (usize::MAX, 1)].into_iter().enumerate()
    {
        for few in [None, Some(-8), Some(0)] {
            let groups = k.div_ceil(group);
            let blocks = groups.div_ceil(block);
            let q = few.map_or_else(|| bytes(3, n * k, -128, 256), |least| bytes(5, n * k, i32::from(least), 16));
            let of = |s: bool, offset: Offset| Quantized {
                n,
                k,
                least: few,
                group,
                block,
                q: q.clone(),
                d: floats(at, n * blocks),
                s: s.then(|| bytes(9, n * groups, -64, 128)),
                offset,
            };
            let (e, t) = (floats(17, n * blocks), bytes(11, n * groups, 0, 64));
            all.push(of(at % 2 == 1, Offset::None));
            all.push(of(false, Offset::Zero(bytes(13, n * groups, -8, 24))));
            all.push(of(at % 2 == 0, Offset::Least(e.clone(), None)));
            all.push(of(true, Offset::Least(e, Some(t))));
        }
    }
    // One scale that f16 does not hold.
    all[0].d[0] = 1.0 / 3.0;
    all
}

fn rounded(matrix: &Quantized, pairs: bool) -> Vec<f32> {
    let of = |i: usize| matrix.value(i / matrix.k, i % matrix.k);
    (0..matrix.n * matrix.k).map(of).map(|w| if pairs { bf16::narrow(w).widen() } else { w }).collect()
}

pub(crate) fn a_quantized_matrix_holds_every_weight() {
    for (n, k) in [(1usize, 16usize), (33, 112), (70, 256)] {
        for (number, matrix) in forms(n, k).into_iter().enumerate() {
            for pairs in [false, true] {
                let wanted = rounded(&matrix, pairs);
                let mut row = vec![0f32; k];
                matrix.row(n - 1, &mut row);
                assert_eq!(bits(&row), bits(&rounded(&matrix, false)[(n - 1) * k..]), "{n} x {k}, {number}");
                for isa in Isa::of_machine() {
                    let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
                    let (layout, memory) = pack(&cpu, &matrix, pairs).unwrap().expect("it has a layout");
                    for first in (0..n).step_by(PANEL) {
                        let (panel, least) = QuantizedPanel::panel(&layout, &memory, first / PANEL);
                        let rows = PANEL.min(n - first);
                        let smallest = (first * k..(first + rows) * k)
                            .map(|i| matrix.value(i / k, i % k).abs())
                            .filter(|w| *w > 0.0)
                            .fold(f32::INFINITY, f32::min);
                        assert_eq!(least, smallest);
                        let mut slot = vec![0; k * PANEL];
                        let unpacked = unpack_quantized(&cpu, &panel, &mut slot);
                        let mut wide = vec![0f32; k * PANEL];
                        // In two parts, of which the second begins within a group.
                        let (head, tail) = wide.split_at_mut(16 * PANEL);
                        panel.widen(&cpu, 0, 16, head);
                        panel.widen(&cpu, 16, k - 16, tail);
                        for (term, column) in (0..k).flat_map(|term| (0..rows).map(move |column| (term, column))) {
                            let wanted = wanted[(first + column) * k + term].to_bits();
                            let unpacked = match unpacked {
                                Right::Vnni(pairs, _) if term % 2 == 0 => {
                                    pairs[term / 2 * PANEL + column] & 0xFFFF_0000
                                }
                                Right::Vnni(pairs, _) => pairs[term / 2 * PANEL + column] << 16,
                                Right::F32(floats, _) => floats[term * PANEL + column].to_bits(),
                                _ => panic!("pairs or f32"),
                            };
                            let of =
                                [panel.value(term, column).to_bits(), wide[term * PANEL + column].to_bits(), unpacked];
                            assert_eq!(of, [wanted; 3], "{isa} {n} x {k}, {number}: w[{}][{term}]", first + column);
                        }
                    }
                }
            }
        }
    }
}

fn of_x(i: usize) -> bf16 {
    number(i)
}

/// Against the matrix whose weights are rounded.
pub(crate) fn products_with_integers_are_those_with_their_weights() {
    for [m, n, k] in [[1, 70, 48], [2, 33, 112], [7, 31, 256], [13, 64, 160], [40, 33, 320], [100, 40, 32]] {
        for (number, matrix) in forms(n, k).into_iter().enumerate().filter(|(number, _)| (number + m) % 5 == 0) {
            let x: Vec<f32> = (0..m * k).map(|i| of_x(i).to_f32()).collect();
            let x_bf16: Vec<bf16> = x.iter().copied().map(bf16::from_f32).collect();
            let w = rounded(&matrix, false);
            let w_bf16: Vec<bf16> = w.iter().copied().map(bf16::narrow).collect();
            let scalar = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
            let (mut wanted, mut y) = (vec![0f32; m * n], vec![0f32; m * n]);
            let shape = Gemm::new(m, n, k);
            for isa in Isa::of_machine() {
                let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
                let packed = |dtype| PackedWeight::quantized(&cpu, dtype, &matrix).unwrap().expect("it is packed");
                gemm(&scalar, &shape, &x, &w, None, &mut wanted).unwrap();
                let of_f32 = packed(crate::DType::Fp32);
                on_every_plan(isa, 2, |cpu| {
                    y.fill(f32::NAN);
                    gemm_packed(cpu, &shape, &x, &of_f32, None, &mut y)?;
                    assert_eq!(bits(&y), bits(&wanted), "{isa} f32 {m} {n} {k}, {number}: {:?}", cpu.ledger().plans());
                    Ok(())
                });
                gemm(&scalar, &shape, &x_bf16, &w_bf16, None, &mut wanted).unwrap();
                let of_bf16 = packed(crate::DType::Bf16);
                on_every_plan(isa, 2, |cpu| {
                    y.fill(f32::NAN);
                    gemm_packed(cpu, &shape, &x_bf16, &of_bf16, None, &mut y)?;
                    assert_eq!(bits(&y), bits(&wanted), "{isa} bf16 {m} {n} {k}, {number}: {:?}", cpu.ledger().plans());
                    Ok(())
                });
                let tokens: Vec<i32> = (0..n as i32).rev().collect();
                let (mut rows, mut of_rows) = (vec![bf16::ZERO; n * k], vec![bf16::ZERO; n * k]);
                embedding(&cpu, k, &w_bf16, &tokens, &mut rows).unwrap();
                embedding_packed(&cpu, &of_bf16, &tokens, &mut of_rows).unwrap();
                assert_eq!(bits(&rows), bits(&of_rows));
            }
        }
    }
}

/// Weights that round to the least normal number, and that do not: `VDPBF16PS` would flush them.
pub(crate) fn small_weights_are_not_flushed() {
    let (n, k) = (40, 32);
    let mut matrix = forms(n, k).swap_remove(8);
    matrix.d.iter_mut().enumerate().for_each(|(i, d)| *d = f32::from_bits(0x007F_FFFF - (i as u32) * 0x1_0000) / 8.0);
    let w: Vec<bf16> = rounded(&matrix, true).into_iter().map(bf16::from_f32).collect();
    let x: Vec<bf16> = (0..3 * k).map(|i| bf16::from_f32(number(i).to_f32() * 1e20)).collect();
    let (mut wanted, mut y) = (vec![0f32; 3 * n], vec![0f32; 3 * n]);
    gemm(&Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap(), &Gemm::new(3, n, k), &x, &w, None, &mut wanted).unwrap();
    assert!(wanted.iter().all(|y| *y != 0.0));
    for isa in Isa::of_machine() {
        let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
        let packed = PackedWeight::quantized(&cpu, crate::DType::Bf16, &matrix).unwrap().unwrap();
        gemm_packed(&cpu, &Gemm::new(3, n, k), &x, &packed, None, &mut y).unwrap();
        assert_eq!(bits(&y), bits(&wanted), "{isa}");
    }
}

pub(crate) fn parts_that_do_not_fit_are_refused() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let refused = |change: &dyn Fn(&mut Quantized)| {
        let mut matrix = forms(3, 32).swap_remove(11);
        change(&mut matrix);
        PackedWeight::quantized(&cpu, crate::DType::Bf16, &matrix).map(|packed| packed.is_some())
    };
    assert_eq!(refused(&|_| ()), Ok(true));
    for change in [
        &(|matrix: &mut Quantized| _ = matrix.q.pop()) as &dyn Fn(&mut Quantized),
        &|matrix| _ = matrix.d.pop(),
        &|matrix| matrix.s = Some(vec![0; 1]),
        &|matrix| matrix.offset = Offset::Zero(vec![0; 2]),
        &|matrix| matrix.offset = Offset::Least(vec![0.0; 99], None),
        &|matrix| (matrix.group, matrix.block) = (0, 1),
        &|matrix| matrix.q[7] = 16,
    ] {
        assert!(matches!(refused(change), Err(Error::Value { .. })));
    }
    // Groups, or rows, that are no whole units.
    assert_eq!(
        PackedWeight::quantized(&cpu, crate::DType::Bf16, &forms(3, 24).swap_remove(0)).map(|packed| packed.is_some()),
        Ok(false)
    );
}
