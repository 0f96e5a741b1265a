//! Rendezvous through libtorch's own stores, so that we need no protocol of ours and can join the
//! store that `torchrun` made.

use super::shim::{self, RawStore};
use crate::Result;
use crate::error::{Error, Kind};
use std::ffi::CString;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// A key-value store that all ranks share. It stays on the thread that made it; another thread opens
/// its own.
#[derive(Debug)]
pub struct Store {
    raw: *mut RawStore,
    /// For messages.
    place: String,
    port: Option<u16>,
    timeout: Duration,
}

impl Store {
    /// One host: a file that all ranks can open. libtorch removes it with the last rank's store, but
    /// not when two go at once: put it into a folder that is removed anyway.
    pub fn file(path: &Path, world_size: usize, timeout: Duration) -> Result<Self> {
        let place = format!("the file `{}`", path.display());
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // libtorch would wait for the file to appear until the timeout.
        std::fs::metadata(folder).map_err(|error| Error::io("cannot open a store in", folder, error))?;
        let path = c_string(path.as_os_str().as_bytes(), "the path of a store")?;
        let mut raw = null_mut();
        // SAFETY: `path` lives through the call; `raw` is filled on success only.
        unsafe {
            shim::check(shim::dvd_store_file(path.as_ptr(), world_size as i64, millis(timeout), &mut raw))
        }
        .map_err(|error| error.context(format!("cannot open a store in {place}")))?;
        Ok(Self { raw, place, port: None, timeout })
    }

    /// Across hosts, or under torchrun: rank 0 serves unless an agent already does. A client looks up
    /// and connects again and again until the timeout: names and servers may come up later than ranks.
    /// Port 0, for the server, takes a free one: see [`Store::port`]. The store ends with the server's
    /// value, so the rank that serves leaves last.
    pub fn tcp(host: &str, port: u16, world_size: usize, serve: bool, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        if !serve {
            // libtorch's own retries run past the timeout, print pages, and keep the cause to themselves.
            reach(host, port, deadline)?;
        }
        let name = c_string(host.as_bytes(), "the host of a store")?;
        let left = deadline.saturating_duration_since(Instant::now());
        let (mut raw, mut bound) = (null_mut(), 0);
        // SAFETY: `name` lives through the call; `raw` and `bound` are filled on success only.
        unsafe {
            shim::check(shim::dvd_store_tcp(
                name.as_ptr(),
                port,
                world_size as i64,
                serve,
                millis(left),
                &mut raw,
                &mut bound,
            ))
        }
        .map_err(|error| {
            if serve {
                let what = format!("cannot serve a store at {host}:{port}");
                error.context(what).hint("choose a free port with MASTER_PORT")
            } else {
                let what = format!("{host}:{port} took the connection but does not answer as a store");
                error
                    .context(what)
                    .hint("check MASTER_ADDR and MASTER_PORT, and that all ranks run one release of libtorch")
            }
        })?;
        let store = Self { raw, place: format!("the store at {host}:{bound}"), port: Some(bound), timeout };
        // SAFETY: `raw` is a live store of ours.
        unsafe { shim::dvd_store_set_timeout(store.raw, millis(timeout)) };
        Ok(store)
    }

    /// The port it is reached at; `None` for a file.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Publishes a value.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let name = c_string(key.as_bytes(), "a key")?;
        let started = Instant::now();
        // SAFETY: the store is live, `name` and `value` live through the call.
        let result =
            unsafe { shim::check(shim::dvd_store_set(self.raw, name.as_ptr(), value.as_ptr(), value.len())) };
        result.map_err(|error| self.explain(error, "publishing", key, started))
    }

    /// Waits for a value, up to the store's timeout.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let name = c_string(key.as_bytes(), "a key")?;
        let (mut value, mut length) = (null_mut(), 0);
        let started = Instant::now();
        // SAFETY: the store is live, `name` lives through the call, the outputs are filled on success.
        let result =
            unsafe { shim::check(shim::dvd_store_get(self.raw, name.as_ptr(), &mut value, &mut length)) };
        result.map_err(|error| self.explain(error, "waiting for", key, started))?;
        // SAFETY: `length` bytes that were malloc'd for us, copied before they are freed.
        unsafe {
            let copy = std::slice::from_raw_parts(value, length).to_vec();
            libc::free(value.cast());
            Ok(copy)
        }
    }

    /// Adds to a counter and returns its new value.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let name = c_string(key.as_bytes(), "a key")?;
        let mut sum = 0;
        let started = Instant::now();
        // SAFETY: the store is live, `name` lives through the call.
        let result = unsafe { shim::check(shim::dvd_store_add(self.raw, name.as_ptr(), amount, &mut sum)) };
        result.map_err(|error| self.explain(error, "adding to", key, started))?;
        Ok(sum)
    }

    /// libtorch words timeouts differently for each store; the time that has passed tells them apart.
    fn explain(&self, error: Error, doing: &str, key: &str, started: Instant) -> Error {
        let place = &self.place;
        if started.elapsed() >= self.timeout {
            let seconds = self.timeout.as_secs_f64();
            let what = format!("timed out after {seconds} s {doing} the key `{key}` in {place}");
            return Error::new(Kind::Timeout, what)
                .hint("look at the other ranks: one has not come this far");
        }
        error.context(format!("{doing} the key `{key}` in {place} failed"))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once.
        unsafe { shim::dvd_store_free(self.raw) };
    }
}

/// Zero would mean forever to libtorch.
fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).max(1)
}

fn c_string(bytes: &[u8], what: &str) -> Result<CString> {
    CString::new(bytes).map_err(|_| {
        let value = String::from_utf8_lossy(bytes).into_owned();
        Error::usage(format!("{what} holds a zero byte: {value:?}"))
    })
}

/// Returns once somebody accepts a connection at `host:port`; after the deadline, an error with the
/// last cause and the address that was tried.
fn reach(host: &str, port: u16, deadline: Instant) -> Result<()> {
    const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);
    const LONGEST_PAUSE: Duration = Duration::from_secs(1);
    let started = Instant::now();
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut pause = Duration::from_millis(20);
    loop {
        let cause = match look_up(host, port, left()) {
            Ok(addresses) => {
                let mut cause = "the name has no address".to_owned();
                for address in addresses {
                    let attempt = left().clamp(Duration::from_millis(1), LONGEST_ATTEMPT);
                    match TcpStream::connect_timeout(&address, attempt) {
                        Ok(_) => return Ok(()),
                        Err(error) => cause = format!("connecting to {address}: {error}"),
                    }
                }
                cause
            }
            Err(error) => format!("looking up `{host}`: {error}"),
        };
        std::thread::sleep(pause.min(left()));
        pause = (pause * 2).min(LONGEST_PAUSE);
        // Asked after the pause: an attempt without time would only hide the cause.
        if left().is_zero() {
            let seconds = started.elapsed().as_secs_f64();
            let what = format!("no store at {host}:{port} after {seconds:.1} s; last cause: {cause}");
            return Err(Error::new(Kind::Timeout, what)
                .hint("check MASTER_ADDR and MASTER_PORT, and that rank 0 has started"));
        }
    }
}

/// The system's look-up has no time limit of its own: it is left behind when ours has passed.
fn look_up(host: &str, port: u16, limit: Duration) -> Result<Vec<SocketAddr>, std::io::Error> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let name = (host.to_owned(), port);
    std::thread::Builder::new()
        .name("look-up".to_owned())
        .spawn(move || sender.send(name.to_socket_addrs().map(Iterator::collect)))?;
    receiver.recv_timeout(limit).unwrap_or_else(|_| Err(std::io::Error::other("no answer in time")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SOON: Duration = Duration::from_millis(300);
    const AMPLE: Duration = Duration::from_secs(20);

    /// Every rank publishes its number and reads the others'. Rank 0, which may serve, leaves last.
    fn meet(ranks: usize, open: impl Fn(usize) -> Store + Sync) {
        let clients = std::sync::Arc::new(());
        std::thread::scope(|scope| {
            let (open, clients) = (&open, &clients);
            for rank in 0..ranks {
                let client = (rank > 0).then(|| std::sync::Arc::clone(clients));
                scope.spawn(move || {
                    // Declared before the store, so given back after it, also by a panic.
                    let _client = client;
                    let store = open(rank);
                    store.set(&format!("rank{rank}"), &[rank as u8, 0, 255]).unwrap();
                    for other in 0..ranks {
                        assert_eq!(store.get(&format!("rank{other}")).unwrap(), [other as u8, 0, 255]);
                    }
                    store.add("met", 1).unwrap();
                    while rank == 0 && std::sync::Arc::strong_count(clients) > 1 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    if rank == 0 {
                        assert_eq!(store.add("met", 0).unwrap(), ranks as i64);
                    }
                });
            }
        });
    }

    #[test]
    fn ranks_meet_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a store");
        meet(3, |_| Store::file(&path, 3, AMPLE).unwrap());
    }

    #[test]
    fn ranks_meet_over_tcp_also_when_the_server_comes_last() {
        // Free a moment ago: nobody else on this machine picks ports from the ephemeral range now.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        meet(2, |rank| {
            if rank == 0 {
                std::thread::sleep(SOON);
            }
            Store::tcp("127.0.0.1", port, 2, rank == 0, AMPLE).unwrap()
        });
    }

    #[test]
    fn a_value_may_be_empty() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::file(&folder.path().join("store"), 1, AMPLE).unwrap();
        store.set("key", &[]).unwrap();
        assert_eq!(store.get("key").unwrap(), [0u8; 0]);
    }

    #[test]
    fn a_timeout_names_the_key_and_the_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let file = Store::file(&path, 2, SOON).unwrap();
        let tcp = Store::tcp("127.0.0.1", 0, 2, true, SOON).unwrap();
        for (store, place) in
            [(&file, path.display().to_string()), (&tcp, format!("127.0.0.1:{}", tcp.port().unwrap()))]
        {
            let started = Instant::now();
            let error = store.get("plan").unwrap_err();
            assert!(started.elapsed() < AMPLE / 2);
            assert_eq!(error.kind(), Kind::Timeout);
            let text = error.to_string();
            assert!(text.starts_with("timed out after 0.3 s waiting for the key `plan`"), "{text}");
            assert!(text.contains(&place), "{text}");
        }
    }

    #[test]
    fn a_store_that_nobody_serves_is_reported_with_address_and_cause() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let started = Instant::now();
        let error = Store::tcp("127.0.0.1", port, 2, false, SOON).unwrap_err();
        assert!(started.elapsed() >= SOON && started.elapsed() < AMPLE / 2);
        assert_eq!(error.kind(), Kind::Timeout);
        let text = error.to_string();
        assert!(text.contains(&format!("connecting to 127.0.0.1:{port}: Connection refused")), "{text}");
    }

    #[test]
    fn a_name_that_nobody_knows_is_looked_up_until_the_deadline() {
        let started = Instant::now();
        let error = Store::tcp("no-such-host.invalid", 29500, 2, false, SOON).unwrap_err();
        assert!(started.elapsed() >= SOON);
        let text = error.to_string();
        assert!(text.contains("looking up `no-such-host.invalid`: "), "{text}");
    }

    #[test]
    fn a_port_that_is_taken_is_refused_by_the_server() {
        let taken = Store::tcp("127.0.0.1", 0, 1, true, AMPLE).unwrap();
        let error = Store::tcp("127.0.0.1", taken.port().unwrap(), 1, true, AMPLE).unwrap_err();
        assert!(error.to_string().starts_with("cannot serve a store at 127.0.0.1"), "{error}");
        assert!(error.advice().unwrap().contains("MASTER_PORT"));
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_key_with_a_zero_byte_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Store::file(&folder.path().join("none/store"), 1, SOON).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.to_string().contains("none"), "{error}");
        let store = Store::file(&folder.path().join("store"), 1, SOON).unwrap();
        assert!(store.set("a\0b", b"x").unwrap_err().to_string().contains("zero byte"));
    }
}
