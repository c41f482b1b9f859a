use super::Place;
use anyhow::{Context, Result};
use samebits_contract::case::Case;
use samebits_contract::tensor::Tensor;
use samebits_contract::wire;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Prints one case as it stands on the wire
///
/// On a terminal, or with --text, a readable form: metadata, and for every tensor its dtype, shape and first elements
/// with their bits. Elsewhere the frame itself: `samebits case NAME | samebits answer` asks the built-in ops.
#[derive(clap::Args)]
pub struct Args {
    /// The case's name, as `samebits list` prints it
    name: String,

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
    let case = args.place.checkpoints().recordings().fill(spec, 0).map_err(anyhow::Error::msg)?;
    let mut stdout = std::io::stdout().lock();
    if args.text || stdout.is_terminal() {
        write!(stdout, "{}", readable(&case))?;
    } else {
        wire::write_frame(&mut stdout, &wire::encode_request(&case))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Elements shown of each tensor.
const SHOWN: usize = 4;

fn readable(case: &Case) -> String {
    let mut text = format!("case {}\nop {}\nout {}\n", case.name, case.op, case.out);
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
