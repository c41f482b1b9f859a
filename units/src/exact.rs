//! One step of a matrix unit in plain integers: `d = c + sum of a[i] * b[i]`.
//!
//! 1. Every product is exact and not normalised: its exponent is the sum of its operands' (a subnormal operand has that of
//!    the smallest normal one). c has its own.
//! 2. E is the largest exponent among products and c that are not zero. If all are zero, the result is +0.
//! 3. Every term becomes a multiple of `2^(E - bits)`, cut off toward zero; nothing remembers the rest.
//! 4. Their exact sum is cut off toward zero to f32, subnormal results kept, infinity above the largest number. (A sum that
//!    is cut off to zero is +0; no test has shown another.)
//! 5. A NaN, zero times infinity, or infinities of both signs give `NAN`; else an infinity wins.

use crate::{Format, Rule};

/// The only NaN that a unit gives.
pub const NAN: u32 = 0x7FFF_FFFF;
pub(crate) const INFINITY: u32 = 0x7F80_0000;

/// A number apart: `(-1)^negative * mantissa * 2^(exponent - fraction)`.
#[derive(Clone, Copy)]
enum Number {
    Nan,
    Infinite { negative: bool },
    Finite { negative: bool, exponent: i32, mantissa: i64 },
}

/// Takes a word apart that has `exponent_bits` and `fraction` bits.
fn apart(word: u32, exponent_bits: u32, fraction: u32) -> Number {
    let negative = word >> (exponent_bits + fraction) & 1 == 1;
    let (all, bias) = ((1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1);
    let exponent = (word >> fraction & all) as i32;
    let rest = i64::from(word & ((1 << fraction) - 1));
    match exponent {
        0 => Number::Finite { negative, exponent: 1 - bias, mantissa: rest },
        e if e == all as i32 && rest == 0 => Number::Infinite { negative },
        e if e == all as i32 => Number::Nan,
        e => Number::Finite { negative, exponent: e - bias, mantissa: rest | 1 << fraction },
    }
}

fn operand(word: u32, format: Format) -> Number {
    match format {
        Format::Bf16 => apart(word, 8, 7),
        Format::Fp16 => apart(word, 5, 10),
        Format::Tf32 => apart(word >> 13, 8, 10),
    }
}

/// Mantissa with sign, and exponent, of a finite operand; `None` for an infinity or a NaN. A zero has a mantissa of 0.
pub(crate) fn finite(word: u32, format: Format) -> Option<(i32, i32)> {
    match operand(word, format) {
        Number::Finite { negative, exponent, mantissa } => {
            Some((if negative { -(mantissa as i32) } else { mantissa as i32 }, exponent))
        }
        _ => None,
    }
}

/// c and one group of products; a and b may be shorter than a group, as if the rest were zeros.
pub fn group(rule: Rule, c: u32, a: &[u32], b: &[u32]) -> u32 {
    let (mut nan, mut plus, mut minus) = (false, false, false);
    let mut infinite = |negative: bool| if negative { minus = true } else { plus = true };
    let mut terms: Vec<(bool, i32, i64, i32)> = Vec::with_capacity(a.len() + 1);
    match apart(c, 8, 23) {
        Number::Nan => nan = true,
        Number::Infinite { negative } => infinite(negative),
        Number::Finite { negative, exponent, mantissa } => terms.push((negative, exponent, mantissa, 23)),
    }
    for (&a, &b) in a.iter().zip(b) {
        use Number::{Finite, Infinite, Nan};
        match (operand(a, rule.format), operand(b, rule.format)) {
            (Nan, _) | (_, Nan) => nan = true,
            (Infinite { .. }, Finite { mantissa: 0, .. }) | (Finite { mantissa: 0, .. }, Infinite { .. }) => nan = true,
            (Infinite { negative }, Finite { negative: other, .. } | Infinite { negative: other })
            | (Finite { negative: other, .. }, Infinite { negative }) => infinite(negative != other),
            (Finite { negative, exponent, mantissa }, Finite { negative: n, exponent: e, mantissa: m }) => {
                terms.push((negative != n, exponent + e, mantissa * m, 2 * rule.format.fraction()));
            }
        }
    }
    match (nan || plus && minus, plus, minus) {
        (true, ..) => return NAN,
        (_, true, _) => return INFINITY,
        (.., true) => return INFINITY | 1 << 31,
        _ => {}
    }
    let terms = terms.into_iter().filter(|&(_, _, mantissa, _)| mantissa != 0);
    let Some(top) = terms.clone().map(|(_, exponent, ..)| exponent).max() else { return 0 };
    let whole = |(negative, exponent, mantissa, below): (bool, i32, i64, i32)| {
        let shift = exponent - below - (top - rule.bits);
        let cut = if shift >= 0 { mantissa << shift } else { mantissa.checked_shr(-shift as u32).unwrap_or(0) };
        if negative { -cut } else { cut }
    };
    cut_off(terms.map(whole).sum(), top - rule.bits)
}

/// f32 of `number * 2^scale`, cut off toward zero.
fn cut_off(number: i64, scale: i32) -> u32 {
    let (sign, number) = (u32::from(number < 0) << 31, number.unsigned_abs());
    if number == 0 {
        return 0;
    }
    let exponent = 63 - number.leading_zeros() as i32 + scale;
    if exponent > 127 {
        return sign | INFINITY;
    }
    let last = exponent.max(-126) - 23;
    let shift = scale - last;
    let mantissa = if shift >= 0 { number << shift } else { number.checked_shr(-shift as u32).unwrap_or(0) };
    match mantissa as u32 {
        0 => 0,
        // The hidden bit adds one to the exponent; a subnormal has none.
        mantissa => sign | ((((last + 149) as u32) << 23) + mantissa),
    }
}

/// c and any number of products: group after group, ascending, the last one filled with zeros.
pub fn chain(rule: Rule, c: u32, a: &[u32], b: &[u32]) -> u32 {
    a.chunks(rule.group).zip(b.chunks(rule.group)).fold(c, |c, (a, b)| group(rule, c, a, b))
}
