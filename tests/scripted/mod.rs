//! Scripted vendor libraries for tests: built by cargo, laid out under the names that programs look for.
//!
//! No mock above the vendors' interfaces: the program under test loads these as it loads the real ones.

#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::expect_used, reason = "a test may panic, in its helpers too")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tempfile::TempDir;

/// A vendor's library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    /// `libcuda.so.1`.
    Cuda,
    /// `libnvidia-ml.so.1`.
    Nvml,
    /// `libnccl.so`.
    Nccl,
}

impl Library {
    pub(crate) const ALL: &[Self] = &[
        Self::Cuda,
        Self::Nvml,
        #[cfg(feature = "engines")]
        Self::Nccl,
    ];

    /// The target that builds it.
    fn example(self) -> &'static str {
        match self {
            Self::Cuda => "scripted_cuda",
            Self::Nvml => "scripted_nvml",
            Self::Nccl => "scripted_nccl",
        }
    }

    /// What programs ask for.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["libcuda.so.1"],
            Self::Nvml => &["libnvidia-ml.so.1"],
            Self::Nccl => &["libnccl.so"],
        }
    }
}

/// A machine: a scenario, and the libraries that play it.
pub(crate) struct Machine {
    folder: TempDir,
}

impl Machine {
    /// With these libraries. What the text calls `{dir}` is the folder of this machine.
    pub(crate) fn new(libraries: &[Library], scenario: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let libs = folder.path().join("lib");
        std::fs::create_dir(&libs).expect("a folder can be made");
        for library in libraries {
            for name in library.names() {
                std::os::unix::fs::symlink(built(*library), libs.join(name)).expect("a link can be made");
            }
        }
        let machine = Self { folder };
        machine.play(scenario);
        machine
    }

    /// Another scenario, for programs that start from now on.
    pub(crate) fn play(&self, scenario: &str) {
        let text = scenario.replace("{dir}", &self.path().display().to_string());
        std::fs::write(self.path().join("scenario.toml"), text).expect("a file can be written");
    }

    /// Its folder.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// What the programs on it see.
    pub(crate) fn environment(&self) -> [(&'static str, OsString); 2] {
        [
            ("LD_LIBRARY_PATH", self.path().join("lib").into()),
            ("SCRIPTED_GPU", self.path().join("scenario.toml").into()),
        ]
    }

    /// The program under test, on this machine.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"));
        command.args(arguments).envs(self.environment()).env_remove("CUDA_VISIBLE_DEVICES");
        command.current_dir(self.path());
        command
    }

    /// The lines of a log in its folder, without the process numbers; empty where nothing was logged.
    pub(crate) fn log(&self, name: &str) -> Vec<(u32, String)> {
        let text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        let split = |line: &str| {
            let (pid, rest) = line.split_once(' ').expect("a process number");
            (pid.parse().expect("a number"), rest.to_owned())
        };
        text.lines().map(split).collect()
    }
}

/// Whether this is the process that a test of the library itself is to run in, on a scripted machine: the
/// dynamic loader reads its paths once, when a process starts. If it is not, runs the test `name` (with its
/// modules) of this program there, and fails if it fails.
pub(crate) fn inside(name: &str, machine: impl FnOnce() -> Machine) -> bool {
    const INSIDE: &str = "SCRIPTED_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let machine = machine();
    let output = Command::new(std::env::current_exe().expect("this program has a file"))
        .args(["--exact", name, "--nocapture"])
        .envs(machine.environment())
        .env(INSIDE, machine.path())
        .output()
        .expect("this program can be started");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// `count` cards of one kind, as a scenario: `GPU-0000000i-...` at PCI bus `1i`.
pub(crate) fn cards(count: usize) -> String {
    let card = |i: usize| {
        format!(
            "[[card]]\nuuid = \"{}\"\npci_bus_id = \"0000:1{i}:00.0\"\nname = \"NVIDIA Scripted\"\n",
            uuid(i)
        )
    };
    (0..count).map(card).collect()
}

/// The identity of such a card.
pub(crate) fn uuid(card: usize) -> String {
    format!("GPU-{card:08x}-aaaa-bbbb-cccc-0123456789ab")
}

/// Where cargo put it; built at the first call of this process, which costs nothing when it is there.
fn built(library: Library) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let mut command = Command::new(env!("CARGO"));
        command.args(["build", "--release", "--quiet"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if !cfg!(feature = "engines") {
            command.arg("--no-default-features");
        }
        for library in Library::ALL {
            command.args(["--example", library.example()]);
        }
        let status = command.status().expect("cargo starts");
        assert!(status.success(), "the scripted libraries cannot be built");
        let program = Path::new(env!("CARGO_BIN_EXE_dp-vs-ddp"));
        program.parent().expect("programs lie in a folder").join("examples")
    });
    folder.join(format!("lib{}.so", library.example()))
}
