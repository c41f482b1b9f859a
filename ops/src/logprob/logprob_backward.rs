//! Gradient of log-probabilities: `logits[R,V], target[R], lse[R], dlogprob[R], dlse[R]? -> dlogits[R,V]`.
//!
//! Formula: `p = e^(logits / temperature - lse)`, `dlogits = (p * (dlse - dlogprob) + dlogprob at the target) / temperature`.
//! Order: every element alone: `d = z * f32(1/temperature) - lse`, p is `e^d` or +0 where its exponent is below -100,
//! `c = dlse - dlogprob`, `p * c` or `fma(p, c, dlogprob)`, and that times `f32(1/temperature)`.
//! Rounding: every step once to f32; last rounding.
//! Special: for a negative target dlogprob counts as +0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::logprob::logprob::{Logprob, check_targets, checked_inverse, inverse};
use crate::math::exp_or_nothing;
use crate::simd::scalar::Scalar;
use crate::simd::stream::{Stream, is_large};
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// The gradients that [`logprob_backward`] takes, one number for each row.
#[derive(Clone, Copy, Debug)]
pub struct LogprobGradients<'a> {
    /// Of logprob.
    pub dlogprob: &'a [f32],
    /// Of lse; left out where nothing is made of it.
    pub dlse: Option<&'a [f32]>,
}

/// The gradient `dlogits[R,V]` of [`logprob`](crate::logprob())'s logits from the gradients of its outputs, row-major. `lse[R]`
/// is what it returned. A negative target means none, and its dlogprob is not read.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite or a
/// target is V or more.
///
/// ```
/// use samebits_ops::{Cpu, Logprob, LogprobGradients, logprob, logprob_backward};
///
/// // Two tokens, equally likely: the target's logit would rise, the other's fall.
/// let (cpu, shape, logits) = (Cpu::best(), Logprob::new(1, 2), [0f32; 2]);
/// let (mut logp, mut lse, mut dlogits) = ([9f32], [9f32], [9f32; 2]);
/// logprob(&cpu, &shape, &logits, &[0], &mut logp, &mut lse)?;
/// let gradients = LogprobGradients { dlogprob: &[1.0], dlse: None };
/// logprob_backward(&cpu, &shape, &logits, &[0], &lse, gradients, &mut dlogits)?;
/// assert!((dlogits[0] - 0.5).abs() < 1e-6 && (dlogits[1] + 0.5).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn logprob_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Logprob,
    logits: &[I],
    target: &[i32],
    lse: &[f32],
    LogprobGradients { dlogprob, dlse }: LogprobGradients,
    dlogits: &mut [O],
) -> Result<(), Error> {
    let Logprob { rows, vocab, temperature } = *shape;
    let counts = [target.len(), lse.len(), dlogprob.len(), dlse.map_or(rows, <[f32]>::len)];
    check([logits.len(), dlogits.len()], counts, rows, vocab)?;
    let extents = [rows, vocab];
    let given = Given { target, lse, dlogprob, dlse };
    run(cpu, temperature, TensorRef::of(logits, &extents), given, TensorMut::of(dlogits, &extents))
}

/// Lengths of logits and dlogits, and of target, lse, dlogprob and dlse.
fn check(elements: [usize; 2], counts: [usize; 4], rows: usize, vocab: usize) -> Result<(), Error> {
    for (name, found) in ["logits", "dlogits"].into_iter().zip(elements) {
        check_len("logprob_backward", name, "[R,V]", found, &[rows, vocab])?;
    }
    for (name, found) in ["target", "lse", "dlogprob", "dlse"].into_iter().zip(counts) {
        check_len("logprob_backward", name, "[R]", found, &[rows])?;
    }
    Ok(())
}

/// Rows of logits of any layout, as many as there are targets.
fn run(cpu: &Cpu, temperature: f64, logits: TensorRef, given: Given, dlogits: TensorMut) -> Result<(), Error> {
    let vocab = *logits.shape().last().expect("[R,V]");
    let scale = inverse("logprob_backward", temperature)?;
    check_targets("logprob_backward", given.target, vocab)?;
    logits.on_host("logprob_backward", "logits")?;
    typed_pair!(logits.dtype() => I, dlogits.dtype() => O, {
        let (logits, dlogits) = (logits.rows::<I>(), dlogits.host::<O>("logprob_backward", "dlogits")?);
        let (per_chunk, large) = (cpu.rows_per_chunk(logits.count(), vocab), is_large(cpu, dlogits));
        cpu.chunks(dlogits, per_chunk * vocab, |chunk, dlogits| {
            let first = chunk * per_chunk;
            cpu.dispatch(Part { logits, first, column: 0, given: given.from(first), scale, dlogits, large });
        });
        Ok(())
    }, else typed!(dlogits.dtype() => O, {
        let shape = dlogits.shape().to_vec();
        let dlogits = TensorMut::of(dlogits.host::<O>("logprob_backward", "dlogits")?, &shape);
        through_f32::rows(cpu, "logprob_backward", dlogits, vocab, &|row, dlogits| {
            let logits = f32_row(cpu, &logits, row);
            let logits = TensorRef::of(&logits, &[1, vocab]).rows::<f32>();
            cpu.dispatch(Part { logits, first: 0, column: 0, given: given.from(row), scale, dlogits, large: false });
        })
    }))
}

/// Its kernels.
const UNIT: Unit = Unit::of("logprob_backward", include_str!("logprob_backward.cu"), &["logprob_backward"]);

/// logprob_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "logprob_backward",
    cpu: |cpu, args| {
        let per_row = |name| args.optional(name).map(|row| row.dense::<f32>("logprob_backward", name));
        let [lse, dlogprob] = ["lse", "dlogprob"].map(|name| per_row(name).expect("the call was checked"));
        let (target, dlse) = (args.integers("target")?, per_row("dlse").transpose()?);
        let given = Given { target, lse: lse?, dlogprob: dlogprob?, dlse };
        run(cpu, args.call.float("temperature"), args.input("logits"), given, args.output("dlogits"))
    },
    device: Some(|on, args| {
        let [rows, vocab] = ["R", "V"].map(|axis| args.call.dim(axis));
        let shape = Logprob { rows, vocab, temperature: args.call.float("temperature") };
        let per_row = |name: &'static str| args.optional(name).map(|row| row.device::<f32>("logprob_backward", name));
        let [lse, dlogprob] = ["lse", "dlogprob"].map(|name| per_row(name).expect("the call was checked"));
        let gradients = DeviceGradients { dlogprob: dlogprob?, dlse: per_row("dlse").transpose()? };
        let (lse, logits, target) = (lse?, args.input("logits"), args.integers("target")?);
        let dlogits = args.output("dlogits");
        typed!(logits.dtype() => I, typed!(dlogits.dtype() => O, {
            let logits = logits.device::<I>("logprob_backward", "logits")?;
            let dlogits = dlogits.device::<O>("logprob_backward", "dlogits")?;
            on_device(on, &shape, logits, target, lse, gradients, dlogits)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`LogprobGradients`](crate::LogprobGradients) on a device.
#[derive(Clone, Copy)]
pub struct DeviceGradients<'a> {
    /// Of logprob.
    pub dlogprob: &'a Buffer<f32>,
    /// Of lse; left out where nothing is made of it.
    pub dlse: Option<&'a Buffer<f32>>,
}

/// Elements to a block of the kernel: 256 threads of 8 elements.
const ELEMENTS_PER_BLOCK: usize = 256 * 8;

/// [`logprob_backward`] on a device; targets come from the host, which checks them.
///
/// # Errors
/// As [`logprob_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Logprob,
    logits: &Buffer<I>,
    target: &[i32],
    lse: &Buffer<f32>,
    DeviceGradients { dlogprob, dlse }: DeviceGradients,
    dlogits: &mut Buffer<O>,
) -> Result<(), Error> {
    let Logprob { rows, vocab, temperature } = *shape;
    let counts = [target.len(), lse.len(), dlogprob.len(), dlse.map_or(rows, Buffer::len)];
    check([logits.len(), dlogits.len()], counts, rows, vocab)?;
    let scale = checked_inverse("logprob_backward", vocab, temperature, target)?;
    if dlogits.is_empty() {
        return Ok(());
    }
    let target = device.upload("logprob_backward", target)?;
    let parts = vocab.div_ceil(ELEMENTS_PER_BLOCK);
    let arguments = Arguments::new().buffer(logits).buffer(&target).buffer(lse).buffer(dlogprob);
    let arguments = match dlse {
        Some(dlse) => arguments.buffer(dlse).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(dlogits).long(vocab).long(parts).float(scale);
    let build = Build::of::<I, O>("logprob_backward");
    // SAFETY: lengths were checked, and so was every target; `parts` blocks take a row and leave what is behind it alone.
    unsafe { device.launch(build, "logprob_backward", [rows * parts, 1, 1], 256, 0, &arguments) }
}

/// What is known of each row.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub target: &'a [i32],
    pub lse: &'a [f32],
    pub dlogprob: &'a [f32],
    pub dlse: Option<&'a [f32]>,
}

impl<'a> Given<'a> {
    /// The same without the rows before `row`.
    pub fn from(&self, row: usize) -> Given<'a> {
        let Given { target, lse, dlogprob, dlse } = *self;
        Given {
            target: &target[row..],
            lse: &lse[row..],
            dlogprob: &dlogprob[row..],
            dlse: dlse.map(|dlse| &dlse[row..]),
        }
    }

    /// What is the same for all logits `z` of a row.
    #[inline(always)]
    pub fn row<'z, I>(&self, row: usize, scale: f32, z: &'z [I]) -> Row<'z, I> {
        let target = usize::try_from(self.target[row]).ok();
        let dlogprob = if target.is_some() { self.dlogprob[row] } else { 0.0 };
        let c = self.dlse.map_or(0.0, |dlse| dlse[row]) - dlogprob;
        Row { z, target, lse: self.lse[row], dlogprob, c, scale }
    }
}

/// Some rows, from `first` on, which is the first that is `given`; where they are a part of the vocabulary, it begins at
/// `column`.
pub(super) struct Part<'a, I, O> {
    pub logits: Rows<'a, I>,
    pub first: usize,
    pub column: usize,
    pub given: Given<'a>,
    pub scale: f32,
    pub dlogits: &'a mut [O],
    pub large: bool,
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vocab = self.logits.n();
        let count = self.dlogits.len() / vocab.max(1);
        let mut stream = Stream::<O>::new(self.dlogits, self.large);
        for row in 0..count {
            let row = self.given.row(row, self.scale, self.logits.row(self.first + row));
            let mut from = 0;
            while from < vocab {
                let dlogits = stream.room(vocab - from);
                let len = dlogits.len();
                row.all(s, from, self.column, dlogits);
                stream.put(s, len);
                from += len;
            }
        }
        stream.end(s);
    }
}

/// A row and what is the same for all its elements.
pub(super) struct Row<'a, I> {
    z: &'a [I],
    target: Option<usize>,
    lse: f32,
    dlogprob: f32,
    c: f32,
    scale: f32,
}

impl<I: Element> Row<'_, I> {
    /// The gradients of the elements from `from` on, of a row that begins with token `column`; last rounding.
    #[inline(always)]
    pub fn all<S: Simd, O: Element>(&self, s: S, from: usize, column: usize, dlogits: &mut [O]) {
        self.others(s, from, dlogits);
        let here = self.target.and_then(|target| target.checked_sub(column));
        if let Some(target) = here.filter(|target| (from..from + dlogits.len()).contains(target)) {
            let p = self.share(Scalar, self.z[target].widen());
            dlogits[target - from] = O::narrow(p.mul_add(self.c, self.dlogprob) * self.scale);
        }
    }

    /// The same as if none was the target.
    #[inline(always)]
    fn others<S: Simd, O: Element>(&self, s: S, from: usize, dlogits: &mut [O]) {
        let (two, eight, s4) = (2 * S::LANES, 8 * S::LANES, Unrolled(Unrolled(s)));
        let z = &self.z[from..][..dlogits.len()];
        let (whole, twos) = (z.len() - z.len() % eight, z.len() - z.len() % two);
        for at in (0..whole).step_by(eight) {
            let z = load_two(s4, &z[at..][..eight], false);
            narrow_two(s4, self.other(Unrolled(s4), z), &mut dlogits[at..][..eight], false);
        }
        for at in (whole..twos).step_by(two) {
            let v = self.other(Unrolled(s), load_two(s, &z[at..][..two], false));
            narrow_two(s, v, &mut dlogits[at..][..two], false);
        }
        for at in (twos..z.len()).step_by(S::LANES) {
            narrow_at(s, self.other(s, load_at(s, z, at, I::default())), dlogits, at);
        }
    }

    #[inline(always)]
    fn other<S: Simd>(&self, s: S, z: S::F) -> S::F {
        s.mul(s.mul(self.share(s, z), s.splat(self.c)), s.splat(self.scale))
    }

    /// p.
    #[inline(always)]
    fn share<S: Simd>(&self, s: S, z: S::F) -> S::F {
        exp_or_nothing(s, s.sub(s.mul(z, s.splat(self.scale)), s.splat(self.lse)))
    }
}
