//! What a kernel does with numbers: its operands, its accumulator, its roundings, subnormals, the ends of the range,
//! zeros, NaN.
//!
//! Most ops can be made to hand a number on as it is, and some to add a few: so one list of questions serves them all.
//! What an op cannot be asked is left out.

use super::{Finding, Probe};
use samebits_contract::case::Status;
use samebits_contract::number_class::NumberClass;
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};

/// Whether `op` can be made to hand a number on, and so be asked about its arithmetic.
pub fn hands_on(op: &str) -> bool {
    HANDS_ON.contains(&op)
}

/// The ops that can.
pub const HANDS_ON: [&str; 51] = [
    "gemm",
    "gemm_dx",
    "gemm_dw",
    "conv",
    "conv_dx",
    "conv_dw",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_dw",
    "gated_delta_rule",
    "combine",
    "combine_backward",
    "route_backward",
    "attention",
    "attention_backward",
    "index_score",
    "add",
    "mul",
    "scale",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "rope",
    "norm_rope",
    "silu_mul",
    "gelu_mul",
    "silu_mul_backward",
    "gelu_mul_backward",
    "sigmoid_mul",
    "sigmoid_mul_backward",
    "activate_backward",
    "softcap_backward",
    "rope_backward",
    "rms_norm_backward",
    "add_rms_norm_backward",
    "layer_norm_backward",
    "norm_rope_backward",
    "logprob_backward",
    "entropy_backward",
    "fold",
    "token_sum",
    "rms_norm_dw",
    "layer_norm_dw",
    "norm_rope_dw",
    "embedding_dw",
    "nll",
    "policy_loss",
    "batch_loss",
    "group_advantage",
    "adamw",
];

/// Those that sum over tokens.
const TOKEN_SUMS: [&str; 6] =
    ["token_sum", "rms_norm_dw", "layer_norm_dw", "norm_rope_dw", "causal_conv1d_dw", "embedding_dw"];

const CANONICAL: &str = "the canonical NaN";
const NEAREST: &str = "to nearest, ties to even";

/// An answer of one number.
struct Number {
    value: f64,
    bits: u32,
    dtype: DType,
}

impl Number {
    /// In words: zeros with their sign, and a NaN that is not the canonical one by its bits.
    fn text(&self) -> String {
        match NumberClass::of(self.bits, self.dtype) {
            Some(NumberClass::Nan) if self.bits == round::canonical_nan(self.dtype) => CANONICAL.into(),
            Some(NumberClass::Nan) => format!("a NaN, {:#x}", self.bits),
            Some(class @ (NumberClass::PositiveZero | NumberClass::NegativeZero)) => class.name().into(),
            _ => self.value.to_string(),
        }
    }
}

impl Probe<'_> {
    /// What `op` does with numbers, in outputs of this probe's dtype.
    ///
    /// # Errors
    /// When the implementation does not answer.
    pub fn arithmetic(&self, op: &str) -> Result<Vec<Finding>, String> {
        let mut findings = Vec::new();
        if !hands_on(op) {
            return Ok(findings);
        }
        let mut found = |question: &str, found: Option<String>, declared: &str| {
            findings.extend(found.map(|found| Finding {
                question: question.to_string(),
                found,
                declared: declared.to_string(),
            }));
        };
        if self.out == DType::Fp32 {
            found("accumulator", self.accumulator(op)?, "24 bits, as fp32");
            found("rounding of a sum", self.direction_of_sums(op, DType::Fp32)?, NEAREST);
            let declared = if self.dtype == DType::Fp32 { "fused into the sum (fma)" } else { "exact" };
            found("products", self.products(op)?, declared);
        }
        found("operands", self.operands(op)?, "whole");
        found("subnormal operands", self.subnormal_operands(op)?, "read as they are");
        found("subnormal results", self.subnormal_results(op)?, "kept");
        if self.out != DType::Fp32 {
            found("last rounding", self.direction_of_sums(op, self.out)?, NEAREST);
            found("just above a tie", self.above_a_tie(op)?, "up");
        }
        found("overflow", self.overflow(op)?, "to infinity");
        if is_product(op) && self.out == DType::Fp32 {
            // Beyond the range of fp16, and a long sum.
            let term = round::round(60_000.0, self.dtype);
            let exact = term * 2.0;
            let large = self.sum(op, &[term, term])?.map(|sum| match sum.value {
                v if v == exact => "above 65504".to_string(),
                v if v.is_infinite() => "to infinity above 65504".into(),
                _ => "to something else".into(),
            });
            found("a sum beyond fp16 goes", large, "above 65504");
            found("163840 times 10", self.sum(op, &vec![10.0; 163_840])?.map(|sum| sum.text()), "1638400");
        }
        // A sum begins with +0, and that is what -0 is added to.
        let sums = is_product(op)
            || [
                "combine",
                "causal_conv1d_backward",
                "attention",
                "attention_backward",
                "index_score",
                "nll",
                "batch_loss",
            ]
            .contains(&op)
            || TOKEN_SUMS.contains(&op);
        found("-0", self.hand_on(op, -0.0)?.map(|y| y.text()), if sums { "+0" } else { "-0" });
        found("inf", self.hand_on(op, f64::INFINITY)?.map(|y| y.text()), "inf");
        found("NaN", self.hand_on(op, f64::NAN)?.map(|y| y.text()), CANONICAL);
        let infinities = [f64::INFINITY, f64::NEG_INFINITY];
        found("inf - inf", self.sum(op, &infinities)?.map(|sum| sum.text()), CANONICAL);
        found("NaN + 1", self.sum(op, &[f64::NAN, 1.0])?.map(|sum| sum.text()), CANONICAL);
        found("inf + 1", self.sum(op, &[f64::INFINITY, 1.0])?.map(|sum| sum.text()), "inf");
        found("inf * 0", self.product(op, f64::INFINITY, 0.0)?.map(|product| product.text()), CANONICAL);
        Ok(findings)
    }

    /// The smallest term beside 1 that is there after the 1 has gone again. Whatever is added first, the 1 meets the
    /// small term before it goes.
    fn accumulator(&self, op: &str) -> Result<Option<String>, String> {
        // fp16 has no numbers below 2^-24, but products of two.
        let lowest = match (self.dtype, op) {
            (DType::Fp16, op) if is_product(op) || op == "combine" => 36,
            (DType::Fp16, _) => 24,
            _ => 60,
        };
        let mut kept = 0;
        for p in 1..=lowest {
            let term = round::pow2(-p);
            let Some(sum) = self.sum(op, &[1.0, term, -1.0])? else { return Ok(None) };
            if sum.value != term {
                break;
            }
            kept = p;
        }
        Ok(Some(match kept + 1 {
            8 => "8 bits, as bf16".to_string(),
            11 => "11 bits, as fp16 or TF32".into(),
            24 => "24 bits, as fp32".into(),
            53 => "53 bits, as fp64".into(),
            bits if kept == lowest => format!("at least {bits} bits"),
            bits => format!("{bits} bits"),
        }))
    }

    /// How four sums are rounded to `to`; where the op adds nothing, how four numbers are that it hands on.
    fn direction_of_sums(&self, op: &str, to: DType) -> Result<Option<String>, String> {
        let ulp = round::ulp(1.0, to);
        let all: [&[f64]; 4] = [&[1.0, ulp * 0.5], &[1.0, ulp * 0.75], &[-1.0, ulp * -0.75], &[1.0, ulp, ulp * 0.5]];
        let mut values = [0.0; 4];
        for (value, terms) in values.iter_mut().zip(all) {
            let Some(y) = self.sum_or_number(op, terms)? else { return Ok(None) };
            *value = y.value;
        }
        Ok(Some(direction(values, ulp)))
    }

    /// A number just above a tie of the last rounding: rounded to another width first, it is the tie.
    fn above_a_tie(&self, op: &str) -> Result<Option<String>, String> {
        let ulp = round::ulp(1.0, self.out);
        let y = self.sum_or_number(op, &[1.0, ulp * 0.5 * (1.0 + round::pow2(-7))])?;
        Ok(y.map(|y| match y.value {
            v if v == 1.0 + ulp => "up".to_string(),
            1.0 => "down: rounded twice".into(),
            v => v.to_string(),
        }))
    }

    fn products(&self, op: &str) -> Result<Option<String>, String> {
        if !is_product(op) && op != "combine" {
            return Ok(None);
        }
        let pow = round::pow2;
        if self.dtype != DType::Fp32 {
            let x = 1.0 + round::ulp(1.0, self.dtype);
            let square = self.dot(op, &[x], &[x])?;
            return Ok(square.map(|y| if y.value == x * x { "exact" } else { "rounded" }.into()));
        }
        // 2^-24 is what the rounding of a product alone would lose.
        let a = 1.0 + pow(-12);
        let c = -(1.0 + pow(-11));
        let both = (self.dot(op, &[c, a], &[1.0, a])?, self.dot(op, &[a, c], &[a, 1.0])?);
        let (Some(after), Some(before)) = both else { return Ok(None) };
        let how = match (after.value == pow(-24), before.value == pow(-24)) {
            (true, false) | (false, true) => "fused into the sum (fma)",
            (true, true) => "exact in a wider accumulator",
            (false, false) => "rounded before they are added",
        };
        Ok(Some(how.into()))
    }

    /// How much of the mantissa of an operand is read, as far as the output shows it.
    fn operands(&self, op: &str) -> Result<Option<String>, String> {
        let held = |dtype: DType| -round::ulp(1.0, dtype).log2() as i32;
        let bits = held(self.dtype).min(held(self.out));
        let whole = |bits: i32| -> Result<Option<bool>, String> {
            let x = 1.0 + round::pow2(-bits);
            Ok(self.hand_on(op, x)?.map(|y| y.value == x * gain(op)))
        };
        let Some(read) = whole(bits)? else { return Ok(None) };
        if read {
            return Ok(Some("whole".into()));
        }
        let mut kept = 0;
        while kept < bits && whole(kept + 1)? == Some(true) {
            kept += 1;
        }
        let name = match kept {
            10 => ", as TF32",
            7 => ", as bf16",
            _ => "",
        };
        Ok(Some(format!("cut to {kept} bits of mantissa{name}")))
    }

    /// A subnormal operand whose result is not subnormal.
    fn subnormal_operands(&self, op: &str) -> Result<Option<String>, String> {
        let pow = round::pow2;
        let (tiny, back) = if self.dtype == DType::Fp16 { (pow(-20), pow(10)) } else { (pow(-130), pow(120)) };
        let y = self.product(op, tiny, back)?;
        Ok(y.map(|y| if y.value == tiny * back { "read as they are" } else { "not read as they are" }.into()))
    }

    /// A subnormal result: of operands that are normal, where the op multiplies.
    fn subnormal_results(&self, op: &str) -> Result<Option<String>, String> {
        let (a, b) = match (self.out, self.dtype) {
            (DType::Fp16, _) => (round::pow2(-10), round::pow2(-10)),
            (_, DType::Fp16) => return Ok(None),
            _ => (round::pow2(-100), round::pow2(-30)),
        };
        let y = match self.product(op, a, b)? {
            Some(product) => Some((product, a * b)),
            None => self.hand_on(op, a * b / gain(op))?.map(|y| (y, a * b)),
        };
        Ok(y.map(|(y, exact)| match y.value {
            v if v == exact => "kept".to_string(),
            0.0 => "flushed to zero".into(),
            v => v.to_string(),
        }))
    }

    /// Finite operands, and a result beyond the largest number of the output dtype.
    fn overflow(&self, op: &str) -> Result<Option<String>, String> {
        let half = round::overflow(self.out) / 2.0;
        // A mean is divided before or after its sum: who divides first does not overflow.
        let y = match op {
            "attention" => None,
            _ => self.sum(op, &[half, half])?,
        };
        let y = match y {
            Some(sum) => Some(sum),
            None => {
                let largest = round::overflow(self.dtype) - round::ulp(f64::INFINITY, self.dtype);
                let beyond = largest * gain(op) >= half * 2.0 - round::ulp(f64::INFINITY, self.out) / 2.0;
                if beyond { self.hand_on(op, largest)? } else { None }
            }
        };
        Ok(y.map(|y| if y.value == f64::INFINITY { "to infinity".into() } else { format!("to {}", y.value) }))
    }

    /// The sum of `terms`, or their sum handed on where the op adds nothing and its inputs hold it.
    fn sum_or_number(&self, op: &str, terms: &[f64]) -> Result<Option<Number>, String> {
        if let Some(sum) = self.sum(op, terms)? {
            return Ok(Some(sum));
        }
        let gain = gain(op);
        let y = self.hand_on(op, terms.iter().sum::<f64>())?;
        Ok(y.map(|y| Number { value: y.value / gain, ..y }))
    }

    /// The sum of `terms` as `op` adds them; `None` where it adds nothing, or its inputs do not hold them.
    fn sum(&self, op: &str, terms: &[f64]) -> Result<Option<Number>, String> {
        match (op, terms) {
            _ if is_product(op) || op == "combine" => {
                // Terms too small for fp16 are products.
                let small = |term: f64| term != 0.0 && term.abs() < round::pow2(-13) && self.dtype == DType::Fp16;
                let factors: Vec<f64> =
                    terms.iter().map(|&term| if small(term) { round::pow2(-12) } else { 1.0 }).collect();
                let terms: Vec<f64> = terms.iter().zip(&factors).map(|(term, factor)| term / factor).collect();
                if !self.hold(&terms) {
                    return Ok(None);
                }
                self.dot(op, &terms, &factors)
            }
            _ if !self.hold(terms) => Ok(None),
            ("attention", _) => self.mean(terms),
            ("attention_backward", _) => self.values_gradient(terms),
            // Of a score below 0 nothing is left.
            ("index_score", _) => self.heads(terms.iter().map(|&v| if v >= 0.0 { (v, 1.0) } else { (1.0, v) })),
            ("fold", _) => {
                // Halves are added first, the later terms behind the earlier ones. -0 changes no sum.
                let half = terms.len().next_power_of_two() / 2;
                let place = |i: usize| if half == 0 { 0 } else { i / 2 + i % 2 * half };
                let mut x = vec![-0.0; (2 * half).max(1)];
                terms.iter().enumerate().for_each(|(i, term)| x[place(i)] = *term);
                self.one(op, &[], vec![("x", self.make(&[x.len(), 1], &x))], "y")
            }
            _ if TOKEN_SUMS.contains(&op) => self.token_sum(op, terms),
            ("batch_loss", _) => self.one(op, &[], vec![("per_sequence", self.make(&[terms.len()], terms))], "loss"),
            // Lanes of one token each, which fold as the terms of `fold` do.
            ("nll", _) => {
                let half = terms.len().next_power_of_two() / 2;
                let place = |i: usize| if half == 0 { 0 } else { i / 2 + i % 2 * half };
                let mut logprob = vec![0.0; (2 * half).max(1)];
                terms.iter().enumerate().for_each(|(i, term)| logprob[place(i)] = -*term);
                let shape = [1, logprob.len()];
                let count = Tensor::i32(&shape, vec![1; logprob.len()]);
                self.one(op, &[], vec![("logprob", self.make(&shape, &logprob)), ("count", count)], "per_sequence")
            }
            ("add", [a, b]) => {
                self.one(op, &[], vec![("a", self.make(&[1, 1], &[*a])), ("b", self.make(&[1, 1], &[*b]))], "y")
            }
            // The gradients of both outputs, at an element that has a probability of 1 and is not the target.
            ("logprob_backward", [a, b]) => {
                let one = |v: f64| Tensor::fp32(&[1], vec![v as f32]);
                let inputs = vec![
                    ("logits", self.make(&[1, 2], &[0.0; 2])),
                    ("target", Tensor::i32(&[1], vec![1])),
                    ("lse", one(0.0)),
                    ("dlogprob", one(-b)),
                    ("dlse", one(*a)),
                ];
                self.one(op, &[], inputs, "dlogits")
            }
            // Two terms are all there are.
            ("add", [a, b, c]) if self.hold(&[a + b]) && self.dtype == DType::Fp32 => self.sum(op, &[a + b, *c]),
            _ => Ok(None),
        }
    }

    /// `a * b` as `op` multiplies them; `None` where it does not, or its inputs do not hold them.
    fn product(&self, op: &str, a: f64, b: f64) -> Result<Option<Number>, String> {
        if !self.hold(&[a, b]) {
            return Ok(None);
        }
        match op {
            // A sum of k terms of it is k such sums: it is asked for one term alone.
            _ if is_product(op) || ["combine", "causal_conv1d_backward"].contains(&op) => self.dot(op, &[a], &[b]),
            "scale" => self.one(op, &[("factor", b.to_string())], vec![("x", self.make(&[1, 1], &[a]))], "y"),
            "mul" => self.one(op, &[], vec![("a", self.make(&[1, 1], &[a])), ("b", self.make(&[1, 1], &[b]))], "y"),
            "index_score" if a >= 0.0 => self.heads([(a, b)].into_iter()),
            "combine_backward" => {
                let one = |v: f64| self.make(&[1, 1], &[v]);
                let inputs =
                    vec![("x", one(0.0)), ("row", Tensor::i32(&[1, 1], vec![0])), ("weight", one(b)), ("dy", one(a))];
                self.one(op, &[], inputs, "dx")
            }
            // Where the sigmoid is 1.
            "silu_mul" | "gelu_mul" if b >= 64.0 => {
                self.one(op, &[], vec![("gate", self.make(&[1, 1], &[b])), ("up", self.make(&[1, 1], &[a]))], "y")
            }
            "sigmoid_mul" if b == 1.0 => {
                self.one(op, &[], vec![("gate", self.make(&[1, 1], &[64.0])), ("x", self.make(&[1, 1], &[a]))], "y")
            }
            "sigmoid_mul_backward" if b == 1.0 => {
                let one = |v: f64| self.make(&[1, 1], &[v]);
                self.one(op, &[], vec![("gate", one(64.0)), ("x", one(1.0)), ("dy", one(a))], "dx")
            }
            // Where the sigmoid and the slope are 1.
            "silu_mul_backward" | "gelu_mul_backward" => {
                let one = |v: f64| self.make(&[1, 1], &[v]);
                self.one(op, &[], vec![("gate", one(64.0)), ("up", one(a)), ("dy", one(b))], "dgate")
            }
            // Where the slope, of the square of the positive part, is the other factor.
            "activate_backward" if b >= 0.0 && self.hold(&[b / 2.0]) => {
                let inputs = vec![("x", self.make(&[1, 1], &[b / 2.0])), ("dy", self.make(&[1, 1], &[a]))];
                self.one(op, &[("kind", "relu2".into())], inputs, "dx")
            }
            _ => Ok(None),
        }
    }

    /// `v` handed on by `op`, times [`gain`]; `None` where its inputs do not hold it.
    fn hand_on(&self, op: &str, v: f64) -> Result<Option<Number>, String> {
        if !self.hold(&[v]) {
            return Ok(None);
        }
        let make = |shape: &[usize], values: &[f64]| self.make(shape, values);
        let int = |value: i32| Tensor::i32(&[1], vec![value]);
        // A norm without eps of equal elements is 1, and at position 0 nothing is rotated: beside -0 stands what adds -0.
        let eps = [("eps", "0".to_string())];
        match op {
            _ if is_product(op) || ["combine", "causal_conv1d_backward"].contains(&op) => self.dot(op, &[v], &[1.0]),
            _ if ["fold", "nll", "batch_loss"].contains(&op) || TOKEN_SUMS.contains(&op) => self.sum(op, &[v]),
            "attention" => self.mean(&[v]),
            "attention_backward" => self.values_gradient(&[v]),
            "add" | "index_score" | "logprob_backward" => self.sum(op, &[v, -0.0]),
            // The gradient of lse, at an element that has a probability of 1.
            "entropy_backward" => {
                let one = |v: f64| Tensor::fp32(&[1], vec![v as f32]);
                let inputs = vec![
                    ("logits", make(&[1, 1], &[0.0])),
                    ("entropy", one(0.0)),
                    ("lse", one(0.0)),
                    ("dentropy", one(0.0)),
                    ("dlse", one(v)),
                ];
                self.one(op, &[], inputs, "dlogits")
            }
            "scale" | "silu_mul_backward" | "gelu_mul_backward" | "activate_backward" => self.product(op, v, 1.0),
            "softcap_backward" => {
                self.one(op, &[], vec![("x", make(&[1, 1], &[0.0])), ("dy", make(&[1, 1], &[v]))], "dx")
            }
            // Where the slope of a sigmoid is a quarter.
            "route_backward" => {
                let inputs = vec![
                    ("logits", make(&[1, 1], &[0.0])),
                    ("rank", Tensor::i32(&[1, 1], vec![0])),
                    ("dweight", Tensor::fp32(&[1, 1], vec![v as f32])),
                ];
                self.one(op, &[("scoring", "sigmoid".into())], inputs, "dlogits")
            }
            // Where the ratio is 1.
            "policy_loss" => {
                let zero = || make(&[1, 1], &[0.0]);
                let (advantage, count) = (make(&[1], &[-v]), Tensor::i32(&[1, 1], vec![1]));
                let inputs =
                    vec![("logprob", zero()), ("old_logprob", zero()), ("advantage", advantage), ("count", count)];
                self.one(op, &[], inputs, "dlogprob")
            }
            // A number beside its opposite, whose mean is 0; that of infinities is none.
            "group_advantage" if v.is_infinite() => Ok(None),
            "group_advantage" => {
                self.one(op, &[("divide_by", "one".into())], vec![("reward", make(&[1, 2], &[v, -v]))], "advantage")
            }
            // A step of length 0.
            "adamw" => {
                let one = |v: f64| make(&[1, 1], &[v]);
                let inputs = vec![("w", one(v)), ("m", one(0.0)), ("v", one(1.0)), ("g", one(0.0))];
                self.one(op, &[("lr", "0".into())], inputs, "rounded")
            }
            "embedding" => self.one(op, &[], vec![("w", make(&[1, 1], &[v])), ("tokens", int(0))], "y"),
            "rms_norm" => self.one(op, &eps, vec![("x", make(&[1, 4], &[1.0; 4])), ("w", make(&[4], &[v; 4]))], "y"),
            "add_rms_norm" => {
                let (x, residual) = (make(&[1, 4], &[1.0; 4]), make(&[1, 4], &[0.0; 4]));
                self.one(op, &eps, vec![("x", x), ("residual", residual), ("w", make(&[4], &[v; 4]))], "y")
            }
            "layer_norm" => self.one(op, &eps, vec![("x", make(&[1, 2], &[1., -1.])), ("w", make(&[2], &[v; 2]))], "y"),
            // An infinity takes all of its row, and itself is NaN. Beside a row without eps whose scale is 1, v stands where x
            // is 0.
            "rms_norm_backward" | "layer_norm_backward" | "norm_rope_backward" if v.is_infinite() => Ok(None),
            "rms_norm_backward" => {
                let (x, dy) = (make(&[1, 4], &[0.0, 0.0, 0.0, 2.0]), make(&[1, 4], &[v, v, v, 0.0]));
                self.one(op, &eps, vec![("x", x), ("w", make(&[4], &[1.0; 4])), ("dy", dy)], "dx")
            }
            "norm_rope_backward" => {
                let (x, dy) = (make(&[1, 1, 4], &[0.0, 2.0, 0.0, 0.0]), make(&[1, 1, 4], &[v, 0.0, -1.0, 0.0]));
                self.one(op, &eps, vec![("x", x), ("w", make(&[4], &[1.0; 4])), ("dy", dy), ("pos", int(0))], "dx")
            }
            "layer_norm_backward" => {
                let x = make(&[1, 8], &[0.0, 0.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0]);
                let dy = make(&[1, 8], &[v, -v, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
                self.one(op, &eps, vec![("x", x), ("dy", dy)], "dx")
            }
            // A gradient of -0 changes nothing that is added to it.
            "add_rms_norm_backward" => {
                let (sum, dy) = (make(&[1, 4], &[1.0; 4]), make(&[1, 4], &[-0.0; 4]));
                let inputs =
                    vec![("sum", sum), ("w", make(&[4], &[1.0; 4])), ("dy", dy), ("dsum", make(&[1, 4], &[v; 4]))];
                self.one(op, &eps, inputs, "dx")
            }
            "rope" => self.one(op, &[], vec![("x", make(&[1, 1, 2], &[v, 1.0])), ("pos", int(0))], "y"),
            "rope_backward" => self.one(op, &[], vec![("dy", make(&[1, 1, 2], &[v, -1.0])), ("pos", int(0))], "dx"),
            "norm_rope" => {
                let (x, w) = (make(&[1, 1, 2], &[1.0; 2]), make(&[2], &[v, 1.0]));
                self.one(op, &eps, vec![("x", x), ("w", w), ("pos", int(0))], "y")
            }
            _ => self.product(op, v, gain(op)),
        }
    }

    /// The score of a key by heads of these scores and weights.
    fn heads(&self, heads: impl Iterator<Item = (f64, f64)>) -> Result<Option<Number>, String> {
        let (scores, weights): (Vec<f64>, Vec<f32>) = heads.map(|(score, weight)| (score, weight as f32)).unzip();
        let inputs = vec![
            ("q", self.make(&[1, scores.len(), 1], &scores)),
            ("k", self.make(&[1, 1], &[1.0])),
            ("weight", Tensor::fp32(&[1, weights.len()], weights)),
        ];
        self.one("index_score", &[], inputs, "score")
    }

    /// The sum of the products of `x` and `w`, with `x` among the activations.
    fn dot(&self, op: &str, x: &[f64], w: &[f64]) -> Result<Option<Number>, String> {
        let k = x.len();
        let (inputs, output) = match op {
            "combine" => {
                let row = Tensor::i32(&[1, k], (0..k as i32).collect());
                (vec![("x", self.make(&[k, 1], x)), ("weight", self.make(&[1, k], w)), ("row", row)], "y")
            }
            // All terms but the last stand in the state.
            "causal_conv1d" => {
                let state: Vec<f32> = x[..k - 1].iter().map(|v| *v as f32).collect();
                let mut inputs = vec![("x", self.make(&[1, 1, 1], &x[k - 1..])), ("w", self.make(&[1, k], w))];
                if k > 1 {
                    inputs.push(("state", Tensor::fp32(&[1, k - 1, 1], state)));
                }
                (inputs, "y")
            }
            // The first row meets the last tap first.
            "causal_conv1d_backward" => {
                let w: Vec<f64> = w.iter().rev().copied().collect();
                (vec![("dy", self.make(&[1, k, 1], x)), ("w", self.make(&[1, k], &w))], "dx")
            }
            // A query of a state that its token neither changes nor forgets.
            "gated_delta_rule" => {
                let zeros = |shape: &[usize]| Tensor::fp32(shape, vec![0.0; shape.iter().product()]);
                let (none, state) = (vec![0.0; k], w.iter().map(|v| *v as f32).collect());
                let inputs = vec![
                    ("q", self.make(&[1, 1, 1, k], x)),
                    ("k", self.make(&[1, 1, 1, k], &none)),
                    ("v", self.make(&[1, 1, 1, 1], &[0.0])),
                    ("g", zeros(&[1, 1, 1, 1])),
                    ("beta", zeros(&[1, 1, 1])),
                    ("state", Tensor::fp32(&[1, 1, k, 1], state)),
                ];
                return self.one(op, &[("scale", "1".to_string())], inputs, "y");
            }
            "gemm_dx" => (vec![("dy", self.make(&[1, k], x)), ("w", self.make(&[k, 1], w))], "dx"),
            "gemm_dw" => (vec![("x", self.make(&[k, 1], x)), ("dy", self.make(&[k, 1], w))], "dw"),
            // Channels of one place and one tap, or images of them.
            "conv" => (vec![("x", self.make(&[1, k, 1, 1, 1], x)), ("w", self.make(&[1, k, 1, 1, 1], w))], "y"),
            "conv_dx" => (vec![("dy", self.make(&[1, k, 1, 1, 1], x)), ("w", self.make(&[k, 1, 1, 1, 1], w))], "dx"),
            "conv_dw" => {
                let carry = Tensor::fp32(&[1; 5], vec![0.0]);
                let (x, dy) = (self.make(&[k, 1, 1, 1, 1], x), self.make(&[k, 1, 1, 1, 1], w));
                (vec![("x", x), ("dy", dy), ("carry", carry)], "dw")
            }
            _ => (vec![("x", self.make(&[1, k], x)), ("w", self.make(&[1, k], w))], "y"),
        };
        self.one(op, &[], inputs, output)
    }

    /// The sum of `terms` over tokens of one chain, the first element of each. A norm without eps of equal elements is 1, and
    /// at position 0 nothing is turned back.
    fn token_sum(&self, op: &str, terms: &[f64]) -> Result<Option<Number>, String> {
        // Every 64th token is one of the chain.
        let apart = if op == "embedding_dw" { 1 } else { 64 };
        let width = if ["token_sum", "causal_conv1d_dw"].contains(&op) { 1 } else { 2 };
        let tokens = (terms.len() - 1) * apart + 1;
        let mut dy = vec![0.0; tokens * width];
        terms.iter().enumerate().for_each(|(i, term)| dy[i * apart * width] = *term);
        let shape = if op == "norm_rope_dw" { vec![tokens, 1, width] } else { vec![tokens, width] };
        let norm = |second: f64| self.make(&shape, &[1.0, second].repeat(tokens));
        let (rows, zeros) = (self.make(&shape, &dy), Tensor::i32(&[tokens], vec![0; tokens]));
        let eps = [("eps", "0".to_string())];
        match op {
            "token_sum" => self.one(op, &[], vec![("x", rows)], "sum"),
            "embedding_dw" => {
                let carry = Tensor::fp32(&[1, 2], vec![0.0; 2]);
                self.one(op, &[], vec![("dy", rows), ("tokens", zeros), ("carry", carry)], "dw")
            }
            "causal_conv1d_dw" => {
                let (x, dy) = (self.make(&[1, tokens, 1], &vec![1.0; tokens]), self.make(&[1, tokens, 1], &dy));
                self.one(op, &[], vec![("x", x), ("dy", dy), ("carry", Tensor::fp32(&[64, 1, 1], vec![0.0; 64]))], "dw")
            }
            "layer_norm_dw" => self.one(op, &eps, vec![("x", norm(-1.0)), ("dy", rows)], "dw"),
            "norm_rope_dw" => self.one(op, &eps, vec![("x", norm(1.0)), ("dy", rows), ("pos", zeros)], "dw"),
            _ => self.one(op, &eps, vec![("x", norm(1.0)), ("dy", rows)], "dw"),
        }
    }

    /// The sum of `terms` by attention: values under equal weights, as many as a power of two, times their number.
    fn mean(&self, terms: &[f64]) -> Result<Option<Number>, String> {
        let keys = terms.len().next_power_of_two();
        let mut values = terms.to_vec();
        values.resize(keys, 0.0);
        let int = |value: usize| Tensor::i32(&[1], vec![value as i32]);
        let inputs = vec![
            ("q", self.make(&[1, 1, 1, 16], &[0.0; 16])),
            ("k", self.make(&[1, keys, 1, 16], &vec![0.0; keys * 16])),
            ("v", self.make(&[1, keys, 1, 1], &values)),
            ("q_pos", Tensor::i32(&[1, 1], vec![keys as i32 - 1])),
            ("kv_len", int(keys)),
        ];
        let mean = self.one("attention", &[], inputs, "out")?;
        Ok(mean.map(|mean| Number { value: mean.value * keys as f64, ..mean }))
    }

    /// dv of one key that each query sees with a weight of 1: a sum of their gradients.
    fn values_gradient(&self, terms: &[f64]) -> Result<Option<Number>, String> {
        let queries = terms.len();
        let none = |rows: usize| self.make(&[1, rows, 1, 1], &vec![0.0; rows]);
        let inputs = vec![
            ("q", none(queries)),
            ("k", none(1)),
            ("v", none(1)),
            ("out", none(queries)),
            ("lse", Tensor::fp32(&[1, queries, 1], vec![0.0; queries])),
            ("dout", self.make(&[1, queries, 1, 1], terms)),
            ("q_pos", Tensor::i32(&[1, queries], vec![0; queries])),
            ("kv_len", Tensor::i32(&[1], vec![1])),
        ];
        self.one("attention_backward", &[], inputs, "dv")
    }

    /// The first number of `output`; `None` where the request is not offered.
    fn one(
        &self,
        op: &str,
        params: &[(&str, String)],
        inputs: Vec<(&str, Tensor)>,
        output: &str,
    ) -> Result<Option<Number>, String> {
        let answer = self.run(op, self.out, params, inputs);
        match answer.status {
            Status::Ok => {}
            Status::Unsupported => return Ok(None),
            Status::Error => return Err(answer.reason),
        }
        let y = answer.outputs.get(output).filter(|y| !y.is_empty());
        let y = y.ok_or_else(|| format!("the answer lacks `{output}`"))?;
        // In another dtype than was asked for it is an answer as well, and its roundings are not the declared ones.
        Ok(Some(Number { value: y.value(0), bits: y.bits(0), dtype: y.dtype() }))
    }

    /// Whether the inputs hold these numbers as they are.
    fn hold(&self, values: &[f64]) -> bool {
        values.iter().all(|v| v.is_nan() || round::round(*v, self.dtype) == *v)
    }

    /// A tensor of the inputs' dtype. A NaN is not the canonical one.
    fn make(&self, shape: &[usize], values: &[f64]) -> Tensor {
        let bits = |v: f64| {
            if v.is_nan() { round::canonical_nan(self.dtype) | 1 } else { round::to_bits(v, self.dtype) }
        };
        let bytes: Vec<u8> = values.iter().flat_map(|&v| bits(v).to_le_bytes()[..self.dtype.size()].to_vec()).collect();
        Tensor::from_bytes(self.dtype, shape, &bytes).expect("as many bytes as the shape takes")
    }
}

/// Whether an op is a matrix product.
fn is_product(op: &str) -> bool {
    ["gemm", "gemm_dx", "gemm_dw", "conv", "conv_dx", "conv_dw", "causal_conv1d", "gated_delta_rule"].contains(&op)
}

/// What an op multiplies the number with that it hands on, a power of two: where the gate is that, its sigmoid is 1.
fn gain(op: &str) -> f64 {
    match op {
        "silu_mul" | "gelu_mul" => 64.0,
        "route_backward" => 0.25,
        _ => 1.0,
    }
}

/// How `1 + ulp/2`, `1 + 3ulp/4`, `-1 - 3ulp/4` and `1 + ulp + ulp/2` were rounded to multiples of `ulp`.
fn direction([tie, above, below, odd]: [f64; 4], ulp: f64) -> String {
    let one = |v: f64| v == 1.0;
    match () {
        _ if one(tie) && above == 1.0 + ulp && below == -1.0 - ulp && odd == 1.0 + 2.0 * ulp => {
            "to nearest, ties to even"
        }
        _ if tie == 1.0 + ulp && above == 1.0 + ulp && below == -1.0 - ulp => "to nearest, ties away from zero",
        _ if one(tie) && above == 1.0 + ulp && below == -1.0 - ulp => "to nearest, ties toward zero",
        _ if one(tie) && one(above) && below == -1.0 => "toward zero",
        _ if tie == 1.0 + ulp && above == 1.0 + ulp && below == -1.0 => "up",
        _ if one(tie) && one(above) && below == -1.0 - ulp => "down",
        _ if tie == 1.0 + ulp * 0.5 => "not at this place: more bits are kept",
        _ => "in no direction that is known",
    }
    .into()
}
