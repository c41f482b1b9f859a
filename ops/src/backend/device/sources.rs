//! The text of the kernels, which is part of the program, and the ways to build it.

use super::StructLayout;
use crate::element::Stored;

/// One `.cu` file.
#[derive(Debug)]
#[non_exhaustive]
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
    /// The structs that its kernels take by value, as the host lays them out.
    pub structs: &'static [StructLayout],
}

impl Unit {
    /// A unit without a product, whose outputs have a type of their own.
    pub const fn of(name: &'static str, source: &'static str, kernels: &'static [&'static str]) -> Unit {
        Unit { name, source, kernels, has_out: true, has_product: false, structs: &[] }
    }
}

macro_rules! headers {
    ($($name:literal),*) => {
        [$(($name, include_str!($name))),*]
    };
}

/// What the units include: names and texts.
pub static HEADERS: [(&str, &str); 28] = headers![
    "block.cuh",
    "clamped.cuh",
    "columns.cuh",
    "delta.cuh",
    "denominator.cuh",
    "element.cuh",
    "elementwise.cuh",
    "gelu.cuh",
    "group.cuh",
    "machine.cuh",
    "math.cuh",
    "moments.cuh",
    "parts.cuh",
    "patches.cuh",
    "profile.cuh",
    "rank.cuh",
    "reduce.cuh",
    "rotate.cuh",
    "scale.cuh",
    "selective.cuh",
    "sequences.cuh",
    "ssd.cuh",
    "taps.cuh",
    "tile.cuh",
    "tokens.cuh",
    "turned.cuh",
    "weights.cuh",
    "wkv.cuh"
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
    /// That of a unit for inputs I and outputs O.
    pub fn of<I: Stored, O: Stored>(unit: &'static str) -> Build {
        Build { unit, input: I::NAME, output: O::NAME, tf32: false }
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
