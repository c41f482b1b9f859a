//! Implementations that are right in another way: `ours/cpu`, asked along one setting of one axis, its rows put back.
//!
//! They differ from it as other correct implementations would, in their tiles, batches, pages, ranks or instruction sets. A
//! check that turns one of them red is a false alarm.

use samebits_contract::axis::{self, Machine, Way};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::spec;
use samebits_harness::implementation::{Implementation, cpu::CpuImplementation};

/// `ours/cpu` along one setting of an axis.
pub struct Equivalent {
    name: String,
    ours: CpuImplementation,
    axis: &'static str,
    setting: String,
    machine: Machine,
}

/// Settings of axes, each of which makes a correct implementation: axis, beginning of the setting.
pub const EQUIVALENTS: &[(&str, &str)] = &[
    ("batch", "again:9"),
    ("batch", "again:33"),
    ("batch", "more:"),
    ("position", "reverse"),
    ("position", "rotate3rd"),
    ("position", "shuffle"),
    ("padding", "left3-right5:nan"),
    ("padding", "left0-right16:huge"),
    ("padding", "keys+256:inf"),
    ("micro_batch", "1"),
    ("micro_batch", "2:padded"),
    ("accumulation", "idle"),
    ("pages", "size1"),
    ("pages", "size16"),
    ("packing", "all"),
    ("schedule", "decode"),
    ("schedule", "chunk:3"),
    ("prefix", "hit:size4"),
    ("ranks", "sum:8"),
    ("ranks", "sum:2"),
    ("ranks", "columns:4"),
    ("ranks", "heads:2"),
    ("layout", "offset"),
    ("threads", "2"),
    ("threads", "5"),
    ("isa", "scalar"),
    ("budget", "smallest"),
    ("budget", "tight"),
    ("order", "after:other"),
];

impl Equivalent {
    /// Along the first setting of `axis` that begins with `setting`, where a case has it; as it is elsewhere.
    pub fn new(ours: CpuImplementation, axis: &'static str, setting: &str, machine: Machine) -> Equivalent {
        Equivalent { name: format!("right/{axis}-{setting}"), ours, axis, setting: setting.into(), machine }
    }

    /// The outputs of the variant with the rows of the base, where the variant answers for all of them.
    pub fn rearranged(&self, case: &Case) -> Option<Answer> {
        let spec = spec::of(&case.op, &case.params)?;
        let call = spec.validate(case).ok()?.call;
        let axis = axis::find(self.axis).filter(|axis| axis.applies(spec))?;
        let mut machine = self.machine.clone();
        if self.axis == "budget" {
            let mut tight = case.clone();
            tight.config.budget = Some(0);
            machine.smallest_budget = self.ours.run(&tight).smallest_budget;
        }
        let variants = (axis.variants)(case, &machine);
        let variant = variants.into_iter().find(|variant| variant.setting.starts_with(&self.setting))?;
        if let Way::After(before) = &variant.way {
            before.iter().for_each(|case| drop(self.ours.run(case)));
        }
        let mut whole = variant.answer(|case| self.ours.run(case));
        if whole.status != Status::Ok {
            return None;
        }
        if spec.outputs.iter().any(|output| output.rows < variant.held) {
            return None;
        }
        let input = spec.inputs.iter().find(|input| input.rows == spec.row_axes)?;
        for output in spec.outputs.iter().filter(|output| output.rows > 0) {
            let tensor = whole.outputs.get_mut(output.name)?;
            if variant.case().op == axis::PACKED {
                *tensor = tensor.with_leading_axis();
            }
            let leading = match spec.owned() {
                Some((_, axis)) if output.axes[0] == axis => vec![call.dim(axis)],
                _ => case.inputs[input.name].shape()[..output.rows].to_vec(),
            };
            *tensor = axis::shortened(spec, output, &call.output_shape(output)?, tensor).into_owned();
            let mut places: Vec<Option<usize>> = vec![None; leading.iter().product()];
            variant.pairs(spec, output, case).iter().for_each(|&(base, found)| places[base] = Some(found));
            if places.contains(&None) {
                return None;
            }
            let behind = tensor.shape()[output.rows..].to_vec();
            let shape = [leading, behind.clone()].concat();
            let gathered = tensor.gather(behind.iter().product(), &places, &shape);
            *tensor = gathered;
        }
        Some(whole.under(&case.config))
    }
}

impl Implementation for Equivalent {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        self.rearranged(case).unwrap_or_else(|| self.ours.run(case))
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        Some(self.run(case))
    }
}
