//! Copies of rows within a device.

use super::{Arguments, Buffer, Build, Device, Indices, Unit};
use crate::element::Stored;
use crate::{Error, value_error};

/// Its kernels.
pub(crate) const UNIT: Unit =
    Unit { has_out: false, ..Unit::of("copy_rows", include_str!("copy_rows.cu"), &["copy_rows"]) };

/// Where the rows of one side of a copy stand: row i is row `rows[i]`, or `i / every`, of a buffer whose rows are `stride`
/// apart and begin `offset` behind. `R` is what says which rows.
pub struct Part<'a, R: ?Sized = Indices> {
    /// Which rows; `None` for one after the other.
    pub rows: Option<&'a R>,
    /// How often each row comes, one after the other: 1, or more to repeat it.
    pub every: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements before the first.
    pub offset: usize,
}

impl<R: ?Sized> Clone for Part<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

// Derived, it would ask for an `R` that is `Copy`.
impl<R: ?Sized> Copy for Part<'_, R> {}

impl<'a, R: ?Sized> Part<'a, R> {
    /// All rows of a buffer, in order, of `width` elements each.
    pub fn whole(width: usize) -> Part<'a, R> {
        Part { rows: None, every: 1, stride: width, offset: 0 }
    }
}

impl Part<'_> {
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

    /// Whether no element is in two rows.
    fn apart(&self, width: usize) -> bool {
        self.every == 1 && self.stride >= width && self.rows.is_none_or(|rows| rows.is_distinct())
    }

    fn arguments(&self, device: &Device, arguments: Arguments) -> Result<Arguments, Error> {
        let arguments = match self.rows {
            Some(rows) => arguments.buffer(rows.buffer(device)?).int(1),
            None => arguments.null().int(0),
        };
        Ok(arguments.long(self.every).long(self.stride).long(self.offset))
    }
}

/// Copies `count` rows of `width` elements, bit for bit: gathers rows of `from`, scatters them to rows of `to`.
///
/// # Errors
/// [`Error::Value`] when rows are outside a buffer, or two may go to one place: indices that are not
/// [`Indices::distinct`], rows that are repeated or overlap; errors of the device.
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
    if count > 1 && !to_part.apart(width) {
        return Err(value_error("copy_rows", format!("{count} rows of {width} may go to one place")));
    }
    let arguments = from_part.arguments(device, Arguments::new().buffer(from))?;
    let arguments = to_part.arguments(device, arguments.buffer(to))?.long(width);
    let grid = [count, width.div_ceil(128 * 16 / size_of::<T>()), 1];
    // SAFETY: every row is within its buffer, the two are not the same, and no element is written twice.
    unsafe { device.launch(Build::of::<T, f32>("copy_rows"), "copy_rows", grid, 128, 0, &arguments) }
}
