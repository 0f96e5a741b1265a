//! Ranks as real processes: this test binary starts itself again, once a rank.
//!
//! A child is this binary running the test `child_rank` alone, told what to do by environment variables.
#![cfg(feature = "engines")]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use dp_vs_ddp::comm::{Collective, Member, Rendezvous, Shm};
use dp_vs_ddp::ddp::{DistributedDataParallel, Module, Options};
use dp_vs_ddp::{Error, Result, error};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

const PATIENCE: Duration = Duration::from_secs(60);

/// A folder as key-value exchange.
struct Folder(PathBuf);

impl Rendezvous for Folder {
    fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.0.join(key.replace('/', "_"));
        let temporary = path.with_extension("tmp");
        std::fs::write(&temporary, value)
            .and_then(|()| std::fs::rename(&temporary, &path))
            .map_err(|error| Error::io("cannot write", &path, error))
    }

    fn fetch(&self, key: &str) -> Result<Vec<u8>> {
        let path = self.0.join(key.replace('/', "_"));
        let start = Instant::now();
        loop {
            match std::fs::read(&path) {
                Ok(value) => return Ok(value),
                Err(_) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => return Err(Error::io("cannot read", &path, error)),
            }
        }
    }
}

/// Processes of one group; killed and collected when dropped.
struct Group {
    children: Vec<Child>,
    _folder: tempfile::TempDir,
}

impl Group {
    fn start(work: &str, world_size: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let children = (0..world_size)
            .map(|rank| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "child_rank", "--nocapture", "--test-threads=1"])
                    .env("DDP_TEST_WORK", work)
                    .env("DDP_TEST_RANK", rank.to_string())
                    .env("DDP_TEST_WORLD", world_size.to_string())
                    .env("DDP_TEST_FOLDER", folder.path())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        Self { children, _folder: folder }
    }

    /// Everything the ranks said with [`say`], by rank, once all have ended.
    fn finish(mut self) -> Vec<Vec<String>> {
        let said = |child: &mut Child| {
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            text.lines()
                .filter_map(|line| line.split_once("said: ").map(|(_, what)| what.to_owned()))
                .collect()
        };
        self.children.iter_mut().map(said).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[expect(clippy::print_stdout, reason = "a child talks to its parent on stdout")]
fn say(what: impl std::fmt::Display) {
    println!("said: {what}");
}

fn noise(shape: &[i64], seed: i64) -> Tensor {
    let len: i64 = shape.iter().product();
    let steps = Tensor::arange(len, (Kind::Double, Device::Cpu)) + 1.0;
    (steps * (12.9898 + seed as f64)).sin().to_kind(Kind::Float).reshape(shape)
}

/// Two layers.
struct Net(Vec<(String, Tensor)>);

impl Net {
    fn new(seed: i64) -> Self {
        let layers = [("0.weight", vec![32, 16]), ("0.bias", vec![32]), ("1.weight", vec![4, 32])];
        Self(
            layers
                .into_iter()
                .map(|(name, shape)| (name.to_owned(), noise(&shape, seed).set_requires_grad(true)))
                .collect(),
        )
    }
    fn forward(&self, x: &Tensor) -> Tensor {
        x.linear(&self.0[0].1, Some(&self.0[1].1)).tanh().linear(&self.0[2].1, None::<&Tensor>)
    }
}

impl Module for Net {
    fn named_parameters(&self) -> Vec<(String, Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }
}

/// Twenty steps of plain SGD on this rank's rows of a global batch of 16; the weights' bits and values.
fn train(collective: Box<dyn Collective>) -> Result<(Vec<u32>, Vec<f32>)> {
    let (rank, rows) = (collective.rank() as i64, 16 / collective.world_size() as i64);
    let options = Options { first_bucket_mb: 1e-3, bucket_cap_mb: 1e-3, ..Options::default() };
    let mut ddp = DistributedDataParallel::new(Net::new(rank * 5), collective, options)?;
    for step in 0..20 {
        let x = noise(&[16, 16], 40 + step).narrow(0, rank * rows, rows);
        let loss = ddp.forward(|net| Ok(net.forward(&x).square().mean(Kind::Float)))?;
        ddp.backward(&loss)?;
        for mut parameter in ddp.parameters() {
            tch::no_grad(|| {
                let _ = parameter.g_sub_(&(parameter.grad() * 0.1));
                parameter.zero_grad();
            });
        }
    }
    let values = |p: Tensor| Vec::<f32>::try_from(p.detach().view([-1])).unwrap();
    let weights: Vec<f32> = ddp.parameters().into_iter().flat_map(values).collect();
    Ok((weights.iter().map(|weight| weight.to_bits()).collect(), weights))
}

/// Not a test of its own: what a child process runs. Without the variables there is nothing to do.
#[test]
fn child_rank() {
    let Ok(work) = std::env::var("DDP_TEST_WORK") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world_size) = (number("DDP_TEST_RANK"), number("DDP_TEST_WORLD"));
    let folder = Folder(PathBuf::from(std::env::var_os("DDP_TEST_FOLDER").unwrap()));
    tch::set_num_threads(1);
    let member = Member { rank, world_size, deadline: PATIENCE, meter: None };
    let mut shm = Shm::connect(member, &folder).unwrap();
    match work.as_str() {
        "train" => {
            let (bits, weights) = train(Box::new(shm)).unwrap();
            say(format!("{bits:?}"));
            say(format!("{weights:?}"));
        }
        // The last rank's model is another one.
        "mismatch" => {
            let mut net = Net::new(0);
            if rank == world_size - 1 {
                net.0[1] = ("0.bias".to_owned(), noise(&[33], 0).set_requires_grad(true));
            }
            let wrapped = DistributedDataParallel::new(net, Box::new(shm), Options::default());
            say(wrapped.map_or_else(|error| error.to_string(), |_| "nothing was noticed".to_owned()));
        }
        // The last rank leaves a layer out.
        "unused" => {
            let mut ddp =
                DistributedDataParallel::new(Net::new(0), Box::new(shm), Options::default()).unwrap();
            let x = noise(&[2, 16], 1);
            let last = rank == world_size - 1;
            let result = ddp
                .forward(|net| Ok(if last { net.0[0].1.square() } else { net.forward(&x) }.sum(Kind::Float)))
                .and_then(|loss| ddp.backward(&loss));
            say(result.map_or_else(|error| error.to_string(), |()| "nothing was noticed".to_owned()));
        }
        // Reduces until somebody dies.
        "reduce" => {
            let buffer = shm.allocate(100_000, Kind::Float).unwrap();
            let mut rounds = 0u64;
            let error = loop {
                match shm.all_reduce(&buffer) {
                    Ok(()) => rounds += 1,
                    Err(error) => break error,
                }
                if rounds == 10 {
                    say("reducing");
                }
            };
            say(format!("{:?}", error.kind()));
            say(error);
        }
        // The last rank stops where a debugger, or a stuck disk, would stop it.
        "stall" => {
            shm.barrier().unwrap();
            say("reducing");
            if rank == world_size - 1 {
                std::thread::sleep(PATIENCE);
            }
            let error = shm.barrier().unwrap_err();
            say(format!("{:?}", error.kind()));
            say(error);
        }
        other => panic!("no such work: {other}"),
    }
}

fn parse(text: &str) -> Vec<f32> {
    text.trim_matches(['[', ']']).split(", ").map(|number| number.parse().unwrap()).collect()
}

#[test]
fn two_four_and_eight_processes_train_like_one_and_agree_to_the_bit() {
    let (_, single) = train(Box::new(dp_vs_ddp::comm::Local::new())).unwrap();
    for world_size in [2, 4, 8] {
        let said = Group::start("train", world_size).finish();
        assert!(said.iter().all(|rank| rank.len() == 2 && rank[0] == said[0][0]), "{world_size}: {said:?}");
        for (weight, expected) in parse(&said[0][1]).iter().zip(&single) {
            assert!((weight - expected).abs() < 1e-5, "{world_size} processes: {weight} and {expected}");
        }
    }
}

#[test]
fn what_one_process_does_otherwise_is_named_by_all_of_them_at_once() {
    let start = Instant::now();
    for (rank, said) in Group::start("mismatch", 3).finish().into_iter().enumerate() {
        let expected = "ranks built different models: entry 1 is parameter `0.bias` [32] Float on rank 0 \
                        and parameter `0.bias` [33] Float on rank 2";
        assert_eq!(said, [format!("rank {rank}: {expected}")]);
    }
    let said = Group::start("unused", 3).finish();
    let first = "rank 2: 2 of 3 parameters took no part in the loss of step 0: `0.bias`, `1.weight`; \
                 find_unused_parameters is off";
    let stopped = format!("stopped by {first}");
    assert_eq!(said, [[stopped.as_str()], [stopped.as_str()], [first]]);
    assert!(start.elapsed() < PATIENCE / 2, "long before the deadline");
}

/// Waits until a rank has said its first word.
fn wait_until_busy(child: &mut Child) -> BufReader<std::process::ChildStdout> {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("said: reducing") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the rank ended before it was busy");
    }
    lines
}

/// Kills one rank (its status is not collected, so it stays a zombie) and returns what the others say,
/// and how long they took to.
fn kill_one(work: &str, world_size: usize, victim: usize) -> (Vec<String>, Duration, u32) {
    let mut group = Group::start(work, world_size);
    let mut outputs: Vec<_> = group.children.iter_mut().map(wait_until_busy).collect();
    let pid = group.children[victim].id();
    let start = Instant::now();
    group.children[victim].kill().unwrap();
    drop(outputs.remove(victim));
    let mut said = Vec::new();
    for mut output in outputs {
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        said.push(text);
    }
    (said, start.elapsed(), pid)
}

#[test]
fn a_killed_rank_is_named_by_the_others_long_before_the_deadline() {
    for (work, victim) in [("reduce", 1), ("reduce", 0), ("stall", 2)] {
        let (said, took, pid) = kill_one(work, 3, victim);
        for text in said {
            assert!(text.contains("said: Worker"), "{text}");
            assert!(
                text.contains(&format!("said: rank {victim} (process {pid}) died before collective ")),
                "{text}"
            );
        }
        // Noticed within 50 ms and a scheduler's whim; the bound leaves room for a busy machine.
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}

#[test]
fn nothing_with_a_name_is_left_behind() {
    let shared = || {
        let names = std::fs::read_dir(Path::new("/dev/shm")).into_iter().flatten().flatten();
        names.map(|entry| entry.file_name()).filter(|name| name.to_string_lossy().contains("ddp")).count()
    };
    let before = shared();
    kill_one("reduce", 2, 0);
    assert_eq!(shared(), before);
}

#[test]
fn a_missing_rank_0_is_an_error_of_the_rendezvous() {
    let folder = tempfile::tempdir().unwrap();
    let rendezvous = Folder(folder.path().to_owned());
    rendezvous.publish("dp-vs-ddp/shm", b"/proc/1/fd/999999").unwrap();
    let member = Member { rank: 1, world_size: 2, deadline: PATIENCE, meter: None };
    let error = Shm::connect(member, &rendezvous).unwrap_err();
    assert_eq!(error.kind(), error::Kind::Io);
    assert!(error.to_string().contains("/proc/1/fd/999999"), "{error}");
}
