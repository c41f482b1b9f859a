//! What one core of this machine can do at most: multiply-adds from registers alone, and bytes read in order from
//! memory. `cargo bench -p samebits-ops --bench ceiling`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

/// Independent accumulators: enough to hide the latency of a multiply-add.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 24;

/// `steps` times 24 dot products of 16 pairs of bf16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    let zero = _mm512_setzero_ps();
    // SAFETY: both types are 512 bits and any bits are valid.
    let pairs = |v: i32| unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(v)) };
    let (a, b) = (pairs(0x3F80_3F80), pairs(steps as i32));
    let mut sums = [zero; SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, b);
        }
    }
    _mm512_reduce_add_ps(sums.into_iter().fold(zero, |a, b| _mm512_add_ps(a, b)))
}

/// `steps` times 24 fused multiply-adds of 16 f32.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fmas(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    let zero = _mm512_setzero_ps();
    let (a, b) = (_mm512_set1_ps(0.5), _mm512_set1_ps(steps as f32));
    let mut sums = [zero; SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    _mm512_reduce_add_ps(sums.into_iter().fold(zero, |a, b| _mm512_add_ps(a, b)))
}

fn ceiling(c: &mut Criterion) {
    let mut group = c.benchmark_group("ceiling");
    #[cfg(target_arch = "x86_64")]
    if samebits_ops::Isa::Avx512Bf16.available() {
        let steps = 100_000;
        group.throughput(Throughput::Elements((steps * SUMS * 32) as u64));
        // SAFETY: the machine has the instructions, as was just asked.
        group.bench_function("multiply-adds of bf16 pairs", |b| b.iter(|| unsafe { dots(black_box(steps)) }));
        group.throughput(Throughput::Elements((steps * SUMS * 16) as u64));
        // SAFETY: as above.
        group.bench_function("multiply-adds of f32", |b| b.iter(|| unsafe { fmas(black_box(steps)) }));
    }
    let words = vec![1u64; 32 << 20];
    group.throughput(Throughput::Bytes(8 * words.len() as u64));
    group.bench_function("read", |b| b.iter(|| black_box(&words).iter().copied().fold(0u64, u64::wrapping_add)));
}

criterion_group!(benches, ceiling);
criterion_main!(benches);
