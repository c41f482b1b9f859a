//! Gradients of parameters while tokens go by, and how groups of sequences are joined.
//!
//! A matrix is one chain over the tokens of a group, a vector 64 chains that are folded when the group ends. Both go on
//! from where the tokens before left them, so how tokens are cut into micro-batches is not seen. A parameter that no
//! token of a group reached is +0 there.

use crate::kv_cache::buffer;
use crate::linear::Source;
use crate::machine::empty;
use crate::{Model, ModelError};
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};
use serde_json::json;
use std::collections::BTreeMap;

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
}

impl Of {
    /// All of a parameter.
    pub fn whole(name: &str) -> Of {
        Of { name: name.into(), start: 0, looked_up: false }
    }

    /// A parameter that tokens look up.
    pub fn table(name: &str) -> Of {
        Of { looked_up: true, ..Of::whole(name) }
    }

    /// The matrix or the bias of a product; `part` is `weight` or `bias`.
    pub fn source(source: &Source, part: &str) -> Of {
        Of { start: source.start, ..Of::whole(&format!("{}.{part}", source.name)) }
    }
}

/// The sums of a group so far.
#[derive(Default)]
pub(crate) struct Sums(BTreeMap<Of, Sum>);

struct Sum {
    /// `[N,K]`, or `[64,N]` of a vector.
    state: Tensor,
    /// The rows that it has of the parameter; `None` for all.
    rows: Option<Source>,
    /// Of a vector, how many tokens it has had.
    tokens: Option<usize>,
}

impl Sums {
    /// A matrix of `shape`, to be gone on with in place: most of them are too large to be copied for some tokens.
    pub fn matrix(&mut self, of: Of, rows: Option<&Source>, shape: [usize; 2]) -> Result<&mut [f32], ModelError> {
        let sum = self.entry(of, rows, shape, None)?;
        Ok(sum.state.as_slice_mut().expect("it is f32, and on the host"))
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
        let sum = self.entry(of, rows, [CHAINS, n], Some(0))?;
        let before = sum.tokens.expect("it is a vector");
        let mut next = empty(cpu, DType::Fp32, &[CHAINS, n])?;
        add(sum.state.view(), before, &mut next)?;
        sum.state = next;
        sum.tokens = Some(before + mask.iter().filter(|&&m| m != 0).count());
        Ok(())
    }

    fn entry(
        &mut self,
        of: Of,
        rows: Option<&Source>,
        shape: [usize; 2],
        tokens: Option<usize>,
    ) -> Result<&mut Sum, ModelError> {
        if !self.0.contains_key(&of) {
            let sum = Sum { state: zeros(&shape)?, rows: rows.cloned(), tokens };
            self.0.insert(of.clone(), sum);
        }
        Ok(self.0.get_mut(&of).expect("it was just put there"))
    }

    /// The end of the group.
    pub fn end(self, cpu: &Cpu) -> Result<Totals, ModelError> {
        let mut totals = BTreeMap::new();
        for (of, Sum { state, rows, tokens }) in self.0 {
            let values = match tokens {
                None => state,
                Some(_) => {
                    let mut folded = empty(cpu, DType::Fp32, &state.shape()[1..])?;
                    let (none, y) = (Attributes::new(), vec![("y", folded.view_mut())]);
                    cpu.call("fold", none, &[("x", state.view())], y)?;
                    folded
                }
            };
            totals.insert(of, Total { values, rows });
        }
        Ok(Totals(totals))
    }
}

/// The sums of one group, or of several that have been joined.
pub(crate) struct Totals(BTreeMap<Of, Total>);

struct Total {
    values: Tensor,
    rows: Option<Source>,
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
        for (of, total) in self.0 {
            let values = match others.remove(&of) {
                Some(other) => add(cpu, &total.values, &other.values)?,
                None => add(cpu, &total.values, &zeros(total.values.shape())?)?,
            };
            joined.insert(of, Total { values, rows: total.rows });
        }
        for (of, total) in others {
            let values = add(cpu, &zeros(total.values.shape())?, &total.values)?;
            joined.insert(of, Total { values, rows: total.rows });
        }
        Ok(Totals(joined))
    }

    /// The gradient of every one of `parameters`; +0 for one that no token reached.
    pub fn finish(
        self,
        cpu: &Cpu,
        parameters: &BTreeMap<String, Vec<usize>>,
    ) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let mut found: BTreeMap<String, Tensor> = BTreeMap::new();
        for (of, Total { values, rows }) in self.0 {
            let shape = &parameters[&of.name];
            if values.shape() == shape {
                let whole = match found.remove(&of.name) {
                    // A table's two sums.
                    Some(other) => add(cpu, &other, &values)?,
                    None => values,
                };
                found.insert(of.name, whole);
                continue;
            }
            let rows = rows.expect("it has some rows of the parameter");
            if !found.contains_key(&of.name) {
                found.insert(of.name.clone(), zeros(shape)?);
            }
            let whole = found.get_mut(&of.name).and_then(Tensor::as_slice_mut::<f32>).expect("it is on the host");
            let values = values.as_slice::<f32>().expect("it is f32, and on the host");
            let width: usize = shape[1..].iter().product();
            for (row, values) in rows.rows().zip(values.chunks_exact(width)) {
                whole[row * width..][..width].copy_from_slice(values);
            }
        }
        for (name, shape) in parameters {
            if !found.contains_key(name) {
                found.insert(name.clone(), zeros(shape)?);
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
        let named = |(of, Total { values, rows }): (Of, Total)| {
            let rows = rows.map(|rows| json!([rows.name, rows.groups, rows.size, rows.start, rows.width]));
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
            let (of, rows) = named(&text)
                .filter(|_| values.as_slice::<f32>().is_some())
                .ok_or_else(|| ModelError::input("partial", format!("`{text}` is no f32 sum that a rank gives")))?;
            totals.insert(of, Total { values, rows });
        }
        Ok(Partial(Totals(totals)))
    }

    /// Those of all ranks in their order, of which there are a power of two, joined.
    ///
    /// # Errors
    /// Another number of ranks; sums of other models; too little memory.
    pub fn join(cpu: &Cpu, ranks: Vec<Partial>) -> Result<Partial, ModelError> {
        if !ranks.len().is_power_of_two() {
            return Err(ModelError::input("ranks", format!("there are {}; give a power of two", ranks.len())));
        }
        let mut tree = Tree::default();
        ranks.into_iter().try_for_each(|rank| tree.push(cpu, rank.0))?;
        Ok(Partial(tree.root()))
    }

    /// The gradient of every parameter of `model` in f32, under its name in the folder.
    ///
    /// # Errors
    /// Sums of another model; too little memory.
    pub fn finish(self, cpu: &Cpu, model: &Model) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let parameters = model.parameters();
        if let Some(of) = self.0.0.keys().find(|of| !parameters.contains_key(&of.name)) {
            return Err(ModelError::input("partial", format!("`{}` is no parameter of the model", of.name)));
        }
        self.0.finish(cpu, parameters)
    }
}

/// What a name of [`Partial::tensors`] says.
fn named(text: &str) -> Option<(Of, Option<Source>)> {
    type Rows = (String, usize, usize, usize, usize);
    let (name, start, looked_up, rows): (String, usize, bool, Option<Rows>) = serde_json::from_str(text).ok()?;
    let rows = rows.map(|(name, groups, size, start, width)| Source { name, groups, size, start, width });
    Some((Of { name, start, looked_up }, rows))
}

/// A tensor of +0.
pub(crate) fn zeros(shape: &[usize]) -> Result<Tensor, ModelError> {
    Ok(Tensor::new(buffer::<f32>(shape)?, shape)?)
}

fn add(cpu: &Cpu, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let mut y = empty(cpu, DType::Fp32, a.shape())?;
    cpu.call("add", Attributes::new(), &[("a", a.view()), ("b", b.view())], vec![("y", y.view_mut())])?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
        Tensor::new(values.to_vec(), shape).unwrap()
    }

    fn bits(tensor: &Tensor) -> Vec<u32> {
        tensor.as_slice::<f32>().unwrap().iter().map(|v| v.to_bits()).collect()
    }

    fn expected(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    /// A matrix goes on from its state, a vector from its chains and the tokens that it has had.
    #[test]
    fn sums_go_on_from_where_they_were() {
        let cpu = Cpu::best();
        let mut sums = Sums::default();
        for before in [0.0f32, 3.0, 6.0] {
            let state = sums.matrix(Of::whole("m"), None, [2, 1]).unwrap();
            assert_eq!(state, [before; 2]);
            state.fill(before + 3.0);
        }
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

    /// Groups are joined as pairs, and pairs of pairs; what a group has not is +0 there.
    #[test]
    fn groups_are_joined_as_a_tree() {
        let cpu = Cpu::best();
        let mut tree = Tree::default();
        let group = |values: &[(&str, f32)]| {
            let total =
                |&(name, value): &(&str, f32)| (Of::whole(name), Total { values: tensor(&[value], &[1]), rows: None });
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
    #[test]
    fn gradients_are_whole_parameters() {
        let cpu = Cpu::best();
        let source = |start, width| Source { name: "p".into(), groups: 2, size: 3, start, width };
        let total = |values: &[f32], shape: &[usize], rows| Total { values: tensor(values, shape), rows };
        let (first, rest) = (source(0, 1), source(1, 2));
        let totals = Totals(BTreeMap::from([
            (Of::source(&first, "weight"), total(&[1.0, 2.0, 3.0, 4.0], &[2, 2], Some(first))),
            (Of::source(&rest, "weight"), total(&[5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0], &[4, 2], Some(rest))),
            (Of::whole("table"), total(&[1.0, 2.0], &[2], None)),
            (Of::table("table"), total(&[0.5, 4.0], &[2], None)),
        ]));
        let parameters = BTreeMap::from([("p.weight".to_string(), vec![6, 2]), ("table".to_string(), vec![2])]);
        let found = totals.finish(&cpu, &parameters).unwrap();
        assert_eq!(found.len(), 2);
        let rows = [1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 3.0, 4.0, 9.0, 10.0, 11.0, 12.0];
        assert_eq!(bits(&found["p.weight"]), expected(&rows));
        assert_eq!(bits(&found["table"]), expected(&[1.5, 6.0]));
    }
}
