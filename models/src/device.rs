//! The forward of every family on a device: the parts of [`crate::decoder`], in its order, over device memory.
//!
//! Weights are copied there once, keys and values never leave it, and of a step only its logits come back; where a layer is
//! a mixture and the step has several tokens of a sequence, the choice of experts as well, because the host cuts the products
//! by it. What a step is told (tokens,
//! positions, pages, angles) is written to buffers of its own before its first kernel, so that nothing but kernels lies
//! between.
//!
//! Steps that give one token to each of some sequences come again and again in the same form. The second of a form is
//! captured as a graph, which the later ones replay: its kernels read what the step before has left in those same buffers.
//! A form is how many sequences there are and how wide their table of pages is, a power of two; with the pages goes how far
//! attention is planned, so no length within them needs another plan. No bit depends on the plan.

use crate::config::{Activation, Config, Experts};
use crate::decoder::{Decoder, Feed, Layer, LayerMlp, Rows, Step, Steps, angles};
use crate::experts::{Mixture, Placed};
use crate::heads::{HeadProjections, LatentProjections, Projections, Turned, latent_norm};
use crate::kv_cache::{KvCache, Store, buffer};
use crate::linear::{Gated, Linear};
use crate::watch::Watch;
use crate::{ModelError, PageOrder};
use samebits_ops::device::{self, Buffer, Device, Graph, Indices, Part, Places, Rotations, Stored};
use samebits_ops::{Combine, Cpu, Gemm, PackedWeight, Qkv, Rope, embedding_packed};
use std::collections::HashMap;
use std::sync::Arc;

/// A decoder whose weights lie on a device.
pub(crate) struct OnDevice<A> {
    device: Device,
    weights: Arc<Weights<A>>,
}

struct Weights<A> {
    config: Config,
    /// `[V, hidden]`; `None` where it is the output projection.
    embed: Option<Buffer<A>>,
    layers: Vec<LayerThere<A>>,
    final_norm: Buffer<f32>,
    lm_head: LinearThere<A>,
}

struct LayerThere<A> {
    input_norm: Buffer<f32>,
    projections: ProjectionsThere<A>,
    o: LinearThere<A>,
    post_attention_norm: Option<Buffer<f32>>,
    mlp_norm: Buffer<f32>,
    mlp: MlpThere<A>,
    post_mlp_norm: Option<Buffer<f32>>,
}

enum ProjectionsThere<A> {
    Heads(Box<HeadsThere<A>>),
    Latent(Box<LatentThere<A>>),
}

struct HeadsThere<A> {
    q: TurnedThere<A>,
    k: TurnedThere<A>,
    v: LinearThere<A>,
}

struct TurnedThere<A> {
    rotated: LinearThere<A>,
    norm: Option<Buffer<f32>>,
    passed: Option<(LinearThere<A>, usize)>,
}

struct LatentThere<A> {
    q_down: Option<(LinearThere<A>, Buffer<f32>)>,
    q_plain: LinearThere<A>,
    q_rotated: LinearThere<A>,
    kv_down: LinearThere<A>,
    kv_norm: Buffer<f32>,
    k_rotated: LinearThere<A>,
    k_plain: LinearThere<A>,
    v: LinearThere<A>,
    /// Elements of a head that carry no position, and that are rotated.
    plain: usize,
    rotated: usize,
}

enum MlpThere<A> {
    Dense(Box<GatedThere<A>>),
    Sparse(Box<MixtureThere<A>>),
}

struct MixtureThere<A> {
    sizes: Experts,
    router: LinearThere<A>,
    choice_bias: Option<Buffer<f32>>,
    /// All of them, their matrices one behind the other.
    experts: GatedThere<A>,
    shared: Option<GatedThere<A>>,
}

struct GatedThere<A> {
    gate: LinearThere<A>,
    up: LinearThere<A>,
    down: LinearThere<A>,
    activation: Activation,
    width: usize,
}

/// One matrix `[n,k]`, or as many as there are experts.
struct LinearThere<A> {
    n: usize,
    k: usize,
    weight: Buffer<A>,
    bias: Option<Buffer<A>>,
}

/// Copies weights to a device.
struct Upload<'a> {
    cpu: &'a Cpu,
    device: &'a Device,
}

impl Upload<'_> {
    fn vector<T: Stored>(&self, host: &[T]) -> Result<Buffer<T>, ModelError> {
        Ok(self.device.upload("model", host)?)
    }

    fn optional<T: Stored>(&self, host: Option<&[T]>) -> Result<Option<Buffer<T>>, ModelError> {
        host.map(|host| self.vector(host)).transpose()
    }

    /// Packed matrices of one size, row-major again and one behind the other: their elements are what they were before they
    /// were packed.
    fn matrices<A: Stored>(&self, parts: &[(&PackedWeight, Option<&[A]>)]) -> Result<LinearThere<A>, ModelError> {
        let (n, k) = (parts[0].0.n(), parts[0].0.k());
        let mut rows: Vec<A> = buffer(&[parts.len(), n, k])?;
        let all: Vec<i32> = (0..n as i32).collect();
        for ((weight, _), rows) in parts.iter().zip(rows.chunks_exact_mut(n * k)) {
            embedding_packed(self.cpu, weight, &all, rows)?;
        }
        let biases: Vec<A> = parts.iter().flat_map(|(_, bias)| bias.unwrap_or_default()).copied().collect();
        let bias = if biases.is_empty() { None } else { Some(self.vector(&biases)?) };
        Ok(LinearThere { n, k, weight: self.vector(&rows)?, bias })
    }

    fn linear<A: Stored>(&self, linear: &Linear<A>) -> Result<LinearThere<A>, ModelError> {
        self.matrices(&[(&linear.weight, linear.bias.as_deref())])
    }

    fn turned<A: Stored>(&self, turned: &Turned<A>) -> Result<TurnedThere<A>, ModelError> {
        let passed = match &turned.passed {
            None => None,
            Some((passed, width)) => Some((self.linear(passed)?, *width)),
        };
        let norm = self.optional(turned.norm.as_deref())?;
        Ok(TurnedThere { rotated: self.linear(&turned.rotated)?, norm, passed })
    }

    fn heads<A: Stored>(&self, heads: &HeadProjections<A>) -> Result<ProjectionsThere<A>, ModelError> {
        let (q, k) = (self.turned(&heads.q)?, self.turned(&heads.k)?);
        Ok(ProjectionsThere::Heads(Box::new(HeadsThere { q, k, v: self.linear(&heads.v)? })))
    }

    fn latent<A: Stored>(&self, latent: &LatentProjections<A>) -> Result<ProjectionsThere<A>, ModelError> {
        let q_down = match &latent.q_down {
            None => None,
            Some((down, norm)) => Some((self.linear(down)?, self.vector(norm)?)),
        };
        Ok(ProjectionsThere::Latent(Box::new(LatentThere {
            q_down,
            q_plain: self.linear(&latent.q_plain)?,
            q_rotated: self.linear(&latent.q_rotated)?,
            kv_down: self.linear(&latent.kv_down)?,
            kv_norm: self.vector(&latent.kv_norm)?,
            k_rotated: self.linear(&latent.k_rotated)?,
            k_plain: self.linear(&latent.k_plain)?,
            v: self.linear(&latent.v)?,
            plain: latent.sizes.plain,
            rotated: latent.sizes.rotated,
        })))
    }

    /// One gated MLP, or all those of a mixture.
    fn gated<A: Stored>(&self, all: &[&Gated<A>]) -> Result<GatedThere<A>, ModelError> {
        let part = |part: fn(&Gated<A>) -> &Linear<A>| {
            let linears = all.iter().map(|gated| part(gated));
            self.matrices(&linears.map(|linear| (&linear.weight, linear.bias.as_deref())).collect::<Vec<_>>())
        };
        let (gate, up, down) = (part(|g| &g.gate)?, part(|g| &g.up)?, part(|g| &g.down)?);
        Ok(GatedThere { gate, up, down, activation: all[0].activation, width: all[0].width })
    }

    fn mixture<A: Stored>(&self, mixture: &Mixture<A>) -> Result<MlpThere<A>, ModelError> {
        Ok(MlpThere::Sparse(Box::new(MixtureThere {
            sizes: mixture.sizes,
            router: self.linear(&mixture.router)?,
            choice_bias: self.optional(mixture.choice_bias.as_deref())?,
            experts: self.gated(&mixture.experts.iter().collect::<Vec<_>>())?,
            shared: mixture.shared.as_ref().map(|shared| self.gated(&[shared])).transpose()?,
        })))
    }

    fn layer<A: Stored>(&self, layer: &Layer<A>) -> Result<LayerThere<A>, ModelError> {
        Ok(LayerThere {
            input_norm: self.vector(&layer.input_norm)?,
            projections: match &layer.projections {
                Projections::Heads(heads) => self.heads(heads)?,
                Projections::Latent(latent) => self.latent(latent)?,
            },
            o: self.linear(&layer.o)?,
            post_attention_norm: self.optional(layer.post_attention_norm.as_deref())?,
            mlp_norm: self.vector(&layer.mlp_norm)?,
            mlp: match &layer.mlp {
                LayerMlp::Dense(mlp) => MlpThere::Dense(Box::new(self.gated(&[mlp])?)),
                LayerMlp::Sparse(mixture) => self.mixture(mixture)?,
            },
            post_mlp_norm: self.optional(layer.post_mlp_norm.as_deref())?,
        })
    }
}

/// Keys and values on a device, and the forms of steps that were run over them.
pub(crate) struct Pages<A> {
    device: Device,
    /// Keys and values by layer, `[rows, width]` each.
    layers: Vec<[Buffer<A>; 2]>,
    widths: [usize; 2],
    rows: usize,
    /// By sequences and columns of the table of pages.
    forms: HashMap<[usize; 2], Form>,
}

impl<A: Stored> Store for Pages<A> {
    fn grow(&mut self, rows: usize) -> Result<(), ModelError> {
        // Graphs know the old buffers.
        self.forms.clear();
        for layer in &mut self.layers {
            for (side, width) in layer.iter_mut().zip(self.widths) {
                let mut larger = self.device.empty("kv cache", rows.saturating_mul(width))?;
                larger.copy_from(0, side, 0, self.rows * width)?;
                *side = larger;
            }
        }
        self.rows = rows;
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize, count: usize) -> Result<(), ModelError> {
        for layer in &mut self.layers {
            for (side, width) in layer.iter_mut().zip(self.widths) {
                side.copy_within(from * width, to * width, count * width)?;
            }
        }
        Ok(())
    }
}

/// What a step is told, on the device.
struct Told {
    tokens: Indices,
    /// Rows of the store that its keys and values go to.
    rows: Indices,
    places: Places,
    angles: Rotations,
    /// The rows that get logits, where not all do.
    last: Option<Indices>,
    /// The choices of experts one after the other, where each takes a product of its own.
    choices: Option<Indices>,
}

/// A form of steps with one token to each sequence.
struct Form {
    told: Told,
    /// Its kernels, and the logits they write; none before its second step.
    captured: Option<(Graph, Buffer<f32>)>,
}

/// More forms than this are forgotten together: each holds what its kernels use.
const MOST_FORMS: usize = 16;

impl<A: Stored> Steps for OnDevice<A> {
    type Store = Pages<A>;

    fn config(&self) -> &Config {
        &self.weights.config
    }

    fn cache(&self, page_size: usize, order: PageOrder) -> Result<KvCache<Pages<A>>, ModelError> {
        let c = self.config();
        let mut layers = Vec::new();
        for _ in 0..c.layers {
            layers.push([self.device.empty("kv cache", 0)?, self.device.empty("kv cache", 0)?]);
        }
        let widths = [c.k_width(), c.v_width()];
        let store = Pages { device: self.device.clone(), layers, widths, rows: 0, forms: HashMap::new() };
        Ok(KvCache::new(store, page_size, order))
    }

    fn step(
        &self,
        cpu: &Cpu,
        feeds: &[Feed],
        cache: &mut KvCache<Pages<A>>,
        rows: Rows,
        watch: &mut Watch,
    ) -> Result<Vec<f32>, ModelError> {
        if feeds.is_empty() {
            return Ok(Vec::new());
        }
        let (c, d) = (self.config(), &self.device);
        let (step, tokens) = Step::of(feeds, cache)?;
        let (n, page_size) = (step.rows(), cache.page_size());
        let pos = step.positions();
        let kv_len: Vec<i32> = feeds.iter().map(|feed| (cache.len(feed.sequence) + feed.tokens.len()) as i32).collect();
        let mut at = Vec::with_capacity(n);
        for (f, feed) in feeds.iter().enumerate() {
            let start = cache.len(feed.sequence);
            at.extend((start..).take(step.feed_rows(f).len()).map(|pos| cache.row(feed.sequence, pos) as i32));
        }
        let table = cache.table(feeds.iter().map(|feed| feed.sequence));
        let angles = angles(&c.rotary, cpu, &step, feeds, cache, &watch.positions(None, &step, &pos)?);

        // The same form for a while where every sequence gets one token.
        let single = n == feeds.len();
        let exact = table.len() / feeds.len();
        let columns = if single { exact.next_power_of_two() } else { exact };
        let table: Vec<i32> = table
            .chunks_exact(exact)
            .flat_map(|pages| pages.iter().copied().chain(std::iter::repeat_n(-1, columns - exact)))
            .collect();
        let shape = c.attention(feeds.len(), n, cache.rows(), 0);
        let q_start = step.q_start();
        let form = [n, columns];
        let known = if single { cache.store().forms.remove(&form) } else { None };
        let (mut told, captured, again) = match known {
            Some(Form { mut told, captured }) => {
                told.tokens.set(d, "embedding", &tokens)?;
                told.rows.set(d, "kv cache", &at)?;
                told.angles.fill(d, &angles)?;
                (told, captured, true)
            }
            None => {
                let most = q_start.windows(2).map(|two| (two[1] - two[0]) as usize).max().unwrap_or(0);
                let told = Told {
                    tokens: Indices::new(d, "embedding", &tokens, c.vocab)?,
                    rows: Indices::distinct(d, "kv cache", &at, cache.rows())?,
                    places: Places::paged(d, &shape, page_size, columns, most)?,
                    angles: Rotations::new(d, &angles)?,
                    last: None,
                    choices: self.choices(n, single)?,
                };
                (told, None, false)
            }
        };
        told.places.set(d, &shape, &q_start, &pos, &kv_len, &table)?;
        let step = match rows {
            Rows::Last if !single => {
                let (last, left) = step.last();
                let last: Vec<i32> = last.into_iter().map(|row| row as i32).collect();
                told.last = Some(Indices::new(d, "model", &last, n)?);
                Sites { all: step, logits: Some(left) }
            }
            _ => Sites { all: step, logits: None },
        };

        let captured = match captured {
            Some(captured) => Some(captured),
            // What a probe asks for is copied, and so is a choice that the host makes products of: a graph does not do that.
            None if again && watch.probe.is_none() && (c.experts.is_none() || told.choices.is_some()) => {
                let mut logits = None;
                let graph = d.capture(&mut || {
                    let run = self.run(&told, cache, &step, &mut Watch::default());
                    logits = Some(run.map_err(ModelError::into_op)?);
                    Ok(())
                })?;
                logits.map(|logits| (graph, logits))
            }
            None => None,
        };
        let mut found: Vec<f32> = buffer(&[step.with_logits().rows(), c.vocab])?;
        match &captured {
            Some((graph, logits)) => {
                d.replay(graph)?;
                logits.download(d, &mut found)?;
            }
            None => self.run(&told, cache, &step, watch)?.download(d, &mut found)?,
        }
        watch.see(None, "logits", step.with_logits(), &mut found)?;
        for feed in feeds {
            cache.advance(feed.sequence, feed.tokens.len());
        }
        if single {
            let forms = &mut cache.store().forms;
            if forms.len() >= MOST_FORMS {
                forms.clear();
            }
            forms.insert(form, Form { told, captured });
        }
        Ok(found)
    }
}

/// A step, and what is left of it where only some rows get logits.
struct Sites {
    all: Step,
    logits: Option<Step>,
}

impl Sites {
    fn with_logits(&self) -> &Step {
        self.logits.as_ref().unwrap_or(&self.all)
    }
}

impl<A: Stored> OnDevice<A> {
    /// Copies the weights of `decoder`.
    pub fn of(decoder: &Decoder<A>, cpu: &Cpu, device: &Device) -> Result<OnDevice<A>, ModelError> {
        let upload = Upload { cpu, device };
        let weights = Weights {
            config: decoder.config.clone(),
            embed: upload.optional(decoder.embed.as_deref())?,
            layers: decoder.layers.iter().map(|layer| upload.layer(layer)).collect::<Result<_, _>>()?,
            final_norm: upload.vector(&decoder.final_norm)?,
            lm_head: upload.matrices(&[(&decoder.lm_head, None)])?,
        };
        Ok(OnDevice { device: device.clone(), weights: Arc::new(weights) })
    }

    /// The same weights under the counters and the budget of `device`, a clone of their own.
    pub fn under(&self, device: &Device) -> OnDevice<A> {
        OnDevice { device: device.clone(), weights: self.weights.clone() }
    }

    /// The choices of experts where every sequence has one token: each is a product of its own. Matrices whose rows are no
    /// multiples of 16 bytes are left to the products of other steps.
    fn choices(&self, n: usize, single: bool) -> Result<Option<Indices>, ModelError> {
        let c = &self.weights.config;
        let Some(experts) = c.experts.filter(|_| single) else { return Ok(None) };
        if [c.hidden, experts.width].iter().any(|k| !(k * size_of::<A>()).is_multiple_of(16)) {
            return Ok(None);
        }
        let count = n * experts.chosen;
        let all: Vec<i32> = (0..count as i32).collect();
        Ok(Some(Indices::new(&self.device, "experts", &all, count)?))
    }

    /// The kernels of a step: logits `[rows, V]`.
    fn run(
        &self,
        told: &Told,
        cache: &mut KvCache<Pages<A>>,
        sites: &Sites,
        watch: &mut Watch,
    ) -> Result<Buffer<f32>, ModelError> {
        let Weights { config: c, embed, layers, final_norm, lm_head } = &*self.weights;
        let (d, step) = (&self.device, &sites.all);
        let n = step.rows();
        // Residual stream x, its normed form a, and what a block adds to it, y: [n, hidden].
        let (mut x, mut y) = (d.empty::<f32>("model", n * c.hidden)?, d.empty::<f32>("model", n * c.hidden)?);
        let mut sum = d.empty::<f32>("model", n * c.hidden)?;
        let mut a = d.empty::<A>("model", n * c.hidden)?;
        let mut heads = d.empty::<A>("model", n * c.q_heads * c.value_dim)?;
        let mut lse = d.empty::<f32>("model", n * c.q_heads)?;

        device::embedding_at(d, c.hidden, embed.as_ref().unwrap_or(&lm_head.weight), &told.tokens, &mut x)?;
        if let Some(factor) = c.embed_scale {
            device::scale(d, factor, &x, &mut sum)?;
            std::mem::swap(&mut x, &mut sum);
        }
        self.see(watch, None, "embed", step, &mut x)?;
        for (i, layer) in layers.iter().enumerate() {
            // Attention block. The layer before has left what it adds to x in y.
            if i == 0 {
                device::rms_norm(d, &c.norm(n), &x, &layer.input_norm, &mut a)?;
            } else {
                device::add_rms_norm(d, &c.norm(n), &x, &y, &layer.input_norm, &mut sum, &mut a)?;
                std::mem::swap(&mut x, &mut sum);
                self.see(watch, Some(i - 1), "sum", step, &mut x)?;
            }
            self.see(watch, Some(i), "input_norm", step, &mut a)?;
            let [mut q, mut k, mut v] = self.project(&layer.projections, n, &told.angles, &a)?;
            self.see(watch, Some(i), "q", step, &mut q)?;
            self.see(watch, Some(i), "k", step, &mut k)?;
            self.see(watch, Some(i), "v", step, &mut v)?;
            let (shape, [keys, values]) = (c.attention(step.feeds(), n, cache.rows(), i), &mut cache.store().layers[i]);
            let to = |width: usize| Part { rows: Some(&told.rows), ..Part::whole(width) };
            let [k_width, v_width] = [c.k_width(), c.v_width()];
            device::copy_rows(d, [n, k_width], (&k, Part::whole(k_width)), (keys, to(k_width)))?;
            device::copy_rows(d, [n, v_width], (&v, Part::whole(v_width)), (values, to(v_width)))?;
            if watch.probe.is_some() {
                let positions = step.positions();
                if *watch.positions(Some(i), step, &positions)? != positions {
                    let why =
                        "a probe changed those of a layer, which a device holds for all layers; use the processor";
                    return Err(ModelError::input("positions", why));
                }
            }
            let qkv = Qkv { q: &q, k: keys, v: values };
            device::attention_at(d, &shape, &told.places, qkv, &mut heads, &mut lse)?;
            self.see(watch, Some(i), "attention", step, &mut heads)?;
            layer.o.apply_to(d, n, &heads, &mut y)?;
            self.see(watch, Some(i), "o", step, &mut y)?;
            if let Some(w) = &layer.post_attention_norm {
                device::rms_norm(d, &c.norm(n), &y, w, &mut sum)?;
                std::mem::swap(&mut y, &mut sum);
                self.see(watch, Some(i), "post_attention_norm", step, &mut y)?;
            }

            // MLP block.
            device::add_rms_norm(d, &c.norm(n), &x, &y, &layer.mlp_norm, &mut sum, &mut a)?;
            std::mem::swap(&mut x, &mut sum);
            self.see(watch, Some(i), "attention_sum", step, &mut x)?;
            self.see(watch, Some(i), "mlp_norm", step, &mut a)?;
            y = match &layer.mlp {
                MlpThere::Dense(mlp) => mlp.apply(d, n, &a)?,
                MlpThere::Sparse(mixture) => self.mixture(mixture, told, step, i, &a, watch)?,
            };
            self.see(watch, Some(i), "mlp", step, &mut y)?;
            if let Some(w) = &layer.post_mlp_norm {
                device::rms_norm(d, &c.norm(n), &y, w, &mut sum)?;
                std::mem::swap(&mut y, &mut sum);
                self.see(watch, Some(i), "post_mlp_norm", step, &mut y)?;
            }
        }
        device::add(d, &x, &y, &mut sum)?;
        self.see(watch, Some(c.layers - 1), "sum", step, &mut sum)?;

        let step = sites.with_logits();
        let n = step.rows();
        if let Some(last) = &told.last {
            x = d.empty("model", n * c.hidden)?;
            let from = Part { rows: Some(last), ..Part::whole(c.hidden) };
            device::copy_rows(d, [n, c.hidden], (&sum, from), (&mut x, Part::whole(c.hidden)))?;
            sum = x;
        }
        let mut a = d.empty::<A>("model", n * c.hidden)?;
        device::rms_norm(d, &c.norm(n), &sum, final_norm, &mut a)?;
        self.see(watch, None, "final_norm", step, &mut a)?;
        let logits: Buffer<f32> = lm_head.apply(d, n, &a)?;
        if c.logit_softcap > 0.0 {
            let mut capped = d.empty("model", n * c.vocab)?;
            device::softcap(d, c.logit_softcap, &logits, &mut capped)?;
            return Ok(capped);
        }
        Ok(logits)
    }

    /// Shows a site where somebody looks, and copies it back where that changed it; else nothing is copied.
    fn see<T: Stored>(
        &self,
        watch: &mut Watch,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &mut Buffer<T>,
    ) -> Result<(), ModelError> {
        if watch.probe.is_none() {
            return Ok(());
        }
        let mut host: Vec<T> = buffer(&[values.len()])?;
        values.download(&self.device, &mut host)?;
        if watch.see(layer, site, step, &mut host)? {
            values.fill(&self.device, &host)?;
        }
        Ok(())
    }

    /// `a[n,hidden]` to queries, keys and values.
    fn project(
        &self,
        projections: &ProjectionsThere<A>,
        n: usize,
        angles: &Rotations,
        a: &Buffer<A>,
    ) -> Result<[Buffer<A>; 3], ModelError> {
        let (c, d) = (&self.weights.config, &self.device);
        let latent = match projections {
            ProjectionsThere::Heads(heads) => {
                let q = heads.q.apply(d, c, n, c.q_heads, angles, a)?;
                return Ok([q, heads.k.apply(d, c, n, c.kv_heads, angles, a)?, heads.v.apply(d, n, a)?]);
            }
            ProjectionsThere::Latent(latent) => latent,
        };
        let norm = |x: &Buffer<f32>, w: &Buffer<f32>| -> Result<Buffer<A>, ModelError> {
            let mut y = d.empty("model", x.len())?;
            let shape = latent_norm(n, w.len());
            device::rms_norm(d, &shape, x, w, &mut y)?;
            Ok(y)
        };
        let turn = |x: &Buffer<f32>, heads: usize| -> Result<Buffer<A>, ModelError> {
            let mut y = d.empty("model", x.len())?;
            let shape = Rope { tokens: n, heads, dim: latent.rotated, pairing: c.pairing };
            device::rope(d, &shape, angles, x, &mut y)?;
            Ok(y)
        };
        let short;
        let from = match &latent.q_down {
            None => a,
            Some((down, w)) => {
                short = norm(&down.apply(d, n, a)?, w)?;
                &short
            }
        };
        let q_plain = latent.q_plain.apply(d, n, from)?;
        let q_rotated = turn(&latent.q_rotated.apply(d, n, from)?, c.q_heads)?;
        let kv = norm(&latent.kv_down.apply(d, n, a)?, &latent.kv_norm)?;
        let k_rotated = turn(&latent.k_rotated.apply(d, n, a)?, 1)?;
        let k_plain = latent.k_plain.apply(d, n, &kv)?;
        let (rows, plain, rotated) = (n * c.q_heads, latent.plain, latent.rotated);
        Ok([
            beside(d, rows, (&q_plain, plain, 1), (&q_rotated, rotated, 1))?,
            beside(d, rows, (&k_plain, plain, 1), (&k_rotated, rotated, c.q_heads))?,
            latent.v.apply(d, n, &kv)?,
        ])
    }

    /// A mixture of experts, `a[n,hidden] -> y[n,hidden]`. Where there are many tokens, the choice comes to the host, which
    /// cuts the products by it: an expert's weights are read once for all of its tokens.
    fn mixture(
        &self,
        mixture: &MixtureThere<A>,
        told: &Told,
        step: &Step,
        layer: usize,
        a: &Buffer<A>,
        watch: &mut Watch,
    ) -> Result<Buffer<f32>, ModelError> {
        let MixtureThere { sizes, router, choice_bias, experts, shared } = mixture;
        let chosen = sizes.chosen;
        let (d, n, hidden) = (&self.device, step.rows(), self.weights.config.hidden);
        let mut logits: Buffer<f32> = router.apply(d, n, a)?;
        self.see(watch, Some(layer), "router", step, &mut logits)?;
        let mut weight = d.empty::<f32>("model", n * chosen)?;
        let mut choice = device::route_to(d, &sizes.route(n), &logits, choice_bias.as_ref(), &mut weight)?;
        let mut index = vec![0; n * chosen];
        if told.choices.is_none() || watch.probe.is_some() {
            choice.download(d, &mut index)?;
            if watch.see_indices(Some(layer), "experts", step, &mut index)? {
                choice.set(d, "experts", &index)?;
            }
        }
        self.see(watch, Some(layer), "expert_weights", step, &mut weight)?;
        let shared = shared.as_ref().map(|shared| shared.apply(d, n, a)).transpose()?;
        let mut y = d.empty("model", n * hidden)?;
        let shape = Combine { tokens: n, chosen, rows: n * chosen, n: hidden };
        if let Some(choices) = &told.choices {
            let made = experts.apply_chosen(d, (a, chosen), &choice)?;
            device::combine_at(d, &shape, &made, choices, &weight, shared.as_ref(), &mut y)?;
            return Ok(y);
        }

        let Placed { order, rows } = Placed::of(&index);
        let tokens: Vec<i32> = order.iter().map(|&place| (place / chosen) as i32).collect();
        let tokens = Indices::new(d, "experts", &tokens, n)?;
        let mut gathered = d.empty::<A>("model", order.len() * hidden)?;
        let from = Part { rows: Some(&tokens), ..Part::whole(hidden) };
        device::copy_rows(d, [order.len(), hidden], (a, from), (&mut gathered, Part::whole(hidden)))?;
        let mut made = d.empty::<f32>("model", order.len() * hidden)?;
        let mut first = 0;
        for places in order.chunk_by(|&a, &b| index[a] == index[b]) {
            let expert = index[places[0]] as usize;
            experts.apply_rows(d, expert, [places.len(), first], &gathered, &mut made)?;
            first += places.len();
        }
        device::combine(d, &shape, &made, &rows, &weight, shared.as_ref(), &mut y)?;
        Ok(y)
    }
}

impl<A: Stored> LinearThere<A> {
    /// `x[M,K] -> y[M,N]`
    fn apply<O: Stored>(&self, d: &Device, m: usize, x: &Buffer<A>) -> Result<Buffer<O>, ModelError> {
        let mut y = d.empty("model", m * self.n)?;
        self.apply_to(d, m, x, &mut y)?;
        Ok(y)
    }

    fn apply_to<O: Stored>(&self, d: &Device, m: usize, x: &Buffer<A>, y: &mut Buffer<O>) -> Result<(), ModelError> {
        Ok(device::gemm(d, &Gemm::new(m, self.n, self.k), x, &self.weight, self.bias.as_ref(), y)?)
    }

    /// Some rows of x by one of the matrices, to some rows of y, each from a row on.
    fn apply_rows<O: Stored>(
        &self,
        d: &Device,
        matrix: usize,
        m: usize,
        x: (&Buffer<A>, usize),
        y: (&mut Buffer<O>, usize),
    ) -> Result<(), ModelError> {
        let shape = Gemm::new(m, self.n, self.k);
        Ok(device::gemm_rows(d, &shape, x, (&self.weight, matrix), self.bias.as_ref(), y)?)
    }

    /// A row of x for every choice, each `every` times, by the matrix that was chosen.
    fn apply_chosen<O: Stored>(
        &self,
        d: &Device,
        x: (&Buffer<A>, usize),
        choice: &Indices,
    ) -> Result<Buffer<O>, ModelError> {
        let mut y = d.empty("model", choice.len() * self.n)?;
        device::gemm_experts(d, [self.n, self.k], x, choice, &self.weight, self.bias.as_ref(), &mut y)?;
        Ok(y)
    }
}

impl<A: Stored> GatedThere<A> {
    /// `x[M,hidden] -> y[M,hidden]`
    fn apply(&self, d: &Device, m: usize, x: &Buffer<A>) -> Result<Buffer<f32>, ModelError> {
        let mut y = d.empty("model", m * self.down.n)?;
        self.apply_rows(d, 0, [m, 0], x, &mut y)?;
        Ok(y)
    }

    /// `m` rows from row `first` on, by one of the MLPs.
    fn apply_rows(
        &self,
        d: &Device,
        number: usize,
        [m, first]: [usize; 2],
        x: &Buffer<A>,
        y: &mut Buffer<f32>,
    ) -> Result<(), ModelError> {
        let (mut gate, mut up) = (d.empty::<f32>("model", m * self.width)?, d.empty::<f32>("model", m * self.width)?);
        self.gate.apply_rows(d, number, m, (x, first), (&mut gate, 0))?;
        self.up.apply_rows(d, number, m, (x, first), (&mut up, 0))?;
        let inner = self.activate(d, &gate, &up)?;
        self.down.apply_rows(d, number, m, (&inner, 0), (y, first))
    }

    /// A row of x for every choice, each `every` times, by the MLP that was chosen.
    fn apply_chosen(&self, d: &Device, x: (&Buffer<A>, usize), choice: &Indices) -> Result<Buffer<f32>, ModelError> {
        let inner = self.activate(d, &self.gate.apply_chosen(d, x, choice)?, &self.up.apply_chosen(d, x, choice)?)?;
        self.down.apply_chosen(d, (&inner, 1), choice)
    }

    fn activate(&self, d: &Device, gate: &Buffer<f32>, up: &Buffer<f32>) -> Result<Buffer<A>, ModelError> {
        let mut inner = d.empty::<A>("model", gate.len())?;
        match self.activation {
            Activation::Silu => device::silu_mul(d, gate, up, &mut inner)?,
            Activation::Gelu => device::gelu_mul(d, gate, up, &mut inner)?,
        }
        Ok(inner)
    }
}

impl<A: Stored> TurnedThere<A> {
    fn apply(
        &self,
        d: &Device,
        c: &Config,
        n: usize,
        heads: usize,
        angles: &Rotations,
        a: &Buffer<A>,
    ) -> Result<Buffer<A>, ModelError> {
        let dim = c.rotary.dim;
        let raw: Buffer<f32> = self.rotated.apply(d, n, a)?;
        let mut turned = d.empty::<A>("model", n * heads * dim)?;
        match &self.norm {
            None => device::rope(d, &Rope { tokens: n, heads, dim, pairing: c.pairing }, angles, &raw, &mut turned)?,
            Some(norm) => {
                let shape = c.norm_rope(n, heads);
                device::norm_rope(d, &shape, angles, &raw, norm, &mut turned)?;
            }
        }
        match &self.passed {
            None => Ok(turned),
            Some((passed, width)) => {
                let passed: Buffer<A> = passed.apply(d, n, a)?;
                beside(d, n * heads, (&turned, dim, 1), (&passed, *width, 1))
            }
        }
    }
}

/// Two parts of `rows` heads beside each other; each part comes with its width and how many heads share one of its rows.
fn beside<A: Stored>(
    d: &Device,
    rows: usize,
    a: (&Buffer<A>, usize, usize),
    b: (&Buffer<A>, usize, usize),
) -> Result<Buffer<A>, ModelError> {
    let stride = a.1 + b.1;
    let mut joined = d.empty("model", rows * stride)?;
    for ((part, width, every), offset) in [(a, 0), (b, a.1)] {
        let to = Part { stride, offset, ..Part::whole(width) };
        device::copy_rows(d, [rows, width], (part, Part { every, ..Part::whole(width) }), (&mut joined, to))?;
    }
    Ok(joined)
}
