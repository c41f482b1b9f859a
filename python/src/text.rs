//! What people and their editors read of the functions: docstrings and stubs, from the schema alone.

use crate::call::parameters;
use samebits_schema::{Attribute, DType, DefaultValue, Kind, Op, OutputDType};
use std::fmt::Write;

/// A default as Python has it; None where it follows from the extents.
fn default(attribute: &Attribute) -> String {
    let DefaultValue::Is(text) = attribute.default else { return "None".into() };
    match attribute.kind {
        Kind::Flag => if ["1", "true"].contains(&text) { "True" } else { "False" }.into(),
        Kind::Float(..) => {
            let number: f64 = text.parse().expect("the defaults of the registry are tested");
            format!("{number:?}")
        }
        Kind::Choice(_) | Kind::Text => format!("'{text}'"),
        _ => text.into(),
    }
}

/// For example `x, w, *, eps=1e-06, dtype=None, into=None`.
pub fn signature(op: &'static Op) -> String {
    let mut parts: Vec<String> = parameters(op)
        .iter()
        .map(|input| if input.optional { format!("{}=None", input.name) } else { input.name.into() })
        .collect();
    parts.push("*".into());
    parts.extend(op.attributes().map(|attribute| format!("{}={}", attribute.name, default(attribute))));
    parts.extend(["dtype=None".into(), "into=None".into()]);
    parts.join(", ")
}

fn axes(axes: &[&str]) -> String {
    axes.join(",").replace("..", "...")
}

/// What `help` shows.
pub fn docstring(op: &'static Op) -> String {
    let mut text = String::new();
    let mut line = |line: String| writeln!(text, "{line}").expect("writing to a string");
    let mut about = op.about.to_string();
    if let Some(first) = about.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    line(format!("{about}.\n"));
    if let Some(of) = op.gradient_of {
        line(format!("A gradient of `{of}`.\n"));
    }
    line("Inputs:".into());
    for input in parameters(op) {
        let optional = if input.optional { ", optional" } else { "" };
        let integers = input.integers().map(|integers| format!("; {integers}")).unwrap_or_default();
        line(format!("    {}[{}]: {}{integers}{optional}", input.name, axes(input.axes), input.dtype_names()));
    }
    line("\nAttributes:".into());
    for attribute in op.attributes() {
        let default = match attribute.default {
            DefaultValue::Of(words, _) => words.to_string(),
            _ => default(attribute),
        };
        let range = match attribute.kind {
            Kind::Flag => "True or False".into(),
            _ => attribute.range(),
        };
        line(format!("    {} ({default}): {}; {range}", attribute.name, attribute.about));
    }
    let follows = op.outputs.iter().any(|output| output.fixed_dtype().is_none());
    let first = op.inputs.iter().find(|input| input.is_float()).map_or("", |input| input.name);
    line(if follows {
        format!("    dtype (that of {first}): of outputs that have none of their own; bf16, fp16 or fp32")
    } else {
        "    dtype: nothing here follows it".into()
    });
    line("    into: the tensors to write, of these shapes, in row-major order, apart from the inputs".into());
    line("\nReturns:".into());
    for output in op.outputs {
        let dtype = match output.dtype {
            OutputDType::Fixed(dtype) => dtype.name().to_string(),
            OutputDType::OutOrFp32(_) => "dtype, fp32 for a partial sum".into(),
            _ => "dtype".into(),
        };
        line(format!("    {}[{}]: {dtype}", output.name, axes(output.axes)));
    }
    line("\nRaises:".into());
    let refusals = op.refusals();
    let also = if refusals.is_empty() { String::new() } else { format!("; {refusals}") };
    line(format!("    ValueError: another shape, dtype, stride or range{also}"));
    line("    NotImplementedError: inputs of different float dtypes; a GPU that cannot be used".into());
    line("    MemoryError: the workspace does not fit the budget or the system".into());
    text.trim_end().into()
}

const HEADER: &str = "\
# Written by `python -m samebits.stubs`; a test holds it to the schema.
\"\"\"Every op of the schema as a function.\"\"\"

from typing import Any, Literal, Protocol, TypeVar

class SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

T = TypeVar(\"T\", bound=SupportsDLPack)

__all__: list[str]
";

/// The stub of module `samebits.ops`.
pub fn stubs(ops: &[&'static Op]) -> String {
    let mut text = HEADER.to_string();
    for op in ops {
        write!(text, "\ndef {}(\n", op.name).expect("writing to a string");
        for input in parameters(op) {
            let (kind, default) = if input.optional { ("T | None", " = None") } else { ("T", "") };
            writeln!(text, "    {}: {kind}{default},", input.name).expect("writing to a string");
        }
        text += "    *,\n";
        for attribute in op.attributes() {
            let kind = match attribute.kind {
                Kind::Count(_) => "int".into(),
                Kind::Float(..) => "float".into(),
                Kind::Flag => "bool".into(),
                Kind::Choice(words) => {
                    format!("Literal[{}]", words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(", "))
                }
                _ => "str".into(),
            };
            let kind = if default(attribute) == "None" { format!("{kind} | None") } else { kind };
            writeln!(text, "    {}: {kind} = {},", attribute.name, default(attribute)).expect("writing to a string");
        }
        let outputs = match op.outputs.len() {
            1 => "T".to_string(),
            count => format!("tuple[{}]", vec!["T"; count].join(", ")),
        };
        let into = if op.outputs.len() == 1 { "T" } else { "tuple[T, ...]" };
        write!(text, "    dtype: Any = None,\n    into: {into} | None = None,\n) -> {outputs}:\n")
            .expect("writing to a string");
        let doc = docstring(op).replace('\\', "\\\\").replace('\n', "\n    ").replace("\n    \n", "\n\n");
        write!(text, "    \"\"\"{doc}\n    \"\"\"\n    ...\n").expect("writing to a string");
    }
    text
}

/// What Python calls a dtype of numpy and torch.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bfloat16",
        DType::Fp16 => "float16",
        DType::Fp32 => "float32",
        DType::I32 => "int32",
    }
}
