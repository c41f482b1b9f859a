//! What every instruction gives on random operands and on a grid of special ones: compared with the real instructions where
//! the machine has them ([`emulation_differs`]), and on every machine with definitions of their own (`definition.rs`).

use crate::simd::words::{Kernel512, Simd512};
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Isa};

/// Compares the emulated instructions of `isa` with the real ones, on random operands and special ones: what differs, if
/// anything does. Only for a machine that has them.
///
/// # Panics
/// When the machine lacks them, or `isa` is a real one.
pub fn emulation_differs(isa: Isa) -> Option<String> {
    let [emulated, real] = [isa, isa.emulates().expect("an emulated isa")]
        .map(|isa| Cpu::new(isa, 1, 0).expect("emulation is compared where the machine has the instructions"));
    operands()
        .find_map(|operands| {
            let lanes = [&emulated, &real].map(|cpu| super::dispatch(cpu, LaneResults(&operands)));
            let words = [&emulated, &real].map(|cpu| match isa.has_dot() {
                // SAFETY: the kernel has no pointers.
                true => unsafe { cpu.dispatch_dot(WordResults(&operands)) },
                false => Vec::new(),
            });
            let [differs, or] = [lanes, words].map(|[emulated, real]| difference(emulated, real));
            differs.or(or).map(|differs| format!("{isa}: {differs} for {operands:x?}"))
        })
        .or_else(|| {
            dots().take_while(|_| isa.has_dot()).find_map(|dots| {
                // SAFETY: the kernel has no pointers.
                let [emulated, real] = [&emulated, &real].map(|cpu| unsafe { cpu.dispatch_dot(DotResults(&dots)) });
                let lane = (0..16).find(|i| emulated[*i] != real[*i])?;
                Some(format!("{isa}: {:x} instead of {:x} for {}", emulated[lane], real[lane], dots.show(lane)))
            })
        })
}

/// The first result that is another one than expected.
pub fn difference(found: Vec<Named>, expected: Vec<Named>) -> Option<String> {
    assert!(
        found.iter().map(|named| named.0).eq(expected.iter().map(|named| named.0)),
        "the same results in one order"
    );
    let (found, expected) = found.into_iter().zip(expected).find(|(found, expected)| found != expected)?;
    Some(format!("{found:x?} instead of {:x?}", expected.1))
}

/// Operands of every instruction but `VDPBF16PS`.
#[derive(Debug)]
pub struct Operands {
    pub floats: [[f32; 16]; 3],
    pub words: [[u32; 32]; 2],
    /// A value in [0.5, 2) and an integral power for every lane.
    pub scale: [[f32; 16]; 2],
}

/// Operands of `VDPBF16PS`.
pub struct Dots {
    pub sums: [u32; 16],
    pub a: [u32; 16],
    pub b: [u32; 16],
}

impl Dots {
    /// Those of one lane.
    pub fn show(&self, lane: usize) -> String {
        format!("sum {:x}, pairs {:x} and {:x}", self.sums[lane], self.a[lane], self.b[lane])
    }
}

/// Halves of words, and the high halves of f32, where rules begin and end: zeros, subnormals, the smallest and the largest normal
/// numbers, infinities, a quiet and a signalling NaN, and numbers that leave the range of f32 when they are scaled by 2^32 or 2^64.
pub const HALVES: [u16; 23] = [
    0, 0x8000, 1, 0x807F, 0x0080, 0x8080, 0x00FF, 0x3F80, 0xBF80, 0x3FC1, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0,
    0x7F81, 0x4F80, 0x6F00, 0x6F80, 0x1080, 0x1000, 0x2000, 0x1F80,
];
/// The same of f32.
const FLOATS: [u32; 32] = [
    0,
    0x8000_0000,
    1,
    0x807F_FFFF,
    0x0080_0000,
    0x8080_0000,
    0x0080_0001,
    0x80FF_FFFF,
    0x3F80_0000,
    0xBF80_0000,
    0x3F80_0001,
    0xBF7F_FFFF,
    0x3F00_0000,
    0x3FC0_0000,
    0xC020_0000,
    0x4B00_0000,
    0xCB00_0001,
    0x4AFF_FFFF,
    0x7F7F_FFFF,
    0xFF7F_FFFF,
    0x7F7F_8000,
    0x477F_F000,
    0x3880_0000,
    0x3300_0000,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0x7F80_0001,
    0xFFC1_2345,
    0x6F80_0000,
    0x1080_0000,
    0x2000_0000,
];

/// Random ones, every special number in every place beside all others, and all pairs of exponents.
pub fn operands() -> impl Iterator<Item = Operands> {
    let random = (0..20_000).scan(Random(1), |random, _| Some(random.operands()));
    let specials = (0..FLOATS.len().pow(3) / 16).scan(Random(2), |random, i| {
        let count = FLOATS.len();
        let mut operands = random.operands();
        for lane in 0..16 {
            let at = 16 * i + lane;
            for (place, at) in [at % count, at / count % count, at / count / count].into_iter().enumerate() {
                operands.floats[place][lane] = f32::from_bits(FLOATS[at]);
            }
        }
        for (at, place) in operands.words.iter_mut().flatten().enumerate() {
            let at = 64 * i + at;
            let [high, low] = [at % HALVES.len(), at / HALVES.len() % HALVES.len()].map(|at| u32::from(HALVES[at]));
            *place = high << 16 | low;
        }
        Some(operands)
    });
    let exponents = (0..0x1_0000 / 16).scan(Random(3), |random, i| {
        let mut operands = random.operands();
        for lane in 0..16 {
            let at = 16 * i + lane as u32;
            let [a, b] = [at >> 8, at & 0xFF].map(|exponent| random.word() & 0x807F_FFFF | exponent << 23);
            let [a, b] = [a, b].map(f32::from_bits);
            // Beside the product, so that the sum cancels.
            let c = f32::from_bits((-a * b).to_bits() ^ random.word() & 3);
            for (place, x) in operands.floats.iter_mut().zip([a, b, c]) {
                place[lane] = x;
            }
        }
        Some(operands)
    });
    random.chain(specials).chain(exponents)
}

/// Every special half in all places beside special sums, and all pairs of exponents beside sums that cancel, that are small and
/// that are neither.
pub fn dots() -> impl Iterator<Item = Dots> {
    const SUMS: [u32; 16] = [
        0,
        0x8000_0000,
        1,
        0x807F_FFFF,
        0x0080_0000,
        0x8080_0000,
        0x0080_0001,
        0x8080_0001,
        0x00FF_FFFF,
        0x3F80_0000,
        0xBF80_0001,
        0x7F7F_FFFF,
        0xFF7F_FFFF,
        0x7F80_0000,
        0xFF80_0000,
        0x7F80_0001,
    ];
    let specials = (0..HALVES.len().pow(4)).map(|at| {
        let half = |place: u32| u32::from(HALVES[at / HALVES.len().pow(place) % HALVES.len()]);
        Dots { sums: SUMS, a: [half(3) << 16 | half(2); 16], b: [half(1) << 16 | half(0); 16] }
    });
    let exponents = (0..0x1_0000u32).scan(Random(4), |random, at| {
        let [mut sums, mut a, mut b] = [[0; 16]; 3];
        for lane in 0..16 {
            let half = |exponent: u32, random: u32| random & 0x807F | exponent << 7;
            let [high, other] = [half(at >> 8, random.word()), half(at & 0xFF, random.word())];
            let product = f32::from_bits(high << 16) * f32::from_bits(other << 16);
            // The second pair: none, or any.
            let [low, by] = if lane % 2 == 0 { [random.word() & 0x8000, 0] } else { [random.word(), random.word()] };
            (a[lane], b[lane]) = (high << 16 | low & 0xFFFF, other << 16 | by & 0xFFFF);
            sums[lane] = match lane / 2 {
                0 => random.word() & 0x8000_0000,
                1 => (-product).to_bits() ^ random.word() & 1,
                2 => (-product).to_bits() ^ random.word() & 0xF,
                3 => random.word() & 0x8000_0003 | 0x0080_0000,
                4 => (random.word() & 0x8000_0000 | 0x0100_0000) - (random.word() & 3),
                5 => (-product).to_bits().wrapping_add(random.word() & 0x0100_0000),
                6 => product.to_bits().wrapping_sub(random.word() & 0x0C00_0000),
                _ => random.word(),
            };
        }
        Some(Dots { sums, a, b })
    });
    specials.chain(exponents)
}

struct Random(u64);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// A bit pattern, or one of those where rules begin and end, in both halves or whole.
    fn special(&mut self) -> u32 {
        let half = |word: u32| u32::from(HALVES[word as usize % HALVES.len()]);
        match self.word() % 8 {
            0 => half(self.word()) << 16 | half(self.word()),
            1 => half(self.word()) << 16 | [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF][self.word() as usize % 6],
            // Of like size, so that sums cancel and round.
            2 | 3 => self.word() & 0x80FF_80FF | 0x3F00_3F00,
            // Products about the smallest normal number.
            4 => self.word() & 0x83FF_83FF | 0x1E00_1E00,
            _ => self.word(),
        }
    }

    fn operands(&mut self) -> Operands {
        let mantissa = [(); 16].map(|()| f32::from_bits(self.word() % 0x0100_0000 + 0x3F00_0000));
        Operands {
            floats: [(); 3].map(|()| [(); 16].map(|()| f32::from_bits(self.special()))),
            words: [(); 2].map(|()| [(); 32].map(|()| self.special())),
            scale: [mantissa, [(); 16].map(|()| (self.word() % 600) as f32 - 300.0)],
        }
    }
}

/// A result: which one it is, and its words; NaN of floats are alike.
pub type Named = (&'static str, [u32; 16]);

/// The bits of lanes, every NaN the canonical one.
pub fn alike(lanes: [f32; 16]) -> [u32; 16] {
    lanes.map(|lane| if lane.is_nan() { 0x7FC0_0000 } else { lane.to_bits() })
}

#[inline(always)]
fn floats<S: Simd>(s: S, name: &'static str, v: S::F) -> Named {
    let mut lanes = [0f32; 16];
    // SAFETY: 16 lanes.
    unsafe { s.store(v, lanes.as_mut_ptr()) };
    (name, alike(lanes))
}

/// Positive numbers as [`Simd::narrow_pairs_about`] takes them.
pub fn positive(bits: u32) -> f32 {
    f32::from_bits((bits & 0x7FFF_FFFF).clamp(0x0080_0000, 0x7F00_0000))
}

/// What the methods of [`Simd`] give.
pub struct LaneResults<'a>(pub &'a Operands);

impl Kernel for LaneResults<'_> {
    type Output = Vec<Named>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<Named> {
        let Operands { floats: lanes, words, scale } = self.0;
        let mut all = Vec::with_capacity(600);
        // SAFETY: every pointer is to 16 lanes, or to 32 words, of which rows of a block are 16.
        unsafe {
            let [a, b, c] = [0, 1, 2].map(|i| s.load(lanes[i].as_ptr()));
            let [m, i] = [0, 1].map(|i| s.load(scale[i].as_ptr()));
            let in_range = s.max(s.splat(-125.0), s.min(s.splat(126.0), i));
            let halves = words[0].as_ptr();
            let pairs = s.load_pairs(halves);
            let interleaved = s.interleave(a, b);
            all.extend([
                floats(s, "splat", s.splat(lanes[0][0])),
                floats(s, "add", s.add(a, b)),
                floats(s, "sub", s.sub(a, b)),
                floats(s, "mul", s.mul(a, b)),
                floats(s, "div", s.div(a, b)),
                floats(s, "sqrt", s.sqrt(a)),
                floats(s, "fma", s.fma(a, b, c)),
                floats(s, "abs", s.abs(a)),
                floats(s, "neg", s.neg(a)),
                floats(s, "copysign", s.copysign(a, b)),
                floats(s, "round", s.round(a)),
                floats(s, "floor", s.floor(a)),
                floats(s, "max", s.max(a, b)),
                floats(s, "min", s.min(a, b)),
                floats(s, "select_ge", s.select_ge(a, b, c, m)),
                floats(s, "pow2", s.pow2(in_range)),
                floats(s, "mul_pow2", s.mul_pow2(m, in_range)),
                floats(s, "scale", s.scale(m, i)),
                floats(s, "load_bf16", s.load_bf16(halves.cast())),
                floats(s, "load_f16", s.load_f16(halves.cast())),
                floats(s, "load_pairs, high", pairs.0),
                floats(s, "load_pairs, low", pairs.1),
                floats(s, "interleave, first", interleaved.0),
                floats(s, "interleave, second", interleaved.1),
                ("all_within", [u32::from(s.all_within(b, a, c)); 16]),
                ("any_nan_or_inf", [u32::from(s.any_nan_or_inf(a)); 16]),
                ("least_bf16", [u32::from(s.least_bf16(halves.cast(), 64)); 16]),
            ]);
            macro_rules! stored {
                ($name:literal, $store:ident($($v:expr),*)) => {{
                    let mut out = [0u32; 16];
                    s.$store($($v,)* out.as_mut_ptr().cast());
                    all.push(($name, out));
                }};
            }
            stored!("store", store(s.load(words[1].as_ptr().cast())));
            stored!("narrow_f32", narrow_f32(a));
            stored!("narrow_bf16", narrow_bf16(a));
            stored!("narrow_f16", narrow_f16(a));
            stored!("narrow_pairs", narrow_pairs(a, b));
            stored!("swap_pairs", swap_pairs(halves));
            let [high, low] = [0, 1].map(|i| words[i].map(positive));
            let mut out = [0u32; 16];
            let about = s.narrow_pairs_about(&[(s.load(high.as_ptr()), s.load(low.as_ptr()))], out.as_mut_ptr());
            all.push(("narrow_pairs_about", if about { out } else { [0; 16] }));
            let (from, mut to) = (&words[1], Line([0; 16]));
            s.stream_line(from.as_ptr().cast(), to.0.as_mut_ptr().cast());
            s.fence();
            all.push(("stream_line", to.0));
            for count in 1..=16 {
                let rows = std::array::from_fn(|i| words[i % 2].as_ptr().wrapping_add(i / 2));
                let mut out = [[[0u32; 16]; 16]; 2];
                s.transpose::<false>(&rows, 1, count, out[0].as_mut_ptr().cast(), 16);
                s.transpose::<true>(&rows, 1, count, out[1].as_mut_ptr().cast(), 16);
                all.extend(out.into_iter().flatten().map(|row| ("transpose", row)));
            }
        }
        all
    }
}

/// Where a line of memory begins.
#[repr(C, align(64))]
struct Line([u32; 16]);

/// What the methods of [`Simd512`] give but for `VDPBF16PS`.
pub struct WordResults<'a>(pub &'a Operands);

impl Kernel512 for WordResults<'_> {
    type Output = Vec<Named>;
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) -> Vec<Named> {
        let Operands { floats: lanes, words, .. } = self.0;
        // SAFETY: every pointer is to 16 lanes or 32 words.
        unsafe {
            let integers = |name, v: S::I| {
                let mut out = [0u32; 16];
                s.storeu_si512(out.as_mut_ptr(), v);
                (name, out)
            };
            let [a, b] = [0, 1].map(|i| s.loadu_si512(words[i].as_ptr()));
            let [x, y] = [0, 1].map(|i| s.load(lanes[i].as_ptr()));
            let mask = words[1][16];
            let mut masked = [0; 16];
            s.mask_storeu_epi32(masked.as_mut_ptr(), mask as u16, a);
            let mut halves = [0; 16];
            s.cvtepi32_storeu_epi16(halves.as_mut_ptr().cast(), a);
            vec![
                integers("loadu_halves", s.loadu_halves(words[0].as_ptr(), words[1].as_ptr().add(3))),
                integers("broadcast_i32x4", s.broadcast_i32x4(words[0].as_ptr().add(1))),
                ("mask_storeu_epi32", masked),
                ("cvtepi32_storeu_epi16", halves),
                floats(s, "cast_ps", s.cast_ps(a)),
                integers("cast_si512", s.cast_si512(x)),
                integers("set1_epi8", s.set1_epi8(-17)),
                integers("set1_epi16", s.set1_epi16(-17)),
                integers("set1_epi32", s.set1_epi32(-17)),
                integers("setr_epi32", s.setr_epi32(std::array::from_fn(|i| words[0][i] as i32))),
                integers("and_si512", s.and_si512(a, b)),
                integers("add_epi32", s.add_epi32(a, b)),
                integers("sub_epi16", s.sub_epi16(a, b)),
                integers("min_epu16", s.min_epu16(a, b)),
                ("reduce_min_epu16", [u32::from(s.reduce_min_epu16(a)); 16]),
                integers("slli_epi32", s.slli_epi32::<5>(a)),
                integers("srli_epi32", s.srli_epi32::<5>(a)),
                integers("srli_epi16", s.srli_epi16::<5>(a)),
                integers("rol_epi32", s.rol_epi32::<5>(a)),
                integers("unpacklo_epi8", s.unpacklo_epi8(a, b)),
                integers("unpackhi_epi8", s.unpackhi_epi8(a, b)),
                integers("unpacklo_epi32", s.unpacklo_epi32(a, b)),
                integers("unpackhi_epi32", s.unpackhi_epi32(a, b)),
                integers("unpacklo_epi64", s.unpacklo_epi64(a, b)),
                integers("unpackhi_epi64", s.unpackhi_epi64(a, b)),
                integers("shuffle_epi8", s.shuffle_epi8(a, b)),
                integers("shuffle_epi32", s.shuffle_epi32::<0x6C>(a)),
                integers("shuffle_i32x4", s.shuffle_i32x4::<0x6C>(a, b)),
                floats(s, "permutex2var_ps", s.permutex2var_ps(x, b, y)),
                floats(s, "insertf32x8_high", s.insertf32x8_high(x, y)),
                integers("mask_blend_epi16", s.mask_blend_epi16(mask, a, b)),
                floats(s, "mask_blend_ps", s.mask_blend_ps(mask as u16, x, y)),
                ("cmplt_epu16_mask", [s.cmplt_epu16_mask(a, b); 16]),
                ("cmpunord_ps_mask", [u32::from(s.cmpunord_ps_mask(x, y)); 16]),
            ]
        }
    }
}

/// What `VDPBF16PS` gives.
pub struct DotResults<'a>(pub &'a Dots);

impl Kernel512 for DotResults<'_> {
    type Output = [u32; 16];
    #[inline(always)]
    unsafe fn run<S: Simd512>(self, s: S) -> [u32; 16] {
        let Dots { sums, a, b } = self.0;
        // SAFETY: every pointer is to 16 words, and the machine has the instruction.
        unsafe {
            let [a, b] = [a, b].map(|words| s.loadu_si512(words.as_ptr()));
            floats(s, "", s.dpbf16_ps(s.load(sums.as_ptr().cast()), a, b)).1
        }
    }
}
