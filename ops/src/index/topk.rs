//! The largest elements of a row: `x[R,N], count[R]? -> index[R,K]`.
//!
//! Order: the K largest of the first `count` elements, in the ascending order of their indices, and -1 behind them. The lowest
//! index among equals is taken first; -0 equals +0. A NaN counts as larger than every number.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::lengths::optional_lengths;
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};
use samebits_schema::Call;

const NAME: &str = "topk";

/// Dimensions of the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    /// Rows R.
    pub rows: usize,
    /// Elements of a row, N.
    pub n: usize,
    /// How many are taken of a row, K; at least 1, and more than there are leave -1.
    pub k: usize,
}

/// `x[R,N], count[R]? -> index[R,K]`, row-major, counted from 0; without `count` all elements are there.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when k is 0, N exceeds i32, or a count is not from 0 to N.
///
/// ```
/// use samebits_ops::{Cpu, TopK, topk};
///
/// let shape = TopK { rows: 2, n: 4, k: 2 };
/// let mut index = [0; 4];
/// topk(&Cpu::best(), &shape, &[1f32, 7.0, 5.0, 7.0, 3.0, 9.0, 9.0, 9.0], Some(&[4, 1]), &mut index)?;
/// assert_eq!(index, [1, 3, 0, -1]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn topk<I: Element>(
    cpu: &Cpu,
    shape: &TopK,
    x: &[I],
    count: Option<&[i32]>,
    index: &mut [i32],
) -> Result<(), Error> {
    shape.check(x.len(), index.len())?;
    run(cpu, shape, TensorRef::of(x, &[shape.rows, shape.n]), count, index)
}

impl TopK {
    /// The extents of a call.
    fn of(call: &Call) -> TopK {
        TopK { rows: call.dim("R"), n: call.dim("N"), k: call.count("k") }
    }

    /// Checks the lengths of slices, and K and N.
    fn check(&self, x: usize, index: usize) -> Result<(), Error> {
        let TopK { rows, n, k } = *self;
        check_len(NAME, "x", "[R,N]", x, &[rows, n])?;
        check_len(NAME, "index", "[R,K]", index, &[rows, k])?;
        if k == 0 || i32::try_from(n).is_err() {
            return Err(value_error(NAME, format!("{k} of {n}; take at least 1 of up to {}", i32::MAX)));
        }
        Ok(())
    }

    /// Checks how many elements rows have.
    fn check_count(&self, count: Option<&[i32]>) -> Result<(), Error> {
        let Some(count) = count else { return Ok(()) };
        check_len(NAME, "count", "[R]", count.len(), &[self.rows])?;
        match count.iter().position(|&count| usize::try_from(count).map_or(true, |count| count > self.n)) {
            None => Ok(()),
            Some(i) => Err(value_error(NAME, format!("count[{i}] is {}; use 0 to {}", count[i], self.n))),
        }
    }

    /// The same of counts that stand on a device.
    fn check_indices(&self, count: Option<&Indices>) -> Result<(), Error> {
        let Some(count) = count else { return Ok(()) };
        check_len(NAME, "count", "[R]", count.len(), &[self.rows])?;
        if count.limit() > self.n + 1 {
            let what = format!("`count` is below {}; its limit must be N + 1 = {} at most", count.limit(), self.n + 1);
            return Err(value_error(NAME, what));
        }
        Ok(())
    }
}

/// Rows of x of any layout; lengths but that of `count` have been checked.
fn run(cpu: &Cpu, shape: &TopK, x: TensorRef, count: Option<&[i32]>, index: &mut [i32]) -> Result<(), Error> {
    shape.check_count(count)?;
    x.on_host(NAME, "x")?;
    typed!(x.dtype() => I, {
        let x = x.rows::<I>();
        cpu.chunks(index, shape.k, |row, index| {
            let count = count.map_or(shape.n, |count| count[row] as usize);
            choose(&x.row(row)[..count], index);
        });
    });
    Ok(())
}

/// The places of the largest elements of x, and -1 behind them.
fn choose<I: Element>(x: &[I], index: &mut [i32]) {
    let k = index.len();
    // What the last one is that is taken, and how many of its equals are: all are where there are not more.
    let (mut least, mut equals) = (0, usize::MAX);
    if k < x.len() {
        let mut ranks: Vec<u32> = x.iter().map(|x| rank(x.widen())).collect();
        let (above, last, _) = ranks.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        (least, equals) = (*last, 1 + above.iter().filter(|rank| *rank == last).count());
    }
    let mut places = index.iter_mut();
    for (i, x) in x.iter().enumerate() {
        let rank = rank(x.widen());
        if rank < least || rank == least && equals == 0 {
            continue;
        }
        equals -= usize::from(rank == least);
        *places.next().expect("as many are taken as there is room for") = i as i32;
    }
    places.for_each(|place| *place = -1);
}

/// Values in their order as unsigned integers above 0: -0 and +0 are one, a NaN is above all.
pub(crate) fn rank(v: f32) -> u32 {
    let bits = (v + 0.0).to_bits();
    match v.is_nan() {
        true => u32::MAX,
        false => bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 },
    }
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("topk.cu"), &[NAME]) };

/// topk, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let shape = TopK::of(args.call);
        let count = args.optional("count").map(|_| args.integers("count")).transpose()?;
        run(cpu, &shape, args.input("x"), count, args.output("index").host(NAME, "index")?)
    },
    device: Some(|on, args| {
        let (shape, x) = (TopK::of(args.call), args.input("x"));
        let index = args.output("index").device_part(NAME, "index")?;
        let mut made = None;
        let count = match args.optional("count").map(|count| count.as_indices()) {
            None => None,
            Some(Some(count)) => Some(count),
            Some(None) => {
                let count = args.integers("count")?;
                shape.check_count(Some(count))?;
                Some(&*made.insert(Indices::new(on, NAME, count, shape.n + 1)?))
            }
        };
        shape.check_indices(count)?;
        typed!(x.dtype() => I, launch::<I>(on, &shape, x.device_part(NAME, "x")?, count, index))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The call was checked.
fn launch<I: Stored>(
    on: &Device,
    shape: &TopK,
    (x, x_at): (&Buffer<I>, usize),
    count: Option<&Indices>,
    (index, at): (&mut Buffer<i32>, usize),
) -> Result<(), Error> {
    if shape.rows == 0 {
        return Ok(());
    }
    let arguments = optional_lengths(on, Arguments::new().buffer_from(x, x_at), count)?.buffer_from(index, at);
    let arguments = arguments.int(int(NAME, "N", shape.n)?).long(shape.k);
    // SAFETY: lengths were checked, and counts are at most N; a block takes a row.
    unsafe { on.launch(Build::of::<I, f32>(NAME), NAME, [shape.rows, 1, 1], 256, 0, &arguments) }
}

/// [`topk`] on a device.
///
/// # Errors
/// As [`topk`]; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &TopK,
    x: &Buffer<I>,
    count: Option<&Indices>,
    index: &mut Buffer<i32>,
) -> Result<(), Error> {
    shape.check(x.len(), index.len())?;
    shape.check_indices(count)?;
    launch(on, shape, (x, 0), count, (index, 0))
}
