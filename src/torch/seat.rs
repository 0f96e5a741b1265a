//! A thread's place at its card: where its tensors live, and the stream that its work goes to.

use super::cuda;
use crate::Result;
use crate::card::cuda::{Context, Stream};
use crate::card::{Card, pin_current_thread};
use std::sync::Arc;
use std::time::Duration;
use tch::Device;

/// Where a thread works. The default is the host, where every operation ends before it returns.
#[derive(Debug, Clone)]
pub struct Seat {
    device: Device,
    stream: Option<Arc<Stream>>,
    deadline: Duration,
}

impl Default for Seat {
    fn default() -> Self {
        Self { device: Device::Cpu, stream: None, deadline: Duration::MAX }
    }
}

impl Seat {
    /// The calling thread's, from now on. A virtual card without cores pins it nowhere; a CUDA card is
    /// opened, and no other one. No wait for the card will be longer than the deadline.
    pub fn take(card: &Card, deadline: Duration) -> Result<Self> {
        match card {
            Card::Virtual(card) => {
                if !card.cores.0.is_empty() {
                    pin_current_thread(&card.cores)?;
                }
                Ok(Self { deadline, ..Self::default() })
            }
            Card::Cuda { ordinal, .. } => {
                let context = Context::open(*ordinal)?;
                let stream = Some(Arc::new(Stream::default_of(&context)));
                Ok(Self { device: cuda::enter(*ordinal)?, stream, deadline })
            }
        }
    }

    /// Where its tensors live.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The stream in which libtorch computes for it; `None` where the host computes.
    pub fn stream(&self) -> Option<&Arc<Stream>> {
        self.stream.as_ref()
    }

    /// The longest that is waited for the card.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Waits until the card has done all that it was asked for.
    pub fn synchronize(&self) -> Result<()> {
        self.synchronize_unless(&mut || Ok(()))
    }

    /// As [`Self::synchronize`], but ends with the first error of `hopeless`, which is asked all the while.
    pub fn synchronize_unless(&self, hopeless: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), |stream| stream.synchronize_unless(self.deadline, hopeless))
    }
}
