//! Matrices that a folder stores as small integers with scales: AWQ, GPTQ and compressed-tensors.
//!
//! A weight is `(q - z) * scale` in f32 (docs/NUMERICS.md, section 9). Here is what `quantization_config` says and how integers
//! are packed; `weights/integers.rs` knows the tensors that hold them.

use crate::ModelError;
use crate::fields::{asks_for_nothing, shown};
use crate::files::read_object;
use samebits_ops::{Element, Offset, Quantized};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// How the integers of a matrix `[N,K]` are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    /// AWQ: words `[K,N/8]` of eight along N, which stand in a word as [`PLACES`] says; zeros alike.
    Awq,
    /// GPTQ: words `[K*bits/32,N]` along K, the first in the lowest bits; zeros `[groups,N*bits/32]` along N.
    Gptq,
    /// Words `[N,K*bits/32]` along K, the first in the lowest bits, each with half its range added; zeros `[N*bits/32,groups]` along N.
    Rows,
    /// Bytes `[N,K]`, as are zeros `[N,groups]`.
    Bytes,
}

/// How a folder stores its quantised matrices, or some of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scheme {
    pub order: Order,
    pub bits: u32,
    /// How many elements of a row share a scale; all of them where it says nothing.
    pub group: Option<usize>,
    /// Whether a zero is stored as one less.
    pub one_less: bool,
    /// Whether zeros, and the groups of columns, must be stored.
    pub asks_for: [bool; 2],
}

impl Scheme {
    /// What stands in front of the shapes that it asks for.
    pub fn said(&self) -> String {
        let group = self.group.map_or("the whole row".into(), |group| group.to_string());
        format!("{FIELD} (bits {}, group_size {group})", self.bits)
    }

    /// Integers of a word.
    fn a_word(&self) -> usize {
        (32 / self.bits) as usize
    }

    /// N and K of a matrix whose integers are stored with this shape. Of rows of words the folder says how many integers count.
    pub fn extents(&self, stored: &[usize], said: Option<[usize; 2]>) -> Option<[usize; 2]> {
        let &[rows, columns] = stored else { return None };
        let extents = match self.order {
            Order::Awq => [columns.checked_mul(self.a_word())?, rows],
            Order::Gptq => [columns, rows.checked_mul(self.a_word())?],
            Order::Rows => said.filter(|[n, k]| *n == rows && k.div_ceil(self.a_word()) == columns)?,
            Order::Bytes => [rows, columns],
        };
        Some(extents).filter(|extents| !extents.contains(&0))
    }

    /// Groups of a row of `k` elements, where groups may divide it so.
    pub fn groups(&self, k: usize) -> Option<usize> {
        let size = self.group.unwrap_or(k);
        let fills = self.order == Order::Gptq || k.is_multiple_of(size.max(1));
        Some(k.div_ceil(size.max(1))).filter(|_| fills)
    }

    /// The shapes of scales and zeros.
    pub fn shapes(&self, n: usize, groups: usize) -> [Vec<usize>; 2] {
        match self.order {
            Order::Awq | Order::Gptq => [vec![groups, n], vec![groups, n.div_ceil(self.a_word())]],
            Order::Rows => [vec![n, groups], vec![n.div_ceil(self.a_word()), groups]],
            Order::Bytes => [vec![n, groups], vec![n, groups]],
        }
    }

    /// Zeros as `[N,groups]`: in words as the integers, or in bytes, signed.
    fn zeros(&self, n: usize, groups: usize, stored: Option<Zeros>) -> Vec<i32> {
        let half = if self.order == Order::Rows { 1 << (self.bits - 1) } else { 0 };
        let less = i32::from(self.one_less);
        let a_word = self.a_word();
        let of = |row: usize, group: usize| match stored {
            None => half,
            Some(Zeros::Bytes(bytes)) => i32::from(bytes[row * groups + group] as i8) + half,
            Some(Zeros::Words(bytes)) => {
                let at = match self.order {
                    Order::Rows | Order::Bytes => row / a_word * groups + group,
                    Order::Awq | Order::Gptq => group * n.div_ceil(a_word) + row / a_word,
                };
                self.part(word(bytes, at), row % a_word) + less
            }
        };
        (0..n).flat_map(|row| (0..groups).map(move |group| (row, group))).map(|(row, group)| of(row, group)).collect()
    }

    /// One of the integers of a word.
    fn part(&self, word: u32, number: usize) -> i32 {
        let place = if self.order == Order::Awq { PLACES[number] } else { number as u32 };
        (word >> (self.bits * place) & ((1u32 << self.bits) - 1)) as i32
    }
}

/// Zeros as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Zeros<'a> {
    Words(&'a [u8]),
    Bytes(&'a [u8]),
}

/// Where the eight integers of a word of AWQ stand in it, in fours of bits.
const PLACES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The word number `at`.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes.as_chunks::<4>().0[at])
}

/// What stands beside the integers of a matrix: scales as they are stored, zeros, and the group of each column.
#[derive(Clone, Copy)]
pub(crate) struct Beside<'a> {
    pub scales: &'a [f32],
    pub zeros: Option<Zeros<'a>>,
    pub columns: &'a [usize],
}

/// Rows that are written side by side, so that what is stored column by column is read in pieces.
const TOGETHER: usize = 16;

/// A matrix of integers. All sizes are those that the scheme asks for, and every group is one that there is.
pub(crate) struct Integers<'a> {
    pub scheme: &'a Scheme,
    pub n: usize,
    pub bytes: &'a [u8],
    pub beside: Beside<'a>,
}

impl Integers<'_> {
    /// The integer of a row and a column.
    fn integer(&self, row: usize, column: usize) -> i32 {
        let (n, k, a_word) = (self.n, self.beside.columns.len(), self.scheme.a_word());
        let part = |at: usize, number: usize| self.scheme.part(word(self.bytes, at), number % a_word);
        match self.scheme.order {
            Order::Awq => part(column * (n / a_word) + row / a_word, row),
            Order::Gptq => part(column / a_word * n + row, column),
            Order::Rows => part(row * k.div_ceil(a_word) + column / a_word, column),
            Order::Bytes => i32::from(self.bytes[row * k + column] as i8),
        }
    }

    fn groups(&self) -> usize {
        self.beside.scales.len() / self.n.max(1)
    }

    /// The scale of each group of each row.
    fn scales(&self) -> impl Iterator<Item = f32> {
        let groups = self.groups();
        (0..self.beside.scales.len()).map(move |at| match self.scheme.order {
            Order::Awq | Order::Gptq => self.beside.scales[at % groups * self.n + at / groups],
            Order::Rows | Order::Bytes => self.beside.scales[at],
        })
    }

    /// Calls `put` for every row and column, [`TOGETHER`] rows side by side.
    fn each(&self, mut put: impl FnMut(usize, usize)) {
        for first in (0..self.n).step_by(TOGETHER) {
            for column in 0..self.beside.columns.len() {
                (first..self.n.min(first + TOGETHER)).for_each(|row| put(row, column));
            }
        }
    }

    /// The matrix `y[n,k]` that they stand for.
    pub fn expand<T: Element>(&self, y: &mut [T]) {
        let (columns, groups) = (self.beside.columns, self.groups());
        let zeros = self.scheme.zeros(self.n, groups, self.beside.zeros);
        let table: Vec<(i32, f32)> = zeros.into_iter().zip(self.scales()).collect();
        self.each(|row, column| {
            let (zero, scale) = table[row * groups + columns[column]];
            // The difference is exact: both are small.
            y[row * columns.len() + column] = T::narrow((self.integer(row, column) - zero) as f32 * scale);
        });
    }

    /// The same as integers with scales; `None` where a group is no run of columns, or a zero no signed byte.
    pub fn quantized(&self) -> Option<Quantized> {
        let (n, k, groups) = (self.n, self.beside.columns.len(), self.groups());
        let (few, group) = (self.scheme.bits <= 4, self.scheme.group.unwrap_or(k));
        if !self.beside.columns.iter().enumerate().all(|(column, of)| *of == column / group) {
            return None;
        }
        let zeros = self.scheme.zeros(n, groups, self.beside.zeros);
        // One zero for all is taken off the integers; others leave signed bytes.
        let same = zeros.first().copied().filter(|first| few && zeros.iter().all(|zero| zero == first));
        let less = same.unwrap_or(if few || self.scheme.order == Order::Bytes { 0 } else { 128 });
        let z = zeros.iter().map(|zero| i8::try_from(zero - less).ok()).collect::<Option<Vec<i8>>>()?;
        let offset = if z.iter().all(|z| *z == 0) { Offset::None } else { Offset::Zero(z) };
        let mut q = vec![0i8; n * k];
        self.each(|row, column| q[row * k + column] = (self.integer(row, column) - less) as i8);
        let least = few.then_some(-less as i8);
        Some(Quantized { n, k, least, group, block: 1, q, d: self.scales().collect(), s: None, offset })
    }
}

/// Where a config says how its matrices are stored.
const FIELD: &str = "quantization_config";

/// Fields of it that say how scales and integers were found, or how tools compute with them.
const INERT: [&str; 38] = [
    "act_group_aware",
    "auto_round",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "global_compression_ratio",
    "hyb_act",
    "ignore",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "mse",
    "observer",
    "observer_kwargs",
    "pad_token_id",
    "quantization_status",
    "scale_dtype",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "zp_dtype",
];

/// A field, with those around it, and what is wrong with it.
type Complaint = (String, String);

/// How the folder `dir` stores matrices.
///
/// # Errors
/// All that `quantization_config` says and that is not read.
pub(crate) fn of(dir: &Path) -> Result<Stored, ModelError> {
    let path = dir.join("config.json");
    if !path.exists() {
        return Ok(Stored::default());
    }
    let config = read_object(&path)?;
    let of = |map: &Map<String, Value>| map.get(FIELD).filter(|value| !value.is_null()).cloned();
    let within = config.get("text_config").and_then(Value::as_object).and_then(of);
    let Some(value) = of(&config).or(within) else { return Ok(Stored::default()) };
    read(&value).map_err(|complaints| {
        let all = complaints.into_iter().map(|(field, why)| ModelError::field(&path, field, why)).collect();
        ModelError::all(all).expect_err("there are some")
    })
}

/// How a folder stores its matrices, where it does not store them as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Stored {
    /// As integers, in one of these ways.
    pub schemes: Vec<Scheme>,
    /// As floats of 8 bits, e4m3, with a scale for each block of so many rows and columns.
    pub float8: Option<[usize; 2]>,
}

/// What a `quantization_config` says, or all that is not read of it. That of MXFP4 says nothing: its tensors do.
pub(crate) fn read(value: &Value) -> Result<Stored, Vec<Complaint>> {
    let Value::Object(map) = value else {
        return Err(vec![(FIELD.into(), format!("is {}; it must be an object", shown(value)))]);
    };
    let mut complaints = Vec::new();
    let mut object = Object::of(map, FIELD.into(), &mut complaints);
    let mut float8 = None;
    let schemes = match object.get("quant_method").and_then(Value::as_str) {
        Some("fp8") => {
            float8 = Some(blocks_of_float8(&mut object));
            Vec::new()
        }
        Some("awq") => vec![awq(&mut object)],
        Some("gptq") => vec![gptq(&mut object)],
        Some("compressed-tensors") => compressed(&mut object),
        Some("mxfp4") => return Ok(Stored::default()),
        _ => {
            let said = map.get("quant_method").map_or("missing".into(), shown);
            let why = format!(
                "is {said}; supported are awq, gptq and compressed-tensors that quantise weights alone, fp8 in blocks, and mxfp4 of \
                 gpt_oss: load such a folder, or an unquantised one"
            );
            object.refuse("quant_method", why);
            return Err(complaints);
        }
    };
    object.rest();
    if complaints.is_empty() { Ok(Stored { schemes, float8 }) } else { Err(complaints) }
}

/// Rows and columns of a block.
fn blocks_of_float8(object: &mut Object) -> [usize; 2] {
    object.only("fmt", &["e4m3"]);
    // That kernels round activations too is how they compute; here nothing is rounded but weights.
    object.only("activation_scheme", &["dynamic"]);
    object.get("scale_fmt");
    let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
    let found = object.get("weight_block_size");
    match found.and_then(Value::as_array).map(|all| all.iter().map(size).collect::<Option<Vec<usize>>>()) {
        Some(Some(sizes)) if sizes.len() == 2 => [sizes[0], sizes[1]],
        _ => {
            let why = format!(
                "is {}; it must be rows and columns of a block, such as [128, 128]",
                found.map_or("missing".into(), shown)
            );
            object.refuse("weight_block_size", why);
            [1, 1]
        }
    }
}

/// The number that a byte of e4m3 stands for; NaN has two.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * f32::exp2(-9.0),
        _ => (8.0 + fraction) * f32::exp2((exponent - 10) as f32),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

fn awq(object: &mut Object) -> Scheme {
    let bits = object.bits("bits", &[4]);
    let group = object.group();
    for field in ["version", "format"] {
        object.only(field, &["gemm", "GEMM"]);
    }
    object.only("method", &["awq"]);
    if object.get("zero_point").is_some_and(|value| *value != Value::Bool(true)) {
        object.refuse("zero_point", "is not true; supported are matrices with stored zeros");
    }
    if object.get("backend").is_some_and(|value| value == "llm-awq") {
        object.refuse("backend", "is \"llm-awq\", which packs in another order; supported is version gemm");
    }
    object.flag("desc_act");
    Scheme { order: Order::Awq, bits, group, one_less: false, asks_for: [true, false] }
}

fn gptq(object: &mut Object) -> Scheme {
    let bits = object.bits("bits", &[2, 4, 8]);
    let group = object.group();
    for field in ["checkpoint_format", "format"] {
        object.only(field, &["gptq", "gptq_v2"]);
    }
    object.only("method", &["gptq"]);
    object.only("pack_dtype", &["int32"]);
    let format = object.get("checkpoint_format").or(object.get("format"));
    let one_less = format.is_none_or(|format| format == "gptq");
    // Groups of columns that were sorted are no pieces of a row.
    let sorted = object.flag("desc_act");
    Scheme { order: Order::Gptq, bits, group, one_less, asks_for: [true, sorted] }
}

fn compressed(object: &mut Object) -> Vec<Scheme> {
    for field in ["kv_cache_scheme", "transform_config"] {
        if object.get(field).is_some_and(|value| !asks_for_nothing(value)) {
            let why = "is set, which is another model; supported are folders that quantise weights alone";
            object.refuse(field, why);
        }
    }
    if object.get("sparsity_config").is_some_and(|value| !asks_for_nothing(value) && value["format"] != "dense") {
        object.refuse("sparsity_config", "is set; supported are matrices that are stored whole");
    }
    // The tools that wrote a folder, and no computation.
    object.get("version");
    let format = object.get("format");
    let Some(Value::Object(groups)) = object.get("config_groups").filter(|groups| !asks_for_nothing(groups)) else {
        object.refuse("config_groups", "is missing; it must say how matrices are stored");
        return Vec::new();
    };
    let mut schemes = Vec::new();
    for (name, group) in groups {
        let field = format!("config_groups.{name}");
        let Value::Object(group) = group else {
            object.refuse(&field, "is no object; write what the name stands for");
            continue;
        };
        let mut group = Object::of(group, format!("{}.{field}", object.place), object.complaints);
        schemes.extend(group_of(&mut group, format));
        group.rest();
    }
    schemes
}

/// One of the groups, of which tensors say which matrices it is of.
fn group_of(object: &mut Object, whole: Option<&Value>) -> Option<Scheme> {
    // A matrix is stored in one way or another, whatever it is said to be.
    object.get("targets");
    for field in ["input_activations", "output_activations"] {
        if object.get(field).is_some() {
            let why = "is set, which is another model; supported are folders that quantise weights alone";
            object.refuse(field, why);
        }
    }
    let order = match object.get("format").or(whole).and_then(Value::as_str) {
        Some("pack-quantized") => Some(Order::Rows),
        Some("int-quantized" | "naive-quantized") => Some(Order::Bytes),
        _ => {
            let said = object.get("format").or(whole).map_or("missing".into(), shown);
            let why = format!("is {said}; supported are pack-quantized, int-quantized and naive-quantized");
            object.refuse("format", why);
            None
        }
    };
    let Some(Value::Object(weights)) = object.get("weights") else {
        object.refuse("weights", "is missing; it must say how weights are stored");
        return None;
    };
    let mut weights = Object::of(weights, format!("{}.weights", object.place), object.complaints);
    let scheme = order.map(|order| weights_of(&mut weights, order));
    if scheme.is_some() {
        weights.rest();
    }
    scheme
}

fn weights_of(weights: &mut Object, order: Order) -> Scheme {
    let bits = weights.bits("num_bits", if order == Order::Rows { &[2, 4, 8] } else { &[8] });
    weights.only("type", &["int"]);
    let strategy = weights.get("strategy").and_then(Value::as_str);
    weights.only("strategy", &["channel", "group"]);
    let group = match strategy {
        Some("channel") => {
            if weights.get("group_size").is_some_and(|size| *size != -1) {
                weights.refuse("group_size", "is set beside strategy \"channel\"");
            }
            None
        }
        _ => weights.group(),
    };
    let sorted = weights.get("actorder").is_some_and(|order| *order == "group" || *order == "dynamic");
    let symmetric = weights.get("symmetric").is_none_or(|flag| *flag == Value::Bool(true));
    Scheme { order, bits, group, one_less: false, asks_for: [!symmetric, sorted] }
}

/// An object of a config, of which every field is read or refused.
struct Object<'a, 'c> {
    map: &'a Map<String, Value>,
    place: String,
    asked: BTreeSet<String>,
    complaints: &'c mut Vec<Complaint>,
}

impl<'a, 'c> Object<'a, 'c> {
    fn of(map: &'a Map<String, Value>, place: String, complaints: &'c mut Vec<Complaint>) -> Object<'a, 'c> {
        Object { map, place, asked: BTreeSet::new(), complaints }
    }

    fn refuse(&mut self, field: &str, why: impl Into<String>) {
        self.complaints.push((format!("{}.{field}", self.place), why.into()));
    }

    /// A field that is not null.
    fn get(&mut self, field: &str) -> Option<&'a Value> {
        self.asked.insert(field.into());
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Complains unless the field is absent or one of `supported`.
    fn only(&mut self, field: &str, supported: &[&str]) {
        if let Some(value) = self.get(field).filter(|value| !supported.iter().any(|one| **value == **one)) {
            self.refuse(field, format!("is {}; supported is {}", shown(value), supported.join(" or ")));
        }
    }

    fn flag(&mut self, field: &str) -> bool {
        match self.get(field) {
            None => false,
            Some(Value::Bool(flag)) => *flag,
            Some(value) => {
                self.refuse(field, format!("is {}; it must be true or false", shown(value)));
                false
            }
        }
    }

    /// How many bits an integer has; the first of those that are supported where it was refused.
    fn bits(&mut self, field: &str, supported: &[u32]) -> u32 {
        let found = self.get(field);
        let bits = found.and_then(Value::as_u64).and_then(|bits| supported.iter().find(|one| u64::from(**one) == bits));
        *bits.unwrap_or_else(|| {
            let names: Vec<String> = supported.iter().map(u32::to_string).collect();
            let why = format!("is {}; supported is {}", found.map_or("missing".into(), shown), names.join(" or "));
            self.refuse(field, why);
            &supported[0]
        })
    }

    /// `group_size`; none where it is -1.
    fn group(&mut self) -> Option<usize> {
        let found = self.get("group_size");
        let size = found.and_then(Value::as_i64).and_then(|size| i32::try_from(size).ok());
        match size {
            Some(-1) => None,
            Some(size) if size > 0 => Some(size as usize),
            _ => {
                let said = found.map_or("missing".into(), shown);
                self.refuse("group_size", format!("is {said}; it must be a whole number from 1, or -1 for whole rows"));
                None
            }
        }
    }

    /// Refuses what nobody asked for, but what asks for nothing or changes no weight.
    fn rest(&mut self) {
        let is_read = |field: &String| self.asked.contains(field) || INERT.contains(&&**field);
        let rest: Vec<(&String, &Value)> =
            self.map.iter().filter(|(field, value)| !is_read(field) && !asks_for_nothing(value)).collect();
        for (field, value) in rest {
            let why = format!("is {}, which is not known here; remove it if it changes nothing", shown(value));
            self.refuse(field, why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scheme(order: Order, bits: u32) -> Scheme {
        Scheme { order, bits, group: Some(4), one_less: order == Order::Gptq, asks_for: [false; 2] }
    }

    fn expanded(scheme: &Scheme, n: usize, words: &[u32], beside: &Beside) -> Vec<f32> {
        let mut y = vec![f32::NAN; n * beside.columns.len()];
        let integers = Integers { scheme, n, bytes: &bytes(words), beside: *beside };
        integers.expand(&mut y);
        // As they are packed, the numbers are the same.
        if let Some(packed) = integers.quantized() {
            for (row, y) in y.chunks(beside.columns.len()).enumerate() {
                let of = |column: usize| packed.value(row, column).to_bits();
                assert!(y.iter().enumerate().all(|(column, y)| y.to_bits() == of(column)));
            }
        }
        y
    }

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// One column of eight rows: row 1 stands in the fifth four bits. A difference of 0 times a negative scale is -0.
    #[test]
    fn numbers_of_e4m3() {
        let of = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0xb8, -1.0),
        ];
        assert!(of.into_iter().all(|(byte, number)| e4m3(byte) == number));
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e4m3(0x80).is_sign_negative());
    }

    #[test]
    fn words_of_awq() {
        let (zeros, scales) = (bytes(&[0x8765_4321]), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -2.0]);
        let beside = Beside { scales: &scales, zeros: Some(Zeros::Words(&zeros)), columns: &[0] };
        let y = expanded(&scheme(Order::Awq, 4), 8, &[0x8fed_cba9], &beside);
        // Rows 0, 2, 4, 6 in the lower half of the word, 1, 3, 5, 7 in the upper.
        assert_eq!(y, [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 0.0]);
        assert!(y[7].is_sign_negative());
        let beside = Beside { scales: &[1.0; 8], zeros: Some(Zeros::Words(&[0; 4])), columns: &[0] };
        let y = expanded(&scheme(Order::Awq, 4), 8, &[0x7654_3210], &beside);
        assert_eq!(y, [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]);
    }

    /// Eight columns of one row, whose groups the folder says. A zero is stored as one less, so it may be 16.
    #[test]
    fn words_of_gptq() {
        let zeros = bytes(&[0x00, 0x4f]);
        let scales = [0.5, 2.0, 10.0, 20.0];
        let beside = Beside { scales: &scales, zeros: Some(Zeros::Words(&zeros)), columns: &[1, 1, 0, 0, 0, 0, 1, 0] };
        let y = expanded(&scheme(Order::Gptq, 4), 2, &[0x7654_3210, 0x7654_3210], &beside);
        assert_eq!(y[..8], [-160.0, -150.0, 0.5, 1.0, 1.5, 2.0, -100.0, 3.0]);
        assert_eq!(y[8..], [-100.0, -80.0, 2.0, 4.0, 6.0, 8.0, 20.0, 12.0]);
    }

    /// A row of five columns of a byte each in words, with half the range added, and signed bytes.
    #[test]
    fn rows_of_words_and_bytes() {
        let beside = Beside { scales: &[0.5], zeros: None, columns: &[0; 5] };
        let words = [0x7f80_81ff, 0x0000_0000];
        assert_eq!(expanded(&scheme(Order::Rows, 8), 1, &words, &beside), [63.5, 0.5, 0.0, -0.5, -64.0]);
        let beside = Beside { scales: &[0.5, 0.25], zeros: Some(Zeros::Bytes(&[1, 0xff])), columns: &[0, 0, 1, 1] };
        assert_eq!(expanded(&scheme(Order::Bytes, 8), 1, &[0x7f80_01ff], &beside), [-1.0, 0.0, -31.75, 32.0]);
        // Zeros in words stand side by side along the rows.
        let zeros = bytes(&[0x0000_0091]);
        let beside = Beside { scales: &[1.0, 1.0], zeros: Some(Zeros::Words(&zeros)), columns: &[0] };
        assert_eq!(expanded(&scheme(Order::Rows, 4), 2, &[3, 3], &beside), [2.0, -6.0]);
    }

    #[test]
    fn schemes_are_read_and_all_else_is_refused() {
        let weights = |more: Value| {
            let mut weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true, "dynamic": false});
            weights.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}}, "ignore": ["lm_head"], "version": "0.9"})
        };
        let found = read(&weights(json!({"symmetric": false}))).unwrap();
        let wanted = Scheme { order: Order::Rows, bits: 4, group: Some(32), one_less: false, asks_for: [true, false] };
        assert_eq!(found.schemes, [wanted]);
        let gptq = json!({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": true, "sym": false});
        let wanted = Scheme { order: Order::Gptq, bits: 8, group: None, one_less: true, asks_for: [true, true] };
        assert_eq!(read(&gptq).unwrap().schemes, [wanted]);
        let mut activations = weights(json!({}));
        activations["config_groups"]["group_0"]["input_activations"] = json!({"num_bits": 8});
        for (value, refused) in [
            (activations, "config_groups.group_0.input_activations"),
            (weights(json!({"type": "float"})), "config_groups.group_0.weights.type"),
            (weights(json!({"num_bits": 3})), "config_groups.group_0.weights.num_bits"),
            (weights(json!({"strategy": "block"})), "config_groups.group_0.weights.strategy"),
            (weights(json!({"dynamic": true})), "config_groups.group_0.weights.dynamic"),
            (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "quant_method"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "group_size"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:a": {}}}), "dynamic"),
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}),
                "checkpoint_format",
            ),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}), "version"),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": false}), "zero_point"),
        ] {
            let complaints = read(&value).unwrap_err();
            assert_eq!(complaints.len(), 1, "{complaints:?}");
            assert_eq!(complaints[0].0, format!("quantization_config.{refused}"), "{complaints:?}");
        }
        let both =
            json!({"quant_method": "awq", "bits": 3, "group_size": 32, "zero_point": false, "rotation": "hadamard"});
        assert_eq!(read(&both).unwrap_err().len(), 3);
    }
}
