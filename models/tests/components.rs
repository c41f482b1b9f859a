//! Components of image models answer what diffusers and transformers do (`goldens/generate/components.py` records them), with the
//! same bits whatever else is computed; what they do not compute they refuse.

use safetensors::{Dtype, SafeTensors};
use samebits_models::diffusion::{Component, Images, Pipeline, Request};
use samebits_models::{ModelError, Precision};
use samebits_ops::{Cpu, Isa, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const NAMES: [&str; 7] = ["vae", "vae_plain", "unet", "unet2", "unet_xl", "clip", "clip_projection"];

type Tensors = BTreeMap<String, Tensor>;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/components").join(name)
}

fn load(dir: &Path, precision: Precision) -> Result<Component, ModelError> {
    Component::load(dir, precision, &Cpu::best(), |_, _| {})
}

/// A run: what went in, the answer in fp32 and that of the library in bf16.
struct Recorded {
    name: String,
    inputs: Tensors,
    out: Vec<f32>,
    bf16: Vec<f32>,
}

fn recorded(name: &str) -> Vec<Recorded> {
    let bytes = fs::read(folder(name).join("recorded.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| -> Vec<f32> { data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect() };
    let mut runs: BTreeMap<String, Recorded> = BTreeMap::new();
    for (name, tensor) in file.iter() {
        let (run, what) = name.split_once('.').unwrap();
        let empty = || Recorded { name: run.into(), inputs: Tensors::new(), out: Vec::new(), bf16: Vec::new() };
        let run = runs.entry(run.into()).or_insert_with(empty);
        match what {
            "out" => run.out = floats(tensor.data()),
            "bf16" => run.bf16 = floats(tensor.data()),
            _ => {
                let values = if tensor.dtype() == Dtype::I32 {
                    let integers = tensor.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
                    Tensor::new::<i32>(integers, tensor.shape())
                } else {
                    Tensor::new(floats(tensor.data()), tensor.shape())
                };
                run.inputs.insert(what.strip_prefix("in.").unwrap().into(), values.unwrap());
            }
        }
    }
    runs.into_values().collect()
}

fn out(component: &Component, cpu: &Cpu, inputs: &Tensors) -> Vec<f32> {
    component.forward(cpu, inputs).unwrap()["out"].as_slice::<f32>().unwrap().to_vec()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Root of the mean square of a difference.
fn rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    (a.iter().zip(b).map(square).sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
fn answers_are_those_of_the_library() {
    for name in NAMES {
        let [wide, narrow] =
            [Precision::Fp32, Precision::Bf16].map(|precision| load(&folder(name), precision).unwrap());
        for run in recorded(name) {
            let found = out(&wide, &Cpu::best(), &run.inputs);
            assert_eq!(found.len(), run.out.len(), "{name} {}", run.name);
            let largest = found.iter().zip(&run.out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let [ours, theirs] = [&out(&narrow, &Cpu::best(), &run.inputs), &run.bf16].map(|bf16| rms(bf16, &run.out));
            println!("{name} {}: fp32 within {largest:.1e}; bf16 RMS {ours:.2e}, the library's {theirs:.2e}", run.name);
            assert!(largest <= 1e-4, "{name} {}: {largest}", run.name);
            assert!(ours <= theirs, "{name} {}: {ours} and {theirs}", run.name);
        }
    }
}

/// Rows of all inputs that have one for each image.
fn rows(inputs: &Tensors, batch: usize, rows: &[usize]) -> Tensors {
    let of = |tensor: &Tensor| {
        if tensor.shape()[0] != batch {
            return Tensor::new(tensor.as_slice::<f32>().unwrap().to_vec(), tensor.shape()).unwrap();
        }
        let shape = [&[rows.len()], &tensor.shape()[1..]].concat();
        let size: usize = shape[1..].iter().product();
        let pick = |row: &usize| row * size..(row + 1) * size;
        match tensor.as_slice::<i32>() {
            Some(all) => Tensor::new(rows.iter().flat_map(|row| all[pick(row)].to_vec()).collect::<Vec<i32>>(), &shape),
            None => {
                let all = tensor.as_slice::<f32>().unwrap();
                Tensor::new(rows.iter().flat_map(|row| all[pick(row)].to_vec()).collect::<Vec<f32>>(), &shape)
            }
        }
        .unwrap()
    };
    inputs.iter().map(|(name, tensor)| (name.clone(), of(tensor))).collect()
}

#[test]
fn an_image_has_the_bits_that_it_has_alone() {
    for name in NAMES {
        for precision in [Precision::Bf16, Precision::Fp32] {
            let component = load(&folder(name), precision).unwrap();
            let run = recorded(name).into_iter().max_by_key(|run| run.out.len()).unwrap();
            let batch = run.inputs.values().map(|tensor| tensor.shape()[0]).max().unwrap();
            let cpu = Cpu::best();
            let whole = out(&component, &cpu, &run.inputs);
            let size = whole.len() / batch;
            for count in 1..=9 {
                let picked: Vec<usize> = (0..count).map(|i| (i * 2 + 1) % batch).collect();
                let found = out(&component, &cpu, &rows(&run.inputs, batch, &picked));
                for (place, row) in picked.iter().enumerate() {
                    let [found, alone] = [&found[place * size..][..size], &whole[row * size..][..size]].map(bits);
                    assert_eq!(found, alone, "{name} {precision:?}: image {row} at {place} of {count}");
                }
            }
        }
    }
}

#[test]
fn no_setting_moves_a_bit() {
    for name in NAMES {
        let component = load(&folder(name), Precision::Bf16).unwrap();
        for run in recorded(name) {
            let whole = bits(&out(&component, &Cpu::best(), &run.inputs));
            for isa in Isa::all().filter(|isa| isa.available()) {
                for threads in [1, 3] {
                    let cpu = Cpu::new(isa, threads, usize::MAX).unwrap();
                    let component = Component::load(&folder(name), Precision::Bf16, &cpu, |_, _| {}).unwrap();
                    assert_eq!(bits(&out(&component, &cpu, &run.inputs)), whole, "{name} {isa} {threads}");
                }
            }
            let tight = (12..24).map(|power| Cpu::new(Isa::best(), 2, 1 << power).unwrap());
            let found =
                tight.filter_map(|cpu| component.forward(&cpu, &run.inputs).ok()).next().expect("a budget does");
            assert_eq!(bits(found["out"].as_slice::<f32>().unwrap()), whole, "{name} in a tight budget");
        }
    }
}

/// A copy of a folder with another config.
fn changed(name: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: serde_json::Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    dir
}

fn refused(dir: &Path) -> String {
    load(dir, Precision::Bf16).err().expect("it is refused").to_string()
}

#[test]
fn what_is_not_computed_is_refused_by_field_all_at_once() {
    let all = [
        ("vae", "act_fn", json!("relu")),
        ("vae", "latents_mean", json!([0.5])),
        ("vae", "down_block_types", json!(["DownEncoderBlock2D", "AttnDownEncoderBlock2D"])),
        ("vae", "norm_num_groups", json!(3)),
        ("vae", "block_out_channels", json!([8, 0])),
        ("vae", "shift_factor", json!("none")),
        ("vae", "what_is_this", json!(1)),
        ("unet", "num_class_embeds", json!(4)),
        ("unet", "mid_block_type", json!("UNetMidBlock2D")),
        ("unet", "only_cross_attention", json!(true)),
        ("unet", "resnet_time_scale_shift", json!("scale_shift")),
        ("unet", "attention_head_dim", json!([2, 3])),
        ("unet", "layers_per_block", json!([1])),
        ("unet", "addition_embed_type", json!("image")),
        ("unet", "time_cond_proj_dim", json!(8)),
        ("unet", "mid_block_scale_factor", json!(0.5)),
        ("unet", "conv_in_kernel", json!(2)),
        ("clip", "hidden_act", json!("relu")),
        ("clip", "num_attention_heads", json!(3)),
        ("clip", "model_type", json!("t5")),
        ("clip", "architectures", json!(["CLIPModel"])),
    ];
    for (name, field, value) in &all {
        let dir = changed(name, |config| drop(config.insert((*field).into(), value.clone())));
        let error = refused(dir.path());
        assert!(error.contains(&format!("`{field}`")) && error.lines().count() == 1, "{field}: {error}");
    }
    let dir = changed("unet", |config| {
        for (_, field, value) in all.iter().filter(|(name, field, _)| *name == "unet" && *field != "layers_per_block") {
            config.insert((*field).into(), value.clone());
        }
    });
    let error = refused(dir.path());
    for (_, field, _) in all.iter().filter(|(name, field, _)| *name == "unet" && *field != "layers_per_block") {
        assert!(error.contains(&format!("`{field}`")), "{field}: {error}");
    }
}

#[test]
fn tensors_are_those_of_the_config() {
    let dir = changed("vae", |config| drop(config.insert("use_quant_conv".into(), false.into())));
    assert!(
        refused(dir.path()).contains("tensor `quant_conv.bias` is not part of the model"),
        "{}",
        refused(dir.path())
    );
    let dir = changed("vae", |config| drop(config.insert("layers_per_block".into(), 2.into())));
    let error = refused(dir.path());
    assert!(error.contains("tensor `decoder.up_blocks.0.resnets.2.conv1.bias` is missing"), "{error}");
    let dir = changed("unet", |config| drop(config.insert("cross_attention_dim".into(), 8.into())));
    let error = refused(dir.path());
    assert!(error.contains("attn2.to_k.weight` has shape [8, 12]; config.json asks for [8, 8]"), "{error}");
    let dir = changed("clip", |_| {});
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(refused(dir.path()).contains("has neither diffusion_pytorch_model.safetensors nor model.safetensors"));
}

/// Names that attention of an autoencoder had before 2023.
#[test]
fn older_names_are_known() {
    let dir = changed("vae", |_| {});
    let path = dir.path().join("diffusion_pytorch_model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let renamed = file.iter().map(|(name, tensor)| {
        let old = [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")];
        (old.iter().fold(name.to_string(), |name, (new, old)| name.replace(new, old)), tensor)
    });
    fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    let run = recorded("vae").remove(0);
    let [old, new] =
        [dir.path(), &folder("vae")].map(|dir| out(&load(dir, Precision::Fp32).unwrap(), &Cpu::best(), &run.inputs));
    assert_eq!(bits(&old), bits(&new));
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let refused = |name: &str, change: &dyn Fn(&mut Tensors)| {
        let mut inputs = recorded(name).remove(0).inputs;
        change(&mut inputs);
        let component = load(&folder(name), Precision::Bf16).unwrap();
        component.forward(&Cpu::best(), &inputs).err().expect("it is refused").to_string()
    };
    let zeros = |shape: &[usize]| Tensor::new(vec![0f32; shape.iter().product()], shape).unwrap();
    let put = |name: &'static str, shape: &'static [usize]| {
        move |inputs: &mut Tensors| drop(inputs.insert(name.into(), zeros(shape)))
    };
    for (name, change, says) in [
        ("vae", &put("z", &[1, 3, 4, 4]) as &dyn Fn(&mut Tensors), "it must be floats of shape [.., 4, .., ..]"),
        ("vae", &put("sample", &[1, 3, 4, 4]), "give `z` to decode, or `sample` to encode"),
        ("vae", &put("latents", &[1]), "`latents` is no argument"),
        ("unet", &put("sample", &[1, 5, 4, 4]), "it must be floats of shape [.., 4, .., ..]"),
        ("unet", &put("timestep", &[4]), "`timestep` has 4 numbers"),
        ("unet", &put("encoder_hidden_states", &[1, 2, 11]), "`encoder_hidden_states` is fp32 of shape [1, 2, 11]"),
        ("unet", &put("time_ids", &[1, 6]), "`time_ids` is no argument"),
        ("unet", &|inputs| drop(inputs.remove("timestep")), "`timestep` is missing"),
        ("unet_xl", &|inputs| drop(inputs.remove("time_ids")), "`text_embeds`"),
        ("clip", &put("input_ids", &[1, 4]), "it must be integers [B, T]"),
        (
            "clip",
            &|inputs| drop(inputs.insert("input_ids".into(), Tensor::new(vec![99], &[1, 1]).unwrap())),
            "the vocabulary is 0 to 98",
        ),
        (
            "clip",
            &|inputs| drop(inputs.insert("input_ids".into(), Tensor::new(vec![1; 14], &[1, 14]).unwrap())),
            "places for 1 to 13",
        ),
        ("clip", &put("attention_mask", &[3, 9]), "ones and then zeros"),
    ] {
        let error = refused(name, change);
        assert!(error.contains(says), "{name}: {error}, not {says}");
    }
}

/// What a pipeline makes of the recorded texts, or of some of them.
fn images(pipeline: &Pipeline, given: &SafeTensors, prompts: &[usize], negative: Option<&str>) -> Images {
    let texts = ["A lighthouse, in the  fog!", "it's 12 o'clock"];
    let floats = |name: &str, axis: usize| {
        let tensor = given.tensor(name).unwrap();
        let (all, mut shape) = (numbers(tensor.data()), tensor.shape().to_vec());
        let size: usize = shape[axis + 1..].iter().product();
        let draws = all.chunks(shape[axis] * size);
        let picked = draws.flat_map(|draw| prompts.iter().flat_map(|image| draw[image * size..][..size].to_vec()));
        let picked: Vec<f32> = picked.collect();
        shape[axis] = prompts.len();
        Tensor::new(picked, &shape).unwrap()
    };
    let (latents, noise) = (floats("latents.0", 0), floats("noise", 1));
    let request = Request {
        prompts: &prompts.iter().map(|number| texts[*number].to_string()).collect::<Vec<_>>(),
        negative,
        guidance: Some(5.0),
        size: Some([16, 24]),
        steps: 4,
        seed: 0,
        latents: Some(&latents),
        noise: Some(&noise),
    };
    pipeline.run(&Cpu::best(), &request, |_, _| {}).unwrap()
}

fn numbers(data: &[u8]) -> Vec<f32> {
    data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// As the library gives them: from 0 to 1.
fn picture(images: &Images) -> Vec<f32> {
    images.image.as_slice::<f32>().unwrap().iter().map(|x| (x / 2.0 + 0.5).clamp(0.0, 1.0)).collect()
}

#[test]
fn pictures_are_those_of_the_library_alone_and_together() {
    agrees("pipeline", Some("\u{c9}tude in C\u{2019}s key <|endoftext|> 3"));
}

/// The last layer of its first text encoder holds a NaN, which nobody reads; zeros stand for a negative prompt.
#[test]
fn pictures_of_two_text_encoders_are_those_of_the_library() {
    agrees("pipeline_xl", None);
}

fn agrees(pipeline: &str, negative: Option<&str>) {
    let dir = folder(pipeline);
    let bytes = fs::read(dir.join("recorded.safetensors")).unwrap();
    let given = SafeTensors::deserialize(&bytes).unwrap();
    let recorded = |name: String| numbers(given.tensor(&name).unwrap().data());
    let load = |precision, sampler| Pipeline::load(&dir, precision, sampler, &Cpu::best(), |_, _| {}).unwrap();
    for (name, sampler) in
        [("euler", None), ("euler_ancestral", Some("euler_ancestral")), ("dpmpp_2m_karras", Some("dpmpp_2m_karras"))]
    {
        let [wide, narrow] = [Precision::Fp32, Precision::Bf16].map(|precision| load(precision, sampler));
        let (found, image) = (images(&wide, &given, &[0, 1], negative), recorded(format!("{name}.image")));
        for (step, latents) in found.latents.iter().enumerate() {
            let wanted = recorded(format!("{name}.latents.{}", step + 1));
            let most = wanted.iter().fold(1f32, |most, x| most.max(x.abs()));
            let latents = latents.as_slice::<f32>().unwrap();
            let largest = latents.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest <= 1e-5 * most, "{name}, step {step}: {largest} of {most}");
        }
        let largest = picture(&found).iter().zip(&image).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let both = images(&narrow, &given, &[0, 1], negative);
        let [ours, theirs] = [picture(&both), recorded(format!("{name}.bf16"))].map(|bf16| rms(&bf16, &image));
        println!("{pipeline} {name}: fp32 within {largest:.1e}; bf16 RMS {ours:.2e}, the library's {theirs:.2e}");
        assert!(largest <= 1e-4 && ours <= theirs, "{name}: {largest}, {ours} and {theirs}");
        for number in [0, 1] {
            let (alone, all) = (picture(&images(&narrow, &given, &[number], negative)), picture(&both));
            let size = alone.len();
            assert_eq!(bits(&alone), bits(&all[number * size..][..size]), "{name}, image {number}");
        }
    }
}
