//! Requests as calls of `samebits-ops`: one adapter for every op, on the processor and on a device. What an op takes and
//! returns is read from the schema; nothing here knows an op by its name.

use crate::clock::Clock;
use samebits_contract::axis;
use samebits_contract::case::{Answer, Case};
use samebits_contract::spec::check_form;
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::MAX_FRAME;
use samebits_ops::device::Device;
use samebits_ops::{Backend, Cpu, Error, TensorMut, TensorRef, bf16, f16};
use samebits_schema::Call;
use std::collections::BTreeMap;

/// Why there are no outputs.
pub(super) enum Refusal {
    /// A combination that is not offered.
    Unsupported(String),
    /// A request that is wrong; the text names the field and the fix.
    Error(String),
    /// A budget below the smallest plan, which the number is.
    Budget(String, usize),
}

impl Refusal {
    pub(super) fn answer(self) -> Answer {
        match self {
            Refusal::Unsupported(reason) => Answer::unsupported(reason),
            Refusal::Error(reason) => Answer::error(reason),
            Refusal::Budget(reason, smallest) => {
                Answer { smallest_budget: Some(smallest), ..Answer::error(format!("`config.budget`: {reason}")) }
            }
        }
    }
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Refusal {
        match e {
            Error::Unavailable(_) => Refusal::Unsupported(e.to_string()),
            Error::Budget { smallest, .. } => Refusal::Budget(e.to_string(), smallest),
            _ => Refusal::Error(e.to_string()),
        }
    }
}

impl From<samebits_schema::Error> for Refusal {
    fn from(e: samebits_schema::Error) -> Refusal {
        match e {
            samebits_schema::Error::Unsupported(reason) => Refusal::Unsupported(reason),
            e => Refusal::Error(e.reason().to_string()),
        }
    }
}

/// Runs an expression with the array of a tensor.
macro_rules! array {
    ($tensor:expr, $array:ident => $run:expr) => {
        match $tensor {
            Tensor::Bf16($array) => $run,
            Tensor::Fp16($array) => $run,
            Tensor::Fp32($array) => $run,
            Tensor::I32($array) => $run,
        }
    };
}

pub(super) type Outputs = BTreeMap<String, Tensor>;

/// The outputs of `case` by `cpu`; its op is timed where there is a clock.
pub(super) fn on_cpu(cpu: &Cpu, case: &Case, clock: Option<&Clock>) -> Result<Outputs, Refusal> {
    let call = check_form(case)?;
    let laid = case.inputs.iter().map(|(name, tensor)| Ok((name.as_str(), Laid::out(case, &call, name, tensor)?)));
    let laid = laid.collect::<Result<Vec<_>, Refusal>>()?;
    let inputs: Vec<(&str, TensorRef)> = laid.iter().map(|(name, laid)| (*name, laid.tensor())).collect();
    let mut outputs = room(&call)?;
    timed(cpu, &call, inputs, clock, |inputs| {
        cpu.run(&call, inputs, outputs.iter_mut().map(|(name, tensor)| (*name, host_mut(tensor))).collect())
    })?;
    Ok(outputs.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect())
}

/// The outputs of `case` by `device`, to which floats are copied and from which outputs come back.
pub(super) fn on_device(device: &Device, case: &Case, clock: Option<&Clock>) -> Result<Outputs, Refusal> {
    let call = check_form(case)?;
    let there = case.inputs.iter().map(|(name, tensor)| {
        let index = tensor.dtype() == DType::I32;
        Ok((name.as_str(), tensor, if index { None } else { Some(Backend::upload(device, host(tensor))?) }))
    });
    let there = there.collect::<Result<Vec<_>, Refusal>>()?;
    let inputs: Vec<(&str, TensorRef)> = there
        .iter()
        .map(|(name, tensor, there)| (*name, there.as_ref().map_or_else(|| host(tensor), |there| there.view())))
        .collect();
    let mut outputs = room(&call)?;
    let made = outputs.iter().map(|(_, tensor)| Backend::empty(device, tensor.dtype(), tensor.shape()));
    let mut made = made.collect::<Result<Vec<_>, _>>()?;
    timed(device, &call, inputs, clock, |inputs| {
        let both = outputs.iter().zip(&mut made);
        let there = both.map(|((name, _), there)| (*name, there.view_mut()));
        device.run(&call, inputs, there.collect())?;
        // What a clock times ends when the device has ended.
        if clock.is_some() { device.finish() } else { Ok(()) }
    })?;
    for ((_, tensor), there) in outputs.iter_mut().zip(&made) {
        let here = Backend::download(device, there.view())?;
        array!(tensor, a => a.copy_from_slice(here.as_slice().expect("room was made for its dtype")));
    }
    Ok(outputs.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect())
}

/// Runs a call, again and again where there is a clock; what its caller would keep is made before the clock starts.
fn timed(
    backend: &impl Backend,
    call: &Call,
    inputs: Vec<(&str, TensorRef)>,
    clock: Option<&Clock>,
    mut run: impl FnMut(&[(&str, TensorRef)]) -> Result<(), Error>,
) -> Result<(), Refusal> {
    let Some(clock) = clock else { return Ok(run(&inputs)?) };
    let Some(prepared) = backend.prepare(call, &inputs)? else { return Ok(clock.time(|| run(&inputs))?) };
    clock.prepared(prepared.what());
    let replaced =
        inputs.iter().map(|&(name, tensor)| (name, if name == prepared.input() { prepared.tensor() } else { tensor }));
    let inputs: Vec<(&str, TensorRef)> = replaced.collect();
    Ok(clock.time(|| run(&inputs))?)
}

/// A tensor on the host, as it is.
fn host(tensor: &Tensor) -> TensorRef<'_> {
    array!(tensor, a => TensorRef::new(a, a.shape())).expect("few axes")
}

fn host_mut(tensor: &mut Tensor) -> TensorMut<'_> {
    let shape = tensor.shape().to_vec();
    array!(tensor, a => TensorMut::new(a, &shape)).expect("few axes")
}

/// Room for the outputs of a call. It holds what no op gives, so that an element that is not overwritten is seen.
fn room(call: &Call) -> Result<Vec<(&'static str, Tensor)>, Refusal> {
    let outputs = call.outputs().into_iter().map(|form| {
        let (name, shape) = (form.name, &form.shape[..]);
        let refuse = || Refusal::Error(format!("output `{name}`: shape {shape:?} is too large for an answer"));
        // The schema has checked that the product does not overflow.
        let count = shape.iter().product::<usize>();
        if count as u64 > MAX_FRAME / form.dtype.size() as u64 {
            return Err(refuse());
        }
        let tensor = match form.dtype {
            DType::Bf16 => Tensor::bf16(shape, filled(count, bf16::from_bits(0xA5A5)).ok_or_else(refuse)?),
            DType::Fp16 => Tensor::fp16(shape, filled(count, f16::from_bits(0xA5A5)).ok_or_else(refuse)?),
            DType::Fp32 => Tensor::fp32(shape, filled(count, f32::from_bits(0xA5A5_A5A5)).ok_or_else(refuse)?),
            _ => Tensor::i32(shape, filled(count, i32::MIN).ok_or_else(refuse)?),
        };
        Ok((name, tensor))
    });
    outputs.collect()
}

/// `None` where the system has no room.
fn filled<T: Copy>(count: usize, value: T) -> Option<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(count).ok()?;
    data.resize(count, value);
    Some(data)
}

/// An input as `config.layout` wants it.
enum Laid<'a> {
    AsIs(&'a Tensor),
    Moved(Tensor),
    /// Elements in the order of memory, shape and strides.
    View(Tensor, Vec<usize>, Vec<usize>),
}

impl<'a> Laid<'a> {
    fn out(case: &Case, call: &Call, name: &str, tensor: &'a Tensor) -> Result<Laid<'a>, Refusal> {
        let float = call.op.input(name).is_some_and(|input| input.is_float());
        let rank = tensor.shape().len();
        Ok(match case.config.layout.as_deref() {
            None => Laid::AsIs(tensor),
            Some("offset") => Laid::Moved(tensor.shifted()),
            // Integers are read where they stand, and a vector has one axis, which is contiguous.
            Some("fused" | "heads_first") if !float || rank < 2 || tensor.is_empty() => Laid::AsIs(tensor),
            Some("fused") => Laid::fused(tensor),
            Some("heads_first") if rank < 3 => Laid::fused(tensor),
            Some("heads_first") => Laid::heads_first(tensor),
            Some(other) => {
                let known = axis::LAYOUTS.iter().filter(|layout| !["strided", "transposed"].contains(*layout));
                let known: Vec<_> = known.copied().collect();
                let why = format!("the last axis is contiguous; use one of {}", known.join(", "));
                return Err(Refusal::Unsupported(format!("`config.layout`: {other}: {why}")));
            }
        })
    }

    /// Every row with one of NaN behind it, as rows of fused projections have those of the others.
    fn fused(tensor: &Tensor) -> Laid<'static> {
        let shape = tensor.shape().to_vec();
        let n = shape[shape.len() - 1];
        let rows: Vec<Option<usize>> = (0..tensor.len() / n).flat_map(|row| [Some(row), None]).collect();
        let mut strides = strides(&shape);
        strides[..shape.len() - 1].iter_mut().for_each(|stride| *stride *= 2);
        Laid::View(tensor.gather(n, &rows, &[rows.len() * n]), shape, strides)
    }

    /// The last axis but one before the one before it: heads before tokens.
    fn heads_first(tensor: &Tensor) -> Laid<'static> {
        let shape = tensor.shape().to_vec();
        let [.., tokens, heads, n] = shape[..] else { unreachable!("three axes") };
        let rows = tensor.len() / n;
        let row = |at: usize| {
            let (outer, head, token) = (at / (heads * tokens), at / tokens % heads, at % tokens);
            Some((outer * tokens + token) * heads + head)
        };
        let mut strides = strides(&shape);
        let rank = shape.len();
        (strides[rank - 3], strides[rank - 2]) = (n, tokens * n);
        Laid::View(tensor.gather(n, &(0..rows).map(row).collect::<Vec<_>>(), &[tensor.len()]), shape, strides)
    }

    fn tensor(&self) -> TensorRef<'_> {
        match self {
            Laid::AsIs(tensor) => host(tensor),
            Laid::Moved(tensor) => host(tensor),
            Laid::View(tensor, shape, strides) => {
                let view = array!(tensor, a => TensorRef::strided(a, shape, strides));
                view.expect("the view lies in what was gathered")
            }
        }
    }
}

/// Strides of row-major order.
fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}
