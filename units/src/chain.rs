//! Chains of steps for sixteen outputs at once, on every instruction set: the bits of [`crate::exact`].
//!
//! An output is a row of x against a row of w. Sixteen rows of w stand side by side in a panel, and a step takes the same
//! products of all sixteen: mantissas and exponents are integers of 32 bits in lanes. The products of a group, in units of
//! `2^(E - bits)`, are below `16 * (2 - 2^-10)^2 * 2^25 < 2^31` in magnitude together; c is added in f64, where the sum, below
//! 2^33, and its scaling are exact, and the result is cut off by masking bits. What is not finite goes to [`crate::exact`].
//!
//! The loop is written once, without an instruction by name, and compiled for each instruction set.

use crate::exact;
use crate::{Format, Rule};
use std::str::FromStr;

/// Outputs side by side.
pub const LANES: usize = 16;

/// Exponent of an operand that is zero: with it a product is below all others, and the cut leaves nothing of it.
const NOTHING: i16 = -4096;
/// No exponent of a product that is not zero is below this.
const LOWEST: i32 = -300;

/// An instruction set, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Whatever the compiler takes by default.
    Scalar,
    /// AVX2: 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes.
    Avx512,
}

impl Isa {
    /// Every instruction set.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let (avx2, avx512) = {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let more = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            (avx2, avx2 && more)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (avx2, avx512) = (false, false);
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => avx2,
            Isa::Avx512 => avx512,
        }
    }

    /// The best of this machine.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.available()).expect("scalar is always available")
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Isa, String> {
        let isa = Isa::ALL.into_iter().find(|isa| isa.name() == text);
        isa.ok_or_else(|| "use scalar, avx2 or avx512".into())
    }
}

/// Rows of x: `[rows, k]`.
pub struct Rows {
    k: usize,
    words: Vec<u32>,
    mantissa: Vec<i16>,
    exponent: Vec<i16>,
    /// Rows that hold an infinity or a NaN.
    special: Vec<bool>,
}

/// Mantissa and exponent of an operand; of one that is not finite those of zero.
fn split(word: u32, format: Format) -> (i16, i16, bool) {
    match exact::finite(word, format) {
        Some((0, _)) => (0, NOTHING, false),
        Some((mantissa, exponent)) => (mantissa as i16, exponent as i16, false),
        None => (0, NOTHING, true),
    }
}

impl Rows {
    /// Takes rows of `k` words apart.
    pub fn new(format: Format, k: usize, words: Vec<u32>) -> Rows {
        assert!(k > 0 && words.len().is_multiple_of(k), "rows of k words");
        let parts: Vec<_> = words.iter().map(|&word| split(word, format)).collect();
        let special = parts.chunks(k).map(|row| row.iter().any(|&(.., special)| special)).collect();
        let mantissa = parts.iter().map(|&(mantissa, ..)| mantissa).collect();
        let exponent = parts.iter().map(|&(_, exponent, _)| exponent).collect();
        Rows { k, words, mantissa, exponent, special }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.special.len()
    }

    fn row(&self, row: usize) -> &[u32] {
        &self.words[row * self.k..][..self.k]
    }
}

/// Rows of w, sixteen side by side; behind the last one stand zeros.
pub struct Panels {
    rows: Rows,
    mantissa: Vec<[i16; LANES]>,
    exponent: Vec<[i16; LANES]>,
    special: Vec<bool>,
}

impl Panels {
    /// Lays rows side by side.
    pub fn new(rows: Rows) -> Panels {
        let (k, panels) = (rows.k, rows.rows().div_ceil(LANES));
        let mut mantissa = vec![[0; LANES]; panels * k];
        let mut exponent = vec![[NOTHING; LANES]; panels * k];
        for row in 0..rows.rows() {
            let (panel, lane) = (row / LANES, row % LANES);
            for i in 0..k {
                mantissa[panel * k + i][lane] = rows.mantissa[row * k + i];
                exponent[panel * k + i][lane] = rows.exponent[row * k + i];
            }
        }
        let special = rows.special.chunks(LANES).map(|lanes| lanes.contains(&true)).collect();
        Panels { rows, mantissa, exponent, special }
    }

    /// How many panels.
    pub fn panels(&self) -> usize {
        self.special.len()
    }

    /// How many rows, those of zeros apart.
    pub fn rows(&self) -> usize {
        self.rows.rows()
    }
}

/// What a kernel works on: sixteen outputs and a stretch of k.
struct Work<'a> {
    group: usize,
    bits: i32,
    /// How far a product of mantissas is below `2^bits` times its exponent.
    up: i32,
    row: (&'a [i16], &'a [i16]),
    panel: (&'a [[i16; LANES]], &'a [[i16; LANES]]),
}

/// Adds the products of columns `from..to` of `row` and the rows of `panel` to c, sixteen results at once. Groups begin at
/// `from`.
pub fn chain(
    isa: Isa,
    rule: Rule,
    (x, row): (&Rows, usize),
    (w, panel): (&Panels, usize),
    (from, to): (usize, usize),
    c: &mut [u32; LANES],
) {
    assert!(isa.available(), "{} is not of this machine", isa.name());
    let k = x.k;
    assert!(k == w.rows.k && from <= to && to <= k, "columns of both");
    let before = *c;
    // What is not finite in a lane, now or on the way, the plain model computes.
    let mut plain = [x.special[row] || w.special[panel]; LANES];
    if !plain[0] {
        let a = row * k + from..row * k + to;
        let b = panel * k + from..panel * k + to;
        let work = Work {
            group: rule.group,
            bits: rule.bits,
            up: rule.bits - 2 * rule.format.fraction(),
            row: (&x.mantissa[a.clone()], &x.exponent[a]),
            panel: (&w.mantissa[b.clone()], &w.exponent[b]),
        };
        run(isa, &work, c, &mut plain);
    }
    for lane in (0..LANES).filter(|&lane| plain[lane]) {
        let other = panel * LANES + lane;
        c[lane] = match other < w.rows() {
            true => exact::chain(rule, before[lane], &x.row(row)[from..to], &w.rows.row(other)[from..to]),
            false => 0,
        };
    }
}

fn run(isa: Isa, work: &Work, c: &mut [u32; LANES], plain: &mut [bool; LANES]) {
    match isa {
        Isa::Scalar => steps(work, c, plain),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller has seen that the machine has the instructions.
        Isa::Avx2 => unsafe { avx2(work, c, plain) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512(work, c, plain) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("not available"),
    }
}

/// [`steps`] with AVX2.
///
/// # Safety
/// The machine must have it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(work: &Work, c: &mut [u32; LANES], plain: &mut [bool; LANES]) {
    steps(work, c, plain);
}

/// [`steps`] with AVX-512.
///
/// # Safety
/// The machine must have it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512(work: &Work, c: &mut [u32; LANES], plain: &mut [bool; LANES]) {
    steps(work, c, plain);
}

#[inline(always)]
fn steps(work: &Work, c: &mut [u32; LANES], plain: &mut [bool; LANES]) {
    match work.group {
        16 => steps_of::<16>(work, c, plain),
        8 => steps_of::<8>(work, c, plain),
        4 => steps_of::<4>(work, c, plain),
        other => unreachable!("no unit has groups of {other}"),
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "loops over lanes become vectors")]
fn steps_of<const G: usize>(work: &Work, c: &mut [u32; LANES], plain: &mut [bool; LANES]) {
    let k = work.row.0.len();
    let mut acc = *c;
    let mut all = [0u32; LANES];
    let whole = k - k % G;
    let mut at = 0;
    while at < whole {
        // Slices of a constant length: the loops over a group unroll.
        let a = (&work.row.0[at..at + G], &work.row.1[at..at + G]);
        let b = (&work.panel.0[at..at + G], &work.panel.1[at..at + G]);
        for l in 0..LANES {
            all[l] |= u32::from(acc[l] & exact::INFINITY == exact::INFINITY);
        }
        step(work.bits, work.up, a, b, &mut acc);
        at += G;
    }
    for l in 0..LANES {
        all[l] |= u32::from(acc[l] & exact::INFINITY == exact::INFINITY);
    }
    if whole < k {
        let a = (&work.row.0[whole..], &work.row.1[whole..]);
        let b = (&work.panel.0[whole..], &work.panel.1[whole..]);
        step(work.bits, work.up, a, b, &mut acc);
    }
    for l in 0..LANES {
        plain[l] = all[l] != 0;
    }
    *c = acc;
}

/// c plus one group of products, all finite.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "loops over lanes become vectors")]
fn step(bits: i32, up: i32, a: (&[i16], &[i16]), b: (&[[i16; LANES]], &[[i16; LANES]]), c: &mut [u32; LANES]) {
    let n = a.0.len();
    let mut exponent = [0i32; LANES];
    let mut mantissa = [0i32; LANES];
    let mut top = [LOWEST; LANES];
    for l in 0..LANES {
        let raw = (c[l] >> 23 & 0xFF) as i32;
        let rest = (c[l] & 0x7F_FFFF) as i32;
        mantissa[l] = if raw == 0 { rest } else { rest | 1 << 23 };
        exponent[l] = raw.max(1) - 127;
        top[l] = if mantissa[l] == 0 { LOWEST } else { exponent[l] };
    }
    for i in 0..n {
        let ea = i32::from(a.1[i]);
        for l in 0..LANES {
            top[l] = top[l].max(ea + i32::from(b.1[i][l]));
        }
    }
    let mut sum = [0i32; LANES];
    for i in 0..n {
        let (ma, ea) = (i32::from(a.0[i]) << up, i32::from(a.1[i]));
        for l in 0..LANES {
            let product = ma * i32::from(b.0[i][l]);
            let down = (top[l] - (ea + i32::from(b.1[i][l]))).min(31) as u32;
            let cut = (product.unsigned_abs() >> down) as i32;
            let sign = product >> 31;
            sum[l] = sum[l].wrapping_add((cut ^ sign).wrapping_sub(sign));
        }
    }
    for l in 0..LANES {
        let down = (top[l] - exponent[l]).clamp(0, 31) as u32;
        let cut = ((mantissa[l] as u32) << (bits - 23) >> down) as i32;
        let sign = c[l] as i32 >> 31;
        let carry = (cut ^ sign).wrapping_sub(sign);
        // Both are exact in f64, and so are their sum and its product with a power of two.
        let scale = f64::from_bits(((top[l] - bits + 1023) as u64) << 52);
        c[l] = cut_off((f64::from(sum[l]) + f64::from(carry)) * scale);
    }
}

/// f32 of an f64, cut off toward zero; infinity from 2^128 on.
#[inline(always)]
fn cut_off(number: f64) -> u32 {
    let word = number.to_bits();
    let exponent = (word >> 52 & 0x7FF) as i32 - 1023;
    // Bits of the fraction that f32 has no room for; below -149 nothing is left.
    let drop = 29 + (-126 - exponent).max(0);
    let kept = word & (!0u64 << (drop.min(52) as u32));
    let kept = if drop > 52 { 0 } else { kept };
    // Exact, or beyond the largest number.
    (f64::from_bits(kept) as f32).to_bits()
}
