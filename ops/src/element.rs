//! Storage types, exact widening, and the last rounding.

use crate::Scalar;
use crate::backend::device::Plain;
use crate::simd::Storage;
use half::{bf16, f16};

/// TF32 policy for f32 operands of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tf32 {
    /// f32 operands are used whole.
    #[default]
    Disabled,
    /// Each f32 operand is first rounded to 10 mantissa bits, nearest, ties away (`cvt.rna.tf32.f32`).
    Enabled,
}

impl Tf32 {
    /// `x` as this policy reads it. Only f32 has more than 10 mantissa bits, so bf16 and f16 values are unchanged.
    #[inline(always)]
    pub(crate) fn operand(self, x: f32) -> f32 {
        match self {
            Tf32::Disabled => x,
            Tf32::Enabled if !x.is_finite() => x,
            Tf32::Enabled => f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF),
        }
    }
}

/// A storage type of the contract: [`bf16`], [`struct@f16`] or `f32`. Sealed.
pub trait Element: Storage + Scalar + std::fmt::Debug {
    /// `bf16`, `fp16` or `fp32`.
    const NAME: &'static str;
    /// Exact widening.
    fn widen(self) -> f32;
    /// The last rounding: to nearest even with gradual underflow; a NaN becomes the canonical one.
    fn narrow(value: f32) -> Self;
}

/// Storage types of tensors on a device.
pub trait Stored: Element + Plain {}
impl<T: Element + Plain> Stored for T {}

/// Runs an expression with `$T` as the type of a float dtype. The kernels of every type are compiled in this crate, where
/// a generic function would be compiled again in each crate that calls it.
macro_rules! typed {
    ($dtype:expr => $T:ident, $run:expr) => {
        match $dtype {
            $crate::DType::Bf16 => {
                type $T = half::bf16;
                $run
            }
            $crate::DType::Fp16 => {
                type $T = half::f16;
                $run
            }
            $crate::DType::Fp32 => {
                type $T = f32;
                $run
            }
            other => unreachable!("{other} is no float; the call was checked"),
        }
    };
}
pub(crate) use typed;

/// Runs an expression with `$I` and `$O` as the types of an input and of an output where kernels are compiled for the two:
/// equal types, and fp32 to bf16, by which models round what their products read. Other pairs take `$other`, the way
/// [through f32](crate::through_f32).
macro_rules! typed_pair {
    ($input:expr => $I:ident, $output:expr => $O:ident, $run:expr, else $other:expr) => {
        match ($input, $output) {
            ($crate::DType::Bf16, $crate::DType::Bf16) => {
                type $I = half::bf16;
                type $O = half::bf16;
                $run
            }
            ($crate::DType::Fp32, $crate::DType::Bf16) => {
                type $I = f32;
                type $O = half::bf16;
                $run
            }
            ($crate::DType::Fp16, $crate::DType::Fp16) => {
                type $I = half::f16;
                type $O = half::f16;
                $run
            }
            ($crate::DType::Fp32, $crate::DType::Fp32) => {
                type $I = f32;
                type $O = f32;
                $run
            }
            _ => $other,
        }
    };
}
pub(crate) use typed_pair;

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        let bits = value.to_bits();
        if value.is_nan() {
            bf16::from_bits(0x7FC0)
        } else {
            bf16::from_bits(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16)
        }
    }
}

impl Element for f16 {
    const NAME: &'static str = "fp16";
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        if value.is_nan() { f16::from_bits(0x7E00) } else { f16::from_f32(value) }
    }
}

impl Element for f32 {
    const NAME: &'static str = "fp32";
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
    }
}
