use super::{Place, Select};
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::atomic_write;
use samebits_contract::case::Status;
use samebits_contract::table::{CaseSpec, Slice, today};
use samebits_contract::tensor::DType;
use samebits_goldens::{KEPT, Provenance, Store, Verified};
use samebits_ops::{Cpu, Isa};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Lists goldens, reads all of them, or takes in those of another implementation
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// One line a golden: case, dtypes and shapes, whether its data is kept, date and reason
    Ls(Of),
    /// Reads every file of the store; exit code 1 names those that were changed
    Verify(Of),
    /// Puts the outputs of an implementation into a store of its own, for `check --goldens`: whole where they are small
    Record(Box<Record>),
    /// Puts outputs that were made elsewhere into a store of its own, for `check --goldens`
    ///
    /// FOLDER has one safetensors file a case and `SHA256SUMS`, as `sha256sum` writes it. A file has the outputs by name, and
    /// metadata `case`, `maker` (with its version), `command` and `date`. goldens/generate/ops.py makes such a folder with
    /// torch. Files are read piece by piece; what is too large to be kept is known by its hashes.
    Import(Import),
}

#[derive(clap::Args)]
struct Import {
    /// The folder with the files
    folder: PathBuf,

    /// The store: a new folder, or one that has goldens already; never that of the repository
    #[arg(long, value_name = "DIR")]
    store: PathBuf,

    /// Why these outputs are kept
    #[arg(long, value_name = "TEXT")]
    reason: String,

    /// Of each file so many bytes are kept at most: a smaller one whole, of a larger one its first rows; 0: hashes alone
    #[arg(long, value_name = "BYTES", default_value_t = KEPT)]
    keep: usize,

    /// Overwrite what the store has with other bits
    #[arg(long)]
    replace: bool,

    #[command(flatten)]
    place: Place,
}

#[derive(clap::Args)]
struct Of {
    /// The store [default: goldens/ of the repository]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,

    #[command(flatten)]
    place: Place,
}

#[derive(clap::Args)]
struct Record {
    /// Whose outputs, by its name in impls.toml
    #[arg(long = "impl", value_name = "NAME")]
    implementation: String,

    /// A list of further implementations; may be given again
    #[arg(long, value_name = "FILE")]
    impls: Vec<PathBuf>,

    /// The store: a new folder, or one that has goldens already; never that of the repository
    #[arg(long, value_name = "DIR")]
    store: PathBuf,

    /// Why these outputs are kept
    #[arg(long, value_name = "TEXT")]
    reason: String,

    /// Overwrite what the store has with other bits; what that is, is listed in any case
    #[arg(long)]
    replace: bool,

    #[command(flatten)]
    select: Select,

    #[command(flatten)]
    place: Place,
}

impl Of {
    fn open(&self) -> Result<Store> {
        match &self.store {
            Some(dir) => Ok(Store::open(dir)?),
            None => self.place.goldens()?.context("no goldens here; give --store or --root"),
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut stdout = std::io::stdout().lock();
    match &args.what {
        What::Ls(of) => {
            let store = of.open()?;
            ensure!(store.entries().next().is_some(), "the store is empty");
            for entry in store.entries() {
                let outputs =
                    entry.outputs.iter().map(|(name, output)| format!("{name} {}{:?}", output.dtype, output.shape));
                let outputs = outputs.collect::<Vec<_>>().join(", ");
                let kept = match (&entry.file, entry.rows) {
                    (None, _) => "hash".to_string(),
                    (Some(_), None) => "kept".into(),
                    (Some(_), Some(rows)) => format!("first {rows} rows kept"),
                };
                let made =
                    entry.command.as_ref().map_or(String::new(), |by| format!("  {} by `{by}`", entry.toolchain));
                writeln!(stdout, "{}  {outputs}  {kept}  {}  {}{made}", entry.case, entry.date, entry.reason)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        What::Verify(of) => {
            let store = of.open()?;
            let all = store.entries().count();
            ensure!(all > 0, "the store is empty: nothing was verified");
            let damage = store.verify_files();
            for damage in &damage {
                writeln!(stdout, "damaged {damage}")?;
            }
            writeln!(stdout, "{all} goldens, {} damaged", damage.len())?;
            Ok(ExitCode::from(u8::from(!damage.is_empty())))
        }
        What::Record(args) => {
            foreign(&args.store, &args.place)?;
            let mut contract = args.place.contract()?;
            for list in &args.impls {
                contract.add_implementations(list)?;
            }
            let selection = args.select.selection(&contract)?;
            let checkpoints = args.place.checkpoints();
            let cpu = Cpu::new(Isa::best(), 1, usize::MAX)?;
            let (implementation, _) =
                super::check::open(&contract, &args.implementation, &args.place, cpu, &checkpoints)?;
            let mut answers = BTreeMap::new();
            let (mut left_out, mut without_inputs) = (0, 0);
            let recorded = |case: &CaseSpec| {
                case.slice <= Slice::Default && selection.takes(case) && contract.asks(&args.implementation, case)
            };
            for spec in contract.cases(selection.slice).filter(|case| recorded(case)) {
                // Models and what was recorded of them are not everywhere.
                let Ok(case) = checkpoints.recordings().fill(spec, 0) else {
                    without_inputs += 1;
                    continue;
                };
                let answer = implementation.run(&case);
                match answer.status {
                    Status::Ok => drop(answers.insert(spec.name.clone(), answer.outputs)),
                    Status::Unsupported => left_out += 1,
                    Status::Error => bail!("{}: {}", spec.name, answer.reason),
                }
            }
            ensure!(!answers.is_empty(), "{} answers no case of the selection", args.implementation);
            let mut store = open_or_create(&args.store)?;
            let mut other = 0;
            for (case, outputs) in &answers {
                let what = match store.verify(case, outputs) {
                    Verified::Match | Verified::Absent => continue,
                    Verified::Mismatch(evidence) => evidence.message,
                    Verified::Damaged(damage) => damage.to_string(),
                };
                other += 1;
                writeln!(stdout, "other bits  {case}: {what}")?;
            }
            ensure!(
                other == 0 || args.replace,
                "--store {}: {other} goldens there have other bits; look at them, then add --replace. Nothing was written",
                args.store.display()
            );
            let provenance = Provenance {
                contract: contract.digest().to_string(),
                toolchain: format!("{} {}", args.implementation, implementation.version()),
                date: today(),
                reason: args.reason.clone(),
            };
            let writes = store.bless(&answers, &BTreeSet::new(), &provenance)?;
            let missing = match without_inputs {
                0 => String::new(),
                cases => format!(", {cases} of models that are not at hand (--root)"),
            };
            writeln!(stdout, "{} recorded, {left_out} not offered{missing}", writes.blessed.len())?;
            Ok(ExitCode::SUCCESS)
        }
        What::Import(args) => {
            foreign(&args.store, &args.place)?;
            let contract = args.place.contract()?;
            let sources = samebits_goldens::sources(&args.folder)?;
            let mut store = open_or_create(&args.store)?;
            let before: BTreeMap<_, _> =
                store.entries().map(|entry| (entry.case.clone(), entry.outputs.clone())).collect();
            let holds = |case: &str, outputs: &BTreeMap<String, samebits_goldens::Output>| {
                let case = contract.case(case).ok_or_else(|| format!("no case is called `{case}`"))?;
                let spec = case.spec();
                let wanted = spec.outputs.iter().map(|output| (output.name, spec.output_dtype(output, case.out)));
                let wanted: BTreeMap<&str, DType> = wanted.collect();
                let found: BTreeMap<&str, DType> =
                    outputs.iter().map(|(n, output)| (n.as_str(), output.dtype)).collect();
                if wanted == found {
                    let bits = |all: &BTreeMap<String, samebits_goldens::Output>| {
                        all.iter().map(|(name, output)| (name.clone(), output.sha256.clone())).collect::<Vec<_>>()
                    };
                    let other = before.get(&case.name).is_some_and(|old| bits(old) != bits(outputs));
                    return match other && !args.replace {
                        true => Err(format!(
                            "the store has other bits for `{}`; look at them, then add --replace",
                            case.name
                        )),
                        false => Ok(()),
                    };
                }
                let words = |all: &BTreeMap<&str, DType>| {
                    all.iter().map(|(name, dtype)| format!("{name} {dtype}")).collect::<Vec<_>>().join(", ")
                };
                Err(format!("`{}` has the outputs {}; the file has {}", case.name, words(&wanted), words(&found)))
            };
            let writes = store.import(&sources, args.keep, contract.digest(), &args.reason, &holds)?;
            let of = |kept: fn(&samebits_goldens::Entry) -> bool| {
                writes.blessed.iter().filter_map(|case| store.find(case)).filter(|entry| kept(entry)).count()
            };
            let (whole, part) = (of(|e| e.file.is_some() && e.rows.is_none()), of(|e| e.rows.is_some()));
            let hashes = of(|e| e.file.is_none());
            writeln!(
                stdout,
                "{} imported: {whole} whole, {part} as their first rows, {hashes} as hashes",
                writes.blessed.len()
            )?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Refuses the store of the repository.
fn foreign(store: &Path, place: &Place) -> Result<()> {
    if place.root().is_some_and(|root| same(&root.join("goldens"), store)) {
        bail!("--store {}: goldens of the repository are written by `samebits bless` alone", store.display());
    }
    Ok(())
}

fn open_or_create(store: &Path) -> Result<Store> {
    atomic_write::create_folder(store).with_context(|| format!("--store {}", store.display()))?;
    Ok(match store.join("MANIFEST.toml").exists() {
        true => Store::open(store)?,
        false => Store::create(store)?,
    })
}

fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
