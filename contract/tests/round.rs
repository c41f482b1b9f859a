//! Roundings of f64 to narrow formats, on every kind of number.

use half::bf16;
use proptest::prelude::*;
use samebits_contract::round::{canonical_nan, from_bits, overflow, pow2, round, tf32, to_bits, ulp};
use samebits_contract::tensor::DType;

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
