//! `doctor`: what this machine has, what is missing, and what to do about it.
//!
//! [`Facts::gather`] reads the machine and decides nothing; [`findings`] judges facts and reads
//! nothing. A fact that cannot be read is missing, never zero, and never a reason to fail.

mod gpu;

use crate::card::Topology;
use crate::error::{Error, Kind, Result};
use crate::metrics::nvml::{self, Driver};
use crate::report::wrap;
use crate::units;
use gpu::Gpus;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// What the machine and this build have.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    /// Of this program.
    version: &'static str,
    /// Kernel name and release, and the CPU architecture.
    system: String,
    /// Logical cores this process may run on.
    cores: Option<usize>,
    /// Physical cores behind them.
    physical_cores: Option<usize>,
    /// Cores' worth of time that the container grants; `None` without a quota.
    cpu_quota_cores: Option<f64>,
    /// Of the machine, or of the container where that is less.
    memory_bytes: Option<u64>,
    /// What can still be had without swapping.
    memory_available_bytes: Option<u64>,
    /// Size of /dev/shm.
    shm_bytes: Option<u64>,
    libtorch: Libtorch,
    driver: Driver,
    gpus: Gpus,
    /// The environment variable, if set.
    cuda_visible_devices: Option<String>,
    /// Where the dynamic loader would find NCCL, or libtorch's own copy.
    nccl: Option<PathBuf>,
    /// Tools that building needs, and where they are.
    tools: Vec<(&'static str, Option<PathBuf>)>,
}

/// The engines' library.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum Libtorch {
    /// Built with `--no-default-features`.
    #[cfg_attr(feature = "engines", allow(dead_code, reason = "the variant of the other build"))]
    NotBuilt,
    /// The program runs, so the loader found it.
    #[cfg_attr(not(feature = "engines"), allow(dead_code, reason = "the variant of the other build"))]
    Loaded {
        built_against: &'static str,
        version: Option<String>,
        folder: Option<PathBuf>,
        /// libtorch_cuda lies beside it.
        cuda: bool,
    },
}

/// How a finding affects a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// As it should be.
    Ok,
    /// Not there, and not needed.
    Absent,
    /// Works, but not as it could.
    Warning,
    /// `compare` cannot run.
    Missing,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    name: &'static str,
    state: State,
    text: String,
    hint: Option<String>,
}

/// Everything `doctor` has to say; `Display` is the text for people.
#[derive(Debug, Serialize)]
pub(crate) struct Diagnosis {
    /// Whether `compare` can run here.
    pub(crate) can_compare: bool,
    facts: Facts,
    findings: Vec<Finding>,
}

/// Looks at this machine.
pub(crate) fn diagnose() -> Diagnosis {
    let facts = Facts::gather();
    let findings = findings(&facts);
    let can_compare = findings.iter().all(|finding| finding.state != State::Missing);
    Diagnosis { can_compare, facts, findings }
}

impl Diagnosis {
    /// For people, or as JSON for programs.
    pub(crate) fn render(&self, json: bool) -> Result<String> {
        if !json {
            return Ok(self.to_string());
        }
        serde_json::to_string_pretty(self).map_err(|error| {
            Error::new(Kind::Corrupt, format!("cannot write the diagnosis as JSON: {error}"))
        })
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "dp-vs-ddp {} on {}\n", self.facts.version, self.facts.system)?;
        for Finding { name, state, text, hint } in &self.findings {
            let mark = match state {
                State::Ok => "ok",
                State::Absent => "-",
                State::Warning => "warning",
                State::Missing => "MISSING",
            };
            // Not a word more on a line than a terminal has room for.
            let rest = " ".repeat(24);
            f.write_str(&wrap(text, &format!("{mark:8} {name:14} "), &rest))?;
            if let Some(hint) = hint {
                f.write_str(&wrap(&format!("hint: {hint}"), &rest, &rest))?;
            }
        }
        let verdict = if self.can_compare { "`compare` can run here" } else { "`compare` cannot run here" };
        write!(f, "\n{verdict}")
    }
}

fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![
        cores(facts),
        memory(facts),
        shm(facts),
        libtorch(facts),
        driver(facts),
        cuda(facts),
        nccl(facts),
    ];
    all.extend(gpu::findings(facts));
    all.push(tools(facts));
    all
}

fn finding(name: &'static str, state: State, text: impl Into<String>) -> Finding {
    Finding { name, state, text: text.into(), hint: None }
}

impl Finding {
    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

fn cores(facts: &Facts) -> Finding {
    let Some(cores) = facts.cores else {
        return finding("cores", State::Warning, "unknown")
            .hint("give --cards and --set run.threads_per_card=1");
    };
    let physical = facts.physical_cores.unwrap_or(cores);
    let text = format!("{cores} usable, {physical} physical");
    match facts.cpu_quota_cores {
        Some(quota) if quota < cores as f64 => {
            finding("cores", State::Warning, format!("{text}, but a quota of {quota:.1} cores' time"))
                .hint("a quota stops all cards for part of every 100 ms: raise it, or pin cores instead")
        }
        _ if physical < 2 => finding("cores", State::Warning, text)
            .hint("two virtual cards on one core take turns: utilisation is right, speed means nothing"),
        _ => finding("cores", State::Ok, text),
    }
}

fn memory(facts: &Facts) -> Finding {
    const LITTLE: u64 = 2 << 30;
    let Some(total) = facts.memory_bytes else { return finding("memory", State::Absent, "unknown") };
    let available = facts.memory_available_bytes.unwrap_or(total);
    let text = format!("{}, {} available", units::bytes(total), units::bytes(available));
    if available < LITTLE {
        finding("memory", State::Warning, text)
            .hint("every rank is a process with a libtorch of its own: use fewer cards")
    } else {
        finding("memory", State::Ok, text)
    }
}

fn shm(facts: &Facts) -> Finding {
    // Shared memory is a memfd, which /dev/shm does not limit; NCCL is what needs the folder.
    let text = |size| format!("/dev/shm {}", units::bytes(size));
    match (facts.shm_bytes, &facts.driver) {
        (None, _) => finding("shared memory", State::Absent, "no /dev/shm; not needed on virtual cards"),
        (Some(size), Driver::Present { .. }) if size < 1 << 30 => {
            finding("shared memory", State::Warning, text(size))
                .hint("NCCL may want more: start the container with --shm-size=1g or --ipc=host")
        }
        (Some(size), _) => finding("shared memory", State::Ok, text(size)),
    }
}

fn libtorch(facts: &Facts) -> Finding {
    match &facts.libtorch {
        Libtorch::NotBuilt => finding("libtorch", State::Missing, "this program was built without engines")
            .hint("build it with `./setup && cargo build --release`; `report` works without"),
        Libtorch::Loaded { built_against, version, folder, .. } => {
            let folder =
                folder.as_ref().map_or_else(String::new, |folder| format!(" in {}", folder.display()));
            match version {
                Some(version) if version == built_against => {
                    finding("libtorch", State::Ok, format!("{version}{folder}"))
                }
                Some(version) => finding(
                    "libtorch",
                    State::Warning,
                    format!("{version}{folder}, but built against {built_against}"),
                )
                .hint("unset LD_LIBRARY_PATH, or run ./setup and build again"),
                None => finding(
                    "libtorch",
                    State::Warning,
                    format!("unknown version{folder}, built against {built_against}"),
                )
                .hint("run ./setup and build again"),
            }
        }
    }
}

fn driver(facts: &Facts) -> Finding {
    match &facts.driver {
        Driver::Missing => {
            finding("NVIDIA driver", State::Absent, "none: virtual cards (CPU cores) are used")
        }
        Driver::Broken { error, mismatch } => {
            let hint = if *mismatch {
                "the driver was upgraded under the running kernel module: reboot, or reload the module"
            } else {
                "does `nvidia-smi` work? In a container: start it with --gpus all"
            };
            finding("NVIDIA driver", State::Warning, format!("does not work: {error}")).hint(hint)
        }
        Driver::Present { version, cuda, cards } => {
            let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
            let text = format!("{}, CUDA {}, {} cards", known(version), known(cuda), cards.len());
            if cards.is_empty() {
                return finding("NVIDIA driver", State::Warning, text)
                    .hint("in a container: start it with --gpus all");
            }
            finding("NVIDIA driver", State::Ok, text)
        }
    }
}

fn cuda(facts: &Facts) -> Finding {
    const NAME: &str = "CUDA cards";
    let cards = match &facts.driver {
        Driver::Present { cards, .. } if !cards.is_empty() => cards,
        _ => return finding(NAME, State::Absent, "none"),
    };
    let names: Vec<&str> = cards.iter().map(|card| card.name.as_deref().unwrap_or("unnamed")).collect();
    let text = names.join(", ");
    match (&facts.libtorch, facts.cuda_visible_devices.as_deref()) {
        // The one that people lose a day to: everything works, on the CPU.
        (Libtorch::Loaded { cuda: false, .. }, _) => {
            finding(NAME, State::Warning, format!("{text}: cannot be used, this libtorch has no CUDA"))
                .hint("run `./setup --full`, then build again")
        }
        (_, Some("" | "-1")) => {
            finding(NAME, State::Warning, format!("{text}: hidden by CUDA_VISIBLE_DEVICES"))
                .hint("unset CUDA_VISIBLE_DEVICES")
        }
        (_, Some(visible)) => finding(NAME, State::Ok, format!("{text} (CUDA_VISIBLE_DEVICES={visible})")),
        (_, None) => finding(NAME, State::Ok, text),
    }
}

fn nccl(facts: &Facts) -> Finding {
    match (&facts.nccl, &facts.driver) {
        (Some(path), _) => match &facts.gpus.nccl {
            Some(Ok(version)) => finding("NCCL", State::Ok, format!("{version}, {}", path.display())),
            Some(Err(why)) => finding("NCCL", State::Warning, why.clone())
                .hint("ddp cannot use CUDA cards without it: run `./setup --full`, then build again"),
            None => finding("NCCL", State::Ok, path.display().to_string()),
        },
        (None, _) if matches!(facts.gpus.nccl, Some(Ok(_))) => {
            let version = facts.gpus.nccl.as_ref().and_then(|nccl| nccl.as_ref().ok());
            finding("NCCL", State::Ok, format!("{}, not libtorch's own", version.map_or("", String::as_str)))
        }
        (None, Driver::Present { cards, .. }) if cards.len() > 1 => {
            finding("NCCL", State::Warning, "not found: ddp cannot use these cards")
                .hint("run ./setup and build again")
        }
        (None, _) => finding("NCCL", State::Absent, "not found; not needed without several CUDA cards"),
    }
}

fn tools(facts: &Facts) -> Finding {
    let missing: Vec<&str> =
        facts.tools.iter().filter(|(_, path)| path.is_none()).map(|(tool, _)| *tool).collect();
    if missing.is_empty() {
        return finding(
            "build tools",
            State::Ok,
            facts.tools.iter().map(|(tool, _)| *tool).collect::<Vec<_>>().join(", "),
        );
    }
    finding("build tools", State::Absent, format!("not found: {} (needed only to build)", missing.join(", ")))
        .hint("sudo apt-get install g++ python3-pip; Rust by rustup")
}

impl Facts {
    fn gather() -> Self {
        let uname = rustix::system::uname();
        let topology = Topology::of_this_process().ok();
        let (libtorch, folder) = gather_libtorch();
        let driver = nvml::driver();
        let variable = std::env::var_os("CUDA_VISIBLE_DEVICES").map(|v| v.to_string_lossy().into_owned());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            system: format!(
                "{} {}, {}",
                uname.sysname().to_string_lossy(),
                uname.release().to_string_lossy(),
                uname.machine().to_string_lossy()
            ),
            cores: crate::card::available_cores().ok().map(|cores| cores.0.len()),
            physical_cores: topology.map(|topology| topology.physical_cores()),
            cpu_quota_cores: read("/sys/fs/cgroup/cpu.max").and_then(|text| quota(&text)),
            memory_bytes: least(meminfo("MemTotal"), read("/sys/fs/cgroup/memory.max")),
            memory_available_bytes: meminfo("MemAvailable"),
            shm_bytes: rustix::fs::statvfs("/dev/shm").ok().map(|fs| fs.f_blocks.saturating_mul(fs.f_frsize)),
            libtorch,
            gpus: Gpus::gather(&driver, variable.as_deref()),
            driver,
            cuda_visible_devices: variable,
            nccl: folder.as_deref().and_then(find_nccl),
            tools: ["cargo", "g++", "python3"].map(|tool| (tool, on_path(tool))).into(),
        }
    }
}

#[cfg(feature = "engines")]
fn gather_libtorch() -> (Libtorch, Option<PathBuf>) {
    let loaded = crate::torch::loaded().ok();
    let folder = loaded.as_ref().and_then(|loaded| loaded.path.as_deref()?.parent().map(Path::to_owned));
    let libtorch = Libtorch::Loaded {
        built_against: crate::torch::BUILT_AGAINST,
        version: loaded.map(|loaded| loaded.version),
        cuda: folder.as_ref().is_some_and(|folder| cuda_loads(folder)),
        folder: folder.clone(),
    };
    (libtorch, folder)
}

#[cfg(not(feature = "engines"))]
fn gather_libtorch() -> (Libtorch, Option<PathBuf>) {
    (Libtorch::NotBuilt, None)
}

/// Wheels hold libtorch_cuda even where the NVIDIA libraries it needs were left out: cuBLAS tells.
#[cfg(feature = "engines")]
fn cuda_loads(folder: &Path) -> bool {
    let archive = folder.with_file_name("build-version").exists();
    let wheels = folder.join("../../nvidia");
    let cublas = ["cu13/lib/libcublas.so.13", "cublas/lib/libcublas.so.12"];
    folder.join("libtorch_cuda.so").exists()
        && (archive || cublas.iter().any(|lib| wheels.join(lib).exists()))
}

/// The copy that belongs to this libtorch; a system copy beside it would put two into one process.
fn find_nccl(libtorch: &Path) -> Option<PathBuf> {
    let candidates = [libtorch.join("../../nvidia/nccl/lib/libnccl.so.2"), libtorch.join("libnccl.so.2")];
    candidates.into_iter().find_map(|path| path.canonicalize().ok())
}

fn on_path(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(tool)).find(|file| file.is_file())
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Cores' worth of time in cgroup v2's `cpu.max`: "200000 100000" is 2, "max 100000" is no quota.
fn quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok().filter(|period| *period > 0.0)?)
}

/// The smaller of the machine's memory and cgroup v2's `memory.max` ("max": no limit).
fn least(machine: Option<u64>, limit: Option<String>) -> Option<u64> {
    let limit = limit.and_then(|text| text.trim().parse().ok());
    machine.into_iter().chain(limit).min()
}

fn meminfo(key: &str) -> Option<u64> {
    kib(&read("/proc/meminfo")?, key)
}

/// A value of /proc/meminfo, in bytes.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Facts {
        Facts {
            version: "1.2.3",
            system: "Linux 6.1, x86_64".to_owned(),
            cores: Some(4),
            physical_cores: Some(2),
            cpu_quota_cores: None,
            memory_bytes: Some(16 << 30),
            memory_available_bytes: Some(8 << 30),
            shm_bytes: Some(64 << 20),
            libtorch: Libtorch::Loaded {
                built_against: "2.11.0",
                version: Some("2.11.0".to_owned()),
                folder: Some("/opt/torch/lib".into()),
                cuda: false,
            },
            driver: Driver::Missing,
            gpus: Gpus::default(),
            cuda_visible_devices: None,
            nccl: None,
            tools: vec![("cargo", Some("/bin/cargo".into()))],
        }
    }

    fn gpus(count: usize) -> Driver {
        let card = nvml::Gpu { name: Some("Card X".to_owned()), ..nvml::Gpu::default() };
        Driver::Present { version: Some("580.1".to_owned()), cuda: None, cards: vec![card; count] }
    }

    fn with_cuda(facts: Facts) -> Facts {
        let Libtorch::Loaded { built_against, version, folder, .. } = facts.libtorch else {
            panic!("not built")
        };
        Facts { libtorch: Libtorch::Loaded { built_against, version, folder, cuda: true }, ..facts }
    }

    fn state(facts: &Facts, name: &str) -> (State, String) {
        let finding =
            findings(facts).into_iter().find(|finding| finding.name == name).expect("it is looked at");
        (finding.state, format!("{} {}", finding.text, finding.hint.unwrap_or_default()))
    }

    #[test]
    fn a_bare_machine_is_fine() {
        assert!(
            findings(&machine()).iter().all(|finding| matches!(finding.state, State::Ok | State::Absent))
        );
    }

    #[test]
    fn a_libtorch_without_cuda_beside_a_gpu_is_said_aloud() {
        let facts = Facts { driver: gpus(1), ..machine() };
        let (is, text) = state(&facts, "CUDA cards");
        assert_eq!(is, State::Warning);
        assert!(text.contains("this libtorch has no CUDA") && text.contains("./setup"), "{text}");
        assert_eq!(state(&with_cuda(facts), "CUDA cards").0, State::Ok);
    }

    #[test]
    fn hidden_cards_are_told_from_absent_ones() {
        let facts =
            with_cuda(Facts { driver: gpus(2), cuda_visible_devices: Some(String::new()), ..machine() });
        assert!(state(&facts, "CUDA cards").1.contains("hidden by CUDA_VISIBLE_DEVICES"));
        assert_eq!(state(&machine(), "CUDA cards").0, State::Absent);
    }

    #[test]
    fn nccl_is_missed_only_where_it_is_needed() {
        assert_eq!(state(&machine(), "NCCL").0, State::Absent);
        assert_eq!(state(&Facts { driver: gpus(1), ..machine() }, "NCCL").0, State::Absent);
        assert_eq!(state(&Facts { driver: gpus(2), ..machine() }, "NCCL").0, State::Warning);
    }

    #[test]
    fn another_libtorch_than_built_against_is_named() {
        let mut facts = machine();
        facts.libtorch = Libtorch::Loaded {
            built_against: "2.11.0",
            version: Some("2.9.1".to_owned()),
            folder: None,
            cuda: false,
        };
        let (is, text) = state(&facts, "libtorch");
        assert_eq!(is, State::Warning);
        assert!(text.contains("2.9.1, but built against 2.11.0"), "{text}");
    }

    #[test]
    fn only_a_build_without_engines_cannot_compare() {
        let facts = Facts { libtorch: Libtorch::NotBuilt, ..machine() };
        assert_eq!(state(&facts, "libtorch").0, State::Missing);
    }

    #[test]
    fn a_broken_driver_is_named_by_its_own_word() {
        let driver = Driver::Broken { error: "RM detects a mismatch".to_owned(), mismatch: true };
        let (is, text) = state(&Facts { driver, ..machine() }, "NVIDIA driver");
        assert_eq!(is, State::Warning);
        assert!(text.contains("RM detects a mismatch") && text.contains("reboot"), "{text}");
    }

    #[test]
    fn quotas_and_limits_are_read_as_the_kernel_writes_them() {
        assert_eq!(quota("150000 100000\n"), Some(1.5));
        assert_eq!(quota("max 100000\n"), None);
        assert_eq!(least(Some(100), Some("max\n".to_owned())), Some(100));
        assert_eq!(least(Some(100), Some("40\n".to_owned())), Some(40));
        assert_eq!(kib("MemTotal:       16 kB\nMemAvailable: 8 kB\n", "MemAvailable"), Some(8192));
        assert_eq!(kib("MemTotal: x kB\n", "MemTotal"), None);
    }

    #[test]
    fn this_machine_is_described_without_a_panic() {
        let diagnosis = diagnose();
        assert_eq!(diagnosis.can_compare, cfg!(feature = "engines"));
        let text = diagnosis.to_string();
        assert!(text.contains("libtorch") && text.contains("`compare` can"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&diagnosis.render(true).unwrap()).unwrap();
        assert_eq!(json["can_compare"], cfg!(feature = "engines"));
        assert!(json["facts"]["cores"].as_u64().unwrap() >= 1);
    }
}
