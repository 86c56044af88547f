//! The `ballast` binary: hands its arguments to [`ballast_server::cli`].

use std::process::ExitCode;

/// Small allocations of many threads dominate here; the system's allocator was measurably slower.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    ballast_server::cli::run(&args)
}
