use crate::ModelError;
use std::fmt;
use std::str::FromStr;

/// How the tokens of a sequence are fed through the KV cache. No schedule may move a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// All tokens at once.
    Prefill,
    /// One token at a time.
    Decode,
    /// This many tokens (at least 1) at a time; the last piece may be shorter.
    Chunk(usize),
}

impl Schedule {
    /// Tokens per step for a sequence of `len`.
    pub(crate) fn step(self, len: usize) -> usize {
        match self {
            Schedule::Prefill => len,
            Schedule::Decode => 1,
            Schedule::Chunk(n) => n,
        }
    }
}

impl FromStr for Schedule {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Schedule, ModelError> {
        let refuse =
            || ModelError::input("schedule", format!("`{text}` is not prefill, decode or chunk:N with N at least 1"));
        match text {
            "prefill" => Ok(Schedule::Prefill),
            "decode" => Ok(Schedule::Decode),
            _ => match text.strip_prefix("chunk:").map(str::parse) {
                Some(Ok(n)) if n > 0 => Ok(Schedule::Chunk(n)),
                _ => Err(refuse()),
            },
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Prefill => f.write_str("prefill"),
            Schedule::Decode => f.write_str("decode"),
            Schedule::Chunk(n) => write!(f, "chunk:{n}"),
        }
    }
}

/// Whether the sequences of a batch share each step. Neither choice may move a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Every step runs all sequences.
    Together,
    /// Each sequence runs by itself, from its first token to its last.
    Alone,
}

impl FromStr for Grouping {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Grouping, ModelError> {
        match text {
            "together" => Ok(Grouping::Together),
            "alone" => Ok(Grouping::Alone),
            _ => Err(ModelError::input("batch", format!("`{text}` is not together or alone"))),
        }
    }
}

impl fmt::Display for Grouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Grouping::Together => "together",
            Grouping::Alone => "alone",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for schedule in [Schedule::Prefill, Schedule::Decode, Schedule::Chunk(1), Schedule::Chunk(70)] {
            assert_eq!(schedule.to_string().parse::<Schedule>().unwrap(), schedule);
        }
        for grouping in [Grouping::Together, Grouping::Alone] {
            assert_eq!(grouping.to_string().parse::<Grouping>().unwrap(), grouping);
        }
    }

    #[test]
    fn other_names_are_refused_with_the_choices() {
        for text in ["", "chunk", "chunk:", "chunk:0", "chunk:-1", "chunk:1.5", "Prefill", "decode "] {
            let line = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(line.contains(&format!("`{text}`")) && line.contains("prefill, decode or chunk:N"), "{line}");
        }
        let line = "apart".parse::<Grouping>().unwrap_err().to_string();
        assert!(line.contains("`apart`") && line.contains("together or alone"), "{line}");
    }
}
