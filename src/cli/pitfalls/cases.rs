//! The mistakes, one function each: made with the real engines, beside the same thing done right.
//!
//! Every number that is told was measured in this run, and `shown` compares what was measured.

use super::Pitfall;
use super::trial::{DEADLINE, Digits, Trainee, distance, flat, outcomes, perceptron, ranks};
use crate::card::{Cores, available_cores, pin_current_thread};
use crate::comm::Collective;
use crate::config::ModelPlan;
use crate::data::{Batch, Cut, DistributedSampler, Loader, Part};
use crate::ddp::{DistributedDataParallel, Module, Options};
use crate::error::{Error, Kind, Result};
use crate::model::{self, State};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tch::{Device, Tensor};

/// Samples of a rank's batch.
const PER_CARD: usize = 32;

/// A learning rate that suits it.
const LR: f64 = 0.1;

const CASES: [fn(&Digits) -> Result<Pitfall>; 10] = [
    no_set_epoch,
    no_distributed_sampler,
    batch_and_learning_rate,
    blind_module_stripping,
    unused_parameters,
    two_ranks_on_one_card,
    saving_from_every_rank,
    no_weight_broadcast,
    loss_times_world_size,
    padding_in_evaluation,
];

/// All of them, each run when it is asked for.
pub(super) fn all() -> Result<impl Iterator<Item = Result<Pitfall>>> {
    let digits = Digits::open()?;
    Ok(CASES.into_iter().map(move |case| case(&digits)))
}

fn no_set_epoch(digits: &Digits) -> Result<Pitfall> {
    let fresh = || digits.loader(2, Cut::PerRank(PER_CARD), Part::Rank(0));
    let epoch = |loader: &mut Loader| -> Result<Vec<Batch>> {
        (0..loader.steps_per_epoch()).map(|_| loader.next()).collect()
    };
    let alike = |left: &[Batch], right: &[Batch]| -> Result<usize> {
        let mut count = 0;
        for (left, right) in left.iter().zip(right) {
            count += usize::from(left.input.f_equal(&right.input)?);
        }
        Ok(count)
    };
    let mut loader = fresh()?;
    let first = epoch(&mut loader)?;
    let second = epoch(&mut loader)?;
    // A loader that is not told which epoch it is begins with epoch 0.
    let again = epoch(&mut fresh()?)?;
    let (right, wrong, batches) = (alike(&first, &second)?, alike(&first, &again)?, first.len());
    Ok(Pitfall {
        name: "no_set_epoch",
        expected: format!("a new order: {right} of {batches} batches of epoch 2 as in epoch 1"),
        seen: format!("the old order: {wrong} of {batches} batches of epoch 2 as in epoch 1"),
        explanation: "The order is drawn from seed + epoch: call set_epoch before every epoch.",
        shown: right == 0 && wrong == batches,
    })
}

/// What an epoch showed to ranks, and what became of the weights.
struct Epoch {
    samples: usize,
    /// Samples that more than one rank saw.
    shared: usize,
    steps: usize,
    digest: String,
}

fn no_distributed_sampler(digits: &Digits) -> Result<Pitfall> {
    // `shards` is what the loader believes the number of ranks to be.
    let epoch = |world_size: usize, shards: usize| -> Result<Epoch> {
        let all = ranks(world_size, |rank, collective| {
            let mut loader = digits.loader(shards, Cut::PerRank(PER_CARD), Part::Rank(rank % shards))?;
            let mut trainee = Trainee::new(perceptron(64, 0)?, collective, Options::default(), LR)?;
            let mut rows = BTreeSet::new();
            let steps = loader.steps_per_epoch();
            for _ in 0..steps {
                let batch = loader.next()?;
                trainee.step(&batch, 1.0)?;
                rows.extend(rows_of(&batch)?);
            }
            Ok((rows, steps, trainee.state().digest()?))
        })?;
        let samples = all.iter().map(|(rows, ..)| rows.len()).sum();
        let distinct = all.iter().flat_map(|(rows, ..)| rows).collect::<BTreeSet<_>>().len();
        let (_, steps, digest) = &all[0];
        Ok(Epoch { samples, shared: samples - distinct, steps: *steps, digest: digest.clone() })
    };
    let (right, wrong, alone) = (epoch(2, 2)?, epoch(2, 1)?, epoch(1, 1)?);
    let same = wrong.digest == alone.digest;
    let told = |epoch: &Epoch| {
        let Epoch { samples, shared, steps, .. } = epoch;
        format!("{samples} samples in {steps} steps, {shared} on both ranks")
    };
    Ok(Pitfall {
        name: "no_distributed_sampler",
        expected: told(&right),
        seen: format!("{}{}", told(&wrong), if same { "; weights as of 1 card" } else { "" }),
        explanation: "Every rank repeats the others' work; shard the data with DistributedSampler.",
        shown: right.shared == 0
            && 2 * wrong.shared == wrong.samples
            && wrong.steps == alone.steps
            && same
            && right.digest != alone.digest,
    })
}

/// Each row as the bits of its values: digits has no image twice.
fn rows_of(batch: &Batch) -> Result<Vec<Vec<u32>>> {
    let width = batch.input.size().get(1).map_or(1, |width| *width as usize);
    let values = Vec::<f32>::try_from(batch.input.f_reshape([-1])?)?;
    Ok(values.chunks(width).map(|row| row.iter().map(|value| value.to_bits()).collect()).collect())
}

fn batch_and_learning_rate(digits: &Digits) -> Result<Pitfall> {
    const CARDS: usize = 4;
    const SAMPLES: usize = 16 * 1536;
    let everything: Vec<usize> = (0..digits.test.len()).collect();
    let loss = |cards: usize, per_card: usize, lr: f64| -> Result<f64> {
        let losses = ranks(cards, |rank, collective| {
            let mut loader = digits.loader(cards, Cut::Global(cards * per_card), Part::Rank(rank))?;
            let mut trainee = Trainee::new(perceptron(64, 0)?, collective, Options::default(), lr)?;
            trainee.steps(SAMPLES / (cards * per_card), &mut loader)?;
            let (output, target) = trainee.predict(&digits.test, &everything)?;
            Ok(model::loss(&output, &target)?.f_double_value(&[])?)
        })?;
        Ok(losses[0])
    };
    let alone = loss(1, PER_CARD, LR)?;
    let fixed = loss(CARDS, PER_CARD / CARDS, LR)?;
    let grown = loss(CARDS, PER_CARD, LR)?;
    let scaled = loss(CARDS, PER_CARD, LR * CARDS as f64)?;
    Ok(Pitfall {
        name: "batch_and_learning_rate",
        expected: format!(
            "1 card x {PER_CARD}: loss {alone:.3}; {CARDS} cards x {}: {fixed:.3}",
            PER_CARD / CARDS
        ),
        seen: format!(
            "{CARDS} cards x {PER_CARD}: loss {grown:.3} at the same lr, {scaled:.3} at lr x {CARDS}"
        ),
        explanation: "global = per-card x cards: keep the global batch, or scale the learning rate.",
        shown: (fixed / alone - 1.0).abs() < 1e-3
            && grown > 1.25 * alone
            && (scaled - alone).abs() < 0.5 * (grown - alone),
    })
}

fn blind_module_stripping(_: &Digits) -> Result<Pitfall> {
    let names = ["encoder.module.weight", "submodule.bias"];
    let state = |names: &[String]| {
        let mut state = State::default();
        for (value, name) in names.iter().enumerate() {
            // The handle that comes back is one more of the same tensor.
            let _ = state.parameter(name.as_str(), Tensor::f_from_slice(&[value as f32])?);
        }
        Ok::<_, Error>(state)
    };
    let own = state(&names.map(str::to_owned))?;
    let wrapped = state(&names.map(|name| format!("module.{name}")))?;
    let folder = temporary_folder()?;
    let file = folder.path().join("wrapped.safetensors");
    wrapped.save(&file)?;
    own.load(&file)?;
    let loaded = own.entries().len();
    let blind: Vec<(String, Tensor)> = wrapped
        .named_tensors()
        .into_iter()
        .map(|(name, tensor)| (name.replace("module.", ""), tensor))
        .collect();
    let kept = blind.iter().filter(|(name, _)| names.contains(&name.as_str())).count();
    let refused = own.copy_from(&blind).is_err();
    let made = blind.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    Ok(Pitfall {
        name: "blind_module_stripping",
        expected: format!("{loaded} of {} keys: `{}`, `{}`", names.len(), names[0], names[1]),
        seen: format!("{kept} of {} keys: {made}", names.len()),
        explanation: "A text replace also eats names inside: cut one leading `module.`, no more.",
        shown: kept == 0 && refused,
    })
}

/// A trunk, and a side branch that nothing uses.
struct Branched(Vec<(String, Tensor)>);

impl Branched {
    fn new() -> Result<Self> {
        let parameter = |name: &str| {
            let ones = Tensor::f_ones([4], (tch::Kind::Float, Device::Cpu))?;
            Ok((name.to_owned(), ones.f_set_requires_grad(true)?))
        };
        ["trunk", "side.weight", "side.bias"].into_iter().map(parameter).collect::<Result<_>>().map(Self)
    }

    fn loss(&self) -> Result<Tensor> {
        Ok(self.0[0].1.f_square()?.f_sum(tch::Kind::Float)?)
    }
}

impl Module for Branched {
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }
}

fn unused_parameters(_: &Digits) -> Result<Pitfall> {
    const STEPS: usize = 3;
    let train = |find_unused_parameters: bool| {
        outcomes(2, |_, collective| {
            let options = Options { find_unused_parameters, ..Options::default() };
            let mut ddp = DistributedDataParallel::new(Branched::new()?, collective, options)?;
            for _ in 0..STEPS {
                let loss = ddp.forward(Branched::loss)?;
                ddp.backward(&loss)?;
            }
            Ok(STEPS)
        })
    };
    let right = train(true)?.into_iter().collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    let wrong = train(false)?;
    let took = start.elapsed();
    let messages: Vec<String> = wrong.into_iter().filter_map(|rank| Some(rank.err()?.to_string())).collect();
    let named = ["`side.weight`", "`side.bias`"];
    let all_name = messages.iter().all(|message| named.iter().all(|name| message.contains(name)));
    Ok(Pitfall {
        name: "unused_parameters",
        expected: format!("{} steps with find_unused_parameters", right[0]),
        seen: format!(
            "{} of 2 ranks fail in {} ms{}",
            messages.len(),
            took.as_millis(),
            if all_name { format!(", naming {}", named.join(", ")) } else { String::new() }
        ),
        explanation: "Ranks would wait for gradients that never come: an error here, not a hang.",
        shown: messages.len() == 2 && all_name && took < DEADLINE / 4,
    })
}

fn two_ranks_on_one_card(digits: &Digits) -> Result<Pitfall> {
    const STEPS: usize = 40;
    const REPEATS: usize = 3;
    let cores = available_cores()?.0;
    let throughput = |world_size: usize| -> Result<f64> {
        let times = ranks(world_size, |rank, collective| {
            pin_current_thread(&Cores(vec![cores[0]]))?;
            let mut loader = digits.loader(world_size, Cut::PerRank(PER_CARD), Part::Rank(rank))?;
            let mut trainee = Trainee::new(perceptron(512, 0)?, collective, Options::default(), LR)?;
            // The second step plans buckets anew.
            trainee.steps(3, &mut loader)?;
            let start = cpu_seconds();
            trainee.steps(STEPS, &mut loader)?;
            Ok(cpu_seconds() - start)
        })?;
        let slowest = times.into_iter().fold(0.0, f64::max);
        Ok((world_size * PER_CARD * STEPS) as f64 / slowest)
    };
    let (mut one, mut two) = (0.0f64, 0.0f64);
    for _ in 0..REPEATS {
        // In turns, and the best of each: other work in the same caches only ever slows down.
        one = one.max(throughput(1)?);
        two = two.max(throughput(2)?);
    }
    Ok(Pitfall {
        name: "two_ranks_on_one_card",
        expected: format!("2 ranks do 2 x the {one:.0} samples of 1 rank in 1 s"),
        seen: format!("they do {two:.0} samples in 1 s of their 1 core: {:.2} x", two / one),
        explanation: "They take turns on it, with a replica each: give each its LOCAL_RANK's card.",
        shown: two < 1.4 * one,
    })
}

/// Time on a core that this process has had. All its threads are on one core, so this is how long that
/// core worked for them, however much else it has to do.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// What came of many ranks' weights in one file.
struct Saving {
    reads: usize,
    torn: usize,
}

fn saving_from_every_rank(digits: &Digits) -> Result<Pitfall> {
    const RANKS: usize = 4;
    const WATCHED: Duration = Duration::from_millis(300);
    const LIMIT: Duration = Duration::from_secs(5);
    let norms = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    let files = ranks(RANKS, |rank, collective| {
        let mut loader = digits.loader(RANKS, Cut::PerRank(8), Part::Rank(rank))?;
        let options = Options { broadcast_buffers: false, ..Options::default() };
        let mut trainee = Trainee::new(model::build(&norms, Device::Cpu, 0)?, collective, options, LR)?;
        for _ in 0..2 {
            let mut batch = loader.next()?;
            batch.input = batch.input.f_view([-1, 1, 8, 8])?;
            trainee.step(&batch, 1.0)?;
        }
        trainee.state().to_safetensors(&[])
    })?;
    let distinct = files.iter().collect::<BTreeSet<_>>().len();
    let folder = temporary_folder()?;
    let path = folder.path().join("weights.safetensors");
    let reader = model::build(&norms, Device::Cpu, 0)?;
    reader.state().save(&path)?;
    // Reads while the writers write: for a while, and up to the limit as long as no read was torn.
    let watch = |limit: Duration, write: &(dyn Fn(usize) -> Result<()> + Sync), writers: usize| {
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<Saving> {
            let threads: Vec<_> = (0..writers)
                .map(|rank| {
                    let ended = &ended;
                    scope.spawn(move || {
                        while !ended.load(Relaxed) {
                            write(rank)?;
                        }
                        Ok::<_, Error>(())
                    })
                })
                .collect();
            let start = Instant::now();
            let mut saving = Saving { reads: 0, torn: 0 };
            while start.elapsed() < WATCHED || (saving.torn == 0 && start.elapsed() < limit) {
                saving.reads += 1;
                saving.torn += usize::from(reader.state().load(&path).is_err());
            }
            ended.store(true, Relaxed);
            for thread in threads {
                thread.join().unwrap_or_else(|_| Err(Error::new(Kind::Io, "a writer panicked")))?;
            }
            Ok(saving)
        })
    };
    let in_place = |rank: usize| write_in_place(&path, &files[rank]);
    let wrong = watch(LIMIT, &in_place, RANKS)?;
    let whole = |_: usize| model::build(&norms, Device::Cpu, 0)?.state().save(&path);
    let right = watch(WATCHED, &whole, 1)?;
    Ok(Pitfall {
        name: "saving_from_every_rank",
        expected: format!("rank 0 alone writes, then renames: {} of {} reads torn", right.torn, right.reads),
        seen: format!(
            "{RANKS} ranks write {distinct} different files to 1 place: {:.1} % of reads torn",
            100.0 * wrong.torn as f64 / wrong.reads as f64
        ),
        explanation: "Buffers differ by rank and the last writer wins: save on rank 0, then rename.",
        shown: distinct == RANKS && wrong.torn > 0 && right.torn == 0 && right.reads > 1,
    })
}

/// As most scripts save: the file is emptied first, and then filled.
fn write_in_place(path: &Path, contents: &[u8]) -> Result<()> {
    std::fs::write(path, contents).map_err(|source| Error::io("cannot write", path, source))
}

fn temporary_folder() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|source| {
        Error::new(Kind::Io, format!("cannot make a temporary folder: {source}"))
            .hint("set TMPDIR to a folder that can be written to")
    })
}

fn no_weight_broadcast(digits: &Digits) -> Result<Pitfall> {
    const RANKS: usize = 4;
    const STEPS: usize = 5;
    let digests = |init_sync: bool| -> Result<usize> {
        let all = ranks(RANKS, |rank, collective| {
            let mut loader = digits.loader(RANKS, Cut::PerRank(PER_CARD), Part::Rank(rank))?;
            let options = Options { init_sync, ..Options::default() };
            let mut trainee = Trainee::new(perceptron(64, rank as u64)?, collective, options, LR)?;
            trainee.steps(STEPS, &mut loader)?;
            trainee.state().digest()
        })?;
        Ok(all.into_iter().collect::<BTreeSet<_>>().len())
    };
    let (right, wrong) = (digests(true)?, digests(false)?);
    let told = |models: usize| {
        format!("{models} model{} on {RANKS} ranks after {STEPS} steps", if models == 1 { "" } else { "s" })
    };
    Ok(Pitfall {
        name: "no_weight_broadcast",
        expected: told(right),
        seen: format!("{}, and no error", told(wrong)),
        explanation: "Equal gradients keep unequal weights apart: start from rank 0's weights.",
        shown: right == 1 && wrong == RANKS,
    })
}

fn loss_times_world_size(digits: &Digits) -> Result<Pitfall> {
    const RANKS: usize = 4;
    // One step from the same weights on the same global batch, by however many ranks.
    let step = |world_size: usize, factor: f64| -> Result<f64> {
        let lengths = ranks(world_size, |rank, collective| {
            let per_card = RANKS * PER_CARD / world_size;
            let mut loader =
                digits.loader(world_size, Cut::Global(world_size * per_card), Part::Rank(rank))?;
            let mut trainee = Trainee::new(perceptron(64, 0)?, collective, Options::default(), LR)?;
            let start = flat(trainee.state())?;
            trainee.step(&loader.next()?, factor)?;
            distance(&flat(trainee.state())?, &start)
        })?;
        Ok(lengths[0])
    };
    let alone = step(1, 1.0)?;
    let (right, wrong) = (step(RANKS, 1.0)? / alone, step(RANKS, RANKS as f64)? / alone);
    Ok(Pitfall {
        name: "loss_times_world_size",
        expected: format!("{RANKS} ranks step {right:.2} x as far as 1 card on the same batch"),
        seen: format!("with the loss times {RANKS} they step {wrong:.2} x as far"),
        explanation: "Gradients are averaged over ranks already: leave the loss as it is.",
        shown: (right - 1.0).abs() < 1e-3 && (wrong / RANKS as f64 - 1.0).abs() < 1e-3,
    })
}

fn padding_in_evaluation(digits: &Digits) -> Result<Pitfall> {
    const RANKS: usize = 8;
    let samples = digits.test.len();
    let mut loader = digits.loader(1, Cut::PerRank(PER_CARD), Part::Whole)?;
    let mut trainee = Trainee::new(perceptron(64, 0)?, alone(), Options::default(), LR)?;
    trainee.steps(400, &mut loader)?;
    let count = |rows: &[usize]| -> Result<(u64, u64)> {
        let (output, target) = trainee.predict(&digits.test, rows)?;
        model::correct(&output, &target)
    };
    let sampler =
        DistributedSampler { samples, world_size: RANKS, shuffle: false, drop_last: false, seed: 0 };
    let mut padded = (0, 0);
    let mut unique = (0, 0);
    let mut seen = BTreeSet::new();
    for rank in 0..RANKS {
        let rows = sampler.indices(rank, 0);
        let (correct, total) = count(&rows)?;
        padded = (padded.0 + correct, padded.1 + total);
        let new: Vec<usize> = rows.into_iter().filter(|row| seen.insert(*row)).collect();
        let (correct, total) = count(&new)?;
        unique = (unique.0 + correct, unique.1 + total);
    }
    let whole = count(&(0..samples).collect::<Vec<_>>())?;
    let told = |(correct, total): (u64, u64)| {
        format!("{correct} of {total} right: {:.2} %", 100.0 * correct as f64 / total as f64)
    };
    Ok(Pitfall {
        name: "padding_in_evaluation",
        expected: told(unique),
        seen: format!("{}, {} counted twice", told(padded), padded.1 - unique.1),
        explanation: "DistributedSampler repeats samples so that ranks match: count each once.",
        shown: unique == whole
            && padded.1 == (samples + sampler.repeated()) as u64
            && padded.0 * unique.1 != unique.0 * padded.1,
    })
}

fn alone() -> Box<dyn Collective> {
    Box::new(crate::comm::Local::new())
}
