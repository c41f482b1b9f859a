//! One file per verb, and the options that several verbs share.

pub mod answer;
pub mod devices;
pub mod forward;
pub mod generate;

use anyhow::Result;
use indicatif::ProgressBar;
use samebits_ops::{Cpu, Isa};
use std::io::IsTerminal;
use std::time::Duration;

/// How to run on this machine; no setting moves a bit.
#[derive(clap::Args)]
pub struct Machine {
    /// Instruction set: scalar, avx2, avx512 or avx512bf16 [default: the best of this machine]
    #[arg(long)]
    isa: Option<Isa>,

    /// Number of threads, 1 to 1024 [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl Machine {
    /// The CPU to run on, with at most `budget` bytes of workspace per op.
    pub fn cpu(&self, budget: Option<usize>) -> Result<Cpu> {
        let best = Cpu::best();
        let isa = self.isa.unwrap_or(best.isa());
        let threads = self.threads.unwrap_or(best.threads());
        Ok(Cpu::new(isa, threads, budget.unwrap_or(usize::MAX))?)
    }
}

/// A line on stderr that shows work is going on, on a terminal only; it clears itself when dropped.
pub struct Working(ProgressBar);

impl Working {
    /// Shows `what` until dropped.
    pub fn on(what: String) -> Working {
        if !std::io::stderr().is_terminal() {
            return Working(ProgressBar::hidden());
        }
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(Duration::from_millis(100));
        Working(bar)
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
