//! Peers that die, hang or lose their parent: named within the deadline, nothing left behind.

use crate::support::*;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// PyTorch's DDP on two cards, steps without end.
fn endless(out: &std::path::Path) -> Background {
    let child = Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"))
        .args(["compare", "digits", "--cards", "2", "--engines", "torch_ddp", "--rounds", "1"])
        .args(["--steps", "900000", "--set", "run.deadline_s=5", "--run-id", "run", "--out"])
        .arg(out)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    Background(child)
}

/// Killed with this value, in case the test fails.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `done` gives something.
fn wait_for<T>(what: &str, seconds: u64, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {seconds} s for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The two ranks, once they are connected.
fn ranks(parent: &Child) -> Vec<u32> {
    let children = || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", parent.id())).ok()?;
        let list: String = threads
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok())
            .collect();
        let mut pids: Vec<u32> = list.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        pids.sort_unstable();
        (pids.len() == 2 && pids.iter().all(|pid| is_connected(*pid))).then_some(pids)
    };
    wait_for("two connected ranks", 60, children)
}

fn is_connected(pid: u32) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .any(|target| target.to_string_lossy().starts_with("socket:"))
}

fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status().unwrap().success());
}

#[test]
fn a_killed_rank_is_the_one_that_is_named() {
    if python().is_none() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let mut run = endless(out.path());
    let ranks = ranks(&run.0);
    signal("KILL", ranks[1]);
    let status = wait_for("the end of the run", 5, || run.0.try_wait().unwrap());
    let text = std::io::read_to_string(run.0.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(2), "{text}");
    assert!(text.contains("rank 1 was killed by signal 9"), "{text}");
    assert!(!ranks.iter().any(|pid| runs(*pid)), "a rank is left");
}

#[test]
fn a_rank_that_hangs_is_noticed_within_the_deadline() {
    if python().is_none() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let mut run = endless(out.path());
    let ranks = ranks(&run.0);
    signal("STOP", ranks[1]);
    let status = wait_for("the end of the run", 15, || run.0.try_wait().unwrap());
    let text = std::io::read_to_string(run.0.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(2), "{text}");
    assert!(text.contains("rank 0: ") && text.contains("Timed out") && text.contains("hint: "), "{text}");
    assert!(!ranks.iter().any(|pid| runs(*pid)), "a rank is left");
}

#[test]
fn ranks_end_with_their_parent() {
    if python().is_none() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let mut run = endless(out.path());
    let ranks = ranks(&run.0);
    // This one cannot see that its input has ended.
    signal("STOP", ranks[1]);
    run.0.kill().unwrap();
    run.0.wait().unwrap();
    wait_for("the end of the ranks", 5, || (!ranks.iter().any(|pid| runs(*pid))).then_some(()));
}
