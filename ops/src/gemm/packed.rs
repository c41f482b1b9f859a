//! A weight packed for products, in any of its forms, and its panels as tiles read them.

use super::tile::{Right, unpack, unpack_quantized};
use crate::element::typed;
use crate::pack::dictionary::{self, DictionaryPanel};
use crate::pack::matrix::{Matrix, Side, pack_panels, panel_words};
use crate::pack::quantized::{self, Quantized, QuantizedPanel};
use crate::pack::{PANEL, as_floats, as_words, as_words_of, rows_of_panel};
use crate::parallel::SharedOut;
use crate::tensor::Operand;
use crate::workspace::memory::{LINE, Memory};
use crate::{Counter, Cpu, DType, Element, Error, TensorRef, Tf32, check_len, value_error};
use std::fmt;

/// A weight matrix `w[N,K]` packed once, for any [`Cpu`]: panels of 32 rows of w, k by k; bf16 as pairs along k with the
/// earlier k in the high half. One packed for [`gemm_dx`](crate::gemm_dx()) is that of the transpose. A `Cpu` with
/// AVX2 alone or with `VDPBF16PS` packs bf16 weights of like size in 12 bits each (see `pack/dictionary.rs`), from which every
/// one comes back as it was.
pub struct PackedWeight {
    /// Outputs and terms of a product.
    outputs: usize,
    terms: usize,
    /// What the outputs are of the matrix.
    pub(super) side: Side,
    /// Of the matrix.
    dtype: DType,
    form: Form,
    memory: Memory,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "PackedWeight([{}, {}] of {}, {:?})", self.n(), self.k(), self.dtype, self.form)
    }
}

impl Operand for PackedWeight {
    fn op(&self) -> &'static str {
        if self.side == Side::Rows { "gemm" } else { "gemm_dx" }
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n(), self.k()]
    }

    fn what(&self) -> &'static str {
        "a packed weight; give the matrix"
    }

    fn done(&self) -> &'static str {
        "weights packed"
    }
}

impl<'a> TensorRef<'a> {
    /// A weight `[N,K]` that was packed for products, in the place of the matrix that it holds.
    pub fn packed(weight: &'a PackedWeight) -> TensorRef<'a> {
        TensorRef::prepared(weight)
    }
}

/// What packed panels hold.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// f32.
    F32,
    /// Pairs of bf16 along k.
    Vnni,
    /// The same in 12 bits a weight.
    Dictionary,
    /// Integers with scales.
    Quantized(quantized::Layout),
}

impl Form {
    fn of(pairs: bool) -> &'static Form {
        if pairs { &Form::Vnni } else { &Form::F32 }
    }
}

impl PackedWeight {
    /// Packs `w[N,K]`, in parallel. bf16 takes its size or less, fp16 is widened to f32. `w` may lie in a mapped file: every
    /// page is read once.
    ///
    /// # Errors
    /// [`Error::Length`] when `w` is not N * K long; [`Error::Memory`] when the system has no room for it.
    pub fn pack<I: Element>(cpu: &Cpu, n: usize, k: usize, w: &[I]) -> Result<PackedWeight, Error> {
        check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
        PackedWeight::of(cpu, Side::Rows, TensorRef::of(w, &[n, k]))
    }

    /// [`PackedWeight::pack`] for [`gemm_dx_packed`](crate::gemm_dx_packed).
    ///
    /// # Errors
    /// As [`PackedWeight::pack`].
    pub fn pack_for_dx<I: Element>(cpu: &Cpu, n: usize, k: usize, w: &[I]) -> Result<PackedWeight, Error> {
        check_len("gemm_dx", "w", "[N,K]", w.len(), &[n, k])?;
        PackedWeight::of(cpu, Side::Columns, TensorRef::of(w, &[n, k]))
    }

    /// Packs integers with scales as they are, for products with what they stand for, rounded to `dtype`: bf16 or fp32. `None` where
    /// they are not packed so: K and the groups must be multiples of 16.
    ///
    /// # Errors
    /// [`Error::Value`] for parts that do not fit, or integers that 4 bits do not hold; [`Error::Memory`] when the system has no
    /// room.
    pub fn quantized(cpu: &Cpu, dtype: DType, w: &Quantized) -> Result<Option<PackedWeight>, Error> {
        if ![DType::Bf16, DType::Fp32].contains(&dtype) {
            return Ok(None);
        }
        let packed = quantized::pack(cpu, w, dtype == DType::Bf16)?;
        let (outputs, terms, side) = (w.n, w.k, Side::Rows);
        let of = |(layout, memory)| PackedWeight { outputs, terms, side, dtype, form: Form::Quantized(layout), memory };
        Ok(packed.map(of))
    }

    /// Packs a matrix of any layout on the host.
    pub(super) fn of(cpu: &Cpu, side: Side, w: TensorRef) -> Result<PackedWeight, Error> {
        let &[n, k] = w.shape() else {
            return Err(value_error("gemm", format!("w is {:?}; it must be [N, K]", w.shape())));
        };
        let [outputs, terms] = side.of(n, k);
        let (dtype, pairs) = (w.dtype(), w.dtype() == DType::Bf16);
        if dtype == DType::Fp16 {
            cpu.ledger().note(Counter::Conversions, 1, "PackedWeight::pack widens fp16 to f32; store bf16")?;
        }
        if cpu.isa().reads_coded()
            && pairs
            && n > 0
            && k > 0
            && let Some(memory) = dictionary::pack(cpu, [outputs, terms], Matrix::Weight { rows: w.rows(), side })?
        {
            memory.settle();
            return Ok(PackedWeight { outputs, terms, side, dtype, form: Form::Dictionary, memory });
        }
        let size = panel_words(terms, pairs);
        let words = size.saturating_mul(outputs.div_ceil(PANEL));
        let mut memory = Memory::new(words).ok_or(Error::Memory { op: "gemm", bytes: words.saturating_mul(4) })?;
        let out: &mut [u32] = &mut memory;
        typed!(dtype => I, {
            pack_panels(cpu, Matrix::Weight { rows: w.rows::<I>(), side }, terms, 0..outputs, Tf32::Disabled, out);
        });
        memory.settle();
        Ok(PackedWeight { outputs, terms, side, dtype, form: *Form::of(pairs), memory })
    }

    /// Rows N.
    pub fn n(&self) -> usize {
        self.side.of(self.outputs, self.terms)[0]
    }

    /// Columns K.
    pub fn k(&self) -> usize {
        self.side.of(self.outputs, self.terms)[1]
    }

    /// Dtype of the matrix that was packed.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Memory it holds, in bytes.
    pub fn bytes(&self) -> usize {
        4 * self.memory.len()
    }

    /// Calls `put(k, w[row][k])` for every k.
    pub(crate) fn unpack_row(&self, row: usize, mut put: impl FnMut(usize, f32)) {
        let panels = self.panels();
        let of_pair = |term: usize, pair: u32| if term.is_multiple_of(2) { pair & 0xFFFF_0000 } else { pair << 16 };
        let value = |panel: Right, term: usize, column: usize| match panel {
            Right::F32(floats, _) => floats[term * PANEL + column],
            Right::Vnni(words, _) => f32::from_bits(of_pair(term, words[term / 2 * PANEL + column])),
            Right::Dictionary(coded) => f32::from_bits(of_pair(term, coded.pair(term / 2, column))),
            Right::Quantized(panel) => panel.value(term, column),
            Right::Bf16(..) | Right::PairsAsking(..) => unreachable!("packed weights are not narrow"),
        };
        match self.side {
            Side::Rows => {
                let (panel, column) = (panels.panel(row / PANEL, &mut []).right, row % PANEL);
                (0..self.terms).for_each(|k| put(k, value(panel, k, column)));
            }
            Side::Columns => {
                for first in (0..self.outputs).step_by(PANEL) {
                    let panel = panels.panel(first / PANEL, &mut []).right;
                    let columns = 0..PANEL.min(self.outputs - first);
                    columns.for_each(|column| put(first + column, value(panel, row, column)));
                }
            }
        }
    }

    /// Writes rows of a matrix that was packed by its rows, from `first` on, as they were, in parallel; each worker has a
    /// slot of [`PackedWeight::slot`] words.
    pub(crate) fn unpack_rows<I: Element>(&self, cpu: &Cpu, slots: &mut [&mut [u32]], first: usize, out: &mut [I]) {
        assert!(self.side == Side::Rows, "a panel has rows");
        let (panels, k, rows) = (self.panels(), self.terms, out.len() / self.terms.max(1));
        let out = SharedOut::new(out);
        let count = (first + rows).div_ceil(PANEL) - first / PANEL;
        cpu.each_in(slots.iter_mut(), count, |slot, number| {
            let panel = first / PANEL + number;
            let rows = first.max(panel * PANEL)..(first + rows).min((panel + 1) * PANEL);
            // SAFETY: every panel has rows of its own.
            let out = unsafe { out.part((rows.start - first) * k, rows.len() * k) };
            let columns = rows.start - panel * PANEL..rows.end - panel * PANEL;
            let right = match panels.panel(panel, &mut []).right {
                Right::Dictionary(coded) if cpu.isa().reads_coded() => unpack(cpu, &coded, slot),
                Right::Quantized(panel) => unpack_quantized(cpu, &panel, slot),
                right => right,
            };
            match right {
                // The words of two rows of pairs meet where k is odd.
                Right::Vnni(pairs, _) if k.is_multiple_of(2) => {
                    rows_of_panel::<true>(cpu, pairs, k / 2, columns, as_words_of(out));
                }
                Right::F32(floats, _) if self.dtype == DType::Fp32 => {
                    rows_of_panel::<false>(cpu, as_words(floats), k, columns, as_words_of(out));
                }
                _ => rows.zip(out.chunks_mut(k)).for_each(|(row, out)| {
                    self.unpack_row(row, |k, value| out[k] = I::narrow(value));
                }),
            }
        });
    }

    /// Words that [`PackedWeight::unpack_rows`] needs of each worker.
    pub(crate) fn slot(&self) -> usize {
        match self.form {
            Form::Dictionary => panel_words(self.terms, true),
            Form::Quantized(_) => panel_words(self.terms, self.dtype == DType::Bf16),
            Form::F32 | Form::Vnni => 0,
        }
    }

    pub(crate) fn panels(&self) -> Panels<'_> {
        Panels { words: &self.memory, n: self.outputs, k: self.terms, form: &self.form }
    }
}

/// Packed panels, wherever they stand.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    words: &'a [u32],
    n: usize,
    k: usize,
    form: &'a Form,
}

impl<'a> Panels<'a> {
    /// One panel.
    pub fn one(words: &'a [u32], k: usize, pairs: bool) -> Panels<'a> {
        Panels::plain(words, [PANEL, k], pairs)
    }

    /// Panels of so many outputs and terms that are not coded.
    pub fn plain(words: &'a [u32], [n, k]: [usize; 2], pairs: bool) -> Panels<'a> {
        Panels { words, n, k, form: Form::of(pairs) }
    }

    /// Whether they take 12 bits a weight.
    pub fn are_coded(&self) -> bool {
        matches!(self.form, Form::Dictionary)
    }

    /// Whether they hold integers with scales.
    pub fn are_quantized(&self) -> bool {
        matches!(self.form, Form::Quantized(_))
    }

    /// A panel. A `slot` that is not empty has room for its pairs.
    pub fn panel<'s>(&self, panel: usize, slot: &'s mut [u32]) -> Panel<'s>
    where
        'a: 's,
    {
        let plain = |pairs: bool| {
            let size = panel_words(self.k, pairs);
            self.words[panel * size..][..size].split_at(size - LINE)
        };
        let (right, least) = match *self.form {
            Form::F32 => (Right::F32(as_floats(plain(false).0), PANEL), f32::NAN),
            Form::Vnni => {
                let (words, end) = plain(true);
                (Right::Vnni(words, PANEL), f32::from_bits(end[0]))
            }
            Form::Dictionary => {
                let (panel, least) = DictionaryPanel::panel(dictionary::Form::of(self.n, self.k), self.words, panel);
                (Right::Dictionary(panel), least)
            }
            Form::Quantized(ref layout) => {
                let (panel, least) = QuantizedPanel::panel(layout, self.words, panel);
                (Right::Quantized(panel), least)
            }
        };
        Panel { right, least, slot }
    }
}

/// A panel as tiles read it.
pub(crate) struct Panel<'a> {
    pub right: Right<'a>,
    /// Its smallest nonzero magnitude; NaN unless it holds pairs.
    pub(super) least: f32,
    /// Where a tile unpacks a coded panel for the tiles after it; empty where each reads it as it stands.
    pub(super) slot: &'a mut [u32],
}

impl Panel<'_> {
    /// Unpacks a coded or quantized panel into its slot, if it has one.
    pub(crate) fn unpack(&mut self, cpu: &Cpu) {
        match self.right {
            Right::Dictionary(coded) if !self.slot.is_empty() => {
                self.right = unpack(cpu, &coded, std::mem::take(&mut self.slot));
            }
            Right::Quantized(panel) if !self.slot.is_empty() => {
                self.right = unpack_quantized(cpu, &panel, std::mem::take(&mut self.slot));
            }
            _ => {}
        }
    }

    /// Gets a panel with a slot ready for its tiles: the slot may hold it already, and one of integers is unpacked by no tile.
    pub(crate) fn prepare(&mut self, cpu: &Cpu, is_held: bool) {
        if is_held {
            self.unpacked();
        } else if matches!(self.right, Right::Quantized(_)) {
            self.unpack(cpu);
        }
    }

    /// Whether tiles are still to unpack it.
    pub(crate) fn has_slot(&self) -> bool {
        !self.slot.is_empty()
    }

    /// From now on tiles read the slot, which holds what the panel expands to.
    pub(crate) fn unpacked(&mut self) {
        let words = std::mem::take(&mut self.slot);
        self.right = match self.right {
            Right::Quantized(panel) if !panel.pairs() => Right::F32(as_floats(words), PANEL),
            _ => Right::Vnni(words, PANEL),
        };
    }
}

/// The weight of a product.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a, I> {
    /// Packed beforehand.
    Packed(Panels<'a>),
    /// Packed on the way.
    Plain(Matrix<'a, I>),
}

impl<'a, I: Element> Weight<'a, I> {
    /// The weight `w` of `op`, whose matrix has elements I, and whose rows have the factors of an output each.
    pub(crate) fn of(op: &'static str, w: TensorRef<'a>) -> Result<Weight<'a, I>, Error> {
        Weight::of_side(op, w, Side::Rows)
    }

    /// The same where a side of it has.
    pub(super) fn of_side(op: &'static str, w: TensorRef<'a>, side: Side) -> Result<Weight<'a, I>, Error> {
        match w.as_prepared::<PackedWeight>() {
            Some(packed) if packed.side == side => Ok(Weight::Packed(packed.panels())),
            Some(_) => {
                let how = if side == Side::Rows { "pack" } else { "pack_for_dx" };
                Err(value_error(op, format!("`w` is packed for another op; use PackedWeight::{how}")))
            }
            None => w.on_host(op, "w").map(|()| Weight::Plain(Matrix::Weight { rows: w.rows(), side })),
        }
    }
}
