//! main.
fn main() {}
