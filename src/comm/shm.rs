//! Collectives over shared memory, one host.

/// Ranks of one host over a memfd.
#[derive(Debug)]
pub struct Shm {
    _todo: (),
}
