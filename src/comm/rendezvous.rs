//! How ranks find each other before they share memory: any key-value exchange will do.

use crate::error::Kind;
use crate::torch::store::Store;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A key-value exchange that all ranks reach.
pub trait Rendezvous {
    /// Makes a value known under a key that nobody else uses.
    fn publish(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits for a value, up to the exchange's own deadline.
    fn fetch(&self, key: &str) -> Result<Vec<u8>>;
}

impl Rendezvous for Store {
    fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.set(key, value)
    }

    fn fetch(&self, key: &str) -> Result<Vec<u8>> {
        self.get(key)
    }
}

/// The exchange of ranks that are threads of one process.
#[derive(Debug, Clone)]
pub struct Board {
    shared: Arc<Shared>,
    deadline: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Board {
    /// An empty one; clones share it.
    pub fn new(deadline: Duration) -> Self {
        Self { shared: Arc::default(), deadline }
    }
}

impl Rendezvous for Board {
    fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        let Shared { values, changed } = &*self.shared;
        values.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), value.to_owned());
        changed.notify_all();
        Ok(())
    }

    fn fetch(&self, key: &str) -> Result<Vec<u8>> {
        let Shared { values, changed } = &*self.shared;
        let values = values.lock().unwrap_or_else(PoisonError::into_inner);
        let (values, _) = changed
            .wait_timeout_while(values, self.deadline, |values| !values.contains_key(key))
            .unwrap_or_else(PoisonError::into_inner);
        values.get(key).cloned().ok_or_else(|| {
            Error::new(Kind::Timeout, format!("nobody published `{key}` within {:?}", self.deadline))
                .hint("start every rank, or raise `run.deadline_s`")
        })
    }
}
