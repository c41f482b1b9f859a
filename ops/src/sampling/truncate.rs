//! Tokens that may be sampled: `x[R,V], scale[R], top_k[R], top_p[R], min_p[R] -> y[R,V], kept[R]`.
//!
//! Formula: `z = x * scale`, which stays where it is among the `top_k` largest, then among the likeliest up to the one that
//! reaches `top_p` of their weight, and has at least `min_p` of the largest weight; -inf elsewhere.
//! Order: none that could be seen: weights are integers, `floor(exp(z - top) * 2^40)`. The lowest index among equals first.
//! Rounding: z once to f32.
//! Special: a row with a NaN or +inf is NaN and keeps nothing; -inf is never kept.

use super::draw::check_vocabulary;
use super::weights::{exponentials, largest, scaled, share, weight};
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::index::topk::rank;
use crate::profile::IEEE;
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};

const NAME: &str = "truncate";

/// What [`truncate`] keeps, one number for each row.
#[derive(Clone, Copy, Debug)]
pub struct Truncation<'a, F = &'a [f32]> {
    /// `f32(1 / temperature)`.
    pub scale: F,
    /// As many of the largest; 0 for all.
    pub top_k: &'a [i32],
    /// The likeliest up to this share of the weight; 1 for all.
    pub top_p: F,
    /// Those whose weight is at least this share of the largest; 0 for all.
    pub min_p: F,
}

/// [`truncate`] of `x[R,V]` to `y[R,V], kept[R]`, row-major: x times `scale` where a token may be sampled, -inf elsewhere, and
/// how many may.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when V is above 2^22 or a `top_k` is negative.
///
/// ```
/// use samebits_ops::{Cpu, Truncation, truncate};
///
/// let by = Truncation { scale: &[0.5f32][..], top_k: &[2], top_p: &[1.0], min_p: &[0.0] };
/// let (mut y, mut kept) = ([0f32; 3], [0]);
/// truncate(&Cpu::best(), 3, &[4f32, 2.0, 6.0], by, &mut y, &mut kept)?;
/// assert_eq!((y, kept), ([2.0, f32::NEG_INFINITY, 3.0], [2]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn truncate<I: Element>(
    cpu: &Cpu,
    vocab: usize,
    x: &[I],
    by: Truncation,
    y: &mut [f32],
    kept: &mut [i32],
) -> Result<(), Error> {
    let rows = kept.len();
    check([x.len(), y.len()], by.lengths(<[f32]>::len), by.top_k, rows, vocab)?;
    run(cpu, TensorRef::of(x, &[rows, vocab]), by, y, kept);
    Ok(())
}

impl<F: Copy> Truncation<'_, F> {
    /// How many numbers it has of each.
    fn lengths<T: ?Sized>(&self, len: impl Fn(&T) -> usize) -> [usize; 4]
    where
        F: std::ops::Deref<Target = T>,
    {
        [len(&self.scale), self.top_k.len(), len(&self.top_p), len(&self.min_p)]
    }
}

/// Lengths of x and y, and of scale, top_k, top_p and min_p; V and top_k.
fn check(elements: [usize; 2], counts: [usize; 4], top_k: &[i32], rows: usize, vocab: usize) -> Result<(), Error> {
    for (name, found) in ["x", "y"].into_iter().zip(elements) {
        check_len(NAME, name, "[R,V]", found, &[rows, vocab])?;
    }
    for (name, found) in ["scale", "top_k", "top_p", "min_p"].into_iter().zip(counts) {
        check_len(NAME, name, "[R]", found, &[rows])?;
    }
    if let Some(i) = top_k.iter().position(|k| *k < 0) {
        return Err(value_error(NAME, format!("top_k[{i}] is {}; use 0 or more", top_k[i])));
    }
    check_vocabulary(NAME, vocab)
}

/// Rows of x of any layout; lengths have been checked.
fn run(cpu: &Cpu, x: TensorRef, by: Truncation, y: &mut [f32], kept: &mut [i32]) {
    let vocab = *x.shape().last().expect("[R,V]");
    if vocab == 0 {
        return kept.fill(0);
    }
    let mut rows: Vec<_> = y.chunks_exact_mut(vocab).zip(kept).collect();
    cpu.chunks(&mut rows, 1, |row, rows| {
        let (y, kept) = &mut rows[0];
        scaled(cpu, &x, row, by.scale[row], y);
        let limits = Limits { top_k: by.top_k[row] as usize, top_p: by.top_p[row], min_p: by.min_p[row] };
        **kept = limits.apply(cpu, y);
    });
}

/// What a row is truncated by.
struct Limits {
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

/// The rank of -inf, which is never kept.
const NOTHING: u32 = !f32::NEG_INFINITY.to_bits();

impl Limits {
    /// Puts -inf in the place of what is dropped; how many stay.
    fn apply(&self, cpu: &Cpu, z: &mut [f32]) -> i32 {
        let Some(top) = largest(z) else {
            if z.iter().any(|z| *z != f32::NEG_INFINITY) {
                z.fill(f32::NAN);
            }
            return 0;
        };
        let by_weight = self.top_p < 1.0;
        let least_e = if self.min_p > 1.0 { 1.0 } else { self.min_p };
        let e = if by_weight || least_e > 0.0 { exponentials(cpu, z, top) } else { Vec::new() };
        // The rank of the last that is kept, and how many of its equals are.
        let (mut least, mut equals) = (NOTHING + 1, u64::MAX);
        if self.top_k > 0 || by_weight {
            let e_of = |i: usize| e.get(i).copied().unwrap_or_default();
            let mut live: Vec<(u32, f32)> = z.iter().enumerate().map(|(i, z)| (rank(*z), e_of(i))).collect();
            live.retain(|(rank, _)| *rank > NOTHING);
            if (1..live.len()).contains(&self.top_k) {
                (least, equals) = select(&live, |_| 1, self.top_k as u64);
                let mut left = equals;
                live.retain(|(rank, _)| keeps(*rank, least, &mut left));
            }
            if by_weight {
                let bits = (f64::from(self.top_p.max(0.0)) * (1u64 << 53) as f64) as u64;
                let bound = share(bits, live.iter().map(|(_, e)| weight(*e)).sum());
                (least, equals) = select(&live, weight, bound.max(1));
            }
        }
        let mut kept = 0;
        for (i, z) in z.iter_mut().enumerate() {
            if keeps(rank(*z), least, &mut equals) && !e.get(i).is_some_and(|e| *e < least_e) {
                kept += 1;
            } else {
                *z = f32::NEG_INFINITY;
            }
        }
        kept
    }
}

/// Whether one of this rank is kept, of which `equals` of the least rank are to come.
fn keeps(rank: u32, least: u32, equals: &mut u64) -> bool {
    let equal = rank == least && *equals > 0;
    *equals -= u64::from(equal);
    equal || rank > least
}

/// The rank of the first element, from the largest on, at which the sum of weights reaches `bound`, and how many of its equals
/// that takes; the sum of all reaches it. Digit by digit of the rank, of which each time the elements of one digit are left.
fn select(live: &[(u32, f32)], weight: impl Fn(f32) -> u64, bound: u64) -> (u32, u64) {
    let (mut above, mut prefix, mut rest) = (0, 0, Vec::new());
    let mut left = live;
    for (shift, digits) in [(21, 1 << 11), (10, 1 << 11), (0, 1 << 10)] {
        let mut sums = [0u64; 1 << 11];
        for (rank, e) in left {
            sums[(rank >> shift) as usize % digits] += weight(*e);
        }
        let mut digit = digits - 1;
        while above + sums[digit] < bound {
            above += sums[digit];
            digit -= 1;
        }
        prefix = prefix * digits as u32 + digit as u32;
        rest = left.iter().filter(|(rank, _)| rank >> shift == prefix).copied().collect();
        left = &rest;
    }
    (prefix, (bound - above).div_ceil(weight(rest[0].1)))
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("truncate.cu"), &[NAME]) };

/// truncate, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let per_row = |name| args.input(name).dense::<f32>(NAME, name);
        let (scale, top_p, min_p) = (per_row("scale")?, per_row("top_p")?, per_row("min_p")?);
        let (x, by) = (args.input("x"), Truncation { scale, top_k: args.integers("top_k")?, top_p, min_p });
        x.on_host(NAME, "x")?;
        let (y, kept) = (args.output("y").host(NAME, "y")?, args.output("kept").host(NAME, "kept")?);
        run(cpu, x, by, y, kept);
        Ok(())
    },
    device: Some(|on, args| {
        let per_row = |name| args.input(name).device::<f32>(NAME, name);
        let (scale, top_p, min_p) = (per_row("scale")?, per_row("top_p")?, per_row("min_p")?);
        let (x, vocab) = (args.input("x"), args.call.dim("V"));
        let by = Truncation { scale, top_k: args.integers("top_k")?, top_p, min_p };
        let (y, kept) = (args.output("y").device(NAME, "y")?, args.output("kept").device(NAME, "kept")?);
        typed!(x.dtype() => I, on_device::<I>(on, vocab, x.device(NAME, "x")?, by, y, kept))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`truncate`] on a device; `top_k` comes from the host.
///
/// # Errors
/// As [`truncate`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    vocab: usize,
    x: &Buffer<I>,
    by: Truncation<&Buffer<f32>>,
    y: &mut Buffer<f32>,
    kept: &mut Buffer<i32>,
) -> Result<(), Error> {
    let rows = kept.len();
    check([x.len(), y.len()], by.lengths(Buffer::len), by.top_k, rows, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let top_k = device.upload(NAME, by.top_k)?;
    let arguments = Arguments::new().buffer(x).buffer(by.scale).buffer(&top_k).buffer(by.top_p).buffer(by.min_p);
    let arguments = arguments.buffer(y).buffer(kept).int(int(NAME, "V", vocab)?).float(IEEE.drawn);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(Build::of::<I, f32>(NAME), NAME, [rows, 1, 1], 256, 0, &arguments) }
}
