//! Storage types.
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

mod sealed {
    pub trait Sealed {}
}
impl sealed::Sealed for bf16 {}
impl sealed::Sealed for f16 {}
impl sealed::Sealed for f32 {}

/// A storage type of the contract: [`bf16`], [`f16`] or `f32`.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// `bf16`, `fp16` or `fp32`.
    const NAME: &'static str;
    /// Exact widening.
    fn widen(self) -> f32;
    /// The last rounding: to nearest even, a NaN becomes the canonical one.
    fn narrow(value: f32) -> Self;
}
impl Element for bf16 {
    const NAME: &'static str = "bf16";
    fn widen(self) -> f32 {
        todo!()
    }
    fn narrow(_: f32) -> Self {
        todo!()
    }
}
impl Element for f16 {
    const NAME: &'static str = "fp16";
    fn widen(self) -> f32 {
        todo!()
    }
    fn narrow(_: f32) -> Self {
        todo!()
    }
}
impl Element for f32 {
    const NAME: &'static str = "fp32";
    fn widen(self) -> f32 {
        todo!()
    }
    fn narrow(_: f32) -> Self {
        todo!()
    }
}
