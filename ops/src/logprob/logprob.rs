//! Log-probability of one token per row: `logits[R,V], target[R] -> logprob[R], lse[R]` (f32).
//!
//! Formula: `x = logits / temperature`, `lse = ln(sum of e^x)`, `logprob = x[target] - lse`.
//! Order: `x = z * f32(1/temperature)`; every exponential is `m * 2^i` with `n = max i` as the reference point; the
//! weights `m * 2^(i-n)` are summed as 8 segments of `16 * ceil(V / 128)` elements, each by the `lanes` sum; `rest` is the
//! same sum without the target, whose weight is t. A row of `|n| >= 2^16` is measured from its largest element.
//! Rounding: every step once to f32; `lse` and `logprob` in f64, rounded once: `logprob = -ln(1 + rest / t)` where rest is
//! below t.
//! Special: a NaN or +inf in the row gives NaN; -inf is skipped; all -inf gives lse -inf and logprob NaN; target < 0
//! gives logprob 0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::gemm::shape::segment_length;
use crate::math::{
    LOG2E_HI, LOG2E_LO, exp_split, is_small, ln, ln_of_sum, ln1p, near_unit, near_weight, weigh, weight,
};
use crate::profile::IEEE;
use crate::reduce::{Add, LANES, Lanes};
use crate::simd::prefetch::prefetch_second;
use crate::simd::scalar::Scalar;
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, store_two};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};

/// Dimensions and parameter of `logprob`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprob {
    /// Rows R.
    pub rows: usize,
    /// Tokens of the vocabulary, V.
    pub vocab: usize,
    /// What logits are divided by; positive and finite.
    pub temperature: f64,
}

impl Logprob {
    /// At temperature 1.
    pub fn new(rows: usize, vocab: usize) -> Logprob {
        Logprob { rows, vocab, temperature: 1.0 }
    }
}

/// `logits[R,V], target[R] -> logprob[R], lse[R]`, row-major, natural logarithms. A negative target means none: its
/// `logprob` is 0.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite or a
/// target is V or more.
///
/// ```
/// use samebits_ops::{Cpu, Logprob, logprob};
///
/// // Two tokens, equally likely; the second row has no target.
/// let (mut logp, mut lse) = ([9f32; 2], [9f32; 2]);
/// logprob(&Cpu::best(), &Logprob::new(2, 2), &[0f32; 4], &[1, -1], &mut logp, &mut lse)?;
/// assert!((logp[0] - 0.5f32.ln()).abs() < 1e-6);
/// assert_eq!(logp[1], 0.0);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn logprob<I: Element>(
    cpu: &Cpu,
    shape: &Logprob,
    logits: &[I],
    target: &[i32],
    logprob: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    let Logprob { rows, vocab, temperature } = *shape;
    check_len("logprob", "logits", "[R,V]", logits.len(), &[rows, vocab])?;
    check_len("logprob", "target", "[R]", target.len(), &[rows])?;
    check_len("logprob", "logprob", "[R]", logprob.len(), &[rows])?;
    check_len("logprob", "lse", "[R]", lse.len(), &[rows])?;
    run(cpu, temperature, TensorRef::of(logits, &[rows, vocab]), target, logprob, lse)
}

/// Rows of logits of any layout, as many as there are targets.
fn run(
    cpu: &Cpu,
    temperature: f64,
    logits: TensorRef,
    target: &[i32],
    logprob: &mut [f32],
    lse: &mut [f32],
) -> Result<(), Error> {
    let vocab = *logits.shape().last().expect("[R,V]");
    let scale = inverse("logprob", temperature)?;
    check_targets("logprob", target, vocab)?;
    logits.on_host("logprob", "logits")?;
    typed!(logits.dtype() => I, {
        let logits = logits.rows::<I>();
        let chunk = cpu.rows_per_chunk(lse.len(), vocab);
        let mut parts: Vec<_> = logprob.chunks_mut(chunk).zip(lse.chunks_mut(chunk)).collect();
        cpu.chunks(&mut parts, 1, |i, parts| {
            for (logprob, lse) in parts {
                let end = i * chunk + lse.len();
                for (row, outputs) in (i * chunk..end).zip(logprob.iter_mut().zip(lse.iter_mut())) {
                    let next = if row + 1 < end { logits.row(row + 1) } else { &[] };
                    let target = usize::try_from(target[row]).ok();
                    (*outputs.0, *outputs.1) = cpu.dispatch(Row { x: logits.row(row), scale, target, next });
                }
            }
        });
    });
    Ok(())
}

/// Its kernels.
const UNIT: Unit =
    Unit { has_out: false, ..Unit::of("logprob", include_str!("logprob.cu"), &["logprob", "logprob_unscaled"]) };

/// logprob, by name.
pub(crate) const OP: Entry = Entry {
    name: "logprob",
    cpu: |cpu, args| {
        let (logprob, lse) =
            (args.output("logprob").host("logprob", "logprob")?, args.output("lse").host("logprob", "lse")?);
        run(cpu, args.call.float("temperature"), args.input("logits"), args.integers("target")?, logprob, lse)
    },
    device: Some(|on, args| {
        let [rows, vocab] = ["R", "V"].map(|axis| args.call.dim(axis));
        let shape = Logprob { rows, vocab, temperature: args.call.float("temperature") };
        let (logits, target) = (args.input("logits"), args.integers("target")?);
        let [logprob, lse] = ["logprob", "lse"].map(|name| args.output(name).device("logprob", name));
        typed!(logits.dtype() => I, {
            let logits = logits.device::<I>("logprob", "logits")?;
            on_device(on, &shape, logits, target, logprob?, lse?)
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`logprob`] on a device; targets come from the host, which checks them.
///
/// # Errors
/// As [`logprob`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    shape: &Logprob,
    logits: &Buffer<I>,
    target: &[i32],
    logprob: &mut Buffer<f32>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Logprob { rows, vocab, temperature } = *shape;
    check_len("logprob", "logits", "[R,V]", logits.len(), &[rows, vocab])?;
    check_len("logprob", "target", "[R]", target.len(), &[rows])?;
    check_len("logprob", "logprob", "[R]", logprob.len(), &[rows])?;
    check_len("logprob", "lse", "[R]", lse.len(), &[rows])?;
    let scale = checked_inverse("logprob", vocab, temperature, target)?;
    let target = device.upload("logprob", target)?;
    let kernel = if scale == 1.0 { "logprob_unscaled" } else { "logprob" };
    let arguments =
        Arguments::new().buffer(logits).buffer(&target).buffer(logprob).buffer(lse).long(vocab).float(scale);
    // SAFETY: lengths were checked, and so was every target.
    unsafe { device.launch(Build::of::<I, f32>("logprob"), kernel, [rows, 1, 1], 256, 0, &arguments) }
}

/// `f32(1 / temperature)`, checked.
pub(crate) fn inverse(op: &'static str, temperature: f64) -> Result<f32, Error> {
    let scale = (1.0 / temperature) as f32;
    if !(temperature > 0.0 && temperature.is_finite() && scale > 0.0 && scale.is_finite()) {
        return Err(value_error(op, format!("temperature is {temperature}; it must be positive and finite")));
    }
    Ok(scale)
}

/// The same, with the targets of a device checked against the vocabulary.
pub(crate) fn checked_inverse(op: &'static str, vocab: usize, temperature: f64, target: &[i32]) -> Result<f32, Error> {
    let scale = inverse(op, temperature)?;
    check_targets(op, target, vocab)?;
    Ok(scale)
}

/// Every target is below `vocab`; negative ones are ignored.
pub(crate) fn check_targets(op: &'static str, target: &[i32], vocab: usize) -> Result<(), Error> {
    match target.iter().position(|&t| t >= 0 && t as usize >= vocab) {
        Some(row) => Err(value_error(op, format!("target[{row}] is {}; the vocabulary has {vocab}", target[row]))),
        None => Ok(()),
    }
}

/// logprob and lse of one row of `x * scale`.
struct Row<'a, I> {
    x: &'a [I],
    scale: f32,
    target: Option<usize>,
    /// As in [`Total`].
    next: &'a [I],
}

impl<I: Element> Kernel for Row<'_, I> {
    type Output = (f32, f32);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let Row { x, scale, target, next } = self;
        let reference = Reference::of(s, x, scale);
        let total = s.enter(Total { x, scale, reference: &reference, without: target, next });
        let Some(target) = target else { return (0.0, total.lse()) };
        let z = x[target].widen() * scale;
        match reference.seen_from_top() {
            None => (total.logprob(z), total.lse()),
            Some(from_top) => {
                let far = s.enter(Total { x, scale, reference: &from_top, without: Some(target), next: &[] });
                (far.logprob(z), total.lse())
            }
        }
    }
}

/// From |n| of this size on the log-probabilities and the entropy of a row are measured from its top.
pub(crate) const FAR: f32 = IEEE.far;

/// What the weights of a row are measured by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// The reference point: the largest exponent.
    pub n: f32,
    /// What is taken from every element first: the largest one, of a row that is far from zero.
    pub top: Option<f32>,
}

impl Origin {
    /// That of a row whose largest element is `top`.
    pub fn top(top: f32) -> Origin {
        Origin { n: 0.0, top: Some(top) }
    }

    /// The weight of x.
    #[inline(always)]
    pub fn weight(&self, x: f32) -> f32 {
        let (m, i) = exp_split(Scalar, self.top.map_or(x, |top| x - top), LOG2E_HI, LOG2E_LO);
        weight(Scalar, m, i, self.n)
    }

    /// The logarithm of a sum `l` of weights.
    pub fn ln(&self, l: f32) -> f64 {
        match self.top {
            None => ln_of_sum(self.n, l),
            Some(top) => f64::from(top) + ln(l),
        }
    }

    /// The log-probability of x, where the weights sum to `l` and to `rest` without that of x.
    pub fn logprob(&self, x: f32, l: f32, rest: f32) -> f32 {
        let t = self.weight(x);
        let logprob = match self.top {
            _ if rest < t => 0.0 - ln1p(rest, t),
            None => f64::from(x) - ln_of_sum(self.n, l),
            Some(top) => (f64::from(x) - f64::from(top)) - ln(l),
        };
        logprob as f32
    }
}

/// The softmax denominator of one row.
pub(crate) struct Denominator {
    /// What its weights are measured by.
    pub origin: Origin,
    /// Sum of the weights; +0 for a row without a finite element, NaN for a row with a NaN or +inf.
    pub sum: f32,
    /// The same without one of them.
    pub rest: f32,
}

impl Denominator {
    /// That of `x * scale`, whose `reference` is given and whose weights are left in the first elements of `kept`. A row without
    /// one leaves nothing.
    #[inline(always)]
    pub fn of_row<S: Simd, I: Element>(
        s: S,
        x: &[I],
        scale: f32,
        reference: &Reference,
        kept: &mut [f32],
    ) -> Denominator {
        let Reference { origin, special, .. } = *reference;
        if let Some(sum) = special {
            return Denominator { origin, sum, rest: sum };
        }
        let kept = &mut kept[..x.len()];
        weights(s, x, scale, origin, kept);
        let mut part = [0f32; 8];
        for (part, segment) in part.iter_mut().zip(kept.chunks(segment_length(x.len()))) {
            let mut lanes = Lanes::new();
            lanes.add(s, segment, Add);
            *part = lanes.fold(s, segment.len());
        }
        let sum = join(part);
        Denominator { origin, sum, rest: sum }
    }

    /// The same of a row of any length, whose weights are not kept.
    #[inline(always)]
    pub fn of_long_row<S: Simd, I: Element>(s: S, x: &[I], scale: f32, reference: &Reference) -> Denominator {
        s.enter(Total { x, scale, reference, without: None, next: &[] })
    }

    /// The logarithm of the sum.
    pub fn lse(&self) -> f32 {
        match self.sum {
            0.0 => f32::NEG_INFINITY,
            sum if sum.is_nan() => f32::narrow(sum),
            sum => self.origin.ln(sum) as f32,
        }
    }

    /// The log-probability of the element x that `rest` is without.
    fn logprob(&self, x: f32) -> f32 {
        // A row without a finite element has none.
        if self.sum > 0.0 { self.origin.logprob(x, self.sum, self.rest) } else { f32::narrow(f32::NAN) }
    }
}

/// Computes the [`Denominator`] of one row of `x * scale`.
pub(crate) struct Total<'a, I> {
    pub x: &'a [I],
    pub scale: f32,
    pub reference: &'a Reference,
    /// The element that `rest` is without.
    pub without: Option<usize>,
    /// What is read next, prefetched to L2 while weights are computed. It may be empty.
    pub next: &'a [I],
}

impl<I: Element> Kernel for Total<'_, I> {
    type Output = Denominator;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Denominator {
        let Total { x, scale, reference, without, next } = self;
        let Reference { origin, special, near, .. } = *reference;
        if let Some(sum) = special {
            return Denominator { origin, sum, rest: sum };
        }
        let length = segment_length(x.len());
        let next = if next.len() == x.len() { next } else { x };
        let mut tile = [0f32; TILE];
        let (mut part, mut rest) = ([0f32; 8], [0f32; 8]);
        for (i, (x, next)) in x.chunks(length).zip(next.chunks(length)).enumerate() {
            let (mut lanes, pairs) = (Lanes::new(), near.is_some() && I::IS_BF16);
            if let Some(unit) = near {
                s.enter(NearSum { x, next, scale, unit, lanes: &mut lanes });
            } else {
                for x in x.chunks(TILE) {
                    let tile = &mut tile[..x.len()];
                    weights(s, x, scale, origin, tile);
                    lanes.add(s, tile, Add);
                }
            }
            let at = without.and_then(|at| at.checked_sub(i * length));
            [part[i], rest[i]] = folded(s, lanes, pairs, (x, scale, &origin), at);
        }
        Denominator { origin, sum: join(part), rest: join(rest) }
    }
}

/// The sum of the segment x of `x * scale`, whose weights are in the lanes (with `pairs` as [`Lanes::fold_pairs`] takes them), and the
/// same without its element `at`, where it has one.
#[inline(always)]
pub(crate) fn folded<S: Simd, I: Element>(
    s: S,
    lanes: Lanes,
    pairs: bool,
    (x, scale, origin): (&[I], f32, &Origin),
    at: Option<usize>,
) -> [f32; 2] {
    let mut rest = None;
    if let Some(at) = at.filter(|&at| at < x.len()) {
        // Of one lane there is a second sum.
        let (mut lane, mut next) = (0.0, at % LANES);
        let (mut values, mut weighed) = ([0f32; 64], [0f32; 64]);
        while next < x.len() {
            let mut count = 0;
            while count < values.len() && next < x.len() {
                if next != at {
                    values[count] = x[next].widen();
                    count += 1;
                }
                next += LANES;
            }
            weights(s, &values[..count], scale, *origin, &mut weighed[..count]);
            for weight in &weighed[..count] {
                lane += weight;
            }
        }
        rest = Some(fold(s, lanes.with(s, at, lane, pairs), pairs, x.len()));
    }
    let sum = fold(s, lanes, pairs, x.len());
    [sum, rest.unwrap_or(sum)]
}

/// The sum in the lanes of so many elements.
#[inline(always)]
fn fold<S: Simd>(s: S, mut lanes: Lanes, pairs: bool, len: usize) -> f32 {
    if pairs { lanes.fold_pairs(s, len) } else { lanes.fold(s, len) }
}

/// Weights that stay in L1 until they are added; a multiple of 256.
const TILE: usize = 1024;

/// Adds the weights of a segment, none of them negligible, to the lanes and prefetches as many elements of `next`. Bf16 is
/// taken by pairs.
struct NearSum<'a, I> {
    x: &'a [I],
    next: &'a [I],
    scale: f32,
    unit: f32,
    lanes: &'a mut Lanes,
}

impl<I: Element> Kernel for NearSum<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let NearSum { x, next, scale, unit, lanes } = self;
        let (two, s2, bf16) = (2 * S::LANES, Unrolled(s), I::IS_BF16 && scale == 1.0);
        let whole = x.len() - x.len() % two;
        for at in (0..whole).step_by(two) {
            for line in (0..two * size_of::<I>()).step_by(64) {
                prefetch_second(next.as_ptr().wrapping_add(at).wrapping_byte_add(line));
            }
            let x = load_two(s, &x[at..][..two], I::IS_BF16);
            lanes.add_two(s, at, near_weight(s2, scaled(s2, x, scale), unit, bf16));
        }
        for (i, x) in x[whole..].iter().enumerate() {
            let weight = near_weight(Scalar, scaled(Scalar, x.widen(), scale), unit, bf16);
            lanes.add_one(s, whole + i, weight, I::IS_BF16);
        }
    }
}

/// What is known of a row before its weights.
pub(crate) struct Reference {
    /// The largest element.
    pub top: f32,
    /// What its weights are measured by.
    pub origin: Origin,
    /// The sum that a row without weights has: NaN or +0.
    pub special: Option<f32>,
    /// The [`near_unit`] of the row.
    pub near: Option<f32>,
}

impl Reference {
    /// That of the row `x * scale`.
    #[inline(always)]
    pub fn of<S: Simd, I: Element>(s: S, x: &[I], scale: f32) -> Reference {
        let (largest, least, invalid) = s.enter(Extent(x));
        // Rounding a product by a positive scale and exp_split's rounding grow with x, so the largest x has the largest
        // exponent, and the least x the least one.
        let exponent = |x: f32| (x * scale * LOG2E_HI).round_ties_even();
        let (top, n) = (largest * scale, exponent(largest));
        let special = if invalid || top == f32::INFINITY {
            Some(f32::NAN)
        } else if top == f32::NEG_INFINITY {
            Some(0.0)
        } else {
            None
        };
        // A finite element beyond 2^127.5 overflows x * log2(e).
        let origin = if n.is_finite() { Origin { n, top: None } } else { Origin::top(top) };
        Reference { top, origin, special, near: near_unit(n, exponent(least)) }
    }

    /// The same row measured from its top, where it is [`FAR`] from zero and is not so measured.
    pub fn seen_from_top(&self) -> Option<Reference> {
        let far = self.special.is_none() && self.origin.n.abs() >= FAR;
        far.then(|| Reference { origin: Origin::top(self.top), near: None, ..*self })
    }
}

/// The largest element and the least, and whether one is NaN or +inf.
struct Extent<'a, I>(&'a [I]);

impl<I: Element> Kernel for Extent<'_, I> {
    type Output = (f32, f32, bool);
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (f32, f32, bool) {
        if self.0.is_empty() {
            return (f32::NEG_INFINITY, f32::NEG_INFINITY, false);
        }
        let (largest, least, invalid) = I::extent(self.0);
        (largest.widen(), least.widen(), invalid)
    }
}

/// The weights `w` of `x * scale`; -inf has weight +0.
#[inline(always)]
pub(crate) fn weights<S: Simd, I: Element>(s: S, x: &[I], scale: f32, origin: Origin, w: &mut [f32]) {
    s.enter(Weights { x, scale, origin, w });
}

struct Weights<'a, I> {
    x: &'a [I],
    scale: f32,
    origin: Origin,
    w: &'a mut [f32],
}

impl<I: Element> Kernel for Weights<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Weights { x, scale, origin: Origin { n, top }, w } = self;
        match top {
            None if is_small(s, s.splat(n)) => weights_of::<S, I, true>(s, x, scale, n, w),
            None => weights_of::<S, I, false>(s, x, scale, n, w),
            // Such rows are rare.
            Some(top) => {
                for at in (0..x.len()).step_by(S::LANES) {
                    let below = s.sub(scaled(s, load_at(s, x, at, I::default()), scale), s.splat(top));
                    narrow_at(s, scaled_weight::<_, true>(s, below, 1.0, n), w, at);
                }
            }
        }
    }
}

#[inline(always)]
fn weights_of<S: Simd, I: Element, const SMALL: bool>(s: S, x: &[I], scale: f32, n: f32, w: &mut [f32]) {
    let (eight, s4) = (8 * S::LANES, Unrolled(Unrolled(s)));
    // For one lane eight would only be more to compile.
    let whole = if S::LANES > 1 { x.len() - x.len() % eight } else { 0 };
    for at in (0..whole).step_by(eight) {
        let x = load_two(s4, &x[at..][..eight], false);
        store_two(s4, scaled_weight::<_, SMALL>(Unrolled(s4), x, scale, n), &mut w[at..][..eight]);
    }
    for at in (whole..x.len()).step_by(S::LANES) {
        narrow_at(s, scaled_weight::<_, SMALL>(s, load_at(s, x, at, I::default()), scale, n), w, at);
    }
}

#[inline(always)]
fn scaled_weight<S: Simd, const SMALL: bool>(s: S, x: S::F, scale: f32, n: f32) -> S::F {
    weigh::<S, SMALL>(s, scaled(s, x, scale), s.splat(LOG2E_HI), s.splat(LOG2E_LO), s.splat(n))
}

#[inline(always)]
fn scaled<S: Simd>(s: S, x: S::F, scale: f32) -> S::F {
    if scale == 1.0 { x } else { s.mul(x, s.splat(scale)) }
}

/// The sum of the 8 segments of a row.
#[inline(always)]
pub(super) fn join([s0, s1, s2, s3, s4, s5, s6, s7]: [f32; 8]) -> f32 {
    ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Isa;

    fn of(cpu: &Cpu, logits: &[f32], temperature: f64) -> [u32; 2] {
        let shape = Logprob { rows: 1, vocab: logits.len(), temperature };
        let (target, mut logp, mut lse) = ([if logits.is_empty() { -1 } else { 0 }], [9f32], [9f32]);
        logprob(cpu, &shape, logits, &target, &mut logp, &mut lse).unwrap();
        [logp[0].to_bits(), lse[0].to_bits()]
    }

    /// Half the temperature is twice the logits, exactly, where weights are near to each other and where they are not.
    pub(crate) fn logits_are_divided_by_the_temperature() {
        for isa in Isa::of_machine() {
            let cpu = Cpu::new(isa, 1, usize::MAX).unwrap();
            for least in [-4.0, -200.0] {
                let mut logits: Vec<f32> = (0..600).map(|i| (i * 389 % 601) as f32 / 100.0 - 3.0).collect();
                logits[7] = least;
                let twice: Vec<f32> = logits.iter().map(|x| 2.0 * x).collect();
                assert_eq!(of(&cpu, &logits, 0.5), of(&cpu, &twice, 1.0), "{isa} {least}");
                assert_ne!(of(&cpu, &logits, 0.5), of(&cpu, &logits, 1.0), "{isa} {least}");
            }
            // A logit that is infinite once it is divided.
            assert!(f32::from_bits(of(&cpu, &[3e38, 0.0], 0.5)[1]).is_nan());
            assert_eq!(of(&cpu, &[], 1.0).map(f32::from_bits), [0.0, f32::NEG_INFINITY]);
        }
    }

    /// Tokens of any probability, also of one so near to 1 that f32 cannot hold it, wherever the row lies: the error is a few
    /// units of 2^-24 of the log-probability itself.
    pub(crate) fn log_probabilities_are_near_in_every_regime() {
        let (vocab, cpu) = (1000, Cpu::best());
        let mut worst = 0f64;
        for offset in [0.0f32, 10.0, 1e3, -1e3, 4.5e4, 1e5, -1e5, 1e6, 1e7, -1e7] {
            for above in [-30.0f32, 0.0, 5.0, 7.0, 9.0, 14.0, 21.0, 28.0, 60.0] {
                let mut x: Vec<f32> = (0..vocab).map(|i| (i * 389 % 601) as f32 / 128.0 - 3.0 + offset).collect();
                let target = (offset.abs() as usize * 7 + 123) % vocab;
                x[target] = offset + above;
                let below = |i: usize| (f64::from(x[i]) - f64::from(x[target])).exp();
                let exact = -(0..vocab).filter(|&i| i != target).map(below).sum::<f64>().ln_1p();
                let (mut found, mut lse) = ([9f32], [9f32]);
                logprob(&cpu, &Logprob::new(1, vocab), &x, &[target as i32], &mut found, &mut lse).unwrap();
                worst = worst.max(((f64::from(found[0]) - exact) / exact).abs());
            }
        }
        assert!(worst > 0.0 && worst < 4.0 * 2f64.powi(-24), "{worst:e}");
        // Ties and distances at the end of f32.
        for (row, target, expected) in [
            ([3e38f32, 3e38], 0, [-std::f32::consts::LN_2, 3e38]),
            ([f32::MIN, f32::MIN], 1, [-std::f32::consts::LN_2, f32::MIN]),
            ([f32::MAX, f32::MIN], 0, [0.0, f32::MAX]),
            ([f32::MAX, f32::MIN], 1, [f32::NEG_INFINITY, f32::MAX]),
            ([0.0, f32::MIN], 1, [f32::MIN, 0.0]),
        ] {
            let (mut found, mut lse) = ([9f32], [9f32]);
            logprob(&cpu, &Logprob::new(1, 2), &row, &[target], &mut found, &mut lse).unwrap();
            assert_eq!([found[0], lse[0]], expected, "{row:?}");
        }
    }
}
