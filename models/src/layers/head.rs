//! The output projection: from the last norm to logits, or to log-probabilities and back.

use super::linear::Linear;
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::typed;
use crate::pass::Pass;
use crate::sampling::Stretch;
use crate::sums::Of;
use samebits_ops::{
    Attributes, Cpu, DType, LinearLogprob, LogprobGradients, LogprobRows, Tensor, TensorRef, linear_logprob_backward,
    linear_logprob_backward_packed,
};
use std::ops::Range;

/// Log-probabilities of rows' targets, and what their gradient needs: each `[n]`, in f32.
pub(crate) struct Logprobs {
    pub logprob: Tensor,
    pub lse: Tensor,
    /// Of the distributions that rows have.
    pub entropy: Option<Tensor>,
    /// How they were made.
    pub stretches: Vec<Stretch>,
}

/// What is done to logits behind the projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finish {
    /// They are bent below a soft limit.
    Softcap(f64),
    /// They are multiplied by a factor.
    Scale(f64),
}

/// The output projection, and what is done to its logits.
pub(crate) struct Head {
    pub linear: Linear,
    finish: Option<(Finish, Attributes)>,
}

impl Head {
    pub fn new(linear: Linear, finish: Option<Finish>) -> Head {
        let attributes = |finish| match finish {
            Finish::Softcap(cap) => Attributes::new().with("cap", cap),
            Finish::Scale(factor) => Attributes::new().with("factor", factor),
        };
        Head { linear, finish: finish.map(|finish| (finish, attributes(finish))) }
    }

    /// Whether logits are the product as it is.
    fn is_product(&self) -> bool {
        self.finish.is_none() && self.linear.bias(0).is_none()
    }

    /// `a[rows,hidden]` to logits `[rows,V]`.
    pub fn logits(&self, pass: &mut Pass, a: TensorRef) -> Result<Tensor, ModelError> {
        let logits = self.linear.apply(pass, a, DType::Fp32)?;
        Ok(self.finished(pass, &logits)?.unwrap_or(logits))
    }

    /// What is made of logits behind the projection, where anything is.
    fn finished(&self, pass: &mut Pass, logits: &Tensor) -> Result<Option<Tensor>, ModelError> {
        let Some((finish, attributes)) = &self.finish else { return Ok(None) };
        let mut y = pass.empty(DType::Fp32, logits.shape())?;
        let op = if matches!(finish, Finish::Softcap(_)) { "softcap" } else { "scale" };
        pass.op(op, attributes, &[("x", logits.view())], [("y", y.view_mut())])?;
        Ok(Some(y))
    }

    /// From `dy` of that: the gradient of the logits of the projection, as its product reads it.
    fn finished_backward(&self, back: &mut Backward, logits: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Some((finish, attributes)) = &self.finish else { return back.rounded(dy.view()) };
        let mut dlogits = back.pass.empty(back.pass.dtype, logits.shape())?;
        let (x, out) = (("x", logits.view()), dlogits.view_mut());
        match finish {
            Finish::Softcap(_) => {
                back.pass.op("softcap_backward", attributes, &[x, ("dy", dy.view())], [("dx", out)])?;
            }
            Finish::Scale(_) => back.pass.op("scale", attributes, &[("x", dy.view())], [("y", out)])?,
        }
        Ok(dlogits)
    }

    /// `a[n,hidden]` to the log-probabilities of `targets`, +0 for a target that is negative, and what their gradient needs;
    /// with entropies on demand. `stretches` are all rows, in their order.
    pub fn logprob(
        &self,
        pass: &mut Pass,
        a: &Tensor,
        targets: &[i32],
        (cpu, stretches): (&Cpu, Vec<Stretch>),
        with_entropy: bool,
    ) -> Result<Logprobs, ModelError> {
        let n = targets.len();
        let (mut logprob, mut lse) = (pass.empty(DType::Fp32, &[n])?, pass.empty(DType::Fp32, &[n])?);
        if let [Stretch { temperature, text: None, .. }] = stretches[..]
            && self.is_product()
            && !with_entropy
        {
            let at = Attributes::new().with("temperature", temperature);
            let inputs = [("x", a.view()), ("w", self.linear.matrix(0)), ("target", TensorRef::new(targets, &[n])?)];
            let outputs = [("logprob", logprob.view_mut()), ("lse", lse.view_mut())];
            pass.op("linear_logprob", &at, &inputs, outputs)?;
            return Ok(Logprobs { logprob, lse, entropy: None, stretches });
        }
        let mut entropy = if with_entropy { Some(pass.empty(DType::Fp32, &[n])?) } else { None };
        for (rows, stretch) in tiles(&stretches) {
            let logits = self.logits(pass, a.rows(rows.clone()))?;
            let (truncated, at) = (stretch.truncated(cpu, &rows, &logits)?, stretch.attributes());
            let drawn_from = truncated.as_ref().unwrap_or(&logits);
            let target = TensorRef::new(&targets[rows.clone()], &[rows.len()])?;
            let outputs = [("logprob", logprob.rows_mut(rows.clone())), ("lse", lse.rows_mut(rows.clone()))];
            pass.op("logprob", &at, &[("logits", drawn_from.view()), ("target", target)], outputs)?;
            if let Some(entropy) = &mut entropy {
                // It makes the same lse.
                let outputs = [("entropy", entropy.rows_mut(rows.clone())), ("lse", lse.rows_mut(rows))];
                pass.op("entropy", &at, &[("logits", drawn_from.view())], outputs)?;
            }
        }
        Ok(Logprobs { logprob, lse, entropy, stretches })
    }

    /// From `dlogprob[n]` and, where there are entropies, theirs: that of a, in f32.
    pub fn logprob_backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        targets: &[i32],
        of_rows: &Logprobs,
        (dlogprob, dentropy): (&Tensor, Option<&Tensor>),
    ) -> Result<Tensor, ModelError> {
        let (lse, head) = (&of_rows.lse, &self.linear);
        let mut da = back.pass.empty(DType::Fp32, a.shape())?;
        // The op of the whole would make the gradient of the matrix.
        let whole = match of_rows.stretches[..] {
            [Stretch { temperature, text: None, .. }]
                if self.is_product() && dentropy.is_none() && !back.sums.frozen =>
            {
                Some(temperature)
            }
            _ => None,
        };
        if let Some(temperature) = whole {
            self.product_backward(back, a, targets, of_rows, (dlogprob, temperature), &mut da)?;
        } else {
            for (rows, stretch) in tiles(&of_rows.stretches) {
                // The logits of a few rows at a time: a chain over tokens goes on from tile to tile.
                let few = rows.len();
                let of_logits = stretch.attributes();
                let logits = head.apply(&mut back.pass, a.rows(rows.clone()), DType::Fp32)?;
                let finished = self.finished(&mut back.pass, &logits)?;
                let finished = finished.as_ref().unwrap_or(&logits);
                let truncated = stretch.truncated(back.cpu, &rows, finished)?;
                let drawn_from = truncated.as_ref().unwrap_or(finished);
                let mut dfinished = back.pass.empty(DType::Fp32, logits.shape())?;
                let inputs = [
                    ("logits", drawn_from.view()),
                    ("target", TensorRef::new(&targets[rows.clone()], &[few])?),
                    ("lse", lse.rows(rows.clone())),
                    ("dlogprob", dlogprob.rows(rows.clone())),
                ];
                back.pass.op("logprob_backward", &of_logits, &inputs, [("dlogits", dfinished.view_mut())])?;
                dfinished = stretch.truncated_backward(back.cpu, &rows, finished, dfinished)?;
                if let (Some(entropy), Some(dentropy)) = (&of_rows.entropy, dentropy) {
                    let mut more = back.pass.empty(DType::Fp32, logits.shape())?;
                    let inputs = [
                        ("logits", drawn_from.view()),
                        ("entropy", entropy.rows(rows.clone())),
                        ("lse", lse.rows(rows.clone())),
                        ("dentropy", dentropy.rows(rows.clone())),
                    ];
                    back.pass.op("entropy_backward", &of_logits, &inputs, [("dlogits", more.view_mut())])?;
                    let more = stretch.truncated_backward(back.cpu, &rows, finished, more)?;
                    dfinished = back.sum(dfinished, more)?;
                }
                let (x, mask) = (a.rows(rows.clone()), &back.mask[rows.clone()]);
                if head.bias(0).is_some() {
                    // Nothing else is done to the logits then.
                    back.add_bias(head.source(0), dfinished.view(), mask)?;
                }
                let dlogits = self.finished_backward(back, &logits, &dfinished)?;
                back.add_matrix(head.source(0), x, dlogits.view(), mask)?;
                let dx = head.input_gradient(back, 0, dlogits.view(), DType::Fp32)?;
                back.write_rows(&dx, &mut da, rows.start)?;
            }
        }
        back.see_at(None, "dfinal_norm", &mut da)?;
        Ok(da)
    }
    /// The same where logits are the product as it is, over one temperature: by the op of the whole.
    fn product_backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        targets: &[i32],
        of_rows: &Logprobs,
        (dlogprob, temperature): (&Tensor, f64),
        da: &mut Tensor,
    ) -> Result<(), ModelError> {
        let (lse, head) = (&of_rows.lse, &self.linear);
        let (source, rows) = (head.source(0), targets.len());
        let shape = LinearLogprob { rows, vocab: head.matrix(0).shape()[0], k: a.shape()[1], temperature };
        let dw = back.sums.matrix(back.cpu, Of::matrix(source), Some(source), [shape.vocab, shape.k])?;
        let [lse, dlogprob] = [lse, dlogprob].map(|rows| rows.as_slice::<f32>().expect("f32, and on the host"));
        let gradients = LogprobGradients { dlogprob, dlse: None };
        let rows = LogprobRows { target: targets, lse, gradients, mask: Some(back.mask) };
        let dx = da.as_slice_mut::<f32>().expect("f32, and on the host");
        typed!(a.dtype() => A, {
            let x = a.as_slice::<A>().expect("of this dtype, and on the host");
            match head.packed(0) {
                Some(w) => linear_logprob_backward_packed(back.cpu, &shape, x, w, &rows, dx, dw)?,
                None => {
                    let w = head.matrix(0).contiguous::<A>().expect("gradients are made on the processor");
                    linear_logprob_backward(back.cpu, &shape, x, w, &rows, dx, dw)?;
                }
            }
        });
        Ok(())
    }
}

/// Rows of logits that are there at a time.
const TILE: usize = 256;

/// Rows a tile at a time, each of one stretch.
fn tiles(stretches: &[Stretch]) -> impl Iterator<Item = (Range<usize>, &Stretch)> {
    let of = |stretch: &'_ Stretch| {
        let Range { start, end } = stretch.rows;
        (start..end).step_by(TILE).map(move |first| first..end.min(first + TILE))
    };
    stretches.iter().flat_map(move |stretch| of(stretch).map(move |rows| (rows, stretch)))
}

impl Stretch {
    /// What turns the logits that tokens are drawn from to log-probabilities.
    fn attributes(&self) -> Attributes {
        // Those of a text are over its temperature already.
        let temperature = if self.text.is_some() { 1.0 } else { self.temperature };
        Attributes::new().with("temperature", temperature)
    }

    /// Of the logits of some of the rows those that tokens are drawn from, where they are others.
    fn truncated(&self, cpu: &Cpu, rows: &Range<usize>, logits: &Tensor) -> Result<Option<Tensor>, ModelError> {
        let Some(text) = &self.text else { return Ok(None) };
        text.truncated(cpu, self.places(rows), logits).map(Some)
    }

    /// From the gradient of those that of the logits.
    fn truncated_backward(
        &self,
        cpu: &Cpu,
        rows: &Range<usize>,
        logits: &Tensor,
        dy: Tensor,
    ) -> Result<Tensor, ModelError> {
        match &self.text {
            None => Ok(dy),
            Some(text) => text.truncated_backward(cpu, self.places(rows), logits, &dy),
        }
    }

    /// The places of some of the rows among all.
    fn places(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start - self.rows.start..rows.end - self.rows.start
    }
}
