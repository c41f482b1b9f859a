//! A process that forks: the workers stay with the parent, and the child computes all the same.

use samebits_ops::{Cpu, Gemm, Isa, bf16, gemm};
use std::time::{Duration, Instant};

fn product(cpu: &Cpu) -> Vec<f32> {
    let numbers = |len: usize| (0..len).map(|i| bf16::from_f32((i * 37 % 61) as f32 / 8.0 - 3.5)).collect::<Vec<_>>();
    let shape = Gemm::new(48, 80, 256);
    let mut y = vec![0.0; shape.m * shape.n];
    gemm(cpu, &shape, &numbers(shape.m * shape.k), &numbers(shape.n * shape.k), None, &mut y).unwrap();
    y
}

#[test]
fn a_child_has_workers_of_its_own() {
    let cpu = Cpu::new(Isa::Scalar, 3, usize::MAX).unwrap();
    let expected = product(&cpu);
    // SAFETY: the child computes and ends without going back to the test's own code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let work = std::panic::AssertUnwindSafe(|| product(&cpu) == expected && product(&cpu) == expected);
        let same = std::panic::catch_unwind(work);
        // SAFETY: ends the process here and now.
        unsafe { libc::_exit(if same.unwrap_or(false) { 0 } else { 3 }) };
    }
    assert!(child > 0, "the process forks");
    let (begun, mut status) = (Instant::now(), 0);
    // SAFETY: it is a child of this process, and the pointer is to a number.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if begun.elapsed() > Duration::from_secs(60) {
            // SAFETY: as above.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the child waits for workers that are not there");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "the child has other bits");
    assert_eq!(product(&cpu), expected);
}
