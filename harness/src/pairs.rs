//! Times workloads on several programs in turn, and holds the times to what the table asks.

use crate::ceilings::{Ceiling, Ceilings};
use crate::clock::spread;
use crate::side::Side;
use crate::timing::{self, Time, Timed};
use crate::workload::Workload;
use samebits_contract::case::{Case, Config};
use samebits_contract::tensor::Tensor;
use samebits_ops::Isa;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The programs and how often each is asked.
pub struct Comparison {
    /// The built-in ops.
    pub ours: Side,
    /// The others, each asked beside ours: after it in the first pair, before it in the second, and so on.
    pub peers: Vec<Side>,
    /// How often ours and every peer is asked for one row.
    pub pairs: usize,
    /// Timed runs of one answer, at least.
    pub repeat: usize,
    /// How long one answer may take.
    pub patience: Duration,
    /// The machine's limits, measured beside the pairs that are shown as a share of them.
    pub limits: Limits,
}

/// The limits of the machine, with every sample that was taken.
pub struct Limits {
    ceilings: Ceilings,
    /// Limit, dtype for [`Ceiling::Peak`], threads; bytes or operations per second.
    samples: BTreeMap<(Ceiling, &'static str, usize), Vec<f64>>,
}

/// One limit of the machine on some threads.
#[derive(Serialize)]
pub struct Limit {
    /// Which.
    pub limit: Ceiling,
    /// For `peak`, the dtype multiplied; empty for the others.
    pub dtype: &'static str,
    /// Threads.
    pub threads: usize,
    /// Bytes or operations per second: median, least and most of the samples.
    pub per_second: [f64; 3],
    /// How many there are.
    pub samples: usize,
}

/// One workload on some threads.
#[derive(Serialize)]
pub struct Row {
    /// What was timed and what was asked.
    pub workload: Workload,
    /// Threads.
    pub threads: usize,
    /// Bytes that must move at least once.
    pub bytes: f64,
    /// Multiplications and additions.
    pub operations: f64,
    /// Our times; none where `problem` says why.
    pub ours: Option<Times>,
    /// By name, the times of the peers that offer the op.
    pub peers: BTreeMap<String, Beside>,
    /// The share of the workload's limit, of its highest sample beside this row, that ours reaches: median, least and
    /// most over the pairs.
    pub share: Option<[f64; 3]>,
    /// What was asked of this row, and whether it is so.
    pub targets: Vec<Target>,
    /// By name, the programs that do not offer it, and why.
    pub unsupported: BTreeMap<String, String>,
    /// What broke this row.
    pub error: Option<Failure>,
}

/// A program did not answer as it should.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The program.
    pub side: String,
    /// What it did.
    pub reason: String,
}

/// The times of one program.
#[derive(Serialize)]
pub struct Times {
    /// What ran.
    pub kernel: String,
    /// What stood ready before the clock started.
    pub prepared: String,
    /// Per pair, how many runs were timed.
    pub runs: Vec<usize>,
    /// Per pair, the median of its timed runs.
    pub seconds: Vec<f64>,
    /// Their median.
    pub median: f64,
    /// The largest growth of its resident memory while it ran; `None` where it does not say.
    pub peak_bytes: Option<u64>,
}

/// A peer beside ours.
#[derive(Serialize)]
pub struct Beside {
    /// Its times.
    #[serde(flatten)]
    pub times: Times,
    /// Its seconds over ours, pair by pair: median, least and most.
    pub ratio: [f64; 3],
    /// Our peak memory over its own.
    pub memory: Option<f64>,
    /// How far its outputs lie from ours, as a share of the length of ours.
    pub difference: f64,
}

/// One thing that is asked of a row.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// For example `1.20x torch`.
    pub wanted: String,
    /// What was reached, in the same unit; `None` where it could not be measured.
    pub got: Option<f64>,
    /// Whether that is enough.
    pub met: bool,
}

impl Comparison {
    /// Asks every program a trifle; what it says of its version, by name.
    ///
    /// # Errors
    /// The first program that does not answer, and what it did instead.
    pub fn greet(&mut self) -> Result<BTreeMap<String, String>, Failure> {
        let one = || Tensor::fp32(&[1], vec![1.0]);
        let mut case = Case {
            name: "greeting".into(),
            op: "add".into(),
            out: samebits_contract::tensor::DType::Fp32,
            params: BTreeMap::new(),
            inputs: BTreeMap::from([("a".into(), one()), ("b".into(), one())]),
            config: Default::default(),
        };
        let sides = [&mut self.ours].into_iter().chain(&mut self.peers);
        let greet = |side: &mut Side| {
            let version = match ask(side, &mut case, 1, self.patience)? {
                Timed::Ok(time) => time.version,
                Timed::Unsupported(_) => String::new(),
            };
            Ok((side.name.clone(), version))
        };
        sides.map(greet).collect()
    }

    /// Times `workload` in turn on every program; `tick` is called after every pair. `agree` is how far a peer's
    /// outputs may lie from ours.
    pub fn row(&mut self, workload: &Workload, threads: usize, agree: f64, mut tick: impl FnMut()) -> Row {
        let plan = workload.plan().expect("checked when the table was read");
        let mut row = Row {
            workload: workload.clone(),
            threads,
            bytes: plan.bytes,
            operations: plan.operations,
            ours: None,
            peers: BTreeMap::new(),
            share: None,
            targets: Vec::new(),
            unsupported: BTreeMap::new(),
            error: None,
        };
        let config = Config { threads: Some(threads), ..Config::default() };
        let mut case = plan.case(&workload.name, config);
        match self.pairs(workload, threads, agree, &mut case, &mut row.unsupported, &mut tick) {
            Ok(Some(pairs)) => pairs.fill(&mut row),
            Ok(None) => {}
            Err(failure) => row.error = Some(failure),
        }
        let names = self.peers.iter().map(|peer| peer.name.as_str());
        row.targets = targets(&row, &names.collect::<Vec<_>>());
        row
    }

    /// The pairs of one row; none where we do not offer the op.
    fn pairs(
        &mut self,
        workload: &Workload,
        threads: usize,
        agree: f64,
        case: &mut Case,
        unsupported: &mut BTreeMap<String, String>,
        tick: &mut impl FnMut(),
    ) -> Result<Option<Pairs>, Failure> {
        let mut pairs = Pairs::default();
        let least = self.repeat;
        for pair in 0..self.pairs {
            let limit = workload.share_of.and_then(|of| self.limits.sample(of, workload, threads));
            let mut ours = None;
            let mut order: Vec<Option<usize>> = [None].into_iter().chain((0..self.peers.len()).map(Some)).collect();
            // Who is asked last finds other caches and another clock than who is asked first: they take turns.
            if pair % 2 == 1 {
                order.reverse();
            }
            for peer in order {
                let Some(peer) = peer.map(|at| &mut self.peers[at]) else {
                    let runs = enough(least, pairs.ours.last());
                    match ask(&mut self.ours, case, runs, self.patience)? {
                        Timed::Ok(time) => ours = Some(time),
                        Timed::Unsupported(reason) => {
                            unsupported.insert(self.ours.name.clone(), reason);
                            return Ok(None);
                        }
                    }
                    continue;
                };
                if unsupported.contains_key(&peer.name) {
                    continue;
                }
                let before = pairs.peers.get(&peer.name).and_then(|(_, times)| times.last());
                let runs = enough(least, before);
                match ask(peer, case, runs, self.patience)? {
                    Timed::Unsupported(reason) => _ = unsupported.insert(peer.name.clone(), reason),
                    Timed::Ok(theirs) => {
                        let failed = |reason| Failure { side: peer.name.clone(), reason };
                        let (far, times) = pairs.peers.entry(peer.name.clone()).or_default();
                        // In the first pair ours were first.
                        if let (true, Some(ours)) = (times.is_empty(), &ours) {
                            *far = difference(&ours.outputs, &theirs.outputs).map_err(failed)?;
                            // Not a number is not close either.
                            if far.is_nan() || *far > agree {
                                let what = format!("its outputs lie {far:.2} of their length from ours");
                                return Err(failed(format!("{what}, more than {agree}: not the same work")));
                            }
                        }
                        times.push(without_outputs(theirs));
                    }
                }
            }
            pairs.ours.extend(ours.map(without_outputs));
            pairs.limits.extend(limit);
            tick();
        }
        Ok(Some(pairs))
    }
}

fn without_outputs(time: Time) -> Time {
    Time { outputs: BTreeMap::new(), ..time }
}

/// What came of the pairs of one row.
#[derive(Default)]
struct Pairs {
    ours: Vec<Time>,
    /// By name, how far the outputs lie from ours, and the times.
    peers: BTreeMap<String, (f64, Vec<Time>)>,
    limits: Vec<f64>,
}

impl Pairs {
    fn fill(self, row: &mut Row) {
        let ours = Times::of(&self.ours);
        let work = if row.workload.share_of == Some(Ceiling::Peak) { row.operations } else { row.bytes };
        // Whatever else runs only lowers a sample of the limit: the highest of the row is nearest to it.
        if let Some(limit) = self.limits.iter().copied().reduce(f64::max) {
            let shares: Vec<f64> = ours.seconds.iter().map(|seconds| work / seconds / limit).collect();
            row.share = Some(spread(&shares));
        }
        for (name, (difference, times)) in self.peers {
            let times = Times::of(&times);
            let ratios = times.seconds.iter().zip(&ours.seconds).map(|(theirs, ours)| theirs / ours);
            let ratio = spread(&ratios.collect::<Vec<_>>());
            let memory = ours.peak_bytes.zip(times.peak_bytes);
            let memory = memory.filter(|(_, theirs)| *theirs > 0).map(|(ours, theirs)| ours as f64 / theirs as f64);
            row.peers.insert(name, Beside { times, ratio, memory, difference });
        }
        row.ours = Some(ours);
    }
}

impl Times {
    fn of(times: &[Time]) -> Times {
        let seconds: Vec<f64> = times.iter().map(|time| spread(&time.seconds)[0]).collect();
        Times {
            kernel: times[0].kernel.clone(),
            prepared: times[0].prepared.clone(),
            median: spread(&seconds)[0],
            peak_bytes: times.iter().map(|time| time.peak_bytes).max().flatten(),
            runs: times.iter().map(|time| time.seconds.len()).collect(),
            seconds,
        }
    }
}

/// How many runs to time where `before` is the pair before this one: as many as fit in a tenth of a second, since the median
/// of a few short runs moves with every interrupt.
fn enough(least: usize, before: Option<&Time>) -> usize {
    let Some(before) = before else { return least };
    let fit = 0.1 / spread(&before.seconds)[0];
    (fit as usize).clamp(least, least.max(200))
}

impl Limits {
    /// The limits of code for `isa`, nothing measured yet.
    pub fn of(isa: Isa) -> Limits {
        Limits { ceilings: Ceilings::of(isa), samples: BTreeMap::new() }
    }

    fn sample(&mut self, limit: Ceiling, workload: &Workload, threads: usize) -> Option<f64> {
        let dtype = workload.dtype();
        let rate = self.ceilings.measure(limit, dtype, threads)?;
        let of = if limit == Ceiling::Peak { dtype.name() } else { "" };
        self.samples.entry((limit, of, threads)).or_default().push(rate);
        Some(rate)
    }

    /// Every limit that was measured.
    pub fn measured(&self) -> Vec<Limit> {
        let limit = |(&(limit, dtype, threads), rates): (&(Ceiling, &'static str, usize), &Vec<f64>)| Limit {
            limit,
            dtype,
            threads,
            per_second: spread(rates),
            samples: rates.len(),
        };
        self.samples.iter().map(limit).collect()
    }
}

fn ask(side: &mut Side, case: &mut Case, repeat: usize, patience: Duration) -> Result<Timed, Failure> {
    let request = Arc::new(timing::encode_timed(case, repeat));
    let start = Instant::now();
    let answer = side.ask(&request, patience).and_then(|frame| timing::decode(&frame, repeat));
    let took = start.elapsed().as_secs_f64();
    let answer = answer.and_then(|answer| match answer {
        Timed::Ok(time) if time.seconds.iter().sum::<f64>() > took => {
            Err(format!("metadata `seconds`: more in all than the {took:.3} s the answer took; write seconds"))
        }
        answer => Ok(answer),
    });
    answer.map_err(|reason| Failure { side: side.name.clone(), reason })
}

/// How far `theirs` lie from `ours`: the length of the difference over the length of ours, the largest of all outputs.
fn difference(ours: &BTreeMap<String, Tensor>, theirs: &BTreeMap<String, Tensor>) -> Result<f64, String> {
    let mut largest = 0f64;
    if let Some(name) = theirs.keys().find(|name| !ours.contains_key(*name)) {
        return Err(format!("it answers with an output `{name}` that the op does not have"));
    }
    for (name, ours) in ours {
        let theirs = theirs.get(name).ok_or_else(|| format!("it answers without the output `{name}`"))?;
        let form = |tensor: &Tensor| format!("{:?} of {}", tensor.shape(), tensor.dtype());
        if form(ours) != form(theirs) {
            return Err(format!("output `{name}`: it is {}; it must be {}", form(theirs), form(ours)));
        }
        let (mut apart, mut length) = (0f64, 0f64);
        for (ours, theirs) in ours.to_f64().into_iter().zip(theirs.to_f64()) {
            apart += (ours - theirs) * (ours - theirs);
            length += ours * ours;
        }
        let far = if apart == 0.0 { 0.0 } else { (apart / length).sqrt() };
        if far.is_nan() {
            return Ok(far);
        }
        largest = largest.max(far);
    }
    Ok(largest)
}

/// What is asked of a row when it is timed beside `peers`, and whether it is so.
fn targets(row: &Row, peers: &[&str]) -> Vec<Target> {
    let workload = &row.workload;
    let mut targets = Vec::new();
    for (peer, &least) in workload.at_least.iter().filter(|(peer, _)| peers.contains(&peer.as_str())) {
        let got = row.peers.get(peer).map(|beside| beside.ratio[0]);
        targets.push(Target { wanted: format!("{least:.2}x {peer}"), got, met: got.is_some_and(|got| got >= least) });
    }
    if let (Some(of), Some(least)) = (workload.share_of, workload.share) {
        let got = row.share.map(|share| share[0]);
        let wanted = format!("{:.0}% of {}", 100.0 * least, of.name());
        targets.push(Target { wanted, got, met: got.is_some_and(|got| got >= least) });
    }
    for (peer, &most) in workload.memory_below.iter().filter(|(peer, _)| peers.contains(&peer.as_str())) {
        let got = row.peers.get(peer).and_then(|beside| beside.memory);
        let wanted = format!("memory < {:.0}% of {peer}", 100.0 * most);
        targets.push(Target { wanted, got, met: got.is_some_and(|got| got < most) });
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_must_be_the_same_work() {
        let y =
            |shape: &[usize], values: &[f32]| BTreeMap::from([("y".to_string(), Tensor::fp32(shape, values.to_vec()))]);
        let ours = y(&[2], &[3.0, 4.0]);
        assert_eq!(difference(&ours, &ours), Ok(0.0));
        assert_eq!(difference(&ours, &y(&[2], &[3.0, 4.5])), Ok(0.1));
        assert!(difference(&ours, &y(&[2], &[3.0, f32::NAN])).unwrap().is_nan());
        assert!(difference(&ours, &y(&[1, 2], &[3.0, 4.0])).unwrap_err().contains("[1, 2] of fp32; it must be [2]"));
        assert!(difference(&ours, &BTreeMap::new()).unwrap_err().contains("without the output `y`"));
        assert!(difference(&BTreeMap::new(), &ours).unwrap_err().contains("`y` that the op does not have"));
    }
}
