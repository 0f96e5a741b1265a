//! Checks the libtorch that `./setup` linked, compiles the shim against it, and makes the binaries
//! find it again from any folder.
//!
//! Without the feature `engines` it does nothing: `report` and `doctor` need no libtorch.

#![allow(clippy::print_stdout, reason = "a build script talks to cargo on stdout")]

#[path = "build/libtorch.rs"]
mod libtorch;

use std::path::{Path, PathBuf};

/// Where a wheel, and where an archive, states its version.
const VERSION_FILES: [&str; 2] = ["version.py", "build-version"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/libtorch.rs");
    if std::env::var_os("CARGO_FEATURE_ENGINES").is_none() {
        return;
    }
    if let Err(why) = engines() {
        // Cargo prints it and stops the build.
        println!("cargo::error={}", why.replace('\n', " "));
    }
}

fn engines() -> Result<(), String> {
    let root = locate()?;
    let version = version(&root)?;
    libtorch::check_version(&version)?;
    let c10 = root.join("lib/libc10.so");
    let symbols = std::fs::read(&c10).map_err(|error| format!("cannot read `{}`: {error}", c10.display()))?;
    libtorch::check_abi(libtorch::abi_of(&symbols))?;
    compile_shim(&root)?;
    println!("cargo::rustc-env=DP_VS_DDP_LIBTORCH={version}");
    rpath(&root.join("lib"));
    // pip's NCCL, which is loaded by name at run time where there are CUDA cards.
    let nccl = root.join("../nvidia/nccl/lib");
    if let Ok(nccl) = nccl.canonicalize() {
        rpath(&nccl);
    }
    Ok(())
}

/// Makes programs look for libraries there. One argument a line and no `-Wl,`: a path may hold spaces and commas.
fn rpath(folder: &Path) {
    for argument in ["-Xlinker", "-rpath", "-Xlinker"] {
        println!("cargo::rustc-link-arg={argument}");
    }
    println!("cargo::rustc-link-arg={}", folder.display());
}

/// The real folder behind LIBTORCH, so that an installed binary outlives this checkout's link.
fn locate() -> Result<PathBuf, String> {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let given = std::env::var_os("LIBTORCH").filter(|path| !path.is_empty()).map(PathBuf::from);
    let given = given.ok_or("LIBTORCH is not set; run `./setup` in the root of this checkout first")?;
    if given.is_relative() {
        return Err(format!("LIBTORCH is `{}`; give an absolute path, or run `./setup`", given.display()));
    }
    // The link may point elsewhere next time: watched as it was given. Only what is there, because to
    // cargo a missing file has always changed: everything would be compiled again each time.
    for file in VERSION_FILES.iter().map(|file| given.join(file)).filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    given.canonicalize().map_err(|_| {
        format!(
            "there is no libtorch at `{}`; run `./setup` first, which finds or fetches one",
            given.display()
        )
    })
}

fn version(root: &Path) -> Result<String, String> {
    let [wheel, archive] = VERSION_FILES.map(|name| std::fs::read_to_string(root.join(name)).ok());
    libtorch::version_in(wheel.as_deref(), archive.as_deref()).ok_or_else(|| {
        format!(
            "`{}` holds neither `version.py` nor `build-version`, so it is no libtorch; run `./setup`",
            root.display()
        )
    })
}

fn compile_shim(root: &Path) -> Result<(), String> {
    println!("cargo::rerun-if-changed=src/torch/shim.cpp");
    let include = root.join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .define("AT_PER_OPERATOR_HEADERS", None)
        // Theirs, not ours, are full of warnings.
        .flag("-isystem")
        .flag(&include)
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include"))
        .warnings(true)
        .extra_warnings(true)
        .file("src/torch/shim.cpp")
        .try_compile("dp_vs_ddp_shim")
        .map_err(|error| {
            format!("cannot compile src/torch/shim.cpp; is a C++ compiler (g++) installed? {error}")
        })
}
