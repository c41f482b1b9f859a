//! Many tiles and one panel with fused multiply-adds, for products of many rows.
//!
//! A tile by itself reads its panel from L2 for every six or twelve rows. Here [`STEPS`] steps of k of the
//! panel are laid out as f32 in L1 and all tiles of a block pass over them, so that what comes from further
//! away is the tiles alone, once. A sum is the same chain as in [`super::fma_tile`]: what it has reached waits in memory
//! between the pieces of a segment, and finished segments wait there for their join, short ones that a piece has two of in
//! L1. [`fma_chains`] takes one chain for each sum, and leaves it where it belongs.

// Row and vector numbers index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use super::Right;
use crate::pack::PANEL;
use crate::simd::coded::BLOCK;
use crate::simd::prefetch::prefetch;
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Isa};
use std::mem::MaybeUninit;

/// Steps of k that are in L1 at a time: 16 KiB of a panel, half of the smallest L1.
const STEPS: usize = 128;
/// The same of 16 lanes where sums are far from it: of a chain, and of two segments together.
const MOST_STEPS: usize = 256;
/// Steps between requests for memory, and lines of a panel at each. With a request for both sides at every step the loop waits
/// for them: 83% of the peak instead of 98%.
const UNROLLED: usize = 4;
const LINES: usize = 2;
/// Words of a cache line.
const LINE: usize = 16;
/// Levels of the tree of segments that wait at a time.
const LEVELS: usize = 3;

/// Rows of a tile of a block: with two vectors of columns its sums fill the registers. None where there are no vectors.
pub fn block_rows(isa: Isa) -> Option<usize> {
    match isa.lanes() {
        16 => Some(12),
        8 => Some(6),
        _ => None,
    }
}

/// Words of scratch memory for a block of so many rows.
pub fn block_words(rows: usize) -> usize {
    (MOST_STEPS + (1 + LEVELS) * rows) * PANEL
}

/// Some tiles of [`block_rows`] rows and a panel.
pub struct Block<'a> {
    /// The tiles, `stride` apart; in each, row r of step k stands at `k * rows + r`.
    pub left: &'a [f32],
    /// From one tile to the next.
    pub stride: usize,
    /// How many there are.
    pub tiles: usize,
    /// f32, VNNI form or, on 8 lanes, coded, [`PANEL`] columns.
    pub right: Right<'a>,
    /// Bounds of the segments: 2, 3, 5 or 9 of them; all but the last are even.
    pub bounds: &'a [usize],
    /// [`block_words`] of them.
    pub scratch: &'a mut [f32],
}

/// The sums of a block, row by row, [`PANEL`] columns each; they stand in its scratch memory.
pub fn fma_block<'s>(cpu: &Cpu, block: Block<'s>) -> &'s [f32] {
    let rows = block_rows(cpu.isa()).expect("an instruction set with vectors");
    let (Block { left, stride, tiles, bounds, .. }, end) = (&block, *block.bounds.last().expect("bounds"));
    assert!(bounds.is_sorted() && matches!(bounds.len(), 2 | 3 | 5 | 9), "the bounds of segments ascend");
    assert!(bounds.iter().all(|bound| bound % 2 == 0 || *bound == end), "only the last bound is odd");
    let held = (tiles.max(&1) - 1).saturating_mul(*stride).saturating_add(end.saturating_mul(rows));
    assert!(*tiles > 0 && held <= left.len(), "left operand too short");
    assert!(tiles.saturating_mul(rows) <= block.scratch.len() / PANEL, "scratch memory too short");
    let right = match block.right {
        Right::F32(data, PANEL) => data.len() / PANEL,
        Right::Vnni(data, PANEL) => data.len() / PANEL * 2,
        Right::Dictionary(coded) => {
            assert!(
                bounds.iter().all(|bound| bound % 4 == 0 || *bound == end),
                "segments of coded panels are whole blocks"
            );
            2 * coded.pairs()
        }
        _ => panic!("a block takes whole panels"),
    };
    assert!(end <= right, "right operand too short");
    let rows = tiles * rows;
    let Block { left, stride, tiles, right, bounds, scratch } = block;
    let (room, sums) = scratch[..block_words(rows)].split_at_mut(MOST_STEPS * PANEL);
    let (sums, waiting) = sums.split_at_mut(rows * PANEL);
    let (out, waiting) = ((sums.as_mut_ptr(), PANEL), waiting.as_mut_ptr());
    cpu.dispatch(Sums { left, stride, tiles, right, bounds, kind: Kind::Tree, room, out, waiting });
    sums
}

/// Some tiles of [`block_rows`] rows and a panel of f32: one chain for each sum.
pub struct Chains<'a> {
    /// As in [`Block`].
    pub left: &'a [f32],
    pub stride: usize,
    pub tiles: usize,
    /// [`PANEL`] columns.
    pub right: &'a [f32],
    pub steps: usize,
    /// Whether they begin with +0; else they go on from what is there.
    pub begins: bool,
    /// Where the first sum stands, and how far one row is from the next.
    pub out: (*mut f32, usize),
}

/// Takes the chains of a block where their sums stand; a NaN becomes the canonical one.
///
/// # Safety
/// At `out` stand [`PANEL`] f32 for each row of each tile, which nobody else reads or writes.
pub unsafe fn fma_chains(cpu: &Cpu, chains: Chains) {
    let Chains { left, stride, tiles, right, steps, begins, out } = chains;
    let rows = block_rows(cpu.isa()).expect("an instruction set with vectors");
    let held = (tiles.max(1) - 1).saturating_mul(stride).saturating_add(steps.saturating_mul(rows));
    assert!(tiles > 0 && held <= left.len(), "left operand too short");
    assert!(steps <= right.len() / PANEL, "right operand too short");
    let (right, bounds, kind) = (Right::F32(right, PANEL), &[0, steps][..], Kind::Chain { begins });
    let (room, waiting) = (&mut [][..], std::ptr::null_mut());
    cpu.dispatch(Sums { left, stride, tiles, right, bounds, kind, room, out, waiting });
}

/// What becomes of the sums.
#[derive(Clone, Copy)]
enum Kind {
    /// Segments begin with +0 and are joined.
    Tree,
    /// One chain, which may go on from what is there, and whose memory is far away.
    Chain { begins: bool },
}

/// A checked block.
struct Sums<'a, 's> {
    left: &'a [f32],
    stride: usize,
    tiles: usize,
    right: Right<'a>,
    bounds: &'a [usize],
    kind: Kind,
    /// [`MOST_STEPS`] steps of the panel as f32.
    room: &'s mut [f32],
    /// The sums of each row, and how far it is from one to the next.
    out: (*mut f32, usize),
    /// Of a tree, [`LEVELS`] times as many, in rows of [`PANEL`]: finished subtrees, a binary counter.
    waiting: *mut f32,
}

impl Kernel for Sums<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match S::LANES {
            16 if matches!(self.kind, Kind::Tree) => self.tiles::<S, 12, false>(s),
            16 => self.tiles::<S, 12, true>(s),
            _ if matches!(self.kind, Kind::Tree) => self.tiles::<S, 6, false>(s),
            _ => self.tiles::<S, 6, true>(s),
        }
    }
}

/// The part of a chain that one piece of k adds.
#[derive(Clone, Copy, Default)]
struct Part {
    steps: usize,
    /// Whether sums begin with +0 in it, and whether the segment ends with it.
    first: bool,
    last: bool,
    segment: usize,
}

/// A piece of k.
#[derive(Clone, Copy)]
struct Piece {
    /// A part of one segment; or the whole of two that are joined, the first of which waits in L1.
    parts: [Part; 2],
    count: usize,
    /// How many segments there are.
    segments: usize,
    /// From one row of the sums to the next, and from one level of what waits.
    row: usize,
    level: usize,
    /// Of a chain: lines of `far` that are prefetched, and whether it ends, with the last rounding.
    far: usize,
    ends: bool,
}

/// Where a piece of one tile and two vectors of columns lies.
#[derive(Clone, Copy)]
struct Place {
    left: *const f32,
    right: *const f32,
    sums: *mut f32,
    waiting: *mut f32,
    /// What is prefetched meanwhile: the same piece of the next tile, lines of the panel from one to another, and the rows of
    /// the sums that come next.
    next: *const f32,
    ahead: [*const u32; 2],
    far: *const f32,
}

impl Sums<'_, '_> {
    #[inline(always)]
    fn tiles<S: Simd, const ROWS: usize, const CHAIN: bool>(self, s: S) {
        let Sums { left, stride, tiles, right, bounds, kind, room, out: (out, row), waiting } = self;
        let (segments, columns) = (bounds.len() - 1, 2 * S::LANES);
        let most = if S::LANES == 16 { MOST_STEPS } else { STEPS };
        let (level, end) = (tiles * ROWS * PANEL, bounds[segments]);
        let (mut segment, mut at) = (0, bounds[0]);
        while segment < segments {
            let (from, to) = (bounds[segment], bounds[segment + 1]);
            let mut parts = [Part::default(); 2];
            let begins = !matches!(kind, Kind::Chain { begins: false });
            // Two short segments that are joined come in one piece.
            let two = !CHAIN && segment % 2 == 0 && segment + 1 < segments && at == from;
            let two = two && bounds[segment + 2] - from <= most;
            let steps = if CHAIN || two { most } else { STEPS }.min(to - at);
            parts[0] = Part { steps, first: begins && at == from, last: at + steps == to, segment };
            let (mut count, mut piece_steps) = (1, steps);
            if two {
                let steps = bounds[segment + 2] - to;
                parts[1] = Part { steps, first: true, last: true, segment: segment + 1 };
                (count, piece_steps) = (2, piece_steps + steps);
            }
            let (piece_at, ahead, lines) = lay_out(s, right, at, piece_steps, room);
            // Each call prefetches a share of the lines.
            let share = lines.div_ceil(tiles * (PANEL / columns));
            let (far, ends) = (if at == 0 { ROWS * columns / LINE } else { 0 }, at + piece_steps == end);
            let piece = Piece { parts, count, segments, row, level, far, ends };
            for tile in 0..tiles {
                // Behind the last tile the first one comes again, with the next piece; and its sums, of the next panel.
                let (next_tile, next_at) = if tile + 1 < tiles { (tile + 1, at) } else { (0, at + piece_steps) };
                let far = next_tile * ROWS * row + if next_tile == 0 { PANEL } else { 0 };
                for part in 0..PANEL / columns {
                    let (column, call) = (part * columns, tile * (PANEL / columns) + part);
                    let place = Place {
                        left: left.as_ptr().wrapping_add(tile * stride + at * ROWS),
                        right: piece_at.wrapping_add(column),
                        sums: out.wrapping_add(tile * ROWS * row + column),
                        waiting: waiting.wrapping_add(tile * ROWS * PANEL + column),
                        next: left.as_ptr().wrapping_add(next_tile * stride + next_at * ROWS),
                        ahead: [call, call + 1].map(|call| ahead.wrapping_add((call * share).min(lines) * LINE)),
                        far: out.wrapping_add(far + column),
                    };
                    // SAFETY: `fma_block` or `fma_chains` has checked that the tile has this piece; the panel or the room holds it,
                    // and sums and what waits have a place for every row of every tile.
                    unsafe { place.add::<S, ROWS, CHAIN>(s, &piece) };
                }
            }
            at += piece_steps;
            if parts[count - 1].last {
                segment += count;
            }
        }
    }
}

impl Place {
    /// Continues `ROWS` by two vectors of chains; ends and joins them where a segment ends.
    ///
    /// # Safety
    /// `left` has `ROWS` elements for every step of the piece, `right` two vectors in rows of [`PANEL`]; `sums` has `ROWS`
    /// rows, and `waiting` of a tree as many for each of [`LEVELS`] levels.
    #[inline(always)]
    unsafe fn add<S: Simd, const ROWS: usize, const CHAIN: bool>(self, s: S, piece: &Piece) {
        let mut pair = MaybeUninit::<[[S::F; 2]; ROWS]>::uninit();
        let (mut left, mut right, mut next, [mut ahead, until]) = (self.left, self.right, self.next, self.ahead);
        for (i, part) in piece.parts[..piece.count].iter().enumerate() {
            let mut sums = [[s.splat(0.0); 2]; ROWS];
            // SAFETY: the caller's promise, here and below.
            unsafe {
                if !part.first {
                    for r in 0..ROWS {
                        for v in 0..2 {
                            sums[r][v] = s.load(self.sums.add(r * piece.row + v * S::LANES));
                        }
                    }
                }
                macro_rules! step {
                    ($i:expr) => {{
                        let (left, right) = (left.add($i * ROWS), right.add($i * PANEL));
                        let columns = [s.load(right), s.load(right.add(S::LANES))];
                        for r in 0..ROWS {
                            let x = s.splat(*left.add(r));
                            for v in 0..2 {
                                sums[r][v] = s.fma(x, columns[v], sums[r][v]);
                            }
                        }
                    }};
                }
                for round in 0..part.steps / UNROLLED {
                    for line in 0..(UNROLLED * ROWS).div_ceil(LINE) {
                        prefetch(next.wrapping_add(line * LINE));
                    }
                    for line in 0..LINES {
                        prefetch(ahead.wrapping_add(line * LINE));
                    }
                    if CHAIN && round < piece.far {
                        // A line of a row and then the other; of 8 lanes a row has one.
                        let lines = 2 * S::LANES / LINE;
                        prefetch(self.far.wrapping_add(round / lines * piece.row + round % lines * LINE));
                    }
                    for i in 0..UNROLLED {
                        step!(i);
                    }
                    (left, right) = (left.add(UNROLLED * ROWS), right.add(UNROLLED * PANEL));
                    (next, ahead) = (next.wrapping_add(UNROLLED * ROWS), ahead.wrapping_add(LINES * LINE).min(until));
                }
                let rest = part.steps % UNROLLED;
                for i in 0..rest {
                    step!(i);
                }
                (left, right, next) = (left.add(rest * ROWS), right.add(rest * PANEL), next.wrapping_add(rest * ROWS));
                if !CHAIN && i == 0 && piece.count == 2 {
                    pair.write(sums);
                    continue;
                }
                let mut level = 0;
                if !CHAIN && piece.count == 2 {
                    let earlier = pair.assume_init_ref();
                    for r in 0..ROWS {
                        for v in 0..2 {
                            sums[r][v] = s.add(earlier[r][v], sums[r][v]);
                        }
                    }
                    level = 1;
                }
                let at = |r: usize, v: usize| r * PANEL + v * S::LANES;
                while part.last && part.segment >> level & 1 == 1 {
                    let waiting = self.waiting.add(level * piece.level);
                    for r in 0..ROWS {
                        for v in 0..2 {
                            sums[r][v] = s.add(s.load(waiting.add(at(r, v))), sums[r][v]);
                        }
                    }
                    level += 1;
                }
                let waits = part.last && part.segment + 1 < piece.segments;
                if CHAIN && piece.ends {
                    for r in 0..ROWS {
                        for v in 0..2 {
                            s.narrow_f32(sums[r][v], self.sums.add(r * piece.row + v * S::LANES));
                        }
                    }
                    continue;
                }
                let (out, row) = match waits {
                    true => (self.waiting.add(level * piece.level), PANEL),
                    false => (self.sums, piece.row),
                };
                for r in 0..ROWS {
                    for v in 0..2 {
                        s.store(sums[r][v], out.add(r * row + v * S::LANES));
                    }
                }
            }
        }
    }
}

/// Where `steps` steps of k from `at` of a checked panel stand as f32, which is the room where the panel holds something else;
/// where the steps behind them stand, and how many lines of memory as many of them take.
#[inline(always)]
fn lay_out<S: Simd>(s: S, right: Right, at: usize, steps: usize, room: &mut [f32]) -> (*const f32, *const u32, usize) {
    let pairs = steps.div_ceil(2);
    let room = if matches!(right, Right::F32(..)) { room } else { &mut room[..2 * pairs * PANEL] };
    macro_rules! put {
        ($pair:expr, $column:expr, $two:expr) => {{
            let (first, second) = $two;
            let out = room.as_mut_ptr().add(2 * $pair * PANEL + $column);
            s.store(first, out);
            s.store(second, out.add(PANEL));
        }};
    }
    match right {
        Right::F32(data, _) => {
            let piece = &data[at * PANEL..][..steps * PANEL];
            (piece.as_ptr(), piece.as_ptr_range().end.cast(), steps * PANEL / LINE)
        }
        Right::Vnni(data, _) => {
            let piece = &data[at / 2 * PANEL..][..pairs * PANEL];
            for pair in 0..pairs {
                for column in (0..PANEL).step_by(S::LANES) {
                    // SAFETY: `piece` has as many pairs, and the room two rows of PANEL for each.
                    unsafe { put!(pair, column, s.load_pairs(piece.as_ptr().add(pair * PANEL + column))) };
                }
            }
            (room.as_ptr(), piece.as_ptr_range().end, pairs * PANEL / LINE)
        }
        Right::Dictionary(coded) if S::LANES == 8 => {
            for (run, words) in coded.runs(at / 2..at / 2 + pairs) {
                for pair in run.clone() {
                    for vector in 0..PANEL / S::LANES {
                        let column = vector * S::LANES;
                        // SAFETY: an escape has two pairs, the others are in their blocks; the room has two rows of PANEL for each.
                        unsafe {
                            let words = match words {
                                Some(words) => s.load(words.as_ptr().add((pair - run.start) * PANEL + column).cast()),
                                None => s.coded_pairs(
                                    coded.table().as_ptr(),
                                    coded.block(pair / 2).as_ptr(),
                                    pair % 2,
                                    vector,
                                ),
                            };
                            put!(pair - at / 2, column, s.split_pairs(words));
                        }
                    }
                }
            }
            let blocks = &coded.blocks()[at / 4 * BLOCK..][..pairs.div_ceil(2) * BLOCK];
            (room.as_ptr(), blocks.as_ptr_range().end, blocks.len() / LINE)
        }
        _ => unreachable!("a block takes whole panels that the instruction set reads"),
    }
}
