//! [`Tile`](super::Tile)s of a panel of integers with scales ([`crate::pack::quantized`]), with `VDPBF16PS`: order and rounding are
//! those of the pairs it stands for.

use super::{Order, Right, Tile};
use crate::Cpu;
use crate::pack::quantized::{Put, QuantizedPanel, STRETCH, UNIT, ask};
use crate::pack::{PANEL, as_floats};
use crate::simd::words::{Kernel512, Simd512};
use std::mem::MaybeUninit;

/// The panel as products read it where it is not quantized: pairs or f32.
pub fn unpack_quantized<'s>(cpu: &Cpu, panel: &QuantizedPanel, slot: &'s mut [u32]) -> Right<'s> {
    let words = panel.unpack(cpu, slot);
    if panel.pairs() { Right::Vnni(words, PANEL) } else { Right::F32(as_floats(words), PANEL) }
}

/// A checked tile whose right operand is `panel`, in which no weight is subnormal.
pub struct QuantizedHeights<'t, 'a> {
    pub tile: &'t Tile<'a, u32>,
    pub panel: &'t QuantizedPanel<'a>,
    /// Its results.
    pub out: *mut f32,
}

impl Kernel512 for QuantizedHeights<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let QuantizedHeights { tile, panel, out } = self;
        let Order::Tree(bounds) = tile.order else { panic!("dot_tile sums trees") };
        let (step, out_stride) = (tile.left.step, tile.out_stride);
        let whole = bounds.iter().all(|bound| bound.is_multiple_of(UNIT));
        assert!(tile.left.row_stride == 1 && tile.columns == PANEL && panel.pairs() && whole, "whole units of pairs");
        let mut row = 0;
        while row < tile.rows {
            let (left, out) = (tile.left.data.as_ptr().wrapping_add(row), out.wrapping_add(row * out_stride));
            macro_rules! rows {
                ($rows:literal, $side:literal) => {{
                    let kernel = QuantizedChains::<$rows, $side> { panel, left, step, bounds, out, out_stride };
                    // SAFETY: `Tile::check` bounded every (row, step) of the whole tile, and the panel's k.
                    unsafe { s.call(kernel) };
                    $rows
                }};
            }
            row += match tile.rows - row {
                8.. => rows!(8, 1),
                4.. => rows!(4, 1),
                2.. => rows!(2, 1),
                _ if bounds.len() % 2 == 1 => rows!(1, 2),
                _ => rows!(1, 1),
            };
        }
    }
}

/// The sums of `ROWS` rows and a whole panel, of `SIDE` segments at a time: one chain alone waits for its own sums.
struct QuantizedChains<'a, const ROWS: usize, const SIDE: usize> {
    panel: &'a QuantizedPanel<'a>,
    /// `ROWS` words at every pair of k below the end of the bounds.
    left: *const u32,
    /// The distance from one pair to the next.
    step: usize,
    /// They end within the panel's k and are whole units; so many segments are a multiple of `SIDE`.
    bounds: &'a [usize],
    /// `ROWS` rows of 32.
    out: *mut f32,
    /// The distance between them.
    out_stride: usize,
}

/// The pairs of a stretch.
#[repr(align(64))]
struct Pairs([MaybeUninit<u32>; STRETCH]);

/// Where the pairs of a stretch are written, of which this is the first.
struct To {
    first: usize,
    pairs: *mut u32,
}

impl<S: Simd512> Put<S> for To {
    #[inline(always)]
    unsafe fn put(&mut self, s: S, pair: usize, column: usize, earlier: S::F, later: S::F) {
        // SAFETY: the caller's promise; a stretch has room, and a kernel of pairs runs where the machine has `VDPBF16PS`.
        unsafe {
            let to = self.pairs.add((pair - self.first) * PANEL + column);
            s.storeu_si512(to, s.pairs_of_normals(earlier, later));
        }
    }
}

impl<const ROWS: usize, const SIDE: usize> QuantizedChains<'_, ROWS, SIDE> {
    /// Adds the products of pair `pair` of k, which stands at `right`.
    ///
    /// # Safety
    /// It is below the end of the bounds, and the machine has `VDPBF16PS`.
    #[inline(always)]
    unsafe fn add<S: Simd512>(&self, s: S, sums: &mut [[S::F; 2]; ROWS], pair: usize, right: *const u32) {
        // SAFETY: the caller's promise.
        unsafe {
            let right = [s.loadu_si512(right), s.loadu_si512(right.add(16))];
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = s.set1_epi32(*self.left.add(pair * self.step + r) as i32);
                *sums = [s.dpbf16_ps(sums[0], x, right[0]), s.dpbf16_ps(sums[1], x, right[1])];
            }
        }
    }
}

impl<const ROWS: usize, const SIDE: usize> Kernel512 for QuantizedChains<'_, ROWS, SIDE> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let QuantizedChains { panel, bounds, out, out_stride, .. } = self;
        let mut room = [const { Pairs([MaybeUninit::uninit(); STRETCH]) }; SIDE];
        let mut pairs = [std::ptr::null_mut::<u32>(); SIDE];
        pairs.iter_mut().zip(&mut room).for_each(|(pairs, room)| *pairs = room.0.as_mut_ptr().cast());
        // As in `fma_chains`.
        let mut stack = [[[MaybeUninit::<S::F>::uninit(); 2]; ROWS]; 3];
        let segments = bounds.len() - 1;
        for first in (0..segments).step_by(SIDE) {
            let mut live = [[[s.splat(0.0); 2]; ROWS]; SIDE];
            let units = |i: usize| bounds[i] / UNIT..bounds[i + 1] / UNIT;
            let mut stretches = [0; SIDE].map(|_| panel.stretches(0..0));
            (0..SIDE).for_each(|i| stretches[i] = panel.stretches(units(first + i)));
            loop {
                // The first segments are as long as the later ones, or longer.
                let mut counts = [0; SIDE];
                let mut firsts = [0; SIDE];
                let mut next = [std::ptr::null(); SIDE];
                let mut of_pair = 0;
                for i in 0..SIDE {
                    let Some(stretch) = stretches[i].next() else { continue };
                    (counts[i], firsts[i]) = (stretch.units.len() * UNIT / 2, stretch.units.start * UNIT / 2);
                    (next[i], of_pair) = panel.integers(stretch.units.start);
                    // SAFETY: the bounds end within the panel's k. What is expanded waits for nothing, so that its instructions fill
                    // the time in which sums wait for themselves.
                    unsafe { panel.expand(s, &stretch, &mut To { first: firsts[i], pairs: pairs[i] }) };
                }
                let most = counts.into_iter().max().unwrap_or(0);
                if most == 0 {
                    break;
                }
                // A copy that lives in registers while the loops run.
                let mut sums = live;
                let all = counts.into_iter().min().unwrap_or(0);
                // SAFETY: these pairs were written, and are below the end of the bounds.
                unsafe {
                    for pair in 0..all {
                        for i in 0..SIDE {
                            ask(next[i].wrapping_add(pair * of_pair));
                            self.add(s, &mut sums[i], firsts[i] + pair, pairs[i].add(pair * PANEL));
                        }
                    }
                    for i in 0..SIDE {
                        for pair in all..counts[i] {
                            self.add(s, &mut sums[i], firsts[i] + pair, pairs[i].add(pair * PANEL));
                        }
                    }
                }
                live = sums;
            }
            for (i, live) in (first..).zip(&mut live) {
                let mut level = 0;
                while i >> level & 1 == 1 {
                    for (live, earlier) in live.iter_mut().flatten().zip(stack[level].iter().flatten()) {
                        // SAFETY: a set bit of i says that the subtree of its level has been written.
                        *live = s.add(unsafe { earlier.assume_init() }, *live);
                    }
                    level += 1;
                }
                for (r, live) in live.iter().enumerate() {
                    for (v, &live) in live.iter().enumerate() {
                        if i + 1 < segments {
                            stack[level][r][v].write(live);
                        } else {
                            // SAFETY: the results have their place.
                            unsafe { s.store(live, out.add(r * out_stride + v * 16)) };
                        }
                    }
                }
            }
        }
    }
}
