//! Patches of an image as an operand of products: a term is a tap of a channel, an output a place, and their element is what
//! the tap meets there. Rows of patches are written some places at a time, so that no product needs a copy of the image.

use crate::Element;
use crate::tensor::Rows;
use std::ops::Range;

/// How one axis of an image is met.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    /// Places that outputs have.
    pub places: usize,
    pub taps: usize,
    /// Places that the image has.
    pub extent: usize,
    /// Tap t of place p meets place `(p * multiply + t * step + offset) / divide` of the image, if that is one.
    pub multiply: i64,
    pub step: i64,
    pub offset: i64,
    pub divide: i64,
}

impl Axis {
    /// Places that no tap meets twice or beside itself: the image as it stands.
    pub fn whole(extent: usize) -> Axis {
        Axis { places: extent, taps: 1, extent, multiply: 1, step: 0, offset: 0, divide: 1 }
    }

    /// The place of the image that a tap meets.
    #[inline(always)]
    fn met(&self, place: usize, tap: usize) -> Option<usize> {
        let at = place as i64 * self.multiply + tap as i64 * self.step + self.offset;
        let place = usize::try_from(at).ok()? / self.divide as usize;
        (at % self.divide == 0 && place < self.extent).then_some(place)
    }
}

/// The patches of some channels of an image.
#[derive(Clone, Copy)]
pub(crate) struct Patches<'a, I> {
    /// All images: a row is the last axis.
    pub rows: Rows<'a, I>,
    /// The first row of the first channel.
    pub first: usize,
    pub axes: [Axis; 3],
}

impl<I: Element> Patches<'_, I> {
    /// Taps of a channel.
    pub fn taps(&self) -> usize {
        self.axes.iter().map(|axis| axis.taps).product()
    }

    /// Writes what term number `term` has at some places, in the order of the places, one of them at least; +0 where it meets
    /// nothing.
    pub fn write(&self, term: usize, places: Range<usize>, out: &mut [I]) {
        let [depth, height, width] = &self.axes;
        let (channel, tap) = (term / self.taps(), term % self.taps());
        let (tap_d, tap_h, tap_w) = (tap / width.taps / height.taps, tap / width.taps % height.taps, tap % width.taps);
        let (mut at, mut out) = (places.start, &mut out[..places.len()]);
        while !out.is_empty() {
            let (row, column) = (at / width.places, at % width.places);
            let (line, rest) = out.split_at_mut(out.len().min(width.places - column));
            let met = [(depth, row / height.places, tap_d), (height, row % height.places, tap_h)];
            match met.map(|(axis, place, tap)| axis.met(place, tap)) {
                [Some(d), Some(h)] => {
                    let row = self.rows.row(self.first + (channel * depth.extent + d) * height.extent + h);
                    width.line(row, column, tap_w, line);
                }
                _ => line.fill(I::default()),
            }
            (at, out) = (at + line.len(), rest);
        }
    }
}

impl Axis {
    /// What a tap meets in a row of the image at places from `first` on.
    fn line<I: Element>(&self, row: &[I], first: usize, tap: usize, line: &mut [I]) {
        if (self.multiply, self.divide) != (1, 1) {
            for (place, out) in (first..).zip(line) {
                *out = self.met(place, tap).map_or(I::default(), |at| row[at]);
            }
            return;
        }
        // The row shifted: zeros, some of it, zeros.
        let from = first as i64 + tap as i64 * self.step + self.offset;
        let before = usize::try_from(-from).unwrap_or(0).min(line.len());
        let start = usize::try_from(from).unwrap_or(0);
        let there = self.extent.saturating_sub(start).min(line.len() - before);
        line[..before].fill(I::default());
        if there > 0 {
            line[before..before + there].copy_from_slice(&row[start..start + there]);
        }
        line[before + there..].fill(I::default());
    }
}
