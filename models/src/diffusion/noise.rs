//! Noise that depends on nothing but its place: a normal number for each seed, image, draw and element.

use crate::sampling::{mix, random};

/// The normal numbers of draw number `draw` of an image, from element `first` on. The initial latents are one draw, and each step
/// that draws is another.
///
/// `h = mix(mix(mix(mix(seed) + image) + draw) + element)` has 53 bits that stand for the middle of an interval, `p`; the number
/// is the quantile of p, by Wichura's rational functions (Applied Statistics 37, algorithm AS 241) in f64, rounded to f32.
///
/// ```
/// use samebits_models::diffusion::noise;
///
/// let (mut all, mut some) = ([0f32; 8], [0f32; 3]);
/// noise(7, 0, 0, 0, &mut all);
/// noise(7, 0, 0, 4, &mut some);
/// assert_eq!(all[4..7], some);
/// ```
pub fn noise(seed: u64, image: u64, draw: u64, first: u64, out: &mut [f32]) {
    let place = random(seed, image, draw);
    for (element, out) in (first..).zip(out) {
        let bits = mix(place.wrapping_add(element)) >> 11;
        *out = quantile((bits as f64 + 0.5) / (1u64 << 53) as f64) as f32;
    }
}

/// The number below which a share p of a normal distribution lies, 0 < p < 1.
fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180625 - q * q;
        return q * ratio(r, &CENTRE);
    }
    let r = libm::sqrt(-libm::log(if q < 0.0 { p } else { 1.0 - p }));
    let x = if r <= 5.0 { ratio(r - 1.6, &NEAR) } else { ratio(r - 5.0, &FAR) };
    if q < 0.0 { -x } else { x }
}

/// A quotient of two polynomials, the last coefficients first in the steps.
fn ratio(r: f64, [above, below]: &[[f64; 8]; 2]) -> f64 {
    let polynomial = |c: &[f64; 8]| c.iter().rev().fold(0.0, |sum, c| sum * r + c);
    polynomial(above) / polynomial(below)
}

const CENTRE: [[f64; 8]; 2] = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];

const NEAR: [[f64; 8]; 2] = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];

const FAR: [[f64; 8]; 2] = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        1.242_660_947_388_078_4e-3,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_888,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        7.868_691_311_456_133e-4,
        1.846_318_317_510_054_7e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn quantiles_are_those_of_tables() {
        // The last two are beyond both borders of the rational functions.
        for (p, expected) in [
            (0.5, 0.0),
            (0.75, 0.674_489_750_196_081_7),
            (0.975, 1.959_963_984_540_054),
            (0.001, -3.090_232_306_167_813_5),
            (1e-12, -7.034_483_825_301_131),
            (1e-16, -8.222_082_216_130_435),
        ] {
            assert!((quantile(p) - expected).abs() < 1e-13 * (1.0 + expected.abs()), "{p}: {}", quantile(p));
        }
    }

    /// Mean, variance and the share beyond two deviations of a hundred thousand; places that differ in one number have others.
    pub(crate) fn numbers_are_normal_and_differ_by_place() {
        let mut many = vec![0f32; 100_000];
        noise(1, 2, 3, 0, &mut many);
        let n = many.len() as f64;
        let mean = many.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = many.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
        let beyond = many.iter().filter(|v| v.abs() > 2.0).count() as f64 / n;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02 && (beyond - 0.0455).abs() < 0.003);
        let of = |[seed, image, draw, first]: [u64; 4]| {
            let mut some = [0f32; 4];
            noise(seed, image, draw, first, &mut some);
            some
        };
        let all = [[1, 2, 3, 0], [2, 2, 3, 0], [1, 3, 3, 0], [1, 2, 4, 0], [1, 2, 3, 4]].map(of);
        for (i, some) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != some));
        }
    }
}
