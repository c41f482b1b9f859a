//! What a folder's weights are as integers with scales: as a folder whose matrices are of 8 bits, or as a GGUF file.
//!
//! How a number becomes an integer is docs/NUMERICS.md, section 9. Tensors are read and written one at a time.

use crate::decoder::listed;
use crate::error::escaped;
use crate::files::parse_object;
use crate::gguf::{self, Format};
use crate::quantised::{self, Stored};
use crate::weights::Weights;
use crate::{Config, ModelError, folder_files};
use samebits_ops::{Element, bf16};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

/// What weights are quantised to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// A folder: 8 bits, a scale for each row of a matrix that a product reads; the output projection and routers stay.
    Int8,
    /// A GGUF file: 8 bits, a scale for each 32 numbers of every matrix whose rows these fill.
    Q8_0,
    /// A GGUF file: 4 bits, 256 numbers with eight scales and minima; as [`Scheme::Q8_0`] where rows are no multiple of 256.
    Q4K,
}

impl FromStr for Scheme {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Scheme, ModelError> {
        match text {
            "int8" => Ok(Scheme::Int8),
            "q8_0" => Ok(Scheme::Q8_0),
            "q4_k" => Ok(Scheme::Q4K),
            _ => Err(ModelError::input("to", format!("is `{}`; supported are int8, q8_0 and q4_k", escaped(text)))),
        }
    }
}

/// A tensor that is to be written, and what it is made of.
#[derive(Debug)]
struct Part {
    name: String,
    shape: Vec<usize>,
    form: Form,
    /// Tensors of the folder, one behind the other, their shape, and in how many heads rows are stored pair by pair.
    of: Vec<String>,
    of_shape: Vec<usize>,
    heads: Option<usize>,
}

#[derive(Clone, Debug, PartialEq)]
enum Form {
    /// As it is stored, in bf16, f16 or f32.
    AsStored(safetensors::Dtype),
    /// Integers of rows, or their scales.
    Rows,
    ScalesOfRows,
    /// Blocks of a GGUF file.
    Blocks(Format),
    /// These numbers, and none of the folder's.
    Given(Vec<f32>),
}

/// A model that is to be written quantised.
pub struct Quantizing {
    /// Files that go along: a name, and their bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// What stands before the tensors.
    pub header: Vec<u8>,
    /// Bytes between tensors are a multiple of this.
    pub align: usize,
    /// What is worth knowing of it.
    pub notes: Vec<String>,
    weights: Weights<'static>,
    parts: Vec<Part>,
}

impl Quantizing {
    /// The folder `dir`, whose weights are as wide as they were trained, as `to`.
    ///
    /// # Errors
    /// A folder that does not load; one that is quantised; what the form cannot say of it, by name.
    pub fn of(dir: &Path, to: Scheme) -> Result<Quantizing, ModelError> {
        if gguf::is_gguf(dir) || quantised::of(dir)? != Stored::default() {
            return Err(ModelError::file(dir, "is quantised already; give the folder that it was made of"));
        }
        let config = Config::load(dir)?;
        let mut weights = Weights::open(dir)?;
        weights.check(&config, crate::decoder::expected(&config))?;
        match to {
            Scheme::Int8 => folder(dir, &config, weights),
            Scheme::Q8_0 => file(dir, &config, weights, Format::Q8_0),
            Scheme::Q4K => file(dir, &config, weights, Format::Q4K),
        }
    }

    /// Tensors.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The bytes of a tensor.
    ///
    /// # Errors
    /// What is wrong with the folder's, such as a number that is not finite.
    pub fn bytes(&mut self, number: usize) -> Result<Vec<u8>, ModelError> {
        let Part { form, of, of_shape, heads, .. } = &self.parts[number];
        let mut bytes = Vec::new();
        if let Form::Given(numbers) = form {
            bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        }
        for name in of {
            // Integers and scales of a matrix are made of the same numbers.
            let values = self.weights.numbers(name, of_shape)?;
            let width = of_shape.last().copied().unwrap_or(1).max(1);
            let rows: Vec<&[f32]> = values.chunks(width).collect();
            if let (Form::Blocks(_), Some(x)) = (form, values.iter().find(|x| x.abs() > LARGEST)) {
                let why = format!(
                    "`{name}` holds {x:e}; blocks of a GGUF file have f16 scales, which end at {LARGEST:e}: use int8"
                );
                return Err(ModelError::input("weights", why));
            }
            let place = |row: usize| heads.map_or(row, |heads| crate::weights::unpaired(row, rows.len() / heads));
            for row in (0..rows.len()).map(|row| rows[place(row)]) {
                put(form, row, &mut bytes);
            }
        }
        Ok(bytes)
    }
}

/// Numbers of blocks beyond it have a scale that f16 does not hold.
const LARGEST: f32 = 8e6;

/// Adds a row to the bytes of a tensor.
fn put(form: &Form, row: &[f32], bytes: &mut Vec<u8>) {
    match form {
        Form::AsStored(safetensors::Dtype::BF16) => {
            bytes.extend(row.iter().flat_map(|x| bf16::narrow(*x).to_le_bytes()));
        }
        Form::AsStored(safetensors::Dtype::F16) => {
            bytes.extend(row.iter().flat_map(|x| samebits_ops::f16::narrow(*x).to_le_bytes()));
        }
        Form::AsStored(_) => bytes.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        Form::Rows => {
            let scale = scale_of_row(row).widen();
            bytes.extend(
                row.iter().map(|x| if scale == 0.0 { 0 } else { (x / scale).round().clamp(-127.0, 127.0) as i8 as u8 }),
            );
        }
        Form::ScalesOfRows => bytes.extend(scale_of_row(row).to_le_bytes()),
        Form::Blocks(format) => format.quantize(row, bytes),
        Form::Given(_) => {}
    }
}

/// The largest magnitude over 127, rounded to bf16.
fn scale_of_row(row: &[f32]) -> bf16 {
    bf16::narrow(row.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0)
}

/// A folder whose matrices are int8.
fn folder(dir: &Path, config: &Config, weights: Weights<'static>) -> Result<Quantizing, ModelError> {
    let lists = listed(config);
    let is_quantised = |name: &str, shape: &[usize]| {
        let Some(matrix) = name.strip_suffix(".weight").filter(|_| shape.len() == 2) else { return false };
        let as_rows = lists.adaptable.get(matrix).is_some_and(|rows| rows.iter().all(|rows| !rows.transposed));
        as_rows || matrix.contains(".experts.")
    };
    let mut parts = Vec::new();
    let mut left = Vec::new();
    for (name, stored) in weights.left() {
        let (shape, of) = (stored.shape.clone(), vec![name.clone()]);
        let of_shape = shape.clone();
        let mut part = |name: String, shape, form| {
            parts.push(Part { name, shape, form, of: of.clone(), of_shape: of_shape.clone(), heads: None });
        };
        if is_quantised(name, &shape) {
            part(name.clone(), shape.clone(), Form::Rows);
            part(format!("{name}_scale"), vec![shape[0], 1], Form::ScalesOfRows);
        } else {
            if shape.len() == 2 {
                left.extend(name.strip_suffix(".weight").map(String::from));
            }
            part(name.clone(), shape, Form::AsStored(stored.dtype));
        }
    }
    if !parts.iter().any(|part| part.form == Form::Rows) {
        let why = "has no matrix that is stored by its rows; a family that stores them transposed is not quantised";
        return Err(ModelError::file(dir, why));
    }
    let text = Config::text(dir)?;
    let mut fields: Map<String, Value> = parse_object(&dir.join("config.json"), text.as_bytes())?;
    let said = json!({
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": left,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "int-quantized", "input_activations": null, "output_activations": null,
            "weights": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel", "dynamic": false},
        }},
    });
    fields.insert("quantization_config".into(), said);
    let mut files = vec![("config.json".to_string(), serde_json::to_vec_pretty(&fields).expect("JSON is written"))];
    for (name, from) in folder_files(dir)? {
        let bytes = std::fs::read(&from).map_err(|e| ModelError::file(&from, format!("cannot be read: {e}")))?;
        files.push((name, bytes));
    }
    let mut header = Map::new();
    let mut end = 0;
    // Scales stand at even bytes.
    parts.sort_by_key(|part| (part.form == Form::Rows, part.name.clone()));
    for part in &parts {
        let (dtype, width) = match part.form {
            Form::Rows => ("I8", 1),
            Form::AsStored(safetensors::Dtype::F32) => ("F32", 4),
            Form::AsStored(safetensors::Dtype::F16) => ("F16", 2),
            _ => ("BF16", 2),
        };
        let begin = end;
        end += part.shape.iter().product::<usize>() * width;
        header.insert(part.name.clone(), json!({"dtype": dtype, "shape": part.shape, "data_offsets": [begin, end]}));
    }
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut text = serde_json::to_vec(&header).expect("JSON is written");
    text.resize(text.len().next_multiple_of(8), b' ');
    let header = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
    let count = parts.iter().filter(|part| part.form == Form::Rows).count();
    let notes = vec![format!("{count} matrices as int8, {} tensors as they were", parts.len() - 2 * count)];
    Ok(Quantizing { files, header, align: 1, notes, weights, parts })
}

/// A GGUF file.
fn file(dir: &Path, config: &Config, weights: Weights<'static>, format: Format) -> Result<Quantizing, ModelError> {
    let text = Config::text(dir)?;
    let fields: Map<String, Value> = parse_object(&dir.join("config.json"), text.as_bytes())?;
    let mut writing = gguf::Writing::of(dir, config, &fields)?;
    let mut notes = Vec::new();
    match gguf::vocabulary_of(dir, config.vocab)? {
        Ok(tokens) => writing.metadata.extend(tokens),
        Err(why) => {
            writing.metadata.push(("tokenizer.ggml.model".into(), gguf::Field::Text("none".into())));
            notes.push(format!("the file has no tokenizer, since that of the folder {why}"));
        }
    }
    let names: BTreeMap<String, Vec<usize>> =
        weights.left().map(|(name, stored)| (name.clone(), stored.shape.clone())).collect();
    let mut parts: Vec<Part> = Vec::new();
    for (name, of, heads) in writing.tensors(dir, &names)? {
        let of_shape = names[&of[0]].clone();
        // A gate is stored as one row without its axis.
        let flat = name.ends_with("inp_shexp.weight");
        let mut shape = if flat { vec![of_shape[of_shape.len() - 1]] } else { of_shape.clone() };
        if of.len() > 1 {
            shape.insert(0, of.len());
        }
        let is_matrix = shape.len() > 1 && !name.ends_with("ffn_gate_inp.weight");
        let fits = |format: &Format| shape[shape.len() - 1].is_multiple_of(format.block().0);
        let form = [format, Format::Q8_0].into_iter().filter(|_| is_matrix).find(fits).unwrap_or(Format::F32);
        parts.push(Part { name, shape, form: Form::Blocks(form), of, of_shape, heads });
    }
    if let Some(factors) = &writing.factors {
        let (name, shape) = (gguf::ROPE_FACTORS.to_string(), vec![factors.len()]);
        parts.push(Part {
            name,
            shape,
            form: Form::Given(factors.clone()),
            of: Vec::new(),
            of_shape: Vec::new(),
            heads: None,
        });
    }
    let mut end = 0u64;
    let listed: Vec<(&str, &[usize], Format, u64)> = (parts.iter())
        .map(|part| {
            let form = if let Form::Blocks(form) = part.form { form } else { Format::F32 };
            let begin = end;
            let (numbers, size) = form.block();
            end = (begin + (part.shape.iter().product::<usize>() / numbers * size) as u64).next_multiple_of(ALIGN);
            (&part.name[..], &part.shape[..], form, begin)
        })
        .collect();
    let header = writing.header(&listed, ALIGN);
    for kind in [Format::Q4K, Format::Q8_0, Format::F32] {
        let count = parts.iter().filter(|part| part.form == Form::Blocks(kind)).count();
        if count > 0 {
            notes.insert(0, format!("{count} tensors in {}", kind.name()));
        }
    }
    says_the_same(dir, config, &header, writing.factors.as_deref())?;
    Ok(Quantizing { files: Vec::new(), header, align: ALIGN as usize, notes, weights, parts })
}

/// Where tensors of a GGUF file begin: multiples of this.
const ALIGN: u64 = 32;

/// Refuses a model of which a file says something else than its folder.
fn says_the_same(dir: &Path, config: &Config, header: &[u8], factors: Option<&[f32]>) -> Result<(), ModelError> {
    let found = Config::of_map(dir, gguf::config_of(dir, header, factors)?)?;
    // generation_config.json may name further tokens that end a text; lines on fields that are passed by are no computation.
    let same = Config { eos: config.eos.clone(), passed: config.passed.clone(), ..found };
    if same == *config {
        return Ok(());
    }
    let (was, is) = (format!("{config:#?}"), format!("{same:#?}"));
    let lost: Vec<&str> = was.lines().filter(|line| !is.contains(line)).map(str::trim).take(4).collect();
    let why =
        format!("has what a GGUF file of its architecture does not say: {}; --to int8 writes a folder", lost.join(" "));
    Err(ModelError::file(dir, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::loader::Loader;
    use samebits_ops::{Cpu, DType};

    /// A matrix of a file takes the bytes of its integers in memory, and not those of what they stand for.
    #[test]
    fn matrices_of_a_file_stay_integers() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/llama");
        let mut quantizing = Quantizing::of(&dir, Scheme::Q8_0).unwrap();
        let mut bytes = quantizing.header.clone();
        for number in 0..quantizing.len() {
            bytes.extend(quantizing.bytes(number).unwrap());
            bytes.resize(bytes.len().next_multiple_of(quantizing.align), 0);
        }
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let config = Config::load(file.path()).unwrap();
        let shape = crate::decoder::expected(&config)["model.layers.0.self_attn.q_proj.weight"].clone();
        let (n, k) = (shape[0], shape[1]);
        let cpu = Cpu::best();
        for dtype in [DType::Bf16, DType::Fp32] {
            let mut weights = Weights::open(file.path()).unwrap();
            let prefix = "model.layers.0.self_attn.".to_string();
            let mut loader = Loader { dtype, cpu: &cpu, weights: &mut weights, prefix, packs: true, transposed: false };
            let packed = loader.linear("q_proj", n, k, false).unwrap();
            let found = packed.packed(0).expect("it is packed").bytes();
            // A byte for each integer of whole panels, and less than half of one for the rest.
            assert!(
                found >= n.next_multiple_of(32) * k && 2 * found < 3 * n.next_multiple_of(32) * k,
                "{dtype}: {found}"
            );
        }
    }
}
