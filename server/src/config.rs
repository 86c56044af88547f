//! config (the rpc helper's).
