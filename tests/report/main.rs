//! Reports from made-up runs: what is written, what is said, what is refused, and that nothing from
//! outside can break a page.

mod files;
mod fixture;
mod words;
