//! A mixture of experts: each token goes through the few experts that its router chooses.
//!
//! The choice is `route`, the sum `combine`: a chain over the rank, then what the shared experts add. An expert takes all
//! of a step's tokens that chose it in one product, whose rows do not see each other; so neither the choice nor the sum
//! knows who else is in the step.

use crate::config::{Config, Experts};
use crate::decoder::Step;
use crate::kv_cache::buffer;
use crate::linear::{Gated, Inner, Linear, Loader};
use crate::watch::Watch;
use crate::{Family, ModelError};
use samebits_ops::{Combine, Cpu, Element, combine, route};

pub(crate) struct Mixture<A> {
    pub sizes: Experts,
    pub router: Linear<A>,
    /// Added to the scores for the choice alone.
    pub choice_bias: Option<Vec<f32>>,
    pub experts: Vec<Gated<A>>,
    pub shared: Option<Gated<A>>,
}

impl<A: Element> Mixture<A> {
    pub fn load(loader: &mut Loader, sizes: Experts) -> Result<Mixture<A>, ModelError> {
        let Config { family, hidden, .. } = *loader.config;
        let (block, names) = match family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", PROJECTIONS),
        };
        let router = loader.linear(&format!("{block}.gate"), sizes.count, hidden, false)?;
        let bias = format!("{block}.gate.e_score_correction_bias");
        let choice_bias = sizes.choice_bias.then(|| loader.vector(&bias, sizes.count)).transpose()?;
        let experts = (0..sizes.count)
            .map(|e| loader.gated(&format!("{block}.experts.{e}"), names, sizes.width))
            .collect::<Result<_, _>>()?;
        let shared = (sizes.shared_width > 0)
            .then(|| loader.gated(&format!("{block}.shared_experts"), PROJECTIONS, sizes.shared_width))
            .transpose()?;
        Ok(Mixture { sizes, router, choice_bias, experts, shared })
    }

    /// `a[n,hidden] -> y[n,hidden]`
    #[allow(clippy::too_many_arguments)]
    pub fn apply(
        &self,
        cpu: &Cpu,
        step: &Step,
        layer: usize,
        a: &[A],
        y: &mut [f32],
        inner: &mut Inner<A>,
        watch: &mut Watch,
    ) -> Result<(), ModelError> {
        let chosen = self.sizes.chosen;
        let n = step.rows();
        let hidden = y.len() / n;
        let mut logits: Vec<f32> = self.router.apply(cpu, n, a)?;
        watch.see(Some(layer), "router", step, &mut logits)?;
        let (mut index, mut weight) = (vec![0i32; n * chosen], vec![0f32; n * chosen]);
        route(cpu, &self.sizes.route(n), &logits, self.choice_bias.as_deref(), &mut index, &mut weight)?;
        watch.see_indices(Some(layer), "experts", step, &mut index)?;
        watch.see(Some(layer), "expert_weights", step, &mut weight)?;

        let Placed { order, rows } = Placed::of(&index);
        let mut made: Vec<f32> = buffer(&[index.len(), hidden])?;
        let mut left = &mut made[..];
        for places in order.chunk_by(|&a, &b| index[a] == index[b]) {
            let gathered: Vec<A> =
                places.iter().flat_map(|&place| &a[place / chosen * hidden..][..hidden]).copied().collect();
            let (part, rest) = left.split_at_mut(places.len() * hidden);
            self.experts[index[places[0]] as usize].apply_to(cpu, places.len(), &gathered, part, inner)?;
            left = rest;
        }
        let shared = match &self.shared {
            None => None,
            Some(shared) => {
                let mut added: Vec<f32> = buffer(&[n, hidden])?;
                shared.apply_to(cpu, n, a, &mut added, inner)?;
                Some(added)
            }
        };
        let shape = Combine { tokens: n, chosen, rows: index.len(), n: hidden };
        Ok(combine(cpu, &shape, &made, &rows, &weight, shared.as_deref(), y)?)
    }
}

/// The rows of what the experts make: one expert's after the other's, each in the order of tokens.
pub(crate) struct Placed {
    /// By row: its place, which is a token and a rank.
    pub order: Vec<usize>,
    /// By place: its row.
    pub rows: Vec<i32>,
}

impl Placed {
    /// Those of `index[T,K]`, the expert that each place chose.
    pub fn of(index: &[i32]) -> Placed {
        let mut order: Vec<usize> = (0..index.len()).collect();
        order.sort_by_key(|&place| index[place]);
        let mut rows = vec![0; index.len()];
        order.iter().enumerate().for_each(|(row, &place)| rows[place] = row as i32);
        Placed { order, rows }
    }
}

/// What most families call the matrices of a gated MLP.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
