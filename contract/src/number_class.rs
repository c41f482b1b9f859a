//! The classes of number that an output can hold, and which of them an accuracy bound tells apart from their
//! neighbours.

use crate::compare::{self, Bound};
use crate::round;
use crate::spec::Reference;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::collections::BTreeSet;

/// The numbers at which arithmetic goes wrong: the classes of IEEE 754, and the ends of the normal range by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NumberClass {
    /// +0.
    PositiveZero,
    /// -0.
    NegativeZero,
    /// Below the smallest normal number, of either sign.
    Subnormal,
    /// The smallest normal number, of either sign.
    SmallestNormal,
    /// The largest finite number, of either sign.
    LargestFinite,
    /// +inf.
    PositiveInfinity,
    /// -inf.
    NegativeInfinity,
    /// NaN.
    Nan,
}

impl NumberClass {
    /// All of them, in the order tables print them.
    pub const ALL: [NumberClass; 8] = [
        NumberClass::PositiveZero,
        NumberClass::NegativeZero,
        NumberClass::Subnormal,
        NumberClass::SmallestNormal,
        NumberClass::LargestFinite,
        NumberClass::PositiveInfinity,
        NumberClass::NegativeInfinity,
        NumberClass::Nan,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            NumberClass::PositiveZero => "+0",
            NumberClass::NegativeZero => "-0",
            NumberClass::Subnormal => "subnormal",
            NumberClass::SmallestNormal => "smallest_normal",
            NumberClass::LargestFinite => "largest_finite",
            NumberClass::PositiveInfinity => "+inf",
            NumberClass::NegativeInfinity => "-inf",
            NumberClass::Nan => "nan",
        }
    }

    /// The class called `name`.
    pub fn parse(name: &str) -> Option<NumberClass> {
        NumberClass::ALL.into_iter().find(|class| class.name() == name)
    }

    /// The class of `bits` in `dtype`; `None` for every other normal number. Panics for i32.
    pub fn of(bits: u32, dtype: DType) -> Option<NumberClass> {
        let sign = sign_of(dtype);
        let (negative, magnitude) = (bits & sign != 0, bits & !sign);
        let infinity = round::to_bits(f64::INFINITY, dtype);
        let normal = smallest_normal(dtype);
        match magnitude {
            0 if negative => Some(NumberClass::NegativeZero),
            0 => Some(NumberClass::PositiveZero),
            m if m < normal => Some(NumberClass::Subnormal),
            m if m == normal => Some(NumberClass::SmallestNormal),
            m if m == infinity - 1 => Some(NumberClass::LargestFinite),
            m if m == infinity && negative => Some(NumberClass::NegativeInfinity),
            m if m == infinity => Some(NumberClass::PositiveInfinity),
            m if m > infinity => Some(NumberClass::Nan),
            _ => None,
        }
    }

    /// The bits of the class beside this one that faulty arithmetic returns in the place of `bits`: the other zero, a
    /// zero for what is flushed, the largest number for an infinity and the other way round, another NaN.
    fn confused_with(self, bits: u32, dtype: DType) -> u32 {
        let sign = sign_of(dtype);
        match self {
            NumberClass::PositiveZero | NumberClass::NegativeZero => bits ^ sign,
            NumberClass::Subnormal | NumberClass::SmallestNormal => bits & sign,
            NumberClass::LargestFinite => bits + 1,
            NumberClass::PositiveInfinity | NumberClass::NegativeInfinity => bits - 1,
            NumberClass::Nan => bits | 1,
        }
    }
}

fn sign_of(dtype: DType) -> u32 {
    1 << (8 * dtype.size() - 1)
}

fn smallest_normal(dtype: DType) -> u32 {
    // One quantum more than the largest subnormal.
    (1.0 / round::ulp(1.0, dtype)) as u32
}

/// The classes among the answers of `reference`, rounded to `dtype`, for which `bound` refuses the class beside them.
/// Only such an element shows that an implementation keeps the two apart.
pub fn told_apart(dtype: DType, reference: &Reference, bound: &Bound) -> BTreeSet<NumberClass> {
    let mut classes = BTreeSet::new();
    for (&value, &condition) in reference.value.iter().zip(&reference.condition) {
        let bits = round::to_bits(value, dtype);
        let Some(class) = NumberClass::of(bits, dtype) else { continue };
        if classes.contains(&class) {
            continue;
        }
        let one = Reference { shape: vec![1], value: vec![value], condition: vec![condition], exact: reference.exact };
        let other = element(class.confused_with(bits, dtype), dtype);
        // Nothing is compared where nothing is claimed, and that is no refusal.
        if condition != f64::INFINITY && compare::accuracy("", dtype, &other, &one, bound).1.is_some() {
            classes.insert(class);
        }
    }
    classes
}

/// A tensor of one element with these bits.
fn element(bits: u32, dtype: DType) -> Tensor {
    match dtype {
        DType::Bf16 => Tensor::bf16(&[1], vec![bf16::from_bits(bits as u16)]),
        DType::Fp16 => Tensor::fp16(&[1], vec![f16::from_bits(bits as u16)]),
        DType::Fp32 => Tensor::fp32(&[1], vec![f32::from_bits(bits)]),
        DType::I32 => Tensor::i32(&[1], vec![bits as i32]),
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn classes_of_every_dtype() {
        for (dtype, bits) in [
            (DType::Bf16, [0, 0x8000, 0x007f, 0x0080, 0xff7f, 0x7f80, 0xff80, 0x7fc0]),
            (DType::Fp16, [0, 0x8000, 0x03ff, 0x8400, 0x7bff, 0x7c00, 0xfc00, 0x7e00]),
            (DType::Fp32, [0, 0x8000_0000, 1, 0x0080_0000, 0x7f7f_ffff, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000]),
        ] {
            let found = bits.map(|bits| NumberClass::of(bits, dtype));
            assert_eq!(found, NumberClass::ALL.map(Some), "{dtype}");
            assert_eq!(NumberClass::of(round::to_bits(1.0, dtype), dtype), None);
        }
        assert!(NumberClass::ALL.iter().all(|class| NumberClass::parse(class.name()) == Some(*class)));
    }

    /// A class counts where the bound refuses what a flush, a saturation or another sign would give.
    pub(crate) fn a_class_counts_where_it_is_told_apart() {
        let bound = Bound::Ulp { ulp: 0.5, condition_factor: 4.0, p99_ulp: None, correctly_rounded: None };
        let told = |value: f64, condition: f64| {
            let reference = Reference { shape: vec![1], value: vec![value], condition: vec![condition], exact: false };
            told_apart(DType::Fp32, &reference, &bound).into_iter().next()
        };
        let (subnormal, largest) = (round::pow2(-130), f64::from(f32::MAX));
        assert_eq!(told(0.0, 0.0), Some(NumberClass::PositiveZero));
        assert_eq!(told(-0.0, 0.0), Some(NumberClass::NegativeZero));
        assert_eq!(told(-0.0, round::pow2(-126)), None, "either zero passes");
        assert_eq!(told(subnormal, round::pow2(-126)), Some(NumberClass::Subnormal));
        assert_eq!(told(subnormal, round::pow2(-100)), None, "a flush passes");
        assert_eq!((told(largest, 0.0), told(largest, largest)), (Some(NumberClass::LargestFinite), None));
        assert_eq!(told(round::pow2(129), round::pow2(129)), Some(NumberClass::PositiveInfinity));
        assert_eq!(told(-round::pow2(128), round::pow2(128)), None, "the largest number passes");
        assert_eq!(told(f64::NAN, 0.0), Some(NumberClass::Nan));
        assert_eq!(told(f64::NAN, f64::INFINITY), None);
        assert_eq!(told(1.0, 0.0), None);
    }
}
