use super::{Place, axis_and_setting};
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::axis::{Axis, Join, LAYOUTS, Machine, Variant, Way};
use samebits_contract::case::Case;
use samebits_contract::table::Slice;
use samebits_contract::tensor::Tensor;
use samebits_contract::wire;
use samebits_ops::Isa;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Prints one case as it stands on the wire
///
/// On a terminal, or with --text, a readable form: metadata, and for every tensor its dtype, shape and first elements
/// with their bits. Elsewhere the frame itself: `samebits case NAME | samebits answer` asks the built-in ops. With --axis
/// AXIS=SETTING it is the case under that setting, as a red record names it; what is asked before it, by the same process,
/// stands before it, and parts of a whole stand one behind the other.
#[derive(clap::Args)]
pub struct Args {
    /// The case's name, as `samebits list` prints it
    name: String,

    /// The case under one setting of an axis of invariance: batch=again:3; an axis alone lists its settings
    #[arg(long, value_name = "AXIS[=SETTING]")]
    axis: Option<String>,

    /// Other inputs: every number draws its own
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    #[command(flatten)]
    place: Place,

    /// The readable form, also into a pipe or file
    #[arg(long)]
    text: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let contract = args.place.contract()?;
    let spec = contract
        .case(&args.name)
        .with_context(|| format!("no case is called `{}`; `samebits list` shows their names", args.name))?;
    let case = args.place.checkpoints().recordings().fill(spec, args.seed).map_err(anyhow::Error::msg)?;
    let mut stdout = std::io::stdout().lock();
    let cases = match &args.axis {
        None => vec![case],
        Some(text) => {
            let (axis, setting) = axis_and_setting(text)?;
            ensure!(axis.applies(spec.spec()), "--axis {text}: {} does not have it", spec.op);
            let machine = Machine { seed: args.seed, ..everything() };
            let Some(setting) = setting else {
                let settings = (axis.variants)(&case, &machine);
                ensure!(!settings.is_empty(), "--axis {text}: {}", none(axis));
                for variant in settings {
                    writeln!(stdout, "{}={}", axis.name, variant.setting)?;
                }
                return Ok(ExitCode::SUCCESS);
            };
            under(axis, setting, &case, &machine)?
        }
    };
    for case in cases {
        if args.text || stdout.is_terminal() {
            write!(stdout, "{}", readable(&case))?;
        } else {
            wire::write_frame(&mut stdout, &wire::encode_request(&case))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// All that any implementation may be asked to vary.
fn everything() -> Machine {
    Machine {
        isas: Isa::ALL.iter().map(Isa::to_string).collect(),
        layouts: LAYOUTS.map(String::from).to_vec(),
        ..samebits_judge::machine::of_slice(Slice::Exhaustive)
    }
}

fn none(axis: &Axis) -> &'static str {
    match axis.name {
        "threads" => "its settings are numbers of threads: threads=2",
        "budget" => "its settings are a word and bytes, which depend on the implementation: budget=tight:4096",
        _ => "this case has nothing to vary on it",
    }
}

/// What is asked under one setting, in order.
fn under(axis: &Axis, setting: &str, case: &Case, machine: &Machine) -> Result<Vec<Case>> {
    let wrong = || format!("--axis {}={setting}: {}", axis.name, none(axis));
    let mut machine = machine.clone();
    // These are numbers, which the case does not decide.
    if axis.name == "threads" {
        machine.threads = vec![setting.parse().ok().filter(|&n| n > 0).with_context(wrong)?];
    }
    if axis.name == "budget" {
        let bytes = setting.rsplit_once(':').map_or(setting, |(_, bytes)| bytes);
        let mut case = case.clone();
        case.config.budget = Some(bytes.parse().ok().with_context(wrong)?);
        return Ok(vec![case]);
    }
    let variants: Vec<Variant> = (axis.variants)(case, &machine);
    let names: Vec<String> = variants.iter().map(|variant| variant.setting.clone()).collect();
    let Some(variant) = variants.into_iter().find(|variant| variant.setting == setting) else {
        match names.is_empty() {
            true => bail!(wrong()),
            false => bail!("--axis {}={setting}: no such setting; this case has {}", axis.name, names.join(", ")),
        }
    };
    let own = variant.case().clone();
    Ok(match &variant.way {
        Way::Plain | Way::Fresh | Way::Soak => vec![own],
        Way::After(before) => before.iter().cloned().chain([own]).collect(),
        Way::Parts(_, Join::Carry(output) | Join::Steps { next: output, .. }) => {
            super::warn(&format!(
                "the first part alone: each of the others goes on with `{output}` of the answer before"
            ));
            vec![own]
        }
        Way::Parts(others, _) => [own].into_iter().chain(others.iter().cloned()).collect(),
    })
}

/// Elements shown of each tensor.
const SHOWN: usize = 4;

fn readable(case: &Case) -> String {
    let mut text = format!("case {}\nop {}\nout {}\n", case.name, case.op, case.out);
    let config = &case.config;
    for (name, value) in [("threads", config.threads), ("budget", config.budget)] {
        text += &value.map(|value| format!("config {name} = {value}\n")).unwrap_or_default();
    }
    for (name, value) in [("isa", &config.isa), ("layout", &config.layout)] {
        text += &value.as_ref().map(|value| format!("config {name} = {value}\n")).unwrap_or_default();
    }
    for (name, value) in &case.params {
        text += &format!("param {name} = {value}\n");
    }
    for (name, tensor) in &case.inputs {
        text += &format!("tensor {name} {} {:?}:{}\n", tensor.dtype(), tensor.shape(), elements(tensor));
    }
    text
}

fn elements(tensor: &Tensor) -> String {
    let digits = 2 * tensor.dtype().size();
    let mut text = String::new();
    for i in 0..tensor.len().min(SHOWN) {
        text += &format!(" {} (0x{:0digits$x})", tensor.value(i), tensor.bits(i));
    }
    if tensor.len() > SHOWN {
        text += " ..";
    }
    text
}
