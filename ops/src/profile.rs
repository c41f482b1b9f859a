//! Profiles: the constants that fix bits, each once. What is beside them, the order of the steps, stands in each op's file and
//! in `docs/NUMERICS.md`.
//!
//! Kernels of the processor take them from [`IEEE`], kernels of a device from `profile.cuh`, which is made of it
//! ([`Profile::header`]). Tests and oracles do not: that they come to the same bits is evidence for both.

use crate::Error;
use samebits_schema::Call;

/// What fixes the bits of a profile.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Profile {
    /// Its name in calls: one of those that [`samebits_schema::profiles`] lists.
    pub name: &'static str,
    /// Lanes of a `lanes` sum.
    pub lanes: usize,
    /// Segments of a long sum.
    pub segments: usize,
    /// A segment is a multiple of this.
    pub segment_step: usize,
    /// Keys of a block of attention.
    pub keys: usize,
    /// Chains of a sum over tokens.
    pub chains: usize,
    /// Elements of a block of a gradient's norm.
    pub norm_block: usize,
    /// Channels of a block in the gradient of a selective scan.
    pub channels: usize,
    /// The least power of two, beside the largest, that a weight may have; below it is +0.
    pub negligible: f32,
    /// From |n| of this size on the log-probabilities and the entropy of a row are measured from its top.
    pub far: f32,
    /// From this size on, `x * log2(e)` has no fraction.
    pub whole: f32,
    /// Exponents beyond this are infinite or +0 either way.
    pub most_scaled: f32,
    /// log2(e) in two parts, of about 48 bits together.
    pub log2e: [f32; 2],
    /// The natural logarithm of 2.
    pub ln_2: f64,
    /// Coefficients of `2^f` on [-0.5, 0.5], from the highest power, as bits; the constant term is 1.
    pub exp2: [u32; 6],
    /// The highest odd denominator of the series of the logarithm.
    pub ln_terms: u32,
    /// From this z on the logarithm halves it.
    pub ln_half: f64,
    /// `f32(2 sqrt(2/pi))` and `f32(0.044715)`.
    pub gelu: [f32; 2],
    /// The polynomial of the tail of a normal distribution by its density, from the highest power of `1 / (1 + step |x|)` down to
    /// the first, as bits.
    pub normal_tail: [u32; 9],
    /// That step.
    pub normal_step: f32,
    /// `f32(1 / sqrt(2 pi))`.
    pub normal_density: f32,
    /// What is added to the sum of sigmoids that weights of experts are divided by.
    pub route: f32,
    /// What the weight of a token is multiplied with before it becomes an integer; 2^40.
    pub drawn: f32,
}

/// binary32, to nearest even, with gradual underflow, in the order of `docs/NUMERICS.md`.
pub const IEEE: Profile = Profile {
    name: samebits_schema::IEEE,
    lanes: 256,
    segments: 8,
    segment_step: 16,
    keys: 256,
    chains: 64,
    norm_block: 65536,
    channels: 64,
    negligible: -100.0,
    far: 65536.0,
    whole: 4_194_304.0,
    most_scaled: 252.0,
    log2e: [f32::from_bits(0x3FB8_AA3B), f32::from_bits(0x32A5_7060)],
    ln_2: f64::from_bits(0x3FE6_2E42_FEFA_39EF),
    exp2: [0x3920_b5b7, 0x3aaf_841a, 0x3c1d_96f0, 0x3d63_57be, 0x3e75_fdee, 0x3f31_7218],
    ln_terms: 21,
    ln_half: f64::from_bits(0x3FF6_A09E_6000_0000),
    gelu: [f32::from_bits(0x3FCC_422A), f32::from_bits(0x3D37_2713)],
    normal_tail: [
        0x3cfa_dfc0,
        0xbe12_bd2d,
        0x3e5d_21a8,
        0xbdea_0e03,
        0x3e0b_d4ba,
        0x3d79_6d91,
        0x3dd2_0858,
        0x3dd7_961d,
        0x3dd8_8e6b,
    ],
    normal_step: f32::from_bits(0x3E87_AE14),
    normal_density: f32::from_bits(0x3ECC_422A),
    route: 1e-20,
    drawn: 1_099_511_627_776.0,
};

/// Those that the ops of this crate have.
const OFFERED: [&Profile; 1] = [&IEEE];

impl Profile {
    /// The profile of a call.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no op has it.
    pub fn of(call: &Call) -> Result<&'static Profile, Error> {
        let name = call.profile();
        OFFERED.into_iter().find(|profile| profile.name == name).ok_or_else(|| {
            let known: Vec<_> = OFFERED.iter().map(|profile| profile.name).collect();
            let known = known.join(", ");
            Error::Unavailable(format!("{}: profile `{name}` is not offered here; use {known}", call.op.name))
        })
    }

    /// Elements of a segment of a sum of `n`.
    pub(crate) const fn segment_length(&self, n: usize) -> usize {
        self.segment_step * n.div_ceil(self.segment_step * self.segments)
    }

    /// `profile.cuh`: the same for kernels of a device.
    pub fn header(&self) -> String {
        let Profile { name, lanes, segments, segment_step, keys, chains, channels, .. } = self;
        let f32_of = |value: f32| format!("__uint_as_float(0x{:08X}u)", value.to_bits());
        let f64_of = |value: f64| format!("__longlong_as_double(0x{:016X}ll)", value.to_bits());
        let exp2 = |at: usize| f32_of(f32::from_bits(self.exp2[at]));
        let tail = |at: usize| f32_of(f32::from_bits(self.normal_tail[at]));
        let numbers = [
            ("LANES", lanes.to_string(), "Lanes of a `lanes` sum."),
            ("SEGMENTS", segments.to_string(), "Segments of a long sum."),
            ("SEGMENT_STEP", segment_step.to_string(), "A segment is a multiple of this."),
            ("KEYS", keys.to_string(), "Keys of a block of attention."),
            ("CHAINS", chains.to_string(), "Chains of a sum over tokens."),
            ("CHANNELS", channels.to_string(), "Channels of a block in the gradient of a selective scan."),
            (
                "NEGLIGIBLE",
                format!("{:?}f", self.negligible),
                "Weights more than this many powers of two below the largest are +0.",
            ),
            (
                "FAR",
                format!("{:?}f", self.far),
                "From |n| of this size on the log-probabilities and the entropy of a row are measured from its top.",
            ),
            ("NO_FRACTION", format!("{:?}f", self.whole), "From this size on, x * log2(e) has no fraction."),
            ("MOST_SCALED", format!("{:?}f", self.most_scaled), "Exponents beyond this are infinite or +0 either way."),
            ("LOG2E_HI", f32_of(self.log2e[0]), "log2(e) in two parts."),
            ("LOG2E_LO", f32_of(self.log2e[1]), ""),
            ("LN_2", f64_of(self.ln_2), "The natural logarithm of 2."),
            ("EXP2_6", exp2(0), "Coefficients of 2^f by their powers; that of power 0 is 1."),
            ("EXP2_5", exp2(1), ""),
            ("EXP2_4", exp2(2), ""),
            ("EXP2_3", exp2(3), ""),
            ("EXP2_2", exp2(4), ""),
            ("EXP2_1", exp2(5), ""),
            ("LN_TERMS", self.ln_terms.to_string(), "The highest odd denominator of the series of the logarithm."),
            ("LN_HALF", f64_of(self.ln_half), "From this z on the logarithm halves it."),
            ("GELU_SCALE", f32_of(self.gelu[0]), "f32(2 sqrt(2/pi)) and f32(0.044715)."),
            ("GELU_CUBE", f32_of(self.gelu[1]), ""),
            ("NORMAL_TAIL_9", tail(0), "Coefficients of the tail of a normal distribution by their powers."),
            ("NORMAL_TAIL_8", tail(1), ""),
            ("NORMAL_TAIL_7", tail(2), ""),
            ("NORMAL_TAIL_6", tail(3), ""),
            ("NORMAL_TAIL_5", tail(4), ""),
            ("NORMAL_TAIL_4", tail(5), ""),
            ("NORMAL_TAIL_3", tail(6), ""),
            ("NORMAL_TAIL_2", tail(7), ""),
            ("NORMAL_TAIL_1", tail(8), ""),
            ("NORMAL_STEP", f32_of(self.normal_step), "How fast 1 / (1 + step |x|) falls, whose powers they are of."),
            ("NORMAL_DENSITY", f32_of(self.normal_density), "f32(1 / sqrt(2 pi))."),
            (
                "ROUTE_SUM",
                f32_of(self.route),
                "What is added to the sum of sigmoids that weights of experts are divided by.",
            ),
        ];
        let mut text = format!(
            "// What fixes the bits of the profile `{name}`: made of ops/src/profile.rs by\n\
             // SAMEBITS_RECORD=1 cargo test --workspace --lib profile\n#pragma once\n\n"
        );
        for (name, value, about) in numbers {
            if !about.is_empty() {
                text += &format!("// {about}\n");
            }
            text += &format!("#define {name} {value}\n");
        }
        text
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn the_header_is_made_of_the_profile() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/device/profile.cuh");
        if std::env::var_os("SAMEBITS_RECORD").is_some() {
            std::fs::write(path, IEEE.header()).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(found, IEEE.header(), "SAMEBITS_RECORD=1 writes it");
        assert_ne!(found, Profile { lanes: 128, ..IEEE }.header());
    }

    /// Every constant of a profile is in the header, but for what the host alone needs.
    pub(crate) fn no_constant_is_left_out_of_the_header() {
        let next = |x: f32| f32::from_bits(x.to_bits() + 1);
        let header = IEEE.header();
        for (other, what) in [
            (Profile { lanes: 1, ..IEEE }, "lanes"),
            (Profile { segments: 1, ..IEEE }, "segments"),
            (Profile { segment_step: 1, ..IEEE }, "segment_step"),
            (Profile { keys: 1, ..IEEE }, "keys"),
            (Profile { chains: 1, ..IEEE }, "chains"),
            (Profile { channels: 1, ..IEEE }, "channels"),
            (Profile { negligible: -99.0, ..IEEE }, "negligible"),
            (Profile { far: next(IEEE.far), ..IEEE }, "far"),
            (Profile { whole: next(IEEE.whole), ..IEEE }, "whole"),
            (Profile { most_scaled: 251.0, ..IEEE }, "most_scaled"),
            (Profile { log2e: [next(IEEE.log2e[0]), IEEE.log2e[1]], ..IEEE }, "log2e"),
            (Profile { log2e: [IEEE.log2e[0], next(IEEE.log2e[1])], ..IEEE }, "log2e"),
            (Profile { ln_2: f64::from_bits(IEEE.ln_2.to_bits() + 1), ..IEEE }, "ln_2"),
            (Profile { exp2: IEEE.exp2.map(|bits| bits + 1), ..IEEE }, "exp2"),
            (Profile { ln_terms: 19, ..IEEE }, "ln_terms"),
            (Profile { ln_half: f64::from_bits(IEEE.ln_half.to_bits() + 1), ..IEEE }, "ln_half"),
            (Profile { gelu: [next(IEEE.gelu[0]), IEEE.gelu[1]], ..IEEE }, "gelu"),
            (Profile { gelu: [IEEE.gelu[0], next(IEEE.gelu[1])], ..IEEE }, "gelu"),
            (Profile { route: next(IEEE.route), ..IEEE }, "route"),
        ] {
            assert_ne!(other.header(), header, "{what}");
        }
    }

    /// The constants where they are used nowhere else: a number that stands in a file of its own is not the profile's.
    pub(crate) fn no_constant_stands_twice() {
        let source = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
        let (mut folders, mut files) = (vec![source.to_path_buf()], 0);
        // As they are written in Rust and in C++, without `_`.
        let bits = |bits: u32| format!("0x{bits:08x}");
        let [hi, lo] = IEEE.log2e.map(|x| bits(x.to_bits()));
        let gelu = IEEE.gelu.map(|x| bits(x.to_bits()));
        let wide = [IEEE.ln_2, IEEE.ln_half].map(|x| format!("0x{:016x}", x.to_bits()));
        let exp2 = IEEE.exp2.map(bits);
        let route = bits(IEEE.route.to_bits());
        let written = [hi, lo, route].into_iter().chain(gelu).chain(wide).chain(exp2);
        let written: Vec<String> =
            written.chain(["4194304.0".into(), "65536.0".into(), "1e-20".into(), "1099511627776".into()]).collect();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                // Tests compute by the page, not by the profile.
                if name.starts_with("profile.") || name.ends_with("tests.rs") {
                    continue;
                }
                files += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                let text =
                    text.split("#[cfg(feature = \"unit-tests\")]\npub(crate) mod tests {").next().unwrap_or_default();
                for line in text.lines() {
                    let code = line.split("//").next().unwrap_or_default().replace('_', "").to_lowercase();
                    let found = written.iter().find(|number| code.contains(number.as_str()));
                    assert!(found.is_none(), "{}: {line}: take it from the profile", path.display());
                }
            }
        }
        assert!(files > 100, "{files}");
    }
}
