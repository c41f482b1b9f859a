//! [`Tile`]s with fused multiply-adds, for every instruction set.

// Row and vector numbers index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use super::{Left, Order, Right, TILE_ROWS, Tile, last};
use crate::Cpu;
use crate::pack::PANEL;
use crate::pack::dictionary::{DictionaryPanel, FAR, NEAR, ask};
use crate::simd::coded::BLOCK;
use crate::simd::prefetch::{Prefetch, prefetch, prefetch_second};
use crate::simd::{Kernel, Simd};
use std::mem::MaybeUninit;

/// Longer panels are taken to come from memory: even pairs of so many steps are 32 KiB, all of an L1.
const STEPS_IN_CACHE: usize = 512;
/// The prefetch distance of a streamed step: 2 KiB of a panel, of pairs as of f32. A Xeon streams pairs at 18.6 GB/s so, at
/// 15.2 with 4 KiB and at 16.6 without a prefetch.
const STEPS_AHEAD: usize = 16;
/// The prefetch distances of coded blocks in words, to L2 and to L1: 64 and 4 KiB. One thread of a Zen 4 decodes 31 tokens a
/// second of a model of 494 M parameters so, 29 with the 8 and 2 KiB of dot products and 27 with 8 and 4.
const CODED_FAR: usize = 8 * FAR;
/// See [`CODED_FAR`].
const CODED_NEAR: usize = 2 * NEAR;
/// Steps that are summed for two vectors of columns before the next two. Lines of 8 rows that stand 2 KiB apart stay in the sets
/// of an L1 until their other half is read, those of 32 do not: on a Zen 4, 84 to 91 ns for 8 keys of 128 columns and
/// four rows, whose multiply-adds alone take 75, and 102 with 32 steps.
const STEPS_IN_SETS: usize = 8;
/// Words of a cache line.
const LINE: usize = 16;
/// Steps of k by which a chain of 8 lanes is unrolled.
const UNROLLED: usize = 4;

/// The first multiples of a distance, which the compiler takes for any numbers. It would come to each by additions in every
/// round; and those of integers take the units of multiply-adds on an Intel, where five of them to 12 multiply-adds cost 8%.
type Multiples = [usize; UNROLLED + 1];

#[inline(always)]
fn multiples<const N: usize>(of: usize) -> [usize; N] {
    std::hint::black_box(std::array::from_fn(|i| i.wrapping_mul(of)))
}

/// The multiple `i` of them; none takes a register for 0.
#[inline(always)]
fn multiple(of: &Multiples, i: usize) -> usize {
    if i == 0 { 0 } else { of[i] }
}

/// One step of k (or one pair of steps) of a right operand; pointers to it are plain and unchecked.
trait Steps: Copy {
    /// Steps of k per load.
    const K: usize;
    /// The vectors at `step`, below [`UNROLLED`], and column `column`: one for K = 1, two (ascending k) for K = 2.
    /// # Safety
    /// The address is inside the operand.
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F);
    /// The operand from a later step on, which may be its end.
    fn behind(self, steps: usize) -> Self;
    /// The same, no further than [`UNROLLED`].
    fn on(self, steps: usize) -> Self;
    /// Vectors of columns side by side for so many rows, on 32 registers of 16 lanes or 16 of 8: enough that no sum waits
    /// for itself, and whole lines of a panel.
    #[inline(always)]
    fn vectors(lanes: usize, rows: usize) -> usize {
        if lanes == 8 && rows <= 2 { 4 } else { 2 }
    }
    /// What is prefetched on the way in a chain before which the tile has `before` multiply-adds, `round` of them in a
    /// round: where its first round begins to prefetch, and how far it is to the next one's place. None by default.
    #[inline(always)]
    fn asking(self, _before: usize, _round: usize) -> (*const i8, usize) {
        (std::ptr::null(), 0)
    }
    /// Lines that a load of so many steps of k of so many columns prefetches.
    #[inline(always)]
    fn lines(_steps: usize, _columns: usize) -> usize {
        0
    }
    /// Continues the chains in `sums` over k in `from..to`; only the end of the last segment is odd, and the empty ones after
    /// it start there. Rows of the left operand stand at `rows` behind `a`, and its steps at `left`. `before` counts the
    /// multiply-adds of the tile before these chains.
    ///
    /// # Safety
    /// As [`fma_chains`]; `to` is not behind the end of the tile's order.
    #[inline(always)]
    unsafe fn chain<S: Simd, const ROWS: usize, const VECTORS: usize>(
        self,
        s: S,
        sums: &mut [[S::F; VECTORS]; ROWS],
        (a, rows, left): (*const f32, [usize; ROWS], Multiples),
        column: usize,
        [from, to]: [usize; 2],
        before: usize,
    ) {
        // A copy that lives in registers while the loop runs.
        let mut live = *sums;
        let (at, end) = (from.div_ceil(Self::K), to.div_ceil(Self::K));
        let mut right = self.behind(at);
        // One place serves all rows.
        let (x, mut place) = (rows.map(|row| a.wrapping_add(row)), at * Self::K * left[1]);
        // Steps of k by which the loop is unrolled; prefill gains 1% at most.
        let round = if S::LANES == 8 { UNROLLED } else { Self::K };
        let columns = VECTORS * S::LANES;
        let (mut line, on) = self.asking(before, round * ROWS * columns);
        macro_rules! steps {
            ($k:expr, $asks:expr) => {{
                let lines = if $asks { Self::lines(Self::K, columns) } else { 0 };
                for i in 0..$k / Self::K {
                    // SAFETY: `Tile::check` bounded every step below the order's end, for all rows and columns.
                    unsafe {
                        let mut first = [s.splat(0.0); VECTORS];
                        let mut second = [s.splat(0.0); VECTORS];
                        for v in 0..VECTORS {
                            (first[v], second[v]) = right.load(s, i, column + v * S::LANES);
                        }
                        for l in 0..lines {
                            prefetch_second(line.wrapping_add(64 * (i * lines + l)));
                        }
                        add(s, &mut live, x, place + multiple(&left, i * Self::K), first);
                        if Self::K == 2 {
                            add(s, &mut live, x, place + left[i * Self::K + 1], second);
                        }
                    }
                }
                (right, place) = (right.on($k / Self::K), place + left[$k]);
            }};
        }
        let loads = round / Self::K;
        for _ in 0..end.saturating_sub(at) / loads {
            steps!(round, true);
            line = line.wrapping_add(on);
        }
        if loads > 1 {
            for _ in 0..end.saturating_sub(at) % loads {
                steps!(Self::K, false);
            }
        }
        *sums = live;
    }
}

/// Adds the products of one step of k.
///
/// # Safety
/// Every row has an element `at`.
#[inline(always)]
unsafe fn add<S: Simd, const ROWS: usize, const VECTORS: usize>(
    s: S,
    live: &mut [[S::F; VECTORS]; ROWS],
    rows: [*const f32; ROWS],
    at: usize,
    columns: [S::F; VECTORS],
) {
    for r in 0..ROWS {
        // SAFETY: the caller's promise.
        let x = s.splat(unsafe { *rows[r].add(at) });
        for v in 0..VECTORS {
            live[r][v] = s.fma(x, columns[v], live[r][v]);
        }
    }
}

/// Steps that can be [`Streamed`]; their vectors of columns are those of all.
trait Placed: Steps {
    /// Where `step` and `column` are; it may be any address.
    fn at(self, step: usize, column: usize) -> *const u32;
}

#[derive(Clone, Copy)]
struct WideSteps(*const f32, Multiples);
/// Pairs with the earlier step in the high half, or in the low one.
#[derive(Clone, Copy)]
struct PairSteps<const HIGH: bool>(*const u32, Multiples);
#[derive(Clone, Copy)]
struct Bf16Steps(*const half::bf16, Multiples);

/// Steps that prefetch memory on the way, evenly over all multiply-adds of a tile: at once, or all of it during the first of
/// the rows that share an operand, it would come no faster than what waits for it.
#[derive(Clone, Copy)]
struct Asking<B> {
    steps: B,
    first: *const i8,
    /// Bytes for each multiply-add, times 2^[`FRACTION`].
    rate: usize,
}

const FRACTION: u32 = 16;

impl<B: Placed> Asking<B> {
    #[inline(always)]
    fn new(steps: B, tile: &Tile<'_, f32>, ahead: Prefetch) -> Self {
        // Where there is nothing to prefetch, a line that is near is prefetched.
        let (first, bytes) =
            ahead.bounds().map_or((steps.at(0, 0).cast(), 0), |(first, _)| (first, 64 * ahead.lines()));
        let all = (tile.rows * tile.columns).saturating_mul(tile.order.end()).max(1);
        Asking { steps, first, rate: (bytes << FRACTION) / all }
    }
}

impl<B: Placed> Steps for Asking<B> {
    const K: usize = B::K;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        unsafe { self.steps.load(s, step, column) }
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        Asking { steps: self.steps.behind(steps), ..self }
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        Asking { steps: self.steps.on(steps), ..self }
    }
    #[inline(always)]
    fn vectors(lanes: usize, rows: usize) -> usize {
        B::vectors(lanes, rows)
    }
    #[inline(always)]
    fn asking(self, before: usize, round: usize) -> (*const i8, usize) {
        let bytes = |of: usize| self.rate.wrapping_mul(of) >> FRACTION;
        (self.first.wrapping_add(bytes(before)), bytes(round))
    }
    #[inline(always)]
    fn lines(steps: usize, columns: usize) -> usize {
        // As much as is read of bf16.
        (steps * columns).div_ceil(2 * LINE)
    }
}

/// The steps of a panel that comes from memory. Two vectors of 8 lanes are half of what a step holds, and memory is not
/// found ahead of every other line: so the lines of later steps are prefetched.
#[derive(Clone, Copy)]
struct Streamed<B>(B);

impl<B: Placed> Steps for Streamed<B> {
    const K: usize = B::K;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        if column == 0 {
            for line in 0..PANEL / LINE {
                prefetch(self.0.at(step + STEPS_AHEAD, line * LINE));
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.load(s, step, column) }
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        Streamed(self.0.behind(steps))
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        Streamed(self.0.on(steps))
    }
}

impl Steps for WideSteps {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        let v = unsafe { s.load(self.0.add(multiple(&self.1, step) + column)) };
        (v, v)
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        WideSteps(self.0.wrapping_add(steps * self.1[1]), self.1)
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        WideSteps(self.0.wrapping_add(self.1[steps]), self.1)
    }
}

impl Placed for WideSteps {
    #[inline(always)]
    fn at(self, step: usize, column: usize) -> *const u32 {
        self.0.wrapping_add(step * self.1[1] + column).cast()
    }
}

impl<const HIGH: bool> Steps for PairSteps<HIGH> {
    const K: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        let (high, low) = unsafe { s.load_pairs(self.0.add(multiple(&self.1, step) + column)) };
        if HIGH { (high, low) } else { (low, high) }
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        PairSteps(self.0.wrapping_add(steps * self.1[1]), self.1)
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        PairSteps(self.0.wrapping_add(self.1[steps]), self.1)
    }
}

impl<const HIGH: bool> Placed for PairSteps<HIGH> {
    #[inline(always)]
    fn at(self, step: usize, column: usize) -> *const u32 {
        self.0.wrapping_add(step * self.1[1] + column)
    }
}

impl Steps for Bf16Steps {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        let v = unsafe { s.load_bf16(self.0.add(multiple(&self.1, step) + column)) };
        (v, v)
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        Bf16Steps(self.0.wrapping_add(steps * self.1[1]), self.1)
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        Bf16Steps(self.0.wrapping_add(self.1[steps]), self.1)
    }
    #[inline(always)]
    fn vectors(lanes: usize, rows: usize) -> usize {
        match (lanes, rows) {
            (8 | 16, 1) => 8,
            (8 | 16, 2) | (16, 3..=4) => 4,
            _ => 2,
        }
    }
}

impl Placed for Bf16Steps {
    #[inline(always)]
    fn at(self, step: usize, column: usize) -> *const u32 {
        self.0.wrapping_add(step * self.1[1] + column).cast()
    }
}

/// A panel in 12 bits a weight.
#[derive(Clone, Copy)]
struct CodedSteps<'a>(DictionaryPanel<'a>);

impl Steps for CodedSteps<'_> {
    const K: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, _s: S, _step: usize, _column: usize) -> (S::F, S::F) {
        unreachable!("blocks are loaded by their chain")
    }
    #[inline(always)]
    fn behind(self, steps: usize) -> Self {
        unreachable!("blocks are loaded by their chain, not {steps} of them")
    }
    #[inline(always)]
    fn on(self, steps: usize) -> Self {
        self.behind(steps)
    }
    #[inline(always)]
    unsafe fn chain<S: Simd, const ROWS: usize, const VECTORS: usize>(
        self,
        s: S,
        sums: &mut [[S::F; VECTORS]; ROWS],
        (a, rows, left): (*const f32, [usize; ROWS], Multiples),
        column: usize,
        k: [usize; 2],
        _before: usize,
    ) {
        // SAFETY: the caller's promise. A panel is one or two times these vectors wide.
        unsafe {
            let left = (std::array::from_fn(|r| a.wrapping_add(rows[r])), left[1]);
            match column {
                0 => self.chain_at::<S, ROWS, VECTORS, 0>(s, sums, left, k),
                _ => self.chain_at::<S, ROWS, VECTORS, { PANEL / 2 }>(s, sums, left, k),
            }
        }
    }
}

impl CodedSteps<'_> {
    /// [`Steps::chain`] of the columns from `COLUMN` on.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn chain_at<S: Simd, const ROWS: usize, const VECTORS: usize, const COLUMN: usize>(
        self,
        s: S,
        sums: &mut [[S::F; VECTORS]; ROWS],
        (rows, step): ([*const f32; ROWS], usize),
        [from, to]: [usize; 2],
    ) {
        let (mut live, table) = (*sums, self.0.table().as_ptr());
        for (run, words) in self.0.runs(from.div_ceil(2)..to.div_ceil(2)) {
            // SAFETY: `Tile::check` bounded every step below the order's end, for all rows and columns; every block that is no
            // escape has its words, and an escape two pairs.
            unsafe {
                macro_rules! add_pair {
                    ($pair:expr, $v:ident, $pairs:expr) => {{
                        let (mut first, mut second) = ([s.splat(0.0); VECTORS], [s.splat(0.0); VECTORS]);
                        for $v in 0..VECTORS {
                            (first[$v], second[$v]) = s.split_pairs($pairs);
                        }
                        add(s, &mut live, rows, 2 * $pair * step, first);
                        add(s, &mut live, rows, (2 * $pair + 1) * step, second);
                    }};
                }
                if let Some(words) = words {
                    for (pair, words) in run.zip(words.chunks_exact(PANEL)) {
                        add_pair!(pair, v, s.load(words.as_ptr().add(COLUMN + v * S::LANES).cast()));
                    }
                    continue;
                }
                let mut block = self.0.blocks().as_ptr().add(run.start / 2 * BLOCK);
                let mut pair = run.start;
                while pair + 2 <= run.end {
                    if COLUMN == 0 {
                        ask(block.wrapping_add(CODED_FAR), block.wrapping_add(CODED_NEAR));
                    }
                    add_pair!(pair, v, s.coded_pairs(table, block, 0, COLUMN / S::LANES + v));
                    add_pair!(pair + 1, v, s.coded_pairs(table, block, 1, COLUMN / S::LANES + v));
                    (pair, block) = (pair + 2, block.add(BLOCK));
                }
                if pair < run.end {
                    add_pair!(pair, v, s.coded_pairs(table, block, 0, COLUMN / S::LANES + v));
                }
            }
        }
        *sums = live;
    }
}

/// Runs `tile` with fused multiply-adds on `cpu`'s instruction set. Not generic, so that it is compiled once.
pub fn fma_tile(cpu: &Cpu, tile: Tile<'_, f32>) {
    tile.check(false);
    let out = tile.out.as_mut_ptr();
    // By reference, as in `dot_tile`.
    cpu.dispatch(FmaTile { tile: &tile, out });
}

/// [`fma_tile`] as part of a kernel, where what is known of `tile` decides what is compiled.
#[inline(always)]
pub fn fma_tile_on<S: Simd>(s: S, tile: Tile<'_, f32>) {
    tile.check(false);
    let out = tile.out.as_mut_ptr();
    FmaTile { tile: &tile, out }.run(s);
}

impl Tile<'_, f32> {
    /// An odd last step of pairs would read one element past the left rows: callers pad it.
    fn check_pad(&self) {
        let end = self.order.end().next_multiple_of(2);
        let fits = |end: usize| last(self.rows, self.left.row_stride, end, self.left.step) < self.left.data.len();
        assert!(end == 0 || fits(end), "left operand lacks the pad of an odd length");
    }
}

/// A checked tile.
struct FmaTile<'t, 'a> {
    tile: &'t Tile<'a, f32>,
    /// Its results.
    out: *mut f32,
}

impl Kernel for FmaTile<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let FmaTile { tile, out } = self;
        let adjacent = tile.left.row_stride == 1;
        let tree = matches!(tile.order, Order::Tree(_));
        // A panel that one low tile passes over once; tall ones are many to a panel, which the caches then hold.
        let streams = S::LANES == 8 && tile.order.end() > STEPS_IN_CACHE && tile.rows < TILE_ROWS;
        // The combinations that ops use; each is compiled on its own.
        match (tile.right, adjacent, tree) {
            (Right::F32(data, stride), true, true) if streams && tile.rows > 2 => {
                heights::<S, _, true, true>(s, tile, out, Streamed(WideSteps(data.as_ptr(), multiples(stride))))
            }
            (Right::F32(data, stride), true, true) => {
                heights::<S, _, true, true>(s, tile, out, WideSteps(data.as_ptr(), multiples(stride)))
            }
            (Right::F32(data, stride), false, true) => {
                heights::<S, _, false, true>(s, tile, out, WideSteps(data.as_ptr(), multiples(stride)))
            }
            (Right::F32(data, stride), true, false) => {
                heights::<S, _, true, false>(s, tile, out, WideSteps(data.as_ptr(), multiples(stride)))
            }
            (Right::F32(data, stride), false, false) => {
                heights::<S, _, false, false>(s, tile, out, WideSteps(data.as_ptr(), multiples(stride)))
            }
            (Right::Bf16(data, stride, ahead), true, false) => {
                let b = Asking::new(Bf16Steps(data.as_ptr(), multiples(stride)), tile, ahead);
                heights::<S, _, true, false>(s, tile, out, b)
            }
            (Right::Bf16(data, stride, ahead), false, false) if S::LANES == 8 && tile.left.step == 1 => {
                by_sets(s, tile, out, data, stride, ahead)
            }
            (Right::Bf16(data, stride, ahead), false, false) => {
                let b = Asking::new(Bf16Steps(data.as_ptr(), multiples(stride)), tile, ahead);
                heights::<S, _, false, false>(s, tile, out, b)
            }
            (Right::Dictionary(coded), true, true) if S::LANES == 8 => {
                let Order::Tree(bounds) = tile.order else { unreachable!("a tree") };
                let end = tile.order.end();
                let whole = bounds.iter().all(|bound| bound % 4 == 0 || *bound == end);
                assert!(whole, "segments of coded panels are whole blocks");
                tile.check_pad();
                heights::<S, _, true, true>(s, tile, out, CodedSteps(coded))
            }
            (Right::PairsAsking(data, stride, ahead), true, true) => {
                tile.check_pad();
                let b = Asking::new(PairSteps::<false>(data.as_ptr(), multiples(stride)), tile, ahead);
                heights::<S, _, true, true>(s, tile, out, b)
            }
            (Right::Vnni(data, stride), _, _) => {
                tile.check_pad();
                let b = PairSteps::<true>(data.as_ptr(), multiples(stride));
                match (adjacent, tree) {
                    (true, true) if streams => heights::<S, _, true, true>(s, tile, out, Streamed(b)),
                    (true, true) => heights::<S, _, true, true>(s, tile, out, b),
                    (true, false) => heights::<S, _, true, false>(s, tile, out, b),
                    (false, true) => heights::<S, _, false, true>(s, tile, out, b),
                    (false, false) => panic!("no op sums such a tile"),
                }
            }
            (Right::Bf16(..), _, true) | (Right::Dictionary(_) | Right::Quantized(_) | Right::PairsAsking(..), ..) => {
                panic!("no op sums such a tile")
            }
        }
    }
}

/// A checked tile of chains on vectors of 8 lanes, whose left steps are adjacent: [`STEPS_IN_SETS`] steps of all columns at a time,
/// four rows or six.
#[inline(always)]
fn by_sets<S: Simd>(s: S, tile: &Tile<'_, f32>, out: *mut f32, data: &[half::bf16], stride: usize, ahead: Prefetch) {
    let (Left { data: weights, row_stride, .. }, end) = (tile.left, tile.order.end());
    let Tile { rows, columns, out_stride, .. } = *tile;
    let whole = end / STEPS_IN_SETS * STEPS_IN_SETS;
    let mut tall = 0;
    for at in (0..whole).step_by(STEPS_IN_SETS) {
        let ahead = ahead.behind(at * columns / (2 * LINE));
        tall = 0;
        while rows - tall >= 4 {
            let a = (weights[tall * row_stride + at..].as_ptr(), row_stride);
            let (b, out) = ((data[at * stride..].as_ptr(), stride), out.wrapping_add(tall * out_stride));
            // SAFETY: `Tile::check` bounded these rows and steps of all columns.
            tall += unsafe {
                if six_rows(rows - tall) {
                    few_steps::<S, 6>(s, tile, a, b, out, ahead)
                } else {
                    few_steps::<S, 4>(s, tile, a, b, out, ahead)
                }
            };
        }
    }
    // The last steps of those rows, and all steps of the others.
    for (first, rows, at) in [(0, tall, whole), (tall, rows - tall, 0)] {
        if rows == 0 || at == end {
            continue;
        }
        let ahead = if tall == 0 { ahead } else { Prefetch::NONE };
        let left = Left { data: &weights[first * row_stride + at..], row_stride, step: 1 };
        let order = Order::Chain(end - at);
        let part = Tile { left, right: tile.right, order, rows, columns, out: &mut [], out_stride };
        let b = Asking::new(Bf16Steps(data[at * stride..].as_ptr(), multiples(stride)), &part, ahead);
        heights::<S, _, false, false>(s, &part, out.wrapping_add(first * out_stride), b);
    }
}

/// Whether vectors of 8 lanes take six of so many rows: 8 are two times 4, as 6 and 2 would leave the two waiting for their own sums.
fn six_rows(left: usize) -> bool {
    left >= 6 && left != 8
}

/// [`STEPS_IN_SETS`] steps of all columns of a tile whose left steps are adjacent, two vectors of 8 lanes at a time; returns
/// `ROWS`. The left rows are `a.1` apart from `a.0` on, the right ones `b.1` from `b.0` on.
///
/// # Safety
/// [`Tile::check`] has passed, these are rows and steps of the tile, and `out` is where `ROWS` of its rows begin.
#[inline(always)]
unsafe fn few_steps<S: Simd, const ROWS: usize>(
    s: S,
    tile: &Tile<'_, f32>,
    a: (*const f32, usize),
    b: (*const half::bf16, usize),
    out: *mut f32,
    ahead: Prefetch,
) -> usize {
    // As much as these steps of two vectors read; past the last lines those are prefetched again.
    let asked = STEPS_IN_SETS / 2;
    let (first, last) = match ahead.bounds() {
        Some((first, last)) => (first, last.wrapping_sub(64 * (asked - 1)).max(first)),
        None => (b.0.cast(), b.0.cast()),
    };
    // SAFETY: the caller's promise; `columns` is a multiple of two vectors of 8 lanes.
    unsafe {
        let rows: [*const f32; ROWS] = std::array::from_fn(|r| a.0.add(r * a.1));
        for column in (0..tile.columns).step_by(2 * S::LANES) {
            let ask = first.wrapping_add(column / (2 * S::LANES) * asked * 64).min(last);
            let mut sums = [[s.splat(0.0); 2]; ROWS];
            for r in 0..ROWS {
                for v in 0..2 {
                    sums[r][v] = s.load(out.add(r * tile.out_stride + column + v * S::LANES));
                }
            }
            for step in 0..STEPS_IN_SETS {
                let right = b.0.add(step * b.1 + column);
                let right = [s.load_bf16(right), s.load_bf16(right.add(S::LANES))];
                if step % 2 == 0 {
                    prefetch_second(ask.wrapping_add(step / 2 * 64));
                }
                for r in 0..ROWS {
                    let x = s.splat(*rows[r].add(step));
                    for v in 0..2 {
                        sums[r][v] = s.fma(x, right[v], sums[r][v]);
                    }
                }
            }
            for r in 0..ROWS {
                for v in 0..2 {
                    s.store(sums[r][v], out.add(r * tile.out_stride + column + v * S::LANES));
                }
            }
        }
    }
    ROWS
}

/// Cuts the rows of a checked tile, whose results are at `out`, into heights the registers hold.
#[inline(always)]
fn heights<S: Simd, B: Steps, const ADJACENT: bool, const TREE: bool>(s: S, tile: &Tile<'_, f32>, out: *mut f32, b: B) {
    let (mut row, steps) = (0, multiples(tile.left.step));
    while row < tile.rows {
        let left = tile.rows - row;
        // Without steps the left operand is empty and never read.
        let a = tile.left.data.as_ptr().wrapping_add(row * tile.left.row_stride);
        let out = out.wrapping_add(row * tile.out_stride);
        // SAFETY: `Tile::check` bounded every (row, step, column) of the whole tile; these are some of its rows.
        row += unsafe {
            // 16 rows are two times 8: 12 and 4 would leave the four waiting for their own sums.
            if S::LANES == 16 && left >= 12 && left != 16 {
                columns::<S, B, 12, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            } else if S::LANES == 16 && left >= 8 {
                columns::<S, B, 8, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            } else if S::LANES == 8 && six_rows(left) {
                columns::<S, B, 6, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            } else if left >= 4 {
                columns::<S, B, 4, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            } else if S::LANES > 1 && left >= 2 {
                columns::<S, B, 2, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            } else {
                columns::<S, B, 1, ADJACENT, TREE>(s, tile, row, (a, steps), b, out)
            }
        };
    }
}

/// All columns of the `ROWS` rows from `row` on; returns `ROWS`.
///
/// # Safety
/// [`Tile::check`] has passed; `a` and `out` are where these of the tile's rows begin, `b` is its right operand.
#[inline(always)]
unsafe fn columns<S: Simd, B: Steps, const ROWS: usize, const ADJACENT: bool, const TREE: bool>(
    s: S,
    tile: &Tile<'_, f32>,
    row: usize,
    (a, left): (*const f32, Multiples),
    b: B,
    out: *mut f32,
) -> usize {
    let mut column = 0;
    // Adjacent rows are known to be; 12 rows have no registers for a place each.
    let row_stride = if ADJACENT { 1 } else { tile.left.row_stride };
    let rows: [usize; ROWS] = match ADJACENT || S::LANES > 8 {
        true => std::array::from_fn(|r| r * row_stride),
        false => multiples(row_stride),
    };
    let a = (a, rows, left);
    if B::vectors(S::LANES, ROWS) == 8 {
        while column + 8 * S::LANES <= tile.columns {
            // SAFETY: the caller's promise; these columns are below `tile.columns`.
            unsafe { fma_chains::<S, B, ROWS, 8, ADJACENT, TREE>(s, tile, row, a, b, column, out.add(column)) };
            column += 8 * S::LANES;
        }
    }
    if B::vectors(S::LANES, ROWS) >= 4 {
        while column + 4 * S::LANES <= tile.columns {
            // SAFETY: as above.
            unsafe { fma_chains::<S, B, ROWS, 4, ADJACENT, TREE>(s, tile, row, a, b, column, out.add(column)) };
            column += 4 * S::LANES;
        }
    }
    while column + 2 * S::LANES <= tile.columns {
        // SAFETY: the caller's promise; these columns are below `tile.columns`.
        unsafe { fma_chains::<S, B, ROWS, 2, ADJACENT, TREE>(s, tile, row, a, b, column, out.add(column)) };
        column += 2 * S::LANES;
    }
    if column < tile.columns {
        // SAFETY: as above; one vector is left, because `columns` is a multiple of 16 and so of LANES.
        unsafe { fma_chains::<S, B, ROWS, 1, ADJACENT, TREE>(s, tile, row, a, b, column, out.add(column)) };
    }
    ROWS
}

/// The innermost loops: `ROWS` by `VECTORS` accumulators.
///
/// # Safety
/// As [`columns`]; `out` is where `VECTORS` vectors of the columns from `column` on begin, which are the tile's.
#[inline(always)]
unsafe fn fma_chains<
    S: Simd,
    B: Steps,
    const ROWS: usize,
    const VECTORS: usize,
    const ADJACENT: bool,
    const TREE: bool,
>(
    s: S,
    tile: &Tile<'_, f32>,
    row: usize,
    a: (*const f32, [usize; ROWS], Multiples),
    b: B,
    column: usize,
    out: *mut f32,
) {
    let zero = s.splat(0.0);
    // Finished subtrees: a binary counter, one place per level of the tree. Zeros would be written each time.
    let mut stack = [const { MaybeUninit::<[[S::F; VECTORS]; ROWS]>::uninit() }; 3];
    let whole = [0, tile.order.end()];
    let bounds = match tile.order {
        Order::Tree(bounds) => bounds,
        Order::Chain(_) => &whole[..],
    };
    let segments = bounds.len() - 1;
    let before = (row * tile.columns + ROWS * column) * whole[1];
    for i in 0..segments {
        let mut sums = [[zero; VECTORS]; ROWS];
        if !TREE {
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    // SAFETY: `Tile::check` bounded the output.
                    sums[r][v] = unsafe { s.load(out.add(r * tile.out_stride + v * S::LANES)) };
                }
            }
        }
        // SAFETY: the caller's promise, and the bounds ascend to the order's end.
        unsafe { b.chain(s, &mut sums, a, column, [bounds[i], bounds[i + 1]], before) };
        let mut level = 0;
        while i >> level & 1 == 1 {
            // SAFETY: bit `level` of i is set, so an earlier segment left its sums in this place.
            let before = unsafe { stack[level].assume_init_ref() };
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    sums[r][v] = s.add(before[r][v], sums[r][v]);
                }
            }
            level += 1;
        }
        if i + 1 < segments {
            stack[level].write(sums);
            continue;
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                // SAFETY: `Tile::check` bounded the output.
                unsafe { s.store(sums[r][v], out.add(r * tile.out_stride + v * S::LANES)) };
            }
        }
    }
}
