//! The write-ahead log (the raft helper's).
