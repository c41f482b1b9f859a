//! The table of workloads: what is timed beside whom, and what is asked of the times.

use crate::ceilings::Ceiling;
use crate::measure::{Params, drawn};
use samebits_contract::case::{Case, Config};
use samebits_contract::tensor::{DType, Tensor};
use samebits_ops::Element;
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

impl Workload {
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
        for (field, limits) in [("at_least", &self.at_least), ("memory_below", &self.memory_below)] {
            for (peer, &limit) in limits {
                above_zero(limit).map_err(|e| format!("{field}.{peer}: {e}"))?;
            }
        }
        if let Some(share) = self.share {
            above_zero(share).map_err(|e| format!("share: {e}"))?;
            if self.share_of.is_none() {
                return Err("share: say of what, share_of = \"read\", \"copy\" or \"peak\"".into());
            }
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
        let mut params = Params::of_workload(&self.op, given);
        let plan = Plan::new(&self.op, self.dtype().size() as f64, &mut params)?;
        params.finish()?;
        let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let total = plan.inputs.iter().try_fold(0usize, |sum, (_, input)| match input {
            Input::Float(shape) | Input::Narrow(shape, _) => {
                sum.checked_add(elements(shape)?.checked_mul(self.dtype().size())?)
            }
            Input::Whole(_, values) => sum.checked_add(4 * values.len()),
        });
        match total {
            Some(total) if total <= 4 << 30 => Ok(plan),
            _ => Err("params: the inputs take more than 4 GiB".into()),
        }
    }
}

/// What an op is given.
enum Input {
    /// Floats of this shape, drawn from [-1, 1).
    Float(Vec<usize>),
    /// The same, from [-limit, limit).
    Narrow(Vec<usize>, f32),
    /// These values in this shape.
    Whole(Vec<usize>, Vec<i32>),
}

/// The inputs of a workload, not drawn yet, and how much it has to do.
pub struct Plan {
    inputs: Vec<(&'static str, Input)>,
    /// Parameters on the wire.
    params: BTreeMap<String, String>,
    /// Bytes that must be read and written at least once.
    pub bytes: f64,
    /// Multiplications and additions, a fused pair counted as two; for ops that only move data, elements.
    pub operations: f64,
}

impl Plan {
    /// `size` is that of an element in bytes. Bytes and operations are those of `measure::work`.
    fn new(op: &str, size: f64, p: &mut Params) -> Result<Plan, String> {
        use Input::{Float, Narrow, Whole};
        let mut extent = |name: &str| match p.extent(name)? {
            extent if extent <= 1 << 24 => Ok(extent),
            extent => Err(format!("params.{name}={extent}: use at most {}", 1 << 24)),
        };
        let mut wire = BTreeMap::new();
        let count = |shape: &[usize]| shape.iter().map(|&d| d as f64).product::<f64>();
        let (inputs, bytes, operations) = match op {
            "gemm" => {
                let (m, n, k) = (extent("M")?, extent("N")?, extent("K")?);
                let bytes = size * (count(&[m, k]) + count(&[n, k]) + count(&[m, n]));
                (vec![("x", Float(vec![m, k])), ("w", Float(vec![n, k]))], bytes, 2.0 * count(&[m, n, k]))
            }
            "linear_logprob" => {
                let (m, k, v) = (extent("M")?, extent("K")?, extent("V")?);
                let target = Whole(vec![m], (0..m).map(|row| (row % v) as i32).collect());
                // Logits that spread as a model's do, by 8/3. Those of [-1, 1) spread by 10 for K = 896, and a row's
                // range is then beyond what one pass sums.
                let w = Narrow(vec![v, k], 8.0 / (k as f32).sqrt());
                let inputs = vec![("x", Float(vec![m, k])), ("w", w), ("target", target)];
                (inputs, size * (count(&[m, k]) + count(&[v, k])), 2.0 * count(&[m, v, k]))
            }
            "attention" => {
                let (batch, queries, keys) = (extent("B")?, extent("T")?, extent("S")?);
                let (q_heads, kv_heads, dim) = (extent("Hq")?, extent("Hkv")?, extent("D")?);
                if !q_heads.is_multiple_of(kv_heads) {
                    return Err(format!("params.Hq={q_heads}: use a multiple of Hkv={kv_heads}"));
                }
                // The queries are the last ones of the sequence.
                let first = keys.checked_sub(queries).ok_or(format!("params.T={queries}: use at most S={keys}"))?;
                let causal = match p.take("causal", Some(1u8))? {
                    causal @ (0 | 1) => causal == 1,
                    causal => return Err(format!("params.causal={causal}: use 0 or 1")),
                };
                wire.insert("causal".to_string(), u8::from(causal).to_string());
                let seen = |t: usize| if causal { first + t + 1 } else { keys };
                let pairs = count(&[batch, q_heads]) * (0..queries).map(|t| seen(t) as f64).sum::<f64>();
                let q_pos = (0..batch).flat_map(|_| first as i32..keys as i32).collect();
                let (q, k) = (vec![batch, queries, q_heads, dim], vec![batch, keys, kv_heads, dim]);
                let bytes = size * 2.0 * (count(&q) + count(&k));
                let inputs = vec![
                    ("q", Float(q)),
                    ("k", Float(k.clone())),
                    ("v", Float(k)),
                    ("q_pos", Whole(vec![batch, queries], q_pos)),
                    ("kv_len", Whole(vec![batch], vec![keys as i32; batch])),
                ];
                (inputs, bytes, 4.0 * pairs * dim as f64)
            }
            "logprob" => {
                let (rows, vocab) = (extent("R")?, extent("V")?);
                let target = Whole(vec![rows], (0..rows).map(|row| (row % vocab) as i32).collect());
                let n = count(&[rows, vocab]);
                (vec![("logits", Float(vec![rows, vocab])), ("target", target)], size * n, 2.0 * n)
            }
            "rope" => {
                let (tokens, heads, dim) = (extent("T")?, extent("H")?, extent("D")?);
                if !dim.is_multiple_of(2) {
                    return Err(format!("params.D={dim}: use an even number, RoPE turns pairs"));
                }
                let pos = Whole(vec![tokens], (0..tokens as i32).collect());
                let n = count(&[tokens, heads, dim]);
                (vec![("x", Float(vec![tokens, heads, dim])), ("pos", pos)], 2.0 * size * n, 3.0 * n)
            }
            "embedding" => {
                let (vocab, dim, tokens) = (extent("V")?, extent("D")?, extent("T")?);
                let ids = Whole(vec![tokens], (0..tokens).map(|t| (t * 7919 % vocab) as i32).collect());
                let n = count(&[tokens, dim]);
                (vec![("w", Float(vec![vocab, dim])), ("tokens", ids)], 2.0 * size * n, n)
            }
            "rms_norm" | "add_rms_norm" | "softmax" | "silu_mul" | "add" | "argmax" => {
                let (rows, n) = (extent("R")?, extent("N")?);
                let table = || Float(vec![rows, n]);
                let w = Float(vec![n]);
                // Tables read and written, and operations per element.
                let (inputs, moved, each) = match op {
                    "rms_norm" => (vec![("x", table()), ("w", w)], 2.0, 4.0),
                    "add_rms_norm" => (vec![("x", table()), ("residual", table()), ("w", w)], 4.0, 5.0),
                    "softmax" => (vec![("x", table())], 2.0, 2.0),
                    "silu_mul" => (vec![("gate", table()), ("up", table())], 3.0, 2.0),
                    "add" => (vec![("a", table()), ("b", table())], 3.0, 1.0),
                    _ => (vec![("x", table())], 1.0, 1.0),
                };
                (inputs, moved * size * count(&[rows, n]), each * count(&[rows, n]))
            }
            _ => return Err(format!("op: no inputs are known for `{op}`; use one of {}", OPS.join(", "))),
        };
        Ok(Plan { inputs, params: wire, bytes, operations })
    }
}

/// The ops whose inputs [`Plan`] knows.
const OPS: [&str; 12] = [
    "gemm",
    "linear_logprob",
    "attention",
    "logprob",
    "rope",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "softmax",
    "silu_mul",
    "add",
    "argmax",
];

impl Plan {
    /// The question for an implementation. Inputs are drawn uniformly, the same on every machine.
    pub fn case(self, workload: &Workload, threads: usize) -> Case {
        let dtype = workload.dtype();
        let draw = |seed: u64, shape: &[usize], limit: f32| {
            // Far apart, so that two inputs do not begin alike.
            let (seed, len) = ((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15), shape.iter().product());
            match dtype {
                DType::Bf16 => Tensor::bf16(shape, scaled(seed, len, limit)),
                DType::Fp16 => Tensor::fp16(shape, scaled(seed, len, limit)),
                _ => Tensor::fp32(shape, scaled(seed, len, limit)),
            }
        };
        let inputs = self.inputs.into_iter().enumerate().map(|(index, (name, input))| {
            let tensor = match input {
                Input::Float(shape) => draw(index as u64, &shape, 1.0),
                Input::Narrow(shape, limit) => draw(index as u64, &shape, limit),
                Input::Whole(shape, values) => Tensor::i32(&shape, values),
            };
            (name.to_string(), tensor)
        });
        Case {
            name: workload.name.clone(),
            op: workload.op.clone(),
            out: dtype,
            params: self.params,
            inputs: inputs.collect(),
            config: Config { threads: Some(threads), ..Config::default() },
        }
    }
}

/// The values of [`drawn`], each times `limit`.
fn scaled<T: Element>(seed: u64, len: usize, limit: f32) -> Vec<T> {
    let mut values = drawn::<T>(seed, len);
    if limit != 1.0 {
        values.iter_mut().for_each(|value| *value = T::narrow(value.widen() * limit));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::implementation::cpu::CpuImplementation;
    use crate::measure::work;
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
            ("op = \"sofmax\"\nparams = {}".into(), "op: no inputs are known for `sofmax`; use one of gemm"),
            (format!("{softmax}dtype = \"fp8\""), "dtype: "),
            (format!("{softmax}dtype = \"fp32\""), "dtype: fp32 has no line in [agree]"),
            (format!("{softmax}at_least = {{ torch = 0 }}"), "at_least.torch: 0 is not greater than 0"),
            (format!("{softmax}memory_below = {{ torch = nan }}"), "memory_below.torch: NaN"),
            (format!("{softmax}share = 0.5"), "share_of"),
            (format!("{softmax}share_of = \"write\""), "unknown variant `write`"),
            (format!("{softmax}[[workload]]\nname = \"a/b\"\n{softmax}"), "the name stands twice"),
            ("op = \"rope\"\nparams = { T = 1, H = 1, D = 3 }".into(), "params.D=3: use an even number"),
            (
                "op = \"attention\"\nparams = { B = 1, T = 2, S = 1, Hq = 1, Hkv = 1, D = 1 }".into(),
                "params.T=2: use at most S=1",
            ),
            (
                "op = \"attention\"\nparams = { B = 1, T = 1, S = 1, Hq = 3, Hkv = 2, D = 1 }".into(),
                "params.Hq=3: use a multiple of Hkv=2",
            ),
        ] {
            let said = error(&one(&more));
            assert!(said.contains(part), "`{part}` is not in: {said}");
        }
        assert!(error("workload = []").contains("agree"));
        assert!(error("agree = {}\nworkload = []").contains("[[workload]]"));
        assert!(error(&one(softmax).replace("a/b", "a")).contains("<group>/<what>"));
    }

    /// Every op that there are inputs for is answered and does as much as `samebits measure --op` says.
    #[test]
    fn plans_fit_the_ops() {
        let cpu = Cpu::best();
        let implementation = CpuImplementation::new(cpu.clone());
        let mut answered = 0;
        for op in OPS {
            let params = match op {
                "gemm" => "M = 2, N = 3, K = 4",
                "linear_logprob" => "M = 2, K = 3, V = 4",
                "attention" => "B = 2, T = 3, S = 5, Hq = 4, Hkv = 2, D = 8",
                "logprob" => "R = 3, V = 2",
                "rope" => "T = 3, H = 2, D = 4",
                "embedding" => "V = 5, D = 3, T = 7",
                _ => "R = 3, N = 5",
            };
            let text = format!("agree.bf16 = 1\n[[workload]]\nname = \"a/b\"\nop = \"{op}\"\nparams = {{ {params} }}");
            let workload = Table::parse(&text).unwrap().workload.remove(0);
            let plan = workload.plan().unwrap();
            let given = params.split(", ").map(|p| p.split_once(" = ").unwrap());
            let given = given.map(|(name, value)| (name.into(), value.into())).collect();
            let known = work(&cpu, DType::Bf16, DType::Bf16, Params::new(op, given));
            let Ok(known) = known else { continue };
            assert_eq!((plan.bytes, plan.operations), (known.bytes as f64, known.operations as f64), "{op}");
            let clock = Clock::new(1);
            let answer = implementation.answer(&plan.case(&workload, 1), Some(&clock));
            assert_eq!(answer.status, Status::Ok, "{op}: {}", answer.reason);
            assert!(clock.reading().is_some(), "{op} is answered without `request.timed`");
            answered += 1;
        }
        assert!(answered >= 10, "only {answered} ops");
    }
}
