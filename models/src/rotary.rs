//! Frequencies of the rotary positions, with the scalings that models are published with.
//!
//! Everything here is f64 on the host and rounded to f32 once, per frequency; `docs/NUMERICS.md` has the formulas. Where
//! a scaling depends on a length (dynamic, longrope), it is a length **declared for the run** that counts ([`RopeLength`]),
//! neither how much of a text has been seen nor how long it becomes: else a prefill and a decode, a rollout and the training
//! on it would rotate the same tokens differently.

use crate::fields::{Fields, asks_for_nothing, same};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::f64::consts::TAU;

/// How positions become angles.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated, even; the others pass.
    pub dim: usize,
    /// How the frequencies are scaled.
    pub scaling: Scaling,
    /// Factor of every cosine and sine.
    pub factor: f32,
    /// What that factor is multiplied by, a number for each position.
    pub growth: Option<Growth>,
}

/// A factor of queries, which grows with the position: `1 + beta * ln(1 + floor((first + position) / original))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// How fast it grows.
    pub beta: f64,
    /// Positions up to which it is 1.
    pub original: usize,
    /// The number that the first position has here.
    pub first: usize,
}

/// What the frequencies belong to, where their scaling depends on a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLength {
    /// A number of the run, as the longest text of a serving engine is: no text may be longer.
    Declared(usize),
    /// Each text's own length, as in one forward of transformers: what is recorded of those is held to it. A text that is sampled
    /// has the length that it may grow to.
    OfText,
}

/// Scaling of the frequencies `theta^(-2i/dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// All 0: nothing turns, and positions are known by the masks alone.
    Zero,
    /// All divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The first `turning` ones divided by a factor, all others 0.
    Proportional {
        /// Frequencies that turn.
        turning: usize,
        /// The divisor.
        factor: f64,
    },
    /// Another theta for sequences that declare more than `original` positions.
    Dynamic {
        /// How much longer texts may be.
        factor: f64,
        /// Positions the model was trained on.
        original: usize,
    },
    /// Low frequencies divided by `factor`, high ones as they are, a ramp between.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Rotations over the original positions from which on a frequency is high.
        beta_fast: f64,
        /// Rotations up to which it is low.
        beta_slow: f64,
        /// Positions the model was trained on.
        original: usize,
        /// Whether the ends of the ramp are whole numbers.
        truncate: bool,
    },
    /// As Yarn, with a ramp over wavelengths.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` stay.
        high: f64,
        /// Positions the model was trained on.
        original: usize,
    },
    /// A divisor for each frequency: `long` where a sequence declares more than `original` positions, else `short`.
    Long {
        /// Divisors of short texts.
        short: Vec<f64>,
        /// Divisors of long ones.
        long: Vec<f64>,
        /// Factor of every cosine and sine of long ones, in the place of that of the others.
        factor: f32,
        /// Positions up to which a text is short.
        original: usize,
    },
}

impl Default for Rotary {
    fn default() -> Rotary {
        Rotary { theta: 10_000.0, dim: 0, scaling: Scaling::Default, factor: 1.0, growth: None }
    }
}

/// What YaRN multiplies cosines and sines by for a stretch of `factor`.
pub(crate) fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 }
}

/// What a family says of its rotations before a folder is read.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub head_dim: usize,
    /// The share of a head that is rotated where the folder says none; `None` where only whole heads are.
    pub partial: Option<f64>,
    /// Whether folders wrote "longrope" under the older names "su" and "yarn".
    pub renamed: bool,
    /// Whether "dynamic" with an `alpha` stretches the base by it, whatever the length.
    pub stretched: bool,
    /// Whether queries grow with their positions, by `llama_4_scaling_beta`.
    pub grows: bool,
    /// Whether folders say the factors of cosines and sines of short and of long texts, `short_mscale` and `long_mscale`.
    pub mscales: bool,
    /// Whether folders divide frequencies between the axes of a grid, on which a text has the same position in each.
    pub grids: bool,
    /// The base where the folder says none; without, it must be said.
    pub theta: Option<f64>,
    pub max_positions: usize,
    /// The type of the layers that it is for, under which `rope_parameters` has their own, and the older field of their base.
    /// An older scaling is for layers of full attention.
    pub of: Option<[&'a str; 2]>,
}

/// Reads `rope_parameters` (new), `rope_scaling`, `rope_theta`, `partial_rotary_factor` and
/// `original_max_position_embeddings` (old). A value that stands in two places must be the same in both.
pub(crate) fn read(f: &Fields, asked: Asked) -> Rotary {
    let Asked { head_dim, partial, renamed, stretched, grows, mscales, grids, .. } = asked;
    let Asked { theta: default_theta, max_positions, of, .. } = asked;
    // Value and the name to refuse it by, for each key.
    let mut found: BTreeMap<&str, (String, &Value)> = BTreeMap::new();
    let mut note = |key: &'static str, name: String, value| match found.insert(key, (name.clone(), value)) {
        Some((_, old)) if !same(old, value) => {
            f.refuse(name, format!("is {value}, but the folder also says {old}; keep one"));
        }
        _ => {}
    };
    for key in ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"] {
        let field = of.filter(|_| key == "rope_theta").map_or(key, |[_, field]| field);
        if let Some(value) = f.get(field) {
            note(key, field.into(), value);
        }
    }
    for object in ["rope_parameters", "rope_scaling"] {
        let Some((place, map)) = f.object(object).and_then(|map| place_of(f, object, map, of)) else { continue };
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let name = format!("{place}.{key}");
            // The kind has two spellings.
            let key = if key == "type" { "rope_type" } else { key };
            let own = [("alpha", stretched), (BETA, grows), ("short_mscale", mscales), ("long_mscale", mscales)];
            let mut own = own.iter().filter(|(_, asked)| *asked).map(|(key, _)| key);
            match KEYS.iter().find(|known| **known == key).or_else(|| own.find(|known| **known == key)) {
                Some(key) => note(key, name, value),
                None if grids && ["mrope_section", "mrope_interleaved"].contains(&key) => {}
                None if OTHERS.contains(&key) && !asks_for_nothing(value) => {
                    f.refuse(name, format!("is {value}, which no supported scaling reads"));
                }
                None => f.pass(&name, value, "which no model's code reads; it is passed by"),
            }
        }
    }

    let name = |key: &str| found.get(key).map_or(format!("rope_parameters.{key}"), |(name, _)| name.clone());
    let number = |key: &str| -> Option<f64> {
        let value = found.get(key)?.1;
        // To the models' own code, a 0 of these means none.
        if ["mscale", "mscale_all_dim", "beta_fast", "beta_slow", BETA].contains(&key) && same(value, &json!(0)) {
            return None;
        }
        let number = value.as_f64().filter(|v| v.is_finite() && *v > 0.0);
        if number.is_none() {
            f.refuse(name(key), format!("is {value}; it must be a number above 0"));
        }
        number
    };
    let required = |key: &str| {
        if !found.contains_key(key) {
            f.refuse(name(key), "is missing; it must be a number above 0");
        }
        number(key).unwrap_or(1.0)
    };
    let theta = match found.get("rope_theta") {
        None => default_theta.unwrap_or_else(|| {
            f.refuse("rope_parameters.rope_theta", "is missing; write the base of the rotary positions");
            10_000.0
        }),
        Some(_) => number("rope_theta").unwrap_or(10_000.0),
    };
    if theta < 1.0 {
        f.refuse(name("rope_theta"), format!("is {theta}; it must be a number of at least 1"));
    }
    let (kind_name, kind) = match found.get("rope_type") {
        None => (String::new(), "default"),
        Some((name, value)) => (name.clone(), value.as_str().unwrap_or("no word")),
    };
    let kind = if renamed && ["su", "yarn"].contains(&kind) { "longrope" } else { kind };
    // There a share is one of the frequencies, and heads are rotated as a whole.
    let is_proportional = kind == "proportional";
    let mut share = number("partial_rotary_factor").or(partial).unwrap_or(1.0);
    if share > 1.0 || share != 1.0 && partial.is_none() && !is_proportional {
        let supported = if partial.is_some() || is_proportional { "above 0 and at most 1" } else { "1" };
        f.refuse(name("partial_rotary_factor"), format!("is {share}; supported is {supported}"));
        share = 1.0;
    }
    let dim = if is_proportional { head_dim } else { (head_dim as f64 * share) as usize };
    if head_dim > 0 && (dim == 0 || !dim.is_multiple_of(2)) {
        let field = if partial.is_some() { "partial_rotary_factor" } else { "head_dim" };
        f.refuse(field, format!("is {dim} elements of a head; rotary positions need an even number"));
    }
    let original = match number("original_max_position_embeddings") {
        None => max_positions,
        Some(v) if v.fract() == 0.0 && v <= f64::from(i32::MAX) => v as usize,
        Some(v) => {
            let why = format!("is {v}; it must be a whole number of positions");
            f.refuse(name("original_max_position_embeddings"), why);
            max_positions
        }
    };
    let divisors = |key: &str| -> Vec<f64> {
        let list = found.get(key).and_then(|(_, value)| value.as_array());
        let list: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        let list = list.filter(|list| list.len() == dim / 2 && list.iter().all(|v| *v > 0.0 && v.is_finite()));
        if list.is_none() && dim > 0 {
            f.refuse(name(key), format!("must be a list of {} numbers above 0", dim / 2));
        }
        list.unwrap_or(vec![1.0; dim / 2])
    };

    let top = ["rope_theta", "rope_type", "partial_rotary_factor", BETA];
    let alpha = found.get("alpha").filter(|(_, alpha)| kind == "dynamic" && !same(alpha, &json!(0)));
    if alpha.is_some() {
        return stretched_base(f, &found, (theta, dim), number("alpha").unwrap_or(1.0));
    }
    let (keys, scaling, factor): (&[&str], Scaling, f64) = match kind {
        // Nothing reads the length of the training.
        "default" => (&[ORIGINAL], Scaling::Default, 1.0),
        "linear" => (&["factor", ORIGINAL], Scaling::Linear { factor: required("factor") }, 1.0),
        "proportional" => {
            let turning = (head_dim as f64 * share / 2.0) as usize;
            (&["factor", ORIGINAL], Scaling::Proportional { turning, factor: number("factor").unwrap_or(1.0) }, 1.0)
        }
        "dynamic" => {
            if dim == 2 {
                f.refuse(kind_name.clone(), "is \"dynamic\", whose formula needs more than 2 rotated elements");
            }
            let scaling = Scaling::Dynamic { factor: required("factor"), original: max_positions };
            (&["factor", ORIGINAL], scaling, 1.0)
        }
        "llama3" => {
            let (low, high) = (required("low_freq_factor"), required("high_freq_factor"));
            if found.contains_key("low_freq_factor") && found.contains_key("high_freq_factor") && low > high {
                f.refuse(name("low_freq_factor"), format!("is {low}; it must not be above high_freq_factor {high}"));
            }
            let keys = &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL];
            (keys, Scaling::Llama3 { factor: required("factor"), low, high, original }, 1.0)
        }
        "yarn" => {
            let factor = number("factor").unwrap_or(max_positions as f64 / original.max(1) as f64);
            let attention = match (number("attention_factor"), number("mscale"), number("mscale_all_dim")) {
                (Some(attention), ..) => attention,
                (None, Some(one), Some(all)) => mscale(factor, one) / mscale(factor, all),
                (None, ..) => mscale(factor, 1.0),
            };
            let truncate = match found.get("truncate") {
                None => true,
                Some((_, Value::Bool(flag))) => *flag,
                Some((name, value)) => {
                    f.refuse(name.clone(), format!("is {value}; it must be true or false"));
                    true
                }
            };
            let beta_fast = number("beta_fast").unwrap_or(32.0);
            let beta_slow = number("beta_slow").unwrap_or(1.0);
            if beta_fast <= beta_slow {
                f.refuse(name("beta_fast"), format!("is {beta_fast}; it must be above beta_slow {beta_slow}"));
            }
            if theta == 1.0 {
                f.refuse(name("rope_theta"), "is 1; the formula of \"yarn\" needs a number above 1");
            }
            let scaling = Scaling::Yarn { factor, beta_fast, beta_slow, original, truncate };
            let ramp = Rotary { theta, dim, scaling: scaling.clone(), ..Rotary::default() }.ramp();
            let known = dim > 0 && beta_fast > beta_slow && theta > 1.0;
            if let Some((low, high)) = ramp.filter(|(low, high)| known && low > high) {
                let why = format!("is {original}, so that the ramp of \"yarn\" would end at {high} and begin at {low}");
                f.refuse(name(ORIGINAL), why);
            }
            (&YARN, scaling, attention)
        }
        "longrope" => {
            let factor = number("factor").unwrap_or(max_positions as f64 / original.max(1) as f64);
            let attention = number("attention_factor");
            let [of_short, of_long] = match mscales {
                true => ["short_mscale", "long_mscale"].map(|key| factor_within(f, name(key), required(key))),
                false => [attention.unwrap_or_else(|| natural(f, name(ORIGINAL), factor, original)); 2],
            };
            let (short, long) = (divisors("short_factor"), divisors("long_factor"));
            (&LONG, Scaling::Long { short, long, factor: of_long as f32, original }, of_short)
        }
        _ => {
            let why = format!(
                "is {}; supported are \"default\", \"linear\", \"dynamic\", \"yarn\", \"llama3\", \"longrope\" and \"proportional\"",
                found["rope_type"].1
            );
            f.refuse(kind_name, why);
            return Rotary { theta, dim, ..Rotary::default() };
        }
    };
    for (key, (name, value)) in found.iter().filter(|(key, _)| !top.contains(key) && !keys.contains(key)) {
        if scales_nothing(key, value) {
            f.pass(name, value, "which asks for nothing here; it is passed by");
        } else {
            f.refuse(name.clone(), format!("is {value}, but rope_type \"{kind}\" does not read {key}"));
        }
    }
    let factor = factor_within(f, name("attention_factor"), factor) as f32;
    for key in [BETA, ORIGINAL].into_iter().filter(|key| grows && !found.contains_key(key)) {
        f.refuse(name(key), "is missing; queries grow with their positions by it");
    }
    let growth = number(BETA).map(|beta| Growth { beta, original, first: 0 });
    let rotary = Rotary { theta, dim, scaling, factor, growth };
    let lengths = [1, original, original.saturating_add(1), max_positions];
    if f.is_clean()
        && dim <= 1 << 16
        && lengths.iter().any(|&length| rotary.inv_freq(length).iter().any(|f| !f.is_finite()))
    {
        f.refuse(name("rope_type"), format!("is \"{kind}\", whose frequencies are not finite with these numbers"));
    }
    rotary
}

/// A factor of cosines and sines that `field` makes, which must be above 0 within f32.
fn factor_within(f: &Fields, field: String, factor: f64) -> f64 {
    if !(factor as f32 > 0.0 && (factor as f32).is_finite()) {
        let why = format!("makes the factor of cosines and sines {}; it must be above 0 within f32", factor as f32);
        f.refuse(field, why);
    }
    factor
}

/// What LongRoPE multiplies cosines and sines by for a stretch of `factor`, where `field` has the length of the training.
fn natural(f: &Fields, field: String, factor: f64, original: usize) -> f64 {
    if factor > 1.0 && original < 2 {
        f.refuse(field, format!("is {original}; \"longrope\" needs at least 2"));
    }
    let natural = libm::sqrt(1.0 + libm::log(factor) / libm::log(original as f64));
    if factor <= 1.0 || original < 2 { 1.0 } else { natural }
}

/// Whether a number asks for nothing: a factor of 1 scales nothing, and an alpha of 0 is none.
fn scales_nothing(key: &str, value: &Value) -> bool {
    let nothing = [("factor", 1), ("alpha", 0)];
    asks_for_nothing(value) || nothing.iter().any(|(end, number)| key.ends_with(end) && same(value, &json!(number)))
}

/// A base that is stretched by `alpha`, whatever the length. No other number of such a scaling is read.
fn stretched_base(
    f: &Fields,
    found: &BTreeMap<&str, (String, &Value)>,
    (theta, dim): (f64, usize),
    alpha: f64,
) -> Rotary {
    if dim == 2 {
        f.refuse(found["alpha"].0.clone(), "is set; the formula needs more than 2 rotated elements");
    }
    let read = ["rope_theta", "rope_type", "partial_rotary_factor", "alpha"];
    for (key, (name, value)) in found.iter().filter(|(key, _)| !read.contains(key)) {
        f.pass(name, value, &format!("which \"dynamic\" with an alpha does not read; {key} is passed by"));
    }
    let theta = theta * libm::pow(alpha, dim as f64 / (dim as f64 - 2.0));
    Rotary { theta, dim, ..Rotary::default() }
}

/// Where the parameters of the layers asked for stand, under which name.
fn place_of<'m>(
    f: &Fields,
    object: &str,
    map: &'m Map<String, Value>,
    of: Option<[&str; 2]>,
) -> Option<(String, &'m Map<String, Value>)> {
    let Some([kind, _]) = of else { return Some((object.into(), map)) };
    for (key, value) in map.iter().filter(|_| object == "rope_parameters") {
        if !["full_attention", "sliding_attention"].contains(&&key[..]) {
            let why = format!("is {value}; the parameters stand under the types of layers here");
            f.refuse(format!("{object}.{key}"), why);
        }
    }
    match map.get(kind) {
        Some(Value::Object(own)) => Some((format!("{object}.{kind}"), own)),
        _ => (kind == "full_attention" && object == "rope_scaling").then(|| (object.into(), map)),
    }
}

/// The key of the length of the training.
const ORIGINAL: &str = "original_max_position_embeddings";

/// The key of how fast queries grow with their positions.
const BETA: &str = "llama_4_scaling_beta";

/// Keys of scalings that are computed for few families, or for none.
const OTHERS: [&str; 8] =
    ["alpha", "axial", "beta", BETA, "long_mscale", "mrope_interleaved", "mrope_section", "short_mscale"];

/// Those that "longrope" reads, the last two of them where folders say the factors of cosines and sines.
const LONG: [&str; 7] =
    ["factor", ORIGINAL, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"];

/// Those that "yarn" reads.
const YARN: [&str; 8] =
    ["factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"];

/// Every key that a scaling may have.
const KEYS: [&str; 15] = [
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
];

impl Rotary {
    /// The length that the model was trained on, where the scaling depends on a length.
    pub fn trained_length(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Dynamic { original, .. } | Scaling::Long { original, .. } => Some(original),
            _ => None,
        }
    }

    /// A length with the same frequencies as `length`: what need not be told apart.
    pub(crate) fn class_of(&self, length: usize) -> usize {
        match &self.scaling {
            Scaling::Dynamic { original, .. } => length.max(*original),
            Scaling::Long { original, .. } => *original + usize::from(length > *original),
            _ => 0,
        }
    }

    /// The factor of cosines and sines of a position, in a sequence that declared `length` positions.
    pub(crate) fn factor_at(&self, length: usize, position: i32) -> f32 {
        let factor = match self.scaling {
            Scaling::Long { factor, original, .. } if length > original => factor,
            _ => self.factor,
        };
        let Some(Growth { beta, original, first }) = self.growth else { return factor };
        let passed = first.saturating_add(position as usize) / original.max(1);
        factor * (1.0 + beta * libm::log(1.0 + passed as f64)) as f32
    }

    /// The frequencies between which YaRN's ramp lies.
    fn ramp(&self) -> Option<(f64, f64)> {
        let Scaling::Yarn { beta_fast, beta_slow, original, truncate, .. } = self.scaling else { return None };
        let dim = self.dim as f64;
        // The frequency that makes this many rotations over the original positions.
        let at = |rotations: f64| dim * libm::log(original as f64 / (rotations * TAU)) / (2.0 * libm::log(self.theta));
        let (mut low, mut high) = (at(beta_fast), at(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        Some((low.max(0.0), high.min(dim - 1.0)))
    }

    /// The frequencies of a sequence that declared `length` positions.
    pub fn inv_freq(&self, length: usize) -> Vec<f32> {
        let (half, dim) = (self.dim / 2, self.dim as f64);
        let plain = |theta: f64| (0..half).map(move |i| libm::pow(theta, -2.0 * i as f64 / dim));
        let round = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v as f32).collect();
        match &self.scaling {
            Scaling::Default => round(&mut plain(self.theta)),
            Scaling::Zero => vec![0.0; half],
            Scaling::Linear { factor } => round(&mut plain(self.theta).map(|f| f / factor)),
            Scaling::Proportional { turning, factor } => {
                round(&mut plain(self.theta).enumerate().map(|(i, f)| if i < *turning { f / factor } else { 0.0 }))
            }
            Scaling::Dynamic { factor, original } => {
                if length <= *original {
                    return round(&mut plain(self.theta));
                }
                let stretch = factor * length as f64 / *original as f64 - (factor - 1.0);
                round(&mut plain(self.theta * libm::pow(stretch, dim / (dim - 2.0))))
            }
            Scaling::Yarn { factor, .. } => {
                let (low, mut high) = self.ramp().expect("this scaling has one");
                if low == high {
                    high += 0.001;
                }
                round(&mut plain(self.theta).enumerate().map(|(i, f)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                }))
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let original = *original as f64;
                round(&mut plain(self.theta).map(|f| {
                    let wavelength = TAU / f;
                    if wavelength < original / high {
                        f
                    } else if wavelength > original / low {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                }))
            }
            Scaling::Long { short, long, original, .. } => {
                let divisors = if length > *original { long } else { short };
                round(&mut plain(self.theta).zip(divisors).map(|(f, divisor)| f / divisor))
            }
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    fn freq(scaling: Scaling, length: usize) -> Vec<f32> {
        Rotary { dim: 16, scaling, ..Rotary::default() }.inv_freq(length)
    }

    /// The values are those of transformers 5.23's `ROPE_INIT_FUNCTIONS` for the same parameters, computed in f64.
    pub(crate) fn scalings_are_the_published_ones() {
        let plain = freq(Scaling::Default, 1);
        assert_eq!(plain[..3], [1.0, 0.31622776, 0.1]);
        assert_eq!(freq(Scaling::Linear { factor: 4.0 }, 1)[1], 0.07905694);
        let dynamic = Scaling::Dynamic { factor: 2.0, original: 32 };
        assert_eq!(freq(dynamic.clone(), 32), plain);
        // theta' = 10000 * (2 * 48 / 32 - 1)^(16/14)
        let theta = 10_000.0 * 2f64.powf(16.0 / 14.0);
        assert_eq!(freq(dynamic, 48)[1], theta.powf(-0.125) as f32);
        let yarn =
            freq(Scaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, original: 64, truncate: true }, 1);
        // low = max(floor(-0.99), 0) = 0, high = ceil(2.02) = 3
        let third = 1.0 / 3.0;
        assert_eq!(yarn[0], 1.0);
        assert_eq!(yarn[1], (10_000f64.powf(-0.125) * (third / 4.0 + (1.0 - third))) as f32);
        assert_eq!(yarn[4], plain[4] / 4.0);
        let llama3 = freq(Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64 }, 1);
        // Wavelengths 6.3, 19.9, 62.8, ..: below 16, between, between, above 64.
        let smooth = (64.0 / (TAU / 10_000f64.powf(-0.125)) - 1.0) / 3.0;
        assert_eq!(llama3[0], 1.0);
        assert_eq!(llama3[1], ((1.0 - smooth) * 10_000f64.powf(-0.125) / 8.0 + smooth * 10_000f64.powf(-0.125)) as f32);
        assert_eq!(llama3[3], plain[3] / 8.0);
        // Of ends 32 and 16 the third is above.
        let llama3 = freq(Scaling::Llama3 { factor: 8.0, low: 2.0, high: 4.0, original: 64 }, 1);
        assert_eq!(llama3[2], plain[2] / 8.0);
        // No ramp: 19.9 and 62.8 on either side of 32.
        let llama3 = freq(Scaling::Llama3 { factor: 8.0, low: 2.0, high: 2.0, original: 64 }, 1);
        assert_eq!(llama3[1..3], [plain[1], plain[2] / 8.0]);
        let long = Scaling::Long { short: vec![1.0; 8], long: vec![2.0; 8], factor: 3.0, original: 32 };
        assert_eq!(freq(long.clone(), 32), plain);
        assert_eq!(freq(long.clone(), 33)[1], plain[1] / 2.0);
        let long = Rotary { scaling: long, factor: 1.5, ..Rotary::default() };
        assert_eq!([32, 33].map(|length| long.factor_at(length, 40)), [1.5, 3.0]);
    }

    /// The ends of the ramp, by hand: a frequency number i is divided by 4 in part, `(i - low) / (high - low)`.
    pub(crate) fn a_ramp_has_its_ends() {
        let parts = |original: usize, [beta_fast, beta_slow]: [f64; 2], truncate: bool| -> Vec<f64> {
            let yarn = freq(Scaling::Yarn { factor: 4.0, beta_fast, beta_slow, original, truncate }, 1);
            let plain = (0..8).map(|i| 10_000f64.powf(-0.125 * f64::from(i)));
            plain.zip(yarn).map(|(plain, yarn)| (1.0 - f64::from(yarn) / plain) / 0.75).collect()
        };
        let ramp = |low: f64, high: f64| (0..8).map(move |i| ((f64::from(i) - low) / (high - low)).clamp(0.0, 1.0));
        let near = |found: Vec<f64>, low: f64, high: f64| {
            let far = found.iter().zip(ramp(low, high)).find(|(found, want)| (*found - want).abs() > 1e-5);
            assert_eq!(far, None, "{found:?}");
        };
        // 16 ln(4096 / 64 pi) / 2 ln(10^4) = 2.618, and 5.628 for one rotation.
        near(parts(4096, [32.0, 1.0], true), 2.0, 6.0);
        near(parts(4096, [32.0, 1.0], false), 2.618_06, 5.628_36);
        // From -0.74 and -0.39 both ends are 0: all frequencies but the first are divided.
        near(parts(4, [1.5, 1.0], true), 0.0, 0.001);
        // 17.06 is beyond the head.
        near(parts(1 << 31, [1e9, 1.0], true), 0.0, 15.0);
    }

    pub(crate) fn queries_grow_by_hand() {
        let rotary = |growth| Rotary { factor: 1.5, growth, ..Rotary::default() };
        let growing = rotary(Some(Growth { beta: 0.25, original: 16, first: 0 }));
        assert_eq!([0, 15].map(|at| growing.factor_at(1, at)), [1.5; 2]);
        let by_hand = |n: f64| 1.5 * (1.0 + 0.25 * n.ln()) as f32;
        assert_eq!([16, 31, 32, 63].map(|at| growing.factor_at(1, at)), [2.0, 2.0, 3.0, 4.0].map(by_hand));
        let from_one = rotary(Some(Growth { beta: 0.25, original: 16, first: 1 }));
        assert_eq!([14, 15, 30, 31].map(|at| from_one.factor_at(1, at)), [1.0, 2.0, 2.0, 3.0].map(by_hand));
        assert_eq!(rotary(None).factor_at(1, 99), 1.5);
    }

    pub(crate) fn attention_is_stretched_by_hand() {
        assert_eq!((mscale(0.5, 3.0), mscale(1.0, 3.0)), (1.0, 1.0));
        assert!((mscale(1.5, 2.0) - 1.081_093_021_621_633).abs() < 1e-15);
    }
}
