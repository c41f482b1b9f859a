use super::{Place, Select};
use anyhow::{Context, Result, bail, ensure};
use samebits_contract::case::Status;
use samebits_contract::table::{Slice, today};
use samebits_goldens::{Provenance, Store};
use samebits_ops::{Cpu, Isa};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Lists goldens, reads all of them, or records those of another implementation
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
    /// Puts the outputs of an implementation into a store of its own, for `check --goldens`
    Record(Box<Record>),
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
                let kept = if entry.file.is_some() { "kept" } else { "hash" };
                writeln!(stdout, "{}  {outputs}  {kept}  {}  {}", entry.case, entry.date, entry.reason)?;
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
            if args.place.root().is_some_and(|root| same(&root.join("goldens"), &args.store)) {
                bail!(
                    "--store {}: goldens of the repository are written by `samebits bless` alone",
                    args.store.display()
                );
            }
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
            let mut left_out = 0;
            for spec in contract.cases(Slice::Quick).filter(|case| selection.takes(case)) {
                let case = checkpoints.fill(spec, 0).map_err(anyhow::Error::msg)?;
                let answer = implementation.run(&case);
                match answer.status {
                    Status::Ok => drop(answers.insert(spec.name.clone(), answer.outputs)),
                    Status::Unsupported => left_out += 1,
                    Status::Error => bail!("{}: {}", spec.name, answer.reason),
                }
            }
            ensure!(!answers.is_empty(), "{} answers no case of slice quick in the selection", args.implementation);
            std::fs::create_dir_all(&args.store).with_context(|| format!("--store {}", args.store.display()))?;
            let mut store = match args.store.join("MANIFEST.toml").exists() {
                true => Store::open(&args.store)?,
                false => Store::create(&args.store)?,
            };
            let provenance = Provenance {
                contract: contract.digest().to_string(),
                toolchain: format!("{} {}", args.implementation, implementation.version()),
                date: today(),
                reason: args.reason.clone(),
            };
            let writes = store.bless(&answers, &BTreeSet::new(), &provenance)?;
            writeln!(stdout, "{} recorded, {left_out} not offered", writes.blessed.len())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn same(a: &std::path::Path, b: &std::path::Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
