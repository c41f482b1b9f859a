//! How numbers are stored in blocks, and what each stands for.

use super::*;
use crate::mxfp4;
use samebits_ops::{Offset, Quantized};

/// How the numbers of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

use Format::*;

/// The types of ggml, their numbers and names.
const FORMATS: [(u32, Format, &str); 12] = [
    (0, F32, "F32"),
    (1, F16, "F16"),
    (2, Q4_0, "Q4_0"),
    (3, Q4_1, "Q4_1"),
    (6, Q5_0, "Q5_0"),
    (7, Q5_1, "Q5_1"),
    (8, Q8_0, "Q8_0"),
    (12, Q4K, "Q4_K"),
    (13, Q5K, "Q5_K"),
    (14, Q6K, "Q6_K"),
    (30, Bf16, "BF16"),
    (39, Mxfp4, "MXFP4"),
];

impl Format {
    /// # Errors
    /// A number that none of them has.
    pub fn of(kind: u32) -> Result<Format, String> {
        let found = FORMATS.into_iter().find(|(number, ..)| *number == kind);
        found.map(|(_, format, _)| format).ok_or_else(|| {
            let names: Vec<&str> = FORMATS.into_iter().map(|(.., name)| name).collect();
            format!("is stored as type {kind} of ggml; supported are {}", names.join(", "))
        })
    }

    pub fn name(self) -> &'static str {
        FORMATS.into_iter().find(|(_, format, _)| *format == self).map_or("", |(.., name)| name)
    }

    /// The number of the type.
    pub fn number(self) -> u32 {
        FORMATS.into_iter().find(|(_, format, _)| *format == self).map_or(0, |(number, ..)| number)
    }

    /// Adds a row in blocks, which it fills.
    ///
    /// # Panics
    /// For a format that nothing is quantised to here.
    pub fn quantize(self, row: &[f32], bytes: &mut Vec<u8>) {
        for block in row.chunks(self.block().0) {
            match self {
                F32 => bytes.extend(block[0].to_le_bytes()),
                Q8_0 => to_q8_0(block, bytes),
                Q4K => to_q4_k(block, bytes),
                _ => panic!("nothing is quantised to {} here", self.name()),
            }
        }
    }

    /// Numbers of a block, and its bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            F32 => (1, 4),
            F16 | Bf16 => (1, 2),
            Q4_0 => (32, 18),
            Q4_1 => (32, 20),
            Q5_0 => (32, 22),
            Q5_1 => (32, 24),
            Q8_0 => (32, 34),
            Q4K => (256, 144),
            Q5K => (256, 176),
            Q6K => (256, 210),
            Mxfp4 => (32, 17),
        }
    }

    /// The numbers of whole blocks, as rows of `k` where integers with scales are stored; `None` where others are.
    pub fn quantized(self, bytes: &[u8], k: usize) -> Option<Quantized> {
        // The least of 16 integers, numbers that share a scale, whether scales have a factor each, and 1 or 2 where something is taken
        // off: of a block, or times a factor each.
        let (least, group, has_s, taken) = match self {
            Q4_0 => (Some(-8), 32, false, 0),
            Q4_1 => (Some(0), 32, false, 1),
            Q5_0 | Q8_0 => (None, 32, false, 0),
            Q5_1 => (None, 32, false, 1),
            Q4K => (Some(0), 32, true, 2),
            Q5K => (None, 32, true, 2),
            Q6K => (None, 16, true, 0),
            F32 | F16 | Bf16 | Mxfp4 => return None,
        };
        let (numbers, size) = self.block();
        let blocks = bytes.len() / size;
        let (of_block, groups) = (numbers / group, blocks * numbers / group);
        let room = |count: usize| vec![0i8; count];
        let (mut q, mut d, mut e) = (room(blocks * numbers), vec![0.0; blocks], vec![0.0; blocks]);
        let (mut s, mut t) = (room(if has_s { groups } else { 0 }), room(if taken == 2 { groups } else { 0 }));
        for (at, block) in bytes.chunks_exact(size).enumerate() {
            let of = at * of_block..(at + 1) * of_block;
            let (s, t) = (s.get_mut(of.clone()).unwrap_or_default(), t.get_mut(of).unwrap_or_default());
            (d[at], e[at]) = self.read(block, &mut q[at * numbers..][..numbers], s, t);
        }
        let offset = match taken {
            0 => Offset::None,
            1 => Offset::Least(e, None),
            _ => Offset::Least(e, Some(t)),
        };
        let (n, block) = (q.len().checked_div(k).unwrap_or(0), of_block);
        Some(Quantized { n, k, least, group, block, q, d, s: has_s.then_some(s), offset })
    }

    /// Integers of a block, the factors of its scales, and of what is taken off; returns the scale and what is taken off.
    fn read(self, block: &[u8], q: &mut [i8], s: &mut [i8], t: &mut [i8]) -> (f32, f32) {
        match self {
            Q4_0 => nibbles(&block[2..], q, |q, _| q as i8 - 8),
            Q4_1 => nibbles(&block[4..], q, |q, _| q as i8),
            Q5_0 => nibbles(&block[6..], q, |q, i| (q | fifth(&block[2..], i)) as i8 - 16),
            Q5_1 => nibbles(&block[8..], q, |q, i| (q | fifth(&block[4..], i)) as i8),
            Q8_0 => q.iter_mut().zip(&block[2..]).for_each(|(q, byte)| *q = *byte as i8),
            Q4K => with_minima(block, &block[16..], q, s, t, |_, _| 0),
            Q5K => with_minima(block, &block[48..], q, s, t, |group, i| (block[16 + i] >> group & 1) << 4),
            Q6K => q6_k(block, q, s),
            F32 | F16 | Bf16 | Mxfp4 => unreachable!("no integers with scales"),
        }
        match self {
            Q4_1 | Q5_1 => (half(block), -half(&block[2..])),
            Q4K | Q5K => (half(block), half(&block[2..])),
            Q6K => (half(&block[208..]), 0.0),
            _ => (half(block), 0.0),
        }
    }

    /// The numbers of whole blocks. A scale that is not finite makes numbers that are not.
    pub fn expand(self, bytes: &[u8], y: &mut [f32]) {
        if let Some(row) = self.quantized(bytes, y.len()) {
            if !y.is_empty() {
                row.row(0, y);
            }
            return;
        }
        let (numbers, size) = self.block();
        for (block, y) in bytes.chunks_exact(size).zip(y.chunks_exact_mut(numbers)) {
            match self {
                F16 => y[0] = half(block),
                Bf16 => y[0] = bf16::from_le_bytes([block[0], block[1]]).widen(),
                // Here its zero has no sign.
                Mxfp4 => nibbles(&block[1..], y, |q, _| (mxfp4::number(q) + 0.0) * mxfp4::scale_of(block[0])),
                _ => y[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            }
        }
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).widen()
}

/// 32 numbers in 16 bytes: of each byte the low half is one of the first 16, the high half one of the others. `of` makes a number
/// of its bits and its place.
fn nibbles<T>(bytes: &[u8], y: &mut [T], of: impl Fn(u8, usize) -> T) {
    for (i, byte) in bytes[..16].iter().enumerate() {
        y[i] = of(byte & 15, i);
        y[i + 16] = of(byte >> 4, i + 16);
    }
}

/// The fifth bit of number `i` of 32, from one word.
fn fifth(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 8] >> (i % 8) & 1) << 4
}

/// Scale and minimum, of 6 bits each, of group `i` of 8, from 12 bytes.
fn scale_and_min(bytes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        (bytes[i] & 63, bytes[i + 4] & 63)
    } else {
        (bytes[i + 4] & 15 | bytes[i - 4] >> 6 << 4, bytes[i + 4] >> 4 | bytes[i] >> 6 << 4)
    }
}

/// `(d * scale) * q - dmin * min`: both products are exact, the subtraction rounds once. Eight groups of 32 numbers; of each 32 bytes of
/// `low` the low halves are one group, the high halves the next.
fn with_minima(block: &[u8], low: &[u8], q: &mut [i8], s: &mut [i8], t: &mut [i8], high: impl Fn(usize, usize) -> u8) {
    for (group, q) in q.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], group);
        (s[group], t[group]) = (scale as i8, min as i8);
        for (i, q) in q.iter_mut().enumerate() {
            let byte = low[group / 2 * 32 + i];
            *q = (if group % 2 == 0 { byte & 15 } else { byte >> 4 } | high(group, i)) as i8;
        }
    }
}

/// `(d * scale) * (q - 32)`: the first product is exact, the second rounds once. Sixteen groups of 16 numbers of 6 bits.
fn q6_k(block: &[u8], q: &mut [i8], s: &mut [i8]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    s.iter_mut().zip(scales).for_each(|(s, scale)| *s = *scale as i8);
    for (i, q) in q.iter_mut().enumerate() {
        // Each half of 128 numbers has 64 bytes of low bits and 32 of high ones, four numbers in each column.
        let (part, within) = (i / 128, i % 128);
        let (quarter, column) = (within / 32, within % 32);
        let byte = low[part * 64 + quarter % 2 * 32 + column];
        let bits =
            if quarter < 2 { byte & 15 } else { byte >> 4 } | (high[part * 32 + column] >> (2 * quarter) & 3) << 4;
        *q = bits as i8 - 32;
    }
}

/// d = a / 127 of the largest magnitude a; each number times 1 / d, to the nearest integer, halves away from zero.
fn to_q8_0(block: &[f32], bytes: &mut Vec<u8>) {
    let d = block.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    bytes.extend(f16::narrow(d).to_le_bytes());
    bytes.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
}

/// Eight groups of 32 numbers, each with the scale and minimum that [`fit`] finds, both stored in 6 bits of the largest.
fn to_q4_k(block: &[f32], bytes: &mut Vec<u8>) {
    let fits: Vec<(f64, f64)> = block.chunks(32).map(fit).collect();
    let most = |of: fn(&(f64, f64)) -> f64| fits.iter().map(of).fold(0.0, f64::max);
    let [d, dmin] = [most(|fit| fit.0), most(|fit| fit.1)].map(|most| f16::narrow((most / 63.0) as f32));
    let in_6_bits = |x: f64, unit: f16| {
        let unit = f64::from(unit.widen());
        if unit == 0.0 { 0 } else { (x / unit).round().min(63.0) as u8 }
    };
    let parts: Vec<[u8; 2]> = fits.iter().map(|fit| [in_6_bits(fit.0, d), in_6_bits(fit.1, dmin)]).collect();
    bytes.extend(d.to_le_bytes());
    bytes.extend(dmin.to_le_bytes());
    let mut packed = [0u8; 12];
    for (i, [scale, min]) in parts.iter().enumerate() {
        if i < 4 {
            (packed[i], packed[i + 4]) = (packed[i] | scale, packed[i + 4] | min);
        } else {
            packed[i + 4] = scale & 15 | (min & 15) << 4;
            packed[i - 4] |= scale >> 4 << 6;
            packed[i] |= min >> 4 << 6;
        }
    }
    bytes.extend(packed);
    let code = |i: usize| {
        let [scale, min] = parts[i / 32].map(f64::from);
        let (scale, min) = (f64::from(d.widen()) * scale, f64::from(dmin.widen()) * min);
        if scale == 0.0 { 0 } else { ((f64::from(block[i]) + min) / scale).round().clamp(0.0, 15.0) as u8 }
    };
    for pair in 0..4 {
        bytes.extend((0..32).map(|i| code(64 * pair + i) | code(64 * pair + 32 + i) << 4));
    }
}

/// The scale a and minimum m, neither below zero, with which `a * q - m` of integers from 0 to 15 comes nearest to 32 numbers by the
/// squares: the best of 21 ways to cut their range, each fitted, and of the plain one before them. In f64, numbers in their order.
fn fit(group: &[f32]) -> (f64, f64) {
    let numbers = || group.iter().map(|x| f64::from(*x));
    let (low, high) = numbers().fold((0.0, f64::NEG_INFINITY), |(low, high): (f64, f64), x| (low.min(x), high.max(x)));
    let range = high.max(low) - low;
    if range == 0.0 {
        return (0.0, -low);
    }
    let code = |x: f64, steps: f64| ((x - low) * (steps / range)).round().clamp(0.0, 15.0);
    let error = |steps: f64, (a, m): (f64, f64)| {
        numbers().map(|x| a * code(x, steps) - m - x).fold(0.0, |sum, off| off.mul_add(off, sum))
    };
    let mut best = (range / 15.0, -low);
    let mut least = error(15.0, best);
    for step in 0..=20 {
        let steps = 14.0 + f64::from(step) / 10.0;
        let [mut q, mut qq, mut x, mut xq] = [0.0; 4];
        for number in numbers() {
            let code = code(number, steps);
            (q, qq, x, xq) = (q + code, qq + code * code, x + number, xq + number * code);
        }
        let count = group.len() as f64;
        let determinant = count * qq - q * q;
        if determinant <= 0.0 {
            continue;
        }
        let (a, m) = ((count * xq - x * q) / determinant, (q * xq - qq * x) / determinant);
        let found = if m < 0.0 { (xq / qq, 0.0) } else { (a, m) };
        let off = error(steps, found);
        if off < least && found.0 > 0.0 {
            (best, least) = (found, off);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(digit).collect()
    }

    /// Recorded by `goldens/generate/gguf_blocks.py`.
    #[test]
    fn numbers_are_those_of_the_package_gguf() {
        let recorded: Value = serde_json::from_str(include_str!("blocks.json")).unwrap();
        let mut formats = 0;
        for (_, format, name) in FORMATS.into_iter().filter(|(.., name)| !["F32", "F16", "BF16"].contains(name)) {
            let [stored, wanted] = ["bytes", "bits"].map(|field| bytes(recorded[name][field].as_str().unwrap()));
            let mut y = vec![0f32; wanted.len() / 4];
            format.expand(&stored, &mut y);
            for (i, (y, wanted)) in y.iter().zip(wanted.as_chunks::<4>().0).enumerate() {
                assert_eq!(
                    y.to_le_bytes(),
                    *wanted,
                    "{name}: number {i} is {y}, {} wanted",
                    f32::from_le_bytes(*wanted)
                );
            }
            formats += 1;
        }
        assert_eq!(formats, 9);
        let plain = |format: Format, bytes: &[u8]| {
            let mut y = [0f32];
            format.expand(bytes, &mut y);
            y[0]
        };
        assert_eq!(plain(F32, &1.5f32.to_le_bytes()), 1.5);
        assert_eq!(plain(F16, &f16::narrow(1.5).to_le_bytes()), 1.5);
        assert_eq!(plain(Bf16, &bf16::narrow(1.5).to_le_bytes()), 1.5);
    }
}
