//! What the gradients of norms have in common: a row is weighed and summed, and each of its elements is
//! `dx = r * fma(factor, h, g - a)`, plus `dsum` where there is one.

use crate::Element;
use crate::simd::prefetch::prefetch_second;
use crate::simd::stream::Stream;
use crate::simd::{Simd, load_at, load_two, narrow_at, narrow_two, store_two};

/// `g[i] = dy[i] * (w[i] + offset)`; dy itself where there is no w. An offset of -0 changes no weight.
#[inline(always)]
pub(super) fn weigh<S: Simd, D: Element, I: Element>(s: S, dy: &[D], w: Option<&[I]>, offset: S::F, g: &mut [f32]) {
    let (g, two) = (&mut g[..dy.len()], 2 * S::LANES);
    let whole = dy.len() - dy.len() % two;
    for at in (0..whole).step_by(two) {
        let mut g01 = load_two(s, &dy[at..][..two], false);
        if let Some(w) = w {
            let (w0, w1) = load_two(s, &w[at..][..two], false);
            g01 = (s.mul(g01.0, s.add(w0, offset)), s.mul(g01.1, s.add(w1, offset)));
        }
        store_two(s, g01, &mut g[at..][..two]);
    }
    for at in (whole..dy.len()).step_by(S::LANES) {
        let dy = load_at(s, dy, at, D::default());
        let weighed = if let Some(w) = w { s.mul(dy, s.add(load_at(s, w, at, I::default()), offset)) } else { dy };
        narrow_at(s, weighed, g, at);
    }
}

/// What is one for all elements of a row.
#[derive(Clone, Copy)]
pub(super) struct Slope<S: Simd> {
    pub r: S::F,
    pub factor: S::F,
    /// +0 changes no g.
    pub a: S::F,
}

impl<S: Simd> Slope<S> {
    /// One vector, before the last rounding.
    #[inline(always)]
    fn of(self, s: S, h: S::F, g: S::F, dsum: Option<S::F>) -> S::F {
        let dx = s.mul(self.r, s.fma(self.factor, h, s.sub(g, self.a)));
        if let Some(dsum) = dsum { s.add(dx, dsum) } else { dx }
    }

    /// Elements that stand side by side, last rounding, as the next of `stream`. What lies at `next` is prefetched
    /// meanwhile, as far as these are long.
    #[inline(always)]
    pub fn row<H: Element, I: Element, O: Element, const NEXT: usize>(
        self,
        s: S,
        h: &[H],
        g: &[f32],
        dsum: Option<&[I]>,
        stream: &mut Stream<O>,
        next: [*const I; NEXT],
    ) {
        let (mut from, two, line) = (0, 2 * S::LANES, 64 / size_of::<I>());
        while from < h.len() {
            let dx = stream.room(h.len() - from);
            let len = dx.len();
            let (h, g, dsum) = (&h[from..][..len], &g[from..][..len], dsum.map(|dsum| &dsum[from..][..len]));
            let whole = len - len % two;
            for at in (0..whole).step_by(two) {
                for next in next {
                    for line in (at..at + two).step_by(line) {
                        prefetch_second(next.wrapping_add(from + line));
                    }
                }
                let (h, g) = (load_two(s, &h[at..][..two], false), load_two(s, &g[at..][..two], false));
                let dx01 = match dsum {
                    Some(dsum) => {
                        let dsum = load_two(s, &dsum[at..][..two], false);
                        (self.of(s, h.0, g.0, Some(dsum.0)), self.of(s, h.1, g.1, Some(dsum.1)))
                    }
                    None => (self.of(s, h.0, g.0, None), self.of(s, h.1, g.1, None)),
                };
                narrow_two(s, dx01, &mut dx[at..][..two], false);
            }
            for at in (whole..len).step_by(S::LANES) {
                let (h, g) = (load_at(s, h, at, H::default()), load_at(s, g, at, 0.0));
                let dx_at = match dsum {
                    Some(dsum) => self.of(s, h, g, Some(load_at(s, dsum, at, I::default()))),
                    None => self.of(s, h, g, None),
                };
                narrow_at(s, dx_at, dx, at);
            }
            stream.put(s, len);
            from += len;
        }
    }
}
