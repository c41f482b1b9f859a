//! What may vary around a logical row without moving a bit of it.
//!
//! A variant is a case of its own and a pairing of rows: row `base` of the base case's answer must equal row `variant`
//! of the variant's answer, bit for bit. Logical rows are the leading `row_axes` axes of the outputs, flattened. Where
//! rows name entries of an axis as their own ([`Op::owned`]), these go with them: a variant keeps them at other places.

use crate::case::{Answer, Case, Status};
use crate::compare;
use crate::fill::{Fill, Maker};
use crate::round;
use crate::spec::{self, Class, Sees, Spec};
use crate::tensor::{DType, Tensor};
use crate::verdict::Evidence;
use samebits_schema::{Holds, Input, Op, Output, Role};
use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::BTreeMap;

pub(crate) mod sizes;

use sizes::{between, sizes};

/// What the machine at hand can vary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Instruction sets by name; the first is where the base runs.
    pub isas: Vec<String>,
    /// Thread counts.
    pub threads: Vec<usize>,
    /// The least workspace in bytes that does for the case at hand, where it is known.
    pub smallest_budget: Option<usize>,
    /// The layouts of its inputs that an implementation can be asked for, of [`LAYOUTS`].
    pub layouts: Vec<String>,
    /// Up to how many elements an input may grow when rows are added.
    pub room: usize,
    /// Draws the random settings.
    pub seed: u64,
    /// Axes with the settings that alone are asked on them, where not all are.
    pub alone: Vec<(String, String)>,
}

/// Ways an input may lie in memory, beside each by itself in row-major order: one element into a larger allocation; rows with
/// as much of something else behind each, as in fused projections; heads before tokens (the two axes before the last one
/// exchanged); every second element of a row that is twice as wide; last axis first.
pub const LAYOUTS: [&str; 5] = ["offset", "fused", "heads_first", "strided", "transposed"];

/// One setting on an axis.
pub struct Variant<'a> {
    /// Names the setting in records, for example `left3:nan`.
    pub setting: String,
    case: LazyCell<Case, Make<'a>>,
    /// Which rows of the base must equal which rows of the variant.
    pub rows: Vec<(usize, usize)>,
    /// How many leading axes of an output must be logical rows for it to be held: 0, or more where the variant changes what
    /// outputs with fewer are sums over.
    pub held: usize,
    /// How the case is asked.
    pub way: Way,
}

type Make<'a> = Box<dyn FnOnce() -> Case + 'a>;

impl<'a> Variant<'a> {
    fn plain(setting: String, rows: Vec<(usize, usize)>, make: impl FnOnce() -> Case + 'a) -> Variant<'a> {
        Variant { setting, case: LazyCell::new(Box::new(make)), rows, held: 0, way: Way::Plain }
    }

    /// The answer to the variant, where `ask` has that to a case: to the whole, if it is asked in parts, or to the first part
    /// that has none.
    pub fn answer(&self, mut ask: impl FnMut(&Case) -> Answer) -> Answer {
        let mut answer = ask(self.case());
        let Way::Parts(others, join) = &self.way else { return answer };
        let mut parts = Vec::new();
        for case in others {
            if answer.status != Status::Ok {
                return answer;
            }
            parts.push(std::mem::take(&mut answer.outputs));
            answer = ask(&join.after(&parts[parts.len() - 1], case));
        }
        if answer.status != Status::Ok {
            return answer;
        }
        parts.push(std::mem::take(&mut answer.outputs));
        match join.whole(parts) {
            Ok(outputs) => Answer { outputs, ..answer },
            Err(reason) => Answer::error(reason),
        }
    }

    /// Holds an output of the variant to that of the base, the answer to `case`; the number of elements compared.
    ///
    /// # Errors
    /// Evidence of the first difference.
    pub fn compare(
        &self,
        spec: &Spec,
        output: &Output,
        case: &Case,
        base: &Tensor,
        found: &Tensor,
    ) -> Result<usize, Box<Evidence>> {
        if output.rows < self.held {
            return Ok(0);
        }
        let found = shortened(spec, output, base.shape(), found);
        compare::bits(output.name, output.rows, base, &found, &self.pairs(spec, output, case)).map_err(
            |mut evidence| {
                // Neither of the two answers is the right one.
                evidence.message = evidence.message.replace(" was expected", " is in the base");
                evidence
            },
        )
    }

    /// What to run; made when it is first asked for, as all settings of an axis take many times the room of the case.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// Which entries of the first axes of `output` must be equal, in the answer to `base` and in that to the variant: its
    /// logical rows. Where rows own the entries, these are theirs; those that nobody owns are all alike.
    pub fn pairs(&self, op: &Op, output: &Output, base: &Case) -> Cow<'_, [(usize, usize)]> {
        let Some((names, _)) = op.owned().filter(|(_, axis)| output.axes[0] == *axis) else {
            if output.rows == op.row_axes {
                return Cow::Borrowed(&self.rows);
            }
            if output.rows == 0 {
                return Cow::Borrowed(&[(0, 0)]);
            }
            // What rows have in common that differ in the other axes.
            let [each, of_variant] = [base, self.case()].map(|case| {
                let input =
                    op.inputs.iter().find(|input| input.rows == op.row_axes).expect("an input has all row axes");
                case.inputs[input.name].shape()[output.rows..op.row_axes].iter().product::<usize>()
            });
            let mut pairs: Vec<_> = self.rows.iter().map(|(b, v)| (b / each, v / of_variant)).collect();
            pairs.sort_unstable();
            pairs.dedup();
            return Cow::Owned(pairs);
        };
        let (of_base, of_variant) = (Owned::of(base), Owned::of(self.case()));
        let (of_base, of_variant) = (of_base.expect("it has an owner"), of_variant.expect("it has an owner"));
        let each = base.inputs[names.name].shape()[1..].iter().product::<usize>();
        let own = self.rows.iter().flat_map(|&(b, v)| (0..each).map(move |i| (b * each + i, v * each + i)));
        let mut pairs: Vec<(usize, usize)> = own.map(|(b, v)| (of_base.places[b], of_variant.places[v])).collect();
        let (of_base, of_variant) = (of_base.others(), of_variant.others());
        if let (Some(&first), Some(&of_variant_first)) = (of_base.first(), of_variant.first()) {
            pairs.extend(of_base.iter().map(|&other| (other, of_variant_first)));
            pairs.extend(of_variant.iter().map(|&other| (first, other)));
        }
        Cow::Owned(pairs)
    }
}

/// `output` of a variant, without what belongs to keys, or rows of a sequence, behind those of the base, whose output has this
/// shape.
pub fn shortened<'t>(op: &Op, output: &Output, base: &[usize], found: &'t Tensor) -> Cow<'t, Tensor> {
    let of_keys = (1..op.row_axes).contains(&output.rows);
    let of_rows = op.padded().is_some_and(|(_, axis)| output.axes.get(output.rows) == Some(&axis));
    let keys = base.get(output.rows).filter(|_| of_keys || of_rows);
    match keys.filter(|keys| found.shape().get(output.rows).is_some_and(|extent| extent > keys)) {
        Some(&keys) => Cow::Owned(found.range(output.rows, 0, keys)),
        None => Cow::Borrowed(found),
    }
}

/// The entries of an axis that rows own.
struct Owned {
    /// The axis, and the input that names its entries.
    axis: &'static str,
    names: &'static str,
    /// How many entries there are.
    extent: usize,
    /// Those that are named, in the order of the rows.
    places: Vec<usize>,
}

impl Owned {
    fn of(case: &Case) -> Option<Owned> {
        let op = spec::of(&case.op, &case.params)?.op;
        let (names, axis) = op.owned()?;
        let beside = op.inputs.iter().find(|input| input.axes[0] == axis)?;
        let extent = case.inputs[beside.name].shape()[0];
        let places = case.inputs[names.name].as_i32()?.iter().map(|&place| place as usize).collect();
        Some(Owned { axis, names: names.name, extent, places })
    }

    /// The entries that nobody names.
    fn others(&self) -> Vec<usize> {
        let named: std::collections::BTreeSet<&usize> = self.places.iter().collect();
        (0..self.extent).filter(|place| !named.contains(place)).collect()
    }
}

/// How the case of a variant is asked.
#[derive(Clone, Debug)]
pub enum Way {
    /// As any other.
    Plain,
    /// Right after these, by the same process.
    After(Vec<Case>),
    /// By a process that was started for it.
    Fresh,
    /// Over and over, by a process that was started for it and whose memory is watched.
    Soak,
    /// As the first of several parts, whose answers are joined.
    Parts(Vec<Case>, Join),
}

/// How the answers to the parts of a case become the answer to the whole.
#[derive(Clone, Debug)]
pub enum Join {
    /// Side by side along this axis of every output.
    Along(usize),
    /// Each goes on with this output of the one before as its `carry`, so that the last one has the whole; of other outputs,
    /// rows one behind the other.
    Carry(&'static str),
    /// Each goes on with output `next` of the one before as its input `state`, and the last one has that of the whole; of other
    /// outputs, side by side along this axis.
    Steps {
        /// The axis of the rows that a step has some of.
        axis: usize,
        /// The input.
        state: &'static str,
        /// The output.
        next: &'static str,
    },
    /// The f32 partial sums of a matrix product, added as the tree of its segments; then the bias, then rounded.
    Tree {
        /// The output that they are.
        output: &'static str,
        /// The bias of the whole.
        bias: Option<Tensor>,
        /// The dtype of the whole.
        out: DType,
    },
}

impl Way {
    /// The cases that are asked beside the variant's own.
    pub fn others(&self) -> &[Case] {
        match self {
            Way::Plain | Way::Fresh | Way::Soak => &[],
            Way::After(cases) | Way::Parts(cases, _) => cases,
        }
    }
}

impl Join {
    /// The part `case` as it is asked after a part with the outputs `before`.
    pub fn after<'a>(&self, before: &BTreeMap<String, Tensor>, case: &'a Case) -> Cow<'a, Case> {
        match self {
            Join::Carry(name) => {
                let mut case = case.clone();
                case.inputs.extend(before.get(*name).map(|sum| ("carry".to_string(), sum.clone())));
                Cow::Owned(case)
            }
            Join::Steps { state, next, .. } => {
                let mut case = case.clone();
                case.inputs.extend(before.get(*next).map(|next| (state.to_string(), next.clone())));
                Cow::Owned(case)
            }
            _ => Cow::Borrowed(case),
        }
    }

    /// The outputs of the whole; `parts` are in order, and there is at least one.
    ///
    /// # Errors
    /// When the outputs do not fit together.
    pub fn whole(&self, parts: Vec<BTreeMap<String, Tensor>>) -> Result<BTreeMap<String, Tensor>, String> {
        match self {
            Join::Along(_) | Join::Carry(_) | Join::Steps { .. } => {
                let (axis, carried) = match self {
                    Join::Along(axis) => (axis, ""),
                    Join::Carry(name) => (&0, *name),
                    Join::Steps { axis, next, .. } => (axis, *next),
                    Join::Tree { .. } => unreachable!("it is another arm"),
                };
                let mut parts = parts.into_iter();
                let mut whole = parts.next().ok_or("there are no parts")?;
                for part in parts {
                    for (name, tensor) in &mut whole {
                        let next = part.get(name).ok_or_else(|| format!("a part lacks `{name}`"))?;
                        if name == carried {
                            *tensor = next.clone();
                            continue;
                        }
                        let others = |t: &Tensor| {
                            let mut shape = t.shape().to_vec();
                            if *axis < shape.len() {
                                shape[*axis] = 0;
                            }
                            (t.dtype(), shape)
                        };
                        if *axis >= tensor.shape().len() || others(tensor) != others(next) {
                            return Err(format!(
                                "`{name}`: parts of shape {:?} and {:?}",
                                tensor.shape(),
                                next.shape()
                            ));
                        }
                        *tensor = tensor.append(*axis, next);
                    }
                }
                Ok(whole)
            }
            Join::Tree { output, bias, out } => {
                let mut sums: Vec<(Vec<usize>, Vec<f32>)> = Vec::new();
                for part in &parts {
                    let y = part.get(*output).ok_or_else(|| format!("a part lacks `{output}`"))?;
                    if y.dtype() != DType::Fp32 || sums.first().is_some_and(|(shape, _)| shape != y.shape()) {
                        return Err(format!(
                            "a partial sum is {} {:?}; it must be fp32, all of one shape",
                            y.dtype(),
                            y.shape()
                        ));
                    }
                    sums.push((y.shape().to_vec(), (0..y.len()).map(|i| y.value(i) as f32).collect()));
                }
                while sums.len() > 1 {
                    let pairs = sums.chunks(2).map(|two| match two {
                        [(shape, a), (_, b)] => (shape.clone(), a.iter().zip(b).map(|(a, b)| a + b).collect()),
                        _ => two[0].clone(),
                    });
                    sums = pairs.collect();
                }
                let (shape, sum) = sums.pop().ok_or("there are no parts")?;
                let columns = shape.last().copied().unwrap_or(1);
                let whole = sum.iter().enumerate().map(|(i, &v)| match bias {
                    Some(bias) => f64::from(v + bias.value(i % columns) as f32),
                    None => f64::from(v),
                });
                Ok(BTreeMap::from([(output.to_string(), round::tensor(*out, &shape, &whole.collect::<Vec<_>>()))]))
            }
        }
    }
}

/// Something that must not be seen in the bits.
pub struct Axis {
    /// Its name in rows and records.
    pub name: &'static str,
    /// Why it must not be seen.
    pub why: &'static str,
    /// The settings for a case that passes [`Spec::validate`]; none where the case has nothing to vary.
    pub variants: for<'a> fn(&'a Case, &Machine) -> Vec<Variant<'a>>,
    applies: Applies,
}

#[derive(Clone, Copy, PartialEq)]
enum Applies {
    Ops,
    Rows,
    Padding,
    Tokens,
    MicroBatch,
    Attention,
    Packing,
    Ranks,
    Steps,
    Chains,
    Gradients,
    Both,
}

/// Attention whose keys and values stand in pages: `k[P,Z,Hkv,D]`, `v[P,Z,Hkv,E]`, `page_table[B,C]`; the rest as in
/// `attention`.
pub const PAGED: &str = "paged_attention";

/// Attention over packed sequences: `q[T,Hq,D]`, `k[S,Hkv,D]`, `v[S,Hkv,E]`, `q_pos[T]`, `q_start[B+1]`, `k_start[B+1]`.
pub const PACKED: &str = "packed_attention";

/// All axes, in the order tables print them.
pub fn all() -> &'static [Axis] {
    &[
        Axis {
            name: "batch",
            why: "How many other rows are computed at the same time says nothing about a row.",
            variants: batch,
            applies: Applies::Rows,
        },
        Axis {
            name: "position",
            why: "A row means the same wherever it stands among the others.",
            variants: position,
            applies: Applies::Rows,
        },
        Axis {
            name: "neighbours",
            why: "What the other rows hold, NaN and infinity included, does not leak.",
            variants: neighbours,
            applies: Applies::Rows,
        },
        Axis {
            name: "padding",
            why: "Rows and keys that only fill up a shape are never read into a result.",
            variants: padding,
            applies: Applies::Padding,
        },
        Axis {
            name: "micro_batch",
            why: "A sum over tokens is one sum, however few of them a call brings.",
            variants: micro_batch,
            applies: Applies::MicroBatch,
        },
        Axis {
            name: "accumulation",
            why: "In how many steps a sum over tokens is made, and that a step brought none, is bookkeeping.",
            variants: accumulation,
            applies: Applies::Tokens,
        },
        Axis {
            name: "pages",
            why: "In which pages keys and values stand, how large these are and what else they hold, is bookkeeping.",
            variants: pages,
            applies: Applies::Attention,
        },
        Axis {
            name: "packing",
            why: "Sequences one behind the other and sequences padded to one length are the same sequences.",
            variants: packing,
            applies: Applies::Packing,
        },
        Axis {
            name: "prefix",
            why: "Keys that two sequences share are the keys that each would have had for itself.",
            variants: prefix,
            applies: Applies::Attention,
        },
        Axis {
            name: "ranks",
            why: "How many machines hold a part of the weights is not part of the model.",
            variants: ranks,
            applies: Applies::Ranks,
        },
        Axis {
            name: "layout",
            why: "A tensor is its elements, not where they lie in memory.",
            variants: layout,
            applies: Applies::Ops,
        },
        Axis {
            name: "threads",
            why: "The order of a sum belongs to the op, not to the scheduler.",
            variants: threads,
            applies: Applies::Both,
        },
        Axis {
            name: "isa",
            why: "The order of a sum belongs to the op, not to the width of a vector.",
            variants: isa,
            applies: Applies::Both,
        },
        Axis {
            name: "budget",
            why: "How much workspace there is decides tiles, and tiles are not part of an op.",
            variants: budget,
            applies: Applies::Both,
        },
        Axis {
            name: "repeat",
            why: "The same question has the same answer.",
            variants: repeat,
            applies: Applies::Both,
        },
        Axis {
            name: "order",
            why: "What was asked before leaves nothing behind.",
            variants: order,
            applies: Applies::Ops,
        },
        Axis {
            name: "restart",
            why: "An answer does not depend on which process gives it.",
            variants: restart,
            applies: Applies::Ops,
        },
        Axis {
            name: "soak",
            why: "Asked a thousand times, a program answers the same and holds no more memory.",
            variants: soak,
            applies: Applies::Ops,
        },
        Axis {
            name: "schedule",
            why: "Prefill, decode, chunks and guesses are one computation cut at different places, whatever the pages.",
            variants: schedule,
            applies: Applies::Steps,
        },
        Axis {
            name: "grouping",
            why: "Sequences that share a batch know nothing of each other.",
            variants: grouping,
            applies: Applies::Chains,
        },
        Axis {
            name: "recompute",
            why: "Whether a layer's values are kept for its reverse or made again is a matter of memory.",
            variants: recompute,
            applies: Applies::Gradients,
        },
        Axis {
            name: "groups",
            why: "How many machines share the groups of a batch is not part of the batch.",
            variants: groups,
            applies: Applies::Gradients,
        },
    ]
}

/// The axis called `name`.
pub fn find(name: &str) -> Option<&'static Axis> {
    all().iter().find(|axis| axis.name == name)
}

impl Axis {
    /// Whether the axis means anything for an op.
    pub fn applies(&self, spec: &Spec) -> bool {
        let attention = spec.class == Class::Attention && spec.gradient_of.is_none();
        let chain = spec.class == Class::Chain;
        let gradients = spec.is_model_gradient();
        match self.applies {
            Applies::Both => true,
            Applies::Attention => attention,
            Applies::Packing => attention || gradients,
            Applies::Ranks => Product::of(spec.name).is_some() || spec.class == Class::Attention,
            Applies::Steps => attention || chain && !gradients || spec.stepped().is_some(),
            Applies::Ops => !chain,
            Applies::Rows => !chain && spec.has_rows(),
            Applies::Padding => gradients || !chain && (spec.has_rows() || spec.input("mask").is_some()),
            Applies::Tokens => spec.carried().is_some(),
            Applies::MicroBatch => gradients || spec.carried().is_some(),
            Applies::Chains => chain && !gradients,
            Applies::Gradients => gradients,
        }
    }
}

/// What is put where nobody may look.
#[derive(Clone, Copy)]
enum Garbage {
    Other,
    Nan,
    Inf,
    Huge,
}

const GARBAGE: [(Garbage, &str); 4] =
    [(Garbage::Other, "other"), (Garbage::Nan, "nan"), (Garbage::Inf, "inf"), (Garbage::Huge, "huge")];

/// A case with the extents that its rows have.
#[derive(Clone, Copy)]
struct Base<'a> {
    case: &'a Case,
    spec: &'static Spec,
    /// Entries of the first row axis.
    entries: usize,
    /// Rows in each entry: 1, or the extent of the second row axis.
    inner: usize,
}

impl<'a> Base<'a> {
    fn new(case: &'a Case) -> Base<'a> {
        let spec = spec::of(&case.op, &case.params).expect("the case is checked");
        let input = spec.inputs.iter().find(|input| input.rows == spec.row_axes).expect("an input has all row axes");
        let shape = case.inputs[input.name].shape();
        Base { case, spec, entries: shape[0], inner: if spec.row_axes == 2 { shape[1] } else { 1 } }
    }

    /// How many entries the row axis number `axis` has.
    fn extent(&self, axis: usize) -> usize {
        if axis == 0 { self.entries } else { self.inner }
    }

    /// The case with every input that has row axis `axis` replaced. What rows own goes with them: it is replaced as if
    /// it stood in its row, and then stands from the last place to the second, the first being nobody's and NaN.
    fn replace(&self, axis: usize, new: impl Fn(&str, &Tensor) -> Tensor) -> Case {
        let owned = Owned::of(self.case);
        let inputs = self.case.inputs.iter().map(|(name, tensor)| {
            let input = self.spec.inputs.iter().find(|input| input.name == name).expect("the case is checked");
            let tensor = match &owned {
                Some(owned) if owned.names == name => {
                    let kept = new(name, tensor);
                    Tensor::i32(kept.shape(), (1..=kept.len() as i32).rev().collect())
                }
                Some(owned) if owned.axis == input.axes[0] => {
                    let width = tensor.len() / owned.extent;
                    let each = owned.places.len() / self.entries;
                    let places: Vec<Option<usize>> = owned.places.iter().map(|&place| Some(place)).collect();
                    let made = new(name, &tensor.gather(width, &places, &[self.entries, each, width]));
                    let count = made.len() / width;
                    let turned: Vec<Option<usize>> = std::iter::once(None).chain((0..count).rev().map(Some)).collect();
                    made.gather(width, &turned, &[&[count + 1], &tensor.shape()[1..]].concat())
                }
                _ if input.rows > axis => new(name, tensor),
                _ => tensor.clone(),
            };
            (name.clone(), tensor)
        });
        let Case { name, op, out, params, config, .. } = self.case;
        Case {
            name: name.clone(),
            op: op.clone(),
            out: *out,
            params: params.clone(),
            inputs: inputs.collect(),
            config: config.clone(),
        }
    }

    /// Row pairs when entry `b` of row axis `axis` in the base stands at `v` in the variant, which has `extent` there.
    fn pairs(
        &self,
        axis: usize,
        places: impl IntoIterator<Item = (usize, usize)>,
        extent: usize,
    ) -> Vec<(usize, usize)> {
        let mut rows = Vec::new();
        for (b, v) in places {
            if axis == 0 {
                rows.extend((0..self.inner).map(|t| (b * self.inner + t, v * self.inner + t)));
            } else {
                rows.extend((0..self.entries).map(|entry| (entry * self.inner + b, entry * extent + v)));
            }
        }
        rows
    }

    /// The entries `picks` of row axis `axis`, in that order.
    fn pick(self, setting: String, axis: usize, picks: &[usize]) -> Variant<'a> {
        let rows = self.pairs(axis, picks.iter().enumerate().map(|(v, &b)| (b, v)), picks.len());
        let picks = picks.to_vec();
        Variant { held: axis + 1, ..Variant::plain(setting, rows, move || self.picked(axis, &picks)) }
    }

    fn picked(&self, axis: usize, picks: &[usize]) -> Case {
        self.replace(axis, |_, tensor| tensor.select(axis, picks))
    }

    /// `left` entries of garbage before and `right` behind those of row axis `axis`; where there can be a mask, none of them
    /// are tokens.
    fn surround(self, setting: String, axis: usize, [left, right]: [usize; 2], garbage: Garbage) -> Variant<'a> {
        let extent = self.extent(axis);
        let rows = self.pairs(axis, (0..extent).map(|b| (b, left + b)), left + extent + right);
        let held = if self.spec.input("mask").is_some() { 0 } else { axis + 1 };
        Variant { held, ..Variant::plain(setting, rows, move || self.surrounded(axis, [left, right], garbage)) }
    }

    fn surrounded(&self, axis: usize, [left, right]: [usize; 2], garbage: Garbage) -> Case {
        let extent = self.extent(axis);
        let wider = |name: &str, tensor: &Tensor| {
            let filler = |count: usize, side: &str| {
                let picks: Vec<usize> = (0..count).map(|i| i % extent).collect();
                let rows = tensor.select(axis, &picks);
                let none = || Tensor::i32(rows.shape(), vec![0; rows.len()]);
                if name == "mask" { none() } else { spoil(&rows, garbage, &format!("{name}/{side}")) }
            };
            let before = if left > 0 { filler(left, "left").append(axis, tensor) } else { tensor.clone() };
            if right > 0 { before.append(axis, &filler(right, "right")) } else { before }
        };
        let mut case = self.replace(axis, wider);
        if self.spec.input("mask").is_some() && !self.case.inputs.contains_key("mask") {
            case.inputs.insert("mask".into(), wider("mask", &self.mask("mask")));
        }
        case
    }

    /// The mask called `name`, or one that counts every token where the case leaves it out.
    fn mask(&self, name: &str) -> Tensor {
        let given = self.case.inputs.get(name).cloned();
        given.unwrap_or_else(|| {
            let axes = self.spec.input(name).expect("the op has a mask").axes;
            let call = spec::check_form(self.case).expect("the case is checked");
            let shape: Vec<usize> = axes.iter().map(|axis| call.dim(axis)).collect();
            Tensor::i32(&shape, vec![1; shape.iter().product()])
        })
    }

    /// Everything but entry `probe` of row axis `axis` replaced by garbage.
    fn isolate(self, setting: String, axis: usize, probe: usize, garbage: Garbage) -> Variant<'a> {
        let extent = self.extent(axis);
        let rows = self.pairs(axis, [(probe, probe)], extent);
        let make = move || {
            self.replace(axis, |name, tensor| {
                let spoilt = spoil(tensor, garbage, name).append(axis, tensor);
                let picks: Vec<usize> = (0..extent).map(|i| if i == probe { extent + i } else { i }).collect();
                spoilt.select(axis, &picks)
            })
        };
        Variant { held: axis + 1, ..Variant::plain(setting, rows, make) }
    }

    /// The case cut before these entries of the first row axis: calls that go on with each other's sum, each with
    /// `padding` entries of NaN before its own.
    fn cut(self, setting: String, borders: &[usize], padding: usize) -> Variant<'a> {
        let part = |(from, to): (usize, usize)| {
            let mut part = self.replace(0, |_, tensor| tensor.range(0, from, to));
            if self.spec.attribute("token_offset").is_some() {
                let given = self.case.params.get("token_offset").map_or(0, |text| text.parse().expect("checked"));
                let mask = self.mask("mask");
                let (mask, each) = (mask.as_i32().expect("it is checked"), mask.len() / self.entries);
                let before = mask[..from * each].iter().filter(|&&token| token != 0).count();
                part.params.insert("token_offset".into(), (given + before).to_string());
            }
            if padding > 0 { Base::new(&part).surrounded(0, [padding, 0], Garbage::Nan) } else { part }
        };
        let starts = [0].into_iter().chain(borders.iter().copied());
        let ends = borders.iter().copied().chain([self.entries]);
        let mut parts = starts.zip(ends).map(part);
        let first = parts.next().expect("there is a first part");
        let way = Way::Parts(parts.collect(), Join::Carry(self.spec.carried().expect("it has a carry").name));
        Variant { way, ..Variant::plain(setting, self.same(), || first) }
    }

    /// Up to `limit` entries of row axis `axis`, evenly spread, the first and the last among them.
    fn probes(&self, axis: usize, limit: usize) -> Vec<usize> {
        let last = self.extent(axis) - 1;
        let mut probes: Vec<usize> = (0..limit).map(|i| i * last / (limit - 1)).collect();
        probes.dedup();
        probes
    }

    /// Every row where it was.
    fn same(&self) -> Vec<(usize, usize)> {
        (0..self.entries * self.inner).map(|row| (row, row)).collect()
    }

    /// Elements of the largest input that holds entries of the first row axis, per entry.
    fn width(&self) -> usize {
        let owned = self.spec.owned().map(|(_, axis)| axis);
        let inputs = self.spec.inputs.iter().filter(|input| input.rows > 0 || input.axes.first().copied() == owned);
        let held = inputs.filter_map(|input| self.case.inputs.get(input.name));
        // Logits that an op makes of a row by itself are no input, and take as long as a sixteenth of so many elements.
        let weights = self.case.inputs.get("w").filter(|_| self.spec.input("target").is_some());
        let made = weights.map(|w| w.shape()[0] / 16);
        held.map(|tensor| tensor.len() / self.entries).chain(made).max().unwrap_or(1).max(1)
    }

    /// The row axes with their prefix for settings.
    fn axes(&self) -> impl Iterator<Item = (usize, &'static str)> {
        [(0, ""), (1, "query-")].into_iter().take(self.spec.row_axes)
    }
}

/// A float tensor with other content; integers keep values that are valid, in another order where there is one.
fn spoil(tensor: &Tensor, garbage: Garbage, key: &str) -> Tensor {
    let dtype = tensor.dtype();
    if let Some(values) = tensor.as_i32() {
        let mut values = values.to_vec();
        values.reverse();
        return Tensor::i32(tensor.shape(), values);
    }
    let largest = round::from_bits(round::to_bits(f64::INFINITY, dtype) - 1, dtype);
    let (shape, ints, params) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let maker = Maker { key, dtype, fill: Fill::Normal, shape: &shape, ints: &ints, params: &params };
    // A few, over and over: drawing and rounding each element would take most of the time of a run.
    let values = match garbage {
        Garbage::Other => maker.values("garbage", Fill::Normal, tensor.len().min(4093), tensor.len()),
        Garbage::Nan => vec![f64::NAN],
        Garbage::Inf => vec![f64::INFINITY, f64::NEG_INFINITY],
        Garbage::Huge => vec![-largest, largest, largest],
    };
    round::tensor(dtype, &[values.len()], &values).repeated(tensor.shape())
}

/// Of more entries than this more settings are asked: one row may hide what another shows.
const MANY: usize = 32;

/// Elements of the largest input of rows that are copied for kernels of many.
const FAR: usize = 1 << 19;

/// Numbers below what is asked for, drawn for this case and seed.
fn draws(case: &Case, machine: &Machine) -> impl FnMut(usize) -> usize + use<> {
    let mut state = hash(&case.name) ^ machine.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below as u64) as usize
    }
}

fn batch<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let mut draw = draws(case, machine);
    let mut variants = Vec::new();
    // The rows over and over, every copy held to the first: 1 to 9 and all around powers of two.
    let most = (machine.room / base.width()).min(2049);
    let mut copied: Vec<usize> = (1..=9).chain(sizes(most + 1).into_iter().filter(|&size| size > 9)).collect();
    copied.retain(|size| (base.entries + 1..=most).contains(size));
    // Where orders of sums are told apart, as far as kernels of many rows begin, whatever the room.
    if Fill::Power.is_of(&case.name) && base.entries > 1 {
        let far = [66, 130 + draw(126), 257 + draw(128), 385 + draw(128)];
        // Sequences of an attention take longer than rows.
        let room = if base.spec.class == Class::Attention { FAR / 2 } else { FAR };
        let more = far.into_iter().filter(|&size| size > base.entries.max(most) && size * base.width() <= room);
        copied.extend(more);
    }
    for size in copied {
        let picks: Vec<usize> = (0..size).map(|i| i % base.entries).collect();
        variants.push(base.pick(format!("again:{size}"), 0, &picks));
    }
    for (axis, prefix) in base.axes() {
        let extent = base.extent(axis);
        if extent > 1 {
            let alone = base.probes(axis, if extent <= MANY { 8 } else { [66, 24][axis] }).into_iter();
            variants.extend(alone.map(|row| base.pick(format!("{prefix}alone:{row}"), axis, &[row])));
            // A prefix of one is row 0 alone.
            let drawn = if extent > MANY { between(extent, &mut draw) } else { Vec::new() };
            for size in sizes(extent).into_iter().filter(|&size| size > 1).chain(drawn) {
                let picks: Vec<usize> = (0..size).collect();
                variants.push(base.pick(format!("{prefix}first:{size}"), axis, &picks));
            }
        }
        // The next power of two above twice the batch, and one more; one of those on the way there.
        let power = (2 * extent).next_power_of_two();
        let most = (2 * extent).min(126);
        let drawn = (MANY < extent && extent < most).then(|| 1 + draw(most - extent));
        for more in [power + 1 - extent].into_iter().chain(drawn) {
            variants.push(base.surround(format!("{prefix}more:{more}"), axis, [0, more], Garbage::Other));
        }
    }
    variants
}

fn position<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let mut variants = Vec::new();
    for (axis, prefix) in base.axes() {
        let n = base.extent(axis);
        // Rotation by one, by about a third, reversal, and a stride that visits every entry once.
        let stride = (1..n).rev().map(|s| s.div_ceil(2)).find(|s| *s > 1 && gcd(*s, n) == 1).unwrap_or(1);
        // A draw of its own for every case and seed.
        let mut shuffled: Vec<usize> = (0..n).collect();
        let mut draw = draws(case, machine);
        for i in (1..n).rev() {
            shuffled.swap(i, draw(i + 1));
        }
        let orders: [(&str, Vec<usize>); 5] = [
            ("rotate1", (0..n).map(|i| (i + 1) % n).collect()),
            ("rotate3rd", (0..n).map(|i| (i + n.div_ceil(3)) % n).collect()),
            ("reverse", (0..n).rev().collect()),
            ("stride", (0..n).map(|i| i * stride % n).collect()),
            ("shuffle", shuffled),
        ];
        let mut seen: Vec<Vec<usize>> = vec![(0..n).collect()];
        for (name, order) in orders {
            if !seen.contains(&order) {
                let variant = base.pick(format!("{prefix}{name}"), axis, &order);
                // Rows may hold the same: then another order of them is no other question.
                let same = |(name, tensor): (&String, &Tensor)| tensor.same_bits(&variant.case().inputs[name]);
                if !case.inputs.iter().all(same) {
                    variants.push(variant);
                }
                seen.push(order);
            }
        }
    }
    variants
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn neighbours<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let mut variants = Vec::new();
    for (axis, prefix) in base.axes().filter(|(axis, _)| base.extent(*axis) > 1) {
        for probe in base.probes(axis, 3) {
            for (garbage, name) in kinds(&base) {
                variants.push(base.isolate(format!("{prefix}row{probe}:{name}"), axis, probe, garbage));
            }
        }
    }
    variants
}

/// Garbage of every kind where rows hold floats, other integers where they hold none.
fn kinds(base: &Base) -> Vec<(Garbage, &'static str)> {
    let floats = base.spec.inputs.iter().any(|input| input.rows > 0 && input.is_float());
    if floats { GARBAGE.to_vec() } else { GARBAGE[..1].to_vec() }
}

fn padding<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    if base.spec.class == Class::Chain {
        return ways(case, &["pad=left:3", "micro_batch=3,pad=right:2", "micro_batch=B,pad=left:1"]);
    }
    let mut variants = Vec::new();
    for (axis, prefix) in base.axes() {
        for [left, right] in [[1, 0], [0, 1], [3, 5], [0, 16]] {
            for (garbage, name) in kinds(&base) {
                let setting = format!("{prefix}left{left}-right{right}:{name}");
                variants.push(base.surround(setting, axis, [left, right], garbage));
            }
        }
    }
    if base.spec.class == Class::Attention {
        keys(base, &mut variants);
    }
    if let Some((says, axis)) = base.spec.padded() {
        behind(base, says, axis, &mut variants);
    }
    variants
}

/// Sequences of rows: more of them behind the last, which are padding, and other content in those that are padding already.
/// Of what a mask says is none, a gradient alone is not read: the row may be one that others look back at.
fn behind<'a>(base: Base<'a>, says: &'static Input, axis: &'static str, variants: &mut Vec<Variant<'a>>) {
    let has_rows = move |name: &str| base.spec.input(name).is_some_and(|input| input.axes.get(1) == Some(&axis));
    let rows = spec::check_form(base.case).expect("the case is checked").dim(axis);
    let (is_mask, name) = (says.holds == Holds::Mask, says.name);
    // Which rows are there.
    let there = if is_mask {
        base.mask(name)
    } else {
        base.case.inputs.get(name).cloned().unwrap_or_else(|| lengths(base, rows))
    };
    let numbers = there.as_i32().expect("it is checked").to_vec();
    let is_padding = move |row: usize| match is_mask {
        true => numbers[row] == 0,
        false => (row % rows) as i32 >= numbers[row / rows],
    };
    let padding: Vec<bool> = (0..base.entries * rows).map(is_padding).collect();
    for (garbage, garbage_name) in GARBAGE {
        for more in [1, 7] {
            let there = there.clone();
            let make = move || {
                let mut case = base.case.clone();
                case.inputs.insert(name.into(), there);
                for (input, tensor) in case.inputs.iter_mut().filter(|(input, _)| has_rows(input)) {
                    let picks: Vec<usize> = (0..more).map(|i| i % rows).collect();
                    let tail = tensor.select(1, &picks);
                    let tail = match input == name {
                        true => Tensor::i32(tail.shape(), vec![0; tail.len()]),
                        false => spoil(&tail, garbage, &format!("{input}/behind")),
                    };
                    *tensor = tensor.append(1, &tail);
                }
                case
            };
            variants.push(Variant::plain(format!("behind+{more}:{garbage_name}"), base.same(), make));
        }
        let is_unread = move |input: &str| {
            let role = base.spec.input(input).map(|input| input.role);
            input != name && has_rows(input) && (!is_mask || role == Some(Role::Gradient))
        };
        // A loss has no gradient among its inputs.
        if padding.contains(&true) && base.case.inputs.keys().any(|input| is_unread(input)) {
            let padding = padding.clone();
            let make = move || {
                let mut case = base.case.clone();
                for (input, tensor) in case.inputs.iter_mut().filter(|(input, _)| is_unread(input)) {
                    let count = padding.len();
                    let both = tensor.append(0, &spoil(tensor, garbage, &format!("{input}/padding")));
                    let picks: Vec<_> = (0..count).map(|i| Some(if padding[i] { count + i } else { i })).collect();
                    *tensor = both.gather(tensor.len() / count, &picks, tensor.shape());
                }
                case
            };
            variants.push(Variant::plain(format!("padding:{garbage_name}"), base.same(), make));
        }
    }
}

/// As many rows as there are, for each sequence.
fn lengths(base: Base, rows: usize) -> Tensor {
    Tensor::i32(&[base.entries], vec![rows as i32; base.entries])
}

/// As few tokens in each call as there are sequences in a micro-batch, without padding and with.
fn micro_batch<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    if base.spec.class == Class::Chain {
        return ways(case, &["micro_batch=1", "micro_batch=2", "micro_batch=3", "micro_batch=B"]);
    }
    let sizes = [1, 2, 3, 7, 64, 65].into_iter().filter(|&size| size < base.entries && base.entries <= 64 * size);
    let borders = |size: usize| (size..base.entries).step_by(size).collect::<Vec<usize>>();
    let mut variants: Vec<Variant> = sizes.clone().map(|size| base.cut(size.to_string(), &borders(size), 0)).collect();
    if !base.spec.has_rows() {
        variants.extend(sizes.map(|size| base.cut(format!("{size}:padded"), &borders(size), 2)));
    }
    variants
}

/// In two to eight steps, in steps of different sizes, and with a step that is padding alone.
fn accumulation<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let n = base.entries;
    let steps = [2, 3, 4, 8].into_iter().filter(|&steps| steps <= n);
    let even = |steps: usize| (1..steps).map(|step| step * n / steps).collect::<Vec<usize>>();
    let mut variants: Vec<Variant> = steps.map(|steps| base.cut(steps.to_string(), &even(steps), 0)).collect();
    if n > 3 {
        variants.push(base.cut("uneven".into(), &[1, n - 2], 0));
    }
    if n > 1 && !base.spec.has_rows() {
        let mut idle = base.cut("idle".into(), &[n / 2], 0);
        if let Way::Parts(others, _) = &mut idle.way {
            let mut padding = others[0].clone();
            let rows = base.spec.inputs.iter().filter(|input| input.rows > 0);
            for input in rows {
                if let Some(tensor) = padding.inputs.get_mut(input.name) {
                    *tensor = spoil(tensor, Garbage::Nan, input.name);
                }
            }
            let mask = base.mask("mask").range(0, n / 2, n);
            padding.inputs.insert("mask".into(), Tensor::i32(mask.shape(), vec![0; mask.len()]));
            others.insert(0, padding);
        }
        variants.push(idle);
    }
    variants
}

/// Attention: more keys behind the last, and other content in keys that no query sees.
fn keys<'a>(base: Base<'a>, variants: &mut Vec<Variant<'a>>) {
    let replaced = move |new: &dyn Fn(&str, &Tensor) -> Tensor| {
        let mut case = base.case.clone();
        for name in ["k", "v"] {
            case.inputs.insert(name.into(), new(name, &base.case.inputs[name]));
        }
        case
    };
    let keys = base.case.inputs["k"].shape()[1];
    let unseen = unseen_keys(base.case);
    for (garbage, name) in GARBAGE {
        for more in [1, 7, 256] {
            let make = move || {
                replaced(&|input, tensor| {
                    let picks: Vec<usize> = (0..more).map(|i| i % keys).collect();
                    let tail = spoil(&tensor.select(1, &picks), garbage, &format!("{input}/keys"));
                    tensor.append(1, &tail)
                })
            };
            variants.push(Variant::plain(format!("keys+{more}:{name}"), base.same(), make));
        }
        if unseen.iter().any(|&unseen| unseen) {
            let unseen = unseen.clone();
            let make = move || {
                replaced(&|input, tensor| {
                    // Rows of the tensor, and behind them as many of garbage.
                    let count = unseen.len();
                    let both = tensor.append(0, &spoil(tensor, garbage, &format!("{input}/unseen")));
                    let rows: Vec<_> = (0..count).map(|i| Some(if unseen[i] { count + i } else { i })).collect();
                    both.gather(tensor.len() / count, &rows, tensor.shape())
                })
            };
            variants.push(Variant::plain(format!("unseen-keys:{name}"), base.same(), make));
        }
    }
}

/// Attention over pages of several sizes, in reverse order, every other page holding NaN.
fn pages<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let (batch, keys) = (base.entries, case.inputs["k"].shape()[1]);
    let sizes = [1, 3, 16, 256].into_iter().filter(|&size| size < 2 * keys || size == 1);
    let make = move |size: usize| {
        let columns = keys.div_ceil(size);
        let used = batch * columns;
        let table: Vec<i32> = (0..used).map(|i| (2 * (used - 1 - i) + 1) as i32).collect();
        let mut rows = vec![None; (2 * used + 1) * size];
        for b in 0..batch {
            for j in 0..keys {
                rows[table[b * columns + j / size] as usize * size + j % size] = Some(b * keys + j);
            }
        }
        let mut case = case.clone();
        case.op = PAGED.into();
        for name in ["k", "v"] {
            let tensor = &base.case.inputs[name];
            let tail = &tensor.shape()[2..];
            let shape = [&[2 * used + 1, size], tail].concat();
            case.inputs.insert(name.into(), tensor.gather(tail.iter().product(), &rows, &shape));
        }
        case.inputs.insert("page_table".into(), Tensor::i32(&[batch, columns], table));
        case
    };
    sizes.map(|size| Variant::plain(format!("size{size}"), base.same(), move || make(size))).collect()
}

/// The gradients of a model made in other ways, each the parameters that it changes; `B` is the number of sequences.
fn ways<'a>(case: &'a Case, ways: &[&str]) -> Vec<Variant<'a>> {
    let sequences = Base::new(case).entries;
    let mut variants = Vec::new();
    for way in ways {
        let way = way.replace("=B", &format!("={sequences}"));
        let changes: Vec<(String, String)> = way
            .split(',')
            .map(|change| change.split_once('=').expect("name=value"))
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect();
        let spec = spec::of(&case.op, &case.params).expect("the case is checked");
        let differs = |(name, value): &(String, String)| {
            let default = spec.attribute(name).map(|attribute| attribute.default);
            match (case.params.get(name), default) {
                (Some(current), _) => current != value,
                (None, Some(samebits_schema::DefaultValue::Is(default))) => default != value,
                (None, _) => true,
            }
        };
        if changes.iter().any(differs) {
            variants.push(again(case, way, move |case| case.params.extend(changes)));
        }
    }
    variants
}

fn recompute<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    ways(case, &["recompute=1", "micro_batch=B,pad=right:1,recompute=1"])
}

/// Whole groups on 1, 2, 4 and 8 ranks.
fn groups<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let groups: usize = case.params.get("groups").map_or(1, |groups| groups.parse().expect("checked"));
    let ranks = [1, 2, 4, 8].into_iter().filter(|&ranks| groups > 1 && groups.is_multiple_of(ranks));
    let ranks: Vec<String> = ranks.map(|ranks| format!("micro_batch={},ranks={ranks}", 1 + ranks % 3)).collect();
    ways(case, &ranks.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Attention over packed sequences: queries and keys one behind the other, without padding.
fn packing<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    if base.spec.class == Class::Chain {
        return ways(case, &["micro_batch=3,pack=1", "micro_batch=B,pack=1,pad=left:2", "pack=1,pad=right:5"]);
    }
    let (batch, queries, keys) = (base.entries, base.inner, case.inputs["k"].shape()[1]);
    let kv_len = case.inputs["kv_len"].as_i32().expect("checked");
    // All sequences; and, so that their lengths differ, without the last query of the first.
    let ragged = (batch > 1 && queries > 1).then_some(("ragged", 1));
    let variant = |(setting, fewer): (&str, usize)| {
        let count = |b: usize| if b == 0 { queries - fewer } else { queries };
        let rows: Vec<usize> = (0..batch).flat_map(|b| (0..count(b)).map(move |t| b * queries + t)).collect();
        let key_rows = |b: usize| (0..kv_len[b] as usize).map(move |j| Some(b * keys + j));
        let key_rows: Vec<Option<usize>> = (0..batch).flat_map(key_rows).collect();
        let starts = |count: &dyn Fn(usize) -> usize| {
            let starts = (0..=batch).map(|b| (0..b).map(count).sum::<usize>() as i32);
            Tensor::i32(&[batch + 1], starts.collect())
        };
        let mut case = case.clone();
        case.op = PACKED.into();
        let query_rows: Vec<Option<usize>> = rows.iter().map(|&row| Some(row)).collect();
        for (name, rows) in [("q", &query_rows), ("k", &key_rows), ("v", &key_rows)] {
            let tensor = &base.case.inputs[name];
            let tail = &tensor.shape()[2..];
            let shape = [&[rows.len()], tail].concat();
            case.inputs.insert(name.into(), tensor.gather(tail.iter().product(), rows, &shape));
        }
        let positions = base.case.inputs["q_pos"].as_i32().expect("checked");
        let positions = rows.iter().map(|&row| positions[row]).collect();
        case.inputs.insert("q_pos".into(), Tensor::i32(&[rows.len()], positions));
        case.inputs.insert("q_start".into(), starts(&count));
        case.inputs.insert("k_start".into(), starts(&|b| kv_len[b] as usize));
        case.inputs.remove("kv_len");
        let rows = rows.into_iter().enumerate().map(|(packed, row)| (row, packed)).collect();
        Variant::plain(setting.into(), rows, || case)
    };
    [("all", 0)].into_iter().chain(ragged).map(variant).collect()
}

/// For every (batch entry, key) whether no query of the entry sees it.
fn unseen_keys(case: &Case) -> Vec<bool> {
    let ints = |name: &str| case.inputs[name].as_i32().expect("checked");
    let (q_pos, kv_len) = (ints("q_pos"), ints("kv_len"));
    let keys = case.inputs["k"].shape()[1];
    let queries = q_pos.len() / kv_len.len();
    let flag = |name: &str| case.params.get(name).is_some_and(|v| v == "1");
    let count = |name: &str| case.params.get(name).map_or(0, |v| v.parse().expect("checked"));
    let sees = Sees::of(count, flag("causal"));
    let mut unseen = Vec::with_capacity(keys * kv_len.len());
    for (entry, &len) in kv_len.iter().enumerate() {
        for j in 0..keys as i64 {
            let seen = |position: &i32| j < i64::from(len) && sees.key(j, i64::from(*position));
            unseen.push(!q_pos[entry * queries..][..queries].iter().any(seen));
        }
    }
    unseen
}

/// The case under another configuration or parameter; all rows stay where they are.
fn again<'a>(case: &'a Case, setting: String, change: impl FnOnce(&mut Case) + 'a) -> Variant<'a> {
    Variant::plain(setting, Base::new(case).same(), || {
        let mut case = case.clone();
        change(&mut case);
        case
    })
}

fn threads<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let counts = machine.threads.iter().filter(|&&n| case.config.threads != Some(n));
    counts.map(|&n| again(case, n.to_string(), move |case| case.config.threads = Some(n))).collect()
}

fn isa<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let isas = machine.isas.iter().filter(|isa| case.config.isa.as_ref() != Some(isa));
    let isas = isas.cloned();
    isas.map(|isa| again(case, isa.clone(), |case| case.config.isa = Some(isa))).collect()
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
}

fn budget<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let Some(smallest) = machine.smallest_budget else { return Vec::new() };
    // Another budget for every case, the same in every run.
    let random = smallest + ((hash(&case.name) ^ machine.seed) % (8 * smallest as u64 + (64 << 10))) as usize;
    let settings = [
        ("smallest", smallest),
        ("tight", smallest + smallest / 4 + 64),
        ("random", random),
        ("loose", 16 * smallest + (1 << 20)),
    ];
    let name = |kind: &str, bytes: usize| format!("{kind}:{bytes}");
    settings.map(|(kind, bytes)| again(case, name(kind, bytes), move |case| case.config.budget = Some(bytes))).into()
}

fn repeat<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    vec![again(case, "again".into(), |_| {})]
}

/// What was asked before may have left something behind: a buffer of other numbers, a larger one, a smaller one.
fn order<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let first = base.picked(0, &[0]);
    let (garbage, _) = *kinds(&base).last().expect("there is a kind");
    // Four times as many rows stay a power of two, which `fold` wants.
    let around = if base.spec.has_rows() { [1, 2 * base.entries + 7] } else { [base.entries, 2 * base.entries] };
    let more = base.surrounded(0, around, Garbage::Other);
    let spoilt = base.replace(0, |name, tensor| spoil(tensor, garbage, name));
    let after = |setting: &str, before| Variant { way: Way::After(before), ..again(case, setting.into(), |_| {}) };
    vec![after("after:one-row", vec![first.clone()]), after("after:other-larger-one", vec![spoilt, more, first])]
}

fn restart<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    vec![Variant { way: Way::Fresh, ..again(case, "new-process".into(), |_| {}) }]
}

fn soak<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    vec![Variant { way: Way::Soak, ..again(case, "over-and-over".into(), |_| {}) }]
}

fn layout<'a>(case: &'a Case, machine: &Machine) -> Vec<Variant<'a>> {
    let layouts = machine.layouts.iter().cloned();
    layouts.map(|layout| again(case, layout.clone(), |case| case.config.layout = Some(layout))).collect()
}

/// Several sequences whose page tables name the same pages for the first half of their keys.
fn prefix<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let (batch, keys) = (base.entries, case.inputs["k"].shape()[1]);
    let sizes = [1, 4, 16].into_iter().filter(|&size| keys >= 2 * size);
    let make = move |size: usize| {
        let columns = keys.div_ceil(size);
        // Whole pages of the first half are shared; behind them every sequence has its own.
        let shared = keys / size / 2;
        let own = columns - shared;
        let (mut table, mut rows) = (Vec::new(), Vec::new());
        for copy in 0..2 {
            for b in 0..batch {
                let start = b * columns;
                let behind = batch * columns + b * own;
                for column in 0..columns {
                    let page = if copy == 0 || column < shared { start + column } else { behind + column - shared };
                    table.push(page as i32);
                }
            }
        }
        let pages = batch * (columns + own);
        rows.resize(pages * size, None);
        for (place, &page) in table.iter().enumerate() {
            let (b, column) = (place / columns % batch, place % columns);
            for i in (0..size).filter(|i| column * size + i < keys) {
                rows[page as usize * size + i] = Some(b * keys + column * size + i);
            }
        }
        let twice: Vec<usize> = (0..2 * batch).map(|b| b % batch).collect();
        let mut case = base.picked(0, &twice);
        case.op = PAGED.into();
        for name in ["k", "v"] {
            let tensor = &base.case.inputs[name];
            let tail = &tensor.shape()[2..];
            let shape = [&[pages, size], tail].concat();
            case.inputs.insert(name.into(), tensor.gather(tail.iter().product(), &rows, &shape));
        }
        case.inputs.insert("page_table".into(), Tensor::i32(&[2 * batch, columns], table));
        case
    };
    let rows = base.pairs(0, (0..2 * batch).map(|v| (v % batch, v)), 2 * batch);
    sizes.map(|size| Variant::plain(format!("hit:size{size}"), rows.clone(), move || make(size))).collect()
}

/// A matrix product that ranks share: its names for what is cut, and the axes of w for its outputs and for its sum. The
/// sum is the second axis of the other operand.
struct Product {
    x: &'static str,
    outputs: usize,
    terms: usize,
    offset: &'static str,
    total: &'static str,
    output: &'static str,
}

impl Product {
    fn of(op: &str) -> Option<Product> {
        match op {
            "gemm" => Some(Product { x: "x", outputs: 0, terms: 1, offset: "k_offset", total: "k_total", output: "y" }),
            "gemm_dx" => {
                Some(Product { x: "dy", outputs: 1, terms: 0, offset: "n_offset", total: "n_total", output: "dx" })
            }
            _ => None,
        }
    }
}

/// The shares of 2, 4 and 8 ranks: outputs of a product, terms of its sums, heads.
fn ranks<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let base = Base::new(case);
    let mut variants = Vec::new();
    let mut split = |setting: String, parts: Vec<Case>, join: Join| {
        let mut parts = parts.into_iter();
        let case = parts.next().expect("there is a rank");
        let way = Way::Parts(parts.collect(), join);
        variants.push(Variant { way, ..Variant::plain(setting, base.same(), || case) });
    };
    let cut = |count: usize, ranks: usize| (0..ranks).map(move |r| (r * count / ranks, (r + 1) * count / ranks));
    if let Some(Product { x, outputs, terms, offset, total, output }) = Product::of(&case.op) {
        let (n, k) = (case.inputs["w"].shape()[outputs], case.inputs["w"].shape()[terms]);
        let partial = case.params.contains_key(total);
        for ranks in [2, 4, 8] {
            if n >= ranks {
                let part = |(from, to)| {
                    let mut part = case.clone();
                    part.inputs.insert("w".into(), case.inputs["w"].range(outputs, from, to));
                    if let Some(bias) = case.inputs.get("bias") {
                        part.inputs.insert("bias".into(), bias.range(0, from, to));
                    }
                    part
                };
                split(format!("columns:{ranks}"), cut(n, ranks).map(part).collect(), Join::Along(1));
            }
            if k % 128 == 0 && !partial {
                let part = |(from, to): (usize, usize)| {
                    let mut part = case.clone();
                    for (name, axis) in [(x, 1), ("w", terms)] {
                        part.inputs.insert(name.into(), case.inputs[name].range(axis, from, to));
                    }
                    part.inputs.remove("bias");
                    part.out = DType::Fp32;
                    part.params.insert(offset.into(), from.to_string());
                    part.params.insert(total.into(), k.to_string());
                    part
                };
                let join = Join::Tree { output, bias: case.inputs.get("bias").cloned(), out: case.out };
                split(format!("sum:{ranks}"), cut(k, ranks).map(part).collect(), join);
            }
        }
    } else {
        let (heads, kv_heads) = (case.inputs["q"].shape()[2], case.inputs["k"].shape()[2]);
        for ranks in [2, 4, 8].into_iter().filter(|ranks| kv_heads % ranks == 0) {
            let part = |rank: usize| {
                let mut part = case.clone();
                let of = |axis: &str| match axis {
                    "Hq" => Some(heads),
                    "Hkv" => Some(kv_heads),
                    _ => None,
                };
                for input in base.spec.inputs {
                    let by_head = input.axes.iter().enumerate().find_map(|(at, axis)| Some((at, of(axis)? / ranks)));
                    if let (Some((at, share)), Some(whole)) = (by_head, case.inputs.get(input.name)) {
                        part.inputs.insert(input.name.into(), whole.range(at, rank * share, (rank + 1) * share));
                    }
                }
                part
            };
            split(format!("heads:{ranks}"), (0..ranks).map(part).collect(), Join::Along(2));
        }
    }
    variants
}

/// Attention: queries one at a time or a few at a time; with a causal mask, over the keys that are there by then.
fn query_chunks(case: &Case) -> Vec<Variant<'_>> {
    let base = Base::new(case);
    let (queries, keys) = (base.inner, case.inputs["k"].shape()[1]);
    let ints = |name: &str| case.inputs[name].as_i32().expect("checked").to_vec();
    let (q_pos, kv_len) = (ints("q_pos"), ints("kv_len"));
    let causal = case.params.get("causal").is_some_and(|v| v == "1");
    let chunks = [1, 2, 3, 7, 16].into_iter().filter(|&n| n < queries);
    chunks
        .map(|chunk| {
            let part = |from: usize| {
                let to = (from + chunk).min(queries);
                let mut part = case.clone();
                for name in ["q", "q_pos"] {
                    part.inputs.insert(name.into(), case.inputs[name].range(1, from, to));
                }
                if causal {
                    let reached = |b: usize| {
                        let last = q_pos[b * queries + from..b * queries + to].iter().copied().max().unwrap_or(0);
                        kv_len[b].min(last.saturating_add(1)).max(0)
                    };
                    let reached: Vec<i32> = (0..base.entries).map(reached).collect();
                    let there = (reached.iter().copied().max().unwrap_or(0) as usize).clamp(1, keys);
                    for name in ["k", "v"] {
                        part.inputs.insert(name.into(), case.inputs[name].range(1, 0, there));
                    }
                    part.inputs.insert("kv_len".into(), Tensor::i32(&[base.entries], reached));
                }
                part
            };
            let mut parts = (0..queries).step_by(chunk).map(part);
            let case = parts.next().expect("a case has a query");
            let setting = if chunk == 1 { "decode".to_string() } else { format!("chunk:{chunk}") };
            let way = Way::Parts(parts.collect(), Join::Along(1));
            Variant { way, ..Variant::plain(setting, base.same(), || case) }
        })
        .collect()
}

/// Sequences of rows with a state: a few rows at a time, the state that a part ends with carried to the next.
fn row_chunks(case: &Case) -> Vec<Variant<'_>> {
    let base = Base::new(case);
    let (state, next) = base.spec.stepped().expect("it has a state");
    let (says, axis) = base.spec.padded().expect("it has lengths");
    let rows = spec::check_form(case).expect("the case is checked").dim(axis);
    let given = case.inputs.get(says.name).and_then(Tensor::as_i32);
    let chunks = [1, 2, 3, 7, 16].into_iter().filter(|&n| n < rows);
    chunks
        .map(|chunk| {
            let part = |from: usize| {
                let to = (from + chunk).min(rows);
                let mut part = case.clone();
                for input in base.spec.inputs.iter().filter(|input| input.axes.get(1) == Some(&axis)) {
                    if let Some(tensor) = case.inputs.get(input.name) {
                        part.inputs.insert(input.name.into(), tensor.range(1, from, to));
                    }
                }
                if let Some(given) = given {
                    let left = given.iter().map(|&len| (len - from as i32).clamp(0, (to - from) as i32)).collect();
                    part.inputs.insert(says.name.into(), Tensor::i32(&[base.entries], left));
                }
                part
            };
            let mut parts = (0..rows).step_by(chunk).map(part);
            let case = parts.next().expect("a case has a row");
            let setting = if chunk == 1 { "decode".to_string() } else { format!("chunk:{chunk}") };
            let join = Join::Steps { axis: 1, state: state.name, next: next.name };
            let way = Way::Parts(parts.collect(), join);
            Variant { way, ..Variant::plain(setting, base.same(), || case) }
        })
        .collect()
}

/// Schedules, each with another page size and order beside it.
fn schedule<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    if case.inputs.contains_key("q_pos") {
        return query_chunks(case);
    }
    if Base::new(case).spec.stepped().is_some() {
        return row_chunks(case);
    }
    let length = Base::new(case).inner;
    let current = case.params.get("schedule").map_or("prefill", String::as_str);
    let counted = |name: &'static str, counts: [usize; 4]| {
        // A chunk that holds everything is a prefill.
        counts.into_iter().filter(move |&n| n > 0 && n < length).map(move |n| format!("{name}:{n}"))
    };
    let all = ["prefill", "decode", "mixed"].into_iter().map(String::from);
    let all = all.chain(counted("chunk", [2, 3, 7, 16]));
    let all = all.chain(counted("speculative", [3, 5, 0, 0])).chain(counted("prefix", [1, 5, 8, 0]));
    let pages = [("64", "ascending"), ("1", "scattered"), ("3", "descending"), ("16", "scattered")];
    all.filter(|schedule| schedule != current)
        .zip(pages.into_iter().cycle())
        .map(|(schedule, (size, order))| {
            again(case, format!("{schedule}/{size}-{order}"), move |case| {
                case.params.insert("schedule".into(), schedule);
                case.params.insert("page_size".into(), size.into());
                case.params.insert("page_order".into(), order.into());
            })
        })
        .collect()
}

fn grouping<'a>(case: &'a Case, _: &Machine) -> Vec<Variant<'a>> {
    let alone = case.params.get("batch").is_some_and(|batch| batch == "alone");
    let other = if alone { "together" } else { "alone" };
    vec![again(case, other.into(), move |case| drop(case.params.insert("batch".into(), other.into())))]
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::table::{CaseSpec, Contract, Slice};
    use crate::tensor::DType;

    fn machine() -> Machine {
        let isas = vec!["scalar".into(), "avx2".into()];
        let layouts = LAYOUTS.map(String::from).to_vec();
        Machine {
            isas,
            threads: vec![1, 2, 5],
            smallest_budget: Some(4096),
            layouts,
            room: 1 << 12,
            ..Machine::default()
        }
    }

    fn same_question(a: &Case, b: &Case) -> bool {
        a.params == b.params
            && a.config == b.config
            && a.inputs.len() == b.inputs.len()
            && a.inputs.iter().all(|(name, tensor)| b.inputs.get(name).is_some_and(|other| tensor.same_bits(other)))
    }

    /// The quick cases, one of those that differ in their outputs' dtype alone: their inputs are the same.
    fn once_a_group(contract: &Contract) -> impl Iterator<Item = &CaseSpec> {
        let mut groups = std::collections::BTreeSet::new();
        contract.cases(Slice::Quick).filter(move |case| groups.insert(&case.group))
    }

    /// Every variant of every quick case: a valid case, pairs of rows that exist and hold the same inputs, and a
    /// question that is not the base's.
    pub(crate) fn variants_vary_and_select_rows() {
        let contract = Contract::load(None).unwrap();
        let mut count = BTreeMap::new();
        for case_spec in once_a_group(&contract).filter(|case| case.fill != Fill::Recorded) {
            let (case, spec) = (case_spec.build(), case_spec.spec());
            spec.validate(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            for axis in all().iter().filter(|axis| axis.applies(spec)) {
                let mut settings = std::collections::BTreeSet::new();
                for variant in (axis.variants)(&case, &machine()) {
                    let name = format!("{} {} {}", case.name, axis.name, variant.setting);
                    assert!(settings.insert(variant.setting.clone()), "{name}: twice");
                    // The forms of attention that only axes ask for have no specification of their own.
                    let own = variant.case().op == case.op;
                    if own {
                        spec.validate(variant.case()).unwrap_or_else(|e| panic!("{name}: {e}"));
                    }
                    assert!(!variant.rows.is_empty(), "{name}: no rows");
                    let whole = own && !matches!(variant.way, Way::Parts(..));
                    let held = if whole { spec.rows(variant.case()) } else { usize::MAX };
                    for other in variant.way.others() {
                        spec.validate(other).unwrap_or_else(|e| panic!("{name}: {e}"));
                    }
                    let rows = (spec.rows(&case), held);
                    assert!(variant.rows.iter().all(|(b, v)| *b < rows.0 && *v < rows.1), "{name}: rows {rows:?}");
                    let same = same_question(&case, variant.case());
                    let asked_alike = ["repeat", "order", "restart", "soak"].contains(&axis.name);
                    assert_eq!(same, asked_alike, "{name}: identical to its base");
                    *count.entry((spec.name, axis.name)).or_insert(0) += 1;
                }
            }
        }
        for spec in spec::all() {
            for axis in all().iter().filter(|axis| axis.applies(spec)) {
                assert!(count.contains_key(&(spec.name, axis.name)), "{} never varies {}", spec.name, axis.name);
            }
        }
    }

    /// Paired rows carry the same bits in every input that has all row axes, so the pairing follows the content.
    pub(crate) fn paired_rows_hold_the_same_inputs() {
        let contract = Contract::load(None).unwrap();
        for case_spec in once_a_group(&contract).filter(|case| case.fill != Fill::Recorded) {
            let (case, spec) = (case_spec.build(), case_spec.spec());
            for axis in all().iter().filter(|axis| axis.applies(spec)) {
                for variant in (axis.variants)(&case, &machine()) {
                    // Rows of padding are no part of what they stand behind.
                    let pads = ["behind+", "padding:"].iter().any(|pads| variant.setting.starts_with(pads));
                    if pads || matches!(variant.way, Way::Parts(..)) {
                        continue;
                    }
                    // What owned entries are called may change.
                    let names = spec.owned().map(|(names, _)| names.name);
                    let inputs = spec.inputs.iter().filter(|input| input.rows == spec.row_axes);
                    for input in inputs.filter(|input| names != Some(input.name)) {
                        let Some(a) = case.inputs.get(input.name) else { continue };
                        let (b, width) = (&variant.case().inputs[input.name], a.len() / spec.rows(&case));
                        for &(base, found) in &variant.rows {
                            let same = (0..width).all(|i| a.bits(base * width + i) == b.bits(found * width + i));
                            assert!(same, "{} {} {}: row {base} -> {found}", case.name, axis.name, variant.setting);
                        }
                    }
                }
            }
        }
    }

    /// Whether what is between the parts of a variant is rounded, or added in another order, as an oracle is not.
    fn rounds(spec: &Spec, variant: &Variant) -> bool {
        match variant.way {
            Way::Parts(_, Join::Tree { .. }) => true,
            Way::Parts(_, Join::Steps { .. }) => {
                ["ssd_scan", "selective_scan", "wkv7", "gated_delta_rule"].contains(&spec.name)
            }
            _ => false,
        }
    }

    /// The oracle itself holds every axis that varies inputs: what a row's value depends on is its own inputs.
    pub(crate) fn the_oracle_is_invariant() {
        let contract = Contract::load(None).unwrap();
        // Where a long sum is cut is a question to implementations.
        let asked = |case: &&CaseSpec| case.spec().class != Class::Chain && case.fill != Fill::Power;
        for case_spec in contract.cases(Slice::Quick).filter(asked).filter(|case| case.out == DType::Fp32) {
            let (case, spec) = (case_spec.build(), case_spec.spec());
            let base = spec.oracle(&case).unwrap();
            for axis in ["batch", "position", "neighbours", "padding", "schedule", "ranks"] {
                let axis = find(axis).unwrap();
                // Sums of f32 parts are rounded; only the parts that stand side by side are the oracle's own.
                let settings = if axis.applies(spec) { (axis.variants)(&case, &machine()) } else { Vec::new() };
                for variant in settings.into_iter().filter(|v| !rounds(spec, v)) {
                    let mut found = spec.oracle(variant.case()).unwrap();
                    if let Way::Parts(others, join) = &variant.way {
                        let mut parts: Vec<BTreeMap<String, Tensor>> = Vec::new();
                        for part in std::iter::once(variant.case()).chain(others) {
                            let part = parts.last().map_or(Cow::Borrowed(part), |before| join.after(before, part));
                            let references = spec.oracle(&part).unwrap();
                            let rounded = spec.outputs.iter().map(|output| {
                                (
                                    output.name.to_string(),
                                    references[output.name].rounded(spec.output_dtype(output, case.out)),
                                )
                            });
                            parts.push(rounded.collect());
                        }
                        let whole = join.whole(parts).unwrap();
                        for (name, tensor) in whole {
                            let reference = found.get_mut(&name).unwrap();
                            (reference.shape, reference.value) = (tensor.shape().to_vec(), tensor.to_f64());
                        }
                    }
                    let axis = axis.name;
                    for output in spec.outputs {
                        let dtype = spec.output_dtype(output, case.out);
                        let (want, have) = (base[output.name].rounded(dtype), found[output.name].rounded(dtype));
                        variant
                            .compare(spec, output, &case, &want, &have)
                            .unwrap_or_else(|e| panic!("{} {axis} {}: {}", case.name, variant.setting, e.message));
                    }
                }
            }
        }
    }
}
