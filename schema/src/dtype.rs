use std::fmt;

/// Element types of tensors. fp8 is out of scope and refused by [`DType::parse`].
///
/// The list is complete on purpose: whoever matches on it is told by the compiler when a type is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum DType {
    /// bfloat16: 8 significant bits.
    Bf16,
    /// IEEE binary16: 11 significant bits.
    Fp16,
    /// IEEE binary32.
    Fp32,
    /// Two's complement, for positions, tokens and targets.
    I32,
}

impl DType {
    /// The floating-point types, in the order tables print them.
    pub const FLOATS: [DType; 3] = [DType::Bf16, DType::Fp16, DType::Fp32];

    /// Parses `bf16`, `fp16`, `fp32` or `i32`.
    ///
    /// # Errors
    /// Any other name, in words that say what to use.
    pub fn parse(name: &str) -> Result<DType, String> {
        match name {
            "bf16" => Ok(DType::Bf16),
            "fp16" => Ok(DType::Fp16),
            "fp32" => Ok(DType::Fp32),
            "i32" => Ok(DType::I32),
            _ if name.to_ascii_lowercase().starts_with("fp8")
                || name.to_ascii_lowercase().starts_with("f8")
                || name.to_ascii_lowercase().starts_with("float8") =>
            {
                Err(format!("dtype `{name}`: fp8 is out of scope of this contract; use bf16, fp16 or fp32"))
            }
            _ => Err(format!("unknown dtype `{name}`; use bf16, fp16 or fp32")),
        }
    }

    /// The name on the wire and in TOML.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::Fp16 => "fp16",
            DType::Fp32 => "fp32",
            DType::I32 => "i32",
        }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::Bf16 | DType::Fp16 => 2,
            DType::Fp32 | DType::I32 => 4,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        self != DType::I32
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
