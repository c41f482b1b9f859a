//! The pickle of a dictionary of tensors, in the protocol that torch.save writes.
//!
//! A pickle is a program. Here it makes values of [`Value`] and nothing else: a name of anything but the parts of a tensor is
//! refused, and so is every code that no dictionary of tensors needs.

use super::number;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A tensor: which elements of which file of numbers.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub key: Rc<str>,
    pub dtype: Dtype,
    /// The first of its elements.
    pub first: u64,
    pub shape: Vec<usize>,
    /// Whether the others follow it as they stand in the tensor.
    pub is_one_piece: bool,
}

/// What stands under a name in a dictionary; `None` for anything but a tensor.
pub(super) type Item = (Rc<str>, Option<Tensor>);

/// The dictionary that a pickle makes.
pub(super) fn read(program: &[u8]) -> Result<Vec<Item>, String> {
    match (Machine { program, at: 0, stack: Vec::new(), memo: BTreeMap::new() }).run()? {
        Value::Dict(items) => Ok(items),
        _ => Err("holds no dictionary of tensors".into()),
    }
}

/// What a pickle may make.
#[derive(Clone, Debug)]
enum Value {
    Int(i64),
    Text(Rc<str>),
    /// And how deep tuples stand in it.
    Tuple(Rc<Vec<Value>>, usize),
    Dict(Vec<Item>),
    Global(Global),
    /// A file of numbers: which, and of what.
    Storage(Rc<str>, Dtype),
    Tensor(Tensor),
    /// Where a tuple or the items of a dictionary begin.
    Mark,
    /// What no tensor is rebuilt with: none, true, false, and a dictionary that was called back.
    Other,
}

/// The names that tensors are rebuilt with.
#[derive(Clone, Copy, Debug)]
enum Global {
    Rebuild,
    Ordered,
    Storage(Dtype),
}

/// What a program that takes more than it has is told.
const EMPTY: &str = "has a pickle that takes what is not there";

/// Tuples within tuples: a storage in the arguments of a tensor has two.
const DEEPEST: usize = 8;

/// Axes of a tensor.
const MOST_AXES: usize = 8;

/// The machine that reads a pickle.
struct Machine<'a> {
    program: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: BTreeMap<u64, Value>,
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Value, String> {
        loop {
            match self.int(1)? as u8 {
                b'.' => return self.pop(),
                code => {
                    if let Some(value) = self.step(code)? {
                        self.stack.push(value);
                    }
                }
            }
        }
    }

    /// What a code makes, where it makes something.
    fn step(&mut self, code: u8) -> Result<Option<Value>, String> {
        Ok(Some(match code {
            0x80 => match self.int(1)? {
                2 => return Ok(None),
                version => return Err(format!("has a pickle of protocol {version}; torch.save writes 2")),
            },
            b'q' | b'r' => {
                let place = self.int(if code == b'q' { 1 } else { 4 })?;
                let value = match self.stack.last().ok_or(EMPTY)? {
                    Value::Dict(_) => Value::Other,
                    value => value.clone(),
                };
                self.memo.insert(place, value);
                return Ok(None);
            }
            b'h' | b'j' => {
                let place = self.int(if code == b'h' { 1 } else { 4 })?;
                self.memo.get(&place).cloned().ok_or(EMPTY)?
            }
            b'(' => Value::Mark,
            b'N' | 0x88 | 0x89 => Value::Other,
            b'K' => Value::Int(self.int(1)? as i64),
            b'M' => Value::Int(self.int(2)? as i64),
            b'J' => Value::Int(i64::from(self.int(4)? as u32 as i32)),
            0x8a => self.long()?,
            b'X' => {
                let count = self.int(4)? as usize;
                let text = std::str::from_utf8(self.take(count)?).map_err(|_| "has a text that is not UTF-8")?;
                Value::Text(text.into())
            }
            b')' => tuple(Vec::new())?,
            0x85..=0x87 => tuple(self.last(usize::from(code - 0x84))?)?,
            b't' => tuple(self.marked()?)?,
            b'}' => Value::Dict(Vec::new()),
            b's' | b'u' => {
                let items = if code == b's' { self.last(2)? } else { self.marked()? };
                self.put(items)?;
                return Ok(None);
            }
            // What a dictionary has beside its items: versions of modules.
            b'b' => match (self.pop()?, self.stack.last()) {
                (Value::Dict(_), Some(Value::Dict(_))) => return Ok(None),
                _ => return Err("has a pickle that changes something other than a dictionary".into()),
            },
            b'c' => global(self.line()?, self.line()?)?,
            b'Q' => storage(&self.pop()?)?,
            b'R' => {
                let arguments = self.pop()?;
                call(&self.pop()?, &arguments)?
            }
            code => return Err(format!("has a pickle with code {code:#04x}, which no dictionary of tensors needs")),
        }))
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.program.len());
        let end = end.ok_or("has a pickle that ends early")?;
        let taken = &self.program[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn int(&mut self, count: usize) -> Result<u64, String> {
        number(self.take(count)?, 0, count)
    }

    /// A whole number of any length, of which 64 bits are read, the sign among them.
    fn long(&mut self) -> Result<Value, String> {
        let digits = self.int(1)? as usize;
        let digits = self.take(digits)?;
        let mut all = [if digits.last().is_some_and(|last| *last >= 0x80) { 0xFF } else { 0 }; 8];
        all.get_mut(..digits.len()).ok_or("has a number beyond 64 bits")?.copy_from_slice(digits);
        Ok(Value::Int(i64::from_le_bytes(all)))
    }

    /// Up to the end of the line.
    fn line(&mut self) -> Result<&'a str, String> {
        let end = self.program[self.at..].iter().position(|byte| *byte == b'\n');
        let line = self.take(end.ok_or("has a pickle that ends early")?)?;
        self.at += 1;
        std::str::from_utf8(line).map_err(|_| "has a name that is not UTF-8".into())
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.stack.pop().ok_or_else(|| EMPTY.into())
    }

    /// What stands above the last mark, which goes too.
    fn marked(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark)).ok_or(EMPTY)?;
        let values = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(values)
    }

    /// The last values, which go.
    fn last(&mut self, count: usize) -> Result<Vec<Value>, String> {
        let first = self.stack.len().checked_sub(count).ok_or(EMPTY)?;
        Ok(self.stack.split_off(first))
    }

    /// Puts names and what stands under them into the dictionary on top.
    fn put(&mut self, items: Vec<Value>) -> Result<(), String> {
        let Some(Value::Dict(dict)) = self.stack.last_mut() else {
            return Err("has a pickle that fills something other than a dictionary".into());
        };
        let mut items = items.into_iter();
        while let Some(name) = items.next() {
            let (Value::Text(name), Some(value)) = (name, items.next()) else {
                return Err("has a dictionary with a name that is no text".into());
            };
            dict.push((name, if let Value::Tensor(tensor) = value { Some(tensor) } else { None }));
        }
        Ok(())
    }
}

/// A tuple: deep ones are made by nobody, and would not end.
fn tuple(values: Vec<Value>) -> Result<Value, String> {
    let depth = |value: &Value| if let Value::Tuple(_, depth) = value { *depth } else { 0 };
    let depth = 1 + values.iter().map(depth).max().unwrap_or(0);
    match depth > DEEPEST {
        true => Err("has a pickle with tuples in tuples that no tensor has".into()),
        false => Ok(Value::Tuple(Rc::new(values), depth)),
    }
}

/// A name that tensors are rebuilt with.
fn global(module: &str, name: &str) -> Result<Value, String> {
    Ok(Value::Global(match (module, name) {
        ("torch._utils", "_rebuild_tensor_v2") => Global::Rebuild,
        ("collections", "OrderedDict") => Global::Ordered,
        ("torch", "FloatStorage") => Global::Storage(Dtype::F32),
        ("torch", "HalfStorage") => Global::Storage(Dtype::F16),
        ("torch", "BFloat16Storage") => Global::Storage(Dtype::BF16),
        _ => {
            let why = "supported are tensors of bf16, fp16 and fp32 alone";
            return Err(format!("has a pickle that asks for `{module}.{name}`; {why}"));
        }
    }))
}

/// `("storage", type, key, device, elements)`
fn storage(id: &Value) -> Result<Value, String> {
    if let Value::Tuple(parts, _) = id
        && let [
            Value::Text(word),
            Value::Global(Global::Storage(dtype)),
            Value::Text(key),
            Value::Text(_),
            Value::Int(_),
        ] = &parts[..]
        && **word == *"storage"
    {
        return Ok(Value::Storage(key.clone(), *dtype));
    }
    Err("has a pickle that refers to something other than numbers of a tensor".into())
}

/// A dictionary without items, or a tensor: of its numbers, the first of them, its shape and its strides; then whether it had a
/// gradient, and hooks. What may follow turns signs of elements, and is refused.
fn call(what: &Value, arguments: &Value) -> Result<Value, String> {
    let (Value::Global(global), Value::Tuple(arguments, _)) = (what, arguments) else {
        return Err("has a pickle that calls something other than what rebuilds tensors".into());
    };
    match (global, &arguments[..]) {
        (Global::Ordered, []) => Ok(Value::Dict(Vec::new())),
        (
            Global::Rebuild,
            [Value::Storage(key, dtype), Value::Int(first), Value::Tuple(shape, _), Value::Tuple(strides, _), _, _],
        ) => {
            let (shape, strides) = (sizes(shape)?, sizes(strides)?);
            let first = u64::try_from(*first).map_err(|_| "has a tensor that begins before its numbers")?;
            if shape.len() != strides.len() || shape.len() > MOST_AXES {
                return Err(format!("has a tensor of {} axes and {} strides", shape.len(), strides.len()));
            }
            // The stride of an axis of one element is nothing.
            let (mut wanted, mut is_one_piece) = (1usize, true);
            for (&extent, &stride) in shape.iter().zip(&strides).rev() {
                is_one_piece &= extent == 1 || stride == wanted;
                wanted = wanted.saturating_mul(extent);
            }
            Ok(Value::Tensor(Tensor { key: key.clone(), dtype: *dtype, first, shape, is_one_piece }))
        }
        _ => Err("has a pickle that calls what rebuilds tensors with something else".into()),
    }
}

/// The sizes in a tuple.
fn sizes(values: &[Value]) -> Result<Vec<usize>, String> {
    let size = |value: &Value| match value {
        Value::Int(n) => usize::try_from(*n).ok(),
        _ => None,
    };
    values.iter().map(size).collect::<Option<_>>().ok_or_else(|| "has a shape that is none".into())
}
