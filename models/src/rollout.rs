//! Sampling many texts at once over one paged cache, and what each token's probability was.
//!
//! A sample is a function of the model, its prompt, its number, the temperature and the seed. Who shares its batch, how
//! its prompt is cut, where its keys stand and whether its prompt came from the cache are not seen: its logits do not see
//! them, and each random number belongs to one (seed, sequence, position) and to no generator's state.

use crate::decoder::Runner;
use crate::generate::Stop;
use crate::state::States;
use crate::step::{Rows, SequenceInput};
use crate::tokenizer::Encoded;
use crate::trace::{TraceHook, all_finite};
use crate::{Config, Model, ModelError, PAGE_SIZE, PageOrder, Run};
use samebits_ops::{Cpu, Logprob, argmax, logprob, scale, softmax};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// What is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Texts per prompt.
    pub samples: usize,
    /// Most tokens of a text.
    pub max_tokens: usize,
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f64,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Whether a text goes on behind an eos token.
    pub ignore_eos: bool,
}

/// How texts are run together; nothing here may move a bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Serving {
    /// Most texts in a step, at least 1.
    pub batch: usize,
    /// Most tokens of a prompt in a step, at least 1.
    pub chunk: usize,
    /// Positions in a page of the cache.
    pub page_size: usize,
    /// Which page is taken next.
    pub page_order: PageOrder,
    /// Whether the samples of a prompt share what was computed of it.
    pub share_prompts: bool,
}

impl Default for Serving {
    fn default() -> Serving {
        Serving { batch: 16, chunk: 256, page_size: PAGE_SIZE, page_order: PageOrder::Ascending, share_prompts: true }
    }
}

/// A sampled text.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its number: prompt times samples plus sample.
    pub sequence: usize,
    /// The prompt's number.
    pub prompt: usize,
    /// Positions it may come to hold: prompt plus `max_tokens`, at most what the run has.
    pub limit: usize,
    /// Its tokens behind the prompt, an eos that ended it included.
    pub tokens: Vec<i32>,
    /// Log-probability of each token at the sampling temperature (at 1 where that is 0).
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub stop: Stop,
}

/// What a rollout took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Tokens of prompts that were computed.
    pub prompt_tokens: usize,
    /// Seconds of the steps that computed prompts, whoever else took part.
    pub prompt_seconds: f64,
    /// Tokens that were sampled in the other steps.
    pub sampled_tokens: usize,
    /// Their seconds.
    pub sampled_seconds: f64,
}

/// A text on its way.
struct Active {
    request: usize,
    sample: Sample,
    number: usize,
    /// Tokens that have not been fed.
    pending: Vec<i32>,
}

impl Model {
    /// Samples texts behind `prompts`; `done` gets each as it ends.
    ///
    /// # Errors
    /// An empty prompt, a token outside the vocabulary, a prompt that leaves no position to sample at, a temperature that
    /// is negative or not finite, logits or log-probabilities that are not finite, too little memory; what `done` refuses.
    pub fn rollout(
        &self,
        cpu: &Cpu,
        prompts: &[Vec<i32>],
        sampling: &Sampling,
        serving: &Serving,
        mut done: impl FnMut(Sample) -> Result<(), ModelError>,
    ) -> Result<Timing, ModelError> {
        let on = self.on(cpu);
        let mut queue = Queue::new(&on, serving)?;
        queue.add(self.config(), prompts, sampling, 0)?;
        while queue.requests().next().is_some() {
            queue.step(&on)?.into_iter().filter_map(|event| event.sample).try_for_each(&mut done)?;
        }
        Ok(queue.timing())
    }

    /// The tokens of a text, with what the folder's tokenizer puts around it: those of `AutoTokenizer` of transformers.
    ///
    /// # Errors
    /// No usable `tokenizer.json`; characters that it has no token for, unless it has an unknown token of its own; tokens
    /// outside the vocabulary.
    pub fn encode(&self, text: &str) -> Result<Encoded, ModelError> {
        self.tokenizer()?.encode(self.config(), text)
    }

    /// The tokens of a prompt of messages, a list of objects with `role` and `content`, by the folder's chat template.
    ///
    /// # Errors
    /// As [`Model::encode`]; no template, or one that refuses the messages.
    pub fn encode_chat(&self, messages: &serde_json::Value) -> Result<Encoded, ModelError> {
        self.tokenizer()?.chat(self.config(), messages)
    }

    /// The text of some tokens, those left out that the tokenizer says are special.
    ///
    /// # Errors
    /// No usable `tokenizer.json`; tokens outside the vocabulary.
    pub fn decode(&self, tokens: &[i32]) -> Result<String, ModelError> {
        self.tokenizer()?.decode(self.config(), tokens)
    }

    /// Log-probabilities of tokens behind their prompts, by one forward: for each `(prompt, tokens)` those of `tokens`, as
    /// [`Model::rollout`] reports them.
    ///
    /// # Errors
    /// A prompt without tokens, or nothing behind it; a temperature that [`Model::rollout`] refuses; as
    /// [`Model::forward_run`].
    pub fn score(
        &self,
        cpu: &Cpu,
        texts: &[(&[i32], &[i32])],
        temperature: f64,
        run: Run,
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        check_temperature(temperature)?;
        let vocab = self.config().vocab;
        for (i, (prompt, tokens)) in texts.iter().enumerate() {
            if prompt.is_empty() || tokens.is_empty() {
                let why = format!(
                    "text {i} has {} and {} behind them; give at least one of each",
                    prompt.len(),
                    tokens.len()
                );
                return Err(ModelError::input("tokens", why));
            }
            let len = prompt.len().saturating_add(tokens.len());
            self.config().check_length("tokens", &format!("text {i}"), len)?;
            self.config().check_tokens("tokens", tokens, tokens.len())?;
        }
        let whole: Vec<Vec<i32>> = texts.iter().map(|(prompt, tokens)| [*prompt, *tokens].concat()).collect();
        // The last token's own logits are of no use.
        let fed: Vec<&[i32]> = whole.iter().map(|tokens| &tokens[..tokens.len() - 1]).collect();
        let run = Run { allow_nonfinite: false, probe: None, ..run };
        let logits = self.forward_run(cpu, &fed, run)?;
        let mut scores = Vec::new();
        let mut row = 0;
        for ((prompt, tokens), fed) in texts.iter().zip(&fed) {
            let rows = &logits[(row + prompt.len() - 1) * vocab..(row + fed.len()) * vocab];
            scores.push(logprobs(cpu, vocab, temperature, rows, tokens)?);
            row += fed.len();
        }
        Ok(scores)
    }
}

/// What a step made of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Who asked for it: the number that [`Engine::add`](crate::Engine::add) gave.
    pub request: usize,
    /// The text's number.
    pub sequence: usize,
    /// The next token and its log-probability.
    pub next: Option<(i32, f32)>,
    /// The text, where it has ended.
    pub sample: Option<Sample>,
}

impl Event {
    fn end(request: usize, sample: Sample) -> Event {
        Event { request, sequence: sample.sequence, next: None, sample: Some(sample) }
    }
}

/// What is asked for together.
struct Request {
    prompts: Vec<Vec<i32>>,
    sampling: Sampling,
    /// The number of its first text.
    first: usize,
    /// Texts that have not ended.
    left: usize,
}

/// Texts that wait and texts on their way, over one cache. Requests come and go between any two steps.
pub(crate) struct Queue {
    serving: Serving,
    states: States,
    requests: BTreeMap<usize, Request>,
    /// Requests so far.
    added: usize,
    /// Request and prompt of each that has samples to come, and which.
    waiting: VecDeque<(usize, usize, Range<usize>)>,
    /// Sequences that hold the whole prompt of a request, and how many samples will still want it.
    stems: HashMap<(usize, usize), (usize, usize)>,
    active: Vec<Active>,
    timing: Timing,
}

impl Queue {
    /// An empty one.
    pub fn new(on: &Runner, serving: &Serving) -> Result<Queue, ModelError> {
        if serving.batch == 0 || serving.chunk == 0 || serving.page_size == 0 {
            return Err(ModelError::input("batch, chunk and page size", "must be at least 1"));
        }
        Ok(Queue {
            serving: *serving,
            states: on.states(serving.page_size, serving.page_order)?,
            requests: BTreeMap::new(),
            added: 0,
            waiting: VecDeque::new(),
            stems: HashMap::new(),
            active: Vec::new(),
            timing: Timing::default(),
        })
    }

    /// Puts the texts behind some prompts, numbered from `first` on, to those that wait; the number of the request.
    pub fn add(
        &mut self,
        c: &Config,
        prompts: &[Vec<i32>],
        sampling: &Sampling,
        first: usize,
    ) -> Result<usize, ModelError> {
        check_temperature(sampling.temperature)?;
        for (i, prompt) in prompts.iter().enumerate() {
            c.check_tokens("prompt", prompt, prompt.len())?;
            if prompt.is_empty() || sampling.max_tokens > 0 && prompt.len() >= c.longest() {
                let who = if c.longest() < c.max_positions { "run" } else { "model" };
                let why = format!("number {i} has {} tokens; the {who} takes 1 to {}", prompt.len(), c.longest() - 1);
                return Err(ModelError::input("prompt", why));
            }
            // Where the model ends a text ends; what was declared for a run is kept to.
            if c.longest() < c.max_positions {
                let who = format!("number {i} with {} more tokens", sampling.max_tokens);
                c.check_length("prompt", &who, prompt.len().saturating_add(sampling.max_tokens))?;
            }
        }
        let texts = prompts.len().checked_mul(sampling.samples);
        let Some(left) = texts.filter(|texts| first.checked_add(*texts).is_some()) else {
            return Err(ModelError::input("samples", "there are more texts than numbers for them; ask for fewer"));
        };
        let request = self.added;
        self.added += 1;
        if left > 0 {
            self.waiting.extend((0..prompts.len()).map(|prompt| (request, prompt, 0..sampling.samples)));
            let prompts = prompts.to_vec();
            self.requests.insert(request, Request { prompts, sampling: *sampling, first, left });
        }
        Ok(request)
    }

    /// Numbers of requests with texts that have not ended.
    pub fn requests(&self) -> impl Iterator<Item = usize> {
        self.requests.keys().copied()
    }

    /// What steps have taken so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Ends the texts of a request as they are: those that have begun, with their tokens so far.
    pub fn end(&mut self, request: usize) -> Vec<Sample> {
        self.waiting.retain(|(of, ..)| *of != request);
        let stems = self.stems.extract_if(|(of, _), _| *of == request);
        stems.for_each(|(_, (stem, _))| self.states.close(stem));
        let ended = self.active.extract_if(.., |text| text.request == request);
        let samples = ended.map(|text| {
            self.states.close(text.number);
            text.sample
        });
        let samples = samples.collect();
        self.requests.remove(&request);
        samples
    }

    /// Begins what waits, as long as there is room.
    fn begin(&mut self, c: &Config, events: &mut Vec<Event>) {
        while self.active.len() < self.serving.batch {
            let Some(front) = self.waiting.front_mut() else { break };
            let (request, prompt) = (front.0, front.1);
            let Some(sample) = front.2.next() else {
                self.waiting.pop_front();
                continue;
            };
            let Request { prompts, sampling, first, .. } = &self.requests[&request];
            let tokens = &prompts[prompt];
            let limit = tokens.len().saturating_add(sampling.max_tokens).min(c.longest());
            let sequence = first + prompt * sampling.samples + sample;
            let sample = Sample { sequence, prompt, limit, tokens: vec![], logprobs: vec![], stop: Stop::Ended };
            if sampling.max_tokens == 0 {
                let sample = Sample { stop: Stop::MaxTokens, ..sample };
                self.left(request);
                events.push(Event::end(request, sample));
                continue;
            }
            let (number, pending) = match self.stems.get_mut(&(request, prompt)) {
                Some((stem, wanted)) => {
                    // The last token is fed again: its logits are what the first sampled token comes from.
                    let number = self.states.fork(*stem, tokens.len() - 1, limit);
                    *wanted -= 1;
                    if *wanted == 0 {
                        self.states.close(*stem);
                        self.stems.remove(&(request, prompt));
                    }
                    (number, tokens[self.states.len(number)..].to_vec())
                }
                None => (self.states.open(limit), tokens.clone()),
            };
            self.active.push(Active { request, sample, number, pending });
        }
    }

    /// One text of a request less.
    fn left(&mut self, request: usize) {
        let of = self.requests.get_mut(&request).expect("it has texts");
        of.left -= 1;
        if of.left == 0 {
            self.requests.remove(&request);
        }
    }

    /// Begins what there is room for and feeds all texts on their way: what became of them. Behind an error no text is left.
    pub fn step(&mut self, on: &Runner) -> Result<Vec<Event>, ModelError> {
        let found = self.feed(on);
        if found.is_err() {
            self.requests().collect::<Vec<_>>().into_iter().for_each(|request| drop(self.end(request)));
        }
        found
    }

    fn feed(&mut self, on: &Runner) -> Result<Vec<Event>, ModelError> {
        let (c, cpu) = (on.config(), on.cpu);
        let mut events = Vec::new();
        self.begin(c, &mut events);
        if self.active.is_empty() {
            return Ok(events);
        }
        let started = Instant::now();
        let inputs: Vec<SequenceInput> = self
            .active
            .iter()
            .map(|text| {
                let tokens = &text.pending[..text.pending.len().min(self.serving.chunk)];
                SequenceInput { sequence: text.number, label: text.sample.sequence, tokens }
            })
            .collect();
        let logits = on.step(&inputs, &mut self.states, Rows::Last, &mut TraceHook::default())?;
        let fed: Vec<usize> = inputs.iter().map(|input| input.tokens.len()).collect();
        let texts = fed.len();
        let of_prompts = self.active.iter().zip(&fed).filter(|(text, _)| text.sample.tokens.is_empty());
        let fed_prompts: usize = of_prompts.map(|(_, fed)| fed).sum();

        let mut ended = Vec::new();
        for ((at, fed), logits) in fed.into_iter().enumerate().zip(logits.chunks_exact(c.vocab)) {
            let text = &mut self.active[at];
            text.pending.drain(..fed);
            if !text.pending.is_empty() {
                continue;
            }
            let (request, of) = (text.request, (text.request, text.sample.prompt));
            let Request { prompts, sampling, .. } = &self.requests[&request];
            let prompt = &prompts[of.1];
            let of_prompt = self.waiting.iter().filter(|(request, other, _)| (*request, *other) == of);
            let wanted: usize = of_prompt.map(|(_, _, samples)| samples.len()).sum();
            if self.serving.share_prompts
                && wanted > 0
                && !self.stems.contains_key(&of)
                && text.sample.tokens.is_empty()
            {
                self.stems.insert(of, (self.states.fork(text.number, prompt.len(), text.sample.limit), wanted));
            }
            let position = prompt.len() + text.sample.tokens.len();
            if !all_finite(logits) {
                let fed = [&prompt[..], &text.sample.tokens].concat();
                return Err(on.why_not_finite(text.sample.sequence, &fed, text.sample.limit));
            }
            let token = choose(cpu, sampling, logits, text.sample.sequence, position)?;
            let logprob = logprobs(cpu, c.vocab, sampling.temperature, logits, &[token])?[0];
            text.sample.logprobs.push(logprob);
            text.sample.tokens.push(token);
            text.pending.push(token);
            let sample = &mut text.sample;
            let is_eos = !sampling.ignore_eos && c.eos.contains(&token);
            let stop = match () {
                () if is_eos => Some(Stop::Eos),
                () if sample.tokens.len() == sampling.max_tokens => Some(Stop::MaxTokens),
                () if position + 1 >= sample.limit => Some(Stop::MaxPositions),
                () => None,
            };
            let (sequence, next) = (sample.sequence, Some((token, logprob)));
            events.push(Event { request, sequence, next, sample: None });
            if let Some(stop) = stop {
                sample.stop = stop;
                ended.push((at, events.len() - 1));
            }
        }
        for (at, event) in ended.into_iter().rev() {
            let text = self.active.remove(at);
            self.states.close(text.number);
            self.left(text.request);
            events[event].sample = Some(text.sample);
        }
        let seconds = started.elapsed().as_secs_f64();
        match fed_prompts {
            0 => {
                self.timing.sampled_tokens += texts;
                self.timing.sampled_seconds += seconds;
            }
            tokens => {
                self.timing.prompt_tokens += tokens;
                self.timing.prompt_seconds += seconds;
            }
        }
        Ok(events)
    }
}

/// Refuses a temperature that logits cannot be divided by.
pub(crate) fn check_temperature(t: f64) -> Result<(), ModelError> {
    let inverse = (1.0 / t) as f32;
    if t == 0.0 || t > 0.0 && t.is_finite() && inverse > 0.0 && inverse.is_finite() {
        return Ok(());
    }
    let why = format!("is {t}; it must be 0 or a number above 0 whose inverse is within f32");
    Err(ModelError::input("temperature", why))
}

/// What logits are divided by for log-probabilities: at a temperature of 0, where the likeliest token is taken, they are those
/// at 1.
pub(crate) fn divisor(temperature: f64) -> f64 {
    if temperature == 0.0 { 1.0 } else { temperature }
}

/// `logits[rows,V]`, one token for each row.
fn logprobs(cpu: &Cpu, vocab: usize, temperature: f64, logits: &[f32], tokens: &[i32]) -> Result<Vec<f32>, ModelError> {
    let temperature = divisor(temperature);
    let (mut scores, mut lse) = (vec![0f32; tokens.len()], vec![0f32; tokens.len()]);
    let shape = Logprob { rows: tokens.len(), vocab, temperature };
    logprob(cpu, &shape, logits, tokens, &mut scores, &mut lse)?;
    if !all_finite(&scores) {
        let largest = logits.iter().fold(0f32, |most, x| most.max(x.abs()));
        let why = format!(
            "is {temperature}; logits as large as {largest:e} over it are beyond f32: raise it, or look at the weights"
        );
        return Err(ModelError::input("temperature", why));
    }
    Ok(scores)
}

/// The next token: the first one at which the sum of the weights so far exceeds the random share of their total. Weights
/// are `softmax` of the scaled logits, sums f64, ascending.
fn choose(cpu: &Cpu, sampling: &Sampling, logits: &[f32], sequence: usize, position: usize) -> Result<i32, ModelError> {
    let mut best = [0];
    argmax(cpu, 1, logits.len(), logits, &mut best)?;
    if sampling.temperature == 0.0 {
        return Ok(best[0]);
    }
    let (mut scaled, mut weights) = (vec![0f32; logits.len()], vec![0f32; logits.len()]);
    scale(cpu, 1.0 / sampling.temperature, logits, &mut scaled)?;
    softmax(cpu, 1, logits.len(), &scaled, &mut weights)?;
    let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    let bound = random(sampling.seed, sequence as u64, position as u64) * total;
    let mut sum = 0.0;
    for (token, &weight) in weights.iter().enumerate() {
        sum += f64::from(weight);
        if sum > bound {
            return Ok(token as i32);
        }
    }
    Ok(best[0])
}

/// The random number of a position: in [0, 1), of 53 bits, a hash of its three arguments.
fn random(seed: u64, sequence: u64, position: u64) -> f64 {
    // SplitMix64's step and finish.
    let mix = |state: u64| {
        let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let bits = mix(mix(mix(seed).wrapping_add(sequence)).wrapping_add(position));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_even_and_differ_by_every_argument() {
        let mut buckets = [0; 16];
        for sequence in 0..40 {
            for position in 0..400 {
                buckets[(random(7, sequence, position) * 16.0) as usize] += 1;
            }
        }
        assert!(buckets.iter().all(|&count| (850..1150).contains(&count)), "{buckets:?}");
        let one = random(1, 2, 3);
        assert!([random(2, 2, 3), random(1, 3, 3), random(1, 2, 4), random(1, 3, 2)].iter().all(|&other| other != one));
        // Computed by another program from the page.
        assert_eq!(random(1, 2, 3), 0.4175580595044027);
    }
}
