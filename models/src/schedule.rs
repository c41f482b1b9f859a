use crate::{AdapterChoice, ModelError, PageOrder, Probe, Routing};
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
    /// Every sequence joins one step after the one before it, with the first half of its tokens at once and the others one
    /// at a time: some prefill while others decode.
    Mixed,
    /// This many tokens (at least 1) at a time, some of them wrongly guessed: those and what follows them are forgotten and
    /// fed again.
    Speculative(usize),
    /// The first so many tokens (at least 1) come from the cache of another sequence that began with them; the others at
    /// once.
    Prefix(usize),
}

/// A name, and the schedule of its number.
type Counted = (&'static str, fn(usize) -> Schedule);

/// The schedules with a number.
const COUNTED: [Counted; 3] =
    [("chunk:", Schedule::Chunk), ("speculative:", Schedule::Speculative), ("prefix:", Schedule::Prefix)];

impl FromStr for Schedule {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Schedule, ModelError> {
        match text {
            "prefill" => return Ok(Schedule::Prefill),
            "decode" => return Ok(Schedule::Decode),
            "mixed" => return Ok(Schedule::Mixed),
            _ => {}
        }
        for (name, make) in COUNTED {
            if let Some(n) = text.strip_prefix(name).and_then(|n| n.parse().ok()).filter(|&n| n > 0) {
                return Ok(make(n));
            }
        }
        let why =
            format!("`{text}` is not prefill, decode, mixed, chunk:N, speculative:N or prefix:N with N at least 1");
        Err(ModelError::input("schedule", why))
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Prefill => f.write_str("prefill"),
            Schedule::Decode => f.write_str("decode"),
            Schedule::Mixed => f.write_str("mixed"),
            Schedule::Chunk(n) => write!(f, "chunk:{n}"),
            Schedule::Speculative(n) => write!(f, "speculative:{n}"),
            Schedule::Prefix(n) => write!(f, "prefix:{n}"),
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

/// How sequences are run; but for their adapters, experts that are replayed and what a probe changes, nothing here may move a bit.
pub struct Run<'a> {
    /// How tokens are fed.
    pub schedule: Schedule,
    /// Who shares a step.
    pub grouping: Grouping,
    /// Positions in a page of the KV cache.
    pub page_size: usize,
    /// Which page is taken next.
    pub page_order: PageOrder,
    /// Whether logits may be NaN or infinite; else they are an error that says where that began.
    pub allow_nonfinite: bool,
    /// The adapter of each sequence; one is for all, and none is [`AdapterChoice::Only`].
    pub adapters: &'a [AdapterChoice],
    /// The experts that were recorded of each sequence, and room for those that routers choose.
    pub experts: Option<&'a mut Routing>,
    /// Who is shown what is computed on the way, and may change it.
    pub probe: Option<&'a mut dyn Probe>,
}

/// Positions in a page where nothing else is asked for.
pub const PAGE_SIZE: usize = 64;

impl Default for Run<'_> {
    fn default() -> Self {
        Run {
            schedule: Schedule::Prefill,
            grouping: Grouping::Together,
            page_size: PAGE_SIZE,
            page_order: PageOrder::Ascending,
            allow_nonfinite: false,
            adapters: &[],
            experts: None,
            probe: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for schedule in [
            Schedule::Prefill,
            Schedule::Decode,
            Schedule::Mixed,
            Schedule::Chunk(1),
            Schedule::Chunk(70),
            Schedule::Speculative(4),
            Schedule::Prefix(9),
        ] {
            assert_eq!(schedule.to_string().parse::<Schedule>().unwrap(), schedule);
        }
        for grouping in [Grouping::Together, Grouping::Alone] {
            assert_eq!(grouping.to_string().parse::<Grouping>().unwrap(), grouping);
        }
    }

    #[test]
    fn other_names_are_refused_with_the_choices() {
        for text in ["", "chunk", "chunk:", "chunk:0", "chunk:-1", "chunk:1.5", "Prefill", "decode ", "prefix:0"] {
            let line = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(line.contains(&format!("`{text}`")) && line.contains("prefill, decode, mixed, chunk:N"), "{line}");
        }
        let line = "apart".parse::<Grouping>().unwrap_err().to_string();
        assert!(line.contains("`apart`") && line.contains("together or alone"), "{line}");
    }
}
