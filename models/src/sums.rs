//! Gradients of parameters while tokens go by, and how groups of sequences are joined.
//!
//! A matrix is one chain over the tokens of a group, a vector 64 chains that are folded when the group ends. Both go on
//! from where the tokens before left them, so how tokens are cut into micro-batches is not seen. A parameter that no
//! token of a group reached is +0 there. Of a table only the rows are held that tokens looked up.

use crate::layers::linear::{ENDS, Source};
use crate::machine::{empty, no_room};
use crate::memory::grow;
use crate::trace::all_finite;
use crate::{Model, ModelError};
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The rows of a chain state.
const CHAINS: usize = samebits_ops::CHAINS;

/// What a sum is the gradient of: a parameter, or the rows of one that a product reads. A table that is read as one and
/// as a matrix has a sum for each.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Of {
    /// The parameter's name.
    name: String,
    /// The first of its rows.
    start: usize,
    /// Whether tokens looked it up.
    looked_up: bool,
    /// The number of the use, of weights that several blocks share, until the group ends.
    nth_use: usize,
}

impl Of {
    /// All of a parameter.
    pub fn whole(name: &str) -> Of {
        Of { name: name.into(), start: 0, looked_up: false, nth_use: 0 }
    }

    /// The same of one use.
    pub fn of_use(self, nth_use: usize) -> Of {
        Of { nth_use, ..self }
    }

    /// A parameter that tokens look up.
    pub fn table(name: &str) -> Of {
        Of { looked_up: true, ..Of::whole(name) }
    }

    /// The matrix of a product.
    pub fn matrix(source: &Source) -> Of {
        Of { start: source.start, ..Of::whole(&format!("{}{}", source.name, source.ends[0])) }
    }

    /// The bias of a product.
    pub fn bias(source: &Source) -> Of {
        Of { start: source.start, ..Of::whole(&format!("{}{}", source.name, source.ends[1])) }
    }
}

/// The sums of a group so far.
#[derive(Default)]
pub(crate) struct Sums {
    all: BTreeMap<Of, Sum>,
    /// Whether only matrices of adapters have gradients: those of the model are not summed.
    pub frozen: bool,
    /// A tensor that nobody reads any more, to be written over.
    spare: Option<Tensor>,
}

struct Sum {
    /// `[N,K]`, or `[64,N]` of a vector.
    state: Tensor,
    has: Has,
    /// Of a vector, how many tokens it has had.
    tokens: Option<usize>,
}

/// Which rows of its parameter a sum has.
#[derive(Clone)]
enum Has {
    All,
    Some(Source),
    /// Those of tokens that were looked up, and where each stands; the others are +0.
    LookedUp(BTreeMap<i32, usize>),
}

impl Sums {
    /// No sums yet; the first of the shape of `spare` takes its place.
    pub fn new(spare: Option<Tensor>) -> Sums {
        Sums { spare, ..Sums::default() }
    }

    /// A matrix of `shape`, to be gone on with in place: most of them are too large to be copied for some tokens.
    pub fn matrix(
        &mut self,
        cpu: &Cpu,
        of: Of,
        rows: Option<&Source>,
        shape: [usize; 2],
    ) -> Result<&mut [f32], ModelError> {
        let sum = self.entry(cpu, of, rows, shape, None)?;
        Ok(sum.state.as_slice_mut().expect("it is f32, and on the host"))
    }

    /// The rows of a table of `width` that tokens have looked up, these `tokens` among them, to be gone on with in place;
    /// and which of the rows is that of each.
    pub fn table(&mut self, of: Of, width: usize, tokens: &[i32]) -> Result<(&mut [f32], Vec<i32>), ModelError> {
        if !self.all.contains_key(&of) {
            let sum = Sum { state: nothing(width)?, has: Has::LookedUp(BTreeMap::new()), tokens: None };
            self.all.insert(of.clone(), sum);
        }
        let Sum { state, has: Has::LookedUp(rows), .. } = self.all.get_mut(&of).expect("it was just put there") else {
            panic!("it is a table");
        };
        let mut numbers = Vec::new();
        for &token in tokens {
            let next = rows.len();
            numbers.push(*rows.entry(token).or_insert(next) as i32);
        }
        let earlier = std::mem::replace(state, nothing(width)?);
        let mut data = earlier.into_vec::<f32>().expect("it is f32, and on the host");
        grow(&mut data, &[rows.len(), width])?;
        *state = Tensor::new(data, &[rows.len(), width])?;
        Ok((state.as_slice_mut().expect("it is f32, and on the host"), numbers))
    }

    /// Goes on with a vector of n elements by the rows that are tokens; `add` is also told how many came before.
    pub fn vector(
        &mut self,
        cpu: &Cpu,
        of: Of,
        rows: Option<&Source>,
        n: usize,
        mask: &[i32],
        add: impl FnOnce(TensorRef, usize, &mut Tensor) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        if self.frozen {
            return Ok(());
        }
        let sum = self.entry(cpu, of, rows, [CHAINS, n], Some(0))?;
        let before = sum.tokens.expect("it is a vector");
        let mut next = empty(cpu, DType::Fp32, &[CHAINS, n])?;
        add(sum.state.view(), before, &mut next)?;
        sum.state = next;
        sum.tokens = Some(before + mask.iter().filter(|&&m| m != 0).count());
        Ok(())
    }

    fn entry(
        &mut self,
        cpu: &Cpu,
        of: Of,
        rows: Option<&Source>,
        shape: [usize; 2],
        tokens: Option<usize>,
    ) -> Result<&mut Sum, ModelError> {
        if !self.all.contains_key(&of) {
            let state = match self.spare.take_if(|spare| spare.shape() == shape) {
                Some(mut spare) => {
                    spare.as_slice_mut::<f32>().expect("it is f32, and on the host").fill(0.0);
                    spare
                }
                None => zeros(cpu, &shape)?,
            };
            let sum = Sum { state, has: rows.cloned().map_or(Has::All, Has::Some), tokens };
            self.all.insert(of.clone(), sum);
        }
        Ok(self.all.get_mut(&of).expect("it was just put there"))
    }

    /// The end of the group: the sums of weights that several blocks share are added, one use after the other.
    pub fn end(self, cpu: &Cpu) -> Result<Totals, ModelError> {
        let mut totals: BTreeMap<Of, Total> = BTreeMap::new();
        for (of, Sum { state, has, tokens }) in self.all {
            let mut values = match tokens {
                None => state,
                Some(_) => {
                    let mut folded = empty(cpu, DType::Fp32, &state.shape()[1..])?;
                    let (none, y) = (Attributes::new(), vec![("y", folded.view_mut())]);
                    cpu.call("fold", none, &[("x", state.view())], y)?;
                    folded
                }
            };
            let of = of.of_use(0);
            if let Some(earlier) = totals.get(&of) {
                values = add(cpu, &earlier.values, &values)?;
            }
            totals.insert(of, Total { values, has });
        }
        Ok(Totals(totals))
    }
}

/// The sums of one group, or of several that have been joined.
pub(crate) struct Totals(BTreeMap<Of, Total>);

struct Total {
    values: Tensor,
    has: Has,
}

/// Joins groups, or what ranks hold of them, as a balanced tree: `(g0 + g1) + (g2 + g3)` and so on. There must be a
/// power of two of them. No more than one for each level is kept.
#[derive(Default)]
pub(crate) struct Tree(Vec<(u32, Totals)>);

impl Tree {
    /// The next in order.
    pub fn push(&mut self, cpu: &Cpu, totals: Totals) -> Result<(), ModelError> {
        let mut next = (0, totals);
        while let Some((level, earlier)) = self.0.pop_if(|(level, _)| *level == next.0) {
            next = (level + 1, earlier.join(cpu, next.1)?);
        }
        self.0.push(next);
        Ok(())
    }

    /// All of them joined.
    pub fn root(mut self) -> Totals {
        assert_eq!(self.0.len(), 1, "a power of two of them");
        self.0.pop().expect("there is one").1
    }
}

impl Totals {
    fn join(self, cpu: &Cpu, other: Totals) -> Result<Totals, ModelError> {
        let (mut joined, mut others) = (BTreeMap::new(), other.0);
        for (of, mut total) in self.0 {
            let mut other = others.remove(&of).map_or_else(|| total.nothing(cpu), Ok)?;
            if let (Has::LookedUp(a), Has::LookedUp(b)) = (&total.has, &other.has) {
                let tokens: BTreeSet<i32> = a.keys().chain(b.keys()).copied().collect();
                let rows: BTreeMap<i32, usize> = tokens.into_iter().zip(0..).collect();
                (total, other) = (total.spread(cpu, &rows)?, other.spread(cpu, &rows)?);
            }
            joined.insert(of, Total { values: add(cpu, &total.values, &other.values)?, has: total.has });
        }
        for (of, total) in others {
            let values = add(cpu, &total.nothing(cpu)?.values, &total.values)?;
            joined.insert(of, Total { values, has: total.has });
        }
        Ok(Totals(joined))
    }

    /// The parameter of a sum that is not finite.
    pub fn not_finite(&self) -> Option<&str> {
        let is_not = |total: &Total| !all_finite(total.values.as_slice::<f32>().expect("it is f32, and on the host"));
        self.0.iter().find(|(_, total)| is_not(total)).map(|(of, _)| &of.name[..])
    }

    /// The gradient of every one of `parameters`; +0 for one that no token reached.
    pub fn finish(
        self,
        cpu: &Cpu,
        parameters: &BTreeMap<String, Vec<usize>>,
    ) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let mut found: BTreeMap<String, Tensor> = BTreeMap::new();
        for (of, Total { mut values, has }) in self.0 {
            let shape = &parameters[&of.name];
            let rows = match has {
                Has::LookedUp(rows) => {
                    // What a product has read of the table came before.
                    let mut whole = found.remove(&of.name).map_or_else(|| zeros(cpu, shape), Ok)?;
                    add_rows(cpu, &mut whole, &values, &rows)?;
                    found.insert(of.name, whole);
                    continue;
                }
                Has::Some(rows) if values.shape() != shape || (rows.transposed && is_matrix(&values)) => rows,
                _ => {
                    // The taps of a convolution were summed as one vector.
                    let count = |shape: &[usize]| shape.iter().product::<usize>();
                    if count(values.shape()) != count(shape) || !values.reshape(shape) {
                        let why = format!("`{}`: shape {:?} where {shape:?} was expected", of.name, values.shape());
                        return Err(ModelError::input("partial", why));
                    }
                    found.insert(of.name, values);
                    continue;
                }
            };
            if !found.contains_key(&of.name) {
                found.insert(of.name.clone(), zeros(cpu, shape)?);
            }
            let whole = found.get_mut(&of.name).and_then(Tensor::as_slice_mut::<f32>).expect("it is on the host");
            let (width, is_a_matrix): (usize, bool) = (values.shape()[1..].iter().product(), is_matrix(&values));
            let values = values.as_slice::<f32>().expect("it is f32, and on the host");
            if rows.transposed && is_a_matrix {
                // Of several matrices, one behind the other, a row is a column of one of them.
                let columns = shape[shape.len() - 1];
                for (row, values) in rows.rows().zip(values.chunks_exact(width)) {
                    let first = row / columns * columns * width + row % columns;
                    whole[first..].iter_mut().step_by(columns).zip(values).for_each(|(to, value)| *to = *value);
                }
                continue;
            }
            for (row, values) in rows.rows().zip(values.chunks_exact(width)) {
                whole[row * width..][..width].copy_from_slice(values);
            }
        }
        for (name, shape) in parameters {
            if !found.contains_key(name) {
                found.insert(name.clone(), zeros(cpu, shape)?);
            }
        }
        Ok(found)
    }
}

/// What a rank has of the gradients of a batch: the sums of its groups, joined.
pub struct Partial(pub(crate) Totals);

impl Partial {
    /// The sums in f32 by name, for another rank; a name also says which rows of which parameter a sum is of.
    pub fn tensors(self) -> BTreeMap<String, Tensor> {
        let named = |(of, Total { values, has }): (Of, Total)| {
            let rows = match has {
                Has::All => Value::Null,
                Has::Some(rows) => json!([rows.name, rows.groups, rows.size, rows.start, rows.width, rows.transposed]),
                Has::LookedUp(rows) => json!(rows),
            };
            (json!([of.name, of.start, of.looked_up, rows]).to_string(), values)
        };
        self.0.0.into_iter().map(named).collect()
    }

    /// What [`Partial::tensors`] of another rank gave.
    ///
    /// # Errors
    /// Names that are not of that kind, tensors that are not f32 on the host.
    pub fn of_tensors(tensors: BTreeMap<String, Tensor>) -> Result<Partial, ModelError> {
        let mut totals = BTreeMap::new();
        for (text, values) in tensors {
            let (of, has) = named(&text)
                .filter(|(_, has)| values.as_slice::<f32>().is_some() && has.fits(values.shape()))
                .ok_or_else(|| ModelError::input("partial", format!("`{text}` is no f32 sum that a rank gives")))?;
            if totals.insert(of, Total { values, has }).is_some() {
                return Err(ModelError::input("partial", format!("`{text}` is there twice, with other rows")));
            }
        }
        Ok(Partial(Totals(totals)))
    }

    /// Those of all ranks in their order, of which there are a power of two, joined.
    ///
    /// # Errors
    /// Another number of ranks; sums of other models; finite sums whose own sum is not; too little memory.
    pub fn join(cpu: &Cpu, ranks: Vec<Partial>) -> Result<Partial, ModelError> {
        if !ranks.len().is_power_of_two() {
            return Err(ModelError::input("ranks", format!("there are {}; give a power of two", ranks.len())));
        }
        let were_finite = ranks.iter().all(|rank| rank.0.not_finite().is_none());
        let mut tree = Tree::default();
        ranks.into_iter().try_for_each(|rank| tree.push(cpu, rank.0))?;
        let root = tree.root();
        match root.not_finite().filter(|_| were_finite) {
            Some(name) => Err(overflows(name)),
            None => Ok(Partial(root)),
        }
    }

    /// The gradient of every parameter of `model` in f32, under its name in the folder.
    ///
    /// # Errors
    /// Sums of another model; too little memory.
    pub fn finish(self, cpu: &Cpu, model: &Model) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let parameters = model.trained();
        if let Some(of) = self.0.0.keys().find(|of| !parameters.contains_key(&of.name)) {
            return Err(ModelError::input("partial", format!("`{}` is no parameter of the model", of.name)));
        }
        self.0.finish(cpu, parameters)
    }
}

/// What is said of a gradient that is not finite.
pub(crate) fn overflows(name: &str) -> ModelError {
    let why =
        format!("of `{name}` is not finite, although log-probabilities and their gradients are: it is beyond f32");
    ModelError::input("gradient", why)
}

/// What a name of [`Partial::tensors`] says.
fn named(text: &str) -> Option<(Of, Has)> {
    type Rows = (String, usize, usize, usize, usize, bool);
    let (name, start, looked_up, rows): (String, usize, bool, Value) = serde_json::from_str(text).ok()?;
    let has = match (looked_up, rows) {
        (true, rows) => Has::LookedUp(serde_json::from_value(rows).ok()?),
        (false, Value::Null) => Has::All,
        (false, rows) => {
            let (name, groups, size, start, width, transposed) = serde_json::from_value::<Rows>(rows).ok()?;
            // The ends of its name are in that of the sum.
            Has::Some(Source { name, ends: ENDS, groups, size, start, width, transposed })
        }
    };
    Some((Of { name, start, looked_up, nth_use: 0 }, has))
}

impl Has {
    /// Whether a sum of this shape can have these rows: those that were looked up are numbered, and each is there.
    fn fits(&self, shape: &[usize]) -> bool {
        let Has::LookedUp(rows) = self else { return true };
        let numbers: BTreeSet<usize> = rows.values().copied().collect();
        shape.len() == 2 && shape[0] == rows.len() && numbers.iter().copied().eq(0..rows.len())
    }
}

impl Total {
    /// +0 in its place.
    fn nothing(&self, cpu: &Cpu) -> Result<Total, ModelError> {
        Ok(Total { values: zeros(cpu, self.values.shape())?, has: self.has.clone() })
    }

    /// The same with these rows of a table, all of its own among them.
    fn spread(self, cpu: &Cpu, rows: &BTreeMap<i32, usize>) -> Result<Total, ModelError> {
        let Has::LookedUp(own) = self.has else { panic!("it is a table") };
        let width = self.values.shape()[1];
        let mut values = zeros(cpu, &[rows.len(), width])?;
        let to = values.as_slice_mut::<f32>().expect("it is f32, and on the host");
        let from = self.values.as_slice::<f32>().expect("it is f32, and on the host");
        for (token, row) in own {
            to[rows[&token] * width..][..width].copy_from_slice(&from[row * width..][..width]);
        }
        Ok(Total { values, has: Has::LookedUp(rows.clone()) })
    }
}

/// Adds rows to those of `whole` that they are, and +0 to all others.
fn add_rows(cpu: &Cpu, whole: &mut Tensor, values: &Tensor, rows: &BTreeMap<i32, usize>) -> Result<(), ModelError> {
    let width = values.shape()[1];
    let values = values.as_slice::<f32>().expect("it is f32, and on the host");
    let whole = whole.as_slice_mut::<f32>().expect("it is f32, and on the host");
    // It makes +0 of -0.
    let add_zero = |values: &mut [f32]| values.iter_mut().for_each(|value| *value += 0.0);
    let mut next = 0;
    for (&token, &row) in rows {
        let at = token as usize * width;
        add_zero(&mut whole[next..at]);
        next = at + width;
        let earlier = whole[at..next].to_vec();
        samebits_ops::add(cpu, &earlier, &values[row * width..][..width], &mut whole[at..next])?;
    }
    add_zero(&mut whole[next..]);
    Ok(())
}

/// Whether a sum is of a matrix.
fn is_matrix(values: &Tensor) -> bool {
    values.shape().len() == 2
}

/// A tensor of +0.
pub(crate) fn zeros(cpu: &Cpu, shape: &[usize]) -> Result<Tensor, ModelError> {
    cpu.zeros(DType::Fp32, shape).map_err(|error| no_room(error, DType::Fp32, shape))
}

/// No rows yet.
fn nothing(width: usize) -> Result<Tensor, ModelError> {
    Ok(Tensor::new(Vec::<f32>::new(), &[0, width])?)
}

fn add(cpu: &Cpu, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let mut y = empty(cpu, DType::Fp32, a.shape())?;
    cpu.call("add", Attributes::new(), &[("a", a.view()), ("b", b.view())], vec![("y", y.view_mut())])?;
    Ok(y)
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use std::slice;

    fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
        Tensor::new(values.to_vec(), shape).unwrap()
    }

    fn bits(tensor: &Tensor) -> Vec<u32> {
        tensor.as_slice::<f32>().unwrap().iter().map(|v| v.to_bits()).collect()
    }

    fn expected(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    /// A gradient has the shape of its parameter, also where it was summed as a vector.
    pub(crate) fn gradients_have_the_shape_of_their_parameter() {
        let cpu = Cpu::best();
        let of = |name: &str, values: &[f32], shape: &[usize]| {
            (Of::whole(name), Total { values: tensor(values, shape), has: Has::All })
        };
        let shapes = [("m", vec![2, 1]), ("taps", vec![2, 1, 3]), ("v", vec![2])];
        let parameters: BTreeMap<_, _> = shapes.map(|(name, shape)| (name.to_string(), shape)).into();
        let sums = [of("m", &[1.0; 2], &[2, 1]), of("taps", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[6])];
        let found = Totals(sums.into()).finish(&cpu, &parameters).unwrap();
        for (name, shape) in &parameters {
            assert_eq!(found[name].shape(), shape, "{name}");
        }
        assert_eq!(bits(&found["taps"]), expected(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
        let wrong = Totals([of("v", &[1.0; 3], &[3])].into()).finish(&cpu, &parameters).err().unwrap().to_string();
        assert!(wrong.contains("`v`: shape [3] where [2] was expected"), "{wrong}");
    }

    /// The names of what ranks exchange say which rows a sum has; rows that cannot be are refused.
    pub(crate) fn sums_of_other_rows_than_their_names_say_are_refused() {
        let table = |rows: &str| format!(r#"["t",0,true,{rows}]"#);
        let of = |names: &[String], shape: &[usize]| {
            let values = tensor(&vec![1.0; shape.iter().product()], shape);
            let all = names.iter().map(|name| (name.clone(), tensor(values.as_slice::<f32>().unwrap(), shape)));
            Partial::of_tensors(all.collect()).map(|partial| partial.tensors().into_keys().collect::<Vec<_>>())
        };
        let good = table(r#"{"5":1,"9":0}"#);
        assert_eq!(of(slice::from_ref(&good), &[2, 4]).unwrap(), slice::from_ref(&good));
        for shape in [&[3, 4][..], &[1, 4], &[2], &[2, 2, 2]] {
            assert!(of(slice::from_ref(&good), shape).is_err(), "{shape:?}");
        }
        for rows in [r#"{"5":1,"9":1}"#, r#"{"5":0,"9":2}"#, r#"{"5":1,"9":2}"#, "null", r#"["t",1,2,0,2]"#] {
            assert!(of(&[table(rows)], &[2, 4]).is_err(), "{rows}");
        }
        // One sum under two names.
        assert!(of(&[good, table(r#"{"5":0,"7":1}"#)], &[2, 4]).is_err());
    }

    /// A matrix goes on from its state, a vector from its chains and the tokens that it has had.
    pub(crate) fn sums_go_on_from_where_they_were() {
        let cpu = Cpu::best();
        let mut sums = Sums::new(Some(tensor(&[7.0; 2], &[2, 1])));
        for before in [0.0f32, 3.0, 6.0] {
            let state = sums.matrix(&cpu, Of::whole("m"), None, [2, 1]).unwrap();
            assert_eq!(state, [before; 2]);
            state.fill(before + 3.0);
        }
        assert!(sums.spare.is_none(), "the matrix has taken its place");
        let mut seen = Vec::new();
        for mask in [&[1, 0, 2][..], &[0, 1], &[1]] {
            let add = |_: TensorRef, before: usize, next: &mut Tensor| {
                seen.push(before);
                next.as_slice_mut::<f32>().unwrap().fill(seen.len() as f32);
                Ok(())
            };
            sums.vector(&cpu, Of::whole("v"), None, 2, mask, add).unwrap();
        }
        assert_eq!(seen, [0, 2, 3]);
        let parameters = BTreeMap::from([("m".to_string(), vec![2, 1]), ("v".to_string(), vec![2])]);
        let found = sums.end(&cpu).unwrap().finish(&cpu, &parameters).unwrap();
        assert_eq!(bits(&found["m"]), expected(&[9.0; 2]));
        // The fold of 64 chains of 3.
        assert_eq!(bits(&found["v"]), expected(&[192.0; 2]));
    }

    /// The uses of a shared weight are added when a group ends, the first first, however they came.
    pub(crate) fn uses_of_shared_weights_are_added_in_their_order() {
        let cpu = Cpu::best();
        let parts = [(2, -1e8f32), (0, 1.0), (1, 1e8), (2, 0.0), (0, 0.0)];
        for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]] {
            let mut sums = Sums::default();
            for (number, value) in order.map(|i| parts[i]) {
                sums.matrix(&cpu, Of::whole("w").of_use(number), None, [1, 1]).unwrap()[0] += value;
                let of = Of::whole("v").of_use(number);
                let add = |state: TensorRef, _: usize, next: &mut Tensor| {
                    let (state, next) = (state.contiguous::<f32>().unwrap(), next.as_slice_mut::<f32>().unwrap());
                    next.copy_from_slice(state);
                    next[0] += value;
                    Ok(())
                };
                sums.vector(&cpu, of, None, 1, &[1], add).unwrap();
            }
            let parameters = BTreeMap::from([("w".to_string(), vec![1, 1]), ("v".to_string(), vec![1])]);
            let found = sums.end(&cpu).unwrap().finish(&cpu, &parameters).unwrap();
            // Another order leaves 1 of each.
            assert_eq!((bits(&found["w"]), bits(&found["v"])), (expected(&[0.0]), expected(&[0.0])), "{order:?}");
        }
    }

    /// Groups are joined as pairs, and pairs of pairs; what a group has not is +0 there.
    pub(crate) fn groups_are_joined_as_a_tree() {
        let cpu = Cpu::best();
        let mut tree = Tree::default();
        let group = |values: &[(&str, f32)]| {
            let total = |&(name, value): &(&str, f32)| {
                (Of::whole(name), Total { values: tensor(&[value], &[1]), has: Has::All })
            };
            Totals(values.iter().map(total).collect())
        };
        for values in [
            &[("all", 1e8), ("first", -0.0)][..],
            &[("all", 1.0)],
            &[("all", -1e8)],
            &[("all", 1.0), ("last", -0.0), ("number", 5.0)],
        ] {
            tree.push(&cpu, group(values)).unwrap();
        }
        let names = ["all", "first", "last", "never", "number"];
        let parameters = names.map(|name| (name.to_string(), vec![1])).into();
        let found = tree.root().finish(&cpu, &parameters).unwrap();
        // In a row it would be 1; alone, -0 would stay.
        for (name, value) in names.into_iter().zip([0.0, 0.0, 0.0, 0.0, 5.0]) {
            assert_eq!(bits(&found[name]), expected(&[value]), "{name}");
        }
    }

    /// The sums of some rows of a parameter are put to those rows, and a table's two sums are added.
    pub(crate) fn gradients_are_whole_parameters() {
        let cpu = Cpu::best();
        let source = |start, width| Source { groups: 2, start, width, ..Source::whole("p".into(), 3) };
        let total = |values: &[f32], shape: &[usize], has| Total { values: tensor(values, shape), has };
        let (first, rest) = (source(0, 1), source(1, 2));
        let totals = Totals(BTreeMap::from([
            (Of::matrix(&first), total(&[1.0, 2.0, 3.0, 4.0], &[2, 2], Has::Some(first))),
            (Of::matrix(&rest), total(&[5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0], &[4, 2], Has::Some(rest))),
            (Of::whole("table"), total(&[-0.0, 1.0, 2.0, -0.0], &[4, 1], Has::All)),
            (Of::table("table"), total(&[4.0, 0.5], &[2, 1], Has::LookedUp([(2, 0), (1, 1)].into()))),
        ]));
        let parameters = BTreeMap::from([("p.weight".to_string(), vec![6, 2]), ("table".to_string(), vec![4, 1])]);
        let found = totals.finish(&cpu, &parameters).unwrap();
        assert_eq!(found.len(), 2);
        let rows = [1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 3.0, 4.0, 9.0, 10.0, 11.0, 12.0];
        assert_eq!(bits(&found["p.weight"]), expected(&rows));
        // As if what is added were +0 where no token looked.
        assert_eq!(bits(&found["table"]), expected(&[0.0, 1.5, 6.0, 0.0]));
    }

    /// The rows of a product are columns of what is stored transposed, also where both are square; its bias stays a vector.
    pub(crate) fn gradients_of_transposed_matrices_are_turned_back() {
        let cpu = Cpu::best();
        let source = |start, width| Source { start, width, transposed: true, ..Source::whole("p".into(), 2) };
        let of = |source: Source, part: &str, values: &[f32], shape: &[usize]| {
            let of = if part == "bias" { Of::bias(&source) } else { Of::matrix(&source) };
            (of, Total { values: tensor(values, shape), has: Has::Some(source) })
        };
        let parts = [
            of(source(0, 1), "weight", &[1.0, 2.0, 3.0], &[1, 3]),
            of(source(1, 1), "weight", &[4.0, 5.0, 6.0], &[1, 3]),
            of(source(0, 2), "bias", &[7.0, 8.0], &[2]),
        ];
        let parameters = BTreeMap::from([("p.weight".to_string(), vec![3, 2]), ("p.bias".to_string(), vec![2])]);
        let found = Totals(parts.into()).finish(&cpu, &parameters).unwrap();
        assert_eq!(bits(&found["p.weight"]), expected(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        assert_eq!(bits(&found["p.bias"]), expected(&[7.0, 8.0]));
        let whole = [of(source(0, 2), "weight", &[1.0, 2.0, 3.0, 4.0], &[2, 2])];
        let found = Totals(whole.into()).finish(&cpu, &[("p.weight".to_string(), vec![2, 2])].into()).unwrap();
        assert_eq!(bits(&found["p.weight"]), expected(&[1.0, 3.0, 2.0, 4.0]));
        // Two matrices one behind the other, of the second of which this is the second row; and the biases of both.
        let second = [of(source(3, 1), "weight", &[1.0, 2.0, 3.0], &[1, 3]), of(source(3, 1), "bias", &[4.0], &[1])];
        let parameters = BTreeMap::from([("p.weight".to_string(), vec![2, 3, 2]), ("p.bias".to_string(), vec![2, 2])]);
        let found = Totals(second.into()).finish(&cpu, &parameters).unwrap();
        let (mut weight, mut bias) = ([0.0; 12], [0.0; 4]);
        (weight[7], weight[9], weight[11], bias[3]) = (1.0, 2.0, 3.0, 4.0);
        assert_eq!((bits(&found["p.weight"]), bits(&found["p.bias"])), (expected(&weight), expected(&bias)));
    }

    /// A table goes on with the rows that it has, whichever come in between; groups join those of each.
    pub(crate) fn tables_hold_the_rows_that_were_looked_up() {
        let cpu = Cpu::best();
        let group = |looked_up: &[&[i32]]| {
            let mut sums = Sums::default();
            for (before, tokens) in looked_up.iter().enumerate() {
                let (rows, numbers) = sums.table(Of::table("t"), 2, tokens).unwrap();
                for (token, number) in tokens.iter().zip(numbers) {
                    let row = &mut rows[2 * number as usize..][..2];
                    assert!(before > 0 || row == [0.0; 2] || tokens.iter().filter(|t| *t == token).count() > 1);
                    row.iter_mut().for_each(|value| *value += *token as f32);
                }
            }
            sums.end(&cpu).unwrap()
        };
        let parameters = BTreeMap::from([("t".to_string(), vec![6, 2])]);
        let one = group(&[&[4, 1, 4], &[5, 1]]).finish(&cpu, &parameters).unwrap();
        let rows = |of: [f32; 6]| expected(&of.map(|value| [value; 2]).concat());
        assert_eq!(bits(&one["t"]), rows([0.0, 2.0, 0.0, 0.0, 8.0, 5.0]));
        let mut tree = Tree::default();
        tree.push(&cpu, group(&[&[4, 1], &[5]])).unwrap();
        tree.push(&cpu, group(&[&[3, 4, 4]])).unwrap();
        let two = tree.root().finish(&cpu, &parameters).unwrap();
        assert_eq!(bits(&two["t"]), rows([0.0, 1.0, 0.0, 3.0, 12.0, 5.0]));
    }
}
