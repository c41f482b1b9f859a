//! The contract as text.

use crate::compare::{Bound, ChainBound};
use crate::gradients::GradientBound;
use crate::record::Judgment;
use crate::spec::{self, Class, Direction};
use crate::table::{Contract, Provenance, Row, Slice};
use crate::tensor::DType;
use std::fmt;

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Bound::Bits => f.write_str("same bits"),
            Bound::Ulp { ulp, condition_factor, p99_ulp, correctly_rounded } => {
                write!(f, "{ulp} ulp + {condition_factor} * 2^-24 * condition")?;
                if let Some(p99) = p99_ulp {
                    write!(f, ", p99 <= {p99} ulp")?;
                }
                if let Some(share) = correctly_rounded {
                    write!(f, ", correctly rounded >= {share}")?;
                }
                Ok(())
            }
            Bound::AtolRtol { atol, rtol } => write!(f, "atol {atol:e} + rtol {rtol:e}"),
            Bound::Chain(bound) => bound.fmt(f),
            Bound::Gradient(bound) => bound.fmt(f),
        }
    }
}

impl fmt::Display for ChainBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = [
            ("rms <= {} of recorded", self.rms_of_recorded),
            ("max <= {} of recorded", self.max_of_recorded),
            ("max <= {} of largest |value|", self.max_of_largest),
            ("max |dlogp| <= {}", self.max_dlogp),
            ("mean |dlogp| <= {}", self.mean_dlogp),
            ("approx KL <= {}", self.approx_kl),
            ("clip fraction <= {}", self.clip_fraction),
        ];
        show_limits(f, &limits)
    }
}

impl fmt::Display for GradientBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = [
            ("error <= {} of the gradient", self.error_of_length),
            ("<= {} of recorded", self.error_of_recorded),
            ("<= {} of recorded by a sketch", self.sketch_of_recorded),
            ("max |dlogp| <= {}", self.max_dlogp),
            ("max loss error <= {}", self.max_dloss),
        ];
        show_limits(f, &limits)
    }
}

fn show_limits(f: &mut fmt::Formatter<'_>, limits: &[(&str, Option<f64>)]) -> fmt::Result {
    let shown: Vec<_> =
        limits.iter().filter_map(|(text, limit)| limit.map(|limit| text.replace("{}", &limit.to_string()))).collect();
    f.write_str(&shown.join(", "))
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.samples {
            0 => write!(f, "{}; not measured here; {}", self.source, self.date),
            n => write!(f, "{}; {n} samples; {}", self.source, self.date),
        }
    }
}

/// Identity, dtype set, policies, row sets, thresholds with their provenance, and per op its cases and rows.
impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}, profile {}, sha256 {}\n", self.name, self.version, self.profile, self.digest())?;
        writeln!(f, "dtypes")?;
        for dtype in &self.dtypes {
            writeln!(f, "  {:<5} {:<12} {}", dtype.name, dtype.role.name(), dtype.reason)?;
        }
        writeln!(
            f,
            "\naccumulation {}; tf32 {} (alternative: {})",
            self.policy.accumulation, self.policy.tf32, self.policy.tf32_alternative
        )?;
        let soak = &self.soak;
        writeln!(
            f,
            "soak {} requests, after {} of them at most {} bytes each, median of {} windows, within {} s  [{}]",
            soak.requests, soak.warm_up, soak.growth, soak.windows, soak.patience, soak.provenance
        )?;
        writeln!(f, "\nrow sets")?;
        for (place, set) in self.row_sets.iter().enumerate() {
            writeln!(f, "  {:<10} {}{}", set.name, set.about, if place == 0 { " (default)" } else { "" })?;
        }
        writeln!(f, "\nthresholds")?;
        for set in &self.row_sets {
            for class in Class::ALL {
                for direction in Direction::ALL {
                    for dtype in DType::FLOATS {
                        for judgment in Judgment::COMPARING {
                            let cell = self.threshold(&set.name, class, direction, dtype, judgment);
                            let Some(cell) = cell else { continue };
                            let place = format!("{:<10} {:<12} {:<9}", set.name, class.name(), direction.name());
                            let (dtype, judgment) = (dtype.name(), judgment.name());
                            writeln!(f, "  {place} {dtype:<5} {judgment:<11} {}  [{}]", cell.bound, cell.provenance)?;
                        }
                    }
                }
            }
        }
        for spec in spec::all() {
            let count = |slice| self.cases(slice).filter(|case| case.op == spec.name).count();
            let (quick, default, all) = (count(Slice::Quick), count(Slice::Default), count(Slice::Exhaustive));
            writeln!(
                f,
                "\n{} ({}): {quick} quick cases, {default} by default, {all} in all",
                spec.name,
                spec.class.name()
            )?;
            for row in self.rows().iter().filter(|row| row.op == spec.name) {
                show_row(f, row)?;
            }
            for entry in self.uncovered().iter().filter(|entry| entry.op == spec.name) {
                let classes: Vec<_> = entry.classes.iter().map(|class| class.name()).collect();
                let narrowed = [
                    ("output", entry.outputs.clone()),
                    ("in", entry.dtypes.iter().map(|dtype| dtype.name().to_string()).collect()),
                    ("out", entry.outs.iter().map(|dtype| dtype.name().to_string()).collect()),
                ];
                let narrowed = narrowed.iter().filter(|(_, list)| !list.is_empty());
                let narrowed: String = narrowed.map(|(name, list)| format!(", {name} {}", list.join(" "))).collect();
                writeln!(f, "  uncovered {}{narrowed}: {}", classes.join(" "), entry.reason)?;
            }
        }
        Ok(())
    }
}

fn show_row(f: &mut fmt::Formatter<'_>, row: &Row) -> fmt::Result {
    let mut parts = vec![row.impls.join(" ")];
    let mut part = |name: &str, list: Vec<&str>| {
        if !list.is_empty() {
            parts.push(format!("{name} {}", list.join(" ")));
        }
    };
    part("in", row.dtypes.iter().map(|dtype| dtype.name()).collect());
    part("out", row.outs.iter().map(|dtype| dtype.name()).collect());
    part("fill", row.fills.iter().map(|fill| fill.name()).collect());
    part("stem", row.stems.iter().map(String::as_str).collect());
    writeln!(f, "  {} [{}]", parts.join(", "), row.place)?;
    match &row.accuracy {
        None => writeln!(f, "    accuracy   from class")?,
        Some((bound, provenance)) => writeln!(f, "    accuracy   {bound}\n      from {provenance}")?,
    }
    if !row.invariant.is_empty() {
        writeln!(f, "    invariant  {}", row.invariant.join(" "))?;
    }
    if let Some(other) = &row.same_as {
        writeln!(f, "    same bits as {other}")?;
    }
    if let Some(waiver) = &row.waive {
        let axis = waiver.axis.as_ref().map(|axis| format!(" along {axis}")).unwrap_or_default();
        let (judgment, reason, expires) = (waiver.judgment.name(), &waiver.reason, &waiver.expires);
        writeln!(f, "    waived: {judgment}{axis} until {expires}: {reason}")?;
    }
    Ok(())
}
