//! A token drawn from each row: `x[R,V], bits[R,2] -> token[R]`.
//!
//! Formula: the first token at which the sum of weights exceeds the random share of their total.
//! Order: none that could be seen: weights are integers, `floor(exp(x - top) * 2^40)`.
//! Special: a row with a NaN or +inf, or of nothing but -inf, has token -1.

use super::weights::{exponentials, largest, scaled, share, weight};
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::profile::IEEE;
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use samebits_schema::truncate::MOST_VOCAB;

const NAME: &str = "draw";

/// `x[R,V], bits[R,2] -> token[R]`, row-major. Each row has 64 random bits, the low half before the high half, of which the
/// highest 53 count.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when V is above 2^22.
///
/// ```
/// use samebits_ops::{Cpu, draw, random_halves};
///
/// // Two tokens, the second three times as likely as the first: a random share of a half takes the second.
/// let mut token = [9];
/// draw(&Cpu::best(), 2, &[0f32, 3f32.ln()], &random_halves(1 << 63), &mut token)?;
/// assert_eq!(token, [1]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn draw<I: Element>(cpu: &Cpu, vocab: usize, x: &[I], bits: &[i32], token: &mut [i32]) -> Result<(), Error> {
    check([x.len(), bits.len()], token.len(), vocab)?;
    run(cpu, TensorRef::of(x, &[token.len(), vocab]), bits, token);
    Ok(())
}

/// 64 random bits as [`draw`] takes them.
pub fn random_halves(bits: u64) -> [i32; 2] {
    [bits as u32 as i32, (bits >> 32) as u32 as i32]
}

/// Lengths of x and bits, and V.
fn check([x, bits]: [usize; 2], rows: usize, vocab: usize) -> Result<(), Error> {
    check_len(NAME, "x", "[R,V]", x, &[rows, vocab])?;
    check_len(NAME, "bits", "[R,2]", bits, &[rows, 2])?;
    check_vocabulary(NAME, vocab)
}

/// V of which sums of weights are exact.
pub(super) fn check_vocabulary(op: &'static str, vocab: usize) -> Result<(), Error> {
    match vocab > MOST_VOCAB {
        true => Err(value_error(op, format!("V is {vocab}; sums of weights are exact up to {MOST_VOCAB}"))),
        false => Ok(()),
    }
}

/// The highest 53 of a row's bits.
fn numerator(halves: &[i32]) -> u64 {
    (u64::from(halves[1] as u32) << 32 | u64::from(halves[0] as u32)) >> 11
}

/// Rows of x of any layout; lengths have been checked.
fn run(cpu: &Cpu, x: TensorRef, bits: &[i32], token: &mut [i32]) {
    let vocab = *x.shape().last().expect("[R,V]");
    cpu.chunks(token, 1, |row, token| {
        let mut z = vec![0f32; vocab];
        scaled(cpu, &x, row, 1.0, &mut z);
        token[0] = choose(cpu, &z, numerator(&bits[2 * row..][..2]));
    });
}

fn choose(cpu: &Cpu, z: &[f32], bits: u64) -> i32 {
    let Some(top) = largest(z) else { return -1 };
    let e = exponentials(cpu, z, top);
    let bound = share(bits, e.iter().map(|e| weight(*e)).sum());
    let mut sum = 0;
    let passes = e.iter().position(|e| {
        sum += weight(*e);
        sum > bound
    });
    passes.expect("a share is below the total") as i32
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("draw.cu"), &[NAME]) };

/// draw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (x, bits) = (args.input("x"), args.integers("bits")?);
        x.on_host(NAME, "x")?;
        run(cpu, x, bits, args.output("token").host(NAME, "token")?);
        Ok(())
    },
    device: Some(|on, args| {
        let (x, bits, vocab) = (args.input("x"), args.integers("bits")?, args.call.dim("V"));
        let token = args.output("token").device::<i32>(NAME, "token")?;
        typed!(x.dtype() => I, on_device::<I>(on, vocab, x.device(NAME, "x")?, bits, token))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`draw`] on a device; bits come from the host.
///
/// # Errors
/// As [`draw`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    vocab: usize,
    x: &Buffer<I>,
    bits: &[i32],
    token: &mut Buffer<i32>,
) -> Result<(), Error> {
    check([x.len(), bits.len()], token.len(), vocab)?;
    if token.is_empty() {
        return Ok(());
    }
    let bits = device.upload(NAME, bits)?;
    let arguments =
        Arguments::new().buffer(x).buffer(&bits).buffer(token).int(int(NAME, "V", vocab)?).float(IEEE.drawn);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(Build::of::<I, f32>(NAME), NAME, [token.len(), 1, 1], 256, 0, &arguments) }
}
