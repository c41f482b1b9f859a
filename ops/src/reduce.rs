//! The `lanes` sum: element i goes to lane `i mod 256`, each lane is a chain from +0, and the lanes fold in halves.

use crate::simd::{Kernel, Simd, Storage, load_at, load_two, store_two};

/// Lanes of the sum; belongs to the contract, not to the machine.
const LANES: usize = 256;
/// Elements that are read from memory once and then, where not all lanes fit the registers, again from the first cache.
const TILE: usize = 16 * LANES;

/// How one element enters its lane.
pub trait Step: Copy {
    /// `acc` after the element(s) `x`.
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F;
}

/// The `lanes` sum over `x`. `pad` stands for elements past the end and must leave a lane as it is.
#[inline(always)]
pub fn lane_sum<S: Simd, T: Storage, P: Step>(s: S, x: &[T], pad: T, step: P) -> f32 {
    s.enter(LaneSum { x, pad, step })
}

struct LaneSum<'a, T, P> {
    x: &'a [T],
    pad: T,
    step: P,
}

impl<T: Storage, P: Step> Kernel for LaneSum<'_, T, P> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let LaneSum { x, pad, step } = self;
        let mut lanes = Lanes([0.0; LANES]);
        let blocks = &x[..x.len() - x.len() % LANES];
        lanes.add_blocks(s, blocks, step);
        if T::IS_BF16 && !blocks.is_empty() {
            for two in lanes.0.chunks_exact_mut(2 * S::LANES) {
                let (odd, even) = load_two(s, two, false);
                store_two(s, s.interleave(odd, even), two);
            }
        }
        lanes.add_rest(s, &x[blocks.len()..], pad, step);
        lanes.fold(s, x.len())
    }
}

/// A `lanes` sum of f32 that are made part by part.
pub struct Lanes([f32; LANES]);

impl Lanes {
    /// The sum of nothing.
    #[inline(always)]
    pub fn new() -> Lanes {
        Lanes([0.0; LANES])
    }

    /// The sum whose lanes are these.
    #[inline(always)]
    pub fn of(lanes: [f32; LANES]) -> Lanes {
        Lanes(lanes)
    }

    /// Adds `x` by `step`, for which +0 must leave a lane as it is. The length of `x` is a multiple of 256 unless it is the
    /// last part.
    #[inline(always)]
    pub fn add<S: Simd, P: Step>(&mut self, s: S, x: &[f32], step: P) {
        let (blocks, rest) = x.split_at(x.len() - x.len() % LANES);
        self.add_blocks(s, blocks, step);
        self.add_rest(s, rest, 0.0, step);
    }

    /// Adds two vectors that begin with element `at`, a multiple of their length.
    #[inline(always)]
    pub fn add_two<S: Simd>(&mut self, s: S, at: usize, x: (S::F, S::F)) {
        let lanes = &mut self.0[at % LANES..][..2 * S::LANES];
        let (lane0, lane1) = load_two(s, lanes, false);
        store_two(s, (s.add(lane0, x.0), s.add(lane1, x.1)), lanes);
    }

    /// Adds element `at`.
    #[inline(always)]
    pub fn add_one(&mut self, at: usize, x: f32) {
        self.0[at % LANES] += x;
    }

    /// Adds the products `a[i] * b[i]`, each by an `fma`. Their number is a multiple of 256 unless it is the last part.
    #[inline(always)]
    pub fn add_products<S: Simd, T: Storage>(&mut self, s: S, a: &[f32], b: &[T]) {
        let whole = a.len() - a.len() % LANES;
        for tile in (0..whole).step_by(TILE) {
            let end = whole.min(tile + TILE);
            if S::LANES == 16 {
                sweep_products::<S, T, 8>(s, &a[tile..end], &b[tile..end], &mut self.0);
            } else {
                sweep_products::<S, T, 4>(s, &a[tile..end], &b[tile..end], &mut self.0);
            }
        }
        let (a, b) = (&a[whole..], &b[whole..]);
        for (at, lanes) in (0..a.len()).step_by(S::LANES).zip(self.0.chunks_exact_mut(S::LANES)) {
            // The pad's product -0 leaves every lane as it is, one that is -0 too.
            let (a, b) = (load_at(s, a, at, -0.0), load_at(s, b, at, T::default()));
            let acc = s.fma(a, b, load_at(s, lanes, 0, 0.0));
            // SAFETY: `lanes` holds LANES elements.
            unsafe { s.store(acc, lanes.as_mut_ptr()) };
        }
    }

    #[inline(always)]
    fn add_blocks<S: Simd, T: Storage, P: Step>(&mut self, s: S, blocks: &[T], step: P) {
        // AVX-512 holds all lanes in half its registers; AVX2 holds a quarter of them.
        for tile in blocks.chunks(TILE) {
            if S::LANES == 16 {
                sweep::<S, T, P, 8>(s, tile, step, &mut self.0);
            } else {
                sweep::<S, T, P, 4>(s, tile, step, &mut self.0);
            }
        }
    }

    #[inline(always)]
    fn add_rest<S: Simd, T: Storage, P: Step>(&mut self, s: S, rest: &[T], pad: T, step: P) {
        for (part, lanes) in rest.chunks(S::LANES).zip(self.0.chunks_exact_mut(S::LANES)) {
            let acc = step.step(s, load_at(s, lanes, 0, 0.0), load_at(s, part, 0, pad));
            // SAFETY: `lanes` holds LANES elements.
            unsafe { s.store(acc, lanes.as_mut_ptr()) };
        }
    }

    /// The sum of the `len` elements: `for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h] for l < h`.
    #[inline(always)]
    pub fn fold<S: Simd>(mut self, s: S, len: usize) -> f32 {
        s.enter(Fold { lanes: &mut self.0, len })
    }
}

struct Fold<'a> {
    lanes: &'a mut [f32; LANES],
    len: usize,
}

impl Kernel for Fold<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Fold { lanes, len } = self;
        let mut h = LANES / 2;
        // Lanes without elements are +0. Adding them changes nothing but a -0, which products leave that underflow.
        while h >= len && h > 0 {
            h /= 2;
        }
        // Eight lanes at least: for one, all ways are the same.
        while h >= S::LANES.max(8) {
            for l in (0..h).step_by(S::LANES) {
                let sum = s.add(load_at(s, &lanes[..], l, 0.0), load_at(s, &lanes[..], l + h, 0.0));
                // SAFETY: h is a multiple of S::LANES here, so `l + LANES <= h`.
                unsafe { s.store(sum, lanes[l..][..S::LANES].as_mut_ptr()) };
            }
            h /= 2;
        }
        while h > 0 {
            for l in 0..h {
                lanes[l] += lanes[l + h];
            }
            h /= 2;
        }
        if len < LANES { lanes[0] + 0.0 } else { lanes[0] }
    }
}

/// `acc + x`.
#[derive(Clone, Copy)]
pub struct Add;

impl Step for Add {
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.add(acc, x)
    }
}

/// `acc + x*x`, fused.
#[derive(Clone, Copy)]
pub struct Square;

impl Step for Square {
    #[inline(always)]
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.fma(x, x, acc)
    }
}

/// Adds whole blocks to the lanes, `GROUP` times two vectors of them at a time. Bf16 is taken by pairs: of every two
/// vectors of lanes, the first then holds the odd ones and the second the even ones.
#[inline(always)]
fn sweep<S: Simd, T: Storage, P: Step, const GROUP: usize>(s: S, blocks: &[T], step: P, lanes: &mut [f32; LANES]) {
    let two = 2 * S::LANES;
    for (group, lanes) in lanes.chunks_exact_mut(GROUP * two).enumerate() {
        let mut acc = [(s.splat(0.0), s.splat(0.0)); GROUP];
        for (acc, lanes) in acc.iter_mut().zip(lanes.chunks_exact(two)) {
            *acc = load_two(s, lanes, false);
        }
        for block in blocks.chunks_exact(LANES) {
            let part = &block[group * GROUP * two..][..GROUP * two];
            for (acc, x) in acc.iter_mut().zip(part.chunks_exact(two)) {
                let (x0, x1) = load_two(s, x, T::IS_BF16);
                *acc = (step.step(s, acc.0, x0), step.step(s, acc.1, x1));
            }
        }
        for (acc, lanes) in acc.iter().zip(lanes.chunks_exact_mut(two)) {
            store_two(s, *acc, lanes);
        }
    }
}

/// The same with the products of whole blocks of `a` and `b`, as many elements of both.
#[inline(always)]
fn sweep_products<S: Simd, T: Storage, const GROUP: usize>(s: S, a: &[f32], b: &[T], lanes: &mut [f32; LANES]) {
    let two = 2 * S::LANES;
    for (group, lanes) in lanes.chunks_exact_mut(GROUP * two).enumerate() {
        let mut acc = [(s.splat(0.0), s.splat(0.0)); GROUP];
        for (acc, lanes) in acc.iter_mut().zip(lanes.chunks_exact(two)) {
            *acc = load_two(s, lanes, false);
        }
        for block in (group * GROUP * two..a.len()).step_by(LANES) {
            for (acc, at) in acc.iter_mut().zip((block..).step_by(two)) {
                let ((a0, a1), (b0, b1)) = (load_two(s, &a[at..][..two], false), load_two(s, &b[at..][..two], false));
                *acc = (s.fma(a0, b0, acc.0), s.fma(a1, b1, acc.1));
            }
        }
        for (acc, lanes) in acc.iter().zip(lanes.chunks_exact_mut(two)) {
            store_two(s, *acc, lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, Isa};

    struct Products<'a>(&'a [f32], &'a [f32]);

    impl Kernel for Products<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            let mut lanes = Lanes::new();
            lanes.add_products(s, self.0, self.1);
            lanes.fold(s, self.0.len())
        }
    }

    /// More elements than two tiles hold.
    #[test]
    fn products_of_a_long_row() {
        let n = 2 * TILE + LANES + 3;
        let values = |step: usize| (0..n).map(|i| ((i * step % 1009) as f32 - 504.0) / 67.0).collect::<Vec<f32>>();
        let (a, b) = (values(7919), values(104_729));
        let mut lanes = [0f32; LANES];
        (0..n).for_each(|i| lanes[i % LANES] = a[i].mul_add(b[i], lanes[i % LANES]));
        let mut h = LANES / 2;
        while h > 0 {
            (0..h).for_each(|lane| lanes[lane] += lanes[lane + h]);
            h /= 2;
        }
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            assert_eq!(cpu.dispatch(Products(&a, &b)).to_bits(), lanes[0].to_bits(), "{isa}");
        }
    }
}
