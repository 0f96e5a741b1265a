//! When a bucket may be reduced: counts gradients in and says what to launch. Pure.
//!
//! Note [Launch order]
//! Every rank must make the same collective calls in the same order, while gradients become ready in
//! whatever order a rank's graph has. So a bucket is launched only when all buckets before it are.

use std::ops::Range;

/// A parameter's gradient became ready a second time in one backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkedTwice(pub usize);

/// The state of one backward.
#[derive(Debug)]
pub struct Reducer {
    bucket_of: Vec<usize>,
    sizes: Vec<usize>,
    /// Gradients that a bucket still waits for.
    pending: Vec<usize>,
    ready: Vec<bool>,
    /// First bucket that is not launched.
    next: usize,
    arrival: Vec<usize>,
}

impl Reducer {
    /// For `parameters` parameters, each in exactly one of `buckets`.
    pub fn new(buckets: &[Vec<usize>], parameters: usize) -> Self {
        let mut bucket_of = vec![0; parameters];
        for (bucket, members) in buckets.iter().enumerate() {
            members.iter().for_each(|&member| bucket_of[member] = bucket);
        }
        let sizes: Vec<usize> = buckets.iter().map(Vec::len).collect();
        let pending = sizes.clone();
        Self { bucket_of, sizes, pending, ready: vec![false; parameters], next: 0, arrival: Vec::new() }
    }

    /// Forgets the last backward.
    pub fn prepare(&mut self) {
        self.pending.copy_from_slice(&self.sizes);
        self.ready.fill(false);
        self.next = 0;
        self.arrival.clear();
    }

    /// Counts a gradient in; the buckets to launch now, in this order. See Note [Launch order].
    pub fn mark_ready(&mut self, parameter: usize) -> Result<Range<usize>, MarkedTwice> {
        if std::mem::replace(&mut self.ready[parameter], true) {
            return Err(MarkedTwice(parameter));
        }
        self.arrival.push(parameter);
        self.pending[self.bucket_of[parameter]] -= 1;
        let first = self.next;
        while self.pending.get(self.next) == Some(&0) {
            self.next += 1;
        }
        Ok(first..self.next)
    }

    /// Parameters whose gradient never became ready, ascending.
    pub fn unready(&self) -> Vec<usize> {
        (0..self.ready.len()).filter(|&parameter| !self.ready[parameter]).collect()
    }

    /// Parameters in the order in which they became ready.
    pub fn arrival(&self) -> &[usize] {
        &self.arrival
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buckets {3, 2}, {1}, {0}.
    fn reducer() -> Reducer {
        Reducer::new(&[vec![3, 2], vec![1], vec![0]], 4)
    }

    #[test]
    fn buckets_launch_when_complete_and_never_out_of_order() {
        let mut reducer = reducer();
        assert_eq!(reducer.mark_ready(1), Ok(0..0), "bucket 1 is complete, bucket 0 is not");
        assert_eq!(reducer.mark_ready(3), Ok(0..0));
        assert_eq!(reducer.mark_ready(2), Ok(0..2), "bucket 0 takes the waiting bucket 1 along");
        assert_eq!(reducer.mark_ready(0), Ok(2..3));
        assert_eq!(reducer.arrival(), [1, 3, 2, 0]);
        assert_eq!(reducer.unready(), [0usize; 0]);
    }

    #[test]
    fn a_second_gradient_of_one_parameter_is_told() {
        let mut reducer = reducer();
        reducer.mark_ready(2).unwrap();
        assert_eq!(reducer.mark_ready(2), Err(MarkedTwice(2)));
    }

    #[test]
    fn what_never_became_ready_is_listed_and_forgotten_by_the_next_step() {
        let mut reducer = reducer();
        reducer.mark_ready(3).unwrap();
        assert_eq!(reducer.unready(), [0, 1, 2]);
        reducer.prepare();
        assert_eq!(reducer.unready(), [0, 1, 2, 3]);
        let launched: Vec<_> = [3, 2, 1, 0].map(|i| reducer.mark_ready(i).unwrap()).to_vec();
        assert_eq!(launched, [0..0, 0..1, 1..2, 2..3]);
    }

    #[test]
    fn nothing_to_reduce_is_a_finished_step() {
        let mut reducer = Reducer::new(&[], 0);
        reducer.prepare();
        assert!(reducer.unready().is_empty() && reducer.arrival().is_empty());
    }
}
