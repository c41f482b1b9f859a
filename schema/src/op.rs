use crate::attribute::{Attribute, DefaultValue};
use crate::call::Call;
use crate::dtype::DType;
use crate::index::Holds;
use crate::profile::PROFILE;
use crate::{Error, list};

/// Stands last among axes for any number of further axes, the same in every tensor of a call that has it.
pub const REST: &str = "..";

/// What an input is to its op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Made by another op of the forward.
    Activation,
    /// A parameter of the model.
    Weight,
    /// What quantised weights are multiplied with.
    Scale,
    /// Integers that say where: tokens, positions, lengths, targets, tables.
    Index,
    /// Kept from step to step, as a KV cache.
    State,
    /// The gradient of an output.
    Gradient,
}

impl Role {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Role::Activation => "activation",
            Role::Weight => "weight",
            Role::Scale => "scale",
            Role::Index => "index",
            Role::State => "state",
            Role::Gradient => "gradient",
        }
    }
}

/// An input tensor.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Its name on the wire.
    pub name: &'static str,
    /// Names of its axes. Equal names have equal extents; `B+1` is one more than B; a number is that extent; [`REST`] may
    /// stand last.
    pub axes: &'static [&'static str],
    /// What it is to the op.
    pub role: Role,
    /// The dtypes it may have.
    pub dtypes: &'static [DType],
    /// Inputs that name the same group have the same dtype.
    pub group: Option<&'static str>,
    /// Whether a call may leave it out.
    pub optional: bool,
    /// How many of its leading axes are logical rows; 0 for an input that all rows share.
    pub rows: usize,
    /// What its integers may be.
    pub holds: Holds,
}

impl Input {
    /// A float input of group `T`: bf16, fp16 or fp32.
    pub const fn float(name: &'static str, axes: &'static [&'static str], role: Role) -> Input {
        let dtypes = &DType::FLOATS;
        Input { name, axes, role, dtypes, group: Some("T"), optional: false, rows: 0, holds: Holds::Floats }
    }

    /// An activation whose first axis is the logical rows.
    pub const fn activation(name: &'static str, axes: &'static [&'static str]) -> Input {
        Input::float(name, axes, Role::Activation).rows(1)
    }

    /// A weight, shared by all rows.
    pub const fn weight(name: &'static str, axes: &'static [&'static str]) -> Input {
        Input::float(name, axes, Role::Weight)
    }

    /// The gradient of an output whose first axis is the logical rows.
    pub const fn gradient(name: &'static str, axes: &'static [&'static str]) -> Input {
        Input::float(name, axes, Role::Gradient).rows(1)
    }

    /// Which of the T rows are tokens, where a call does not say that all are.
    pub const fn mask(axes: &'static [&'static str]) -> Input {
        Input::index("mask", axes, Holds::Mask).optional()
    }

    /// What the sum that an op returns starts from; +0 where it is left out.
    pub const fn carry(axes: &'static [&'static str]) -> Input {
        Input::float("carry", axes, Role::State).fp32().optional()
    }

    /// What a sequence is before its first row, of f32 so that every cut of it carries the same.
    pub(crate) const fn state(name: &'static str, axes: &'static [&'static str]) -> Input {
        Input::float(name, axes, Role::State).rows(1).fp32()
    }

    /// An i32 input whose first axis is the logical rows.
    pub const fn index(name: &'static str, axes: &'static [&'static str], holds: Holds) -> Input {
        Input { dtypes: &[DType::I32], group: None, holds, ..Input::float(name, axes, Role::Index) }.rows(1)
    }

    /// The same with `rows` leading axes of logical rows.
    pub const fn rows(self, rows: usize) -> Input {
        Input { rows, ..self }
    }

    /// The same, and a call may leave it out.
    pub const fn optional(self) -> Input {
        Input { optional: true, ..self }
    }

    /// The same, of f32 whatever the other floats are.
    pub const fn fp32(self) -> Input {
        Input { dtypes: &[DType::Fp32], group: None, ..self }
    }

    /// The dtype that it has where the float inputs of the call have `dtype`, as far as it may.
    pub fn dtype_beside(&self, dtype: DType) -> DType {
        if self.dtypes.contains(&dtype) { dtype } else { self.dtypes[0] }
    }

    /// Its shape where `extent` says what extents the named axes have, and `rest` those that [`REST`] stands for.
    pub fn shape(&self, extent: impl Fn(&str) -> usize, rest: &[usize]) -> Vec<usize> {
        let mut shape = Vec::with_capacity(self.axes.len());
        for &axis in self.axes {
            match (axis, constant(axis), axis.strip_suffix("+1")) {
                (REST, ..) => shape.extend(rest),
                (_, Some(extent), _) => shape.push(extent),
                (.., Some(axis)) => shape.push(extent(axis) + 1),
                _ => shape.push(extent(axis)),
            }
        }
        shape
    }

    /// Whether it holds floats.
    pub fn is_float(&self) -> bool {
        self.dtypes.iter().all(|dtype| dtype.is_float())
    }

    /// For example `w[N,K] of bf16, fp16 or fp32`.
    pub fn form(&self) -> String {
        format!("{}{} of {}", self.name, axes(self.axes), self.dtype_names())
    }

    /// The integers that it may hold, in words; `None` for floats.
    pub fn integers(&self) -> Option<String> {
        Some(match self.holds {
            Holds::Floats => return None,
            Holds::Mask => "0: padding; anything else: a token".into(),
            Holds::Position => "0 or more".into(),
            Holds::Any => "any".into(),
            Holds::Below(axis) => format!("0 to {axis} - 1"),
            Holds::Distinct(axis) => format!("0 to {axis} - 1, none twice"),
            Holds::BelowOrIgnored(axis) => format!("below {axis}; negative ones are ignored"),
            Holds::Ranks(_) => "in each row 0 to `chosen` - 1 once, and -1 elsewhere".into(),
            Holds::Choices(axis) => format!("in each row `chosen` of 0 to {axis} - 1, none twice, or -1 alone"),
            Holds::Length(axes) => format!("0 to {}", axes.join(" ")),
            Holds::Place(axis) => format!("0 to {axis}"),
            Holds::Starts(axis) => format!("ascending from 0 to {axis}"),
            Holds::Pages { pages, lengths, .. } => format!("0 to {pages} - 1 where `{lengths}` reaches"),
        })
    }

    /// For example `bf16, fp16 or fp32`.
    pub fn dtype_names(&self) -> String {
        list(&self.dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>(), "or")
    }
}

/// The dtype of an output.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum OutputDType {
    /// The `out` of the call.
    Out,
    /// This one, whatever `out` says.
    Fixed(DType),
    /// The `out` of the call, but f32 for calls of which this is true.
    OutOrFp32(fn(&Call) -> bool),
}

/// An output tensor.
#[derive(Clone, Copy)]
pub struct Output {
    /// Its name on the wire.
    pub name: &'static str,
    /// Names of its axes.
    pub axes: &'static [&'static str],
    /// Its dtype.
    pub dtype: OutputDType,
    /// How many of its leading axes are logical rows. Where they are fewer than [`Op::row_axes`], it is made of all rows
    /// that have them in common, as a sum over tokens (0) or over the queries of a sequence (1).
    pub rows: usize,
}

impl Output {
    /// An output of dtype `out` whose first axis is the logical rows.
    pub const fn out(name: &'static str, axes: &'static [&'static str]) -> Output {
        Output { name, axes, dtype: OutputDType::Out, rows: 1 }
    }

    /// The same of a dtype of its own.
    pub const fn fixed(name: &'static str, axes: &'static [&'static str], dtype: DType) -> Output {
        Output { name, axes, dtype: OutputDType::Fixed(dtype), rows: 1 }
    }

    /// A sum over the rows that are tokens, of f32.
    pub const fn token_sum(name: &'static str, axes: &'static [&'static str]) -> Output {
        Output::fixed(name, axes, DType::Fp32).rows(0)
    }

    /// The same with `rows` leading axes of logical rows.
    pub const fn rows(self, rows: usize) -> Output {
        Output { rows, ..self }
    }

    /// The dtype it always has, if it does not follow `out`.
    pub fn fixed_dtype(&self) -> Option<DType> {
        match self.dtype {
            OutputDType::Fixed(dtype) => Some(dtype),
            _ => None,
        }
    }
}

/// Where the extent of an axis comes from that is not an input's to choose.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Extent {
    /// From extents and attributes of the call, in words and as a function. It is asked for calls that [`Op::check`] lets
    /// pass; the extents that stand before it in [`Op::extents`] are there. An input can have the axis as well, and must then
    /// have that extent.
    Of(&'static str, fn(&Call) -> usize),
    /// From the model that the call names: only who has the checkpoint knows it.
    OfModel,
}

/// The form of an op.
#[derive(Clone, Copy)]
pub struct Op {
    /// Its stem, which names everything about it.
    pub name: &'static str,
    /// What it computes, in one line.
    pub about: &'static str,
    /// Input tensors.
    pub inputs: &'static [Input],
    /// Attributes of its own; [`Op::attributes`] has those of every op as well.
    pub attributes: &'static [Attribute],
    /// Output tensors.
    pub outputs: &'static [Output],
    /// Where the axes of outputs that no input has get their extents.
    pub extents: &'static [(&'static str, Extent)],
    /// The word of the attribute `program` for which a call has this form; empty for ops that run no model.
    pub program: &'static str,
    /// The forms that calls of the same name have for other programs: with inputs, attributes and outputs of their own.
    pub programs: &'static [&'static Op],
    /// How many axes make a logical row: 1, or 2 where a row is (sequence, position). An output whose first axis is that of a [`Holds::Distinct`] input has there what the row owns that names it.
    pub row_axes: usize,
    /// What [`Op::check`] refuses, in words; empty when it refuses nothing.
    pub refused: &'static str,
    /// What shapes and attributes alone do not say.
    pub check: fn(&Call) -> Result<(), Error>,
    /// Multiplications and additions of a call, a fused pair counted as two; for ops that only move data, elements.
    /// Attention counts as if its queries were the last positions of the keys.
    pub operations: fn(&Call) -> f64,
    /// The op whose gradient this is.
    pub gradient_of: Option<&'static str>,
}

impl Op {
    /// What most ops have.
    pub const PLAIN: Op = Op {
        name: "",
        about: "",
        inputs: &[],
        attributes: &[],
        outputs: &[],
        extents: &[],
        program: "",
        programs: &[],
        row_axes: 1,
        refused: "",
        check: |_| Ok(()),
        operations: |call| call.elements(call.op.inputs[0].axes),
        gradient_of: None,
    };

    /// Its attributes: its own, and those of every call.
    pub fn attributes(&self) -> impl Iterator<Item = &'static Attribute> {
        self.attributes.iter().chain([&PROFILE])
    }

    /// The attribute called `name`.
    pub fn attribute(&self, name: &str) -> Option<&'static Attribute> {
        self.attributes().find(|attribute| attribute.name == name)
    }

    /// The input whose rows name entries of an axis as their own, and that axis.
    pub fn owned(&self) -> Option<(&'static Input, &'static str)> {
        self.inputs.iter().find_map(|input| match input.holds {
            Holds::Distinct(axis) => Some((input, axis)),
            _ => None,
        })
    }

    /// The input called `name`.
    pub fn input(&self, name: &str) -> Option<&'static Input> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// The output called `name`.
    pub fn output(&self, name: &str) -> Option<&'static Output> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// Its form for every program: its own first. It is the only one for ops that run no model.
    pub fn forms(&'static self) -> impl Iterator<Item = &'static Op> {
        std::iter::once(self).chain(self.programs.iter().copied())
    }

    /// Its form for the program that a call names.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: no form of it is of that program.
    pub fn form_of(&'static self, program: Option<&str>) -> Result<&'static Op, Error> {
        let Some(program) = program.filter(|_| !self.program.is_empty()) else { return Ok(self) };
        self.forms().find(|form| form.program == program).ok_or_else(|| {
            let known: Vec<_> = self.forms().map(|form| form.program).collect();
            Error::Unsupported(format!("param `program`: `{program}` is not offered; use {}", list(&known, "or")))
        })
    }

    /// Where the extent of an axis comes from that no input has.
    pub fn extent(&self, axis: &str) -> Option<Extent> {
        self.extents.iter().find(|(name, _)| *name == axis).map(|(_, extent)| *extent)
    }

    /// Whether the extent of an axis [follows](Extent::Of) from others, also where an input has it.
    pub fn follows(&self, axis: &str) -> bool {
        matches!(self.extent(axis), Some(Extent::Of(..)))
    }

    /// Whether the extent of an axis is the model's.
    pub fn is_of_model(&self, axis: &str) -> bool {
        matches!(self.extent(axis), Some(Extent::OfModel))
    }

    /// The input whose integers are entries of the last axis of `output`, where that has the axes of the input before it: what
    /// stands there are logits of the entries, as of tokens.
    pub fn logits(&self, output: &Output) -> Option<&'static Input> {
        let (last, leading) = output.axes.split_last()?;
        self.inputs.iter().find(|input| input.axes == leading && input.holds == Holds::Below(last))
    }

    /// The names of its axes as inputs bind them, each once, in order; [`REST`] where a tensor has it. Numbers are no names.
    pub fn axes(&self) -> Vec<&'static str> {
        let mut axes = Vec::new();
        for axis in self.inputs.iter().flat_map(|input| input.axes) {
            let axis = axis.strip_suffix("+1").unwrap_or(axis);
            if constant(axis).is_none() && !axes.contains(&axis) {
                axes.push(axis);
            }
        }
        axes
    }

    /// Whether an output has a row for each logical row.
    pub fn has_rows(&self) -> bool {
        self.outputs.iter().any(|output| output.rows == self.row_axes)
    }

    /// The output that a call with an input `carry` goes on with: the one of the same axes.
    pub fn carried(&self) -> Option<&'static Output> {
        let carry = self.input("carry")?;
        self.outputs.iter().find(|output| output.axes == carry.axes)
    }

    /// The state that a call begins with and the one that it ends with, which what follows begins with: `state` and the output
    /// of the same axes.
    pub fn stepped(&self) -> Option<(&'static Input, &'static Output)> {
        let state = self.input("state").filter(|_| self.gradient_of.is_none())?;
        let next = self.outputs.iter().find(|output| output.axes == state.axes)?;
        Some((state, next))
    }

    /// The axis of rows of a sequence of which a call may say that the last ones are padding, where a sequence is a logical
    /// row: the second one of inputs. What says so is the input: a length, or a mask.
    pub fn padded(&self) -> Option<(&'static Input, &'static str)> {
        if self.row_axes != 1 {
            return None;
        }
        self.inputs.iter().find_map(|input| match (input.holds, input.axes) {
            (Holds::Length([axis]), [_]) => Some((input, *axis)),
            (Holds::Mask, [_, axis]) => Some((input, *axis)),
            _ => None,
        })
    }

    /// The values of `out` that make a difference: all floats, or fp32 alone where every output has a dtype of its own.
    pub fn outs(&self) -> &'static [DType] {
        let fixed = self.outputs.iter().all(|output| output.fixed_dtype().is_some());
        if fixed { &[DType::Fp32] } else { &DType::FLOATS }
    }

    /// Whether a call needs something that only its caller knows, as the name of a model.
    pub fn needs_more(&self) -> bool {
        self.attributes.iter().any(|attribute| matches!(attribute.default, DefaultValue::Required))
    }

    /// Whether its tensors are floats over rows R and elements N, or over any axes, and nothing else: enough to make inputs
    /// of any size without knowing more of it.
    pub fn is_of_rows(&self) -> bool {
        let known = |axes: &[&str]| axes.iter().all(|axis| ["R", "N", REST].contains(axis));
        self.inputs.iter().all(|input| input.is_float() && known(input.axes))
            && self.outputs.iter().all(|output| output.fixed_dtype().is_none() && known(output.axes))
            && !self.needs_more()
    }

    /// What is refused beyond shapes, dtypes and the ranges of attributes, in words; empty where nothing is.
    pub fn refusals(&self) -> String {
        let own = Some(self.refused.to_string()).filter(|refused| !refused.is_empty());
        let integers = self.inputs.iter().filter_map(|input| {
            let name = input.name;
            Some(match input.holds {
                Holds::Below(axis) => format!("`{name}` outside 0..{axis}"),
                Holds::Distinct(axis) => format!("`{name}` outside 0..{axis}, or twice the same"),
                Holds::BelowOrIgnored(axis) => format!("`{name}` of {axis} or more"),
                Holds::Ranks(_) => format!("`{name}` without each rank once in a row"),
                Holds::Choices(axis) => format!("`{name}` outside 0..{axis}, or twice the same in a row"),
                Holds::Length(axes) => format!("`{name}` outside 0..={}", axes.join(" ")),
                Holds::Place(axis) => format!("`{name}` outside 0..={axis}"),
                Holds::Starts(axis) => format!("`{name}` that does not ascend from 0 to {axis}"),
                Holds::Pages { pages, .. } => format!("`{name}` outside 0..{pages} where in use"),
                Holds::Floats | Holds::Mask | Holds::Position | Holds::Any => return None,
            })
        });
        own.into_iter().chain(integers).collect::<Vec<_>>().join("; ")
    }

    /// For example `x[M,K], w[N,K], bias[N]? -> y[M,N]`.
    pub fn form(&self) -> String {
        let inputs = self.inputs.iter().map(|input| {
            let mark = if input.optional { "?" } else { "" };
            format!("{}{}{mark}", input.name, axes(input.axes))
        });
        let outputs = self.outputs.iter().map(|output| format!("{}{}", output.name, axes(output.axes)));
        format!("{} -> {}", inputs.collect::<Vec<_>>().join(", "), outputs.collect::<Vec<_>>().join(", "))
    }
}

/// The extent of an axis that is a number.
pub(crate) fn constant(axis: &str) -> Option<usize> {
    axis.parse().ok()
}

/// For example `[M,K]`.
pub(crate) fn axes(axes: &[&str]) -> String {
    format!("[{}]", axes.join(","))
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.form())
    }
}
