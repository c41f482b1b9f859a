//! The `lanes` sum: element i goes to lane `i mod 256`, each lane is a chain from +0, and the lanes fold in halves.

use crate::lanes::{MAX_LANES, Simd, Storage, load_at};

/// Lanes of the sum; belongs to the contract, not to the machine.
const LANES: usize = 256;
/// Vectors accumulated at a time: few enough for every register file.
const GROUP: usize = 8;

/// How one element enters its lane.
pub trait Step: Copy {
    /// `acc` after the element(s) `x`.
    fn step<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F;
}

/// The `lanes` sum over `x`. `pad` stands for elements past the end and must leave a lane as it is.
#[inline(always)]
pub fn lane_sum<S: Simd, T: Storage, P: Step>(s: S, x: &[T], pad: T, step: P) -> f32 {
    let mut lanes = [0f32; LANES];
    let width = (GROUP * S::LANES).min(LANES);
    let mut group = 0;
    while group < LANES {
        let mut acc = [s.splat(0.0); GROUP];
        for block in x.chunks(LANES) {
            if let Some(part) = block.get(group..group + width) {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = step.step(s, *acc, load_at(s, part, v * S::LANES, pad));
                }
            } else if group < block.len() {
                let part = &block[group..];
                for (v, acc) in acc.iter_mut().enumerate().take(part.len().div_ceil(S::LANES)) {
                    *acc = step.step(s, *acc, load_at(s, part, v * S::LANES, pad));
                }
            }
        }
        for (v, acc) in acc.iter().enumerate() {
            // SAFETY: GROUP * LANES divides 256, so the store ends inside `lanes`.
            unsafe { s.store(*acc, lanes[group + v * S::LANES..][..S::LANES].as_mut_ptr()) };
        }
        group += width;
    }
    fold(s, &mut lanes)
}

/// `for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h] for l < h`.
#[inline(always)]
pub fn fold<S: Simd>(s: S, lanes: &mut [f32; LANES]) -> f32 {
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
