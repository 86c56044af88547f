//! Leases: what is granted, which keys hang on it, and, on the leader, when it runs out (the rpc helper's; `lease/lessor.rs`).
