//! NCCL in one process: the weights of the first card to all of them, and their gradients to it.

#![allow(unsafe_code)]

use super::communicator::{check, parts};
use super::library::library;
use crate::card::cuda::Stream;
use crate::error::{Error, Result};
use cudarc::nccl::sys;
use std::sync::Arc;
use tch::Tensor;

/// All cards of a process, the first of which is the root of every operation. Used by one thread.
#[derive(Debug)]
pub struct OneProcess {
    streams: Vec<Arc<Stream>>,
    communicators: Vec<sys::ncclComm_t>,
}

// SAFETY: NCCL lets communicators move between threads, as long as one at a time uses them.
unsafe impl Send for OneProcess {}

impl OneProcess {
    /// Of the cards of these streams, in which everything is enqueued. No card may be there twice.
    pub fn new(streams: Vec<Arc<Stream>>) -> Result<Self> {
        library()?;
        let cards: Vec<i32> = streams.iter().map(|stream| stream.context().ordinal() as i32).collect();
        if let Some(twice) = (1..cards.len()).find(|&i| cards[..i].contains(&cards[i])) {
            return Err(Error::usage(format!("NCCL cannot have cuda:{} twice in a group", cards[twice]))
                .hint("cards that are named twice go without NCCL, by copies between cards"));
        }
        let mut communicators = vec![std::ptr::null_mut(); cards.len()];
        // SAFETY: both lists have as many entries as is said, and outlive the call.
        let result =
            unsafe { sys::ncclCommInitAll(communicators.as_mut_ptr(), cards.len() as i32, cards.as_ptr()) }
                as u32;
        check("ncclCommInitAll", result)?;
        Ok(Self { streams, communicators })
    }

    /// Number of cards.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Gives every card's tensor the values of the first one's.
    pub fn broadcast(&mut self, tensors: &[&Tensor]) -> Result<()> {
        self.together(tensors, |tensor, communicator, stream| {
            let (data, len, kind) = parts(tensor)?;
            // SAFETY: the tensors stay until their streams have come past this: the caller synchronises.
            let result =
                unsafe { sys::ncclBroadcast(data, data, len, kind, 0, communicator, stream.as_raw().cast()) }
                    as u32;
            check("ncclBroadcast", result)
        })
    }

    /// Adds all cards' tensors into the first one's.
    pub fn reduce(&mut self, tensors: &[&Tensor]) -> Result<()> {
        self.together(tensors, |tensor, communicator, stream| {
            let (data, len, kind) = parts(tensor)?;
            let sum = sys::ncclRedOp_t::ncclSum;
            // SAFETY: as above.
            let result = unsafe {
                sys::ncclReduce(data, data, len, kind, sum, 0, communicator, stream.as_raw().cast())
            } as u32;
            check("ncclReduce", result)
        })
    }

    /// One operation on all cards: as a group, or the first card would wait for the second one's for ever.
    fn together(
        &mut self,
        tensors: &[&Tensor],
        ask: impl Fn(&Tensor, sys::ncclComm_t, &Stream) -> Result<()>,
    ) -> Result<()> {
        if tensors.len() != self.communicators.len() {
            let (cards, given) = (self.communicators.len(), tensors.len());
            return Err(Error::usage(format!("{given} tensors for {cards} cards")));
        }
        // SAFETY: takes nothing.
        check("ncclGroupStart", unsafe { sys::ncclGroupStart() } as u32)?;
        let asked = tensors
            .iter()
            .zip(&self.communicators)
            .zip(&self.streams)
            .try_for_each(|((tensor, communicator), stream)| ask(tensor, *communicator, stream));
        // A group that was begun has to be ended, whatever came of it.
        // SAFETY: takes nothing.
        let ended = check("ncclGroupEnd", unsafe { sys::ncclGroupEnd() } as u32);
        asked.and(ended)
    }
}

impl Drop for OneProcess {
    fn drop(&mut self) {
        for communicator in self.communicators.drain(..) {
            // SAFETY: made by `new`, destroyed once; blocking communicators finish what they were asked for.
            let _ = unsafe { sys::ncclCommDestroy(communicator) };
        }
    }
}
