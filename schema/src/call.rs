use crate::Error;
use crate::attribute::{Attributes, Value};
use crate::dtype::DType;
use crate::op::{Extent, Op, Output, OutputDType, REST, axes, constant};

/// An input as a call gives it: its form without its elements.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Extent of every axis.
    pub shape: &'a [usize],
}

/// The form of a tensor that a call makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// Its name.
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Extent of every axis.
    pub shape: Vec<usize>,
}

/// Extents by axis name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dims {
    bound: Vec<(&'static str, usize)>,
    /// The extents that [`REST`] stands for.
    pub rest: Vec<usize>,
}

impl Dims {
    /// The extent of an axis; `None` where no input of the call has it.
    pub fn get(&self, axis: &str) -> Option<usize> {
        if let Some(extent) = constant(axis) {
            return Some(extent);
        }
        if let Some(axis) = axis.strip_suffix("+1") {
            return self.get(axis)?.checked_add(1);
        }
        self.bound.iter().find(|(name, _)| *name == axis).map(|(_, extent)| *extent)
    }

    /// Every named axis with its extent, in the order of the inputs, and behind them those of [`Op::extents`].
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.bound.iter().copied()
    }
}

impl std::ops::Index<&str> for Dims {
    type Output = usize;

    /// The extent of an axis. Panics where no input of the call has it.
    fn index(&self, axis: &str) -> &usize {
        match self.bound.iter().find(|(name, _)| *name == axis) {
            Some((_, extent)) => extent,
            None => panic!("no input binds an axis {axis}"),
        }
    }
}

/// A call that has been checked: its extents, dtypes and attributes, defaults included.
#[derive(Clone, Debug)]
pub struct Call {
    /// The op.
    pub op: &'static Op,
    /// Extents by axis.
    pub dims: Dims,
    /// The dtype asked for.
    pub out: DType,
    dtypes: Vec<(&'static str, DType)>,
    attributes: Attributes,
}

impl Call {
    /// The extent of an axis. Panics where no input of the call has it.
    pub fn dim(&self, axis: &str) -> usize {
        self.dims[axis]
    }

    /// The dtype of an input; `None` where the call leaves it out.
    pub fn dtype(&self, input: &str) -> Option<DType> {
        self.dtypes.iter().find(|(name, _)| *name == input).map(|(_, dtype)| *dtype)
    }

    /// Whether the call has this input.
    pub fn has(&self, input: &str) -> bool {
        self.dtype(input).is_some()
    }

    /// The dtype that the inputs of a group have; `None` where the call has none of them.
    pub fn group(&self, group: &str) -> Option<DType> {
        self.op.inputs.iter().filter(|input| input.group == Some(group)).find_map(|input| self.dtype(input.name))
    }

    /// The attributes with their defaults.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// A count. Panics where the op has no such attribute of that kind, as the next three.
    pub fn count(&self, attribute: &str) -> usize {
        match self.attributes.get(attribute) {
            Some(Value::Count(count)) => *count,
            _ => self.absent(attribute),
        }
    }

    /// A number.
    pub fn float(&self, attribute: &str) -> f64 {
        match self.attributes.get(attribute) {
            Some(Value::Float(number)) => *number,
            _ => self.absent(attribute),
        }
    }

    /// A flag.
    pub fn flag(&self, attribute: &str) -> bool {
        match self.attributes.get(attribute) {
            Some(Value::Flag(flag)) => *flag,
            _ => self.absent(attribute),
        }
    }

    /// A word.
    pub fn word(&self, attribute: &str) -> &str {
        match self.attributes.get(attribute) {
            Some(Value::Word(word)) => word,
            _ => self.absent(attribute),
        }
    }

    fn absent(&self, attribute: &str) -> ! {
        panic!("{} has no attribute `{attribute}` of this kind", self.op.name)
    }

    /// The number of elements of a tensor with these axes. Panics where no input of the call has one of them.
    pub fn elements(&self, axes: &[&str]) -> f64 {
        let extents = axes.iter().map(|&axis| match axis {
            REST => self.dims.rest.iter().map(|&extent| extent as f64).product(),
            axis => self.dims.get(axis).unwrap_or_else(|| panic!("no input has an axis {axis}")) as f64,
        });
        extents.product()
    }

    /// Whether f32 operands are to be read as TF32; false for ops without a matrix product.
    pub fn tf32(&self) -> bool {
        self.attributes.get("tf32") == Some(&Value::Word("enabled".into()))
    }

    /// The dtype of an output.
    pub fn output_dtype(&self, output: &Output) -> DType {
        match output.dtype {
            OutputDType::Fixed(dtype) => dtype,
            OutputDType::OutOrFp32(fp32) if fp32(self) => DType::Fp32,
            OutputDType::Out | OutputDType::OutOrFp32(_) => self.out,
        }
    }

    /// The extents of an output; `None` where one of them is [the model's](Extent::OfModel).
    pub fn output_shape(&self, output: &Output) -> Option<Vec<usize>> {
        let mut shape = Vec::with_capacity(output.axes.len());
        for &axis in output.axes {
            match axis {
                REST => shape.extend(&self.dims.rest),
                axis => shape.push(self.dims.get(axis)?),
            }
        }
        Some(shape)
    }

    /// The outputs whose extents the call decides: all but those with an axis of a model.
    pub fn outputs(&self) -> Vec<Form> {
        let form = |output: &Output| {
            Some(Form { name: output.name, dtype: self.output_dtype(output), shape: self.output_shape(output)? })
        };
        self.op.outputs.iter().filter_map(form).collect()
    }
}

/// Checks a call of `op`, or of its form for the program that the attributes name, with these inputs and attributes, whose
/// float outputs are to have dtype `out`. Extents may be 0.
/// The integers that index inputs hold are another matter: [`check_indexes`](crate::check_indexes).
///
/// # Errors
/// [`Error::Unsupported`] for inputs of different dtypes where the op wants one, and for what attributes are not offered;
/// [`Error::Invalid`] for everything else. Both name the field and the fix.
pub fn validate(op: &'static Op, inputs: &[Given], attributes: Attributes, out: DType) -> Result<Call, Error> {
    let invalid = |why: String| Err(Error::Invalid(why));
    if !out.is_float() {
        return invalid(format!("`out`: {out} is not an output dtype; use bf16, fp16 or fp32"));
    }
    let op = op.form_of(attributes.program())?;
    if let Some(given) = inputs.iter().find(|given| op.input(given.name).is_none()) {
        let known: Vec<_> = op.inputs.iter().map(|input| input.name).collect();
        return invalid(format!(
            "input `{}`: {} has no such input; it takes {}",
            given.name,
            op.name,
            known.join(", ")
        ));
    }
    let mut dims = Dims::default();
    let mut dtypes: Vec<(&'static str, DType)> = Vec::with_capacity(op.inputs.len());
    let mut rest: Option<&str> = None;
    for input in op.inputs {
        let name = input.name;
        let Some(given) = inputs.iter().find(|given| given.name == name) else {
            if input.optional {
                continue;
            }
            return invalid(format!("input `{name}`: missing; {} needs it as {}", op.name, input.form()));
        };
        if !input.dtypes.contains(&given.dtype) {
            return invalid(format!("input `{name}`: dtype is {}; it must be {}", given.dtype, input.dtype_names()));
        }
        let same = |(other, _): &&(&str, DType)| {
            input.group.is_some() && op.input(other).is_some_and(|other| other.group == input.group)
        };
        if let Some((other, dtype)) = dtypes.iter().find(same).filter(|(_, dtype)| *dtype != given.dtype) {
            return Err(Error::Unsupported(format!(
                "input `{name}` is {} and `{other}` is {dtype}; mixed dtypes are not offered, give both the same",
                given.dtype
            )));
        }
        dtypes.push((name, given.dtype));
        let shape = given.shape;
        if bytes(shape, given.dtype).is_none() {
            return invalid(format!("input `{name}`: the extents of shape {shape:?} overflow"));
        }
        let open = input.axes.last() == Some(&REST);
        let named = input.axes.len() - usize::from(open);
        if shape.len() < named || (!open && shape.len() > named) {
            return invalid(format!("input `{name}`: shape {shape:?} must have the form {}", axes(input.axes)));
        }
        for (&axis, &extent) in input.axes.iter().zip(&shape[..named]) {
            let (axis, extent) = match axis.strip_suffix("+1") {
                None => (axis, extent),
                Some(_) if extent == 0 => {
                    return invalid(format!("input `{name}`: axis {axis} is empty; it has at least one entry"));
                }
                Some(axis) => (axis, extent - 1),
            };
            if let Some(constant) = constant(axis).filter(|constant| *constant != extent) {
                return invalid(format!("input `{name}`: shape {shape:?} has {extent} where {constant} must be"));
            }
            match dims.get(axis) {
                None => dims.bound.push((axis, extent)),
                Some(bound) if bound == extent => {}
                Some(bound) => {
                    return invalid(format!(
                        "input `{name}`: shape {shape:?} has {axis} = {extent}, but {axis} is {bound} in the inputs before it"
                    ));
                }
            }
        }
        if open {
            let tail = &shape[named..];
            match rest {
                None => (rest, dims.rest) = (Some(name), tail.to_vec()),
                Some(_) if dims.rest == tail => {}
                Some(first) => {
                    let behind =
                        if named > 0 { format!(" behind {}", axes(&input.axes[..named])) } else { String::new() };
                    return invalid(format!(
                        "input `{name}`: shape {shape:?} must equal that of `{first}`, {:?}{behind}",
                        dims.rest
                    ));
                }
            }
        }
    }
    let attributes = attributes.complete(op, &dims)?;
    let mut call = Call { op, dims, out, dtypes, attributes };
    (op.check)(&call)?;
    for &(axis, extent) in op.extents {
        let Extent::Of(words, of) = extent else { continue };
        let extent = of(&call);
        match call.dims.get(axis) {
            None => call.dims.bound.push((axis, extent)),
            Some(bound) if bound == extent => {}
            Some(bound) => {
                let has = |given: &&Given| op.input(given.name).is_some_and(|input| input.axes.contains(&axis));
                let name = inputs.iter().find(has).map_or("", |given| given.name);
                return invalid(format!("input `{name}`: {axis} is {bound}; it must be {extent}, which is {words}"));
            }
        }
    }
    for output in op.outputs {
        let open = |axis: &&&str| **axis != REST && call.dims.get(axis).is_none() && !op.is_of_model(axis);
        if let Some(axis) = output.axes.iter().find(open) {
            let name = output.name;
            return invalid(format!(
                "output `{name}`: nothing says the extent of its axis {axis}; give an input that has it"
            ));
        }
    }
    for output in call.outputs() {
        if bytes(&output.shape, output.dtype).is_none() {
            return invalid(format!("output `{}`: shape {:?} is too large for an answer", output.name, output.shape));
        }
    }
    Ok(call)
}

/// The extents that [follow](Extent::Of) from `known` ones and the attributes: for who makes inputs that have such an axis.
///
/// # Errors
/// [`Error::Invalid`] for attributes, and for extents that the op refuses.
pub fn following(
    op: &'static Op,
    known: impl IntoIterator<Item = (&'static str, usize)>,
    attributes: Attributes,
) -> Result<Vec<(&'static str, usize)>, Error> {
    let dims = Dims { bound: known.into_iter().filter(|(axis, _)| !op.follows(axis)).collect(), rest: Vec::new() };
    let attributes = attributes.complete(op, &dims)?;
    let mut call = Call { op, dims, out: DType::Fp32, dtypes: Vec::new(), attributes };
    (op.check)(&call)?;
    let mut following = Vec::new();
    for &(axis, extent) in op.extents {
        if let Extent::Of(_, of) = extent {
            let extent = of(&call);
            following.push((axis, extent));
            call.dims.bound.push((axis, extent));
        }
    }
    Ok(following)
}

/// Bytes of a tensor; `None` where its extents overflow, be it beside a 0.
fn bytes(shape: &[usize], dtype: DType) -> Option<usize> {
    let nonzero =
        shape.iter().filter(|&&extent| extent > 0).try_fold(dtype.size(), |n, &extent| n.checked_mul(extent))?;
    let nonzero = isize::try_from(nonzero).ok()? as usize;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}
