// Decisions about a libtorch folder, without I/O: used by build.rs, by src/torch/version.rs and, with
// tests, by tests/build_libtorch.rs.

/// First and last minor release of 2.x that were tried (ARCHITECTURE.md, "Building").
pub(crate) const MINORS: std::ops::RangeInclusive<u32> = 9..=11;

/// The version a libtorch folder states: `version.py` of a wheel first, then `build-version` of an archive.
pub(crate) fn version_in(version_py: Option<&str>, build_version: Option<&str>) -> Option<String> {
    let quoted = version_py.and_then(|text| {
        let (_, rest) = text.lines().find_map(|line| line.strip_prefix("__version__")?.split_once('\''))?;
        Some(rest.split_once('\'')?.0.to_owned())
    });
    quoted.or_else(|| build_version.map(|text| text.trim().to_owned())).filter(|version| !version.is_empty())
}

/// Whether the engines build and run with this version; the refusal says what to do.
pub(crate) fn check_version(version: &str) -> Result<(), String> {
    let number = version.split('+').next().unwrap_or(version);
    let mut parts = number.split('.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part[..digits].parse::<u32>().ok()
    });
    let (major, minor) = (parts.next().flatten(), parts.next().flatten());
    match (major, minor) {
        (Some(2), Some(minor)) if MINORS.contains(&minor) => Ok(()),
        _ => Err(format!(
            "libtorch {version} is not supported: this program needs 2.{} to 2.{}, any patch release; \
             run `./setup` to get one",
            MINORS.start(),
            MINORS.end()
        )),
    }
}

/// Which C++ string ABI a library was compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abi {
    /// `_GLIBCXX_USE_CXX11_ABI=1`, what compilers have defaulted to since 2015.
    Cxx11,
    /// `_GLIBCXX_USE_CXX11_ABI=0`: links to nothing we compile.
    Old,
}

/// Read from the symbols of `libc10.so`: every function with a string in its signature has `__cxx11`
/// in its mangled name under the new ABI, and none has under the old one.
pub(crate) fn abi_of(libc10: &[u8]) -> Abi {
    let needle = b"__cxx11";
    if libc10.windows(needle.len()).any(|window| window == needle) { Abi::Cxx11 } else { Abi::Old }
}

/// Whether code of ours can be linked to it; the refusal says what to do.
pub(crate) fn check_abi(abi: Abi) -> Result<(), String> {
    match abi {
        Abi::Cxx11 => Ok(()),
        Abi::Old => Err("this libtorch was compiled for the old C++ string ABI (_GLIBCXX_USE_CXX11_ABI=0) and \
             would not link; run `./setup`, or use an archive named `libtorch-cxx11-abi-...` or a wheel of 2.9 or later"
            .to_owned()),
    }
}
