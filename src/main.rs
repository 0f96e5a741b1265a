//! The program: everything is in the library.

fn main() -> std::process::ExitCode {
    dp_vs_ddp::cli::run(std::env::args_os()).into()
}
