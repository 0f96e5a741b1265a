//! The one error type of the crate.
//!
//! An error says what failed, the value, where (file, key, rank, card) and, in `hint`, what to do.
//! Its text has no final period and reads fully without colour. Printing it and turning it into an
//! exit status is `cli`'s job; nothing else prints.

use std::fmt;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What sort of failure it was: what a caller may want to tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The user asked for something that cannot be: a bad flag, key, value or combination.
    Usage,
    /// A file or folder could not be read or written.
    Io,
    /// libtorch refused or failed.
    Torch,
    /// A card ran out of memory.
    OutOfMemory,
    /// A rank died, failed, or disagreed with the others.
    Worker,
    /// A wait ran past its deadline.
    Timeout,
    /// The user or the system asked the run to stop.
    Interrupted,
    /// A file was read but does not say what it should.
    Corrupt,
    /// Something this machine or this build does not have.
    Unavailable,
}

/// What failed, where, and what to do about it.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    what: String,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of this kind; `what` holds the failure, the value and the place, without a final period.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), hint: None, source: None }
    }

    /// A bad flag, key or value.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Kind::Usage, what)
    }

    /// A file operation that failed: `doing` is a verb phrase, as in "cannot write".
    pub fn io(doing: &str, path: &std::path::Path, source: std::io::Error) -> Self {
        let hint = match source.kind() {
            std::io::ErrorKind::NotFound => Some("check the path"),
            std::io::ErrorKind::PermissionDenied => Some("check the permissions of the path"),
            std::io::ErrorKind::StorageFull => Some("free some space, or choose another folder with --out"),
            std::io::ErrorKind::ReadOnlyFilesystem => Some("choose a writable folder with --out"),
            _ => None,
        };
        let mut error = Self::new(Kind::Io, format!("{doing} `{}`: {source}", path.display()));
        error.hint = hint.map(str::to_owned);
        error.source = Some(Box::new(source));
        error
    }

    /// What the user can do about it: names the flag, key, file or command to change.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Keeps the underlying error for `source()`; its text should already be part of `what`.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Puts a place or an action before the message: `rank 1: ...`.
    #[must_use]
    pub fn context(mut self, place: impl fmt::Display) -> Self {
        self.what = format!("{place}: {}", self.what);
        self
    }

    /// The sort of failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The advice that goes with it, if any.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(feature = "engines")]
impl From<tch::TchError> for Error {
    fn from(source: tch::TchError) -> Self {
        let text = source.to_string();
        from_libtorch(&text).caused_by(source)
    }
}

/// What libtorch threw, in one line.
#[cfg(feature = "engines")]
pub(crate) fn from_libtorch(text: &str) -> Error {
    // The C++ stack that libtorch appends in several forms helps nobody who reads a terminal.
    let cuts =
        ["\nException raised from", "\nframe #", " (most recent call first)", "\nC++ CapturedTraceback"];
    let end = cuts.iter().filter_map(|cut| text.find(cut)).min().unwrap_or(text.len());
    let what = text[..end].split_whitespace().collect::<Vec<_>>().join(" ");
    // Its CPU allocator and CUDA's caching allocator word it differently.
    let wanted = what.split("you tried to allocate ").nth(1).and_then(|rest| rest.split_whitespace().next());
    match wanted.and_then(|bytes| bytes.parse().ok()) {
        Some(bytes) if what.contains("can't allocate memory") => {
            out_of_memory(format!("out of memory: {} more were wanted", crate::units::bytes(bytes)))
        }
        _ if what.contains("out of memory") || what.contains("can't allocate memory") => out_of_memory(what),
        _ => Error::new(Kind::Torch, what),
    }
}

#[cfg(feature = "engines")]
fn out_of_memory(what: String) -> Error {
    Error::new(Kind::OutOfMemory, what).hint("make the batch or the model smaller, or use more cards")
}

#[cfg(all(test, feature = "engines"))]
mod tests {
    use super::*;

    #[test]
    fn what_libtorch_throws_becomes_one_line_without_its_stack() {
        let text = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you \
                    tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)\n\
                    frame #0: c10::ThrowEnforceNotMet(char const*, int) + 0x5d (0x7f in libc10.so)\nframe #1: more";
        let error = from_libtorch(text);
        assert_eq!(error.kind(), Kind::OutOfMemory);
        assert_eq!(error.to_string(), "out of memory: 4.0 TiB more were wanted");
        assert!(error.advice().is_some());
        let error = from_libtorch("shape mismatch:\n  [2] and [3]\nException raised from f at a.cpp:1");
        assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Torch, "shape mismatch: [2] and [3]"));
        assert_eq!(from_libtorch("CUDA out of memory. Tried to allocate 2 GiB").kind(), Kind::OutOfMemory);
    }
}
