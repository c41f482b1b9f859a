//! The sums over tokens of vectors: 64 chains, token t of its group in chain `t mod 64`.
//!
//! Threads take chains, so each row is read by one thread, whole, and its sum stays in the cache.

use crate::call::Arguments;
use crate::profile::IEEE;
use crate::simd::{Simd, load_at, load_two, narrow_at, narrow_two};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorRef, check_len};

/// Chains of a sum over tokens.
pub const CHAINS: usize = IEEE.chains;

/// Which rows of a call are tokens, and where the first of them stands in its group.
///
/// ```
/// use samebits_ops::{Cpu, Tokens, token_sum};
///
/// // Two calls, of which the second has a row of padding, are one sum.
/// let (cpu, mut sum) = (Cpu::best(), [0f32; 64]);
/// token_sum(&cpu, 1, Tokens::default(), &[1f32, 2.0], &mut sum)?;
/// token_sum(&cpu, 1, Tokens { mask: Some(&[0, 1]), offset: 2 }, &[f32::NAN, 3.0], &mut sum)?;
/// assert_eq!(sum[..4], [1.0, 2.0, 3.0, 0.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens<'a> {
    /// 0 for each row that is padding; `None` where all are tokens.
    pub mask: Option<&'a [i32]>,
    /// How many tokens of the group earlier calls have had.
    pub offset: usize,
}

impl<'a> Tokens<'a> {
    /// Those of a call by name.
    pub(crate) fn of(args: &Arguments<'_, 'a>) -> Result<Tokens<'a>, Error> {
        Ok(Tokens { mask: mask_of(args)?, offset: args.call.count("token_offset") })
    }

    /// Runs `work` for some chains at a time: with the turns of their rows, and the sums that those go into, of `dw[64,n]`.
    /// A token has `heads` rows.
    pub(crate) fn sum(
        self,
        cpu: &Cpu,
        [op, sums]: [&'static str; 2],
        [tokens, heads, n]: [usize; 3],
        dw: &mut [f32],
        work: impl Fn(Turns, &mut [f32]) + Sync,
    ) -> Result<(), Error> {
        check_len(op, sums, "[64,N]", dw.len(), &[CHAINS, n])?;
        let counted: Option<Vec<usize>> = match self.mask {
            Some(mask) => {
                check_len(op, "mask", "[R]", mask.len(), &[tokens])?;
                Some((0..tokens).filter(|&t| mask[t] != 0).collect())
            }
            None => None,
        };
        let rows = counted.as_ref().map_or(tokens, Vec::len) * heads;
        if n == 0 || rows == 0 {
            return Ok(());
        }
        // Sums of 64 KB stay in L2 beside the rows that pass.
        let chains = ((16 << 10) / n).clamp(1, CHAINS.div_ceil(cpu.threads()));
        let start = (self.offset % CHAINS) * (heads % CHAINS) % CHAINS;
        cpu.chunks(dw, chains * n, |chunk, dw| {
            let (first, chains) = (chunk * chains, dw.len() / n);
            work(Turns::new(counted.as_deref(), [rows, heads], start, first, chains), dw);
        });
        Ok(())
    }
}

/// The rows that some chains add, in the order in which they do.
#[derive(Clone, Copy)]
pub(crate) struct Turns<'a> {
    /// The tokens, where some rows are padding.
    counted: Option<&'a [usize]>,
    /// Rows of tokens, and those of each.
    rows: usize,
    heads: usize,
    /// The chain of the first row.
    start: usize,
    first: usize,
    chains: usize,
    /// `start` and the number of the next row.
    at: usize,
}

impl<'a> Turns<'a> {
    fn new(
        counted: Option<&'a [usize]>,
        [rows, heads]: [usize; 2],
        start: usize,
        first: usize,
        chains: usize,
    ) -> Turns<'a> {
        // The first row whose chain is one of these.
        let at =
            if (first..first + chains).contains(&start) { start } else { start + (first + CHAINS - start) % CHAINS };
        Turns { counted, rows, heads, start, first, chains, at }
    }

    /// The next row, and which of the chains adds it.
    #[inline(always)]
    pub fn next(&mut self) -> Option<(usize, usize)> {
        let number = self.at - self.start;
        if number >= self.rows {
            return None;
        }
        let chain = self.at % CHAINS - self.first;
        self.at += if chain + 1 < self.chains { 1 } else { CHAINS + 1 - self.chains };
        let row = match self.counted {
            Some(counted) => counted[number / self.heads] * self.heads + number % self.heads,
            None => number,
        };
        Some((row, chain))
    }
}

/// Inputs of a call by name, which are on the host, and its sums `output`, which then hold `carry`, or +0.
pub(crate) fn begin<'a, const N: usize>(
    cpu: &Cpu,
    args: &mut Arguments<'_, 'a>,
    inputs: [&str; N],
    output: &str,
) -> Result<([TensorRef<'a>; N], &'a mut [f32]), Error> {
    let op = args.op();
    let tensors = inputs.map(|name| args.input(name));
    for (tensor, name) in tensors.iter().zip(inputs) {
        tensor.on_host(op, name)?;
    }
    let carry = args.optional("carry");
    carry.map_or(Ok(()), |carry| carry.on_host(op, "carry"))?;
    let sums = args.output(output).host::<f32>(op, output)?;
    carried(cpu, carry, sums);
    Ok((tensors, sums))
}

/// Writes `carry`, which is on the host, or +0 where there is none.
pub(crate) fn carried(cpu: &Cpu, carry: Option<TensorRef>, sums: &mut [f32]) {
    match carry {
        Some(carry) => {
            let rows = carry.rows::<f32>();
            cpu.chunks(sums, rows.n(), |row, sums| convert(cpu, rows.row(row), sums));
        }
        None => sums.fill(0.0),
    }
}

/// The mask of a call by name.
pub(crate) fn mask_of<'a>(args: &Arguments<'_, 'a>) -> Result<Option<&'a [i32]>, Error> {
    args.optional("mask").map(|_| args.integers("mask")).transpose()
}

/// What dy meets of an element of x. A trait and no closure: only this becomes a part of the kernel on every machine.
pub(crate) trait Normed<S: Simd>: Copy {
    fn of(self, s: S, x: S::F) -> S::F;
}

/// `sum[i] = fma(dy[i], normed(x[i]), sum[i])`
#[inline(always)]
pub(crate) fn add_products<S: Simd, D: Element, I: Element>(
    s: S,
    dy: &[D],
    x: &[I],
    normed: impl Normed<S>,
    sum: &mut [f32],
) {
    let (dy, x, two) = (&dy[..sum.len()], &x[..sum.len()], 2 * S::LANES);
    let whole = sum.len() - sum.len() % two;
    for at in (0..whole).step_by(two) {
        let (dy, x) = (load_two(s, &dy[at..][..two], false), load_two(s, &x[at..][..two], false));
        let sum = &mut sum[at..][..two];
        let before = load_two(s, sum, false);
        let after = (s.fma(dy.0, normed.of(s, x.0), before.0), s.fma(dy.1, normed.of(s, x.1), before.1));
        narrow_two(s, after, sum, false);
    }
    for at in (whole..sum.len()).step_by(S::LANES) {
        let (dy, x) = (load_at(s, dy, at, D::default()), load_at(s, x, at, I::default()));
        let after = s.fma(dy, normed.of(s, x), load_at(s, sum, at, 0.0));
        narrow_at(s, after, sum, at);
    }
}
