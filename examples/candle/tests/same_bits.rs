//! A model gives the same bits alone and in a batch with samebits' ops, and with candle's it does not.

use candle_core::{DType, Device, Tensor};
use candle_transformers::models::qwen3::ModelForCausalLM;
use samebits_candle::qwen3::{ADDER, Model, Ops, load};
use samebits_candle::together_and_alone;
use samebits_ops::Cpu;
use std::path::Path;

const BATCHES: [usize; 5] = [2, 3, 5, 8, 16];
const LENGTHS: [usize; 4] = [1, 2, 13, 40];

/// Tokens of `length` that go in at once, before the others go in one by one.
fn prompts(length: usize) -> impl Iterator<Item = usize> {
    [length, length.div_ceil(2).max(length.saturating_sub(3))].into_iter().take(length.min(2))
}

/// `rows` sequences, which begin at the `first` of an endless row of different ones: two batches have the same ones at
/// different places.
fn batch(first: usize, rows: usize, length: usize) -> Tensor {
    let token = |row: usize, t: usize| ((row * 31 + t * t * 7 + row * t) % 29 + 3) as u32;
    let tokens = (first..first + rows).flat_map(|row| (0..length).map(move |t| token(row, t)));
    Tensor::from_iter(tokens, &Device::Cpu).unwrap().reshape((rows, length)).unwrap()
}

fn model(dtype: DType, ops: Ops) -> Model {
    let (config, weights) = load(Path::new(ADDER), dtype).unwrap();
    Model::new(&config, &weights, ops).unwrap()
}

fn original(dtype: DType) -> ModelForCausalLM {
    let (config, weights) = load(Path::new(ADDER), dtype).unwrap();
    ModelForCausalLM::new(&config, weights).unwrap()
}

fn samebits() -> Ops {
    Ops::Samebits(Cpu::best())
}

/// Bits of a tensor of any of the dtypes: all their values are f32s.
fn bits(x: &Tensor) -> Vec<u32> {
    let values = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn differing(together: &[f32], alone: &[f32]) -> usize {
    assert_eq!(together.len(), alone.len());
    together.iter().zip(alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}

#[test]
fn alone_is_together_with_samebits() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut model = model(dtype, samebits());
        for length in LENGTHS {
            for (place, rows) in BATCHES.into_iter().enumerate() {
                let tokens = batch(place * 3, rows, length);
                for prompt in prompts(length) {
                    let mut forward = |x: &Tensor, offset| model.forward(x, offset);
                    let (together, alone) = together_and_alone(&tokens, prompt, &mut forward).unwrap();
                    assert!(together.iter().all(|logit| logit.is_finite()));
                    let what = format!("{dtype:?}, {rows} sequences of {prompt} of {length} tokens");
                    assert_eq!(differing(&together, &alone), 0, "{what}");
                }
            }
        }
    }
}

/// One sequence at every place of a batch, whose other sequences change.
#[test]
fn the_place_in_a_batch_is_not_seen() {
    let mut model = model(DType::F32, samebits());
    let alone = bits(&model.forward(&batch(20, 1, 13), 0).unwrap());
    for place in 0..8 {
        let together = model.forward(&batch(20 - place, 8, 13), 0).unwrap();
        assert!(bits(&together.get(place).unwrap()) == alone, "place {place}");
    }
}

/// The cache is seen no more than the batch: token by token, in chunks, or all at once.
#[test]
fn decoding_is_prefill_with_samebits() {
    let mut model = model(DType::F32, samebits());
    let tokens = batch(0, 5, 17);
    let whole = bits(&model.forward(&tokens, 0).unwrap());
    let first = model.forward(&tokens.narrow(1, 0, 1).unwrap(), 0).unwrap();
    let mut last = first;
    for t in 1..17 {
        last = model.forward(&tokens.narrow(1, t, 1).unwrap(), t).unwrap();
    }
    assert!(bits(&last) == whole, "token by token");
    model.forward(&tokens.narrow(1, 0, 6).unwrap(), 0).unwrap();
    assert!(bits(&model.forward(&tokens.narrow(1, 6, 11).unwrap(), 6).unwrap()) == whole, "in chunks");
}

/// Without this, the tests above would show nothing of the ops.
#[test]
fn alone_is_not_together_with_candle() {
    for dtype in [DType::F32, DType::F16] {
        let (mut model, mut original) = (model(dtype, Ops::Candle), original(dtype));
        let mut changed = [0, 0];
        for length in LENGTHS {
            for rows in BATCHES {
                let tokens = batch(0, rows, length);
                for prompt in prompts(length) {
                    let mut forward = |x: &Tensor, offset| model.forward(x, offset);
                    let (together, alone) = together_and_alone(&tokens, prompt, &mut forward).unwrap();
                    changed[0] += differing(&together, &alone);
                    let mut forward = |x: &Tensor, offset| {
                        if offset == 0 {
                            original.clear_kv_cache();
                        }
                        original.forward(x, offset)
                    };
                    let (together, alone) = together_and_alone(&tokens, prompt, &mut forward).unwrap();
                    changed[1] += differing(&together, &alone);
                }
            }
        }
        println!("{dtype:?}: {} logits change with candle's ops, {} of candle-transformers", changed[0], changed[1]);
        assert!(
            !changed.contains(&0),
            "{dtype:?}: no bit changes with candle's ops, {changed:?}: that samebits' are the same shows nothing here"
        );
    }
}

/// What stands for candle-transformers' model is that model, to the bit.
#[test]
fn with_candle_s_ops_it_is_the_model_of_candle_transformers() {
    for dtype in [DType::F32, DType::F16] {
        let (mut model, mut original) = (model(dtype, Ops::Candle), original(dtype));
        for (rows, length) in [(1, 1), (1, 13), (3, 13), (8, 40)] {
            let tokens = batch(0, rows, length);
            original.clear_kv_cache();
            let expected = original.forward(&tokens, 0).unwrap();
            let found = model.forward(&tokens, 0).unwrap();
            assert_eq!(found.dims(), expected.dims());
            assert!(bits(&found) == bits(&expected), "{dtype:?}, {rows} of {length}");
            // And goes on with its cache.
            let next = batch(50, rows, 1);
            let expected = original.forward(&next, length).unwrap();
            let found = model.forward(&next, length).unwrap();
            assert!(bits(&found) == bits(&expected), "{dtype:?}, {rows} behind {length}");
        }
    }
}

/// The same model, not another one: both kinds of ops agree but for rounding.
#[test]
fn both_kinds_of_ops_say_the_same() {
    let tokens = batch(0, 8, 40);
    let [ours, candle] = [samebits(), Ops::Candle].map(|ops| model(DType::F32, ops).forward(&tokens, 0).unwrap());
    let most = (ours - &candle).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    let scale = candle.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    println!("largest difference {most:e} of {scale}");
    assert!(most > 0.0 && most < 1e-4 * scale, "{most:e} of {scale}");
}
