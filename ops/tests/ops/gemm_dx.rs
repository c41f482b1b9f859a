//! The gradient of the activations of a product against the plainest loop of docs/NUMERICS.md: the same bits on every
//! instruction set, with every budget, packed or not, and dealt to ranks.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, budgets, cases, join, segment, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// Before the last rounding: `dy[m,n] * w[n,k]`.
fn gemm_dx_page<I: Stored>([m, n, k]: [usize; 3], dy: &[I], w: &[I]) -> Vec<f32> {
    let (dy, w) = (widened(dy), widened(w));
    let element = |r: usize, c: usize| {
        let chain = |acc: f32, j: usize| dy[r * n + j].mul_add(w[j * k + c], acc);
        join(std::array::from_fn(|i| segment(n, i).fold(0.0, chain)))
    };
    (0..m * k).map(|i| element(i / k, i % k)).collect()
}

fn check<I: Stored, O: Stored>([m, n, k]: [usize; 3], spread: u32, seed: u64) {
    let (dy, w): (Vec<I>, Vec<I>) = (values(seed, m * n, spread), values(seed + 1, n * k, spread));
    let expected = all_rounded::<O>(&gemm_dx_page([m, n, k], &dy, &w));
    let shape = GemmDx::new(m, n, k);
    for cpu in cpus() {
        let packed = PackedWeight::pack_for_dx(&cpu, n, k, &w).unwrap();
        let run = |cpu: &Cpu, is_packed: bool| {
            let mut dx = vec![O::narrow(f32::NAN); m * k];
            match is_packed {
                true => gemm_dx_packed(cpu, &shape, &dy, &packed, &mut dx)?,
                false => gemm_dx(cpu, &shape, &dy, &w, &mut dx)?,
            }
            assert_eq!(
                bits(&dx),
                expected,
                "{cpu:?} {m}x{n}x{k} spread {spread} {is_packed} {:?}",
                cpu.ledger().plans()
            );
            Ok(())
        };
        for is_packed in [false, true] {
            run(&cpu, is_packed).unwrap();
            for tight in budgets(&cpu, seed, |cpu| run(cpu, is_packed)) {
                run(&tight, is_packed).unwrap();
                assert!(tight.ledger().plans().iter().all(|plan| plan.bytes <= tight.budget()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_gradient_of_a_product_is_the_page(
        m in 1usize..40,
        n in 0usize..420,
        k in 1usize..70,
        spread in prop::sample::select(vec![2u32, 30, 70]),
        seed: u64,
    ) {
        let seed = seed >> 2;
        check::<bf16, f32>([m, n, k], spread, seed);
        check::<f32, bf16>([m, n, k], spread, seed);
        check::<f16, f32>([m, n, k], spread.min(10), seed);
    }

    #[test]
    fn ranks_of_the_gradient_join_to_the_whole(m in 1usize..9, blocks in 1usize..5, k in 1usize..40, seed: u64) {
        let (n, seed) = (128 * blocks, seed >> 2);
        let (dy, w): (Vec<bf16>, Vec<bf16>) = (values(seed, m * n, 8), values(seed + 1, n * k, 8));
        let whole = all_rounded::<f32>(&gemm_dx_page([m, n, k], &dy, &w));
        for (cpu, ranks) in cpus().into_iter().flat_map(|cpu| [1usize, 2, 4, 8].map(|ranks| (cpu.recording(), ranks))) {
            let rows = n / ranks;
            let part = |rank: usize| {
                let columns: Vec<bf16> = dy.chunks(n).flat_map(|dy| dy[rank * rows..][..rows].to_vec()).collect();
                let shape = GemmDx { n_offset: rank * rows, n_total: n, ..GemmDx::new(m, rows, k) };
                let mut dx = vec![0f32; m * k];
                gemm_dx(&cpu, &shape, &columns, &w[rank * rows * k..][..rows * k], &mut dx).unwrap();
                dx
            };
            let mut sums: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            while sums.len() > 1 {
                sums = sums.chunks(2).map(|two| two[0].iter().zip(&two[1]).map(|(a, b)| a + b).collect()).collect();
            }
            prop_assert_eq!(bits(&sums[0]), whole.clone(), "{:?} {} ranks", cpu, ranks);
        }
    }
}

/// Rows of more than one block, and segments that a block takes in several pieces, the last one odd.
#[test]
fn gradients_of_many_rows_and_long_segments_are_the_page() {
    for (m, n) in [(24, 2099), (107, 1161)] {
        check::<bf16, f32>([m, n, 33], 30, m as u64);
        check::<f32, f32>([m, n, 33], 30, m as u64);
    }
}
