//! Sums over tokens on a device: a block takes a chain and up to 2048 columns.

use crate::backend::device::{Arguments, Buffer, Build, Device};
use crate::call;
use crate::token::chains::CHAINS;
use crate::{Error, check_len};

/// Columns of a block: eight a thread.
const COLUMNS: usize = 256 * 8;

/// Which rows of a call are tokens, and where the first of them stands in its group.
#[derive(Clone, Copy, Default)]
pub struct Tokens<'a> {
    /// 0 for each row that is padding; `None` where all are tokens.
    pub mask: Option<&'a Buffer<i32>>,
    /// How many tokens of the group earlier calls have had.
    pub offset: usize,
}

/// Runs `work` with the mask of a call by name, or a copy of it where it is on the host.
pub(crate) fn with_mask(
    on: &Device,
    args: &call::Arguments,
    work: impl FnOnce(Option<&Buffer<i32>>) -> Result<(), Error>,
) -> Result<(), Error> {
    let Some(mask) = args.optional("mask") else { return work(None) };
    match mask.on_host(args.op(), "mask") {
        Ok(()) => work(Some(&on.upload(args.op(), args.integers("mask")?)?)),
        Err(_) => work(Some(mask.device(args.op(), "mask")?)),
    }
}

/// Runs `work` with the tokens of a call by name, and its `carry`.
pub(crate) fn with_tokens(
    on: &Device,
    args: &call::Arguments,
    work: impl FnOnce(Tokens, Option<&Buffer<f32>>) -> Result<(), Error>,
) -> Result<(), Error> {
    let carry = args.optional("carry").map(|carry| carry.device(args.op(), "carry")).transpose()?;
    with_mask(on, args, |mask| work(Tokens { mask, offset: args.call.count("token_offset") }, carry))
}

impl Tokens<'_> {
    /// Checks the lengths of mask, carry and the sums, called `sums`.
    pub(crate) fn check(
        &self,
        [op, sums]: [&'static str; 2],
        [tokens, n]: [usize; 2],
        carry: Option<&Buffer<f32>>,
        dw: &Buffer<f32>,
    ) -> Result<(), Error> {
        self.mask.map_or(Ok(()), |mask| check_len(op, "mask", "[R]", mask.len(), &[tokens]))?;
        carry.map_or(Ok(()), |carry| check_len(op, "carry", "[64,N]", carry.len(), &[CHAINS, n]))?;
        check_len(op, sums, "[64,N]", dw.len(), &[CHAINS, n])
    }

    /// `arguments` with those that all such kernels have behind their inputs.
    pub(crate) fn arguments(
        &self,
        arguments: Arguments,
        carry: Option<&Buffer<f32>>,
        dw: &mut Buffer<f32>,
    ) -> Arguments {
        let arguments = match self.mask {
            Some(mask) => arguments.buffer(mask).int(1),
            None => arguments.null().int(0),
        };
        match carry {
            Some(carry) => arguments.buffer(carry).int(1).buffer(dw),
            None => arguments.null().int(0).buffer(dw),
        }
    }

    /// The chain of the first row that is counted, where a token has `heads` rows.
    pub(crate) fn start(&self, heads: usize) -> i32 {
        ((self.offset % CHAINS) * (heads % CHAINS) % CHAINS) as i32
    }
}

/// Launches a kernel over the chains of `n` columns.
///
/// # Safety
/// The arguments are those of the kernel `name`, and the lengths of its buffers those of its shape.
pub(crate) unsafe fn launch(
    device: &Device,
    build: Build,
    name: &'static str,
    n: usize,
    arguments: &Arguments,
) -> Result<(), Error> {
    // SAFETY: the caller's.
    unsafe { device.launch(build, name, [CHAINS, n.div_ceil(COLUMNS), 1], 256, 0, arguments) }
}
