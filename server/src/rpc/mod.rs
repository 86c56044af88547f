//! etcd services (the rpc helper's; `watch.rs` is the watch helper's).

pub mod watch;
