use crate::Error;
use crate::call::Call;

/// What the elements of an input may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holds {
    /// Any floats.
    Floats,
    /// 0 for padding, anything else for a token.
    Mask,
    /// A position: 0 or more.
    Position,
    /// Any integer.
    Any,
    /// An entry of this axis.
    Below(&'static str),
    /// An entry of this axis, each once at most: what inputs and outputs have there belongs to the row that names it.
    Distinct(&'static str),
    /// An entry of this axis, or a negative number, which is ignored.
    BelowOrIgnored(&'static str),
    /// Rows over this axis, the last one of the input, in which each rank from 0 to `chosen` - 1 stands once, and -1
    /// elsewhere.
    Ranks(&'static str),
    /// In each row `chosen` entries of this axis, none twice, or -1 alone: none are named.
    Choices(&'static str),
    /// A number of entries: 0 to the product of these axes.
    Length(&'static [&'static str]),
    /// A border between entries of this axis: 0 to its extent.
    Place(&'static str),
    /// Where each sequence starts on this axis, and its end: ascending from 0 to the extent.
    Starts(&'static str),
    /// Entries of axis `pages`, where the lengths in input `lengths` reach them; elsewhere anything. Each stands for `size`
    /// rows.
    Pages {
        /// The axis of pages.
        pages: &'static str,
        /// The axis of rows in a page.
        size: &'static str,
        /// The input that has the rows in use, one number for each row of the table.
        lengths: &'static str,
    },
}

impl Holds {
    /// The least and the largest integer that `call` admits, where each element is judged alone. Nothing fits when the
    /// least is above the largest.
    pub fn range(self, call: &Call) -> (i64, i64) {
        // Of an axis of the model, as many as an i32 can name.
        let of_model = |axis: &str| call.op.is_of_model(axis).then_some(1 << 31);
        let extent = |axis: &str| of_model(axis).unwrap_or_else(|| i64::try_from(call.dim(axis)).unwrap_or(i64::MAX));
        match self {
            Holds::Floats | Holds::Mask | Holds::Any => (i64::from(i32::MIN), i64::from(i32::MAX)),
            Holds::Position => (0, i64::from(i32::MAX)),
            Holds::Below(axis) | Holds::Distinct(axis) | Holds::Pages { pages: axis, .. } => (0, extent(axis) - 1),
            Holds::BelowOrIgnored(axis) => (i64::from(i32::MIN), extent(axis) - 1),
            Holds::Choices(axis) => (-1, extent(axis) - 1),
            Holds::Ranks(_) => (-1, i64::try_from(call.count("chosen")).unwrap_or(i64::MAX) - 1),
            Holds::Length(axes) => (0, axes.iter().fold(1, |product, axis| extent(axis).saturating_mul(product))),
            Holds::Place(axis) | Holds::Starts(axis) => (0, extent(axis)),
        }
    }
}

/// Checks the integers of a call whose form [`validate`](crate::validate) has accepted; `integers` gives those of an
/// input by its name, and `None` where the call leaves it out.
///
/// # Errors
/// [`Error::Invalid`]: the first element that is out of its range, and the range; what stands twice and may not.
pub fn check_indexes<'a>(call: &Call, integers: impl Fn(&str) -> Option<&'a [i32]>) -> Result<(), Error> {
    for input in call.op.inputs.iter().filter(|input| !input.is_float()) {
        let Some(values) = integers(input.name) else { continue };
        let (least, largest) = input.holds.range(call);
        let in_use = |i: usize| match input.holds {
            Holds::Pages { size, lengths, .. } => {
                let columns = values.len() / call.dim(input.axes[0]).max(1);
                let length = integers(lengths).map_or(0, |lengths| lengths[i / columns]);
                i % columns * call.dim(size) < usize::try_from(length).unwrap_or(0)
            }
            _ => true,
        };
        let out = |&(i, &value): &(usize, &i32)| !(least..=largest).contains(&i64::from(value)) && in_use(i);
        if let Some((i, value)) = values.iter().enumerate().find(out) {
            let use_ = if least > largest { "nothing fits".into() } else { format!("use {least} to {largest}") };
            return Err(Error::Invalid(format!("input `{}`: element {i} is {value}; {use_}", input.name)));
        }
        if let Holds::Distinct(_) = input.holds
            && let Some((i, value)) = repeated(values)
        {
            let rule = format!("element {i} is {value}, as one before it; each may stand once");
            return Err(Error::Invalid(format!("input `{}`: {rule}", input.name)));
        }
        if let Holds::Ranks(axis) = input.holds {
            let (extent, chosen) = (call.dim(axis), call.count("chosen"));
            // As many as there are ranks, and none twice.
            let whole = |row: &[i32]| {
                let ranks: Vec<i32> = row.iter().copied().filter(|rank| *rank >= 0).collect();
                ranks.len() == chosen && repeated(&ranks).is_none()
            };
            if let Some(row) = values.chunks(extent.max(1)).position(|row| !whole(row)) {
                let rule = format!("row {row} must have each rank from 0 to {largest} once, and -1 elsewhere");
                return Err(Error::Invalid(format!("input `{}`: {rule}", input.name)));
            }
        }
        if let Holds::Choices(_) = input.holds {
            let whole =
                |row: &[i32]| row.iter().all(|entry| *entry == -1) || !row.contains(&-1) && repeated(row).is_none();
            if let Some(row) = values.chunks(call.count("chosen")).position(|row| !whole(row)) {
                let rule =
                    format!("row {row} must name {} entries, none twice, or hold -1 alone", call.count("chosen"));
                return Err(Error::Invalid(format!("input `{}`: {rule}", input.name)));
            }
        }
        if let Holds::Starts(axis) = input.holds {
            let end = largest;
            let ends = [values.first(), values.last()].map(|value| value.copied().map(i64::from));
            if ends != [Some(0), Some(end)] || values.windows(2).any(|two| two[0] > two[1]) {
                let rule = format!("it must ascend from 0 to {axis}, which is {end}");
                return Err(Error::Invalid(format!("input `{}`: {rule}", input.name)));
            }
        }
    }
    Ok(())
}

/// The first element that one before it equals.
fn repeated(values: &[i32]) -> Option<(usize, i32)> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by_key(|&i| (values[i], i));
    let again = order.windows(2).filter(|two| values[two[0]] == values[two[1]]).map(|two| two[1]);
    again.min().map(|i| (i, values[i]))
}
