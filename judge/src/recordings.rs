//! What was recorded: of the models that chain cases name, folders in Hugging Face layout with a `reference.safetensors`
//! beside the weights; and the vectors, inputs of an op with the outputs that an independent program computed.

use samebits_contract::case::Case;
use samebits_contract::fill::Fill;
use samebits_contract::gradients::{self, inputs};
use samebits_contract::table::CaseSpec;
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::File;
use samebits_schema::{IEEE, Op, Output, PROFILE};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The vectors that this crate was built with, by name.
static VECTORS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/vectors.rs"));

/// What is recorded beside a checkpoint of the outputs that its program declares, by their names.
pub struct Recorded {
    /// The reference.
    pub fp32: BTreeMap<&'static str, Tensor>,
    /// The recorded run in the case's own dtype, when it is not the reference itself.
    pub same_dtype: Option<BTreeMap<&'static str, Tensor>>,
}

/// The inputs that a program declares, from what is recorded: all but optional ones that are not there.
fn declared(program: &Op, file: &mut File) -> Result<BTreeMap<String, Tensor>, String> {
    let mut inputs = BTreeMap::new();
    for input in program.inputs {
        match file.tensors.remove(input.name) {
            Some(tensor) => _ = inputs.insert(input.name.to_string(), tensor),
            None if input.optional => {}
            None => return Err(format!("reference.safetensors: tensor `{}` is missing", input.name)),
        }
    }
    Ok(inputs)
}

/// A folder of checkpoint folders, and the vectors.
#[derive(Clone, Debug, Default)]
pub struct Recordings {
    dir: Option<PathBuf>,
}

impl Recordings {
    /// Those of the checkpoints in `dir`; with `None`, every case that needs one says what is missing. Vectors are those in
    /// the folder `vectors` beside it, and where that has none of a name, those that this crate was built with.
    pub fn new(dir: Option<PathBuf>) -> Recordings {
        Recordings { dir }
    }

    /// The folder of the model called `name`.
    ///
    /// # Errors
    /// Why there is none, in one line.
    pub fn folder(&self, name: &str) -> Result<PathBuf, String> {
        let dir = self.dir.as_ref().ok_or("no checkpoints at hand; run inside the repository or give --root")?;
        if Path::new(name).components().count() != 1 || name.starts_with('.') {
            return Err(format!("model `{name}`: name one folder of {}", dir.display()));
        }
        let folder = dir.join(name);
        if folder.is_dir() { Ok(folder) } else { Err(format!("model `{name}`: {} is not a folder", folder.display())) }
    }

    fn reference(&self, model: &str) -> Result<File, String> {
        let path = self.folder(model)?.join("reference.safetensors");
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        File::decode(&bytes).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The file of a vector, which must be one of the op and dtype of `spec`.
    fn vector(&self, spec: &CaseSpec, name: &str) -> Result<File, String> {
        let path = self.dir.as_ref().map(|dir| dir.with_file_name("vectors").join(format!("{name}.safetensors")));
        let path = path.filter(|path| path.exists());
        let place = path.as_ref().map_or(format!("vector `{name}`"), |path| path.display().to_string());
        let wrong = |why: String| format!("{place}: {why}");
        let built_in = || VECTORS.iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes.to_vec());
        let bytes = match &path {
            Some(path) => std::fs::read(path).map_err(|e| wrong(e.to_string()))?,
            None => built_in().ok_or_else(|| wrong("there is no such vector".into()))?,
        };
        let file = File::decode(&bytes).map_err(|e| wrong(e.to_string()))?;
        match file.metadata.get("op") {
            Some(op) if *op == spec.op => match file.metadata.get(PROFILE.name).map_or(IEEE, String::as_str) {
                profile if profile == spec.profile() => Ok(file),
                other => {
                    Err(wrong(format!("its profile is {other}; the case `{}` is one of {}", spec.name, spec.profile())))
                }
            },
            other => Err(wrong(format!("its op is {other:?}; the case `{}` is one of {}", spec.name, spec.op))),
        }
    }

    /// The outputs that an independent program computed for the vector `name`, by the names and in the dtypes of the case;
    /// those that have one dtype always stand there once.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn expected(&self, spec: &CaseSpec, name: &str) -> Result<BTreeMap<String, Tensor>, String> {
        let mut file = self.vector(spec, name)?;
        let mut outputs = BTreeMap::new();
        for output in spec.spec().outputs {
            let dtype = spec.spec().output_dtype(output, spec.out);
            let stored = match dtype {
                DType::Fp32 | DType::I32 => format!("expect.{}", output.name),
                narrow => format!("expect.{}_{narrow}", output.name),
            };
            let tensor = file.tensors.remove(&stored).filter(|tensor| tensor.dtype() == dtype);
            let tensor = tensor.ok_or_else(|| format!("vectors/{name}.safetensors: no {dtype} tensor `{stored}`"))?;
            outputs.insert(output.name.to_string(), tensor);
        }
        Ok(outputs)
    }

    /// The case with its inputs, of draw `seed`; recorded ones come from the checkpoint or the vector.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn fill(&self, spec: &CaseSpec, seed: u64) -> Result<Case, String> {
        let mut case = spec.build_seeded(seed);
        if let Some(name) = &spec.vector {
            let mut file = self.vector(spec, name)?;
            file.tensors.retain(|name, _| !name.starts_with("expect."));
            file.metadata.retain(|name, _| name != "op");
            (case.inputs, case.params) = (file.tensors, file.metadata);
            let dtype = spec.spec().dtype(&case);
            if dtype != Some(spec.dtype) {
                return Err(format!("vectors/{name}.safetensors: not of {}, as the case says", spec.dtype));
            }
        } else if spec.fill == Fill::Recorded && spec.spec().is_model_gradient() {
            case.inputs = self.batches(spec)?.swap_remove(0);
        } else if spec.fill == Fill::Recorded {
            case.inputs = declared(spec.spec(), &mut self.reference(&spec.params["model"])?)?;
        }
        Ok(case)
    }

    /// The recorded outputs that `spec` is held to: `<output>.fp32`, and `<output>.<dtype>` of another dtype.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn recorded(&self, spec: &CaseSpec) -> Result<Recorded, String> {
        let mut reference = self.reference(&spec.params["model"])?;
        let mut take = |dtype: DType| {
            let one = |output: &'static Output| {
                let stored = format!("{}.{dtype}", output.name);
                let tensor = reference.tensors.remove(&stored);
                let tensor = tensor.ok_or_else(|| format!("reference.safetensors: tensor `{stored}` is missing"))?;
                Ok::<_, String>((output.name, tensor))
            };
            spec.spec().outputs.iter().map(one).collect::<Result<BTreeMap<_, _>, _>>()
        };
        let fp32 = take(DType::Fp32)?;
        let same_dtype = if spec.dtype == DType::Fp32 { None } else { Some(take(spec.dtype)?) };
        Ok(Recorded { fp32, same_dtype })
    }

    /// What is recorded for a model, in the folder `gradients` beside the checkpoints.
    fn gradients_file(&self, spec: &CaseSpec) -> Result<File, String> {
        let model = &spec.params["model"];
        let folder = self.folder(model)?;
        let beside = folder.parent().ok_or("the checkpoint has no folder above it")?;
        let path = beside.with_file_name("gradients").join(format!("{model}.safetensors"));
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        File::decode(&bytes).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The inputs of every recorded batch; the first is that of the case.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn batches(&self, spec: &CaseSpec) -> Result<Vec<BTreeMap<String, Tensor>>, String> {
        inputs(spec.spec(), &self.gradients_file(spec)?, loss_of(&spec.params))
            .map_err(|why| format!("gradients/{}.safetensors: {why}", spec.params["model"]))
    }

    /// The recorded gradients that `spec` is held to.
    ///
    /// # Errors
    /// What is missing or does not fit the model, in one line.
    pub fn recorded_gradients(&self, spec: &CaseSpec) -> Result<gradients::Recorded, String> {
        let model = &spec.params["model"];
        let path = self.folder(model)?.join("model.safetensors");
        let wrong = |why: String| format!("{}: {why}", path.display());
        let bytes = std::fs::read(&path).map_err(|e| wrong(e.to_string()))?;
        let file = File::decode(&bytes).map_err(|e| wrong(e.to_string()))?;
        let elements = file.tensors.into_iter().map(|(name, tensor)| (name, tensor.len())).collect();
        gradients::Recorded::of(spec.spec(), self.gradients_file(spec)?, loss_of(&spec.params), &elements)
            .map_err(|why| format!("gradients/{model}.safetensors: {why}"))
    }
}

/// The loss of a case, by the name under which it is recorded.
fn loss_of(params: &BTreeMap<String, String>) -> &str {
    match params.get("loss").map_or("nll", String::as_str) {
        "policy" if params.contains_key("entropy") => "policy_entropy",
        loss => loss,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_schema::{Input, Role};

    /// What is recorded goes in under the names that a program declares, whatever they are.
    #[test]
    fn recorded_inputs_are_those_that_the_program_declares() {
        const TOKENS: Input = samebits_schema::chain::OP.inputs[0];
        const LATENTS: Input = Input { name: "latents", role: Role::Activation, ..TOKENS };
        const PROMPT: Input = Input { name: "prompt", optional: true, ..TOKENS };
        static DENOISER: Op = Op { inputs: &[LATENTS, PROMPT], program: "denoiser", ..samebits_schema::chain::OP };
        let one = |names: &[&str]| {
            let tensor = |name: &&str| (name.to_string(), Tensor::i32(&[1, 1], vec![name.len() as i32]));
            let mut file = File { tensors: names.iter().map(tensor).collect(), metadata: BTreeMap::new() };
            declared(&DENOISER, &mut file).map(|inputs| inputs.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(one(&["latents", "noise.fp32"]), Ok(vec!["latents".to_string()]));
        assert_eq!(one(&["latents", "prompt"]), Ok(vec!["latents".to_string(), "prompt".to_string()]));
        assert_eq!(one(&["tokens"]), Err("reference.safetensors: tensor `latents` is missing".into()));
    }
}
