use samebits_ops::DType;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why a model was not loaded or did not run. Displays as one line; control characters, which names in files may hold, are
/// escaped.
#[derive(Debug)]
pub enum ModelError {
    /// A file of the model folder is missing or unreadable as a whole.
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A field of a JSON file is missing, malformed or asks for something unsupported.
    Field {
        /// The file.
        path: PathBuf,
        /// The field; dots lead into objects.
        field: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A tensor is missing, unexpected or not what `config.json` asks for.
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// What the caller passed does not fit the model.
    Input {
        /// The argument.
        what: &'static str,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A result is not finite, although all that it was made from is.
    NotFinite {
        /// Where: layer, op and site.
        place: String,
        /// The number of the sequence.
        sequence: usize,
        /// The number of the token in it.
        token: usize,
        /// What stands there, and what would help.
        why: String,
    },
    /// Several things are wrong with a folder: at least two, each an error of its own.
    Several(Vec<ModelError>),
    /// An op refused to run.
    Op(samebits_ops::Error),
}

impl ModelError {
    pub(crate) fn file(path: &Path, why: impl Into<String>) -> ModelError {
        ModelError::File { path: path.into(), why: why.into() }
    }

    pub(crate) fn field(path: &Path, field: impl Into<String>, why: impl Into<String>) -> ModelError {
        ModelError::Field { path: path.into(), field: field.into(), why: why.into() }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, why: impl Into<String>) -> ModelError {
        ModelError::Tensor { path: path.into(), tensor: tensor.into(), why: why.into() }
    }

    pub(crate) fn input(what: &'static str, why: impl Into<String>) -> ModelError {
        ModelError::Input { what, why: why.into() }
    }

    /// All of some complaints as one error, where there are any.
    pub(crate) fn all(mut complaints: Vec<ModelError>) -> Result<(), ModelError> {
        match complaints.len() {
            0 => Ok(()),
            1 => Err(complaints.remove(0)),
            _ => Err(ModelError::Several(complaints)),
        }
    }

    /// The same, with what would help a run in `dtype`, where it is about values that are not finite.
    pub(crate) fn helped(mut self, dtype: DType) -> ModelError {
        if let ModelError::NotFinite { why, .. } = &mut self {
            *why += match dtype {
                DType::Fp16 => "; fp16 ends at 65504, and bf16 where fp32 does: run it in bf16",
                DType::Bf16 | DType::Fp32 | DType::I32 => {
                    "; bf16 and fp32 end at 3.4e38: its weights, or what it was given, are too large"
                }
            };
        }
        self
    }

    /// Adds another complaint about the same folder.
    pub(crate) fn join(&mut self, other: ModelError) {
        let of = |e: ModelError| match e {
            ModelError::Several(all) => all,
            one => vec![one],
        };
        let first = std::mem::replace(self, ModelError::Several(Vec::new()));
        *self = ModelError::Several(of(first).into_iter().chain(of(other)).collect());
    }

    /// The same as an op's error.
    pub(crate) fn into_op(self) -> samebits_ops::Error {
        match self {
            ModelError::Op(e) => e,
            other => samebits_ops::Error::Device(other.to_string()),
        }
    }

    /// The file it is about.
    fn path(&self) -> Option<&Path> {
        match self {
            ModelError::File { path, .. } | ModelError::Field { path, .. } | ModelError::Tensor { path, .. } => {
                Some(path)
            }
            _ => None,
        }
    }

    /// What it says behind the file.
    fn what(&self) -> String {
        match self {
            ModelError::File { why, .. } => why.clone(),
            ModelError::Field { field, why, .. } => format!("`{field}` {why}"),
            ModelError::Tensor { tensor, why, .. } => format!("tensor `{tensor}` {why}"),
            ModelError::Input { what, why } => format!("{what}: {why}"),
            ModelError::NotFinite { place, sequence, token, why } => {
                format!("not finite: {place} of sequence {sequence}, token {token}: {why}")
            }
            ModelError::Op(e) => e.to_string(),
            ModelError::Several(all) => {
                // A file is named once for what follows it.
                let mut line = String::new();
                for (i, one) in all.iter().enumerate() {
                    line += if i > 0 { "; " } else { "" };
                    if let Some(path) = one.path().filter(|path| i == 0 || Some(*path) != all[i - 1].path()) {
                        line += &format!("{}: ", path.display());
                    }
                    line += &one.what();
                }
                line
            }
        }
    }
}

/// A text whose control characters are escaped.
pub(crate) fn escaped(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        // Marks of direction turn a line round as a terminal shows it.
        match c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
        {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
    }
    line
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = match self.path() {
            Some(path) => format!("{}: {}", path.display(), self.what()),
            None => self.what(),
        };
        f.write_str(&escaped(&line))
    }
}

impl std::error::Error for ModelError {}

impl From<samebits_ops::Error> for ModelError {
    fn from(e: samebits_ops::Error) -> ModelError {
        ModelError::Op(e)
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn names_from_files_are_escaped_and_files_named_once() {
        let field = |name: &str| ModelError::field(Path::new("a\u{1b}[2J/config.json"), name, "is \"\u{7}\u{202e}é\"");
        assert_eq!(field("x\n").to_string(), "a\\u{1b}[2J/config.json: `x\\n` is \"\\u{7}\\u{202e}é\"");
        let tensor = || ModelError::tensor(Path::new("w"), "t", "is odd");
        let all = ModelError::all(vec![field("x"), field("y"), tensor(), tensor()]).unwrap_err().to_string();
        let expected = "a\\u{1b}[2J/config.json: `x` is \"\\u{7}\\u{202e}é\"; `y` is \"\\u{7}\\u{202e}é\"; w: tensor `t` is odd; tensor `t` is odd";
        assert_eq!(all, expected);
        assert_eq!(ModelError::all(vec![tensor()]).unwrap_err().to_string(), "w: tensor `t` is odd");
        assert!(ModelError::all(vec![]).is_ok());
    }
}
