//! The program from outside: exit statuses, messages, files, and what happens when things are killed.

mod faults;
mod records;
mod refusals;
mod support;
mod training;
mod workers;
