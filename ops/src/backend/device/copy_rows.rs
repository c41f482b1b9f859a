//! Copies of rows within a device, and indices that say which.

use super::rows::build;
use super::{Arguments, Buffer, Device, Stored};
use crate::{Error, value_error};

/// Tokens or rows on a device, each below a limit: checked on the host whenever they are set.
pub struct Indices {
    limit: usize,
    buffer: Buffer<i32>,
}

impl Indices {
    /// Copies `values`.
    ///
    /// # Errors
    /// [`Error::Value`] when one is outside `0..limit`; those of the device.
    pub fn new(device: &Device, op: &'static str, values: &[i32], limit: usize) -> Result<Indices, Error> {
        check(op, values, limit)?;
        Ok(Indices { limit, buffer: device.upload(op, values)? })
    }

    /// Those that a kernel has made, or will, and that it keeps below `limit`.
    pub(super) fn made(buffer: Buffer<i32>, limit: usize) -> Indices {
        Indices { limit, buffer }
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
    /// As [`Indices::new`]; [`Error::Length`] when there are more or fewer.
    pub fn set(&mut self, device: &Device, op: &'static str, values: &[i32]) -> Result<(), Error> {
        check(op, values, self.limit)?;
        self.buffer.fill(device, values)
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

    pub(super) fn buffer(&self) -> &Buffer<i32> {
        &self.buffer
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

/// Where the rows of one side of a copy stand: row i is row `rows[i]`, or `i / every`, of a buffer whose rows are `stride`
/// apart and begin `offset` behind.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Which rows; `None` for one after the other.
    pub rows: Option<&'a Indices>,
    /// How often each row comes, one after the other: 1, or more to repeat it.
    pub every: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements before the first.
    pub offset: usize,
}

impl Part<'_> {
    /// All rows of a buffer, in order, of `width` elements each.
    pub fn whole(width: usize) -> Part<'static> {
        Part { rows: None, every: 1, stride: width, offset: 0 }
    }

    /// Whether `count` rows of `width` elements are within `len`.
    fn fits(&self, count: usize, width: usize, len: usize) -> bool {
        let rows = match self.rows {
            Some(rows) if rows.len() != count => return false,
            Some(rows) => rows.limit(),
            None => count.div_ceil(self.every.max(1)),
        };
        let last = rows.saturating_sub(1).checked_mul(self.stride).and_then(|at| at.checked_add(self.offset));
        self.every > 0 && last.and_then(|at| at.checked_add(width)).is_some_and(|end| end <= len)
    }

    fn arguments(&self, arguments: Arguments) -> Arguments {
        let arguments = match self.rows {
            Some(rows) => arguments.buffer(rows.buffer()).int(1),
            None => arguments.null().int(0),
        };
        arguments.long(self.every).long(self.stride).long(self.offset)
    }
}

/// Copies `count` rows of `width` elements, bit for bit. No two rows go to one place.
///
/// # Errors
/// [`Error::Value`] when rows are outside a buffer; errors of the device.
pub fn copy_rows<T: Stored>(
    device: &Device,
    [count, width]: [usize; 2],
    (from, from_part): (&Buffer<T>, Part),
    (to, to_part): (&mut Buffer<T>, Part),
) -> Result<(), Error> {
    if count == 0 || width == 0 {
        return Ok(());
    }
    if !from_part.fits(count, width, from.len()) || !to_part.fits(count, width, to.len()) {
        let why = format!("{count} rows of {width} are not within {} and {} elements", from.len(), to.len());
        return Err(value_error("copy_rows", why));
    }
    let arguments = from_part.arguments(Arguments::new().buffer(from));
    let arguments = to_part.arguments(arguments.buffer(to)).long(width);
    let grid = [count, width.div_ceil(128 * 16 / size_of::<T>()), 1];
    // SAFETY: every row is within its buffer, and the two are not the same.
    unsafe { device.launch(build::<T, f32>("copy_rows"), "copy_rows", grid, 128, 0, &arguments) }
}
