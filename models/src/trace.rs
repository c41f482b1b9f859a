//! Looking at what a forward computes on the way, and changing it.

use crate::ModelError;
use crate::experts::StepExperts;
use crate::machine::typed;
use crate::step::Step;
use crate::sums::overflows;
use samebits_ops::{Element, Tensor};
use std::borrow::Cow;

/// Something that is shown the values of every site as they are made.
pub trait Probe {
    /// Shows what step computed at a site: one row of values (widened) for each token.
    ///
    /// Whatever reads the site afterwards takes what the probe leaves there, rounded to the type of the site. What was
    /// made in one op with the site is made already: a norm does not see a change of the sum that it was fused with.
    ///
    /// # Errors
    /// Whatever ends the run, for instance a full disk.
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError>;

    /// Shows what a layer that recurs keeps of its sequences behind a step: one row for each, by its last token. The site is
    /// the op that made it. The next step of a sequence begins with what the probe leaves there.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn see_state(&mut self, _: &mut Seen) -> Result<(), ModelError> {
        Ok(())
    }
}

/// The values of one site in one step.
pub struct Seen<'a> {
    /// The layer; `None` before the first and behind the last.
    pub layer: Option<usize>,
    /// The site: `positions`, `embed`, `input_norm`, `q`, `k`, `v`, `attention`, `o`, `mlp_norm`, `router`, `mlp`,
    /// `sum`, .., `logits`. The `positions` of no layer rotate queries and keys, those of a layer are where its
    /// attention takes its queries to stand. In a reverse pass `dX` is the gradient of site X, and `parameters.NAME`
    /// that of a parameter.
    pub site: &'a str,
    /// Sequence and position of each token, as the caller numbers its sequences; of a parameter 0 and the row.
    pub tokens: &'a [(usize, usize)],
    /// Of the ops since the last site the first whose output is not finite, in a run that looks for it.
    pub op: Option<&'a str>,
    /// Values, a row for each token. Positions and experts are whole numbers.
    pub values: &'a mut [f32],
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

/// Shows what a forward computes to a probe, if there is one; else nothing is spent.
#[derive(Default)]
pub(crate) struct TraceHook<'a> {
    pub probe: Option<&'a mut dyn Probe>,
    /// Who is told what routers choose, and says what is chosen instead.
    pub experts: Option<&'a mut StepExperts>,
    /// Whether the op is looked for that makes the first value that is not finite.
    pub looks: bool,
    /// That op.
    pub op: Option<String>,
}

impl<'a> TraceHook<'a> {
    /// Shows `probe`.
    pub fn of(probe: Option<&'a mut dyn Probe>) -> TraceHook<'a> {
        TraceHook { probe, ..TraceHook::default() }
    }

    /// Shows a site, whose values are on the host, and says whether that changed it.
    pub fn see(
        &mut self,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &mut Tensor,
    ) -> Result<bool, ModelError> {
        typed!(values.dtype() => A, {
            let values = values.as_slice_mut::<A>().expect("it is on the host, and of this dtype");
            self.show(layer, site, step, values, A::widen, A::narrow)
        })
    }

    /// [`Probe::see_state`] of values on the host, and whether that may have changed them.
    pub fn see_state(
        &mut self,
        layer: Option<usize>,
        site: &str,
        step: &Step,
        values: &mut Tensor,
    ) -> Result<bool, ModelError> {
        let Some(probe) = &mut self.probe else { return Ok(false) };
        let last: Vec<_> = (0..step.sequences()).map(|i| step.tokens[step.rows_of(i).end - 1]).collect();
        let values = values.as_slice_mut::<f32>().expect("a state is f32, and on the host");
        probe.see_state(&mut Seen { layer, site, op: None, tokens: &last, values })?;
        Ok(true)
    }

    /// [`TraceHook::see`] for whole numbers.
    pub fn see_indices(
        &mut self,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &mut [i32],
    ) -> Result<bool, ModelError> {
        self.show(layer, site, step, values, |v| v as f32, |v| v as i32)
    }

    /// The positions of a step's tokens that a site goes on with.
    pub fn positions<'p>(
        &mut self,
        layer: Option<usize>,
        step: &Step,
        positions: &'p [i32],
    ) -> Result<Cow<'p, [i32]>, ModelError> {
        let mut positions = Cow::Borrowed(positions);
        if self.probe.is_some() {
            self.see_indices(layer, "positions", step, positions.to_mut())?;
        }
        Ok(positions)
    }

    fn show<T: Copy>(
        &mut self,
        layer: Option<usize>,
        site: &'static str,
        step: &Step,
        values: &mut [T],
        widen: fn(T) -> f32,
        narrow: fn(f32) -> T,
    ) -> Result<bool, ModelError> {
        let Some(probe) = &mut self.probe else { return Ok(false) };
        let op = self.op.take();
        let mut seen: Vec<f32> = values.iter().map(|&v| widen(v)).collect();
        probe.see(&mut Seen { layer, site, op: op.as_deref(), tokens: &step.tokens, values: &mut seen })?;
        // What was not changed keeps its bits, those of a NaN too.
        let changed = |(value, seen): &(&mut T, f32)| widen(**value).to_bits() != seen.to_bits();
        let mut any = false;
        for (value, seen) in values.iter_mut().zip(seen).filter(changed) {
            *value = narrow(seen);
            any = true;
        }
        Ok(any)
    }
}

/// Ends a run at the first value that is NaN or infinite, with [`ModelError::NotFinite`].
#[derive(Default)]
pub struct Tripwire;

impl Probe for Tripwire {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        let Some(first) = seen.values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
        if let Some(name) = seen.site.strip_prefix("parameters.") {
            return Err(overflows(name));
        }
        let width = seen.values.len() / seen.tokens.len().max(1);
        let (sequence, token) = seen.tokens[first / width];
        let count = seen.values.iter().filter(|v| !v.is_finite()).count();
        let finite = || seen.values.iter().copied().filter(|v| v.is_finite());
        let (low, high) = (finite().fold(f32::INFINITY, f32::min), finite().fold(f32::NEG_INFINITY, f32::max));
        let range = if low <= high { format!("the others lie in {low:e} to {high:e}") } else { "no other is".into() };
        let (element, value, all) = (first % width, seen.values[first], seen.values.len());
        let why = format!("element {element} is {value}; {count} of {all} there are not finite, {range}");
        // A site that one op alone makes is called as that op.
        let op = seen.op.unwrap_or(seen.site);
        let place = match seen.layer {
            Some(layer) => format!("layer {layer}, op {op} (site {})", seen.name()),
            None => format!("op {op} (site {})", seen.name()),
        };
        Err(ModelError::NotFinite { place, sequence, token, why })
    }
}

/// Whether all of some values are finite; without a way out in the middle, so that it is as fast as memory.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    values.chunks(4096).all(|some| some.iter().fold(true, |all, x| all & x.is_finite()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Precision, Run};
    use samebits_ops::Cpu;
    use std::path::Path;

    struct Names(Vec<String>);

    impl Probe for Names {
        fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
            self.0.push(seen.name());
            Ok(())
        }
    }

    /// A value of a shared block is called by the layer that uses it.
    #[test]
    fn sites_of_shared_blocks_tell_the_use() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/zamba2");
        let (cpu, mut names) = (Cpu::best(), Names(Vec::new()));
        let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
        model.forward_run(&cpu, &[&[1, 2, 3]], Run { probe: Some(&mut names), ..Run::default() }).unwrap();
        for site in ["shared_norm", "q_adapter", "q", "attention", "shared_o", "gate_up_adapter", "shared"] {
            let end = format!(".{site}");
            let found: Vec<&str> = names.0.iter().filter_map(|name| name.strip_suffix(&end)).collect();
            assert_eq!(found, ["layers.0", "layers.2", "layers.3", "layers.4"], "{site}");
        }
    }

    /// Showing them moves no bit.
    #[test]
    fn every_site_is_shown_in_its_order() {
        let cpu = Cpu::best();
        let block = ["input_norm", "q", "k", "v", "positions", "attention", "o"];
        let gemma2 = ["post_attention_norm", "attention_sum", "mlp_norm", "mlp", "post_mlp_norm", "sum"];
        let mixtral = ["attention_sum", "mlp_norm", "router", "experts", "expert_weights", "mlp", "sum"];
        for (checkpoint, rest) in [("gemma2", &gemma2[..]), ("mixtral", &mixtral[..])] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(checkpoint);
            let model = Model::load(&dir, Precision::Bf16, &cpu).unwrap();
            let mut names = Names(Vec::new());
            let run = |probe| model.forward_run(&cpu, &[&[1, 2, 3]], Run { probe, ..Run::default() }).unwrap();
            let (plain, shown) = (run(None), run(Some(&mut names)));
            assert!(plain.iter().zip(&shown).all(|(a, b)| a.to_bits() == b.to_bits()), "{checkpoint}");
            let sites = || block.iter().chain(rest);
            let layers =
                (0..model.config().layers()).flat_map(|i| sites().map(move |site| format!("layers.{i}.{site}")));
            let of_model = |names: [&str; 2]| names.map(String::from);
            let mut expected = of_model(["positions", "embed"]).to_vec();
            expected.extend(layers.chain(of_model(["final_norm", "logits"])));
            assert_eq!(names.0, expected, "{checkpoint}");
        }
    }
}
