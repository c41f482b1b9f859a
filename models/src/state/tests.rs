use super::*;
use crate::machine::Index;
use samebits_ops::Cpu;

/// Two layers with keys of one element and values of two, or none; and a layer that recurs, or none.
fn states(page_size: usize, order: PageOrder, kinds: &[Kind]) -> States {
    States::new(&Cpu::best(), DType::Fp32, kinds, page_size, order).unwrap()
}

fn paged() -> [Kind; 2] {
    [(); 2].map(|()| Kind::Paged(vec![1, 2]))
}

/// A row of a sum that forgets, and how often it was fed; and the last two tokens.
fn recurrent() -> Kind {
    Kind::Recurrent(vec![2, 2])
}

fn sides(states: &mut States, layer: usize) -> [&mut [f32]; 2] {
    let [keys, values] = states.layers[layer].pages() else { panic!("there are keys and values") };
    [keys, values].map(|side| side.as_slice_mut::<f32>().unwrap())
}

/// The key at every position of a sequence, read as attention does; values are the negatives.
fn keys(states: &mut States, layer: usize, number: usize) -> Vec<f32> {
    let table = states.table([number].into_iter());
    let (len, size) = (states.len(number), states.page_size());
    let [k, v] = sides(states, layer);
    (0..len)
        .map(|j| table[j / size] as usize * size + j % size)
        .inspect(|&row| assert_eq!(k[row], -v[2 * row]))
        .map(|row| k[row])
        .collect()
}

/// Position p of layer l gets the key `tag + 100 l + p`.
fn feed(states: &mut States, number: usize, count: usize, tag: f32) {
    states.reserve(&Cpu::best(), number, count).unwrap();
    for layer in 0..2 {
        for at in states.len(number)..states.len(number) + count {
            let (row, key) = (states.row(number, at).unwrap(), tag + (100 * layer + at) as f32);
            let [k, v] = sides(states, layer);
            k[row] = key;
            v[2 * row..][..2].copy_from_slice(&[-key, 0.0]);
        }
    }
    states.advance(number, count);
}

const ORDERS: [PageOrder; 3] = [PageOrder::Ascending, PageOrder::Descending, PageOrder::Scattered];

pub(crate) fn sequences_keep_what_they_were_given_whatever_the_pages() {
    for order in ORDERS {
        for page_size in 1..6 {
            let mut states = states(page_size, order, &paged());
            let (a, b) = (states.open(20), states.open(20));
            for step in [3, 1, 5] {
                feed(&mut states, a, step, 0.0);
                feed(&mut states, b, step, 1000.0);
            }
            let expected: Vec<f32> = (0..9).map(|p| p as f32).collect();
            assert_eq!(keys(&mut states, 0, a), expected, "{order:?} {page_size}");
            assert_eq!(keys(&mut states, 1, b), expected.iter().map(|k| k + 1100.0).collect::<Vec<_>>());
        }
    }
}

pub(crate) fn a_shared_beginning_is_copied_before_it_is_written() {
    for order in ORDERS {
        for page_size in 1..6 {
            let mut states = states(page_size, order, &paged());
            let a = states.open(20);
            feed(&mut states, a, 7, 0.0);
            let b = states.fork(a, 5, 20);
            feed(&mut states, b, 2, 500.0);
            feed(&mut states, a, 1, 0.0);
            assert_eq!(keys(&mut states, 0, a), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
            assert_eq!(keys(&mut states, 0, b), [0.0, 1.0, 2.0, 3.0, 4.0, 505.0, 506.0]);
            states.close(a);
            assert_eq!(states.rollback(b, 3), 3);
            feed(&mut states, b, 1, 900.0);
            assert_eq!(keys(&mut states, 1, b), [100.0, 101.0, 102.0, 1003.0]);
            states.close(b);
            assert_eq!(states.pages.unwrap().pool.used(), 0, "every page is free again");
        }
    }
}

/// Pages behind the place may be somebody else's.
pub(crate) fn what_is_fed_behind_a_rollback_reaches_no_fork() {
    for order in ORDERS {
        for page_size in 1..6 {
            let mut states = states(page_size, order, &paged());
            let a = states.open(20);
            feed(&mut states, a, 7, 0.0);
            let b = states.fork(a, 7, 20);
            assert_eq!(states.rollback(a, 2), 2);
            feed(&mut states, a, 5, 500.0);
            assert_eq!(keys(&mut states, 0, a), [0.0, 1.0, 502.0, 503.0, 504.0, 505.0, 506.0]);
            assert_eq!(keys(&mut states, 0, b), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "{order:?} {page_size}");
        }
    }
}

pub(crate) fn more_than_was_declared_is_an_error_and_changes_nothing() {
    let mut states = states(2, PageOrder::Ascending, &paged());
    let a = states.open(3);
    states.reserve(&Cpu::best(), a, 2).unwrap();
    states.advance(a, 2);
    let line = states.reserve(&Cpu::best(), a, 2).unwrap_err().to_string();
    assert_eq!(line, "kv cache: 2 more positions after 2 exceed the 3 that the sequence declared");
    assert_eq!((states.len(a), states.limit(a)), (2, 3));
}

/// What the rows of [`recurrent`] are behind some tokens.
fn expected(tokens: &[i32]) -> [Vec<f32>; 2] {
    let sum = tokens.iter().fold(0.0, |sum, &token| sum / 2.0 + token as f32);
    let tail = |back: usize| tokens.len().checked_sub(back).map_or(0.0, |at| tokens[at] as f32);
    [vec![sum, tokens.len() as f32], vec![tail(2), tail(1)]]
}

/// A step of a layer that recurs, layer number `layer`: as many tokens of each sequence as there are.
fn step(states: &mut States, layer: usize, inputs: &[(usize, &[i32])]) {
    write(states, layer, inputs);
    inputs.iter().for_each(|(number, tokens)| states.advance(*number, tokens.len()));
}

/// The same without its end, as where a later layer fails.
fn write(states: &mut States, layer: usize, inputs: &[(usize, &[i32])]) {
    let cpu = Cpu::best();
    inputs.iter().for_each(|(number, tokens)| states.reserve(&cpu, *number, tokens.len()).unwrap());
    let ([read, written], limit) = states.rows_of_step(inputs.iter().map(|(number, _)| *number)).unwrap();
    assert!(read.iter().chain(&written).all(|row| (*row as usize) < limit));
    let (read, written) = (Index::Host(read), Index::Host(written));
    let rows = states.layers[layer].rows();
    let [mut sums, mut tails] = [0, 1].map(|part| read_rows(rows, &cpu, part, &read, inputs.len()));
    let of_sequences = sums.as_slice_mut::<f32>().unwrap().chunks_mut(2);
    for ((sum, tail), (_, tokens)) in of_sequences.zip(tails.as_slice_mut::<f32>().unwrap().chunks_mut(2)).zip(inputs) {
        for &token in *tokens {
            (sum[0], sum[1]) = (sum[0] / 2.0 + token as f32, sum[1] + 1.0);
            (tail[0], tail[1]) = (tail[1], token as f32);
        }
    }
    rows.write(&cpu, 0, &written, &sums).unwrap();
    rows.write(&cpu, 1, &written, &tails).unwrap();
}

/// The rows of a part.
fn read_rows(rows: &Recurrent, cpu: &Cpu, part: usize, at: &Index, count: usize) -> Tensor {
    let mut values = empty(cpu, DType::Fp32, &[count, rows.width(part)]).unwrap();
    rows.read(cpu, part, at, &mut values).unwrap();
    values
}

/// The rows that the next step of a sequence begins with.
fn rows(states: &mut States, layer: usize, number: usize) -> [Vec<f32>; 2] {
    let cpu = Cpu::best();
    states.reserve(&cpu, number, 1).unwrap();
    let ([read, _], _) = states.rows_of_step([number].into_iter()).unwrap();
    let read = Index::Host(read);
    let rows = states.layers[layer].rows();
    [0, 1].map(|part| read_rows(rows, &cpu, part, &read, 1).into_vec::<f32>().unwrap())
}

/// However tokens are cut and whoever is in the step beside them, and wherever rows stand.
pub(crate) fn a_recurrence_goes_on_from_what_it_left() {
    for order in ORDERS {
        let mut states = states(2, order, &[recurrent()]);
        let (a, b) = (states.open(20), states.open(20));
        assert_eq!(rows(&mut states, 0, a), expected(&[]));
        step(&mut states, 0, &[(a, &[3, 5, 7])]);
        step(&mut states, 0, &[(b, &[9]), (a, &[2])]);
        step(&mut states, 0, &[(a, &[4, 6]), (b, &[8, 1])]);
        assert_eq!(rows(&mut states, 0, a), expected(&[3, 5, 7, 2, 4, 6]), "{order:?}");
        assert_eq!(rows(&mut states, 0, b), expected(&[9, 8, 1]), "{order:?}");
        assert_eq!((states.row(a, 0), states.positions()), (None, 0), "there are no pages");
        // More sequences than there was room for.
        let more: Vec<usize> = (0..9).map(|_| states.open(20)).collect();
        for &number in &more {
            step(&mut states, 0, &[(number, &[number as i32])]);
        }
        for number in more {
            assert_eq!(rows(&mut states, 0, number), expected(&[number as i32]), "{order:?}");
            states.close(number);
        }
        assert_eq!(rows(&mut states, 0, a), expected(&[3, 5, 7, 2, 4, 6]), "{order:?}");
        [a, b].into_iter().for_each(|number| states.close(number));
        assert_eq!(states.rows.unwrap().pool.used(), 1, "every row but that of zeros is free again");
    }
}

/// A step that is not ended has written nothing that the next one reads.
pub(crate) fn a_step_that_fails_leaves_a_recurrence_as_it_was() {
    let mut states = states(2, PageOrder::Ascending, &[recurrent()]);
    let a = states.open(20);
    step(&mut states, 0, &[(a, &[3, 5])]);
    for tokens in [&[7, 7, 7][..], &[9]] {
        write(&mut states, 0, &[(a, tokens)]);
        assert_eq!(rows(&mut states, 0, a), expected(&[3, 5]));
    }
    step(&mut states, 0, &[(a, &[4])]);
    assert_eq!(rows(&mut states, 0, a), expected(&[3, 5, 4]));
}

/// Tokens that were wrongly guessed are forgotten, as far as there is a snapshot; pages and rows have one length.
pub(crate) fn a_rollback_goes_back_to_a_snapshot() {
    for order in ORDERS {
        let [first, second] = paged();
        let mut states = states(2, order, &[first, second, recurrent()]);
        let a = states.open(20);
        let both = |states: &mut States, tokens: &[i32]| {
            write(states, 2, &[(a, tokens)]);
            feed(states, a, tokens.len(), 0.0);
        };
        both(&mut states, &[3, 5, 7]);
        states.snapshot(a);
        both(&mut states, &[1, 1, 1, 1]);
        // To the end nothing is lost.
        assert_eq!((states.rollback(a, 7), states.len(a)), (7, 7));
        // One of them was right: it is fed again.
        assert_eq!((states.rollback(a, 4), states.len(a)), (3, 3));
        assert_eq!(rows(&mut states, 2, a), expected(&[3, 5, 7]), "{order:?}");
        both(&mut states, &[1, 2]);
        assert_eq!(rows(&mut states, 2, a), expected(&[3, 5, 7, 1, 2]), "{order:?}");
        assert_eq!(keys(&mut states, 1, a), [100.0, 101.0, 102.0, 103.0, 104.0], "{order:?}");
        // The snapshot is there yet; before it there is only the beginning.
        assert_eq!(states.rollback(a, 3), 3);
        assert_eq!(rows(&mut states, 2, a), expected(&[3, 5, 7]), "{order:?}");
        assert_eq!((states.rollback(a, 2), states.len(a)), (0, 0));
        assert_eq!(rows(&mut states, 2, a), expected(&[]), "{order:?}");
        both(&mut states, &[6]);
        assert_eq!(rows(&mut states, 2, a), expected(&[6]), "{order:?}");
        states.close(a);
        assert_eq!((states.pages.unwrap().pool.used(), states.rows.unwrap().pool.used()), (0, 1), "{order:?}");
    }
}

/// A fork begins where the other is or was at a snapshot, and neither sees what the other does then.
pub(crate) fn forks_share_what_they_begin_with() {
    for order in ORDERS {
        let mut states = states(2, order, &[recurrent()]);
        let a = states.open(20);
        step(&mut states, 0, &[(a, &[3, 5, 7])]);
        states.snapshot(a);
        step(&mut states, 0, &[(a, &[2])]);
        let (whole, early, earliest) = (states.fork(a, 4, 20), states.fork(a, 3, 20), states.fork(a, 2, 20));
        assert_eq!([whole, early, earliest].map(|number| states.len(number)), [4, 3, 0]);
        step(&mut states, 0, &[(whole, &[8]), (a, &[9]), (early, &[1]), (earliest, &[6])]);
        assert_eq!(rows(&mut states, 0, a), expected(&[3, 5, 7, 2, 9]), "{order:?}");
        states.close(a);
        let b = states.open(20);
        step(&mut states, 0, &[(b, &[4, 4])]);
        assert_eq!(rows(&mut states, 0, whole), expected(&[3, 5, 7, 2, 8]), "{order:?}");
        assert_eq!(rows(&mut states, 0, early), expected(&[3, 5, 7, 1]), "{order:?}");
        assert_eq!(rows(&mut states, 0, earliest), expected(&[6]), "{order:?}");
        // The snapshot went along.
        assert_eq!(states.rollback(whole, 3), 3);
        assert_eq!(rows(&mut states, 0, whole), expected(&[3, 5, 7]), "{order:?}");
        [whole, early, earliest, b].into_iter().for_each(|number| states.close(number));
        assert_eq!(states.rows.unwrap().pool.used(), 1, "every row but that of zeros is free again");
    }
}

/// Of many snapshots the newest are kept.
pub(crate) fn the_oldest_snapshot_goes() {
    let mut states = states(2, PageOrder::Ascending, &[recurrent()]);
    let a = states.open(20);
    states.snapshot(a);
    for token in 1..=6 {
        step(&mut states, 0, &[(a, &[token])]);
        states.snapshot(a);
        states.snapshot(a);
    }
    assert_eq!(states.rollback(a, 4), 4);
    assert_eq!(rows(&mut states, 0, a), expected(&[1, 2, 3, 4]));
    assert_eq!((states.rollback(a, 3), states.rollback(a, 2)), (3, 0));
}
