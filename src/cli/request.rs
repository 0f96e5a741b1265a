//! Arguments as resolved: the plan, the cards it runs on, and what the reader should know about them.
//! Decided in full before a file is written or a process started.

use super::args::RunFlags;
use super::gpu::{self, Found};
use super::worker;
use crate::card::{Topology, VirtualCard, virtual_cards};
use crate::config::{BUILTIN, DeviceChoice, EngineKind, Machine, Overrides, Plan, Uneven, builtin, resolve};
use crate::error::{Error, Kind, Result};
use crate::metrics::record::{CardInfo, CardKind, Warning};
use crate::metrics::stats::{Resource, Unbalanced, unbalanced};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest config that is read.
const MOST_CONFIG_BYTES: u64 = 1 << 20;

/// The config that is meant when none is named.
const DEFAULT_CONFIG: &str = "quick";

/// A run, decided.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) plan: Plan,
    pub(crate) cards: Vec<CardInfo>,
    pub(crate) warnings: Vec<Warning>,
    source: Source,
}

/// What it was decided from.
#[derive(Debug)]
struct Source {
    name: String,
    text: String,
    overrides: Overrides,
    machine: Machine,
    uneven: Uneven,
}

impl Request {
    /// The same plan with these `key=value` in place of what it says about their keys.
    pub(crate) fn plan_with(&self, options: &[String]) -> Result<Plan> {
        let Source { name, text, overrides, machine, uneven } = &self.source;
        let mut plan = resolve(name, text, &overrides.with(options)?, *machine, *uneven)?;
        plan.run.device = self.plan.run.device;
        plan.run.engines.clone_from(&self.plan.run.engines);
        Ok(plan)
    }
}

/// The flags that all runs share, as overrides of the config.
pub(crate) fn overrides(flags: &RunFlags) -> Result<Overrides> {
    let mut overrides = Overrides::default();
    overrides
        .flag("--device", "run.device", flags.device.as_ref())
        .flag("--cards", "run.cards", flags.cards.as_ref())
        .flag("--devices", "run.devices", flags.devices.as_ref())
        .flag("--model", "model.name", flags.model.as_ref())
        .flag("--data", "data.name", flags.data.as_ref())
        .flag("--batch", "batch.global", flags.batch.as_ref())
        .flag("--batch-per-card", "batch.per_card", flags.batch_per_card.as_ref())
        .flag("--seed", "run.seed", flags.seed.as_ref());
    for pair in &flags.set {
        overrides.set(pair)?;
    }
    Ok(overrides)
}

/// Decides a run on this machine.
pub(crate) fn decide(config: Option<&str>, overrides: &Overrides, uneven: Uneven) -> Result<Request> {
    let (name, text) = read_config(config.unwrap_or(DEFAULT_CONFIG))?;
    let topology = Topology::of_this_process()?;
    // Fewer than the cores there are where a container's quota allows less time than all of them have.
    let quota = std::thread::available_parallelism().map_or(usize::MAX, |threads| threads.get());
    let cores = topology.physical_cores().min(quota);
    let mut machine = Machine { cards: topology.default_cards().min(quota), cores };
    let mut plan = resolve(&name, &text, overrides, machine, uneven)?;
    if plan.sample.require_nvml {
        gpu::require_nvml()?;
    }
    let Found { cuda, mut warnings } = gpu::find(plan.run.device, worker::cuda_half())?;
    plan.run.device = DeviceChoice::Cpu;
    let cards = match cuda {
        Some(found) => {
            machine.cards = found.len();
            // Once more: how many cards there are decides what was left to the machine.
            plan = resolve(&name, &text, overrides, machine, uneven)?;
            plan.run.device = DeviceChoice::Cuda;
            gpu::choose(&found, plan.run.devices.as_deref(), plan.run.cards)?
        }
        None => {
            if let Some(devices) = &plan.run.devices {
                return Err(Error::usage(format!(
                    "`run.devices` is \"{}\", but this run is on virtual cards",
                    devices.join(",")
                ))
                .hint("leave --devices out; `--cards` says how many virtual cards there are"));
            }
            let threads = plan.run.cards.saturating_mul(plan.run.threads_per_card);
            warnings.extend(shared_cores(&plan, threads, cores));
            warnings.extend(without_torch_dp(&mut plan)?);
            warnings.extend(plan.run.tf32.then(|| {
                Warning {
                    code: "tf32_without_cuda".to_owned(),
                    message:
                        "run.tf32 is on, but changes nothing on virtual cards: only CUDA cards have TF32"
                            .to_owned(),
                    hint: None,
                }
            }));
            let of = topology.cores_for(threads);
            virtual_cards(&of, plan.run.cards, plan.run.threads_per_card).iter().map(card_info).collect()
        }
    };
    warnings.extend(unbalanced(&cards).map(cards_unbalanced));
    let source = Source { name, text, overrides: overrides.clone(), machine, uneven };
    Ok(Request { plan, cards, warnings, source })
}

/// PyTorch's `nn.DataParallel` has no CPU form: it is left out where it came along with the other peers,
/// and refused where it was asked for.
fn without_torch_dp(plan: &mut Plan) -> Result<Option<Warning>> {
    let run = &mut plan.run;
    let before = run.engines.len();
    run.engines.retain(|engine| *engine != EngineKind::TorchDp);
    if run.engines.len() == before {
        return Ok(None);
    }
    if run.engines.is_empty() {
        return Err(Error::new(Kind::Unavailable, "torch_dp: PyTorch's nn.DataParallel needs CUDA cards")
            .hint("leave torch_dp out of --engines on virtual cards"));
    }
    Ok(Some(Warning {
        code: "no_torch_dp".to_owned(),
        message: "PyTorch's nn.DataParallel needs CUDA cards: dp has no peer on virtual cards".to_owned(),
        hint: None,
    }))
}

/// `single_per_card` beside `single`, where some engine runs on several cards: what weak scaling is
/// measured against.
pub(crate) fn with_scaling_baseline(engines: &[EngineKind], cards: usize) -> Vec<EngineKind> {
    let wanted = cards > 1
        && engines.contains(&EngineKind::Single)
        && engines.iter().any(|engine| matches!(engine, EngineKind::Dp | EngineKind::Ddp))
        && !engines.contains(&EngineKind::SinglePerCard);
    engines
        .iter()
        .flat_map(|&engine| match engine {
            EngineKind::Single if wanted => vec![engine, EngineKind::SinglePerCard],
            _ => vec![engine],
        })
        .collect()
}

/// A file that can be read, checked now so that no worker stumbles over it later; its path from the root.
pub(crate) fn readable(flag: &str, path: &Path) -> Result<PathBuf> {
    let check = || -> std::io::Result<PathBuf> {
        let file = std::fs::File::open(path)?;
        if file.metadata()?.is_dir() {
            return Err(std::io::ErrorKind::IsADirectory.into());
        }
        path.canonicalize()
    };
    check().map_err(|source| Error::io("cannot read", path, source).context(flag))
}

fn read_config(name: &str) -> Result<(String, String)> {
    if let Some(text) = builtin(name) {
        return Ok((format!("built-in config `{name}`"), text.to_owned()));
    }
    let path = Path::new(name);
    let read = || -> std::io::Result<String> {
        let mut text = String::new();
        let file = std::fs::File::open(path)?;
        if file.take(MOST_CONFIG_BYTES + 1).read_to_string(&mut text)? as u64 > MOST_CONFIG_BYTES {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        Ok(text)
    };
    let known: Vec<&str> = BUILTIN.iter().map(|(name, _)| *name).collect();
    let text = read().map_err(|source| {
        Error::io("cannot read config", path, source)
            .hint(format!("give a TOML file, or one of the built-in configs: {}", known.join(", ")))
    })?;
    Ok((name.to_owned(), text))
}

fn card_info(card: &VirtualCard) -> CardInfo {
    CardInfo {
        index: card.index,
        kind: CardKind::Virtual,
        name: match card.cores.0.len() {
            1 => "virtual card (1 core)".to_owned(),
            cores => format!("virtual card ({cores} cores)"),
        },
        uuid: format!("cores:{}", card.cores),
        memory_bytes: None,
        cores: Some(card.cores.0.clone()),
    }
}

fn shared_cores(plan: &Plan, threads: usize, cores: usize) -> Option<Warning> {
    (threads > cores).then(|| Warning {
        code: "cards_share_cores".to_owned(),
        message: format!(
            "{} virtual cards of {} thread{} share {cores} core{}: they slow each other down, so times and utilisation say little",
            plan.run.cards,
            plan.run.threads_per_card,
            if plan.run.threads_per_card == 1 { "" } else { "s" },
            if cores == 1 { "" } else { "s" },
        ),
        hint: Some(format!("use --cards {} or less for figures", (cores / plan.run.threads_per_card).max(1))),
    })
}

fn cards_unbalanced(found: Unbalanced) -> Warning {
    let Unbalanced { resource, smallest, largest, share } = found;
    let what = match resource {
        Resource::Memory => "memory",
        Resource::Cores => "cores",
    };
    Warning {
        code: "cards_unbalanced".to_owned(),
        message: format!(
            "card {smallest} has {:.0} % of the {what} of card {largest}: the others wait for it, and scaling efficiency means nothing",
            100.0 * share
        ),
        hint: Some(format!("leave card {smallest} out, or give it less under dp with dp.chunk_weights")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineKind::*;

    #[test]
    fn weak_scaling_gets_its_baseline_only_where_something_scales() {
        assert_eq!(with_scaling_baseline(&[Single, Dp, Ddp], 2), [Single, SinglePerCard, Dp, Ddp]);
        assert_eq!(with_scaling_baseline(&[Ddp, Single], 4), [Ddp, Single, SinglePerCard]);
        assert_eq!(with_scaling_baseline(&[Single, Dp, Ddp], 1), [Single, Dp, Ddp]);
        assert_eq!(with_scaling_baseline(&[Dp, Ddp], 2), [Dp, Ddp]);
        assert_eq!(with_scaling_baseline(&[Single], 2), [Single]);
    }

    // Field case 016.
    #[test]
    fn a_smaller_card_is_warned_of_by_name() {
        let found = Unbalanced { resource: Resource::Memory, smallest: 0, largest: 1, share: 0.6 };
        let warning = cards_unbalanced(found);
        assert_eq!(warning.code, "cards_unbalanced");
        assert!(
            warning.message.starts_with("card 0 has 60 % of the memory of card 1: "),
            "{}",
            warning.message
        );
        assert!(warning.hint.unwrap().contains("dp.chunk_weights"));
    }

    #[test]
    fn an_endless_config_is_refused() {
        let error = read_config("/dev/zero").unwrap_err();
        assert!(error.to_string().starts_with("cannot read config `/dev/zero`"), "{error}");
    }

    #[test]
    fn a_missing_config_names_the_ones_there_are() {
        let error = read_config("nonsense").unwrap_err();
        assert!(error.to_string().starts_with("cannot read config `nonsense`"), "{error}");
        assert!(error.advice().unwrap().contains("quick"));
    }
}
