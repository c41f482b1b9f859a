//! Convolutions of images and norms of groups of channels against the plainest loops of docs/NUMERICS.md: the same bits on
//! every instruction set, number of threads and budget.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, budgets, cases, chains, exp, lanes, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// A norm of groups and its gradients, of images that are widened, before the last rounding.
struct GroupPage {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
    dbias: Vec<f32>,
}

fn group_page(shape: &GroupNorm, [x, dy]: [&[f32]; 2], [w, bias]: [Option<&[f32]>; 2]) -> GroupPage {
    let (together, places) = (shape.channels / shape.groups, shape.places);
    let n = together * places;
    let mut page = GroupPage { y: vec![], dx: vec![], dw: vec![], dbias: vec![] };
    for (number, (x, dy)) in x.chunks(n).zip(dy.chunks(n)).enumerate() {
        let first = number % shape.groups * together;
        let mean = lanes(x.iter().copied().enumerate(), |lane, x| lane + x) / n as f32;
        let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
        let r =
            1.0 / (lanes(d.iter().copied().enumerate(), |lane, d| d.mul_add(d, lane)) / n as f32 + shape.eps).sqrt();
        let h: Vec<f32> = d.iter().map(|d| d * r).collect();
        let weighed = |i: usize, v: f32| w.map_or(v, |w| v * w[first + i / places]);
        let z: Vec<f32> =
            (0..n).map(|i| bias.map_or(weighed(i, h[i]), |bias| weighed(i, h[i]) + bias[first + i / places])).collect();
        page.y.extend(z.iter().map(|z| if shape.silu { z * sigmoid(*z) } else { *z }));
        let slope = |z: f32| sigmoid(z) * z.mul_add(1.0 - sigmoid(z), 1.0);
        let dz: Vec<f32> = dy.iter().zip(&z).map(|(dy, z)| if shape.silu { dy * slope(*z) } else { *dy }).collect();
        let (mut a, mut b) = (0f32, 0f32);
        for (channel, (dz, h)) in dz.chunks(places).zip(h.chunks(places)).enumerate() {
            let w = w.map_or(1.0, |w| w[first + channel]);
            let dbias = lanes(dz.iter().copied().enumerate(), |lane, dz| lane + dz);
            let dw = lanes(dz.iter().zip(h).enumerate(), |lane, (dz, h)| dz.mul_add(*h, lane));
            (a, b) = (w.mul_add(dbias, a), w.mul_add(dw, b));
            page.dbias.push(dbias);
            page.dw.push(dw);
        }
        let (a, b) = (a / n as f32, b / n as f32);
        page.dx.extend((0..n).map(|i| r * (-b).mul_add(h[i], weighed(i, dz[i]) - a)));
    }
    page
}

fn check_group<I: Stored, O: Stored>(shape: GroupNorm, spread: u32, seed: u64, flags: u32) {
    let size = shape.batch * shape.channels * shape.places;
    let (mut x, mut dy): (Vec<I>, Vec<I>) = (values(seed, size, spread), values(seed + 1, size, spread));
    let (w, bias): (Vec<I>, Vec<I>) = (values(seed + 2, shape.channels, 2), values(seed + 3, shape.channels, 2));
    // In one group each, so that the others show numbers.
    x[seed as usize % size] = I::narrow([1.0, f32::NAN, f32::INFINITY, -0.0][flags as usize % 4]);
    dy[size - 1 - seed as usize % size] = I::narrow([-0.0, 1.0, f32::NEG_INFINITY, f32::NAN][flags as usize / 4 % 4]);
    let given = [&w, &bias].map(|values| widened(values));
    for which in 0..4 {
        let some = |bit: u32, values: &'_ [f32]| (which & bit > 0).then(|| values.to_vec());
        let wide = [some(1, &given[0]), some(2, &given[1])];
        let page = group_page(&shape, [&widened(&x), &widened(&dy)], wide.each_ref().map(Option::as_deref));
        let [w, bias] = [(1, &w), (2, &bias)].map(|(bit, values)| (which & bit > 0).then_some(&values[..]));
        for cpu in cpus() {
            let what = format!("{} to {} {cpu:?} {shape:?} {which}", I::NAME, O::NAME);
            let mut y = vec![O::narrow(f32::NAN); size];
            group_norm(&cpu, &shape, &x, w, bias, &mut y).unwrap();
            assert_eq!(bits(&y), all_rounded::<O>(&page.y), "{what}");
            let (mut dx, mut sums) = (vec![O::narrow(f32::NAN); size], [(); 2].map(|()| vec![9f32; page.dw.len()]));
            let [dw, dbias] = &mut sums;
            let inputs = GroupNormInputs { x: &x[..], w, bias, dy: &dy };
            group_norm_backward(&cpu, &shape, &inputs, &mut dx, dw, dbias).unwrap();
            assert_eq!(bits(&dx), all_rounded::<O>(&page.dx), "dx {what}");
            assert_eq!(bits(dw), all_rounded::<f32>(&page.dw), "dw {what}");
            assert_eq!(bits(dbias), all_rounded::<f32>(&page.dbias), "dbias {what}");
        }
    }
}

/// What output `(b, o, q)` of a convolution meets by tap `t` of channel `c`.
fn met(shape: &Conv, x: &[f32], [b, c]: [usize; 2], q: [usize; 3], t: [usize; 3]) -> f32 {
    let Conv { channels, image, window, .. } = shape;
    let mut at = b * channels + c;
    for axis in 0..3 {
        let place = (q[axis] * window.stride[axis] + t[axis] * window.dilation[axis]).checked_sub(window.before[axis]);
        match place.filter(|place| *place < image[axis]) {
            Some(place) => at = at * image[axis] + place,
            None => return 0.0,
        }
    }
    x[at]
}

/// Number `i` of places or taps by depth, height and width.
fn places(i: usize, [_, height, width]: [usize; 3]) -> [usize; 3] {
    [i / width / height, i / width % height, i % width]
}

struct ConvPage {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
    dbias: Vec<f32>,
}

/// Operands that are widened, before the last rounding; the biases are of y and of dx.
fn conv_page(
    shape: &Conv,
    [x, dy, w]: [&[f32]; 3],
    biases: Option<[&[f32]; 2]>,
    counts: impl Fn(usize) -> bool,
    carry: &[f32],
) -> ConvPage {
    let (out, taps) = (shape.output(), shape.window.taps);
    let (places_y, size, places_x): (usize, usize, usize) =
        (out.iter().product(), taps.iter().product(), shape.image.iter().product());
    let (of_x, of_y) = (shape.channels / shape.groups, shape.outputs / shape.groups);
    let y = (0..shape.batch * shape.outputs * places_y).map(|i| {
        let (q, o, b) = (places(i % places_y, out), i / places_y % shape.outputs, i / places_y / shape.outputs);
        let sum = chains(of_x * size, |k| {
            let c = o / of_y * of_x + k / size;
            (w[o * of_x * size + k], met(shape, x, [b, c], q, places(k % size, taps)))
        });
        biases.map_or(sum, |[bias, _]| sum + bias[o])
    });
    let dx = (0..shape.batch * shape.channels * places_x).map(|i| {
        let (p, c, b) =
            (places(i % places_x, shape.image), i / places_x % shape.channels, i / places_x / shape.channels);
        let sum = chains(of_y * size, |k| {
            let (o, t) = (c / of_x * of_y + k / size, places(k % size, taps));
            let mut at = b * shape.outputs + o;
            for axis in 0..3 {
                let window = &shape.window;
                let place = (p[axis] + window.before[axis]).checked_sub(t[axis] * window.dilation[axis]);
                let place =
                    place.filter(|place| place % window.stride[axis] == 0).map(|place| place / window.stride[axis]);
                match place.filter(|place| *place < out[axis]) {
                    Some(place) => at = at * out[axis] + place,
                    None => return (w[(o * of_x + c % of_x) * size + k % size], 0.0),
                }
            }
            (w[(o * of_x + c % of_x) * size + k % size], dy[at])
        });
        biases.map_or(sum, |[_, bias]| sum + bias[c])
    });
    let dw = (0..shape.outputs * of_x * size).map(|i| {
        let (t, c, o) = (places(i % size, taps), i / size % of_x, i / size / of_x);
        let mut sum = carry[i];
        for b in (0..shape.batch).filter(|b| counts(*b)) {
            for q in 0..places_y {
                let x = met(shape, x, [b, o / of_y * of_x + c], places(q, out), t);
                sum = dy[(b * shape.outputs + o) * places_y + q].mul_add(x, sum);
            }
        }
        sum
    });
    let dbias = dy.chunks(places_y).map(|dy| lanes(dy.iter().copied().enumerate(), |lane, dy| lane + dy));
    ConvPage { y: y.collect(), dx: dx.collect(), dw: dw.collect(), dbias: dbias.collect() }
}

fn check_conv<I: Stored, O: Stored>(shape: Conv, spread: u32, seed: u64, flags: u32) {
    let [places_x, places_y]: [usize; 2] = [shape.image, shape.output()].map(|extents| extents.iter().product());
    let of_w = shape.outputs * (shape.channels / shape.groups) * shape.window.taps.iter().product::<usize>();
    let [of_x, of_y] = [shape.channels * places_x, shape.outputs * places_y].map(|size| shape.batch * size);
    let (mut x, mut dy): (Vec<I>, Vec<I>) = (values(seed, of_x, spread), values(seed + 1, of_y, spread));
    let mut w: Vec<I> = values(seed + 2, of_w, spread);
    let bias: [Vec<I>; 2] = [values(seed + 3, shape.outputs, spread), values(seed + 4, shape.channels, spread)];
    let special = [1.0, f32::NAN, f32::INFINITY, -0.0, 1.0, 1.0][seed as usize % 6];
    x[seed as usize % of_x] = I::narrow(special);
    dy[seed as usize % of_y] = I::narrow(special);
    // Infinity times what stands outside an image is NaN.
    w[seed as usize % of_w] = I::narrow([1.0, 1.0, f32::NEG_INFINITY, -0.0][flags as usize % 4]);
    let carry: Vec<f32> = values(seed + 5, of_w, spread);
    let mask: Vec<i32> = (0..shape.batch).map(|b| (seed >> b) as i32 & 1).collect();
    let (with_bias, with_mask) = (flags & 4 > 0, flags & 8 > 0);
    let wide = bias.each_ref().map(|bias| widened(bias));
    let biases = with_bias.then_some([&wide[0][..], &wide[1]]);
    let counts = |b: usize| !with_mask || mask[b] != 0;
    let page = conv_page(&shape, [&widened(&x), &widened(&dy), &widened(&w)], biases, counts, &carry);
    let bias = bias.each_ref().map(|bias| with_bias.then_some(&bias[..]));
    let mask = with_mask.then_some(&mask[..]);
    let nan = O::narrow(f32::NAN);
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let mut run = |cpu: &Cpu| {
            let mut y = vec![nan; of_y];
            conv(cpu, &shape, &x, &w, bias[0], &mut y)
                .map(|()| assert_eq!(bits(&y), all_rounded::<O>(&page.y), "{what}"))
        };
        run(&cpu).unwrap();
        budgets(&cpu, seed, &mut run).iter().for_each(|tight| run(tight).unwrap());
        let mut run = |cpu: &Cpu| {
            let mut dx = vec![nan; of_x];
            conv_dx(cpu, &shape, &dy, &w, bias[1], &mut dx)
                .map(|()| assert_eq!(bits(&dx), all_rounded::<O>(&page.dx), "dx {what}"))
        };
        run(&cpu).unwrap();
        budgets(&cpu, seed, &mut run).iter().for_each(|tight| run(tight).unwrap());
        let mut run = |cpu: &Cpu| {
            let (mut dw, mut dbias) = (carry.clone(), vec![9f32; page.dbias.len()]);
            conv_dw(cpu, &shape, mask, &x, &dy, &mut dw, &mut dbias).map(|()| {
                assert_eq!(bits(&dw), all_rounded::<f32>(&page.dw), "dw {what}");
                assert_eq!(bits(&dbias), all_rounded::<f32>(&page.dbias), "dbias {what}");
            })
        };
        run(&cpu).unwrap();
        budgets(&cpu, seed, &mut run).iter().for_each(|tight| run(tight).unwrap());
    }
}

/// An axis: places, taps, stride, dilation and padding of a window that fits.
fn axis(most: usize) -> impl Strategy<Value = [usize; 6]> {
    (1..most, 1usize..4, 1usize..4, 1usize..3, 0usize..3, 0usize..3).prop_map(
        |(places, taps, stride, dilation, before, behind)| {
            let window = (taps - 1) * dilation + 1;
            let (before, behind) = (before.min(window - 1), behind.min(window - 1));
            [places.max(window.saturating_sub(before + behind)), taps, stride, dilation, before, behind]
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn norms_of_groups_are_the_page(
        batch in 1usize..3,
        groups in 1usize..4,
        together in 1usize..5,
        places in prop_oneof![4 => 1usize..40, 2 => 250usize..300, 1 => 1300usize..1400],
        spread in prop::sample::select(vec![1u32, 5, 30, 75]),
        silu: bool,
        seed: u64,
        flags in 0u32..16,
    ) {
        let (seed, eps) = (seed >> 3, [0.0, 1e-5, 0.5][flags as usize % 3]);
        let shape = GroupNorm { batch, channels: groups * together, places, groups, eps, silu };
        check_group::<bf16, bf16>(shape, spread, seed, flags);
        check_group::<f32, f32>(shape, spread, seed, flags);
        check_group::<f16, bf16>(shape, spread.min(7), seed, flags);
        check_group::<f32, f16>(shape, spread.min(7), seed, flags);
    }

    #[test]
    fn convolutions_of_images_are_the_page(
        batch in 1usize..4,
        groups in 1usize..3,
        [channels, outputs] in prop_oneof![3 => [1usize..4, 1usize..4], 1 => [10usize..14, 10usize..30]],
        axes in prop_oneof![3 => [axis(3), axis(6), axis(9)], 1 => [axis(2), axis(2), axis(40)]],
        spread in prop::sample::select(vec![1u32, 5, 20, 75]),
        seed: u64,
        flags in 0u32..16,
    ) {
        let of = |i: usize| std::array::from_fn(|axis| axes[axis][i]);
        let window = Window { taps: of(1), stride: of(2), dilation: of(3), before: of(4), behind: of(5) };
        let shape =
            Conv { batch, channels: groups * channels, outputs: groups * outputs, groups, image: of(0), window };
        let seed = seed >> 3;
        check_conv::<bf16, bf16>(shape, spread, seed, flags);
        check_conv::<bf16, f32>(shape, spread, seed, flags);
        check_conv::<f32, f32>(shape, spread, seed, flags);
        check_conv::<f16, f16>(shape, spread.min(5), seed, flags);
    }
}

/// Groups that are read in several parts, with borders of channels in the middle of one.
#[test]
fn long_groups_are_the_page() {
    for (together, places, silu) in [(1, 9001, false), (3, 4096, true), (5, 1700, true)] {
        let shape = GroupNorm { batch: 1, channels: 2 * together, places, groups: 2, eps: 1e-5, silu };
        check_group::<bf16, bf16>(shape, 3, places as u64, 1);
        check_group::<f32, f32>(shape, 3, places as u64, 0);
    }
}

/// Places around panels and more than are laid out at a time; terms around the segments; channels around tiles.
#[test]
fn large_convolutions_are_the_page() {
    let padded =
        |taps: [usize; 3]| Window { before: taps.map(|t| t / 2), behind: taps.map(|t| t / 2), ..Window::of(taps) };
    for (channels, outputs, groups, image, window) in [
        (16, 40, 1, [1, 9, 11], padded([1, 3, 3])),
        (6, 26, 2, [3, 5, 13], padded([3, 3, 3])),
        (33, 13, 1, [1, 1, 70], padded([1, 1, 1])),
        (4, 100, 1, [1, 18, 17], Window { stride: [1, 2, 2], behind: [0, 1, 1], ..Window::of([1, 3, 3]) }),
        (24, 24, 24, [1, 6, 20], padded([1, 3, 3])),
    ] {
        let shape = Conv { batch: 2, channels, outputs, groups, image, window };
        check_conv::<bf16, bf16>(shape, 2, 6 * channels as u64, 5);
        check_conv::<f32, f32>(shape, 2, 6 * channels as u64 + 4, 12);
    }
}

/// A convolution of one place by one tap is a product, and what is done a group at a time is what is done for it alone.
#[test]
fn a_window_of_one_tap_is_a_product() {
    let (batch, channels, outputs) = (5, 300, 37);
    let (x, w): (Vec<bf16>, Vec<bf16>) = (values(1, batch * channels, 3), values(2, outputs * channels, 3));
    let bias: Vec<bf16> = values(3, outputs, 3);
    let shape = Conv { batch, channels, outputs, groups: 1, image: [1; 3], window: Window::of([1; 3]) };
    for cpu in cpus() {
        let (mut y, mut product) = (vec![0f32; batch * outputs], vec![1f32; batch * outputs]);
        conv(&cpu, &shape, &x, &w, Some(&bias), &mut y).unwrap();
        gemm(&cpu, &Gemm::new(batch, outputs, channels), &x, &w, Some(&bias), &mut product).unwrap();
        assert_eq!(bits(&y), bits(&product), "{cpu:?}");
    }
}

#[test]
fn refusals() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let norm = GroupNorm { batch: 1, channels: 4, places: 2, groups: 3, eps: 0.0, silu: false };
    let refused =
        |shape: &GroupNorm| group_norm(&cpu, shape, &[1f32; 8], None, None, &mut [0f32; 8]).unwrap_err().to_string();
    assert!(refused(&norm).contains("4 channels are not cut into 3 groups"), "{}", refused(&norm));
    assert!(refused(&GroupNorm { groups: 0, ..norm }).contains("0 groups"));
    let window = Window::of([1, 1, 3]);
    let shape = Conv { batch: 1, channels: 1, outputs: 1, groups: 1, image: [1, 1, 2], window };
    let refused =
        |shape: &Conv| conv(&cpu, shape, &[1f32; 2], &[1.0; 3], None, &mut [0f32; 1]).unwrap_err().to_string();
    assert!(refused(&shape).contains("windows of 3 places on 2"), "{}", refused(&shape));
    let padded = Conv { window: Window { before: [0, 0, 3], ..window }, ..shape };
    assert!(refused(&padded).contains("less padding"), "{}", refused(&padded));
    let none = Conv { window: Window { stride: [1, 0, 1], ..window }, ..shape };
    assert!(refused(&none).contains("use at least 1"), "{}", refused(&none));
    let uneven = Conv { groups: 2, image: [1, 1, 4], ..shape };
    assert!(refused(&uneven).contains("are not cut into 2 groups"), "{}", refused(&uneven));
}
