//! `ours/cuda`: the ops of `samebits-ops` on a device, asked by name. What is asked and how it is checked is as for
//! `ours/cpu`; tensors go to the device and come back.

use super::Implementation;
use super::builtin::{Refusal, on_device};
use crate::checkpoints::Checkpoints;
use crate::clock::Clock;
use samebits_contract::case::{Answer, Case};
use samebits_ops::device::{self, Device};
use samebits_ops::{Cpu, Error};
use std::sync::Arc;

/// The ops on one device; or, where there is none, the reason for that.
pub struct CudaImplementation {
    device: Result<Device, String>,
    /// Makes the tables of rope.
    cpu: Cpu,
    /// The models that `chain` and `chain_backward` may name; none for a program that only offers ops.
    checkpoints: Option<Arc<Checkpoints>>,
    version: String,
}

/// The first GPU, with `budget` bytes of workspace per op; compiled kernels are kept in the folder that `SAMEBITS_KERNELS`
/// names, and units are taken from the folder that `SAMEBITS_SOURCES` names, if these are set.
///
/// # Errors
/// [`Error::Unavailable`] where there is none; [`Error::Device`].
pub fn open_gpu(budget: usize) -> Result<Device, Error> {
    let cache = std::env::var_os("SAMEBITS_KERNELS").map(std::path::PathBuf::from);
    let cuda = device::cuda::Cuda::open(0, cache.as_deref())?;
    let cuda = match std::env::var_os("SAMEBITS_SOURCES") {
        // SAFETY: whoever sets it has changed kernels of this program, and answers for what they touch.
        Some(folder) => unsafe { cuda.with_sources(folder.into()) },
        None => cuda,
    };
    Ok(Device::new(Box::new(cuda), usize::MAX, budget))
}

impl CudaImplementation {
    /// Answers on `device`, or says of every case that it is unsupported because there is none.
    pub fn new(device: Result<Device, Error>, cpu: Cpu) -> CudaImplementation {
        let device = device.map_err(|e| e.to_string());
        let on = device.as_ref().map_or_else(Clone::clone, |device| device.name().to_string());
        CudaImplementation { device, cpu, checkpoints: None, version: format!("{}, {on}", env!("CARGO_PKG_VERSION")) }
    }

    /// Answers on the first GPU: [`open_gpu`]. What is forbidden on `cpu` is forbidden on the device.
    pub fn first_gpu(cpu: Cpu, budget: usize) -> CudaImplementation {
        let device = open_gpu(budget).map(|device| device.strict_as(cpu.ledger()));
        CudaImplementation::new(device, cpu)
    }

    /// Also answers the ops `chain` and `chain_backward`, for the models of `checkpoints`.
    pub fn with_checkpoints(self, checkpoints: Arc<Checkpoints>) -> CudaImplementation {
        CudaImplementation { checkpoints: Some(checkpoints), ..self }
    }

    /// What the device is, or why there is none.
    pub fn device(&self) -> Result<&Device, &str> {
        self.device.as_ref().map_err(String::as_str)
    }

    /// Answers `case`, its op timed by `clock` where there is one.
    pub fn answer(&self, case: &Case, clock: Option<&Clock>) -> Answer {
        let device = match &self.device {
            // Every request has counters of its own.
            Ok(device) => device.recording(),
            Err(reason) => return Answer::unsupported(reason.clone()),
        };
        // Instruction sets and threads are the processor's.
        let device = device.with_budget(case.config.budget.unwrap_or(device.budget()));
        let models = self.checkpoints.as_ref().filter(|_| Checkpoints::answers(&case.op));
        let answer = if let Some(checkpoints) = models {
            checkpoints.answer_on(&self.cpu, Some(&device), case)
        } else {
            let kernel = || format!("{}/cuda:{}", case.op, device.ledger().kernels().join("+"));
            let answer = on_device(&device, case, clock).map(|outputs| Answer::ok(kernel(), outputs));
            answer.unwrap_or_else(Refusal::answer)
        };
        let plans = device.ledger().plans();
        let counts = device.ledger().counts();
        Answer {
            plan: plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; "),
            ledger: counts.into_iter().map(|(counter, count)| (counter.name().to_string(), count)).collect(),
            // A compiler's log has many lines, and a reason one.
            reason: answer.reason.trim_end().replace('\n', "; "),
            budget: case.config.budget,
            ..answer
        }
    }
}

impl Implementation for CudaImplementation {
    fn name(&self) -> &str {
        "ours/cuda"
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn absent(&self) -> Option<&str> {
        self.device().err()
    }

    fn run(&self, case: &Case) -> Answer {
        self.answer(case, None)
    }
}
