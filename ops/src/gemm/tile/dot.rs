//! [`Tile`]s of pairs of bf16 with `VDPBF16PS`.

// Row and vector numbers index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use super::dictionary::{DictionaryChains, DictionaryRow, Unpack};
use super::quantized::QuantizedHeights;
use super::{Order, Right, TILE_ROWS, Tile};
use crate::Cpu;
use crate::pack::PANEL;
use crate::pack::dictionary::DictionaryPanel;
use crate::simd::prefetch::{prefetch, prefetch_second};
use crate::simd::words::{Kernel512, Simd512};
use std::mem::MaybeUninit;

/// Runs `tile` with `VDPBF16PS`; both operands are pairs, and `cpu` [has it](crate::Isa::has_dot).
pub fn dot_tile(cpu: &Cpu, tile: Tile<'_, u32>) {
    tile.check(true);
    // By reference: attention's tiles are small, and a copy of their description is felt.
    let out = tile.out.as_mut_ptr();
    let tile = &tile;
    // SAFETY: the tile is checked.
    unsafe {
        match &tile.right {
            Right::Vnni(data, stride) => cpu.dispatch_dot(Heights { tile, b: (data.as_ptr(), *stride), out }),
            Right::Dictionary(coded) => cpu.dispatch_dot(DictionaryHeights { tile, coded, out }),
            Right::Quantized(panel) => cpu.dispatch_dot(QuantizedHeights { tile, panel, out }),
            _ => panic!("dot_tile takes pairs"),
        }
    }
}

/// [`dot_tile`] of [`TILE_ROWS`] rows and a coded panel, whose pairs are left in `slot` as [`Right::Vnni`] has them.
pub fn dot_unpacking(cpu: &Cpu, tile: Tile<'_, u32>, slot: &mut [u32]) {
    let Right::Dictionary(coded) = tile.right else { panic!("only coded panels are unpacked") };
    let end = tile.order.end().div_ceil(2);
    assert!(tile.rows == TILE_ROWS && end == coded.pairs() && slot.len() >= end * PANEL);
    tile.check(true);
    let kernel = DictionaryChains::<TILE_ROWS, true> {
        coded: &coded,
        left: tile.left.data.as_ptr(),
        step: tile.left.step,
        bounds: coded_bounds(&tile),
        out: tile.out.as_mut_ptr(),
        out_stride: tile.out_stride,
        kept: slot.as_mut_ptr(),
    };
    // SAFETY: the tile is checked, its bounds too, and `slot` has room for all pairs.
    unsafe { cpu.dispatch_dot(kernel) };
}

/// The pairs of a coded panel, as [`Right::Vnni`] has them; `cpu` [reads](crate::Isa::reads_coded) coded panels.
pub fn unpack<'s>(cpu: &Cpu, coded: &DictionaryPanel, slot: &'s mut [u32]) -> Right<'s> {
    assert!(slot.len() >= coded.pairs() * PANEL);
    if !cpu.isa().has_dot() {
        cpu.dispatch(Unpack { coded, slot });
        return Right::Vnni(slot, PANEL);
    }
    let bounds = [0, 2 * coded.pairs()];
    // No rows: what is left is the pairs.
    let (left, out, kept) = (std::ptr::null(), std::ptr::null_mut(), slot.as_mut_ptr());
    let kernel = DictionaryChains::<0, true> { coded, left, step: 0, bounds: &bounds, out, out_stride: 0, kept };
    // SAFETY: the bounds are the panel's, and `slot` has room for all pairs.
    unsafe { cpu.dispatch_dot(kernel) };
    Right::Vnni(slot, PANEL)
}

/// A checked tile whose right operand is pairs, `b`.
struct Heights<'t, 'a> {
    tile: &'t Tile<'a, u32>,
    b: (*const u32, usize),
    /// Its results.
    out: *mut f32,
}

impl Kernel512 for Heights<'_, '_> {
    type Output = ();
    /// Cuts the rows into heights the registers hold.
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let Heights { tile, b, out } = self;
        let mut row = 0;
        while row < tile.rows {
            let left = tile.rows - row;
            // Without steps the left operand is empty and never read.
            let a = tile.left.data.as_ptr().wrapping_add(row * tile.left.row_stride);
            let out = out.wrapping_add(row * tile.out_stride);
            let adjacent = tile.left.row_stride == 1;
            macro_rules! chains {
                ($rows:literal, $vectors:literal, $adjacent:literal, $column:expr) => {
                    s.call(Chains::<$rows, $vectors, $adjacent> { tile, a, b, column: $column, out: out.add($column) })
                };
            }
            macro_rules! rows {
                ($rows:literal) => {{
                    let mut column = 0;
                    // SAFETY: `Tile::check` bounded every (row, step, column) of the whole tile.
                    unsafe {
                        while column + 32 <= tile.columns {
                            match adjacent {
                                true => chains!($rows, 2, true, column),
                                false => chains!($rows, 2, false, column),
                            }
                            column += 32;
                        }
                        if column < tile.columns {
                            match adjacent {
                                true => chains!($rows, 1, true, column),
                                false => chains!($rows, 1, false, column),
                            }
                        }
                    }
                    $rows
                }};
            }
            row += match left {
                16 => rows!(8),
                12.. => rows!(12),
                8.. => rows!(8),
                4.. => rows!(4),
                2.. => rows!(2),
                _ => match tile.order {
                    Order::Tree(bounds) if bounds.len() == 9 && tile.columns == PANEL => {
                        // SAFETY: as above.
                        unsafe { s.call(Row { tile, a, b, bounds, out }) };
                        1
                    }
                    _ => rows!(1),
                },
            };
        }
    }
}

/// The segments of a tile whose right operand is coded, as [`DictionaryChains`] takes them.
fn coded_bounds<'a>(tile: &Tile<'a, u32>) -> &'a [usize] {
    let Order::Tree(bounds) = tile.order else { panic!("dot_tile sums trees") };
    let inner = &bounds[..bounds.len() - 1];
    assert!(
        tile.left.row_stride == 1
            && tile.columns == PANEL
            && inner.iter().all(|bound| bound % 4 == 0 || *bound == tile.order.end())
    );
    bounds
}

/// A checked tile whose right operand is `coded`.
struct DictionaryHeights<'t, 'a> {
    tile: &'t Tile<'a, u32>,
    coded: &'t DictionaryPanel<'a>,
    /// Its results.
    out: *mut f32,
}

impl Kernel512 for DictionaryHeights<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let DictionaryHeights { tile, coded, out } = self;
        let bounds = coded_bounds(tile);
        let mut row = 0;
        while row < tile.rows {
            let left = tile.left.data.as_ptr().wrapping_add(row);
            let out = out.wrapping_add(row * tile.out_stride);
            macro_rules! rows {
                ($rows:literal) => {{
                    let (step, out_stride, kept) = (tile.left.step, tile.out_stride, std::ptr::null_mut());
                    let kernel = DictionaryChains::<$rows, false> { coded, left, step, bounds, out, out_stride, kept };
                    // SAFETY: `Tile::check` bounded every (row, step) of the whole tile, and the panel's k.
                    unsafe { s.call(kernel) };
                    $rows
                }};
            }
            row += match tile.rows - row {
                16 => rows!(8),
                12.. => rows!(12),
                8.. => rows!(8),
                4.. => rows!(4),
                2.. => rows!(2),
                _ if bounds.len() % 2 == 1 && tile.left.step == 1 => {
                    // SAFETY: as above.
                    unsafe { s.call(DictionaryRow { coded, left, bounds, out }) };
                    1
                }
                _ => rows!(1),
            };
        }
    }
}

/// One row of a whole tree: four segments at a time, because one chain alone waits for its own sums.
#[derive(Clone, Copy)]
struct Row<'t, 'a> {
    /// Checked.
    tile: &'t Tile<'a, u32>,
    /// Its row.
    a: *const u32,
    /// Its right operand and the distance between pairs of k.
    b: (*const u32, usize),
    /// Nine of them.
    bounds: &'a [usize],
    /// Its row of the results.
    out: *mut f32,
}

impl Row<'_, '_> {
    /// Adds the products of pair `at` of k.
    ///
    /// # Safety
    /// `at` is below the end of the bounds, and the machine has `VDPBF16PS`.
    #[inline(always)]
    unsafe fn add<S: Simd512>(self, s: S, sums: &mut [S::F; 2], at: usize) {
        // SAFETY: the caller's promise; `Tile::check` bounded every step below the order's end.
        unsafe {
            let right = self.b.0.add(at * self.b.1);
            let x = s.set1_epi32(*self.a.add(at * self.tile.left.step) as i32);
            sums[0] = s.dpbf16_ps(sums[0], x, s.loadu_si512(right));
            sums[1] = s.dpbf16_ps(sums[1], x, s.loadu_si512(right.add(16)));
        }
    }
}

impl Kernel512 for Row<'_, '_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let Row { bounds, out, .. } = self;
        let zero = s.splat(0.0);
        let mut sums = [[zero; 2]; 8];
        for half in 0..2 {
            let first: [usize; 4] = std::array::from_fn(|i| bounds[4 * half + i].div_ceil(2));
            let len: [usize; 4] = std::array::from_fn(|i| bounds[4 * half + i + 1].div_ceil(2) - first[i]);
            let shared = len.into_iter().min().unwrap_or(0);
            let mut live = [[zero; 2]; 4];
            for at in 0..shared {
                for i in 0..4 {
                    // SAFETY: `Tile::check` bounded every step below the order's end.
                    unsafe { self.add(s, &mut live[i], first[i] + at) };
                }
            }
            for i in 0..4 {
                for at in shared..len[i] {
                    // SAFETY: as above.
                    unsafe { self.add(s, &mut live[i], first[i] + at) };
                }
                sums[4 * half + i] = live[i];
            }
        }
        for v in 0..2 {
            let first = s.add(s.add(sums[0][v], sums[1][v]), s.add(sums[2][v], sums[3][v]));
            let last = s.add(s.add(sums[4][v], sums[5][v]), s.add(sums[6][v], sums[7][v]));
            // SAFETY: `Tile::check` bounded the output.
            unsafe { s.store(s.add(first, last), out.add(16 * v)) };
        }
    }
}

/// The prefetch distance of the weights of few rows, in bytes.
const STREAMED: usize = 16384;

/// The innermost loops: `ROWS` rows and `VECTORS` vectors of columns.
struct Chains<'t, 'a, const ROWS: usize, const VECTORS: usize, const ADJACENT: bool> {
    /// Checked.
    tile: &'t Tile<'a, u32>,
    /// The first of its rows.
    a: *const u32,
    /// Its right operand and the distance between pairs of k.
    b: (*const u32, usize),
    /// The first of its columns.
    column: usize,
    /// Their place in the results.
    out: *mut f32,
}

impl<const ROWS: usize, const VECTORS: usize, const ADJACENT: bool> Kernel512
    for Chains<'_, '_, ROWS, VECTORS, ADJACENT>
{
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) {
        let Chains { tile, a, b: (b, stride), column, out } = self;
        let zero = s.splat(0.0);
        let row_stride = if ADJACENT { 1 } else { tile.left.row_stride };
        let step = tile.left.step;
        // As in `fma_chains`.
        let mut stack = [[[MaybeUninit::<S::F>::uninit(); VECTORS]; ROWS]; 3];
        let whole = [0, tile.order.end()];
        let (bounds, goes_on) = match tile.order {
            Order::Tree(bounds) => (bounds, false),
            Order::Chain(_) => (&whole[..], true),
        };
        let next = step * tile.order.end().div_ceil(2);
        let segments = bounds.len() - 1;
        for i in 0..segments {
            let mut sums = [[zero; VECTORS]; ROWS];
            if goes_on {
                for r in 0..ROWS {
                    for v in 0..VECTORS {
                        // SAFETY: `Tile::check` bounded the output.
                        sums[r][v] = unsafe { s.load(out.add(r * tile.out_stride + v * 16)) };
                    }
                }
            }
            let (from, to) = (bounds[i].div_ceil(2), bounds[i + 1].div_ceil(2));
            // SAFETY: `Tile::check` bounded every step below the order's end, for all rows and columns.
            unsafe {
                // A copy that lives in registers while the loop runs.
                let mut live = sums;
                for at in from..to {
                    let right = b.add(at * stride + column);
                    let first = s.loadu_si512(right);
                    let last = match VECTORS {
                        2 => s.loadu_si512(right.add(16)),
                        _ => first,
                    };
                    let left = a.add(at * step);
                    if ADJACENT && ROWS >= 12 {
                        // The rows of the next tile stand behind these.
                        prefetch_second(left.wrapping_add(next));
                    }
                    if ROWS <= 8 {
                        // Few rows are done with a weight sooner than the next one comes by itself.
                        for v in 0..VECTORS {
                            prefetch(right.wrapping_add(STREAMED / 4 + 16 * v));
                        }
                    }
                    for r in 0..ROWS {
                        let x = s.set1_epi32(*left.add(r * row_stride) as i32);
                        live[r][0] = s.dpbf16_ps(live[r][0], x, first);
                        if VECTORS == 2 {
                            live[r][VECTORS - 1] = s.dpbf16_ps(live[r][VECTORS - 1], x, last);
                        }
                    }
                }
                sums = live;
            }
            let mut level = 0;
            while i >> level & 1 == 1 {
                for r in 0..ROWS {
                    for v in 0..VECTORS {
                        // SAFETY: a set bit of i says that the subtree of its level has been written.
                        sums[r][v] = s.add(unsafe { stack[level][r][v].assume_init() }, sums[r][v]);
                    }
                }
                level += 1;
            }
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    if i + 1 < segments {
                        stack[level][r][v].write(sums[r][v]);
                    } else {
                        // SAFETY: `Tile::check` bounded the output.
                        unsafe { s.store(sums[r][v], out.add(r * tile.out_stride + v * 16)) };
                    }
                }
            }
        }
    }
}
