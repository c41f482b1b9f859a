//! Ops of other crates: what their form must be, and where they are found.

use crate::attribute::DefaultValue;
use crate::dtype::DType;
use crate::index::Holds;
use crate::op::{Extent, Input, Op, Output, REST, Role};
use crate::{Error, OPS};
use std::sync::{PoisonError, RwLock};

/// The ops that other crates have registered. Every change is a single step, so a panic elsewhere leaves it whole.
static OTHERS: RwLock<Vec<&Op>> = RwLock::new(Vec::new());

/// The op called `name`: one of [`OPS`], or one that was [registered](register).
pub fn find(name: &str) -> Option<&'static Op> {
    let ours = OPS.iter().copied().find(|op| op.name == name);
    ours.or_else(|| {
        let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
        others.iter().copied().find(|op| op.name == name)
    })
}

/// Makes an op of another crate known: from now on [`find`] finds it, for the life of the program. A crate that can also run
/// it registers it with `samebits_ops::register`, which does this too.
///
/// # Errors
/// [`Error::Invalid`] where another op has the name, or the form is not whole; it names the part and the fix.
///
/// ```
/// use samebits_schema::{Attributes, DType, Given, Input, Op, Output, find, register, validate};
///
/// static CUBE: Op = Op {
///     name: "cube",
///     about: "the third power of every element",
///     inputs: &[Input::activation("x", &["R", "N"])],
///     outputs: &[Output::out("y", &["R", "N"])],
///     ..Op::PLAIN
/// };
///
/// register(&CUBE)?;
/// let x = Given { name: "x", dtype: DType::Bf16, shape: &[2, 3] };
/// let call = validate(find("cube").unwrap(), &[x], Attributes::new(), DType::Fp32)?;
/// assert_eq!(call.outputs()[0].shape, [2, 3]);
/// assert!(register(&CUBE).is_err(), "the name is taken");
/// # Ok::<(), samebits_schema::Error>(())
/// ```
pub fn register(op: &'static Op) -> Result<(), Error> {
    op.forms().try_for_each(Op::whole)?;
    let mut others = OTHERS.write().unwrap_or_else(PoisonError::into_inner);
    if OPS.iter().chain(others.iter()).any(|other| other.name == op.name) {
        return Err(Error::Invalid(format!("op `{}`: another op has this name; choose one of your own", op.name)));
    }
    others.push(op);
    Ok(())
}

/// Whether no name stands twice.
fn distinct<'a>(names: impl Iterator<Item = &'a str> + Clone) -> bool {
    names.clone().enumerate().all(|(at, name)| names.clone().take(at).all(|before| before != name))
}

impl Op {
    /// What a form promises to those who read it.
    ///
    /// # Errors
    /// [`Error::Invalid`]: which part does not keep the promise.
    pub fn whole(&self) -> Result<(), Error> {
        let held = |holds: bool, what: &str| match holds {
            true => Ok(()),
            false => Err(Error::Invalid(format!("op `{}`: {what}", self.name))),
        };
        let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        held(!self.name.is_empty() && self.name.chars().all(word), "a name is lower case letters, digits and _")?;
        held(distinct(self.inputs.iter().map(|input| input.name)), "an input stands twice")?;
        held(distinct(self.outputs.iter().map(|output| output.name)), "an output stands twice")?;
        let attributes: Vec<&str> = self.attributes().map(|attribute| attribute.name).collect();
        held(distinct(attributes.into_iter()), "an attribute stands twice")?;
        held(!self.about.is_empty(), "`about` says nothing; say in one line what it computes")?;
        held(!self.outputs.is_empty(), "it has no output")?;
        held(self.inputs.iter().any(|input| input.rows == self.row_axes), "no input has all row axes")?;
        // An input may have an extent that follows, and must then have that one.
        let bound = |axis: &str, input: &Input| !self.follows(axis) && input.axes.contains(&axis);
        let twice = self.extents.iter().any(|(axis, _)| self.inputs.iter().any(|input| bound(axis, input)));
        held(!twice, "`extents` has an axis of an input")?;
        let of_model = self.extents.iter().any(|(_, extent)| matches!(extent, Extent::OfModel));
        held(!of_model || !self.program.is_empty(), "an extent is a model's, and no program is named")?;
        let programs = self.attribute("program").is_some() != self.program.is_empty();
        held(programs, "`program` is named and no attribute, or the other way round")?;
        self.inputs.iter().try_for_each(|input| {
            self.whole_input(input)
                .map_err(|what| Error::Invalid(format!("op `{}`: `{}`: {what}", self.name, input.name)))
        })?;
        self.outputs.iter().try_for_each(|output| {
            self.whole_output(output)
                .map_err(|what| Error::Invalid(format!("op `{}`: `{}`: {what}", self.name, output.name)))
        })?;
        let carried = self.carried().and_then(Output::fixed_dtype);
        held(self.input("carry").is_none() || carried == Some(DType::Fp32), "nothing goes on from `carry`")?;
        for attribute in self.attributes() {
            if let DefaultValue::Is(text) = attribute.default {
                attribute.parse(text)?;
            }
        }
        Ok(())
    }

    fn whole_input(&self, input: &Input) -> Result<(), &'static str> {
        let held = |holds: bool, what| if holds { Ok(()) } else { Err(what) };
        held(!input.dtypes.is_empty(), "it may have no dtype")?;
        held(input.rows <= self.row_axes.min(input.axes.len()), "it has more row axes than there are")?;
        held(input.is_float() == (input.holds == Holds::Floats), "its dtypes are not what it holds")?;
        held(input.is_float() != (input.role == Role::Index), "integers are of role `Index`, and nothing else is")?;
        let open = input.axes.iter().position(|axis| *axis == REST);
        held(open.is_none_or(|at| at + 1 == input.axes.len()), "`..` stands last among axes")?;
        let named: Vec<&str> = match input.holds {
            Holds::Below(axis)
            | Holds::Distinct(axis)
            | Holds::BelowOrIgnored(axis)
            | Holds::Place(axis)
            | Holds::Starts(axis) => vec![axis],
            Holds::Ranks(axis) => {
                let last = self.attribute("chosen").is_some() && input.axes.last() == Some(&axis);
                held(last, "ranks are along the last axis, and `chosen` says how many")?;
                vec![axis]
            }
            Holds::Choices(axis) => {
                held(self.attribute("chosen").is_some(), "`chosen` says how many entries rows name")?;
                vec![axis]
            }
            Holds::Length(axes) => axes.to_vec(),
            Holds::Pages { pages, size, lengths } => {
                let lengths = self.input(lengths).is_some_and(|input| !input.is_float());
                held(lengths, "no input of integers has the lengths of its pages")?;
                vec![pages, size]
            }
            _ => vec![],
        };
        let axes = self.axes();
        let known = |axis: &&str| axes.contains(axis) || self.is_of_model(axis);
        held(named.iter().all(known), "it holds entries of an axis that there is not")
    }

    fn whole_output(&self, output: &Output) -> Result<(), &'static str> {
        let held = |holds: bool, what| if holds { Ok(()) } else { Err(what) };
        let axes = self.axes();
        let bound = |axis: &&str| axes.contains(axis) || axis.parse::<usize>().is_ok() || self.extent(axis).is_some();
        held(output.axes.iter().all(bound), "an axis is not bound")?;
        // Its rows are those of the inputs that have all row axes, as far as it has them.
        let of = self.inputs.iter().find(|input| input.rows == self.row_axes).map_or(&[][..], |input| input.axes);
        let owned = self.owned().is_some_and(|(_, axis)| output.axes.first() == Some(&axis));
        let rows = output.axes.get(..output.rows).filter(|_| output.rows <= self.row_axes);
        let same = rows.is_some_and(|rows| Some(rows) == of.get(..output.rows));
        held(same || owned || output.axes == [REST], "its rows are not those of the inputs")
    }
}
