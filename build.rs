//! Checks libtorch and compiles the shim.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_ENGINES").is_some() {
        if let Ok(libtorch) = std::env::var("LIBTORCH") {
            println!("cargo:rustc-link-arg=-Wl,-rpath,{libtorch}/lib");
        }
    }
}
