//! Experts of tokens as records have them: integers of one width, little endian, as base64.

use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use samebits_models::{Config, Experts};
use serde::{Deserialize, Serialize};

/// How the first line of a rollout says that its texts hold them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Form {
    /// `int8`, `int16` or `int32`.
    dtype: String,
    layers: usize,
    chosen: usize,
}

/// The digits of base64, by their value.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

impl Form {
    /// The narrowest for the texts of a model; `None` where it has no mixture.
    pub fn of(config: &Config) -> Option<Form> {
        let mixtures = config.mixtures();
        let most = mixtures.iter().map(|mixture| mixture.count).max()?;
        let dtype = match most {
            ..=128 => "int8",
            129..=32768 => "int16",
            _ => "int32",
        };
        let chosen = mixtures.iter().map(|mixture| mixture.chosen).max()?;
        Some(Form { dtype: dtype.into(), layers: mixtures.len(), chosen })
    }

    /// Bytes of an integer.
    fn size(&self) -> Result<usize> {
        Ok(match &self.dtype[..] {
            "int8" => 1,
            "int16" => 2,
            "int32" => 4,
            other => bail!("`routed_experts`: dtype `{other}` is not int8, int16 or int32"),
        })
    }

    /// Experts as a text of a rollout has them.
    ///
    /// # Errors
    /// A dtype that is none.
    pub fn encode(&self, experts: &Experts) -> Result<String> {
        let size = self.size()?;
        let bytes: Vec<u8> =
            experts.each.iter().flat_map(|expert| expert.to_le_bytes().into_iter().take(size)).collect();
        let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
        for three in bytes.chunks(3) {
            let bits = three.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            let digit = |i: usize| char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]);
            text.extend((0..=three.len()).map(digit));
            text.extend((three.len()..3).map(|_| '='));
        }
        Ok(text)
    }

    /// The experts of a text of `len` tokens.
    ///
    /// # Errors
    /// No base64; another number of integers than some tokens have.
    pub fn decode(&self, text: &str) -> Result<Experts> {
        let &Form { layers, chosen, .. } = self;
        let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
        let digits = text.trim_end_matches('=').as_bytes();
        ensure!(text.len().is_multiple_of(4) && text.len() - digits.len() < 3, "`routed_experts` is no base64");
        for four in digits.chunks(4) {
            let mut bits = 0;
            for digit in four {
                let value = DIGITS.iter().position(|other| other == digit).context("`routed_experts` is no base64")?;
                bits = bits << 6 | value as u32;
            }
            bits <<= 6 * (4 - four.len());
            bytes.extend((1..four.len()).map(|i| (bits >> (24 - 8 * i)) as u8));
        }
        let (size, row) = (self.size()?, layers.saturating_mul(chosen));
        let whole = row > 0 && bytes.len().is_multiple_of(row.saturating_mul(size));
        ensure!(whole, "`routed_experts` has {} bytes; a token has {layers} x {chosen} {}", bytes.len(), self.dtype);
        let each = bytes.chunks_exact(size).map(|bytes| integer(bytes, true)).collect();
        Ok(Experts { layers, chosen, each })
    }
}

/// An integer of 1, 2 or 4 bytes.
fn integer(bytes: &[u8], is_signed: bool) -> i32 {
    let bits = bytes.iter().rev().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
    let above = 32 - 8 * bytes.len() as u32;
    if is_signed { (bits << above) as i32 >> above } else { bits as i32 }
}

/// `routed_experts` `[B,T,layers,chosen]` of a file, where it has them: of each sequence those of the tokens in `places`.
///
/// # Errors
/// A tensor of another form.
pub fn of_file(file: &SafeTensors, [batch, len]: [usize; 2], places: &[Vec<usize>]) -> Result<Option<Vec<Experts>>> {
    let Ok(tensor) = file.tensor("routed_experts") else { return Ok(None) };
    let &[b, t, layers, chosen] = tensor.shape() else {
        bail!("tensor `routed_experts`: shape {:?} must have the form [B, T, layers, chosen]", tensor.shape());
    };
    ensure!([b, t] == [batch, len], "tensor `routed_experts`: is of [{b}, {t}] tokens; the file has [{batch}, {len}]");
    let (size, is_signed) = match tensor.dtype() {
        Dtype::U8 => (1, false),
        Dtype::I8 => (1, true),
        Dtype::U16 => (2, false),
        Dtype::I16 => (2, true),
        Dtype::I32 => (4, true),
        other => bail!("tensor `routed_experts`: dtype is {other:?}; it must be U8, I8, U16, I16 or I32"),
    };
    let row = layers * chosen * size;
    let of_place = |place: &usize| tensor.data()[place * row..(place + 1) * row].chunks_exact(size);
    let of_sequence = |places: &Vec<usize>| {
        let each = places.iter().flat_map(of_place).map(|bytes| integer(bytes, is_signed)).collect();
        Experts { layers, chosen, each }
    };
    Ok(Some(places.iter().map(of_sequence).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What base64 of Python's standard library makes of the same bytes, and back.
    #[test]
    fn experts_are_written_as_others_read_them() {
        let form = |dtype: &str, chosen| Form { dtype: dtype.into(), layers: 1, chosen };
        for (dtype, chosen, each, text) in [
            ("int8", 1, vec![0, 127, -1, 5], "AH//BQ=="),
            ("int16", 3, vec![300, -1, 2], "LAH//wIA"),
            ("int32", 1, vec![7, -1], "BwAAAP////8="),
        ] {
            let experts = Experts { layers: 1, chosen, each };
            assert_eq!(form(dtype, chosen).encode(&experts).unwrap(), text);
            assert_eq!(form(dtype, chosen).decode(text).unwrap(), experts);
        }
        for (wrong, why) in [("AH//", "3 bytes"), ("AH/", "base64"), ("A===", "base64"), ("A-==", "base64")] {
            let line = form("int16", 1).decode(wrong).unwrap_err().to_string();
            assert!(line.contains(why), "{line}");
        }
        assert!(form("float", 1).decode("").unwrap_err().to_string().contains("`float` is not int8"));
        assert_eq!([integer(&[255], false), integer(&[255], true), integer(&[0, 128], true)], [255, -1, -32768]);
    }
}
