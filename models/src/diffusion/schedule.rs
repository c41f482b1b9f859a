//! What a `scheduler_config.json` says: the kind of sampler, the noise that the model was trained on, and which of its levels are
//! visited in so many steps.

use crate::ModelError;
use crate::fields::Fields;
use crate::files::FLOAT;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A sampler as a folder of diffusers configures it.
#[derive(Clone, Debug)]
pub struct Scheduler {
    /// For messages.
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    /// What the model's output is.
    pub(super) prediction: Prediction,
    /// Levels that the model was trained on, T.
    pub(super) levels: usize,
    /// Share of the image's variance at each of them, from the least noise on; empty for flows.
    pub(super) alphas: Vec<f32>,
    spacing: Spacing,
    offset: usize,
    karras: bool,
    /// Whether the last level is the least of the training, not 0.
    ends_at_least: bool,
    /// Levels of a straight path from noise to image, and how they are shifted; `None` for the noise of `alphas`.
    pub(super) flow: Option<Shift>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// The largest |x0| where it is clipped, and the alpha behind the last step.
    Ddim {
        clip: Option<f64>,
        last: f32,
    },
    /// The alpha behind the last step.
    Pndm {
        last: f32,
    },
    Euler,
    EulerAncestral,
    Heun,
    /// DPM-Solver++, of order 1 or 2.
    DpmSolver {
        order: usize,
        heun: bool,
        stochastic: bool,
        lower_order_final: bool,
        euler_at_final: bool,
    },
    /// Of order 1 to 3.
    UniPc {
        order: usize,
        bh1: bool,
        lower_order_final: bool,
    },
    /// Steps of the distillation, the largest |x0| where it is clipped, and what times are multiplied with in its borders.
    Lcm {
        original: usize,
        clip: Option<f64>,
        scaling: f64,
    },
    FlowEuler {
        stochastic: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Prediction {
    /// The noise.
    Epsilon,
    /// The image.
    Sample,
    /// The velocity of image and noise on a circle.
    Velocity,
    /// That of a straight path.
    Flow,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Spacing {
    Linspace,
    Leading,
    Trailing,
}

/// How levels of a flow are shifted towards noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shift {
    by: f64,
    /// By a number of the image's size instead, which the caller gives.
    dynamic: bool,
    /// The last level before 0, where levels are stretched to it.
    terminal: Option<f64>,
}

/// The levels that a sampler visits.
pub(super) struct Levels {
    /// What the model is told, for each.
    pub timesteps: Vec<f32>,
    /// Noise over image (of a flow, its share), for each, and behind the last.
    pub sigmas: Vec<f32>,
}

impl Scheduler {
    /// Reads a `scheduler_config.json`; with it comes what of it is passed by, a line of each.
    ///
    /// # Errors
    /// [`ModelError`] with every field that is missing, malformed or asks for what is not computed.
    pub fn read(path: &Path) -> Result<(Scheduler, Vec<String>), ModelError> {
        Scheduler::of(Fields::read(path.to_path_buf())?)
    }

    /// [`Scheduler::read`] of a text.
    ///
    /// # Errors
    /// As [`Scheduler::read`].
    pub fn parse(text: &str) -> Result<(Scheduler, Vec<String>), ModelError> {
        Scheduler::of(Fields::parse(text)?)
    }

    /// Those of an object that was read from a file.
    pub(crate) fn of_map(path: PathBuf, map: Map<String, Value>) -> Result<(Scheduler, Vec<String>), ModelError> {
        Scheduler::of(Fields::new(path, map))
    }

    fn of(fields: Fields) -> Result<(Scheduler, Vec<String>), ModelError> {
        let class = word(&fields, "_class_name", "");
        let (solver, flows) = (SOLVERS.contains(&class.as_str()), class == FLOW);
        let levels = fields.size("num_train_timesteps").unwrap_or(1000);
        if levels == 1 {
            fields.refuse("num_train_timesteps", "is 1; a way has two levels at least");
        }
        let prediction = prediction(&fields, &class);
        let spacing = spacing(&fields, &class);
        let flow = (flows || solver && fields.flag("use_flow_sigmas", false)).then(|| Shift::of(&fields, flows));
        if flow.is_some() && prediction != Prediction::Flow {
            fields.refuse("prediction_type", "must be `flow_prediction` with `use_flow_sigmas`");
        }
        let alphas = if flows { Vec::new() } else { alphas(&fields, &class, levels.max(2)) };
        let kind = kind(&fields, &class, &alphas);
        let karras = fields.flag("use_karras_sigmas", false);
        if karras
            && (flow.is_some()
                || matches!(
                    kind,
                    Some(Kind::Ddim { .. } | Kind::Pndm { .. } | Kind::Lcm { .. } | Kind::EulerAncestral)
                ))
        {
            fields.refuse("use_karras_sigmas", "is true, which is not computed for this sampler");
        }
        let ends_at_least = choice(&fields, "final_sigmas_type", &["zero", "sigma_min"]) == "sigma_min";
        let offset = fields.size_or_zero("steps_offset");
        nothing_else(&fields);
        let path = fields.path().to_path_buf();
        let passed = fields.end()?;
        let kind = kind.expect("a class that is not known was refused");
        let scheduler =
            Scheduler { path, kind, prediction, levels, alphas, spacing, offset, karras, ends_at_least, flow };
        Ok((scheduler, passed))
    }

    /// Whether the last level is the least of the training, and not 0.
    pub(super) fn ends_at_least(&self) -> bool {
        self.ends_at_least
    }

    fn error(&self, field: &str, why: String) -> ModelError {
        ModelError::field(&self.path, field, why)
    }

    /// The levels of so many steps. A flow whose shift is dynamic takes `mu`, the logarithm of its shift.
    pub(super) fn levels_of(&self, steps: usize, mu: Option<f64>) -> Result<Levels, ModelError> {
        let most = if let Kind::Lcm { original, .. } = self.kind { original.min(self.levels) } else { self.levels };
        if steps == 0 || steps > most {
            return Err(self.error("num_train_timesteps", format!("allows 1 to {most} steps; {steps} were asked for")));
        }
        let dynamic = self.flow.is_some_and(|shift| shift.dynamic);
        if dynamic != mu.is_some() {
            let why = if dynamic {
                "is true; a shift for the size of the image is needed"
            } else {
                "is not true; nothing is shifted"
            };
            return Err(self.error("use_dynamic_shifting", why.into()));
        }
        let levels = match self.flow {
            Some(shift) => self.flow_path(shift, steps, mu),
            None => self.noise_path(steps),
        };
        let reads = matches!(self.kind, Kind::Ddim { .. } | Kind::Pndm { .. } | Kind::Lcm { .. });
        if reads && levels.timesteps.iter().any(|t| *t as usize >= self.levels) {
            let why = format!("is {}, beyond the {} levels of the training in {steps} steps", self.offset, self.levels);
            return Err(self.error("steps_offset", why));
        }
        Ok(levels)
    }

    fn flow_path(&self, shift: Shift, steps: usize, mu: Option<f64>) -> Levels {
        let t = self.levels as f64;
        let shifted = |sigma: f64, by: f64| by * sigma / (1.0 + (by - 1.0) * sigma);
        let by = mu.map_or(shift.by, libm::exp);
        let mut sigmas: Vec<f64> = match self.kind {
            // From the most to the least noise of the training, whose levels are shifted already.
            Kind::FlowEuler { .. } => {
                let least = if mu.is_some() { 1.0 / t } else { shifted(1.0 / t, shift.by) };
                linspace(1.0, f64::from(least as f32), steps).map(|sigma| shifted(sigma, by)).collect()
            }
            Kind::DpmSolver { .. } => {
                let mut all: Vec<f64> =
                    linspace(1.0, 1.0 / t, steps + 1).map(|alpha| shifted(1.0 - alpha, by)).collect();
                all.reverse();
                all[..steps].to_vec()
            }
            _ => linspace(1.0, 1.0 / t, steps + 1).take(steps).map(|sigma| shifted(sigma, by)).collect(),
        };
        if let (Some(terminal), Some(&last)) = (shift.terminal, sigmas.last()) {
            let scale = (1.0 - last) / (1.0 - terminal);
            sigmas.iter_mut().for_each(|sigma| *sigma = 1.0 - (1.0 - *sigma) / scale);
        }
        if let (Kind::UniPc { .. }, Some(first)) = (&self.kind, sigmas.first_mut()) {
            // All noise has no logarithm.
            *first -= if (*first - 1.0).abs() < 1e-6 { 1e-6 } else { 0.0 };
        }
        let whole = !matches!(self.kind, Kind::FlowEuler { .. });
        let timesteps = sigmas.iter().map(|sigma| {
            let at = if whole { *sigma } else { f64::from(*sigma as f32) } * t;
            (if whole { at.trunc() } else { at }) as f32
        });
        let timesteps = timesteps.collect();
        let last = if self.ends_at_least { sigmas[steps - 1] } else { 0.0 };
        Levels { timesteps, sigmas: sigmas.into_iter().chain([last]).map(|sigma| sigma as f32).collect() }
    }

    fn noise_path(&self, steps: usize) -> Levels {
        let mut timesteps = self.spaced(steps);
        let levels: Vec<f64> = self.alphas.iter().map(|alpha| f64::from(sigma_of(*alpha))).collect();
        let (least, most) = (levels[0], levels[self.levels - 1]);
        let mut sigmas: Vec<f64> = timesteps.iter().map(|t| interpolated(&levels, *t)).collect();
        let solver = matches!(self.kind, Kind::DpmSolver { .. } | Kind::UniPc { .. });
        if self.karras {
            let ends = if solver { [most, least] } else { [sigmas[0], sigmas[steps - 1]] };
            let [from, to] = ends.map(|sigma| libm::pow(sigma, 1.0 / 7.0));
            sigmas = linspace(0.0, 1.0, steps).map(|ramp| libm::pow(from + ramp * (to - from), 7.0)).collect();
            let logarithms: Vec<f64> = levels.iter().map(|sigma| libm::log(*sigma)).collect();
            timesteps = sigmas.iter().map(|sigma| level_of(&logarithms, libm::log(sigma.max(1e-10)))).collect();
            if solver {
                timesteps.iter_mut().for_each(|t| *t = t.round_ties_even());
            }
        }
        let last = match (self.ends_at_least, &self.kind) {
            (true, Kind::UniPc { .. }) if self.karras => sigmas[steps - 1],
            (true, _) => least,
            (false, _) => 0.0,
        };
        Levels {
            timesteps: timesteps.into_iter().map(|t| t as f32).collect(),
            sigmas: sigmas.into_iter().chain([last]).map(|sigma| sigma as f32).collect(),
        }
    }

    /// Which levels are visited, from the most noise on.
    fn spaced(&self, steps: usize) -> Vec<f64> {
        let levels = self.levels;
        if let Kind::Lcm { original, .. } = self.kind {
            let (apart, count) = (levels / original, original);
            let at = |i: usize| (count - 1 - i * count / steps + 1) * apart - 1;
            return (0..steps).map(|i| at(i) as f64).collect();
        }
        // A solver of several levels counts one more, which it does not visit.
        let more = usize::from(matches!(self.kind, Kind::DpmSolver { .. } | Kind::UniPc { .. }));
        let whole = more == 1 || matches!(self.kind, Kind::Ddim { .. } | Kind::Pndm { .. });
        let round = |t: f64| if whole { t.round_ties_even() } else { t };
        match self.spacing {
            Spacing::Linspace => {
                let mut all: Vec<f64> = linspace(0.0, (levels - 1) as f64, steps + more).map(round).collect();
                all.reverse();
                all[..steps].to_vec()
            }
            Spacing::Leading => {
                let apart = levels / (steps + more);
                (more..steps + more).rev().map(|i| (i * apart + self.offset) as f64).collect()
            }
            Spacing::Trailing => {
                let apart = levels as f64 / steps as f64;
                (0..steps).map(|i| (levels as f64 - i as f64 * apart).round_ties_even() - 1.0).collect()
            }
        }
    }

    /// What initial noise is multiplied with, whose levels are these.
    pub(super) fn initial_scale(&self, sigmas: &[f32]) -> f32 {
        match self.kind {
            Kind::Euler | Kind::EulerAncestral | Kind::Heun => {
                let most = sigmas.iter().copied().fold(0.0, f32::max);
                if self.spacing == Spacing::Leading {
                    (f64::from(most) * f64::from(most) + 1.0).sqrt() as f32
                } else {
                    most
                }
            }
            _ => 1.0,
        }
    }
}

/// Solvers by several levels, whose levels may be those of a flow.
const SOLVERS: [&str; 2] = ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"];
const FLOW: &str = "FlowMatchEulerDiscreteScheduler";
const LCM: &str = "LCMScheduler";
const PNDM: &str = "PNDMScheduler";

impl Shift {
    fn of(fields: &Fields, flows: bool) -> Shift {
        choice(fields, "time_shift_type", &["exponential"]);
        Shift {
            by: fields.positive(if flows { "shift" } else { "flow_shift" }).unwrap_or(1.0),
            dynamic: fields.flag("use_dynamic_shifting", false),
            terminal: fields.positive("shift_terminal"),
        }
    }
}

fn prediction(fields: &Fields, class: &str) -> Prediction {
    let known: &[&str] = match class {
        "EulerAncestralDiscreteScheduler" | PNDM => &["epsilon", "v_prediction"],
        _ if SOLVERS.contains(&class) => &["epsilon", "sample", "v_prediction", "flow_prediction"],
        _ => &["epsilon", "sample", "v_prediction"],
    };
    match choice(fields, "prediction_type", known).as_str() {
        _ if class == FLOW => Prediction::Flow,
        "sample" => Prediction::Sample,
        "v_prediction" => Prediction::Velocity,
        "flow_prediction" => Prediction::Flow,
        _ => Prediction::Epsilon,
    }
}

fn spacing(fields: &Fields, class: &str) -> Spacing {
    let leading = ["DDIMScheduler", LCM, PNDM].contains(&class);
    let known = if leading { ["leading", "linspace", "trailing"] } else { ["linspace", "leading", "trailing"] };
    match choice(fields, "timestep_spacing", &known).as_str() {
        "leading" => Spacing::Leading,
        "trailing" => Spacing::Trailing,
        _ => Spacing::Linspace,
    }
}

/// Refuses what is not computed where it asks for something, and passes by what no sampler reads.
fn nothing_else(fields: &Fields) {
    for field in [
        "thresholding",
        "rescale_betas_zero_snr",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "use_lu_lambdas",
        "invert_sigmas",
    ] {
        fields.only(field, &[false.into()]);
    }
    for field in ["trained_betas", "variance_type", "sigma_min", "sigma_max"] {
        fields.only(field, &[]);
    }
    // None is clipped.
    fields.only("lambda_min_clipped", &[serde_json::json!({ FLOAT: "-Infinity" })]);
    fields.only("interpolation_type", &["linear".into()]);
    fields.only("timestep_type", &["discrete".into()]);
    // These say something where what reads them is on.
    fields.unread(&[
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "base_shift",
        "max_shift",
        "base_image_seq_len",
        "max_image_seq_len",
        "_diffusers_version",
    ]);
    fields.look_at_the_rest(|_, _| Some(true));
}

/// A word, if only the one that stands for its absence.
fn word(fields: &Fields, field: &str, absent: &str) -> String {
    fields.get(field).and_then(|value| value.as_str()).unwrap_or(absent).to_string()
}

/// One of some words, the first where the field is absent.
fn choice(fields: &Fields, field: &str, words: &[&str]) -> String {
    fields.only(field, &words.iter().map(|word| (*word).into()).collect::<Vec<_>>());
    word(fields, field, words[0])
}

fn kind(fields: &Fields, class: &str, alphas: &[f32]) -> Option<Kind> {
    let clip = |by_default: bool| {
        let range = fields.positive("clip_sample_range").unwrap_or(1.0);
        fields.flag("clip_sample", by_default).then_some(range)
    };
    let order = |most: usize| {
        let order = fields.size("solver_order").unwrap_or(2);
        if order > most {
            fields.refuse("solver_order", format!("is {order}; supported is at most {most}"));
        }
        order
    };
    Some(match class {
        "DDIMScheduler" => {
            let last = if fields.flag("set_alpha_to_one", true) { 1.0 } else { alphas[0] };
            Kind::Ddim { clip: clip(true), last }
        }
        PNDM => {
            // Without it the first steps are of Runge and Kutta.
            fields.only("skip_prk_steps", &[true.into()]);
            if fields.get("skip_prk_steps").is_none() {
                fields.refuse("skip_prk_steps", "is missing, which stands for false; supported is true");
            }
            Kind::Pndm { last: if fields.flag("set_alpha_to_one", false) { 1.0 } else { alphas[0] } }
        }
        "EulerDiscreteScheduler" => Kind::Euler,
        "EulerAncestralDiscreteScheduler" => Kind::EulerAncestral,
        "HeunDiscreteScheduler" => {
            fields.only("clip_sample", &[false.into()]);
            Kind::Heun
        }
        "DPMSolverMultistepScheduler" => Kind::DpmSolver {
            order: order(2),
            heun: choice(fields, "solver_type", &["midpoint", "heun"]) == "heun",
            stochastic: choice(fields, "algorithm_type", &["dpmsolver++", "sde-dpmsolver++"]) == "sde-dpmsolver++",
            lower_order_final: fields.flag("lower_order_final", true),
            euler_at_final: fields.flag("euler_at_final", false),
        },
        "UniPCMultistepScheduler" => {
            fields.only("predict_x0", &[true.into()]);
            fields.only("disable_corrector", &[serde_json::json!([])]);
            fields.only("solver_p", &[]);
            Kind::UniPc {
                order: order(3),
                bh1: choice(fields, "solver_type", &["bh2", "bh1"]) == "bh1",
                lower_order_final: fields.flag("lower_order_final", true),
            }
        }
        "LCMScheduler" => Kind::Lcm {
            original: fields.size("original_inference_steps").unwrap_or(50),
            clip: clip(false),
            scaling: fields.positive("timestep_scaling").unwrap_or(10.0),
        },
        "FlowMatchEulerDiscreteScheduler" => Kind::FlowEuler { stochastic: fields.flag("stochastic_sampling", false) },
        _ => {
            let known = "DDIMScheduler, PNDMScheduler, EulerDiscreteScheduler, EulerAncestralDiscreteScheduler, HeunDiscreteScheduler, \
                         DPMSolverMultistepScheduler, UniPCMultistepScheduler, LCMScheduler or FlowMatchEulerDiscreteScheduler";
            fields.refuse("_class_name", format!("is `{class}`; supported is {known}"));
            return None;
        }
    })
}

/// Shares of the image's variance: products of what each level leaves, each rounded to f32.
fn alphas(fields: &Fields, class: &str, levels: usize) -> Vec<f32> {
    // The library's defaults differ by sampler.
    let defaults = if [LCM, "HeunDiscreteScheduler"].contains(&class) { [0.00085, 0.012] } else { [0.0001, 0.02] };
    let [first, second] = if class == LCM { ["scaled_linear", "linear"] } else { ["linear", "scaled_linear"] };
    let schedule = choice(fields, "beta_schedule", &[first, second, "squaredcos_cap_v2"]);
    let start = fields.positive("beta_start").unwrap_or(defaults[0]);
    let end = fields.positive("beta_end").unwrap_or(defaults[1]);
    let betas: Vec<f32> = match schedule.as_str() {
        "scaled_linear" => {
            linspace(start.sqrt(), end.sqrt(), levels).map(|root| (root as f32) * (root as f32)).collect()
        }
        "squaredcos_cap_v2" => {
            let share = |t: f64| libm::pow(libm::cos((t + 0.008) / 1.008 * std::f64::consts::PI / 2.0), 2.0);
            let at = |i: usize| i as f64 / levels as f64;
            (0..levels).map(|i| (1.0 - share(at(i + 1)) / share(at(i))).min(0.999) as f32).collect()
        }
        _ => linspace(start, end, levels).map(|beta| beta as f32).collect(),
    };
    let mut product = 1.0;
    let share = |beta: f32| {
        product *= f64::from(1.0 - beta);
        product as f32
    };
    betas.into_iter().map(share).collect()
}

/// Noise over image where the image has a share of the variance.
pub(super) fn sigma_of(alpha: f32) -> f32 {
    ((1.0 - alpha) / alpha).sqrt()
}

/// `count` numbers from one to another.
fn linspace(from: f64, to: f64, count: usize) -> impl Iterator<Item = f64> {
    let step = if count > 1 { (to - from) / (count - 1) as f64 } else { 0.0 };
    (0..count).map(move |i| if i > 0 && i + 1 == count { to } else { from + i as f64 * step })
}

/// The number at a place between those of the levels.
fn interpolated(levels: &[f64], at: f64) -> f64 {
    let low = (at.max(0.0) as usize).min(levels.len() - 1);
    let high = (low + 1).min(levels.len() - 1);
    levels[low] + (at - low as f64).clamp(0.0, 1.0) * (levels[high] - levels[low])
}

/// Where a logarithm stands between those of the levels, which ascend.
fn level_of(logarithms: &[f64], logarithm: f64) -> f64 {
    let below = logarithms.partition_point(|level| *level <= logarithm);
    let low = below.saturating_sub(1).min(logarithms.len() - 2);
    let share = (logarithms[low] - logarithm) / (logarithms[low] - logarithms[low + 1]);
    low as f64 + share.clamp(0.0, 1.0)
}
