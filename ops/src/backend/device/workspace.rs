//! Workspace on a device from the same plans as on the CPU: the first that the budget and the device have room for.

use super::{Buffer, Device};
use crate::ledger::{Counter, PlanRecord, Why};
use crate::workspace::Plan;
use crate::{Error, Ledger};

/// Takes the first of `plans` that fits, and its workspace of f32. `plans` go from preferred to smallest.
///
/// # Errors
/// [`Error::Budget`] when none fits the budget; [`Error::Memory`] when the device has no room for one that does;
/// [`Error::Forbidden`] in strict mode.
pub fn choose<P: Plan>(
    device: &Device,
    op: &'static str,
    plans: impl IntoIterator<Item = P>,
) -> Result<(P, Buffer<f32>), Error> {
    let ledger: &Ledger = device.ledger();
    let mut why = Why::Preferred;
    let mut smallest = usize::MAX;
    let mut refused = None;
    for plan in plans {
        let bytes = plan.need().shared.saturating_mul(4);
        smallest = smallest.min(bytes);
        if bytes > device.budget() {
            why = if why == Why::Memory { why } else { Why::Budget };
            continue;
        }
        // What was refused would be refused again.
        if refused.is_some_and(|refused| bytes >= refused) {
            continue;
        }
        match device.take::<f32>(op, bytes / 4, true) {
            Ok(room) => {
                ledger.note(Counter::WorkspaceF32, bytes, "workspace of f32 on the device")?;
                ledger.plan(PlanRecord { op, bytes, workers: 1, tiles: plan.tiles(), why });
                return Ok((plan, room));
            }
            Err(Error::Memory { .. }) => {
                ledger.note(Counter::Retries, 1, "the device has no memory for the plan; lower the budget")?;
                refused = Some(bytes);
                why = Why::Memory;
            }
            Err(error) => return Err(error),
        }
    }
    match refused {
        Some(bytes) => Err(Error::Memory { op, bytes }),
        None => Err(Error::Budget { op, budget: device.budget(), smallest }),
    }
}
