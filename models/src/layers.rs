//! The layers that models are made of: each a struct of weights that loads itself, runs forward and goes back.
//!
//! What a layer is made of is data, its `Plan`. A forward that a reverse pass will follow gives what that reads as a `Saved`
//! of the layer's own; what enters a layer is kept by whoever calls it. What a layer keeps of a sequence from step to step is
//! its state ([`crate::state`]).

pub(crate) mod arithmetic;
pub(crate) mod attend;
pub(crate) mod attention;
pub(crate) mod branch;
pub(crate) mod causal_conv;
pub(crate) mod channel_mix;
pub(crate) mod conv;
pub(crate) mod delta;
pub(crate) mod embedding;
pub(crate) mod head;
pub(crate) mod heads;
pub(crate) mod indexer;
pub(crate) mod latent_attention;
pub(crate) mod linear;
pub(crate) mod loader;
pub(crate) mod low_rank;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod mlp;
pub(crate) mod moe;
pub(crate) mod narrow;
pub(crate) mod norm;
pub(crate) mod per_layer;
pub(crate) mod recur;
pub(crate) mod shared;
pub(crate) mod time_mix;
pub(crate) mod token_mix;
pub(crate) mod unit;
pub(crate) mod values;
pub(crate) mod xielu;

use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use loader::Loader;
use samebits_ops::device::Device;
use samebits_ops::{Cpu, Tensor};

/// What a changed plan no longer holds.
const SIZES: &str = "sizes are 1 to 2147483647";
const WIDTH: &str = "layers are as wide as the residual stream";

/// Whether a size is one that ops take.
pub(crate) fn is_size(n: usize) -> bool {
    (1..=i32::MAX as usize).contains(&n)
}

/// What an MLP between two extents no longer holds: as wide as the residual stream outside, a size inside.
fn fits([own, hidden]: [usize; 2], width: usize) -> Result<(), &'static str> {
    match (own == hidden, is_size(width)) {
        (false, _) => Err(WIDTH),
        (_, false) => Err(SIZES),
        _ => Ok(()),
    }
}

/// The kinds of layers that stand in the branches of a block: the module of each, and whether it keeps a state.
macro_rules! layers {
    ($($(#[$doc:meta])* $kind:ident in $module:ident, state: $state:expr;)*) => {
        /// What a layer of a block is made of.
        #[derive(Clone, Debug, PartialEq)]
        pub enum LayerPlan {
            $($(#[$doc])* $kind($module::Plan),)*
        }

        /// A layer of a block.
        pub(crate) enum Layer {
            $($kind(Box<$module::$kind>),)*
        }

        /// What the reverse pass of a layer reads, beside what entered it.
        pub(crate) enum Saved {
            $($kind(Box<$module::Saved>),)*
        }

        impl LayerPlan {
            /// What it no longer holds, where it was changed: of a model of this width, with these rotations.
            pub(crate) fn check(&self, hidden: usize, tables: &[Rotary]) -> Result<(), &'static str> {
                match self {
                    $(LayerPlan::$kind(plan) => plan.check(hidden, tables),)*
                }
            }
        }

        impl Layer {
            pub fn load(loader: &mut Loader, plan: &LayerPlan) -> Result<Layer, ModelError> {
                loader.weights.adapts = plan.adapts();
                let layer = match plan {
                    $(LayerPlan::$kind(plan) => Layer::$kind(Box::new($module::$kind::load(loader, plan)?)),)*
                };
                loader.weights.adapts = false;
                Ok(layer)
            }

            /// Takes the weights to a device.
            pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
                match self {
                    $(Layer::$kind(layer) => layer.move_to(cpu, device),)*
                }
            }

            /// What it keeps of a sequence from step to step.
            pub fn state(&self) -> Kind {
                match self {
                    $(Layer::$kind(layer) => ($state)(layer),)*
                }
            }

            /// `a[n,hidden] -> y[n,hidden]`: a as products read it, y in f32.
            pub fn forward(
                &self,
                pass: &mut Pass,
                state: &mut LayerState,
                a: &Tensor,
                y: &mut Tensor,
            ) -> Result<Option<Saved>, ModelError> {
                match self {
                    $(Layer::$kind(layer) => Ok(layer.forward(pass, state, a, y)?.map(|saved| Saved::$kind(Box::new(saved)))),)*
                }
            }

            /// From `dy[n,hidden]` in f32: that of a, in f32.
            pub fn backward(
                &self,
                back: &mut Backward,
                a: &Tensor,
                saved: Saved,
                dy: &Tensor,
            ) -> Result<Tensor, ModelError> {
                match (self, saved) {
                    $((Layer::$kind(layer), Saved::$kind(saved)) => layer.backward(back, a, *saved, dy),)*
                    _ => unreachable!("what a layer saved comes back to it"),
                }
            }
        }
    };
}

impl LayerPlan {
    /// Whether its matrices may have adapters: each of their products is of all rows of a step.
    fn adapts(&self) -> bool {
        matches!(self, LayerPlan::Attention(_) | LayerPlan::LatentAttention(_) | LayerPlan::Mlp(_))
    }

    /// How an attention rotates.
    pub(crate) fn rope(&self) -> Option<&heads::Rope> {
        match self {
            LayerPlan::Attention(plan) => Some(&plan.rope),
            LayerPlan::LatentAttention(plan) => Some(&plan.rope),
            _ => None,
        }
    }

    /// The heads of an attention.
    pub(crate) fn heads(&self) -> Option<&attend::Heads> {
        match self {
            LayerPlan::Attention(plan) => Some(&plan.heads),
            LayerPlan::LatentAttention(plan) => Some(&plan.heads),
            _ => None,
        }
    }
}

layers! {
    /// Attention whose queries, keys and values have projections of their own.
    Attention in attention, state: attention::Attention::state;
    /// Attention over keys and values that are made from one short vector per token.
    LatentAttention in latent_attention, state: latent_attention::LatentAttention::state;
    /// A short convolution between two gates.
    ShortConv in conv, state: conv::ShortConv::state;
    /// A scan of Mamba.
    Mamba in mamba, state: mamba::Mamba::state;
    /// A scan of Mamba-2.
    Mamba2 in mamba2, state: mamba2::Mamba2::state;
    /// The time mix of RWKV-7.
    TimeMix in time_mix, state: time_mix::TimeMix::state;
    /// The channel mix of RWKV-7.
    ChannelMix in channel_mix, state: channel_mix::ChannelMix::state;
    /// Linear attention by the gated delta rule.
    DeltaRule in delta, state: delta::DeltaRule::state;
    /// What a block makes of an input of its own.
    PerLayerInput in per_layer, state: |_| Kind::None;
    /// An MLP.
    Mlp in mlp, state: |_| Kind::None;
    /// A mixture of experts.
    Moe in moe, state: |_| Kind::None;
}
