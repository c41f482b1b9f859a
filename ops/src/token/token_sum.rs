//! A sum over tokens: `x[R,N], mask[R]?, carry[64,N]? (f32) -> sum[64,N]` (f32). The gradient of a bias.
//!
//! Formula: `sum[t mod 64] += x[t]` over the rows that are tokens, t counted without padding from `token_offset` on.
//! Order: 64 chains of additions, tokens ascending, from carry or +0.
//! Rounding: every addition once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Rows;
use crate::token::chains::{Tokens, Turns, begin};
use crate::token::device;
use crate::{Cpu, Element, Error, TensorRef, check_len};

const NAME: &str = "token_sum";

/// Adds the rows of `x[R,N]` that are tokens to the 64 sums `sum[64,N]`, which go on from what they hold.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// See [`Tokens`] for an example.
pub fn token_sum<I: Element>(cpu: &Cpu, n: usize, tokens: Tokens, x: &[I], sum: &mut [f32]) -> Result<(), Error> {
    let rows = x.len().checked_div(n).unwrap_or(0);
    check_len(NAME, "x", "[R,N]", x.len(), &[rows, n])?;
    run(cpu, tokens, TensorRef::of(x, &[rows, n]), sum)
}

/// Rows of any layout.
fn run(cpu: &Cpu, tokens: Tokens, x: TensorRef, sum: &mut [f32]) -> Result<(), Error> {
    typed!(x.dtype() => I, {
        let x = x.rows::<I>();
        let (count, n) = (x.count(), x.n());
        tokens.sum(cpu, [NAME, "sum"], [count, 1, n], sum, |turns, sum| cpu.dispatch(Part { n, x, turns, sum }))
    })
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("token_sum.cu"), &["token_sum"]);

/// token_sum, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let tokens = Tokens::of(args)?;
        let ([x], sum) = begin(cpu, args, ["x"], "sum")?;
        run(cpu, tokens, x, sum)
    },
    device: Some(|on, args| {
        let (n, x, sum) = (args.call.dim("N"), args.input("x"), args.output("sum"));
        device::with_tokens(on, args, |tokens, carry| {
            typed!(x.dtype() => I, {
                on_device::<I>(on, n, tokens, x.device(NAME, "x")?, carry, sum.device(NAME, "sum")?)
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`token_sum`] on a device, from `carry[64,N]` or +0.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    n: usize,
    tokens: device::Tokens,
    x: &Buffer<I>,
    carry: Option<&Buffer<f32>>,
    sum: &mut Buffer<f32>,
) -> Result<(), Error> {
    let rows = x.len().checked_div(n).unwrap_or(0);
    check_len(NAME, "x", "[R,N]", x.len(), &[rows, n])?;
    tokens.check([NAME, "sum"], [rows, n], carry, sum)?;
    if n == 0 {
        return Ok(());
    }
    let arguments = tokens.arguments(Arguments::new().buffer(x), carry, sum);
    let arguments = arguments.long(rows).long(n).int(tokens.start(1));
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { device::launch(on, Build::of::<I, f32>(NAME), NAME, n, &arguments) }
}

/// Some chains.
struct Part<'a, I> {
    n: usize,
    x: Rows<'a, I>,
    turns: Turns<'a>,
    sum: &'a mut [f32],
}

impl<I: Element> Kernel for Part<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (n, two) = (self.n, 2 * S::LANES);
        while let Some((row, chain)) = self.turns.next() {
            let (x, sum) = (&self.x.row(row)[..n], &mut self.sum[chain * n..][..n]);
            let whole = n - n % two;
            for at in (0..whole).step_by(two) {
                let (x, sum) = (load_two(s, &x[at..][..two], false), &mut sum[at..][..two]);
                let before = load_two(s, sum, false);
                narrow_two(s, (s.add(before.0, x.0), s.add(before.1, x.1)), sum, false);
            }
            for at in (whole..n).step_by(S::LANES) {
                let after = s.add(load_at(s, sum, at, 0.0), load_at(s, x, at, I::default()));
                narrow_at(s, after, sum, at);
            }
        }
    }
}
