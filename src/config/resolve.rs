//! Schema and overrides to plan.

use super::Plan;
use crate::Result;

/// What the command line said.
#[derive(Debug, Default)]
pub struct Overrides {}

/// Decides everything.
pub fn resolve(text: &str, overrides: &Overrides) -> Result<Plan> {
    let _ = (text, overrides);
    todo!()
}
