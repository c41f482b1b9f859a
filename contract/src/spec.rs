//! What the contract adds to the form of each op: threshold class, inputs of its cases, and the f64 oracle. One file per
//! op.
//!
//! The oracle computes from the definition in f64, never in the canonical order, and shares no code with any
//! implementation. Beside each value stands the size of what f32 rounding errors are proportional to, so that a bound
//! can be stated before anything is measured.

use crate::case::Case;
use crate::fill::{self, Fill, Maker};
use crate::power;
use crate::round;
use crate::sharp;
use crate::tensor::{DType, Tensor};
use samebits_schema::{Attributes, Call, Given, Holds, Op, Output, REST};
use std::collections::BTreeMap;
use std::ops::Deref;

pub(crate) use attention::Sees;
pub use samebits_schema::Error;

mod activate;
mod activate_backward;
mod adamw;
mod add;
mod add_rms_norm;
mod add_rms_norm_backward;
mod argmax;
mod attention;
pub(crate) mod attention_backward;
mod batch_loss;
mod causal_conv1d;
mod causal_conv1d_backward;
mod causal_conv1d_dw;
pub(crate) mod chain;
mod chain_backward;
mod clamped_silu_mul;
mod clamped_silu_mul_backward;
mod clip_factor;
mod combine;
mod combine_backward;
mod conv;
mod conv_dw;
mod conv_dx;
mod draw;
mod embedding;
mod embedding_dw;
mod entropy;
mod entropy_backward;
mod fold;
mod gated_delta_rule;
mod gated_delta_rule_backward;
mod gelu_mul;
mod gelu_mul_backward;
mod gemm;
mod gemm_dw;
mod gemm_dx;
mod group_advantage;
mod group_norm;
mod group_norm_backward;
mod index_score;
mod inexact;
mod layer_norm;
mod layer_norm_backward;
mod layer_norm_dw;
mod linear_logprob;
mod linear_logprob_backward;
mod logprob;
mod logprob_backward;
mod mul;
mod nll;
mod norm_rope;
mod norm_rope_backward;
mod norm_rope_dw;
mod penalize;
mod policy_loss;
mod rms_norm;
mod rms_norm_backward;
mod rms_norm_dw;
mod rope;
mod rope_backward;
mod route;
mod route_backward;
mod scale;
mod selective_scan;
mod selective_scan_backward;
mod sigmoid_mul;
mod sigmoid_mul_backward;
mod silu_mul;
mod silu_mul_backward;
mod softcap;
mod softcap_backward;
mod softmax;
mod softmax_backward;
mod square_sum;
mod ssd_scan;
mod ssd_scan_backward;
mod token_sum;
mod topk;
mod truncate;
mod wkv7;
mod wkv7_backward;

/// What most ops that sum nothing are asked.
const PLAIN: &[Fill] = &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes];

/// What sums of one sign are asked, or those whose terms cannot be chosen.
const SUMS: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes, Fill::Power];

/// What sums are asked whose terms may cancel.
const SIGNED_SUMS: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes, Fill::Power];

/// What sums of exponentials are asked.
const WEIGHTS: &[Fill] = &[
    Fill::Normal,
    Fill::Wide,
    Fill::Tiny,
    Fill::NearOverflow,
    Fill::Peaky,
    Fill::Edges,
    Fill::Classes,
    Fill::Sharp,
    Fill::Power,
];

/// What ops of one exponential are asked.
const GATES: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16, Fill::Classes, Fill::Sharp];

/// Below this an f32 rounding error is absolute: the smallest normal number. A condition other than 0 includes it.
const FLOOR: f64 = f32::MIN_POSITIVE as f64;

/// A sum of magnitudes from here on may overflow an f32 accumulator in some order.
const HUGE: f64 = 3.4e38;

/// The threshold class of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// One element in, one element out.
    Elementwise,
    /// Sums.
    Reduction,
    /// Log-probabilities.
    Logprob,
    /// Attention.
    Attention,
    /// Whole models.
    Chain,
}

impl Class {
    /// All classes, in the order tables print them.
    pub const ALL: [Class; 5] = [Class::Elementwise, Class::Reduction, Class::Logprob, Class::Attention, Class::Chain];

    /// The name in tables and records.
    pub fn name(self) -> &'static str {
        match self {
            Class::Elementwise => "elementwise",
            Class::Reduction => "reduction",
            Class::Logprob => "logprob",
            Class::Attention => "attention",
            Class::Chain => "chain",
        }
    }
}

/// Whether an op is part of a forward or of its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From inputs to outputs.
    Forward,
    /// From gradients of outputs to gradients of inputs.
    Gradient,
}

impl Direction {
    /// Both, in the order tables print them.
    pub const ALL: [Direction; 2] = [Direction::Forward, Direction::Gradient];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Gradient => "gradient",
        }
    }
}

/// The oracle's answer for one output.
///
/// `|found - value| <= ulp * ulp_out(value) + condition_factor * 2^-24 * condition` states an accuracy bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// Extents of the output.
    pub shape: Vec<usize>,
    /// The op in f64, before the last rounding; NaN where the output must be the canonical NaN.
    pub value: Vec<f64>,
    /// What f32 rounding errors are proportional to. 0: this element is exact, its bits (the sign of zero too) are
    /// those of `value` after the last rounding. Infinite: f32 may overflow on the way, and nothing is claimed.
    pub condition: Vec<f64>,
    /// Whether the whole output is exact.
    pub exact: bool,
}

impl Reference {
    /// An output with rounding errors.
    fn new(shape: Vec<usize>, elements: impl IntoIterator<Item = (f64, f64)>) -> Reference {
        let (value, condition) = elements.into_iter().unzip();
        Reference { shape, value, condition, exact: false }
    }

    /// An output without.
    fn exact(shape: Vec<usize>, value: Vec<f64>) -> Reference {
        Reference { shape, condition: vec![0.0; value.len()], value, exact: true }
    }

    /// The output as the oracle rounds it.
    pub fn rounded(&self, dtype: DType) -> Tensor {
        round::tensor(dtype, &self.shape, &self.value)
    }
}

/// Outputs by name.
pub type References = BTreeMap<String, Reference>;

/// A case that has been checked, with the extents of its axes and its parameters.
pub struct Checked<'a> {
    /// The case.
    pub case: &'a Case,
    /// Its form.
    pub call: Call,
}

impl Checked<'_> {
    /// Extent of a bound axis.
    fn dim(&self, axis: &str) -> usize {
        self.call.dim(axis)
    }

    /// A present input's values.
    fn floats(&self, name: &str) -> Vec<f64> {
        self.case.inputs[name].to_f64()
    }

    /// A present input's values, rounded to TF32 when the case says so and the input is f32.
    fn operands(&self, name: &str) -> Vec<f64> {
        let tensor = &self.case.inputs[name];
        let values = tensor.to_f64();
        if tensor.dtype() == DType::Fp32 && self.call.tf32() {
            return values.into_iter().map(|v| f64::from(round::tf32(v as f32))).collect();
        }
        values
    }

    /// A present i32 input.
    fn ints(&self, name: &str) -> &[i32] {
        self.case.inputs[name].as_i32().expect("checked")
    }

    fn word(&self, param: &str) -> &str {
        self.call.word(param)
    }

    fn float(&self, param: &str) -> f64 {
        self.call.float(param)
    }

    fn count(&self, param: &str) -> usize {
        self.call.count(param)
    }

    fn flag(&self, param: &str) -> bool {
        self.call.flag(param)
    }
}

/// What the contract adds to the form of an op, which it derefs to.
pub struct Spec {
    /// The form.
    pub op: &'static Op,
    /// Its threshold class.
    pub class: Class,
    /// The fills a case may ask for.
    pub fills: &'static [Fill],
    /// The text of its table, `ops/<op>.toml`.
    pub(crate) table: &'static str,
    /// Fills the inputs of a case.
    pub make: fn(&Maker) -> BTreeMap<String, Tensor>,
    /// The op in f64; called on checked cases only.
    compute: fn(&Checked) -> References,
}

impl Deref for Spec {
    type Target = Op;

    fn deref(&self) -> &Op {
        self.op
    }
}

/// All ops that the contract judges, in the order tables print them.
pub fn all() -> &'static [Spec] {
    ALL
}

static ALL: &[Spec] = &[
    gemm::SPEC,
    gemm_dx::SPEC,
    gemm_dw::SPEC,
    rms_norm::SPEC,
    rms_norm_backward::SPEC,
    rms_norm_dw::SPEC,
    add_rms_norm::SPEC,
    add_rms_norm_backward::SPEC,
    layer_norm::SPEC,
    layer_norm_backward::SPEC,
    layer_norm_dw::SPEC,
    group_norm::SPEC,
    group_norm_backward::SPEC,
    attention::SPEC,
    attention_backward::SPEC,
    index_score::SPEC,
    conv::SPEC,
    conv_dx::SPEC,
    conv_dw::SPEC,
    causal_conv1d::SPEC,
    causal_conv1d_backward::SPEC,
    causal_conv1d_dw::SPEC,
    ssd_scan::SPEC,
    ssd_scan_backward::SPEC,
    selective_scan::SPEC,
    selective_scan_backward::SPEC,
    wkv7::SPEC,
    wkv7_backward::SPEC,
    gated_delta_rule::SPEC,
    gated_delta_rule_backward::SPEC,
    logprob::SPEC,
    logprob_backward::SPEC,
    linear_logprob::SPEC,
    linear_logprob_backward::SPEC,
    entropy::SPEC,
    entropy_backward::SPEC,
    softmax::SPEC,
    softmax_backward::SPEC,
    clamped_silu_mul::SPEC,
    silu_mul::SPEC,
    clamped_silu_mul_backward::SPEC,
    silu_mul_backward::SPEC,
    gelu_mul::SPEC,
    gelu_mul_backward::SPEC,
    sigmoid_mul::SPEC,
    sigmoid_mul_backward::SPEC,
    activate::SPEC,
    activate_backward::SPEC,
    softcap::SPEC,
    softcap_backward::SPEC,
    scale::SPEC,
    rope::SPEC,
    rope_backward::SPEC,
    norm_rope::SPEC,
    norm_rope_backward::SPEC,
    norm_rope_dw::SPEC,
    add::SPEC,
    mul::SPEC,
    embedding::SPEC,
    embedding_dw::SPEC,
    argmax::SPEC,
    topk::SPEC,
    penalize::SPEC,
    truncate::SPEC,
    draw::SPEC,
    route::SPEC,
    route_backward::SPEC,
    combine::SPEC,
    combine_backward::SPEC,
    token_sum::SPEC,
    fold::SPEC,
    nll::SPEC,
    policy_loss::SPEC,
    batch_loss::SPEC,
    group_advantage::SPEC,
    square_sum::SPEC,
    clip_factor::SPEC,
    adamw::SPEC,
    chain::SPEC,
    chain_backward::SPEC,
];

/// The op called `op`.
pub fn find(op: &str) -> Option<&'static Spec> {
    all().iter().find(|spec| spec.name == op)
}

/// The specification of calls of the op called `op` with these parameters: of a whole model, that of its program.
pub fn of(op: &str, params: &BTreeMap<String, String>) -> Option<&'static Spec> {
    let first = find(op)?;
    match params.get("program") {
        Some(program) if first.program != program => {
            OF_FURTHER_PROGRAMS.iter().find(|spec| spec.name == op && spec.program == program)
        }
        _ => Some(first),
    }
}

/// Those of programs that are not the first of their op. Their cases stand in the table of the op, which the first one names.
static OF_FURTHER_PROGRAMS: &[Spec] = &[];

/// Checks the form of a case of any op of the wire.
///
/// # Errors
/// An op that is not known; those of [`samebits_schema::validate`].
pub fn check_form(case: &Case) -> Result<Call, Error> {
    let op = samebits_schema::find(&case.op).ok_or_else(|| {
        let known: Vec<_> = samebits_schema::OPS.iter().map(|op| op.name).collect();
        Error::Unsupported(format!("op `{}` is not known; use one of {}", case.op, known.join(", ")))
    })?;
    let given = case.inputs.iter().map(|(name, tensor)| Given { name, dtype: tensor.dtype(), shape: tensor.shape() });
    samebits_schema::validate(op, &given.collect::<Vec<_>>(), Attributes::parse(op, &case.params)?, case.out)
}

impl Spec {
    /// The dtype of the case's float inputs (for a chain, of its weights).
    pub fn dtype(&self, case: &Case) -> Option<DType> {
        if self.class == Class::Chain {
            return case.params.get("dtype").and_then(|name| DType::parse(name).ok());
        }
        self.inputs
            .iter()
            .filter(|input| input.is_float())
            .find_map(|input| case.inputs.get(input.name))
            .map(Tensor::dtype)
    }

    /// Whether it is the gradient of another op.
    pub fn direction(&self) -> Direction {
        if self.gradient_of.is_some() { Direction::Gradient } else { Direction::Forward }
    }

    /// Whether it is the gradient of a whole model.
    pub fn is_model_gradient(&self) -> bool {
        self.class == Class::Chain && self.direction() == Direction::Gradient
    }

    /// The dtypes its float inputs may have together; those of a chain are of its weights.
    pub fn dtypes(&self) -> &'static [DType] {
        if self.class == Class::Chain {
            // Those of the attribute `dtype`.
            return if self.is_model_gradient() { &[DType::Bf16, DType::Fp32] } else { &DType::FLOATS };
        }
        let mut floats = self.inputs.iter().filter(|input| input.is_float());
        match floats.next() {
            Some(first) if first.group.is_none() && floats.all(|input| input.group.is_none()) => first.dtypes,
            _ => &DType::FLOATS,
        }
    }

    /// The extents that a case of a table gives: the axes of the inputs but those that follow from others, R and N where these
    /// may have any shape, and those of a model below which integers are drawn.
    pub fn shape(&self) -> Vec<&'static str> {
        let named = |axis| if axis == REST { vec!["R", "N"] } else { vec![axis] };
        let given = self.axes().into_iter().filter(|axis| !self.follows(axis));
        let mut shape: Vec<_> = given.flat_map(named).collect();
        for input in self.inputs {
            match input.holds {
                Holds::Below(axis) if self.is_of_model(axis) && !shape.contains(&axis) => shape.push(axis),
                _ => {}
            }
        }
        shape
    }

    /// Whether an output is read again as it is stored, so that the oracle's answer depends on the case's `out`.
    pub fn reads_stored(&self) -> bool {
        self.name == add_rms_norm::SPEC.op.name
    }

    /// Number of logical rows of a case that has passed [`Spec::validate`].
    pub fn rows(&self, case: &Case) -> usize {
        let input = self.inputs.iter().find(|input| input.rows == self.row_axes).expect("an input has all row axes");
        case.inputs.get(input.name).map_or(0, |t| t.shape().iter().take(self.row_axes).product())
    }

    /// The dtype of an output of a case that asks for `out` and has passed [`Spec::validate`].
    pub fn output_dtype(&self, output: &Output, out: DType) -> DType {
        output.fixed_dtype().unwrap_or(out)
    }

    /// Checks a case: its form, and what the contract asks besides. It judges no tensor without rows or elements, and no
    /// `out` that its outputs do not have.
    ///
    /// # Errors
    /// Those of [`check_form`] and [`samebits_schema::check_indexes`]; [`Error::Unsupported`] for what is not judged.
    pub fn validate<'a>(&self, case: &'a Case) -> Result<Checked<'a>, Error> {
        let call = check_form(case)?;
        let unsupported = |why: String| Err(Error::Unsupported(format!("{}: {why}", self.name)));
        for input in self.inputs {
            let Some(tensor) = case.inputs.get(input.name) else { continue };
            if tensor.is_empty() || tensor.shape().len() < input.rows {
                return unsupported(format!("input `{}` of shape {:?} has no rows", input.name, tensor.shape()));
            }
        }
        let fixed = |output: &Output| output.fixed_dtype().is_some();
        if !self.outs().contains(&case.out) {
            let known: Vec<_> = self.outs().iter().map(|out| out.name()).collect();
            return unsupported(format!("out is {}; it returns {}", case.out, known.join(", ")));
        }
        if let Some(output) = self.outputs.iter().find(|o| !fixed(o) && call.output_dtype(o) != case.out) {
            let dtype = call.output_dtype(output);
            return unsupported(format!("out is {}; `{}` of this call is {dtype}", case.out, output.name));
        }
        samebits_schema::check_indexes(&call, |name| case.inputs.get(name).and_then(Tensor::as_i32))?;
        Ok(Checked { case, call })
    }

    /// The op in f64.
    ///
    /// # Errors
    /// Those of [`Spec::validate`]; for a chain always, because its reference is recorded, not computed.
    pub fn oracle(&self, case: &Case) -> Result<References, Error> {
        if self.class == Class::Chain {
            return Err(Error::Unsupported("chain: the reference is recorded beside the checkpoint".into()));
        }
        Ok((self.compute)(&self.validate(case)?))
    }
}

/// What the sum of `terms` that are never negative may lose in some order beyond the roundings of any, in units of 2^-24 of
/// the sum: the terms that vanish beside the whole, each by itself. 0 unless there are many, which are nearly all and of
/// about one size, as in no row that is not made so.
fn absorbed(terms: impl Iterator<Item = f64>, sum: f64) -> f64 {
    let (mut lost, mut vanish, mut count) = (0.0, 0, 0);
    for term in terms {
        count += 1;
        if term < sum * round::pow2(-24) && term >= sum * round::pow2(-32) {
            (lost, vanish) = (lost + term, vanish + 1);
        }
    }
    if count >= 64 && 4 * vanish > 3 * count { lost / sum * round::pow2(24) } else { 0.0 }
}

/// `value` as f32 keeps it.
fn f32_of(value: f64) -> f64 {
    round::round(value, DType::Fp32)
}

/// References with one output.
fn one(name: &str, reference: Reference) -> References {
    BTreeMap::from([(name.to_string(), reference)])
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
