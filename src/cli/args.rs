//! Arguments as typed. Values stay text here: `config` checks them together with the file's and names
//! flag and key alike.

use clap::{Parser, Subcommand};
use std::path::PathBuf;

const EXIT_STATUSES: &str = "Exit status: 0 done, 1 judged and failed, 2 could not run or could not judge.";

/// DataParallel and DistributedDataParallel side by side on one model, measured.
#[derive(Debug, Parser)]
#[command(name = "dp-vs-ddp", version, after_help = EXIT_STATUSES, max_term_width = 100)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Measure the engines round by round on the same samples, and write a report
    #[command(after_help = EXIT_STATUSES)]
    Compare(CompareArgs),
    /// Train with one engine and test after each epoch
    #[command(after_help = EXIT_STATUSES)]
    Train(TrainArgs),
    /// Rebuild every page and chart of a run from its raw records
    #[command(
        after_help = "Exit status: 0 written, 2 the records cannot be read or the pages not be written."
    )]
    Report(ReportArgs),
    /// Say what this machine has, what is missing, and what to do about it
    #[command(after_help = "Exit status: 0 `compare` can run here, 2 it cannot.")]
    Doctor(DoctorArgs),
    /// Make the classic mistakes of data-parallel training, small, and measure what they do
    #[command(
        after_help = "Exit status: 0 every pitfall was shown as described, 1 one was not, 2 could not run."
    )]
    Pitfalls(PitfallsArgs),
    /// One rank, started by a launcher
    #[command(hide = true)]
    Worker(WorkerArgs),
}

/// What is run, and on what.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RunFlags {
    /// TOML file, or the name of a built-in one [default: quick, which takes well under a minute on two cores]
    pub(crate) config: Option<String>,

    /// What cards are: `cuda`, `cpu` (virtual cards, sets of cores) or `auto` (CUDA where there is some)
    /// [default: auto]
    #[arg(long, value_name = "KIND")]
    pub(crate) device: Option<String>,

    /// Number of cards [default: all there are; on CPU one a physical core, at most 4, so that each has
    /// cores of its own]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) cards: Option<String>,

    /// CUDA cards to use, by number (of those that CUDA_VISIBLE_DEVICES leaves) or UUID, in this order, as
    /// in `2,0` or `GPU-8932,GPU-17ab` [default: the first --cards of them]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub(crate) devices: Option<String>,

    /// Model: mlp, convnet, resnet18 or gpt [default: the config's, else mlp: heavy weights, light
    /// compute, where the engines differ most]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,

    /// Data: digits, mnist10k, synthetic or tokens [default: the config's, else mnist10k]
    #[arg(long, value_name = "DATA")]
    pub(crate) data: Option<String>,

    /// Global batch: samples that all cards together see in a step [default: 64 a card]
    #[arg(long, value_name = "SAMPLES", allow_negative_numbers = true)]
    pub(crate) batch: Option<String>,

    /// The same said for one card; global = per-card x cards
    #[arg(long, value_name = "SAMPLES", allow_negative_numbers = true)]
    pub(crate) batch_per_card: Option<String>,

    /// Seed of weights, sample order and intervals [default: 0, so that runs can be repeated]
    #[arg(long, value_name = "SEED", allow_negative_numbers = true)]
    pub(crate) seed: Option<String>,

    /// Any other config key, as in `--set optimizer.lr=0.1`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Seconds that workers get to end by themselves before they are killed, when the run is stopped
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) grace: f64,

    /// Print the results as JSON in place of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,

    /// Engines, in the order in which each round runs them [default: single,dp,ddp]
    #[arg(long, value_name = "LIST")]
    pub(crate) engines: Option<String>,

    /// Repetitions of every engine in fresh processes [default: 5, the fewest that give a 95 % interval]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) rounds: Option<String>,

    /// Steps of each round that are not measured: first steps allocate memory and fill caches
    /// [default: 4]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) warmup: Option<String>,

    /// Measured steps of each round [default: 16]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) steps: Option<String>,

    /// Run PyTorch's own engines beside ours, in the same rounds and the same report: `torch` (needs
    /// `./setup --peers`) [default: none]
    #[arg(long, value_name = "WHOSE")]
    pub(crate) peers: Option<String>,

    /// Measure what options cost: rows of their own beside their engine's, as in
    /// `--ab ddp.comm_hook=bf16`; several options of one row with blanks between; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) ab: Vec<String>,

    /// Folder that holds runs
    #[arg(long, value_name = "DIR", default_value = "reports/runs")]
    pub(crate) out: PathBuf,

    /// Name of this run's folder; must not exist yet [default: the time and a random ending]
    #[arg(long, value_name = "NAME")]
    pub(crate) run_id: Option<String>,

    /// Start every engine from the weights of this safetensors file [default: drawn from the seed]
    #[arg(long, value_name = "FILE")]
    pub(crate) init: Option<PathBuf>,

    /// Leave the initial weights, each engine's gradients of the first step (`ENGINE.gradients`) and its
    /// final weights (after the last round) in the run folder's weights/, so that other tools can check
    /// them
    #[arg(long)]
    pub(crate) save_weights: bool,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,

    /// Engine: single, dp or ddp
    #[arg(long, value_name = "ENGINE")]
    pub(crate) engine: String,

    /// Passes over the training data, each followed by a test; after `--load`, so many more
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) epochs: u64,

    /// Write the weights to this safetensors file after each epoch, and beside them FILE.resume, from
    /// which `--load FILE` goes on
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,

    /// Start from the weights of this safetensors file; where FILE.resume lies beside it, go on with that
    /// training [default: weights drawn from the seed]
    #[arg(long, value_name = "FILE")]
    pub(crate) load: Option<PathBuf>,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct ReportArgs {
    /// Folder of the run: it holds results.json, steps.csv and samples.csv
    pub(crate) run_dir: PathBuf,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct PitfallsArgs {
    /// Print the results as JSON in place of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Print the facts and findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `worker --job` is what `compare` and `train` start. Without it, a rank that something else started:
/// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or DPVSDDP_STORE=file:PATH on one host.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,

    /// Read the job from standard input
    #[arg(long)]
    pub(crate) job: bool,

    /// Which process of this host; some launchers pass it in place of LOCAL_RANK
    #[arg(long, value_name = "N", alias = "local_rank")]
    pub(crate) local_rank: Option<usize>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0 to 3600".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn launchers_may_spell_local_rank_either_way_and_nothing_else() {
        for spelling in ["--local-rank=1", "--local_rank=1"] {
            let args = Args::try_parse_from(["dp-vs-ddp", "worker", spelling]).unwrap();
            let Verb::Worker(args) = args.verb else { panic!("not a worker") };
            assert_eq!(args.local_rank, Some(1));
        }
        assert!(Args::try_parse_from(["dp-vs-ddp", "worker", "--local-rnk=1"]).is_err());
        assert!(Args::try_parse_from(["dp-vs-ddp", "compare", "--local-rank=1"]).is_err());
    }

    #[test]
    fn negative_numbers_are_values_so_that_config_can_name_the_key() {
        let args = Args::try_parse_from(["dp-vs-ddp", "compare", "--cards", "-1"]).unwrap();
        let Verb::Compare(args) = args.verb else { panic!("not a comparison") };
        assert_eq!(args.run.cards.as_deref(), Some("-1"));
    }
}
