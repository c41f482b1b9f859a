//! Softmax attention: from queries, keys and values to heads, over the pages of the sequences.

use super::indexer::Chosen;
use super::norm::Vector;
use super::{SIZES, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{Index, typed};
use crate::pass::Pass;
use crate::state::{Kind, LayerState};
use crate::sums::{Of, zeros};
use samebits_ops::device::Part;
use samebits_ops::{Attention, Attributes, DType, Element, Tensor, TensorRef, Tf32};

/// The heads of an attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Query heads, a multiple of `keys`.
    pub queries: usize,
    /// Key and value heads.
    pub keys: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Soft limit of the scores.
    pub softcap: Option<f64>,
    /// How many positions back it reaches; `None` for all.
    pub window: Option<usize>,
    /// How many positions a chunk has, which it does not look beyond; `None` for no chunks.
    pub chunk: Option<usize>,
}

/// Gradients of what attention reads of a step's tokens: `q[n,Hq,D]`, `k[n,Hkv,D]`, `v[n,Hkv,E]`.
pub(crate) struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

/// What attention made, and what it made it from.
pub(crate) struct Attended {
    q: Tensor,
    /// Keys and values; none where another layer has put them to those of the tokens before, and no reverse pass will read them.
    kv: Option<[Tensor; 2]>,
    /// `[n,Hq * E]`
    pub heads: Tensor,
    /// `[n,Hq]`
    lse: Tensor,
    /// The rows that each row sees, where a layer chooses them.
    chosen: Option<Vec<Vec<i32>>>,
}

impl Attended {
    /// What a reverse pass reads.
    pub fn keep(self, pass: &mut Pass) -> Option<Attended> {
        if pass.keeps {
            return Some(self);
        }
        pass.leave([("heads", self.heads), ("lse", self.lse)]);
        None
    }
}

impl Heads {
    /// What they no longer hold, where they were changed.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let &Heads { queries, keys, key_dim, value_dim, window, chunk, .. } = self;
        if ![queries, keys, key_dim, value_dim].into_iter().all(is_size) {
            Err(SIZES)
        } else if !queries.is_multiple_of(keys) {
            Err("query heads are a multiple of key heads")
        } else if !queries.checked_mul(key_dim.max(value_dim)).is_some_and(is_size) {
            Err("heads fit their width")
        } else if !window.is_none_or(is_size) || !chunk.is_none_or(is_size) {
            Err("windows and chunks hold a position")
        } else {
            Ok(())
        }
    }

    /// Elements of a token's queries, keys, values and heads.
    pub fn widths(&self) -> [usize; 4] {
        let &Heads { queries, keys, key_dim, value_dim, .. } = self;
        [queries * key_dim, keys * key_dim, keys * value_dim, queries * value_dim]
    }

    /// What is kept of a token: its key and its value.
    pub(crate) fn state(&self) -> Kind {
        let [_, k, v, _] = self.widths();
        Kind::Paged(vec![k, v])
    }

    /// Attention of `batch` sequences, `queries` and `keys` rows in all.
    pub(crate) fn shape(&self, batch: usize, queries: usize, keys: usize) -> Attention {
        Attention {
            batch,
            queries,
            keys,
            q_heads: self.queries,
            kv_heads: self.keys,
            head_dim: self.key_dim,
            value_dim: self.value_dim,
            scale: self.scale,
            causal: true,
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap,
            tf32: Tf32::Disabled,
        }
    }

    /// Puts keys and values to those of the tokens before, unless another layer has done so, and attends to all of them, or to those
    /// that are chosen.
    pub(crate) fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        (mut q, mut kv): (Tensor, Option<[Tensor; 2]>),
        sinks: Option<&Vector>,
        chosen: Option<&Chosen>,
    ) -> Result<Attended, ModelError> {
        pass.see("q", &mut q)?;
        let (n, inputs) = (pass.step.rows(), pass.inputs);
        let [keys, values, ..] = state.pages() else { unreachable!("an attention keeps keys and values") };
        let place = |width| Part { rows: Some(&inputs.rows), ..Part::whole(width) };
        match &mut kv {
            Some([k, v]) => {
                pass.see("k", k)?;
                pass.see("v", v)?;
                for (from, to) in [(&*k, &mut *keys), (&*v, &mut *values)] {
                    let width = to.shape()[1];
                    pass.machine.copy_rows([n, width], (from, Part::whole(width)), (to, place(width)))?;
                }
            }
            None if pass.keeps => {
                let there = |from: &Tensor| -> Result<Tensor, ModelError> {
                    let width = from.shape()[1];
                    let mut to = pass.empty(pass.dtype, &[n, width])?;
                    pass.machine.copy_rows([n, width], (from, place(width)), (&mut to, Part::whole(width)))?;
                    Ok(to)
                };
                kv = Some([there(keys)?, there(values)?]);
            }
            None => {}
        }
        let (own, q_pos, sequences);
        let metadata = match chosen {
            None => {
                sequences = pass.step.sequences();
                q_pos = pass.hook.positions(pass.layer, pass.step, &inputs.attention.q_pos)?;
                &inputs.attention
            }
            Some(chosen) => {
                let most = chosen.most();
                let mut metadata = chosen.metadata(pass, most);
                pass.machine.place(&mut metadata, &self.shape(n, n, keys.shape()[0]), most)?;
                (own, sequences) = (metadata, n);
                q_pos = own.q_pos.clone().into();
                &own
            }
        };
        let mut heads = pass.room("heads", pass.dtype, &[n, self.queries * self.value_dim])?;
        let mut lse = pass.room("lse", DType::Fp32, &[n, self.queries])?;
        let (shape, out) = (self.shape(sequences, n, keys.shape()[0]), [&mut heads, &mut lse]);
        pass.machine.attention(&shape, metadata, &q_pos, [&q, &*keys, &*values], sinks.map(|sinks| &sinks.w), out)?;
        pass.see("attention", &mut heads)?;
        let chosen = chosen.filter(|_| pass.keeps).map(|chosen| chosen.rows(pass));
        Ok(Attended { q, kv, heads, lse, chosen })
    }

    /// From `dheads`, as attention reads it: those of queries, keys and values, in f32. Those of rows of no sequence are +0.
    pub(crate) fn backward(
        &self,
        back: &mut Backward,
        attended: Attended,
        sinks: Option<&Vector>,
        dheads: &Tensor,
    ) -> Result<Qkv, ModelError> {
        if let Some(sinks) = sinks {
            self.add_sinks(back, &attended, sinks, dheads)?;
        }
        let [q, k, v, _] = self.widths().map(|width| zeros(back.cpu, &[dheads.shape()[0], width]));
        let mut all = Qkv { q: q?, k: k?, v: v? };
        match attended.chosen {
            None => self.backward_of_blocks(back, attended, dheads, &mut all)?,
            Some(_) => self.backward_of_chosen(back, attended, dheads, &mut all)?,
        }
        let Qkv { q, k, v } = &mut all;
        back.see("dq", q)?;
        back.see("dk", k)?;
        back.see("dv", v)?;
        Ok(all)
    }

    /// The attributes of attention's gradient.
    fn attributes(&self) -> Attributes {
        Attributes::new()
            .with("scale", self.scale)
            .with("causal", true)
            .with("window", self.window.unwrap_or(0))
            .with("chunk", self.chunk.unwrap_or(0))
            .with("softcap", self.softcap.unwrap_or(0.0))
    }

    /// [`Heads::backward`] where a row sees all keys of its sequence before it.
    fn backward_of_blocks(
        &self,
        back: &mut Backward,
        Attended { q: queries, kv, heads, lse, .. }: Attended,
        dheads: &Tensor,
        all: &mut Qkv,
    ) -> Result<(), ModelError> {
        let ([keys, values], f32) = (kv.expect("a reverse pass follows"), DType::Fp32);
        let (q, k) = ([self.queries, self.key_dim], [self.keys, self.key_dim]);
        let (v, o) = ([self.keys, self.value_dim], [self.queries, self.value_dim]);
        for block in back.blocks {
            let (batch, rows) = (block.lengths.len(), block.rows);
            let lengths: Vec<i32> = block.lengths.iter().map(|&length| length as i32).collect();
            let (positions, mask) = (block.positions(), block.mask());
            let inputs = [
                ("q", block.view(&queries, &q)?),
                ("k", block.view(&keys, &k)?),
                ("v", block.view(&values, &v)?),
                ("out", block.view(&heads, &o)?),
                ("lse", block.view(&lse, &[self.queries])?),
                ("dout", block.view(dheads, &o)?),
                ("q_pos", TensorRef::new(&positions, &[batch, rows])?),
                ("kv_len", TensorRef::new(&lengths, &[batch])?),
                ("mask", TensorRef::new(&mask, &[batch, rows])?),
            ];
            let of_block = |[heads, dim]: [usize; 2]| back.pass.empty(f32, &[batch, rows, heads, dim]);
            let (mut dq, mut dk, mut dv) = (of_block(q)?, of_block(k)?, of_block(v)?);
            let outputs = [("dq", dq.view_mut()), ("dk", dk.view_mut()), ("dv", dv.view_mut())];
            back.pass.op("attention_backward", &self.attributes(), &inputs, outputs)?;
            for (from, to) in [(&dq, &mut all.q), (&dk, &mut all.k), (&dv, &mut all.v)] {
                block.put(back.pass.machine, from, to)?;
            }
        }
        Ok(())
    }

    /// [`Heads::backward`] where each row sees what was chosen for it: a row is a call of its own, and those of keys and values are added
    /// in the order of the rows that see them.
    fn backward_of_chosen(
        &self,
        back: &mut Backward,
        Attended { q, kv, heads, lse, chosen }: Attended,
        dheads: &Tensor,
        all: &mut Qkv,
    ) -> Result<(), ModelError> {
        let ([keys, values], f32) = (kv.expect("a reverse pass follows"), DType::Fp32);
        let &Heads { queries, keys: kept, key_dim, value_dim, .. } = self;
        for (row, seen) in chosen.into_iter().flatten().enumerate().filter(|(row, _)| back.mask[*row] != 0) {
            let (count, rows) = (seen.len(), Index::Host(seen));
            let places = |width| Part { rows: Some(&rows), ..Part::whole(width) };
            let gather = |back: &Backward, from: &Tensor, width: usize| -> Result<Tensor, ModelError> {
                let mut to = back.pass.empty(from.dtype(), &[count, width])?;
                back.pass.machine.copy_rows([count, width], (from, places(width)), (&mut to, Part::whole(width)))?;
                Ok(to)
            };
            let [_, k_width, v_width, _] = self.widths();
            let (k, v) = (gather(back, &keys, k_width)?, gather(back, &values, v_width)?);
            let one = |x: &Tensor, axes: [usize; 2]| -> Result<Tensor, ModelError> {
                let (width, mut to) = (axes[0] * axes[1], back.pass.empty(x.dtype(), &[1, 1, axes[0], axes[1]])?);
                let from = Part { offset: row * width, ..Part::whole(width) };
                back.pass.machine.copy_rows([1, width], (x, from), (&mut to, Part::whole(width)))?;
                Ok(to)
            };
            let (own_q, own_out, own_dout) =
                (one(&q, [queries, key_dim])?, one(&heads, [queries, value_dim])?, one(dheads, [queries, value_dim])?);
            let mut own_lse = one(&lse, [queries, 1])?;
            own_lse.reshape(&[1, 1, queries]);
            let (last, length) = ([count as i32 - 1], [count as i32]);
            let inputs = [
                ("q", own_q.view()),
                ("k", k.view_as(&[1, count, kept, key_dim])?),
                ("v", v.view_as(&[1, count, kept, value_dim])?),
                ("out", own_out.view()),
                ("lse", own_lse.view()),
                ("dout", own_dout.view()),
                ("q_pos", TensorRef::new(&last, &[1, 1])?),
                ("kv_len", TensorRef::new(&length, &[1])?),
            ];
            let mut dq = back.pass.empty(f32, &[1, 1, queries, key_dim])?;
            let mut dk = back.pass.empty(f32, &[1, count, kept, key_dim])?;
            let mut dv = back.pass.empty(f32, &[1, count, kept, value_dim])?;
            let outputs = [("dq", dq.view_mut()), ("dk", dk.view_mut()), ("dv", dv.view_mut())];
            back.pass.op("attention_backward", &self.attributes(), &inputs, outputs)?;
            dq.reshape(&[1, queries * key_dim]);
            back.write_rows(&dq, &mut all.q, row)?;
            for (own, total) in [(&mut dk, &mut all.k), (&mut dv, &mut all.v)] {
                let width = total.shape()[1];
                own.reshape(&[count, width]);
                let earlier = gather(back, total, width)?;
                let sum = back.sum(&earlier, &*own)?;
                back.pass.machine.copy_rows([count, width], (&sum, Part::whole(width)), (total, places(width)))?;
            }
        }
        Ok(())
    }

    /// Adds the tokens to the gradient of the sinks: less the share of a sink, `e^(sink - lse)`, times what `dheads` and the
    /// heads have in common.
    fn add_sinks(
        &self,
        back: &mut Backward,
        Attended { heads, lse, .. }: &Attended,
        sinks: &Vector,
        dheads: &Tensor,
    ) -> Result<(), ModelError> {
        let (n, count, mask) = (heads.shape()[0], self.queries, back.mask);
        let rows = n * count;
        let row = || back.pass.empty(DType::Fp32, &[rows, 1]);
        let (mut common, mut dlogits) = (row()?, row()?);
        let mut unread = back.pass.empty(DType::Fp32, &[rows, self.value_dim])?;
        let numbers: Vec<i32> = (0..rows as i32).collect();
        let ones = typed!(heads.dtype() => A, Tensor::new(vec![A::narrow(1.0); rows], &[rows, 1])?);
        let inputs = [
            ("x", heads.view_as(&[rows, self.value_dim])?),
            ("row", TensorRef::new(&numbers, &[rows, 1])?),
            ("weight", ones.view()),
            ("dy", dheads.view_as(&[rows, self.value_dim])?),
        ];
        let outputs = [("dx", unread.view_mut()), ("dweight", common.view_mut())];
        back.pass.op("combine_backward", &Attributes::new(), &inputs, outputs)?;
        let less = back.pass.scaled(&Attributes::new().with("factor", -1.0), &common)?;
        let w = sinks.w.as_slice::<f32>().expect("it is f32, and on the host");
        let logits: Vec<f32> = w.iter().copied().cycle().take(rows).collect();
        let (none, zeros) = (vec![-1i32; rows], vec![0f32; rows]);
        let inputs = [
            ("logits", TensorRef::new(&logits, &[rows, 1])?),
            ("target", TensorRef::new(&none, &[rows])?),
            ("lse", lse.view_as(&[rows])?),
            ("dlogprob", TensorRef::new(&zeros, &[rows])?),
            ("dlse", less.view_as(&[rows])?),
        ];
        back.pass.op("logprob_backward", &Attributes::new(), &inputs, [("dlogits", dlogits.view_mut())])?;
        let of = (Of::whole(&sinks.name), None, count);
        back.add_vector(["token_sum", "sum"], &Attributes::new(), of, &[("x", dlogits.view_as(&[n, count])?)], mask)
    }
}
