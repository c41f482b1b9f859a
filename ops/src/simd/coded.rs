//! A block of coded weights as vectors decode it: two pairs of k of 32 columns. Two lines of low bytes, then a line of codes,
//! those of the first pair in the low halves of its bytes; a table has the high byte of each code. What is coded so, and why,
//! is in `pack/dictionary.rs`.

use crate::workspace::memory::LINE;

/// Words of a block: 2 pairs of k of 32 columns.
pub const BLOCK: usize = 3 * LINE;

/// Where the high byte of a word of pairs stands in a block: column c, the later k (0) or the earlier (1).
pub fn place(column: usize, half: usize) -> usize {
    // Bytes of both kinds meet in lanes of 16: the first 8 of each lane go to columns 0 to 15, the others to 16 to 31.
    let word = 2 * (column % 16) + half;
    word / 8 * 16 + column / 16 * 8 + word % 8
}

/// Pair `step` of a block and a column.
pub fn decoded(table: &[u32; 4], block: &[u32; BLOCK], step: usize, column: usize) -> u32 {
    let byte = |words: &[u32], at: usize| words[at / 4].to_le_bytes()[at % 4];
    let half = |half: usize| {
        let at = place(column, half);
        let code = usize::from(byte(block, 128 + at) >> (4 * step) & 15);
        u32::from(byte(table, code)) << 8 | u32::from(byte(block, 64 * step + at))
    };
    half(1) << 16 | half(0)
}
