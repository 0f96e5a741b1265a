//! The exact CPU time of any thread of this process: what `/proc` tells of a running thread may be a
//! scheduler tick old, which is much of a short measurement.
#![expect(unsafe_code, reason = "the clock of another thread has no safe wrapper")]

use crate::units::Nanos;

/// CPU time that the thread `tid` of this process has used; `None` once it has ended.
pub fn thread_cpu_clock(tid: u32) -> Option<Nanos> {
    // The kernel's encoding (include/linux/posix-timers_types.h): the inverted number, then 4 for "one
    // thread" and 2 for "nanoseconds as the scheduler counts them".
    let clock = (!(tid as libc::clockid_t) << 3) | 4 | 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing; a number that is no thread of ours is an error, not undefined.
    let status = unsafe { libc::clock_gettime(clock, &mut time) };
    (status == 0).then(|| Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_threads_clock_runs_while_it_works_and_only_then() {
        let (tid, received) = std::sync::mpsc::channel();
        let (quit, told) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            while Nanos::thread_cpu() < Nanos(20_000_000) {}
            let own = Nanos::thread_cpu();
            tid.send((rustix::thread::gettid().as_raw_nonzero().get() as u32, own)).unwrap();
            let _ = told.recv();
        });
        let (tid, own) = received.recv().unwrap();
        let seen = thread_cpu_clock(tid).unwrap();
        assert!(seen >= own && seen.since(own) < Nanos(10_000_000), "{seen:?} {own:?}");
        drop(quit);
        thread.join().unwrap();
        assert_eq!(thread_cpu_clock(u32::MAX >> 4), None);
    }
}
