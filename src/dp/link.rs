//! How weights and gradients get from card to card.
//!
//! Between virtual cards each replica copies for itself. Between CUDA cards all of a kind travel at once,
//! in flat tensors: through NCCL where all cards are different ones and NCCL is there, else by copies from
//! card to card, ordered by events. Nothing here waits on the host.

use super::replicate::Flat;
use crate::card::cuda::{Event, Stream, Timing};
use crate::comm::nccl::OneProcess;
use crate::error::{Error, Result};
use crate::torch::seat::Seat;
use crate::torch::{cuda, grad, no_grad};
use std::sync::Arc;
use tch::{Device, Tensor};

/// The way between the cards of one model.
#[derive(Debug)]
pub(super) enum Link {
    /// Through the host's memory, which is every card's.
    Host,
    /// From card to card; card 0's copies go through this stream.
    Peer(Stream),
    /// All cards at once.
    Nccl(OneProcess),
}

/// How a replica comes by card 0's weights.
#[derive(Debug, Clone)]
pub(super) enum Weights {
    /// It copies them.
    Copy,
    /// It copies them from the other card once that one has come to this event.
    CopyAfter(Arc<Event>),
    /// They are on their way in its own stream.
    Coming,
}

impl Link {
    /// Between these cards, the first of which is card 0.
    pub(super) fn between(streams: Option<Vec<Arc<Stream>>>) -> Result<Self> {
        let Some(streams) = streams.filter(|streams| streams.len() > 1) else { return Ok(Self::Host) };
        let ordinals: Vec<usize> = streams.iter().map(|stream| stream.context().ordinal()).collect();
        for stream in &streams[1..] {
            let (first, other) = (streams[0].context(), stream.context());
            if first.ordinal() != other.ordinal() {
                first.enable_peer(other)?;
                other.enable_peer(first)?;
            }
        }
        let all_different = (1..ordinals.len()).all(|i| !ordinals[..i].contains(&ordinals[i]));
        // Without NCCL cards still reach each other; what it costs is for the measurement to show.
        let copies = Stream::urgent(streams[0].context())?;
        Ok(match all_different.then(|| OneProcess::new(streams)) {
            Some(Ok(group)) => Self::Nccl(group),
            Some(Err(_)) | None => Self::Peer(copies),
        })
    }

    /// Whether gradients travel flat.
    pub(super) fn is_flat(&self) -> bool {
        !matches!(self, Self::Host)
    }

    /// For people.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Peer(_) => "peer",
            Self::Nccl(_) => "nccl",
        }
    }

    /// Sends card 0's weights off: `source` has them, `replicas` are where they go.
    pub(super) fn replicate(&mut self, seat: &Seat, source: &Flat, replicas: &[&Flat]) -> Result<Weights> {
        match self {
            Self::Host => Ok(Weights::Copy),
            Self::Peer(_) => Ok(Weights::CopyAfter(moment(seat)?)),
            Self::Nccl(group) => {
                for (place, tensor) in source.tensors().enumerate() {
                    let there = replicas.iter().filter_map(|replica| replica.tensors().nth(place));
                    group.broadcast(&std::iter::once(tensor).chain(there).collect::<Vec<_>>())?;
                }
                Ok(Weights::Coming)
            }
        }
    }

    /// Adds the gradients of all replicas to those of card 0, in card order. Each replica's are complete when its
    /// card has come to its event.
    pub(super) fn reduce(
        &mut self,
        seat: &Seat,
        own: &mut Gradients,
        replicas: &[(&Gradients, Arc<Event>, Arc<Stream>)],
    ) -> Result<()> {
        // A card that had no rows has no gradients either, and NCCL's group is all cards or none.
        if let Self::Nccl(group) = self
            && group.len() == replicas.len() + 1
        {
            for place in 0..own.flats.len() {
                let there = replicas.iter().map(|(gradients, ..)| &gradients.flats[place]);
                group.reduce(&std::iter::once(&own.flats[place]).chain(there).collect::<Vec<_>>())?;
            }
            return Ok(());
        }
        let own_copies;
        let copies = match self {
            Self::Peer(copies) => &*copies,
            Self::Host | Self::Nccl(_) => {
                own_copies = Stream::urgent(seat.stream().ok_or_else(no_stream)?.context())?;
                &own_copies
            }
        };
        for (gradients, ready, theirs) in replicas {
            for place in 0..own.flats.len() {
                let (from, to) = (&gradients.flats[place], own.arrival(place)?);
                // What was added from there last must be done with.
                copies.wait(&*moment(seat)?)?;
                pull(seat, copies, &to, from, theirs, ready)?;
                let _ = no_grad(|| own.flats[place].f_add_(&to))?;
            }
        }
        Ok(())
    }
}

/// Copies from another card once that has come to `ready`; what the calling thread asks its own card for from now on
/// comes after it.
fn pull(
    seat: &Seat,
    copies: &Stream,
    to: &Tensor,
    source: &Tensor,
    from: &Stream,
    ready: &Event,
) -> Result<()> {
    copies.wait(ready)?;
    cuda::copy(to, copies, source, from.context())?;
    if seat.device() == Device::Cpu {
        // The host computes in the card's place, and cannot be told to wait.
        let pair = (from.context().ordinal(), copies.context().ordinal());
        return copies.synchronize(seat.deadline()).map_err(|error| stuck(&error, pair));
    }
    let done = Event::new(copies.context(), Timing::No)?;
    copies.record(&done)?;
    seat.stream().ok_or_else(no_stream)?.wait(&done)
}

/// A copy between two cards that does not end.
fn stuck(error: &Error, (from, to): (usize, usize)) -> Error {
    Error::new(error.kind(), format!("the copy from cuda:{from} to cuda:{to} does not end: {error}"))
        .hint(HANGING_COPIES)
}

/// What people can do about copies between cards that hang.
pub(super) const HANGING_COPIES: &str = "copies between cards hang where peer access goes a wrong way: `dp-vs-ddp doctor` shows the links; switch off IOMMU \
     (ACS) in the BIOS, or leave one of the two cards out with --devices";

/// Where the calling thread's card stands.
pub(super) fn moment(seat: &Seat) -> Result<Arc<Event>> {
    let stream = seat.stream().ok_or_else(no_stream)?;
    let event = Event::new(stream.context(), Timing::No)?;
    stream.record(&event)?;
    Ok(Arc::new(event))
}

fn no_stream() -> Error {
    Error::usage("a card without a stream is linked as one that has one")
}

/// One card's gradients, flat: one tensor for each element type.
#[derive(Debug)]
pub(super) struct Gradients {
    flats: Vec<Tensor>,
    /// By parameter, in its shape.
    views: Vec<Tensor>,
    /// Where another card's arrive.
    arrivals: Vec<Tensor>,
}

impl Gradients {
    /// Room for those of these parameters, on their card.
    pub(super) fn of(parameters: &[Tensor]) -> Result<Self> {
        let mut kinds: Vec<tch::Kind> = Vec::new();
        for parameter in parameters {
            if !kinds.contains(&parameter.kind()) {
                kinds.push(parameter.kind());
            }
        }
        let mut views: Vec<Tensor> = parameters.iter().map(|_| Tensor::new()).collect();
        let mut flats = Vec::new();
        for kind in kinds {
            let members: Vec<usize> = (0..views.len()).filter(|&i| parameters[i].kind() == kind).collect();
            let len: usize = members.iter().map(|&i| parameters[i].numel()).sum();
            let flat = Tensor::f_zeros([len as i64], (kind, parameters[members[0]].device()))?;
            let mut offset = 0;
            for i in members {
                let len = parameters[i].numel() as i64;
                // Detached: a gradient must not be a view to autograd.
                views[i] =
                    flat.f_narrow(0, offset, len)?.f_view(parameters[i].size().as_slice())?.f_detach()?;
                offset += len;
            }
            flats.push(flat);
        }
        Ok(Self { flats, views, arrivals: Vec::new() })
    }

    /// Handles for another thread.
    pub(super) fn handles(&self) -> Result<Self> {
        let detach = |tensors: &[Tensor]| tensors.iter().map(|t| Ok(t.f_detach()?)).collect::<Result<_>>();
        Ok(Self { flats: detach(&self.flats)?, views: Vec::new(), arrivals: Vec::new() })
    }

    /// Moves the parameters' gradients here, zeros where there is none; which there were.
    pub(super) fn take(&mut self, parameters: &[Tensor]) -> Result<Vec<bool>> {
        no_grad(|| {
            parameters
                .iter()
                .zip(&mut self.views)
                .map(|(parameter, view)| {
                    let gradient = grad::grad(parameter);
                    match &gradient {
                        Some(gradient) if gradient.data_ptr() == view.data_ptr() => {}
                        Some(gradient) => view.f_copy_(gradient)?,
                        None => drop(view.f_zero_()?),
                    }
                    grad::set_grad(parameter, None)?;
                    Ok(gradient.is_some())
                })
                .collect()
        })
    }

    /// Makes what is here the gradients of those parameters that some card had one of.
    pub(super) fn give(&self, parameters: &[Tensor], present: &[bool]) -> Result<()> {
        let all = parameters.iter().zip(&self.views).zip(present);
        all.filter(|(_, present)| **present)
            .try_for_each(|((parameter, view), _)| grad::set_grad(parameter, Some(view)))
    }

    /// Where another card's gradients of one type arrive.
    fn arrival(&mut self, place: usize) -> Result<Tensor> {
        while self.arrivals.len() <= place {
            self.arrivals.push(self.flats[self.arrivals.len()].f_empty_like()?);
        }
        Ok(self.arrivals[place].shallow_clone())
    }
}

impl Weights {
    /// Brings the weights in `source`, card 0's, to this replica.
    pub(super) fn fetch(
        &self,
        seat: &Seat,
        copies: Option<&Stream>,
        own: &mut Flat,
        source: &Flat,
        from: Option<&Stream>,
    ) -> Result<()> {
        match (self, copies, from) {
            (Self::Copy, ..) => own.copy_from(source),
            (Self::Coming, ..) => Ok(()),
            (Self::CopyAfter(ready), Some(copies), Some(from)) => {
                // The last forward must have read what is written over now.
                copies.wait(&*moment(seat)?)?;
                own.tensors()
                    .zip(source.tensors())
                    .try_for_each(|(to, source)| pull(seat, copies, to, source, from, ready))
            }
            (Self::CopyAfter(_), ..) => Err(no_stream()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn parameter(values: &[f32], gradient: Option<&[f32]>) -> Tensor {
        let parameter = Tensor::from_slice(values).set_requires_grad(true);
        grad::set_grad(&parameter, gradient.map(Tensor::from_slice).as_ref()).unwrap();
        parameter
    }

    fn values(tensor: Option<Tensor>) -> Option<Vec<f32>> {
        tensor.map(|tensor| Vec::try_from(&tensor).unwrap())
    }

    #[test]
    fn gradients_move_into_one_tensor_and_back() {
        let parameters = [parameter(&[1., 2.], Some(&[3., 4.])), parameter(&[5.], None)];
        let mut gradients = Gradients::of(&parameters).unwrap();
        let present = gradients.take(&parameters).unwrap();
        assert_eq!(present, [true, false]);
        assert_eq!(values(Some(gradients.flats[0].shallow_clone())), Some(vec![3., 4., 0.]));
        assert!(parameters.iter().all(|parameter| grad::grad(parameter).is_none()));
        gradients.give(&parameters, &present).unwrap();
        assert_eq!(values(grad::grad(&parameters[0])), Some(vec![3., 4.]));
        assert_eq!(values(grad::grad(&parameters[1])), None);
        // What lies there already is not copied over itself, nor forgotten.
        gradients.take(&parameters).unwrap();
        assert_eq!(values(Some(gradients.flats[0].shallow_clone())), Some(vec![3., 4., 0.]));
    }

    #[test]
    fn element_types_travel_apart() {
        let double = Tensor::zeros([3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let gradients = Gradients::of(&[parameter(&[1.], None), double, parameter(&[2., 3.], None)]).unwrap();
        let sizes: Vec<usize> = gradients.flats.iter().map(Tensor::numel).collect();
        assert_eq!(sizes, [3, 3]);
    }

    #[test]
    fn cards_of_the_host_are_linked_by_it() {
        assert!(!Link::between(None).unwrap().is_flat());
    }
}
