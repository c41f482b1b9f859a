//! Lossless dictionary coding of bf16 weights in 12 bits: few rows wait for memory, not for sums, and memory moves a
//! quarter less.
//!
//! The low byte of a weight (the last bit of its exponent, and its fraction) stands as it is. The high byte (its sign and
//! seven bits of exponent) becomes a number below 16: weights of a matrix are of like size, so 8 values of those seven
//! bits, 16 exponents, hold nearly all of them. A panel has a table of its own.
//!
//! A [block](crate::simd::coded) is two pairs of k of 32 columns. A block with a weight that is not in the table is an escape: its 16-bit pairs stand behind all
//! panels. A matrix with many escapes is not coded.
//!
//! [`DictionaryPanel::pair`] gives the pairs one at a time; products sum with them by `VDPBF16PS` and on 8 lanes.

use crate::pack::PANEL;
use crate::pack::matrix::{Matrix, panel_words};
use crate::parallel::SharedOut;
use crate::simd::coded::{BLOCK, decoded, place};
use crate::simd::prefetch::{prefetch, prefetch_second};
use crate::workspace::memory::{LINE, Memory};
use crate::{Cpu, Error, Tf32};
use half::bf16;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The prefetch distance of blocks to L1 in words, the same 2 KiB as of other panels in `fma.rs`.
pub const NEAR: usize = 512;
/// How far ahead of that they are prefetched to L2: 8 KiB, the distance hardly matters. L1 has 16 misses under way at most,
/// 10 GB/s of a Xeon's memory; so two threads read 26 GB/s of 12-bit weights, 20 without this.
pub const FAR: usize = 2048;
/// Words of an escape, a block that is not coded.
pub const ESCAPE: usize = 2 * PANEL;
/// Words before the numbers of the escapes: the table, the smallest nonzero magnitude, how many escapes there are.
const HEADER: usize = 6;

/// Prefetches the block at `far` to L2 and the one at `near` to L1.
#[inline(always)]
pub fn ask(far: *const u32, near: *const u32) {
    for line in 0..BLOCK / LINE {
        prefetch_second(far.wrapping_add(line * LINE));
        prefetch(near.wrapping_add(line * LINE));
    }
}

/// What all panels of a matrix have in common.
#[derive(Clone, Copy)]
pub struct Form {
    /// Pairs of k.
    pairs: usize,
    panels: usize,
}

impl Form {
    /// Of `w[N,K]`.
    pub fn of(n: usize, k: usize) -> Form {
        Form { pairs: k.div_ceil(2), panels: n.div_ceil(PANEL) }
    }

    fn blocks(self) -> usize {
        self.pairs.div_ceil(2)
    }

    /// Exceptions that a panel has room for.
    fn room(self) -> usize {
        self.blocks() / 16 + 2
    }

    /// Words before the blocks of a panel.
    fn head(self) -> usize {
        (HEADER + self.room()).next_multiple_of(LINE)
    }

    fn panel(self) -> usize {
        self.head() + self.blocks() * BLOCK
    }

    fn words(self) -> usize {
        self.panels.saturating_mul(self.panel().saturating_add(self.room() * ESCAPE))
    }
}

/// A weight of so many outputs and terms coded, in parallel; `None` where escapes are many.
///
/// # Errors
/// [`Error::Memory`] when the system has no room for it.
pub fn pack(cpu: &Cpu, [n, k]: [usize; 2], w: Matrix<bf16>) -> Result<Option<Memory>, Error> {
    let form = Form::of(n, k);
    let bytes = form.words().saturating_mul(4);
    let mut memory = Memory::new(form.words()).ok_or(Error::Memory { op: "gemm", bytes })?;
    let (panels, escapes) = memory.split_at_mut(form.panels * form.panel());
    let escapes = SharedOut::new(escapes);
    let too_many = AtomicBool::new(false);
    let size = panel_words(k, true);
    cpu.chunks(panels, form.panel(), |panel, out| {
        if too_many.load(Ordering::Relaxed) {
            return;
        }
        let rows = PANEL.min(n - panel * PANEL);
        let mut pairs = vec![0; size];
        w.pack(cpu, k, panel * PANEL..panel * PANEL + rows, Tf32::Disabled, &mut pairs);
        let least = pairs[size - LINE];
        // Columns and pairs of k that only fill up the panel repeat others, so that they cause no escapes.
        pairs.truncate(form.pairs * PANEL);
        for pairs in pairs.chunks_exact_mut(PANEL) {
            let (used, unused) = pairs.split_at_mut(rows);
            unused.fill(used[0]);
        }
        if form.pairs % 2 == 1 {
            pairs.extend_from_within(pairs.len() - PANEL..);
        }
        // SAFETY: each panel has its own part.
        let escapes = unsafe { escapes.part(panel * form.room() * ESCAPE, form.room() * ESCAPE) };
        if encode(form, &pairs, least, out, escapes).is_none() {
            too_many.store(true, Ordering::Relaxed);
        }
    });
    Ok((!too_many.into_inner()).then_some(memory))
}

/// Writes the panel that `pairs` hold; `None` when it has more escapes than there is room for.
fn encode(form: Form, pairs: &[u32], least: u32, out: &mut [u32], escapes: &mut [u32]) -> Option<()> {
    let exponent = |half: u32| (half >> 8 & 0x7F) as usize;
    // The eight that are most frequent, by some of the weights. Near zero weights are spread evenly, so each value stands
    // for a quarter as many as the next above it; that tells the rare ones apart.
    let mut frequency = [0f32; 128];
    for pair in pairs.chunks_exact(PANEL).step_by(7).flatten() {
        frequency[exponent(*pair)] += 1.0;
        frequency[exponent(pair >> 16)] += 1.0;
    }
    for i in (0..127).rev() {
        frequency[i] = frequency[i].max(frequency[i + 1] / 4.0);
    }
    let mut often: [u8; 128] = std::array::from_fn(|i| i as u8);
    often.sort_by(|&i, &j| frequency[usize::from(j)].total_cmp(&frequency[usize::from(i)]));
    let mut code = [u8::MAX; 128];
    let mut table = [0u8; 16];
    for (number, &exponent) in often[..8].iter().enumerate() {
        code[usize::from(exponent)] = number as u8;
        (table[number], table[8 + number]) = (exponent, exponent | 0x80);
    }
    let (head, blocks) = out.split_at_mut(form.head());
    let mut count = 0;
    for (number, (pairs, block)) in pairs.chunks_exact(ESCAPE).zip(blocks.chunks_exact_mut(BLOCK)).enumerate() {
        let mut bytes = [0u8; 4 * BLOCK];
        let mut known = true;
        for (step, pairs) in pairs.chunks_exact(PANEL).enumerate() {
            for (column, pair) in pairs.iter().enumerate() {
                for half in 0..2 {
                    let (weight, at) = (pair >> (16 * half) & 0xFFFF, place(column, half));
                    let code = code[exponent(weight)];
                    known &= code != u8::MAX;
                    bytes[64 * step + at] = weight as u8;
                    bytes[128 + at] |= (code & 7 | (weight >> 12 & 8) as u8) << (4 * step);
                }
            }
        }
        for (word, bytes) in block.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        if !known {
            escapes.chunks_exact_mut(ESCAPE).nth(count)?.copy_from_slice(pairs);
            head[HEADER + count] = number as u32;
            count += 1;
        }
    }
    for (word, bytes) in head.iter_mut().zip(table.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    (head[4], head[5]) = (least, count as u32);
    Some(())
}

/// A panel of coded weights.
#[derive(Clone, Copy)]
pub struct DictionaryPanel<'a> {
    /// Pairs of k.
    pairs: usize,
    head: &'a [u32],
    blocks: &'a [u32],
    escapes: &'a [u32],
}

impl<'a> DictionaryPanel<'a> {
    /// Panel `panel` of a matrix, and its smallest nonzero magnitude.
    pub fn panel(form: Form, words: &'a [u32], panel: usize) -> (DictionaryPanel<'a>, f32) {
        let (head, blocks) = words[panel * form.panel()..][..form.panel()].split_at(form.head());
        let escapes = &words[form.panels * form.panel() + panel * form.room() * ESCAPE..][..head[5] as usize * ESCAPE];
        (DictionaryPanel { pairs: form.pairs, head, blocks, escapes }, f32::from_bits(head[4]))
    }

    /// Pairs of k.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Its 16 high bytes.
    pub fn table(&self) -> &'a [u32; 4] {
        self.head.first_chunk().expect("a head begins with the table")
    }

    /// [`BLOCK`] words for every two pairs of k.
    pub fn blocks(&self) -> &'a [u32] {
        self.blocks
    }

    /// One of them.
    pub fn block(&self, number: usize) -> &'a [u32; BLOCK] {
        self.blocks[number * BLOCK..].first_chunk().expect("a block")
    }

    /// [`ESCAPE`] words for each escape.
    pub fn escapes(&self) -> &'a [u32] {
        self.escapes
    }

    /// The numbers of the blocks that are escapes, ascending.
    pub fn escape_numbers(&self) -> &'a [u32] {
        &self.head[HEADER..][..self.head[5] as usize]
    }

    /// Pair `pair` of k of a column, the earlier k in the high half.
    pub fn pair(&self, pair: usize, column: usize) -> u32 {
        let (block, step) = (pair / 2, pair % 2);
        if let Ok(escape) = self.escape_numbers().binary_search(&(block as u32)) {
            return self.escapes[escape * ESCAPE + step * PANEL + column];
        }
        decoded(self.table(), self.block(block), step, column)
    }

    /// Runs of pairs, from an even one on: those that blocks hold, and each escape, with its words.
    pub fn runs(self, pairs: Range<usize>) -> impl Iterator<Item = (Range<usize>, Option<&'a [u32]>)> {
        let numbers = self.escape_numbers();
        let (mut at, end) = (pairs.start, pairs.end);
        let mut escape = numbers.partition_point(|&block| (block as usize) < at / 2);
        std::iter::from_fn(move || {
            let from = at;
            let next = numbers.get(escape).map_or(end, |&block| (2 * block as usize).min(end));
            if from == end {
                return None;
            }
            if next > from {
                at = next;
                return Some((from..next, None));
            }
            at = (from + 2).min(end);
            escape += 1;
            Some((from..at, Some(&self.escapes[(escape - 1) * ESCAPE..][..ESCAPE])))
        })
    }

    /// Elements `from..from + len` of k as f32, 32 columns side by side; `from` is even. An odd `len` is followed by the
    /// rest of its pair.
    pub fn widen(&self, from: usize, len: usize, out: &mut [f32]) {
        for (pair, out) in (from / 2..).zip(out[..len.next_multiple_of(2) * PANEL].chunks_exact_mut(2 * PANEL)) {
            for column in 0..PANEL {
                let pair = self.pair(pair, column);
                (out[column], out[PANEL + column]) = (f32::from_bits(pair & 0xFFFF_0000), f32::from_bits(pair << 16));
            }
        }
    }
}

#[cfg(feature = "unit-tests")]
pub mod tests;
