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
    pub fn take(&mut self, driver: &dyn Driver, bytes: usize, may_free: bool) -> Option<(u64, usize)> {
        let (address, room) = self.find(driver, bytes, may_free)?;
        driver.lend(address, bytes);
        Some((address, room))
    }

    fn find(&mut self, driver: &dyn Driver, bytes: usize, may_free: bool) -> Option<(u64, usize)> {
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
                let kept: usize = self.kept.iter().map(|&(room, _)| room).sum();
                if kept == 0 || !may_free {
                    return None;
                }
                for (_, address) in self.kept.drain(..) {
                    driver.free(address);
                }
                self.held -= kept;
                let left = self.held;
                if room > self.cap.saturating_sub(left) { None } else { driver.allocate(room) }?
            }
        };
        self.held += room;
        Some((address, room))
    }

    pub fn give_back(&mut self, address: u64, room: usize) {
        let at = self.kept.partition_point(|&kept| kept < (room, address));
        self.kept.insert(at, (room, address));
    }
}
