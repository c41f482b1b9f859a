//! Time of every op on this machine's best instruction set and all its cores: `cargo bench -p samebits-ops`, or with a
//! name for one of them. Throughput is in multiply-adds or bytes. A benchmark that has the name of a workload in
//! harness/workloads.toml has its shapes as well: ci/bench holds the two to the same times.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use samebits_ops::*;
use std::hint::black_box;
use std::ops::Deref;

/// Values that begin on the border of a cache line, as the inputs of `measure --workloads` do.
struct Values {
    room: Vec<bf16>,
    from: usize,
}

impl Deref for Values {
    type Target = [bf16];

    fn deref(&self) -> &[bf16] {
        &self.room[self.from..]
    }
}

/// Values in [-1, 1) that never repeat soon.
fn values(len: usize, seed: u64) -> Values {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / 8_388_608.0 - 1.0)
    };
    let mut room = Vec::<bf16>::with_capacity(len + 32);
    let from = room.as_ptr().align_offset(64).min(32);
    room.resize(from, bf16::ZERO);
    room.extend((0..len).map(|_| next()));
    Values { room, from }
}

fn gemm(c: &mut Criterion) {
    let cpu = Cpu::best();
    let mut group = c.benchmark_group("gemm");
    for (m, n, k) in [(1, 4096, 4096), (16, 4096, 4096), (128, 2048, 8192), (1024, 1024, 1024)] {
        let (x, w) = (values(m * k, 1), values(n * k, 2));
        let packed = PackedWeight::pack(&cpu, n, k, &w).expect("shapes match");
        let mut y = vec![bf16::ZERO; m * n];
        group.throughput(Throughput::Elements((m * n * k) as u64));
        group.bench_function(format!("{m}x{n}x{k}"), |b| {
            b.iter(|| {
                gemm_packed(&cpu, &Gemm::new(m, n, k), black_box(&x), &packed, None, &mut y).expect("shapes match")
            });
        });
    }
}

fn attention_op(c: &mut Criterion) {
    let cpu = Cpu::best();
    for (group, name, [batch, queries, keys, q_heads, kv_heads, dim]) in [
        ("prefill", "b4h8s1024d64", [4, 1024, 1024, 8, 8, 64]),
        ("decode", "b1h32g8s4096d128", [1, 1, 4096, 32, 8, 128]),
    ] {
        let shape = Attention::causal([batch, queries, keys], [q_heads, kv_heads], dim);
        let q = values(batch * queries * q_heads * dim, 1);
        let (k, v) = (values(batch * keys * kv_heads * dim, 2), values(batch * keys * kv_heads * dim, 3));
        let q_pos: Vec<i32> = (0..batch).flat_map(|_| (keys - queries) as i32..keys as i32).collect();
        let kv_len = vec![keys as i32; batch];
        let (mut out, mut lse) = (vec![bf16::ZERO; q.len()], vec![0f32; batch * queries * q_heads]);
        let mut group = c.benchmark_group(group);
        group.throughput(Throughput::Bytes(4 * (batch * keys * kv_heads * dim) as u64));
        // The same keys in pages of 16, the last page first.
        let table: Vec<i32> = (0..(batch * keys / 16) as i32).rev().collect();
        let padded = Sequences::padded(&q_pos, &kv_len);
        let pages = Sequences { keys: Keys::Paged { page_size: 16, table: &table }, ..padded };
        let paged = Attention { keys: batch * keys, ..shape };
        group.bench_function(format!("{name}-paged"), |b| {
            b.iter(|| {
                let qkv = Qkv { q: black_box(&*q), k: &k, v: &v };
                attention(&cpu, &paged, &pages, qkv, None, &mut out, &mut lse).expect("shapes match")
            });
        });
        group.bench_function(name, |b| {
            b.iter(|| {
                let qkv = Qkv { q: black_box(&*q), k: &k, v: &v };
                attention(&cpu, &shape, &padded, qkv, None, &mut out, &mut lse).expect("shapes match")
            });
        });
    }
}

fn rows(c: &mut Criterion) {
    let cpu = Cpu::best();
    let (r, n) = (4096, 4096);
    let (x, w) = (values(r * n, 1), values(n, 2));
    let mut y = vec![bf16::ZERO; r * n];
    let mut group = c.benchmark_group("rows");
    group.throughput(Throughput::Bytes(4 * (r * n) as u64));
    let shape = RmsNorm { rows: r, n, eps: 1e-6, rounding: Rounding::Once, weight_offset: false };
    group.bench_function("rms_norm-4096x4096", |b| {
        b.iter(|| rms_norm(&cpu, &shape, black_box(&x), &w, &mut y).expect("shapes match"))
    });
    let (wide, mut sum) = (values(r * n, 3), vec![bf16::ZERO; r * n]);
    group.bench_function("add_rms_norm-4096x4096", |b| {
        b.iter(|| add_rms_norm(&cpu, &shape, black_box(&x), &wide, &w, &mut sum, &mut y).expect("shapes match"))
    });
    let rotation = Rope { tokens: r, heads: n / 128, dim: 128, pairing: Pairing::Half };
    let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 128).unwrap(), &(0..r as i32).collect::<Vec<_>>());
    group.bench_function("rope-4096x32x128", |b| {
        b.iter(|| rope(&cpu, &rotation, &table, black_box(&x), &mut y).expect("shapes match"))
    });
    let other = values(r * n, 3);
    group.bench_function("add-4096x4096", |b| {
        b.iter(|| add(&cpu, black_box(&x), &other, &mut y).expect("shapes match"))
    });
    let normed = NormRope {
        tokens: r,
        heads: n / 128,
        dim: 128,
        eps: 1e-6,
        rounding: Rounding::Once,
        weight_offset: false,
        pairing: Pairing::Half,
    };
    group.bench_function("norm_rope-4096x32x128", |b| {
        b.iter(|| norm_rope(&cpu, &normed, &table, black_box(&x), &w[..128], &mut y).expect("shapes match"))
    });
    let tokens: Vec<i32> = (0..r as i32).rev().collect();
    group.bench_function("embedding-4096x4096", |b| {
        b.iter(|| embedding(&cpu, n, black_box(&x), &tokens, &mut y).expect("tokens are rows"))
    });
    let mut index = vec![0; r];
    group.bench_function("argmax-4096x4096", |b| {
        b.iter(|| argmax(&cpu, r, n, black_box(&x), &mut index).expect("shapes match"))
    });
    let few = 1024;
    group.throughput(Throughput::Bytes(4 * (few * n) as u64));
    group.bench_function("softmax-1024x4096", |b| {
        b.iter(|| softmax(&cpu, few, n, black_box(&x[..few * n]), &mut y[..few * n]).expect("shapes match"))
    });
    let n = 4864;
    let (gate, up) = (values(r * n, 1), values(r * n, 2));
    let mut y = vec![bf16::ZERO; r * n];
    group.throughput(Throughput::Bytes(6 * (r * n) as u64));
    group.bench_function("silu_mul-4096x4864", |b| {
        b.iter(|| silu_mul(&cpu, black_box(&gate), &up, &mut y).expect("shapes match"))
    });
    group.bench_function("gelu_mul-4096x4864", |b| {
        b.iter(|| gelu_mul(&cpu, black_box(&gate), &up, &mut y).expect("shapes match"))
    });
    group.throughput(Throughput::Bytes(4 * (r * n) as u64));
    group.bench_function("softcap-4096x4864", |b| {
        b.iter(|| softcap(&cpu, 30.0, black_box(&gate), &mut y).expect("shapes match"))
    });
    group.bench_function("scale-4096x4864", |b| {
        b.iter(|| scale(&cpu, 0.125, black_box(&gate), &mut y).expect("shapes match"))
    });
}

/// 512 tokens, 8 of 128 experts each, as in Qwen3-MoE.
fn experts(c: &mut Criterion) {
    let cpu = Cpu::best();
    let (tokens, count, chosen, n) = (512, 128, 8, 2048);
    let logits = values(tokens * count, 1);
    let (mut index, mut weight) = (vec![0; tokens * chosen], vec![0f32; tokens * chosen]);
    let shape = Route {
        tokens,
        experts: count,
        chosen,
        scoring: Scoring::Softmax,
        chosen_by: ChosenBy::Scores,
        groups: 1,
        top_groups: 1,
        group_worth: GroupWorth::Max,
        normalise: true,
        scale: 1.0,
    };
    let mut group = c.benchmark_group("experts");
    group.throughput(Throughput::Bytes(2 * logits.len() as u64));
    group.bench_function("route-512x128", |b| {
        b.iter(|| route(&cpu, &shape, black_box(&logits), None, None, &mut index, &mut weight).expect("shapes match"))
    });
    let rows = tokens * chosen;
    let (x, mut y) = (values(rows * n, 2), vec![bf16::ZERO; tokens * n]);
    // Rows far apart, as they are when every expert has its own.
    let row: Vec<i32> = (0..rows).map(|i| (i * 1021 % rows) as i32).collect();
    let shape = Combine { tokens, chosen, rows, n };
    group.throughput(Throughput::Bytes(2 * (rows + tokens) as u64 * n as u64));
    group.bench_function("combine-512x8x2048", |b| {
        b.iter(|| combine(&cpu, &shape, black_box(&x), &row, &weight, None, &mut y).expect("shapes match"))
    });
}

fn logprob_op(c: &mut Criterion) {
    let cpu = Cpu::best();
    let (r, vocab) = (256, 151_936);
    let logits = values(r * vocab, 1);
    let target: Vec<i32> = (0..r as i32).collect();
    let (mut logp, mut lse) = (vec![0f32; r], vec![0f32; r]);
    let mut group = c.benchmark_group("logprob");
    group.throughput(Throughput::Bytes(2 * (r * vocab) as u64));
    group.bench_function(format!("{r}x{vocab}"), |b| {
        b.iter(|| {
            let shape = Logprob::new(r, vocab);
            logprob(&cpu, &shape, black_box(&logits), &target, &mut logp, &mut lse).expect("shapes match")
        });
    });
    let (r, k) = (64, 896);
    let (x, w) = (values(r * k, 2), values(vocab * k, 3));
    let w = PackedWeight::pack(&cpu, vocab, k, &w).expect("shapes match");
    let (logp, lse) = (&mut logp[..r], &mut lse[..r]);
    group.throughput(Throughput::Elements((r * vocab * k) as u64));
    group.bench_function(format!("linear-{r}x{k}x{vocab}"), |b| {
        b.iter(|| {
            // A row of logits this wide would be summed twice at temperature 1.
            let shape = LinearLogprob { temperature: 4.0, ..LinearLogprob::new(r, vocab, k) };
            linear_logprob_packed(&cpu, &shape, black_box(&x), &w, &target[..r], logp, lse).expect("shapes match")
        });
    });
}

criterion_group!(benches, gemm, attention_op, rows, experts, logprob_op);
criterion_main!(benches);
