//! A mixture of experts: each token goes through the few experts that its router chooses.
//!
//! The choice is `route`, the sum `combine`: a chain over the rank, then what the shared experts add. An expert takes
//! all of a step's tokens that chose it in one product, whose rows do not see each other; so neither the choice nor the
//! sum knows who else is in the step. Where a device has few tokens, each choice is a product of its own instead, and
//! the host need not know the choice.

use super::arithmetic::rows;
use super::linear::{ENDS, Linear};
use super::loader::Loader;
use super::mlp::{self, Mlp};
use super::norm::{self, Norm, Vector};
use super::{SIZES, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{Index, IndexOf};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::LayerState;
use crate::sums::Of;
use samebits_ops::device::{Device, Part};
use samebits_ops::{
    Attributes, Backend, ChosenBy, Cpu, DType, GroupWorth, Route, Scoring, Tensor, TensorRef, embedding_dw,
};

/// What a mixture of experts is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Experts.
    pub count: usize,
    /// Experts chosen for a token.
    pub chosen: usize,
    /// An expert.
    pub expert: mlp::Plan,
    /// Where the experts are of another width than the residual stream: how their rows come from it, and go back to it.
    pub latent: Option<Latent>,
    /// The experts that see every token.
    pub shared: Option<Box<Shared>>,
    /// A bias on the router.
    pub router_bias: bool,
    /// How router logits become scores.
    pub scoring: Scoring,
    /// What decides the choice.
    pub chosen_by: ChosenBy,
    /// What is added to the scores for the choice.
    pub choice_bias: Option<ChoiceBias>,
    /// Groups of experts.
    pub groups: usize,
    /// Groups that a token's experts come from.
    pub top_groups: usize,
    /// What a group is worth.
    pub group_worth: GroupWorth,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// What the weights multiply.
    pub weighs: Weighs,
    /// How what experts and the router read is made, where the mixture reads the residual stream itself.
    pub forms: Option<Forms>,
    /// The name, behind that of the router's block, of a factor of the weights of each expert, where there is one.
    pub expert_scale: Option<&'static str>,
    /// The names of its tensors.
    pub names: Names,
}

/// What a mixture makes of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forms {
    /// Both norms.
    pub norm: norm::Plan,
    /// The name of the norm before the experts, without `.weight`.
    pub experts: &'static str,
    /// That of the weights of the norm before the router, and a factor behind that.
    pub router: (&'static str, f64),
}

/// What the weights of a token's experts multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weighs {
    /// What the experts make.
    Outputs,
    /// What they read; what they make is added as it is.
    Inputs,
}

/// The products before and behind experts of a width of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Whether they have biases.
    pub bias: bool,
    /// Their names behind that of the block.
    pub names: [&'static str; 2],
}

/// Experts that see every token.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// They, as one.
    pub mlp: mlp::Plan,
    /// Their name behind that of the block; `None` where the names of their matrices are whole.
    pub name: Option<&'static str>,
    /// The name of a row of weights there, where they are multiplied with the sigmoid of its product.
    pub gate: Option<&'static str>,
}

impl Shared {
    /// They behind this name, without a gate.
    pub(crate) fn of(mlp: mlp::Plan, name: &'static str) -> Box<Shared> {
        Box::new(Shared { mlp, name: Some(name), gate: None })
    }
}

/// A number for each expert that decides the choice and is no parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceBias {
    /// Its name behind that of the block.
    pub name: &'static str,
    /// Whether it is stored as a matrix of one row.
    pub is_matrix: bool,
}

impl ChoiceBias {
    /// As most families have it.
    pub const PLAIN: ChoiceBias = ChoiceBias { name: "gate.e_score_correction_bias", is_matrix: false };
}

/// Names of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// What stands before all of them.
    pub block: &'static str,
    /// The router, behind that.
    pub router: &'static str,
    /// The experts, behind that.
    pub experts: ExpertNames,
}

/// Names of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// Each has matrices of its own, behind `experts` and its number.
    Each,
    /// Two tensors of all experts: gate and up, `[E,2F,hidden]`, or up alone, and down, `[E,hidden,F]`.
    Stacked(Stacked),
}

/// How two tensors of all experts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stacked {
    /// That of gate and up, and that of down.
    pub names: [&'static str; 2],
    /// What stands behind the names of a matrix and of a bias.
    pub ends: [&'static str; 2],
    /// Whether each matrix is stored transposed.
    pub transposed: bool,
    /// Whether rows of gate and up take turns, and do not stand one behind the other.
    pub takes_turns: bool,
}

impl Stacked {
    /// Two modules of these names.
    pub const fn modules(names: [&'static str; 2]) -> Stacked {
        Stacked { names, ends: ENDS, transposed: false, takes_turns: false }
    }
}

impl Names {
    /// What most families call them.
    pub const PLAIN: Names = Names { block: "mlp", router: "gate", experts: ExpertNames::Each };
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, tables: &[Rotary]) -> Result<(), &'static str> {
        let &Plan { count, chosen, groups, top_groups, .. } = self;
        self.expert.check(self.latent.map_or(hidden, |_| self.expert.hidden), tables)?;
        self.shared.as_ref().map_or(Ok(()), |shared| shared.mlp.check(hidden, tables))?;
        if ![count, chosen, groups, top_groups].into_iter().all(is_size) {
            Err(SIZES)
        } else if chosen > count || top_groups > groups {
            Err("no token has more experts, or groups of them, than there are")
        } else if self.latent.is_some_and(|latent| latent.hidden != hidden) {
            Err("its layers have the width of the residual stream")
        } else if self.latent.is_some() && self.weighs == Weighs::Inputs {
            Err("experts of a width of their own read what is not weighed")
        } else if !count.is_multiple_of(groups) {
            Err("groups are of as many experts each")
        } else if matches!(self.expert.activation, mlp::Activation::Learned(_)) {
            Err("the alphas of xIELU are those of one MLP; experts have another activation")
        } else {
            Ok(())
        }
    }

    /// The choice of experts for `tokens` tokens.
    fn route(&self, tokens: usize) -> Route {
        let Plan { count, chosen, scoring, chosen_by, groups, top_groups, group_worth, normalise, scale, .. } = *self;
        Route { tokens, experts: count, chosen, scoring, chosen_by, groups, top_groups, group_worth, normalise, scale }
    }
}

/// The norms before the experts and before the router, and the factor of what the second makes.
struct Normed {
    experts: Norm,
    router: Norm,
    factor: Attributes,
}

pub(crate) struct Moe {
    plan: Plan,
    forms: Option<Normed>,
    expert_scale: Option<Vector>,
    /// A weight of 1 for each expert of a token, where the weights are those of what experts read.
    ones: Tensor,
    router: Linear,
    /// Added to the scores for the choice alone.
    choice_bias: Option<Tensor>,
    experts: Mlp,
    latent: Option<[Linear; 2]>,
    shared: Option<SharedExperts>,
}

/// The experts that see every token as one, and the gate of what they make.
struct SharedExperts {
    mlp: Mlp,
    gate: Option<Linear>,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    /// The router's logits, and of each token the experts and their weights.
    logits: Tensor,
    experts: Vec<i32>,
    weight: Tensor,
    /// The rows of a that each expert took, one expert's behind the other's; what was made of them, and on the way.
    gathered: Tensor,
    made: Tensor,
    by_expert: Vec<mlp::Saved>,
    /// The sum of experts of a width of their own.
    latent: Option<Tensor>,
    shared: Option<SavedShared>,
    /// The forms of the stream that experts and the router read.
    forms: Option<[Tensor; 2]>,
    /// The weights before the factors of their experts.
    before: Option<Tensor>,
}

/// The same of the shared experts: where they have a gate, its logits and what they made.
struct SavedShared {
    mlp: mlp::Saved,
    gated: Option<(Tensor, Tensor)>,
}

/// The rows of each expert, one's behind the other's, and what each saved.
type ByExpert = (Tensor, Vec<mlp::Saved>);

impl Moe {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Moe, ModelError> {
        let Names { block, router, experts } = plan.names;
        let hidden = plan.latent.map_or(plan.expert.hidden, |latent| latent.hidden);
        let forms = match &plan.forms {
            None => None,
            Some(Forms { norm, experts, router: (router, factor) }) => Some(Normed {
                experts: Norm::load(loader, experts, hidden, norm)?,
                router: Norm::by(loader.vector(router, hidden)?, norm),
                factor: Attributes::new().with("factor", *factor),
            }),
        };
        let expert_scale = plan.expert_scale.map(|name| loader.vector(&format!("{block}.{name}"), plan.count));
        let expert_scale = expert_scale.transpose()?;
        let router = loader.linear(&format!("{block}.{router}"), plan.count, hidden, plan.router_bias)?;
        let choice_bias = match plan.choice_bias {
            None => None,
            Some(ChoiceBias { name, is_matrix }) => {
                let shape = [1, plan.count];
                let mut bias = loader.constant(&format!("{block}.{name}"), &shape[usize::from(!is_matrix)..])?;
                bias.reshape(&[plan.count]);
                Some(bias)
            }
        };
        let experts = match experts {
            ExpertNames::Each => Mlp::load_each(loader, &format!("{block}.experts"), plan.count, &plan.expert)?,
            ExpertNames::Stacked(stacked) => Mlp::load_stacked(loader, &stacked, plan.count, &plan.expert)?,
        };
        let latent = match plan.latent {
            None => None,
            Some(Latent { names: [narrow, widen], bias, .. }) => {
                let width = plan.expert.hidden;
                let narrow = loader.linear(&format!("{block}.{narrow}"), width, hidden, bias)?;
                Some([narrow, loader.linear(&format!("{block}.{widen}"), hidden, width, bias)?])
            }
        };
        let shared = match plan.shared.as_deref() {
            None => None,
            Some(Shared { mlp, name, gate }) => {
                let prefix = name.map_or(String::new(), |name| format!("{block}.{name}."));
                // They read every row of a step, as layers do that stand alone.
                loader.weights.adapts = true;
                let mlp = Mlp::load_as(loader, &prefix, mlp)?;
                loader.weights.adapts = false;
                let gate = gate.map(|gate| loader.linear(&format!("{block}.{gate}"), 1, hidden, false)).transpose()?;
                Some(SharedExperts { mlp, gate })
            }
        };
        let ones = Tensor::new(vec![1f32; plan.chosen], &[1, plan.chosen])?;
        Ok(Moe { plan: plan.clone(), forms, expert_scale, ones, router, choice_bias, experts, latent, shared })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.router.move_to(cpu, device)?;
        self.ones = Backend::upload(device, self.ones.view())?;
        if let Some(bias) = &mut self.choice_bias {
            *bias = Backend::upload(device, bias.view())?;
        }
        if let Some(Normed { experts, router, .. }) = &mut self.forms {
            experts.move_to(device)?;
            router.move_to(device)?;
        }
        self.expert_scale.as_mut().map_or(Ok(()), |scale| scale.move_to(device))?;
        self.experts.move_to(cpu, device)?;
        self.latent.iter_mut().flatten().try_for_each(|linear| linear.move_to(cpu, device))?;
        self.shared.as_mut().map_or(Ok(()), |shared| shared.move_to(cpu, device))
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        _state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (chosen, n, choices) = (self.plan.chosen, pass.step.rows(), pass.inputs.choices.as_ref());
        let forms = self.forms.as_ref().map(|forms| forms.forward(pass, a)).transpose()?;
        let [a, of_router] = forms.as_ref().map_or([a; 2], |[a, of_router]| [a, of_router]);
        let mut logits = self.router.apply(pass, of_router.view(), DType::Fp32)?;
        pass.see("router", &mut logits)?;
        let mut weight = pass.empty(DType::Fp32, &[n, chosen])?;
        let mut choice = self.choose(pass, &logits, &mut weight)?;
        let mut experts = Vec::new();
        if choices.is_none() || pass.hook.probe.is_some() {
            experts = pass.machine.read_index(&choice)?;
            if pass.hook.see_indices(pass.layer, "experts", pass.step, &mut experts)? {
                let what = IndexOf { op: "experts", limit: self.plan.count, distinct: false };
                choice = pass.machine.index(what, experts.clone(), Some(choice))?;
            }
        }
        let mut before = None;
        if let Some(scale) = &self.expert_scale {
            let product = self.scale(pass, scale, &choice, &weight)?;
            before = Some(std::mem::replace(&mut weight, product));
        }
        pass.see("expert_weights", &mut weight)?;

        let low = self.latent.as_ref().map(|[narrow, _]| narrow.apply(pass, a.view(), pass.dtype)).transpose()?;
        // Where weights are of what experts read, each choice has a row of its own, and all outputs a weight of 1.
        let weighed = match self.plan.weighs {
            Weighs::Outputs => None,
            Weighs::Inputs => Some((self.weigh(pass, a, &weight)?, rows(pass, &self.ones, &weight)?)),
        };
        let (read, every, of_outputs) = match &weighed {
            Some((weighed, ones)) => (weighed, 1, ones),
            None => (low.as_ref().unwrap_or(a), chosen, &weight),
        };
        let mut made = pass.empty(DType::Fp32, &[n * chosen, read.shape()[1]])?;
        let (places, kept);
        let places = match choices {
            Some(choices) => {
                self.experts.apply_chosen(pass, (read, every), &choice, &mut made)?;
                kept = None;
                choices.view(&[n, chosen])?
            }
            None => {
                (places, kept) = self.apply_by_expert(pass, &experts, (read, every), &mut made)?;
                TensorRef::new(&places, &[n, chosen])?
            }
        };
        let (mut inputs, none) =
            (vec![("x", made.view()), ("row", places), ("weight", of_outputs.view())], Attributes::new());
        let (added, of_shared) = self.shared.as_ref().map(|shared| shared.forward(pass, a)).transpose()?.unzip();
        let mut sum = None;
        if let Some([_, widen]) = &self.latent {
            let mut low = pass.empty(pass.dtype, &[n, read.shape()[1]])?;
            pass.op("combine", &none, &inputs, [("y", low.view_mut())])?;
            match &added {
                None => widen.apply_to(pass, 0, low.view(), y.view_mut())?,
                Some(added) => {
                    let wide = widen.apply(pass, low.view(), DType::Fp32)?;
                    pass.op("add", &none, &[("a", wide.view()), ("b", added.view())], [("y", y.view_mut())])?;
                }
            }
            sum = Some(low);
        } else {
            inputs.extend(added.as_ref().map(|added| ("shared", added.view())));
            pass.op("combine", &none, &inputs, [("y", y.view_mut())])?;
        }
        Ok(kept.map(|(gathered, by_expert)| {
            let (latent, shared) = (sum, of_shared.flatten());
            Saved { logits, experts, weight, gathered, made, by_expert, latent, shared, forms, before }
        }))
    }

    /// From the router's logits: the experts of each row, and their weights.
    fn choose(&self, pass: &mut Pass, logits: &Tensor, weight: &mut Tensor) -> Result<Index, ModelError> {
        let (route, bias) = (self.plan.route(logits.shape()[0]), self.choice_bias.as_ref());
        let own = pass.machine.route(&route, logits, bias, None, weight)?;
        let Some(experts) = &mut pass.hook.experts else { return Ok(own) };
        match experts.choose(pass.layer, &pass.machine.read_index(&own)?) {
            None => Ok(own),
            Some(instead) => pass.machine.route(&route, logits, bias, Some(&instead), weight),
        }
    }

    /// Of each choice a row of `a[n,hidden]` times its weight, as products read it: `[n * K,hidden]`.
    fn weigh(&self, pass: &mut Pass, a: &Tensor, weight: &Tensor) -> Result<Tensor, ModelError> {
        let wide = self.by_choice(pass, a)?;
        let (count, mut weighed) = (wide.shape()[0], pass.empty(pass.dtype, wide.shape())?);
        let own: Vec<i32>;
        let row = match &pass.inputs.choices {
            Some(choices) => choices.view(&[count, 1])?,
            None => {
                own = (0..count as i32).collect();
                TensorRef::new(&own, &[count, 1])?
            }
        };
        let inputs = [("x", wide.view()), ("row", row), ("weight", weight.view_as(&[count, 1])?)];
        pass.op("combine", &Attributes::new(), &inputs, [("y", weighed.view_mut())])?;
        Ok(weighed)
    }

    /// The weight of each choice times the factor of its expert, `[n,K]`.
    fn scale(&self, pass: &mut Pass, scale: &Vector, choice: &Index, weight: &Tensor) -> Result<Tensor, ModelError> {
        let (size, mut product) = ([weight.shape()[0] * self.plan.chosen, 1], pass.empty(DType::Fp32, weight.shape())?);
        let inputs = [
            ("x", scale.w.view_as(&[self.plan.count, 1])?),
            ("row", choice.view(&size)?),
            ("weight", weight.view_as(&size)?),
        ];
        pass.op("combine", &Attributes::new(), &inputs, [("y", product.view_mut_as(&size)?)])?;
        Ok(product)
    }

    /// From that of weights times the factors of their experts, `dweight[n,K]`: that of the weights, in its place.
    fn scale_backward(
        &self,
        back: &mut Backward,
        (scale, before): (&Vector, &Tensor),
        experts: &[i32],
        dweight: &mut Tensor,
    ) -> Result<(), ModelError> {
        let (size, f32) = ([experts.len(), 1], DType::Fp32);
        let (mut deach, mut dbefore) = (back.pass.empty(f32, &size)?, back.pass.empty(f32, &size)?);
        let own: Vec<i32> = (0..experts.len() as i32).collect();
        let factors = scale.w.as_slice::<f32>().expect("it is f32, and on the host");
        let each: Vec<f32> = experts.iter().map(|&expert| factors[expert as usize]).collect();
        let inputs = [
            ("x", TensorRef::new(&each, &size)?),
            ("row", TensorRef::new(&own, &size)?),
            ("weight", before.view_as(&size)?),
            ("dy", dweight.view_as(&size)?),
        ];
        let outputs = [("dx", deach.view_mut()), ("dweight", dbefore.view_mut())];
        back.pass.op("combine_backward", &Attributes::new(), &inputs, outputs)?;
        if !back.sums.frozen {
            let mask = back.mask_of_rows(self.plan.chosen);
            let (dw, rows) = back.sums.table(Of::table(&scale.name), 1, experts)?;
            let deach = deach.as_slice::<f32>().expect("it is f32, and on the host");
            embedding_dw(back.cpu, 1, deach, &rows, Some(&mask), dw)?;
        }
        dbefore.reshape(dweight.shape());
        *dweight = dbefore;
        Ok(())
    }

    /// The rows of a in f32, each as often as a token has experts.
    fn by_choice(&self, pass: &mut Pass, a: &Tensor) -> Result<Tensor, ModelError> {
        let size = [a.shape()[0] * self.plan.chosen, a.shape()[1]];
        let (mut each, mut wide) = (pass.empty(a.dtype(), &size)?, pass.empty(DType::Fp32, &size)?);
        let from = Part { every: self.plan.chosen, ..Part::whole(size[1]) };
        pass.machine.copy_rows(size, (a, from), (&mut each, Part::whole(size[1])))?;
        pass.round(&each, &mut wide)?;
        Ok(wide)
    }

    /// Every expert's product with the rows of x that chose it, each of which so many choices one after the other read, one
    /// expert's behind the other's: which row each choice has, and what a reverse pass reads. `experts` are the choices `[n,K]`.
    fn apply_by_expert(
        &self,
        pass: &mut Pass,
        experts: &[i32],
        (a, every): (&Tensor, usize),
        made: &mut Tensor,
    ) -> Result<(Vec<i32>, Option<ByExpert>), ModelError> {
        let (n, hidden) = (a.shape()[0], a.shape()[1]);
        let (order, rows) = by_expert(experts);
        let tokens = order.iter().map(|&choice| (choice / every) as i32).collect();
        let tokens = pass.machine.index(IndexOf { op: "experts", limit: n, distinct: false }, tokens, None)?;
        let mut gathered = pass.empty(pass.dtype, &[order.len(), hidden])?;
        let from = Part { rows: Some(&tokens), ..Part::whole(hidden) };
        pass.machine.copy_rows([order.len(), hidden], (a, from), (&mut gathered, Part::whole(hidden)))?;
        let (mut first, mut saved) = (0, Vec::new());
        for choices in order.chunk_by(|&a, &b| experts[a] == experts[b]) {
            let (expert, part) = (experts[choices[0]] as usize, first..first + choices.len());
            saved.extend(self.experts.apply_to(pass, expert, gathered.rows(part.clone()), made.rows_mut(part))?);
            first += choices.len();
        }
        Ok((rows, pass.keeps.then_some((gathered, saved))))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (chosen, mask, f32) = (self.plan.chosen, back.mask, DType::Fp32);
        let Saved { logits, experts, weight, gathered, made, by_expert: of_experts, latent, shared, forms, before } =
            saved;
        let x = a;
        let [a, of_router] = forms.as_ref().map_or([a; 2], |[a, of_router]| [a, of_router]);
        let from_shared = match (&self.shared, shared) {
            (Some(shared), Some(saved)) => Some(shared.backward(back, a, saved, dy)?),
            _ => None,
        };
        let (order, rows) = by_expert(&experts);
        let mut rows = Tensor::new(rows, weight.shape())?;
        let ones = Tensor::new(vec![1f32; experts.len()], weight.shape())?;
        let of_outputs = if self.plan.weighs == Weighs::Inputs { &ones } else { &weight };

        let dlow = match (&self.latent, &latent) {
            (Some([_, widen]), Some(sum)) => Some(widen.backward(back, 0, sum.view(), dy.view(), mask, f32)?),
            _ => None,
        };
        let dy = dlow.as_ref().unwrap_or(dy);
        let (mut dmade, mut dweight) = (back.pass.empty(f32, made.shape())?, back.pass.empty(f32, weight.shape())?);
        let inputs = [("x", made.view()), ("row", rows.view()), ("weight", of_outputs.view()), ("dy", dy.view())];
        let outputs = [("dx", dmade.view_mut()), ("dweight", dweight.view_mut())];
        back.pass.op("combine_backward", &Attributes::new(), &inputs, outputs)?;

        // Of an expert the tokens are those that chose it.
        let mut dgathered = back.pass.empty(f32, gathered.shape())?;
        let mask_of_rows: Vec<i32> = order.iter().map(|&choice| mask[choice / chosen]).collect();
        let mut first = 0;
        for (choices, saved) in order.chunk_by(|&a, &b| experts[a] == experts[b]).zip(of_experts) {
            let part = first..first + choices.len();
            let (expert, mask) = (experts[choices[0]] as usize, &mask_of_rows[part.clone()]);
            let (x, dy) = (gathered.rows(part.clone()), dmade.rows(part.clone()));
            let dx = self.experts.backward_of(back, expert, x, saved, dy, mask)?;
            first = part.end;
            back.write_rows(&dx, &mut dgathered, part.start)?;
        }
        if self.plan.weighs == Weighs::Inputs {
            (dgathered, rows) = self.weigh_backward(back, a, (&weight, &mut dweight), (&dgathered, rows))?;
        }
        back.see("dexpert_weights", &mut dweight)?;
        if let (Some(scale), Some(before)) = (&self.expert_scale, &before) {
            self.scale_backward(back, (scale, before), &experts, &mut dweight)?;
        }
        let mut from_experts = back.pass.empty(f32, dy.shape())?;
        let mut inputs = vec![("x", dgathered.view()), ("row", rows.view()), ("weight", ones.view())];
        if self.latent.is_none() {
            inputs.extend(from_shared.as_ref().map(|shared| ("shared", shared.view())));
        }
        back.pass.op("combine", &Attributes::new(), &inputs, [("y", from_experts.view_mut())])?;
        if let Some([narrow, _]) = &self.latent {
            from_experts = narrow.backward(back, 0, a.view(), from_experts.view(), mask, f32)?;
            if let Some(shared) = from_shared {
                from_experts = back.sum(from_experts, shared)?;
            }
        }

        let mut dlogits = self.route_backward(back, &logits, &experts, &dweight)?;
        back.see("drouter", &mut dlogits)?;
        let from_router = self.router.backward(back, 0, of_router.view(), dlogits.view(), mask, f32)?;
        match &self.forms {
            None => back.sum(from_router, from_experts),
            Some(forms) => forms.backward(back, x, [from_experts, from_router]),
        }
    }

    /// From that of what experts read, one's behind the other's, where `places[n,K]` says: that of what was weighed, in the order of
    /// choices, where it stands, and `dweight[n,K]`.
    fn weigh_backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        (weight, dweight): (&Tensor, &mut Tensor),
        (dread, places): (&Tensor, Tensor),
    ) -> Result<(Tensor, Tensor), ModelError> {
        let wide = self.by_choice(&mut back.pass, a)?;
        let [count, hidden] = [wide.shape()[0], wide.shape()[1]];
        let (mut dweighed, mut dx) =
            (back.pass.empty(DType::Fp32, wide.shape())?, back.pass.empty(DType::Fp32, wide.shape())?);
        let order = Index::Host(places.as_slice::<i32>().expect("it is on the host").to_vec());
        let from = Part { rows: Some(&order), ..Part::whole(hidden) };
        back.pass.machine.copy_rows([count, hidden], (dread, from), (&mut dweighed, Part::whole(hidden)))?;
        let own = Tensor::new((0..count as i32).collect(), &[count, 1])?;
        let each = [count, 1];
        let inputs =
            [("x", wide.view()), ("row", own.view()), ("weight", weight.view_as(&each)?), ("dy", dweighed.view())];
        let outputs = [("dx", dx.view_mut()), ("dweight", dweight.view_mut_as(&each)?)];
        back.pass.op("combine_backward", &Attributes::new(), &inputs, outputs)?;
        let mut own = own;
        own.reshape(places.shape());
        Ok((dx, own))
    }

    /// From `dweight[n,K]` of the chosen: that of the router's logits.
    fn route_backward(
        &self,
        back: &mut Backward,
        logits: &Tensor,
        experts: &[i32],
        dweight: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Plan { count, chosen, scoring, normalise, scale, .. } = self.plan;
        let n = logits.shape()[0];
        let (mut rank, mut spread) = (vec![-1; n * count], vec![0f32; n * count]);
        let dweight = dweight.as_slice::<f32>().expect("it is f32, and on the host");
        for (choice, (&expert, &dweight)) in experts.iter().zip(dweight).enumerate() {
            let place = choice / chosen * count + expert as usize;
            (rank[place], spread[place]) = ((choice % chosen) as i32, dweight);
        }
        let (rank, spread) = (Tensor::new(rank, &[n, count])?, Tensor::new(spread, &[n, count])?);
        let attributes = match scoring {
            Scoring::Softmax => Attributes::new().with("scoring", "softmax"),
            Scoring::Sigmoid => Attributes::new().with("scoring", "sigmoid"),
            Scoring::SparseMixer { jitter } => Attributes::new().with("scoring", "sparsemixer").with("jitter", jitter),
        };
        let attributes = attributes.with("chosen", chosen).with("normalise", normalise).with("scale", scale);
        let mut dlogits = back.pass.empty(DType::Fp32, logits.shape())?;
        let inputs = [("logits", logits.view()), ("rank", rank.view()), ("dweight", spread.view())];
        back.pass.op("route_backward", &attributes, &inputs, [("dlogits", dlogits.view_mut())])?;
        Ok(dlogits)
    }
}

impl Normed {
    /// From the residual stream `x[n,hidden]` in f32: what experts read, and what the router does.
    fn forward(&self, pass: &mut Pass, x: &Tensor) -> Result<[Tensor; 2], ModelError> {
        let form = |pass: &Pass, dtype| pass.empty(dtype, x.shape());
        let (mut of_experts, mut of_router) = (form(pass, pass.dtype)?, form(pass, pass.dtype)?);
        self.experts.forward(pass, x, &mut of_experts)?;
        pass.see("experts_norm", &mut of_experts)?;
        let mut normed = form(pass, DType::Fp32)?;
        self.router.forward(pass, x, &mut normed)?;
        pass.op("scale", &self.factor, &[("x", normed.view())], [("y", of_router.view_mut())])?;
        pass.see("router_norm", &mut of_router)?;
        Ok([of_experts, of_router])
    }

    /// From those of the two forms in f32: that of x.
    fn backward(
        &self,
        back: &mut Backward,
        x: &Tensor,
        [of_experts, of_router]: [Tensor; 2],
    ) -> Result<Tensor, ModelError> {
        let of_router = back.pass.scaled(&self.factor, &of_router)?;
        let from_router = self.router.backward(back, x, &of_router)?;
        self.experts.add_backward(back, x, &of_experts, &from_router)
    }
}

impl SharedExperts {
    fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.mlp.move_to(cpu, device)?;
        self.gate.as_mut().map_or(Ok(()), |gate| gate.move_to(cpu, device))
    }

    /// From `a[n,hidden]`: what they add, `[n,hidden]` in f32.
    fn forward(&self, pass: &mut Pass, a: &Tensor) -> Result<(Tensor, Option<SavedShared>), ModelError> {
        let mut made = pass.empty(DType::Fp32, a.shape())?;
        let saved = self.mlp.apply_to(pass, 0, a.view(), made.view_mut())?;
        let Some(gate) = &self.gate else {
            return Ok((made, saved.map(|mlp| SavedShared { mlp, gated: None })));
        };
        let mut logits = gate.apply(pass, a.view(), DType::Fp32)?;
        pass.see("shared_gate", &mut logits)?;
        let mut y = pass.empty(DType::Fp32, made.shape())?;
        let inputs = [("gate", logits.view()), ("x", made.view())];
        pass.op("sigmoid_mul", &Attributes::new(), &inputs, [("y", y.view_mut())])?;
        Ok((y, saved.map(|mlp| SavedShared { mlp, gated: Some((logits, made)) })))
    }

    /// From `dy[n,hidden]` in f32 of what they add: that of a, in f32.
    fn backward(&self, back: &mut Backward, a: &Tensor, saved: SavedShared, dy: &Tensor) -> Result<Tensor, ModelError> {
        let SavedShared { mlp, gated } = saved;
        let (Some(gate), Some((logits, made))) = (&self.gate, gated) else {
            return self.mlp.backward(back, a, mlp, dy);
        };
        let (mut dgate, mut dmade) =
            (back.pass.empty(DType::Fp32, logits.shape())?, back.pass.empty(DType::Fp32, made.shape())?);
        let inputs = [("gate", logits.view()), ("x", made.view()), ("dy", dy.view())];
        let outputs = [("dgate", dgate.view_mut()), ("dx", dmade.view_mut())];
        back.pass.op("sigmoid_mul_backward", &Attributes::new(), &inputs, outputs)?;
        back.see("dshared_gate", &mut dgate)?;
        let from_mlp = self.mlp.backward(back, a, mlp, &dmade)?;
        let from_gate = gate.backward(back, 0, a.view(), dgate.view(), back.mask, DType::Fp32)?;
        back.sum(from_mlp, from_gate)
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
