//! Gradient of entropies: `logits[R,V], entropy[R], lse[R], dentropy[R], dlse[R]? -> dlogits[R,V]`.
//!
//! Formula: `p = e^(logits / temperature - lse)`, `dlogits = p * (dlse - dentropy * (ln p + entropy)) / temperature`.
//! Order: every element alone: `d = z * f32(1/temperature) - lse`, p is `e^d` or +0 where its exponent is below -100,
//! `t = d + entropy`, `p * fma(-dentropy, t, dlse)`, and that times `f32(1/temperature)`.
//! Rounding: every step once to f32; last rounding.
//! Special: where p is +0, t is +0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::logprob::entropy::Entropy;
use crate::logprob::logprob::inverse;
use crate::math::exp_or_nothing;
use crate::simd::stream::{Stream, is_large};
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Rows;
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "entropy_backward";

/// What [`entropy_backward`] takes beside the logits, one number for each row.
#[derive(Clone, Copy, Debug)]
pub struct EntropyGradients<'a> {
    /// What entropy returned.
    pub entropy: &'a [f32],
    /// What entropy returned.
    pub lse: &'a [f32],
    /// The gradient of entropy.
    pub dentropy: &'a [f32],
    /// The gradient of lse; left out where nothing is made of it.
    pub dlse: Option<&'a [f32]>,
}

/// The gradient `dlogits[R,V]` of [`entropy`](crate::entropy())'s logits from the gradients of its outputs, row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `temperature` is not positive and finite.
///
/// ```
/// use samebits_ops::{Cpu, Entropy, EntropyGradients, entropy, entropy_backward};
///
/// // The entropy would grow if the likelier token were less likely.
/// let (cpu, shape, logits) = (Cpu::best(), Entropy::new(1, 2), [1f32, 0.0]);
/// let (mut h, mut lse, mut dlogits) = ([9f32], [9f32], [9f32; 2]);
/// entropy(&cpu, &shape, &logits, &mut h, &mut lse)?;
/// let gradients = EntropyGradients { entropy: &h, lse: &lse, dentropy: &[1.0], dlse: None };
/// entropy_backward(&cpu, &shape, &logits, gradients, &mut dlogits)?;
/// assert!((dlogits[0] + 0.19661193).abs() < 1e-6 && (dlogits[1] - 0.19661193).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn entropy_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Entropy,
    logits: &[I],
    gradients: EntropyGradients,
    dlogits: &mut [O],
) -> Result<(), Error> {
    let Entropy { rows, vocab, temperature } = *shape;
    let EntropyGradients { entropy, lse, dentropy, dlse } = gradients;
    let counts = [entropy.len(), lse.len(), dentropy.len(), dlse.map_or(rows, <[f32]>::len)];
    check([logits.len(), dlogits.len()], counts, rows, vocab)?;
    let extents = [rows, vocab];
    run(cpu, temperature, TensorRef::of(logits, &extents), gradients, TensorMut::of(dlogits, &extents))
}

/// Lengths of logits and dlogits, and of entropy, lse, dentropy and dlse.
fn check(elements: [usize; 2], counts: [usize; 4], rows: usize, vocab: usize) -> Result<(), Error> {
    for (name, found) in ["logits", "dlogits"].into_iter().zip(elements) {
        check_len(NAME, name, "[R,V]", found, &[rows, vocab])?;
    }
    for (name, found) in ["entropy", "lse", "dentropy", "dlse"].into_iter().zip(counts) {
        check_len(NAME, name, "[R]", found, &[rows])?;
    }
    Ok(())
}

/// Rows of logits of any layout.
fn run(
    cpu: &Cpu,
    temperature: f64,
    logits: TensorRef,
    given: EntropyGradients,
    dlogits: TensorMut,
) -> Result<(), Error> {
    let vocab = *logits.shape().last().expect("[R,V]");
    let scale = inverse(NAME, temperature)?;
    logits.on_host(NAME, "logits")?;
    typed_pair!(logits.dtype() => I, dlogits.dtype() => O, {
        let (logits, dlogits) = (logits.rows::<I>(), dlogits.host::<O>(NAME, "dlogits")?);
        let (per_chunk, large) = (cpu.rows_per_chunk(logits.count(), vocab), is_large(cpu, dlogits));
        cpu.chunks(dlogits, per_chunk * vocab, |chunk, dlogits| {
            cpu.dispatch(Part { logits, first: chunk * per_chunk, given: from(&given, chunk * per_chunk), scale, dlogits, large });
        });
        Ok(())
    }, else typed!(dlogits.dtype() => O, {
        let shape = dlogits.shape().to_vec();
        let dlogits = TensorMut::of(dlogits.host::<O>(NAME, "dlogits")?, &shape);
        through_f32::rows(cpu, NAME, dlogits, vocab, &|row, dlogits| {
            let logits = f32_row(cpu, &logits, row);
            let logits = TensorRef::of(&logits, &[1, vocab]).rows::<f32>();
            cpu.dispatch(Part { logits, first: 0, given: from(&given, row), scale, dlogits, large: false });
        })
    }))
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("entropy_backward.cu"), &["entropy_backward"]);

/// entropy_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let per_row = |name| args.optional(name).map(|row| row.dense::<f32>(NAME, name));
        let [entropy, lse, dentropy] =
            ["entropy", "lse", "dentropy"].map(|name| per_row(name).expect("the call was checked"));
        let dlse = per_row("dlse").transpose()?;
        let given = EntropyGradients { entropy: entropy?, lse: lse?, dentropy: dentropy?, dlse };
        run(cpu, args.call.float("temperature"), args.input("logits"), given, args.output("dlogits"))
    },
    device: Some(|on, args| {
        let [rows, vocab] = ["R", "V"].map(|axis| args.call.dim(axis));
        let shape = Entropy { rows, vocab, temperature: args.call.float("temperature") };
        let per_row = |name: &'static str| args.optional(name).map(|row| row.device::<f32>(NAME, name));
        let [entropy, lse, dentropy] =
            ["entropy", "lse", "dentropy"].map(|name| per_row(name).expect("the call was checked"));
        let dlse = per_row("dlse").transpose()?;
        let gradients = DeviceGradients { entropy: entropy?, lse: lse?, dentropy: dentropy?, dlse };
        let (logits, dlogits) = (args.input("logits"), args.output("dlogits"));
        typed!(logits.dtype() => I, typed!(dlogits.dtype() => O, {
            let logits = logits.device::<I>(NAME, "logits")?;
            on_device(on, &shape, logits, gradients, dlogits.device::<O>(NAME, "dlogits")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`EntropyGradients`](crate::EntropyGradients) on a device.
#[derive(Clone, Copy)]
pub struct DeviceGradients<'a> {
    /// What entropy returned.
    pub entropy: &'a Buffer<f32>,
    /// What entropy returned.
    pub lse: &'a Buffer<f32>,
    /// The gradient of entropy.
    pub dentropy: &'a Buffer<f32>,
    /// The gradient of lse; left out where nothing is made of it.
    pub dlse: Option<&'a Buffer<f32>>,
}

/// Elements to a block of the kernel: 256 threads of 8 elements.
const ELEMENTS_PER_BLOCK: usize = 256 * 8;

/// [`entropy_backward`] on a device.
///
/// # Errors
/// As [`entropy_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Entropy,
    logits: &Buffer<I>,
    gradients: DeviceGradients,
    dlogits: &mut Buffer<O>,
) -> Result<(), Error> {
    let Entropy { rows, vocab, temperature } = *shape;
    let DeviceGradients { entropy, lse, dentropy, dlse } = gradients;
    let counts = [entropy.len(), lse.len(), dentropy.len(), dlse.map_or(rows, Buffer::len)];
    check([logits.len(), dlogits.len()], counts, rows, vocab)?;
    let scale = inverse(NAME, temperature)?;
    if dlogits.is_empty() {
        return Ok(());
    }
    let parts = vocab.div_ceil(ELEMENTS_PER_BLOCK);
    let arguments = Arguments::new().buffer(logits).buffer(entropy).buffer(lse).buffer(dentropy);
    let arguments = match dlse {
        Some(dlse) => arguments.buffer(dlse).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(dlogits).long(vocab).long(parts).float(scale);
    // SAFETY: lengths were checked; `parts` blocks take a row and leave what is behind it alone.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, [rows * parts, 1, 1], 256, 0, &arguments) }
}

/// The same without the rows before `row`.
fn from<'a>(given: &EntropyGradients<'a>, row: usize) -> EntropyGradients<'a> {
    let EntropyGradients { entropy, lse, dentropy, dlse } = *given;
    EntropyGradients {
        entropy: &entropy[row..],
        lse: &lse[row..],
        dentropy: &dentropy[row..],
        dlse: dlse.map(|dlse| &dlse[row..]),
    }
}

/// Some rows, from `first` on, which is the first that is `given`.
struct Part<'a, I, O> {
    logits: Rows<'a, I>,
    first: usize,
    given: EntropyGradients<'a>,
    scale: f32,
    dlogits: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vocab = self.logits.n();
        let count = self.dlogits.len() / vocab.max(1);
        let mut stream = Stream::<O>::new(self.dlogits, self.large);
        for number in 0..count {
            let row = Row {
                lse: self.given.lse[number],
                entropy: self.given.entropy[number],
                slope: -self.given.dentropy[number],
                dlse: self.given.dlse.map_or(0.0, |dlse| dlse[number]),
                scale: self.scale,
            };
            let mut z = self.logits.row(self.first + number);
            while !z.is_empty() {
                let dlogits = stream.room(z.len());
                let len = dlogits.len();
                row.elements(s, &z[..len], dlogits);
                stream.put(s, len);
                z = &z[len..];
            }
        }
        stream.end(s);
    }
}

/// What is the same for all elements of a row.
struct Row {
    lse: f32,
    entropy: f32,
    slope: f32,
    dlse: f32,
    scale: f32,
}

impl Row {
    /// The gradients of some elements, last rounding.
    #[inline(always)]
    fn elements<S: Simd, I: Element, O: Element>(&self, s: S, z: &[I], dlogits: &mut [O]) {
        let (eight, s4) = (8 * S::LANES, Unrolled(Unrolled(s)));
        let whole = z.len() - z.len() % eight;
        for at in (0..whole).step_by(eight) {
            let z = load_two(s4, &z[at..][..eight], false);
            narrow_two(s4, self.element(Unrolled(s4), z), &mut dlogits[at..][..eight], false);
        }
        for at in (whole..z.len()).step_by(S::LANES) {
            narrow_at(s, self.element(s, load_at(s, z, at, I::default())), dlogits, at);
        }
    }

    #[inline(always)]
    fn element<S: Simd>(&self, s: S, z: S::F) -> S::F {
        let d = s.sub(s.mul(z, s.splat(self.scale)), s.splat(self.lse));
        let p = exp_or_nothing(s, d);
        // A p that is NaN comes from a d that is.
        let t = s.select_ge(s.splat(0.0), p, s.splat(0.0), s.add(d, s.splat(self.entropy)));
        s.mul(s.mul(p, s.fma(s.splat(self.slope), t, s.splat(self.dlse))), s.splat(self.scale))
    }
}
