//! node (the rpc helper's).
