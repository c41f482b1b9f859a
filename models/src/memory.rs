//! Host memory that may not be there.

use crate::ModelError;
use samebits_ops::{Element, ask_for_huge_pages};

/// Makes a tensor longer, with zeros.
pub(crate) fn grow<T: Element>(data: &mut Vec<T>, dims: &[usize]) -> Result<(), ModelError> {
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match count.map(|n| data.try_reserve_exact(n.saturating_sub(data.len())).map(|()| n)) {
        Some(Ok(n)) => {
            ask_for_huge_pages(data.spare_capacity_mut());
            data.resize(n, T::default());
            Ok(())
        }
        _ => {
            let why = format!("a {} tensor of shape {dims:?} does not fit; pass fewer tokens", T::NAME);
            Err(ModelError::input("memory", why))
        }
    }
}

/// Zeros for a tensor of extents `dims`; an error when memory does not hold it.
pub(crate) fn buffer<T: Element>(dims: &[usize]) -> Result<Vec<T>, ModelError> {
    let mut data = Vec::new();
    grow(&mut data, dims)?;
    Ok(data)
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn too_much_memory_is_an_error() {
        for dims in [&[usize::MAX, 2][..], &[usize::MAX / 8]] {
            assert!(buffer::<f32>(dims).unwrap_err().to_string().contains("does not fit"));
        }
    }
}
