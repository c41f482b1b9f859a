//! The one codec for cases, answers and goldens: a safetensors file, preceded on a pipe by its length (u64, little endian).
//!
//! The same value always encodes to the same bytes: tensors and metadata are written in sorted order.

use crate::case::{Answer, Case, Config, Status};
use crate::tensor::{DType, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::json;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};

/// Largest frame accepted from a pipe: 8 GiB.
pub const MAX_FRAME: u64 = 8 << 30;

/// Metadata of an answer that starts so holds what was counted.
const LEDGER: &str = "ledger.";

/// Metadata keys that are not parameters of an op; `format` is what other writers of safetensors files add.
const ENVELOPE: [&str; 9] =
    ["op", "out", "case", "format", "config.isa", "config.threads", "config.budget", "config.layout", "config.id"];

/// Why bytes could not be read or written as a message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The bytes are not a safetensors file.
    #[error("not a safetensors file: {0}")]
    Format(String),
    /// A tensor has a dtype outside the contract.
    #[error("tensor `{name}`: dtype {dtype} is {why}")]
    DType {
        /// The tensor.
        name: String,
        /// Its dtype in safetensors notation.
        dtype: String,
        /// `out of scope ..` or `not in the contract ..`.
        why: &'static str,
    },
    /// A metadata field is missing or malformed.
    #[error("metadata `{field}`: {why}")]
    Metadata {
        /// The key.
        field: String,
        /// What is wrong and what to write instead.
        why: String,
    },
    /// A frame ends early or is too long.
    #[error("{0}")]
    Frame(String),
    /// The pipe failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Named tensors and string metadata: a whole safetensors file in memory.
#[derive(Clone, Debug, Default)]
pub struct File {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

impl File {
    /// The file's bytes; equal files give equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (mut bytes, forms) = (Vec::new(), self.tensors.iter().map(|(name, t)| (&name[..], t.dtype(), t.shape())));
        write_tensors(&mut bytes, forms.collect(), &self.metadata, |name, bytes| {
            bytes.extend(self.tensors[name].to_bytes());
            Ok(())
        })
        .expect("memory takes it");
        bytes
    }

    /// Reads a file; every tensor must have a dtype of the contract.
    pub fn decode(bytes: &[u8]) -> Result<File, WireError> {
        let format = |e: safetensors::SafeTensorError| WireError::Format(e.to_string());
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(format)?;
        let mut file = File {
            metadata: header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect(),
            tensors: BTreeMap::new(),
        };
        for (name, view) in SafeTensors::deserialize(bytes).map_err(format)?.tensors() {
            let dtype = contract_dtype(&name, view.dtype())?;
            let tensor = Tensor::from_bytes(dtype, view.shape(), view.data())
                .ok_or_else(|| WireError::Format(format!("tensor `{name}`: size does not match its shape")))?;
            file.tensors.insert(name, tensor);
        }
        Ok(file)
    }
}

/// What the header of a file says.
pub struct Header {
    /// `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// The tensors in the order of their bytes, which follow the header without gaps.
    pub tensors: Vec<Stored>,
}

/// A tensor in a file.
pub struct Stored {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extent of every axis.
    pub shape: Vec<usize>,
    /// Bytes of its elements.
    pub bytes: usize,
}

/// Reads the header of a file: the eight bytes of its length and the header itself, without the tensors' bytes.
pub fn read_header(bytes: &[u8]) -> Result<Header, WireError> {
    let format = |why: String| WireError::Format(why);
    let text = bytes.get(8..).ok_or_else(|| format("its header ends too early".into()))?;
    let mut entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(text).map_err(|e| format(format!("its header: {e}")))?;
    let metadata = entries.remove("__metadata__").unwrap_or(serde_json::json!({}));
    let metadata = serde_json::from_value(metadata).map_err(|e| format(format!("`__metadata__`: {e}")))?;
    let mut tensors: Vec<(usize, Stored)> = Vec::new();
    for (name, entry) in entries {
        let info: safetensors::tensor::TensorInfo =
            serde_json::from_value(entry).map_err(|e| format(format!("tensor `{name}`: {e}")))?;
        let dtype = contract_dtype(&name, info.dtype)?;
        let (begin, end) = info.data_offsets;
        let bytes = info.shape.iter().try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent));
        if bytes.is_none() || bytes != end.checked_sub(begin) {
            return Err(format(format!("tensor `{name}`: size does not match its shape")));
        }
        tensors.push((begin, Stored { name, dtype, shape: info.shape, bytes: end - begin }));
    }
    // An empty tensor begins where the next one does.
    tensors.sort_by_key(|(begin, stored)| (*begin, stored.bytes));
    let mut at = 0;
    for (begin, stored) in &tensors {
        if *begin != at {
            return Err(format(format!("tensor `{}`: its bytes do not follow those before it", stored.name)));
        }
        at += stored.bytes;
    }
    Ok(Header { metadata, tensors: tensors.into_iter().map(|(_, stored)| stored).collect() })
}

/// Writes a file of tensors of these names, dtypes and shapes; `data` writes the elements of one, little endian, row by row.
///
/// # Errors
/// Those of writing.
pub fn write_tensors<W: Write>(
    out: &mut W,
    mut forms: Vec<(&str, DType, &[usize])>,
    metadata: &BTreeMap<String, String>,
    mut data: impl FnMut(&str, &mut W) -> io::Result<()>,
) -> io::Result<()> {
    // As the library orders them: wider elements first, then by name.
    forms.sort_by_key(|&(name, dtype, _)| (Reverse(stored_dtype(dtype)), name));
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), json!(metadata));
    }
    for &(name, dtype, shape) in &forms {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        header.insert(name.into(), json!({"dtype": stored_dtype(dtype), "shape": shape, "data_offsets": [start, end]}));
    }
    let mut text = serde_json::to_vec(&header).expect("strings serialise");
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)?;
    forms.iter().try_for_each(|(name, ..)| data(name, out))
}

fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::Bf16 => Dtype::BF16,
        DType::Fp16 => Dtype::F16,
        DType::Fp32 => Dtype::F32,
        DType::I32 => Dtype::I32,
    }
}

fn contract_dtype(name: &str, dtype: Dtype) -> Result<DType, WireError> {
    let why = match dtype {
        Dtype::BF16 => return Ok(DType::Bf16),
        Dtype::F16 => return Ok(DType::Fp16),
        Dtype::F32 => return Ok(DType::Fp32),
        Dtype::I32 => return Ok(DType::I32),
        Dtype::F8_E5M2 | Dtype::F8_E4M3 | Dtype::F8_E8M0 | Dtype::F8_E4M3FNUZ => {
            "out of scope: fp8 is refused by this contract; use BF16, F16 or F32"
        }
        _ => "not in the contract; use BF16, F16, F32 or I32",
    };
    Err(WireError::DType { name: name.into(), dtype: format!("{dtype:?}"), why })
}

/// The request that asks for `case`.
pub fn encode_request(case: &Case) -> Vec<u8> {
    let mut metadata = case.params.clone();
    metadata.insert("op".into(), case.op.clone());
    metadata.insert("out".into(), case.out.name().into());
    if !case.name.is_empty() {
        metadata.insert("case".into(), case.name.clone());
    }
    let Config { isa, threads, budget, layout, id } = &case.config;
    metadata.extend(isa.iter().map(|v| ("config.isa".into(), v.clone())));
    metadata.extend(threads.iter().map(|v| ("config.threads".into(), v.to_string())));
    metadata.extend(budget.iter().map(|v| ("config.budget".into(), v.to_string())));
    metadata.extend(layout.iter().map(|v| ("config.layout".into(), v.clone())));
    metadata.extend(id.iter().map(|v| ("config.id".into(), v.to_string())));
    File { tensors: case.inputs.clone(), metadata }.encode()
}

/// Reads a request. Tensors named `expect.*` are expected outputs kept beside the inputs and are left out;
/// a request without `out` asks for fp32, the computation without its last rounding.
pub fn decode_request(bytes: &[u8]) -> Result<Case, WireError> {
    let File { mut tensors, metadata } = File::decode(bytes)?;
    tensors.retain(|name, _| !name.starts_with("expect."));
    let field = |field: &str, why: String| WireError::Metadata { field: field.into(), why };
    let op = metadata.get("op").ok_or_else(|| field("op", "missing; name the op, for example `gemm`".into()))?.clone();
    let out = match metadata.get("out") {
        None => DType::Fp32,
        Some(name) => match DType::parse(name).map_err(|why| field("out", why))? {
            DType::I32 => return Err(field("out", "`i32` is not an output dtype; use bf16, fp16 or fp32".into())),
            dtype => dtype,
        },
    };
    let count = |key: &str| -> Result<Option<usize>, WireError> {
        let parse = |v: &String| v.parse().map_err(|_| field(key, format!("`{v}` is not a whole number")));
        metadata.get(key).map(parse).transpose()
    };
    let config = Config {
        isa: metadata.get("config.isa").cloned(),
        threads: count("config.threads")?,
        budget: count("config.budget")?,
        layout: metadata.get("config.layout").cloned(),
        id: count("config.id")?.map(|id| id as u64),
    };
    let name = metadata.get("case").cloned().unwrap_or_default();
    let params = metadata.into_iter().filter(|(key, _)| !ENVELOPE.contains(&key.as_str())).collect();
    Ok(Case { name, op, out, params, inputs: tensors, config })
}

/// The message that carries `answer`.
pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let status = match answer.status {
        Status::Ok => "ok",
        Status::Unsupported => "unsupported",
        Status::Error => "error",
    };
    let mut metadata = BTreeMap::from([
        ("status".to_string(), status.to_string()),
        ("reason".to_string(), answer.reason.clone()),
        ("kernel".to_string(), answer.kernel.clone()),
    ]);
    for (key, text) in [("plan", &answer.plan), ("layout", &answer.layout)] {
        if !text.is_empty() {
            metadata.insert(key.into(), text.clone());
        }
    }
    metadata.extend(answer.id.map(|id| ("id".into(), id.to_string())));
    metadata.extend(answer.threads.map(|count| ("threads".into(), count.to_string())));
    metadata.extend(answer.budget.map(|bytes| ("budget".into(), bytes.to_string())));
    metadata.extend(answer.smallest_budget.map(|bytes| ("smallest_budget".into(), bytes.to_string())));
    metadata.extend(answer.ledger.iter().map(|(name, count)| (format!("{LEDGER}{name}"), count.to_string())));
    File { tensors: answer.outputs.clone(), metadata }.encode()
}

/// Reads an answer.
pub fn decode_answer(bytes: &[u8]) -> Result<Answer, WireError> {
    let File { tensors, metadata } = File::decode(bytes)?;
    let status = match metadata.get("status").map(String::as_str) {
        Some("ok") => Status::Ok,
        Some("unsupported") => Status::Unsupported,
        Some("error") => Status::Error,
        other => {
            return Err(WireError::Metadata {
                field: "status".into(),
                why: format!("`{}` is not ok, unsupported or error", other.unwrap_or("")),
            });
        }
    };
    let text = |key: &str| metadata.get(key).cloned().unwrap_or_default();
    let number = |key: &str, value: &String| -> Result<u64, WireError> {
        let why = || format!("`{value}` is not a whole number");
        value.parse().map_err(|_| WireError::Metadata { field: key.into(), why: why() })
    };
    let counted = metadata.iter().filter_map(|(key, value)| Some((key, key.strip_prefix(LEDGER)?, value)));
    let ledger = counted.map(|(key, name, value)| Ok((name.to_string(), number(key, value)?)));
    let id = metadata.get("id").map(|value| number("id", value)).transpose()?;
    let size = |key: &str| -> Result<Option<usize>, WireError> {
        let number = metadata.get(key).map(|value| number(key, value)).transpose()?;
        Ok(number.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
    };
    Ok(Answer {
        status,
        reason: text("reason"),
        kernel: text("kernel"),
        outputs: tensors,
        plan: text("plan"),
        layout: text("layout"),
        id,
        ledger: ledger.collect::<Result<_, WireError>>()?,
        threads: size("threads")?,
        budget: size("budget")?,
        smallest_budget: size("smallest_budget")?,
    })
}

/// Reads one frame; `None` at the end of input. Memory grows with what arrives, not with what the length claims.
pub fn read_frame(pipe: &mut impl Read) -> Result<Option<Vec<u8>>, WireError> {
    read_frame_up_to(pipe, MAX_FRAME)
}

/// As [`read_frame`], with a frame of at most `limit` bytes.
pub fn read_frame_up_to(pipe: &mut impl Read, limit: u64) -> Result<Option<Vec<u8>>, WireError> {
    let mut head = Vec::with_capacity(8);
    pipe.by_ref().take(8).read_to_end(&mut head)?;
    if head.is_empty() {
        return Ok(None);
    }
    let Ok(head) = <[u8; 8]>::try_from(head.as_slice()) else {
        return Err(WireError::Frame(format!("input ends after {} of the 8 length bytes of a frame", head.len())));
    };
    let length = u64::from_le_bytes(head);
    if length > limit {
        return Err(WireError::Frame(format!("a frame claims {length} bytes; the limit is {limit}")));
    }
    let mut body = Vec::new();
    pipe.by_ref().take(length).read_to_end(&mut body)?;
    if (body.len() as u64) < length {
        return Err(WireError::Frame(format!("input ends after {} of the {length} bytes of a frame", body.len())));
    }
    Ok(Some(body))
}

/// Writes one frame and flushes.
pub fn write_frame(pipe: &mut impl Write, body: &[u8]) -> io::Result<()> {
    pipe.write_all(&(body.len() as u64).to_le_bytes())?;
    pipe.write_all(body)?;
    pipe.flush()
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    fn case() -> Case {
        Case {
            name: "add/bf16/one".into(),
            op: "add".into(),
            out: DType::Bf16,
            params: BTreeMap::from([("k".into(), "v".into())]),
            inputs: BTreeMap::from([("a".into(), Tensor::fp32(&[2, 1], vec![1.0, -0.0]))]),
            config: Config { isa: Some("avx2".into()), threads: Some(2), ..Config::default() },
        }
    }

    pub(crate) fn request_round_trips_and_is_stable() {
        let bytes = encode_request(&case());
        assert_eq!(bytes, encode_request(&case()));
        let read = decode_request(&bytes).unwrap();
        assert_eq!((read.op.as_str(), read.out, &read.params), ("add", DType::Bf16, &case().params));
        assert_eq!(read.config, case().config);
        assert_eq!(read.inputs["a"].bits(1), 0x8000_0000);
    }

    pub(crate) fn every_truncation_is_an_error() {
        let bytes = encode_request(&case());
        for length in 0..bytes.len() {
            assert!(decode_request(&bytes[..length]).is_err(), "{length} bytes were accepted");
        }
    }

    pub(crate) fn frames_end_cleanly_or_say_where() {
        let mut pipe = Vec::new();
        write_frame(&mut pipe, b"abc").unwrap();
        assert_eq!(read_frame(&mut pipe.as_slice()).unwrap().unwrap(), b"abc");
        assert!(read_frame(&mut [].as_slice()).unwrap().is_none());
        assert!(read_frame(&mut &pipe[..5]).unwrap_err().to_string().contains("5 of the 8"));
        assert!(read_frame(&mut &pipe[..9]).unwrap_err().to_string().contains("1 of the 3"));
    }
}
