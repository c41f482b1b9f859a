//! Sampling many texts at once over one paged cache, and what each token's probability was.
//!
//! A sample is a function of the model, its prompt, its number, how it is sampled and the seed. Who shares its batch, how
//! its prompt is cut, where its keys stand and whether its prompt came from the cache are not seen: its logits do not see
//! them, and each random number belongs to one (seed, sequence, position) and to no generator's state.

use crate::decoder::Runner;
use crate::experts::StepExperts;
use crate::generate::Stop;
use crate::sampling::{Checked, Places, random};
use crate::state::States;
use crate::step::{Rows, SequenceInput};
use crate::tokenizer::Encoded;
use crate::trace::{TraceHook, all_finite};
use crate::{Config, Experts, Model, ModelError, PAGE_SIZE, PageOrder, Run, Sampling, SamplingRule};
use samebits_ops::Cpu;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

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
    /// Its tokens behind the prompt, what ended it included.
    pub tokens: Vec<i32>,
    /// Log-probability of each token in the distribution that it was sampled from (at a temperature of 0, that of temperature 1).
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub stop: Stop,
    /// Where they are recorded, the experts of all its tokens but the last, which nothing was computed of.
    pub experts: Option<Experts>,
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

/// Rows of logits that are scored together.
const ROWS: usize = 32;

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
    /// An empty prompt, a token outside the vocabulary, a prompt that leaves no position to sample at, settings out of their
    /// range, all of them together, logits or log-probabilities that are not finite, too little memory; what `done` refuses.
    pub fn rollout(
        &self,
        cpu: &Cpu,
        prompts: &[Vec<i32>],
        sampling: &Sampling,
        serving: &Serving,
        done: impl FnMut(Sample) -> Result<(), ModelError>,
    ) -> Result<Timing, ModelError> {
        let adapters = |i: usize| match &sampling.adapters[..] {
            each if each.len() > 1 && each.len() == prompts.len() => vec![each[i].clone()],
            all => all.to_vec(),
        };
        let of = |i: usize| Sampling { adapters: adapters(i), ..sampling.clone() };
        let each: Vec<_> = prompts.iter().enumerate().map(|(i, prompt)| (prompt.clone(), of(i))).collect();
        self.rollout_each(cpu, &each, serving, done)
    }

    /// [`Model::rollout`] of prompts that are sampled each in its own way; texts are numbered through.
    ///
    /// # Errors
    /// As [`Model::rollout`].
    pub fn rollout_each(
        &self,
        cpu: &Cpu,
        prompts: &[(Vec<i32>, Sampling)],
        serving: &Serving,
        mut done: impl FnMut(Sample) -> Result<(), ModelError>,
    ) -> Result<Timing, ModelError> {
        let mut queue = Queue::new(&self.on(cpu), serving)?;
        let (mut first, mut complaints) = (0usize, Vec::new());
        for (i, (prompt, sampling)) in prompts.iter().enumerate() {
            let added = queue.add_from(self, std::slice::from_ref(prompt), sampling, first, i);
            // What is wrong with the settings of all is said once.
            if let Err(error) = added
                && !complaints.iter().any(|other: &ModelError| other.to_string() == error.to_string())
            {
                complaints.push(error);
            }
            first = first.saturating_add(sampling.samples);
        }
        ModelError::all(complaints)?;
        while queue.requests().next().is_some() {
            queue.step(self, cpu)?.into_iter().filter_map(|event| event.sample).try_for_each(&mut done)?;
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

    /// Log-probabilities of tokens behind their prompts, by one forward: for each text those of its tokens, as
    /// [`Model::rollout`] reports them of texts that are sampled by the rule; -inf for a token that it could not sample.
    ///
    /// # Errors
    /// A prompt without tokens, or nothing behind it; a rule that [`Model::rollout`] refuses; lists of tokens that a record
    /// cannot hold; as [`Model::forward_run`].
    pub fn score(&self, cpu: &Cpu, texts: &[ToScore], run: Run) -> Result<Vec<Vec<f32>>, ModelError> {
        let vocab = self.config().vocab;
        let rules: Result<Vec<Checked>, _> =
            texts.iter().map(|(_, _, rule, _)| Checked::new(rule, self.config())).collect();
        let rules = rules?;
        for (i, (_, tokens, _, kept)) in texts.iter().enumerate() {
            kept.map_or(Ok(()), |kept| self.config().check_sampling_mask(&format!("text {i}"), kept, tokens))?;
        }
        for (i, (prompt, tokens, ..)) in texts.iter().enumerate() {
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
        let whole: Vec<Vec<i32>> = texts.iter().map(|(prompt, tokens, ..)| [*prompt, *tokens].concat()).collect();
        // The last token's own logits are of no use.
        let fed: Vec<&[i32]> = whole.iter().map(|tokens| &tokens[..tokens.len() - 1]).collect();
        let run = Run { allow_nonfinite: false, probe: None, ..run };
        let logits = self.forward_run(cpu, &fed, run)?;
        let mut scores = Vec::new();
        let mut row = 0;
        for (((prompt, tokens, _, kept), rule), fed) in texts.iter().zip(&rules).zip(&fed) {
            let mut of_text = Vec::with_capacity(tokens.len());
            let first = row + prompt.len() - 1;
            for from in (0..tokens.len()).step_by(ROWS) {
                let some = &tokens[from..tokens.len().min(from + ROWS)];
                let logits = &logits[(first + from) * vocab..][..some.len() * vocab];
                let mut places = Places::default();
                places.push(rule, prompt, (&tokens[..from + some.len() - 1], *kept), from);
                let y = places.truncated(cpu, vocab, logits)?;
                of_text.extend(places.logprobs(cpu, logits, &y, some)?);
            }
            scores.push(of_text);
            row += fed.len();
        }
        Ok(scores)
    }
}

/// A text to score: its prompt, the tokens behind it, how they were sampled, and what each was drawn from, where a record says
/// so ([`Ruled::kept`](crate::Ruled::kept)).
pub type ToScore<'a> = (&'a [i32], &'a [i32], &'a SamplingRule, Option<&'a [Vec<i32>]>);

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
    /// The number of the adapter of each, where it has one.
    adapters: Vec<Option<usize>>,
    /// The number of the first of them.
    number: usize,
    sampling: Sampling,
    rule: Checked,
    /// The number of its first text.
    first: usize,
    /// Texts that have not ended.
    left: usize,
}

impl Request {
    /// The adapter of a text's prompt.
    fn adapter(&self, text: &Sample) -> Option<usize> {
        self.adapters[text.prompt - self.number]
    }
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
    stems: HashMap<(usize, usize), Stem>,
    active: Vec<Active>,
    timing: Timing,
}

/// What was computed of a prompt.
struct Stem {
    number: usize,
    /// Samples that will still want it.
    wanted: usize,
    /// Its experts, where they are recorded.
    experts: Option<Experts>,
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
        model: &Model,
        prompts: &[Vec<i32>],
        sampling: &Sampling,
        first: usize,
    ) -> Result<usize, ModelError> {
        self.add_from(model, prompts, sampling, first, 0)
    }

    /// The same with the first prompt as number `number`.
    fn add_from(
        &mut self,
        model: &Model,
        prompts: &[Vec<i32>],
        sampling: &Sampling,
        first: usize,
        number: usize,
    ) -> Result<usize, ModelError> {
        let c = model.config();
        let rule = sampling.checked(c)?;
        let adapters = model.decoder.adapters.find_all(&sampling.adapters, prompts.len())?;
        if !sampling.stop.is_empty() {
            model.tokenizer()?;
        }
        for (i, prompt) in prompts.iter().enumerate().map(|(i, prompt)| (number + i, prompt)) {
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
            let sampling = sampling.clone();
            self.requests.insert(request, Request { prompts, adapters, number, sampling, rule, first, left });
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
        stems.for_each(|(_, stem)| self.states.close(stem.number));
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
            let Request { prompts, number, sampling, first, .. } = &self.requests[&request];
            let tokens = &prompts[prompt];
            let limit = tokens.len().saturating_add(sampling.max_tokens).min(c.longest());
            let sequence = first + prompt * sampling.samples + sample;
            let sample = Sample {
                sequence,
                prompt: number + prompt,
                limit,
                tokens: vec![],
                logprobs: vec![],
                stop: Stop::Ended,
                experts: sampling.experts.then(|| StepExperts::new(c, [].into_iter()).own(0..0)),
            };
            if sampling.max_tokens == 0 {
                let sample = Sample { stop: Stop::MaxTokens, ..sample };
                self.left(request);
                events.push(Event::end(request, sample));
                continue;
            }
            let mut sample = sample;
            let (number, pending) = match self.stems.get_mut(&(request, prompt)) {
                Some(stem) => {
                    // The last token is fed again: its logits are what the first sampled token comes from.
                    let number = self.states.fork(stem.number, tokens.len() - 1, limit);
                    let held = self.states.len(number);
                    sample.experts = stem.experts.as_ref().map(|experts| experts.first(held));
                    stem.wanted -= 1;
                    if stem.wanted == 0 {
                        self.states.close(stem.number);
                        self.stems.remove(&(request, prompt));
                    }
                    (number, tokens[held..].to_vec())
                }
                None => (self.states.open(limit), tokens.clone()),
            };
            self.active.push(Active { request, sample, number, pending });
        }
        // Rows with the same adapter are one product where they stand together.
        let requests = &self.requests;
        self.active.sort_by_key(|text| requests[&text.request].adapter(&text.sample));
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
    pub fn step(&mut self, model: &Model, cpu: &Cpu) -> Result<Vec<Event>, ModelError> {
        let found = self.feed(model, cpu);
        if found.is_err() {
            self.requests().collect::<Vec<_>>().into_iter().for_each(|request| drop(self.end(request)));
        }
        found
    }

    fn feed(&mut self, model: &Model, cpu: &Cpu) -> Result<Vec<Event>, ModelError> {
        let (on, c) = (&model.on(cpu), model.config());
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
                let adapter = self.requests[&text.request].adapter(&text.sample);
                SequenceInput { sequence: text.number, label: text.sample.sequence, tokens, adapter }
            })
            .collect();
        let fed: Vec<usize> = inputs.iter().map(|input| input.tokens.len()).collect();
        let records = self.active.iter().any(|text| text.sample.experts.is_some());
        let mut experts = records.then(|| StepExperts::new(c, fed.iter().map(|fed| (0..*fed, None))));
        let mut hook = TraceHook { experts: experts.as_mut(), ..TraceHook::default() };
        let logits = on.step(&inputs, &mut self.states, Rows::Last, &mut hook)?;
        if let Some(experts) = experts {
            let mut from = 0;
            for (text, fed) in self.active.iter_mut().zip(&fed) {
                let of_text = experts.own(from..from + fed);
                text.sample.experts.iter_mut().for_each(|experts| experts.each.extend(&of_text.each));
                from += fed;
            }
        }
        let texts = fed.len();
        let of_prompts = self.active.iter().zip(&fed).filter(|(text, _)| text.sample.tokens.is_empty());
        let fed_prompts: usize = of_prompts.map(|(_, fed)| fed).sum();
        for (at, fed) in fed.into_iter().enumerate() {
            self.active[at].pending.drain(..fed);
            self.keep_stem(at);
        }
        let next = self.sample(on, &logits)?;
        let mut ended = Vec::new();
        for (at, token, logprob) in next {
            let text = &mut self.active[at];
            text.pending.push(token);
            let (sample, Request { prompts, number, sampling, .. }) = (&mut text.sample, &self.requests[&text.request]);
            sample.logprobs.push(logprob);
            sample.tokens.push(token);
            let position = prompts[sample.prompt - number].len() + sample.tokens.len();
            let stop = match () {
                () if !sampling.ignore_eos && c.eos.contains(&token) => Some(Stop::Eos),
                () if sampling.stop_token_ids.contains(&token) => Some(Stop::StopToken),
                () if sampling.ends(model, &sample.tokens)? => Some(Stop::StopText),
                () if sample.tokens.len() == sampling.max_tokens => Some(Stop::MaxTokens),
                () if position >= sample.limit => Some(Stop::MaxPositions),
                () => None,
            };
            let (sequence, next) = (sample.sequence, Some((token, logprob)));
            events.push(Event { request: text.request, sequence, next, sample: None });
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

    /// Keeps what a text has of its prompt for those that still want it.
    fn keep_stem(&mut self, at: usize) {
        let text = &self.active[at];
        if !self.serving.share_prompts || !text.pending.is_empty() || !text.sample.tokens.is_empty() {
            return;
        }
        let Request { prompts, number, .. } = &self.requests[&text.request];
        let of = (text.request, text.sample.prompt - number);
        let of_prompt = self.waiting.iter().filter(|(request, prompt, _)| (*request, *prompt) == of);
        let wanted: usize = of_prompt.map(|(_, _, samples)| samples.len()).sum();
        if wanted > 0 && !self.stems.contains_key(&of) {
            let number = self.states.fork(text.number, prompts[of.1].len(), text.sample.limit);
            self.stems.insert(of, Stem { number, wanted, experts: text.sample.experts.clone() });
        }
    }

    /// The next token of each text that has been fed whole, and its log-probability.
    fn sample(&self, on: &Runner, logits: &[f32]) -> Result<Vec<(usize, i32, f32)>, ModelError> {
        let vocab = on.config().vocab;
        let (mut ready, mut of_ready, mut places, mut bits) = (vec![], vec![], Places::default(), vec![]);
        for ((at, text), logits) in self.active.iter().enumerate().zip(logits.chunks_exact(vocab)) {
            if !text.pending.is_empty() {
                continue;
            }
            let Request { prompts, number, sampling, rule, .. } = &self.requests[&text.request];
            let (prompt, sample) = (&prompts[text.sample.prompt - number], &text.sample);
            if !all_finite(logits) {
                let fed = [&prompt[..], &sample.tokens].concat();
                let label = (sample.sequence, self.requests[&text.request].adapter(sample));
                return Err(on.why_not_finite(label, &fed, sample.limit));
            }
            let position = prompt.len() + sample.tokens.len();
            bits.push(random(sampling.seed, sample.sequence as u64, position as u64));
            places.push(rule, prompt, (&sample.tokens, None), sample.tokens.len());
            of_ready.extend_from_slice(logits);
            ready.push(at);
        }
        let y = places.truncated(on.cpu, vocab, &of_ready)?;
        let tokens = places.sample(on.cpu, &y, &bits)?;
        let logprobs = places.logprobs(on.cpu, &of_ready, &y, &tokens)?;
        Ok(ready.into_iter().zip(tokens).zip(logprobs).map(|((at, token), logprob)| (at, token, logprob)).collect())
    }
}
