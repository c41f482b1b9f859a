//! Gradient of attention: `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], out[B,T,Hq,E], lse[B,T,Hq], dout[B,T,Hq,E],
//! q_pos[B,T], kv_len[B], mask[B,T]? -> dq[B,T,Hq,D], dk[B,S,Hkv,D], dv[B,S,Hkv,E]`.
//!
//! Formula: `p = e^(scale * q k - lse)` of the keys a query sees, `g = p * (dout v - dout out)`; dq is scale times the
//! sum of `g k` over keys, dk scale times that of `g q` and dv that of `p dout`, over queries and the heads of a group.
//! Order: the score is a chain over d, `dout v` and `dout out` are chains over e. dq: keys in blocks of absolute
//! multiples of 256, chains within a block, blocks added ascending from +0. dk and dv: for each query head a chain over
//! the rows that are tokens, ascending; heads added ascending from +0. Pairs that are not visible take no step.
//! Rounding: `d = fma(s, lo, fma(s, hi, -lse))` with `hi + lo = scale`; p is `e^d` or +0 where its exponent is below
//! -100; `g = p * (dp - delta)`; sums of dq and dk times `f32(scale)`; last rounding.
//! Softcap: `t = tanh(s * f32(scale/cap))`, `d = cap * t - lse`, and g times `fma(-t, t, 1)`.
//! Special: a visible score of -inf counts as invisible; no terms give +0.

use super::backward_job::{Gradients, Job, Order, Parameters, QueryRows};
use super::backward_tiles::{self, Tiles};
use crate::attention::job::{Attention, Qkv, Sequences, check_places, factors};
use crate::backend::device::workspace::choose as choose_on_device;
use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int, launch_struct};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::workspace::{Need, Plan, choose};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, Tf32, check_len};
use std::iter::successors;

/// What [`attention`](crate::attention()) returned, and the gradient of `out`, row-major: `AttentionOutputs<[I],
/// [f32]>` are slices, buffers stand on a device.
#[derive(Debug)]
pub struct AttentionOutputs<'a, X: ?Sized, L: ?Sized> {
    /// `out[B,T,Hq,E]`, of the dtype of q.
    pub out: &'a X,
    /// `lse[B,T,Hq]`.
    pub lse: &'a L,
    /// `dout[B,T,Hq,E]`, of the dtype of q.
    pub dout: &'a X,
}

impl<X: ?Sized, L: ?Sized> Clone for AttentionOutputs<'_, X, L> {
    fn clone(&self) -> Self {
        *self
    }
}

// Derived, it would ask for slices that are `Copy`.
impl<X: ?Sized, L: ?Sized> Copy for AttentionOutputs<'_, X, L> {}

/// The gradients that [`attention_backward`] makes, row-major and of one dtype.
#[derive(Debug)]
pub struct QkvGradients<'a, Y: ?Sized> {
    /// `dq[B,T,Hq,D]`.
    pub dq: &'a mut Y,
    /// `dk[B,S,Hkv,D]`.
    pub dk: &'a mut Y,
    /// `dv[B,S,Hkv,E]`.
    pub dv: &'a mut Y,
}

/// The gradients of q, k and v from that of [`attention`](crate::attention())'s `out`. dk and dv are sums over the rows
/// that are tokens, of all query heads of a group; dq is there for every row. The workspace grows with `B * Hq * T`,
/// and where the budget allows with `T * D + S * (D + E)` for each thread, never with `T * S`.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] as [`attention`](crate::attention());
/// [`Error::Budget`] below the smallest plan (one query and 32 keys).
///
/// ```
/// use samebits_ops::{Attention, AttentionOutputs, Cpu, QkvGradients, QueryRows, Qkv, attention_backward};
///
/// // One query that sees two keys alike: the gradient of each value is half of that of the output.
/// let (q, k, v) = ([0f32; 2], [1f32, 2.0, 3.0, 4.0], [2f32, 4.0, 4.0, 8.0]);
/// let shape = Attention::causal([1, 1, 2], [1, 1], 2);
/// let qkv = Qkv { q: &q[..], k: &k, v: &v };
/// let given = AttentionOutputs { out: &[3f32, 6.0][..], lse: &[2f32.ln()][..], dout: &[1.0, 0.0] };
/// let rows = QueryRows { q_pos: &[1], kv_len: &[2], mask: None };
/// let (mut dq, mut dk, mut dv) = ([9f32; 2], [9f32; 4], [9f32; 4]);
/// let gradients = QkvGradients { dq: &mut dq[..], dk: &mut dk, dv: &mut dv };
/// attention_backward(&Cpu::best(), &shape, &rows, qkv, given, gradients)?;
/// assert!((dv[0] - 0.5).abs() < 1e-6 && dv[1] == 0.0 && (dv[2] - 0.5).abs() < 1e-6);
/// // The second value is larger: the query would turn to its key.
/// assert!(dq[0] > 0.0 && dk == [0.0; 4]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn attention_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Attention,
    rows: &QueryRows,
    Qkv { q, k, v }: Qkv<[I]>,
    AttentionOutputs { out, lse, dout }: AttentionOutputs<[I], [f32]>,
    QkvGradients { dq, dk, dv }: QkvGradients<[O]>,
) -> Result<(), Error> {
    let lens = [q.len(), k.len(), v.len(), out.len(), lse.len(), dout.len(), dq.len(), dk.len(), dv.len()];
    let parameters = check(shape, rows, lens)?;
    let [queries, keys, values, outputs, sums] = extents(shape);
    let tensors = [(q, &queries), (k, &keys), (v, &values), (out, &outputs), (dout, &outputs)];
    let tensors = tensors.map(|(x, extents)| TensorRef::of(x, extents));
    let lse = TensorRef::of(lse, &sums[..3]);
    let gradients = [(dq, &queries), (dk, &keys), (dv, &values)].map(|(y, extents)| TensorMut::of(y, extents));
    run(cpu, shape, rows, parameters, tensors, lse, gradients)
}

/// Extents of q, k, v and out, and of lse in the first three.
fn extents(shape: &Attention) -> [[usize; 4]; 5] {
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    [
        [batch, queries, q_heads, head_dim],
        [batch, keys, kv_heads, head_dim],
        [batch, keys, kv_heads, value_dim],
        [batch, queries, q_heads, value_dim],
        [batch, queries, q_heads, 1],
    ]
}

/// Checks a call, whatever it runs on. The lengths are those of q, k, v, out, lse, dout, dq, dk and dv.
fn check(shape: &Attention, rows: &QueryRows, lens: [usize; 9]) -> Result<Parameters, Error> {
    let parameters = parameters(shape)?;
    let [queries, keys, values, outputs, sums] = extents(shape);
    let forms = [
        ("q", "[B,T,Hq,D]", queries),
        ("k", "[B,S,Hkv,D]", keys),
        ("v", "[B,S,Hkv,E]", values),
        ("out", "[B,T,Hq,E]", outputs),
        ("lse", "[B,T,Hq]", sums),
        ("dout", "[B,T,Hq,E]", outputs),
        ("dq", "[B,T,Hq,D]", queries),
        ("dk", "[B,S,Hkv,D]", keys),
        ("dv", "[B,S,Hkv,E]", values),
    ];
    for ((name, form, extents), len) in forms.into_iter().zip(lens) {
        check_len("attention_backward", name, form, len, &extents)?;
    }
    check_rows(shape, rows)?;
    Ok(parameters)
}

/// Checks the parameters and makes what follows from them.
fn parameters(shape: &Attention) -> Result<Parameters, Error> {
    let cap = factors(shape)?.cap;
    let hi = shape.scale as f32;
    Ok(Parameters { cap, scale: (hi, (shape.scale - f64::from(hi)) as f32) })
}

/// Checks where queries stand.
fn check_rows(shape: &Attention, rows: &QueryRows) -> Result<(), Error> {
    let QueryRows { q_pos, kv_len, mask } = *rows;
    let each = [shape.batch, shape.queries];
    check_len("attention_backward", "q_pos", "[B,T]", q_pos.len(), &each)?;
    if let Some(mask) = mask {
        check_len("attention_backward", "mask", "[B,T]", mask.len(), &each)?;
    }
    check_places(shape, &Sequences::padded(q_pos, kv_len))
}

/// q, k, v, out and dout, lse, and dq, dk and dv, of a call that was checked.
fn run(
    cpu: &Cpu,
    shape: &Attention,
    rows: &QueryRows,
    parameters: Parameters,
    tensors: [TensorRef; 5],
    lse: TensorRef,
    gradients: [TensorMut; 3],
) -> Result<(), Error> {
    const NAME: &str = "attention_backward";
    for (tensor, name) in tensors.iter().zip(["q", "k", "v", "out", "dout"]) {
        tensor.on_host(NAME, name)?;
    }
    lse.on_host(NAME, "lse")?;
    let [dq, dk, dv] = gradients;
    typed!(tensors[0].dtype() => I, typed!(dq.dtype() => O, {
        let [q, k, v, out, dout] = tensors.map(|tensor| tensor.heads::<I>());
        let (lse, order) = (lse.rows::<f32>(), Order::of(shape, rows));
        let job = Job { cpu, shape, rows, parameters, q, k, v, out, dout, lse, order };
        let (dq, dk, dv) = (dq.host::<O>(NAME, "dq")?, dk.host::<O>(NAME, "dk")?, dv.host::<O>(NAME, "dv")?);
        job.run(&Gradients { dq: SharedOut::new(dq), dk: SharedOut::new(dk), dv: SharedOut::new(dv) })
    }))
}

/// attention_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "attention_backward",
    cpu: |cpu, args| {
        let shape = Attention::of(args.call, args.call.dim("B"), args.call.dim("S"));
        let mask = args.optional("mask").map(|mask| mask.dense("attention_backward", "mask")).transpose()?;
        let rows = QueryRows { q_pos: args.integers("q_pos")?, kv_len: args.integers("kv_len")?, mask };
        let parameters = parameters(&shape)?;
        check_rows(&shape, &rows)?;
        let tensors = ["q", "k", "v", "out", "dout"].map(|name| args.input(name));
        let lse = args.input("lse");
        let gradients = ["dq", "dk", "dv"].map(|name| args.output(name));
        run(cpu, &shape, &rows, parameters, tensors, lse, gradients)
    },
    device: Some(|on, args| {
        const NAME: &str = "attention_backward";
        let shape = Attention::of(args.call, args.call.dim("B"), args.call.dim("S"));
        let mask = args.optional("mask").map(|mask| mask.dense(NAME, "mask")).transpose()?;
        let rows = QueryRows { q_pos: args.integers("q_pos")?, kv_len: args.integers("kv_len")?, mask };
        let [q, k, v, out, dout] = ["q", "k", "v", "out", "dout"].map(|name| args.input(name));
        let lse = args.input("lse").device::<f32>(NAME, "lse")?;
        let [dq, dk, dv] = ["dq", "dk", "dv"].map(|name| args.output(name));
        typed!(q.dtype() => I, typed!(dq.dtype() => O, {
            let qkv = Qkv { q: q.device::<I>(NAME, "q")?, k: k.device(NAME, "k")?, v: v.device(NAME, "v")? };
            let (out, dout) = (out.device(NAME, "out")?, dout.device(NAME, "dout")?);
            let (dq, dk, dv) = (dq.device::<O>(NAME, "dq")?, dk.device(NAME, "dk")?, dv.device(NAME, "dv")?);
            on_device(on, &shape, &rows, qkv, AttentionOutputs { out, lse, dout }, QkvGradients { dq, dk, dv })
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Its kernels.
const UNIT: Unit = Unit {
    has_product: true,
    structs: &[Call::LAYOUT],
    ..Unit::of(
        "attention_backward",
        include_str!("attention_backward.cu"),
        &["attention_backward_deltas", "attention_backward_dq", "attention_backward_dkv"],
    )
};

launch_struct! {
    /// What the kernels are told.
    struct Call of "attention_backward" {
        /// 0 means none.
        window: i64,
        queries: i32,
        keys: i32,
        q_heads: i32,
        kv_heads: i32,
        head_dim: i32,
        value_dim: i32,
        causal: i32,
        chunk: i32,
        capped: i32,
        masked: i32,
        cap: f32,
        cap_factor: f32,
        hi: f32,
        lo: f32,
    }
}

/// Threads of a block, and pairs or columns that it takes: a block of keys for a row of dq.
const PAIRS: usize = IEEE.keys;

/// The workspace on a device: a delta for each row and head.
struct Deltas(usize);

impl Plan for Deltas {
    fn need(&self) -> Need {
        Need { shared: self.0.max(1), slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", 1), ("keys", PAIRS), ("", 0)]
    }
}

/// [`attention_backward`] on a device. Where the sequences stand comes from the host, which checks it.
///
/// # Errors
/// As [`attention_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Attention,
    rows: &QueryRows,
    Qkv { q, k, v }: Qkv<Buffer<I>>,
    AttentionOutputs { out, lse, dout }: AttentionOutputs<Buffer<I>, Buffer<f32>>,
    QkvGradients { dq, dk, dv }: QkvGradients<Buffer<O>>,
) -> Result<(), Error> {
    let op = "attention_backward";
    let lens = [q.len(), k.len(), v.len(), out.len(), lse.len(), dout.len(), dq.len(), dk.len(), dv.len()];
    let Parameters { cap, scale: (hi, lo) } = check(shape, rows, lens)?;
    let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let (all, mask) = (lse.len(), rows.mask.unwrap_or(&[]));
    let indices = device.upload(op, &[rows.q_pos, rows.kv_len, mask].concat())?;
    let (_, deltas) = choose_on_device(device, op, [Deltas(all)])?;
    let build = Build { tf32: shape.tf32 == Tf32::Enabled && I::NAME == "fp32", ..Build::of::<I, O>(op) };
    // 0 says that there is none.
    let window = shape.window.map_or(0, |window| window.min(1 << 40) as i64);
    let extent = |value: usize| int(op, "an extent", value);
    let (cap_set, (cap, cap_factor)) = (cap.is_some(), cap.unwrap_or((0.0, 0.0)));
    let call = Call {
        window,
        queries: extent(queries)?,
        keys: extent(keys)?,
        q_heads: extent(q_heads)?,
        kv_heads: extent(kv_heads)?,
        head_dim: extent(head_dim)?,
        value_dim: extent(value_dim)?,
        causal: i32::from(shape.causal),
        // One that holds every position is none.
        chunk: shape.chunk.and_then(|chunk| chunk.try_into().ok()).unwrap_or(0),
        capped: i32::from(cap_set),
        masked: i32::from(rows.mask.is_some()),
        cap,
        cap_factor,
        hi,
        lo,
    };
    let call = call.bytes();
    let given = || {
        let arguments = Arguments::new().layout(&call).buffer(q).buffer(k).buffer(v).buffer(lse).buffer(dout);
        arguments.buffer_from(&deltas, 0).buffer_from(&indices, 0).buffer_from(&indices, batch * queries)
    };
    let of_deltas = Arguments::new().buffer(out).buffer(dout).buffer_from(&deltas, 0).long(all).int(value_dim as i32);
    let columns = |dim: usize| dim.div_ceil(PAIRS).max(1);
    // SAFETY: everything was checked together; a block takes a row or a key and leaves columns behind the last alone.
    unsafe {
        if all > 0 {
            device.launch(build, "attention_backward_deltas", [all.div_ceil(256), 1, 1], 256, 0, &of_deltas)?;
        }
        if !dq.is_empty() {
            let grid = [all, columns(head_dim), 1];
            device.launch(build, "attention_backward_dq", grid, PAIRS as u32, 0, &given().buffer(dq))?;
        }
        let grid = [batch * keys * kv_heads, columns(head_dim.max(value_dim)), 1];
        if grid[0] > 0 && head_dim.max(value_dim) > 0 {
            let arguments = given().buffer_from(&indices, batch * (queries + 1)).buffer(dk).buffer(dv);
            device.launch(build, "attention_backward_dkv", grid, PAIRS as u32, 0, &arguments)?;
        }
    }
    Ok(())
}

impl<I: Element> Job<'_, I> {
    fn run<O: Element>(&self, gradients: &Gradients<O>) -> Result<(), Error> {
        let plans = successors(Some(Tiles::preferred(self)), Tiles::smaller);
        let (plan, mut workspace) = choose(self.cpu, "attention_backward", plans)?;
        let (shared, slots) = workspace.split();
        backward_tiles::run(self, &plan, shared, slots, gradients);
        Ok(())
    }
}
