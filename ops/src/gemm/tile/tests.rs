//! Tiles against plain chains: NaN stands around all that they may read, and nothing else of what they write to changes.

use super::*;
use crate::gemm::gemm_dw::WHOLE;
use crate::gemm::tests::{number, plain};
use crate::pack::dictionary::Form;
use crate::pack::dictionary::tests::packed;
use crate::simd::words::{Kernel512, Simd512};
use crate::{Cpu, Isa};
use half::bf16;

fn cpus(fits: impl Fn(Isa) -> bool) -> Vec<Cpu> {
    Isa::of_machine().filter(|&isa| fits(isa)).map(|isa| Cpu::new(isa, 1, usize::MAX).unwrap()).collect()
}

fn x(row: usize, k: usize) -> bf16 {
    number(row * 5003 + k)
}

fn w(column: usize, k: usize) -> bf16 {
    number(1_000_003 + column * 7001 + k)
}

fn pair(earlier: bf16, later: bf16) -> u32 {
    u32::from(earlier.to_bits()) << 16 | u32::from(later.to_bits())
}

/// Some bounds for a sum of `k`: of the whole, and of what ranks hold.
fn trees(k: usize) -> Vec<Vec<usize>> {
    let length = 16 * k.div_ceil(128);
    let tree = |count: usize| (0..=count).map(|i| if i == count { k } else { (i * length).min(k) }).collect();
    [8, 4, 2, 1].map(tree).to_vec()
}

/// [`plain`] for so many rows and columns.
fn all_plain(bounds: &[usize], size: [usize; 2], w: impl Fn(usize, usize) -> bf16) -> Vec<u32> {
    let [rows, columns] = size;
    let sum = |i: usize| plain(bounds, |k| x(i / columns, k).to_f32(), |k| w(i % columns, k).to_f32());
    (0..rows * columns).map(|i| sum(i).to_bits()).collect()
}

/// What is around operands: NaN, as f32 and as two bf16.
const NAN: u32 = 0x7FC0_7FC0;
/// What stands in outputs before.
const BEFORE: f32 = 7e7;
/// How much of either there is.
const AROUND: usize = 64;

fn around<T: Copy>(len: usize, value: T) -> Vec<T> {
    vec![value; len + 2 * AROUND]
}

/// Whether `out`, in the middle of what it stands in, holds `expected(row, column)` and nothing else has changed.
fn assert_holds(all: &[f32], stride: usize, size: [usize; 2], expected: impl Fn(usize, usize) -> u32, what: &str) {
    for (i, found) in all.iter().enumerate() {
        let at = i.wrapping_sub(AROUND);
        let (row, column) = (at / stride, at % stride);
        let inside = i >= AROUND && row < size[0] && column < size[1];
        let expected = if inside { expected(row, column) } else { BEFORE.to_bits() };
        assert_eq!(found.to_bits(), expected, "{what}: row {row}, column {column}");
    }
}

/// Pairs of x: `rows` rows from 0 on, an odd end padded with +0.
fn left_pairs(rows: usize, k: usize, row_stride: usize, step: usize) -> Vec<u32> {
    let pairs = k.div_ceil(2);
    let mut left = around(if pairs == 0 { 0 } else { last(rows, row_stride, pairs, step) + 1 }, NAN);
    for r in 0..rows {
        for p in 0..pairs {
            let later = if 2 * p + 1 < k { x(r, 2 * p + 1) } else { bf16::ZERO };
            left[AROUND + r * row_stride + p * step] = pair(x(r, 2 * p), later);
        }
    }
    left
}

fn inner<T>(all: &[T]) -> &[T] {
    &all[AROUND..all.len() - AROUND]
}

/// Pairs of w in VNNI form, an odd end padded with -0.
fn right_pairs(columns: usize, k: usize, stride: usize) -> Vec<u32> {
    let pairs = k.div_ceil(2);
    let mut right = around(if pairs == 0 { 0 } else { (pairs - 1) * stride + columns }, NAN);
    for c in 0..columns {
        for p in 0..pairs {
            let later = if 2 * p + 1 < k { w(c, 2 * p + 1) } else { bf16::NEG_ZERO };
            right[AROUND + p * stride + c] = pair(w(c, 2 * p), later);
        }
    }
    right
}

pub(crate) fn tiles_of_pairs_are_plain_chains() {
    for cpu in cpus(Isa::has_dot) {
        for k in [0usize, 1, 67, 130, 255] {
            let end = k.div_ceil(2);
            for bounds in trees(k) {
                let most = if bounds.len() == 9 { MAX_ROWS } else { 13 };
                let sums = all_plain(&bounds, [most, 64], w);
                for (rows, columns, adjacent) in (1..=most)
                    .flat_map(|rows| [16, 32, 48, 64].map(|columns| (rows, columns)))
                    .flat_map(|(rows, columns)| [true, false].map(|adjacent| (rows, columns, adjacent)))
                {
                    let (row_stride, step) = if adjacent { (1, rows + 1) } else { (end + 1, 1) };
                    let (stride, out_stride) = (columns + 16, columns + 3);
                    let (left, right) = (left_pairs(rows, k, row_stride, step), right_pairs(columns, k, stride));
                    let mut out = around((rows - 1) * out_stride + columns, BEFORE);
                    let size = out.len();
                    let tile = Tile {
                        left: Left { data: inner(&left), row_stride, step },
                        right: Right::Vnni(inner(&right), stride),
                        order: Order::Tree(&bounds),
                        rows,
                        columns,
                        out: &mut out[AROUND..size - AROUND],
                        out_stride,
                    };
                    dot_tile(&cpu, tile);
                    let what = format!("{} k {k} {bounds:?}: {rows} x {columns} {adjacent}", cpu.isa());
                    let sum = |row: usize, column: usize| sums[row * 64 + column];
                    assert_holds(&out, out_stride, [rows, columns], sum, &what);
                }
            }
        }
    }
}

/// Weights with an escape in each of these blocks: one weight that is far smaller, among those that the dictionary is not made
/// of (those of every seventh pair).
fn escaped(column: usize, k: usize, escapes: &[usize]) -> bf16 {
    let place = |block: usize| {
        let second = match block % 7 {
            0 => true,
            3 => false,
            _ => block.is_multiple_of(2),
        };
        (block % PANEL, 4 * block + 2 * usize::from(second) + usize::from(block % 5 == 1))
    };
    let small = escapes.iter().any(|&block| place(block) == (column % PANEL, k));
    if small { bf16::from_f32(w(column, k).to_f32() * 1e-12) } else { w(column, k) }
}

pub(crate) fn tiles_of_coded_panels_are_plain_chains() {
    for cpu in cpus(Isa::reads_coded) {
        for (k, escapes) in [
            (0, &[][..]),
            (1, &[]),
            (6, &[1]),
            (67, &[0, 16]),
            (130, &[]),
            (260, &[0, 1, 64]),
            (300, &[11, 12, 13, 74]),
            (515, &[7, 19, 20, 21, 40, 99, 128]),
            (1100, &[0, 35, 36, 71, 72, 73, 74, 100, 108, 109, 180, 251, 252, 253, 254, 273, 274]),
        ] {
            // Of two panels the second is taken: what is read before or behind it is another number.
            let n = 2 * PANEL;
            let weights: Vec<bf16> = (0..n * k).map(|i| escaped(i / k, i % k, escapes)).collect();
            let memory = packed(&cpu, n, k, &weights).expect("few escapes");
            let mut words = memory.to_vec();
            words.extend([NAN; AROUND]);
            let (coded, _) = DictionaryPanel::panel(Form::of(n, k), &words, 1);
            // The -0 behind an odd k may make one more.
            let found = coded.escape_numbers();
            let listed = escapes.iter().all(|&block| found.contains(&(block as u32)));
            assert!(listed && found.len() <= escapes.len() + 1, "k {k}: {found:?}");
            let w = |column: usize, k: usize| escaped(PANEL + column, k, escapes);
            for bounds in trees(k) {
                let most = if bounds.len() == 9 { MAX_ROWS } else { 4 };
                let sums = all_plain(&bounds, [most, PANEL], w);
                for (rows, step) in (1..=most).flat_map(|rows| [(rows, rows), (rows, rows + 1)]) {
                    let left = left_pairs(rows, k, 1, step);
                    let dots = cpu.isa().has_dot();
                    for unpacking in
                        [false, true].into_iter().filter(|unpacking| !unpacking || dots && rows == TILE_ROWS)
                    {
                        let out_stride = PANEL + 3;
                        let mut out = around((rows - 1) * out_stride + PANEL, BEFORE);
                        let mut slot = around(coded.pairs() * PANEL, NAN);
                        let (size, slot_size) = (out.len(), slot.len());
                        let (right, order) = (Right::Dictionary(coded), Order::Tree(&bounds));
                        let tile_out = &mut out[AROUND..size - AROUND];
                        if dots {
                            let left = Left { data: inner(&left), row_stride: 1, step };
                            let tile = Tile { left, right, order, rows, columns: PANEL, out: tile_out, out_stride };
                            match unpacking {
                                true => dot_unpacking(&cpu, tile, &mut slot[AROUND..slot_size - AROUND]),
                                false => dot_tile(&cpu, tile),
                            }
                        } else {
                            let left = left_floats(rows, k, k.next_multiple_of(2), 1, step);
                            let left = Left { data: inner(&left), row_stride: 1, step };
                            fma_tile(
                                &cpu,
                                Tile { left, right, order, rows, columns: PANEL, out: tile_out, out_stride },
                            );
                        }
                        let what = format!("{} k {k} {bounds:?}: {rows} rows, step {step} {unpacking}", cpu.isa());
                        let sum = |row: usize, column: usize| sums[row * PANEL + column];
                        assert_holds(&out, out_stride, [rows, PANEL], sum, &what);
                        for (i, &found) in slot.iter().enumerate() {
                            let at = i.wrapping_sub(AROUND);
                            let inside = unpacking && i >= AROUND && at < coded.pairs() * PANEL;
                            let expected = if inside { coded.pair(at / PANEL, at % PANEL) } else { NAN };
                            assert_eq!(found, expected, "{what}: pair {}, column {}", at / PANEL, at % PANEL);
                        }
                    }
                    let height = block_rows(cpu.isa()).expect("vectors");
                    if dots || !rows.is_multiple_of(height) {
                        continue;
                    }
                    let (tiles, stride) = (rows / height, k * height + step);
                    let mut left = around((tiles - 1) * stride + k * height, f32::NAN);
                    for (row, k) in (0..rows).flat_map(|row| (0..k).map(move |k| (row, k))) {
                        left[AROUND + row / height * stride + k * height + row % height] = x(row, k).to_f32();
                    }
                    let mut scratch = vec![f32::NAN; block_words(rows)];
                    let (left, right, scratch) = (inner(&left), Right::Dictionary(coded), &mut scratch[..]);
                    let found = fma_block(&cpu, Block { left, stride, tiles, right, bounds: &bounds, scratch });
                    let found: Vec<u32> = found.iter().map(|sum| sum.to_bits()).collect();
                    assert_eq!(found, sums[..rows * PANEL], "{} k {k} {bounds:?}: a block of {rows}", cpu.isa());
                }
            }
        }
    }
}

/// A block of two pairs is in one segment.
pub(crate) fn segments_of_coded_panels_are_whole_blocks() {
    for cpu in cpus(Isa::reads_coded) {
        let (n, k) = (PANEL, 12);
        let weights: Vec<bf16> = (0..n * k).map(|i| w(i / k, i % k)).collect();
        let memory = packed(&cpu, n, k, &weights).expect("few escapes");
        let (coded, _) = DictionaryPanel::panel(Form::of(n, k), &memory, 0);
        for (bounds, taken) in [([0, 8, 12], true), ([0, 6, 12], false), ([2, 8, 12], false)] {
            let (left, mut out) = (left_pairs(1, k, 1, 1), [0f32; PANEL]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let (right, order) = (Right::Dictionary(coded), Order::Tree(&bounds));
                let (rows, columns, out, out_stride) = (1, PANEL, &mut out[..], PANEL);
                if cpu.isa().has_dot() {
                    let left = Left { data: inner(&left), row_stride: 1, step: 1 };
                    dot_tile(&cpu, Tile { left, right, order, rows, columns, out, out_stride });
                } else {
                    let left = Left { data: &[1f32; 12][..], row_stride: 1, step: 1 };
                    fma_tile(&cpu, Tile { left, right, order, rows, columns, out, out_stride });
                }
            }));
            assert_eq!(run.is_ok(), taken, "{bounds:?}");
        }
    }
}

/// f32 of x: `rows` rows from 0 on, +0 from k to `end`.
fn left_floats(rows: usize, k: usize, end: usize, row_stride: usize, step: usize) -> Vec<f32> {
    let mut left = around(if end == 0 { 0 } else { last(rows, row_stride, end, step) + 1 }, f32::NAN);
    for r in 0..rows {
        for at in 0..end {
            left[AROUND + r * row_stride + at * step] = if at < k { x(r, at).to_f32() } else { 0.0 };
        }
    }
    left
}

/// w in rows of k.
fn right_rows<T: Copy>(columns: usize, k: usize, stride: usize, nan: T, of: impl Fn(bf16) -> T) -> Vec<T> {
    let mut right = around(if k == 0 { 0 } else { (k - 1) * stride + columns }, nan);
    for c in 0..columns {
        for at in 0..k {
            right[AROUND + at * stride + c] = of(w(c, at));
        }
    }
    right
}

/// What a chain goes on from.
fn start(row: usize, column: usize) -> f32 {
    number(5_000_011 + row * 9001 + column).to_f32()
}

pub(crate) fn tiles_of_multiply_adds_are_plain_chains() {
    let every: Vec<usize> = (1..=MAX_ROWS).collect();
    let cpus = cpus(|_| true);
    for (k, heights, widths) in [
        (0, &[3][..], &[16][..]),
        (1, &[1, 5], &[16, 48]),
        // Two of the widest tiles of bf16, and one of each narrower one.
        (6, &every, &[16, 32, 48, 368]),
        (7, &[2], &[16]),
        (255, &[1, 2, 7, 8, 12, 16], &[48]),
        (258, &[3], &[16]),
        // From memory, and from so near that nothing is prefetched.
        (520, &[1, 3, 12], &[32]),
    ] {
        let (most, widest) = (*heights.last().unwrap(), *widths.last().unwrap());
        let chain = |i: usize| {
            let (row, column) = (i / widest, i % widest);
            (0..k).fold(start(row, column), |sum, k| x(row, k).to_f32().mul_add(w(column, k).to_f32(), sum)).to_bits()
        };
        // The sums of every order; a chain has no bounds.
        let trees = trees(k).into_iter().map(|bounds| (all_plain(&bounds, [most, widest], w), bounds));
        let sums: Vec<_> = trees.chain([((0..most * widest).map(chain).collect(), vec![])]).collect();
        for &columns in widths {
            let stride = columns + 16;
            let floats = right_rows(columns, k, stride, f32::NAN, bf16::to_f32);
            let narrow = right_rows(columns, k, stride, bf16::NAN, |w| w);
            let pairs = right_pairs(columns, k, stride);
            let as_in_rows: Vec<u32> = pairs.iter().map(|pair| pair.rotate_left(16)).collect();
            let ahead = Prefetch::of(&narrow);
            let rights = [
                Right::F32(inner(&floats), stride),
                Right::Bf16(inner(&narrow), stride, ahead),
                Right::Vnni(inner(&pairs), stride),
                Right::PairsAsking(inner(&as_in_rows), stride, ahead),
            ];
            for (right, &rows, layout) in rights
                .into_iter()
                .flat_map(|right| heights.iter().map(move |rows| (right, rows)))
                .flat_map(|(right, rows)| (0..3).map(move |layout| (right, rows, layout)))
            {
                let end =
                    if matches!(right, Right::Vnni(..) | Right::PairsAsking(..)) { k.next_multiple_of(2) } else { k };
                let (row_stride, step) = [(1, rows + 1), (2, 2 * rows + 1), (end + 1, 1)][layout];
                let left = left_floats(rows, k, end, row_stride, step);
                for (sums, bounds) in &sums {
                    let order = if bounds.is_empty() { Order::Chain(k) } else { Order::Tree(bounds) };
                    // Those that ops use.
                    match (right, order) {
                        (Right::Bf16(..), Order::Tree(_)) => continue,
                        (Right::Vnni(..), Order::Chain(_)) if layout > 0 => continue,
                        (Right::PairsAsking(..), Order::Chain(_)) => continue,
                        (Right::PairsAsking(..), _) if layout > 0 => continue,
                        _ => {}
                    }
                    for cpu in &cpus {
                        let out_stride = columns + 3;
                        let mut out = around((rows - 1) * out_stride + columns, BEFORE);
                        let size = out.len();
                        if bounds.is_empty() {
                            for i in 0..rows * columns {
                                let (row, column) = (i / columns, i % columns);
                                out[AROUND + row * out_stride + column] = start(row, column);
                            }
                        }
                        let tile = Tile {
                            left: Left { data: inner(&left), row_stride, step },
                            right,
                            order,
                            rows,
                            columns,
                            out: &mut out[AROUND..size - AROUND],
                            out_stride,
                        };
                        fma_tile(cpu, tile);
                        let form = match right {
                            Right::F32(..) => "f32",
                            Right::Vnni(..) => "pairs",
                            Right::PairsAsking(..) => "pairs as in rows",
                            _ => "bf16",
                        };
                        let what = format!(
                            "{} {form} k {k} {bounds:?}: {rows} x {columns}, row stride {row_stride}",
                            cpu.isa()
                        );
                        let sum = |row: usize, column: usize| sums[row * widest + column];
                        assert_holds(&out, out_stride, [rows, columns], sum, &what);
                    }
                }
            }
        }
    }
}

/// Pairs of an odd k read one element more of the left.
pub(crate) fn tiles_of_multiply_adds_without_a_pad_are_refused() {
    for cpu in cpus(|_| true) {
        for (k, len, taken) in [(5usize, 6, true), (5, 5, false), (4, 4, true), (4, 3, false), (0, 0, true)] {
            let (left, right) = (vec![0f32; len], vec![0u32; PANEL * k.div_ceil(2)]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let left = Left { data: &left[..], row_stride: 1, step: 1 };
                let (right, order) = (Right::Vnni(&right, PANEL), Order::Chain(k));
                let out = &mut [0f32; PANEL];
                fma_tile(&cpu, Tile { left, right, order, rows: 1, columns: PANEL, out, out_stride: PANEL });
            }));
            assert_eq!(run.is_ok(), taken, "{} k {k} in {len}", cpu.isa());
        }
    }
}

pub(crate) fn blocks_are_plain_chains() {
    for cpu in cpus(|isa| block_rows(isa).is_some()) {
        let height = block_rows(cpu.isa()).expect("vectors");
        for (k, tiles) in [(0, 1), (1, 2), (67, 3), (130, 1), (896, 2), (1024, 2), (1100, 1), (2101, 2)] {
            for bounds in trees(k) {
                let (stride, rows) = (k * height + 5, tiles * height);
                let expected = all_plain(&bounds, [rows, PANEL], w);
                let mut left = around((tiles - 1) * stride + k * height, f32::NAN);
                for row in 0..rows {
                    for k in 0..k {
                        left[AROUND + row / height * stride + k * height + row % height] = x(row, k).to_f32();
                    }
                }
                let mut floats = around(k * PANEL, f32::NAN);
                for (i, float) in floats[AROUND..][..k * PANEL].iter_mut().enumerate() {
                    *float = w(i % PANEL, i / PANEL).to_f32();
                }
                let pairs = right_pairs(PANEL, k, PANEL);
                for right in [Right::F32(inner(&floats), PANEL), Right::Vnni(inner(&pairs), PANEL)] {
                    let mut scratch = around(block_words(rows), BEFORE);
                    let size = scratch.len();
                    let (left, scratch_of) = (inner(&left), &mut scratch[AROUND..size - AROUND]);
                    scratch_of.fill(f32::NAN);
                    let block = Block { left, stride, tiles, right, bounds: &bounds, scratch: scratch_of };
                    let sums = fma_block(&cpu, block);
                    assert_eq!(sums.len(), rows * PANEL);
                    let form = if matches!(right, Right::F32(..)) { "f32" } else { "pairs" };
                    for (i, (sum, expected)) in sums.iter().zip(&expected).enumerate() {
                        let what =
                            format!("{} {form} k {k} {bounds:?}: row {}, column {}", cpu.isa(), i / PANEL, i % PANEL);
                        assert_eq!(sum.to_bits(), *expected, "{what}");
                    }
                    let edges = scratch[..AROUND].iter().chain(&scratch[size - AROUND..]);
                    assert!(edges.copied().all(|value| value == BEFORE), "{}: outside of scratch memory", cpu.isa());
                }
            }
        }
    }
}

/// Chains begin with +0 or go on from what stands where they end, rows of any distance.
pub(crate) fn blocks_of_chains_are_plain_chains() {
    for cpu in cpus(|isa| block_rows(isa).is_some()) {
        let height = block_rows(cpu.isa()).expect("vectors");
        for (k, tiles, row) in [(0, 1, 32), (1, 2, 40), (67, 3, 48), (130, 1, 32), (258, 2, 33), (1030, 8, 100)] {
            let (stride, rows) = (k * height + 5, tiles * height);
            let mut left = around((tiles - 1) * stride + k * height, f32::NAN);
            for (row, k) in (0..rows).flat_map(|row| (0..k).map(move |k| (row, k))) {
                left[AROUND + row / height * stride + k * height + row % height] = x(row, k).to_f32();
            }
            let mut floats = around(k * PANEL, f32::NAN);
            for (i, float) in floats[AROUND..][..k * PANEL].iter_mut().enumerate() {
                *float = w(i % PANEL, i / PANEL).to_f32();
            }
            for begins in [false, true] {
                let mut out = around((rows - 1) * row + PANEL, BEFORE);
                // What chains that begin do not read.
                let unread = f32::from_bits(0xFFC1_2345);
                let first = |row: usize, column: usize| if begins { unread } else { start(row, column) };
                for r in 0..rows {
                    (0..PANEL).for_each(|c| out[AROUND + r * row + c] = first(r, c));
                }
                let (left, right, sums) = (inner(&left), inner(&floats), out[AROUND..].as_mut_ptr());
                let chains = Chains { left, stride, tiles, right, steps: k, begins, out: (sums, row) };
                // SAFETY: there is room for all rows.
                unsafe { fma_chains(&cpu, chains) };
                let sum = |row: usize, column: usize| {
                    let term = |sum: f32, k| x(row, k).to_f32().mul_add(w(column, k).to_f32(), sum);
                    let first = if begins { 0.0 } else { start(row, column) };
                    (0..k).fold(first, term).to_bits()
                };
                assert_holds(&out, row, [rows, PANEL], sum, &format!("{} k {k}, {begins}: chains", cpu.isa()));
            }
        }
    }
}

/// A NaN that a chain comes to is the canonical one.
pub(crate) fn chains_end_with_the_last_rounding() {
    for cpu in cpus(|isa| block_rows(isa).is_some()) {
        let rows = block_rows(cpu.isa()).expect("vectors");
        let (left, right) = (vec![f32::from_bits(0xFFC1_2345); rows], vec![1f32; PANEL]);
        let mut out = vec![0f32; rows * PANEL];
        let sums = out.as_mut_ptr();
        let chains =
            Chains { left: &left, stride: 0, tiles: 1, right: &right, steps: 1, begins: true, out: (sums, PANEL) };
        // SAFETY: there is room for all rows.
        unsafe { fma_chains(&cpu, chains) };
        assert!(out.iter().all(|sum| sum.to_bits() == 0x7FC0_0000), "{}", cpu.isa());
    }
}

pub(crate) fn blocks_of_too_little_are_refused() {
    for cpu in cpus(|isa| block_rows(isa).is_some()) {
        let rows = block_rows(cpu.isa()).expect("vectors");
        let (tiles, k) = (2, 6);
        let (stride, scratch) = (k * rows + 5, block_words(tiles * rows));
        let enough = [stride + k * rows, k * PANEL, scratch];
        for short in [None, Some(0), Some(1), Some(2)] {
            let len = |i: usize| enough[i] - usize::from(short == Some(i));
            let (left, right, mut scratch) = (vec![1f32; len(0)], vec![1f32; len(1)], vec![0f32; len(2)]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let (left, right, bounds) = (&left, Right::F32(&right, PANEL), &[0, k]);
                fma_block(&cpu, Block { left, stride, tiles, right, bounds, scratch: &mut scratch });
            }));
            assert_eq!(run.is_ok(), short.is_none(), "{} {short:?}", cpu.isa());
        }
        for short in [None, Some(0), Some(1)] {
            let len = |i: usize| enough[i] - usize::from(short == Some(i));
            let (left, right, mut sums) = (vec![1f32; len(0)], vec![1f32; len(1)], vec![0f32; tiles * rows * PANEL]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let out = (sums.as_mut_ptr(), PANEL);
                let chains = Chains { left: &left, stride, tiles, right: &right, steps: k, begins: true, out };
                // SAFETY: there is room for all rows.
                unsafe { fma_chains(&cpu, chains) };
            }));
            assert_eq!(run.is_ok(), short.is_none(), "{} {short:?}: chains", cpu.isa());
        }
        if !cpu.isa().reads_coded() || cpu.isa().has_dot() {
            continue;
        }
        // A coded panel has the steps that it was made of, and not those that fill its last block.
        let weights: Vec<bf16> = (0..PANEL * k).map(|i| w(i / k, i % k)).collect();
        let memory = packed(&cpu, PANEL, k, &weights).expect("few escapes");
        let (coded, _) = DictionaryPanel::panel(Form::of(PANEL, k), &memory, 0);
        for end in [k, k + 2] {
            let (left, mut scratch) = (vec![1f32; stride + end * rows], vec![0f32; scratch]);
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let (left, right, bounds) = (&left, Right::Dictionary(coded), &[0, end]);
                fma_block(&cpu, Block { left, stride, tiles, right, bounds, scratch: &mut scratch });
            }));
            assert_eq!(run.is_ok(), end == k, "{} {end}", cpu.isa());
        }
    }
}

/// A sum and two products by `VDPBF16PS`.
struct Dot(f32, [u32; 2]);

impl Kernel512 for Dot {
    type Output = f32;
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) -> f32 {
        let [a, b] = self.1.map(|word| s.set1_epi32(word as i32));
        let mut sums = [0f32; 16];
        // SAFETY: the machine has the instruction, by the caller's promise; there are 16 sums.
        unsafe { s.store(s.dpbf16_ps(s.splat(self.0), a, b), sums.as_mut_ptr()) };
        sums[0]
    }
}

pub(crate) fn dots_are_exact_as_long_as_nothing_is_flushed() {
    let power = |exponent: i32| 2f32.powi(exponent);
    // The last bits of two mantissas of 8 bits stand 14 below: at -112 their product is the smallest normal number.
    for (left, exact) in [(0, true), (-12, true), (-13, false), (-126, false)] {
        assert_eq!(dot_is_exact(power(left), power(-100)), exact, "{left}");
        assert_eq!(dot_is_exact(power(-100), power(left)), exact, "{left}");
    }
    assert!(dot_is_exact(f32::MIN_POSITIVE, power(14)) && dot_is_exact(power(14), f32::MIN_POSITIVE));
    // Nothing but zeros, or nothing finite: no product is subnormal.
    assert!(dot_is_exact(f32::INFINITY, f32::INFINITY) && dot_is_exact(f32::INFINITY, f32::MIN_POSITIVE));
    // A subnormal operand is read as zero.
    assert!(!dot_is_exact(power(-127), power(100)) && !dot_is_exact(power(100), power(-127)));
    assert!(!dot_is_exact(f32::NAN, 1.0) && !dot_is_exact(1.0, f32::NAN));
    for cpu in cpus(Isa::has_dot) {
        // What two products leave when all but the last bit of each cancels.
        let sum = |exponent: i32| {
            let [high, low] = [1.0 + power(-7), 1.0].map(bf16::from_f32);
            let factor = bf16::from_f32(power(exponent));
            // SAFETY: the machine has the instruction; the kernel has no pointers.
            unsafe { cpu.dispatch_dot(Dot(0.0, [pair(high, -low), pair(factor, factor)])) }
        };
        assert_eq!((sum(-119), sum(-120)), (power(-126), 0.0), "{}", cpu.isa());
    }
}

/// Chains of operands down to the least that [`dot_is_exact`] lets through, from sums that a gradient may go on from: each pair is
/// two fused multiply-adds, to the bit.
pub(crate) fn dots_of_exact_operands_are_fused_steps() {
    let mut state = 7u64;
    let mut word = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    for cpu in cpus(Isa::has_dot) {
        let mut small = 0;
        for chain in 0..20_000 {
            let left = (word() % 141) as i32 - 126;
            let least = [left, -112 - left];
            assert!(dot_is_exact(2f32.powi(least[0]), 2f32.powi(least[1])));
            let mut operand = |least: i32| match word() % 64 {
                0 => bf16::from_bits(word() as u16 & 0x8000),
                1 => bf16::from_bits(word() as u16 & 0x8000 | 0x7F80),
                _ => bf16::from_bits(word() as u16 & 0x807F | ((least + (word() % 4) as i32 + 127) as u16) << 7),
            };
            let mut operands: [[bf16; 4]; 8] = std::array::from_fn(|_| [0, 1, 0, 1].map(|side| operand(least[side])));
            // Every other pair cancels all but its last bits.
            for [a, b, c, d] in operands.iter_mut().step_by(2).filter(|[_, b, ..]| b.is_normal()) {
                (*c, *d) = (-*a, bf16::from_bits(b.to_bits() ^ 1));
            }
            // Nothing, or a number no smaller than those that are gone on from, of like size.
            let first = (WHOLE.to_bits() + (word() & 0x007F_FFFF)) | word() & 0x8000_0000;
            let mut sum = [0.0, -0.0, f32::from_bits(first), WHOLE][chain % 4];
            for [a, b, c, d] in operands {
                let fused = a.to_f32().mul_add(b.to_f32(), sum);
                let fused = c.to_f32().mul_add(d.to_f32(), fused);
                // SAFETY: the machine has the instruction; the kernel has no pointers.
                let dot = unsafe { cpu.dispatch_dot(Dot(sum, [pair(a, c), pair(b, d)])) };
                let alike = dot.to_bits() == fused.to_bits() || dot.is_nan() && fused.is_nan();
                assert!(alike, "{}: {dot:e} instead of {fused:e} of {sum:e} and {a} * {b}, {c} * {d}", cpu.isa());
                small += u32::from(fused.abs() < 2f32.powi(-118));
                sum = fused;
            }
        }
        assert!(small > 500, "sums near the smallest normal number: {small}");
        // The least sum that is gone on from, of which a product leaves the last bit alone.
        let (sum, exponent) = (f32::from_bits(WHOLE.to_bits() + 1), (WHOLE.to_bits() >> 23) as i32 - 127);
        let product = [exponent / 2, exponent - exponent / 2].map(|exponent| bf16::from_f32(2f32.powi(exponent)));
        // SAFETY: as above.
        let dot = unsafe { cpu.dispatch_dot(Dot(sum, [pair(-product[0], bf16::ZERO), pair(product[1], bf16::ZERO)])) };
        assert_eq!(dot, sum - WHOLE, "{}", cpu.isa());
    }
}
