//! A tile of chains: `out[r][c] = sum over k of a[r][k] * b[k][c]`, each sum in its canonical order.
//!
//! Every output element is one accumulator lane, so tile height, vector width and panel width decide which outputs are
//! computed together and never the order of a sum. [`fma_tile`] is the plain form for every instruction set;
//! [`dot_tile`] is the same arithmetic through `VDPBF16PS` where [`dot_is_exact`] shows that its flush cannot be seen.

// Row and vector numbers index several arrays at once here.
#![allow(clippy::needless_range_loop)]

use crate::pack::Ahead;
use crate::pack::dictionary::Coded;
#[cfg(target_arch = "x86_64")]
use crate::pack::dictionary::{dot_coded, dot_coded_row};
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Isa};

/// Columns of a packed panel.
pub const PANEL: usize = 32;
/// Rows that fill the registers two vectors wide.
pub const TILE_ROWS: usize = 12;
/// Rows of the tallest tile: what passes while a panel is in the nearest caches.
pub const MAX_ROWS: usize = 24;

/// The left operand: element (r, k) stands at `data[r * row_stride + k * step]`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    /// The elements, or pairs of bf16 with the earlier k in the high half.
    pub data: &'a [T],
    /// Distance between rows; 1 when rows are adjacent.
    pub row_stride: usize,
    /// Distance between steps of k (or of pairs of k).
    pub step: usize,
}

/// The right operand: `columns` adjacent columns, `stride` elements from one k (or pair of k) to the next.
#[derive(Clone, Copy)]
pub enum Right<'a> {
    /// f32.
    Wide(&'a [f32], usize),
    /// Pairs of bf16 along k, the earlier k in the high half. An odd length ends in a -0 beside a +0 on the left: their
    /// product -0 changes no sum.
    Pairs(&'a [u32], usize),
    /// Pairs of bf16 in fewer bits, for [`dot_tile`] alone.
    Coded(Coded<'a>),
    /// bf16, and memory that is asked for on the way, a line at a step.
    Narrow(&'a [half::bf16], usize, Ahead),
}

/// How the products are summed.
#[derive(Clone, Copy)]
pub enum Order<'a> {
    /// Segments of chains between these bounds (2, 3, 5 or 9 of them), joined as a balanced tree.
    Tree(&'a [usize]),
    /// One chain over `0..len` that goes on from what `out` holds.
    Chain(usize),
}

impl Order<'_> {
    fn end(&self) -> usize {
        match self {
            Order::Tree(bounds) => *bounds.last().expect("a tree has bounds"),
            Order::Chain(len) => *len,
        }
    }
}

/// One tile: `rows` (at most [`MAX_ROWS`]) by `columns` (a multiple of 16, at most what the right operand holds).
pub struct Tile<'a, T> {
    /// Left operand.
    pub left: Left<'a, T>,
    /// Right operand.
    pub right: Right<'a>,
    /// Order of the sum.
    pub order: Order<'a>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Row-major results.
    pub out: &'a mut [f32],
    /// Distance between rows of `out`.
    pub out_stride: usize,
}

impl<T> Tile<'_, T> {
    /// Every address the kernels form, checked once per tile. `pairs` steps per two elements of k on each side.
    fn check(&self, left_pairs: bool) {
        let end = self.order.end();
        let left_steps = if left_pairs { end.div_ceil(2) } else { end };
        assert!(self.rows >= 1 && self.rows <= MAX_ROWS && self.columns.is_multiple_of(16) && self.columns >= 16);
        if end > 0 {
            let left_last = (self.rows - 1) * self.left.row_stride + (left_steps - 1) * self.left.step;
            assert!(left_last < self.left.data.len(), "left operand too short");
            let (right_len, right_steps, stride) = match self.right {
                Right::Coded(coded) => (coded.pairs() * PANEL, end.div_ceil(2), PANEL),
                Right::Wide(data, stride) => (data.len(), end, stride),
                Right::Pairs(data, stride) => (data.len(), end.div_ceil(2), stride),
                Right::Narrow(data, stride, _) => (data.len(), end, stride),
            };
            assert!((right_steps - 1) * stride + self.columns <= right_len, "right operand too short");
        }
        assert!((self.rows - 1) * self.out_stride + self.columns <= self.out.len(), "output too short");
    }
}

/// One step of k (or one pair of steps) of a right operand; pointers to it are plain and unchecked.
trait Steps: Copy {
    /// Steps of k per load.
    const K: usize;
    /// The vectors at `step` and column `column`: one for K = 1, two (ascending k) for K = 2.
    /// # Safety
    /// The address is inside the operand.
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F);
    /// Vectors of columns side by side for so many rows on 32 registers of 16 lanes: enough that no sum waits for itself.
    fn vectors(_rows: usize) -> usize {
        2
    }
    /// Asks for `lines` of the memory that is read later; `index` counts steps, over all columns.
    #[inline(always)]
    fn ask(self, _index: usize, _lines: usize) {}
}

#[derive(Clone, Copy)]
struct WideSteps(*const f32, usize);
#[derive(Clone, Copy)]
struct PairSteps(*const u32, usize);
#[derive(Clone, Copy)]
struct NarrowSteps(*const half::bf16, usize, Ahead);

impl Steps for WideSteps {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        let v = unsafe { s.load(self.0.add(step * self.1 + column)) };
        (v, v)
    }
}

impl Steps for PairSteps {
    const K: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        unsafe { s.load_pairs(self.0.add(step * self.1 + column)) }
    }
}

impl Steps for NarrowSteps {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, s: S, step: usize, column: usize) -> (S::F, S::F) {
        // SAFETY: the caller's promise.
        let v = unsafe { s.load_bf16(self.0.add(step * self.1 + column)) };
        (v, v)
    }
    #[inline(always)]
    fn vectors(rows: usize) -> usize {
        match rows {
            1 => 8,
            2..=4 => 4,
            _ => 2,
        }
    }
    #[inline(always)]
    fn ask(self, index: usize, lines: usize) {
        self.2.ask_at(index * lines, lines);
    }
}

/// Runs `tile` with fused multiply-adds on `cpu`'s instruction set. Not generic, so that it is compiled once.
pub fn fma_tile(cpu: &Cpu, tile: Tile<'_, f32>) {
    cpu.dispatch(FmaTile(tile));
}

struct FmaTile<'a>(Tile<'a, f32>);

impl Kernel for FmaTile<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tile = self.0;
        tile.check(false);
        let adjacent = tile.left.row_stride == 1;
        let tree = matches!(tile.order, Order::Tree(_));
        // The combinations that ops use; each is compiled on its own.
        match (tile.right, adjacent, tree) {
            (Right::Wide(data, stride), true, true) => {
                heights::<S, _, true, true>(s, tile, WideSteps(data.as_ptr(), stride))
            }
            (Right::Wide(data, stride), false, true) => {
                heights::<S, _, false, true>(s, tile, WideSteps(data.as_ptr(), stride))
            }
            (Right::Wide(data, stride), true, false) => {
                heights::<S, _, true, false>(s, tile, WideSteps(data.as_ptr(), stride))
            }
            (Right::Wide(data, stride), false, false) => {
                heights::<S, _, false, false>(s, tile, WideSteps(data.as_ptr(), stride))
            }
            (Right::Narrow(data, stride, ahead), true, false) => {
                heights::<S, _, true, false>(s, tile, NarrowSteps(data.as_ptr(), stride, ahead))
            }
            (Right::Narrow(data, stride, ahead), false, false) => {
                heights::<S, _, false, false>(s, tile, NarrowSteps(data.as_ptr(), stride, ahead))
            }
            (Right::Pairs(data, stride), _, _) => {
                // An odd last step would read one element past the left rows: callers pad it.
                let end = tile.order.end().next_multiple_of(2);
                let last = (tile.rows - 1) * tile.left.row_stride + end.saturating_sub(1) * tile.left.step;
                assert!(end == 0 || last < tile.left.data.len(), "left operand lacks the pad of an odd length");
                let b = PairSteps(data.as_ptr(), stride);
                match (adjacent, tree) {
                    (true, true) => heights::<S, _, true, true>(s, tile, b),
                    (true, false) => heights::<S, _, true, false>(s, tile, b),
                    (false, true) => heights::<S, _, false, true>(s, tile, b),
                    (false, false) => panic!("no op sums such a tile"),
                }
            }
            (Right::Narrow(..), _, true) | (Right::Coded(_), ..) => panic!("no op sums such a tile"),
        }
    }
}

/// Cuts the rows of a tile into heights the registers hold.
#[inline(always)]
fn heights<S: Simd, B: Steps, const ADJACENT: bool, const TREE: bool>(s: S, tile: Tile<'_, f32>, b: B) {
    let mut row = 0;
    while row < tile.rows {
        let left = tile.rows - row;
        // Without steps the left operand is empty and never read.
        let a = tile.left.data.as_ptr().wrapping_add(row * tile.left.row_stride);
        let out = tile.out[row * tile.out_stride..].as_mut_ptr();
        // SAFETY: `Tile::check` bounded every (row, step, column) of the whole tile; these are some of its rows.
        row += unsafe {
            // 16 rows are two times 8: 12 and 4 would leave the 4 waiting for their own sums.
            if S::LANES == 16 && left >= 12 && left != 16 {
                columns::<S, B, 12, ADJACENT, TREE>(s, &tile, a, b, out)
            } else if S::LANES == 16 && left >= 8 {
                columns::<S, B, 8, ADJACENT, TREE>(s, &tile, a, b, out)
            } else if S::LANES == 8 && left >= 6 {
                columns::<S, B, 6, ADJACENT, TREE>(s, &tile, a, b, out)
            } else if left >= 4 {
                columns::<S, B, 4, ADJACENT, TREE>(s, &tile, a, b, out)
            } else if S::LANES > 1 && left >= 2 {
                columns::<S, B, 2, ADJACENT, TREE>(s, &tile, a, b, out)
            } else {
                columns::<S, B, 1, ADJACENT, TREE>(s, &tile, a, b, out)
            }
        };
    }
}

/// All columns of `ROWS` rows; returns `ROWS`.
#[inline(always)]
unsafe fn columns<S: Simd, B: Steps, const ROWS: usize, const ADJACENT: bool, const TREE: bool>(
    s: S,
    tile: &Tile<'_, f32>,
    a: *const f32,
    b: B,
    out: *mut f32,
) -> usize {
    let mut column = 0;
    if S::LANES == 16 && B::vectors(ROWS) == 8 {
        while column + 8 * S::LANES <= tile.columns {
            // SAFETY: the caller's promise; these columns are below `tile.columns`.
            unsafe { fma_chains::<S, B, ROWS, 8, ADJACENT, TREE>(s, tile, a, b, column, out.add(column)) };
            column += 8 * S::LANES;
        }
    }
    if S::LANES == 16 && B::vectors(ROWS) >= 4 {
        while column + 4 * S::LANES <= tile.columns {
            // SAFETY: as above.
            unsafe { fma_chains::<S, B, ROWS, 4, ADJACENT, TREE>(s, tile, a, b, column, out.add(column)) };
            column += 4 * S::LANES;
        }
    }
    while column + 2 * S::LANES <= tile.columns {
        // SAFETY: the caller's promise; these columns are below `tile.columns`.
        unsafe { fma_chains::<S, B, ROWS, 2, ADJACENT, TREE>(s, tile, a, b, column, out.add(column)) };
        column += 2 * S::LANES;
    }
    if column < tile.columns {
        // SAFETY: as above; one vector is left, because `columns` is a multiple of 16 and so of LANES.
        unsafe { fma_chains::<S, B, ROWS, 1, ADJACENT, TREE>(s, tile, a, b, column, out.add(column)) };
    }
    ROWS
}

/// The innermost loops: `ROWS` by `VECTORS` accumulators.
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
    a: *const f32,
    b: B,
    column: usize,
    out: *mut f32,
) {
    let zero = s.splat(0.0);
    // Finished subtrees: a binary counter, one place per level of the tree.
    let mut stack = [[[zero; VECTORS]; ROWS]; 3];
    let whole = [0, tile.order.end()];
    let bounds = match tile.order {
        Order::Tree(bounds) => bounds,
        Order::Chain(_) => &whole[..],
    };
    let segments = bounds.len() - 1;
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
        unsafe {
            chain::<S, B, ROWS, VECTORS, ADJACENT>(s, &mut sums, tile.left, a, b, column, bounds[i], bounds[i + 1])
        };
        let mut level = 0;
        while i >> level & 1 == 1 {
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    sums[r][v] = s.add(stack[level][r][v], sums[r][v]);
                }
            }
            level += 1;
        }
        for r in 0..ROWS {
            for v in 0..VECTORS {
                if i + 1 < segments {
                    stack[level][r][v] = sums[r][v];
                } else {
                    // SAFETY: `Tile::check` bounded the output.
                    unsafe { s.store(sums[r][v], out.add(r * tile.out_stride + v * S::LANES)) };
                }
            }
        }
    }
}

/// Continues the chains in `sums` over k in `from..to`; only the end of the last segment is odd, and the empty ones after
/// it start there.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn chain<S: Simd, B: Steps, const ROWS: usize, const VECTORS: usize, const ADJACENT: bool>(
    s: S,
    sums: &mut [[S::F; VECTORS]; ROWS],
    left: Left<'_, f32>,
    a: *const f32,
    b: B,
    column: usize,
    from: usize,
    to: usize,
) {
    let row_stride = if ADJACENT { 1 } else { left.row_stride };
    // A copy that lives in registers while the loop runs.
    let mut live = *sums;
    for at in from.div_ceil(B::K)..to.div_ceil(B::K) {
        // SAFETY: `Tile::check` bounded every step below the order's end, for all rows and columns.
        unsafe {
            let mut first = [s.splat(0.0); VECTORS];
            let mut second = [s.splat(0.0); VECTORS];
            for v in 0..VECTORS {
                (first[v], second[v]) = b.load(s, at, column + v * S::LANES);
            }
            b.ask(column / (VECTORS * S::LANES) * to + at, (VECTORS * S::LANES).div_ceil(32));
            let x = a.add(at * B::K * left.step);
            for r in 0..ROWS {
                let x = s.splat(*x.add(r * row_stride));
                for v in 0..VECTORS {
                    live[r][v] = s.fma(x, first[v], live[r][v]);
                }
            }
            if B::K == 2 {
                for r in 0..ROWS {
                    let x = s.splat(*x.add(left.step + r * row_stride));
                    for v in 0..VECTORS {
                        live[r][v] = s.fma(x, second[v], live[r][v]);
                    }
                }
            }
        }
    }
    *sums = live;
}

/// Whether `VDPBF16PS` gives the bits of two fused multiply-adds for operands whose smallest nonzero magnitudes are
/// these: none is subnormal, and every partial sum is a multiple of 2^-126, so nothing is flushed.
pub fn dot_is_exact(least_left: f32, least_right: f32) -> bool {
    let exponent = |x: f32| (x.to_bits() >> 23) as i32 - 127;
    let normal = |x: f32| x >= f32::MIN_POSITIVE;
    normal(least_left) && normal(least_right) && exponent(least_left) + exponent(least_right) >= -112
}

/// Runs `tile` with `VDPBF16PS`; both operands are pairs, and `cpu` has [`Isa::Avx512Bf16`].
pub fn dot_tile(cpu: &Cpu, tile: Tile<'_, u32>) {
    assert!(cpu.isa() == Isa::Avx512Bf16, "{} has no dot product of pairs", cpu.isa());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Cpu::new` refuses an isa that `Isa::available` does not find on this machine.
    unsafe {
        dot_heights(tile);
    }
    #[cfg(not(target_arch = "x86_64"))]
    drop(tile);
}

/// [`dot_tile`] of [`TILE_ROWS`] rows and a coded panel, whose pairs are left in `slot` as [`Right::Pairs`] has them.
pub fn dot_unpacking(cpu: &Cpu, tile: Tile<'_, u32>, slot: &mut [u32]) {
    let Right::Coded(coded) = tile.right else { panic!("only coded panels are unpacked") };
    let end = tile.order.end().div_ceil(2);
    assert!(
        cpu.isa() == Isa::Avx512Bf16 && tile.rows == TILE_ROWS && end == coded.pairs() && slot.len() >= end * PANEL
    );
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Cpu::new` refuses an isa that the machine lacks; `slot` has room for all pairs.
    unsafe {
        tile.check(true);
        let bounds = coded_bounds(&tile);
        let (left, step, stride) = (tile.left.data.as_ptr(), tile.left.step, tile.out_stride);
        dot_coded::<TILE_ROWS, true>(&coded, left, step, bounds, tile.out.as_mut_ptr(), stride, slot.as_mut_ptr());
    }
}

/// Cuts the rows of a tile into heights the registers hold.
///
/// # Safety
/// The machine has the instructions of [`Isa::Avx512Bf16`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn dot_heights(tile: Tile<'_, u32>) {
    tile.check(true);
    let (data, stride) = match tile.right {
        Right::Pairs(data, stride) => (data, stride),
        // SAFETY: the caller's promise.
        Right::Coded(coded) => return unsafe { coded_heights(tile, coded) },
        _ => panic!("dot_tile takes pairs"),
    };
    let b = (data.as_ptr(), stride);
    let mut row = 0;
    while row < tile.rows {
        let left = tile.rows - row;
        // Without steps the left operand is empty and never read.
        let a = tile.left.data.as_ptr().wrapping_add(row * tile.left.row_stride);
        let out = tile.out[row * tile.out_stride..].as_mut_ptr();
        let adjacent = tile.left.row_stride == 1;
        macro_rules! rows {
            ($rows:literal) => {{
                let mut column = 0;
                // SAFETY: `Tile::check` bounded every (row, step, column) of the whole tile.
                unsafe {
                    while column + 32 <= tile.columns {
                        match adjacent {
                            true => dot_chains::<$rows, 2, true>(&tile, a, b, column, out.add(column)),
                            false => dot_chains::<$rows, 2, false>(&tile, a, b, column, out.add(column)),
                        }
                        column += 32;
                    }
                    if column < tile.columns {
                        match adjacent {
                            true => dot_chains::<$rows, 1, true>(&tile, a, b, column, out.add(column)),
                            false => dot_chains::<$rows, 1, false>(&tile, a, b, column, out.add(column)),
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
                    unsafe { dot_row(&tile, a, b, bounds, out) };
                    1
                }
                _ => rows!(1),
            },
        };
    }
}

/// The segments of a tile whose right operand is coded, as `dot_coded` takes them.
#[cfg(target_arch = "x86_64")]
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

/// [`dot_heights`] of a coded panel.
///
/// # Safety
/// The machine has the instructions of [`Isa::Avx512Bf16`]; the tile is checked.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn coded_heights(tile: Tile<'_, u32>, coded: Coded<'_>) {
    let bounds = coded_bounds(&tile);
    let mut row = 0;
    while row < tile.rows {
        let left = tile.left.data.as_ptr().wrapping_add(row);
        let out = tile.out[row * tile.out_stride..].as_mut_ptr();
        macro_rules! rows {
            ($rows:literal) => {{
                // SAFETY: `Tile::check` bounded every (row, step) of the whole tile, and the panel's k.
                unsafe {
                    let (step, stride) = (tile.left.step, tile.out_stride);
                    dot_coded::<$rows, false>(&coded, left, step, bounds, out, stride, std::ptr::null_mut());
                }
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
                unsafe { dot_coded_row(&coded, left, bounds, out) };
                1
            }
            _ => rows!(1),
        };
    }
}

/// One row of a whole tree: four segments at a time, because one chain alone waits for its own sums.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn dot_row(
    tile: &Tile<'_, u32>,
    a: *const u32,
    (b, stride): (*const u32, usize),
    bounds: &[usize],
    out: *mut f32,
) {
    use std::arch::x86_64::*;
    use std::mem::transmute;
    let zero = _mm512_setzero_ps();
    let mut sums = [[zero; 2]; 8];
    for half in 0..2 {
        let first: [usize; 4] = std::array::from_fn(|i| bounds[4 * half + i].div_ceil(2));
        let len: [usize; 4] = std::array::from_fn(|i| bounds[4 * half + i + 1].div_ceil(2) - first[i]);
        let shared = len.into_iter().min().unwrap_or(0);
        let mut live = [[zero; 2]; 4];
        let step = |sum: &mut [__m512; 2], at: usize| {
            // SAFETY: `Tile::check` bounded every step below the order's end; a vector of i32 and one of pairs of bf16
            // have the same 512 bits.
            unsafe {
                let right = b.add(at * stride);
                let x = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*a.add(at * tile.left.step) as i32));
                let pairs = |v: usize| transmute::<__m512i, __m512bh>(_mm512_loadu_si512(right.add(16 * v).cast()));
                sum[0] = _mm512_dpbf16_ps(sum[0], x, pairs(0));
                sum[1] = _mm512_dpbf16_ps(sum[1], x, pairs(1));
            }
        };
        for at in 0..shared {
            for i in 0..4 {
                step(&mut live[i], first[i] + at);
            }
        }
        for i in 0..4 {
            (shared..len[i]).for_each(|at| step(&mut live[i], first[i] + at));
            sums[4 * half + i] = live[i];
        }
    }
    for v in 0..2 {
        let pair = |i: usize| _mm512_add_ps(sums[i][v], sums[i + 1][v]);
        let total = _mm512_add_ps(_mm512_add_ps(pair(0), pair(2)), _mm512_add_ps(pair(4), pair(6)));
        // SAFETY: `Tile::check` bounded the output.
        unsafe { _mm512_storeu_ps(out.add(16 * v), total) };
    }
}

/// So many bytes ahead the weights of few rows are asked for.
const STREAMED: usize = 16384;

/// The innermost loops of [`dot_tile`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn dot_chains<const ROWS: usize, const VECTORS: usize, const ADJACENT: bool>(
    tile: &Tile<'_, u32>,
    a: *const u32,
    (b, stride): (*const u32, usize),
    column: usize,
    out: *mut f32,
) {
    use std::arch::x86_64::*;
    use std::mem::{MaybeUninit, transmute};
    let zero = _mm512_setzero_ps();
    let row_stride = if ADJACENT { 1 } else { tile.left.row_stride };
    let step = tile.left.step;
    // As in `fma_chains`.
    let mut stack = [[[MaybeUninit::<__m512>::uninit(); VECTORS]; ROWS]; 3];
    let Order::Tree(bounds) = tile.order else { panic!("dot_tile sums trees") };
    let next = step * tile.order.end().div_ceil(2);
    let segments = bounds.len() - 1;
    for i in 0..segments {
        let mut sums = [[zero; VECTORS]; ROWS];
        let (from, to) = (bounds[i].div_ceil(2), bounds[i + 1].div_ceil(2));
        // SAFETY: `Tile::check` bounded every step below the order's end, for all rows and columns; a vector of i32 and
        // one of pairs of bf16 have the same 512 bits.
        unsafe {
            // A copy that lives in registers while the loop runs.
            let mut live = sums;
            for at in from..to {
                let right = b.add(at * stride + column);
                let first = transmute::<__m512i, __m512bh>(_mm512_loadu_si512(right.cast()));
                let last = match VECTORS {
                    2 => transmute::<__m512i, __m512bh>(_mm512_loadu_si512(right.add(16).cast())),
                    _ => first,
                };
                let left = a.add(at * step);
                if ADJACENT && ROWS >= 12 {
                    // The rows of the next tile stand behind these.
                    _mm_prefetch::<_MM_HINT_T1>(left.wrapping_add(next).cast());
                }
                if ROWS <= 8 {
                    // Few rows are done with a weight sooner than the next one comes by itself.
                    for v in 0..VECTORS {
                        _mm_prefetch::<_MM_HINT_T0>(right.wrapping_add(STREAMED / 4 + 16 * v).cast());
                    }
                }
                for r in 0..ROWS {
                    let x = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*left.add(r * row_stride) as i32));
                    live[r][0] = _mm512_dpbf16_ps(live[r][0], x, first);
                    if VECTORS == 2 {
                        live[r][VECTORS - 1] = _mm512_dpbf16_ps(live[r][VECTORS - 1], x, last);
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
                    sums[r][v] = _mm512_add_ps(unsafe { stack[level][r][v].assume_init() }, sums[r][v]);
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
                    unsafe { _mm512_storeu_ps(out.add(r * tile.out_stride + v * 16), sums[r][v]) };
                }
            }
        }
    }
}
