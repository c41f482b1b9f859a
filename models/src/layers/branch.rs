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
    /// What it reads.
    pub reads: Reads,
    /// The layer.
    pub layer: LayerPlan,
    /// Factors of what the first layer makes, and of what this one makes, where there are any.
    pub factors: Option<[f64; 2]>,
    /// The names of norms of what the first layer makes, and of what this one makes, without `.weight`, where there are any.
    pub behind: Option<[&'static str; 2]>,
}

/// What a layer beside another reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// What the first layer reads.
    Same,
    /// The residual stream behind a norm of this name, without `.weight`.
    Normed(&'static str),
    /// The residual stream itself, in f32; it has norms of its own.
    Stream,
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
    /// Works on an input of the block's own.
    PerLayerInput,
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
            Place::PerLayerInput => &Sites {
                norm: ["per_layer_norm", "dper_layer_norm"],
                made: ["per_layer", "dper_layer"],
                behind: "post_per_layer_norm",
                sum: ["per_layer_sum", "dper_layer_sum"],
                beside: "beside",
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

    /// Adds what the last branch made to x, where that is not there yet.
    pub fn add(&mut self, pass: &mut Pass) -> Result<(), ModelError> {
        if self.added_by.is_none() {
            return Ok(());
        }
        let Stream { x, y, sum, .. } = self;
        pass.op("add", &Attributes::new(), &[("a", x.view()), ("b", y.view())], [("y", sum.view_mut())])?;
        swap(x, sum);
        self.see_sum(pass)
    }

    /// The same, and multiplies the sum.
    pub fn multiply(&mut self, pass: &mut Pass, factor: &Attributes) -> Result<(), ModelError> {
        self.add(pass)?;
        let Stream { x, sum, .. } = self;
        pass.op("scale", factor, &[("x", x.view())], [("y", sum.view_mut())])?;
        swap(x, sum);
        pass.see("block_factor", x)
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
                self.add(pass)?;
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
    /// Whether it reads the stream itself.
    of_stream: bool,
    layer: Layer,
    factors: Option<[Attributes; 2]>,
    behind: Option<[Norm; 2]>,
}

/// What a reverse pass reads of it.
struct SavedBeside {
    /// The form of the stream that it alone read.
    own: Option<Tensor>,
    layer: LayerSaved,
    /// What both layers made, where norms read it.
    made: Option<[Tensor; 2]>,
}

/// What a reverse pass reads.
pub(crate) struct Saved {
    ahead: Option<shared::Saved>,
    /// The residual stream, with what stands ahead, and the form of it that the layer read.
    x: Tensor,
    a: Tensor,
    layer: LayerSaved,
    beside: Option<SavedBeside>,
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
        self.beside.as_mut().map_or(Ok(()), |beside| beside.move_to(cpu, device))?;
        [&mut self.before, &mut self.behind].into_iter().flatten().try_for_each(|norm| norm.move_to(device))
    }

    /// Its layers.
    fn layers(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.layer).chain(self.beside.iter().map(|beside| &beside.layer))
    }

    /// The block whose keys and values its first layer reads, where these are not its own.
    pub fn lender(&self) -> Option<usize> {
        match &self.layer {
            Layer::Attention(attention) => attention.lender(),
            _ => None,
        }
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
            Some(beside) => beside.forward(pass, &mut states[1], [&*x, &*a], sites.beside, [&mut *y, &mut *sum])?,
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
        let beside = self.beside.as_ref().zip(beside);
        let [first, second] = match &beside {
            Some((beside, saved)) => beside.backward(back, saved.made.as_ref(), dy)?,
            None => [None, None],
        };
        let mut da = self.layer.backward(back, &a, layer, first.as_ref().unwrap_or(dy))?;
        // Of the layer beside it, where that reads another form of the stream, and the norm before that.
        let mut other = None;
        if let Some((Second { before, of_stream, layer, .. }, SavedBeside { own, layer: saved, .. })) = beside {
            let read = if *of_stream { &x } else { own.as_ref().unwrap_or(&a) };
            let mut db = layer.backward(back, read, saved, second.as_ref().unwrap_or(dy))?;
            if before.is_some() {
                back.see(BESIDE_NORM[1], &mut db)?;
            }
            match before.is_some() || *of_stream {
                true => other = Some((before, db)),
                false => da = back.sum(&da, &db)?,
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
            Some((Some(norm), db)) => norm.add_backward(back, &x, &db, &dx),
            Some((None, db)) => back.sum(&dx, &db),
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

/// Behind norms of what the two made.
const BESIDE_BEHIND: [&str; 2] = ["post_first_norm", "post_beside_norm"];

impl Second {
    fn load(loader: &mut Loader, plan: &Beside, c: &Config) -> Result<Second, ModelError> {
        let mut norm = |name| Norm::load(loader, name, c.hidden, &c.norms);
        let before = match plan.reads {
            Reads::Normed(name) => Some(norm(name)?),
            Reads::Same | Reads::Stream => None,
        };
        let behind = match plan.behind {
            Some([first, own]) => Some([norm(first)?, norm(own)?]),
            None => None,
        };
        let factors = plan.factors.map(|factors| factors.map(|factor| Attributes::new().with("factor", factor)));
        let of_stream = plan.reads == Reads::Stream;
        Ok(Second { before, of_stream, layer: Layer::load(loader, &plan.layer)?, factors, behind })
    }

    fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.layer.move_to(cpu, device)?;
        self.before.iter_mut().chain(self.behind.iter_mut().flatten()).try_for_each(|norm| norm.move_to(device))
    }

    /// What it makes of the stream x, whose form for the first layer is a, is added to `y`, what that made, with `sum` as room. What a
    /// reverse pass reads of it, where one will follow.
    fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        [x, a]: [&Tensor; 2],
        site: &'static str,
        [y, sum]: [&mut Tensor; 2],
    ) -> Result<Option<SavedBeside>, ModelError> {
        let mut own = None;
        if let Some(norm) = &self.before {
            let mut normed = pass.room("beside_norm", pass.dtype, x.shape())?;
            norm.forward(pass, x, &mut normed)?;
            pass.see(BESIDE_NORM[0], &mut normed)?;
            own = Some(normed);
        }
        let mut made = pass.room("beside", DType::Fp32, x.shape())?;
        let read = if self.of_stream { x } else { own.as_ref().unwrap_or(a) };
        let layer = self.layer.forward(pass, state, read, &mut made)?;
        pass.see(site, &mut made)?;
        if let Some([first, own]) = &self.factors {
            for (made, factor) in [(&mut *y, first), (&mut made, own)] {
                pass.op("scale", factor, &[("x", made.view())], [("y", sum.view_mut())])?;
                swap(made, sum);
            }
        }
        let mut before = None;
        if let Some(norms) = &self.behind {
            before = pass.kept([&*y, &made])?;
            for ((made, norm), site) in [&mut *y, &mut made].into_iter().zip(norms).zip(BESIDE_BEHIND) {
                norm.forward(pass, made, sum)?;
                swap(made, sum);
                pass.see(site, made)?;
            }
        }
        let inputs = [("a", y.view()), ("b", made.view())];
        pass.op("add", &Attributes::new(), &inputs, [("y", sum.view_mut())])?;
        swap(y, sum);
        pass.leave([("beside", made)]);
        if let Some(layer) = layer {
            return Ok(Some(SavedBeside { own, layer, made: before }));
        }
        if let Some(own) = own {
            pass.leave([("beside_norm", own)]);
        }
        Ok(None)
    }

    /// From `dy` of the sum: that of what each of the two layers made, where it is another.
    fn backward(
        &self,
        back: &mut Backward,
        made: Option<&[Tensor; 2]>,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; 2], ModelError> {
        let mut of_both = [None, None];
        for (i, of_one) in of_both.iter_mut().enumerate() {
            if let (Some(norms), Some(made)) = (&self.behind, made) {
                *of_one = Some(norms[i].backward(back, &made[i], dy)?);
            }
            if let Some(factors) = &self.factors {
                *of_one = Some(back.pass.scaled(&factors[i], of_one.as_ref().unwrap_or(dy))?);
            }
        }
        Ok(of_both)
    }
}
