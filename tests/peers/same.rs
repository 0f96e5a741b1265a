//! What both sides start from: plans, samples, the order of samples, and files of weights.

use crate::support::*;
use dp_vs_ddp::config::{BUILTIN, DataSource, Machine, ModelPlan, Overrides, Uneven, resolve};
use dp_vs_ddp::data::{self, DistributedSampler};
use dp_vs_ddp::model;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tch::{Device, Tensor};

/// Every key of `theirs` is there, with the same value.
fn assert_holds(ours: &Value, theirs: &Value, path: &str) {
    match theirs {
        Value::Object(keys) => {
            keys.iter().for_each(|(key, value)| assert_holds(&ours[key], value, &format!("{path}.{key}")));
        }
        _ => assert_eq!(
            ours.as_f64().map_or(ours.clone(), Value::from),
            theirs.as_f64().map_or(theirs.clone(), Value::from),
            "{path}"
        ),
    }
}

#[test]
fn a_config_is_the_same_plan_on_both_sides() {
    let sets = ["run.cards=4", "ddp.comm_hook=powersgd", "optimizer.clip_norm=0.5", "batch.global=40"];
    for (name, text) in BUILTIN {
        for sets in [&sets[..1], &sets] {
            let Some(mut python) = python() else { return };
            python.args(["peers/reference.py", name, "--print-plan"]);
            let mut overrides = Overrides::default();
            for pair in sets {
                python.args(["--set", pair]);
                overrides.set(pair).unwrap();
            }
            let theirs: Value = serde_json::from_str(&printed(&python.output().unwrap())).unwrap();
            let machine = Machine { cards: 4, cores: 4 };
            let ours = resolve(name, text, &overrides, machine, Uneven::Refuse).unwrap();
            assert_holds(&serde_json::to_value(ours).unwrap(), &theirs, name);
        }
    }
}

/// Every combination that the sampler is tried with, but for the size of the data set.
fn samplers(samples: usize) -> impl Iterator<Item = (DistributedSampler, u64)> {
    let orders = [(true, 0, 0), (true, 0, 1), (true, 42, 3), (true, (1 << 40) + 5, 0), (false, 0, 1)];
    (1..10).flat_map(move |world_size| {
        orders.into_iter().flat_map(move |(shuffle, seed, epoch)| {
            [false, true].map(|drop_last| {
                (DistributedSampler { samples, world_size, shuffle, drop_last, seed }, epoch)
            })
        })
    })
}

#[test]
fn ranks_see_exactly_the_indices_of_pytorch_s_distributed_sampler() {
    // Up to 50: on nine ranks padding wraps round the data set more than once.
    let all: Vec<_> = (1..=50).chain([257]).flat_map(samplers).collect();
    let given: Vec<_> = all
        .iter()
        .map(|(s, epoch)| (s.samples, s.world_size, epoch, s.shuffle, s.drop_last, s.seed))
        .collect();
    let code = "print(json.dumps([data.sampler_lists(*one) for one in given]))";
    let Some(theirs) = ask(&serde_json::json!(given), code) else { return };
    let theirs: Vec<Vec<Vec<usize>>> = serde_json::from_value(theirs).unwrap();
    assert_eq!(theirs.len(), all.len());
    for ((sampler, epoch), theirs) in all.iter().zip(theirs) {
        let ours: Vec<_> = (0..sampler.world_size).map(|rank| sampler.indices(rank, *epoch)).collect();
        assert_eq!(ours, theirs, "{sampler:?}, epoch {epoch}");
    }
}

fn hash(tensor: &Tensor) -> String {
    let mut bytes = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn samples_are_bit_equal_whether_read_or_drawn() {
    let sources = [
        DataSource::Digits,
        DataSource::Mnist10k,
        DataSource::Synthetic { shape: vec![3, 5, 7], classes: 11, samples: 333 },
        DataSource::Tokens { context: 17, vocabulary: 99, samples: 222 },
    ];
    let code = "
import hashlib
plan = lambda source: {'data': {'source': source}, 'run': {'seed': 12}, 'model': {'name': 'mlp'}}
hash = lambda part: hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest()
print(json.dumps([[hash(part) for part in data.load(plan(source))] for source in given]))";
    let Some(theirs) = ask(&serde_json::json!(sources), code) else { return };
    for (number, source) in sources.iter().enumerate() {
        let (train, _) = data::open(source, false, 12).unwrap();
        let batch = train.batch(&(0..train.len()).collect::<Vec<_>>()).unwrap();
        assert_eq!(
            theirs[number],
            serde_json::json!([hash(&batch.input), hash(&batch.target)]),
            "{source:?}"
        );
    }
}

#[test]
fn state_files_load_strictly_both_ways_and_digest_alike() {
    let folder = tempfile::tempdir().unwrap();
    let models = [
        ModelPlan::Mlp { input: 784, hidden: 32, classes: 10 },
        ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: false },
        ModelPlan::Convnet { channels: 3, classes: 7, batch_norm: true },
        ModelPlan::Resnet18 { channels: 3, classes: 10 },
        ModelPlan::Gpt { width: 32, heads: 4, layers: 2, context: 16, vocabulary: 64 },
    ];
    let file = |side: &str, number: usize| folder.path().join(format!("{side}{number}"));
    let ours: Vec<_> = models.iter().map(|plan| model::build(plan, Device::Cpu, 5).unwrap()).collect();
    let given: Vec<_> = models
        .iter()
        .zip(&ours)
        .enumerate()
        .map(|(number, (plan, ours))| {
            ours.state().save(&file("ours", number)).unwrap();
            (plan, file("ours", number), file("theirs", number))
        })
        .collect();
    let code = "
digests = []
for plan, ours, theirs in given:
    loaded, other = models.build(plan), models.build(plan)
    loaded.load_state_dict(engine.load_file(ours), strict=True)
    engine.save(other.state_dict(), theirs)
    digests.append([engine.digest(loaded), engine.digest(other)])
print(json.dumps(digests))";
    let Some(digests) = ask(&serde_json::json!(given), code) else { return };
    for (number, (plan, ours)) in models.iter().zip(&ours).enumerate() {
        let digests = &digests[number];
        assert_eq!(digests[0], ours.state().digest().unwrap(), "{plan:?}: PyTorch loaded other values");
        let theirs = model::build(plan, Device::Cpu, 6).unwrap();
        theirs.state().load(&file("theirs", number)).unwrap();
        assert_eq!(digests[1], theirs.state().digest().unwrap(), "{plan:?}: we loaded other values");
        assert_ne!(digests[0], digests[1]);
    }
}
