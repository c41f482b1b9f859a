//! The text of the kernels, which is part of the program, and the ways to build it.

/// One `.cu` file.
#[derive(Debug)]
pub struct Unit {
    /// Its stem.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
    /// Its kernels.
    pub kernels: &'static [&'static str],
    /// Whether the type of its outputs depends on the build; other units are built for fp32.
    pub has_out: bool,
    /// Whether it holds a matrix product, which reads f32 by the TF32 policy.
    pub has_product: bool,
}

macro_rules! unit {
    ($folder:literal, $name:literal, $has_out:literal, $has_product:literal, $kernels:expr) => {
        Unit {
            name: $name,
            source: include_str!(concat!("../../", $folder, "/", $name, ".cu")),
            kernels: &$kernels,
            has_out: $has_out,
            has_product: $has_product,
        }
    };
}

/// Every unit.
pub static UNITS: [Unit; 19] = [
    unit!("elementwise", "add", true, false, ["add"]),
    unit!("norm", "add_rms_norm", true, false, ["add_rms_norm_bf16", "add_rms_norm_fp16", "add_rms_norm_fp32"]),
    unit!("index", "argmax", false, false, ["argmax"]),
    unit!(
        "attention",
        "attention",
        true,
        true,
        [
            "attention_scores4",
            "attention_values4",
            "attention_join4",
            "attention_scores8",
            "attention_values8",
            "attention_join8",
            "attention_scores16",
            "attention_values16",
            "attention_join16"
        ]
    ),
    unit!("moe", "combine", true, false, ["combine"]),
    unit!("index", "copy_rows", false, false, ["copy_rows"]),
    unit!("index", "embedding", true, false, ["embedding"]),
    unit!("elementwise", "gelu_mul", true, false, ["gelu_mul"]),
    unit!(
        "gemm",
        "gemm",
        true,
        true,
        [
            "gemm_tile128",
            "gemm_tile64",
            "gemm_skinny1",
            "gemm_skinny4",
            "gemm_skinny8",
            "gemm_skinny16",
            "gemm_experts"
        ]
    ),
    unit!("logprob", "linear_logprob", false, false, ["linear_logprob_add", "linear_logprob_end"]),
    unit!("logprob", "logprob", false, false, ["logprob", "logprob_unscaled"]),
    unit!("norm", "norm_rope", true, false, ["norm_rope"]),
    unit!("norm", "rms_norm", true, false, ["rms_norm_short", "rms_norm_middle", "rms_norm_wide", "rms_norm_long"]),
    unit!("rope", "rope", true, false, ["rope"]),
    unit!("moe", "route", false, false, ["route"]),
    unit!("elementwise", "scale", true, false, ["scale"]),
    unit!("elementwise", "silu_mul", true, false, ["silu_mul"]),
    unit!("elementwise", "softcap", true, false, ["softcap"]),
    unit!("logprob", "softmax", true, false, ["softmax"]),
];

macro_rules! headers {
    ($($name:literal),*) => {
        [$(($name, include_str!($name))),*]
    };
}

/// What the units include: names and texts.
pub static HEADERS: [(&str, &str); 9] = headers![
    "denominator.cuh",
    "element.cuh",
    "elementwise.cuh",
    "machine.cuh",
    "math.cuh",
    "rank.cuh",
    "reduce.cuh",
    "rotate.cuh",
    "scale.cuh"
];

/// A unit and what its text is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Build {
    /// Name of the unit.
    pub unit: &'static str,
    /// Type of the float inputs: `bf16`, `fp16` or `fp32`.
    pub input: &'static str,
    /// Type of the float outputs.
    pub output: &'static str,
    /// Whether f32 operands are rounded to TF32.
    pub tf32: bool,
}

impl Build {
    /// The unit's text.
    ///
    /// # Panics
    /// When there is no such unit.
    pub fn source(&self) -> &'static Unit {
        UNITS.iter().find(|unit| unit.name == self.unit).expect("builds name units")
    }

    /// The options by which the text learns of the types, for any C++ compiler.
    pub fn definitions(&self) -> Vec<String> {
        let mut definitions = vec![format!("-DIN={}", self.input), format!("-DOUT={}", self.output)];
        if self.tf32 {
            definitions.push("-DTF32=1".into());
        }
        definitions
    }
}
