//! Which libtorch the program was compiled against, and which one the loader gave it.

use super::shim;
use crate::Result;
use crate::error::{Error, Kind};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

/// The libtorch this program was compiled against, as in `2.11.0+cu130`.
pub const BUILT_AGAINST: &str = env!("DP_VS_DDP_LIBTORCH");

/// The libtorch that the loader found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// As in `2.11.0+cu130`. The number is what the library says of itself; what follows the plus
    /// sign comes from the file beside it, and is left out where there is none.
    pub version: String,
    /// The file of `libtorch_cpu`; `None` if the loader would not say.
    pub path: Option<PathBuf>,
}

/// The libtorch that was loaded, asked at run time.
pub fn loaded() -> Result<Loaded> {
    let (mut config, mut path) = (null_mut(), null_mut());
    // SAFETY: both are filled with malloc'd strings or left null, and taken once.
    let (config, path) = unsafe {
        shim::check(shim::dvd_library(&mut config, &mut path))?;
        (shim::take_text(config).unwrap_or_default(), shim::take_text(path).map(PathBuf::from))
    };
    let number = number(&config).ok_or_else(|| {
        Error::new(
            Kind::Torch,
            "the loaded libtorch does not tell its version (TORCH_VERSION in its settings)",
        )
    })?;
    let beside = path.as_deref().and_then(|path| full_version(path.parent()?.parent()?));
    let version = beside.filter(|full| base(full) == number).unwrap_or_else(|| number.to_owned());
    Ok(Loaded { version, path })
}

/// The loaded libtorch's version, or `unknown`.
pub fn version() -> String {
    loaded().map_or_else(|_| "unknown".to_owned(), |loaded| loaded.version)
}

/// `TORCH_VERSION=2.11.0` in the text of `torch.__config__.show()`.
fn number(config: &str) -> Option<&str> {
    let (_, rest) = config.split_once("TORCH_VERSION=")?;
    let end = rest.find(|c: char| c == ',' || c.is_whitespace()).unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

fn base(version: &str) -> &str {
    version.split_once('+').map_or(version, |(number, _)| number)
}

/// The whole version that lies beside a libtorch.
fn full_version(root: &Path) -> Option<String> {
    let read = |name| std::fs::read_to_string(root.join(name)).ok();
    layout::version_in(read("version.py").as_deref(), read("build-version").as_deref())
}

#[path = "../../build/libtorch.rs"]
#[allow(dead_code, reason = "shared with the build script, which uses all of it")]
mod layout;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_read_from_the_settings_text() {
        let text = "  - Build settings: LAPACK_INFO=mkl, TORCH_VERSION=2.9.1, USE_CUDA=1, \n";
        assert_eq!(number(text), Some("2.9.1"));
        assert_eq!(number("nothing of the kind"), None);
        assert_eq!(base("2.11.0+cu130"), "2.11.0");
    }

    #[test]
    fn what_is_loaded_is_what_was_built_against() {
        let loaded = loaded().unwrap();
        assert_eq!(loaded.version, BUILT_AGAINST);
        assert!(loaded.path.unwrap().file_name().unwrap().to_string_lossy().starts_with("libtorch_cpu"));
    }
}
