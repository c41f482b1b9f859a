//! What a [`Device`] does with its driver: memory that comes back, captures that end, indices and buffers that are
//! checked. The driver here has memory and computes nothing; `driver.rs` puts the one of NVIDIA over a library that
//! stands for libcuda.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod driver;

use samebits_ops::device::{
    AttentionMetadata, Build, Clock, Device, Driver, Indices, Launch, Part, add, attention_at, copy_rows, embedding_at,
    gemm_experts, gemm_rows, route_to,
};
use samebits_ops::{
    Attention, Attributes, Backend, Calls, ChosenBy, Cpu, DType, Error, Gemm, GroupWorth, Qkv, Route, Scoring, Tensor,
    TensorMut, TensorRef,
};
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

/// What a driver was asked for and has not been given back, and what it has run.
#[derive(Default)]
struct State {
    memory: HashMap<u64, Vec<u8>>,
    allocations: u64,
    capturing: bool,
    graphs: HashSet<usize>,
    recorded: usize,
    clocks: Arc<()>,
    launched: Vec<&'static str>,
}

/// A driver whose memory is the host's.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<State>>);

impl Fake {
    fn state(&self) -> MutexGuard<'_, State> {
        // A test that fails with the lock in hand still gives its memory back.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocations and graphs that are live, and whether a capture is.
    fn live(&self) -> (usize, usize, bool) {
        let state = self.state();
        (state.memory.len(), state.graphs.len(), state.capturing)
    }

    fn device(&self) -> Device {
        Device::new(Box::new(self.clone()), usize::MAX, usize::MAX)
    }
}

impl Driver for Fake {
    fn name(&self) -> &str {
        "fake"
    }

    fn compile(&self, _: &Build) -> Result<usize, Error> {
        Ok(0)
    }

    fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut state = self.state();
        state.allocations += 1;
        let address = state.allocations << 32;
        state.memory.insert(address, vec![0; bytes]);
        Some(address)
    }

    unsafe fn free(&self, address: u64) {
        self.state().memory.remove(&address).expect("it is live");
    }

    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.state().memory.get_mut(&address).expect("it is live")[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        bytes.copy_from_slice(&self.state().memory[&address][..bytes.len()]);
        Ok(())
    }

    unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<(), Error> {
        unimplemented!("no test copies within the device")
    }

    fn begin_capture(&self) -> Result<(), Error> {
        self.state().capturing = true;
        Ok(())
    }

    fn end_capture(&self) -> Result<usize, Error> {
        let mut state = self.state();
        assert!(state.capturing, "no capture was begun");
        state.capturing = false;
        state.recorded += 1;
        let graph = state.recorded;
        state.graphs.insert(graph);
        Ok(graph)
    }

    unsafe fn replay(&self, graph: usize) -> Result<(), Error> {
        assert!(self.state().graphs.contains(&graph));
        Ok(())
    }

    fn forget(&self, graph: usize) {
        assert!(self.state().graphs.remove(&graph));
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Error> {
        self.state().launched.push(launch.kernel);
        Ok(())
    }

    fn clock(&self) -> Result<Clock<'_>, Error> {
        let running = self.state().clocks.clone();
        Ok(Box::new(move || {
            drop(running);
            Ok(1.0)
        }))
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// What `work` returns on a thread of its own; a panic here when it takes longer than anything could but for ever.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(work()));
    receive.recv_timeout(Duration::from_secs(20)).expect("it waits for ever, or has panicked")
}

fn sum_of_two(device: &Device) -> Result<(), Error> {
    let (a, b) = (device.empty::<f32>("test", 300)?, device.empty::<f32>("test", 300)?);
    add(device, &a, &b, &mut device.empty::<f32>("test", 300)?)
}

#[test]
fn what_is_lent_is_not_given_back() {
    let (fake, mut found) = (Fake::default(), [0; 64]);
    let (device, address) = (fake.device(), fake.allocate(64).unwrap());
    for value in [1, 7] {
        // SAFETY: the memory is live and nobody else's.
        let mut buffer = unsafe { device.lent::<i32>(address, 16) };
        buffer.fill(&device, &[value; 16]).unwrap();
        drop(buffer);
        drop(device.upload::<i32>("test", &[3; 16]).unwrap());
    }
    // SAFETY: as above.
    unsafe { fake.read(address, &mut found).unwrap() };
    assert_eq!(found, [[7, 0, 0, 0]; 16].concat()[..]);
    // The other is what the device keeps for the next.
    assert_eq!(fake.live().0, 2);
    drop(device);
    assert_eq!(fake.live().0, 1);
}

#[test]
fn a_dropped_device_gives_all_its_memory_back() {
    let fake = Fake::default();
    let device = fake.device();
    let one = device.upload("test", &[1f32; 1000]).unwrap();
    sum_of_two(&device).unwrap();
    let graph = device.capture(&mut || sum_of_two(&device)).unwrap();
    assert_eq!(fake.live(), (4, 1, false));
    drop(device);
    // Buffers and graphs keep the device they are of.
    let mut host = [0f32; 1000];
    one.download(&fake.device(), &mut host).unwrap();
    assert_eq!(host, [1.0; 1000]);
    drop((one, graph));
    assert_eq!(fake.live(), (0, 0, false));
}

#[test]
fn a_panic_in_captured_work_ends_the_capture() {
    let fake = Fake::default();
    let device = fake.device();
    let of_thread = device.clone();
    let panicked = std::thread::spawn(move || {
        of_thread.capture(&mut || {
            sum_of_two(&of_thread)?;
            panic!("in the middle of captured work")
        })
    });
    assert!(panicked.join().is_err());
    assert_eq!(fake.live(), (3, 0, false));
    let held = device.held();
    let other = device.clone();
    in_time(move || other.upload("test", &[0f32; 300]).map(drop)).unwrap();
    assert_eq!(device.held(), held, "what the work held serves others");
    drop(device);
    assert_eq!(fake.live(), (0, 0, false));
}

#[test]
fn captured_work_that_fails_leaves_no_graph() {
    let fake = Fake::default();
    let device = fake.device();
    let failed = device.capture(&mut || Err(Error::Device("as it happens".into())));
    assert_eq!(failed.err(), Some(Error::Device("as it happens".into())));
    assert_eq!(fake.live(), (0, 0, false));
    device.capture(&mut || sum_of_two(&device)).unwrap();
}

#[test]
fn a_clock_is_stopped_whatever_the_work_does() {
    let fake = Fake::default();
    let device = fake.device();
    assert_eq!(device.seconds(&mut || sum_of_two(&device)), Ok(1.0));
    assert!(device.seconds(&mut || Err(Error::Device("as it happens".into()))).is_err());
    let panicked = catch_unwind(AssertUnwindSafe(|| device.seconds(&mut || panic!("in the middle of timed work"))));
    assert!(panicked.is_err());
    assert_eq!(Arc::strong_count(&fake.state().clocks), 1);
    let timed = device.capture(&mut || device.seconds(&mut || Ok(())).map(drop));
    assert!(timed.err().unwrap().to_string().contains("captured"));
}

#[test]
fn buffers_of_another_device_are_refused() {
    let fake = Fake::default();
    let (device, other) = (fake.device(), Fake::default().device());
    let (a, mut y) = (device.upload("test", &[1f32; 8]).unwrap(), device.upload("test", &[1f32; 8]).unwrap());
    let (foreign, mut foreign_y) =
        (other.upload("test", &[1f32; 8]).unwrap(), other.upload("test", &[1f32; 8]).unwrap());
    for refused in [add(&device, &a, &foreign, &mut y), add(&device, &a, &a, &mut foreign_y)] {
        assert!(refused.unwrap_err().to_string().contains("another device"));
    }
    assert_eq!(fake.state().launched, [""; 0]);
    add(&device.recording(), &a, &a, &mut y).unwrap();
}

#[test]
fn no_scatter_writes_a_row_twice() {
    let fake = Fake::default();
    let device = fake.device();
    let from = device.upload("test", &[1f32; 12]).unwrap();
    let mut to = device.upload("test", &[0f32; 12]).unwrap();
    let mut distinct = Indices::distinct(&device, "test", &[2, 0, 1], 3).unwrap();
    let twice = Indices::distinct(&device, "test", &[2, 0, 2], 3).err().unwrap().to_string();
    assert!(twice.contains("index 2 comes twice"), "{twice}");
    assert!(distinct.set(&device, "test", &[0, 0, 1]).is_err());
    distinct.set(&device, "test", &[0, 2, 1]).unwrap();
    let any = Indices::new(&device, "test", &[2, 0, 1], 3).unwrap();
    let whole = Part::whole(4);
    let mut copy = |from_part: Part, to_part: Part| copy_rows(&device, [3, 4], (&from, from_part), (&mut to, to_part));
    copy(Part { rows: Some(&any), ..whole }, Part { rows: Some(&distinct), ..whole }).unwrap();
    copy(Part { every: 3, ..whole }, whole).unwrap();
    for wrong in [
        Part { rows: Some(&any), ..whole },
        Part { every: 2, ..whole },
        Part { stride: 3, ..whole },
        Part { stride: 0, ..whole },
    ] {
        let error = copy(whole, wrong).unwrap_err().to_string();
        assert!(error.contains("one place"), "{error}");
    }
    assert_eq!(fake.state().launched, ["copy_rows"; 2]);
}

#[test]
fn places_that_were_never_set_are_refused() {
    let fake = Fake::default();
    let device = fake.device();
    let shape = Attention::causal([1, 1, 4], [1, 1], 2);
    let mut metadata = AttentionMetadata::paged(&device, &shape, 2, 2, 1).unwrap();
    let (q, k) = (device.upload("test", &[0f32; 2]).unwrap(), device.upload("test", &[0f32; 8]).unwrap());
    let (mut out, mut lse) = (device.empty::<f32>("test", 2).unwrap(), device.empty::<f32>("test", 1).unwrap());
    let qkv = Qkv { q: &q, k: &k, v: &k };
    let error = attention_at(&device, &shape, &metadata, qkv, None, &mut out, &mut lse).unwrap_err().to_string();
    assert!(error.contains("never set"), "{error}");
    assert_eq!(fake.state().launched, [""; 0]);
    metadata.set(&device, &shape, &[0, 1], &[0], &[1], &[1, 0]).unwrap();
    attention_at(&device, &shape, &metadata, qkv, None, &mut out, &mut lse).unwrap();
}

/// A choice that captured work makes is not there before its graph has run.
#[test]
fn indices_of_captured_work_are_read_in_it_alone() {
    let device = Fake::default().device();
    let (experts, chosen, k) = (4, 2, 4);
    let (scoring, group_worth) = (Scoring::Sigmoid, GroupWorth::Max);
    let shape = Route {
        tokens: 1,
        experts,
        chosen,
        scoring,
        chosen_by: ChosenBy::Scores,
        groups: 1,
        top_groups: 1,
        group_worth,
        normalise: true,
        scale: 1.0,
    };
    let logits = device.upload("test", &[0f32; 4]).unwrap();
    let (x, w) = (device.upload("test", &[0f32; 4]).unwrap(), device.upload("test", &[0f32; 16]).unwrap());
    let mut weight = device.empty::<f32>("test", chosen).unwrap();
    let mut y = device.empty::<f32>("test", chosen).unwrap();
    let mut product = |choice: &Indices| gemm_experts(&device, [1, k], (&x, chosen), choice, &w, None, &mut y);
    let at_once = route_to(&device, &shape, &logits, None, None, &mut weight).unwrap();
    product(&at_once).unwrap();
    let mut choice = None;
    let graph = device.capture(&mut || {
        let made = route_to(&device, &shape, &logits, None, None, &mut weight)?;
        product(&made)?;
        choice = Some(made);
        Ok(())
    });
    let graph = graph.unwrap();
    let choice = choice.unwrap();
    assert!(product(&choice).unwrap_err().to_string().contains("captured work"));
    let again = device.capture(&mut || product(&choice));
    assert!(again.err().unwrap().to_string().contains("captured work"));
    device.replay(&graph).unwrap();
}

/// Extents whose products are beyond a word are refused, whatever is in the buffers.
#[test]
fn extents_that_overflow_are_refused() {
    let fake = Fake::default();
    let device = fake.device();
    let none = device.empty::<f32>("test", 0).unwrap();
    let mut y = device.empty::<f32>("test", 0).unwrap();
    let large = 1usize << 32;
    for (n, k) in [(large, large), (usize::MAX, 2), (3, usize::MAX)] {
        assert!(gemm_rows(&device, &Gemm::new(0, n, k), (&none, 0), (&none, 0), None, (&mut y, 0)).is_err(), "{n} {k}");
    }
    for (batch, columns) in [(usize::MAX, 1), (large, large), (1, usize::MAX)] {
        let shape = Attention::causal([batch, 1, 4], [1, 1], 2);
        assert!(AttentionMetadata::paged(&device, &shape, 0, columns, 1).is_err(), "{batch} {columns}");
    }
    let tokens = Indices::new(&device, "test", &[0], 1).unwrap();
    assert!(embedding_at(&device, usize::MAX, &none, &tokens, &mut y).is_err());
    assert_eq!(fake.state().launched, [""; 0]);
}

/// An output that is not on the device is found before the other one is written.
#[test]
fn outputs_on_the_host_are_refused_before_anything_is_written() {
    let fake = Fake::default();
    let device = fake.device();
    let logits = device.upload("test", &[0f32; 4]).unwrap();
    let (mut rank, mut weight) = (device.upload("test", &[7i32; 4]).unwrap(), [0f32; 4]);
    let shape = [1, 4];
    let done = device.call(
        "route",
        Attributes::new().with("chosen", 2usize),
        &[("logits", TensorRef::on_device(&logits, &shape).unwrap())],
        vec![
            ("rank", TensorMut::on_device(&mut rank, &shape).unwrap()),
            ("weight", TensorMut::new(&mut weight, &shape).unwrap()),
        ],
    );
    assert!(done.unwrap_err().to_string().contains("`weight` is on the host"));
    let mut found = [0; 4];
    rank.download(&device, &mut found).unwrap();
    assert_eq!((found, fake.state().launched.len()), ([7; 4], 0));
}

/// Parts of buffers go into products, and into no kernel that reads whole ones; indices must fit what they lead into.
#[test]
fn tensors_that_are_parts_and_indices() {
    let fake = Fake::default();
    let (device, cpu) = (fake.device(), Cpu::best());
    let on = |shape: &[usize]| {
        let host = cpu.empty(DType::Fp32, shape).unwrap();
        Backend::upload(&device, host.view()).unwrap()
    };
    let (x, w, mut y) = (on(&[5, 8]), on(&[6, 8]), on(&[4, 3]));
    let mut calls = Calls::default();
    let mut run = |op: &str, inputs: &[(&str, TensorRef)], y: TensorMut| {
        calls.run(&device, op, &Attributes::new(), inputs, vec![("y", y)]).map_err(|error| error.to_string())
    };
    for _ in 0..2 {
        run("gemm", &[("x", x.rows(1..4)), ("w", w.rows(3..6))], y.rows_mut(1..4)).unwrap();
    }
    assert_eq!(fake.state().launched, ["gemm_skinny4"; 2]);
    let norm = on(&[8]);
    let part = run("rms_norm", &[("x", x.rows(1..4)), ("w", norm.view())], on(&[3, 8]).view_mut()).unwrap_err();
    assert!(part.contains("`x` is a part of a buffer"), "{part}");
    let part = run("rms_norm", &[("x", x.view()), ("w", norm.view())], on(&[6, 8]).rows_mut(1..6)).unwrap_err();
    assert!(part.contains("`y` is a part of a buffer"), "{part}");

    let mut rows = |limit: usize| {
        let tokens = Indices::new(&device, "test", &[4, 0], limit).unwrap();
        let tokens = TensorRef::indices(&tokens, &[2]).unwrap();
        run("embedding", &[("w", x.view()), ("tokens", tokens)], on(&[2, 8]).view_mut())
    };
    assert!(rows(5).is_ok() && rows(6).is_err(), "they may lead outside of the table");
    let tokens = Indices::new(&device, "test", &[4, 0], 5).unwrap();
    let tokens = [("w", x.view()), ("tokens", TensorRef::indices(&tokens, &[2]).unwrap())];
    let mut host = Tensor::new(vec![0f32; 16], &[2, 8]).unwrap();
    let elsewhere = cpu.call("embedding", Attributes::new(), &tokens, vec![("y", host.view_mut())]).unwrap_err();
    assert!(elsewhere.to_string().contains("is on a device"), "{elsewhere}");
    assert!(device.download(host.view()).is_err() && cpu.download(x.view()).is_err());
    assert!(cpu.capture(&mut || panic!("it is not begun")).unwrap().is_none());
}

/// A smaller shape finds room on the host, and none on a device, whose kernels are told of whole buffers.
#[test]
fn tensors_are_shaped_anew_where_there_is_room() {
    let device = Fake::default().device();
    let mut here = Tensor::new((0..6).map(|i| i as f32).collect(), &[2, 3]).unwrap();
    let mut there = Backend::upload(&device, here.view()).unwrap();
    for (shape, on_host, on_device) in [(&[3, 2][..], true, true), (&[1, 3], true, false), (&[7], false, false)] {
        assert_eq!((here.reshape(shape), there.reshape(shape)), (on_host, on_device), "{shape:?}");
    }
    assert_eq!(device.download(there.view()).unwrap().shape(), [3, 2]);
    assert_eq!((here.shape(), here.as_slice::<f32>()), (&[1, 3][..], Some(&[0.0, 1.0, 2.0][..])));
    assert_eq!((here.as_slice::<i32>(), here.is_on_host(), there.is_on_host()), (None, true, false));
    assert!(here.view_as(&[2]).is_err() && here.view_mut_as(&[3, 1]).is_ok());
    assert_eq!((here.into_vec::<f32>(), there.into_vec::<f32>()), (Some(vec![0.0, 1.0, 2.0]), None));
}
