use anyhow::{Result, bail};
use samebits_schema::{Attribute, DefaultValue, Extent, Input, Kind, OPS, Op, Output, OutputDType, find};
use serde_json::{Value, json};
use std::io::Write;
use std::ops::Bound;
use std::process::ExitCode;

/// Prints the form of every op: inputs, parameters, outputs
///
/// What a call of an op takes and gives, as the built-in program checks it on the wire (docs/WIRE.md).
#[derive(clap::Args)]
pub struct Args {
    /// Only these ops [default: all]
    ops: Vec<String>,

    /// One JSON object with everything
    #[arg(long)]
    json: bool,

    /// The tables of docs/WIRE.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(name) = args.ops.iter().find(|name| find(name).is_none()) {
        let known: Vec<_> = OPS.iter().map(|op| op.name).collect();
        bail!("`{name}` is not an op; there are {}", known.join(", "));
    }
    let chosen = |op: &&&Op| args.ops.is_empty() || args.ops.iter().any(|name| name == op.name);
    let ops: Vec<&Op> = OPS.iter().filter(chosen).flat_map(|op| op.forms()).collect();
    let mut stdout = std::io::stdout().lock();
    if args.json {
        let all = json!({ "ops": ops.iter().map(|op| object(op)).collect::<Vec<_>>() });
        serde_json::to_writer_pretty(&mut stdout, &all)?;
        writeln!(stdout)?;
    } else if args.markdown {
        write!(stdout, "{}", markdown(&ops))?;
    } else {
        write!(stdout, "{}", ops.iter().map(|op| text(op)).collect::<Vec<_>>().join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The form of an op; keys are in this order.
fn object(op: &Op) -> Value {
    json!({
        "name": op.name,
        "about": op.about,
        "gradient_of": op.gradient_of,
        "program": Some(op.program).filter(|program| !program.is_empty()),
        "row_axes": op.row_axes,
        "inputs": op.inputs.iter().map(input_object).collect::<Vec<_>>(),
        "attributes": op.attributes().map(attribute_object).collect::<Vec<_>>(),
        "outputs": op.outputs.iter().map(output_object).collect::<Vec<_>>(),
        "extents": op.extents.iter().map(|(axis, extent)| json!({ "axis": axis, "is": words(*extent) })).collect::<Vec<_>>(),
        "refused": op.refusals(),
    })
}

fn input_object(input: &Input) -> Value {
    let mut object = json!({
        "name": input.name,
        "axes": input.axes,
        "role": input.role.name(),
        "dtypes": input.dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>(),
        "dtype_group": input.group,
        "optional": input.optional,
        "rows": input.rows,
    });
    if let Some(range) = input.integers() {
        object["integers"] = range.into();
    }
    object
}

fn attribute_object(attribute: &Attribute) -> Value {
    let mut object = json!({ "name": attribute.name, "kind": attribute.kind.name() });
    match attribute.kind {
        Kind::Count(least) => object["at_least"] = least.into(),
        Kind::Float(lower, upper) => {
            let limits = [("at_least", "above", lower), ("at_most", "below", upper)];
            for (included, excluded, limit) in limits {
                match limit {
                    Bound::Included(limit) => object[included] = limit.into(),
                    Bound::Excluded(limit) => object[excluded] = limit.into(),
                    Bound::Unbounded => {}
                }
            }
        }
        Kind::Choice(words) => object["words"] = words.into(),
        _ => {}
    }
    match attribute.default {
        DefaultValue::Is(value) => object["default"] = value.into(),
        DefaultValue::Of(formula, _) => object["default_formula"] = formula.into(),
        _ => object["required"] = true.into(),
    }
    object["about"] = attribute.about.into();
    object
}

fn output_object(output: &Output) -> Value {
    json!({ "name": output.name, "axes": output.axes, "dtype": output_dtype(output), "rows": output.rows })
}

/// Where an extent comes from that no input has.
fn words(extent: Extent) -> &'static str {
    match extent {
        Extent::Of(formula, _) => formula,
        _ => "the model's",
    }
}

fn output_dtype(output: &Output) -> String {
    match output.dtype {
        OutputDType::Fixed(dtype) => dtype.name().into(),
        OutputDType::OutOrFp32(_) => "out, fp32 for a partial sum".into(),
        _ => "out".into(),
    }
}

fn default(attribute: &Attribute) -> String {
    match attribute.default {
        DefaultValue::Is(value) => format!("`{value}`"),
        DefaultValue::Of(formula, _) => formula.into(),
        _ => "required".into(),
    }
}

fn axes(axes: &[&str]) -> String {
    format!("[{}]", axes.join(","))
}

fn text(op: &Op) -> String {
    let mut text = format!("{}: {}\n  {}\n", op.name, op.about, op.form());
    for input in op.inputs {
        let optional = if input.optional { ", optional" } else { "" };
        let integers = input.integers().map(|range| format!(", {range}")).unwrap_or_default();
        let facts = format!("{}, {}{optional}{integers}", input.role.name(), input.dtype_names());
        text += &format!("  input      {}: {facts}\n", input.name);
    }
    for attribute in op.attributes() {
        let (range, default) = (attribute.range(), default(attribute).replace('`', ""));
        text += &format!("  parameter  {} [{default}]: {range}; {}\n", attribute.name, attribute.about);
    }
    for output in op.outputs {
        text += &format!("  output     {}: {}\n", output.name, output_dtype(output));
    }
    for (axis, extent) in op.extents {
        text += &format!("  extent     {axis}: {}\n", words(*extent));
    }
    if !op.refusals().is_empty() {
        text += &format!("  refused    {}\n", op.refusals());
    }
    text
}

/// The tables of docs/WIRE.md: ops, and their parameters. What several ops share stands once.
fn markdown(ops: &[&Op]) -> String {
    let mut page = String::from("| op | what | inputs | parameters | outputs | refused |\n");
    page += "| --- | --- | --- | --- | --- | --- |\n";
    let joined = |cells: Vec<String>| cells.join(", ");
    for op in ops {
        let inputs = op.inputs.iter().map(|input| {
            let optional = if input.optional { "optional " } else { "" };
            let dtype = match input.dtypes {
                [dtype] => format!(" {dtype}"),
                _ => String::new(),
            };
            format!("{optional}`{}{}`{dtype}", input.name, axes(input.axes))
        });
        let parameters = op.attributes.iter().map(|attribute| format!("`{}`", attribute.name));
        let outputs = op.outputs.iter().map(|output| {
            let dtype = output.fixed_dtype().map(|dtype| format!(" {dtype}")).unwrap_or_default();
            format!("`{}{}`{dtype}", output.name, axes(output.axes))
        });
        let extents = op.extents.iter().map(|(axis, extent)| format!("{axis} is {}", words(*extent)));
        let outputs = joined(outputs.chain(extents).collect());
        let cells = [joined(inputs.collect()), joined(parameters.collect()), outputs, op.refusals()].join(" | ");
        page += &format!("| `{}` | {} | {cells} |\n", op.name, op.about);
    }
    page += "\n| parameter | of | value | meaning | default |\n| --- | --- | --- | --- | --- |\n";
    let mut seen: Vec<(&str, Vec<&str>, String)> = Vec::new();
    for op in ops {
        for attribute in op.attributes() {
            let value = format!("{} | {} | {}", attribute.range(), attribute.about, default(attribute));
            match seen.iter_mut().find(|(name, _, cells)| *name == attribute.name && *cells == value) {
                Some((_, of, _)) => of.push(op.name),
                None => seen.push((attribute.name, vec![op.name], value)),
            }
        }
    }
    for (name, of, cells) in seen {
        let of = if of.len() == ops.len() { "all".into() } else { of.join(", ") };
        page += &format!("| `{name}` | {of} | {cells} |\n");
    }
    page
}
