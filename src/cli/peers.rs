//! PyTorch's own engines, started as workers: where their interpreter and their scripts are.

use crate::error::{Error, Kind, Result};
use crate::launch::Program;
use std::path::{Path, PathBuf};

/// Link to the environment that `./setup --peers` makes.
const ENVIRONMENT: &str = ".peers";

/// The worker of the peers, in Python.
const SCRIPT: &str = "peers/worker.py";

/// The peers' worker, or an error that says what is missing.
pub(crate) fn program() -> Result<Program> {
    let root = root();
    let (python, script) = (root.join(ENVIRONMENT).join("bin/python"), root.join(SCRIPT));
    for path in [&python, &script] {
        if !path.is_file() {
            return Err(Error::new(
                Kind::Unavailable,
                format!("PyTorch's engines cannot run: there is no `{}`", path.display()),
            )
            .hint("run `./setup --peers` in the project's folder (about 5 GB on disk)"));
        }
    }
    Ok(Program { path: python, args: vec![script.into()], set: Vec::new(), unset: Vec::new() })
}

/// The project's folder: the working folder if it is one, else the one this program was built in.
fn root() -> PathBuf {
    let here = Path::new(".");
    let root = if here.join(SCRIPT).is_file() { here } else { Path::new(env!("CARGO_MANIFEST_DIR")) };
    // Python is started by an absolute path, because its environment is found from it.
    root.canonicalize().unwrap_or_else(|_| root.to_owned())
}
