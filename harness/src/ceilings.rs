//! What this machine can do at most, measured beside the ops: bytes read in order, bytes copied, multiply-adds from
//! registers alone.

use samebits_contract::tensor::DType;
use samebits_ops::Isa;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::time::Instant;

/// A limit of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ceiling {
    /// Bytes per second of reading 256 MiB in order, with or without a prefetch, whichever is faster.
    Read,
    /// Bytes per second of copying 256 MiB with the system's memcpy; what is read and what is written both count.
    Copy,
    /// Operations per second of multiply-adds whose operands stay in registers, in the instruction set that ours runs
    /// on: fused multiply-adds of f32, or, for bf16, dot products of pairs where it has them and they are faster. A
    /// multiply-add counts as two.
    Peak,
}

impl Ceiling {
    /// The name that the table of workloads uses.
    pub fn name(self) -> &'static str {
        match self {
            Ceiling::Read => "read",
            Ceiling::Copy => "copy",
            Ceiling::Peak => "peak",
        }
    }
}

/// Far more than the caches hold.
const WORDS: usize = 32 << 20;

/// What measures the limits.
pub struct Ceilings {
    /// The instruction set of [`Ceiling::Peak`].
    isa: Isa,
    /// The buffers that are read and copied; they are made when they are first needed.
    from: Vec<u64>,
    to: Vec<u64>,
}

impl Ceilings {
    /// The limits of code for `isa`. Code for a lesser one cannot reach the peak of the machine, and is not asked to.
    pub fn of(isa: Isa) -> Ceilings {
        Ceilings { isa, from: Vec::new(), to: Vec::new() }
    }

    /// The ceiling in bytes or operations per second on `threads` threads, the fastest of three runs after a first one;
    /// `None` where this program has no loop for the instruction set.
    pub fn measure(&mut self, ceiling: Ceiling, dtype: DType, threads: usize) -> Option<f64> {
        if ceiling != Ceiling::Peak && self.from.is_empty() {
            self.from = vec![1; WORDS];
            self.to = vec![1; WORDS];
        }
        let part = WORDS.div_ceil(threads);
        let (from, to) = (&self.from, &mut self.to);
        match ceiling {
            Ceiling::Read => [read::<true>, read::<false>]
                .map(|read| rate(8 * WORDS, || on_threads(from.chunks(part), |part| _ = black_box(read(part)))))
                .into_iter()
                .reduce(f64::max),
            Ceiling::Copy => Some(rate(16 * WORDS, || {
                on_threads(from.chunks(part).zip(to.chunks_mut(part)), |(from, to)| {
                    to.copy_from_slice(black_box(from))
                });
            })),
            Ceiling::Peak => {
                let steps = 3_000_000;
                let loops = multiply_adds(dtype, self.isa).into_iter().map(|(run, per_step)| {
                    rate(threads * steps * per_step, || {
                        on_threads(0..threads, |_| {
                            black_box(run(black_box(steps)));
                        });
                    })
                });
                loops.reduce(f64::max)
            }
        }
    }
}

/// `work` per second of `run`. Others on the machine only make it slower, so the fastest run is nearest to the limit.
fn rate(work: usize, mut run: impl FnMut()) -> f64 {
    run();
    let seconds = [(); 3].map(|()| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    work as f64 / seconds.into_iter().fold(f64::INFINITY, f64::min)
}

/// Gives every part a thread of its own; the last one is the caller's.
fn on_threads<T: Send>(parts: impl Iterator<Item = T>, run: impl Fn(T) + Sync) {
    let mut parts: Vec<T> = parts.collect();
    let (run, last) = (&run, parts.pop());
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(move || run(part));
        }
        last.into_iter().for_each(run);
    });
}

/// The sum of `words`. Asking for the lines 2 KiB ahead makes it faster by a fifth on Zen 5 and slower by a fifth on Zen 4,
/// so the ceiling is the faster of the two. In SSE2 by name, so that it does not hang on how much the compiler was asked
/// to optimise this crate: as plain code at `opt-level = 1` it came to 7 GB/s where this comes to 28 (Zen 4).
#[cfg(target_arch = "x86_64")]
fn read<const AHEAD: bool>(words: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    // SAFETY: SSE2 is part of x86-64; a line is 16 words, so both halves of every load are in it; a prefetch reads
    // nothing that the program can see and may name any address.
    unsafe {
        let mut sums = [_mm_setzero_si128(); 8];
        for line in words.chunks_exact(16) {
            let from = line.as_ptr();
            if AHEAD {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(256).cast());
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(264).cast());
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm_add_epi64(*sum, _mm_loadu_si128(from.add(2 * i).cast()));
            }
        }
        let mut halves = [0u64; 2];
        _mm_storeu_si128(
            halves.as_mut_ptr().cast(),
            sums.into_iter().fold(_mm_setzero_si128(), |a, b| _mm_add_epi64(a, b)),
        );
        halves[0].wrapping_add(halves[1])
    }
}

/// The sum of `words`.
#[cfg(not(target_arch = "x86_64"))]
fn read<const AHEAD: bool>(words: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    for line in words.chunks_exact(16) {
        for (sum, word) in sums.iter_mut().zip(line) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// A loop of multiply-adds, given its steps, and the operations of one step.
type MultiplyAdds = (fn(usize) -> f32, usize);

/// The loops that may be the fastest for `dtype` in `isa`: dot products take twice as long as multiply-adds on Sapphire
/// Rapids, as long on Zen 4 and later. None for one that the machine lacks.
#[cfg(target_arch = "x86_64")]
fn multiply_adds(dtype: DType, isa: Isa) -> Vec<MultiplyAdds> {
    // SAFETY: it is handed out only where the machine has AVX512-BF16, which is asked below.
    let dots: MultiplyAdds = (|steps| unsafe { x86::dots(steps) }, x86::SUMS_16 * 16 * 4);
    // SAFETY: as above, with AVX-512.
    let wide: MultiplyAdds = (|steps| unsafe { x86::fmas_16(steps) }, x86::SUMS_16 * 16 * 2);
    // SAFETY: as above, with AVX2, which `Isa` has only together with FMA.
    let narrow: MultiplyAdds = (|steps| unsafe { x86::fmas_8(steps) }, x86::SUMS_8 * 8 * 2);
    match isa {
        isa if !isa.available() => Vec::new(),
        Isa::Avx512Bf16 if dtype == DType::Bf16 => vec![dots, wide],
        Isa::Avx512Bf16 | Isa::Avx512 => vec![wide],
        Isa::Avx2 => vec![narrow],
        _ => Vec::new(),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(_: DType, _: Isa) -> Vec<MultiplyAdds> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    // Steps are counted by hand: this crate is compiled with `opt-level = 1`, where the compiler takes the code of
    // `Range<usize>::next` from a crate that has it already, optimised or not. As a call it kept the sums in memory: a
    // quarter of the peak.
    use std::arch::x86_64::*;

    /// Independent sums: enough to hide the latency of a multiply-add, few enough for the registers.
    pub const SUMS_16: usize = 24;
    pub const SUMS_8: usize = 12;

    /// `steps` times 24 dot products of 16 pairs of bf16.
    ///
    /// # Safety
    /// The machine has avx512f and avx512bf16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn dots(mut steps: usize) -> f32 {
        let zero = _mm512_setzero_ps();
        // SAFETY: both types are 512 bits and any bits are valid.
        let pairs = |v: i32| unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(v)) };
        let (a, b) = (pairs(0x3F80_3F80), pairs(steps as i32));
        let mut sums = [zero; SUMS_16];
        while steps > 0 {
            steps -= 1;
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        _mm512_reduce_add_ps(sums.into_iter().fold(zero, |a, b| _mm512_add_ps(a, b)))
    }

    /// `steps` times 24 fused multiply-adds of 16 f32.
    ///
    /// # Safety
    /// The machine has avx512f.
    #[target_feature(enable = "avx512f")]
    pub fn fmas_16(mut steps: usize) -> f32 {
        let zero = _mm512_setzero_ps();
        let (a, b) = (_mm512_set1_ps(0.5), _mm512_set1_ps(steps as f32));
        let mut sums = [zero; SUMS_16];
        while steps > 0 {
            steps -= 1;
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        _mm512_reduce_add_ps(sums.into_iter().fold(zero, |a, b| _mm512_add_ps(a, b)))
    }

    /// `steps` times 12 fused multiply-adds of 8 f32.
    ///
    /// # Safety
    /// The machine has avx2 and fma.
    #[target_feature(enable = "avx2,fma")]
    pub fn fmas_8(mut steps: usize) -> f32 {
        let (a, b) = (_mm256_set1_ps(0.5), _mm256_set1_ps(steps as f32));
        let mut sums = [_mm256_setzero_ps(); SUMS_8];
        while steps > 0 {
            steps -= 1;
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        _mm256_cvtss_f32(sums.into_iter().fold(_mm256_setzero_ps(), |a, b| _mm256_add_ps(a, b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_ops::{Cpu, Gemm, PackedWeight, gemm_packed};

    #[test]
    fn every_word_is_read_and_every_part_has_a_thread() {
        assert_eq!([read::<true>(&[3; 1600]), read::<false>(&[3; 1600])], [4800; 2]);
        let seen = std::sync::Mutex::new(Vec::new());
        on_threads(0..3, |part| seen.lock().unwrap().push((part, std::thread::current().id())));
        let mut seen = seen.into_inner().unwrap();
        seen.sort_by_key(|s| s.0);
        assert_eq!(seen.iter().map(|s| s.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(seen[0].1 != seen[1].1 && seen[1].1 != seen[2].1 && seen[0].1 != seen[2].1);
    }

    /// Whoever copies reads as much as is written. A loop that the compiler left slow is no ceiling.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build, as what users measure with; ci/nightly runs it")]
    fn reading_is_no_slower_than_the_reads_of_a_copy() {
        let mut ceilings = Ceilings::of(Isa::best());
        let mut pair = || {
            let [read, copy] =
                [Ceiling::Read, Ceiling::Copy].map(|c| ceilings.measure(c, DType::Fp32, 1).expect("a rate"));
            println!("read {read:.3e}, copy {copy:.3e} bytes a second");
            read >= 0.9 * copy / 2.0
        };
        // Others may be at work beside one sample.
        assert!((0..5).any(|_| pair()));
    }

    /// Nothing does more than the peak.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build, as what users measure with; ci/nightly runs it")]
    fn no_product_is_above_the_peak() {
        const N: usize = 512;
        let (x, mut y) = (vec![1f32; N * N], vec![0f32; N * N]);
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).expect("an instruction set of this machine");
            let w = PackedWeight::pack(&cpu, N, N, &x).expect("a matrix");
            let mut ceilings = Ceilings::of(isa);
            let mut pair = || {
                let peak = ceilings.measure(Ceiling::Peak, DType::Fp32, 1)?;
                let product = rate(2 * N * N * N, || {
                    gemm_packed(&cpu, &Gemm::new(N, N, N), &x, &w, None, &mut y).expect("it fits")
                });
                println!("{isa}: peak {peak:.3e}, product {product:.3e} operations a second");
                Some(product <= 1.05 * peak)
            };
            // Others may be at work beside one sample.
            assert!((0..5).any(|_| pair() != Some(false)), "{isa}");
        }
    }

    #[test]
    fn bf16_is_no_slower_than_f32() {
        let mut ceilings = Ceilings::of(Isa::best());
        let mut peak = |dtype| ceilings.measure(Ceiling::Peak, dtype, 1);
        assert_eq!(peak(DType::Fp32).is_some(), Isa::Avx2.available());
        let mut pair = || {
            let (fp32, bf16) = peak(DType::Fp32).zip(peak(DType::Bf16))?;
            println!("fp32 {fp32:.3e}, bf16 {bf16:.3e} operations a second");
            // From the slowest machine with AVX2 to beyond any that is built.
            Some((1e9..1e13).contains(&fp32) && bf16 > 0.7 * fp32)
        };
        // Others may be at work beside one sample.
        assert!((0..5).any(|_| pair() != Some(false)));
    }

    #[test]
    fn a_peak_is_that_of_its_instruction_set() {
        // Operations of one step, by which the loops can be told apart.
        let loops =
            |dtype, isa: Isa| multiply_adds(dtype, isa).into_iter().map(|(_, per_step)| per_step).collect::<Vec<_>>();
        for (isa, fp32, bf16) in [
            (Isa::Scalar, &[][..], &[][..]),
            (Isa::Avx2, &[192], &[192]),
            (Isa::Avx512, &[768], &[768]),
            (Isa::Avx512Bf16, &[768], &[1536, 768]),
        ] {
            let (fp32, bf16) = if isa.available() { (fp32, bf16) } else { (&[][..], &[][..]) };
            assert_eq!((&loops(DType::Fp32, isa)[..], &loops(DType::Bf16, isa)[..]), (fp32, bf16), "{isa}");
        }
        let peak = |isa| Ceilings::of(isa).measure(Ceiling::Peak, DType::Bf16, 1);
        assert_eq!(peak(Isa::Scalar), None);
        if Isa::Avx512Bf16.available() {
            // Half of it or less, also where 512 bits are multiplied in two steps. Others may be at work beside one
            // sample.
            let both = || peak(Isa::Avx2).zip(peak(Isa::Avx512Bf16)).expect("the machine has both");
            let less = |(narrow, most)| narrow < 0.8 * most;
            assert!((0..5).any(|_| less(both())));
        }
    }
}
