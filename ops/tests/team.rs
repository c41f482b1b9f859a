//! Threads of another library do the work, in any number and order, and move no bit.

use samebits_ops::{Cpu, Gemm, Isa, bf16, gemm, softmax, work_on};
use std::sync::atomic::{AtomicUsize, Ordering};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// All numbers, the last one first, on the calling thread.
fn team(count: usize, work: &(dyn Fn(usize) + Sync)) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    (0..count).rev().for_each(work);
}

#[test]
fn a_team_does_the_work_of_all_threads() {
    let (m, n, k) = (70, 130, 300);
    let element = |i: usize| bf16::from_f32(((i * 7919) % 1013) as f32 / 500.0 - 1.0);
    let (x, w): (Vec<_>, Vec<_>) = ((0..m * k).map(element).collect(), (0..n * k).map(element).collect());
    let answers = |cpu: &Cpu| {
        let (mut y, mut few, mut p) = (vec![bf16::ZERO; m * n], vec![bf16::ZERO; n], vec![bf16::ZERO; m * n]);
        gemm(cpu, &Gemm::new(m, n, k), &x, &w, None, &mut y).unwrap();
        gemm(cpu, &Gemm::new(1, n, k), &x[..k], &w, None, &mut few).unwrap();
        softmax(cpu, m, n, &y, &mut p).unwrap();
        [y, few, p]
    };
    let alone = Cpu::new(Isa::best(), 1, usize::MAX).unwrap();
    let cpu = Cpu::new(Isa::best(), 3, usize::MAX).unwrap();
    let (expected, before) = (answers(&alone), answers(&cpu));
    assert_eq!(CALLS.load(Ordering::Relaxed), 0);
    work_on(team);
    assert!(answers(&cpu) == expected && before == expected);
    assert!(CALLS.load(Ordering::Relaxed) >= 3, "each op has work for several threads");
    let calls = CALLS.load(Ordering::Relaxed);
    assert!(answers(&alone) == expected);
    assert_eq!(CALLS.load(Ordering::Relaxed), calls, "one thread needs no team");
}
