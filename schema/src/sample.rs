//! Random calls of any op, for tests that want them: extents, dtypes and attributes that [`validate`] accepts, and
//! integers that [`check_indexes`](crate::check_indexes) accepts wherever there are any.

use crate::{Attribute, Attributes, Call, DType, Given, Holds, Kind, Op, following, validate};
use std::collections::BTreeMap;
use std::ops::Bound;

/// A stream of numbers: the same for the same seed, everywhere.
pub struct Random(u64);

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The next number from 0 to `limit` - 1; 0 when `limit` is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit.max(1) as u64) as usize
    }

    /// One of `all`, which are not empty.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// A call that [`validate`] accepts.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Name, dtype and shape of every input it gives.
    pub inputs: Vec<(&'static str, DType, Vec<usize>)>,
    /// The attributes it gives, as they stand on the wire.
    pub attributes: BTreeMap<String, String>,
    /// The call as it was checked.
    pub call: Call,
}

/// Draws of a call. Windows of three axes fit one in some hundreds.
const DRAWS: usize = 20_000;

/// A random call of `op`: extents from 0 to 6, now and then one of up to 128; optional inputs and attributes, or not.
///
/// # Panics
/// For an op that [needs more](Op::needs_more) than its form says, and for one of which twenty thousand draws are refused or large.
pub fn sample(op: &'static Op, random: &mut Random) -> Sample {
    assert!(!op.needs_more(), "{} needs what no schema knows", op.name);
    for _ in 0..DRAWS {
        let mut extents: BTreeMap<&str, usize> = BTreeMap::new();
        for axis in op.axes() {
            extents.insert(axis, if random.below(12) == 0 { 0 } else { 1 + random.below(6) });
        }
        let axes: Vec<&str> = extents.keys().copied().collect();
        let mut size = extents[random.pick(&axes)];
        if random.below(3) == 0 {
            size = random.pick(&[16, 17, 32, 33, 64, 128]);
            extents.insert(random.pick(&axes), size);
        }
        let mut attributes = BTreeMap::new();
        for attribute in op.attributes().filter(|_| random.below(2) == 0).collect::<Vec<_>>() {
            if let Some(text) = value(attribute, size, random) {
                attributes.insert(attribute.name.to_string(), text);
            }
        }
        let Ok(typed) = Attributes::parse(op, &attributes) else { continue };
        if axes.iter().any(|axis| op.follows(axis)) {
            let known = op.axes().into_iter().map(|axis| (axis, extents[axis]));
            extents.extend(following(op, known.collect::<Vec<_>>(), typed.clone()).unwrap_or_default());
        }
        let rest: Vec<usize> = (0..random.below(4)).map(|_| random.below(7)).collect();
        let mut groups: BTreeMap<&str, DType> = BTreeMap::new();
        let mut inputs = Vec::new();
        for input in op.inputs {
            if input.optional && random.below(2) == 0 {
                continue;
            }
            let any = random.pick(input.dtypes);
            let dtype = input.group.map_or(any, |group| *groups.entry(group).or_insert(any));
            inputs.push((input.name, dtype, input.shape(|axis| extents[axis], &rest)));
        }
        let given: Vec<Given> = inputs.iter().map(|&(name, dtype, ref shape)| Given { name, dtype, shape }).collect();
        let out = random.pick(&DType::FLOATS);
        match validate(op, &given, typed, out) {
            Ok(call) if is_small(&call) => return Sample { inputs, attributes, call },
            _ => {}
        }
    }
    panic!("{}: {DRAWS} draws are refused", op.name);
}

/// Whether a test has time and room for it: strides of three axes make an image of millions of places out of a few.
fn is_small(call: &Call) -> bool {
    let elements = call.op.outputs.iter().map(|output| call.elements(output.axes)).sum::<f64>();
    elements <= f64::from(1 << 17) && (call.op.operations)(call) <= f64::from(1 << 22)
}

/// A value of an attribute, as it stands on the wire; `None` for text, whose words the schema does not know. Counts are
/// small, or go by the extent `size`.
fn value(attribute: &Attribute, size: usize, random: &mut Random) -> Option<String> {
    Some(match attribute.kind {
        Kind::Count(least) => match random.below(2) {
            0 => (least + random.below(4)).to_string(),
            _ => (size * random.pick(&[0, 1, 2, 4, 8])).max(least).to_string(),
        },
        Kind::Float(lower, upper) => {
            let limit = |bound: Bound<f64>| match bound {
                Bound::Included(limit) => limit,
                _ => 0.5,
            };
            let all = [0.0, 1.0, 0.125, 3.0, -2.0, 1e-6, 10000.0, limit(lower), limit(upper)];
            let fits: Vec<f64> = all.into_iter().filter(|v| attribute.admits(&(*v).into())).collect();
            random.pick(&fits).to_string()
        }
        Kind::Flag => random.pick(&["0", "1", "true", "false"]).to_string(),
        Kind::Choice(words) => random.pick(words).to_string(),
        Kind::Text => return None,
    })
}

/// `len` integers for an index input of `call`. They are as the input asks, but where nothing fits, as a row of a table
/// without rows.
pub fn integers(call: &Call, holds: Holds, len: usize, random: &mut Random) -> Vec<i32> {
    if holds == Holds::Mask {
        return (0..len).map(|_| random.pick(&[0, 1, 1, -1, 7])).collect();
    }
    let (least, largest) = holds.range(call);
    if let Holds::Distinct(_) = holds {
        return shuffled((0..=largest as i32).collect(), random)[..len].to_vec();
    }
    if let Holds::Ranks(axis) = holds {
        let row: Vec<i32> = (0..call.dim(axis) as i64).map(|i| if i <= largest { i as i32 } else { -1 }).collect();
        return (0..len / row.len()).flat_map(|_| shuffled(row.clone(), random)).collect();
    }
    if let Holds::Choices(axis) = holds {
        let (chosen, all) = (call.count("chosen"), (0..call.dim(axis) as i32).collect::<Vec<_>>());
        let mut row = || match random.below(4) {
            0 => vec![-1; chosen],
            _ => shuffled(all.clone(), random)[..chosen].to_vec(),
        };
        return (0..len / chosen).flat_map(|_| row()).collect();
    }
    // Small ones: positions beyond all keys and targets far below 0 say nothing more.
    let (least, largest) = (least.max(-3), largest.clamp(0, 40));
    let mut all: Vec<i32> =
        (0..len).map(|_| (least + random.below((largest - least + 1) as usize) as i64) as i32).collect();
    if let (Holds::Starts(axis), Some(last)) = (holds, len.checked_sub(1)) {
        all.sort_unstable();
        all[last] = i32::try_from(call.dim(axis)).unwrap_or(i32::MAX);
        all[0] = 0;
    }
    all
}

/// The same in any order.
fn shuffled(mut all: Vec<i32>, random: &mut Random) -> Vec<i32> {
    for i in 0..all.len() {
        let other = i + random.below(all.len() - i);
        all.swap(i, other);
    }
    all
}
