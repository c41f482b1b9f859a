//! A view goes in as it lies: while an op runs, room is taken for its output and for little else.

use candle_core::{DType, Device, Result, Tensor};
use samebits_candle::{Attention, MatMul, RmsNorm};
use samebits_ops::Cpu;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes that are asked for.
struct Counting;

static ASKED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: it is the system's allocator; the counter takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes asked for by `op` beside its output.
fn beside(op: impl Fn() -> Result<Tensor>) -> usize {
    // The first call starts threads and makes tables.
    op().unwrap();
    let before = ASKED.load(Ordering::Relaxed);
    let output = op().unwrap();
    ASKED.load(Ordering::Relaxed) - before - output.elem_count() * output.dtype().size_in_bytes()
}

#[test]
fn views_are_not_copied() {
    let cpu = Cpu::best();
    // Every view has at least 1 MiB.
    let fused = Tensor::rand(-1f32, 1f32, (2, 256, 32, 64), &Device::Cpu).unwrap();
    let [q, k, v] = [(0, 16), (16, 8), (24, 8)].map(|(from, heads)| fused.narrow(2, from, heads).unwrap());
    let (w, matrix) = (fused.get(0).unwrap().get(0).unwrap().get(0).unwrap(), fused.flatten(2, 3).unwrap());
    let (x, slice) = (matrix.narrow(2, 1024, 1024).unwrap(), matrix.get(1).unwrap().narrow(1, 0, 1024).unwrap());
    assert!([&q, &k, &v, &x, &slice].iter().all(|x| !x.is_contiguous() && x.dtype() == DType::F32));

    let norm = || q.transpose(1, 2)?.apply_op2_no_bwd(&w, &RmsNorm { cpu: cpu.clone(), eps: 1e-6 });
    let product = || x.apply_op2_no_bwd(&slice, &MatMul { cpu: cpu.clone() });
    let attention = || q.apply_op3_no_bwd(&k, &v, &Attention { cpu: cpu.clone(), offset: 0 });
    for (name, bytes) in [("rms_norm", beside(norm)), ("gemm", beside(product)), ("attention", beside(attention))] {
        println!("{name}: {bytes} bytes beside the output");
        assert!(bytes < 1 << 17, "{name} took {bytes} bytes beside its output");
    }
    // What a copy would be: seen, or the bound above says nothing.
    let copied =
        beside(|| q.transpose(1, 2)?.contiguous()?.apply_op2_no_bwd(&w, &RmsNorm { cpu: cpu.clone(), eps: 1e-6 }));
    assert!(copied > 1 << 20, "a copy took {copied} bytes");
}
