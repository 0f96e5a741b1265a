//! What to run: the TOML a user writes becomes a validated [`Plan`] ([`resolve()`]).
//!
//! Pure: no file, card or clock is touched here, except that [`builtin()`] holds the text of `configs/`.
//! Everything a run can be refused for without looking at the machine is refused here, naming the key.

mod builtin;
mod plan;
mod resolve;
mod schema;
mod settings;
mod shares;

pub use builtin::{BUILTIN, builtin};
pub use plan::*;
pub use resolve::{Machine, Uneven, resolve};
pub use settings::Overrides;
pub use shares::shares;
