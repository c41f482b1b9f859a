//! How numbers are stored in blocks, and what each stands for.

use super::*;
use crate::mxfp4;

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

    /// The numbers of whole blocks. A scale that is not finite makes numbers that are not.
    pub fn expand(self, bytes: &[u8], y: &mut [f32]) {
        let (numbers, size) = self.block();
        for (block, y) in bytes.chunks_exact(size).zip(y.chunks_exact_mut(numbers)) {
            match self {
                F32 => y[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
                F16 => y[0] = half(block),
                Bf16 => y[0] = bf16::from_le_bytes([block[0], block[1]]).widen(),
                Q4_0 => nibbles(&block[2..], y, |q, _| half(block) * (f32::from(q) - 8.0)),
                Q4_1 => nibbles(&block[4..], y, |q, _| half(block) * f32::from(q) + half(&block[2..])),
                Q5_0 => {
                    let fifth = fifth(&block[2..]);
                    nibbles(&block[6..], y, |q, i| half(block) * (f32::from(q | fifth(i)) - 16.0));
                }
                Q5_1 => {
                    let fifth = fifth(&block[4..]);
                    nibbles(&block[8..], y, |q, i| half(block) * f32::from(q | fifth(i)) + half(&block[2..]));
                }
                Q8_0 => y.iter_mut().zip(&block[2..]).for_each(|(y, q)| *y = half(block) * f32::from(*q as i8)),
                Q4K => q4_k(block, y),
                Q5K => q5_k(block, y),
                Q6K => q6_k(block, y),
                // Here its zero has no sign.
                Mxfp4 => nibbles(&block[1..], y, |q, _| (mxfp4::number(q) + 0.0) * mxfp4::scale_of(block[0])),
            }
        }
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).widen()
}

/// 32 numbers in 16 bytes: of each byte the low half is one of the first 16, the high half one of the others. `of` makes a number
/// of its bits and its place.
fn nibbles(bytes: &[u8], y: &mut [f32], of: impl Fn(u8, usize) -> f32) {
    for (i, byte) in bytes[..16].iter().enumerate() {
        y[i] = of(byte & 15, i);
        y[i + 16] = of(byte >> 4, i + 16);
    }
}

/// The fifth bit of each of 32 numbers, from one word.
fn fifth(bytes: &[u8]) -> impl Fn(usize) -> u8 {
    let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    move |i| ((word >> i) as u8 & 1) << 4
}

/// Scale and minimum, of 6 bits each, of group `i` of 8, from 12 bytes.
fn scale_and_min(bytes: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (bytes[i] & 63, bytes[i + 4] & 63)
    } else {
        (bytes[i + 4] & 15 | bytes[i - 4] >> 6 << 4, bytes[i + 4] >> 4 | bytes[i] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// `(d * scale) * q - dmin * min`: both products are exact, the subtraction rounds once.
fn q4_k(block: &[u8], y: &mut [f32]) {
    with_minima(block, &block[16..], y, |_, _| 0);
}

fn q5_k(block: &[u8], y: &mut [f32]) {
    let high = &block[16..48];
    with_minima(block, &block[48..], y, |group, i| (high[i] >> group & 1) << 4);
}

/// Eight groups of 32 numbers; of each 32 bytes of `low` the low halves are one group, the high halves the next.
fn with_minima(block: &[u8], low: &[u8], y: &mut [f32], high: impl Fn(usize, usize) -> u8) {
    let (d, dmin) = (half(block), half(&block[2..]));
    for (group, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], group);
        let (d, min) = (d * scale, dmin * min);
        for (i, y) in y.iter_mut().enumerate() {
            let byte = low[group / 2 * 32 + i];
            let q = if group % 2 == 0 { byte & 15 } else { byte >> 4 } | high(group, i);
            *y = d * f32::from(q) - min;
        }
    }
}

/// `(d * scale) * (q - 32)`: the first product is exact, the second rounds once. Sixteen groups of 16 numbers of 6 bits.
fn q6_k(block: &[u8], y: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(&block[208..]));
    for (i, y) in y.iter_mut().enumerate() {
        // Each half of 128 numbers has 64 bytes of low bits and 32 of high ones, four numbers in each column.
        let (part, within) = (i / 128, i % 128);
        let (quarter, column) = (within / 32, within % 32);
        let byte = low[part * 64 + quarter % 2 * 32 + column];
        let bits =
            if quarter < 2 { byte & 15 } else { byte >> 4 } | (high[part * 32 + column] >> (2 * quarter) & 3) << 4;
        let scale = f32::from(scales[i / 16] as i8);
        *y = (d * scale) * (f32::from(bits) - 32.0);
    }
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
