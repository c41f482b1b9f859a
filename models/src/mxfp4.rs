//! MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits share a scale, a power of two. Expanding is exact.
//!
//! A matrix of a product, `[N,K]`, is stored as blocks `[N,K/32,16]`, two numbers a byte, the first in the lower bits, and scales
//! `[N,K/32]`. Folders that have it keep several matrices one behind the other; expanded, each is stored transposed, `[K,N]`.

use samebits_ops::Element;

/// Numbers that share a scale.
const BLOCK: usize = 32;

/// What the lower three bits of a number are; the fourth is the sign.
const SIZES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The shape of the matrices `[E,K,N]` that blocks and scales of these shapes hold, if they do.
pub(crate) fn shape(blocks: &[usize], scales: &[usize]) -> Option<Vec<usize>> {
    match *blocks {
        [count, n, groups, 16] if scales == [count, n, groups] => Some(vec![count, groups.checked_mul(BLOCK)?, n]),
        _ => None,
    }
}

/// One matrix, `y[K,N]`, of `n` columns. A scale of 255 is NaN.
pub(crate) fn expand<T: Element>(blocks: &[u8], scales: &[u8], n: usize, y: &mut [T]) {
    let groups = scales.len() / n.max(1);
    let scales: Vec<f32> = scales.iter().map(|&scale| scale_of(scale)).collect();
    for (pair, rows) in y.chunks_mut(2 * n).enumerate() {
        let (group, byte) = (pair / (BLOCK / 2), pair % (BLOCK / 2));
        let (low, high) = rows.split_at_mut(n);
        for (column, (low, high)) in low.iter_mut().zip(high).enumerate() {
            let at = column * groups + group;
            let byte = blocks[at * (BLOCK / 2) + byte];
            *low = T::narrow(number(byte & 15) * scales[at]);
            *high = T::narrow(number(byte >> 4) * scales[at]);
        }
    }
}

pub(crate) fn number(bits: u8) -> f32 {
    let size = SIZES[usize::from(bits & 7)];
    if bits & 8 == 0 { size } else { -size }
}

/// 2^(scale - 127).
pub(crate) fn scale_of(scale: u8) -> f32 {
    match scale {
        // It has no normal exponent.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        scale => f32::from_bits(u32::from(scale) << 23),
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// All numbers under the least and the largest scale and 1: f64 has the same, and bf16 all of them.
    pub(crate) fn expanding_is_exact() {
        let bytes: Vec<u8> = (0..16).map(|low| low | ((15 - low) << 4)).collect();
        for scale in [0, 1, 127, 252] {
            let mut y = [0f32; 32];
            expand(&bytes, &[scale], 1, &mut y);
            for (at, y) in y.iter().enumerate() {
                let bits = if at % 2 == 0 { at / 2 } else { 15 - at / 2 };
                let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][bits % 8] * (f64::from(scale) - 127.0).exp2();
                assert_eq!((f64::from(*y), y.is_sign_negative()), (if bits < 8 { size } else { -size }, bits > 7));
                assert_eq!(samebits_ops::bf16::narrow(*y).widen(), *y);
            }
        }
        let mut y = [0f32; 32];
        expand(&bytes, &[255], 1, &mut y);
        assert!(y.iter().all(|y| y.is_nan()));
    }

    /// Two columns of two groups: a number stands in the row of its place, in the column of its matrix row.
    pub(crate) fn matrices_are_stored_transposed() {
        // The value 1 with other scales.
        let mut y = [0f32; 128];
        expand(&[0x22; 64], &[127, 128, 129, 130], 2, &mut y);
        for (at, y) in y.iter().enumerate() {
            let (row, column) = (at / 2, at % 2);
            assert_eq!(*y, [[1.0, 4.0], [2.0, 8.0]][row / 32][column], "{row} {column}");
        }
    }
}
