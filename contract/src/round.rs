//! The last rounding, from f64, by integer arithmetic: to nearest even, gradual underflow, overflow to infinity,
//! canonical NaN. No conversion of another crate takes part, because rounding f64 -> f32 -> bf16 rounds twice.

use crate::tensor::{DType, Tensor};
use half::{bf16, f16};

/// A binary floating-point format.
struct Format {
    /// Significant bits, the implicit one included.
    precision: i32,
    /// Exponent of the smallest normal number.
    min_exponent: i32,
    /// Exponent of the largest finite number.
    max_exponent: i32,
}

fn format(dtype: DType) -> Format {
    match dtype {
        DType::Bf16 => Format { precision: 8, min_exponent: -126, max_exponent: 127 },
        DType::Fp16 => Format { precision: 11, min_exponent: -14, max_exponent: 15 },
        DType::Fp32 => Format { precision: 24, min_exponent: -126, max_exponent: 127 },
        DType::I32 => panic!("i32 is not a floating-point format"),
    }
}

/// Bits of the quiet NaN that every NaN output must have. Panics for i32.
pub fn canonical_nan(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => 0x7fc0,
        DType::Fp16 => 0x7e00,
        DType::Fp32 => 0x7fc0_0000,
        DType::I32 => panic!("i32 has no NaN"),
    }
}

/// Whether `bits` is a NaN of `dtype`, canonical or not; never for i32.
pub fn is_nan(bits: u32, dtype: DType) -> bool {
    match dtype {
        DType::Bf16 => bits & 0x7fff > 0x7f80,
        DType::Fp16 => bits & 0x7fff > 0x7c00,
        DType::Fp32 => bits & 0x7fff_ffff > 0x7f80_0000,
        DType::I32 => false,
    }
}

/// The bits of `value` rounded to `dtype`. Panics for i32.
pub fn to_bits(value: f64, dtype: DType) -> u32 {
    if value.is_nan() {
        return canonical_nan(dtype);
    }
    // Most values that are asked for need no rounding.
    let near = value as f32;
    if f64::from(near) == value {
        match dtype {
            DType::Fp32 => return near.to_bits(),
            DType::Bf16 if near.to_bits() & 0xffff == 0 => return near.to_bits() >> 16,
            _ => {}
        }
    }
    let Format { precision, min_exponent, max_exponent } = format(dtype);
    let sign = ((value.to_bits() >> 63) as u32) << (8 * dtype.size() as u32 - 1);
    let infinity = ((max_exponent - min_exponent + 2) as u32) << (precision - 1);
    if value.is_infinite() {
        return sign | infinity;
    }
    let (mantissa, exponent) = split(value);
    // `mantissa * 2^(exponent - 52)` becomes a whole number of quanta of size `2^(unit - precision + 1)`.
    let unit = exponent.max(min_exponent);
    let dropped = unit - exponent + 53 - precision;
    let quanta = if dropped > 60 {
        0 // less than half of the smallest subnormal
    } else {
        let kept = mantissa >> dropped;
        let rest = mantissa & ((1 << dropped) - 1);
        let half = 1 << (dropped - 1);
        kept + u64::from(rest > half || (rest == half && kept & 1 == 1))
    };
    // A carry out of the mantissa moves into the exponent field by itself.
    let magnitude = (((unit - min_exponent) as u64) << (precision - 1)) + quanta;
    sign | magnitude.min(u64::from(infinity)) as u32
}

/// Mantissa as an integer below 2^53 and exponent e with |value| = mantissa * 2^(e - 52).
fn split(value: f64) -> (u64, i32) {
    let bits = value.to_bits();
    let field = (bits >> 52 & 0x7ff) as i32;
    let fraction = bits & ((1 << 52) - 1);
    if field == 0 { (fraction, -1022) } else { (fraction | 1 << 52, field - 1023) }
}

/// The value of `bits` in `dtype`, exactly.
pub fn from_bits(bits: u32, dtype: DType) -> f64 {
    match dtype {
        DType::I32 => return f64::from(bits as i32),
        DType::Fp32 => return f64::from(f32::from_bits(bits)),
        DType::Bf16 => return f64::from(f32::from_bits(bits << 16)),
        DType::Fp16 => {}
    }
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (field, fraction) = ((bits >> 10 & 31) as i32, f64::from(bits & 0x3ff));
    match field {
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        0 => sign * fraction * pow2(-24),
        _ => sign * (1024.0 + fraction) * pow2(field - 25),
    }
}

/// `value` rounded to `dtype`. Panics for i32.
pub fn round(value: f64, dtype: DType) -> f64 {
    from_bits(to_bits(value, dtype), dtype)
}

/// The spacing of `dtype` at `value`: the unit in the last place of its binade, that of the smallest subnormal near
/// zero, that of the largest finite binade beyond it. Panics for i32; NaN gives NaN.
pub fn ulp(value: f64, dtype: DType) -> f64 {
    if value.is_nan() {
        return f64::NAN;
    }
    let Format { precision, min_exponent, max_exponent } = format(dtype);
    let exponent = if value.is_infinite() { max_exponent } else { split(value).1 };
    pow2(exponent.clamp(min_exponent, max_exponent) - precision + 1)
}

/// The power of two that follows the largest finite binade of `dtype`: what infinity stands for when an error is
/// measured, so that overflow is rounding like any other. Panics for i32.
pub fn overflow(dtype: DType) -> f64 {
    pow2(format(dtype).max_exponent + 1)
}

/// `2^exponent` for exponents of normal f64 numbers.
pub fn pow2(exponent: i32) -> f64 {
    assert!((-1022..=1023).contains(&exponent), "2^{exponent} is not a normal f64");
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// A tensor of `dtype` from values, each rounded once. Panics when `shape` does not match the length; i32 takes whole
/// numbers.
pub fn tensor(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    match dtype {
        DType::Bf16 => Tensor::bf16(shape, values.iter().map(|&v| bf16::from_bits(to_bits(v, dtype) as u16)).collect()),
        DType::Fp16 => Tensor::fp16(shape, values.iter().map(|&v| f16::from_bits(to_bits(v, dtype) as u16)).collect()),
        DType::Fp32 => Tensor::fp32(shape, values.iter().map(|&v| f32::from_bits(to_bits(v, dtype))).collect()),
        DType::I32 => Tensor::i32(shape, values.iter().map(|&v| v as i32).collect()),
    }
}

/// An f32 rounded to the 10 mantissa bits of TF32: nearest, ties away from zero (`cvt.rna.tf32.f32`). NaN stays NaN.
pub fn tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    f32::from_bits((value.to_bits() + 0x1000) & !0x1fff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NARROW: [(DType, u32); 2] = [(DType::Bf16, 0x7f80), (DType::Fp16, 0x7c00)];

    /// Every finite number, the point half way to the next one, and both neighbours of that point.
    #[test]
    fn every_tie_of_the_16_bit_formats() {
        for (dtype, infinity) in NARROW {
            for low in 0..infinity {
                let here = from_bits(low, dtype);
                let next = if low + 1 == infinity { overflow(dtype) } else { from_bits(low + 1, dtype) };
                let tie = (here + next) / 2.0;
                let even = if low & 1 == 0 { low } else { low + 1 };
                for (value, want) in
                    [(here, low), (tie, even), (tie.next_down(), low), (tie.next_up(), low + 1), (next, low + 1)]
                {
                    assert_eq!(to_bits(value, dtype), want, "{dtype} {value:e}");
                    assert_eq!(to_bits(-value, dtype), want | 0x8000, "{dtype} -{value:e}");
                }
            }
        }
    }

    #[test]
    fn ends_of_the_range() {
        for dtype in DType::FLOATS {
            let sign = 1u32 << (8 * dtype.size() - 1);
            assert_eq!(to_bits(0.0, dtype), 0);
            assert_eq!(to_bits(-0.0, dtype), sign);
            assert_eq!(to_bits(f64::MIN_POSITIVE, dtype), 0);
            assert_eq!(to_bits(-5e-324, dtype), sign);
            assert_eq!(to_bits(-f64::NAN, dtype), canonical_nan(dtype));
            assert_eq!(from_bits(to_bits(f64::MAX, dtype), dtype), f64::INFINITY);
            assert_eq!(from_bits(to_bits(f64::NEG_INFINITY, dtype), dtype), f64::NEG_INFINITY);
            let smallest = ulp(0.0, dtype);
            assert_eq!(to_bits(smallest / 2.0, dtype), 0, "tie with zero goes to even");
            assert_eq!(to_bits((smallest / 2.0).next_up(), dtype), 1);
            let threshold = overflow(dtype) - ulp(f64::INFINITY, dtype) / 2.0;
            assert!(round(threshold.next_down(), dtype).is_finite());
            assert!(round(threshold, dtype).is_infinite());
        }
        assert_eq!(ulp(1.0, DType::Bf16), 1.0 / 128.0);
        assert_eq!(ulp(1.0f64.next_down(), DType::Fp16), 1.0 / 2048.0);
        assert_eq!(ulp(65504.0, DType::Fp16), 32.0);
    }

    /// The case that rounding twice gets wrong: just above a bf16 tie, on the tie after rounding to f32.
    #[test]
    fn sticky_bits_survive() {
        let above_tie = 1.0 + pow2(-8) + pow2(-40);
        assert_eq!(to_bits(above_tie, DType::Bf16), 0x3f81);
        assert_eq!(bf16::from_f32(above_tie as f32).to_bits(), 0x3f80, "the planted fault: two roundings");
    }

    #[test]
    fn tf32_ties_go_away_from_zero() {
        let tie = f32::from_bits(0x3f80_1000);
        assert_eq!(tf32(tie).to_bits(), 0x3f80_2000);
        assert_eq!(tf32(-tie).to_bits(), 0xbf80_2000);
        assert_eq!(tf32(f32::from_bits(0x3f80_0fff)).to_bits(), 0x3f80_0000);
        assert_eq!(tf32(f32::MAX), f32::INFINITY);
        assert!(tf32(f32::NAN).is_nan());
    }

    proptest! {
        /// f32 agrees with the hardware conversion on every kind of f64.
        #[test]
        fn fp32_is_the_hardware_conversion(bits: u64, exponent in -160i32..130) {
            let any = f64::from_bits(bits);
            let near = f64::from_bits(bits & 0x800f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000) * pow2(exponent);
            for value in [any, near] {
                if !value.is_nan() {
                    prop_assert_eq!(to_bits(value, DType::Fp32), (value as f32).to_bits());
                }
            }
        }

        /// No number of the format is nearer than the one chosen.
        #[test]
        fn nearest(bits: u64, exponent in -140i32..129) {
            let value = f64::from_bits(bits & 0x800f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000) * pow2(exponent);
            for (dtype, infinity) in NARROW {
                let got = to_bits(value, dtype);
                let place = |b: u32| if b & 0x7fff == infinity { overflow(dtype) } else { from_bits(b & 0x7fff, dtype) };
                let distance = (place(got) - value.abs()).abs();
                if got & 0x7fff != infinity {
                    prop_assert!(distance <= (place(got + 1) - value.abs()).abs());
                }
                if got & 0x7fff != 0 {
                    prop_assert!(distance <= (place(got - 1) - value.abs()).abs() || value.abs() > overflow(dtype));
                }
                prop_assert!((got & 0x8000 != 0) == (value < 0.0));
            }
        }
    }
}
