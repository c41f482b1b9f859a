//! The table of workloads: what is timed beside whom, and what is asked of the times.

use crate::ceilings::Ceiling;
use samebits_contract::case::{Case, Config};
use samebits_contract::tensor::{DType, Tensor};
use samebits_ops::{Element, Isa, bf16, f16};
use samebits_schema::{Attributes, Call, Given, Holds, Input, OPS, REST, Role, find, following, validate};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The table that is built into the program: `harness/workloads.toml`.
pub const BUILT_IN: &str = include_str!("../workloads.toml");

/// A table of workloads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// By input dtype, how far a peer's outputs may lie from ours, as a share of the length of ours: both sides are to
    /// have computed the same.
    pub agree: BTreeMap<String, f64>,
    /// Programs to compare with, by name.
    #[serde(default)]
    pub peer: BTreeMap<String, Peer>,
    /// What is timed, in this order.
    pub workload: Vec<Workload>,
}

/// A program to compare with.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its command line, for a shell in the repository's root.
    pub command: String,
    /// By instruction set, the environment that holds it to that one.
    #[serde(default)]
    pub isa: BTreeMap<String, BTreeMap<String, String>>,
}

/// One op on one set of shapes.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// `<group>/<what>`, unique.
    pub name: String,
    /// The op.
    pub op: String,
    /// Its extents and parameters, as `samebits measure --param` has them.
    pub params: BTreeMap<String, Number>,
    /// The dtype of inputs and outputs.
    #[serde(default = "bf16")]
    pub dtype: String,
    /// By peer, the least ratio of its seconds to ours.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub at_least: BTreeMap<String, f64>,
    /// The limit of the machine beside which the rate is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_of: Option<Ceiling>,
    /// The least share of that limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// By peer, what our peak memory must stay below, as a share of the peer's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory_below: BTreeMap<String, f64>,
    /// What is asked instead where ours runs on this instruction set; [`Workload::on`] puts it in place.
    #[serde(default, skip_serializing)]
    pub scalar: Asked,
    /// The same.
    #[serde(default, skip_serializing)]
    pub avx2: Asked,
    /// The same.
    #[serde(default, skip_serializing)]
    pub avx512: Asked,
    /// The same.
    #[serde(default, skip_serializing)]
    pub avx512bf16: Asked,
}

/// What is asked of a workload on one instruction set, as in [`Workload`]. What is not given stays as the workload has
/// it; `share_of` and `share` are given together.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    at_least: Option<BTreeMap<String, f64>>,
    share_of: Option<Ceiling>,
    share: Option<f64>,
    memory_below: Option<BTreeMap<String, f64>>,
}

/// A whole number or a decimal.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A whole number.
    Whole(i64),
    /// A decimal.
    Decimal(f64),
}

fn bf16() -> String {
    "bf16".into()
}

impl Table {
    /// The table in `file`, or the one that is built in.
    ///
    /// # Errors
    /// One line that names the file, the field and the fix.
    pub fn load(file: Option<&Path>) -> Result<Table, String> {
        let (name, text) = match file {
            None => ("the built-in workloads".to_string(), BUILT_IN.to_string()),
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path).map_err(|e| format!("{name}: {e}"))?;
                (name, text)
            }
        };
        Table::parse(&text).map_err(|e| format!("{name}: {e}"))
    }

    fn parse(text: &str) -> Result<Table, String> {
        let table: Table = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            format!("line {line}: {}", e.message())
        })?;
        for (dtype, &agree) in &table.agree {
            float(dtype).map_err(|e| format!("agree.{dtype}: {e}"))?;
            above_zero(agree).map_err(|e| format!("agree.{dtype}: {e}"))?;
        }
        for (name, peer) in &table.peer {
            peer.check().map_err(|e| format!("peer.{name}.isa.{e}"))?;
        }
        if table.workload.is_empty() {
            return Err("no [[workload]]; give at least one".into());
        }
        let mut names = std::collections::BTreeSet::new();
        for workload in &table.workload {
            let name = &workload.name;
            if !names.insert(name) {
                return Err(format!("workload `{name}`: the name stands twice"));
            }
            workload.check(&table).map_err(|e| format!("workload `{name}`: {e}"))?;
        }
        Ok(table)
    }
}

fn float(name: &str) -> Result<DType, String> {
    match DType::parse(name)? {
        DType::I32 => Err("`i32` is no dtype of inputs; use bf16, fp16 or fp32".into()),
        dtype => Ok(dtype),
    }
}

fn above_zero(value: f64) -> Result<(), String> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { Err(format!("{value} is not greater than 0")) }
}

impl Peer {
    fn check(&self) -> Result<(), String> {
        for (isa, env) in &self.isa {
            isa.parse::<Isa>().map_err(|e| format!("{isa}: {e}"))?;
            if env.is_empty() {
                return Err(format!("{isa}: it holds the peer to nothing; give VARIABLE = \"value\" or leave it out"));
            }
            let plain = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if let Some(name) = env.keys().find(|name| !plain(name)) {
                return Err(format!("{isa}: `{name}` is no name of a variable; use letters, digits and `_`"));
            }
        }
        Ok(())
    }
}

impl Asked {
    fn check(&self) -> Result<(), String> {
        for (field, limits) in [("at_least", &self.at_least), ("memory_below", &self.memory_below)] {
            for (peer, &limit) in limits.iter().flatten() {
                above_zero(limit).map_err(|e| format!("{field}.{peer}: {e}"))?;
            }
        }
        if let Some(share) = self.share {
            above_zero(share).map_err(|e| format!("share: {e}"))?;
            if self.share_of.is_none() {
                return Err("share: say of what, share_of = \"read\", \"copy\" or \"peak\"".into());
            }
        }
        Ok(())
    }
}

impl Workload {
    /// The workload with what is asked of it where ours runs on `isa`.
    pub fn on(&self, isa: Isa) -> Workload {
        let asked = match isa.emulates().unwrap_or(isa) {
            Isa::Avx2 => &self.avx2,
            Isa::Avx512 => &self.avx512,
            Isa::Avx512Bf16 => &self.avx512bf16,
            _ => &self.scalar,
        };
        let Asked { at_least, share_of, share, memory_below } = asked.clone();
        let mut workload = self.clone();
        workload.at_least = at_least.unwrap_or(workload.at_least);
        workload.memory_below = memory_below.unwrap_or(workload.memory_below);
        if share_of.is_some() {
            (workload.share_of, workload.share) = (share_of, share);
        }
        workload
    }

    fn check(&self, table: &Table) -> Result<(), String> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if !self.name.split_once('/').is_some_and(|(group, what)| !group.is_empty() && !what.is_empty())
            || !self.name.chars().all(allowed)
        {
            return Err("name: write <group>/<what> in letters, digits, `-`, `_`, `.` and `/`".into());
        }
        float(&self.dtype).map_err(|e| format!("dtype: {e}"))?;
        if !table.agree.contains_key(&self.dtype) {
            return Err(format!("dtype: {} has no line in [agree]", self.dtype));
        }
        let plain = Asked {
            at_least: Some(self.at_least.clone()),
            share_of: self.share_of,
            share: self.share,
            memory_below: Some(self.memory_below.clone()),
        };
        plain.check()?;
        for (isa, asked) in [
            (Isa::Scalar, &self.scalar),
            (Isa::Avx2, &self.avx2),
            (Isa::Avx512, &self.avx512),
            (Isa::Avx512Bf16, &self.avx512bf16),
        ] {
            asked.check().map_err(|e| format!("{isa}.{e}"))?;
        }
        self.plan().map(|_| ())
    }

    /// The dtype of inputs and outputs.
    pub fn dtype(&self) -> DType {
        DType::parse(&self.dtype).expect("checked when the table was read")
    }

    /// What the op is given and how much it has to do.
    ///
    /// # Errors
    /// An op whose inputs are not known here; a parameter that is missing, unknown or out of range.
    pub fn plan(&self) -> Result<Plan, String> {
        let text = |n: &Number| match n {
            Number::Whole(n) => n.to_string(),
            Number::Decimal(n) => n.to_string(),
        };
        let given = self.params.iter().map(|(name, value)| (name.clone(), text(value))).collect();
        let plan = Plan::new(&self.op, self.dtype(), self.dtype(), &given, "params.")?;
        match plan.size() {
            Some(size) if size <= 4 << 30 => Ok(plan),
            _ => Err("params: the inputs take more than 4 GiB".into()),
        }
    }
}

/// What an op is asked and how much it has to do; its inputs are not drawn yet.
pub struct Plan {
    call: Call,
    inputs: Vec<(&'static Input, DType, Vec<usize>)>,
    /// Parameters on the wire.
    params: BTreeMap<String, String>,
    /// Bytes that must be read and written at least once.
    pub bytes: f64,
    /// Multiplications and additions, a fused pair counted as two; for ops that only move data, elements.
    pub operations: f64,
}

/// Largest extent of an axis.
const LARGEST: usize = 1 << 24;

impl Plan {
    /// A call of `op` with the extents, the optional inputs (by 1) and the parameters of `given`. Axes are those of
    /// `samebits schema`; R and N stand for any shape, and E is D where a call does not give it. `field` stands before a
    /// name in messages.
    ///
    /// # Errors
    /// An op that is not known or needs a checkpoint; something missing, unknown or out of range.
    pub fn new(
        op: &str,
        dtype: DType,
        out: DType,
        given: &BTreeMap<String, String>,
        field: &str,
    ) -> Result<Plan, String> {
        let known = || OPS.iter().filter(|op| !op.needs_more()).map(|op| op.name).collect::<Vec<_>>().join(", ");
        let op = find(op)
            .filter(|op| !op.needs_more())
            .ok_or_else(|| format!("op: no inputs are made for `{op}`; use one of {}", known()))?;
        let axes = op.axes().into_iter().filter(|axis| !op.follows(axis));
        let axes: Vec<&str> = axes.flat_map(|axis| if axis == REST { vec!["R", "N"] } else { vec![axis] }).collect();
        let optional = |name: &str| op.input(name).is_some_and(|input| input.optional);
        if let Some(name) =
            given.keys().find(|name| !axes.contains(&name.as_str()) && !optional(name) && op.attribute(name).is_none())
        {
            return Err(format!("{field}{name}: {} has no such parameter; it has {}", op.name, axes.join(", ")));
        }
        let mut extents: BTreeMap<&str, usize> = BTreeMap::new();
        for &axis in &axes {
            let text = given.get(axis).or_else(|| given.get("D").filter(|_| axis == "E" && axes.contains(&"D")));
            let text = text.ok_or_else(|| format!("{} needs {field}{axis}=N", op.name))?;
            let extent = text.parse().map_err(|_| format!("{field}{axis}={text}: not a number"))?;
            match extent {
                0 => return Err(format!("{field}{axis}=0: an extent is at least 1")),
                extent if extent > LARGEST => return Err(format!("{field}{axis}={extent}: use at most {LARGEST}")),
                extent => extents.insert(axis, extent),
            };
        }
        let params: BTreeMap<String, String> = given
            .iter()
            .filter(|(name, _)| op.attribute(name).is_some())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        let attributes = Attributes::parse(op, &params).map_err(|e| e.to_string())?;
        if op.axes().into_iter().any(|axis| op.follows(axis)) {
            let known = op.axes().into_iter().filter_map(|axis| Some((axis, *extents.get(axis)?)));
            let following = following(op, known.collect::<Vec<_>>(), attributes.clone());
            extents.extend(following.map_err(|e| e.to_string())?);
        }
        let mut inputs = Vec::new();
        for input in op.inputs {
            match given.get(input.name).map_or(if input.optional { "0" } else { "1" }, String::as_str) {
                "0" if input.optional => continue,
                "1" => {}
                other => return Err(format!("{field}{}={other}: use 0 or 1", input.name)),
            }
            let rest = ["R", "N"].map(|axis| extents.get(axis).copied().unwrap_or(1));
            let shape = input.shape(|axis| extents[axis], &rest);
            inputs.push((input, input.dtype_beside(dtype), shape));
        }
        let forms: Vec<Given> =
            inputs.iter().map(|(input, dtype, shape)| Given { name: input.name, dtype: *dtype, shape }).collect();
        let call = validate(op, &forms, attributes, out).map_err(|e| e.to_string())?;
        if let (Some(tokens), Some(keys)) = (call.dims.get("T"), keys(&call))
            && keys < tokens
        {
            return Err(format!("{field}T={tokens}: use at most the number of keys, {keys}"));
        }
        let (bytes, operations) = (moved(&call, &inputs), (op.operations)(&call));
        Ok(Plan { call, inputs, params, bytes, operations })
    }

    /// Bytes of all inputs; `None` where that is no number.
    fn size(&self) -> Option<usize> {
        self.inputs.iter().try_fold(0usize, |sum, (_, dtype, shape)| {
            let elements = shape.iter().try_fold(dtype.size(), |n, &extent| n.checked_mul(extent))?;
            sum.checked_add(elements)
        })
    }

    /// The question for an implementation. Floats are drawn uniformly from [-1, 1), the same on every machine; indexes are
    /// every 7919th entry of a table, positions are the last ones of the keys, and lengths are whole.
    pub fn case(&self, name: &str, config: Config) -> Case {
        let mut inputs = BTreeMap::new();
        for (index, (input, dtype, shape)) in self.inputs.iter().enumerate() {
            let count = shape.iter().product();
            let tensor = if dtype.is_float() {
                // Far apart, so that two inputs do not begin alike.
                let seed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                drawn(*dtype, shape, seed, self.limit(input), self.level(input))
            } else {
                Tensor::i32(shape, self.integers(input, count))
            };
            inputs.insert(input.name.to_string(), tensor);
        }
        let (op, params) = (self.call.op.name.to_string(), self.params.clone());
        Case { name: name.to_string(), op, out: self.call.out, params, inputs, config }
    }

    /// The largest magnitude of an input. Where a product is followed by log-probabilities its weights are such that logits
    /// spread as a model's do, by 8/3. Those of [-1, 1) spread by 10 for K = 896, and a row's range is then beyond what
    /// one pass sums.
    fn limit(&self, input: &Input) -> f32 {
        let targets = self.call.op.inputs.iter().any(|input| matches!(input.holds, Holds::BelowOrIgnored(_)));
        match input.role {
            Role::Weight if targets => 8.0 / (self.call.dim("K") as f32).sqrt(),
            _ => 1.0,
        }
    }

    /// What stands in the middle of an input. The lse of logits that are a product is about theirs, so that probabilities
    /// have the size of a model's: their logarithms are about normal. Squares, and what is summed of them, are
    /// no less than 0.
    fn level(&self, input: &Input) -> f32 {
        let call = &self.call;
        let weighed = call.op.inputs.iter().any(|input| input.role == Role::Weight);
        match call.dims.get("V") {
            Some(vocab) if input.name == "lse" && weighed => (vocab as f32).ln() + 32.0 / 9.0,
            _ if [("adamw", "v"), ("clip_factor", "sum")].contains(&(call.op.name, input.name)) => self.limit(input),
            _ => 0.0,
        }
    }

    /// The integers of an index input.
    fn integers(&self, input: &Input, count: usize) -> Vec<i32> {
        let call = &self.call;
        match input.holds {
            Holds::Mask => vec![1; count],
            Holds::Below(axis) => (0..count).map(|i| (i * 7919 % call.dim(axis)) as i32).collect(),
            // Two of them meet only where 7919, a prime, divides the extent.
            Holds::Distinct(axis) if call.dim(axis).is_multiple_of(7919) => (0..count as i32).collect(),
            Holds::Distinct(axis) => (0..count).map(|i| (i * 7919 % call.dim(axis)) as i32).collect(),
            Holds::Ranks(axis) => {
                let (_, last) = input.holds.range(call);
                (0..count).map(|i| (i % call.dim(axis)) as i64).map(|i| if i <= last { i as i32 } else { -1 }).collect()
            }
            Holds::Choices(_) => (0..count).map(|i| (i % call.count("chosen")) as i32).collect(),
            Holds::BelowOrIgnored(axis) => (0..count).map(|i| (i % call.dim(axis)) as i32).collect(),
            Holds::Pages { pages, .. } => (0..count).map(|i| (i % call.dim(pages)) as i32).collect(),
            Holds::Any => (0..count).map(|i| (i as u32).wrapping_mul(0x9E37_79B9) as i32).collect(),
            Holds::Place(axis) => (0..count).map(|i| (i * 7919 % (call.dim(axis) + 1)) as i32).collect(),
            Holds::Length(_) => vec![input.holds.range(call).1 as i32; count],
            Holds::Starts(axis) => borders(call.dim(axis), count - 1).into_iter().map(|at| at as i32).collect(),
            _ => {
                let tokens = call.dim(input.axes[input.axes.len() - 1]);
                let packed = call.op.inputs.iter().any(|input| matches!(input.holds, Holds::Starts(_)));
                let sequences = if packed { call.dim("B") } else { 1 };
                let (queries, keys) = (borders(tokens, sequences), borders(keys(call).unwrap_or(tokens), sequences));
                let row: Vec<i32> = (0..sequences)
                    .flat_map(|b| {
                        let first = (keys[b + 1] - keys[b]).saturating_sub(queries[b + 1] - queries[b]);
                        (first..).take(queries[b + 1] - queries[b])
                    })
                    .map(|position| position as i32)
                    .collect();
                row.into_iter().cycle().take(count).collect()
            }
        }
    }
}

/// Where each of `parts` nearly equal parts of `extent` starts, and the end.
fn borders(extent: usize, parts: usize) -> Vec<usize> {
    (0..=parts).map(|part| extent * part / parts.max(1)).collect()
}

/// How many keys the queries of an attention have, all sequences of a row together; `None` for other ops.
fn keys(call: &Call) -> Option<usize> {
    call.op.inputs.iter().rev().find_map(|input| match input.holds {
        Holds::Length(_) => usize::try_from(input.holds.range(call).1).ok(),
        Holds::Starts(axis) => Some(call.dim(axis)),
        _ => None,
    })
}

/// Bytes of all inputs and outputs; of a table whose rows are picked, those of the rows that are.
fn moved(call: &Call, inputs: &[(&'static Input, DType, Vec<usize>)]) -> f64 {
    let bytes = |dtype: DType, shape: &[usize]| {
        shape.iter().map(|&extent| extent as f64).product::<f64>() * dtype.size() as f64
    };
    let read = inputs.iter().map(|(input, dtype, shape)| {
        let picks = inputs.iter().find(
            |(other, _, _)| matches!(other.holds, Holds::Below(axis) | Holds::Distinct(axis) if axis == input.axes[0]),
        );
        let share = match picks {
            Some((_, _, picks)) => picks.iter().product::<usize>().min(shape[0]) as f64 / shape[0] as f64,
            None => 1.0,
        };
        share * bytes(*dtype, shape)
    });
    read.sum::<f64>() + call.outputs().iter().map(|form| bytes(form.dtype, &form.shape)).sum::<f64>()
}

/// Numbers from [-limit, limit) that do not repeat soon.
fn drawn(dtype: DType, shape: &[usize], seed: u64, limit: f32, level: f32) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / 8_388_608.0 - 1.0) * limit + level
    };
    let count = shape.iter().product::<usize>();
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        match dtype {
            DType::Bf16 => bytes.extend(bf16::narrow(next()).to_le_bytes()),
            DType::Fp16 => bytes.extend(f16::narrow(next()).to_le_bytes()),
            _ => bytes.extend(next().to_le_bytes()),
        }
    }
    Tensor::from_bytes(dtype, shape, &bytes).expect("as many bytes as elements")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::implementation::cpu::CpuImplementation;
    use samebits_contract::case::Status;
    use samebits_ops::Cpu;

    fn error(text: &str) -> String {
        Table::parse(text).expect_err("the table is wrong")
    }

    #[test]
    fn the_built_in_table_is_well_formed() {
        let table = Table::load(None).unwrap();
        assert!(table.peer.contains_key("torch"));
        for workload in &table.workload {
            assert!(workload.at_least.contains_key("torch") || workload.share.is_some(), "{}", workload.name);
        }
    }

    #[test]
    fn wrong_tables_name_the_field() {
        let one = |more: &str| format!("agree = {{ bf16 = 0.1 }}\n[[workload]]\nname = \"a/b\"\n{more}");
        let softmax = "op = \"softmax\"\nparams = { R = 1, N = 2 }\n";
        assert!(Table::parse(&one(softmax)).is_ok());
        for (more, part) in [
            (format!("{softmax}colour = 1"), "unknown field `colour`"),
            ("params = {}".into(), "missing field `op`"),
            ("op = \"softmax\"\nparams = { R = 1 }".into(), "`a/b`: softmax needs params.N=N"),
            ("op = \"softmax\"\nparams = { R = 1, N = 0 }".into(), "params.N=0: an extent is at least 1"),
            ("op = \"softmax\"\nparams = { R = -1, N = 1 }".into(), "params.R=-1: not a number"),
            ("op = \"softmax\"\nparams = { R = 1, N = 1, K = 1 }".into(), "params.K: softmax has no such"),
            ("op = \"softmax\"\nparams = { R = 16777216, N = 16777216 }".into(), "more than 4 GiB"),
            ("op = \"softmax\"\nparams = { R = 16777217, N = 1 }".into(), "params.R=16777217: use at most"),
            ("op = \"sofmax\"\nparams = {}".into(), "op: no inputs are made for `sofmax`; use one of gemm"),
            (format!("{softmax}dtype = \"fp8\""), "dtype: "),
            (format!("{softmax}dtype = \"fp32\""), "dtype: fp32 has no line in [agree]"),
            (format!("{softmax}at_least = {{ torch = 0 }}"), "at_least.torch: 0 is not greater than 0"),
            (format!("{softmax}memory_below = {{ torch = nan }}"), "memory_below.torch: NaN"),
            (format!("{softmax}share = 0.5"), "share_of"),
            (format!("{softmax}share_of = \"write\""), "unknown variant `write`"),
            (format!("{softmax}[[workload]]\nname = \"a/b\"\n{softmax}"), "the name stands twice"),
            (format!("{softmax}avx2 = {{ at_least = {{ torch = -1 }} }}"), "`a/b`: avx2.at_least.torch: -1 is not"),
            (format!("{softmax}scalar = {{ memory_below = {{ torch = 0 }} }}"), "scalar.memory_below.torch: 0 is not"),
            (format!("{softmax}share_of = \"copy\"\navx512 = {{ share = 0.5 }}"), "avx512.share: say of what"),
            (
                format!("{softmax}avx512bf16 = {{ share_of = \"copy\", share = 0 }}"),
                "avx512bf16.share: 0 is not greater than 0",
            ),
            (format!("{softmax}avx2 = {{ op = \"gemm\" }}"), "unknown field `op`, expected one of `at_least`"),
            (format!("{softmax}avx3 = {{ }}"), "unknown field `avx3`"),
            (
                format!("{softmax}[peer.it]\ncommand = \"a\"\nisa.avx3 = {{ A = \"b\" }}"),
                "peer.it.isa.avx3: unknown isa `avx3`; use scalar, avx2, avx512 or avx512bf16",
            ),
            (format!("{softmax}[peer.it]\ncommand = \"a\"\nisa.avx2 = {{ }}"), "peer.it.isa.avx2: it holds the peer"),
            (
                format!("{softmax}[peer.it]\ncommand = \"a\"\nisa.avx2 = {{ \"A=B\" = \"c\" }}"),
                "peer.it.isa.avx2: `A=B` is no name of a variable",
            ),
            (format!("{softmax}[peer.it]\ncommand = \"a\"\nisa.avx2 = {{ A = 1 }}"), "expected a string"),
            ("op = \"rope\"\nparams = { T = 1, H = 1, D = 3 }".into(), "D = 3 must be even"),
            (
                "op = \"attention\"\nparams = { B = 1, T = 2, S = 1, Hq = 1, Hkv = 1, D = 1 }".into(),
                "params.T=2: use at most the number of keys, 1",
            ),
            (
                "op = \"attention\"\nparams = { B = 1, T = 1, S = 1, Hq = 3, Hkv = 2, D = 1 }".into(),
                "Hq = 3 must be a multiple of Hkv = 2",
            ),
        ] {
            let said = error(&one(&more));
            assert!(said.contains(part), "`{part}` is not in: {said}");
        }
        assert!(error("workload = []").contains("agree"));
        assert!(error("agree = {}\nworkload = []").contains("[[workload]]"));
        assert!(error(&one(softmax).replace("a/b", "a")).contains("<group>/<what>"));
    }

    #[test]
    fn what_is_asked_on_an_instruction_set() {
        let text = "agree = { bf16 = 0.1 }\n[[workload]]\nname = \"a/b\"\nop = \"softmax\"\nparams = { R = 1, N = 2 }\n\
                    at_least = { a = 1, b = 2 }\nshare_of = \"copy\"\nshare = 0.5\nmemory_below = { a = 3 }\n\
                    scalar = { at_least = {} }\navx2 = { at_least = { b = 4 }, share_of = \"read\" }\n\
                    avx512 = { share_of = \"peak\", share = 0.6 }\navx512bf16 = { memory_below = { b = 5 } }";
        let workload = Table::parse(text).unwrap().workload.remove(0);
        let asked = |isa| serde_json::to_value(workload.on(isa)).unwrap();
        let with = |changed: &[(&str, Option<serde_json::Value>)]| {
            let mut value = serde_json::to_value(&workload).unwrap();
            let fields = value.as_object_mut().unwrap();
            for (name, to) in changed {
                match to {
                    Some(to) => fields.insert(name.to_string(), to.clone()),
                    None => fields.remove(*name),
                };
            }
            value
        };
        use serde_json::json;
        assert_eq!(asked(Isa::Scalar), with(&[("at_least", None)]));
        let changed = [("at_least", Some(json!({ "b": 4.0 }))), ("share_of", Some(json!("read"))), ("share", None)];
        assert_eq!(asked(Isa::Avx2), with(&changed));
        assert_eq!(asked(Isa::Avx512), with(&[("share_of", Some(json!("peak"))), ("share", Some(json!(0.6)))]));
        assert_eq!(asked(Isa::Avx512Bf16), with(&[("memory_below", Some(json!({ "b": 5.0 })))]));
    }

    /// Every op of the schema is asked as a workload would ask it, and answered under the clock.
    #[test]
    fn every_op_has_inputs() {
        let implementation = CpuImplementation::new(Cpu::best());
        let mut answered = 0;
        for op in OPS.iter().filter(|op| !op.needs_more()) {
            let extent = |axis: &str| match axis {
                "B" | "Hkv" | "Hk" | "Z" => 2,
                "P" => 6,
                "R" => 12,
                "S" => 9,
                "T" => 3,
                _ => 4,
            };
            let axes = op.axes().into_iter().filter(|axis| !op.follows(axis));
            let axes = axes.flat_map(|axis| if axis == REST { vec!["R", "N"] } else { vec![axis] });
            // A reference is read where `kl` says so, and a table has numbers alone.
            let given = op.inputs.iter().filter(|input| input.name != "reference");
            let optional = given.clone().filter(|input| input.optional).map(|input| (input.name, 1));
            let params = axes.map(|axis| (axis, extent(axis))).chain(optional);
            let params: Vec<String> = params.map(|(name, value)| format!("{name} = {value}")).collect();
            let text = format!(
                "agree.bf16 = 1\n[[workload]]\nname = \"a/b\"\nop = \"{}\"\nparams = {{ {} }}",
                op.name,
                params.join(", ")
            );
            let workload = Table::parse(&text).unwrap().workload.remove(0);
            let plan = workload.plan().unwrap();
            assert!(plan.bytes > 0.0 && plan.operations > 0.0, "{}", op.name);
            let case = plan.case(&workload.name, Config::default());
            assert_eq!(case.inputs.len(), given.count());
            let integers = |name: &str| case.inputs.get(name).and_then(Tensor::as_i32);
            assert_eq!(samebits_schema::check_indexes(&plan.call, integers), Ok(()), "{}", op.name);
            let clock = Clock::new(1);
            let answer = implementation.answer(&case, Some(&clock));
            assert_eq!(answer.status, Status::Ok, "{}: {}", op.name, answer.reason);
            for (name, output) in &answer.outputs {
                // What may not be sampled is -inf.
                let masks = (op.name, &name[..]) == ("truncate", "y");
                let finite = output.to_f64().iter().all(|x| x.is_finite() || masks && *x == f64::NEG_INFINITY);
                assert!(finite, "{}: {name} is not finite", op.name);
            }
            assert!(clock.reading().is_some(), "{} is answered without `request.timed`", op.name);
            answered += 1;
        }
        assert!(answered >= 20, "only {answered} ops");
    }

    #[test]
    fn inputs_are_those_of_a_step() {
        let plan = |op: &str, given: &[(&str, &str)]| {
            let given = given.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            Plan::new(op, DType::Bf16, DType::Fp32, &given, "--param ").unwrap()
        };
        let gemm = plan("gemm", &[("M", "2"), ("N", "3"), ("K", "4")]);
        assert_eq!((gemm.bytes, gemm.operations), (2.0 * 20.0 + 4.0 * 6.0, 48.0));
        // Of a table of 50 rows, seven are read.
        let table = plan("embedding", &[("V", "50"), ("D", "8"), ("T", "7")]);
        assert_eq!((table.bytes, table.operations), (2.0 * 56.0 + 4.0 * 7.0 + 4.0 * 56.0, 56.0));
        // Two queries behind three keys each, causal: 4 + 5 pairs a head.
        let heads = [("Hq", "4"), ("Hkv", "2"), ("D", "8"), ("causal", "1")];
        let attention = plan("attention", &[&[("B", "2"), ("T", "2"), ("S", "5")], &heads[..]].concat());
        assert_eq!(attention.operations, 2.0 * f64::from(2 * 4 * 9) * 16.0);
        let integers =
            |plan: &Plan, name: &str| plan.case("", Config::default()).inputs[name].as_i32().unwrap().to_vec();
        assert_eq!(integers(&attention, "q_pos"), [3, 4, 3, 4]);
        assert_eq!(integers(&attention, "kv_len"), [5, 5]);
        let packed = plan("packed_attention", &[&[("B", "2"), ("T", "5"), ("S", "9")], &heads[..]].concat());
        assert_eq!((integers(&packed, "q_start"), integers(&packed, "k_start")), (vec![0, 2, 5], vec![0, 4, 9]));
        assert_eq!(integers(&packed, "q_pos"), [2, 3, 2, 3, 4]);
        let paged = [("B", "2"), ("T", "1"), ("P", "4"), ("Z", "2"), ("C", "2")];
        let paged = plan("paged_attention", &[&paged, &heads[..]].concat());
        assert_eq!((integers(&paged, "page_table"), integers(&paged, "q_pos")), (vec![0, 1, 2, 3], vec![3, 3]));
    }
}
