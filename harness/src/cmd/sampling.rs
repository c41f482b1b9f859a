//! The options of verbs that sample.

use samebits_models::{Sampling, SamplingRule};

/// How a token comes from logits; what is not asked for changes no bit.
#[derive(clap::Args)]
pub struct Options {
    /// Logits are divided by it; 0 takes the likeliest token [default: 1, of generate 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,

    /// Sample of the K likeliest tokens; 0 for all
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,

    /// Sample of the likeliest tokens up to the one that reaches this share of the probability
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    top_p: f64,

    /// Sample of tokens of at least this share of the probability of the likeliest
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    min_p: f64,

    /// Logits of tokens that the text has are divided by it above 0, and multiplied with it below
    #[arg(long, default_value_t = 1.0, value_name = "R", allow_negative_numbers = true)]
    repetition_penalty: f64,

    /// Taken off a logit for each time that the token was sampled
    #[arg(long, default_value_t = 0.0, value_name = "F", allow_negative_numbers = true)]
    frequency_penalty: f64,

    /// Taken off a logit where the token was sampled
    #[arg(long, default_value_t = 0.0, value_name = "F", allow_negative_numbers = true)]
    presence_penalty: f64,

    /// A text behind which a text ends; may be given again
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,

    /// Seed of the random numbers
    #[arg(long, default_value_t = 0, value_name = "S")]
    pub seed: u64,
}

impl Options {
    /// What is asked for, at `temperature` where none is said.
    pub fn sampling(&self, temperature: f64) -> Sampling {
        let rule = SamplingRule {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            ..SamplingRule::default()
        };
        Sampling { rule, seed: self.seed, stop: self.stop.clone(), ..Sampling::default() }
    }
}
