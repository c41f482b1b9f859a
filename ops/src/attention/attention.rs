//! Attention: `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], q_pos[B,T], kv_len[B], sinks[Hq]? -> out[B,T,Hq,E], lse[B,T,Hq]` (f32).
//!
//! Formula: `out = softmax(scale * q k^T over the visible keys) v`; query head h reads key head `h / (Hq/Hkv)`. Key j is
//! visible to position p when `j < kv_len`, `j <= p` if causal, `j > p - window` if there is a window, and
//! `j >= chunk * floor(p / chunk)` if there are chunks.
//! Order: a score is a chain over d. Scores become `m * 2^i` through `exp_split(s; c_hi, c_lo)` with
//! `c = scale * log2(e)`, `n = max i`. Keys are cut at absolute multiples of 256; inside a block `l += weight` and
//! `acc[e] = fma(weight, v[e], acc[e])`, keys ascending, invisible keys skipped; blocks are added ascending, from +0.
//! Rounding: every step once to f32; `out = acc / l`, last rounding; `lse(n, l)` in f64, rounded once.
//! Softcap: `s = cap * tanh(s * f32(scale/cap))`, then `c = log2(e)`.
//! Sinks: that of a head is `m * 2^i` by `exp_split(z; LOG2E_HI, LOG2E_LO)`; its i counts for `n`, its weight is added to l last.
//! Special: no visible key gives out +0 and lse -inf; a visible score of NaN or +inf gives NaN; -inf counts as invisible.
//!
//! Two passes over the scores: the first finds `n`, the second makes the weights. Because `n` is an integer exponent,
//! nothing is rescaled and no tile border can be seen. Many query rows to a key head go in tiles of rows ([`prefill`]); few
//! are a matter of reading keys and values once, at the speed of memory ([`decode`]).

use super::job::{Attention, Factors, Job, Keys, Lens, Qkv, Sequences, check, check_places, check_sinks, factors};
use super::{decode, device, prefill};
use crate::call::{Arguments, Entry};
use crate::element::typed;
use crate::parallel::SharedOut;
use crate::workspace::{Plan, choose};
use crate::{Counter, Cpu, Element, Error, TensorMut, TensorRef};
use std::iter::successors;

/// `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E] -> out[B,T,Hq,E], lse[B,T,Hq]`, all row-major. Queries may be packed, keys
/// packed or paged ([`Sequences`]): the same bits for the same sequence. The outputs follow q: `out[T,Hq,E]` and
/// `lse[T,Hq]` where queries are packed. `lse` is the natural logarithm of the sum of a row's weights. `sinks[Hq]` are logits
/// that join the softmax of their heads and have no value.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `q_heads` is not a multiple of `kv_heads`, a
/// `kv_len` is outside `0..=S` or exceeds a sequence's rows or pages or 2^24, `scale` is negative or not finite,
/// `softcap` is not positive and finite, `window` or `chunk` is 0, starts do not ascend to the end, or a page is outside `0..P`;
/// [`Error::Budget`] below the smallest plan (the operands of 16 keys and one query).
///
/// ```
/// use samebits_ops::{Attention, Cpu, Keys, Qkv, Sequences, attention};
///
/// // A query that is 0 finds all keys alike: the output is the mean of the values that it sees.
/// let (q, k, v) = ([0f32; 2], [1f32, 2.0, 3.0, 4.0], [2f32, 4.0, 4.0, 8.0]);
/// let shape = Attention::causal([1, 1, 2], [1, 1], 2);
/// let qkv = Qkv { q: &q[..], k: &k, v: &v };
/// let (mut out, mut lse) = ([0f32; 2], [0f32]);
/// let cpu = Cpu::best();
/// attention(&cpu, &shape, &Sequences::padded(&[1], &[2]), qkv, None, &mut out, &mut lse)?;
/// assert_eq!(out, [3.0, 6.0]);
///
/// // At position 0 it sees the first key, which stands in page 1 of two pages of one key.
/// let paged = Sequences { keys: Keys::Paged { page_size: 1, table: &[1, 0] }, ..Sequences::padded(&[0], &[2]) };
/// attention(&cpu, &shape, &paged, qkv, None, &mut out, &mut lse)?;
/// assert_eq!((out, lse), ([4.0, 8.0], [0.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn attention<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Attention,
    sequences: &Sequences,
    Qkv { q, k, v }: Qkv<[I]>,
    sinks: Option<&[f32]>,
    out: &mut [O],
    lse: &mut [f32],
) -> Result<(), Error> {
    let q_pos = sequences.q_pos.len();
    let lens = Lens { q: q.len(), k: k.len(), v: v.len(), q_pos, out: out.len(), lse: lse.len() };
    let factors = check(shape, sequences, &lens)?;
    check_sinks(shape, sinks.map(<[f32]>::len))?;
    if out.is_empty() && lse.is_empty() {
        return Ok(());
    }
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let rows: &[usize] = if sequences.q_start.is_some() { &[queries] } else { &[batch, queries] };
    let key_rows: &[usize] = match sequences.keys {
        Keys::Padded => &[batch, keys],
        Keys::Packed(_) | Keys::Paged { .. } => &[keys],
    };
    let of = |rows: &[usize], last: [usize; 2]| [rows, &last].concat();
    let q = TensorRef::of(q, &of(rows, [q_heads, head_dim]));
    let k = TensorRef::of(k, &of(key_rows, [kv_heads, head_dim]));
    let v = TensorRef::of(v, &of(key_rows, [kv_heads, value_dim]));
    let out = TensorMut::of(out, &of(rows, [q_heads, value_dim]));
    run(cpu, &Request { shape, sequences, factors, sinks }, [q, k, v], out, lse)
}

/// What a call says beside its tensors, checked.
struct Request<'a> {
    shape: &'a Attention,
    sequences: &'a Sequences<'a>,
    factors: Factors,
    sinks: Option<&'a [f32]>,
}

fn run(cpu: &Cpu, request: &Request, [q, k, v]: [TensorRef; 3], out: TensorMut, lse: &mut [f32]) -> Result<(), Error> {
    let Request { shape, sequences, factors: Factors { cap, c }, sinks } = *request;
    let Sequences { q_pos, kv_len, .. } = *sequences;
    typed!(q.dtype() => I, {
        q.on_host("attention", "q")?;
        k.on_host("attention", "k")?;
        v.on_host("attention", "v")?;
        let (q, k, v) = (q.heads::<I>(), k.heads::<I>(), v.heads::<I>());
        let job = Job { cpu, shape, sequences, q, k, v, q_pos, kv_len, cap, c, sinks, dry: false };
        typed!(out.dtype() => O, job.run(out.host::<O>("attention", "out")?, lse))
    })
}

/// attention, by name.
pub(crate) const OP: Entry = entry("attention");

/// paged_attention, by name.
pub(crate) const PAGED: Entry = entry("paged_attention");

/// packed_attention, by name.
pub(crate) const PACKED: Entry = entry("packed_attention");

const fn entry(name: &'static str) -> Entry {
    Entry {
        name,
        cpu: |cpu, args| {
            let (out, lse) = (args.output("out"), args.output("lse").host("attention", "lse")?);
            let tensors = ["q", "k", "v"].map(|name| args.input(name));
            let sinks = args.optional("sinks").map(|sinks| sinks.dense("attention", "sinks")).transpose()?;
            with_places(args, |shape, sequences| {
                let factors = factors(shape)?;
                check_places(shape, sequences)?;
                if out.shape().contains(&0) && lse.is_empty() {
                    return Ok(());
                }
                run(cpu, &Request { shape, sequences, factors, sinks }, tensors, out, lse)
            })
        },
        device: Some(|on, args| {
            const NAME: &str = "attention";
            let (out, lse) = (args.output("out"), args.output("lse").device(NAME, "lse")?);
            let [q, k, v] = ["q", "k", "v"].map(|name| args.input(name));
            let sinks = args.optional("sinks").map(|sinks| sinks.device::<f32>(NAME, "sinks")).transpose()?;
            with_places(args, |shape, sequences| {
                typed!(q.dtype() => I, typed!(out.dtype() => O, {
                    let qkv = Qkv { q: q.device::<I>(NAME, "q")?, k: k.device(NAME, "k")?, v: v.device(NAME, "v")? };
                    device::attention(on, shape, sequences, qkv, sinks, out.device::<O>(NAME, "out")?, lse)
                }))
            })
        }),
        unit: Some(&device::UNIT),
        prepare: None,
    }
}

/// Runs `work` with what a call of one of the three forms says beside its tensors: shape and sequences.
fn with_places<T>(args: &Arguments, work: impl FnOnce(&Attention, &Sequences) -> Result<T, Error>) -> Result<T, Error> {
    let (call, q_pos) = (args.call, args.integers("q_pos")?);
    let shape = |keys: usize| Attention::of(call, call.dim("B"), keys);
    match args.op() {
        "attention" => work(&shape(call.dim("S")), &Sequences::padded(q_pos, args.integers("kv_len")?)),
        "paged_attention" => {
            let (page_size, table) = (call.dim("Z"), args.integers("page_table")?);
            let padded = Sequences::padded(q_pos, args.integers("kv_len")?);
            let sequences = Sequences { keys: Keys::Paged { page_size, table }, ..padded };
            work(&shape(call.dim("P").saturating_mul(page_size)), &sequences)
        }
        _ => {
            let (q_start, k_start) = (args.integers("q_start")?, args.integers("k_start")?);
            let kv_len: Vec<i32> = k_start.windows(2).map(|two| two[1].saturating_sub(two[0])).collect();
            let sequences = Sequences { q_pos, kv_len: &kv_len, q_start: Some(q_start), keys: Keys::Packed(k_start) };
            work(&shape(call.dim("S")), &sequences)
        }
    }
}

impl<I: Element> Job<'_, I> {
    pub(super) fn run<O: Element>(&self, out: &mut [O], lse: &mut [f32]) -> Result<(), Error> {
        let (out, lse) = (SharedOut::new(out), SharedOut::new(lse));
        let plans = successors(Some(self.preferred()), |plan| plan.smaller(self));
        let (plan, mut workspace) = choose(self.cpu, "attention", plans)?;
        let mut run = |job: &Job<I>| {
            let (shared, slots) = workspace.split();
            match &plan {
                Strategy::Decode(plan) => decode::run(job, plan, shared, slots, &out, &lse),
                Strategy::Prefill(plan) => prefill::run(job, plan, shared, slots, &out, &lse),
            }
        };
        let ledger = self.cpu.ledger();
        if self.dots() && ledger.forbids(Counter::SlowPaths) {
            let slow = run(&Job { dry: true, ..*self });
            ledger.note(Counter::SlowPaths, slow, "attention: operands so small that VDPBF16PS would flush them")?;
        }
        let slow = run(self);
        ledger.add(Counter::SlowPaths, slow);
        Ok(())
    }

    pub(super) fn preferred(&self) -> Strategy {
        match decode::Streams::preferred(self) {
            Some(plan) => Strategy::Decode(plan),
            None => Strategy::Prefill(prefill::Tiles::preferred(self)),
        }
    }
}

/// How a call is carried out.
pub(super) enum Strategy {
    Decode(decode::Streams),
    Prefill(prefill::Tiles),
}

impl Strategy {
    fn smaller<I: Element>(&self, job: &Job<I>) -> Option<Strategy> {
        match self {
            Strategy::Decode(plan) => {
                Some(plan.smaller().map_or_else(|| Strategy::Prefill(prefill::Tiles::preferred(job)), Strategy::Decode))
            }
            Strategy::Prefill(plan) => plan.smaller().map(Strategy::Prefill),
        }
    }
}

impl Plan for Strategy {
    fn need(&self) -> crate::workspace::Need {
        match self {
            Strategy::Decode(plan) => plan.need(),
            Strategy::Prefill(plan) => plan.need(),
        }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        match self {
            Strategy::Decode(plan) => plan.tiles(),
            Strategy::Prefill(plan) => plan.tiles(),
        }
    }
}
