//! The data of one allocation: every rank's copy, side by side, mapped by all ranks.
//!
//! Moves and sums bytes when told to; when that may happen is `Shm`'s business.

#![allow(unsafe_code)]

use super::control::Control;
use crate::card::{Meter, SharedMemory};
use crate::error::Kind as ErrorKind;
use crate::{Error, Result};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// Copies start on pages of their own, so that each lies where its rank first touches it.
const PAGE: usize = 4096;

/// Elements that are summed at a time: small enough to stay in the first-level cache.
const BLOCK: usize = 1024;

/// Elements that two ranks never split between them: whole cache lines of any type.
const GRAIN: usize = 64;

/// One allocation.
#[derive(Debug)]
pub(in crate::comm) struct Region {
    /// `None` only while it is dropped.
    memory: Option<SharedMemory>,
    pub(super) len: usize,
    pub(super) kind: Kind,
    world_size: usize,
    /// The group it belongs to, compared by address.
    control: Arc<Control>,
    /// Who is charged for this rank's copy: the allocator that counts tensors never sees it.
    charged: Option<(Arc<Meter>, usize)>,
}

impl Region {
    fn stride(len: usize, kind: Kind) -> Option<usize> {
        len.checked_mul(kind.elt_size_in_bytes())?.checked_next_multiple_of(PAGE)
    }

    /// Zeroed memory for `world_size` copies.
    pub(super) fn create(len: usize, kind: Kind, world_size: usize) -> Result<SharedMemory> {
        let bytes =
            Self::stride(len, kind).and_then(|stride| stride.checked_mul(world_size)).ok_or_else(|| {
                Error::usage(format!("cannot allocate {len} elements of {kind:?} for {world_size} ranks"))
                    .hint("use a smaller model")
            })?;
        SharedMemory::create("dp-vs-ddp bucket", bytes)
    }

    /// Takes over memory that [`create`](Self::create) made, here or in another process, for the same values.
    pub(super) fn over(
        memory: SharedMemory,
        len: usize,
        kind: Kind,
        control: &Arc<Control>,
        charged: Option<(Arc<Meter>, usize)>,
    ) -> Result<Self> {
        let world_size = control.slots().len();
        let needed = Self::stride(len, kind).and_then(|stride| stride.checked_mul(world_size));
        if needed != Some(memory.len()) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} bytes of shared memory do not hold {len} {kind:?} for {world_size} ranks",
                    memory.len()
                ),
            ));
        }
        let region =
            Self { memory: Some(memory), len, kind, world_size, control: Arc::clone(control), charged };
        if let Some((meter, card)) = &region.charged {
            meter.card(*card).allocated(region.copy_bytes() as u64);
        }
        Ok(region)
    }

    /// Whether it was allocated by the group with this control block.
    pub(super) fn belongs_to(&self, control: &Arc<Control>) -> bool {
        Arc::ptr_eq(&self.control, control)
    }

    fn copy_bytes(&self) -> usize {
        self.len * self.kind.elt_size_in_bytes()
    }

    /// First byte of a rank's copy.
    fn copy(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        let stride = self.copy_bytes().next_multiple_of(PAGE);
        let start = self.memory.as_ref().map_or(std::ptr::null_mut(), |memory| memory.start().as_ptr());
        // SAFETY: `world_size` strides fit the mapping (checked in `over`), and the rank is below it.
        unsafe { start.add(rank * stride) }
    }

    /// A rank's copy as a one-dimensional tensor. The tensor does not keep the region alive; after the
    /// region is dropped it reads zeroes (see [`SharedMemory::retire`]).
    pub(super) fn tensor(&self, rank: usize) -> Result<Tensor> {
        // SAFETY: `len` elements of this type lie there, aligned to a page; the addresses stay mapped for
        // the rest of the process, so that no tensor over them can fault.
        Ok(unsafe { Tensor::f_from_blob(self.copy(rank), &[self.len as i64], &[1], self.kind, Device::Cpu)? })
    }

    /// Whether [`sum`](Self::sum) can add this type.
    pub(super) fn can_sum(&self) -> Result<()> {
        match self.kind {
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16 | Kind::Int64 | Kind::Int => Ok(()),
            kind => Err(Error::usage(format!("cannot sum {kind:?} over ranks"))
                .hint("broadcast it, or convert it to a float or an integer type")),
        }
    }

    /// Sums `rank`'s share of the elements over all copies, in rank order, and writes it to all copies:
    /// every rank ends with the same bits. 16-bit floats are added in 32 bits and rounded once.
    ///
    /// # Safety
    /// From the meeting before until the meeting after, no rank touches any copy but through this
    /// function, each with its own rank.
    pub(super) unsafe fn sum(&self, rank: usize) {
        let share = share(self.len, self.world_size, rank);
        let copies: Vec<*mut u8> = (0..self.world_size).map(|rank| self.copy(rank)).collect();
        // SAFETY: the copies hold `len` elements of the type matched on and are page-aligned; shares of
        // different ranks do not overlap, and the caller keeps everybody else away.
        unsafe {
            match self.kind {
                Kind::Float => sum_share(&copies, share, |x: f32| x, |a, b| a + b, |x| x),
                Kind::Double => sum_share(&copies, share, |x: f64| x, |a, b| a + b, |x| x),
                Kind::Int64 => sum_share(&copies, share, |x: i64| x, i64::wrapping_add, |x| x),
                Kind::Int => sum_share(&copies, share, |x: i32| x, i32::wrapping_add, |x| x),
                Kind::Half => sum_share(&copies, share, f16::to_f32, |a, b| a + b, f16::from_f32),
                Kind::BFloat16 => sum_share(&copies, share, bf16::to_f32, |a, b| a + b, bf16::from_f32),
                _ => {}
            }
        }
    }

    /// Copies `from`'s copy over `to`'s.
    ///
    /// # Safety
    /// Between two meetings, no rank writes `from`'s copy, and only this call touches `to`'s.
    pub(super) unsafe fn copy_over(&self, from: usize, to: usize) {
        if from != to {
            // SAFETY: both copies are `copy_bytes` long and apart from each other; the caller keeps others away.
            unsafe { std::ptr::copy_nonoverlapping(self.copy(from), self.copy(to), self.copy_bytes()) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some((meter, card)) = &self.charged {
            meter.card(*card).freed(self.copy_bytes() as u64);
        }
        if let Some(memory) = self.memory.take() {
            memory.retire();
        }
    }
}

/// The elements that `rank` reduces of `len`: shares are contiguous, cover all, and never split a cache
/// line. Pure.
fn share(len: usize, world_size: usize, rank: usize) -> Range<usize> {
    let grains = len.div_ceil(GRAIN);
    let edge = |rank: usize| (grains * rank / world_size * GRAIN).min(len);
    edge(rank)..edge(rank + 1)
}

/// # Safety
/// Every pointer is aligned for `T` and has elements up to `share.end`; nobody else touches the share.
unsafe fn sum_share<T: Copy, A: Copy + Default>(
    copies: &[*mut u8],
    share: Range<usize>,
    widen: impl Fn(T) -> A,
    add: impl Fn(A, A) -> A,
    narrow: impl Fn(A) -> T,
) {
    let mut block = [A::default(); BLOCK];
    for start in share.clone().step_by(BLOCK) {
        let sum = &mut block[..BLOCK.min(share.end - start)];
        for (rank, copy) in copies.iter().enumerate() {
            // SAFETY: inside the share, which the caller vouches for.
            let part = unsafe { std::slice::from_raw_parts(copy.cast::<T>().add(start), sum.len()) };
            if rank == 0 {
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum = widen(*x));
            } else {
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum = add(*sum, widen(*x)));
            }
        }
        for copy in copies {
            // SAFETY: as above, and the slices read from are gone.
            let part = unsafe { std::slice::from_raw_parts_mut(copy.cast::<T>().add(start), sum.len()) };
            part.iter_mut().zip(&*sum).for_each(|(x, sum)| *x = narrow(*sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(world_size: usize) -> Arc<Control> {
        Arc::new(Control::create(world_size).unwrap())
    }

    #[test]
    fn shares_cover_everything_once_and_split_no_cache_line() {
        for (len, world_size) in [(0, 2), (1, 2), (64, 2), (65, 2), (1000, 3), (4096, 8), (100, 8)] {
            let shares: Vec<_> = (0..world_size).map(|rank| share(len, world_size, rank)).collect();
            assert_eq!((shares[0].start, shares[world_size - 1].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
            assert!(shares.iter().all(|share| share.start % GRAIN == 0 || share.is_empty()), "{shares:?}");
        }
        assert_eq!(share(1024, 2, 1), 512..1024);
    }

    #[test]
    fn the_sum_reaches_every_copy_in_every_type() {
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int] {
            let memory = Region::create(2500, kind, 3).unwrap();
            let region = Region::over(memory, 2500, kind, &group(3), None).unwrap();
            for rank in 0..3 {
                let values =
                    Tensor::f_arange(2500, (Kind::Int64, Device::Cpu)).unwrap().f_remainder(50).unwrap();
                region.tensor(rank).unwrap().f_copy_(&(values * (rank as i64 + 1))).unwrap();
            }
            for rank in 0..3 {
                // SAFETY: one thread, nobody else knows the region.
                unsafe { region.sum(rank) };
            }
            for rank in 0..3 {
                let sums = Vec::<i64>::try_from(&region.tensor(rank).unwrap().to_kind(Kind::Int64)).unwrap();
                // 1x + 2x + 3x, at most 294: whole numbers that bf16 has up to 256 exactly, then in twos.
                assert!(sums.iter().enumerate().all(|(i, sum)| *sum == (i as i64 % 50) * 6), "{kind:?}");
            }
        }
    }

    #[test]
    fn a_copy_is_charged_to_its_card_and_given_back() {
        let meter = Arc::new(Meter::create(2).unwrap());
        let memory = Region::create(1000, Kind::Float, 2).unwrap();
        let region =
            Region::over(memory, 1000, Kind::Float, &group(2), Some((Arc::clone(&meter), 1))).unwrap();
        let live = |card: usize| meter.card(card).live_bytes.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!((live(0), live(1)), (0, 4000));
        drop(region);
        assert_eq!(live(1), 0);
    }

    #[test]
    fn a_tensor_that_outlives_its_region_reads_zeroes() {
        let memory = Region::create(10, Kind::Float, 2).unwrap();
        let region = Region::over(memory, 10, Kind::Float, &group(2), None).unwrap();
        let mut tensor = region.tensor(0).unwrap();
        let _ = tensor.f_fill_(3.0).unwrap();
        drop(region);
        assert_eq!(Vec::<f32>::try_from(&tensor).unwrap(), [0.0; 10]);
    }
}
