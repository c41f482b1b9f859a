//! What group_norm and its gradient share: the elements of a group, which are read some at a time whatever their type and
//! layout, and its mean and scale.

use crate::norm::layer_norm::{KEPT, differences};
use crate::reduce::{Add, Lanes, Square};
use crate::simd::{Kernel, OnLine, Simd};
use crate::through_f32::{f32_row, widen};
use crate::{Cpu, Error, TensorRef, check_eps, value_error};
use samebits_schema::Call;

/// Dimensions and parameters of `group_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupNorm {
    /// Images B.
    pub batch: usize,
    /// Channels C.
    pub channels: usize,
    /// Places of an image, P.
    pub places: usize,
    /// Groups of the channels, at least 1; they divide C.
    pub groups: usize,
    /// Added to the variance, under the root.
    pub eps: f32,
    /// Whether silu of the norm is taken.
    pub silu: bool,
}

impl GroupNorm {
    /// Those of a call.
    pub(super) fn of(call: &Call) -> GroupNorm {
        let [batch, channels, places] = ["B", "C", "P"].map(|axis| call.dim(axis));
        // The schema keeps it finite in f32.
        let eps = call.float("eps") as f32;
        GroupNorm { batch, channels, places, groups: call.count("groups"), eps, silu: call.flag("silu") }
    }

    pub(super) fn check(&self, op: &'static str) -> Result<(), Error> {
        check_eps(op, self.eps)?;
        if self.groups == 0 || !self.channels.is_multiple_of(self.groups) {
            return Err(value_error(op, format!("{} channels are not cut into {} groups", self.channels, self.groups)));
        }
        Ok(())
    }

    /// The extents of images.
    pub(super) fn images(&self) -> [usize; 3] {
        [self.batch, self.channels, self.places]
    }

    /// Channels of a group.
    pub(super) fn together(&self) -> usize {
        self.channels / self.groups
    }

    /// Elements of a group.
    pub(super) fn len(&self) -> usize {
        self.together() * self.places
    }

    /// w and bias of all channels; what is left out changes nothing: 1 in a product, -0 in a sum.
    pub(super) fn affine(&self, cpu: &Cpu, affine: [Option<TensorRef>; 2]) -> [Vec<f32>; 2] {
        let [w, bias] = affine.map(|given| given.map(|given| f32_row(cpu, &given, 0)));
        [w.unwrap_or_else(|| vec![1.0; self.channels]), bias.unwrap_or_else(|| vec![-0.0; self.channels])]
    }

    /// The channels of the group of this number, counted from the first image on, among all of an image.
    pub(super) fn channels_of(&self, group: usize) -> std::ops::Range<usize> {
        let first = group % self.groups * self.together();
        first..first + self.together()
    }
}

/// The elements of a group in one tensor `[B,C,P]`, which is on the host.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    tensor: TensorRef<'a>,
    /// Its first row: a channel of an image.
    first: usize,
    places: usize,
}

impl<'a> Group<'a> {
    /// The group of this number, counted from the first image on.
    pub(super) fn of(shape: &GroupNorm, tensor: TensorRef<'a>, group: usize) -> Group<'a> {
        Group { tensor, first: group * shape.together(), places: shape.places }
    }

    /// The elements from `at` on, as many as `out` takes.
    pub(super) fn read(&self, cpu: &Cpu, mut at: usize, mut out: &mut [f32]) {
        while !out.is_empty() {
            let (channel, from) = (at / self.places, at % self.places);
            let (piece, rest) = out.split_at_mut(out.len().min(self.places - from));
            widen(cpu, &self.tensor, self.first + channel, from, piece);
            (at, out) = (at + piece.len(), rest);
        }
    }

    /// Mean and scale of its `n` elements, of which there are some.
    pub(super) fn moments(&self, cpu: &Cpu, n: usize, eps: f32) -> [f32; 2] {
        let OnLine(kept) = &mut OnLine([0f32; KEPT]);
        let mut pass = |mean: Option<f32>| {
            let mut lanes = Lanes::new();
            for at in (0..n).step_by(KEPT) {
                let x = &mut kept[..KEPT.min(n - at)];
                self.read(cpu, at, x);
                cpu.dispatch(Enter { x, mean, lanes: &mut lanes });
            }
            cpu.dispatch(Fold { lanes: &mut lanes, n }) / n as f32
        };
        let mean = pass(None);
        [mean, 1.0 / (pass(Some(mean)) + eps).sqrt()]
    }
}

/// Elements enter their lanes; with a mean, the squares of what they are off it.
struct Enter<'a> {
    x: &'a mut [f32],
    mean: Option<f32>,
    lanes: &'a mut Lanes,
}

impl Kernel for Enter<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Enter { x, mean, lanes } = self;
        let Some(mean) = mean else { return lanes.add(s, x, Add) };
        let OnLine(d) = &mut OnLine([0f32; KEPT]);
        differences(s, x, s.splat(mean), d);
        lanes.add(s, &d[..x.len()], Square);
    }
}

/// The sum of `n` elements that are in their lanes.
pub(super) struct Fold<'a> {
    pub lanes: &'a mut Lanes,
    pub n: usize,
}

impl Kernel for Fold<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        self.lanes.fold(s, self.n)
    }
}
