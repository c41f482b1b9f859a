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
