//! Another crate, with ops of its own: what it registers is called as any other op, and a call that comes again costs no
//! allocation. A program of its own, as what is registered stays so.

use samebits_ops::schema::{Attribute, Call, Input, Op, Output};
use samebits_ops::{Attributes, Backend, Calls, Cpu, DType, Entry, Error, Isa, Tensor, TensorMut, TensorRef, register};
use samebits_ops::{Prepared, bf16, device};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::Bound::Included;

/// `x[R,N] -> y[R,N]`: `x * x + offset`, in f32, last rounding.
static SQUARE: Op = Op {
    name: "outside_square",
    about: "every element times itself, plus a number",
    inputs: &[Input::activation("x", &["R", "N"])],
    attributes: &[Attribute::float("offset", Included(-1e3), Included(1e3), "0", "what is added")],
    outputs: &[Output::out("y", &["R", "N"])],
    ..Op::PLAIN
};

static RUN_SQUARE: Entry = Entry::new("outside_square", |cpu, args| {
    let (x, y) = (args.input("x"), args.output("y"));
    let offset = args.call.float("offset") as f32;
    match (x.dtype(), y.dtype()) {
        (DType::Fp32, DType::Fp32) => square::<f32>(cpu, offset, x, y),
        (DType::Bf16, DType::Bf16) => square::<bf16>(cpu, offset, x, y),
        (input, output) => Err(Error::Unavailable(format!("{input} to {output} is not offered"))),
    }
});

/// Rows lie where the strides of x say; each is one task's.
fn square<T: samebits_ops::Element>(cpu: &Cpu, offset: f32, x: TensorRef, y: TensorMut) -> Result<(), Error> {
    let x = x.host_rows::<T>("outside_square", "x")?;
    let per_chunk = cpu.rows_per_chunk(x.count(), x.n());
    cpu.chunks(y.host::<T>("outside_square", "y")?, per_chunk * x.n(), |chunk, y| {
        for (row, y) in (chunk * per_chunk..).zip(y.chunks_mut(x.n())) {
            y.iter_mut().zip(x.row(row)).for_each(|(y, x)| *y = T::narrow(x.widen() * x.widen() + offset));
        }
    });
    Ok(())
}

/// Registered once, whichever test comes first.
fn registered() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| register(&SQUARE, &RUN_SQUARE).unwrap());
}

#[test]
fn an_op_of_another_crate_is_called_by_name() {
    registered();
    assert_eq!(samebits_ops::schema::find("outside_square").unwrap().form(), "x[R,N] -> y[R,N]");
    // Two rows with a gap between them.
    let x = [1.0f32, 2.0, f32::NAN, -3.0, 0.5, f32::NAN];
    let x = TensorRef::strided(&x, &[2, 2], &[3, 1]).unwrap();
    let with = Attributes::new().with("offset", 1.0);
    let mut calls = Calls::default();
    for cpu in Isa::of_machine().flat_map(|isa| [1, 3].map(|threads| Cpu::new(isa, threads, usize::MAX).unwrap())) {
        let call = |attributes: &Attributes| {
            let mut y = [0f32; 4];
            let output = vec![("y", TensorMut::new(&mut y, &[2, 2]).unwrap())];
            cpu.call("outside_square", attributes.clone(), &[("x", x)], output).unwrap();
            y
        };
        assert_eq!(call(&Attributes::new()), [1.0, 4.0, 9.0, 0.25]);
        assert_eq!(call(&with), [2.0, 5.0, 10.0, 1.25]);
        for attributes in [&Attributes::new(), &with, &with] {
            let (expected, mut y) = (call(attributes), [0f32; 4]);
            let output = vec![("y", TensorMut::new(&mut y, &[2, 2]).unwrap())];
            calls.run(&cpu, "outside_square", attributes, &[("x", x)], output).unwrap();
            assert_eq!(y, expected);
        }
    }
    let (x, mut y) = ([bf16::from_f32(3.0)], [bf16::ZERO]);
    let x = TensorRef::new(&x, &[1, 1]).unwrap();
    let output = vec![("y", TensorMut::new(&mut y, &[1, 1]).unwrap())];
    Cpu::best().call("outside_square", Attributes::new(), &[("x", x)], output).unwrap();
    assert_eq!(y[0].to_f32(), 9.0);
}

/// A call of an op of ours is checked by its form before the op sees it; so is one of theirs.
#[test]
fn a_call_of_it_is_checked() {
    registered();
    let (x, mut y) = ([1f32, 2.0], [7f32; 2]);
    let mut refused = |attributes: Attributes, name: &str, shape: &[usize]| {
        let inputs = [(name, TensorRef::new(&x, shape).unwrap())];
        let output = vec![("y", TensorMut::new(&mut y, &[1, 2]).unwrap())];
        let error = Cpu::best().call("outside_square", attributes, &inputs, output).unwrap_err().to_string();
        assert_eq!(y, [7.0; 2], "nothing was written");
        error
    };
    for (error, part) in [
        (refused(Attributes::new(), "z", &[1, 2]), "outside_square has no such input"),
        (refused(Attributes::new(), "x", &[2]), "must have the form [R,N]"),
        (refused(Attributes::new(), "x", &[2, 1]), "must be [2, 1]"),
        (refused(Attributes::new().with("offset", 1e4), "x", &[1, 2]), "param `offset`"),
        (refused(Attributes::new().with("scale", 1.0), "x", &[1, 2]), "param `scale`"),
    ] {
        assert!(error.contains(part), "{error}: {part}");
    }
    let output = vec![("y", TensorMut::new(&mut y[..1], &[1, 1]).unwrap())];
    let half = [samebits_ops::f16::ONE];
    let inputs = [("x", TensorRef::new(&half, &[1, 1]).unwrap())];
    let error = Cpu::best().call("outside_square", Attributes::new(), &inputs, output).unwrap_err().to_string();
    assert_eq!(error, "fp16 to fp32 is not offered");
}

/// Whoever comes second keeps nothing, and the first one's op stays what it is.
#[test]
fn a_name_is_given_once() {
    registered();
    static WRONG: Entry = Entry::new("outside_square", |_, _| Err(Error::Unavailable("the wrong one".into())));
    static SCALE: Op = Op { name: "scale", ..SQUARE };
    static RUN_SCALE: Entry = Entry::new("scale", |_, _| Err(Error::Unavailable("the wrong one".into())));
    static UNFORMED: Op = Op { name: "outside_unformed", outputs: &[], ..SQUARE };
    static RUN_UNFORMED: Entry = Entry::new("outside_unformed", |_, _| Ok(()));
    static NAMED: Op = Op { name: "outside_named", ..SQUARE };
    static UNIT: device::Unit = device::Unit::of("outside_other", "", &[]);
    static RUN_NAMED: Entry = Entry::new("outside_named", |_, _| Ok(())).on_device(|_, _| Ok(()), &UNIT);
    for (op, entry, part) in [
        (&SQUARE, &WRONG, "another op has this name"),
        (&SCALE, &RUN_SCALE, "another op has this name"),
        (&UNFORMED, &RUN_UNFORMED, "it has no output"),
        (&NAMED, &RUN_SQUARE, "its entry is called `outside_square`"),
        (&NAMED, &RUN_NAMED, "its unit bears another name"),
    ] {
        let error = register(op, entry).expect_err(part).to_string();
        assert!(error.contains(part), "{error}: {part}");
    }
    for absent in ["outside_unformed", "outside_named"] {
        assert!(samebits_ops::schema::find(absent).is_none(), "{absent}");
    }
    let (x, mut y) = ([2f32], [0f32; 2]);
    let x = [("x", TensorRef::new(&x, &[1, 1]).unwrap())];
    let (square, scale) = y.split_at_mut(1);
    for (op, y) in [("outside_square", square), ("scale", scale)] {
        let output = vec![("y", TensorMut::new(y, &[1, 1]).unwrap())];
        Cpu::best().call(op, Attributes::new(), &x, output).unwrap();
    }
    assert_eq!(y, [4.0, 2.0]);
}

/// An op with a form alone can be checked and not run; the error has the names of those that can.
#[test]
fn a_form_alone_is_not_run() {
    registered();
    static FORM: Op = Op { name: "outside_form", ..SQUARE };
    samebits_ops::schema::register(&FORM).unwrap();
    let (x, mut y) = ([2f32], [0f32]);
    let (x, y) = (TensorRef::new(&x, &[1, 1]).unwrap(), TensorMut::new(&mut y, &[1, 1]).unwrap());
    let error = Cpu::best().call("outside_form", Attributes::new(), &[("x", x)], vec![("y", y)]).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("`outside_form` is not offered") && error.contains("outside_square"), "{error}");
}

/// Counts what the thread that asks allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs nothing.
struct Nothing;

impl Backend for Nothing {
    fn empty(&self, _: DType, _: &[usize]) -> Result<Tensor, Error> {
        unimplemented!()
    }

    fn upload(&self, _: TensorRef) -> Result<Tensor, Error> {
        unimplemented!()
    }

    fn download(&self, _: TensorRef) -> Result<Tensor, Error> {
        unimplemented!()
    }

    fn capture(&self, _: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<device::Graph>, Error> {
        unimplemented!()
    }

    fn replay(&self, _: &device::Graph) -> Result<(), Error> {
        unimplemented!()
    }

    fn run(&self, _: &Call, _: &[(&str, TensorRef)], _: Vec<(&str, TensorMut)>) -> Result<(), Error> {
        Ok(())
    }

    fn prepare(&self, _: &Call, _: &[(&str, TensorRef)]) -> Result<Option<Prepared>, Error> {
        unimplemented!()
    }
}

#[test]
fn a_call_that_comes_again_allocates_nothing() {
    registered();
    let (x, w, mut calls) = ([1f32; 64], [1f32; 8], Calls::default());
    let eps = Attributes::new().with("eps", 1e-5).with("rounding", "hf");
    let mut allocations = |op: &str, rows: usize, attributes: &Attributes| {
        let mut y = vec![0f32; rows * 8];
        let x = TensorRef::new(&x[..rows * 8], &[rows, 8]).unwrap();
        let inputs = [("x", x), ("w", TensorRef::new(&w, &[8]).unwrap())];
        let inputs = if op == "rms_norm" { &inputs[..] } else { &inputs[..1] };
        let output = vec![("y", TensorMut::new(&mut y, &[rows, 8]).unwrap())];
        let before = ALLOCATIONS.get();
        calls.run(&Nothing, op, attributes, inputs, output).unwrap();
        ALLOCATIONS.get() - before
    };
    for round in 0..3 {
        for rows in 1..=8 {
            for (op, attributes) in [("rms_norm", &eps), ("outside_square", &Attributes::new())] {
                let found = allocations(op, rows, attributes);
                assert_eq!(found > 0, round == 0, "{op} of {rows} rows, round {round}: {found} allocations");
            }
        }
    }
}

/// 0 and -0 are two numbers: what one call was given is not another's.
#[test]
fn a_call_that_comes_again_has_its_own_sign() {
    let (x, mut calls) = ([1f32], Calls::default());
    for factor in [0.0f64, -0.0, 0.0] {
        let mut y = [7f32];
        let attributes = Attributes::new().with("factor", factor);
        let output = vec![("y", TensorMut::new(&mut y, &[1]).unwrap())];
        calls.run(&Cpu::best(), "scale", &attributes, &[("x", TensorRef::new(&x, &[1]).unwrap())], output).unwrap();
        assert_eq!(y[0].to_bits(), (factor as f32).to_bits());
    }
}
