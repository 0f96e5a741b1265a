//! `./setup`, run on a copy of itself with stand-ins for libtorch, pip, cargo and the NVIDIA tools:
//! nothing is downloaded and nothing outside a temporary folder is touched.

#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A checkout with a home of its own.
struct Checkout {
    folder: tempfile::TempDir,
}

/// pip's stand-in: notes its arguments, then does what the test wants; all else goes to the real python3.
const PYTHON: &str = r#"#!/bin/bash
if [[ "$1 $2" != "-m pip" ]]; then exec /usr/bin/env -i PATH="$REAL_PATH" python3 "$@"; fi
if [[ $3 == --version ]]; then exit "${NO_PIP:-0}"; fi
echo "$@" >>"$HOME/pip.log"
if [[ $3 == --python ]]; then environment=${4%/bin/python}; eval "$PIP_INSTALLS"; exit; fi
while [[ $1 != --dest ]]; do shift; done
eval "$PIP_DOES"
"#;

/// Puts a wheel there that holds a whole little libtorch.
const DELIVER: &str = r#"sleep 0.5; cd "$HOME/good" && /usr/bin/env -i PATH="$REAL_PATH" python3 -m zipfile -c "$2/torch.whl" torch"#;

/// Puts modules there that can be imported.
const INSTALL: &str = r#"for module in torch numpy safetensors; do
    touch "$(echo "$environment"/lib/python3*/site-packages)/$module.py"
done"#;

impl Checkout {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("set up ").tempdir().unwrap();
        let checkout = Self { folder };
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        fs::create_dir_all(checkout.path("repo/scripts")).unwrap();
        fs::copy(source.join("setup"), checkout.path("repo/setup")).unwrap();
        for entry in fs::read_dir(source.join("scripts")).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                fs::copy(entry.path(), checkout.path("repo/scripts").join(entry.file_name())).unwrap();
            }
        }
        checkout.tool("cargo", "#!/bin/bash\necho 'cargo 1.95.0 (abc 2026-01-01)'\n");
        checkout.tool("g++", "#!/bin/bash\n");
        checkout.tool("python3", PYTHON);
        checkout.tool("nvidia-smi", "#!/bin/bash\nexit 9\n");
        checkout.tool("ldconfig", "#!/bin/bash\n");
        checkout.free_megabytes(99_999);
        checkout.libtorch("home/good/torch", "2.11.0+cu130", true);
        checkout
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn tool(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        fs::create_dir_all(self.path("bin")).unwrap();
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn free_megabytes(&self, free: u32) {
        self.tool("df", &format!("#!/bin/bash\necho header\necho disk 1 1 {free} 1% /\n"));
    }

    fn libtorch(&self, name: &str, version: &str, cxx11_abi: bool) -> PathBuf {
        let root = self.path(name);
        fs::create_dir_all(root.join("lib")).unwrap();
        fs::create_dir_all(root.join("include/ATen")).unwrap();
        fs::write(root.join("include/ATen/ATen.h"), "").unwrap();
        fs::write(root.join("lib/libtorch_cpu.so"), "").unwrap();
        fs::write(root.join("lib/libc10.so"), if cxx11_abi { "NSt7__cxx11" } else { "NSs" }).unwrap();
        fs::write(root.join("version.py"), format!("__version__ = '{version}'\ndebug = False\n")).unwrap();
        root
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let real = std::env::var("PATH").unwrap();
        let mut command = Command::new(self.path("repo/setup"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()))
            .env("REAL_PATH", real)
            .env("HOME", self.path("home"))
            .env("PIP_DOES", "exit 1")
            .env("PIP_INSTALLS", "exit 1");
        command
    }

    fn linked(&self) -> Option<PathBuf> {
        fs::read_link(self.path("repo/.libtorch")).ok()
    }

    /// `./setup --peers` where a libtorch is at hand already.
    fn peers(&self, pip_installs: &str) -> Command {
        let mut command = self.command(&["--peers"]);
        command.env("LIBTORCH", self.path("home/good")).env("PIP_INSTALLS", pip_installs);
        command
    }

    fn linked_peers(&self) -> Option<PathBuf> {
        fs::read_link(self.path("repo/.peers")).ok()
    }

    /// What the cache holds, apart from its lock.
    fn cached(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path("home/.cache/dp-vs-ddp")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != ".lock").collect()
    }
}

#[track_caller]
fn succeeds(mut command: Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{status}: {text}");
    text
}

#[track_caller]
fn fails(mut command: Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("error: ") && text.contains("\n\nhint: "), "{text}");
    text
}

#[test]
fn libtorch_is_found_in_every_form_people_give() {
    let checkout = Checkout::new();
    let root = checkout.libtorch("my libs/torch", "2.9.1", true).canonicalize().unwrap();
    for form in
        ["my libs/torch", "my libs/torch/", "my libs", "my libs/torch/lib", "./my libs/../my libs/torch//"]
    {
        let _ = fs::remove_file(checkout.path("repo/.libtorch"));
        let mut command = checkout.command(&[]);
        command.env("LIBTORCH", form);
        succeeds(command);
        assert_eq!(checkout.linked(), Some(root.clone()), "{form}");
    }
    assert!(!checkout.path("home/pip.log").exists(), "nothing was downloaded");
}

#[test]
fn a_libtorch_that_does_not_fit_is_refused_with_the_reason() {
    let checkout = Checkout::new();
    let headless = checkout.libtorch("headless", "2.10.0", true);
    fs::remove_file(headless.join("include/ATen/ATen.h")).unwrap();
    checkout.libtorch("new", "2.12.0+cpu", true);
    checkout.libtorch("old", "2.8.1", true);
    checkout.libtorch("abi", "2.11.0", false);
    for (folder, reason) in [
        ("new", "is libtorch 2.12.0; this project builds against 2.9 to 2.11"),
        ("old", "is libtorch 2.8.1;"),
        ("abi", "old C++ ABI"),
        ("headless", "has no headers"),
        ("nowhere", "no lib/libtorch_cpu.so in `nowhere`"),
    ] {
        let mut command = checkout.command(&[]);
        command.env("LIBTORCH", folder);
        let text = fails(command);
        assert!(text.contains("$LIBTORCH does not fit: ") && text.contains(reason), "{folder}: {text}");
    }
    assert_eq!(checkout.linked(), None);
}

#[test]
fn patch_releases_fit() {
    let checkout = Checkout::new();
    for version in ["2.9.0", "2.10.3+cpu", "2.11.7a0+git12"] {
        let folder = checkout.libtorch(version, version, true);
        let mut command = checkout.command(&[]);
        command.env("LIBTORCH", &folder);
        succeeds(command);
    }
}

#[test]
fn a_download_is_unpacked_linked_and_found_again() {
    let checkout = Checkout::new();
    let mut first = checkout.command(&[]);
    first.env("PIP_DOES", DELIVER).env("LC_ALL", "de_DE.UTF-8");
    let text = succeeds(first);
    assert!(text.contains("downloading libtorch 2.11.0 (cpu): 544 MB"), "{text}");
    let pip = fs::read_to_string(checkout.path("home/pip.log")).unwrap();
    assert!(pip.contains("--require-hashes") && pip.contains("requirements-2.11.0-cpu.txt"), "{pip}");
    assert_eq!(checkout.cached(), ["libtorch-2.11.0-cpu"]);
    let linked = checkout.linked().unwrap();
    assert!(linked.ends_with("libtorch-2.11.0-cpu/torch"), "{}", linked.display());

    let text = succeeds(checkout.command(&[]));
    assert!(text.contains("using .libtorch"), "{text}");
    // A second checkout of the same user finds it in the cache; pip would fail now.
    fs::remove_file(checkout.path("repo/.libtorch")).unwrap();
    assert!(succeeds(checkout.command(&[])).contains("already"));
}

#[test]
fn two_at_once_download_once() {
    let checkout = Checkout::new();
    let start = || checkout.command(&[]).env("PIP_DOES", DELIVER).spawn().unwrap();
    let (mut one, mut other) = (start(), start());
    assert!(one.wait().unwrap().success() && other.wait().unwrap().success());
    let calls = fs::read_to_string(checkout.path("home/pip.log")).unwrap();
    assert_eq!(calls.lines().count(), 1, "{calls}");
}

#[test]
fn a_failed_or_killed_download_leaves_nothing_half() {
    let checkout = Checkout::new();
    let mut command = checkout.command(&[]);
    command.env("PIP_DOES", "echo half > \"$2/torch.whl\"; exit 1");
    assert!(fails(command).contains("pip could not download libtorch 2.11.0"));
    assert_eq!((checkout.cached(), checkout.linked()), (Vec::new(), None));

    // SIGKILL leaves its temporary folder; the next run removes it.
    let mut killed = checkout.command(&[]);
    killed.env("PIP_DOES", "kill -9 $PPID; exit 1");
    assert_eq!(killed.output().unwrap().status.code(), None);
    assert!(checkout.cached().iter().all(|name| name.starts_with("partial.")));
    let mut again = checkout.command(&[]);
    again.env("PIP_DOES", DELIVER);
    succeeds(again);
    assert_eq!(checkout.cached(), ["libtorch-2.11.0-cpu"]);
}

#[test]
fn a_small_disk_is_noticed_before_the_download() {
    let checkout = Checkout::new();
    checkout.free_megabytes(1700);
    let text = fails(checkout.command(&[]));
    assert!(text.contains("needs 1714 MB") && text.contains("1700 MB are free"), "{text}");
    assert!(!checkout.path("home/pip.log").exists());
}

#[test]
fn what_is_missing_is_named_with_the_package_to_install() {
    let checkout = Checkout::new();
    let mut command = checkout.command(&[]);
    command.env("NO_PIP", "1");
    assert!(fails(command).contains("apt-get install python3-pip"));

    checkout.tool("cargo", "#!/bin/bash\necho 'cargo 1.75.0 (abc 2023-01-01)'\n");
    let mut command = checkout.command(&[]);
    command.env("CXX", "no-such-compiler");
    let text = fails(command);
    assert!(text.contains("apt-get install g++") && text.contains("Rust 1.88 or newer"), "{text}");
    let check = checkout.command(&["--check"]).output().unwrap();
    assert_eq!(check.status.code(), Some(1));
    assert!(String::from_utf8(check.stdout).unwrap().contains("missing: .libtorch"));
    assert_eq!(checkout.linked(), None);
}

#[test]
fn the_driver_decides_which_wheels_are_fetched() {
    for (driver, arguments, wanted) in [
        ("580.65.06", &[][..], "2.11.0-cuda"),
        ("550.54.15", &[], "2.9.1-cuda"),
        ("550.54.15", &["--torch", "2.11.0"], "2.11.0-cuda"),
        ("", &["--torch=2.9.1"], "2.9.1-cpu"),
        ("", &["--full"], "2.11.0-cuda"),
    ] {
        let checkout = Checkout::new();
        checkout.tool("nvidia-smi", &format!("#!/bin/bash\necho '{driver}'\necho '{driver}'\n"));
        let text = fails(checkout.command(arguments));
        let pip = fs::read_to_string(checkout.path("home/pip.log")).unwrap_or(text);
        assert!(pip.contains(&format!("requirements-{wanted}.txt")), "{driver} {arguments:?}: {pip}");
    }
}

#[test]
fn a_libtorch_without_cuda_beside_a_driver_is_said_aloud() {
    let checkout = Checkout::new();
    checkout.tool("nvidia-smi", "#!/bin/bash\necho 580.65.06\n");
    let mut command = checkout.command(&[]);
    command.env("LIBTORCH", checkout.path("home/good"));
    assert!(succeeds(command).contains("$LIBTORCH has no CUDA"));
    // What was linked before is not good enough any more without that explicit wish.
    let text = fails(checkout.command(&[]));
    assert!(text.contains(".libtorch is not used: it has no CUDA"), "{text}");
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    let checkout = Checkout::new();
    for arguments in [&["--torch"][..], &["--torch", "2.8.0"], &["--torch="], &["--wat"]] {
        fails(checkout.command(arguments));
    }
    let help = checkout.command(&["--help"]).output().unwrap();
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("--torch VERSION"));
}

#[test]
fn peers_are_installed_once_in_an_environment_that_is_shared() {
    let checkout = Checkout::new();
    let text = succeeds(checkout.peers(INSTALL));
    assert!(text.contains("downloading PyTorch 2.11.0: 2600 MB, then 4800 MB on disk"), "{text}");
    let pip = fs::read_to_string(checkout.path("home/pip.log")).unwrap();
    assert!(pip.contains("--require-hashes") && pip.contains("requirements-2.11.0-peers.txt"), "{pip}");
    assert_eq!(checkout.cached(), ["peers-2.11.0"]);
    let linked = checkout.linked_peers().unwrap();
    let python = linked.join("bin/python");
    assert!(Command::new(&python).args(["-c", "import torch"]).status().unwrap().success());

    // Once more, and from a second checkout: pip would fail now.
    fs::remove_file(checkout.path("repo/.peers")).unwrap();
    assert!(succeeds(checkout.peers("exit 1")).contains("PyTorch 2.11.0 is in"));
    assert_eq!(checkout.linked_peers(), Some(linked));
    let check = checkout.command(&["--check"]).output().unwrap();
    assert!(String::from_utf8(check.stdout).unwrap().contains("peers: PyTorch in "));
}

#[test]
fn peers_from_other_requirements_are_installed_again() {
    let checkout = Checkout::new();
    succeeds(checkout.peers(INSTALL));
    let requirements = checkout.path("repo/scripts/requirements-2.11.0-peers.txt");
    fs::write(&requirements, fs::read_to_string(&requirements).unwrap() + "# newer\n").unwrap();
    fails(checkout.peers("exit 1"));
    assert!(succeeds(checkout.peers(INSTALL)).contains("downloading"));
}

#[test]
fn two_at_once_install_peers_once() {
    let checkout = Checkout::new();
    let start = || checkout.peers(&format!("sleep 0.5; {INSTALL}")).spawn().unwrap();
    let (mut one, mut other) = (start(), start());
    assert!(one.wait().unwrap().success() && other.wait().unwrap().success());
    let calls = fs::read_to_string(checkout.path("home/pip.log")).unwrap();
    assert_eq!(calls.lines().count(), 1, "{calls}");
}

#[test]
fn failed_killed_or_broken_peers_never_count_as_installed() {
    let checkout = Checkout::new();
    let text = fails(checkout.peers(&format!("{INSTALL}; exit 1")));
    assert!(text.contains("pip could not install PyTorch 2.11.0"), "{text}");
    let broken = INSTALL.replace("numpy ", "");
    assert!(fails(checkout.peers(&broken)).contains("does not start"));
    assert_eq!((checkout.cached(), checkout.linked_peers()), (Vec::new(), None));

    let killed = checkout.peers(&format!("{INSTALL}; kill -9 $PPID")).output().unwrap();
    assert_eq!((killed.status.code(), checkout.linked_peers()), (None, None));
    let text = succeeds(checkout.peers(INSTALL));
    assert!(text.contains("downloading PyTorch"), "{text}");
    assert_eq!(checkout.cached(), ["peers-2.11.0"]);
}

#[test]
fn what_peers_cannot_be_installed_with_is_said_before_the_download() {
    let checkout = Checkout::new();
    checkout.free_megabytes(7000);
    assert!(fails(checkout.peers(INSTALL)).contains("needs 7400 MB"));
    checkout.free_megabytes(99_999);

    checkout.tool("python3", &PYTHON.replacen('\n', "\nif [[ $* == *version_info* ]]; then exit 1; fi\n", 1));
    assert!(fails(checkout.peers(INSTALL)).contains("Python 3.11 to 3.14 as `python3`"));
    checkout.tool("python3", PYTHON);

    let libtorch = checkout.libtorch("between", "2.10.0", true);
    let mut command = checkout.peers(INSTALL);
    command.env("LIBTORCH", libtorch);
    let text = fails(command);
    assert!(text.contains("no pinned PyTorch for libtorch 2.10.0"), "{text}");

    fs::create_dir(checkout.path("repo/.peers")).unwrap();
    assert!(fails(checkout.peers(INSTALL)).contains("is a folder"));
    assert!(!checkout.path("home/pip.log").exists());
}
