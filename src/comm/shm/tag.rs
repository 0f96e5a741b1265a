//! What a rank is about to do, small enough to lie in shared memory: ranks that meet compare theirs, so
//! that different calls are an error and never garbage.

use std::fmt;
use tch::Kind;

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Before the first collective.
    Join = 0,
    Allocate = 1,
    AllReduce = 2,
    Broadcast = 3,
    Exchange = 4,
    Barrier = 5,
}

/// A collective call, and which of its meetings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    /// Position among the collectives of the group, from 1.
    pub(super) number: u64,
    pub(super) operation: Operation,
    /// Elements; 0 where it may differ between ranks.
    pub(super) len: u64,
    pub(super) kind: Kind,
    /// Which allocation.
    pub(super) buffer: u32,
    /// Whose data a broadcast spreads.
    pub(super) root: u32,
    /// Which meeting of the call.
    pub(super) meeting: u8,
}

impl Tag {
    pub(super) const WORDS: usize = 4;

    /// A call that moves no elements.
    pub(super) fn plain(operation: Operation) -> Self {
        Self { number: 0, operation, len: 0, kind: Kind::Uint8, buffer: 0, root: 0, meeting: 0 }
    }

    pub(super) fn encode(self) -> [u64; Self::WORDS] {
        let what = self.operation as u64 | u64::from(self.meeting) << 8 | code_of(self.kind) << 32;
        [self.number, what, self.len, u64::from(self.buffer) | u64::from(self.root) << 32]
    }

    pub(super) fn decode([number, what, len, who]: [u64; Self::WORDS]) -> Self {
        let operation = match what as u8 {
            1 => Operation::Allocate,
            2 => Operation::AllReduce,
            3 => Operation::Broadcast,
            4 => Operation::Exchange,
            5 => Operation::Barrier,
            _ => Operation::Join,
        };
        let kind = kind_of(what >> 32);
        Self {
            number,
            operation,
            len,
            kind,
            buffer: who as u32,
            root: (who >> 32) as u32,
            meeting: (what >> 8) as u8,
        }
    }
}

/// The element types that travel, by their code.
const KINDS: [Kind; 10] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::Bool,
    Kind::BFloat16,
];

/// Whether buffers of this type can be shared.
pub(super) fn travels(kind: Kind) -> bool {
    KINDS.contains(&kind)
}

fn code_of(kind: Kind) -> u64 {
    KINDS.iter().position(|known| *known == kind).map_or(u64::from(u32::MAX), |code| code as u64)
}

fn kind_of(code: u64) -> Kind {
    KINDS.get(code as usize).copied().unwrap_or(Kind::Uint8)
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, kind, buffer, root, .. } = self;
        match self.operation {
            Operation::Join => write!(f, "join"),
            Operation::Allocate => write!(f, "allocate of {len} {kind:?}"),
            Operation::AllReduce => write!(f, "all_reduce of {len} {kind:?} (buffer {buffer})"),
            Operation::Broadcast => {
                write!(f, "broadcast of {len} {kind:?} from rank {root} (buffer {buffer})")
            }
            Operation::Exchange => write!(f, "exchange"),
            Operation::Barrier => write!(f, "barrier"),
        }
    }
}

/// How the calls of ranks that met differ; `None` when they do not. Pure.
pub(super) fn disagreement(tags: &[Tag]) -> Option<String> {
    let first = tags.first()?;
    if tags.iter().all(|tag| tag == first) {
        return None;
    }
    let calls: Vec<String> =
        tags.iter().enumerate().map(|(rank, tag)| format!("rank {rank} calls {tag}")).collect();
    Some(format!("ranks disagree at collective {}: {}", first.number, calls.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce(len: u64) -> Tag {
        Tag { number: 7, len, kind: Kind::Float, buffer: 3, ..Tag::plain(Operation::AllReduce) }
    }

    #[test]
    fn a_tag_survives_the_way_through_memory() {
        let tag = Tag { root: 2, meeting: 1, kind: Kind::BFloat16, ..reduce(1 << 40) };
        assert_eq!(Tag::decode(tag.encode()), tag);
        let tag = Tag { number: 9, ..Tag::plain(Operation::Barrier) };
        assert_eq!(Tag::decode(tag.encode()), tag);
    }

    #[test]
    fn equal_calls_agree_and_different_ones_are_told_rank_by_rank() {
        assert_eq!(disagreement(&[reduce(5), reduce(5)]), None);
        assert_eq!(
            disagreement(&[reduce(5), reduce(6)]).unwrap(),
            "ranks disagree at collective 7: rank 0 calls all_reduce of 5 Float (buffer 3), \
             rank 1 calls all_reduce of 6 Float (buffer 3)"
        );
    }
}
