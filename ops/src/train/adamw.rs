//! A step of AdamW: `w, m, v, g (f32), factor[1]? (f32) -> new_w, new_m, new_v (f32), rounded`, any shape.
//!
//! Formula: `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `w = w (1 - lr decay) - lr m^ / (sqrt(v^) + eps)`,
//! `m^ = m / (1 - b1^n)`, `v^ = v / (1 - b2^n)`.
//! Order: every element alone: `g = g * factor`; `m = fma(b1, m, (1 - b1) * g)`; `v = fma(b2, v, ((1 - b2) * g) * g)`;
//! `w = fma(-rate, m / fma(sqrt(v), unbias, eps), w * keep)`. The constants are made in f64.
//! Rounding: each constant and every step once to f32; rounded is w with the last rounding.

use crate::backend::device::{self, Buffer, Build, Device, Unit};
use crate::call::{Arguments, Entry};
use crate::element::{Stored, typed};
use crate::elementwise::frame::as_rows;
use crate::simd::prefetch::prefetch_at;
use crate::simd::stream::{BLOCK, Stream, is_large};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Rows;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "adamw";

/// Parameters of [`adamw`].
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// The learning rate, 0 to 1e4.
    pub lr: f64,
    /// How much of m is kept, 0 to less than 1.
    pub beta1: f64,
    /// How much of v is kept, 0 to less than 1.
    pub beta2: f64,
    /// Added to the root of v, 0 to 1e30.
    pub eps: f64,
    /// Times `lr`: the share of w that goes, 0 to 1e4.
    pub weight_decay: f64,
    /// The number of the step, from 1 on.
    pub step: usize,
}

impl Default for AdamW {
    /// The first step, at a rate of 1e-3.
    fn default() -> AdamW {
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step: 1 }
    }
}

/// A step of AdamW in place: weights w and moments m and v go on by gradient g, times `factor` where there is one; `rounded`
/// becomes w for the next forward. All slices have one length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; [`Error::Value`] when a parameter is outside its range.
///
/// ```
/// use samebits_ops::{AdamW, Cpu, adamw, bf16};
///
/// let shape = AdamW { lr: 0.5, eps: 0.0, weight_decay: 0.0, ..AdamW::default() };
/// let (mut w, mut m, mut v, mut rounded) = ([1f32], [0f32], [0f32], [bf16::ZERO]);
/// adamw(&Cpu::best(), &shape, &[3.0], None, [&mut w, &mut m, &mut v], &mut rounded)?;
/// // The first step is as long as the rate, whatever the gradient.
/// assert!((w[0] - 0.5).abs() < 1e-6 && rounded == [bf16::from_f32(0.5)]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn adamw<O: Element>(
    cpu: &Cpu,
    shape: &AdamW,
    g: &[f32],
    factor: Option<f32>,
    [w, m, v]: [&mut [f32]; 3],
    rounded: &mut [O],
) -> Result<(), Error> {
    check(g.len(), [w.len(), m.len(), v.len(), rounded.len()])?;
    let constants = shape.constants(factor)?;
    let g = TensorRef::of(g, &[g.len()]).rows::<f32>();
    let len = rounded.len();
    run(cpu, constants, None, g, [w, m, v], TensorMut::of(rounded, &[len]))
}

/// Every tensor is as long as the gradient.
fn check(g: usize, [w, m, v, rounded]: [usize; 4]) -> Result<(), Error> {
    for (tensor, len) in [("w", w), ("m", m), ("v", v), ("rounded", rounded)] {
        check_len(NAME, tensor, "of g", len, &[g])?;
    }
    Ok(())
}

/// What is the same for all elements.
#[derive(Clone, Copy)]
struct Constants {
    factor: Option<f32>,
    b1: f32,
    rest1: f32,
    b2: f32,
    rest2: f32,
    eps: f32,
    rate: f32,
    unbias: f32,
    keep: f32,
}

impl AdamW {
    fn constants(&self, factor: Option<f32>) -> Result<Constants, Error> {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step } = *self;
        let within = |name: &str, value: f64, most: f64, open: bool| {
            let fits = (0.0..=most).contains(&value) && !(open && value == most);
            let range = if open { format!("less than {most}") } else { format!("at most {most:e}") };
            let what = || value_error(NAME, format!("{name} is {value}; it must be at least 0 and {range}"));
            if fits { Ok(()) } else { Err(what()) }
        };
        within("lr", lr, 1e4, false)?;
        within("beta1", beta1, 1.0, true)?;
        within("beta2", beta2, 1.0, true)?;
        within("eps", eps, 1e30, false)?;
        within("weight_decay", weight_decay, 1e4, false)?;
        if step == 0 {
            return Err(value_error(NAME, "step is 0; the first one is 1"));
        }
        Ok(Constants {
            factor,
            b1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            b2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            eps: eps as f32,
            rate: (lr / (1.0 - power(beta1, step))) as f32,
            unbias: (1.0 / (1.0 - power(beta2, step)).sqrt()) as f32,
            keep: (1.0 - lr * weight_decay) as f32,
        })
    }
}

/// `base^n` by squares, from the lowest digit of n on: no two mathematics libraries agree on more.
fn power(mut base: f64, mut n: usize) -> f64 {
    let mut power = 1.0;
    while n > 0 {
        if n & 1 == 1 {
            power *= base;
        }
        base *= base;
        n >>= 1;
    }
    power
}

/// Makes w, m and v go on from `before`, or in place; every slice has the length of the gradient's rows.
fn run(
    cpu: &Cpu,
    constants: Constants,
    before: Option<[Rows<f32>; 3]>,
    g: Rows<f32>,
    state: [&mut [f32]; 3],
    rounded: TensorMut,
) -> Result<(), Error> {
    typed!(rounded.dtype() => O, {
        chunks(cpu, constants, before, g, state, rounded.host::<O>(NAME, "rounded")?);
        Ok(())
    })
}

/// The same of one type.
fn chunks<O: Element>(
    cpu: &Cpu,
    constants: Constants,
    before: Option<[Rows<f32>; 3]>,
    g: Rows<f32>,
    [w, m, v]: [&mut [f32]; 3],
    rounded: &mut [O],
) {
    let (size, large) = (cpu.elements_per_chunk(g.n() * g.count()).max(1), is_large(cpu, rounded));
    let chunks = w.chunks_mut(size).zip(m.chunks_mut(size)).zip(v.chunks_mut(size)).zip(rounded.chunks_mut(size));
    let mut chunks: Vec<_> = chunks.collect();
    cpu.chunks(&mut chunks, 1, |chunk, parts| {
        for (((w, m), v), rounded) in parts {
            cpu.dispatch(Part { constants, before, g, first: chunk * size, state: [w, m, v], rounded, large });
        }
    });
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("adamw.cu"), &[NAME]);

/// adamw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let inputs = ["w", "m", "v", "g"].map(|name| args.input(name));
        for (input, name) in inputs.iter().zip(["w", "m", "v", "g"]) {
            input.on_host(NAME, name)?;
        }
        let factor = args.optional("factor").map(|factor| factor.dense::<f32>(NAME, "factor")).transpose()?;
        let constants = shape_of(args).constants(factor.map(|factor| factor[0]))?;
        let rounded = args.output("rounded");
        let ([w, m, v, g], _) = as_rows(inputs, rounded.shape());
        let before = [w, m, v].map(|x| x.rows::<f32>());
        let mut state = |name: &'static str| args.output(name).host::<f32>(NAME, name);
        let state = [state("new_w")?, state("new_m")?, state("new_v")?];
        run(cpu, constants, Some(before), g.rows(), state, rounded)
    },
    device: Some(|on, args| {
        let [w, m, v, g] = ["w", "m", "v", "g"].map(|name| args.input(name));
        let [w, m, v, g] = [w.device(NAME, "w")?, m.device(NAME, "m")?, v.device(NAME, "v")?, g.device(NAME, "g")?];
        let factor = args.optional("factor").map(|factor| factor.device::<f32>(NAME, "factor")).transpose()?;
        let constants = shape_of(args).constants(None)?;
        let mut state = |name: &'static str| args.output(name).device::<f32>(NAME, name);
        let state = [state("new_w")?, state("new_m")?, state("new_v")?];
        let rounded = args.output("rounded");
        typed!(rounded.dtype() => O, {
            let rounded = rounded.device::<O>(NAME, "rounded")?;
            launch(on, constants, Some([w, m, v]), g, factor, state, rounded)
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`adamw`] on a device, in place; what scales the gradient is `factor[1]`.
///
/// # Errors
/// As [`adamw`]; errors of the device.
pub fn on_device<O: Stored>(
    on: &Device,
    shape: &AdamW,
    g: &Buffer<f32>,
    factor: Option<&Buffer<f32>>,
    state: [&mut Buffer<f32>; 3],
    rounded: &mut Buffer<O>,
) -> Result<(), Error> {
    launch(on, shape.constants(None)?, None, g, factor, state, rounded)
}

/// Elements to a block of the kernel: 256 threads of 8 elements.
const ELEMENTS_PER_BLOCK: usize = 256 * 8;

/// Starts the kernel, in place or from `before`.
fn launch<O: Stored>(
    on: &Device,
    c: Constants,
    before: Option<[&Buffer<f32>; 3]>,
    g: &Buffer<f32>,
    factor: Option<&Buffer<f32>>,
    [w, m, v]: [&mut Buffer<f32>; 3],
    rounded: &mut Buffer<O>,
) -> Result<(), Error> {
    check(g.len(), [w.len(), m.len(), v.len(), rounded.len()])?;
    let [old_w, old_m, old_v] = before.unwrap_or([w, m, v]);
    check(g.len(), [old_w.len(), old_m.len(), old_v.len(), rounded.len()])?;
    let arguments = device::Arguments::new().buffer(old_w).buffer(old_m).buffer(old_v).buffer(g);
    let arguments = match factor {
        Some(factor) => {
            check_len(NAME, "factor", "[1]", factor.len(), &[1])?;
            arguments.buffer(factor).int(1)
        }
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(w).buffer(m).buffer(v).buffer(rounded).long(g.len());
    let numbers = [c.b1, c.rest1, c.b2, c.rest2, c.eps, c.rate, c.unbias, c.keep];
    let arguments = numbers.iter().fold(arguments, |arguments, &number| arguments.float(number));
    let grid = [g.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: all of them have as many elements as the kernel is told, and a factor is one.
    unsafe { on.launch(Build::of::<f32, O>(NAME), NAME, grid, 256, 0, &arguments) }
}

fn shape_of(args: &Arguments) -> AdamW {
    let [lr, beta1, beta2] = ["lr", "beta1", "beta2"].map(|name| args.call.float(name));
    let [eps, weight_decay] = ["eps", "weight_decay"].map(|name| args.call.float(name));
    AdamW { lr, beta1, beta2, eps, weight_decay, step: args.call.count("step") }
}

/// Some elements, from `first` on.
struct Part<'a, O> {
    constants: Constants,
    /// w, m and v before the step, where they do not stand in `state` themselves.
    before: Option<[Rows<'a, f32>; 3]>,
    g: Rows<'a, f32>,
    first: usize,
    state: [&'a mut [f32]; 3],
    rounded: &'a mut [O],
    /// Whether `rounded` is large; then what is made beside it is so as well.
    large: bool,
}

/// The prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

impl<O: Element> Kernel for Part<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { constants, before, g, first, state, rounded, large } = self;
        let (n, all) = (g.n(), rounded.len());
        // What stands in place is in the caches already.
        let mut state = state.map(|state| Stream::<f32>::new(state, large && before.is_some()));
        let mut rounded = Stream::<O>::new(rounded, large);
        let mut done = 0;
        while done < all {
            let (row, from) = ((first + done) / n, (first + done) % n);
            let len = BLOCK.min(n - from).min(all - done);
            let g = &g.row(row)[from..][..len];
            let before = before.map(|before| before.map(|rows| &rows.row(row)[from..][..len]));
            let state_room = state.each_mut().map(|state| state.room(len));
            constants.step(s, g, before, state_room, rounded.room(len));
            for state in &mut state {
                state.put(s, len);
            }
            rounded.put(s, len);
            done += len;
        }
        let [w, m, v] = state;
        w.end(s);
        m.end(s);
        v.end(s);
        rounded.end(s);
    }
}

impl Constants {
    /// The step of some elements, from `before` or in place.
    #[inline(always)]
    fn step<S: Simd, O: Element>(
        &self,
        s: S,
        g: &[f32],
        before: Option<[&[f32]; 3]>,
        [w, m, v]: [&mut [f32]; 3],
        rounded: &mut [O],
    ) {
        let two = 2 * S::LANES;
        let whole = g.len() - g.len() % two;
        for at in (0..whole).step_by(two) {
            let [old_w, old_m, old_v] = before.unwrap_or([&*w, &*m, &*v]);
            let (old_w, old_m, old_v, g) =
                (&old_w[at..][..two], &old_m[at..][..two], &old_v[at..][..two], &g[at..][..two]);
            for x in [old_w, old_m, old_v, g] {
                prefetch_at(x, AHEAD);
            }
            // Written out: a closure that `map` calls is no part of the kernel, and its vectors go through memory.
            let ((g0, g1), (w0, w1)) = (load_two(s, g, false), load_two(s, old_w, false));
            let ((m0, m1), (v0, v1)) = (load_two(s, old_m, false), load_two(s, old_v, false));
            let ([w0, m0, v0], [w1, m1, v1]) = (self.of(s, g0, [w0, m0, v0]), self.of(s, g1, [w1, m1, v1]));
            narrow_two(s, (w0, w1), &mut w[at..][..two], false);
            narrow_two(s, (m0, m1), &mut m[at..][..two], false);
            narrow_two(s, (v0, v1), &mut v[at..][..two], false);
            narrow_two(s, (w0, w1), &mut rounded[at..][..two], false);
        }
        for at in (whole..g.len()).step_by(S::LANES) {
            let [old_w, old_m, old_v] = before.unwrap_or([&*w, &*m, &*v]);
            let old = [load_at(s, old_w, at, 0.0), load_at(s, old_m, at, 0.0), load_at(s, old_v, at, 0.0)];
            let [new_w, new_m, new_v] = self.of(s, load_at(s, g, at, 0.0), old);
            narrow_at(s, new_w, w, at);
            narrow_at(s, new_m, m, at);
            narrow_at(s, new_v, v, at);
            narrow_at(s, new_w, rounded, at);
        }
    }

    #[inline(always)]
    fn of<S: Simd>(&self, s: S, g: S::F, [w, m, v]: [S::F; 3]) -> [S::F; 3] {
        let g = if let Some(factor) = self.factor { s.mul(g, s.splat(factor)) } else { g };
        let m = s.fma(s.splat(self.b1), m, s.mul(s.splat(self.rest1), g));
        let v = s.fma(s.splat(self.b2), v, s.mul(s.mul(s.splat(self.rest2), g), g));
        let u = s.div(m, s.fma(s.sqrt(v), s.splat(self.unbias), s.splat(self.eps)));
        [s.fma(s.splat(-self.rate), u, s.mul(w, s.splat(self.keep))), m, v]
    }
}
