//! Components of images, by the names of what their forwards take.

use super::{Loading, Working, warn};
use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use samebits_contract::tensor;
use samebits_models::Precision;
use samebits_models::diffusion::Component;
use samebits_ops::{Cpu, Tensor, bf16, f16};
use std::collections::BTreeMap;
use std::path::Path;

/// The answer of the component in `dir` to the tensors of a file.
pub fn forward(dir: &Path, inputs: &Path, dtype: Precision, cpu: &Cpu) -> Result<BTreeMap<String, tensor::Tensor>> {
    let given = read(inputs).with_context(|| inputs.display().to_string())?;
    let component = load(dir, dtype, cpu)?;
    let working = Working::on("a forward".into());
    let found = component.forward(cpu, &given).with_context(|| inputs.display().to_string())?;
    drop(working);
    let mut all = BTreeMap::new();
    for (name, values) in found {
        let floats = values.as_slice::<f32>().context("an answer is f32")?.to_vec();
        let first = floats.iter().position(|value| !value.is_finite());
        if let Some(first) = first {
            let what = if dtype == Precision::Fp16 {
                "fp16 ends at 65504, so run it in bf16 or fp32"
            } else {
                "run it in fp32"
            };
            let value = floats[first];
            bail!("{}: element {first} of `{name}` would be {value}; {what}, or give smaller inputs", inputs.display());
        }
        all.insert(name, tensor::Tensor::fp32(values.shape(), floats));
    }
    Ok(all)
}

/// A component, with lines on what of its config is passed by.
pub fn load(dir: &Path, dtype: Precision, cpu: &Cpu) -> Result<Component> {
    let loading = Loading::of(dir);
    let component = Component::load(dir, dtype, cpu, |done, total| loading.at(done, total))?;
    drop(loading);
    component.passed.iter().for_each(|line| warn(line));
    samebits_ops::keep_freed_memory();
    Ok(component)
}

/// The tensors of a safetensors file: floats as they are, integers in i32.
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let bytes = std::fs::read(path)?;
    let file = SafeTensors::deserialize(&bytes).context("not a safetensors file")?;
    let mut all = BTreeMap::new();
    for (name, stored) in file.iter() {
        let (data, shape) = (stored.data(), stored.shape());
        let tensor = match stored.dtype() {
            Dtype::F32 => Tensor::new(super::forward::words(data, f32::from_le_bytes), shape)?,
            Dtype::I32 => Tensor::new(super::forward::words(data, i32::from_le_bytes), shape)?,
            Dtype::BF16 => Tensor::new(halves(data, bf16::from_le_bytes), shape)?,
            Dtype::F16 => Tensor::new(halves(data, f16::from_le_bytes), shape)?,
            Dtype::I64 => {
                let all = data.as_chunks::<8>().0.iter().map(|bytes| i32::try_from(i64::from_le_bytes(*bytes)));
                let all: Vec<i32> =
                    all.collect::<Result<_, _>>().with_context(|| format!("tensor `{name}`: an integer beyond i32"))?;
                Tensor::new(all, shape)?
            }
            Dtype::F64 => {
                let all = data.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32);
                Tensor::new(all.collect::<Vec<f32>>(), shape)?
            }
            other => bail!("tensor `{name}`: dtype is {other:?}; use F32, F16, BF16, I32 or I64"),
        };
        all.insert(name.to_string(), tensor);
    }
    ensure!(!all.is_empty(), "it holds no tensors");
    Ok(all)
}

/// Little-endian numbers of two bytes.
fn halves<T>(data: &[u8], number: impl Fn([u8; 2]) -> T) -> Vec<T> {
    data.as_chunks::<2>().0.iter().map(|bytes| number(*bytes)).collect()
}
