//! The numbers of rows that are asked.

/// 1, 2, 3, .., 2^k-1, 2^k, 2^k+1 below `limit`.
pub(super) fn sizes(limit: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        (0..).map(|k| 1usize << k).take_while(|p| p - 1 < limit).flat_map(|p| [p - 1, p, p + 1]).collect();
    sizes.retain(|&size| size > 0 && size < limit);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// One number of each gap between [`sizes`] below `limit`, drawn: kernels choose by numbers that are near no power of two as well.
pub(super) fn between(limit: usize, draw: &mut impl FnMut(usize) -> usize) -> Vec<usize> {
    let gaps = (2..).map(|k| 1usize << k).map(|p| (p + 2, (2 * p - 1).min(limit)));
    gaps.take_while(|(least, _)| *least < limit).map(|(least, end)| least + draw(end - least)).collect()
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn batch_sizes() {
        assert_eq!(sizes(1), [0; 0]);
        assert_eq!(sizes(20), [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17]);
        assert_eq!(between(6, &mut |_| 0), [0; 0]);
        assert_eq!(between(11, &mut |count| count - 1), [6, 10]);
        assert_eq!(between(65, &mut |_| 0), [6, 10, 18, 34]);
        assert_eq!(between(65, &mut |count| count - 1), [6, 14, 30, 62]);
        assert_eq!(between(40, &mut |count| count - 1), [6, 14, 30, 39]);
    }
}
