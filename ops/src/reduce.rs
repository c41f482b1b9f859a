//! The `lanes` sum: element i goes to lane `i mod 256`, each lane is a chain from +0, and the lanes fold in halves.

use crate::profile::IEEE;
use crate::simd::{Kernel, MAX_LANES, OnLine, Simd, Storage, load_at, load_two, store_two};

/// Lanes of the sum; belongs to the contract, not to the machine.
pub(crate) const LANES: usize = IEEE.lanes;
/// Elements that are read from memory once and then, where not all lanes fit the registers, again from L1.
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
#[repr(align(64))]
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

    /// Makes ready for another sum, of `len` elements that are not -0, which come by [`Lanes::add_next`] from the first to the
    /// last multiple of their length.
    #[inline(always)]
    pub fn begin(&mut self, len: usize) {
        // What is there is put away by the first 256 elements.
        if len < LANES {
            self.0 = [0.0; LANES];
        }
    }

    /// [`Lanes::add_two`] after [`Lanes::begin`].
    #[inline(always)]
    pub fn add_next<S: Simd>(&mut self, s: S, at: usize, x: (S::F, S::F)) {
        if at < LANES {
            store_two(s, x, &mut self.0[at..][..2 * S::LANES]);
        } else {
            self.add_two(s, at, x);
        }
    }

    /// Adds element `at`, with `pairs` to the lane from which [`Lanes::fold_pairs`] takes it.
    #[inline(always)]
    pub fn add_one<S: Simd>(&mut self, _: S, at: usize, x: f32, pairs: bool) {
        self.0[place::<S>(at, pairs)] += x;
    }

    /// The same, with `sum` as the lane of element `at`.
    #[inline(always)]
    pub fn with<S: Simd>(&self, _: S, at: usize, sum: f32, pairs: bool) -> Lanes {
        let mut lanes = self.0;
        lanes[place::<S>(at, pairs)] = sum;
        Lanes(lanes)
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

    /// The sum of the `len` elements: `for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h] for l < h`. The
    /// lanes are used up.
    #[inline(always)]
    pub fn fold<S: Simd>(&mut self, s: S, len: usize) -> f32 {
        s.enter(Fold::<false> { lanes: &mut self.0, len })
    }

    /// The same where every two vectors that came were the elements of odd and of even index.
    #[inline(always)]
    pub fn fold_pairs<S: Simd>(&mut self, s: S, len: usize) -> f32 {
        s.enter(Fold::<true> { lanes: &mut self.0, len })
    }
}

/// Where the lane of element `at` stands, with `pairs` where [`Lanes::fold_pairs`] takes it from.
#[inline(always)]
fn place<S: Simd>(at: usize, pairs: bool) -> usize {
    let (i, half) = (at % (2 * S::LANES), if at % 2 == 1 { 0 } else { S::LANES });
    (if pairs { at - i + half + i / 2 } else { at }) % LANES
}

/// With `PAIRS` every two vectors that came were the elements of odd and of even index.
struct Fold<'a, const PAIRS: bool> {
    lanes: &'a mut [f32; LANES],
    len: usize,
}

impl<const PAIRS: bool> Kernel for Fold<'_, PAIRS> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Fold { lanes, len } = self;
        let (mut h, mut pairs) = (LANES / 2, PAIRS);
        // Lanes without elements are +0. Adding them changes nothing but a -0, which products leave that underflow.
        while h >= len && h > 0 {
            h /= 2;
        }
        if h == LANES / 2 {
            // Three halvings at once, in registers.
            for l in (0..LANES / 8).step_by(S::LANES) {
                let even = s.add(halved(s, lanes, l), halved(s, lanes, l + LANES / 4));
                let odd = s.add(halved(s, lanes, l + LANES / 8), halved(s, lanes, l + LANES * 3 / 8));
                // SAFETY: the range holds S::LANES elements.
                unsafe { s.store(s.add(even, odd), lanes[l..][..S::LANES].as_mut_ptr()) };
            }
            h = LANES / 16;
        }
        loop {
            if pairs && h <= S::LANES {
                // From here on halves of two vectors meet, which must be in their order.
                let two = &mut lanes[..2 * S::LANES];
                let (odd, even) = load_two(s, two, false);
                store_two(s, s.interleave(odd, even), two);
                pairs = false;
            }
            if h == 0 {
                break;
            }
            // Eight lanes at least: for one, all ways are the same.
            if h >= S::LANES.max(8) {
                for l in (0..h).step_by(S::LANES) {
                    let sum = s.add(load_at(s, &lanes[..], l, 0.0), load_at(s, &lanes[..], l + h, 0.0));
                    // SAFETY: h is a multiple of S::LANES here, so `l + LANES <= h`.
                    unsafe { s.store(sum, lanes[l..][..S::LANES].as_mut_ptr()) };
                }
            // Eight and four of a longer vector stand by themselves: of a loop of any length the compiler would make masked stores.
            } else if h == 8 {
                for l in 0..8 {
                    lanes[l] += lanes[l + 8];
                }
            } else if h == 4 && !pairs {
                let [a, b, c, d, e, f, g, h] = *lanes.first_chunk().expect("there are more");
                lanes[0] = ((a + e) + (c + g)) + ((b + f) + (d + h));
                break;
            } else {
                for l in 0..h {
                    lanes[l] += lanes[l + h];
                }
            }
            h /= 2;
        }
        if len < LANES { lanes[0] + 0.0 } else { lanes[0] }
    }
}

/// Eight `lanes` sums of [`EightSums::LEN`] elements each, none of them -0, by pairs: every two vectors are the elements of odd and
/// of even index. With two elements to a lane, additions that stay in registers are half of what is done to lanes, and
/// last halvings side by side need not wait for each other.
#[repr(align(64))]
pub struct EightSums([[f32; LANES / 2]; 8]);

impl EightSums {
    /// How many elements each sum has.
    pub const LEN: usize = 2 * LANES;

    /// Room for them.
    #[inline(always)]
    pub fn new() -> EightSums {
        EightSums([[0.0; LANES / 2]; 8])
    }

    /// The elements of sum `of` that begin with `at`, `at + 256`, `at + 128` and `at + 384`, two vectors each: two elements of each
    /// lane, and the first halving.
    #[inline(always)]
    pub fn put<S: Simd>(&mut self, s: S, of: usize, at: usize, [x0, x1, x2, x3]: [(S::F, S::F); 4]) {
        let odd = s.add(s.add(x0.0, x1.0), s.add(x2.0, x3.0));
        let even = s.add(s.add(x0.1, x1.1), s.add(x2.1, x3.1));
        store_two(s, (odd, even), &mut self.0[of][at..][..2 * S::LANES]);
    }

    /// The sums, once all their elements were put; these are used up.
    #[inline(always)]
    pub fn fold<S: Simd>(&mut self, s: S) -> [f32; 8] {
        s.enter(FoldEight(&mut self.0))
    }
}

struct FoldEight<'a>(&'a mut [[f32; LANES / 2]; 8]);

impl Kernel for FoldEight<'_> {
    type Output = [f32; 8];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; 8] {
        let two = 2 * S::LANES;
        for lanes in self.0.iter_mut() {
            // Two halvings at once, in registers.
            for l in (0..LANES / 8).step_by(S::LANES) {
                let even = s.add(load_at(s, lanes, l, 0.0), load_at(s, lanes, l + LANES / 4, 0.0));
                let odd = s.add(load_at(s, lanes, l + LANES / 8, 0.0), load_at(s, lanes, l + LANES * 3 / 8, 0.0));
                // SAFETY: the range holds S::LANES elements.
                unsafe { s.store(s.add(even, odd), lanes[l..][..S::LANES].as_mut_ptr()) };
            }
            let mut h = LANES / 16;
            while h >= two {
                for l in (0..h).step_by(S::LANES) {
                    let sum = s.add(load_at(s, lanes, l, 0.0), load_at(s, lanes, l + h, 0.0));
                    // SAFETY: as above.
                    unsafe { s.store(sum, lanes[l..][..S::LANES].as_mut_ptr()) };
                }
                h /= 2;
            }
        }
        // The lanes that are left, of odd index and then of even index, those of the eight sums side by side.
        let (OnLine(left), count) = (&mut OnLine([[0f32; 8]; 2 * MAX_LANES]), S::LANES.min(8));
        for at in [0, S::LANES] {
            for first in (0..8).step_by(count) {
                let rows = std::array::from_fn(|i| self.0[first + i % count].as_ptr().cast());
                let to = left[at..][..S::LANES].as_flattened_mut()[first..].as_mut_ptr().cast();
                // SAFETY: each row has the S::LANES words from `at` on, and `to` room for S::LANES times eight words, less `first`.
                unsafe { s.transpose::<false>(&rows, at, count, to, 8) };
            }
            let mut h = S::LANES / 2;
            while h > 0 {
                for l in at..at + h {
                    let above = left[l + h];
                    for (lane, above) in left[l].iter_mut().zip(above) {
                        *lane += above;
                    }
                }
                h /= 2;
            }
        }
        let mut sums = left[S::LANES];
        for (even, odd) in sums.iter_mut().zip(left[0]) {
            *even += odd;
        }
        sums
    }
}

/// Lanes from `l` on, each with that half of all lanes above it.
#[inline(always)]
fn halved<S: Simd>(s: S, lanes: &[f32; LANES], l: usize) -> S::F {
    s.add(load_at(s, lanes, l, 0.0), load_at(s, lanes, l + LANES / 2, 0.0))
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
    // Hidden, or all groups become one piece, which puts sums aside in each step.
    let groups = std::hint::black_box(LANES / (GROUP * two));
    for (group, lanes) in lanes.chunks_exact_mut(GROUP * two).enumerate().take(groups) {
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

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::{Cpu, Isa};

    /// The fold in halves, as NUMERICS writes it.
    fn folded(mut lane: [f32; LANES]) -> f32 {
        let mut h = LANES / 2;
        while h > 0 {
            (0..h).for_each(|l| lane[l] += lane[l + h]);
            h /= 2;
        }
        lane[0]
    }

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
    pub(crate) fn products_of_a_long_row() {
        let n = 2 * TILE + LANES + 3;
        let values = |step: usize| (0..n).map(|i| ((i * step % 1009) as f32 - 504.0) / 67.0).collect::<Vec<f32>>();
        let (a, b) = (values(7919), values(104_729));
        let mut lanes = [0f32; LANES];
        (0..n).for_each(|i| lanes[i % LANES] = a[i].mul_add(b[i], lanes[i % LANES]));
        let expected = folded(lanes);
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            assert_eq!(cpu.dispatch(Products(&a, &b)).to_bits(), expected.to_bits(), "{isa}");
        }
    }

    /// Products that underflow leave -0 in their lanes; a lane without elements makes the sum +0.
    pub(crate) fn the_sign_of_a_zero() {
        for (n, expected) in [(1, 0.0f32), (LANES - 1, 0.0), (LANES, -0.0), (LANES + 1, -0.0)] {
            let (a, b) = (vec![-1e-30f32; n], vec![1e-30f32; n]);
            for isa in Isa::of_machine() {
                let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
                assert_eq!(cpu.dispatch(Products(&a, &b)).to_bits(), expected.to_bits(), "{isa}, {n}");
            }
        }
    }

    /// The sum of `x` in lanes that another sum has used, with pairs of vectors in turn or not.
    struct Next<'a>(&'a mut Lanes, &'a [f32], bool);

    impl Kernel for Next<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            let Next(lanes, x, pairs) = self;
            let (two, n) = (2 * S::LANES, x.len());
            lanes.begin(n);
            let whole = n - n % two;
            for at in (0..whole).step_by(two) {
                let mut part = [0f32; 2 * crate::simd::MAX_LANES];
                for (i, x) in x[at..][..two].iter().enumerate() {
                    part[if pairs { i / 2 + if i % 2 == 1 { 0 } else { S::LANES } } else { i }] = *x;
                }
                lanes.add_next(s, at, load_two(s, &part[..two], false));
            }
            (whole..n).for_each(|at| lanes.add_one(s, at, x[at], pairs));
            if pairs { lanes.fold_pairs(s, n) } else { lanes.fold(s, n) }
        }
    }

    /// The eight sums of `x`.
    struct Eight<'a>(&'a [f32]);

    impl Kernel for Eight<'_> {
        type Output = [f32; 8];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; 8] {
            let (two, mut sums) = (2 * S::LANES, EightSums::new());
            for (of, x) in self.0.chunks_exact(EightSums::LEN).enumerate() {
                for at in (0..LANES / 2).step_by(two) {
                    let mut parts = [(s.splat(0.0), s.splat(0.0)); 4];
                    for (part, from) in parts.iter_mut().zip([at, at + 256, at + 128, at + 384]) {
                        let mut of_pairs = [0f32; 2 * MAX_LANES];
                        for (i, x) in x[from..][..two].iter().enumerate() {
                            of_pairs[i / 2 + if i % 2 == 1 { 0 } else { S::LANES }] = *x;
                        }
                        *part = load_two(s, &of_pairs[..two], false);
                    }
                    sums.put(s, of, at, parts);
                }
            }
            sums.fold(s)
        }
    }

    pub(crate) fn eight_sums_are_those_of_lanes() {
        // Halves of lanes cancel, so that what was rounded before stays in sight.
        let sign = |i: usize| if (i / (LANES / 2)).is_multiple_of(2) { 1.0 } else { -1.0 };
        let x: Vec<f32> = (0..8 * EightSums::LEN).map(|i| sign(i) * ((i * 389 % 6007) as f32 / 37.0 + 0.01)).collect();
        let mut expected = [0f32; 8];
        for (expected, x) in expected.iter_mut().zip(x.chunks(EightSums::LEN)) {
            let mut lane = [0f32; LANES];
            x.iter().enumerate().for_each(|(i, x)| lane[i % LANES] += x);
            *expected = folded(lane);
        }
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            assert_eq!(cpu.dispatch(Eight(&x)).map(f32::to_bits), expected.map(f32::to_bits), "{isa}");
        }
    }

    pub(crate) fn lanes_are_used_again_and_by_pairs() {
        let x: Vec<f32> = (0..3 * LANES + 41).map(|i| (i * 389 % 601) as f32 / 37.0 + 0.01).collect();
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            for len in [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 100, 128, 129, 200, 255, 256, 257, 512, x.len()] {
                let mut lane = [0f32; LANES];
                (0..len).for_each(|i| lane[i % LANES] += x[i]);
                let expected = folded(lane);
                for pairs in [false, true] {
                    let mut lanes = Lanes::of([7.0; LANES]);
                    let sum = cpu.dispatch(Next(&mut lanes, &x[..len], pairs));
                    assert_eq!(sum.to_bits(), expected.to_bits(), "{isa}, {len} elements, pairs {pairs}");
                }
            }
        }
    }
}
