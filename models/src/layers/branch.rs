//! A residual branch: a layer between norms, whose output is added to the residual stream. A block is one, or two. A second
//! layer may stand beside the first: both read the stream as it enters, and what they make is added to it as one.

use super::loader::Loader;
use super::norm::Norm;
use super::shared::{self, Ahead, Shared};
use super::{Layer, LayerPlan, Saved as LayerSaved};
use crate::backward::Backward;
use crate::pass::Pass;
use crate::state::{Kind, LayerState};
use crate::{Config, ModelError};
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Cpu, DType, Tensor};
use std::mem::swap;

/// What a branch is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Its place in the block.
    pub place: Place,
    /// The name of the norm before the layer, without `.weight`; `None` where the layer reads the stream as it is.
    pub before: Option<&'static str>,
    /// The layer.
    pub layer: LayerPlan,
    /// The name of the norm behind the layer, where there is one.
    pub behind: Option<&'static str>,
    /// Factor of what is added to the residual stream.
    pub factor: Option<f64>,
    /// A layer beside the first.
    pub beside: Option<Beside>,
    /// A use of a shared block, whose output is added to what the norm before the layer reads, and to nothing else.
    pub ahead: Option<shared::Use>,
}

impl Plan {
    /// A layer behind a norm: `x + layer(norm(x))`.
    pub(crate) fn normed(place: Place, before: &'static str, layer: LayerPlan) -> Plan {
        Plan { place, before: Some(before), layer, behind: None, factor: None, beside: None, ahead: None }
    }

    /// Its layers.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &LayerPlan> {
        std::iter::once(&self.layer).chain(self.beside.iter().map(|beside| &beside.layer))
    }
}

/// A layer of a branch beside its first one.
#[derive(Clone, Debug, PartialEq)]
pub struct Beside {
    /// The name of the norm before it, without `.weight`; `None` where it reads what the first layer reads.
    pub before: Option<&'static str>,
    /// The layer.
    pub layer: LayerPlan,
    /// Factors of what the first layer makes, and of what this one makes, where there are any.
    pub factors: Option<[f64; 2]>,
}

/// The place of a branch in its block, by which the sites of its values are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Mixes the tokens of a sequence.
    Mixer,
    /// Works on each token alone.
    Mlp,
    /// All of the block: a layer that mixes tokens, and beside it one that does not.
    Whole,
}

/// The names of the values of a branch, and of their gradients.
struct Sites {
    /// Behind the norm before the layer.
    norm: [&'static str; 2],
    /// What the layer makes.
    made: [&'static str; 2],
    /// Behind the norm behind it.
    behind: &'static str,
    /// The residual stream, once that is added.
    sum: [&'static str; 2],
    /// What a layer beside the first makes.
    beside: &'static str,
}

impl Place {
    fn sites(self) -> &'static Sites {
        match self {
            Place::Mixer => &Sites {
                norm: ["input_norm", "dinput_norm"],
                made: ["o", "do"],
                behind: "post_attention_norm",
                sum: ["attention_sum", "dattention_sum"],
                beside: "beside",
            },
            Place::Mlp => &Sites {
                norm: ["mlp_norm", "dmlp_norm"],
                made: ["mlp", "dmlp"],
                behind: "post_mlp_norm",
                sum: ["sum", "dsum"],
                beside: "beside",
            },
            Place::Whole => &Sites {
                norm: ["input_norm", "dinput_norm"],
                made: ["o", "do"],
                behind: "post_attention_norm",
                sum: ["sum", "dsum"],
                beside: "mlp",
            },
        }
    }
}

/// The rows of a step on their way through the branches.
pub(crate) struct Stream {
    /// The residual stream, `[n,hidden]` in f32.
    pub x: Tensor,
    /// What the last branch adds to it.
    pub y: Tensor,
    /// That branch: its block, and its place there.
    pub added_by: Option<(usize, Place)>,
    /// Room for the next of either.
    sum: Tensor,
    /// x as a layer reads it.
    pub a: Tensor,
}

impl Stream {
    /// One of `n` rows, of any elements.
    pub fn new(pass: &Pass, n: usize, hidden: usize) -> Result<Stream, ModelError> {
        let row = |dtype| pass.empty(dtype, &[n, hidden]);
        let (x, y, sum) = (row(DType::Fp32)?, row(DType::Fp32)?, row(DType::Fp32)?);
        Ok(Stream { x, y, added_by: None, sum, a: row(pass.dtype)? })
    }

    /// Room for the next x.
    pub fn room(&mut self) -> [&mut Tensor; 2] {
        [&mut self.x, &mut self.sum]
    }

    /// Adds what the last branch made to x.
    pub fn add(&mut self, pass: &mut Pass) -> Result<(), ModelError> {
        let Stream { x, y, sum, .. } = self;
        pass.op("add", &Attributes::new(), &[("a", x.view()), ("b", y.view())], [("y", sum.view_mut())])?;
        swap(x, sum);
        self.see_sum(pass)
    }

    /// The normed form of x in a.
    pub fn norm(&mut self, pass: &mut Pass, norm: &Norm) -> Result<(), ModelError> {
        norm.forward(pass, &self.x, &mut self.a)
    }

    /// Adds what the last branch made to x, where there was one, and makes the form of x in a that a layer reads.
    fn enter(&mut self, pass: &mut Pass, norm: Option<&Norm>) -> Result<(), ModelError> {
        match norm {
            Some(norm) if self.added_by.is_none() => self.norm(pass, norm),
            Some(norm) => {
                let Stream { x, y, sum, a, .. } = self;
                norm.add_forward(pass, [x, y], sum, a)?;
                swap(x, sum);
                self.see_sum(pass)
            }
            None => {
                if self.added_by.is_some() {
                    self.add(pass)?;
                }
                pass.round(&self.x, &mut self.a)
            }
        }
    }

    fn see_sum(&mut self, pass: &mut Pass) -> Result<(), ModelError> {
        let (layer, place) = self.added_by.take().expect("a branch has added to it");
        pass.see_at(Some(layer), place.sites().sum[0], &mut self.x)
    }
}

pub(crate) struct Branch {
    place: Place,
    ahead: Option<Ahead>,
    before: Option<Norm>,
    layer: Layer,
    beside: Option<Second>,
    behind: Option<Norm>,
    factor: Option<Attributes>,
}

/// A [`Beside`].
struct Second {
    before: Option<Norm>,
    layer: Layer,
    factors: Option<[Attributes; 2]>,
}

/// What a reverse pass reads.
pub(crate) struct Saved {
    ahead: Option<shared::Saved>,
    /// The residual stream, with what stands ahead, and the form of it that the layer read.
    x: Tensor,
    a: Tensor,
    layer: LayerSaved,
    /// What the layer beside it read, where that is not a, and saved.
    beside: Option<(Option<Tensor>, LayerSaved)>,
    /// What the layers made, where a norm reads it.
    made: Option<Tensor>,
}

impl Branch {
    pub fn load(loader: &mut Loader, plan: &Plan, c: &Config) -> Result<Branch, ModelError> {
        let ahead = plan.ahead.as_ref().map(|plan| {
            let shared = &c.shared[plan.of];
            Ahead::load(loader, plan, shared, c.shared_prefix(shared))
        });
        let ahead = ahead.transpose()?;
        let layer = Layer::load(loader, &plan.layer)?;
        let mut norm = |name: Option<&str>| name.map(|name| Norm::load(loader, name, c.hidden, &c.norms)).transpose();
        let factor = plan.factor.map(|factor| Attributes::new().with("factor", factor));
        let (before, behind) = (norm(plan.before)?, norm(plan.behind)?);
        let beside = plan.beside.as_ref().map(|beside| Second::load(loader, beside, c)).transpose()?;
        Ok(Branch { place: plan.place, ahead, before, layer, beside, behind, factor })
    }

    /// Takes the weights to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.move_to(cpu, device))?;
        self.layer.move_to(cpu, device)?;
        if let Some(beside) = &mut self.beside {
            beside.layer.move_to(cpu, device)?;
            beside.before.as_mut().map_or(Ok(()), |norm| norm.move_to(device))?;
        }
        [&mut self.before, &mut self.behind].into_iter().flatten().try_for_each(|norm| norm.move_to(device))
    }

    /// Its layers.
    fn layers(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.layer).chain(self.beside.iter().map(|beside| &beside.layer))
    }

    /// What each of its layers keeps of a sequence from step to step.
    pub fn states(&self) -> impl Iterator<Item = Kind> {
        self.ahead.iter().map(Ahead::state).chain(self.layers().map(Layer::state))
    }

    /// x, which takes what the branch before made, and in y what this one makes. `shared` are the shared blocks of the model.
    pub fn forward(
        &self,
        pass: &mut Pass,
        shared: &[Shared],
        states: &mut [LayerState],
        stream: &mut Stream,
    ) -> Result<Option<Saved>, ModelError> {
        let sites = self.place.sites();
        let (of_ahead, states) = states.split_at_mut(usize::from(self.ahead.is_some()));
        let mut ahead = None;
        match (&self.ahead, &self.before) {
            (Some(block), Some(norm)) => {
                if stream.added_by.is_some() {
                    stream.add(pass)?;
                }
                let Stream { x, y, sum, a, .. } = &mut *stream;
                ahead = block.forward(pass, shared, &mut of_ahead[0], x, y)?;
                norm.add_forward(pass, [x, y], sum, a)?;
            }
            (_, norm) => stream.enter(pass, norm.as_ref())?,
        }
        let Stream { x, y, sum, a, .. } = stream;
        pass.see(sites.norm[0], a)?;
        let entered = pass.kept([if self.ahead.is_some() { &*sum } else { &*x }, &*a])?;
        let layer = self.layer.forward(pass, &mut states[0], a, y)?;
        pass.see(sites.made[0], y)?;
        let beside = match &self.beside {
            Some(beside) => {
                if let Some([own, _]) = &beside.factors {
                    pass.op("scale", own, &[("x", y.view())], [("y", sum.view_mut())])?;
                    swap(y, sum);
                }
                let saved = beside.forward(pass, &mut states[1], [&*x, &*a], sites.beside, y, sum)?;
                swap(y, sum);
                saved
            }
            None => None,
        };
        let mut made = None;
        if let Some(norm) = &self.behind {
            made = pass.kept([&*y])?;
            norm.forward(pass, y, sum)?;
            swap(y, sum);
            pass.see(sites.behind, y)?;
        }
        if let Some(factor) = &self.factor {
            pass.op("scale", factor, &[("x", y.view())], [("y", sum.view_mut())])?;
            swap(y, sum);
        }
        stream.added_by = pass.layer.map(|layer| (layer, self.place));
        let made = made.map(|[made]| made);
        Ok(entered.zip(layer).map(|([x, a], layer)| Saved { ahead, x, a, layer, beside, made }))
    }

    /// From `dsum` of the stream with what this branch adds: that of the stream before.
    pub fn backward(
        &self,
        back: &mut Backward,
        shared: &[Shared],
        saved: Saved,
        dsum: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let (sites, Saved { ahead, x, a, layer, beside, made }) = (self.place.sites(), saved);
        let mut dmade = None;
        if let Some(factor) = &self.factor {
            dmade = Some(back.pass.scaled(factor, dsum)?);
        }
        if let (Some(norm), Some(made)) = (&self.behind, made) {
            dmade = Some(norm.backward(back, &made, dmade.as_ref().unwrap_or(dsum))?);
        }
        if let Some(dmade) = &mut dmade {
            back.see(sites.made[1], dmade)?;
        }
        let dy = dmade.as_ref().unwrap_or(dsum);
        let factors = self.beside.as_ref().and_then(|beside| beside.factors.as_ref());
        let scaled = factors.map(|[own, _]| back.pass.scaled(own, dy)).transpose()?;
        let mut da = self.layer.backward(back, &a, layer, scaled.as_ref().unwrap_or(dy))?;
        // Of the layer beside it, where that reads another form of the stream.
        let mut other = None;
        if let (Some(Second { before, layer, .. }), Some((own, saved))) = (&self.beside, beside) {
            let scaled = factors.map(|[_, own]| back.pass.scaled(own, dy)).transpose()?;
            let mut db = layer.backward(back, own.as_ref().unwrap_or(&a), saved, scaled.as_ref().unwrap_or(dy))?;
            match before {
                Some(norm) => {
                    back.see(BESIDE_NORM[1], &mut db)?;
                    other = Some((norm, db));
                }
                None => da = back.sum(&da, &db)?,
            }
        }
        back.see(sites.norm[1], &mut da)?;
        let dx = match (&self.before, self.ahead.as_ref().zip(ahead)) {
            (Some(norm), Some((block, saved))) => {
                let mut dahead = norm.backward(back, &x, &da)?;
                back.see("dshared", &mut dahead)?;
                let from_block = block.backward(back, shared, saved, &dahead)?;
                let dx = back.sum(&dahead, dsum)?;
                back.sum(dx, from_block)?
            }
            (Some(norm), None) => norm.add_backward(back, &x, &da, dsum)?,
            (None, _) => back.sum(&da, dsum)?,
        };
        match other {
            Some((norm, db)) => norm.add_backward(back, &x, &db, &dx),
            None => Ok(dx),
        }
    }

    /// The site of the gradient of the stream with what this branch adds.
    pub fn gradient_site(&self) -> &'static str {
        self.place.sites().sum[1]
    }
}

/// Behind a norm of its own before a layer beside another, and the gradient there.
const BESIDE_NORM: [&str; 2] = ["mlp_norm", "dmlp_norm"];

impl Second {
    fn load(loader: &mut Loader, plan: &Beside, c: &Config) -> Result<Second, ModelError> {
        let before = plan.before.map(|name| Norm::load(loader, name, c.hidden, &c.norms)).transpose()?;
        let factors = plan.factors.map(|factors| factors.map(|factor| Attributes::new().with("factor", factor)));
        Ok(Second { before, layer: Layer::load(loader, &plan.layer)?, factors })
    }

    /// What it makes of the stream x, whose form for the first layer is a, is added to `y`, what that made, in `sum`. What a reverse
    /// pass reads of it, where one will follow.
    fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        [x, a]: [&Tensor; 2],
        site: &'static str,
        y: &Tensor,
        sum: &mut Tensor,
    ) -> Result<Option<(Option<Tensor>, LayerSaved)>, ModelError> {
        let mut own = None;
        if let Some(norm) = &self.before {
            let mut normed = pass.room("beside_norm", pass.dtype, x.shape())?;
            norm.forward(pass, x, &mut normed)?;
            pass.see(BESIDE_NORM[0], &mut normed)?;
            own = Some(normed);
        }
        let mut made = pass.room("beside", DType::Fp32, x.shape())?;
        let saved = self.layer.forward(pass, state, own.as_ref().unwrap_or(a), &mut made)?;
        pass.see(site, &mut made)?;
        if let Some([_, own]) = &self.factors {
            pass.op("scale", own, &[("x", made.view())], [("y", sum.view_mut())])?;
            swap(&mut made, sum);
        }
        let inputs = [("a", y.view()), ("b", made.view())];
        pass.op("add", &Attributes::new(), &inputs, [("y", sum.view_mut())])?;
        pass.leave([("beside", made)]);
        if let Some(saved) = saved {
            return Ok(Some((own, saved)));
        }
        if let Some(own) = own {
            pass.leave([("beside_norm", own)]);
        }
        Ok(None)
    }
}
