//! A mixture of experts: each token goes through the few experts that its router chooses.
//!
//! The choice is `route`, the sum `combine`: a chain over the rank, then what the shared experts add. An expert takes all
//! of a step's tokens that chose it in one product, whose rows do not see each other; so neither the choice nor the sum
//! knows who else is in the step.

use crate::config::{Config, Experts};
use crate::decoder::{Fault, Step};
use crate::kv_cache::buffer;
use crate::linear::{Gated, Inner, Linear, Loader};
use crate::watch::Watch;
use crate::{Family, ModelError};
use samebits_ops::{Combine, Cpu, Element, Route, combine, route};

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
        let Experts { count, chosen, scoring, groups, top_groups, group_worth, normalise, scale, .. } = self.sizes;
        let n = step.rows();
        let hidden = y.len() / n;
        let shape =
            Route { tokens: n, experts: count, chosen, scoring, groups, top_groups, group_worth, normalise, scale };
        let logits: Vec<f32> = self.router.apply(cpu, n, a)?;
        let (mut index, mut weight) = (vec![0i32; n * chosen], vec![0f32; n * chosen]);
        route(cpu, &shape, &logits, self.choice_bias.as_deref(), &mut index, &mut weight)?;
        step.plant_in_routing(watch.fault, &logits, &mut index);
        watch.see(Some(layer), "router", step, &logits)?;
        watch.see(Some(layer), "experts", step, &index.iter().map(|&e| e as f32).collect::<Vec<_>>())?;

        // Row of the expert's output by token and rank: experts one after the other, tokens ascending.
        let mut rows = vec![0i32; index.len()];
        let mut made: Vec<f32> = buffer(&[index.len(), hidden])?;
        let mut next = 0;
        for (e, expert) in self.experts.iter().enumerate() {
            let mut gathered: Vec<A> = Vec::new();
            let first = next;
            for (place, _) in index.iter().enumerate().filter(|(_, i)| **i == e as i32) {
                rows[place] = next as i32;
                gathered.extend_from_slice(&a[place / chosen * hidden..][..hidden]);
                next += 1;
            }
            if next > first {
                expert.apply_to(cpu, next - first, &gathered, &mut made[first * hidden..next * hidden], inner)?;
            }
        }
        let shared = match &self.shared {
            None => None,
            Some(shared) => {
                let mut added: Vec<f32> = buffer(&[n, hidden])?;
                shared.apply_to(cpu, n, a, &mut added, inner)?;
                Some(added)
            }
        };
        if watch.fault == Some(Fault::ExpertsByArrival) && step.rows() > 1 {
            for (rows, weight) in rows.chunks_exact_mut(chosen).zip(weight.chunks_exact_mut(chosen)) {
                let mut pairs: Vec<(i32, f32)> = rows.iter().copied().zip(weight.iter().copied()).collect();
                pairs.sort_by_key(|(row, _)| *row);
                for (i, (row, w)) in pairs.into_iter().enumerate() {
                    (rows[i], weight[i]) = (row, w);
                }
            }
        }
        let shape = Combine { tokens: n, chosen, rows: index.len(), n: hidden };
        Ok(combine(cpu, &shape, &made, &rows, &weight, shared.as_deref(), y)?)
    }
}

/// What most families call the matrices of a gated MLP.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
