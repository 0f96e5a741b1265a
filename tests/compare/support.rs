//! Small runs of the real program.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The program with these arguments.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"));
    command.args(args).env_remove("NO_COLOR").stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn exit(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

/// A folder for runs.
pub(crate) struct Runs {
    folder: TempDir,
}

impl Runs {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn out(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `compare` of a tiny model on real digits, with these further arguments.
    pub(crate) fn compare(&self, name: &str, further: &[&str]) -> Command {
        let mut command = program(&["compare", "--run-id", name, "--out", self.out()]);
        command.args(["--data", "digits", "--set", "model.hidden=32", "--set", "data.workers=0"]);
        command.args(further);
        command
    }

    pub(crate) fn results(&self, name: &str) -> Value {
        let text = std::fs::read_to_string(self.path(name).join("results.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// What the folder holds.
    pub(crate) fn entries(&self) -> Vec<String> {
        entries(self.folder.path())
    }
}

pub(crate) fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Arguments of a run of a few seconds.
pub(crate) const SHORT: [&str; 10] =
    ["--cards", "2", "--batch-per-card", "8", "--rounds", "2", "--warmup", "1", "--steps", "5"];

/// Arguments of a run that nobody waits for: short cells, many of them.
pub(crate) const ENDLESS: [&str; 10] =
    ["--cards", "2", "--batch-per-card", "8", "--rounds", "900", "--warmup", "1", "--steps", "200"];

/// Waits until `done` gives something.
pub(crate) fn wait_for<T>(what: &str, limit: Duration, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A run that goes on in the background; killed with this value.
pub(crate) struct Background {
    pub(crate) child: Child,
}

impl Background {
    pub(crate) fn start(mut command: Command) -> Self {
        Self { child: command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Processes it has started.
    pub(crate) fn workers(&self) -> Vec<u32> {
        let task = format!("/proc/{}/task", self.pid());
        let Ok(threads) = std::fs::read_dir(task) else { return Vec::new() };
        threads
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok())
            .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
            .collect()
    }

    /// The worker that works for this card and for no other, once it has begun to.
    pub(crate) fn worker_of_card(&self, card: usize) -> u32 {
        wait_for("a worker of its own card", Duration::from_secs(60), || {
            self.workers().into_iter().find(|&pid| cards_of(pid) == [format!("card{card}")])
        })
    }

    /// Ends within the limit, or fails.
    pub(crate) fn finish(mut self, limit: Duration) -> Output {
        let status = wait_for("the end of the run", limit, || self.child.try_wait().unwrap());
        let mut output = Output { status, stdout: Vec::new(), stderr: Vec::new() };
        use std::io::Read;
        self.child.stdout.take().unwrap().read_to_end(&mut output.stdout).unwrap();
        self.child.stderr.take().unwrap().read_to_end(&mut output.stderr).unwrap();
        output
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cards_of(pid: u32) -> Vec<String> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut names: Vec<String> = threads
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("card"))
        .collect();
    names.sort();
    names.dedup();
    names
}

/// Whether a process runs (a zombie does not).
pub(crate) fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

/// Rounds of all engines that stand in results.json.
pub(crate) fn rounds(results: &Value) -> usize {
    results["engines"]
        .as_object()
        .unwrap()
        .values()
        .map(|engine| engine["rounds"].as_array().unwrap().len())
        .sum()
}
