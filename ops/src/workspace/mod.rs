//! Workspace from a budget. An op lists its plans from the one it prefers to the smallest; the first that the budget
//! and the system have room for is taken, in one allocation that is cut into a shared part and a slot for each worker.
//! Workers go round in their slots, tile after tile. Every plan gives the same bits.

pub mod memory;

use crate::ledger::{Counter, PlanRecord, Why};
use crate::workspace::memory::{LINE, Memory};
use crate::{Cpu, Error};

/// What a plan needs, in words of four bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// What all workers read.
    pub shared: usize,
    /// What each worker has to itself.
    pub slot: usize,
    /// Workers, at least 1.
    pub workers: usize,
    /// How many of the words, shared and in all slots, hold pairs of bf16; the others hold f32.
    pub pairs: usize,
}

impl Need {
    fn words(&self) -> usize {
        let line = |words: usize| words.div_ceil(LINE).saturating_mul(LINE);
        line(self.shared).saturating_add(line(self.slot).saturating_mul(self.workers))
    }

    fn bytes(&self) -> usize {
        self.words().saturating_mul(4)
    }
}

/// A way to cut an op into tiles.
pub trait Plan {
    /// The workspace it takes.
    fn need(&self) -> Need;
    /// Its tile extents by name, for the record; unused places have no name.
    fn tiles(&self) -> [(&'static str, usize); 3];
}

/// Workspace of one call, given back to its [`Cpu`] when dropped.
pub struct Workspace<'c> {
    cpu: &'c Cpu,
    memory: Option<Memory>,
    need: Need,
}

impl Workspace<'_> {
    /// The shared words, and one slot of words for each worker.
    pub fn split(&mut self) -> (&mut [u32], Vec<&mut [u32]>) {
        let Need { shared, slot, workers, .. } = self.need;
        let words: &mut [u32] = self.memory.as_mut().expect("held until dropped");
        let line = |words: usize| words.div_ceil(LINE) * LINE;
        let (front, mut rest) = words.split_at_mut(line(shared));
        let slots = (0..workers).map(|_| {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(line(slot));
            rest = others;
            &mut mine[..slot]
        });
        let slots = slots.collect();
        (&mut front[..shared], slots)
    }
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.cpu.keep(memory);
        }
    }
}

/// Takes the first of `plans` that fits, and its workspace. `plans` go from preferred to smallest.
///
/// # Errors
/// [`Error::Budget`] when none fits the budget; [`Error::Memory`] when the system has no room for one that does;
/// [`Error::Forbidden`] in strict mode.
pub fn choose<'c, P: Plan>(
    cpu: &'c Cpu,
    op: &'static str,
    plans: impl IntoIterator<Item = P>,
) -> Result<(P, Workspace<'c>), Error> {
    choose_from(cpu, op, plans, Memory::new)
}

fn choose_from<'c, P: Plan>(
    cpu: &'c Cpu,
    op: &'static str,
    plans: impl IntoIterator<Item = P>,
    allocate: impl Fn(usize) -> Option<Memory>,
) -> Result<(P, Workspace<'c>), Error> {
    let ledger = cpu.ledger();
    let mut why = Why::Preferred;
    let mut smallest = usize::MAX;
    let mut refused = None;
    for plan in plans {
        let need = plan.need();
        let bytes = need.bytes();
        smallest = smallest.min(bytes);
        if bytes > cpu.budget() {
            why = if why == Why::Memory { why } else { Why::Budget };
            continue;
        }
        // What was refused would be refused again.
        if refused.is_some_and(|refused| bytes >= refused) {
            continue;
        }
        // Memory that is too small goes back before new memory is asked for: the budget holds at every moment.
        let memory = match cpu.kept().filter(|kept| kept.len() >= need.words()) {
            Some(kept) => Some(kept),
            None => match allocate(need.words()) {
                Some(memory) => {
                    ledger.note(Counter::Allocated, bytes, "workspace")?;
                    Some(memory)
                }
                None => None,
            },
        };
        let Some(memory) = memory else {
            ledger.note(Counter::Retries, 1, "the system has no memory for the plan; lower the budget")?;
            refused = Some(bytes);
            why = Why::Memory;
            continue;
        };
        let workspace = Workspace { cpu, memory: Some(memory), need };
        ledger.note(Counter::WorkspaceBf16, 4 * need.pairs, "workspace of bf16 pairs")?;
        let words = need.shared + need.slot * need.workers;
        ledger.note(Counter::WorkspaceF32, 4 * words.saturating_sub(need.pairs), "workspace of f32")?;
        ledger.plan(PlanRecord { op, bytes, workers: need.workers, tiles: plan.tiles(), why });
        return Ok((plan, workspace));
    }
    match refused {
        Some(bytes) => Err(Error::Memory { op, bytes }),
        None => Err(Error::Budget { op, budget: cpu.budget(), smallest }),
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::Isa;

    struct Words(usize);

    impl Plan for Words {
        fn need(&self) -> Need {
            Need { shared: self.0, slot: 16, workers: 2, pairs: 0 }
        }
        fn tiles(&self) -> [(&'static str, usize); 3] {
            [("words", self.0), ("", 0), ("", 0)]
        }
    }

    fn cpu(budget: usize) -> Cpu {
        Cpu::new(Isa::Scalar, 2, budget).unwrap()
    }

    fn sizes() -> impl Iterator<Item = Words> {
        [4096, 1024, 160].into_iter().map(Words)
    }

    pub(crate) fn the_largest_plan_within_the_budget_is_taken_and_recorded() {
        for (budget, words, why) in [
            (usize::MAX, 4096, Why::Preferred),
            (4 * (4096 + 32), 4096, Why::Preferred),
            (4 * (4096 + 32) - 1, 1024, Why::Budget),
            (4 * (160 + 32), 160, Why::Budget),
        ] {
            let cpu = cpu(budget);
            let (plan, mut workspace) = choose(&cpu, "test", sizes()).unwrap();
            assert_eq!(plan.0, words);
            let (shared, slots) = workspace.split();
            assert_eq!((shared.len(), slots.len(), slots[1].len()), (words, 2, 16));
            let record = &cpu.ledger().plans()[0];
            assert_eq!((record.bytes, record.why), (4 * (words + 32), why));
            assert!(record.bytes <= budget);
        }
    }

    pub(crate) fn below_the_smallest_plan_is_an_error_that_names_it() {
        let cpu = cpu(4 * (160 + 32) - 1);
        let error = choose(&cpu, "test", sizes()).err().unwrap();
        assert_eq!(error, Error::Budget { op: "test", budget: 767, smallest: 768 });
    }

    pub(crate) fn memory_that_is_refused_is_retried_smaller_and_then_reported() {
        let cpu = cpu(usize::MAX);
        let at_most = |most: usize| move |words: usize| if words > most { None } else { Memory::new(words) };
        let (plan, workspace) = choose_from(&cpu, "test", sizes(), at_most(2000)).unwrap();
        drop(workspace);
        assert_eq!((plan.0, cpu.ledger().count(Counter::Retries)), (1024, 1));
        assert_eq!(cpu.ledger().plans()[0].why, Why::Memory);
        drop(cpu.kept());
        let error = choose_from(&cpu, "test", sizes(), at_most(0)).err().unwrap();
        assert_eq!(error, Error::Memory { op: "test", bytes: 768 });
    }

    pub(crate) fn strict_mode_forbids_a_retry() {
        let cpu = cpu(usize::MAX);
        cpu.ledger().forbid(Counter::Retries);
        let error = choose_from(&cpu, "test", sizes(), |_| None).err().unwrap().to_string();
        assert!(error.contains("plan_retries"), "{error}");
    }

    pub(crate) fn workspace_is_kept_for_the_next_call() {
        let cpu = cpu(usize::MAX);
        drop(choose(&cpu, "test", sizes()).unwrap());
        let allocated = cpu.ledger().count(Counter::Allocated);
        drop(choose(&cpu, "test", sizes()).unwrap());
        assert_eq!(cpu.ledger().count(Counter::Allocated), allocated);
    }
}
