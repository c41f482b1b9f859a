//! The form of every op, written once: inputs with axes, roles and dtypes; attributes with kinds, ranges and defaults;
//! outputs; and what shapes and attributes alone do not say.
//!
//! [`validate`] is the one check of a call: requests on the wire, cases of the contract and calls of the ops go through
//! it. The crate computes nothing on the elements of tensors and imports nothing.
//!
//! ```
//! use samebits_schema::{Attributes, DType, Given, find, validate};
//!
//! let gemm = find("gemm").unwrap();
//! let x = Given { name: "x", dtype: DType::Bf16, shape: &[5, 64] };
//! let w = Given { name: "w", dtype: DType::Bf16, shape: &[7, 64] };
//! let call = validate(gemm, &[x, w], Attributes::new(), DType::Fp32)?;
//! assert_eq!((call.dim("M"), call.dim("N"), call.count("k_total")), (5, 7, 64));
//! assert_eq!(call.outputs()[0].shape, [5, 7]);
//!
//! let error = validate(gemm, &[x], Attributes::new(), DType::Fp32).unwrap_err();
//! assert_eq!(error.to_string(), "input `w`: missing; gemm needs it as w[N,K] of bf16, fp16 or fp32");
//! # Ok::<(), samebits_schema::Error>(())
//! ```
#![forbid(unsafe_code)]

mod attribute;
mod call;
mod dtype;
mod index;
mod op;
mod ops;
pub mod sample;

pub use attribute::{Attribute, Attributes, DefaultValue, Kind, PROFILE, TF32, Value};
pub use call::{Call, Dims, Form, Given, following, validate};
pub use dtype::DType;
pub use index::{Holds, check_indexes};
pub use op::{Extent, Input, Op, Output, OutputDType, REST, Role};
pub use ops::*;

use std::fmt;

/// Why a call is refused; one line that names the field and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Well formed, and outside of what is offered.
    Unsupported(String),
    /// Malformed.
    Invalid(String),
}

impl Error {
    /// The line, without saying which of the two it is.
    pub fn reason(&self) -> &str {
        match self {
            Error::Unsupported(reason) | Error::Invalid(reason) => reason,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Unsupported(reason) => write!(f, "unsupported: {reason}"),
            Error::Invalid(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for Error {}

/// `a, b or c`.
fn list(words: &[&str], last: &str) -> String {
    match words {
        [] => "none".into(),
        [one] => one.to_string(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests;
