//! What each op is: names and shapes of its tensors, its parameters, and the f64 oracle. One file per op.
//!
//! The oracle computes from the definition in f64, never in the canonical order, and shares no code with any
//! implementation. Beside each value stands the size of what f32 rounding errors are proportional to, so that a bound
//! can be stated before anything is measured.

use crate::case::Case;
use crate::fill::{Fill, Maker};
use crate::round;
use crate::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::fmt;

mod add;
mod add_rms_norm;
mod argmax;
mod attention;
mod chain;
mod combine;
mod embedding;
mod gelu_mul;
mod gemm;
mod linear_logprob;
mod logprob;
mod norm_rope;
mod rms_norm;
mod rope;
mod route;
mod scale;
mod silu_mul;
mod softcap;
mod softmax;

/// Stands for any number of further axes, the same in every tensor of a case that has it.
pub const REST: &str = "..";

/// Below this an f32 rounding error is absolute: the smallest normal number. A condition other than 0 includes it.
const FLOOR: f64 = f32::MIN_POSITIVE as f64;

/// A sum of magnitudes from here on may overflow an f32 accumulator in some order.
const HUGE: f64 = 3.4e38;

/// What an input holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputKind {
    /// bf16, fp16 or fp32; all float inputs of a case share one dtype.
    Float,
    /// 32-bit integers.
    I32,
}

/// An input tensor.
#[derive(Clone, Copy, Debug)]
pub struct InputSpec {
    /// Its name on the wire.
    pub name: &'static str,
    /// Names of its axes; equal names have equal extents, [`REST`] stands for any number of axes.
    pub axes: &'static [&'static str],
    /// What it holds.
    pub kind: InputKind,
    /// Whether a case may leave it out.
    pub optional: bool,
    /// How many of its leading axes are logical rows; 0 for an input shared by all rows.
    pub rows: usize,
}

/// What a parameter may be.
#[derive(Clone, Copy, Debug)]
pub enum ParamKind {
    /// A whole number, 0 or more.
    Count,
    /// A finite number.
    Float,
    /// `0` or `1`.
    Flag,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Any word.
    Text,
}

/// A parameter.
#[derive(Clone, Copy, Debug)]
pub struct ParamSpec {
    /// Its name on the wire.
    pub name: &'static str,
    /// What it may be.
    pub kind: ParamKind,
    /// What holds when it is absent, in words; empty when it is required.
    pub default: &'static str,
}

/// The dtype of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// The case's `out`.
    Out,
    /// Always f32.
    Fp32,
    /// Always i32.
    I32,
}

/// An output tensor.
#[derive(Clone, Copy, Debug)]
pub struct OutputSpec {
    /// Its name on the wire.
    pub name: &'static str,
    /// Names of its axes, all bound by inputs.
    pub axes: &'static [&'static str],
    /// Its dtype.
    pub kind: OutputKind,
}

impl OutputSpec {
    /// The dtype when a case asks for `out`.
    pub fn dtype(&self, out: DType) -> DType {
        match self.kind {
            OutputKind::Out => out,
            OutputKind::Fp32 => DType::Fp32,
            OutputKind::I32 => DType::I32,
        }
    }
}

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

/// Why a case is not one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Well formed, and outside what the contract offers.
    Unsupported(String),
    /// Malformed.
    Invalid(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Unsupported(why) => write!(f, "unsupported: {why}"),
            Refusal::Invalid(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Refusal {}

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

/// A case whose tensors and parameters have been checked, with the extents of its axes.
pub struct Checked<'a> {
    /// The case.
    pub case: &'a Case,
    /// Extents by axis name.
    pub dims: BTreeMap<&'static str, usize>,
    /// Extents that [`REST`] stands for.
    pub rest: Vec<usize>,
}

impl Checked<'_> {
    /// Extent of a bound axis.
    fn dim(&self, axis: &str) -> usize {
        self.dims[axis]
    }

    /// A present input's values.
    fn floats(&self, name: &str) -> Vec<f64> {
        self.case.inputs[name].to_f64()
    }

    /// A present input's values, rounded to TF32 when the case says so and the input is f32.
    fn operands(&self, name: &str) -> Vec<f64> {
        let tensor = &self.case.inputs[name];
        let values = tensor.to_f64();
        if tensor.dtype() == DType::Fp32 && self.text("tf32") == Some("enabled") {
            return values.into_iter().map(|v| f64::from(round::tf32(v as f32))).collect();
        }
        values
    }

    /// A present i32 input.
    fn ints(&self, name: &str) -> &[i32] {
        self.case.inputs[name].as_i32().expect("checked")
    }

    fn text(&self, param: &str) -> Option<&str> {
        self.case.params.get(param).map(String::as_str)
    }

    fn float(&self, param: &str, default: f64) -> f64 {
        self.text(param).map_or(default, |v| v.parse().expect("checked"))
    }

    fn count(&self, param: &str, default: usize) -> usize {
        self.text(param).map_or(default, |v| v.parse().expect("checked"))
    }

    fn flag(&self, param: &str) -> bool {
        self.text(param) == Some("1")
    }

    /// Every element of an i32 input lies in `range`.
    fn indexes(&self, name: &str, range: std::ops::Range<i64>) -> Result<(), Refusal> {
        for (i, &v) in self.ints(name).iter().enumerate() {
            if !range.contains(&i64::from(v)) {
                return Err(Refusal::Invalid(format!(
                    "{}: `{name}`[{i}] is {v}; use {} to {}",
                    self.case.op,
                    range.start,
                    range.end - 1
                )));
            }
        }
        Ok(())
    }

    /// A float parameter satisfies `holds`.
    fn require(&self, param: &str, default: f64, holds: fn(f64) -> bool, rule: &str) -> Result<(), Refusal> {
        let value = self.float(param, default);
        if holds(value) {
            return Ok(());
        }
        Err(Refusal::Invalid(format!("{}: parameter `{param}` is {value}; it must be {rule}", self.case.op)))
    }
}

/// Everything the contract knows about an op.
pub struct Spec {
    /// The op's stem.
    pub name: &'static str,
    /// Its threshold class.
    pub class: Class,
    /// Input tensors.
    pub inputs: &'static [InputSpec],
    /// Parameters.
    pub params: &'static [ParamSpec],
    /// Output tensors.
    pub outputs: &'static [OutputSpec],
    /// How many leading axes of every output are logical rows: 1, or 2 where a row is (batch, position).
    pub row_axes: usize,
    /// The fills a case may ask for.
    pub fills: &'static [Fill],
    /// Values of `out` that a case may ask for.
    pub outs: &'static [DType],
    /// The extents that a case's row gives; the name of an optional input, with extent 1, asks for that input.
    pub shape: &'static [&'static str],
    /// Fills the inputs of a case.
    pub make: fn(&Maker) -> BTreeMap<String, Tensor>,
    /// What shapes and dtypes alone do not say.
    check: fn(&Checked) -> Result<(), Refusal>,
    /// The op in f64; called on checked cases only.
    compute: fn(&Checked) -> References,
}

const FLOAT: InputSpec = InputSpec { name: "", axes: &[], kind: InputKind::Float, optional: false, rows: 0 };
const INT: InputSpec = InputSpec { name: "", axes: &[], kind: InputKind::I32, optional: false, rows: 0 };
const TF32: ParamSpec =
    ParamSpec { name: "tf32", kind: ParamKind::Choice(&["disabled", "enabled"]), default: "disabled" };

/// All ops, in the order tables print them.
pub fn all() -> &'static [Spec] {
    static ALL: [Spec; 19] = [
        gemm::SPEC,
        rms_norm::SPEC,
        add_rms_norm::SPEC,
        attention::SPEC,
        logprob::SPEC,
        linear_logprob::SPEC,
        softmax::SPEC,
        silu_mul::SPEC,
        gelu_mul::SPEC,
        softcap::SPEC,
        scale::SPEC,
        rope::SPEC,
        norm_rope::SPEC,
        add::SPEC,
        embedding::SPEC,
        argmax::SPEC,
        route::SPEC,
        combine::SPEC,
        chain::SPEC,
    ];
    &ALL
}

/// The op called `op`.
pub fn find(op: &str) -> Option<&'static Spec> {
    all().iter().find(|spec| spec.name == op)
}

impl Spec {
    /// The dtype of the case's float inputs (for a chain, of its weights).
    pub fn dtype(&self, case: &Case) -> Option<DType> {
        if self.class == Class::Chain {
            return case.params.get("dtype").and_then(|name| DType::parse(name).ok());
        }
        self.inputs
            .iter()
            .filter(|input| input.kind == InputKind::Float)
            .find_map(|input| case.inputs.get(input.name))
            .map(Tensor::dtype)
    }

    /// The dtypes it takes.
    pub fn dtypes(&self) -> &'static [DType] {
        &DType::FLOATS
    }

    /// Whether an output is read again as it is stored, so that the oracle's answer depends on the case's `out`.
    pub fn reads_stored(&self) -> bool {
        self.name == add_rms_norm::SPEC.name
    }

    /// Number of logical rows of a case that has passed [`Spec::validate`].
    pub fn rows(&self, case: &Case) -> usize {
        let input = self.inputs.iter().find(|input| input.rows == self.row_axes).expect("an input has all row axes");
        case.inputs.get(input.name).map_or(0, |t| t.shape().iter().take(self.row_axes).product())
    }

    /// Checks names, shapes, dtypes and parameters, and binds the axes.
    pub fn validate<'a>(&self, case: &'a Case) -> Result<Checked<'a>, Refusal> {
        let invalid = |why: String| Err(Refusal::Invalid(format!("{}: {why}", self.name)));
        for name in case.inputs.keys() {
            if !self.inputs.iter().any(|input| input.name == name) {
                return invalid(format!(
                    "unknown tensor `{name}`; it takes {}",
                    names(self.inputs.iter().map(|i| i.name))
                ));
            }
        }
        let mut checked = Checked { case, dims: BTreeMap::new(), rest: Vec::new() };
        let mut rest: Option<&[usize]> = None;
        let mut first: Option<(&str, DType)> = None;
        for input in self.inputs {
            let Some(tensor) = case.inputs.get(input.name) else {
                if input.optional {
                    continue;
                }
                return invalid(format!("tensor `{}`{} is missing", input.name, axes(input.axes)));
            };
            match (input.kind, tensor.dtype()) {
                (InputKind::I32, DType::I32) => {}
                (InputKind::I32, found) => {
                    return invalid(format!("tensor `{}` is {found}; it must be i32", input.name));
                }
                (InputKind::Float, DType::I32) => {
                    return invalid(format!("tensor `{}` is i32; it must be bf16, fp16 or fp32", input.name));
                }
                (InputKind::Float, found) => match first {
                    None => first = Some((input.name, found)),
                    Some((_, dtype)) if dtype == found => {}
                    Some((other, dtype)) => {
                        return Err(Refusal::Unsupported(format!(
                            "{}: mixed dtypes: `{other}` is {dtype} and `{}` is {found}; all float inputs share one",
                            self.name, input.name
                        )));
                    }
                },
            }
            let open = input.axes.last() == Some(&REST);
            let named = input.axes.len() - usize::from(open);
            let shape = tensor.shape();
            if shape.len() < named || (!open && shape.len() > named) {
                return invalid(format!(
                    "tensor `{}` has shape {shape:?}; it must be {}",
                    input.name,
                    axes(input.axes)
                ));
            }
            for (&axis, &extent) in input.axes.iter().zip(&shape[..named]) {
                let bound = *checked.dims.entry(axis).or_insert(extent);
                if extent == 0 {
                    return invalid(format!("tensor `{}` has shape {shape:?}; axis {axis} is empty", input.name));
                }
                if bound != extent {
                    return invalid(format!(
                        "tensor `{}` has shape {shape:?}, that is {axis}={extent}; another tensor says {axis}={bound}",
                        input.name
                    ));
                }
            }
            if open {
                let tail = &shape[named..];
                if tail.contains(&0) {
                    return invalid(format!("tensor `{}` has shape {shape:?}; an axis is empty", input.name));
                }
                if rest.is_some_and(|rest| rest != tail) {
                    return invalid(format!("tensor `{}` has shape {shape:?}; all shapes must be equal", input.name));
                }
                rest = Some(tail);
            }
        }
        checked.rest = rest.unwrap_or_default().to_vec();
        self.check_params(case)?;
        if !self.outs.contains(&case.out) {
            return Err(Refusal::Unsupported(format!(
                "{}: out is {}; it returns {}",
                self.name,
                case.out,
                names(self.outs.iter().map(|d| d.name()))
            )));
        }
        (self.check)(&checked)?;
        Ok(checked)
    }

    /// Checks the names and values of the parameters alone.
    pub fn check_params(&self, case: &Case) -> Result<(), Refusal> {
        for (name, value) in &case.params {
            let invalid = |why: String| Err(Refusal::Invalid(format!("{}: {why}", self.name)));
            let Some(param) = self.params.iter().find(|p| p.name == name) else {
                let known = names(self.params.iter().map(|p| p.name));
                return invalid(format!("unknown parameter `{name}`; it takes {known}"));
            };
            let rule = match param.kind {
                ParamKind::Count if value.parse::<u32>().is_err() => "a whole number from 0 on".to_string(),
                ParamKind::Float if !value.parse::<f64>().is_ok_and(f64::is_finite) => "a finite number".to_string(),
                ParamKind::Flag if value != "0" && value != "1" => "0 or 1".to_string(),
                ParamKind::Choice(words) if !words.contains(&value.as_str()) => words.join(" or "),
                ParamKind::Text if value.is_empty() => "a word".to_string(),
                _ => continue,
            };
            return invalid(format!("parameter `{name}` is `{value}`; it must be {rule}"));
        }
        for param in self.params.iter().filter(|p| p.default.is_empty()) {
            if !case.params.contains_key(param.name) {
                return Err(Refusal::Invalid(format!("{}: parameter `{}` is missing", self.name, param.name)));
            }
        }
        Ok(())
    }

    /// The op in f64.
    ///
    /// # Errors
    /// Those of [`Spec::validate`]; for a chain always, because its reference is recorded, not computed.
    pub fn oracle(&self, case: &Case) -> Result<References, Refusal> {
        if self.class == Class::Chain {
            return Err(Refusal::Unsupported("chain: the reference is recorded beside the checkpoint".into()));
        }
        Ok((self.compute)(&self.validate(case)?))
    }
}

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<_> = all.map(|name| format!("`{name}`")).collect();
    if all.is_empty() { "none".into() } else { all.join(", ") }
}

fn axes(axes: &[&str]) -> String {
    format!("[{}]", axes.join(","))
}

/// `value` as f32 keeps it.
fn f32_of(value: f64) -> f64 {
    round::round(value, DType::Fp32)
}

/// References with one output.
fn one(name: &str, reference: Reference) -> References {
    BTreeMap::from([(name.to_string(), reference)])
}

#[cfg(test)]
mod tests;
