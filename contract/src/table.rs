//! The contract as tables: dtypes, policies, thresholds, and per op its cases and rows.

use crate::case::{Case, Config};
use crate::compare::Bound;
use crate::coverage::Uncovered;
use crate::fill::{Fill, Maker};
use crate::record::Judgment;
use crate::soak::Soak;
use crate::spec::{self, Class, Direction, Spec};
use crate::tensor::DType;
use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::load::in_days;
pub use crate::load::{ContractError, today};

/// Everything that is fixed before any implementation is looked at.
#[derive(Debug)]
pub struct Contract {
    /// Its name, for example `ws1`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The arithmetic profile; results of different profiles are never compared.
    pub profile: String,
    /// The dtype set, fp8 included with the reason it is out of scope.
    pub dtypes: Vec<DTypeRole>,
    /// Accumulation and TF32.
    pub policy: Policy,
    /// What the axis `soak` asks.
    pub soak: Soak,
    /// The row sets, the default one first.
    pub row_sets: Vec<RowSet>,
    /// The implementations that rows speak of.
    pub implementations: Vec<Implementation>,
    /// Exceptions from outside of the contract, see [`Contract::add_waivers`].
    pub exceptions: Vec<Exception>,
    pub(crate) thresholds: BTreeMap<Cell, Threshold>,
    pub(crate) cases: Vec<CaseSpec>,
    pub(crate) rows: Vec<Row>,
    pub(crate) uncovered: Vec<Uncovered>,
    pub(crate) digest: String,
}

/// A dtype and what the contract asks of it.
#[derive(Clone, Debug, PartialEq)]
pub struct DTypeRole {
    /// `bf16`, `fp16`, `fp32`, or a name the contract refuses.
    pub name: String,
    /// What is asked.
    pub role: Role,
    /// Why.
    pub reason: String,
}

/// What the contract asks of a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// An implementation without it fails.
    Mandatory,
    /// The path that others are explained by; mandatory too.
    Reference,
    /// May be answered with `unsupported`.
    Optional,
    /// Refused everywhere.
    OutOfScope,
}

impl Role {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Role::Mandatory => "mandatory",
            Role::Reference => "reference",
            Role::Optional => "optional",
            Role::OutOfScope => "out of scope",
        }
    }
}

/// How sums are kept and what may replace f32 operands.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The dtype of every accumulator.
    pub accumulation: String,
    /// The TF32 policy that holds unless a case says otherwise: `disabled`.
    pub tf32: String,
    /// The one alternative.
    pub tf32_alternative: String,
}

/// A set of thresholds.
#[derive(Clone, Debug, PartialEq)]
pub struct RowSet {
    /// Its name on the command line.
    pub name: String,
    /// What it is.
    pub about: String,
    /// The fills it speaks of; `None` for all.
    pub fills: Option<Vec<Fill>>,
    /// The set that judges the other fills.
    pub otherwise: Option<String>,
}

/// Where a bound comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Provenance {
    /// A publication, a derivation or a measurement.
    pub source: String,
    /// Elements measured; 0 when the bound is stated before any measurement.
    pub samples: u64,
    /// When, as YYYY-MM-DD.
    pub date: String,
}

/// A place in the threshold table: row set, class, direction, dtype, judgment. The dtype is the narrower of input and output.
pub(crate) type Cell = (String, Class, Direction, DType, Judgment);

/// One threshold with its provenance.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// The bound.
    pub bound: Bound,
    /// Where it comes from.
    pub provenance: Provenance,
    /// Line of `ws1.toml`.
    pub line: usize,
}

/// An implementation under test.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Implementation {
    /// Its name in rows and records.
    pub name: String,
    /// What it is.
    pub about: String,
    /// The program and its arguments; absent for what is built in.
    pub command: Option<Vec<String>>,
    /// A command whose first line of output says what was tested.
    #[serde(default)]
    pub version: Vec<String>,
    /// Environment of the program, beside that of the caller.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Seconds that one answer may take.
    #[serde(default = "patience")]
    pub timeout: f64,
    /// The instruction sets it can be held to, the one of the base first; none: axis `isa` has nothing to vary.
    #[serde(default)]
    pub isa: Vec<IsaSetting>,
    /// The thread counts it can be asked for; `None`: those of the machine.
    pub threads: Option<Vec<usize>>,
    /// The layouts of its inputs that it can be asked for.
    #[serde(default)]
    pub layouts: Vec<String>,
    /// Up to how many elements an input may grow when rows are added; `None`: as the slice says.
    pub room: Option<usize>,
    /// The judgments that are asked; `None` for all.
    pub judgments: Option<Vec<Judgment>>,
    /// What it must offer; `None`: what the roles of the dtypes say.
    pub required: Option<Vec<Required>>,
    /// The implementation whose bits its answers must have, on every case.
    pub same_as: Option<String>,
    /// The folder its commands run in, where the list is not part of the contract.
    #[serde(skip)]
    pub folder: Option<PathBuf>,
}

fn patience() -> f64 {
    60.0
}

/// How a program is held to an instruction set.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IsaSetting {
    /// Its name in settings.
    pub name: String,
    /// The environment of a process that has it; empty: it is asked for on the wire, as `config.isa`.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Combinations that an implementation must offer: every op x dtype x out of these lists. An empty list holds all. An
/// implementation that requires some is asked for no others.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Required {
    /// Ops.
    #[serde(default)]
    pub ops: Vec<String>,
    /// Input dtypes.
    #[serde(default)]
    pub dtypes: Vec<DType>,
    /// Output dtypes.
    #[serde(default)]
    pub outs: Vec<DType>,
    /// Stems, by name or by prefix with a final `*`; behind a `!` those that are left out. Others than these are asked for
    /// too, and may be unsupported.
    #[serde(default)]
    pub stems: Vec<String>,
}

impl Required {
    /// The first pattern of its stems that no case of its ops fits.
    pub(crate) fn unknown_stem(&self, cases: &[CaseSpec]) -> Option<&str> {
        let named = |case: &&CaseSpec| self.ops.is_empty() || self.ops.contains(&case.op);
        let fits_one = |stem: &String| {
            let pattern = stem.strip_prefix('!').unwrap_or(stem);
            cases.iter().filter(named).any(|case| fits(pattern, &case.stem))
        };
        self.stems.iter().find(|stem| !fits_one(stem)).map(String::as_str)
    }

    /// Whether it names the op and the dtypes of `case`.
    fn names(&self, case: &CaseSpec) -> bool {
        (self.ops.is_empty() || self.ops.contains(&case.op))
            && (self.dtypes.is_empty() || self.dtypes.contains(&case.dtype))
            && (self.outs.is_empty() || self.outs.contains(&case.out))
    }

    fn holds(&self, case: &CaseSpec) -> bool {
        let (without, with): (Vec<&String>, Vec<&String>) = self.stems.iter().partition(|stem| stem.starts_with('!'));
        self.names(case)
            && (with.is_empty() || with.iter().any(|pattern| fits(pattern, &case.stem)))
            && !without.iter().any(|pattern| fits(&pattern[1..], &case.stem))
    }
}

/// A waiver of a project that uses the contract: some failures of some implementations, with someone who answers for it.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// Implementations, by name or by prefix with a final `*`.
    pub impls: Vec<String>,
    /// Cases, by name or by prefix with a final `*`.
    pub cases: Vec<String>,
    /// The judgment it covers.
    pub judgment: Judgment,
    /// The axis it covers; `None` for all axes of that judgment.
    pub axis: Option<String>,
    /// Why.
    pub reason: String,
    /// Who answers for it.
    pub owner: String,
    /// Its last day, YYYY-MM-DD.
    pub expires: String,
    /// File and line, for messages.
    #[serde(skip)]
    pub place: String,
    /// Whether the last day is over: then it covers nothing.
    #[serde(skip)]
    pub expired: bool,
}

impl Exception {
    /// Whether it speaks of a failure.
    pub fn covers(&self, implementation: &str, case: &str, judgment: Judgment, axis: Option<&str>) -> bool {
        self.judgment == judgment
            && (self.axis.is_none() || self.axis.as_deref() == axis)
            && self.impls.iter().any(|pattern| fits(pattern, implementation))
            && self.cases.iter().any(|pattern| fits(pattern, case))
    }

    /// The reason with its owner and its last day.
    pub fn text(&self) -> String {
        format!("{} ({}, until {})", self.reason, self.owner, self.expires)
    }
}

/// How often a case runs; each slice contains the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Slice {
    /// In every test run.
    Quick,
    /// In every `check`.
    Default,
    /// Nightly.
    Exhaustive,
}

impl Slice {
    /// The slice called `name`.
    pub fn parse(name: &str) -> Option<Slice> {
        [Slice::Quick, Slice::Default, Slice::Exhaustive].into_iter().find(|slice| slice.name() == name)
    }

    /// The name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Slice::Quick => "quick",
            Slice::Default => "default",
            Slice::Exhaustive => "exhaustive",
        }
    }
}

/// A case before its inputs are made.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseSpec {
    /// `<op>/<dtype>/<stem>-<fill>-<out>`, and `@<profile>` where that is not the default: unique and stable, and the key of
    /// goldens.
    pub name: String,
    /// The name without `-<out>`, with the profile as there: cases of one group have the same inputs and parameters, so the oracle's answer to
    /// one serves them all.
    pub group: String,
    /// The op's stem.
    pub op: String,
    /// The row's stem, with the swept extent if there is one.
    pub stem: String,
    /// What the float inputs hold.
    pub fill: Fill,
    /// Dtype of the float inputs; for a chain, of the weights.
    pub dtype: DType,
    /// Dtype of the float outputs.
    pub out: DType,
    /// Extents by axis name.
    pub shape: BTreeMap<String, usize>,
    /// Parameters as they stand on the wire.
    pub params: BTreeMap<String, String>,
    /// Integer inputs given in full.
    pub ints: BTreeMap<String, Vec<i32>>,
    /// The vector that it is, by the name of its file without the ending: inputs, parameters and expected outputs stand
    /// there.
    pub vector: Option<String>,
    /// How often it runs.
    pub slice: Slice,
}

impl CaseSpec {
    /// Whether a golden is blessed for it: for all that runs by default, but for vectors, which bring their outputs along.
    pub fn blessed(&self) -> bool {
        self.slice <= Slice::Default && self.vector.is_none()
    }

    /// Whether its golden is its outputs, and not hashes of them: for what every test runs, but for gradients, which are as
    /// large as their model, and for sums that are long.
    pub fn kept_whole(&self) -> bool {
        self.slice == Slice::Quick && !self.spec().is_model_gradient() && self.fill != Fill::Power
    }

    /// The profile whose bits it asks for.
    pub fn profile(&self) -> &str {
        self.params.get(samebits_schema::PROFILE.name).map_or(samebits_schema::IEEE, String::as_str)
    }

    /// The op's specification.
    pub fn spec(&self) -> &'static Spec {
        spec::of(&self.op, &self.params).expect("the loader knows the op")
    }

    /// The case with its inputs. For fill `recorded` the inputs are empty (and the parameters of a vector too): the holder of
    /// the checkpoint or vector puts them in.
    pub fn build(&self) -> Case {
        self.build_seeded(0)
    }

    /// The case with inputs of another draw for every `seed`; 0 is the draw that goldens hold.
    pub fn build_seeded(&self, seed: u64) -> Case {
        // Every profile is asked the same.
        let group = self.group.split('@').next().expect("split gives one");
        let key = if seed == 0 { group.to_string() } else { format!("{group}#{seed}") };
        let (shape, ints, params) = (&self.shape, &self.ints, &self.params);
        let maker = Maker { key: &key, dtype: self.dtype, fill: self.fill, shape, ints, params };
        let inputs = if self.vector.is_some() { BTreeMap::new() } else { (self.spec().make)(&maker) };
        Case {
            name: self.name.clone(),
            op: self.op.clone(),
            out: self.out,
            params: self.params.clone(),
            inputs,
            config: Config::default(),
        }
    }
}

/// What is asked of some implementations on some cases of an op; the first row that matches holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The op.
    pub op: String,
    /// File and line, for messages.
    pub place: String,
    /// Implementations, by name or by prefix with a final `*`.
    pub impls: Vec<String>,
    /// Input dtypes; empty for all.
    pub dtypes: Vec<DType>,
    /// Output dtypes; empty for all.
    pub outs: Vec<DType>,
    /// Fills; empty for all.
    pub fills: Vec<Fill>,
    /// Stems, by name or by prefix with a final `*`; empty for all.
    pub stems: Vec<String>,
    /// The accuracy bound of the default row set; `None` takes the class's.
    pub accuracy: Option<(Bound, Provenance)>,
    /// Axes along which the answer must keep its bits.
    pub invariant: Vec<&'static str>,
    /// The implementation whose bits the matching ones must have; the golden judgment holds them to its answer.
    pub same_as: Option<String>,
    /// A written exception.
    pub waive: Option<Waiver>,
}

/// A failure that is known, explained, and allowed until a date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiver {
    /// The judgment it covers.
    pub judgment: Judgment,
    /// The axis it covers; `None` for all axes of that judgment.
    pub axis: Option<String>,
    /// Why.
    pub reason: String,
    /// Its last day, YYYY-MM-DD.
    pub expires: String,
}

impl Waiver {
    /// Whether it covers a failure of `judgment` along `axis`.
    pub fn covers(&self, judgment: Judgment, axis: Option<&str>) -> bool {
        self.judgment == judgment && (self.axis.is_none() || self.axis.as_deref() == axis)
    }
}

impl Row {
    /// Whether the row speaks of this implementation and case.
    pub fn matches(&self, implementation: &str, case: &CaseSpec) -> bool {
        fn any<T: PartialEq>(list: &[T], item: &T) -> bool {
            list.is_empty() || list.contains(item)
        }
        self.op == case.op
            && self.impls.iter().any(|pattern| fits(pattern, implementation))
            && any(&self.dtypes, &case.dtype)
            && any(&self.outs, &case.out)
            && any(&self.fills, &case.fill)
            && (self.stems.is_empty() || self.stems.iter().any(|pattern| fits(pattern, &case.stem)))
    }
}

/// Whether `name` is `pattern`, or begins with it when it ends in `*`.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |prefix| name.starts_with(prefix))
}

/// The dtype whose thresholds hold for an output: that of input and output which has fewer bits of precision.
pub fn narrower(input: DType, output: DType) -> DType {
    let rank = |dtype: DType| [DType::Bf16, DType::Fp16, DType::Fp32, DType::I32].iter().position(|d| *d == dtype);
    if rank(output) < rank(input) { output } else { input }
}

impl Contract {
    /// SHA-256 of all table files, in hex: path, length and bytes of each, in sorted order of the paths.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The default row set's name.
    pub fn default_rows(&self) -> &str {
        &self.row_sets[0].name
    }

    /// The row set called `name`.
    pub fn row_set(&self, name: &str) -> Option<&RowSet> {
        self.row_sets.iter().find(|set| set.name == name)
    }

    /// The entry of the implementation called `name`.
    pub fn implementation(&self, name: &str) -> Option<&Implementation> {
        self.implementations.iter().find(|implementation| implementation.name == name)
    }

    /// Whether `implementation` is asked `case`: where its entry requires something, that is every case of the ops and dtypes
    /// named there, whatever its stem, and nothing else.
    pub fn asks(&self, implementation: &str, case: &CaseSpec) -> bool {
        match self.implementation(implementation).and_then(|entry| entry.required.as_ref()) {
            Some(required) if !required.is_empty() => required.iter().any(|combinations| combinations.names(case)),
            _ => true,
        }
    }

    /// A line for every waiver whose last day is today or one of the `days` after it.
    pub fn ending(&self, days: i64) -> Vec<String> {
        let soon: Vec<String> = (0..=days).map(in_days).collect();
        let line = |place: &str, owner: &str, expires: &str, reason: &str| {
            let left = soon.iter().position(|day| day == expires)?;
            let left = match left {
                0 => "today".to_string(),
                1 => "tomorrow".to_string(),
                left => format!("in {left} days"),
            };
            Some(format!("{place}: the waiver{owner} ends on {expires}, {left}: {reason}"))
        };
        let rows = self.rows.iter().filter_map(|row| Some((row, row.waive.as_ref()?)));
        let rows = rows.filter_map(|(row, waiver)| line(&row.place, "", &waiver.expires, &waiver.reason));
        let others = self.exceptions.iter().filter(|waiver| !waiver.expired);
        let others = others.filter_map(|w| line(&w.place, &format!(" of {}", w.owner), &w.expires, &w.reason));
        rows.chain(others).collect()
    }

    /// Whether `implementation` must answer `case`: what its entry requires, else what the dtype's role says.
    pub fn requires(&self, implementation: &str, case: &CaseSpec) -> bool {
        match self.implementation(implementation).and_then(|entry| entry.required.as_ref()) {
            Some(required) => required.iter().any(|combinations| combinations.holds(case)),
            None => matches!(self.role(case.dtype), Role::Mandatory | Role::Reference),
        }
    }

    /// The role of a dtype.
    pub fn role(&self, dtype: DType) -> Role {
        self.dtypes.iter().find(|d| d.name == dtype.name()).map_or(Role::OutOfScope, |d| d.role)
    }

    /// The cases of `slice` and of the slices it contains, op by op.
    pub fn cases(&self, slice: Slice) -> impl Iterator<Item = &CaseSpec> {
        self.cases.iter().filter(move |case| case.slice <= slice)
    }

    /// The case called `name`, in any slice.
    pub fn case(&self, name: &str) -> Option<&CaseSpec> {
        self.cases.iter().find(|case| case.name == name)
    }

    /// All rows, op by op, in the order they are tried.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The classes of number that no case covers, op by op, with the reasons.
    pub fn uncovered(&self) -> &[Uncovered] {
        &self.uncovered
    }

    /// What is asked of `implementation` on `case`: the first row that matches. The loader has made sure that every
    /// implementation of the table has one for every case.
    pub fn row(&self, implementation: &str, case: &CaseSpec) -> Option<&Row> {
        self.rows.iter().find(|row| row.matches(implementation, case))
    }

    /// The implementation whose bits `implementation` must have on `case`: what the row says, else its entry. Nobody is held to
    /// itself.
    pub fn same_as(&self, implementation: &str, case: &CaseSpec) -> Option<&str> {
        let by_row = self.row(implementation, case).and_then(|row| row.same_as.as_deref());
        let by_entry = || self.implementation(implementation).and_then(|entry| entry.same_as.as_deref());
        by_row.filter(|other| *other != implementation).or_else(by_entry)
    }

    /// Whether the axis `soak` is asked on `case`: one quick case of every op and dtype, whose `out` is its dtype if there is
    /// one. It takes a thousand requests, and another shape would show the same.
    pub fn soaks(&self, case: &CaseSpec) -> bool {
        let alike = |other: &&CaseSpec| other.op == case.op && other.dtype == case.dtype;
        let chosen = self.cases(Slice::Quick).filter(alike).min_by_key(|other| other.out != other.dtype);
        chosen.is_some_and(|chosen| chosen.name == case.name)
    }

    /// Whether the axis `restart` is asked on `case` of a program: quick cases whose `out` is their dtype, or the only one of
    /// their op. To start a program takes milliseconds at least, and may take seconds: these show as much as all.
    pub fn restarts(&self, case: &CaseSpec) -> bool {
        case.slice == Slice::Quick && (case.out == case.dtype || case.spec().outs().len() == 1)
    }

    /// The threshold of a class, with its provenance. `None` for an unknown row set or for i32.
    pub fn threshold(
        &self,
        rows: &str,
        class: Class,
        direction: Direction,
        dtype: DType,
        judgment: Judgment,
    ) -> Option<&Threshold> {
        self.thresholds.get(&(rows.to_string(), class, direction, dtype, judgment))
    }

    /// The bound on one output, of dtype `output`, of a case in the row set `rows`. A row's own bound is part of the
    /// default set; its percentile and its share speak of the outputs that have the case's `out` dtype. `None` for an
    /// unknown row set.
    pub fn bound(&self, rows: &str, row: &Row, case: &CaseSpec, output: DType, judgment: Judgment) -> Option<Bound> {
        let mut set = self.row_set(rows)?;
        if let (Some(fills), Some(otherwise)) = (&set.fills, &set.otherwise)
            && !fills.contains(&case.fill)
        {
            set = self.row_set(otherwise)?;
        }
        if let (Judgment::Accuracy, Some((bound, _)), true) = (judgment, &row.accuracy, set.name == self.default_rows())
        {
            let mut bound = *bound;
            if let Bound::Ulp { p99_ulp, correctly_rounded, .. } = &mut bound
                && output != case.out
            {
                (*p99_ulp, *correctly_rounded) = (None, None);
            }
            return Some(bound);
        }
        let dtype = narrower(case.dtype, output);
        let spec = case.spec();
        Some(self.threshold(&set.name, spec.class, spec.direction(), dtype, judgment)?.bound)
    }
}
