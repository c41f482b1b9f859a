//! A function as another project has it, and its gate: what README, this crate's README and docs/GATE.md show.

use samebits_judge::Gate;

fn main() {
    Gate::new("mine", "rms_norm", |call| {
        let (x, w, eps) = (call.input("x"), call.input("w"), call.float("eps") as f32);
        mine::rms_norm(x, w, eps, call.output("y"));
    })
    .run()
}

mod mine {
    /// Rows of x over their root mean square, times w.
    pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
        for (x, y) in x.chunks_exact(w.len()).zip(y.chunks_exact_mut(w.len())) {
            let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let r = 1.0 / (squares / w.len() as f64 + f64::from(eps)).sqrt();
            for ((x, w), y) in x.iter().zip(w).zip(y) {
                let product = f64::from(*x) * r * f64::from(*w);
                // Every NaN is the same one.
                *y = if product.is_nan() { f32::NAN } else { product as f32 };
            }
        }
    }
}
