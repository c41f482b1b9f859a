//! The ops from outside the crate, in one program: each kernel is compiled for it once.

mod attention_gradient;
mod call;
mod conv;
mod delta;
mod experts;
mod extreme;
#[cfg(unix)]
mod fork;
mod gemm_dw;
mod gemm_dx;
#[cfg(unix)]
mod guard;
mod images;
mod indexer;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod inlined;
mod linear_logprob_gradient;
mod norm_gradients;
mod page;
mod sampling;
mod scan;
mod selective;
mod token_sums;
mod train;
mod wkv;

use samebits_ops::{Cpu, Element, Isa};

#[cfg(not(feature = "unit-tests"))]
compile_error!("the tests need a feature: cargo test -p samebits-ops --features unit-tests");

/// Every way to run that this machine has.
fn cpus() -> Vec<Cpu> {
    let isas = Isa::of_machine();
    isas.flat_map(|isa| [1, 3].map(|threads| Cpu::new(isa, threads, usize::MAX).unwrap())).collect()
}

/// Whether a call on `cpu` took `VDPBF16PS`.
fn dots_ran(cpu: &Cpu) -> bool {
    cpu.isa().has_dot() && cpu.ledger().kernels().contains(&cpu.isa().name())
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|v| v.widen().to_bits()).collect()
}
