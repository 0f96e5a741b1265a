//! What both sides start from: plans, samples, the order of samples, and files of weights.

use crate::support::*;
use dp_vs_ddp::config::{BUILTIN, DataSource, Machine, Overrides, Uneven, resolve};
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

#[test]
fn ranks_see_exactly_the_indices_of_pytorch_s_distributed_sampler() {
    let code = "
import data
print(json.dumps([
    data.sampler_lists(samples, ranks, epoch, shuffle, drop_last, seed)
    for samples in (1, 2, 3, 4, 5, 7, 10, 16, 21, 100) for ranks in range(1, 10)
    for shuffle in (True, False) for drop_last in (True, False)
    for epoch, seed in ((0, 0), (1, 0), (3, 42), (0, 2**40 + 5))
]))";
    let Some(theirs) = ask(code) else { return };
    let mut theirs = theirs.as_array().unwrap().iter();
    let mut lists = 0;
    for samples in [1, 2, 3, 4, 5, 7, 10, 16, 21, 100] {
        for world_size in 1..10 {
            for shuffle in [true, false] {
                for drop_last in [true, false] {
                    for (epoch, seed) in [(0, 0), (1, 0), (3, 42), (0, (1 << 40) + 5)] {
                        let sampler = DistributedSampler { samples, world_size, shuffle, drop_last, seed };
                        let ours: Vec<_> = (0..world_size).map(|rank| sampler.indices(rank, epoch)).collect();
                        assert_eq!(
                            &serde_json::to_value(ours).unwrap(),
                            theirs.next().unwrap(),
                            "{sampler:?}, epoch {epoch}"
                        );
                        lists += world_size;
                    }
                }
            }
        }
    }
    assert!(lists > 7000 && theirs.next().is_none());
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
    for source in sources {
        let plan = serde_json::json!({
            "data": { "source": source }, "run": { "seed": 12 }, "model": { "name": "mlp" }
        });
        let code = format!(
            "
import data, hashlib
parts = data.load(json.loads('{plan}'))
print(json.dumps([hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest() for part in parts]))"
        );
        let Some(theirs) = ask(&code) else { return };
        let (train, _) = data::open(&source, false, 12).unwrap();
        let batch = train.batch(&(0..train.len()).collect::<Vec<_>>()).unwrap();
        assert_eq!(theirs, serde_json::json!([hash(&batch.input), hash(&batch.target)]), "{source:?}");
    }
}

#[test]
fn state_files_load_strictly_both_ways_and_digest_alike() {
    let folder = tempfile::tempdir().unwrap();
    let models = [
        ("mlp", "model.hidden=32"),
        ("convnet", "model.batch_norm=false"),
        ("convnet", "model.batch_norm=true"),
        ("resnet18", "run.seed=3"),
        ("gpt", "model.layers=2"),
    ];
    for (name, set) in models {
        let mut overrides = Overrides::default();
        overrides.set(&format!("model.name={name}")).unwrap().set(set).unwrap();
        let plan = resolve("c", "", &overrides, Machine { cards: 1, cores: 1 }, Uneven::Refuse).unwrap();
        let ours = model::build(&plan.model, Device::Cpu, 5).unwrap();
        let (from_us, from_them) = (folder.path().join("ours"), folder.path().join("theirs"));
        ours.state().save(&from_us).unwrap();
        let code = format!(
            "
import models, engine
from safetensors.torch import load_file
plan = json.loads('{}')
model = models.build(plan)
model.load_state_dict(load_file({from_us:?}), strict=True)
same = engine.digest(model)
other = models.build(plan)
engine.save(other.state_dict(), {from_them:?})
print(json.dumps([same, engine.digest(other)]))",
            serde_json::to_string(&plan.model).unwrap()
        );
        let Some(digests) = ask(&format!("sys.modules['worker'] = __import__('worker')\n{code}")) else {
            return;
        };
        assert_eq!(digests[0], ours.state().digest().unwrap(), "{name} {set}: PyTorch loaded other values");
        let theirs = model::build(&plan.model, Device::Cpu, 6).unwrap();
        theirs.state().load(&from_them).unwrap();
        assert_eq!(digests[1], theirs.state().digest().unwrap(), "{name} {set}: we loaded other values");
        assert_ne!(digests[0], digests[1]);
    }
}
