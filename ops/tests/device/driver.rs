//! The CUDA driver over a library that stands for libcuda (`cuda.c`): it queues copies and kernels until the stream is
//! waited for, as a GPU may, counts what is live and refuses what is not. So what depends on the order of host and device fails here every
//! time, and on a GPU rarely.
//!
//! The library must be found when a process starts, so each test runs itself again with it.

use samebits_ops::device::cuda::Cuda;
use samebits_ops::device::{Device, add};
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = include_str!("cuda.c");
/// Set in the process that has the library.
const INSIDE: &str = "SAMEBITS_TEST_CUDA";

/// Runs `test` in a process of its own whose libcuda and libnvrtc are ours; `name` is that of the test.
fn with_library(name: &str, test: fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return test();
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("cuda.c"), SOURCE).unwrap();
    let compile = |library: &str| {
        let mut cc = Command::new(std::env::var("CC").unwrap_or("cc".into()));
        cc.current_dir(&folder).args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "cuda.c", "-o", library]);
        assert!(cc.status().expect("a C compiler").success());
    };
    compile("libcuda.so");
    compile("libnvrtc.so");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("driver::{name}"), "--nocapture"])
        .env("LD_LIBRARY_PATH", &folder)
        .env(INSIDE, "1")
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// A number that the library keeps.
fn count(name: &str) -> i32 {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the library is open in this process and exports ints under these names.
    unsafe {
        let library = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let at = libc::dlsym(library, name.as_ptr()).cast::<i32>();
        assert!(!at.is_null(), "{name:?}");
        *at
    }
}

fn open() -> Device {
    Device::new(Box::new(Cuda::open(0, None).unwrap()), usize::MAX, usize::MAX)
}

/// A source that changes as soon as the borrow is over, as pinned memory in the hands of its owner.
#[test]
fn a_slice_is_not_read_after_its_borrow() {
    with_library("a_slice_is_not_read_after_its_borrow", || {
        let device = open();
        // Small ones, more than the staging memory holds, and large ones.
        for (count, len) in [(1, 7), (300, 1000), (3, 100_000)] {
            let mut host = vec![0f32; len];
            let buffers: Vec<_> = (0..count)
                .map(|i| {
                    host.fill(i as f32);
                    let buffer = device.upload("test", &host).unwrap();
                    host.fill(-1.0);
                    buffer
                })
                .collect();
            for (i, buffer) in buffers.iter().enumerate() {
                let mut found = vec![0f32; len];
                buffer.download(&device, &mut found).unwrap();
                assert!(found.iter().all(|&x| x == i as f32), "{count} of {len}: {i} is {}", found[0]);
            }
        }
    });
}

/// What a read wants is there when it returns.
#[test]
fn a_read_waits_for_the_device() {
    with_library("a_read_waits_for_the_device", || {
        let device = open();
        let buffer = device.upload("test", &[7i32; 9]).unwrap();
        let mut copy = device.empty::<i32>("test", 9).unwrap();
        copy.copy_from(0, &buffer, 0, 9).unwrap();
        let mut found = [0; 9];
        copy.download(&device, &mut found).unwrap();
        assert_eq!(found, [7; 9]);
    });
}

#[test]
fn a_dropped_device_leaves_nothing_behind() {
    with_library("a_dropped_device_leaves_nothing_behind", || {
        for panics in [false, true] {
            let device = open();
            let work = || {
                let (a, b) = (device.upload("test", &[1f32; 64])?, device.upload("test", &[1f32; 64])?);
                let mut y = device.empty::<f32>("test", 64)?;
                add(&device, &a, &b, &mut y)?;
                let graph = device.capture(&mut || add(&device, &a, &b, &mut y))?;
                device.replay(&graph)?;
                device.seconds(&mut || add(&device, &a, &b, &mut y))?;
                if panics {
                    device.capture(&mut || panic!("in captured work"))?;
                }
                Ok::<_, samebits_ops::Error>(graph)
            };
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            assert_eq!(done.is_err(), panics);
            drop(done);
            // Something is under way, and must have ended before its memory goes.
            drop(device.upload("test", &[1f32; 64]).unwrap());
            assert!(count("memory") > 0 && count("modules") > 0 && count("contexts") == 1 && count("queued") > 0);
            drop(device);
            for kind in
                ["memory", "host", "modules", "streams", "events", "graphs", "execs", "contexts", "torn", "refused"]
            {
                assert_eq!(count(kind), 0, "{kind}, panics: {panics}");
            }
        }
    });
}
