//! Reads what somebody has recorded of a GPU: a safetensors file of steps and products.
//!
//! - Steps: `NAME.a` `[n, steps, M, k]`, `NAME.b` `[n, steps, N, k]`, `NAME.c` and `NAME.d` `[n, M, N]` in f32: d is c plus a
//!   times the transpose of b, step after step. `[M, k]`, `[N, k]`, `[M, N]` are one of them.
//! - Products: `NAME.x` `[M, K]`, `NAME.w` `[N, K]`, and `NAME.y` (rounded to the type of x, or f32), `NAME.y_fp32`, or both,
//!   `[M, N]`.
//!
//! Operands are BF16, F16, or F32 that are all tf32 (13 low bits of 0); or raw words: U16, of the format that `dtype` in the
//! file's metadata names, else of whichever reproduces them, and U32, tf32.

use crate::Format;
use crate::search::{Product, Rounding, Target};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that a file holds, by name.
pub struct Dump {
    /// Ascending by name.
    pub entries: Vec<Entry>,
}

/// What a file holds under a name.
pub struct Entry {
    /// What stands before the last dot.
    pub name: String,
    /// The formats that its operands may have: one, or for raw words without a `dtype` two.
    pub formats: Vec<Format>,
    /// Its numbers.
    pub content: Content,
}

/// The numbers of an entry.
pub enum Content {
    /// Of the instruction.
    Steps(Steps),
    /// Of a library.
    Product(Product),
}

/// Recorded steps.
pub struct Steps {
    /// How many tests.
    pub n: usize,
    /// Steps of each, one behind the other.
    pub steps: usize,
    /// Rows of a.
    pub m: usize,
    /// Rows of b.
    pub columns: usize,
    /// Columns of both in a step.
    pub k: usize,
    /// `[n, steps, M, k]`.
    pub a: Vec<u32>,
    /// `[n, steps, N, k]`.
    pub b: Vec<u32>,
    /// `[n, M, N]`, f32.
    pub c: Vec<u32>,
    /// `[n, M, N]`, f32.
    pub d: Vec<u32>,
}

const STEPS: [&str; 4] = ["a", "b", "c", "d"];
const PRODUCT: [&str; 4] = ["x", "w", "y", "y_fp32"];

/// Operands of an entry: which formats, and the words of both.
type Operands = (Vec<Format>, Vec<u32>, Vec<u32>);

/// A reader of one name's tensors, which collects what is wrong with them.
struct Reader<'a> {
    name: &'a str,
    tensors: &'a BTreeMap<&'a str, TensorView<'a>>,
    declared: Option<Format>,
    complaints: Vec<String>,
}

impl Dump {
    /// Reads a file's bytes.
    ///
    /// # Errors
    /// Everything that is wrong with it, each as `NAME: FIELD: what`.
    pub fn parse(bytes: &[u8]) -> Result<Dump, Vec<String>> {
        let broken = |e: safetensors::SafeTensorError| vec![format!("not a safetensors file: {e}")];
        if bytes.is_empty() {
            return Err(vec!["the file is empty".into()]);
        }
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let file = SafeTensors::deserialize(bytes).map_err(broken)?;
        let mut complaints = Vec::new();
        let declared = header.metadata().as_ref().and_then(|metadata| metadata.get("dtype"));
        let declared = declared.and_then(|text| {
            let format = declared_format(text);
            if format.is_none() {
                complaints.push(format!("metadata: dtype: `{text}` is none of bf16, fp16, tf32"));
            }
            format
        });
        let mut names: BTreeMap<String, BTreeMap<&str, TensorView>> = BTreeMap::new();
        let list = file.tensors();
        for (key, view) in &list {
            match key.rsplit_once('.') {
                Some((name, field)) if !name.is_empty() && (STEPS.contains(&field) || PRODUCT.contains(&field)) => {
                    names.entry(name.into()).or_default().insert(field, view.clone());
                }
                _ => complaints.push(format!(
                    "{key}: no NAME.FIELD with a field of {}, {}",
                    STEPS.join(", "),
                    PRODUCT.join(", ")
                )),
            }
        }
        if list.is_empty() {
            complaints.push("no tensor in it".into());
        }
        let mut entries = Vec::new();
        for (name, tensors) in &names {
            let mut reader = Reader { name, tensors, declared, complaints: Vec::new() };
            entries.extend(reader.entry());
            complaints.append(&mut reader.complaints);
        }
        if complaints.is_empty() { Ok(Dump { entries }) } else { Err(complaints) }
    }
}

fn declared_format(text: &str) -> Option<Format> {
    match text.to_ascii_lowercase().trim_start_matches("torch.") {
        "bf16" | "bfloat16" => Some(Format::Bf16),
        "fp16" | "f16" | "float16" | "half" => Some(Format::Fp16),
        "tf32" => Some(Format::Tf32),
        _ => None,
    }
}

fn words(view: &TensorView) -> Vec<u32> {
    match view.dtype() {
        Dtype::F32 | Dtype::U32 => {
            view.data().chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        _ => view.data().chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect(),
    }
}

impl Reader<'_> {
    fn complain(&mut self, field: &str, what: impl std::fmt::Display) {
        self.complaints.push(format!("{}: {field}: {what}", self.name));
    }

    fn entry(&mut self) -> Option<Entry> {
        let has = |fields: &[&str]| fields.iter().any(|field| self.tensors.contains_key(field));
        let (steps, product) = (has(&STEPS), has(&PRODUCT));
        if steps && product {
            let fields: BTreeSet<&str> = self.tensors.keys().copied().collect();
            let fields: Vec<&str> = fields.into_iter().collect();
            self.complain(
                &fields.join(", "),
                "steps have a, b, c, d, products x, w, y, y_fp32: one name cannot be both",
            );
            return None;
        }
        for field in if steps { &STEPS[..] } else { &PRODUCT[..2] } {
            if !self.tensors.contains_key(field) {
                self.complain(field, "missing");
            }
        }
        if product && !self.tensors.contains_key("y") && !self.tensors.contains_key("y_fp32") {
            self.complain("y", "missing, and so is y_fp32");
        }
        let empty: Vec<&str> =
            self.tensors.iter().filter(|(_, view)| view.shape().contains(&0)).map(|(f, _)| *f).collect();
        for field in empty {
            self.complain(field, "no element in it");
        }
        if steps { self.steps() } else { self.product() }
    }

    /// The operands of two fields, whose formats must agree.
    fn operands(&mut self, fields: [&str; 2]) -> Option<Operands> {
        let views = fields.map(|field| self.tensors.get(field).cloned());
        let formats = [0, 1].map(|i| views[i].as_ref().and_then(|view| self.formats(fields[i], view)));
        let ([Some(one), Some(two)], [Some(a), Some(b)]) = (formats, views) else { return None };
        if one != two {
            self.complain(fields[1], format!("{:?}, but {} is {:?}", b.dtype(), fields[0], a.dtype()));
            return None;
        }
        Some((one, words(&a), words(&b)))
    }

    fn formats(&mut self, field: &str, view: &TensorView) -> Option<Vec<Format>> {
        let formats = match (view.dtype(), self.declared) {
            (Dtype::BF16, _) => vec![Format::Bf16],
            (Dtype::F16, _) => vec![Format::Fp16],
            (Dtype::U16, Some(Format::Tf32)) => {
                self.complain(field, "U16, but dtype in the metadata is tf32");
                return None;
            }
            (Dtype::U16, Some(format)) => vec![format],
            (Dtype::U16, None) => vec![Format::Bf16, Format::Fp16],
            (Dtype::U32, _) => vec![Format::Tf32],
            (Dtype::F32, _) if words(view).iter().all(|word| word & 0x1FFF == 0) => vec![Format::Tf32],
            (Dtype::F32, _) => {
                self.complain(
                    field,
                    "F32 with bits that tf32 has not: record what the unit was given (13 low bits of 0)",
                );
                return None;
            }
            (other, _) => {
                self.complain(field, format!("{other:?} is none of BF16, F16, F32, U16, U32"));
                return None;
            }
        };
        Some(formats)
    }

    /// The words of a field that must be f32 of a shape.
    fn fp32(&mut self, field: &str, shape: &[usize]) -> Option<Vec<u32>> {
        let view = self.tensors.get(field)?.clone();
        if view.dtype() != Dtype::F32 {
            self.complain(field, format!("{:?}, must be F32", view.dtype()));
            return None;
        }
        self.shaped(field, &view, shape).then(|| words(&view))
    }

    fn shaped(&mut self, field: &str, view: &TensorView, shape: &[usize]) -> bool {
        let right = view.shape() == shape;
        if !right {
            self.complain(field, format!("shape {:?}, must be {shape:?}", view.shape()));
        }
        right
    }

    /// The shape of a field, which must have one of so many axes.
    fn shape(&mut self, field: &str, axes: &[usize]) -> Option<Vec<usize>> {
        let shape = self.tensors.get(field)?.shape().to_vec();
        let right = axes.contains(&shape.len());
        if !right {
            let axes: Vec<String> = axes.iter().map(usize::to_string).collect();
            self.complain(field, format!("shape {shape:?}, must have {} axes", axes.join(" or ")));
        }
        right.then_some(shape)
    }

    fn steps(&mut self) -> Option<Entry> {
        let operands = self.operands(["a", "b"]);
        let (a, b) = (self.shape("a", &[2, 4]), self.shape("b", &[2, 4]));
        let (a, b) = (a?, b?);
        let (lead, m, k) = (&a[..a.len() - 2], a[a.len() - 2], a[a.len() - 1]);
        let columns = b[b.len() - 2];
        if &b[..b.len() - 2] != lead || b[b.len() - 1] != k {
            self.complain("b", format!("shape {b:?} does not fit {a:?} of a"));
            return None;
        }
        let (n, steps) = if let [n, steps] = *lead { (n, steps) } else { (1, 1) };
        let shape = if lead.is_empty() { vec![m, columns] } else { vec![n, m, columns] };
        let (c, d) = (self.fp32("c", &shape), self.fp32("d", &shape));
        let ((formats, a, b), c, d) = (operands?, c?, d?);
        Some(Entry {
            name: self.name.into(),
            formats,
            content: Content::Steps(Steps { n, steps, m, columns, k, a, b, c, d }),
        })
    }

    fn product(&mut self) -> Option<Entry> {
        let operands = self.operands(["x", "w"]);
        let (x, w) = (self.shape("x", &[2]), self.shape("w", &[2]));
        let (x, w) = (x?, w?);
        if x[1] != w[1] {
            self.complain("w", format!("shape {w:?}, but x is {x:?}: both must have K columns"));
        }
        let (m, n, k) = (x[0], w[0], x[1]);
        let mut targets = Vec::new();
        if let Some(words) = self.fp32("y_fp32", &[m, n]) {
            targets.push(Target { field: "y_fp32", rounding: Rounding::Fp32, words });
        }
        let formats = operands.as_ref().map(|(formats, ..)| formats.clone());
        targets.extend(self.rounded(&[m, n], formats.as_deref()));
        let (formats, x, w) = operands?;
        let content = Content::Product(Product { m, n, k, x, w, targets });
        self.complaints.is_empty().then(|| Entry { name: self.name.into(), formats, content })
    }

    /// y, in whichever type it has. Raw words are of the format of x, as [`Product::of`] says.
    fn rounded(&mut self, shape: &[usize], formats: Option<&[Format]>) -> Option<Target> {
        let view = self.tensors.get("y")?.clone();
        let rounding = match (view.dtype(), formats) {
            (Dtype::F32, _) => Rounding::Fp32,
            (Dtype::BF16, _) => Rounding::Bf16,
            (Dtype::F16, _) => Rounding::Fp16,
            (Dtype::U16, Some([Format::Fp16])) => Rounding::Fp16,
            (Dtype::U16, Some([Format::Bf16, ..]) | None) => Rounding::Bf16,
            (other, _) => {
                self.complain("y", format!("{other:?}, must be BF16, F16, F32, or U16 beside operands of 16 bits"));
                return None;
            }
        };
        self.shaped("y", &view, shape).then(|| Target { field: "y", rounding, words: words(&view) })
    }
}

impl Product {
    /// The same, with the operands read as `format` where it is one of two that raw words may have.
    pub fn of(&self, format: Format, raw: bool) -> Product {
        let mut product = self.clone();
        if raw && format == Format::Fp16 {
            let rounded = |target: &&mut Target| target.rounding == Rounding::Bf16;
            product.targets.iter_mut().filter(rounded).for_each(|target| target.rounding = Rounding::Fp16);
        }
        product
    }
}
