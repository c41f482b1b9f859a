//! Every emulated instruction against a definition that shares nothing with the emulation: lane by lane in plain Rust, and
//! `VDPBF16PS` by integers. So the emulation is held on machines without the instructions too.

use super::results::{
    DotResults, Dots, LaneResults, Named, Operands, WordResults, alike, difference, dots, operands, positive,
};
use crate::{Cpu, Isa};
use std::array::from_fn;

/// `VDPBF16PS` of one lane: the product of the high halves, then that of the low ones.
fn dot(sum: u32, a: u32, b: u32) -> u32 {
    [16, 0].into_iter().fold(sum, |sum, shift| step(sum, (a >> shift) & 0xFFFF, (b >> shift) & 0xFFFF))
}

const NAN: u32 = 0x7FC0_0000;

/// `a * b + sum` of two bf16: subnormals are read as zeros; rounded once to 24 bits, ties to even, without a bound on the exponent;
/// then what is below 2^-126 is a zero of its sign, what is beyond the range an infinity.
fn step(sum: u32, a: u32, b: u32) -> u32 {
    let [sum, a, b] = [sum, a << 16, b << 16].map(|bits| {
        let (exponent, fraction) = (bits >> 23 & 0xFF, bits & 0x007F_FFFF);
        Number {
            negative: bits >> 31 == 1,
            nan: exponent == 0xFF && fraction != 0,
            infinite: exponent == 0xFF && fraction == 0,
            significand: if exponent == 0 { 0 } else { i128::from(0x0080_0000 | fraction) },
            power: exponent as i32 - 150,
        }
    });
    let negative = a.negative != b.negative;
    if sum.nan || a.nan || b.nan {
        return NAN;
    }
    if a.infinite || b.infinite {
        let zero = !a.infinite && a.significand == 0 || !b.infinite && b.significand == 0;
        return if zero || sum.infinite && sum.negative != negative { NAN } else { bits(negative, 0x7F80_0000) };
    }
    if sum.infinite {
        return bits(sum.negative, 0x7F80_0000);
    }
    let (product, power) = (a.significand * b.significand, a.power + b.power);
    if product == 0 && sum.significand == 0 {
        return bits(sum.negative && negative, 0);
    }
    // Both as multiples of one power of two. A term so small that 60 zeros stand before it says on which side of the other the
    // sum lies, and no more: any number in its place gives the same.
    let low = |term: i128, power: i32| if term == 0 { i32::MAX } else { power };
    let high = |term: i128, power: i32| if term == 0 { i32::MIN } else { power + 128 - term.leading_zeros() as i32 };
    let least = low(product, power).min(low(sum.significand, sum.power));
    let most = high(product, power).max(high(sum.significand, sum.power));
    let unit = least.max(most - 110);
    let place = |term: i128, at: i32, negative: bool| {
        let magnitude = match at - unit {
            _ if term == 0 => 0,
            shift if shift >= 0 => term << shift,
            shift if shift > -100 => (term >> -shift) | i128::from(term & ((1 << -shift) - 1) != 0),
            _ => 1,
        };
        if negative { -magnitude } else { magnitude }
    };
    let total = place(product, power, negative) + place(sum.significand, sum.power, sum.negative);
    if total == 0 {
        return 0;
    }
    let (negative, magnitude) = (total < 0, total.unsigned_abs());
    let excess = (128 - magnitude.leading_zeros() as i32 - 24).max(0);
    let (mut kept, rest) = (magnitude >> excess, magnitude & ((1 << excess) - 1));
    let half = if excess == 0 { u128::MAX } else { 1 << (excess - 1) };
    if rest > half || rest == half && kept & 1 == 1 {
        kept += 1;
    }
    // A number below 2^24, or 2^24 itself: both are an f32 times a power of two.
    let exponent = unit + excess + 127 - kept.leading_zeros() as i32;
    match exponent {
        ..-126 => bits(negative, 0),
        128.. => bits(negative, 0x7F80_0000),
        _ => {
            let fraction = (kept << (kept.leading_zeros() - 104)) as u32 & 0x007F_FFFF;
            bits(negative, ((exponent + 127) as u32) << 23 | fraction)
        }
    }
}

/// An f32: `significand * 2^power` if it is finite.
struct Number {
    negative: bool,
    nan: bool,
    infinite: bool,
    significand: i128,
    power: i32,
}

fn bits(negative: bool, magnitude: u32) -> u32 {
    u32::from(negative) << 31 | magnitude
}

/// The nearest bf16, ties to even, NaN the canonical one.
fn to_bf16(x: f32) -> u32 {
    if x.is_nan() {
        return 0x7FC0;
    }
    let (kept, rest) = (x.to_bits() >> 16, x.to_bits() & 0xFFFF);
    kept + u32::from(rest > 0x8000 || rest == 0x8000 && kept & 1 == 1)
}

/// The nearest f16, ties to even, NaN the canonical one.
fn to_f16(x: f32) -> u32 {
    if x.is_nan() {
        return 0x7E00;
    }
    let (sign, magnitude) = (x.to_bits() >> 16 & 0x8000, f64::from(x.abs()));
    if magnitude >= 65520.0 {
        return sign | 0x7C00;
    }
    // The spacing of f16: 2^-24 below 2^-14, else a 2^10th of the power of two below.
    let power = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-14);
    let steps = (magnitude / f64::from(power - 10).exp2()).round_ties_even() as u32;
    // 1024 steps begin an exponent, 2048 are the next one.
    sign | ((((power + 14) as u32) << 10) + steps)
}

/// A bf16 or an f16 as f32.
fn from_f16(half: u32) -> f32 {
    let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (half >> 10 & 0x1F, f64::from(half & 0x3FF));
    let magnitude = match exponent {
        0 => fraction * f64::exp2(-24.0),
        0x1F if fraction == 0.0 => f64::INFINITY,
        0x1F => f64::NAN,
        _ => (fraction + 1024.0) * f64::from(exponent as i32 - 25).exp2(),
    };
    (sign * magnitude) as f32
}

/// Half i of some words, the low half of a word first.
fn half(words: &[u32], i: usize) -> u32 {
    words[i / 2] >> (16 * (i % 2)) & 0xFFFF
}

/// Words of these halves, the low one first.
fn of_halves(half: impl Fn(usize) -> u32) -> [u32; 16] {
    from_fn(|i| half(2 * i) | half(2 * i + 1) << 16)
}

/// What [`LaneResults`] must give.
fn lanes(operands: &Operands) -> Vec<Named> {
    let Operands { floats: [a, b, c], words, scale: [m, i] } = operands;
    let unary = |name, of: fn(f32) -> f32| (name, alike(a.map(of)));
    let binary = |name, of: fn(f32, f32) -> f32| (name, alike(from_fn(|i| of(a[i], b[i]))));
    let in_range = i.map(|i| i.clamp(-125.0, 126.0));
    let power = |i: f32| f64::from(i).exp2();
    let halves = |i| half(&words[0], i);
    let pair = |high: f32, low: f32| to_bf16(high) << 16 | to_bf16(low);
    let magnitude = |i| (halves(i) & 0x7FFF).wrapping_sub(1) & 0xFFFF;
    let [high, low] = [0, 1].map(|i| words[i].map(positive));
    let near = |x: f32| (x.to_bits().wrapping_add(0x8004) & 0xFFFF) < 9;
    let about =
        if (0..16).any(|i| near(high[i]) || near(low[i])) { [0; 16] } else { from_fn(|i| pair(high[i], low[i])) };
    let mut all = vec![
        ("splat", alike([a[0]; 16])),
        binary("add", |a, b| a + b),
        binary("sub", |a, b| a - b),
        binary("mul", |a, b| a * b),
        binary("div", |a, b| a / b),
        unary("sqrt", f32::sqrt),
        ("fma", alike(from_fn(|i| a[i].mul_add(b[i], c[i])))),
        unary("abs", f32::abs),
        unary("neg", |a| -a),
        binary("copysign", f32::copysign),
        unary("round", f32::round_ties_even),
        unary("floor", f32::floor),
        binary("max", |a, b| if a > b { a } else { b }),
        binary("min", |a, b| if a < b { a } else { b }),
        ("select_ge", alike(from_fn(|i| if a[i] >= b[i] { c[i] } else { m[i] }))),
        ("pow2", alike(in_range.map(|i| power(i) as f32))),
        ("mul_pow2", alike(from_fn(|lane| (f64::from(m[lane]) * power(in_range[lane])) as f32))),
        ("scale", alike(from_fn(|lane| (f64::from(m[lane]) * power(i[lane])) as f32))),
        ("load_bf16", alike(from_fn(|i| f32::from_bits(halves(i) << 16)))),
        ("load_f16", alike(from_fn(|i| from_f16(halves(i))))),
        ("load_pairs, high", alike(from_fn(|i| f32::from_bits(halves(2 * i + 1) << 16)))),
        ("load_pairs, low", alike(from_fn(|i| f32::from_bits(halves(2 * i) << 16)))),
        ("interleave, first", alike(from_fn(|i| if i % 2 == 0 { b[i / 2] } else { a[i / 2] }))),
        ("interleave, second", alike(from_fn(|i| if i % 2 == 0 { b[8 + i / 2] } else { a[8 + i / 2] }))),
        ("all_within", [u32::from((0..16).all(|i| b[i] <= a[i] && a[i] <= c[i])); 16]),
        ("any_nan_or_inf", [u32::from(a.iter().any(|a| a.is_nan() || *a == f32::INFINITY)); 16]),
        ("least_bf16", [(0..64).map(magnitude).min().unwrap(); 16]),
        ("store", from_fn(|i| words[1][i])),
        ("narrow_f32", alike(*a)),
        ("narrow_bf16", of_halves(|i| if i < 16 { to_bf16(a[i]) } else { 0 })),
        ("narrow_f16", of_halves(|i| if i < 16 { to_f16(a[i]) } else { 0 })),
        ("narrow_pairs", from_fn(|i| pair(a[i], b[i]))),
        ("swap_pairs", of_halves(|i| halves(i ^ 1))),
        ("narrow_pairs_about", about),
        ("stream_line", from_fn(|i| words[1][i])),
    ];
    for count in 1..=16 {
        for swap in [false, true] {
            for j in 0..16 {
                let word = |i: usize| words[i % 2][i / 2 + 1 + j];
                let word = |i: usize| if swap { word(i) >> 16 | word(i) << 16 } else { word(i) };
                all.push(("transpose", from_fn(|i| if i < count { word(i) } else { 0 })));
            }
        }
    }
    all
}

/// What [`WordResults`] must give.
fn words(operands: &Operands) -> Vec<Named> {
    let Operands { floats: [x, y, _], words, .. } = operands;
    let [a, b] = [0, 1].map(|i| &words[i][..16]);
    let mask = words[1][16];
    let by_word = |name, of: &dyn Fn(u32, u32) -> u32| (name, from_fn(|i| of(a[i], b[i])));
    let by_half = |name, of: &dyn Fn(u32, u32) -> u32| (name, of_halves(|i| of(half(a, i), half(b, i)) & 0xFFFF));
    // Unit i of each vector of units of so many bits.
    let unit = |v: &[u32], bits: usize, i: usize| {
        let whole = u128::from(v[i * bits / 32]) | u128::from(v.get(i * bits / 32 + 1).copied().unwrap_or(0)) << 32;
        (whole >> (i * bits % 32)) as u64 & (u64::MAX >> (64 - bits))
    };
    // Units of the low or high half of every quarter, those of a and of b in turn.
    let unpacked = |name, bits: usize, high: usize| {
        let in_quarter = 128 / bits;
        let at = |i: usize| i / in_quarter * in_quarter + high * in_quarter / 2 + i % in_quarter / 2;
        let all = |i: usize| unit(if i.is_multiple_of(2) { a } else { b }, bits, at(i));
        let word = |i: usize| match bits {
            64 => (all(i / 2) >> (32 * (i % 2))) as u32,
            _ => (0..32 / bits).fold(0, |word, part| word | (all(i * 32 / bits + part) as u32) << (bits * part)),
        };
        (name, from_fn(word))
    };
    let byte = |v: &[u32], i: usize| v[i / 4] >> (8 * (i % 4)) & 0xFF;
    let shuffled = |i: usize| match byte(b, i) {
        which if which & 0x80 != 0 => 0,
        which => byte(a, i / 16 * 16 + (which & 15) as usize),
    };
    let two = |i: usize| if i < 16 { x[i] } else { y[i - 16] };
    const WHICH: [usize; 4] = [0, 3, 2, 1];
    vec![
        ("loadu_halves", from_fn(|i| if i < 8 { words[0][i] } else { words[1][3 + i - 8] })),
        ("broadcast_i32x4", from_fn(|i| words[0][1 + i % 4])),
        ("mask_storeu_epi32", from_fn(|i| if mask >> i & 1 == 1 { a[i] } else { 0 })),
        ("cvtepi32_storeu_epi16", of_halves(|i| if i < 16 { a[i] & 0xFFFF } else { 0 })),
        ("cast_ps", alike(from_fn(|i| f32::from_bits(a[i])))),
        ("cast_si512", x.map(f32::to_bits)),
        ("set1_epi8", [0xEFEF_EFEF; 16]),
        ("set1_epi16", [0xFFEF_FFEF; 16]),
        ("set1_epi32", [0xFFFF_FFEF; 16]),
        ("setr_epi32", from_fn(|i| a[i])),
        by_word("and_si512", &|a, b| a & b),
        by_word("add_epi32", &|a, b| (u64::from(a) + u64::from(b)) as u32),
        by_half("sub_epi16", &|a, b| a + 0x1_0000 - b),
        by_half("min_epu16", &|a, b| a.min(b)),
        ("reduce_min_epu16", [(0..32).map(|i| half(a, i)).min().unwrap(); 16]),
        by_word("slli_epi32", &|a, _| (u64::from(a) * 32) as u32),
        by_word("srli_epi32", &|a, _| a / 32),
        by_half("srli_epi16", &|a, _| a / 32),
        by_word("rol_epi32", &|a, _| a.rotate_left(5)),
        unpacked("unpacklo_epi8", 8, 0),
        unpacked("unpackhi_epi8", 8, 1),
        unpacked("unpacklo_epi32", 32, 0),
        unpacked("unpackhi_epi32", 32, 1),
        unpacked("unpacklo_epi64", 64, 0),
        unpacked("unpackhi_epi64", 64, 1),
        ("shuffle_epi8", from_fn(|i| (0..4).fold(0, |word, part| word | shuffled(4 * i + part) << (8 * part)))),
        ("shuffle_epi32", from_fn(|i| a[i / 4 * 4 + WHICH[i % 4]])),
        ("shuffle_i32x4", from_fn(|i| if i < 8 { a } else { b }[4 * WHICH[i / 4] + i % 4])),
        ("permutex2var_ps", alike(from_fn(|i| two((b[i] % 32) as usize)))),
        ("insertf32x8_high", alike(from_fn(|i| if i < 8 { x[i] } else { y[i - 8] }))),
        ("mask_blend_epi16", of_halves(|i| half(if mask >> i & 1 == 1 { b } else { a }, i))),
        ("mask_blend_ps", alike(from_fn(|i| if mask >> i & 1 == 1 { y[i] } else { x[i] }))),
        ("cmplt_epu16_mask", [(0..32).map(|i| u32::from(half(a, i) < half(b, i)) << i).sum(); 16]),
        ("cmpunord_ps_mask", [(0..16).map(|i| u32::from(x[i].is_nan() || y[i].is_nan()) << i).sum(); 16]),
    ]
}

pub(crate) fn lanes_are_those_of_plain_loops() {
    let cpu = Cpu::new(Isa::EmulatedAvx512, 1, 0).unwrap();
    for operands in operands() {
        let found = super::dispatch(&cpu, LaneResults(&operands));
        assert_eq!(difference(found, lanes(&operands)), None, "{operands:x?}");
    }
}

pub(crate) fn words_are_those_of_plain_loops() {
    let cpu = Cpu::new(Isa::EmulatedAvx512Bf16, 1, 0).unwrap();
    for operands in operands() {
        // SAFETY: the kernel has no pointers.
        let found = unsafe { cpu.dispatch_dot(WordResults(&operands)) };
        assert_eq!(difference(found, words(&operands)), None, "{operands:x?}");
    }
}

pub(crate) fn dot_products_are_those_of_integers() {
    let cpu = Cpu::new(Isa::EmulatedAvx512Bf16, 1, 0).unwrap();
    for dots in dots() {
        // SAFETY: the kernel has no pointers.
        let found = unsafe { cpu.dispatch_dot(DotResults(&dots)) };
        for (lane, found) in found.into_iter().enumerate() {
            let expected = dot(dots.sums[lane], dots.a[lane], dots.b[lane]);
            assert_eq!(found, expected, "{found:x} instead of {expected:x} for {}", dots.show(lane));
        }
    }
}

/// What was seen to be wrong: the sum is the smallest normal number, one factor a flushed subnormal or a zero, and the other one
/// times 2^32 beyond the range.
pub(crate) fn a_zero_beside_a_large_factor_leaves_the_sum() {
    let cpu = Cpu::new(Isa::EmulatedAvx512Bf16, 1, 0).unwrap();
    for (sum, a, b) in
        [(0x8080_0000, 0x807F_8000, 0xAA04_7035), (0x0080_0000, 0x7F7F_0000, 0), (0x0080_0000, 0, 0x7F7F)]
    {
        let dots = Dots { sums: [sum; 16], a: [a; 16], b: [b; 16] };
        // SAFETY: the kernel has no pointers.
        assert_eq!(unsafe { cpu.dispatch_dot(DotResults(&dots)) }, [sum; 16]);
        assert_eq!(dot(sum, a, b), sum);
    }
}
