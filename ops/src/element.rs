//! Storage types, exact widening, and the last rounding.

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
pub trait Element: Storage + Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// `bf16`, `fp16` or `fp32`.
    const NAME: &'static str;
    /// Exact widening.
    fn widen(self) -> f32;
    /// The last rounding: to nearest even with gradual underflow; a NaN becomes the canonical one.
    fn narrow(value: f32) -> Self;
    #[doc(hidden)]
    fn slice(x: &[Self]) -> Slice<'_>;
    #[doc(hidden)]
    fn slice_mut(x: &mut [Self]) -> SliceMut<'_>;
    #[doc(hidden)]
    fn of(slice: Slice<'_>) -> &[Self];
}

/// Elements of a type that is known when the program runs: see [`compile_here`].
#[derive(Clone, Copy)]
pub enum Slice<'a> {
    Bf16(&'a [bf16]),
    Fp16(&'a [f16]),
    Fp32(&'a [f32]),
}

/// [`Slice`], to be written.
pub enum SliceMut<'a> {
    Bf16(&'a mut [bf16]),
    Fp16(&'a mut [f16]),
    Fp32(&'a mut [f32]),
}

/// Runs an expression for the types behind the generic slices that it names, with every combination of types compiled in
/// this crate. A plain generic call would be compiled again in each crate that makes it, for every instruction set.
///
/// `(what else it needs, with types) I(inputs of one type) ?(such that may be missing) O(output) -> result => expression`.
macro_rules! compile_here {
    (
        ($($arg:ident: $type:ty),*) I($i:ident $(, $in:ident)*) $(?($opt:ident))? $(O($o:ident))?
            -> $result:ty => $run:expr
    ) => {{
        #[allow(clippy::too_many_arguments)]
        fn here(
            $($arg: $type,)*
            $i: $crate::element::Slice,
            $($in: $crate::element::Slice,)*
            $($opt: Option<$crate::element::Slice>,)?
            $($o: $crate::element::SliceMut,)?
        ) -> $result {
            use $crate::element::Slice;
            match $i {
                Slice::Bf16($i) => compile_here!(@rest (half::bf16) ($($in)*) ($($opt)?) ($($o)?) $run),
                Slice::Fp16($i) => compile_here!(@rest (half::f16) ($($in)*) ($($opt)?) ($($o)?) $run),
                Slice::Fp32($i) => compile_here!(@rest (f32) ($($in)*) ($($opt)?) ($($o)?) $run),
            }
        }
        here($($arg,)* I::slice($i), $(I::slice($in),)* $($opt.map(I::slice),)? $(O::slice_mut($o),)?)
    }};
    (@rest ($element:ty) ($($in:ident)*) ($($opt:ident)?) $out:tt $run:expr) => {{
        $(let $in = <$element as $crate::Element>::of($in);)*
        $(let $opt = $opt.map(<$element as $crate::Element>::of);)?
        compile_here!(@out $out $run)
    }};
    (@out () $run:expr) => {
        $run
    };
    (@out ($o:ident) $run:expr) => {
        match $o {
            $crate::element::SliceMut::Bf16($o) => $run,
            $crate::element::SliceMut::Fp16($o) => $run,
            $crate::element::SliceMut::Fp32($o) => $run,
        }
    };
}
pub(crate) use compile_here;

macro_rules! slices {
    ($variant:ident) => {
        #[inline(always)]
        fn slice(x: &[Self]) -> Slice<'_> {
            Slice::$variant(x)
        }

        #[inline(always)]
        fn slice_mut(x: &mut [Self]) -> SliceMut<'_> {
            SliceMut::$variant(x)
        }

        #[inline(always)]
        fn of(slice: Slice<'_>) -> &[Self] {
            match slice {
                Slice::$variant(x) => x,
                _ => unreachable!("the inputs of an op have one type"),
            }
        }
    };
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
    slices!(Bf16);

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
    slices!(Fp16);

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
    slices!(Fp32);

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
    }
}
