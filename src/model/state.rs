//! A model's parameters and buffers by name, in creation order: what ranks must agree on.
//!
//! Files are safetensors with PyTorch's names. Values are copied by name, checked as a whole before
//! the first one is written, and never carry gradient history.

use crate::Result;
use crate::error::{Error, Kind};
use crate::torch::{grad, no_grad};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tch::{Device, Kind as Type, Tensor};

/// What wrappers put before every name: `DataParallel` and `DistributedDataParallel` of PyTorch.
const WRAPPER: &str = "module.";

/// One named tensor.
#[derive(Debug)]
pub struct Entry {
    /// PyTorch's name, as in `layer1.0.conv1.weight`.
    pub name: String,
    /// Shared handle.
    pub tensor: Tensor,
    /// A parameter that is trained (`true`), or a buffer / frozen parameter.
    pub trainable: bool,
    /// Registered as a buffer (running statistics), not as a parameter.
    pub buffer: bool,
}

/// Parameters and buffers in creation order.
#[derive(Debug, Default)]
pub struct State {
    entries: Vec<Entry>,
    /// Second names of tied parameters: (alias, name). One tensor in memory, both keys in a file.
    aliases: Vec<(String, String)>,
}

impl State {
    /// Registers a parameter that is trained, and hands its handle back.
    pub fn parameter(&mut self, name: impl Into<String>, tensor: Tensor) -> Tensor {
        self.push(name.into(), tensor.set_requires_grad(true), true, false)
    }

    /// Registers a parameter that is not trained, and hands its handle back.
    pub fn frozen(&mut self, name: impl Into<String>, tensor: Tensor) -> Tensor {
        self.push(name.into(), tensor.set_requires_grad(false), false, false)
    }

    /// Registers a buffer, and hands its handle back.
    pub fn buffer(&mut self, name: impl Into<String>, tensor: Tensor) -> Tensor {
        self.push(name.into(), tensor, false, true)
    }

    fn push(&mut self, name: String, tensor: Tensor, trainable: bool, buffer: bool) -> Tensor {
        debug_assert!(self.get(&name).is_none(), "`{name}` is registered twice");
        self.entries.push(Entry { name, tensor: tensor.shallow_clone(), trainable, buffer });
        tensor
    }

    /// Gives a registered tensor a second name in files.
    pub fn tie(&mut self, alias: impl Into<String>, name: impl Into<String>) {
        self.aliases.push((alias.into(), name.into()));
    }

    /// Everything, in creation order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Trainable parameters, in creation order.
    pub fn parameters(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.trainable)
    }

    /// Buffers, in creation order.
    pub fn buffers(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.buffer)
    }

    /// The tensor of this name, if there is one. Not by a second name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.entries.iter().find(|entry| entry.name == name).map(|entry| &entry.tensor)
    }

    /// Copies values in by name, without gradient history, from any device. Names, shapes and dtypes
    /// must match one to one; the first difference is named, and then nothing was copied. A tied
    /// tensor may come under either of its names, or under both with equal values.
    pub fn copy_from(&self, other: &[(String, Tensor)]) -> Result<()> {
        let mut given = BTreeMap::new();
        for (name, tensor) in other {
            if given.insert(name.as_str(), tensor).is_some() {
                return Err(mismatch(format!("`{name}` is given twice")));
            }
        }
        for (alias, name) in &self.aliases {
            let Some(tensor) = given.remove(alias.as_str()) else { continue };
            let first = *given.entry(name.as_str()).or_insert(tensor);
            if first.size() != tensor.size()
                || first.kind() != tensor.kind()
                || bytes_of(first)? != bytes_of(tensor)?
            {
                return Err(mismatch(format!("`{alias}` and `{name}` are one tensor here, but differ")));
            }
        }
        let mut pairs = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let name = &entry.name;
            let source =
                given.remove(name.as_str()).ok_or_else(|| mismatch(format!("`{name}` is missing")))?;
            let (ours, theirs) = (entry.tensor.size(), source.size());
            if ours != theirs {
                return Err(mismatch(format!("`{name}` has shape {theirs:?}, the model needs {ours:?}")));
            }
            let (ours, theirs) = (entry.tensor.f_kind()?, source.f_kind()?);
            if ours != theirs {
                return Err(mismatch(format!("`{name}` has type {theirs:?}, the model needs {ours:?}")));
            }
            pairs.push((&entry.tensor, source));
        }
        if let Some(extra) = given.keys().next() {
            return Err(mismatch(format!("the model has no `{extra}`")));
        }
        no_grad(|| {
            pairs.into_iter().try_for_each(|(ours, source)| {
                ours.shallow_clone().f_copy_(source)?;
                Ok(())
            })
        })
    }

    /// The gradients of the trained parameters under their names, as far as they are defined.
    pub fn gradients(&self) -> Self {
        let mut gradients = Self::default();
        for entry in self.parameters() {
            if let Some(gradient) = grad::grad(&entry.tensor) {
                let _ = gradients.buffer(entry.name.clone(), gradient);
            }
        }
        gradients
    }

    /// Names and handles, for another state's [`State::copy_from`].
    pub fn named_tensors(&self) -> Vec<(String, Tensor)> {
        self.entries.iter().map(|entry| (entry.name.clone(), entry.tensor.shallow_clone())).collect()
    }

    /// Reads a safetensors file (with or without one leading `module.`) into this state.
    pub fn load(&self, path: &Path) -> Result<()> {
        let (tensors, _) = read_file(path)?;
        for (name, tensor) in &tensors {
            if tensor.is_floating_point() && !bool::try_from(tensor.f_isfinite()?.f_all()?)? {
                return Err(Error::new(
                    Kind::Corrupt,
                    format!("`{}`: `{name}` holds values that are not finite", path.display()),
                )
                .hint("such weights give no loss: take an earlier checkpoint"));
            }
        }
        let own: Vec<&str> = self.file_names().collect();
        let names = unwrapped(tensors.iter().map(|(name, _)| name.as_str()).collect(), &own);
        let named: Vec<_> = names
            .into_iter()
            .zip(&tensors)
            .map(|(name, (_, tensor))| (name.to_owned(), tensor.shallow_clone()))
            .collect();
        self.copy_from(&named).map_err(|error| error.context(format!("cannot load `{}`", path.display())))
    }

    /// Writes a safetensors file, atomically: the same weights give the same bytes, and a reader sees
    /// the old file or the new one, whole.
    pub fn save(&self, path: &Path) -> Result<()> {
        // A link is followed, and what is no file (a device, a pipe) is not replaced by one.
        let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(Error::usage(format!(
                "cannot write weights to `{}`: it is not a file",
                path.display()
            ))
            .hint("give the path of a file to make or replace"));
        }
        let file = self
            .to_safetensors(&[])
            .map_err(|error| error.context(format!("cannot write weights to `{}`", path.display())))?;
        replace_file(path, &file).map_err(|error| Error::io("cannot write weights to", path, error))
    }

    /// The contents of a safetensors file of this state, with these further entries of its metadata.
    pub fn to_safetensors(&self, metadata: &[(&str, String)]) -> Result<Vec<u8>> {
        let mut contents = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let shape: Vec<usize> = entry.tensor.size().iter().map(|n| n.unsigned_abs() as usize).collect();
            let (dtype, _) = types()
                .into_iter()
                .find(|(_, kind)| *kind == entry.tensor.kind())
                .ok_or_else(|| mismatch(format!("`{}` has a type that files cannot hold", entry.name)))?;
            contents.push((entry.name.as_str(), dtype, shape, bytes_of(&entry.tensor)?));
        }
        for (alias, name) in &self.aliases {
            let tied = contents.iter().find(|(known, ..)| known == name);
            if let Some((_, dtype, shape, bytes)) = tied.cloned() {
                contents.push((alias.as_str(), dtype, shape, bytes));
            }
        }
        let cannot =
            |error: safetensors::SafeTensorError| Error::new(Kind::Corrupt, format!("safetensors: {error}"));
        let views = contents
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((*name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(cannot)?;
        // What PyTorch's own writers state, and some readers ask for.
        let stated = [("format", "pt".to_owned())];
        let metadata = stated.iter().chain(metadata).map(|(key, value)| ((*key).to_owned(), value.clone()));
        safetensors::serialize(views, Some(metadata.collect())).map_err(cannot)
    }

    /// SHA-256 over names, shapes, dtypes and bytes, in hexadecimal: equal exactly when the weights are
    /// bit-equal.
    pub fn digest(&self) -> Result<String> {
        digest(self.entries.iter())
    }

    /// The same without buffers, for ranks that keep their own.
    pub fn digest_without_buffers(&self) -> Result<String> {
        digest(self.entries.iter().filter(|entry| !entry.buffer))
    }

    /// All names that a file of this state holds.
    fn file_names(&self) -> impl Iterator<Item = &str> {
        let aliases = self.aliases.iter().map(|(alias, _)| alias.as_str());
        self.entries.iter().map(|entry| entry.name.as_str()).chain(aliases)
    }
}

fn digest<'a>(entries: impl Iterator<Item = &'a Entry>) -> Result<String> {
    let mut hash = Sha256::new();
    for entry in entries {
        let header = format!("{}\0{:?}\0{:?}\0", entry.name, entry.tensor.f_kind()?, entry.tensor.size());
        hash.update(header);
        hash.update(bytes_of(&entry.tensor)?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn mismatch(what: String) -> Error {
    Error::new(Kind::Corrupt, what).hint("the weights must come from the same model with the same sizes")
}

/// Cuts one leading `module.` off every name, if all have it and that does not make fewer of them ours: a
/// model may have a child of that name itself, in a wrapper or without.
fn unwrapped<'a>(names: Vec<&'a str>, own: &[&str]) -> Vec<&'a str> {
    let known = |names: &[&str]| names.iter().filter(|name| own.contains(name)).count();
    let cut: Option<Vec<&str>> = names.iter().map(|name| name.strip_prefix(WRAPPER)).collect();
    cut.filter(|cut| known(cut) >= known(&names)).unwrap_or(names)
}

fn types() -> [(Dtype, Type); 9] {
    [
        (Dtype::F32, Type::Float),
        (Dtype::F64, Type::Double),
        (Dtype::F16, Type::Half),
        (Dtype::BF16, Type::BFloat16),
        (Dtype::I64, Type::Int64),
        (Dtype::I32, Type::Int),
        (Dtype::I8, Type::Int8),
        (Dtype::U8, Type::Uint8),
        (Dtype::BOOL, Type::Bool),
    ]
}

/// What a safetensors file holds: names with tensors, and its metadata.
type Contents = (Vec<(String, Tensor)>, HashMap<String, String>);

/// Reads a safetensors file.
pub(super) fn read_file(path: &Path) -> Result<Contents> {
    let bytes = std::fs::read(path).map_err(|error| Error::io("cannot read weights from", path, error))?;
    let corrupt = |error: safetensors::SafeTensorError| {
        let what = format!("`{}` is not a safetensors file: {error}", path.display());
        Error::new(Kind::Corrupt, what)
            .hint("give a file written by `--save-weights` or by safetensors.torch.save_file")
    };
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(corrupt)?;
    let file = SafeTensors::deserialize(&bytes).map_err(corrupt)?;
    let tensors = file
        .tensors()
        .iter()
        .map(|(name, view)| Ok((name.clone(), tensor_of(name, view)?)))
        .collect::<Result<Vec<_>>>()
        .map_err(|error| error.context(format!("cannot load `{}`", path.display())))?;
    Ok((tensors, header.metadata().clone().unwrap_or_default()))
}

fn tensor_of(name: &str, view: &TensorView<'_>) -> Result<Tensor> {
    let kind = types().into_iter().find(|(dtype, _)| *dtype == view.dtype()).map(|(_, kind)| kind);
    let kind = kind
        .ok_or_else(|| mismatch(format!("`{name}` has type {:?}, which is not supported", view.dtype())))?;
    let shape: Vec<i64> = view.shape().iter().map(|n| *n as i64).collect();
    Ok(Tensor::f_from_data_size(view.data(), &shape, kind)?)
}

fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let count = tensor.numel();
    let mut bytes = vec![0; count * tensor.f_kind()?.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, count)?;
    Ok(bytes)
}

pub(super) fn replace_file(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Temporary files are private by default; this one becomes an ordinary file.
    let mut file = tempfile::Builder::new()
        .prefix(".weights-")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    file.write_all(contents)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_slice(values)
    }

    fn values(state: &State, name: &str) -> Vec<f32> {
        Vec::try_from(state.get(name).unwrap().detach()).unwrap()
    }

    /// `a` (trained), `b` (frozen), `n` (a counter), and `c` tied to `a`.
    fn sample(a: [f32; 2], b: f32) -> State {
        let mut state = State::default();
        let _ = state.parameter("a", tensor(&a));
        let _ = state.frozen("b", tensor(&[b]));
        let _ = state.buffer("n", Tensor::from(7i64));
        state.tie("c", "a");
        state
    }

    fn given(names: &[(&str, Tensor)]) -> Vec<(String, Tensor)> {
        names.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.shallow_clone())).collect()
    }

    #[test]
    fn values_are_copied_by_name_not_by_position() {
        let (target, mut source) = (sample([0.0, 0.0], 0.0), State::default());
        let _ = source.buffer("n", Tensor::from(9i64));
        let _ = source.parameter("b", tensor(&[3.0]));
        let _ = source.parameter("a", tensor(&[1.0, 2.0]));
        target.copy_from(&source.named_tensors()).unwrap();
        assert_eq!((values(&target, "a"), values(&target, "b")), (vec![1.0, 2.0], vec![3.0]));
        assert_eq!(target.get("n").unwrap().int64_value(&[]), 9);
        let a = target.get("a").unwrap();
        assert!(a.is_leaf() && a.requires_grad(), "no history is kept");
    }

    #[test]
    fn the_first_difference_is_named_and_nothing_is_copied() {
        let state = sample([1.0, 2.0], 3.0);
        let digest = state.digest().unwrap();
        let (a, b, n) = (tensor(&[8.0, 8.0]), tensor(&[8.0]), Tensor::from(8i64));
        let full = [("a", a.shallow_clone()), ("b", b.shallow_clone()), ("n", n.shallow_clone())];
        let refused = |names: &[(&str, Tensor)]| state.copy_from(&given(names)).unwrap_err().to_string();
        assert_eq!(refused(&full[..2]), "`n` is missing");
        assert_eq!(
            refused(&[&full[..], &[("z", b.shallow_clone())]].concat_tensors()),
            "the model has no `z`"
        );
        let long = [("a", tensor(&[1.0; 3])), ("b", b.shallow_clone()), ("n", n.shallow_clone())];
        assert_eq!(refused(&long), "`a` has shape [3], the model needs [2]");
        let wrong = [("a", a.shallow_clone()), ("b", b.shallow_clone()), ("n", Tensor::from(8f32))];
        assert_eq!(refused(&wrong), "`n` has type Float, the model needs Int64");
        let twice = [("a", a.shallow_clone()), ("a", a.shallow_clone())];
        assert_eq!(refused(&twice), "`a` is given twice");
        assert_eq!(state.digest().unwrap(), digest);
    }

    trait Concat<'a> {
        fn concat_tensors(self) -> Vec<(&'a str, Tensor)>;
    }

    impl<'a> Concat<'a> for [&[(&'a str, Tensor)]; 2] {
        fn concat_tensors(self) -> Vec<(&'a str, Tensor)> {
            self.iter().flat_map(|part| part.iter().map(|(name, t)| (*name, t.shallow_clone()))).collect()
        }
    }

    #[test]
    fn a_tied_tensor_may_come_under_either_name_but_not_with_two_values() {
        let state = sample([0.0, 0.0], 0.0);
        let rest = [("b", tensor(&[3.0])), ("n", Tensor::from(1i64))];
        let with = |tied: &[(&'static str, Tensor)]| given(&[tied, &rest].concat_tensors());
        state.copy_from(&with(&[("c", tensor(&[4.0, 5.0]))])).unwrap();
        assert_eq!(values(&state, "a"), [4.0, 5.0]);
        state.copy_from(&with(&[("a", tensor(&[6.0, 7.0])), ("c", tensor(&[6.0, 7.0]))])).unwrap();
        let error = state.copy_from(&with(&[("a", tensor(&[6.0, 7.0])), ("c", tensor(&[6.0, 8.0]))]));
        assert_eq!(error.unwrap_err().to_string(), "`c` and `a` are one tensor here, but differ");
        assert_eq!(values(&state, "a"), [6.0, 7.0]);
    }

    // Field case 058: what stands inside a name is not a wrapper.
    #[test]
    fn one_leading_wrapper_is_cut_and_only_where_all_names_have_it() {
        let own = ["encoder.module.weight", "submodule.bias"];
        let wrapped = vec!["module.encoder.module.weight", "module.submodule.bias"];
        assert_eq!(unwrapped(wrapped.clone(), &own), own);
        assert_eq!(unwrapped(vec!["module.module.x"], &own), ["module.x"]);
        let mixed = vec!["module.a", "b"];
        assert_eq!(unwrapped(mixed.clone(), &own), mixed);
        assert_eq!(unwrapped(wrapped.clone(), &["module.encoder.module.weight"]), wrapped);
        assert_eq!(unwrapped(vec![], &own), Vec::<&str>::new());
        // A model that has a child named `module`: its file, and that of its wrapper.
        let child = ["module.weight", "module.bias"];
        assert_eq!(unwrapped(child.to_vec(), &child), child);
        assert_eq!(unwrapped(vec!["module.module.weight", "module.module.bias"], &child), child);
        let beside = ["module.weight", "fc.bias"];
        assert_eq!(unwrapped(vec!["module.module.weight", "module.fc.bias"], &beside), beside);
        assert_eq!(unwrapped(beside.to_vec(), &beside), beside);
    }

    #[test]
    fn a_file_holds_every_name_and_gives_the_values_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let state = sample([1.5, -2.0], 3.25);
        state.save(&path).unwrap();
        let first = std::fs::read(&path).unwrap();
        state.save(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), first, "the same weights give the same bytes");
        let file = SafeTensors::deserialize(&first).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "c", "n"]);
        assert!(file.tensor("n").unwrap().shape().is_empty());
        let other = sample([0.0, 0.0], 0.0);
        other.load(&path).unwrap();
        assert_eq!(other.digest().unwrap(), state.digest().unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_ne!(mode & 0o044, 0, "others may read it where the umask lets them: {mode:o}");
    }

    #[test]
    fn a_wrapped_file_loads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wrapped.safetensors");
        let mut wrapped = State::default();
        let _ = wrapped.parameter("module.a", tensor(&[4.0, 5.0]));
        let _ = wrapped.parameter("module.b", tensor(&[6.0]));
        let _ = wrapped.buffer("module.n", Tensor::from(1i64));
        wrapped.save(&path).unwrap();
        let state = sample([0.0, 0.0], 0.0);
        state.load(&path).unwrap();
        assert_eq!((values(&state, "a"), values(&state, "b")), (vec![4.0, 5.0], vec![6.0]));
    }

    #[test]
    fn files_that_are_not_there_or_not_safetensors_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let state = sample([0.0, 0.0], 0.0);
        let missing = state.load(&folder.path().join("none.safetensors")).unwrap_err();
        assert_eq!(missing.kind(), Kind::Io);
        assert!(missing.to_string().contains("none.safetensors"), "{missing}");
        let path = folder.path().join("text.safetensors");
        std::fs::write(&path, "hello, world").unwrap();
        let corrupt = state.load(&path).unwrap_err();
        assert_eq!(corrupt.kind(), Kind::Corrupt);
        assert!(corrupt.to_string().contains("text.safetensors"), "{corrupt}");
        let full = sample([1.0, 2.0], 3.0);
        full.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        assert_eq!(state.load(&path).unwrap_err().kind(), Kind::Corrupt);
        let nowhere = full.save(&folder.path().join("no/such/folder/w.safetensors")).unwrap_err();
        assert!(nowhere.to_string().contains("no/such/folder"), "{nowhere}");
    }

    #[test]
    fn the_digest_sees_one_bit_one_name_and_one_shape() {
        let digest = |name: &str, tensor: Tensor| {
            let mut state = State::default();
            let _ = state.parameter(name, tensor);
            state.digest().unwrap()
        };
        let base = digest("a", tensor(&[0.0, 1.0]));
        assert_eq!(base.len(), 64);
        assert_eq!(base, digest("a", tensor(&[0.0, 1.0])));
        assert_ne!(base, digest("a", tensor(&[-0.0, 1.0])), "equal in value, not in bits");
        assert_ne!(base, digest("b", tensor(&[0.0, 1.0])));
        assert_ne!(base, digest("a", tensor(&[0.0, 1.0]).reshape([2, 1])));
    }

    #[test]
    fn a_digest_without_buffers_sees_parameters_alone() {
        let digest = |a, b, n: i64| {
            let state = sample([a, 2.0], b);
            let _ = state.get("n").unwrap().shallow_clone().fill_(n);
            state.digest_without_buffers().unwrap()
        };
        assert_eq!(digest(1.0, 3.0, 7), digest(1.0, 3.0, 8));
        assert_ne!(digest(1.0, 3.0, 7), digest(9.0, 3.0, 7));
        assert_ne!(digest(1.0, 3.0, 7), digest(1.0, 9.0, 7), "a frozen parameter is no buffer");
    }

    #[test]
    fn a_model_without_parameters_has_a_state_too() {
        let state = State::default();
        assert_eq!(state.parameters().count(), 0);
        state.copy_from(&[]).unwrap();
        assert_eq!(state.digest().unwrap(), State::default().digest().unwrap());
        let path = tempfile::tempdir().unwrap().keep().join("empty.safetensors");
        state.save(&path).unwrap();
        state.load(&path).unwrap();
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
