//! The build script's decisions about a libtorch folder.

#[path = "../build/libtorch.rs"]
mod libtorch;

use libtorch::{Abi, abi_of, check_abi, check_version, version_in};

#[test]
fn any_patch_release_of_the_tried_minors_is_accepted() {
    for version in ["2.9.0", "2.9.1+cu128", "2.10.0", "2.10.7+cpu", "2.11.0+cu130", "2.11.0a0+gitabc", "2.11"]
    {
        assert_eq!(check_version(version), Ok(()), "{version}");
    }
}

#[test]
fn other_releases_are_refused_by_name_with_what_to_do() {
    for version in ["2.8.1", "2.12.0+cu130", "1.11.0", "3.10.0", "2", "", "new", "2.-9.0", "2.99999999999.0"]
    {
        let why = check_version(version).unwrap_err();
        assert!(why.contains(&format!("libtorch {version} is not supported")), "{why}");
        assert!(why.contains("2.9 to 2.11") && why.contains("./setup"), "{why}");
    }
}

#[test]
fn a_wheel_and_an_archive_state_their_version() {
    let wheel = "from typing import Optional\n\n__all__ = ['__version__', 'debug']\n__version__ = '2.11.0+cu130'\ndebug = False\n";
    assert_eq!(version_in(Some(wheel), None).as_deref(), Some("2.11.0+cu130"));
    assert_eq!(version_in(None, Some("2.9.1+cpu\n")).as_deref(), Some("2.9.1+cpu"));
    assert_eq!(version_in(Some(wheel), Some("2.9.1")).as_deref(), Some("2.11.0+cu130"));
    for nothing in
        [(None, None), (Some("debug = False"), None), (None, Some("\n")), (Some("__version__ = ''"), None)]
    {
        assert_eq!(version_in(nothing.0, nothing.1), None, "{nothing:?}");
    }
}

#[test]
fn the_old_string_abi_is_recognised_by_its_symbols() {
    // c10::detail::torchCheckFail(char const*, char const*, unsigned int, std::string const&)
    let new =
        b"\0_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\0";
    let old = b"\0_ZN3c106detail14torchCheckFailEPKcS2_jRKSs\0";
    assert_eq!((abi_of(new), abi_of(old)), (Abi::Cxx11, Abi::Old));
    assert_eq!(check_abi(Abi::Cxx11), Ok(()));
    let why = check_abi(Abi::Old).unwrap_err();
    assert!(why.contains("_GLIBCXX_USE_CXX11_ABI=0") && why.contains("./setup"), "{why}");
}
