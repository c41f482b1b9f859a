//! `conv`: the inputs of its cases and its oracle; and what its gradients have in common with it.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::conv::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/conv.toml"),
    make,
    compute,
};

/// Extents of a convolution and how its windows lie, by depth, height and width.
pub(super) struct Form {
    pub batch: usize,
    pub channels: usize,
    pub outputs: usize,
    pub groups: usize,
    pub image: [usize; 3],
    pub taps: [usize; 3],
    pub out: [usize; 3],
    pub stride: [usize; 3],
    pub dilation: [usize; 3],
    pub before: [usize; 3],
}

/// Elements of an image, or taps.
pub(super) fn size(extents: [usize; 3]) -> usize {
    extents.iter().product()
}

/// Place number `i`.
fn place(i: usize, [_, height, width]: [usize; 3]) -> [usize; 3] {
    [i / width / height, i / width % height, i % width]
}

impl Form {
    /// That of a case whose extents are asked of `dim`, and its attributes of `count`. What an op does not name follows.
    fn of(dim: impl Fn(&str) -> Option<usize>, count: impl Fn(&str, usize) -> usize) -> Form {
        let sides = [("pad_front", "pad_back"), ("pad_top", "pad_bottom"), ("pad_left", "pad_right")];
        let by_axis = |of: &str| ["d", "h", "w"].map(|axis| format!("{of}_{axis}"));
        let [stride, dilation] =
            [by_axis("stride"), by_axis("dilation")].map(|names| names.map(|name| count(&name, 1)));
        let extra = by_axis("extra").map(|name| count(&name, 0));
        let (before, behind) = (sides.map(|(before, _)| count(before, 0)), sides.map(|(_, behind)| count(behind, 0)));
        let taps = ["KD", "KH", "KW"].map(|axis| dim(axis).expect("a window has taps"));
        let window: [usize; 3] = std::array::from_fn(|i| dilation[i] * (taps[i] - 1) + 1);
        let places = |i: usize, places: usize| (places + before[i] + behind[i] - window[i]) / stride[i] + 1;
        let image = |i: usize, out: usize| (out - 1) * stride[i] + window[i] + extra[i] - before[i] - behind[i];
        let (given, made) = (["D", "H", "W"].map(&dim), ["OD", "OH", "OW"].map(&dim));
        let image = std::array::from_fn(|i| given[i].unwrap_or_else(|| image(i, made[i].expect("it has outputs"))));
        let out = std::array::from_fn(|i| places(i, image[i]));
        let [batch, outputs, inputs] = ["B", "O", "I"].map(|axis| dim(axis).expect("every tensor has it"));
        let groups = count("groups", 1);
        Form { batch, channels: inputs * groups, outputs, groups, image, taps, out, stride, dilation, before }
    }

    /// That of the case of a table.
    pub fn of_maker(maker: &Maker) -> Form {
        Form::of(|axis| maker.shape.get(axis).copied(), |param, otherwise| maker.count(param, otherwise))
    }

    /// That of a case that was checked.
    pub fn of_call(c: &Checked) -> Form {
        let count =
            |param: &str, otherwise| if c.call.op.attribute(param).is_some() { c.count(param) } else { otherwise };
        Form::of(|axis| c.call.dims.get(axis), count)
    }

    pub fn x(&self) -> Vec<usize> {
        [vec![self.batch, self.channels], self.image.to_vec()].concat()
    }

    pub fn y(&self) -> Vec<usize> {
        [vec![self.batch, self.outputs], self.out.to_vec()].concat()
    }

    pub fn w(&self) -> Vec<usize> {
        [vec![self.outputs, self.channels / self.groups], self.taps.to_vec()].concat()
    }

    /// Where in an image tap `t` of output `q` stands.
    pub fn met(&self, q: usize, t: usize) -> Option<usize> {
        let (q, t, mut at) = (place(q, self.out), place(t, self.taps), 0);
        for i in 0..3 {
            let place = (q[i] * self.stride[i] + t[i] * self.dilation[i]).checked_sub(self.before[i])?;
            at = at * self.image[i] + Some(place).filter(|place| *place < self.image[i])?;
        }
        Some(at)
    }

    /// One window on all of an image: an output is a product.
    fn is_a_product(&self) -> bool {
        self.groups == 1 && self.image == self.taps && size(self.out) == 1
    }
}

/// Activations called `name`, `[rows, elements]` of a number of channels, and the weight of a form, of fills that no product makes.
pub(super) fn operands(maker: &Maker, name: &str, [rows, places]: [usize; 2], form: &Form) -> (Vec<f64>, Vec<f64>) {
    let (len, of_w, terms) = (rows * places, form.w().iter().product(), size(form.taps));
    let mut x = match maker.fill {
        Fill::Cancel => maker.values(name, Fill::Normal, len, places),
        fill => maker.values(name, fill, len, places),
    };
    let mut w = match maker.fill {
        Fill::Wide => maker.values("w", Fill::Wide, of_w, terms),
        Fill::Edges => maker.sparse_edges("w", of_w, 10 * terms + 1),
        _ => maker.values("w", Fill::Normal, of_w, terms),
    };
    match maker.fill {
        // Channels in pairs that are equal in x and nearly opposite in w.
        Fill::Cancel => {
            for two in x.chunks_exact_mut(2 * places) {
                two.copy_within(..places, places);
            }
            for two in w.chunks_exact_mut(2 * terms) {
                (0..terms).for_each(|t| two[terms + t] = -two[t] * (1.0 + two[terms + t] / 256.0));
            }
        }
        // As in `gemm`.
        Fill::NearOverflow if maker.dtype != DType::Fp16 => x.iter_mut().for_each(|v| *v *= round::pow2(-8)),
        _ => {}
    }
    (x, w)
}

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let form = Form::of_maker(maker);
    let k = form.channels * size(form.taps);
    let (mut x, w) = match maker.fill {
        Fill::Classes | Fill::Power => {
            assert!(form.is_a_product(), "{}: one window on all of an image", maker.key);
            gemm::operands(maker, "x", [form.batch, form.outputs, k])
        }
        _ => operands(maker, "x", [form.batch * form.channels, size(form.image)], &form),
    };
    let bias = maker.has("bias").then(|| match maker.fill {
        Fill::Power => power::bias(maker, &mut x, &w, [form.outputs, k]),
        _ => maker.values("bias", Fill::Normal, form.outputs, form.outputs),
    });
    let mut inputs = maker.floats([("x", form.x(), x), ("w", form.w(), w)]);
    inputs.extend(bias.map(|bias| maker.floats([("bias", vec![form.outputs], bias)])).unwrap_or_default());
    inputs
}

fn compute(c: &Checked) -> References {
    let form = Form::of_call(c);
    let (x, w, bias) = (c.floats("x"), c.floats("w"), c.case.inputs.get("bias").map(Tensor::to_f64));
    let (places, image, taps) = (size(form.out), size(form.image), size(form.taps));
    let (of_x, of_y) = (form.channels / form.groups, form.outputs / form.groups);
    let met: Vec<Option<usize>> = (0..places * taps).map(|i| form.met(i / taps, i % taps)).collect();
    let element = |i: usize| {
        let (b, o, q) = (i / places / form.outputs, i / places % form.outputs, i % places);
        let first = b * form.channels + o / of_y * of_x;
        let terms = (0..of_x * taps).map(|k| {
            let x = met[q * taps + k % taps].map_or(0.0, |at| x[(first + k / taps) * image + at]);
            w[o * of_x * taps + k] * x
        });
        sum_of(terms.chain(bias.as_ref().map(|bias| bias[o])))
    };
    one("y", Reference::new(form.y(), (0..form.batch * form.outputs * places).map(element)))
}
