//! Coded panels against the weights that they hold, and which blocks are escapes.

use super::*;
use crate::gemm::tests::number;
use crate::pack::matrix::Side;
use crate::{Isa, TensorRef};

/// Weights of 16 exponents, all that a table holds, equally many of each, but for some far smaller ones, (row, k).
fn weights(n: usize, k: usize, small: &[(usize, usize)]) -> Vec<bf16> {
    let high = |row: usize, k: usize| 0x38 + (k / 14 + k % 2 * 4 + row) as u16 % 8;
    let of = |i: usize| bf16::from_bits(number(i).to_bits() & 0x80FF | high(i / k, i % k) << 8);
    let mut w: Vec<bf16> = (0..n * k).map(of).collect();
    small.iter().for_each(|&(row, at)| w[row * k + at] = bf16::from_f32(w[row * k + at].to_f32() * 1e-20));
    w
}

pub(crate) fn packed(cpu: &Cpu, n: usize, k: usize, w: &[bf16]) -> Option<Memory> {
    pack(cpu, [n, k], Matrix::Weight { rows: TensorRef::of(w, &[n, k]).rows(), side: Side::Rows }).unwrap()
}

/// Places of small weights in so many blocks of a panel, the last one and others all over it; not among the weights of every
/// seventh pair, of which the table is made.
fn places(n: usize, k: usize, panel: usize, count: usize) -> Vec<(usize, usize)> {
    let (rows, blocks) = (PANEL.min(n - panel * PANEL), k.div_ceil(4));
    let place = |i: usize| {
        let first = 2 * (blocks - 1 - i * blocks / count);
        let pair = first + usize::from((first + i % 2).is_multiple_of(7) != (i % 2 == 1));
        (panel * PANEL + (7 * i + panel) % rows, (2 * pair + i / 2 % 2).min(k - 1))
    };
    (0..count).map(place).collect()
}

pub(crate) fn a_coded_matrix_holds_every_bit() {
    for (n, k) in [(32usize, 128usize), (70, 896), (33, 259), (1, 1), (5, 6), (64, 510), (97, 267), (40, 0), (2, 9)] {
        // An escape for every sixteen blocks and two more have room.
        let (blocks, panels) = (k.div_ceil(4), n.div_ceil(PANEL));
        let room = (blocks / 16 + 2).min(blocks);
        for most in [0, room.min(1), room] {
            // Fewer of them from panel to panel.
            let small: Vec<Vec<_>> = (0..panels).map(|panel| places(n, k, panel, most.saturating_sub(panel))).collect();
            let w = weights(n, k, &small.concat());
            let memory = packed(&Cpu::new(Isa::Scalar, 2, usize::MAX).unwrap(), n, k, &w).expect("few escapes");
            for (number, small) in small.iter().enumerate() {
                let (panel, least) = DictionaryPanel::panel(Form::of(n, k), &memory, number);
                let mut escapes: Vec<u32> = small.iter().map(|(_, k)| *k as u32 / 4).collect();
                // The -0 behind an odd k makes one.
                escapes.extend((k % 2 == 1).then_some(k as u32 / 4));
                escapes.sort();
                escapes.dedup();
                let rows = &w[number * PANEL * k..w.len().min((number + 1) * PANEL * k)];
                // Among few weights others are rare as well.
                if k > 50 {
                    assert_eq!(panel.escape_numbers(), escapes, "{n} x {k}, panel {number}");
                }
                assert_eq!(least, rows.iter().fold(f32::INFINITY, |least, w| least.min(w.to_f32().abs())));
                let mut wide = vec![f32::NAN; (k + 1) * PANEL];
                for (i, w) in rows.iter().enumerate() {
                    let (column, at) = (i / k, i % k);
                    let pair = panel.pair(at / 2, column);
                    let bits = if at % 2 == 0 { pair >> 16 } else { pair & 0xFFFF };
                    assert_eq!(bits, u32::from(w.to_bits()), "{n} x {k}: w[{}][{at}]", number * PANEL + column);
                }
                for (from, len) in [(0, k), (k / 4 * 2, k - k / 4 * 2), (k / 3 * 2, (k - k / 3 * 2).min(3))] {
                    wide.fill(f32::NAN);
                    panel.widen(from, len, &mut wide);
                    for (i, found) in wide.iter().enumerate() {
                        let (at, column) = (from + i / PANEL, i % PANEL);
                        let pair = (at < from + len.next_multiple_of(2)).then(|| panel.pair(at / 2, column));
                        let half = |pair: u32| if at % 2 == 0 { pair & 0xFFFF_0000 } else { pair << 16 };
                        assert_eq!(found.to_bits(), pair.map_or(f32::NAN.to_bits(), half), "{from} {len} {i}");
                    }
                }
            }
        }
    }
}

pub(crate) fn an_unpacked_panel_holds_every_bit() {
    for cpu in Isa::of_machine().filter(|isa| isa.reads_coded()).map(|isa| Cpu::new(isa, 1, usize::MAX).unwrap()) {
        for (n, k, count) in [(32usize, 128, 0), (70, 896, 3), (33, 259, 1), (1, 1, 0), (64, 512, 9)] {
            let small: Vec<_> = (0..n.div_ceil(PANEL)).flat_map(|panel| places(n, k, panel, count)).collect();
            let memory = packed(&cpu, n, k, &weights(n, k, &small)).expect("few escapes");
            for panel in 0..n.div_ceil(PANEL) {
                let (panel, _) = DictionaryPanel::panel(Form::of(n, k), &memory, panel);
                let mut slot = vec![0; panel.pairs() * PANEL];
                crate::gemm::tile::unpack(&cpu, &panel, &mut slot);
                let pairs = (0..slot.len()).map(|i| panel.pair(i / PANEL, i % PANEL));
                assert_eq!(slot, pairs.collect::<Vec<_>>(), "{}: {n}x{k}", cpu.isa());
            }
        }
    }
}

pub(crate) fn a_matrix_of_many_escapes_is_not_coded() {
    let cpu = Cpu::new(Isa::Scalar, 2, usize::MAX).unwrap();
    for (n, k, room) in [(32usize, 12, 2), (70, 60, 2), (64, 64, 3), (33, 267, 6), (96, 1024, 18)] {
        for panel in 0..n.div_ceil(PANEL) {
            for (count, coded) in [(room, true), (room + 1, false)] {
                let w = weights(n, k, &places(n, k, panel, count));
                assert_eq!(packed(&cpu, n, k, &w).is_some(), coded, "{n} x {k}: {count} in panel {panel}");
            }
        }
    }
}

/// Of 64 weights so many have an exponent, as the later and as the earlier of two. What is not there at all counts a
/// quarter of the next above.
pub(crate) fn the_table_holds_the_most_frequent() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    for (counts, table) in [
        (&[(0x3F, 32, 32)][..], [0x3F, 0x3E, 0x3D, 0x3C, 0x3B, 0x3A, 0x39, 0x38]),
        (&[(0x7F, 32, 32)], [0x7F, 0x7E, 0x7D, 0x7C, 0x7B, 0x7A, 0x79, 0x78]),
        (&[(0x3F, 26, 27), (0x10, 6, 5)], [0x3F, 0x3E, 0x10, 0x3D, 0x0F, 0x3C, 0x0E, 0x3B]),
        (&[(0x10, 20, 0), (0x28, 0, 15), (0x50, 12, 17)], [0x50, 0x10, 0x28, 0x4F, 0x0F, 0x27, 0x4E, 0x0E]),
        (&[(0x10, 0, 20), (0x28, 15, 0), (0x50, 17, 12)], [0x50, 0x10, 0x28, 0x4F, 0x0F, 0x27, 0x4E, 0x0E]),
    ] {
        let half = |of: fn(&(u16, usize, usize)) -> usize| -> Vec<bf16> {
            counts.iter().flat_map(|one| vec![bf16::from_bits(one.0 << 8 | 0x8005); of(one)]).collect()
        };
        let (later, earlier) = (half(|one| one.1), half(|one| one.2));
        let w: Vec<bf16> = (0..64).map(|i| if i % 2 == 1 { later[i / 2] } else { earlier[i / 2] }).collect();
        let memory = packed(&cpu, PANEL, 2, &w).expect("few escapes");
        let (panel, _) = DictionaryPanel::panel(Form::of(PANEL, 2), &memory, 0);
        let found: Vec<u8> = panel.table().iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(found[..8], table);
        assert_eq!(found[8..], table.map(|high| high | 0x80));
    }
}
