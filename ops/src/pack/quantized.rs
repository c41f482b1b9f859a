//! Weights that are stored as integers of a few bits with scales, packed as they are and expanded where a product reads them.
//!
//! Formula, of the group g of 16, 32 or more terms that k is of, and of the block b of groups that g is of:
//!
//! ```text
//! w[n][k] = (d[n][b] * s[n][g]) * (q[n][k] - z[n][g])               Offset::Zero, or none
//! w[n][k] = fma(d[n][b] * s[n][g], q[n][k], -(e[n][b] * t[n][g]))   Offset::Least
//! ```
//!
//! Rounding: each operation once to f32; of a bf16 weight the result once more.
//!
//! A panel has d and e, then s and z or t as bytes, then its integers, [`UNIT`] terms at a time: those of 8 bits term after term,
//! 32 columns side by side; those of 4 bits eight terms of a column to a word, the first in the lowest bits.

use crate::pack::{PANEL, as_words_mut};
use crate::simd::prefetch::{prefetch, prefetch_second};
use crate::simd::{Kernel, MAX_LANES, Simd};
use crate::workspace::memory::{LINE, Memory};
use crate::{Cpu, Element, Error, value_error};
use half::{bf16, f16};
use std::ops::Range;

/// Terms that are expanded together; segments of a sum consist of such.
pub const UNIT: usize = 16;
/// Words of the pairs of a stretch at most: what is expanded before it is summed.
pub const STRETCH: usize = UNIT * PANEL;
/// The prefetch distances of integers in words, to L1 and to L2, as of other panels that memory streams.
const NEAR: usize = 512;
const FAR: usize = 4096;

/// A matrix `w[N,K]` of integers with scales; see [`Quantized::value`].
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Rows N.
    pub n: usize,
    /// Columns K.
    pub k: usize,
    /// The least of 16 numbers, where all are among those: they are packed in 4 bits. None where they take 8.
    pub least: Option<i8>,
    /// Columns of a row that share s and z or t. The last of them may be fewer.
    pub group: usize,
    /// Groups of a row that share d and e.
    pub block: usize,
    /// `q[N,K]`.
    pub q: Vec<i8>,
    /// `d[N,blocks]`.
    pub d: Vec<f32>,
    /// `s[N,groups]`, or 1 each.
    pub s: Option<Vec<i8>>,
    /// What is taken off.
    pub offset: Offset,
}

/// What is taken off the weights of a group.
#[derive(Clone, Debug, PartialEq)]
pub enum Offset {
    /// Nothing.
    None,
    /// `z[N,groups]`, of the integers.
    Zero(Vec<i8>),
    /// `e[N,blocks]` and `t[N,groups]`, or 1 each: their product, of the products.
    Least(Vec<f32>, Option<Vec<i8>>),
}

impl Quantized {
    /// Groups and blocks of a row.
    pub fn groups(&self) -> [usize; 2] {
        let groups = self.k.div_ceil(self.group.max(1));
        [groups, groups.div_ceil(self.block.max(1))]
    }

    /// # Errors
    /// [`Error::Value`] for parts of other lengths, and for integers that 4 bits do not hold.
    pub fn check(&self) -> Result<(), Error> {
        let [groups, blocks] = self.groups();
        let (of_groups, of_blocks) = (self.n.saturating_mul(groups), self.n.saturating_mul(blocks));
        let is_of = |part: &Option<Vec<i8>>| part.as_ref().is_none_or(|part| part.len() == of_groups);
        let fits = self.group > 0
            && self.block > 0
            && self.q.len() == self.n.saturating_mul(self.k)
            && self.d.len() == of_blocks
            && is_of(&self.s)
            && match &self.offset {
                Offset::None => true,
                Offset::Zero(z) => z.len() == of_groups,
                Offset::Least(e, t) => e.len() == of_blocks && is_of(t),
            };
        if !fits {
            return Err(value_error("gemm", "a quantized matrix whose parts are not those of its groups and blocks"));
        }
        let low = |q: &i8| self.least.is_none_or(|least| (0..16).contains(&(i32::from(*q) - i32::from(least))));
        if !self.q.iter().all(low) {
            return Err(value_error("gemm", "a quantized matrix whose integers are not 16 from the least on"));
        }
        Ok(())
    }

    /// The weight of a row and a column, in f32.
    #[inline]
    pub fn value(&self, row: usize, column: usize) -> f32 {
        let [groups, blocks] = self.groups();
        let group = column / self.group;
        self.of_group(row * groups + group, row * blocks + group / self.block)(self.q[row * self.k + column])
    }

    /// What makes the weights of a group of their integers.
    #[inline]
    fn of_group(&self, group: usize, block: usize) -> impl Fn(i8) -> f32 {
        let scale = self.s.as_ref().map_or(self.d[block], |s| self.d[block] * f32::from(s[group]));
        let (zero, least) = match &self.offset {
            Offset::None => (0.0, None),
            Offset::Zero(z) => (f32::from(z[group]), None),
            Offset::Least(e, None) => (0.0, Some(-e[block])),
            Offset::Least(e, Some(t)) => (0.0, Some(-(e[block] * f32::from(t[group])))),
        };
        move |q| match least {
            None => scale * (f32::from(q) - zero),
            Some(least) => scale.mul_add(f32::from(q), least),
        }
    }

    /// Writes a row, each weight with the last rounding.
    pub fn row<T: Element>(&self, row: usize, y: &mut [T]) {
        let [groups, blocks] = self.groups();
        let integers = self.q[row * self.k..][..self.k].chunks(self.group.max(1));
        for (group, (q, y)) in integers.zip(y.chunks_mut(self.group.max(1))).enumerate() {
            let value = self.of_group(row * groups + group, row * blocks + group / self.block);
            q.iter().zip(y).for_each(|(q, y)| *y = T::narrow(value(*q)));
        }
    }

    /// Some of the rows, in this order.
    pub fn rows(&self, rows: &[usize]) -> Quantized {
        let [groups, blocks] = self.groups();
        fn of<T: Copy>(all: &[T], width: usize, rows: &[usize]) -> Vec<T> {
            rows.iter().flat_map(|row| &all[row * width..][..width]).copied().collect()
        }
        let bytes = |part: &Option<Vec<i8>>| part.as_ref().map(|part| of(part, groups, rows));
        Quantized {
            n: rows.len(),
            q: of(&self.q, self.k, rows),
            d: of(&self.d, blocks, rows),
            s: bytes(&self.s),
            offset: match &self.offset {
                Offset::None => Offset::None,
                Offset::Zero(z) => Offset::Zero(of(z, groups, rows)),
                Offset::Least(e, t) => Offset::Least(of(e, blocks, rows), bytes(t)),
            },
            ..*self
        }
    }
}

/// What the offset of a layout is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Taken {
    Nothing,
    /// z.
    Zero,
    /// e.
    Least,
    /// e and t.
    LeastOfGroups,
}

/// What all panels of a matrix have in common.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    terms: usize,
    group: usize,
    block: usize,
    /// As in [`Quantized`].
    least: Option<i8>,
    has_s: bool,
    taken: Taken,
    /// Whether d and e are stored as f16, which they are.
    halves: bool,
    /// Whether weights are rounded to bf16, and expanded to pairs.
    pairs: bool,
    /// Where d, e, s, z or t, and the integers begin in a panel, and where it ends, in words. Its first line begins with its smallest
    /// nonzero magnitude.
    places: [usize; 6],
}

impl Layout {
    /// How a matrix is packed whose products read bf16 (`pairs`) or f32; `None` for one whose groups are not whole units.
    fn of(matrix: &Quantized, pairs: bool) -> Option<Layout> {
        let Quantized { k, group, block, least, .. } = *matrix;
        // A group of all columns may be said to be longer.
        let group = group.min(k);
        if matrix.n == 0 || k == 0 || !k.is_multiple_of(UNIT) || !group.is_multiple_of(UNIT) {
            return None;
        }
        let (taken, e) = match &matrix.offset {
            Offset::None => (Taken::Nothing, &[][..]),
            Offset::Zero(_) => (Taken::Zero, &[][..]),
            Offset::Least(e, None) => (Taken::Least, &e[..]),
            Offset::Least(e, Some(_)) => (Taken::LeastOfGroups, &e[..]),
        };
        let is_half = |x: &f32| f16::narrow(*x).widen().to_bits() == x.to_bits();
        let halves = matrix.d.iter().chain(e).all(is_half);
        let has_s = matrix.s.is_some();
        let layout = Layout { terms: k, group, block, least, has_s, taken, halves, pairs, places: [0; 6] };
        Some(Layout { places: layout.places(), ..layout })
    }

    fn groups(&self) -> [usize; 2] {
        let groups = self.terms.div_ceil(self.group);
        [groups, groups.div_ceil(self.block)]
    }

    /// Words of the integers of a unit.
    fn unit(&self) -> usize {
        UNIT * PANEL / if self.least.is_some() { 8 } else { 4 }
    }

    fn places(&self) -> [usize; 6] {
        let [groups, blocks] = self.groups();
        let floats = blocks * PANEL / if self.halves { 2 } else { 1 };
        let bytes = (groups * PANEL / 4).next_multiple_of(LINE);
        let has = |part: bool, words: usize| if part { words } else { 0 };
        let has_e = matches!(self.taken, Taken::Least | Taken::LeastOfGroups);
        let d = LINE;
        let e = d + floats;
        let s = e + has(has_e, floats);
        let z = s + has(self.has_s, bytes);
        let q = z + has(matches!(self.taken, Taken::Zero | Taken::LeastOfGroups), bytes);
        [d, e, s, z, q, q + self.terms / UNIT * self.unit()]
    }

    /// Writes the panel of the rows from `first` on into zeros.
    fn pack(&self, matrix: &Quantized, first: usize, out: &mut [u32]) {
        let ([d, e, s, z, at_q, _], [groups, blocks]) = (self.places, self.groups());
        let zeros = match &matrix.offset {
            Offset::Zero(part) | Offset::Least(_, Some(part)) => Some(part),
            _ => None,
        };
        let mut least = f32::INFINITY;
        for (column, row) in (first..matrix.n.min(first + PANEL)).enumerate() {
            for block in 0..blocks {
                let place = block * PANEL + column;
                self.put_float(out, d, place, matrix.d[row * blocks + block]);
                if let Offset::Least(least, _) = &matrix.offset {
                    self.put_float(out, e, place, least[row * blocks + block]);
                }
            }
            for (group, q) in matrix.q[row * self.terms..][..self.terms].chunks(self.group).enumerate() {
                for (at, part) in [(s, matrix.s.as_ref()), (z, zeros)] {
                    if let Some(part) = part {
                        put(out, at, 8, group * PANEL + column, part[row * groups + group] as u8);
                    }
                }
                let value = matrix.of_group(row * groups + group, row * blocks + group / self.block);
                for (&q, term) in q.iter().zip(group * self.group..) {
                    match self.least {
                        None => put(out, at_q, 8, term * PANEL + column, q as u8),
                        Some(least) => {
                            let place = (term / 8 * PANEL + column) * 8 + term % 8;
                            put(out, at_q, 4, place, q.wrapping_sub(least) as u8);
                        }
                    }
                    let magnitude = value(q).abs();
                    least = if magnitude > 0.0 { least.min(magnitude) } else { least };
                }
            }
        }
        out[0] = least.to_bits();
    }

    fn put_float(&self, out: &mut [u32], at: usize, place: usize, x: f32) {
        if self.halves {
            out[at + place / 2] |= u32::from(f16::narrow(x).to_bits()) << (16 * (place % 2));
        } else {
            out[at + place] = x.to_bits();
        }
    }
}

/// Puts number `place` of so many bits behind word `at`, into zeros.
#[inline(always)]
fn put(out: &mut [u32], at: usize, bits: usize, place: usize, x: u8) {
    let in_word = 32 / bits;
    out[at + place / in_word] |= u32::from(x) << (bits * (place % in_word));
}

/// A matrix packed, in parallel; `None` where it has no layout.
///
/// # Errors
/// Those of [`Quantized::check`]; [`Error::Memory`] when the system has no room for it.
pub fn pack(cpu: &Cpu, matrix: &Quantized, pairs: bool) -> Result<Option<(Layout, Memory)>, Error> {
    matrix.check()?;
    let Some(layout) = Layout::of(matrix, pairs) else { return Ok(None) };
    let [.., size] = layout.places;
    let words = size.saturating_mul(matrix.n.div_ceil(PANEL));
    let mut memory = Memory::new(words).ok_or(Error::Memory { op: "gemm", bytes: words.saturating_mul(4) })?;
    cpu.chunks(&mut memory, size, |panel, out| layout.pack(matrix, panel * PANEL, out));
    memory.settle();
    Ok(Some((layout, memory)))
}

/// Prefetches what stands behind the integers at `at`: to L1, and to L2 what is further.
#[inline(always)]
pub fn ask(at: *const u32) {
    prefetch_second(at.wrapping_add(FAR));
    prefetch(at.wrapping_add(NEAR));
}

/// Units of 16 terms that share their scales: those of a group, and of a block.
#[derive(Clone)]
pub struct Stretch {
    pub units: Range<usize>,
    group: usize,
    block: usize,
}

/// See [`QuantizedPanel::stretches`]; divisions would take longer than what is expanded.
pub struct Stretches {
    units: Range<usize>,
    /// Units of a stretch, of a group; groups of a block.
    step: usize,
    of_group: usize,
    of_block: usize,
    group: usize,
    /// The unit behind it.
    group_end: usize,
    block: usize,
}

impl Iterator for Stretches {
    type Item = Stretch;
    #[inline(always)]
    fn next(&mut self) -> Option<Stretch> {
        let first = self.units.start;
        if first >= self.units.end {
            return None;
        }
        if first == self.group_end {
            self.group += 1;
            self.group_end += self.of_group;
            self.block += usize::from(self.group == (self.block + 1) * self.of_block);
        }
        // Groups begin at even units, if they have an even number.
        let end = self.units.end.min(if first.is_multiple_of(2) { first + self.step } else { first + 1 });
        self.units.start = end;
        Some(Stretch { units: first..end, group: self.group, block: self.block })
    }
}

/// Takes the weights of a panel as they are expanded. No closure: the compiler may leave one outside of the kernel, without its
/// instruction set.
pub trait Put<S: Simd> {
    /// Takes pair `pair` of terms of the columns of a vector from `column` on: f32, before they are rounded to bf16.
    ///
    /// # Safety
    /// The pair is one of the units that are expanded, and the vector one of the panel.
    unsafe fn put(&mut self, s: S, pair: usize, column: usize, earlier: S::F, later: S::F);
}

/// A panel of a quantized matrix.
#[derive(Clone, Copy)]
pub struct QuantizedPanel<'a> {
    layout: &'a Layout,
    words: &'a [u32],
}

impl<'a> QuantizedPanel<'a> {
    /// Panel `panel` of a matrix, and its smallest nonzero magnitude before it is rounded.
    pub fn panel(layout: &'a Layout, words: &'a [u32], panel: usize) -> (QuantizedPanel<'a>, f32) {
        let [.., size] = layout.places;
        let words = &words[panel * size..][..size];
        (QuantizedPanel { layout, words }, f32::from_bits(words[0]))
    }

    /// Terms of a row, whole units.
    pub fn terms(&self) -> usize {
        self.layout.terms
    }

    /// Whether it expands to pairs of bf16; else to f32.
    pub fn pairs(&self) -> bool {
        self.layout.pairs
    }

    /// The units, cut into stretches of one or two that share their scales.
    #[inline(always)]
    pub fn stretches(&self, units: Range<usize>) -> Stretches {
        let Layout { group, block, .. } = *self.layout;
        let of_group = group / UNIT;
        let group = units.start / of_group;
        let (block_number, group_end) = (group / block, (group + 1) * of_group);
        let step = if of_group.is_multiple_of(2) { 2 } else { 1 };
        Stretches { units, step, of_group, of_block: block, group, group_end, block: block_number }
    }

    /// Where the integers of a unit stand, and words of a pair of its terms: what a prefetch is to ask for.
    #[inline(always)]
    pub fn integers(&self, unit: usize) -> (*const u32, usize) {
        let words = self.layout.unit();
        (self.words.as_ptr().wrapping_add(self.layout.places[4] + unit * words), 2 * words / UNIT)
    }

    /// Puts every pair of terms of a stretch and every vector of columns, not in their order.
    ///
    /// # Safety
    /// The stretch is one of this panel, below [`QuantizedPanel::terms`].
    #[inline(always)]
    pub unsafe fn expand<S: Simd>(&self, s: S, stretch: &Stretch, put: &mut impl Put<S>) {
        macro_rules! by {
            ($taken:literal) => {
                for column in (0..PANEL).step_by(S::LANES) {
                    // SAFETY: the caller's promise; the vectors of a panel fill it.
                    unsafe {
                        match self.layout.least {
                            Some(_) => self.columns::<S, true, $taken>(s, stretch, column, put),
                            None => self.columns::<S, false, $taken>(s, stretch, column, put),
                        }
                    }
                }
            };
        }
        match self.layout.taken {
            Taken::Nothing => by!(0),
            Taken::Zero => by!(1),
            Taken::Least | Taken::LeastOfGroups => by!(2),
        }
    }

    /// [`QuantizedPanel::expand`] of the columns of a vector, whose integers take 4 bits (`FEW`), and of which is taken nothing (0),
    /// z (1) or the least (2).
    ///
    /// # Safety
    /// As there; the vector is in the panel.
    #[inline(always)]
    unsafe fn columns<S: Simd, const FEW: bool, const TAKEN: u8>(
        &self,
        s: S,
        stretch: &Stretch,
        column: usize,
        put: &mut impl Put<S>,
    ) {
        let Layout { halves, has_s, taken, .. } = *self.layout;
        let (from, Stretch { units, group, block }) = (self.words.as_ptr(), stretch);
        // SAFETY: `Layout::places` has room for all columns of every block, group and unit.
        unsafe {
            let [d, e, at_s, z, q, _] = self.layout.places;
            let (of_block, of_group) = (block * PANEL + column, group * PANEL + column);
            let mut scale = floats(s, from.add(d), of_block, halves);
            if has_s {
                scale = s.mul(scale, s.load_i8(from.add(at_s).cast::<i8>().add(of_group)));
            }
            let off = match TAKEN {
                0 => s.splat(0.0),
                1 => s.load_i8(from.add(z).cast::<i8>().add(of_group)),
                _ => {
                    let least = floats(s, from.add(e), of_block, halves);
                    s.neg(match taken {
                        Taken::LeastOfGroups => s.mul(least, s.load_i8(from.add(z).cast::<i8>().add(of_group))),
                        _ => least,
                    })
                }
            };
            let least = s.splat(f32::from(self.layout.least.unwrap_or(0)));
            for unit in units.clone() {
                let at = from.add(q + unit * self.layout.unit());
                if FEW {
                    for word in 0..2 {
                        let eight = s.load(at.add(word * PANEL + column).cast());
                        macro_rules! pair {
                            ($pair:literal) => {
                                let earlier =
                                    weights::<S, TAKEN>(s, scale, off, s.nibble::<{ 8 * $pair }>(eight, least));
                                let later =
                                    weights::<S, TAKEN>(s, scale, off, s.nibble::<{ 8 * $pair + 4 }>(eight, least));
                                put.put(s, unit * UNIT / 2 + 4 * word + $pair, column, earlier, later);
                            };
                        }
                        pair!(0);
                        pair!(1);
                        pair!(2);
                        pair!(3);
                    }
                } else {
                    for pair in 0..UNIT / 2 {
                        let at = at.cast::<i8>().add(2 * pair * PANEL + column);
                        let earlier = weights::<S, TAKEN>(s, scale, off, s.load_i8(at));
                        let later = weights::<S, TAKEN>(s, scale, off, s.load_i8(at.add(PANEL)));
                        put.put(s, unit * UNIT / 2 + pair, column, earlier, later);
                    }
                }
            }
        }
    }

    /// The weight of a term and a column, as products read it.
    pub fn value(&self, term: usize, column: usize) -> f32 {
        let Layout { group, block, halves, has_s, taken, least, pairs, .. } = *self.layout;
        assert!(term < self.terms() && column < PANEL, "a weight of the panel");
        let [d, e, s, z, q, _] = self.layout.places;
        let group = term / group;
        let float = |at: usize| {
            let place = group / block * PANEL + column;
            if halves {
                f16::from_bits((self.words[at + place / 2] >> (16 * (place % 2))) as u16).widen()
            } else {
                f32::from_bits(self.words[at + place])
            }
        };
        let byte = |at: usize, place: usize| f32::from(self.words[at + place / 4].to_le_bytes()[place % 4] as i8);
        let of_group = |at: usize| byte(at, group * PANEL + column);
        let number = match least {
            None => byte(q, term * PANEL + column),
            Some(least) => {
                let code = self.words[q + term / 8 * PANEL + column] >> (4 * (term % 8)) & 15;
                f32::from(least) + code as f32
            }
        };
        let scale = if has_s { float(d) * of_group(s) } else { float(d) };
        let value = match taken {
            Taken::Nothing => scale * number,
            Taken::Zero => scale * (number - of_group(z)),
            Taken::Least => scale.mul_add(number, -float(e)),
            Taken::LeastOfGroups => scale.mul_add(number, -(float(e) * of_group(z))),
        };
        if pairs { bf16::narrow(value).widen() } else { value }
    }

    /// Writes all of the panel as pairs, or as f32, 32 columns side by side.
    pub fn unpack<'s>(&self, cpu: &Cpu, slot: &'s mut [u32]) -> &'s [u32] {
        let units = 0..self.terms() / UNIT;
        let (slot, _) = slot.split_at_mut(PANEL * UNIT * units.len() / if self.pairs() { 2 } else { 1 });
        if self.pairs() {
            cpu.dispatch(Expand::<true> { panel: self, units, out: &mut *slot });
        } else {
            cpu.dispatch(Expand::<false> { panel: self, units, out: &mut *slot });
        }
        slot
    }

    /// Terms `from..from + len`, whole units, as f32, 32 columns side by side.
    pub fn widen(&self, cpu: &Cpu, from: usize, len: usize, out: &mut [f32]) {
        assert!(from.is_multiple_of(UNIT) && len.is_multiple_of(UNIT), "whole units");
        let units = from / UNIT..(from + len) / UNIT;
        cpu.dispatch(Expand::<false> { panel: self, units, out: as_words_mut(&mut out[..len * PANEL]) });
    }
}

/// The weights that integers stand for, of which is taken nothing (0), z (1) or the least (2).
#[inline(always)]
fn weights<S: Simd, const TAKEN: u8>(s: S, scale: S::F, off: S::F, q: S::F) -> S::F {
    match TAKEN {
        0 => s.mul(scale, q),
        1 => s.mul(scale, s.sub(q, off)),
        _ => s.fma(scale, q, off),
    }
}

/// A vector from number `place` on of those at `from`, f16 or f32.
///
/// # Safety
/// They have as many.
#[inline(always)]
unsafe fn floats<S: Simd>(s: S, from: *const u32, place: usize, halves: bool) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        match halves {
            true => s.load_f16(from.cast::<f16>().add(place)),
            false => s.load(from.cast::<f32>().add(place)),
        }
    }
}

/// Writes some units of a panel as pairs or as f32, 32 columns side by side.
struct Expand<'a, const PAIRS: bool> {
    panel: &'a QuantizedPanel<'a>,
    units: Range<usize>,
    out: &'a mut [u32],
}

impl<const PAIRS: bool> Kernel for Expand<'_, PAIRS> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Expand { panel, units, out } = self;
        assert!(units.end <= panel.terms() / UNIT, "units of the panel");
        assert!(out.len() >= PANEL * UNIT * units.len() / if PAIRS { 2 } else { 1 }, "room for them");
        let mut to = Rows::<PAIRS> { first: units.start * UNIT / 2, rounds: panel.pairs(), out: out.as_mut_ptr() };
        for stretch in panel.stretches(units) {
            let (integers, of_pair) = panel.integers(stretch.units.start);
            for line in 0..stretch.units.len() * UNIT / 2 * of_pair / LINE {
                ask(integers.wrapping_add(line * LINE));
            }
            // SAFETY: the units are the panel's, and all pairs have room.
            unsafe { panel.expand(s, &stretch, &mut to) };
        }
    }
}

/// Where [`Expand`] writes.
struct Rows<const PAIRS: bool> {
    /// The first pair of terms.
    first: usize,
    /// Whether f32 are rounded to bf16.
    rounds: bool,
    out: *mut u32,
}

impl<S: Simd, const PAIRS: bool> Put<S> for Rows<PAIRS> {
    #[inline(always)]
    unsafe fn put(&mut self, s: S, pair: usize, column: usize, earlier: S::F, later: S::F) {
        let pair = pair - self.first;
        // SAFETY: the caller's promise, and `Expand` has room for all pairs.
        unsafe {
            if PAIRS {
                return s.narrow_pairs_of_numbers(earlier, later, self.out.add(pair * PANEL + column));
            }
            let (earlier, later) = if self.rounds {
                let mut rounded = [0u32; MAX_LANES];
                s.narrow_pairs_of_numbers(earlier, later, rounded.as_mut_ptr());
                s.load_pairs(rounded.as_ptr())
            } else {
                (earlier, later)
            };
            let out = self.out.add(2 * pair * PANEL + column);
            s.store(earlier, out.cast());
            s.store(later, out.add(PANEL).cast());
        }
    }
}

#[cfg(feature = "unit-tests")]
pub mod tests;
