//! Calls that come again: each form is checked once.

use crate::call::{Backend, form};
use crate::{Error, TensorMut, TensorRef};
use samebits_schema::{Attributes, Call, DType};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Calls that are repeated: the form of each is checked when it comes for the first time.
///
/// ```
/// use samebits_ops::{Attributes, Calls, Cpu, Tensor};
///
/// let (x, mut y) = (Tensor::new(vec![1.0f32, 2.0], &[2])?, Tensor::new(vec![0.0f32; 2], &[2])?);
/// let (mut calls, twice) = (Calls::default(), Attributes::new().with("factor", 2.0));
/// for _ in 0..3 {
///     calls.run(&Cpu::best(), "scale", &twice, &[("x", x.view())], vec![("y", y.view_mut())])?;
/// }
/// assert_eq!(y.as_slice::<f32>(), Some(&[2.0, 4.0][..]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
#[derive(Default)]
pub struct Calls {
    /// By the hash of what a call is made of. Where two forms have the same, the later one takes the place.
    checked: HashMap<u64, Checked, BuildHasherDefault<Mix>>,
    /// How many calls were made.
    made: u64,
}

/// A call, what it was made of, and when it was last made.
struct Checked {
    call: Call,
    attributes: Attributes,
    tensors: Vec<(String, DType, Vec<usize>)>,
    made: u64,
}

/// Of more forms than this, the one is forgotten that was called longest ago.
const MOST_CALLS: usize = 512;

impl Calls {
    /// [`Backend::call`], with less to check where a call of this form was made before.
    ///
    /// # Errors
    /// As [`Backend::call`].
    pub fn run(
        &mut self,
        backend: &dyn Backend,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: Vec<(&str, TensorMut)>,
    ) -> Result<(), Error> {
        let key = hash(op, attributes, inputs, &outputs);
        self.run_by(key, backend, op, attributes, inputs, outputs)
    }

    /// The same by a hash. It says where to look, not what is there: that is compared.
    fn run_by(
        &mut self,
        key: u64,
        backend: &dyn Backend,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: Vec<(&str, TensorMut)>,
    ) -> Result<(), Error> {
        let known = self.checked.get(&key);
        if !known.is_some_and(|checked| checked.is_of(op, attributes, inputs, &outputs)) {
            let call = form(op, attributes.clone(), inputs, &outputs)?;
            if known.is_none() && self.checked.len() >= MOST_CALLS {
                let oldest = self.checked.iter().min_by_key(|(_, checked)| checked.made).map(|(key, _)| *key);
                oldest.map(|oldest| self.checked.remove(&oldest));
            }
            let given = forms(inputs, &outputs);
            let tensors = given.map(|(name, dtype, shape)| (name.into(), dtype, shape.into())).collect();
            self.checked.insert(key, Checked { call, attributes: attributes.clone(), tensors, made: 0 });
        }
        self.made += 1;
        let checked = self.checked.get_mut(&key).expect("it was there or was put there");
        checked.made = self.made;
        backend.run(&checked.call, inputs, outputs)
    }
}

impl Checked {
    /// Whether a call has the form that this one has.
    fn is_of(
        &self,
        op: &str,
        attributes: &Attributes,
        inputs: &[(&str, TensorRef)],
        outputs: &[(&str, TensorMut)],
    ) -> bool {
        let tensors = self.tensors.iter().map(|(name, dtype, shape)| (&name[..], *dtype, &shape[..]));
        self.call.op.name == op && tensors.eq(forms(inputs, outputs)) && self.attributes == *attributes
    }
}

/// Name, dtype and shape of every tensor of a call.
fn forms<'f>(
    inputs: &'f [(&str, TensorRef)],
    outputs: &'f [(&str, TensorMut)],
) -> impl Iterator<Item = (&'f str, DType, &'f [usize])> {
    let inputs = inputs.iter().map(|(name, tensor)| (*name, tensor.dtype(), tensor.shape()));
    inputs.chain(outputs.iter().map(|(name, tensor)| (*name, tensor.dtype(), tensor.shape())))
}

/// Of all that [`Checked::is_of`] compares.
fn hash(op: &str, attributes: &Attributes, inputs: &[(&str, TensorRef)], outputs: &[(&str, TensorMut)]) -> u64 {
    let mut mix = Mix::default();
    op.hash(&mut mix);
    attributes.hash(&mut mix);
    forms(inputs, outputs).for_each(|form| form.hash(&mut mix));
    mix.finish()
}

/// A hash for what a program says of itself: a multiplication to eight bytes. Who makes it collide on purpose loses the time
/// of the check and nothing else.
#[derive(Default)]
struct Mix(u64);

impl Mix {
    fn word(&mut self, word: u64) {
        // 2^64 by the golden ratio, odd.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.word(byte.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.word(word);
    }

    fn write_usize(&mut self, word: usize) {
        self.word(word as u64);
    }

    fn finish(&self) -> u64 {
        // A table looks at the lowest bits, which no multiplication has brought anything from above.
        self.0 ^ self.0 >> 32
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::backend::device::Graph;
    use crate::tensor::{Prepared, Tensor};
    use std::cell::RefCell;

    /// Runs nothing, and remembers the calls.
    #[derive(Default)]
    struct Recorder(RefCell<Vec<Call>>);

    impl Recorder {
        /// The factor and the number of elements of the last call.
        fn last(&self) -> (f64, usize) {
            let calls = self.0.borrow();
            let call = calls.last().expect("there was one");
            (call.float("factor"), call.dims.rest.iter().product())
        }
    }

    impl Backend for Recorder {
        fn empty(&self, _: DType, _: &[usize]) -> Result<Tensor, Error> {
            unimplemented!()
        }

        fn upload(&self, _: TensorRef) -> Result<Tensor, Error> {
            unimplemented!()
        }

        fn download(&self, _: TensorRef) -> Result<Tensor, Error> {
            unimplemented!()
        }

        fn capture(&self, _: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error> {
            unimplemented!()
        }

        fn replay(&self, _: &Graph) -> Result<(), Error> {
            unimplemented!()
        }

        fn run(&self, call: &Call, _: &[(&str, TensorRef)], _: Vec<(&str, TensorMut)>) -> Result<(), Error> {
            self.0.borrow_mut().push(call.clone());
            Ok(())
        }

        fn prepare(&self, _: &Call, _: &[(&str, TensorRef)]) -> Result<Option<Prepared>, Error> {
            unimplemented!()
        }
    }

    /// Calls `scale` of so many elements, by a hash where one is given, and looks at the call that the backend gets.
    fn scale(calls: &mut Calls, key: Option<u64>, factor: f64, elements: usize) {
        let (x, mut y) = (vec![1f32; elements], vec![0f32; elements]);
        let (backend, attributes) = (Recorder::default(), Attributes::new().with("factor", factor));
        let inputs = [("x", TensorRef::new(&x, &[elements]).unwrap())];
        let outputs = vec![("y", TensorMut::new(&mut y, &[elements]).unwrap())];
        let key = key.unwrap_or_else(|| hash("scale", &attributes, &inputs, &outputs));
        calls.run_by(key, &backend, "scale", &attributes, &inputs, outputs).unwrap();
        let (found, extent) = backend.last();
        assert_eq!((found.to_bits(), extent), (factor.to_bits(), elements));
    }

    pub(crate) fn forms_of_one_hash_are_told_apart() {
        let mut calls = Calls::default();
        for round in 0..3 {
            for (factor, elements) in [(1.0, 1), (2.0, 1), (2.0, 3), (0.0, 3), (-0.0, 3)] {
                scale(&mut calls, Some(7), factor, elements);
                assert_eq!(calls.checked.len(), 1, "{round}");
            }
        }
    }

    pub(crate) fn what_was_called_longest_ago_is_forgotten() {
        let mut calls = Calls::default();
        let made = |calls: &Calls, extent: usize| calls.checked.values().any(|c| c.call.dims.rest == [extent]);
        for elements in 1..=MOST_CALLS {
            scale(&mut calls, None, 1.0, elements);
        }
        assert_eq!(calls.checked.len(), MOST_CALLS, "no two of them have one hash");
        scale(&mut calls, None, 1.0, 1);
        scale(&mut calls, None, 1.0, MOST_CALLS + 1);
        assert_eq!(calls.checked.len(), MOST_CALLS);
        assert!(made(&calls, 1) && !made(&calls, 2) && made(&calls, 3) && made(&calls, MOST_CALLS + 1));
    }

    pub(crate) fn a_refused_call_takes_no_place() {
        let (mut calls, backend, x) = (Calls::default(), Recorder::default(), [1f32]);
        let refused = calls.run(&backend, "scale", &Attributes::new(), &[("z", TensorRef::of(&x, &[1]))], vec![]);
        assert!(refused.is_err() && calls.checked.is_empty());
    }
}
