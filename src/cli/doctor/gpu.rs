//! `doctor` on machines with GPUs: what their drivers, libraries and cards have, and what to do about it.
//!
//! [`Gpus::gather`] asks and decides nothing, and opens no card; [`findings`] judges and asks nothing.

use super::{Facts, Finding, Libtorch, State, finding};
use crate::card::cuda::{self, CudaCard, Physical, Slice, Visible, visible};
use crate::cli::worker;
use crate::metrics::nvml::{self, Driver, Gpu};
use crate::units;
use serde::Serialize;

/// What there is to compute on.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Gpus {
    /// CUDA's own driver library.
    pub(super) cuda: Cuda,
    /// `CUDA_DEVICE_ORDER`, if set.
    pub(super) device_order: Option<String>,
    /// How `CUDA_VISIBLE_DEVICES` is read; `None` without NVML, which knows all cards there are.
    pub(super) visible: Option<Visible>,
    /// Whether the card of a row can read the memory of that of a column, by `cuda:i`.
    pub(super) peers: Vec<Vec<Option<bool>>>,
    /// The way between cards as `nvidia-smi topo -m` names it, by `cuda:i`; `None` without NVML.
    pub(super) links: Option<Vec<Vec<Option<String>>>>,
    /// NUMA node of each, by `cuda:i`.
    pub(super) numa_nodes: Vec<Option<i32>>,
    /// CPU cores near each, as the kernel lists them: `0-15,32-47`.
    pub(super) near_cores: Vec<Option<String>>,
    /// NCCL's version, or why it cannot be loaded; `None` where nothing would use it.
    pub(super) nccl: Option<Result<String, String>>,
}

/// CUDA's driver library, as it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(super) enum Cuda {
    /// There is none.
    #[default]
    Missing,
    /// It is there, and fails.
    Broken {
        /// In its own words.
        error: String,
        /// Its number for it.
        code: Option<u32>,
        /// What to do about it.
        hint: Option<String>,
    },
    /// It works.
    Present {
        /// Newest CUDA it supports, as in `13.0`.
        version: String,
        /// Whether it is a test's.
        scripted: bool,
        /// Cards it shows, as `cuda:i`.
        cards: Vec<CudaCard>,
    },
}

impl Gpus {
    pub(super) fn gather(driver: &Driver, variable: Option<&str>) -> Self {
        let cuda = match cuda::driver() {
            Ok(driver) => Cuda::Present {
                version: driver.cuda(),
                scripted: driver.scripted,
                cards: driver.cards().to_vec(),
            },
            Err(fault) if fault.is_missing() => Cuda::Missing,
            Err(fault) => Cuda::Broken {
                error: fault.to_string(),
                code: fault.code,
                hint: crate::Error::from(fault).advice().map(str::to_owned),
            },
        };
        let cards = cuda.cards();
        let peers = cuda::driver().map_or_else(
            |_| Vec::new(),
            |driver| {
                let peer = |a, b| if a == b { None } else { driver.can_access_peer(a, b) };
                (0..cards.len()).map(|a| (0..cards.len()).map(|b| peer(a, b)).collect()).collect()
            },
        );
        let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
        Self {
            device_order: std::env::var("CUDA_DEVICE_ORDER").ok(),
            visible: match driver {
                Driver::Present { cards, .. } => Some(visible(variable, &physical(cards))),
                Driver::Missing | Driver::Broken { .. } => None,
            },
            peers,
            links: if uuids.is_empty() { None } else { nvml::links(&uuids) },
            numa_nodes: cards
                .iter()
                .map(|card| of_bus(card, "numa_node")?.parse().ok().filter(|node| *node >= 0))
                .collect(),
            near_cores: cards.iter().map(|card| of_bus(card, "local_cpulist")).collect(),
            nccl: (!cards.is_empty()).then(worker::nccl),
            cuda,
        }
    }
}

impl Cuda {
    fn cards(&self) -> &[CudaCard] {
        match self {
            Self::Present { cards, .. } => cards,
            Self::Missing | Self::Broken { .. } => &[],
        }
    }
}

/// Cards as [`visible`] takes them. NVML's order, which is that of the bus.
fn physical(cards: &[Gpu]) -> Vec<Physical> {
    let slice = |uuid: &String| Slice { uuid: uuid.clone(), instances: None };
    let card = |card: &Gpu| Physical {
        uuid: card.uuid.clone().unwrap_or_default(),
        slices: card.slices.iter().map(slice).collect(),
    };
    cards.iter().map(card).collect()
}

/// What the kernel says of a card's place on the bus.
fn of_bus(card: &CudaCard, file: &str) -> Option<String> {
    let id = card.pci_bus_id.as_ref()?;
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{id}/{file}")).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// What there is to say of a machine with GPUs; nothing on others.
pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let gpus = &facts.gpus;
    if facts.driver == Driver::Missing && gpus.cuda == Cuda::Missing {
        return Vec::new();
    }
    let mut all = vec![library(facts)];
    all.extend(versions(facts));
    all.extend(cards(facts));
    all.extend(links(gpus));
    if let Driver::Present { cards, .. } = &facts.driver {
        all.extend(cards.iter().enumerate().flat_map(|(index, card)| health(index, card)));
    }
    all
}

fn library(facts: &Facts) -> Finding {
    const NAME: &str = "CUDA driver";
    match &facts.gpus.cuda {
        Cuda::Missing => finding(NAME, State::Warning, "libcuda.so.1 is not here, though NVML is")
            .hint("in a container: start it with --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        Cuda::Broken { error, hint, .. } => {
            let found = finding(NAME, State::Warning, error.clone());
            match hint {
                Some(hint) => found.hint(hint.clone()),
                None => found,
            }
        }
        Cuda::Present { scripted: true, .. } => {
            finding(NAME, State::Warning, "a scripted one: cards are played by the host")
                .hint("take the scripted library out of LD_LIBRARY_PATH")
        }
        Cuda::Present { version, cards, .. } => {
            finding(NAME, State::Ok, format!("CUDA {version}, {} visible", cards_in_words(cards.len())))
        }
    }
}

fn cards_in_words(count: usize) -> String {
    format!("{count} card{}", if count == 1 { "" } else { "s" })
}

/// CUDA that libtorch was built for, against what the driver supports.
fn versions(facts: &Facts) -> Option<Finding> {
    let (Libtorch::Loaded { version: Some(version), cuda: true, .. }, Cuda::Present { version: driver, .. }) =
        (&facts.libtorch, &facts.gpus.cuda)
    else {
        return None;
    };
    let built_for = version.split_once("+cu")?.1;
    let wanted: u32 = built_for.parse().ok()?;
    let (major, minor) = driver.split_once('.')?;
    let supported: u32 = major.parse::<u32>().ok()? * 10 + minor.parse::<u32>().ok()?;
    // Within a major version newer runtimes run on older drivers.
    (wanted / 10 > supported / 10).then(|| {
        let text = format!(
            "this libtorch is built for CUDA {}.{}, the driver supports {driver}",
            wanted / 10,
            wanted % 10
        );
        finding("CUDA version", State::Warning, text)
            .hint("update the driver, or run `./setup --torch 2.9.1 --full` and build again")
    })
}

/// Which card is which, and why it is not more.
fn cards(facts: &Facts) -> Vec<Finding> {
    const NAME: &str = "visible";
    let (gpus, shown) = (&facts.gpus, facts.gpus.cuda.cards());
    let all: &[Gpu] = if let Driver::Present { cards, .. } = &facts.driver { cards } else { &[] };
    let mut found: Vec<Finding> = shown
        .iter()
        .map(|card| {
            let place = all.iter().position(|gpu| gpu.uuid.as_deref() == Some(&card.uuid));
            let place = place.map_or_else(|| "not among NVML's".to_owned(), |index| format!("GPU {index}"));
            let memory =
                card.memory_bytes.map(|size| format!(", {}", units::bytes(size))).unwrap_or_default();
            let capability = card.compute_capability.map(|(a, b)| format!(", sm_{a}{b}")).unwrap_or_default();
            let bus = card.pci_bus_id.as_deref().unwrap_or("no bus id");
            let name = card.name.as_deref().unwrap_or("unnamed");
            let text =
                format!("cuda:{} = {place}, {name}{memory}{capability}, {bus}, {}", card.ordinal, card.uuid);
            finding(NAME, State::Ok, text)
        })
        .collect();
    let variable = facts.cuda_visible_devices.as_deref();
    let cut = gpus.visible.as_ref().and_then(|visible| visible.cut.as_ref());
    if let (Some(variable), Some(cut)) = (variable, cut) {
        let text = format!("CUDA_VISIBLE_DEVICES={variable}: {cut}");
        found.push(
            finding(NAME, State::Warning, text)
                .hint("numbers count from 0 in CUDA's order; a UUID's beginning must fit one card only"),
        );
    }
    let hidden = all.len().saturating_sub(shown.len());
    if variable.is_none() && hidden > 0 && matches!(gpus.cuda, Cuda::Present { .. }) {
        let text = format!("CUDA shows {}, NVML {}", cards_in_words(shown.len()), cards_in_words(all.len()));
        found.push(
            finding(NAME, State::Warning, text).hint(
                "cards that are cut into slices, in exclusive use or prohibited are not shown: see below",
            ),
        );
    }
    // Numbers in the variable are CUDA's, which are not the bus's where cards differ.
    let names: Vec<_> = all.iter().map(|card| &card.name).collect();
    let mixed = names.windows(2).any(|pair| pair[0] != pair[1]);
    if mixed && gpus.device_order.as_deref() != Some("PCI_BUS_ID") {
        found.push(
            finding(NAME, State::Warning, "cards differ, and CUDA numbers them by speed, nvidia-smi by bus")
                .hint("set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name cards by UUID"),
        );
    }
    found
}

fn links(gpus: &Gpus) -> Vec<Finding> {
    let count = gpus.cuda.cards().len();
    if count < 2 {
        return Vec::new();
    }
    let mut found = Vec::new();
    if let Some(links) = &gpus.links {
        for (index, row) in links.iter().enumerate() {
            let cells: Vec<String> =
                row.iter().map(|link| format!("{:>4}", link.as_deref().unwrap_or("-"))).collect();
            let numa = gpus.numa_nodes.get(index).copied().flatten();
            let numa = numa.map(|node| format!("  NUMA {node}")).unwrap_or_default();
            let cores = gpus.near_cores.get(index).and_then(Option::as_ref);
            let cores = cores.map(|cores| format!("  cores {cores}")).unwrap_or_default();
            // Columns stay where they are: these blanks are not for breaking lines at.
            let row = format!("cuda:{index} {}{numa}{cores}", cells.join(" ")).replace(' ', "\u{a0}");
            found.push(finding("links", State::Ok, row));
        }
    }
    let unreachable: Vec<String> = gpus
        .peers
        .iter()
        .enumerate()
        .flat_map(|(a, row)| row.iter().enumerate().map(move |(b, peer)| (a, b, *peer)))
        .filter(|(a, b, peer)| a < b && *peer == Some(false))
        .map(|(a, b, _)| format!("{a}-{b}"))
        .collect();
    found.push(if unreachable.is_empty() {
        finding("peer access", State::Ok, "every card reaches every other one's memory")
    } else {
        finding("peer access", State::Warning, format!("not between {}", unreachable.join(", ")))
            .hint("copies between these go through the host; virtual machines and IOMMU (ACS) switch it off")
    });
    found
}

/// What is wrong with a card.
fn health(index: usize, card: &Gpu) -> Vec<Finding> {
    const NAME: &str = "card";
    let mut found = Vec::new();
    let mut warn = |text: String, hint: String| {
        found.push(finding(NAME, State::Warning, format!("GPU {index}: {text}")).hint(hint));
    };
    if card.mig == Some(true) {
        let slices = card.slices.len();
        warn(
            format!(
                "MIG is on, {slices} slice{}; CUDA shows one slice to a process",
                if slices == 1 { "" } else { "s" }
            ),
            "name slices in CUDA_VISIBLE_DEVICES=MIG-..., or switch MIG off: `nvidia-smi -mig 0`".to_owned(),
        );
    }
    if let Some(errors) = card.uncorrected_errors.filter(|errors| *errors > 0) {
        warn(
            format!("{errors} memory errors that could not be corrected"),
            format!("reset it (`nvidia-smi -i {index} -r`); if they come back, it is broken"),
        );
    }
    match card.compute_mode.as_deref() {
        Some("exclusive_process") => warn(
            "exclusive to one process".to_owned(),
            format!("`nvidia-smi -i {index} -c DEFAULT`, unless it is meant so"),
        ),
        Some("prohibited") => {
            warn("computing is prohibited".to_owned(), format!("`nvidia-smi -i {index} -c DEFAULT`"))
        }
        _ => {}
    }
    let hot = ["hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"];
    if let Some(reasons) =
        card.throttle.as_ref().filter(|reasons| hot.iter().any(|hot| reasons.contains(hot)))
    {
        warn(format!("slowed down now: {reasons}"), "check cooling and power supply".to_owned());
    }
    if card.persistence == Some(false) {
        warn(
            "persistence mode is off: the driver is loaded anew for every run".to_owned(),
            format!("`sudo nvidia-smi -i {index} -pm 1`"),
        );
    }
    if card.ecc == Some(false) {
        warn("ECC is off".to_owned(), "fine for measuring; for real work `nvidia-smi -e 1`".to_owned());
    }
    if let Some(processes) = card.processes.as_ref().filter(|processes| !processes.is_empty()) {
        let used: u64 = processes.iter().filter_map(|(_, bytes)| *bytes).sum();
        let who: Vec<String> = processes.iter().map(|(pid, _)| pid.to_string()).collect();
        warn(
            format!("{} of it used by other processes ({})", units::bytes(used), who.join(", ")),
            "times measured beside them mean little: stop them, or choose other cards with --devices"
                .to_owned(),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_healthy_card_is_not_mentioned_and_each_fault_has_its_fix() {
        let healthy = Gpu {
            ecc: Some(true),
            uncorrected_errors: Some(0),
            persistence: Some(true),
            compute_mode: Some("default".into()),
            throttle: Some("sw_power_cap".into()),
            processes: Some(Vec::new()),
            ..Gpu::default()
        };
        assert_eq!(health(0, &healthy), []);
        assert_eq!(health(0, &Gpu::default()), []);
        let sick = Gpu {
            mig: Some(true),
            uncorrected_errors: Some(3),
            persistence: Some(false),
            compute_mode: Some("prohibited".into()),
            throttle: Some("sw_power_cap|hw_thermal".into()),
            processes: Some(vec![(7, Some(1 << 30))]),
            ..healthy
        };
        let found = health(2, &sick);
        assert_eq!(found.len(), 6);
        assert!(found.iter().all(|finding| finding.state == State::Warning && finding.hint.is_some()));
    }
}
