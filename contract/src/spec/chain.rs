//! `chain`: whole models. Their reference is recorded, not computed here.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::chain::OP,
    class: Class::Chain,
    fills: &[Fill::Recorded, Fill::Normal],
    table: include_str!("../../ops/chain.toml"),
    make,
    compute: |_| BTreeMap::new(),
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    drawn(maker, SPEC.op)
}

/// Everything that the program takes, drawn: integers below their axis, and floats. Or nothing at all: what is recorded is put
/// in by whoever holds the checkpoint.
pub(super) fn drawn(maker: &Maker, program: &Op) -> BTreeMap<String, Tensor> {
    if maker.fill == Fill::Recorded {
        return BTreeMap::new();
    }
    let mut inputs = BTreeMap::new();
    for input in program.inputs.iter().filter(|input| !input.optional || maker.has(input.name)) {
        let shape = input.shape(|axis| maker.dim(axis), &[]);
        let (name, len) = (input.name, shape.iter().product());
        let tensor = match input.holds {
            Holds::Floats => {
                let values = maker.values(name, maker.fill, len, shape.last().copied().unwrap_or(1));
                fill::input(input.dtype_beside(maker.dtype), &shape, &values)
            }
            Holds::Below(axis) => Tensor::i32(&shape, maker.ints(name, maker.below(name, len, maker.dim(axis)))),
            holds => panic!("{}: `{name}` is {holds:?}, which no program has been asked with yet", maker.key),
        };
        inputs.insert(name.to_string(), tensor);
    }
    inputs
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use samebits_schema::{Input, Role};

    /// Drawn are the inputs that a program declares, by their names, axes and dtypes, and no others.
    pub(crate) fn inputs_are_drawn_as_the_program_declares_them() {
        const TOKENS: Input = samebits_schema::chain::OP.inputs[0];
        const FLOATS: Input = Input { role: Role::Activation, holds: Holds::Floats, dtypes: &DType::FLOATS, ..TOKENS };
        static DENOISER: Op = Op {
            inputs: &[
                Input { name: "latents", axes: &["B", "C", "H"], ..FLOATS },
                Input { name: "timesteps", axes: &["B"], dtypes: &[DType::Fp32], ..FLOATS },
                Input { name: "prompt", axes: &["B", "S"], optional: true, ..TOKENS },
            ],
            ..samebits_schema::chain::OP
        };
        let mut shape: BTreeMap<String, usize> =
            [("B", 2), ("C", 3), ("H", 5), ("S", 7), ("V", 4)].map(|(axis, extent)| (axis.to_string(), extent)).into();
        let (ints, params) = (BTreeMap::new(), BTreeMap::new());
        let of = |shape: &BTreeMap<String, usize>, fill: Fill| {
            drawn(&Maker { key: "chain", dtype: DType::Bf16, fill, shape, ints: &ints, params: &params }, &DENOISER)
        };
        let forms = |inputs: &BTreeMap<String, Tensor>| -> Vec<(String, DType, Vec<usize>)> {
            inputs.iter().map(|(name, tensor)| (name.clone(), tensor.dtype(), tensor.shape().to_vec())).collect()
        };
        let floats = [("latents".into(), DType::Bf16, vec![2, 3, 5]), ("timesteps".into(), DType::Fp32, vec![2])];
        assert_eq!(forms(&of(&shape, Fill::Normal)), floats);
        shape.insert("prompt".into(), 1);
        let inputs = of(&shape, Fill::Normal);
        let prompt = inputs["prompt"].as_i32().unwrap();
        assert_eq!((inputs.len(), prompt.len()), (3, 14));
        assert!(prompt.iter().all(|token| (0..4).contains(token)) && prompt.contains(&3), "{prompt:?}");
        assert!(of(&shape, Fill::Recorded).is_empty());
    }
}
