//! Samplers against recorded trajectories of diffusers (`goldens/generate/samplers.py`), and what they promise of themselves.

use samebits_models::diffusion::{Sampler, Scheduler, noise};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

/// The model of the recordings.
fn model(x: &[f32], t: f32) -> Vec<f32> {
    let before = |i: usize| x[(i + x.len() - 1) % x.len()];
    (0..x.len()).map(|i| 0.6 * x[i] + 0.3 * before(i) + t * 0.0001 - 0.05).collect()
}

/// Latents behind every call, from the first on; the latents of several images stand side by side.
fn run(mut sampler: Sampler, mut latents: Vec<f32>, drawn: impl Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
    let (mut all, mut draws) = (Vec::new(), 0);
    let mut input = latents.clone();
    while let Some(t) = sampler.timestep() {
        sampler.scale_input(&latents, &mut input);
        let noise = sampler.draws().then(|| drawn(draws));
        draws += usize::from(noise.is_some());
        sampler.step(&model(&input, t), &mut latents, noise.as_deref());
        all.push(latents.clone());
    }
    all
}

#[test]
fn trajectories_are_those_of_diffusers() {
    let file: Value = serde_json::from_str(include_str!("samplers.json")).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert!(cases.len() >= 34, "{}", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (scheduler, _) = Scheduler::parse(&case["config"].to_string()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let sampler = Sampler::new(&scheduler, case["steps"].as_u64().unwrap() as usize, case["mu"].as_f64()).unwrap();
        let near = |a: f32, b: f32, by: f32| (a - b).abs() <= by * b.abs().max(1.0);
        let (found, wanted) = (sampler.timesteps().to_vec(), numbers(&case["timesteps"]));
        if found.len() != wanted.len() || !found.iter().zip(&wanted).all(|(a, b)| near(*a, *b, 2e-6)) {
            wrong.push(format!("{name}: timesteps {found:?}\n where {wanted:?} are recorded"));
            continue;
        }
        let scale = case["scale"].as_f64().unwrap() as f32;
        assert!(near(sampler.initial_scale(), scale, 2e-6), "{name}: {} for {scale}", sampler.initial_scale());
        let latents: Vec<f32> = numbers(&case["noise"]).iter().map(|v| v * scale).collect();
        let drawn: Vec<Vec<f32>> = case["drawn"].as_array().unwrap().iter().map(numbers).collect();
        let found = run(sampler, latents, |draw| drawn[draw].clone());
        let wanted: Vec<Vec<f32>> = case["latents"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(found.len(), wanted.len(), "{name}");
        // Of the largest latent so far: what is rounded there stays.
        let mut largest = 1f32;
        for (call, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            largest = wanted.iter().fold(largest, |most, v| most.max(v.abs()));
            let worst = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            if worst.is_nan() || worst > 1e-5 * largest {
                wrong.push(format!("{name}: call {call} is off by {worst}, of {largest}"));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// An image has the bits that it has alone, wherever it stands among others, with the noise of its own.
#[test]
fn images_do_not_meet() {
    let text = r#"{"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}"#;
    let scheduler = Scheduler::parse(text).unwrap().0;
    // A model without the sum of neighbours.
    let of_images = |images: &[u64]| {
        let mut sampler = Sampler::new(&scheduler, 9, None).unwrap();
        let drawn = |draw: u64| {
            let of_image = |image: &u64| {
                let mut some = vec![0f32; 6];
                noise(5, *image, draw, 0, &mut some);
                some
            };
            images.iter().flat_map(of_image).collect::<Vec<f32>>()
        };
        let mut latents = drawn(0);
        let mut draw = 1;
        while sampler.timestep().is_some() {
            let output: Vec<f32> = latents.iter().map(|x| 0.7 * x - 0.1).collect();
            sampler.step(&output, &mut latents, Some(&drawn(draw)));
            draw += 1;
        }
        latents.chunks(6).map(|image| image.iter().map(|v| v.to_bits()).collect()).collect::<Vec<Vec<u32>>>()
    };
    let together = of_images(&[3, 0, 8]);
    for (place, image) in [3, 0, 8].into_iter().enumerate() {
        assert_eq!(of_images(&[image])[0], together[place]);
    }
}

#[test]
fn what_is_not_computed_is_refused_by_field() {
    let refused = |text: &str| Scheduler::parse(text).unwrap_err().to_string();
    for (text, expected) in [
        (r#"{"_class_name": "DDPMScheduler"}"#, "`_class_name`"),
        (r#"{"_class_name": "PNDMScheduler"}"#, "`skip_prk_steps`"),
        (r#"{"_class_name": "DDIMScheduler", "thresholding": true}"#, "`thresholding`"),
        (r#"{"_class_name": "EulerDiscreteScheduler", "use_beta_sigmas": true}"#, "`use_beta_sigmas`"),
        (r#"{"_class_name": "EulerDiscreteScheduler", "prediction_type": "score"}"#, "`prediction_type`"),
        (r#"{"_class_name": "EulerAncestralDiscreteScheduler", "prediction_type": "sample"}"#, "`prediction_type`"),
        (r#"{"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3}"#, "`solver_order`"),
        (r#"{"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": true}"#, "`prediction_type`"),
        (r#"{"_class_name": "DDIMScheduler", "beta_schedule": "sigmoid"}"#, "`beta_schedule`"),
    ] {
        let found = refused(text);
        assert!(found.contains(expected), "{text}: {found}");
    }
    // All of them in one run.
    let both = refused(r#"{"_class_name": "DDIMScheduler", "thresholding": true, "timestep_spacing": "odd"}"#);
    assert!(both.contains("`thresholding`") && both.contains("`timestep_spacing`"), "{both}");
    let (scheduler, passed) = Scheduler::parse(r#"{"_class_name": "DDIMScheduler", "skip_prk_steps": true}"#).unwrap();
    assert!(passed.iter().any(|line| line.contains("skip_prk_steps")), "{passed:?}");
    for (steps, mu, expected) in
        [(0, None, "1 to 1000 steps"), (1001, None, "1 to 1000 steps"), (5, Some(1.0), "nothing is shifted")]
    {
        let found = Sampler::new(&scheduler, steps, mu).unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }
    let beyond = Scheduler::parse(r#"{"_class_name": "DDIMScheduler", "steps_offset": 1}"#).unwrap().0;
    let found = Sampler::new(&beyond, 1000, None).unwrap_err().to_string();
    assert!(found.contains("`steps_offset` is 1, beyond the 1000 levels"), "{found}");
    let flow = r#"{"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": true}"#;
    let found = Sampler::new(&Scheduler::parse(flow).unwrap().0, 5, None).unwrap_err().to_string();
    assert!(found.contains("a shift for the size of the image is needed"), "{found}");
}
