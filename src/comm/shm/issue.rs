//! What ranks have asked their cards for: the control side of a collective whose data travels elsewhere.
//!
//! Cards hang silently when ranks ask for different things, or one of them for nothing. Here every rank
//! shows what it asks for, so that whoever waits can say whose fault it is.

use super::control::Slot;
use super::tag::{self, Operation, Tag};
use super::{Buffer, Shm};
use crate::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

/// How long a collective may go on after a rank that takes part in it has died: its part may have been done.
const AFTER_DEATH: Duration = Duration::from_secs(1);

impl Shm {
    /// Notes an all-reduce that this rank is about to ask its card for; its number.
    pub(in crate::comm) fn issue_all_reduce(&mut self, buffer: &Buffer) -> Result<u64> {
        self.issue(buffer, 0, Operation::AllReduce)
    }

    /// Notes a broadcast.
    pub(in crate::comm) fn issue_broadcast(&mut self, buffer: &Buffer, root: usize) -> Result<u64> {
        if root >= self.member.world_size {
            let size = self.member.world_size;
            return Err(Error::usage(format!("there is no rank {root} in a group of {size}")));
        }
        self.issue(buffer, root, Operation::Broadcast)
    }

    fn issue(&mut self, buffer: &Buffer, root: usize, operation: Operation) -> Result<u64> {
        self.stopped()?;
        self.issued += 1;
        let Buffer { id, len, kind, .. } = *buffer;
        let (len, buffer, root) = (len as u64, id as u32, root as u32);
        let tag = Tag { number: self.issued, len, kind, buffer, root, ..Tag::plain(operation) };
        self.control.slots()[self.member.rank].issue(tag);
        Ok(tag.number)
    }

    /// The reason for which the group was stopped, as an error.
    pub(in crate::comm) fn stopped(&self) -> Result<()> {
        self.control.reason(self.member.rank).map_or(Ok(()), Err)
    }

    /// Stops the group because of what this rank ran into; what it reports.
    pub(in crate::comm) fn stop_all(&self, error: Error) -> Error {
        match self.stopped() {
            Ok(()) => self.fail(error),
            Err(first) => first,
        }
    }

    /// An error, which stops the group, if a collective that this rank's card has not ended after `waited`
    /// cannot end, or is late.
    pub(in crate::comm) fn look_after(&mut self, number: u64, waited: Duration) -> Result<()> {
        self.stopped()?;
        let control = Arc::clone(&self.control);
        let slots = control.slots();
        let name = slots[self.member.rank].request(number).map_or_else(String::new, |tag| format!(": {tag}"));
        for (rank, slot) in slots.iter().enumerate() {
            let pid = slot.pid.load(Acquire);
            let (left, behind) = (slot.left.load(Acquire) != 0, slot.issued() < number);
            let died = !left && pid != 0 && self.peers[rank].is_gone(pid);
            let how = match (left, died) {
                (true, _) if behind => "has left",
                (_, true) if behind || waited > AFTER_DEATH => "died",
                _ => continue,
            };
            let what =
                format!("rank {rank} (process {pid}) {how} before the end of collective {number}{name}");
            return Err(self.stop(None, Kind::Worker, &what));
        }
        let requests: Option<Vec<Tag>> = slots.iter().map(|slot| slot.request(number)).collect();
        if let Some(disagreement) = requests.and_then(|requests| tag::disagreement(&requests)) {
            return Err(self.stop(None, Kind::Worker, &disagreement));
        }
        if waited < self.member.deadline {
            return Ok(());
        }
        let late: Vec<String> =
            slots.iter().enumerate().filter_map(|(rank, slot)| late(rank, slot, number)).collect();
        let who = match late.is_empty() {
            true => "all ranks had asked their cards for it".to_owned(),
            false => format!("{} had not asked its card for it", late.join(", ")),
        };
        let what =
            format!("collective {number}{name} has not ended after {:.1} s; {who}", waited.as_secs_f64());
        Err(self.stop(None, Kind::Timeout, &what))
    }
}

fn late(rank: usize, slot: &Slot, number: u64) -> Option<String> {
    let pid = slot.pid.load(Acquire);
    (slot.issued() < number).then(|| match slot.issued() {
        0 => format!("rank {rank} (process {pid}, no collective yet)"),
        last => format!("rank {rank} (process {pid}, last seen at collective {last})"),
    })
}
