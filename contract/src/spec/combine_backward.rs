//! `combine_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::combine_backward::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/combine_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n, t, k) = (maker.dim("R"), maker.dim("N"), maker.dim("T"), maker.dim("K"));
    let (weight, dy, x) = match maker.fill {
        Fill::Classes => classes(maker, [r, n, t, k]),
        // dweight is sums of masks; a sign is one for all terms that masses cancel among.
        Fill::Power => {
            let (x, signs) = power::product(maker, "x", [r, t, n]);
            (vec![1.0; t * k], signs, x)
        }
        fill => {
            let (mut dy, mut x) = (maker.values("dy", fill, t * n, n), maker.values("x", fill, r * n, n));
            match fill {
                // Neighbours are equal in dy and nearly opposite in x, so the sum is far below its terms.
                Fill::Cancel => {
                    dy.chunks_mut(n).for_each(|row| row.chunks_exact_mut(2).for_each(|p| p[1] = p[0]));
                    let turn = |p: &mut [f64]| p[1] = -p[0] * (1.0 + p[1] / 256.0);
                    x.chunks_mut(n).for_each(|row| row.chunks_exact_mut(2).for_each(turn));
                }
                // Sums of products with ordinary numbers: among the subnormals, and near the largest f32. Fp16 only
                // overflows in the last rounding.
                Fill::Tiny | Fill::NearOverflow => {
                    x = maker.values("x", Fill::Normal, r * n, n);
                    if fill == Fill::NearOverflow && maker.dtype != DType::Fp16 {
                        dy.iter_mut().for_each(|v| *v *= round::pow2(-8));
                    }
                }
                _ => {}
            }
            (maker.values("weight", Fill::Normal, t * k, k), dy, x)
        }
    };
    let mut inputs = maker.floats([("x", vec![r, n], x), ("weight", vec![t, k], weight), ("dy", vec![t, n], dy)]);
    inputs.insert("row".into(), Tensor::i32(&[t, k], maker.ints("row", rows(maker, t * k, r))));
    inputs
}

/// `len` of the rows below `limit`, none twice, in any order.
fn rows(maker: &Maker, len: usize, limit: usize) -> Vec<i32> {
    let keys = maker.below("row", limit, 1 << 30);
    let mut rows: Vec<i32> = (0..limit as i32).collect();
    rows.sort_by_key(|&row| (keys[row as usize], row));
    rows.truncate(len);
    rows
}

/// Weight, dy and x. The last three tokens have borders in dy, under weights that make those of other dtypes of them.
/// The others have a few numbers there, which rows of x take one by one or add up to the largest f32.
fn classes(maker: &Maker, [r, n, t, k]: [usize; 4]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let pow = round::pow2;
    let tiny = if maker.dtype == DType::Fp16 { pow(-20) } else { pow(-100) };
    let weights = [1.0, -1.0, 89.0, tiny, -tiny, 1.0 / tiny.max(pow(-15)), -0.0];
    let parts = [1.0, pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)];
    let parts = parts.map(|part| if round::round(part, maker.dtype) == part { part } else { 0.0 });
    let borders = maker.borders();
    let mut dy = maker.borders_from(0, t * n);
    // Times 89 it is the largest fp16.
    dy[t * n - 1] = 736.0;
    dy[..(t - 3) * n].fill(0.0);
    dy[..(t - 3) * n].chunks_mut(n).for_each(|row| row[..4].copy_from_slice(&parts));
    let mut x = vec![0.0; r * n];
    for (i, &row) in rows(maker, t * k, r).iter().enumerate() {
        let x = &mut x[row as usize * n..][..4];
        match i {
            0 => x[1..].fill(1.0),
            1 => x[1..].fill(-1.0),
            _ => x[0] = borders[(i - 2) % borders.len()],
        }
    }
    ((0..t * k).map(|i| weights[i % weights.len()]).collect(), dy, x)
}

fn compute(c: &Checked) -> References {
    let (r, n, t, k) = (c.dim("R"), c.dim("N"), c.dim("T"), c.dim("K"));
    let (x, weight, dy, row) = (c.floats("x"), c.floats("weight"), c.floats("dy"), c.ints("row"));
    let mut dx = vec![(0.0, 0.0); r * n];
    let mut dweight = Vec::with_capacity(t * k);
    for (i, (&row, weight)) in row.iter().zip(weight).enumerate() {
        let (dy, from) = (&dy[i / k * n..][..n], row as usize * n);
        for (dx, dy) in dx[from..from + n].iter_mut().zip(dy) {
            *dx = scale::product(*dy, weight);
        }
        dweight.push(sum_of(dy.iter().zip(&x[from..from + n]).map(|(dy, x)| dy * x)));
    }
    BTreeMap::from([
        ("dx".to_string(), Reference::new(vec![r, n], dx)),
        ("dweight".to_string(), Reference::new(vec![t, k], dweight)),
    ])
}
