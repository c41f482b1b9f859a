//! Low-rank adapters in PEFT folders: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Every field that changes what is computed is read or refused, every tensor is that of a matrix that the model has, and every
//! matrix that the config targets has its tensors.

use crate::ModelError;
use crate::error::escaped;
use crate::fields::{Fields, asks_for_nothing, shown};
use crate::files::read_object;
use crate::layers::linear::{Linear, Source};
use crate::layers::low_rank::LowRank;
use crate::trace::all_finite;
use crate::weights::Weights;
use safetensors::tensor::Dtype;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::utils::SysRegex;

/// What a PEFT folder says of its adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The tensors of that.
pub const ADAPTER_TENSORS: &str = "adapter_model.safetensors";

/// What stands before the name of a module in the names of its tensors.
const PREFIX: &str = "base_model.model.";
/// What stands behind it.
const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Which adapter a text has.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AdapterChoice {
    /// The only one of the model; none where it has none.
    #[default]
    Only,
    /// None.
    Plain,
    /// The one of this name.
    Named(String),
}

impl AdapterChoice {
    /// What JSON says: a name, or null for none.
    pub(crate) fn of(value: &Value) -> Option<AdapterChoice> {
        match value {
            Value::Null => Some(AdapterChoice::Plain),
            Value::String(name) => Some(AdapterChoice::Named(name.clone())),
            _ => None,
        }
    }
}

/// The adapters of a model.
#[derive(Default)]
pub(crate) struct Adapters {
    all: Vec<Adapter>,
    /// Name and shape of all that gradients are made of: the tensors of the only one, or of several, each under
    /// `NAME/tensor`.
    trained: BTreeMap<String, Vec<usize>>,
}

/// An adapter in training: its name, what its folder says, and its tensors.
pub(crate) type InTraining<'a> = (&'a str, &'a Arc<PeftFolder>, &'a BTreeMap<String, Arc<Tensor>>);

/// What stands before the names of the tensors of one of `count` adapters where gradients are of all of them.
pub(crate) fn prefix(name: &str, count: usize) -> String {
    if count > 1 { format!("{name}/") } else { String::new() }
}

struct Adapter {
    name: String,
    sha256: String,
    folder: Arc<PeftFolder>,
    /// By the names of matrices in the folder of the model.
    matrices: BTreeMap<String, LowRank>,
}

impl Adapter {
    /// With these tensors, of the names and shapes of the folder's; products lay matrices out anew where they are not packed.
    /// Their gradients have names behind `prefix`.
    fn new(
        (name, folder, tensors): InTraining,
        prefix: &str,
        (cpu, packs): (&Cpu, bool),
    ) -> Result<Adapter, ModelError> {
        // In training nobody asks for it.
        let sha256 = if packs { folder.sha256_of(tensors) } else { String::new() };
        let matrices = folder.matrices(tensors, prefix, (cpu, packs))?;
        Ok(Adapter { name: name.into(), sha256, folder: folder.clone(), matrices })
    }
}

impl Adapters {
    /// Those in training.
    pub fn of_training(all: &[InTraining], cpu: &Cpu) -> Result<Adapters, ModelError> {
        Adapters::new(all, (cpu, false))
    }

    /// Those of some folders, packed, each under a name of its own.
    pub fn of_folders(folders: Vec<(String, PeftFolder)>, cpu: &Cpu) -> Result<Adapters, ModelError> {
        let folders: Vec<_> = folders.into_iter().map(|(name, folder)| (name, Arc::new(folder))).collect();
        let all: Vec<InTraining> = folders.iter().map(|(name, of)| (&name[..], of, of.tensors())).collect();
        Adapters::new(&all, (cpu, true))
    }

    fn new(all: &[InTraining], (cpu, packs): (&Cpu, bool)) -> Result<Adapters, ModelError> {
        let mut adapters = Adapters::default();
        for &own in all {
            let prefix = prefix(own.0, all.len());
            if adapters.all.iter().any(|other| other.name == own.0) {
                let why = format!("`{}` is there twice; give each a name of its own", own.0);
                return Err(ModelError::input("adapter", why));
            }
            let named = own.2.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.shape().to_vec()));
            adapters.trained.extend(named);
            adapters.all.push(Adapter::new(own, &prefix, (cpu, packs))?);
        }
        Ok(adapters)
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Takes other tensors, f32 under the names that the folder has them under.
    pub fn update(&mut self, name: &str, tensors: &BTreeMap<String, TensorRef>, cpu: &Cpu) -> Result<(), ModelError> {
        let number = self.find(&AdapterChoice::Named(name.into()))?.expect("it is named");
        let folder = &self.all[number].folder;
        let mut own = BTreeMap::new();
        for (tensor, shape) in folder.tensors().iter().map(|(name, tensor)| (name, tensor.shape())) {
            let given = tensors.get(tensor).filter(|given| given.shape() == shape);
            let values = given.and_then(|given| given.contiguous::<f32>()).filter(|values| all_finite(values));
            let Some(values) = values else {
                let why = format!("`{tensor}` must be there, f32 {shape:?} in row-major order, and finite");
                return Err(ModelError::input("adapter", why));
            };
            own.insert(tensor.clone(), Arc::new(Tensor::new(values.to_vec(), shape)?));
        }
        if let Some(tensor) = tensors.keys().find(|tensor| !own.contains_key(*tensor)) {
            return Err(ModelError::input("adapter", format!("`{tensor}` is no tensor of `{name}`")));
        }
        self.all[number] = Adapter::new((name, folder, &own), &prefix(name, self.all.len()), (cpu, true))?;
        Ok(())
    }

    /// The numbers of those of some sequences; where `keeps` says that gradients will follow, of folders whose gradients are made
    /// here.
    ///
    /// # Errors
    /// A choice that is none of the model's; a dropout.
    pub fn trained(
        &self,
        choices: &[AdapterChoice],
        count: usize,
        keeps: bool,
    ) -> Result<Vec<Option<usize>>, ModelError> {
        let found = self.find_all(choices, count)?;
        let used: BTreeSet<usize> = found.iter().flatten().copied().filter(|_| keeps).collect();
        match used.iter().find_map(|number| self.folder(*number).untrained()) {
            Some(why) => Err(ModelError::input("adapter", why)),
            None => Ok(found),
        }
    }

    /// The folder of one.
    pub fn folder(&self, number: usize) -> &PeftFolder {
        &self.all[number].folder
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.all
            .iter_mut()
            .flat_map(|adapter| adapter.matrices.values_mut())
            .try_for_each(|own| own.move_to(cpu, device))
    }

    /// What an adapter has of a matrix of the folder.
    pub fn of(&self, number: usize, matrix: &str) -> Option<&LowRank> {
        self.all[number].matrices.get(matrix)
    }

    /// Name and shape of all that gradients are made of.
    pub fn parameters(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.trained
    }

    /// Name and SHA-256 of each.
    pub fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.all.iter().map(|adapter| (&adapter.name[..], &adapter.sha256[..]))
    }

    /// The name of one.
    pub fn name(&self, number: usize) -> &str {
        &self.all[number].name
    }

    /// The only one; none where there is none.
    pub fn only(&self) -> Result<Option<usize>, ModelError> {
        self.find(&AdapterChoice::Only)
    }

    /// The number of one.
    pub fn find(&self, choice: &AdapterChoice) -> Result<Option<usize>, ModelError> {
        let there = || self.all.iter().map(|adapter| format!("`{}`", adapter.name)).collect::<Vec<_>>().join(", ");
        match choice {
            AdapterChoice::Plain => Ok(None),
            AdapterChoice::Only if self.all.len() < 2 => Ok((!self.is_empty()).then_some(0)),
            AdapterChoice::Only => {
                let why = format!("the model has {}; say which of them a text has, or that it has none", there());
                Err(ModelError::input("adapter", why))
            }
            AdapterChoice::Named(name) => match self.all.iter().position(|adapter| adapter.name == *name) {
                Some(number) => Ok(Some(number)),
                None if self.is_empty() => {
                    Err(ModelError::input("adapter", format!("`{name}` is none of the model, which has none; load it")))
                }
                None => Err(ModelError::input("adapter", format!("`{name}` is none of the model; it has {}", there()))),
            },
        }
    }

    /// The numbers of those of `count` texts: no choice is [`AdapterChoice::Only`] for all, one is for all.
    pub fn find_all(&self, choices: &[AdapterChoice], count: usize) -> Result<Vec<Option<usize>>, ModelError> {
        match choices {
            [] => Ok(vec![self.only()?; count]),
            [one] => Ok(vec![self.find(one)?; count]),
            all if all.len() == count => all.iter().map(|choice| self.find(choice)).collect(),
            all => {
                let why = format!("there are {} for {count} texts; give one for all, or one for each", all.len());
                Err(ModelError::input("adapter", why))
            }
        }
    }
}

/// Modules by their names, as a config has them.
enum Modules {
    /// Whole names, or what stands behind a dot at their end.
    Names(Vec<String>),
    /// A pattern of whole names.
    Pattern(SysRegex),
    /// All linear ones.
    Linear,
}

impl Modules {
    fn has(&self, module: &str) -> bool {
        match self {
            Modules::Names(names) => {
                let is_end = |name: &String| module.strip_suffix(&name[..]).is_some_and(|rest| rest.ends_with('.'));
                names.iter().any(|name| name == module || is_end(name))
            }
            Modules::Pattern(pattern) => pattern.find_iter(module).next().is_some(),
            Modules::Linear => true,
        }
    }
}

/// A pattern as Python reads it, of a whole text.
fn whole(pattern: &str) -> Option<SysRegex> {
    SysRegex::new(&format!("\\A(?:{pattern})\\z")).ok()
}

/// Fields of a config that change nothing that is computed of the tensors: bookkeeping, how they began, how memory is used.
const INERT: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Fields that ask for another computation unless they ask for nothing.
const OTHERS: [&str; 14] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
];

/// What a config says of the matrices.
struct Targets {
    modules: Modules,
    excluded: Option<Modules>,
    /// The only blocks, where it names any, and the names of lists of blocks.
    blocks: Option<(Vec<usize>, Vec<SysRegex>)>,
    rank: usize,
    alpha: f64,
    is_rooted: bool,
    /// Others of modules, by patterns of the ends of their names.
    ranks: Vec<(SysRegex, usize)>,
    alphas: Vec<(SysRegex, f64)>,
}

impl Targets {
    /// Reads a config; a list of what is wrong where anything is.
    fn read(path: &Path, map: &Map<String, Value>) -> Result<Targets, ModelError> {
        let fields = Fields::new(path.into(), map.clone());
        fields.only("peft_type", &["LORA".into()]);
        if !fields.has("peft_type") {
            fields.refuse("peft_type", "is missing; an adapter of PEFT says \"LORA\"");
        }
        fields.only("bias", &["none".into()]);
        let (rank, is_rooted) = (fields.size("r").unwrap_or(8), fields.flag("use_rslora", false));
        let alpha =
            fields.get("lora_alpha").map_or(Some(8.0), |alpha| alpha.as_f64().filter(|alpha| alpha.is_finite()));
        let alpha = alpha.unwrap_or_else(|| {
            fields.refuse("lora_alpha", format!("is {}; it must be a finite number", shown(&map["lora_alpha"])));
            0.0
        });
        let starts = ["gaussian", "eva", "orthogonal"].map(Value::from);
        let starts = [&[true.into(), false.into()][..], &starts].concat();
        if let Some(start) = fields.get("init_lora_weights").filter(|start| !starts.contains(start)) {
            let why = format!(
                "is {}, which changes the weights of the model when it is loaded; save it as a plain adapter \
                 (path_initial_model_for_weight_conversion)",
                shown(start)
            );
            fields.refuse("init_lora_weights", why);
        }
        let modules = Targets::modules(&fields, "target_modules").unwrap_or_else(|| {
            if fields.get("target_modules").is_none_or(asks_for_nothing) {
                fields.refuse("target_modules", "is missing; it must name the modules");
            }
            Modules::Names(Vec::new())
        });
        let excluded = Targets::modules(&fields, "exclude_modules");
        let blocks = Targets::blocks(&fields);
        let ranks = Targets::patterns(&fields, "rank_pattern", "whole numbers above 0", |value| {
            value.as_u64().and_then(|rank| i32::try_from(rank).ok()).filter(|rank| *rank > 0).map(|rank| rank as usize)
        });
        let alphas = Targets::patterns(&fields, "alpha_pattern", "numbers", |value| {
            value.as_f64().filter(|alpha| alpha.is_finite())
        });
        for name in OTHERS {
            if let Some(value) = fields.get(name).filter(|value| !asks_for_nothing(value)) {
                fields.refuse(name, format!("is {}, which is not supported; train the adapter without", shown(value)));
            }
        }
        for (name, value) in map {
            if !fields.was_asked(name) && !INERT.contains(&&name[..]) && !asks_for_nothing(value) {
                fields.refuse(name, "is no field that is known; remove it if it changes nothing");
            }
        }
        fields.end()?;
        Ok(Targets { modules, excluded, blocks, rank, alpha, is_rooted, ranks, alphas })
    }

    /// A list of names, or a pattern.
    fn modules(fields: &Fields, name: &'static str) -> Option<Modules> {
        match fields.get(name).filter(|value| !asks_for_nothing(value))? {
            Value::String(all) if all.eq_ignore_ascii_case("all-linear") && name == "target_modules" => {
                Some(Modules::Linear)
            }
            Value::String(pattern) => {
                let read = whole(pattern);
                if read.is_none() {
                    fields.refuse(
                        name,
                        format!("is {}, no pattern that can be read; give a list of names", shown(&pattern[..].into())),
                    );
                }
                read.map(Modules::Pattern)
            }
            value => {
                let names = value
                    .as_array()
                    .and_then(|all| all.iter().map(|name| name.as_str().map(String::from)).collect::<Option<Vec<_>>>());
                if names.is_none() {
                    fields.refuse(name, format!("is {}; it must be a list of names, or a pattern", shown(value)));
                }
                names.map(Modules::Names)
            }
        }
    }

    /// The only blocks that have an adapter.
    fn blocks(fields: &Fields) -> Option<(Vec<usize>, Vec<SysRegex>)> {
        let lists = match fields.get("layers_pattern").filter(|value| !asks_for_nothing(value)) {
            None => Some(vec!["[^.]*".to_string()]),
            Some(Value::String(name)) => Some(vec![name.clone()]),
            Some(value) => {
                value.as_array().and_then(|all| all.iter().map(|name| name.as_str().map(String::from)).collect())
            }
        };
        let lists = lists.and_then(|lists| {
            lists
                .iter()
                .map(|list| SysRegex::new(&format!("\\A.*\\.{list}\\.[0-9]+\\.")).ok())
                .collect::<Option<Vec<_>>>()
        });
        if lists.is_none() {
            fields.refuse("layers_pattern", "must be the name of a list of blocks, or some of them");
        }
        let number = |value: &Value| value.as_u64().map(|number| number as usize);
        let numbers = match fields.get("layers_to_transform").filter(|value| !asks_for_nothing(value))? {
            Value::Array(all) => all.iter().map(number).collect(),
            value => number(value).map(|number| vec![number]),
        };
        if numbers.is_none() {
            fields.refuse("layers_to_transform", "must be a number of a block, or a list of them");
        }
        numbers.zip(lists)
    }

    /// Values by patterns of the ends of names.
    fn patterns<T>(
        fields: &Fields,
        name: &'static str,
        form: &str,
        of: impl Fn(&Value) -> Option<T>,
    ) -> Vec<(SysRegex, T)> {
        let mut found = Vec::new();
        for (pattern, value) in fields.object(name).into_iter().flatten() {
            match (whole(&format!("(.*\\.)?({pattern})")), of(value)) {
                (Some(pattern), Some(value)) => found.push((pattern, value)),
                _ => fields.refuse(
                    name,
                    format!(
                        "has {}: {}; it must map patterns of names to {form}",
                        shown(&pattern[..].into()),
                        shown(value)
                    ),
                ),
            }
        }
        found
    }

    /// Whether a module has an adapter.
    fn has(&self, module: &str) -> bool {
        if self.excluded.as_ref().is_some_and(|excluded| excluded.has(module)) || !self.modules.has(module) {
            return false;
        }
        let is_named = matches!(&self.modules, Modules::Names(names) if names.iter().any(|name| name == module));
        match &self.blocks {
            Some((numbers, lists)) if matches!(self.modules, Modules::Names(_)) && !is_named => {
                let ends = lists.iter().find_map(|list| list.find_iter(module).next().map(|(_, end)| end));
                let number = ends.and_then(|end| module[..end - 1].rsplit('.').next()?.parse().ok());
                number.is_some_and(|number| numbers.contains(&number))
            }
            _ => true,
        }
    }

    fn of<T: Copy>(patterns: &[(SysRegex, T)], module: &str, else_: T) -> T {
        let found = patterns.iter().find(|(pattern, _)| pattern.find_iter(module).next().is_some());
        found.map_or(else_, |(_, value)| *value)
    }

    /// The rank of a module's adapter, and what its product is multiplied with.
    fn rank_and_scaling(&self, module: &str) -> (usize, f64) {
        let rank = Targets::of(&self.ranks, module, self.rank);
        let alpha = Targets::of(&self.alphas, module, self.alpha);
        let of = rank as f64;
        (rank, alpha / if self.is_rooted { of.sqrt() } else { of })
    }
}

/// A matrix that has an adapter: what its tensors are called, the rows that products read, and what they are multiplied with.
struct Form {
    tensors: [String; 2],
    rows: Vec<Source>,
    scaling: f64,
}

/// An adapter as a folder has it, for a model that it fits.
pub struct PeftFolder {
    dir: PathBuf,
    config: Map<String, Value>,
    /// By the names of matrices in the folder of the model.
    forms: BTreeMap<String, Form>,
    /// By their names in the folder, in f32.
    tensors: BTreeMap<String, Arc<Tensor>>,
}

/// What a model has: the shapes of its parameters, and of the matrices that may have adapters the rows that products read.
pub(crate) type Of<'a> = (&'a BTreeMap<String, Vec<usize>>, &'a BTreeMap<String, Vec<Source>>);

/// Other names that modules have than tensors of folders, by their beginnings.
const RENAMED: [(&str, &str); 3] =
    [("model.", "backbone."), ("model.language_model.", "model."), ("language_model.model.", "model.")];

/// The name in the folder of the matrix that a module has.
fn in_folder(module: &str, adaptable: &BTreeMap<String, Vec<Source>>) -> Option<String> {
    let others = RENAMED.iter().filter_map(|(own, folder)| Some(format!("{folder}{}", module.strip_prefix(own)?)));
    std::iter::once(module.to_string()).chain(others).find(|name| adaptable.contains_key(name))
}

impl PeftFolder {
    /// Reads the adapter of the folder `dir`: all that is wrong with it at once.
    pub(crate) fn read(dir: &Path, model: Of) -> Result<PeftFolder, ModelError> {
        let (path, file) = (dir.join(ADAPTER_CONFIG), dir.join(ADAPTER_TENSORS));
        let config = read_object(&path)?;
        let targets = Targets::read(&path, &config)?;
        if !file.exists() && dir.join("adapter_model.bin").exists() {
            let why = "stands there without adapter_model.safetensors; save the adapter as safetensors";
            return Err(ModelError::file(&dir.join("adapter_model.bin"), why));
        }
        let mut weights = Weights::open_file(&file)?;
        let forms = forms(&file, &weights, &targets, model)?;
        let shapes: Vec<_> = weights.left().map(|(name, stored)| (name.clone(), stored.shape.clone())).collect();
        let mut tensors = BTreeMap::new();
        for (name, shape) in shapes {
            let values = weights.take::<f32>(&name, &shape)?;
            tensors.insert(name, Arc::new(Tensor::new(values, &shape)?));
        }
        Ok(PeftFolder { dir: dir.into(), config, forms, tensors })
    }

    /// Its tensors in f32.
    pub fn tensors(&self) -> &BTreeMap<String, Arc<Tensor>> {
        &self.tensors
    }

    /// SHA-256 of what it computes: of each tensor in the order of their names the name, what its product is multiplied with
    /// (f64) and its f32 elements, all little endian.
    pub fn sha256(&self) -> String {
        self.sha256_of(&self.tensors)
    }

    fn sha256_of(&self, tensors: &BTreeMap<String, Arc<Tensor>>) -> String {
        let of_form = |form: &Form| form.tensors.clone().map(|name| (name, form.scaling));
        let all: BTreeMap<String, f64> = self.forms.values().flat_map(of_form).collect();
        let mut digest = Sha256::new();
        for (name, scaling) in all {
            digest.update(name.as_bytes());
            digest.update(scaling.to_le_bytes());
            let elements = tensors[&name].as_slice::<f32>().expect("they are f32, and on the host");
            elements.iter().for_each(|element| digest.update(element.to_le_bytes()));
        }
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether it has matrices for one of the model.
    pub(crate) fn has(&self, matrix: &str) -> bool {
        self.forms.contains_key(matrix)
    }

    /// A matrix of the model as its folder has it, in f32, and the product of the two that are its adapter times their factor:
    /// the sum, rounded once to `dtype`.
    pub(crate) fn added(&self, cpu: &Cpu, matrix: &str, w: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
        let Form { tensors, rows, scaling } = &self.forms[matrix];
        let [a, b] = tensors.each_ref().map(|name| &self.tensors[name]);
        let (rank, k) = (a.shape()[0], a.shape()[1]);
        let values = a.as_slice::<f32>().expect("it is f32, and on the host");
        let turned = (0..k).flat_map(|column| (0..rank).map(move |row| values[row * k + column]));
        let a = Tensor::new(turned.collect::<Vec<f32>>(), &[k, rank])?;
        let (x, y) = if rows[0].transposed { (a.view(), b.view()) } else { (b.view(), a.view()) };
        let (mut product, mut scaled) = (cpu.empty(DType::Fp32, w.shape())?, cpu.empty(DType::Fp32, w.shape())?);
        let (mut sum, none) = (cpu.empty(dtype, w.shape())?, Attributes::new());
        cpu.call("gemm", none.clone(), &[("x", x), ("w", y)], vec![("y", product.view_mut())])?;
        let factor = none.clone().with("factor", *scaling);
        cpu.call("scale", factor, &[("x", product.view())], vec![("y", scaled.view_mut())])?;
        cpu.call("add", none, &[("a", w.view()), ("b", scaled.view())], vec![("y", sum.view_mut())])?;
        Ok(sum)
    }

    /// What the config says of training that is not done here.
    fn untrained(&self) -> Option<String> {
        let value = self.config.get("lora_dropout").filter(|value| value.as_f64() != Some(0.0) && !value.is_null())?;
        let path = self.dir.join(ADAPTER_CONFIG);
        Some(escaped(&format!(
            "{}: `lora_dropout` is {}; gradients are made without a dropout, set it to 0",
            path.display(),
            shown(value)
        )))
    }

    /// The text of the config of a folder with other tensors of this form.
    pub fn config(&self) -> String {
        let text = serde_json::to_string_pretty(&self.config).expect("it was read");
        format!("{text}\n")
    }

    /// Products with tensors of this form, whose names stand behind `prefix`.
    fn matrices(
        &self,
        tensors: &BTreeMap<String, Arc<Tensor>>,
        prefix: &str,
        (cpu, packs): (&Cpu, bool),
    ) -> Result<BTreeMap<String, LowRank>, ModelError> {
        let mut matrices = BTreeMap::new();
        for (matrix, Form { tensors: names, rows, scaling }) in &self.forms {
            let [a, b] = names.each_ref().map(|name| &tensors[name]);
            let [of_a, of_b] = names.each_ref().map(|name| format!("{prefix}{}", name.trim_end_matches(".weight")));
            let (rank, values) = (a.shape()[0], b.as_slice::<f32>().expect("it is f32, and on the host"));
            let a = Linear::new(cpu, Source::whole(of_a, rank), a.clone(), None, packs)?;
            let mut parts = BTreeMap::new();
            for rows in rows {
                let part: Vec<f32> = rows.rows().flat_map(|row| &values[row * rank..][..rank]).copied().collect();
                let part = Arc::new(Tensor::new(part, &[rows.rows().count(), rank])?);
                let source = Source { name: of_b.clone(), transposed: false, ..rows.clone() };
                parts.insert(rows.start, Linear::new(cpu, source, part, None, packs)?);
            }
            matrices.insert(matrix.clone(), LowRank::new(a, parts, *scaling));
        }
        Ok(matrices)
    }
}

/// The matrices of the model that tensors of a file are the adapters of.
fn forms(
    file: &Path,
    weights: &Weights,
    targets: &Targets,
    (parameters, adaptable): Of,
) -> Result<BTreeMap<String, Form>, ModelError> {
    let (mut complaints, mut forms) = (Vec::new(), BTreeMap::new());
    let mut bad = |tensor: &str, why: String| complaints.push(ModelError::tensor(file, tensor, why));
    for (tensor, stored) in weights.left() {
        let module = tensor.strip_prefix(PREFIX);
        let module = module.and_then(|rest| ENDS.iter().find_map(|end| rest.strip_suffix(end)));
        let Some(module) = module else {
            bad(
                tensor,
                format!("is no matrix of an adapter; they are called {PREFIX}MODULE{} and {}", ENDS[0], ENDS[1]),
            );
            continue;
        };
        let Some(matrix) = in_folder(module, adaptable) else {
            let why = match parameters.keys().any(|name| name.starts_with(&format!("{module}."))) {
                true => {
                    "is of a module whose adapter is not supported; supported are the matrices of attention and of dense MLPs"
                }
                false => "is of a module that the model does not have; the adapter is for another model",
            };
            bad(tensor, why.into());
            continue;
        };
        if !targets.has(module) {
            bad(tensor, format!("is of a module that {ADAPTER_CONFIG} does not target; remove one of the two"));
            continue;
        }
        if !matches!(stored.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            bad(tensor, format!("is {}; adapters must be BF16, F16 or F32", stored.dtype));
        }
        let rows = &adaptable[&matrix];
        let shape = &parameters[&format!("{matrix}.weight")];
        let [n, k] = if rows[0].transposed { [shape[1], shape[0]] } else { [shape[0], shape[1]] };
        let (rank, scaling) = targets.rank_and_scaling(module);
        let asked = if tensor.ends_with(ENDS[0]) { [rank, k] } else { [n, rank] };
        if stored.shape != asked {
            bad(tensor, format!("has shape {:?}; the model and {ADAPTER_CONFIG} ask for {asked:?}", stored.shape));
        }
        let tensors = ENDS.map(|end| format!("{PREFIX}{module}{end}"));
        forms.entry(matrix).or_insert_with(|| Form { tensors, rows: rows.clone(), scaling });
    }
    // What is targeted and has none of the two is missing as well.
    let targeted = adaptable.keys().filter(|matrix| !forms.contains_key(*matrix) && targets.has(matrix));
    let named = targeted.map(|matrix| ENDS.map(|end| format!("{PREFIX}{matrix}{end}")));
    for tensor in named.chain(forms.values().map(|form| form.tensors.clone())).flatten() {
        if !weights.contains(&tensor) {
            bad(&tensor, format!("is missing; {ADAPTER_CONFIG} targets its module"));
        }
    }
    if forms.is_empty() && complaints.is_empty() {
        complaints.push(ModelError::file(file, "holds no tensor"));
    }
    let more = complaints.len().saturating_sub(TOLD);
    if more > 0 {
        complaints.truncate(TOLD);
        complaints.push(ModelError::input("and", format!("{more} more of {}", file.display())));
    }
    ModelError::all(complaints).map(|()| forms)
}

/// Most complaints of tensors that an error tells.
const TOLD: usize = 24;

/// Name and folder of `NAME=DIR`, or of a folder alone, whose last part is its name then.
pub fn named_folder(text: &str) -> Result<(String, PathBuf), ModelError> {
    let (name, dir) = match text.split_once('=').filter(|(name, _)| !name.contains('/')) {
        Some((name, dir)) => (Some(name.to_string()), PathBuf::from(dir)),
        None => (None, PathBuf::from(text)),
    };
    let last = || Some(dir.canonicalize().ok()?.file_name()?.to_str()?.to_string());
    match name.or_else(last).filter(|name| !name.is_empty()) {
        Some(name) => Ok((name, dir)),
        None => Err(ModelError::input(
            "adapter",
            format!("{}: is no folder that can be read; give NAME=DIR", escaped(text)),
        )),
    }
}
