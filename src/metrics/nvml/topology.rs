//! How cards are linked: what `nvidia-smi topo -m` shows.

use super::library;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::{Device, Nvml};

/// For each pair of these cards, the way between them as `nvidia-smi topo -m` names it: `X` for a card and itself,
/// `NV4` for four NVLinks, `PIX`, `PXB`, `PHB`, `NODE` or `SYS` for what PCIe has to pass; `None` where NVML does
/// not say. `None` altogether without NVML.
pub fn links(uuids: &[&str]) -> Option<Vec<Vec<Option<String>>>> {
    let nvml = library::open().ok()?;
    let devices: Vec<Option<Device<'_>>> = uuids.iter().map(|uuid| nvml.device_by_uuid(*uuid).ok()).collect();
    let between = |a: usize, b: usize| match (a == b, &devices[a], &devices[b]) {
        (true, ..) => Some("X".to_owned()),
        (_, Some(a), Some(b)) => link(nvml, a, b),
        _ => None,
    };
    Some((0..uuids.len()).map(|a| (0..uuids.len()).map(|b| between(a, b)).collect()).collect())
}

fn link(nvml: &Nvml, a: &Device<'_>, b: &Device<'_>) -> Option<String> {
    /// More than any card has.
    const LINKS: u32 = 36;
    let there = b.pci_info().ok().map(|info| info.bus_id.to_ascii_lowercase());
    let direct = (0..LINKS)
        .map(|number| a.link_wrapper_for(number))
        .filter(|link| link.is_active().unwrap_or(false))
        .filter(|link| {
            let other = link.remote_pci_info().ok().map(|info| info.bus_id.to_ascii_lowercase());
            other.is_some() && other == there
        })
        .count();
    if direct > 0 {
        return Some(format!("NV{direct}"));
    }
    // Taken by value: asked for once more.
    let other = nvml.device_by_uuid(b.uuid().ok()?).ok()?;
    let name = match a.topology_common_ancestor(other).ok()? {
        TopologyLevel::Internal => "PSB",
        TopologyLevel::Single => "PIX",
        TopologyLevel::Multiple => "PXB",
        TopologyLevel::HostBridge => "PHB",
        TopologyLevel::Node => "NODE",
        TopologyLevel::System => "SYS",
    };
    Some(name.to_owned())
}
