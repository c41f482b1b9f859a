//! What a convolution of images and its gradients share: how windows lie on images, and the products that outputs are.

use crate::backend::device::{Arguments, StructLayout, int, launch_struct};
use crate::gemm::gemm::{Part, Product, Says, Tiling};
use crate::gemm::packed::Weight;
use crate::gemm::shape::Gemm;
use crate::pack::matrix::Matrix;
use crate::pack::patches::{Axis, Patches};
use crate::pack::{PANEL, as_elements_mut};
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Rows;
use crate::through_f32::f32_row;
use crate::workspace::memory::LINE;
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use samebits_schema::Call;
use samebits_schema::conv::AXES;
use std::borrow::Cow;
use std::iter::successors;

/// Dimensions of `conv` of images with three axes: depth, height and width. Images of fewer have axes of one place and one tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Images B.
    pub batch: usize,
    /// Channels C of x.
    pub channels: usize,
    /// Channels O of y.
    pub outputs: usize,
    /// Groups of channels, at least 1: outputs of one read channels of the same one. They divide both.
    pub groups: usize,
    /// Places of x.
    pub image: [usize; 3],
    /// How windows lie on x.
    pub window: Window,
}

/// How windows lie on an image: by depth, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Taps, at least 1.
    pub taps: [usize; 3],
    /// Places from one output to the next, at least 1.
    pub stride: [usize; 3],
    /// Places from one tap to the next, at least 1.
    pub dilation: [usize; 3],
    /// Zeros before the image and behind it, fewer than a window has places.
    pub before: [usize; 3],
    /// See `before`.
    pub behind: [usize; 3],
}

impl Window {
    /// Windows of so many taps side by side, one for each place that they fit.
    pub fn of(taps: [usize; 3]) -> Window {
        Window { taps, stride: [1; 3], dilation: [1; 3], before: [0; 3], behind: [0; 3] }
    }

    /// Places from its first tap to its last on an axis.
    fn places(&self, axis: usize) -> usize {
        (self.taps[axis] - 1).saturating_mul(self.dilation[axis]).saturating_add(1)
    }

    /// Taps of a channel.
    pub(super) fn size(&self) -> usize {
        self.taps.iter().product()
    }
}

impl Conv {
    /// That of a call of conv or of a gradient of it.
    pub(super) fn of(call: &Call) -> Conv {
        let [batch, channels, outputs] = ["B", "C", "O"].map(|axis| call.dim(axis));
        let window = Window {
            taps: AXES.each_ref().map(|axis| call.dim(axis.taps)),
            stride: AXES.each_ref().map(|axis| call.count(axis.stride)),
            dilation: AXES.each_ref().map(|axis| call.count(axis.dilation)),
            before: AXES.each_ref().map(|axis| call.count(axis.before)),
            behind: AXES.each_ref().map(|axis| call.count(axis.behind)),
        };
        let image = AXES.each_ref().map(|axis| call.dim(axis.places));
        Conv { batch, channels, outputs, groups: call.count("groups"), image, window }
    }

    /// Places of y.
    pub fn output(&self) -> [usize; 3] {
        std::array::from_fn(|axis| (self.padded(axis) - self.window.places(axis)) / self.window.stride[axis] + 1)
    }

    /// Places of an image and of the zeros beside it.
    fn padded(&self, axis: usize) -> usize {
        self.image[axis].saturating_add(self.window.before[axis]).saturating_add(self.window.behind[axis])
    }

    /// Refuses what is no convolution.
    pub(super) fn check(&self, op: &'static str) -> Result<(), Error> {
        let Window { taps, stride, dilation, before, behind } = self.window;
        if [taps, stride, dilation, self.image].iter().flatten().any(|number| *number == 0) {
            return Err(value_error(op, "an axis without taps, places, stride or dilation; use at least 1"));
        }
        if self.groups == 0 || [self.channels, self.outputs].iter().any(|count| !count.is_multiple_of(self.groups)) {
            let Conv { channels, outputs, groups, .. } = self;
            return Err(value_error(op, format!("{channels} and {outputs} channels are not cut into {groups} groups")));
        }
        for axis in 0..3 {
            let (window, padded) = (self.window.places(axis), self.padded(axis));
            if window > padded || before[axis].max(behind[axis]) >= window || i64::try_from(padded).is_err() {
                let of = AXES[axis].places;
                return Err(value_error(
                    op,
                    format!(
                        "axis {of}: windows of {window} places on {padded} with padding; use no more, and less padding"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Checks the length of x, or of its gradient.
    pub(super) fn check_image(&self, op: &'static str, name: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, name, "[B,C,D,H,W]", found, &extents(self.batch, self.channels, self.image))
    }

    /// Checks the length of y, or of its gradient.
    pub(super) fn check_output(&self, op: &'static str, name: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, name, "[B,O,OD,OH,OW]", found, &extents(self.batch, self.outputs, self.output()))
    }

    /// Checks the length of w, or of its gradient.
    pub(super) fn check_weight(&self, op: &'static str, name: &'static str, found: usize) -> Result<(), Error> {
        check_len(op, name, "[O,I,KD,KH,KW]", found, &self.weight())
    }

    /// The extents of x.
    pub(super) fn images(&self) -> [usize; 5] {
        extents(self.batch, self.channels, self.image)
    }

    /// Those of y.
    pub(super) fn outputs_of_all(&self) -> [usize; 5] {
        extents(self.batch, self.outputs, self.output())
    }

    /// Those of w.
    pub(super) fn weight(&self) -> [usize; 5] {
        extents(self.outputs, self.channels / self.groups, self.window.taps)
    }

    /// A step of windows or taps on an axis: one beyond the image is as any other.
    fn step(&self, axis: usize, step: usize) -> i64 {
        step.min(self.padded(axis)) as i64
    }

    /// How outputs meet x.
    pub(super) fn forward(&self) -> [Axis; 3] {
        let (places, Window { taps, stride, dilation, before, .. }) = (self.output(), self.window);
        std::array::from_fn(|axis| Axis {
            places: places[axis],
            taps: taps[axis],
            extent: self.image[axis],
            multiply: self.step(axis, stride[axis]),
            step: self.step(axis, dilation[axis]),
            offset: -(before[axis] as i64),
            divide: 1,
        })
    }

    /// How places of x meet y: what the taps of outputs have met.
    pub(super) fn backward(&self) -> [Axis; 3] {
        let (extent, Window { taps, stride, dilation, before, .. }) = (self.output(), self.window);
        std::array::from_fn(|axis| Axis {
            places: self.image[axis],
            taps: taps[axis],
            extent: extent[axis],
            multiply: 1,
            step: -self.step(axis, dilation[axis]),
            offset: before[axis] as i64,
            divide: self.step(axis, stride[axis]),
        })
    }

    /// Refuses what a device's whole numbers do not hold.
    pub(super) fn check_device(&self, op: &'static str) -> Result<(), Error> {
        for (number, axis) in AXES.iter().enumerate() {
            int(op, axis.places, self.padded(number))?;
        }
        Ok(())
    }
}

fn extents(first: usize, second: usize, [depth, height, width]: [usize; 3]) -> [usize; 5] {
    [first, second, depth, height, width]
}

/// All elements in row-major order, copied where they do not stand so.
pub(super) fn whole<'a, I: Element>(tensor: &TensorRef<'a>) -> Cow<'a, [I]> {
    if let Some(whole) = tensor.contiguous() {
        return Cow::Borrowed(whole);
    }
    let rows = tensor.rows::<I>();
    Cow::Owned((0..rows.count()).flat_map(|row| rows.row(row)).copied().collect())
}

/// The factors of all rows of all groups.
pub(super) enum Factors<'a, I> {
    /// Where they stand.
    There(&'a [I]),
    /// As this writes them.
    Made(&'a dyn Fn(&mut [I])),
}

/// Products of rows of factors and the patches of images: outputs `[B, G M, P]`, each group of the channels of an image for M rows.
pub(super) struct Products<'a, I> {
    pub cpu: &'a Cpu,
    pub says: &'static Says,
    pub batch: usize,
    pub groups: usize,
    /// Rows M of a group, and terms.
    pub sizes: [usize; 2],
    /// Channels that a group reads.
    pub channels: usize,
    pub images: Rows<'a, I>,
    pub axes: [Axis; 3],
    /// A number for each row of all groups.
    pub bias: Option<TensorRef<'a>>,
}

impl<I: Element> Products<'_, I> {
    /// Writes them to `y`.
    pub fn run<O: Element>(&self, factors: Factors<I>, y: &mut [O]) -> Result<(), Error> {
        let Products { cpu, says, batch, groups, sizes: [rows, terms], channels, images, axes, .. } = *self;
        let places: usize = axes.iter().map(|axis| axis.places).product();
        if y.is_empty() {
            return Ok(());
        }
        let shape = Gemm::new(rows, places, terms);
        let bounds = &shape.bounds()?;
        let bias = self.bias.map_or_else(|| vec![-0.0; groups * rows], |bias| f32_row(cpu, &bias, 0));
        let patches = |image: usize| {
            let first = image * channels * axes[0].extent * axes[1].extent;
            Patches { rows: images, first, axes }
        };
        let made = match factors {
            Factors::There(_) => 0,
            Factors::Made(_) => groups * rows * terms,
        };
        let words = made.div_ceil(4 / size_of::<I>()).next_multiple_of(LINE);
        // What is preferred depends on no element.
        let preferred = {
            let (x, none) = (TensorRef::of::<I>(&[], &[0, terms]).rows(), patches(0));
            let w = Weight::Plain(Matrix::Patches(&none));
            Product { cpu, says, shape, x, w, bias: None, bounds }.preferred()
        };
        let plans = successors(Some(preferred), Tiling::smaller).map(|tiling| Cut { tiling, words, pairs: I::IS_BF16 });
        let (Cut { tiling, .. }, mut workspace) = choose(cpu, says.op, plans)?;
        let (shared, mut slots) = workspace.split();
        let (room, shared) = shared.split_at_mut(words);
        let factors = match factors {
            Factors::There(factors) => factors,
            Factors::Made(write) => {
                let room = &mut as_elements_mut::<I>(room)[..made];
                write(room);
                &*room
            }
        };
        let y = SharedOut::new(y);
        // An image of a group by itself: where there is one group, all images find its rows as the first has left them.
        for image in 0..batch * groups {
            let (group, patches) = (image % groups, patches(image));
            let x = TensorRef::of(&factors[group * rows * terms..][..rows * terms], &[rows, terms]).rows();
            let w = Weight::Plain(Matrix::Patches(&patches));
            let product = Product { cpu, says, shape, x, w, bias: None, bounds };
            let held = groups == 1 && image > 0 && tiling.held_words(rows) > 0;
            let at = |part: Part| (image * rows + part.first) * places + part.panel * PANEL;
            let ask = |part: Part| y.prefetch_rows(at(part), part.rows, places);
            let slots = slots.iter_mut().map(|slot| &mut **slot).collect();
            product.run_in(&tiling, (&mut *shared, held), slots, ask, |part, sums| {
                let bias = &bias[group * rows + part.first..][..part.rows];
                let columns = PANEL.min(places - part.panel * PANEL);
                cpu.dispatch(Finish { sums, bias, y: &y, at: at(part), stride: places, columns });
            });
        }
        Ok(())
    }
}

/// A plan of a product, and room for the factors of its rows.
struct Cut {
    tiling: Tiling,
    words: usize,
    pairs: bool,
}

impl Plan for Cut {
    fn need(&self) -> Need {
        let need = self.tiling.need();
        let pairs = if self.pairs { self.words } else { 0 };
        Need { shared: need.shared.saturating_add(self.words), pairs: need.pairs + pairs, ..need }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        self.tiling.tiles()
    }
}

/// `+ bias` and the last rounding of the rows of a tile, each with a bias of its own, `stride` apart from `at` in y.
struct Finish<'a, O> {
    sums: &'a [f32],
    bias: &'a [f32],
    y: &'a SharedOut<'a, O>,
    at: usize,
    stride: usize,
    columns: usize,
}

impl<O: Element> Kernel for Finish<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, (sums, bias)) in self.sums.chunks_exact(PANEL).zip(self.bias).enumerate() {
            // SAFETY: parts of a product differ in rows or in panel, and products in group or image.
            let row = unsafe { self.y.part(self.at + r * self.stride, self.columns) };
            for column in (0..row.len()).step_by(S::LANES) {
                narrow_at(s, s.add(load_at(s, sums, column, 0.0), s.splat(*bias)), row, column);
            }
        }
    }
}

launch_struct! {
    /// How places meet images, for kernels: [`Axis`] three times.
    struct Lattice of "conv" {
        places_d: i32,
        places_h: i32,
        places_w: i32,
        taps_d: i32,
        taps_h: i32,
        taps_w: i32,
        extent_d: i32,
        extent_h: i32,
        extent_w: i32,
        multiply_d: i32,
        multiply_h: i32,
        multiply_w: i32,
        step_d: i32,
        step_h: i32,
        step_w: i32,
        offset_d: i32,
        offset_h: i32,
        offset_w: i32,
        divide_d: i32,
        divide_h: i32,
        divide_w: i32,
    }
}

/// For the unit that declares it.
pub(super) const LATTICE: StructLayout = Lattice::LAYOUT;

/// `arguments` with the struct of axes whose numbers [`Conv::check_device`] has let pass.
pub(super) fn with_lattice(arguments: Arguments, [d, h, w]: [Axis; 3]) -> Arguments {
    let lattice = Lattice {
        places_d: d.places as i32,
        places_h: h.places as i32,
        places_w: w.places as i32,
        taps_d: d.taps as i32,
        taps_h: h.taps as i32,
        taps_w: w.taps as i32,
        extent_d: d.extent as i32,
        extent_h: h.extent as i32,
        extent_w: w.extent as i32,
        multiply_d: d.multiply as i32,
        multiply_h: h.multiply as i32,
        multiply_w: w.multiply as i32,
        step_d: d.step as i32,
        step_h: h.step as i32,
        step_w: w.step as i32,
        offset_d: d.offset as i32,
        offset_h: h.offset as i32,
        offset_w: w.offset as i32,
        divide_d: d.divide as i32,
        divide_h: h.divide as i32,
        divide_w: w.divide as i32,
    };
    arguments.layout(&lattice.bytes())
}

/// Threads of a block of kernels in which each makes an element.
pub(super) const THREADS: usize = 256;
