//! Reads the tables and refuses everything that is not exactly right, with file, line and what to write instead.

use crate::axis;
use crate::compare::{Bound, ChainBound};
use crate::coverage::Uncovered;
use crate::fill::Fill;
use crate::gradients::GradientBound;
use crate::number_class::NumberClass;
use crate::record::Judgment;
use crate::soak::Soak;
use crate::spec::{self, Class, Direction, Spec};
use crate::table::{
    CaseSpec, Cell, Contract, DTypeRole, Exception, Implementation, Policy, Provenance, Role, Row, RowSet, Slice,
    Threshold, Waiver, fits, narrower,
};
use crate::tensor::DType;
use samebits_schema::{Attributes, IEEE, PROFILE, profile_suffix};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use toml::Spanned;

/// Why a contract was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct ContractError {
    /// The table.
    pub file: String,
    /// The line, from 1 on.
    pub line: usize,
    /// What is wrong, and what to write instead.
    pub message: String,
}

/// The tables this crate was built with, by path.
fn embedded() -> BTreeMap<String, String> {
    let main = [("impls.toml", include_str!("../impls.toml")), ("ws1.toml", include_str!("../ws1.toml"))];
    let main = main.map(|(path, text)| (path.to_string(), text.to_string()));
    let ops = spec::all().iter().map(|spec| (table_of(spec.name), spec.table.to_string()));
    main.into_iter().chain(ops).collect()
}

/// The path of an op's table.
fn table_of(op: &str) -> String {
    format!("ops/{op}.toml")
}

impl Contract {
    /// The contract in folder `dir`, or the one this crate was built with. The tables are `ws1.toml`, `impls.toml`
    /// and `ops/<op>.toml` for every op; other files beside them are not read.
    ///
    /// # Errors
    /// The first thing that is wrong, with file, line and fix.
    pub fn load(dir: Option<&Path>) -> Result<Contract, ContractError> {
        let files = match dir {
            None => embedded(),
            Some(dir) => read(dir)?,
        };
        parse(&files, &today())
    }

    /// Adds the implementations of `file`, written as `impls.toml`; their commands run in the folder of `file`.
    ///
    /// # Errors
    /// What is wrong with the file, with its line; also a name that the contract has already, and a case that no row asks of
    /// a new implementation.
    pub fn add_implementations(&mut self, file: &Path) -> Result<(), ContractError> {
        let name = file.display().to_string();
        let text = text(file)?;
        let source = Source { file: &name, text: &text };
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        for mut implementation in implementations(&source)? {
            if self.implementation(&implementation.name).is_some() {
                let message = format!("implementation `{}` is in the contract already; rename it", implementation.name);
                return Err(source.fail(0, message));
            }
            if let Some(case) = self.cases.iter().find(|case| self.row(&implementation.name, case).is_none()) {
                let message =
                    format!("no row asks `{}` of `{}`; name it so that one does", case.name, implementation.name);
                return Err(source.fail(0, message));
            }
            if let Some(stem) =
                implementation.required.iter().flatten().find_map(|required| required.unknown_stem(&self.cases))
            {
                let why = "no case of these ops has such a stem; `samebits list --op OP` shows them, <op>/<dtype>/<stem>-<fill>-<out>";
                let message = format!("implementation `{}`: `required`: stem `{stem}`: {why}", implementation.name);
                return Err(source.fail(0, message));
            }
            implementation.folder = Some(folder.to_path_buf());
            self.implementations.push(implementation);
        }
        Ok(())
    }

    /// The contract that these tables make, by path; for tests and for tables that are no files.
    ///
    /// # Errors
    /// As [`Contract::load`].
    pub fn of_tables(files: &BTreeMap<String, String>) -> Result<Contract, ContractError> {
        parse(files, &today())
    }

    /// The tables that this crate was built with, by path.
    pub fn tables() -> BTreeMap<String, String> {
        embedded()
    }

    /// Adds the waivers of `file`: `[[waiver]]` with `impls`, `cases`, `judgment`, `axis`, `reason`, `owner`, `expires`. One
    /// whose last day is over stays in the list and covers nothing.
    ///
    /// # Errors
    /// What is wrong with the file, with its line.
    pub fn add_waivers(&mut self, file: &Path) -> Result<(), ContractError> {
        let name = file.display().to_string();
        let text = text(file)?;
        let source = Source { file: &name, text: &text };
        let raw: RawExceptions = source.table()?;
        for entry in raw.waiver {
            let (at, mut waiver) = (entry.span().start, entry.into_inner());
            require_text(&source, at, "reason", &waiver.reason)?;
            require_text(&source, at, "owner", &waiver.owner)?;
            require_date(&source, at, "expires", &waiver.expires)?;
            if waiver.impls.is_empty() || waiver.cases.is_empty() {
                return Err(source.fail(at, "`impls` and `cases` name at least one each".into()));
            }
            let named = |pattern: &String| self.implementations.iter().any(|entry| fits(pattern, &entry.name));
            if let Some(pattern) = waiver.impls.iter().find(|pattern| !named(pattern)) {
                let known: Vec<_> = self.implementations.iter().map(|entry| entry.name.as_str()).collect();
                let message = format!("no implementation is called `{pattern}`; there are {}", known.join(", "));
                return Err(source.fail(at, message));
            }
            if let Some(pattern) =
                waiver.cases.iter().find(|pattern| !self.cases.iter().any(|case| fits(pattern, &case.name)))
            {
                return Err(
                    source.fail(at, format!("no case is called `{pattern}`; `samebits list` shows their names"))
                );
            }
            if waiver.axis.as_ref().is_some_and(|axis| crate::axis::find(axis).is_none()) {
                let known: Vec<_> = axis::all().iter().map(|axis| axis.name).collect();
                return Err(source.fail(at, format!("`axis`: use one of {}", known.join(", "))));
            }
            waiver.place = format!("{name}:{}", source.line(at));
            waiver.expired = waiver.expires < today();
            self.exceptions.push(waiver);
        }
        Ok(())
    }
}

/// The text of a table or list.
fn text(path: &Path) -> Result<String, ContractError> {
    std::fs::read_to_string(path).map_err(|e| fail(path, format!("cannot read it: {e}")))
}

fn fail(path: &Path, message: String) -> ContractError {
    ContractError { file: path.display().to_string(), line: 1, message }
}

/// The tables of a folder, by path inside it.
fn read(dir: &Path) -> Result<BTreeMap<String, String>, ContractError> {
    let ops = dir.join("ops");
    let listing = std::fs::read_dir(&ops)
        .map_err(|e| fail(&ops, format!("cannot list the folder: {e}; a contract folder has ops/<op>.toml")))?;
    let mut files = BTreeMap::new();
    for entry in listing {
        let path = entry.map_err(|e| fail(&ops, format!("cannot list the folder: {e}")))?.path();
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default().to_string();
        if path.extension().is_none_or(|e| e != "toml") || spec::find(&stem).is_none() {
            let known: Vec<_> = spec::all().iter().map(|spec| spec.name).collect();
            return Err(fail(
                &path,
                format!("no table of an op; name it ops/<op>.toml, op one of {}", known.join(", ")),
            ));
        }
        files.insert(table_of(&stem), path);
    }
    files.insert("impls.toml".into(), dir.join("impls.toml"));
    files.insert("ws1.toml".into(), dir.join("ws1.toml"));
    files.into_iter().map(|(name, path)| Ok((name, text(&path)?))).collect()
}

/// Today in UTC as YYYY-MM-DD.
pub fn today() -> String {
    in_days(0)
}

/// The day that many days after today.
pub(crate) fn in_days(later: i64) -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() / 86_400) as i64 + later;
    // Days since 0000-03-01, in eras of 400 years; a year begins in March so that the leap day ends it.
    let day = days + 719_468;
    let (era, day_of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{:02}", day_of_year - (153 * shifted + 2) / 5 + 1)
}

/// One table being read.
struct Source<'a> {
    file: &'a str,
    text: &'a str,
}

impl Source<'_> {
    fn table<T: DeserializeOwned>(&self) -> Result<T, ContractError> {
        toml::from_str(self.text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            self.fail(at, e.message().replace('\n', "; "))
        })
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|b| **b == b'\n').count()
    }

    fn fail(&self, at: usize, message: String) -> ContractError {
        ContractError { file: self.file.to_string(), line: self.line(at), message }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawContract {
    name: String,
    version: String,
    profile: Spanned<String>,
    policy: Spanned<Policy>,
    soak: Spanned<RawSoak>,
    dtype: Vec<Spanned<RawDType>>,
    row_set: Vec<Spanned<RawRowSet>>,
    threshold: Vec<Spanned<RawThreshold>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSoak {
    requests: usize,
    warm_up: usize,
    windows: usize,
    growth: f64,
    patience: f64,
    source: String,
    samples: u64,
    date: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDType {
    name: String,
    role: Role,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRowSet {
    name: String,
    about: String,
    fills: Option<Vec<String>>,
    otherwise: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawThreshold {
    rows: String,
    classes: Vec<String>,
    #[serde(default = "both_directions")]
    directions: Vec<Direction>,
    dtypes: Vec<String>,
    judgments: Vec<String>,
    bits: Option<bool>,
    ulp: Option<f64>,
    condition_factor: Option<f64>,
    p99_ulp: Option<f64>,
    correctly_rounded: Option<f64>,
    atol: Option<f64>,
    rtol: Option<f64>,
    rms_of_recorded: Option<f64>,
    max_of_recorded: Option<f64>,
    max_of_largest: Option<f64>,
    max_dlogp: Option<f64>,
    mean_dlogp: Option<f64>,
    approx_kl: Option<f64>,
    clip_fraction: Option<f64>,
    error_of_length: Option<f64>,
    error_of_recorded: Option<f64>,
    sketch_of_recorded: Option<f64>,
    max_dloss: Option<f64>,
    source: String,
    samples: u64,
    date: String,
}

fn both_directions() -> Vec<Direction> {
    Direction::ALL.to_vec()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawImplementations {
    implementation: Vec<Spanned<Implementation>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOp {
    op: Spanned<String>,
    case: Vec<Spanned<RawCase>>,
    #[serde(default)]
    uncovered: Vec<Spanned<RawUncovered>>,
    row: Vec<Spanned<RawRow>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawUncovered {
    #[serde(default)]
    outputs: Vec<String>,
    #[serde(default)]
    dtypes: Vec<String>,
    #[serde(default)]
    outs: Vec<String>,
    classes: Vec<String>,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCase {
    stem: String,
    slice: Slice,
    fills: Vec<String>,
    #[serde(default)]
    shape: BTreeMap<String, usize>,
    #[serde(default)]
    sweep: BTreeMap<String, Vec<usize>>,
    #[serde(default)]
    params: BTreeMap<String, String>,
    #[serde(default)]
    ints: BTreeMap<String, Vec<i32>>,
    #[serde(default)]
    vectors: Vec<String>,
    dtypes: Vec<String>,
    outs: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRow {
    impls: Vec<String>,
    #[serde(default)]
    dtypes: Vec<String>,
    #[serde(default)]
    outs: Vec<String>,
    #[serde(default)]
    fills: Vec<String>,
    #[serde(default)]
    stems: Vec<String>,
    accuracy: Option<RawAccuracy>,
    invariant: Vec<String>,
    same_as: Option<String>,
    waive: Option<RawWaiver>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAccuracy {
    ulp: f64,
    condition_factor: f64,
    p99_ulp: Option<f64>,
    correctly_rounded: Option<f64>,
    source: String,
    samples: u64,
    date: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawWaiver {
    judgment: String,
    axis: Option<String>,
    reason: String,
    expires: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExceptions {
    #[serde(default)]
    waiver: Vec<Spanned<Exception>>,
}

/// Checks and joins the tables; `today` decides which waivers have expired.
fn parse(files: &BTreeMap<String, String>, today: &str) -> Result<Contract, ContractError> {
    let source = |file: &str| -> Result<Source, ContractError> {
        files.get_key_value(file).map(|(file, text)| Source { file, text }).ok_or_else(|| ContractError {
            file: file.to_string(),
            line: 1,
            message: "the table is missing; a contract has ws1.toml, impls.toml and ops/<op>.toml for every op".into(),
        })
    };
    let main = source("ws1.toml")?;
    let raw: RawContract = main.table()?;
    let profiles = samebits_schema::profiles();
    if !profiles.contains(&raw.profile.get_ref().as_str()) {
        let known = profiles.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ");
        let message = format!("profile `{}` is not known; use {known}", raw.profile.get_ref());
        return Err(main.fail(raw.profile.span().start, message));
    }
    let policy = raw.policy.get_ref();
    for (field, have, want) in [
        ("accumulation", &policy.accumulation, "fp32"),
        ("tf32", &policy.tf32, "disabled"),
        ("tf32_alternative", &policy.tf32_alternative, "enabled"),
    ] {
        if have != want {
            let message = format!("{field} = \"{have}\": this contract is written for \"{want}\"");
            return Err(main.fail(raw.policy.span().start, message));
        }
    }
    let soak = soak(&main, &raw.soak)?;
    let dtypes = dtype_roles(&main, &raw.dtype)?;
    let row_sets = row_sets(&main, &raw.row_set)?;
    let thresholds = thresholds(&main, &raw, &row_sets)?;
    let implementations = implementations(&source("impls.toml")?)?;
    let mut contract = Contract {
        name: raw.name,
        version: raw.version,
        profile: raw.profile.into_inner(),
        dtypes,
        policy: raw.policy.into_inner(),
        soak,
        row_sets,
        implementations,
        exceptions: Vec::new(),
        thresholds,
        cases: Vec::new(),
        rows: Vec::new(),
        uncovered: Vec::new(),
        digest: digest(files),
    };
    for spec in spec::all() {
        op_table(&mut contract, spec, &source(&table_of(spec.name))?, today)?;
    }
    for entry in &contract.implementations {
        if let Some(stem) = entry.required.iter().flatten().find_map(|required| required.unknown_stem(&contract.cases))
        {
            let message =
                format!("implementation `{}`: `required`: stem `{stem}`: no case of these ops has it", entry.name);
            return Err(source("impls.toml")?.fail(0, message));
        }
    }
    Ok(contract)
}

fn digest(files: &BTreeMap<String, String>) -> String {
    let mut hash = Sha256::new();
    for (path, text) in files {
        hash.update(format!("{path}\n{}\n", text.len()));
        hash.update(text);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn soak(main: &Source, raw: &Spanned<RawSoak>) -> Result<Soak, ContractError> {
    let (at, raw) = (raw.span().start, raw.get_ref());
    let RawSoak { requests, warm_up, windows, growth, patience, .. } = *raw;
    let fail = |message: &str| Err(main.fail(at, message.into()));
    if windows < 3 || warm_up == 0 || requests <= warm_up || !(requests - warm_up).is_multiple_of(windows) {
        return fail("soak: use 3 windows or more, and requests that are warm_up and a whole number for each window");
    }
    if !(growth > 0.0 && growth.is_finite() && patience > 0.0 && patience.is_finite()) {
        return fail("soak: growth (bytes) and patience (seconds) are finite numbers above 0");
    }
    let provenance = provenance(main, at, &raw.source, raw.samples, &raw.date)?;
    Ok(Soak { requests, warm_up, windows, growth, patience, provenance })
}

fn dtype_roles(main: &Source, raw: &[Spanned<RawDType>]) -> Result<Vec<DTypeRole>, ContractError> {
    let mut roles: Vec<DTypeRole> = Vec::new();
    for entry in raw {
        let (at, RawDType { name, role, reason }) = (entry.span().start, entry.get_ref());
        let known = DType::FLOATS.iter().any(|dtype| dtype.name() == name);
        let refused = DType::parse(name).is_err_and(|why| why.contains("out of scope"));
        if roles.iter().any(|other| other.name == *name) {
            return Err(main.fail(at, format!("dtype `{name}` is listed twice; keep one entry")));
        }
        if (*role == Role::OutOfScope) == known || !(known || refused) {
            let rule = "bf16, fp16 and fp32 have a role, fp8 is out_of_scope, and there are no others";
            return Err(main.fail(at, format!("dtype `{name}` cannot be {}: {rule}", role.name())));
        }
        require_text(main, at, "reason", reason)?;
        roles.push(DTypeRole { name: name.clone(), role: *role, reason: reason.clone() });
    }
    for name in ["bf16", "fp16", "fp32", "fp8"] {
        if !roles.iter().any(|role| role.name == name) {
            return Err(main.fail(0, format!("dtype `{name}` has no [[dtype]] entry; add one with role and reason")));
        }
    }
    Ok(roles)
}

fn row_sets(main: &Source, raw: &[Spanned<RawRowSet>]) -> Result<Vec<RowSet>, ContractError> {
    let mut sets: Vec<RowSet> = Vec::new();
    for (place, entry) in raw.iter().enumerate() {
        let (at, set) = (entry.span().start, entry.get_ref());
        require_text(main, at, "about", &set.about)?;
        if sets.iter().any(|other| other.name == set.name) {
            return Err(main.fail(at, format!("row set `{}` is listed twice; keep one entry", set.name)));
        }
        if set.fills.is_some() != set.otherwise.is_some() || (place == 0 && set.fills.is_some()) {
            let rule = "`fills` and `otherwise` stand together, and not in the first (default) row set";
            return Err(main.fail(at, format!("row set `{}`: {rule}", set.name)));
        }
        if set.otherwise.as_ref().is_some_and(|other| *other != raw[0].get_ref().name) {
            return Err(main.fail(at, format!("row set `{}`: `otherwise` must name the default row set", set.name)));
        }
        let fills = set.fills.as_ref().map(|names| names.iter().map(|name| fill(main, at, name)).collect());
        let (name, about, otherwise) = (set.name.clone(), set.about.clone(), set.otherwise.clone());
        sets.push(RowSet { name, about, fills: fills.transpose()?, otherwise });
    }
    if sets.is_empty() {
        return Err(main.fail(0, "no [[row_set]]; add at least the default one".into()));
    }
    Ok(sets)
}

fn thresholds(main: &Source, raw: &RawContract, sets: &[RowSet]) -> Result<BTreeMap<Cell, Threshold>, ContractError> {
    let mut table: BTreeMap<Cell, Threshold> = BTreeMap::new();
    for entry in &raw.threshold {
        let (at, row) = (entry.span().start, entry.get_ref());
        if !sets.iter().any(|set| set.name == row.rows) {
            return Err(
                main.fail(at, format!("row set `{}` is not known; add a [[row_set]] or fix the name", row.rows))
            );
        }
        let bound = threshold_bound(main, at, row)?;
        let provenance = provenance(main, at, &row.source, row.samples, &row.date)?;
        for class in &row.classes {
            let class = class_named(main, at, class)?;
            for (direction, dtype) in product(&row.directions, &row.dtypes) {
                let dtype = float(main, at, dtype)?;
                for judgment in &row.judgments {
                    let judgment = judgment_named(main, at, judgment)?;
                    if !Judgment::COMPARING.contains(&judgment) {
                        let message = format!("`{}` compares no outputs and has no threshold", judgment.name());
                        return Err(main.fail(at, message));
                    }
                    fitting(main, at, &bound, (class, *direction), judgment)?;
                    let threshold = Threshold { bound, provenance: provenance.clone(), line: main.line(at) };
                    let what = cell(class, *direction, dtype, judgment);
                    if let Some(other) = table.insert((row.rows.clone(), class, *direction, dtype, judgment), threshold)
                    {
                        let line = other.line;
                        let message = format!("duplicate cell ({} x {what}), first at line {line}; keep one", row.rows);
                        return Err(main.fail(at, message));
                    }
                }
            }
        }
    }
    for (set, entry) in sets.iter().zip(&raw.row_set) {
        for class in Class::ALL {
            for (&direction, &dtype) in product(&Direction::ALL, &DType::FLOATS) {
                for judgment in Judgment::COMPARING {
                    if !table.contains_key(&(set.name.clone(), class, direction, dtype, judgment)) {
                        let what = cell(class, direction, dtype, judgment);
                        let message =
                            format!("row set `{}` lacks the cell {what}; add a [[threshold]] for it", set.name);
                        return Err(main.fail(entry.span().start, message));
                    }
                }
            }
        }
    }
    Ok(table)
}

/// Every pair of an element of `a` and one of `b`.
fn product<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |a| b.iter().map(move |b| (a, b)))
}

/// A cell of the threshold table in words.
fn cell(class: Class, direction: Direction, dtype: DType, judgment: Judgment) -> String {
    format!("{} x {} x {dtype} x {}", class.name(), direction.name(), judgment.name())
}

/// Sameness has no tolerance, and whole models have bounds of their own.
fn fitting(
    main: &Source,
    at: usize,
    bound: &Bound,
    (class, direction): (Class, Direction),
    judgment: Judgment,
) -> Result<(), ContractError> {
    let fits = match (judgment, class, direction) {
        (Judgment::Accuracy, Class::Chain, Direction::Forward) => matches!(bound, Bound::Chain(_)),
        (Judgment::Accuracy, Class::Chain, Direction::Gradient) => matches!(bound, Bound::Gradient(_)),
        (Judgment::Accuracy, ..) => matches!(bound, Bound::Ulp { .. } | Bound::AtolRtol { .. }),
        _ => matches!(bound, Bound::Bits),
    };
    if fits {
        return Ok(());
    }
    let rule = "invariance and golden are `bits = true`; accuracy is a numeric bound, for class chain one on \
                logits or gradients";
    Err(main.fail(at, format!("{} x {}: this kind of bound does not fit; {rule}", class.name(), judgment.name())))
}

fn threshold_bound(main: &Source, at: usize, row: &RawThreshold) -> Result<Bound, ContractError> {
    let chain = ChainBound {
        rms_of_recorded: row.rms_of_recorded,
        max_of_recorded: row.max_of_recorded,
        max_of_largest: row.max_of_largest,
        max_dlogp: row.max_dlogp,
        mean_dlogp: row.mean_dlogp,
        approx_kl: row.approx_kl,
        clip_fraction: row.clip_fraction,
    };
    let gradient = GradientBound {
        error_of_length: row.error_of_length,
        error_of_recorded: row.error_of_recorded,
        sketch_of_recorded: row.sketch_of_recorded,
        max_dloss: row.max_dloss,
        max_dlogp: None,
    };
    let kinds = [
        row.bits.is_some(),
        row.ulp.is_some() || row.condition_factor.is_some() || row.p99_ulp.is_some() || row.correctly_rounded.is_some(),
        row.atol.is_some() || row.rtol.is_some(),
        chain != ChainBound::default(),
        gradient != GradientBound::default(),
    ];
    let bound = match (kinds, row) {
        ([true, false, false, false, false], RawThreshold { bits: Some(true), .. }) => Bound::Bits,
        ([false, true, false, false, false], RawThreshold { ulp: Some(ulp), condition_factor: Some(factor), .. }) => {
            Bound::Ulp {
                ulp: *ulp,
                condition_factor: *factor,
                p99_ulp: row.p99_ulp,
                correctly_rounded: row.correctly_rounded,
            }
        }
        ([false, false, true, false, false], RawThreshold { atol: Some(atol), rtol: Some(rtol), .. }) => {
            Bound::AtolRtol { atol: *atol, rtol: *rtol }
        }
        ([false, false, false, true, false], _) => Bound::Chain(chain),
        // Log-probabilities are limited in either.
        ([false, false, false, _, true], _)
            if chain == (ChainBound { max_dlogp: row.max_dlogp, ..ChainBound::default() }) =>
        {
            Bound::Gradient(GradientBound { max_dlogp: row.max_dlogp, ..gradient })
        }
        _ => {
            let kinds =
                "`bits = true`, `ulp` with `condition_factor`, `atol` with `rtol`, limits on logits, or on gradients";
            return Err(main.fail(at, format!("a [[threshold]] has one kind of bound: {kinds}")));
        }
    };
    let numbers = [
        row.ulp,
        row.condition_factor,
        row.p99_ulp,
        row.correctly_rounded,
        row.atol,
        row.rtol,
        row.rms_of_recorded,
        row.max_of_recorded,
        row.max_of_largest,
        row.max_dlogp,
        row.mean_dlogp,
        row.approx_kl,
        row.clip_fraction,
        row.error_of_length,
        row.error_of_recorded,
        row.sketch_of_recorded,
        row.max_dloss,
    ];
    finite(main, at, &numbers)?;
    Ok(bound)
}

fn finite(source: &Source, at: usize, numbers: &[Option<f64>]) -> Result<(), ContractError> {
    match numbers.iter().flatten().find(|v| !v.is_finite() || **v < 0.0) {
        Some(v) => Err(source.fail(at, format!("a bound is {v}; use a finite number from 0 on"))),
        None => Ok(()),
    }
}

fn implementations(source: &Source) -> Result<Vec<Implementation>, ContractError> {
    let raw: RawImplementations = source.table()?;
    let mut all: Vec<Implementation> = Vec::new();
    for entry in raw.implementation {
        let (at, implementation) = (entry.span().start, entry.into_inner());
        require_text(source, at, "about", &implementation.about)?;
        require_text(source, at, "name", &implementation.name)?;
        let fail = |message: &str| Err(source.fail(at, format!("implementation `{}`: {message}", implementation.name)));
        match &implementation.command {
            Some(command) if command.first().is_none_or(String::is_empty) => {
                return fail("`command` is empty; name the program, or leave it out for what is built in");
            }
            None if !implementation.version.is_empty() || !implementation.env.is_empty() => {
                return fail("`version` and `env` belong to a `command`; add it or remove them");
            }
            _ => {}
        }
        if !(implementation.timeout > 0.0 && implementation.timeout <= 86_400.0) {
            return fail("`timeout` is not above 0 and at most 86400 seconds");
        }
        if implementation.threads.iter().flatten().any(|&n| n == 0 || n > 1024) {
            return fail("`threads` holds a count that is not 1 to 1024");
        }
        let environments = implementation.isa.iter().map(|isa| &isa.env).chain([&implementation.env]);
        if let Some(name) =
            environments.flat_map(BTreeMap::keys).find(|name| name.is_empty() || name.contains(['=', '\0']))
        {
            return fail(&format!("`env`: `{name}` is no name of a variable"));
        }
        let names: BTreeSet<&String> = implementation.isa.iter().map(|isa| &isa.name).collect();
        if names.len() != implementation.isa.len() || names.iter().any(|name| name.trim().is_empty()) {
            return fail("two entries of `isa` have one name, or one has none");
        }
        if implementation.layouts.iter().any(|layout| !axis::LAYOUTS.contains(&layout.as_str())) {
            return fail(&format!("`layouts`: use {}", axis::LAYOUTS.join(", ")));
        }
        if implementation.judgments.as_ref().is_some_and(Vec::is_empty) {
            return fail("`judgments` is empty; name what is asked, or leave it out for all");
        }
        for required in implementation.required.iter().flatten() {
            if let Some(op) = required.ops.iter().find(|op| spec::find(op).is_none()) {
                return fail(&format!("`required` names the op `{op}`, which is not known"));
            }
            if required.dtypes.contains(&DType::I32) || required.outs.contains(&DType::I32) {
                return fail("`required`: use bf16, fp16 or fp32");
            }
        }
        if let Some(other) = implementation.same_as.as_ref().filter(|name| all.iter().all(|other| other.name != **name))
        {
            return fail(&format!("`same_as` names `{other}`, which is not listed before it"));
        }
        if all.iter().any(|other| other.name == implementation.name) {
            return Err(source.fail(at, format!("implementation `{}` is listed twice; keep one", implementation.name)));
        }
        all.push(implementation);
    }
    Ok(all)
}

/// Reads `ops/<op>.toml` into the contract.
fn op_table(contract: &mut Contract, spec: &Spec, source: &Source, today: &str) -> Result<(), ContractError> {
    let raw: RawOp = source.table()?;
    if raw.op.get_ref() != spec.name {
        let message = format!("op is `{}`; in this file it must be \"{}\"", raw.op.get_ref(), spec.name);
        return Err(source.fail(raw.op.span().start, message));
    }
    let first_case = contract.cases.len();
    let mut seen = BTreeMap::new();
    for entry in &raw.case {
        let of_program = spec::of(spec.name, &entry.get_ref().params).ok_or_else(|| {
            let message = format!("program `{}` of {} is not known", entry.get_ref().params["program"], spec.name);
            source.fail(entry.span().start, message)
        })?;
        for case in cases(&contract.profile, of_program, source, entry)? {
            if let Some(line) = seen.insert(case.name.clone(), source.line(entry.span().start)) {
                let message = format!("case `{}` is already made at line {line}; change the stem", case.name);
                return Err(source.fail(entry.span().start, message));
            }
            contract.cases.push(case);
        }
    }
    for &dtype in spec.dtypes() {
        for &out in spec.outs() {
            let covered = |case: &CaseSpec| case.dtype == dtype && case.out == out && case.slice <= Slice::Default;
            if !contract.cases[first_case..].iter().any(covered) {
                let message = format!("no case with {dtype} input and {out} output runs by default; add one");
                return Err(source.fail(0, message));
            }
        }
    }
    let floats =
        spec.outputs.iter().any(|output| output.fixed_dtype() != Some(DType::I32)) && spec.class != Class::Chain;
    for (dtype, out) in spec.dtypes().iter().flat_map(|dtype| spec.outs().iter().map(move |out| (dtype, out))) {
        let covers = |case: &CaseSpec| {
            case.dtype == *dtype && case.out == *out && case.slice == Slice::Quick && case.fill == Fill::Classes
        };
        if floats && !contract.cases[first_case..].iter().any(covers) {
            let message = format!("no quick case of fill `classes` with {dtype} input and {out} output; add one");
            return Err(source.fail(0, message));
        }
    }
    for entry in &raw.uncovered {
        contract.uncovered.push(uncovered(spec, source, entry)?);
    }
    let mut rows: Vec<Row> = Vec::new();
    for entry in &raw.row {
        let row = row(contract, spec, source, entry, today)?;
        if let Some(other) = rows.iter().find(|other| same_selection(other, &row)) {
            let message = format!("duplicate row: {} selects the same; keep one", other.place);
            return Err(source.fail(entry.span().start, message));
        }
        rows.push(row);
    }
    let mut used = BTreeSet::new();
    for implementation in &contract.implementations {
        for case in &contract.cases[first_case..] {
            match rows.iter().position(|row| row.matches(&implementation.name, case)) {
                Some(index) => used.insert(index),
                None => {
                    let message =
                        format!("no [[row]] for `{}` on `{}`; add one that matches", implementation.name, case.name);
                    return Err(source.fail(0, message));
                }
            };
        }
    }
    if let Some(index) = (0..rows.len()).find(|index| !used.contains(index)) {
        let message = "this row is never the first to match any implementation and case; remove it or move it up";
        return Err(source.fail(raw.row[index].span().start, message.into()));
    }
    contract.rows.extend(rows);
    Ok(())
}

fn uncovered(spec: &Spec, source: &Source, entry: &Spanned<RawUncovered>) -> Result<Uncovered, ContractError> {
    let (at, raw) = (entry.span().start, entry.get_ref());
    require_text(source, at, "reason", &raw.reason)?;
    if let Some(name) = raw.outputs.iter().find(|name| !spec.outputs.iter().any(|output| output.name == **name)) {
        let known: Vec<_> = spec.outputs.iter().map(|output| output.name).collect();
        return Err(source.fail(at, format!("output `{name}` is not one of {}; use {}", spec.name, known.join(", "))));
    }
    let floats = |names: &[String]| names.iter().map(|name| float(source, at, name)).collect::<Result<Vec<_>, _>>();
    let class = |name: &String| {
        NumberClass::parse(name).ok_or_else(|| {
            let known: Vec<_> = NumberClass::ALL.iter().map(|class| class.name()).collect();
            source.fail(at, format!("class `{name}` is not known; use {}", known.join(", ")))
        })
    };
    Ok(Uncovered {
        op: spec.name.into(),
        outputs: raw.outputs.clone(),
        dtypes: floats(&raw.dtypes)?,
        outs: floats(&raw.outs)?,
        classes: raw.classes.iter().map(class).collect::<Result<_, _>>()?,
        reason: raw.reason.clone(),
        place: format!("{}:{}", source.file, source.line(at)),
    })
}

fn same_selection(a: &Row, b: &Row) -> bool {
    a.impls == b.impls && a.dtypes == b.dtypes && a.outs == b.outs && a.fills == b.fills && a.stems == b.stems
}

/// The cases of one `[[case]]`: every fill x dtype x out x swept extent.
fn cases(
    profile: &str,
    spec: &Spec,
    source: &Source,
    entry: &Spanned<RawCase>,
) -> Result<Vec<CaseSpec>, ContractError> {
    let (at, raw) = (entry.span().start, entry.get_ref());
    let fail = |message: String| Err(source.fail(at, message));
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if raw.stem.is_empty() || !raw.stem.chars().all(plain) {
        return fail(format!("stem `{}`: use lower-case letters, digits and _", raw.stem));
    }
    for (list, empty) in
        [("fills", raw.fills.is_empty()), ("dtypes", raw.dtypes.is_empty()), ("outs", raw.outs.is_empty())]
    {
        if empty {
            return fail(format!("`{list}` is empty; name at least one"));
        }
    }
    if !raw.vectors.is_empty() {
        return vectors(profile, spec, source, entry);
    }
    if raw.sweep.len() > 1 {
        return fail("`sweep` runs over one axis; write another [[case]] for the other".into());
    }
    let extents: Vec<Option<(&String, usize)>> = match raw.sweep.iter().next() {
        None => vec![None],
        Some((axis, _)) if raw.shape.contains_key(axis) => {
            return fail(format!("axis {axis} is in `shape` and in `sweep`; keep one"));
        }
        Some((axis, extents)) => extents.iter().map(|&extent| Some((axis, extent))).collect(),
    };
    let mut all = Vec::new();
    for swept in extents {
        let mut shape = raw.shape.clone();
        let mut stem = raw.stem.clone();
        if let Some((axis, extent)) = swept {
            shape.insert(axis.clone(), extent);
            stem = format!("{stem}_{}{extent}", axis.to_ascii_lowercase());
        }
        for fill_name in &raw.fills {
            let fill = fill(source, at, fill_name)?;
            if !spec.fills.contains(&fill) {
                let known: Vec<_> = spec.fills.iter().map(|fill| fill.name()).collect();
                return fail(format!("fill `{fill_name}` is not offered by {}; use {}", spec.name, known.join(", ")));
            }
            case_shape(spec, source, at, &shape, fill)?;
            case_ints(spec, source, at, &shape, &raw.ints)?;
            for dtype_name in &raw.dtypes {
                let dtype = float(source, at, dtype_name)?;
                if !spec.dtypes().contains(&dtype) || (fill == Fill::AllBf16 && dtype == DType::Fp16) {
                    return fail(format!("{} with fill {fill_name} does not take {dtype}", spec.name));
                }
                let mut params = in_profile(profile, &raw.params);
                if spec.class == Class::Chain {
                    params.insert("dtype".into(), dtype.name().into());
                }
                let (group, suffix) = (format!("{}/{dtype}/{stem}-{}", spec.name, fill.name()), suffix(&params));
                for out_name in &raw.outs {
                    let out = float(source, at, out_name)?;
                    if !spec.outs().contains(&out) {
                        let known: Vec<_> = spec.outs().iter().map(|out| out.name()).collect();
                        return fail(format!("{} does not return {out}; use {}", spec.name, known.join(", ")));
                    }
                    let case = CaseSpec {
                        name: format!("{group}-{out}{suffix}"),
                        group: format!("{group}{suffix}"),
                        op: spec.name.into(),
                        stem: stem.clone(),
                        fill,
                        dtype,
                        out,
                        shape: shape.clone(),
                        params: params.clone(),
                        ints: raw.ints.clone(),
                        vector: None,
                        slice: raw.slice,
                    };
                    Attributes::parse(spec.op, &params).map_err(|why| source.fail(at, why.to_string()))?;
                    all.push(case);
                }
            }
        }
    }
    Ok(all)
}

/// The cases of one `[[case]]` with `vectors`: every vector x dtype x out. All else stands in the vectors' files.
fn vectors(
    profile: &str,
    spec: &Spec,
    source: &Source,
    entry: &Spanned<RawCase>,
) -> Result<Vec<CaseSpec>, ContractError> {
    let (at, raw) = (entry.span().start, entry.get_ref());
    let fail = |message: String| Err(source.fail(at, message));
    let given = [raw.shape.is_empty(), raw.sweep.is_empty(), raw.params.is_empty(), raw.ints.is_empty()];
    if raw.fills != ["recorded"] || given.contains(&false) || spec.class == Class::Chain {
        return fail(
            "`vectors` goes with fills = [\"recorded\"], of an op; shape, params and ints stand in their files".into(),
        );
    }
    let mut all = Vec::new();
    for name in &raw.vectors {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || !name.chars().all(plain) {
            return fail(format!("vector `{name}`: use letters, digits, `-`, `_` and `.`"));
        }
        let stem = format!("{}_{}", raw.stem, name.replace(['-', '.'], "_"));
        for dtype in &raw.dtypes {
            let dtype = float(source, at, dtype)?;
            let params = in_profile(profile, &BTreeMap::new());
            let suffix = suffix(&params);
            let group = format!("{}/{dtype}/{stem}-{}", spec.name, Fill::Recorded.name());
            for out in &raw.outs {
                let out = float(source, at, out)?;
                if !spec.outs().contains(&out) {
                    return fail(format!("{} does not return {out}", spec.name));
                }
                all.push(CaseSpec {
                    name: format!("{group}-{out}{suffix}"),
                    group: format!("{group}{suffix}"),
                    op: spec.name.into(),
                    stem: stem.clone(),
                    fill: Fill::Recorded,
                    dtype,
                    out,
                    shape: BTreeMap::new(),
                    params: params.clone(),
                    ints: BTreeMap::new(),
                    vector: Some(format!("{}-{name}", spec.name)),
                    slice: raw.slice,
                });
            }
        }
    }
    Ok(all)
}

/// Parameters of a case of a contract: those that it gives, and the contract's profile where calls would have another.
fn in_profile(profile: &str, params: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut params = params.clone();
    if profile != IEEE {
        params.entry(PROFILE.name.into()).or_insert_with(|| profile.into());
    }
    params
}

/// What is behind the name of a case, and of its group, where its profile is not the default: whatever is kept under a name is
/// kept for one profile.
fn suffix(params: &BTreeMap<String, String>) -> String {
    profile_suffix(params.get(PROFILE.name).map_or(IEEE, String::as_str))
}

fn case_shape(
    spec: &Spec,
    source: &Source,
    at: usize,
    shape: &BTreeMap<String, usize>,
    fill: Fill,
) -> Result<(), ContractError> {
    // What a program takes is recorded beside its checkpoint, or drawn.
    let needed = match (spec.class, fill) {
        (Class::Chain, Fill::Recorded) => vec![],
        _ => spec.shape(),
    };
    let optional: Vec<_> = spec.inputs.iter().filter(|input| input.optional).map(|input| input.name).collect();
    for axis in &needed {
        if !shape.contains_key(*axis) {
            let message = format!("the shape lacks {axis}; {} needs {}", spec.name, needed.join(", "));
            return Err(source.fail(at, message));
        }
    }
    for (axis, &extent) in shape {
        let option = optional.contains(&axis.as_str());
        if !needed.contains(&axis.as_str()) && !option {
            let message = format!("axis `{axis}` is not one of {}; it needs {}", spec.name, needed.join(", "));
            return Err(source.fail(at, message));
        }
        if extent == 0 || (option && extent != 1) || extent > i32::MAX as usize {
            return Err(source.fail(at, format!("`{axis}` = {extent}: use 1 or more (for an optional input, 1)")));
        }
    }
    Ok(())
}

fn case_ints(
    spec: &Spec,
    source: &Source,
    at: usize,
    shape: &BTreeMap<String, usize>,
    ints: &BTreeMap<String, Vec<i32>>,
) -> Result<(), ContractError> {
    for (name, values) in ints {
        let Some(input) = spec.inputs.iter().find(|input| input.name == name && !input.is_float()) else {
            return Err(source.fail(at, format!("`ints`: `{name}` is no i32 input of {}", spec.name)));
        };
        let want: usize = input.axes.iter().map(|axis| shape.get(*axis).copied().unwrap_or(1)).product();
        if values.len() != want {
            let message = format!("`ints`: `{name}` has {} values; its shape needs {want}", values.len());
            return Err(source.fail(at, message));
        }
    }
    Ok(())
}

fn row(
    contract: &Contract,
    spec: &Spec,
    source: &Source,
    entry: &Spanned<RawRow>,
    today: &str,
) -> Result<Row, ContractError> {
    let (at, raw) = (entry.span().start, entry.get_ref());
    let fail = |message: String| Err(source.fail(at, message));
    let known = |pattern: &String| contract.implementations.iter().any(|i| fits(pattern, &i.name));
    if raw.impls.is_empty() {
        return fail("`impls` is empty; name an implementation of impls.toml, or `*`".into());
    }
    if let Some(pattern) = raw.impls.iter().chain(&raw.same_as).find(|pattern| !known(pattern)) {
        return fail(format!("implementation `{pattern}` is not in impls.toml; add it there or fix the name"));
    }
    let floats = |names: &[String]| names.iter().map(|name| float(source, at, name)).collect::<Result<Vec<_>, _>>();
    let (dtypes, outs) = (floats(&raw.dtypes)?, floats(&raw.outs)?);
    let fills = raw.fills.iter().map(|name| fill(source, at, name)).collect::<Result<Vec<_>, _>>()?;
    let mut invariant = Vec::new();
    for name in &raw.invariant {
        let axis = axis_named(spec, source, at, name)?;
        if invariant.contains(&axis) {
            return fail(format!("axis `{name}` is listed twice; keep one"));
        }
        invariant.push(axis);
    }
    let accuracy = match &raw.accuracy {
        None => None,
        Some(own) => {
            let numbers = [Some(own.ulp), Some(own.condition_factor), own.p99_ulp, own.correctly_rounded];
            finite(source, at, &numbers)?;
            not_looser(contract, spec, source, at, own, [&dtypes, &outs])?;
            let bound = Bound::Ulp {
                ulp: own.ulp,
                condition_factor: own.condition_factor,
                p99_ulp: own.p99_ulp,
                correctly_rounded: own.correctly_rounded,
            };
            Some((bound, provenance(source, at, &own.source, own.samples, &own.date)?))
        }
    };
    let waive = match &raw.waive {
        None => None,
        Some(waiver) => {
            require_text(source, at, "waive.reason", &waiver.reason)?;
            require_date(source, at, "waive.expires", &waiver.expires)?;
            if waiver.expires.as_str() < today {
                let message =
                    format!("the waiver expired on {}; fix the failure or renew it with a reason", waiver.expires);
                return Err(source.fail(at, message));
            }
            let axis = waiver.axis.as_ref().map(|name| axis_named(spec, source, at, name)).transpose()?;
            Some(Waiver {
                judgment: judgment_named(source, at, &waiver.judgment)?,
                axis: axis.map(str::to_string),
                reason: waiver.reason.clone(),
                expires: waiver.expires.clone(),
            })
        }
    };
    Ok(Row {
        op: spec.name.into(),
        place: format!("{}:{}", source.file, source.line(at)),
        impls: raw.impls.clone(),
        dtypes,
        outs,
        fills,
        stems: raw.stems.clone(),
        accuracy,
        invariant,
        same_as: raw.same_as.clone(),
        waive,
    })
}

/// An op may promise more than its class, never less.
fn not_looser(
    contract: &Contract,
    spec: &Spec,
    source: &Source,
    at: usize,
    own: &RawAccuracy,
    [dtypes, outs]: [&[DType]; 2],
) -> Result<(), ContractError> {
    let or_all = |list: &[DType]| if list.is_empty() { DType::FLOATS.to_vec() } else { list.to_vec() };
    for dtype in or_all(dtypes) {
        for out in or_all(outs) {
            let dtype = narrower(dtype, out);
            let class =
                contract.threshold(contract.default_rows(), spec.class, spec.direction(), dtype, Judgment::Accuracy);
            let Some(Threshold {
                bound: Bound::Ulp { ulp, condition_factor, p99_ulp, correctly_rounded }, line, ..
            }) = class
            else {
                let message =
                    format!("class {} is not bounded in ulp, so a row cannot be; remove it", spec.class.name());
                return Err(source.fail(at, message));
            };
            let above =
                |own: Option<f64>, class: Option<f64>| class.is_some_and(|class| own.is_none_or(|own| own > class));
            let below =
                |own: Option<f64>, class: Option<f64>| class.is_some_and(|class| own.is_none_or(|own| own < class));
            for (field, looser) in [
                ("ulp", own.ulp > *ulp),
                ("condition_factor", own.condition_factor > *condition_factor),
                ("p99_ulp", above(own.p99_ulp, *p99_ulp)),
                ("correctly_rounded", below(own.correctly_rounded, *correctly_rounded)),
            ] {
                if looser {
                    let class = spec.class.name();
                    let message = format!("accuracy.{field} is looser than class {class} x {dtype} (ws1.toml:{line})");
                    return Err(
                        source.fail(at, format!("{message}; tighten it, or change the class with its provenance"))
                    );
                }
            }
        }
    }
    Ok(())
}

fn provenance(source: &Source, at: usize, from: &str, samples: u64, date: &str) -> Result<Provenance, ContractError> {
    require_text(source, at, "source", from)?;
    require_date(source, at, "date", date)?;
    Ok(Provenance { source: from.to_string(), samples, date: date.to_string() })
}

fn require_text(source: &Source, at: usize, field: &str, text: &str) -> Result<(), ContractError> {
    if text.trim().is_empty() { Err(source.fail(at, format!("`{field}` is empty; say it in words"))) } else { Ok(()) }
}

fn require_date(source: &Source, at: usize, field: &str, date: &str) -> Result<(), ContractError> {
    let digits = |range: std::ops::Range<usize>| date.get(range).and_then(|part| part.parse::<u32>().ok());
    let shape = date.len() == 10 && date.get(4..5) == Some("-") && date.get(7..8) == Some("-");
    let month = digits(5..7).is_some_and(|m| (1..=12).contains(&m));
    let leap = digits(0..4).is_some_and(|y| y % 4 == 0 && (y % 100 != 0 || y % 400 == 0));
    let last = match digits(5..7) {
        Some(2) => 28 + u32::from(leap),
        Some(4 | 6 | 9 | 11) => 30,
        _ => 31,
    };
    let day = digits(8..10).is_some_and(|d| (1..=last).contains(&d));
    if shape && digits(0..4).is_some() && month && day {
        return Ok(());
    }
    Err(source.fail(at, format!("`{field}` is \"{date}\", which is no day; write YYYY-MM-DD")))
}

fn fill(source: &Source, at: usize, name: &str) -> Result<Fill, ContractError> {
    Fill::parse(name).ok_or_else(|| {
        let known: Vec<_> = Fill::ALL.iter().map(|fill| fill.name()).collect();
        source.fail(at, format!("fill `{name}` is not known; use {}", known.join(", ")))
    })
}

fn float(source: &Source, at: usize, name: &str) -> Result<DType, ContractError> {
    match DType::parse(name) {
        Ok(DType::I32) => {
            Err(source.fail(at, "dtype `i32` is not a floating-point dtype; use bf16, fp16 or fp32".into()))
        }
        Ok(dtype) => Ok(dtype),
        Err(why) => Err(source.fail(at, why)),
    }
}

fn class_named(source: &Source, at: usize, name: &str) -> Result<Class, ContractError> {
    Class::ALL.into_iter().find(|class| class.name() == name).ok_or_else(|| {
        let known: Vec<_> = Class::ALL.iter().map(|class| class.name()).collect();
        source.fail(at, format!("class `{name}` is not known; use {}", known.join(", ")))
    })
}

fn judgment_named(source: &Source, at: usize, name: &str) -> Result<Judgment, ContractError> {
    Judgment::ALL
        .into_iter()
        .find(|judgment| judgment.name() == name)
        .ok_or_else(|| source.fail(at, format!("judgment `{name}` is not known; use {}", Judgment::names())))
}

fn axis_named(spec: &Spec, source: &Source, at: usize, name: &str) -> Result<&'static str, ContractError> {
    let known: Vec<_> = axis::all().iter().filter(|axis| axis.applies(spec)).map(|axis| axis.name).collect();
    known
        .iter()
        .find(|known| **known == name)
        .copied()
        .ok_or_else(|| source.fail(at, format!("axis `{name}` is not one of {}; use {}", spec.name, known.join(", "))))
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests;
