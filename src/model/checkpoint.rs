//! Checkpoints: a file of weights that PyTorch loads, and beside it one from which a training goes on as
//! if it had never stopped.
//!
//! Note [Two files]
//! `FILE` holds weights alone, under PyTorch's names, so that anything can load it. `FILE.resume` holds the
//! same weights and all else: what the optimiser remembers, by parameter, and how far the training has
//! come. It is whole in itself and written first; each file is replaced whole or not at all. Whatever moment
//! a training is killed at, `FILE.resume` fits `FILE`: it knows the weights it has and those before them.

use super::State;
use super::state::{read_file, replace_file};
use crate::Result;
use crate::error::{Error, Kind};
use std::path::{Path, PathBuf};
use tch::Tensor;

/// The form of `FILE.resume`.
const FORMAT: &str = "dp-vs-ddp/resume/1";

/// What stands before the names of what the optimiser remembers.
const MEMORY: &str = "optimizer.";

/// How far a training has come.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Whole epochs that are done.
    pub epochs: u64,
    /// What has to be the same for the samples of the next epoch to be the right ones.
    pub samples: String,
    /// float16's loss scale, and good steps since it last moved.
    pub scale: Option<(f64, u32)>,
}

/// What a training goes on from, besides its weights.
#[derive(Debug)]
pub struct Resumed {
    /// How far it had come.
    pub progress: Progress,
    /// What the optimiser remembers: `PARAMETER.FIELD`.
    pub memory: Vec<(String, Tensor)>,
}

/// Where the rest of a checkpoint lies.
pub fn resume_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".resume");
    name.into()
}

/// Writes both files; the digest of the weights, which the next call wants as `previous`. See Note [Two
/// files].
pub fn save(
    path: &Path,
    state: &State,
    memory: &[(String, Tensor)],
    progress: &Progress,
    previous: &str,
) -> Result<String> {
    let digest = state.digest()?;
    let mut all = State::default();
    for entry in state.entries() {
        let _ = all.buffer(entry.name.clone(), entry.tensor.detach());
    }
    for (name, tensor) in memory {
        let _ = all.buffer(format!("{MEMORY}{name}"), tensor.shallow_clone());
    }
    let mut metadata = vec![
        ("resume", FORMAT.to_owned()),
        ("weights", digest.clone()),
        ("previous", previous.to_owned()),
        ("epochs", progress.epochs.to_string()),
        ("samples", progress.samples.clone()),
    ];
    if let Some((scale, good_steps)) = progress.scale {
        metadata.push(("scale", scale.to_string()));
        metadata.push(("good_steps", good_steps.to_string()));
    }
    let resume = resume_path(path);
    replace_file(&resume, &all.to_safetensors(&metadata)?)
        .map_err(|error| Error::io("cannot write", &resume, error))?;
    state.save(path)?;
    Ok(digest)
}

/// Epochs that were done when `FILE.resume` was written; 0 where there is none. Reads no weights.
pub fn epochs_done(path: &Path) -> Result<u64> {
    let resume = resume_path(path);
    if !resume.exists() {
        return Ok(0);
    }
    let (_, metadata) = read_file(&resume)?;
    Ok(metadata.get("epochs").and_then(|epochs| epochs.parse().ok()).unwrap_or(0))
}

/// Reads weights into `state`; and what else there is, if `FILE.resume` lies beside them.
///
/// # Errors
/// `Kind::Corrupt` where a file is not what it should be, or the two do not belong together.
pub fn load(path: &Path, state: &State) -> Result<Option<Resumed>> {
    state.load(path)?;
    let resume = resume_path(path);
    if !resume.exists() {
        return Ok(None);
    }
    let corrupt = |what: String| {
        Error::new(Kind::Corrupt, format!("`{}`: {what}", resume.display())).hint(format!(
            "to start from the weights alone, move `{}` away",
            resume.file_name().unwrap_or_default().display()
        ))
    };
    let (tensors, metadata) = read_file(&resume)?;
    let get =
        |key: &str| metadata.get(key).cloned().ok_or_else(|| corrupt(format!("its metadata has no `{key}`")));
    if get("resume")? != FORMAT {
        return Err(corrupt(format!("is of form `{}`, this build reads `{FORMAT}`", get("resume")?)));
    }
    let beside = state.digest()?;
    if beside != get("weights")? && beside != get("previous")? {
        return Err(corrupt(format!("belongs to other weights than those in `{}`", path.display())));
    }
    let (memory, weights): (Vec<_>, Vec<_>) =
        tensors.into_iter().partition(|(name, _)| name.starts_with(MEMORY));
    state.copy_from(&weights).map_err(|error| error.context(format!("`{}`", resume.display())))?;
    if state.digest()? != get("weights")? {
        return Err(corrupt("its weights are not those it was written with".to_owned()));
    }
    let number = |key: &str, text: String| {
        text.parse::<f64>().map_err(|_| corrupt(format!("`{key}` is `{text}`, which is no number")))
    };
    let epochs = number("epochs", get("epochs")?)? as u64;
    let scale = match metadata.get("scale") {
        Some(scale) => {
            Some((number("scale", scale.clone())?, number("good_steps", get("good_steps")?)? as u32))
        }
        None => None,
    };
    let memory = memory.into_iter().map(|(name, tensor)| (name[MEMORY.len()..].to_owned(), tensor)).collect();
    Ok(Some(Resumed { progress: Progress { epochs, samples: get("samples")?, scale }, memory }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(values: [f32; 2]) -> State {
        let mut state = State::default();
        let _ = state.parameter("a", Tensor::from_slice(&values));
        let _ = state.buffer("n", Tensor::from(3i64));
        state
    }

    fn progress(epochs: u64) -> Progress {
        Progress { epochs, samples: "digits".into(), scale: Some((1024.0, 7)) }
    }

    fn memory() -> Vec<(String, Tensor)> {
        vec![("a.momentum_buffer".into(), Tensor::from_slice(&[0.5f32, -0.5]))]
    }

    fn values(state: &State) -> Vec<f32> {
        Vec::try_from(state.get("a").unwrap().detach()).unwrap()
    }

    #[test]
    fn everything_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        save(&path, &state([1.0, 2.0]), &memory(), &progress(2), "").unwrap();
        let target = state([0.0, 0.0]);
        let resumed = load(&path, &target).unwrap().unwrap();
        assert_eq!((values(&target), resumed.progress), (vec![1.0, 2.0], progress(2)));
        assert_eq!(resumed.memory[0].0, "a.momentum_buffer");
        assert_eq!(Vec::<f32>::try_from(&resumed.memory[0].1).unwrap(), [0.5, -0.5]);
        // What PyTorch is to load holds the model's names and nothing else.
        let plain = read_file(&path).unwrap().0;
        let mut names: Vec<_> = plain.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["a", "n"]);
    }

    #[test]
    fn weights_alone_are_a_start_without_a_past() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        state([1.0, 2.0]).save(&path).unwrap();
        let target = state([0.0, 0.0]);
        assert!(load(&path, &target).unwrap().is_none());
        assert_eq!(values(&target), [1.0, 2.0]);
    }

    #[test]
    fn a_kill_between_the_two_files_goes_on_from_the_newer_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let before = save(&path, &state([1.0, 2.0]), &memory(), &progress(1), "").unwrap();
        let old = std::fs::read(&path).unwrap();
        save(&path, &state([3.0, 4.0]), &memory(), &progress(2), &before).unwrap();
        std::fs::write(&path, old).unwrap();
        let target = state([0.0, 0.0]);
        assert_eq!(load(&path, &target).unwrap().unwrap().progress.epochs, 2);
        assert_eq!(values(&target), [3.0, 4.0]);
    }

    #[test]
    fn files_that_do_not_belong_together_or_are_damaged_are_refused_with_a_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        save(&path, &state([1.0, 2.0]), &memory(), &progress(1), "").unwrap();
        state([9.0, 9.0]).save(&path).unwrap();
        let error = load(&path, &state([0.0, 0.0])).unwrap_err();
        assert!(error.to_string().contains("belongs to other weights"), "{error}");
        assert!(error.advice().unwrap().contains("m.safetensors.resume"), "{error:?}");
        let resume = resume_path(&path);
        let bytes = std::fs::read(&resume).unwrap();
        std::fs::write(&resume, &bytes[..bytes.len() / 2]).unwrap();
        assert_eq!(load(&path, &state([0.0, 0.0])).unwrap_err().kind(), Kind::Corrupt);
        // A file of weights is no such file.
        std::fs::copy(&path, &resume).unwrap();
        assert!(load(&path, &state([0.0, 0.0])).unwrap_err().to_string().contains("no `resume`"));
    }
}
