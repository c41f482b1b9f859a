//! The `lanes` sum: element i goes to lane `i mod 256`, each lane is a chain from +0, and the lanes fold in halves.

use crate::lanes::{MAX_LANES, Simd, Storage, load_at, load_two};

/// Lanes of the sum; belongs to the contract, not to the machine.
const LANES: usize = 256;
/// Elements that are read from memory once and then, where not all lanes fit the registers, again from the first cache.
const TILE: usize = 16 * LANES;

/// How one element enters its lane.
pub trait Step: Copy {
    /// `acc` after the element(s) `x`.
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F;
}

/// The `lanes` sum over `x`. `pad` stands for elements past the end and must leave a lane as it is.
#[inline(always)]
pub fn lane_sum<S: Simd, T: Storage, P: Step>(s: S, x: &[T], pad: T, step: P) -> f32 {
    let mut lanes = [0f32; LANES];
    let blocks = &x[..x.len() - x.len() % LANES];
    // AVX-512 holds all lanes in half its registers; AVX2 holds a quarter of them.
    for tile in blocks.chunks(TILE) {
        if S::LANES == 16 {
            sweep::<S, T, P, 8>(s, tile, step, &mut lanes);
        } else {
            sweep::<S, T, P, 4>(s, tile, step, &mut lanes);
        }
    }
    if T::IS_BF16 {
        for two in lanes.chunks_exact_mut(2 * S::LANES) {
            let (odd, even) = load_two(s, two, false);
            let (first, second) = s.interleave(odd, even);
            // SAFETY: `two` holds 2 * LANES elements.
            unsafe {
                s.store(first, two.as_mut_ptr());
                s.store(second, two.as_mut_ptr().add(S::LANES));
            }
        }
    }
    for (part, lanes) in x[blocks.len()..].chunks(S::LANES).zip(lanes.chunks_exact_mut(S::LANES)) {
        let acc = step.step(s, load_at(s, lanes, 0, 0.0), load_at(s, part, 0, pad));
        // SAFETY: the slice holds LANES elements.
        unsafe { s.store(acc, lanes.as_mut_ptr()) };
    }
    fold(s, &mut lanes)
}

/// Adds whole blocks to the lanes, `GROUP` times two vectors of them at a time. Bf16 is taken by pairs: of every two
/// vectors of lanes, the first then holds the odd ones and the second the even ones.
#[inline(always)]
fn sweep<S: Simd, T: Storage, P: Step, const GROUP: usize>(s: S, blocks: &[T], step: P, lanes: &mut [f32; LANES]) {
    let two = 2 * S::LANES;
    for (group, lanes) in lanes.chunks_exact_mut(GROUP * two).enumerate() {
        let mut acc = [(s.splat(0.0), s.splat(0.0)); GROUP];
        for (acc, lanes) in acc.iter_mut().zip(lanes.chunks_exact(two)) {
            *acc = load_two(s, lanes, false);
        }
        for block in blocks.chunks_exact(LANES) {
            let part = &block[group * GROUP * two..][..GROUP * two];
            for (acc, x) in acc.iter_mut().zip(part.chunks_exact(two)) {
                let (x0, x1) = load_two(s, x, T::IS_BF16);
                *acc = (step.step(s, acc.0, x0), step.step(s, acc.1, x1));
            }
        }
        for (acc, lanes) in acc.iter().zip(lanes.chunks_exact_mut(two)) {
            // SAFETY: `lanes` holds 2 * LANES elements.
            unsafe {
                s.store(acc.0, lanes.as_mut_ptr());
                s.store(acc.1, lanes.as_mut_ptr().add(S::LANES));
            }
        }
    }
}

/// `for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h] for l < h`.
#[inline(always)]
fn fold<S: Simd>(s: S, lanes: &mut [f32; LANES]) -> f32 {
    let mut h = LANES / 2;
    while h >= MAX_LANES {
        for l in (0..h).step_by(S::LANES) {
            let sum = s.add(load_at(s, &lanes[..], l, 0.0), load_at(s, &lanes[..], l + h, 0.0));
            // SAFETY: h is a multiple of LANES here, so `l + LANES <= h`.
            unsafe { s.store(sum, lanes[l..][..S::LANES].as_mut_ptr()) };
        }
        h /= 2;
    }
    while h > 0 {
        for l in 0..h {
            lanes[l] += lanes[l + h];
        }
        h /= 2;
    }
    lanes[0]
}
