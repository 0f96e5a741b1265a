//! `pitfalls` in a build without libtorch: nothing can be trained, so nothing can go wrong.

use super::Pitfall;
use crate::Result;

/// An error: this build cannot train.
pub(super) fn all() -> Result<impl Iterator<Item = Result<Pitfall>>> {
    super::worker::require().map(|()| std::iter::empty())
}
