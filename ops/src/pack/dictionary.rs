//! Packed bf16 weights in 12 bits instead of 16, each weight as it was: few rows wait for memory, not for sums, and memory
//! moves a quarter less.
//!
//! The low byte of a weight (the last bit of its exponent, and its fraction) stands as it is. The high byte (its sign and
//! seven bits of exponent) becomes a number below 16: weights of a matrix are of like size, so 8 values of those seven
//! bits, 16 exponents, hold nearly all of them. A panel has a table of its own.
//!
//! A block is two pairs of k of 32 columns: two lines of low bytes, then a line of codes, those of the first pair in the
//! low halves of its bytes. A block with a weight that is not in the table is an exception and stands whole behind all
//! panels. A matrix with many of them is not coded.
//!
//! Order and rounding are those of the pairs it stands for: [`Coded::pair`] gives them one at a time, and the kernel here
//! is that of [`dot_tile`](crate::gemm::tile::dot_tile).

use crate::gemm::gemm::{SharedOut, pack_w, panel_words};
use crate::gemm::tile::PANEL;
use crate::pack::prefetch;
use crate::tensor::Rows;
use crate::workspace::memory::{LINE, Memory};
use crate::{Cpu, Error, Tf32};
use half::bf16;
use std::sync::atomic::{AtomicBool, Ordering};

/// Words of a block: 2 pairs of k of 32 columns.
const BLOCK: usize = 3 * LINE;
/// Words of a block that stands whole.
const WHOLE: usize = 2 * PANEL;
/// Words before the numbers of the exceptions: the table, the smallest nonzero magnitude, how many exceptions there are.
const FACTS: usize = 6;

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
        (FACTS + self.room()).next_multiple_of(LINE)
    }

    fn panel(self) -> usize {
        self.head() + self.blocks() * BLOCK
    }

    fn words(self) -> usize {
        self.panels.saturating_mul(self.panel().saturating_add(self.room() * WHOLE))
    }
}

/// `w[N,K]` coded, in parallel; `None` where exceptions are many.
///
/// # Errors
/// [`Error::Memory`] when the system has no room for it.
pub fn pack(cpu: &Cpu, n: usize, w: Rows<bf16>) -> Result<Option<Memory>, Error> {
    let k = w.n();
    let form = Form::of(n, k);
    let bytes = form.words().saturating_mul(4);
    let mut memory = Memory::new(form.words()).ok_or(Error::Memory { op: "gemm", bytes })?;
    let (panels, wholes) = memory.split_at_mut(form.panels * form.panel());
    let wholes = SharedOut { data: wholes.as_mut_ptr(), len: wholes.len() };
    let too_many = AtomicBool::new(false);
    let size = panel_words(k, true);
    cpu.chunks(panels, form.panel(), |panel, out| {
        if too_many.load(Ordering::Relaxed) {
            return;
        }
        let rows = PANEL.min(n - panel * PANEL);
        let mut pairs = vec![0; size];
        pack_w(cpu, w, panel * PANEL, rows, Tf32::Disabled, &mut pairs);
        let least = pairs[size - LINE];
        // What no column or no pair of k needs is like what they need: it makes no exceptions.
        pairs.truncate(form.pairs * PANEL);
        for pairs in pairs.chunks_exact_mut(PANEL) {
            let (used, unused) = pairs.split_at_mut(rows);
            unused.fill(used[0]);
        }
        if form.pairs % 2 == 1 {
            pairs.extend_from_within(pairs.len() - PANEL..);
        }
        // SAFETY: each panel has its own part.
        let wholes = unsafe { wholes.part(panel * form.room() * WHOLE, form.room() * WHOLE) };
        if encode(form, &pairs, least, out, wholes).is_none() {
            too_many.store(true, Ordering::Relaxed);
        }
    });
    Ok((!too_many.into_inner()).then_some(memory))
}

/// Where the high byte of a word of pairs stands in a block: column c, the later k (0) or the earlier (1).
fn place(column: usize, half: usize) -> usize {
    // Bytes of both kinds meet in lanes of 16: the first 8 of each lane go to columns 0 to 15, the others to 16 to 31.
    let word = 2 * (column % 16) + half;
    word / 8 * 16 + column / 16 * 8 + word % 8
}

/// Writes the panel that `pairs` hold; `None` when it has more exceptions than there is room for.
fn encode(form: Form, pairs: &[u32], least: u32, out: &mut [u32], wholes: &mut [u32]) -> Option<()> {
    let exponent = |half: u32| (half >> 8 & 0x7F) as usize;
    // The eight that are most frequent, by some of the weights. Near zero weights are spread evenly, so each value stands
    // for a quarter as many as the next above it; that tells the rare ones apart.
    let mut count = [0f32; 128];
    for pair in pairs.chunks_exact(PANEL).step_by(7).flatten() {
        count[exponent(*pair)] += 1.0;
        count[exponent(pair >> 16)] += 1.0;
    }
    for i in (0..127).rev() {
        count[i] = count[i].max(count[i + 1] / 4.0);
    }
    let mut often: [u8; 128] = std::array::from_fn(|i| i as u8);
    often.sort_by(|&i, &j| count[usize::from(j)].total_cmp(&count[usize::from(i)]));
    let mut code = [u8::MAX; 128];
    let mut table = [0u8; 16];
    for (number, &exponent) in often[..8].iter().enumerate() {
        code[usize::from(exponent)] = number as u8;
        (table[number], table[8 + number]) = (exponent, exponent | 0x80);
    }
    let (head, blocks) = out.split_at_mut(form.head());
    let mut exceptions = 0;
    for (number, (pairs, block)) in pairs.chunks_exact(WHOLE).zip(blocks.chunks_exact_mut(BLOCK)).enumerate() {
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
            wholes.chunks_exact_mut(WHOLE).nth(exceptions)?.copy_from_slice(pairs);
            head[FACTS + exceptions] = number as u32;
            exceptions += 1;
        }
    }
    for (word, bytes) in head.iter_mut().zip(table.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    (head[4], head[5]) = (least, exceptions as u32);
    Some(())
}

/// A coded panel.
#[derive(Clone, Copy)]
pub struct Coded<'a> {
    /// Pairs of k.
    pairs: usize,
    head: &'a [u32],
    blocks: &'a [u32],
    wholes: &'a [u32],
}

impl<'a> Coded<'a> {
    /// Panel `panel` of a matrix, and its smallest nonzero magnitude.
    pub fn panel(form: Form, words: &'a [u32], panel: usize) -> (Coded<'a>, f32) {
        let (head, blocks) = words[panel * form.panel()..][..form.panel()].split_at(form.head());
        let wholes = &words[form.panels * form.panel() + panel * form.room() * WHOLE..][..head[5] as usize * WHOLE];
        (Coded { pairs: form.pairs, head, blocks, wholes }, f32::from_bits(head[4]))
    }

    /// Pairs of k.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// The numbers of the blocks that stand whole, ascending.
    fn exceptions(&self) -> &'a [u32] {
        &self.head[FACTS..][..self.head[5] as usize]
    }

    /// Pair `pair` of k of a column, the earlier k in the high half.
    pub fn pair(&self, pair: usize, column: usize) -> u32 {
        let (block, step) = (pair / 2, pair % 2);
        if let Ok(exception) = self.exceptions().binary_search(&(block as u32)) {
            return self.wholes[exception * WHOLE + step * PANEL + column];
        }
        let byte = |at: usize| self.blocks[block * BLOCK + at / 4].to_le_bytes()[at % 4];
        let half = |half: usize| {
            let at = place(column, half);
            let code = usize::from(byte(128 + at) >> (4 * step) & 15);
            u32::from(self.head[code / 4].to_le_bytes()[code % 4]) << 8 | u32::from(byte(64 * step + at))
        };
        half(1) << 16 | half(0)
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

/// The 32 pairs whose low bytes stand at `low` and whose codes are the low halves of the bytes of `codes`.
///
/// # Safety
/// The machine has AVX-512 BW, and `low` has a line.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn weights(
    coded: &Coded,
    low: *const u32,
    codes: std::arch::x86_64::__m512i,
) -> [std::arch::x86_64::__m512i; 2] {
    use std::arch::x86_64::*;
    // SAFETY: a head has at least FACTS words; the rest is the caller's promise.
    let (table, low) = unsafe { (_mm_loadu_si128(coded.head.as_ptr().cast()), _mm512_loadu_si512(low.cast())) };
    let codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
    let high = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
    [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
}

/// So many bytes ahead blocks are asked for.
#[cfg(target_arch = "x86_64")]
const STREAMED: usize = 4096;

/// The sums of `ROWS` rows and a whole panel: `left` holds a word for each row and pair of k, `step` apart from one pair to
/// the next; `out` has rows of 32. With `KEEP` the pairs are written to `kept` as well, as they stand where a panel is not
/// coded: k by k, 32 columns side by side.
///
/// # Safety
/// The machine has AVX-512 BW and BF16. `left` holds `ROWS` words at every pair below the end of `bounds`, `out` `ROWS`
/// rows `out_stride` apart, and `kept` with `KEEP` 32 words for each pair; the bounds end within the panel's k and, but for
/// the end, are multiples of 4.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
#[allow(clippy::too_many_arguments)]
pub unsafe fn dot_coded<const ROWS: usize, const KEEP: bool>(
    coded: &Coded,
    left: *const u32,
    step: usize,
    bounds: &[usize],
    out: *mut f32,
    out_stride: usize,
    kept: *mut u32,
) {
    use std::arch::x86_64::*;
    use std::mem::{MaybeUninit, transmute};
    // They stand apart from the blocks.
    prefetch(coded.wholes);
    let zero = _mm512_setzero_ps();
    let mut exceptions = coded.exceptions().iter().copied().zip(coded.wholes.chunks_exact(WHOLE)).peekable();
    // As in `dot_chains`.
    let mut stack = [[[MaybeUninit::<__m512>::uninit(); 2]; ROWS]; 3];
    let segments = bounds.len() - 1;
    for i in 0..segments {
        let mut live = [[zero; 2]; ROWS];
        let (mut pair, to) = (bounds[i].div_ceil(2), bounds[i + 1].div_ceil(2));
        let sum = |live: &mut [[__m512; 2]; ROWS], pair: usize, weights: [__m512i; 2]| {
            if KEEP {
                for (v, &weights) in weights.iter().enumerate() {
                    // SAFETY: `pair` is below the end of the bounds.
                    unsafe { _mm512_storeu_si512(kept.add(pair * PANEL + v * 16).cast(), weights) };
                }
            }
            // SAFETY: a vector of i32 and one of pairs of bf16 have the same 512 bits.
            let [first, last] = weights.map(|weights| unsafe { transmute::<__m512i, __m512bh>(weights) });
            for (r, live) in live.iter_mut().enumerate() {
                // SAFETY: as above; `pair` is below the end of the bounds.
                let x = unsafe { transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*left.add(pair * step + r) as i32)) };
                live[0] = _mm512_dpbf16_ps(live[0], x, first);
                live[1] = _mm512_dpbf16_ps(live[1], x, last);
            }
        };
        // SAFETY: the bounds end within the panel's k, so every pair has its block, and exceptions are blocks.
        unsafe {
            while pair < to {
                let stop = exceptions.peek().map_or(to, |&(block, _)| (2 * block as usize).clamp(pair, to));
                while pair < stop {
                    let block = coded.blocks.as_ptr().add(pair / 2 * BLOCK);
                    for line in 0..3 {
                        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(STREAMED / 4 + line * LINE).cast());
                    }
                    let codes = _mm512_loadu_si512(block.add(2 * LINE).cast());
                    sum(&mut live, pair, weights(coded, block, codes));
                    if pair + 1 < to {
                        sum(&mut live, pair + 1, weights(coded, block.add(LINE), _mm512_srli_epi16::<4>(codes)));
                    }
                    pair += 2;
                }
                if stop < to {
                    let (_, whole) = exceptions.next().expect("a block that stands whole");
                    for step in 0..(to - pair).min(2) {
                        let at = whole.as_ptr().add(step * PANEL);
                        sum(
                            &mut live,
                            pair + step,
                            [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(16).cast())],
                        );
                    }
                    pair += 2;
                }
            }
        }
        let mut level = 0;
        while i >> level & 1 == 1 {
            for (live, earlier) in live.iter_mut().zip(&stack[level]) {
                for (live, earlier) in live.iter_mut().zip(earlier) {
                    // SAFETY: a set bit of i says that the subtree of its level has been written.
                    *live = _mm512_add_ps(unsafe { earlier.assume_init() }, *live);
                }
            }
            level += 1;
        }
        for (r, live) in live.iter().enumerate() {
            for (v, &live) in live.iter().enumerate() {
                if i + 1 < segments {
                    stack[level][r][v].write(live);
                } else {
                    // SAFETY: the caller's promise.
                    unsafe { _mm512_storeu_ps(out.add(r * out_stride + v * 16), live) };
                }
            }
        }
    }
}

/// [`dot_coded`] of one row, pair after pair in `left`, and an even count of segments: two of them at a time, because one
/// chain alone waits for its own sums.
///
/// # Safety
/// As there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn dot_coded_row(coded: &Coded, left: *const u32, bounds: &[usize], out: *mut f32) {
    use std::arch::x86_64::*;
    use std::mem::transmute;
    // They stand apart from the blocks.
    prefetch(coded.wholes);
    let exceptions = coded.exceptions();
    // The pairs of block `pair / 2` below `to`; `exception` is the first one that has not been met.
    let add = |live: &mut [__m512; 2], exception: &mut usize, pair: usize, to: usize| {
        let whole = exceptions.get(*exception) == Some(&((pair / 2) as u32));
        // SAFETY: the bounds end within the panel's k, so every pair has its block, every exception its whole block, and
        // `left` a word; a vector of i32 and one of pairs of bf16 have the same 512 bits.
        unsafe {
            let mut sum = |pair: usize, weights: [__m512i; 2]| {
                let x = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*left.add(pair) as i32));
                let [first, last] = weights.map(|weights| transmute::<__m512i, __m512bh>(weights));
                *live = [_mm512_dpbf16_ps(live[0], x, first), _mm512_dpbf16_ps(live[1], x, last)];
            };
            if whole {
                let at = coded.wholes.as_ptr().add(*exception * WHOLE);
                for step in 0..(to - pair).min(2) {
                    let at = at.add(step * PANEL);
                    sum(pair + step, [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(LINE).cast())]);
                }
                *exception += 1;
            } else {
                let block = coded.blocks.as_ptr().add(pair / 2 * BLOCK);
                let codes = _mm512_loadu_si512(block.add(2 * LINE).cast());
                sum(pair, weights(coded, block, codes));
                if pair + 1 < to {
                    sum(pair + 1, weights(coded, block.add(LINE), _mm512_srli_epi16::<4>(codes)));
                }
            }
        }
    };
    let mut joined = [[_mm512_setzero_ps(); 2]; 4];
    let halves = bounds.len() / 2;
    for (two, joined) in joined.iter_mut().enumerate().take(halves) {
        let bound: [usize; 3] = std::array::from_fn(|i| bounds[2 * two + i].div_ceil(2));
        let shared = (bound[1] - bound[0]).min(bound[2] - bound[1]) / 2;
        let (mut even, mut odd) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
        let [mut of_even, mut of_odd] =
            [0, 1].map(|i| exceptions.partition_point(|&block| (block as usize) < bound[i] / 2));
        let until = |exception: usize, first: usize| {
            exceptions.get(exception).map_or(shared, |&block| (block as usize - first / 2).min(shared))
        };
        let mut block = 0;
        while block < shared {
            let stop = until(of_even, bound[0]).min(until(of_odd, bound[1]));
            // SAFETY: as above; blocks before `stop` are coded and have both pairs.
            unsafe {
                let mut at = [0, 1].map(|i| coded.blocks.as_ptr().add((bound[i] / 2 + block) * BLOCK));
                let mut x = [0, 1].map(|i| left.add(bound[i] + 2 * block));
                // The next two segments are asked for in the order of memory.
                let mut ahead = coded.blocks.as_ptr().wrapping_add((bound[0] / 2 + 2 * (shared + block)) * BLOCK);
                while block < stop {
                    macro_rules! one {
                        ($i:literal, $live:ident) => {{
                            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(LINE).cast());
                            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(2 * LINE).cast());
                            ahead = ahead.wrapping_add(BLOCK);
                            let codes = _mm512_loadu_si512(at[$i].add(2 * LINE).cast());
                            let [first, last] = weights(coded, at[$i], codes);
                            let q = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*x[$i] as i32));
                            $live[0] = _mm512_dpbf16_ps($live[0], q, transmute::<__m512i, __m512bh>(first));
                            $live[1] = _mm512_dpbf16_ps($live[1], q, transmute::<__m512i, __m512bh>(last));
                            let [first, last] = weights(coded, at[$i].add(LINE), _mm512_srli_epi16::<4>(codes));
                            let q = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*x[$i].add(1) as i32));
                            $live[0] = _mm512_dpbf16_ps($live[0], q, transmute::<__m512i, __m512bh>(first));
                            $live[1] = _mm512_dpbf16_ps($live[1], q, transmute::<__m512i, __m512bh>(last));
                            at[$i] = at[$i].add(BLOCK);
                            x[$i] = x[$i].add(2);
                        }};
                    }
                    one!(0, even);
                    one!(1, odd);
                    block += 1;
                }
            }
            if block < shared {
                add(&mut even, &mut of_even, bound[0] + 2 * block, bound[1]);
                add(&mut odd, &mut of_odd, bound[1] + 2 * block, bound[2]);
                block += 1;
            }
        }
        for pair in (bound[0] + 2 * shared..bound[1]).step_by(2) {
            add(&mut even, &mut of_even, pair, bound[1]);
        }
        for pair in (bound[1] + 2 * shared..bound[2]).step_by(2) {
            add(&mut odd, &mut of_odd, pair, bound[2]);
        }
        let live = [even, odd];
        *joined = [0, 1].map(|v| _mm512_add_ps(live[0][v], live[1][v]));
    }
    for v in 0..2 {
        let mut sums = joined.map(|joined| joined[v]);
        let mut count = halves;
        while count > 1 {
            count /= 2;
            for i in 0..count {
                sums[i] = _mm512_add_ps(sums[2 * i], sums[2 * i + 1]);
            }
        }
        // SAFETY: `out` has 32 places.
        unsafe { _mm512_storeu_ps(out.add(v * 16), sums[0]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorRef;
    use crate::{Element, Isa};

    /// Weights of like size; `small` of them are far smaller.
    fn weights(n: usize, k: usize, small: usize) -> Vec<bf16> {
        let mut state = 7u64;
        (0..n * k)
            .map(|i| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let value = (state >> 40) as f32 / 8_388_608.0 - 1.0;
                bf16::narrow(if i < small { value * 1e-20 } else { value })
            })
            .collect()
    }

    #[test]
    fn a_coded_matrix_holds_every_bit() {
        let cpu = Cpu::new(Isa::Scalar, 2, usize::MAX).unwrap();
        for (n, k, small) in [(32, 128, 0), (70, 896, 3), (33, 259, 1), (1, 1, 0), (5, 6, 1), (64, 512, 30), (40, 0, 0)]
        {
            let w = weights(n, k, small);
            let rows = TensorRef::of(&w, &[n, k]).rows();
            let memory = pack(&cpu, n, rows).unwrap().unwrap_or_else(|| panic!("{n}x{k} {small}: few exceptions"));
            for row in 0..n {
                let (panel, _) = Coded::panel(Form::of(n, k), &memory, row / PANEL);
                for k_at in 0..k {
                    let pair = panel.pair(k_at / 2, row % PANEL);
                    let bits = if k_at % 2 == 0 { pair >> 16 } else { pair & 0xFFFF };
                    assert_eq!(bits, u32::from(w[row * k + k_at].to_bits()), "{n}x{k}: w[{row}][{k_at}]");
                }
            }
        }
    }

    #[test]
    fn a_matrix_of_many_exceptions_is_not_coded() {
        let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
        let mut w = weights(64, 512, 0);
        w.iter_mut().step_by(9).for_each(|w| *w = bf16::narrow(w.widen() * 1e-30));
        assert!(pack(&cpu, 64, TensorRef::of(&w, &[64, 512]).rows()).unwrap().is_none());
    }
}
