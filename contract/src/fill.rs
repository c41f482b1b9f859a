//! Deterministic contents for inputs.
//!
//! Element i of a tensor depends on the case's name, the tensor's name and i alone, through integer arithmetic and
//! exact f64 operations: the same bits on every machine, whatever order they are made in.

use crate::round;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::collections::BTreeMap;

/// What the float inputs of a case hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fill {
    /// About normally distributed: mean 0, variance 1.
    Normal,
    /// Both signs and exponents from -20 to 20 (fp16: -10 to 10).
    Wide,
    /// Sums that cancel.
    Cancel,
    /// Around the subnormals of the dtype.
    Tiny,
    /// Up to the largest finite number of the dtype, or sums near it.
    NearOverflow,
    /// A few elements decide: sharp softmax rows.
    Peaky,
    /// Normal with NaN, infinities, -0, subnormals and the largest numbers sprinkled in, row by row.
    Edges,
    /// All 65,536 bf16 patterns in ascending order, NaN payloads included.
    AllBf16,
    /// Chosen so that the outputs hold every class of number that they can, see [`crate::number_class`].
    Classes,
    /// Arguments at which the last bit of every constant of an exponential shows in the output, and weights around the
    /// cut; see `sharp.rs`.
    Sharp,
    /// Another order of a sum shows in any output dtype; see `power.rs`.
    Power,
    /// Inputs recorded beside a checkpoint or in a vector, put in by whoever holds it.
    Recorded,
}

impl Fill {
    /// All fills.
    pub const ALL: [Fill; 12] = [
        Fill::Normal,
        Fill::Wide,
        Fill::Cancel,
        Fill::Tiny,
        Fill::NearOverflow,
        Fill::Peaky,
        Fill::Edges,
        Fill::AllBf16,
        Fill::Sharp,
        Fill::Power,
        Fill::Classes,
        Fill::Recorded,
    ];

    /// Whether a case of this name has this fill: names are `op/dtype/stem-fill-out`.
    pub fn is_of(self, case: &str) -> bool {
        case.rsplit('-').nth(1) == Some(self.name())
    }

    /// The name in tables and case names.
    pub fn name(self) -> &'static str {
        match self {
            Fill::Normal => "normal",
            Fill::Wide => "wide",
            Fill::Cancel => "cancel",
            Fill::Tiny => "tiny",
            Fill::NearOverflow => "near_overflow",
            Fill::Peaky => "peaky",
            Fill::Edges => "edges",
            Fill::AllBf16 => "all_bf16",
            Fill::Sharp => "sharp",
            Fill::Power => "power",
            Fill::Classes => "classes",
            Fill::Recorded => "recorded",
        }
    }

    /// The fill called `name`.
    pub fn parse(name: &str) -> Option<Fill> {
        Fill::ALL.into_iter().find(|fill| fill.name() == name)
    }
}

/// What elements of [`Fill::Edges`] may be, by row: row r holds kind `r mod 9` in up to three places, the ninth row
/// two infinities of opposite sign, and the first nothing special.
fn special(kind: usize, dtype: DType) -> f64 {
    let smallest = round::ulp(0.0, dtype);
    let infinity = round::to_bits(f64::INFINITY, dtype);
    let largest = round::from_bits(infinity - 1, dtype);
    let normal = smallest / round::ulp(1.0, dtype);
    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, smallest, smallest - normal, largest, -largest][kind % 8]
}

/// Makes the inputs of one case.
pub struct Maker<'a> {
    /// Decides the draws: the case's name without its output dtype.
    pub key: &'a str,
    /// Dtype of the float inputs.
    pub dtype: DType,
    /// What they hold.
    pub fill: Fill,
    /// Extents by axis name; the name of an optional input with extent 1 asks for it.
    pub shape: &'a BTreeMap<String, usize>,
    /// Integer inputs given in full.
    pub ints: &'a BTreeMap<String, Vec<i32>>,
    /// Parameters of the case as they stand in its table.
    pub params: &'a BTreeMap<String, String>,
}

impl Maker<'_> {
    /// Extent of an axis. Panics when the shape lacks it; the loader checks.
    pub fn dim(&self, axis: &str) -> usize {
        *self.shape.get(axis).unwrap_or_else(|| panic!("{}: the shape lacks {axis}", self.key))
    }

    /// A parameter that counts something, `otherwise` where the case does not give it.
    pub fn count(&self, param: &str, otherwise: usize) -> usize {
        self.params.get(param).map_or(otherwise, |text| text.parse().expect("the loader checks parameters"))
    }

    /// The draws of one tensor.
    pub(crate) fn draw(&self, tensor: &str) -> Draw {
        Draw::new(self.key, tensor)
    }

    /// Whether the optional input `name` is asked for.
    pub fn has(&self, name: &str) -> bool {
        self.shape.get(name) == Some(&1)
    }

    /// `len` values for `tensor` in rows of `row` elements, not yet rounded.
    pub fn values(&self, tensor: &str, fill: Fill, len: usize, row: usize) -> Vec<f64> {
        let draw = Draw::new(self.key, tensor);
        (0..len).map(|i| self.value(&draw, fill, i, row)).collect()
    }

    /// Numbers where a float dtype's range begins and ends, of all three dtypes and both signs, as far as the case's
    /// own dtype has them: zeros, the smallest and largest subnormals and what lies below them, the smallest normal and
    /// the largest numbers and what lies beyond them, infinities and NaN.
    pub fn borders(&self) -> Vec<f64> {
        let mut all = vec![0.0, 1.0, f64::INFINITY];
        for dtype in DType::FLOATS {
            let (subnormal, top) = (round::ulp(0.0, dtype), round::overflow(dtype));
            let normal = subnormal / round::ulp(1.0, dtype);
            let largest = round::from_bits(round::to_bits(f64::INFINITY, dtype) - 1, dtype);
            all.extend([subnormal / 4.0, subnormal, normal / 2.0, normal * 0.75, normal - subnormal, normal]);
            all.extend([top / 2.0, largest, top]);
        }
        let mut borders = vec![f64::NAN];
        for v in all {
            let held = round::round(v, self.dtype) == v;
            if held && !borders.contains(&v) {
                borders.extend([v, -v]);
            }
        }
        borders
    }

    /// `len` of [`Maker::borders`], over and over, from the one numbered `first` on.
    pub fn borders_from(&self, first: usize, len: usize) -> Vec<f64> {
        self.borders().into_iter().cycle().skip(first).take(len).collect()
    }

    /// Those of `values` that the case's dtype has.
    pub fn held<T: Copy>(&self, values: &[T], numbers: fn(&T) -> &[f64]) -> Vec<T> {
        let held = |v: &f64| v.is_nan() || round::round(*v, self.dtype) == *v;
        values.iter().filter(|value| numbers(value).iter().all(held)).copied().collect()
    }

    /// Normal values with one special element every `period`, the kinds taking turns.
    pub fn sparse_edges(&self, tensor: &str, len: usize, period: usize) -> Vec<f64> {
        let mut values = self.values(tensor, Fill::Normal, len, len);
        let draw = Draw::new(self.key, tensor);
        for (kind, start) in (0..len).step_by(period).enumerate() {
            let at = start + draw.below(kind, period);
            if at < len {
                values[at] = special(kind, self.dtype);
            }
        }
        values
    }

    /// `len` integers from 0 to `limit - 1`.
    pub fn below(&self, tensor: &str, len: usize, limit: usize) -> Vec<i32> {
        let draw = Draw::new(self.key, tensor);
        (0..len).map(|i| draw.below(i, limit) as i32).collect()
    }

    /// The integers given for `tensor`, or `otherwise`.
    pub fn ints(&self, tensor: &str, otherwise: Vec<i32>) -> Vec<i32> {
        self.ints.get(tensor).cloned().unwrap_or(otherwise)
    }

    /// Tensors of the case's dtype, each value rounded once; a NaN keeps its sign and payload.
    pub fn floats<const N: usize>(&self, parts: [(&str, Vec<usize>, Vec<f64>); N]) -> BTreeMap<String, Tensor> {
        parts.into_iter().map(|(name, shape, values)| (name.to_string(), input(self.dtype, &shape, &values))).collect()
    }

    fn value(&self, draw: &Draw, fill: Fill, i: usize, row: usize) -> f64 {
        let (smallest, largest) = match self.dtype {
            DType::Bf16 => (-133, 127),
            DType::Fp16 => (-24, 15),
            _ => (-149, 127),
        };
        let span = if self.dtype == DType::Fp16 { 10 } else { 20 };
        match fill {
            // The ops that offer `sharp` or `power` make it of their own arguments.
            Fill::Normal | Fill::Peaky | Fill::Cancel | Fill::Classes | Fill::Sharp | Fill::Power | Fill::Recorded => {
                draw.normal(i)
            }
            Fill::Wide => draw.scaled(i, -span, span),
            Fill::Tiny => draw.scaled(i, smallest - 1, if self.dtype == DType::Fp16 { -8 } else { -118 }),
            Fill::NearOverflow => draw.scaled(i, largest - 1, largest),
            Fill::Edges => {
                let (r, column) = (i / row, i % row);
                let kind = r % 10;
                let places = [0, 1, 2].map(|n| draw.below(r * 3 + n, row));
                match kind {
                    0 => draw.normal(i),
                    9 if column == places[0] => f64::INFINITY,
                    9 if column == places[1] => f64::NEG_INFINITY,
                    9 => draw.normal(i),
                    _ if places[..1 + r % 3].contains(&column) => special(kind - 1, self.dtype),
                    _ => draw.normal(i),
                }
            }
            Fill::AllBf16 => {
                let bits = (i & 0xffff) as u64;
                if bits & 0x7fff > 0x7f80 {
                    f64::from_bits((bits & 0x8000) << 48 | 0x7ff << 52 | (bits & 0x7f) << 45)
                } else {
                    round::from_bits(bits as u32, DType::Bf16)
                }
            }
        }
    }
}

/// A tensor of `dtype`; NaN payloads are cut, not made canonical, because inputs may hold any.
pub(crate) fn input(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let bits = |v: f64, mantissa: u32, width: u32| {
        let nan = |raw: u64| {
            let payload = ((raw & ((1 << 52) - 1)) >> (52 - mantissa)) as u32;
            let infinity = ((1u32 << (width - 1 - mantissa)) - 1) << mantissa;
            ((raw >> 63) as u32) << (width - 1) | infinity | payload
        };
        if v.is_nan() { nan(v.to_bits()) } else { round::to_bits(v, dtype) }
    };
    match dtype {
        DType::Bf16 => Tensor::bf16(shape, values.iter().map(|&v| bf16::from_bits(bits(v, 7, 16) as u16)).collect()),
        DType::Fp16 => Tensor::fp16(shape, values.iter().map(|&v| f16::from_bits(bits(v, 10, 16) as u16)).collect()),
        DType::Fp32 => Tensor::fp32(shape, values.iter().map(|&v| f32::from_bits(bits(v, 23, 32))).collect()),
        DType::I32 => round::tensor(dtype, shape, values),
    }
}

/// The draws of one tensor, each addressed by its index.
pub(crate) struct Draw(u64);

impl Draw {
    fn new(key: &str, tensor: &str) -> Draw {
        // FNV-1a, with a separator so that the two names cannot run into each other.
        let bytes = key.bytes().chain([0xff]).chain(tensor.bytes());
        Draw(bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// splitmix64 at position `counter`.
    fn bits(&self, counter: u64) -> u64 {
        let mut z = self.0.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// The sum of twelve uniform numbers, centred: variance 1, within -6 to 6, and exact.
    fn normal(&self, i: usize) -> f64 {
        let words = [0, 1, 2].map(|n| self.bits(3 * i as u64 + n));
        let sum: u64 = words.iter().flat_map(|w| [w & 0xffff, w >> 16 & 0xffff, w >> 32 & 0xffff, w >> 48]).sum();
        (sum as f64 + 6.0) / 65536.0 - 6.0
    }

    /// Either sign, a uniform exponent from `low` to `high`, a uniform mantissa.
    fn scaled(&self, i: usize, low: i32, high: i32) -> f64 {
        let bits = self.bits(i as u64);
        let exponent = low + ((bits >> 52 & 0x7ff) % (high - low + 1) as u64) as i32;
        f64::from_bits(bits & 0x800f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000) * round::pow2(exponent)
    }

    /// Draws of their own for part number `part` of the tensor.
    pub fn of(&self, part: usize) -> Draw {
        Draw(self.bits(part as u64))
    }

    /// An integer from 0 to `limit - 1`.
    pub fn below(&self, i: usize, limit: usize) -> usize {
        ((u128::from(self.bits(!(i as u64))) * limit as u128) >> 64) as usize
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    fn maker<'a>(dtype: DType, shape: &'a BTreeMap<String, usize>, ints: &'a BTreeMap<String, Vec<i32>>) -> Maker<'a> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        Maker { key: "op/x/case", dtype, fill: Fill::Normal, shape, ints, params: &NONE }
    }

    pub(crate) fn fills_are_what_they_say() {
        let (shape, ints) = Default::default();
        for dtype in DType::FLOATS {
            let m = maker(dtype, &shape, &ints);
            let normal = m.values("x", Fill::Normal, 20_000, 100);
            let mean = normal.iter().sum::<f64>() / 20_000.0;
            let variance = normal.iter().map(|v| v * v).sum::<f64>() / 20_000.0;
            assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
            let least_normal = round::ulp(0.0, dtype) / round::ulp(1.0, dtype);
            let tiny = m.values("x", Fill::Tiny, 1000, 100);
            assert!(tiny.iter().any(|v| v.abs() < least_normal) && tiny.iter().any(|v| v.abs() > least_normal));
            let near = m.values("x", Fill::NearOverflow, 1000, 100);
            assert!(near.iter().all(|v| v.abs() >= round::overflow(dtype) / 4.0));
            let edges = m.values("x", Fill::Edges, 1000, 100);
            assert!(edges[..100].iter().all(|v| v.is_finite() && *v != 0.0));
            assert!(edges[100..200].iter().any(|v| v.is_nan()) && edges[200..].contains(&f64::INFINITY));
            assert!(edges.iter().any(|v| v.to_bits() == (-0.0f64).to_bits()));
        }
    }

    pub(crate) fn draws_depend_on_case_tensor_and_index_alone() {
        let (shape, ints) = Default::default();
        let m = maker(DType::Bf16, &shape, &ints);
        let long = m.values("x", Fill::Wide, 100, 10);
        assert_eq!(long[..40], m.values("x", Fill::Wide, 40, 10)[..]);
        assert_ne!(long, m.values("w", Fill::Wide, 100, 10));
        assert_ne!(long, Maker { key: "op/x/cas", ..m }.values("ex", Fill::Wide, 100, 10));
        // A change of the generator would silently change every golden.
        assert_eq!(Draw::new("a", "b").bits(0), 5_847_290_844_396_408_320);
    }

    pub(crate) fn all_patterns_keep_their_bits() {
        let (shape, ints) = Default::default();
        let m = maker(DType::Bf16, &shape, &ints);
        let t = &m.floats([("x", vec![65536], m.values("x", Fill::AllBf16, 65536, 65536))])["x"];
        assert!((0..65536).all(|i| t.bits(i) == i as u32));
    }
}
