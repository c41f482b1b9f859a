//! The steps of samplers.
//!
//! Of a step x is the latents, m what the model said, s and n the levels before and behind it. `x0`, the image that the model sees,
//! is by prediction, with `a = 1 / sqrt(s^2 + 1)` (of a flow 1 - s) where latents keep their variance and 1 where they do not:
//!
//! ```text
//! epsilon: (x - a s m) / a     velocity: a x - a s m     flow: x - s m     sample: m
//! ```
//!
//! Coefficients are f64. An element is their products, added from left to right by fma in f64, and rounded to f32 once.

use super::schedule::{Kind, Prediction, Scheduler};
use crate::ModelError;

/// A way from noise to an image: the levels of a [`Scheduler`] in so many steps, and what steps keep for those behind them.
#[derive(Clone, Debug)]
pub struct Sampler {
    scheduler: Scheduler,
    /// For each call of the model.
    timesteps: Vec<f32>,
    sigmas: Vec<f32>,
    steps: usize,
    /// Calls of the model so far.
    at: usize,
    /// What earlier calls have seen, the last one last.
    seen: Vec<Vec<f32>>,
    /// The latents before the last step, where the next one goes back to them.
    before: Vec<f32>,
    /// The order of the last step of a solver.
    order: usize,
}

impl Sampler {
    /// A sampler of `steps` steps. `mu` is the logarithm of the shift of a flow whose config leaves it to the size of the image
    /// (`use_dynamic_shifting`), and of no other.
    ///
    /// # Errors
    /// [`ModelError`] for a number of steps that the training does not have, and for a shift that is missing or too much.
    ///
    /// ```
    /// use samebits_models::diffusion::{Sampler, Scheduler};
    ///
    /// let (scheduler, _) = Scheduler::parse(r#"{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}"#)?;
    /// let mut sampler = Sampler::new(&scheduler, 4, None)?;
    /// let mut latents = [2.0f32, -1.0];
    /// while let Some(timestep) = sampler.timestep() {
    ///     // A model that sees the image 0 wherever it is: the velocity is the latents over the level.
    ///     let level = timestep / 1000.0;
    ///     let output = latents.map(|x| x / level);
    ///     sampler.step(&output, &mut latents, None);
    /// }
    /// assert!(latents.iter().all(|x| x.abs() < 1e-6));
    /// # Ok::<(), samebits_models::ModelError>(())
    /// ```
    pub fn new(scheduler: &Scheduler, steps: usize, mu: Option<f64>) -> Result<Sampler, ModelError> {
        let levels = scheduler.levels_of(steps, mu)?;
        let mut timesteps = levels.timesteps;
        if scheduler.kind == Kind::Heun {
            // Each step but the last looks at the level that it comes to.
            timesteps = timesteps.iter().flat_map(|t| [*t; 2]).skip(1).collect();
        }
        if matches!(scheduler.kind, Kind::Pndm { .. }) && steps > 1 {
            // The first step looks at the level that it comes to.
            timesteps.insert(1, timesteps[1]);
        }
        Ok(Sampler {
            scheduler: scheduler.clone(),
            timesteps,
            sigmas: levels.sigmas,
            steps,
            at: 0,
            seen: Vec::new(),
            before: Vec::new(),
            order: 0,
        })
    }

    /// What the model is told in each of its calls.
    pub fn timesteps(&self) -> &[f32] {
        &self.timesteps
    }

    /// The levels of noise, one for each step and the last behind it.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// What noise is multiplied with to be the first latents.
    pub fn initial_scale(&self) -> f32 {
        self.scheduler.initial_scale(&self.sigmas)
    }

    /// What the model is told in its next call; `None` when the latents are the image.
    pub fn timestep(&self) -> Option<f32> {
        self.timesteps.get(self.at).copied()
    }

    /// The step that the next call belongs to.
    fn place(&self) -> usize {
        if self.scheduler.kind == Kind::Heun { self.at.div_ceil(2) } else { self.at }
    }

    /// What latents are divided by for the model: noise and image have a variance of 1 together. The latents stay as they are.
    pub fn scale_input(&self, latents: &[f32], input: &mut [f32]) {
        let by = match self.scheduler.kind {
            Kind::Euler | Kind::EulerAncestral | Kind::Heun => {
                let sigma = f64::from(self.sigmas[self.place()]);
                (sigma * sigma + 1.0).sqrt()
            }
            _ => 1.0,
        };
        input.iter_mut().zip(latents).for_each(|(input, x)| *input = (f64::from(*x) / by) as f32);
    }

    /// Whether the next step draws noise.
    pub fn draws(&self) -> bool {
        let last = self.at + 1 == self.steps;
        match self.scheduler.kind {
            Kind::EulerAncestral | Kind::DpmSolver { stochastic: true, .. } | Kind::FlowEuler { stochastic: true } => {
                true
            }
            Kind::Lcm { .. } => !last,
            _ => false,
        }
    }

    /// Takes the latents on by what the model said of them: to the next level, or of Heun's second look back and there again.
    ///
    /// # Panics
    /// When the latents are the image already, the lengths differ, or noise is missing that the step draws.
    pub fn step(&mut self, output: &[f32], latents: &mut [f32], noise: Option<&[f32]>) {
        assert!(self.at < self.timesteps.len(), "the latents are the image already");
        assert_eq!(output.len(), latents.len(), "the model says something of every latent");
        let noise = noise.filter(|_| self.draws());
        assert!(!self.draws() || noise.is_some_and(|noise| noise.len() == latents.len()), "the step draws noise");
        match self.scheduler.kind.clone() {
            Kind::Ddim { clip, last } => self.ddim(clip, last, output, latents),
            Kind::Pndm { last } => self.pndm(last, output, latents),
            Kind::Euler | Kind::EulerAncestral => self.euler(output, latents, noise),
            Kind::Heun => self.heun(output, latents),
            Kind::DpmSolver { .. } => self.dpm_solver(output, latents, noise),
            Kind::UniPc { .. } => self.unipc(output, latents),
            Kind::Lcm { clip, scaling, .. } => self.lcm(clip, scaling, output, latents, noise),
            Kind::FlowEuler { .. } => self.flow(output, latents, noise),
        }
        self.at += 1;
    }

    /// The levels before and behind step `place`.
    fn levels(&self, place: usize) -> [f64; 2] {
        [self.sigmas[place], self.sigmas[place + 1]].map(f64::from)
    }

    /// The alpha of a level that the model was trained on.
    fn alpha(&self, timestep: f32) -> f64 {
        f64::from(self.scheduler.alphas[timestep as usize])
    }

    fn ddim(&mut self, clip: Option<f64>, last: f32, output: &[f32], latents: &mut [f32]) {
        let t = self.timesteps[self.at];
        let next = t as i64 - (self.scheduler.levels / self.steps) as i64;
        let next = if next >= 0 { self.alpha(next as f32) } else { f64::from(last) };
        let a = self.alpha(t);
        let (image, noise) = (a.sqrt(), (1.0 - a).sqrt());
        let (image_next, noise_next) = (next.sqrt(), (1.0 - next).sqrt());
        for (x, m) in latents.iter_mut().zip(output) {
            let (wide, m) = (f64::from(*x), f64::from(*m));
            let (x0, epsilon) = match self.scheduler.prediction {
                Prediction::Epsilon => ((-noise).mul_add(m, wide) / image, m),
                Prediction::Sample => (m, (-image).mul_add(m, wide) / noise),
                _ => (image.mul_add(wide, -(noise * m)), image.mul_add(m, noise * wide)),
            };
            let x0 = clip.map_or(x0, |most| x0.clamp(-most, most));
            *x = image_next.mul_add(x0, noise_next * epsilon) as f32;
        }
    }

    /// A line through what the last calls have said; the first step goes back and takes the mean of both ends.
    fn pndm(&mut self, last: f32, output: &[f32], latents: &mut [f32]) {
        let (t, step) = (self.timesteps[self.at] as i64, (self.scheduler.levels / self.steps) as i64);
        let [from, to] = if self.at == 1 { [t + step, t] } else { [t, t - step] };
        let a = self.alpha(from.min(self.scheduler.levels as i64 - 1) as f32);
        let next = if to >= 0 { self.alpha(to as f32) } else { f64::from(last) };
        let (image, noise) = (a.sqrt(), (1.0 - a).sqrt());
        let (keep, move_by) =
            ((next / a).sqrt(), (a - next) / a.mul_add((1.0 - next).sqrt(), (a * (1.0 - a) * next).sqrt()));
        match self.at {
            0 => self.before = latents.to_vec(),
            1 => latents.copy_from_slice(&std::mem::take(&mut self.before)),
            _ => {}
        }
        // What it says where the first step comes to is in that step alone.
        self.seen.push(output.to_vec());
        if self.seen.len() > 4 {
            self.seen.remove(0);
        }
        let (weights, over): (&[f64], f64) = match self.seen.len() {
            1 => (&[1.0], 1.0),
            2 if self.at == 1 => (&[1.0, 1.0], 2.0),
            2 => (&[3.0, -1.0], 2.0),
            3 => (&[23.0, -16.0, 5.0], 12.0),
            _ => (&[55.0, -59.0, 37.0, -9.0], 24.0),
        };
        for (i, x) in latents.iter_mut().enumerate() {
            let said = weights.iter().zip(self.seen.iter().rev());
            let m = said.fold(0.0, |sum: f64, (weight, said)| weight.mul_add(f64::from(said[i]), sum)) / over;
            let wide = f64::from(*x);
            let m = if self.scheduler.prediction == Prediction::Velocity { image.mul_add(m, noise * wide) } else { m };
            *x = move_by.mul_add(m, keep * wide) as f32;
        }
        if self.at == 1 {
            self.seen.pop();
        }
    }

    /// x0 of latents that do not keep their variance.
    fn image(&self, sigma: f64, x: f64, m: f64) -> f64 {
        match self.scheduler.prediction {
            Prediction::Sample => m,
            Prediction::Velocity => {
                let variance = sigma * sigma + 1.0;
                (-sigma / variance.sqrt()).mul_add(m, x / variance)
            }
            Prediction::Epsilon | Prediction::Flow => (-sigma).mul_add(m, x),
        }
    }

    fn euler(&mut self, output: &[f32], latents: &mut [f32], noise: Option<&[f32]>) {
        let [sigma, next] = self.levels(self.at);
        let up = match noise {
            Some(_) => (next * next * (sigma * sigma - next * next) / (sigma * sigma)).sqrt(),
            None => 0.0,
        };
        let down = (next * next - up * up).sqrt();
        for (i, (x, m)) in latents.iter_mut().zip(output).enumerate() {
            let wide = f64::from(*x);
            let slope = (wide - self.image(sigma, wide, f64::from(*m))) / sigma;
            let moved = slope.mul_add(down - sigma, wide);
            *x = noise.map_or(moved, |noise| up.mul_add(f64::from(noise[i]), moved)) as f32;
        }
    }

    fn heun(&mut self, output: &[f32], latents: &mut [f32]) {
        let again = self.at % 2 == 1;
        let place = self.at / 2;
        let [sigma, next] = self.levels(place);
        let here = if again { next } else { sigma };
        let slope: Vec<f32> = latents
            .iter()
            .zip(output)
            .map(|(x, m)| ((f64::from(*x) - self.image(here, f64::from(*x), f64::from(*m))) / here) as f32)
            .collect();
        if again {
            let first = self.seen.pop().expect("the first look left its slope");
            for (((x, before), first), slope) in latents.iter_mut().zip(&self.before).zip(&first).zip(&slope) {
                let mean = (f64::from(*first) + f64::from(*slope)) / 2.0;
                *x = mean.mul_add(next - sigma, f64::from(*before)) as f32;
            }
            return;
        }
        self.before = latents.to_vec();
        latents
            .iter_mut()
            .zip(&slope)
            .for_each(|(x, s)| *x = f64::from(*s).mul_add(next - sigma, f64::from(*x)) as f32);
        // To a level without noise there is no second look.
        self.seen.push(slope);
    }

    /// Image and noise that latents of a level have, of those that keep their variance.
    fn shares(&self, sigma: f64) -> [f64; 2] {
        if self.scheduler.flow.is_some() {
            return [1.0 - sigma, sigma];
        }
        let image = 1.0 / (sigma * sigma + 1.0).sqrt();
        [image, sigma * image]
    }

    /// The logarithm of image over noise.
    fn lambda(&self, [image, noise]: [f64; 2]) -> f64 {
        libm::log(image) - libm::log(noise)
    }

    /// Notes x0 of the latents, of which so many are kept.
    fn see(&mut self, kept: usize, output: &[f32], latents: &[f32]) {
        let sigma = f64::from(self.sigmas[self.at]);
        let [image, noise] = self.shares(sigma);
        let x0 = |(x, m): (&f32, &f32)| {
            let (x, m) = (f64::from(*x), f64::from(*m));
            let x0 = match self.scheduler.prediction {
                Prediction::Epsilon => (-noise).mul_add(m, x) / image,
                Prediction::Sample => m,
                Prediction::Velocity => image.mul_add(x, -(noise * m)),
                Prediction::Flow => (-sigma).mul_add(m, x),
            };
            x0 as f32
        };
        let x0 = latents.iter().zip(output).map(x0).collect();
        self.seen.push(x0);
        if self.seen.len() > kept {
            self.seen.remove(0);
        }
    }

    fn dpm_solver(&mut self, output: &[f32], latents: &mut [f32], drawn: Option<&[f32]>) {
        let Kind::DpmSolver { order, heun, lower_order_final, euler_at_final, .. } = self.scheduler.kind else {
            unreachable!("it is this kind")
        };
        self.see(order, output, latents);
        let few = lower_order_final && self.steps < 15;
        let last = self.at + 1 == self.steps && (euler_at_final || few || !self.scheduler.ends_at_least());
        let [s, t] = self.levels(self.at).map(|sigma| self.shares(sigma));
        let (image, noise, before) = (t[0], t[1], s[1]);
        let h = self.lambda(t) - self.lambda(s);
        // What remains of the latents, what comes of x0 and of its change, and what is drawn.
        let (keep, gain, change, draw) = match drawn {
            None => {
                let gain = -image * libm::expm1(-h);
                let change = if heun { image * (libm::expm1(-h) / h + 1.0) } else { 0.5 * gain };
                (noise / before, gain, change, 0.0)
            }
            Some(_) => {
                let gain = -image * libm::expm1(-2.0 * h);
                let change = if heun { image * (-libm::expm1(-2.0 * h) / (-2.0 * h) + 1.0) } else { 0.5 * gain };
                (noise / before * libm::exp(-h), gain, change, noise * (-libm::expm1(-2.0 * h)).sqrt())
            }
        };
        let second = order > 1 && self.seen.len() > 1 && !last;
        let ratio = if second {
            let earlier = self.shares(f64::from(self.sigmas[self.at - 1]));
            h / (self.lambda(s) - self.lambda(earlier))
        } else {
            0.0
        };
        let now = &self.seen[self.seen.len() - 1];
        for (i, x) in latents.iter_mut().enumerate() {
            let m = f64::from(now[i]);
            let mut sum = gain.mul_add(m, keep * f64::from(*x));
            if second {
                let earlier = f64::from(self.seen[self.seen.len() - 2][i]);
                sum = change.mul_add(ratio * (m - earlier), sum);
            }
            *x = drawn.map_or(sum, |drawn| draw.mul_add(f64::from(drawn[i]), sum)) as f32;
        }
    }

    fn unipc(&mut self, output: &[f32], latents: &mut [f32]) {
        let Kind::UniPc { order, lower_order_final, .. } = self.scheduler.kind else { unreachable!("it is this kind") };
        // One more than the order: the corrector looks from the level before.
        self.see(order + 1, output, latents);
        if self.at > 0 {
            let (now, earlier) = self.seen.split_last().expect("it was just seen");
            let before = std::mem::take(&mut self.before);
            self.solve(self.at - 1, self.order, earlier, Some(now), &before, latents);
        }
        let most = if lower_order_final { order.min(self.steps - self.at) } else { order };
        self.order = most.min(self.at + 1);
        self.before = latents.to_vec();
        let before = self.before.clone();
        self.solve(self.at, self.order, &self.seen, None, &before, latents);
    }

    /// The latents behind step `place` of a solver of some order, from those before it: by what was seen up to its level and, where
    /// it is known, by what was seen behind it.
    fn solve(
        &self,
        place: usize,
        order: usize,
        seen: &[Vec<f32>],
        behind: Option<&Vec<f32>>,
        before: &[f32],
        latents: &mut [f32],
    ) {
        let Kind::UniPc { bh1, .. } = self.scheduler.kind else { unreachable!("it is this kind") };
        let [s, t] = self.levels(place).map(|sigma| self.shares(sigma));
        let h = self.lambda(t) - self.lambda(s);
        let first = libm::expm1(-h);
        let scale = if bh1 { -h } else { first };
        // Where earlier levels lie, in steps from this one.
        let mut apart: Vec<f64> = (1..order)
            .map(|i| (self.lambda(self.shares(f64::from(self.sigmas[place - i]))) - self.lambda(s)) / h)
            .collect();
        apart.push(1.0);
        let (mut phi, mut factorial, mut sides) = (first / -h - 1.0, 1.0, Vec::new());
        for i in 1..=order {
            sides.push(phi * factorial / scale);
            factorial *= (i + 1) as f64;
            phi = phi / -h - 1.0 / factorial;
        }
        let count = if behind.is_some() { order } else { order - 1 };
        let weights = match (behind.is_some(), order) {
            (true, 1) | (false, 2) => vec![0.5],
            _ => solved(&apart[..count], &sides[..count]),
        };
        let (now, keep) = (&seen[seen.len() - 1], t[1] / s[1]);
        for (i, x) in latents.iter_mut().enumerate() {
            let m = f64::from(now[i]);
            let mut change = 0.0;
            for (j, weight) in weights.iter().enumerate() {
                let other = match behind.filter(|_| j + 1 == order) {
                    Some(behind) => f64::from(behind[i]) - m,
                    None => (f64::from(seen[seen.len() - 2 - j][i]) - m) / apart[j],
                };
                change = weight.mul_add(other, change);
            }
            let plain = (-t[0] * first).mul_add(m, keep * f64::from(before[i]));
            *x = (-t[0] * scale).mul_add(change, plain) as f32;
        }
    }

    fn lcm(&mut self, clip: Option<f64>, scaling: f64, output: &[f32], latents: &mut [f32], drawn: Option<&[f32]>) {
        let t = self.timesteps[self.at];
        let (a, scaled) = (self.alpha(t), f64::from(t) * scaling);
        let next = self.timesteps.get(self.at + 1).map_or(a, |next| self.alpha(*next));
        let (image, noise) = (a.sqrt(), (1.0 - a).sqrt());
        let skip = 0.25 / (scaled * scaled + 0.25);
        let out = scaled / (scaled * scaled + 0.25).sqrt();
        for (i, (x, m)) in latents.iter_mut().zip(output).enumerate() {
            let (wide, m) = (f64::from(*x), f64::from(*m));
            let x0 = match self.scheduler.prediction {
                Prediction::Epsilon => (-noise).mul_add(m, wide) / image,
                Prediction::Sample => m,
                _ => image.mul_add(wide, -(noise * m)),
            };
            let x0 = clip.map_or(x0, |most| x0.clamp(-most, most));
            let denoised = out.mul_add(x0, skip * wide);
            let noised = |drawn: &[f32]| next.sqrt().mul_add(denoised, (1.0 - next).sqrt() * f64::from(drawn[i]));
            *x = drawn.map_or(denoised, noised) as f32;
        }
    }

    fn flow(&mut self, output: &[f32], latents: &mut [f32], drawn: Option<&[f32]>) {
        let [sigma, next] = self.levels(self.at);
        for (i, (x, m)) in latents.iter_mut().zip(output).enumerate() {
            let (wide, m) = (f64::from(*x), f64::from(*m));
            let straight = (next - sigma).mul_add(m, wide);
            let again = |drawn: &[f32]| (1.0 - next).mul_add((-sigma).mul_add(m, wide), next * f64::from(drawn[i]));
            *x = drawn.map_or(straight, again) as f32;
        }
    }
}

/// Weights w of which, for each power p below their number, the sum of `w[j] * apart[j]^p` is `sides[p]`: by elimination, rows in
/// their order.
fn solved(apart: &[f64], sides: &[f64]) -> Vec<f64> {
    let n = apart.len();
    let mut rows: Vec<Vec<f64>> = (0..n)
        .map(|p| apart.iter().map(|a| (0..p).fold(1.0, |power, _| power * a)).chain([sides[p]]).collect())
        .collect();
    for pivot in 0..n {
        let (above, below) = rows.split_at_mut(pivot + 1);
        for row in below {
            let factor = row[pivot] / above[pivot][pivot];
            row[pivot..].iter_mut().zip(&above[pivot][pivot..]).for_each(|(x, of_pivot)| *x -= factor * of_pivot);
        }
    }
    let mut weights = vec![0.0; n];
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|column| rows[row][column] * weights[column]).sum();
        weights[row] = (rows[row][n] - known) / rows[row][row];
    }
    weights
}
