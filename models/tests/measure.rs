use samebits_models::*;
use samebits_ops::Cpu;
use std::path::Path;
#[test]
fn measure() {
    for name in ["qwen3-adder", "qwen2", "llama"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
        let b = std::fs::read(dir.join("reference.safetensors")).unwrap();
        let st = safetensors::SafeTensors::deserialize(&b).unwrap();
        let tok: Vec<i32> = st
            .tensor("tokens")
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|c| i32::from_le_bytes(c.try_into().unwrap()))
            .collect();
        let r: Vec<f32> = st
            .tensor("logits.fp32")
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
            .collect();
        let t: Vec<f32> = st
            .tensor("logits.bf16")
            .unwrap()
            .data()
            .chunks_exact(2)
            .map(|c| f32::from_bits((u16::from_le_bytes(c.try_into().unwrap()) as u32) << 16))
            .collect();
        let err = |x: &[f32]| {
            let d: Vec<f64> = x.iter().zip(&r).map(|(a, b)| (*a as f64 - *b as f64).abs()).collect();
            ((d.iter().map(|x| x * x).sum::<f64>() / d.len() as f64).sqrt(), d.iter().cloned().fold(0., f64::max))
        };
        let cpu = Cpu::best();
        let big = r.iter().fold(0f32, |a, b| a.max(b.abs()));
        let th = err(&t);
        for p in [Precision::Bf16, Precision::Fp32] {
            let m = Model::load(&dir, p, &cpu).unwrap();
            let l = m.forward(&cpu, &tok, 2, 40, Schedule::Prefill, Grouping::Together).unwrap();
            let e = err(&l);
            println!(
                "{name} {p:?} rms {:.3e} ({:.3} of hf {:.3e}) max {:.3e} ({:.3} of hf {:.3e}) rel-to-largest {:.2e}",
                e.0,
                e.0 / th.0,
                th.0,
                e.1,
                e.1 / th.1,
                th.1,
                e.1 / big as f64
            );
        }
    }
}
