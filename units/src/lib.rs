//! Matrix units (tensor cores) to the bit.
//!
//! A unit computes `d = c + sum of a[i] * b[i]` over a group of products at once: [`exact`] says how, in plain integers, and
//! [`UNITS`] which unit takes how many products and keeps how many bits. [`chain`] computes the same quickly, for sixteen
//! outputs at a time. [`cuts`] and [`search`] find the order in which a library has added what its units gave, [`dump`]
//! reads what somebody has recorded of a GPU, and [`verify`] says what reproduces it.

pub mod chain;
pub mod cuts;
pub mod dump;
pub mod exact;
pub mod search;
pub mod verify;

pub use chain::Isa;

/// A format of operands. Results and accumulators are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 8 bits of exponent, 7 of fraction.
    Bf16,
    /// 5 bits of exponent, 10 of fraction.
    Fp16,
    /// The upper 19 bits of an f32; the lower 13 are not read.
    Tf32,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 3] = [Format::Bf16, Format::Fp16, Format::Tf32];

    /// The name in records.
    pub fn name(self) -> &'static str {
        match self {
            Format::Bf16 => "bf16",
            Format::Fp16 => "fp16",
            Format::Tf32 => "tf32",
        }
    }

    /// Bits of the fraction.
    pub fn fraction(self) -> i32 {
        match self {
            Format::Bf16 => 7,
            Format::Fp16 | Format::Tf32 => 10,
        }
    }
}

/// Where a fact is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// This project's own tests of the instruction.
    Measured(&'static str),
    /// What others found, not measured by this project.
    Published(&'static str),
}

/// The arithmetic of one generation of units.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Name of the profile.
    pub profile: &'static str,
    /// Name of the architecture.
    pub generation: &'static str,
    /// How many products of a format are added at once; `None` where it has no such instruction.
    pub group: fn(Format) -> Option<usize>,
    /// A term is cut off toward zero this many bits below the largest exponent.
    pub bits: i32,
    /// Where this is from.
    pub source: Source,
}

const PUBLISHED: Source = Source::Published("MMA-Sim (arXiv:2511.10909), github.com/microsoft/MMA-Sim");

/// The units, the measured one first.
pub const UNITS: &[Unit] = &[
    Unit {
        profile: "sm90",
        generation: "Hopper",
        group: wide,
        bits: 25,
        source: Source::Measured("H100 80GB HBM3, driver 580.159.04, CUDA 13.0, 2026-11-27: 1,290,240 tests"),
    },
    Unit { profile: "sm100", generation: "Blackwell", group: wide, bits: 25, source: PUBLISHED },
    Unit { profile: "sm80", generation: "Ampere", group: half, bits: 24, source: PUBLISHED },
    Unit { profile: "sm89", generation: "Ada", group: half, bits: 24, source: PUBLISHED },
    Unit { profile: "sm75", generation: "Turing", group: |format| of_fp16(format, 8), bits: 24, source: PUBLISHED },
    Unit { profile: "sm70", generation: "Volta", group: |format| of_fp16(format, 4), bits: 23, source: PUBLISHED },
];

fn wide(format: Format) -> Option<usize> {
    Some(if format == Format::Tf32 { 8 } else { 16 })
}

fn half(format: Format) -> Option<usize> {
    Some(if format == Format::Tf32 { 4 } else { 8 })
}

fn of_fp16(format: Format, group: usize) -> Option<usize> {
    (format == Format::Fp16).then_some(group)
}

/// The arithmetic of a unit for one format; several units may have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The format of the operands.
    pub format: Format,
    /// Products that are added at once.
    pub group: usize,
    /// Bits that are kept below the largest exponent.
    pub bits: i32,
}

impl Rule {
    /// The rule of a profile, where it has the format.
    pub fn of(profile: &str, format: Format) -> Option<Rule> {
        let unit = UNITS.iter().find(|unit| unit.profile == profile)?;
        Some(Rule { format, group: (unit.group)(format)?, bits: unit.bits })
    }

    /// Every rule of a format, each once, the measured one first.
    pub fn all(format: Format) -> Vec<Rule> {
        let mut rules: Vec<Rule> = Vec::new();
        for rule in UNITS.iter().filter_map(|unit| Rule::of(unit.profile, format)) {
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
        rules
    }

    /// The profiles that have this rule, the measured one first.
    pub fn profiles(self) -> Vec<&'static str> {
        let has = |unit: &&Unit| Rule::of(unit.profile, self.format) == Some(self);
        UNITS.iter().filter(has).map(|unit| unit.profile).collect()
    }
}
