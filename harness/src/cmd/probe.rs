use super::Place;
use crate::probe::{self, Finding, Op, Probe, RowsApart, Tree};
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::atomic_write;
use samebits_contract::case::Config;
use samebits_contract::record::Judgment;
use samebits_contract::tensor::DType;
use samebits_ops::Cpu;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows what arithmetic a kernel does: the order of its sums, its accumulator, roundings, operands and special values
///
/// Asks questions whose answers give it away, and compares what they say with what the contract declares. The order is asked
/// for several numbers of rows: a kernel that picks it by the batch shows two trees. Exit code 0: as declared, where the list
/// leaves `golden` out of the kernel's `judgments` with one order that may be another than the declared one; 1: not.
#[derive(clap::Args)]
pub struct Args {
    /// Whom to ask, by its name in impls.toml
    #[arg(long = "impl", value_name = "NAME", default_value = "ours/cpu")]
    implementation: String,

    /// A list of further implementations, written as contract/impls.toml; may be given again
    #[arg(long, value_name = "FILE")]
    impls: Vec<PathBuf>,

    /// The op: gemm, attention, rms_norm, softmax, logprob or combine for the order of its sums; of most others the
    /// rest
    #[arg(long, value_name = "OP", default_value = "gemm")]
    op: String,

    /// Dtype of the inputs: bf16, fp16 or fp32
    #[arg(long, value_name = "DTYPE", default_value = "fp32")]
    dtype: String,

    /// Dtype of the outputs: a kernel may sum otherwise where it rounds at once. bf16 holds sums of up to 256 terms
    #[arg(long, value_name = "DTYPE", default_value = "fp32")]
    out: String,

    /// Columns of the other operand, for gemm
    #[arg(long, value_name = "N", default_value_t = 3)]
    columns: usize,

    /// Terms of the sum; may be given again [default: 33, 128 and 300; for attention 16 and 512; for rms_norm, softmax and logprob
    /// 33 and 300; for combine 9]
    #[arg(long, value_name = "N")]
    terms: Vec<usize>,

    /// Rows computed together; may be given again [default: 1, 2, 3, 7, 8, 9, 10, 16, 33, 64, 129 and 257]
    #[arg(long, value_name = "M")]
    rows: Vec<usize>,

    /// Threads, asked for on the wire
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Instruction set, asked for as the list says
    #[arg(long, value_name = "NAME")]
    isa: Option<String>,

    /// Folder for drawings of the trees, SVG
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    #[command(flatten)]
    place: Place,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut contract = args.place.contract()?;
    for list in &args.impls {
        contract.add_implementations(list)?;
    }
    let op = Op::find(&args.op);
    ensure!(
        op.is_some() || probe::hands_on(&args.op),
        "--op {}: use one of {}, {}; other ops hand no number on as it is",
        args.op,
        Op::ALL.map(Op::name).join(", "),
        probe::HANDS_ON.into_iter().filter(|name| Op::find(name).is_none()).collect::<Vec<_>>().join(", ")
    );
    let float = |option: &str, name: &str| match DType::parse(name) {
        Ok(DType::I32) => bail!("{option} i32: use bf16, fp16 or fp32"),
        Ok(dtype) => Ok(dtype),
        Err(e) => bail!("{option}: {e}"),
    };
    let (dtype, out) = (float("--dtype", &args.dtype)?, float("--out", &args.out)?);
    ensure!((1..=4096).contains(&args.columns), "--columns: use 1 to 4096");
    let or = |given: &[usize], default: &[usize]| if given.is_empty() { default.to_vec() } else { given.to_vec() };
    let default: &[usize] = match op {
        Some(Op::Gemm) if out == DType::Fp32 => &[33, 128, 300],
        Some(Op::Gemm) => &[33, 128, 256],
        Some(Op::Attention) if out == DType::Fp32 => &[16, 512],
        Some(Op::Attention) => &[16, 128],
        Some(Op::Combine | Op::EmbeddingDw | Op::GemmDw) => &[9],
        Some(Op::TokenSum) => &[33, 130],
        Some(Op::RmsNorm | Op::Softmax | Op::Logprob) => &[33, 300],
        None => &[],
    };
    let terms = or(&args.terms, default);
    let rows = or(&args.rows, &[1, 2, 3, 7, 8, 9, 10, 16, 33, 64, 129, 257]);
    ensure!(terms.iter().all(|n| (2..=4096).contains(n)), "--terms: use 2 to 4096");
    ensure!(rows.iter().all(|m| (1..=4096).contains(m)), "--rows: use 1 to 4096");
    let (implementation, _) =
        super::check::open(&contract, &args.implementation, &args.place, Cpu::best(), &args.place.checkpoints())?;
    let config = Config { isa: args.isa.clone(), threads: args.threads, ..Config::default() };
    let profile = &contract.profile;
    ensure!(probe::declares(profile), "no answers are declared for the profile `{profile}`");
    let asked = Probe { columns: args.columns, config, ..Probe::new(implementation.as_ref(), profile, dtype, out) };

    let mut stdout = std::io::stdout().lock();
    let version = Some(implementation.version()).filter(|v| !v.is_empty()).map_or(String::new(), |v| format!(" ({v})"));
    writeln!(stdout, "{}{version}, {}, {dtype} -> {out}", args.implementation, args.op)?;
    // Golden is the claim to have the canonical bits, and with them the canonical order.
    let judgments = contract.implementation(&args.implementation).and_then(|entry| entry.judgments.as_ref());
    let canonical = judgments.is_none_or(|judgments| judgments.contains(&Judgment::Golden));
    let (mut wrong, mut drawn, mut one, mut hidden) = (Vec::new(), 0, true, false);
    for &n in terms.iter().filter(|_| op.is_some()) {
        let shown = order(&mut stdout, args, &asked, op.expect("terms are of a sum"), n, &rows)?;
        drawn += shown.drawn;
        one &= shown.as_declared;
        // What no answer can show is no fault of who claims nothing about it.
        let unseen = shown.hidden && !canonical;
        hidden |= unseen;
        if !(shown.as_declared || unseen || shown.one && !canonical) {
            wrong.push(format!("order of a sum of {n} terms"));
        }
    }
    if let (Some(dir), 0) = (&args.svg, drawn) {
        writeln!(stdout, "\n--svg {}: nothing was drawn, because no order was revealed", dir.display())?;
    }
    if probe::hands_on(&args.op) {
        writeln!(stdout, "\narithmetic")?;
        match asked.arithmetic(&args.op) {
            Err(reason) => {
                wrong.push("arithmetic".to_string());
                writeln!(stdout, "  not revealed: {reason}")?;
            }
            Ok(findings) => {
                for Finding { question, found, declared } in findings {
                    let same =
                        if found == declared { String::new() } else { format!("   NOT as declared: {declared}") };
                    writeln!(stdout, "  {question:<24} {found}{same}")?;
                    if found != declared {
                        wrong.push(question);
                    }
                }
            }
        }
    }
    writeln!(stdout, "\n{}", said(&wrong, one, hidden, out))?;
    Ok(ExitCode::from(u8::from(!wrong.is_empty())))
}

/// The last line.
fn said(wrong: &[String], one: bool, hidden: bool, out: DType) -> String {
    if !wrong.is_empty() {
        format!("NOT as declared: {}", wrong.join(", "))
    } else if one {
        "as declared".into()
    } else if hidden {
        format!(
            "the order is not seen in outputs of {out}; ask with --out fp32 if it has them, and `samebits check` by its cases of fill power"
        )
    } else {
        "one order for all numbers of rows; it is not the declared one, which its list does not claim".into()
    }
}

/// What was shown of the order of a sum.
struct Shown {
    /// Whether it is the declared one for all numbers of rows.
    as_declared: bool,
    /// Whether it is one for all of them.
    one: bool,
    /// Whether outputs of this dtype cannot show it.
    hidden: bool,
    /// Drawings that were written.
    drawn: usize,
}

/// Shows the order of a sum of `n` terms for each number of rows.
fn order(stdout: &mut impl Write, args: &Args, probe: &Probe, op: Op, n: usize, rows: &[usize]) -> Result<Shown> {
    let hidden = !op.shows(probe.dtype, probe.out);
    let mut shown = Shown { as_declared: true, one: true, hidden, drawn: 0 };
    writeln!(stdout, "\norder of a sum of {n} terms")?;
    let declared = op.declared(probe.profile, n).context("a sum has a term")?;
    let mut trees: BTreeMap<Result<Tree, String>, Vec<usize>> = BTreeMap::new();
    for &m in rows {
        trees.entry(probe.tree(op, n, m)).or_default().push(m);
    }
    for (number, (tree, rows)) in trees.iter().enumerate() {
        let list = rows.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
        match tree {
            Err(reason) => {
                writeln!(stdout, "  rows {list}: not revealed: {reason}")?;
                shown.one = false;
                if probe.out == DType::Fp32 && op.shows(probe.dtype, probe.dtype) && probe.dtype != DType::Fp32 {
                    writeln!(stdout, "    if its outputs are {0}, ask with --out {0}", probe.dtype)?;
                }
                if let Ok(Some(RowsApart { first, row, other })) = probe.rows_apart(op, n, rows[0]) {
                    writeln!(stdout, "    THE ORDER FOLLOWS THE ROW: of {} rows row 0\n    {}", rows[0], first.text())?;
                    writeln!(stdout, "    and row {row}\n    {}", other.text())?;
                    shown.hidden = false;
                }
            }
            Ok(tree) => {
                let same = if *tree == declared { "as declared" } else { "NOT as declared" };
                writeln!(stdout, "  rows {list}: {same}\n    {}", tree.text())?;
                if let Some(dir) = &args.svg {
                    atomic_write::create_folder(dir).with_context(|| format!("--svg {}", dir.display()))?;
                    let name = args.implementation.replace('/', "-");
                    let path = dir.join(format!("{name}-{}-{}-{n}-{}.svg", op.name(), probe.dtype, number + 1));
                    let title =
                        format!("{}, {}, {}, {n} terms, rows {list}", args.implementation, op.name(), probe.dtype);
                    atomic_write::write(&path, tree.svg(&title).as_bytes())
                        .with_context(|| path.display().to_string())?;
                    shown.drawn += 1;
                }
            }
        }
        shown.as_declared &= tree.as_ref() == Ok(&declared);
    }
    if trees.len() > 1 {
        shown.one = false;
        writeln!(stdout, "  THE ORDER FOLLOWS THE BATCH: {} orders for one sum", trees.len())?;
    }
    if trees.keys().any(|tree| tree.as_ref() != Ok(&declared)) {
        writeln!(stdout, "  declared\n    {}", declared.text())?;
    }
    Ok(shown)
}
