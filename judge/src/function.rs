//! A Rust function as an implementation of one op.

use crate::implementation::Implementation;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use samebits_contract::case::{Answer, Case};
use samebits_contract::spec::check_form;
use samebits_contract::tensor::{DType, Tensor};
use samebits_schema::{Error, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, Once, PoisonError};

/// An element type of inputs and outputs. `u16` is the raw bits of bf16 and of fp16, for whoever has types of their own.
pub trait Element: Sized {
    /// What messages call it.
    const NAME: &str;
    /// The elements of a tensor that holds this type.
    fn of(tensor: &Tensor) -> Option<&[Self]>;
    /// The same, to be written.
    fn of_mut(tensor: &mut Tensor) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($type:ty, $variant:ident) => {
        impl Element for $type {
            const NAME: &str = stringify!($type);

            fn of(tensor: &Tensor) -> Option<&[$type]> {
                match tensor {
                    Tensor::$variant(array) => Some(array),
                    _ => None,
                }
            }

            fn of_mut(tensor: &mut Tensor) -> Option<&mut [$type]> {
                match tensor {
                    Tensor::$variant(array) => Some(array),
                    _ => None,
                }
            }
        }
    };
}

element!(f32, Fp32);
element!(bf16, Bf16);
element!(f16, Fp16);
element!(i32, I32);

impl Element for u16 {
    const NAME: &str = "u16";

    fn of(tensor: &Tensor) -> Option<&[u16]> {
        match tensor {
            Tensor::Bf16(array) => Some(array.reinterpret_cast()),
            Tensor::Fp16(array) => Some(array.reinterpret_cast()),
            _ => None,
        }
    }

    fn of_mut(tensor: &mut Tensor) -> Option<&mut [u16]> {
        match tensor {
            Tensor::Bf16(array) => Some(array.reinterpret_cast_mut()),
            Tensor::Fp16(array) => Some(array.reinterpret_cast_mut()),
            _ => None,
        }
    }
}

/// One call of the function: inputs and attributes by their names, and outputs to be written.
///
/// `schema::find("rms_norm").unwrap().form()` says the names and shapes of an op, and the tables of docs/WIRE.md the attributes.
/// Tensors are dense, in row-major order. What is asked for and is not there (a name that the op does not have, another element type) is a panic,
/// which makes the judgment an error that says so.
pub struct Call<'a> {
    case: &'a Case,
    form: &'a samebits_schema::Call,
    outputs: Vec<Output<'a>>,
    /// Names of the inputs and attributes that were asked for.
    read: RefCell<BTreeSet<String>>,
}

struct Output<'a> {
    name: &'static str,
    dtype: DType,
    shape: Vec<usize>,
    /// Until it is asked for.
    tensor: Option<&'a mut Tensor>,
}

/// The payload of the panic that [`Call::unsupported`] is.
struct Unsupported(String);

impl<'a> Call<'a> {
    /// The extent of an axis, by its name in the schema, for example `N`.
    #[track_caller]
    pub fn dim(&self, axis: &str) -> usize {
        let known = || self.form.dims.iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
        self.form.dims.get(axis).unwrap_or_else(|| panic!("{} has no axis `{axis}`; it has {}", self.case.op, known()))
    }

    /// The shape of an input or of an output.
    #[track_caller]
    pub fn shape(&self, name: &str) -> &[usize] {
        match self.outputs.iter().find(|output| output.name == name) {
            Some(output) => &output.shape,
            None => self.tensor(name).shape(),
        }
    }

    /// The dtype of an input or of an output.
    #[track_caller]
    pub fn dtype(&self, name: &str) -> DType {
        match self.outputs.iter().find(|output| output.name == name) {
            Some(output) => output.dtype,
            None => self.tensor(name).dtype(),
        }
    }

    /// The elements of an input. Where the case leaves it out, what the function does not offer: ask with
    /// [`Call::optional`] if it can do without.
    #[track_caller]
    pub fn input<T: Element>(&self, name: &str) -> &'a [T] {
        elements(name, self.tensor(name))
    }

    /// The elements of an input that a case may leave out.
    #[track_caller]
    pub fn optional<T: Element>(&self, name: &str) -> Option<&'a [T]> {
        self.has(name).then(|| self.input(name))
    }

    /// Whether the case has this input.
    #[track_caller]
    pub fn has(&self, name: &str) -> bool {
        self.known(name);
        self.case.inputs.contains_key(name)
    }

    /// The elements of an output, in row-major order, all of them NaN (integers: a number that is no right answer). What is
    /// not written is found. Each output can be taken once.
    #[track_caller]
    pub fn output<T: Element>(&mut self, name: &str) -> &'a mut [T] {
        let names = || self.form.op.outputs.iter().map(|output| output.name).collect::<Vec<_>>().join(", ");
        let Some(output) = self.outputs.iter_mut().find(|output| output.name == name) else {
            panic!("{} has no output `{name}`; it has {}", self.case.op, names())
        };
        let tensor = output.tensor.take().unwrap_or_else(|| panic!("output `{name}` was taken before"));
        let dtype = tensor.dtype();
        T::of_mut(tensor).unwrap_or_else(|| panic!("output `{name}` is {dtype}; it was asked for as {}", T::NAME))
    }

    /// An attribute that is a number; its default where the case does not give it.
    #[track_caller]
    pub fn float(&self, name: &str) -> f64 {
        match self.attribute(name) {
            Value::Float(number) => *number,
            other => panic!("attribute `{name}` is {other}, and no float"),
        }
    }

    /// An attribute that is a count.
    #[track_caller]
    pub fn count(&self, name: &str) -> usize {
        match self.attribute(name) {
            Value::Count(count) => *count,
            other => panic!("attribute `{name}` is {other}, and no count"),
        }
    }

    /// An attribute that is a flag.
    #[track_caller]
    pub fn flag(&self, name: &str) -> bool {
        match self.attribute(name) {
            Value::Flag(flag) => *flag,
            other => panic!("attribute `{name}` is {other}, and no flag"),
        }
    }

    /// An attribute that is a word.
    #[track_caller]
    pub fn word(&self, name: &str) -> &str {
        match self.attribute(name) {
            Value::Word(word) => word,
            other => panic!("attribute `{name}` is {other}, and no word"),
        }
    }

    /// Ends the call: the function does not offer this. The judgment is `unsupported`, with the reason; it is not red.
    pub fn unsupported(&self, reason: impl Into<String>) -> ! {
        resume_unwind(Box::new(Unsupported(reason.into())))
    }

    #[track_caller]
    fn attribute(&self, name: &str) -> &Value {
        self.read.borrow_mut().insert(name.to_string());
        let known = || self.form.op.attributes().map(|attribute| attribute.name).collect::<Vec<_>>().join(", ");
        let value = self.form.attributes().get(name);
        value.unwrap_or_else(|| panic!("{} has no attribute `{name}`; it has {}", self.case.op, known()))
    }

    #[track_caller]
    fn known(&self, input: &str) {
        self.read.borrow_mut().insert(input.to_string());
        let inputs = self.form.op.inputs;
        let names = || inputs.iter().map(|input| input.name).collect::<Vec<_>>().join(", ");
        let known = inputs.iter().any(|known| known.name == input);
        assert!(known, "{} has no input `{input}`; it takes {}", self.case.op, names());
    }

    #[track_caller]
    fn tensor(&self, input: &str) -> &'a Tensor {
        self.known(input);
        match self.case.inputs.get(input) {
            Some(tensor) => tensor,
            None => self.unsupported(format!("input `{input}`: it asks for it, and the case leaves it out")),
        }
    }

    /// What the case gives and the function never asked for; `None` where nothing of that matters.
    fn unread(&self) -> Option<String> {
        let read = self.read.borrow();
        let optional = self.form.op.inputs.iter().filter(|input| input.optional);
        let given = |name: &str| self.case.inputs.contains_key(name);
        if let Some(input) = optional.map(|input| input.name).find(|name| given(name) && !read.contains(*name)) {
            return Some(format!("input `{input}`: it never asks for it"));
        }
        for (name, value) in self.form.attributes().iter().filter(|(name, _)| !read.contains(*name)) {
            let mut without = self.case.clone();
            if without.params.remove(name).is_none() {
                continue;
            }
            let default = check_form(&without).ok();
            if default.as_ref().and_then(|form| form.attributes().get(name)) != Some(value) {
                return Some(format!("param `{name}` = {value}: it never asks for it"));
            }
        }
        None
    }
}

#[track_caller]
fn elements<'a, T: Element>(name: &str, tensor: &'a Tensor) -> &'a [T] {
    let dtype = tensor.dtype();
    T::of(tensor).unwrap_or_else(|| panic!("input `{name}` is {dtype}; it was asked for as {}", T::NAME))
}

/// What sets the number of threads that a function runs on.
pub(crate) type SetThreads = Box<dyn Fn(usize) + Send + Sync>;

/// A function that is judged.
pub(crate) struct Function {
    pub name: String,
    /// The package that is tested, as cargo tells a test it runs.
    pub version: String,
    pub op: String,
    pub function: Box<dyn Fn(&mut Call) + Send + Sync>,
    /// The thread counts it can be asked for, and what sets them; the first count holds where none is asked for.
    pub threads: Option<(Vec<usize>, SetThreads)>,
    /// Held while it runs where threads are set: the setting is the process's.
    pub alone: Mutex<()>,
}

impl Implementation for Function {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn run(&self, case: &Case) -> Answer {
        if case.op != self.op {
            return Answer::unsupported(format!("{}: it is judged as {}", case.op, self.op));
        }
        let form = match check_form(case) {
            Ok(form) => form,
            Err(Error::Unsupported(reason)) => return Answer::unsupported(reason),
            Err(e) => return Answer::error(e.reason()),
        };
        let outputs = match self.call(case, &form, 0) {
            Ok(outputs) => outputs,
            Err(answer) => return *answer,
        };
        if !outputs.iter().any(|output| unwritten(output, 0).next().is_some()) {
            return self.answer(case, named(&form, outputs));
        }
        // It may be a right answer that has just these bits: they are not the same when others stood there before.
        let again = match self.call(case, &form, 1) {
            Ok(again) => again,
            Err(answer) => return *answer,
        };
        for ((output, again), form) in outputs.iter().zip(&again).zip(form.outputs()) {
            let second: BTreeSet<usize> = unwritten(again, 1).collect();
            let both: Vec<usize> = unwritten(output, 0).filter(|index| second.contains(index)).collect();
            if let Some(&first) = both.first() {
                let (name, place) = (form.name, place(first, &form.shape));
                let (count, total) = (both.len(), output.len());
                return Answer::error(format!(
                    "output `{name}`: element {place:?} was not written, or was added to; {count} of {total}"
                ));
            }
        }
        self.answer(case, named(&form, outputs))
    }
}

impl Function {
    /// What it answers with these outputs; where it sets threads, it says on how many.
    fn answer(&self, case: &Case, outputs: BTreeMap<String, Tensor>) -> Answer {
        let threads = case.config.threads.filter(|_| self.threads.is_some());
        Answer { threads, ..Answer::ok(&self.name, outputs) }
    }

    /// The outputs of one call, in the order of the schema, into tensors of the kind `before`.
    fn call(&self, case: &Case, form: &samebits_schema::Call, before: usize) -> Result<Vec<Tensor>, Box<Answer>> {
        let forms = form.outputs();
        let mut outputs: Vec<Tensor> = forms.iter().map(|form| filled(form.dtype, &form.shape, before)).collect();
        let places = forms.into_iter().zip(&mut outputs);
        let places = places.map(|(form, tensor)| Output {
            name: form.name,
            dtype: form.dtype,
            shape: form.shape,
            tensor: Some(tensor),
        });
        let mut call = Call { case, form, outputs: places.collect(), read: RefCell::default() };
        let mut alone = None;
        let ended = heard(|| {
            if let Some((counts, set)) = &self.threads {
                // A panic while it was held is an error of that judgment alone.
                alone = Some(self.alone.lock().unwrap_or_else(PoisonError::into_inner));
                set(case.config.threads.or(counts.first().copied()).unwrap_or(1));
            }
            (self.function)(&mut call);
        });
        drop(alone);
        match ended {
            Err(Ended::Unsupported(reason)) => return Err(Box::new(Answer::unsupported(reason))),
            Err(Ended::Panic(said)) => return Err(Box::new(Answer::error(format!("it panicked: {said}")))),
            Ok(()) => {}
        }
        match call.unread() {
            Some(reason) => Err(Box::new(Answer::unsupported(reason))),
            None => Ok(outputs),
        }
    }
}

fn named(form: &samebits_schema::Call, outputs: Vec<Tensor>) -> BTreeMap<String, Tensor> {
    form.outputs().into_iter().map(|form| form.name.to_string()).zip(outputs).collect()
}

/// What stands in outputs before the call: NaN with payloads that no case holds but those that hold all.
const BEFORE: [(u16, u16, u32, i32); 2] =
    [(0x7FE5, 0x7EA5, 0x7FE5_A5A5, -0x745F_0FF3), (0x7FD3, 0x7E93, 0x7FD3_9393, -0x6B3A_0D57)];

fn filled(dtype: DType, shape: &[usize], before: usize) -> Tensor {
    let len = shape.iter().product();
    let (in_bf16, in_fp16, in_fp32, in_i32) = BEFORE[before];
    match dtype {
        DType::Bf16 => Tensor::bf16(shape, vec![bf16::from_bits(in_bf16); len]),
        DType::Fp16 => Tensor::fp16(shape, vec![f16::from_bits(in_fp16); len]),
        DType::Fp32 => Tensor::fp32(shape, vec![f32::from_bits(in_fp32); len]),
        DType::I32 => Tensor::i32(shape, vec![in_i32; len]),
    }
}

/// The elements that still are what [`filled`] made them.
fn unwritten(tensor: &Tensor, before: usize) -> impl Iterator<Item = usize> {
    let (in_bf16, in_fp16, in_fp32, in_i32) = BEFORE[before];
    let (elements, bits) = (
        tensor.elements(),
        match tensor.dtype() {
            DType::Bf16 => in_bf16.into(),
            DType::Fp16 => in_fp16.into(),
            DType::Fp32 => in_fp32,
            DType::I32 => in_i32 as u32,
        },
    );
    (0..tensor.len()).filter(move |&index| elements.bits(index) == bits)
}

/// The coordinates of an element.
fn place(index: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = index;
    let mut place = Vec::with_capacity(shape.len());
    for extent in shape.iter().rev() {
        place.push(rest % extent);
        rest /= extent;
    }
    place.reverse();
    place
}

/// How a function ended without an answer.
enum Ended {
    Unsupported(String),
    Panic(String),
}

thread_local! {
    /// Whether a function is judged on this thread, and what its panic said.
    static HEARD: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `function`; a panic is not printed, but returned with its place.
fn heard(function: impl FnOnce()) -> Result<(), Ended> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let judged = HEARD.with_borrow_mut(|heard| {
                let Some(heard) = heard else { return false };
                let said = panic.payload_as_str().unwrap_or("something that is no text");
                *heard = match panic.location() {
                    Some(location) => format!("{said} ({location})"),
                    None => said.to_string(),
                };
                true
            });
            if !judged {
                others(panic);
            }
        }));
    });
    HEARD.set(Some(String::new()));
    let ended = catch_unwind(AssertUnwindSafe(function));
    let said = HEARD.take().unwrap_or_default();
    ended.map_err(|payload| match payload.downcast::<Unsupported>() {
        Ok(unsupported) => Ended::Unsupported(unsupported.0),
        Err(payload) if said.is_empty() => {
            // It was raised on a thread of the function's own, and handed on.
            let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
            Ended::Panic(text.or(payload.downcast_ref::<String>().cloned()).unwrap_or_default())
        }
        Err(_) => Ended::Panic(said),
    })
}
