//! Packed operands against their definition, element by element: what stands around outputs does not change.

use super::*;
use crate::Isa;
use crate::gemm::tests::number;
use half::f16;

fn cpus() -> Vec<Cpu> {
    Isa::of_machine().map(|isa| Cpu::new(isa, 1, usize::MAX).unwrap()).collect()
}

/// What stands in outputs before.
const BEFORE: u32 = 0x4C85_8B1F;
/// How much there is around them.
const AROUND: usize = 64;

/// Has `lay_out` write `rows` rows of `steps` side by side, `stride` from one step to the next, and holds each place to
/// `expected(step, row)`.
fn assert_laid_out(
    [rows, steps, stride]: [usize; 3],
    lay_out: impl Fn(&mut [u32]),
    expected: impl Fn(usize, usize) -> u32,
    what: &str,
) {
    let len = if rows == 0 || steps == 0 { 0 } else { (steps - 1) * stride + rows };
    let mut all = vec![BEFORE; len + 2 * AROUND];
    lay_out(&mut all[AROUND..][..len]);
    for (i, found) in all.into_iter().enumerate() {
        let at = i.wrapping_sub(AROUND);
        let (step, row) = (at / stride, at % stride);
        let inside = i >= AROUND && at < len && row < rows;
        let expected = if inside { expected(step, row) } else { BEFORE };
        assert_eq!(found, expected, "{what}: row {row}, step {step}");
    }
}

pub(crate) fn rows_become_pairs() {
    for cpu in cpus() {
        for k in [0, 1, 2, 3, 6, 31, 32, 35, 66, 129] {
            for rows in [0, 1, 2, 7, 8, 9, 16, 17, 33] {
                let x = |r: usize, k: usize| number(r * 1009 + k);
                // Some rows begin in the middle of a word.
                let data: Vec<Vec<bf16>> =
                    (0..rows).map(|r| (0..r % 2 + k).map(|i| x(r, i.wrapping_sub(r % 2))).collect()).collect();
                let row = |r: usize| &data[r][r % 2..];
                let pad = number(9);
                let expected = |p: usize, r: usize| {
                    let later = if 2 * p + 1 < k { x(r, 2 * p + 1) } else { pad };
                    u32::from(x(r, 2 * p).to_bits()) << 16 | u32::from(later.to_bits())
                };
                for stride in [rows.max(1), rows + 3] {
                    let ahead = Prefetch::of(&[0u8; 1000]);
                    let lay_out = |out: &mut [u32]| pairs_of_rows::<true>(&cpu, rows, k, row, pad, out, stride, ahead);
                    let what = format!("{} {rows} rows of {k}, stride {stride}", cpu.isa());
                    assert_laid_out([rows, k.div_ceil(2), stride], lay_out, expected, &what);
                    // The same as rows hold them.
                    let lay_out = |out: &mut [u32]| pairs_of_rows::<false>(&cpu, rows, k, row, pad, out, stride, ahead);
                    let expected = |p: usize, r: usize| expected(p, r).rotate_left(16);
                    assert_laid_out(
                        [rows, k.div_ceil(2), stride],
                        lay_out,
                        expected,
                        &format!("{what}, as they stand"),
                    );
                }
            }
        }
    }
}

/// [`RowsSideBySide::pairs_on`], and what it leaves to be prefetched.
struct Pairs<'a> {
    rows: &'a RowsSideBySide<'a>,
    at: usize,
    k: usize,
    out: &'a mut [u32],
    ahead: Prefetch,
}

impl Kernel for Pairs<'_> {
    type Output = Prefetch;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Prefetch {
        self.rows.pairs_on(s, self.at, self.k, self.out, self.ahead)
    }
}

pub(crate) fn parts_of_rows_become_pairs() {
    const LEN: usize = 100;
    for cpu in cpus() {
        for count in [1, 2, 7, 8, 9, 16, 31, 32] {
            let x = |r: usize, k: usize| number(r * 1009 + k);
            let data: Vec<Vec<bf16>> = (0..count).map(|r| (0..LEN).map(|k| x(r, k)).collect()).collect();
            let rows = &RowsSideBySide::new(count, |r| &data[r][..]);
            for (at, k) in [(0, 0), (0, 2), (0, 100), (34, 6), (2, 32), (34, 66)] {
                let expected = |p: usize, r: usize| {
                    u32::from(x(r, at + 2 * p + 1).to_bits()) << 16 | u32::from(x(r, at + 2 * p).to_bits())
                };
                let lay_out = |out: &mut [u32]| {
                    let ahead = Prefetch::of(&[0u8; 640]);
                    let left = cpu.dispatch(Pairs { rows, at, k, out, ahead }).lines();
                    let lanes = cpu.isa().lanes();
                    assert_eq!(
                        left,
                        10usize.saturating_sub(count.div_ceil(lanes) * (k / 2 / lanes)),
                        "a line at a time"
                    );
                };
                let what = format!("{} {count} rows, {k} elements from {at} on", cpu.isa());
                assert_laid_out([count, k / 2, PANEL], lay_out, expected, &what);
            }
            for (at, k) in [(1, 2), (0, 3), (36, 66), (usize::MAX - 1, 2)] {
                let out = &mut [0; 50 * PANEL];
                let refused =
                    std::panic::AssertUnwindSafe(|| cpu.dispatch(Pairs { rows, at, k, out, ahead: Prefetch::NONE }));
                assert!(std::panic::catch_unwind(refused).is_err(), "{} elements from {at} on", k);
            }
        }
    }
}

/// A number of 24 bits.
fn float(seed: usize) -> f32 {
    let low = u32::from(number(seed + 77_777_777).to_bits());
    f32::from_bits(number(seed).to_f32().to_bits() | (low << 4 & 0xFFFF))
}

/// As docs/NUMERICS.md has it.
fn plain<I: Element>(x: I, tf32: Tf32) -> u32 {
    match tf32 {
        Tf32::Disabled => x.widen().to_bits(),
        Tf32::Enabled => (x.widen().to_bits() + 0x1000) & !0x1FFF,
    }
}

fn rows_become_floats<I: Element>() {
    for (cpu, tf32) in cpus().into_iter().flat_map(|cpu| [(cpu.recording(), Tf32::Disabled), (cpu, Tf32::Enabled)]) {
        for (rows, k) in [0, 1, 5, 16, 33, 70].into_iter().flat_map(|rows| [0, 1, 17, 64, 67, 130].map(|k| (rows, k))) {
            let x: Vec<I> = (0..rows * k).map(|i| I::narrow(float(i))).collect();
            let row = |r: usize| &x[r * k..][..k];
            for stride in [rows.max(1), rows + 3] {
                let lay_out = |out: &mut [u32]| f32_of_rows(&cpu, rows, k, row, tf32, as_floats_mut(out), stride);
                let what = format!("{} {} {tf32:?} {rows} rows of {k}, stride {stride}", cpu.isa(), I::NAME);
                assert_laid_out([rows, k, stride], lay_out, |p, r| plain(row(r)[p], tf32), &what);
            }
        }
        for k in (0..50).chain([100]) {
            let x: Vec<I> = (0..k).map(|i| I::narrow(float(i))).collect();
            let lay_out = |out: &mut [u32]| f32_row(&cpu, &x, tf32, as_floats_mut(out));
            assert_laid_out([1, k, 1], lay_out, |p, _| plain(x[p], tf32), &format!("{} a row of {k}", cpu.isa()));
        }
    }
}

pub(crate) fn rows_of_every_type_become_floats() {
    rows_become_floats::<f32>();
    rows_become_floats::<bf16>();
    rows_become_floats::<f16>();
}

/// Holds panels of `k` steps of rows of `columns`, `size` apart, to `expected(step, column)`.
fn assert_panels(
    [columns, k, size]: [usize; 3],
    lay_out: impl Fn(&mut [u32]),
    expected: impl Fn(usize, usize) -> u32,
    what: &str,
) {
    let mut out = vec![BEFORE; columns.div_ceil(PANEL) * size];
    lay_out(&mut out);
    for (i, found) in out.into_iter().enumerate() {
        let (step, column) = (i % size / PANEL, i / size * PANEL + i % PANEL);
        let expected = if step < k && column < columns { expected(step, column) } else { BEFORE };
        assert_eq!(found, expected, "{what}: step {step}, column {column}");
    }
}

const COLUMNS: [usize; 7] = [1, 7, 16, 31, 32, 33, 100];

fn columns_become_floats<I: Element>() {
    for (cpu, tf32) in cpus().into_iter().flat_map(|cpu| [(cpu.recording(), Tf32::Disabled), (cpu, Tf32::Enabled)]) {
        for (columns, k) in COLUMNS.into_iter().flat_map(|columns| [0, 1, 2, 7].map(|k| (columns, k))) {
            let x: Vec<I> = (0..columns * k).map(|i| I::narrow(float(i))).collect();
            let row = |p: usize| &x[p * columns..][..columns];
            let size = (k + 1) * PANEL;
            let lay_out = |out: &mut [u32]| f32_of_columns(&cpu, k, row, tf32, as_floats_mut(out), size);
            let what = format!("{} {} {tf32:?} {columns} columns of {k}", cpu.isa(), I::NAME);
            assert_panels([columns, k, size], lay_out, |p, c| plain(row(p)[c], tf32), &what);
        }
    }
}

pub(crate) fn columns_of_every_type_become_floats() {
    columns_become_floats::<f32>();
    columns_become_floats::<bf16>();
    columns_become_floats::<f16>();
}

pub(crate) fn columns_become_pairs() {
    for cpu in cpus() {
        for (columns, k) in COLUMNS.into_iter().flat_map(|columns| [0, 1, 2, 3, 6, 35].map(|k| (columns, k))) {
            // Rows begin in the middle of a word.
            let data: Vec<bf16> = (0..k * columns + 1).map(number).collect();
            let row = |p: usize| &data[1 + p * columns..][..columns];
            let (pad, size) = (number(9), (k + 1) * PANEL);
            let expected = |p: usize, c: usize| {
                let later = if 2 * p + 1 < k { row(2 * p + 1)[c] } else { pad };
                u32::from(row(2 * p)[c].to_bits()) << 16 | u32::from(later.to_bits())
            };
            let lay_out = |out: &mut [u32]| vnni_of_columns(&cpu, k, row, pad, PANEL, out, size);
            let what = format!("{} {columns} columns of {k}", cpu.isa());
            assert_panels([columns, k.div_ceil(2), size], lay_out, expected, &what);
        }
    }
}

pub(crate) fn outputs_that_are_too_short_are_refused() {
    for cpu in cpus() {
        let (x, k) = (vec![bf16::ONE; 80], 8);
        for (rows, stride, short, taken) in [(10, 10, 0, true), (10, 12, 1, false), (10, 9, 0, false)] {
            let mut out = vec![0; (k / 2 - 1) * stride + rows - short];
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pairs_of_rows::<true>(
                    &cpu,
                    rows,
                    k,
                    |r| &x[r * k..][..k],
                    bf16::ZERO,
                    &mut out,
                    stride,
                    Prefetch::NONE,
                );
            }));
            assert_eq!(run.is_ok(), taken, "{} {rows} {stride} {short}", cpu.isa());
        }
    }
}

/// A row of zeros, NaN and numbers, one of them far below the others at `least`; around it stand smaller ones.
fn row_with_least(len: usize, least: usize) -> (Vec<bf16>, f32) {
    let small = bf16::from_bits(if least.is_multiple_of(3) { 0x8005 } else { 0x0A03 });
    let of = |i: usize| match i % 7 {
        _ if i == least => small,
        1 => bf16::ZERO,
        3 => bf16::NEG_ZERO,
        6 => bf16::NAN,
        _ => number(i),
    };
    let outside = [bf16::from_bits(1); 80];
    (outside.into_iter().chain((0..len).map(of)).chain(outside).collect(), small.to_f32().abs())
}

pub(crate) fn the_least_magnitude_is_found_wherever_it_stands() {
    for cpu in cpus() {
        for (len, least) in (1..=70).flat_map(|len| (0..len).map(move |least| (len, least))) {
            let (all, expected) = row_with_least(len, least);
            let row = &all[80..][..len];
            let what = format!("{} {len} {least}", cpu.isa());
            assert_eq!(least_magnitude(&cpu, row), expected, "{what}");
            let pad = bf16::from_bits(1);
            let later = |p: usize| row.get(2 * p + 1).copied().unwrap_or(pad);
            let pairs = |p: usize| u32::from(row[2 * p].to_bits()) << 16 | u32::from(later(p).to_bits());
            let lay_out = |out: &mut [u32]| assert_eq!(vnni_of_row(&cpu, row, pad, out), expected, "{what}");
            assert_laid_out([1, len.div_ceil(2), 1], lay_out, |p, _| pairs(p), &what);
            if len % 2 == 0 {
                let words: Vec<u32> = all.as_chunks().0.iter().map(|&[a, b]| pair(a, b)).collect();
                assert_eq!(least_of_vnni(&cpu, &words[40..][..len / 2]), expected, "{what}");
            }
        }
        // Nothing but zeros, NaN and infinity.
        for len in [0, 1, 2, 16, 33, 67] {
            let row: Vec<bf16> = (0..len).map(|i| [bf16::NEG_ZERO, bf16::NAN, bf16::INFINITY][i % 3]).collect();
            assert_eq!(least_magnitude(&cpu, &row), f32::INFINITY, "{} {len}", cpu.isa());
            let mut out = vec![0; len.div_ceil(2)];
            assert_eq!(vnni_of_row(&cpu, &row, bf16::ZERO, &mut out), f32::INFINITY, "{} {len}", cpu.isa());
        }
    }
}

pub(crate) fn a_prefetch_ends_with_its_lines() {
    let x = [0u8; 200];
    assert_eq!([0, 1, 64, 65, 128, 129].map(|len| Prefetch::of(&x[..len]).lines()), [0, 1, 1, 2, 2, 3]);
    let line = |i: usize| x.as_ptr().cast::<i8>().wrapping_add(64 * i);
    let mut ahead = Prefetch::of(&x);
    assert_eq!(ahead.bounds(), Some((line(0), line(3))));
    ahead.ask(1);
    assert_eq!((ahead.lines(), ahead.bounds()), (3, Some((line(1), line(3)))));
    ahead.ask(2);
    assert_eq!(ahead.bounds(), Some((line(3), line(3))));
    ahead.ask(usize::MAX);
    assert_eq!((ahead.lines(), ahead.bounds()), (0, None));
    assert_eq!((Prefetch::default().lines(), Prefetch::NONE.bounds()), (0, None));
}

pub(crate) fn words_are_as_many_elements_as_fit() {
    let mut words = [0x3F80_4000u32, 0x4040_4080, 0];
    assert_eq!(as_elements_mut::<f32>(&mut words).len(), 3);
    let halves = as_elements_mut::<bf16>(&mut words);
    assert_eq!(halves.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), [2.0, 1.0, 4.0, 3.0, 0.0, 0.0]);
}
