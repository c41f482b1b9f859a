//! Indices on a device, which the host has checked.

use super::{Buffer, Device};
use crate::{Error, value_error};

/// Tokens or rows on a device, each below a limit: checked on the host whenever they are set.
pub struct Indices {
    limit: usize,
    distinct: bool,
    /// The capture whose work makes them, if any.
    capture: Option<u64>,
    buffer: Buffer<i32>,
}

impl Indices {
    /// Copies `values`: rows of a gather, which may come more than once.
    ///
    /// # Errors
    /// [`Error::Value`] when one is outside `0..limit`; those of the device.
    pub fn new(device: &Device, op: &'static str, values: &[i32], limit: usize) -> Result<Indices, Error> {
        check(op, values, limit)?;
        Ok(Indices { limit, distinct: false, capture: None, buffer: device.upload(op, values)? })
    }

    /// Copies `values`: rows of a scatter, none of which may come twice.
    ///
    /// # Errors
    /// As [`Indices::new`]; [`Error::Value`] when two are the same.
    pub fn distinct(device: &Device, op: &'static str, values: &[i32], limit: usize) -> Result<Indices, Error> {
        check_distinct(op, values)?;
        Ok(Indices { distinct: true, ..Indices::new(device, op, values, limit)? })
    }

    /// Those that a kernel of `device` has made, or will, and that it keeps below `limit`. Where that kernel is captured,
    /// only kernels of the same capture may read them: whatever runs before the graph does finds anything there.
    pub(crate) fn made(device: &Device, buffer: Buffer<i32>, limit: usize) -> Indices {
        Indices { limit, distinct: false, capture: device.inner.capturing(), buffer }
    }

    /// Copies them to the host.
    ///
    /// # Errors
    /// As [`Buffer::download`].
    pub fn download(&self, device: &Device, host: &mut [i32]) -> Result<(), Error> {
        self.buffer.download(device, host)
    }

    /// Copies as many other values over them.
    ///
    /// # Errors
    /// As [`Indices::new`] or [`Indices::distinct`]; [`Error::Length`] when there are more or fewer.
    pub fn set(&mut self, device: &Device, op: &'static str, values: &[i32]) -> Result<(), Error> {
        check(op, values, self.limit)?;
        if self.distinct {
            check_distinct(op, values)?;
        }
        self.buffer.fill(device, values)?;
        self.capture = None;
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// What all of them are below.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Whether none comes twice, for a kernel that writes where they say.
    pub(crate) fn is_distinct(&self) -> bool {
        self.distinct
    }

    /// What a kernel that `device` starts now reads.
    pub(crate) fn buffer(&self, device: &Device) -> Result<&Buffer<i32>, Error> {
        if self.capture.is_some() && self.capture != device.inner.capturing() {
            return Err(Error::Device("indices of captured work are read outside of it".into()));
        }
        Ok(&self.buffer)
    }
}

fn check(op: &'static str, values: &[i32], limit: usize) -> Result<(), Error> {
    match values.iter().position(|&value| usize::try_from(value).map_or(true, |value| value >= limit)) {
        None => Ok(()),
        Some(i) if op == "embedding" => {
            Err(value_error(op, format!("tokens[{i}] is {}; the table has {limit} rows", values[i])))
        }
        Some(i) => Err(value_error(op, format!("index {i} is {}; there are {limit} rows", values[i]))),
    }
}

fn check_distinct(op: &'static str, values: &[i32]) -> Result<(), Error> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|two| two[0] == two[1]) {
        None => Ok(()),
        Some(two) => Err(value_error(op, format!("index {} comes twice; a scatter writes each row once", two[0]))),
    }
}
