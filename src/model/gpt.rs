//! gpt.
