//! Device memory: what is given back is kept for the next that fits, up to a cap.

use super::Driver;

/// Sizes are multiples of this.
const LINE: usize = 256;

/// The room that `bytes` take.
pub fn room_of(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(LINE)
}

/// Whether a place of `kept` bytes serves a tensor of `room`: it does not get one many times its size.
pub fn serves(kept: usize, room: usize) -> bool {
    kept >= room && kept / 2 <= room
}

/// All memory a device has been asked for.
pub struct Arena {
    cap: usize,
    held: usize,
    /// Given back, by size: `(room, address)`, ascending.
    kept: Vec<(usize, u64)>,
}

impl Arena {
    pub fn new(cap: usize) -> Arena {
        Arena { cap, held: 0, kept: Vec::new() }
    }

    pub fn held(&self) -> usize {
        self.held
    }

    /// At least `bytes`: the address and the room there. What is kept goes back to the device before more is asked for
    /// than the cap allows or the device has.
    /// Only where it `may_free`, which waits for the device.
    ///
    /// # Safety
    /// The arena has always been asked with this driver.
    pub unsafe fn take(&mut self, driver: &dyn Driver, bytes: usize, may_free: bool) -> Option<(u64, usize)> {
        // SAFETY: the caller's promise.
        let (address, room) = unsafe { self.find(driver, bytes, may_free)? };
        // SAFETY: the driver gave `room` bytes there, at least as many, and they are nobody's.
        unsafe { driver.lend(address, bytes) };
        Some((address, room))
    }

    /// # Safety
    /// As [`Arena::take`].
    unsafe fn find(&mut self, driver: &dyn Driver, bytes: usize, may_free: bool) -> Option<(u64, usize)> {
        let room = room_of(bytes)?;
        let at = self.kept.partition_point(|&(kept, _)| kept < room);
        if self.kept.get(at).is_some_and(|&(kept, _)| serves(kept, room)) {
            let (room, address) = self.kept.remove(at);
            return Some((address, room));
        }
        let ask = |held: usize| if room > self.cap.saturating_sub(held) { None } else { driver.allocate(room) };
        let address = match ask(self.held) {
            Some(address) => address,
            None => {
                if self.kept.is_empty() || !may_free {
                    return None;
                }
                // SAFETY: the caller's promise.
                unsafe { self.free_kept(driver) };
                let left = self.held;
                if room > self.cap.saturating_sub(left) { None } else { driver.allocate(room) }?
            }
        };
        self.held += room;
        Some((address, room))
    }

    /// Gives what is kept to the device.
    ///
    /// # Safety
    /// As [`Arena::take`].
    pub unsafe fn free_kept(&mut self, driver: &dyn Driver) {
        for (room, address) in self.kept.drain(..) {
            self.held -= room;
            // SAFETY: the driver gave it; who had it has given it back, and it stands here no more.
            unsafe { driver.free(address) };
        }
    }

    /// Keeps memory for the next.
    ///
    /// # Safety
    /// [`Arena::take`] gave it, and nothing that starts from now on uses it.
    pub unsafe fn give_back(&mut self, address: u64, room: usize) {
        let at = self.kept.partition_point(|&kept| kept < (room, address));
        self.kept.insert(at, (room, address));
    }
}
