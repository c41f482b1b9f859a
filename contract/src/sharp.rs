//! What [`Fill::Sharp`](crate::fill::Fill::Sharp) is made of.
//!
//! A polynomial in f32 hides the last bit of its constants: of a million arguments of `e^x`, two give another result
//! when the coefficient of the highest power is another by one unit in the last place. The arguments here were found by
//! search over f32, so that every one of the eight constants of docs/NUMERICS.md, section 3 (six coefficients and the
//! two parts of log2(e)) shows in the f32 output of the op, whether it is one unit larger or smaller.

/// Arguments x of a softmax of (0, x).
const PAIR: [u32; 57] = [
    0x3d87_cc40,
    0x3e75_dc70,
    0x3e90_be57,
    0x3eb1_3381,
    0x3eb2_ce84,
    0x3eb8_62dc,
    0x3eb9_2a6d,
    0x3ee7_7e2f,
    0x3eeb_ec85,
    0x3ef8_493e,
    0x3f0d_ed98,
    0x3f6e_3968,
    0x3fec_b0d2,
    0xbdb4_e089,
    0xbe61_8129,
    0xbe84_3ada,
    0xbe85_6afe,
    0xbe89_7822,
    0xbe8c_482a,
    0xbecc_4eb8,
    0xbeda_e81b,
    0xbf14_639f,
    0xbf5b_836f,
    0xbf6e_112b,
    0xbf74_8d2c,
    0xbf75_8486,
    0xbf8a_7428,
    0xbfdd_a8b2,
    0xc033_7f8c,
    0xc043_6423,
    0xc0a5_bc73,
    0xc0b7_742f,
    0xc0bc_04b6,
    0xc0ec_c590,
    0xc111_7499,
    0xc114_7f82,
    0xc12b_382d,
    0xc136_9aaf,
    0xc13f_c6ac,
    0xc16c_df7e,
    0xc181_fb41,
    0xc18e_a882,
    0xc192_822d,
    0xc1b1_f36a,
    0xc1c4_707a,
    0xc1c5_3af3,
    0xc1ca_d27f,
    0xc1e5_03d4,
    0xc1e8_1c1a,
    0xc1fa_adb5,
    0xc1fb_ed43,
    0xc1fe_64cc,
    0xc213_f259,
    0xc235_8820,
    0xc246_11c7,
    0xc27a_adb5,
    0xc280_320b,
];

/// Logits of a row of one element, whose logarithm they are.
const ALONE: [u32; 50] = [
    0x3e0f_a951,
    0x3e62_567a,
    0x3e78_aa76,
    0x3eb5_ceae,
    0x3eba_6773,
    0x3ec1_b8d4,
    0x3ec5_457d,
    0x3ecd_3fae,
    0x3ed4_7665,
    0x3edb_6a11,
    0x3efb_765b,
    0x3f4d_0474,
    0x3f57_46e7,
    0x3f77_7e5e,
    0x3f86_1ea9,
    0x3fdd_d2b3,
    0x3fe2_4d1f,
    0x3fea_02bf,
    0x403b_1d2d,
    0x40a9_4e94,
    0x40ed_9eba,
    0xbde3_e790,
    0xbdf5_3db8,
    0xbe3c_3c13,
    0xbe3c_869f,
    0xbe6d_ab70,
    0xbe76_06bf,
    0xbe98_bf81,
    0xbe99_8674,
    0xbe9c_c2ee,
    0xbea3_9d68,
    0xbea9_4abd,
    0xbea9_d054,
    0xbea9_e94f,
    0xbeab_5fc7,
    0xbeab_a7ac,
    0xbeae_83d0,
    0xbeb9_42ff,
    0xbeb9_72a1,
    0xbeba_bf55,
    0xbebc_e220,
    0xbec7_6856,
    0xbf61_1e37,
    0xbf63_3f42,
    0xbf6b_be8c,
    0xbf7b_c69b,
    0xbf7b_e55e,
    0xbf7e_9794,
    0xbf80_29c5,
    0xc040_6d9d,
];

/// Arguments g of `g * sigmoid(g)`.
const SILU: [u32; 51] = [
    0x3e18_c554,
    0x3e57_4277,
    0x3e92_651e,
    0x3ea2_d530,
    0x3eae_1586,
    0x3ec1_cb58,
    0x3ecc_fd09,
    0x3ee5_b3ed,
    0x3efb_a1c7,
    0x3f7c_0afb,
    0x3f83_2d21,
    0x3fd0_914d,
    0x403a_9ff9,
    0xbe78_2235,
    0xbf64_9ca3,
    0xbf85_da62,
    0xbf8a_7428,
    0xbfa4_1580,
    0xbfd4_783b,
    0xc019_d5d4,
    0xc01c_6878,
    0xc01d_658d,
    0xc074_84b7,
    0xc0c3_9128,
    0xc0ec_c590,
    0xc0fe_fc16,
    0xc10c_07eb,
    0xc11f_ed97,
    0xc12a_e430,
    0xc137_39ef,
    0xc13f_c6ac,
    0xc14e_9c41,
    0xc163_583a,
    0xc16e_0ffc,
    0xc1ae_d04f,
    0xc1b4_3b41,
    0xc1b4_5507,
    0xc1c1_6cc0,
    0xc1f1_64e9,
    0xc213_f259,
    0xc22a_36be,
    0xc235_9fe1,
    0xc25a_739b,
    0xc262_0248,
    0xc280_6f1f,
    0xc281_3530,
    0xc289_b7ee,
    0xc28c_d032,
    0xc28f_2265,
    0xc29d_15b3,
    0xc29f_187b,
];

/// Arguments of the sigmoid.
const SIGMOID: [u32; 52] = [
    0x3e18_c554,
    0x3e57_4277,
    0x3e92_651e,
    0x3ea2_d530,
    0x3eae_1586,
    0x3ec1_cb58,
    0x3ecc_fd09,
    0x3ed6_cba4,
    0x3ee5_b3ed,
    0x3efb_a1c7,
    0x3f7c_0afb,
    0x3f83_2d21,
    0x3fd0_914d,
    0x403a_9ff9,
    0xbe78_2235,
    0xbf54_8bc9,
    0xbf64_9ca3,
    0xbf85_da62,
    0xbf8a_7428,
    0xbfa4_1580,
    0xbfd4_783b,
    0xc019_d5d4,
    0xc01c_6878,
    0xc074_84b7,
    0xc0c3_9128,
    0xc0ec_c590,
    0xc0fe_fc16,
    0xc10c_07eb,
    0xc11f_ed97,
    0xc12a_e430,
    0xc137_39ef,
    0xc13f_c6ac,
    0xc14e_9c41,
    0xc163_583a,
    0xc16e_0ffc,
    0xc1ae_d04f,
    0xc1b4_3b41,
    0xc1b4_5507,
    0xc1c1_6cc0,
    0xc1f1_64e9,
    0xc213_f259,
    0xc235_9fe1,
    0xc242_f8e3,
    0xc25a_739b,
    0xc262_0248,
    0xc280_6f1f,
    0xc281_3530,
    0xc289_b7ee,
    0xc28c_d032,
    0xc28f_2265,
    0xc29d_15b3,
    0xc29f_187b,
];

/// Arguments of the gelu of the hyperbolic tangent.
const GELU: [u32; 56] = [
    0x3d85_3fe6,
    0x3de6_82cc,
    0x3e30_fd97,
    0x3e34_0ff4,
    0x3e3f_fe0a,
    0x3e63_fffd,
    0x3e66_71a0,
    0x3eb5_3432,
    0x3f21_878d,
    0x3f73_2af8,
    0x3ffc_efbd,
    0xbe04_0c93,
    0xbe2b_e84b,
    0xbe4a_848e,
    0xbe52_72b0,
    0xbe59_1f02,
    0xbe65_f407,
    0xbe70_0e7c,
    0xbe85_a9c7,
    0xbe8f_086a,
    0xbf21_0caf,
    0xbf28_9ff2,
    0xbf2d_fe42,
    0xbf70_5cb2,
    0xbf7e_e9f2,
    0xbf85_ac7c,
    0xbfb4_1304,
    0xbfb5_10fa,
    0xbfdb_8758,
    0xc002_bfc1,
    0xc00f_04b7,
    0xc021_6775,
    0xc026_2ad5,
    0xc02b_f34d,
    0xc02c_e16f,
    0xc046_0545,
    0xc05e_e434,
    0xc060_d7b7,
    0xc060_f2c7,
    0xc072_5311,
    0xc07d_2875,
    0xc07d_d086,
    0xc092_b82f,
    0xc09a_94cc,
    0xc09e_0caf,
    0xc0a4_0d29,
    0xc0be_ed2a,
    0xc0d0_9e2b,
    0xc0d0_9e2c,
    0xc0d2_eea7,
    0xc0e3_caa7,
    0xc0f1_24c9,
    0xc0f1_4d9b,
    0xc0fe_d497,
    0xc101_b03e,
    0xc10c_cced,
];

/// Arguments of the gelu of the error function.
const GELU_ERF: [u32; 12] = [
    0x3c08_a889,
    0x3da5_b833,
    0x3f10_0589,
    0xbd82_ecdb,
    0xbdfe_9650,
    0xbfed_0419,
    0xc023_e256,
    0xc030_47a6,
    0xc03d_d3dd,
    0xc0ae_c7a7,
    0xc0b2_a978,
    0xc12b_0af7,
];

/// Arguments x of `30 * tanh(x / 30)`.
const SOFTCAP: [u32; 48] = [
    0x3f8a_db6e,
    0x3f9c_bb41,
    0x3fec_4648,
    0x3ff8_550b,
    0x403f_0583,
    0x403f_ab36,
    0x4058_805d,
    0x4064_4e44,
    0x407d_ccfb,
    0x4095_6fd8,
    0x4099_6391,
    0x409e_5e0d,
    0x409e_bcea,
    0x409f_f05d,
    0x40a1_a3f6,
    0x40a4_6066,
    0x40a6_ebdf,
    0x40bd_4e8a,
    0x40c1_ee0b,
    0x40e7_aee9,
    0x4165_4458,
    0x4168_c844,
    0x4173_f18f,
    0x41c7_3eee,
    0x4228_4793,
    0x42c4_e92e,
    0xbf21_b30b,
    0xc036_84d3,
    0xc058_0189,
    0xc069_0e5d,
    0xc083_c3b6,
    0xc086_6ab7,
    0xc094_06dc,
    0xc0a1_50ca,
    0xc0a4_6066,
    0xc0b2_e5c6,
    0xc0b7_2ec1,
    0xc0bf_3784,
    0xc0d0_0ea0,
    0xc15a_e14d,
    0xc165_28f8,
    0xc165_4458,
    0xc16f_ec20,
    0xc17d_da48,
    0xc192_75a8,
    0xc1cf_d0d7,
    0xc1da_3f02,
    0xc241_3d8f,
];

/// Logits b, c and e of which `1 + (e^b + (e^c + e^e))` in f32 is another sum than without e, although e^e is only
/// about 2^-61 or 2^-64: `1 + e^b` is nearly a tie, and so is `e^b + e^c`.
const TIES: [[f32; 3]; 5] = [
    [-15.026094, -31.884771, -42.28198],
    [-14.438308, -31.191624, -42.28198],
    [-15.026094, -31.884773, -44.36142],
    [-14.438308, -31.191624, -44.36142],
    [-12.874332, -28.706717, -44.36142],
];

/// The exponential of this is below every cut.
const NOTHING: f64 = -1000.0;

fn values(bits: &[u32]) -> impl Iterator<Item = f64> + Clone {
    bits.iter().map(|&bits| f64::from(f32::from_bits(bits)))
}

/// `len` values of `bits`, again and again.
fn cycle(bits: &[u32], len: usize) -> Vec<f64> {
    values(bits).cycle().take(len).collect()
}

/// Gates of `silu_mul`.
pub fn silu(len: usize) -> Vec<f64> {
    cycle(&SILU, len)
}

/// Gates of `gelu_mul`.
pub fn gelu(len: usize) -> Vec<f64> {
    cycle(&GELU, len)
}

/// Inputs of `activate`, for the gelu of the error function.
pub fn gelu_erf(len: usize) -> Vec<f64> {
    cycle(&GELU_ERF, len)
}

/// Arguments of an exponential that shows as it is.
pub fn exponents(len: usize) -> Vec<f64> {
    values(&PAIR).chain(values(&ALONE)).cycle().take(len).collect()
}

/// Inputs of `softcap` with a cap of 30.
pub fn softcap(len: usize) -> Vec<f64> {
    cycle(&SOFTCAP, len)
}

/// Logits for sigmoids.
pub fn sigmoid(len: usize) -> Vec<f64> {
    cycle(&SIGMOID, len)
}

/// `rows` rows of `n` logits, 8 or more, for everything that is a softmax: pairs, single elements, sums that nearly
/// tie, weights from 2^-50 to 2^-112 of the largest, logits around 2^22 / log2(e), where an exponent has no fraction
/// left; and from the start again. The rest of a row has no weight.
pub fn logits(rows: usize, n: usize) -> Vec<f64> {
    let filled = |start: &[f64]| [start, &vec![NOTHING; n - start.len()]].concat();
    let mut all: Vec<Vec<f64>> = values(&PAIR).map(|x| filled(&[0.0, x])).collect();
    all.extend(values(&ALONE).map(|x| filled(&[x])));
    for [b, c, e] in TIES.map(|tie| tie.map(f64::from)) {
        // Lanes fold so that element 7 meets 3, then these two 1, and all of them 0.
        all.push(filled(&[0.0, b, NOTHING, c, NOTHING, NOTHING, NOTHING, e]));
    }
    all.push((0..n).map(below).collect());
    for top in [1.6e6, 2.4e6, 4e6] {
        all.push((0..n).map(|j| top - 0.375 * j as f64).collect());
    }
    all.into_iter().cycle().take(rows).flatten().collect()
}

/// Rows of more elements than this are [`near_one`] instead of [`logits`].
pub const LONG: usize = 1024;

/// Rows of `n` logits, made of `normal` ones, whose exponentials add up to between 1 and 3: the logarithm of a larger
/// sum would hide its last bits, and with them the order of the sum.
pub fn near_one(normal: Vec<f64>, n: usize) -> Vec<f64> {
    let shift = 0.5 + 0.6875 * f64::from(n.ilog2());
    normal.into_iter().map(|x| x - shift).collect()
}

/// The logit whose weight is about 2^-(49 + j) of that of 0; for j = 0, 0 itself.
fn below(j: usize) -> f64 {
    if j == 0 { 0.0 } else { -((49 + j) as f64) * std::f64::consts::LN_2 }
}

/// Scores of `len` keys under two queries: pairs, then weights from 2^-50 on; and inputs of a softcap of 30.
pub fn scores(len: usize) -> [Vec<f64>; 2] {
    let first = values(&PAIR).chain((0..).map(below)).take(len).collect();
    [first, softcap(len)]
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// The constants of docs/NUMERICS.md, section 3: six coefficients, then the two parts of log2(e).
    const CONSTANTS: [u32; 8] =
        [0x3920_b5b7, 0x3aaf_841a, 0x3c1d_96f0, 0x3d63_57be, 0x3e75_fdee, 0x3f31_7218, 0x3fb8_aa3b, 0x32a5_7060];

    /// `exp_split` with these constants: m, and i as an integer.
    fn split(c: &[f32; 8], x: f32) -> (f32, i32) {
        let i = (x * c[6]).round_ties_even();
        let f = x.mul_add(c[7], x.mul_add(c[6], -i));
        let m = c[1..6].iter().fold(c[0], |m, c| m.mul_add(f, *c));
        (m.mul_add(f, 1.0), i as i32)
    }

    fn pow2(i: i32) -> f32 {
        f32::from_bits(((i + 127) as u32) << 23)
    }

    fn sigmoid(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, -x);
        1.0 / (1.0 + m * pow2(i / 2) * pow2(i - i / 2))
    }

    fn gelu(c: &[f32; 8], g: f32) -> f32 {
        let a = f32::from_bits(0x3fcc_422a) * f32::from_bits(0x3d37_2713).mul_add((g * g) * g, g);
        g * sigmoid(c, a)
    }

    /// Those of `normal`: the step, then nine coefficients from the highest power on; last, the density.
    const NORMAL: [u32; 11] = [
        0x3e87_ae14,
        0x3cfa_dfc0,
        0xbe12_bd2d,
        0x3e5d_21a8,
        0xbdea_0e03,
        0x3e0b_d4ba,
        0x3d79_6d91,
        0x3dd2_0858,
        0x3dd7_961d,
        0x3dd8_8e6b,
        0x3ecc_422a,
    ];

    /// The gelu of the error function and its slope, with these constants.
    fn gelu_erf(c: &[f32; 8], k: &[f32; 11], x: f32) -> [f32; 2] {
        let t = 1.0 / k[0].mul_add(x.abs(), 1.0);
        let m = k[2..10].iter().fold(k[1], |m, k| m.mul_add(t, *k));
        let (e, i) = split(c, (x * x) * -0.5);
        let e = e * pow2(i / 2) * pow2(i - i / 2);
        let beyond = e * (m * t);
        let share = if x >= 0.0 { 1.0 - beyond } else { beyond };
        [x * share, share + x * (e * k[10])]
    }

    /// As [`shows`], of value and slope: but for the first coefficient of the exponential and the low part of log2(e), which
    /// hide behind the share, and the density in the value, which it is no part of.
    pub(crate) fn every_bit_of_the_normal_distribution_shows() {
        let (c, k) = (CONSTANTS.map(f32::from_bits), NORMAL.map(f32::from_bits));
        for constant in 0..19 {
            for change in [1, -1i32] {
                let (mut wrong_c, mut wrong_k) = (c, k);
                let wrong = if constant < 8 { &mut wrong_c[constant] } else { &mut wrong_k[constant - 8] };
                *wrong = f32::from_bits(wrong.to_bits().wrapping_add_signed(change));
                let shown = [0, 1].map(|output| {
                    let differs = |x| gelu_erf(&c, &k, x)[output] != gelu_erf(&wrong_c, &wrong_k, x)[output];
                    GELU_ERF.iter().any(|x| differs(f32::from_bits(*x)))
                });
                let is_hidden = [0, 7].contains(&constant);
                assert_eq!(shown, [!is_hidden && constant != 18, !is_hidden], "constant {constant}, {change}");
            }
        }
    }

    fn softcap(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, -2.0 * (x * (1.0f64 / 30.0) as f32).abs());
        let e = m * pow2(i);
        30.0 * ((1.0 - e) / (1.0 + e)).copysign(x)
    }

    fn pair(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, x);
        let n = i.max(0);
        let w = m * pow2(i - n);
        w / (pow2(-n) + w)
    }

    /// The gradient of the second element from that of the first share: minus the product of the shares.
    fn pair_backward(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, x);
        let n = i.max(0);
        let (w, one) = (m * pow2(i - n), pow2(-n));
        w / (one + w) * -(one / (one + w))
    }

    fn exponential(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, x);
        m * pow2(i)
    }

    /// The logarithm is close enough to that of the page: f64 keeps 29 bits more than it shows.
    fn alone(c: &[f32; 8], x: f32) -> f32 {
        let (m, i) = split(c, x);
        (f64::from(i) * std::f64::consts::LN_2 + f64::from(m).ln()) as f32
    }

    /// Every constant shows, one ulp up and one down, but for `hidden` ones, which do not show in at least one of the
    /// two.
    #[track_caller]
    fn shows(list: &[u32], function: fn(&[f32; 8], f32) -> f32, hidden: &[usize]) {
        let right = CONSTANTS.map(f32::from_bits);
        for constant in 0..8 {
            let seen = |bits: u32| {
                let mut wrong = right;
                wrong[constant] = f32::from_bits(bits);
                list.iter().map(|x| f32::from_bits(*x)).any(|x| function(&right, x) != function(&wrong, x))
            };
            let both = seen(CONSTANTS[constant] + 1) && seen(CONSTANTS[constant] - 1);
            assert_eq!(both, !hidden.contains(&constant), "constant {constant}");
        }
    }

    pub(crate) fn every_bit_of_every_constant_shows() {
        shows(&PAIR, pair, &[]);
        shows(&PAIR, pair_backward, &[]);
        shows(&PAIR, exponential, &[]);
        shows(&SILU, |c, g| g * sigmoid(c, g), &[]);
        shows(&SIGMOID, sigmoid, &[]);
        shows(&GELU, gelu, &[]);
        // No f32 from 1/20 to 16, of either sign, shows the low part of log2(e) in the logarithm of its exponential.
        shows(&ALONE, alone, &[7]);
        shows(&SOFTCAP, softcap, &[7]);
    }

    pub(crate) fn ties_show_the_smallest_weight() {
        let constants = CONSTANTS.map(f32::from_bits);
        let weight = |x: f32| {
            let (m, i) = split(&constants, x);
            m * pow2(i)
        };
        for [b, c, e] in TIES {
            assert!(weight(e) < pow2(-60) && weight(e) > 0.0);
            let (b, c, e) = (weight(b), weight(c), weight(e));
            assert_ne!(1.0 + (b + (c + e)), 1.0 + (b + c));
        }
    }
}
