//! Looking at what a forward computes on the way.

use crate::ModelError;
use crate::decoder::{Fault, Step};
use samebits_ops::Element;

/// Something that is shown the values of every site as they are made.
pub trait Probe {
    /// Shows what step computed at a site: one row of values (widened) for each token.
    ///
    /// # Errors
    /// Whatever ends the run, for instance a full disk.
    fn see(&mut self, seen: &Seen) -> Result<(), ModelError>;
}

/// The values of one site in one step.
pub struct Seen<'a> {
    /// The layer; `None` before the first and behind the last.
    pub layer: Option<usize>,
    /// The site: `embed`, `input_norm`, `q`, `k`, `v`, `attention`, `o`, `mlp_norm`, `router`, `mlp`, `sum`, .., `logits`.
    pub site: &'static str,
    /// Sequence and position of each token, as the caller numbers its sequences.
    pub tokens: &'a [(usize, usize)],
    /// Values, a row for each token.
    pub values: &'a [f32],
}

impl Seen<'_> {
    /// `layers.3.attention`, or the site alone.
    pub fn name(&self) -> String {
        match self.layer {
            Some(layer) => format!("layers.{layer}.{}", self.site),
            None => self.site.into(),
        }
    }
}

/// Whom a forward is shown to, and what is wrong with it on purpose.
#[derive(Default)]
pub(crate) struct Watch<'a> {
    pub probe: Option<&'a mut dyn Probe>,
    pub fault: Option<Fault>,
}

impl Watch<'_> {
    /// Shows a site where somebody looks; else nothing is spent.
    pub fn see<T: Element>(
        &mut self,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &[T],
    ) -> Result<(), ModelError> {
        let Some(probe) = &mut self.probe else { return Ok(()) };
        let values: Vec<f32> = values.iter().map(|v| v.widen()).collect();
        probe.see(&Seen { layer, site, tokens: &step.places, values: &values })
    }
}

/// Ends a run at the first value that is NaN or infinite, and says where it stood.
#[derive(Default)]
pub struct Tripwire;

impl Probe for Tripwire {
    fn see(&mut self, seen: &Seen) -> Result<(), ModelError> {
        let Some(first) = seen.values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
        let width = seen.values.len() / seen.tokens.len().max(1);
        let (sequence, position) = seen.tokens[first / width];
        let count = seen.values.iter().filter(|v| !v.is_finite()).count();
        let finite = || seen.values.iter().copied().filter(|v| v.is_finite());
        let (low, high) = (finite().fold(f32::INFINITY, f32::min), finite().fold(f32::NEG_INFINITY, f32::max));
        let range = if low <= high { format!("the others lie in {low:e} to {high:e}") } else { "no other is".into() };
        let why = format!(
            "{} of sequence {sequence}, position {position}, element {} is {}; {count} of {} are not finite, {range}",
            seen.name(),
            first % width,
            seen.values[first],
            seen.values.len(),
        );
        Err(ModelError::input("not finite", why))
    }
}
