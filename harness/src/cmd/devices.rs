use anyhow::Result;
use cudarc::driver::{result as driver, sys as driver_sys};
use cudarc::nvrtc::sys as nvrtc_sys;
use samebits_ops::Isa;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io::Write;
use std::process::ExitCode;

/// Prints what this machine offers: instruction sets, cores, and what CUDA finds
///
/// CUDA is looked for when this runs and never needed to build. A machine without it is no error: the lines say what
/// was not found.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Devices {
    cpu: CpuReport,
    cuda: Cuda,
}

#[derive(Serialize)]
struct CpuReport {
    model: String,
    cores: usize,
    /// Every instruction set there are kernels for, and whether this machine has it.
    isas: BTreeMap<&'static str, bool>,
    best: &'static str,
}

#[derive(Serialize)]
struct Cuda {
    driver: Library,
    devices: Vec<Gpu>,
    nvrtc: Library,
}

/// A library that is opened at run time: its version, or why it cannot be used.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Library {
    Version(String),
    Unusable(String),
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    compute_capability: String,
    memory_bytes: usize,
    multiprocessors: i32,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let devices = Devices { cpu: cpu(), cuda: cuda() };
    let text = if args.json { serde_json::to_string(&devices)? + "\n" } else { devices.text() };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(ExitCode::SUCCESS)
}

impl Devices {
    fn text(&self) -> String {
        let Devices { cpu, cuda } = self;
        let isas = cpu.isas.iter().map(|(name, has)| format!("{name} {}", if *has { "yes" } else { "no" }));
        let mut lines = vec![
            format!("cpu: {}, {} cores", cpu.model, cpu.cores),
            format!("isa: {}; best {}", isas.collect::<Vec<_>>().join(", "), cpu.best),
        ];
        match &cuda.driver {
            Library::Version(version) => {
                lines.push(format!("cuda: driver for CUDA {version}, {} devices", cuda.devices.len()));
                for (i, gpu) in cuda.devices.iter().enumerate() {
                    lines.push(format!(
                        "cuda:{i}: {}, compute capability {}, {:.1} GiB, {} multiprocessors",
                        gpu.name,
                        gpu.compute_capability,
                        gpu.memory_bytes as f64 / (1u64 << 30) as f64,
                        gpu.multiprocessors
                    ));
                }
            }
            Library::Unusable(why) => lines.push(format!("cuda: {why}")),
        }
        lines.push(match &cuda.nvrtc {
            Library::Version(version) => format!("nvrtc: {version}"),
            Library::Unusable(why) => format!("nvrtc: {why}"),
        });
        lines.join("\n") + "\n"
    }
}

fn cpu() -> CpuReport {
    CpuReport {
        model: crate::machine::processor(),
        cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
        isas: Isa::all().map(|isa| (isa.name(), isa.available())).collect(),
        best: Isa::best().name(),
    }
}

fn cuda() -> Cuda {
    let (driver, devices) = match driver_and_devices() {
        Ok((version, devices)) => (Library::Version(version), devices),
        Err(why) => (Library::Unusable(why), Vec::new()),
    };
    Cuda { driver, devices, nvrtc: nvrtc().map_or_else(Library::Unusable, Library::Version) }
}

fn driver_and_devices() -> Result<(String, Vec<Gpu>), String> {
    // SAFETY: opening the driver library runs only its own initialisers; cudarc panics when it is called without the
    // library, which is why this is asked first.
    if !unsafe { driver_sys::is_culib_present() } {
        return Err("no driver library found (libcuda)".into());
    }
    let failed =
        |what: &'static str| move |e: driver::DriverError| format!("driver library found, but {what}: {:?}", e.0);
    let mut version: c_int = 0;
    // SAFETY: cuDriverGetVersion writes one int through the pointer and may be called before cuInit.
    unsafe { driver_sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("it does not say its version"))?;
    driver::init().map_err(failed("it does not start"))?;
    let mut devices = Vec::new();
    for ordinal in 0..driver::device::get_count().map_err(failed("it does not list devices"))? {
        devices.push(gpu(ordinal).map_err(failed("a device does not describe itself"))?);
    }
    Ok((format!("{}.{}", version / 1000, version % 1000 / 10), devices))
}

fn gpu(ordinal: c_int) -> Result<Gpu, driver::DriverError> {
    use driver_sys::CUdevice_attribute as Attribute;
    let device = driver::device::get(ordinal)?;
    // SAFETY: `device` was returned by cuDeviceGet, which is all that cuDeviceGetAttribute asks for.
    let attribute = |which| unsafe { driver::device::get_attribute(device, which) };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Gpu {
        name: driver::device::get_name(device)?,
        compute_capability: format!("{major}.{minor}"),
        // SAFETY: as above.
        memory_bytes: unsafe { driver::device::total_mem(device)? },
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

fn nvrtc() -> Result<String, String> {
    // SAFETY: as for the driver library.
    if !unsafe { nvrtc_sys::is_culib_present() } {
        return Err("no compiler library found (libnvrtc)".into());
    }
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: nvrtcVersion writes one int through each pointer.
    let result = unsafe { nvrtc_sys::nvrtcVersion(&mut major, &mut minor) };
    result.result().map_err(|e| format!("compiler library found, but it does not say its version: {e:?}"))?;
    Ok(format!("{major}.{minor}"))
}
