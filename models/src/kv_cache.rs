//! Keys and values of the tokens seen so far.

use crate::ModelError;
use samebits_ops::Element;

/// Keys and values of every layer, each contiguous as `[B, capacity, Hkv, D]`, holding the first `len` positions.
pub(crate) struct KvCache<A> {
    /// Keys and values by layer.
    layers: Vec<[Vec<A>; 2]>,
    batch: usize,
    capacity: usize,
    /// Elements of one position: Hkv * D.
    width: usize,
    len: usize,
}

impl<A: Element> KvCache<A> {
    /// An empty cache for `batch` sequences of up to `capacity` positions of `width` elements.
    pub fn new(layers: usize, batch: usize, capacity: usize, width: usize) -> Result<KvCache<A>, ModelError> {
        let side = || buffer(&[batch, capacity, width]);
        let layers = (0..layers).map(|_| Ok([side()?, side()?])).collect::<Result<_, ModelError>>()?;
        Ok(KvCache { layers, batch, capacity, width, len: 0 })
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions held; the position of the next token.
    pub fn len(&self) -> usize {
        self.len
    }

    /// An error unless `count` more positions fit.
    pub fn check_room(&self, count: usize) -> Result<(), ModelError> {
        if count <= self.capacity - self.len {
            return Ok(());
        }
        let (len, capacity) = (self.len, self.capacity);
        Err(ModelError::input("kv cache", format!("{count} more positions after {len} exceed its capacity {capacity}")))
    }

    /// Writes `k` and `v`, each `[B, count, Hkv, D]`, behind the positions held. They count as held after
    /// [`KvCache::advance`], once every layer has them.
    pub fn append(&mut self, layer: usize, count: usize, k: &[A], v: &[A]) -> Result<(), ModelError> {
        self.check_room(count)?;
        let (piece, row, start) = (count * self.width, self.capacity * self.width, self.len * self.width);
        for (side, new) in self.layers[layer].iter_mut().zip([k, v]) {
            for (row, new) in side.chunks_exact_mut(row).zip(new.chunks_exact(piece)) {
                row[start..start + piece].copy_from_slice(new);
            }
        }
        Ok(())
    }

    /// Keys of a layer, `[B, capacity, Hkv, D]`.
    pub fn keys(&self, layer: usize) -> &[A] {
        &self.layers[layer][0]
    }

    /// Values of a layer, `[B, capacity, Hkv, D]`.
    pub fn values(&self, layer: usize) -> &[A] {
        &self.layers[layer][1]
    }

    /// Counts `count` appended positions as held.
    pub fn advance(&mut self, count: usize) -> Result<(), ModelError> {
        self.check_room(count)?;
        self.len += count;
        Ok(())
    }

    /// Makes room for `capacity` positions in all; what is held stays.
    pub fn grow(&mut self, capacity: usize) -> Result<(), ModelError> {
        if capacity <= self.capacity {
            return Ok(());
        }
        let (old, new, held) = (self.capacity * self.width, capacity * self.width, self.len * self.width);
        for side in self.layers.iter_mut().flatten() {
            let mut wider = buffer(&[self.batch, capacity, self.width])?;
            for (to, from) in wider.chunks_exact_mut(new).zip(side.chunks_exact(old)) {
                to[..held].copy_from_slice(&from[..held]);
            }
            *side = wider;
        }
        self.capacity = capacity;
        Ok(())
    }
}

/// Zeros for a tensor of extents `dims`; an error when memory does not hold it.
pub(crate) fn buffer<T: Element>(dims: &[usize]) -> Result<Vec<T>, ModelError> {
    let mut data = Vec::new();
    let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match count.map(|n| data.try_reserve_exact(n).map(|()| n)) {
        Some(Ok(n)) => data.resize(n, T::default()),
        _ => {
            let why = format!("a {} tensor of shape {dims:?} does not fit; pass fewer tokens", T::NAME);
            return Err(ModelError::input("memory", why));
        }
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of 2 layers, 2 sequences, `capacity` positions of 1 element; position p of sequence b of layer l
    /// has key 100 l + 10 b + p and the negative as its value.
    fn filled(capacity: usize, steps: &[usize]) -> KvCache<f32> {
        let mut cache = KvCache::new(2, 2, capacity, 1).unwrap();
        for &count in steps {
            for layer in 0..2 {
                let key = |b: usize, p: usize| (100 * layer + 10 * b + cache.len() + p) as f32;
                let k: Vec<f32> =
                    (0..2).flat_map(|b| (0..count).map(move |p| (b, p))).map(|(b, p)| key(b, p)).collect();
                let v: Vec<f32> = k.iter().map(|x| -x).collect();
                cache.append(layer, count, &k, &v).unwrap();
            }
            cache.advance(count).unwrap();
        }
        cache
    }

    #[test]
    fn positions_stand_behind_each_other_in_every_sequence() {
        for steps in [&[3][..], &[1, 2], &[1, 1, 1]] {
            let cache = filled(4, steps);
            assert_eq!(cache.len(), 3);
            assert_eq!(cache.keys(1), [100.0, 101.0, 102.0, 0.0, 110.0, 111.0, 112.0, 0.0]);
            assert_eq!(cache.values(0)[4..7], [-10.0, -11.0, -12.0]);
        }
    }

    #[test]
    fn growing_keeps_what_is_held() {
        let mut cache = filled(3, &[3]);
        cache.grow(5).unwrap();
        assert_eq!((cache.len(), cache.capacity()), (3, 5));
        assert_eq!(cache.keys(1), [100.0, 101.0, 102.0, 0.0, 0.0, 110.0, 111.0, 112.0, 0.0, 0.0]);
        cache.check_room(2).unwrap();
    }

    #[test]
    fn overflow_is_an_error_and_changes_nothing() {
        let mut cache = filled(3, &[2]);
        let before = cache.keys(0).to_vec();
        for line in [
            cache.append(0, 2, &[9.0; 4], &[9.0; 4]).unwrap_err().to_string(),
            cache.advance(2).unwrap_err().to_string(),
        ] {
            assert_eq!(line, "kv cache: 2 more positions after 2 exceed its capacity 3");
        }
        assert_eq!((cache.keys(0), cache.len()), (&before[..], 2));
    }

    #[test]
    fn too_much_memory_is_an_error() {
        for dims in [&[usize::MAX, 2][..], &[usize::MAX / 8]] {
            assert!(buffer::<f32>(dims).unwrap_err().to_string().contains("does not fit"));
        }
    }
}
