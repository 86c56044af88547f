//! etcd v3 wire interface.
