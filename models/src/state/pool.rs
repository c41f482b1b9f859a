//! Numbered places that sequences share.

use crate::ModelError;
use std::str::FromStr;

/// Places of which each has some users, or is free.
pub(super) struct Pool {
    order: PageOrder,
    /// The last one is taken next.
    free: Vec<i32>,
    /// By place, how many use it.
    users: Vec<u32>,
}

/// Which of the free places is taken next. No order may move a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageOrder {
    /// The lowest number.
    #[default]
    Ascending,
    /// The highest number.
    Descending,
    /// Far from the one before.
    Scattered,
}

impl FromStr for PageOrder {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<PageOrder, ModelError> {
        match text {
            "ascending" => Ok(PageOrder::Ascending),
            "descending" => Ok(PageOrder::Descending),
            "scattered" => Ok(PageOrder::Scattered),
            _ => Err(ModelError::input("page order", format!("`{text}` is not ascending, descending or scattered"))),
        }
    }
}

impl Pool {
    pub fn new(order: PageOrder) -> Pool {
        Pool { order, free: Vec::new(), users: Vec::new() }
    }

    /// Places, free or not.
    pub fn len(&self) -> usize {
        self.users.len()
    }

    /// How many places there are to be next, where none is free: by half more, so that growing costs little beside what is
    /// written.
    pub fn next_len(&self) -> Option<usize> {
        let len = self.len();
        self.free.is_empty().then(|| (len + (len / 2).max(4)).min(i32::MAX as usize))
    }

    /// Goes on to `len` places; the new ones are free.
    pub fn grow(&mut self, len: usize) {
        let old = self.len();
        self.users.resize(len, 0);
        self.free.extend((old as i32..len as i32).rev());
    }

    /// A place that nobody else uses; one is free.
    pub fn take(&mut self) -> i32 {
        let free = 0..self.free.len();
        let place = match self.order {
            PageOrder::Ascending => free.min_by_key(|&i| self.free[i]),
            PageOrder::Descending => free.max_by_key(|&i| self.free[i]),
            PageOrder::Scattered => free.min_by_key(|&i| self.free[i].wrapping_mul(-1_640_531_535)),
        };
        let place = self.free.swap_remove(place.expect("a place is free"));
        self.users[place as usize] = 1;
        place
    }

    /// One more user.
    pub fn share(&mut self, place: i32) {
        self.users[place as usize] += 1;
    }

    /// Whether others use it too.
    pub fn is_shared(&self, place: i32) -> bool {
        self.users[place as usize] > 1
    }

    /// One user less; what nobody uses is taken by others as it is.
    pub fn release(&mut self, place: i32) {
        self.users[place as usize] -= 1;
        if self.users[place as usize] == 0 {
            self.free.push(place);
        }
    }

    /// Places that somebody uses.
    #[cfg(feature = "unit-tests")]
    pub fn used(&self) -> usize {
        self.len() - self.free.len()
    }
}
