//! Sequences of which a call may say how many rows each has: those behind them are padding.

use crate::backend::device::{Arguments, Device, Indices};
use crate::call::Arguments as CallArguments;
use crate::{Error, check_len, value_error};

/// B sequences of T rows.
#[derive(Clone, Copy)]
pub(crate) struct Lengths {
    pub batch: usize,
    pub length: usize,
}

impl Lengths {
    /// How many rows the sequences of a call by name have, where it says so.
    pub fn of_call<'a>(args: &CallArguments<'_, 'a>) -> Result<Option<&'a [i32]>, Error> {
        args.optional("len").map(|_| args.integers("len")).transpose()
    }

    /// Checks how many rows the sequences have.
    pub fn check(self, op: &'static str, len: Option<&[i32]>) -> Result<(), Error> {
        let Some(len) = len else { return Ok(()) };
        check_len(op, "len", "[B]", len.len(), &[self.batch])?;
        match len.iter().position(|&len| usize::try_from(len).map_or(true, |len| len > self.length)) {
            None => Ok(()),
            Some(i) => Err(value_error(op, format!("len[{i}] is {}; use 0 to {}", len[i], self.length))),
        }
    }

    /// The same of lengths that stand on a device.
    pub fn check_indices(self, op: &'static str, len: Option<&Indices>) -> Result<(), Error> {
        let Some(len) = len else { return Ok(()) };
        check_len(op, "len", "[B]", len.len(), &[self.batch])?;
        if len.limit() > self.length + 1 {
            let most = self.length + 1;
            let what = format!("`len` is below {}; its limit must be T + 1 = {most} at most", len.limit());
            return Err(value_error(op, what));
        }
        Ok(())
    }

    /// `work` with the lengths of a call by name on a device, whether they stand there or on the host.
    pub fn on_device(
        self,
        on: &Device,
        args: &CallArguments,
        op: &'static str,
        work: impl FnOnce(Option<&Indices>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match args.optional("len").map(|len| len.as_indices()) {
            None => work(None),
            Some(Some(len)) => {
                self.check_indices(op, Some(len))?;
                work(Some(len))
            }
            Some(None) => {
                let len = Lengths::of_call(args)?.unwrap_or_default();
                self.check(op, Some(len))?;
                work(Some(&Indices::new(on, op, len, self.length + 1)?))
            }
        }
    }
}

/// `arguments` with lengths that may not be there, and whether they are.
pub(crate) fn optional_lengths(on: &Device, arguments: Arguments, len: Option<&Indices>) -> Result<Arguments, Error> {
    Ok(match len {
        Some(len) => arguments.buffer(len.buffer(on)?).int(1),
        None => arguments.null().int(0),
    })
}
