//! PyTorch, runs of the program, and how far two sets of tensors are apart.

use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Seek;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The peers' interpreter, in the project's folder; or a line that says why there is none.
pub(crate) fn python() -> Option<Command> {
    let path = root().join(".peers/bin/python");
    if !path.exists() {
        eprintln!("skipped: needs ./setup --peers");
        return None;
    }
    let mut command = Command::new(path);
    command.current_dir(root()).env("OMP_NUM_THREADS", "1");
    Some(command)
}

/// What some lines of Python print, as JSON, with `given` as the value of that name. The peers' modules
/// can be imported.
pub(crate) fn ask(given: &Value, code: &str) -> Option<Value> {
    let mut python = python()?;
    let head = "import sys, json; sys.path.insert(0, 'peers'); import worker, data, models, engine\n\
                given = json.load(sys.stdin)\n";
    // A file, because an argument may not be this long.
    let mut input = tempfile::tempfile().unwrap();
    serde_json::to_writer(&input, given).unwrap();
    input.rewind().unwrap();
    let output = python.args(["-c", &format!("{head}{code}")]).stdin(input).output().unwrap();
    Some(serde_json::from_str(&printed(&output)).unwrap())
}

/// Standard output of a run that must have gone well.
pub(crate) fn printed(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{:?}: {}{}", output.status, text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// A comparison that is over.
pub(crate) struct Run {
    folder: TempDir,
    pub(crate) results: Value,
}

impl Run {
    /// `compare` of one round from its first step on, weights and gradients kept.
    pub(crate) fn compare(further: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_dp-vs-ddp"))
            .args(["compare", "--run-id", "run", "--rounds", "1", "--warmup", "0", "--save-weights", "--out"])
            .arg(folder.path())
            .args(further)
            .output()
            .unwrap();
        printed(&output);
        let text = std::fs::read_to_string(folder.path().join("run/results.json")).unwrap();
        Self { results: serde_json::from_str(&text).unwrap(), folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("run").join(name)
    }

    pub(crate) fn losses(&self, row: &str) -> Vec<f64> {
        floats(&self.results["engines"][row]["rounds"][0]["losses"])
    }

    pub(crate) fn gradients(&self, row: &str) -> Tensors {
        self.tensors(&format!("{row}.gradients"))
    }

    pub(crate) fn weights(&self, row: &str) -> Tensors {
        self.tensors(row)
    }

    /// `ddp[a=1 b=2]` lies in `ddp+a=1+b=2`.
    fn tensors(&self, name: &str) -> Tensors {
        let name = name.replace(['[', ' '], "+").replace(']', "");
        tensors(&self.path(&format!("weights/{name}.safetensors")))
    }
}

/// Losses of PyTorch's DDP, run without the Rust program from a run's plan and weights.
pub(crate) fn reference(run: &Run, out: &Path, further: &[&str]) -> Vec<f64> {
    let mut python = python().unwrap();
    python.arg("peers/reference.py").arg(run.path("plan.json")).args(["--engine", "torch_ddp", "--init"]);
    python.arg(run.path("weights/init.safetensors")).arg("--out").arg(out).args(further);
    printed(&python.output().unwrap());
    let text = std::fs::read_to_string(out.join("torch_ddp.json")).unwrap();
    floats(&serde_json::from_str::<Value>(&text).unwrap()["losses"])
}

pub(crate) fn floats(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

/// Names and values of a file.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

pub(crate) fn tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = file.tensors().into_iter().filter(|(_, view)| view.dtype() == safetensors::Dtype::F32);
    floats
        .map(|(name, view)| {
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            (name, values.collect())
        })
        .collect()
}

/// Norm of the difference over the norm of `theirs`, over all tensors together. Names must be the same.
pub(crate) fn distance(ours: &Tensors, theirs: &Tensors) -> f64 {
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    let (apart, size) = ours
        .iter()
        .map(|(name, values)| squares(values, &theirs[name]))
        .fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
    assert!(size > 0.0, "nothing to compare with");
    (apart / size).sqrt()
}

/// The tensor with the largest part in that difference.
pub(crate) fn worst<'a>(ours: &'a Tensors, theirs: &Tensors) -> &'a str {
    let part = |(name, values): &(&String, &Vec<f32>)| squares(values, &theirs[*name]).0;
    ours.iter().max_by(|a, b| part(a).total_cmp(&part(b))).unwrap().0
}

/// Squared norms: of the difference, and of `theirs`.
fn squares(ours: &[f32], theirs: &[f32]) -> (f64, f64) {
    assert_eq!(ours.len(), theirs.len());
    let pairs = || ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    (pairs().map(|(a, b)| (a - b).powi(2)).sum(), pairs().map(|(_, b)| b.powi(2)).sum())
}

/// Largest relative difference of a loss.
pub(crate) fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs() / x.abs().max(y.abs())).fold(0.0, f64::max)
}
