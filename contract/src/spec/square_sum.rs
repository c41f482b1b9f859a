//! `square_sum`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::square_sum::OP,
    class: Class::Reduction,
    fills: SUMS,
    table: include_str!("../../ops/square_sum.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let x = match maker.fill {
        // Squares among the subnormals, and near the largest f32.
        Fill::Tiny | Fill::NearOverflow => {
            let by = round::pow2(if maker.fill == Fill::Tiny { 62 } else { -70 });
            maker.values("x", maker.fill, r * n, n).into_iter().map(|v| v * by).collect()
        }
        Fill::Classes => {
            let pow = round::pow2;
            // 2^24 - 1 is a sum of four squares.
            let largest = [4095.0, 90.0, 9.0, 3.0].map(|v| v * pow(52));
            let rows: [&[f64]; 6] =
                [&[0.0], &[pow(-70)], &[pow(-63)], &largest, &[f64::NEG_INFINITY, 1.0], &[f64::NAN]];
            let mut x = vec![-0.0; r * n];
            for (row, values) in x.chunks_mut(n).zip(rows.iter().cycle()) {
                row[..values.len()].copy_from_slice(values);
            }
            x
        }
        Fill::Power => {
            let [x, _] = power::norm_rows(maker, "x", r, n);
            x
        }
        fill => maker.values("x", fill, r * n, n),
    };
    maker.floats([("x", vec![r, n], x)])
}

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    let x = c.floats("x");
    let of_row = |row: &[f64]| {
        let squares = || row.iter().map(|x| x * x);
        let (sum, condition) = sum_of(squares());
        (sum, condition * (1.0 + absorbed(squares(), sum)))
    };
    one("sum", Reference::new(vec![r], x.chunks(n).map(of_row)))
}
