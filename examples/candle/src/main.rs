//! Prints how many logits of a model change when a sequence is in a batch instead of alone, with each kind of ops.

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::qwen3::ModelForCausalLM;
use samebits_candle::qwen3::{ADDER, Model, Ops, load};
use samebits_candle::{Forward, together_and_alone};
use samebits_ops::Cpu;
use std::path::Path;

fn main() -> Result<()> {
    let (config, weights) = load(Path::new(ADDER), DType::F32)?;
    let mut original = ModelForCausalLM::new(&config, weights.clone())?;
    let mut candle = Model::new(&config, &weights, Ops::Candle)?;
    let mut samebits = Model::new(&config, &weights, Ops::Samebits(Cpu::best()))?;
    let mut of_original = |tokens: &Tensor, offset| {
        if offset == 0 {
            original.clear_kv_cache();
        }
        original.forward(tokens, offset)
    };
    let mut of_candle = |tokens: &Tensor, offset| candle.forward(tokens, offset);
    let mut of_samebits = |tokens: &Tensor, offset| samebits.forward(tokens, offset);

    println!(
        "Logits that are others in the batch than alone, of all (the largest difference). `12 + 1`: behind a prompt"
    );
    println!("of 12 tokens and a step of one.\n");
    println!("sequences    tokens   candle-transformers        candle's ops      samebits' ops");
    for (rows, prompt, steps) in [(8, 12, 0), (2, 12, 1), (3, 12, 1), (8, 12, 1), (16, 12, 1), (8, 1, 20)] {
        let length = prompt + steps;
        let tokens = Tensor::from_iter((0..(rows * length) as u32).map(|i| 3 + i * i * 7 % 29), &Device::Cpu)?;
        let tokens = tokens.reshape((rows, length))?;
        print!("{rows:>9}  {:>8}", format!("{prompt} + {steps}"));
        let forwards: [Forward; 3] = [&mut of_original, &mut of_candle, &mut of_samebits];
        for forward in forwards {
            let (together, alone) = together_and_alone(&tokens, prompt, forward)?;
            let pairs = || together.iter().zip(&alone);
            let changed = pairs().filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            let largest = pairs().map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            print!("  {:>18}", format!("{changed} of {} ({largest:.0e})", together.len()));
        }
        println!();
    }
    Ok(())
}
