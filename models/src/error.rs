use std::path::{Path, PathBuf};

/// Why a model was not loaded or did not run. Displays as one line.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file of the model folder is missing or unreadable as a whole.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A field of a JSON file is missing, malformed or asks for something unsupported.
    #[error("{}: `{field}` {why}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field; dots lead into objects.
        field: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A tensor is missing, unexpected or not what `config.json` asks for.
    #[error("{}: tensor `{tensor}` {why}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor; control characters are escaped.
        tensor: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// What the caller passed does not fit the model.
    #[error("{what}: {why}")]
    Input {
        /// The argument.
        what: &'static str,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// An op refused to run.
    #[error(transparent)]
    Op(#[from] samebits_ops::Error),
}

impl ModelError {
    pub(crate) fn file(path: &Path, why: impl Into<String>) -> ModelError {
        ModelError::File { path: path.into(), why: why.into() }
    }

    pub(crate) fn field(path: &Path, field: impl Into<String>, why: impl Into<String>) -> ModelError {
        ModelError::Field { path: path.into(), field: field.into(), why: why.into() }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, why: impl Into<String>) -> ModelError {
        ModelError::Tensor { path: path.into(), tensor: tensor.escape_debug().to_string(), why: why.into() }
    }

    /// The same as an op's error.
    pub(crate) fn into_op(self) -> samebits_ops::Error {
        match self {
            ModelError::Op(e) => e,
            other => samebits_ops::Error::Device(other.to_string()),
        }
    }

    pub(crate) fn input(what: &'static str, why: impl Into<String>) -> ModelError {
        ModelError::Input { what, why: why.into() }
    }
}
