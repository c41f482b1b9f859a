//! A mixture of experts: each token goes through the few experts that its router chooses.
//!
//! The choice is `route`, the sum `combine`: a chain over the rank, then what the shared experts add. An expert takes
//! all of a step's tokens that chose it in one product, whose rows do not see each other; so neither the choice nor the
//! sum knows who else is in the step. Where a device has few tokens, each choice is a product of its own instead, and
//! the host need not know the choice.

use crate::backward::Backward;
use crate::config::{Config, Experts};
use crate::linear::{Gated, Linear, Loader};
use crate::machine::{Index, IndexOf};
use crate::pass::Pass;
use crate::step::Step;
use crate::{Family, ModelError};
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Backend, Cpu, DType, Scoring, Tensor, TensorRef};

pub(crate) struct Mixture {
    sizes: Experts,
    router: Linear,
    /// Added to the scores for the choice alone.
    choice_bias: Option<Tensor>,
    experts: Gated,
    shared: Option<Gated>,
}

impl Mixture {
    pub fn load(loader: &mut Loader, sizes: Experts) -> Result<Mixture, ModelError> {
        let Config { family, hidden, .. } = *loader.config;
        let (block, names) = match family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", PROJECTIONS),
        };
        let router = loader.linear(&format!("{block}.gate"), sizes.count, hidden, false)?;
        let bias = format!("{block}.gate.e_score_correction_bias");
        // It decides the choice, which has no gradient: no parameter.
        let choice_bias = sizes.choice_bias.then(|| loader.constant(&bias, sizes.count)).transpose()?;
        let experts = (0..sizes.count)
            .map(|e| loader.gated(&format!("{block}.experts.{e}"), names, sizes.width))
            .collect::<Result<_, _>>()?;
        let shared = sizes
            .shared_width
            .map(|width| loader.gated(&format!("{block}.shared_experts"), PROJECTIONS, width))
            .transpose()?;
        Ok(Mixture { sizes, router, choice_bias, experts: Gated::stack(experts), shared })
    }

    /// Takes the weights to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.router.move_to(cpu, device)?;
        if let Some(bias) = &mut self.choice_bias {
            *bias = Backend::upload(device, bias.view())?;
        }
        self.experts.move_to(cpu, device)?;
        self.shared.as_mut().map_or(Ok(()), |shared| shared.move_to(cpu, device))
    }

    /// `a[n,hidden] -> y[n,hidden]`. `choices` are those of the step.
    pub fn apply(
        &self,
        pass: &mut Pass,
        step: &Step,
        layer: usize,
        choices: Option<&Index>,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        let (chosen, n) = (self.sizes.chosen, step.rows());
        let mut logits = self.router.apply(pass, a.view(), DType::Fp32)?;
        pass.see(Some(layer), "router", step, &mut logits)?;
        let mut weight = pass.empty(DType::Fp32, &[n, chosen])?;
        let mut choice = pass.machine.route(&self.sizes.route(n), &logits, self.choice_bias.as_ref(), &mut weight)?;
        let mut experts = Vec::new();
        if choices.is_none() || pass.hook.probe.is_some() {
            experts = pass.machine.read_index(&choice)?;
            if pass.hook.see_indices(Some(layer), "experts", step, &mut experts)? {
                let what = IndexOf { op: "experts", limit: self.sizes.count, distinct: false };
                choice = pass.machine.index(what, experts.clone(), Some(choice))?;
            }
        }
        pass.see(Some(layer), "expert_weights", step, &mut weight)?;

        let mut made = pass.empty(DType::Fp32, &[n * chosen, y.shape()[1]])?;
        let rows;
        let rows = match choices {
            Some(choices) => {
                self.experts.apply_chosen(pass, (a, chosen), &choice, &mut made)?;
                choices.view(&[n, chosen])?
            }
            None => {
                rows = self.apply_by_expert(pass, &experts, a, &mut made)?;
                TensorRef::new(&rows, &[n, chosen])?
            }
        };
        pass.keep("made", &made)?;
        pass.keep("expert_weights", &weight)?;
        pass.keep("router", &logits)?;
        if pass.kept.is_some() {
            pass.keep("experts", &Tensor::new(experts, &[n, chosen])?)?;
        }
        let x = [("x", made.view()), ("row", rows), ("weight", weight.view())];
        let none = &pass.attributes.none;
        match &self.shared {
            None => pass.op("combine", none, &x, [("y", y.view_mut())]),
            Some(shared) => {
                let mut added = pass.empty(DType::Fp32, y.shape())?;
                shared.apply_to(pass, 0, a.view(), added.view_mut())?;
                let [x, row, weight] = x;
                pass.op("combine", none, &[x, row, weight, ("shared", added.view())], [("y", y.view_mut())])
            }
        }
    }

    /// Every expert's product with the rows of a that chose it, one expert's behind the other's; says which row each
    /// choice has. `experts` are the choices `[n,K]`.
    fn apply_by_expert(
        &self,
        pass: &mut Pass,
        experts: &[i32],
        a: &Tensor,
        made: &mut Tensor,
    ) -> Result<Vec<i32>, ModelError> {
        let (n, hidden) = (a.shape()[0], a.shape()[1]);
        let (order, rows) = by_expert(experts);
        let tokens = order.iter().map(|&choice| (choice / self.sizes.chosen) as i32).collect();
        let tokens = pass.machine.index(IndexOf { op: "experts", limit: n, distinct: false }, tokens, None)?;
        let mut gathered = pass.empty(pass.dtype, &[order.len(), hidden])?;
        let from = Part { rows: Some(&tokens), ..Part::whole(hidden) };
        pass.machine.copy_rows([order.len(), hidden], (a, from), (&mut gathered, Part::whole(hidden)))?;
        let mut first = 0;
        for choices in order.chunk_by(|&a, &b| experts[a] == experts[b]) {
            let (expert, part) = (experts[choices[0]] as usize, first..first + choices.len());
            self.experts.apply_to(pass, expert, gathered.rows(part.clone()), made.rows_mut(part))?;
            first += choices.len();
        }
        pass.keep("gathered", &gathered)?;
        Ok(rows)
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32. What was kept is taken from the end.
    pub fn backward(&self, back: &mut Backward, layer: usize, a: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (chosen, mask, f32) = (self.sizes.chosen, back.mask, DType::Fp32);
        let from_shared = match &self.shared {
            None => None,
            Some(shared) => Some(shared.backward(back, 0, a.view(), dy.view(), mask)?),
        };
        let (experts, logits) = (back.take("experts"), back.take("router"));
        let (weight, made, gathered) = (back.take("expert_weights"), back.take("made"), back.take("gathered"));
        let experts = experts.as_slice::<i32>().expect("they are numbers on the host");
        let (order, rows) = by_expert(experts);
        let rows = Tensor::new(rows, weight.shape())?;

        let (mut dmade, mut dweight) = (back.pass.empty(f32, made.shape())?, back.pass.empty(f32, weight.shape())?);
        let inputs = [("x", made.view()), ("row", rows.view()), ("weight", weight.view()), ("dy", dy.view())];
        let outputs = [("dx", dmade.view_mut()), ("dweight", dweight.view_mut())];
        back.pass.op("combine_backward", &back.pass.attributes.none, &inputs, outputs)?;
        back.see(Some(layer), "dexpert_weights", &mut dweight)?;

        // Of an expert the tokens are those that chose it.
        let mut dgathered = back.pass.empty(f32, gathered.shape())?;
        let mask_of_rows: Vec<i32> = order.iter().map(|&choice| mask[choice / chosen]).collect();
        let mut end = order.len();
        for choices in order.chunk_by(|&a, &b| experts[a] == experts[b]).rev() {
            let part = end - choices.len()..end;
            let (expert, mask) = (experts[choices[0]] as usize, &mask_of_rows[part.clone()]);
            let (x, dy) = (gathered.rows(part.clone()), dmade.rows(part.clone()));
            let dx = self.experts.backward(back, expert, x, dy, mask)?;
            end = part.start;
            back.write_rows(&dx, &mut dgathered, part.start)?;
        }
        let mut from_experts = back.pass.empty(f32, a.shape())?;
        let ones = Tensor::new(vec![1f32; experts.len()], weight.shape())?;
        let mut inputs = vec![("x", dgathered.view()), ("row", rows.view()), ("weight", ones.view())];
        inputs.extend(from_shared.as_ref().map(|shared| ("shared", shared.view())));
        back.pass.op("combine", &back.pass.attributes.none, &inputs, [("y", from_experts.view_mut())])?;

        let mut dlogits = self.route_backward(back, &logits, experts, &dweight)?;
        back.see(Some(layer), "drouter", &mut dlogits)?;
        let from_router = self.router.backward(back, 0, a.view(), dlogits.view(), mask, f32)?;
        back.sum(from_router, from_experts)
    }

    /// From `dweight[n,K]` of the chosen: that of the router's logits.
    fn route_backward(
        &self,
        back: &mut Backward,
        logits: &Tensor,
        experts: &[i32],
        dweight: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Experts { count, chosen, scoring, normalise, scale, .. } = self.sizes;
        let n = logits.shape()[0];
        let (mut rank, mut spread) = (vec![-1; n * count], vec![0f32; n * count]);
        let dweight = dweight.as_slice::<f32>().expect("it is f32, and on the host");
        for (choice, (&expert, &dweight)) in experts.iter().zip(dweight).enumerate() {
            let place = choice / chosen * count + expert as usize;
            (rank[place], spread[place]) = ((choice % chosen) as i32, dweight);
        }
        let (rank, spread) = (Tensor::new(rank, &[n, count])?, Tensor::new(spread, &[n, count])?);
        let scoring = if scoring == Scoring::Sigmoid { "sigmoid" } else { "softmax" };
        let attributes = Attributes::new()
            .with("chosen", chosen)
            .with("scoring", scoring)
            .with("normalise", normalise)
            .with("scale", scale);
        let mut dlogits = back.pass.empty(DType::Fp32, logits.shape())?;
        let inputs = [("logits", logits.view()), ("rank", rank.view()), ("dweight", spread.view())];
        back.pass.op("route_backward", &attributes, &inputs, [("dlogits", dlogits.view_mut())])?;
        Ok(dlogits)
    }
}

/// The choices in the order of their experts, those of one expert in the order of tokens; and the place of each in it.
fn by_expert(experts: &[i32]) -> (Vec<usize>, Vec<i32>) {
    let mut order: Vec<usize> = (0..experts.len()).collect();
    order.sort_by_key(|&choice| experts[choice]);
    let mut rows = vec![0; experts.len()];
    order.iter().enumerate().for_each(|(row, &choice)| rows[choice] = row as i32);
    (order, rows)
}

/// What most families call the matrices of a gated MLP.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
