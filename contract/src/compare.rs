//! Comparison of outputs: raw bits, accuracy against a reference, and logits of whole models.

use crate::gradients::GradientBound;
use crate::record::Measure;
use crate::round;
use crate::spec::Reference;
use crate::tensor::{DType, Elements, Tensor};
use crate::verdict::Evidence;
use samebits_schema::{Op, Output};
use std::collections::BTreeMap;

/// How far an output may be from its reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Not at all: the same bits.
    Bits,
    /// `|found - value| <= ulp * ulp_out + condition_factor * 2^-24 * condition`, where ulp_out is the ulp of the
    /// output dtype at the largest magnitude the second term allows.
    Ulp {
        /// Share of the last rounding, in ulp of the output dtype; half an ulp is the least there is.
        ulp: f64,
        /// How many f32 roundings of the reference's condition may add up.
        condition_factor: f64,
        /// The 99th percentile of the error in ulp of the output dtype; asked of 100 elements or more.
        p99_ulp: Option<f64>,
        /// The least share of correctly rounded elements; asked of 100 elements or more.
        correctly_rounded: Option<f64>,
    },
    /// `|found - value| <= atol + rtol * |value|`.
    AtolRtol {
        /// Absolute part.
        atol: f64,
        /// Relative part.
        rtol: f64,
    },
    /// For logits of a whole model.
    Chain(ChainBound),
    /// For its gradients.
    Gradient(GradientBound),
}

/// Limits on the logits of a whole model; an absent limit is not asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChainBound {
    /// RMS error as a multiple of that of the checkpoint's own recorded run in the same dtype.
    pub rms_of_recorded: Option<f64>,
    /// Largest error as a multiple of that of the recorded run.
    pub max_of_recorded: Option<f64>,
    /// Largest error as a share of the largest |value| of the reference.
    pub max_of_largest: Option<f64>,
    /// Largest difference of the log-probability of a next token.
    pub max_dlogp: Option<f64>,
    /// Mean of the differences' magnitudes.
    pub mean_dlogp: Option<f64>,
    /// Mean of `exp(d) - 1 - d` with d the difference of log-probabilities.
    pub approx_kl: Option<f64>,
    /// Share of next tokens whose probability ratio lies outside [0.8, 1.2].
    pub clip_fraction: Option<f64>,
}

/// Below this number of elements a percentile or a share says nothing.
const STATISTIC: usize = 100;

/// Compares logical rows bit for bit; -0 is not +0 and a NaN must be the canonical one. `rows` pairs rows of
/// `expected` with rows of `found`; a row is an index into the leading `row_axes` axes, flattened. Returns the number
/// of elements compared.
///
/// # Errors
/// Evidence of the first difference. Different dtypes, different extents behind the row axes, a row that is not
/// there, and a comparison of nothing are differences too.
pub fn bits(
    output: &str,
    row_axes: usize,
    expected: &Tensor,
    found: &Tensor,
    rows: &[(usize, usize)],
) -> Result<usize, Box<Evidence>> {
    let refuse = |message: String| Err(whole(output, message));
    if expected.dtype() != found.dtype() {
        return refuse(format!("{output}: dtype {} where {} was expected", found.dtype(), expected.dtype()));
    }
    let (a, b) = (expected.shape(), found.shape());
    if a.len() < row_axes || a.len() != b.len() || a[row_axes..] != b[row_axes..] {
        return refuse(format!("{output}: shape {b:?} where {a:?} was expected ({row_axes} leading axes are rows)"));
    }
    let inner: usize = a[row_axes..].iter().product();
    let counts = [a, b].map(|shape| shape[..row_axes].iter().product::<usize>());
    if let Some(&(base, variant)) = rows.iter().find(|(base, variant)| *base >= counts[0] || *variant >= counts[1]) {
        return refuse(format!(
            "{output}: row {base} against row {variant}, but there are {} and {} rows",
            counts[0], counts[1]
        ));
    }
    let total = rows.len() * inner;
    if total == 0 {
        return refuse(format!("{output}: nothing was compared ({} rows of {inner} elements)", rows.len()));
    }
    let dtype = found.dtype();
    let (mut first, mut count, mut odd_nans) = (None, 0, 0);
    let (wanted, had) = (expected.elements(), found.elements());
    for &(base, variant) in rows {
        if same(wanted, base * inner, had, variant * inner, inner) {
            continue;
        }
        for i in 0..inner {
            let (want, have) = (wanted.bits(base * inner + i), had.bits(variant * inner + i));
            let odd_nan = round::is_nan(have, dtype) && have != round::canonical_nan(dtype);
            if want != have || odd_nan {
                count += 1;
                odd_nans += usize::from(odd_nan && round::is_nan(want, dtype));
                first.get_or_insert((variant * inner + i, want, have));
            }
        }
    }
    let Some((index, want, have)) = first else { return Ok(total) };
    let mut evidence = at(output, found, index);
    evidence.expected = show_bits(want, dtype);
    evidence.expected_bits = hex(want, dtype);
    evidence.ulp = distance(want, have, dtype);
    (evidence.count, evidence.total) = (count, total);
    evidence.message = if odd_nans == count {
        odd_nan(&evidence, dtype)
    } else {
        format!(
            "{}: {} ({}) where {} ({}) was expected; {count} of {total} differ",
            place(&evidence),
            evidence.found,
            evidence.found_bits,
            evidence.expected,
            evidence.expected_bits
        )
    };
    Err(evidence)
}

/// Whether `count` elements have the same bits, and no NaN among them is another than the canonical one. Of equal rows, which
/// nearly all are, nothing else has to be known, so this is a loop without a way out.
fn same(a: Elements, from_a: usize, b: Elements, from_b: usize, count: usize) -> bool {
    macro_rules! same {
        ($a:expr, $b:expr, $dtype:expr, $bits:expr) => {{
            let (infinity, canonical) = (round::to_bits(f64::INFINITY, $dtype), round::canonical_nan($dtype));
            let sign = 1u32 << (8 * $dtype.size() - 1);
            let wrong = $a[from_a..][..count].iter().zip(&$b[from_b..][..count]).fold(false, |wrong, (a, b)| {
                let (a, b): (u32, u32) = ($bits(a), $bits(b));
                wrong | (a != b) | ((b & !sign > infinity) & (b != canonical))
            });
            !wrong
        }};
    }
    match (a, b) {
        (Elements::Bf16(a), Elements::Bf16(b)) => same!(a, b, DType::Bf16, |v: &half::bf16| u32::from(v.to_bits())),
        (Elements::Fp16(a), Elements::Fp16(b)) => same!(a, b, DType::Fp16, |v: &half::f16| u32::from(v.to_bits())),
        (Elements::Fp32(a), Elements::Fp32(b)) => same!(a, b, DType::Fp32, |v: &f32| v.to_bits()),
        (Elements::I32(a), Elements::I32(b)) => a[from_a..][..count] == b[from_b..][..count],
        _ => false,
    }
}

/// A NaN stands where one belongs, and has other bits: that is all that is wrong.
fn odd_nan(evidence: &Evidence, dtype: DType) -> String {
    let (found, canonical) = (&evidence.found_bits, hex(round::canonical_nan(dtype), dtype));
    let Evidence { count, total, .. } = evidence;
    format!(
        "{}: NaN {found} is not canonical; write {canonical}; {count} of {total}, nothing else is wrong",
        place(evidence)
    )
}

/// Measures `found`, which should have dtype `dtype`, against the oracle and holds it to `bound`.
///
/// Infinite values count as the power of two after the largest finite binade, so overflow is rounding like any other.
/// A NaN must be where the reference has one, and canonical; exact elements are compared by bits. Elements of infinite
/// condition are not judged. A comparison of nothing fails.
pub fn accuracy(
    output: &str,
    dtype: DType,
    found: &Tensor,
    reference: &Reference,
    bound: &Bound,
) -> (Measure, Option<Box<Evidence>>) {
    let refuse = |message: String| (Measure::default(), Some(whole(output, message)));
    if found.dtype() != dtype {
        return refuse(format!("{output}: dtype {} where {dtype} was expected", found.dtype()));
    }
    if found.shape() != reference.shape {
        return refuse(format!("{output}: shape {:?} where {:?} was expected", found.shape(), reference.shape));
    }
    if let Bound::Chain(_) | Bound::Gradient(_) = bound {
        return refuse(format!("{output}: a bound on whole models cannot be held by one op; fix the contract's rows"));
    }
    let mut measure = Measure::default();
    let mut ulps = Vec::with_capacity(found.len());
    let (mut rounded, mut wrong, mut odd_nans, mut worst) = (0, 0, 0, None::<(usize, Judged)>);
    let elements = found.elements();
    for index in 0..found.len() {
        if reference.condition[index] == f64::INFINITY {
            continue;
        }
        let judged = judge(elements, dtype, index, reference, bound);
        measure.samples += 1;
        rounded += usize::from(judged.correct);
        measure.max_abs = measure.max_abs.max(judged.error);
        measure.of_bound = measure.of_bound.max(judged.of_bound);
        measure.spread.count(judged.ulp, judged.of_bound);
        if let Some(ulp) = judged.ulp {
            ulps.push(ulp);
        }
        if judged.of_bound > 1.0 {
            wrong += 1;
            odd_nans += usize::from(reference.value[index].is_nan() && round::is_nan(elements.bits(index), dtype));
            worst.get_or_insert((index, judged));
        }
    }
    if measure.samples == 0 {
        return refuse(format!("{output}: nothing was compared ({} elements, none with a finite bound)", found.len()));
    }
    measure.correctly_rounded = rounded as f64 / measure.samples as f64;
    measure.max_ulp = ulps.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
    measure.p99_ulp = percentile(&mut ulps, 99);
    let evidence = match worst {
        Some((index, judged)) => {
            let mut evidence = at(output, found, index);
            evidence.expected = show(reference.value[index]);
            evidence.ulp = judged.ulp;
            (evidence.count, evidence.total) = (wrong, measure.samples);
            let how = if judged.of_bound.is_finite() {
                // Three digits of what is just outside would say that it is inside.
                let digits = if judged.of_bound < 1.001 { 6 } else { 3 };
                format!("{:.digits$} times its bound", judged.of_bound)
            } else {
                "outside any bound".to_string()
            };
            evidence.message = if odd_nans == wrong {
                odd_nan(&evidence, dtype)
            } else {
                format!(
                    "{}: {} ({}) where {} was expected, {how}; {wrong} of {} are outside",
                    place(&evidence),
                    evidence.found,
                    evidence.found_bits,
                    evidence.expected,
                    measure.samples
                )
            };
            Some(evidence)
        }
        None => statistics(output, &measure, bound),
    };
    (measure, evidence)
}

/// The bounds on a whole output: percentile and share.
fn statistics(output: &str, measure: &Measure, bound: &Bound) -> Option<Box<Evidence>> {
    let Bound::Ulp { p99_ulp, correctly_rounded, .. } = *bound else { return None };
    if measure.samples < STATISTIC {
        return None;
    }
    let message = if p99_ulp.is_some_and(|limit| measure.p99_ulp > limit) {
        format!("{output}: p99 error is {:.4} ulp; the bound is {}", measure.p99_ulp, p99_ulp?)
    } else if correctly_rounded.is_some_and(|least| measure.correctly_rounded < least) {
        let least = correctly_rounded?;
        format!(
            "{output}: {:.4} of the elements are correctly rounded; the bound is {least}",
            measure.correctly_rounded
        )
    } else {
        return None;
    };
    let mut evidence = whole(output, message);
    (evidence.count, evidence.total) = (measure.samples, measure.samples);
    Some(evidence)
}

/// One element against its reference.
struct Judged {
    correct: bool,
    error: f64,
    ulp: Option<f64>,
    /// Error as a share of the bound; infinite where no bound helps.
    of_bound: f64,
}

fn judge(found: Elements, dtype: DType, index: usize, reference: &Reference, bound: &Bound) -> Judged {
    let (want, have) = (reference.value[index], found.bits(index));
    if dtype == DType::I32 {
        let error = (found.value(index) - want).abs();
        let of_bound = if error == 0.0 { 0.0 } else { f64::INFINITY };
        return Judged { correct: error == 0.0, error, ulp: None, of_bound };
    }
    let correct = have == round::to_bits(want, dtype);
    let special =
        |pass: bool| Judged { correct, error: 0.0, ulp: None, of_bound: if pass { 0.0 } else { f64::INFINITY } };
    if want.is_nan() || round::is_nan(have, dtype) || (want.is_infinite() && reference.condition[index] == 0.0) {
        return special(correct);
    }
    // Infinity takes the place of the first number that is not there, and is the one answer to what lies beyond it by
    // more than the bound allows.
    let top = round::overflow(dtype);
    if let Bound::Ulp { ulp, condition_factor, .. } = *bound
        && want.abs() - condition_factor * round::pow2(-24) * reference.condition[index]
            >= top + ulp * round::ulp(top, dtype)
    {
        return special(correct);
    }
    let (value, got) = (want.clamp(-top, top), found.value(index).clamp(-top, top));
    let error = (got - value).abs();
    let ulp = error / round::ulp(value, dtype);
    let exact = reference.exact || reference.condition[index] == 0.0;
    let allowed = match *bound {
        Bound::Ulp { ulp, condition_factor, .. } if !exact => {
            let computed = condition_factor * round::pow2(-24) * reference.condition[index];
            ulp * round::ulp((value.abs() + computed).min(top), dtype) + computed
        }
        Bound::AtolRtol { atol, rtol } => atol + rtol * value.abs(),
        _ => 0.0,
    };
    let of_bound = match () {
        // An exact element has the right bits; -0 for +0 is wrong though the distance is 0.
        _ if exact && matches!(bound, Bound::Ulp { .. } | Bound::Bits) => {
            if correct {
                0.0
            } else {
                f64::INFINITY
            }
        }
        _ if error == 0.0 => 0.0,
        _ if allowed == 0.0 => f64::INFINITY,
        _ => error / allowed,
    };
    Judged { correct, error, ulp: Some(ulp), of_bound }
}

/// The `percent`-th percentile by nearest rank; 0 of none. Puts the values in another order.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let rank = (values.len() * percent).div_ceil(100) - 1;
    *values.select_nth_unstable_by(rank, f64::total_cmp).1
}

/// Errors of an output of a whole model; of one that is no logits, those of tokens are 0.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ChainMeasure {
    /// Elements compared.
    pub samples: usize,
    /// Root mean square of the errors.
    pub rms: f64,
    /// Largest error of an element.
    pub max: f64,
    /// Largest |value| of the reference.
    pub largest: f64,
    /// Next tokens compared.
    pub tokens: usize,
    /// Largest difference of the log-probability of a next token.
    pub max_dlogp: f64,
    /// Mean of the differences' magnitudes.
    #[serde(default)]
    pub mean_dlogp: f64,
    /// Mean of `exp(d) - 1 - d`, d = reference's minus found log-probability of the next token.
    pub approx_kl: f64,
    /// Share of next tokens whose probability ratio lies outside [0.8, 1.2].
    pub clip_fraction: f64,
}

/// An output of a whole model, as its program declares it, and what the model was given.
pub struct OfProgram<'a> {
    /// The form of the call.
    pub op: &'static Op,
    /// The output.
    pub output: &'static Output,
    /// The inputs of the call.
    pub inputs: &'a BTreeMap<String, Tensor>,
}

impl OfProgram<'_> {
    /// Measures `found` against `reference`, which must have its shape. Where they are [logits](Op::logits) of an input, of
    /// tokens `[B,T]` say, their log-probabilities are measured too: the next token of position t is `tokens[b,t+1]`, and the
    /// last position has none.
    ///
    /// # Errors
    /// Evidence when shapes differ, a value is not finite, a token is outside the vocabulary, or nothing is active.
    pub fn measure(&self, found: &Tensor, reference: &Tensor) -> Result<ChainMeasure, Box<Evidence>> {
        let name = self.output.name;
        let refuse = |message: String| Err(whole(name, message));
        if found.shape() != reference.shape() || found.is_empty() {
            let [found, reference] = [found, reference].map(Tensor::shape);
            return refuse(format!(
                "{name} has shape {found:?}, the reference {reference:?}; they must agree and hold something"
            ));
        }
        let (have, want) = (found.to_f64(), reference.to_f64());
        if let Some(index) = (0..found.len()).find(|&i| !have[i].is_finite() || !want[i].is_finite()) {
            let mut evidence = at(name, found, index);
            evidence.expected = show(reference.value(index));
            (evidence.count, evidence.total) = (1, found.len());
            evidence.message =
                format!("{}: {} against {}: not finite", place(&evidence), evidence.found, evidence.expected);
            return Err(evidence);
        }
        let mut measure = ChainMeasure { samples: found.len(), ..ChainMeasure::default() };
        for (a, b) in have.iter().zip(&want) {
            measure.rms += (a - b) * (a - b);
            measure.max = measure.max.max((a - b).abs());
            measure.largest = measure.largest.max(b.abs());
        }
        measure.rms = (measure.rms / measure.samples as f64).sqrt();
        match self.op.logits(self.output) {
            Some(input) => self.measure_logits(measure, &self.inputs[input.name], [&have, &want], found.shape()),
            None => Ok(measure),
        }
    }

    /// The same with what the logits say of the next tokens.
    fn measure_logits(
        &self,
        mut measure: ChainMeasure,
        tokens: &Tensor,
        [have, want]: [&[f64]; 2],
        shape: &[usize],
    ) -> Result<ChainMeasure, Box<Evidence>> {
        let name = self.output.name;
        let refuse = |message: String| Err(whole(name, message));
        let (v, leading) = shape.split_last().expect("logits have an axis of their own");
        let Some(t) = tokens.shape().last().copied().filter(|_| tokens.shape() == leading) else {
            let tokens = tokens.shape();
            return refuse(format!(
                "{name} has shape {shape:?}, the tokens {tokens:?}; the axes before the last must agree"
            ));
        };
        let Some(tokens) = tokens.as_i32() else {
            return refuse(format!("tokens are {}; they must be i32", tokens.dtype()));
        };
        let mut clipped = 0;
        for row in (0..tokens.len()).filter(|row| row % t + 1 < t) {
            let Some(next) = usize::try_from(tokens[row + 1]).ok().filter(|next| next < v) else {
                return refuse(format!("token {} is outside the vocabulary of {v}", tokens[row + 1]));
            };
            let logp = |logits: &[f64]| {
                let row = &logits[row * v..][..*v];
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                row[next] - top - row.iter().map(|z| (z - top).exp()).sum::<f64>().ln()
            };
            let d = logp(want) - logp(have);
            measure.tokens += 1;
            measure.max_dlogp = measure.max_dlogp.max(d.abs());
            measure.mean_dlogp += d.abs();
            measure.approx_kl += d.exp_m1() - d;
            clipped += usize::from(!(0.8..=1.2).contains(&(-d).exp()));
        }
        if measure.tokens == 0 {
            return refuse("no position has a next token: nothing to compare".to_string());
        }
        measure.mean_dlogp /= measure.tokens as f64;
        measure.approx_kl /= measure.tokens as f64;
        measure.clip_fraction = clipped as f64 / measure.tokens as f64;
        Ok(measure)
    }

    /// Holds a measure to `bound`; `recorded` is the measure of the checkpoint's own recorded run. Limits on log-probabilities
    /// are for logits alone.
    pub fn hold(
        &self,
        measure: &ChainMeasure,
        recorded: Option<&ChainMeasure>,
        bound: &ChainBound,
    ) -> Option<Box<Evidence>> {
        let of_recorded = |have: f64, of: fn(&ChainMeasure) -> f64| recorded.map(|r| have / of(r));
        let of_errors = [
            ("rms error / recorded run's", bound.rms_of_recorded, of_recorded(measure.rms, |r| r.rms)),
            ("max error / recorded run's", bound.max_of_recorded, of_recorded(measure.max, |r| r.max)),
            ("max error / largest |value|", bound.max_of_largest, Some(measure.max / measure.largest)),
        ];
        let of_tokens = [
            ("max |dlogp|", bound.max_dlogp, Some(measure.max_dlogp)),
            ("mean |dlogp|", bound.mean_dlogp, Some(measure.mean_dlogp)),
            ("approx KL", bound.approx_kl, Some(measure.approx_kl)),
            ("clip fraction", bound.clip_fraction, Some(measure.clip_fraction)),
        ];
        let of_tokens = of_tokens.into_iter().filter(|_| self.op.logits(self.output).is_some());
        let name = self.output.name;
        for (what, limit, have) in of_errors.into_iter().chain(of_tokens) {
            let Some(limit) = limit else { continue };
            let message = match have {
                None => format!("{name}: {what} has a bound, and no recorded run to measure it by was given"),
                Some(have) if have <= limit => continue,
                Some(have) => format!("{name}: {what} is {have:.3e}; the bound is {limit:e}"),
            };
            let mut evidence = whole(name, message);
            evidence.expected = format!("{what} <= {limit:e}");
            evidence.found = have.map_or("nothing recorded".into(), show);
            (evidence.count, evidence.total) = (measure.samples, measure.samples);
            return Some(evidence);
        }
        None
    }
}

/// Evidence about an output as a whole.
pub(crate) fn whole(output: &str, message: String) -> Box<Evidence> {
    Box::new(Evidence { message, output: output.to_string(), count: 1, total: 1, ..Evidence::default() })
}

/// Evidence that shows the element found at `index`.
fn at(output: &str, found: &Tensor, index: usize) -> Box<Evidence> {
    let mut rest = index;
    let mut coordinates: Vec<usize> = found
        .shape()
        .iter()
        .rev()
        .map(|&extent| {
            let coordinate = rest % extent;
            rest /= extent;
            coordinate
        })
        .collect();
    coordinates.reverse();
    let bits = found.bits(index);
    Box::new(Evidence {
        output: output.to_string(),
        index,
        coordinates,
        found: show_bits(bits, found.dtype()),
        found_bits: hex(bits, found.dtype()),
        ..Evidence::default()
    })
}

fn place(evidence: &Evidence) -> String {
    format!("{}{:?}", evidence.output, evidence.coordinates)
}

/// A decimal that reads back to the same f64.
fn show(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 || (1e-4..1e9).contains(&size) || !size.is_finite() {
        format!("{value}")
    } else {
        format!("{value:e}")
    }
}

fn show_bits(bits: u32, dtype: DType) -> String {
    show(round::from_bits(bits, dtype))
}

fn hex(bits: u32, dtype: DType) -> String {
    format!("{bits:#0width$x}", width = 2 + 2 * dtype.size())
}

/// How many representable numbers lie between two finite ones; -0 and +0 are 0 apart.
fn distance(a: u32, b: u32, dtype: DType) -> Option<f64> {
    if dtype == DType::I32 || ![a, b].iter().all(|&bits| round::from_bits(bits, dtype).is_finite()) {
        return None;
    }
    let sign = 1u32 << (8 * dtype.size() - 1);
    let ordered = |bits: u32| if bits & sign == 0 { i64::from(bits) } else { -i64::from(bits & !sign) };
    Some((ordered(a) - ordered(b)).abs() as f64)
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    const NAN: u32 = 0x7fc0_0000;

    fn f32s(shape: &[usize], bits: &[u32]) -> Tensor {
        Tensor::fp32(shape, bits.iter().map(|&b| f32::from_bits(b)).collect())
    }

    fn all(n: usize) -> Vec<(usize, usize)> {
        (0..n).map(|i| (i, i)).collect()
    }

    pub(crate) fn bits_are_raw() {
        let base = f32s(&[2, 2], &[0, 0x3f80_0000, NAN, 0x7f80_0000]);
        assert_eq!(bits("y", 1, &base, &base, &all(2)), Ok(4));
        let zero = f32s(&[2, 2], &[0x8000_0000, 0x3f80_0000, NAN, 0x7f80_0000]);
        let evidence = bits("y", 1, &base, &zero, &all(2)).unwrap_err();
        assert_eq!((evidence.expected.as_str(), evidence.found.as_str(), evidence.ulp), ("0", "-0", Some(0.0)));
        assert_eq!((evidence.expected_bits.as_str(), evidence.found_bits.as_str()), ("0x00000000", "0x80000000"));
        let far = f32s(&[2, 2], &[0, 0x3f80_0003, NAN, 0xff80_0000]);
        let evidence = bits("y", 1, &base, &far, &all(2)).unwrap_err();
        assert_eq!((evidence.index, &evidence.coordinates[..], evidence.ulp), (1, &[0, 1][..], Some(3.0)));
        assert_eq!((evidence.count, evidence.total), (2, 4));
        let odd = f32s(&[1, 1], &[NAN | 1]);
        assert!(bits("y", 1, &odd, &odd, &all(1)).unwrap_err().message.contains("canonical"));
        // Where that is all that is wrong it says what to write, and not where something else is.
        let (right, found) = (f32s(&[2], &[NAN, 1]), f32s(&[2], &[NAN | 1, 1]));
        let evidence = bits("y", 1, &right, &found, &all(2)).unwrap_err();
        let words = "y[0]: NaN 0x7fc00001 is not canonical; write 0x7fc00000; 1 of 2, nothing else is wrong";
        assert_eq!((evidence.message.as_str(), evidence.count), (words, 1));
        for others in [&[NAN | 1, 2], &[1, NAN | 1]] {
            let evidence = bits("y", 1, &right, &f32s(&[2], others), &all(2)).unwrap_err();
            assert!(!evidence.message.contains("nothing else"), "{}", evidence.message);
        }
        let reference = Reference { shape: vec![2], value: vec![f64::NAN, 1.0], condition: vec![1.0; 2], exact: false };
        let bound = Bound::Ulp { ulp: 1.0, condition_factor: 1.0, p99_ulp: None, correctly_rounded: None };
        let judged = |elements: &[u32]| accuracy("y", DType::Fp32, &f32s(&[2], elements), &reference, &bound).1;
        let one = 1f32.to_bits();
        assert_eq!(judged(&[NAN | 1, one]).unwrap().message, words);
        assert!(judged(&[NAN, one]).is_none());
        assert!(!judged(&[NAN | 1, 2 * one]).unwrap().message.contains("nothing else"));
    }

    pub(crate) fn bits_follow_the_row_pairs() {
        let base = f32s(&[3, 1], &[1, 2, 3]);
        let rotated = f32s(&[4, 1], &[9, 3, 1, 2]);
        assert_eq!(bits("y", 1, &base, &rotated, &[(0, 2), (1, 3), (2, 1)]), Ok(3));
        assert!(bits("y", 1, &base, &rotated, &[(0, 1)]).is_err());
        assert!(bits("y", 1, &base, &rotated, &[(0, 4)]).unwrap_err().message.contains("3 and 4 rows"));
        assert!(bits("y", 1, &base, &f32s(&[3, 2], &[0; 6]), &all(3)).unwrap_err().message.contains("shape"));
        assert!(
            bits("y", 1, &base, &Tensor::i32(&[3, 1], vec![1, 2, 3]), &all(3)).unwrap_err().message.contains("dtype")
        );
        assert!(bits("y", 1, &base, &base, &[]).unwrap_err().message.contains("nothing"));
    }

    fn reference(value: &[f64], condition: &[f64]) -> Reference {
        Reference { shape: vec![value.len()], value: value.to_vec(), condition: condition.to_vec(), exact: false }
    }

    const HALF: Bound = Bound::Ulp { ulp: 0.5, condition_factor: 1.0, p99_ulp: None, correctly_rounded: None };

    fn outside(found: &Tensor, reference: &Reference, bound: &Bound) -> Option<String> {
        accuracy("y", found.dtype(), found, reference, bound).1.map(|e| e.message)
    }

    pub(crate) fn accuracy_holds_the_bound_and_no_more() {
        let found = f32s(&[1], &[0x3f80_0000]);
        let unit = round::pow2(-24);
        // At 1 an f32 ulp is 2^-23: half of it, and one f32 rounding of a condition of 1.
        assert_eq!(outside(&found, &reference(&[1.0 + 1.99 * unit], &[1.0]), &HALF), None);
        assert!(outside(&found, &reference(&[1.0 + 2.01 * unit], &[1.0]), &HALF).unwrap().contains("times its bound"));
        assert_eq!(outside(&found, &reference(&[1.0 + 8.0 * unit], &[8.0]), &HALF), None);
        let (measure, _) = accuracy("y", DType::Fp32, &found, &reference(&[1.0 + 0.5 * unit], &[1.0]), &HALF);
        assert_eq!((measure.samples, measure.max_ulp, measure.correctly_rounded), (1, 0.25, 1.0));
        let rule = Bound::AtolRtol { atol: 0.1, rtol: 0.1 };
        assert_eq!(outside(&found, &reference(&[1.2], &[1.0]), &rule), None);
        assert!(outside(&found, &reference(&[1.3], &[1.0]), &rule).is_some());
    }

    pub(crate) fn special_values_are_judged_by_bits() {
        let judge = |bits: u32, value: f64, condition: f64| {
            outside(&f32s(&[1], &[bits]), &reference(&[value], &[condition]), &HALF).is_none()
        };
        assert!(judge(NAN, f64::NAN, 0.0) && !judge(NAN | 1, f64::NAN, 0.0) && !judge(NAN, 1.0, 1.0));
        assert!(!judge(0x7f80_0000, f64::NAN, 0.0) && !judge(0x3f80_0000, f64::NAN, 1.0));
        assert!(judge(0x7f80_0000, f64::INFINITY, 0.0) && !judge(0xff80_0000, f64::INFINITY, 0.0));
        assert!(!judge(0x7f7f_ffff, f64::INFINITY, 0.0), "the largest number is not infinity");
        // An exact zero keeps its sign; a zero with rounding errors may have either.
        assert!(judge(0x8000_0000, -0.0, 0.0) && !judge(0, -0.0, 0.0) && judge(0, -0.0, 1.0));
        // Overflow is rounding: next to the threshold either side is within half an ulp and a bit.
        let threshold = f64::from(f32::MAX) + round::pow2(103);
        assert!(judge(0x7f80_0000, threshold * (1.0 - 1e-9), 1e38) && judge(0x7f7f_ffff, threshold, 1e38));
        assert!(!judge(0x7f80_0000, 3e38, 1e30));
        // Far beyond it there is no other answer than infinity.
        assert!(judge(0x7f80_0000, 1e300, 1e38) && !judge(0x7f7f_ffff, 1e300, 1e38));
        assert!(!judge(0x7f7f_ffff, 3.5e38, 3.5e38) && judge(0x7f7f_ffff, 3.5e38, 1e46));
    }

    pub(crate) fn nothing_compared_is_a_failure() {
        let message = outside(&f32s(&[1], &[0]), &reference(&[1.0], &[f64::INFINITY]), &HALF).unwrap();
        assert!(message.contains("nothing"), "{message}");
        let message = outside(&f32s(&[0], &[]), &reference(&[], &[]), &HALF).unwrap();
        assert!(message.contains("nothing"), "{message}");
        assert!(outside(&f32s(&[2], &[0, 0]), &reference(&[0.0], &[1.0]), &HALF).unwrap().contains("shape"));
    }

    pub(crate) fn statistics_are_held_too() {
        let n = 200;
        let value: Vec<f64> = (0..n).map(|i| 1.0 + if i < 3 { 0.9 } else { 0.1 } * round::pow2(-23)).collect();
        let found = f32s(&[n], &vec![0x3f80_0000; n]);
        let bound = |p99, share| Bound::Ulp { ulp: 1.0, condition_factor: 1.0, p99_ulp: p99, correctly_rounded: share };
        let reference = reference(&value, &vec![1.0; n]);
        assert_eq!(outside(&found, &reference, &bound(Some(0.91), Some(0.985))), None);
        assert!(outside(&found, &reference, &bound(Some(0.5), None)).unwrap().contains("p99"));
        assert!(outside(&found, &reference, &bound(None, Some(0.99))).unwrap().contains("correctly rounded"));
    }

    pub(crate) fn chain_measures_logits_and_tokens() {
        let op = &samebits_schema::chain::OP;
        let chain = |tokens: &Tensor, found: &Tensor, want: &Tensor| {
            let inputs = BTreeMap::from([("tokens".to_string(), tokens.clone())]);
            OfProgram { op, output: &op.outputs[0], inputs: &inputs }.measure(found, want)
        };
        let nothing = BTreeMap::new();
        let hold = |measure: &ChainMeasure, recorded: Option<&ChainMeasure>, bound: &ChainBound| {
            OfProgram { op, output: &op.outputs[0], inputs: &nothing }.hold(measure, recorded, bound)
        };
        let tokens = Tensor::i32(&[1, 3], vec![0, 1, 1]);
        let want = Tensor::fp32(&[1, 3, 2], vec![0.0, 0.0, 0.0, 0.0, 4.0, 0.0]);
        assert_eq!(chain(&tokens, &want, &want).unwrap().max_dlogp, 0.0);
        let found = Tensor::fp32(&[1, 3, 2], vec![0.0, 1.0, 0.0, 0.0, 4.0, 0.0]);
        let measure = chain(&tokens, &found, &want).unwrap();
        let d = (1.0f64 / (1.0 + (-1.0f64).exp())).ln() - 0.5f64.ln();
        assert!((measure.max_dlogp - d).abs() < 1e-12 && (measure.rms - (1.0f64 / 6.0).sqrt()).abs() < 1e-12);
        assert_eq!((measure.tokens, measure.max, measure.largest, measure.clip_fraction), (2, 1.0, 4.0, 0.5));
        let bound = ChainBound { max_dlogp: Some(0.06), ..Default::default() };
        assert!(hold(&measure, None, &bound).unwrap().message.contains("logits: max |dlogp|"));
        let relative = ChainBound { rms_of_recorded: Some(1.0), ..Default::default() };
        assert_eq!(hold(&measure, Some(&measure), &relative), None);
        assert!(hold(&measure, None, &relative).unwrap().message.contains("no recorded run"));
        let broken = Tensor::fp32(&[1, 3, 2], vec![0.0, f32::NAN, 0.0, 0.0, 4.0, 0.0]);
        assert!(chain(&tokens, &broken, &want).unwrap_err().message.contains("not finite"));
        let short = Tensor::i32(&[1, 1], vec![0]);
        let one = Tensor::fp32(&[1, 1, 2], vec![0.0, 0.0]);
        assert!(chain(&short, &one, &one).unwrap_err().message.contains("nothing"));
        assert!(chain(&short, &want, &want).unwrap_err().message.contains("before the last must agree"));
        assert!(chain(&tokens, &want, &one).unwrap_err().message.contains("they must agree"));
        assert!(
            chain(&Tensor::i32(&[1, 3], vec![0, 1, 2]), &want, &want)
                .unwrap_err()
                .message
                .contains("token 2 is outside")
        );
    }

    /// What another program gives is measured by its name, without tokens.
    pub(crate) fn outputs_of_any_program_are_measured() {
        static OUTPUT: Output = Output { name: "noise", ..samebits_schema::chain::OP.outputs[0] };
        static DENOISER: Op = Op { inputs: &[], outputs: &[OUTPUT], program: "denoiser", ..samebits_schema::chain::OP };
        let inputs = BTreeMap::new();
        let noise = OfProgram { op: &DENOISER, output: &OUTPUT, inputs: &inputs };
        let want = Tensor::fp32(&[1, 1, 2, 2], vec![0.0, 8.0, 0.0, 0.0]);
        let found = Tensor::fp32(&[1, 1, 2, 2], vec![0.0, 8.0, 2.0, 0.0]);
        let measure = noise.measure(&found, &want).unwrap();
        assert_eq!((measure.samples, measure.rms, measure.max, measure.largest, measure.tokens), (4, 1.0, 2.0, 8.0, 0));
        let bound = |limit| ChainBound { max_of_largest: Some(limit), max_dlogp: Some(0.0), ..Default::default() };
        assert_eq!(noise.hold(&measure, None, &bound(0.25)), None, "a bound on log-probabilities is for logits");
        let evidence = noise.hold(&measure, None, &bound(0.2)).unwrap();
        assert_eq!(evidence.message, "noise: max error / largest |value| is 2.500e-1; the bound is 2e-1");
        assert!(noise.measure(&Tensor::fp32(&[0], vec![]), &Tensor::fp32(&[0], vec![])).is_err());
    }
}
